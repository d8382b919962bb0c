"""Tables: lookup, and what the control plane may and may not do.

Oracle: a lookup by brute force over the entries, for random tables of every match type; and
behavioral-model's rules (lowest priority wins, the oldest among equals). Tables of whole programs
are tested on both engines, bare ones only on the reference engine.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.switchsim import ir, loader
from kvcast.switchsim.control_plane.externs import Rate
from kvcast.switchsim.control_plane.tables import (
    BadAction,
    BadKey,
    ConstTable,
    DuplicateEntry,
    Group,
    Member,
    NoSuchEntry,
    NoSuchMember,
    StillUsed,
    TableError,
    TableFull,
)
from kvcast.switchsim.ir import Exact, Lpm, MatchValue, Range, Ternary
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.reference.phv import NOW_US, REGISTERS, Layout, Phv
from kvcast.switchsim.reference.switch import Switch
from kvcast.switchsim.reference.tables import Table

PROGRAMS = Path(__file__).resolve().parents[1] / "stf" / "programs"


@pytest.fixture(params=["reference", "llvm"], autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs on both."""
    if request.param == "llvm":
        monkeypatch.setattr(sys.modules[__name__], "Switch", CompiledSwitch)
    return str(request.param)


def switch_with(name: str) -> Switch:
    switch = Switch()
    switch.load(loader.load_file(PROGRAMS / f"{name}.json"))
    return switch


@pytest.fixture
def forwarding() -> Switch:
    return switch_with("forwarding")


# --- the control plane ------------------------------------------------------------------------


def test_entry_can_be_added_found_modified_and_deleted(forwarding: Switch) -> None:
    l2 = forwarding.tables["I.l2"]
    handle = l2.add([Exact(0xA)], 0, "I.to_station", [2])
    entry = l2.find([Exact(0xA)])
    assert entry is l2.get(handle)
    assert entry.action is not None
    assert (entry.action.name, entry.action.arguments) == ("I.to_station", (2,))
    l2.modify(handle, "I.to_station", [3])
    assert [e.action.arguments for e in l2 if e.action] == [(3,)]
    l2.delete(handle)
    assert len(l2) == 0
    with pytest.raises(NoSuchEntry):
        l2.get(handle)
    with pytest.raises(NoSuchEntry):
        l2.find([Exact(0xA)])


def test_modification_keeps_the_counter(forwarding: Switch) -> None:
    l2 = forwarding.tables["I.l2"]
    handle = l2.add([Exact(0xA)], 0, "I.to_station", [2])
    forwarding.process(1, bytes.fromhex("00000000000a" + "00" * 8), 0)
    l2.modify(handle, "I.to_station", [3])
    assert l2.read_counter(handle) == (1, 14)
    l2.write_counter(handle, 7, 8)
    assert l2.read_counter(handle) == (7, 8)


def test_table_without_counters_says_so(forwarding: Switch) -> None:
    route = forwarding.tables["I.route"]
    handle = route.add([Lpm(0, 8)], 0, "I.drop")
    with pytest.raises(TableError, match="no direct counters"):
        route.read_counter(handle)
    with pytest.raises(TableError, match="no direct meters"):
        route.configure_meter(handle, [Rate(1.0, 1)])


def test_table_is_full_at_its_size_and_has_room_after_a_deletion(forwarding: Switch) -> None:
    l2 = forwarding.tables["I.l2"]
    handles = [l2.add([Exact(n)], 0, "I.to_station", [1]) for n in range(4)]
    with pytest.raises(TableFull, match="4 entries"):
        l2.add([Exact(4)], 0, "I.to_station", [1])
    l2.delete(handles[0])
    l2.add([Exact(4)], 0, "I.to_station", [1])


def test_duplicate_key_is_refused_after_dont_care_bits_are_cleared(forwarding: Switch) -> None:
    route, acl = forwarding.tables["I.route"], forwarding.tables["I.acl"]
    route.add([Lpm(0x0A000000, 8)], 0, "I.drop")
    with pytest.raises(DuplicateEntry):
        route.add([Lpm(0x0A123456, 8)], 5, "I.drop")
    route.add([Lpm(0x0A000000, 9)], 0, "I.drop")
    any_type = Ternary(0, 0)
    acl.add([Ternary(0x0A0000FF, 0xFFFFFF00), any_type], 1, "I.drop")
    with pytest.raises(DuplicateEntry):
        acl.add([Ternary(0x0A000000, 0xFFFFFF00), any_type], 1, "I.drop")
    acl.add([Ternary(0x0A000000, 0xFFFFFF00), any_type], 2, "I.drop")


