"""Shared answers by RDMA, with a switch and cards that lose, repeat, delay and mix up WRITEs.

The cores are those of the agent: requesters with landing zones, and a home's responder with
`Writing`. Oracle: every fetch ends with the block's own bytes, whatever the cards did. Cannot see:
real cards (tests/rdma), and which frames pass a switch (tests/p4/test_p4_writes.py).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from kvcast.hostagent.core.rdma_answers import Writing
from kvcast.protocol.messages import roce, wire
from kvcast.protocol.messages.wire import BlockId, Frame, digest_of
from kvcast.protocol.requester import Fetched, Requester, RequesterConfig
from kvcast.protocol.requester.landing import Landing
from kvcast.protocol.responder import Answer, Responder, ResponderConfig
from seeds import seeds

HOME = 0
CHUNK = roce.SHARED_CHUNKING.chunk_bytes
STEP_S = 0.002


def place(index: int, slot: int, namespace: int = 3) -> roce.Place:
    return roce.Place.of(namespace, index, slot)


# --- the landing zone -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def memory() -> memoryview:
    return memoryview(bytearray(roce.ZONE_BYTES))


def test_a_slot_is_one_segment_s_at_a_time(memory: memoryview) -> None:
    landing = Landing(memory)
    assert landing.claim(place(1, 5), "first")
    assert not landing.claim(place(2, 5), "second")
    landing.release(place(1, 5))
    assert landing.claim(place(2, 5), "second")
    assert landing.claims == 1


def test_two_segments_that_cannot_be_told_apart_do_not_come_at_once(memory: memoryview) -> None:
    landing = Landing(memory)
    one = place(0, 1)
    other = roce.Place.of(one.namespace ^ (1 << 2), one.entry_index, 0)
    assert one.name == other.name
    assert landing.claim(one, 1)
    assert not landing.claim(other, 2)


def test_a_segment_is_told_of_once_when_all_that_it_wants_has_come(memory: memoryview) -> None:
    landing = Landing(memory)
    one = place(7, 9)
    landing.claim(one, "owner")
    landing.await_end(one, 1 | 1 << 5 | 1 << 63, 1 << 63)
    assert landing.landed([one.immediate(0), one.immediate(5), one.immediate(0)]) == []
    assert landing.landed([one.immediate(63)]) == ["owner"]
    assert landing.landed([one.immediate(63)]) == []
    assert landing.take(one) == 1 | 1 << 5 | 1 << 63
    assert landing.take(one) == 0
    assert landing.counters.chunks == 5


def test_nobody_hears_of_a_segment_before_the_end_of_its_answer_is_known(
    memory: memoryview,
) -> None:
    landing = Landing(memory)
    one = place(7, 9)
    landing.claim(one, "owner")
    assert landing.landed([one.immediate(chunk) for chunk in range(63)]) == []
    assert landing.peek(one) == (1 << 63) - 1
    landing.await_end(one, 1 << 63, 1 << 63)
    assert landing.landed([one.immediate(63)]) == ["owner"]


def test_a_segment_whose_answer_has_ended_is_told_of_at_its_last_chunk(memory: memoryview) -> None:
    asked: list[bool] = []
    landing = Landing(memory, await_more=lambda: asked.append(True))
    one = place(7, 9)
    landing.claim(one, "owner")
    assert not landing.awaits_ends
    landing.await_end(one, 0xFF, 1 << 7)
    assert asked == [True]
    assert landing.awaits_ends
    assert landing.landed([one.immediate(2)]) == []
    assert landing.landed([one.immediate(7)]) == ["owner"]
    assert not landing.awaits_ends
    assert landing.take(one) == 1 << 2 | 1 << 7


@pytest.mark.parametrize("seed", range(8))
def test_chunks_are_noted_in_whatever_order_they_come(memory: memoryview, seed: int) -> None:
    """Beside a plain model: what came since it was last asked, and of what Python hears."""
    rng = random.Random(seed)
    landing = Landing(memory)
    namespaces = rng.sample(range(1 << 16), 5)
    places = [place(rng.randrange(1 << 16), slot, n) for slot, n in enumerate(namespaces, 60)]
    model: list[set[int]] = [set() for _ in places]
    taken: list[set[int]] = [set() for _ in places]
    wanted = [set(rng.sample(range(64), rng.randrange(1, 65))) for _ in places]
    for one, wants in zip(places, wanted, strict=True):
        landing.claim(one, one)
        landing.await_end(one, sum(1 << n for n in wants), 1 << max(wants))
    for _ in range(60):
        came = []
        before = [set(chunks) for chunks in model]
        for _ in range(rng.randrange(6)):
            which, first = rng.randrange(len(places)), rng.randrange(64)
            chunks = range(first, min(64, first + rng.choice((1, 2, 64))))
            came += [places[which].immediate(chunk) for chunk in chunks]
            model[which] |= set(chunks)
        told = [
            one
            for one, wants, was, now in zip(places, wanted, before, model, strict=True)
            if was != now and (wants <= now or max(wants) in now - was)
        ]
        assert sorted(landing.landed(came)) == sorted(told)
        which = rng.randrange(len(places))
        new = landing.take(places[which])
        assert {n for n in range(64) if new >> n & 1} == model[which] - taken[which]
        taken[which] |= model[which]


@pytest.mark.parametrize("seed", range(4))
def test_slots_are_claimed_and_given_back_in_any_order(memory: memoryview, seed: int) -> None:
    """And a chunk is its segment's, whoever else has a slot."""
    rng = random.Random(seed)
    landing = Landing(memory)
    places = {slot: place(rng.randrange(1 << 16), slot) for slot in range(roce.ZONE_SLOTS)}
    claimed: dict[int, roce.Place] = {}
    for _ in range(600):
        slot = rng.randrange(roce.ZONE_SLOTS)
        if slot in claimed:
            chunk = rng.randrange(64)
            assert landing.landed([claimed[slot].immediate(chunk)]) == []
            assert landing.take(claimed[slot]) == 1 << chunk
            landing.release(claimed.pop(slot))
        elif landing.claim(places[slot], slot):
            claimed[slot] = places[slot]
        assert landing.claims == len(claimed)
    assert landing.counters.stray == landing.counters.late == 0


