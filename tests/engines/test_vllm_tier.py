"""vLLM's own tiering manager and region of host memory, with kvcast as the tier below.

Oracle: the bytes that were stored, the clock, and an engine without any offload. Cannot see: vLLM's
workers, which copy between this region and an accelerator only; the scenarios in `tier_check` play
them, and `host_offload` simulates them for whole engines.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engines_harness import (
    HERE,
    MODEL_NAME,
    PYTHON,
    make_model,
    needs_engines,
    pool_of,
    prompts_of,
    right,
    same,
    saved,
)
from kvcast.bench.engines.engine import Answers, Engine, Prompt

pytestmark = [needs_engines, pytest.mark.slow, pytest.mark.timeout(300)]


async def passes(scenario: str, *arguments: object) -> None:
    words = [str(PYTHON), str(HERE / "tier_check.py"), scenario, *map(str, arguments)]
    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, timeout=200, check=False
    )
    assert done.stdout.decode().endswith("right\n"), done.stderr.decode()[-4000:]


async def test_what_one_engine_offloads_another_finds_and_the_region_gets_back(
    tmp_path: Path,
) -> None:
    async with pool_of(tmp_path) as pool:
        await passes("shared", pool.sockets["node-1"], pool.sockets["node-2"])


async def test_engines_of_other_layouts_models_and_versions_find_nothing(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        await passes("apart", pool.sockets["node-1"], pool.sockets["node-2"])


async def test_an_agent_that_hangs_stalls_no_call_and_breaks_no_promise_twice(
    tmp_path: Path,
) -> None:
    async with pool_of(tmp_path, replicas=0) as pool:
        one, other = pool.sockets["node-1"], pool.sockets["node-2"]
        await passes("hung", one, other, pool.parts["node-2"].pid)


async def test_without_an_agent_an_engine_starts_and_computes(tmp_path: Path) -> None:
    await passes("gone")


def offload(socket: Path | str) -> dict[str, Any]:
    """What a user says to `--kv-transfer-config`, but for the simulated workers."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "host_offload",
            "cpu_bytes_to_use": 96 << 20,
            "secondary_tiers": [
                {"type": "kvcast", "socket": str(socket), "model": MODEL_NAME, "lookup_s": 2.0}
            ],
        },
    }


async def answers(
    log: Path,
    model: Path,
    prompts: list[Prompt],
    socket: Path | None = None,
    *,
    turns: int = 1,
    saves: bool = False,
) -> list[Answers]:
    """An engine's, so many times over: with its own cache, and with the tier at `socket`."""
    options = {} if socket is None else {"kv_transfer_config": offload(socket)}
    async with Engine.running(
        PYTHON, log, {"PYTHONPATH": str(HERE)}, model=str(model), **options
    ) as (engine):
        given = []
        for _ in range(turns):
            given.append([(await engine.generate([prompt]))[0] for prompt in prompts])
        if saves:
            await saved(engine, prompts)
        return given


@pytest.mark.in_step
@pytest.mark.timeout(900)
async def test_an_engine_answers_by_what_another_has_offloaded_as_by_its_own_cache(
    tmp_path: Path,
) -> None:
    model = make_model("llama", tmp_path)
    prompts = prompts_of("tier", 2)
    new, again = await answers(tmp_path / "alone.log", model, prompts, turns=2)
    async with pool_of(tmp_path, nodes=2) as pool:
        one, other = pool.sockets["node-1"], pool.sockets["node-2"]
        [first] = await answers(tmp_path / "one.log", model, prompts, one, saves=True)
        assert right(first, new)
        [second] = await answers(tmp_path / "other.log", model, prompts, other)
        assert [answer["cached"] for answer in second] == [answer["cached"] for answer in again]
        assert same(second, again)
