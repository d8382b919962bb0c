"""The benchmark for an engine's own machine, with engines for CPUs.

Oracle: what an engine says with a prefix in its own cache. Cannot see: GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines_harness import PYTHON, needs_engines
from kvcast.bench.gpu import main
from kvcast.service.commands import EXIT_OK

pytestmark = [needs_engines, pytest.mark.in_step, pytest.mark.slow, pytest.mark.timeout(600)]


def test_what_the_pool_holds_is_loaded_and_right(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--python", str(PYTHON), "--model", "llama", "--prefixes", "512", "1024"]
    words += ["--ways", "own_agent", "other_node", "--kv-gib", "0.25", "--arena-gib", "0.25"]
    assert main([*words, "--rounds", "2", "--json", str(report)]) == EXIT_OK
    found = json.loads(report.read_text())
    assert (found["wrong_outputs"], found["not_all_cached"]) == (0, 0)
    assert [case["prefix_bytes"] for case in found["cases"]] == [2 << 20, 4 << 20]
    assert found["own_agent_over_computed"] > 0
    assert found["other_node_over_computed"] > 0
    assert "not_verified_over_computed" not in found
