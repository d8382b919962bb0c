"""The two programs that switches are measured on, with their entries and their traffic.

Owns: what is written into the tables of kvcast's program and of the router (l3), the frames that
each scenario sends, and how either gets into a switch: by hand, or over P4Runtime. Must not know:
how anything is measured.

kvcast's program is set up by the controller's own code: hosts 1 to 9 on ports 1 to 9, host 1 the
home of every block, host i 10.77.0.i at MAC 02:6b:76:00:00:ii. The router has a thousand routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import finsy as fy
from finsy.proto import p4r
from kvcast.bench import l3
from kvcast.controller.core.node import Address
from kvcast.controller.core.program import Host, Settings, desired_state, port_bit
from kvcast.controller.core.reconcile import ActionCall, EntryChange, SwitchState, Verb, diff
from kvcast.controller.core.residency import Resident
from kvcast.controller.switch.connection import update_of
from kvcast.p4 import artefact
from kvcast.protocol.messages import ethernet, wire
from kvcast.protocol.messages.control import NamespaceInfo
from kvcast.protocol.messages.wire import BlockId
from kvcast.switchsim import loader
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.ir import Exact, Lpm
from kvcast.topologies.star import Star

HOSTS = 9
READERS = range(2, HOSTS + 1)
HOME = 1
NAMESPACE = 7
KEY = bytes(range(16))
RESIDENT_KEY = bytes(range(16, 32))
CONTENT = bytes(i * 131 & 0xFF for i in range(wire.SEGMENT_BYTES))
FRAME_BYTES = 1066
"""An Ethernet frame about as long as one that carries DATA of 1 KiB."""

_LEASE_TICKS = 1 << 31
_ROUTES = 1000


@dataclass(frozen=True)
class Setup:
    """A program and all that is written into it."""

    name: str
    program: Path
    p4info: Path
    state: SwitchState


def endpoint(host: int) -> ethernet.Endpoint:
    mac = ethernet.parse_mac(f"02:6b:76:00:00:{host:02x}")
    return ethernet.Endpoint(mac, ethernet.parse_ip(f"10.77.0.{host}"), wire.UDP_PORT)


def kvcast(target: str = "v1model") -> Setup:
    """kvcast's program with nine hosts."""
    files = artefact(target)
    hosts = [
        Host(h.node_id, Address(h.ip, h.mac, h.switch_port, h.udp_port, h.ip, 1))
        for h in Star.of(HOSTS).hosts
    ]
    resident = Resident(
        BlockId(NAMESPACE, RESIDENT_KEY),
        slots=(3,),
        generation=1,
        digest=wire.digest_of(CONTENT),
        size_bytes=len(CONTENT),
        pinned=True,
        admitted_at=0.0,
    )
    state = desired_state(
        Settings(True, _LEASE_TICKS, heat_threshold=0),
        hosts,
        [[hosts[HOME - 1].node_id]] * wire.BUCKETS,
        [NamespaceInfo(NAMESPACE, "bench", "switch", "1", "bytes")],
        [],
        [resident],
        {sum(port_bit(reader) for reader in READERS): 0},
    )
    state.digests.clear()  # nobody listens
    return Setup("kvcast", Path(str(files.json)), Path(str(files.p4info)), state)


def router() -> Setup:
    """The router with a thousand routes, of which ten lead to hosts."""
    routes = {((20 << 24) | (number << 8), 24): 2 + number % 8 for number in range(_ROUTES)}
    routes[10 << 24, 8] = 2
    state = SwitchState()
    for route, port in routes.items():
        mac = int.from_bytes(endpoint(port).mac, "big")
        state.entries["ipv4_route", (route,)] = ActionCall("to_nexthop", (port, mac, 0x026B76FF))
    return Setup("l3", l3.PROGRAM, l3.P4INFO, state)


# --- into a switch --------------------------------------------------------------------------------


def load(switch: Engine, setup: Setup) -> None:
    """Load a program and its entries by hand."""
    program = loader.load(setup.program.read_bytes(), setup.name)
    switch.load(program)
    tables = {name.split(".")[-1]: table for name, table in switch.tables.items()}
    for group, replicas in setup.state.groups.items():
        switch.set_multicast_group(group, sorted(replicas))
    for (name, keys), call in setup.state.entries.items():
        actions = (program.actions[number].name for number in tables[name].spec.actions)
        action = next(full for full in actions if full.split(".")[-1] == call.name)
        if not keys:
            tables[name].set_default(action, call.params)
            continue
        match = [Lpm(*key) if isinstance(key, tuple) else Exact(key) for key in keys]
        tables[name].add(match, 0, action, call.params)


async def write(client: fy.Switch, setup: Setup) -> None:
    """Write the entries over P4Runtime; the program is the client's to push."""
    changes = diff(SwitchState(), setup.state).upserts
    await client.write([update_of(change, client.p4info) for change in changes])


def write_request(client: fy.Switch, verb: Verb, count: int) -> Any:
    """A P4Runtime WriteRequest that inserts or deletes `count` addresses in l2_forward."""
    request = p4r.WriteRequest(
        device_id=client.device_id, election_id=p4r.Uint128(low=client.election_id)
    )
    for number in range(count):
        key = ("l2_forward", (0x0A_0000_0000 + number,))
        change = EntryChange(verb, key, ActionCall("to_port", (3, 4)))
        request.updates.append(update_of(change, client.p4info).encode_update(client.p4info))
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
