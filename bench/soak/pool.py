"""The question: does a whole pool stay flat and whole under faults, for as long as one likes?

    kvcast bench soak --minutes 60 --json soak.json --out FOLDER

Owns: what runs beside what, what is watched, and the report. Must not know: how a fault is done
(faults.py), planned (plan.py) or judged (verdict.py).

A real pool of processes: one switch (kvcast's own, compiled), one controller, an agent a node, and
one node without an agent, which is the attacker's. Over it the workload `mix` without end, as fast
as this machine allows; every byte of every block is checked. Below their DRAM agents have a further
arena, a disk, both or neither, and all of them an object store; some keep their arena when they
end. Each namespace has a policy and a weight of its own; one lives by age, some may lie in the
object store. Who has what goes by the seed (plan.py). All the time frames are lost, and faults
strike by a seeded plan: parts killed and stopped, nodes drained and taken back, or gone and joined
anew, agents replaced by the next one over their arena, clients that die with pins, hostile frames
and bytes at every entry point, namespaces, groups, pins and drops by an operator. While blocks move
from node to node, a witness (witness.py) reads some that must be there.

Measured of every process over its life: memory of its own (MiB; without an agent's arena, which is
shared), descriptors, threads. Kills would hide a leak, so half of the agents are never killed, the
switch only in the first fifth of the soak, the controller only in the third (plan). Of the
load, by window: hit rate (outage.py: blocks that came / that a pool which loses nothing would have
held; arenas are small, so eviction keeps it below 1), misses, wrong bytes, blocks a second, fetch
times.

At the end the faults stop, and the pool has to be whole: every block put then is read everywhere,
and no more where it has outlived its age; no tier has given other bytes than it was given; no agent
holds bytes for a client that is gone, and nothing is left in /dev/shm or the temporary folders. The
criteria, with their bounds, stand in verdict.py and in the report; one that does not hold fails the
soak.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvcast.bench.hostile import tracebacks, wrong_bytes_of
from kvcast.bench.hostile_bytes import BLOCK_BYTES
from kvcast.bench.replay import NodeLink, ReplayOptions, links_to
from kvcast.bench.soak import plan
from kvcast.bench.soak.faults import Faults, moves_of
from kvcast.bench.soak.load import Load
from kvcast.bench.soak.options import SoakOptions
from kvcast.bench.soak.verdict import (
    Criterion,
    Growth,
    Window,
    growth_criteria,
    hit_rate_criterion,
    judged,
    none_of,
    some_of,
)
from kvcast.bench.soak.watch import Watch, leftovers
from kvcast.bench.usage import agents_of
from kvcast.hostagent.client import AsyncClient, KvcastError
from kvcast.service import provenance
from kvcast.topologies.pool import Pool, PoolError, PoolOptions
from kvcast.topologies.star import Star
from kvcast.workloads import content
from kvcast.workloads.generators import WorkloadOptions, chain, generate

BENCH = "bench"
"""The name under which this process itself is watched: the client library lives in it."""

_DEADLINE_S = 8.0
_PREPARED_REQUESTS = 2000
_SAMPLES = 1200
"""Over the whole soak, at least a second apart."""
_WINDOWS = 120
_PROGRESS_S = 10.0
_WHOLE_WITHIN_S = 90.0
_SETTLE_TRIES = 40
_SETTLE_S = 0.5
_LAST_BLOCKS = 8
_LAST_TTL_S = 2.0
_HEARD_WITHIN_S = 1.5
"""Agents hear of a namespace's settings with the next map, within a second."""
_OBJECTS_EVERY_S = 5.0
_TIERS = {"arena": plan.FURTHER_ARENA, "ssd": plan.DISK, "cold": plan.OBJECT_STORE}
"""What the client library calls the tiers below an agent's DRAM."""
_BULK_LINK_BITS_PER_S = 1_000_000_000
"""What agents believe of their links, so that namespaces share what leaves by TCP."""


