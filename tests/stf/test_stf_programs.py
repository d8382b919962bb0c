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

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
SCENARIOS = [
    path for folder in (PROGRAMS, ROOT / "p4" / "stf") for path in stf.find_scenarios(folder)
]


@pytest.mark.parametrize("engine", ["reference", "llvm"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_passes(scenario: Path, engine: stf.Engine) -> None:
    report = stf.run_file(scenario, engine=engine)
    assert (report.outcome, report.reason) == ("passed", "")


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