@pytest.mark.parametrize(
    "key",
    [
        [],
        [Exact(1), Exact(1)],
        [Exact(1 << 48)],
        [Exact(-1)],
        [Ternary(1, 1)],
        [Lpm(1, 1)],
    ],
)
def test_key_that_does_not_suit_is_refused(forwarding: Switch, key: list[MatchValue]) -> None:
    with pytest.raises(BadKey):
        forwarding.tables["I.l2"].add(key, 0, "I.to_station", [1])


@pytest.mark.parametrize("value", [Lpm(0, 33), Lpm(0, -1), Lpm(1 << 32, 8), Exact(1)])
def test_prefix_that_does_not_suit_is_refused(forwarding: Switch, value: MatchValue) -> None:
    with pytest.raises(BadKey):
        forwarding.tables["I.route"].add([value], 0, "I.drop")


@pytest.mark.parametrize("value", [Range(5, 4), Range(0, 1 << 16), Exact(1)])
def test_range_that_does_not_suit_is_refused(forwarding: Switch, value: MatchValue) -> None:
    with pytest.raises(BadKey):
        forwarding.tables["I.ports"].add([value, Exact(6)], 0, "I.classify", [1])


@pytest.mark.parametrize(
    ("action", "arguments"),
    [("I.nothing", []), ("I.drop", []), ("I.to_station", []), ("I.to_station", [512])],
)
def test_action_that_does_not_suit_is_refused(
    forwarding: Switch, action: str, arguments: list[int]
) -> None:
    with pytest.raises(BadAction):
        forwarding.tables["I.l2"].add([Exact(1)], 0, action, arguments)


def test_refused_entry_leaves_nothing_behind(forwarding: Switch) -> None:
    l2 = forwarding.tables["I.l2"]
    with pytest.raises(BadAction):
        l2.add([Exact(1)], 0, "I.to_station", [512])
    l2.add([Exact(1)], 0, "I.to_station", [5])
    assert len(l2) == 1


def test_const_entries_cannot_be_changed(forwarding: Switch) -> None:
    by_ttl = forwarding.tables["I.by_ttl"]
    assert by_ttl.is_const
    handle = next(iter(by_ttl)).handle
    attempts: list[Callable[[], object]] = [
        lambda: by_ttl.add([Exact(9)], 0, "I.drop"),
        lambda: by_ttl.modify(handle, "I.drop"),
        lambda: by_ttl.delete(handle),
        by_ttl.clear,
    ]
    for attempt in attempts:
        with pytest.raises(ConstTable):
            attempt()
    assert len(by_ttl) == 2


def test_default_entry_can_be_changed_and_reset(forwarding: Switch) -> None:
    route = forwarding.tables["I.route"]
    route.set_default("I.to_nexthop", [5, 6])
    assert route.default_entry is not None
    assert route.default_entry.arguments == (5, 6)
    route.reset_default()
    assert route.default_entry.name == "I.drop"
    with pytest.raises(BadAction):
        route.set_default("I.classify", [1])


def test_const_default_of_a_block_of_statements_cannot_be_changed(forwarding: Switch) -> None:
    block = next(t for t in forwarding.tables.values() if not t.spec.key)
    assert block.default_entry is not None
    with pytest.raises(ConstTable):
        block.set_default(block.default_entry.name)


# --- lookup against brute force ---------------------------------------------------------------

FIELD_WIDTHS = (5, 3)


