"""What the courier may do, and what follows from what it has done.

Owns: when the courier is open, which homes and which sizes of blocks it is for, the landing places
that it has, and the books of what it gave to clients. Must not know: sockets, the event loop, or
how the courier goes about a question (`kvcast.protocol.courier`, compiled code, which works on the
tables made here).

The courier runs while Python does nothing else. So `prepare` says what holds from now on, and
`book`, called before anything else, what was: a block that has landed is committed, pinned in its
client's name, and counted, as if a get had brought it.

It is open while reads of blocks do as well alone: not while most answers of late went to others,
too, since READs then wait for company. A home that was silent is left alone for as long as the
requester leaves one. There are landing places for the sizes that a namespace's blocks had last. A
namespace whose blocks keep coming in others is left alone for a moment, which gets longer as that
goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple, Protocol

from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.lookups import Lookups
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.spread import Spread
from kvcast.hostagent.core.store import Copy, Store, StoreError
from kvcast.hostagent.tiers.counting_filter import CountingFilter
from kvcast.hostagent.tiers.ledger import HANDLE, MOMENT_BYTES, MOMENT_ROWS, Ledger, Row
from kvcast.native.subset import ctypes_of
from kvcast.protocol import courier
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.conveyor import (
    NODES,
    REPLY,
    REQUESTS,
    ROOM_BYTES,
    UNWANTED,
    Expected,
    Taker,
)
from kvcast.protocol.courier import NOBODY, RECORD, Told
from kvcast.protocol.links.backoff import Pauses, pause_after
from kvcast.protocol.messages.questions import ANSWER, FIRST_HANDLE, MAX_MANY
from kvcast.protocol.messages.wire import (
    BUCKETS,
    CELLS,
    CHUNKINGS,
    DIGEST_STATE_BYTES,
    FLAG_PADDED,
    FLAG_RESIDENT,
    FLAG_SHARED,
    FULL_SEGMENT,
    KEY_BYTES,
    OP_READ,
    SEGMENT_BYTES,
    BlockId,
    Chunking,
    Frame,
    bucket_of,
    digest_of,
    encode,
)
from kvcast.protocol.placement import FRAME_FOR_PYTHON, address_of_buffer
from kvcast.protocol.requester import Requester

MAX_CLIENTS: Final = 1024
STOCK: Final = 16
"""Landing places of one size."""
QUOTA_SHARE: Final = 32
"""Of a namespace's quota they take this part at most: its blocks pay for them."""
MOST_STOCK: Final = 160
"""The same where gets of many blocks come."""
LARGE_STOCK: Final = 8
"""The same of blocks of more than one segment."""
FEW: Final = 2
"""So many of the size that came last there are, even if they take more than all may together:"""
FEW_SHARE: Final = 8
"""this part of the arena at most."""
SIZES: Final = 4
"""Sizes of one namespace that have some; a further one takes the place of the one that was not used
for longest."""
MAX_SIZES: Final = courier.LANDINGS // STOCK
"""The same of all namespaces."""
PATIENCE_S: Final = 0.05
"""How long the courier waits for something of an answer at least: as long as the requester does."""
REORDER_S: Final = 0.001
"""How long it waits for what is missing after the end of an answer."""
MAX_UNANSWERED: Final = 256
"""READs without an answer that are remembered; where one is forgotten, the requester's READ of its
block does not say that it is a repeat."""
NO_ROOM_S: Final = 0.1
"""How long no landing places are asked for where there was no room for one."""
OTHER_SIZES: Final = 8
"""How many more blocks than have landed may be of sizes without landing places,"""
OTHER_SIZE_S: Final = 0.1
OTHER_SIZE_MAX_S: Final = 10.0
"""before their namespace is left alone: for how long at first, and at most."""
SILENCE_S: Final = 1.0
"""How long a conveyor may bring nothing while it should."""
CONVEYOR_PAUSE_S: Final = 1.0
CONVEYOR_PAUSE_MAX_S: Final = 60.0
"""How long no conveyor is asked of a node after one was refused, or ended: at first, and at
most."""
_NODES: Final = 1 << 16
"""Nodes have indices of 16 bits."""
_READ_LEAD: Final = 64
"""Bytes in front of the READ, for whatever it is wrapped in."""
_SOURCE_AT: Final = ctypes_of(courier.Landing).source.offset


assert courier.RECORDS * RECORD.size <= MOMENT_BYTES
assert courier.RECORDS <= MOMENT_ROWS


class Holder(Protocol):
    """A client, as far as the courier goes: its session."""

    number: int
    """In the ledger, where there is one."""

    def may_be_given(self) -> tuple[int, int]:
        """(bytes that it holds, bytes up to which the courier may give it more)."""

    def on_the_courier(self, tell: Callable[[int], None], give_up: Callable[[int], None]) -> None:
        """`tell` the courier how many bytes this client holds, whenever that changes; and `give_up`
        there what it gives up, by the question's number."""

    def given(self, handle: int, copy: Copy) -> None:
        """It was told that it holds this copy, which is pinned once for it."""

    def returned(self, handle: int) -> None:
        """It said that it does not need a handle any more."""

    def put_on_the_courier(self, rooms: Rooms | None) -> None:
        """Room that it is given to put may be put by a question, if it is lent to `rooms`; None =
        from now on none may."""

    def was_put(self, ticket: int) -> None:
        """Its block is at home: the room is not the client's any more, which has been given its
        spare one if it had this ahead."""

    def leaves_behind(self, ticket: int) -> None:
        """It goes while this room is being put: the room is not the session's any more."""


