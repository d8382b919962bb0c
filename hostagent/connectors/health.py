"""Whether the pool is worth asking just now.

Owns: when a pool that does not answer is left alone, and for how long. Must not know: clocks,
sockets, what was asked.

A request that waits for a dead pool waits for nothing. After some failures in a row the pool is
left alone, each time twice as long; then one question may pass, and its answer decides.
"""

from __future__ import annotations

from typing import Final

from kvcast.protocol.links.backoff import Pauses

FAILURES: Final = 3
"""In a row; single failures are the weather."""
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 10.0


class Health:
    """Counts failures in a row."""

    def __init__(self) -> None:
        self._failures = 0
        self._pauses = Pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._probed_until = 0.0

    def may_ask(self, now: float) -> bool:
        """Whether to ask now. After a pause True once, and again when that question was answered
        or has had its time."""
        if self.well:
            return True
        if not self._pauses.may_try(now) or now < self._probed_until:
            return False
        self._probed_until = now + self._pauses.pause_s
        return True

    @property
    def well(self) -> bool:
        """Whether the pool is not being left alone; asking this asks nothing."""
        return self._failures < FAILURES

    def succeeded(self) -> None:
        """The pool answered, whatever it said."""
        self._failures = 0
        self._pauses.worked()

    def failed(self, now: float) -> None:
        """The pool did not answer in time, or cannot be reached. News of what was asked before a
        pause makes it no longer."""
        self._failures += 1
        if not self.well and self._pauses.may_try(now):
            self._pauses.failed(now)
            self._probed_until = 0.0