def test_segments_of_a_block_have_slots_of_their_own() -> None:
    for number in range(20):
        key = number.to_bytes(16, "big")
        slots = {
            roce.place_of(5, key, roce.SHARED_CHUNKING.number(index)).slot
            for index in range(roce.ZONE_SLOTS)
        }
        assert len(slots) == roce.ZONE_SLOTS


def test_no_more_is_awaited_than_the_card_can_take(memory: memoryview) -> None:
    landing = Landing(memory, most=2)
    assert landing.claim(place(1, 1), 1)
    assert landing.claim(place(2, 2), 2)
    assert not landing.claim(place(3, 3), 3)
    landing.release(place(1, 1))
    assert landing.claim(place(3, 3), 3)


def test_what_nobody_waits_for_is_counted(memory: memoryview) -> None:
    landing = Landing(memory)
    assert landing.landed([place(7, 9).immediate(3)]) == []
    assert landing.counters.stray == 1


def test_a_late_chunk_spoils_what_it_overwrites(memory: memoryview) -> None:
    landing = Landing(memory)
    before, now = place(7, 9), place(8, 9)
    landing.claim(before, 1)
    landing.release(before)
    landing.claim(now, 2)
    landing.landed([now.immediate(0), now.immediate(1), before.immediate(1)])
    assert landing.take(now) == 1
    landing.landed([now.immediate(1)])
    assert landing.take(now) == 2
    counters = landing.counters
    assert (counters.late, counters.spoiled) == (1, 1)


def test_a_segment_that_comes_back_to_its_slot_is_nobody_s_former(memory: memoryview) -> None:
    landing = Landing(memory)
    one = place(7, 9)
    for _ in range(3):
        assert landing.claim(one, 1)
        landing.await_end(one, 1 << 4, 1 << 4)
        assert landing.landed([one.immediate(4)]) == [1]
        assert landing.take(one) == 1 << 4
        landing.release(one)
    landing.landed([one.immediate(4)])
    assert landing.counters.late == 1


def test_a_zone_of_a_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a zone of 4096 bytes"):
        Landing(memoryview(bytearray(4096)))


