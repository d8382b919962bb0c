"""What a connector counts: totals by name and reason, and how long loads took.

Owns: the names, and that counts of several workers and steps add up. Must not know: who shows them.
A count's key is "name" or "name|label=value", so that it survives any serialisation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

LOAD_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the classes in which loads are shown by how long they took."""
MOST_TIMES: Final = 1024
"""Loads whose times are kept between two looks; of more, only the last are."""

NAMES: Final[dict[str, tuple[str, str]]] = {
    "lookups": ("", "questions to the pool about a prompt's chain"),
    "lookups_failed": ("reason", "requests that were computed because that was not answered"),
    "awaits_failed": ("", "requests whose prompt another engine did not compute in time"),
    "loads": ("", "requests for which blocks were loaded"),
    "loads_by_layers": ("", "of these, loads during which the engine computed"),
    "layer_wait_seconds": ("", "how long steps have waited for layers that were being loaded"),
    "failed_loads": ("reason", "loads of which not all came; the rest was computed"),
    "weighed": ("verdict", "requests by how loading their blocks compared with computing them"),
    "prefixes": ("outcome", "prefixes that the pool held, by how much of each was loaded"),
    "load_blocks": ("tier", "engine blocks that came from the pool, by the slowest tier of each"),
    "load_bytes": ("", "bytes that came from the pool"),
    "miss_blocks": ("reason", "engine blocks that were not loaded"),
    "corrupt_blocks": ("", "blocks whose bytes were not those that were stored"),
    "save_blocks": ("", "engine blocks that were saved"),
    "save_bytes": ("", "bytes that were saved"),
    "save_failures": ("reason", "engine blocks that were not saved"),
    "saves_delayed": ("", "steps in which saves waited because too much was being saved"),
}
"""Every count: its label's name ("" for none), and what it counts."""

GAUGES: Final[dict[str, str]] = {
    "load_block_seconds": "what a block takes of late that comes from the pool",
    "compute_block_seconds": "what it takes of late to compute a block",
    "load_came_share": "share of the blocks that came, of those that were asked for of late",
}
"""What is no count but a present value, by name."""


class Counters:
    """Counts since they were last taken. Any thread may count."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._times_s: deque[float] = deque(maxlen=MOST_TIMES)
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1, **label: str) -> None:
        """Count; `label` is the one that `NAMES` gives the name, if it has one."""
        wanted, _ = NAMES[name]
        assert tuple(label) == ((wanted,) if wanted else ()), (name, label)
        if not amount:
            return
        key = name if not label else f"{name}|{wanted}={label[wanted]}"
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + amount

    def add_load_time(self, seconds: float) -> None:
        """A load took so long."""
        self._times_s.append(seconds)

    def take(self) -> dict[str, float]:
        """The counts, which begin anew."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    def take_times(self) -> list[float]:
        """How long loads took, in seconds, since the last call."""
        times = []
        while self._times_s:
            times.append(self._times_s.popleft())
        return times


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """The sums of two sets of counts."""
    sums = dict(one)
    for key, amount in other.items():
        sums[key] = sums.get(key, 0) + amount
    return sums


def split(key: str) -> tuple[str, str]:
    """A count's name and its label's value ("" for none)."""
    name, _, label = key.partition("|")
    return name, label.partition("=")[2]
