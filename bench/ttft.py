"""The question: how soon is the first token there, if other engines have computed the prompt?

    make setup-engines setup-engine-peers
    python -m kvcast.bench.ttft --json FILE

Owns: what engines are asked for, in which order, the report. Must not know: how an engine is run,
or what a way of sharing consists of (`engines/`), or how the pool works.

One vLLM engine computes prefixes, on a node of its own. Then N engines on N other nodes are asked
for one of them at the same moment, with a few tokens of their own behind it; the time until the
first token is what counts, of each. Every prefix is asked for once, so nothing is in anybody's
cache. This is done with kvcast, then with each peer (`engines/ways.py`), with the same engines'
options, nodes, links and rounds; and once with prompts that nobody has computed (`recompute`).
Figures are medians over engines and rounds.

The nodes are network namespaces, joined by one software switch whose ports have one rate each way;
everything else shares this machine's processors. What was the limit is told by each case:
`link_busy`, the share of the busiest link's rate that was used until the last engine had its
token, and `processors_busy`, the share of all processors' time. With `link_busy` near 1 the links
were; with `processors_busy` near 1 and `link_busy` well below it, the figures say more about this
machine. `limit` says which of the two it was, and `cases_limited_by_links` in how many of kvcast's
cases it was the links. `busiest_link_bytes`: what passed that link, headers and all; a prefix has
1 KiB a token. `not_all_cached` counts answers for which a part of the prefix was computed after
all.

The fields at the top are of the prefix with which kvcast stands worst. `ttft_over_best_peer_n1`:
kvcast's median ÷ the least of the peers', one engine alone; `_n4`: four at once; `growth_1_to_4`:
kvcast's median of four ÷ that of one.

By default the writer's node keeps everything, so whatever is read comes from its link: the case of
one hot prefix. `--spread`: kvcast's blocks have their homes on all nodes; peers stay as they are.

`storm_over_recompute`: one engine is asked for eight prefixes at once, of half of which a block's
bytes have changed where they lie, so that these loads fail; ÷ the same with prompts that nobody has
computed. At most 1 says that a pool that fails costs no more than having none. It has a network of
its own, with links (`--storm-link-rate`) over which a prefix comes sooner than it is computed.

`mla_group_egress_ratio`: four ranks on four nodes that hold the same bytes read a prefix as a
reader group, together or up to half a second apart: bytes that left homes ÷ distinct bytes, the
worst of all cases. Homes are on all five nodes. No engine runs there: four of
the connector's links do what four workers' do, since tensor parallel ranks on several nodes do not
run on one machine's processors.

Namespaces need root. A peer that is not installed is named in `skipped`, with what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvcast.bench.engines.command import add_options, measured
from kvcast.bench.engines.damage import corrupt
from kvcast.bench.engines.engine import Engine, EngineError, Prompt, make_model
from kvcast.bench.engines.ways import MODEL, STORE_BYTES, WAYS, OneNetwork, Way
from kvcast.bench.load import machine_s
from kvcast.bench.replay import EGRESS_COUNTERS
from kvcast.hostagent.client import Client
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.link import Link, LinkOptions
from kvcast.hostagent.connectors.loads import LoadTable
from kvcast.hostagent.connectors.naming import NamespaceName
from kvcast.hostagent.connectors.planner import Load, Save
from kvcast.service import provenance
from kvcast.service.commands import CommandError, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.reports import say
from kvcast.service.statistics import ratio
from kvcast.topologies.namespaces import why_not
from kvcast.topologies.part import PartError
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star

PREFIXES: Final = (1024, 4096, 16_384)
ENGINES: Final = (1, 2, 4)
ROUNDS: Final = 2
LINKS_LIMIT: Final = 0.75
"""From this share of the busiest link's rate on, links were a case's limit."""
PROCESSORS_LIMIT: Final = 0.9
OWN_TOKENS: Final = 17
BLOCK_TOKENS: Final = 128
LINK_RATE: Final = 1e7
"""At which 1,024 tokens take a link 0.9 s, several times as long as what four engines do beside for
them takes two processors."""
STORM_LINK_RATE: Final = 5e7
"""At which a prefix comes in a third of the time that computing it takes: else no pool is worth
having, whether its loads fail or not."""
QUEUE_FRAMES: Final = 512
"""What waits at a port of the switch at most: 0.25 s of the links' rate."""
RANKS: Final = 4
GROUP_BLOCKS: Final = 32
GROUP_BLOCK_BYTES: Final = 128 * 1024
LATENESS_S: Final = (
    (0.0, 0.0, 0.0, 0.0),
    (0.0, 0.02, 0.04, 0.06),
    (0.06, 0.04, 0.02, 0.0),
    (0.0, 0.3, 0.1, 0.2),
    (0.3, 0.0, 0.0, 0.5),
)
"""How late the ranks of a group begin to load, in seconds; steps of an engine are that far apart at
worst."""
GROUP_ROUNDS: Final = 2
STORM_PROMPTS: Final = 8
STORM_TOKENS: Final = 1024
STORED_S: Final = 120.0
"""How long what was computed may take to be stored."""
RECOMPUTE: Final = "recompute"
PARTS: Final = ("engines", "storm", "groups")
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
_ALL_THREADS: Final = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
"""The writer's, which computes while all others rest."""


