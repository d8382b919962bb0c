"""The question: is the host side of kvcast as fast as a store that one could pick instead?

    python -m kvcast.bench.store --json FILE

Owns: what is asked of every store, in which order, the report. Must not know: how any of them
works; `stores/` has, for each, how it is started and how it is asked.

kvcast stands beside Redis, Mooncake Store and NIXL, all over TCP; what is missing here is named
under `skipped`, with how to install it. Everything runs on one machine, and every store is asked
across the same link: the loopback interface, or with `--namespaces` (root) a veth pair between two
network namespaces. Readers are on one side. On the other is what they ask: Redis' server;
Mooncake's master and a client with a segment; a NIXL agent; the second of two kvcast agents, which
speak the kernel's UDP and TCP with each other, with no switch in between.

- `get`: a block that the other side has and the reader's side has not. Every block is new, so
  nothing can be cached; for kvcast it was put by the other node, which is its home.
- `local get`: a block that a reader has put into memory of its own side; where the store has such.
- `put`: a new block to the other side; for kvcast, one whose home the other node is. It is there
  when the call returns. Mooncake and NIXL move it from memory that is registered, where it lies
  before; kvcast and Redis are given bytes that lie anywhere.
- `put in place`: the same for kvcast from room in its arena, where it lies before.
- `batch get`, `local batch get`: 100 blocks of 64 KiB in one call.
- `exists`, `local exists`: one call for 1,000 keys, held as for the gets.

Each client is a process of its own with connections that are warm, and calls what a user would
call, without a copy where the store offers that: from and into registered memory for Mooncake and
NIXL, a view of the arena for kvcast, and an object of redis-py's for Redis. The clock sees the call
alone. What readers do with the bytes, and giving them back, is not part of it (`release_us` has
the latter).

With one client, operations follow one another, and what came is compared before the next (of local
gets when all of a turn are over: comparing 16 MiB empties the processor's caches, and a get that
moves no byte would take three times as long). With several, each has its own blocks, and all begin
at the same moment; `bytes_per_s` is what moved for all of them together, from the first begin to
the last end (nothing moves for a local get).

The sides stand for two machines, so each has half of the processors for itself, for all stores.
Else the kernel often runs both ends of a connection on one processor while the other idles, since
one end wakes the other: between two machines that cannot be (`--shared-processors`).

Stores take turns in rounds, in another order each time, so that what the machine does meanwhile
hits all alike. All processes stand ready throughout. Those that never rest are stopped while other
stores are measured: NIXL's holder, and kvcast's agents, which run with `--busy-poll` (but see
`--agents-sleep`). NIXL's readers and its holder do not sleep in their own turns either; Redis and
Mooncake do, and have no setting for it.

Every byte that came is compared with what was put, and what was put is looked at on the other side;
both outside of the timed part. Blocks differ in all of their bytes. A get that was not answered
from where it should be ends the bench.

Ratios are of medians with one client, ours over the fastest peer's: below 1, kvcast is faster.
`serve_cpu_ns_per_byte` is the processor time of the agent that is asked, kernel included, a byte of
16 MiB blocks that several readers get at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvcast.bench import store_picture
from kvcast.bench.incast import home_keys
from kvcast.bench.processor_time import processor_time_s
from kvcast.bench.stores.client import LOCAL, REMOTE, StoreError
from kvcast.bench.stores.links import (
    HOLDER_SIDE,
    READER_SIDE,
    STAR,
    Link,
    LoopbackLink,
    VethLink,
    halves,
)
from kvcast.bench.stores.servers import PEERS, KvcastStore, Store, make_pool, named
from kvcast.service import provenance, reports
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, CommandError, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.statistics import percentile
from kvcast.service.values import format_size
from kvcast.topologies.part import PartError
from kvcast.topologies.pool import Pool

KIB, MIB = 1 << 10, 1 << 20
SIZES: Final = (64 * KIB, 2 * MIB, 16 * MIB)
ROUNDS: Final = 5
CLIENTS: Final = 8
BATCH_BLOCKS: Final = 100
EXISTS_KEYS: Final = 1000
_EXISTS_BYTES: Final = 64
_TOGETHER_S: Final = 0.02
"""How long before they begin several clients are told when."""

_OURS = KvcastStore.NAME


@dataclass(frozen=True)
class Case:
    """One thing that is asked of every store that can do it."""

    operation: str
    size_bytes: int
    clients: int
    units: int
    """Calls of each client in one turn."""
    keys: int = 1
    """Keys in one call."""

    @property
    def name(self) -> str:
        """For people."""
        size = "" if "exists" in self.operation else f" {format_size(self.size_bytes)}"
        count = f" x {self.keys}" if self.keys > 1 else ""
        clients = f", {self.clients} clients" if self.clients > 1 else ""
        return f"{self.operation}{size}{count}{clients}"

    @property
    def kind(self) -> str:
        """What a worker calls it."""
        return self.operation.rpartition(" ")[2]

    @property
    def is_local(self) -> bool:
        return self.operation.startswith("local")

    @property
    def is_put(self) -> bool:
        return self.kind in ("put", "place")

    def can(self, store: type[Store]) -> bool:
        """Whether a store has such an operation."""
        if self.is_local and not store.HAS_LOCAL:
            return False
        if self.kind == "place" and not store.HAS_PLACE:
            return False
        return self.kind != "exists" or store.HAS_EXISTS


def cases(clients: int, *, quick: bool) -> list[Case]:
    """Everything that is asked. The first call of a turn with one client only warms up."""
    alone = dict.fromkeys(SIZES, 2) if quick else {64 * KIB: 21, 2 * MIB: 7, 16 * MIB: 3}
    together = dict.fromkeys(SIZES, 1) if quick else {64 * KIB: 8, 2 * MIB: 2, 16 * MIB: 1}
    made = []
    for operation in ("put", "local get", "get"):
        for size_bytes in SIZES:
            made.append(Case(operation, size_bytes, 1, alone[size_bytes]))
            made.append(Case(operation, size_bytes, clients, together[size_bytes]))
    made += [Case("put in place", size_bytes, 1, alone[size_bytes]) for size_bytes in SIZES]
    few = 2 if quick else 5
    for operation in ("batch get", "local batch get"):
        made.append(Case(operation, 64 * KIB, 1, few, BATCH_BLOCKS))
    for operation in ("exists", "local exists"):
        made.append(Case(operation, _EXISTS_BYTES, 1, few, EXISTS_KEYS))
    return made


@dataclass
class Figures:
    """What one store did in one case."""

    seconds: list[float] = field(default_factory=list)
    """Of every timed call."""
    release_s: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    span_s: float = 0.0
    """In which those bytes moved."""
    misses: int = 0
    wrong_bytes: int = 0
    agents_s: float = 0.0
    """Processor time of both agents (kvcast) meanwhile,"""
    home_s: float = 0.0
    """and of the one that is asked."""
    agents_bytes: int = 0

    def report(self) -> dict[str, Any]:
        """The numbers as plain data; times in microseconds."""
        p50, p99 = percentile(self.seconds, 0.50), percentile(self.seconds, 0.99)
        told: dict[str, Any] = {
            "count": len(self.seconds),
            "p50_us": _us(p50),
            "p99_us": _us(p99),
            "min_us": _us(min(self.seconds, default=None)),
            "bytes_per_s": round(self.moved_bytes / self.span_s) if self.span_s else None,
            "misses": self.misses,
            "wrong_bytes": self.wrong_bytes,
        }
        if self.release_s:
            told["release_us"] = _us(percentile(self.release_s, 0.50))
        if self.agents_bytes:
            told["agents_processor_ns_per_byte"] = round(self.agents_s * 1e9 / self.agents_bytes, 3)
            told["home_processor_ns_per_byte"] = round(self.home_s * 1e9 / self.agents_bytes, 3)
        return told


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 2)


class Comparison:
    """The stores, standing ready, and what they have done so far."""

    def __init__(self, stores: Sequence[Store], pool: Pool, skipped: dict[str, str]) -> None:
        self.stores = list(stores)
        self.figures: dict[Case, dict[str, Figures]] = defaultdict(lambda: defaultdict(Figures))
        self._pool = pool
        self._skipped = skipped
        self._turns = 0

    async def measure(self, case: Case, rounds: int) -> None:
        """All stores in turns, in another order each round; a peer that fails is skipped from
        then on. With several clients the first round only warms up."""
        warm_ups = 1 if case.clients > 1 and rounds > 1 else 0
        for number in range(-warm_ups, rounds):
            self._turns += 1
            shift = self._turns % len(self.stores)
            for store in self.stores[shift:] + self.stores[:shift]:
                if not case.can(type(store)):
                    continue
                try:
                    await self._turn(store, case, timed=number >= 0)
                except StoreError as error:
                    if store.NAME == _OURS:
                        raise CommandError(f"{case.name}: {error}") from error
                    self._skipped[store.NAME] = f"failed at {case.name}: {error}"
                    self.stores.remove(store)
                    await store.stop()

    async def _turn(self, store: Store, case: Case, *, timed: bool) -> None:
        side = READER_SIDE if case.is_local else HOLDER_SIDE
        # The same keys for all stores, and so the same bytes; but never the same again.
        count = case.keys * (case.units if case.kind != "exists" else 1)
        home, label = STAR.hosts[side].node_id, (self._turns, case.name)
        keys = [key.hex() for key in home_keys(self._pool, home, count * case.clients, label)]
        of_client = [keys[start : start + count] for start in range(0, len(keys), count)]
        store.resume()
        try:
            where = await _prepare(store, case, of_client)
            await self._run(store, case, of_client, where, timed=timed)
        finally:
            store.pause()

    async def _run(
        self,
        store: Store,
        case: Case,
        of_client: list[list[str]],
        where: dict[str, Any],
        *,
        timed: bool,
    ) -> None:
        readers = store.readers[: case.clients]
        what = {"kind": case.kind, "size_bytes": case.size_bytes, "where": where}
        if case.kind == "exists":
            units = [[keys] * case.units for keys in of_client]
        else:
            units = [
                [keys[start : start + case.keys] for start in range(0, len(keys), case.keys)]
                for keys in of_client
            ]
        figures = self.figures[case][store.NAME]
        before = self._agents_s(store)
        one_by_one = case.clients == 1 and not case.is_local
        if one_by_one:
            told = [await readers[0].ask("turn", units=units[0], **what)]
            seconds = told[0]["seconds"][1:]
            span_s, calls = sum(seconds), len(seconds)
            moved_calls = len(units[0])
        else:
            await asyncio.gather(
                *(
                    reader.ask("prepare", units=mine, **what)
                    for reader, mine in zip(readers, units, strict=True)
                )
            )
            before = self._agents_s(store)
            ran = await _all(readers, "run", at_s=time.monotonic() + _TOGETHER_S)
            seconds = [one for each in ran for one in each["seconds"]]
            span_s = max(e["ended_s"] for e in ran) - min(e["began_s"] for e in ran)
            calls = moved_calls = len(seconds)
            if case.clients == 1:
                seconds = seconds[1:]
        spent = [
            now_s - before_s for before_s, now_s in zip(before, self._agents_s(store), strict=True)
        ]
        if not one_by_one:
            told = await _all(readers, "finish")
        wrong_bytes = sum(each["wrong_bytes"] for each in told)
        misses = sum(each["missing"] for each in told)
        if case.is_put:
            keys = [key for each in of_client for key in each]
            looked = await store.holder.ask("look", keys=keys, size_bytes=case.size_bytes)
            wrong_bytes += looked["wrong_bytes"]
            misses += looked["missing"]
        figures.wrong_bytes += wrong_bytes
        figures.misses += misses
        await _drop(store, of_client)
        if case.kind == "get" and not misses:
            _check_origins(store, case, {o for each in told for o in each["origins"]})
        if not timed or misses:
            return
        figures.seconds += seconds
        figures.span_s += span_s
        if one_by_one and case.kind == "get":
            figures.release_s += told[0]["release_s"][1:]
        if case.kind != "exists" and not case.is_local:
            size_bytes = case.keys * case.size_bytes
            figures.moved_bytes += calls * size_bytes
            if spent:
                figures.agents_s += sum(spent)
                figures.home_s += spent[HOLDER_SIDE]
                figures.agents_bytes += moved_calls * size_bytes

    def _agents_s(self, store: Store) -> list[float]:
        """What each side's agent has used so far; of other stores nothing is known."""
        if store.NAME != _OURS:
            return []
        pids = (self._pool.pids[host.node_id] for host in STAR.hosts)
        return [0.0 if pid is None else processor_time_s(pid) for pid in pids]

    def progress(self, case: Case) -> str:
        """The medians of a case in a line."""
        medians = [
            f"{name} {_shown(p50_s)}"
            for name, figures in self.figures[case].items()
            if (p50_s := percentile(figures.seconds, 0.50)) is not None
        ]
        return f"{case.name}: {', '.join(medians) or 'nothing came'}"


