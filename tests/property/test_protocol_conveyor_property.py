"""Both compiled ends of a conveyor, a home's and a reader's, over a stream that is cut anywhere.

Oracle: the bytes of every block, the stand's books (`bench.fuzz.courier`), and the home's store:
what is leaving stays where it is, whatever is dropped and put meanwhile; of several readers of one
home, a plain model of what it says, byte by byte. Cannot see: sockets
(`test_hostagent_conveyor_pool`).
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from typing import NamedTuple

import pytest
from kvcast.bench.fuzz.courier import (
    BLOCKS,
    HOME,
    LARGE,
    NAMESPACE,
    Chain,
    Stand,
    content_of,
    key_of,
    offer_of,
)
from kvcast.hostagent.core.shared_index import Region, SharedIndex
from kvcast.hostagent.core.store import Copy, Store, StoreError
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.protocol.conveyor import (
    COUNTED,
    GATHER_BYTES,
    GIVEN_HERE,
    GIVEN_ROOM,
    LEAVING,
    NODES,
    NOT_HERE,
    READ_IT,
    REPLY,
    REQUEST,
    REQUESTS,
    ROOM_BYTES,
    Givers,
)
from kvcast.protocol.lane import Lane
from kvcast.protocol.meetings import Meetings
from kvcast.protocol.messages.questions import ASK_AGENT, MAX_CHAIN
from kvcast.protocol.messages.shared import REGION_BYTES, index_bytes
from kvcast.protocol.messages.wire import KEY_BYTES, BlockId, digest_of
from kvcast.protocol.pushing import PUSH
from meeting_model import Table
from seeds import seeds

READER = 1
SLAB = 64 * 1024
SLABS = 24


def _offended(why: str) -> None:
    raise AssertionError(why)


class Home:
    """Node 2 of two: a store, and what it gives of it. Namespace 1 is for all nodes, 2 for all
    but READER."""

    def __init__(self) -> None:
        size_bytes = SLAB * SLABS
        self.memory = memoryview(bytearray(size_bytes))
        self.store = Store(Allocator(size_bytes, SLAB))
        index_memory = memoryview(bytearray(index_bytes(buckets_for(size_bytes))))
        index = Index(index_memory, size_bytes, 1)
        self.shared = SharedIndex(index, self.store, barrier=lambda: None)
        lane = Lane(index_memory, self.memory, max_chunk_bytes=1024)
        lane.use({NAMESPACE: None, 2: [HOME, READER + 3]}, b"")
        self.lane = lane
        pins = memoryview(bytearray(REGION_BYTES))
        self.shared.join(Region(pins, size_bytes, _offended))
        self.meetings = Meetings()
        self.knows_all = ctypes.c_uint64(0)
        at = ctypes.addressof(self.knows_all)
        self.givers = Givers(lane.address, pins, self.meetings, at)
        self.number = self.givers.begin(READER)
        self.given = 0

    def put(self, number: int, namespace: int = NAMESPACE) -> Copy | None:
        block, data = BlockId(namespace, key_of(number)), content_of(number)
        if self.store.peek(block) is not None:
            return None
        try:
            copy = self.store.reserve(block, len(data))
        except StoreError:
            return None
        self.memory[copy.offset : copy.offset + len(data)] = data
        return self.store.commit(copy, digest_of(data), home=True)

    def answers(self, said: bytes, at_most: int = 1 << 20) -> bytes:
        """What is sent when this is heard, and everything was."""
        assert self.number is not None
        self.givers.hear(self.number, said)
        out = b""
        while data := self.givers.bytes_to_send(self.number, at_most):
            out += data
            self.book()
        return out

    def book(self) -> int:
        given, sent_bytes = self.givers.take_given()
        self.given += len(given)
        for each in given:
            assert each.node in (READER, READER + 1, READER + 3)
        return sent_bytes


def request(
    number: int, block: int, *, digest: int = 0, start: int = 0, namespace: int = 1
) -> bytes:
    return REQUEST.pack(number, key_of(block), digest, start, namespace, 0)


def test_what_is_asked_for_comes_in_order_from_where_it_is_wanted() -> None:
    home = Home()
    home.put(12)
    home.put(1)
    said = request(7, 12, start=65536) + request(8, 1) + request(9, 12, digest=5) + request(3, 5)
    out = home.answers(said)
    large, small = content_of(12), content_of(1)
    wanted = REPLY.pack(7, digest_of(large), len(large), 1) + large[65536:]
    wanted += REPLY.pack(8, digest_of(small), len(small), 1) + small
    wanted += REPLY.pack(9, 0, 0, NOT_HERE) + REPLY.pack(3, 0, 0, NOT_HERE)
    assert out == wanted
    assert home.given == 2


def test_what_goes_before_a_blocks_bytes_takes_whole_cache_lines() -> None:
    """Else the kernel's copy of them may be of the slow kind (`PADDING_WORDS`)."""
    assert REPLY.size % 64 == PUSH.size % 64 == 0


