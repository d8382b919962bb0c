"""The pool as a whole, without sockets or clocks: agents, plans, and the life of a resident.

Oracle: the messages of `protocol/messages/control.py` and the steps of `pool.py`. A small driver
takes the steps that the service takes, against a model of the switch. Cannot see: real switches
and agents (the integration tests have both).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, TypeVar
from unittest import mock

import msgspec
import pytest
from equipped_agent import equipped_core
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.controller.core import program
from kvcast.controller.core.adaptive import AdaptiveOptions
from kvcast.controller.core.admission import ValueOptions
from kvcast.controller.core.membership import DrainError
from kvcast.controller.core.namespaces import Namespaces, TenantRules
from kvcast.controller.core.pool import GUARD_ENTRIES, Close, Pool, PoolOptions, SavedState, Send
from kvcast.controller.core.reconcile import Change, MatchValue, SwitchState, Verb, apply, diff
from kvcast.controller.core.tiers import AdmitMode, HeatSample, PinError
from kvcast.controller.switch.control_loop import ControlLoop, SwitchError
from kvcast.hostagent.core.metrics import quantile
from kvcast.protocol.links.control_callee import MAX_MESSAGE_BYTES
from kvcast.protocol.messages.control import (
    AT_END,
    MAX_COUNTER_CHARS,
    MAX_COUNTERS,
    AgentMessage,
    Credit,
    Describe,
    Described,
    GroupInfo,
    GroupReply,
    GroupRequest,
    HandedOver,
    HotBlock,
    Keep,
    Kept,
    Leave,
    Loads,
    NamespaceReads,
    NamespaceReply,
    NamespaceRequest,
    NamespaceSettings,
    PoolMap,
    Refused,
    Registered,
    Renew,
    Replicas,
    Residents,
    number_of,
)
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.wire import CHUNKINGS, SEGMENT_BYTES, BlockId, bucket_of
from registering import register

M = TypeVar("M", bound=msgspec.Struct)

OPTIONS = PoolOptions(
    settings=program.Settings(enabled=True, lease_ticks=100, heat_threshold=3),
    slots=4,
    read_padding_bytes=0,
    lease_s=3.0,
    rebalance_after_s=2.0,
    replicas=1,
    value=ValueOptions(half_life_s=10.0, horizon_s=10.0, min_reads=1.95, min_stay_s=0.0),
    refresh_s=1e9,
)


class Driver:
    """A pool, the model of its switch, and agents that only listen."""

    def __init__(self, options: PoolOptions = OPTIONS, saved: SavedState | None = None) -> None:
        self.now = 0.0
        self.pool = Pool(options, saved or SavedState(), self.now, first_generation=1000)
        self.switch: SwitchState | None = SwitchState()
        self.heard: dict[int, list[msgspec.Struct]] = {}
        self.closed: dict[int, str] = {}
        self.writes = 0
        self.sent: dict[int, int] = {}
        """By connection: what its node says that it has sent, in bytes."""
        self._requests = itertools.count(1)

    def say(self, connection: int, message: AgentMessage) -> None:
        self._do(self.pool.received(connection, message, self.now))

    def round(self, seconds: float = 0.0) -> None:
        """Time passes; then what the service does when it wakes."""
        self.now += seconds
        self._do(self.pool.advance(self.now))
        plan = self.plan = self.pool.plan()
        if self.switch is not None:
            changes = diff(self.switch, plan.desired)
            for change in changes.upserts:
                apply(self.switch, change)
        self._do(self.pool.published(plan))
        if self.switch is not None:
            for change in changes.deletes:
                apply(self.switch, change)
            self.writes += len(changes)
            self.pool.programmed(plan, self.now)
        self.pool.membership.check()
        self.pool.tiers.residency.check()

    def renew_all(self, **changes: object) -> None:
        for node in list(self.pool.membership.nodes.values()):
            if node.connection is not None:
                self.say(node.connection, renew(**changes))

    def take(self, connection: int, kind: type[M]) -> list[M]:
        """The messages of this kind that the connection heard, and forget them."""
        heard = self.heard.get(connection, [])
        self.heard[connection] = [m for m in heard if not isinstance(m, kind)]
        return [m for m in heard if isinstance(m, kind)]

    def _do(self, actions: list[Send | Close]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.heard.setdefault(action.connection, []).append(action.message)
            else:
                self.closed[action.connection] = action.reason
                self.pool.disconnected(action.connection)

    def join(self, *numbers: int) -> None:
        for number in numbers:
            self.say(number, register(number))
        self.round()

    def namespace(self, connection: int = 1) -> int:
        self.say(
            connection,
            NamespaceRequest(next(self._requests), tenant="t", model="m", version="1", layout="l"),
        )
        self.round()
        return self.take(connection, NamespaceReply)[-1].info.namespace

    def home_of(self, block: BlockId) -> int:
        """The connection of the block's home; connection numbers are node numbers here."""
        return int(self.pool.placement[bucket_of(block.key)][0].removeprefix("node-"))

    def describe_all(self, held: dict[BlockId, tuple[int, int]]) -> int:
        """Every agent answers what it was asked, from `held`; returns the questions answered."""
        answered = 0
        for connection in list(self.heard):
            for question in self.take(connection, Describe):
                blocks = [
                    (ref.namespace, ref.key, *held[BlockId(ref.namespace, ref.key)])
                    for ref in question.blocks
                    if BlockId(ref.namespace, ref.key) in held
                ]
                self.say(connection, Described(request=question.request, blocks=blocks))
                answered += 1
        return answered


def renew(**changes: object) -> Renew:
    message = Renew(counters={}, hot=[], arena_used_bytes=0, blocks=0, epoch=0)
    return msgspec.structs.replace(message, **changes)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def heat(driver: Driver, block: BlockId, count: int, ports: int = 0b110) -> None:
    driver.pool.heat([HeatSample(block, 0, ports, count)], driver.now)


# --- agents ---------------------------------------------------------------------------------


def test_a_registered_agent_gets_its_index_and_then_the_map_that_the_switch_follows() -> None:
    driver = Driver()
    driver.say(1, register(1))
    assert driver.take(1, Registered)[0].index == 1
    assert not driver.take(1, PoolMap), "no map before the switch is programmed"
    driver.round()
    (map_,) = driver.take(1, PoolMap)
    assert map_.epoch == 1
    assert map_.buckets == [[1]] * 1024
    assert [n.node_id for n in map_.nodes] == ["node-1"]
    assert driver.switch is not None
    assert ("bucket_home", (0, 1)) in driver.switch.entries


def test_every_agent_hears_of_a_change_once() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    for connection in (1, 2, 3):
        (map_,) = driver.take(connection, PoolMap)
        assert map_.epoch == 1
        assert {index for homes in map_.buckets for index in homes} == {1, 2, 3}
        assert all(len(homes) == 2 for homes in map_.buckets)
    for _ in range(3):
        driver.round(0.5)
    assert not driver.take(1, PoolMap)
    assert driver.pool.epoch == 1


def test_without_a_switch_the_map_is_published_all_the_same() -> None:
    driver = Driver()
    driver.switch = None
    driver.join(1)
    assert driver.take(1, PoolMap)
    assert not driver.pool.status(0.0)["nodes"][0]["programmed"]


def test_a_dead_agents_buckets_move_to_the_next_in_order() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    before = driver.take(1, PoolMap)[0].buckets
    for _ in range(3):
        driver.round(1.0)
        driver.say(1, renew())
        driver.say(3, renew())
    driver.round()
    (map_,) = driver.take(1, PoolMap)
    assert map_.epoch == 2
    for was, is_ in zip(before, map_.buckets, strict=True):
        assert 2 not in is_
        assert is_[0] == next(index for index in was if index != 2)
    assert driver.switch is not None
    homes = {match for table, match in driver.switch.entries if table == "bucket_home"}
    assert not any(port == 2 for _, port in homes)
    assert ("port_guard", (2, 0x0A4D0002)) in driver.switch.entries, "it may still read"


def test_leave_moves_the_buckets_without_waiting() -> None:
    driver = Driver()
    driver.join(1, 2)
    driver.say(2, Leave())
    driver.round()
    assert driver.take(1, PoolMap)[-1].buckets == [[1]] * 1024
    assert driver.closed == {2: "left"}


def test_a_refused_agent_is_told_why_and_closed() -> None:
    driver = Driver()
    driver.join(1)
    driver.say(9, register(1, incarnation=2))
    assert driver.take(9, Refused)[0].reason == "node-1 is already connected"
    assert 9 in driver.closed
    assert driver.pool.membership.nodes["node-1"].connection == 1


def test_an_agent_that_reconnects_gets_the_map_again_and_its_old_connection_is_closed() -> None:
    driver = Driver()
    driver.join(1)
    driver.take(1, PoolMap)
    driver.say(7, register(1))
    driver.round()
    assert driver.take(7, PoolMap)[0].epoch == 1
    assert 1 in driver.closed
    assert driver.pool.membership.nodes["node-1"].connection == 7


