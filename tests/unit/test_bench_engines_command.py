"""What the commands that measure engines have in common: how they report, and fail.

Oracle: by hand. Cannot see: engines (`tests/engines`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench.engines.command import add_options, measured
from kvcast.bench.engines.engine import EngineError
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, CommandError


def arguments_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(("wrong", "status"), [(0, EXIT_OK), (1, EXIT_FAILED)])
async def test_a_report_is_written_and_judged(tmp_path: Path, wrong: int, status: int) -> None:
    async def run(_arguments: argparse.Namespace, _so_far: dict[str, Any]) -> dict[str, Any]:
        return {"wrong": wrong}

    shown: list[dict[str, Any]] = []
    file = tmp_path / "report.json"
    ended = await measured(
        arguments_of("--json", str(file)), run, shown.append, lambda report: bool(report["wrong"])
    )
    assert ended == status
    assert shown == [json.loads(file.read_text())] == [{"wrong": wrong}]


async def test_an_engine_that_ends_leaves_what_was_measured_before(tmp_path: Path) -> None:
    async def run(_arguments: argparse.Namespace, so_far: dict[str, Any]) -> dict[str, Any]:
        so_far["first"] = 7
        raise EngineError("an engine has ended")

    file = tmp_path / "report.json"
    with pytest.raises(CommandError, match="an engine has ended"):
        await measured(arguments_of("--json", str(file)), run, lambda _: None, lambda _: False)
    found = json.loads(file.read_text())
    assert found["first"] == 7
    assert "an engine has ended" in found["incomplete"]