def _bare_table(
    match: str, kinds: tuple[str, ...], *, metadata: bool = True
) -> tuple[Table, Callable[..., Phv]]:
    """A table over the fields f0, f1 of one header, without actions but NoAction."""
    fields = tuple(ir.Field(f"f{n}", w) for n, w in enumerate(FIELD_WIDTHS))
    program = switch_with("selector").program
    assert program is not None
    # Only the header space matters to a layout.
    program = dataclasses.replace(
        program,
        headers=(ir.Header("m", "m_t", fields, metadata),),
        stacks=(),
        unions=(),
        union_stacks=(),
    )
    layout = Layout(program)
    key = tuple(
        ir.KeyField(f"f{n}", kind, ir.FieldRef(0, n), FIELD_WIDTHS[n], False, None)
        for n, kind in enumerate(kinds)
    )
    spec = ir.Table(
        name="t",
        match=match,
        key=key,
        size=1000,
        actions=(0,),
        by_hit=False,
        next_by_action=(None,),
        next_hit=None,
        next_miss=None,
        default=None,
        entries=(),
        const_entries=False,
        with_counters=True,
        meter=None,
        action_profile=None,
        support_timeout=True,
    )
    action = ir.Action("NoAction", 0, (), ())
    table = Table(spec, layout, [action], [lambda p, a: None], None)
    table.fill()

    def packet(*values: int) -> Phv:
        phv = layout.empty[:]
        for n, value in enumerate(values):
            phv[layout.slot(ir.FieldRef(0, n))] = value
        return phv

    return table, packet


@pytest.mark.parametrize("kinds", [("exact",), ("exact", "exact")])
def test_key_field_of_an_invalid_header_counts_as_zero(kinds: tuple[str, ...]) -> None:
    table, packet = _bare_table("exact", kinds, metadata=False)
    zeros = table.add([Exact(0)] * len(kinds), 0, "NoAction")
    fives = table.add([Exact(5)] * len(kinds), 0, "NoAction")
    phv = packet(*[5] * len(kinds))
    table.apply(phv)
    assert (table.read_counter(zeros)[0], table.read_counter(fives)[0]) == (1, 0)
    phv[REGISTERS] = 1  # the validity of the only header
    table.apply(phv)
    assert (table.read_counter(zeros)[0], table.read_counter(fives)[0]) == (1, 1)


def test_entry_of_a_table_with_timeouts_knows_when_it_was_hit() -> None:
    table, packet = _bare_table("exact", ("exact",))
    handle = table.add([Exact(5)], 0, "NoAction")
    phv = packet(5)
    phv[NOW_US] = 777
    table.apply(phv)
    assert table.get(handle).last_hit_us == 777


def _matches(value: MatchValue, width: int, actual: int) -> bool:
    match value:
        case Exact(v):
            return actual == v
        case Lpm(v, length):
            return actual >> (width - length) == v >> (width - length)
        case Ternary(v, mask):
            return actual & mask == v & mask
        case Range(low, high):
            return low <= actual <= high


def _values(kind: str, width: int) -> st.SearchStrategy[MatchValue]:
    number = st.integers(0, (1 << width) - 1)
    match kind:
        case "exact":
            return st.builds(Exact, number)
        case "lpm":
            return st.builds(Lpm, number, st.integers(0, width))
        case "ternary":
            return st.builds(Ternary, number, number)
        case _:
            return st.tuples(number, number).map(lambda ends: Range(min(ends), max(ends)))


