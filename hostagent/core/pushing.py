"""Puts that go home in compiled code: what they may do, and what follows from what they have done.

Owns: which rooms clients may put so, when that is open, the connections to and from other nodes, as
far as they are tables, and the books of both ends. Must not know: sockets, the event loop, or how a
put goes (`kvcast.protocol.pushing`, compiled code, which works on the tables made here).

A client that has said that its room is a block has put it. So a room that is being pushed stays
where it is until the push has ended, whatever becomes of its client. At the home, what is pushed
lands in the courier's landing places. It is a block there as soon as its record stands, like one
that came by the bulk link.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.courier import (
    CONVEYOR_PAUSE_MAX_S,
    CONVEYOR_PAUSE_S,
    MAX_CLIENTS,
    SILENCE_S,
    Courier,
    Holder,
)
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.recovery import Unwritten
from kvcast.hostagent.core.serving import Serving
from kvcast.hostagent.core.store import Copy, Store
from kvcast.hostagent.core.writes import Writes
from kvcast.hostagent.tiers.ledger import MOMENT_BYTES, Ledger
from kvcast.native.subset import ctypes_of
from kvcast.protocol import pushing
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.courier import MOST_HOMES, RECORD, RECORDS
from kvcast.protocol.links.backoff import Pauses
from kvcast.protocol.messages.questions import ACKS
from kvcast.protocol.messages.wire import BUCKETS, BlockId, digest_of
from kvcast.protocol.placement import address_of_buffer
from kvcast.protocol.pushing import (
    DIGEST,
    NOBODY,
    NODES,
    NOWHERE,
    PUSH,
    PUSHES,
    ROOM_GIVEN,
    ROOM_PUSHED,
    ROOM_SPARE,
    VERDICT,
)

STILL_S: Final = 5.0
"""How long another node may bring nothing of a block that it has begun to push: a landing place
waits for it."""


_GONE: Final = -1
"""Instead of a client's number."""


@dataclass(slots=True)
class PushCounters:
    """Totals since the start."""

    put: int = 0
    """Blocks of clients that were put by the courier, wherever their homes are."""
    taken: int = 0
    """Blocks that were pushed here."""


class _Lent(NamedTuple):
    """A room, as Python knows it."""

    ticket: int
    copy: Copy
    client: int