def test_without_a_card_nothing_is_claimed(memory: memoryview) -> None:
    landing = Landing(memory)
    landing.lost()
    assert not landing.claim(place(1, 1), 1)


# --- a pool -----------------------------------------------------------------------------------


class Held:
    def __init__(self, data: bytearray) -> None:
        self.data = memoryview(data)[:]
        self.digest = digest_of(data)

    def release(self) -> None:
        self.data.release()


class Room:
    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))

    def abort(self) -> None:
        pass


class Reader:
    def __init__(self, pool: Net, number: int, *, landing: bool = True, **config: Any) -> None:
        self.number = number
        self.requester = Requester(
            RequesterConfig(
                **({"rto_initial_s": 0.05, "rto_min_s": 0.02, "quiet_s": 0.02} | config)
            ),
            allocate=lambda _block, size: Room(size),
            rng=random.Random(number),
        )
        self.requester.use_writers(frozenset({HOME}))
        self.landing: Landing | None = None
        self.completions: list[int] = []
        self.memory = memoryview(bytearray(roce.ZONE_BYTES))
        self.deaf = False
        self.doubts = 0
        self.pool = pool
        if landing:
            self.use_card()
        self.fetched: dict[BlockId, Any] = {}

    def use_card(self) -> None:
        """With memory that it has not had before."""
        self.memory = memoryview(bytearray(roce.ZONE_BYTES))
        self.landing = Landing(self.memory, self.look, doubt=self.doubt)
        self.requester.use_landing(self.landing)

    def doubt(self) -> None:
        """As an agent does it: the zone is not used any more, and soon another is made."""
        assert self.landing is not None
        self.doubts += 1
        self.landing.lost()

    def look(self) -> None:
        if self.landing is not None and self.completions:
            came, self.completions = self.completions, []
            self.requester.landed(self.pool.now, self.landing.landed(came))

    def fetch(self, block: BlockId) -> None:
        self.requester.fetch(
            self.pool.now,
            block,
            (HOME,),
            deadline=self.pool.now + 30.0,
            chunking=roce.SHARED_CHUNKING,
            probe=False,
        )

    def events(self) -> None:
        while (event := self.requester.next_event()) is not None:
            if isinstance(event, Fetched):
                self.fetched[event.block] = event.reservation
            elif hasattr(event, "reason"):
                self.fetched[event.block] = event.reason


