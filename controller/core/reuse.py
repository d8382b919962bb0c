"""Reuse: how likely it is that a block is read again, by how long ago it was last read.

Owns: the times between two reads of a block, by powers of two, and the chance that follows. Must
not know: blocks, rules, slots; it is told of times in seconds.

Nobody says when a block has had its last read, and a block that lies in the switch without being
read takes room for nothing. So the chance of another read is learned from all blocks (Kaplan and
Meier, "Nonparametric Estimation from Incomplete Observations", 1958). For each power of two there
is a share: of the blocks that were unread for so long, how many were read before twice as long had
passed? A block that still waits counts for as long as it has waited. (Processors' caches call this
dead-block prediction; Lai, Fide, Falsafi, ISCA 2001.)

Blocks are told apart by how often they were read. A node that has read a block from its home has it
from then on: most blocks have one reader, and one that every node has read is not asked for again.

What few blocks have shown is not believed: a share begins at that of the time before, which weighs
as much as `PRIOR_BLOCKS`. So in the beginning nothing seems dead.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

SHORTEST_S = 0.25
"""Times below are one, [0, 0.25); those above are [0.25, 0.5), [0.5, 1) and so on."""
TIMES = 24
"""The last one is all above half a million seconds."""
COUNTS = 16
"""Numbers of reads that are told apart: 1, 2 and so on; the last is all from there."""
PRIOR_SHARE = 0.5
PRIOR_BLOCKS = 16.0
MAX_ENDED = 8192
"""Times between reads that are remembered: at so many all count half."""

Floats = npt.NDArray[np.float64]
Classes = npt.NDArray[np.intp]


class Reuse:
    """See the module's text. Classes: how often a block was read, less 1; of COUNTS."""

    def __init__(self) -> None:
        self._ended = [[0.0] * TIMES for _ in range(COUNTS)]
        self._count = 0.0

    def read_again(self, class_: int, after_s: float, times: int = 1) -> None:
        """So many blocks of a class were read again after that time."""
        place = 0
        if after_s >= SHORTEST_S:
            place = min(math.frexp(after_s / SHORTEST_S)[1], TIMES - 1)
        self._ended[class_][place] += times
        self._count += times
        if self._count >= MAX_ENDED:
            self._ended = [[count / 2 for count in row] for row in self._ended]
            self._count /= 2

    def reads_after_second(self) -> float:
        """How many more reads a block has, on average, that was read twice; as far as seen."""
        twice = sum(self._ended[0])
        return (self._count - twice) / (twice + PRIOR_BLOCKS)

    def chances(self, classes: Classes, waiting_s: Floats) -> Floats:
        """That a block is read again: by class and by time since its last read, shape
        (COUNTS, TIMES). `classes` and `waiting_s`, shape (blocks,) each, are those of blocks that
        wait now."""
        ended = np.array(self._ended)
        waiting = np.zeros_like(ended)
        np.add.at(waiting, (classes, times_of(waiting_s)), 1.0)
        reached = np.cumsum((ended + waiting)[:, ::-1], 1)[:, ::-1] - waiting / 2
        share, shares = PRIOR_SHARE, []
        for read, of in zip(ended.sum(0).tolist(), reached.sum(0).tolist(), strict=True):
            share = (read + PRIOR_BLOCKS * share) / (of + PRIOR_BLOCKS)
            shares.append(share)
        each = (ended + PRIOR_BLOCKS * np.array(shares)) / (reached + PRIOR_BLOCKS)
        never = np.cumprod((1.0 - each)[:, ::-1], 1)[:, ::-1]
        return np.asarray(1.0 - never, np.float64)


def times_of(seconds: Floats) -> Classes:
    """Which of the TIMES each one is, shape (blocks,)."""
    return np.clip(np.frexp(seconds / SHORTEST_S)[1], 0, TIMES - 1).astype(np.intp)
