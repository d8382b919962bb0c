"""The data plane's STF scenarios, on the software targets' programs and both engines.

Oracle: the frames written out in p4_scenarios.py. Blind to leases, heat and digests, for which STF
has no words (tests/p4).
"""

from __future__ import annotations

from pathlib import Path

import p4_scenarios
import pytest
from kvcast.p4 import artefact, profiles
from kvcast.switchsim import stf
from kvcast.switchsim.engine import EngineName

SOFTWARE = sorted(name for name, profile in profiles.items() if profile.brings_device_config)
"""Targets that this machine can run; the model of the others: tests/p4/test_tna_model.py."""


@pytest.mark.parametrize("engine", ["reference", "llvm"])
@pytest.mark.parametrize("target", SOFTWARE)
@pytest.mark.parametrize("name", sorted(p4_scenarios.SCENARIOS))
def test_scenario_passes(name: str, target: str, engine: EngineName) -> None:
    report = stf.run_file(p4_scenarios.FOLDER / f"{name}.stf", artefact(target).json, engine)
    assert (report.outcome, report.reason) == ("passed", "")


def test_committed_scenarios_are_current() -> None:
    written = {name: make().text() for name, make in p4_scenarios.SCENARIOS.items()}
    committed = {path.stem: path.read_text() for path in p4_scenarios.FOLDER.glob("*.stf")}
    assert committed == written, "run python tests/stf/p4_scenarios.py"


def test_a_scenario_can_fail(tmp_path: Path) -> None:
    text = (p4_scenarios.FOLDER / "coalescing_join.stf").read_text()
    wrong = tmp_path / "wrong.stf"
    wrong.write_text(text.replace("expect 4", "expect 3", 1))
    assert stf.run_file(wrong, artefact("v1model").json).outcome == "wrong"
