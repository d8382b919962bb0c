"""The simulated controller: the real pool and control loop in a process that may die at any step.

Owns: when rounds run, and connections of agents by number. Must not know: what a round does.

The disk is an SQLite database in memory, written and read by the real `Store`: it outlives the
process, unless a fault says that it is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from kvcast.controller.core.pool import Action, Plan, Pool, PoolOptions, SavedState
from kvcast.controller.store import Store
from kvcast.controller.switch.control_loop import ControlLoop
from kvcast.protocol.links.control_callee import ControlCallee, EncodedOnce
from kvcast.protocol.messages.control import AgentMessage, NamespaceSettings, PoolMap
from kvcast.simulation.streams import Process, StreamDriver, StreamEnd
from kvcast.simulation.switch import SimSwitch, SwitchConnection, run_coroutine
from kvcast.simulation.world import World

GATHER_EVENTS_S: Final = 0.01


class RoundFailedError(Exception):
    """A round of the control loop ended in an exception: a mistake of the product."""


class SimController:
    """One controller on one machine; `start` begins a process, `crash` ends it."""

    def __init__(
        self,
        world: World,
        name: str,
        switch: SimSwitch,
        options: PoolOptions,
        *,
        election_id: int,
        tick_s: float,
        decided: Callable[[ControllerProcess, PoolMap], None],
        may_answer: Callable[[frozenset[tuple[int, str]]], None],
    ) -> None:
        self.name = name
        self.alive = False
        self.options = options
        self.store = Store(":memory:")
        self.blocked = False
        """Agents cannot reach it."""
        self._world = world
        self._switch = switch
        self._election_id = election_id
        self._tick_s = tick_s
        self._decided = decided
        self._may_answer = may_answer
        self._lives = 0
        self.process: ControllerProcess | None = None

    def start(self) -> None:
        """Begin a process with what the disk holds."""
        assert not self.alive
        self.alive = True
        self._lives += 1
        self.process = ControllerProcess(self._world, self, self._lives)

    def crash(self, *, disk_lost: bool) -> None:
        """End the process where it stands."""
        assert self.process is not None
        self.alive = False
        self.process.die()
        self.process = None
        if disk_lost:
            self.store.close()
            self.store = Store(":memory:")
            self.store.load()


class _WatchedPool(Pool):
    """A pool of which every map is known as soon as it is decided on: from then on the switch may
    let a new home's answers through. Its nodes are looked through after all that can change them.
    """

    def __init__(
        self,
        decided: Callable[[PoolMap], None],
        may_answer: Callable[[frozenset[tuple[int, str]]], None],
        options: PoolOptions,
        saved: SavedState,
        now: float,
        *,
        first_generation: int,
    ) -> None:
        self._decided = decided
        self._may_answer = may_answer
        super().__init__(options, saved, now, first_generation=first_generation)

    def plan(self) -> Plan:
        plan = super().plan()
        self._decided(plan.map)
        self._may_answer(self.hot.guarded)
        self.membership.check()
        return plan

    def received(self, connection: int, message: AgentMessage, now: float) -> list[Action]:
        actions = super().received(connection, message, now)
        self.membership.check()
        return actions

    def disconnected(self, connection: int) -> None:
        super().disconnected(connection)
        self.membership.check()

    def advance(self, now: float) -> list[Action]:
        actions = super().advance(now)
        self.membership.check()
        return actions

    def drain(self, node_id: str) -> None:
        super().drain(node_id)
        self.membership.check()

    def undrain(self, node_id: str, now: float) -> None:
        super().undrain(node_id, now)
        self.membership.check()


class ControllerProcess(Process):
    """One life of a controller."""

    def __init__(self, world: World, machine: SimController, life: int) -> None:
        super().__init__(world)
        self._machine = machine
        self._dead = False
        self.link_counts: Counter[str] = Counter()
        self._links: dict[int, tuple[ControlCallee, StreamDriver]] = {}
        self._encoded = EncodedOnce()
        self._next_link = 1
        self._running = False
        self._wanted = False
        self._next_check = 0.0
        self._abandon: Callable[[], None] = _nothing
        self.pool = _WatchedPool(
            self._decided,
            machine._may_answer,
            machine.options,
            machine.store.load(),
            world.now,
            first_generation=world.stream(f"generation/{machine.name}/{life}").getrandbits(31),
        )
        self.loop = ControlLoop(
            self.pool,
            machine.store,
            tick_s=machine._tick_s,
            clock=lambda: world.now,
            wake=self._wake,
            on_settled=_nothing,
        )
        self.switch = SwitchConnection(
            machine._switch,
            machine._election_id,
            slots=machine.options.slots,
            switch_changed=lambda: None if self._dead else self.loop.switch_changed(),
            heat_counted=lambda samples: None if self._dead else self.loop.heat(samples),
        )
        self.loop.use(self.switch, self)
        self._sleep()

    def _decided(self, pool_map: PoolMap) -> None:
        # A backup has no agents and programs nothing: nobody has its empty maps. But who came to
        # it before it was one may still get a map.
        if not self.loop.is_backup or self._links:
            self._machine._decided(self, pool_map)

    def die(self) -> None:
        self._dead = True
        self._abandon()
        self.switch.close()
        for _, driver in self._links.values():
            driver.end.stream.reset(by=1)

    # --- rounds -----------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._wanted:
            self._wanted = True
            if not self._running:
                self._world.after(GATHER_EVENTS_S, self._round)

    def _sleep(self) -> None:
        when = self.loop.next_round_at()
        self._next_check = when
        self._world.at(when, lambda: self._round() if self._next_check == when else None)

    def _round(self) -> None:
        if self._running or self._dead:
            return
        self._running = True
        self._wanted = False
        self._next_check = -1.0
        self._abandon = run_coroutine(self._world, self.loop.round(), self._finished)

    def _finished(self, error: BaseException | None) -> None:
        self._running = False
        if error is not None:
            raise RoundFailedError(f"{self._machine.name}: {error!r}") from error
        if self._wanted:
            self._world.after(GATHER_EVENTS_S, self._round)
        else:
            self._sleep()

    @property
    def name(self) -> str:
        """The controller's."""
        return self._machine.name

    # --- operators --------------------------------------------------------------------------

    def drain(self, node_id: str) -> None:
        self.pool.drain(node_id)
        self._wake()

    def undrain(self, node_id: str) -> None:
        self.pool.undrain(node_id, self._world.now)
        self._wake()

    def make_namespace(self, parts: tuple[str, str, str, str]) -> int:
        """Its number."""
        info, _ = self.pool.make_namespace(*parts, self._world.now)
        self._wake()
        return info.namespace

    def set_namespace(self, number: int, settings: NamespaceSettings) -> None:
        self.pool.configure_namespace(number, settings, self._world.now)
        self._wake()

    def delete_namespace(self, number: int) -> None:
        self.pool.delete_namespace(number, self._world.now)
        self._wake()

    # --- agents -----------------------------------------------------------------------------

    def when_running(self, action: Callable[[], None]) -> None:
        if not self._dead:
            action()

    def accept(self, end: StreamEnd) -> None:
        """Take an agent's connection."""
        number = self._next_link
        self._next_link += 1

        def over() -> None:
            del self._links[number]
            self.loop.disconnected(number)

        link = ControlCallee(
            self.now,
            3 * self._machine.options.lease_s,
            lambda message: self.loop.received(number, message),
            self.link_counts,
        )
        driver = StreamDriver(self._world, self, end, link, over=over)
        self._links[number] = link, driver
        driver.accept()

    def send(self, connection: int, message: Any) -> None:
        """The control loop's way to an agent."""
        if connection in self._links and not self._dead:
            link, driver = self._links[connection]
            link.send(self.now, self._encoded(message))
            driver.flush()

    def close(self, connection: int, _reason: str) -> None:
        """The control loop ends a connection."""
        if connection in self._links and not self._dead:
            self._world.counts["control_links_closed"] += 1
            link, driver = self._links[connection]
            link.end(self.now)
            driver.flush()


def _nothing() -> None:
    pass
