"""P4Runtime as controllers use it, on our switch, in strict mode, and on BMv2.

Oracle: finsy, an independent client; the data plane itself, driven by packet-out and watched by
packet-in; and BMv2, on which the same tests run. Cannot see: several devices, TLS, load.
"""

from __future__ import annotations

import asyncio
import struct
from copy import copy
from dataclasses import dataclass, fields

import finsy
import pytest
from conftest import Controller
from finsy import (
    P4ActionProfileGroup,
    P4ActionProfileMember,
    P4ClientError,
    P4CloneSessionEntry,
    P4CounterData,
    P4CounterEntry,
    P4DigestEntry,
    P4DirectCounterEntry,
    P4DirectMeterEntry,
    P4IndirectAction,
    P4Member,
    P4MeterConfig,
    P4MeterEntry,
    P4MulticastGroupEntry,
    P4TableAction,
    P4TableEntry,
    P4TableMatch,
)
from finsy.grpcutil import GRPCStatusCode as Code

pytestmark = pytest.mark.asyncio(loop_scope="session")

TO_CPU = 0x020000000001
TO_GROUP = 0x020000000002
TO_CLONE = 0x020000000003
TO_DIGEST = 0x020000000004
SOURCE = 0x02000000AA01

NORMAL, INGRESS_CLONE, REPLICATION = 0, 1, 5

PROBE = struct.Struct("!BHIIHHHHHHBI")


@dataclass
class Probe:
    """The header of programs/everything.p4 in whose fields the tables leave their marks."""

    op: int = 0
    index: int = 0
    key: int = 0
    value: int = 0
    lpm_mark: int = 0
    ternary_mark: int = 0
    range_mark: int = 0
    optional_mark: int = 0
    select_mark: int = 0
    fixed_mark: int = 0
    color: int = 0
    register_value: int = 0

    def frame(self, dst: int = TO_CPU, src: int = SOURCE) -> bytes:
        ethernet = dst.to_bytes(6, "big") + src.to_bytes(6, "big") + b"\x88\xb5"
        values = [getattr(self, one.name) for one in fields(self)]
        return ethernet + PROBE.pack(*values) + b"tail"

    @staticmethod
    def parse(frame: bytes) -> Probe:
        assert frame.endswith(b"tail")
        return Probe(*PROBE.unpack_from(frame, 14))


async def to_cpu(controller: Controller) -> None:
    """Send probes back to the controller, with 5 as the reason."""
    entry = P4TableEntry(
        "forward", match=P4TableMatch(dst=TO_CPU), action=P4TableAction("to_cpu", reason=5)
    )
    await controller.switch.insert([entry])


async def ask(controller: Controller, probe: Probe) -> Probe:
    """Send a probe through the pipeline and get it back."""
    await controller.send(probe.frame())
    [packet] = await controller.packets_in(1)
    assert packet["reason"] == 5
    return Probe.parse(packet.payload)


async def failing(controller: Controller, *updates: object) -> dict[int, Code]:
    """Write a batch that must fail; returns the codes of the updates that did."""
    with pytest.raises(P4ClientError) as caught:
        await controller.switch.write(list(updates))
    assert caught.value.code == Code.UNKNOWN
    return {index: error.canonical_code for index, error in caught.value.details.items()}


# --- matches ------------------------------------------------------------------------------------


async def test_exact_entries_can_be_written_read_modified_and_deleted(
    controller: Controller,
) -> None:
    switch = controller.switch
    entry = P4TableEntry(
        "forward",
        match=P4TableMatch(dst=0x1234),
        action=P4TableAction("set_port", port=300),
        metadata=b"cookie",
    )
    await switch.insert([entry])
    [seen] = await controller.read(P4TableEntry("forward"))
    assert (seen.match["dst"], seen.action.args["port"], seen.metadata) == (0x1234, 300, b"cookie")
    [seen] = await controller.read(P4TableEntry("forward", match=entry.match))
    assert seen.match["dst"] == 0x1234
    entry.action = P4TableAction("set_port", port=2)
    await switch.modify([entry])
    [seen] = await controller.read(P4TableEntry("forward"))
    assert seen.action.args["port"] == 2
    await switch.delete([entry])
    assert await controller.read(P4TableEntry("forward")) == []


