"""How much of DRAM is kept free.

Oracle: numbers worked out by hand. Cannot see: what makes room, and how long that takes.
"""

from __future__ import annotations

import pytest
from kvcast.hostagent.core.headroom import HALF_LIFE_S, Headroom

CAPACITY = 1_000_000
FLOOR = 20_000
"""A fiftieth."""


def wanted(headroom: Headroom, now: float) -> float:
    return headroom.wanted_bytes(now, CAPACITY)


def test_half_as_much_again_is_free_as_was_taken_while_room_was_made() -> None:
    headroom = Headroom(CAPACITY)
    assert wanted(headroom, 0.0) == pytest.approx(100_000)
    headroom.measured(0.0, 120_000)
    assert wanted(headroom, 0.0) == 180_000
    headroom.measured(0.0, 60_000)
    assert wanted(headroom, 0.0) == 180_000
    assert wanted(headroom, HALF_LIFE_S) == 90_000
    headroom.measured(HALF_LIFE_S, 90_000)
    assert wanted(headroom, HALF_LIFE_S) == 135_000


def test_it_is_never_more_than_a_quarter_and_room_for_two_blocks_where_little_comes() -> None:
    headroom = Headroom(CAPACITY)
    headroom.measured(0.0, 900_000)
    assert wanted(headroom, 0.0) == 250_000
    later = 100 * HALF_LIFE_S
    assert wanted(headroom, later) == FLOOR
    headroom.came(later, 30_000)
    assert wanted(headroom, later) == 60_000


def test_where_room_ran_out_more_is_kept_free_however_little_that_was() -> None:
    headroom = Headroom(CAPACITY)
    headroom.ran_out(0.0)
    assert wanted(headroom, 0.0) == pytest.approx(125_000)
    quiet = 100 * HALF_LIFE_S
    assert wanted(headroom, quiet) == FLOOR
    headroom.ran_out(quiet)
    assert wanted(headroom, quiet) == pytest.approx(1.25 * FLOOR)
    headroom.came(quiet, 50_000)
    headroom.ran_out(quiet)
    assert wanted(headroom, quiet) == pytest.approx(1.25 * 100_000)
    for _ in range(100):
        headroom.ran_out(quiet)
    assert wanted(headroom, quiet) == 250_000
