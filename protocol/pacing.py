"""How fast a node asks and answers: retransmission time-outs, windows, a token bucket.

Owns: the arithmetic of RFC 6298 (time-out from round-trip samples), of an additive-increase
window of segments, and of a token bucket. Must not know: frames, fetches, or the clock.
"""

from __future__ import annotations

from math import inf
from typing import Final

_ROUNDING: Final = 1e-3
"""So that what `TokenBucket.ready_at` promised is there, whatever the floats say."""
_BASE_DRIFT: Final = 1 / 1024
"""By so much of the difference the fastest answer known moves with each sample, or a way that has
become longer for good would look like a queue for ever."""


class RttEstimator:
    """Retransmission time-out by RFC 6298, section 2. Karn's rule needs no care here: READs carry
    tags, so a sample always belongs to the READ that it is measured from."""

    __slots__ = ("_max_s", "_min_s", "_rttvar_s", "rto_s", "srtt_s")

    def __init__(self, initial_s: float, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._rttvar_s = 0.0
        self.srtt_s: float | None = None
        """Smoothed round-trip time, None before the first sample."""
        self.rto_s = initial_s

    def sample(self, rtt_s: float) -> None:
        """Take one round-trip time into account."""
        rtt_s = max(rtt_s, 0.0)
        if self.srtt_s is None:
            self.srtt_s = rtt_s
            self._rttvar_s = rtt_s / 2
        else:
            self._rttvar_s += (abs(self.srtt_s - rtt_s) - self._rttvar_s) / 4
            self.srtt_s += (rtt_s - self.srtt_s) / 8
        self.rto_s = min(max(self.srtt_s + 4 * self._rttvar_s, self._min_s), self._max_s)


class Window:
    """How many segments may be in flight from one home.

    Grows by one a completed segment until the first loss, then by one a window (RFC 5681's slow
    start and congestion avoidance, in segments); a loss halves it, once for all that was asked
    for before the halving. A queue at the home or on the way is no loss, but makes every answer
    late, so the window also stops growing while answers take `target_s` longer than the fastest
    did, and shrinks beyond twice that (in the manner of RFC 6817).
    """

    __slots__ = ("_base_s", "_holding", "_max", "_reduced_at", "_target_s", "_threshold", "size")

    def __init__(self, initial: int, maximum: int, target_s: float) -> None:
        self.size = float(initial)
        self._max = float(maximum)
        self._target_s = target_s
        self._base_s = inf
        self._holding = False
        self._threshold = inf
        self._reduced_at = -inf

    def completed(self, count: int = 1) -> None:
        """So many segments are complete."""
        if self._holding or self.size >= self._max:
            return
        for _ in range(count):
            growth = 1.0 if self.size < self._threshold else 1.0 / self.size
            self.size = min(self._max, self.size + growth)

    def sample(self, now: float, rtt_s: float) -> None:
        """The first chunk of an answer took so long to come."""
        base_s = min(self._base_s, rtt_s)
        queued_s = rtt_s - base_s
        self._base_s = base_s + queued_s * _BASE_DRIFT
        self._holding = queued_s > self._target_s
        if queued_s > 2 * self._target_s:
            self._reduce(now, now - rtt_s, 0.75)

    def lost(self, now: float, sent_at: float) -> None:
        """Something that was asked for at `sent_at` did not arrive."""
        self._reduce(now, sent_at, 0.5)

    def _reduce(self, now: float, sent_at: float, factor: float) -> None:
        if sent_at >= self._reduced_at:
            self.size = max(1.0, self.size * factor)
            self._threshold = self.size
            self._reduced_at = now


_MOST_OWED_S: Final = 0.5


class TokenBucket:
    """At most `burst` at once and `rate` a second; a rate of 0 means no limit. What others have
    taken of the same rate is owed: half of what comes in pays for it, so nobody starves."""

    __slots__ = ("_owed", "_rate", "_tokens", "_updated_at", "burst")

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self.burst = burst
        self._tokens = float(burst)
        self._owed = 0.0
        self._updated_at: float | None = None

    @property
    def rate(self) -> float:
        """Tokens a second; 0 means no limit."""
        return self._rate

    def set_rate(self, now: float, rate: float) -> None:
        """Go on at `rate` from now."""
        self._refill(now)
        self._rate = rate

    def available(self, now: float, wanted: int) -> int:
        """How many of `wanted` may be taken now."""
        if self._rate <= 0:
            return wanted
        self._refill(now)
        return min(wanted, int(self._tokens + _ROUNDING))

    def take(self, count: int) -> None:
        """Use tokens up; no more than `available` said."""
        if self._rate > 0:
            self._tokens = max(0.0, self._tokens - count)

    def owe(self, count: float) -> None:
        """Others have used so much of the rate; more than `_MOST_OWED_S` of it is forgotten."""
        self._owed = min(self._owed + count, self._rate * _MOST_OWED_S)

    def ready_at(self, now: float, count: int) -> float:
        """When `count` tokens (or a full bucket) will be there."""
        if self._rate <= 0:
            return now
        self._refill(now)
        missing = min(count, self.burst) - self._tokens
        return now if missing <= 0 else now + missing / self._rate

    def _refill(self, now: float) -> None:
        if self._updated_at is not None and now > self._updated_at:
            gained = (now - self._updated_at) * self._rate
            paid = min(self._owed, gained / 2)
            self._owed -= paid
            gained -= paid
            self._tokens = min(float(self.burst), self._tokens + gained)
        if self._updated_at is None or now > self._updated_at:
            self._updated_at = now
