"""Program: what the switch should hold, from what the pool is.

Owns: the tables, actions, and multicast group ids that the controller writes (names as in the P4
program), and how nodes, buckets, groups and residents turn into them. A pure function. Must not
know: what the switch holds now, or how it is written.

Multicast groups, each a copy list:

| ids      | copies to                                | used for                                  |
|----------|------------------------------------------|-------------------------------------------|
| 1        | all host ports                           | floods; any set of ports (egress filters) |
| 64 + n   | a port to be recirculated by (loop)      | filling and serving, where a target asks  |
| 256 + p  | port p, and once more to be recirculated | serving port p from a resident            |
| 1024 + i | reader group i's ports, and recirculated | serving a reader group                    |
| 2048 + j | the ports of recurring set j             | DATA for exactly that set                 |

Hosts' ports are numbered from 1, as are the bits of a bitmap; what the switch calls them, and
whether a serving group recirculates or a loop group does, is the target's.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcast.controller.core.namespaces import Group
from kvcast.controller.core.node import Address
from kvcast.controller.core.reconcile import (
    PORT_SET,
    SETTINGS,
    ActionCall,
    DigestConfig,
    EntryKey,
    Replica,
    SwitchState,
    joined,
)
from kvcast.controller.core.residency import Resident
from kvcast.p4.definitions import ALL_PORTS_GROUP, RECIRCULATE_RID
from kvcast.p4.targets import MAX_PORTS
from kvcast.protocol.messages import roce
from kvcast.protocol.messages.control import NamespaceInfo
from kvcast.protocol.messages.wire import BUCKETS

L2_FORWARD = "l2_forward"
IPV4_ROUTE = "ipv4_route"
PORT_GUARD = "port_guard"
NAMESPACE_GUARD = "namespace_guard"
BUCKET_HOME = "bucket_home"
READER_GROUP = "reader_group"
RESIDENT = "resident"
EGRESS_HOST = "egress_host"
RDMA_TARGET = "rdma_target"
LANDING_ZONE = "landing_zone"
OWNED_TABLES = (
    L2_FORWARD,
    IPV4_ROUTE,
    PORT_GUARD,
    NAMESPACE_GUARD,
    BUCKET_HOME,
    READER_GROUP,
    RESIDENT,
    PORT_SET,
    EGRESS_HOST,
    RDMA_TARGET,
    LANDING_ZONE,
)
"""Tables whose entries are the controller's alone; `settings` has only its default action."""

DECISIONS = "decisions"
FILLS = "fills"
RESIDENT_HITS = "resident_hits"
"""Counters: of two tables of constant entries, by Decision and by Fill; and by slot."""

HEAT_DIGEST = "heat_t"
HEAT_DIGEST_CONFIG = DigestConfig(
    max_list_size=64, max_timeout_ns=50_000_000, ack_timeout_ns=1_000_000_000
)

SERVE_GROUP_BASE = 256
READER_GROUP_BASE = 1024
PORT_SET_BASE = 2048
BROADCAST_MAC = 0xFFFFFFFFFFFF
COALESCE_LEASE_S = 4.0
"""How long a READ waits in the switch, unless an operator says otherwise."""


_HOME = ActionCall("home")
_ALLOW = ActionCall("allow")


@dataclass(frozen=True)
class Host:
    """A node as the switch sees it."""

    node_id: str
    address: Address

    @property
    def port(self) -> int:
        return self.address.switch_port

    @property
    def port_bit(self) -> int:
        return port_bit(self.address.switch_port)


@dataclass(frozen=True)
class Settings:
    """The switch program's settings; `enabled` False makes it a plain switch.

    `lease_ticks`: how long a pending entry may wait for DATA, in ticks of the target (64 µs);
    `heat_threshold`: READs of a segment in a window that make it worth a digest; `router_mac`:
    the address to which hosts send what is to be routed, None for a switch that does not route;
    `device_ports`: the switch's number of host port 1, 2, …; `serve_goes_round`: serving groups
    hold the copy that is recirculated; `loop_groups`: (group, device port) of groups that hold
    nothing else; `rdma_address`: the IPv4 address to which homes send what is written into all
    readers' landing zones, None = shared answers never go by RDMA.
    """

    enabled: bool
    lease_ticks: int
    heat_threshold: int
    router_mac: str | None = None
    device_ports: tuple[int, ...] = tuple(range(1, MAX_PORTS + 1))
    serve_goes_round: bool = True
    loop_groups: tuple[tuple[int, int], ...] = ()
    rdma_address: str | None = None

    def device_port(self, port: int) -> int:
        """What the switch calls a host's port."""
        return self.device_ports[port - 1]


