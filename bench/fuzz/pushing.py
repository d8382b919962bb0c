"""Puts that go home in compiled code, before hostile clients, nodes and homes.

Owns: two agents without sockets, one whose clients put and one that is the home of every block, and
what must hold of every answer. Must not know: how a put goes. The unit tests drive the same pair.

An input is a run of steps of three bytes: which, of whom or what, and how; some take what follows.
"""

from __future__ import annotations

import random
import struct
from typing import Final

from kvcast.bench.fuzz.courier import BLOCKS, content_of, key_of
from kvcast.bench.fuzz.engine import Harness
from kvcast.bench.fuzz.entry_points import check_store
from kvcast.bench.fuzz.targets import entry_point, pool_map
from kvcast.hostagent.core import pushing as core_pushing
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.courier import Courier
from kvcast.hostagent.core.pushing import Pushes, put_lately
from kvcast.hostagent.core.recovery import Unwritten
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.store import RESERVED, Store
from kvcast.hostagent.core.writes import WriteOptions
from kvcast.hostagent.network.lander import hashing
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.hostagent.tiers.ledger import LEDGER_BYTES, MOMENT_BYTES, Ledger
from kvcast.protocol.links.bulk import UNREACHABLE, PutCall
from kvcast.protocol.messages import bulk, local, shared
from kvcast.protocol.messages.bulk import BulkPut, PutHeader, meaning_of
from kvcast.protocol.messages.control import CONTROL_PROTOCOL_VERSION, Registered
from kvcast.protocol.messages.questions import (
    ACK_HOME,
    ANSWER,
    ASK_AGENT,
    PUT,
    PUT_HOME,
    PUT_QUESTION,
    ROOM,
)
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.protocol.placement import address_of_buffer
from kvcast.protocol.pushing import PUSH, VERDICT

NAMESPACE: Final = 1
PUTTER: Final = 1
HOME: Final = 2
_SLAB: Final = 64 * 1024
_SLABS: Final = 64
_STEP: Final = struct.Struct("<BBB")


class Side:
    """One agent."""

    def __init__(self, number: int, put_ack: str) -> None:
        size_bytes = _SLABS * _SLAB
        self.memory = memoryview(bytearray(size_bytes))
        self._index_memory = memoryview(bytearray(shared.index_bytes(buckets_for(size_bytes))))
        index = Index(self._index_memory, size_bytes, 1)
        self.store = Store(Allocator(size_bytes, _SLAB))
        node_id = f"node-{number}"
        self.core = AgentCore(
            *(
                AgentOptions(node_id=node_id, writes=WriteOptions(put_ack)),
                self.store,
                self.memory,
                random.Random(number),
            ),
            SharedIndex(index, self.store, lambda: None),
        )
        self.core.registered(Registered(CONTROL_PROTOCOL_VERSION, number, 3.0, 0))
        functions = hashing()
        assert functions is not None
        core = self.core
        assert core.lane is not None
        self.courier = Courier(
            *(self.store, core.requester, core.outbox, core.spread, core.metrics),
            index_address=address_of_buffer(self._index_memory),
            index_bits=index.bits,
            arena_address=address_of_buffer(self.memory),
            most_bytes=size_bytes // 2,
            hashing=functions,
        )
        self.courier.takes_conveyors = True
        self._ledger = Ledger(memoryview(bytearray(LEDGER_BYTES)))
        core.reads.courier = self.courier
        self.pushes = Pushes(
            *(self.courier, self.store, core.writes, core.serving, core.outbox, core.metrics),
            arena_address=address_of_buffer(self.memory),
            lane=core.lane.address,
            ledger=self._ledger,
        )
        self.pushes.connects = True
        core.serving.stored = self.pushes.stored

    def prepare(self, now: float) -> None:
        """As before every wait."""
        self.courier.prepare(now)
        self.pushes.prepare()

    def book(self, now: float) -> None:
        """As after every wait."""
        self.courier.book(now)
        before, lately = self._acknowledged, self._put_lately()
        self.pushes.book(now)
        assert len(lately) == self._acknowledged - before, "an agent that came now would lose some"
        for put in lately:
            copy = self.store.lying_at(put.offset)
            if copy is not None and copy.block == put.block:
                room_bytes = self.store.allocator.extent_bytes(put.room_bytes)
                assert copy.reserved_bytes == room_bytes
                assert (copy.size_bytes, copy.digest) == (put.size_bytes, put.digest)
        assert not self._put_lately(), "all of it is in the index now"

    @property
    def _acknowledged(self) -> int:
        return self.pushes.counters.put + self.pushes.counters.taken

    def _put_lately(self) -> list[Unwritten]:
        """What an agent would find that came after one which died now."""
        memory = memoryview(bytearray(LEDGER_BYTES))
        memory[-MOMENT_BYTES:] = self._ledger.moment
        return list(put_lately(Ledger(memory)))


