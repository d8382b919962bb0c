"""SGLang's own storage interface, configuration, factory and injector of failures, with kvcast.

Oracle: the bytes that were saved, and the clock. Cannot see: SGLang's engine, its pools of host
memory, or accelerators. The scenarios are `sglang_check`'s.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from engines_harness import HERE, PYTHON, needs_engines, needs_package, pool_of

pytestmark = [
    needs_engines,
    needs_package("sglang"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


async def right(scenario: str, *arguments: object) -> None:
    words = [str(PYTHON), str(HERE / "sglang_check.py"), scenario, *map(str, arguments)]
    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, timeout=200, check=False
    )
    assert done.stdout.decode().endswith("right\n"), done.stderr.decode()[-3000:]


@pytest.mark.parametrize("scenario", ["contract", "told", "apart", "crowd"])
async def test_what_one_engine_backs_up_another_finds(tmp_path: Path, scenario: str) -> None:
    async with pool_of(tmp_path) as pool:
        await right(scenario, pool.sockets["node-1"], pool.sockets["node-2"])


async def test_an_agent_that_hangs_costs_deadlines_and_no_repeated_time_outs(
    tmp_path: Path,
) -> None:
    async with pool_of(tmp_path, replicas=0) as pool:
        one, other = pool.sockets["node-1"], pool.sockets["node-2"]
        await right("hung", one, other, pool.parts["node-2"].pid)


async def test_behind_sglangs_own_failures_pages_are_right(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await right("injected", pool.sockets["node-1"])


async def test_without_an_agent_or_with_wrong_options_sglang_is_told(tmp_path: Path) -> None:
    await right("wrong")