def test_whoever_speaks_before_registering_is_closed() -> None:
    driver = Driver()
    for number, message in enumerate(
        (renew(), Leave(), Described(1, []), Kept(1, 1, key(1), True))
    ):
        driver.say(50 + number, message)
        assert driver.closed[50 + number] == "not registered"


def test_a_connection_cannot_register_a_second_node() -> None:
    driver = Driver()
    driver.join(1)
    driver.say(1, register(2))
    assert "node-1's" in driver.take(1, Refused)[0].reason
    assert set(driver.pool.membership.nodes) == {"node-1"}


def test_namespaces_are_answered_when_the_switch_lets_them_through() -> None:
    driver = Driver()
    driver.join(1, 2)
    request = NamespaceRequest(5, tenant="t", model="m", version="1", layout="l")
    driver.say(1, request)
    assert not driver.take(1, NamespaceReply)
    driver.round()
    (reply,) = driver.take(1, NamespaceReply)
    number = number_of("t", "m", "1", "l")
    assert reply.info.namespace == number
    assert driver.switch is not None
    assert ("namespace_guard", (2, number)) in driver.switch.entries
    driver.say(2, request)
    assert driver.take(2, NamespaceReply)[0].info.namespace == number, "known: answered at once"
    assert driver.take(2, PoolMap)[-1].namespaces == [reply.info]


def test_an_answer_that_waits_for_the_switch_names_nothing_that_was_deleted_meanwhile() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    kept = driver.namespace()
    question = NamespaceRequest(5, tenant="t", model="m", version="2", layout="l")
    first, _ = driver.pool.make_namespace("t", "m", "2", "l", driver.now)
    for node in (1, 2):
        driver.say(node, question)
    driver.say(3, GroupRequest(6, first.namespace, ["node-1", "node-3"]))
    driver.say(3, GroupRequest(7, kept, ["node-1", "node-3"]))
    driver.pool.disconnected(2)
    driver.pool.delete_namespace(first.namespace, driver.now)
    driver.round()
    (reply,) = driver.take(1, NamespaceReply)
    assert reply.request == 5
    assert reply.info.namespace != first.namespace, "made again for whoever asks"
    pool_map = driver.take(1, PoolMap)[-1]
    assert reply.info in pool_map.namespaces
    assert pool_map.deleted == [first.namespace]
    assert not driver.take(2, NamespaceReply)
    (refused,) = driver.take(3, Refused)
    assert refused.request == 6
    assert "was deleted" in refused.reason
    assert [reply.request for reply in driver.take(3, GroupReply)] == [7]


def test_a_namespace_gets_the_same_number_from_a_controller_that_knows_nothing() -> None:
    """Readers and engines keep numbers for as long as they live; that of one namespace must not
    come to stand for another, in whatever order they are made anew."""
    versions = [str(number) for number in range(40)]
    first, second = Namespaces(), Namespaces()
    before = {v: first.namespace("t", "m", v, "l", "n")[0].namespace for v in versions}
    after = {v: second.namespace("t", "m", v, "l", "n")[0].namespace for v in reversed(versions)}
    assert before == after
    assert len(set(before.values())) == len(versions)
    # The parts are told apart, and another's number is never given away.
    assert number_of("ab", "c", "1", "l") != number_of("a", "bc", "1", "l")
    taken = Namespaces()
    info, _ = taken.namespace("t", "m", "1", "l", "n")
    moved = msgspec.structs.replace(info, version="another")
    taken.by_number[info.namespace] = moved
    again, made = taken.namespace("t", "m", "1", "l", "n")
    assert made
    assert again.namespace == info.namespace % 0xFFFF + 1
    assert taken.by_number[info.namespace] == moved


def test_groups_are_found_or_made_and_bounded() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    namespace = driver.namespace()
    driver.say(1, GroupRequest(1, namespace, ["node-2", "node-1", "node-2"]))
    driver.round()
    (made,) = driver.take(1, GroupReply)
    driver.say(2, GroupRequest(9, namespace, ["node-1", "node-2"]))
    (found,) = driver.take(2, GroupReply)
    assert made.info == found.info
    assert driver.switch is not None
    assert driver.switch.entries["reader_group", (namespace, 1)].params == (0b11, 1024)
    for bad in ([], ["node-9"], ["a"] * 40, [f"node-{i}" for i in range(40)]):
        driver.say(1, GroupRequest(2, namespace, bad))
        assert driver.take(1, Refused)[0].request == 2
    driver.say(1, GroupRequest(3, 999, ["node-1"]))
    assert "999" in driver.take(1, Refused)[0].reason


def test_a_group_takes_only_nodes_that_may_use_its_namespace() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    namespace = driver.namespace()
    names = driver.pool.namespaces.by_number
    names[namespace] = msgspec.structs.replace(names[namespace], nodes=["node-1", "node-2"])
    driver.say(1, GroupRequest(1, namespace, ["node-1", "node-3"]))
    assert "node-3" in driver.take(1, Refused)[0].reason
    driver.say(1, GroupRequest(2, namespace, ["node-1", "node-2"]))
    driver.round()
    assert driver.take(1, GroupReply)[0].request == 2


def test_a_node_makes_no_groups_in_a_namespace_that_it_may_not_use() -> None:
    rules = TenantRules({"t": frozenset({"node-1", "node-2"})})
    driver, namespace = resident_driver(dataclasses.replace(OPTIONS, tenants=rules))
    for nodes in (["node-1"], ["node-2"], ["node-1", "node-2"]):
        driver.say(3, GroupRequest(1, namespace, nodes))
        assert "is not for node-3" in driver.take(3, Refused)[0].reason
    assert not driver.pool.namespaces.groups, "there is room for those of its own nodes"


def company(driver: Driver, connection: int, namespace: int, at: int = 0) -> GroupInfo | None:
    """A node says that it reads the namespace, and is so far; what it is told, if it is."""
    driver.say(connection, GroupRequest(7, namespace, [], at))
    replies = driver.take(connection, GroupReply)
    return replies[0].info if replies else None


def test_nodes_that_read_the_same_now_find_each_other_under_one_number() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    namespace = driver.namespace()
    alone = company(driver, 1, namespace, 3)
    assert alone == GroupInfo(namespace, 0, ["node-1"], 3)
    assert company(driver, 2, namespace) is None, "the switch does not know of them yet"
    driver.round(1.0)
    (second,) = driver.take(2, GroupReply)
    assert second.info == GroupInfo(namespace, 1, ["node-1", "node-2"], 3), "where the first is"
    assert driver.switch is not None
    entry = ("reader_group", (namespace, 1))
    assert driver.switch.entries[entry].params[0] == 0b011
    first = company(driver, 1, namespace, 9)
    assert first == GroupInfo(namespace, 1, ["node-1", "node-2"], 0), "at once: it is known"
    company(driver, 3, namespace)
    driver.round(0.5)
    assert driver.take(3, GroupReply)[0].info == GroupInfo(
        namespace, 1, ["node-1", "node-2", "node-3"], 9
    )
    assert driver.switch.entries[entry].params[0] == 0b111
    assert driver.take(2, PoolMap)[-1].groups[0].nodes == ["node-1", "node-2", "node-3"]
    # Who is through is gone at once, and who says nothing any more after a while.
    assert company(driver, 2, namespace, AT_END) == GroupInfo(namespace, 0, ["node-2"], AT_END)
    driver.round()
    assert driver.switch.entries[entry].params[0] == 0b101
    company(driver, 2, namespace)
    driver.round()
    assert driver.take(2, GroupReply)[0].info.nodes == ["node-1", "node-2", "node-3"]
    assert driver.switch.entries[entry].params[0] == 0b111
    driver.renew_all()
    for _ in range(3):
        driver.round(1.0)
        driver.renew_all()
        company(driver, 1, namespace, 20)
        company(driver, 3, namespace, 20)
    driver.round()
    assert driver.switch.entries[entry].params[0] == 0b101
    for _ in range(4):
        driver.round(1.0)
        driver.renew_all()
    assert entry not in driver.switch.entries
    assert not driver.take(2, PoolMap)[-1].groups
    assert company(driver, 2, namespace, 4) == GroupInfo(namespace, 0, ["node-2"], 4)


def test_a_company_is_bounded_and_of_those_who_may_read() -> None:
    driver = Driver(dataclasses.replace(OPTIONS, lease_s=1e6))
    driver.join(*range(1, 33))
    namespace = driver.namespace()
    for connection in range(1, 33):
        company(driver, connection, namespace, connection)
    driver.round()
    found = [driver.take(connection, GroupReply) for connection in range(2, 32)]
    assert {reply.info.group for (reply,) in found} == {1}
    assert company(driver, 32, namespace, 5) == GroupInfo(namespace, 0, ["node-32"], 5), "alone"
    assert company(driver, 31, namespace) is not None
    driver.say(1, GroupRequest(3, namespace, ["node-1"], 0))
    assert "no nodes" in driver.take(1, Refused)[0].reason
    names = driver.pool.namespaces.by_number
    names[namespace] = msgspec.structs.replace(names[namespace], nodes=["node-1"])
    for strange in (namespace, 999):
        driver.say(2, GroupRequest(4, strange, [], 0))
        assert "is not for node-2" in driver.take(2, Refused)[0].reason
    driver.pool.delete_namespace(namespace, driver.now)
    driver.round(10.0)
    assert not driver.pool.namespaces.groups


