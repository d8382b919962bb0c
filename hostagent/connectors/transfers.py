"""Blocks on their way between the pool and an engine's memory, where the engine names each block
and its place itself.

Owns: what has become of each block, that nothing touches the engine's memory once a transfer was
reported, and how much may be under way. Must not know: engines, sockets, clocks, bytes.

An engine that has its report uses the memory for something else. So a late arrival must not write
there, and a late save must not read there: the pool would keep wrong bytes under a right key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

CAME: Final = ""
"""The outcome of a block that was brought, or saved."""
THERE: Final = "there"
"""The outcome of a block that was to be saved, and that the pool holds. Every other outcome is why
a block did not come."""
_GOOD: Final = frozenset({CAME, THERE})
LEFT_ALONE: Final = "left_alone"
"""The pool did not answer of late (`health`), so it was not asked."""
BUSY: Final = "busy"
"""As much was under way as may be."""
CLOSED: Final = "closed"
DEADLINE: Final = "deadline"
FAILED: Final = "failed_of_late"
"""It could not be had a moment ago."""
NOT_HELD: Final = "not_held"
SLOWER: Final = "slower"
"""It is held, and computed sooner than it would come."""
UNAVAILABLE: Final = "unavailable"
POOL_FAILED: Final = frozenset({DEADLINE, UNAVAILABLE})
"""Outcomes that say something of the pool's health, and nothing of a block."""


class Transfer:
    """Some blocks that are asked about, loaded or saved together, until `deadline`. `done` is
    called once, when it was reported. Any thread may call its methods."""

    def __init__(
        self, count: int, size_bytes: int, deadline: float, done: Callable[[Transfer], None]
    ) -> None:
        self.size_bytes = size_bytes
        self.deadline = deadline
        self._done = done
        self._outcomes: list[str | None] = [None] * count
        self._lock = threading.Lock()
        self._reported = False
        self._told = threading.Event()
        """Set once `done` has returned: who has waited finds what `done` has left behind."""

    def copy(self, do: Callable[[], None]) -> bool:
        """Do `do`, which reads or writes the engine's memory, unless the transfer was reported;
        whether it was done."""
        with self._lock:
            if self._reported:
                return False
            do()
            return True

    def settle(self, index: int, outcome: str) -> None:
        """What has become of a block: `CAME`, or why not. The first word holds."""
        with self._lock:
            if not self._reported and self._outcomes[index] is None:
                self._outcomes[index] = outcome

    def is_settled(self, index: int) -> bool:
        return self._outcomes[index] is not None

    def end(self, reason: str) -> None:
        """Report the transfer, unless it was. `reason`: what has become of the blocks of which
        nothing is known."""
        with self._lock:
            if self._reported:
                return
            self._outcomes = [reason if one is None else one for one in self._outcomes]
            self._reported = True
        try:
            self._done(self)
        finally:
            self._told.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the report was made and `done` has returned, no longer than that; whether
        that is so."""
        return self._told.wait(timeout_s)

    @property
    def reported(self) -> bool:
        return self._reported

    @property
    def outcomes(self) -> Sequence[str]:
        """Of each block; only to be asked for once it was reported."""
        assert self._reported
        return [CAME if one is None else one for one in self._outcomes]

    @property
    def came(self) -> list[bool]:
        """Whether each block came; only to be asked for once it was reported."""
        return [one in _GOOD for one in self.outcomes]


class Allowance:
    """How much may be under way: so many transfers, of so many bytes together. One of any size may
    go alone, since else it could never go."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._count = 0
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Transfers under way."""
        return self._count

    def take(self, size_bytes: int) -> bool:
        """Begin a transfer, if there is room for it."""
        with self._lock:
            if self._count and (
                self._count >= self._most or self._bytes + size_bytes > self._most_bytes
            ):
                return False
            self._count += 1
            self._bytes += size_bytes
            return True

    def give(self, size_bytes: int) -> None:
        """A transfer has ended."""
        with self._lock:
            self._count -= 1
            self._bytes -= size_bytes