def prompt_of(label: object, prefix_tokens: int, own: int, own_tokens: int = OWN_TOKENS) -> Prompt:
    """A prompt: a prefix by its label, and some tokens of the reader's own."""
    shared, mine = random.Random(f"{label}"), random.Random(f"{label} {own}")
    return [shared.randrange(3, 1024) for _ in range(prefix_tokens)] + [
        mine.randrange(3, 1024) for _ in range(own_tokens)
    ]


def rounds_of(prefix_tokens: int, rounds: int) -> int:
    """`rounds` is meant for prefixes of 4,096 tokens. Shorter ones are cheap and noisy, longer ones
    neither."""
    return max(1, round(rounds * math.sqrt(4096 / prefix_tokens)))


class Case:
    """Some engines asked at once for a prefix, by one way; all rounds together."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cached_shares: list[float] = []
        self.processors_busy: list[float] = []
        self.link_busy: list[float] = []
        self.link_bytes: list[int] = []

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def report(self) -> dict[str, Any]:
        return {
            "median_s": round(self.median_s, 4),
            "seconds": [round(one, 4) for one in self.seconds],
            "cached_share": round(min(self.cached_shares), 4),
            "processors_busy": round(statistics.median(self.processors_busy), 3),
            "link_busy": round(statistics.median(self.link_busy), 3),
            "busiest_link_bytes": round(statistics.median(self.link_bytes)),
            "limit": self.limit,
        }

    @property
    def limit(self) -> str:
        """What took most of the time."""
        if statistics.median(self.link_busy) >= LINKS_LIMIT:
            return "links"
        if statistics.median(self.processors_busy) >= PROCESSORS_LIMIT:
            return "processors"
        return "waiting"


class Ttft:
    """What was measured, by way, prefix and number of engines."""

    def __init__(self, network: OneNetwork, link_rate_bits_per_s: float) -> None:
        self._network = network
        self._rate_bytes_per_s = link_rate_bits_per_s / 8
        self.cases: dict[tuple[str, int, int], Case] = {}
        self.wrong_outputs: dict[str, int] = {}

    async def ask(
        self, name: str, prefix_tokens: int, prompts: Sequence[Prompt], readers: Sequence[Engine]
    ) -> list[dict[str, Any]]:
        """Ask each engine for its prompt at the same moment."""
        passed, spent_s = self._network.link_bytes(), machine_s()
        began = time.monotonic()
        told = await asyncio.gather(
            *(one.generate([prompt], 1) for one, prompt in zip(readers, prompts, strict=True))
        )
        elapsed_s = time.monotonic() - began
        spent_s = machine_s() - spent_s
        most = max(
            now - before for now, before in zip(self._network.link_bytes(), passed, strict=True)
        )
        case = self.cases.setdefault((name, prefix_tokens, len(readers)), Case())
        answers = [answer for [answer] in told]
        case.seconds += [answer["seconds"] for answer in answers]
        case.cached_shares += [answer["cached"] / prefix_tokens for answer in answers]
        case.processors_busy.append(spent_s / elapsed_s / (os.cpu_count() or 1))
        case.link_busy.append(most / elapsed_s / self._rate_bytes_per_s)
        case.link_bytes.append(most)
        return answers

    async def measure(
        self,
        way: Way,
        writer: Engine,
        readers: Sequence[Engine],
        prefix_tokens: int,
        number: int,
        own_tokens: int = OWN_TOKENS,
    ) -> None:
        """One round: a prefix that the writer has computed."""
        label = (prefix_tokens, len(readers), number)
        prompts = [prompt_of(label, prefix_tokens, own, own_tokens) for own in range(len(readers))]
        await self._written(way, writer, prompt_of(label, prefix_tokens, -1, own_tokens))
        answers = await self.ask(way.NAME, prefix_tokens, prompts, readers)
        wrong = self.wrong_outputs.setdefault(way.NAME, 0)
        for prompt, answer in zip(prompts, answers, strict=True):
            [expected] = await writer.generate([prompt], 1)
            wrong += answer["tokens"] != expected["tokens"]
        self.wrong_outputs[way.NAME] = wrong

    async def storm(
        self, way: Way, pool: Pool, writer: Engine, reader: Engine
    ) -> dict[str, float | None]:
        """Half of an engine's loads fail, all at once."""

        def prompts_of(label: str) -> list[Prompt]:
            return [prompt_of((label, n), STORM_TOKENS, 0) for n in range(STORM_PROMPTS)]

        stored, new = prompts_of("storm"), prompts_of("storm, new")
        for prompt in stored:
            await self._written(way, writer, prompt)
        for prompt in stored[::2]:
            if not await corrupt(pool, MODEL, (await writer.hashes(prompt))[0]):
                raise CommandError("a block that was stored is nowhere")
        computed = await reader.generate(new, 1)
        told = await reader.generate(stored, 1)
        expected = await writer.generate(stored, 1)
        wrong = sum(a["tokens"] != b["tokens"] for a, b in zip(told, expected, strict=True))
        failed = {n: v for n, v in (await reader.stats()).items() if n.startswith("failed_loads")}
        return {
            "storm_over_recompute": ratio(told[0]["seconds"], computed[0]["seconds"]),
            "storm_s": round(told[0]["seconds"], 4),
            "storm_recompute_s": round(computed[0]["seconds"], 4),
            "storm_failed_loads": sum(failed.values()),
            "storm_wrong_outputs": wrong,
        }

    async def _written(self, way: Way, writer: Engine, prompt: Prompt) -> None:
        """Have the writer compute the prompt, and all of it stored."""
        wanted = await way.stored(writer) + len(prompt) // way.GRAIN_TOKENS
        await writer.generate([prompt], 1)
        end = time.monotonic() + STORED_S
        while await way.stored(writer) < wanted:
            if time.monotonic() > end:
                raise CommandError(f"{way.NAME} did not store what the writer has computed")
            await writer.generate([[3]], 1)  # some news of saves come with steps
            await asyncio.sleep(0.1)

    def report(self) -> dict[str, Any]:
        """The numbers as plain data, in seconds."""
        medians = {case: found.median_s for case, found in self.cases.items()}
        own = {key: case for key, case in self.cases.items() if key[0] == WAYS[0].NAME}
        ways = list(dict.fromkeys(name for name, _, _ in medians if name != RECOMPUTE))
        prefixes = sorted({prefix for _, prefix, _ in medians})
        counts = sorted({count for _, _, count in medians})

        def over_best(prefix: int, count: int) -> float | None:
            peers = [medians.get((name, prefix, count)) for name in ways if name != WAYS[0].NAME]
            there = [one for one in peers if one is not None]
            ours = medians.get((WAYS[0].NAME, prefix, count))
            return None if ours is None or not there else ratio(ours, min(there))

        def growth(name: str, prefix: int) -> float | None:
            one, four = medians.get((name, prefix, 1)), medians.get((name, prefix, 4))
            return None if one is None or four is None else ratio(four, one)

        over = {(prefix, n): over_best(prefix, n) for prefix in prefixes for n in counts}
        grown = {(name, prefix): growth(name, prefix) for name in ways for prefix in prefixes}
        return {
            "ttft_over_best_peer_n1": _worst(over.get((prefix, 1)) for prefix in prefixes),
            "ttft_over_best_peer_n4": _worst(over.get((prefix, 4)) for prefix in prefixes),
            "growth_1_to_4": _worst(grown.get((WAYS[0].NAME, prefix)) for prefix in prefixes),
            "wrong_outputs": self.wrong_outputs.get(WAYS[0].NAME, 0),
            "not_all_cached": {
                name: sum(
                    share < 1
                    for key, case in self.cases.items()
                    if key[0] == name
                    for share in case.cached_shares
                )
                for name in ways
            },
            "peers_wrong_outputs": {
                name: wrong for name, wrong in self.wrong_outputs.items() if name != WAYS[0].NAME
            },
            "cases_limited_by_links": ratio(
                sum(case.limit == "links" for case in own.values()), len(own)
            ),
            "processors_busy": _median(self.cases, "processors_busy"),
            "link_busy": _median(self.cases, "link_busy"),
            "ttft_over_best_peer": {
                f"{prefix} tokens, {n} engines": found
                for (prefix, n), found in over.items()
                if found is not None
            },
            "growth": {
                f"{name}, {prefix} tokens": found
                for (name, prefix), found in grown.items()
                if found is not None
            },
            "ttft_over_recompute": {
                f"{prefix} tokens, {n} engines": ratio(ours, medians[RECOMPUTE, prefix, n])
                for (name, prefix, n), ours in medians.items()
                if name == WAYS[0].NAME and (RECOMPUTE, prefix, n) in medians
            },
            "cases": [
                {"way": name, "prefix_tokens": prefix, "engines": n, **found.report()}
                for (name, prefix, n), found in self.cases.items()
            ],
        }


