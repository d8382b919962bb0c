"""LMCache's own classes, controllers and check, with kvcast as its L2.

Oracle: the bytes that were stored, LMCache's own check of L2 adapters, and the clock. Cannot see:
an engine above LMCache, or accelerators. The scenarios are `lmcache_check`'s.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from engines_harness import HERE, PYTHON, needs_engines, needs_package, pool_of

pytestmark = [
    needs_engines,
    needs_package("lmcache"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


async def right(scenario: str, *arguments: object) -> None:
    words = [str(PYTHON), str(HERE / "lmcache_check.py"), scenario, *map(str, arguments)]
    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, timeout=200, check=False
    )
    assert done.stdout.decode().endswith("right\n"), (
        done.stdout.decode()[-3000:] + done.stderr.decode()[-3000:]
    )


async def test_the_check_that_lmcache_ships_passes(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await right("theirs", pool.sockets["node-1"])


@pytest.mark.parametrize("scenario", ["contract", "threads", "managed"])
async def test_what_one_lmcache_stores_another_finds(tmp_path: Path, scenario: str) -> None:
    async with pool_of(tmp_path, arena_bytes=32 << 20) as pool:
        await right(scenario, pool.sockets["node-1"], pool.sockets["node-2"])


async def test_an_agent_that_hangs_costs_deadlines_and_then_nothing(tmp_path: Path) -> None:
    async with pool_of(tmp_path, replicas=0) as pool:
        one, other = pool.sockets["node-1"], pool.sockets["node-2"]
        await right("hung", one, other, pool.parts["node-2"].pid)


async def test_without_an_agent_or_with_wrong_options_lmcache_is_told(tmp_path: Path) -> None:
    await right("wrong")