class Pushes:
    """The tables, and the core's side of them. `lane`: the address of the native lane that says who
    may use which namespace; 0: nothing is taken. `arena_address`: where the arena lies. `ledger`:
    where it stands what was acknowledged and is in no index yet, for an agent that comes after."""

    def __init__(
        self,
        courier: Courier,
        store: Store,
        writes: Writes,
        serving: Serving,
        outbox: BulkOutbox,
        metrics: Metrics,
        *,
        arena_address: int,
        lane: int,
        ledger: Ledger | None = None,
    ) -> None:
        self.counters = PushCounters()
        self.code = pushing.compiled()
        self.connects = False
        """Whether somebody makes connections that are wished for."""
        self._courier = courier
        self._store = store
        self._writes = writes
        self._serving = serving
        self._outbox = outbox
        self._metrics = metrics
        self._arena_address = arena_address
        self._pool: Pool | None = None
        self._takes = lane != 0
        self._lent: dict[int, _Lent] = {}
        """By number, the rooms that there are,"""
        self._by_ticket: dict[tuple[int, int], int] = {}
        """by client and ticket, their numbers,"""
        self._unused = list(range(pushing.ROOMS))
        """and the numbers that are left."""
        self._holders: dict[int, Holder] = {}
        self._pauses: BoundedMap[int, Pauses] = BoundedMap(NODES)
        self._pending: dict[int, bytearray] = {}
        """By receiver, what has come of a header, or of a digest (without sockets)."""
        self._bytes: dict[int, bytearray] = {}
        """By receiver, a block that is coming (without sockets)."""
        native: Any = ctypes_of(pushing.Pushing)()
        self.native = native
        self.address = ctypes.addressof(native)
        self._rooms = self._array(pushing.Room, pushing.ROOMS)
        self._putters = self._array(pushing.Putter, MAX_CLIENTS)
        self._pushers = self._array(pushing.Pusher, NODES)
        self._receivers = self._array(pushing.Receiver, NODES)
        self._ended = self._array(pushing.Ended, pushing.ENDED)
        self._landed = self._array(pushing.Landed, pushing.LANDED)
        if ledger is not None:
            self._ended, self._landed = _in_the_moment(ledger)
        self._open_pushers: dict[int, Any] = {}
        """By number, the ends of connections that stand: nothing moves on others."""
        self._open_receivers: dict[int, Any] = {}
        self._hints = (ctypes.c_uint32 * pushing.TICKETS)()
        self._mine = (ctypes.c_uint32 * BUCKETS)()
        self._homes = (ctypes.c_uint32 * (BUCKETS * MOST_HOMES))(*[NOBODY] * BUCKETS * MOST_HOMES)
        self._reasons = (ctypes.c_uint64 * len(pushing.REASONS))()
        for name, memory in (
            *(("rooms", self._rooms), ("putters", self._putters), ("pushers", self._pushers)),
            *(("receivers", self._receivers), ("ended", self._ended), ("landed", self._landed)),
            *(("mine", self._mine), ("counters", self._reasons), ("by_ticket", self._hints)),
            ("homes", self._homes),
        ):
            setattr(native, name, ctypes.addressof(memory))
        native.courier = courier.address
        native.knows_all = courier.lookups.knows_all_at
        native.lane = lane
        native.silence_ns = int(SILENCE_S * 1e9)
        native.me = NOBODY
        native.default_ack = ACKS.index(writes.default_ack)
        for end in (*self._pushers, *self._receivers):
            end.node = NOBODY
        for receiver in self._receivers:
            receiver.landing = NOWHERE
        for putter in self._putters:
            putter.next_room = NOWHERE
        courier.pushes = self

    def _array(self, kind: Any, count: int) -> Any:
        return (ctypes_of(kind) * count)()

    def stored(self, block: BlockId, size_bytes: int) -> None:
        """A node has put a block here in the other way: the next will be about as large."""
        if self._takes:
            self._courier.expect(self._store.now, block.namespace, size_bytes)

    # --- clients' rooms ---------------------------------------------------------------------------

    def join(self, client: int, holder: Holder) -> None:
        """A client of the courier, by its number there, may have rooms."""
        self._holders[client] = holder
        holder.put_on_the_courier(ClientRooms(self, client))

    def leave(self, client: int) -> None:
        """A client is gone; what is pushed for it goes on."""
        holder = self._holders.pop(client)
        holder.put_on_the_courier(None)
        self.code.leave_puts(self.address, client)
        for number, lent in list(self._lent.items()):
            if lent.client == client:
                if self._rooms[number].state == ROOM_PUSHED:
                    self._lent[number] = lent._replace(client=_GONE)
                    del self._by_ticket[client, lent.ticket]
                    holder.leaves_behind(lent.ticket)
                else:
                    self._forget(number)

    def lend(self, client: int, ticket: int, copy: Copy, *, spare: bool = False) -> None:
        """A client may put this room; a `spare` one, once it was given it. Where there are too many
        it puts it by a message."""
        if not self._unused:
            return
        number = self._unused.pop()
        self._lent[number] = _Lent(ticket, copy, client)
        self._by_ticket[client, ticket] = number
        room = self._rooms[number]
        room.client = client
        room.namespace = copy.block.namespace
        room.ticket = ticket
        room.size = copy.size_bytes
        room.offset = copy.offset
        room.address = self._arena_address + copy.offset
        key = copy.block.key
        room.named = bool(key)
        push = room.push[0]
        push.key = int.from_bytes(key[:8], "little")
        push.rest_of_key = int.from_bytes(key[8:], "little")
        push.parent = int.from_bytes(copy.parent[:8], "little")
        push.rest_of_parent = int.from_bytes(copy.parent[8:], "little")
        push.depth = copy.depth
        self._hints[ticket % pushing.TICKETS] = number
        if spare:
            room.state = ROOM_SPARE
            self._putters[client].next_room = number
        else:
            room.state = ROOM_GIVEN

    def give_spare(self, client: int, ticket: int) -> None:
        """The client has its spare room from now on."""
        number = self._by_ticket.get((client, ticket))
        if number is not None:
            self._rooms[number].state = ROOM_GIVEN
            self._putters[client].next_room = NOWHERE

    def take_back(self, client: int, tickets: Collection[int]) -> bool:
        """A client is not to put these rooms so; False, and nothing is done, where it has put one
        of them, and that has not ended."""
        if any(self.is_pushed(client, ticket) for ticket in tickets):
            return False
        found = [self._by_ticket.get((client, ticket)) for ticket in tickets]
        numbers = [number for number in found if number is not None]
        for number in numbers:
            if self._putters[client].next_room == number:
                self._putters[client].next_room = NOWHERE
            self._forget(number)
        return True

    def is_pushed(self, client: int, ticket: int) -> bool:
        """Whether a client has put a room so, and that has not ended."""
        number = self._by_ticket.get((client, ticket))
        return number is not None and self._rooms[number].state == ROOM_PUSHED

    def _forget(self, number: int) -> None:
        lent = self._lent.pop(number)
        self._by_ticket.pop((lent.client, lent.ticket), None)
        self._rooms[number].state = 0
        self._unused.append(number)

    # --- what may be done -------------------------------------------------------------------------

    def prepare(self) -> None:
        """From now on compiled code runs, until `book`."""
        pool = self._outbox.pool
        if pool is not self._pool and pool is not None:
            self.follow(pool)
        # While blocks are handed over, more follows from a put than compiled code knows of.
        self.native.open = self.connects and pool is not None and pool.is_settled
        self.native.takes = self._takes and pool is not None
        self.native.scarce = 0

    def follow(self, pool: Pool) -> None:
        """The map is this one from now on."""
        self._pool = pool
        homes = [pool.homes_of_bucket(bucket) for bucket in range(BUCKETS)]
        self._mine[:] = [pool.index in nodes for nodes in homes]
        nobody = [NOBODY] * MOST_HOMES
        few = ([*nodes, *nobody] if len(nodes) <= MOST_HOMES else nobody for nodes in homes)
        self._homes[:] = [node for nodes in few for node in nodes[:MOST_HOMES]]
        self.native.me = pool.index

    # --- what was done ----------------------------------------------------------------------------

    @property
    def untold(self) -> bool:
        """Whether there is anything for `book`."""
        return bool(self.native.ended_count or self.native.landed_count)

    def book(self, now: float) -> None:
        """Hear of what has ended and of what has landed."""
        if not self.untold:
            return
        self._store.advance(now)
        native = self.native
        # Others may be woken by what is told here, and have the books done then: each entry once.
        come = pushing.take_landed(self._landed, native.landed_count)
        native.landed_count = 0
        for landed in come:
            block = BlockId(landed.namespace, landed.key)
            place = self._courier.take_landed(landed.landing)
            place.parent = landed.parent if any(landed.parent) else b""
            place.depth = landed.depth
            copy = self._store.land(place, block, landed.size_bytes, landed.digest, home=True)
            self._store.unpin(copy)
            self.counters.taken += 1
            self._serving.pushed(block, landed.size_bytes)
        over = pushing.take_ended(self._ended, native.ended_count)
        native.ended_count = 0
        for ended in over:
            lent = self._lent[ended.room]
            self._forget(ended.room)
            if ended.is_taken:
                self.counters.put += 1
                for node in ended.nodes:
                    self._pauses.pop(node, None)
                if not lent.copy.block.key:
                    self._store.name(lent.copy, BlockId(ended.namespace, ended.key))
                took_s = ended.elapsed_ns / 1e9
                self._writes.put(now, lent.copy, ended.digest, ended.nodes, took_s)
            else:
                self._store.abort(lent.copy)
            holder = self._holders.get(lent.client)
            if holder is not None:
                self._metrics.local_requests_total += 1
                holder.was_put(lent.ticket)
        # An agent that comes after finds none of them: all are in the index.
        if not (native.landed_count or native.ended_count):
            for array, count in ((self._landed, len(come)), (self._ended, len(over))):
                ctypes.memset(array, 0, count * ctypes.sizeof(array[0]))

    def values(self) -> dict[str, float]:
        """Totals by name."""
        values = {
            f"courier_put_handed_over_{why}": float(self._reasons[number])
            for number, why in enumerate(pushing.REASONS)
        }
        values["courier_put"] = float(self.counters.put)
        values["courier_put_taken"] = float(self.counters.taken)
        values["courier_put_wrong_digest"] = float(self.native.wrong)
        return {f"{name}_total": value for name, value in values.items()}

    # --- connections ------------------------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """Whether blocks may be pushed here."""
        return self._takes

    def take_wish(self, now: float) -> int | None:
        """A node that there had better be a connection to, told once."""
        wished: int = self.native.wished
        self.native.wished = 0
        if not wished or not self.connects:
            return None
        pauses = self._pauses.get(wished - 1)
        return wished - 1 if pauses is None or pauses.may_try(now) else None

    def pusher_stands(self, node: int) -> int | None:
        """There is a connection to that node; its number, None where there is no room for it."""
        for number, pusher in enumerate(self._pushers):
            if pusher.node == NOBODY:
                pusher.node = node
                pusher.broken = pusher.first = pusher.count = pusher.sent = pusher.heard = 0
                self._open_pushers[number] = pusher
                return number
        return None

    def pusher_failed(self, now: float, node: int) -> None:
        """There is none to that node; it is asked again after a while."""
        pauses = self._pauses.setdefault(node, Pauses(CONVEYOR_PAUSE_S, CONVEYOR_PAUSE_MAX_S))
        pauses.failed(now)

    def pusher_gone(self, now: float, number: int) -> None:
        """A connection is closed: what went on it is the agent's."""
        pusher = self._open_pushers.pop(number)
        self.code.end_pusher(self.address, ctypes.addressof(pusher), _ns(now))
        self._pending.pop(-1 - number, None)
        self.pusher_failed(now, pusher.node)
        pusher.node = NOBODY

    def receiver_stands(self, node: int) -> int | None:
        """That node may push on a connection; its number, None where there are too many."""
        for number, receiver in enumerate(self._receivers):
            if receiver.node == NOBODY:
                receiver.node = node
                receiver.broken = receiver.taking = receiver.verdict_count = 0
                receiver.landing = NOWHERE
                self._open_receivers[number] = receiver
                return number
        return None

    def receiver_gone(self, number: int) -> None:
        """A connection is closed: what was coming does not come."""
        receiver = self._open_receivers.pop(number)
        if receiver.landing != NOWHERE:
            self.withdraw(receiver.landing)
        receiver.node = NOBODY
        self._pending.pop(number, None)
        self._bytes.pop(number, None)

    def withdraw(self, place: int) -> None:
        """A landing place in which a block is coming is needed otherwise."""
        self.code.withdraw(self.address, place)

    @property
    def cut_off(self) -> bool:
        """Whether connections are to be closed."""
        return bool(self.native.cut)

    def take_cut_off(self) -> tuple[list[int], list[int]]:
        """The pushers and the receivers that are to be closed."""
        self.native.cut = 0
        pushers = sorted(n for n, end in self._open_pushers.items() if end.broken)
        receivers = sorted(n for n, end in self._open_receivers.items() if end.broken)
        return pushers, receivers

    def still(self, now: float) -> list[int]:
        """The receivers that have waited for too long for what was begun."""
        return sorted(
            number
            for number, end in self._open_receivers.items()
            if end.taking and now - end.since_ns / 1e9 > STILL_S
        )

    def pusher(self, number: int) -> Any:
        """Our end of a connection, for whoever moves its bytes."""
        return self._pushers[number]

    def receiver(self, number: int) -> Any:
        """The same of one on which another node pushes."""
        return self._receivers[number]

    # --- without sockets: the simulation, fuzzers and tests ---------------------------------------

    def hear(self, client: int, data: bytes, now: float) -> bool:
        """What a client says; False where it says no put."""
        buffer = bytearray(data) or bytearray(1)
        at = address_of_buffer(buffer)
        return self.code.hear_put(self.address, client, at, len(data), _ns(now))

    def expire(self, now: float) -> float | None:
        """End what has stood still; when the next will have, or is one of `still`; None: nothing
        moves."""
        if not self._open_pushers and not self._open_receivers:
            return None
        self.code.expire_pushes(self.address, _ns(now))
        pushers, receivers = self._open_pushers.values(), self._open_receivers.values()
        times = [end.until_ns / 1e9 for end in pushers if end.count and not end.broken]
        times += [end.since_ns / 1e9 + STILL_S for end in receivers if end.taking]
        return min(times, default=None)

    def piece_to_send(self, number: int, at_most: int, now: float) -> tuple[bytes, bool]:
        """What a pusher says next, of a header, a block's bytes or their digest; and whether it is
        of a block's bytes."""
        self.native.unsent = 0
        pusher = self._pushers[number]
        at = ctypes.addressof(pusher)
        place = self.code.leaves_next(at, 0)
        if place == PUSHES:
            return b"", False
        sending = pusher.sendings[place]
        room = self._rooms[sending.room]
        of_block = not sending.push_left and bool(sending.left)
        if of_block:
            begin = room.address + room.size - sending.left
            piece = ctypes.string_at(begin, min(sending.left, at_most))
        elif sending.push_left:
            header = ctypes.addressof(room) + type(room).push.offset
            piece = ctypes.string_at(header, PUSH.size)[PUSH.size - sending.push_left :]
        else:
            piece = DIGEST.pack(room.digest[0])[DIGEST.size - sending.digest_left :]
        piece = piece[:at_most]
        self.code.has_left(self.address, at, len(piece), _ns(now))
        return piece, of_block

    def heard_verdicts(self, number: int, data: bytes, now: float) -> None:
        """A home has said so much to a pusher."""
        pusher = self._pushers[number]
        at = ctypes.addressof(pusher)
        pending = self._pending.setdefault(-1 - number, bytearray())
        pending += data
        while len(pending) >= VERDICT.size and not pusher.broken:
            verdict = at + type(pusher).verdict.offset
            ctypes.memmove(verdict, bytes(pending[: VERDICT.size]), VERDICT.size)
            del pending[: VERDICT.size]
            self.code.verdict_came(self.address, at, _ns(now))
        if pusher.broken or not pending:
            del self._pending[-1 - number]

    def brought(self, number: int, data: bytes, now: float) -> bytes:
        """A receiver's connection has brought so much; the verdicts that are to be said."""
        receiver = self._receivers[number]
        at = ctypes.addressof(receiver)
        pending = self._pending.setdefault(number, bytearray())
        pending += data
        receiver.since_ns = _ns(now)
        said = b""
        while not receiver.broken:
            if not receiver.taking:
                if len(pending) < PUSH.size:
                    break
                header = at + type(receiver).push.offset
                ctypes.memmove(header, bytes(pending[: PUSH.size]), PUSH.size)
                del pending[: PUSH.size]
                self.code.push_came(self.address, at)
                continue
            size = receiver.push[0].size
            if len(pending) < size + DIGEST.size:
                break
            content = bytes(pending[:size])
            (receiver.digest[0],) = DIGEST.unpack_from(pending, size)
            del pending[: size + DIGEST.size]
            to = self.code.lands_at(self.address, at)
            if to:
                ctypes.memmove(to, content, size)
            self.code.push_landed(self.address, at, digest_of(content))
            verdicts = at + type(receiver).verdicts.offset
            said += ctypes.string_at(verdicts, VERDICT.size * receiver.verdict_count)
            receiver.verdict_count = 0
        return said


