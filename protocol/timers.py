"""A queue of timers that are re-armed far more often than they fire.

Owns: which timer is due next. Must not know: what a timer is for, or the clock.

A timer whose due time moves later is not touched in the queue: it comes up at its old time, and
whoever handles it sees that it is not due yet and arms it anew. So the cost of progress (a DATA
frame that puts its segment's retry off) is one assignment in the caller.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import Final

_COMPACT_ABOVE: Final = 1024
"""Stale entries are swept out when they exceed the live ones, from this length on."""


class Timer:
    """Something that can be armed; subclasses say what for."""

    __slots__ = ("queued_at",)

    def __init__(self) -> None:
        self.queued_at = inf
        """When the queue will bring this timer up; inf if it will not."""


class TimerQueue:
    """Timers by the time at which they come up. At most one live entry a timer."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def arm(self, timer: Timer, when: float) -> None:
        """Bring `timer` up at `when`, or sooner if it is already queued for a sooner time."""
        if when >= timer.queued_at:
            return
        if timer.queued_at == inf:
            self._live += 1
        timer.queued_at = when
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, timer))
        if len(self._heap) > _COMPACT_ABOVE and len(self._heap) > 2 * self._live:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].queued_at]
            heapq.heapify(self._heap)

    def cancel(self, timer: Timer) -> None:
        """Do not bring `timer` up; no effect if it is not queued."""
        if timer.queued_at != inf:
            timer.queued_at = inf
            self._live -= 1

    def next_at(self) -> float | None:
        """When the next timer comes up, None if none is queued."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].queued_at:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> Timer | None:
        """A timer that has come up by `now`, taken out of the queue; None if there is none."""
        when = self.next_at()
        if when is None or when > now:
            return None
        timer = heapq.heappop(self._heap)[2]
        self.cancel(timer)
        return timer
