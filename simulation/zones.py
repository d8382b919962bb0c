"""Simulated landing zones: shared answers by RDMA WRITE, over simulated cables and the real program
of the switch.

Owns: what `kvcast.hostagent.network.landing_zone` owns, with a card that is simulated: which
packets a card sends and takes, when its memory changes, and when it says so. Must not know: which
slot is whose (`kvcast.protocol.requester.landing`), what a block is, or who waits.

A card reads and writes memory whatever the process does meanwhile, one chunk after the other, so
that memory that is used too early or too late shows wrong bytes. It takes what is for its queue
pair and key, has a right check, and finds a receive; it reports in the order in which packets came.
What a process hears of a card is what the next look says.
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from kvcast.hostagent.core.agent import AgentCore
from kvcast.protocol.links.backoff import Backoff
from kvcast.protocol.messages.ethernet import Endpoint, parse_ip
from kvcast.protocol.messages.roce import (
    POOL_KEY,
    POOL_QUEUE_PAIR,
    ROCE_UDP_PORT,
    SHARED_CHUNKING,
    UC_WRITE_ONLY_WITH_IMMEDIATE,
    ZONE_ADDRESS,
    ZONE_BYTES,
    Place,
)
from kvcast.protocol.messages.wire import CHUNKS_PER_SEGMENT
from kvcast.protocol.requester.landing import Landing
from kvcast.simulation.model_writes import check_of, look_write
from kvcast.simulation.verbs import LATE_S, CardFaults, Fabric
from kvcast.simulation.world import World

POOL_ADDRESS: Final = "10.77.0.250"
_POOL_MAC: Final = bytes((2, 0x6B, 0x76, 0, 0, 0xFA))
AWAITED: Final = 4
"""Segments on their way at once: fewer than the product's, so that others wait for their turn."""
RECEIVES: Final = AWAITED * CHUNKS_PER_SEGMENT + 16
SENDS: Final = 2 * CHUNKS_PER_SEGMENT
GAPS_S: Final = (2e-6, 150e-6, 1e-3)
"""Between two chunks that a card sends, one of these in a run: at the last, much happens
meanwhile."""
RETRY_S: Final = 0.3
RETRY_MAX_S: Final = 1.0
STRAY_S: Final = 0.3
"""How late a WRITE may come."""
_CHUNK_BYTES: Final = SHARED_CHUNKING.chunk_bytes
_BTH_FLAGS_AT: Final = 43
_BROKEN: Final = -1
"""Instead of an immediate: the queue pair is in error."""
_RETH: Final = struct.Struct("!QIII")

Done = Callable[[bool], None]


class Owner(Protocol):
    """The process that has the zone."""

    @property
    def now(self) -> float: ...

    def when_running(self, action: Callable[[], None]) -> None: ...


class Card(Protocol):
    """What the host's card is to a zone."""

    fabric: Fabric
    faults: CardFaults


class Cable(Protocol):
    """The host, as far as a card is concerned."""

    def send_packet(self, packet: bytes) -> None: ...

    def packet_missed(self, packet: bytes) -> None: ...

    def zone_made(self, queue_pair: int) -> None: ...


class Target(NamedTuple):
    """Whose a packet is."""

    ip: int
    queue_pair: int
    key: int


