"""What a soak must show, and whether it did: criteria with bounds over series of numbers.

Owns: the criteria, their bounds, the arithmetic. Must not know: how a pool is run or sampled.

Growth is judged within each life of a part that lasted `Bounds.life_s` or longer, on samples that
jump up and down by themselves; so nothing hangs on a single sample, but for what is a maximum.
The fifths are fifths of that life; the first is its warming up and counts nowhere.

- memory grows if both say so: the Theil-Sen slope (the median of the slopes between all pairs of
  samples) of the last two fifths of the life, and the median of the last fifth against that of the
  second. So what a process fills once and keeps (a switch's tables, page by page, for as much as
  half an hour) is no growth, and what goes on to the end is. A leak that is smaller than either
  bound stays unseen.
- descriptors, threads: the maximum and the median of the last fifth against the second fifth's.
- hit rate: blocks that came / blocks wanted (outage.py) over the windows of the soak's last fifth
  against those of its second fifth. Faults strike both alike (plan.py).

Everything else is a count that must be zero, or must not be.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from kvcast.bench.soak.watch import Life
from kvcast.service.statistics import ratio

_PAIRED_SAMPLES = 400
"""A longer series is thinned to about so many samples before all pairs of them are compared."""


@dataclass(frozen=True)
class Bounds:
    """What is still flat."""

    life_s: float = 900.0
    """Shorter lives are not judged: most of them is warming up. An agent fills what it remembers
    of evicted blocks, and a switch touches all pages of its tables, in about five minutes."""
    memory_slope_mib_per_h: float = 12.0
    memory_rise_mib: float = 3.0
    descriptors_max: int = 24
    """Above the second fifth's maximum: connections of hostile clients are many at once."""
    descriptors_median: int = 2
    threads_max: int = 4
    threads_median: int = 1
    hit_rate_drop: float = 0.05
    """Share of the blocks wanted, not of the earlier rate."""


@dataclass(frozen=True)
class Window:
    """What the load came to in a stretch of time. Times are seconds of the soak."""

    began_s: float
    ended_s: float
    requests: int
    failed_requests: int
    wanted: int
    """Blocks that a pool which loses and evicts nothing would have held."""
    came: int
    """Of those wanted."""
    gets: int
    delivered: int
    """Blocks that gets returned."""
    missed: int
    wrong_bytes: int
    put_blocks: int
    put_failures: int
    fetch_p50_ms: float | None
    fetch_p99_ms: float | None

    @property
    def hit_rate(self) -> float | None:
        return self.came / self.wanted if self.wanted else None

    @property
    def blocks_per_s(self) -> float:
        """Delivered and put."""
        return (self.delivered + self.put_blocks) / max(1e-9, self.ended_s - self.began_s)

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "hit_rate": ratio(self.came, self.wanted),
            "blocks_per_s": round(self.blocks_per_s, 1),
        }


@dataclass(frozen=True)
class Criterion:
    """One thing that must hold, and what was found."""

    name: str
    demand: str
    """What must hold, with the bound and its unit."""
    found: str
    holds: bool