def _worst(found: Any) -> float | None:
    return max((one for one in found if one is not None), default=None)


def _median(cases: dict[tuple[str, int, int], Case], what: str) -> float | None:
    """Over all cases of kvcast."""
    found = [
        v for key, case in cases.items() if key[0] == WAYS[0].NAME for v in getattr(case, what)
    ]
    return round(statistics.median(found), 3) if found else None


# --- the ranks of an MLA engine -------------------------------------------------------------------


class _Bytes:
    """An engine's memory in the place of an engine's: blocks of one part."""

    part_bytes = (GROUP_BLOCK_BYTES,)
    cache_group = (0,)
    null_block = 0

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}

    def write(self, part: int, block_id: int, data: memoryview) -> None:
        self.blocks[block_id] = bytes(data)

    def read(self, part: int, block_id: int, room: memoryview) -> None:
        room[:] = self.blocks[block_id]

    def settle(self) -> None:
        pass


async def measure_groups(link_rate_bits_per_s: float) -> dict[str, Any]:
    """The ranks of an MLA engine, in a pool whose blocks have their homes on all nodes, the ranks'
    own among them: each case of `LATENESS_S`."""
    options = PoolOptions(
        arena_bytes=256 << 20, replicas=0, link_rate_bits_per_s=link_rate_bits_per_s
    )
    cases, wrong = [], 0
    async with Pool(Star.of(RANKS + 1), options) as pool:
        for number, late_s in enumerate(LATENESS_S * GROUP_ROUNDS):
            found = await asyncio.to_thread(group_egress, pool, f"group {number}", late_s)
            cases.append({"late_s": late_s, "egress_ratio": found[0]})
            wrong += found[1]
    ratios = [case["egress_ratio"] for case in cases]
    say(f"four ranks of one engine: egress ratios {ratios}")
    return {
        "mla_group_egress_ratio": _worst(ratios),
        "mla_groups": cases,
        "mla_wrong_blocks": wrong,
    }


