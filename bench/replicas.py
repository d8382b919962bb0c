"""Eight readers of one home's blocks, at different moments: does the pool adapt, and back again?

Two pools of separate processes, over emulated links: one home, readers, and nodes that have nothing
to do. Each reader goes through the same blocks in an order of its own, and passes over those that
another reads at that moment: nothing coalesces, and every byte of every read leaves some node once
more. The readers' arenas are too small for what they read, so that next to nothing is found there.

- **before**: hot replicas are off; the home's link is all there is.
- **after**: they are on. Measured when the pool has adapted: no replica was given for a while.

Then the load ends, and it is timed until the blocks have one copy again: the controller lists no
replica, and no node that was idle before holds a block.

`throughput_after_over_before` compares bytes that came over the network a second; every byte is
compared with what its key demands (`wrong_bytes`).

    python -m kvcast.bench.replicas --json replicas.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from kvcast.bench.incast import home_keys
from kvcast.bench.readers import Readers, end
from kvcast.hostagent.client import AsyncClient
from kvcast.service.provenance import provenance
from kvcast.service.reports import add_json, report_to, say
from kvcast.service.statistics import ratio
from kvcast.service.values import number, parse_size, whole_number
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star
from kvcast.workloads import content

HOME: Final = "node-1"
ADAPTED_AFTER_S: Final = 6.0
"""No replica was given or taken for so long: the pool has adapted."""
ADAPTS_WITHIN_S: Final = 90.0
ONE_COPY_WITHIN_S: Final = 120.0
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Options:
    """One run."""

    readers: int
    spares: int
    blocks: int
    block_bytes: int
    link_rate: float
    measure_s: float
    seed: int


async def _speed(readers: Readers, seconds: float) -> float:
    """Bytes a second over the network, from now on."""
    begun, before = time.perf_counter(), readers.got_bytes
    await asyncio.sleep(seconds)
    return (readers.got_bytes - before) / (time.perf_counter() - begun)


def _pool(options: Options, *, hot: bool) -> Pool:
    nodes = 1 + options.readers + options.spares
    held = options.blocks * options.block_bytes
    reader_arena = max(_MIB, held // 4 // _MIB * _MIB)
    readers = [f"node-{2 + number}" for number in range(options.readers)]
    return Pool(
        Star.of(nodes),
        PoolOptions(
            replicas=0,
            admit="off",
            seed=options.seed,
            arena_bytes=8 * held,
            link_rate_bits_per_s=options.link_rate,
            controller_flags=() if hot else ("--no-hot-replicas",),
            node_flags=dict.fromkeys(readers, (f"--arena-bytes={reader_arena}",)),
            log_level="warning",
        ),
    )


@contextlib.asynccontextmanager
async def _loaded(pool: Pool, options: Options) -> AsyncIterator[Readers]:
    """The home has its blocks, and the readers read them."""
    keys = home_keys(pool, HOME, options.blocks, options.seed)
    async with contextlib.AsyncExitStack() as stack:
        home = await stack.enter_async_context(await AsyncClient.connect(str(pool.sockets[HOME])))
        namespace = await home.namespace("bench", "m", "1", "replicas")
        for key in keys:
            data = content.block_bytes(key, options.block_bytes)
            await home.put(namespace, {key: data})
        load = Readers(namespace, options.block_bytes)
        tasks = []
        for number in range(options.readers):
            path = str(pool.sockets[f"node-{2 + number}"])
            client = await stack.enter_async_context(await AsyncClient.connect(path))
            order = random.Random(f"{options.seed}/{number}").sample(keys, len(keys))
            tasks.append(asyncio.create_task(load.read(client, order)))
        try:
            yield load
        finally:
            await end(tasks)


async def _before(options: Options) -> tuple[Readers, float]:
    async with _pool(options, hot=False) as pool, _loaded(pool, options) as load:
        await asyncio.sleep(3.0)
        return load, await _speed(load, options.measure_s)


async def _adapted(pool: Pool) -> tuple[float, int]:
    """Wait until no replica comes any more; seconds, and how many there are."""
    begun = changed = time.perf_counter()
    former: Any = []
    while time.perf_counter() < begun + ADAPTS_WITHIN_S:
        await asyncio.sleep(0.5)
        replicas = (await pool.status())["replicas"]
        if replicas != former:
            former, changed = replicas, time.perf_counter()
        elif former and time.perf_counter() > changed + ADAPTED_AFTER_S:
            break
    return changed - begun, sum(len(each["nodes"]) for each in former)


async def _one_copy(pool: Pool, spares: set[str]) -> float | None:
    """Seconds until there is one copy of every block again; None if that takes too long."""
    begun = time.perf_counter()
    while (took := time.perf_counter() - begun) < ONE_COPY_WITHIN_S:
        status = await pool.status()
        held = sum(node["blocks"] for node in status["nodes"] if node["node_id"] in spares)
        if not status["replicas"] and not held:
            return took
        await asyncio.sleep(0.5)
    return None


async def run(options: Options) -> dict[str, Any]:
    """Both pools; the report."""
    plain, before = await _before(options)
    say(f"one copy: {before / 1e6:.2f} MB/s")
    spares = {f"node-{2 + options.readers + number}" for number in range(options.spares)}
    async with _pool(options, hot=True) as pool:
        async with _loaded(pool, options) as load:
            took, replicas = await _adapted(pool)
            say(f"{replicas} replicas of {options.blocks} blocks after {took:.1f} s")
            after = await _speed(load, options.measure_s)
            loads = {n["node_id"]: n["load"] for n in (await pool.status())["nodes"]}
            counts = (await pool.status())["counts"]
        say(f"with replicas: {after / 1e6:.2f} MB/s")
        back = await _one_copy(pool, spares)
        say("more than one copy still" if back is None else f"one copy again after {back:.1f} s")
        pool.check_alive()
    return {
        "bench": "replicas",
        "throughput_after_over_before": ratio(after, before),
        "seconds_to_one_copy": back if replicas else None,  # there was never more than one
        "wrong_bytes": plain.wrong_bytes + load.wrong_bytes,
        "misses": plain.misses + load.misses,
        "errors": sorted({*plain.errors, *load.errors})[:5],
        "before_bytes_per_s": before,
        "after_bytes_per_s": after,
        "local_bytes": plain.local_bytes + load.local_bytes,
        "seconds_to_adapt": took,
        "replicas": replicas,
        "loads": loads,
        "counts": {k: v for k, v in counts.items() if k.startswith("replica")},
        "parameters": vars(options),
        "provenance": provenance(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.replicas",
        description=__doc__.splitlines()[0] if __doc__ else "",
    )
    parser.add_argument("--readers", type=whole_number(1), default=8)
    parser.add_argument(
        "--spares", type=whole_number(1), default=4, help="nodes that have nothing to do"
    )
    parser.add_argument("--blocks", type=whole_number(1), default=64, help="blocks of the one home")
    parser.add_argument("--block-bytes", type=parse_size, default=64 << 10, metavar="SIZE")
    parser.add_argument("--link-rate", type=number(1e5), default=10e6, help="of every link, bits/s")
    parser.add_argument("--measure", type=number(0.1), default=10.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    add_json(parser)
    given = parser.parse_args()
    if given.blocks <= 2 * given.readers:
        parser.error("there must be more than two blocks a reader, or readers meet")
    if given.blocks * given.block_bytes < 4 * _MIB:
        parser.error("there must be 4 MiB of blocks, or the readers' arenas hold them all")
    options = Options(
        *(given.readers, given.spares, given.blocks, given.block_bytes),
        *(given.link_rate, given.measure, given.seed),
    )
    report = asyncio.run(run(options))
    report_to(given.json, report)
    return exit_status(report)


def exit_status(report: dict[str, Any]) -> int:
    """1 where bytes were wrong or did not come, or the pool did not adapt, or not back."""
    found = (report["throughput_after_over_before"], report["seconds_to_one_copy"])
    return int(None in found or report["wrong_bytes"] > 0 or report["misses"] > 0)


if __name__ == "__main__":
    sys.exit(main())
