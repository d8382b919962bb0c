"""The router's prefix index: what it says of a chain, and what it forgets at its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.routing.core.index import PrefixIndex


def held_by(index: PrefixIndex, holder: int, chain: tuple[int, ...], now: float = 0.0) -> int:
    """How many blocks of the chain's beginning this holder has."""
    count = 0
    for run in index.runs(chain, now):
        if not run.holders & index.bit_of(holder):
            break
        count += run.blocks
    return count


def test_runs_are_of_equal_holders_and_end_where_nobody_holds_the_next_block() -> None:
    index = PrefixIndex()
    first, second = index.add_holder(), index.add_holder()
    index.stored(first, [1, 2, 3, 4])
    index.stored(second, [1, 2, 6])
    runs = index.runs((1, 2, 3, 4, 5, 6), 0.0)
    both = index.bit_of(first) | index.bit_of(second)
    assert [(run.holders, run.blocks) for run in runs] == [(both, 2), (index.bit_of(first), 2)]


def test_what_is_removed_is_forgotten_for_that_holder_alone() -> None:
    index = PrefixIndex()
    first, second = index.add_holder(), index.add_holder()
    for holder in (first, second):
        index.stored(holder, [1, 2])
    index.removed(first, [2, 99])
    assert held_by(index, first, (1, 2)) == 1
    assert held_by(index, second, (1, 2)) == 2
    index.removed(second, [1, 2])
    index.removed(first, [1])
    assert len(index) == 0


def test_what_is_expected_counts_until_its_time_or_until_an_event_says_otherwise() -> None:
    index = PrefixIndex()
    holder = index.add_holder()
    index.expect(holder, (1, 2, 3), until=10.0)
    assert held_by(index, holder, (1, 2, 3), now=9.9) == 3
    index.stored(holder, [1])
    index.removed(holder, [3])
    assert held_by(index, holder, (1, 2, 3), now=9.9) == 2
    assert held_by(index, holder, (1, 2, 3), now=10.0) == 1
    assert index.expected == 0


def test_an_expectation_that_is_renewed_lasts_as_long_as_the_last_one() -> None:
    index = PrefixIndex()
    holder = index.add_holder()
    index.expect(holder, (1,), until=5.0)
    index.expect(holder, (2,), until=6.0)
    index.expect(holder, (1,), until=9.0)
    assert held_by(index, holder, (1,), now=8.0) == 1
    assert held_by(index, holder, (2,), now=8.0) == 0


def test_expectations_are_bounded_and_the_oldest_gives_way() -> None:
    index = PrefixIndex(max_expected=3)
    holder = index.add_holder()
    index.expect(holder, (1, 2, 3, 4), until=10.0)
    assert index.expected == 3
    assert held_by(index, holder, (1,), 0.0) == 0
    assert held_by(index, holder, (2, 3, 4), 0.0) == 3


def test_the_table_is_bounded_keeps_what_is_used_and_counts_what_it_forgets() -> None:
    index = PrefixIndex(max_blocks=100)
    holder = index.add_holder()
    for block in range(1, 1001):
        index.stored(holder, [block])
        assert held_by(index, holder, (1,)) == 1, "asked for all the time"
        assert len(index) <= 100
    assert held_by(index, holder, (2,)) == 0
    assert index.forgotten_total > 0


def test_a_holder_that_is_cleared_has_nothing_and_nothing_is_expected_of_it() -> None:
    index = PrefixIndex()
    first, second = index.add_holder(), index.add_holder()
    index.stored(first, [1])
    index.stored(second, [1])
    index.expect(first, [2], until=10.0)
    index.clear(first)
    assert held_by(index, first, (1, 2)) == 0
    assert held_by(index, second, (1,)) == 1
    index.stored(first, [1, 2])
    assert held_by(index, first, (1, 2)) == 2


def test_clearing_often_neither_grows_the_table_nor_brings_anything_back() -> None:
    index = PrefixIndex()
    first, second = index.add_holder(), index.add_holder()
    for round_ in range(200):
        index.stored(first, [round_, 10_000])
        index.stored(second, [10_000])
        index.clear(first)
        assert held_by(index, first, (10_000,)) == 0
        assert held_by(index, second, (10_000,)) == 1
    assert index.sweeps_total > 0
    assert index.bit_of(first) < 1 << 40, "bits are used again"
    assert len(index) < 40, "what nobody holds is swept out"


def test_an_index_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="room"):
        PrefixIndex(max_blocks=1)


_events = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["stored", "removed"]),
            st.integers(0, 3),
            st.lists(st.integers(0, 12), max_size=4),
        ),
        st.tuples(st.just("clear"), st.integers(0, 3), st.just([])),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(_events, st.lists(st.integers(0, 12), max_size=6, unique=True))
def test_an_index_below_its_bound_says_what_plain_sets_say(
    events: list[tuple[str, int, list[int]]], chain: list[int]
) -> None:
    index = PrefixIndex()
    holders = [index.add_holder() for _ in range(4)]
    plain: list[set[int]] = [set() for _ in holders]
    for what, holder, blocks in events:
        if what == "stored":
            index.stored(holders[holder], blocks)
            plain[holder].update(blocks)
        elif what == "removed":
            index.removed(holders[holder], blocks)
            plain[holder].difference_update(blocks)
        else:
            index.clear(holders[holder])
            plain[holder].clear()
        for number, held in enumerate(plain):
            expected = 0
            for block in chain:
                if block not in held:
                    break
                expected += 1
            assert held_by(index, holders[number], tuple(chain)) == expected
