"""The simulated object store, which all hosts share, and the cold tier of an agent over it.

Owns: what lies in the store, what can be wrong with it, and what `kvcast.hostagent.cold` owns, but
for sockets: when errands are done. Must not know: what is stored and why.

A store may be slow, refuse what it is asked, forget objects, and give back bits that are not what
was stored, another object, half of one, or one of another cluster's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.cold import DONE, GONE, HEAD, MAGIC, ColdRules, ColdTier, Errand, Task
from kvcast.protocol.messages.wire import digest_of
from kvcast.simulation.tier_side import Owner, TierSide
from kvcast.simulation.world import World

CLUSTER: Final = "cluster"
_RULES: Final = ColdRules(max_errands=3, max_waiting=16, max_known=64, patience_s=0.3)


class SimObjects:
    """See the module's text."""

    def __init__(self, rng: random.Random) -> None:
        self.slow_s = 0.0
        """How much longer an errand may take."""
        self.errors = 0.0
        """How likely an errand fails."""
        self.lies = 0.0
        """How likely an object that is fetched is not what was stored."""
        self._rng = rng
        self._objects: dict[str, bytes] = {}
        self._before: dict[str, bytes] = {}
        """What lay under a name before it was deleted or stored anew."""

    def do(
        self, task: Task, found: Callable[[str, list[tuple[str, int]]], None]
    ) -> tuple[str, bytes | None]:
        """What becomes of an errand: its error, and the object."""
        objects = self._objects
        if self._rng.random() < self.errors:
            return "the object store does not answer", None
        if task.errand is Errand.STORE:
            assert task.data is not None
            self._forget(task.name)
            objects[task.name] = b"".join(task.data)
        elif task.errand is Errand.FETCH:
            data = objects.get(task.name)
            if data is None:
                return GONE, None
            return DONE, self._lie(task.name, data) if self._rng.random() < self.lies else data
        elif task.errand is Errand.DELETE:
            self._forget(task.name)
        else:
            names = [name for name in objects if name.startswith(task.name)]
            if task.errand is Errand.LIST:
                found(task.name, [(name, len(objects[name])) for name in names])
            else:
                for name in names:
                    self._forget(name)
        return DONE, None

    def _forget(self, name: str) -> None:
        data = self._objects.pop(name, None)
        if data is not None:
            self._before[name] = data

    def _lie(self, name: str, data: bytes) -> bytes:
        rng = self._rng
        way = rng.randrange(5)
        if way == 0:
            damaged = bytearray(data)
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return bytes(damaged)
        if way == 1:
            return rng.choice(list(self._objects.values()))
        if way == 2:
            return data[: rng.randrange(len(data))]
        if way == 3:  # whole, under this key, and of a namespace of another cluster
            body = rng.randbytes(len(data) - HEAD.size)
            key = bytes.fromhex(name[-32:])
            head = HEAD.pack(MAGIC, 4711, key, len(body), digest_of(body), 1e9)
            return head + body
        return self._before.get(name, data)

    def lose(self, share: float) -> None:
        """Objects are gone."""
        for name in list(self._objects):
            if self._rng.random() < share:
                self._forget(name)


class ColdSide(TierSide[Task]):
    """The cold tier of one life of an agent; `start`, and no end."""

    def __init__(
        self,
        world: World,
        owner: Owner,
        core: AgentCore,
        objects: SimObjects,
        rng: random.Random,
        pump: Callable[[], None],
    ) -> None:
        super().__init__(world, owner, core, rng, pump)
        self._objects = objects
        self.clock_error_s = rng.choice((0.0, 0.0, -500.0, 3.0, 500.0))
        self.tier = ColdTier(_RULES, core.store, core.memory, CLUSTER, self.epoch_s)

    def start(self) -> None:
        self.tier.wake = self.wake
        self.tier.advance(self._owner.now)
        self._core.use_cold(self.tier)

    def _take(self, now: float) -> Iterable[Task]:
        self.tier.epoch_s = self.epoch_s
        return self.tier.take_tasks(now)

    def _timer(self, now: float) -> float | None:
        return self.tier.get_timer()

    def _takes_s(self) -> float:
        return self._rng.uniform(0.001, 0.02) + self._objects.slow_s * self._rng.random()

    def _do(self, task: Task) -> None:
        error, data = self._objects.do(task, self.tier.found)
        self._world.counts[f"cold.{task.errand.value}"] += 1
        now = self._owner.now
        self._core.store.advance(now)
        damaged = self.tier.counters.damaged
        task.ended(now, error, memoryview(data) if data is not None else None)
        self._world.counts["cold.refused"] += self.tier.counters.damaged - damaged