def theil_sen(at: Sequence[float], values: Sequence[float]) -> float:
    """The median slope between pairs of points; 0 where there are none."""
    step = max(1, len(at) // _PAIRED_SAMPLES)
    x, y = np.asarray(at, float)[::step], np.asarray(values, float)[::step]
    left, right = np.triu_indices(len(x), 1)
    apart = x[right] - x[left]
    slopes = (y[right] - y[left])[apart > 0] / apart[apart > 0]
    return float(np.median(slopes)) if len(slopes) else 0.0


def fifth(life: Life, values: Sequence[float], number: int) -> list[float]:
    """The values in fifth `number` (0 to 4) of a life."""
    start, length = life.at_s[0], max(1e-9, life.length_s)
    return [
        value
        for at, value in zip(life.at_s, values, strict=True)
        if min(4, int(5 * (at - start) / length)) == number
    ]


@dataclass(frozen=True)
class Growth:
    """How one life's second fifth and its last compare."""

    life: str
    slope_mib_per_h: float
    memory_rise_mib: float
    descriptors_max: int
    descriptors_median: float
    threads_max: int
    threads_median: float

    @classmethod
    def of(cls, life: Life) -> Growth:
        """Of a life that has samples in its second and last fifth."""
        late_s = life.at_s[0] + 0.6 * life.length_s
        late = next(index for index, at in enumerate(life.at_s) if at >= late_s)
        slope = theil_sen(life.at_s[late:], life.memory_mib[late:]) * 3600

        def risen(values: Sequence[float], summary: Any) -> Any:
            return summary(fifth(life, values, 4)) - summary(fifth(life, values, 1))

        return cls(
            life.name,
            round(slope, 2),
            round(risen(life.memory_mib, statistics.median), 2),
            int(risen(life.descriptors, max)),
            risen(life.descriptors, statistics.median),
            int(risen(life.threads, max)),
            risen(life.threads, statistics.median),
        )


def judged(lives: Sequence[Life], bounds: Bounds) -> list[Growth]:
    """The growth in every life that was long enough."""
    return [
        Growth.of(life)
        for life in lives
        if life.length_s >= bounds.life_s and fifth(life, life.threads, 1)
    ]


def growth_criteria(growths: Sequence[Growth], bounds: Bounds) -> list[Criterion]:
    """Memory, descriptors and threads: the worst life of all is named."""

    def criterion(name: str, demand: str, unit: str, bad: Any, worst: Any) -> Criterion:
        failed = [growth for growth in growths if bad(growth)]
        shown = failed or sorted(growths, key=worst)[-1:]
        found = "; ".join(f"{worst(growth):+g} {unit} ({growth.life})" for growth in shown)
        return Criterion(name, demand, found or "no life was long enough", not failed)

    return [
        criterion(
            "memory",
            f"slope at most {bounds.memory_slope_mib_per_h:g} MiB/h in the last two fifths, or "
            f"the last fifth at most {bounds.memory_rise_mib:g} MiB above the second",
            "MiB",
            lambda g: (
                g.slope_mib_per_h > bounds.memory_slope_mib_per_h
                and g.memory_rise_mib > bounds.memory_rise_mib
            ),
            lambda g: g.memory_rise_mib,
        ),
        *(
            criterion(
                f"{what}, {summary}",
                f"the last fifth's {summary} at most {limit} above the second fifth's",
                what,
                lambda g, name=name, limit=limit: getattr(g, name) > limit,
                lambda g, name=name: getattr(g, name),
            )
            for what, summary, name, limit in (
                ("descriptors", "maximum", "descriptors_max", bounds.descriptors_max),
                ("descriptors", "median", "descriptors_median", bounds.descriptors_median),
                ("threads", "maximum", "threads_max", bounds.threads_max),
                ("threads", "median", "threads_median", bounds.threads_median),
            )
        ),
    ]


def hit_rates(windows: Sequence[Window]) -> tuple[float | None, float | None]:
    """Those of the second and of the last fifth of the windows' time."""
    if not windows:
        return None, None
    start, end = windows[0].began_s, windows[-1].ended_s
    length = max(1e-9, end - start)

    def rate(number: int) -> float | None:
        some = [
            window
            for window in windows
            if int(5 * ((window.began_s + window.ended_s) / 2 - start) / length) == number
        ]
        wanted = sum(window.wanted for window in some)
        return sum(window.came for window in some) / wanted if wanted else None

    return rate(1), rate(4)


def hit_rate_criterion(windows: Sequence[Window], bounds: Bounds) -> Criterion:
    """Whether the hit rate has sunk. Without reads in both fifths it does not hold."""
    early, late = hit_rates(windows)
    demand = f"the last fifth's at most {100 * bounds.hit_rate_drop:g} points below the second's"
    if early is None or late is None:
        return Criterion("hit rate", demand, "too few reads", False)
    found = f"{100 * early:.1f} % in the second fifth, {100 * late:.1f} % in the last"
    return Criterion("hit rate", demand, found, late >= early - bounds.hit_rate_drop)


def none_of(name: str, demand: str, found: Sequence[str] | int) -> Criterion:
    """A count that must be zero, or a list that must be empty."""
    if isinstance(found, int):
        return Criterion(name, demand, f"{found:,}", not found)
    return Criterion(name, demand, "; ".join(found) or "none", not found)


def some_of(name: str, demand: str, found: int) -> Criterion:
    """A count that must not be zero, or the soak has not tried what it is for."""
    return Criterion(name, demand, f"{found:,}", found > 0)
