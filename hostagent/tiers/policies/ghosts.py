"""Blocks that went, and are remembered for a while by their names and sizes alone."""

from __future__ import annotations

from typing import Final

from kvcast.hostagent.tiers.policies.base import K, Queue
from kvcast.protocol.bounded_map import BoundedMap

MAX_GHOSTS: Final = 1 << 17
"""Of one queue, whatever their sizes: some 20 MB. Beyond it the oldest is forgotten."""


MAX_RETURNING: Final = 4096
"""Ghosts that were expected back and have not come yet; beyond it the oldest comes as a new
block."""


class Ghosts(Queue[K]):
    """The queue of them: who went first is forgotten first."""

    def __init__(self) -> None:
        super().__init__()
        self._returning: BoundedMap[K, None] = BoundedMap(MAX_RETURNING)

    def expect(self, block: K) -> bool:
        """Whether this block was a ghost. If so, it is none any more, but known until it comes."""
        if block not in self:
            return False
        self.remove(block)
        self._returning[block] = None
        return True

    def returned(self, block: K) -> bool:
        """A block has come: whether it was a ghost."""
        if block in self:
            self.remove(block)
            return True
        if block in self._returning:
            del self._returning[block]
            return True
        return False

    def trim(self, size_bytes: int) -> None:
        """Remember the youngest of together at most so many bytes."""
        while len(self) and (self.size_bytes > max(0, size_bytes) or len(self) > MAX_GHOSTS):
            self.pop()
