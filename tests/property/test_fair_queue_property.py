"""Fair queueing and rate limits against what they promise.

Oracle: for every span in which two flows both wait, what each was given divided by its weight,
which may differ by one item of each; and for every span of time, what a rate lets through at most.
Cannot see: what waits for in a pool.
"""

from __future__ import annotations

import itertools
from collections import deque

from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvcast.hostagent.core.limits import BURST_S, Limits, RateLimit
from kvcast.protocol.fair_queue import MAX_FLOWS, MAX_IDLE_FLOWS, BoundedQueue, FairQueue, Shares

FLOWS = 4
MOST_COST = 9
WEIGHTS = st.lists(st.sampled_from((0.25, 1.0, 1.0, 3.0)), min_size=FLOWS, max_size=FLOWS)
ARRIVAL = st.tuples(st.integers(0, FLOWS - 1), st.integers(1, MOST_COST))
STEP = st.one_of(ARRIVAL, st.none())
"""An item comes, or the next one is taken."""

Item = tuple[int, int, int]  # flow, cost, number


def make(weights: list[float]) -> FairQueue[Item]:
    return FairQueue(lambda item: item[0], lambda item: item[1], lambda flow: weights[flow])


@given(weights=WEIGHTS, steps=st.lists(STEP, max_size=150))
@example(weights=[1.0] * FLOWS, steps=[*[(0, MOST_COST)] * 8, (1, 1), *[None] * 8])
@settings(max_examples=300, deadline=None)
def test_flows_that_wait_share_by_weight_and_each_in_its_order(
    weights: list[float], steps: list[tuple[int, int] | None]
) -> None:
    queue = make(weights)
    waiting: list[deque[Item]] = [deque() for _ in range(FLOWS)]
    given_to: list[list[float]] = []
    """After each take, what every flow has been given by then, divided by its weight."""
    busy_since: list[int | None] = [None] * FLOWS
    served = [0.0] * FLOWS
    numbers = itertools.count()
    for step in steps:
        if step is not None:
            flow, cost = step
            item = (flow, cost, next(numbers))
            queue.push(item)
            waiting[flow].append(item)
            if busy_since[flow] is None:
                busy_since[flow] = len(given_to)
        else:
            turn = queue.next_flow()
            assert (turn is None) == (not any(waiting))
            if turn is None:
                continue
            assert queue.head(turn) == waiting[turn][0]
            item = queue.take(turn)
            assert item == waiting[turn].popleft()
            served[turn] += item[1] / weights[turn]
            given_to.append(list(served))
            for one, other in itertools.combinations(range(FLOWS), 2):
                since_one, since_other = busy_since[one], busy_since[other]
                if since_one is None or since_other is None:
                    continue
                since = max(since_one, since_other)
                before = given_to[since - 1] if since else [0.0] * FLOWS
                apart = (served[one] - before[one]) - (served[other] - before[other])
                bound = MOST_COST / weights[one] + MOST_COST / weights[other]
                assert abs(apart) <= bound + 1e-6
            if not waiting[turn]:
                busy_since[turn] = None
        assert len(queue) == sum(map(len, waiting))
        assert [queue.count(flow) for flow in range(FLOWS)] == list(map(len, waiting))
        assert sorted(queue) == sorted(itertools.chain(*waiting))
        assert queue.is_contended == (sum(map(bool, waiting)) > 1)


def test_who_paused_gets_no_more_for_it() -> None:
    queue = make([1.0] * FLOWS)
    for number in range(100):
        queue.push((0, 1, number))
    for _ in range(60):
        queue.take(0)
    for number in range(40):
        queue.push((1, 1, number))
    turns = []
    for _ in range(20):
        flow = queue.next_flow()
        assert flow is not None
        turns.append(flow)
        queue.take(flow)
    assert 9 <= turns.count(1) <= 11


