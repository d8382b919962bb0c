"""The two programs that switches are measured on, with their entries and their traffic.

Owns: what is written into the tables of kvcast's program and of the router (l3), the frames that
each scenario sends, and how either gets into a switch: by hand, or over P4Runtime. Must not know:
how anything is measured.

kvcast's program is set up as its controller would: hosts 1 to 9 on ports 1 to 9, host 1 the home
of every block, host i 10.77.0.i at MAC 02:6b:76:00:00:ii. The router has a thousand routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import finsy as fy
from finsy.proto import p4r
from kvcast.bench import l3
from kvcast.p4 import artefact
from kvcast.p4.definitions import RECIRCULATE_RID
from kvcast.protocol.messages import ethernet, wire
from kvcast.switchsim import loader
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.ir import Exact, Lpm

HOSTS = 9
READERS = range(2, HOSTS + 1)
HOME = 1
NAMESPACE = 7
KEY = bytes(range(16))
RESIDENT_KEY = bytes(range(16, 32))
CONTENT = bytes(i * 131 & 0xFF for i in range(wire.SEGMENT_BYTES))
FRAME_BYTES = 1066
"""An Ethernet frame about as long as one that carries DATA of 1 KiB."""

_READERS_GROUP = 2048
_LEASE_TICKS = 1 << 31
_ROUTES = 1000


@dataclass(frozen=True)
class Entry:
    """A table entry; a key is a number, or (number, prefix length)."""

    table: str
    key: tuple[int | tuple[int, int], ...]
    action: str
    params: tuple[int, ...] = ()


@dataclass(frozen=True)
class Setup:
    """A program and all that is written into it."""

    name: str
    program: Path
    p4info: Path
    entries: tuple[Entry, ...]
    groups: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    defaults: tuple[Entry, ...] = ()


def endpoint(host: int) -> ethernet.Endpoint:
    mac = ethernet.parse_mac(f"02:6b:76:00:00:{host:02x}")
    return ethernet.Endpoint(mac, ethernet.parse_ip(f"10.77.0.{host}"), wire.UDP_PORT)


def _kvcast_entries() -> Iterator[Entry]:
    yield Entry("l2_forward", (0xFFFFFFFFFFFF,), "flood")
    for host in range(1, HOSTS + 1):
        at, bit = endpoint(host), 1 << (host - 1)
        mac = int.from_bytes(at.mac, "big")
        yield Entry("l2_forward", (mac,), "to_port", (host, bit))
        yield Entry("port_guard", (host, at.ip), "admit", (bit, 256 + host))
        yield Entry("namespace_guard", (host, NAMESPACE), "allow")
        yield Entry("egress_host", (host,), "rewrite", (mac, at.ip, at.udp_port, bit))
    for bucket in range(wire.BUCKETS):
        yield Entry("bucket_owner", (bucket, HOME), "owner")
    yield Entry("port_set", (sum(1 << (h - 1) for h in READERS),), "set_group", (_READERS_GROUP,))
    yield Entry(
        "resident",
        (NAMESPACE, int.from_bytes(RESIDENT_KEY, "big"), 0),
        "resident_at",
        (3, 1, wire.segment_bitmap(len(CONTENT), 0), wire.digest_of(CONTENT), len(CONTENT)),
    )


def kvcast(target: str = "v1model") -> Setup:
    """kvcast's program with nine hosts."""
    files = artefact(target)
    groups = {1: [(host, 0) for host in range(1, HOSTS + 1)]}
    for host in range(1, HOSTS + 1):
        groups[256 + host] = [(host, 0), (host, RECIRCULATE_RID)]
    groups[_READERS_GROUP] = [(host, 0) for host in READERS]
    return Setup(
        name="kvcast",
        program=Path(str(files.json)),
        p4info=Path(str(files.p4info)),
        entries=tuple(_kvcast_entries()),
        groups=tuple((number, tuple(replicas)) for number, replicas in groups.items()),
        defaults=(Entry("settings", (), "set_settings", (1, _LEASE_TICKS, 0)),),
    )


def router() -> Setup:
    """The router with a thousand routes, of which ten lead to hosts."""
    entries = []
    for number in range(_ROUTES):
        prefix = (20 << 24) | (number << 8)
        port = 2 + number % 8
        mac = int.from_bytes(endpoint(port).mac, "big")
        entries.append(Entry("ipv4_route", ((prefix, 24),), "to_nexthop", (port, mac, 0x026B76FF)))
    entries.append(
        Entry(
            "ipv4_route",
            ((10 << 24, 8),),
            "to_nexthop",
            (2, int.from_bytes(endpoint(2).mac, "big"), 0x026B76FF),
        )
    )
    return Setup("l3", l3.PROGRAM, l3.P4INFO, tuple(entries))


# --- into a switch --------------------------------------------------------------------------------


def load(switch: Engine, setup: Setup) -> None:
    """Load a program and its entries by hand."""
    switch.load(loader.load(setup.program.read_bytes(), setup.name))
    tables = {name.split(".")[-1]: table for name, table in switch.tables.items()}
    for group, replicas in setup.groups:
        switch.set_multicast_group(group, replicas)
    names = {table: _action_names(switch, name) for table, name in _full_names(switch).items()}
    for entry in setup.entries:
        match = [Lpm(*k) if isinstance(k, tuple) else Exact(k) for k in entry.key]
        tables[entry.table].add(match, 0, names[entry.table][entry.action], entry.params)
    for entry in setup.defaults:
        tables[entry.table].set_default(names[entry.table][entry.action], entry.params)


