"""The table of what can happen to a node that the pool knows.

Oracle: the table itself (what it does not name must raise), and what must be true of any such
table. Cannot see: when any of it happens (tests/unit/test_controller_membership.py).
"""

from __future__ import annotations

import itertools

import pytest
from kvcast.controller.core.node import (
    OUTSIDE,
    TRANSITIONS,
    Address,
    Node,
    NodeEvent,
    SavedNode,
    Standing,
)
from kvcast.protocol.impossible import ImpossibleEventError

ADDRESS = Address("10.0.0.1", "02:6b:76:00:00:01", 1, 1, "10.0.0.1", 1)


def make(standing: Standing) -> Node:
    return Node("node-1", 1, 7, ADDRESS, 100, standing)


def test_every_pair_leads_where_the_table_says_or_raises() -> None:
    refused = 0
    for standing, event in itertools.product(Standing, NodeEvent):
        node = make(standing)
        if event in TRANSITIONS[standing]:
            node.happen(event)
            assert node.standing is TRANSITIONS[standing][event]
        else:
            refused += 1
            match = f"node-1 is {standing.name}: no {event.name}"
            with pytest.raises(ImpossibleEventError, match=match):
                node.happen(event)
            assert node.standing is standing
    assert refused > len(Standing)


@pytest.mark.parametrize("first", [Standing.NEWCOMER, Standing.DEAD, Standing.PLACED])
def test_from_wherever_a_node_begins_it_gets_everywhere_but_to_be_a_newcomer(
    first: Standing,
) -> None:
    reached = fresh = {first}
    while fresh:
        fresh = {to for standing in fresh for to in TRANSITIONS[standing].values()} - reached
        reached |= fresh
    assert reached == set(Standing) - ({Standing.NEWCOMER} - {first})


def test_every_event_can_happen() -> None:
    assert set(TRANSITIONS) == set(Standing)
    assert {event for row in TRANSITIONS.values() for event in row} == set(NodeEvent)


def test_whoever_lives_can_die_and_nobody_is_drained_who_is_not_there() -> None:
    for standing, row in TRANSITIONS.items():
        assert (NodeEvent.DIE in row) == make(standing).live
        assert (NodeEvent.COME in row) != make(standing).live
        assert row.get(NodeEvent.DIE, Standing.DEAD) is Standing.DEAD


def test_an_operators_word_moves_no_bucket_but_stops_who_is_on_the_way() -> None:
    for standing, row in TRANSITIONS.items():
        stays = standing is not Standing.JOINING
        assert row[NodeEvent.DRAIN] is (standing if stays else Standing.WAITING)


def test_buckets_are_got_from_outside_alone_and_lost_to_it() -> None:
    for standing, row in TRANSITIONS.items():
        assert ({NodeEvent.PLACE, NodeEvent.JOIN} <= row.keys()) == (standing in OUTSIDE)
        ways = {event for event, to in row.items() if to is Standing.PLACED is not standing}
        assert ways <= {NodeEvent.PLACE, NodeEvent.TAKE_OVER}
    assert TRANSITIONS[Standing.PLACED][NodeEvent.HAND_OVER] in OUTSIDE


def test_of_a_standing_it_is_saved_whether_buckets_may_name_the_node() -> None:
    for standing, draining in itertools.product(Standing, (False, True)):
        node = make(standing)
        node.draining = draining
        placed = standing is Standing.PLACED
        assert node.saved == SavedNode("node-1", 1, 7, ADDRESS, 100, placed, draining)
