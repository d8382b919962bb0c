"""What an operator does to namespaces in a run, and what gets may answer after it.

Owns: the operator's acts, which number stands for a namespace at present and since which epoch a
deleted one is gone. Must not know: how a controller tells agents, or what these do.

A namespace that was deleted may be made again, by the operator or by an engine that asks for it.
What is put there then has other bytes, under the same keys. Whoever has a map in which the deletion
is must not be given any of the bytes from before it, wherever they come from.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvcast.protocol.messages.control import POLICIES, NamespaceSettings, PoolMap
from kvcast.simulation.model import Model, Name
from kvcast.simulation.plan import LATER, OPEN, PARTS, Block, Plan
from msgspec.structs import replace

if TYPE_CHECKING:
    from kvcast.simulation.agent import SimAgent
    from kvcast.simulation.controller import ControllerProcess
    from kvcast.simulation.world import World

MADE_AGAIN: Final = 0.5
"""How often the operator makes a deleted namespace again; else it is for engines to do."""

Controller = Callable[[], "ControllerProcess | None"]


class Operator:
    """See the module's text. `controller` gives the one that answers operators now."""

    def __init__(self, world: World, model: Model, plan: Plan, controller: Controller) -> None:
        self._world = world
        self._model = model
        self._plan = plan
        self._controller = controller
        self._planned = {number: number for number in PARTS}
        """By number, that of the plan for what it stands for,"""
        self._numbers = dict(self._planned)
        """and the other way round, as the last map says it."""
        self._deletions: Counter[int] = Counter()
        """By number of the plan."""
        self._pending: dict[int, ControllerProcess] = {}
        """Deletions that no map has told of yet."""
        self._gone_by: dict[int, str] = {}
        """The controller that has deleted it;"""
        self._gone_since: dict[int, int] = {}
        """The epoch from which on a number's blocks of before are gone."""
        self._epochs_go_on = plan.controllers == 1
        """Whether of two maps the one of the higher epoch is the later: neither of two controllers
        that do not count together, nor of one that has lost its state, and begins anew."""

    @property
    def acts(self) -> bool:
        """Whether there is one in this run."""
        return "operator" in self._plan.features

    def state_lost(self) -> None:
        """A controller that knows nothing of deletions has taken over: what lies anywhere of a
        namespace that it makes again counts as that namespace's."""
        self._epochs_go_on = False
        self._pending.clear()
        self._gone_since.clear()
        self._gone_by.clear()

    # --- acts -----------------------------------------------------------------------------------

    def make(self, rng: random.Random) -> bool:
        """Make the namespace that comes later; whether there was somebody to ask."""
        process = self._controller()
        if process is None:
            return False
        number = process.make_namespace(PARTS[LATER])
        if rng.random() < 0.5:
            process.set_namespace(number, _changed(NamespaceSettings(), rng))
        return True

    def change(self, rng: random.Random) -> bool:
        """Change some settings of a namespace."""
        process = self._controller()
        known = process.pool.namespaces.by_number if process is not None else {}
        if process is None or not known:
            return False
        number = rng.choice(sorted(known))
        process.set_namespace(number, _changed(known[number].settings, rng))
        return True

    def delete(self, rng: random.Random) -> Callable[[], None] | None:
        """Delete a namespace; gives what may make it again."""
        process = self._controller()
        known = process.pool.namespaces.by_number if process is not None else {}
        there = sorted(number for number in known if number in self._planned)
        if process is None or not there:
            return None
        number = rng.choice(there)
        planned = self._planned[number]
        self._let_use(number)  # agents may have heard of it though no map has told of it
        process.delete_namespace(number)
        self._deletions[planned] += 1
        self._pending[number] = process
        self._model.deleted(number)
        again = rng.random() < MADE_AGAIN

        def end() -> None:
            now = self._controller()
            if again and now is not None:
                now.make_namespace(PARTS[planned])

        return end

    # --- what follows ---------------------------------------------------------------------------

    def decided(self, process: ControllerProcess, pool_map: PoolMap) -> None:
        """A controller's map is to be in force."""
        if not self.acts:
            return
        for info in pool_map.namespaces:
            number = info.namespace
            parts = (info.tenant, info.model, info.version, info.layout)
            planned = next((n for n, of_it in PARTS.items() if of_it == parts), None)
            if planned is None:
                continue
            self._planned[number] = planned
            self._numbers[planned] = number
            self._let_use(number)
        if any(name != process.name for name in self._gone_by.values()):
            self.state_lost()  # controllers do not tell each other of deletions
        for number, by in list(self._pending.items()):
            del self._pending[number]
            if by is process:
                self._gone_by[number] = process.name
                self._world.counts["namespaces_deleted"] += 1
                self._gone_since[number] = pool_map.epoch
                self._model.retire(number)

    def _let_use(self, number: int) -> None:
        users = self._plan.rights.get(self._planned[number], self._plan.rights[OPEN])
        self._model.lets_use(number, users)

    def number_of(self, planned: int) -> int:
        """What stands for a namespace of the plan, as the last map says it."""
        return self._numbers[planned]

    def planned(self, number: int) -> int:
        """The other way round."""
        return self._planned.get(number, number)

    def is_gone(self, agent: SimAgent, number: int) -> bool:
        """Whether an agent knows that a number's blocks of before are gone."""
        pool = agent.core.pool
        if pool is None:
            return False
        if not self._epochs_go_on:
            return number in pool.deleted
        return pool.epoch >= self._gone_since.get(number, pool.epoch + 1)

    def copy_of(self, block: Block, copy: int) -> bytes:
        """The bytes that hosts compute now: others after each deletion."""
        times = self._deletions[block.name[0]]
        if not times:
            return block.copies[copy % len(block.copies)]
        name: Name = block.name
        return random.Random(f"{self._plan.seed}/{times}/{copy}/{name}").randbytes(block.size)


def _changed(said: NamespaceSettings, rng: random.Random) -> NamespaceSettings:
    """Some of the settings are others."""
    drawn = {
        "policy": rng.choice(POLICIES),
        "ttl_s": rng.choice((0.0, 0.5, 1.5, 4.0)),
        "quota_bytes": {
            tier: rng.choice((0, 16, 32, 128)) << 10
            for tier in ("dram", "ssd")
            if rng.random() < 0.7
        },
        "assured_bytes": {"dram": rng.choice((0, 16, 64)) << 10},
        "weight": rng.choice((0.25, 1.0, 8.0)),
        "operations_per_s": rng.choice((0.0, 0.0, 20.0)),
        "media": rng.choice(([], ["dram"], ["dram", "switch"], ["dram", "ssd"], ["dram", "cold"])),
    }
    names = rng.sample(sorted(drawn), rng.choice((1, 1, 2, 3)))
    changed = replace(said, **{name: drawn[name] for name in names})
    if changed.policy == "ttl" and not changed.ttl_s:
        return replace(changed, ttl_s=2.0)
    return changed
