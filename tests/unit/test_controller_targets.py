"""The controller on each target: what it writes follows the target's profile.

Oracle: the profiles, and the group layout that p4/tna relies on. That the programs agree in names
is test_p4_targets.py's; that bad flags are refused, test_controller_daemon.py's.
"""

from __future__ import annotations

import pytest
from finsy import P4Schema
from finsy.p4entity import decode_entity, encode_updates
from kvcast.controller.core import program
from kvcast.controller.core.namespaces import Group
from kvcast.controller.core.node import Address
from kvcast.controller.core.reconcile import SwitchState, diff
from kvcast.controller.core.residency import Resident
from kvcast.controller.flags import ControllerFlags, pool_options
from kvcast.controller.switch import connection
from kvcast.p4 import artefact, profiles
from kvcast.p4.targets import MAX_PORTS
from kvcast.protocol.messages.control import NamespaceInfo
from kvcast.protocol.messages.wire import BlockId
from kvcast.service.options import parse_options

OTHER_PORTS = ",".join(str(port) for port in range(136, 168))


def host(number: int) -> program.Host:
    mac = f"02:6b:76:00:00:{number:02x}"
    return program.Host(f"node-{number}", Address(f"10.77.0.{number}", mac, number, 19286, "h", 1))


def state_on(*flags: str) -> tuple[program.Settings, SwitchState]:
    settings = pool_options(
        parse_options(ControllerFlags, [*flags, "--router-mac=02:00:00:00:00:fe"])
    )
    state = program.desired_state(
        settings.settings,
        [host(number) for number in (1, 2, 32)],
        [("node-2",)] * 4,
        [NamespaceInfo(7, "t", "m", "1", "bytes")],
        [Group(7, 9, ("node-1", "node-32"), ordinal=5)],
        [],
        {0b11: 4},
    )
    return settings.settings, state


@pytest.mark.parametrize("target", sorted(profiles))
def test_ports_are_the_devices_and_bits_the_pools(target: str) -> None:
    ports = profiles[target].device_ports
    _, state = state_on(f"--target={target}")
    for number in (1, 2, 32):
        at, port = host(number), ports[number - 1]
        mac = program.mac_number(at.address.mac)
        assert state.entries["l2_forward", (mac,)].params == (port, at.port_bit)
        address = program.ip_number(at.address.ip)
        assert state.entries["port_guard", (port, address)].params == (at.port_bit, 256 + number)
        assert state.entries["egress_host", (port,)].params[-1] == at.port_bit
        assert ("namespace_guard", (port, 7)) in state.entries
        assert state.entries["ipv4_route", ((address, 32),)].params[:2] == (port, at.port_bit)
    assert ("bucket_home", (3, ports[1])) in state.entries
    assert state.groups[1] == {(ports[0], 0), (ports[1], 0), (ports[31], 0)}
    assert state.groups[2048 + 4] == {(ports[0], 0), (ports[1], 0)}
    assert state.entries["port_set", (0b11,)].params == (2048 + 4,)
    bits = host(1).port_bit | host(32).port_bit
    assert state.entries["reader_group", (7, 9)].params == (bits, 1024 + 5)


@pytest.mark.parametrize("target", sorted(profiles))
def test_what_it_writes_and_reads_is_in_the_targets_p4info(target: str) -> None:
    """Every write is encoded with the target's own P4Info, and read back as what was meant."""
    schema = P4Schema(artefact(target).p4info)
    _, state = state_on(f"--target={target}")
    last = profiles[target].slots - 1
    block = BlockId(7, bytes(range(16)))
    resident = Resident(block, (0, last), 9, 1 << 63, 100_000, pinned=False, admitted_at=0.0)
    state.entries |= program.resident_entries(resident)
    changes = diff(SwitchState(), state)
    read = SwitchState()
    for change in (*changes.upserts, *changes.deletes):
        update = connection.update_of(change, schema)
        (encoded,) = encode_updates([update], schema)
        connection._note(read, decode_entity(encoded.entity, schema), schema)
    assert read.entries == state.entries
    assert read.groups == state.groups
    assert read.digests == {}
    for counted in ("decisions", "fills"):
        assert schema.tables[counted].direct_counter is not None
    assert schema.counters["resident_hits"].size == profiles[target].slots
    assert program.HEAT_DIGEST in {digest.alias for digest in schema.digests}


@pytest.mark.parametrize("target", ["v1model", "bmv2"])
def test_serving_groups_go_round_where_the_program_wants_it(target: str) -> None:
    _, state = state_on(f"--target={target}")
    assert state.groups[256 + 2] == {(2, 0), (2, 255)}
    assert state.groups[1024 + 5] == {(1, 0), (32, 0), (1, 255)}
    assert not set(range(64, 68)) & set(state.groups)


@pytest.mark.parametrize(("target", "port"), [("tofino1", 68), ("tofino2", 6)])
def test_on_a_tofino_each_pipe_has_a_loop_group(target: str, port: int) -> None:
    ports = profiles[target].device_ports
    _, state = state_on(f"--target={target}")
    assert state.groups[256 + 2] == {(ports[1], 0)}
    assert state.groups[1024 + 5] == {(ports[0], 0), (ports[31], 0)}
    for pipe in range(4):
        assert state.groups[64 + pipe] == {(128 * pipe + port, 255)}


def test_host_ports_of_tofinos_are_of_one_pipe_and_not_its_loop() -> None:
    for target in ("tofino1", "tofino2"):
        profile = profiles[target]
        assert {port // 128 for port in profile.device_ports} == {0}
        assert len(set(profile.device_ports)) == MAX_PORTS
        assert not set(profile.device_ports) & set(profile.loop_groups.values())


def test_device_ports_can_be_said() -> None:
    settings, state = state_on("--target=tofino1", f"--device-ports={OTHER_PORTS}")
    assert settings.device_port(1) == 136
    assert state.groups[256 + 2] == {(137, 0)}


def test_a_lease_is_cut_to_what_the_target_counts() -> None:
    longest = profiles["tofino1"].longest_lease_ticks
    settings, _ = state_on("--target=tofino1", "--coalesce-lease=3600")
    assert settings.lease_ticks == longest
    settings, _ = state_on("--target=tofino1", "--coalesce-lease=0.01")
    assert settings.lease_ticks == round(10_000 / 65.536)


def test_the_residents_are_what_the_target_holds() -> None:
    for target, profile in profiles.items():
        assert pool_options(ControllerFlags(target=target)).slots == (profile.slots)
