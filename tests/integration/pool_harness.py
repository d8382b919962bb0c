"""What the tests of whole pools share: a pool of processes, blocks with known bytes, patience.

Every byte of every block follows from its key (`kvcast.workloads.content`), so a test can check
what it reads without remembering what it wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvcast.bench.hostile import tracebacks
from kvcast.bench.replay import NodeLink, Replay, ReplayOptions, Tally, links_to
from kvcast.hostagent.client import Block
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star
from kvcast.workloads import content
from kvcast.workloads.generators import Request, WorkloadOptions, chain, generate, take

BLOCK_BYTES = 16 * 1024


@contextlib.asynccontextmanager
async def running_pool(
    tmp_path: Path, nodes: int = 4, **options: Any
) -> AsyncIterator[tuple[Pool, list[NodeLink]]]:
    """A pool of separate processes and links to its agents; logs are in `tmp_path`."""
    settings = {"arena_bytes": 32 << 20, "log_level": "info"} | options
    pool = Pool(Star.of(nodes), PoolOptions(**settings), tmp_path / "run")
    async with pool, links_to([pool.sockets[host.node_id] for host in pool.star.hosts]) as links:
        yield pool, links
    assert tracebacks(pool) == []


async def namespace_of(link: NodeLink, name: str = "tests") -> int:
    return await (await link.client()).namespace("tests", name, "1", "bytes")


def keys_for(label: object, count: int) -> list[bytes]:
    return [chain(b"tests", (label, number)) for number in range(count)]


async def put(
    link: NodeLink, namespace: int, keys: Sequence[bytes], size_bytes: int = BLOCK_BYTES
) -> None:
    client = await link.client()
    await client.put(namespace, {key: content.block_bytes(key, size_bytes) for key in keys})


async def get(
    link: NodeLink,
    namespace: int,
    keys: Sequence[bytes],
    size_bytes: int = BLOCK_BYTES,
    **options: Any,
) -> tuple[int, int, set[str]]:
    """Get blocks and check every byte: (blocks that came, wrong bytes, the tiers they came by)."""
    client = await link.client()
    blocks = await client.get(namespace, keys, **({"deadline_s": 20.0} | options))
    return check(zip(keys, blocks, strict=True), size_bytes)


def check(
    blocks: Iterable[tuple[bytes, Block | None]], size_bytes: int
) -> tuple[int, int, set[str]]:
    came, wrong, tiers = 0, 0, set()
    for key, block in blocks:
        if block is None:
            continue
        with block:
            came += 1
            wrong += content.wrong_bytes(key, size_bytes, block.data)
            tiers.add(block.tier)
    return came, wrong, tiers


def requests_of(
    workload: str, nodes: int, remote_reads: int, span_s: float, seed: int = 1
) -> list[Request]:
    """The first requests of a workload, spread over `span_s` seconds."""
    stream = generate(workload, WorkloadOptions(nodes=nodes, rate_per_s=1.0, seed=seed))
    requests, _ = take(stream, remote_reads=remote_reads, written=10**9, requests_at_most=10**9)
    stretch = span_s / requests[-1].time_s
    return [
        Request(
            number=r.number,
            time_s=r.time_s * stretch,
            node=r.node,
            keys=r.keys,
            kind=r.kind,
            namespace=r.namespace,
            writes=r.writes,
            after=r.after,
            jitter_s=r.jitter_s,
            group=r.group,
            gather_ms=r.gather_ms,
        )
        for r in requests
    ]


def make_replay(
    pool: Pool,
    links: Sequence[NodeLink],
    requests: Sequence[Request],
    *,
    tag: str,
    deadline_s: float = 8.0,
    budget_s: float = 30.0,
) -> Replay:
    """Requests to be played on a pool, all of which end or are skipped."""
    options = ReplayOptions(
        block_bytes=BLOCK_BYTES, deadline_s=deadline_s, budget_s=budget_s, namespace_tag=tag
    )
    names = [host.node_id for host in pool.star.hosts]
    return Replay(requests, links, names, options)


async def replay(
    pool: Pool, links: Sequence[NodeLink], requests: Sequence[Request], *, tag: str
) -> Tally:
    """Play requests on a pool; returns when every one has ended or was skipped."""
    return await make_replay(pool, links, requests, tag=tag).run()


async def eventually(
    what: str, probe: Callable[[], Awaitable[bool]], *, tries: int = 600, pause_s: float = 0.1
) -> None:
    """Wait until `probe` is true; fails with `what` after `tries` times."""
    for _ in range(tries):
        if await probe():
            return
        await asyncio.sleep(pause_s)
    raise AssertionError(f"never happened: {what}")