class Net:
    """A home of some blocks, readers, and a switch between them that knows who waits."""

    def __init__(self, readers: int, sizes: list[int], seed: int = 1, **options: Any) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.blocks = {
            BlockId(3, bytes([n]) * 16): bytearray(self.rng.randbytes(size))
            for n, size in enumerate(sizes)
        }
        self.loss = options.pop("loss", 0.0)
        self.late = options.pop("late", 0.0)
        self.twice = options.pop("twice", 0.0)
        self.lags_from = options.pop("lags_from", 64)
        self.has_card = options.pop("card", True)
        self.responder = Responder(ResponderConfig(), lookup=self.lookup)
        self.responder.can_write = self.has_card
        self.writing = Writing(self.lookup)
        self.writing.card = self
        self.full = False
        self.readers = {n: Reader(self, n, **options) for n in range(1, readers + 1)}
        self.waiting: dict[tuple[int, int, int], set[int]] = {}
        self.delayed: deque[tuple[float, Callable[[], None]]] = deque()
        self.egress_chunks = 0
        self.data_chunks = 0

    def lookup(self, block: BlockId) -> Held | None:
        content = self.blocks.get(block)
        return None if content is None else Held(content)

    # the home's card, and the readers'
    def write(
        self, at: roce.Place, segment: memoryview, chunks: int, done: Callable[[bool], None]
    ) -> None:
        while chunks:
            chunk = (chunks & -chunks).bit_length() - 1
            chunks &= chunks - 1
            self.egress_chunks += 1
            data = bytes(segment[chunk * CHUNK : (chunk + 1) * CHUNK])
            for reader in self.waiting.get(at, ()):
                for _ in range(1 + (self.rng.random() < self.twice)):
                    if self.rng.random() >= self.loss:
                        self.land(self.readers[reader], at, chunk, data)
        done(True)

    def land(self, reader: Reader, at: roce.Place, chunk: int, data: bytes) -> None:
        memory = reader.memory

        def now() -> None:
            if reader.deaf or memory is not reader.memory:
                return
            low = at.address_low(chunk)
            reader.memory[low : low + len(data)] = data
            reader.completions.append(at.immediate(chunk))

        if chunk >= self.lags_from:
            self.delayed.append((self.now + 0.012, now))
        elif self.rng.random() < self.late:
            self.delayed.append((self.now + self.rng.choice((0.004, 0.03, 0.1)), now))
        else:
            now()

    # the switch
    def up(self, reader: int, frame: Frame) -> None:
        flags = frame.flags
        if flags & wire.FLAG_WRITE:
            at = roce.place_of(frame.namespace, frame.key, frame.segment)
            assert frame.tag == at.tag
            others = self.waiting.setdefault(at, set())
            joins = bool(others) and not flags & wire.FLAG_RETRY
            others.add(reader)
            if joins:
                return
            flags |= wire.FLAG_SHARED
        wire.decode(wire.encode(frame))
        if self.rng.random() >= self.loss:
            self.responder.receive(
                self.now, reader, wire.decode(wire.encode(_with_flags(frame, flags)))
            )

    def down(self, reader: int, frame: Frame) -> None:
        targets = {reader}
        if frame.flags & wire.FLAG_WRITE:
            at = roce.place_of(frame.namespace, frame.key, frame.segment)
            assert frame.tag == at.tag
            targets |= self.waiting.pop(at, set())
            if len(targets) > 1:
                frame = _with_flags(frame, frame.flags | wire.FLAG_SHARED)
        if frame.op == wire.OP_DATA:
            self.data_chunks += 1
        for target in targets:
            if self.rng.random() >= self.loss:
                decoded = wire.decode(wire.encode(frame))
                self.readers[target].requester.receive(self.now, HOME, decoded)

    def run(self, until: Callable[[], bool], steps: int = 20_000) -> None:
        for _ in range(steps):
            self.step()
            if until():
                return
        raise AssertionError("not in time")

    def step(self) -> None:
        self.now += STEP_S
        for _ in range(len(self.delayed)):
            when, action = self.delayed.popleft()
            if when <= self.now:
                action()
            else:
                self.delayed.append((when, action))
        for reader in self.readers.values():
            reader.look()
            when = reader.requester.get_timer()
            if when is not None and when <= self.now:
                reader.requester.handle_timer(self.now)
            for _, frame in reader.requester.frames_to_send():
                self.up(reader.number, frame)
        self.answer(64)
        for reader in self.readers.values():
            reader.look()
            reader.requester.check()
            reader.events()

    def answer(self, most_frames: int) -> None:
        """The home sends what it has to send."""
        for target, answer in self.responder.answers_to_send(self.now, most_frames):
            if isinstance(answer, Answer) and answer.frame.flags & wire.FLAG_WRITE:
                self.writing.write(target, answer)
            elif isinstance(answer, Answer):
                for frame in answer.frames():
                    self.down(target, frame)
            else:
                self.down(target, answer)
        for target, frame in self.writing.take_frames():
            self.down(target, frame)

    def read_all(self) -> None:
        for reader in self.readers.values():
            for block in self.blocks:
                reader.fetch(block)
        self.run(lambda: all(len(r.fetched) == len(self.blocks) for r in self.readers.values()))
        for reader in self.readers.values():
            for block, room in reader.fetched.items():
                assert isinstance(room, Room), (reader.number, room)
                assert room.view == self.blocks[block]
            if reader.landing is not None:
                assert reader.landing.claims == 0

    @property
    def ratio(self) -> float:
        """What left the home over what was asked for, once."""
        chunks = sum(-(-len(content) // CHUNK) for content in self.blocks.values())
        return (self.egress_chunks + self.data_chunks) / chunks


class Unsteady(Net):
    """The home's card sends `pace` chunks a step, and readers stand still now and then, each for
    itself, for up to `stall_steps`; what comes meanwhile waits for them."""

    def __init__(self, readers: int, sizes: list[int], seed: int, **options: Any) -> None:
        self.pace = options.pop("pace")
        self.stall_steps = options.pop("stall_steps")
        super().__init__(readers, sizes, seed, **options)
        self.stalled = dict.fromkeys(self.readers, 0)
        self.inbox: dict[int, deque[Frame]] = {n: deque() for n in self.readers}
        self.sending: deque[tuple[roce.Place, deque[tuple[int, bytes]], Any]] = deque()

    def write(
        self, at: roce.Place, segment: memoryview, chunks: int, done: Callable[[bool], None]
    ) -> None:
        wanted = [chunk for chunk in range(64) if chunks >> chunk & 1]
        orders = deque((n, bytes(segment[n * CHUNK : (n + 1) * CHUNK])) for n in wanted)
        self.sending.append((at, orders, done))

    def down(self, reader: int, frame: Frame) -> None:
        at = roce.place_of(frame.namespace, frame.key, frame.segment)
        targets = {reader}
        if frame.op == wire.OP_WRITTEN:
            targets |= self.waiting.pop(at, set())
            if len(targets) > 1:
                frame = _with_flags(frame, frame.flags | wire.FLAG_SHARED)
        elif frame.op == wire.OP_DATA:
            self.data_chunks += 1
        for target in targets:
            self.inbox[target].append(wire.decode(wire.encode(frame)))

    def step(self) -> None:
        self.now += STEP_S
        for number, reader in self.readers.items():
            self.stalled[number] -= 1
            if self.stalled[number] > 0:
                continue
            if self.rng.random() < 0.05:
                self.stalled[number] = self.rng.randrange(self.stall_steps)
                continue
            requester = reader.requester
            while self.inbox[number]:
                requester.receive(self.now, HOME, self.inbox[number].popleft())
            when = requester.get_timer()
            if when is not None and when <= self.now:
                requester.handle_timer(self.now)
            for _, frame in requester.frames_to_send():
                self.up(number, frame)
            requester.check()
            reader.events()
        self.send()

    def send(self) -> None:
        left = self.pace
        while left and self.sending:
            at, orders, done = self.sending[0]
            chunk, data = orders.popleft()
            left -= 1
            self.egress_chunks += 1
            for number in self.waiting.get(at, ()):
                self.land(self.readers[number], at, chunk, data)
            if not orders:
                self.sending.popleft()
                done(True)
        self.answer(self.pace)


def _with_flags(frame: Frame, flags: int) -> Frame:
    return Frame(
        **{name: getattr(frame, name) for name in frame.__struct_fields__} | {"flags": flags}
    )


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 4096, 65_536, 65_537, 2 << 20, (2 << 20) + 4099])
def test_each_byte_leaves_the_home_once(readers: int, size: int) -> None:
    pool = Net(readers, [size])
    pool.read_all()
    assert pool.data_chunks == 0
    assert pool.ratio == 1.0
    for reader in pool.readers.values():
        assert reader.requester.counters.blocks_by_write == 1


