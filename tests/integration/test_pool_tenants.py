"""`kvcast namespace` on a running pool: made, limited, and gone.

Oracle: what engines then get and are refused, and the agents' own counters. Cannot see: speed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from kvcast.hostagent.client import BusyError
from kvcast.service.addresses import format_host_port
from pool_harness import BLOCK_BYTES, eventually, get, keys_for, put, running_pool


async def _namespace(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvcast.cli.main",
        "namespace",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


async def test_an_operator_makes_limits_and_deletes_a_namespace(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as (pool, links):
        http = ["--http", format_host_port(pool.network.http_address)]
        parts = ["tests", "tenants", "1", "bytes"]
        code, out, error = await _namespace("make", *parts, *http, "--policy", "lfu")
        assert (code, error) == (0, "")
        number = out.split()[0]
        assert "policy=lfu" in out
        client = await links[0].client()
        namespace = await client.namespace(*parts)
        assert namespace == int(number)
        keys = keys_for("tenants", 8)
        await put(links[0], namespace, keys)

        async def used() -> dict[str, float]:
            return await (await links[0].client()).stats()

        quota = ["--quota", f"dram={3 * BLOCK_BYTES}", "--assured", f"dram={BLOCK_BYTES}"]
        code, out, _ = await _namespace("set", number, *http, *quota, "--weight", "2")
        assert code == 0
        assert f"quota_bytes.dram={3 * BLOCK_BYTES}" in out
        assert f"assured_bytes.dram={BLOCK_BYTES}" in out

        async def shrunk() -> bool:
            return (await used())["arena_used_bytes"] == 3 * BLOCK_BYTES

        await eventually("three blocks of the namespace are left", shrunk)

        code, out, _ = await _namespace("list", *http, "--json")
        (info,) = json.loads(out)["namespaces"]
        assert info["settings"]["policy"] == "lfu"
        assert info["settings"]["weight"] == 2.0

        await _namespace("set", number, *http, "--operations-per-s", "1")

        async def limited() -> bool:
            try:
                await get(links[0], namespace, keys)
            except BusyError:
                return True
            return False

        await eventually("more than one operation a second is refused", limited)

        assert (await _namespace("delete", number, *http))[0] == 0

        async def gone() -> bool:
            return (await used())["arena_used_bytes"] == 0

        await eventually("its space is free", gone)
        code, _, error = await _namespace("delete", number, *http)
        assert code == 1
        assert "does not exist" in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["set", "7"], "nothing is said"),
        (["set", "0", "--weight", "1"], "0"),
        (["set", "7", "--policy", "best"], "invalid choice"),
        (["set", "7", "--quota", "tape=1"], "TIER=SIZE"),
        (["set", "7", "--quota", "dram=much"], "much"),
        (["set", "7", "--media", "paper"], "no medium"),
        (["set", "7", "--weight", "0"], "0"),
    ],
)
async def test_what_makes_no_sense_is_refused_in_words(words: list[str], says: str) -> None:
    code, _, error = await _namespace(*words)
    assert code == 2
    assert says in error


async def test_without_a_controller_it_says_so() -> None:
    code, _, error = await _namespace("list", "--http", "http://127.0.0.1:1")
    assert code == 1
    assert "no controller answers" in error