def packet_of(
    sender: Endpoint,
    source_ip: int,
    mac: bytes,
    target: Target,
    place: Place,
    chunk: int,
    payload: bytes,
    psn: int,
    *,
    solicited: bool = False,
) -> bytes:
    """A WRITE of a chunk, as a card on `sender`'s host sends it to a MAC; `solicited`: it wakes who
    waits for such."""
    padding = -len(payload) % 4
    udp_bytes = 8 + 12 + _RETH.size + len(payload) + padding + 4
    ip = bytearray(
        b"\x45\0"
        + (20 + udp_bytes).to_bytes(2, "big")
        + (psn & 0xFFFF).to_bytes(2, "big")
        + b"\x40\0\x40\x11\0\0"
        + source_ip.to_bytes(4, "big")
        + target.ip.to_bytes(4, "big")
    )
    ip[10:12] = (-int.from_bytes(ip, "big") % 0xFFFF).to_bytes(2, "big")
    packet = b"".join(
        (
            mac + sender.mac + b"\x08\0",
            ip,
            (0xC000 | psn & 0x3FFF).to_bytes(2, "big") + ROCE_UDP_PORT.to_bytes(2, "big"),
            udp_bytes.to_bytes(2, "big") + b"\0\0",
            bytes((UC_WRITE_ONLY_WITH_IMMEDIATE, solicited << 7 | 0x40 | padding << 4))
            + b"\xff\xff\0",
            target.queue_pair.to_bytes(3, "big") + b"\0" + psn.to_bytes(3, "big"),
            _RETH.pack(
                *(ZONE_ADDRESS | place.address_low(chunk), target.key),
                *(len(payload), place.immediate(chunk)),
            ),
            payload + bytes(padding + 4),
        )
    )
    return packet[:-4] + check_of(packet)