def test_what_is_put_back_comes_first_and_in_its_order() -> None:
    queue = make([1.0] * FLOWS)
    for number in range(3):
        queue.push((0, 1, number))
    first, second = queue.take(0), queue.take(0)
    queue.push_front([first, second])
    assert [queue.take(0)[2] for _ in range(3)] == [0, 1, 2]


def test_what_is_taken_out_costs_nothing_and_the_rest_keeps_its_order() -> None:
    queue = make([1.0] * FLOWS)
    for number in range(6):
        queue.push((0, 9, number))
    queue.push((1, 9, 6))
    queue.push((2, 1, 7))
    assert queue.remove(lambda item: item[2] in (0, 3, 6)) == [(0, 9, 0), (0, 9, 3), (1, 9, 6)]
    assert queue.remove(lambda item: item[0] == 1) == []
    assert len(queue) == 5
    assert list(queue) == [(0, 9, 1), (0, 9, 2), (0, 9, 4), (0, 9, 5), (2, 1, 7)]
    queue.push((1, 1, 8))
    turns = []
    while (flow := queue.next_flow()) is not None:
        turns.append(queue.take(flow)[2])
    assert turns == [1, 7, 8, 2, 4, 5]
    assert not queue.is_contended


def turns_of(queue: FairQueue[Item], count: int) -> list[int | None]:
    """Whose so many turns are that are taken now."""
    turns = []
    for _ in range(count):
        turns.append(flow := queue.next_flow())
        assert flow is not None
        queue.take(flow)
    return turns


def test_what_turns_out_to_cost_more_is_paid_for() -> None:
    queue = make([1.0] * FLOWS)
    for number in range(10):
        queue.push((0, 1, number))
        queue.push((1, 1, number))
    queue.take(0)
    queue.charge(0, 5)
    assert turns_of(queue, 6) == [1] * 6


def test_what_cost_as_much_as_was_thought_changes_nothing() -> None:
    """Though another's turn was long: who waits keeps his place."""
    queue = make([1.0] * FLOWS)
    for number in range(30):
        queue.push((0, 1, number))
        queue.push((1, 1, number))
    for _ in range(10):
        queue.take(0)
    queue.charge(1, 0)
    assert turns_of(queue, 10) == [1] * 10


@given(
    bound=st.integers(1, 20),
    steps=st.lists(st.one_of(ARRIVAL, st.none(), st.floats(0, 1)), max_size=150),
)
@settings(max_examples=300, deadline=None)
def test_flows_that_compete_use_no_more_than_the_bound_and_an_item_each(
    bound: int, steps: list[tuple[int, int] | float | None]
) -> None:
    """Steps: an item comes; the next is taken; one of those that were taken ends."""
    queue: BoundedQueue[Item] = BoundedQueue(bound, lambda item: item[0], lambda item: item[1])
    taken: list[Item] = []
    for step in steps:
        if isinstance(step, tuple):
            queue.push((*step, 0))
        elif isinstance(step, float):
            if taken:
                flow, cost, _ = taken.pop(int(step * (len(taken) - 1)))
                queue.use(flow, -cost)
        else:
            there = {item[0] for item in (*queue, *taken)}
            flow_or_none = queue.free_flow()
            if flow_or_none is None:
                assert not len(queue) or (len(there) > 1 and queue.used >= bound)
                continue
            flow = flow_or_none
            assert flow == queue.next_flow()
            mine = [item for item in taken if item[0] == flow]
            assert len(there) == 1 or not mine or queue.used < bound
            item = queue.take(flow)
            queue.use(flow, item[1])
            taken.append(item)
        queue.check(sum(cost for _, cost, _ in taken))


def test_flows_that_are_gone_are_forgotten_at_the_bound() -> None:
    queue: FairQueue[int] = FairQueue(lambda item: item, lambda item: 1.0)
    for flow in range(3 * MAX_IDLE_FLOWS):
        queue.push(flow)
        queue.take(flow)
    assert len(queue._idle) <= MAX_IDLE_FLOWS
    for flow in range(2 * MAX_IDLE_FLOWS):
        queue.push(flow)
    while (turn := queue.next_flow()) is not None:
        queue.take(turn)
    assert len(queue._idle) <= MAX_IDLE_FLOWS