async def _prepare(store: Store, case: Case, of_client: list[list[str]]) -> dict[str, Any]:
    """Have the blocks, or the room for them, where the case wants it; where that is."""
    size = {"size_bytes": case.size_bytes}
    if case.is_local:
        await asyncio.gather(
            *(
                reader.ask("place", keys=keys, local=True, **size)
                for reader, keys in zip(store.readers, of_client, strict=False)
            )
        )
        return {}
    keys = [key for each in of_client for key in each]
    if case.is_put:
        told = await store.holder.ask("reserve", keys=keys, **size)
    else:
        told = await store.holder.ask("place", keys=keys, local=True, **size)
    where = told["where"]
    assert isinstance(where, dict)
    return where


async def _drop(store: Store, of_client: list[list[str]]) -> None:
    """Have all sides forget the blocks of a turn."""
    for reader, keys in zip(store.readers, of_client, strict=False):
        await reader.ask("drop", keys=keys)
    await store.holder.ask("drop", keys=[key for each in of_client for key in each])


async def _all(readers: Sequence[Any], what: str, **arguments: Any) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(reader.ask(what, **arguments) for reader in readers)))


def _check_origins(store: Store, case: Case, origins: set[str]) -> None:
    wanted = LOCAL if case.is_local else REMOTE
    if origins != {wanted}:
        raise StoreError(f"{store.NAME} answered from {' and '.join(sorted(origins))} memory")


