"""The small parts under the cores: timers, time-outs, windows, the token bucket, the assembly.

Oracle: RFC 6298's numbers, and a timer queue that keeps everything in a dict. Cannot see: how
the cores use them.
"""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.wire import BlockId
from kvcast.protocol.pacing import RttEstimator, TokenBucket, Window
from kvcast.protocol.placement import Placement
from kvcast.protocol.requester.assembly import Assembly
from kvcast.protocol.timers import Timer, TimerQueue

# --- timers -----------------------------------------------------------------------------------


def test_timer_comes_up_once_at_the_soonest_time_it_was_armed_for() -> None:
    queue, timer = TimerQueue(), Timer()
    queue.arm(timer, 5.0)
    queue.arm(timer, 3.0)
    queue.arm(timer, 9.0)
    assert queue.next_at() == 3.0
    assert queue.pop_due(2.9) is None
    assert queue.pop_due(3.0) is timer
    assert queue.pop_due(100.0) is None
    assert queue.next_at() is None
    assert timer.queued_at == inf


def test_cancelled_timer_does_not_come_up_and_can_be_armed_again() -> None:
    queue, timer = TimerQueue(), Timer()
    queue.arm(timer, 1.0)
    queue.cancel(timer)
    queue.cancel(timer)
    assert queue.next_at() is None
    queue.arm(timer, 1.0)
    assert queue.pop_due(1.0) is timer
    assert queue.pop_due(1.0) is None


def test_entries_that_mean_nothing_any_more_do_not_pile_up() -> None:
    queue, timers = TimerQueue(), [Timer() for _ in range(10)]
    for round_ in range(5000):
        for timer in timers:
            queue.arm(timer, 1e6 - round_)
            queue.cancel(timer)
    assert len(queue) == 0
    assert len(queue._heap) <= 2048


@given(
    st.lists(
        st.tuples(st.sampled_from(["arm", "cancel", "pop"]), st.integers(0, 4), st.integers(0, 20))
    )
)
def test_timer_queue_behaves_as_a_plain_table_of_times(steps: list[tuple[str, int, int]]) -> None:
    queue, timers = TimerQueue(), [Timer() for _ in range(5)]
    table: dict[int, float] = {}
    for step, which, when in steps:
        if step == "arm":
            queue.arm(timers[which], float(when))
            table[which] = min(table.get(which, inf), float(when))
        elif step == "cancel":
            queue.cancel(timers[which])
            table.pop(which, None)
        else:
            popped = queue.pop_due(float(when))
            due = [key for key, time in table.items() if time <= when]
            assert (popped is None) == (not due)
            if popped is not None:
                soonest = min(table.values())
                assert table.pop(timers.index(popped)) == soonest
        assert queue.next_at() == min(table.values(), default=None)
        assert len(queue) == len(table)


# --- pace -------------------------------------------------------------------------------------


def test_time_out_follows_rfc_6298() -> None:
    rtt = RttEstimator(1.0, 0.001, 60.0)
    assert rtt.rto_s == 1.0
    rtt.sample(0.1)
    assert rtt.rto_s == pytest.approx(0.1 + 4 * 0.05)
    rtt.sample(0.2)
    assert rtt.srtt_s == pytest.approx(0.1125)
    assert rtt.rto_s == pytest.approx(0.1125 + 4 * (0.75 * 0.05 + 0.25 * 0.1))


def test_time_out_stays_within_its_bounds() -> None:
    rtt = RttEstimator(1.0, 0.05, 0.5)
    rtt.sample(0.0)
    assert rtt.rto_s == 0.05
    rtt.sample(-1.0)
    assert rtt.rto_s == 0.05
    rtt.sample(100.0)
    assert rtt.rto_s == 0.5


def test_window_grows_fast_until_a_loss_and_slowly_after() -> None:
    window = Window(4, 64, 0.02)
    for _ in range(4):
        window.completed()
    assert window.size == 8
    window.lost(1.0, 0.9)
    window.lost(1.1, 0.95)  # asked for before the halving
    assert window.size == 4
    for _ in range(4):
        window.completed()
    assert 4.8 < window.size < 5
    for n in range(10):
        window.lost(2.0 + n, 2.0 + n)
    assert window.size == 1
    for _ in range(100_000):
        window.completed()
    assert window.size == 64