def group_egress(pool: Pool, label: str, late_s: Sequence[float]) -> tuple[float | None, int]:
    """Four ranks read a prefix that a fifth node has saved, each so late: (egress ratio, wrong
    blocks). Own homes' blocks need not leave them: what counts is what any other rank needs."""
    sockets = list(pool.sockets.items())[: RANKS + 1]
    name = NamespaceName("bench", "mla", label, "group")
    ids = (tuple(range(1, GROUP_BLOCKS + 1)),)
    system = random.Random(label)
    hashes = tuple(system.randbytes(32) for _ in ids[0])
    source, ranks = _Bytes(), [_Bytes() for _ in range(RANKS)]
    source.blocks = {one: system.randbytes(GROUP_BLOCK_BYTES) for one in ids[0]}
    links = [Link(LinkOptions(str(socket), node), Counters()) for node, socket in sockets]
    try:
        links[0].use(name)
        saved = threading.Event()
        saving = links[0].save(Save(1, "r", 0, hashes, ids, 60.0), source, 0, saved.set)
        saving.computed([0], lambda: None)
        if not saved.wait(70):
            raise CommandError("the group's prefix did not reach the pool")
        nodes = [node for node, _ in sockets[1:]]
        tables = [LoadTable() for _ in ranks]
        for link in links[1:]:
            link.use(name, nodes)
            link.node_id()
        before = _egress(pool)
        began = time.monotonic()
        order = sorted(range(RANKS), key=lambda rank: late_s[rank])
        for rank in order:
            time.sleep(max(0.0, began + late_s[rank] - time.monotonic()))
            links[1 + rank].load(Load("r", 1, 0, hashes, ids, 60.0), tables[rank], ranks[rank])
        for table in tables:
            while not table.take(time.monotonic()):
                table.wait(0.1)
        sent = _egress(pool) - before
    finally:
        for link in links:
            link.close()
    wrong = sum(memory.blocks.get(one) != source.blocks[one] for memory in ranks for one in ids[0])
    return ratio(sent, GROUP_BLOCKS * GROUP_BLOCK_BYTES), wrong