class ClientRooms:
    """One client's rooms, for its session: as `Pushes` says of each."""

    def __init__(self, pushes: Pushes, client: int) -> None:
        self._pushes = pushes
        self._client = client

    def lend(self, ticket: int, copy: Copy, *, spare: bool = False) -> None:
        self._pushes.lend(self._client, ticket, copy, spare=spare)

    def give_spare(self, ticket: int) -> None:
        self._pushes.give_spare(self._client, ticket)

    def take_back(self, tickets: Collection[int]) -> bool:
        return self._pushes.take_back(self._client, tickets)


def _in_the_moment(ledger: Ledger) -> tuple[Any, Any]:
    """The entries of what has ended and of what has landed, behind the courier's records."""
    ended = ctypes_of(pushing.Ended) * pushing.ENDED
    landed = ctypes_of(pushing.Landed) * pushing.LANDED
    at = RECORDS * RECORD.size
    assert at + ctypes.sizeof(ended) + ctypes.sizeof(landed) <= MOMENT_BYTES
    return (
        ended.from_buffer(ledger.moment, at),
        landed.from_buffer(ledger.moment, at + ctypes.sizeof(ended)),
    )


def put_lately(ledger: Ledger) -> Iterator[Unwritten]:
    """What was put from here, or pushed here, and a former agent did not live to write down;
    afterwards nothing is left of it."""
    code = pushing.compiled()
    ended, landed = _in_the_moment(ledger)
    for entry, one in zip(pushing.take_ended(ended, pushing.ENDED), ended, strict=True):
        if code.ended_proves(ctypes.addressof(one)):
            block = BlockId(entry.namespace, entry.key)
            yield Unwritten(block, entry.offset, entry.size_bytes, entry.size_bytes, entry.digest)
    for come, one in zip(pushing.take_landed(landed, pushing.LANDED), landed, strict=True):
        if code.landed_proves(ctypes.addressof(one)):
            block = BlockId(come.namespace, come.key)
            yield Unwritten(block, come.offset, come.room_bytes, come.size_bytes, come.digest)
    for array in (ended, landed):
        ctypes.memset(array, 0, ctypes.sizeof(array))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
