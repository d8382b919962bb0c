"""`python -m kvcast.bench.route`: a simulation, so its figures are the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvcast.bench import route, route_engines
from kvcast.bench.engines.server import Streamed
from kvcast.bench.route_simulation import EngineModel, SimulatedRequest, Simulation
from kvcast.routing.core.costs import CostModel

COSTS = CostModel(
    prefill_s_per_token=1e-3,
    attention_s_per_token2=0.0,
    kv_bytes_per_token=1000,
    pool_bytes_per_s=1e7,
    pool_latency_s=0.0,
)


def request(number: int, at: float, *blocks: int, answer: int = 1) -> SimulatedRequest:
    return SimulatedRequest(number, at, blocks, len(blocks) * 100 + 1, answer, 100)


def played(
    requests: list[SimulatedRequest], engines: int = 1, **model: float
) -> dict[int, tuple[float, int, int]]:
    """First token, tokens held by the engine and tokens from the pool, by request."""
    simulation = Simulation(
        EngineModel(costs=COSTS, **model),  # type: ignore[arg-type]
        route.RoundRobin(engines),
        [1.0] * engines,
    )
    simulation.run(requests)
    return {
        number: (round(outcome.ttft_s, 6), outcome.engine_tokens, outcome.pool_tokens)
        for number, outcome in simulation.outcomes.items()
    }


def test_simulated_engines_compute_in_turn_and_keep_prefixes() -> None:
    found = played([request(0, 0.0, 1, 2), request(1, 0.0, 3), request(2, 5.0, 1, 2, 4)])
    assert found == {0: (0.201, 0, 0), 1: (0.302, 0, 0), 2: (0.101, 200, 0)}


def test_a_simulated_engine_loads_from_the_pool_what_another_has_computed() -> None:
    found = played([request(0, 0.0, 1, 2), request(1, 1.0, 1, 2, 3)], engines=2)
    assert found[1] == (pytest.approx(0.02 + 0.101), 0, 200)
    without = played([request(0, 0.0, 1, 2), request(1, 1.0, 1, 2, 3)], engines=2, pool_tokens=0)
    assert without[1] == (0.301, 0, 0)


def test_a_simulated_engines_memory_is_bounded_and_keeps_what_runs() -> None:
    requests = [request(0, 0.0, 1, 2, answer=1000), request(1, 1.0, 3), request(2, 20.0, 1, 2)]
    roomy = played(requests, pool_tokens=0)
    tight = played(requests, pool_tokens=0, kv_tokens=250)
    assert roomy[1][0] == 0.101
    assert tight[1][0] > 10, "there is no room until the first answer has ended"
    assert roomy[2][1] == 200
    assert tight[2][1] == 0 or tight[2][1] == 100


def test_a_simulated_engine_runs_so_many_at_once_as_it_has_slots() -> None:
    requests = [request(number, 0.0, number, answer=100) for number in range(3)]
    found = played(requests, slots=1)
    assert found[0][0] == 0.101
    assert found[1][0] > 1.6
    assert found[2][0] > 3.2


@pytest.mark.slow
def test_the_report_is_the_same_every_time_and_the_router_beats_the_others(tmp_path: Path) -> None:
    arguments = ["--requests", "600", "--loads", "0.7", "--json"]
    reports = []
    for name in ("a.json", "b.json"):
        assert route.main([*arguments, str(tmp_path / name)]) == 0
        report = json.loads((tmp_path / name).read_text())
        for found in report["loads"][0]["policies"].values():
            found.pop("choosing_p50_us", None)
            found.pop("choosing_p99_us", None)
        reports.append(report)
    assert reports[0] == reports[1]
    report = reports[0]
    assert "simulation" in report["what"]
    assert report["p99_over_round_robin"] < 1
    assert report["p99_over_prefix_hash"] < 1
    policies = report["loads"][0]["policies"]
    assert policies["kvcast"]["hit_rate"] > policies["round_robin"]["hit_rate"]
    assert {found["requests"] for found in policies.values()} == {600}


@pytest.mark.slow
def test_a_deadline_is_kept_by_refusing(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    arguments = ["--requests", "800", "--loads", "1.2", "--deadline-s", "3", "--json", str(path)]
    assert route.main(arguments) == 0
    policies = json.loads(path.read_text())["loads"][0]["policies"]
    refusing, taking = policies["kvcast_refusing"], policies["kvcast"]
    assert refusing["refused"] > 0
    assert refusing["requests"] + refusing["refused"] == 800
    assert refusing["in_time"] > taking["in_time"], "what is hopeless does not delay the others"


def test_a_trace_is_read_and_a_wrong_one_is_told_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": n * 100, "input_length": 1000, "output_length": 3, "hash_ids": [1, n + 2]}
        for n in range(50)
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    assert route.main(["--trace", str(trace), "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["requests"] == 50
    trace.write_text('{"timestamp": 1}\n')
    assert route.main(["--trace", str(trace)]) == 1
    assert "line 1" in capsys.readouterr().err
    trace.write_text(json.dumps(lines[0]))
    assert route.main(["--trace", str(trace)]) == 1
    assert "one time" in capsys.readouterr().err


# --- real engines ---------------------------------------------------------------------------------


def test_prompts_for_real_engines_are_equal_where_the_trace_is(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [(0, [1, 2, 3]), (500, [1, 2, 4, 5]), (900, [1, 2, 3])]
    trace.write_text(
        "".join(
            f'{{"timestamp":{at},"input_length":600,"output_length":3,"hash_ids":{blocks}}}\n'
            for at, blocks in lines
        )
    )
    requests = route_engines.requests_of(str(trace), 3, block_tokens=32, most_tokens=100)
    assert [one.blocks for one in requests] == [(1, 2, 3), (1, 2, 4), (1, 2, 3)]
    first, second, third = (route_engines.prompt_of(one, "a") for one in requests)
    assert len(first) == requests[0].tokens == 96 + route_engines.OWN_TOKENS
    assert first[:64] == second[:64]
    assert first[64:96] != second[64:96]
    assert first[:96] == third[:96]
    assert first != third, "each has some tokens of its own"
    assert route_engines.prompt_of(requests[0], "b")[:32] != first[:32]


def test_the_routers_p99_is_compared_with_the_best_prefix_hash() -> None:
    played = {}
    for name, ttft_s in (
        ("kvcast", 1.0),
        ("round_robin", 2.0),
        ("prefix_hash_64", 5.0),
        ("prefix_hash_256", 4.0),
    ):
        played[name] = route_engines.Played()
        played[name].answers = [Streamed(ttft_s, 100, 25, (1,))] * 3
    report = route_engines.report_of(played)
    assert report["p99_over_round_robin"] == 0.5
    assert report["p99_over_prefix_hash"] == 0.25
    assert report["hit_rate"] == 0.25


def test_the_same_requests_before_simulated_engines_say_how_far_apart_policies_are() -> None:
    requests = [request(n, 0.05 * n, n // 2 % 3, 10 + n) for n in range(30)]
    found = route_engines.simulated_p99_s(requests, COSTS, 2, 10_000, [100])
    assert list(found) == ["kvcast", "round_robin", "prefix_hash_100"]
    assert found["kvcast"] is not None
    assert found["prefix_hash_100"] is not None
    assert 0 < found["kvcast"] < found["prefix_hash_100"], "three prefixes, two engines"
    assert found == route_engines.simulated_p99_s(requests, COSTS, 2, 10_000, [100])