@pytest.mark.parametrize("lags_from", [0, 1, 20, 63])
def test_what_a_card_reports_after_the_answer_s_end_is_not_asked_for_again(lags_from: int) -> None:
    pool = Net(2, [2 << 20, 700_001], lags_from=lags_from)
    pool.read_all()
    assert pool.data_chunks == 0
    assert pool.ratio == 1.0


def test_many_blocks_take_turns_in_the_slots() -> None:
    pool = Net(2, [700_000 + 5 * n for n in range(40)])
    pool.read_all()
    assert pool.data_chunks == 0
    assert pool.ratio < 1.1


@pytest.mark.slow
@pytest.mark.parametrize(("pace", "at_most"), [(4, 1.2), (16, 1.25)])
def test_readers_who_stand_still_now_and_then_come_together_again(
    pace: int, at_most: float
) -> None:
    """Each for up to 0.12 s, where a block takes 0.26 s, or 0.06. Whoever has lost step must see
    that answers are shared, although what it asked for late came to it alone: then it goes on where
    the others are. (By DATA this costs 1.02 and 1.05 copies; apart they would cost two.)"""
    ratios = []
    for seed in range(6):
        times: dict[str, Any] = {"rto_initial_s": 2.0, "rto_min_s": 1.0, "quiet_s": 0.1}
        pool = Unsteady(2, [2 << 20] * 10, seed, pace=pace, stall_steps=60, **times)
        pool.read_all()
        ratios.append(pool.ratio)
    assert sum(ratios) / len(ratios) <= at_most, ratios


