"""The benches of the store: no figure is good where nothing was measured; wrong words are refused.

Oracle: reports made by hand, and runs of a second. Cannot see: real pools, and how fast they are.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench import replicas, restart, ssd, tenants


def test_a_tenant_that_nobody_disturbed_is_not_compared() -> None:
    assert tenants.compared([0.2, 0.4], [0.1, 0.2], 1e6) == (2.0, 2.0)
    assert tenants.compared([0.1], [0.1], 0.0) == (None, None), "the other got nothing"
    assert tenants.compared([], [0.1], 1e6) == (None, None)
    assert tenants.compared([0.1], [], 1e6) == (None, None)
    good = {"p99_with_over_without": 1.1, "misses": 0, "wrong_bytes": 0, "tcp": "left out"}
    assert tenants.exit_status(good) == 0
    assert tenants.exit_status(good | {"put_p99_with_over_without": None}) == 1
    assert tenants.exit_status(good | {"tcp_misses": 1}) == 1


def test_replicas_that_never_came_are_no_return_to_one_copy() -> None:
    good = {
        "throughput_after_over_before": 3.0,
        "seconds_to_one_copy": 20.0,
        "wrong_bytes": 0,
        "misses": 0,
    }
    assert replicas.exit_status(good) == 0
    for name, value in (
        ("throughput_after_over_before", None),
        ("seconds_to_one_copy", None),
        ("wrong_bytes", 1),
        ("misses", 1),
    ):
        assert replicas.exit_status(good | {name: value}) == 1


def test_reads_that_were_never_tried_are_not_without_failures() -> None:
    good: dict[str, Any] = dict.fromkeys(restart._NONE_OF_THESE, 0)
    good["restarts"] = [{"wrong_blocks": 0, "missing_blocks": 0}]
    assert restart.exit_status(good) == 0
    for name in restart._NONE_OF_THESE:
        assert restart.exit_status(good | {name: 1}) == 1
        assert restart.exit_status(good | {name: None}) == 1
    assert restart.exit_status(good | {"restarts": [{"wrong_blocks": 0, "missing_blocks": 1}]}) == 1
    assert restart._failed_of({"failed_reads": 0, "gets": 0}) is None
    assert restart._failed_of({"failed_reads": 0, "gets": 9}) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--sizes-gib", "much"],
        ["--sizes-gib", "-1"],
        ["--trials", "0"],
        ["--rounds", "0"],
        ["--block-bytes", "1GiB", "--sizes-gib", "1"],
    ],
)
def test_wrong_words_to_the_bench_of_restarts_are_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["restart", *words])
    with pytest.raises(SystemExit) as ended:
        restart.main()
    assert ended.value.code == 2


@pytest.mark.parametrize("bench", [tenants, replicas])
@pytest.mark.parametrize(
    "words",
    [
        ["--block-bytes", "some"],
        ["--readers", "0"],
        ["--blocks", "3"],
        ["--link-rate", "-1"],
        ["--measure", "0"],
    ],
)
def test_wrong_words_to_the_benches_of_pools_are_refused(
    bench: Any, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--block-bytes", "100000"],
        ["--block-bytes", "0"],
        ["--size-bytes", "1MiB"],
        ["--crashes", "0"],
        ["--seed", "-1"],
    ],
)
def test_wrong_words_to_the_bench_of_disks_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ssd.main(words)
    assert ended.value.code == 2


def test_a_folder_that_is_not_there_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ssd.main(["--folder", str(tmp_path / "nowhere")]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "nowhere") in error
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_blocks_of_any_size_go_to_a_disk_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is no power of two, so that blocks take more room than they have bytes."""
    monkeypatch.setattr(ssd, "ROUNDS", 3)
    rates = {"psync": [9e6, 1e6, 1e6], "libaio": [5e6, 3e6, 4e6], "io_uring": [0.0] * 3}
    rates[ssd.HUGE] = [8e6] * 3
    rates = {engine: 2 * of_it for engine, of_it in rates.items()}  # written, and read
    monkeypatch.setattr(ssd, "_fio", lambda _path, _mode, engine, *_: rates[engine].pop())
    monkeypatch.setattr(ssd, "_version_of_fio", lambda: "fio-3")
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/fio")
    path = tmp_path / "report" / "ssd.json"
    words = ["--folder", str(tmp_path), "--json", str(path), "--crashes", "10", "--seed", "5"]
    assert ssd.main([*words, "--block-bytes", "532KiB", "--size-bytes", "17MiB"]) == 0
    report = json.loads(path.read_text())
    assert report["blocks"] == 17 * 1024 // 532
    assert (report["wrong_bytes"], report["crash_wrong_bytes"]) == (0, 0)
    assert (report["crash_points"], report["seed"]) == (10, 5)
    for kind in ("write", "read"):
        mine = sorted(report[f"ssd_{kind}_rounds_bytes_per_s"])[1]
        assert report[f"ssd_{kind}_over_fio"] == mine / 4e6
        assert report[f"ssd_{kind}_over_fio_huge"] == mine / 8e6


@pytest.mark.slow
def test_a_disk_that_fio_cannot_use_gives_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ssd, "ROUNDS", 1)
    monkeypatch.setattr(ssd, "_fio", lambda *_: 0.0)
    monkeypatch.setattr(ssd, "_version_of_fio", lambda: "fio-3")
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/fio")
    words = ["--folder", str(tmp_path), "--block-bytes", "4KiB", "--size-bytes", "1MiB"]
    assert ssd.main(words) == 1
    assert "fio does not" in capsys.readouterr().err
