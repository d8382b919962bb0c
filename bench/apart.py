"""Readers of one home's blocks that begin a moment apart: how many copies leave the home?

Agents in network namespaces, joined by one software switch whose ports have one rate each way;
READs and TCP both pass them. One node keeps all blocks. In each round, readers that hold nothing of
it ask for the same blocks in the same order, each some time after the one before: so far apart that
maybe nobody shares the first segment, and near enough that nearly all could come once for all.

Ways to ask: `prefetch` has the agent fetch everything, and gets the blocks as they come, as
connectors of engines do; `batch` is one get of all blocks, `single` one get after the other, both
by the courier.

Before each round nothing is read for so long that agents do not remember whether they had company.
`home_egress_ratio`: bytes that left the home ÷ bytes of the distinct blocks, of each round.
`last_over_lone`: how long the slowest reader waited, from its own question on ÷ the median of a
reader that was alone, in rounds before. `met`: blocks that the home told readers by TCP to READ,
since others wanted them, too. Every byte is compared with what its key demands.

    python -m kvcast.bench.apart --json apart.json

Namespaces need root.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvcast.bench.engines.ways import OneNetwork
from kvcast.bench.incast import home_keys
from kvcast.bench.replay import EgressMeter, NodeLink, links_to
from kvcast.hostagent.client import Block
from kvcast.service.provenance import provenance
from kvcast.service.reports import add_json, report_to, say
from kvcast.service.statistics import percentile, ratio
from kvcast.topologies.namespaces import why_not
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star
from kvcast.workloads import content

HOME: Final = "node-1"
WAYS: Final = ("prefetch", "batch", "single")
DEADLINE_S: Final = 120.0
QUEUE_FRAMES: Final = 512
"""What waits at a port of the switch at most."""
FORGOTTEN_S: Final = 5.2
"""After so long without reads an agent does not remember whether they were shared
(`RequesterConfig.sharing_memory_s`)."""
LONE_ROUNDS: Final = 3
_BATCH_BYTES: Final = 4 << 20
_MET: Final = "reads_met_total"


@dataclass(frozen=True)
class Options:
    """One run; rates in bits a second, times in milliseconds."""

    readers: int
    blocks: int
    block_bytes: int
    rounds: int
    apart_ms: tuple[float, float]
    """Each reader begins so long after the one before, drawn for each round."""
    link_rate: float
    seed: int


@dataclass
class _Found:
    """What one way has come to."""

    lone_s: list[float] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    misses: int = 0
    wrong_bytes: int = 0

    def report(self) -> dict[str, Any]:
        lone_s = percentile(self.lone_s, 0.5)
        report: dict[str, Any] = {"lone_s": lone_s, "misses": self.misses}
        for name in ("home_egress_ratio", "last_over_lone"):
            values = sorted(one[name] for one in self.rounds)
            shares = {"least": 0.0, "p50": 0.5, "p90": 0.9, "most": 1.0}
            report[name] = {n: percentile(values, share) for n, share in shares.items()}
        return report | {"rounds": self.rounds}


async def _read(
    way: str, link: NodeLink, namespace: int, keys: Sequence[bytes], found: _Found
) -> float:
    """One reader reads everything; how long it waited, in seconds."""
    client = await link.client()
    began = time.monotonic()
    came = 0

    def take(key: bytes, block: Block | None) -> int:
        if block is None:
            return 0
        with block:
            found.wrong_bytes += content.wrong_bytes(key, block.size_bytes, block.data)
        return 1

    if way == "prefetch":
        await client.prefetch(namespace, list(keys), DEADLINE_S)
        async for place, outcome in client.get_each(namespace, list(keys), DEADLINE_S):
            came += take(keys[place], outcome.block)
    else:
        for batch in [[key] for key in keys] if way == "single" else [list(keys)]:
            blocks = await client.get(namespace, batch, DEADLINE_S)
            came += sum(map(take, batch, blocks))
    found.misses += len(keys) - came
    return time.monotonic() - began


async def _round(
    options: Options,
    way: str,
    links: Sequence[NodeLink],
    late_ms: Sequence[float],
    label: object,
    pool: Pool,
    found: _Found,
) -> tuple[float | None, float, float]:
    """Fresh blocks, read by so many readers: (copies, the slowest one's seconds, blocks met)."""
    home, meter = links[0], EgressMeter(links[:1])
    client = await home.client()
    namespace = await client.namespace("bench", "apart", "1", f"{options.block_bytes} bytes")
    keys = home_keys(pool, HOME, options.blocks, (options.seed, label))
    step = max(1, _BATCH_BYTES // options.block_bytes)
    for at in range(0, len(keys), step):
        some = {k: content.block_bytes(k, options.block_bytes) for k in keys[at : at + step]}
        await client.put(namespace, some)
    await asyncio.sleep(FORGOTTEN_S)
    before = await meter.read()
    met = (await client.stats()).get(_MET, 0.0)

    async def one(link: NodeLink, after_ms: float) -> float:
        await link.client()
        await asyncio.sleep(after_ms / 1e3)
        return await _read(way, link, namespace, keys, found)

    took_s = await asyncio.gather(*map(one, links[1:], late_ms))
    copies = ratio(await meter.read() - before, options.blocks * options.block_bytes)
    met = (await client.stats()).get(_MET, 0.0) - met
    await client.drop(namespace, keys)
    return copies, max(took_s), met


async def run(options: Options, ways: Sequence[str]) -> dict[str, Any]:
    """All rounds of all ways, each on a pool of its own."""
    found: dict[str, _Found] = {}
    for way in ways:
        star = Star.of(options.readers + 1)
        pool = Pool(
            star,
            PoolOptions(
                runner="namespaces",
                replicas=0,
                homes=(HOME,),
                admit="off",
                arena_bytes=max(64 << 20, 4 * options.blocks * options.block_bytes),
                link_rate_bits_per_s=options.link_rate,
                lease_s=30.0,
                switch_flags=(f"--queue-depth={QUEUE_FRAMES}",),
                agent_flags=("--lone-reads=tcp",),
            ),
        )
        pool.network = OneNetwork(star)
        mine = found[way] = _Found()
        draw = random.Random(options.seed)
        async with pool, links_to([pool.sockets[h.node_id] for h in star.hosts]) as links:
            await _round(
                options, way, links, [0.0] * options.readers, (way, "first"), pool, _Found()
            )
            for number in range(LONE_ROUNDS):
                label = (way, "lone", number)
                _, took_s, _ = await _round(options, way, links[:2], [0.0], label, pool, mine)
                mine.lone_s.append(took_s)
            lone_s = percentile(mine.lone_s, 0.5)
            assert lone_s is not None
            for number in range(options.rounds):
                late_ms = [0.0]
                while len(late_ms) < options.readers:
                    late_ms.append(late_ms[-1] + draw.uniform(*options.apart_ms))
                order = draw.sample(links[1:], options.readers)
                copies, took_s, met = await _round(
                    options, way, [links[0], *order], late_ms, (way, number), pool, mine
                )
                mine.rounds.append(
                    {
                        "late_ms": [round(one, 1) for one in late_ms],
                        "home_egress_ratio": copies,
                        "last_over_lone": ratio(took_s, lone_s),
                        "met": met,
                    }
                )
                say(f"{way}: {mine.rounds[-1]}")
            pool.check_alive()
    return {
        "bench": "apart",
        "ways": {way: one.report() for way, one in found.items()},
        "wrong_bytes": sum(one.wrong_bytes for one in found.values()),
        "parameters": vars(options),
        "provenance": provenance(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--apart",
        type=float,
        nargs=2,
        default=(5.0, 60.0),
        metavar="MS",
        help="a reader begins so long after the one before, from and to",
    )
    parser.add_argument("--link-rate", type=float, default=50e6, help="of every link, bits/s")
    parser.add_argument("--seed", type=int, default=1)
    add_json(parser)
    given = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    options = Options(
        *(given.readers, given.blocks, given.block_bytes, given.rounds),
        *(tuple(given.apart), given.link_rate, given.seed),
    )
    report = asyncio.run(run(options, given.ways))
    report_to(given.json, report)
    return int(report["wrong_bytes"] > 0 or any(w["misses"] for w in report["ways"].values()))


if __name__ == "__main__":
    sys.exit(main())
