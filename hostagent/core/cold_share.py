"""What a namespace's objects take in an object store, as far as this node answers for it.

Owns: one namespace's quota there, this node's share of it, and the count of what lies in that. Must
not know: errands, names of objects, copies.

An object store belongs to all nodes at once and outlives them, and nobody is asked before an object
is put there. So a quota is divided as the keys are. The first home of a bucket alone stores the
bucket's blocks. It may have one of 1,024 parts of the quota for each bucket of which it is the
first home. Together that is never more than the quota, whoever is slow or dead.

A node counts what a listing found since it became the first home of these buckets, and what it has
stored since. An object counts from before it is sent until it is known to be deleted. It also
counts if the store has not answered, since it may have taken it. What others delete, or the store's
own rules, is found out by the next listing. There is one when there seems to be no room, at most
every `LIST_AGAIN_S`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from kvcast.hostagent.core.store import Copy
from kvcast.protocol.messages.wire import BUCKETS, BlockId, bucket_of

LIST_AGAIN_S: Final = 600.0


class ColdShare:
    """See the module's text. `max_named`: objects that are counted by name; those beyond count
    until the next listing, whatever becomes of them. `under_way`: objects that are being sent, and
    their sizes in bytes."""

    def __init__(self, max_named: int, under_way: Mapping[BlockId, int]) -> None:
        self.quota_bytes = 0
        """Of all nodes."""
        self.taken_bytes = 0
        self.waiting: deque[tuple[Copy, int]] = deque()
        """Copies to store, and their digests, as long as it is not known what there is."""
        self._max_named = max_named
        self._buckets: frozenset[int] = frozenset()
        self._sizes: dict[BlockId, int] = {}
        self._under_way = dict(under_way)
        self._found: dict[BlockId, int] = {}
        self._found_bytes = 0
        self._listing: object | None = None
        self._is_known = False
        self._listed_at = 0.0

    @property
    def most_bytes(self) -> int:
        """This node's part of the quota."""
        return self.quota_bytes * len(self._buckets) // BUCKETS

    @property
    def is_known(self) -> bool:
        """Whether it is known what there is; else a listing is to tell."""
        return self._is_known

    def answers_for(self, block: BlockId) -> bool:
        """Whether this node stores the block, or another does."""
        return bucket_of(block.key) in self._buckets

    def configure(self, quota_bytes: int, buckets: frozenset[int]) -> bool:
        """State the quota of all nodes, and this node's buckets; whether there must be a listing
        that begins after this."""
        self.quota_bytes = quota_bytes
        gained = not buckets <= self._buckets
        if buckets != self._buckets:
            self._buckets = buckets
            lost = [block for block in self._sizes if not self.answers_for(block)]
            self.taken_bytes -= sum(map(self._sizes.pop, lost))
            self._found = self._ours(self._found)  # what was being sent when a listing began
        if gained:
            self._is_known = False
            self._listing = None
        return gained

    # --- listings -----------------------------------------------------------------------------

    def wants_listing(self, now: float) -> bool:
        """Whether it is time to look whether there is room after all."""
        return self._is_known and now >= self._listed_at + LIST_AGAIN_S

    def begin_listing(self, listing: object, now: float) -> None:
        """A listing begins, which may miss what is being sent."""
        self._listing, self._is_known, self._listed_at = listing, False, now
        self._found = self._ours(self._under_way)
        self._found_bytes = 0

    def _ours(self, sizes: Mapping[BlockId, int]) -> dict[BlockId, int]:
        """Those that this node answers for."""
        return {block: size for block, size in sizes.items() if self.answers_for(block)}

    def found(self, block: BlockId, size_bytes: int) -> None:
        """It names an object."""
        if self._listing is None or not self.answers_for(block):
            return
        if block in self._found or len(self._found) < self._max_named:
            self._found[block] = size_bytes
        else:
            self._found_bytes += size_bytes

    def awaits(self, listing: object) -> bool:
        """Whether this is the listing that will tell."""
        return listing is self._listing

    def listed(self) -> None:
        """The listing has come to its end."""
        self._listing, self._is_known = None, True
        self._sizes, self._found = self._found, {}
        self.taken_bytes = sum(self._sizes.values()) + self._found_bytes

    # --- objects ------------------------------------------------------------------------------

    def has_room(self, block: BlockId, size_bytes: int) -> bool:
        """Whether an object may be sent."""
        return self.taken_bytes - self._sizes.get(block, 0) + size_bytes <= self.most_bytes

    def sending(self, block: BlockId, size_bytes: int) -> None:
        """An object is sent."""
        self.taken_bytes += size_bytes - self._sizes.pop(block, 0)
        self._under_way[block] = self._sizes[block] = size_bytes
        if len(self._sizes) > self._max_named:
            del self._sizes[next(iter(self._sizes))]

    def sent(self, block: BlockId) -> None:
        """Whatever came of it, nothing more comes."""
        self._under_way.pop(block, None)

    def gone(self, block: BlockId) -> None:
        """There is no such object any more."""
        if block not in self._under_way:
            self.taken_bytes -= self._sizes.pop(block, 0)
            self._found.pop(block, None)