def _full_names(switch: Engine) -> dict[str, str]:
    return {name.split(".")[-1]: name for name in switch.tables}


def _action_names(switch: Engine, table: str) -> dict[str, str]:
    program = switch.program
    assert program is not None
    spec = switch.tables[table].spec
    actions = (program.actions[number].name for number in spec.actions)
    return {name.split(".")[-1]: name for name in actions}


async def write(client: fy.Switch, setup: Setup) -> None:
    """Write the entries over P4Runtime; the program is the client's to push."""

    def made(entry: Entry, *, default: bool = False) -> fy.P4TableEntry:
        table = client.p4info.tables[entry.table]
        action = client.p4info.actions[entry.action]
        fields = [field.alias for field in table.match_fields]
        keys = [f"{k[0]}/{k[1]}" if isinstance(k, tuple) else k for k in entry.key]
        params = dict(zip([p.name for p in action.params], entry.params, strict=True))
        match = fy.P4TableMatch(dict(zip(fields, keys, strict=True))) if keys else None
        return fy.P4TableEntry(
            entry.table,
            match=match,
            action=fy.P4TableAction(entry.action, **params),
            is_default_action=default,
        )

    for group, replicas in setup.groups:
        await client.write([+fy.P4MulticastGroupEntry(group, replicas=list(replicas))])
    await client.write([+made(entry) for entry in setup.entries])
    if setup.defaults:
        await client.write([~made(entry, default=True) for entry in setup.defaults])


def write_request(client: fy.Switch, kind: Literal["insert", "delete"], count: int) -> Any:
    """A P4Runtime WriteRequest that inserts or deletes `count` addresses in l2_forward."""
    request = p4r.WriteRequest(
        device_id=client.device_id, election_id=p4r.Uint128(low=client.election_id)
    )
    for number in range(count):
        entry = fy.P4TableEntry(
            "l2_forward",
            match=fy.P4TableMatch({"hdr.ethernet.dst": 0x0A_0000_0000 + number}),
            action=fy.P4TableAction("to_port", port=3, port_bit=4),
        )
        change = +entry if kind == "insert" else -entry
        request.updates.append(change.encode_update(client.p4info))
    return request


# --- traffic --------------------------------------------------------------------------------------

Arrival = tuple[int, bytes]
"""A port, and a frame that comes in there."""


def ordinary(count: int = 256, size: int = FRAME_BYTES) -> list[Arrival]:
    """UDP from host 1 to host 2 that is no business of kvcast's; frames differ in their payload."""
    source, sink = endpoint(1), endpoint(2)._replace(udp_port=9)
    wrap = ethernet.Encapsulation(source, sink).wrap
    return [(1, wrap(number.to_bytes(4, "big") + bytes(size - 46))) for number in range(count)]


def routed(count: int = 256, size: int = FRAME_BYTES) -> list[Arrival]:
    """UDP to addresses behind the router's routes to host 2."""
    arrivals = []
    for number in range(count):
        to = ethernet.Endpoint(endpoint(2).mac, (20 << 24) | (number * 8 % _ROUTES << 8) | 5, 9)
        wrap = ethernet.Encapsulation(endpoint(1), to).wrap
        arrivals.append((1, wrap(number.to_bytes(4, "big") + bytes(size - 46))))
    return arrivals


def _to(sender: int, receiver: int, frame: wire.Frame) -> Arrival:
    wrap = ethernet.Encapsulation(endpoint(sender), endpoint(receiver)).wrap
    return sender, wrap(wire.encode(frame))


def reads(key: bytes, readers: Sequence[int]) -> list[Arrival]:
    """A READ of a whole segment by each reader."""
    frame = wire.Frame(wire.OP_READ, NAMESPACE, key, wanted=wire.FULL_SEGMENT)
    return [_to(reader, HOME, frame) for reader in readers]


def data(key: bytes, chunks: Iterable[int], *, last: bool) -> list[Arrival]:
    """DATA of the home to host 2, chunk by chunk; `last` closes the answer."""
    arrivals = []
    for chunk in chunks:
        closes = last and chunk == wire.CHUNKS_PER_SEGMENT - 1
        frame = wire.Frame(
            wire.OP_DATA,
            NAMESPACE,
            key,
            digest=wire.digest_of(CONTENT),
            size=len(CONTENT),
            chunk=chunk,
            flags=wire.FLAG_LAST if closes else 0,
            payload=CONTENT[chunk * wire.CHUNK_BYTES : (chunk + 1) * wire.CHUNK_BYTES],
        )
        arrivals.append(_to(HOME, READERS[0], frame))
    return arrivals


def misses(key: bytes) -> list[Arrival]:
    """The home's MISS to host 2, which ends what the readers wait for."""
    return [_to(HOME, READERS[0], wire.Frame(wire.OP_MISS, NAMESPACE, key, chunk=1))]
