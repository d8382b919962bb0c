"""The question: how soon is the first token there, if other engines have computed the prompt?

    make setup-engines setup-engine-peers
    python -m kvcast.bench.ttft --json FILE

Owns: what engines are asked for, in which order, the report. Must not know: how an engine is run,
or what a way of sharing consists of (`engines/`), or how the pool works.

**What is measured.** One vLLM engine, on a node of its own, computes prefixes. Then N engines on N
other nodes are asked for one of them at the same moment, each with a few tokens of its own behind
it. The time until the first token counts, of each. Every prefix is asked for once, so nothing is in
anybody's cache. This is done with kvcast, and with each peer (`engines/ways.py`): the same options
of the engines, the same nodes, links and rounds. It is done once more with prompts that nobody has
computed (`recompute`). Figures are medians over engines and rounds.

Peers load whatever they find. So kvcast does the same here (`weigh` is off): what is compared is
how fast a prefix comes. By default the writer's node keeps all blocks, so everything is read over
its link; this is the case of one hot prefix. With `--spread`, kvcast's blocks have their homes on
all nodes; peers stay as they are.

**Where.** The nodes are network namespaces (which need root). One software switch joins them, and
its ports have one rate each way. All of them share this machine's processors.

**What was the limit.** Each case says it:

- `link_busy`: the share of the busiest link's rate that was used until the last engine had its
  token; `processors_busy`: the share of all processors' time.
- `limit`: which of the two it was. With `link_busy` near 1 it was the links. With `processors_busy`
  near 1 and `link_busy` well below, the figures say more about this machine.
- `cases_limited_by_links`: in how many of kvcast's cases it was the links.
- `busiest_link_bytes`: what passed that link, with headers; a prefix has 1 KiB a token.
- `not_all_cached`: answers for which a part of the prefix was computed after all.

**The fields at the top** are those of the prefix with which kvcast does worst.

- `ttft_over_best_peer_n1`, `_n4`: kvcast's median ÷ the least of the peers' medians, with one
  engine, and with four at once.
- `growth_1_to_4`: kvcast's median of four engines ÷ that of one.
- `storm_over_recompute`: what loads that fail cost. One engine is asked for eight prefixes at once.
  In half of them, a block's bytes were changed where they lie, so these loads fail. This ÷ the same
  with prompts that nobody has computed. At most 1 says that a pool that fails costs no more than no
  pool. Here the connector weighs, as it does by default, and it has loaded one prefix before. The
  figure is the worst over some rates of links (`--storm-link-rates`), each in a network of its own:
  at one rate a prefix comes sooner than it is computed, at the other later.
- `mla_group_egress_ratio`: bytes that left homes ÷ distinct bytes, the worst of all cases. Four
  ranks on four nodes, which hold the same bytes, read a prefix as a reader group, together or up to
  half a second apart. Homes are on all five nodes. No engine runs here, since tensor parallel ranks
  on several nodes do not run on one machine's processors: four of the connector's links do what
  four workers' do.

**Parts.** A peer that is not installed is named in `skipped`, with what is missing. After
`--minutes` nothing more is begun (what is under way may take two minutes more), and `not_reached`
names what was not begun. Results are written after each case. `--parts`, `--peers`, `--prefixes`
and `--engines` measure in parts, and `--merge FILE FILE …` makes one report of these.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvcast.bench.engines.command import add_options, measured
from kvcast.bench.engines.damage import corrupt
from kvcast.bench.engines.engine import Engine, EngineError, Prompt, make_model
from kvcast.bench.engines.ways import MODEL, STORE_BYTES, WAYS, OneNetwork, Way
from kvcast.bench.processor_time import machine_time
from kvcast.bench.replay import EGRESS_COUNTERS
from kvcast.bench.ttft_report import RECOMPUTE, Case, Found, case_name, merged, whole, worst
from kvcast.hostagent.client import Client
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.link import Link, LinkOptions
from kvcast.hostagent.connectors.loads import LoadTable
from kvcast.hostagent.connectors.naming import NamespaceName
from kvcast.hostagent.connectors.planner import Load, Save
from kvcast.service import provenance, reports
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, CommandError, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.reports import say
from kvcast.service.statistics import ratio
from kvcast.topologies.namespaces import why_not
from kvcast.topologies.part import PartError
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star

PREFIXES: Final = (1024, 4096, 16_384)
ENGINES: Final = (1, 2, 4)
ROUNDS: Final = 3
OWN_TOKENS: Final = 17
BLOCK_TOKENS: Final = 128
LINK_RATE: Final = 1e7
"""Bits a second. At this rate 1,024 tokens take a link 0.9 s. What four engines compute for them
takes two processors a fraction of that."""
STORM_LINK_RATES: Final = (5e7, 1e7)
"""Bits a second. At the first rate a prefix comes in a third of the time that computing it takes.
At the second it comes later than it is computed, so no pool is worth having there."""
MINUTES: Final = 27.0
QUEUE_FRAMES: Final = 512
"""How many frames wait at a port of the switch, at most: 0.25 s at the links' rate."""
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
"""How late each rank of a group begins to load. An engine's steps are at most so far apart."""
GROUP_ROUNDS: Final = 2
STORM_PROMPTS: Final = 8
STORM_TOKENS: Final = 1024
STORED_S: Final = 120.0
"""How long the writer's blocks may take to be stored."""
PARTS: Final = ("engines", "storm", "groups")
Tell: TypeAlias = Callable[[Found], Any]
"""Writes down what has been found so far."""
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
_ALL_THREADS: Final = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
"""For the writer, which computes while all other engines rest."""