def test_a_company_without_a_free_group_or_a_switch_reads_alone() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    namespace = driver.namespace()
    known = frozenset(driver.pool.membership.nodes)
    # Named groups are found by their nodes; a company's is not taken for one.
    company(driver, 1, namespace)
    company(driver, 2, namespace)
    named, made = driver.pool.namespaces.group(namespace, ["node-1", "node-2"], known)
    assert made
    assert not named.company
    assert [group.nodes for group in driver.pool.saved().groups] == [named.nodes], "and it alone"
    driver.round(5.0)
    assert driver.take(2, GroupReply)
    full = {
        (namespace, number): dataclasses.replace(named, group=number, ordinal=number)
        for number in range(1, 65)
    }
    driver.pool.namespaces.groups = full
    assert company(driver, 1, namespace) == GroupInfo(namespace, 0, ["node-1"])
    assert company(driver, 2, namespace) == GroupInfo(namespace, 0, ["node-2"])
    plain = Driver(
        dataclasses.replace(OPTIONS, settings=dataclasses.replace(OPTIONS.settings, enabled=False))
    )
    plain.join(1, 2)
    number = plain.namespace()
    assert company(plain, 1, number) == GroupInfo(number, 0, ["node-1"])
    assert company(plain, 2, number, 6) == GroupInfo(number, 0, ["node-2"], 6)


def test_a_restarted_controller_changes_neither_epoch_nor_switch() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    namespace = driver.namespace()
    driver.say(1, GroupRequest(1, namespace, ["node-1", "node-2"]))
    block = BlockId(namespace, key(1))
    heat(driver, block, 50)
    heat(driver, block, 50)
    driver.round()
    driver.describe_all({block: (SEGMENT_BYTES, 7)})
    driver.round()
    assert block in driver.pool.tiers.residency.residents

    restarted = Driver(saved=driver.pool.saved())
    restarted.switch = driver.switch
    assert restarted.switch is not None
    restarted.pool.found(restarted.switch)
    restarted.say(11, register(1))
    restarted.round()
    assert restarted.writes == 0
    (map_,) = restarted.take(11, PoolMap)
    assert map_.epoch == driver.pool.epoch
    assert map_.buckets == driver.take(1, PoolMap)[-1].buckets


def test_strange_counters_and_reports_are_ignored_and_counted() -> None:
    driver = Driver()
    driver.join(1, 2)
    namespace = driver.namespace()
    mine = next(BlockId(namespace, key(n)) for n in range(99) if driver.home_of(
        BlockId(namespace, key(n))) == 1)  # fmt: skip
    driver.say(
        1,
        renew(
            counters={"ok": 1.0, "nan": float("nan"), "x" * 65: 1.0},
            hot=[
                HotBlock(namespace, mine.key, 5, 1, 0, 100, 1),
                HotBlock(namespace + 1, mine.key, 5, 1, 0, 100, 1),
                HotBlock(namespace, mine.key, 5, 1, 0, 0, 1),
            ],
        ),
    )
    assert driver.pool.agent_counters["node-1"] == {"ok": 1.0}
    assert driver.pool.counts["agent_counters_ignored"] == 1
    assert driver.pool.counts["reports_ignored"] == 2
    assert mine in driver.pool.tiers.heat


def test_all_numbers_of_an_agent_that_has_everything_are_taken_with_room_for_more() -> None:
    driver = Driver()
    driver.join(1)
    core = equipped_core()
    core.metrics.fetch_time.add(0.2)
    report = core.renewal()
    for part in ("recovery_", "arena9_", "ssd_", "cold_", "courier_put_", "rdma_", "landing_"):
        assert any(name.startswith(part) for name in report.counters), part
    driver.say(1, report)
    assert driver.pool.agent_counters["node-1"] == report.counters
    assert quantile(driver.pool.agent_counters["node-1"], "fetch_seconds", 0.5) is not None
    assert driver.pool.counts["agent_counters_ignored"] == 0
    assert len(report.counters) < 0.75 * MAX_COUNTERS, "raise it before there is no room"
    assert max(map(len, report.counters)) < 0.75 * MAX_COUNTER_CHARS
    assert len(MessageCodec(Renew).encode(report)) < MAX_MESSAGE_BYTES / 8


def test_of_more_counters_than_there_may_be_the_first_are_taken() -> None:
    driver = Driver()
    driver.join(1)
    counters = {f"counter_{number}": 1.0 for number in range(MAX_COUNTERS + 1)}
    driver.say(1, renew(counters=counters))
    assert list(driver.pool.agent_counters["node-1"]) == list(counters)[:-1]
    assert driver.pool.counts["agent_counters_ignored"] == 1


def test_heat_of_an_unknown_namespace_is_ignored() -> None:
    driver = Driver()
    driver.join(1)
    heat(driver, BlockId(77, key(1)), 100)
    assert driver.pool.counts["heat_ignored"] == 1
    assert len(driver.pool.tiers.heat) == 0


# --- residents ------------------------------------------------------------------------------


def resident_driver(options: PoolOptions = OPTIONS) -> tuple[Driver, int]:
    driver = Driver(options)
    driver.join(1, 2, 3)
    return driver, driver.namespace()


def admit(
    driver: Driver, block: BlockId, reads: int = 50, digest: int = 7, size: int = SEGMENT_BYTES
) -> None:
    heat(driver, block, reads)
    driver.round()
    assert driver.describe_all({block: (size, digest)}) == 1
    driver.round()
    assert block in driver.pool.tiers.residency.residents


def test_a_hot_block_is_described_by_its_home_and_admitted_with_what_the_home_said() -> None:
    driver, namespace = resident_driver()
    block = BlockId(namespace, key(5))
    heat(driver, block, 50)
    driver.round()
    home = driver.home_of(block)
    (question,) = driver.heard[home][-1:]
    assert isinstance(question, Describe)
    driver.describe_all({block: (SEGMENT_BYTES + 1, 0xABC)})
    driver.round()
    assert driver.switch is not None
    residents = {m: a for (t, m), a in driver.switch.entries.items() if t == "resident"}
    assert residents.keys() == {(namespace, 5, 0), (namespace, 5, 1)}
    assert {a.params[3:] for a in residents.values()} == {(0xABC, SEGMENT_BYTES + 1)}
    assert driver.pool.decisions(driver.now)[0]["decision"] == "admit"


def test_a_cold_block_and_one_that_its_home_lost_stay_out() -> None:
    driver, namespace = resident_driver()
    heat(driver, BlockId(namespace, key(1)), 1)
    driver.round()
    assert driver.describe_all({}) == 0
    heat(driver, BlockId(namespace, key(2)), 50)
    driver.round()
    assert driver.describe_all({}) == 1
    driver.round()
    assert not driver.pool.tiers.residency.residents
    driver.round(1.0)
    assert driver.describe_all({}) == 0, "the answer is believed for a while"


def test_no_answer_is_asked_for_again_after_its_deadline() -> None:
    driver, namespace = resident_driver()
    block = BlockId(namespace, key(2))
    heat(driver, block, 500)
    driver.round()
    home = driver.home_of(block)
    assert len(driver.take(home, Describe)) == 1
    driver.round(1.0)
    driver.renew_all()
    assert not driver.take(home, Describe)
    driver.round(1.5)
    assert len(driver.take(home, Describe)) == 1


def test_an_answer_of_another_node_or_to_no_question_is_ignored() -> None:
    driver, namespace = resident_driver()
    block = BlockId(namespace, key(2))
    heat(driver, block, 500)
    driver.round()
    home = driver.home_of(block)
    (question,) = driver.take(home, Describe)
    stranger = next(n for n in (1, 2, 3) if n != home)
    lie = [(namespace, block.key, 100, 666)]
    driver.say(stranger, Described(question.request, lie))
    driver.say(home, Described(question.request + 99, lie))
    driver.round()
    assert not driver.pool.tiers.residency.residents
    assert driver.pool.tiers.counts["unexpected_answers"] == 2


def test_a_displaced_block_of_value_is_kept_by_its_home_before_its_slot_is_taken() -> None:
    driver, namespace = resident_driver()
    old = [BlockId(namespace, key(n)) for n in range(4)]
    for block in old:
        admit(driver, block, reads=20)
    new = BlockId(namespace, key(9))
    heat(driver, new, 400)
    driver.round()
    driver.describe_all({new: (SEGMENT_BYTES, 9)})
    driver.round()
    leaving = [r.block for r in driver.pool.tiers.residency.residents.values() if r.leaving]
    (victim,) = leaving
    home = driver.home_of(victim)
    (keep,) = driver.take(home, Keep)
    assert (keep.key, keep.digest, keep.size_bytes) == (victim.key, 7, SEGMENT_BYTES)
    driver.round(0.5)
    assert driver.switch is not None
    number = int.from_bytes(victim.key, "big")
    assert ("resident", (namespace, number, 0)) in driver.switch.entries, "serves until kept"
    driver.say(home, Kept(keep.request, namespace, victim.key, True))
    driver.round()
    assert ("resident", (namespace, number, 0)) not in driver.switch.entries
    assert new not in driver.pool.tiers.residency.residents, "the slot rests"
    driver.round(0.1)
    assert new not in driver.pool.tiers.residency.residents
    driver.round(0.15)
    assert new in driver.pool.tiers.residency.residents
    assert driver.pool.tiers.counts["kept"] == 1


