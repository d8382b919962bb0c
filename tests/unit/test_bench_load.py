"""How busy processors and links were: arithmetic on what the kernel and the switch count.

Oracle: numbers that are easy to reckon, and this process's own work. Cannot see: a real switch
(tests/integration/test_pool_commands.py).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kvcast.bench import load
from kvcast.topologies.pool import Pool


def _stats(path: Path, at_s: float, **ports: tuple[int, int]) -> None:
    told = {
        "time_s": at_s,
        "ports": {
            number.removeprefix("p"): {"rx_bytes": rx, "tx_bytes": tx}
            for number, (rx, tx) in ports.items()
        },
    }
    path.write_text(json.dumps(told))


def _pool(stats: Path, rate: float) -> Pool:
    """What is read of a pool: this process as its only part, two nodes at ports 1 and 2."""
    return cast(
        Pool,
        SimpleNamespace(
            options=SimpleNamespace(link_rate_bits_per_s=rate),
            star=SimpleNamespace(hosts=[SimpleNamespace(switch_port=n) for n in (1, 2)]),
            pids={"switch": os.getpid(), "node-1": None},
            switch_stats_path=stats,
        ),
    )


def _links(*readings: tuple[float, dict[str, int], dict[str, int]], rate: float) -> dict[str, Any]:
    measured = load.Load(rate, frozenset({"1", "2"}), 2)
    measured.links = [load._Links(*reading) for reading in readings]
    return measured.report()


def test_the_busiest_link_counts_over_all_time_and_the_peak_by_the_second() -> None:
    report = _links(
        (10.0, {"1": 1000, "2": 1000, "255": 0}, {"1": 0, "2": 0, "255": 0}),
        (11.0, {"1": 2000, "2": 1000, "255": 10**9}, {"1": 0, "2": 100, "255": 0}),
        (12.0, {"1": 2000, "2": 1500, "255": 10**9}, {"1": 0, "2": 200, "255": 0}),
        rate=16_000.0,  # 2,000 bytes a second
    )
    assert report["uplink_busiest"] == 0.25
    assert report["uplink_peak"] == 0.5
    assert report["downlink_busiest"] == report["downlink_peak"] == 0.05


def test_a_switch_that_was_started_again_does_not_count_backwards() -> None:
    report = _links((1.0, {"1": 9000}, {"1": 9000}), (2.0, {"1": 10}, {"1": 10}), rate=8e3)
    assert report["uplink_busiest"] == report["uplink_peak"] == 0.0


def test_links_without_a_rate_have_no_share() -> None:
    report = _links((1.0, {"1": 1}, {"1": 1}), (2.0, {"1": 2}, {"1": 2}), rate=0.0)
    assert report["uplink_busiest"] is report["downlink_peak"] is None


async def test_what_processes_and_links_did_while_it_was_measured(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    _stats(stats, 100.0, p1=(0, 0), p2=(0, 0), p255=(0, 0))
    async with load.measured(_pool(stats, 8e6)) as measured:
        load._read(_pool(stats, 8e6), measured)
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
        _stats(stats, 101.0, p1=(250_000, 0), p2=(0, 500_000), p255=(0, 0))
    report = measured.report()
    assert report["uplink_busiest"] == 0.25
    assert report["downlink_peak"] == 0.5
    assert report["processors_busy"] > 0
    assert 0 < report["machine_busy"] <= 1.1
    assert report["processors"] >= 1


async def test_a_switch_that_writes_nothing_leaves_links_untold(tmp_path: Path) -> None:
    (tmp_path / "half").write_text('{"time_s": 1')
    for path in (tmp_path / "none", tmp_path / "half"):
        async with load.measured(_pool(path, 8e6)) as measured:
            pass
        assert measured.report()["uplink_busiest"] is None