async def test_the_longest_prefix_wins(controller: Controller) -> None:
    await to_cpu(controller)
    await controller.switch.insert(
        [
            P4TableEntry(
                "route",
                match=P4TableMatch(key=prefix) if prefix else None,
                action=P4TableAction("set_lpm", mark=mark),
            )
            for prefix, mark in (("10.0.0.0/8", 8), ("10.1.0.0/16", 16), ("10.1.2.3/32", 32))
        ]
    )
    for key, mark in ((0x0A000001, 8), (0x0A01FFFF, 16), (0x0A010203, 32), (0x0B000000, 0)):
        assert (await ask(controller, Probe(key=key))).lpm_mark == mark
    entries = await controller.read(P4TableEntry("route"))
    assert sorted(e.action.args["mark"] for e in entries) == [8, 16, 32]


async def test_the_highest_priority_wins_in_a_ternary_table(controller: Controller) -> None:
    await to_cpu(controller)
    await controller.switch.insert(
        [
            P4TableEntry(
                "acl",
                match=P4TableMatch(key=key, op=1) if key else P4TableMatch(op=1),
                action=P4TableAction("set_ternary", mark=mark),
                priority=priority,
            )
            for key, mark, priority in (
                ("0x00000000/&0x0", 1, 1),
                ("0xab000000/&0xff000000", 2, 20),
                ("0x000000cd/&0x000000ff", 3, 10),
            )
        ]
    )
    for key, mark in ((0xAB0000CD, 2), (0xAA0000CD, 3), (0xAB000000, 2), (0, 1)):
        assert (await ask(controller, Probe(op=1, key=key))).ternary_mark == mark
    assert (await ask(controller, Probe(op=2, key=0xAB000000))).ternary_mark == 0
    entries = await controller.read(P4TableEntry("acl"))
    assert {e.priority: e.action.args["mark"] for e in entries} == {1: 1, 20: 2, 10: 3}


async def test_ranges_hold_both_of_their_ends(controller: Controller) -> None:
    await to_cpu(controller)
    await controller.switch.insert(
        [
            P4TableEntry(
                "window",
                match=P4TableMatch(value="100...200", op=1),
                action=P4TableAction("set_range", mark=1),
                priority=1,
            )
        ]
    )
    for value, mark in ((99, 0), (100, 1), (150, 1), (200, 1), (201, 0)):
        assert (await ask(controller, Probe(op=1, value=value))).range_mark == mark
    [entry] = await controller.read(P4TableEntry("window"))
    assert entry.priority == 1


async def test_an_optional_field_is_exact_or_anything(controller: Controller) -> None:
    await to_cpu(controller)
    await controller.switch.insert(
        [
            P4TableEntry(
                "choice",
                match=P4TableMatch(**match),
                action=P4TableAction("set_optional", mark=mark),
                priority=priority,
            )
            for match, mark, priority in (
                ({"index": 5}, 1, 10),
                ({"index": 5, "op": 3}, 2, 20),
                ({"op": 4}, 3, 5),
            )
        ]
    )
    for index, op, mark in ((5, 0, 1), (5, 3, 2), (6, 4, 3), (5, 4, 1), (6, 5, 0)):
        assert (await ask(controller, Probe(index=index, op=op))).optional_mark == mark
    assert len(await controller.read(P4TableEntry("choice"))) == 3


async def test_the_default_entry_can_only_be_modified(controller: Controller) -> None:
    await to_cpu(controller)
    default = P4TableEntry(
        "route", is_default_action=True, action=P4TableAction("set_lpm", mark=77)
    )
    await controller.switch.modify([default])
    assert (await ask(controller, Probe(key=1))).lpm_mark == 77
    [seen] = await controller.read(P4TableEntry("route", is_default_action=True))
    assert (seen.is_default_action, seen.action.args["mark"]) == (True, 77)
    assert await failing(controller, +copy(default), -copy(default)) == {
        0: Code.INVALID_ARGUMENT,
        1: Code.INVALID_ARGUMENT,
    }
    await controller.switch.modify([P4TableEntry("route", is_default_action=True)])
    assert (await ask(controller, Probe(key=1))).lpm_mark == 0


