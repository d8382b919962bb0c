"""What drives the core of a tier below DRAM in a simulated agent, whatever it lies on.

Owns: when its work is taken, done and told of, what becomes of work when the process dies, and its
timer. Must not know: what is moved and why, or what the tier lies on (`disk_side`, `objects`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from kvcast.hostagent.core.agent import AgentCore
from kvcast.simulation.world import Alarm, World

W = TypeVar("W")
"""A piece of work."""


class Owner(Protocol):
    """The process that has the tier."""

    @property
    def now(self) -> float: ...

    @property
    def wall_s(self) -> float:
        """What its machine takes for the seconds since 1970."""

    dead: bool

    def world_time(self, when: float) -> float: ...

    def when_running(self, action: Callable[[], None]) -> None: ...


class TierSide(Generic[W]):
    """See the module's text. `pump` is called after whatever has changed the agent's core."""

    def __init__(
        self,
        world: World,
        owner: Owner,
        core: AgentCore,
        rng: random.Random,
        pump: Callable[[], None],
    ) -> None:
        self._world = world
        self._owner = owner
        self._core = core
        self._rng = rng
        self._pump = pump
        self._under_way: dict[W, None] = {}
        self._alarm = Alarm(world, lambda: owner.when_running(self._run))
        self.clock_error_s = 0.0
        """By how much the wall clock is wrong in this life."""

    @property
    def epoch_s(self) -> float:
        """What makes seconds since 1970 of the core's, by the wall clock of the moment."""
        return self._owner.wall_s - self._owner.now + self.clock_error_s

    def wake(self) -> None:
        """There is something to do: soon, but not at once."""
        self._world.after(0.0, lambda: self._owner.when_running(self._run))

    def _take(self, now: float) -> Iterable[W]:
        """What is to be done now."""
        raise NotImplementedError

    def _timer(self, now: float) -> float | None:
        """When `_take` is to be called in any case."""
        raise NotImplementedError

    def _takes_s(self) -> float:
        """How long the next piece of work takes."""
        raise NotImplementedError

    def _do(self, work: W) -> None:
        """It is done, and is told of."""
        raise NotImplementedError

    def _run(self) -> None:
        if self._owner.dead:
            return
        now = self._owner.now
        for work in self._take(now):
            self._under_way[work] = None
            self._world.after(
                self._takes_s(),
                lambda work=work: self._owner.when_running(  # type: ignore[misc]
                    lambda: self._end(work)
                ),
            )
        when = self._timer(now)
        if when is not None:
            self._alarm.set(max(self._owner.world_time(when), self._world.now) + 1e-4)

    def _end(self, work: W) -> None:
        if work not in self._under_way:
            return  # the process has died
        del self._under_way[work]
        self._do(work)
        self._run()
        self._pump()

    @property
    def under_way(self) -> int:
        """Pieces of work that are being done."""
        return len(self._under_way)
