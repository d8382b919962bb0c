"""The control loop: what a round leaves in the switch, and what it looks through for that.

Oracle: the plan of the pool, and every entry of a switch that does what it is told. Cannot see: a
switch that fails or goes (the simulation, `tests/integration/test_controller_switch.py`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvcast.bench.controller import SimulatedSwitch
from kvcast.controller.core import program
from kvcast.controller.core.pool import Pool, PoolOptions
from kvcast.controller.core.reconcile import SwitchState
from kvcast.controller.store import SavedState
from kvcast.controller.switch.control_loop import ControlLoop
from kvcast.protocol.messages.wire import BlockId
from registering import register

OPTIONS = PoolOptions(
    settings=program.Settings(enabled=True, lease_ticks=100, heat_threshold=3),
    slots=4,
    read_padding_bytes=0,
    lease_s=3.0,
)


class Bed:
    """A control loop, its switch, and agents that hear nothing."""

    def __init__(self, options: PoolOptions = OPTIONS) -> None:
        self.now = 0.0
        self.pool = Pool(options, SavedState(), self.now, first_generation=1000)
        self.loop = ControlLoop(
            self.pool,
            self,  # type: ignore[arg-type]
            tick_s=1.0,
            clock=lambda: self.now,
            wake=lambda: None,
            on_settled=lambda: None,
        )
        self.switch = SimulatedSwitch()
        self.loop.use(self.switch, self)  # type: ignore[arg-type]

    def save(self, _state: SavedState) -> bool:
        return False

    def send(self, _connection: int, _message: object) -> None: ...

    def close(self, _connection: int, _reason: str) -> None: ...

    def join(self, number: int) -> None:
        self.loop.received(number, register(number))

    async def round(self) -> SwitchState:
        """What the switch holds after one: the plan, and nothing else."""
        self.now += 0.1
        await self.loop.round()
        held = self.switch.mirror
        assert held is not None
        desired = self.pool.plan().desired
        assert held.entries == desired.entries
        assert held.groups == desired.groups
        return held


async def test_a_round_leaves_the_plan_in_the_switch_and_nothing_else() -> None:
    bed = Bed()
    for number in (1, 2):
        bed.join(number)
    info, _ = bed.pool.make_namespace("t", "m", "1", "l", bed.now)
    other, _ = bed.pool.make_namespace("t", "m", "2", "l", bed.now)
    held = await bed.round()
    members = bed.pool.plan().desired.parts
    assert members is not None
    block = BlockId(info.namespace, bytes(16))
    residency = bed.pool.tiers.residency
    residency.admit(block, digest=7, size_bytes=100, pinned=True, now=bed.now)
    held = await bed.round()
    entry = (program.RESIDENT, (block.namespace, 0, 0))
    assert entry in held.entries
    parts = bed.pool.plan().desired.parts
    assert parts is not None
    assert parts[0] is members[0], "a block has come, and no member has changed"
    residency.evict(block)
    held = await bed.round()
    assert entry not in held.entries
    guard = (program.NAMESPACE_GUARD, (1, other.namespace))
    assert guard in held.entries
    bed.pool.delete_namespace(other.namespace, bed.now)
    held = await bed.round()
    assert guard not in held.entries
    bed.join(3)
    held = await bed.round()
    assert (program.NAMESPACE_GUARD, (3, info.namespace)) in held.entries


async def test_a_node_that_the_switch_serves_and_nobody_knows_is_seen() -> None:
    bed = Bed()
    bed.join(1)
    await bed.round()
    assert bed.loop._strangers() == frozenset()
    bed.join(2)
    await bed.round()
    assert bed.loop._strangers() == frozenset()
    for number in (1, 2):
        node = bed.pool.membership.nodes.pop(f"node-{number}")
        bed.pool.membership._views = None
        mac = program.mac_number(f"02:6b:76:00:00:{number:02x}")
        assert bed.loop._strangers() == {mac}
        bed.pool.membership.nodes[node.node_id] = node
        bed.pool.membership._views = None
        assert bed.loop._strangers() == frozenset()


async def test_unknown_nodes_of_a_switch_that_comes_back_are_seen() -> None:
    bed = Bed()
    bed.join(1)
    held = await bed.round()
    mac = program.mac_number("02:6b:76:00:00:09")
    held.entries[program.L2_FORWARD, (mac,)] = next(iter(held.entries.values()))
    bed.switch._holds, bed.switch.mirror = held, None
    await bed.loop.round()
    assert bed.loop._strangers() == {mac}
    assert bed.loop.counts["takeovers"] == 1


async def test_the_fabrics_router_is_no_stranger() -> None:
    mac = "02:00:00:00:00:fe"
    bed = Bed(replace(OPTIONS, settings=replace(OPTIONS.settings, router_mac=mac)))
    bed.join(1)
    held = await bed.round()
    assert (program.L2_FORWARD, (program.mac_number(mac),)) in held.entries
    assert bed.loop._strangers() == frozenset()


@pytest.mark.parametrize("lost", [True, False])
async def test_a_switch_that_holds_something_else_is_looked_through(*, lost: bool) -> None:
    bed = Bed()
    bed.join(1)
    held = await bed.round()
    strange = (program.BUCKET_HOME, (5, 31))
    held.entries[strange] = next(iter(held.entries.values()))
    held.entries.pop((program.BUCKET_HOME, (5, 1)))
    if lost:
        bed.loop.round_failed()
    else:
        bed.switch._holds, bed.switch.mirror = held, None  # it was away, and is read again
    held = await bed.round()
    assert strange not in held.entries
    assert (program.BUCKET_HOME, (5, 1)) in held.entries
