"""Time to live: a block is gone `ttl_s` after its last use, as in the prompt caches of inference
providers. What would be the next to be gone goes first where room is wanted.

Every block lives equally long, so the order in which they expire is that of their last uses.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, Final

from kvcast.hostagent.tiers.policies.base import K, QueuePolicy

DEFAULT_TTL_S: Final = 3600.0


class Ttl(QueuePolicy[K]):
    """See the module's description. `ttl_s` may be changed at any time."""

    NAME: ClassVar[str] = "ttl"
    AGES: ClassVar[bool] = True

    def __init__(self, capacity_bytes: int, ttl_s: float = DEFAULT_TTL_S) -> None:
        super().__init__(capacity_bytes)
        self.ttl_s = ttl_s
        self._used_at: OrderedDict[K, float] = OrderedDict()
        """The longest ago first; pinned ones, too: to be held is not to be used."""

    def inserted(self, block: K, size_bytes: int, parent: K | None = None, depth: int = 0) -> None:
        super().inserted(block, size_bytes, parent, depth)
        self._used_at[block] = self.now

    def hit(self, block: K, times: int = 1) -> None:
        self.queue.to_end(block)
        self._used_at[block] = self.now
        self._used_at.move_to_end(block)

    def removed(self, block: K) -> None:
        super().removed(block)
        del self._used_at[block]

    def next_expiry(self) -> float | None:
        oldest = next(iter(self._used_at.values()), None)
        return None if oldest is None else oldest + self.ttl_s

    def expired(self) -> K | None:
        oldest = next(iter(self._used_at), None)
        if oldest is not None and self._used_at[oldest] + self.ttl_s <= self.now:
            return oldest
        return None
