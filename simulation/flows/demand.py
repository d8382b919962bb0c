"""What a pool's nodes ask of each other, as arrays: requests, and the blocks they must fetch.

Owns: which blocks of a request lie elsewhere, and who is their home. Must not know: links, time
that a fetch takes, or the switch.

A block that a node has written, keeps as home or replica, or has read before is there; the others
are *reads*. Nothing is evicted from a node's memory. So this counts what a pool with room enough
would fetch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from kvcast.controller.core.placement import place
from kvcast.protocol.messages.wire import bucket_of
from kvcast.simulation.flows.networks import Ints
from kvcast.workloads.generators import Request
from kvcast.workloads.traces import TraceLine
from numpy.typing import NDArray

NS = 1_000_000_000


@dataclass(frozen=True)
class Demand:
    """Requests and reads. Shapes: (requests,), (reads,) and (blocks,); times in nanoseconds.

    Reads are sorted by request, then by node, then by their order in the prompt. `request_after`:
    the request that must have ended first, or -1.
    """

    nodes: int
    request_at: Ints
    request_after: Ints
    request_jitter: Ints
    request_gather: Ints
    read_request: Ints
    read_node: Ints
    read_block: Ints
    read_home: Ints
    block_bytes: Ints

    @property
    def read_bytes(self) -> Ints:
        """Bytes of each read, shape (reads,)."""
        return self.block_bytes[self.read_block]

    @property
    def distinct_bytes(self) -> int:
        """Bytes of the different blocks that are read."""
        return int(self.block_bytes[np.unique(self.read_block)].sum())

    def reads_where(self, keep: NDArray[np.bool_]) -> Demand:
        """The same requests with only these reads, mask of shape (reads,)."""
        return replace(
            self,
            read_request=self.read_request[keep],
            read_node=self.read_node[keep],
            read_block=self.read_block[keep],
            read_home=self.read_home[keep],
        )


def as_begun(demand: Demand, begun_ns: Mapping[tuple[int, int], int]) -> Demand:
    """The same reads, with each get (of a request on a node) a request of its own, that begins when
    it did: `begun_ns` by (request, node); reads of others are left out."""
    get = demand.read_request * demand.nodes + demand.read_node
    keep = np.isin(get, [request * demand.nodes + node for request, node in begun_ns])
    names, number = np.unique(get[keep], return_inverse=True)
    pairs = list(
        zip((names // demand.nodes).tolist(), (names % demand.nodes).tolist(), strict=True)
    )
    at = np.array([begun_ns[pair] for pair in pairs], np.int64)
    zeros = np.zeros(len(pairs), np.int64)
    return replace(
        demand.reads_where(keep),
        request_at=at,
        request_after=zeros - 1,
        request_jitter=zeros,
        request_gather=demand.request_gather[names // demand.nodes],
        read_request=number.astype(np.int64),
    )


def columns(table: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """The four columns of rows (request, node, block, home), shape (reads, 4)."""
    request, node, block, home = np.ascontiguousarray(table.T)
    return request, node, block, home


def node_names(nodes: int) -> list[str]:
    """As a star names them."""
    return [f"node-{number}" for number in range(1, nodes + 1)]


def demand_of(
    requests: Sequence[Request], nodes: int, block_bytes: int, *, replicas: int = 1
) -> Demand:
    """The demand of requests in order of time, with the pool's own placement of keys on nodes."""
    names = node_names(nodes)
    number_of = {name: number for number, name in enumerate(names)}
    homes = [tuple(number_of[name] for name in row) for row in place(names, replicas + 1)]
    index_of = {request.number: index for index, request in enumerate(requests)}
    blocks: dict[tuple[str, bytes], int] = {}
    held: set[tuple[int, int]] = set()
    written: set[int] = set()
    rows: list[tuple[int, int, int, int]] = []
    for index, request in enumerate(requests):
        names_of = [(request.namespace, key) for key in request.keys]
        numbers = [blocks.setdefault(name, len(blocks)) for name in names_of]
        known = next((n for n, b in enumerate(numbers) if b not in written), len(numbers))
        for node in request.group or (request.node,):
            for (_, key), block in zip(names_of[:known], numbers[:known], strict=True):
                if (node, block) not in held:
                    held.add((node, block))
                    rows.append((index, node, block, homes[bucket_of(key)][0]))
        if request.writes:
            for (_, key), block in zip(names_of[known:], numbers[known:], strict=True):
                written.add(block)
                held.add((request.node, block))
                held.update((home, block) for home in homes[bucket_of(key)])
    table = np.array(rows, np.int64).reshape(-1, 4)
    return Demand(
        nodes,
        np.array([round(r.time_s * NS) for r in requests], np.int64),
        np.array([index_of.get(r.after, -1) if r.after is not None else -1 for r in requests]),
        np.array([round(r.jitter_s * NS) for r in requests], np.int64),
        np.array([r.gather_ms * 1_000_000 for r in requests], np.int64),
        *columns(table),
        np.full(len(blocks), block_bytes, np.int64),
    )


