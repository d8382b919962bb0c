"""How much of DRAM is kept free, so that what comes finds room.

Owns: that number of bytes, from what was taken while room was being made. Must not know: what makes
room (`ssd` tells what it measures), or what lies where.

To make room takes time: a copy leaves DRAM only when it has been written below, and its entry after
it. What is taken meanwhile must have been free before. So it is measured how much was taken while
room was being made, and one and a half times the most of that is kept free, and room for some
blocks in any case. If room runs out all the same, more is kept free. The measure fades slowly. So a
node to which little is put fills its DRAM nearly to the end, and a node to which much came at once
has room for it the next time.
"""

from __future__ import annotations

import math
from typing import Final

FIRST_SHARE: Final = 0.1
"""Of the capacity, that is kept free before anything was measured."""
LEAST_SHARE: Final = 0.02
LEAST_BLOCKS: Final = 2
"""Of the largest that came of late."""
MOST_SHARE: Final = 0.25
SAFETY: Final = 1.5
HALF_LIFE_S: Final = 600.0
RAN_OUT: Final = 1.25
"""What was kept free was too little by this, where there was no room."""


class Headroom:
    """See the module's text. Times are seconds on one clock of the caller's; `capacity_bytes` of
    what room is kept free in."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._most_bytes = FIRST_SHARE * capacity_bytes / SAFETY
        """Taken while room was made, when most was; fading since then."""
        self._at: float | None = None
        self._largest_bytes = 0
        """Of a block,"""
        self._came_at = 0.0
        """and when one of that size came last."""

    def came(self, now: float, size_bytes: int) -> None:
        """A block of this size has come."""
        if size_bytes >= self._largest_bytes or now - self._came_at > HALF_LIFE_S:
            self._largest_bytes, self._came_at = size_bytes, now

    def measured(self, now: float, taken_bytes: int) -> None:
        """So much was taken while some room was made."""
        self._most_bytes = max(self._faded(now), float(taken_bytes))
        self._at = now

    def ran_out(self, now: float) -> None:
        """There was no room, though none was being made."""
        # More than was kept free, whatever for: what was taken may be long forgotten.
        kept_bytes = self.wanted_bytes(now, self._capacity_bytes)
        self._most_bytes = RAN_OUT * kept_bytes / SAFETY
        self._at = now

    def wanted_bytes(self, now: float, of_bytes: int) -> float:
        """How much is to be kept free of `of_bytes`: the capacity, or a part with a bound of its
        own."""
        wanted = max(SAFETY * self._faded(now), LEAST_BLOCKS * self._largest_bytes)
        return min(max(wanted, LEAST_SHARE * of_bytes), MOST_SHARE * of_bytes)

    def _faded(self, now: float) -> float:
        if self._at is None:
            self._at = now
        # Beyond the cap it would only take longer to be forgotten.
        most_bytes = min(self._most_bytes, MOST_SHARE * self._capacity_bytes)
        return most_bytes * math.pow(2.0, -max(0.0, now - self._at) / HALF_LIFE_S)
