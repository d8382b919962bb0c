"""The question: N nodes read the same blocks at once; how often does each byte leave its home?

Owns: the incast bench, `kvcast bench incast`. Must not know: how the switch answers.

One home (node 1) holds K blocks; N further nodes ask for all of them at the same moment: all
clients are connected and armed, then released together, so that every get starts within one
round trip of the first (`start_spread_ms` says how far apart they really were). It runs twice, on
two pools of separate processes: with the switch program off (plain) and on.

home_egress_ratio = payload bytes that the home sent to readers, over UDP and TCP, divided by the
bytes of the distinct blocks. Every byte of every block is checked against what its key demands.

`--link-rate` emulates links of a speed, each way, at the switch's ports; choose it so low that
this machine is not the limit. One reader alone is then measured
too, and `over_one_reader` says how many times as long the last of N readers took: about N through
a plain switch, and about 1 where each byte leaves its home once.

`--resident` asks something else: the blocks are pinned into the switch, one node reads them once
so that they pass and fill it, N other nodes read one further block, since an agent's very first
read teaches it how large blocks are, the home is stopped (SIGSTOP), and they read. The home's
egress is read after it was woken again, so that a READ that had reached it would show. With
`--resident-part` below 1 only so many of the blocks are in the switch, and the others come from the
home, which goes on; its egress is compared with their bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcast.bench.replay import TIERS, EgressMeter, NodeLink, links_to
from kvcast.controller.core.placement import place
from kvcast.protocol.messages.wire import CHUNK_BYTES, bucket_of
from kvcast.service import provenance
from kvcast.service.options import bare, choice, file, option, size
from kvcast.service.statistics import ratio, summary
from kvcast.topologies.pool import Pool, PoolError, PoolOptions, Runner, Switch
from kvcast.topologies.star import MAX_HOSTS, Star
from kvcast.workloads import content
from kvcast.workloads.generators import chain

_BLOCKS_AT_MOST = 4096
_FILL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class IncastOptions:
    """One incast."""

    readers: int = option("nodes that read; the home is one more", default=8, parse=int)
    blocks: int = option(
        "distinct blocks that every reader asks for, in one get; an agent asks for 32 segments at "
        "once, so more of them also asks how well readers keep in step",
        default=8,
        parse=int,
        metavar="K",
    )
    block_bytes: int = size(
        "size of each block; a segment has 64 KiB", default=64 << 10, flag="block-size"
    )
    rounds: int = option(
        "repetitions on one pool, each with fresh blocks", default=1, parse=int, metavar="N"
    )
    loss: float = option(
        "probability of losing a frame each time it crosses a link (switchsim)",
        default=0.0,
        parse=float,
        metavar="P",
    )
    seed: int = option("seeds the loss and the keys", default=1, parse=int)
    home_rate: float = option(
        "most that the home sends, as its link would let it; 0: no limit",
        default=0.0,
        parse=float,
        unit="frames/s",
    )
    link_rate: float = option(
        "emulate links of this speed (100e6 = 100 Mb/s; Ethernet frames without preamble), slow "
        "enough that this machine is not the limit, and say how much longer the last reader took "
        "than one reader alone; 0: no limit",
        default=0.0,
        parse=float,
        unit="bits/s",
    )
    runner: Runner = choice(
        "UDP tunnels (no root), network namespaces or Mininet (root)",
        default="processes",
        choices=("processes", "namespaces", "mininet"),
    )
    switch: Switch = choice(
        "kvcast's software switch, or simple_switch_grpc from the PATH or "
        "KVCAST_SIMPLE_SWITCH_GRPC",
        default="switchsim",
        choices=("switchsim", "bmv2"),
    )
    gather_ms: int | None = option(
        "how long the readers, who know of the storm, let the home wait for joiners (0 to 255); "
        "by default 100 ms, and 12 ms a reader beyond eight, up to 250 ms, since they share this "
        "machine's processors and ask as late as those let them; 0 for resident blocks, of which "
        "no home gathers readers",
        default=None,
        parse=int,
        unit="ms",
    )
    resident: bool = bare("ask the resident question")
    resident_part: float = option(
        "in the resident question, this part of the blocks is in the switch (0 to 1), and the home "
        "sends the others",
        default=1.0,
        parse=float,
        metavar="P",
    )
    queue: int = option(
        "at most so many frames wait at each of the switch's ports (switchsim); 0: as many as it "
        "takes by default",
        default=0,
        parse=int,
        unit="frames",
    )
    run_dir: Path | None = file("keep all logs there", metavar="DIR")
    deadline_s: float = 60.0
    """How long a get may take before its blocks count as misses."""
    log_level: str = "info"

    @property
    def gather_allowed_ms(self) -> int:
        """`gather_ms`, or what stands for None."""
        if self.gather_ms is not None:
            return self.gather_ms
        if self.resident and self.resident_part == 1:
            return 0
        return min(250, 100 + 12 * max(0, self.readers - 8))

    def __post_init__(self) -> None:
        most = MAX_HOSTS - (2 if self.resident else 1)
        if not 1 <= self.readers <= most:
            raise PoolError(f"{self.readers} readers: a star has room for 1 to {most} of them")
        if not 1 <= self.blocks <= _BLOCKS_AT_MOST:
            raise PoolError(f"{self.blocks} blocks: choose 1 to {_BLOCKS_AT_MOST}")
        if not 1 <= self.block_bytes <= 256 << 20:
            raise PoolError("a block has 1 byte to 256 MiB")
        if self.gather_ms is not None and not 0 <= self.gather_ms <= 255:
            raise PoolError("the gather time is 0 to 255 ms")
        if self.home_rate < 0 or self.link_rate < 0:
            raise PoolError("a rate is not negative")
        if self.home_rate and self.link_rate:
            raise PoolError("the link rate limits the home already: leave the home's rate out")
        if self.rounds < 1:
            raise PoolError("there is at least one round")
        if self.resident and self.rounds > 1:
            raise PoolError("the resident question is asked in one round")
        if not 0 <= self.resident_part <= 1:
            raise PoolError("a part of the blocks is 0 to 1")
        if self.resident_part < 1 and not self.resident:
            raise PoolError("a part of the blocks is in the switch in the resident question only")
        if self.queue < 0:
            raise PoolError("a queue is not shorter than nothing")
        if self.queue and self.switch != "switchsim":
            raise PoolError("only kvcast's own switch is told how long its queues are")


@dataclass
class Outcome:
    """What one way of running the incast counted."""

    gets: int = 0
    misses: int = 0
    wrong_bytes: int = 0
    home_sent_bytes: float = 0.0
    distinct_bytes: int = 0
    fetch_ms: list[float] = field(default_factory=list)
    start_spread_ms: float = 0.0
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    switch: dict[str, Any] = field(default_factory=dict)

    @property
    def egress_ratio(self) -> float | None:
        return ratio(self.home_sent_bytes, self.distinct_bytes)

    def report(self) -> dict[str, Any]:
        """The numbers as plain data."""
        return {
            "gets": self.gets,
            "misses": self.misses,
            "wrong_bytes": self.wrong_bytes,
            "hits": self.hits,
            "home_egress_bytes": int(self.home_sent_bytes),
            "home_egress_ratio": self.egress_ratio,
            "distinct_bytes": self.distinct_bytes,
            "fetch_ms": summary(self.fetch_ms),
            "switch": self.switch,
        }


async def run(options: IncastOptions, so_far: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the incast and return its report; PoolError if a pool does not start or dies. `so_far`
    gets the runs' numbers as they come."""
    so_far = {} if so_far is None else so_far
    so_far |= {
        "bench": "incast-resident" if options.resident else "incast",
        "runs": {},
        "parameters": _parameters(options),
        **provenance.provenance(),
    }
    runs: dict[str, Any] = so_far["runs"]
    outcomes: dict[str, Outcome] = {}
    if options.resident:
        outcomes["kvcast"] = await _run_resident(options)
    else:
        asked = {"plain": options, "kvcast": options}
        if options.link_rate:
            asked = {"one_reader": replace(options, readers=1), **asked}
        for name, run_options in asked.items():
            outcomes[name] = await _run_pool(run_options, name, runs)
    return so_far | _report(outcomes)


