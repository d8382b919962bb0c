"""Requesters and homes alone on the simulated world's links, for the property tests of the cores.

Every frame crosses as bytes, so that corruption meets the codec. Nodes are integers. A switch, if
there is one, sits in the middle of every path: a frame crosses one link to it and one from it,
and each link loses, repeats, delays and damages on its own.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvcast.protocol.messages import wire
from kvcast.protocol.messages.wire import BlockId, Frame, Offer, WireError
from kvcast.protocol.requester import (
    BulkCopy,
    Fetched,
    Missed,
    OfferReceived,
    ProbeEnded,
    Requester,
    RequesterConfig,
    TryBulk,
    WrongResident,
)
from kvcast.protocol.requester.events import ANSWER_OUTCOMES
from kvcast.protocol.responder import READ_OUTCOMES, Responder, ResponderConfig
from kvcast.simulation.network import Link, LinkFault, LinkOptions
from kvcast.simulation.world import Alarm, World

Delivery = tuple[int, int, Frame]  # source, destination, frame
Arrive = Callable[[int, int, bytes], None]  # source, destination, an encoded frame


@dataclass(frozen=True)
class Faults:
    """What a link does to a frame; probabilities, and seconds of delay."""

    loss: float = 0.0
    duplication: float = 0.0
    corruption: float = 0.0
    delay_s: float = 0.0005
    jitter_s: float = 0.0001

    def drawn_from(self, rng: random.Random) -> list[LinkFault]:
        """The same as a link of the simulation has them; jitter reorders."""
        faults = [
            LinkFault("loss", rng, self.loss),
            LinkFault("duplication", rng, self.duplication),
            LinkFault("corruption", rng, self.corruption),
        ]
        faults = [fault for fault in faults if fault.chance]
        if self.jitter_s:
            faults.append(LinkFault("reordering", rng, extra_s=self.jitter_s))
        return faults


class Middle(Protocol):
    """What sits between the nodes."""

    def cross(self, now: float, source: int, destination: int, frame: Frame) -> list[Delivery]:
        """The frames that leave for a frame that came."""


class PlainSwitch:
    def cross(self, now: float, source: int, destination: int, frame: Frame) -> list[Delivery]:
        return [(source, destination, frame)]


@dataclass
class CoalescingSwitch:
    """The pending interest table (docs/architecture.md, "The switch program"), without its hash: a
    READ of a full segment waits if somebody waits for the same segment, and the answer goes to all
    who wait."""

    lease_s: float = 0.25
    groups: dict[int, set[int]] = field(default_factory=dict)
    pending: dict[tuple[BlockId, int], tuple[float, set[int]]] = field(default_factory=dict)
    decisions: Counter[tuple[str, BlockId, int]] = field(default_factory=Counter)

    def count(self, decision: str) -> int:
        return sum(n for (name, _, _), n in self.decisions.items() if name == decision)

    def cross(self, now: float, source: int, destination: int, frame: Frame) -> list[Delivery]:
        name = (frame.block, frame.segment)
        if frame.op == wire.OP_READ:
            return self._read(now, name, source, destination, frame)
        if frame.op == wire.OP_OFFER or frame.flags & wire.FLAG_PARTIAL:
            return [(source, destination, frame)]
        ports = self.pending.get(name, (0.0, set()))[1] | {destination}
        if frame.op == wire.OP_MISS or frame.flags & wire.FLAG_LAST:
            self.pending.pop(name, None)
        if len(ports) == 1:
            return [(source, destination, frame)]
        shared = with_flags(frame, frame.flags | wire.FLAG_SHARED)
        return [(source, port, shared) for port in sorted(ports)]

    def _read(
        self, now: float, name: tuple[BlockId, int], source: int, destination: int, frame: Frame
    ) -> list[Delivery]:
        forward = [(source, destination, frame)]
        if frame.flags & wire.FLAG_PARTIAL:
            self.decisions["partial", *name] += 1
            return forward
        expiry, ports = self.pending.get(name, (0.0, set()))
        members = self.groups.get(frame.group, set())
        waiting = {source} | (members if source in members else set())
        if now >= expiry:
            self.pending[name] = (now + self.lease_s, waiting)
            self.decisions["new", *name] += 1
            return [(source, destination, with_flags(frame, frame.flags | wire.FLAG_SHARED))]
        if frame.flags & wire.FLAG_RETRY or (source in ports and not frame.group):
            self.pending[name] = (now + self.lease_s, ports | waiting)
            self.decisions["retry", *name] += 1
            return forward
        ports |= waiting
        self.decisions["join", *name] += 1
        return []


def with_flags(frame: Frame, flags: int) -> Frame:
    values = {name: getattr(frame, name) for name in Frame.__struct_fields__}
    return Frame(**(values | {"flags": flags}))


class Held:
    """A block in a node's store, counting who holds it."""

    def __init__(self, data: bytes, digest: int | None = None) -> None:
        self.data = memoryview(data)
        self.digest = wire.digest_of(data) if digest is None else digest
        self.holds = 0

    def release(self) -> None:
        self.holds -= 1
        assert self.holds >= 0


