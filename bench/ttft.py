"""The question: how soon is the first token there, if other engines have computed the prompt?

    make setup-engines
    python -m kvcast.bench.ttft --json FILE

Owns: what engines are asked for, in which order, the report. Must not know: how an engine is run
(`engines/`), or how the pool works.

One vLLM engine computes prefixes, on a node of its own. Then N engines on N other nodes are asked
for one of them at the same moment, with a few tokens of their own behind it; the time until the
first token is what counts, of each. Every prefix is asked for once, so nothing is in anybody's
cache. Beside it the same N engines compute prompts that nobody has computed (`recompute`). Figures
are medians over engines and rounds.

The nodes' links have one rate, emulated by the software switch; everything else shares this
machine's processors. Whether the links are the limit is told by `processors_busy`, the share of all
processors' time that was used while the N engines waited: near 1, the figures say more about this
machine.

`mla_group_egress_ratio`: four ranks on four nodes that hold the same bytes read a prefix as a
reader group: bytes that left homes ÷ distinct bytes that had to come. No engine runs there: four of
the connector's links do what four workers' do, since tensor parallel ranks on several nodes do not
run on one machine's processors.

Peers (MooncakeStoreConnector, LMCacheMPConnector) are not run by this version; `skipped` says so,
and what is measured beside them is null.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvcast.bench.engines.engine import Engine, EngineError, Prompt, make_model, transfer
from kvcast.bench.replay import EGRESS_COUNTERS
from kvcast.hostagent.client import Client
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.link import Link, LinkOptions
from kvcast.hostagent.connectors.loads import LoadTable
from kvcast.hostagent.connectors.naming import NamespaceName
from kvcast.hostagent.connectors.planner import Load, Save
from kvcast.service import provenance, reports
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, CommandError, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.statistics import ratio
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star

PREFIXES: Final = (1024, 4096, 16_384)
ENGINES: Final = (1, 2, 4)
ROUNDS: Final = 3
OWN_TOKENS: Final = 17
BLOCK_TOKENS: Final = 32
ARENA_BYTES: Final = 1 << 30
RANKS: Final = 4
GROUP_BLOCKS: Final = 32
GROUP_BLOCK_BYTES: Final = 128 * 1024
_SKIPPED: Final = "not run by this version of the bench"
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1"}


def prompt_of(label: object, prefix_tokens: int, own: int) -> Prompt:
    """A prompt: a prefix by its label, and some tokens of the reader's own."""
    shared, mine = random.Random(f"{label}"), random.Random(f"{label} {own}")
    return [shared.randrange(3, 1024) for _ in range(prefix_tokens)] + [
        mine.randrange(3, 1024) for _ in range(OWN_TOKENS)
    ]