def test_a_home_without_a_card_answers_by_data() -> None:
    pool = Net(2, [300_000], card=False)
    pool.read_all()
    assert pool.egress_chunks == 0
    assert pool.responder.counters.misses_no_write > 0
    assert all(r.requester.counters.data_by_write == 0 for r in pool.readers.values())


def test_readers_with_and_without_a_card_read_one_block() -> None:
    pool = Net(3, [2 << 20])
    without = pool.readers[3]
    without.requester.use_landing(None)
    without.landing = None
    pool.read_all()
    assert without.requester.counters.data_by_write == 0
    assert pool.readers[1].requester.counters.blocks_by_write == 1


@pytest.mark.parametrize("seed", range(6))
def test_what_is_lost_is_asked_for_again(seed: int) -> None:
    pool = Net(3, [2 << 20, 900_001], seed, loss=0.01)
    pool.read_all()
    assert pool.data_chunks > 0
    assert pool.ratio < 1.6


@pytest.mark.parametrize("seed", seeds(6, quick=2))
def test_late_and_repeated_writes_do_no_harm(seed: int) -> None:
    pool = Net(2, [600_000 + n for n in range(24)], seed, loss=0.02, late=0.2, twice=0.1)
    pool.read_all()
    landings = [r.landing for r in pool.readers.values() if r.landing is not None]
    assert sum(landing.counters.late for landing in landings) > 0


def test_a_card_that_fails_while_blocks_come_costs_no_block() -> None:
    pool = Net(2, [1_000_000 + n for n in range(6)])
    for reader in pool.readers.values():
        for block in pool.blocks:
            reader.fetch(block)
    for _ in range(3):
        pool.step()
    broken = pool.readers[1]
    assert broken.landing is not None
    assert broken.landing.claims
    broken.landing.lost()
    broken.requester.use_landing(None)
    broken.landing = None
    broken.requester.check()
    pool.run(lambda: all(len(r.fetched) == 6 for r in pool.readers.values()))
    for reader in pool.readers.values():
        for block, room in reader.fetched.items():
            assert room.view == pool.blocks[block]


def test_a_read_that_joins_behind_the_last_chunk_costs_a_copy_and_no_more() -> None:
    """Its answer ends at once, and nothing of it comes. That is no reason to read by DATA from now
    on, which others do not: it would cost a copy of everything."""
    pool = Net(2, [60_000, 2 << 20, 2 << 20])
    first, *others = pool.blocks
    pool.readers[1].fetch(first)
    pool.readers[1].requester.handle_timer(pool.now)
    for _, frame in pool.readers[1].requester.frames_to_send():
        pool.up(1, frame)
    for target, answer in pool.responder.answers_to_send(pool.now, 64):
        assert isinstance(answer, Answer)
        pool.writing.write(target, answer)
    pool.readers[2].fetch(first)  # WRITTEN has not been sent
    for _, frame in pool.readers[2].requester.frames_to_send():
        pool.up(2, frame)
    pool.run(lambda: all(len(r.fetched) == 1 for r in pool.readers.values()))
    late = pool.readers[2].requester.counters
    assert (late.timeouts, late.reads_retry) == (1, 1)
    for reader in pool.readers.values():
        for block in others:
            reader.fetch(block)
    pool.run(lambda: all(len(r.fetched) == 3 for r in pool.readers.values()))
    assert late.blocks_by_write == 3
    assert pool.readers[2].doubts == 0
    assert pool.data_chunks == 0
    assert pool.egress_chunks == 2 * 15 + 2 * 512


def test_an_answer_s_end_that_is_lost_is_found_when_all_of_it_is_there() -> None:
    pool = Net(1, [60_000])
    (reader,) = pool.readers.values()
    lost: list[Frame] = []
    down = pool.down

    def lose(target: int, frame: Frame) -> None:
        if frame.op == wire.OP_WRITTEN and not lost:
            lost.append(frame)
        else:
            down(target, frame)

    pool.down = lose  # type: ignore[method-assign]
    pool.read_all()
    assert lost
    assert reader.requester.counters.blocks_by_write == 1


