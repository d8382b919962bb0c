"""Percentiles and ratios, as every report gives them.

Owns: how they are counted and rounded. Must not know: what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile (share 0 to 1); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered), max(1, math.ceil(share * len(ordered)))) - 1]


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p99 and max, to a hundredth."""
    picked = {
        "p50": percentile(values, 0.50),
        "p99": percentile(values, 0.99),
        "max": max(values, default=None),
    }
    return {name: None if value is None else round(value, 2) for name, value in picked.items()}


def ratio(part: float, whole: float) -> float | None:
    """part ÷ whole to a ten-thousandth; None where there is no whole."""
    return round(part / whole, 4) if whole else None


def rounded(value: float | None) -> float | None:
    """To a ten-thousandth; None of nothing."""
    return None if value is None else round(value, 4)
