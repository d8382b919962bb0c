"""The demo: one workload, replayed through a plain switch and then through kvcast.

Owns: how the workload is scaled to the machine, the two phases, the report. Must not know: how a
report is drawn (picture.py) or which flags asked for it (kvcast.cli.demo).

Links: every node's link has one rate, each way, emulated at the switch's ports (docs/switchsim.md).
A short calibration without rates measures how many chunks a second this machine moves when all
nodes read at once; the rate is chosen so low that all links together carry only a part of that
(`rate_for`). Whether the links, and not the processors, were the limit is then measured too: a
lone get beside what its link needs for it, and how busy both were (load.py). Blocks that are put go
to their homes by TCP, beside the emulated links: what is measured is gets.

Scaling: from the rate follow the block size, how much of the workload fits, and how far its time is
stretched or compressed, so that the plain pool's gets would fill `_LINK_SHARE` of all links; the
report says all of it. Both phases replay the same requests at the same times, each on a fresh pool.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcast.bench import load
from kvcast.bench.outage import Outage, Phases, name_of, play_with_outage
from kvcast.bench.replay import NodeLink, Replay, ReplayOptions, Tally, links_to
from kvcast.hostagent.client import AsyncClient
from kvcast.service import provenance
from kvcast.topologies.pool import DATA_FRAME_BYTES, Pool, PoolError, PoolOptions, Runner, Switch
from kvcast.topologies.star import Star
from kvcast.workloads import content, generators, traces
from kvcast.workloads.generators import Demand, Request, WorkloadOptions, chain

CHUNK_BYTES = 1024
BLOCK_SIZES = (4096, 8192, 16384, 32768, 65536)
"""What a block may be scaled to: small enough that a prompt's blocks pass an emulated link in a
fraction of a second, as they would pass a real one in microseconds."""
_PREFIX_BLOCKS = 1
"""Blocks of a typical prefix. The blocks of a longer one lie on more homes, whose links share the
work of an incast, while the readers' own links carry all of them: the more there are, the less it
matters to the time of a get how often a home sends each."""
LINK_RATES = (1e6, 2e6, 5e6)
"""Bits a second that a link may be given. At the highest a block of 64 KiB takes 0.11 s: long
beside the tens of milliseconds for which workloads let homes gather, or a crowded machine leaves a
process waiting."""

_STARTUP_S = 6.0
"""Of the budget, set aside for each pool's start and end and for the calibration."""
_MACHINE_SHARE = 0.1
"""All links together carry so much at most of what the machine moves in one go: frames one by one,
at a link's pace, cost about ten times as much, and engines and the controller take their part."""
_LINK_SHARE = 0.3
"""How much of all links the plain pool's gets would fill, if requests came evenly."""
_BUSY_SHARE = 0.10
"""Links without a rate: how much of what the machine moves the workload may ask for."""
_REQUESTS_PER_S = 60
"""Requests at most: each takes processors some milliseconds, however small it is."""
_READS_WANTED = 600
"""Remote block reads that make the percentiles mean something; smaller blocks until they fit."""
_REQUEST_BYTES = 128 << 10
"""What a request may be for, if blocks can be small enough: traces have prompts of dozens."""
_ARENA_BYTES = 192 << 20
_CALIBRATION_PUTS = 32
"""Blocks that each node puts, and that another node reads, to begin with."""
_CALIBRATION_BYTES = 65536
_LONE_GET_S = 0.25
"""What a lone get should take a link."""
_LONE_GET_AT_MOST = 1.25
"""In times that its link needs: beyond, the machine made it wait."""
_BUSY_AT_MOST = 0.6
"""Of all processors, by the pool and its engines, in 95 of 100 half seconds: beyond, processes wait
for each other."""
_HOW: dict[Runner, str] = {
    "processes": "as processes that UDP tunnels join",
    "namespaces": "in network namespaces",
    "mininet": "on the hosts of a Mininet network",
}
_IN_FLIGHT = 256
"""Requests at once: enough that those that wait for a link do not keep others from asking."""
_READER_GROUPS = False
"""The answer to a reader group goes to all members. In a pool of eight nodes with two copies of
each block beside the writer's, about one rank of four holds what the others ask for, and its link
would carry it nevertheless: measured, a third more on the ranks' links. So ranks ask one by one, at
the same time, and the home gathers."""
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
    seconds_budget: float = 150.0
    """How long the whole demo may take, pools' starts and both replays included."""
    seed: int = 1
    dispatch: generators.Dispatch = "round-robin"
    time_scale: float | None = None
    """Seconds of the trace in one second of replay; None: chosen so that the part that fits
    spans the replay."""
    block_bytes: int | None = None
    """None: chosen by the calibration."""
    link_rate_bits_per_s: float | None = None
    """Of every node's link, each way; 0: links without a rate; None: chosen by the calibration."""
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
    """Chunks of 1 KiB that a plain pool delivers, all nodes together, over links without a rate."""
    puts_per_s: float
    """Blocks of 64 KiB that the pool takes in."""