def replies_of(out: bytes) -> list[int]:
    """The statuses of replies that no bytes follow."""
    return [status for _, _, _, status in REPLY.iter_unpack(out)]


def test_what_two_ask_for_before_its_turn_has_come_both_are_told_to_read() -> None:
    home = Home()
    large = [number for number in range(60) if len(content_of(number)) > SLAB][:3]
    for number in large:
        assert home.put(number) is not None
    other = home.givers.begin(READER + 1)
    assert home.number is not None
    assert other is not None
    said = b"".join(request(n, number) for n, number in enumerate(large * 2))
    home.givers.hear(home.number, said)
    assert len(large) == 3
    begun = home.givers.bytes_to_send(home.number, 1000)
    assert REPLY.unpack_from(begun)[3] == GIVEN_HERE
    home.book()
    home.givers.hear(other, request(9, large[1]) + request(10, large[2]))
    assert replies_of(home.givers.bytes_to_send(other, 1 << 20)) == [READ_IT] * 2
    out = begun
    while data := home.givers.bytes_to_send(home.number, 1 << 20):
        out += data
        home.book()
    first = content_of(large[0])
    assert out[REPLY.size :].startswith(first), "what has begun to leave goes on"
    assert set(replies_of(out[REPLY.size + len(first) :])) == {READ_IT}
    assert home.given == 1


def test_a_node_learns_nothing_of_who_wants_what_it_may_not_use() -> None:
    home = Home()
    assert home.put(1) is not None
    wanting = [home.givers.begin(node) for node in (HOME, READER + 3)]
    for number in wanting:
        assert number is not None
        home.givers.hear(number, request(1, 1) + request(2, 12, namespace=2))
        home.givers.bytes_to_send(number, 1)  # the other is noted
        home.book()
    assert home.meetings.is_met(0.0, BlockId(2, key_of(12)))
    assert home.put(3) is not None
    out = home.answers(request(1, 3) + request(2, 12, namespace=2))
    assert REPLY.unpack_from(out)[3] == GIVEN_HERE


def test_who_hangs_up_is_not_waited_for() -> None:
    home = Home()
    assert home.put(12) is not None
    assert home.put(1) is not None
    other = home.givers.begin(READER + 1)
    assert home.number is not None
    assert other is not None
    home.givers.hear(other, request(1, 1) + request(2, 12))
    home.givers.bytes_to_send(other, 1)
    home.givers.end(other)
    assert REPLY.unpack_from(home.answers(request(1, 12)))[3] == GIVEN_HERE


@pytest.mark.parametrize("namespace", [2, 3])
def test_what_a_node_may_not_use_is_not_given(namespace: int) -> None:
    home = Home()
    home.put(12, namespace=namespace)
    out = home.answers(request(1, 12, namespace=namespace))
    assert out == REPLY.pack(1, 0, 0, NOT_HERE)
    assert not home.given


@pytest.mark.parametrize("start", [len(content_of(12)), 0xFFFF_FFFF])
def test_nothing_is_given_from_beyond_a_blocks_end(start: int) -> None:
    home = Home()
    home.put(12)
    assert home.answers(request(1, 12, start=start)) == REPLY.pack(1, 0, 0, NOT_HERE)
    assert not home.given


def test_what_is_leaving_stays_where_it_is_until_it_has_left() -> None:
    home = Home()
    copy = home.put(12)
    assert copy is not None
    assert home.number is not None
    home.givers.hear(home.number, request(1, 12))
    out = home.givers.bytes_to_send(home.number, 1000)
    home.store.drop(BlockId(NAMESPACE, key_of(12)))
    for number in range(BLOCKS):
        home.put(number)
        if number != 12:
            home.store.drop(BlockId(NAMESPACE, key_of(number)))
    while data := home.givers.bytes_to_send(home.number, 1000):
        out += data
    assert out[REPLY.size :] == content_of(12)
    home.shared.refresh()
    assert copy.pins == 0


