"""How long to wait before something that failed is tried again.

Owns: the pause's growth and jitter, and when it is over. Must not know: what is tried, or the
clock.
"""

from __future__ import annotations

import random
from math import inf

_MOST_DOUBLINGS = 64


def pause_after(failures: int, min_s: float, max_s: float) -> float:
    """The pause after so many failures in a row, 1 at least, for whoever remembers their number
    alone: `min_s` after the first, twice as long after each further one, `max_s` at most."""
    return min(max_s, min_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


class Backoff:
    """A pause that doubles from `min_s` to `max_s` with every failure in a row. With `rng` each is
    multiplied by 0.5 to 1.5, so that those who failed together do not all come back together."""

    def __init__(self, min_s: float, max_s: float, rng: random.Random | None = None) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._rng = rng
        self._pause_s = min_s

    @property
    def pause_s(self) -> float:
        """The pause after one more failure, without jitter; asking this counts none."""
        return self._pause_s

    def next_pause_s(self) -> float:
        """The pause after one more failure."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._max_s)
        return pause_s if self._rng is None else pause_s * self._rng.uniform(0.5, 1.5)

    def worked(self) -> None:
        """It went well: begin with the shortest pause again."""
        self._pause_s = self._min_s

    def hopeless(self) -> None:
        """Trying again soon would not help: go on with the longest pause."""
        self._pause_s = self._max_s


class Pauses(Backoff):
    """Such pauses, and until when the present one lasts."""

    def __init__(self, min_s: float, max_s: float, rng: random.Random | None = None) -> None:
        super().__init__(min_s, max_s, rng)
        self._until = -inf

    def may_try(self, now: float) -> bool:
        """Whether no pause lasts; asking this counts nothing."""
        return now >= self._until

    def failed(self, now: float) -> None:
        """It failed: a pause begins, longer than the one before."""
        self._until = now + self.next_pause_s()

    def worked(self) -> None:
        """It went well: no pause lasts any more, and the next is the shortest again."""
        super().worked()
        self._until = -inf