@pytest.mark.parametrize(
    ("match", "kinds"),
    [
        ("exact", ("exact", "exact")),
        ("lpm", ("exact", "lpm")),
        ("lpm", ("lpm", "exact")),
        ("ternary", ("ternary", "ternary")),
        ("ternary", ("lpm", "ternary")),
        ("ternary", ("ternary", "exact")),
        ("range", ("range", "ternary")),
        ("range", ("exact", "range")),
        ("range", ("range", "lpm")),
    ],
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_lookup_finds_what_brute_force_finds(
    match: str, kinds: tuple[str, ...], data: st.DataObject
) -> None:
    table, packet = _bare_table(match, kinds)
    wanted = data.draw(
        st.lists(
            st.tuples(
                st.tuples(*(_values(k, w) for k, w in zip(kinds, FIELD_WIDTHS, strict=True))),
                st.integers(0, 3),
            ),
            max_size=12,
        )
    )
    for key, priority in wanted:
        try:
            table.add(list(key), priority, "NoAction")
        except DuplicateEntry:
            continue
    for entry in list(table):
        if data.draw(st.booleans()) and len(table) > 3:
            table.delete(entry.handle)
    for a in range(0, 32, 3):
        for b in range(8):
            hits = [
                e
                for e in table
                if all(
                    _matches(v, w, x) for v, w, x in zip(e.key, FIELD_WIDTHS, (a, b), strict=True)
                )
            ]
            before = {e.handle: e.packets for e in table}
            table.apply(packet(a, b))
            counted = [e.handle for e in table if e.packets != before[e.handle]]
            if not hits:
                assert counted == []
            elif match == "lpm":
                best = max(v.prefix_len for e in hits for v in e.key if isinstance(v, Lpm))
                assert counted == [
                    e.handle
                    for e in hits
                    if any(isinstance(v, Lpm) and v.prefix_len == best for v in e.key)
                ]
            else:
                assert counted == [min(hits, key=lambda e: (e.priority, e.handle)).handle]


# --- action profiles --------------------------------------------------------------------------


def frame(kind: int, flow: int, group: int) -> bytes:
    return bytes([kind]) + flow.to_bytes(2) + bytes([group])


def test_entries_of_an_indirect_table_refer_to_members() -> None:
    switch = switch_with("selector")
    pick, shared = switch.tables["I.pick"], switch.action_profiles["I.shared"]
    with pytest.raises(BadAction, match="members or groups"):
        pick.add([Exact(1)], 0, "I.to_port", [1])
    with pytest.raises(NoSuchMember):
        pick.add([Exact(1)], 0, Member(7))
    shared.add_member(7, "I.to_port", [3])
    shared.add_member(8, "I.to_port", [4])
    handle = pick.add([Exact(1)], 0, Member(7))
    assert switch.process(0, frame(1, 0, 1), 0) == [(3, frame(1, 0, 1))]
    shared.modify_member(7, "I.to_port", [5])
    assert [port for port, _ in switch.process(0, frame(1, 0, 1), 0)] == [5]
    with pytest.raises(StillUsed):
        shared.delete_member(7)
    pick.modify(handle, Member(8))
    shared.delete_member(7)
    assert [port for port, _ in switch.process(0, frame(1, 0, 1), 0)] == [4]
    pick.delete(handle)
    shared.delete_member(8)
    # A miss in a table that has no default action does nothing: egress_spec stays 9.
    assert [port for port, _ in switch.process(0, frame(1, 0, 1), 0)] == [9]


def test_profile_without_a_selector_has_no_groups() -> None:
    shared = switch_with("selector").action_profiles["I.shared"]
    with pytest.raises(BadAction, match="no selector"):
        shared.set_group(1, [])


def test_profile_is_full_at_its_size() -> None:
    shared = switch_with("selector").action_profiles["I.shared"]
    for member in range(8):
        shared.add_member(member, "I.to_port", [member])
    with pytest.raises(TableFull):
        shared.add_member(8, "I.drop")
    with pytest.raises(DuplicateEntry):
        shared.add_member(3, "I.drop")


def test_group_spreads_flows_over_its_members_and_each_flow_stays() -> None:
    switch = switch_with("selector")
    balance, spread = switch.tables["I.balance"], switch.action_profiles["I.spread"]
    for member in range(4):
        spread.add_member(member, "I.to_port", [member])
    spread.set_group(5, [0, 1, 2, 3])
    handle = balance.add([Exact(1)], 0, Group(5))

    def port(flow: int) -> int:
        (out,) = switch.process(0, frame(2, flow, 1), 0)
        return out[0]

    flows = [997 * n % 65536 for n in range(200)]
    ports = [port(flow) for flow in flows]
    assert ports == [port(flow) for flow in flows]
    assert {p: ports.count(p) > 20 for p in set(ports)} == dict.fromkeys(range(4), True)
    with pytest.raises(StillUsed):
        spread.delete_member(2)
    spread.set_group(5, [2])
    assert {port(flow) for flow in flows} == {2}
    spread.set_group(5, [])
    assert port(0) == 9
    with pytest.raises(StillUsed):
        spread.delete_group(5)
    balance.modify(handle, Member(1))
    assert port(0) == 1
    spread.delete_group(5)
    with pytest.raises(NoSuchMember):
        balance.add([Exact(2)], 0, Group(5))
