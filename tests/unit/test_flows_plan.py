"""What `kvcast plan` recommends, what the controller says of its own pool, and the document."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvcast.bench import evaluate, evaluate_document
from kvcast.bench.replay import NodeLink, ReplayOptions, Tally
from kvcast.cli import plan as plan_command
from kvcast.controller.core.worth import ENOUGH_READS, judge
from kvcast.simulation.flows import questions
from kvcast.simulation.flows.demand import as_begun, demand_of
from kvcast.simulation.flows.engine import simulate
from kvcast.simulation.flows.networks import star
from kvcast.simulation.flows.plan import plan, recommend
from kvcast.simulation.flows.scenarios import (
    WORKLOADS,
    Scenario,
    ScenarioError,
    requests_of,
    serve_all,
)
from kvcast.topologies.pool import PoolOptions
from kvcast.topologies.star import Star
from kvcast.workloads.traces import TraceLine


def ranges(**changed: Any) -> dict[str, Any]:
    return {
        "times_as_fast": (1.0, 1.01),
        "home_egress": (0.99, 1.0),
        "reads_from_switch_memory": 0.0,
        "times_as_fast_with_replicas": (1.0, 1.0),
    } | changed


def test_what_brings_nothing_is_left_off() -> None:
    assert recommend(ranges(), "chat")[0] == ["off"]


def test_readers_known_beforehand_get_groups_and_others_coalescing() -> None:
    joined = ranges(times_as_fast=(1.3, 2.0), home_egress=(0.3, 0.4))
    assert recommend(joined, "tp-mla")[0] == ["reader groups"]
    assert recommend(joined, "storm")[0] == ["coalescing only"]
    assert recommend(joined, "tp-mla", generated=False)[0] == ["coalescing only"]


def test_homes_that_send_less_are_reason_enough_if_nobody_waits_longer() -> None:
    spared = ranges(times_as_fast=(0.99, 1.2), home_egress=(0.3, 0.5))
    assert recommend(spared, "storm")[0] == ["coalescing only"]
    slower = ranges(times_as_fast=(0.9, 1.2), home_egress=(0.3, 0.5))
    assert recommend(slower, "storm")[0] == ["off"]


def test_memory_and_replicas_are_recommended_where_they_bring_more() -> None:
    assert recommend(ranges(reads_from_switch_memory=0.2), "chat")[0] == ["residency"]
    both = ranges(times_as_fast=(1.2, 1.3), reads_from_switch_memory=0.2)
    assert recommend(both, "storm")[0] == ["coalescing and residency"]
    better = ranges(times_as_fast=(1.2, 1.3), times_as_fast_with_replicas=(2.0, 3.0))
    assert recommend(better, "storm")[0] == ["replicas", "coalescing only"]


def test_a_plan_has_ranges_and_is_the_same_again() -> None:
    scenario = Scenario(workload="prefill-decode", hosts=8, reads=60, prefix_blocks=2)
    report = plan(scenario, seeds=2)
    assert report == plan(scenario, seeds=2)
    low, high = report["times_as_fast"]
    assert 0 < low <= high
    assert report["recommendation"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hosts": 1}, "two hosts"),
        ({"load": 1.5}, "between 0 and 1"),
        ({"topology": "ring"}, "no topology"),
        ({"model": "GPT-9"}, "no model"),
        ({"link_gbps": 0.0}, "positive rate"),
    ],
)
def test_what_cannot_be_planned_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        Scenario(**wrong)


def test_the_command_prints_a_plan_and_judges_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--hosts", "8", "--workload", "chat", "--reads", "40", "--prefix-blocks", "2"]
    assert plan_command.main(words) == 0
    said = capsys.readouterr().out
    assert "recommendation: " in said
    assert "assumed: 8 hosts (star) with links of 100 Gb/s; chat" in said
    assert "not settled" not in said
    status = tmp_path / "status.json"
    counters = {"hits_shared_total": 900.0, "hits_home_total": 600.0}
    status.write_text(json.dumps({"agents": {"node-1": counters}, "groups": []}))
    assert plan_command.main(["--status", str(status)]) == 0
    said = capsys.readouterr().out
    assert "advice: coalescing" in said
    assert "leave joining on" in said
    status.write_text("[]")
    assert plan_command.main(["--status", str(status)]) == 1
    status.write_text("{")
    assert plan_command.main(["--status", str(status)]) == 1
    assert plan_command.main(["--hosts", "1"]) == 1


def test_the_controller_judges_by_what_was_shared_and_spared() -> None:
    few = judge({"hits_shared_total": ENOUGH_READS - 1.0})
    assert few["advice"] == "wait"
    assert few["to_do"] == "let it run, and ask again"
    shared = {
        "hits_shared_total": 700.0,
        "hits_home_total": 300.0,
        "payload_bytes_received_udp_total": 1000.0,
        "payload_bytes_sent_udp_total": 400.0,
    }
    judged = judge(shared)
    assert judged["advice"] == "coalescing"
    assert judged["spared_bytes"] == 600
    assert judge(shared, groups=1)["advice"] == "reader groups"
    assert judge({"hits_home_total": 5000.0})["advice"] == "off"
    assert judge({"hits_switch_total": 500.0, "hits_home_total": 5000.0})["advice"] == "residency"
    assert judge({})["home_egress_over_received"] is None


def test_every_way_serves_every_workload() -> None:
    for workload in WORKLOADS:
        scenario = Scenario(workload=workload, hosts=8, reads=40, prefix_blocks=2)
        ways, demand = serve_all(scenario, requests_of(scenario))
        assert {"plain pool", "kvcast", "hot replicas", "recomputation"} <= set(ways)
        assert ways["kvcast"].home_bytes <= ways["plain pool"].home_bytes
        assert ways["peers' chain"].home_bytes == demand.distinct_bytes


RATIOS = (
    "value_over_optimum",
    "value_over_best_online",
    "value_over_optimum_after_fill",
    "value_over_reachable_optimum",
    "best_online_over_optimum",
    "value_over_best_as_a_switch_fills",
    "value_over_best_told_as_late",
)


def test_the_headline_is_the_worst_case() -> None:
    report = {
        "calibration": [
            {"egress_error": 0.01, "fetch_error": -0.04},
            {"egress_error": 0.02, "fetch_error": 0.0},
        ],
        "pool": [{"egress_error": -0.07, "fetch_error": 0.01}],
        "memory": [
            dict.fromkeys(RATIOS, 0.5) | {"hit_share": {"reachable optimum": 0.02}},
            dict.fromkeys(RATIOS, 1.0)
            | {"value_over_best_online": 0.4, "hit_share": {"reachable optimum": 0.9}},
            dict.fromkeys(RATIOS, 1.0)
            | {"value_over_reachable_optimum": 0.1, "value_over_best_told_as_late": 0.0}
            | {"hit_share": {"reachable optimum": 0.019}},
        ],
    }
    top = evaluate.headline(report)
    assert top["calibration_error_max"] == 0.07
    assert top["calibration_error_max_virtual"] == 0.04
    assert top["value_over_optimum_min"] == 0.5
    assert top["value_over_optimum_after_fill_min"] == 0.5
    assert top["value_over_best_online_min"] == 0.4
    assert top["value_over_reachable_optimum_min"] == 0.1
    assert top["value_over_reachable_min"] == 0.5, "of next to nothing, all or none is no ratio"
    assert top["value_over_best_told_as_late_min"] == 0.5


def memory_row(stream: str, value: int, before_the_fill: int, **ratios: Any) -> dict[str, Any]:
    parts = dict.fromkeys(("the control loop", "another rule", "the future"), 0)
    return {
        "stream": stream,
        "slots": 128,
        "reads": 100,
        "segments": 100,
        "optimum_is_exact": True,
        "hit_share": {
            "value": value / 100,
            "reachable optimum": value / 100,
            "optimum": (value + before_the_fill) / 100,
        },
        "optimum_segments": {"value": value, **parts, "before the fill": before_the_fill},
        **dict.fromkeys(RATIOS, None),
        **ratios,
    }


def test_the_document_says_what_becomes_of_the_optimums_hits(tmp_path: Path) -> None:
    rows = [memory_row("chat", 30, 10, value_over_optimum=0.75), memory_row("storm", 0, 0)]
    rows.append(memory_row("a bound", 0, 90) | {"optimum_is_exact": False})
    assert evaluate.headline({"memory": rows})["value_over_optimum_min"] == 0.75
    assert evaluate.headline({"memory": rows})["value_over_best_online_min"] is None
    evaluate_document.write({"memory": rows, "took_s": {}, "traces": []}, tmp_path)
    text = (tmp_path / "evaluation.md").read_text()
    assert "`chat` 30.0% of 40.0%" in text
    assert "- 75%: the controller's policy answers it, too;" in text
    assert "- 25%: reads that come before" in text
    assert "So one that knew the future would reach 0.00 to 0.75 of the optimum." in text
    assert "In `storm` no block is read again" in text
    assert "which was not installed" in text
    assert (tmp_path / "evaluation-memory.png").stat().st_size > 1000
    evaluate_document.write({"memory": rows[1:2], "took_s": {}, "traces": []}, tmp_path)
    text = (tmp_path / "evaluation.md").read_text()
    assert "no block is read again" in text
    assert "knew the future" not in text


def test_the_document_says_first_where_something_else_is_faster(tmp_path: Path) -> None:
    def way(name: str, mean: float) -> dict[str, Any]:
        return {
            "workload": "storm",
            "way": name,
            "note": "",
            "time_compression": 1.0,
            "unsettled": 0.0,
            "mean_ms": mean,
            "p50_ms": mean,
            "p99_ms": mean,
            "home_egress_ratio": 1.0,
            "peer_egress_ratio": 0.0,
        }

    storm = [way("plain pool", 4.0), way("kvcast", 2.0), way("hot replicas", 1.0)]
    means = {"plain pool": 9.0, "kvcast": 3.0, "hot replicas": 9.0}
    mine = [way(name, mean) | {"workload": "mine"} for name, mean in means.items()]
    report = {
        "alternatives": [*storm, *mine],
        "took_s": {},
        "traces": [],
    }
    evaluate_document.write(report, tmp_path)
    text = (tmp_path / "evaluation.md").read_text()
    assert "in `storm` hot replicas, 2.00 times as fast" in text
    assert text.index("something else is faster") < text.index("For whom it pays")
    assert "- `storm` (2.00 times; homes send 1.00 of the bytes): cold nodes" in text
    assert text.index("- `mine` (3.00 times;") < text.index("- `storm` (2.00 times;")
    assert text.index("For whom it does not") < text.index("- nobody")
    assert (tmp_path / "evaluation-alternatives.png").stat().st_size > 1000


def test_an_hour_of_many_hosts_is_simulated_in_slices() -> None:
    report = questions.scale(
        questions.chat_lines(300.0), hosts=512, seconds=40.0, slice_s=20.0, budget_s=60.0
    )
    assert report["hosts"] == 512
    assert report["simulated_s"] == 40.0
    assert report["reads"] > 1000
    assert report["unsettled"] < 0.01


@pytest.mark.slow
def test_a_slice_of_a_dense_trace_is_short() -> None:
    lines = [TraceLine(60.0 * n, 512, 1, [0, *range(1, 9)]) for n in range(1000)]
    report = questions.scale(lines, hosts=20480, seconds=0.01, nodes_of_trace=8)
    assert 200_000 < report["reads"] < 1_500_000
    assert report["simulated_s"] < 10, "more reads than a run takes"


def test_ten_thousand_hosts_play_the_densest_trace_in_which_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trace(count: int, apart_ms: float, distinct: int) -> list[TraceLine]:
        return [TraceLine(n * apart_ms, 512, 1, [n % distinct]) for n in range(count)]

    traces = {
        "nothing read twice": trace(10_000, 1.0, 10_000),
        "one moment": trace(60, 0.0, 1),
        "sparse": trace(600, 1000.0, 1),
        "dense": trace(6000, 100.0, 1),
    }
    played: list[object] = []
    monkeypatch.setattr(questions, "scale", lambda lines: played.append(lines) or {})
    for names in (list(traces), list(traces)[:-1]):
        evaluate.evaluate({name: traces[name] for name in names}, parts=["scale"])
    assert played[0] is traces["dense"]
    assert played[1] not in traces.values(), "chats, which are denser than what is left"


def test_an_hour_that_was_not_simulated_whole_says_so() -> None:
    lines = questions.chat_lines(60.0)
    report = questions.scale(lines, hosts=64, seconds=40.0, slice_s=20.0, budget_s=1e-9)
    assert (report["simulated_s"], report["extrapolated"]) == (20.0, True)
    top = evaluate.headline({"scale": report})
    assert top["seconds_simulated_of_the_hour_10k"] == 20.0
    whole = questions.scale(lines, hosts=64, seconds=3600.0, slice_s=1800.0, budget_s=60.0)
    assert (whole["simulated_s"], whole["extrapolated"]) == (3600.0, False)


@pytest.mark.parametrize(("simulated_s", "said"), [(40.0, True), (3600.0, False)])
def test_an_hour_that_was_not_simulated_whole_is_said_to_be_extrapolated(
    monkeypatch: pytest.MonkeyPatch, simulated_s: float, said: bool
) -> None:
    scale = {
        "hosts": 8,
        "seconds_per_hour": 9.0,
        "simulated_s": simulated_s,
        "extrapolated": simulated_s < 3600,
    }
    monkeypatch.setattr(questions, "scale", lambda _lines: scale)
    told: list[str] = []
    report = evaluate.evaluate({}, parts=["scale"], say=told.append)
    assert any("after 40 s of the hour" in text for text in told) is said
    assert report["seconds_simulated_of_the_hour_10k"] == simulated_s


def test_each_stream_has_the_namespaces_that_are_its_own() -> None:
    def row(namespace: int, thing: str, on: bool) -> dict[str, Any]:
        return {"namespace": namespace, "thing": thing, "on": on}

    first = [row(1, "gather", False), row(2, "gather", True)]
    second = [*first, row(3, "gather", True), row(3, "reside", False)]
    assert evaluate.turned_in(first, set()) == {"gather off": 1, "gather on": 1}
    assert evaluate.turned_in(second, {1, 2}) == {"gather on": 1, "reside off": 1}


def test_bystanders_write_what_is_read_and_ask_no_faster_than_a_small_machine_serves() -> None:
    streams = questions.bystanders({"mine": questions.chat_lines(600.0, seed=3)})
    assert set(streams) == {"chat", "mine"}
    for requests, block_bytes in streams.values():
        demand = demand_of(requests, questions.CALIBRATION_NODES, block_bytes)
        assert len(demand.read_block) > 100
        names = [(r.namespace, key) for r in requests for key in r.keys]
        assert all(names.count(name) > 1 for name in set(names[:50]))
        seconds = requests[-1].time_s
        assert len(requests) / seconds <= questions.BYSTANDER_REQUESTS_PER_S * 1.01
        full = demand.read_bytes.sum() * 8 / questions.BYSTANDER_BITS_PER_S / demand.nodes
        assert full / seconds < 0.31
        numbers = {r.number for r in requests}
        assert all(r.after is None or r.after in numbers for r in requests)


def test_what_a_stream_pays_for_kvcast_stands_at_the_top() -> None:
    row = {"stream": "chat", "p50_over_plain": 1.01, "p99_over_plain": 0.99}
    row |= {"alone": {"gets": 7, "p50_over_plain": 1.02}}
    top = evaluate.headline({"adaptive": [row, row | {"stream": "mine"}]})
    assert top["chat_p50_over_plain"] == top["mine_p50_over_plain"] == 1.01
    assert top["chat_p99_over_plain"] == top["mine_p99_over_plain"] == 0.99
    assert top["chat_alone_p50_over_plain"] == top["mine_alone_p50_over_plain"] == 1.02


def test_what_is_compared_are_gets_that_both_pools_had_and_their_range_shrinks_with_gets() -> None:
    rng = np.random.default_rng(7)

    def gets(count: int, times: float) -> dict[tuple[int, int, int], float]:
        usual = np.random.default_rng(count).lognormal(4, 1, count)
        return {(0, n, 0): times * ms * rng.uniform(0.8, 1.2) for n, ms in enumerate(usual)}

    rows = {}
    for count in (100, 2000):
        ours = gets(count, 1.1) | {(1, 0, 0): 1e9}
        plain = gets(count, 1.0) | {(2, 0, 0): 1e-9}
        row = rows[count] = evaluate.compared(ours, plain)
        assert row["gets"] == count
        for figure in ("p50", "p99", "each"):
            low, high = (row[f"{figure}_over_plain_{end}"] for end in ("low", "high"))
            assert low <= row[f"{figure}_over_plain"] <= high
            assert low < 1.1 < high
    wide, narrow = (
        {f: row[f"{f}_over_plain_high"] - row[f"{f}_over_plain_low"] for f in ("p50", "each")}
        for row in rows.values()
    )
    assert narrow["each"] < wide["each"] / 2
    assert narrow["each"] < narrow["p50"], "what each get took tells more than percentiles do"
    assert rows[2000]["each_over_plain_low"] > 1.05


def test_two_pools_play_all_of_a_stream_in_turns_and_each_piece_from_its_start() -> None:
    stream = questions.bystanders({})["chat"][0]
    pieces = [evaluate._piece(stream, number) for number in range(evaluate._PIECES)]
    assert [request.number for piece in pieces for request in piece] == [r.number for r in stream]
    assert all(piece[0].time_s == 0.0 for piece in pieces)
    gaps = [b.time_s - a.time_s for piece in pieces for a, b in itertools.pairwise(piece)]
    assert min(gaps) >= 0
    assert sum(gaps) <= stream[-1].time_s


@pytest.mark.parametrize("twice", [False, True])
async def test_chance_is_measured_by_two_plain_pools(
    monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    plain: list[bool] = []

    @contextlib.asynccontextmanager
    async def pool(star: Star, options: PoolOptions) -> AsyncIterator[Any]:
        plain.append(options.plain)
        yield SimpleNamespace(sockets={host.node_id: Path("none") for host in star.hosts})

    monkeypatch.setattr(evaluate, "Pool", pool)
    monkeypatch.setattr("kvcast.simulation.flows.questions.bystanders", lambda _traces: {})
    assert await evaluate.beside_plain({}, plain_twice=twice) == []
    assert plain == [True, twice]


@pytest.mark.parametrize("fetches", ["always", "among others", "never"])
@pytest.mark.parametrize("skips", [False, True])
async def test_a_stream_is_played_at_its_own_times_and_then_one_request_after_the_other(
    monkeypatch: pytest.MonkeyPatch, fetches: str, skips: bool
) -> None:
    """kvcast takes a tenth longer at the stream's own times, and a fifth where nobody else asks.
    `fetches`: when anybody has something to fetch; `skips`: whether time is short at the stream's
    own times, too."""
    stream = questions.bystanders({})["chat"]
    keys = {key for request in stream[0] for key in request.keys}
    played: list[tuple[bool, ReplayOptions]] = []
    judged: list[dict[str, Any]] = []

    class Pool:
        def __init__(self, star: Star, options: PoolOptions) -> None:
            name = Path("plain" if options.plain else "kvcast")
            self.sockets = {host.node_id: name for host in star.hosts}

        async def __aenter__(self) -> Pool:
            return self

        async def __aexit__(self, *_error: object) -> None:
            return

        async def http(self, *_request: str) -> dict[str, Any]:
            judged.append({"namespace": len(judged), "thing": "gather", "on": False})
            return {"adaptive": judged}

    class Replay:
        def __init__(
            self, requests: list[Any], links: list[NodeLink], _nodes: object, options: ReplayOptions
        ) -> None:
            plain = links[0]._path == Path("plain")
            played.append((plain, options))
            alone = options.in_flight == 1
            assert alone == all(request.time_s == 0.0 for request in requests)
            assert alone == keys.isdisjoint(key for request in requests for key in request.keys)
            assert (options.budget_s == evaluate._ALONE_S) == alone
            times = 1.0 if plain else 1.2 if alone else 1.1
            self.tally = Tally(skipped_requests=int(alone or skips))
            fetch = fetches == "always" or (fetches == "among others" and not alone)
            for request in requests if fetch else ():
                self.tally.fetches.append((request.number, 0, 0.0))
                self.tally.fetch_ms.append(times * (10 + request.number % 7))

        async def run(self) -> Tally:
            return self.tally

    monkeypatch.setattr(evaluate, "Pool", Pool)
    monkeypatch.setattr(evaluate, "Replay", Replay)
    monkeypatch.setattr(questions, "bystanders", lambda _traces: {"chat": stream, "more": stream})
    if skips:
        with pytest.raises(RuntimeError, match="chat 0: misses, wrong bytes or skipped requests"):
            await evaluate.beside_plain({})
        return
    rows = await evaluate.beside_plain({})
    assert [row["stream"] for row in rows] == ([] if fetches == "never" else ["chat", "more"])
    assert all(options.gather != plain for plain, options in played)
    top = evaluate.headline({"adaptive": rows})
    for row in rows:
        assert row["gets"] == len(stream[0])
        alone = fetches == "always"
        assert ("alone" in row) == (f"{row['stream']}_alone_p50_over_plain" in top) == alone
        for point in ("p50", "p99", "each"):
            assert row[f"{point}_over_plain"] == 1.1
            assert not alone or row["alone"][f"{point}_over_plain"] == 1.2
        assert row["namespaces"] == {"gather off": 1}, "its own"
    if rows:
        assert [plain for plain, options in played if options.in_flight == 1] == 2 * [True, False]
        tenants = {options.namespace_tag for _, options in played if options.in_flight > 1}
        assert played[-1][1].namespace_tag in tenants, "one that is judged"


def test_two_plain_pools_give_no_document(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate.main(["--plain-twice", "--docs", "nowhere"])
    assert "measures no kvcast" in capsys.readouterr().err


def test_a_trace_whose_prompts_have_nothing_in_common_has_no_bystanders() -> None:
    alone = [TraceLine(float(n * 100), 512, 1, [n]) for n in range(50)]
    assert set(questions.bystanders({"mine": alone})) == {"chat"}


def test_the_document_says_beside_what_it_costs_within_which_range(tmp_path: Path) -> None:
    times = dict.fromkeys(("p50_ms", "plain_p50_ms", "p99_ms", "plain_p99_ms"), 10.0)
    ratios = {"p50_over_plain": 1.02, "p99_over_plain": 0.98, "each_over_plain": 1.01}
    ratios |= {f"{figure}_over_plain_low": 0.9 for figure in ("p50", "p99", "each")}
    ratios |= {f"{figure}_over_plain_high": 1.1 for figure in ("p50", "p99", "each")}
    row = {"stream": "chat", "gets": 200, **times, **ratios}
    row["alone"] = row | {"p99_over_plain": 0.97}
    way = {"workload": "chat", "time_compression": 1.0, "mean_ms": 1.0, "p50_ms": 1.0}
    way |= {"p99_ms": 1.0, "home_egress_ratio": 1.0, "peer_egress_ratio": 0.0, "note": ""}
    ways = [way | {"way": name, "unsettled": 0.0} for name in ("plain pool", "kvcast")]
    report = {"adaptive": [row], "alternatives": ways, "took_s": {}, "traces": []}
    evaluate_document.write(report, tmp_path)
    text = (tmp_path / "evaluation.md").read_text()
    for ranges in (
        "`chat` alone p50 1.020 (0.900 to 1.100), p99 0.970 (0.900 to 1.100); ",
        "among others each get 1.010 (0.900 to 1.100), p50 1.020 (0.900 to 1.100), p99 0.980 (0.9",
    ):
        assert ranges in text
    assert text.count("| chat | 200 | 1.010 (0.900 to 1.100) |") == 2
    assert "no cost can be told from chance" in text
    report["adaptive"] = [row | {"p99_over_plain_low": 1.17, "p50_over_plain_low": 1.07}]
    evaluate_document.write(report, tmp_path)
    assert "no cost can be told from chance" in (tmp_path / "evaluation.md").read_text()
    report["adaptive"] = [row | {"p99_over_plain_low": 1.19}]
    evaluate_document.write(report, tmp_path)
    assert "So it costs `chat` (p99) something." in (tmp_path / "evaluation.md").read_text()
    report["adaptive"] = [row | {"each_over_plain_low": 1.009}]
    evaluate_document.write(report, tmp_path)
    assert "no cost can be told from chance" in (tmp_path / "evaluation.md").read_text()
    report["adaptive"] = [row | {"each_over_plain_low": 1.011}]
    evaluate_document.write(report, tmp_path)
    assert "costs `chat` (each get) something." in (tmp_path / "evaluation.md").read_text()
    report["adaptive"] = [row | {"alone": row["alone"] | {"p99_over_plain_low": 1.011}}]
    evaluate_document.write(report, tmp_path)
    assert "costs `chat` (p99, alone) something." in (tmp_path / "evaluation.md").read_text()
    report["adaptive"] = [row | {"alone": row["alone"] | {"p50_over_plain_low": 1.011}}]
    evaluate_document.write(report, tmp_path)
    assert "costs `chat` (p50, alone) something." in (tmp_path / "evaluation.md").read_text()
    del row["alone"]
    report["adaptive"] = [row]
    evaluate_document.write(report, tmp_path)
    text = (tmp_path / "evaluation.md").read_text()
    assert "- `chat` among others each get 1.010" in text
    assert text.count("| chat | 200 | 1.010 (0.900 to 1.100) |") == 1


def test_a_part_that_fails_is_named_and_the_others_answers_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails() -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(evaluate.questions, "frontier", fails)
    monkeypatch.setattr(evaluate.questions, "sensitivity", list)
    written: list[dict[str, Any]] = []
    report = evaluate.evaluate(
        {}, parts=("frontier", "sensitivity"), so_far=lambda each: written.append(dict(each))
    )
    assert report["failed"] == {"frontier": "RuntimeError: no such thing"}
    assert report["sensitivity"] == []
    assert ["sensitivity" in each for each in written] == [False, True]
    evaluate_document.write(report, tmp_path)
    assert "**frontier failed:**" in (tmp_path / "evaluation.md").read_text(encoding="utf-8")
    file = tmp_path / "report.json"
    assert evaluate.main(["--parts", "frontier", "--json", str(file)]) == 1
    assert json.loads(file.read_text())["failed"]


def test_gets_that_began_late_are_given_to_the_flows_as_they_began() -> None:
    requests = questions.calibration_requests("rollout", 40)
    demand = demand_of(requests, questions.CALIBRATION_NODES, questions.CALIBRATION_BLOCK_BYTES)
    gets = sorted(set(zip(demand.read_request.tolist(), demand.read_node.tolist(), strict=True)))
    begun = {get: 1_000_000 * (len(gets) - place) for place, get in enumerate(gets[1:])}
    late = as_begun(demand, begun)
    assert late.request_at.tolist() == [begun[get] for get in gets[1:]]
    first = (demand.read_request == gets[0][0]) & (demand.read_node == gets[0][1])
    assert late.read_block.tolist() == demand.read_block[~first].tolist()
    outcome = simulate(late, star(questions.CALIBRATION_NODES, 1e9))
    assert outcome.request_start.tolist() == late.request_at.tolist()
