"""How long does an engine wait for what its node, or the pool, already holds?

Measures, by the blocking client against agents in processes of their own: `get` and release of one
block of this node's arena (64 KiB, 2 MiB, 16 MiB), of a chain of 100 x 64 KiB, and `exists` of
1,000 keys that this node holds, that one other node holds, and that two hold. Every block's digest
is compared once; the time of that is not in the figures. The switch forwards plainly.

    python -m kvcast.bench.local --json local.json
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

from kvcast.controller.core.placement import place
from kvcast.hostagent.client import Client
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star

SIZES: Final = {"64 KiB": 64 << 10, "2 MiB": 2 << 20, "16 MiB": 16 << 20}
CHAIN: Final = 100
ASKED: Final = 1000
ARENA_BYTES: Final = 256 << 20
_WARM_UP: Final = 20


def timed(action: Callable[[], object], times: int) -> dict[str, float]:
    """Median, 99th percentile and fastest of `times` runs, in microseconds."""
    taken = []
    for number in range(times + _WARM_UP):
        begun = time.perf_counter()
        action()
        if number >= _WARM_UP:
            taken.append((time.perf_counter() - begun) * 1e6)
    taken.sort()
    return {
        "p50_us": statistics.median(taken),
        "p99_us": taken[int(len(taken) * 0.99)],
        "min_us": taken[0],
    }


def _in_bucket(seed: int, bucket: int) -> bytes:
    return ((seed << 10) | bucket).to_bytes(16, "big")


def _measure(pool: Pool, buckets: dict[str, list[int]], times: int) -> dict[str, Any]:
    """`buckets`: those of which each node is the home."""
    clients = {host.node_id: Client(str(pool.sockets[host.node_id])) for host in pool.star.hosts}
    here = clients["node-1"]
    namespace = here.namespace("bench", "m", "1", "local")
    results: dict[str, Any] = {}

    def get(keys: list[bytes]) -> None:
        for block in here.get(namespace, keys, 5.0):
            assert block is not None
            block.release()

    mine = buckets["node-1"]
    for number, (name, size_bytes) in enumerate(SIZES.items()):
        key = _in_bucket(number + 1, mine[0])
        here.put(namespace, {key: os.urandom(size_bytes)})
        (block,) = here.get(namespace, [key])
        assert block is not None
        assert block.tier == "local"
        assert block.verify()
        block.release()
        results[f"get and release, {name}"] = timed(functools.partial(get, [key]), times)
    chain = [_in_bucket(1000 + n, mine[n % len(mine)]) for n in range(CHAIN)]
    here.put(namespace, {key: os.urandom(64 << 10) for key in chain})
    results[f"get and release, {CHAIN} x 64 KiB"] = timed(lambda: get(chain), times // 10)
    for title, nodes in {
        "this node": ["node-1"],
        "one other node": ["node-2"],
        "two other nodes": ["node-2", "node-3"],
    }.items():
        keys = []
        for n in range(ASKED):
            theirs = buckets[nodes[n % len(nodes)]]
            keys.append(_in_bucket(10_000 + n, theirs[n % len(theirs)]))
        for n, node in enumerate(nodes):
            clients[node].put(namespace, {key: bytes(1024) for key in keys[n :: len(nodes)]})
        assert here.exists(namespace, keys) == ASKED

        def ask(keys: list[bytes] = keys) -> None:
            assert here.exists(namespace, keys) == ASKED

        results[f"exists of {ASKED}, {title}"] = timed(ask, times // 10)
    for client in clients.values():
        client.close()
    return results


async def run(times: int) -> dict[str, Any]:
    """All measurements on a pool of three nodes without replicas."""
    options = PoolOptions(plain=True, admit="off", replicas=0, arena_bytes=ARENA_BYTES)
    async with Pool(Star.of(3), options) as pool:
        homes: dict[str, list[int]] = {}
        for bucket, nodes in enumerate(place([host.node_id for host in pool.star.hosts], 1)):
            homes.setdefault(nodes[0], []).append(bucket)
        return await asyncio.to_thread(_measure, pool, homes, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=2000, help="gets of one block a size")
    parser.add_argument("--json", help="write the figures here, too")
    options = parser.parse_args()
    load = f"load {os.getloadavg()[0]:.1f}"
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {load}",
        "python": platform.python_version(),
        "results": asyncio.run(run(options.times)),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
