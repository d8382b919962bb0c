"""A soak of some seconds: one fault of each kind on a small pool under load.

Oracle: every byte of every block recomputed from its key; the soak's own criteria for what does not
need time (nothing dies, hangs or is left behind; the pool is whole afterwards). Cannot see: growth,
for which it is too short (tests/unit/test_bench_soak.py judges series made by hand).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench.soak import picture as soak_picture
from kvcast.bench.soak import plan
from kvcast.bench.soak.options import SoakOptions
from kvcast.bench.soak.pool import run
from kvcast.bench.soak.verdict import Bounds

NODES = 3
WARMING_UP = Bounds(
    life_s=3.0,
    memory_rise_mib=1000.0,
    descriptors_max=100,
    descriptors_median=100,
    threads_max=20,
    threads_median=20,
    hit_rate_drop=1.0,
)
"""All of the lives of so short a soak is warming up."""


def one_of_each() -> dict[str, list[plan.Fault]]:
    """Every kind of fault once, quickly."""
    return {
        name: [
            plan.Fault(
                0.3 * (number + 1),
                kind,
                NODES - 1 if kind == plan.KILL_AGENT else number % NODES,
                min(1.0, lane.lasts_s[1]),
            )
            for number, (kind, _) in enumerate(lane.kinds)
        ]
        for name, lane in plan.LANES.items()
    }


@pytest.mark.slow
async def test_a_soak_with_one_fault_of_each_kind_ends_whole(tmp_path: Path) -> None:
    said: list[str] = []
    report = await run(
        SoakOptions(
            minutes=0.35,
            nodes=NODES,
            arena_bytes=4 << 20,
            loss=0.005,
            bounds=WARMING_UP,
            plan=one_of_each(),
            run_dir=tmp_path / "run",
        ),
        said.append,
    )
    # Whether the hit rate sinks cannot be said: a fifth is two seconds, and a stopped part's.
    assert [c for c in report["criteria"] if not c["holds"] and c["name"] != "hit rate"] == []
    assert report["wrong_bytes"] == 0
    assert report["blocks_delivered"] > 100
    assert report["evictions_of_spared_agents"] > 0
    assert all(report["faults"][kind] > 0 for kind in plan.KINDS), report["faults"]
    # Whoever was killed has another life, whoever was not has one; node-4 is the attacker's.
    lives = {life["part"]: life["life"] for life in report["lives"]}
    assert lives == {
        "switch": 2,
        "controller": 2,
        "node-1": 1,
        "node-2": 1,
        "node-3": 2,
        "bench": 1,
    }
    assert {growth["life"] for growth in report["growth"]} >= {"node-1, life 1", "node-2, life 1"}
    assert said
    picture = soak_picture.draw(json.loads(json.dumps(report)), tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 200_000


@pytest.mark.slow
async def test_a_soak_that_is_interrupted_keeps_what_it_counted() -> None:
    so_far: dict[str, Any] = {}
    soak: asyncio.Task[dict[str, Any]]

    def interrupt(_line: str) -> None:
        soak.cancel()

    options = SoakOptions(minutes=10, nodes=NODES, arena_bytes=4 << 20)
    soak = asyncio.create_task(run(options, interrupt, so_far))
    with pytest.raises(asyncio.CancelledError):
        await soak
    assert so_far["blocks_delivered"] > 0
    assert so_far["windows"]
    assert {life["part"] for life in so_far["lives"]} >= {"switch", "controller", "node-1"}
    assert so_far["parameters"]["minutes"] == 10
