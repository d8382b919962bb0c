"""Histograms, as Prometheus has them.

Owns: the bounds of what is timed. Must not know: what is observed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

FETCH_BOUNDS_S: Final = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0),
)
"""50 us (a fetch of one frame on a fast network) to 10 s (beyond the deadline of most gets)."""


class Histogram:
    """Counts of observations by the bound that they are at most, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = [*bounds, math.inf]
        self._counts = [0] * len(self._bounds)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(bound as Prometheus writes it, observations up to there); the last one is all."""
        bounds = ["+Inf" if math.isinf(bound) else str(bound) for bound in self._bounds]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))

    def samples(self, name: str) -> dict[str, float]:
        """Prometheus' samples of a histogram of that name."""
        buckets = self.buckets()
        return {
            **{f'{name}_bucket{{le="{bound}"}}': count for bound, count in buckets},
            f"{name}_sum": self.sum,
            f"{name}_count": buckets[-1][1],
        }
