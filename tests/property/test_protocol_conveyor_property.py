"""Both compiled ends of a conveyor, a home's and a reader's, over a stream that is cut anywhere.

Oracle: the bytes of every block, the stand's books (`bench.fuzz.courier`), and the home's store:
what is leaving stays where it is, whatever is dropped and put meanwhile. Cannot see: sockets
(`test_hostagent_conveyor_pool`).
"""

from __future__ import annotations

import random

import pytest
from kvcast.bench.fuzz.courier import (
    BLOCKS,
    HOME,
    LARGE,
    NAMESPACE,
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
    GIVEN_HERE,
    GIVEN_ROOM,
    LEAVING,
    NODES,
    NOT_HERE,
    READ_IT,
    REPLY,
    REQUEST,
    REQUESTS,
    Givers,
)
from kvcast.protocol.lane import Lane
from kvcast.protocol.messages.shared import REGION_BYTES, index_bytes
from kvcast.protocol.messages.wire import BlockId, digest_of

READER = 1
SLAB = 64 * 1024
SLABS = 24


def _offended(why: str) -> None:
    raise AssertionError(why)


class Home:
    """Node 2 of two: a store, and what it gives of it. Namespace 1 is for all nodes, 2 for none of
    ours."""

    def __init__(self) -> None:
        size_bytes = SLAB * SLABS
        self.memory = memoryview(bytearray(size_bytes))
        self.store = Store(Allocator(size_bytes, SLAB))
        index_memory = memoryview(bytearray(index_bytes(buckets_for(size_bytes))))
        index = Index(index_memory, size_bytes, 1)
        self.shared = SharedIndex(index, self.store, barrier=lambda: None)
        lane = Lane(index_memory, self.memory, max_chunk_bytes=1024)
        lane.use({NAMESPACE: None, 2: [HOME]}, b"")
        self.lane = lane
        pins = memoryview(bytearray(REGION_BYTES))
        self.shared.join(Region(pins, size_bytes, _offended))
        self.givers = Givers(lane.address, pins)
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
            assert each.node in (READER, READER + 1)
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


def test_who_does_not_know_of_companies_is_given_what_it_asks_for() -> None:
    home = Home()
    assert home.put(12) is not None
    other = home.givers.begin(READER + 1)
    assert home.number is not None
    assert other is not None
    home.givers.givers[other].may_read = 0
    for number in (home.number, other):
        home.givers.hear(number, request(1, 12))
    for number in (home.number, other):
        out = home.givers.bytes_to_send(number, 1 << 20)
        assert REPLY.unpack_from(out)[3] == GIVEN_HERE
        home.book()


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


class Both(Stand):
    """A reader, and what lies between it and a home."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.home = Home()
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


@pytest.mark.parametrize("seed", range(16))
def test_blocks_arrive_whole_whatever_happens_at_either_end(seed: int) -> None:
    both = Both(seed)
    rng = both.rng
    for _ in range(150):
        block = rng.randrange(LARGE, BLOCKS)
        match rng.randrange(12):
            case 0 | 1:
                both.ask(rng.randrange(2), block)
                both.receive(offer_of(block))
                both.bring(block)
            case 2:
                both.home.put(block)
            case 3:
                both.home.store.drop(BlockId(NAMESPACE, key_of(block)))
            case 4:
                both.home.put(rng.randrange(LARGE))
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
    given = 0
    for seed in range(4):
        both = Both(seed)
        for block in range(LARGE, BLOCKS):
            both.home.put(block)
            both.ask(0, block)
            both.receive(offer_of(block))
            both.bring(block)
        both.drain()
        given += both.given
        both.end()
    assert given == 4 * (BLOCKS - LARGE)
