"""p4runtime-shell, a second independent client, against every target.

Oracle: the shell's own assertions in shell_scenario.py. It needs an old protobuf and so a Python
environment of its own: `make setup-shell` makes .venv-p4rt-shell, KVCAST_SHELL_PYTHON names
another; without either these tests are skipped. Cannot see: more than one controller.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import BLOB_PATH, P4INFO_PATH, Target

REPOSITORY = Path(__file__).parents[2]


def shell_python() -> str:
    path = os.environ.get("KVCAST_SHELL_PYTHON")
    if path is None:
        default = REPOSITORY / ".venv-p4rt-shell" / "bin" / "python"
        if not default.exists():
            pytest.skip("no p4runtime-shell (make setup-shell, or KVCAST_SHELL_PYTHON)")
        path = str(default)
    return path


def test_p4runtime_shell_programs_the_switch(target: Target) -> None:
    script = Path(__file__).with_name("shell_scenario.py")
    done = subprocess.run(
        [shell_python(), "-P", str(script), target.address, str(P4INFO_PATH), str(BLOB_PATH)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[-2] == "done", done.stdout + done.stderr
    for step in ("table entries", "counters", "multicast", "errors"):
        assert step in done.stdout.split("\n")
