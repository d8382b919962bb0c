"""Which blocks may lie below DRAM, as compiled code can ask: a filter that counts.

Owns: the counters, and which of them are a block's. Must not know: who adds blocks, or where they
lie. Of a block that was added and not removed it never says that it is not there; of another it
says now and then that it may be.

A block has two counters of a byte each, by the hash that the shared index finds its buckets with
(`kvcast.protocol.messages.shared`), and may be there where neither is 0. A counter that has come to
255 stays there: how many blocks it counts is not known any more.
"""

from __future__ import annotations

import mmap
from typing import Final

from kvcast.protocol.messages import shared
from kvcast.protocol.messages.wire import BlockId

COUNTERS_A_BLOCK: Final = 2
"""With as many blocks as there can be, it is wrong of 40 % of others; with half of them, of 15 %;
with a quarter, of 5 %: most blocks take more than the least that one can."""
_MIN_BITS: Final = 12
_MAX_BITS: Final = 28
_FULL: Final = 255


class CountingFilter:
    """For up to `most_blocks` blocks; of more, and beyond 2^27, it is wrong more often."""

    def __init__(self, most_blocks: int = 0) -> None:
        wanted = (most_blocks * COUNTERS_A_BLOCK - 1).bit_length()
        self.bits = min(max(wanted, _MIN_BITS), _MAX_BITS)
        """There are 2^that counters."""
        # Of this the kernel gives a page when something is first written there.
        memory = mmap.mmap(-1, 1 << self.bits, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(memory)
        """The counters."""

    def _counters_of(self, block: BlockId) -> tuple[int, int]:
        high, low = shared.KEY_HALVES.unpack(block.key)
        return shared.two_buckets(block.namespace, high, low, self.bits)

    def add(self, block: BlockId) -> None:
        """A block lies there, once more than before."""
        for at in self._counters_of(block):
            if self.memory[at] != _FULL:
                self.memory[at] += 1

    def remove(self, block: BlockId) -> None:
        """A block that was added lies there once less."""
        for at in self._counters_of(block):
            if self.memory[at] != _FULL:
                self.memory[at] -= 1

    def may_hold(self, block: BlockId) -> bool:
        """Whether a block may lie there."""
        return all(self.memory[at] for at in self._counters_of(block))