def test_a_card_that_has_lost_its_registration_costs_a_time_out_and_no_block() -> None:
    """It refuses all that is written to it, without a word. Its reader finds that out, has the zone
    made anew, and goes on by RDMA at once."""
    pool = Net(2, [1_000_000 + n for n in range(8)])
    deaf, other = pool.readers.values()
    deaf.deaf = True
    blocks = list(pool.blocks)

    def read(some: list[BlockId]) -> None:
        for reader in pool.readers.values():
            for block in some:
                reader.fetch(block)
        pool.run(lambda: all(set(some) <= set(r.fetched) for r in pool.readers.values()))

    read(blocks[:4])
    assert deaf.requester.counters.data_by_write == 0
    assert deaf.doubts == 1
    deaf.requester.use_landing(None)
    deaf.deaf = False
    deaf.use_card()
    read(blocks[4:])
    assert deaf.requester.counters.blocks_by_write == 4
    assert other.requester.counters.blocks_by_write == 8
    assert (deaf.doubts, other.doubts) == (1, 0)
    for reader in pool.readers.values():
        for block, room in reader.fetched.items():
            assert room.view == pool.blocks[block]


def test_a_home_whose_writes_are_lost_is_no_reason_to_doubt_the_card() -> None:
    """While others' land."""
    pool = Net(1, [60_000, 2 << 20])
    (reader,) = pool.readers.values()
    reader.fetch(list(pool.blocks)[1])
    pool.run(lambda: len(reader.fetched) == 1)
    asker = reader.requester._asker
    reader.deaf = True
    reader.fetch(next(iter(pool.blocks)))

    def over() -> bool:
        asker.landed_at[HOME + 7] = pool.now  # from another home
        return len(reader.fetched) == 2

    pool.run(over)
    assert asker.home(HOME).no_writes_until > pool.now
    assert reader.doubts == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_pair_that_breaks_and_is_made_anew_costs_no_block(seed: int) -> None:
    """Again and again, with chunks on their way into a zone that is not used any more."""
    pool = Net(2, [700_000 + n for n in range(16)], seed, loss=0.02, late=0.2)
    for reader in pool.readers.values():
        for block in pool.blocks:
            reader.fetch(block)
    broken = pool.readers[1]
    for number in range(400):
        pool.step()
        if number % 20 == 5:
            assert broken.landing is not None
            broken.landing.lost()
            broken.requester.use_landing(None)
            broken.landing = None
            broken.completions.clear()
        elif number % 20 == 11:
            broken.use_card()
    pool.run(lambda: all(len(r.fetched) == 16 for r in pool.readers.values()))
    for reader in pool.readers.values():
        for block, room in reader.fetched.items():
            assert isinstance(room, Room), room
            assert room.view == pool.blocks[block]


def test_a_read_with_another_place_than_its_segment_s_is_not_written() -> None:
    """Or whoever waits there would get what it did not ask for."""
    pool = Net(1, [100_000])
    (block,) = pool.blocks
    at = roce.place_of(block.namespace, block.key, roce.SHARED_CHUNKING.number(0))
    flags = wire.FLAG_WRITE | wire.FLAG_SHARED
    for tag, mark in ((at.tag ^ 1, flags), (at.tag, wire.FLAG_WRITE)):
        frame = Frame(
            wire.OP_READ,
            *block,
            roce.SHARED_CHUNKING.number(0),
            mark,
            wanted=wire.FULL_SEGMENT,
            tag=tag,
        )
        pool.responder.receive(0.0, 1, frame)
        ((_, miss),) = pool.responder.answers_to_send(0.0, 64)
        assert isinstance(miss, Frame)
        assert (miss.op, miss.chunk, miss.tag) == (wire.OP_MISS, wire.MISS_NO_WRITE, tag)
        assert miss.flags == wire.FLAG_WRITE


def test_what_the_card_did_not_send_is_not_called_written() -> None:
    pool = Net(1, [100_000])
    sent: list[Callable[[bool], None]] = []

    class Broken:
        full = False

        def write(
            self, _at: Any, _segment: Any, _chunks: int, done: Callable[[bool], None]
        ) -> None:
            sent.append(done)

    pool.writing.card = Broken()
    pool.readers[1].fetch(next(iter(pool.blocks)))
    pool.step()
    assert sent
    for done in sent:
        done(False)
    assert pool.writing.take_frames() == []
    assert pool.writing.counters.failed == len(sent)


