"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

Three queues, first in first out: new blocks come into a small one; those that were used more than
once there go on to the main one, the others go, and are remembered as ghosts. A block that comes
back while it is remembered goes into the main queue at once. There, who was used meanwhile gets as
many further rounds as it was used, three at most.

As the paper has it: the small queue takes a tenth, the ghosts are of as many bytes as the main
queue may take, uses are counted up to 3, and start anew in the main queue. As the authors'
simulator has it (libCacheSim), which the paper leaves open: until something had to go for the first
time, what the small queue's tenth has no room for goes into the main queue.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Final

from kvcast.hostagent.tiers.policies.base import K, Policy, Queue, Search, Verdict
from kvcast.hostagent.tiers.policies.ghosts import Ghosts

_SMALL_SHARE: Final = 0.1
_GHOST_SHARE: Final = 0.9
_MOST_USES: Final = 3
_USES_TO_STAY: Final = 2


class S3Fifo(Policy[K]):
    """See the module's description."""

    NAME: ClassVar[str] = "s3fifo"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._small: Queue[K] = Queue()
        self._main: Queue[K] = Queue()
        self._uses: dict[K, int] = {}
        self._ghosts: Ghosts[K] = Ghosts()
        self._was_full = False

    @property
    def _small_share_bytes(self) -> int:
        return int(self.capacity_bytes * _SMALL_SHARE)

    def _queue_of(self, block: K) -> Queue[K]:
        return self._small if block in self._small else self._main

    def expected(self, block: K, size_bytes: int) -> None:
        self._ghosts.expect(block)

    def inserted(self, block: K, size_bytes: int, parent: K | None = None, depth: int = 0) -> None:
        early = not self._was_full and self._small.size_bytes >= self._small_share_bytes
        queue = self._main if self._ghosts.returned(block) or early else self._small
        queue.push(block, size_bytes)
        self._uses[block] = 0

    def hit(self, block: K, times: int = 1) -> None:
        self._uses[block] = min(_MOST_USES, self._uses[block] + times)

    def freed(self, block: K) -> None:
        self._queue_of(block).restore(block)

    def removed(self, block: K) -> None:
        del self._uses[block]
        self._queue_of(block).remove(block)

    def evicted(self, block: K) -> None:
        self._was_full = True
        if block in self._small:
            size_bytes = self._small.remove(block)
            self._ghosts.push(block, size_bytes)
            self._ghosts.trim(int(self.capacity_bytes * _GHOST_SHARE))
        else:
            self._main.remove(block)
        del self._uses[block]

    def choose(self, search: Search[K]) -> K | None:
        small, main = self._small, self._main
        unsuitable: list[tuple[Queue[K], K]] = []
        chosen = None
        queue = main
        while chosen is None and not search.given_up:
            # Once it is the small queue's turn, it is until something there may go.
            if queue is main or small.head is None:
                share = self.capacity_bytes - self._small_share_bytes
                over = main.size_bytes > share and main.head is not None
                queue = main if over or small.head is None else small
            block = queue.head
            if block is None:
                break
            uses = self._uses[block]
            if queue is small and uses >= _USES_TO_STAY:
                main.push(block, small.remove(block))
                self._uses[block] = 0
            elif queue is main and uses:
                main.to_end(block)
                self._uses[block] = uses - 1
            else:
                verdict = search.verdict(block)
                if verdict is Verdict.GO:
                    chosen = block
                    continue
                queue.set_aside(block)
                if verdict is Verdict.UNSUITABLE:
                    unsuitable.append((queue, block))
        for queue, block in unsuitable:
            queue.restore(block)
        return chosen

    def blocks(self) -> Collection[K]:
        return self._uses.keys()
