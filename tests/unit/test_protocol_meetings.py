"""Where readers of one block meet: who is told of whom, and for how long.

Oracle: the rules in the module's text, written out here. Cannot see: who asks the table, and when
(`test_hostagent_lone_reads`, `test_protocol_conveyor_property`).
"""

from __future__ import annotations

import pytest
from kvcast.protocol.meetings import READ_NS, WAITS_NS, Meetings
from kvcast.protocol.messages.wire import BlockId

BLOCK = BlockId(7, bytes(range(16)))
WAITS_S, READ_S = WAITS_NS / 1e9, READ_NS / 1e9


def test_two_that_ask_meet_and_one_that_asks_twice_does_not() -> None:
    meetings = Meetings()
    meetings.asks(1.0, BLOCK, 3)
    meetings.asks(1.0, BLOCK, 3)
    assert not meetings.is_met(1.0, BLOCK)
    meetings.asks(1.1, BLOCK, 4)
    assert meetings.is_met(1.1, BLOCK)
    assert not meetings.is_met(1.1, BlockId(8, BLOCK.key)), "another namespace's"


def test_who_has_its_turn_is_not_waited_for() -> None:
    meetings = Meetings()
    meetings.asks(1.0, BLOCK, 3)
    meetings.leaves(1.0, BLOCK, 4)
    assert meetings.reads(1.0, BLOCK, 5), "it was not that one's turn"
    meetings = Meetings()
    meetings.asks(1.0, BLOCK, 3)
    meetings.leaves(1.1, BLOCK, 3)
    meetings.asks(1.2, BLOCK, 4)
    assert not meetings.is_met(1.2, BLOCK), "its block is on its way: nobody begins anew"


def test_a_read_meets_who_has_asked_by_tcp() -> None:
    meetings = Meetings()
    assert not meetings.reads(1.0, BLOCK, 4)
    meetings.asks(1.0, BLOCK, 3)
    assert not meetings.reads(1.0, BLOCK, 3), "its own"
    assert not meetings.is_met(1.0, BLOCK)
    assert meetings.reads(1.0, BLOCK, 4)
    assert meetings.is_met(1.0, BLOCK)


@pytest.mark.parametrize("is_read", [False, True])
def test_who_comes_later_still_meets_those_who_were_told_until_they_have_read(
    is_read: bool,
) -> None:
    meetings = Meetings()
    meetings.asks(1.0, BLOCK, 3)
    meetings.asks(1.0, BLOCK, 4)
    for node in (3, 4):
        meetings.told(1.0, BLOCK, node)
    assert meetings.met == 2
    if is_read:
        assert not meetings.reads(2.0, BLOCK, 3), "all know already"
    late_s = 2.0 + READ_S + 0.1
    assert meetings.is_met(late_s, BLOCK) == (not is_read)
    assert not meetings.is_met(1.0 + WAITS_S + 0.1, BLOCK)