def test_a_block_that_is_pinned_while_its_home_is_asked_to_keep_it_stays() -> None:
    driver, namespace = resident_driver(dataclasses.replace(OPTIONS, slots=1))
    old, new = BlockId(namespace, key(1)), BlockId(namespace, key(9))
    admit(driver, old, reads=20)
    heat(driver, new, 400)
    driver.round()
    driver.describe_all({new: (SEGMENT_BYTES, 9)})
    driver.round()
    home = driver.home_of(old)
    (keep,) = driver.take(home, Keep)
    driver.pool.tiers.pin(old)
    driver.say(home, Kept(keep.request, *old, held=True))
    for _ in range(3):
        driver.round(1.0)
        assert set(driver.pool.tiers.residency.residents) == {old}
        driver.renew_all()


def test_a_home_that_will_not_keep_it_is_asked_a_bounded_number_of_times() -> None:
    driver, namespace = resident_driver()
    for n in range(4):
        admit(driver, BlockId(namespace, key(n)), reads=20)
    new = BlockId(namespace, key(9))
    heat(driver, new, 400)
    driver.round()
    driver.describe_all({new: (SEGMENT_BYTES, 9)})
    asked = []
    for _ in range(10):
        for connection in (1, 2, 3):
            for keep in driver.take(connection, Keep):
                asked.append(connection)
                driver.say(connection, Kept(keep.request, namespace, keep.key, False))
        driver.round(0.1)
        driver.describe_all({new: (SEGMENT_BYTES, 9)})
    assert len(asked) == 3
    assert asked[0] == asked[1] != asked[2], "its home twice, then the next home"
    assert driver.pool.tiers.counts["keeps_failed"] == 1
    assert new in driver.pool.tiers.residency.residents


def test_a_cold_resident_is_displaced_without_ceremony() -> None:
    driver, namespace = resident_driver()
    for n in range(4):
        admit(driver, BlockId(namespace, key(n)), reads=20)
    for _ in range(60):
        driver.renew_all()
        driver.round(1.0)
    new = BlockId(namespace, key(9))
    heat(driver, new, 100)
    driver.round()
    driver.describe_all({new: (SEGMENT_BYTES, 9)})
    assert not any(driver.take(c, Keep) for c in (1, 2, 3))
    driver.round()
    driver.round(0.25)
    assert new in driver.pool.tiers.residency.residents


def test_switch_hits_are_credited_to_the_home_once() -> None:
    driver, namespace = resident_driver()
    block = BlockId(namespace, key(3))
    admit(driver, block)
    (slot,) = driver.pool.tiers.residency.residents[block].slots
    home = driver.home_of(block)
    for total in (100, 140, 140, 5):
        driver._do(driver.pool.hits({slot: total, (slot + 1) % 4: 9}, driver.now))
    credits_ = driver.take(home, Credit)
    assert [c.hits for c in credits_] == [[(namespace, block.key, 40)], [(namespace, block.key, 5)]]
    assert driver.pool.tiers.residency.residents[block].hits == 45


def found_wrong(driver: Driver, connection: int, block: BlockId, digest: int = 7) -> None:
    driver.say(connection, renew(wrong=[(*block, digest)]))
    driver.round()


def test_what_readers_get_wrong_from_the_switch_leaves_it_for_longer_each_time() -> None:
    driver, namespace = resident_driver()
    block = BlockId(namespace, key(3))
    tiers = driver.pool.tiers

    def absent_s() -> float:
        began = driver.now
        while block not in tiers.residency.residents:
            heat(driver, block, 500)
            driver.renew_all()
            driver.round(0.5)
            driver.describe_all({block: (SEGMENT_BYTES, 7)})
            driver.round()
        return driver.now - began

    absent_s()
    for bar_s in (2, 4, 8, 16, 32, 64, 64):
        found_wrong(driver, 2, block)
        assert block not in tiers.residency.residents
        found_wrong(driver, 1, block)  # another who read the same
        assert bar_s <= absent_s() <= bar_s + 1
    assert tiers.counts["residents_wrong"] == 7
    for _ in range(70):
        driver.renew_all()
        driver.round(1.0)
    found_wrong(driver, 1, block)
    assert 2 <= absent_s() <= 3, "the other times were long ago"


def test_who_may_not_read_a_block_cannot_say_that_it_is_wrong_in_the_switch() -> None:
    rules = TenantRules({"t": frozenset({"node-1", "node-2"})})
    driver, namespace = resident_driver(dataclasses.replace(OPTIONS, tenants=rules))
    block = BlockId(namespace, key(3))
    admit(driver, block)
    found_wrong(driver, 3, block)
    found_wrong(driver, 2, block, digest=8)  # of another copy, which is not there any more
    found_wrong(driver, 2, BlockId(namespace, key(4)))
    assert block in driver.pool.tiers.residency.residents
    found_wrong(driver, 2, block)
    assert block not in driver.pool.tiers.residency.residents


def test_a_pinned_block_that_came_wrong_says_why_it_is_not_there() -> None:
    driver, namespace = resident_driver()
    block = BlockId(namespace, key(3))
    driver.pool.tiers.pin(block)
    admit(driver, block)
    found_wrong(driver, 2, block)
    assert driver.pool.tiers.why_not(block) == "a reader got it wrong from the switch"
    assert block in driver.pool.tiers.pins


def test_other_bytes_at_the_home_end_the_residency_and_the_new_ones_are_admitted() -> None:
    driver, namespace = resident_driver()
    block = BlockId(namespace, key(3))
    admit(driver, block, reads=500, digest=7)
    driver.round(3.0 - 0.5)
    driver.renew_all()
    driver.pool.tiers.wrong_digests_seen()
    driver.round(0.1)
    driver.describe_all({block: (SEGMENT_BYTES, 8)})
    assert driver.pool.tiers.residency.coming_free == 1, "the former slot rests"
    driver.round()
    resident = driver.pool.tiers.residency.residents[block]
    assert (resident.digest, resident.generation) == (8, 1001)
    reasons = [d["reason"] for d in driver.pool.decisions(driver.now)]
    assert "its home holds other bytes now" in reasons


def test_a_slot_in_which_the_switch_has_another_block_is_given_up_until_that_has_left() -> None:
    """A controller comes back with what it knew, after another has worked in between."""
    driver, namespace = resident_driver()
    old, new = BlockId(namespace, key(1)), BlockId(namespace, key(2))
    admit(driver, old)
    (slot,) = driver.pool.tiers.residency.residents[old].slots
    saved = driver.pool.saved()
    assert driver.switch is not None

    driver.pool.tiers.forget([namespace], driver.now, "another controller knows nothing of it")
    driver.round()
    driver.round(1.0)
    driver.renew_all()
    admit(driver, new)
    assert driver.pool.tiers.residency.residents[new].slots == (slot,)

    restarted = Driver(saved=saved)
    restarted.switch = driver.switch
    restarted.pool.found(restarted.switch)
    restarted.join(1, 2, 3)
    resident = [match for table, match in driver.switch.entries if table == "resident"]
    assert resident == [], "no two blocks ever share a slot"
    assert restarted.pool.tiers.residency.coming_free == 1
    restarted.round(1.0)
    restarted.renew_all()
    admit(restarted, old)
    reasons = [d["reason"] for d in restarted.pool.decisions(restarted.now)]
    assert "the switch has another block in its slots" in reasons


def test_a_pinned_block_enters_without_heat_stays_and_leaves_when_unpinned() -> None:
    driver, namespace = resident_driver(dataclasses.replace(OPTIONS, admit=AdmitMode.PIN))
    block = BlockId(namespace, key(3))
    driver.pool.tiers.pin(block)
    driver.round()
    driver.describe_all({block: (SEGMENT_BYTES, 7)})
    driver.round()
    assert driver.pool.tiers.residency.residents[block].pinned
    assert driver.pool.saved().pins == (block,)
    hot = BlockId(namespace, key(4))
    heat(driver, hot, 500)
    driver.round()
    assert driver.describe_all({hot: (SEGMENT_BYTES, 7)}) == 0, "--admit pin takes only pins"
    assert driver.pool.tiers.unpin(block)
    assert not driver.pool.tiers.unpin(block)
    driver.round()
    assert block not in driver.pool.tiers.residency.residents


