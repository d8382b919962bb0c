"""READs that are sent together, and segments that come together, beside the same one by one.

Oracle: the way that each of them goes alone. What is the same for all is worked out once where they
go together, and both ways must leave the same behind. Cannot see: whether that is right
(test_protocol_requester.py).
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
from data_frames import data_frame
from kvcast.protocol.fair_queue import Shares
from kvcast.protocol.messages import roce, wire
from kvcast.protocol.messages.wire import CELLS, BlockId, Chunking, Frame, digest_of
from kvcast.protocol.pacing import RttEstimator
from kvcast.protocol.placement import Arrived
from kvcast.protocol.requester import Requester, RequesterConfig
from kvcast.protocol.requester.landing import Landing
from kvcast.protocol.requester.segment import Segment
from landing_card import Card

HOME, HOME_IP = 1, 0x0A000001
BLOCK = BlockId(3, bytes(range(16)))
SEGMENTS = 9
BYTES = random.Random(5).randbytes(SEGMENTS * wire.SEGMENT_BYTES - 700)


class Room:
    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))

    def abort(self) -> None:
        pass


class Bench:
    """A requester, and what it did."""

    def __init__(self, seed: int, **config: Any) -> None:
        self.core = Requester(
            RequesterConfig(window_initial=SEGMENTS, **config),
            allocate=lambda _block, size: Room(size),
            rng=random.Random(seed),
        )
        self.core.placement.know({HOME_IP: HOME})

    def fetch(self, now: float, chunking: Chunking, size: int, **more: Any) -> None:
        more = {"deadline": 99.0, "expect_size": size, "chunking": chunking} | more
        self.core.fetch(now, BLOCK, (HOME,), **more)

    def left(self) -> dict[str, Any]:
        """All that one could tell the two ways by, but for chance."""
        self.core.check()
        asker, home = self.core._asker, self.core._asker.home(HOME)
        fetches = list(self.core._fetches.values())
        return {
            "counters": self.core.counters,
            "reads": self.core.frames_to_send(),
            "in flight": (asker.in_window, asker.beside, asker.landing_only),
            "of this": (asker.flows, home.in_window),
            "awaited": [segment.index for segment in home.awaited],
            "window": home.window.size,
            "sharing": (round(asker._shared_part, 9), asker._answered_at, asker._shared_until),
            "turns": (asker.fair._now, asker.fair._starts),
            "segments": [(s.state, s.in_window) for f in fetches for s in f.segments],
            "missing": [f.assembly.missing for f in fetches if f.assembly is not None],
            "reports": [f.report for f in fetches],
            "events": len(self.core._life.events),
        }


def times_of(segment: Segment) -> tuple[float, ...]:
    times = segment.sent_at, segment.gather_s, segment.repeat_at, segment.base_at
    return (*times, segment.wait_s, segment.patience_s, segment.queued_at)


# --- READs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_write", [False, True])
@pytest.mark.parametrize("gather_ms", [0, 40])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("config", [{}, {"read_padding": True}, {"credit_segments": 4}])
def test_first_reads_that_are_sent_together_are_as_those_sent_one_by_one(
    by_write: bool, shares: bool, gather_ms: int, config: dict[str, Any]
) -> None:
    chunking = roce.SHARED_CHUNKING if by_write else CELLS
    size = chunking.start_of(SEGMENTS - 1) + 1
    left, times = [], []
    for together in (True, False):
        bench = Bench(7, retry_jitter=0.0, **config)
        if shares:
            bench.core._asker._shared_until = 9.0
        if by_write:
            bench.core.use_landing(Landing(memoryview(bytearray(roce.ZONE_BYTES))))
            bench.core.use_writers(frozenset({HOME}))
        with mock.patch.object(Segment, "is_new", Segment.is_new if together else False):
            bench.fetch(0.5, chunking, size, gather_ms=gather_ms)
        (fetch,) = bench.core._fetches.values()
        flying = [segment for segment in fetch.segments if segment.in_flight]
        credit = SEGMENTS if by_write else bench.core.config.credit_segments
        assert len(flying) == min(SEGMENTS, credit)
        times.append([times_of(segment) for segment in flying])
        if together:
            (one,) = bench.core._asker._outbox
            assert one[1].how_many == len(flying)
        left.append(bench.left())
    assert times[0] == times[1]
    assert left[0] == left[1]
    for _, frame in left[0]["reads"]:
        wire.decode(wire.encode(frame))


def test_of_reads_that_are_sent_together_those_without_room_are_dropped() -> None:
    bench = Bench(1, credit_segments=64, window_max=64)
    bench.core._asker._outbox_max = SEGMENTS - 2
    bench.fetch(0.0, CELLS, len(BYTES))
    assert [frame.segment for _, frame in bench.core.frames_to_send()] == [*range(SEGMENTS - 2)]
    assert bench.core.counters.outbox_dropped == 2
    bench.core.check()


def test_what_was_in_flight_before_is_not_asked_for_with_what_is_new() -> None:
    """Its READ is another: it may be of missing chunks, or a repeat."""
    bench = Bench(1)
    homes = HOME, HOME + 1
    more = {"deadline": 99.0, "expect_size": len(BYTES)}
    bench.core.fetch(0.0, BLOCK, homes, **more)
    bench.core.frames_to_send()
    for index, chunk in ((0, 3), (2, 5)):
        bench.core.receive(0.01, HOME, data(index, chunk))
    bench.core.forget(0.02, {HOME})
    reads = [frame for node, frame in bench.core.frames_to_send() if node == HOME + 1]
    assert [read.segment for read in reads] == [*range(SEGMENTS)]
    for read in reads:
        partial = read.segment in (0, 2)
        assert bool(read.flags & wire.FLAG_PARTIAL) == partial
        assert bool(read.flags & wire.FLAG_RETRY) == (not partial)
    bench.core.check()


def test_what_was_in_flight_before_stays_where_it_stands_among_what_is_new() -> None:
    bench = Bench(1, credit_segments=1)
    bench.fetch(0.0, CELLS, len(BYTES))
    (fetch,) = bench.core._fetches.values()
    fetch.segments[3].home = HOME
    taken = []
    while fetch.idle:
        found = bench.core._asker._take_idle(fetch, None, 99)
        taken.append([segment.index for segment in found])
    assert taken == [[1, 2], [3], [4, 5, 6, 7, 8]]


def test_what_is_taken_together_costs_as_much_as_one_by_one() -> None:
    rng = random.Random(3)
    for _ in range(50):
        credit, weights = rng.choice((0.0, 4.0)), [rng.choice((0.5, 1.0, 4.0)) for _ in range(3)]
        together, apart = (Shares(credit, weights.__getitem__) for _ in range(2))
        for _ in range(20):
            flow, count = rng.randrange(3), rng.randrange(1, 6)
            together.took(flow, 1.0, count)
            for _ in range(count):
                apart.took(flow, 1.0)
            assert together._now == apart._now
            assert together._starts == apart._starts


# --- segments -----------------------------------------------------------------------------------


def data(index: int, chunk: int, flags: int = 0, tag: int = 0) -> Frame:
    return data_frame(BLOCK, BYTES, index, chunk, flags=flags, tag=tag)


def arrivals_of(bench: Bench, rng: random.Random) -> list[Arrived]:
    """Segments come in any order, most of them whole and in one piece."""
    (fetch,) = bench.core._fetches.values()
    order = list(range(1, SEGMENTS))
    if rng.random() < 0.5:
        rng.shuffle(order)
    frames = []
    for index in order:
        chunks = list(range(CELLS.chunks_of(len(BYTES), index)))
        if rng.random() < 0.2:
            chunks.remove(rng.choice(chunks))
        flags = rng.choice((wire.FLAG_SHARED, wire.FLAG_SHARED, 0, wire.FLAG_RESIDENT))
        tag = fetch.segments[index].tag if rng.random() < 0.8 else 1
        for chunk in chunks:
            last = wire.FLAG_LAST if chunk == chunks[-1] else 0
            frames.append(wire.encode(data(index, chunk, flags | last, tag)))
            if rng.random() < 0.01:
                frames.append(frames[-1])
    arrived: list[Arrived] = []
    bench.core.placement.place_bytes(
        b"".join(frames), arrived.extend, lambda *_: None, stride=len(frames[0]), sender=HOME_IP
    )
    return arrived


@pytest.mark.parametrize("seed", range(12))
def test_segments_that_come_together_leave_behind_what_they_would_one_by_one(seed: int) -> None:
    left = []
    for together in (True, False):
        bench = Bench(seed)
        rng = random.Random(seed)
        bench.fetch(0.0, CELLS, len(BYTES))
        bench.core.frames_to_send()
        bench.core.receive(0.01, HOME, data(0, 0, wire.FLAG_SHARED if seed % 2 else 0))
        arrivals = arrivals_of(bench, rng)
        if together:
            with mock.patch.object(
                bench.core, "_came_whole", wraps=bench.core._came_whole
            ) as whole:
                bench.core.placed(0.02, arrivals)
            assert whole.called
        else:
            with mock.patch.object(Requester, "_whole_from", return_value=[]):
                bench.core.placed(0.02, arrivals)
        left.append(bench.left())
    assert left[0] == left[1]


def test_what_was_asked_for_together_and_comes_together_tells_of_one_round_trip() -> None:
    bench = Bench(1)
    bench.fetch(0.0, CELLS, len(BYTES))
    (fetch,) = bench.core._fetches.values()
    frames = [
        wire.encode(data(index, chunk, tag=fetch.segments[index].tag))
        for index in (1, 2, 3)
        for chunk in range(64)
    ]
    bench.core.receive(0.01, HOME, data(0, 0))
    arrived: list[Arrived] = []
    bench.core.placement.place_bytes(
        b"".join(frames), arrived.extend, lambda *_: None, stride=len(frames[0]), sender=HOME_IP
    )
    home = bench.core._asker.home(HOME)
    with mock.patch.object(RttEstimator, "sample", autospec=True) as sample:
        bench.core.placed(0.02, arrived)
    assert [call.args for call in sample.call_args_list] == [(home.rtt, 0.02)]


def test_a_block_that_comes_together_to_its_end_is_fetched() -> None:
    bench = Bench(1)
    bench.fetch(0.0, CELLS, len(BYTES))
    for chunk in range(64):
        bench.core.receive(0.01, HOME, data(0, chunk, wire.FLAG_LAST if chunk == 63 else 0))
    rng = mock.Mock(random=lambda: 0.9, choice=lambda of: of[0])
    bench.core.placed(0.02, arrivals_of(bench, rng))
    event: Any = bench.core.next_event()
    assert bytes(event.buffer) == BYTES
    assert event.report.chunks_shared == CELLS.chunks_of(len(BYTES), SEGMENTS - 1) + 64 * (
        SEGMENTS - 2
    )
    bench.core.check()


# --- ends of answers by RDMA that were held -----------------------------------------------------


class Held(Bench):
    """A requester whose segments come by RDMA, of a block of which nothing is known."""

    def __init__(self, *, kinds: frozenset[int] = frozenset(), **more: Any) -> None:
        super().__init__(1, usable_offer_kinds=kinds)
        self.card = Card()
        self.card.landing.in_place = self.card.code.put_in_place, self.card.address
        self.core.use_landing(self.card.landing)
        self.core.use_writers(frozenset({HOME}))
        self.chunking = roce.SHARED_CHUNKING
        self.size = self.chunking.start_of(3) + 1
        self.content = random.Random(9).randbytes(self.size)
        self.fetch(0.0, self.chunking, self.size, **more)
        self.core.frames_to_send()

    def end(self, index: int, **fields: Any) -> Frame:
        """WRITTEN."""
        number = self.chunking.number(index)
        tag = roce.place_of(*BLOCK, number).tag
        fields = {"digest": digest_of(self.content), "size": self.size, "tag": tag} | fields
        flags = wire.FLAG_WRITE | wire.FLAG_SHARED
        return Frame(wire.OP_WRITTEN, *BLOCK, fields.pop("segment", number), flags, **fields)

    def come(self, *indices: int) -> list[bytes]:
        """Segments come, and the ends of their answers, in one piece; what is for `receive`."""
        for index in indices:
            start, size = self.chunking.start_of(index), self.chunking.bytes_of(self.size, index)
            place = roce.place_of(*BLOCK, self.chunking.number(index))
            low = place.address_low(0)
            self.card.memory[low : low + size] = self.content[start : start + size]
            for chunk in range(self.chunking.chunks_of(self.size, index)):
                self.card.completions.append((0, place.immediate(chunk)))
        frames: list[bytes] = []

        def choose(node: int, datagram: bytes) -> bool:
            return self.core.choose(0.5, node, wire.decode(datagram))

        self.core.placement.choose = choose
        ends = [wire.encode(self.end(index)) for index in indices]
        self.core.placement.place_bytes(
            b"".join(ends),
            lambda arrivals: self.core.placed(0.5, arrivals),
            lambda _node, datagram: frames.append(datagram),
            stride=len(ends[0]),
            sender=HOME_IP,
        )
        return frames


def test_a_block_that_comes_before_anybody_chose_a_copy_is_fetched_without_receive() -> None:
    bench = Held()
    with mock.patch.object(bench.core, "_came_whole", wraps=bench.core._came_whole) as whole:
        assert bench.come(2, 0, 1, 3) == []
    assert whole.call_count == 1
    event: Any = bench.core.next_event()
    assert bytes(event.buffer) == bench.content
    assert bench.core.counters.blocks_by_write == 1
    assert bench.core.counters.data == bench.core.counters.data_by_write
    assert bench.card.landing.claims == 0
    bench.core.check()


def test_after_a_first_segment_that_was_held_and_without_an_offer_the_rest_is_asked_for() -> None:
    bench = Held(kinds=frozenset({wire.OFFER_TCP}))
    (fetch,) = bench.core._fetches.values()
    assert fetch.may_probe
    assert bench.come(0) == []
    reads = [frame for _, frame in bench.core.frames_to_send()]
    assert [wire.segment_index(read.segment) for read in reads] == [1, 2, 3]
    bench.core.check()


def test_what_is_held_of_a_fetch_that_has_ended_is_for_receive() -> None:
    bench = Held()
    bench.core.cancel(0.1, 1)
    frames = bench.come(1)
    assert len(frames) == 1
    bench.core.receive(0.5, HOME, wire.decode(frames[0]))
    assert bench.core.counters.unsolicited == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tag": 5},
        {"segment": CELLS.number(1)},
        {"segment": roce.SHARED_CHUNKING.number(60)},
        {"source": HOME + 1},
    ],
)
def test_a_copy_is_chosen_only_by_an_answer_to_a_read(fields: dict[str, Any]) -> None:
    bench = Held()
    before = bench.core.counters.data
    source = fields.pop("source", HOME)
    assert not bench.core.choose(0.5, source, bench.end(1, **fields))
    (fetch,) = bench.core._fetches.values()
    assert fetch.assembly is None
    assert bench.core.counters.data == before


@pytest.mark.parametrize(
    ("counted", "more", "fields"),
    [
        ("wrong_size", {}, {"size": 300_000}),
        ("other_copy", {"expect_digest": 77}, {}),
        ("no_memory", {}, {}),
    ],
)
def test_a_copy_that_is_refused_is_refused_once(
    counted: str, more: dict[str, Any], fields: dict[str, Any]
) -> None:
    bench = Held(**more)
    if counted == "no_memory":
        bench.core._allocate = lambda _block, _size: None
    assert bench.core.choose(0.5, HOME, bench.end(1, **fields))
    assert getattr(bench.core.counters, counted) == 1
    assert bench.core.counters.unsolicited == 0
    bench.core.check()


def test_nothing_is_in_a_hurry_after_what_was_held_was_refused() -> None:
    bench = Held()
    bench.core._allocate = lambda _block, _size: None
    bench.come(0, 1, 2, 3)
    assert bench.core.counters.no_memory == 1
    table = bench.core.placement.table
    assert (table.held_count, table.arrival_count, table.hurry) == (0, 0, 0)


@pytest.mark.parametrize("waits", [False, True])
def test_compiled_code_knows_whether_there_is_more_to_ask_for(waits: bool) -> None:
    bench = Bench(1, credit_segments=4 if waits else 64)
    assert bench.core.placement.table.asks_more
    bench.fetch(0.0, CELLS, len(BYTES))
    bench.core.reads_to_send()
    assert bench.core.placement.table.asks_more == waits
