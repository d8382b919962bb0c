"""Least frequently used: what was used the fewest times since it came goes first; of those, what
has been used so often for the longest time. Perfect counts, no ageing: a block that was hot once
stays."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from typing import ClassVar

from kvcast.hostagent.tiers.policies.base import K, Policy, Queue, Search


class Lfu(Policy[K]):
    """See the module's description."""

    NAME: ClassVar[str] = "lfu"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._uses: dict[K, int] = {}
        self._queues: dict[int, Queue[K]] = {}
        """By uses; none of them empty."""
        self._levels: list[int] = []
        """The keys of `_queues`, ascending."""

    def _push(self, block: K, uses: int, size_bytes: int) -> None:
        self._uses[block] = uses
        queue = self._queues.get(uses)
        if queue is None:
            queue = self._queues[uses] = Queue()
            insort(self._levels, uses)
        queue.push(block, size_bytes)

    def _take(self, block: K) -> tuple[int, int]:
        uses = self._uses.pop(block)
        queue = self._queues[uses]
        size_bytes = queue.remove(block)
        if not len(queue):
            del self._queues[uses]
            del self._levels[bisect_left(self._levels, uses)]
        return uses, size_bytes

    def inserted(self, block: K, size_bytes: int, parent: K | None = None, depth: int = 0) -> None:
        self._push(block, 1, size_bytes)

    def hit(self, block: K, times: int = 1) -> None:
        if times:
            uses, size_bytes = self._take(block)
            self._push(block, uses + times, size_bytes)

    def freed(self, block: K) -> None:
        self._queues[self._uses[block]].restore(block)

    def removed(self, block: K) -> None:
        self._take(block)

    def choose(self, search: Search[K]) -> K | None:
        for uses in self._levels:
            chosen = self._queues[uses].choose(search)
            if chosen is not None or search.given_up:
                return chosen
        return None

    def blocks(self) -> Collection[K]:
        return self._uses.keys()