async def test_const_tables_are_read_but_not_written(controller: Controller) -> None:
    await to_cpu(controller)
    assert (await ask(controller, Probe(op=2))).fixed_mark == 102
    entries = await controller.read(P4TableEntry("fixed_entries"))
    assert {e.match["op"]: e.action.args["mark"] for e in entries} == {1: 101, 2: 102}
    new = P4TableEntry(
        "fixed_entries", match=P4TableMatch(op=3), action=P4TableAction("set_fixed", mark=1)
    )
    [code] = (await failing(controller, +new)).values()
    assert code == (Code.UNKNOWN if controller.target.is_bmv2 else Code.PERMISSION_DENIED)
    default = P4TableEntry(
        "fixed_entries", is_default_action=True, action=P4TableAction("set_fixed", mark=1)
    )
    assert await failing(controller, ~default) == {0: Code.PERMISSION_DENIED}


async def test_a_full_table_says_so_and_keeps_what_it_has(controller: Controller) -> None:
    entries = [
        +P4TableEntry(
            "small", match=P4TableMatch(index=index), action=P4TableAction("set_fixed", mark=1)
        )
        for index in range(3)
    ]
    full = Code.UNKNOWN if controller.target.is_bmv2 else Code.RESOURCE_EXHAUSTED
    assert await failing(controller, *entries) == {2: full}
    assert len(await controller.read(P4TableEntry("small"))) == 2


async def test_all_tables_can_be_read_at_once(controller: Controller) -> None:
    await to_cpu(controller)
    entries = await controller.read(P4TableEntry())
    assert sorted(e.table_id for e in entries) == ["fixed_entries", "fixed_entries", "forward"]


async def test_finsy_can_clear_the_tables(controller: Controller) -> None:
    """What a controller does first on a switch that it did not program: read all, delete all.

    (With a const table in the program, finsy 0.30 leaves groups and members alone.)
    """
    await to_cpu(controller)
    default = P4TableEntry(
        "route", is_default_action=True, action=P4TableAction("set_lpm", mark=77)
    )
    await controller.switch.modify([default])
    await controller.switch.delete_all()
    entries = await controller.read(P4TableEntry())
    assert {e.table_id for e in entries} == {"fixed_entries"}
    [seen] = await controller.read(P4TableEntry("route", is_default_action=True))
    assert seen.action.name == "NoAction"


# --- batches and their errors -------------------------------------------------------------------


async def test_each_failed_update_of_a_batch_is_named(controller: Controller) -> None:
    def forward(dst: int, port: int = 1) -> P4TableEntry:
        return P4TableEntry(
            "forward", match=P4TableMatch(dst=dst), action=P4TableAction("set_port", port=port)
        )

    assert await failing(
        controller, +forward(1), +forward(1), +forward(2), ~forward(9), -forward(9)
    ) == {1: Code.ALREADY_EXISTS, 3: Code.NOT_FOUND, 4: Code.NOT_FOUND}
    assert len(await controller.read(P4TableEntry("forward"))) == 2


async def test_actions_that_a_table_may_not_use_are_refused(controller: Controller) -> None:
    deny_by_default = P4TableEntry("acl", is_default_action=True, action=P4TableAction("deny"))
    await controller.switch.modify([deny_by_default])
    only_default = P4TableEntry(
        "acl", match=P4TableMatch(op=1), action=P4TableAction("NoAction"), priority=1
    )
    assert await failing(controller, +only_default) == {0: Code.PERMISSION_DENIED}


# --- counters and meters ------------------------------------------------------------------------


