"""One tenant at full blast: how much longer does another wait for its blocks?

Two tenants of equal weight in one pool of separate processes, over emulated links. All blocks have
one home. The quiet tenant gets a block now and then, so that it takes less than its share of the
home's link; the loud one's readers, on several nodes and on the quiet one's, too, get blocks as
fast as they come. No reader asks for a block that another reads just then, and the readers' arenas
are too small for what they read, so that every get goes to the home.

The gets of the quiet tenant are timed alone, with the loud one, and alone again;
`p99_with_over_without` is the 99th percentile of the second over that of the others together.

That is for blocks that go by READs. `tcp_p99_with_over_without` (fields `tcp_…`) is the same for
larger blocks, all but the first segment of which goes by TCP, as when a model is loaded: over a
link that the kernel keeps at its rate (`tc`), between network namespaces (root). With `--no-share`
the home does not know the rate of that link, and shares nothing.

`put_p99_with_over_without` (fields `put_…`) is the same for puts: both tenants put blocks to that
home, by TCP, and its link is kept at its rate where it comes in.

    python -m kvcast.bench.tenants --json tenants.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvcast.bench.incast import home_keys
from kvcast.bench.readers import Readers, end
from kvcast.hostagent.client import AsyncClient, KvcastError
from kvcast.service.commands import CommandError
from kvcast.service.provenance import provenance
from kvcast.service.reports import add_json, report_to, say
from kvcast.service.statistics import percentile, ratio
from kvcast.service.values import number, parse_size, whole_number
from kvcast.topologies.namespaces import why_not
from kvcast.topologies.pool import DATA_FRAME_BYTES, Pool, PoolOptions
from kvcast.topologies.star import Star
from kvcast.workloads import content

HOME: Final = "node-1"
QUIET: Final = "node-2"
_PACE: Final = 0.95
_BURST_FRAMES: Final = 4
"""That wait in the network, where nobody's weight counts. With twice as many the quiet tenant waits
2 % longer, and the loud one gets 3 % more."""
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Options:
    """One run."""

    nodes: int
    """Of the loud tenant, beside the quiet one's."""
    readers: int
    """Of the loud tenant on each node."""
    blocks: int
    """Of each tenant."""
    block_bytes: int
    link_rate: float
    pause_s: float
    """Of the quiet tenant, between a block and the next."""
    measure_s: float
    """Alone, with the other, and alone again, each."""
    seed: int
    tcp: bool = False
    """Blocks go by TCP."""
    puts: bool = False
    """They are put, and not got."""
    share: bool = True
    """The home knows what its link carries."""


@dataclass
class Tenant(Readers):
    """What a tenant's readers do, or those that put, and have got."""

    keys: list[bytes] = field(default_factory=list)
    """Keys to get,"""
    fresh: deque[bytes] = field(default_factory=deque)
    """and to put."""
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=8))
    """Those that were put last."""

    async def put(self, client: AsyncClient, pause_s: float) -> None:
        """Put one block after the other, until cancelled."""
        while True:
            key = self.fresh.popleft()
            data = content.block_bytes(key, self.size_bytes)
            begun = time.perf_counter()
            try:
                await client.put(self.namespace, {key: data}, ack="home")
            except KvcastError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            self.times_s.append(time.perf_counter() - begun)
            self.got_bytes += self.size_bytes
            self.last.append(key)
            if pause_s:
                await asyncio.sleep(pause_s)

    async def look(self, home: AsyncClient) -> None:
        """Look at what was put last, where it should be."""
        for key in self.last:
            (block,) = await home.get(self.namespace, [key])
            if block is None:
                self.misses += 1
                continue
            with block:
                self.wrong_bytes += content.wrong_bytes(key, self.size_bytes, block.data)


def pacing_flags(link_rate_bits_per_s: float) -> tuple[str, ...]:
    """Have homes send a little less than their links carry, and nothing ahead: what waits in the
    network has no weight any more."""
    frames_per_s = _PACE * link_rate_bits_per_s / (8 * DATA_FRAME_BYTES)
    return (f"--responder-rate={frames_per_s:g}", f"--responder-burst={_BURST_FRAMES}")


def _tcp_pool(options: Options) -> Pool:
    held = 2 * options.blocks * options.block_bytes
    nodes = 2 + options.nodes
    small = (f"--arena-bytes={max(8 * _MIB, held // 8 // _MIB * _MIB)}",)
    known = (f"--bulk-link-rate={options.link_rate:.0f}",) if options.share else ()
    return Pool(
        Star.of(nodes),
        PoolOptions(
            runner="namespaces",
            replicas=0,
            admit="off",
            seed=options.seed,
            arena_bytes=4 * held,
            controller_flags=("--no-hot-replicas", "--namespace-secrets=never"),
            node_flags={HOME: known} | {f"node-{2 + n}": small for n in range(nodes - 1)},
            log_level="warning",
        ),
    )


