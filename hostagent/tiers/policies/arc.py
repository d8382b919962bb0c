"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), over blocks of any size.

Two LRU queues of held blocks: T1 of those used once, T2 of those used again; two of ghosts, B1 and
B2, that remember what went from each. A ghost that comes back says which of the two had deserved
more room: `_target_bytes`, the paper's p, is what T1 is to take. T1 and B1 together take at most
the capacity, all four together twice that.

Sizes instead of pages: where the paper's p moves by max(1, |B2|/|B1|) pages, it moves by so many
times the size of the block that came back. With blocks of one size that is the paper's algorithm.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from kvcast.hostagent.tiers.policies.base import K, Policy, Queue, Search
from kvcast.hostagent.tiers.policies.ghosts import Ghosts


class Arc(Policy[K]):
    """See the module's description."""

    NAME: ClassVar[str] = "arc"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._once: Queue[K] = Queue()
        self._again: Queue[K] = Queue()
        self._once_ghosts: Ghosts[K] = Ghosts()
        self._again_ghosts: Ghosts[K] = Ghosts()
        self._target_bytes = 0.0
        self._expected_bytes = 0
        self._was_ghost_of: Queue[K] | None = None
        """From where the block that is expected just now went, if it is remembered."""

    def _queue_of(self, block: K) -> Queue[K]:
        return self._once if block in self._once else self._again

    def expected(self, block: K, size_bytes: int) -> None:
        self._expected_bytes = size_bytes
        self._was_ghost_of = None
        once_bytes, again_bytes = self._once_ghosts.size_bytes, self._again_ghosts.size_bytes
        if self._once_ghosts.expect(block):
            step = size_bytes * max(1.0, again_bytes / once_bytes)
            self._target_bytes = min(self._target_bytes + step, self.capacity_bytes)
            self._was_ghost_of = self._once
        elif self._again_ghosts.expect(block):
            step = size_bytes * max(1.0, once_bytes / again_bytes)
            self._target_bytes = max(self._target_bytes - step, 0.0)
            self._was_ghost_of = self._again

    def inserted(self, block: K, size_bytes: int, parent: K | None = None, depth: int = 0) -> None:
        back = self._once_ghosts.returned(block) or self._again_ghosts.returned(block)
        (self._again if back else self._once).push(block, size_bytes)
        self._was_ghost_of = None
        self._expected_bytes = 0

    def hit(self, block: K, times: int = 1) -> None:
        if block in self._again:
            self._again.to_end(block)
        elif times:
            self._again.push(block, self._once.remove(block))
        else:
            self._once.to_end(block)

    def freed(self, block: K) -> None:
        self._queue_of(block).restore(block)

    def removed(self, block: K) -> None:
        self._queue_of(block).remove(block)

    def choose(self, search: Search[K]) -> K | None:
        # The paper's REPLACE; or, where T1 alone takes all, and nothing remembered makes room, T1.
        once_bytes = self._once.size_bytes
        full = self._was_ghost_of is None and self._once_is_full() and not len(self._once_ghosts)
        from_once = once_bytes > 0 and (
            full
            or once_bytes > self._target_bytes
            or (once_bytes == self._target_bytes and self._was_ghost_of is self._again)
        )
        order = (self._once, self._again) if from_once else (self._again, self._once)
        chosen = order[0].choose(search)
        if chosen is None and not search.given_up:
            chosen = order[1].choose(search)
        return chosen

    def _once_is_full(self) -> bool:
        """Whether T1, B1 and the expected block exceed the capacity."""
        mine = self._once.size_bytes + self._once_ghosts.size_bytes
        return mine + self._expected_bytes > self.capacity_bytes

    def _all_bytes(self) -> int:
        queues = (self._once, self._again, self._once_ghosts, self._again_ghosts)
        return sum(queue.size_bytes for queue in queues)

    def evicted(self, block: K) -> None:
        remember = True
        if self._was_ghost_of is None:
            if self._once_is_full():
                remember = len(self._once_ghosts) > 0 or block in self._again
                if len(self._once_ghosts):
                    self._once_ghosts.pop()
            elif self._all_bytes() >= 2 * self.capacity_bytes and len(self._again_ghosts):
                self._again_ghosts.pop()
        if block in self._once:
            size_bytes = self._once.remove(block)
            if remember:
                self._once_ghosts.push(block, size_bytes)
        else:
            self._again_ghosts.push(block, self._again.remove(block))
        self._once_ghosts.trim(self.capacity_bytes)
        held_bytes = self._once.size_bytes + self._again.size_bytes + self._once_ghosts.size_bytes
        self._again_ghosts.trim(2 * self.capacity_bytes - held_bytes)

    def blocks(self) -> Collection[K]:
        return {*self._once.blocks(), *self._again.blocks()}
