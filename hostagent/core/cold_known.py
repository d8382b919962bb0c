"""Which objects an agent knows to be in the object store.

Owns: by when each had been committed, and how many bytes those take of which a node answers for the
buckets. Must not know: errands, names of objects, quotas.

All nodes see the same store, and each knows what it has stored and what a listing found. The first
home of a bucket stores what is put in it. So what nodes know of the buckets whose first home they
are adds up to what the store holds, and nothing counts twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from kvcast.protocol.messages.wire import BUCKETS, BlockId, bucket_of


class KnownObjects(Collection[BlockId]):
    """At most `limit`: beyond it, the one that was added first is forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._objects: OrderedDict[BlockId, tuple[float, int]] = OrderedDict()
        self._bytes = [0] * BUCKETS

    def __contains__(self, block: object) -> bool:
        return block in self._objects

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, block: BlockId, since: float, size_bytes: int) -> None:
        """An object is there, which had been committed by `since`, at the latest; of so many bytes,
        its head included; 0 = nobody says."""
        self.remove(block)
        self._objects[block] = since, size_bytes
        self._bytes[bucket_of(block.key)] += size_bytes
        if len(self._objects) > self._limit:
            self.remove(next(iter(self._objects)))

    def remove(self, block: BlockId) -> bool:
        """It is not there, or not to be known; whether it was."""
        found = self._objects.pop(block, None)
        if found is not None:
            self._bytes[bucket_of(block.key)] -= found[1]
        return found is not None

    def since(self, block: BlockId) -> float | None:
        """By when it had been committed; None = it is not known."""
        found = self._objects.get(block)
        return None if found is None else found[0]

    def bytes_in(self, buckets: Collection[int]) -> int:
        """What objects of these buckets take."""
        return sum(self._bytes[bucket] for bucket in buckets)
