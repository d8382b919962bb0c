"""The fuzzer's command: what it leaves, and where.

Oracle: the folders. Cannot see: the fuzzing itself (tests/security/test_security_fuzz.py).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from kvcast.bench.fuzz import command
from kvcast.bench.fuzz.engine import Target
from kvcast.bench.fuzz.targets import FunctionHarness


def breaks(data: bytes) -> None:
    if data != b"begin":
        raise KeyError("boom")


def test_finds_go_to_the_temporary_folder_and_the_working_folder_stays_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, elsewhere = tmp_path / "checkout", tmp_path / "tmp"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    target = Target("breaks", "", lambda: FunctionHarness(breaks, [b"begin"], (ValueError,)))
    monkeypatch.setattr(command, "TARGETS", {"breaks": target})
    report = elsewhere / "report.json"
    arguments = ["--target", "breaks", "--inputs", "300", "--json", str(report)]
    assert command.main(arguments) == 1
    assert list(here.iterdir()) == []
    (find, *_) = (elsewhere / "kvcast-finds").iterdir()
    assert f"--target breaks --replay {find}" in capsys.readouterr().out
    assert json.loads(report.read_text())[0]["finds"]
    assert command.main(["--target", "breaks", "--replay", str(find)]) == 1
