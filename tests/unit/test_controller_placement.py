"""Placement moves as little as it can.

Oracle: the properties of rendezvous hashing, checked over generated sets of nodes. Cannot see:
whether the lists reach the switch or the agents.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.controller.core.placement import place, score
from kvcast.protocol.messages.wire import BUCKETS

NODES = st.sets(st.integers(1, 40).map("node-{}".format), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(nodes=NODES, homes=st.integers(1, 4))
def test_every_bucket_lists_distinct_nodes_as_many_as_there_are(
    nodes: set[str], homes: int
) -> None:
    lists = place(nodes, homes)
    assert len(lists) == BUCKETS
    for homes_of in lists:
        assert len(homes_of) == len(set(homes_of)) == min(homes, len(nodes))
        assert set(homes_of) <= nodes


@settings(max_examples=25, deadline=None)
@given(nodes=NODES, homes=st.integers(1, 4), data=st.data())
def test_a_node_that_goes_takes_only_its_own_places(
    nodes: set[str], homes: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(nodes)))
    before, after = place(nodes, homes), place(nodes - {gone}, homes)
    for was, is_ in zip(before, after, strict=True):
        rest = tuple(n for n in was if n != gone)
        assert is_[: len(rest)] == rest
        if gone not in was:
            assert is_ == was


@settings(max_examples=25, deadline=None)
@given(nodes=NODES, data=st.data())
def test_the_next_in_order_becomes_home_when_a_home_goes(
    nodes: set[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(nodes)))
    before, after = place(nodes, 3), place(nodes - {gone}, 3)
    for was, is_ in zip(before, after, strict=True):
        if len(was) > 1 and was[0] == gone:
            assert is_[0] == was[1]


@settings(max_examples=10, deadline=None)
@given(nodes=NODES, homes=st.integers(1, 4))
def test_a_bucket_lists_the_nodes_by_falling_draws(nodes: set[str], homes: int) -> None:
    for bucket, homes_of in enumerate(place(nodes, homes)):
        drawn = sorted(nodes, key=lambda node: score(node, bucket), reverse=True)
        assert list(homes_of) == drawn[:homes]


def test_the_order_in_which_nodes_are_given_does_not_matter() -> None:
    assert place(["a", "b", "c"], 2) == place(["c", "a", "b"], 2)


def test_homes_are_spread_about_evenly() -> None:
    homes = [homes[0] for homes in place([f"node-{i}" for i in range(1, 9)], 1)]
    for node in set(homes):
        assert BUCKETS / 8 * 0.6 < homes.count(node) < BUCKETS / 8 * 1.4


def test_without_nodes_every_list_is_empty() -> None:
    assert place([], 3) == ((),) * BUCKETS


def test_a_bucket_needs_a_home() -> None:
    with pytest.raises(ValueError, match="at least one home"):
        place(["a"], 0)
