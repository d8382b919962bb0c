"""Least recently used: what was not used for the longest time goes first. A block is in use as long
as it is pinned."""

from __future__ import annotations

from typing import ClassVar

from kvcast.hostagent.tiers.policies.base import K, QueuePolicy


class Lru(QueuePolicy[K]):
    """See the module's description."""

    NAME: ClassVar[str] = "lru"

    def hit(self, block: K, times: int = 1) -> None:
        self.queue.to_end(block)

    def freed(self, block: K) -> None:
        self.queue.to_end(block)
