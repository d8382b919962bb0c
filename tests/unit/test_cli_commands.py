"""The `kvcast` command without a pool: help, errors, exit codes, what is imported when.

Oracle: the texts and codes that the help promises. Cannot see: commands at work on a pool
(tests/integration/test_pool_commands.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from kvcast.cli import drain, fsck, get, load, main, namespaces, shell, status
from kvcast.cli.blocks import key_from
from kvcast.controller.core import node_report
from kvcast.hostagent.core.metrics import FETCH_BOUNDS_S, Histogram
from kvcast.service import commands
from kvcast.service.commands import CommandError, run_command


def _run(
    *words: str, env: dict[str, str] | None = None, interpreter: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *interpreter, "-m", "kvcast.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=None if env is None else os.environ | env,
    )


def test_help_teaches_every_command_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in main.COMMANDS:
        assert f"\n  {name} " in text
    assert "examples:" in text
    assert "kvcast bench incast --readers 8" in text


HEAVY = {
    "aiohttp",
    "cryptography",
    "finsy",
    "grpc",
    "llvmlite",
    "matplotlib",
    "networkx",
    "numpy",
    "prometheus_client",
    "rich",
    "scapy",
}
NEEDED = {
    "controller": {"aiohttp", "cryptography", "finsy", "grpc", "numpy", "prometheus_client"},
    "demo": {"numpy"},
    "plan": {"numpy"},
    "switch": {"finsy", "grpc", "llvmlite"},
}
"""Of them, what a command may import to say what it does: what it cannot start without."""


def _imported(ran: subprocess.CompletedProcess[str]) -> set[str]:
    """The packages that `python -X importtime` lists."""
    lines = [line for line in ran.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
@pytest.mark.slow
def test_every_command_explains_itself_and_imports_only_what_it_needs(name: str) -> None:
    ran = _run(*name.split(), "--help", interpreter=("-X", "importtime"))
    assert ran.returncode == 0
    assert ran.stdout.startswith(f"usage: kvcast {name}")
    assert len(ran.stdout.splitlines()) > 8
    assert "kvcast" in _imported(ran)
    assert _imported(ran) & HEAVY <= NEEDED.get(name, set())


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["fly"]])
def test_the_command_imports_nothing_heavy_before_it_knows_what_to_do(words: list[str]) -> None:
    ran = _run(*words, interpreter=("-X", "importtime"))
    assert "kvcast" in _imported(ran)
    assert not _imported(ran) & (HEAVY | {"msgspec", "xxhash"})


def test_what_is_said_of_a_namespace_is_shown_to_the_last_digit() -> None:
    settings = {"weight": 1.0, "bytes_per_s": 1048577.0, "ttl_s": 0.5, "media": [], "policy": ""}
    names = {"tenant": "t", "model": "m", "version": "1", "layout": "l"}
    line = namespaces._line({"namespace": 7, **names, "settings": settings})
    assert line == "    7  t m 1 l  bytes_per_s=1048577 ttl_s=0.5"


def test_what_is_no_name_and_was_made_one_before_is_shown_in_one_line() -> None:
    names = {"tenant": "", "model": "a\nb", "version": "1", "layout": "64 KiB"}
    line = namespaces._line({"namespace": 7, **names, "settings": {}})
    assert line == "    7  '' 'a\\nb' 1 64 KiB"


@pytest.mark.parametrize(
    "words",
    [
        ["namespace", "make", "", "m", "1", "l"],
        ["namespace", "make", "t", "m", "1", "a\nb"],
        ["put", "--socket", "/no/such.sock", "--tenant", "a\tb", "-"],
        ["load", "--socket", "/no/such.sock", "--model", "/tmp", "--model-version", ""],
    ],
)
def test_what_is_no_name_is_wrong_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main(words)
    assert "is no name: 1 to 256 printable characters" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["make", "set", "delete"])
def test_what_a_namespace_command_wants_is_explained(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main(["namespace", command, "--help"])
    text = capsys.readouterr().out
    wanted = ("TENANT", "MODEL", "VERSION", "LAYOUT") if command == "make" else ("NUMBER",)
    for name in wanted:
        assert any(line.startswith(f"  {name}  ") for line in text.splitlines()), name


def test_the_benches_and_workloads_are_explained() -> None:
    assert "home_egress_ratio" in _run("bench", "incast", "--help").stdout
    text = " ".join(_run("demo", "--help").stdout.split())
    for name in ("tp-mla", "rollout", "fan-out", "storm", "chat", "mix"):
        assert f" {name} " in text


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvcast ")


def test_no_command_and_an_unknown_one_are_usage_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main([]) == 2
    assert main.main(["fly"]) == 2
    assert "no command 'fly'; there are demo, bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["status", "--http", "127.0.0.1:9"], "no controller answers"),
        (["put", "--socket", "/no/such.sock", "/no/such/file"], "No such file"),
        (["get", "--socket", "/no/such.sock", "00" * 16], "/no/such.sock"),
        (["demo", "--trace", "/no/trace.jsonl", "--out", "/tmp"], "/no/trace.jsonl: No such file"),
        (["bench", "incast", "--readers", "40"], "1 to 31"),
        (["bench", "incast", "--switch", "bmv2"], "namespaces or mininet"),
    ],
)
def test_a_failure_is_one_line_and_status_1(words: list[str], complaint: str) -> None:
    ran = _run(*words)
    assert ran.returncode == 1
    assert complaint in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["get", "xyz"],
        ["get", "00" * 16],
        ["demo", "--nodes", "33"],
        ["demo", "--workload", "nap"],
        ["demo", "--time-scale", "2"],
        ["demo", "--seconds-budget", "1"],
        ["bench"],
        ["bench", "incast", "--block-size", "huge"],
        ["status", "--interval", "0"],
        ["certs", "renew", "certs", "--within", "1000000"],
        ["status", "--tls", "certs/operator"],
        ["namespace", "list", "--tls", "certs/operator"],
        ["agent", "drain", "node-1", "--tls", "certs/operator", "--http", "10.0.0.1:9601"],
    ],
)
def test_wrong_usage_is_status_2(words: list[str]) -> None:
    ran = _run(*words, env={"KVCAST_SOCKET": ""} if words[0] == "get" else None)
    assert ran.returncode == 2
    assert "usage:" in ran.stderr


@pytest.mark.parametrize(
    ("placed", "left", "failed", "no_room", "said"),
    [
        (True, 4, 0, 0, "node-1: 8 of 12 blocks are handed over"),
        (True, 4, 1, 3, "node-1: 8 of 12 blocks are handed over, 1 could not be, 3 wait for room"),
        (False, 0, 0, 0, "node-1 is drained: it may be stopped"),
        (False, 0, 2, 0, "node-1 is drained, but 2 blocks could not be handed over"),
    ],
)
def test_draining_says_what_waits_and_fails_where_something_is_left(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    placed: bool,
    left: int,
    failed: int,
    no_room: int,
    said: str,
) -> None:
    counts = {"left": left, "total": 12, "failed": failed, "no_room": no_room}
    other = {"left": 0, "total": 0, "failed": 0, "no_room": 0}
    node = {"node_id": "node-1", "draining": True, "alive": True, "placed": placed}
    room = {"arena_bytes": 9, "arena_used_bytes": 0, "epoch": 1}
    peer = {"node_id": "node-2", "draining": False, "alive": True, "placed": True}
    nodes = [node | {"handover": counts} | room, peer | {"handover": other} | room]

    async def ask(_method: str, _path: str, _body: object = None) -> dict[str, object]:
        return {"nodes": nodes, "agents": {}, "epoch": 1}

    monkeypatch.setattr(drain, "controller_api", lambda _options: ask)
    ended = drain.main(["node-1", "--timeout", "0.01"])
    assert ended == (1 if placed or failed else 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == said
    if not placed:
        assert lines[1:] == ["the other nodes evicted nothing from DRAM meanwhile"]


def test_a_drain_warns_where_the_others_lack_room_and_says_what_they_evicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last report comes after the node is drained, and one node evicts nothing."""
    told = itertools.chain([(10, 5), (11, 5), (11, 5)], itertools.repeat((12, 6)))
    asked: list[str] = []

    async def ask(method: str, _path: str, _body: object = None) -> dict[str, Any]:
        if method == "POST":
            asked.append(method)
            return {}
        (evictions, epoch), mib = next(told), 1 << 20
        handed = {"left": 0, "total": 9, "failed": 0, "no_room": 0}
        common = {"alive": True, "handover": handed, "arena_bytes": 4 * mib}
        return {
            "epoch": 5 if not asked else 6,
            "nodes": [
                common
                | {"node_id": f"node-{n}", "draining": bool(asked) and n == 1, "epoch": epoch}
                | {"placed": not asked or n != 1, "arena_used_bytes": used * mib}
                for n, used in ((1, 3), (2, 3), (3, 4))
            ],
            "agents": {
                "node-1": {"store_evictions_total": 99, "store_evicted_bytes_total": 99},
                "node-2": {
                    "store_evictions_total": evictions,
                    "store_evicted_bytes_total": evictions * mib,
                },
                "node-3": {"store_evictions_total": 7, "store_evicted_bytes_total": 7},
            },
        }

    monkeypatch.setattr(drain, "controller_api", lambda _options: ask)
    monkeypatch.setattr(drain, "_POLL_S", 0.01)
    assert drain.main(["node-1"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "node-1 holds 3.0 MiB in DRAM, the others have 1.0 MiB free: they evict for what they lack",
        "node-1 is drained: it may be stopped",
        "the other nodes evicted 2 blocks (2.0 MiB) from DRAM meanwhile,"
        " for what was handed over or put",
    ]


def test_a_drain_that_hears_too_little_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evictions = drain._Evictions("node-1")
    for count in (3, 5):
        counted = {"store_evictions_total": count, "store_evicted_bytes_total": count << 20}
        evictions.heard({"agents": {"node-1": counted, "node-2": counted, "node-3": {}}})

    async def ask(_method: str, _path: str, _body: object = None) -> dict[str, Any]:
        late = {"node_id": "node-3", "alive": True, "epoch": 1}
        return {"epoch": 2, "nodes": [late], "agents": {}}

    monkeypatch.setattr(drain, "_POLL_S", 0.01)
    monkeypatch.setattr(drain, "_REPORTS_S", 0.05)
    asyncio.run(drain._hear_all(ask, evictions))
    said = "evicted at least 2 blocks (2.0 MiB) from DRAM meanwhile"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("end", [asyncio.CancelledError, CommandError])
async def test_a_load_that_ends_early_leaves_its_namespace_assured_of_what_it_was(
    end: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    shares, is_gone = {"dram": 5, "ssd": 9}, False

    async def ask(method: str, _path: str, body: Any = None) -> dict[str, Any]:
        nonlocal shares
        if is_gone:
            raise CommandError("no controller answers")
        if method == "PATCH":
            assert body["namespace"] == 7
            shares = body["settings"]["assured_bytes"]
        return {"namespaces": [{"namespace": 7, "settings": {"assured_bytes": shares}}]}

    async def fails(*, controller_goes: bool) -> None:
        nonlocal is_gone
        async with load._assured(ask, 7, 100):
            assert shares == {"dram": 100, "ssd": 9}
            is_gone = controller_goes
            raise end

    with pytest.raises(end):
        await fails(controller_goes=False)
    assert shares == {"dram": 5, "ssd": 9}
    with pytest.raises(end):
        await fails(controller_goes=True)
    said = "namespace 7 stays assured of the room: no controller answers\n"
    assert capsys.readouterr().err == said


def test_debug_shows_the_traceback_that_is_otherwise_hidden() -> None:
    assert "Traceback" in _run("status", "--http", "127.0.0.1:9", "--log-level", "debug").stderr


def test_a_key_is_32_hexadecimal_digits() -> None:
    assert key_from("AB" * 16) == b"\xab" * 16
    for wrong in ("", "ab", "zz" * 16, "ab" * 17):
        with pytest.raises(argparse.ArgumentTypeError):
            key_from(wrong)


def test_errors_of_ours_are_told_by_their_text_and_others_with_their_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def ours() -> int:
        raise CommandError("the cupboard is bare")

    async def theirs() -> int:
        raise ZeroDivisionError("oops")

    assert run_command(ours, log_level="warning") == 1
    assert run_command(theirs, log_level="warning") == 1
    assert capsys.readouterr().err == (
        "kvcast: the cupboard is bare\nkvcast: ZeroDivisionError: oops\n"
    )
    group = ExceptionGroup("many", [CommandError("the first")])
    assert commands.explain(group) == "the first"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_command_and_lets_it_clean_up(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    async def sleeps() -> int:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(30)
        finally:
            cleaned.append(True)
        return 0

    assert run_command(sleeps, log_level="warning") == 130
    assert cleaned == [True]
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["put"], ["agent", "evict"]])
def test_a_signal_ends_a_command_that_waits_for_its_standard_input(words: list[str]) -> None:
    command = [sys.executable, "-m", "kvcast.cli.main", *words, "--socket", "/no/such.sock", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdin is not None
        fcntl.fcntl(running.stdin, fcntl.F_SETPIPE_SZ, 4096)
        running.stdin.write("ab" * 2500)
        running.stdin.flush()  # it is longer than the pipe: the command reads
        running.send_signal(signal.SIGINT)
        try:
            assert running.wait(timeout=30) == 130
        finally:
            running.kill()
        assert running.stderr is not None
        assert running.stderr.read() == "kvcast: interrupted\n"


def test_the_shell_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shell, "find_shell_python", lambda: None)
    assert shell.main([]) == 1
    assert "make setup-shell" in capsys.readouterr().err


def test_the_shell_is_started_from_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("")
    monkeypatch.setenv("KVCAST_P4RT_SHELL", str(python))
    (tmp_path / "lib/python3.11/site-packages/p4runtime_sh").mkdir(parents=True)
    assert shell.find_shell_python() == python
    started: list[Sequence[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    shell.main(["--switch", "10.0.0.1:99", "--device-id", "4"])
    assert started[0][0] == str(python)
    assert started[0][started[0].index("-m") + 1] == "p4runtime_sh"
    assert "--grpc-addr=10.0.0.1:99" in started[0]
    assert "--device-id=4" in started[0]
    assert "--ssl" not in started[0]
    assert shell.main(["--tls", str(tmp_path)]) == 1  # no certificates there
    (tmp_path / "cert.pem").touch()
    shell.main(["--tls", str(tmp_path)])
    assert "--ssl" in started[1]
    assert f"--private-key={tmp_path / 'key.pem'}" in started[1]
    assert len(started) == 2


def _fetches(seconds: Sequence[float]) -> dict[str, float]:
    histogram = Histogram(FETCH_BOUNDS_S)
    for each in seconds:
        histogram.add(each)
    return histogram.samples("fetch_seconds")


_STATUS = {
    "epoch": 7,
    "plain": False,
    "admit": "auto",
    "nodes": [
        {
            "node_id": "node-1",
            "switch_port": 1,
            "state": "alive",
            "alive": True,
            "buckets": 1024,
            "blocks": 3,
            "load": 0.374,
            "link_bits_per_s": 1_000_000_000,
            "tiers": {"dram": {"used_bytes": 1 << 20, "size_bytes": 64 << 20}},
        },
        {
            "node_id": "node-2",
            "switch_port": 2,
            "state": "dead",
            "alive": False,
            "buckets": 0,
            "blocks": 0,
            "load": 0.0,
            "link_bits_per_s": 0,
            "tiers": {"dram": {"used_bytes": 0, "size_bytes": 64 << 20}},
        },
    ],
    "slots": {"total": 256, "free": 255},
    "switch": {"connected": True, "programmed": True, "address": "x"},
    "decisions": {"NEW": 4, "JOIN": 28},
    "fills": {"FILLED": 64},
    "agents": {
        "node-1": {
            "hits_shared_total": 28.0,
            "payload_bytes_sent_udp_total": 3e6,
            "prefixes_whole_total": 31.0,
            "prefixes_part_total": 4.0,
            "prefixes_load_tokens_per_s": 21_000.0,
            **_fetches([0.002] * 98 + [0.2] * 2),
        },
        "node-2": {"hits_shared_total": 5.0, **_fetches([2.0] * 100)},
    },
    "residents": [
        {
            "namespace": 1,
            "key": "ab" * 16,
            "size_bytes": 65536,
            "hits": 12,
            "value": 5.0,
            "age_s": 3.0,
            "pinned": True,
            "leaving": False,
        }
    ],
}


def _rendered(
    before: tuple[dict[str, object], float] | None,
    shown: dict[str, object] = _STATUS,
    width: int = 200,
) -> str:
    from rich.console import Console

    console = Console(width=width, force_terminal=False, record=True)
    with console.capture() as captured:
        console.print(status.render(shown, before))
    return captured.get()


def test_the_status_view_shows_nodes_tiers_links_decisions_and_residents() -> None:
    text = _rendered(None)
    for word in ("epoch 7", "1 of 2 nodes alive", "node-1", "dead", "join", "28", "ab" * 16):
        assert word in text
    assert "slots 1 of 256" in text


@pytest.mark.parametrize("state", node_report.STATES)
def test_the_status_view_says_of_a_node_what_the_controller_says(state: str) -> None:
    node = {**_STATUS["nodes"][0], "state": state}  # type: ignore[index, dict-item]
    text = _rendered(None, {**_STATUS, "nodes": [node]})
    (row,) = [line for line in text.split("memory")[0].splitlines() if "node-1" in line]
    assert state in row.split()


def test_the_status_view_shows_how_full_each_tier_is_and_how_busy_each_link() -> None:
    one, other = _STATUS["nodes"]  # type: ignore[misc]
    tiers = {
        **one["tiers"],  # type: ignore[has-type]
        "arena": {"used_bytes": 5 << 30, "size_bytes": 8 << 30},
        "ssd": {"used_bytes": 3 << 20, "size_bytes": 100 << 20},
        "cold": {"used_bytes": 7 << 20},
    }
    text = _rendered(None, {**_STATUS, "nodes": [{**one, "tiers": tiers}, other]})  # type: ignore[has-type]
    _, nodes, memory = re.split("^(?:nodes|memory in use).*$", text, flags=re.M)
    link = {row[1]: row[11] for row in map(str.split, nodes.splitlines()) if len(row) > 11}
    assert (link["node-1"], link["node-2"]) == ("37%", "–")
    lines = memory.split("blocks got")[0].replace("│", "  ").splitlines()
    rows = {cells[0]: cells[1:] for line in lines if (cells := re.split("  +", line.strip()))}
    assert rows["node-1"] == ["1.0 of 64", "5,120.0 of 8,192", "3.0 of 100", "7.0"]
    assert rows["node-2"] == ["0.0 of 64", "–", "–", "–"]
    assert rows["all"] == ["1.0 of 128", "5,120.0 of 8,192", "3.0 of 100", "7.0"]


def test_the_status_view_fits_a_terminal_of_80_columns_and_names_only_tiers_in_use() -> None:
    text = _rendered(None, width=80)
    assert "…" not in text
    assert text.count("node-1") == 4, "in each of the tables"
    titles = text.split("blocks got")[1].splitlines()[2:5]
    assert not any("ssd" in line for line in titles)
    agents = {"node-1": {"hits_ssd_total": 3.0}}
    assert any(
        "ssd" in line for line in _rendered(None, {**_STATUS, "agents": agents}).splitlines()
    )


def test_the_status_view_tells_a_pools_quantiles_from_all_its_fetches() -> None:
    lines = _rendered(None).split("blocks got")[1].split("prefixes")[0].splitlines()
    (first,) = [line.split() for line in lines if "node-1" in line]
    (everybody,) = [line.split() for line in lines if "all" in line.split()]
    (titles,) = [line.replace("┃", " ").split() for line in lines if "shared" in line]
    assert everybody[1 : len(everybody) : 2][titles.index("shared")] == "33"
    p50, p99 = (float(word) for word in first[-4:-1:2])
    assert 1.0 <= p50 <= 2.5
    assert 100.0 <= p99 <= 250.0
    # Half of all fetches took two seconds: neither the mean nor the sum of the nodes' quantiles.
    assert 1000.0 <= float(everybody[-2]) <= 2500.0


def test_the_status_view_says_what_engines_made_of_prefixes_where_they_have_told() -> None:
    rows = [line.split() for line in _rendered(None).split("prefixes")[1].splitlines()]
    (first,) = [row[3::2] for row in rows if "node-1" in row]
    assert first == ["31", "4", "0", "21,000", "–"]
    (everybody,) = [row[3::2] for row in rows if "all" in row]
    assert everybody == ["31", "4", "0", "–", "–"]  # paces of several nodes are no pace
    assert not [row for row in rows if "node-2" in row and "31" in row]
    quiet = {name: value for name, value in _STATUS.items() if name != "agents"}
    assert "prefixes" not in _rendered(None, quiet)


def test_the_status_view_gives_rates_between_two_answers() -> None:
    assert "2.86" in _rendered(({"agents": {}}, 1.0))  # 3e6 bytes in a second, in MiB/s


def test_status_reads_a_controllers_answer_and_refuses_another_servers() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(_STATUS if "good" in self.path else {"hello": 1}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert status.fetch_status(f"{url}/good")["epoch"] == 7
            with pytest.raises(CommandError, match="no kvcast controller"):
                status.fetch_status(url)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "answer", [b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"]
)
def test_an_answer_that_is_no_http_or_is_cut_off_is_told(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answers() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=answers)
        thread.start()
        with pytest.raises(CommandError, match=r"127\.0\.0\.1"):
            status.fetch_status(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def test_an_interrupt_of_a_command_without_an_event_loop_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_args: object, **_more: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(fsck, "open_arena", interrupt)
    assert main.main(["agent", "fsck", "--ssd", "/no/such/file"]) == 130
    assert capsys.readouterr().err == "kvcast: interrupted\n"


@pytest.mark.parametrize("words", [["agent", "fsck", "--ssd"], ["plan", "--status"]])
def test_a_report_that_cannot_be_written_is_told_in_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "status"
    given.write_text(json.dumps({"agents": {}}))
    code = main.main([*words, str(given), "--json", str(given / "report")])
    assert code == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"'{given}'")


def test_what_cannot_be_written_to_standard_output_is_told_in_one_line() -> None:
    command = [sys.executable, "-m", "kvcast.cli.main", "--version"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered
        )
    said = "kvcast: standard output: No space left on device\n"
    assert (ran.returncode, ran.stderr) == (1, said)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        ran = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, env=buffered
        )
    assert (ran.returncode, ran.stderr) == (1, "")


def test_a_port_that_nobody_listens_on_is_told() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(CommandError, match="no controller answers"):
            status.fetch_status(f"http://127.0.0.1:{port}")


async def test_a_block_that_its_file_has_no_room_for_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        data = memoryview(bytes(100_000))

        def __enter__(self) -> Held:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    class Holder:
        async def get(self, *_: object, **_more: object) -> list[Held]:
            return [Held()]

    @contextlib.asynccontextmanager
    async def connected(_options: object) -> AsyncIterator[tuple[Holder, int]]:
        yield Holder(), 1

    monkeypatch.setattr(get, "connected", connected)
    options = argparse.Namespace(
        key=bytes(16), deadline=1.0, output=str(tmp_path / "copy"), json=False
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # as a disk that is full then
    try:
        with pytest.raises(CommandError, match="copy: File too large"):
            await get._get(options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert await get._get(options) == 0
    assert (tmp_path / "copy").stat().st_size == 100_000
