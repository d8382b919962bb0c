"""Reconcile: the writes that turn one switch state into another, and their order.

Oracle: applying the writes to a model must give the desired state, and a second comparison must
be empty. Cannot see: encoding (the integration tests read real tables back).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcast.controller.core import program
from kvcast.controller.core.namespaces import Group
from kvcast.controller.core.node import Address
from kvcast.controller.core.reconcile import (
    ActionCall,
    DigestConfig,
    EntryChange,
    GroupChange,
    SwitchState,
    Verb,
    apply,
    changes_since,
    diff,
    joined,
)
from kvcast.controller.core.residency import Resident
from kvcast.protocol.messages import roce
from kvcast.protocol.messages.control import NamespaceInfo
from kvcast.protocol.messages.wire import SEGMENT_BYTES, BlockId

SETTINGS = program.Settings(enabled=True, lease_ticks=100, heat_threshold=3)


def host(number: int, udp_port: int = 19286) -> program.Host:
    return program.Host(
        f"node-{number}",
        Address(f"10.77.0.{number}", f"02:6b:76:00:00:{number:02x}", number, udp_port, "h", 1),
    )


def namespace(number: int, *nodes: str) -> NamespaceInfo:
    return NamespaceInfo(number, f"tenant-{number}", "model", "1", "layout", list(nodes))


NAMESPACES = [namespace(1), namespace(2)]


def state_of(
    hosts: int = 3,
    *,
    settings: program.Settings = SETTINGS,
    port_sets: dict[int, int] | None = None,
) -> SwitchState:
    return program.desired_state(
        settings,
        [host(n) for n in range(1, hosts + 1)],
        [("node-1", "node-2")[: min(hosts, 2)]] * 4,
        NAMESPACES,
        [Group(1, 1, ("node-1", "node-2", "node-9"), ordinal=5)],
        [
            Resident(BlockId(1, b"\1" * 16), (7, 3), 55, 0xD, SEGMENT_BYTES + 1, False, 0.0),
        ],
        port_sets or {0b11: 4},
    )  # fmt: skip


def test_zones_are_installed_for_those_who_have_one() -> None:
    """Each constant leaves the check of a home's packet right for each reader; whoever has no zone,
    or has lost it, writes to nobody and is written to by nobody."""
    settings = replace(SETTINGS, rdma_address="10.77.0.250")
    hosts = [host(n) for n in range(1, 4)]
    for n in (0, 2):
        address = replace(hosts[n].address, zone_queue_pair=0x21 + n, zone_key=0x7700 + n)
        hosts[n] = replace(hosts[n], address=address)
    for wanted in (settings, SETTINGS):
        state = program.desired_state(wanted, hosts, [("node-1",)] * 4, NAMESPACES, [], [], {})
        targets = {key for table, key in state.entries if table == "rdma_target"}
        zones = {
            key: e.params for (table, key), e in state.entries.items() if table == "landing_zone"
        }
        if wanted is SETTINGS:
            assert not targets
            assert not zones
            continue
        pool = program.ip_number("10.77.0.250")
        ips = {h.port: program.ip_number(h.address.ip) for h in hosts}
        assert targets == {(pool, roce.POOL_QUEUE_PAIR), (ips[1], 0x21), (ips[3], 0x23)}
        assert set(zones) == {(a, b) for a in (1, 3) for b in (1, 3)}
        for (home, reader), params in zones.items():
            mac, source, destination, queue_pair, key, *change, bit = params
            assert mac == program.mac_number(hosts[reader - 1].address.mac)
            assert (source, destination, bit) == (pool, ips[reader], program.port_bit(reader))
            sent = roce.Target(ips[home], pool, roce.POOL_QUEUE_PAIR, roce.POOL_KEY)
            target = roce.Target(source, destination, queue_pair, key)
            assert tuple(change) == roce.compensation(sent, target)


STATES = st.builds(
    SwitchState,
    entries=st.dictionaries(
        st.tuples(
            st.sampled_from(["l2_forward", "port_set", "resident"]),
            st.tuples(st.integers(0, 3)),
        ),
        st.builds(ActionCall, st.sampled_from(["a", "b"]), st.tuples(st.integers(0, 2))),
    ),
    groups=st.dictionaries(
        st.integers(1, 4),
        st.frozensets(st.tuples(st.integers(1, 3), st.sampled_from([0, 255])), min_size=1),
    ),
    digests=st.just({}) | st.just({"heat_t": DigestConfig(1, 2, 3)}),
)


@given(actual=STATES, desired=STATES)
def test_the_writes_lead_from_any_state_to_any_other(
    actual: SwitchState, desired: SwitchState
) -> None:
    model = actual.copy()
    changes = diff(actual, desired)
    for change in (*changes.upserts, *changes.deletes):
        match change:
            case EntryChange(verb, key):
                assert (key in model.entries) == (verb is not Verb.INSERT)
            case GroupChange(verb, group):
                assert (group in model.groups) == (verb is not Verb.INSERT)
        apply(model, change)
    assert model.entries == desired.entries
    assert model.groups == desired.groups
    assert desired.digests.items() <= model.digests.items()
    assert len(diff(model, desired)) == 0


@given(
    stable=st.lists(STATES, min_size=2, max_size=2),
    changing=st.lists(STATES, min_size=2, max_size=2),
)
@pytest.mark.slow
def test_the_changing_part_is_compared_alone_with_the_same_result(
    stable: list[SwitchState], changing: list[SwitchState]
) -> None:
    for state in changing:  # nothing in common with the stable part
        state.entries = {
            ("changing", match): action for (_, match), action in state.entries.items()
        }
        state.groups = {group + 10: copies for group, copies in state.groups.items()}
        state.digests = {}
    before = joined(stable[0], changing[0])
    for after in (
        joined(stable[0], changing[1]),
        joined(stable[1], changing[0]),
        joined(stable[1], changing[1]),
        stable[1],
    ):
        assert changes_since(before, after) == diff(before, after)


def test_the_stable_part_is_not_looked_at_while_it_is_the_same() -> None:
    class Untouched(dict[Any, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all of it was looked through")

        items = get = __contains__ = __iter__  # type: ignore[assignment]

    stable = SwitchState()
    changing = [SwitchState({("resident", (n,)): ActionCall("a")}) for n in (1, 2)]
    before, after = (joined(stable, each) for each in changing)
    for state in (stable, before, after):
        state.entries = Untouched()
    changes = changes_since(before, after)
    assert [change.key for change in changes.upserts] == [("resident", (2,))]
    assert [change.key for change in changes.deletes] == [("resident", (1,))]


def test_groups_come_before_the_entries_that_name_them_and_the_program_is_enabled_last() -> None:
    upserts = diff(SwitchState(), state_of()).upserts
    kinds = [change.kind for change in upserts]
    assert kinds[-1] == "settings"
    last_group = max(i for i, kind in enumerate(kinds) if kind == "multicast_group")
    first_entry = min(i for i, k in enumerate(kinds) if k in program.OWNED_TABLES)
    assert last_group < first_entry


def test_going_plain_disables_the_program_before_anything_is_taken_away() -> None:
    plain = program.Settings(enabled=False, lease_ticks=100, heat_threshold=3)
    changes = diff(state_of(), state_of(settings=plain))
    first = changes.upserts[0]
    assert isinstance(first, EntryChange)
    assert first.key == ("settings", ())
    assert first.action.params[0] == 0
    assert {c.kind for c in changes.deletes} >= {"port_guard", "bucket_home", "resident"}
    assert "l2_forward" not in {c.kind for c in changes.deletes}


def test_a_port_sets_group_is_not_given_away_while_its_entry_stands() -> None:
    changes = diff(state_of(port_sets={0b11: 4}), state_of(port_sets={0b110: 4}))
    verbs = [(change.kind, change.verb) for change in changes.upserts]
    assert verbs == [
        ("port_set", Verb.DELETE),
        ("multicast_group", Verb.MODIFY),
        ("port_set", Verb.INSERT),
    ]


def test_defaults_are_modified_and_never_deleted() -> None:
    actual = SwitchState(entries={("settings", ()): ActionCall("set_settings", (0, 0, 0))})
    assert not diff(actual, SwitchState()).deletes
    (change,) = diff(actual, state_of(hosts=0, settings=SETTINGS)).upserts[-1:]
    assert change.verb is Verb.MODIFY


def test_only_the_nodes_of_a_namespace_may_read_it_or_be_in_its_groups() -> None:
    state = program.desired_state(
        SETTINGS,
        [host(1), host(2), host(3)],
        [("node-1",)] * 4,
        [namespace(1), namespace(2, "node-1", "node-3")],
        [Group(2, 1, ("node-1", "node-2", "node-3"), ordinal=0)],
        [],
        {},
    )
    allowed = [match for table, match in state.entries if table == "namespace_guard"]
    assert sorted(allowed) == [(1, 1), (1, 2), (2, 1), (3, 1), (3, 2)]
    bits, group = state.entries["reader_group", (2, 1)].params
    assert bits == 0b101
    assert {port for port, _ in state.groups[group]} == {1, 3}


def test_a_changed_host_is_rewritten_in_place() -> None:
    before = state_of()
    after = program.desired_state(
        SETTINGS, [host(1, udp_port=5000), host(2), host(3)], [("node-1", "node-2")] * 4,
        NAMESPACES, [Group(1, 1, ("node-1", "node-2", "node-9"), ordinal=5)],
        [Resident(BlockId(1, b"\1" * 16), (7, 3), 55, 0xD, SEGMENT_BYTES + 1, False, 0.0)],
        {0b11: 4},
    )  # fmt: skip
    (change,) = diff(before, after).upserts
    assert isinstance(change, EntryChange)
    assert change.verb is Verb.MODIFY
    assert change.key == ("egress_host", (1,))


def test_the_state_of_a_small_pool_is_as_the_program_expects() -> None:
    state = state_of(2, settings=program.Settings(True, 100, 3, "02:00:00:00:00:fe"))
    entries = state.entries
    assert entries["l2_forward", (0x026B76000002,)] == ActionCall("to_port", (2, 0b10))
    assert entries["l2_forward", (0xFFFFFFFFFFFF,)] == ActionCall("flood")
    assert entries["l2_forward", (0x0200000000FE,)] == ActionCall("to_router")
    assert entries["ipv4_route", ((0x0A4D0002, 32),)] == ActionCall(
        "to_nexthop", (2, 0b10, 0x026B76000002, 0x0200000000FE)
    )
    assert entries["port_guard", (2, 0x0A4D0002)] == ActionCall("admit", (0b10, 258))
    assert entries["namespace_guard", (2, 1)] == ActionCall("allow")
    assert entries["bucket_home", (3, 2)] == ActionCall("home")
    assert entries["reader_group", (1, 1)] == ActionCall("set_reader_group", (0b11, 1029))
    key = int.from_bytes(b"\1" * 16, "big")
    assert entries["resident", (1, key, 0)] == ActionCall(
        "resident_at", (7, 55, 2**64 - 1, 0xD, SEGMENT_BYTES + 1)
    )
    assert entries["resident", (1, key, 1)] == ActionCall(
        "resident_at", (3, 55, 1, 0xD, SEGMENT_BYTES + 1)
    )
    assert entries["egress_host", (2,)] == ActionCall(
        "rewrite", (0x026B76000002, 0x0A4D0002, 19286, 0b10)
    )
    assert state.groups == {
        1: frozenset({(1, 0), (2, 0)}),
        257: frozenset({(1, 0), (1, 255)}),
        258: frozenset({(2, 0), (2, 255)}),
        1029: frozenset({(1, 0), (2, 0), (1, 255)}),
        2052: frozenset({(1, 0), (2, 0)}),
    }