async def test_direct_counters_count_and_can_be_set(controller: Controller) -> None:
    await to_cpu(controller)
    frame_bytes = len(Probe().frame())
    for _ in range(3):
        await ask(controller, Probe())
    [entry] = await controller.read(P4DirectCounterEntry("forward_counter"))
    # BMv2 counts the frame as it came in: with the packet_out header.
    assert entry.packet_count == 3
    assert entry.byte_count == 3 * (frame_bytes + 2)
    match = P4TableMatch(dst=TO_CPU)
    table_entry = P4TableEntry("forward", match=match)
    changed = P4DirectCounterEntry(
        "forward_counter",
        table_entry=table_entry,
        data=P4CounterData(packet_count=100, byte_count=5000),
    )
    await controller.switch.modify([changed])
    [entry] = await controller.read(
        P4DirectCounterEntry("forward_counter", table_entry=table_entry)
    )
    assert (entry.packet_count, entry.byte_count) == (100, 5000)
    [entry] = await controller.read(
        P4TableEntry("forward", match=match, counter_data=P4CounterData())
    )
    assert entry.counter_data == P4CounterData(packet_count=100, byte_count=5000)


async def test_a_direct_counter_can_begin_anywhere(controller: Controller) -> None:
    entry = P4TableEntry(
        "forward",
        match=P4TableMatch(dst=1),
        action=P4TableAction("drop"),
        counter_data=P4CounterData(packet_count=7, byte_count=9),
    )
    await controller.switch.insert([entry])
    [seen] = await controller.read(P4TableEntry("forward", counter_data=P4CounterData()))
    assert seen.counter_data == P4CounterData(packet_count=7, byte_count=9)
    [seen] = await controller.read(P4TableEntry("forward"))
    assert seen.counter_data is None


async def test_indirect_counters_count_by_index(controller: Controller) -> None:
    await to_cpu(controller)
    for index in (3, 3, 7):
        await ask(controller, Probe(index=index))
    cells = await controller.read(P4CounterEntry("cells"))
    assert len(cells) == 16
    assert {c.index: c.packet_count for c in cells if c.packet_count} == {3: 2, 7: 1}
    [cell] = await controller.read(P4CounterEntry("cells", index=3))
    assert cell.byte_count == 2 * (len(Probe().frame()) + 2)
    [only_packets] = await controller.read(P4CounterEntry("packets_only", index=3))
    assert only_packets.packet_count == 3  # index 7 is 3 in this one
    assert only_packets.byte_count == 0 or controller.target.is_bmv2  # which counts both
    await controller.switch.modify(
        [P4CounterEntry("cells", index=3, data=P4CounterData(packet_count=1, byte_count=2))]
    )
    [cell] = await controller.read(P4CounterEntry("cells", index=3))
    assert (cell.packet_count, cell.byte_count) == (1, 2)


async def test_meters_are_configured_read_and_reset(controller: Controller) -> None:
    config = P4MeterConfig(cir=10, cburst=1, pir=20, pburst=2)
    await controller.switch.modify([P4MeterEntry("policer", index=2, config=config)])
    meters = await controller.read(P4MeterEntry("policer"))
    assert [m.index for m in meters if m.config is not None] == [2]
    [meter] = await controller.read(P4MeterEntry("policer", index=2))
    assert meter.config == config
    await controller.switch.modify([P4MeterEntry("policer", index=2)])
    [meter] = await controller.read(P4MeterEntry("policer", index=2))
    assert meter.config is None


async def test_a_meter_marks_what_exceeds_it(controller: Controller) -> None:
    await to_cpu(controller)
    assert (await ask(controller, Probe(op=7, index=1))).color == 0
    config = P4MeterConfig(cir=1, cburst=1, pir=1, pburst=2)
    await controller.switch.modify([P4MeterEntry("policer", index=1, config=config)])
    for _ in range(6):
        await controller.send(Probe(op=7, index=1).frame())
    colors = [Probe.parse(p.payload).color for p in await controller.packets_in(6)]
    assert colors[0] == 0
    assert 2 in colors
    assert (await ask(controller, Probe(op=7, index=2))).color == 0


async def test_direct_meters_belong_to_their_entry(controller: Controller) -> None:
    config = P4MeterConfig(cir=10, cburst=1, pir=20, pburst=2)
    entry = P4TableEntry(
        "acl",
        match=P4TableMatch(op=1),
        action=P4TableAction("set_ternary", mark=1),
        priority=5,
        meter_config=config,
    )
    await controller.switch.insert([entry])
    [seen] = await controller.read(P4DirectMeterEntry(table_entry=P4TableEntry("acl")))
    assert seen.config == config
    [seen] = await controller.read(P4TableEntry("acl", meter_config=config))
    assert seen.meter_config == config
    key = P4TableEntry("acl", match=entry.match, priority=5)
    await controller.switch.modify([P4DirectMeterEntry(table_entry=key)])
    [seen] = await controller.read(P4DirectMeterEntry(table_entry=key))
    assert seen.config is None


