"""The table in which readers of a block meet, told anything in any order, beside a plain model.

Oracle: `meeting_model`; and that nobody is told of company who never had any. Cannot see: who asks
the table, and when (`test_protocol_conveyor_property`).
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from kvcast.protocol.meetings import Meetings
from kvcast.protocol.messages.wire import BlockId
from meeting_model import Table, place_of


def _blocks() -> list[BlockId]:
    """Some, of which two share a place, and two a key."""
    by_place: dict[int, BlockId] = {}
    for number in range(100_000):
        block = BlockId(1 + number % 2, random.Random(number).randbytes(16))
        other = by_place.setdefault(place_of(block), block)
        if other is not block:
            return [other, block, BlockId(3, block.key), BlockId(1, bytes(16))]
    raise AssertionError("no two blocks share a place")


@pytest.mark.parametrize("seed", range(8))
def test_the_table_says_what_the_model_says(seed: int) -> None:
    rng = random.Random(seed)
    meetings, model, blocks = Meetings(), Table(), _blocks()
    nodes: dict[BlockId, set[int]] = defaultdict(set)
    """Who has ever wanted a block."""
    now, met = 1.0, 0
    for _ in range(3000):
        now += rng.choice([0, 0, 0, 0, 0.5, 1, 2, 15, 30])
        block, node = rng.choice(blocks), rng.randrange(4)
        match rng.randrange(5):
            case 0 | 1:
                nodes[block].add(node)
                meetings.asks(now, block, node)
                model.asks(now, block, node)
            case 2:
                nodes[block].add(node)
                assert meetings.reads(now, block, node) == model.reads(now, block, node)
            case 3:
                meetings.leaves(now, block, node)
                model.leaves(now, block, node)
            case _ if model.is_met(now, block):
                meetings.told(now, block, node)
                model.told(now, block, node)
        for each in blocks:
            assert meetings.is_met(now, each) == model.is_met(now, each)
            assert not meetings.is_met(now, each) or len(nodes[each]) > 1
        met += meetings.is_met(now, block)
    assert meetings.met == model.told_in_all
    assert 300 < met < 2700, "both happen"
