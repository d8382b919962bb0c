"""The switch bench: its artefacts are current, its drivers count right, its report is complete.

Oracle: the reference engine, p4c where it is installed, and arithmetic. Cannot see: whether the
rates are true; a bench cannot prove itself.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench import l3, switch, traffic
from kvcast.bench import switch_programs as programs
from kvcast.bench.memory import Driver
from kvcast.bench.soak import switch as soak
from kvcast.cli import bench
from kvcast.p4.build import Compilers
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.reference.switch import Switch

NOW_US = 10_000_000


def test_the_routers_artefacts_are_those_of_its_source() -> None:
    assert l3.RECORDED_HASH.read_text().strip() == l3.source_hash()


@pytest.mark.skipif(Compilers.find().bmv2 is None, reason="no p4c (KVCAST_P4C or PATH)")
def test_compiling_the_router_again_gives_the_same(tmp_path: Path) -> None:
    l3.compile_into(tmp_path)
    for path in (l3.PROGRAM, l3.P4INFO):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_the_router_routes_by_the_longest_prefix_and_decrements_ttl() -> None:
    router = Switch()
    programs.load(router, programs.router())
    for port, frame in programs.routed(16):
        ((out, sent),) = router.process(port, frame, NOW_US)
        assert out == 2
        assert sent[:6] == programs.endpoint(2).mac
        assert sent[22] == frame[22] - 1
        header = sent[14:34]
        assert sum(int.from_bytes(header[i : i + 2], "big") for i in range(0, 20, 2)) % 0xFFFF == 0
    mortal = bytearray(programs.routed(1)[0][1])
    mortal[22] = 1
    assert router.process(1, bytes(mortal), NOW_US) == []


@pytest.mark.parametrize("scenario", switch.scenarios(), ids=lambda s: s.name)
def test_each_scenario_puts_out_what_the_reference_engine_does(scenario: switch.Scenario) -> None:
    reference, compiled = Switch(), CompiledSwitch()
    for one in (reference, compiled):
        programs.load(one, scenario.setup)
        for port, frame in scenario.prepare:
            one.process(port, frame, NOW_US)
    expected = sum(len(reference.process(*arrival, NOW_US)) for arrival in scenario.inputs)
    driver = Driver(compiled.native_entry, scenario.inputs, NOW_US)
    assert driver.once() == expected > 0
    # Steady: the second and third time are as the first.
    assert (driver.once(), driver.once()) == (expected, expected)
    assert driver.run.bytes_out > 0


def test_data_reaches_eight_readers_and_a_read_is_served_whole() -> None:
    made = {scenario.name: scenario for scenario in switch.scenarios()}
    engine = Switch()
    programs.load(engine, made["data_1k"].setup)
    for arrival in made["data_1k"].prepare:
        engine.process(*arrival, NOW_US)
    assert len(engine.process(*made["data_1k"].inputs[0], NOW_US)) == 8
    engine = Switch()
    programs.load(engine, made["resident"].setup)
    for arrival in made["resident"].prepare:
        engine.process(*arrival, NOW_US)
    assert len(engine.process(*made["resident"].inputs[0], NOW_US)) == 64


def test_a_sender_sends_its_frames_in_turn_until_it_is_stopped() -> None:
    with (
        socket.socket(type=socket.SOCK_DGRAM) as sink,
        socket.socket(type=socket.SOCK_DGRAM) as source,
    ):
        sink.bind(("127.0.0.1", 0))
        sink.settimeout(10)
        source.connect(sink.getsockname())
        frames = [bytes([n]) * 20 for n in range(5)]
        with traffic.Sender(source, frames, 2000.0, os.sched_getaffinity(0)) as sender:
            got = [sink.recv(100) for _ in range(12)]
        assert got == [frames[n % 5] for n in range(12)]
        sent = sender.sent
        time.sleep(0.05)
        assert sender.sent == sent >= 12


def test_medians_and_ratios_are_of_neighbouring_measurements() -> None:
    found = {
        "bare": [(100.0, 1e-6), (50.0, 1e-6), (200.0, 1e-6)],
        "kvcast": [(90.0, 2e-6), (60.0, 2e-6), (150.0, 2e-6)],
        "l3": [(100.0, 1e-6)] * 3,
        "bmv2_kvcast": [(30.0, 9e-6), (10.0, 9e-6), (30.0, 9e-6)],
    }
    runs = {name: [switch.Run(*pair, 300.0) for pair in pairs] for name, pairs in found.items()}
    report = switch._veth_report(runs)
    assert report["veth_pps"] == 90
    assert report["veth_over_bare_forwarder"] == 0.9
    assert report["veth_over_bmv2"] == 5.0
    assert report["veth_l3_over_bmv2"] is None
    assert report["veth"]["kvcast"]["processor_ns_a_frame"] == 2000
    assert report["veth_processor_time_bare_over_kvcast"] == 0.5


@pytest.mark.long
def test_the_whole_bench_runs_and_names_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "find_simple_switch", lambda: None)
    monkeypatch.setenv("KVCAST_SIMPLE_SWITCH_GRPC", "/proc/nonexistent")
    path = tmp_path / "switch.json"
    arguments = ["--json", str(path), "--repeats", "1", "--memory-seconds", "0.02"]
    assert switch.main(arguments) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    for name in ("forward_in_memory_pps", "data_1k_in_memory_pps", "read_join_in_memory_pps"):
        assert report[name] > 0
    assert report["udp_tunnel_pps"] > 0
    if os.geteuid() == 0 and shutil.which("ip"):
        assert report["veth_pps"] > 0
        assert report["veth_over_bare_forwarder"] > 0
        assert report["veth_over_bmv2"] is None
        assert "simple_switch_grpc" in report["skipped"]["bmv2"]
    else:
        assert "needs" in report["skipped"]["veth"]
    assert "frames/s" in switch.table(report)


def simple_switch(folder: Path, *lines: str) -> Path:
    """A script in place of simple_switch_grpc."""
    script = folder / "simple_switch_grpc"
    script.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    script.chmod(0o755)
    return script


def measure_veth(monkeypatch: pytest.MonkeyPatch, script: Path) -> dict[str, Any]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and the ip command")
    monkeypatch.setenv("KVCAST_SIMPLE_SWITCH_GRPC", str(script))
    report: dict[str, Any] = {"skipped": {}}
    switch._veth_in_a_namespace(report, repeats=1)
    return report


@pytest.mark.long
@pytest.mark.root
def test_a_bmv2_without_nanomsg_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = simple_switch(
        tmp_path,
        'case "$*" in',
        '*--help*) echo "  --thrift-port arg   TCP port of the runtime server"; exit 0 ;;',
        """*--notifications-addr*) echo "unrecognised option '--notifications-addr'"; exit 1 ;;""",
        "esac",
        f"exec {sys.executable} -c 'from kvcast.switchsim.daemon import bmv2_main as m; "
        """raise SystemExit(m())' "$@" """,
    )
    assert "--notifications-addr" not in switch.bmv2_help(str(refusing))
    report = measure_veth(monkeypatch, refusing)
    assert report["skipped"] == {}
    assert report["veth_bmv2_kvcast_pps"] > 0
    assert report["veth_over_bmv2"] > 0


