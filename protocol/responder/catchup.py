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
waiting. What it may cost is bounded:

- Only the *leaders* wait, who asked first for what others are behind with; and nobody before
  `after_reads` READs were behind.
- A reader is waited for only if that is worth no more than the copies that it saves. What a copy
  takes is known where the home's pace is set, and measured else (`CopyTime`); while it is not
  known, nobody waits. How many are saved: half of what is left of the block (the leader is ahead),
  or, since nobody knows what comes after it, as many as this reader has cost behind this leader
  already. Who rents until the rent has come to the price, and then buys, pays at most twice what
  a prophet would (ski rental: Karlin et al., Algorithmica 1988). So on a fast link, where a copy
  takes microseconds, two chats that are milliseconds apart stay apart, and the ranks of one model
  come together.
- No answer waits for longer than `max_slowdown` times the pause that the readers make anyway
  between an answer and their next question: a home whose link is busy sees no pauses, and need not
  wait, since READs meet in its queue.
- Without READs behind, the time halves every `period` times itself. And if in `patience` such
  periods in a row the readers behind asked for most blocks after all, nobody is waited for any more
  for a while: the ones behind read too slowly, or follow at a distance.
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
    period: float = 8.0
    """Length of a period, in holds."""
    patience: int = 4
    """Periods in a row in which readers behind asked for more than half of what was new, each for
    itself, after which it is given up."""
    rest: float = 16.0
    """For so many periods then."""
    max_segments: int = 4096
    """Segments whose first READ is remembered; also pairs of readers. The oldest is forgotten."""


class CopyTime:
    """How long the home takes to send a frame: known, if its pace is set, or measured whenever it
    had more to send than its link took."""

    _GAIN: Final = 1 / 8

    def __init__(self) -> None:
        self.frame_s = 0.0
        """Smoothed; 0 = not known yet."""
        self._took_at = 0.0
        self._frames = 0  # taken then, with more left behind

    def took(self, now: float, frames: int, *, more: bool) -> None:
        """The link took so many frames now, and `more` waited for it."""
        if self._frames and now > self._took_at:
            frame_s = (now - self._took_at) / self._frames
            gain = self._GAIN if self.frame_s else 1.0
            self.frame_s += (frame_s - self.frame_s) * gain
        if now > self._took_at:
            self._frames = 0
        self._took_at = now
        self._frames = self._frames + frames if more else 0


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
        self._leaders: set[int] = set()
        self._followed: BoundedMap[tuple[int, int], tuple[float, float]] = BoundedMap(
            config.max_segments
        )  # (leader, reader) to the last READ behind, and what such READs have cost in a row
        self._before = 0
        self._useless = 0  # periods in a row
        self._period_ends = 0.0
        self._rest_until = 0.0

    def hold_of(self, reader: int, *, gathers: bool) -> float:
        """For how long an answer to `reader` should wait, if it is not behind."""
        if reader not in self._leaders:
            return 0.0
        return self.hold_s if gathers else self.hold_alone_s

    def read(
        self, now: float, reader: int, block: BlockId, segment: int, *, copy_s: float, left: int
    ) -> bool:
        """A READ of a whole segment, no repeat, that needs an answer of its own; whether it is
        behind, and should not wait. `copy_s`: what sending the answer takes, 0 if that is not
        known; `left`: segments of its block from this one on."""
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
        followed_at, cost_s = self._followed.get((first, reader), (now, 0.0))
        cost_s = cost_s + copy_s if now - followed_at <= config.max_hold_s else copy_s
        self._followed[first, reader] = (now, cost_s)
        worth_s = max(cost_s, copy_s * left / 2)
        if distance_s > worth_s:
            return False
        self._behind += 1
        self._readers_behind.add(reader)
        self._leaders.add(first)
        self._distance_s = max(self._distance_s, distance_s)
        if self._behind >= config.after_reads and now >= self._rest_until:
            hold_s = min(
                self._distance_s * _MARGIN, self._pause_s * config.max_slowdown, config.max_hold_s
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

    def _halve(self) -> None:
        self.hold_s /= 2
        self.hold_alone_s = 0.0
        if self.hold_s < _LEAST_S:
            self.hold_s = 0.0
            self._leaders.clear()

    def _end_period(self, now: float) -> None:
        config = self.config
        parted = self._behind * 2 > self._before * len(self._readers_behind)
        if self._behind < config.after_reads:
            self._useless = 0
            self._halve()
        elif not parted:
            self._useless = 0
        elif self.hold_s:
            self._useless += 1
            if self._useless >= config.patience:
                self._useless = 0
                self._rest_until = now + config.rest * config.period * self.hold_s
                self.hold_s = self.hold_alone_s = 0.0
                self._leaders.clear()
        ended = self._period_ends + config.period * self.hold_s
        while self.hold_s and ended <= now:  # a period in which nobody asked
            self._halve()
            ended += config.period * self.hold_s
        self._behind = self._before = 0
        self._readers_behind.clear()
        self._distance_s = 0.0
        self._period_ends = now + config.period * (self.hold_s or config.max_hold_s)
