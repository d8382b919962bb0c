"""vLLM's own tiering manager and region of host memory, with kvcast as the tier below.

Oracle: the bytes that were stored, and the clock. Cannot see: vLLM's workers, which copy between
this region and an accelerator only; the scenarios in `tier_check` play them.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from engines_harness import HERE, PYTHON, needs_engines, pool_of

pytestmark = [needs_engines, pytest.mark.slow, pytest.mark.timeout(300)]


async def right(scenario: str, *arguments: object) -> None:
    words = [str(PYTHON), str(HERE / "tier_check.py"), scenario, *map(str, arguments)]
    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, timeout=200, check=False
    )
    assert done.stdout.decode().endswith("right\n"), done.stderr.decode()[-4000:]


async def test_what_one_engine_offloads_another_finds_and_the_region_gets_back(
    tmp_path: Path,
) -> None:
    async with pool_of(tmp_path) as pool:
        await right("shared", pool.sockets["node-1"], pool.sockets["node-2"])


async def test_engines_of_other_layouts_models_and_versions_find_nothing(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await right("apart", pool.sockets["node-1"], pool.sockets["node-2"])


async def test_an_agent_that_hangs_stalls_no_call_and_breaks_no_promise_twice(
    tmp_path: Path,
) -> None:
    async with pool_of(tmp_path, replicas=0) as pool:
        one, other = pool.sockets["node-1"], pool.sockets["node-2"]
        await right("hung", one, other, pool.parts["node-2"].pid)


async def test_without_an_agent_an_engine_starts_and_computes(tmp_path: Path) -> None:
    await right("gone")