@pytest.mark.long
@pytest.mark.root
def test_a_peer_that_does_not_start_is_skipped_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = simple_switch(
        tmp_path, 'case "$*" in *--help*) exit 0 ;; esac', "echo no such interface", "exit 3"
    )
    report = measure_veth(monkeypatch, dying)
    for name in ("bmv2_kvcast", "bmv2_l3"):
        assert report["skipped"][name] == f"{dying} ended with 3; its last words: no such interface"
    assert report["veth_pps"] > 0
    assert report["veth_over_bmv2"] is None


def test_a_part_that_fails_leaves_what_the_others_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(report: dict[str, Any], *_: Any) -> None:
        report["udp_tunnel_pps"] = 7
        raise switch.BenchError("a frame came out changed")

    def measures(report: dict[str, Any], *_: Any) -> None:
        report["veth_pps"] = 8

    monkeypatch.setattr(switch, "measure_memory", lambda report, *_: report.update(a_pps=6))
    monkeypatch.setattr(switch, "measure_tunnels", fails)
    monkeypatch.setattr(switch, "_veth_in_a_namespace", measures)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    path = tmp_path / "switch.json"
    assert switch.main(["--json", str(path), "--repeats", "1"]) == 1
    report = json.loads(path.read_text())
    assert (report["a_pps"], report["udp_tunnel_pps"], report["veth_pps"]) == (6, 7, 8)
    assert report["incomplete"] == "UDP tunnels: a frame came out changed"
    assert "a frame came out changed" in capsys.readouterr().err


def test_an_interrupted_bench_leaves_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(report: dict[str, Any], *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(switch, "measure_memory", lambda report, *_: report.update(a_pps=6))
    monkeypatch.setattr(switch, "measure_tunnels", interrupted)
    path = tmp_path / "switch.json"
    try:
        assert switch.main(["--json", str(path), "--repeats", "1"]) == 130
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    report = json.loads(path.read_text())
    assert (report["a_pps"], report["incomplete"]) == (6, "interrupted")


@pytest.mark.long
def test_the_soak_counts_its_frames_and_watches_memory(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    arguments = ["soak", "--what", "switch", "--frames", "200000", "--json", str(path)]
    assert bench.main(arguments) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["frames"] >= 200_000
    assert report["frames_out"] > 0
    assert report["switch"]["parser_errors"] > 0
    assert report["switch"]["recirculated"] > 0
    assert report["growth_mib"] <= soak.GROWTH_LIMIT_MIB


def test_every_damaged_frame_is_a_frame_of_some_host() -> None:
    rng = random.Random(1)
    frames = [soak.damaged(rng) for _ in range(300)]
    assert {host for host, _ in frames} == set(range(1, programs.HOSTS + 1))
    assert {len(frame) for _, frame in frames} >= {0, 1, 9216}