@pytest.mark.parametrize("at_most", [700, 20_000, 90_000, 1 << 20])
@pytest.mark.parametrize("connections", [1, 3, NODES])
def test_several_that_leave_together_stay_where_they_are_until_each_has_left(
    connections: int, at_most: int
) -> None:
    home = Home()
    for _ in range(connections - 1):
        home.number = home.givers.begin(READER)
    blocks = [1, 2, 5, 3, 7, 8]
    copies = {number: home.put(number) for number in blocks if number != 5}
    assert home.number is not None
    home.givers.hear(home.number, b"".join(request(number, number) for number in blocks))
    out = b""
    while data := home.givers.bytes_to_send(home.number, at_most):
        out += data
        assert home.givers.givers[home.number].count <= LEAVING
        for number in blocks:
            home.store.drop(BlockId(NAMESPACE, key_of(number)))
        for number in (0, 4, 6, 9, 10, 11):  # wherever there is room now
            home.put(number)
        home.book()
    at = 0
    for number in blocks:
        of, digest, size, status = REPLY.unpack_from(out, at)
        at += REPLY.size
        assert of == number
        if status == NOT_HERE:  # it never was, or was dropped before its turn came
            continue
        assert (digest, size) == (digest_of(content_of(number)), len(content_of(number)))
        assert out[at : at + size] == content_of(number)
        at += size
    assert at == len(out)
    home.shared.refresh()
    assert all(copy is None or copy.pins == 0 for copy in copies.values())