def prompt_of(label: object, prefix_tokens: int, own: int, own_tokens: int = OWN_TOKENS) -> Prompt:
    """A prompt: the prefix with this label, and some tokens of the reader's own."""
    shared, mine = random.Random(f"{label}"), random.Random(f"{label} {own}")
    return [shared.randrange(3, 1024) for _ in range(prefix_tokens)] + [
        mine.randrange(3, 1024) for _ in range(own_tokens)
    ]


def rounds_of(prefix_tokens: int, rounds: int) -> int:
    """Rounds for a prefix of this length, where `rounds` is meant for 4,096 tokens. Shorter
    prefixes get more, since they are cheap and noisy; longer ones get fewer."""
    return max(1, round(rounds * math.sqrt(4096 / prefix_tokens)))


class Ttft:
    """Asks engines, and keeps what was found."""

    def __init__(self, network: OneNetwork, link_rate_bits_per_s: float) -> None:
        self._network = network
        self._rate_bytes_per_s = link_rate_bits_per_s / 8
        self.found = Found()

    async def ask(
        self, name: str, prefix_tokens: int, prompts: Sequence[Prompt], readers: Sequence[Engine]
    ) -> list[dict[str, Any]]:
        """Ask each engine for its prompt at the same moment."""
        passed, spent_s = self._network.link_bytes(), machine_time().busy_s
        began = time.monotonic()
        told = await asyncio.gather(
            *(one.generate([prompt], 1) for one, prompt in zip(readers, prompts, strict=True))
        )
        elapsed_s = time.monotonic() - began
        spent_s = machine_time().busy_s - spent_s
        most = max(
            now - before for now, before in zip(self._network.link_bytes(), passed, strict=True)
        )
        case = self.found.cases.setdefault((name, prefix_tokens, len(readers)), Case())
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
        """One round: the readers are asked for a prefix that the writer has computed."""
        label = (prefix_tokens, len(readers), number)
        prompts = [prompt_of(label, prefix_tokens, own, own_tokens) for own in range(len(readers))]
        await self._written(way, writer, prompt_of(label, prefix_tokens, -1, own_tokens))
        answers = await self.ask(way.NAME, prefix_tokens, prompts, readers)
        wrong = self.found.wrong_outputs.setdefault(way.NAME, 0)
        for prompt, answer in zip(prompts, answers, strict=True):
            [expected] = await writer.generate([prompt], 1)
            wrong += answer["tokens"] != expected["tokens"]
        self.found.wrong_outputs[way.NAME] = wrong

    async def storm(
        self, way: Way, pool: Pool, writer: Engine, reader: Engine
    ) -> dict[str, float | None]:
        """Ask one engine for many prompts at once, when half of its loads fail."""

        def prompts_of(label: str) -> list[Prompt]:
            return [prompt_of((label, n), STORM_TOKENS, 0) for n in range(STORM_PROMPTS)]

        stored, new = prompts_of("storm"), prompts_of("storm, new")
        first = prompt_of("storm, first", STORM_TOKENS, 0)
        for prompt in (first, *stored):
            await self._written(way, writer, prompt)
        await reader.generate([first], 1)
        for prompt in stored[::2]:
            if not await corrupt(pool, MODEL, (await writer.hashes(prompt))[0]):
                raise CommandError("a block that was stored is nowhere")
        computed = await reader.generate(new, 1)
        told = await reader.generate(stored, 1)
        expected = await writer.generate(stored, 1)
        wrong = sum(a["tokens"] != b["tokens"] for a, b in zip(told, expected, strict=True))
        stats = await reader.stats()
        failed = {n: v for n, v in stats.items() if n.startswith("failed_loads")}
        return {
            "storm_over_recompute": ratio(told[0]["seconds"], computed[0]["seconds"]),
            "storm_s": round(told[0]["seconds"], 4),
            "storm_recompute_s": round(computed[0]["seconds"], 4),
            "storm_failed_loads": sum(failed.values()),
            "storm_weighed": {n: v for n, v in stats.items() if n.startswith("weighed")},
            "storm_wrong_outputs": wrong,
        }

    async def _written(self, way: Way, writer: Engine, prompt: Prompt) -> None:
        """Have the writer compute the prompt, and wait until all of it is stored."""
        wanted = await way.stored(writer) + len(prompt) // way.GRAIN_TOKENS
        await writer.generate([prompt], 1)
        end = time.monotonic() + STORED_S
        while await way.stored(writer) < wanted:
            if time.monotonic() > end:
                raise CommandError(f"{way.NAME} did not store what the writer has computed")
            await writer.generate([[3]], 1)  # some news of saves come with steps
            await asyncio.sleep(0.1)


