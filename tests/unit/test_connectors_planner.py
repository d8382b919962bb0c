"""The connectors' decisions: what is looked up, loaded and saved, and what failures lead to.

Oracle: expectations written by hand from the module's text; `tests/property` plays random engines.
Cannot see: engines, sockets.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from kvcast.hostagent.connectors.counters import NAMES, Counters, merged, split
from kvcast.hostagent.connectors.health import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, Health
from kvcast.hostagent.connectors.loads import LoadTable, OpenLoad
from kvcast.hostagent.connectors.naming import (
    RankFacts,
    group_sizes,
    hashing_facts,
    keys_of,
    namespace_name,
)
from kvcast.hostagent.connectors.options import ConfigurationError, handover_of, parse_options
from kvcast.hostagent.connectors.planner import (
    MOST_LOOKUPS,
    Load,
    Lookup,
    Planner,
    PlannerOptions,
)

OPTIONS = PlannerOptions(deadline_s=2.0, lookup_s=0.25, most_saving=64)


def chain(name: str, blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {at}".encode()).digest() for at in range(blocks)]


def make(**changes: object) -> Planner:
    options = {name: getattr(OPTIONS, name) for name in OPTIONS.__dataclass_fields__} | changes
    return Planner(PlannerOptions(**options), Counters())  # type: ignore[arg-type]


def ids(blocks: int, first: int = 100) -> list[list[int]]:
    return [list(range(first, first + blocks))]


def ask(
    planner: Planner, name: str, hashes: Sequence[bytes], held: int | None, now: float = 0.0
) -> None:
    """A request arrives, and the pool holds so much of it."""
    planner.arrived(now, name, hashes)
    lookup = planner.out.lookups.pop()
    planner.answered(now + 0.01, name, lookup.number, held)


def load(planner: Planner, name: str, hashes: Sequence[bytes], now: float, here: int = 0) -> Load:
    count = planner.matched(now, name, hashes, here, len(hashes))
    assert count
    planner.allocated(now, name, hashes, count, ids(len(hashes)))
    return planner.out.loads.pop()


def counts(planner: Planner) -> dict[str, float]:
    return planner._counters.take()


# --- a request's way ------------------------------------------------------------------------------


def test_a_request_is_looked_up_when_it_arrives_by_one_question_for_its_chain() -> None:
    planner, hashes = make(), chain("a", 40)
    planner.arrived(0.0, "r", hashes, here=3)
    [lookup] = planner.out.lookups
    assert lookup.hashes == tuple(hashes)
    assert lookup.prefetch_from == 3
    assert planner.matched(0.1, "r", hashes, 0, 40) is None  # not known yet: ask again
    assert len(planner.out.lookups) == 1


def test_what_the_pool_holds_beyond_the_engine_is_loaded_where_the_engine_says() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=7)
    assert planner.matched(0.1, "r", hashes, 2, 10) == 5
    planner.allocated(0.1, "r", hashes, 5, ids(7))
    [plan] = planner.out.loads
    assert (plan.first, plan.hashes, plan.before) == (2, tuple(hashes[2:7]), hashes[1])
    assert plan.block_ids == ((102, 103, 104, 105, 106),)
    assert plan.left_s == pytest.approx(2.0)
    assert planner.matched(0.2, "r", hashes, 2, 10) == 0  # while it is loading


def test_never_more_is_promised_than_the_engine_asks_for() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=10)
    assert planner.matched(0.1, "r", hashes, 0, 9) == 9
    assert planner.matched(0.1, "r", hashes, 9, 9) == 0


def test_a_pool_that_does_not_answer_holds_a_request_no_longer_than_a_lookup_may_take() -> None:
    planner, hashes = make(), chain("a", 10)
    planner.arrived(0.0, "r", hashes)
    assert planner.matched(5.0, "r", hashes, 0, 10) is None  # from the first time the engine asks
    assert planner.matched(5.2, "r", hashes, 0, 10) is None
    assert planner.matched(5.26, "r", hashes, 0, 10) == 0
    planner.answered(5.3, "r", planner.out.lookups[0].number, 10)  # too late
    assert planner.matched(5.4, "r", hashes, 0, 10) == 0
    assert counts(planner)["lookups_failed|reason=lookup_deadline"] == 1


def test_the_deadline_counts_from_the_engines_first_question() -> None:
    planner, hashes = make(), chain("a", 4)
    planner.arrived(0.0, "r", hashes)
    assert planner.matched(9.0, "r", hashes, 0, 4) is None
    planner.answered(9.2, "r", planner.out.lookups.pop().number, 4)
    assert load(planner, "r", hashes, 9.2).left_s == pytest.approx(1.8)


def test_an_old_answer_is_asked_for_again_where_the_pool_may_hold_more_by_now() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=2)
    assert planner.matched(3.0, "r", hashes, 0, 10) is None
    planner.answered(3.01, "r", planner.out.lookups.pop().number, 9)
    assert planner.matched(3.02, "r", hashes, 0, 10) == 9
    ask(planner, "whole", hashes, held=10, now=3.0)
    assert planner.matched(9.0, "whole", hashes, 0, 10) == 10  # it cannot hold more


def test_a_failed_load_is_not_tried_again_for_that_request_nor_its_block_by_others() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=8)
    plan = load(planner, "r", hashes, 0.1)
    planner.loaded(0.2, "r", plan.number, 3, hashes, "not_found")
    assert planner.matched(0.3, "r", hashes, 0, 10) == 0
    assert not planner.out.lookups
    ask(planner, "s", hashes, held=8, now=0.3)
    assert planner.matched(0.4, "s", hashes, 0, 10) == 3  # up to the block that failed
    ask(planner, "t", hashes, held=8, now=6.0)
    assert planner.matched(6.1, "t", hashes, 0, 10) == 8  # which is tried again after a while


def test_what_a_failed_load_left_out_is_saved_once_it_is_computed() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=8)
    plan = load(planner, "r", hashes, 0.1)
    planner.loaded(0.2, "r", plan.number, 3, hashes, "corrupt")
    save = planner.computed(0.3, "r", hashes, 10, ids(10))
    assert save is not None
    assert (save.first, save.hashes, save.before) == (3, tuple(hashes[3:]), hashes[2])


def test_a_load_has_what_the_worker_with_the_least_has() -> None:
    planner, hashes = make(workers=2), chain("a", 10)
    ask(planner, "r", hashes, held=8)
    plan = load(planner, "r", hashes, 0.1)
    planner.loaded(0.2, "r", plan.number, 8, hashes, "")
    assert planner.matched(0.2, "r", hashes, 0, 10) == 0
    planner.loaded(0.3, "r", plan.number, 5, hashes, "deadline")
    assert counts(planner)["failed_loads|reason=deadline"] == 1


def test_a_request_that_was_thrown_out_is_looked_up_anew() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=8)
    plan = load(planner, "r", hashes, 0.1)
    planner.loaded(0.2, "r", plan.number, 8, hashes, "")
    assert planner.matched(7.0, "r", hashes, 0, 10, preemptions=1) is None
    assert planner.out.lookups


def test_a_request_for_which_the_engine_has_no_room_yet_keeps_its_answer() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=0)
    for step in range(1, 6):  # a None would let requests behind it have the room first
        assert planner.matched(0.1 * step, "r", hashes, 0, 10) == 0
    assert not planner.out.lookups
    assert counts(planner) == {"lookups": 1, "miss_blocks|reason=not_held": 10}


def test_a_report_of_another_load_or_a_request_that_is_gone_changes_nothing() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=8)
    plan = load(planner, "r", hashes, 0.1)
    planner.loaded(0.2, "r", plan.number + 7, 0, hashes, "deadline")
    planner.loaded(0.2, "x", plan.number, 0, hashes, "deadline")
    planner.loaded(0.2, "r", plan.number, 8, hashes, "")
    planner.finished("r")
    planner.loaded(0.4, "r", plan.number, 0, hashes, "deadline")
    assert "failed_loads|reason=deadline" not in counts(planner)


def test_questions_are_bounded() -> None:
    planner, hashes = make(), chain("a", 2)
    for number in range(MOST_LOOKUPS + 5):
        planner.arrived(0.0, f"r{number}", hashes)
    assert len(planner.out.lookups) == MOST_LOOKUPS
    assert planner.matched(0.0, f"r{MOST_LOOKUPS}", hashes, 0, 2) == 0
    assert counts(planner)["lookups_failed|reason=busy"] == 5
    for number in range(MOST_LOOKUPS):
        planner.finished(f"r{number}")
    planner.arrived(0.2, "later", hashes)
    assert planner.matched(0.2, "later", hashes, 0, 2) is None


def test_short_prefixes_are_computed() -> None:
    planner, hashes = make(least_blocks=5), chain("a", 10)
    ask(planner, "r", hashes, held=4)
    assert planner.matched(0.1, "r", hashes, 0, 10) == 0


def test_an_engine_that_cannot_go_on_behind_a_prefix_gets_whole_prompts_only() -> None:
    planner, hashes = make(whole=True), chain("a", 10)
    for name, held, rest_tokens, expected in [
        ("part", 9, 1, 0),
        ("with more to compute", 10, 5, 0),
        ("whole", 10, 1, 10),
    ]:
        ask(planner, name, hashes, held)
        assert planner.matched(0.1, name, hashes, 0, 10, rest_tokens) == expected, name


def test_a_dead_pool_is_left_alone_and_asked_again_later() -> None:
    planner, hashes = make(), chain("a", 4)
    for number in range(FAILURES):
        ask(planner, f"r{number}", hashes, held=None)
        assert planner.matched(0.1, f"r{number}", hashes, 0, 4) == 0
    planner.arrived(0.2, "s", hashes)
    assert not planner.out.lookups
    assert planner.matched(0.2, "s", hashes, 0, 4) == 0
    assert planner.computed(0.2, "s", hashes, 4, ids(4)) is None  # nor is anything saved there
    ask(planner, "t", hashes, held=4, now=1.0)
    assert planner.matched(1.1, "t", hashes, 0, 4) == 4
    planner.arrived(1.2, "u", hashes)
    assert planner.out.lookups


# --- prompts that another engine computes ---------------------------------------------------------


def awaiting(planner: Planner, hashes: list[bytes], held: int) -> None:
    planner.arrived(0.0, "r", hashes, awaits=True, readers=("a", "b"))
    assert planner.matched(0.0, "r", hashes, 0, 10) is None
    hear(planner, 0.01, held)


def hear(planner: Planner, now: float, held: int | None) -> Lookup:
    lookup = planner.out.lookups.pop()
    planner.answered(now, lookup.request, lookup.number, held)
    return lookup


def test_a_prompt_that_another_engine_computes_is_waited_for_and_fetched_meanwhile() -> None:
    planner, hashes = make(await_s=10.0), chain("a", 10)
    awaiting(planner, hashes, held=0)
    now, fetched_from = 0.02, []
    for held in (0, 3, 7, 10):
        while not planner.out.lookups:
            assert planner.matched(now, "r", hashes, 0, 10) is None
            now += 0.01
        lookup = hear(planner, now, held)
        assert lookup.readers == ("a", "b")
        fetched_from.append(lookup.prefetch_from)
    assert fetched_from == [0, 0, 3, 7]  # what was held before has been fetched before
    assert planner.matched(5.0, "r", hashes, 0, 10) == 10
    planner.allocated(5.0, "r", hashes, 10, ids(10))
    assert planner.out.loads.pop().left_s == pytest.approx(2.0)  # from now on, not from the start


def test_it_is_waited_for_no_longer_than_that_may_take() -> None:
    planner, hashes = make(await_s=1.0), chain("a", 10)
    awaiting(planner, hashes, held=4)
    now = 0.02
    while (found := planner.matched(now, "r", hashes, 0, 10)) is None:
        if planner.out.lookups:
            hear(planner, now, 4)
        now += 0.01
    assert found == 4  # the rest is computed
    assert now == pytest.approx(1.0, abs=0.05)
    assert counts(planner)["awaits_failed"] == 1


def test_what_requests_say_of_their_prompts_is_heard_only_where_the_operator_wants_it() -> None:
    planner, hashes = make(), chain("a", 10)
    planner.arrived(0.0, "r", hashes, awaits=True, readers=("a", "b"))
    assert hear(planner, 0.01, 4).readers == ()
    assert planner.matched(0.02, "r", hashes, 0, 10) == 4


def test_it_is_not_waited_for_where_the_pool_does_not_answer() -> None:
    planner, hashes = make(await_s=10.0), chain("a", 10)
    planner.arrived(0.0, "r", hashes, awaits=True)
    assert planner.matched(0.1, "r", hashes, 0, 10) is None
    assert planner.matched(0.36, "r", hashes, 0, 10) is None  # a lookup's time begins anew
    assert planner.matched(0.62, "r", hashes, 0, 10) == 0
    planner, hashes = make(await_s=10.0), chain("a", 10)
    awaiting(planner, hashes, held=4)
    for failure in range(FAILURES):
        assert planner.matched(0.1 + failure, "r", hashes, 0, 10) is None
        hear(planner, 0.2 + failure, None)
    assert planner.matched(0.3 + FAILURES, "r", hashes, 0, 10) == 0


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        {"other": 1},
        {"kvcast": None},
        {"kvcast": 3},
        {"kvcast": {"prefilling": "yes"}},
        {"kvcast": {"readers": ["n"] * 33}},
        {"kvcast": {"readers": "node-1"}},
        {"kvcast": {"x": 1}},
    ],
)
def test_what_a_request_says_of_its_prompt_is_believed_where_it_is_understood(said: Any) -> None:
    assert handover_of(said) == (False, ())
    right = {"kvcast": {"prefilling": True, "readers": ["b", "a", "b"]}}
    assert handover_of(right) == (True, ("b", "a"))


def load_by_layers(planner: Planner, name: str, hashes: Sequence[bytes]) -> Load:
    ask(planner, name, hashes, held=4)
    assert planner.matched(0.1, name, hashes, 0, 6) == 4
    planner.allocated(0.1, name, hashes, 4, ids(6), by_layers=True)
    return planner.out.loads.pop()


def test_what_is_computed_while_its_prefix_comes_is_saved_once_that_has_come() -> None:
    planner, hashes = make(workers=2), chain("a", 6)
    loading = load_by_layers(planner, "r", hashes)
    assert loading.by_layers
    assert planner.computed(0.1, "r", hashes, 6, ids(6)) is not None
    planner.finished("r")  # an engine says so before it says what became of the load
    assert not planner.out.saves
    planner.loaded(0.2, "r", loading.number, 4, hashes, "")
    assert not planner.out.saves, "one of two workers"
    planner.loaded(0.2, "r", loading.number, 4, hashes, "")
    [save] = planner.out.saves
    assert (save.first, save.hashes) == (4, tuple(hashes[4:]))


def test_what_was_computed_on_top_of_a_load_that_failed_is_never_saved() -> None:
    planner, hashes = make(), chain("a", 6)
    loading = load_by_layers(planner, "r", hashes)
    held_back = planner.computed(0.1, "r", hashes, 6, ids(6))
    assert held_back is not None
    planner.loaded(0.2, "r", loading.number, 2, hashes, "corrupt")
    assert not planner.out.saves
    assert [number for number, _ in planner.out.let_go] == [held_back.number]
    assert planner.saving_blocks == 0
    again = planner.computed(0.3, "r", hashes, 6, ids(6))
    assert again is not None
    assert (again.first, again.hashes) == (2, tuple(hashes[2:]))
    assert list(planner.out.saves) == [again]


def test_while_a_load_by_layers_is_under_way_nothing_else_is_promised() -> None:
    planner, hashes = make(), chain("a", 6)
    loading = load_by_layers(planner, "r", hashes)
    planner.arrived(0.1, "s", hashes)
    planner.answered(0.1, "s", planner.out.lookups.pop().number, 4)
    assert planner.matched(0.1, "s", hashes, 4, 6) is None
    planner.loaded(0.2, "r", loading.number, 4, hashes, "")
    assert planner.matched(0.2, "s", hashes, 4, 6) == 0


# --- saves ----------------------------------------------------------------------------------------


def test_what_the_pool_lacks_is_saved_once_as_it_is_computed() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=0)
    first = planner.computed(0.1, "r", hashes, 4, ids(4))
    assert first is not None
    assert (first.first, first.hashes, first.block_ids) == (
        0,
        tuple(hashes[:4]),
        ((100, 101, 102, 103),),
    )
    assert planner.computed(0.2, "r", hashes, 4, ids(4)) is None
    second = planner.computed(0.3, "r", hashes, 6, ids(6))
    assert second is not None
    assert second.block_ids == ((104, 105),)
    assert planner.saving_blocks == 6
    assert planner.saved(first.number) == first.hashes
    assert planner.out.let_go.pop() == (first.number, first.block_ids)
    assert planner.saved(first.number) == ()  # said twice
    assert planner.saving_blocks == 2


def test_what_the_pool_has_lost_and_the_engine_still_holds_is_saved_again() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=2)  # of the six that the engine holds
    assert planner.matched(0.1, "r", hashes, 6, 10) == 0
    save = planner.computed(0.2, "r", hashes, 8, ids(8), here=6)
    assert save is not None
    assert save.first == 2


def test_where_the_pool_was_not_asked_what_the_engine_held_is_not_saved_again() -> None:
    planner, hashes = make(load=False), chain("a", 10)
    planner.arrived(0.0, "r", hashes)
    save = planner.computed(0.2, "r", hashes, 8, ids(8), here=6)
    assert save is not None
    assert save.first == 6


def test_a_request_that_ends_while_its_blocks_come_saves_none_of_them() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=0)
    assert planner.matched(0.1, "r", hashes, 0, 10) == 0
    assert planner.computed(0.1, "r", hashes, 4, ids(4)) is not None
    # It is thrown out and taken again; another engine has saved the rest meanwhile.
    assert planner.matched(0.2, "r", hashes, 0, 10, preemptions=1) is None
    planner.answered(0.3, "r", planner.out.lookups.pop().number, 10)
    assert planner.matched(0.3, "r", hashes, 0, 10, preemptions=1) == 10
    planner.allocated(0.3, "r", hashes, 10, ids(10))
    # Its client goes; vLLM counts all that is on its way as computed.
    assert planner.computed(0.4, "r", hashes, 10, ids(10)) is None


def test_two_requests_with_one_prefix_save_it_once() -> None:
    planner, hashes = make(), chain("a", 10)
    ask(planner, "r", hashes, held=0)
    ask(planner, "s", hashes, held=0)
    assert planner.computed(0.1, "r", hashes, 6, ids(6)) is not None
    other = planner.computed(0.1, "s", hashes, 8, ids(8))
    assert other is not None
    assert other.hashes == tuple(hashes[6:8])


def test_saves_beyond_the_bound_wait_and_leave_no_gap() -> None:
    planner, hashes = make(most_saving=4), chain("a", 10)
    ask(planner, "r", hashes, held=0)
    first = planner.computed(0.1, "r", hashes, 10, ids(10))
    assert first is not None
    assert len(first.hashes) == 4
    assert planner.computed(0.2, "r", hashes, 10, ids(10)) is None
    assert counts(planner)["saves_delayed"] == 1
    planner.saved(first.number)
    second = planner.computed(0.4, "r", hashes, 10, ids(10))
    assert second is not None
    assert second.first == 4


def test_a_save_ends_when_all_workers_are_done_with_it() -> None:
    planner, hashes = make(workers=3), chain("a", 2)
    ask(planner, "r", hashes, held=0)
    save = planner.computed(0.0, "r", hashes, 2, ids(2))
    assert save is not None
    assert planner.saved(save.number, 2) == ()
    assert planner.saved(save.number, 1) == save.hashes


def test_a_consumer_saves_nothing_and_a_producer_loads_nothing() -> None:
    consumer, producer, hashes = make(save=False), make(load=False), chain("a", 4)
    ask(consumer, "r", hashes, held=0)
    assert consumer.computed(0.1, "r", hashes, 4, ids(4)) is None
    producer.arrived(0.0, "r", hashes)
    assert not producer.out.lookups
    assert producer.matched(0.0, "r", hashes, 0, 4) == 0


# --- health ---------------------------------------------------------------------------------------


def test_pauses_grow_to_a_bound_and_end_with_an_answer() -> None:
    health, now = Health(), 0.0
    for _ in range(FAILURES):
        assert health.may_ask(now)
        health.failed(now)
    pause_s = FIRST_PAUSE_S
    for _ in range(8):
        assert not health.may_ask(now + pause_s * 0.99)
        now += pause_s
        assert health.may_ask(now)
        assert not health.may_ask(now)  # one question decides
        health.failed(now)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert not health.well
    health.succeeded()
    assert health.well
    assert health.may_ask(now)


def test_late_news_of_old_questions_makes_no_pause_longer() -> None:
    health = Health()
    for _ in range(50):
        health.failed(0.0)
    assert health.may_ask(FIRST_PAUSE_S)


def test_a_question_of_which_nothing_is_heard_does_not_end_the_asking() -> None:
    health = Health()
    for _ in range(FAILURES):
        health.failed(0.0)
    assert health.may_ask(FIRST_PAUSE_S)
    assert health.may_ask(FIRST_PAUSE_S + LONGEST_PAUSE_S)


# --- loads ----------------------------------------------------------------------------------------


def a_load(blocks: int, left_s: float = 1.0) -> Load:
    return Load("r", 1, 2, tuple(chain("a", blocks)), (tuple(range(10, 10 + blocks)),), left_s)


def come(opened: OpenLoad, *parts: int) -> list[int]:
    written: list[int] = []
    for part in parts:
        opened.write(part, lambda part=part: written.append(part))  # type: ignore[misc]
    return written


def test_a_prefix_counts_up_to_the_first_block_that_is_not_whole() -> None:
    opened = OpenLoad(a_load(4), groups=2, now=0.0)
    come(opened, 0, 1, 2, 4, 5)
    ended = opened.end("deadline")
    assert ended is not None
    assert (ended.came, ended.reason) == (1, "deadline")
    assert ended.bad_block_ids == {11, 12, 13}


def test_behind_a_gap_nothing_is_awaited_or_written() -> None:
    opened = OpenLoad(a_load(4), groups=2, now=0.0)
    come(opened, 0, 1)
    opened.missed(3, "not_found")
    opened.missed(6, "deadline")
    assert opened.complete  # the second block is of no use without its second part
    assert come(opened, 4) == []
    ended = opened.end("")
    assert ended is not None
    assert (ended.came, ended.reason) == (1, "not_found")


def test_nothing_is_written_once_a_load_was_reported() -> None:
    table = LoadTable()
    opened = table.begin(a_load(2, left_s=0.5), groups=1, now=10.0)
    assert table.take(10.4) == []
    [ended] = table.take(10.5)
    assert (ended.came, ended.reason) == (0, "deadline")
    assert come(opened, 0, 1) == []
    table.end(opened, "")
    assert table.take(10.6) == []
    assert not table.waiting


def test_a_block_of_a_long_load_takes_no_longer_than_one_of_a_short_load() -> None:
    def each_s(blocks: int) -> float:
        opened = OpenLoad(a_load(blocks), 2, 0.0)
        began = time.process_time()
        for part in range(2 * blocks):
            assert opened.write(part, lambda: None)
            assert opened.complete == (part == 2 * blocks - 1)
        return (time.process_time() - began) / blocks

    short, long = (min(each_s(blocks) for _ in range(3)) for blocks in (500, 8000))
    assert long < 5 * short


def by_layers(blocks: int, groups: int) -> OpenLoad:
    load = Load("r", 1, 0, tuple(chain("a", blocks)), tuple(map(tuple, ids(blocks))), 2.0, True)
    return OpenLoad(load, groups, 0.0)


def test_a_layer_is_waited_for_until_all_of_it_that_is_of_use_has_come() -> None:
    opened = by_layers(3, 2)
    opened.write(0, lambda: None)
    opened.write(2, lambda: None)
    assert not opened.wait_for(0, 0.0)
    opened.missed(5, "not_found")  # so the third block is of no use
    assert opened.wait_for(0, 0.0)
    assert not opened.wait_for(1, 0.0)
    opened.stop("deadline")
    assert opened.wait_for(1, 0.0), "nothing more will come"
    ended = opened.end("")
    assert ended is not None
    assert (ended.came, ended.reason) == (0, "deadline")


def test_who_waits_for_a_layer_hears_of_it_from_another_thread() -> None:
    opened = by_layers(1, 2)
    other = threading.Timer(0.05, opened.write, (1, lambda: None))
    other.start()
    assert opened.wait_for(1, 60.0)
    other.join()


def test_a_load_by_layers_of_which_a_layer_was_not_waited_for_counts_for_nothing() -> None:
    table = LoadTable()
    opened = table.begin(by_layers(1, 2).load, 2, 0.0)
    for part in range(2):
        opened.write(part, lambda: None)
    assert opened.wait_for(0, 0.0)
    table.end(opened, "")
    assert table.take(0.1) == [], "it is reported when the step is over"
    table.conclude(opened, "not_awaited")
    [ended] = table.take(0.1)
    assert (ended.came, ended.reason) == (0, "not_awaited")
    assert not table.waiting


def test_a_whole_load_needs_no_reason() -> None:
    table = LoadTable()
    opened = table.begin(a_load(2), groups=2, now=0.0)
    come(opened, 3, 0, 2, 1)
    assert opened.complete
    table.end(opened, "deadline")
    [ended] = table.take(0.1)
    assert (ended.came, ended.reason, ended.bad_block_ids) == (2, "", set())


# --- names ----------------------------------------------------------------------------------------


def test_parts_of_blocks_have_keys_of_their_own() -> None:
    keys = [key for one in chain("a", 100) for key in keys_of(one, 7)]
    assert len(set(keys)) == 700
    assert set(map(len, keys)) == {16}
    with pytest.raises(ValueError, match="too short"):
        keys_of(b"short", 1)


LAYOUT = {"dtype": "bfloat16", "block_tokens": "16", "order": "LBNHC"}


def name(**changes: object) -> tuple[str, str, str, str]:
    facts: dict[str, object] = {
        "tenant": "t",
        "model": "m",
        "revision": "r",
        "version": "",
        "rank": RankFacts(),
        "layout": LAYOUT,
    }
    named = namespace_name(**(facts | changes))  # type: ignore[arg-type]
    return named.tenant, named.model, named.version, named.layout


def test_every_fact_that_decides_what_bytes_mean_makes_another_namespace() -> None:
    changed: list[dict[str, object]] = [
        {},
        {"tenant": "u"},
        {"model": "n"},
        {"revision": "s"},
        {"version": "2"},
        {"rank": RankFacts(1, 2)},
        {"rank": RankFacts(0, 2)},
        {"rank": RankFacts(0, 4)},
        {"rank": RankFacts(pipeline_rank=1, pipeline_size=2)},
        *({"layout": LAYOUT | {fact: "other"}} for fact in LAYOUT),
        {"model": "n" * 300},
        {"model": "n" * 301},
    ]
    names = [name(**change) for change in changed]
    assert len(set(names)) == len(names)
    assert max(len(text) for one in names for text in one) <= 256


def test_ranks_that_hold_the_same_bytes_share_a_namespace_and_one_of_them_saves() -> None:
    ranks = [RankFacts(rank, 4, replicas=4) for rank in range(4)]  # MLA
    assert len({name(rank=rank) for rank in ranks}) == 1
    assert [rank.saves for rank in ranks] == [True, False, False, False]
    ranks = [RankFacts(rank, 8, replicas=2) for rank in range(8)]  # four KV heads on eight ranks
    assert len({name(rank=rank) for rank in ranks}) == 4
    assert sum(rank.saves for rank in ranks) == 4


def test_layers_are_grouped_to_the_size_that_the_pool_likes() -> None:
    assert group_sizes([1000] * 32, 16_000) == [16, 16]
    assert group_sizes([100] * 4, 1 << 20) == [4]
    assert group_sizes([1 << 21] * 3, 1 << 20) == [1, 1, 1]
    for layers in range(1, 40):
        for aim in (100, 1000, 5000, 10**6):
            sizes = group_sizes([997] * layers, aim)
            assert sum(sizes) == layers
            assert min(sizes) > 0
    assert group_sizes([], 1000) == []


def test_seeds_are_told_apart_without_being_told() -> None:
    one, other = hashing_facts("sha256", "secret"), hashing_facts("sha256", "other")
    assert one != other
    assert b"secret" not in one
    assert hashing_facts("sha256_cbor", "secret") != one


# --- options and counts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"sokcet": "/x"}, "sokcet"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"ack": "never"}, "ack"),
        ({"saving_share": 2}, "saving_share"),
    ],
)
def test_options_that_are_not_understood_are_named(extra: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        parse_options(extra)


def test_the_socket_is_the_options_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCAST_SOCKET", raising=False)
    assert parse_options(None).agent_socket == "/run/kvcast/agent.sock"
    monkeypatch.setenv("KVCAST_SOCKET", "/e")
    assert parse_options({}).agent_socket == "/e"
    assert parse_options({"socket": "/o"}).agent_socket == "/o"


def test_counts_of_workers_add_up_and_keep_their_labels() -> None:
    one, other = Counters(), Counters()
    one.add("load_blocks", 3, tier="home")
    other.add("load_blocks", 4, tier="home")
    other.add("lookups")
    total = merged(one.take(), other.take())
    assert total == {"load_blocks|tier=home": 7, "lookups": 1}
    assert split("load_blocks|tier=home") == ("load_blocks", "home")
    assert one.take() == {}
    assert all(isinstance(text, str) for _, text in NAMES.values())
