"""Reports: whole in their file, or marked as incomplete.

Oracle: the file. Cannot see: a machine that loses power.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from kvcast.service import reports


def measure(path: Path, error: BaseException) -> None:
    with reports.in_the_making(path) as so_far:
        so_far["first"] = 1
        raise error


def test_a_report_in_the_making_is_written_where_the_measurement_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "report.json"
    with pytest.raises(OSError, match="gone"):
        measure(path, OSError("the pool is gone"))
    assert json.loads(path.read_text()) == {"first": 1, "incomplete": "the pool is gone"}
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interrupt_is_named(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(error):
        measure(path, error())
    assert json.loads(path.read_text())["incomplete"] == "interrupted"


def test_nothing_is_written_of_nothing_nor_where_all_went_well(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(OSError), reports.in_the_making(path):  # noqa: PT011
        raise OSError
    with reports.in_the_making(path) as so_far:
        so_far["first"] = 1
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    reports.write_json(path, {"first": 1})
    circle: dict[str, object] = {}
    circle["itself"] = circle
    with pytest.raises(ValueError, match="Circular"):
        reports.write_json(path, circle)
    assert json.loads(path.read_text()) == {"first": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_standard_output_has_a_report_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (None, "-", str(tmp_path / "report.json")):
        reports.report_to(path, {"first": 1})
        assert json.loads(capsys.readouterr().out) == {"first": 1}