@dataclass(frozen=True)
class LoneGet:
    """One get while nothing else happened."""

    size_bytes: int
    took_ms: float
    link_ms: float
    """What the frames of so many bytes take on the reader's link: no get can be faster."""

    @property
    def over_link(self) -> float:
        return self.took_ms / self.link_ms

    def report(self) -> dict[str, Any]:
        """The numbers as plain data."""
        return {
            "bytes": self.size_bytes,
            "ms": round(self.took_ms, 2),
            "link_ms": round(self.link_ms, 2),
        }


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
        f"{_HOW[options.runner]}; first to see what this machine can do"
    )
    async with _pool(options, plain=True, link_rate=0.0) as pool, _links(pool) as links:
        speed = await calibrate(links)
    link_rate = rate_for(options, speed)
    reporter.say(
        f"all nodes reading at once, it moves about {speed.chunks_per_s:,.0f} chunks of 1 KiB a "
        f"second: {_links_told(link_rate)}"
    )
    reporter.say("the plain switch first: it only forwards")
    async with _pool(options, plain=True, link_rate=link_rate) as pool, _links(pool) as links:
        lone = await lone_get(links, link_rate)
        if lone is not None:
            reporter.say(
                f"a lone get of {lone.size_bytes >> 10} KiB takes {lone.took_ms:.0f} ms; its link "
                f"needs {lone.link_ms:.0f} ms"
            )
        plan = make_plan(options, lines, speed, replay_s, link_rate)
        reporter.say(plan.scaling)
        async with load.measured(pool) as plain_load:
            plain = await _replay(pool, links, plan, reporter, "plain switch")
            plain_switch = await _switch_counters(pool)
    head = _head(options, plan, speed, link_rate, lone)
    runs = {"plain": _run_report(plain, plan, plain_switch, plain_load)}
    if so_far is not None:
        so_far |= head | {"runs": runs}
    done = [request for request in plan.requests if request.number in plain.done]
    if len(done) < len(plan.requests):
        reporter.say(
            f"the plain switch managed {len(done)} of {len(plan.requests)} requests in time; "
            "kvcast replays these"
        )
        plan = replace(plan, requests=done)
    reporter.say("the same requests again, now with kvcast in the switch")
    async with (
        _pool(options, plain=False, link_rate=link_rate) as pool,
        _links(pool) as links,
        load.measured(pool) as kvcast_load,
    ):
        kvcast, outage = await _second_replay(pool, links, plan, reporter, options.kill)
        kvcast_switch = await _switch_counters(pool)
    runs["kvcast"] = _run_report(kvcast, plan, kvcast_switch, kvcast_load)
    report = head | _report(runs, time.monotonic() - began)
    report["links_were_the_limit"] = links_were_the_limit(report)
    return report if outage is None else report | {"outage": outage_report(kvcast, outage)}


def _pool(options: DemoOptions, *, plain: bool, link_rate: float) -> Pool:
    pool_options = PoolOptions(
        runner=options.runner,
        switch=options.switch,
        plain=plain,
        link_rate_bits_per_s=link_rate,
        arena_bytes=_ARENA_BYTES,
        seed=options.seed,
        log_level=options.log_level,
    )
    name = "plain" if plain else "kvcast"
    return Pool(options.star, pool_options, options.run_dir and options.run_dir / name)


