"""Networks of hosts and switches as arrays of directed links.

Owns: the four topologies, which links a block takes from one host to another, and each link's
rate. Must not know: what travels, or when.

All are folded Clos networks: a path goes up from the home's edge switch and down to the reader's.
Which of several equal ways a block takes depends on the block alone (ECMP by a hash), so copies
for different readers part as late as they can. Every host has one link each way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NONE = -1
"""No link: this pair of hosts needs fewer hops."""


class NetworkError(ValueError):
    """A network that cannot be built; the text says why."""


@dataclass
class Fabric:
    """Hosts, edge switches, and directed links.

    `edge`: the edge switch of each host, shape (hosts,). `up`, `down`: each host's links to and
    from it. `bits_per_s`: each link's rate. `middle(home_edge, reader_edge, path_hash)`: the links
    between two edge switches, one array a hop, NONE where a pair needs none.
    """

    name: str
    edge: Ints
    up: Ints
    down: Ints
    bits_per_s: NDArray[np.float64]
    middle: Callable[[Ints, Ints, Ints], list[Ints]]
    ends: list[tuple[str, str]] = field(repr=False)
    """What each link leads from and to: a host ("h0") or a switch ("e0", …)."""

    @property
    def hosts(self) -> int:
        return len(self.edge)

    @property
    def edges(self) -> int:
        return int(self.edge.max()) + 1


class _Links:
    """Numbers links as they are made."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []
        self.rates: list[float] = []

    def add(self, tail: str, head: str, bits_per_s: float) -> int:
        number = len(self.rates)
        self.rates.append(bits_per_s)
        self.ends.append((tail, head))
        return number

    def hosts(self, edge: Ints, bits_per_s: float) -> tuple[Ints, Ints]:
        """A link up and a link down for every host; the hosts' edge switches are given."""
        ups, downs = [], []
        for host, switch in enumerate(edge.tolist()):
            ups.append(self.add(f"h{host}", f"e{switch}", bits_per_s))
            downs.append(self.add(f"e{switch}", f"h{host}", bits_per_s))
        return np.array(ups, np.int64), np.array(downs, np.int64)


def star(hosts: int, bits_per_s: float) -> Fabric:
    """One switch; what the switch program does today (with at most 32 hosts)."""
    _check(hosts, bits_per_s)
    links = _Links()
    edge = np.zeros(hosts, np.int64)
    up, down = links.hosts(edge, bits_per_s)
    return Fabric("star", edge, up, down, np.array(links.rates), lambda *_: [], links.ends)


def leaf_spine(
    hosts: int,
    bits_per_s: float,
    *,
    hosts_per_leaf: int = 32,
    oversubscription: float = 1.0,
    spines: int = 8,
) -> Fabric:
    """Leaves of `hosts_per_leaf` hosts, each with one link to each of `spines` spines; a leaf's
    links up carry 1/oversubscription of what its hosts' links do."""
    return _two_levels(
        "leaf-spine",
        np.arange(hosts) // hosts_per_leaf,
        bits_per_s,
        spines,
        bits_per_s * hosts_per_leaf / spines / oversubscription,
    )


def rail_optimised(
    hosts: int,
    bits_per_s: float,
    *,
    rails: int = 8,
    servers_per_rail: int = 32,
    oversubscription: float = 1.0,
    spines: int = 8,
) -> Fabric:
    """Each "host" is one of a server's `rails` cards; card i of a group of servers is on the
    group's rail switch i, and rail switches meet in the spines. Cards of one rail are neighbours,
    cards of one server are not (what servers pass on inside is not seen)."""
    card = np.arange(hosts)
    server, rail = card // rails, card % rails
    edge = (server // servers_per_rail) * rails + rail
    _, edge = np.unique(edge, return_inverse=True)
    return _two_levels(
        "rail-optimised",
        edge.astype(np.int64),
        bits_per_s,
        spines,
        bits_per_s * servers_per_rail / spines / oversubscription,
    )


def _two_levels(
    name: str, edge: Ints, host_bits_per_s: float, spines: int, spine_bits_per_s: float
) -> Fabric:
    _check(len(edge), host_bits_per_s)
    if spines < 1 or not spine_bits_per_s > 0:
        raise NetworkError("there is at least one spine, with links of a positive rate")
    links = _Links()
    up, down = links.hosts(edge, host_bits_per_s)
    leaves = int(edge.max()) + 1
    rise = np.full((leaves, spines), NONE, np.int64)
    fall = rise.copy()
    for leaf in range(leaves):
        for spine in range(spines):
            rise[leaf, spine] = links.add(f"e{leaf}", f"s{spine}", spine_bits_per_s)
            fall[leaf, spine] = links.add(f"s{spine}", f"e{leaf}", spine_bits_per_s)

    def middle(home_edge: Ints, reader_edge: Ints, path_hash: Ints) -> list[Ints]:
        spine = path_hash % spines
        apart = home_edge != reader_edge
        return [
            np.where(apart, rise[home_edge, spine], NONE),
            np.where(apart, fall[reader_edge, spine], NONE),
        ]

    return Fabric(name, edge, up, down, np.array(links.rates), middle, links.ends)


def fat_tree(hosts: int, bits_per_s: float) -> Fabric:
    """The smallest k-ary fat tree with room for so many hosts (Al-Fares et al., SIGCOMM 2008):
    k pods of k/2 edge and k/2 aggregation switches, (k/2)² cores, all links of one rate."""
    _check(hosts, bits_per_s)
    half = 1
    while 2 * half**3 < hosts:
        half += 1
    links = _Links()
    edge = np.arange(hosts) // half
    up, down = links.hosts(edge, bits_per_s)
    edges = int(edge.max()) + 1
    pods = -(-edges // half)
    rise = np.full((edges, half), NONE, np.int64)
    fall = rise.copy()
    top_rise = np.full((pods * half, half), NONE, np.int64)
    top_fall = top_rise.copy()
    for number in range(edges):
        for place in range(half):
            aggregation = f"a{number // half * half + place}"
            rise[number, place] = links.add(f"e{number}", aggregation, bits_per_s)
            fall[number, place] = links.add(aggregation, f"e{number}", bits_per_s)
    for number in range(pods * half):
        for place in range(half):
            core = f"c{number % half * half + place}"
            top_rise[number, place] = links.add(f"a{number}", core, bits_per_s)
            top_fall[number, place] = links.add(core, f"a{number}", bits_per_s)

    def middle(home_edge: Ints, reader_edge: Ints, path_hash: Ints) -> list[Ints]:
        place, core = path_hash % half, path_hash // half % half
        apart = home_edge != reader_edge
        far = home_edge // half != reader_edge // half
        here, there = home_edge // half * half + place, reader_edge // half * half + place
        return [
            np.where(apart, rise[home_edge, place], NONE),
            np.where(far, top_rise[here, core], NONE),
            np.where(far, top_fall[there, core], NONE),
            np.where(apart, fall[reader_edge, place], NONE),
        ]

    return Fabric("fat-tree", edge, up, down, np.array(links.rates), middle, links.ends)


def _check(hosts: int, bits_per_s: float) -> None:
    if hosts < 1:
        raise NetworkError("a network has at least one host")
    if not bits_per_s > 0:
        raise NetworkError(f"a rate of {bits_per_s} bits a second is not positive")


TOPOLOGIES: dict[str, Callable[[int, float], Fabric]] = {
    "star": star,
    "leaf-spine": leaf_spine,
    "fat-tree": fat_tree,
    "rail-optimised": rail_optimised,
}