def test_pins_of_blocks_that_nobody_holds_keep_no_others_out() -> None:
    driver, namespace = resident_driver(dataclasses.replace(OPTIONS, lease_s=1e6))
    pins = [BlockId(namespace, key(n)) for n in range(1000)]
    for block in pins:
        driver.pool.tiers.pin(block)
    hot = BlockId(namespace, key(2000))
    held = dict.fromkeys((pins[-1], hot), (SEGMENT_BYTES, 7))
    for _ in range(10):
        heat(driver, hot, 50)
        driver.round(0.5)
        driver.describe_all(held)
    driver.round()
    assert driver.pool.tiers.residency.residents.keys() == held.keys()


def test_reads_of_blocks_that_nobody_holds_keep_no_others_out() -> None:
    driver, namespace = resident_driver(dataclasses.replace(OPTIONS, lease_s=1e6))
    held = BlockId(namespace, key(2000))
    for _ in range(4):
        for number in range(100):
            heat(driver, BlockId(namespace, key(number)), 500)
        heat(driver, held, 50)
        driver.round(0.5)
        driver.describe_all({held: (SEGMENT_BYTES, 7)})
    driver.round()
    assert driver.pool.tiers.residency.residents.keys() == {held}


def test_blocks_larger_than_the_switchs_memory_keep_no_others_out() -> None:
    driver, namespace = resident_driver(dataclasses.replace(OPTIONS, lease_s=1e6))
    large = [BlockId(namespace, key(number)) for number in range(100)]
    small = BlockId(namespace, key(2000))
    sizes = dict.fromkeys(large, ((OPTIONS.slots + 1) * SEGMENT_BYTES, 7))
    for _ in range(4):
        for block in large:
            heat(driver, block, 5000)
        heat(driver, small, 50)
        driver.round(0.5)
        driver.describe_all({**sizes, small: (SEGMENT_BYTES, 7)})
    driver.round()
    assert driver.pool.tiers.residency.residents.keys() == {small}


@pytest.mark.parametrize("mode", [AdmitMode.OFF, AdmitMode.PIN, AdmitMode.AUTO])
def test_a_restart_under_another_mode_lets_go_of_what_the_mode_does_not_admit(
    mode: AdmitMode,
) -> None:
    driver, namespace = resident_driver()
    hot, pinned = BlockId(namespace, key(1)), BlockId(namespace, key(2))
    admit(driver, hot)
    driver.pool.tiers.pin(pinned)
    driver.round()
    driver.describe_all({pinned: (SEGMENT_BYTES, 7)})
    driver.round()
    restarted = Driver(dataclasses.replace(OPTIONS, admit=mode), driver.pool.saved())
    restarted.join(1, 2, 3)
    restarted.round()
    left = {
        AdmitMode.OFF: set(),
        AdmitMode.PIN: {pinned},
        AdmitMode.AUTO: {hot, pinned},
    }
    assert set(restarted.pool.tiers.residency.residents) == left[mode]


def test_pins_are_refused_while_admission_is_off() -> None:
    driver, namespace = resident_driver(dataclasses.replace(OPTIONS, admit=AdmitMode.OFF))
    with pytest.raises(PinError, match="off"):
        driver.pool.tiers.pin(BlockId(namespace, key(3)))
    heat(driver, BlockId(namespace, key(3)), 500)
    driver.round()
    assert driver.describe_all({}) == 0


def test_a_plain_pool_programs_forwarding_only() -> None:
    settings = program.Settings(False, 100, 3)
    driver = Driver(dataclasses.replace(OPTIONS, settings=settings))
    driver.join(1, 2)
    driver.namespace()
    assert driver.switch is not None
    assert {table for table, _ in driver.switch.entries} == {"settings", "l2_forward"}
    assert driver.switch.entries["settings", ()].params[0] == 0
    assert set(driver.switch.groups) == {1}
    assert all(node["programmed"] for node in driver.pool.status(driver.now)["nodes"])


def test_a_set_of_ports_that_recurs_gets_a_group_of_its_own() -> None:
    driver, namespace = resident_driver()
    for n in range(2):
        heat(driver, BlockId(namespace, key(n)), 1, ports=0b110)
        heat(driver, BlockId(namespace, key(n)), 1, ports=0b100)
    driver.round()
    assert driver.switch is not None
    assert driver.switch.entries["port_set", (0b110,)].params == (2048,)
    assert driver.switch.groups[2048] == frozenset({(2, 0), (3, 0)})
    assert ("port_set", (0b100,)) not in driver.switch.entries


# --- anything at all ------------------------------------------------------------------------

SMALL = st.integers(0, 4)
NODE_IDS = st.integers(1, 5).map("node-{}".format)
KEYS = SMALL.map(key)
HUGE = st.sampled_from([0, 1, SEGMENT_BYTES, 5 * SEGMENT_BYTES, 2**32, 2**64 - 1])
MESSAGES = st.one_of(
    st.builds(register, st.integers(1, 6), incarnation=st.integers(1, 2)),
    st.builds(
        Renew,
        st.dictionaries(st.sampled_from(["a", "b"]), st.floats(), max_size=2),
        st.lists(st.builds(HotBlock, SMALL, KEYS, HUGE, SMALL, SMALL, HUGE, HUGE), max_size=3),
        HUGE,
        HUGE,
        HUGE,
    ),
    st.builds(Described, st.integers(0, 9), st.lists(st.tuples(SMALL, KEYS, HUGE, HUGE))),
    st.builds(Kept, st.integers(0, 9), SMALL, KEYS, st.booleans()),
    st.builds(NamespaceRequest, HUGE, *[st.sampled_from(["", "x", "y"])] * 4),
    st.builds(GroupRequest, HUGE, SMALL, st.lists(NODE_IDS, max_size=4)),
    st.builds(Leave),
)
STEPS = st.one_of(
    st.tuples(st.just("say"), st.integers(1, 6), MESSAGES),
    st.tuples(st.just("close"), st.integers(1, 6), st.none()),
    st.tuples(st.just("round"), st.sampled_from([0.0, 0.3, 2.5, 20.0]), st.none()),
    st.tuples(st.just("heat"), st.integers(0, 300), KEYS),
    st.tuples(st.just("pin"), SMALL, KEYS),
    st.tuples(st.just("hits"), st.integers(0, 99), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, max_size=60))
def test_no_sequence_of_messages_breaks_the_pool_or_its_books(
    steps: list[tuple[str, Any, Any]],
) -> None:
    driver = Driver()
    driver.join(1, 2)
    driver.namespace()
    epochs = [driver.pool.epoch]
    for verb, first, second in steps:
        match verb:
            case "say":
                driver.say(first, second)
            case "close":
                driver.pool.disconnected(first)
            case "round":
                driver.round(first)
            case "heat":
                heat(driver, BlockId(1, second), first)
            case "pin":
                driver.pool.tiers.pin(BlockId(first, second))
            case "hits":
                driver._do(driver.pool.hits(dict.fromkeys(range(4), first), driver.now))
        driver.pool.tiers.residency.check()
        epochs.append(driver.pool.epoch)
    driver.round()
    assert epochs == sorted(epochs)
    assert driver.switch is not None
    assert driver.switch.entries == driver.pool.plan().desired.entries
    map_ = driver.pool.plan().map
    listed = {node.index for node in map_.nodes}
    assert all(set(homes) <= listed for homes in map_.buckets)
    assert Pool(OPTIONS, driver.pool.saved(), 0.0, first_generation=1).saved() == (
        driver.pool.saved()
    )
    json.dumps(driver.pool.status(driver.now), allow_nan=False)
    driver.pool.decisions(driver.now)


# --- chunks ---------------------------------------------------------------------------------


def test_chunks_are_as_large_as_every_live_nodes_network_takes() -> None:
    driver = Driver()
    driver.say(1, register(1, mtu_bytes=9000))
    driver.round()
    driver.say(2, register(2, mtu_bytes=4200))
    driver.round()
    driver.say(3, register(3))
    driver.round()
    assert [m.chunk_bytes for m in driver.take(1, PoolMap)] == [8192, 4096, 1024]
    driver.say(3, register(3, incarnation=2, mtu_bytes=9000))
    driver.round()
    assert driver.take(2, PoolMap)[-1].chunk_bytes == 4096
    driver.say(2, Leave())
    driver.round()
    assert driver.take(1, PoolMap)[-1].chunk_bytes == 8192


def test_an_operator_can_keep_chunks_small() -> None:
    driver = Driver(dataclasses.replace(OPTIONS, max_chunk_bytes=2048))
    driver.say(1, register(1, mtu_bytes=9000))
    driver.round()
    assert driver.take(1, PoolMap)[-1].chunk_bytes == 2048


def test_agents_that_read_large_chunks_are_told_what_the_switch_holds() -> None:
    driver = Driver()
    for number in (1, 2, 3):
        driver.say(number, register(number, mtu_bytes=9000))
    driver.round()
    block = BlockId(driver.namespace(), key(5))
    assert driver.take(2, Residents)[-1].blocks == []
    admit(driver, block)
    (told,) = driver.take(2, Residents)
    assert [BlockId(b.namespace, b.key) for b in told.blocks] == [block]
    for _ in range(3):
        driver.round(0.1)
    assert not driver.take(2, Residents), "nothing has changed"
    driver.say(4, register(4, mtu_bytes=9000))
    driver.round()
    assert [b.key for b in driver.take(4, Residents)[-1].blocks] == [block.key]
    driver.pool.tiers.mode = AdmitMode.OFF
    driver.pool.tiers.forget([block.namespace], driver.now, "why not")
    driver.round()
    assert driver.take(4, Residents)[-1].blocks == []


