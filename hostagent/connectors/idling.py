"""How long a step of an engine that computes nothing waits for the pool.

Owns: how long the step waits. Must not know: clocks, engines, what is waited for.

vLLM steps on at once while a request waits for its blocks, some thousand times a second, and takes
a processor for it that agents and other engines on the node could use. A step that waits is woken
by the load that it waits for; but a request that arrives meanwhile is taken up only after it. So
the longer nothing has happened, the longer a step may wait, at most an eighth of that.
"""

from __future__ import annotations

from typing import Final

LEAST_S: Final = 0.002
MOST_S: Final = 0.02
SHARE: Final = 1 / 8


class Idling:
    """One engine's steps."""

    def __init__(self) -> None:
        self._since: float | None = None

    def pause_s(self, now: float, *, idle: bool) -> float:
        """How long the step that begins now may wait; 0 if it is not `idle`: it computes something,
        or there is news."""
        if not idle:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return min(max(LEAST_S, SHARE * (now - self._since)), MOST_S)

    def woken(self) -> None:
        """Something has happened: it may go on happening."""
        self._since = None