class Zone:
    """One queue pair, and the memory into which it takes WRITEs; the agent's `WriteCard`."""

    def __init__(
        self, side: ZoneSide, card: Card, endpoint: Endpoint, pool_ip: int, gap_s: float
    ) -> None:
        fabric = card.fabric
        self.queue_pair = fabric.number()
        self.key = fabric.rng.getrandbits(24) << 8 | fabric.number() & 0xFF
        self.registered = True
        """Whether the card knows the key: a registration that is lost refuses every WRITE."""
        self.closed = False
        self.broken = ""
        self._side = side
        self._card = card
        self._endpoint = endpoint
        self._pool_ip = pool_ip
        self._gap_s = gap_s
        self._memory = mmap.mmap(-1, ZONE_BYTES)
        self._came: deque[tuple[float, int]] = deque()
        """When the process may hear of it, and the immediate."""
        self._late_until = 0.0
        self._awaiting = False
        self._waiting: deque[tuple[Place, memoryview, int, Done]] = deque()
        self._sending: deque[tuple[int, Done]] = deque()
        """Chunks that the card still has of each, and whom to tell."""
        self._in_card = 0
        self._sends_at = 0.0
        self._psn = fabric.rng.getrandbits(24)
        self.landing = Landing(
            memoryview(self._memory),
            self.look,
            self._await_more,
            side.core.landing_counters,
            AWAITED,
            lambda: self._break("WRITEs do not arrive"),
        )

    # --- sending ----------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """As `kvcast.hostagent.core.rdma_answers.WriteCard`."""
        return bool(self._waiting)

    def write(self, place: Place, segment: memoryview, chunks: int, done: Done) -> None:
        """As `kvcast.hostagent.core.rdma_answers.WriteCard`."""
        self._waiting.append((place, segment, chunks, done))
        self._send_waiting()

    def _send_waiting(self) -> None:
        world, waiting = self._side.world, self._waiting
        while waiting and self._in_card + waiting[0][2].bit_count() <= SENDS:
            place, segment, chunks, done = waiting.popleft()
            if self.broken or self.closed:
                self._soon(lambda done=done: done(False))  # type: ignore[misc]
                continue
            count = chunks.bit_count()
            self._in_card += count
            self._sending.append((count, done))
            self._sends_at = max(self._sends_at, world.now)
            while chunks:
                chunk = (chunks & -chunks).bit_length() - 1
                chunks &= chunks - 1
                self._sends_at += self._gap_s
                world.at(
                    self._sends_at,
                    lambda place=place, segment=segment, chunk=chunk, last=not chunks: (  # type: ignore[misc]
                        self._send(place, segment, chunk, last=last)
                    ),
                )

    def _send(self, place: Place, segment: memoryview, chunk: int, *, last: bool) -> None:
        """The card gets to a chunk, and reads it now."""
        if self.closed or self.broken:
            return
        faults, rng, counts = self._card.faults, self._card.fabric.rng, self._side.world.counts
        if faults.gone or rng.random() < faults.errors:
            counts["fault.zone_broken"] += 1
            self._tell(_BROKEN)
            return
        at = chunk * _CHUNK_BYTES
        self._side.cable.send_packet(
            self._packet(
                place,
                chunk,
                bytes(segment[at : at + _CHUNK_BYTES]),
                solicited=last,
            )
        )
        counts["writes_sent"] += 1
        if last:
            self._soon(self._sent)

    def _sent(self) -> None:
        if self.closed or self.broken:
            return
        count, done = self._sending.popleft()
        self._in_card -= count
        done(True)
        self._send_waiting()
        self._side.changed()

    def _packet(self, place: Place, chunk: int, payload: bytes, *, solicited: bool) -> bytes:
        self._psn = (self._psn + 1) & 0xFFFFFF
        return packet_of(
            *(self._endpoint, self._endpoint.ip, _POOL_MAC),
            Target(self._pool_ip, POOL_QUEUE_PAIR, POOL_KEY),
            place,
            chunk,
            payload,
            self._psn,
            solicited=solicited,
        )

    # --- taking -----------------------------------------------------------------------------------

    def arrive(self, packet: bytes) -> None:
        """A packet has come to the card."""
        side, faults, rng = self._side, self._card.faults, self._card.fabric.rng
        counts = side.world.counts
        if rng.random() < faults.lost_windows:
            counts["fault.zone_lost"] += 1
            self.registered = False
        seen = look_write(packet)
        taken = (
            not (self.closed or self.broken or faults.gone)
            and self.registered
            and seen is not None
            and seen.target_ip == self._endpoint.ip
            and (seen.queue_pair, seen.key) == (self.queue_pair, self.key)
            and seen.address >= ZONE_ADDRESS
            and seen.address + len(seen.payload) <= ZONE_ADDRESS + ZONE_BYTES
            and len(self._came) < RECEIVES
        )
        if seen is None or not taken:
            counts["writes_refused"] += 1
            side.cable.packet_missed(packet)
            return
        counts["writes_taken"] += 1
        at, size = seen.address - ZONE_ADDRESS, len(seen.payload)
        self._memory[at : at + size] = seen.payload
        if size and rng.random() < faults.flips:
            counts["fault.rdma_flips"] += 1
            where = at + rng.randrange(size)
            self._memory[where] ^= 1 << rng.randrange(8)
        if rng.random() < faults.late:
            counts["fault.rdma_late"] += 1
            self._late_until = side.world.now + LATE_S
        self._tell(seen.immediate, solicited=bool(packet[_BTH_FLAGS_AT] & 0x80))

    def _tell(self, immediate: int, *, solicited: bool = True) -> None:
        """The card reports something, behind all that it has still to report."""
        world = self._side.world
        at = max(world.now, self._late_until)
        self._came.append((at, immediate))
        if solicited and (self._awaiting or immediate == _BROKEN):
            self._awaiting = False
            world.at(at, lambda: self._soon(self._look_again))

    def _await_more(self) -> None:
        """Wake for the last chunk of an answer, and look at what came before that."""
        self._awaiting = True
        self._soon(self._look_again)
        for at, _ in self._came:
            self._side.world.at(at, lambda: self._soon(self._look_again))

    def _soon(self, action: Callable[[], None]) -> None:
        self._side.world.after(0.0, lambda: self._side.owner.when_running(action))

    def _look_again(self) -> None:
        if self.landing.awaits_ends:
            self._awaiting = True
        if not self.closed and self.look():
            self._side.changed()

    def look(self) -> bool:
        """What has come since; whether there was anything."""
        immediates: list[int] = []
        while self._came and self._came[0][0] <= self._side.world.now and not self.broken:
            _, immediate = self._came.popleft()
            if immediate == _BROKEN:
                self._break("the queue pair is in error")
            else:
                immediates.append(immediate)
        if immediates:
            owners = self.landing.landed(immediates)
            if owners and not self.closed:
                self._side.core.landed(self._side.owner.now, owners)
        return bool(immediates)

    # --- the end ----------------------------------------------------------------------------------

    def _break(self, why: str) -> None:
        if not self.broken and not self.closed:
            self.broken = why
            self.landing.lost()
            self._soon(lambda: self._side.failed(self))

    def close(self) -> None:
        """End everything; what was not sent never is."""
        if self.closed:
            return
        self.closed = True
        self._in_card = 0
        told = [done for _, done in self._sending] + [item[3] for item in self._waiting]
        self._sending.clear()
        self._waiting.clear()
        for done in told:
            done(False)

    @property
    def idle(self) -> bool:
        """Whether the card has nothing to send."""
        return not self._sending and not self._waiting


