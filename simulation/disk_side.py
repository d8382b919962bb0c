"""The SSD tier of a simulated agent: its core over its machine's disk.

Owns: what `kvcast.hostagent.ssd` owns, without files and threads: when orders are done, when the
table that was found is handed over, and what becomes of orders when the process dies. Must not
know: what is moved and why, or what can be wrong with a disk (`disk`, `faults`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Protocol

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.ssd import SsdRules, SsdTier
from kvcast.hostagent.tiers.ssd.layout import SsdError, cut_of, open_formatted, scan
from kvcast.hostagent.tiers.ssd.orders import Kind, Order
from kvcast.simulation.disk import SimDisk
from kvcast.simulation.world import Alarm, World

UNIT_BYTES: Final = 4096
SLAB_BYTES: Final = 32 * UNIT_BYTES
HIGH_SHARES: Final = (0.5, 0.05, 0.0)
"""How full DRAM is when copies go down, one of these: much does."""
SIZES: Final = (4, 12)
"""Slabs that a disk has."""
_PAUSE_S: Final = 0.02
"""Between two pieces of the table that are handed over."""


class Owner(Protocol):
    """The process that has the disk."""

    @property
    def now(self) -> float: ...

    dead: bool

    def world_time(self, when: float) -> float: ...

    def when_running(self, action: Callable[[], None]) -> None: ...


class DiskSide:
    """See the module's text. `start` may find a disk that cannot be used: then there is no tier, as
    where an operator starts the agent without."""

    def __init__(
        self,
        world: World,
        owner: Owner,
        core: AgentCore,
        disk: SimDisk,
        node_id: str,
        rng: random.Random,
        pump: Callable[[], None],
    ) -> None:
        self._world = world
        self._owner = owner
        self._core = core
        self._disk = disk
        self._node_id = node_id
        self._rng = rng
        self._pump = pump
        self._pending: dict[Order, None] = {}
        self._alarm = Alarm(world, lambda: owner.when_running(self._run))
        self.tier: SsdTier | None = None

    def start(self) -> None:
        """Open the disk, and hand over what lies there, a little at a time."""
        rng, now = self._rng, self._owner.now
        size = (random.Random(self._node_id).choice(SIZES) + 1) * SLAB_BYTES
        cut = cut_of(f"{self._node_id} of cluster", size, UNIT_BYTES, SLAB_BYTES)
        try:
            formatted = open_formatted(self._disk, cut, rng.getrandbits(63) | 1)
        except (SsdError, OSError):
            self._world.counts["disk.refused"] += 1
            return
        # Its clock may have been set meanwhile.
        epoch_s = 1e9 - now + self._world.now + rng.choice((0.0, 0.0, 0.0, -500.0, 3.0, 500.0))
        high = rng.choice(HIGH_SHARES)
        rules = SsdRules(high, 0.7 * high, max_reads=4, max_reads_waiting=32, patience_s=0.3)
        tier = self.tier = SsdTier(rules, self._core.store, self._core.memory, [formatted], epoch_s)
        tier.advance(now)
        tier.wake = lambda: self._world.after(0.0, lambda: self._owner.when_running(self._run))
        self._core.use_tiers([tier])
        if formatted.found:
            when = self._world.now
            for piece in scan(self._disk, formatted):
                when += _PAUSE_S
                self._world.at(
                    when,
                    lambda piece=piece: self._owner.when_running(  # type: ignore[misc]
                        lambda: tier.found(0, piece)
                    ),
                )
            self._world.at(when + _PAUSE_S, lambda: self._owner.when_running(tier.scanned))

    def die(self, *, machine: bool) -> None:
        """The process is gone, in the middle of what it was writing; or the machine is."""
        for order in self._pending:
            chance = self._rng.random()
            if order.kind is Kind.WRITE and chance < 0.6:
                if chance < 0.3:
                    self._disk.do(order)
                else:
                    self._disk.tear(order)
                    self._world.counts["disk.torn"] += 1
        self._pending.clear()
        if machine:
            self._disk.lose_power()

    def _run(self) -> None:
        tier = self.tier
        if tier is None or self._owner.dead:
            return
        now = self._owner.now
        for order in tier.take_orders(now):
            self._pending[order] = None
            delay_s = self._rng.uniform(0.0001, 0.002) + self._disk.slow_s * self._rng.random()
            self._world.after(
                delay_s,
                lambda order=order: self._owner.when_running(  # type: ignore[misc]
                    lambda: self._do(order)
                ),
            )
        when = tier.get_timer(now)
        if when is not None:
            self._alarm.set(max(self._owner.world_time(when), self._world.now) + 1e-4)

    def _do(self, order: Order) -> None:
        if self._pending.pop(order, self) is self:
            return  # the process has died
        error, digest = self._disk.do(order)
        self._world.counts[f"disk.{order.kind.value}"] += 1
        if error:
            self._world.counts["disk.errors"] += 1
        now = self._owner.now
        self._core.store.advance(now)
        order.ended(now, error, digest)
        if self.tier is not None:
            self.tier.check()
        self._run()
        self._pump()

    def check(self) -> None:
        """Nothing is under way."""
        if self.tier is not None:
            self.tier.check()
            assert not self._pending
            assert not self.tier.is_behind
