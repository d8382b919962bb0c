"""Reuse: the chance of another read, beside a plain estimate, and who is displaced by it.

Oracle: Kaplan and Meier's estimator by its definition, block by block, and populations of which it
is known who comes back. Cannot see: whether a pool's blocks go on as they did.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from home_reports import home_reports
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.controller.core import admission, reuse
from kvcast.controller.core.admission import Contender, HeatMap, Holder, ValueOptions, choose
from kvcast.controller.core.ghosts import Rule
from kvcast.controller.core.reuse import COUNTS, TIMES, Reuse
from kvcast.protocol.messages.wire import SEGMENT_BYTES, BlockId

EDGES_S = [0.0, *(reuse.SHORTEST_S * 2.0**place for place in range(TIMES - 1))]
Blocks = list[tuple[int, float]]


def learned(ended: Blocks, waiting: Blocks) -> list[list[float]]:
    mine = Reuse()
    for class_, after_s in ended:
        mine.read_again(class_, after_s)
    classes = np.array([class_ for class_, _ in waiting], np.intp)
    found: list[list[float]] = mine.chances(classes, np.array([s for _, s in waiting])).tolist()
    return found


def plain(ended: Blocks, waiting: Blocks) -> list[list[float]]:
    """The same by the definition; a block that waits counts half for the time that it is in."""

    def place(seconds: float) -> int:
        return max(n for n, edge_s in enumerate(EDGES_S) if seconds >= edge_s)

    def shares(wanted: tuple[int, ...], before: list[float]) -> list[float]:
        found, share = [], reuse.PRIOR_SHARE
        for n in range(TIMES):
            again = sum(place(s) == n for c, s in ended if c in wanted)
            reached = sum(place(s) >= n for c, s in ended if c in wanted)
            reached += sum(place(s) > n for c, s in waiting if c in wanted)
            half = sum(place(s) == n for c, s in waiting if c in wanted) / 2
            prior = before[n] if before else share
            share = (again + reuse.PRIOR_BLOCKS * prior) / (reached + half + reuse.PRIOR_BLOCKS)
            found.append(share)
        return found

    all_ = shares(tuple(range(COUNTS)), [])
    chances = []
    for class_ in range(COUNTS):
        never, row = 1.0, []
        for share in reversed(shares((class_,), all_)):
            never *= 1 - share
            row.append(1 - never)
        chances.append(row[::-1])
    return chances


many = st.lists(st.tuples(st.integers(0, COUNTS - 1), st.floats(0.0, 1e7)), max_size=30)


@settings(max_examples=100, deadline=None)
@given(many, many)
def test_the_chance_of_another_read_is_kaplan_and_meiers(ended: Blocks, waiting: Blocks) -> None:
    for mine, theirs in zip(learned(ended, waiting), plain(ended, waiting), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)


def test_nothing_is_dead_before_enough_blocks_have_shown_it() -> None:
    assert min(learned([], [])[1][:-1]) > 0.7
    soon = [(1, 1.5)] * 500
    assert learned(soon, [])[1][9] > 0.7, "nobody has waited for 64 s"
    assert learned(soon, [(1, 5e6)] * 500)[1][9] < 0.2, "500 wait for months"


def test_the_past_fades_when_there_is_enough_of_a_present() -> None:
    mine, nobody = Reuse(), (np.array([], np.intp), np.array([]))
    for _ in range(reuse.MAX_ENDED):
        mine.read_again(1, 100.0)
    late = mine.chances(*nobody)[1]
    for _ in range(reuse.MAX_ENDED):
        mine.read_again(1, 1.0)
    assert mine._count < reuse.MAX_ENDED
    assert sum(map(sum, mine._ended)) == pytest.approx(mine._count)
    assert mine.chances(*nobody)[1][5] <= late[5]


def block(number: int) -> BlockId:
    return BlockId(1, number.to_bytes(16, "big"))


def read(heat: HeatMap, number: int, now: float, reads: float = 1.0) -> None:
    home_reports(heat, block(number), reads=reads, now=now)


def short_lived(blocks: int) -> HeatMap:
    """Blocks that come one a second, are read eight times in seven seconds, and never again."""
    heat = HeatMap(ValueOptions(), slots=8)
    for now in range(blocks):
        for number in range(max(0, now - 7), now + 1):
            read(heat, number, float(now))
    return heat


def displaced(heat: HeatMap, wanted: int, held: list[int], now: float) -> list[int]:
    choice = choose(
        [Contender(block(wanted), SEGMENT_BYTES, 1, pinned=False)],
        [Holder(block(number), 1, False, 0.0) for number in held],
        free=0,
        coming_free=0,
        heat=heat,
        options=ValueOptions(),
        now=now,
    )
    return [int.from_bytes(name.key, "big") for name, _ in choice.evict]


def test_a_block_read_once_displaces_one_that_is_hardly_read_again() -> None:
    heat = short_lived(300)
    read(heat, 1000, 300.0)
    looks = heat.look_at([block(1000)], 300.0)[block(1000)]
    assert looks.expected_reads < ValueOptions().displace_reads, "its count alone is not enough"
    assert displaced(heat, 1000, [299, 150, 298], 300.0) == [150]
    assert displaced(heat, 1000, [299, 298], 300.0) == [], "those are in the middle of their life"


def read_by_all(blocks: int, nodes: int) -> HeatMap:
    """Blocks that come one in ten seconds; each node reads each once, within a minute."""
    rng, heat = random.Random(1), HeatMap(ValueOptions(), slots=8)
    reads = sorted(
        (10.0 * number + order, number)
        for number in range(blocks)
        for order in rng.sample(range(10 * nodes), nodes)
    )
    for now, number in reads:
        read(heat, number, now)
    return heat


def test_a_block_that_every_node_has_read_is_dead_however_hot_it_was() -> None:
    nodes = 6
    heat = read_by_all(400, nodes)
    now = 5000.0
    for order in range(nodes):
        read(heat, 1001, now - 0.5 * (nodes - order))
    read(heat, 1002, now - 5.0)
    read(heat, 1003, now)
    for order in range(1, nodes):
        read(heat, 1004, now - 0.5 * (nodes - order))
    heat.seen_by_switch(block(1005), segment=0, reads=1, fan_out=1, now=now - 5.0)
    chances = heat.chances([block(number) for number in (1001, 1002, 1004, 1005)], now)
    assert chances[block(1001)][0] < 0.2, "all nodes have it"
    assert chances[block(1002)][1] > 0.8, "one node has it"
    assert chances[block(1005)] == chances[block(1002)], "no home has said that it answered"
    once, twice = chances[block(1004)]
    assert once > 0.8 > 0.2 > twice, "one node has it not"
    assert heat.value(block(1001), now) > heat.value(block(1002), now)
    assert displaced(heat, 1003, [1001, 1002], now) == [1001]


@pytest.mark.parametrize("count", [1, 2, 40])
def test_reads_told_of_together_are_so_many_reads_in_no_time(count: int) -> None:
    together, alone = HeatMap(ValueOptions(), slots=8), HeatMap(ValueOptions(), slots=8)
    for before in (0, 1, 15, 16, 17):
        for heat in (together, alone):
            for now in range(before):
                read(heat, before, float(now))
        read(together, before, 20.0, count)
        for _ in range(count):
            read(alone, before, 20.0)
    assert together._reuse._ended == alone._reuse._ended
    assert together._reuse._count == alone._reuse._count
    assert together._times_read == alone._times_read


def displaces_from(heat: HeatMap, most: int) -> int | None:
    """How many reads at once a block needs to stand above others."""
    for reads in range(1, most):
        read(heat, 5000 + reads, 1e6, reads)
        if heat.standings(block(5000 + reads), 1e6)[Rule.VALUE].displaces > -math.inf:
            return reads
    return None


@pytest.mark.parametrize(("times", "enough"), [(1, 4), (2, 4), (4, 4), (6, 2), (12, 2)])
def test_fewer_reads_displace_where_what_is_read_twice_is_read_on(times: int, enough: int) -> None:
    heat = HeatMap(ValueOptions(displace_reads=3.9), slots=8)
    for number in range(300):
        read(heat, number, 100.0 * number, times)
    expected = 0.0 if times < 2 else (times - 2) * 300 / (300 + reuse.PRIOR_BLOCKS)
    assert heat._reuse.reads_after_second() == pytest.approx(expected)
    assert displaces_from(heat, 8) == enough


def test_nothing_is_eager_before_enough_blocks_have_shown_it() -> None:
    heat = HeatMap(ValueOptions(), slots=8)
    assert heat.options_under(Rule.VALUE) == ValueOptions()
    read(heat, 1, 0.0, 20)
    assert heat.options_under(Rule.VALUE) == ValueOptions(), "one block shows little"
    for number in range(2, 30):
        read(heat, number, 0.0, 20)
    assert heat.options_under(Rule.VALUE) == ValueOptions(displace_reads=2.0)
    assert heat.options_under(Rule.RECENT).displace_reads == 0.0


def test_a_block_read_once_displaces_nobody_before_that_is_learned_or_where_all_come_back() -> None:
    early = short_lived(9)
    read(early, 1000, 60.0)
    assert displaced(early, 1000, [0], 60.0) == []
    steady = HeatMap(ValueOptions(), slots=8)
    for now in range(40 * 50):  # forty blocks, each read every forty seconds
        read(steady, now % 40, float(now))
    read(steady, 1000, 2000.0)
    assert displaced(steady, 1000, list(range(40)), 2000.0) == []


def test_chances_are_of_what_is_known_and_learned_from_so_many_blocks() -> None:
    heat = HeatMap(ValueOptions(), slots=8)
    assert heat.chances([block(1)], 0.0) == {block(1): (0.0, 0.0)}
    for number in range(admission.REUSE_BLOCKS + 10):
        read(heat, number, 0.0, reads=2)
    assert heat._reuse._count == admission.REUSE_BLOCKS
    once, twice = heat.chances([block(1)], 1.0)[block(1)]
    assert 0.0 < twice < once < 1.0