def _links(pool: Pool) -> Any:
    return links_to([pool.sockets[host.node_id] for host in pool.star.hosts])


def rate_for(options: DemoOptions, speed: Speed) -> float:
    """The rate of every link, bits a second: as asked for, or the highest of LINK_RATES at which
    all links together carry no more than `_MACHINE_SHARE` of what the machine moves."""
    if options.link_rate_bits_per_s is not None:
        return options.link_rate_bits_per_s
    if options.switch == "bmv2":
        return 0.0  # its ports have none
    frames_per_s = speed.chunks_per_s * _MACHINE_SHARE / len(options.star.hosts)
    fitting = [rate for rate in LINK_RATES if rate <= frames_per_s * 8 * DATA_FRAME_BYTES]
    return max(fitting, default=LINK_RATES[0])


def _links_told(rate: float) -> str:
    if not rate:
        return "links have no rate, so times are this machine's"
    return f"every node's link gets {rate / 1e6:g} Mb/s each way, emulated at the switch's ports"


async def calibrate(links: list[NodeLink]) -> Speed:
    """Measure a plain pool for a second or two: every node puts, then every node reads what another
    has put, all at once."""
    clients = [await link.client() for link in links]
    namespace = await clients[0].namespace("bench", "calibration", "1", "64 KiB")
    puts = [
        [chain(b"calibration", (node, number)) for number in range(_CALIBRATION_PUTS)]
        for node in range(len(clients))
    ]
    puts_s = 0.0
    for half in (slice(0, 1), slice(1, None)):  # the first opens connections, and is not counted
        began = time.monotonic()
        await asyncio.gather(
            *(
                client.put(
                    namespace,
                    {key: content.block_bytes(key, _CALIBRATION_BYTES) for key in keys[half]},
                )
                for client, keys in zip(clients, puts, strict=True)
            )
        )
        puts_s = time.monotonic() - began
    began = time.monotonic()
    arrived = sum(
        await asyncio.gather(
            *(
                _remote_blocks(client, namespace, puts[node - 1])
                for node, client in enumerate(clients)
            )
        )
    )
    reads_s = time.monotonic() - began
    if not arrived:  # one node alone: everything is local
        arrived, reads_s = 1, 0.1
    return Speed(
        chunks_per_s=arrived * _CALIBRATION_BYTES / CHUNK_BYTES / max(reads_s, 1e-3),
        puts_per_s=(_CALIBRATION_PUTS - 1) * len(clients) / max(puts_s, 1e-3),
    )


async def _remote_blocks(client: AsyncClient, namespace: int, keys: list[bytes]) -> int:
    """How many of these blocks come from elsewhere."""
    arrived = 0
    for block in await client.get(namespace, keys, deadline_s=20.0):
        if block is not None:
            arrived += block.tier != "local"
            block.release()
    return arrived


