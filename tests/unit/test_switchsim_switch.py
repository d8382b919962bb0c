"""The switch as a whole, on either engine: what P4Runtime and the ports build on.

Oracle: simple_switch.cpp read by hand. The ways of copies through the switch are in
tests/stf/programs/replication.stf; here is what STF has no words for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvcast.switchsim import loader, stf
from kvcast.switchsim.control_plane.externs import Rate
from kvcast.switchsim.engine import Digest, ReplicationError
from kvcast.switchsim.ir import Exact
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.reference import switch as switch_module
from kvcast.switchsim.reference.switch import Switch

PROGRAMS = Path(__file__).resolve().parents[1] / "stf" / "programs"


@pytest.fixture(params=["reference", "llvm"], autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs on both."""
    if request.param == "llvm":
        monkeypatch.setattr(sys.modules[__name__], "Switch", CompiledSwitch)
    return str(request.param)


def switch_with(name: str, **options: int) -> Switch:
    switch = Switch(**options)
    switch.load(loader.load_file(PROGRAMS / f"{name}.json"))
    return switch


def extern_frame(op: int, index: int = 0, value: int = 0) -> bytes:
    return bytes([op, index]) + value.to_bytes(4) + bytes(5)


def result(frames: list[tuple[int, bytes]]) -> int:
    ((port, frame),) = frames
    assert port == 1
    return int.from_bytes(frame[:8])


def test_without_a_program_frames_are_dropped_and_counted() -> None:
    switch = Switch()
    assert switch.process(1, b"x", 0) == []
    assert switch.stats.dropped_no_program == 1
    assert switch.program is None


def test_load_clears_everything_of_the_program_before() -> None:
    switch = switch_with("externs")
    switch.registers["I.cells"].write(3, 7)
    switch.set_multicast_group(1, [(1, 0)])
    switch.set_clone_session(1, [(1, 0)])
    switch.tables["I.meters"].add([Exact(1)], 0, "I.metered")
    switch.process(1, extern_frame(11), 0)
    assert switch.program is not None
    switch.load(switch.program)
    assert switch.registers["I.cells"].read(3) == 0
    assert (switch.multicast_groups, switch.clone_sessions) == ({}, {})
    assert len(switch.tables["I.meters"]) == 0
    assert switch.take_digests() == []


def test_digest_carries_the_fields_with_their_widths() -> None:
    switch = switch_with("externs")
    switch.process(5, extern_frame(11, 3, 0xDEADBEEF), 0)
    switch.process(6, extern_frame(11, 4, 1), 0)
    assert switch.take_digests() == [
        Digest("message_t", (3, 0xDEADBEEF, 5), (8, 32, 9)),
        Digest("message_t", (4, 1, 6), (8, 32, 9)),
    ]
    assert switch.take_digests() == []


def test_digests_are_bounded_and_the_overflow_is_counted() -> None:
    switch = switch_with("externs", digest_queue_size=2)
    for _ in range(5):
        switch.process(1, extern_frame(11), 0)
    assert len(switch.take_digests()) == 2
    assert (switch.stats.digests, switch.stats.digests_overflowed) == (2, 3)


def test_direct_meter_colours_by_entry() -> None:
    switch = switch_with("externs")
    meters = switch.tables["I.meters"]
    handle = meters.add([Exact(1)], 0, "I.metered")
    meters.add([Exact(2)], 0, "I.metered")
    meters.configure_meter(handle, [Rate(0.0, 1), Rate(0.0, 2)])
    assert [result(switch.process(1, extern_frame(10, 1), 9)) for _ in range(4)] == [0, 1, 2, 2]
    assert result(switch.process(1, extern_frame(10, 2), 9)) == 0
    meters.configure_meter(handle, [])
    assert result(switch.process(1, extern_frame(10, 1), 9)) == 0