@pytest.mark.parametrize("holds", [False, True])
def test_window_takes_segments_that_are_complete_together_as_one_by_one(holds: bool) -> None:
    together, apart = Window(4, 64, 0.02), Window(4, 64, 0.02)
    for window in (together, apart):
        window.lost(1.0, 0.9)
        window.sample(1.0, 0.001)
        window.sample(1.1, 0.022 if holds else 0.001)
    for _ in range(3):
        together.completed(50)
        for _ in range(50):
            apart.completed()
        assert together.size == apart.size
    assert (together.size == 2) == holds


def test_window_holds_while_answers_queue_and_shrinks_when_they_queue_long() -> None:
    window = Window(4, 64, 0.02)
    window.sample(0.0, 0.001)
    window.sample(0.1, 0.022)
    window.completed()
    assert window.size == 4
    window.sample(0.2, 0.045)
    assert window.size == 3
    window.sample(0.21, 0.045)  # asked for before the shrinking
    assert window.size == 3
    window.sample(0.3, 0.001)
    window.completed()
    assert window.size > 3


def test_window_gets_used_to_a_way_that_has_become_longer() -> None:
    window = Window(4, 64, 0.02)
    window.sample(0.0, 0.001)
    for n in range(1, 5000):
        window.sample(n * 0.2, 0.1)
    before = window.size
    window.completed()
    assert window.size > before


def test_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(10.0, 5)
    assert bucket.available(0.0, 100) == 5
    bucket.take(5)
    assert bucket.available(0.0, 1) == 0
    assert bucket.ready_at(0.0, 2) == pytest.approx(0.2)
    assert bucket.available(0.2, 100) == 2
    assert bucket.available(100.0, 100) == 5
    assert bucket.ready_at(100.0, 50) == 100.0


def test_bucket_keeps_the_promise_of_ready_at_for_any_rate() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        bucket = TokenBucket(rng.uniform(0.1, 1e6), rng.randint(1, 100))
        now = rng.uniform(0, 1e6)
        bucket.take(bucket.available(now, 1000))
        count = rng.randint(1, 100)
        assert bucket.available(bucket.ready_at(now, count), count) >= min(count, bucket.burst)


def test_bucket_without_a_rate_is_no_bound() -> None:
    bucket = TokenBucket(0.0, 1)
    assert bucket.available(0.0, 10**6) == 10**6
    bucket.take(10**6)
    assert bucket.ready_at(0.0, 10**6) == 0.0


# --- assembly ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1024, 1025, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("chunking", wire.CHUNKINGS)
def test_assembly_of_all_chunks_in_any_order_is_the_block(
    size: int, chunking: wire.Chunking
) -> None:
    data = random.Random(size).randbytes(size)
    block, digest = BlockId(1, bytes(16)), wire.digest_of(data)
    buffer = memoryview(bytearray(size))
    assembly = Assembly(Placement(), block, size, digest, buffer, chunking, {2})
    chunks = [
        (segment, chunk)
        for segment in range(chunking.segments_of(size))
        for chunk in range(chunking.chunks_of(size, segment))
    ]
    random.Random(1).shuffle(chunks)
    for segment, chunk in chunks:
        assert assembly.segments_left > 0
        length = chunking.chunk_bytes
        start = chunking.start_of(segment) + chunk * length
        payload = data[start : start + length].ljust(length, b"\0")
        assert assembly.missing[segment] <= assembly.all_chunks(segment)
        frame = wire.Frame(
            wire.OP_DATA,
            *block,
            chunking.number(segment),
            digest=digest,
            chunk=chunk,
            size=size,
            payload=payload,
        )
        arrived = assembly.put(frame, 2)
        assert arrived.added == 1 << chunk
        assert assembly.took(arrived) == assembly.missing[segment] == arrived.missing
        assert assembly.put(frame, 2).added == 0
    assert assembly.segments_left == 0
    assert assembly.buffer == data
    assert assembly.verified()
    assembly.buffer[size // 2] ^= 1
    assert not assembly.verified()


def test_assembly_wants_a_writable_buffer_of_the_blocks_size() -> None:
    for buffer in (memoryview(bytes(10)), memoryview(bytearray(11))):
        with pytest.raises(ValueError, match="not a writable view of 10 bytes"):
            Assembly(Placement(), BlockId(1, bytes(16)), 10, 1, buffer, wire.CELLS, {2})
