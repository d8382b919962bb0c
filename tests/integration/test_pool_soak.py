"""Soaks of some seconds: one fault of each kind, and one move of each, on a small pool under load.

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
from kvcast.topologies.pool import Pool, PoolError, PoolOptions
from kvcast.topologies.star import Star

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
    """Every kind of fault but the moves once, quickly."""
    return {
        name: [
            plan.Fault(
                0.3 * (number + 1),
                kind,
                NODES - 1 if kind == plan.KILL_AGENT else number % NODES,
                min(1.0, lane.lasts_s[1]),
            )
            for number, (kind, _) in enumerate(lane.kinds)
            if kind not in plan.MOVES
        ]
        for name, lane in plan.LANES.items()
    }


def failed(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The criteria that do not hold, but for what so short a soak cannot say: whether the hit rate
    sinks (a fifth is two seconds, and a stopped part's), and whether anything was evicted from
    everywhere but the object store."""
    return [
        each
        for each in report["criteria"]
        if not each["holds"]
        and each["name"] != "hit rate"
        and (each["name"], each["found"]) != ("tiers", plan.OBJECT_STORE)
    ]


@pytest.mark.long
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
    assert failed(report) == []
    assert report["wrong_bytes"] == 0
    assert report["blocks_delivered"] > 100
    assert report["evictions_of_spared_agents"] > 0
    struck = {kind for kind, count in report["faults"].items() if count}
    assert struck == {*plan.KINDS} - {*plan.MOVES}
    assert report["hits"]["arena"] > 0
    assert report["hits"]["ssd"] > 0
    assert "ttl" in {settings["policy"] for settings in report["parameters"]["namespaces"]}
    # Whoever was killed has another life, whoever was not has one; node-4 is the attacker's. Those
    # that keep their arenas have supervisors.
    lives = {life["part"]: life["life"] for life in report["lives"]}
    assert lives == {
        "switch": 2,
        "controller": 2,
        "node-1": 1,
        "node-2": 1,
        "node-3": 2,
        "supervisor of node-1": 1,
        "supervisor of node-3": 2,
        "bench": 1,
    }
    assert {growth["life"] for growth in report["growth"]} >= {"node-1, life 1", "node-2, life 1"}
    assert said
    picture = soak_picture.draw(json.loads(json.dumps(report)), tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 200_000


@pytest.mark.long
@pytest.mark.in_step
async def test_no_get_fails_and_nothing_is_lost_while_nodes_and_agents_come_and_go() -> None:
    moves = [
        plan.Fault(1.0, plan.DRAIN_NODE, 0, 0.2),
        plan.Fault(1.1, plan.TAKE_OVER, NODES - 1),
        plan.Fault(1.2, plan.JOIN_NODE, NODES - 1, 0.2),
    ]
    report = await run(
        SoakOptions(
            minutes=0.1,
            nodes=NODES,
            arena_bytes=8 << 20,
            in_flight=2,  # so that blocks are handed over faster than they come
            bounds=WARMING_UP,
            plan={"kills": moves},
        ),
        lambda _line: None,
    )
    assert [each for each in failed(report) if each["name"] != "tiers"] == []
    assert {kind: took["count"] for kind, took in report["moves"].items()} == dict.fromkeys(
        plan.MOVES, 1
    )
    assert report["witness"]["looks"] == 5
    assert report["witness"]["gets"] > 100
    assert report["witness"]["blocks held over a takeover"] > 0
    lives = {life["part"]: life["life"] for life in report["lives"]}
    assert lives["node-1"] == lives["node-2"] == 1
    assert lives["node-3"] == lives["supervisor of node-3"] == 3


@pytest.mark.long
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


@pytest.mark.long
async def test_an_agent_that_keeps_no_arena_is_not_replaced_and_goes_on() -> None:
    async with Pool(Star.of(1), PoolOptions(arena_bytes=4 << 20)) as pool:
        before = pool.pids["node-1"]
        with pytest.raises(PoolError, match="--takeover goes with --arena-keep"):
            await pool.take_over("node-1")
        assert pool.pids["node-1"] == before
        await pool.wait_programmed(30.0)