def test_agents_are_told_what_the_switch_holds_whatever_they_read() -> None:
    driver, namespace = resident_driver()
    block = BlockId(namespace, key(5))
    admit(driver, block)
    assert [b.key for b in driver.take(2, Residents)[-1].blocks] == [block.key]


def test_nothing_is_said_of_a_switch_that_holds_nothing() -> None:
    settings = dataclasses.replace(OPTIONS.settings, enabled=False)
    driver = Driver(dataclasses.replace(OPTIONS, settings=settings))
    driver.join(1, 2)
    assert not driver.take(1, Residents)


def test_heat_of_large_chunks_counts_as_that_of_what_the_switch_would_keep() -> None:
    driver, namespace = resident_driver()
    small, large = BlockId(namespace, key(5)), BlockId(namespace, key(6))
    for segment in range(9):
        driver.pool.heat([HeatSample(small, segment, 0b110, 50)], driver.now)
    for segment in range(2):  # the first is as long as one of the switch's, the next as eight
        number = CHUNKINGS[3].number(segment)
        driver.pool.heat([HeatSample(large, number, 0b110, 50)], driver.now)
    heat = driver.pool.tiers.heat
    for block in (small, large):
        heat.described(block, 9 * SEGMENT_BYTES, driver.now)
    assert heat.value(large, driver.now) == heat.value(small, driver.now) > 0
    driver.pool.heat([HeatSample(large, CHUNKINGS[3].number(0), 0b110, 1)], driver.now)
    assert heat.value(large, driver.now) > heat.value(small, driver.now), "it is no larger for that"


# --- hot replicas ---------------------------------------------------------------------------


def hot_pool() -> tuple[Driver, BlockId, int]:
    """A pool of three nodes without replicas, one of which sends all that its link carries; the
    block, and the connection of its home."""
    driver = Driver(dataclasses.replace(OPTIONS, replicas=0))
    for number in (1, 2, 3):
        driver.say(
            number,
            msgspec.structs.replace(
                register(number), link_bits_per_s=8_000_000, arena_bytes=64 << 20
            ),
        )
    driver.round()
    block = BlockId(driver.namespace(), key(7))
    return driver, block, driver.home_of(block)


