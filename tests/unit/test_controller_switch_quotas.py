"""Quotas of the switch's memory: what a namespace's blocks take there, entry by entry.

Oracle: at no write does a switch come to hold more segments of a namespace than its quota has
slots, whichever controllers write to it and whenever they die (`WatchedSwitch` looks at each one);
and what is chosen is what the rules of `admission.py` say. Cannot see: real switches.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.controller.core import program
from kvcast.controller.core.adaptive import AdaptiveOptions
from kvcast.controller.core.admission import BEST_WITH_QUOTA, Room
from kvcast.controller.core.node_report import STATES
from kvcast.controller.core.pool import Pool, SavedState
from kvcast.controller.core.reconcile import Change, EntryChange, SwitchState, Verb, apply
from kvcast.controller.core.tiers import DESCRIBE_BATCH, HeatSample
from kvcast.controller.http.metrics import metrics_of
from kvcast.controller.switch.control_loop import ControlLoop, StoreError, SwitchError
from kvcast.protocol.messages.control import (
    Describe,
    Described,
    Keep,
    Kept,
    NamespaceInfo,
    NamespaceSettings,
)
from kvcast.protocol.messages.wire import CELLS, SEGMENT_BYTES, BlockId
from registering import register
from test_controller_admission import chosen, contender, heat_with, holder
from test_controller_pool import OPTIONS, Driver, admit, heat, key, renew

# --- choice ---------------------------------------------------------------------------------


def test_a_namespace_that_has_its_quota_displaces_its_own_blocks_and_leaves_free_slots() -> None:
    weights = heat_with({1: 10, 2: 20, 3: 100})
    holders = [holder(1), holder(2)]
    choice = chosen([contender(3)], holders, free=2, heat=weights, rooms={1: Room(2, 0, 0)})
    assert not choice.admit, "there are slots, but not for it"
    assert [block for block, _ in choice.evict] == [holders[0].block]
    again = chosen(
        [contender(3)], holders[1:], free=2, coming_free=1, heat=weights, rooms={1: Room(2, 0, 1)}
    )
    assert not again.evict, "what it displaced is on its way out"
    assert again.refused[0][1] == "waits for slots to drain"
    last = chosen([contender(3)], holders[1:], free=3, heat=weights, rooms={1: Room(2, 1, 0)})
    assert [c.block for c, _ in last.admit] == [contender(3).block]


def test_rooms_are_counted_down_from_one_block_to_the_next() -> None:
    weights = heat_with({1: 30, 2: 20, 3: 10})
    wanted = [contender(number) for number in (1, 2, 3)]
    choice = chosen(wanted, [], free=3, heat=weights, rooms={1: Room(2, 2, 0)})
    assert [c.block for c, _ in choice.admit] == [c.block for c in wanted[:2]]
    assert choice.refused[0][1] == ("needs 1 slots, 0 can be had by its namespace's quota of 2")


def test_a_block_larger_than_the_quota_stays_out_and_so_does_a_pinned_one() -> None:
    weights = heat_with({1: 100}, size=3 * SEGMENT_BYTES)
    for pinned in (False, True):
        wanted = contender(1, size=3 * SEGMENT_BYTES, pinned=pinned)
        choice = chosen([wanted], [], free=4, heat=weights, rooms={1: Room(2, 2, 0)})
        assert not choice.admit
        assert choice.refused[0][1] == "needs 3 slots, its namespace's quota is 2"


def test_what_lacks_both_displaces_its_own_first_and_others_for_the_rest() -> None:
    weights = heat_with({1: 1, 2: 5, 9: 400}, size=2 * SEGMENT_BYTES)
    other = dataclasses.replace(holder(2), block=BlockId(2, key(2)), slots=3)
    mine = holder(1, slots=1)
    big = contender(9, size=2 * SEGMENT_BYTES)
    for room, gone in ((Room(2, 1, 0), [mine, other]), (Room(3, 2, 0), [other])):
        choice = chosen([big], [mine, other], heat=weights, rooms={1: room})
        assert [block for block, _ in choice.evict] == [h.block for h in gone]


# --- the pool -------------------------------------------------------------------------------


def limited(driver: Driver, namespace: int, slots: int, more_bytes: int = 0) -> None:
    quota = slots * SEGMENT_BYTES + more_bytes
    driver.pool.configure_namespace(
        namespace, NamespaceSettings(quota_bytes={"switch": quota}), driver.now
    )


def test_a_smaller_quota_lets_the_least_valuable_go_and_part_of_a_slot_is_none() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    namespace = driver.namespace()
    blocks = [BlockId(namespace, key(number)) for number in range(4)]
    for number, block in enumerate(blocks):
        admit(driver, block, reads=20 * (number + 1))
    driver.pool.tiers.pin(blocks[0])
    limited(driver, namespace, 2, more_bytes=SEGMENT_BYTES - 1)
    driver.round()
    for connection in (1, 2, 3):
        for keep in driver.take(connection, Keep):
            driver.say(connection, Kept(keep.request, namespace, keep.key, True))
    driver.round()
    assert set(driver.pool.tiers.residency.residents) == {blocks[0], blocks[3]}
    assert driver.pool.tiers.counts["evictions_quota"] == 2
    assert driver.pool.status(driver.now)["slots"]["taken"] == {str(namespace): 4}
    driver.round(1.0)
    assert driver.pool.status(driver.now)["slots"]["taken"] == {str(namespace): 2}


def test_prometheus_is_told_of_quotas_in_slots_and_of_nodes_by_state() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    namespace = driver.namespace()
    driver.pool.make_namespace("t", "unlimited", "1", "l", driver.now)
    limited(driver, namespace, 2, more_bytes=SEGMENT_BYTES - 1)
    driver.pool.drain("node-3")
    driver.round()
    link = {"connected": True, "primary": True, "programmed": True, "counts": {}}
    counts = {what: {} for what in ("link_counts", "counts", "http_counts", "reloads")}
    told = {
        **driver.pool.status(driver.now),
        "switch": link,
        "decisions": {},
        "fills": {},
        "controller": {"agent_connections": 3, "tick_s": 0.0, "failed_reloads": {}, **counts},
    }
    found = {
        family.name.removeprefix("kvcast_controller_"): {
            tuple(sample.labels.values()): sample.value for sample in family.samples
        }
        for family in metrics_of(told)
    }
    assert found["namespace_quota_slots"] == {(str(namespace),): 2}
    states = dict.fromkeys(STATES, 0) | Counter(node["state"] for node in told["nodes"])
    assert states["alive"] == 2
    assert found["nodes"] == {(state,): count for state, count in states.items()}


def test_hot_blocks_and_pins_beyond_a_quota_keep_no_others_out() -> None:
    driver = Driver(dataclasses.replace(OPTIONS, lease_s=1e6))
    driver.join(1, 2)
    limited_one, _ = driver.pool.make_namespace("t", "other", "1", "l", driver.now)
    namespace = driver.namespace()
    limited(driver, limited_one.namespace, 1)
    held = {}
    for number in range(4 * DESCRIBE_BATCH):
        block = BlockId(limited_one.namespace, key(number))
        held[block] = (SEGMENT_BYTES, 7)
        heat(driver, block, 500)
        driver.pool.tiers.pin(BlockId(limited_one.namespace, key(1000 + number)))
        held[BlockId(limited_one.namespace, key(1000 + number))] = (SEGMENT_BYTES, 7)
    other, pinned = BlockId(namespace, key(9)), BlockId(namespace, key(10))
    if namespace < limited_one.namespace:  # pins are looked at in order
        pinned = BlockId(namespace, key(1 << 100))
    heat(driver, other, 20)
    driver.pool.tiers.pin(pinned)
    held |= {other: (SEGMENT_BYTES, 7), pinned: (SEGMENT_BYTES, 7)}
    for _ in range(4):
        driver.round(0.5)
        driver.describe_all(held)
    residents = driver.pool.tiers.residency.residents
    assert {other, pinned} < residents.keys()
    assert Counter(block.namespace for block in residents)[limited_one.namespace] == 1
    best = driver.pool.tiers.heat.best(
        DESCRIBE_BATCH, driver.now, without=(), quotas={limited_one.namespace: 1}
    )
    assert Counter(block.namespace for block in best) == {
        namespace: 1,
        limited_one.namespace: BEST_WITH_QUOTA,
    }


# --- whoever writes -------------------------------------------------------------------------


class WatchedSwitch:
    """A switch with tables, which several controllers are connected to; see the module's text."""

    def __init__(self) -> None:
        self.holds = SwitchState()
        self.quotas: dict[int, int] = {}
        """In slots; what must not be exceeded by anything new."""

    def taken(self) -> Counter[int]:
        return Counter(
            match[0]
            for table, match in self.holds.entries
            if table == program.RESIDENT and isinstance(match[0], int)
        )

    def apply(self, change: Change) -> None:
        apply(self.holds, change)
        if not isinstance(change, EntryChange) or change.kind != program.RESIDENT:
            return
        namespace = change.key[1][0]
        if change.verb is Verb.INSERT and namespace in self.quotas:
            assert isinstance(namespace, int)
            assert self.taken()[namespace] <= self.quotas[namespace], "beyond the quota"