class Store:
    """The blocks of one node, and all that it ever held."""

    def __init__(self) -> None:
        self.blocks: dict[BlockId, Held] = {}
        self.all: list[Held] = []

    def put(self, block: BlockId, data: bytes, digest: int | None = None) -> None:
        held = self.blocks[block] = Held(data, digest)
        self.all.append(held)

    def lookup(self, block: BlockId) -> Held | None:
        held = self.blocks.get(block)
        if held is not None:
            held.holds += 1
        return held


@dataclass(eq=False)
class Room:
    """Room for a block in an arena, or what a test made."""

    view: memoryview
    out: set[Room] = field(default_factory=set)

    def abort(self) -> None:
        self.out.remove(self)


class Arena:
    """Hands out room and notices when some is lost or given back twice."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.out: set[Room] = set()

    def allocate(self, _block: BlockId, size: int) -> Room | None:
        if sum(room.view.nbytes for room in self.out) + size > self.limit:
            return None
        room = Room(memoryview(bytearray(size)), self.out)
        self.out.add(room)
        return room


class Reader:
    """One node's requester with its arena and everything that it said."""

    def __init__(self, index: int, config: RequesterConfig, rng: random.Random) -> None:
        self.index = index
        self.arena = Arena()
        self.core = Requester(config, allocate=self.arena.allocate, rng=rng)
        self.deadlines: dict[int, float] = {}
        self.under_way: dict[int, BlockId] = {}
        self.ends: dict[int, Fetched | Missed] = {}


ALWAYS_CHECKED = 5_000
CHECKED_EVERY = 64


