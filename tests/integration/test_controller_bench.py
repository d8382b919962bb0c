"""`python -m kvcast.bench.controller` measures a controller that does its work.

Oracle: the report's fields, and that blocks were admitted and taken over (which the bench itself
insists on). Cannot see: whether the figures are good.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvcast.bench import controller


def test_the_report_has_its_fields(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    size = ["--agents", "3", "40", "--blocks", "4000", "--seconds", "0.2"]
    assert controller.main([*size, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert [size["agents"] for size in report["sizes"]] == [3, 40]
    for name in ("controller_events_per_s", "tick_ms", "takeover_ms"):
        assert report[name] > 0
    for size_report in report["sizes"]:
        assert size_report["residents"] > 0
        assert size_report["candidates"] <= 4000
