"""The compiled data plane on a switch in this process, with hosts on its ports.

`PoolSwitch` programs the tables as a controller would, by hand: host i is 10.77.0.i with MAC
02:6b:76:00:00:ii on port i. Frames go in and come out as `protocol` encodes them, so a test reads
as "host 2 asks host 1". The oracle of these tests is the architecture, written out case by case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvcast.p4 import artefact, profiles
from kvcast.p4.definitions import RECIRCULATE_RID, Decision, Fill
from kvcast.protocol.messages import ethernet, wire
from kvcast.switchsim import loader
from kvcast.switchsim.control_plane.tables import Table
from kvcast.switchsim.ir import Exact
from kvcast.switchsim.reference.switch import Switch

NAMESPACE = 7
KEY = bytes(range(16))
LEASE_US = 1_000_000
TICK_US = profiles["v1model"].tick_us
DECISIONS = {label: code for code, label in Decision.counted().items()}
FILLS = {label: code for code, label in Fill.counted().items()}


def endpoint(host: int) -> ethernet.Endpoint:
    mac = ethernet.parse_mac(f"02:6b:76:00:00:{host:02x}")
    return ethernet.Endpoint(mac, ethernet.parse_ip(f"10.77.0.{host}"), wire.UDP_PORT)


@dataclass(frozen=True)
class Received:
    """A frame that left the switch: the port, the addresses in it, and the kvcast frame."""

    port: int
    source: ethernet.Endpoint
    destination: ethernet.Endpoint
    frame: wire.Frame


class Entry(NamedTuple):
    """A table entry: key fields and action parameters in the order of P4Info."""

    table: str
    key: tuple[int, ...]
    action: str
    params: tuple[int, ...] = ()


def pool_entries(hosts: int) -> Iterator[Entry]:
    """What a controller writes for `hosts` hosts, where host 1 is every bucket's home, and all may
    read NAMESPACE."""
    yield Entry("l2_forward", (0xFFFFFFFFFFFF,), "flood")
    for host in range(1, hosts + 1):
        at = endpoint(host)
        mac = int.from_bytes(at.mac, "big")
        bit = 1 << (host - 1)
        yield Entry("l2_forward", (mac,), "to_port", (host, bit))
        yield Entry("port_guard", (host, at.ip), "admit", (bit, 256 + host))
        yield Entry("namespace_guard", (host, NAMESPACE), "allow")
        yield Entry("egress_host", (host,), "rewrite", (mac, at.ip, at.udp_port, bit))
    for bucket in range(wire.BUCKETS):
        yield Entry("bucket_home", (bucket, 1), "home")


def pool_groups(hosts: int) -> dict[int, list[tuple[int, int]]]:
    """Multicast groups for `hosts` hosts: replicas (port, replication id) by id."""
    groups = {1: [(host, 0) for host in range(1, hosts + 1)]}
    for host in range(1, hosts + 1):
        groups[256 + host] = [(host, 0), (host, RECIRCULATE_RID)]
    return groups


def resident_entry(
    key: bytes, content: bytes, *, slot: int, generation: int, segment: int = 0
) -> Entry:
    """Admits a segment of the block `content`."""
    return Entry(
        "resident",
        (NAMESPACE, int.from_bytes(key, "big"), segment),
        "resident_at",
        (
            slot,
            generation,
            wire.CELLS.bitmap(len(content), segment),
            wire.digest_of(content),
            len(content),
        ),
    )


class PoolSwitch:
    """The reference engine with `pool_entries`."""

    def __init__(
        self,
        hosts: int = 4,
        *,
        enabled: bool = True,
        heat_threshold: int = 0,
        lease_ticks: int = LEASE_US // TICK_US,
        target: str = "v1model",
    ) -> None:
        self.switch = Switch()
        self.switch.load(loader.load(artefact(target).json.read_bytes(), "kvcast"))
        self.now_us = 10_000_000
        self.hosts = hosts
        self.table("settings").set_default(
            self.action("settings", "set_settings"),
            (int(enabled), lease_ticks, heat_threshold),
        )
        for entry in pool_entries(hosts):
            self.add(entry.table, entry.key, entry.action, *entry.params)
        for group, replicas in pool_groups(hosts).items():
            self.switch.set_multicast_group(group, replicas)

    def table(self, alias: str) -> Table:
        (found,) = (t for name, t in self.switch.tables.items() if name.split(".")[-1] == alias)
        return found

    def action(self, table: str, alias: str) -> str:
        (found,) = (n for n in self.table(table)._names if n.split(".")[-1] == alias)
        return found

    def add(self, table: str, key: Iterable[int], action: str, *params: int) -> int:
        match = [Exact(value) for value in key]
        return self.table(table).add(match, 0, self.action(table, action), params)

    def make_resident(self, key: bytes, content: bytes, *, slot: int = 3, generation: int = 1,
                      segment: int = 0) -> int:  # fmt: skip
        entry = resident_entry(key, content, slot=slot, generation=generation, segment=segment)
        return self.add(entry.table, entry.key, entry.action, *entry.params)

    def send(self, sender: int, receiver: int, frame: wire.Frame) -> list[Received]:
        """Host `sender` sends `frame` to host `receiver`; what the switch puts out for it."""
        wrap = ethernet.Encapsulation(endpoint(sender), endpoint(receiver)).wrap
        return self.send_raw(sender, wrap(wire.encode(frame)))

    def send_raw(self, port: int, data: bytes) -> list[Received]:
        out = []
        for out_port, frame in self.switch.process(port, data, self.now_us):
            datagram = ethernet.unwrap(frame)
            decoded = wire.decode(datagram.payload)
            out.append(Received(out_port, datagram.src, datagram.dst, decoded))
        return out

    def decided(self, name: str) -> int:
        """Packets with this decision since the start."""
        return self._count("decisions", DECISIONS[name])

    def fills(self, name: str) -> int:
        return self._count("fills", FILLS[name])

    def _count(self, table: str, code: int) -> int:
        entry = self.table(table).find([Exact(code)])
        return entry.packets

    def read(
        self, reader: int, *, key: bytes = KEY, home: int = 1, **fields: int
    ) -> list[Received]:
        wanted = fields.pop("wanted", wire.FULL_SEGMENT)
        return self.send(
            reader, home, wire.Frame(wire.OP_READ, NAMESPACE, key, wanted=wanted, **fields)
        )

    def data(
        self, reader: int, content: bytes, chunk: int, *, key: bytes = KEY, home: int = 1,
        segment: int = 0, flags: int = 0, digest: int | None = None,
        chunking: wire.Chunking = wire.CELLS,
    ) -> list[Received]:  # fmt: skip
        at = chunking.start_of(segment) + chunk * chunking.chunk_bytes
        return self.send(
            home,
            reader,
            wire.Frame(
                wire.OP_DATA,
                NAMESPACE,
                key,
                segment=chunking.number(segment),
                flags=flags,
                digest=wire.digest_of(content) if digest is None else digest,
                size=len(content),
                chunk=chunk,
                payload=content[at : at + chunking.chunk_bytes],
            ),
        )

    def answer(self, reader: int, content: bytes, *, key: bytes = KEY) -> list[Received]:
        """The home's whole answer to a READ of segment 0 by `reader`."""
        chunks = wire.CELLS.chunks_of(len(content), 0)
        out = []
        for chunk in range(chunks):
            flags = wire.FLAG_LAST if chunk == chunks - 1 else 0
            out += self.data(reader, content, chunk, key=key, flags=flags)
        return out


def ports_of(out: Iterable[tuple[int, bytes]]) -> list[int]:
    """Ports of raw frames, sorted."""
    return sorted(port for port, _ in out)


def ports(received: Iterable[Received]) -> list[int]:
    return sorted(r.port for r in received)


def content_of(size: int, seed: int = 0) -> bytes:
    """Bytes in which every chunk differs."""
    return b"".join((i * 2654435761 + seed).to_bytes(8, "little") for i in range(size // 8 + 1))[
        :size
    ]
