"""Readers a moment apart: for how long a home holds its answers for the ones behind.

Owns: which READs are *behind* (the answer went out to another reader a moment ago), how far apart
the readers are, and thus for how long new answers wait. Must not know: frames, queues, or the
clock.

Why: a switch answers two readers at once if the second asks before the answer has passed. Two that
read the same blocks at the same pace, a moment apart, never meet, and each block costs two copies
however long they read. If answers wait for as long as the readers are apart, the second one's READ
joins, and from then on the answers keep the two together. Database systems hold back the leaders
of scans of one table in the same way (Lang et al., "Increasing Buffer-Locality for Multiple
Relational Table Scans through Grouping and Throttling", ICDE 2007).

How far apart they are is measured: the time from a segment's first READ to one that is behind. On
a fast network that is microseconds; on a crowded machine, as long as its scheduler leaves a reader
waiting. What it may cost is bounded. Nothing waits before `after_reads` READs were behind. No
answer waits for longer than `max_slowdown` times the pause that the readers make anyway between an
answer and their next question: a home whose link is busy sees no pauses, and need not wait, since
READs meet in its queue. Without READs behind, the time halves every `period` times itself. And if
in `patience` such periods in a row the readers behind asked for most blocks after all, nobody is
waited for any more for a while: the ones behind read too slowly, or follow at a distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.messages.wire import BlockId

_MARGIN: Final = 1.25
"""Answers wait for so many times the distance measured; the next one may be larger."""
_PAUSE_GAIN: Final = 1 / 8
"""Of a new pause in the smoothed one, as for round-trip times in RFC 6298."""
_LEAST_S: Final = 1e-6
"""A shorter hold is none."""


@dataclass(frozen=True)
class CatchUpConfig:
    """When, and for how long, a home holds answers back."""

    max_hold_s: float = 0.1
    """Longest hold, and how far behind a reader may be to count; 0 = nothing is held back."""
    after_reads: int = 2
    """READs behind, in one period, from which on the answers are held back whose READs gather."""
    after_reads_alone: int = 8
    """READs behind, in one period, from which on all answers are: their readers share nothing yet,
    but could."""
    max_slowdown: float = 4.0
    """Longest hold, in times that pass from an answer to the next READ: it bounds by how much those
    in front are slowed down."""
    hold_per_read_s: float = 0.01
    """Longest hold, for each READ behind in a period: each is a copy that it may save."""
    period: float = 8.0
    """Length of a period, in holds."""
    patience: int = 4
    """Periods in a row in which readers behind asked for more than half of what was new, each for
    itself, after which it is given up."""
    rest: float = 16.0
    """For so many periods then."""
    max_segments: int = 4096
    """Segments whose first READ is remembered."""


class CatchUp:
    """See the module's description. Times are seconds on one monotonic clock of the caller's."""

    def __init__(self, config: CatchUpConfig) -> None:
        self.config = config
        self.hold_s = 0.0
        """For how long new answers wait at present, if their READs gather."""
        self.hold_alone_s = 0.0
        """The same for those whose READs do not."""
        self._sent_at = -inf  # the last answer
        self._pause_s = 0.0  # smoothed, from an answer to the next READ that is not behind
        self._asked: BoundedMap[tuple[BlockId, int], tuple[float, int]] = BoundedMap(
            config.max_segments
        )
        self._distance_s = 0.0  # longest in this period
        self._behind = 0  # READs in this period
        self._readers_behind: set[int] = set()
        self._before = 0
        self._useless = 0  # periods in a row
        self._period_ends = 0.0
        self._rest_until = 0.0

    def read(self, now: float, reader: int, block: BlockId, segment: int) -> bool:
        """A READ of a whole segment, no repeat, that needs an answer of its own. True: it is
        behind, so it should not wait; otherwise its answer should wait for `hold_s` if the READ
        gathers, and else for `hold_alone_s`."""
        config = self.config
        if not config.max_hold_s:
            return False
        if now >= self._period_ends:
            self._end_period(now)
        asked = self._asked
        asked_at, first = asked.get((block, segment), (0.0, reader))
        distance_s = now - asked_at
        if first == reader or distance_s > config.max_hold_s:
            asked[block, segment] = (now, reader)
            oldest = now - config.max_hold_s
            while next(iter(asked.values()))[0] < oldest:
                asked.popitem(last=False)
            self._before += 1
            pause_s = now - self._sent_at
            if pause_s <= config.max_hold_s:
                self._pause_s += (pause_s - self._pause_s) * _PAUSE_GAIN
            return False
        self._behind += 1
        self._readers_behind.add(reader)
        self._distance_s = max(self._distance_s, distance_s)
        if self._behind >= config.after_reads and now >= self._rest_until:
            hold_s = min(
                self._distance_s * _MARGIN,
                self._pause_s * config.max_slowdown,
                self._behind * config.hold_per_read_s,
                config.max_hold_s,
            )
            if hold_s > self.hold_s:
                self.hold_s = hold_s
                self._period_ends = now + config.period * hold_s
            if self._behind >= config.after_reads_alone:
                self.hold_alone_s = self.hold_s
        return True

    def sent(self, now: float) -> None:
        """An answer with a whole segment has gone out."""
        self._sent_at = now

    def _end_period(self, now: float) -> None:
        config = self.config
        parted = self._behind * 2 > self._before * len(self._readers_behind)
        if self._behind < config.after_reads:
            self._useless = 0
            self.hold_s /= 2
            if self.hold_s < _LEAST_S:
                self.hold_s = 0.0
            self.hold_alone_s = 0.0
        elif not parted:
            self._useless = 0
        elif self.hold_s:
            self._useless += 1
            if self._useless >= config.patience:
                self._useless = 0
                self._rest_until = now + config.rest * config.period * self.hold_s
                self.hold_s = self.hold_alone_s = 0.0
        self._behind = self._before = 0
        self._readers_behind.clear()
        self._distance_s = 0.0
        self._period_ends = now + config.period * (self.hold_s or config.max_hold_s)