async def lone_get(links: list[NodeLink], link_rate: float) -> LoneGet | None:
    """One get on an idle plain pool, and what its link needs for it: the middle one of three. None
    without a rate, or where nothing lies elsewhere."""
    if not link_rate or len(links) < 2:
        return None
    block_s = _CALIBRATION_BYTES / CHUNK_BYTES * 8 * DATA_FRAME_BYTES / link_rate
    count = min(_CALIBRATION_PUTS, max(2, round(_LONE_GET_S / block_s)))
    writer, reader = await links[1].client(), await links[0].client()
    namespace = await writer.namespace("bench", "lone", "1", "64 KiB")
    gets = []
    for attempt in range(3):
        keys = [chain(b"lone", (attempt, number)) for number in range(count)]
        await writer.put(
            namespace, {key: content.block_bytes(key, _CALIBRATION_BYTES) for key in keys}
        )
        began = time.monotonic()
        arrived = await _remote_blocks(reader, namespace, keys)
        took_s = time.monotonic() - began
        gets.append(LoneGet(arrived * _CALIBRATION_BYTES, 1e3 * took_s, 1e3 * arrived * block_s))
    remote = sorted((get for get in gets if get.size_bytes), key=lambda get: get.over_link)
    return remote[len(remote) // 2] if remote else None


def make_plan(
    options: DemoOptions,
    lines: list[traces.TraceLine] | None,
    speed: Speed,
    replay_s: float,
    link_rate: float,
) -> Plan:
    """Scale the workload to the links, or, where they have no rate, to the machine. See the
    module's text."""
    span_s = 0.85 * replay_s
    nodes = len(options.star.hosts)
    if link_rate:
        chunks = _LINK_SHARE * nodes * link_rate / (8 * DATA_FRAME_BYTES) * span_s
    else:
        chunks = speed.chunks_per_s * _BUSY_SHARE * replay_s
    blocks = _PREFIX_BLOCKS if lines is None else max(1, round(_mean_blocks(lines)))
    size = options.block_bytes or _block_bytes(chunks, blocks)
    chunks_per_block = max(1, -(-size // CHUNK_BYTES))
    room = _ARENA_BYTES * nodes // (5 * size)  # homes' copies and readers' caches
    bounds = {
        "remote_reads": max(1, int(chunks / chunks_per_block)),
        "written": max(1, min(room, int(speed.puts_per_s * replay_s * 0.3))),
        "requests_at_most": max(1, int(_REQUESTS_PER_S * replay_s)),
    }
    wanted = WorkloadOptions(
        nodes=nodes,
        seed=options.seed,
        rate_per_s=1.0,
        prefix_blocks=_PREFIX_BLOCKS,
        dispatch=options.dispatch,
    )
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


def _block_bytes(chunks: float, blocks: int) -> int:
    """The largest block of which enough can be read, if a request is for so many of them."""
    for size in reversed(BLOCK_SIZES):
        if chunks * CHUNK_BYTES / size >= _READS_WANTED and size * blocks <= _REQUEST_BYTES:
            return size
    return BLOCK_SIZES[0]


def _mean_blocks(lines: list[traces.TraceLine]) -> float:
    return sum(len(line.hash_ids) for line in lines) / max(1, len(lines))


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
        ReplayOptions(
            block_bytes=plan.block_bytes,
            in_flight=_IN_FLIGHT,
            budget_s=plan.replay_s,
            gather=not pool.options.plain,
            reader_groups=_READER_GROUPS,
        ),
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


def _run_report(
    tally: Tally, plan: Plan, switch: dict[str, Any], measured: load.Load
) -> dict[str, Any]:
    return tally.report(plan.block_bytes) | {"switch": switch, "load": measured.report()}


def _head(
    options: DemoOptions, plan: Plan, speed: Speed, link_rate: float, lone: LoneGet | None
) -> dict[str, Any]:
    """What is known before the replays."""
    return {
        "bench": "demo",
        "link_rate_bps": link_rate or None,
        "lone_get": None if lone is None else lone.report(),
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


def links_were_the_limit(report: dict[str, Any]) -> bool | None:
    """Whether times are those of the emulated links, and not of this machine; None: without a rate
    they are the machine's in any case."""
    if not report["link_rate_bps"]:
        return None
    lone = report["lone_get"]
    in_time = lone is None or lone["ms"] <= _LONE_GET_AT_MOST * lone["link_ms"]
    busy = [run["load"]["processors_busy_p95"] for run in report["runs"].values()]
    return in_time and all(share is None or share <= _BUSY_AT_MOST for share in busy)


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
        "fetch_p50_ms": kvcast["fetch_ms"]["p50"],
        "fetch_p99_ms": kvcast["fetch_ms"]["p99"],
        "plain_fetch_p50_ms": plain["fetch_ms"]["p50"],
        "plain_fetch_p99_ms": plain["fetch_ms"]["p99"],
        "fetch_ms": {name: run["fetch_ms"] for name, run in runs.items()},
        "runs": runs,
        "seconds": round(seconds, 1),
    }
