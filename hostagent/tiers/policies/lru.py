"""Least recently used: what was not used for the longest time goes first. A block is in use as long
as it is pinned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import ClassVar

from kvcast.hostagent.tiers.policies.base import K, Policy, Search, Verdict


class Lru(Policy[K]):
    """See the module's description. The default, so it does no more than it must."""

    NAME: ClassVar[str] = "lru"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._order: OrderedDict[K, None] = OrderedDict()

    def inserted(self, block: K, size_bytes: int, parent: K | None = None, depth: int = 0) -> None:
        self._order[block] = None

    def hit(self, block: K, times: int = 1) -> None:
        self._order.move_to_end(block)

    def freed(self, block: K) -> None:
        self._order.move_to_end(block)

    def removed(self, block: K) -> None:
        del self._order[block]

    def choose(self, search: Search[K]) -> K | None:
        pinned: list[K] = []
        chosen = None
        for block in self._order:
            verdict = search.verdict(block)
            if verdict is Verdict.GO:
                chosen = block
                break
            if verdict is Verdict.PINNED:
                pinned.append(block)
            elif search.given_up:
                break
        for block in pinned:  # they are in use
            self._order.move_to_end(block)
        return chosen

    def blocks(self) -> Collection[K]:
        return self._order.keys()