class Network:
    """Runs requesters and homes against each other until nothing is left to happen."""

    def __init__(
        self,
        seed: int,
        *,
        faults: Faults = Faults(),
        middle: Middle | None = None,
        requester: RequesterConfig = RequesterConfig(),  # noqa: B008 (frozen)
        responder: ResponderConfig = ResponderConfig(),  # noqa: B008 (frozen)
    ) -> None:
        self.world = World(seed)
        self.at = self.world.at
        self.rng = self.world.stream("network")
        self.middle = middle or PlainSwitch()
        self.readers: dict[int, Reader] = {}
        self.responders: dict[int, Responder] = {}
        self.stores: dict[int, Store] = {}
        self.down: set[int] = set()
        self.on_bulk: Callable[[Reader, TryBulk | OfferReceived], None] | None = None
        self.reader_events = 0
        self.sent: Counter[tuple[int, int]] = Counter()  # (node, op) -> frames
        self.received: Counter[Requester | Responder] = Counter()
        self._requester = requester
        self._responder = responder
        self._faults = faults.drawn_from(self.rng)
        self._cable = LinkOptions(faults.delay_s, rate_bits_per_s=math.inf, queue_frames=1 << 30)
        self._links: dict[tuple[Arrive, int, int], Link] = {}
        self._alarms: dict[Requester | Responder, Alarm] = {}

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def lost(self) -> int:
        return self.world.counts["fault.loss"]

    def add_responder(self, index: int, *, offers: bool = False) -> Store:
        store = self.stores[index] = Store()
        offer = Offer(wire.OFFER_TCP, 1, 2, 3, 4)
        responder = self.responders[index] = Responder(
            self._responder,
            lookup=store.lookup,
            make_offer=(lambda _block, _held: offer) if offers else None,
        )
        self._alarms[responder] = Alarm(self.world, lambda: self._run_responder(index))
        return store

    def add_reader(self, index: int) -> Reader:
        rng = random.Random(self.rng.getrandbits(64))
        reader = self.readers[index] = Reader(index, self._requester, rng)
        self._alarms[reader.core] = Alarm(self.world, lambda: self._run_timer(reader))
        return reader

    def fetch(
        self, reader: Reader, block: BlockId, homes: list[int], *, within_s: float, **rest: object
    ) -> int:
        fetch_id = reader.core.fetch(
            self.now,
            block,
            homes,
            deadline=self.now + within_s,
            **rest,  # type: ignore[arg-type]
        )
        reader.deadlines[fetch_id] = self.now + within_s
        reader.under_way[fetch_id] = block
        self.after_reader(reader)
        return fetch_id

    def cancel(self, reader: Reader, fetch_id: int) -> None:
        reader.core.cancel(self.now, fetch_id)
        self.after_reader(reader)

    def bulk_done(
        self, reader: Reader, event: TryBulk | OfferReceived, copy: BulkCopy | None
    ) -> None:
        if isinstance(event, OfferReceived):
            event.reservation.abort()
        reader.core.bulk_done(self.now, event.fetch_id, copy)
        self.after_reader(reader)

    def run(self) -> None:
        """Let everything happen until nothing is left to; RestlessError if there is no end."""
        self.world.run(max_steps=2_000_000)

    # --- links ----------------------------------------------------------------------------

    def send(self, source: int, destination: int, frame: Frame) -> None:
        self.sent[source, frame.op] += 1
        self._link(self._middle, source, destination).send(wire.encode(frame))

    def _link(self, arrive: Arrive, source: int, destination: int) -> Link:
        """The half of the way between two nodes that ends at `arrive`. Cables have room for any
        number of frames, so that it makes no difference who shares one."""
        link = self._links.get((arrive, source, destination))
        if link is None:
            link = self._links[arrive, source, destination] = Link(
                self.world,
                f"{source} to {destination}",
                functools.partial(arrive, source, destination),
                lambda _link, _frame, _kind: None,
                self._cable,
            )
            link.faults = self._faults
        return link

    def _middle(self, source: int, destination: int, data: bytes) -> None:
        try:
            frame = wire.decode(data)
        except WireError:
            return
        for out_source, out_destination, out in self.middle.cross(
            self.now, source, destination, frame
        ):
            self._link(self._arrive, out_source, out_destination).send(wire.encode(out))

    def _arrive(self, source: int, destination: int, data: bytes) -> None:
        if source in self.down or destination in self.down:
            return
        try:
            frame = wire.decode(data)
        except WireError:
            return
        if frame.op == wire.OP_READ:
            responder = self.responders.get(destination)
            if responder is not None:
                self.received[responder] += 1
                responder.receive(self.now, source, frame)
                self.wake_responder(destination)
        else:
            reader = self.readers.get(destination)
            if reader is not None:
                self.received[reader.core] += 1
                reader.core.receive(self.now, source, frame)
                self.after_reader(reader)

    # --- adapters -------------------------------------------------------------------------

    def wake_responder(self, index: int) -> None:
        responder = self.responders[index]
        self._alarms[responder].set(responder.get_timer(self.now))

    def _run_responder(self, index: int) -> None:
        for reader, frame in self.responders[index].frames_to_send(self.now, 64):
            self.send(index, reader, frame)
        self.wake_responder(index)

    def after_reader(self, reader: Reader) -> None:
        # The check looks at all segments in flight: after every event of a small scenario, and
        # after some of a large one's.
        self.reader_events += 1
        if self.reader_events < ALWAYS_CHECKED or self.reader_events % CHECKED_EVERY == 0:
            reader.core.check()
        while (event := reader.core.next_event()) is not None:
            if isinstance(event, Fetched | Missed):
                assert event.fetch_id not in reader.ends, "a fetch ended twice"
                assert self.now <= reader.deadlines[event.fetch_id] + 1e-6, "ended too late"
                reader.ends[event.fetch_id] = event
                reader.under_way.pop(event.fetch_id, None)
                if isinstance(event, Fetched):
                    assert isinstance(event.reservation, Room)
                    reader.arena.out.discard(event.reservation)
            elif not isinstance(event, ProbeEnded | WrongResident):
                assert self.on_bulk is not None
                self.on_bulk(reader, event)
        for home, frame in reader.core.frames_to_send():
            self.send(reader.index, home, frame)
        self._alarms[reader.core].set(reader.core.get_timer())

    def _run_timer(self, reader: Reader) -> None:
        reader.core.handle_timer(self.now)
        self.after_reader(reader)

    # --- what must hold whenever everything has come to rest --------------------------------

    def check_at_rest(self) -> None:
        for reader in self.readers.values():
            assert set(reader.ends) == set(reader.deadlines), "a fetch has not ended"
            assert reader.core.fetches_in_flight == 0
            assert reader.core.segments_in_flight == 0
            assert reader.core.get_timer() is None
            assert reader.arena.out == set(), "a buffer was neither handed on nor discarded"
            ends = sum(getattr(reader.core.counters, name) for name in ANSWER_OUTCOMES)
            assert ends == self.received[reader.core], "an answer was not counted, or twice"
        for index, responder in self.responders.items():
            ends = sum(getattr(responder.counters, name) for name in READ_OUTCOMES)
            assert ends == self.received[responder], "a READ was not counted, or twice"
            assert responder.segments_waiting == 0
            assert all(held.holds == 0 for held in self.stores[index].all)


def block_id(number: int, namespace: int = 1) -> BlockId:
    return BlockId(namespace, number.to_bytes(16, "big"))


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def number_of(block: BlockId) -> int:
    return int.from_bytes(block.key, "big")
