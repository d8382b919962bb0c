"""The requester, one behaviour at a time, with the network played by hand.

Oracle: the READs, events and counters that each scenario must lead to. Cannot see: behaviour
under many faults at once (tests/property/test_protocol_network_property.py).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from data_frames import data_frame
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.wire import BlockId, Frame, Offer, digest_of, encode_offer
from kvcast.protocol.requester import (
    BulkCopy,
    DuplicateFetchError,
    Fetched,
    Missed,
    MissReason,
    OfferReceived,
    ProbeEnded,
    Requester,
    RequesterConfig,
    TryBulk,
    WrongResident,
)

BLOCK = BlockId(3, bytes(range(16)))
HOME, REPLICA, STRANGER = 1, 2, 9
SEGMENT = wire.SEGMENT_BYTES
BYTES = random.Random(1).randbytes(2 * SEGMENT + 1500)  # segments of 64, 64 and 2 chunks
DIGEST = digest_of(BYTES)
OTHER = random.Random(2).randbytes(len(BYTES))


class Room:
    """Memory for one block."""

    def __init__(self, content: Any, rooms: list[Room] | None = None) -> None:
        self.view = memoryview(content)
        self.rooms = [self] if rooms is None else rooms

    def abort(self) -> None:
        self.rooms.remove(self)


class Core(Requester):
    """A requester that looks at itself after everything that happens to it."""

    def frames_to_send(self) -> list[tuple[int, Frame]]:
        self.check()
        return super().frames_to_send()

    def next_event(self) -> Any:
        self.check()
        return super().next_event()

    def receive(self, now: float, source: int, frame: Frame) -> None:
        super().receive(now, source, frame)
        self.check()

    def handle_timer(self, now: float) -> None:
        super().handle_timer(now)
        self.check()


class Bench:
    """A requester, the frames that it sent last, and its arena."""

    def __init__(self, memory: int = 1 << 30, seed: int = 1, **config: Any) -> None:
        self.rooms: list[Room] = []
        self.memory = memory
        self.core = Core(
            RequesterConfig(
                **({"rto_initial_s": 0.1, "rto_min_s": 0.03, "quiet_s": 0.05} | config)
            ),
            allocate=self.allocate,
            rng=random.Random(seed),
        )

    def allocate(self, _block: BlockId, size: int) -> Room | None:
        if size > self.memory:
            return None
        self.rooms.append(Room(bytearray(size), self.rooms))
        return self.rooms[-1]

    @property
    def buffers(self) -> list[memoryview]:
        return [room.view for room in self.rooms]

    def fetch(self, now: float = 0.0, homes: tuple[int, ...] = (HOME,), **rest: Any) -> int:
        return self.core.fetch(now, BLOCK, homes, **({"deadline": 100.0} | rest))

    def reads(self) -> list[Frame]:
        return [frame for _, frame in self.core.frames_to_send()]

    def targets(self) -> list[int]:
        return [home for home, _ in self.core.frames_to_send()]

    def run_timers(self, until: float) -> list[tuple[float, int, Frame]]:
        """Everything sent by `until`, with the time of its sending."""
        sent = []
        while (when := self.core.get_timer()) is not None and when <= until:
            self.core.handle_timer(when)
            sent += [(when, home, frame) for home, frame in self.core.frames_to_send()]
        return sent

    def events(self) -> list[Any]:
        found = []
        while (event := self.core.next_event()) is not None:
            found.append(event)
        return found

    def data(
        self,
        now: float,
        segment: int,
        chunks: Any,
        *,
        source: int = HOME,
        of: bytes = BYTES,
        digest: int | None = None,
        flags: int = 0,
        last: int | None = None,
        tag: int = 0xFFFF0000,
    ) -> None:
        """Let DATA arrive; `last` is the chunk that carries LAST."""
        for chunk in chunks:
            start = segment * SEGMENT + chunk * 1024
            frame = Frame(
                wire.OP_DATA,
                *BLOCK,
                segment=segment,
                flags=flags | (wire.FLAG_LAST if chunk == last else 0),
                digest=digest_of(of) if digest is None else digest,
                size=len(of),
                chunk=chunk,
                tag=tag,
                payload=of[start : start + 1024],
            )
            self.core.receive(now, source, wire.decode(wire.encode(frame)))

    def whole(self, now: float, segment: int, **rest: Any) -> None:
        count = wire.CELLS.chunks_of(len(rest.get("of", BYTES)), segment)
        self.data(now, segment, range(count), last=count - 1, **rest)

    def miss(
        self, now: float, reason: int, *, source: int = HOME, digest: int = 0, segment: int = 0
    ) -> None:
        frame = Frame(wire.OP_MISS, *BLOCK, segment=segment, chunk=reason, digest=digest)
        self.core.receive(now, source, frame)

    def offer(self, now: float, kind: int = wire.OFFER_TCP) -> None:
        payload = encode_offer(Offer(kind, 1, 2, 3, 4))
        frame = Frame(wire.OP_OFFER, *BLOCK, digest=DIGEST, size=len(BYTES), payload=payload)
        self.core.receive(now, HOME, frame)


# --- the straight way -------------------------------------------------------------------------


def test_first_read_asks_for_the_whole_first_segment_of_any_copy() -> None:
    bench = Bench(gather_ms=3)
    bench.fetch(group=5)
    (read,) = bench.reads()
    assert (read.op, read.block, read.segment) == (wire.OP_READ, BLOCK, 0)
    assert (read.wanted, read.flags, read.digest) == (wire.FULL_SEGMENT, 0, 0)
    assert (read.gather, read.group) == (3, 5)
    assert wire.decode(wire.encode(read)) == read


def test_read_is_padded_where_the_network_needs_it() -> None:
    bench = Bench(read_padding=True)
    bench.fetch()
    (read,) = bench.reads()
    assert read.flags == wire.FLAG_PADDED


def test_first_data_pins_the_copy_and_the_rest_is_asked_for() -> None:
    bench = Bench()
    bench.fetch()
    bench.reads()
    bench.data(0.001, 0, [5])
    reads = bench.reads()
    assert [read.segment for read in reads] == [1, 2]
    assert all(read.digest == DIGEST and read.wanted == wire.FULL_SEGMENT for read in reads)


def test_block_is_handed_on_when_whole_in_the_arenas_own_buffer() -> None:
    bench = Bench()
    fetch_id = bench.fetch(0.5)
    bench.whole(1.0, 0)
    bench.whole(1.5, 2)
    bench.whole(2.0, 1)
    (event,) = bench.events()
    assert isinstance(event, Fetched)
    assert event.buffer is bench.buffers[0]
    assert event.buffer == BYTES
    assert (event.fetch_id, event.block, event.digest) == (fetch_id, BLOCK, DIGEST)
    assert event.report.tier == "home"
    assert event.report.first_byte_s == 0.5
    assert event.report.elapsed_s == 1.5
    assert event.report.chunks_plain == 130
    assert bench.core.get_timer() is None


def test_known_size_asks_for_every_segment_at_once() -> None:
    bench = Bench()
    bench.fetch(expect_size=len(BYTES))
    assert [read.segment for read in bench.reads()] == [0, 1, 2]


def test_tier_tells_where_chunks_came_from() -> None:
    for flags, tier in ((wire.FLAG_RESIDENT, "switch"), (wire.FLAG_SHARED, "shared")):
        bench = Bench()
        bench.fetch()
        bench.data(0.001, 0, [0], flags=flags)
        bench.whole(0.001, 0)
        bench.whole(0.001, 1)
        bench.whole(0.001, 2)
        (event,) = bench.events()
        assert event.report.tier == tier


def test_blocks_of_a_namespace_are_guessed_to_be_of_one_size() -> None:
    bench = Bench()
    bench.fetch()
    for segment in range(3):
        bench.whole(0.001, segment)
    bench.events()
    bench.reads()
    bench.core.fetch(0.002, BlockId(4, BLOCK.key), [HOME], deadline=9.0)
    assert [read.segment for read in bench.reads()] == [0]  # another namespace
    bench.fetch(0.002)
    reads = bench.reads()
    assert [read.segment for read in reads] == [0, 1, 2]
    assert all(read.digest == 0 for read in reads)


@pytest.mark.parametrize("size", [1500, 5 * SEGMENT])
def test_a_wrong_guess_of_the_size_costs_nothing_but_frames(size: int) -> None:
    bench = Bench()
    bench.fetch()
    for segment in range(3):
        bench.whole(0.001, segment)
    bench.events()
    other = random.Random(5).randbytes(size)
    bench.fetch(0.002)
    bench.miss(0.003, wire.MISS_NOT_FOUND, segment=1)
    bench.data(0.003, 0, [0], of=other)
    bench.miss(0.003, wire.MISS_NOT_FOUND, segment=9)
    assert bench.core.counters.beyond == 2
    for segment in range(wire.CELLS.segments_of(size)):
        bench.whole(0.004, segment, of=other)
    (end,) = bench.events()
    assert end.buffer == other
    assert bench.core.segments_in_flight == 0


# --- windows and credit -----------------------------------------------------------------------


def test_a_home_has_a_window_that_grows_with_every_segment_that_arrives() -> None:
    bench = Bench(window_initial=2)
    bench.fetch(expect_size=20 * SEGMENT)
    assert len(bench.reads()) == 2
    big = random.Random(3).randbytes(20 * SEGMENT)
    bench.whole(0.001, 0, of=big)
    assert len(bench.reads()) == 2  # one for the segment that landed, one for the growth


def test_credit_bounds_the_segments_in_flight_from_all_homes() -> None:
    bench = Bench(credit_segments=5)
    bench.fetch(expect_size=20 * SEGMENT)
    other = BlockId(3, bytes(16))
    bench.core.fetch(0.0, other, [REPLICA], deadline=9.0, expect_size=20 * SEGMENT)
    assert len(bench.reads()) == 5
    assert bench.core.segments_in_flight == 5


def test_a_dead_home_does_not_keep_others_waiting() -> None:
    bench = Bench(window_initial=2, credit_segments=4)
    bench.fetch(expect_size=20 * SEGMENT)
    bench.core.fetch(0.0, BlockId(3, bytes(16)), [REPLICA], deadline=9.0, expect_size=9 * SEGMENT)
    assert sorted(bench.targets()) == [HOME, HOME, REPLICA, REPLICA]


def test_a_time_out_halves_the_window_once_for_all_that_was_in_flight() -> None:
    bench = Bench(window_initial=8, tries_per_home=2, retry_jitter=0.0)
    bench.fetch(expect_size=30 * SEGMENT)
    assert len(bench.reads()) == 8
    bench.run_timers(0.11)  # every segment has timed out once
    big = random.Random(3).randbytes(30 * SEGMENT)
    bench.reads()
    for segment in range(5):  # in flight: 3, which the window of 4 lets grow again
        bench.whole(0.12, segment, of=big)
    assert len(bench.reads()) in (1, 2)


def test_what_nobody_takes_is_dropped_and_counted() -> None:
    bench = Bench(credit_segments=1, tries_per_home=99, retry_jitter=0.0)
    bench.fetch()
    for _ in range(10):
        bench.core.handle_timer(bench.core.get_timer() or 0.0)
    assert len(bench.reads()) == 4
    assert bench.core.counters.outbox_dropped == 7


def test_the_window_stops_growing_while_answers_wait_in_a_queue() -> None:
    bench = Bench(window_initial=2, queueing_target_s=0.02)
    big = random.Random(3).randbytes(100 * SEGMENT)
    bench.fetch(expect_size=len(big))
    asked = []
    now = 0.0
    for delay_s in (0.001, 0.03, 0.03, 0.03, 0.1, 0.1, 0.1):
        reads = bench.reads()
        asked.append(len(reads))
        now += delay_s
        for read in reads:
            bench.whole(now, read.segment, of=big, tag=read.tag)
    assert asked[:4] == [2, 4, 4, 4]
    assert asked[-1] < 4


# --- losses -----------------------------------------------------------------------------------


def test_gap_is_asked_for_once_the_last_chunk_came_and_not_at_once() -> None:
    bench = Bench()
    bench.fetch()
    bench.reads()
    bench.data(0.001, 0, [c for c in range(64) if c not in (3, 60)], last=63)
    assert [read.segment for read in bench.reads()] == [1, 2]
    ((when, _, read),) = bench.run_timers(0.01)
    assert 0.00102 <= when < 0.0011, "20 µs: on this link nothing is known of longer delays"
    assert read.segment == 0
    assert read.wanted == 1 << 3 | 1 << 60
    assert read.flags == wire.FLAG_PARTIAL
    assert read.digest == DIGEST


def test_repairs_do_not_keep_the_next_segment_waiting() -> None:
    """Or readers that lose different chunks of one shared answer would fall out of step."""
    bench = Bench(window_initial=1, credit_segments=1)
    big = random.Random(3).randbytes(5 * SEGMENT)
    bench.fetch(expect_size=len(big))
    assert [read.segment for read in bench.reads()] == [0]
    bench.data(0.001, 0, range(1, 64), of=big, last=63)
    assert [read.segment for read in bench.reads()] == [1]
    bench.data(0.002, 1, range(1, 64), of=big, last=63)
    assert bench.reads() == []  # repairs are bounded, too
    assert bench.core.segments_in_flight == 2
    bench.data(0.003, 0, [0], of=big)
    bench.data(0.003, 1, [0], of=big)
    assert [read.segment for read in bench.reads()] == [2]
    assert bench.core.segments_in_flight == 1


def test_a_gap_is_given_a_quarter_of_the_round_trip() -> None:
    bench = Bench()
    bench.fetch(expect_size=len(BYTES))
    tag = bench.reads()[0].tag
    bench.data(0.04, 0, [c for c in range(64) if c != 7], last=63, tag=tag)
    ((when, _, read),) = bench.run_timers(0.06)
    assert (read.segment, read.wanted) == (0, 1 << 7)
    assert when == pytest.approx(0.05)


def test_chunk_that_is_only_late_is_not_asked_for() -> None:
    bench = Bench(reorder_min_s=0.001)
    bench.fetch(expect_size=len(BYTES))
    bench.reads()
    bench.data(0.001, 0, [*range(62), 63], last=63)
    bench.data(0.0015, 0, [62])
    assert bench.run_timers(0.02) == []
    assert bench.core.counters.gaps == 1


def test_silence_is_answered_by_the_same_read_with_retry() -> None:
    bench = Bench(gather_ms=5)
    bench.fetch()
    (first,) = bench.reads()
    ((when, home, again),) = bench.run_timers(0.16)
    assert 0.105 <= when <= 0.155  # time-out, gather and jitter
    assert (home, again.wanted, again.flags) == (HOME, wire.FULL_SEGMENT, wire.FLAG_RETRY)
    assert again.tag != first.tag
    assert again.gather == 0


def test_silence_is_borne_longer_while_the_home_sends_other_segments() -> None:
    bench = Bench(retry_jitter=0.0, patience=3)
    bench.fetch(expect_size=len(BYTES))
    bench.reads()
    for step in range(60):  # DATA of segment 0 every 5 ms; nothing of segments 1 and 2
        bench.data(0.005 * step, 0, [step])
        assert bench.run_timers(0.005 * step) == []
    sent = bench.run_timers(0.305)
    assert [(when, read.segment) for when, _, read in sent] == [
        (pytest.approx(0.3), 1),
        (pytest.approx(0.3), 2),
    ]


def test_reads_that_were_repeated_in_vain_are_repeated_in_time_whatever_else_the_home_sends() -> (
    None
):
    bench = Bench(retry_jitter=0.0, patience=3)
    bench.fetch(expect_size=len(BYTES))
    bench.reads()
    assert [when for when, _, _ in bench.run_timers(0.305)] == pytest.approx([0.1] * 3 + [0.3] * 3)
    for step in range(60):  # the switch is back, but had lost the READs of segments 1 and 2
        now = 0.31 + 0.005 * step
        bench.data(now, 0, [step])
        assert bench.run_timers(now) == []
    sent = bench.run_timers(0.705)
    assert [(when, read.segment) for when, _, read in sent if read.segment] == [
        (pytest.approx(0.7), 1),
        (pytest.approx(0.7), 2),
    ]


def test_a_home_that_was_overloaded_is_given_time_while_it_sends_other_segments() -> None:
    bench = Bench(retry_jitter=0.0, patience=3)
    bench.fetch(expect_size=len(BYTES))
    bench.reads()
    asked: list[float] = []
    for step in range(60):  # DATA of segment 0 every 20 ms; segment 1 is refused twice
        now = 0.02 * step
        bench.data(now, 0, [step])
        asked += [when for when, _, read in bench.run_timers(now) if read.segment == 1]
        if step in (0, 11):
            bench.miss(now, wire.MISS_OVERLOADED, segment=1)
    assert asked == pytest.approx([0.2, 0.62])  # twice the time-out, four times


def test_readers_spread_their_retries() -> None:
    times = set()
    for seed in range(8):
        bench = Bench(seed=seed)
        bench.fetch()
        times.add(bench.core.get_timer())
    assert len(times) == 8
    assert max(times) - min(times) > 0.01  # type: ignore[operator, type-var]


def test_progress_puts_the_retry_off() -> None:
    bench = Bench(retry_jitter=0.0)
    bench.fetch(expect_size=SEGMENT)
    bench.reads()
    alone = BYTES[:SEGMENT]
    for chunk in range(20):
        bench.data(0.05 * chunk, 0, [chunk], of=alone)
        assert bench.run_timers(0.05 * chunk) == []
    ((when, _, read),) = bench.run_timers(1.1)
    assert when == pytest.approx(0.95 + 0.05)
    assert read.wanted == wire.FULL_SEGMENT & ~0xFFFFF


def test_time_out_follows_the_round_trip_of_ones_own_tag_only() -> None:
    bench = Bench(rto_initial_s=0.5, rto_min_s=0.001)
    bench.fetch()
    (read,) = bench.reads()
    bench.data(0.010, 0, [0])  # somebody else's tag
    bench.data(0.010, 0, [1], tag=read.tag, flags=wire.FLAG_RESIDENT)
    assert bench.core.rto_s(HOME) == 0.5
    bench.core.cancel(0.01, 1)
    bench.fetch(1.0)
    (read,) = bench.reads()[-1:]
    bench.data(1.010, 0, [0], tag=read.tag)
    assert bench.core.rto_s(HOME) == pytest.approx(0.010 + 4 * 0.005)


# --- other homes ------------------------------------------------------------------------------


def test_silent_home_is_left_for_its_replica_and_avoided_for_a_while() -> None:
    bench = Bench(tries_per_home=3)
    bench.fetch(homes=(HOME, REPLICA))
    assert bench.targets() == [HOME]
    sent = bench.run_timers(1.0)
    assert [home for _, home, _ in sent][:3] == [HOME, HOME, REPLICA]
    moved = sent[2]
    assert moved[2].flags == wire.FLAG_RETRY  # our port still waits at the switch
    bench.core.cancel(1.0, 1)
    bench.fetch(1.0, homes=(HOME, REPLICA))
    assert bench.targets() == [REPLICA]
    bench.core.cancel(9.0, 2)
    bench.fetch(9.0, homes=(HOME, REPLICA))
    assert bench.targets() == [HOME]


def test_silence_everywhere_is_unreachable() -> None:
    bench = Bench(tries_per_home=2)
    bench.fetch(homes=(HOME, REPLICA))
    bench.run_timers(50.0)
    (event,) = bench.events()
    assert isinstance(event, Missed)
    assert event.reason is MissReason.UNREACHABLE
    assert bench.core.counters.missed == {"unreachable": 1}


def test_what_has_arrived_is_kept_when_the_home_is_left() -> None:
    bench = Bench(tries_per_home=2)
    bench.fetch(homes=(HOME, REPLICA), expect_size=SEGMENT)
    alone = BYTES[:SEGMENT]
    bench.data(0.001, 0, range(40), of=alone)
    sent = bench.run_timers(2.0)
    to_replica = next(read for _, home, read in sent if home == REPLICA)
    assert to_replica.wanted == wire.FULL_SEGMENT >> 40 << 40
    assert to_replica.digest == digest_of(alone)


def test_who_is_sent_on_by_a_miss_asks_the_next_home_as_if_for_the_first_time() -> None:
    # A MISS is shared with all who wait, and ends their wait. If all of them asked the next home
    # with RETRY, a switch would send every one of those READs on.
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    assert not bench.reads()[0].flags & wire.FLAG_RETRY
    bench.miss(0.001, wire.MISS_NOT_FOUND)
    ((target, read),) = bench.core.frames_to_send()
    assert target == REPLICA
    assert not read.flags & wire.FLAG_RETRY


def test_a_fetch_goes_on_without_the_homes_that_are_forgotten() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    assert bench.targets() == [HOME]
    bench.core.forget(0.001, {HOME})
    assert bench.targets() == [REPLICA]
    bench.whole(0.002, 0, source=HOME, of=b"x" * 10)
    assert bench.core.counters.wrong_source == 1
    bench.core.forget(0.003, {REPLICA})
    (missed,) = bench.events()
    assert (missed.reason, bench.core.fetches_in_flight) == (MissReason.UNREACHABLE, 0)


def test_a_miss_of_one_segment_stands_for_all_that_the_home_was_asked_for() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA), expect_size=len(BYTES))
    assert [read.segment for read in bench.reads()] == [0, 1, 2]
    bench.miss(0.001, wire.MISS_NOT_FOUND)
    again = bench.core.frames_to_send()
    assert [(home, read.segment) for home, read in again] == [(REPLICA, s) for s in (0, 1, 2)]
    assert not any(read.flags & wire.FLAG_RETRY for _, read in again)


def test_who_leaves_a_silent_home_repeats_its_read() -> None:
    # The wait at the switch may still stand, with our own bit in it.
    bench = Bench(tries_per_home=1)
    bench.fetch(homes=(HOME, REPLICA))
    bench.reads()
    (_, target, read), *_ = bench.run_timers(0.3)
    assert target == REPLICA
    assert read.flags & wire.FLAG_RETRY


def test_a_miss_of_a_home_that_was_not_asked_may_have_ended_our_wait() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    bench.reads()
    bench.miss(0.001, wire.MISS_NOT_FOUND, source=REPLICA)
    ((when, target, read), *_) = bench.run_timers(0.02)
    assert (target, bool(read.flags & wire.FLAG_RETRY)) == (HOME, False)
    assert when < 0.01  # long before the time-out


def test_not_found_goes_on_to_the_replica_and_then_misses() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    bench.reads()
    bench.miss(0.001, wire.MISS_NOT_FOUND)
    assert bench.targets() == [REPLICA]
    bench.miss(0.002, wire.MISS_NOT_FOUND, source=REPLICA)
    (event,) = bench.events()
    assert event.reason is MissReason.NOT_FOUND


def test_a_replica_that_said_it_has_nothing_is_not_asked() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    bench.miss(0.001, wire.MISS_NOT_FOUND, source=REPLICA)
    assert bench.events() == []
    bench.miss(0.002, wire.MISS_NOT_HOME)
    (event,) = bench.events()
    assert event.reason is MissReason.NOT_HOME


def test_overload_is_met_with_patience_and_then_the_replica() -> None:
    bench = Bench(tries_per_home=3, retry_jitter=0.0)
    bench.fetch(homes=(HOME, REPLICA))
    bench.reads()
    bench.miss(0.001, wire.MISS_OVERLOADED)
    assert bench.reads() == []
    ((when, home, _),) = bench.run_timers(0.25)
    assert when == pytest.approx(0.201)  # twice the time-out
    assert home == HOME
    bench.miss(0.202, wire.MISS_OVERLOADED)
    bench.miss(0.203, wire.MISS_OVERLOADED)
    assert bench.targets() == [REPLICA]
    assert bench.core.counters.overloaded == 3


# --- copies -----------------------------------------------------------------------------------


def test_data_from_a_node_that_is_no_home_is_dropped() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    for segment in range(3):
        bench.whole(0.001, segment, source=STRANGER, of=OTHER)
    assert bench.events() == []
    assert bench.core.counters.wrong_source > 0
    for segment in range(3):
        bench.whole(0.002, segment)
    (event,) = bench.events()
    assert event.buffer == BYTES


def test_chunks_of_another_copy_are_dropped() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    bench.data(0.001, 0, [0])
    bench.data(0.001, 0, range(64), of=OTHER, source=REPLICA)
    bench.data(0.001, 0, [1], of=BYTES + b"longer", digest=DIGEST)
    assert bench.core.counters.other_copy == 65
    for segment in range(3):
        bench.whole(0.002, segment)
    (event,) = bench.events()
    assert event.buffer == BYTES


def test_pinned_copy_that_is_gone_is_sought_at_the_replica_and_then_given_up() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    bench.data(0.001, 0, [0])
    bench.reads()
    bench.miss(0.002, wire.MISS_DIGEST_GONE, digest=DIGEST)
    reads = bench.core.frames_to_send()
    assert {home for home, _ in reads} == {REPLICA}
    assert {read.digest for _, read in reads} == {DIGEST}
    bench.miss(0.003, wire.MISS_DIGEST_GONE, digest=DIGEST, source=REPLICA)
    ((home, read),) = bench.core.frames_to_send()
    assert (home, read.digest, read.segment) == (HOME, 0, 0)  # any copy, from the start
    assert bench.buffers == []
    for segment in range(3):
        bench.whole(0.004, segment, of=OTHER)
    (event,) = bench.events()
    assert event.buffer == OTHER
    assert event.report.restarts == 1


def test_miss_about_another_copy_is_no_miss_but_ends_a_wait() -> None:
    bench = Bench()
    bench.fetch()
    bench.reads()
    bench.miss(0.001, wire.MISS_DIGEST_GONE, digest=77)
    assert bench.events() == []
    assert bench.core.counters.other_copy == 1
    ((when, _, read),) = bench.run_timers(0.01)
    assert when < 0.005
    assert read.flags == wire.FLAG_RETRY


def test_copies_that_keep_changing_end_in_a_miss() -> None:
    bench = Bench(max_restarts=2)
    bench.fetch()
    for version in range(3):
        copy = random.Random(version).randbytes(5000)
        bench.data(0.001, 0, [0], of=copy)
        bench.miss(0.001, wire.MISS_DIGEST_GONE, digest=digest_of(copy))
    (event,) = bench.events()
    assert event.reason is MissReason.DIVERGED
    assert bench.buffers == []


def test_a_pin_that_a_flipped_bit_made_is_given_up() -> None:
    """The first DATA said a wrong size, so that nothing that follows belongs to the pin."""
    bench = Bench(tries_per_home=2)
    bench.fetch()
    bench.data(0.001, 0, [0], of=BYTES + bytes(70_000), digest=DIGEST)
    bench.whole(0.002, 0)
    sent = bench.run_timers(0.6)
    assert any(read.digest == 0 for _, _, read in sent)
    for segment in range(3):
        bench.whole(0.7, segment)
    (event,) = bench.events()
    assert event.buffer == BYTES


def test_wrong_bytes_are_thrown_away_and_asked_for_elsewhere() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    for segment in range(3):
        bench.whole(0.001, segment, of=OTHER, digest=DIGEST)
    assert bench.events() == []
    assert bench.buffers == []
    assert bench.core.counters.corrupt_blocks == 1
    assert bench.targets()[-1] == REPLICA
    bench.whole(0.002, 0, of=OTHER, digest=DIGEST)  # the liar is not listened to any more
    assert bench.core.counters.wrong_source == 64
    for segment in range(3):
        bench.whole(0.003, segment, source=REPLICA)
    (event,) = bench.events()
    assert event.buffer == BYTES


@pytest.mark.parametrize("flags", [0, wire.FLAG_RESIDENT])
def test_wrong_bytes_are_said_to_be_the_switchs_where_it_sent_some_of_them(flags: int) -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    for segment in range(3):
        its = flags if segment == 1 else 0
        bench.whole(0.001, segment, of=OTHER, digest=DIGEST, flags=its)
    assert bench.events() == ([WrongResident(BLOCK, DIGEST)] if flags else [])
    for segment in range(3):
        bench.whole(0.003, segment, source=REPLICA)
    (event,) = bench.events()
    assert event.buffer == BYTES


def test_a_home_that_lies_after_the_switch_has_is_not_taken_for_it() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    for segment in range(3):
        bench.whole(0.001, segment, of=OTHER, digest=DIGEST, flags=wire.FLAG_RESIDENT)
    assert bench.events() == [WrongResident(BLOCK, DIGEST)]
    for segment in range(3):
        bench.whole(0.003, segment, source=REPLICA, of=OTHER, digest=DIGEST)
    assert bench.core.counters.corrupt_blocks == 2
    assert not [event for event in bench.events() if isinstance(event, WrongResident)]


def test_with_two_contributors_one_is_heard_alone_before_any_is_blamed() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA))
    bench.whole(0.001, 0)
    bench.whole(0.001, 1)
    bench.whole(0.001, 2, of=OTHER, digest=DIGEST, source=REPLICA)
    bench.reads()
    for segment in range(3):
        bench.whole(0.002, segment, of=OTHER, digest=DIGEST, source=REPLICA)
    assert bench.events() == []
    for segment in range(3):
        bench.whole(0.003, segment)
    (event,) = bench.events()
    assert event.buffer == BYTES


# --- bulk and offers --------------------------------------------------------------------------


def silent_everywhere(bench: Bench) -> TryBulk:
    bench.fetch(homes=(HOME, REPLICA))
    bench.run_timers(50.0)
    (event,) = bench.events()
    assert isinstance(event, TryBulk)
    return event


def test_bulk_is_the_last_resort_and_its_copy_is_checked() -> None:
    bench = Bench(bulk_available=True, tries_per_home=2)
    event = silent_everywhere(bench)
    assert (event.block, event.home) == (BLOCK, HOME)
    assert bench.core.bulk_done(51.0, event.fetch_id, BulkCopy(Room(BYTES), DIGEST))
    (end,) = bench.events()
    assert isinstance(end, Fetched)
    assert end.buffer == BYTES
    assert end.report.tier == "bulk"


@pytest.mark.parametrize("copy", [None, BulkCopy(Room(OTHER + b"!"), DIGEST)])
def test_bulk_that_fails_ends_the_fetch(copy: BulkCopy | None) -> None:
    bench = Bench(bulk_available=True, tries_per_home=2, max_block_bytes=len(BYTES))
    event = silent_everywhere(bench)
    assert not bench.core.bulk_done(51.0, event.fetch_id, copy)
    (end,) = bench.events()
    assert isinstance(end, Missed)
    assert end.reason is MissReason.UNREACHABLE


def test_bulk_that_finds_no_room_ends_the_fetch_for_that_and_not_for_what_homes_did() -> None:
    bench = Bench(bulk_available=True, tries_per_home=2)
    event = silent_everywhere(bench)
    assert not bench.core.bulk_done(51.0, event.fetch_id, None, no_room=True)
    (end,) = bench.events()
    assert isinstance(end, Missed)
    assert end.reason is MissReason.NO_MEMORY
    assert bench.core.counters.no_memory == 1


def test_bulk_that_comes_after_the_deadline_is_not_taken() -> None:
    bench = Bench(bulk_available=True, tries_per_home=2)
    event = silent_everywhere(bench)
    bench.run_timers(100.0)
    (end,) = bench.events()
    assert isinstance(end, Missed)
    assert end.reason is MissReason.DEADLINE
    assert not bench.core.bulk_done(101.0, event.fetch_id, BulkCopy(Room(BYTES), DIGEST))
    assert bench.events() == []


def test_block_that_is_nowhere_is_not_sought_in_bulk() -> None:
    bench = Bench(bulk_available=True)
    bench.fetch()
    bench.miss(0.001, wire.MISS_NOT_FOUND)
    (end,) = bench.events()
    assert end.reason is MissReason.NOT_FOUND


def test_usable_offer_is_told_once_the_first_segment_showed_no_sharing() -> None:
    bench = Bench(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    bench.fetch(expect_size=len(BYTES))
    assert [read.segment for read in bench.reads()] == [0]
    bench.offer(0.001)
    bench.whole(0.001, 0)
    (event,) = bench.events()
    assert isinstance(event, OfferReceived)
    assert (event.offer.port, event.size, event.digest) == (1, len(BYTES), DIGEST)
    assert event.start_bytes == wire.SEGMENT_BYTES
    start = event.reservation.view[: event.start_bytes]
    assert start == BYTES[: event.start_bytes], "what the probe brought stays"
    assert bench.reads() == []
    assert bench.core.bulk_done(0.002, event.fetch_id, BulkCopy(Room(BYTES), DIGEST))


def test_offer_that_leads_nowhere_is_replaced_by_reads() -> None:
    bench = Bench(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    bench.fetch()
    bench.offer(0.001)
    bench.whole(0.001, 0)
    (event,) = bench.events()
    bench.reads()
    assert not bench.core.bulk_done(0.002, event.fetch_id, None)
    assert [read.segment for read in bench.reads()] == [0]
    for segment in range(3):
        bench.whole(0.003, segment)
    (end,) = bench.events()
    assert end.buffer == BYTES


@pytest.mark.parametrize(
    ("kinds", "flags"),
    [({wire.OFFER_TCP}, wire.FLAG_SHARED), ({wire.OFFER_RDMA}, 0), (set(), 0)],
    ids=["shared", "other kind", "no kind"],
)
def test_offer_is_ignored_where_it_does_not_help(kinds: set[int], flags: int) -> None:
    bench = Bench(usable_offer_kinds=frozenset(kinds))
    bench.fetch()
    bench.offer(0.001)
    bench.whole(0.001, 0, flags=flags)
    assert bench.events() == ([ProbeEnded(1, BLOCK)] if kinds else [])
    assert [read.segment for read in bench.reads()] == [0, 1, 2]
    assert bench.core.counters.offers_ignored == 1


# --- sharing ----------------------------------------------------------------------------------


def test_reads_gather_while_reads_are_being_shared() -> None:
    bench = Bench(auto_gather_max_ms=9, sharing_memory_s=0.5)
    bench.fetch()
    (first,) = bench.reads()
    bench.data(0.016, 0, [0], tag=first.tag)  # a round trip of 16 ms
    assert [read.gather for read in bench.reads()] == [0, 0]
    bench.core.cancel(0.02, 1)
    bench.fetch(0.02)
    bench.reads()
    bench.data(0.03, 0, [0], flags=wire.FLAG_SHARED)
    assert [read.gather for read in bench.reads()] == [4, 4], "a quarter of the round trip"
    bench.core.cancel(0.04, 2)
    bench.fetch(0.05)
    assert [read.gather for read in bench.reads()] == [0], "most answers were for one reader"
    bench.data(0.06, 0, [0], flags=wire.FLAG_SHARED)
    bench.reads()
    bench.data(0.07, 1, [0], flags=wire.FLAG_SHARED)
    bench.core.cancel(0.08, 3)
    bench.fetch(0.1)
    (late,) = bench.reads()
    assert late.gather == 4
    bench.data(0.5, 0, [0], tag=late.tag, flags=wire.FLAG_SHARED)
    bench.reads()
    bench.core.cancel(0.5, 4)
    bench.fetch(0.6)
    assert [read.gather for read in bench.reads()] == [9], "no more than the most"
    bench.core.cancel(0.6, 5)
    bench.fetch(1.1)
    assert [read.gather for read in bench.reads()] == [0], "sharing is forgotten"


@pytest.mark.parametrize(("gather_ms", "keeps_step"), [(0, False), (1, True)])
def test_blocks_of_one_segment_that_meet_by_themselves_wait_for_nobody(
    gather_ms: int, keeps_step: bool
) -> None:
    """Unless they look for company: else prompts that begin alike only happen to share."""
    bench = Bench(gather_ms=gather_ms, window_initial=1, window_max=1, window_shared=2)
    bench.fetch(expect_size=1000)
    (first,) = bench.reads()
    one = BYTES[:1000]
    bench.data(0.016, 0, [0], of=one, last=0, tag=first.tag, flags=wire.FLAG_SHARED)
    bench.fetch(0.02, expect_size=len(BYTES))
    asked = bench.reads()
    assert len(asked) == (2 if keeps_step else 1), "the window of those who keep step"
    assert all((read.gather > 1) == keeps_step for read in asked)


def test_a_block_that_turns_out_long_and_shared_is_asked_for_by_the_wide_window_at_once() -> None:
    bench = Bench(window_initial=1, window_max=1, window_shared=3)
    bench.fetch()
    assert [read.segment for read in bench.reads()] == [0]
    bench.data(0.016, 0, [0], flags=wire.FLAG_SHARED)
    assert [read.segment for read in bench.reads()] == [1, 2]


def test_an_answer_that_the_home_gathered_for_others_is_no_round_trip() -> None:
    """Until there is one, reads gather by what the caller allowed."""
    bench = Bench(gather_ms=80, auto_gather_max_ms=50, window_initial=1, window_shared=1)
    bench.fetch(expect_size=len(BYTES))
    (joined,) = bench.reads()
    assert joined.gather == 80
    bench.data(0.05, 0, range(64), last=63, tag=joined.tag, flags=wire.FLAG_SHARED)
    (next_read,) = bench.reads()
    assert next_read.gather == 20, "a quarter of 80 ms; a round trip of 0 would make it 0"
    bench.data(
        0.05 + 0.02 + 0.016, 1, range(64), last=63, tag=next_read.tag, flags=wire.FLAG_SHARED
    )
    (last,) = bench.reads()
    assert last.gather == 4, "a quarter of the round trip"


@pytest.mark.parametrize(("round_trip_s", "gather_ms"), [(0.0004, 0), (0.0006, 1), (0.009, 2)])
def test_reads_that_share_gather_for_a_millisecond_or_not_at_all(
    round_trip_s: float, gather_ms: int
) -> None:
    """On a network that is fast, but no faster than the machines on it are apart."""
    bench = Bench(window_initial=1, window_shared=1)
    bench.fetch(expect_size=len(BYTES))
    (read,) = bench.reads()
    bench.data(round_trip_s, 0, range(64), last=63, tag=read.tag, flags=wire.FLAG_SHARED)
    assert [read.gather for read in bench.reads()] == [gather_ms]


def test_a_fetch_that_gathers_asks_at_once_for_as_much_as_readers_that_share() -> None:
    """All that its home gathers for longest; else a reader that is held up then is left behind."""
    bench = Bench(gather_ms=80, window_initial=1, window_shared=2)
    bench.fetch(expect_size=len(BYTES))
    assert [(read.segment, read.gather) for read in bench.reads()] == [(0, 80), (1, 80)]
    alone = Bench(window_initial=1, window_shared=2)
    alone.fetch(expect_size=len(BYTES))
    assert [read.segment for read in alone.reads()] == [0]
    bench.core.cancel(0.0, 1)
    bench.fetch(0.09, expect_size=len(BYTES), gather_ms=0)
    assert [read.segment for read in bench.reads()] == [0], "the gathering is over"


def test_only_what_is_asked_for_at_the_start_gathers_as_the_fetch_allows() -> None:
    bench = Bench(gather_ms=80, window_initial=1, window_shared=1)
    bench.fetch(expect_size=len(BYTES))
    assert [read.gather for read in bench.reads()] == [80]
    bench.whole(0.09, 0)
    assert [read.gather for read in bench.reads()] == [0, 0]


def test_a_segment_that_shared_answers_overtook_leaves_the_window() -> None:
    """A late reader gets back into step: what it missed does not keep it from the next."""
    bench = Bench(window_initial=2, window_shared=2)
    bench.fetch(expect_size=len(BYTES))
    assert [read.segment for read in bench.reads()] == [0, 1]
    bench.data(0.01, 1, [0], flags=wire.FLAG_SHARED)
    assert [read.segment for read in bench.reads()] == [2]
    assert bench.core.counters.overtaken == 1
    bench.whole(0.02, 0, flags=wire.FLAG_SHARED)
    bench.data(0.03, 1, range(1, 64), last=63, flags=wire.FLAG_SHARED)
    bench.whole(0.04, 2, flags=wire.FLAG_SHARED)
    (fetched,) = bench.events()
    assert bytes(fetched.buffer) == BYTES
    assert bench.core.segments_in_flight == 0


def test_answers_out_of_order_that_nobody_shares_overtake_nothing() -> None:
    bench = Bench(window_initial=2, window_shared=2)
    bench.fetch(expect_size=len(BYTES))
    assert [read.segment for read in bench.reads()] == [0, 1]
    bench.data(0.01, 1, [0])
    assert bench.reads() == []
    assert bench.core.counters.overtaken == 0


def test_an_overtaken_segment_is_asked_for_again_when_its_own_answer_stays_out() -> None:
    bench = Bench(window_initial=2, window_shared=2, patience_shared_s=0.5)
    bench.fetch(expect_size=len(BYTES))
    bench.reads()
    bench.data(0.01, 1, [0], flags=wire.FLAG_SHARED)
    again = [frame for _, _, frame in bench.run_timers(2.0) if frame.segment == 0]
    assert again
    assert again[0].flags == wire.FLAG_RETRY


def test_expected_data_is_waited_for_and_only_the_rest_is_asked_for() -> None:
    bench = Bench(expect_wait_s=0.05, rto_initial_s=0.01, rto_min_s=0.01)
    bench.fetch(group=4, expect=True)
    assert bench.reads() == []
    bench.whole(0.04, 0, flags=wire.FLAG_SHARED)
    bench.data(0.04, 1, range(10), flags=wire.FLAG_SHARED)
    assert bench.reads() == []
    sent = bench.run_timers(0.12)
    partial = next(read for _, _, read in sent if read.segment == 1)
    assert (partial.flags, partial.wanted) == (wire.FLAG_PARTIAL, wire.FULL_SEGMENT >> 10 << 10)
    unseen = next(read for _, _, read in sent if read.segment == 2)
    assert (unseen.flags, unseen.wanted) == (0, wire.FULL_SEGMENT)
    assert all(read.group == 4 for _, _, read in sent)
    assert min(when for when, _, read in sent if read.segment == 2) >= 0.09


def test_expected_data_that_never_comes_is_asked_for() -> None:
    bench = Bench(expect_wait_s=0.05)
    bench.fetch(expect=True)
    ((when, _, read),) = bench.run_timers(0.06)
    assert when == pytest.approx(0.05)
    assert (read.segment, read.flags) == (0, 0)


# --- bounds -----------------------------------------------------------------------------------


def reason_of(bench: Bench) -> MissReason:
    (event,) = bench.events()
    assert isinstance(event, Missed)
    assert bench.core.fetches_in_flight == 0
    reason: MissReason = event.reason
    return reason


def test_fetch_that_cannot_start_misses_at_once() -> None:
    bench = Bench(max_block_bytes=1000)
    bench.fetch(homes=())
    assert reason_of(bench) is MissReason.NO_HOME
    bench.fetch(5.0, deadline=5.0)
    assert reason_of(bench) is MissReason.DEADLINE
    bench.fetch(expect_size=1001)
    assert reason_of(bench) is MissReason.WRONG_SIZE


def test_one_fetch_too_many_is_missed() -> None:
    bench = Bench(max_fetches=1)
    bench.fetch()
    bench.core.fetch(0.0, BlockId(1, bytes(16)), [HOME], deadline=9.0)
    (event,) = bench.events()
    assert event.reason is MissReason.QUEUE_FULL
    assert bench.core.fetches_in_flight == 1


def test_block_that_is_too_large_or_of_another_size_is_refused() -> None:
    bench = Bench(max_block_bytes=len(BYTES) - 1)
    bench.fetch()
    bench.data(0.001, 0, [0])
    assert reason_of(bench) is MissReason.WRONG_SIZE
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA), expect_size=len(BYTES) + 1)
    bench.data(0.001, 0, [0], source=REPLICA)
    assert bench.events() == []
    bench.data(0.001, 0, [0])
    assert reason_of(bench) is MissReason.WRONG_SIZE
    assert bench.core.counters.wrong_size == 2


def test_no_memory_is_a_miss() -> None:
    bench = Bench(memory=1000)
    bench.fetch()
    bench.data(0.001, 0, [0])
    assert reason_of(bench) is MissReason.NO_MEMORY


def test_deadline_ends_a_fetch_whatever_its_state_and_can_be_moved() -> None:
    bench = Bench(tries_per_home=1000)
    bench.fetch(deadline=1.0)
    bench.data(0.001, 0, [0])
    bench.core.extend(1, 2.0)
    bench.core.extend(1, 1.5)
    bench.run_timers(1.9)
    assert bench.events() == []
    bench.run_timers(2.0)
    assert reason_of(bench) is MissReason.DEADLINE
    assert bench.buffers == []
    assert bench.core.get_timer() is None


def test_cancelled_fetch_gives_its_buffer_back() -> None:
    bench = Bench()
    bench.fetch()
    bench.data(0.001, 0, [0])
    bench.core.cancel(0.002, 1)
    assert reason_of(bench) is MissReason.CANCELLED
    assert bench.buffers == []
    bench.core.cancel(0.003, 1)
    assert bench.events() == []


def test_frames_that_are_none_of_our_business_are_counted() -> None:
    bench = Bench()
    bench.data(0.0, 0, [0])
    bench.fetch()
    bench.data(0.0, 0, [0], source=STRANGER)
    bench.miss(0.0, wire.MISS_NOT_FOUND, source=STRANGER)
    bench.data(0.0, 0, [0])
    bench.data(0.0, 0, [0])
    bench.core.receive(0.0, HOME, Frame(wire.OP_READ, *BLOCK, wanted=wire.FULL_SEGMENT))
    bench.miss(0.0, wire.MISS_DIGEST_GONE)
    counters = bench.core.counters
    assert counters.unsolicited == 1
    assert counters.wrong_source == 2
    assert counters.duplicates == 1
    assert counters.unexpected_op == 2
    assert counters.data == 1
    assert bench.events() == []


def test_arguments_out_of_range_are_errors() -> None:
    bench = Bench()
    bench.fetch()
    with pytest.raises(DuplicateFetchError):
        bench.fetch()
    bench.core.cancel(0.0, 1)
    for wrong in ({"gather_ms": 256}, {"group": -1}, {"expect_size": 0}):
        with pytest.raises(ValueError, match=r"out of range|not positive"):
            bench.fetch(**wrong)


def test_a_read_that_lets_its_home_gather_is_sent_twice_while_it_does() -> None:
    bench = Bench(gather_ms=90)
    bench.fetch()
    (first,) = bench.reads()
    ((when, home, again),) = bench.run_timers(0.09)
    assert (when, home) == (pytest.approx(0.03), HOME)
    assert again == Frame(
        wire.OP_READ, *BLOCK, gather=60, wanted=wire.FULL_SEGMENT, tag=first.tag
    ), "the same READ, with what is left of its time, and no sign of a repeat"
    assert bench.core.counters.reads_again == 1
    assert bench.core.counters.reads == 1


def test_a_read_is_not_sent_twice_once_its_answer_has_begun() -> None:
    bench = Bench(gather_ms=90)
    bench.fetch()
    bench.reads()
    bench.data(0.02, 0, [0])
    assert {read.segment for read in bench.reads()} == {1, 2}
    assert {frame.segment for when, _, frame in bench.run_timers(0.06)} == {1, 2}


def test_reads_after_the_first_wave_and_short_gatherings_are_not_sent_twice() -> None:
    bench = Bench(gather_ms=90, window_initial=1, window_shared=1)
    bench.fetch(expect_size=len(BYTES))
    bench.reads()
    bench.whole(0.1, 0)
    assert {read.segment for read in bench.reads()} == {1, 2}
    assert bench.run_timers(0.15) == []
    brief = Bench(gather_ms=9)
    brief.fetch()
    brief.reads()
    assert brief.run_timers(0.05) == []


def test_a_read_of_what_a_switch_holds_is_not_sent_twice_and_takes_no_offer() -> None:
    bench = Bench(gather_ms=90)
    bench.fetch(resident=True)
    (read,) = bench.reads()
    assert read.gather == 90, "the switch may still have to fill it"
    assert bench.run_timers(0.09) == []
    bench = Bench(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    bench.fetch(resident=True)
    bench.data(0.001, 0, [0])
    assert {read.segment for read in bench.reads()} >= {1, 2}, "it does not wait for an offer"


class Mixed(Bench):
    """Blocks of one segment, some of which a switch holds, on a network where others read the same
    just now."""

    def __init__(self, **config: Any) -> None:
        super().__init__(retry_jitter=0.0, **config)
        asker = self.core._asker
        asker._shared_until = asker._in_step_until = asker._company_until = 99.0
        asker._shared_part = 1.0

    def ask(self, now: float, *numbers: int, resident: bool = False) -> list[int]:
        """Fetch these; of which blocks READs leave."""
        for number in numbers:
            block = BlockId(BLOCK.namespace, number.to_bytes(16, "big"))
            more: dict[str, Any] = {"deadline": 100.0, "expect_size": SEGMENT}
            self.core.fetch(now, block, (HOME,), resident=resident, **more)
        return self.asked()

    def asked(self) -> list[int]:
        return [int.from_bytes(read.key, "big") for read in self.reads()]

    def come(self, now: float, number: int, flags: int = 0) -> None:
        content = BYTES[:SEGMENT]
        fetch = self.core._by_block[(BLOCK.namespace, number.to_bytes(16, "big"))]
        tag = fetch.segments[0].tag & 0xFFFFFFFF
        for chunk in range(64):
            end = wire.FLAG_LAST if chunk == 63 else 0
            frame = data_frame(fetch.block, content, 0, chunk, flags=flags | end, tag=tag)
            self.core.receive(now, HOME, frame)


def test_what_a_switch_holds_has_a_window_of_its_own_and_nothing_else_waits_for_it() -> None:
    bench = Mixed(window_initial=2)
    assert bench.ask(0.0, 1, 2, 3, 4, resident=True) == [1, 2]
    assert bench.ask(0.0, 5, 6) == [5, 6]
    bench.come(0.01, 5)
    assert bench.asked() == []
    bench.come(0.01, 1, wire.FLAG_RESIDENT)
    assert bench.asked() == [3, 4], "it has grown"
    assert bench.ask(0.02, 7, resident=True) == []
    for number in (2, 3, 4, 6):
        bench.come(0.02, number, wire.FLAG_RESIDENT if number != 6 else 0)
    assert bench.asked() == [7]
    bench.come(0.03, 7)  # a switch that did not have it yet
    assert len(bench.events()) == 7
    assert bench.core._asker.switch.in_window == 0


def test_what_a_switch_holds_goes_on_at_another_home() -> None:
    bench = Mixed()
    bench.fetch(homes=(HOME, REPLICA), resident=True, expect_size=len(BYTES))
    assert bench.targets() == [HOME] * 3
    bench.data(0.001, 1, [0], flags=wire.FLAG_RESIDENT)
    bench.core.forget(0.002, {HOME})
    assert bench.targets() == [REPLICA] * 3
    assert bench.core._asker.switch.in_window == 3
    for segment in range(3):
        bench.whole(0.003, segment, source=REPLICA, flags=wire.FLAG_RESIDENT)
    assert len(bench.events()) == 1
    assert bench.core._asker.switch.in_window == 0


def test_what_comes_from_a_switch_leaves_nothing_behind_that_its_home_was_asked_for() -> None:
    bench = Mixed()
    bench.ask(0.0, 1, 2)
    bench.ask(0.0, 3, resident=True)
    bench.come(0.001, 3, wire.FLAG_RESIDENT)
    assert bench.core.counters.overtaken == 0
    bench.come(0.002, 2, wire.FLAG_SHARED)
    assert bench.core.counters.overtaken == 1
    bench.come(0.003, 1, wire.FLAG_SHARED)


def test_a_switch_that_does_not_answer_at_once_is_asked_again_whatever_its_home_sends() -> None:
    bench = Mixed(rto_initial_s=0.4, rto_min_s=0.03)
    for number in (1, 2):
        bench.ask(0.0, number, resident=True)
        bench.come(0.001, number, wire.FLAG_RESIDENT)
    bench.ask(0.001, 3, resident=True)
    bench.ask(0.001, 4, 5)
    bench.come(0.02, 4, wire.FLAG_SHARED)
    bench.core._asker.heard_at[HOME] = 99.0  # it sends on and on
    rto_s = bench.core.rto_s(HOME)
    assert rto_s > 0.05
    sent = [(when, read.key[-1], read.flags) for when, _, read in bench.run_timers(1.0)]
    assert sent == [
        (pytest.approx(0.001 + 0.03), 3, wire.FLAG_RETRY),
        (pytest.approx(0.031 + 2 * 0.03), 3, wire.FLAG_RETRY),
    ]
    ((when, _, read),) = bench.run_timers(1.6)
    assert read.key[-1] == 3
    # Its turn at the home may not have come; but it is not for others, whom that would harm.
    assert when == pytest.approx(0.091 + 6 * 4 * rto_s)


def test_what_a_switchs_answers_lose_says_nothing_about_the_home() -> None:
    bench = Mixed(window_initial=8)
    home = bench.core._asker.home(HOME)
    switch = bench.core._asker.switch
    bench.ask(0.0, *range(1, 9), resident=True)
    bench.come(0.001, 1, wire.FLAG_RESIDENT)
    sizes = switch.window.size, home.window.size
    assert sizes == (9.0, 9.0)
    bench.run_timers(0.15)
    assert bench.core.counters.timeouts == 7
    assert (switch.window.size, home.window.size) == (4.5, 9.0)
    assert switch.rtt.srtt_s == pytest.approx(0.001)
    assert home.rtt.srtt_s is None


# --- where one wait leads to another ----------------------------------------------------------


def test_a_read_that_was_to_be_sent_again_is_not_once_its_answer_comes() -> None:
    bench = Bench()
    bench.fetch(homes=(HOME, REPLICA), expect_size=SEGMENT)
    bench.reads()
    bench.miss(0.001, wire.MISS_NOT_FOUND, source=REPLICA)  # our READ may have joined that wait
    bench.data(0.00101, 0, range(40), of=BYTES[:SEGMENT])  # and had not
    assert bench.run_timers(0.03) == []


def test_a_home_that_asks_for_patience_is_given_it_whatever_else_was_due() -> None:
    alone = BYTES[:SEGMENT]
    gathering = Bench(gather_ms=90)
    gathering.fetch(expect_size=SEGMENT)  # to be sent twice
    lossy = Bench(reorder_min_s=0.01)
    lossy.fetch(expect_size=SEGMENT)
    lossy.data(0.001, 0, range(1, 64), of=alone, last=63)  # a gap, to be asked for
    for bench in (gathering, lossy):
        bench.reads()
        bench.miss(0.002, wire.MISS_OVERLOADED)
        assert bench.run_timers(0.1) == []
        assert bench.run_timers(0.5)


def test_who_waits_for_a_repair_or_for_an_overloaded_home_has_joined_no_wait() -> None:
    alone = BYTES[:SEGMENT]
    repairing = Bench(rto_initial_s=0.1)
    repairing.fetch(homes=(HOME, REPLICA), expect_size=SEGMENT)
    repairing.reads()
    repairing.data(0.001, 0, range(1, 64), of=alone, last=63)
    assert [read.flags for _, _, read in repairing.run_timers(0.002)] == [wire.FLAG_PARTIAL]
    put_off = Bench(rto_initial_s=0.1)
    put_off.fetch(homes=(HOME, REPLICA), expect_size=SEGMENT)
    put_off.miss(0.002, wire.MISS_OVERLOADED)
    repairing.whole(0.003, 0, of=OTHER[:SEGMENT])
    for bench in (repairing, put_off):
        bench.reads()
        bench.miss(0.003, wire.MISS_NOT_FOUND, source=REPLICA)
        assert bench.run_timers(0.09) == []
        assert bench.run_timers(0.5)


def test_what_is_postponed_is_asked_for_then_and_has_not_timed_out_before() -> None:
    bench = Bench(swallowed_pause_s=0.3, retry_jitter=0.0)
    bench.fetch()
    bench.reads()
    bench.miss(0.001, wire.MISS_DIGEST_GONE, digest=77)
    ((when, _, _),) = bench.run_timers(0.35)
    assert when == pytest.approx(0.301)
    assert bench.core.counters.timeouts == 0


def test_who_waits_for_an_offer_reads_one_segment_at_the_next_home_too() -> None:
    bench = Bench(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    bench.fetch(homes=(HOME, REPLICA))
    bench.data(0.001, 0, [0])
    bench.reads()
    bench.miss(0.002, wire.MISS_NOT_FOUND)
    assert [(home, read.segment) for home, read in bench.core.frames_to_send()] == [(REPLICA, 0)]


@pytest.mark.parametrize("company", [{"gather_ms": 5}, {"group": 3}, {"expect": True}, {}])
def test_who_looks_for_company_takes_no_offer(company: dict[str, Any]) -> None:
    bench = Bench(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    if not company:  # the answers of late were shared
        bench.fetch()
        bench.whole(0.0, 0, flags=wire.FLAG_SHARED)
        bench.core.cancel(0.0, 1)
        bench.events()
        assert not bench.core.may_probe(0.001)
    bench.fetch(0.001, **company)
    bench.reads()
    bench.offer(0.002)
    bench.whole(0.002, 0)
    assert bench.events() == []
    assert bench.core.counters.offers == 0


def test_who_shared_the_first_segment_goes_on_where_it_was_answered() -> None:
    """Readers of the same moment may each have asked another holder; the rest they ask of one."""
    bench = Bench(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    bench.fetch(homes=(HOME, REPLICA))
    bench.reads()
    bench.whole(0.001, 0, source=REPLICA, flags=wire.FLAG_SHARED)
    assert bench.core.frames_to_send()[0][0] == REPLICA
    bench.whole(0.002, 1, source=REPLICA)
    bench.whole(0.002, 2, source=REPLICA)
    assert isinstance(bench.events()[-1], Fetched)


def test_an_answer_from_elsewhere_that_nobody_shares_moves_nobody() -> None:
    bench = Bench(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    bench.fetch(homes=(HOME, REPLICA))
    bench.reads()
    bench.whole(0.001, 0, source=REPLICA)
    assert bench.core.frames_to_send()[0][0] == HOME


def test_a_probe_that_goes_on_at_another_home_says_so() -> None:
    bench = Bench(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    bench.fetch(homes=(HOME, REPLICA))
    bench.miss(0.001, wire.MISS_NOT_FOUND)
    assert bench.events() == [ProbeEnded(1, BLOCK, lacked=True)]


def test_a_probe_that_leaves_a_home_which_may_have_the_block_does_not_say_that_it_has_not() -> None:
    bench = Bench(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    bench.fetch(homes=(HOME, REPLICA))
    bench.miss(0.001, wire.MISS_NOT_HOME)
    assert bench.events() == [ProbeEnded(1, BLOCK, lacked=False)]


def test_a_home_that_refuses_for_overload_is_asked_as_often_as_one_may_and_is_not_silent() -> None:
    bench = Bench(tries_per_home=4, retry_jitter=0.0)
    bench.fetch()
    now, refused = 0.0, 0
    while bench.core.fetches_in_flight:
        if bench.targets():
            bench.miss(now, wire.MISS_OVERLOADED)
            refused += 1
        else:
            now = bench.core.get_timer() or now
            bench.core.handle_timer(now)
    assert refused == 4
    assert reason_of(bench) is MissReason.OVERLOADED
    assert bench.core.counters.timeouts == 0
    bench.fetch(2.0, homes=(HOME, REPLICA))
    assert bench.targets() == [HOME], "it is not avoided as a silent one would be"


def test_who_is_sent_away_for_overload_comes_back_as_if_for_the_first_time() -> None:
    # All who waited with us come back, too; a switch sends every repeat on, and of first READs one.
    bench = Bench()
    bench.fetch()
    bench.reads()
    bench.miss(0.001, wire.MISS_OVERLOADED)
    ((_, _, read), *_) = bench.run_timers(1.0)
    assert not read.flags & wire.FLAG_RETRY


def test_a_fetch_that_may_not_gather_does_not_whatever_is_configured_or_shared() -> None:
    bench = Bench(gather_ms=80, window_initial=1, window_shared=1)
    bench.fetch(expect_size=len(BYTES), gathers=False)
    assert [read.gather for read in bench.reads()] == [0]
    bench.data(0.016, 0, range(64), last=63, flags=wire.FLAG_SHARED)
    assert {read.gather for read in bench.reads()} == {0}


def test_a_namespace_that_has_nothing_in_flight_does_not_wait_for_anothers_segments() -> None:
    other = BlockId(BLOCK.namespace + 1, BLOCK.key)
    bench = Bench(window_initial=3, credit_segments=3)
    bench.fetch(expect_size=64 * SEGMENT)
    assert len(bench.reads()) == 3
    bench.core.fetch(0.0, other, (HOME,), deadline=100.0, expect_size=64 * SEGMENT)
    assert [read.namespace for read in bench.reads()] == [other.namespace] * 2
    bench.core.fetch(0.0, BlockId(other.namespace, bytes(16)), (HOME,), deadline=100.0)
    assert bench.reads() == [], "that much and no more"


def test_namespaces_share_a_window_by_weight() -> None:
    other = BlockId(BLOCK.namespace + 1, BLOCK.key)
    bench = Bench(window_initial=1, credit_segments=64)
    bench.core.weigh(lambda namespace: 3.0 if namespace == BLOCK.namespace else 1.0)
    size = len(BYTES)
    for number in range(40):
        for namespace in (BLOCK.namespace, other.namespace):
            which = BlockId(namespace, number.to_bytes(16, "big"))
            bench.core.fetch(0.0, which, (HOME,), deadline=100.0, expect_size=size)
    asked: list[int] = []
    while len(asked) < 60:
        for read in bench.reads():
            asked.append(read.namespace)
            miss = Frame(
                wire.OP_MISS,
                read.namespace,
                read.key,
                read.segment,
                chunk=wire.MISS_NOT_FOUND,
                tag=read.tag,
            )
            bench.core.receive(0.0, HOME, miss)
    of_one = asked[10:60].count(BLOCK.namespace)
    assert 30 <= of_one <= 42
