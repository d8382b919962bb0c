"""Every STF scenario of the repository, on both engines.

Oracle: the expected frames in the .stf files, which were worked out by hand or with scapy and
zlib, never with switchsim. Blind to: meters beyond their colours, digests, action profiles and
everything of P4Runtime (STF has no words for them); the unit tests see those.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kvcast.switchsim import stf
from kvcast.switchsim.engine import EngineName

PROGRAMS = Path(__file__).resolve().parent / "programs"
SCENARIOS = stf.find_scenarios(PROGRAMS)


@pytest.mark.parametrize("engine", ["reference", "llvm"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_passes(scenario: Path, engine: EngineName) -> None:
    report = stf.run_file(scenario, engine=engine)
    assert (report.outcome, report.reason) == ("passed", "")


@pytest.mark.parametrize("engine", ["reference", "llvm"])
@pytest.mark.parametrize(
    ("more", "outcome", "reason"),
    [
        ("", "wrong", "port 2: 1 frames came, 0 were expected"),
        ("expect 2 00000000000a0200000000011234aabb$", "passed", ""),
        ("expect 2", "passed", ""),
    ],
)
def test_frames_that_a_scenario_about_counters_does_not_expect_are_wrong(
    tmp_path: Path, engine: EngineName, more: str, outcome: str, reason: str
) -> None:
    scenario = tmp_path / "counters.stf"
    scenario.write_text(
        "add l2 ethernet.dst:0x00000000000a to_station(port:2) = A\n"
        "packet 1 00000000000a 020000000001 1234 aabb\n"
        f"check_counter stations($A) packets == 1\n{more}\n"
    )
    report = stf.run_file(scenario, PROGRAMS / "forwarding.json", engine)
    assert (report.outcome, report.reason) == (outcome, reason)


def _without_source_info(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_source_info(v) for k, v in value.items() if k != "source_info"}
    if isinstance(value, list):
        return [_without_source_info(v) for v in value]
    return value


@pytest.mark.parametrize("source", sorted(PROGRAMS.glob("*.p4")), ids=lambda path: path.stem)
def test_committed_program_is_what_p4c_makes_of_its_source(source: Path, tmp_path: Path) -> None:
    compiler = os.environ.get("KVCAST_P4C") or shutil.which("p4c-bm2-ss")
    if compiler is None:
        pytest.skip("needs p4c-bm2-ss on PATH, or KVCAST_P4C")
    made = tmp_path / "made.json"
    info = tmp_path / "made.p4info.txtpb"
    subprocess.run(
        [compiler, "-o", made, "--p4runtime-files", info, source.name],
        cwd=PROGRAMS,
        check=True,
        capture_output=True,
    )
    committed = source.with_suffix(".json").read_text()
    assert _without_source_info(json.loads(made.read_text())) == _without_source_info(
        json.loads(committed)
    )
    assert info.read_text() == source.with_suffix(".p4info.txtpb").read_text()