async def run(
    options: SoakOptions, tell: Callable[[str], None], so_far: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Soak a pool; the report, whose `passed` says whether every criterion holds. `tell` gets a
    line every ten seconds. Where the soak is interrupted, `so_far` has what was counted until
    then. PoolError if the pool does not start."""
    with tempfile.TemporaryDirectory(prefix="kvcast-soak-") as folder:
        return await _run(options, tell, so_far, _Memory.of(options, Path(folder)))


@dataclass(frozen=True)
class _Memory:
    """What the nodes keep blocks in, beside their arenas."""

    tiers: dict[str, tuple[str, ...]]
    """By node id, the names in `plan`."""
    keepers: frozenset[str]
    """Nodes that keep their arena."""
    files: dict[str, list[Path]]
    """By node id, what it has below its DRAM."""
    flags: dict[str, tuple[str, ...]]
    """The agent's, by node id."""
    objects: Path
    """The object store."""

    @classmethod
    def of(cls, options: SoakOptions, folder: Path) -> _Memory:
        """By the options' seed, in that folder. There is no object store where what agents need
        for one is not installed."""
        hosts = Star.of(options.nodes).hosts
        sizes = {plan.FURTHER_ARENA: options.further_arena_bytes, plan.DISK: options.disk_bytes}
        has_store = options.object_bytes > 0 and importlib.util.find_spec("obstore") is not None
        keepers = {hosts[n].node_id for n in plan.keepers(options.seed, options.nodes)}
        tiers, files, flags = {}, {}, {}
        for host, drawn in zip(hosts, plan.lower_tiers(options.seed, options.nodes), strict=True):
            node = host.node_id
            lower = [name for name in drawn if sizes[name]]
            paths = {name: folder / f"{node}.{name.replace(' ', '-')}" for name in lower}
            words = ["--arena-keep"] if node in keepers else []
            if plan.FURTHER_ARENA in paths:
                size = sizes[plan.FURTHER_ARENA]
                words.append(f"--further-arena={paths[plan.FURTHER_ARENA]}={size}")
            if plan.DISK in paths:
                words += [f"--ssd={paths[plan.DISK]}", f"--ssd-bytes={sizes[plan.DISK]}"]
            if has_store:
                words.append(f"--cold=file://{folder / 'objects'}")
            tiers[node] = (*lower, *([plan.OBJECT_STORE] if has_store else []))
            files[node], flags[node] = list(paths.values()), tuple(words)
        (folder / "objects").mkdir()
        return cls(tiers, frozenset(keepers), files, flags, folder / "objects")


async def _run(
    options: SoakOptions,
    tell: Callable[[str], None],
    so_far: dict[str, Any] | None,
    memory: _Memory,
) -> dict[str, Any]:
    star = Star.of(options.nodes + 1)
    attacker = star.hosts[-1]
    pool = Pool(
        star,
        PoolOptions(
            arena_bytes=options.arena_bytes,
            loss=options.loss,
            seed=options.seed,
            log_level="warning",
            agent_flags=(f"--bulk-link-rate={_BULK_LINK_BITS_PER_S}",),
            node_flags=memory.flags,
        ),
        options.run_dir,
    )
    began = provenance.provenance()
    async with pool:
        await pool.kill(attacker.node_id)
        without = frozenset({attacker.node_id})
        await pool.wait_programmed(60.0, without=without)
        sockets = [pool.sockets[host.node_id] for host in star.hosts[:-1]]
        async with links_to(sockets, patient=False) as links, links_to(sockets) as patient:
            soak = _Soak(pool, links, patient, options, memory, tell)
            try:
                await soak.run()
                end = await soak.end(without)
            except BaseException:
                if so_far is not None:
                    so_far |= soak.counted() | began
                raise
        logged = tracebacks(pool)
        log_bytes = sum(part.log_path.stat().st_size for part in pool.parts.values())
    left = leftovers(pool.process_name)
    return soak.report(end, logged, log_bytes, left) | began


@dataclass
class _End:
    """What was found after the faults had stopped."""

    whole: str
    """Why the pool was not whole again; empty if it was."""
    unread: int
    """Blocks put then that some node could not read."""
    wrong_bytes: int
    held_bytes: dict[str, int]
    """By agent, what it holds for nobody."""
    evictions: int
    """Of the agents that lived all the time."""
    switch: dict[str, Any]
    aged: int = 0
    """Blocks that some node still got after their time."""
    damaged: list[str] = field(default_factory=list)
    """By agent and tier, blocks that had other bytes than were written."""


class _Soak:
    """One soak while it runs."""

    def __init__(
        self,
        pool: Pool,
        links: list[NodeLink],
        patient: list[NodeLink],
        options: SoakOptions,
        memory: _Memory,
        tell: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._links = links
        self._options = options
        self._memory = memory
        self._tell = tell
        self._objects_deleted = 0
        self._agents: dict[str, tuple[int | None, int]] = {}
        """Of agents that keep their arena: the process that the soak has started, and the agent."""
        self._settings: list[dict[str, Any]] = []
        self._seconds = 60 * options.minutes
        self._hosts = list(pool.star.hosts[:-1])
        self._attacker = pool.star.hosts[-1]
        self._watch = Watch()
        self._windows: list[Window] = []
        self._died: list[str] = []
        self._loss = _LostFrames(pool.switch_stats_path)
        self._load = Load(
            generate("mix", self._workload()),
            links,
            [host.node_id for host in self._hosts],
            ReplayOptions(
                block_bytes=BLOCK_BYTES,
                deadline_s=_DEADLINE_S,
                in_flight=options.in_flight * options.nodes,
            ),
            lambda node, since: self._faults.undisturbed(self._hosts[node].node_id, since),
            lambda: self._faults.witness.moving,
        )
        self._faults = Faults(
            pool,
            links,
            self._attacker,
            options.seed,
            lambda: list(self._load.recent),
            patient,
            memory.files,
            self._look,
        )
        self._plan = options.plan or plan.plan(options.seed, self._seconds, options.nodes)

    def _workload(self) -> WorkloadOptions:
        return WorkloadOptions(nodes=self._options.nodes, seed=self._options.seed)

    async def run(self) -> None:
        """The load, the faults and the watch, side by side."""
        first = itertools.islice(generate("mix", self._workload()), _PREPARED_REQUESTS)
        await self._load.prepare(first)
        await self._set_namespaces()
        await self._faults.witness.prepare()
        now = time.monotonic()
        self._load.begin(now)
        self._faults.begin(now)
        load = asyncio.create_task(self._load.run())
        watch = asyncio.create_task(self._keep_watch())
        lifecycle = asyncio.create_task(self._delete_objects())
        try:
            # A plan that was given is done to its end, however long that takes.
            until_s = self._seconds if self._options.plan is None else float("inf")
            await self._faults.run(self._plan, until_s)
            while (rest := self._seconds - self._faults.elapsed()) > 0:
                await asyncio.sleep(min(rest, 1.0))
                for task in (load, watch, lifecycle):
                    if task.done():
                        task.result()
        finally:
            for task in (load, watch, lifecycle):
                task.cancel()
            await asyncio.wait([load, watch, lifecycle])
        self._windows.append(self._load.cut())

    async def _set_namespaces(self) -> None:
        """Each namespace has a policy and a weight of its own, and perhaps more."""
        namespaces = self._load.namespaces
        self._settings = plan.settings_of(self._options.seed, len(namespaces))
        for namespace, settings in zip(namespaces, self._settings, strict=True):
            body = {"namespace": namespace, "settings": settings}
            await self._pool.http("PATCH", "/v1/namespaces", body)

    async def _delete_objects(self) -> None:
        """The object store's own rule: what is oldest is deleted, whoever is about to read it."""
        while True:
            self._objects_deleted += await asyncio.to_thread(
                delete_oldest, self._memory.objects, self._options.object_bytes
            )
            await asyncio.sleep(_OBJECTS_EVERY_S)

    async def _keep_watch(self) -> None:
        sample_s = max(1.0, self._seconds / _SAMPLES)
        window_s = max(1.0, self._seconds / _WINDOWS)
        next_window, next_line = window_s, _PROGRESS_S
        for number in itertools.count(1):
            at_s = self._faults.elapsed()
            self._look()
            self._loss.read()
            await self._look_after_parts()
            if at_s >= next_window:
                self._windows.append(self._load.cut())
                next_window = window_s * (int(at_s / window_s) + 1)
            if at_s >= next_line and self._windows:
                self._tell(self._progress(at_s))
                next_line += _PROGRESS_S
            await asyncio.sleep(max(0.1, number * sample_s - self._faults.elapsed()))

    def _look(self) -> None:
        """At every process that runs now."""
        self._watch.sample(self._faults.elapsed(), {**self._pids(), BENCH: os.getpid()})

    def _pids(self) -> dict[str, int | None]:
        """Of an agent that keeps its arena, both it and its supervisor."""
        pids = self._pool.pids
        for node in self._memory.keepers:
            supervisor = pids[node]
            agents = agents_of(supervisor) if supervisor is not None else []
            pids |= {node: agents[0] if agents else None, f"supervisor of {node}": supervisor}
            if agents:
                before = self._agents.get(node)
                self._agents[node] = (supervisor, agents[0])
                if before is not None and before[0] == supervisor and before[1] != agents[0]:
                    self._died.append(f"{node}, {self._faults.elapsed():.0f} s: its agent died")
        return pids

    async def _look_after_parts(self) -> None:
        """A part that nobody killed and that does not run is a find; the soak goes on."""
        away = {*self._faults.away, *self._faults.claimed, self._attacker.node_id}
        for name, part in self._pool.parts.items():
            if part.running or name in away:
                continue
            at_s = self._faults.elapsed()
            self._died.append(f"{name}, {at_s:.0f} s: {part.failure('died by itself')}")
            with contextlib.suppress(PoolError):
                await self._faults.revive(name)

    def _progress(self, at_s: float) -> str:
        window = self._windows[-1]
        rate = "–" if window.hit_rate is None else f"{100 * window.hit_rate:.0f} %"
        memory = []
        for part in ("switch", "controller", *(host.node_id for host in self._hosts), BENCH):
            life = self._watch.present(part)
            if life is not None:
                memory.append(f"{part} {life.memory_mib[-1]:.0f}")
        wrong = sum(each.wrong_bytes for each in self._windows)
        return (
            f"{at_s / 60:.1f} of {self._options.minutes:g} min: "
            f"{window.blocks_per_s:.0f} blocks/s, hit rate {rate}, {wrong} wrong bytes, "
            f"{len(self._load.hung)} hung, "
            f"{sum(self._faults.counts.values()):,} faults; MiB: {', '.join(memory)}"
        )

    # --- the end ------------------------------------------------------------------------------

    async def end(self, without: frozenset[str]) -> _End:
        """Look at the pool after the faults have stopped."""
        found = _End("", 0, 0, {}, 0, {})
        try:
            status = await self._pool.wait_programmed(_WHOLE_WITHIN_S, without=without)
            found.switch = {name: status.get(name) for name in ("decisions", "fills")}
            await self._read_everywhere(found)
            await self._age(found)
            await self._weigh(found)
        except (PoolError, KvcastError, OSError) as error:
            found.whole = str(error)
        return found

    async def _read_everywhere(self, found: _End) -> None:
        client = await self._links[0].client()
        namespace = await client.namespace("bench", "bench", "bench", f"{BLOCK_BYTES} bytes")
        keys = [chain(b"soak-end", number) for number in range(_LAST_BLOCKS)]
        await self._put_and_read(found, client, namespace, keys)

    async def _put_and_read(
        self, found: _End, client: AsyncClient, namespace: int, keys: list[bytes]
    ) -> None:
        """What is put by one is got by all."""
        await client.put(namespace, {key: content.block_bytes(key, BLOCK_BYTES) for key in keys})
        for link in self._links:
            wrong = await wrong_bytes_of(link, namespace, keys)
            found.unread += wrong.count(None)
            found.wrong_bytes += sum(count or 0 for count in wrong)

    async def _age(self, found: _End) -> None:
        """Blocks of a namespace whose time is short are read, and then they are not any more."""
        client = await self._links[0].client()
        namespace = await client.namespace("bench", "aged", "bench", f"{BLOCK_BYTES} bytes")
        settings = {"policy": "ttl", "ttl_s": _LAST_TTL_S, "media": ["dram", "ssd", "cold"]}
        body = {"namespace": namespace, "settings": settings}
        await self._pool.http("PATCH", "/v1/namespaces", body)
        await asyncio.sleep(_HEARD_WITHIN_S)
        keys = [chain(b"soak-aged", number) for number in range(_LAST_BLOCKS)]
        await self._put_and_read(found, client, namespace, keys)
        await asyncio.sleep(1.5 * _LAST_TTL_S)  # it counts from the last use, at every node
        for link in self._links:
            wrong = await wrong_bytes_of(link, namespace, keys)
            found.aged += len(keys) - wrong.count(None)

    async def _weigh(self, found: _End) -> None:
        """What agents hold when nobody asks for anything, once they are done with the rest."""
        for _ in range(_SETTLE_TRIES):
            found.evictions, found.damaged = 0, []
            for index, (host, link) in enumerate(zip(self._hosts, self._links, strict=True)):
                counters = await (await link.client()).stats()
                # Room for blocks that are yet to be named is kept ready, however long none comes.
                held_bytes = counters["arena_held_bytes"] - counters["arena_ready_bytes"]
                found.held_bytes[host.node_id] = int(held_bytes)
                found.damaged += [
                    f"{host.node_id}: {name} {count:.0f}"
                    for name, count in counters.items()
                    if count and name.endswith("damaged_total")
                ]
                if index < plan.spared(len(self._hosts)):
                    found.evictions += int(counters["store_evictions_total"])
            if not any(found.held_bytes.values()):
                return
            await asyncio.sleep(_SETTLE_S)

    # --- the report ---------------------------------------------------------------------------

    def _criteria(self, end: _End, logged: list[str], left: list[str]) -> list[Criterion]:
        bounds, windows, load = self._options.bounds, self._windows, self._load
        wrong = sum(window.wrong_bytes for window in windows) + end.wrong_bytes
        wrong += self._faults.witness.wrong_bytes
        growths = judged([life for life in self._watch.lives if life.part != BENCH], bounds)
        held = [f"{node}: {size:,} B" for node, size in end.held_bytes.items() if size]
        planned = {fault.kind for lane in self._plan.values() for fault in lane}
        missing = [kind for kind in plan.PLANNED if not self._faults.counts[kind]]
        witness = self._faults.witness
        lower = {name for tiers in self._memory.tiers.values() for name in tiers}
        return [
            none_of("wrong bytes", "none of all blocks", wrong),
            none_of("hangs", "every get ends, every hostile connection too", load.hung),
            none_of("deaths", "no part dies by itself", self._died),
            none_of("faults", "what is taken away can be given back", self._faults.problems),
            none_of("tracebacks", "no part logs one", logged),
            none_of(
                "errors", "the client library raises what it names", [repr(e) for e in load.errors]
            ),
            *growth_criteria(growths, bounds),
            none_of(
                "lives", "whoever has to live long did, and was judged", self._unjudged(growths)
            ),
            hit_rate_criterion(windows, bounds),
            none_of(
                "whole again", "the pool is, when the faults stop", [end.whole] * bool(end.whole)
            ),
            none_of("last blocks", "put then, all are read by every node", end.unread),
            none_of(
                "gets while blocks move",
                "none fails at a node that runs, during a drain, a join or a takeover",
                witness.failed_gets,
            ),
            none_of(
                "blocks that moved",
                "what all homes had acknowledged, all homes hold after each of these",
                witness.lost,
            ),
            none_of(
                "tiers",
                "blocks were read from each that a node has",
                sorted(t for name, t in _TIERS.items() if t in lower and not load.hits[name]),
            ),
            none_of("damage", "no tier gives other bytes than were written", end.damaged),
            none_of("ages", "no block is got after its time", end.aged),
            none_of("held bytes", "no agent holds any for a client that is gone", held),
            none_of("leftovers", "no file in /dev/shm or the temporary folders", left),
            some_of("eviction", "blocks were evicted all the time", end.evictions),
            none_of(
                "kinds of faults",
                "each that was planned struck",
                [kind for kind in missing if kind in planned],
            ),
        ]

    def _unjudged(self, growths: list[Growth]) -> list[str]:
        """Who should have had a life that can be judged, and had none."""
        if (
            self._options.plan is not None
            or 0.4 * self._seconds < 1.1 * self._options.bounds.life_s
        ):
            return []  # the controller lives for two fifths
        spared = self._hosts[: plan.spared(len(self._hosts))]
        wanted = ["switch", "controller", *(host.node_id for host in spared)]
        seen = {growth.life.partition(",")[0] for growth in growths}
        return [part for part in wanted if part not in seen]

    def report(
        self, end: _End, logged: list[str], log_bytes: int, left: list[str]
    ) -> dict[str, Any]:
        """All numbers as plain data."""
        criteria = self._criteria(end, logged, left)
        counted = self.counted()
        return counted | {
            "passed": all(criterion.holds for criterion in criteria),
            "criteria": [asdict(criterion) for criterion in criteria],
            "wrong_bytes": counted["wrong_bytes"] + end.wrong_bytes,
            "damaged": end.damaged,
            "evictions_of_spared_agents": end.evictions,
            "switch": end.switch,
            "log_bytes": log_bytes,
        }

    def counted(self) -> dict[str, Any]:
        """What was counted while load and faults went on, as plain data."""
        windows, faults = self._windows, self._faults
        counts = {**faults.counts, plan.LOST_FRAMES: self._loss.total}
        seconds = windows[-1].ended_s if windows else 0.0
        delivered = sum(window.delivered for window in windows)
        puts = sum(window.put_blocks for window in windows)
        lives = [life for life in self._watch.lives if life.part != BENCH]
        return {
            "bench": "soak",
            "seconds": round(seconds, 1),
            "requests": sum(window.requests for window in windows),
            "failed_requests": sum(window.failed_requests for window in windows),
            "gets": sum(window.gets for window in windows),
            "blocks_delivered": delivered,
            "blocks_put": puts,
            "puts_refused": sum(window.put_failures for window in windows),
            "misses": sum(window.missed for window in windows),
            "miss_reasons": dict(sorted(self._load.miss_reasons.items())),
            "wrong_bytes": faults.witness.wrong_bytes + sum(w.wrong_bytes for w in windows),
            "hits": dict(sorted(self._load.hits.items())),
            "blocks_per_s": round((delivered + puts) / max(1e-9, seconds), 1),
            "mib_per_s": round((delivered + puts) * BLOCK_BYTES / 2**20 / max(1e-9, seconds), 2),
            "faults": {kind: counts.get(kind, 0) for kind in plan.KINDS},
            "faults_left_out": dict(sorted(faults.left_out.items())),
            "pins_not_at_once": dict(faults.refused),
            "moves": moves_of(faults.strikes),
            "witness": dict(sorted(faults.witness.counts.items())),
            "objects_deleted": self._objects_deleted,
            "growth": [asdict(growth) for growth in judged(lives, self._options.bounds)],
            "windows": [window.as_dict() for window in windows],
            "strikes": [asdict(strike) for strike in faults.strikes],
            "lives": [life.as_dict() for life in self._watch.lives],
            "parameters": {
                "minutes": self._options.minutes,
                "nodes": self._options.nodes,
                "seed": self._options.seed,
                "loss": self._options.loss,
                "arena_bytes": self._options.arena_bytes,
                "disk_bytes": self._options.disk_bytes,
                "further_arena_bytes": self._options.further_arena_bytes,
                "object_bytes": self._options.object_bytes,
                "tiers": {node: list(tiers) for node, tiers in self._memory.tiers.items()},
                "arenas_kept": sorted(self._memory.keepers),
                "namespaces": self._settings,
                "block_bytes": BLOCK_BYTES,
                "bounds": asdict(self._options.bounds),
            },
        }


def delete_oldest(folder: Path, size_bytes: int) -> int:
    """Delete the oldest files below a folder until those that are left have that size at most; how
    many."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # an agent deletes and renames there, too
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                files.append((status.st_mtime, status.st_size, path))
    surplus = sum(size for _, size, _ in files) - size_bytes
    deleted = 0
    for _, size, path in sorted(files):
        if surplus <= 0:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            deleted += 1
        surplus -= size
    return deleted


class _LostFrames:
    """Frames that the switch lost on purpose, over all of its lives."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = 0
        self._last = 0

    def read(self) -> None:
        """Look at the switch's counters."""
        try:
            ports = json.loads(self._path.read_text(encoding="utf-8"))["ports"]
        except (OSError, ValueError):
            return
        lost = sum(port["rx_loss"] + port["tx_loss"] for port in ports.values())
        if lost < self._last:
            self._before += self._last
        self._last = lost

    @property
    def total(self) -> int:
        return self._before + self._last