class ZoneSide:
    """Keeps a zone for one life of an agent, as `landing_zone.ZoneKeeper` does. `register`: has the
    controller told of the queue pair and the key, 0 and 0 for none; `pump` is called after every
    event."""

    def __init__(
        self,
        world: World,
        owner: Owner,
        core: AgentCore,
        card: Card,
        cable: Cable,
        endpoint: Endpoint,
        *,
        register: Callable[[int, int], None],
        pump: Callable[[], None],
    ) -> None:
        self.world = world
        self.owner = owner
        self.core = core
        self.cable = cable
        self.zone: Zone | None = None
        self._card = card
        self._endpoint = endpoint
        self._register = register
        self._pump = pump
        self._gap_s = world.stream("zones").choice(GAPS_S)
        self._address = ""
        self._backoff = Backoff(RETRY_S, RETRY_MAX_S)
        self._dead = False

    def follow(self) -> None:
        """The map may have changed."""
        address = self.core.rdma_address
        if address != self._address and not self._dead:
            self._address = address
            self._backoff.worked()
            self._end()
            if address:
                self._make()

    def receive(self, packet: bytes) -> None:
        """A packet for the card has come over the wire; now and then late, or once more later."""
        faults, rng = self._card.faults, self._card.fabric.rng
        if rng.random() < faults.strays:
            self.world.counts["fault.rdma_strays"] += 1
            self.cable.packet_missed(packet)
            self.world.after(rng.uniform(0.0, STRAY_S), lambda: self._arrive(packet))
            if rng.random() < 0.5:
                return
        self._arrive(packet)

    def _arrive(self, packet: bytes) -> None:
        if self.zone is None:
            self.cable.packet_missed(packet)
        else:
            self.zone.arrive(packet)

    def changed(self) -> None:
        """Something was sent, or has come."""
        self.core.after_receiving(self.owner.now)
        self._pump()

    def failed(self, zone: Zone | None) -> None:
        """A zone is broken, or could not be made: later another."""
        if self._dead or zone is not self.zone:
            return
        self._end()
        address = self._address
        self.world.after(
            self._backoff.next_pause_s(),
            lambda: self.owner.when_running(
                lambda: self._make() if self.zone is None and self._address == address else None
            ),
        )
        self._pump()

    def _make(self) -> None:
        if self._dead:
            return
        if self._card.faults.gone:
            self.failed(None)
            return
        pool_ip = parse_ip(self._address)
        zone = self.zone = Zone(self, self._card, self._endpoint, pool_ip, self._gap_s)
        self.world.counts["zones_made"] += 1
        self.cable.zone_made(zone.queue_pair)
        self.core.use_zone(zone.landing, zone)
        self._register(zone.queue_pair, zone.key)

    def _end(self) -> None:
        zone, self.zone = self.zone, None
        if zone is not None:
            self.core.use_zone(None, None)
            zone.close()
            self._register(0, 0)

    def die(self) -> None:
        """The process is gone, and its queue pair with it."""
        self._dead = True
        if self.zone is not None:
            self.zone.closed = True

    def check(self) -> None:
        """Nothing is under way."""
        if self.zone is not None:
            assert self.zone.idle or self.zone.broken
            assert not self.zone.landing.claims