def report(driver: Driver, connection: int, block: BlockId, sent_bytes: int) -> None:
    size = SEGMENT_BYTES
    hot = [HotBlock(*block, sent_bytes // size, 2, 0, size, 99)] if sent_bytes else []
    total = driver.sent[connection] = driver.sent.get(connection, 0) + sent_bytes
    counters = {"payload_bytes_sent_udp_total": float(total)}
    driver.say(connection, renew(counters=counters, hot=hot))


def be_hot(driver: Driver, block: BlockId, home: int, seconds: int) -> None:
    for _ in range(2 * seconds):
        for connection in (1, 2, 3):
            report(driver, connection, block, 500_000 if connection == home else 0)
        driver.round(0.5)


def test_a_replica_answers_for_its_bucket_before_anybody_is_told_of_it() -> None:
    driver, block, home = hot_pool()
    be_hot(driver, block, home, 5)
    asked = {c: m for c in (1, 2, 3) for m in driver.take(c, Keep)}
    assert asked
    assert home not in asked
    (replica, keep) = next(iter(asked.items()))
    assert driver.switch is not None
    entry = ("bucket_home", (bucket_of(block.key), replica))
    assert entry not in driver.switch.entries
    assert not any(driver.take(c, Replicas) for c in (1, 2, 3))
    driver.say(replica, Kept(keep.request, *block, held=True))
    plan = driver.pool.plan()
    assert entry in plan.desired.entries
    driver.round()
    assert entry in driver.switch.entries
    index = driver.pool.membership.nodes[f"node-{replica}"].index
    for connection in (1, 2, 3):
        (told,) = driver.take(connection, Replicas)
        assert [(b.key, b.nodes) for b in told.blocks] == [(block.key, [index])]
    assert driver.pool.status(driver.now)["replicas"][0]["nodes"] == [f"node-{replica}"]
    assert {m.percents[0][0] for m in driver.take(1, Loads)} == {
        driver.pool.membership.nodes[f"node-{home}"].index
    }


def test_a_replica_is_taken_back_for_readers_first_and_in_the_guard_later() -> None:
    driver, block, home = hot_pool()
    be_hot(driver, block, home, 5)
    ((replica, keep),) = [(c, m) for c in (1, 2, 3) for m in driver.take(c, Keep)][:1]
    driver.say(replica, Kept(keep.request, *block, held=True))
    driver.round()
    entry = ("bucket_home", (bucket_of(block.key), replica))
    driver.pool.delete_namespace(block.namespace, driver.now)
    for connection in (1, 2, 3):
        driver.take(connection, Replicas)
    driver.round()
    assert all(m.blocks == [] for c in (1, 2, 3) for m in driver.take(c, Replicas))
    assert driver.switch is not None
    assert entry in driver.switch.entries, "a READ may be on its way"
    driver.round(2.0)
    assert entry not in driver.switch.entries


def test_a_replica_that_dies_is_gone_from_the_guard_and_the_rest_stays() -> None:
    driver, block, home = hot_pool()
    be_hot(driver, block, home, 5)
    ((replica, keep),) = [(c, m) for c in (1, 2, 3) for m in driver.take(c, Keep)][:1]
    driver.say(replica, Kept(keep.request, *block, held=True))
    driver.round()
    driver.say(replica, Leave())
    driver.round()
    assert not driver.pool.hot.listed
    assert driver.home_of(block) == home


def test_reports_of_blocks_that_a_node_does_not_answer_for_make_nothing_hot() -> None:
    driver, block, home = hot_pool()
    liar = next(c for c in (1, 2, 3) if c != home)
    be_hot(driver, block, liar, 10)
    assert not any(driver.take(c, Keep) for c in (1, 2, 3))


@pytest.mark.parametrize("total", [1e308, -1e308])
def test_a_total_that_no_node_can_have_sent_leaves_the_pool_at_work(total: float) -> None:
    driver, _, _ = hot_pool()
    for sent in (0.0, total, 0.0):
        counters = {"payload_bytes_sent_udp_total": sent, "payload_bytes_sent_bulk_total": sent}
        driver.say(1, renew(counters=counters))
        driver.round(0.5)
        assert driver.pool.hot.load_of("node-1") == 0.0
    driver.pool.worth(driver.now)
    assert driver.pool.counts["agent_counters_ignored"] == 1


def test_a_node_that_comes_back_hears_of_replicas_and_loads() -> None:
    driver, block, home = hot_pool()
    be_hot(driver, block, home, 5)
    ((replica, keep),) = [(c, m) for c in (1, 2, 3) for m in driver.take(c, Keep)][:1]
    driver.say(replica, Kept(keep.request, *block, held=True))
    driver.round()
    driver.pool.disconnected(home)
    driver.say(9, msgspec.structs.replace(register(home), link_bits_per_s=8_000_000))
    driver.round()
    assert driver.take(9, Replicas)[0].blocks
    assert driver.take(9, Loads)


# --- what pays, by namespace ----------------------------------------------------------------


def test_what_does_not_pay_is_turned_off_told_and_shown() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    namespace = driver.namespace()
    block = BlockId(namespace, key(1))
    home = driver.home_of(block)
    for number in range(60):
        hot = HotBlock(namespace, block.key, 5, 1, 0, 65536, 7)
        driver.say(home, renew(hot=[hot], reads=[NamespaceReads(namespace, number * 50, 0, 0)]))
        driver.renew_all()
        driver.describe_all({block: (65536, 7)})
        driver.round(1.0)
        if not number:
            driver.describe_all({block: (65536, 7)})
            driver.round()
            assert [r.block for r in driver.pool.tiers.residency.residents.values()] == [block]
    last = driver.take(1, PoolMap)[-1]
    assert last.alone == [namespace]
    assert not driver.pool.tiers.residency.residents
    rows = driver.pool.worth(driver.now)["adaptive"]
    assert [(r["namespace"], r["thing"], r["on"]) for r in rows] == [
        (namespace, "gathering", False),
        (namespace, "residence", False),
    ]
    assert driver.pool.status(driver.now)["adaptive"] == rows
    driver.pool.configure_namespace(namespace, NamespaceSettings(gathering="on"), driver.now)
    driver.round()
    assert driver.take(1, PoolMap)[-1].alone == []


def test_what_is_pinned_is_in_the_switch_whether_or_not_that_pays() -> None:
    driver = Driver(dataclasses.replace(OPTIONS, lease_s=1e6))
    driver.join(1, 2, 3)
    namespace = driver.namespace()
    block, other = BlockId(namespace, key(1)), BlockId(namespace, key(2))
    for number in range(20):
        driver.say(1, renew(reads=[NamespaceReads(namespace, number * 50, 0, 0)]))
        driver.round(1.0)
    residents = driver.pool.tiers.residency.residents
    assert not driver.pool.adaptive.resides(namespace)

    def is_resident() -> bool:
        driver.round(1.0)
        driver.describe_all({block: (65536, 7), other: (65536, 7)})
        driver.round()
        return block in residents

    driver.pool.tiers.pin(block)
    assert is_resident(), "an operator wants it there"
    driver.pool.configure_namespace(namespace, NamespaceSettings(weight=2.0), driver.now)
    assert is_resident(), "nobody has said otherwise"
    driver.pool.configure_namespace(namespace, NamespaceSettings(residence="on"), driver.now)
    admit(driver, other)
    driver.pool.configure_namespace(namespace, NamespaceSettings(), driver.now)
    for _ in range(7):  # no home says that it keeps it
        driver.round(1.0)
    assert (is_resident(), other in residents) == (True, False)
    driver.pool.configure_namespace(namespace, NamespaceSettings(residence="off"), driver.now)
    assert (is_resident(), driver.pool.tiers.pins) == (False, set())
    driver.pool.tiers.pin(block)
    assert not is_resident()


def test_a_pool_that_does_not_adapt_leaves_all_on() -> None:
    driver = Driver(dataclasses.replace(OPTIONS, adaptive=AdaptiveOptions(enabled=False)))
    driver.join(1, 2)
    namespace = driver.namespace()
    for number in range(60):
        driver.renew_all(reads=[NamespaceReads(namespace, number * 50, 0, 0)])
        driver.round(1.0)
    assert driver.take(1, PoolMap)[-1].alone == []


def test_a_node_has_no_say_in_what_pays_a_namespace_that_it_may_not_use() -> None:
    rules = TenantRules({"t": frozenset({"node-1"})})
    driver = Driver(dataclasses.replace(OPTIONS, tenants=rules))
    driver.join(1, 2)
    namespace = driver.namespace()
    for number in range(60):
        driver.say(2, renew(reads=[NamespaceReads(namespace, number * 50, 0, 0)]))
        driver.say(1, renew())
        driver.round(1.0)
    assert driver.pool.adaptive.gathers(namespace)
    assert driver.take(1, PoolMap)[-1].alone == []


# --- scale out and in -----------------------------------------------------------------------


def holding_pool(replicas: int = 0) -> Driver:
    """Two nodes, of which each holds blocks."""
    driver = Driver(dataclasses.replace(OPTIONS, replicas=replicas))
    driver.join(1, 2)
    driver.renew_all(blocks=5)
    for connection in (1, 2, 3):
        driver.take(connection, PoolMap)
    return driver


def last_map(driver: Driver, connection: int = 1) -> PoolMap:
    return driver.take(connection, PoolMap)[-1]


def hand_over(driver: Driver, *connections: int, left: int = 0, epoch: int | None = None) -> None:
    for connection in connections:
        driver.say(connection, HandedOver(epoch or driver.pool.epoch, left, 9, 0))
    driver.round()


def test_a_node_that_joins_stands_behind_those_that_hold_blocks_until_it_has_its_own() -> None:
    driver = holding_pool()
    driver.join(3)
    before = last_map(driver)
    assert before.settled == 1
    assert {homes[0] for homes in before.buckets} == {1, 2}
    taken = [homes for homes in before.buckets if len(homes) == 2]
    assert taken
    assert {homes[1] for homes in taken} == {3}, "nothing moves between those that stay"
    assert driver.switch is not None
    guarded = {match for table, match in driver.switch.entries if table == "bucket_home"}
    assert sum(port == 3 for _, port in guarded) == len(taken)
    hand_over(driver, 1, 3)
    hand_over(driver, 2, left=4)
    assert not driver.take(1, PoolMap), "somebody still has something to hand over"
    hand_over(driver, 2)
    after = last_map(driver)
    assert after.settled == 0
    assert [homes[-1:] for homes in before.buckets] == after.buckets


def test_what_was_handed_over_by_a_former_controllers_map_does_not_count() -> None:
    driver = holding_pool()
    driver.join(3)
    driver.pool.drain("node-2")
    driver.round()
    epoch = driver.pool.epoch  # by this map node 2 gives some of its buckets to node 3
    restarted = Driver(driver.pool.options, driver.pool.saved())
    restarted.join(1, 2)
    assert last_map(restarted).epoch > epoch
    hand_over(restarted, 1, 2, epoch=epoch)
    assert restarted.pool.counts["nodes_drained"] == 0
    hand_over(restarted, 1, 2)
    assert restarted.pool.counts["nodes_drained"] == 1


def test_in_an_empty_pool_a_node_that_joins_has_its_buckets_at_once() -> None:
    driver = Driver()
    driver.join(1, 2)
    driver.join(3)
    map_ = last_map(driver)
    assert map_.settled == 0
    assert {index for homes in map_.buckets for index in homes} == {1, 2, 3}


@pytest.mark.parametrize(("held", "settled"), [(None, 1), (0, 0), (5, 1)])
def test_after_a_restart_nobody_is_taken_for_empty_who_has_not_said_so(
    held: int | None, settled: int
) -> None:
    driver = Driver(dataclasses.replace(OPTIONS, replicas=0))
    driver.join(1, 2)
    restarted = Driver(driver.pool.options, driver.pool.saved())
    restarted.join(1, 2)
    if held is not None:
        restarted.renew_all(blocks=held)
    restarted.join(3)
    assert last_map(restarted).settled == settled


def test_what_was_handed_over_by_an_older_map_does_not_count() -> None:
    driver = holding_pool()
    driver.join(3)
    former = last_map(driver).epoch
    driver.join(4)
    assert last_map(driver).settled == 1
    hand_over(driver, 1, 2, 3, 4, epoch=former)
    assert not driver.take(1, PoolMap)
    hand_over(driver, 1, 2, 3, 4)
    assert last_map(driver).settled == 0


def test_what_was_handed_over_by_another_controllers_map_does_not_count() -> None:
    driver = holding_pool()
    hand_over(driver, 1, 2, epoch=driver.pool.epoch + 30)  # before they hear of ours
    driver.join(3)
    assert last_map(driver).settled == 1
    hand_over(driver, 3)
    assert not driver.take(1, PoolMap), "of this map the others have not said anything yet"
    hand_over(driver, 1, 2)
    assert last_map(driver).settled == 0


def test_a_map_for_another_reason_does_not_begin_the_handing_over_anew() -> None:
    driver = holding_pool()
    driver.join(3)
    moves = last_map(driver).epoch
    driver.namespace()
    assert last_map(driver).epoch > moves
    hand_over(driver, 1, 2, 3, epoch=moves)
    assert last_map(driver).settled == 0


def test_a_node_that_is_drained_keeps_its_buckets_until_others_have_its_blocks() -> None:
    driver = holding_pool(replicas=1)
    driver.join(3)
    hand_over(driver, 1, 2, 3)
    before = last_map(driver)
    driver.pool.drain("node-2")
    driver.round()
    moving = last_map(driver)
    assert (before.leaving, moving.leaving, moving.settled) == ([], [2], 2)
    for homes, former in zip(moving.buckets, before.buckets, strict=True):
        assert homes[:2] == former
        assert (len(homes) == 3) == (2 in former)
    status = {n["node_id"]: n for n in driver.pool.status(driver.now)["nodes"]}
    assert status["node-2"]["draining"]
    assert status["node-2"]["placed"]
    hand_over(driver, 1, 2, 3)
    after = last_map(driver)
    assert (after.leaving, after.settled) == ([], 0)
    assert not any(2 in homes for homes in after.buckets)
    assert any(n.node_id == "node-2" for n in after.nodes), "it is there, and reads"
    driver.round(10.0)
    driver.renew_all(blocks=5)
    driver.round()
    assert not driver.pool.membership.nodes["node-2"].placed


def test_what_finds_no_room_keeps_a_drained_node_and_what_cannot_be_handed_over_does_not() -> None:
    driver = holding_pool()
    driver.pool.drain("node-2")
    driver.round()

    def handover() -> dict[str, int]:
        status = {n["node_id"]: n for n in driver.pool.status(driver.now)["nodes"]}
        return {name: status["node-2"]["handover"][name] for name in ("left", "failed", "no_room")}

    hand_over(driver, 1)
    driver.say(2, HandedOver(driver.pool.epoch, 2, 9, 1, no_room=2))
    driver.round()
    assert handover() == {"left": 2, "failed": 1, "no_room": 2}
    assert driver.pool.membership.nodes["node-2"].placed
    driver.say(2, HandedOver(driver.pool.epoch, 0, 9, 1))
    driver.round()
    assert handover() == {"left": 0, "failed": 1, "no_room": 0}
    assert not driver.pool.membership.nodes["node-2"].placed


def test_the_last_node_cannot_be_drained_nor_one_that_is_not_there() -> None:
    driver = holding_pool()
    driver.pool.drain("node-1")
    with pytest.raises(DrainError, match="could take over"):
        driver.pool.drain("node-2")
    with pytest.raises(DrainError, match="no node node-7"):
        driver.pool.drain("node-7")
    with pytest.raises(DrainError, match="no node node-7"):
        driver.pool.undrain("node-7", driver.now)


def test_where_nobody_is_left_to_take_over_the_drained_node_goes_on() -> None:
    driver = holding_pool()
    driver.pool.drain("node-1")
    driver.round()
    driver.say(2, Leave())
    driver.round()
    assert last_map(driver).buckets == [[1]] * 1024


def test_draining_can_be_undone_and_ends_with_another_incarnation() -> None:
    driver = holding_pool()
    driver.pool.drain("node-1")
    driver.round()
    driver.pool.undrain("node-1", driver.now)
    driver.round()
    assert last_map(driver).settled == 0
    driver.pool.drain("node-1")
    driver.round()
    hand_over(driver, 1, 2)
    assert not driver.pool.membership.nodes["node-1"].placed
    driver.say(1, register(1, incarnation=2))
    driver.round(OPTIONS.rebalance_after_s)
    assert driver.pool.membership.nodes["node-1"].joining


def starts_anew(driver: Driver, number: int) -> None:
    """Within its lease, and with nothing."""
    driver.pool.disconnected(number)
    driver.say(number, register(number, incarnation=2))
    driver.round()


def test_a_node_that_starts_anew_while_it_joins_is_handed_all_of_it_again() -> None:
    driver = holding_pool()
    driver.join(3)
    before = last_map(driver)
    hand_over(driver, 1, 2)
    starts_anew(driver, 3)
    between = last_map(driver)
    assert [homes[:1] for homes in before.buckets] == between.buckets, "so that the others forget"
    may_answer = [
        match for table, match in driver.plan.desired.entries if table == program.BUCKET_HOME
    ]
    assert len(may_answer) == sum(map(len, between.buckets)), (
        "the switch lets the next homes answer"
    )
    driver.round()
    again = last_map(driver)
    assert (again.settled, again.buckets) == (1, before.buckets)
    hand_over(driver, 3)
    assert not driver.take(1, PoolMap), "what the others have handed over before is gone"
    hand_over(driver, 1, 2)
    assert last_map(driver).settled == 0


def test_a_node_is_not_drained_while_one_that_took_over_has_lost_it_all() -> None:
    driver = holding_pool()
    driver.pool.drain("node-1")
    driver.round()
    before = last_map(driver)
    hand_over(driver, 1)
    starts_anew(driver, 2)
    assert last_map(driver).settled == 0
    driver.round()
    again = last_map(driver)
    assert (again.settled, again.buckets) == (1, before.buckets)
    hand_over(driver, 2)
    assert driver.pool.membership.nodes["node-1"].placed
    hand_over(driver, 1)
    assert not driver.pool.membership.nodes["node-1"].placed


def test_a_node_that_dies_while_blocks_are_handed_over_is_not_waited_for() -> None:
    driver = holding_pool()
    driver.join(3)
    driver.say(2, Leave())
    driver.round()
    hand_over(driver, 1, 3)
    map_ = last_map(driver)
    assert map_.settled == 0
    assert {homes[0] for homes in map_.buckets} == {1, 3}


def test_who_joins_does_not_wait_for_ever_and_who_is_drained_does() -> None:
    for drain in (False, True):
        options = dataclasses.replace(OPTIONS, replicas=0, handover_timeout_s=60.0, lease_s=1e3)
        driver = Driver(options)
        driver.join(1, 2)
        driver.renew_all(blocks=5)
        driver.join(3)
        if drain:
            driver.pool.drain("node-2")
            driver.round()
        hand_over(driver, 1, 2, left=1)
        driver.round(61.0)
        assert driver.pool.membership.is_settled is not drain


def test_a_controller_that_starts_remembers_who_is_drained() -> None:
    driver = holding_pool()
    driver.pool.drain("node-1")
    driver.round()
    saved = driver.pool.saved()
    assert {n.node_id for n in saved.nodes if n.draining} == {"node-1"}
    again = Driver(dataclasses.replace(OPTIONS, replicas=0), saved)
    again.join(1, 2)
    assert last_map(again).settled == 1
    hand_over(again, 1, 2)
    assert last_map(again).buckets == [[2]] * 1024


def test_heat_wakes_the_controller_but_a_flood_of_it_not_without_a_pause() -> None:
    driver = Driver()
    woken: list[float] = []
    now = [10.0]
    loop = ControlLoop(
        driver.pool,
        state=None,  # type: ignore[arg-type]
        tick_s=0.5,
        clock=lambda: now[0],
        wake=lambda: woken.append(now[0]),
        on_settled=lambda: None,
    )
    loop.rounded_at = 10.0
    for _ in range(100):
        now[0] += 0.001
        loop.heat([])
    assert woken[0] == pytest.approx(10.05, abs=0.0015)  # and on until there was a round
    loop.rounded_at = now[0]
    before = len(woken)
    loop.heat([])
    assert len(woken) == before > 1


class FakeSwitch:
    """A switch that does at once what it is told, while this controller is its primary, as far as
    its guard has room."""

    connected = True
    primary_id = 20

    def __init__(self, holds: SwitchState) -> None:
        self.holds = holds
        self.guard_entries = GUARD_ENTRIES
        self.mirror: SwitchState | None = None
        self.primary = False

    def guard(self) -> set[tuple[MatchValue, ...]]:
        """Buckets, and ports that may answer for them."""
        return {match for table, match in self.holds.entries if table == program.BUCKET_HOME}

    async def read(self) -> SwitchState:
        self.mirror = self.holds
        return self.holds.copy()

    async def write(self, changes: Sequence[Change]) -> None:
        refused = 0
        for change in changes:
            is_new = change.kind == program.BUCKET_HOME and change.verb is Verb.INSERT
            if is_new and len(self.guard()) >= self.guard_entries:
                refused += 1
                continue
            apply(self.holds, change)
        if refused:
            self.mirror = None
            raise SwitchError(f"RESOURCE_EXHAUSTED: {refused} updates failed")

    async def table_counters(self, _table: str) -> dict[int, int]:
        return {}

    async def indexed_counters(self, _counter: str) -> dict[int, int]:
        return {}


class Looped:
    """A pool with its control loop, and a switch."""

    def __init__(self, pool: Pool, switch: FakeSwitch) -> None:
        self.now = 0.0
        self.loop = ControlLoop(
            pool,
            state=mock.Mock(),
            tick_s=0.5,
            clock=lambda: self.now,
            wake=lambda: None,
            on_settled=lambda: None,
        )
        self.loop.use(switch, mock.Mock())

    def rounds(self, seconds: float, *, alive: Sequence[int] = ()) -> None:
        """Rounds, before each of which these say that they live."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            for connection in alive:
                self.loop.received(connection, renew())
            asyncio.run(self.loop.round())


def test_a_backup_that_takes_over_gives_the_nodes_that_it_knows_time_to_come() -> None:
    """While it was a backup they spoke to another, so their silence means nothing."""
    driver = Driver()
    driver.join(1, 2, 3)
    assert driver.switch is not None
    before = driver.switch.copy()
    switch = FakeSwitch(driver.switch)
    backup = Looped(Driver(saved=driver.pool.saved()).pool, switch)
    backup.rounds(60)
    switch.primary = True
    backup.loop.switch_changed()
    backup.rounds(1)
    assert switch.holds.entries == before.entries, "nobody is cut off who is well"
    backup.loop.received(1, register(1))
    backup.rounds(6, alive=[1])
    assert {port for _, port in switch.guard()} == {1}


def test_a_backup_leaves_a_switch_alone_whose_nodes_all_keep_to_another_controller() -> None:
    """One that has lost nothing but the switch: its nodes are well, and nobody would serve them."""
    driver = Driver()
    driver.join(1, 2, 3)
    assert driver.switch is not None
    before = driver.switch.copy()
    switch = FakeSwitch(driver.switch)
    backup = Looped(Driver().pool, switch)
    switch.primary = True
    backup.rounds(600)
    assert switch.holds.entries == before.entries
    backup.loop.received(1, register(1))
    backup.rounds(5, alive=[1])
    assert switch.holds.entries == before.entries, "the others have time to come"
    backup.rounds(2, alive=[1])
    assert {port for _, port in switch.guard()} == {1}


def test_a_guard_without_room_for_what_was_and_what_comes_is_cleared_first() -> None:
    """Hot replicas may fill it; then another node's buckets find room only where theirs were."""
    switch = FakeSwitch(SwitchState())
    switch.primary = True
    pool = Driver(dataclasses.replace(OPTIONS, replicas=0)).pool
    looped = Looped(pool, switch)
    for number in (1, 2):
        looped.loop.received(number, register(number))
    looped.rounds(1, alive=[1, 2])
    switch.guard_entries = len(switch.guard())
    looped.rounds(4, alive=[1])
    assert {port for _, port in switch.guard()} == {1}
    assert len(switch.guard()) == switch.guard_entries
    assert looped.loop.programmed