# --- action profiles ----------------------------------------------------------------------------


async def test_a_profile_entry_runs_its_member(controller: Controller) -> None:
    await to_cpu(controller)
    switch = controller.switch
    member = P4ActionProfileMember(
        "profile", member_id=3, action=P4TableAction("set_select", mark=33)
    )
    await switch.insert([member])
    entry = P4TableEntry("picked", match=P4TableMatch(key=9), action=P4IndirectAction(member_id=3))
    await switch.insert([entry])
    assert (await ask(controller, Probe(key=9))).select_mark == 33
    member.action = P4TableAction("set_select", mark=34)
    await switch.modify([member])
    assert (await ask(controller, Probe(key=9))).select_mark == 34
    [seen] = await controller.read(P4ActionProfileMember("profile"))
    assert seen.action.args["mark"] == 34
    [seen] = await controller.read(P4TableEntry("picked"))
    assert seen.action.member_id == 3
    [in_use] = (await failing(controller, -member)).values()
    assert in_use == (Code.UNKNOWN if controller.target.is_bmv2 else Code.FAILED_PRECONDITION)
    await switch.delete([entry])
    await switch.delete([member])
    assert await controller.read(P4ActionProfileMember("profile")) == []


async def test_a_group_spreads_packets_over_its_members(controller: Controller) -> None:
    await to_cpu(controller)
    switch = controller.switch
    await switch.insert(
        [
            P4ActionProfileMember(
                "balancer", member_id=number, action=P4TableAction("set_select", mark=number)
            )
            for number in (1, 2)
        ]
    )
    group = P4ActionProfileGroup(
        "balancer",
        group_id=8,
        max_size=4,
        members=[P4Member(1, weight=1), P4Member(2, weight=2)],
    )
    await switch.insert([group])
    await switch.insert(
        [P4TableEntry("spread", match=P4TableMatch(op=1), action=P4IndirectAction(group_id=8))]
    )
    marks = [(await ask(controller, Probe(op=1, value=v))).select_mark for v in range(24)]
    assert set(marks) == {1, 2}
    assert [(await ask(controller, Probe(op=1, value=v))).select_mark for v in range(24)] == marks
    [seen] = await controller.read(P4ActionProfileGroup("balancer"))
    assert {m.member_id: m.weight for m in seen.members} == {1: 1, 2: 2}
    group.members = [P4Member(2, weight=1)]
    await switch.modify([group])
    assert (await ask(controller, Probe(op=1, value=0))).select_mark == 2
    group.members = [P4Member(1, weight=3), P4Member(2, weight=2)]
    assert await failing(controller, ~copy(group)) == {0: Code.RESOURCE_EXHAUSTED}
    group.members = [P4Member(77, weight=1)]
    assert await failing(controller, ~copy(group)) == {0: Code.NOT_FOUND}


async def test_a_one_shot_is_read_back_as_it_was_written(controller: Controller) -> None:
    await to_cpu(controller)
    action = P4IndirectAction(
        [1 * P4TableAction("set_select", mark=5), 2 * P4TableAction("set_select", mark=6)]
    )
    entry = P4TableEntry("spread", match=P4TableMatch(op=1), action=action)
    await controller.switch.insert([entry])
    marks = {(await ask(controller, Probe(op=1, value=v))).select_mark for v in range(24)}
    assert marks == {5, 6}
    [seen] = await controller.read(P4TableEntry("spread"))
    assert [(w, a.args["mark"]) for w, a in seen.action.action_set] == [(1, 5), (2, 6)]
    entry.action = P4IndirectAction([1 * P4TableAction("set_select", mark=7)])
    await controller.switch.modify([entry])
    assert (await ask(controller, Probe(op=1, value=3))).select_mark == 7
    member = P4ActionProfileMember(
        "balancer", member_id=1, action=P4TableAction("set_select", mark=1)
    )
    assert await failing(controller, +member) == {0: Code.INVALID_ARGUMENT}
    await controller.switch.delete([entry])
    await controller.switch.insert([member])


