"""`python -m kvcast.bench.store` as one starts it: a pool of two agents, beside Redis where that is
installed.

Oracle: what the report must contain, the bytes that the bench compares, and the processes that are
left. Cannot see: whether the times are right; Mooncake and NIXL, unless they are installed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench.store import SIZES, cases
from kvcast.bench.stores.servers import PEERS, RedisStore
from kvcast.topologies.namespaces import NETNS_FOLDER, why_not

pytestmark = pytest.mark.long
_MARK = "KVCAST_TEST_RUN"
_RATIOS = (
    "remote_64k_over_best_peer",
    "remote_2m_over_best_peer",
    "remote_16m_over_best_peer",
    "batch_over_best_peer",
    "put_2m_over_best_peer",
    "put_in_place_2m_over_best_peer",
)


@pytest.fixture
def mark() -> str:
    """Goes into the environment of the bench, and so of all that it starts."""
    return uuid.uuid4().hex


def _bench(mark: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvcast.bench.store", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, _MARK: mark},
    )


def _left_over(mark: str) -> Iterator[str]:
    """The commands of processes that a bench with this mark has started and that still run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                yield (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended, or is not ours to look at


def _figures(report: dict[str, Any], store: str) -> dict[tuple[str, int, int], dict[str, Any]]:
    return {
        (one["operation"], one["size_bytes"], one["clients"]): one
        for one in report["figures"]
        if one["store"] == store
    }


def _check_ours(report: dict[str, Any]) -> None:
    assert report["wrong_bytes"] == report["misses"] == 0
    assert report["local_get_us"] > 0
    assert report["exists_1000_us"] > 0
    ours = _figures(report, "kvcast")
    asked = {(case.operation, case.size_bytes, case.clients) for case in cases(2, quick=True)}
    assert ours.keys() == asked
    assert all(one["count"] >= 1 and one["p50_us"] > 0 for one in ours.values())
    assert all(ours["get", size, 1]["agents_processor_ns_per_byte"] > 0 for size in SIZES)
    assert report["serve_cpu_ns_per_byte"] > 0
    assert report["provenance"]["commit"]
    assert report["provenance"]["machine"]["cores"] >= 1


def test_a_quick_run_beside_redis_has_every_figure_and_no_wrong_byte(
    tmp_path: Path, mark: str
) -> None:
    reason = RedisStore.missing()
    if reason is not None:
        pytest.skip(reason)
    report_path, plot_path = tmp_path / "store.json", tmp_path / "store.png"
    files = ("--json", str(report_path), "--plot", str(plot_path))
    with _bench(mark, "--quick", "--peers", "redis", *files) as bench:
        said, progress = bench.communicate()
    assert bench.returncode == 0, progress
    report = json.loads(report_path.read_text())
    _check_ours(report)
    ours, theirs = _figures(report, "kvcast"), _figures(report, "redis")
    without = {asked for asked in ours if asked[0].startswith(("local", "put in place"))}
    assert theirs.keys() == ours.keys() - without
    assert all(one["wrong_bytes"] == one["misses"] == 0 for one in theirs.values())
    for name in _RATIOS:
        assert report[name] > 0
        assert f"{name} " in said
    ratio = ours["get", 2 << 20, 1]["p50_us"] / theirs["get", 2 << 20, 1]["p50_us"]
    assert report["remote_2m_over_best_peer"] == pytest.approx(ratio, abs=0.001)
    assert set(report["versions_of_peers"]["redis"]) == {"redis", "hiredis", "redis-server"}
    assert plot_path.read_bytes().startswith(b"\x89PNG")
    assert list(_left_over(mark)) == []


def test_without_any_peer_it_says_what_to_install_and_measures_kvcast(
    tmp_path: Path, mark: str
) -> None:
    path = tmp_path / "store.json"
    (tmp_path / "hidden").mkdir()
    hidden = tmp_path / "hidden" / "hidden.py"
    hidden.write_text(
        "import sys; sys.modules.update(dict.fromkeys(['redis', 'mooncake', 'nixl_cu12']))\n"
        "from kvcast.bench.store import main; raise SystemExit(main(sys.argv[1:]))\n"
    )
    nice = shutil.which("nice")  # all that a pool itself needs of the PATH
    assert nice is not None
    (hidden.parent / "nice").symlink_to(nice)
    environment = {**os.environ, _MARK: mark, "PATH": str(hidden.parent)}
    command = [sys.executable, str(hidden), "--quick", "--json", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(path.read_text())
    _check_ours(report)
    assert all(report[name] is None for name in _RATIOS)
    for peer, hint in (
        ("redis", "apt install redis-server"),
        ("mooncake", "pip install 'kvcast[peers]'"),
        ("nixl", "pip install 'kvcast[peers]'"),
    ):
        assert hint in report["skipped"][peer]
        assert f"skipped: {peer}: {report['skipped'][peer]}" in ran.stdout
    assert list(_left_over(mark)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_reports_what_it_has_and_leaves_no_process(
    tmp_path: Path, mark: str, number: signal.Signals
) -> None:
    path = tmp_path / "store.json"
    peers = [peer.NAME for peer in PEERS if peer.missing() is None]
    with _bench(mark, "--quick", "--rounds", "50", "--peers", *peers, "--json", str(path)) as bench:
        assert bench.stderr is not None
        for line in bench.stderr:
            if line.startswith("put 64 KiB:"):
                break
        assert len(list(_left_over(mark))) > 6  # the bench, switch, controller, agents, clients
        bench.send_signal(number)
        rest: list[str] = []
        reader = threading.Thread(target=lambda: rest.extend(bench.stderr or ()))
        reader.start()
        assert bench.wait(60) == 130
        reader.join()
    assert list(_left_over(mark)) == []
    assert "Traceback" not in "".join(rest)
    report = json.loads(path.read_text())
    assert report["incomplete"] == "interrupted"
    assert ("put", 64 << 10, 1) in _figures(report, "kvcast")
    assert list(_left_over(mark)) == []


def test_a_killed_run_leaves_no_process(mark: str) -> None:
    with _bench(mark, "--quick", "--peers") as bench:
        assert bench.stderr is not None
        for line in bench.stderr:
            if line.startswith("put 64 KiB:"):
                break
        bench.kill()
        bench.wait()
    for _ in range(200):
        if not (left := list(_left_over(mark))):
            break
        threading.Event().wait(0.05)
    assert left == []


@pytest.mark.root
def test_two_namespaces_stand_in_for_loopback_and_are_gone_afterwards(
    tmp_path: Path, mark: str
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    path = tmp_path / "store.json"
    peers = ["redis"] if RedisStore.missing() is None else []
    words = ("--quick", "--namespaces", "--peers", *peers, "--json", str(path))
    with _bench(mark, *words) as bench:
        _, progress = bench.communicate()
    assert bench.returncode == 0, progress
    report = json.loads(path.read_text())
    _check_ours(report)
    assert report["link"] == "veth pair"
    assert {one["store"] for one in report["figures"]} == {"kvcast", *peers}
    assert list(NETNS_FOLDER.glob(f"kvc{bench.pid}x*")) == []
    assert list(_left_over(mark)) == []