def test_no_more_is_given_than_python_has_heard_of() -> None:
    home = Home()
    home.put(1)
    assert home.number is not None
    sent = b""
    for _ in range(2 * GIVEN_ROOM // REQUESTS):
        room = home.givers.room_bytes(home.number) // REQUEST.size
        home.givers.hear(home.number, request(1, 1) * room)
        while data := home.givers.bytes_to_send(home.number, 1 << 20):
            sent += data
    assert len(sent) == GIVEN_ROOM * (REPLY.size + len(content_of(1)))
    home.book()
    assert home.given == GIVEN_ROOM
    assert home.givers.bytes_to_send(home.number, 100)


def test_there_are_so_many_connections_and_no_more() -> None:
    home = Home()
    numbers = [home.givers.begin(READER) for _ in range(NODES)]
    assert numbers[-1] is None
    assert None not in numbers[:-1]
    assert numbers[0] is not None
    home.givers.end(numbers[0])
    assert home.givers.begin(READER) == numbers[0]


# --- several readers of one home, beside a model ----------------------------------------------


class Asked(NamedTuple):
    """A request; `chain`: of how many of these blocks there are, else for the one of them."""

    number: int
    namespace: int
    keys: list[bytes]
    chain: bool
    digest: int
    start: int

    @property
    def blocks(self) -> list[BlockId]:
        return [BlockId(self.namespace, key) for key in self.keys]


class Reader:
    """One connection, and what its home should say there."""

    def __init__(self, home: ManyReaders, number: int, node: int) -> None:
        self.home = home
        self.number = number
        self.node = node
        self.gone = False
        self._said = b""
        """Requests, as far as they are no whole one,"""
        self.bytes_there = 0
        """how long all are that are there, those not whole included,"""
        self._queue: list[tuple[Asked | None, int]] = []
        """and those whose turn has not come, each with its length; None: there is none such."""
        self._noted = 0
        self._to_read = 0
        self._leaving = b""
        self._replies = 0
        """As many have begun to leave since nothing was leaving."""

    def _may_use(self, namespace: int) -> bool:
        return namespace == NAMESPACE or (namespace == 2 and self.node != READER)

    def hear(self, said: bytes) -> None:
        self._said += said
        self.bytes_there += len(said)
        while len(self._said) >= REQUEST.size and (not self._queue or self._queue[-1][0]):
            number, key, digest, start, namespace, kind = REQUEST.unpack_from(self._said)
            if kind > 1 or (kind == 1 and start > MAX_CHAIN):
                self._queue.append((None, REQUEST.size))
                return
            size = REQUEST.size + KEY_BYTES * start * kind
            if len(self._said) < size:
                return
            further = self._said[REQUEST.size : size]
            self._said = self._said[size:]
            keys = [further[at : at + KEY_BYTES] for at in range(0, len(further), KEY_BYTES)]
            asked = Asked(number, namespace, keys if kind else [key], kind == 1, digest, start)
            self._queue.append((asked, size))

    def _note(self) -> None:
        table, now = self.home.table, self.home.now
        for asked, _ in self._queue[self._noted :]:
            if asked is None:
                break
            self._noted += 1
            if not asked.chain and self._may_use(asked.namespace):
                table.asks(now, asked.blocks[0], self.node)
        if not self._to_read:
            blocks = [a.blocks[0] for a, _ in self._queue[: self._noted] if a and not a.chain]
            met = [b for b in blocks if self._may_use(b.namespace) and table.is_met(now, b)]
            if met and 2 * len(met) >= len(blocks):
                self._to_read = len(blocks)

    def _reply(self, asked: Asked) -> bytes:
        """The whole reply to a request whose turn has come."""
        table, store, now = self.home.table, self.home.store, self.home.now
        nothing = REPLY.pack(asked.number, 0, 0, NOT_HERE)
        copies = [store.peek(block) for block in asked.blocks]
        allowed = self._may_use(asked.namespace)
        if asked.chain:
            count = copies.index(None) if None in copies else len(copies)
            knows_all = self.home.knows_all.value
            return REPLY.pack(asked.number, knows_all, count, COUNTED) if allowed else nothing
        (block,), (copy,) = asked.blocks, copies
        read = bool(self._to_read) or table.is_met(now, block)
        self._to_read = max(0, self._to_read - 1)
        if read and allowed and copy is not None:
            table.told(now, block, self.node)
            return REPLY.pack(asked.number, 0, 0, READ_IT)
        table.leaves(now, block, self.node)
        if not allowed or copy is None or asked.start >= copy.size_bytes:
            return nothing
        if asked.digest not in (0, copy.digest):
            return nothing
        data = self.home.memory[copy.offset : copy.offset + copy.size_bytes]
        header = REPLY.pack(asked.number, copy.digest, len(data), GIVEN_HERE)
        return header + bytes(data[asked.start :])

    def bytes_to_send(self, at_most: int) -> bytes:
        while len(self._leaving) < at_most and self._queue:
            if self._replies == LEAVING or len(self._leaving) >= GATHER_BYTES:
                break
            self._note()
            asked, size = self._queue[0]
            if asked is None:
                self.gone = True
                break
            self._queue.pop(0)
            self._noted = max(0, self._noted - 1)
            self.bytes_there -= size
            reply = self._reply(asked)
            self.home.replies[REPLY.unpack_from(reply)[3]] += 1
            self._leaving += reply
            self._replies += 1
        data, self._leaving = self._leaving[:at_most], self._leaving[at_most:]
        if not self._leaving:
            self._replies = 0
        return data

    def end(self) -> None:
        for asked, _ in self._queue[: self._noted]:
            if asked is not None and not asked.chain:
                self.home.table.leaves(self.home.now, asked.blocks[0], self.node)


class ManyReaders(Home):
    """A home that several read from at once, one of them on two connections."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.table = Table()
        self.now = 1.0
        self.replies: Counter[int] = Counter()
        assert self.number is not None
        self.givers.end(self.number)
        self.readers = [self._begin(node) for node in (READER, READER + 1, READER + 1, READER + 3)]
        self.unsaid = [b""] * len(self.readers)
        """What is on its way, by reader."""

    def _begin(self, node: int) -> Reader:
        number = self.givers.begin(node)
        assert number is not None
        return Reader(self, number, node)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.meetings.at(self.now)

    def a_request(self) -> bytes:
        rng = self.rng
        number, namespace = rng.randrange(1 << 62), rng.choice([1, 1, 1, 1, 1, 2, 3])
        if rng.random() < 0.25:
            keys = [key_of(rng.randrange(12)) for _ in range(rng.choice([0, 1, 3, 9]))]
            keys *= rng.choice([1, 1, 1, MAX_CHAIN // 9])
            start = len(keys)
            kind = 1
            if rng.random() < 0.01:
                start = rng.choice([MAX_CHAIN + 1, 0xFFFF_FFFF])
            header = REQUEST.pack(number, bytes(KEY_BYTES), 0, start, namespace, kind)
            return header + b"".join(keys)
        block = rng.randrange(12)
        digest = rng.choice([0, 0, digest_of(content_of(block)), 7])
        start = rng.choice([0, 0, 1000, 65536, 0xFFFF_FFFF])
        kind = 0 if rng.random() < 0.997 else 2
        return REQUEST.pack(number, key_of(block), digest, start, namespace, kind)

    def say(self, place: int) -> None:
        """Some bytes of what a reader asks arrive; a request may end anywhere."""
        reader, rng = self.readers[place], self.rng
        for _ in range(rng.choice([0, 1, 1, 8])):
            self.unsaid[place] += self.a_request()
        room_bytes = self.givers.room_bytes(reader.number)
        assert room_bytes == ROOM_BYTES - reader.bytes_there
        said = self.unsaid[place][
            : min(rng.choice([1, 39, 40, 56, 500, 5000, 1 << 20]), room_bytes)
        ]
        self.unsaid[place] = self.unsaid[place][len(said) :]
        self.givers.hear(reader.number, said)
        reader.hear(said)

    def give(self, place: int) -> bool:
        """Whether anything was sent to a reader; it is what the model says."""
        reader = self.readers[place]
        at_most = self.rng.choice([1, 24, 100, 30_000, 1 << 20])
        wanted = reader.bytes_to_send(at_most)
        assert self.givers.bytes_to_send(reader.number, at_most) == wanted
        self.book()
        assert bool(self.givers.givers[reader.number].gone) == reader.gone
        if reader.gone and not wanted:
            self.end_one(place)
        return bool(wanted)

    def end_one(self, place: int) -> None:
        """A connection ends, wherever it is, and its node makes another."""
        reader = self.readers[place]
        self.givers.end(reader.number)
        reader.end()
        self.unsaid[place] = b""
        self.readers[place] = self._begin(reader.node)

    def some_step(self) -> None:
        rng = self.rng
        place, block = rng.randrange(len(self.readers)), rng.randrange(12)
        match rng.randrange(20):
            case 0:
                self.put(block, namespace=rng.choice([1, 1, 2]))
            case 1 if rng.random() < 0.3:
                self.store.drop(BlockId(NAMESPACE, key_of(block)))
            case 2 if rng.random() < 0.2:
                self.end_one(place)
            case 3:
                self.pass_time(rng.choice([0.001, 0.5, 2.5, 31]))
            case 4:  # asked for in another way
                name = BlockId(NAMESPACE, key_of(block))
                node = rng.choice([READER, READER + 3])
                asks = rng.random() < 0.2
                if asks:
                    self.meetings.asks(self.now, name, node)
                    self.table.asks(self.now, name, node)
                else:
                    told = self.meetings.reads(self.now, name, node)
                    assert told == self.table.reads(self.now, name, node)
            case 5:
                self.knows_all.value = rng.randrange(2)
            case 6 | 7 | 8 | 9 | 10 | 11:
                self.say(place)
            case _:
                self.give(place)


@pytest.mark.parametrize("seed", range(8))
def test_several_readers_are_told_what_the_model_says_byte_by_byte(seed: int) -> None:
    home = ManyReaders(seed)
    for _ in range(1500):
        home.some_step()
    for place in range(len(home.readers)):
        while home.give(place):
            pass
        home.end_one(place)
    assert home.meetings.met == home.table.told_in_all
    home.shared.refresh()
    for block in (BlockId(1, key_of(number)) for number in range(12)):
        copy = home.store.peek(block)
        assert copy is None or copy.pins == 0


def test_the_steps_of_the_test_above_have_every_kind_of_reply() -> None:
    replies: Counter[int] = Counter()
    for seed in range(3):
        home = ManyReaders(seed)
        for _ in range(1500):
            home.some_step()
        replies += home.replies
    for status in (GIVEN_HERE, NOT_HERE, COUNTED, READ_IT):
        assert replies[status] > 20


class Both(Stand):
    """A reader, and what lies between it and a home."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.home = Home()
        self.home.knows_all.value = 1
        self.may: dict[Chain, set[int]] = {}
        """The places of those of a chain that may count,"""
        self.must: dict[Chain, set[int]] = {}
        """and of those that must."""
        self.there = b""
        """On its way to the home,"""
        self.back = b""
        """and from it."""
        self.expect_large()
        self.connect()

    def connect(self) -> None:
        self.begin_conveyor()
        self.there = self.back = b""
        assert self.home.number is not None
        self.home.givers.end(self.home.number)
        self.home.number = self.home.givers.begin(READER)

    def _at_home(self, chain: Chain) -> set[int]:
        blocks = [BlockId(NAMESPACE, key) for key in chain.keys]
        return {place for place, block in enumerate(blocks) if self.home.store.peek(block)}

    def home_changed(self) -> None:
        """The home has what it had not, or the other way round."""
        for chain, may in self.may.items():
            now = self._at_home(chain)
            may |= now
            self.must[chain] &= now | chain.here

    def _begin_chain(self, keys: list[bytes], here: frozenset[int]) -> Chain:
        chain = super()._begin_chain(keys, here)
        self.may[chain] = self._at_home(chain) | here
        self.must[chain] = self._at_home(chain) | here
        return chain

    def _check_count(self, chain: Chain, told: tuple[int, ...]) -> None:
        may, must = self.may.pop(chain), self.must.pop(chain)
        status, more, _, _, _, _, count, _ = told
        if status == ASK_AGENT:
            self.handed_over += 1
            return
        assert may >= set(range(count)), "it counts what there was not"
        assert count == len(chain.keys) or count not in must
        assert not more, "nothing lies below"
        self.counted += 1

    def _hear_conveyor(self) -> None:
        if self.conveyor is not None:
            self.there += self.courier.requests_to_send(self.conveyor)
            assert not self.courier.take_cut_off()

    def move(self) -> bool:
        """Some bytes move, one way; whether there are any."""
        assert self.home.number is not None
        rng, givers = self.rng, self.home.givers
        if self.there and rng.random() < 0.5:
            count = min(rng.randrange(1, 100), givers.room_bytes(self.home.number))
            givers.hear(self.home.number, self.there[:count])
            self.there = self.there[count:]
            return True
        if len(self.back) < 100_000 and rng.random() < 0.6:
            data = givers.bytes_to_send(self.home.number, rng.choice([1, 100, 5_000, 70_000]))
            self.back += data
            self.home.book()
            if data:
                return True
        if self.back:
            count = rng.choice([1, 10, 24, 3_000, 80_000])
            self.brought(self.back[:count])
            self.back = self.back[count:]
            return True
        return bool(self.there)

    def drain(self) -> None:
        """All that is on its way arrives."""
        while any(self.move() for _ in range(30)):
            pass


@pytest.mark.parametrize("seed", seeds(16, quick=3))
def test_blocks_arrive_whole_whatever_happens_at_either_end(seed: int) -> None:
    both = Both(seed)
    rng = both.rng
    for _ in range(150):
        block = rng.randrange(LARGE, BLOCKS)
        match rng.randrange(14):
            case 0 | 1:
                both.ask(rng.randrange(2), block)
                both.receive(offer_of(block))
                both.bring(block)
            case 2:
                both.home.put(block)
                both.home_changed()
            case 3:
                both.home.store.drop(BlockId(NAMESPACE, key_of(block)))
                both.home_changed()
            case 4:
                both.home.put(rng.randrange(LARGE))
                both.home_changed()
            case 9 | 10:
                chain = [rng.randrange(BLOCKS) for _ in range(rng.choice([1, 2, 3, 5, 200]))]
                both.ask_how_many(rng.randrange(2), chain)
            case 5:
                both.store.drop(BlockId(NAMESPACE, key_of(block)))
            case 6 if rng.random() < 0.1:
                both.end_conveyor()
                both.connect()
            case 7:
                both.pass_time(rng.choice([0.0001, 0.001, 0.01]))
            case 8 if both.held[0]:
                both.give_back(0, rng.choice(list(both.held[0])))
            case _:
                for _ in range(rng.randrange(20)):
                    both.move()
    both.drain()
    both.end()
    both.home.shared.refresh()
    for block in (BlockId(NAMESPACE, key_of(number)) for number in range(BLOCKS)):
        copy = both.home.store.peek(block)
        assert copy is None or copy.pins == 0
    assert not both.courier.values()["courier_handed_over_wrong_digest_total"]


def test_the_steps_of_the_test_above_bring_blocks() -> None:
    given = counted = 0
    for seed in range(4):
        both = Both(seed)
        for block in range(LARGE, BLOCKS):
            both.home.put(block)
            both.ask(0, block)
            both.receive(offer_of(block))
            both.bring(block)
        both.drain()
        for chain in (range(LARGE, BLOCKS), [LARGE, 0]):
            both.ask_how_many(0, chain)
            both.drain()
        counted += both.counted
        given += both.given
        both.end()
    assert counted == 8
    assert given == 4 * (BLOCKS - LARGE)
