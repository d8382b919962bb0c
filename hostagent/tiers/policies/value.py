"""Value: rate of use x cost of computing a block again / its size; and no prefix without its
beginning.

GreedyDual-Size-Frequency (Cherkasova, HP Laboratories 1998), over the ends of prefixes only. A
block of a prefix is of use only with all blocks before it. So what has held blocks behind it stays,
and of the others the one of least value goes: a prefix is given up from its end. Where an ancestor
has to go all the same, `descendants` says what is of no use any more. A block whose ancestor lies
elsewhere, or is not known, begins a prefix here.

Blocks of a prefix may come in any order: whoever came before the one before it is behind that one
as soon as it is there. What is said of a prefix is believed as far as blocks that are behind others
are deeper than these, so nothing can be behind itself.

A block's value is `base + uses x cost / size`. The base is the value of what was evicted last when
the block was last used; so uses of long ago count for less the more has been evicted since, which
makes a rate of them without a constant to set for a fast or a slow pool. Computing a token takes a
fixed part, and one that grows with the tokens before it (attention); and a namespace's KV is
equally many bytes a token. So cost / size is, but for a factor that changes nothing, 1 + depth /
`twice_at_blocks`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from typing import ClassVar, Final, Generic

from kvcast.hostagent.tiers.policies.base import K, Policy, Search, Verdict

TWICE_AT_BLOCKS: Final = 128
"""Depth at which computing a block takes twice as long as at the beginning: 32,768 tokens, in
blocks of 256. A model of 8 billion parameters takes 16e9 operations a token, and, with 32 layers of
4,096, another 0.5e6 for each token before it."""
_LEAST_HEAP: Final = 64


class _Block(Generic[K]):
    __slots__ = ("base", "children", "depth", "entry", "parent", "uses")

    def __init__(self, parent: K | None, depth: int, base: float) -> None:
        self.parent = parent
        self.children: dict[K, None] = {}
        self.depth = depth
        self.uses = 1
        self.base = base
        self.entry = 0
        """The number of its entry in the heap that counts; 0 = none does."""


class Value(Policy[K]):
    """See the module's description."""

    NAME: ClassVar[str] = "value"
    PREFIXES: ClassVar[bool] = True

    def __init__(self, capacity_bytes: int, twice_at_blocks: int = TWICE_AT_BLOCKS) -> None:
        super().__init__(capacity_bytes)
        self._twice_at = twice_at_blocks
        self._blocks: dict[K, _Block[K]] = {}
        self._heap: list[tuple[float, int, K]] = []
        """(value, number, block) of the ends of prefixes; entries that do not count any more lie
        among them until they come up, or are more than half."""
        self._waiting: dict[K, dict[K, None]] = {}
        """By the block before them, which is not here: who is behind it as soon as it comes."""
        self._numbers = itertools.count(1)
        self._base = 0.0

    def _value(self, state: _Block[K]) -> float:
        return state.base + state.uses * (1.0 + state.depth / self._twice_at)

    def _offer(self, block: K, state: _Block[K]) -> None:
        """An end of a prefix, or one whose value changed: it may be chosen."""
        if state.children:
            state.entry = 0
            return
        if len(self._heap) > _LEAST_HEAP + 2 * len(self._blocks):
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)
        state.entry = next(self._numbers)
        heapq.heappush(self._heap, (self._value(state), state.entry, block))

    def _counts(self, entry: tuple[float, int, K]) -> bool:
        state = self._blocks.get(entry[2])
        return state is not None and state.entry == entry[1]

    def inserted(self, block: K, size_bytes: int, parent: K | None = None, depth: int = 0) -> None:
        above = self._blocks.get(parent) if parent is not None else None
        state: _Block[K] = _Block(parent, depth, self._base)
        for child in self._waiting.pop(block, ()):
            if self._blocks[child].depth > depth:
                state.children[child] = None
            else:
                self._blocks[child].parent = None
        self._blocks[block] = state
        if parent is not None and above is None and parent != block:
            self._waiting.setdefault(parent, {})[block] = None
        elif above is not None and above.depth < depth:
            above.children[block] = None
            above.entry = 0
        else:
            state.parent = None
        self._offer(block, state)

    def hit(self, block: K, times: int = 1) -> None:
        state = self._blocks[block]
        state.uses += times
        state.base = self._base
        self._offer(block, state)

    def freed(self, block: K) -> None:
        state = self._blocks[block]
        if not state.entry:
            self._offer(block, state)

    def removed(self, block: K) -> None:
        state = self._blocks.pop(block)
        if state.children:
            self._waiting[block] = state.children
        if state.parent is None:
            return
        above = self._blocks.get(state.parent)
        if above is not None:
            del above.children[block]
            self._offer(state.parent, above)
        else:
            waiting = self._waiting[state.parent]
            del waiting[block]
            if not waiting:
                del self._waiting[state.parent]

    def evicted(self, block: K) -> None:
        self._base = max(self._base, self._value(self._blocks[block]))
        self.removed(block)

    def choose(self, search: Search[K]) -> K | None:
        unsuitable: list[tuple[float, int, K]] = []
        chosen = None
        while self._heap and not search.given_up:
            entry = self._heap[0]
            if self._counts(entry):
                verdict = search.verdict(entry[2])
                if verdict is Verdict.GO:
                    chosen = entry[2]
                    break
                if verdict is Verdict.UNSUITABLE:
                    unsuitable.append(entry)
                else:
                    self._blocks[entry[2]].entry = 0
            heapq.heappop(self._heap)
        for entry in unsuitable:
            heapq.heappush(self._heap, entry)
        return chosen

    def descendants(self, block: K) -> list[K]:
        found = [block]
        for one in found:
            found += self._blocks[one].children
        return found[1:]

    def behind(self, block: K) -> Collection[K]:
        return self._waiting.get(block, ())

    def blocks(self) -> Collection[K]:
        return self._blocks.keys()
