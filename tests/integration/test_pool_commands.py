"""The `kvcast` command at work: put, get and status on a pool, and the demo from end to end.

Oracle: the files that went in, the report's own fields, the kernel's process table. Cannot see:
whether the picture is beautiful.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from kvcast.controller.core.placement import place
from kvcast.protocol.messages.wire import bucket_of
from kvcast.service.addresses import format_host_port
from pool_harness import eventually, running_pool

KVCAST = [sys.executable, "-m", "kvcast.cli.main"]


async def kvcast(*words: str | Path, stdin: bytes | None = None) -> tuple[int, bytes, str]:
    process = await asyncio.create_subprocess_exec(
        *KVCAST,
        *map(str, words),
        stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out, error.decode()


async def test_an_agent_says_what_it_holds_and_has_blocks_pinned_and_forgotten(
    tmp_path: Path,
) -> None:
    data = os.urandom(50_000)
    (tmp_path / "in").write_bytes(data)
    async with running_pool(tmp_path, 2, replicas=0) as (pool, _links):
        one, two = pool.sockets["node-1"], pool.sockets["node-2"]
        _, out, _ = await kvcast("put", "--socket", one, tmp_path / "in")
        key = out.decode().strip()

        code, out, error = await kvcast("agent", "status", "--socket", one)
        assert (code, error) == (0, "")
        assert re.search(r"^1 blocks in DRAM, 56\.0 KiB of 32\.0 MiB$", out.decode(), re.M), out
        assert re.search(r"^  store commits +1$", out.decode(), re.M)
        code, out, _ = await kvcast("agent", "status", "--socket", one, "--json")
        assert json.loads(out)["store_commits_total"] == 1

        nowhere = "00" * 16
        words = ["agent", "pin", "--socket", two, key, nowhere, "--fetch", "--for", "0.2"]
        code, out, _ = await kvcast(*words)
        assert (code, out) == (3, b"1 of 2 blocks pinned\n")
        code, out, error = await kvcast("agent", "pin", "--socket", two, "-", stdin=b"not a key\n")
        assert code == 1
        assert "'not' is not a key of 32 hexadecimal digits" in error

        code, out, _ = await kvcast(
            "agent", "evict", "--socket", one, "-", stdin=f"{key}\n{nowhere}\n".encode()
        )
        said = b"2 of 2 blocks forgotten by all of their homes; 1 lay in this node's DRAM\n"
        assert (code, out) == (0, said)
        code, out, _ = await kvcast("agent", "evict", "--socket", one, "--help")
        assert code == 0
        assert b"usage: kvcast agent evict" in out
        code, _, error = await kvcast("get", "--socket", one, key, "--deadline", "2")
        assert code == 3, error


async def test_a_file_that_one_node_puts_is_got_on_another_and_status_shows_it(
    tmp_path: Path,
) -> None:
    data = os.urandom(100_001)
    (tmp_path / "in").write_bytes(data)
    async with running_pool(tmp_path, 2, replicas=0) as (pool, _links):
        one, two = pool.sockets["node-1"], pool.sockets["node-2"]
        code, out, error = await kvcast("put", "--socket", one, tmp_path / "in")
        assert (code, error) == (0, "")
        key = out.decode().strip()
        assert re.fullmatch("[0-9a-f]{32}", key)

        assert (await kvcast("get", "--socket", two, key))[:2] == (0, data)
        code, _, _ = await kvcast("get", "--socket", one, key, "-o", tmp_path / "copy")
        assert code == 0
        assert (tmp_path / "copy").read_bytes() == data
        code, out, _ = await kvcast("get", "--socket", two, key, "--json")
        assert json.loads(out)["size_bytes"] == len(data)
        assert json.loads(out)["tier"] == "local"

        other = ["--tenant", "somebody", "--model", "else"]
        code, out, error = await kvcast("get", "--socket", two, key, *other, "--deadline", "2")
        assert (code, out) == (3, b"")
        assert "the pool has nothing of tenant 'somebody', model 'else'" in error
        for words in (("agent", "evict"), ("agent", "pin", "--fetch", "--for", "1")):
            code, _, error = await kvcast(*words, "--socket", two, key, *other)
            assert code == 3, error
        known = {one["tenant"] for one in (await pool.status())["namespaces"]}
        assert known == {"cli"}, "who only asks makes nothing"

        code, out, _ = await kvcast("put", "--socket", two, "-", "--json", *other, stdin=b"x")
        named = json.loads(out)
        assert (code, named["size_bytes"]) == (0, 1)
        code, out, _ = await kvcast("get", "--socket", one, named["key"], *other)
        assert (code, out) == (0, b"x")

        (tmp_path / "empty").write_bytes(b"")
        code, _, error = await kvcast("put", "--socket", one, tmp_path / "empty")
        assert code == 1
        assert "is empty" in error

        http = format_host_port(pool.network.http_address)
        code, out, _ = await kvcast("status", "--http", http, "--once")
        assert code == 0
        for word in ("node-1", "node-2", "switch decisions", "alive"):
            assert word in out.decode()
        code, out, _ = await kvcast("status", "--http", http, "--once", "--json", "-")
        assert len(json.loads(out)["nodes"]) == 2


async def test_a_drain_of_a_full_pool_says_what_the_others_evicted(tmp_path: Path) -> None:
    """All that was put fits three nodes, and not two."""
    keys = [bytes([n]) * 14 + n.to_bytes(2, "big") for n in range(1, 201)]
    flags = {f"node-{n}": ("--arena-bytes=16MiB",) for n in (1, 2, 3)}
    async with running_pool(tmp_path, 3, replicas=0, node_flags=flags) as (pool, links):
        http = ("--http", format_host_port(pool.network.http_address))
        clients = [await link.client() for link in links]
        namespace = await clients[0].namespace("t", "m", "1", "l")
        for key in keys:
            await clients[0].put(namespace, {key: os.urandom(200 << 10)})

        async def evictions() -> int:
            counted = [await client.stats() for client in (clients[0], clients[2])]
            return int(sum(one["store_evictions_total"] for one in counted))

        before = 0

        async def heard() -> bool:
            nonlocal before
            before = await evictions()
            told = (await pool.status())["agents"]
            both = [told.get(node, {}) for node in ("node-1", "node-3")]
            return sum(one.get("store_evictions_total", 0) for one in both) == before

        await eventually("the controller has heard all that was evicted by puts", heard)
        code, _, error = await kvcast("agent", "drain", "node-2", *http, "--timeout", "60")
        assert code == 0, error
        assert re.search(r"^node-2 holds [0-9.]+ MiB in DRAM, the others have ", error, re.M)
        evicted = await evictions() - before
        assert evicted > 0
        assert f"the other nodes evicted {evicted} blocks (" in error


async def test_a_node_that_is_drained_may_go_and_one_that_comes_gets_its_share(
    tmp_path: Path,
) -> None:
    """Each block has one copy; who reads has room for next to none, so it must ask."""
    blocks = {bytes([n]) * 14 + n.to_bytes(2, "big"): os.urandom(20_000) for n in range(1, 120)}
    flags = {"node-4": ("--arena-bytes=1MiB",)}
    async with running_pool(tmp_path, 4, replicas=0, node_flags=flags) as (pool, links):
        http = ("--http", format_host_port(pool.network.http_address))
        code, _, error = await kvcast("agent", "drain", "node-4", *http)
        assert code == 0
        assert error.endswith(
            "node-4 is drained: it may be stopped\n"
            "the other nodes evicted nothing from DRAM meanwhile\n"
        )
        first, reader = await links[0].client(), await links[3].client()
        namespace = await first.namespace("t", "m", "1", "l")
        for key, data in blocks.items():
            await first.put(namespace, {key: data})

        async def lost() -> list[bytes]:
            missing = []
            for key, data in blocks.items():
                (found,) = await reader.get(namespace, [key], 10.0)
                if found is None or bytes(found.data) != data:
                    missing.append(key)
                if found is not None:
                    found.release()
            return missing

        code, _, error = await kvcast("agent", "drain", "node-2", *http, "--timeout", "30")
        assert code == 0, error
        assert "node-2 is drained" in error
        await pool.parts["node-2"].stop()
        assert await lost() == []
        await pool.restart("node-2")
        for _ in range(300):
            status = await pool.status()
            if sum(n["placed"] for n in status["nodes"]) == 3 and status["settled"]:
                break
            await asyncio.sleep(0.1)
        assert next(n for n in status["nodes"] if n["node_id"] == "node-2")["buckets"] > 200
        homes = place(("node-1", "node-2", "node-3"), 1)
        share = [key for key in blocks if homes[bucket_of(key)] == ("node-2",)]
        assert len(share) > 10
        newcomer = await links[1].client()
        held = (await newcomer.stats())["blocks"]
        assert held == len(share), "it was sent them before it was placed"
        assert await lost() == []
        code, _, error = await kvcast("agent", "drain", "node-9", *http)
        assert code == 1
        assert "there is no node node-9" in error
        assert (await kvcast("agent", "drain", "node-1", *http, "--no-wait"))[0] == 0
        assert (await kvcast("agent", "drain", "node-1", *http, "--undo"))[0] == 0
        assert await lost() == []


@pytest.mark.long
async def test_the_demo_runs_to_its_end_and_reports(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    flags = ["--nodes", "4", "--seconds-budget", "24", "--workload", "tp-mla"]
    code, out, error = await kvcast(
        "demo", *flags, "--json", report_path, "--out", tmp_path / "out"
    )
    assert code == 0, error
    text = out.decode()
    assert "scaled to this machine: blocks of" in text
    assert "home egress ratio" in text
    assert "\x1b[" not in text  # no colours into a pipe
    report = json.loads(report_path.read_text())
    assert report["wrong_bytes"] == 0
    assert report["misses"] == 0
    assert report["gets"] == sum(report["hits"].values()) > 0
    assert set(report["hits"]) == {"local", "switch", "shared", "home", "bulk", "miss"}
    assert report["home_egress_ratio"] < report["plain_home_egress_ratio"]
    for run in ("plain", "kvcast"):
        assert {"p50", "p99", "max"} == set(report["fetch_ms"][run])
    for name in ("fetch_p50_ms", "fetch_p99_ms", "plain_fetch_p50_ms", "plain_fetch_p99_ms"):
        assert report[name] > 0
    # The links' rate was in force: nothing is ever faster than a wire. Counters are a quantum
    # late, and are read while the switch runs.
    rate, lone = report["link_rate_bps"], report["lone_get"]
    assert lone["ms"] >= lone["link_ms"] > 8e3 * lone["bytes"] / rate
    for run in report["runs"].values():
        for way in ("uplink", "downlink"):
            assert 0 < run["load"][f"{way}_busiest"] <= 1.02
            assert run["load"][f"{way}_peak"] <= 1.25
        assert 0 < run["load"]["processors_busy"] <= 1
    assert f"{rate / 1e6:g} Mb/s" in text
    assert isinstance(report["links_were_the_limit"], bool)
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "demo.html").read_text()
    assert "data:image/png;base64," in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)


@pytest.mark.long
async def test_a_traces_first_part_is_replayed_and_named(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 40 * i, "input_length": 9, "output_length": 1, "hash_ids": [0, 1, 2 + i // 5]}
        for i in range(60)
    ]
    trace = tmp_path / "small.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    hosts = [
        f'[[hosts]]\nnode_id="rack-{i}"\nip="10.9.0.{i}"\n'
        f'mac="02:00:00:00:09:0{i}"\nswitch_port={i + 3}'
        for i in (1, 2, 3)
    ]
    (tmp_path / "rack.toml").write_text("\n".join(hosts))
    flags = ["--topology", str(tmp_path / "rack.toml"), "--seconds-budget", "24"]
    flags += ["--time-scale", "0.5"]
    code, out, error = await kvcast(
        "demo", "--trace", trace, *flags, "--json", "-", "--out", tmp_path / "out"
    )
    assert code == 0, error
    report = json.loads(out)  # standard output is the report alone
    assert report["wrong_bytes"] == 0
    assert report["parameters"]["trace"] == "small.jsonl"
    assert "requests" in report["workload"]["scaling"]
    assert re.search(r"of the trace's 60 requests", report["workload"]["scaling"])
    assert report["workload"]["requests"] >= 30


def _children(pid: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_an_interrupted_demo_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        *KVCAST,
        *("demo", "--nodes", "3", "--out", str(tmp_path)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        for _ in range(300):
            if len(children := _children(process.pid)) == 5:
                break
            await asyncio.sleep(0.1)
        assert len(children) == 5
        await asyncio.sleep(1)
        process.send_signal(number)
        _, error = await asyncio.wait_for(process.communicate(), 120)
        if number != signal.SIGKILL:
            assert process.returncode == 130
            assert b"interrupted" in error
            assert b"Traceback" not in error
        for _ in range(100):
            alive = {pid for pid in children if Path(f"/proc/{pid}").exists()}
            if not alive:
                break
            await asyncio.sleep(0.1)
        assert not alive
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