# --- replication --------------------------------------------------------------------------------


async def test_a_multicast_group_copies_by_port_and_instance(controller: Controller) -> None:
    switch = controller.switch
    await switch.insert(
        [
            P4TableEntry(
                "forward",
                match=P4TableMatch(dst=TO_GROUP),
                action=P4TableAction("multicast", group=7),
            )
        ]
    )
    group = P4MulticastGroupEntry(7, replicas=[(255, 1), (255, 2), (9, 3)])
    await switch.insert([group])
    await controller.send(Probe().frame(TO_GROUP))
    packets = await controller.packets_in(2)
    assert sorted(p["rid"] for p in packets) == [1, 2]
    assert {p["instance_type"] for p in packets} == {REPLICATION}
    [seen] = await controller.read(P4MulticastGroupEntry(7))
    assert sorted((r.port, r.instance) for r in seen.replicas) == [(9, 3), (255, 1), (255, 2)]
    group.replicas = [(255, 9)]
    await switch.modify([group])
    await controller.send(Probe().frame(TO_GROUP))
    [packet] = await controller.packets_in(1)
    assert packet["rid"] == 9
    await switch.delete([group])
    assert await controller.read(P4MulticastGroupEntry()) == []


async def test_multicast_groups_are_checked(controller: Controller) -> None:
    def group(number: int, *replicas: tuple[int, int]) -> P4MulticastGroupEntry:
        return P4MulticastGroupEntry(number, replicas=list(replicas))

    await controller.switch.insert([group(5, (1, 1))])
    assert await failing(
        controller,
        +group(0, (1, 1)),
        +group(32768, (1, 1)),
        +group(6, (1, 1), (1, 1)),
        +group(5, (1, 1)),
        ~group(8, (1, 1)),
        -group(8),
        +group(32767, (1, 1)),
    ) == {
        0: Code.INVALID_ARGUMENT,
        1: Code.OUT_OF_RANGE,
        2: Code.INVALID_ARGUMENT,
        3: Code.ALREADY_EXISTS,
        4: Code.NOT_FOUND,
        5: Code.NOT_FOUND,
    }


async def test_a_clone_session_copies_what_came_in(controller: Controller) -> None:
    switch = controller.switch
    await switch.insert(
        [
            P4TableEntry(
                "forward",
                match=P4TableMatch(dst=TO_CLONE),
                action=P4TableAction("mirror", session=3),
            )
        ]
    )
    session = P4CloneSessionEntry(3, replicas=[(255, 4)])
    await switch.insert([session])
    await controller.send(Probe(index=1).frame(TO_CLONE))
    [packet] = await controller.packets_in(1)
    assert (packet["instance_type"], packet["rid"]) == (INGRESS_CLONE, 4)
    assert packet["ingress_port"] == 255
    assert Probe.parse(packet.payload).index == 1
    [seen] = await controller.read(P4CloneSessionEntry(3))
    assert [(r.port, r.instance) for r in seen.replicas] == [(255, 4)]
    session.replicas = [(255, 5), (255, 6)]
    await switch.modify([session])
    await controller.send(Probe(index=1).frame(TO_CLONE))
    assert sorted(p["rid"] for p in await controller.packets_in(2)) == [5, 6]
    assert await failing(
        controller,
        +P4CloneSessionEntry(3, replicas=[(1, 1)]),
        +P4CloneSessionEntry(4, replicas=[(1, 1)], class_of_service=1),
        +P4CloneSessionEntry(0, replicas=[(1, 1)]),
        +P4CloneSessionEntry(40000, replicas=[(1, 1)]),
    ) == {
        0: Code.ALREADY_EXISTS,
        1: Code.UNIMPLEMENTED,
        2: Code.INVALID_ARGUMENT,
        3: Code.INVALID_ARGUMENT,
    }
    await switch.delete([session])
    assert await controller.read(P4CloneSessionEntry()) == []


