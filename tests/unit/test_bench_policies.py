"""The bench of eviction policies: traces, the cache around a policy, Belady, the report.

Oracle: hit rates counted by hand, and libCacheSim where it is installed. Cannot see: whether a
trace is like anybody's load.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvcast.bench import policies as bench
from kvcast.hostagent.tiers import policies
from kvcast.hostagent.tiers.policies.ttl import DEFAULT_TTL_S


def trace_file(path: Path, prompts: list[list[int]], tokens: int = 100) -> str:
    lines = [
        {
            "timestamp": 1000 * at,
            "input_length": tokens * len(ids),
            "output_length": 1,
            "hash_ids": ids,
        }
        for at, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def hits(name: str, prompts: list[list[int]], slots: int, tmp_path: Path) -> str:
    trace = bench.trace_of_file(trace_file(tmp_path / "t.jsonl", prompts))
    if name == bench.BELADY:
        found = bench.hits_of_belady(trace, slots)
    else:
        found = bench.hits_of(name, trace, slots, DEFAULT_TTL_S)
    return "".join("x" if hit else "." for hit in found)


def test_hits_are_those_that_one_counts_by_hand(tmp_path: Path) -> None:
    prompts = [[1], [2], [1], [3], [1], [2], [3]]
    assert hits("lru", prompts, 2, tmp_path) == "..x.x.."
    assert hits("fifo", prompts, 2, tmp_path) == "..x...."
    assert hits("lfu", prompts, 2, tmp_path) == "..x.x.."
    assert hits(bench.BELADY, prompts, 2, tmp_path) == "..x.x.x"


def test_a_prefix_longer_than_the_cache_keeps_its_beginning_under_value(tmp_path: Path) -> None:
    prompts = [[1, 2, 3, 4, 5]] * 3
    assert hits("lru", prompts, 3, tmp_path) == "." * 15
    assert hits("value", prompts, 3, tmp_path) == "....." + "xxx.." * 2


def test_rates_are_by_requests_bytes_whole_prefix_and_cost(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t.jsonl", [[1, 2], [1, 2]])
    Path(path).write_text(Path(path).read_text().replace("200", "110"))
    trace = bench.trace_of_file(path)
    assert [lookup.tokens for lookup in trace.lookups] == [55, 55, 55, 55]
    rates = bench.rates_of(trace, [False, False, False, True])
    assert rates["requests"] == 25.0
    assert rates["bytes"] == 25.0
    assert rates["prefix"] == 0.0


def test_the_last_block_of_a_prompt_has_the_tokens_that_are_left(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "output_length": 1}
    prompts = [
        {"input_length": 512, "hash_ids": [1]},
        {"input_length": 1034, "hash_ids": [1, 2, 3]},
    ]
    path.write_text("".join(json.dumps(line | prompt) + "\n" for prompt in prompts))
    trace = bench.trace_of_file(str(path))
    assert trace.tokens_a_block == 512
    assert [lookup.tokens for lookup in trace.lookups] == [512, 512, 512, 10]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request in it"),
        ('{"timestamp": 1}\n', "line 1"),
        ('{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[]}\n', "hash_ids"),
        ("\x00\x01\n", "line 1"),
    ],
)
def test_a_wrong_trace_is_refused_in_words(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)
    assert bench.main(["--trace", str(path), "--json", "-"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert str(path) in error


def test_a_trace_that_is_not_there_is_an_error_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--trace", str(tmp_path / "none"), "--json", "-"]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'libcachesim'"), "not installed"),
        (ImportError("libglib-2.0.so.0: cannot open"), "Debian: libglib2.0-0"),
    ],
)
def test_a_peer_that_cannot_be_loaded_is_left_out_and_the_report_says_why(
    error: ImportError, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_name: str) -> None:
        raise error

    monkeypatch.setattr(bench, "import_module", fails)
    path = tmp_path / "report.json"
    assert bench.main(["--workload", "chat", "--requests", "20", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["peer"] is None
    assert said in report["peer_missing"]
    assert not any("peer_difference_points" in row for row in report["results"])


@pytest.mark.slow
def test_report_has_every_policy_at_every_size_and_nobody_beats_belady(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    arguments = ["--workload", "mix", "--requests", "300", "--json", str(report_path)]
    assert bench.main(arguments) == 0
    report = json.loads(report_path.read_text())
    wanted = {(name, share) for name in (*policies.BY_NAME, "belady") for share in bench.SHARES}
    rows = {(row["policy"], row["share_of_working_set"]): row for row in report["results"]}
    assert rows.keys() == wanted
    for (_, share), row in rows.items():
        best = rows["belady", share]["hit_rate_requests"]
        assert 0 <= row["hit_rate_requests"] <= best + 1e-9
    assert report_path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif(bench.why_no_peer() is not None, reason=str(bench.why_no_peer()))
def test_policies_that_libcachesim_has_too_hit_as_its_do(tmp_path: Path) -> None:
    for workload in ("mix", "chat"):
        report_path = tmp_path / f"{workload}.json"
        arguments = ["--workload", workload, "--requests", "600", "--json", str(report_path)]
        assert bench.main(arguments) == 0
        report = json.loads(report_path.read_text())
        compared = [row for row in report["results"] if "peer_difference_points" in row]
        assert len(compared) == len(bench.PEERS) * len(bench.SHARES)
        assert report["peer_max_difference_points"] <= 0.1


@pytest.mark.slow
def test_a_cache_that_libcachesim_cannot_make_is_left_out_and_the_report_goes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would end the process."""
    path = tmp_path / "made" / "for" / "it.json"
    words = ["--workload", "chat", "--requests", "20", "--seed", "7", "--percent", "0.01", "50"]
    assert bench.main([*words, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    rows = {(row["policy"], row["blocks"] < 10): row for row in report["results"]}
    assert "peer_hit_rate_requests" not in rows["s3fifo", True]
    if report["peer"]:
        assert "peer_hit_rate_requests" in rows["lru", True]
        assert "peer_hit_rate_requests" in rows["s3fifo", False]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "Hit rates in percent" in capsys.readouterr().out
