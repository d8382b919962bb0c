"""A pool for the tests of what stands beside agents: they run in the test's own process.

It costs a hundredth of the processor time of a pool of processes. Cannot do: coalescing, since the
switch is a plain one, and agents that stop or die; `pool_harness` has pools of processes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import hostagent_harness
from hostagent_harness import MIB, Pool
from kvcast.hostagent.options import Options


class _Exceptions(logging.Handler):
    """Those that agents logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.name != "kvcast.connector":
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextlib.asynccontextmanager
async def running_agents(
    tmp_path: Path, nodes: int, *, replicas: int = 1, arena_bytes: int = 32 * MIB
) -> AsyncIterator[Pool]:
    """A pool of `nodes` agents with arenas of `arena_bytes` each, and further `replicas` of each
    block; no agent logs an exception."""

    def change(options: Options) -> Options:
        arena = replace(options.arena, size_bytes=arena_bytes, slab_bytes=MIB)
        return replace(options, arena=arena)

    def homes_of(bucket: int) -> list[str]:
        some = min(1 + replicas, nodes)
        return [f"node-{1 + (bucket + number) % nodes}" for number in range(some)]

    exceptions = _Exceptions()
    logging.getLogger().addHandler(exceptions)
    try:
        async with hostagent_harness.running_pool(tmp_path, nodes, change) as pool:
            pool.controller.homes_of = homes_of
            pool.controller.publish()
            await pool.settled()
            yield pool
    finally:
        logging.getLogger().removeHandler(exceptions)
    assert exceptions.found == []