def _shown(seconds: float) -> str:
    scaled, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"


# --- the report -----------------------------------------------------------------------------------

_OVER_PEER: Final = {
    "remote_64k_over_best_peer": ("get", "get", 64 * KIB),
    "remote_2m_over_best_peer": ("get", "get", 2 * MIB),
    "remote_16m_over_best_peer": ("get", "get", 16 * MIB),
    "batch_over_best_peer": ("batch get", "batch get", 64 * KIB),
    "put_2m_over_best_peer": ("put", "put", 2 * MIB),
    "put_in_place_2m_over_best_peer": ("put in place", "put", 2 * MIB),
}
"""What we do and what peers do, and the size."""


def summary(figures: dict[Case, dict[str, Figures]]) -> dict[str, Any]:
    """The report's numbers: the questions on top, then every single figure."""
    alone = {
        (case.operation, case.size_bytes, name): p50_s
        for case, by_store in figures.items()
        for name, one in by_store.items()
        if case.clients == 1 and (p50_s := percentile(one.seconds, 0.50)) is not None
    }
    report: dict[str, Any] = {}
    over: dict[str, dict[str, float]] = {}
    for name, (operation, of_peers, size_bytes) in _OVER_PEER.items():
        times = {
            peer.NAME: alone[of_peers, size_bytes, peer.NAME]
            for peer in PEERS
            if (of_peers, size_bytes, peer.NAME) in alone
        }
        ours = alone.get((operation, size_bytes, _OURS))
        if ours is None or not times:
            report[name] = None
            continue
        report[name] = round(ours / min(times.values()), 3)
        over[name.removesuffix("_over_best_peer")] = {
            peer: round(ours / theirs, 3) for peer, theirs in times.items()
        }
    local = [alone.get(("local get", size_bytes, _OURS)) for size_bytes in SIZES]
    known = [each for each in local if each is not None]
    report["local_get_us"] = _us(max(known)) if len(known) == len(SIZES) else None
    for name, operation in (
        ("exists_1000_us", "exists"),
        ("local_exists_1000_us", "local exists"),
    ):
        report[name] = _us(alone.get((operation, _EXISTS_BYTES, _OURS)))
    report["serve_cpu_ns_per_byte"] = _serving(figures)
    everything = [one for by_store in figures.values() for one in by_store.values()]
    report["wrong_bytes"] = sum(one.wrong_bytes for one in everything)
    report["misses"] = sum(one.misses for one in everything)
    report["over_each_peer"] = over
    report["figures"] = [
        {
            "store": name,
            "operation": case.operation,
            "size_bytes": case.size_bytes,
            "keys": case.keys,
            "clients": case.clients,
            **one.report(),
        }
        for case, by_store in figures.items()
        for name, one in sorted(by_store.items(), key=lambda item: item[0] != _OURS)
    ]
    return report


