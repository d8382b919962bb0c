"""Who holds which block of a prompt: one table for all engines, and what it says of a chain.

Owns: the table, its bound, and what is merely expected. Must not know: engines, costs, tokens.

A block's *holders* are the bits of one number, so that a look-up of a long chain is one dictionary
access a block, however many engines there are. Chained hashes make a tree unnecessary: a hash names
the whole prefix, so the blocks of a chain are looked up one by one until nobody holds one.

Memory is bounded by `max_blocks`: the table has a young and an old half, what is stored or looked
up moves to the young one, and when that is full the old one is forgotten. What is forgotten
although an engine holds it costs hits, never bytes; `forgotten_total` counts it.

What a request that was sent will leave behind is known before any event says so, and the next
request with that prefix may come before the event. So a choice is noted as *expected* for a while:
it counts as held until an event confirms it, or its time is over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvcast.routing.core.hashing import Chain

_MAX_DEAD_BITS: Final = 32
"""Holders that were cleared and whose bits still stand in the table, before it is swept."""


@dataclass(frozen=True, slots=True)
class Run:
    """`blocks` blocks in a row of a chain that the same holders have (bits of `holders`)."""

    holders: int
    blocks: int


class PrefixIndex:
    """Holders are numbers that `add_holder` gives."""

    def __init__(self, max_blocks: int = 2_000_000, max_expected: int = 500_000) -> None:
        if max_blocks < 2 or max_expected < 1:
            raise ValueError("an index needs room for two blocks, and one that is expected")
        self._half = max_blocks // 2
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._bits: dict[int, int] = {}
        """Holder -> its bit's position now; `clear` gives it another."""
        self._live = 0
        self._dead = 0
        self._max_expected = max_expected
        self._expected: OrderedDict[tuple[int, int], float] = OrderedDict()
        """(block, holder) -> until when; the oldest first."""
        self._expecting: dict[int, dict[int, float]] = {}
        self._next_holder = 0
        self.forgotten_total = 0
        """Blocks that somebody held when the bound made the table forget them."""
        self.sweeps_total = 0

    def __len__(self) -> int:
        """Blocks in the table; those that nobody holds any more are among them for a while."""
        return len(self._young) + len(self._old)

    @property
    def expected(self) -> int:
        """Pairs of block and holder that are expected, and not confirmed."""
        return len(self._expected)

    def add_holder(self) -> int:
        """A new holder, which holds nothing."""
        holder = self._next_holder
        self._next_holder += 1
        self._bits[holder] = self._free_bit()
        self._live |= 1 << self._bits[holder]
        return holder

    def stored(self, holder: int, blocks: Iterable[int]) -> None:
        """This holder has these blocks now."""
        bit = 1 << self._bits[holder]
        for block in blocks:
            self._young[block] = self._take(block) | bit
            self._unexpect(block, holder)
            if len(self._young) >= self._half:
                self._turn()

    def removed(self, holder: int, blocks: Iterable[int]) -> None:
        """This holder has these blocks no longer."""
        bit = 1 << self._bits[holder]
        for block in blocks:
            for half in (self._young, self._old):
                holders = half.get(block, 0)
                if holders & bit:
                    half[block] = holders & ~bit
                    if not half[block] & self._live:
                        del half[block]
            self._unexpect(block, holder)

    def clear(self, holder: int) -> None:
        """This holder has nothing any more, nor is anything expected of it."""
        self._live &= ~(1 << self._bits[holder])
        self._dead |= 1 << self._bits[holder]
        self._bits[holder] = self._free_bit()
        self._live |= 1 << self._bits[holder]
        for pair in [pair for pair in self._expected if pair[1] == holder]:
            self._unexpect(*pair)

    def expect(self, holder: int, blocks: Iterable[int], until: float) -> None:
        """Take these blocks for this holder's until then, or until an event says so."""
        bit = 1 << self._bits[holder]
        for block in blocks:
            if (self._young.get(block, 0) | self._old.get(block, 0)) & bit:
                continue
            self._expected[block, holder] = until
            self._expected.move_to_end((block, holder))
            self._expecting.setdefault(block, {})[holder] = until
            if len(self._expected) > self._max_expected:
                self._unexpect(*next(iter(self._expected)))

    def unexpect(self, holder: int, blocks: Iterable[int]) -> None:
        """Expect these blocks of this holder no longer."""
        for block in blocks:
            self._unexpect(block, holder)

    def runs(self, chain: Chain, now: float) -> list[Run]:
        """The chain's beginning as runs of the same holders, up to the first block that nobody
        holds. Holders are those of `bit_of`."""
        self._expire(now)
        found: list[Run] = []
        last, count = 0, 0
        for block in chain:
            holders = self._look_up(block)
            if not holders:
                break
            if holders != last:
                if count:
                    found.append(Run(last, count))
                last, count = holders, 0
            count += 1
        if count:
            found.append(Run(last, count))
        return found

    def bit_of(self, holder: int) -> int:
        """The holder's bit in `Run.holders`; valid until the next change."""
        return 1 << self._bits[holder]

    # --- the table ------------------------------------------------------------------------------

    def _look_up(self, block: int) -> int:
        holders = self._young.get(block)
        if holders is None:
            holders = self._old.pop(block, 0) & self._live
            if holders:
                self._young[block] = holders
                if len(self._young) >= self._half:
                    self._turn()
        else:
            holders &= self._live
        for holder in self._expecting.get(block, ()):
            holders |= 1 << self._bits[holder]
        return holders

    def _take(self, block: int) -> int:
        held = self._old.pop(block, 0) | self._young.get(block, 0)
        return held & self._live

    def _turn(self) -> None:
        """The young half is full: the old one goes."""
        live = self._live
        self.forgotten_total += sum(1 for holders in self._old.values() if holders & live)
        self._old, self._young = self._young, {}

    def _free_bit(self) -> int:
        if self._dead.bit_count() >= _MAX_DEAD_BITS:
            self._sweep()
        taken = self._live | self._dead
        return (~taken & (taken + 1)).bit_length() - 1

    def _sweep(self) -> None:
        """Take the dead bits out of the table, so that they can be used again."""
        live = self._live
        self._young = {block: held & live for block, held in self._young.items() if held & live}
        self._old = {block: held & live for block, held in self._old.items() if held & live}
        self._dead = 0
        self.sweeps_total += 1

    # --- what is expected -----------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        while self._expected:
            pair, until = next(iter(self._expected.items()))
            if until > now:
                break
            self._unexpect(*pair)

    def _unexpect(self, block: int, holder: int) -> None:
        if self._expected.pop((block, holder), None) is None:
            return
        holders = self._expecting[block]
        del holders[holder]
        if not holders:
            del self._expecting[block]