def _egress(pool: Pool) -> float:
    total = 0.0
    for socket in pool.sockets.values():
        with Client(str(socket)) as client:
            counters = client.stats()
            total += sum(counters[name] for name in EGRESS_COUNTERS)
    return total


# --- the command ----------------------------------------------------------------------------------


class _Bench:
    """One run: a pool on its nodes, and each way's engines on them in turn."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        python: Path,
        folder: Path,
        *,
        readers: int,
        prefix_tokens: int,
        link_rate_bits_per_s: float,
    ) -> None:
        """`readers`: engines beside the writer; `prefix_tokens`: of the longest prefix."""
        self._arguments = arguments
        self._python = python
        self._folder = folder
        self._tokens = prefix_tokens + arguments.own_tokens + 8
        self._most = readers
        star = Star.of(readers + 1)
        self.network = OneNetwork(star)
        self.pool = Pool(
            star,
            PoolOptions(
                runner="namespaces",
                arena_bytes=STORE_BYTES,
                replicas=0,
                homes=() if arguments.spread else (star.hosts[0].node_id,),
                link_rate_bits_per_s=link_rate_bits_per_s,
                lease_s=30.0,
                switch_flags=(f"--queue-depth={QUEUE_FRAMES}",),
                agent_flags=(f"--lone-reads={arguments.lone_reads}",),
            ),
            folder / "pool",
        )
        self.pool.network = self.network
        self.ttft = Ttft(self.network, link_rate_bits_per_s)

    @contextlib.asynccontextmanager
    async def engines(self, way: Way, model: Path) -> AsyncIterator[list[Engine]]:
        """The way's engines, the writer first."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(way.stop)
            await way.start()
            hosts = self.pool.star.hosts[: self._most + 1]
            say(f"{way.NAME}: starting {len(hosts)} engines")
            together = [
                stack.enter_async_context(
                    Engine.running(
                        self._python,
                        self._folder / f"{way.NAME}-{host.node_id}.log",
                        {
                            "VLLM_HOST_IP": host.ip,
                            "PYTHONHASHSEED": "0",
                            **(_ALL_THREADS if host is way.holder else _ONE_THREAD),
                            **way.environment(host),
                        },
                        prefix=self.network.prefix(host.node_id),
                        model=str(model),
                        block_size=BLOCK_TOKENS,
                        max_model_len=self._tokens,
                        max_num_batched_tokens=max(self._tokens, 2048),
                        dtype="bfloat16",
                        kv_cache_memory_bytes=256 << 20,
                        kv_transfer_config=way.transfer(host),
                    )
                )
                for host in hosts
            ]
            engines = [await one for one in together]
            for number, engine in enumerate(engines):  # what is compiled at first use
                await engine.generate([prompt_of(("warm", number), 512, 0)], 2)
            yield engines

    async def measure(self, way: Way, model: Path, so_far: dict[str, Any]) -> None:
        """All cases of one way, and of recomputing after the first."""
        arguments, ttft = self._arguments, self.ttft
        async with self.engines(way, model) as [writer, *readers]:
            for prefix in arguments.prefixes:
                for count in arguments.engines:
                    for number in range(rounds_of(prefix, arguments.rounds)):
                        await ttft.measure(
                            way, writer, readers[:count], prefix, number, arguments.own_tokens
                        )
                        so_far |= ttft.report()
                    self._told(way.NAME, prefix, count)
            if not isinstance(way, WAYS[0]):
                return
            if not arguments.recompute:
                return
            for prefix in arguments.prefixes:
                for count in arguments.engines:
                    prompts = [
                        prompt_of(("new", prefix, count), prefix, n, arguments.own_tokens)
                        for n in range(count)
                    ]
                    await ttft.ask(RECOMPUTE, prefix, prompts, readers[:count])
                    self._told(RECOMPUTE, prefix, count)

    def _told(self, name: str, prefix: int, count: int) -> None:
        found = self.ttft.cases[name, prefix, count].report()
        shown = {what: found[what] for what in ("median_s", "processors_busy", "link_busy")}
        say(f"{name}, {prefix} tokens, {count} engines: {shown}")