def test_random_is_in_its_bounds_and_follows_the_seed() -> None:
    one, same, other = (switch_with("externs", seed=s) for s in (1, 1, 2))
    draws = [
        [result(switch.process(1, extern_frame(7), 0)) for _ in range(50)]
        for switch in (one, same, other)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert set(draws[0]) <= set(range(100, 111))
    assert len(set(draws[0])) > 5


def test_failed_assert_drops_the_packet_and_is_counted() -> None:
    switch = switch_with("externs")
    assert switch.process(1, extern_frame(13, value=0), 0) == []
    assert switch.stats.dropped_abandoned == 1
    assert len(switch.process(1, extern_frame(13, value=1), 0)) == 1


def test_index_out_of_range_is_counted_and_harmless() -> None:
    switch = switch_with("externs")
    assert result(switch.process(1, extern_frame(1, 16, 5), 0)) == 0
    assert switch.stats.index_out_of_range == 2


def test_log_message_is_formatted(caplog: pytest.LogCaptureFixture) -> None:
    switch = switch_with("externs")
    with caplog.at_level("INFO", logger="kvcast.switchsim.ir"):
        switch.process(1, extern_frame(12, 5, 600), 0)
    assert caplog.messages == ["value 600 at 5"]


def test_parser_error_is_counted_and_does_not_drop() -> None:
    switch = switch_with("headers")
    assert switch.process(1, b"", 0) == [(1, b"\x01\x02")]
    assert switch.stats.parser_errors == 1


def test_a_packet_that_goes_round_too_often_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(switch_module, "MAX_PASSES", 10)
    monkeypatch.setattr("kvcast.switchsim.llvm.traffic.MAX_PASSES", 10)
    # The bound is part of compiled code, which must not get into the cache like this.
    switch = switch_with("replication", **({"use_cache": False} if engine == "llvm" else {}))
    assert switch.process(1, bytes([5, 200]), 0) == []
    assert switch.stats.dropped_recirculation_bound == 1
    assert switch.stats.ingress_passes == 10
    # Four rounds are well within it.
    assert len(switch.process(1, bytes([5, 0]), 0)) == 1


def test_multicast_keeps_the_order_that_was_given() -> None:
    switch = switch_with("replication")
    switch.set_multicast_group(5, [(3, 7), (1, 8), (3, 9)])
    frames = switch.process(2, bytes([1, 0]), 0)
    assert [(port, frame[3]) for port, frame in frames] == [(3, 7), (1, 8), (3, 9)]
    switch.delete_multicast_group(5)
    assert switch.process(2, bytes([1, 0]), 0) == []
    assert switch.stats.dropped_unknown_group == 1
    with pytest.raises(ReplicationError):
        switch.delete_multicast_group(5)


def test_clone_session_cuts_the_copy_only() -> None:
    switch = switch_with("replication")
    switch.set_clone_session(3, [(9, 1), (10, 2)], packet_length_bytes=5)
    frames = switch.process(2, bytes([2, 0]) + bytes(50), 0)
    assert [(port, len(frame)) for port, frame in frames] == [(9, 5), (10, 5), (1, 59)]
    switch.delete_clone_session(3)
    assert [port for port, _ in switch.process(2, bytes([2, 0]), 0)] == [1]
    assert switch.stats.unknown_clone_session == 1


@pytest.mark.parametrize("group", [0, -1, 32768])
def test_multicast_group_number_is_checked(group: int) -> None:
    with pytest.raises(ReplicationError):
        switch_with("replication").set_multicast_group(group, [])


@pytest.mark.parametrize("replica", [(512, 0), (-1, 0), (1, 65536)])
def test_replica_is_checked(replica: tuple[int, int]) -> None:
    switch = switch_with("replication")
    with pytest.raises(ReplicationError):
        switch.set_multicast_group(1, [replica])
    with pytest.raises(ReplicationError):
        switch.set_clone_session(1, [replica])


def test_stats_account_for_frames_and_bytes() -> None:
    switch = switch_with("replication")
    switch.set_multicast_group(5, [(1, 1), (2, 99), (3, 3)])
    switch.process(2, bytes([1, 0, 9]), 0)
    stats = switch.stats.as_dict()
    assert (stats["frames_in"], stats["bytes_in"]) == (1, 3)
    assert (stats["frames_out"], stats["bytes_out"]) == (2, 2 * 10)
    assert (stats["ingress_passes"], stats["egress_passes"], stats["dropped_egress"]) == (1, 3, 1)


def test_a_loaded_switch_shows_what_its_program_has() -> None:
    switch = switch_with("forwarding")
    table = switch.tables["I.l2"]
    table.add([Exact(1)], 0, "I.to_station", [1])
    assert switch.program is not None
    assert switch.program.name == "forwarding.p4"
    assert (table.spec.match, table.size, len(table)) == ("exact", 4, 1)
    assert {name: len(counter) for name, counter in switch.counters.items()} == {"I.classes": 16}


# --- the STF runner itself must be able to fail -------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "outcome"),
    [
        ("packet 2 07 aabb\nexpect 1 000507aabb$", "passed"),
        ("packet 2 07 aabb\nexpect 1 000507", "passed"),
        ("packet 2 07 aabb\nexpect 1 00**07a*bb$", "passed"),
        ("packet 2 07 aabb\nexpect 1", "passed"),
        ("packet 2 07 aabb\nexpect 1 000507aa$", "wrong"),
        ("packet 2 07 aabb\nexpect 1 000507aabc", "wrong"),
        ("packet 2 07 aabb\nexpect 1 000507aabbcc", "wrong"),
        ("packet 2 07 aabb\nexpect 2 000507aabb", "wrong"),
        ("packet 2 07 aabb", "wrong"),
        ("expect 1 00", "wrong"),
        ("expect 1", "wrong"),
        ("packet 2 07 a", "failed"),
        ("add nothing x:1 act()", "failed"),
        ("dance", "failed"),
    ],
)
def test_stf_runner_tells_right_from_wrong(scenario: str, outcome: str, tmp_path: Path) -> None:
    file = tmp_path / "scenario.stf"
    file.write_text(scenario + "\n")
    assert stf.run_file(file, PROGRAMS / "headers.json").outcome == outcome


def test_stf_runner_reports_refusals(tmp_path: Path) -> None:
    text = (PROGRAMS / "forwarding.json").read_text().replace("mark_to_drop", "fly_away")
    (tmp_path / "x.json").write_text(text)
    (tmp_path / "x.stf").write_text("packet 1 00\n")
    report = stf.run_file(tmp_path / "x.stf")
    assert report.outcome == "refused"
    assert "primitive 'fly_away'" in report.reason


def test_stf_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert stf.main([str(PROGRAMS / "headers.stf"), "--json", str(out)]) == 0
    assert "1 passed, 0 failed, 0 refused, 0 wrong" in capsys.readouterr().out
    assert '"passed": 1' in out.read_text()
    assert stf.main([str(tmp_path)]) == 2


def test_stf_command_line_takes_one_program_for_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.stf").write_text("packet 2 07 aabb\nexpect 1 000507aabb$\n")
    (tmp_path / "two.stf").write_text("packet 2 07 aabb\nexpect 1 000507aabc$\n")
    assert stf.main([str(tmp_path), "--program", str(PROGRAMS / "headers.json")]) == 1
    output = capsys.readouterr().out
    assert "1 passed, 0 failed, 0 refused, 1 wrong" in output
    assert "wrong   two: " in output
