"""Benches that end early: what they had measured is in their report, and why they ended.

Oracle: the file. Cannot see: real pools, which the tests in tests/integration start.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench import demo, hostile, incast, load
from kvcast.bench.incast import IncastOptions, Outcome
from kvcast.cli.bench import main
from kvcast.topologies.pool import PoolError


def test_an_incast_whose_second_pool_dies_reports_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_pool(_options: IncastOptions, name: str, runs: dict[str, Any]) -> Outcome:
        if name == "kvcast":
            raise PoolError("the switch died")
        runs[name] = {"gets": 7}
        return Outcome(gets=7)

    monkeypatch.setattr(incast, "_run_pool", run_pool)
    path = tmp_path / "incast.json"
    assert main(["incast", "--readers", "3", "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["incomplete"] == "the switch died"
    assert report["runs"] == {"plain": {"gets": 7}}
    assert report["parameters"]["readers"] == 3
    assert report["machine"]["cores"] >= 1


async def test_a_demo_whose_second_pool_does_not_start_reports_the_plain_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nothing:
        def __init__(self, *_: object) -> None:
            pass

        async def __aenter__(self) -> Nothing:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    def pool(_options: demo.DemoOptions, *, plain: bool, link_rate: float) -> Nothing:
        assert link_rate in (0.0, demo.LINK_RATES[0])
        if not plain:
            raise PoolError("the controller does not start")
        return Nothing()

    async def calibrate(_links: object) -> demo.Speed:
        return demo.Speed(800.0, 60.0)

    async def replay(_pool: object, _links: object, plan: demo.Plan, *_: object) -> demo.Tally:
        return demo.Tally(gets=5, done={request.number for request in plan.requests})

    async def switch_counters(_pool: object) -> dict[str, Any]:
        return {}

    async def lone_get(_links: object, _rate: float) -> None:
        return None

    @contextlib.asynccontextmanager
    async def measured(_pool: object) -> AsyncIterator[load.Load]:
        yield load.Load(0.0, frozenset(), 1)

    for name, stand_in in {
        "_pool": pool, "_links": Nothing, "calibrate": calibrate, "_replay": replay,
        "_switch_counters": switch_counters, "lone_get": lone_get,
    }.items():  # fmt: skip
        monkeypatch.setattr(demo, name, stand_in)
    monkeypatch.setattr(load, "measured", measured)
    so_far: dict[str, Any] = {}
    with pytest.raises(PoolError, match="does not start"):
        await demo.run(demo.DemoOptions(), demo.Reporter(), so_far)
    assert so_far["bench"] == "demo"
    assert so_far["runs"]["plain"]["gets"] == 5
    assert so_far["workload"]["requests"] > 0


def test_a_hostile_run_that_dies_at_an_entry_point_reports_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_options: hostile.HostileOptions, so_far: dict[str, Any]) -> dict[str, Any]:
        so_far["entry_points"] = [{"entry_point": "switch port"}]
        raise PoolError("the agent died")

    monkeypatch.setattr(hostile, "run", run)
    path = tmp_path / "hostile.json"
    assert main(["hostile", "--frames", "100", "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["incomplete"] == "the agent died"
    assert report["entry_points"] == [{"entry_point": "switch port"}]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--what", "switch", "--minutes", "3"], "--minutes goes with --what pool"),
        (["--what", "switch", "--arena-bytes", "1MiB"], "--arena-bytes goes with --what pool"),
        (["--frames", "1000"], "--frames goes with --what switch"),
    ],
)
def test_a_soak_takes_only_the_flags_of_what_it_soaks(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["soak", *arguments])
    assert told in capsys.readouterr().err