async def measure_storm(
    arguments: argparse.Namespace, python: Path, folder: Path, model: Path
) -> dict[str, Any]:
    """Half of the loads fail of an engine beside the one that has computed the prompts."""
    if "storm" not in arguments.parts:
        return {}
    folder = folder / "storm"
    folder.mkdir(exist_ok=True)
    bench = _Bench(
        arguments,
        python,
        folder,
        readers=1,
        prefix_tokens=STORM_TOKENS,
        link_rate_bits_per_s=arguments.storm_link_rate,
    )
    async with bench.pool as pool:
        way = WAYS[0](pool, python, folder)
        way.connector = dict(arguments.connector)
        async with bench.engines(way, model) as [writer, reader]:
            found = await bench.ttft.storm(way, pool, writer, reader)
    say(f"half of all loads fail: {found}")
    return found | {"storm_link_rate_bits_per_s": arguments.storm_link_rate}


async def run(arguments: argparse.Namespace, so_far: dict[str, Any]) -> dict[str, Any]:
    python = Path(arguments.python).absolute()
    if not python.exists():
        raise CommandError(f"no {python}: make setup-engines")
    if reason := why_not():
        raise CommandError(reason)
    began = time.monotonic()
    wanted = [way for way in WAYS if way is WAYS[0] or way.NAME in arguments.peers]
    skipped = {way.NAME: why for way in wanted if (why := way.missing(python)) is not None}
    skipped |= {way.NAME: "not asked for" for way in WAYS if way not in wanted}
    with tempfile.TemporaryDirectory(prefix="kvcast-ttft-") as folder_name:
        folder = Path(arguments.logs or folder_name)
        folder.mkdir(parents=True, exist_ok=True)
        model = make_model(python, "bench", folder)
        groups = await measure_groups(arguments.link_rate) if "groups" in arguments.parts else {}
        so_far |= groups
        storm = await measure_storm(arguments, python, folder, model)
        so_far |= storm
        bench = _Bench(
            arguments,
            python,
            folder,
            readers=max(arguments.engines),
            prefix_tokens=max(arguments.prefixes),
            link_rate_bits_per_s=arguments.link_rate,
        )
        async with bench.pool as pool:
            for kind in wanted if "engines" in arguments.parts else ():
                if kind.NAME in skipped:
                    continue
                way = kind(pool, python, folder)
                way.connector = dict(arguments.connector) if kind is WAYS[0] else {}
                try:
                    await bench.measure(way, model, so_far)
                except (EngineError, PartError) as error:
                    if kind is WAYS[0]:
                        raise
                    skipped[kind.NAME] = f"has failed: {str(error)[-300:]}"
    report = bench.ttft.report() | groups | storm
    report["wrong_outputs"] += groups.get("mla_wrong_blocks", 0)
    report["wrong_outputs"] += storm.get("storm_wrong_outputs", 0)
    report |= {
        "parts": arguments.parts,
        "connector": arguments.connector,
        "own_tokens": arguments.own_tokens,
        "skipped": skipped,
        "link_rate_bits_per_s": arguments.link_rate,
        "queue_frames": QUEUE_FRAMES,
        "homes": "all nodes" if arguments.spread else "the writer's node",
        "lone_reads": arguments.lone_reads,
        "rounds": arguments.rounds,
        "took_s": round(time.monotonic() - began, 1),
        "provenance": provenance.provenance(),
    }
    return report