class Rooms(Protocol):
    """A client's rooms that it may put by a question."""

    def lend(self, ticket: int, copy: Copy, *, spare: bool = False) -> None:
        """This is one, if there are not too many; a `spare` one, once the client was given it with
        the answer to a put."""

    def give_spare(self, ticket: int) -> None:
        """The client was given that."""

    def take_back(self, tickets: Collection[int]) -> bool:
        """These are none; False where one of them is being put, and nobody may touch it: then
        nothing is done."""


class PutsByQuestion(Protocol):
    """Who sees to puts that clients ask for on the courier's sockets."""

    def join(self, client: int, holder: Holder) -> None:
        """A client, by its number."""

    def leave(self, client: int) -> None:
        """It is gone."""

    def book(self, now: float) -> None:
        """Hear of what was done."""

    def withdraw(self, place: int) -> None:
        """A landing place in which a block is coming is needed otherwise."""

    def values(self) -> dict[str, float]:
        """Totals by name."""


@dataclass(slots=True)
class CourierCounters:
    """Totals since the start."""

    given: int = 0
    """Blocks that clients got by the courier, also those that came for another's question."""
    joined: int = 0
    """Blocks that clients got by the courier, and that came for another client's question."""
    unasked: int = 0
    """Blocks that came after their client had gone."""
    offences: int = 0
    """Clients that were cut off for what they said to the courier."""
    conveyed_bytes: int = 0
    """Bytes of blocks that came by conveyors."""
    impossible: int = 0
    """Changes of a question's state that there are not: mistakes of ours."""


@dataclass(slots=True, eq=False)
class _Size:
    """A size that a namespace's blocks have."""

    namespace: int
    size_bytes: int
    stock: int = STOCK
    """Landing places that it is to have."""
    have: int = 0
    """Those that it has."""
    lacks: bool = False
    """It came, and had none: others are to make room."""


@dataclass(slots=True)
class _Sizes:
    """How a namespace's blocks go with the landing places that it has."""

    last: _Size
    """Of the block that came last."""
    wrong: int = 0
    """How many more were of other sizes than have landed."""
    not_before: float = -inf
    ready_bytes: int = 0
    """What the landing places take."""


class _Seen(NamedTuple):
    """What homes and READs were made for."""

    pool: Pool | None
    generation: int
    """Of the namespaces."""
    residents: frozenset[BlockId]
    padded: bool
    spread: int
    shuns: int


