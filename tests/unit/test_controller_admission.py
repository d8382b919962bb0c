"""Admission: value, choice, hysteresis, and the slots' rest between two holders.

Oracle: the formulas and rules of the modules' texts, on an invented clock; a state machine of
random admissions and evictions checks that no slot is lost or held twice. Cannot see: the switch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from home_reports import home_reports
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.controller.core import admission
from kvcast.controller.core.admission import (
    LEAST_FADE_READS,
    Choice,
    Contender,
    HeatMap,
    Holder,
    Room,
    ValueOptions,
    choose,
)
from kvcast.controller.core.ghosts import Rule
from kvcast.controller.core.residency import MAX_GENERATION, NoSlotsError, Residency
from kvcast.controller.core.reuse import COUNTS
from kvcast.protocol.messages.control import HotBlock
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES, SEGMENT_BYTES, BlockId

OPTIONS = ValueOptions(half_life_s=10.0, horizon_s=10.0, min_reads=0.9, margin=1.25, min_stay_s=5.0)


def block(number: int) -> BlockId:
    return BlockId(1, number.to_bytes(16, "big"))


def heat_with(reads: dict[int, float], now: float = 0.0, size: int = SEGMENT_BYTES) -> HeatMap:
    heat = HeatMap(OPTIONS)
    for number, count in reads.items():
        home_reports(heat, block(number), reads=count, size_bytes=size, now=now)
    return heat


def contender(number: int, size: int = SEGMENT_BYTES, pinned: bool = False) -> Contender:
    return Contender(block(number), size, digest=number, pinned=pinned)


def holder(number: int, *, pinned: bool = False, since: float = -100.0, slots: int = 1) -> Holder:
    return Holder(block(number), slots, pinned, since)


def chosen(
    contenders: list[Contender],
    holders: list[Holder],
    *,
    heat: HeatMap,
    free: int = 0,
    coming_free: int = 0,
    rooms: dict[int, Room] | None = None,
) -> Choice:
    return choose(
        *(contenders, holders),
        free=free,
        coming_free=coming_free,
        heat=heat,
        options=OPTIONS,
        now=0.0,
        rooms=rooms,
    )


# --- value ----------------------------------------------------------------------------------


class PlainHeat:
    """The formulas of the module's text, block by block; nothing is forgotten but on purpose."""

    def __init__(self) -> None:
        self.known: dict[BlockId, dict[str, float]] = {}

    def touch(self, name: BlockId, now: float) -> dict[str, float]:
        heat = self.known.setdefault(
            name,
            {"at": now, "switch": 0, "home": 0, "fan": 1, "depth": 0, "segments": 1, "size": 0},
        )
        decay = 0.5 ** ((now - heat["at"]) / OPTIONS.half_life_s)
        heat["switch"] *= decay
        heat["home"] *= decay
        heat["fan"] = 1 + (heat["fan"] - 1) * decay
        heat["at"] = now
        return heat

    def expected(self, name: BlockId, now: float) -> float:
        heat = self.touch(name, now)
        rate = max(heat["switch"], heat["home"]) * math.log(2) / OPTIONS.half_life_s
        return rate * OPTIONS.horizon_s / heat["segments"]

    def value(self, name: BlockId, now: float) -> float:
        heat = self.touch(name, now)
        bytes_a_read = heat["size"] / heat["segments"] if heat["size"] else SEGMENT_BYTES
        reads = self.expected(name, now) * heat["segments"]
        return reads * (1 + math.log2(heat["fan"]) / 2) * bytes_a_read / (heat["segments"] * 64)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["switch", "home", "served", "described"]),
        st.integers(0, 11),
        st.integers(1, 40),
        st.integers(1, 31),
        st.floats(0, 30),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, limit=st.integers(4, 12), count=st.integers(1, 8))