def test_what_comes_by_rdma_counts_by_its_slots_alone() -> None:
    config = {"window_initial": 2, "window_max": 2, "window_shared": 6}
    size = wire.SEGMENT_BYTES + 12 * roce.SLOT_BYTES

    def asked(*, group: int = 0, landing: bool = True, **more: int) -> list[int]:
        """Flags of what is asked for at once."""
        reader = Net(1, [], landing=landing, **config, **more).readers[1]
        reader.requester.fetch(
            *(0.0, BlockId(3, bytes(16)), (HOME,)),
            deadline=30.0,
            expect_size=size,
            chunking=roce.SHARED_CHUNKING,
            group=group,
            probe=False,
        )
        reader.requester.check()
        return [frame.flags & wire.FLAG_WRITE for _, frame in reader.requester.frames_to_send()]

    assert asked() == [wire.FLAG_WRITE] * 13
    assert asked(credit_segments=1) == [wire.FLAG_WRITE] * 13
    assert asked(group=7) == [0, 0]  # by DATA, as where there is no card
    assert asked(landing=False) == [0, 0]


def test_answers_by_rdma_keep_no_data_from_being_asked_for() -> None:
    """Of another home, which has no card."""
    reader = Net(1, [], window_initial=2, window_max=2, credit_segments=2).readers[1]
    asker = reader.requester._asker
    size = wire.SEGMENT_BYTES + 12 * roce.SLOT_BYTES
    more = {"deadline": 30.0, "expect_size": size, "probe": False}
    for home in (HOME, HOME + 1):
        block = BlockId(3, bytes([home] * 16))
        reader.requester.fetch(0.0, block, (home,), chunking=roce.SHARED_CHUNKING, **more)
        reader.requester.check()
    reads = [
        (home, frame.flags & wire.FLAG_WRITE) for home, frame in reader.requester.frames_to_send()
    ]
    assert reads.count((HOME, wire.FLAG_WRITE)) > 2
    assert reads.count((HOME + 1, 0)) == 2
    assert reader.requester.segments_in_flight == len(reads)
    # Without the zone they come by DATA, and so they count.
    reader.requester.use_landing(None)
    reader.requester.check()
    assert asker.landing_only == 0
    assert asker.in_window == reader.requester.segments_in_flight == len(reads)


def test_a_repeat_that_comes_by_rdma_does_not_count_any_more() -> None:
    reader = Net(1, [], window_initial=2, window_max=2, landing=False).readers[1]
    size = wire.SEGMENT_BYTES + 12 * roce.SLOT_BYTES
    reader.requester.fetch(
        *(0.0, BlockId(3, bytes(16)), (HOME,)),
        deadline=30.0,
        expect_size=size,
        chunking=roce.SHARED_CHUNKING,
        probe=False,
    )
    asker = reader.requester._asker
    assert (asker.in_window, asker.landing_only) == (2, 0)
    behind, _ = asker.homes[HOME].awaited.popitem()
    behind.overtaken = True  # by answers that others shared
    asker._put_beside(behind)
    reader.requester.check()
    reader.requester.use_landing(Landing(reader.memory))
    while asker.beside:
        reader.requester.handle_timer(reader.requester.get_timer())
        reader.requester.check()
    assert asker.landing_only


def test_a_home_without_a_card_whose_turn_it_is_keeps_no_answers_by_rdma_from_being_asked_for() -> (
    None
):
    reader = Net(1, [], window_initial=2, window_max=2, credit_segments=2).readers[1]
    size = wire.SEGMENT_BYTES + 12 * roce.SLOT_BYTES
    more = {"deadline": 30.0, "expect_size": size, "probe": False}
    for home in (HOME + 1, HOME):
        block = BlockId(3, bytes([home] * 16))
        reader.requester.fetch(0.0, block, (home,), chunking=roce.SHARED_CHUNKING, **more)
        reader.requester.check()
    reads = [home for home, _ in reader.requester.frames_to_send()]
    assert reads.count(HOME + 1) == 2
    assert reads.count(HOME) == 13