def port_bit(port: int) -> int:
    """The port's bit in a 32-bit port bitmap; ports are 1 to MAX_PORTS."""
    return 1 << (port - 1)


def ports_of(bits: int) -> list[int]:
    """The ports whose bits are set, ascending."""
    return [port for port in range(1, MAX_PORTS + 1) if bits & port_bit(port)]


@functools.lru_cache(maxsize=4096)
def mac_number(mac: str) -> int:
    return int(mac.replace(":", ""), 16)


@functools.lru_cache(maxsize=4096)
def ip_number(ip: str) -> int:
    return int(ipaddress.IPv4Address(ip))


def desired_state(
    settings: Settings,
    hosts: Sequence[Host],
    bucket_homes: Sequence[Sequence[str]],
    namespaces: Iterable[NamespaceInfo],
    groups: Iterable[Group],
    residents: Iterable[Resident],
    port_sets: Mapping[int, int],
) -> SwitchState:
    """Everything that the switch should hold: `membership_state` and `traffic_state`."""
    membership = membership_state(settings, hosts, bucket_homes, namespaces, groups)
    return joined(membership, traffic_state(settings, residents, port_sets))


def membership_state(
    settings: Settings,
    hosts: Sequence[Host],
    bucket_homes: Sequence[Sequence[str]],
    namespaces: Iterable[NamespaceInfo],
    groups: Iterable[Group],
) -> SwitchState:
    """What the switch should hold of nodes and namespaces, which is nearly everything.

    `hosts`: every known node; `bucket_homes`: for each bucket the node ids that may answer for
    it; `namespaces`: each with the nodes that may use it (all, if it names none).
    """
    state = SwitchState()
    _forwarding(state, settings, hosts)
    state.entries[SETTINGS, ()] = ActionCall(
        "set_settings",
        (int(settings.enabled), settings.lease_ticks, settings.heat_threshold),
    )
    if not settings.enabled:
        return state
    entries = state.entries
    for loop_group, loop_port in settings.loop_groups:
        state.groups[loop_group] = frozenset({(loop_port, RECIRCULATE_RID)})
    for host in hosts:
        a = host.address
        port = settings.device_port(host.port)
        serve = SERVE_GROUP_BASE + host.port
        state.groups[serve] = _serving_copies(settings, [port])
        entries[PORT_GUARD, (port, ip_number(a.ip))] = ActionCall("admit", (host.port_bit, serve))
        entries[EGRESS_HOST, (port,)] = ActionCall(
            "rewrite", (mac_number(a.mac), ip_number(a.ip), a.udp_port, host.port_bit)
        )
    if settings.rdma_address is not None:
        _landing_zones(entries, settings, settings.rdma_address, hosts)
    users: dict[int, list[Host]] = {}
    ports = {host.node_id: settings.device_port(host.port) for host in hosts}
    everybody = tuple(ports.values())
    for info in namespaces:
        users[info.namespace] = may_use = [
            host for host in hosts if not info.nodes or host.node_id in info.nodes
        ]
        theirs = tuple(ports[host.node_id] for host in may_use) if info.nodes else everybody
        entries.update(users_of(info.namespace, theirs))
    entries.update(_bucket_homes(tuple(map(tuple, bucket_homes)), tuple(ports.items())))
    for group in groups:
        members = [h for h in users.get(group.namespace, ()) if h.node_id in group.nodes]
        _reader_group(state, settings, group, members)
    state.digests[HEAT_DIGEST] = HEAT_DIGEST_CONFIG
    return state


def traffic_state(
    settings: Settings, residents: Iterable[Resident], port_sets: Mapping[int, int]
) -> SwitchState:
    """What the switch should hold of what passes: blocks in its memory, and sets of ports that
    recur. `port_sets`: port bitmap to its place among them."""
    state = SwitchState()
    if not settings.enabled:
        return state
    for resident in residents:
        state.entries.update(resident_entries(resident))
    for bits, place in port_sets.items():
        state.groups[PORT_SET_BASE + place] = frozenset(
            (settings.device_port(port), 0) for port in ports_of(bits)
        )
        state.entries[PORT_SET, (bits,)] = ActionCall("set_group", (PORT_SET_BASE + place,))
    return state


@functools.lru_cache(maxsize=4096)
def users_of(namespace: int, ports: tuple[int, ...]) -> dict[EntryKey, ActionCall]:
    """Who may use a namespace."""
    return dict.fromkeys([(NAMESPACE_GUARD, (port, namespace)) for port in ports], _ALLOW)


