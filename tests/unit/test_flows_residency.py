"""Policies of the switch's memory beside oracles: an exhaustive search, and each other.

The controller's policy runs as it is; its own decisions are tested in test_controller_admission.py.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.protocol.messages.wire import SEGMENT_BYTES
from kvcast.simulation.flows import residency
from kvcast.simulation.flows.demand import NS
from kvcast.simulation.flows.residency import Stream


def stream(blocks: list[int], step_s: float = 1.0, sizes: list[int] | None = None) -> Stream:
    count = max(blocks, default=0) + 1
    return Stream(
        (np.arange(len(blocks)) * step_s * NS).astype(np.int64),
        np.array(blocks, np.int64),
        np.arange(len(blocks)) % 8,
        np.array(sizes or [SEGMENT_BYTES] * count, np.int64),
    )


def best_possible(blocks: list[int], room: int) -> int:
    """Hits of the best of all schedules, by trying all that may be kept after each read."""
    states = {frozenset[int](): 0}
    for block in blocks:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            now = hits + (block in kept)
            offered = sorted(kept | {block})
            for size in range(min(room, len(offered)) + 1):
                for choice in combinations(offered, size):
                    key = frozenset(choice)
                    after[key] = max(after.get(key, 0), now)
        states = after
    return max(states.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 3))
def test_belady_is_the_best_of_all_schedules(blocks: list[int], room: int) -> None:
    found = int(residency.belady(stream(blocks), room * SEGMENT_BYTES).sum())
    assert found == best_possible(blocks, room)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 4))
def test_nothing_beats_the_bound_and_nobody_the_optimum(blocks: list[int], room: int) -> None:
    reads = stream(blocks)
    capacity = room * SEGMENT_BYTES
    optimum = residency.optimum_bytes(reads, capacity)
    assert optimum <= residency.bound_bytes(reads, capacity)
    for name in residency.others():
        hits = residency.other(name)(reads, capacity)
        assert int(reads.bytes[hits].sum()) <= optimum
    assert int(reads.bytes[residency.value(reads, room)].sum()) <= optimum
    assert residency.static_bytes(reads, capacity) <= optimum
    late = residency.after_its_fill(reads, residency.ControlLoop.write_s)
    heard = residency.after_it_is_heard_of(reads, residency.ControlLoop())
    assert residency.optimum_bytes(heard, capacity) <= residency.optimum_bytes(late, capacity)
    assert int(reads.bytes[residency.value(reads, room)].sum()) <= residency.optimum_bytes(
        heard, capacity
    )


def test_the_controllers_policy_serves_a_block_that_is_read_again_and_again() -> None:
    hits = residency.value(stream([0] * 40), slots=1)
    assert hits[:2].sum() == 0
    assert hits[6:].all()


@pytest.mark.parametrize("segments", [1, 4, 32])
def test_what_is_read_again_stays_among_blocks_of_its_size_that_are_read_once(
    segments: int,
) -> None:
    again = [0, 1] * 150
    once = range(2, 302)
    blocks = [block for pair in zip(again, once, strict=True) for block in pair]
    reads = stream(blocks, 0.5, [segments * SEGMENT_BYTES] * 302)
    hits = residency.value(reads, 3 * segments)
    assert hits[reads.block < 2].mean() > 0.8


def test_a_block_larger_than_the_memory_is_never_served() -> None:
    reads = stream([0] * 20, sizes=[3 * SEGMENT_BYTES])
    assert not residency.value(reads, slots=2).any()
    assert residency.optimum_bytes(reads, 2 * SEGMENT_BYTES) == 0


def test_reads_that_share_an_answer_are_not_memorys() -> None:
    reads = stream([0, 0, 0, 1, 0, 0], step_s=0.04)
    alone = reads.without_joins(100_000_000)
    # The second and third join the first; the fifth comes 160 ms after it, the sixth joins that.
    assert alone.block.tolist() == [0, 1, 0]
    assert alone.together.tolist() == [3, 1, 2]


def test_no_reads_at_all() -> None:
    empty = stream([])
    assert residency.compared(empty, 4)["optimum"] == 0
    assert not len(empty.without_joins(1).at)


def test_what_no_controller_can_have_answered_is_each_blocks_beginning() -> None:
    late = residency.after_its_fill(stream([0, 1, 0, 0, 1, 2, 0], step_s=0.1), 0.25)
    # Block 0 is read at 0, 0.2, 0.3 and 0.6 s: that at 0.3 s fills. Block 1's second read fills.
    assert late.block.tolist() == [0, 1, 0]
    assert (late.at / NS).round(1).tolist() == [0.3, 0.4, 0.6]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 4))
def test_what_becomes_of_the_optimums_hits_sums_up_to_them(blocks: list[int], room: int) -> None:
    hits = residency.compared(stream(blocks), room)
    parts = residency.parts_of_optimum(hits)
    assert sum(parts.values()) == hits["optimum"]
    assert parts["value"] == hits["value"]
    assert min(parts.values()) >= 0


def test_a_second_read_is_before_the_fill_and_a_third_is_not() -> None:
    twice = residency.parts_of_optimum(residency.compared(stream([0, 1, 2, 0, 1, 2], 5.0), 8))
    assert twice["before the fill"] == sum(twice.values()) == 3 * SEGMENT_BYTES
    thrice = residency.parts_of_optimum(residency.compared(stream([0, 1, 2] * 3, 5.0), 8))
    assert thrice["value"] == thrice["before the fill"] == 3 * SEGMENT_BYTES


def test_an_evicted_blocks_slots_rest_before_another_block_has_them() -> None:
    # Block 1 displaces block 0 as soon as it was read often enough; the fill waits for the rest.
    both = stream([0] * 4 + [1] * 40, step_s=0.1)
    soon = residency.ControlLoop(drain_s=0.0)
    late = residency.ControlLoop(drain_s=1.0)
    answered = [int(residency.value(both, 1, loop=loop)[4:].sum()) for loop in (soon, late)]
    assert answered[0] == answered[1] + 10 > 10


def test_a_burst_of_joined_reads_is_heard_of_by_the_switchs_digest_before_any_report() -> None:
    alone = stream([0] * 8, step_s=0.15)
    burst = Stream(
        alone.at, alone.block, alone.node, alone.block_bytes, np.full(len(alone.at), 2, np.int64)
    )
    slow = residency.ControlLoop(renewal_s=100.0)
    assert residency.value(burst, 1, loop=slow).tolist() == [False] * 2 + [True] * 6
    deaf = residency.ControlLoop(renewal_s=100.0, heat_threshold=1000)
    assert not residency.value(burst, 1, loop=deaf).any()


def test_a_block_that_is_let_in_answers_from_the_read_after_its_fill() -> None:
    reads = stream([0, 0, 0, 1, 0, 1, 0])
    hits = np.array([False, True, True, False, False, True, True])
    # The second fills; the third is answered. Block 0 is let in again by the fifth.
    assert residency.as_a_switch_fills(reads, hits).tolist() == [False] * 2 + [True] + [False] * 4


@pytest.mark.skipif(not residency.others(), reason="libcachesim cannot be imported")
def test_another_policy_hears_of_reads_when_the_controller_does() -> None:
    lru, reads = residency.told_as_late("LRU"), stream([0] * 8, step_s=0.3)
    # The third read raises a digest, which comes in before the fourth: that fills.
    hits = lru(reads, SEGMENT_BYTES, residency.ControlLoop())
    assert hits.tolist() == [False] * 4 + [True] * 4
    deaf = residency.ControlLoop(heat_threshold=1000)  # the home reports at 1 s
    assert lru(reads, SEGMENT_BYTES, deaf).tolist() == [False] * 5 + [True] * 3
    # Block 1 is let in at 2.0625 s; the slot rests for 0.2 s, so the read at 2.4 s fills it. Block
    # 0 is let in again at 4 s, its entry is written at 4.21 s, and the read at 4.5 s fills it.
    both = stream([0] * 5 + [1] * 7 + [0] * 8, step_s=0.3)
    told = lru(both, SEGMENT_BYTES, deaf).tolist()
    assert told[5:12] == [False] * 4 + [True] * 3
    assert told[12:] == [False] * 4 + [True] * 4
    restless = residency.ControlLoop(heat_threshold=1000, drain_s=0.0)
    told = lru(both, SEGMENT_BYTES, restless).tolist()
    assert told[5:12] == [False] * 3 + [True] * 4
    assert told[12:] == [False] * 3 + [True] * 5


def test_a_block_is_heard_of_by_its_homes_report_or_by_a_digest_that_comes_before() -> None:
    loop = residency.ControlLoop()  # homes 0, 1, … report 0, 1/16, … of a second after the full one
    reads = stream([0, 1, 0, 1, 0, 1, 0], step_s=0.3)
    late = residency.after_it_is_heard_of(reads, loop)
    # Block 0's home reports at 1 s, block 1's at 1.0625 s: the reads at 1.2 and 1.5 s fill.
    assert (late.at / NS).round(1).tolist() == [1.2, 1.5, 1.8]
    burst = Stream(
        reads.at, reads.block, reads.node, reads.block_bytes, np.full(len(reads.at), 2, np.int64)
    )
    late = residency.after_it_is_heard_of(burst, loop)
    assert (late.at / NS).round(1).tolist() == [0.6, 0.9, 1.2, 1.5, 1.8]
    deaf = residency.ControlLoop(renewal_s=100.0, heat_threshold=1000)
    assert not len(residency.after_it_is_heard_of(burst, deaf).at)


def test_a_policy_that_has_room_for_all_reaches_the_optimum_that_can_be_reached() -> None:
    reads = stream([0, 1, 2, 3] * 8, step_s=0.35)
    hits = residency.compared(reads, 8)
    assert hits["value"] == hits["reachable optimum"] > 0
    assert hits["reachable optimum"] <= hits["optimum, after the fill"] <= hits["optimum"]
