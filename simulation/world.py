"""The simulated world: one clock, one queue of events, and random streams by name.

Owns: the order of everything. Must not know: what any event is. All randomness of a run comes
from `stream(name)`, each name its own generator, so that leaving out one fault or one client's
action moves no other; nothing here or above may depend on a hash seed, an address or a real clock.

Four set-ups stand on it: whole pools under faults (`cluster.py`), one incast on fast links
(`incast.py`), requesters and responders alone (`tests/property/protocol_network.py`), and engines
behind a router (`kvcast.bench.route_simulation`).
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Final

MAX_STEPS_AT_ONCE: Final = 200_000
"""Events at one instant; more means that somebody makes them without end."""

_STAMP: Final = struct.Struct("!dI")


class RestlessError(Exception):
    """Time stands still, because something happens without end."""


class DiedError(Exception):
    """A process has died in the middle of what it did: what is behind that is not done."""


class World:
    """Time in seconds since the beginning."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.steps = 0
        self._steps_then = 0
        self.counts: Counter[str] = Counter()
        """What happened, by kind; faults as "fault." and their kind, where they had an effect."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._trace = hashlib.blake2b(digest_size=16)

    def stream(self, name: str) -> random.Random:
        """A random source of this seed that belongs to `name` alone."""
        return random.Random(f"{self.seed}/{name}")

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do it at `when`, or now if that is past; things of one time happen in order."""
        self._sequence += 1
        heapq.heappush(self._queue, (max(when, self.now), self._sequence, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run(self, until: float = math.inf, *, max_steps: int | None = None) -> None:
        """Let everything happen that is due by `until`, or until nothing is left to happen.
        RestlessError where that takes more than `max_steps`."""
        queue = self._queue
        last_step = math.inf if max_steps is None else self.steps + max_steps
        while queue and queue[0][0] <= until:
            now, _, action = heapq.heappop(queue)
            if now > self.now:
                self.now = now
                self._steps_then = self.steps
            elif self.steps - self._steps_then > MAX_STEPS_AT_ONCE:
                raise RestlessError(f"{action} and others at {now} s, without end")
            if self.steps >= last_step:
                raise RestlessError(f"not at rest after {max_steps} events, at {now} s")
            self.steps += 1
            try:
                action()
            except DiedError:
                pass
        if until < math.inf:
            self.now = max(self.now, until)

    def note(self, what: int, data: bytes) -> None:
        """Make this part of the trace."""
        self._trace.update(_STAMP.pack(self.now, what))
        self._trace.update(data)

    @property
    def trace(self) -> str:
        """What happened so far, in 32 hexadecimal digits: the same for the same run."""
        return self._trace.hexdigest()


class Alarm:
    """Somebody's next wake-up: the earliest time that was asked for since the last one."""

    def __init__(self, world: World, action: Callable[[], None]) -> None:
        self._world = world
        self._action = action
        self._at = math.inf

    def set(self, when: float | None) -> None:
        """Wake at `when`, if not earlier anyway; None asks for nothing."""
        if when is not None and when < self._at:
            self._at = when
            self._world.at(when, lambda: self._ring(when))

    def _ring(self, when: float) -> None:
        if self._at == when:
            self._at = math.inf
            self._action()
