"""Hostile hosts: members of the pool that lie, answer for others, and ask for what is not theirs.

Owns: what such a host sends. Must not know: what stops it. It knows every name and every address,
as the worst of them might. Before it sends what nobody must ever get, it tells the model.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from typing import Final

from kvcast.protocol.links.stream import LinkStream
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    MAX_BULK_MESSAGE_BYTES,
    BulkBlocks,
    BulkGet,
    BulkHello,
    BulkPut,
    CalleeMessage,
    CallerMessage,
    PutHeader,
    WantedBlock,
)
from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint, parse_ip, unwrap
from kvcast.protocol.messages.roce import POOL_KEY, POOL_QUEUE_PAIR, SHARED_CHUNKING, place_of
from kvcast.simulation.agent import SimHost
from kvcast.simulation.cluster import Cluster
from kvcast.simulation.model import Name, ViolationError
from kvcast.simulation.streams import Process, StreamDriver
from kvcast.simulation.zones import POOL_ADDRESS, Target, packet_of

PAUSE_S: Final = 0.02


class HostileKind(enum.Enum):
    """What a hostile host does.

    LIAR: as a home, sends wrong bytes, digests, sizes and chunks of its own blocks. FORGER:
    answers under its own address for blocks that are not its own. SPOOFER: the same, under a true
    home's address, and asks under readers' addresses. TENANT: reads and answers in namespaces to
    which it has no right.
    """

    LIAR = "liar"
    FORGER = "forger"
    SPOOFER = "spoofer"
    TENANT = "tenant"


class Hostile:
    """One hostile host, from `begin` to `end`."""

    def __init__(self, cluster: Cluster, host: SimHost, kind: HostileKind, number: int) -> None:
        self._cluster = cluster
        self._host = host
        self._kind = kind
        self._rng: random.Random = cluster.world.stream(f"fault/{number}/hostile")
        self._active = False

    def begin(self) -> None:
        self._active = True
        self._cluster.hostiles.append(self)
        if self._kind is HostileKind.LIAR:
            # Even when it stops, what it has sent lives on in others' assemblies.
            self._cluster.model.dishonest.add(self._host.number)
            self._host.tamper = self._lie
            return
        if self._kind is HostileKind.FORGER:
            self._host.overhear = self._answer_stray
        self._soon()

    def end(self) -> None:
        self._active = False
        self._cluster.hostiles.remove(self)
        self._host.tamper = self._host.overhear = None

    def _soon(self) -> None:
        self._cluster.world.after(PAUSE_S * self._rng.uniform(0.2, 2.0), self._act)

    def _count(self) -> None:
        self._cluster.world.counts[f"fault.hostile_{self._kind.value}"] += 1

    # --- liar -------------------------------------------------------------------------------

    def _lie(self, data: bytes) -> bytes | None:
        rng = self._rng
        if rng.random() > 0.3 or data[43] != wire.OP_DATA:
            return data
        self._count()
        datagram = unwrap(data)
        frame = wire.decode(datagram.payload)
        payload = bytearray(frame.payload)
        fields = {name: getattr(frame, name) for name in wire.Frame.__struct_fields__}
        lie = rng.randrange(7)
        if lie == 0:
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        elif lie == 1:
            payload[:] = rng.randbytes(len(payload))
        elif lie == 2:
            fields["digest"] = rng.getrandbits(64) | 1
        elif lie == 3:
            fields["size"] = max(1, frame.size + rng.choice((-1024, -1, 1, 1024, 1 << 20)))
        elif lie == 4:
            # Other bytes as another copy: who looks at names only takes them for this one.
            payload[:] = rng.randbytes(len(payload))
            fields["digest"] = rng.getrandbits(64) | 1
        elif lie == 5:
            fields["chunk"] = rng.randrange(64)
        else:
            fields["flags"] = frame.flags ^ wire.FLAG_LAST
        fields["payload"] = bytes(payload)
        return data[:42] + wire.encode(wire.Frame(**fields))

    # --- the others -------------------------------------------------------------------------

    def _act(self) -> None:
        if not self._active:
            return
        cluster, rng = self._cluster, self._rng
        block = rng.choice(cluster.plan.blocks)
        if self._kind is HostileKind.TENANT:
            self._trespass(block.name)
        elif not cluster.model.was_home(self._host.number, block.name[1]):
            for victim in cluster.hosts:
                if victim != self._host.number:
                    self._forge(block.name, victim)
                    self._write(block.name, victim)
        self._soon()

    def strike(self, victim: int, names: list[Name]) -> None:
        """A host begins to read these: be the first to answer."""
        model = self._cluster.model
        for name in names:
            if victim != self._host.number and not model.was_home(self._host.number, name[1]):
                if self._kind in (HostileKind.FORGER, HostileKind.SPOOFER):
                    self._forge(name, victim)
                elif self._kind is HostileKind.TENANT:
                    self._trespass(name)

    def _answer_stray(self, data: bytes) -> None:
        """A READ has come here, perhaps for a bucket that is not ours: answer it at once."""
        if data[43:44] != bytes([wire.OP_READ]):
            return
        try:
            datagram = unwrap(data)
            frame = wire.decode(datagram.payload)
        except wire.WireError:
            return
        name = (frame.namespace, frame.key)
        victim = datagram.src.ip & 0xFF
        if victim == self._host.number or victim not in self._cluster.hosts:
            return
        if not self._cluster.model.was_home(self._host.number, frame.key):
            self._forge(name, victim, tag=frame.tag)

    def _forge(self, name: Name, victim: int, tag: int = 0) -> None:
        """An answer of one chunk to `victim`, with bytes of our own and their true digest."""
        cluster, rng = self._cluster, self._rng
        self._count()
        content = b"forged " + rng.randbytes(rng.randrange(1, 1000))
        digest = wire.digest_of(content)
        cluster.model.forged(self._host.number, name, content)
        namespace, key = name
        flags = wire.FLAG_LAST | rng.choice((0, 0, wire.FLAG_RESIDENT, wire.FLAG_SHARED))
        frame = wire.Frame(
            wire.OP_DATA, namespace, key, 0, flags, digest=digest, size=len(content), tag=tag,
            payload=content,
        )  # fmt: skip
        if rng.random() < 0.2:
            reason = rng.choice((wire.MISS_NOT_FOUND, wire.MISS_NOT_HOME))
            frame = wire.Frame(wire.OP_MISS, namespace, key, chunk=reason, tag=tag)
        source = self._host.options.endpoint
        if self._kind is HostileKind.SPOOFER:
            homes = [h for h in cluster.model.homes_of(name) if h in cluster.hosts]
            if not homes:
                return
            home = rng.choice(homes)
            if victim != home and rng.random() < 0.2:
                # Have the home send the victim what it has not asked for.
                frame = wire.Frame(
                    wire.OP_READ, namespace, key, wanted=wire.FULL_SEGMENT, tag=rng.getrandbits(32)
                )  # fmt: skip
                self._send(cluster.hosts[victim].options.endpoint, home, frame)
                return
            source = cluster.hosts[home].options.endpoint
        self._send(source, victim, frame)

    def _send(self, source: Endpoint, victim: int, frame: wire.Frame) -> None:
        target = self._cluster.hosts[victim].options.endpoint
        self._host.send_raw(Encapsulation(source, target).wrap(wire.encode(frame)))

    def _write(self, name: Name, victim: int) -> None:
        """Bytes of our own by RDMA: into the victim's landing zone, whose queue pair and key we
        know, or into all that wait for the block's first segment."""
        host = self._cluster.hosts[victim]
        zone = host.process.zones.zone if host.process is not None and host.process.zones else None
        if zone is None:
            return
        rng, mine, theirs = self._rng, self._host.options.endpoint, host.options.endpoint
        place = place_of(*name, SHARED_CHUNKING.number(0))
        target, mac = Target(theirs.ip, zone.queue_pair, zone.key), theirs.mac
        source_ip = mine.ip
        if rng.random() < 0.5:
            target = Target(parse_ip(POOL_ADDRESS), POOL_QUEUE_PAIR, POOL_KEY)
        elif self._kind is HostileKind.SPOOFER:
            source_ip = parse_ip(POOL_ADDRESS)
        self._count()
        payload, psn = rng.randbytes(rng.randrange(1, 4097)), rng.getrandbits(24)
        packet = packet_of(mine, source_ip, mac, target, place, rng.randrange(4), payload, psn)
        self._host.send_raw(packet)

    # --- the hostile tenant -----------------------------------------------------------------

    def _trespass(self, name: Name) -> None:
        """Try to get at a block of a namespace that is not ours, or to change it."""
        cluster, rng, host = self._cluster, self._rng, self._host
        model = cluster.model
        if model.may_use(host.number, name[0]) or model.was_home(host.number, name[1]):
            return
        self._count()
        namespace, key = name
        homes = [h for h in model.homes_of(name) if h in cluster.hosts]
        if not homes:
            return
        way = rng.randrange(5)
        if way < 3:
            flags = rng.choice((0, 0, wire.FLAG_RETRY, wire.FLAG_PARTIAL))
            wanted = 1 if flags == wire.FLAG_PARTIAL else wire.FULL_SEGMENT
            read = wire.Frame(
                wire.OP_READ, namespace, key, 0, flags, group=rng.choice((0, 1, 2)),
                wanted=wanted, tag=rng.getrandbits(32),
            )  # fmt: skip
            self._send(host.options.endpoint, rng.choice(homes), read)
        elif way == 3:
            self._forge(name, rng.choice(sorted(cluster.hosts)))
        else:
            self._call(name, f"node-{rng.choice(homes)}")

    def _call(self, name: Name, node_id: str) -> None:
        """Ask by TCP, as ourselves, for the block, or to hold another, or break the rules."""
        cluster, host = self._cluster, self._host
        content = b""
        request: CallerMessage = BulkGet(name[0], [WantedBlock(name[1])])
        way = self._rng.random()
        if way < 0.2:
            request = BulkHello(BULK_PROTOCOL_VERSION, host.options.node_id)  # once too often
        elif way < 0.6:
            content = b"trespass" + self._rng.randbytes(8)
            cluster.model.forged(host.number, name, content, by_tcp=True)
            size, digest = len(content), wire.digest_of(content)
            process = host.process
            pool = process.core.pool if process is not None else None
            meaning = pool.meaning_of(name[0]) if pool is not None else None
            header = PutHeader(name[1], size, digest)
            request = BulkPut(name[0], 1 << 40, meaning or 0, [header], way < 0.4)

        def answered(message: CalleeMessage) -> None:
            if isinstance(message, BulkBlocks):
                raise ViolationError(
                    5, f"host {host.number} was sent a block of namespace {name[0]} by TCP"
                )

        link = _Trespasser(host.options.node_id, request, content, answered)
        end = cluster.open_bulk(host, node_id)
        StreamDriver(cluster.world, Process(cluster.world), end, link)


class _Trespasser(LinkStream[CalleeMessage]):
    """One request with its bytes, without waiting to be told that they may come, and its answer."""

    def __init__(
        self,
        node_id: str,
        request: CallerMessage,
        content: bytes,
        answered: Callable[[CalleeMessage], None],
    ) -> None:
        super().__init__(CalleeMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        self._answered = answered
        self._send(BulkHello(BULK_PROTOCOL_VERSION, node_id))
        self._send(request)
        if content:
            self._send_block(memoryview(content))

    def _message(self, now: float, message: CalleeMessage) -> None:
        self._answered(message)
        self._close(now)