def test_heat_is_what_the_formulas_say(
    events: list[tuple[str, int, int, int, float]], limit: int, count: int
) -> None:
    heat, plain, now = HeatMap(OPTIONS, limit), PlainHeat(), 0.0
    for what, number, reads, fan_out, wait_s in events:
        now += wait_s
        name, size = block(number), SEGMENT_BYTES * (1 + number % 3) - number
        if name not in heat and len(heat) == limit:
            worst = sorted(plain.value(known, now) for known in plain.known)
        else:
            worst = []
        match what:
            case "switch":
                heat.seen_by_switch(name, segment=number % 3, reads=reads, fan_out=fan_out, now=now)
            case "home":
                home_reports(
                    heat, name, reads=reads, readers=fan_out, depth=number, size_bytes=size, now=now
                )
            case "served":
                heat.served(name, reads, now)
            case _:
                heat.described(name, size, now)
        if worst:
            gone = [known for known in plain.known if known not in heat]
            assert len(gone) == max(1, limit // 8), "an eighth is forgotten"
            for known in gone:
                assert plain.value(known, now) <= worst[len(gone) - 1] * (1 + 1e-9)
                del plain.known[known]
        was = plain.touch(name, now)
        match what:
            case "switch":
                was["switch"] += reads
                was["fan"] = max(was["fan"], fan_out)
                was["segments"] = max(was["segments"], number % 3 + 1)
            case "home":
                was |= {"size": size, "segments": -(-size // SEGMENT_BYTES)}
                was["home"] += reads
                was["fan"] = max(was["fan"], fan_out)
                was["depth"] = number or was["depth"]
            case "served":
                was["switch"] += reads
            case _:
                was |= {"size": size, "segments": -(-size // SEGMENT_BYTES)}
    looks = heat.look_at([*plain.known, block(99)], now)
    assert looks.pop(block(99)) == (0, 0, 0)
    for name, look in looks.items():
        assert look.value == pytest.approx(plain.value(name, now))
        assert look.expected_reads == pytest.approx(plain.expected(name, now))
        assert look.depth == plain.known[name]["depth"]
    excluded = sorted(plain.known)[:1]
    best = heat.best(count, now, without=excluded)
    worth = [
        plain.value(name, now)
        for name in plain.known
        if name not in excluded and plain.expected(name, now) >= OPTIONS.min_reads * (1 + 1e-9)
    ]
    assert [plain.value(name, now) for name in best] == pytest.approx(
        sorted(worth, reverse=True)[:count]
    )


def test_value_halves_with_the_half_life() -> None:
    heat = heat_with({1: 8})
    before = heat.value(block(1), 0.0)
    assert heat.value(block(1), 10.0) == pytest.approx(before / 2)


def test_counts_halve_after_as_many_reads_as_there_are_slots_but_not_at_once() -> None:
    options = replace(OPTIONS, half_life_s=100.0, least_half_life_s=2.0)

    def left_after(reads: float, seconds: float) -> float:
        """Of a block's value, when so many READs of another have come and so much time passed."""
        heat = HeatMap(options, slots=LEAST_FADE_READS)
        heat.seen_by_switch(block(1), segment=0, reads=8, fan_out=1, now=0.0)
        before = heat.value(block(1), 0.0)
        heat.served(block(2), reads, 0.0)
        return heat.value(block(1), seconds) / before

    assert left_after(0, 100) == pytest.approx(1 / 2), "time alone"
    assert left_after(64, 0) == 1, "whoever reports last knows no more"
    assert left_after(64, 1) == pytest.approx(2**-0.5), "no sooner than that"
    assert left_after(64, 10) == pytest.approx(2**-1.1)
    assert left_after(32, 10) == pytest.approx(2**-0.6)
    assert left_after(8e9, 10) == pytest.approx(2**-1.1), "a flood is no more than one half-life"


def test_counts_halve_by_what_homes_report_as_by_what_the_switch_serves() -> None:
    options = replace(OPTIONS, half_life_s=100.0, least_half_life_s=2.0)
    by_home, by_switch = (HeatMap(options, slots=LEAST_FADE_READS) for _ in range(2))
    for heat in (by_home, by_switch):
        heat.seen_by_switch(block(1), segment=0, reads=8, fan_out=1, now=0.0)
    report = {block(n): HotBlock(1, block(n).key, 16, 1, 0, SEGMENT_BYTES, 1) for n in (2, 3, 4)}
    by_home.seen_by_home(report, 0.0)
    by_switch.served(block(2), 48, 0.0)
    before, after = by_home.value(block(1), 0.0), by_home.value(block(1), 10.0)
    assert after == by_switch.value(block(1), 10.0)
    assert after == pytest.approx(before * 2**-0.85), "3/4 of a half-life for reads, 1/10 for time"


def test_value_is_bytes_saved_a_cell() -> None:
    heat = heat_with({1: 10})
    # 10 reads, half-life = horizon: 10·ln 2 expected; 64 KiB a read over 64 cells.
    assert heat.value(block(1), 0.0) == pytest.approx(10 * 0.6931 * 1024, rel=1e-3)


def test_a_block_of_many_segments_is_worth_less_a_cell_for_the_same_reads() -> None:
    one = heat_with({1: 16})
    four = heat_with({1: 16}, size=4 * SEGMENT_BYTES)
    assert four.value(block(1), 0.0) == pytest.approx(one.value(block(1), 0.0) / 4)


def test_many_readers_at_once_are_worth_more_than_as_many_reads_of_one() -> None:
    heat = HeatMap(OPTIONS)
    heat.seen_by_switch(block(1), segment=0, reads=8, fan_out=1, now=0.0)
    heat.seen_by_switch(block(2), segment=0, reads=8, fan_out=8, now=0.0)
    assert heat.value(block(2), 0.0) == pytest.approx(2.5 * heat.value(block(1), 0.0))


def test_the_two_sights_of_one_read_are_not_added() -> None:
    heat = heat_with({1: 8})
    before = heat.value(block(1), 0.0)
    heat.seen_by_switch(block(1), segment=0, reads=8, fan_out=1, now=0.0)
    assert heat.value(block(1), 0.0) == before


def test_an_unknown_block_is_worth_nothing() -> None:
    assert HeatMap(OPTIONS).value(block(1), 0.0) == 0.0


REPORTS = st.lists(
    st.dictionaries(
        st.integers(0, 20),
        st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 3), st.integers(1, 3)),
        max_size=20,
    ),
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(batches=REPORTS, learned_from=st.sampled_from([3, admission.REUSE_BLOCKS]))
def test_blocks_that_a_home_reports_together_count_as_if_reported_one_by_one(
    batches: list[dict[int, tuple[int, int, int, int]]], learned_from: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "REUSE_BLOCKS", learned_from)
        together, one_by_one = HeatMap(OPTIONS, slots=64), HeatMap(OPTIONS, slots=64)
        for now, batch in enumerate(batches):
            reports = {
                block(number): HotBlock(
                    1, block(number).key, reads, nodes, depth, size * SEGMENT_BYTES, 1
                )
                for number, (reads, nodes, depth, size) in batch.items()
            }
            together.seen_by_home(reports, float(now))
            for name, report in reports.items():
                one_by_one.seen_by_home({name: report}, float(now))
        names, now = [block(number) for number in range(21)], len(batches) + 1.0
        looks, others = together.look_at(names, now), one_by_one.look_at(names, now)
        chances, their_chances = together.chances(names, now), one_by_one.chances(names, now)
    for name in names:
        assert looks[name] == pytest.approx(others[name])
        assert chances[name] == pytest.approx(their_chances[name])


@settings(max_examples=100, deadline=None)
@given(batches=REPORTS, limit=st.integers(1, 24))
def test_a_report_of_more_blocks_than_are_remembered_leaves_what_was_reported_last(
    batches: list[dict[int, tuple[int, int, int, int]]], limit: int
) -> None:
    heat, seen = HeatMap(OPTIONS, limit), 0
    for batch in filter(None, batches):
        known = sum(block(number) in heat for number in batch)
        heat.seen_by_home(
            {block(n): HotBlock(1, block(n).key, 9, 1, 0, SEGMENT_BYTES, 1) for n in batch}, 0.0
        )
        assert len(heat) <= limit
        assert block(list(batch)[-1]) in heat
        seen += len(batch) - known
    assert heat.forgotten >= seen - len(heat)


def test_a_block_that_makes_room_for_others_of_its_report_is_there_all_the_same() -> None:
    heat = HeatMap(OPTIONS, limit=16)
    for number in range(16):
        home_reports(heat, block(number), reads=9 if number else 1, now=0.0)
    both = {block(n): HotBlock(1, block(n).key, 1, 1, 0, SEGMENT_BYTES, 1) for n in (0, 99)}
    heat.seen_by_home(both, 0.0)
    assert (len(heat), heat.forgotten) == (16, 2)
    assert block(0) in heat
    assert block(99) in heat


def test_what_is_forgotten_is_counted_where_there_is_room_for_some() -> None:
    heat = HeatMap(OPTIONS, limit=16)
    for number in range(17):
        home_reports(heat, block(number), reads=9, now=0.0)
    assert (len(heat), heat.forgotten) == (15, 2)
    heat.seen_by_home(
        {block(n): HotBlock(1, block(n).key, 9, 1, 0, SEGMENT_BYTES, 1) for n in (98, 99)}, 0.0
    )
    assert (len(heat), heat.forgotten) == (16, 3)


def test_a_later_report_takes_back_neither_readers_nor_what_is_before_a_block() -> None:
    heat = HeatMap(OPTIONS)
    home_reports(heat, block(1), reads=8, readers=8, depth=3, now=0.0)
    before = heat.look_at([block(1)], 0.0)[block(1)]
    home_reports(heat, block(1), reads=0, readers=1, depth=0, now=0.0)
    assert heat.look_at([block(1)], 0.0)[block(1)] == before
    home_reports(heat, block(1), reads=0, readers=1, depth=5, now=0.0)
    assert heat.look_at([block(1)], 0.0)[block(1)].depth == 5


def test_no_home_reports_a_block_that_is_larger_than_any() -> None:
    largest, larger = heat_with({1: 9}, size=MAX_BLOCK_BYTES), heat_with({1: 9}, size=1 << 63)
    assert larger.segments(block(1)) == largest.segments(block(1))
    assert larger.value(block(1), 0.0) == largest.value(block(1), 0.0)


def test_how_often_a_block_was_read_is_known_also_of_those_of_which_nothing_is_learned() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "REUSE_BLOCKS", 1)
        heat = HeatMap(OPTIONS)
        for now in range(20):
            home_reports(heat, block(0), reads=1, now=2.0**now)
        for number, times in enumerate((1, 2, 2, COUNTS, COUNTS + 4), 1):
            for turn in range(times):
                if turn % 2:
                    heat.served(block(number), 1, 2e6)
                else:
                    home_reports(heat, block(number), reads=1, now=2e6)
        chances = list(heat.chances([block(number) for number in range(1, 6)], 2e6 + 1).values())
    assert chances[0] != chances[1] == chances[2] != chances[3] == chances[4]


def test_the_memory_of_heat_is_bounded_and_forgets_the_cold() -> None:
    heat = HeatMap(OPTIONS, limit=16)
    heat.seen_by_switch(block(0), segment=0, reads=1000, fan_out=4, now=0.0)
    for number in range(1, 200):
        heat.seen_by_switch(block(number), segment=0, reads=1, fan_out=1, now=0.0)
    assert len(heat) <= 16
    assert heat.forgotten >= 184
    assert block(0) in heat


def test_what_gets_a_forgotten_blocks_place_inherits_nothing() -> None:
    heat, fresh, other = heat_with({}), heat_with({}), BlockId(2, bytes(16))
    heat.seen_by_switch(block(1), segment=6, reads=9.0, fan_out=5, now=0.0)
    home_reports(heat, block(1), reads=1, readers=3, depth=4, size_bytes=7 * SEGMENT_BYTES, now=0.0)
    heat.forget({1})
    for each in (heat, fresh):
        each.seen_by_switch(other, segment=0, reads=1.0, fan_out=1, now=1.0)
    assert heat.look_at([other], 1.0) == fresh.look_at([other], 1.0)
    for each in (heat, fresh):
        home_reports(each, other, reads=1, now=2.0)
    assert heat.chances([other], 3.0) == fresh.chances([other], 3.0)


def test_a_forgotten_block_is_among_the_best_no_more_nor_in_the_others_way() -> None:
    heat, other = heat_with({1: 9.0}, now=1.0), BlockId(2, bytes(16))
    home_reports(heat, other, reads=8, now=0.0)
    heat.forget({1})
    for heat.rule in Rule:
        assert heat.best(1, 2.0, without=()) == [other]


def test_the_shallower_of_equal_blocks_comes_first() -> None:
    heat = HeatMap(OPTIONS)
    for number, depth in ((1, 5), (2, 1), (3, 3)):
        home_reports(heat, block(number), reads=50, depth=depth, now=0.0)
    assert heat.best(3, 0.0, without=()) == [block(2), block(3), block(1)]


def test_only_what_is_worth_it_is_among_the_best() -> None:
    heat = heat_with({1: 1, 2: 100, 3: 50})
    assert heat.best(10, 0.0, without=()) == [block(2), block(3)]
    assert heat.best(10, 0.0, without=[block(2)]) == [block(3)]


# --- choice ---------------------------------------------------------------------------------


def test_free_slots_are_filled_by_value() -> None:
    heat = heat_with({1: 10, 2: 30, 3: 20})
    choice = chosen([contender(1), contender(2), contender(3)], [], free=2, heat=heat)
    assert [c.block for c, _ in choice.admit] == [block(2), block(3)]
    assert [c.block for c, _ in choice.refused] == [block(1)]


def test_a_block_enters_whole_or_not_at_all() -> None:
    heat = heat_with({1: 100}, size=3 * SEGMENT_BYTES)
    choice = chosen([contender(1, size=3 * SEGMENT_BYTES)], [], free=2, heat=heat)
    assert not choice.admit
    assert "needs 3 slots, 2 can be had" in choice.refused[0][1]


@pytest.mark.parametrize(("reads", "displaces"), [(10, False), (12, False), (13, True), (40, True)])
def test_a_challenger_must_beat_its_victim_by_the_margin(reads: float, displaces: bool) -> None:
    heat = heat_with({1: 10, 2: reads})
    choice = chosen([contender(2)], [holder(1)], heat=heat)
    assert [b for b, _ in choice.evict] == ([block(1)] if displaces else [])
    assert not choice.admit, "the victim's slot must drain first"


def test_a_read_or_two_are_worth_a_free_slot_but_nobody_elses() -> None:
    heat = heat_with({1: 0.1, 2: 2}, size=16 * 1024)  # 0.07 and 1.4 reads expected
    for free, admitted in ((1, [block(2)]), (0, [])):
        choice = chosen([contender(2, size=16 * 1024)], [holder(1)], free=free, heat=heat)
        assert [c.block for c, _ in choice.admit] == admitted
        assert not choice.evict
    assert choice.refused[0][1] == "1.4 reads expected, too few to displace others"
    assert heat.best(2, 0.0, without=()) == [block(2)]


def test_a_large_block_that_was_read_five_times_displaces_nobody_though_it_took_many_reads() -> (
    None
):
    size = 8 * SEGMENT_BYTES
    holders = [holder(number) for number in range(8)]
    little = dict.fromkeys(range(8), 0.1)
    heat = heat_with({9: 8 * 5, **little}, size=size)
    choice = chosen([contender(9, size)], holders, heat=heat)
    assert not choice.evict
    assert choice.refused[0][1] == "3.5 reads expected, too few to displace others"
    heat = heat_with({9: 8 * 6, **little}, size=size)
    choice = chosen([contender(9, size)], holders, heat=heat)
    assert len(choice.evict) == 8, "it was read six times"


def test_two_blocks_of_about_one_value_do_not_take_turns() -> None:
    heat = heat_with({1: 10, 2: 11})
    for inside, outside in ((1, 2), (2, 1)):
        choice = chosen([contender(outside)], [holder(inside)], heat=heat)
        assert not choice.evict


def test_a_new_resident_is_safe_for_a_while() -> None:
    heat = heat_with({1: 1, 2: 100})
    for age, displaced in ((4.0, False), (5.0, True)):
        choice = chosen([contender(2)], [holder(1, since=-age)], heat=heat)
        assert bool(choice.evict) is displaced


def test_slots_that_come_free_anyway_are_not_evicted_for_twice() -> None:
    heat = heat_with({1: 1, 2: 100})
    choice = chosen([contender(2)], [holder(1)], coming_free=1, heat=heat)
    assert not choice.evict
    assert choice.refused[0][1] == "waits for slots to drain"


def test_pinned_blocks_are_never_evicted_and_displace_any_other() -> None:
    heat = heat_with({1: 1000, 2: 1000})
    choice = chosen(
        [contender(3, pinned=True)], [holder(1, pinned=True), holder(2, since=0.0)], heat=heat
    )
    assert [b for b, _ in choice.evict] == [block(2)]
    choice = chosen([contender(3, pinned=True)], [holder(1, pinned=True)], heat=heat)
    assert not choice.evict
    assert "0 can be had" in choice.refused[0][1]


# --- slots ----------------------------------------------------------------------------------


def residency(slots: int = 4) -> Residency:
    return Residency(slots, first_generation=100, drain_s=0.2)


def test_a_slot_is_not_reused_before_its_entry_is_gone_and_a_recirculation_has_passed() -> None:
    slots = residency(1)
    slots.admit(block(1), digest=1, size_bytes=10, pinned=False, now=0.0)
    slots.evict(block(1))
    slots.advance(100.0)
    assert slots.free == 0, "the entry is not known to be deleted"
    assert slots.waiting_for_deletion() == {0}
    slots.deleted({0}, 100.0)
    slots.advance(100.1)
    assert slots.free == 0
    with pytest.raises(NoSlotsError):
        slots.admit(block(2), digest=1, size_bytes=10, pinned=False, now=100.1)
    assert slots.next_deadline() == pytest.approx(100.2)
    slots.advance(100.2)
    resident = slots.admit(block(2), digest=1, size_bytes=10, pinned=False, now=100.2)
    assert resident.slots == (0,)
    assert resident.generation == 101


def test_chunk_masks_name_the_chunks_that_exist() -> None:
    slots = residency()
    resident = slots.admit(
        block(1), digest=1, size_bytes=SEGMENT_BYTES + 2049, pinned=False, now=0.0
    )
    assert len(resident.slots) == 2
    assert resident.chunk_mask(0) == 2**64 - 1
    assert resident.chunk_mask(1) == 0b111


def test_slots_with_strange_entries_rest_before_they_are_used() -> None:
    slots = residency()
    slots.admit(block(1), digest=1, size_bytes=10, pinned=False, now=0.0)
    slots.foreign({0: 1, 2: 9, 77: 9})
    assert slots.taken() == {1: 1, 9: 1}
    assert slots.waiting_for_deletion() == {2}
    assert slots.free == 2
    slots.check()
    slots.deleted({2}, 10.0)
    slots.foreign({2: 8})
    assert slots.waiting_for_deletion() == {2}, "another has been there meanwhile"
    assert slots.taken() == {1: 1, 8: 1}


def test_a_restart_keeps_residents_slots_and_generations() -> None:
    before = residency()
    before.admit(block(1), digest=7, size_bytes=2 * SEGMENT_BYTES, pinned=True, now=0.0)
    before.admit(block(2), digest=8, size_bytes=10, pinned=False, now=0.0)
    after = residency()
    assert after.restore(before.saved(), 50.0) == 0
    assert after.saved() == before.saved()
    after.check()


@pytest.mark.parametrize("first_generation", [1, 2**31])
def test_a_slot_gets_no_generation_after_a_restart_that_a_block_had_which_is_gone(
    first_generation: int,
) -> None:
    before = residency()
    for number in (1, 2, 3):
        before.admit(block(number), digest=7, size_bytes=10, pinned=False, now=0.0)
    gone = before.evict(block(3))
    after = Residency(4, first_generation=first_generation, drain_s=0.2)
    assert after.restore(before.saved(), 50.0) == 0
    again = after.admit(block(4), digest=8, size_bytes=10, pinned=False, now=50.0)
    assert again.slots == gone.slots, "what lies there is still marked as that block's"
    assert again.generation not in {gone.generation, *(s.generation for s in before.saved())}


def test_after_the_last_generation_comes_the_first() -> None:
    slots = Residency(3, first_generation=MAX_GENERATION - 1, drain_s=0.2)
    given = [
        slots.admit(block(number), digest=7, size_bytes=10, pinned=False, now=0.0).generation
        for number in (1, 2, 3)
    ]
    assert given == [MAX_GENERATION - 1, MAX_GENERATION, 1]


def test_a_saved_resident_that_does_not_fit_is_dropped() -> None:
    before = residency(8)
    for number in range(8):
        before.admit(block(number), digest=7, size_bytes=10, pinned=False, now=0.0)
    after = residency(4)
    assert after.restore(before.saved(), 0.0) == 4
    after.check()


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["admit", "evict", "deleted", "wait"]), st.integers(0, 9)),
        max_size=40,
    )
)
def test_no_slot_is_ever_lost_or_held_twice(steps: list[tuple[str, int]]) -> None:
    slots, now, generations = residency(6), 0.0, []
    for verb, number in steps:
        match verb:
            case "admit" if block(number) not in slots.residents:
                size = (number % 3 + 1) * SEGMENT_BYTES
                try:
                    resident = slots.admit(
                        block(number), digest=1, size_bytes=size, pinned=False, now=now
                    )
                except NoSlotsError:
                    assert slots.free < number % 3 + 1
                else:
                    generations.append(resident.generation)
            case "evict" if block(number) in slots.residents:
                slots.evict(block(number))
            case "deleted":
                slots.deleted(slots.waiting_for_deletion(), now)
            case "wait":
                now += 0.15
                slots.advance(now)
        slots.check()
    assert generations == sorted(set(generations))