def _landing_zones(
    entries: dict[EntryKey, ActionCall], settings: Settings, address: str, hosts: Sequence[Host]
) -> None:
    """Lets hosts with a landing zone write into each other's, by the switch alone."""
    pool = ip_number(address)
    entries[RDMA_TARGET, (pool, roce.POOL_QUEUE_PAIR)] = ActionCall("to_pool")
    zones = [host for host in hosts if host.address.zone_queue_pair]
    for reader in zones:
        a = reader.address
        target = roce.Target(pool, ip_number(a.ip), a.zone_queue_pair, a.zone_key)
        entries[RDMA_TARGET, (target.destination, target.queue_pair)] = ActionCall("to_zone")
        for home in zones:
            change = _compensation(ip_number(home.address.ip), target)
            ports = settings.device_port(home.port), settings.device_port(reader.port)
            entries[LANDING_ZONE, ports] = ActionCall(
                "readdress",
                (mac_number(a.mac), *target, *change, reader.port_bit),
            )


@functools.lru_cache(maxsize=4096)
def _compensation(home: int, target: roce.Target) -> roce.Compensation:
    """What leaves a packet right that `home` sent to the pool's address, and is made `target`'s."""
    sent = roce.Target(home, target.source, roce.POOL_QUEUE_PAIR, roce.POOL_KEY)
    return roce.compensation(sent, target)


@functools.lru_cache(maxsize=2)
def _bucket_homes(
    homes: tuple[tuple[str, ...], ...], ports: tuple[tuple[str, int], ...]
) -> dict[EntryKey, ActionCall]:
    """Who may answer for which bucket. By far the most entries, and they change the least, so a
    plan that only admits a block need not make them anew, and one that gives a block replicas makes
    those of its bucket."""
    port_of = dict(ports)
    entries: dict[EntryKey, ActionCall] = {}
    for bucket, node_ids in enumerate(homes):
        entries.update(homes_of_bucket(bucket, tuple(port_of[node_id] for node_id in node_ids)))
    return entries


@functools.lru_cache(maxsize=2 * BUCKETS)
def homes_of_bucket(bucket: int, ports: tuple[int, ...]) -> dict[EntryKey, ActionCall]:
    """Who may answer for this bucket. All have one action, so that it is compared by identity."""
    return dict.fromkeys([(BUCKET_HOME, (bucket, port)) for port in ports], _HOME)


def _forwarding(state: SwitchState, settings: Settings, hosts: Sequence[Host]) -> None:
    entries = state.entries
    if hosts:
        state.groups[ALL_PORTS_GROUP] = frozenset(
            (settings.device_port(host.port), 0) for host in hosts
        )
        entries[L2_FORWARD, (BROADCAST_MAC,)] = ActionCall("flood")
    for host in hosts:
        entries[L2_FORWARD, (mac_number(host.address.mac),)] = ActionCall(
            "to_port", (settings.device_port(host.port), host.port_bit)
        )
    if settings.router_mac is not None:
        router = mac_number(settings.router_mac)
        entries[L2_FORWARD, (router,)] = ActionCall("to_router")
        for host in hosts:
            entries[IPV4_ROUTE, ((ip_number(host.address.ip), 32),)] = ActionCall(
                "to_nexthop",
                (
                    settings.device_port(host.port),
                    host.port_bit,
                    mac_number(host.address.mac),
                    router,
                ),
            )


def _serving_copies(settings: Settings, device_ports: Sequence[int]) -> frozenset[Replica]:
    """The copies of a chunk that is served to these ports."""
    return copies_to(tuple(device_ports), goes_round=settings.serve_goes_round)


@functools.lru_cache(maxsize=4096)
def copies_to(device_ports: tuple[int, ...], *, goes_round: bool) -> frozenset[Replica]:
    copies: set[Replica] = {(port, 0) for port in device_ports}
    if goes_round:
        copies.add((device_ports[0], RECIRCULATE_RID))
    return frozenset(copies)


def _reader_group(
    state: SwitchState, settings: Settings, group: Group, members: Sequence[Host]
) -> None:
    """A group's entry and copy list, over those of its nodes that are known and may read."""
    ports = sorted(host.port for host in members)
    if not ports:
        return
    serve = READER_GROUP_BASE + group.ordinal
    state.groups[serve] = _serving_copies(settings, [settings.device_port(port) for port in ports])
    bits = sum(port_bit(port) for port in ports)
    state.entries[READER_GROUP, (group.namespace, group.group)] = ActionCall(
        "set_reader_group", (bits, serve)
    )


def resident_entries(resident: Resident) -> dict[EntryKey, ActionCall]:
    """One entry a segment."""
    block = resident.block
    key = int.from_bytes(block.key, "big")
    return {
        (RESIDENT, (block.namespace, key, segment)): ActionCall(
            "resident_at",
            (slot, resident.generation, resident.chunk_mask(segment), resident.digest,
             resident.size_bytes),
        )
        for segment, slot in enumerate(resident.slots)
    }  # fmt: skip