class Courier:
    """The courier's tables, and the core's side of them. `index_address`: where the index of
    `index_bits` bits of buckets lies, which stays there; `arena_address`: where the arena does, of
    which landing places take `most_bytes` at most. `ledger`: where it stands what clients were
    given, for an agent that comes after. Handles count from `first_handle`."""

    def __init__(
        self,
        store: Store,
        requester: Requester,
        outbox: BulkOutbox,
        spread: Spread,
        metrics: Metrics,
        *,
        index_address: int,
        index_bits: int,
        arena_address: int,
        most_bytes: int,
        hashing: tuple[int, int, int],
        ledger: Ledger | None = None,
        first_handle: int = FIRST_HANDLE,
    ) -> None:
        self.counters = CourierCounters()
        self._ledger = ledger
        self._first_handle = first_handle
        self.code = courier.compiled()
        self._store = store
        self._requester = requester
        self._outbox = outbox
        self._spread = spread
        self._metrics = metrics
        self.residents: frozenset[BlockId] = frozenset()
        """Blocks that the switch holds, each as it was cut into cells."""
        self._arena_address = arena_address
        self._most_bytes = most_bytes
        self._kept: list[Any] = []
        self._courier: Any = courier.blank()
        self.address = ctypes.addressof(self._courier)
        self._seen: _Seen | None = None
        self._shunned: dict[int, float] = {}
        self._shuns = 0
        """How often that has changed."""
        self._sizes: list[_Size] = []
        """The one that came last is the last."""
        self._namespaces: dict[int, _Sizes] = {}
        """Those that have any."""
        self._ready_bytes = 0
        self._conveyed: set[int] = set()
        """Nodes that there is a conveyor from."""
        self._unanswered: BoundedMap[BlockId, float] = BoundedMap(MAX_UNANSWERED)
        self.read_lease_s = inf
        """A READ without an answer matters for so long (`Registered.read_lease_s`)."""
        self._short = False
        self._now = 0.0
        """When it was let run last."""
        self._no_room_until = -inf
        self._due = inf
        """When a namespace that was left alone is so no more."""
        self._holders: dict[int, Holder] = {}
        self._places: dict[int, Copy] = {}
        """By number, what lies ahead in the arena,"""
        self._unused = list(range(courier.LANDINGS))
        """the numbers that are left,"""
        self._size_of: dict[int, _Size] = {}
        """what it is for,"""
        self._missing: dict[int, Any] = {}
        """and the bitmap for it."""
        self.takes_conveyors = False
        """Whether somebody makes conveyors that are wished for."""
        self._pending: dict[int, bytearray] = {}
        """By conveyor, what has come of a header (without sockets)."""
        self.pushes: PutsByQuestion | None = None
        self._pauses: BoundedMap[int, Pauses] = BoundedMap(NODES)
        """By node, where a conveyor was not to be had."""
        mine = self._courier
        mine.table = requester.placement.address
        self._patience_ns = (ctypes.c_uint64 * _NODES)()
        mine.patience_ns = ctypes.addressof(self._patience_ns)
        mine.reorder_ns = int(REORDER_S * 1e9)
        mine.next_tag = requester.next_tag()
        self._landings = self._array(courier.Landing, courier.LANDINGS)
        mine.landings = ctypes.addressof(self._landings)
        mine.landing_count = courier.LANDINGS
        mine.enough_landed = STOCK // 2
        for landing, number in zip(
            self._landings, requester.placement.lend(courier.LANDINGS), strict=True
        ):
            landing.copy = number
        mine.silence_ns = int(SILENCE_S * 1e9)
        self._takers = self._array(Taker, NODES)
        mine.takers = ctypes.addressof(self._takers)
        for taker in self._takers:
            taker.node = NOBODY
        self._asked = self._array(courier.Asked, courier.MAX_ASKED)
        mine.asked = ctypes.addressof(self._asked)
        free = (ctypes.c_uint32 * courier.MAX_ASKED)(*reversed(range(courier.MAX_ASKED)))
        heads = (ctypes.c_uint32 * courier.HEADS)()
        self._kept += [free, heads]
        mine.free, mine.heads = map(ctypes.addressof, (free, heads))
        mine.free_count = courier.MAX_ASKED
        self._clients = self._array(courier.Client, MAX_CLIENTS)
        mine.clients = ctypes.addressof(self._clients)
        self._records = self._array(courier.Record, courier.RECORDS)
        if ledger is not None:
            self._records = type(self._records).from_buffer(ledger.moment)
        self._records_view = memoryview(self._records).cast("B")
        mine.records = ctypes.addressof(self._records)
        self._answers = self._array(courier.Answer, courier.ANSWERS)
        mine.answers = ctypes.addressof(self._answers)
        self._batches = self._array(courier.Batch, courier.BATCHES)
        mine.batches = ctypes.addressof(self._batches)
        # One piece, so that nothing but answers lies behind those of a batch.
        answers = bytearray(courier.BATCHES * MAX_MANY * ANSWER.size)
        self._kept.append(answers)
        for number, batch in enumerate(self._batches):
            batch.answers = address_of_buffer(answers) + number * MAX_MANY * ANSWER.size
        self._homes = (ctypes.c_uint32 * BUCKETS)(*[NOBODY] * BUCKETS)
        mine.homes = ctypes.addressof(self._homes)
        self._resident = (ctypes.c_uint8 * (1 << 16))()
        mine.resident = ctypes.addressof(self._resident)
        self.fetching = (ctypes.c_uint32 * BUCKETS)()
        """By bucket, how many blocks are being fetched otherwise (`Reads` counts)."""
        mine.fetching = ctypes.addressof(self.fetching)
        mine.index, mine.index_bits = index_address, index_bits
        self.read = bytearray(_READ_LEAD + len(_read_of(padded=True)))
        mine.read = address_of_buffer(self.read) + _READ_LEAD
        self._state = bytearray(DIGEST_STATE_BYTES)
        mine.state = address_of_buffer(self._state) + 63 & ~63
        mine.reset, mine.update, mine.digest = hashing
        self._reasons = (ctypes.c_uint64 * len(courier.REASONS))()
        mine.counters = ctypes.addressof(self._reasons)
        may_become = courier.transition_bits()
        self._kept.append(may_become)
        mine.may_become = ctypes.addressof(may_become)
        self.read_bytes = 0
        """How long a READ is now,"""
        self.read_address: int = mine.read
        """and where it lies, with room in front of it."""
        self._free = list(range(MAX_CLIENTS - 1, -1, -1))
        self.lookups = Lookups(
            store, self.address, index_address=index_address, index_bits=index_bits
        )
        mine.all_homes = self.lookups.native.homes

    def _array(self, kind: Any, count: int) -> Any:
        return (ctypes_of(kind) * count)()

    # --- clients ----------------------------------------------------------------------------------

    def join(self, holder: Holder) -> int | None:
        """A client that may ask; its number, None where there are too many."""
        if not self._free:
            return None
        number = self._free.pop()
        self._holders[number] = holder
        client = self._clients[number]
        client.state = courier.CLIENT_HERE
        client.asked = client.given_bytes = client.promised_bytes = 0
        client.session = holder.number
        client.next_handle = self._first_handle
        client.held_bytes, client.max_bytes = holder.may_be_given()

        def tell(held_bytes: int) -> None:
            client.held_bytes = held_bytes

        def give_up(question: int) -> None:
            if self.in_flight:
                self.code.unask(self.address, number, question)

        holder.on_the_courier(tell, give_up)
        if self.pushes is not None:
            self.pushes.join(number, holder)
        return number

    def leave(self, number: int) -> None:
        """A client is gone."""
        self.book(self._now)
        if self.pushes is not None:
            self.pushes.book(self._now)
            self.pushes.leave(number)
        self.code.leave(self.address, number)
        self.lookups.code.leave_lookups(self.lookups.address, number)
        self._clients[number].state = 0
        self._holders.pop(number).on_the_courier(lambda _held_bytes: None, lambda _question: None)
        self._free.append(number)

    def state_of(self, number: int) -> int:
        """CLIENT_HERE, CLIENT_GONE or CLIENT_OFFENDS."""
        state: int = self._clients[number].state
        return state

    # --- without sockets: the simulation, fuzzers and tests ---------------------------------------

    def hear(self, number: int, data: bytes, now: float) -> list[tuple[int, bytes]]:
        """What a client says, at a time; READs that are to be sent, and the nodes that they are
        for."""
        buffer = bytearray(data) or bytearray(1)
        at = address_of_buffer(buffer)
        told = self.code.hear(self.address, number, at, len(data), _ns(now))
        if told == courier.OFFENCE:
            self._clients[number].state = courier.CLIENT_OFFENDS
        return list(self._reads(told == courier.SEND_READ))

    def reads_to_send(self) -> list[tuple[int, bytes]]:
        """READs that follow from the time, after `expire`, and the nodes that they are for."""
        return list(self._reads(self.code.next_read(self.address)))

    def _reads(self, more: bool) -> Iterator[tuple[int, bytes]]:
        while more:
            yield self._courier.read_node, bytes(self.read[_READ_LEAD:][: self.read_bytes])
            more = self.code.next_read(self.address)

    def frames_came(self, why: int, now: float) -> bool:
        """Take what is the courier's own of what `place` has put in its place, and of the frame at
        which it has stopped, if it did: whether that was the courier's."""
        self.code.came(self.address, _ns(now))
        table = self._requester.placement.table
        return why == FRAME_FOR_PYTHON and self.code.frame_came(
            self.address, table.frame, table.frame_length, table.frame_source, _ns(now)
        )

    def expire(self, now: float) -> float | None:
        """Give up what has waited for long enough; when the next will have, None: there is none."""
        return self.code.expire(self.address, _ns(now)) / 1e9 or None

    def take_answers(self) -> list[tuple[int, bytes]]:
        """What clients are told, each with its number."""
        count: int = self._courier.answer_count
        self._courier.answer_count = self._courier.batches_full = 0
        told = [(a.client, bytes(a)[-ANSWER.size :]) for a in self._answers[:count]]
        for number, batch in enumerate(self._batches):
            if batch.open and not batch.left:
                data = ctypes.string_at(batch.answers, batch.count * ANSWER.size)
                told.append((batch.client, data))
                self.code.close_batch(self.address, number)
        return [(client, data) for client, data in told if client != NOBODY]

    def requests_to_send(self, number: int) -> bytes:
        """What is to be said on a conveyor."""
        taker = self._takers[number]
        self._courier.unsent = 0
        size_bytes, taker.request_bytes = taker.request_bytes, 0
        return ctypes.string_at(taker.requests, size_bytes)

    def brought(self, number: int, data: bytes, now: float) -> None:
        """A conveyor has brought so much."""
        taker = self._takers[number]
        native, at = ctypes.addressof(taker), 0
        header = native + type(taker).reply.offset
        if data:
            self.code.progressed(self.address, native, _ns(now))
        while at < len(data) and not taker.broken:
            if not taker.count:
                self.code.cut_off(self.address, native)
                break
            pending = self._pending.setdefault(number, bytearray())
            if not taker.taking:
                part = data[at : at + REPLY.size - len(pending)]
                pending += part
                at += len(part)
                if len(pending) == REPLY.size:
                    ctypes.memmove(header, bytes(pending), REPLY.size)
                    pending.clear()
                    lookups = self.lookups
                    mine = lookups.code.counted_came(lookups.address, native, number, _ns(now))
                    if not mine:
                        self.code.reply_came(self.address, native)
                continue
            part = data[at : at + taker.size - taker.there]
            at += len(part)
            if taker.block:
                ctypes.memmove(taker.block + taker.there, part, len(part))
            taker.there += len(part)
            if taker.there == taker.size:
                digest = 0
                if taker.block:
                    digest = digest_of(ctypes.string_at(taker.block, taker.size))
                self.code.block_came(self.address, native, digest, _ns(now))

    # --- conveyors --------------------------------------------------------------------------------

    @property
    def pool(self) -> Pool | None:
        """The pool's map, as it is known here."""
        return self._outbox.pool

    def take_wish(self, now: float) -> int | None:
        """A node that there had better be a conveyor from, told once."""
        wished: int = self._courier.wished
        self._courier.wished = 0
        if not wished or not self.takes_conveyors:
            return None
        pauses = self._pauses.get(wished - 1)
        return wished - 1 if pauses is None or pauses.may_try(now) else None

    def conveyor_stands(self, node: int) -> int | None:
        """There is a conveyor from that node; its number, None where there is no room for it."""
        for number, taker in enumerate(self._takers):
            if taker.node == NOBODY:
                if not taker.requests:  # most agents have few conveyors, and all are soon to start
                    requests = bytearray(ROOM_BYTES)
                    expected = self._array(Expected, REQUESTS)
                    self._kept += [requests, expected]
                    taker.requests = address_of_buffer(requests)
                    taker.expected = ctypes.addressof(expected)
                taker.node = node
                self._conveyed.add(node)
                taker.broken = taker.request_bytes = taker.first = taker.count = taker.taking = 0
                return number
        return None

    def conveyor_failed(self, now: float, node: int) -> None:
        """There is none from that node; it is asked again after a while."""
        pauses = self._pauses.setdefault(node, Pauses(CONVEYOR_PAUSE_S, CONVEYOR_PAUSE_MAX_S))
        pauses.failed(now)

    def conveyor_gone(self, now: float, number: int) -> None:
        """A conveyor is closed: what it was to bring is asked of the agent."""
        taker = self._takers[number]
        unwanted = taker.broken == UNWANTED
        self.code.cut_off(self.address, ctypes.addressof(taker))
        self._pending.pop(number, None)
        if not unwanted:
            self.conveyor_failed(now, taker.node)
        taker.node = NOBODY
        self._conveyed = {each.node for each in self._takers if each.node != NOBODY}

    @property
    def cut_off(self) -> bool:
        """Whether conveyors are to be closed."""
        return bool(self._courier.cut)

    def take_cut_off(self) -> list[int]:
        """The conveyors that are to be closed."""
        self._courier.cut = 0
        return [n for n, taker in enumerate(self._takers) if taker.broken and taker.node != NOBODY]

    def taker(self, number: int) -> Any:
        """A conveyor's end here, for whoever moves its bytes."""
        return self._takers[number]

    # --- what it may do ---------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Questions without an answer."""
        count: int = self._courier.in_flight
        return count

    @property
    def unbooked(self) -> int:
        """Records that wait for `book`."""
        count: int = self._courier.record_count
        return count

    def prepare(self, now: float) -> None:
        """From now on the courier runs, until `book`."""
        self._now = now
        if self._courier.impossible:
            self.counters.impossible += 1
            self._courier.impossible = 0
        self.lookups.prepare(self._outbox.pool)
        shunned = self._shunned
        if shunned and min(shunned.values()) <= now:
            self._shunned = {home: until for home, until in shunned.items() if until > now}
            self._shuns += 1
        seen = _Seen(
            self._outbox.pool,
            self._store.generation,
            self.residents,
            self._requester.config.read_padding,
            self._spread.revision,
            self._shuns,
        )
        if seen != self._seen:
            self._follow(now, seen)
        # What a client was told of must find a row, whatever else is written meanwhile.
        # While it is open there are so many besides those that others leave.
        least = MOMENT_ROWS + courier.RECORDS
        has_rows = self._ledger is None or self._ledger.free_rows >= least
        self._courier.open = has_rows and self._requester.reads_alone(now)
        most = min(self._requester.config.credit_segments, self._requester.reads_of_switch)
        self._courier.reads_at_once = min(courier.MAX_ASKED_A_CLIENT, most)
        if self._courier.wanted_places:
            self._want(self._courier.wanted_places)
            self._courier.wanted_places = 0
        if now >= self._due:
            self._short = True
            self._due = inf
        if self._short and now >= self._no_room_until:
            self._fill(now)

    def _follow(self, now: float, seen: _Seen) -> None:
        """The map, the namespaces, what the switch holds or which homes are asked have changed."""
        pool, before = seen.pool, self._seen
        self._seen = seen
        if before is None or before[:2] != seen[:2]:
            self.code.yield_all(self.address)
            self.give_room_back()  # a landing place may be of a namespace that was dropped
        else:  # what is on its way still comes; but the switch may cut what it has in other chunks
            for block in seen.residents - before.residents:
                self.yield_to(now, block)
        homes = [NOBODY] * BUCKETS
        if pool is not None:
            for bucket in range(BUCKETS):
                nodes = pool.homes_of_bucket(bucket)
                if not nodes or pool.index in nodes or nodes[0] in self._shunned:
                    continue
                if not self._spread.is_busy(nodes[0]):
                    homes[bucket] = nodes[0]
            for block in self._spread.blocks():
                homes[bucket_of(block.key)] = NOBODY
            for home in set(homes) - {NOBODY}:
                self._be_patient(home)
            self._courier.chunk_code = pool.chunking.code
            self._courier.read_flags = FLAG_PADDED if seen.padded else 0
            read = _read_of(padded=seen.padded)
            self.read_bytes = len(read)
            self.read[_READ_LEAD : _READ_LEAD + len(read)] = read
        ctypes.memmove(self._homes, (ctypes.c_uint32 * BUCKETS)(*homes), ctypes.sizeof(self._homes))
        ctypes.memset(self._resident, 0, ctypes.sizeof(self._resident))
        for block in seen.residents:
            self._resident[_end_of(block.key)] = 1

    def _be_patient(self, home: int) -> None:
        """Wait for that home as long as the requester does."""
        self._patience_ns[home] = _ns(max(PATIENCE_S, self._requester.rto_s(home)))

    def use_below(self, of_blocks: CountingFilter) -> None:
        """What may lie below DRAM by this filter is the agent's to get, from now on."""
        self._kept.append(of_blocks)
        self._courier.below = address_of_buffer(of_blocks.memory)
        self._courier.below_bits = of_blocks.bits

    def learn(self, now: float, block: BlockId, size_bytes: int) -> None:
        """This block was fetched: the next of its namespace will be about as large, or as large as
        another was of late. If it is large, there had better be a conveyor from where it was."""
        known = self.expect(now, block.namespace, size_bytes)
        home: int = self._homes[bucket_of(block.key)]
        if home != NOBODY:
            self._be_patient(home)
        large = size_bytes > SEGMENT_BYTES or known.stock > STOCK
        if large and home != NOBODY and home not in self._conveyed:
            self._courier.wished = home + 1

    def expect(self, now: float, namespace: int, size_bytes: int) -> _Size:
        """As `learn`, of a block that has come from anywhere."""
        known = self._like(namespace, size_bytes)
        if known is None:
            known = self._enter(_Size(namespace, size_bytes))
        if not known.have and not known.lacks:  # of many that come at once one counts
            known.lacks = self._short = True
            of = self._namespaces[namespace]
            of.wrong += 1
            if of.wrong > OTHER_SIZES:
                further = of.wrong - OTHER_SIZES
                of.not_before = now + pause_after(further, OTHER_SIZE_S, OTHER_SIZE_MAX_S)
        self._use(known)
        return known

    def _like(self, namespace: int, size_bytes: int) -> _Size | None:
        """The size of a namespace in whose landing places such a block may land."""
        for known in self._sizes:
            if known.namespace == namespace and courier.fits(size_bytes, known.size_bytes):
                return known
        return None

    def _enter(self, size: _Size) -> _Size:
        mine = [known for known in self._sizes if known.namespace == size.namespace]
        if len(mine) == SIZES:
            self._forget(mine[0])
        elif len(self._sizes) == MAX_SIZES:
            self._forget(self._sizes[0])
        self._sizes.append(size)
        self._namespaces.setdefault(size.namespace, _Sizes(size))
        return size

    def _forget(self, size: _Size) -> None:
        for number in [n for n, known in self._size_of.items() if known is size]:
            self._give_back(number)
        self._sizes.remove(size)
        if all(known.namespace != size.namespace for known in self._sizes):
            del self._namespaces[size.namespace]

    def _use(self, size: _Size) -> None:
        """A block of that size came."""
        if self._sizes[-1] is not size:
            self._sizes.remove(size)
            self._sizes.append(size)
        of = self._namespaces[size.namespace]
        if of.last is not size:
            of.last = size
            for number, known in self._size_of.items():
                if known.namespace == size.namespace:
                    self._landings[number].likely = known is size

    def was_unanswered(self, now: float, block: BlockId) -> bool:
        """Whether the courier's READ of a block was not answered, as far as is remembered: a switch
        may hold another back, unless it says that it is a repeat. Told once."""
        since = self._unanswered.pop(block, None)
        return since is not None and now - since <= self.read_lease_s

    def was_answered(self, block: BlockId) -> None:
        """The end of an answer to a READ of a block has come, be it late: no switch holds the next
        one back."""
        if self._unanswered:
            self._unanswered.pop(block, None)

    def yield_to(self, now: float, block: BlockId) -> None:
        """A block is going to be fetched otherwise: whoever asked the courier for it is to ask the
        agent."""
        if self._courier.in_flight:
            high = int.from_bytes(block.key[:8], "little")
            low = int.from_bytes(block.key[8:], "little")
            if self.code.yield_block(self.address, block.namespace, high, low, _ns(now)):
                self._unanswered[block] = now

    # --- landing places ---------------------------------------------------------------------------

    def _want(self, places: int) -> None:
        """There were too few for so many blocks at once."""
        stock = min(max(STOCK, places + STOCK), MOST_STOCK)
        for known in self._sizes:
            if known.stock < stock:
                known.stock = stock
                self._short = True
                known.lacks = known is self._namespaces[known.namespace].last

    def _fill(self, now: float) -> None:
        """Have a stock of landing places for each size, first for those that came last."""
        self._short = False
        for known in self._sizes[::-1]:
            of = self._namespaces[known.namespace]
            large = known.size_bytes > SEGMENT_BYTES
            if large and not self.takes_conveyors:
                continue
            if of.not_before > now:
                self._due = min(self._due, of.not_before)
                continue
            reserved_bytes = self._store.allocator.extent_bytes(known.size_bytes)
            most = LARGE_STOCK if large else known.stock
            quota = self._store.quota_of(known.namespace)
            lacks, known.lacks = known.lacks, False
            while known.have < most:
                if quota and of.ready_bytes + reserved_bytes > quota // QUOTA_SHARE:
                    break
                has_room = self._has_room(known, reserved_bytes)
                if not has_room and not (lacks and self._steal(known)):
                    break
                if not has_room:
                    continue  # more of the others' places are to go
                try:
                    copy = self._store.reserve(BlockId(known.namespace, b""), known.size_bytes)
                except StoreError:
                    self._short = True
                    self._no_room_until = now + NO_ROOM_S
                    return
                self._offer(copy, known)

    def _has_room(self, size: _Size, reserved_bytes: int) -> bool:
        most_bytes = self._most_bytes
        if size.have < FEW and size is self._sizes[-1]:
            most_bytes = max(most_bytes, self._store.allocator.capacity_bytes // FEW_SHARE)
        return bool(self._unused) and self._ready_bytes + reserved_bytes <= most_bytes

    def _steal(self, wanting: _Size) -> bool:
        """Give one of the places back that are for sizes which came longer ago; False if all of
        those are in use."""
        for known in self._sizes:
            if known is wanting:
                return False
            if known.have:
                for number, of in self._size_of.items():
                    free = self._landings[number].state == courier.LANDING_FREE
                    if of is known and free:
                        self._give_back(number)
                        return True
        return False

    def _offer(self, copy: Copy, size: _Size) -> None:
        number = self._unused.pop()
        self._places[number] = copy
        self._size_of[number] = size
        size.have += 1
        self._ready_bytes += copy.reserved_bytes
        of = self._namespaces[size.namespace]
        of.ready_bytes += copy.reserved_bytes
        segments = CELLS.segments_of(copy.size_bytes)  # of larger chunks there are fewer
        bitmap = self._missing.get(number)
        if bitmap is None or len(bitmap) < segments:
            bitmap = self._missing[number] = (ctypes.c_uint64 * segments)()
        landing = self._landings[number]
        address, missing = self._arena_address + copy.offset, ctypes.addressof(bitmap)
        landing.namespace = copy.block.namespace
        landing.size = copy.size_bytes
        landing.likely = of.last is size
        landing.offset = copy.offset
        landing.address = address
        landing.missing = missing
        source = ctypes.addressof(landing) + _SOURCE_AT
        self._requester.placement.aim(landing.copy, address, missing, source)
        landing.state = courier.LANDING_FREE

    def _take_place(self, number: int) -> tuple[Copy, _Size]:
        """A landing place is none any more."""
        copy, size = self._places.pop(number), self._size_of.pop(number)
        self._landings[number].state = 0
        self._unused.append(number)
        size.have -= 1
        self._ready_bytes -= copy.reserved_bytes
        self._namespaces[size.namespace].ready_bytes -= copy.reserved_bytes
        self._short = True
        return copy, size

    def _give_back(self, number: int) -> None:
        if self._landings[number].state == courier.LANDING_TAKEN:
            self.code.yield_all(self.address)  # also: what a conveyor still brings goes nowhere
        elif self._landings[number].state == courier.LANDING_PUSHED:
            assert self.pushes is not None
            self.pushes.withdraw(number)
        copy, _ = self._take_place(number)
        self._store.abort(copy)

    def give_room_back(self) -> None:
        """Let go of all landing places; what is in flight is to be asked of the agent."""
        for number in list(self._places):
            self._give_back(number)

    # --- what it has done -------------------------------------------------------------------------

    def book(self, now: float) -> bool:
        """Take all records; whether there were any."""
        mine = self._courier
        count: int = mine.record_count
        if not count:
            return False
        self._store.advance(now)
        self._metrics.frames_answers_total += mine.frames
        mine.frames = 0
        self._requester.counters.reads += mine.repairs
        self._requester.counters.reads_partial += mine.repairs
        mine.repairs = 0
        landed: Copy | None = None
        spare: Copy | None = None
        """One that nobody holds who has asked for it; pinned, until all have it."""
        touched = set()
        view = self._records_view[: count * RECORD.size]
        for told in map(Told._make, RECORD.iter_unpack(bytes(view))):
            touched.add(told.client)
            if told.kind in (courier.LANDED, courier.JOINED):
                if told.kind == courier.LANDED:
                    if spare is not None:
                        self._store.unpin(spare)
                    landed = self._landed(now, told)
                    spare = landed if told.client == NOBODY else None
                assert landed is not None
                self._give(told, landed)
            elif told.kind == courier.RELEASED:
                self._holders[told.client].returned(told.handle)
            else:
                self._failed(now, told)
        if spare is not None:
            self._store.unpin(spare)
        # An agent that comes after finds none of them: all stand in the ledger.
        ctypes.memset(mine.records, 0, count * RECORD.size)
        mine.record_count = mine.landed = 0
        touched.discard(NOBODY)
        for number in touched:
            client = self._clients[number]
            client.given_bytes = 0
            client.held_bytes, client.max_bytes = self._holders[number].may_be_given()
        return True

    def take_landed(self, number: int) -> Copy:
        """A block has landed there: the room that it takes, which is not the courier's any more."""
        copy, size = self._take_place(number)
        self._use(size)
        of = self._namespaces[size.namespace]
        of.wrong = max(0, of.wrong - 1)
        return copy

    def _landed(self, now: float, told: Told) -> Copy:
        copy = self.take_landed(told.landing)
        landed = self._store.land(
            copy, BlockId(told.namespace, told.key), told.size_bytes, told.digest
        )
        metrics = self._metrics
        metrics.fetches_total += 1
        was_read = told.rtt_ns != courier.NO_READ
        first_bytes = min(told.size_bytes, SEGMENT_BYTES) if was_read else 0
        metrics.payload_bytes_received_udp_total += first_bytes
        if first_bytes < told.size_bytes:
            metrics.payload_bytes_received_bulk_get_total += told.size_bytes - first_bytes
            self.counters.conveyed_bytes += told.size_bytes - first_bytes
            self._pauses.pop(told.home, None)
        metrics.fetch_time.add(told.elapsed_ns / 1e9)
        if not was_read:
            return landed
        self.was_answered(landed.block)
        self._requester.was_read(
            now,
            told.home,
            told.rtt_ns / 1e9,
            chunks=-(-first_bytes // self._chunking_of(landed.block).chunk_bytes),
            shared=bool(told.flags & FLAG_SHARED),
            resident=bool(told.flags & FLAG_RESIDENT),
        )
        self._be_patient(told.home)
        return landed

    def _chunking_of(self, block: BlockId) -> Chunking:
        """How what is read of a block is cut."""
        by_cells = self._resident[_end_of(block.key)]
        return CELLS if by_cells else CHUNKINGS[self._courier.chunk_code]

    def _give(self, told: Told, copy: Copy) -> None:
        """A copy is a client's."""
        metrics = self._metrics
        mine = metrics.by_namespace.of(told.namespace)
        metrics.gets_total += 1
        mine.gets += 1
        if told.kind == courier.JOINED:
            metrics.gets_joined_total += 1
            self.counters.joined += 1
        tier = "home"
        if told.flags & FLAG_RESIDENT:
            tier = "switch"
        elif told.flags & FLAG_SHARED:
            tier = "shared"
        metrics.count_hit(tier)
        mine.hits[tier] += 1
        mine.got_bytes += told.size_bytes
        mine.get_time.add(told.elapsed_ns / 1e9)
        if told.client == NOBODY:
            self.counters.unasked += 1
        else:
            self.counters.given += 1
            if told.kind == courier.JOINED:
                self._store.pin(copy)
            self._holders[told.client].given(told.handle, copy)

    def _failed(self, now: float, told: Told) -> None:
        if told.flags == courier.SILENCE:
            block = BlockId(told.namespace, told.key)
            self._unanswered[block] = now
            if block in self.residents:
                self._requester.was_lost(now, told.read_ns / 1e9)
            self._shunned[told.home] = now + self._requester.config.suspect_s
            self._shuns += 1
        elif told.flags in (courier.DEADLINE, courier.GIVEN_UP, courier.YIELDED):
            overdue_ns = told.read_ns + self._patience_ns[told.home] // 2
            if told.read_ns and overdue_ns <= _ns(now):
                self._unanswered[BlockId(told.namespace, told.key)] = now
        elif told.flags == courier.WRONG_DIGEST:
            self._requester.counters.corrupt_blocks += 1
        elif told.flags == courier.COMPANY:
            self._requester.meet(now, BlockId(told.namespace, told.key))
        elif told.flags == courier.NOT_OFFERED:
            self.conveyor_failed(now, told.home)
            for taker in self._takers:
                if taker.node == told.home:
                    self.code.cut_off(self.address, ctypes.addressof(taker))

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself. For tests and simulations, after
        any event."""
        assert not self.counters.impossible, "a question's state has changed as it cannot"
        courier.check(self._courier, self._holders)

    def values(self) -> dict[str, float]:
        """Totals by name."""
        values = {f"courier_handed_over_{why}": float(self._reasons[n]) for n, why in _REASONS}
        for name in CourierCounters.__slots__:
            values[f"courier_{name}"] = float(getattr(self.counters, name))
        totals = {f"{name}_total": value for name, value in values.items()}
        totals |= self.lookups.values()
        return totals if self.pushes is None else totals | self.pushes.values()

    @property
    def ready_bytes(self) -> int:
        """Arena bytes that are kept ready for blocks to come."""
        return self._ready_bytes

    @property
    def uncounted(self) -> bool:
        """Whether frames came that nobody has counted yet: those that are refused are told by
        nothing else."""
        return self._requester.placement.uncounted


def given_lately(ledger: Ledger) -> Iterator[Row]:
    """What a former agent's courier has given to clients, and that agent did not live to write
    down; afterwards nothing is left of it."""
    code = courier.compiled()
    records = (ctypes_of(courier.Record) * courier.RECORDS).from_buffer(ledger.moment)
    for record in records:
        if not record.kind:
            break
        if code.proves_itself(ctypes.addressof(record)):
            told = Told._make(RECORD.unpack(bytes(record)))
            block = BlockId(told.namespace, told.key)
            yield Row(
                *(told.session, told.handle, block, told.offset),
                *(told.room_bytes, told.digest, HANDLE),
            )
    ctypes.memset(ctypes.addressof(records), 0, ctypes.sizeof(records))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


_REASONS: Final = tuple(enumerate(courier.REASONS))


def _end_of(key: bytes) -> int:
    """The last two bytes, as compiled code reads them."""
    return key[-1] << 8 | key[-2]


def _read_of(*, padded: bool) -> bytes:
    """A READ for a whole first segment; namespace, key, segment and tag are put in later."""
    flags = FLAG_PADDED if padded else 0
    return encode(Frame(OP_READ, 0, bytes(KEY_BYTES), 0, flags, wanted=FULL_SEGMENT))
