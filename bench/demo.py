"""The demo: one workload, replayed through a plain switch and then through kvcast.

Owns: how the workload is scaled to the machine, the two phases, the report. Must not know: how a
report is drawn (picture.py) or which flags asked for it (kvcast.cli.demo).

Scaling: before the first replay, a short calibration measures how many chunks a second the plain
pool delivers and how many blocks a second it takes in. From these follow the block size, how much
of the workload fits, and how far its time is stretched or compressed; the report says all three.
Both phases replay the same requests at the same times, each on a fresh pool.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcast.bench.outage import Outage, Phases, name_of, play_with_outage
from kvcast.bench.replay import NodeLink, Replay, ReplayOptions, Tally, links_to
from kvcast.hostagent.client import AsyncClient
from kvcast.service import provenance
from kvcast.topologies.pool import Pool, PoolError, PoolOptions, Runner, Switch
from kvcast.topologies.star import Star
from kvcast.workloads import content, generators, traces
from kvcast.workloads.generators import Demand, Request, WorkloadOptions, chain

CHUNK_BYTES = 1024
BLOCK_SIZES = (4096, 8192, 16384)
"""What a block may be scaled to: small enough that a prompt's blocks pass a software switch in a
fraction of a second, as they would pass a real one in microseconds."""

_STARTUP_S = 6.0
"""Of the budget, set aside for each pool's start and end and for the calibration."""
_BUSY_SHARE = 0.10
"""How much of the plain pool's measured rate the workload may ask for, so that it keeps up."""
_READS_WANTED = 600
"""Remote block reads that make the percentiles mean something; smaller blocks until they fit."""
_ARENA_BYTES = 192 << 20
_CALIBRATION_PUTS = 6
"""Blocks that each node puts to begin with."""
_CALIBRATION_BYTES = 65536
_HOW: dict[Runner, str] = {
    "processes": "as processes that UDP tunnels join",
    "namespaces": "in network namespaces",
    "mininet": "on the hosts of a Mininet network",
}
_KILL_AT_SHARE = 0.3
"""When a part is killed, as a share of the requests; the longer rest shows the recovery."""


@dataclass(frozen=True)
class DemoOptions:
    """One demo."""

    workload: str = "mix"
    """A generator's name; ignored if `trace` is set."""
    trace: Path | None = None
    """A trace in Mooncake's JSONL form."""
    star: Star = field(default_factory=lambda: Star.of(8))
    """The network: one switch and its nodes."""
    seconds_budget: float = 90.0
    """How long the whole demo may take, pools' starts and both replays included."""
    seed: int = 1
    dispatch: generators.Dispatch = "round-robin"
    time_scale: float | None = None
    """Seconds of the trace in one second of replay; None: chosen so that the part that fits
    spans the replay."""
    block_bytes: int | None = None
    """None: chosen by the calibration."""
    runner: Runner = "processes"
    switch: Switch = "switchsim"
    run_dir: Path | None = None
    log_level: str = "info"
    kill: str | None = None
    """A part (`outage.PARTS`) that is killed in the middle of the second replay."""


@dataclass(frozen=True)
class Speed:
    """What the calibration found."""

    chunks_per_s: float
    """Chunks of 1 KiB that a plain pool delivers to several readers together."""
    puts_per_s: float
    """Blocks of 64 KiB that the pool takes in."""


@dataclass(frozen=True)
class Plan:
    """The part of a workload that is replayed, and how."""

    requests: list[Request]
    demand: Demand
    block_bytes: int
    replay_s: float
    name: str
    description: str
    scaling: str
    """One sentence for people: block size, which part, how time was scaled."""


class Reporter:
    """Where the demo tells what it does; this one tells nobody."""

    def say(self, text: str) -> None:
        """A sentence about what comes next."""

    def phase(self, name: str, total: int) -> Callable[[int, int], None]:
        """A replay of `total` requests begins; the result is called with (done, total)."""
        return lambda done, total: None

    def end_phase(self) -> None:
        """The replay has ended."""


