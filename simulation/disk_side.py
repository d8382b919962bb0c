"""The SSD tier of a simulated agent: its core over its machine's disk.

Owns: what `kvcast.hostagent.ssd` owns, without files and threads: when the table that was found is
handed over, and what becomes of orders when the process dies. Must not know: what is moved and why,
or what can be wrong with a disk (`disk`, `faults`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.ssd import ARENA, SSD, SsdRules, SsdTier
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers.ssd.layout import Formatted, SsdError, cut_of, open_formatted, scan
from kvcast.hostagent.tiers.ssd.orders import Kind, Order
from kvcast.simulation.disk import SimDisk
from kvcast.simulation.tier_side import Owner, TierSide
from kvcast.simulation.world import World

UNIT_BYTES: Final = 4096
SLAB_BYTES: Final = 32 * UNIT_BYTES
HIGH_SHARES: Final = (0.5, 0.05, 0.0)
"""How full DRAM is when copies go down, one of these: much does."""
_BY_LOAD: Final = 0.25
"""How often that is the tier's own to say."""
SIZES: Final = (4, 12)
"""Slabs that a disk has."""
CLUSTER: Final = "cluster"
_RULES: Final = SsdRules(max_reads=4, max_reads_waiting=32, patience_s=0.3)
_NAMES: Final = {SSD: "disk", ARENA: "arena"}
_PAUSE_S: Final = 0.02
"""Between two pieces of the table that are handed over."""


def owner_of(node_id: str, cluster: str = CLUSTER) -> str:
    """What a node's file says whose it is."""
    return f"{node_id} of {cluster}"


class DiskSide(TierSide[Order]):
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
        *,
        kind: str = SSD,
    ) -> None:
        """`kind`: ARENA for a further arena."""
        super().__init__(world, owner, core, rng, pump)
        self._disk = disk
        self._node_id = node_id
        self._kind = kind
        self._formatted: Formatted | None = None
        self.tier: SsdTier | None = None

    def open(self, store: Store, memory: memoryview) -> SsdTier | None:
        """Open the disk, for what leaves a store in this memory; None where that cannot be."""
        rng, now = self._rng, self._owner.now
        size = (random.Random(self._node_id).choice(SIZES) + 1) * SLAB_BYTES
        cut = cut_of(owner_of(self._node_id), size, UNIT_BYTES, SLAB_BYTES)
        try:
            formatted = open_formatted(self._disk, cut, rng.getrandbits(63) | 1)
        except (SsdError, OSError):
            self._world.counts["disk.refused"] += 1
            return None
        # Its clock may have been set meanwhile.
        self.clock_error_s = rng.choice((0.0, 0.0, 0.0, -500.0, 3.0, 500.0))
        high = rng.choice(HIGH_SHARES)
        rules = replace(_RULES, high_share=high, low_share=0.7 * high)
        if self._world.stream(f"marks/{self._node_id}").random() < _BY_LOAD:
            rules = _RULES
        self._formatted = formatted
        tier = self.tier = SsdTier(
            *(rules, store, memory, [formatted], self.epoch_s, self._kind, self._kind)
        )
        tier.advance(now)
        tier.wake = self.wake
        return tier

    @property
    def memory(self) -> memoryview:
        """The blocks of a further arena."""
        assert self._formatted is not None
        cut = self._formatted.cut
        return self._disk.map(cut.blocks_offset, cut.slabs * cut.slab_bytes)

    def scan(self) -> None:
        """Hand over what lies there, a little at a time; the core knows the tier."""
        tier, formatted = self.tier, self._formatted
        if tier is None or formatted is None or not formatted.found:
            return
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
        for order in self._under_way:
            chance = self._rng.random()
            if order.kind is Kind.WRITE and chance < 0.6:
                if chance < 0.3:
                    self._disk.do(order)
                else:
                    self._disk.tear(order)
                    self._world.counts["disk.torn"] += 1
        self._under_way.clear()
        if machine:
            self._disk.lose_power()

    def _take(self, now: float) -> Iterable[Order]:
        if self.tier is None:
            return ()
        self.tier.epoch_s = self.epoch_s
        return self.tier.take_orders(now)

    def _timer(self, now: float) -> float | None:
        return None if self.tier is None else self.tier.get_timer(now)

    def _takes_s(self) -> float:
        return self._rng.uniform(0.0001, 0.002) + self._disk.slow_s * self._rng.random()

    def _do(self, order: Order) -> None:
        error, digest = self._disk.do(order)
        self._world.counts[f"{_NAMES[self._kind]}.{order.kind.value}"] += 1
        if error:
            self._world.counts["disk.errors"] += 1
        now = self._owner.now
        self._core.store.advance(now)
        order.ended(now, error, digest)
        if self.tier is not None:
            self.tier.check()

    def check(self) -> None:
        """Nothing is under way."""
        if self.tier is not None:
            self.tier.check()
            assert not self.under_way
            assert not self.tier.is_behind