def _serving(figures: dict[Case, dict[str, Figures]]) -> float | None:
    """What a byte costs the agent that serves it at full speed: the largest blocks, to several."""
    for case, by_store in figures.items():
        full = case.operation == "get" and case.size_bytes == max(SIZES) and case.clients > 1
        ours = by_store.get(_OURS)
        if full and ours is not None and ours.agents_bytes:
            return round(ours.home_s * 1e9 / ours.agents_bytes, 4)
    return None


def table(report: dict[str, Any]) -> str:
    """The report as text: every figure in a line, then the answers."""
    lines = [f"{'':40}{'p50':>10}{'p99':>10}{'GB/s':>8}{'agents, ns/B':>14}"]
    for one in report.get("figures", []):
        case = Case(one["operation"], one["size_bytes"], one["clients"], 0, one["keys"])
        if one["p50_us"] is None:
            lines.append(f"{case.name:30}{one['store']:10}  nothing came")
            continue
        p50, p99 = (_shown(one[name] / 1e6) for name in ("p50_us", "p99_us"))
        speed = f"{one['bytes_per_s'] / 1e9:8.2f}" if one["bytes_per_s"] else ""
        agents = one.get("agents_processor_ns_per_byte")
        busy = "" if agents is None else f"{agents:14.2f}"
        lines.append(f"{case.name:30}{one['store']:10}{p50:>10}{p99:>10}{speed}{busy}")
    lines.append("")
    for name in _OVER_PEER:
        if report.get(name) is not None:
            peers = report["over_each_peer"][name.removesuffix("_over_best_peer")]
            of_each = ", ".join(f"{ratio:.2f} of {peer}" for peer, ratio in peers.items())
            lines.append(f"{name:32}{report[name]:8.2f}  ({of_each})")
    for name in (
        *("local_get_us", "exists_1000_us", "local_exists_1000_us", "read_path_over_bare"),
        "serve_cpu_ns_per_byte",
    ):
        if report.get(name) is not None:
            lines.append(f"{name:32}{report[name]:8.2f}")
    lines += [f"{name:32}{report.get(name, 0):8}" for name in ("wrong_bytes", "misses")]
    lines += [f"skipped: {name}: {reason}" for name, reason in report["skipped"].items()]
    return "\n".join(lines)