class Connection:
    """One controller's way to it; a write may end half way."""

    connected = True
    primary_id = 20

    def __init__(self, switch: WatchedSwitch) -> None:
        self.switch = switch
        self.primary = False
        self.mirror: SwitchState | None = None
        self.fails_after: int | None = None

    async def read(self) -> SwitchState:
        self.mirror = self.switch.holds
        return self.switch.holds.copy()

    async def write(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if self.fails_after is not None:
                if self.fails_after == 0:
                    self.fails_after, self.mirror = None, None
                    raise SwitchError("the connection was lost")
                self.fails_after -= 1
            self.switch.apply(change)

    async def table_counters(self, _table: str) -> dict[int, int]:
        return {}

    async def indexed_counters(self, _counter: str) -> dict[int, int]:
        return {}


class Disk:
    """A controller's state; writing it may fail."""

    def __init__(self) -> None:
        self.saved = SavedState()
        self.fails = False

    def save(self, state: SavedState) -> bool:
        if self.fails:
            raise StoreError("the disk is full")
        self.saved = state
        return True


NODES = (1, 2)
NAMESPACES = (1, 2)
WATCHED = dataclasses.replace(
    OPTIONS, slots=6, lease_s=1e6, adaptive=AdaptiveOptions(enabled=False)
)


class Machine:
    """A controller that lives again and again; the agents of `NODES` answer it at once."""

    def __init__(self, name: str, switch: WatchedSwitch, clock: list[float]) -> None:
        self.name = name
        self.disk = Disk()
        self.connection = Connection(switch)
        self.lives = 0
        self.clock = clock
        self.settings: dict[int, NamespaceSettings] = {}
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.connection.mirror = None
        self.pool = Pool(
            WATCHED, self.disk.saved, self.clock[0], first_generation=1000 * self.lives
        )
        self.loop = ControlLoop(
            self.pool, self.disk, tick_s=0.1, clock=lambda: self.clock[0],
            wake=lambda: None, on_settled=lambda: None,
        )  # fmt: skip
        self.loop.use(self.connection, self)
        if self.connection.primary:
            self.take_over()

    def take_over(self) -> None:
        """It is the switch's primary, and its operator sees to the settings."""
        self.connection.primary = True
        self.connection.mirror = None
        self.loop.switch_changed()
        for node in NODES:
            self.loop.received(node, register(node))
        for number in NAMESPACES:
            self.pool.namespaces.by_number.setdefault(
                number, NamespaceInfo(number, "t", f"m{number}", "1", "l")
            )
        for number, said in self.settings.items():
            self.pool.configure_namespace(number, said, self.clock[0])

    def send(self, connection: int, message: Any) -> None:
        match message:
            case Describe():
                blocks = [(r.namespace, r.key, size_of(r.key), 7) for r in message.blocks]
                self.loop.received(connection, Described(message.request, blocks))
            case Keep():
                self.loop.received(
                    connection, Kept(message.request, message.namespace, message.key, True)
                )

    def close(self, connection: int, reason: str) -> None:
        pass

    def round(self) -> None:
        if self.connection.primary:
            for node in NODES:
                self.loop.received(node, renew())
        asyncio.run(self.loop.round())


def size_of(name: bytes) -> int:
    return (1 + name[-1] % 3) * SEGMENT_BYTES


STEPS = st.one_of(
    st.tuples(st.just("heat"), st.sampled_from(NAMESPACES), st.integers(0, 11)),
    st.tuples(st.just("pin"), st.sampled_from(NAMESPACES), st.integers(0, 11)),
    st.tuples(st.just("round"), st.just(0), st.integers(0, 3)),
    st.tuples(st.just("round"), st.just(0), st.integers(0, 3)),
    st.tuples(st.just("quota"), st.sampled_from(NAMESPACES), st.integers(0, 5)),
    st.tuples(st.just("wrong"), st.just(0), st.integers(0, 5)),
    st.tuples(st.just("crash"), st.just(0), st.just(0)),
    st.tuples(st.just("other"), st.just(0), st.just(0)),
    st.tuples(st.just("disk"), st.just(0), st.booleans()),
    st.tuples(st.just("break"), st.just(0), st.integers(0, 5)),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(steps=st.lists(STEPS, min_size=10, max_size=50))
def test_no_write_of_any_controller_exceeds_a_quota(steps: list[tuple[str, int, int]]) -> None:
    clock = [0.0]
    switch = WatchedSwitch()
    machines = [Machine("a", switch, clock), Machine("b", switch, clock)]
    machines[0].take_over()

    def quota(number: int, slots: int) -> None:
        said = NamespaceSettings(quota_bytes={"switch": slots * SEGMENT_BYTES + 100})
        for machine in machines:
            machine.settings[number] = said
        switch.quotas[number] = slots
        primary.pool.configure_namespace(number, said, clock[0])

    primary = machines[0]
    for number in NAMESPACES:
        quota(number, 2)
        for name in range(12):
            primary.loop.heat([HeatSample(BlockId(number, key(name)), 0, 0b110, 40 + name)])
    for verb, first, second in steps:
        match verb:
            case "heat":
                block = BlockId(first, key(second))
                primary.loop.heat([HeatSample(block, 0, 0b110, 40 + second)])
            case "pin":
                primary.pool.tiers.pin(BlockId(first, key(second)))
            case "wrong":  # it leaves at once, and another may come in the same round
                residents = sorted(primary.pool.tiers.residency.residents)
                wrong = [(*block, 7) for block in residents[second : second + 1]]
                primary.loop.received(NODES[0], renew(wrong=wrong))
            case "round":
                clock[0] += (0.0, 0.1, 0.3, 2.0)[second]
                for machine in machines:
                    machine.round()
            case "quota":
                quota(first, second)
            case "crash":
                primary.start()
            case "other":
                primary.connection.primary = False
                primary.loop.switch_changed()
                primary = machines[1 - machines.index(primary)]
                primary.take_over()
            case "disk":
                primary.disk.fails = bool(second)
            case "break":
                primary.connection.fails_after = second
        primary.pool.tiers.residency.check()
    primary.connection.fails_after = None
    for _ in range(30):
        clock[0] += 0.3
        primary.round()
    taken = switch.taken()
    assert all(taken[number] <= slots for number, slots in switch.quotas.items())
    assert taken == primary.pool.tiers.residency.staying()
    assert all(
        CELLS.segments_of(r.size_bytes) == len(r.slots)
        for r in primary.pool.tiers.residency.residents.values()
    )


def test_what_a_controller_remembers_does_not_come_back_beside_what_the_switch_has() -> None:
    """Its disk failed, and it died: of one namespace it remembers another block than the switch
    holds, and both would be there until the strange one is deleted."""
    clock = [0.0]
    switch = WatchedSwitch()
    machine = Machine("a", switch, clock)
    machine.take_over()
    switch.quotas = {1: 1}
    machine.settings = {1: NamespaceSettings(quota_bytes={"switch": SEGMENT_BYTES})}
    machine.pool.configure_namespace(1, machine.settings[1], clock[0])

    def only(*blocks: BlockId) -> None:
        tiers = machine.pool.tiers
        tiers.forget(NAMESPACES, clock[0], "others are wanted")
        for _ in range(4):
            clock[0] += 0.3
            machine.round()
        for block in blocks:
            tiers.pin(block)
            for _ in range(4):
                clock[0] += 0.3
                machine.round()
        assert set(tiers.residency.residents) == set(blocks)

    remembered, there = BlockId(1, key(3)), BlockId(1, key(6))
    only(remembered)
    machine.disk.fails = True
    only(BlockId(2, key(3)), there)  # which is in another slot than the one before
    machine.pool.tiers.forget((2,), clock[0], "its slot is free again")
    clock[0] += 0.3
    machine.round()
    assert switch.taken() == {1: 1}
    machine.start()
    assert set(machine.pool.tiers.residency.residents) == {remembered}
    machine.round()
    reasons = [d["reason"] for d in machine.pool.decisions(clock[0])]
    assert "its namespace's quota is taken by what the switch has" in reasons