class Guest:
    """A client of the agent that puts."""

    def __init__(self, side: Side) -> None:
        self.replies: list[local.AgentReply] = []
        self.session = Session(side.core, self.replies.append)
        self._region = memoryview(bytearray(shared.REGION_BYTES))
        self.session.share(self._region, lambda _reason: None)
        number = side.courier.join(self.session)
        assert number is not None
        self.number = number
        self.rooms: dict[int, tuple[int, int, int]] = {}
        """By ticket, what it may write: offset, size, and which block it is for, -1 = any."""
        self.asked: dict[int, list[tuple[int, int]]] = {}
        """Questions without an answer: tickets and blocks."""

    @property
    def putting(self) -> dict[int, int]:
        """Rooms of which it waits to hear, and the blocks that they should become."""
        return {ticket: block for rooms in self.asked.values() for ticket, block in rooms}


class Pair:
    """Two agents; AssertionError where something is not as it should be."""

    def __init__(self, *, put_ack: str = "home") -> None:
        self.now = 0.0
        self.putter, self.home = Side(PUTTER, put_ack), Side(HOME, put_ack)
        self._epoch = 3
        self.new_map()
        self.pusher: int | None = None
        """The connection, if there is one, by its numbers at both ends."""
        self.receiver = -1
        self.scribbled: set[int] = set()
        """Blocks that a client has written to while they were pushed."""
        self.home_took = self.put_here = self.handed_over = self.put_by_message = 0
        self.reachable = True
        """Whether calls reach the home."""
        self._next = 1
        self.guests = [Guest(self.putter), Guest(self.putter)]

    @property
    def sides(self) -> tuple[Side, Side]:
        """Who puts, and the home."""
        return self.putter, self.home

    def new_map(
        self, *, version: str | None = None, home: int = HOME, nodes: list[str] | None = None
    ) -> None:
        """A map says that everything is at `home`; `version`: the namespace means another thing;
        `nodes`: it is for these alone."""
        found = pool_map()
        (namespace,) = found.namespaces
        namespace = type(namespace)(
            *(namespace.namespace, namespace.tenant, namespace.model),
            *(version or namespace.version, namespace.layout),
            nodes=nodes or [],
        )
        self.meaning = meaning_of(namespace)
        self._epoch += 1
        changed = type(found)(
            *(self._epoch, found.nodes, [[home]] * len(found.buckets), [namespace], found.groups)
        )
        for side in self.sides:
            side.core.control_message(self.now, changed)

    # --- steps ------------------------------------------------------------------------------------

    def expect(self, block: int) -> None:
        """The home knows of blocks of about that size."""
        self.home.courier.expect(self.now, NAMESPACE, len(content_of(block)))
        self.home.prepare(self.now)

    def connect(self) -> None:
        """There is a connection."""
        if self.pusher is None:
            self.pusher = self.putter.pushes.pusher_stands(HOME)
            receiver = self.home.pushes.receiver_stands(PUTTER)
            assert receiver is not None
            self.receiver = receiver

    def cut(self) -> None:
        """The connection breaks."""
        if self.pusher is not None:
            self.putter.pushes.pusher_gone(self.now, self.pusher)
            self.home.pushes.receiver_gone(self.receiver)
            self.pusher = None
            self.settle()

    def handle(self, guest: int, request: local.Request) -> local.AgentReply | None:
        """A client says something on its own socket; the answer, if there is one at once."""
        who = self.guests[guest]
        before = len(who.replies)
        who.session.handle(self.now, request)
        self._make_calls()
        self.settle()
        return who.replies[-1] if len(who.replies) > before else None

    def alloc(self, guest: int, block: int) -> int:
        """A client is given room for a block, which it writes; its ticket, 0: there was none."""
        self._next += 1
        size_bytes = len(content_of(block))
        reply = self.handle(
            guest, local.Alloc(self._next, NAMESPACE, [key_of(block)], [size_bytes])
        )
        if not isinstance(reply, local.Allocated) or reply.extents[0].status != local.OK:
            return 0
        (extent,) = reply.extents
        self.guests[guest].rooms[extent.ticket] = extent.offset, size_bytes, block
        self.write(guest, extent.ticket, block)
        return extent.ticket

    def room_ahead(self, guest: int, block: int) -> int:
        """A client puts a block by messages and says that another such follows; the ticket of its
        room, 0: there was none."""
        ticket = self.alloc(guest, block)
        if not ticket:
            return 0
        self._next += 1
        del self.guests[guest].rooms[ticket]
        committed = self.handle(guest, local.Commit(self._next, [ticket], "local", True))
        if not isinstance(committed, local.Committed) or committed.room is None:
            return 0
        room = committed.room
        self.guests[guest].rooms[room.ticket] = room.offset, len(content_of(block)), -1
        return room.ticket

    def write(self, guest: int, ticket: int, block: int) -> None:
        """A client writes a block, or so much of it as there is room for."""
        offset, size_bytes, _ = self.guests[guest].rooms[ticket]
        content = content_of(block)[:size_bytes]
        self.putter.memory[offset : offset + len(content)] = content

    def scribble(self, guest: int, ticket: int) -> None:
        """A client writes other bytes where it has said that a block is."""
        offset, size_bytes, _ = self.guests[guest].rooms[ticket]
        putting = self.guests[guest].putting
        self.scribbled |= {block for of, block in putting.items() if of == ticket}
        self.putter.memory[offset : offset + size_bytes] = bytes(size_bytes)

    def put(self, guest: int, ticket: int, block: int, *, ack: int = ACK_HOME) -> int:
        """A client says to the courier that what it has written is a block; the question's
        number."""
        return self.put_many(guest, [(ticket, block)], ack=ack)

    def put_many(self, guest: int, rooms: list[tuple[int, int]], *, ack: int = ACK_HOME) -> int:
        """The same of several: tickets and blocks."""
        self._next += 1
        self.guests[guest].asked[self._next] = list(rooms)
        (ticket, block), *further = rooms
        question = PUT_QUESTION.pack(
            *(PUT, NAMESPACE, ack, self._next, key_of(block), self.meaning, ticket)
        )
        self.say(guest, question + b"".join(ROOM.pack(key_of(b), t) for t, b in further))
        return self._next

    def say(self, guest: int, message: bytes) -> bool:
        """A client says something to the courier; False if it is no put."""
        self.putter.prepare(self.now)
        was_put = self.putter.pushes.hear(self.guests[guest].number, message, self.now)
        self.settle()
        return was_put

    def move(self, most: int = 1 << 20, *, spoil: int = 0) -> int:
        """The connection carries so many bytes, and what the home says; `spoil` 1: one of them
        another one; 2: it says so of another block, 3: what there is not. How many moved."""
        if self.pusher is None:
            return 0
        for side in self.sides:
            side.prepare(self.now)
        said = bytearray()
        while len(said) < most:
            left = most - len(said)
            piece, _ = self.putter.pushes.piece_to_send(self.pusher, left, self.now)
            if not piece:
                break
            said += piece
        if spoil == 1 and said:
            said[len(said) // 2] ^= 1
        verdicts = self.home.pushes.brought(self.receiver, bytes(said), self.now)
        self.home.book(self.now)
        if verdicts and spoil > 1:
            number, status = VERDICT.unpack_from(verdicts)
            verdicts = VERDICT.pack(number + (spoil == 2), 7 if spoil == 3 else status)
        self.heard(verdicts)
        return len(said)

    def heard(self, verdicts: bytes) -> None:
        """The home says something to whoever pushes."""
        if self.pusher is not None:
            self.putter.pushes.heard_verdicts(self.pusher, verdicts, self.now)
            self.settle()

    def brought(self, data: bytes) -> bytes:
        """The home is brought something that nobody of ours has said; what it says to it."""
        if self.pusher is None:
            return b""
        self.home.prepare(self.now)
        said = self.home.pushes.brought(self.receiver, data, self.now)
        self.settle()
        return said

    def settle(self) -> None:
        """What compiled code has done is booked, and clients hear of it."""
        for side in self.sides:
            side.book(self.now)
            if side.pushes.cut_off and any(map(bool, side.pushes.take_cut_off())):
                self.cut()
        for number, answer in self.putter.courier.take_answers():
            (guest,) = (n for n, who in enumerate(self.guests) if who.number == number)
            self._told(guest, answer)
        self._make_calls()

    def _told(self, guest: int, answer: bytes) -> None:
        who = self.guests[guest]
        told = list(ANSWER.iter_unpack(answer))
        asked = who.asked.pop(told[0][3], None)
        if asked is None:
            return  # of what a hostile client has said
        assert len(told) in (1, len(asked))
        if len(told) < len(asked):
            assert told[0][0] == ASK_AGENT
            told *= len(asked)
        for (ticket, block), (status, _, _, _, room, offset, copies, digest) in zip(
            asked, told, strict=True
        ):
            self._told_one(who, ticket, block, status, room, offset, copies, digest)

    def _told_one(
        self,
        who: Guest,
        was: int,
        block: int,
        status: int,
        ticket: int,
        offset: int,
        copies: int,
        digest: int,
    ) -> None:
        if status == ASK_AGENT:
            self.handed_over += 1
            return
        assert status == PUT_HOME
        offset_, size_bytes, _ = who.rooms.pop(was)
        if ticket:
            assert offset != offset_
            who.rooms[ticket] = offset, size_bytes, -1
        if not copies:  # it is enough that it is here
            self.put_here += 1
            return
        assert copies == 1
        self.home_took += 1
        copy = self.home.store.peek(BlockId(NAMESPACE, key_of(block)))
        assert copy is not None, "a put was acknowledged, and its home has it not"
        assert copy.home
        held = bytes(self.home.memory[copy.offset : copy.offset + copy.size_bytes])
        assert digest_of(held) == copy.digest == digest
        if block not in self.scribbled:
            assert held == content_of(block), "the home has other bytes than were put"

    def put_by_a_message(self, guest: int, ticket: int, block: int) -> local.AgentReply | None:
        """A client asks its agent to put a room."""
        who = self.guests[guest]
        _, size_bytes, of = who.rooms[ticket]
        self._next += 1
        number = self._next
        request: local.Request = local.Commit(number, [ticket], "local")
        if of < 0:
            request = local.Put(number, NAMESPACE, [key_of(block)], ticket, "local")
        reply = self.handle(guest, request)
        if isinstance(reply, local.Committed):
            self.put_by_message += 1
            who.rooms.pop(ticket, None)
            if reply.room is not None:
                who.rooms[reply.room.ticket] = reply.room.offset, size_bytes, -1
        return reply

    def _make_calls(self) -> None:
        """The home answers calls, as the bulk link has it."""
        serving = self.home.core.serving
        calls, outbox = list(self.putter.core.outbox.calls), self.putter.core.outbox.calls
        outbox.clear()
        for call in calls:
            outcome = UNREACHABLE
            if isinstance(call, PutCall) and self.reachable and call.begin():
                copy = call.copy
                header = PutHeader(copy.block.key, copy.size_bytes, copy.digest)
                put = BulkPut(NAMESPACE, call.epoch, call.meaning, [header])
                refused = serving.refuse_put(f"node-{PUTTER}", put)
                room = refused or serving.begin_put(put, header)
                outcome = room if isinstance(room, str) else bulk.DONE
                if not isinstance(room, str):
                    held = self.putter.store.peek(copy.block)
                    assert held is not None
                    content = self.putter.memory[held.offset : held.offset + held.size_bytes]
                    serving.view(room)[:] = content
                    outcome = serving.end_put(put, header, room, digest_of(content))
            call.ended(self.now, outcome)
        self.home.core.outbox.calls.clear()

    def pass_time(self, seconds: float) -> None:
        """Time goes by, and what is due is done."""
        self.now += seconds
        for side in self.sides:
            side.prepare(self.now)
            side.pushes.expire(self.now)
            for number in side.pushes.still(self.now):
                assert side is self.home
                assert number == self.receiver
                self.cut()
                break
            side.core.handle_timer(self.now)
            side.core.answers_to_send(self.now, 64)
        self.settle()

    def leave(self, guest: int) -> None:
        """A client goes, and another comes."""
        who = self.guests[guest]
        self.putter.courier.leave(who.number)
        who.session.close()
        self.guests[guest] = Guest(self.putter)

    def end(self) -> None:
        """Everybody goes; AssertionError where something is still held then, or unanswered."""
        self.pass_time(2.0)
        self.pass_time(10.0)
        for who in self.guests:
            assert not who.asked, f"without an answer: {who.asked}"
            self.putter.courier.leave(who.number)
            who.session.close()
        self.cut()
        assert self.putter.core.ahead_bytes == 0
        for side in self.sides:
            side.courier.give_room_back()
            side.pushes.book(self.now)
            check_store(side.store)
            assert side.store.allocator.used_bytes == sum(
                copy.reserved_bytes
                for copy in map(side.store.peek, side.store.blocks())
                if copy is not None and copy.state != RESERVED
            ), "room is held for nobody"


@entry_point(
    "pushing",
    "what clients put by questions, nodes push, and homes say of it",
    core_pushing,
)
class PushingHarness(Harness):
    """Steps of three bytes: which, of whom or what, and how; some take what follows, too."""

    def corpus(self) -> list[bytes]:
        begin = bytes([0, 0, 1, 1, 0, 0])
        whole = begin + bytes([2, 0, 2, 4, 0, 0, 5, 0, 255])
        ahead = begin + bytes([3, 0, 2, 4, 0, 3, 5, 0, 255, 4, 0, 7, 5, 0, 3, 5, 0, 255])
        wrong = begin + bytes([2, 1, 2, 4, 1, 0, 6, 0, 1, 5, 0, 255])
        cut = begin + bytes([2, 0, 8, 4, 0, 0, 5, 0, 2, 9, 0, 0, 8, 0, 8, 1, 0, 0])
        raw = (
            begin
            + bytes([10, 0, PUT_QUESTION.size])
            + PUT_QUESTION.pack(PUT, NAMESPACE, 1, 9, key_of(5), 0, 1)
        )
        header = PUSH.pack(*(9, key_of(3), 0, bytes(16), len(content_of(3)), 0, NAMESPACE, 0, 0))
        foreign = begin + bytes([11, 0, PUSH.size]) + header
        return [whole, ahead, wrong, cut, raw, foreign, whole + ahead + bytes([7, 0, 0])]

    def run(self, data: bytes) -> None:
        pair = Pair()
        at = 0
        while at + _STEP.size <= len(data):
            step, what, how = _STEP.unpack_from(data, at)
            at += _STEP.size
            at = self._step(pair, step % 16, what, how, data, at)
        pair.end()

    def _step(self, pair: Pair, step: int, what: int, how: int, data: bytes, at: int) -> int:
        guest, block = what % 2, how % BLOCKS
        who = pair.guests[guest]
        tickets = [t for t in who.rooms if t not in who.putting]
        ticket = tickets[what // 2 % len(tickets)] if tickets else 0
        match step:
            case 0:
                pair.expect(block)
            case 1:
                pair.connect()
            case 2:
                pair.alloc(guest, block)
            case 3:
                pair.room_ahead(guest, block)
            case 4 if ticket:
                size_bytes, of = who.rooms[ticket][1:]
                if of < 0:
                    alike = [n for n in range(BLOCKS) if len(content_of(n)) == size_bytes]
                    of = alike[how % len(alike)]
                pair.write(guest, ticket, of)
                mine = [(ticket, of)]
                if what >= 64:  # others that it has room for, too
                    mine += [(t, who.rooms[t][2]) for t in tickets if t != ticket]
                ready = [(t, block) for t, block in mine if block >= 0]
                pair.put_many(guest, ready, ack=how // 64)
            case 5:
                pair.move(how * how * 4)
            case 6:
                pair.move(how * how * 4, spoil=1 + what % 3)
            case 7:
                pair.leave(guest)
            case 8 if ticket:
                of = who.rooms[ticket][2]
                pair.put_by_a_message(guest, ticket, block if of < 0 else of)
            case 9:
                pair.cut()
            case 10:
                pair.say(guest, data[at : at + how])
                return at + how
            case 11:
                if what % 2:
                    pair.heard(data[at : at + how])
                else:
                    pair.brought(data[at : at + how])
                return at + how
            case 12:
                pair.pass_time(how / 50)
            case 13 if who.asked:
                (busy, *_) = who.putting
                if busy in who.rooms and how % 2:
                    pair.scribble(guest, busy)
                else:  # it asks for what it has given away
                    pair._next += 1
                    pushed = pair.putter.pushes.is_pushed(who.number, busy)
                    reply = pair.handle(guest, local.Abort(pair._next, [busy]))
                    assert isinstance(reply, local.Failed) or not pushed
                    if isinstance(reply, local.Ack):  # others that it has put with it go on
                        who.rooms.pop(busy, None)
            case 14:
                side = pair.sides[what % 2]
                if how < 100:
                    side.store.drop(BlockId(NAMESPACE, key_of(block)))
                elif how < 120:
                    side.courier.give_room_back()
                elif how < 125:
                    side.store.drop_namespace(NAMESPACE)
            case _:
                pair.reachable = how % 4 != 0
                if how > 240:
                    pair.new_map(version=str(how))
        return at