def _shape(pool: Pool, options: Options) -> None:
    """Give what the home sends by TCP, or what it is sent, a link of a rate, with a queue of a
    tenth of a second."""
    queue = ("rate", f"{options.link_rate:.0f}bit", "burst", "16kb", "latency", "100ms")
    part, device = HOME, "mgmt0"
    if options.puts:
        (port,) = (host.switch_port for host in pool.star.hosts if host.node_id == HOME)
        part, device = "switch", f"m{port}"
    made = subprocess.run(
        [*pool.network.prefix(part), "tc", "qdisc", "add", "dev", device, "root", "tbf", *queue],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise CommandError(f"tc: {made.stderr.strip()}")


def _reads_pool(options: Options) -> Pool:
    nodes = 2 + options.nodes
    held = 2 * options.blocks * options.block_bytes
    reader_arena = max(_MIB, options.blocks * options.block_bytes // 4 // _MIB * _MIB)
    readers = [f"node-{2 + number}" for number in range(nodes - 1)]
    return Pool(
        Star.of(nodes),
        PoolOptions(
            replicas=0,
            admit="off",
            seed=options.seed,
            arena_bytes=4 * held,
            link_rate_bits_per_s=options.link_rate,
            # The question is about one home's link: nobody else is to answer.
            # With secrets, the pool's keys are others, and so are their homes.
            controller_flags=("--no-hot-replicas", "--namespace-secrets=never"),
            agent_flags=pacing_flags(options.link_rate),
            node_flags=dict.fromkeys(readers, (f"--arena-bytes={reader_arena}",)),
            log_level="warning",
        ),
    )


async def run(options: Options) -> dict[str, Any]:
    """The report."""
    made = _tcp_pool(options) if options.tcp else _reads_pool(options)
    async with made as pool, contextlib.AsyncExitStack() as stack:
        home = await stack.enter_async_context(await AsyncClient.connect(str(pool.sockets[HOME])))
        keys = home_keys(pool, HOME, 2 * options.blocks, options.seed)
        tenants = []
        for name, mine in (("quiet", keys[::2]), ("loud", keys[1::2])):
            namespace = await home.namespace(name, "m", "1", "tenants")
            for key in mine:
                data = content.block_bytes(key, options.block_bytes)
                await home.put(namespace, {key: data})
            tenants.append(Tenant(namespace, options.block_bytes, keys=mine))
        quiet, loud = tenants
        if options.puts:
            seconds = 3 * options.measure_s + 20
            most = 100 + int(seconds * options.link_rate / 8 / options.block_bytes)
            for tenant in tenants:
                label = f"{options.seed} of {tenant.namespace}"
                tenant.fresh.extend(home_keys(pool, HOME, most, label))
        if options.tcp:
            _shape(pool, options)
        rng = random.Random(options.seed)
        loud_tasks: list[asyncio.Task[None]] = []

        async def begin(tenant: Tenant, node: str, pause_s: float) -> asyncio.Task[None]:
            client = await AsyncClient.connect(str(pool.sockets[node]))
            await stack.enter_async_context(client)
            if options.puts:
                return asyncio.create_task(tenant.put(client, pause_s))
            order = rng.sample(tenant.keys, len(tenant.keys))
            return asyncio.create_task(tenant.read(client, order, pause_s))

        quiet_task = await begin(quiet, QUIET, options.pause_s)
        await asyncio.sleep(2.0)
        phases: dict[str, list[float]] = {}
        loud_bytes_per_s = 0.0
        for phase in ("alone", "with", "alone again"):
            if phase == "with":
                loud_tasks = [
                    await begin(loud, f"node-{2 + node}", 0.0)
                    for node in range(options.nodes + 1)
                    for _ in range(options.readers)
                ]
                await asyncio.sleep(2.0)
            quiet.times_s, before = [], loud.got_bytes
            await asyncio.sleep(options.measure_s)
            phases[phase] = list(quiet.times_s)
            if phase == "with":
                loud_bytes_per_s = (loud.got_bytes - before) / options.measure_s
                await end(loud_tasks)
                await asyncio.sleep(2.0)
            p99_ms = _ms(phases[phase], 0.99)
            say(f"{phase}: {len(phases[phase])} blocks, p99 {p99_ms or 0:.1f} ms")
        await end([quiet_task])
        stats = await home.stats()
        way = "received_bulk_put" if options.puts else "sent_bulk_get"
        by_tcp = stats[f"payload_bytes_{way}_total"]
        for tenant in tenants:
            await tenant.look(home)
        pool.check_alive()
    without = [*phases["alone"], *phases["alone again"]]
    p50_over, p99_over = compared(phases["with"], without, loud_bytes_per_s)
    return {
        "p99_with_over_without": p99_over,
        "p99_without_ms": _ms(without, 0.99),
        "p99_with_ms": _ms(phases["with"], 0.99),
        "p50_with_over_without": p50_over,
        "p99_alone_ms": {name: _ms(times, 0.99) for name, times in phases.items()},
        "quiet_gets": {name: len(times) for name, times in phases.items()},
        "quiet_bytes_per_s": len(phases["with"]) * options.block_bytes / options.measure_s,
        "loud_bytes_per_s": loud_bytes_per_s,
        "link_bytes_per_s": options.link_rate / 8,
        "misses": quiet.misses + loud.misses,
        "wrong_bytes": quiet.wrong_bytes + loud.wrong_bytes,
        "errors": sorted({*quiet.errors, *loud.errors})[:5],
        "bytes_by_tcp": by_tcp,
        "pushed_blocks": stats.get("courier_put_taken_total", 0.0),
        "parameters": vars(options),
    }


def compared(
    with_s: list[float], without_s: list[float], loud_bytes_per_s: float
) -> tuple[float | None, float | None]:
    """How many times as long the quiet tenant's gets took with the loud one as without, at p50 and
    p99; None where there is nothing to compare: no gets, or nobody loud."""
    if not with_s or not without_s or not loud_bytes_per_s:
        return None, None
    p50, p99 = (
        ratio(percentile(with_s, share) or 0.0, percentile(without_s, share) or 0.0)
        for share in (0.50, 0.99)
    )
    return p50, p99


def _ms(times_s: list[float], share: float) -> float | None:
    """A percentile in milliseconds; None of nothing."""
    found = percentile(times_s, share)
    return None if found is None else 1e3 * found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.tenants",
        description=__doc__.splitlines()[0] if __doc__ else "",
    )
    parser.add_argument("--nodes", type=whole_number(1), default=4, help="of the loud tenant")
    parser.add_argument(
        "--readers", type=whole_number(1), default=4, help="of the loud tenant on each node"
    )
    parser.add_argument("--blocks", type=whole_number(1), default=64, help="of each tenant")
    parser.add_argument("--block-bytes", type=parse_size, default=64 << 10, metavar="SIZE")
    parser.add_argument("--link-rate", type=number(1e5), default=10e6, help="of every link, bits/s")
    parser.add_argument(
        "--pause", type=number(0), default=0.15, help="of the quiet tenant, seconds"
    )
    parser.add_argument("--measure", type=number(0.1), default=30.0, help="seconds of each phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tcp-block-bytes", type=parse_size, default=256 << 10, metavar="SIZE")
    parser.add_argument(
        "--tcp-link-rate", type=number(1e5), default=50e6, help="of the home's, bits/s"
    )
    parser.add_argument("--only", choices=("reads", "tcp", "puts"), help="one of the three")
    parser.add_argument("--no-share", action="store_true", help="of a link whose rate is not known")
    add_json(parser)
    given = parser.parse_args()
    if given.blocks <= 2 * given.readers * (given.nodes + 1):
        parser.error("there must be more than two blocks a reader, or readers meet")
    options = Options(
        *(given.nodes, given.readers, given.blocks, given.block_bytes),
        *(given.link_rate, given.pause, given.measure, given.seed),
    )
    report: dict[str, Any] = {"bench": "tenants"}
    if given.only in (None, "reads"):
        say("by READs")
        report |= asyncio.run(run(options))
    missing = why_not() or (None if shutil.which("tc") else "tc (iproute2) is not installed")
    for kind, puts in (("tcp", False), ("put", True)):
        if given.only not in (None, "puts" if puts else "tcp"):
            continue
        if missing is not None:
            report[kind] = f"left out: {missing}"
            continue
        say("puts" if puts else "by TCP")
        by_tcp = replace(
            options,
            block_bytes=given.tcp_block_bytes,
            link_rate=given.tcp_link_rate,
            tcp=True,
            puts=puts,
            share=not given.no_share,
        )
        report |= {f"{kind}_{name}": value for name, value in asyncio.run(run(by_tcp)).items()}
    report["provenance"] = provenance()
    report_to(given.json, report)
    return exit_status(report)


def exit_status(report: dict[str, Any]) -> int:
    """1 where bytes were wrong or did not come, or something could not be compared."""
    kinds = ("", "tcp_", "put_")
    bad = [f"{kind}{what}" for kind in kinds for what in ("wrong_bytes", "misses")]
    nothing = any(report.get(f"{kind}p99_with_over_without", 0) is None for kind in kinds)
    return int(nothing or any(report.get(name, 0) for name in bad))


if __name__ == "__main__":
    sys.exit(main())