def _pool(options: IncastOptions, nodes: int, name: str, **more: Any) -> Pool:
    held = options.blocks * options.rounds * _slab(options.block_bytes)
    pool_options = PoolOptions(
        runner=options.runner,
        switch=options.switch,
        replicas=0,  # one home: the question is about its link
        loss=options.loss,
        seed=options.seed,
        arena_bytes=max(16 << 20, 2 * held),
        link_rate_bits_per_s=options.link_rate,
        agent_flags=(f"--responder-rate={options.home_rate:g}",) if options.home_rate else (),
        switch_flags=(f"--queue-depth={options.queue}",) if options.queue else (),
        log_level=options.log_level,
        **more,
    )
    return Pool(Star.of(nodes), pool_options, options.run_dir and options.run_dir / name)


def _slab(size_bytes: int) -> int:
    """What a block may take in an arena: the next power of two."""
    return 1 << (size_bytes - 1).bit_length()


async def _run_pool(options: IncastOptions, name: str, runs: dict[str, Any]) -> Outcome:
    """Play all rounds on a pool; after each, `runs` has what was counted."""
    outcome = Outcome()
    pool = _pool(options, options.readers + 1, name, plain=name == "plain", admit="off")
    async with pool, links_to([pool.sockets[h.node_id] for h in pool.star.hosts]) as links:
        namespace = await _namespace(links[0], options)
        for round_number in range(options.rounds):
            keys = home_keys(pool, "node-1", options.blocks, (options.seed, round_number))
            await _put(links[0], namespace, keys, options.block_bytes)
            await _read_at_once(options, outcome, links[0], links[1:], namespace, keys)
            pool.check_alive()
            runs[name] = outcome.report()
        outcome.switch = await _switch_counters(pool)
    return outcome