def _show(report: dict[str, Any]) -> None:
    for name in (
        "ttft_over_best_peer_n1",
        "ttft_over_best_peer_n4",
        "growth_1_to_4",
        "wrong_outputs",
        "not_all_cached",
        "mla_group_egress_ratio",
        "storm_over_recompute",
        "ttft_over_best_peer",
        "growth",
        "ttft_over_recompute",
        "cases_limited_by_links",
        "processors_busy",
        "link_busy",
    ):
        if name in report:
            print(f"{name}: {report[name]}")
    for name, why in report["skipped"].items():
        print(f"{name} was not measured: {why}")


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.ttft",
        description=__doc__.partition("\n")[0],
        formatter_class=HelpFormatter,
    )
    peers = [way.NAME for way in WAYS[1:]]
    parser.add_argument("--prefixes", type=int, nargs="+", default=list(PREFIXES), metavar="TOKENS")
    parser.add_argument("--engines", type=int, nargs="+", default=list(ENGINES), metavar="N")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="at 4,096 tokens; of shorter prefixes more"
    )
    parser.add_argument("--peers", nargs="*", default=peers, choices=peers)
    parser.add_argument(
        "--parts",
        nargs="+",
        default=list(PARTS),
        choices=PARTS,
        help="what to measure: engines, loads that fail, an MLA engine's ranks",
    )
    parser.add_argument(
        "--connector",
        type=_options,
        default={},
        metavar="JSON",
        help="further options of kvcast's connector",
    )
    parser.add_argument(
        "--own-tokens", type=int, default=OWN_TOKENS, help="of each prompt, behind the prefix"
    )
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--link-rate", type=float, default=LINK_RATE, help="of every node's link, bits a second"
    )
    parser.add_argument(
        "--storm-link-rate",
        type=float,
        default=STORM_LINK_RATE,
        help="the same, where loads fail",
    )
    parser.add_argument("--spread", action="store_true", help="homes on all nodes")
    parser.add_argument("--lone-reads", choices=("tcp", "reads"), default="tcp", help="of agents")
    add_options(parser)
    return parser


async def _command(arguments: argparse.Namespace) -> int:
    if min(*arguments.prefixes, *arguments.engines, arguments.rounds, arguments.own_tokens) < 1:
        raise CommandError("prefixes, engines, rounds and own tokens are at least 1")
    if any(prefix % max(way.GRAIN_TOKENS for way in WAYS) for prefix in arguments.prefixes):
        raise CommandError("prefixes are multiples of 256 tokens")
    if min(arguments.link_rate, arguments.storm_link_rate) <= 0:
        raise CommandError("links have a rate")
    return await measured(arguments, run, _show, lambda report: bool(report["wrong_outputs"]))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(lambda: _command(arguments), log_level="warning")


if __name__ == "__main__":
    raise SystemExit(main())
