"""Ghosts: which rule would answer the most reads, beside a plain model, and that it is followed.

Oracle: a list in order of use for the rule `recent`, and the texts' rules on an invented clock.
Cannot see: how soon a real switch would be filled.
"""

from __future__ import annotations

import random
from math import inf

import pytest
from home_reports import home_reports
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.controller.core import admission, ghosts
from kvcast.controller.core.admission import Contender, HeatMap, Holder, ValueOptions, choose
from kvcast.controller.core.ghosts import Ghosts, Rule, Standing
from kvcast.controller.core.residency import Residency
from kvcast.controller.core.tiers import AdmitMode, Tiers
from kvcast.protocol.messages.control import Describe, Described, HotBlock, Keep, Kept
from kvcast.protocol.messages.wire import SEGMENT_BYTES, BlockId


def block(number: int, namespace: int = 1) -> BlockId:
    return BlockId(namespace, number.to_bytes(16, "big"))


class LeastRecent:
    """What the rule `recent` would answer of whole blocks of several slots."""

    def __init__(self, slots: int) -> None:
        self.slots, self.kept = slots, dict[int, tuple[int, bool]]()

    def read(self, name: int, slots: int, reads: int) -> int:
        if name in self.kept:
            _, filled = self.kept.pop(name)
            self.kept[name] = (slots, True)
            return reads if filled else reads - 1
        if slots <= self.slots:
            while sum(size for size, _ in self.kept.values()) + slots > self.slots:
                del self.kept[next(iter(self.kept))]
            self.kept[name] = (slots, False)
        return 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=80),
    st.integers(1, 8),
)
def test_the_ghost_of_recent_is_a_list_in_order_of_use(
    reads: list[tuple[int, int]], slots: int
) -> None:
    ghost, plain = ghosts._Ghost(slots), LeastRecent(slots)
    for now, (number, count) in enumerate(reads):
        size = 1 + number % 3
        answered = ghost.read(block(number), Standing(now, now), size, count)
        assert answered == plain.read(number, size, count)
        assert {name.key for name in ghost.kept} == {block(n).key for n in plain.kept}
        assert ghost.free == slots - sum(each.slots for each in ghost.kept.values()) >= 0
        assert len(ghost._worst) <= 2 * len(ghost.kept) + 65, "stale entries are bounded"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_what_stands_again_as_it_did_before_leaves_once(
    reads: list[tuple[int, int]], slots: int
) -> None:
    ghost = ghosts._Ghost(slots)
    for number, rank in reads:
        ghost.read(block(number), Standing(rank, rank), 1 + number, 1)
        assert ghost.free == slots - sum(each.slots for each in ghost.kept.values()) >= 0


def test_room_that_a_block_gives_once_is_counted_once() -> None:
    ghost = ghosts._Ghost(2)
    for rank in (1, 2, 1):
        ghost.read(block(0), Standing(rank, rank), 1, 1)
    ghost.read(block(1), Standing(3, 3), 3, 1)  # more than there is
    assert (list(ghost.kept), ghost.free) == ([block(0)], 1)
    ghost.read(block(2), Standing(3, 3), 2, 1)
    assert (list(ghost.kept), ghost.free) == ([block(2)], 0)


def heard(tiers: Tiers, number: int, now: float, reads: int = 1, namespace: int = 1) -> None:
    key = block(number).key
    report = HotBlock(namespace, key, reads, 1, 0, SEGMENT_BYTES, number + 1)
    tiers.heard_reports({BlockId(namespace, key): report}, now)


def tiers_of(slots: int) -> Tiers:
    residency = Residency(slots, first_generation=1, drain_s=0.2)
    return Tiers(AdmitMode.AUTO, residency, ValueOptions(), lambda _b: ("home",), refresh_s=1e9)


def test_what_moves_on_faster_than_counts_fade_is_ranked_by_when_it_was_read() -> None:
    tiers = tiers_of(8)
    for burst in range(40):  # eight blocks, read four times each, and never again
        for turn in range(4):
            for place in range(8):
                heard(tiers, burst * 8 + place, burst + turn / 4)
    assert tiers.ghosts.rule is tiers.heat.rule is Rule.RECENT
    assert tiers.ghosts.changes == 1


def test_what_is_read_again_and_again_between_strangers_is_ranked_by_value() -> None:
    tiers, rng = tiers_of(8), random.Random(1)
    tiers.ghosts.rule = Rule.RECENT
    for step in range(2000):
        often = step % 2 == 0
        heard(tiers, rng.randrange(8) if often else 1000 + step, step / 20)
    assert tiers.ghosts.rule is tiers.heat.rule is Rule.VALUE
    assert tiers.ghosts.changes == 1


def play(tiers: Tiers, now: float) -> set[int]:
    """The blocks that are to be in the switch, when all homes have answered what they are asked."""
    outgoing = tiers.advance(now)
    while outgoing:
        node, message = outgoing.pop()
        if isinstance(message, Describe):
            held = [(ref.namespace, ref.key, SEGMENT_BYTES, 1) for ref in message.blocks]
            tiers.described(Described(message.request, held), node, now)
            outgoing += tiers.advance(now)
        elif isinstance(message, Keep):
            kept = Kept(message.request, message.namespace, message.key, True)
            outgoing += tiers.kept(kept, node, now)
    return {int.from_bytes(name.key, "big") for name in tiers.residency.residents}


