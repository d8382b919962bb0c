"""The benchmark of times to first token: its figures, and one report of several parts.

Oracle: figures worked out by hand from cases that are written here. Cannot see: engines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench.ttft import main
from kvcast.bench.ttft_report import RECOMPUTE, Case, Found, case_name, merged, whole
from kvcast.service.commands import CommandError

FACTS = {
    "link_rate_bits_per_s": 1e7,
    "connector": {},
    "own_tokens": 17,
    "homes": "the writer's node",
    "lone_reads": "tcp",
}


def found_of(**ways: dict[tuple[int, int], list[float]]) -> Found:
    """Seconds by way, prefix and engines."""
    found = Found()
    for name, cases in ways.items():
        found.wrong_outputs[name] = 0
        for (prefix, engines), seconds in cases.items():
            case = found.cases[name, prefix, engines] = Case()
            case.seconds = seconds
            case.cached_shares = [1.0] * len(seconds)
            case.processors_busy, case.link_busy, case.link_bytes = [0.5], [0.9], [1000]
    return found


OURS: dict[tuple[int, int], list[float]] = {(1024, 1): [1.0, 1.2, 1.1], (1024, 4): [1.2] * 4}
PEER: dict[tuple[int, int], list[float]] = {(1024, 1): [1.0], (1024, 4): [4.0] * 4}
STORM = {"storm_over_recompute": 0.8, "storm_wrong_outputs": 1}


def test_the_figures_on_top_are_medians_over_the_best_peers() -> None:
    found = found_of(kvcast=OURS, MooncakeStoreConnector=PEER, LMCacheMPConnector={(1024, 4): [3]})
    report = whole(found, STORM, FACTS)
    assert report["ttft_over_best_peer_n1"] == pytest.approx(1.1)
    assert report["ttft_over_best_peer_n4"] == pytest.approx(0.4)
    assert report["growth_1_to_4"] == pytest.approx(1.2 / 1.1, abs=1e-3)
    assert report["storm_over_recompute"] == 0.8
    assert report["wrong_outputs"] == 1
    assert report["cases"][0]["limit"] == "links"


def test_parts_that_are_merged_say_what_one_run_would_have_said() -> None:
    together = whole(found_of(kvcast=OURS, MooncakeStoreConnector=PEER), STORM, FACTS)
    first = whole(found_of(kvcast=OURS), STORM, FACTS | {"took_s": 5.0})
    first["skipped"] = {"MooncakeStoreConnector": "not asked for", "LMCacheMPConnector": "absent"}
    first["not_reached"] = [case_name("MooncakeStoreConnector", 1024, 4), "another"]
    second = whole(found_of(MooncakeStoreConnector=PEER), {}, FACTS | {"took_s": 6.0})
    for one in (first, second):
        one |= json.loads(json.dumps(one))  # as it comes out of a file
    report = merged([first, second])
    for name in together.keys() - {"provenance"}:
        assert report[name] == together[name], name
    assert report["skipped"] == {"LMCacheMPConnector": "absent"}
    assert report["not_reached"] == ["another"]
    assert report["took_s"] == 11.0


def test_rounds_of_one_case_in_two_parts_add_up_and_so_do_wrong_outputs() -> None:
    one, other = found_of(kvcast={(1024, 1): [1.0]}), found_of(kvcast={(1024, 1): [3.0, 5.0]})
    one.wrong_outputs["kvcast"] = 2
    report = merged([whole(one, {}, FACTS), whole(other, {"mla_wrong_blocks": 3}, FACTS)])
    [case] = report["cases"]
    assert (case["seconds"], case["median_s"]) == ([1.0, 3.0, 5.0], 3.0)
    assert report["wrong_outputs"] == 5


def test_recomputing_is_no_peer() -> None:
    found = found_of(kvcast=OURS)
    found.cases[RECOMPUTE, 1024, 1] = found.cases["kvcast", 1024, 1]
    report = whole(found, {}, FACTS)
    assert report["ttft_over_best_peer_n1"] is None
    assert report["ttft_over_recompute"] == {"1024 tokens, 1 engines": 1.0}


def test_parts_under_other_conditions_are_not_merged() -> None:
    other = whole(found_of(kvcast=OURS), {}, FACTS | {"link_rate_bits_per_s": 5e7})
    with pytest.raises(CommandError, match="link_rate"):
        merged([whole(found_of(kvcast=OURS), {}, FACTS), other])


def test_files_are_merged_by_the_command_and_others_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, found in (("1", found_of(kvcast=OURS)), ("2", found_of(LMCacheMPConnector=PEER))):
        files.append(tmp_path / name)
        files[-1].write_text(json.dumps(whole(found, {}, FACTS)))
    out = tmp_path / "whole"
    assert main(["--merge", *map(str, files), "--json", str(out)]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["ttft_over_best_peer_n4"] == pytest.approx(0.3)
    files[0].write_text("[]")
    assert main(["--merge", *map(str, files)]) != 0
    assert main(["--merge", str(tmp_path / "none")]) != 0
    assert "Traceback" not in capsys.readouterr().err
