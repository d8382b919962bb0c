"""The demo's decisions: how a workload is scaled, what the report says, what is drawn.

Oracle: the numbers handed in. Cannot see: a real pool (tests/integration/test_pool_commands.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench import demo, picture
from kvcast.bench.demo import (
    BLOCK_SIZES,
    LINK_RATES,
    DemoOptions,
    Reporter,
    Speed,
    links_were_the_limit,
    make_plan,
    rate_for,
)
from kvcast.bench.replay import Tally
from kvcast.cli.demo import verdict, what_times_mean
from kvcast.service import provenance, reports
from kvcast.service.statistics import ratio, summary
from kvcast.topologies.pool import PoolError, Runner
from kvcast.workloads.traces import TraceLine

SLOW, FAST = Speed(800.0, 60.0), Speed(200_000.0, 20_000.0)


def _trace(requests: int, spacing_ms: float, blocks: int = 6) -> list[TraceLine]:
    return [
        TraceLine(i * spacing_ms, 100, 1, [0, *(1 + (i // 4) * blocks + j for j in range(blocks))])
        for i in range(requests)
    ]


@pytest.mark.parametrize("name", ["mix", "tp-mla", "rollout", "fan-out", "storm", "chat"])
@pytest.mark.parametrize("speed", [SLOW, FAST])
def test_a_workload_is_scaled_to_what_the_machine_carries(name: str, speed: Speed) -> None:
    replay_s = 20.0
    plan = make_plan(DemoOptions(workload=name), None, speed, replay_s, 0.0)
    assert plan.block_bytes in BLOCK_SIZES
    chunks = plan.demand.remote_reads * plan.block_bytes / 1024
    assert chunks <= 0.5 * speed.chunks_per_s * replay_s
    assert plan.requests[-1].time_s < replay_s
    assert f"blocks of {plan.block_bytes // 1024} KiB" in plan.scaling
    assert f"{len(plan.requests)} requests" in plan.scaling


@pytest.mark.parametrize("name", ["mix", "tp-mla", "rollout", "fan-out", "storm", "chat"])
@pytest.mark.parametrize("rate", [1e6, 5e6])
def test_with_links_of_a_rate_a_workload_is_scaled_to_what_they_carry(
    name: str, rate: float
) -> None:
    plan = make_plan(DemoOptions(workload=name), None, FAST, 50.0, rate)
    carried = 8 * rate / 8 * plan.requests[-1].time_s  # eight links, eight bits a byte
    asked_for = plan.demand.remote_reads * plan.block_bytes
    assert 0.1 * carried < asked_for < 0.6 * carried
    assert plan.requests[-1].time_s < 50.0


def test_the_rate_of_links_follows_from_what_the_machine_moves() -> None:
    rates = [rate_for(DemoOptions(), Speed(chunks, 60.0)) for chunks in (1.0, 20e3, 50e3, 1e6)]
    assert rates == sorted(rates)
    assert rates[0] == LINK_RATES[0]
    assert rates[-1] == LINK_RATES[-1]
    for rate, chunks in zip(rates[1:], (20e3, 50e3, 1e6), strict=True):
        assert 8 * rate / 8 < 0.2 * chunks * 1024  # bytes a second, of eight links
    assert rate_for(DemoOptions(link_rate_bits_per_s=7e6), FAST) == 7e6
    assert rate_for(DemoOptions(switch="bmv2"), FAST) == 0.0


def test_a_faster_machine_replays_more() -> None:
    slow = make_plan(DemoOptions(), None, SLOW, 20.0, 0.0)
    fast = make_plan(DemoOptions(), None, FAST, 20.0, 0.0)
    assert fast.demand.remote_reads * fast.block_bytes > 4 * (
        slow.demand.remote_reads * slow.block_bytes
    )


def test_a_trace_is_cut_to_what_fits_and_the_part_is_named() -> None:
    options = DemoOptions(trace=Path("x/long.jsonl"))
    plan = make_plan(options, _trace(5000, 200.0), SLOW, 20.0, 0.0)
    assert plan.name == "long.jsonl"
    assert len(plan.requests) < 5000
    assert re.search(rf"the first {len(plan.requests)} of the trace's 5000 requests", plan.scaling)
    assert "compressed" in plan.scaling
    assert plan.requests[-1].time_s < 20.0


def test_a_trace_of_long_prompts_is_replayed_in_small_blocks() -> None:
    options = DemoOptions(trace=Path("t.jsonl"))
    sizes = [
        make_plan(options, _trace(5000, 200.0, blocks), FAST, 50.0, 5e6).block_bytes
        for blocks in (1, 10, 300)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] * 2 <= 128 << 10
    assert sizes[1] * 11 <= 128 << 10
    assert sizes[2] == BLOCK_SIZES[0]


def test_a_given_time_scale_is_kept_and_cuts_the_trace_too() -> None:
    options = DemoOptions(trace=Path("t.jsonl"), time_scale=2.0)
    plan = make_plan(options, _trace(100, 1000.0), FAST, 20.0, 0.0)
    assert plan.requests[1].time_s == pytest.approx(0.5)
    assert len(plan.requests) == 35  # 17 seconds of replay, two requests in each
    assert "compressed 2.0 times" in plan.scaling


def test_a_slow_trace_is_told_to_be_stretched_when_it_is() -> None:
    plan = make_plan(DemoOptions(trace=Path("t.jsonl")), _trace(30, 10.0), FAST, 20.0, 0.0)
    assert "stretched" in plan.scaling


def test_percentiles_are_nearest_rank() -> None:
    values = [float(i) for i in range(1, 101)]
    assert summary(values) == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    assert summary([7.0]) == {"p50": 7.0, "p99": 7.0, "max": 7.0}
    assert summary([]) == {"p50": None, "p99": None, "max": None}
    assert ratio(1, 0) is None


def test_the_provenance_says_where_and_of_what(tmp_path: Path) -> None:
    told = provenance.provenance()
    assert told["machine"]["cores"] >= 1
    assert told["commit"]
    assert "numpy" in told["versions"]
    reports.write_json(tmp_path / "deep" / "report.json", told)
    assert json.loads((tmp_path / "deep" / "report.json").read_text())["commit"] == told["commit"]


def _report(
    plain: float | None, kvcast: float | None, *, rate: float = 10e6, busy: float = 0.1
) -> dict[str, Any]:
    def run(ratio: float | None) -> dict[str, Any]:
        tally = Tally(gets=4, fetch_ms=[3.0, 5.0], seconds=2.0, requests=2)
        tally.hits.update({"local": 1, "shared": 2, "home": 1})
        if ratio is not None:
            tally.fetched = {("n", bytes([i])) for i in range(2)}
            tally.egress_bytes = ratio * 2 * 4096
        tally.egress_samples = [(0.5, 100.0), (2.0, tally.egress_bytes)]
        load = dict.fromkeys(("uplink_busiest", "uplink_peak", "processors_busy"), 0.25)
        return tally.report(4096) | {"load": load | {"processors_busy_p95": busy}}

    runs = {"plain": run(plain), "kvcast": run(kvcast)}
    report = {
        "link_rate_bps": rate or None,
        "lone_get": {"bytes": 4096, "ms": 11.0, "link_ms": 10.0} if rate else None,
        "fetch_p99_ms": runs["kvcast"]["fetch_ms"]["p99"],
        "plain_fetch_p99_ms": runs["plain"]["fetch_ms"]["p99"],
        "runs": runs,
        "home_egress_ratio": runs["kvcast"]["home_egress_ratio"],
        "plain_home_egress_ratio": runs["plain"]["home_egress_ratio"],
        "fetch_ms": {name: each["fetch_ms"] for name, each in runs.items()},
        "workload": {"name": "<mix>", "description": "d", "scaling": "s"},
        "parameters": {"nodes": 8},
        "machine": {"cores": 2},
        "commit": "abc",
        "time": "now",
    }
    return report | {"links_were_the_limit": links_were_the_limit(report)}


def test_a_tallys_report_divides_what_homes_sent_by_what_was_fetched() -> None:
    report = _report(4.0, 1.25)["runs"]["kvcast"]
    assert report["distinct_bytes_fetched"] == 8192
    assert report["home_egress_bytes"] == 10240
    assert report["home_egress_ratio"] == 1.25
    assert report["hits"] == {
        "local": 1, "switch": 0, "shared": 2, "home": 1, "bulk": 0, "miss": 0
    }  # fmt: skip
    assert report["fetch_ms"] == {"p50": 3.0, "p99": 5.0, "max": 5.0}


@pytest.mark.parametrize(("plain", "kvcast"), [(4.0, 1.25), (1.0, 1.0), (None, None)])
def test_the_picture_and_the_page_are_whole_files(
    tmp_path: Path, plain: float | None, kvcast: float | None
) -> None:
    png, page = picture.draw(_report(plain, kvcast), tmp_path / "out")
    assert png.read_bytes().startswith(b"\x89PNG\r\n")
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "&lt;mix&gt;" in text
    assert "<mix>" not in text
    assert "data:image/png;base64," in text
    assert "http" not in re.sub(r"base64,[^\"]*", "", text), "the page loads nothing"


def test_the_verdict_says_what_was_gained_or_that_nothing_was() -> None:
    assert "75 % less" in verdict(_report(4.0, 1.0))
    assert "gained nothing" in verdict(_report(1.02, 1.0))
    assert "nothing for a switch to do" in verdict(_report(None, None))


def test_the_times_are_said_to_be_the_links_only_where_the_machine_was_not_the_limit() -> None:
    told = what_times_mean(_report(4.0, 1.0))
    assert "99 of 100 gets took at most 5 ms plainly and 5 ms through kvcast" in told
    assert "times of links of 10 Mb/s, not of this machine: a lone get took 1.10 times" in told
    assert "no more than 10 % busy" in told
    assert "THIS MACHINE WAS TOO SLOW" in what_times_mean(_report(4.0, 1.0, busy=0.9))
    assert "those of this machine" in what_times_mean(_report(4.0, 1.0, rate=0.0))
    nothing = _report(None, None) | {"fetch_p99_ms": None, "plain_fetch_p99_ms": None}
    assert "No get had to wait" in what_times_mean(nothing)
    late = _report(4.0, 1.0)
    late["lone_get"]["ms"] = 20.0
    assert links_were_the_limit(late) is False


@pytest.mark.parametrize(
    ("runner", "told"),
    [
        ("processes", "as processes that UDP tunnels join"),
        ("namespaces", "in network namespaces"),
        ("mininet", "on the hosts of a Mininet network"),
    ],
)
async def test_the_demo_says_the_runner_that_it_uses(
    runner: Runner, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Heard(Reporter):
        text = ""

        def say(self, text: str) -> None:
            self.text += text

    def no_pool(*_: Any, **__: Any) -> None:
        raise PoolError("no pool in this test")

    monkeypatch.setattr(demo, "Pool", no_pool)
    heard = Heard()
    with pytest.raises(PoolError, match="in this test"):
        await demo.run(DemoOptions(runner=runner), heard)
    assert f"8 nodes, a controller and a switch, {told};" in heard.text
