"""Loading against computing: how much of a chain is loaded, by what both have taken.

Oracle: times worked out by hand from the formula in the module's text, on plain numbers. Cannot
see: engines, sockets, clocks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import pytest
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.loads import LoadTable
from kvcast.hostagent.connectors.planner import Load, Planner, PlannerOptions
from kvcast.hostagent.connectors.weighing import (
    FIRST_BLOCKS,
    PROBE_BLOCKS,
    PROBE_MOST_S,
    PROBE_S,
    TELLING_TOKENS,
    WINDOW_FIRST,
    WINDOW_LEAST,
    WINDOW_MOST,
    Loading,
    Meter,
    Pace,
    Steps,
    Weighed,
    Weighing,
    Window,
)

TOKENS = 16
"""Of a block."""
LONG_S = 1000.0
"""A deadline that plays no part."""


def known(load_block_s: float, compute_block_s: float, *, whole: bool = False) -> Weighing:
    """A hundred blocks were seen to take so long, each way."""
    weighing = Weighing(TOKENS, whole=whole)
    weighing.heard(Pace(100, 100 * load_block_s))
    weighing.computed(100 * TOKENS, 100 * compute_block_s)
    return weighing


def take(weighing: Weighing, blocks: int, *, wait: int = 0, busy: int = 0, now: float = 0.0) -> int:
    """Blocks of so many that are loaded, with so many blocks to wait for or compute before."""
    return weighing.take(now, blocks, wait, busy * TOKENS, LONG_S).blocks


# --- how much is loaded ---------------------------------------------------------------------------


def test_before_anything_is_known_all_is_loaded_and_little_is_fetched_ahead() -> None:
    weighing = Weighing(TOKENS)
    assert weighing.take(0.0, 500, 0, 0, LONG_S).why == "unmeasured"
    assert take(weighing, 500) == 500
    assert weighing.ahead(500, 0, 0) == FIRST_BLOCKS
    assert weighing.ahead(500, FIRST_BLOCKS - 1, 0) == 1
    assert weighing.ahead(500, 40, 0) == 0
    weighing.computed(1000, 1.0)
    assert take(weighing, 500) == 500


def test_what_comes_sooner_than_it_is_computed_is_loaded_and_fetched_ahead() -> None:
    weighing = known(0.01, 0.1)
    assert take(weighing, 50) == 50
    assert weighing.take(0.0, 50, 0, 0, LONG_S).why == "sooner"
    assert weighing.ahead(50, 0, 0) == 50


def test_what_comes_later_than_it_is_computed_is_not() -> None:
    weighing = known(0.2, 0.1)
    verdict = weighing.take(0.0, 50, 0, 0, LONG_S)
    assert (verdict.blocks, verdict.why) == (0, "slower")
    assert weighing.ahead(50, 0, 0) == 0


def test_a_request_that_waits_for_the_engine_loads_what_comes_meanwhile() -> None:
    weighing = known(0.2, 0.1)
    # The engine computes 60 blocks for others first: 6 s, in which 30 of 50 come.
    verdict = weighing.take(0.0, 50, 0, 60 * TOKENS, LONG_S)
    assert (verdict.blocks, verdict.why) == (30, "part")
    assert take(weighing, 50, wait=10, busy=60) == 20  # behind ten that others load
    assert take(weighing, 50, busy=200) == 50


def test_a_request_behind_many_others_on_the_link_is_computed() -> None:
    weighing = known(0.01, 0.1)
    assert take(weighing, 50, wait=300) == 50  # 3.5 s against 5 s
    assert take(weighing, 50, wait=1000) == 0  # 10.5 s against 5 s


def test_requests_that_come_at_once_are_shared_out_between_link_and_engine() -> None:
    """Eight prompts of eight blocks, over a link that takes a little longer for each than the
    engine: done when both are, and in less time than the engine alone would take."""
    weighing = known(0.105, 0.08)
    loaded = computed = 0
    for _ in range(8):
        blocks = take(weighing, 8, wait=loaded, busy=computed)
        loaded += blocks
        computed += 8 - blocks
    assert loaded > 16
    alone_s = 64 * 0.08
    assert max(loaded * 0.105, computed * 0.08) < 0.7 * alone_s


def test_loading_is_left_when_it_is_slower_and_taken_up_again_when_it_is_much_sooner() -> None:
    weighing = known(0.099, 0.1)
    assert take(weighing, 50) == 50
    slower = known(0.101, 0.1)
    assert take(slower, 50) == 0
    slower = known(0.2, 0.1)
    assert take(slower, 50) == 0
    slower.heard(Pace(100, 9.5))  # rare observations count as much as all before them
    slower.heard(Pace(100, 9.5))
    slower.heard(Pace(100, 9.5))
    assert 0.09 < slower.load_block_s < 0.11
    assert take(slower, 50) == 0
    slower.heard(Pace(100, 1.0))
    slower.heard(Pace(100, 1.0))
    assert take(slower, 50) == 50


def test_the_first_block_is_waited_for_beside_what_each_takes() -> None:
    weighing = known(0.01, 0.1)
    weighing.heard(Pace(starts=2, start_s=4.0))
    assert take(weighing, 10) == 0  # 2.1 s against 1 s
    assert take(weighing, 100) == 100  # 3 s against 10 s


def test_no_more_is_begun_than_comes_before_the_deadline() -> None:
    weighing = known(0.01, 0.1)
    verdict = weighing.take(0.0, 500, 50, 0, 2.0)
    assert (verdict.blocks, verdict.why) == (150, "deadline")
    assert weighing.take(0.0, 500, 500, 0, 2.0).blocks == 0
    assert known(0.01, 0.1, whole=True).take(0.0, 500, 50, 0, 2.0).blocks == 0


def test_an_engine_that_needs_whole_chains_gets_all_or_nothing() -> None:
    weighing = known(0.2, 0.1, whole=True)
    assert take(weighing, 50, busy=40) == 0
    assert take(weighing, 50, busy=200) == 50


def test_loads_that_fail_count_what_they_cost() -> None:
    weighing = known(0.06, 0.1)
    assert take(weighing, 50) == 50
    for _ in range(20):
        weighing.ended(50, 50)
        weighing.ended(50, 0)
    assert weighing.came_share == pytest.approx(0.5, abs=0.2)
    verdict = weighing.take(0.0, 50, 0, 0, LONG_S)
    assert (verdict.blocks, verdict.why) == (0, "failing")
    fast = known(0.01, 0.1)
    for _ in range(20):
        fast.ended(50, 50)
        fast.ended(50, 0)
    assert take(fast, 50) == 50  # half of them is worth it


# --- probes ---------------------------------------------------------------------------------------


def test_now_and_then_a_few_blocks_are_loaded_ever_more_seldom() -> None:
    weighing = known(0.2, 0.1)
    probes = []
    for second in range(1, 600):
        blocks = take(weighing, 50, now=float(second))
        if blocks:
            assert blocks == PROBE_BLOCKS
            probes.append(second)
            weighing.heard(Pace(PROBE_BLOCKS - 1, 0.2 * (PROBE_BLOCKS - 1)))
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert probes[0] == pytest.approx(1 + PROBE_S, abs=1)
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(PROBE_MOST_S, abs=1)


def test_a_pool_that_became_fast_is_noticed_by_a_few_probes() -> None:
    weighing = known(0.2, 0.1)
    probes = 0
    for second in range(1, 200):
        blocks = take(weighing, 50, now=float(second))
        if blocks == 50:
            break
        if blocks:
            probes += 1
            weighing.heard(Pace(blocks - 1, 0.001 * (blocks - 1)))
    assert blocks == 50
    assert probes <= 3


def test_nobody_probes_while_others_load() -> None:
    weighing = known(0.2, 0.1)
    assert take(weighing, 50, now=0.0) == 0
    assert take(weighing, 50, now=500.0, wait=3) == 0
    assert take(weighing, 50, now=500.0) == PROBE_BLOCKS


# --- loads under way ------------------------------------------------------------------------------


def test_a_load_that_turns_out_slow_is_cut_once_it_was_tried() -> None:
    weighing = Weighing(TOKENS)
    weighing.computed(100 * TOKENS, 10.0)  # 0.1 s a block
    load = Loading(1, 50, 48, 0.0)
    assert weighing.cut(2.0, [load], 0) == {}  # how slow is not known
    weighing.heard(Pace(2, 0.6))
    assert weighing.cut(1.0, [load], 0) == {}  # a quarter of 5 s is not over
    assert weighing.cut(1.3, [load], 0) == {1: 0}
    # What comes while others are computed is kept.
    assert weighing.cut(1.3, [load], 60 * TOKENS) == {1: 20}
    assert weighing.cut(1.3, [Loading(1, 50, 3, 0.0)], 30 * TOKENS) == {}


def test_a_load_that_is_of_no_use_in_part_is_cut_only_where_all_of_it_is_computed_sooner() -> None:
    for weighing in (Weighing(TOKENS, keeps=False), Weighing(TOKENS, whole=True)):
        weighing.computed(100 * TOKENS, 10.0)  # 0.1 s a block
        weighing.heard(Pace(2, 0.6))
        # 20 more blocks take 6 s, and 2 s to compute: but with the 30 that came, 5 s.
        assert weighing.cut(6.0, [Loading(1, 50, 20, 0.0)], 0) == {1: 0}
        assert weighing.cut(6.0, [Loading(1, 50, 18, 0.0)], 0) == {}
        # What would come while others are computed is not kept.
        assert weighing.cut(1.3, [Loading(1, 50, 48, 0.0)], 60 * TOKENS) == {1: 0}


def test_an_engine_that_uses_no_part_of_a_load_is_taken_at_its_word() -> None:
    weighing = Weighing(TOKENS, keeps=False)
    weighing.computed(100 * TOKENS, 10.0)
    scheduler = Scheduler(weighing, keeps=False)
    planner, hashes = scheduler.planner, chain("a", 40)
    scheduler.ask("r", hashes)
    load = scheduler.load("r", hashes)
    planner.paced(Pace(9, 9.0))
    planner.progressed("r", load.number, 2)
    planner.review(10.0, 0)
    assert list(planner.out.cuts) == [(load.number, 0)]
    planner.loaded(11.0, "r", load.number, 0, hashes, "slower")
    planner.paced(Pace(9, 0.009))
    planner.paced(Pace(400, 0.4))
    others = chain("b", 40)
    scheduler.ask("s", others, now=12.0)
    load = scheduler.load("s", others)
    planner.out.weighed = Weighed()
    planner.loaded(13.0, "s", load.number, 30, others, "deadline")
    assert planner.out.weighed == Weighed(computed=1)
    assert weighing.came_share == 0.0


def test_of_several_loads_the_last_are_cut_and_only_so_many() -> None:
    weighing = known(0.105, 0.08)
    loads = [Loading(number, 8, 8, 0.0) for number in range(1, 9)]
    cuts = weighing.cut(1.0, loads, 0)
    assert cuts
    assert list(cuts) == sorted(cuts, reverse=True)
    computed = sum(8 - kept for kept in cuts.values())
    assert max((64 - computed) * 0.105, computed * 0.08) < 64 * 0.08
    assert len(cuts) < 8


def test_a_link_that_falls_silent_is_given_up() -> None:
    weighing = known(0.01, 0.1)
    load = Loading(1, 50, 40, 0.0)
    weighing.heard(Pace(silent_s=0.5))
    assert weighing.cut(2.0, [load], 0) == {}
    weighing.heard(Pace(silent_s=60.0))
    assert weighing.cut(60.0, [load], 0) == {1: 0}


def test_what_should_have_come_long_ago_is_computed_when_the_engine_has_time() -> None:
    """As where blocks come damaged: they are asked for again, in silence."""
    weighing = known(0.09, 0.1)
    weighing.heard(Pace(starts=1, start_s=0.2))
    load = Loading(1, 8, 8, 0.0)
    weighing.heard(Pace(silent_s=0.25))
    assert weighing.cut(0.25, [load], 0) == {}
    weighing.heard(Pace(silent_s=0.8))
    assert weighing.cut(0.8, [load], 16 * TOKENS) == {}
    assert weighing.cut(0.8, [load], 0) == {1: 0}
    # It has been silent since before this load began.
    assert weighing.cut(0.8, [Loading(1, 8, 8, 0.55)], 0) == {}


def test_a_probe_is_given_time_to_tell() -> None:
    weighing = known(0.2, 0.1)
    assert weighing.cut(0.7, [Loading(1, 4, 4, 0.0)], 0) == {1: 0}
    assert weighing.cut(0.7, [Loading(1, 4, 4, 0.0, probe=True)], 0) == {}
    assert weighing.cut(0.9, [Loading(1, 4, 4, 0.0, probe=True)], 0) == {1: 0}


# --- what is measured -----------------------------------------------------------------------------


def test_the_pace_of_loads_is_that_of_what_came_from_elsewhere() -> None:
    meter = Meter()
    assert meter.take(0.0) is None
    meter.came(0.0, 1, near=False)  # of no load
    meter.opened(1.0)
    meter.came(1.5, 1, near=False)
    meter.came(1.6, 1, near=False)
    meter.opened(1.6)
    meter.came(1.7, 1, near=True)
    meter.came(2.0, 0.5, near=False)
    seen = meter.take(2.5)
    assert seen is not None
    assert (seen.starts, seen.start_s, seen.silent_s) == (1, 0.5, 0.5)
    assert (seen.blocks, seen.seconds) == (1.5, pytest.approx(0.4))
    meter.closed()
    meter.closed()
    assert meter.take(9.0) is None
    meter.opened(10.0)  # what passed while nobody loaded does not count
    meter.came(10.1, 1, near=False)
    seen = meter.take(10.1)
    assert seen is not None
    assert seen.start_s == pytest.approx(0.1)


def test_what_workers_saw_adds_up_and_the_longest_silence_counts() -> None:
    assert Pace(1, 2.0, 3, 4.0, 5.0) + Pace(1, 1.0, 1, 1.0, 7.0) == Pace(2, 3.0, 4, 5.0, 7.0)


def test_a_step_that_computes_prompts_tells_what_they_take() -> None:
    steps = Steps(1)
    assert steps.began(0.0, 512, 520) is None
    assert steps.ended(2.0) == (512, 2.0)
    assert steps.ended(9.0) is None  # nothing was under way
    assert steps.began(10.0, 512, 512) is None
    assert steps.began(11.0, 512, 512) == (512, 1.0)
    assert steps.began(12.0, TELLING_TOKENS - 1, TELLING_TOKENS) == (512, 1.0)
    assert steps.began(13.0, 512, 2000) is None  # the one before had few
    assert steps.began(14.0, 512, 512) is None  # most of that one's were no prompts'
    steps.rests()
    assert steps.began(99.0, 512, 512) is None


def test_steps_that_are_scheduled_ahead_are_timed_from_the_end_of_the_one_before() -> None:
    steps = Steps(2)
    assert not steps.single
    assert steps.began(0.0, 100, 100) is None
    assert steps.began(0.01, 200, 200) is None
    assert steps.began(1.01, 300, 300) == (100, pytest.approx(1.0))
    assert steps.began(3.01, 400, 400) == (200, pytest.approx(2.0))


def test_on_a_slow_link_little_is_asked_for_at_once() -> None:
    window = Window()
    assert window.parts == WINDOW_FIRST
    for _ in range(9):
        window.came(window.parts // 2, 2.0)
    assert window.parts == WINDOW_LEAST
    window.came(2, 0.2)
    assert window.parts == WINDOW_LEAST  # neither fast nor slow
    window.came(2, 0.01)
    assert window.parts == 2 * WINDOW_LEAST
    window.came(1, 0.01)  # so few parts say little
    assert window.parts == 2 * WINDOW_LEAST
    for _ in range(99):
        window.came(window.parts, 0.01)
    assert window.parts == WINDOW_MOST


# --- in the planner -------------------------------------------------------------------------------


def chain(name: str, blocks: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {at}".encode()).digest() for at in range(blocks)]


class Scheduler:
    """A planner that weighs, and what an adapter does with it."""

    def __init__(self, weighing: Weighing, **options: object) -> None:
        self.weighing = weighing
        self.counters = Counters()
        merged: dict[str, object] = {"deadline_s": 60.0, "workers": 1} | options
        self.planner = Planner(PlannerOptions(**merged), self.counters, weighing)  # type: ignore[arg-type]

    def ask(self, name: str, hashes: Sequence[bytes], *, near: int = 0, now: float = 0.0) -> int:
        """A request arrives, whose chain the pool holds; until which block it is fetched ahead."""
        self.planner.arrived(now, name, hashes, near=near)
        lookup = self.planner.out.lookups.pop()
        self.planner.answered(now, name, lookup.number, len(hashes))
        assert lookup.prefetch_until is not None
        return lookup.prefetch_until

    def load(self, name: str, hashes: Sequence[bytes], now: float = 0.0) -> Load:
        count = self.planner.matched(now, name, hashes, 0, len(hashes))
        assert count
        block_ids = [list(range(len(hashes)))]
        self.planner.allocated(now, name, hashes, count, block_ids)
        return self.planner.out.loads.pop()

    def counts(self) -> dict[str, float]:
        return self.counters.take()


def test_what_is_computed_sooner_is_neither_fetched_nor_loaded_nor_saved_again() -> None:
    scheduler = Scheduler(known(0.2, 0.1))
    hashes = chain("a", 20)
    assert scheduler.ask("r", hashes) == 0
    assert scheduler.planner.matched(0.1, "r", hashes, 0, 20) == 0
    counts = scheduler.counts()
    assert counts["weighed|verdict=slower"] == 1
    assert counts["miss_blocks|reason=slower"] == 20
    assert scheduler.planner.computed(1.0, "r", hashes, 20, [list(range(20))]) is None


def test_what_this_nodes_memory_holds_is_loaded_however_slow_the_link_is() -> None:
    scheduler = Scheduler(known(0.2, 0.1))
    hashes = chain("a", 20)
    assert scheduler.ask("r", hashes, near=12) == 12
    assert scheduler.planner.matched(0.1, "r", hashes, 0, 20, near=12) == 12
    scheduler.ask("s", hashes, near=20)
    assert scheduler.planner.matched(0.1, "s", hashes, 0, 20, near=20) == 20


def test_a_request_waits_behind_what_others_load_or_have_fetched_ahead() -> None:
    scheduler = Scheduler(known(0.06, 0.1))
    one, two, three = chain("1", 40), chain("2", 40), chain("3", 40)
    assert scheduler.ask("1", one) == 40
    assert scheduler.ask("2", two) == 0  # 4.8 s against 4 s
    load = scheduler.load("1", one)
    scheduler.planner.progressed("1", load.number, 35)
    assert scheduler.ask("3", three) == 40
    scheduler.planner.finished("1")
    scheduler.planner.finished("3")
    assert scheduler.planner.matched(0.1, "2", two, 0, 40) == 40


def test_a_load_that_is_cut_is_no_failure_and_its_rest_is_computed() -> None:
    weighing = Weighing(TOKENS)
    weighing.computed(100 * TOKENS, 10.0)
    scheduler = Scheduler(weighing)
    planner, hashes = scheduler.planner, chain("a", 40)
    scheduler.ask("r", hashes)
    load = scheduler.load("r", hashes)
    planner.paced(Pace(9, 9.0))
    planner.progressed("r", load.number, 10)
    planner.review(10.0, 0)
    assert list(planner.out.cuts) == [(load.number, 10)]
    planner.review(11.0, 0)
    assert len(planner.out.cuts) == 1
    assert planner.has_from_pool("r") == 10
    planner.loaded(11.0, "r", load.number, 10, hashes, "slower")
    assert planner.matched(11.1, "r", hashes, 10, 40) == 0
    counts = scheduler.counts()
    assert counts["weighed|verdict=cut"] == 1
    assert not any(name.startswith("failed_loads") for name in counts)
    assert weighing.came_share == 1.0
    scheduler.ask("s", hashes, now=12.0)  # nor does it keep others from these blocks
    planner.paced(Pace(9, 0.009))
    planner.paced(Pace(9, 0.009))
    planner.paced(Pace(200, 0.2))
    assert planner.matched(12.1, "s", hashes, 0, 40) == 40


def test_a_worker_ends_a_cut_load_once_what_is_still_wanted_is_there() -> None:
    table = LoadTable()
    opened = table.begin(Load("r", 7, 0, tuple(chain("a", 10)), (tuple(range(10)),), 60.0), 2, 0.0)
    for part in range(6):
        opened.write(part, lambda: None)
    assert table.progress() == {"r": (7, 3)}
    table.cut(7, 4)
    assert table.take(1.0) == []
    assert opened.write(6, lambda: None)
    assert opened.write(7, lambda: None)
    assert opened.complete
    assert not opened.write(8, lambda: None)
    table.end(opened, "")  # as who brings the parts does then
    [ended] = table.take(1.0)
    assert (ended.came, ended.reason) == (4, "slower")
    assert ended.bad_block_ids == {4, 5, 6, 7, 8, 9}
    other = table.begin(Load("s", 8, 0, tuple(chain("b", 4)), (tuple(range(4)),), 60.0), 1, 0.0)
    other.write(0, lambda: None)
    table.cut(8, 1)
    [ended] = table.take(1.0)
    assert (ended.came, ended.reason) == (1, "slower")
    table.cut(8, 0)  # of a load that is over
    table.cut(99, 0)  # of none
    assert table.take(1.0) == []
    assert table.meter.take(5.0) is None


# --- what became of prefixes ----------------------------------------------------------------------


def test_it_is_told_of_each_prefix_whether_all_of_it_was_loaded_or_a_part_or_nothing() -> None:
    scheduler = Scheduler(known(0.01, 0.1))
    planner = scheduler.planner
    for name, came in (("a", 20), ("b", 7), ("c", 0)):
        hashes = chain(name, 20)
        scheduler.ask(name, hashes)
        load = scheduler.load(name, hashes)
        assert planner.out.weighed == Weighed()
        planner.loaded(1.0, name, load.number, came, hashes, "" if came == 20 else "deadline")
        planner.loaded(1.0, name, load.number, came, hashes, "")  # nor is it told again
        assert planner.out.weighed == Weighed.of(20, came)
        planner.out.weighed = Weighed()
    counts = scheduler.counts()
    assert [counts[f"prefixes|outcome={what}"] for what in ("whole", "part", "computed")] == [1] * 3


def test_a_prefix_that_is_computed_or_cut_short_is_told_as_what_it_became() -> None:
    slower = Scheduler(known(0.2, 0.1))
    slower.ask("r", chain("r", 20))
    assert slower.planner.matched(0.1, "r", chain("r", 20), 0, 20) == 0
    assert slower.planner.out.weighed == Weighed(computed=1)
    slower.ask("s", chain("s", 20), near=12)
    count = slower.planner.matched(0.1, "s", chain("s", 20), 0, 20, near=12)
    assert count == 12
    slower.planner.allocated(0.1, "s", chain("s", 20), 12, [list(range(20))])
    number = slower.planner.out.loads.pop().number
    slower.planner.loaded(0.2, "s", number, 12, chain("s", 20), "")
    assert slower.planner.out.weighed == Weighed(part=1, computed=1)


def test_what_the_pool_did_not_hold_is_not_told_of() -> None:
    scheduler = Scheduler(known(0.01, 0.1))
    scheduler.planner.arrived(0.0, "r", chain("r", 20))
    lookup = scheduler.planner.out.lookups.pop()
    scheduler.planner.answered(0.0, "r", lookup.number, 0)
    assert scheduler.planner.matched(0.0, "r", chain("r", 20), 0, 20) == 0
    assert scheduler.planner.out.weighed == Weighed()


def test_paces_are_tokens_a_second_and_0_before_they_are_known() -> None:
    weighing = Weighing(TOKENS)
    assert weighing.paces == (0.0, 0.0)
    weighing.computed(100 * TOKENS, 10.0)
    assert weighing.paces == (0.0, pytest.approx(160.0))
    weighing.heard(Pace(100, 1.0))
    assert weighing.paces == (pytest.approx(1600.0), pytest.approx(160.0))