class Ttft:
    """The engines, standing ready, and what they have done so far."""

    def __init__(self, writer: Engine, readers: Sequence[Engine]) -> None:
        self._writer = writer
        self._readers = readers
        self.seconds: dict[tuple[str, int, int], list[float]] = {}
        self.busy: list[float] = []
        self.wrong_outputs = 0
        self.held: dict[tuple[int, int], list[float]] = {}

    async def measure(self, prefix_tokens: int, engines: int, number: int) -> None:
        """One round: a prefix that the writer has computed, and one that nobody has."""
        readers = self._readers[:engines]
        for way in ("kvcast", "recompute"):
            label = (way, prefix_tokens, engines, number)
            prompts = [prompt_of(label, prefix_tokens, own) for own in range(engines)]
            if way == "kvcast":
                await self._written(prompts[0])
            processors_s, began = _processors_s(), time.monotonic()
            told = await asyncio.gather(
                *(one.generate([prompt], 1) for one, prompt in zip(readers, prompts, strict=True))
            )
            spent = _processors_s() - processors_s
            if way == "kvcast":
                elapsed_s = time.monotonic() - began
                self.busy.append(spent / elapsed_s / (os.cpu_count() or 1))
                shares = [answer["cached"] / prefix_tokens for [answer] in told]
                self.held.setdefault((prefix_tokens, engines), []).extend(shares)
            times = self.seconds.setdefault((way, prefix_tokens, engines), [])
            times.extend(answer["seconds"] for [answer] in told)
            if way == "kvcast":
                for prompt, [answer] in zip(prompts, told, strict=True):
                    [expected] = await self._writer.generate([prompt], 1)
                    self.wrong_outputs += answer["tokens"] != expected["tokens"]

    async def _written(self, prompt: Prompt) -> None:
        """Have the writer compute the prompt, and all its blocks put into the pool."""
        before = (await self._writer.stats()).get("save_blocks", 0)
        await self._writer.generate([prompt], 1)
        wanted = before + len(prompt) // BLOCK_TOKENS
        for _ in range(300):
            await self._writer.generate([[3]], 1)  # news of saves come with steps
            if (await self._writer.stats()).get("save_blocks", 0) >= wanted:
                return
            await asyncio.sleep(0.1)
        raise CommandError("the writer's blocks did not reach the pool")

    def report(self) -> dict[str, Any]:
        """The numbers as plain data, in seconds."""
        medians = {case: statistics.median(times) for case, times in self.seconds.items()}
        longest = max((prefix for _, prefix, _ in medians), default=0)
        growth = None
        if ("kvcast", longest, 1) in medians and ("kvcast", longest, 4) in medians:
            growth = ratio(medians["kvcast", longest, 4], medians["kvcast", longest, 1])
        return {
            "ttft_over_best_peer_n1": None,
            "ttft_over_best_peer_n4": None,
            "growth_1_to_4": growth,
            "wrong_outputs": self.wrong_outputs,
            "processors_busy": round(statistics.median(self.busy), 3) if self.busy else None,
            "ttft_over_recompute": {
                f"{prefix} tokens, {engines} engines": ratio(
                    medians["kvcast", prefix, engines], medians["recompute", prefix, engines]
                )
                for way, prefix, engines in medians
                if way == "kvcast"
            },
            "cases": [
                {
                    "way": way,
                    "prefix_tokens": prefix,
                    "engines": engines,
                    "median_s": round(median_s, 4),
                    "seconds": [round(one, 4) for one in self.seconds[way, prefix, engines]],
                    **(
                        {"cached_share": round(min(self.held[prefix, engines]), 4)}
                        if way == "kvcast"
                        else {}
                    ),
                }
                for (way, prefix, engines), median_s in sorted(medians.items())
            ],
        }