# --- the whole ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreOptions:
    """One comparison."""

    peers: tuple[str, ...] = tuple(peer.NAME for peer in PEERS)
    """Who is compared with kvcast, where installed."""
    rounds: int = ROUNDS
    clients: int = CLIENTS
    """How many ask at once in the cases with several."""
    quick: bool = False
    """A smoke test: two clients, one round of a call or two each."""
    namespaces: bool = False
    """Two network namespaces and a veth pair instead of loopback."""
    busy_poll: bool = True
    """Whether kvcast's agents never sleep in their turns, as NIXL's holder and readers never do."""
    own_processors: bool = True
    """Whether each side has half of the processors for itself, as two machines would."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise CommandError("there is at least one round")
        if not 2 <= self.clients <= 16:
            raise CommandError("several clients are 2 to 16")


async def run(options: StoreOptions, report: dict[str, Any] | None = None) -> dict[str, Any]:
    """Compare, into `report`, which has what was measured so far at any time. CommandError or
    PoolError where kvcast itself fails; a peer that does is named under "skipped"."""
    start_s = time.monotonic()
    report = {} if report is None else report
    skipped: dict[str, str] = {}
    versions: dict[str, dict[str, str]] = {}
    clients, rounds = (2, 1) if options.quick else (options.clients, options.rounds)
    processors = halves() if options.own_processors else None
    report |= {
        "bench": "store",
        "provenance": provenance.provenance(),
        "parameters": {"clients": clients, "rounds": rounds, "namespaces": options.namespaces},
        "link": "veth pair" if options.namespaces else "loopback",
        "processors_of_sides": processors,
        "busy_poll": options.busy_poll,
        "switch_on_the_way": False,
        "versions_of_peers": versions,
        "skipped": skipped,
    }
    async with contextlib.AsyncExitStack() as stack:
        link: Link = (VethLink if options.namespaces else LoopbackLink)(processors)
        _tell("starting kvcast")
        pool = await stack.enter_async_context(make_pool(link, polls=options.busy_poll))
        ours = KvcastStore(link, pool, polls=options.busy_poll)
        stack.push_async_callback(ours.stop)
        await ours.start(clients)
        stores: list[Store] = [ours]
        for peer in named(options.peers):
            reason = peer.missing()
            if reason is None:
                _tell(f"starting {peer.NAME}")
                store = peer(link, pool.folder)
                stack.push_async_callback(store.stop)
                try:
                    await store.start(clients)
                    stores.append(store)
                    versions[peer.NAME] = peer.versions()
                except (StoreError, PartError) as error:
                    reason = f"does not start: {reports.why(error)}"
                    await store.stop()
            if reason is not None:
                skipped[peer.NAME] = reason
                _tell(f"skipped: {peer.NAME}: {reason}")
        comparison = Comparison(stores, pool, skipped)
        for store in stores:
            store.pause()
        for case in cases(clients, quick=options.quick):
            await comparison.measure(case, rounds)
            report |= summary(comparison.figures)
            _tell(comparison.progress(case))
        pool.check_alive()
    _read_path(report, skipped, quick=options.quick)
    report["load_after"] = os.getloadavg()
    report["seconds"] = round(time.monotonic() - start_s, 1)
    return report


def _read_path(report: dict[str, Any], skipped: dict[str, str], *, quick: bool) -> None:
    """What the shared way of reads is worth beside a bare pair of sockets, which is a question of
    its own; CommandError if a block of its came wrong or not at all."""
    name = "kvcast.bench.read_path"
    try:
        read_path = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        skipped["read_path_over_bare"] = f"{name} is not there"
        return
    _tell("the read path beside a bare pair of sockets")
    settings = read_path.Settings(seconds=0.3) if quick else read_path.Settings()
    measured = read_path.measure(settings)
    report["read_path"] = measured
    report["read_path_over_bare"] = round(measured["read_path_over_bare"], 3)
    if measured["wrong_blocks"] or measured["missed"]:
        raise CommandError(
            f"{name}: {measured['wrong_blocks']} wrong blocks, {measured['missed']} missed"
        )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    names = [peer.NAME for peer in PEERS]
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.store",
        description="Puts, gets and exists of kvcast beside Redis, Mooncake Store and NIXL.",
        formatter_class=HelpFormatter,
    )
    reports.add_json(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw the figures into this PNG")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"who is compared with kvcast: {', '.join(names)} (default: all that are installed)",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each store and case")
    parser.add_argument(
        "--clients", type=int, default=CLIENTS, help="how many ask at once, 2 to 16"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: two clients, a call or two of each"
    )
    parser.add_argument(
        "--namespaces",
        action="store_true",
        help="two network namespaces and a veth pair instead of loopback (root)",
    )
    parser.add_argument(
        "--agents-sleep",
        action="store_true",
        help="start kvcast's agents without --busy-poll",
    )
    parser.add_argument(
        "--shared-processors",
        action="store_true",
        help="let both sides run on all processors, instead of half of them each",
    )
    return parser


async def _command(arguments: argparse.Namespace) -> int:
    options = StoreOptions(
        peers=tuple(arguments.peers),
        rounds=arguments.rounds,
        clients=arguments.clients,
        quick=arguments.quick,
        namespaces=arguments.namespaces,
        busy_poll=not arguments.agents_sleep,
        own_processors=not arguments.shared_processors,
    )
    with reports.in_the_making(arguments.json) as so_far:
        report = await run(options, so_far)
    reports.report_to(arguments.json, report, lambda measured: print(table(measured)))
    if arguments.plot:
        store_picture.draw(report, Path(arguments.plot))
    return EXIT_FAILED if report["wrong_bytes"] or report["misses"] else EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(lambda: _command(arguments), log_level="warning")


if __name__ == "__main__":
    raise SystemExit(main())