# --- the ranks of an MLA engine -------------------------------------------------------------------


class _Bytes:
    """Stands for an engine's memory: blocks of one part, in a dictionary."""

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

    def use_arena(self, arena: memoryview) -> None:
        pass


async def measure_groups(link_rate_bits_per_s: float) -> dict[str, Any]:
    """Measure each case of `LATENESS_S`, in a pool whose blocks have their homes on all nodes, the
    ranks' own among them."""
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
        "mla_group_egress_ratio": worst(ratios),
        "mla_groups": cases,
        "mla_wrong_blocks": wrong,
    }


def group_egress(pool: Pool, label: str, late_s: Sequence[float]) -> tuple[float | None, int]:
    """Four ranks read a prefix that a fifth node has saved, each `late_s` after the start.

    Returns the egress ratio and the number of wrong blocks. Every block is needed by some rank on
    another node than its home, so every block must leave its home once.
    """
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
        saving = links[0].save(Save(1, "r", 0, hashes, ids, 60.0), source, 0, lambda _: saved.set())
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
    """One run: the nodes with a pool, and on them the engines of each way, in turn."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        python: Path,
        folder: Path,
        *,
        readers: int,
        prefix_tokens: int,
        link_rate_bits_per_s: float,
        until: float = math.inf,
    ) -> None:
        """`readers`: how many engines there are beside the writer; `prefix_tokens`: of the longest
        prefix; `until`: the time after which no case is begun."""
        self._until = until
        self.not_reached: list[str] = []
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
        """The engines of this way, the writer first."""
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

    async def measure(self, way: Way, model: Path, tell: Tell) -> None:
        """Measure all cases of one way; after the first way, those of recomputing as well."""
        arguments, ttft = self._arguments, self.ttft
        # An engine alone comes first: agents that had company reckon with it for some seconds.
        cases = [(prefix, count) for count in arguments.engines for prefix in arguments.prefixes]
        recompute = cases if isinstance(way, WAYS[0]) and arguments.recompute else []
        if self._is_over():
            self._leave_out(way.NAME, cases)
            self._leave_out(RECOMPUTE, recompute)
            return
        async with self.engines(way, model) as [writer, *readers]:
            for prefix, count in cases:
                for number in range(rounds_of(prefix, arguments.rounds)):
                    if self._is_over():
                        break
                    await ttft.measure(
                        way, writer, readers[:count], prefix, number, arguments.own_tokens
                    )
                self._told(way.NAME, prefix, count, tell)
            for prefix, count in recompute:
                prompts = [
                    prompt_of(("new", prefix, count), prefix, n, arguments.own_tokens)
                    for n in range(count)
                ]
                if not self._is_over():
                    await ttft.ask(RECOMPUTE, prefix, prompts, readers[:count])
                self._told(RECOMPUTE, prefix, count, tell)

    def _is_over(self) -> bool:
        """Whether there is no time left to begin another case."""
        return time.monotonic() > self._until

    def _leave_out(self, name: str, cases: Sequence[tuple[int, int]]) -> None:
        self.not_reached += [case_name(name, prefix, count) for prefix, count in cases]

    def _told(self, name: str, prefix: int, count: int, tell: Tell) -> None:
        case = self.ttft.found.cases.get((name, prefix, count))
        if case is None:
            self._leave_out(name, [(prefix, count)])
            return
        found = case.report()
        shown = {what: found[what] for what in ("median_s", "processors_busy", "link_busy")}
        say(f"{case_name(name, prefix, count)}: {shown}")
        tell(self.ttft.found)


async def measure_storm(
    arguments: argparse.Namespace, python: Path, folder: Path, model: Path
) -> dict[str, Any]:
    """Measure the storm (see the module's text) at each rate of links: half of the loads fail of an
    engine beside the writer."""
    rates = []
    for rate in arguments.storm_link_rates:
        logs = folder / f"storm-{rate:g}"
        logs.mkdir(exist_ok=True)
        bench = _Bench(
            arguments,
            python,
            logs,
            readers=1,
            prefix_tokens=STORM_TOKENS,
            link_rate_bits_per_s=rate,
        )
        async with bench.pool as pool:
            way = WAYS[0](pool, python, logs)
            way.connector = dict(arguments.connector)
            async with bench.engines(way, model) as [writer, reader]:
                found = await bench.ttft.storm(way, pool, writer, reader)
        say(f"half of all loads fail, links of {rate:g} bits a second: {found}")
        rates.append({"link_rate_bits_per_s": rate} | found)
    return {
        "storm_over_recompute": worst(one["storm_over_recompute"] for one in rates),
        "storm_wrong_outputs": sum(one["storm_wrong_outputs"] for one in rates),
        "storm_rates": rates,
    }


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
    parts: dict[str, Any] = {}
    facts: dict[str, Any] = {
        "parts": arguments.parts,
        "connector": arguments.connector,
        "own_tokens": arguments.own_tokens,
        "skipped": skipped,
        "not_reached": [],
        "link_rate_bits_per_s": arguments.link_rate,
        "queue_frames": QUEUE_FRAMES,
        "homes": "all nodes" if arguments.spread else "the writer's node",
        "lone_reads": arguments.lone_reads,
        "rounds": arguments.rounds,
        "provenance": provenance.provenance(),
    }

    def tell(found: Found) -> dict[str, Any]:
        """Write down what has been found so far."""
        facts["took_s"] = round(time.monotonic() - began, 1)
        so_far.update(whole(found, parts, facts))
        if arguments.json and arguments.json != "-":
            reports.write_json(arguments.json, so_far | {"incomplete": "under way"})
        return so_far

    with tempfile.TemporaryDirectory(prefix="kvcast-ttft-") as folder_name:
        folder = Path(arguments.logs or folder_name)
        folder.mkdir(parents=True, exist_ok=True)
        model = make_model(python, "bench", folder)
        if "groups" in arguments.parts:
            parts |= await measure_groups(arguments.link_rate)
            tell(Found())
        if "storm" in arguments.parts:
            parts |= await measure_storm(arguments, python, folder, model)
            tell(Found())
        if "engines" not in arguments.parts:
            return tell(Found())
        bench = _Bench(
            arguments,
            python,
            folder,
            readers=max(arguments.engines),
            prefix_tokens=max(arguments.prefixes),
            link_rate_bits_per_s=arguments.link_rate,
            until=began + 60 * arguments.minutes,
        )
        facts["not_reached"] = bench.not_reached
        async with bench.pool as pool:
            for kind in wanted:
                if kind.NAME in skipped:
                    continue
                way = kind(pool, python, folder)
                way.connector = {"weigh": False} | arguments.connector if kind is WAYS[0] else {}
                try:
                    await bench.measure(way, model, tell)
                except (EngineError, PartError) as error:
                    if kind is WAYS[0]:
                        raise
                    skipped[kind.NAME] = f"has failed: {str(error)[-300:]}"
        return tell(bench.ttft.found)


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
    if report["not_reached"]:
        print(f"not reached in time: {'; '.join(report['not_reached'])}")


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
        "--storm-link-rates",
        type=float,
        nargs="+",
        default=list(STORM_LINK_RATES),
        metavar="RATE",
        help="the same, where loads fail",
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="after so many, begin nothing more"
    )
    parser.add_argument(
        "--merge", nargs="+", metavar="FILE", help="measure nothing: make one report of these"
    )
    parser.add_argument("--spread", action="store_true", help="homes on all nodes")
    parser.add_argument("--lone-reads", choices=("tcp", "reads"), default="tcp", help="of agents")
    add_options(parser)
    return parser


def _merge(arguments: argparse.Namespace) -> int:
    found = []
    for name in arguments.merge:
        try:
            found.append(json.loads(Path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise CommandError(f"{name}: {error}") from error
    try:
        report = merged(found)
    except (KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"these are no reports of this benchmark: {error!r}") from error
    reports.report_to(arguments.json, report, _show)
    return EXIT_FAILED if report["wrong_outputs"] else EXIT_OK


async def _command(arguments: argparse.Namespace) -> int:
    if arguments.merge:
        return _merge(arguments)
    if min(*arguments.prefixes, *arguments.engines, arguments.rounds, arguments.own_tokens) < 1:
        raise CommandError("prefixes, engines, rounds and own tokens are at least 1")
    if any(prefix % max(way.GRAIN_TOKENS for way in WAYS) for prefix in arguments.prefixes):
        raise CommandError("prefixes are multiples of 256 tokens")
    if min(arguments.link_rate, *arguments.storm_link_rates, arguments.minutes) <= 0:
        raise CommandError("links have a rate, and there is some time")
    return await measured(arguments, run, _show, lambda report: bool(report["wrong_outputs"]))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(lambda: _command(arguments), log_level="warning")


if __name__ == "__main__":
    raise SystemExit(main())