async def run(
    options: DemoOptions, reporter: Reporter, so_far: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run the demo and return its report; `so_far` gets the plain replay's part of it.

    PoolError if a pool does not start or dies, WorkloadError for a trace that cannot be read.
    """
    began = time.monotonic()
    lines = None if options.trace is None else traces.read_trace(options.trace)
    replay_s = max(5.0, (options.seconds_budget - 3 * _STARTUP_S) / 2)
    reporter.say(
        f"starting {len(options.star.hosts)} nodes, a controller and a switch, "
        f"{_HOW[options.runner]}; first the switch only forwards"
    )
    async with _pool(options, plain=True) as pool, _links(pool) as links:
        speed = await calibrate(links)
        reporter.say(
            f"this machine's software switch delivers about {speed.chunks_per_s:,.0f} chunks "
            f"of 1 KiB a second"
        )
        plan = make_plan(options, lines, speed, replay_s)
        reporter.say(plan.scaling)
        plain = await _replay(pool, links, plan, reporter, "plain switch")
        plain_switch = await _switch_counters(pool)
    runs = {"plain": plain.report(plan.block_bytes) | {"switch": plain_switch}}
    if so_far is not None:
        so_far |= _head(options, plan, speed) | {"runs": runs}
    done = [request for request in plan.requests if request.number in plain.done]
    if len(done) < len(plan.requests):
        reporter.say(
            f"the plain switch managed {len(done)} of {len(plan.requests)} requests in time; "
            "kvcast replays these"
        )
        plan = replace(plan, requests=done)
    reporter.say("the same requests again, now with kvcast in the switch")
    async with _pool(options, plain=False) as pool, _links(pool) as links:
        kvcast, outage = await _second_replay(pool, links, plan, reporter, options.kill)
        kvcast_switch = await _switch_counters(pool)
    runs["kvcast"] = kvcast.report(plan.block_bytes) | {"switch": kvcast_switch}
    report = _head(options, plan, speed) | _report(runs, time.monotonic() - began)
    return report if outage is None else report | {"outage": outage_report(kvcast, outage)}


def _pool(options: DemoOptions, *, plain: bool) -> Pool:
    pool_options = PoolOptions(
        runner=options.runner,
        switch=options.switch,
        plain=plain,
        arena_bytes=_ARENA_BYTES,
        seed=options.seed,
        log_level=options.log_level,
    )
    name = "plain" if plain else "kvcast"
    return Pool(options.star, pool_options, options.run_dir and options.run_dir / name)


def _links(pool: Pool) -> Any:
    return links_to([pool.sockets[host.node_id] for host in pool.star.hosts])


async def calibrate(links: list[NodeLink]) -> Speed:
    """Measure a plain pool for a second or two: blocks in, then some of them to several nodes."""
    clients = [await link.client() for link in links]
    namespace = await clients[0].namespace("bench", "calibration", "1", "64 KiB")
    puts = {
        node: [chain(b"calibration", (node, number)) for number in range(_CALIBRATION_PUTS)]
        for node in range(len(clients))
    }
    puts_s = 0.0
    for half in (slice(0, 1), slice(1, None)):  # the first opens connections, and is not counted
        began = time.monotonic()
        await asyncio.gather(
            *(
                clients[node].put(
                    namespace,
                    {key: content.block_bytes(key, _CALIBRATION_BYTES) for key in keys[half]},
                )
                for node, keys in puts.items()
            )
        )
        puts_s = time.monotonic() - began

    async def read(client: AsyncClient) -> int:
        arrived = 0
        for block in await client.get(namespace, puts[0], deadline_s=20.0):
            if block is not None:
                arrived += block.tier != "local"
                block.release()
        return arrived

    began = time.monotonic()
    arrived = sum(await asyncio.gather(*(read(client) for client in clients[1:4])))
    reads_s = time.monotonic() - began
    if not arrived:  # one node alone: everything is local
        arrived, reads_s = 1, 0.1
    return Speed(
        chunks_per_s=arrived * _CALIBRATION_BYTES / CHUNK_BYTES / max(reads_s, 1e-3),
        puts_per_s=(_CALIBRATION_PUTS - 1) * len(clients) / max(puts_s, 1e-3),
    )


def make_plan(
    options: DemoOptions,
    lines: list[traces.TraceLine] | None,
    speed: Speed,
    replay_s: float,
) -> Plan:
    """Scale the workload to the machine. See the module's text."""
    chunks = speed.chunks_per_s * _BUSY_SHARE * replay_s
    size = options.block_bytes or _block_bytes(chunks)
    chunks_per_block = max(1, -(-size // CHUNK_BYTES))
    room = _ARENA_BYTES * len(options.star.hosts) // (5 * size)  # homes' copies and readers' caches
    bounds = {
        "remote_reads": max(1, int(chunks / chunks_per_block)),
        "written": max(1, min(room, int(speed.puts_per_s * replay_s * 0.3))),
        "requests_at_most": max(1, int(25 * replay_s)),
    }
    wanted = WorkloadOptions(
        nodes=len(options.star.hosts), seed=options.seed, rate_per_s=1.0, dispatch=options.dispatch
    )
    span_s = 0.85 * replay_s
    if lines is None:
        requests, demand = generators.take(generators.generate(options.workload, wanted), **bounds)
        stretch = span_s / max(1e-3, requests[-1].time_s)
        requests = [replace(r, time_s=r.time_s * stretch) for r in requests]
        part = f"{len(requests)} requests, {1 / stretch:.1f} prompts a second"
        name, description = options.workload, generators.DESCRIPTIONS[options.workload]
    else:
        assert options.trace is not None
        scale = options.time_scale or 1.0
        stream = traces.trace_requests(lines, wanted, scale)
        if options.time_scale is not None:
            stream = itertools.takewhile(lambda request: request.time_s <= span_s, stream)
        requests, demand = generators.take(stream, **bounds)
        covered_s = requests[-1].time_s * scale
        if options.time_scale is None:
            stretch = span_s / max(1e-3, covered_s)
            requests = [replace(r, time_s=r.time_s * stretch) for r in requests]
            scale = 1 / stretch
        part = (
            f"the first {len(requests)} of the trace's {len(lines)} requests "
            f"({_duration(covered_s)} of {_duration(_span_s(lines))}), {_speedup(scale)}"
        )
        name = options.trace.name
        description = f"the trace {options.trace.name}, dispatched to the nodes {options.dispatch}"
    scaling = (
        f"scaled to this machine: blocks of {size // 1024} KiB; {part}: about "
        f"{demand.written} blocks written and {demand.remote_reads} reads of "
        f"{demand.distinct_remote} blocks that lie on another node, in {replay_s:.0f} s a replay"
    )
    return Plan(requests, demand, size, replay_s, name, description, scaling)


def _block_bytes(chunks: float) -> int:
    """The largest block of which enough can be read."""
    for size in reversed(BLOCK_SIZES):
        if chunks * CHUNK_BYTES / size >= _READS_WANTED:
            return size
    return BLOCK_SIZES[0]


def _span_s(lines: list[traces.TraceLine]) -> float:
    return (lines[-1].timestamp - lines[0].timestamp) / 1000


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _speedup(scale: float) -> str:
    if scale >= 1:
        return f"its time compressed {scale:.1f} times"
    return f"its time stretched {1 / scale:.1f} times"


def _make_replay(
    pool: Pool, links: list[NodeLink], plan: Plan, reporter: Reporter, name: str
) -> Replay:
    return Replay(
        plan.requests,
        links,
        [host.node_id for host in pool.star.hosts],
        ReplayOptions(block_bytes=plan.block_bytes, budget_s=plan.replay_s),
        on_progress=reporter.phase(name, len(plan.requests)),
    )


async def _replay(
    pool: Pool, links: list[NodeLink], plan: Plan, reporter: Reporter, name: str
) -> Tally:
    replay = _make_replay(pool, links, plan, reporter, name)
    try:
        tally = await replay.run()
    finally:
        reporter.end_phase()
    pool.check_alive()
    return tally


async def _second_replay(
    pool: Pool, links: list[NodeLink], plan: Plan, reporter: Reporter, kill: str | None
) -> tuple[Tally, Outage | None]:
    if kill is None:
        return await _replay(pool, links, plan, reporter, "kvcast"), None
    after = max(1, int(_KILL_AT_SHARE * len(plan.requests)))
    reporter.say(f"{name_of(pool, kill)} is killed after {after} requests, and started again")
    replay = _make_replay(pool, links, plan, reporter, "kvcast")
    try:
        tally, outage = await play_with_outage(pool, replay, kill, after)
    finally:
        reporter.end_phase()
    pool.check_alive()
    return tally, outage


def outage_report(tally: Tally, outage: Outage) -> dict[str, Any]:
    """What was killed when, and the hit rates before, during and after."""
    phases = Phases.of(tally, outage)
    return {
        "killed": outage.part,
        "killed_s": round(outage.killed_s, 2),
        "restarted_s": round(outage.restarted_s, 2),
        "restored_s": round(outage.restored_s, 2),
        "before": phases.before.as_dict(),
        "during": phases.during.as_dict(),
        "after": phases.after.as_dict(),
        "recovered": phases.recovered,
    }


async def _switch_counters(pool: Pool) -> dict[str, Any]:
    """The switch's counters by name, as the controller last read them."""
    await asyncio.sleep(2 * pool.options.tick_s)
    try:
        status = await pool.status()
    except (OSError, PoolError):
        return {}
    return {name: status.get(name) for name in ("decisions", "fills")}


def _head(options: DemoOptions, plan: Plan, speed: Speed) -> dict[str, Any]:
    """What is known before the replays."""
    return {
        "bench": "demo",
        "workload": {
            "name": plan.name,
            "description": plan.description,
            "scaling": plan.scaling,
            "requests": len(plan.requests),
            "written_blocks": plan.demand.written,
            "remote_reads": plan.demand.remote_reads,
            "distinct_remote_blocks": plan.demand.distinct_remote,
        },
        "parameters": {
            "nodes": len(options.star.hosts),
            "block_bytes": plan.block_bytes,
            "seconds_budget": options.seconds_budget,
            "replay_s": plan.replay_s,
            "seed": options.seed,
            "dispatch": options.dispatch,
            "trace": None if options.trace is None else options.trace.name,
            "runner": options.runner,
            "switch": options.switch,
            "chunks_per_s": round(speed.chunks_per_s),
            "puts_per_s": round(speed.puts_per_s),
        },
        **provenance.provenance(),
    }


def _report(runs: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The kvcast run's numbers on top, both runs in full below; wrong_bytes of both runs."""
    plain, kvcast = runs["plain"], runs["kvcast"]
    return {
        "gets": kvcast["gets"],
        "misses": kvcast["misses"],
        "wrong_bytes": plain["wrong_bytes"] + kvcast["wrong_bytes"],
        "home_egress_ratio": kvcast["home_egress_ratio"],
        "plain_home_egress_ratio": plain["home_egress_ratio"],
        "hits": kvcast["hits"],
        "fetch_ms": {name: run["fetch_ms"] for name, run in runs.items()},
        "runs": runs,
        "seconds": round(seconds, 1),
    }