# --- digests ------------------------------------------------------------------------------------


async def test_digests_come_in_lists_and_not_again_until_acknowledged(
    controller: Controller,
) -> None:
    switch = controller.switch
    await switch.insert(
        [
            P4TableEntry(
                "forward", match=P4TableMatch(dst=TO_DIGEST), action=P4TableAction("learn")
            ),
            P4DigestEntry(
                "seen_t", max_list_size=2, max_timeout_ns=3_000_000_000, ack_timeout_ns=600 * 10**9
            ),
        ]
    )
    [config] = await controller.read(P4DigestEntry("seen_t"))
    assert (config.max_list_size, config.ack_timeout_ns) == (2, 600 * 10**9)
    lists = controller.queue(switch.read_digests("seen_t"))

    async def next_list() -> finsy.P4DigestList:
        return await asyncio.wait_for(lists.get(), 60)

    async def learn(*indices: int) -> None:
        for index in indices:
            await controller.send(Probe(index=index).frame(TO_DIGEST))

    await learn(1, 2)
    first = await next_list()
    assert [d["index"] for d in first] == [1, 2]
    assert first[0] == {"src": SOURCE, "port": 255, "index": 1}
    # 1 and 2 are on their way: only 3 is news. It waits out the timeout alone.
    await learn(1, 2, 3)
    second = await next_list()
    assert [d["index"] for d in second] == [3]
    assert second.list_id != first.list_id
    await switch.write([first.ack()])
    await asyncio.sleep(0.2)
    await learn(1, 3, 2)
    assert [d["index"] for d in await next_list()] == [1, 2]


async def test_a_digest_is_configured_once(controller: Controller) -> None:
    entry = P4DigestEntry("seen_t", max_list_size=1)
    assert await failing(controller, ~copy(entry), -copy(entry)) == {
        0: Code.NOT_FOUND,
        1: Code.NOT_FOUND,
    }
    await controller.switch.insert([entry])
    assert await failing(controller, +copy(entry)) == {0: Code.ALREADY_EXISTS}
    await controller.switch.modify([P4DigestEntry("seen_t", max_list_size=9)])
    [seen] = await controller.read(P4DigestEntry("seen_t"))
    assert seen.max_list_size == 9
    await controller.switch.delete([entry])


# --- packets ------------------------------------------------------------------------------------


async def test_packet_out_and_in_carry_their_headers(controller: Controller) -> None:
    await controller.send(Probe(index=77).frame(), bypass=1, egress_port=255)
    [packet] = await controller.packets_in(1)
    assert packet["ingress_port"] == 255
    assert Probe.parse(packet.payload).index == 77


async def test_many_packets_out_come_back_in_order(controller: Controller) -> None:
    await to_cpu(controller)
    for index in range(200):
        await controller.send(Probe(index=index).frame())
    packets = await controller.packets_in(200)
    assert [Probe.parse(p.payload).index for p in packets] == list(range(200))


# --- ageing -------------------------------------------------------------------------------------


async def test_an_entry_that_nothing_hits_is_reported(controller: Controller) -> None:
    switch = controller.switch
    entry = P4TableEntry(
        "ageing",
        match=P4TableMatch(src=SOURCE),
        action=P4TableAction("NoAction"),
        idle_timeout_ns=700_000_000,
        metadata=b"mine",
    )
    notifications = controller.queue(switch.read_idle_timeouts())
    await switch.insert([entry])
    [seen] = await controller.read(P4TableEntry("ageing", time_since_last_hit=0))
    assert seen.idle_timeout_ns == 700_000_000
    assert seen.time_since_last_hit is not None
    notification = await asyncio.wait_for(notifications.get(), 60)
    [idle] = notification.table_entry
    assert (idle.match["src"], idle.idle_timeout_ns) == (SOURCE, 700_000_000)
    plain = P4TableEntry(
        "small",
        match=P4TableMatch(index=1),
        action=P4TableAction("NoAction"),
        idle_timeout_ns=1,
    )
    assert await failing(controller, +plain) == {0: Code.INVALID_ARGUMENT}