@given(
    rates=st.tuples(st.sampled_from((0.0, 5.0, 40.0)), st.sampled_from((0.0, 1000.0))),
    steps=st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(1, 8), st.integers(0, 600)), max_size=80
    ),
)
@settings(max_examples=300, deadline=None)
def test_no_more_passes_in_any_span_than_the_rate_a_burst_and_what_is_in_progress(
    rates: tuple[float, float], steps: list[tuple[float, int, int]]
) -> None:
    limits = Limits()
    limits.configure({1: RateLimit(*rates)})
    assert limits.is_limited(1) == any(rates)
    now = 0.0
    passed: list[tuple[float, float, float]] = []
    for wait_s, operations, size_bytes in steps:
        now += wait_s
        if limits.admit(now, 1, operations):
            limits.moved(1, size_bytes)
            passed.append((now, operations, size_bytes))
        assert limits.admit(now, 2, operations), "without a limit nothing is refused"
    for place, rate, most in ((1, rates[0], 8), (2, rates[1], 600)):
        if not rate:
            continue
        for first, last in itertools.combinations_with_replacement(range(len(passed)), 2):
            span_s = passed[last][0] - passed[first][0]
            through = sum(one[place] for one in passed[first : last + 1])
            assert through <= rate * (span_s + BURST_S) + most + 1e-6
    if not any(rates):
        assert len(passed) == len(steps)


def test_a_limit_that_did_not_change_does_not_begin_anew() -> None:
    limits = Limits()
    limits.configure({1: RateLimit(operations_per_s=2.0)})
    assert limits.admit(0.0, 1, 2)
    limits.configure({1: RateLimit(operations_per_s=2.0), 2: RateLimit(bytes_per_s=1.0)})
    assert not limits.admit(0.0, 1, 1)
    assert limits.admit(1.0, 1, 1)
    limits.configure({})
    assert limits.admit(1.0, 1, 100)


# --- shares -----------------------------------------------------------------------------------


@given(
    weights=WEIGHTS,
    credit=st.sampled_from((0.0, 5.0, 40.0)),
    takes=st.lists(st.tuples(st.sets(st.integers(0, FLOWS - 1), min_size=1), st.integers(1, 9))),
)
@settings(max_examples=300, deadline=None)
def test_whoever_waits_all_the_while_gets_its_share_but_for_what_others_had_saved(
    weights: list[float], credit: float, takes: list[tuple[set[int], int]]
) -> None:
    """Flow 0 waits all the while."""
    shares = Shares(credit, lambda flow: weights[flow])
    served = [0.0] * FLOWS
    for waiting, cost in takes:
        flow = shares.next_of(waiting | {0})
        shares.took(flow, cost)
        served[flow] += cost / weights[flow]
        bound = credit + MOST_COST / weights[0]
        assert all(one <= served[0] + bound + MOST_COST / weight + 1e-6
                   for one, weight in zip(served, weights, strict=True))  # fmt: skip


def test_who_asks_for_little_goes_first_and_who_comes_anew_has_saved_nothing() -> None:
    shares = Shares(credit=20.0)
    shares.took(1, 1.0)
    for _ in range(100):
        shares.took(2, 1.0)
    assert [_next_and_take(shares) for _ in range(15)] == [1] * 15
    assert sorted({_next_and_take(shares, (2, 3)) for _ in range(2)}) == [2, 3]


def _next_and_take(shares: Shares, flows: tuple[int, ...] = (1, 2)) -> int:
    flow = shares.next_of(flows)
    shares.took(flow, 1.0)
    return flow


def test_what_flows_have_had_is_remembered_of_so_many() -> None:
    shares = Shares()
    for flow in range(3 * MAX_FLOWS):
        shares.took(flow, 1.0)
        assert len(shares._starts) <= MAX_FLOWS