@pytest.mark.parametrize(
    ("rule", "times", "now", "stays"),
    [(Rule.VALUE, 2, 2.0, True), (Rule.VALUE, 12, 2.0, False), (Rule.RECENT, 2, 0.5, False)],
)
def test_who_displaces_goes_by_the_rule_and_by_what_is_learned(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, times: int, now: float, stays: bool
) -> None:
    monkeypatch.setattr(admission, "DEAD_MARGIN", inf)  # nobody is dead
    tiers = tiers_of(1)
    for number in range(100, 140):
        heard(tiers, number, -1000.0, times)
    heard(tiers, 0, 0.0)
    assert play(tiers, 0.0) == {0}
    tiers.ghosts.rule = tiers.heat.rule = rule
    heard(tiers, 1, now, 2)
    assert (0 in play(tiers, now)) is stays


def apart(slots: int, blocks: int) -> Ghosts:
    """Ghosts of which each holds so many blocks, filled, that the other does not."""
    mind = Ghosts(slots)
    for place, ghost in enumerate(mind._ghosts.values()):
        for number in range(blocks):
            for _ in range(2):
                ghost.read(block(number + place * blocks), Standing(0.0, 0.0), 1, 1.0)
    return mind


def lead(mind: Ghosts, reads: float) -> None:
    """Let the rule that is not in force answer so many reads more."""
    other = Rule.RECENT if mind.rule is Rule.VALUE else Rule.VALUE
    name = next(iter(mind._ghosts[other].kept))
    within = dict.fromkeys(Rule, Standing(0.0, -inf))
    mind.read(name, 1, reads / (1 - ghosts.WORTH_IT), within)


def test_a_lead_must_pay_for_what_is_filled_anew_there_and_back() -> None:
    cost = ghosts.THERE_AND_BACK * 2 * 20
    assert ghosts.AT_LEAST_READS < cost < ghosts.AT_MOST_READS
    mind = apart(20, 20)
    lead(mind, cost - 2)
    assert (mind.rule, mind.changes) == (Rule.VALUE, 0)
    lead(mind, 3)
    assert (mind.rule, mind.changes, mind.lead) == (Rule.RECENT, 1, 0.0)
    lead(mind, cost - 2)
    assert mind.rule is Rule.RECENT, "the way back is as dear"
    lead(mind, 3)
    assert (mind.rule, mind.changes) == (Rule.VALUE, 2)


def test_ghosts_that_hold_nearly_the_same_change_soon_and_others_before_long() -> None:
    alike, unlike = apart(1, 1), apart(500, 500)
    for mind, reads in ((alike, ghosts.AT_LEAST_READS), (unlike, ghosts.AT_MOST_READS)):
        lead(mind, reads - 1)
        assert mind.rule is Rule.VALUE
        lead(mind, 2)
        assert mind.rule is Rule.RECENT


def test_a_lead_ends_where_the_rule_in_force_answers_as_much_more() -> None:
    mind = apart(1, 1)
    everywhere = dict.fromkeys(Rule, Standing(0.0, -inf))
    for _ in range(20):
        lead(mind, ghosts.AT_LEAST_READS - 2)
        mind.read(block(0), 1, ghosts.AT_LEAST_READS, everywhere)  # `value` holds it
        assert mind.lead == 0.0
    assert mind.changes == 0


def test_ghosts_hear_of_so_many_blocks_a_second() -> None:
    mind = Ghosts(4)
    told = [mind.listens(5.0) for _ in range(ghosts.HEARD_A_SECOND + 10)]
    assert told == [True] * ghosts.HEARD_A_SECOND + [False] * 10
    assert not mind.listens(5.9)
    assert mind.listens(6.0)


def test_a_namespace_that_is_gone_leaves_its_room_to_others() -> None:
    tiers = tiers_of(2)
    for number in range(2):
        heard(tiers, number, 0.0, namespace=7)
    ghost = tiers.ghosts._ghosts[Rule.RECENT]
    assert ghost.free == 0
    tiers.forget([7], 1.0, "gone")
    assert (ghost.free, ghost.kept) == (2, {})


def test_under_recent_the_block_not_read_for_longest_makes_room_and_no_later_one_does() -> None:
    heat = HeatMap(ValueOptions())
    for number, (reads, at) in enumerate(((50, 0.0), (1, 8.0), (1, 9.0))):
        home_reports(heat, block(number), reads=reads, now=at)

    def chosen(wanted: int, held: int) -> list[BlockId]:
        choice = choose(
            [Contender(block(wanted), SEGMENT_BYTES, 1, pinned=False)],
            [Holder(block(held), 1, False, 9.0)],
            free=0,
            coming_free=0,
            heat=heat,
            options=heat.options_under(heat.rule),
            now=10.0,
        )
        return [name for name, _ in choice.evict]

    assert chosen(2, 0) == [], "it is worth fifty times as much"
    heat.rule = Rule.RECENT
    assert chosen(2, 0) == [block(0)]
    assert chosen(1, 2) == []
    assert heat.best(3, 10.0, without=[]) == [block(2), block(1), block(0)]
    late = ValueOptions().horizon_s + 8.5
    assert heat.best(3, late, without=[]) == [block(2)], "a horizon later nobody wants it"
