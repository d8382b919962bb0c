"""How long is a node's arena out of reach when its agent dies or is upgraded, and what is lost?

Four questions, each of a pool of separate processes, with agents that keep their arenas:

- **restart**: an arena of 1 to 10 GiB full of blocks; the agent gets SIGKILL. Measured from that
  signal until a client that connects then has its first block, served by the next agent, and has
  compared every byte of it. Then every block is read back and compared.
- **upgrade**: three nodes under a load of gets and puts; one agent after the other is replaced by
  `kvcast agent --takeover`. Counted: gets that did not bring the block, and blocks that were put
  and are gone.
- **scale**: a node joins three others, and then one is drained and stopped, under load, with one
  copy of every block. The readers' node holds no bucket, and next to nothing of what it has read.
  Counted: gets that did not bring the block, blocks that are gone, and those of the newcomer's
  share that it does not have when it is said to (`scale_missing_share`).
- **loss**: three nodes with two copies of every block; puts that wait for both. One node is killed,
  its supervisor too, and its arena removed. Counted: acknowledged blocks that are gone.

A restart is measured several times a size; the median is reported, and the longest beside it. The
arenas lie in shared memory: `--sizes-gib 1,2` where there is less of it.

    python -m kvcast.bench.restart --json restart.json --plot restart.png
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any, Final

from kvcast.bench.usage import agents_of, children_of
from kvcast.controller.core.placement import place
from kvcast.hostagent.client import AsyncClient, Client, KvcastError
from kvcast.protocol.messages.wire import bucket_of
from kvcast.service.provenance import provenance
from kvcast.service.reports import add_json, report_to, say
from kvcast.service.values import number, parse_size, whole_number
from kvcast.topologies.pool import Pool, PoolError, PoolOptions
from kvcast.topologies.star import Star
from kvcast.workloads import content

GIB: Final = 1 << 30
SIZES_GIB: Final = (1, 2, 4, 7, 10)
BLOCK_BYTES: Final = 1 << 20
TRIALS: Final = 5
FILL: Final = 0.98
"""How much of an arena is filled; the rest is room for what is put while it is measured."""
GET_DEADLINE_S: Final = 10.0
UPGRADE_BLOCK_BYTES: Final = 64 << 10
UPGRADE_BLOCKS: Final = 300
READERS_A_NODE: Final = 4
SCALE_BLOCKS: Final = 600
HANDOVER_RATE: Final = 8 << 20
"""Bytes a second that one node hands over; so slow that there is time to fail meanwhile."""
SCALE_WITHIN_S: Final = 60.0
_BETWEEN_TRIALS_S: Final = 1.5
"""Longer than an agent that dies counts as one that dies at once."""


def key_of(number: int, tag: int) -> bytes:
    """The `number`-th key of a run; keys lie in all buckets alike."""
    return ((tag << 64) | (number << 10) | number % 1024).to_bytes(16, "big")


# --- restart --------------------------------------------------------------------------------------


def measure_restarts(pool: Pool, arena_bytes: int, block_bytes: int, trials: int) -> dict[str, Any]:
    """Fill the arena of the only node, kill its agent again and again, verify."""
    path = str(pool.sockets["node-1"])
    supervisor = pool.pids["node-1"]
    assert supervisor is not None
    count = int(arena_bytes * FILL) // block_bytes
    keys = [key_of(number, 1) for number in range(count)]
    with Client(path) as client:
        namespace = client.namespace("bench", "m", "1", "restart")
        for number, key in enumerate(keys):
            client.put(namespace, {key: content.block_bytes(key, block_bytes)}, ack="local")
            if number % (GIB // block_bytes) == 0:
                say(f"filled {number * block_bytes / GIB:.0f} of {arena_bytes / GIB:.0f} GiB")
        times_ms, whole_ms = [], []
        for trial in range(trials):
            time.sleep(_BETWEEN_TRIALS_S)
            key = keys[(trial + 1) * count // (trials + 1)]
            took_ms = _kill_and_get(path, supervisor, namespace, key, block_bytes)
            whole_ms.append(took_ms + _until_recovered(client))
            times_ms.append(took_ms)
            say(f"  restart {trial + 1}: first block after {took_ms:.1f} ms")
        wrong = missing = 0
        for key in keys:
            (block,) = client.get(namespace, [key], GET_DEADLINE_S)
            if block is None:
                missing += 1
                continue
            with block:
                wrong += content.wrong_bytes(key, block_bytes, block.data) > 0
    return {
        "arena_gib": arena_bytes / GIB,
        "blocks": count,
        "block_bytes": block_bytes,
        "first_block_ms": statistics.median(times_ms),
        "first_block_ms_max": max(times_ms),
        "first_block_ms_all": times_ms,
        "all_verified_by_agent_ms": statistics.median(whole_ms),
        "wrong_blocks": wrong,
        "missing_blocks": missing,
    }


def _kill_and_get(
    path: str, supervisor: int, namespace: int, key: bytes, block_bytes: int
) -> float:
    """SIGKILL to the agent; milliseconds until a new client has a block, every byte compared."""
    wanted = content.block_bytes(key, block_bytes)
    agent = agents_of(supervisor)[0]
    begun = time.perf_counter()
    os.kill(agent, signal.SIGKILL)
    with Client(path) as client:
        (block,) = client.get(namespace, [key], GET_DEADLINE_S)
        assert block is not None, "the block is gone"
        same = block.data == wanted
        took_ms = (time.perf_counter() - begun) * 1e3
        assert same, "the block's bytes are wrong"
        assert set(agents_of(supervisor)) - {agent}, "nothing was restarted"
        block.release()
    return took_ms


def _until_recovered(client: Client) -> float:
    """Milliseconds from now until the agent has checked every block."""
    begun = time.perf_counter()
    while client.stats()["recovery_left"]:
        time.sleep(0.01)
    return (time.perf_counter() - begun) * 1e3


async def restart(
    sizes_gib: Sequence[float], block_bytes: int, trials: int
) -> list[dict[str, Any]]:
    """A figure for each size."""
    figures = []
    for size in sizes_gib:
        arena_bytes = int(size * GIB)
        free = os.statvfs("/dev/shm")
        if free.f_bavail * free.f_frsize < arena_bytes * 1.05:
            say(f"no room in /dev/shm for {size:g} GiB: left out")
            continue
        options = PoolOptions(
            plain=True,
            admit="off",
            replicas=0,
            arena_bytes=arena_bytes,
            agent_flags=("--arena-keep", "--client-share=1"),
        )
        async with Pool(Star.of(1), options) as pool:
            figures.append(
                await asyncio.to_thread(measure_restarts, pool, arena_bytes, block_bytes, trials)
            )
    return figures


# --- upgrade --------------------------------------------------------------------------------------


class Load:
    """Clients on all nodes that read blocks of the others, and put new ones."""

    def __init__(
        self,
        pool: Pool,
        namespace: int,
        keys: list[bytes],
        without: Collection[str] = (),
    ) -> None:
        """`without`: nodes that have no clients."""
        self._sockets = [path for name, path in pool.sockets.items() if name not in without]
        self.gets = 0
        self.failed: list[str] = []
        self.puts = 0
        self.put_failures: list[str] = []
        self.longest_get_s = 0.0
        self.acknowledged = keys
        self._pool = pool
        self._namespace = namespace
        self._stopped = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with contextlib.AsyncExitStack() as stack:
            tasks = []
            for node, path in enumerate(self._sockets):
                client = await stack.enter_async_context(await AsyncClient.connect(str(path)))
                tasks += [
                    asyncio.create_task(self._read(client, node * READERS_A_NODE + reader))
                    for reader in range(READERS_A_NODE)
                ]
                tasks.append(asyncio.create_task(self._put(client, node)))
            try:
                yield self
            finally:
                self._stopped = True
                await asyncio.gather(*tasks)

    def figures(self) -> dict[str, Any]:
        """What came of it."""
        return {
            "gets": self.gets,
            "failed_reads": len(self.failed),
            "failures": sorted(set(self.failed))[:5],
            "longest_get_ms": self.longest_get_s * 1e3,
            "puts": self.puts,
            "failed_puts": len(self.put_failures),
            "put_failures": sorted(set(self.put_failures))[:5],
        }

    async def _read(self, client: AsyncClient, reader: int) -> None:
        number = reader * 7919
        while not self._stopped:
            number += 1
            key = self.acknowledged[number % len(self.acknowledged)]
            begun = time.perf_counter()
            self.gets += 1
            try:
                (block,) = await client.get(self._namespace, [key], GET_DEADLINE_S)
            except KvcastError as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                continue
            self.longest_get_s = max(self.longest_get_s, time.perf_counter() - begun)
            if block is None:
                self.failed.append("miss")
                continue
            with block:
                if content.wrong_bytes(key, UPGRADE_BLOCK_BYTES, block.data):
                    self.failed.append("wrong bytes")
            await asyncio.sleep(0)

    async def _put(self, client: AsyncClient, node: int) -> None:
        number = 0
        while not self._stopped:
            number += 1
            key = key_of(number, 100 + node)
            self.puts += 1
            try:
                data = content.block_bytes(key, UPGRADE_BLOCK_BYTES)
                await client.put(self._namespace, {key: data})
            except KvcastError as error:
                self.put_failures.append(f"{type(error).__name__}: {error}")
            else:
                self.acknowledged.append(key)
            await asyncio.sleep(0.02)


async def _filled(pool: Pool, count: int, *, ack: Any = "") -> tuple[int, list[bytes]]:
    keys = [key_of(number, 2) for number in range(count)]
    async with await AsyncClient.connect(str(pool.sockets["node-1"])) as client:
        namespace = await client.namespace("bench", "m", "1", "upgrade")
        for key in keys:
            await client.put(
                namespace, {key: content.block_bytes(key, UPGRADE_BLOCK_BYTES)}, ack=ack
            )
    return namespace, keys


async def _missing(path: Path, namespace: int, keys: Sequence[bytes]) -> int:
    """How many of these blocks cannot be had there, or are wrong."""
    missing = 0
    async with await AsyncClient.connect(str(path)) as client:
        for key in keys:
            (block,) = await client.get(namespace, [key], GET_DEADLINE_S)
            if block is None:
                missing += 1
                continue
            with block:
                missing += content.wrong_bytes(key, UPGRADE_BLOCK_BYTES, block.data) > 0
    return missing


async def upgrade(rounds: int) -> dict[str, Any]:
    """Replace every agent `rounds` times under load."""
    options = PoolOptions(replicas=0, arena_bytes=256 << 20, agent_flags=("--arena-keep",))
    async with Pool(Star.of(3), options) as pool:
        namespace, keys = await _filled(pool, UPGRADE_BLOCKS)
        took_ms = []
        async with Load(pool, namespace, keys).running() as load:
            for _ in range(rounds):
                for host in pool.star.hosts:
                    await asyncio.sleep(0.5)
                    begun = time.perf_counter()
                    await pool.take_over(host.node_id)
                    took_ms.append((time.perf_counter() - begun) * 1e3)
                    say(f"  {host.node_id} was upgraded in {took_ms[-1]:.0f} ms")
            await asyncio.sleep(0.5)
        lost = 0
        for path in pool.sockets.values():
            lost = max(lost, await _missing(path, namespace, load.acknowledged))
        pool.check_alive()
    return {
        "upgrades": len(took_ms),
        "upgrade_ms": statistics.median(took_ms),
        **load.figures(),
        "lost_blocks": lost,
    }


# --- loss -----------------------------------------------------------------------------------------


async def loss() -> dict[str, Any]:
    """Kill a node for good, and look for what was acknowledged."""
    options = PoolOptions(replicas=1, arena_bytes=256 << 20, agent_flags=("--arena-keep",))
    async with Pool(Star.of(3), options) as pool:
        namespace, keys = await _filled(pool, UPGRADE_BLOCKS, ack="replicas")
        victim = pool.star.hosts[-1].node_id
        supervisor = pool.pids[victim]
        assert supervisor is not None
        agents = children_of(supervisor)
        await pool.kill(victim)
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        for path in Path("/dev/shm").glob(f"*{pool.process_name}*{victim}.arena*"):
            path.unlink()
        lost = await _missing(pool.sockets["node-2"], namespace, keys)
    return {"blocks": len(keys), "lost_acknowledged": lost}


# --- scale out and in -----------------------------------------------------------------------------


async def _settled(pool: Pool, *, placed: set[str]) -> float:
    """Wait until these nodes, and no others, have the buckets; seconds."""
    begun = time.perf_counter()
    while time.perf_counter() < begun + SCALE_WITHIN_S:
        status = await pool.status()
        now = {node["node_id"] for node in status["nodes"] if node["placed"]}
        if status["settled"] and now == placed:
            return time.perf_counter() - begun
        await asyncio.sleep(0.1)
    raise PoolError(f"the blocks are not handed over after {SCALE_WITHIN_S:.0f} s: {status}")


async def _share_of(path: Path, wanted: int) -> int:
    """How many blocks a node holds by its own account. What was put at the last moment may still be
    on its way to it: it is waited for, but not for long."""
    async with await AsyncClient.connect(str(path)) as client:
        for _ in range(50):
            held = int((await client.stats())["blocks"])
            if held >= wanted:
                break
            await asyncio.sleep(0.1)
    return held


async def scale() -> dict[str, Any]:
    """Let a node join, and drain another, under load; each block has one copy."""
    star = Star.of(5)
    *nodes, reader = (host.node_id for host in star.hosts)
    options = PoolOptions(
        replicas=0,
        arena_bytes=256 << 20,
        agent_flags=(f"--handover-rate={HANDOVER_RATE}",),
        node_flags={reader: ("--arena-bytes=2MiB",)},
    )
    async with Pool(star, options) as pool:
        joins, leaves = nodes[-1], nodes[0]
        await pool.http("POST", "/v1/drain", {"node_id": reader})
        await pool.parts[joins].stop()
        await _settled(pool, placed={*nodes} - {joins})
        namespace, keys = await _filled(pool, SCALE_BLOCKS)
        async with Load(pool, namespace, keys, without={*nodes}).running() as load:
            await asyncio.sleep(1.0)
            await pool.restart(joins)
            joined_s = await _settled(pool, placed={*nodes})
            say(f"  {joins} has joined after {joined_s:.1f} s")
            put = list(load.acknowledged)
            homes = place(nodes, 1)
            owed = sum(homes[bucket_of(key)] == (joins,) for key in put)
            share = await _share_of(pool.sockets[joins], owed)
            say(f"  it has {share} blocks; its share of those before was {owed}")
            await pool.http("POST", "/v1/drain", {"node_id": leaves})
            drained_s = await _settled(pool, placed={*nodes} - {leaves})
            say(f"  {leaves} was drained after {drained_s:.1f} s")
            await asyncio.sleep(0.5)
        await pool.parts[leaves].stop()
        await asyncio.sleep(0.5)
        lost = await _missing(pool.sockets[reader], namespace, load.acknowledged)
        pool.check_alive(except_for=frozenset({leaves}))
    return {
        **load.figures(),
        "joined_s": joined_s,
        "blocks_of_the_newcomer": share,
        "share_of_the_newcomer": owed,
        "drained_s": drained_s,
        "handover_bytes_per_s": HANDOVER_RATE,
        "lost_blocks": lost,
    }


# --- the report -----------------------------------------------------------------------------------


def draw(figures: Sequence[dict[str, Any]], path: Path) -> None:
    """Arena size against the time to the first block, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=130, layout="constrained")
    axes = figure.subplots()
    sizes = [one["arena_gib"] for one in figures]
    for field, style, colour, label in (
        ("first_block_ms", "o-", "#0f7b6c", "median"),
        ("first_block_ms_max", "v", "#c2410c", "longest"),
    ):
        axes.plot(sizes, [one[field] for one in figures], style, color=colour, label=label)
    axes.axhline(50, color="#94a3b8", linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("arena, GiB")
    axes.set_ylabel("SIGKILL to first block served, ms")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": "kvcast"})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.restart",
        description=__doc__.splitlines()[0] if __doc__ else "",
    )
    parser.add_argument(
        "--sizes-gib",
        type=_sizes,
        default=",".join(map(str, SIZES_GIB)),
        help="arenas, in GiB (%(default)s); empty for none",
    )
    parser.add_argument("--block-bytes", type=parse_size, default=BLOCK_BYTES, metavar="SIZE")
    parser.add_argument("--trials", type=whole_number(1), default=TRIALS, help="restarts a size")
    parser.add_argument("--rounds", type=whole_number(1), default=2, help="upgrades of every agent")
    add_json(parser)
    parser.add_argument("--plot", type=Path, help="draw the restarts as a PNG")
    options = parser.parse_args()
    if options.sizes_gib and not 0 < options.block_bytes <= min(options.sizes_gib) * GIB / 16:
        parser.error("--block-bytes must be a sixteenth of the smallest arena at most")
    say("restart")
    figures = asyncio.run(restart(options.sizes_gib, options.block_bytes, options.trials))
    say("upgrade")
    upgraded = asyncio.run(upgrade(options.rounds))
    say("loss of a node")
    lost = asyncio.run(loss())
    say("scale out and in")
    scaled = asyncio.run(scale())
    report: dict[str, Any] = {
        f"restart_{one['arena_gib']:g}g_ms": one["first_block_ms"] for one in figures
    }
    report |= {
        "failed_reads": _failed_of(upgraded),
        "lost_blocks": upgraded["lost_blocks"],
        "lost_acknowledged": lost["lost_acknowledged"],
        "scale_failed_reads": _failed_of(scaled),
        "scale_lost_blocks": scaled["lost_blocks"],
        "scale_missing_share": max(
            0, scaled["share_of_the_newcomer"] - scaled["blocks_of_the_newcomer"]
        ),
        "restarts": figures,
        "upgrade": upgraded,
        "loss": lost,
        "scale": scaled,
        "provenance": provenance(),
    }
    report_to(options.json, report)
    if options.plot is not None:
        draw(figures, options.plot)
    return exit_status(report)


_NONE_OF_THESE: Final = (
    *("failed_reads", "lost_blocks", "lost_acknowledged"),
    *("scale_failed_reads", "scale_lost_blocks", "scale_missing_share"),
)


def exit_status(report: dict[str, Any]) -> int:
    """1 where anything was lost, wrong or failed, or was not tried."""
    wrong = sum(one["wrong_blocks"] + one["missing_blocks"] for one in report["restarts"])
    return int(wrong > 0 or any(report[name] != 0 for name in _NONE_OF_THESE))


def _failed_of(figures: dict[str, Any]) -> int | None:
    """Reads that failed; None of none."""
    return int(figures["failed_reads"]) if figures["gets"] else None


def _sizes(text: str) -> list[float]:
    return [number(0.03, 1024)(size) for size in text.split(",") if size]


if __name__ == "__main__":
    sys.exit(main())