def _processors_s() -> float:
    """Processor time that all processes of the machine have used, in seconds."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(one) for one in fields]
    return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


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


def group_egress(pool: Pool, label: str) -> tuple[float | None, int]:
    """Four ranks read a prefix that a fifth node has saved: (egress ratio, wrong blocks)."""
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
        links[0].save(Save(1, "r", 0, hashes, ids, 60.0), source, 0, saved.set, lambda: None)
        if not saved.wait(70):
            raise CommandError("the group's prefix did not reach the pool")
        nodes = [node for node, _ in sockets[1:]]
        tables = [LoadTable() for _ in ranks]
        for link in links[1:]:
            link.use(name, nodes)
            link.node_id()
        before = _egress(pool)
        for number, (link, table, memory) in enumerate(zip(links[1:], tables, ranks, strict=True)):
            link.load(Load("r", 1, 0, hashes, ids, 60.0), table, memory, expect=number > 0)
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


async def run(arguments: argparse.Namespace, so_far: dict[str, Any]) -> dict[str, Any]:
    python = Path(arguments.python).absolute()
    if not python.exists():
        raise CommandError(f"no {python}: make setup-engines")
    most = max(arguments.engines)
    tokens = max(arguments.prefixes) + OWN_TOKENS + 8
    with tempfile.TemporaryDirectory(prefix="kvcast-ttft-") as folder_name:
        folder = Path(folder_name)
        model = make_model(python, "bench", folder)
        options = PoolOptions(
            arena_bytes=ARENA_BYTES,
            replicas=0,
            link_rate_bits_per_s=arguments.link_rate,
        )
        async with (
            Pool(Star.of(max(most, RANKS) + 1), options) as pool,
            contextlib.AsyncExitStack() as stack,
        ):
            engines = []
            for node in list(pool.sockets)[: most + 1]:
                _say(f"starting an engine on {node}")
                config = transfer(pool.sockets[node], model="bench", deadline_s=600.0, lookup_s=5.0)
                running = Engine.running(
                    python,
                    folder / f"{node}.log",
                    _ENVIRONMENT,
                    model=str(model),
                    block_size=BLOCK_TOKENS,
                    max_model_len=tokens,
                    max_num_batched_tokens=max(tokens, 2048),
                    dtype="bfloat16",
                    kv_cache_memory_bytes=1 << 30,
                    kv_transfer_config=config,
                )
                engines.append(await stack.enter_async_context(running))
            ttft = Ttft(engines[0], engines[1:])
            for engine in engines:  # what is compiled at first use is not measured
                await engine.generate([prompt_of(("warm", id(engine)), 512, 0)], 2)
            for prefix in arguments.prefixes:
                for count in arguments.engines:
                    for number in range(arguments.rounds):
                        await ttft.measure(prefix, count, number)
                        so_far |= ttft.report()
                    shown = {
                        way: round(statistics.median(ttft.seconds[way, prefix, count]), 3)
                        for way in ("kvcast", "recompute")
                    }
                    _say(f"{prefix} tokens, {count} engines: seconds {shown}")
            found = await asyncio.to_thread(group_egress, pool, "first")
            report = ttft.report() | {"mla_group_egress_ratio": found[0]}
            report["wrong_outputs"] += found[1]
    report |= {
        "skipped": {"MooncakeStoreConnector": _SKIPPED, "LMCacheMPConnector": _SKIPPED},
        "link_rate_bits_per_s": arguments.link_rate,
        "rounds": arguments.rounds,
        "provenance": provenance.provenance(),
    }
    return report


def _say(text: str) -> None:
    print(f"kvcast: {text}", file=sys.stderr, flush=True)


def _show(report: dict[str, Any]) -> None:
    for name in ("ttft_over_recompute", "growth_1_to_4", "wrong_outputs", "processors_busy"):
        print(f"{name}: {report[name]}")
    print(f"mla_group_egress_ratio: {report['mla_group_egress_ratio']}")
    for name, why in report["skipped"].items():
        print(f"{name}: {why}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.ttft",
        description=__doc__.partition("\n")[0],
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write the report here; - = stdout")
    parser.add_argument("--python", default=".venv-engines/bin/python", help="the engines' Python")
    parser.add_argument("--prefixes", type=int, nargs="+", default=list(PREFIXES), metavar="TOKENS")
    parser.add_argument("--engines", type=int, nargs="+", default=list(ENGINES), metavar="N")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--link-rate", type=float, default=5e7, help="of every node's link, bits a second"
    )
    return parser


async def _command(arguments: argparse.Namespace) -> int:
    if min(*arguments.prefixes, *arguments.engines, arguments.rounds) < 1:
        raise CommandError("prefixes, engines and rounds are at least 1")
    with reports.in_the_making(arguments.json) as so_far:
        try:
            report = await run(arguments, so_far)
        except EngineError as error:
            raise CommandError(str(error)) from error
        so_far |= report
    reports.report_to(arguments.json, report, _show)
    return EXIT_FAILED if report["wrong_outputs"] else EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(lambda: _command(arguments), log_level="warning")


if __name__ == "__main__":
    raise SystemExit(main())
