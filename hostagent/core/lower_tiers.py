"""Tiers below DRAM, one below the other: further arenas in their order, and the disk.

Owns: how the tiers are one to the store above them. Must not know: what moves between two of them
(`ssd`: to each tier, what lies above it is a store as DRAM is), or where their bytes lie.

A block that leaves DRAM goes to the first of them, one that leaves that tier to the next; one that
is read comes to DRAM from wherever it lies, and stays there, too, as long as there is room. So it
moves up by being read, and down by not being used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvcast.hostagent.core.prefix_closure import PrefixClosure
from kvcast.hostagent.core.ssd import SsdTier
from kvcast.hostagent.core.store import Copy, Store
from kvcast.hostagent.tiers.counting_filter import CountingFilter
from kvcast.protocol.messages.wire import BlockId


class LowerTiers:
    """The tiers below a store, the nearest first; its `Below`."""

    def __init__(self, tiers: Sequence[SsdTier]) -> None:
        assert tiers
        self._tiers = list(tiers)
        self._is_filtered = False

    @property
    def is_counted(self) -> bool:
        """As `store.Below`."""
        return self._is_filtered and all(tier.is_ready for tier in self._tiers)

    def holds(self, block: BlockId) -> bool:
        """As `store.Below`."""
        return any(tier.holds(block) for tier in self._tiers)

    def size_of(self, block: BlockId) -> int:
        """As `store.Below`."""
        return max(tier.size_of(block) for tier in self._tiers)

    def place_of(self, block: BlockId) -> tuple[bytes, int]:
        """As `store.Below`."""
        places = (tier.place_of(block) for tier in self._tiers)
        return next((place for place in places if any(place)), (b"", 0))

    def advance(self, now: float) -> None:
        """As `store.Below`."""
        for tier in self._tiers:
            tier.advance(now)

    def committed(self, copy: Copy) -> None:
        """As `store.Below`."""
        for tier in self._tiers:
            tier.committed(copy)

    def evicting(self, copy: Copy) -> None:
        """As `store.Below`."""
        if not self.holds(copy.block):
            self._tiers[0].evicting(copy)

    def drop(self, block: BlockId) -> bool:
        """As `store.Below`."""
        dropped = [tier.drop(block) for tier in self._tiers]  # from each
        return any(dropped)

    def drop_namespace(self, namespace: int, *, at_once: bool) -> None:
        """As `store.Below`."""
        for tier in self._tiers:
            tier.drop_namespace(namespace, at_once=at_once)

    def why_gone(self, block: BlockId) -> str:
        """As `store.Below`."""
        return next(filter(None, (tier.why_gone(block) for tier in reversed(self._tiers))), "")

    def counted(self) -> CountingFilter:
        """A filter of all that lies in any of them, from now on."""
        of_all = CountingFilter(sum(tier.most_blocks for tier in self._tiers))
        for tier in self._tiers:
            tier.use_filter(of_all)
        self._is_filtered = True
        return of_all

    def blocks(self) -> Iterable[BlockId]:
        """All that lies in any of them; some more than once."""
        return itertools.chain.from_iterable(tier.shelf.blocks() for tier in self._tiers)


def put_below(store: Store, tiers: Sequence[SsdTier]) -> LowerTiers:
    """Have copies of a store go to the first of these tiers, and from each to the next."""
    for number, tier in enumerate(tiers[:-1]):
        tier.shelf.below = LowerTiers(tiers[number + 1 :])
        tiers[number + 1].above = tier
    PrefixClosure(store, [(tier.shelf, tier.holds) for tier in tiers])
    below = store.below = LowerTiers(tiers)
    return below