ROUND_S = 60.0
"""How long a trace takes at least before it is played again."""


class TraceCopies:
    """A trace that many groups of users play at once, each begun at a place of its own.

    The trace goes round and round, each time with new blocks, and no sooner than after `ROUND_S`:
    how often what is shorter would come, it does not say. `shared`: this share of the groups use
    the blocks of group 0, at their own times (one prompt library); the others have nothing in
    common. Requests go to nodes by turns. There are so many nodes that a node hardly ever gets a
    block a second time: each use of a block but its first is a read (a property of this class, to
    be kept in mind with few nodes).
    """

    def __init__(
        self,
        lines: Sequence[TraceLine],
        nodes: int,
        block_bytes: int,
        *,
        copies: int = 1,
        shared: float = 0.0,
        seed: int = 1,
    ) -> None:
        rng = np.random.default_rng(seed)
        lines = [line for line in lines if line.hash_ids]
        self.nodes, self.block_bytes, self.copies = nodes, block_bytes, copies
        self._at = np.array([line.timestamp for line in lines], np.float64) * 1e6
        self._at = self._at - self._at[0]
        self._span = max(ROUND_S * NS, float(self._at[-1]) * (1 + 1 / len(lines)))
        ids = [np.array(list(dict.fromkeys(line.hash_ids)), np.int64) for line in lines]
        lengths = np.array([len(one) for one in ids])
        _, flat = np.unique(np.concatenate(ids), return_inverse=True)
        _, first = np.unique(flat, return_index=True)
        reads = np.ones(len(flat), bool)
        reads[first] = False
        self._blocks = int(flat.max()) + 1
        self._read_block = flat[reads]
        line_of = np.repeat(np.arange(len(lines)), lengths)
        self._count = np.bincount(line_of[reads], minlength=len(lines))
        self._begins = np.cumsum(self._count) - self._count
        self._starts = rng.uniform(0, self._span, copies)
        self._library = np.where(rng.random(copies) < shared, 0, np.arange(copies))

    @property
    def reads_per_s(self) -> float:
        """Of all copies together; those included that their home has itself."""
        return len(self._read_block) * self.copies / (self._span / NS)

    def between(self, from_s: float, to_s: float) -> Demand:
        """What is asked for in that time; times count from `from_s`."""
        begin, end = from_s * NS, to_s * NS
        parts = []
        for turn in range(int(begin // self._span), int(end // self._span) + 2):
            # Each copy's lines in the window are one run of the sorted times.
            offset = turn * self._span - self._starts
            low = np.searchsorted(self._at, begin - offset)
            high = np.searchsorted(self._at, end - offset)
            count = high - low
            copy = np.repeat(np.arange(self.copies), count)
            line = np.arange(len(copy)) - np.repeat(np.cumsum(count) - count - low, count)
            parts.append((self._at[line] + offset[copy] - begin, line, copy, copy * 0 + turn))
        at, line, copy, turn_of = (
            np.concatenate([part[column] for part in parts]) for column in range(4)
        )
        order = np.argsort(at, kind="stable")
        at, line, copy, turn_of = (
            at[order].astype(np.int64),
            line[order],
            copy[order],
            turn_of[order],
        )
        count = self._count[line]
        request = np.repeat(np.arange(len(at)), count)
        within = np.arange(len(request)) - np.repeat(np.cumsum(count) - count, count)
        world = (self._library[copy] * (1 << 12) + turn_of)[request]
        name = world * self._blocks + self._read_block[self._begins[line][request] + within]
        _, block = np.unique(name, return_inverse=True)
        home = mix(name) % self.nodes
        node = (np.arange(len(at)) % self.nodes)[request]
        zeros = np.zeros(len(at), np.int64)
        blocks = int(block.max(initial=-1)) + 1
        demand = Demand(
            self.nodes,
            at,
            zeros - 1,
            zeros,
            zeros,
            request,
            node,
            block.astype(np.int64),
            home,
            np.full(blocks, self.block_bytes, np.int64),
        )
        return demand.reads_where(home != node)


def mix(values: Ints) -> Ints:
    """A 62-bit hash of integers (the finaliser of splitmix64)."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)
