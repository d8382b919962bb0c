"""Prefixes across a node's tiers: no block stays in one after the one before it has left them all.

Owns: which blocks a tier gives up last for others' sake, and which go from the others after a block
is gone. Must not know: how a tier keeps its blocks (`store`), or what moves between tiers (`ssd`).

It is about namespaces whose policy knows prefixes (`Policy.PREFIXES`); within a tier the policy
itself sees to it. Where a block has left all tiers, those behind it go from each of them, whatever
made it leave: something in DRAM took its room before it could go down, it is damaged, expired,
dropped, on a disk that fails. They go as soon as nobody is at work in a tier (`settle`). So that
this is rare, the last tier gives a block that lies nowhere else up only after those that no other
tier has blocks behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvcast.hostagent.core.store import Copy, Store
from kvcast.protocol.messages.wire import BlockId


class PrefixClosure:
    """See the module's description. `shelves`: the stores of the tiers below `top`, each with what
    says whether its tier holds a block."""

    def __init__(
        self, top: Store, shelves: Sequence[tuple[Store, Callable[[BlockId], bool]]]
    ) -> None:
        self._top = top
        self._shelves = shelves
        self._stores = (top, *(shelf for shelf, _ in shelves))
        self.orphans: deque[tuple[BlockId, BlockId]] = deque()
        """(what left, who was behind it)."""
        for store in self._stores:
            store.prefixes_elsewhere = self

    def _is_held(self, block: BlockId, but: Store | None = None) -> bool:
        """Whether it lies anywhere on this node, or beyond, but in this tier."""
        top = self._top
        return (
            (top is not but and top.known(block) is not None)
            or any(holds(block) for shelf, holds in self._shelves if shelf is not but)
            or (top.beyond is not None and top.beyond.holds(block))
        )

    def keeps(self, block: BlockId, store: Store) -> bool:
        """As `store.PrefixesElsewhere`."""
        return (
            store is self._stores[-1]
            and any(other.behind(block) for other in self._stores if other is not store)
            and not self._is_held(block, store)
        )

    def left(self, block: BlockId) -> None:
        """As `store.PrefixesElsewhere`."""
        if not self._is_held(block):
            for store in self._stores:
                self.orphans.extend((block, behind) for behind in store.behind(block))

    def settle(self, store: Store) -> None:
        """As `store.PrefixesElsewhere`."""
        while store is self._top and self.orphans:
            parent, block = self.orphans.popleft()
            if self._is_held(parent):
                continue  # it came back
            for each in self._stores:
                copy = each.known(block)
                if copy is not None:
                    each.orphan(copy)

    def pin(self, block: BlockId, store: Store) -> Copy | None:
        """As `store.PrefixesElsewhere`."""
        for shelf, _ in self._shelves if store is self._top else ():
            copy = shelf.known(block)
            if copy is not None:
                shelf.pin(copy)
                return copy
        return None

    def unpin(self, copy: Copy) -> None:
        """As `store.PrefixesElsewhere`."""
        for shelf, _ in self._shelves:
            if shelf.lying_at(copy.offset) is copy:
                shelf.unpin(copy)