async def _run_resident(options: IncastOptions) -> Outcome:
    # A long lease: the stopped home shall still count as a member, and its READs go its way.
    pool = _pool(options, options.readers + 2, "resident", admit="pin", lease_s=30.0)
    outcome = Outcome()
    async with pool, links_to([pool.sockets[h.node_id] for h in pool.star.hosts]) as links:
        namespace = await _namespace(links[0], options)
        first, *keys = home_keys(pool, "node-1", 1 + options.blocks, (options.seed, 0))
        await _put(links[0], namespace, [first, *keys], options.block_bytes)
        part = options.resident_part
        pinned = [key for n, key in enumerate(keys) if int((n + 1) * part) > int(n * part)]
        for key in pinned:
            await pool.http("POST", "/v1/pin", {"namespace": namespace, "key": key.hex()})
        if pinned:
            await _read_before(links[1], namespace, pinned, options)
        await _wait_filled(pool, len(pinned) * -(-options.block_bytes // CHUNK_BYTES))
        for reader in links[2:]:
            await _read_before(reader, namespace, [first], options)
        stopped = (pool, "node-1") if len(pinned) == len(keys) else None
        await _read_at_once(options, outcome, links[0], links[2:], namespace, keys, stopped=stopped)
        if stopped is None:
            outcome.distinct_bytes -= len(pinned) * options.block_bytes
        outcome.switch = await _switch_counters(pool)
    return outcome


def home_keys(pool: Pool, node_id: str, count: int, label: object) -> list[bytes]:
    """`count` keys whose home is that node, by the pool's present map."""
    ids = [host.node_id for host in pool.star.hosts]
    homes = place(ids, 1)
    mine = (key for key in _candidates(label) if homes[bucket_of(key)][0] == node_id)
    return list(itertools.islice(mine, count))


def _candidates(label: object) -> Iterator[bytes]:
    """An endless stream of keys."""
    return (chain(b"incast", (label, number)) for number in itertools.count())


async def _namespace(link: NodeLink, options: IncastOptions) -> int:
    client = await link.client()
    return await client.namespace("bench", "incast", "1", f"{options.block_bytes} bytes")


async def _put(link: NodeLink, namespace: int, keys: list[bytes], size_bytes: int) -> None:
    client = await link.client()
    batch = max(1, (4 << 20) // size_bytes)
    for first in range(0, len(keys), batch):
        part = keys[first : first + batch]
        await client.put(namespace, {key: content.block_bytes(key, size_bytes) for key in part})


async def _get(link: NodeLink, namespace: int, keys: list[bytes], options: IncastOptions) -> Any:
    client = await link.client()
    return await client.get(
        namespace, keys, deadline_s=options.deadline_s, gather_ms=options.gather_allowed_ms
    )


async def _read_before(
    link: NodeLink, namespace: int, keys: list[bytes], options: IncastOptions
) -> None:
    """A read that is not measured; PoolError if it fails."""
    outcome = Outcome()
    await _check(await _get(link, namespace, keys, options), keys, options, outcome)
    if outcome.misses or outcome.wrong_bytes:
        raise PoolError(f"a read before the one that is measured failed: {outcome.report()}")


async def _read_at_once(
    options: IncastOptions,
    outcome: Outcome,
    home: NodeLink,
    readers: list[NodeLink],
    namespace: int,
    keys: list[bytes],
    stopped: tuple[Pool, str] | None = None,
) -> None:
    """All readers get all keys, released together; counts and checks what they get."""
    meter = EgressMeter([home])
    before = await meter.read()
    for reader in readers:
        await reader.client()
    if stopped is not None:
        stopped[0].pause(stopped[1])
    release = asyncio.Event()
    started: list[float] = []

    async def one(reader: NodeLink) -> tuple[float, Any]:
        await release.wait()
        began = time.monotonic()
        started.append(began)
        blocks = await _get(reader, namespace, keys, options)
        return (time.monotonic() - began) * 1e3, blocks

    try:
        tasks = [asyncio.create_task(one(reader)) for reader in readers]
        await asyncio.sleep(0)
        release.set()
        for waited_ms, blocks in await asyncio.gather(*tasks):
            outcome.fetch_ms.append(waited_ms)
            await _check(blocks, keys, options, outcome)
    finally:
        if stopped is not None:
            stopped[0].resume(stopped[1])
    if stopped is not None:
        await asyncio.sleep(0.5)  # what waits in the home's socket is answered now, if anything
    outcome.start_spread_ms = max(outcome.start_spread_ms, (max(started) - min(started)) * 1e3)
    outcome.home_sent_bytes += await meter.read() - before
    outcome.distinct_bytes += len(keys) * options.block_bytes


async def _check(blocks: Any, keys: list[bytes], options: IncastOptions, outcome: Outcome) -> None:
    for key, block in zip(keys, blocks, strict=True):
        outcome.gets += 1
        if block is None:
            outcome.misses += 1
            outcome.hits["miss"] += 1
            continue
        with block:
            outcome.wrong_bytes += content.wrong_bytes(key, options.block_bytes, block.data)
            outcome.hits[block.tier] += 1
        await asyncio.sleep(0)


async def _wait_filled(pool: Pool, cells: int) -> None:
    """Wait until the switch says that it has filled that many cells; PoolError if it does not."""
    filled = 0.0
    for _ in range(round(_FILL_TIMEOUT_S / pool.options.tick_s)):
        fills = (await pool.status()).get("fills") or {}
        filled = sum(float(n) for name, n in fills.items() if name.lower() == "filled")
        if filled >= cells:
            return
        await asyncio.sleep(pool.options.tick_s)
    raise PoolError(f"the switch filled {filled:.0f} of {cells} cells of the pinned blocks")


async def _switch_counters(pool: Pool) -> dict[str, Any]:
    """The switch's decisions and fills; the controller reads them once a tick, so wait one."""
    await asyncio.sleep(2 * pool.options.tick_s)
    status = await pool.status()
    return {name: status.get(name) for name in ("decisions", "fills")}


def _parameters(options: IncastOptions) -> dict[str, Any]:
    return {
        "readers": options.readers,
        "blocks": options.blocks,
        "block_bytes": options.block_bytes,
        "rounds": options.rounds,
        "loss": options.loss,
        "seed": options.seed,
        "gather_ms": options.gather_allowed_ms,
        "home_rate": options.home_rate,
        "link_rate_bits_per_s": options.link_rate,
        "deadline_s": options.deadline_s,
        "resident": options.resident,
        "resident_part": options.resident_part,
        "queue_frames": options.queue or None,
        "runner": options.runner,
        "switch": options.switch,
        "replicas": 0,
    }


def _report(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """The kvcast run's numbers on top, all runs' in full below; `wrong_bytes` of all runs."""
    kvcast, plain, alone = (outcomes.get(name) for name in ("kvcast", "plain", "one_reader"))
    assert kvcast is not None
    over_one = {
        name: round(max(outcome.fetch_ms) / max(alone.fetch_ms), 4)
        for name, outcome in outcomes.items()
        if alone is not None and outcome is not alone
    }
    return {
        "home_egress_ratio": kvcast.egress_ratio,
        "plain_home_egress_ratio": None if plain is None else plain.egress_ratio,
        "home_egress_bytes": int(kvcast.home_sent_bytes),
        "gets": kvcast.gets,
        "misses": kvcast.misses,
        "wrong_bytes": sum(outcome.wrong_bytes for outcome in outcomes.values()),
        "hits": kvcast.hits,
        "fetch_ms": {name: summary(o.fetch_ms) for name, o in outcomes.items()},
        "over_one_reader": over_one or None,
        "start_spread_ms": {name: round(o.start_spread_ms, 2) for name, o in outcomes.items()},
        "distinct_bytes": kvcast.distinct_bytes,
        "runs": {name: outcome.report() for name, outcome in outcomes.items()},
    }
