"""How soon does a first token come from real engines, by how requests are routed?

    make setup-engines
    python -m kvcast.bench.route_engines --trace requests.jsonl --json FILE

It takes six minutes or so on two processors that do nothing else: a minute for each policy, and
longer where they do.

Owns: the requests, when each is sent and by whose choice, the report. Must not know: how an engine
is run (`engines/server.py`). `kvcast.bench.route` asks the same of simulated engines, many more.

Some vLLM servers, each on a node of a pool and on a processor of its own, take the first requests
of a trace (`kvcast.workloads.traces`). Prompts are made of the trace's block hashes,
`--block-tokens` a block: what is equal there is equal here. First all engines together compute
prompts that are new, which says what a token costs here; the trace's times are then scaled so that
the load is `--load` (as `kvcast.bench.route` defines it). The same requests at the same times go
through `kvcast route`, which hears the engines' KV events; and to the engines themselves, without a
proxy between: `round_robin`; `prefix_hash`, by the hash of the prompt's beginning, of the lengths
`--prefix-hash-tokens` the one with the best p99. Each of them has prompts of its own in each round,
so that it finds nothing of another's, and all have the pool.

`simulated_p99_s`: the same requests before simulated engines of the same costs
(`route_simulation`), where chance and crowded processors have no part. How far apart policies are
there is what a run here can show at best. That takes requests that wait for each other, and enough
of them that the slowest hundredth is more than one or two.

Engines that shared processors would take from each other what a router gives them: one with a long
queue would compute faster because the others rest. So there are as many as processors, two or
three, and each is bound to one (`each_on_a_processor`); what sends the requests, the router and the
pool are not bound, and take a little of all.

Rates are shares of prompts' tokens that were not computed. `wrong_outputs`: at the end the first
prompts are asked again of every engine and of the router, and what is answered otherwise than by
the first engine is counted (in bfloat16 the order of sums may rarely change a token, too).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
from kvcast.bench.engines.command import add_options, measured
from kvcast.bench.engines.engine import START_S, EngineError, make_model, transfer
from kvcast.bench.engines.server import Server, Streamed, stream
from kvcast.bench.processor_time import machine_time
from kvcast.bench.route import Kvcast, PrefixHash, RoundRobin, figures, of_trace, scaled
from kvcast.bench.route_simulation import EngineModel, SimulatedRequest, Simulation
from kvcast.routing.core.costs import CostModel
from kvcast.routing.core.router import RouterOptions
from kvcast.service import provenance, reports
from kvcast.service.commands import CommandError, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.reports import say
from kvcast.service.statistics import percentile, ratio, rounded
from kvcast.topologies.part import Part
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star
from kvcast.workloads.traces import read_trace

OWN_TOKENS: Final = 5
"""Tokens behind a prompt's blocks, so that something is left to compute."""
ANSWER_TOKENS: Final = 2
SLOTS: Final = 8
"""Requests that an engine runs at once."""
CALIBRATION_TOKENS: Final = 1024
CHECKED: Final = 8
KV_BYTES_PER_TOKEN: Final = 1024
POOL_BYTES_PER_S: Final = 2e7
POOL_LATENCY_S: Final = 0.03
"""What a load costs here, as `kvcast route` is told it: processes that share a few processors."""
MODEL_NAME: Final = "bench"


def requests_of(
    path: str, count: int, block_tokens: int, most_tokens: int
) -> list[SimulatedRequest]:
    """A trace's first requests, in blocks of so many tokens; of longer prompts the beginning."""
    found = []
    for one in of_trace(read_trace(path))[:count]:
        blocks = one.blocks[: most_tokens // block_tokens]
        tokens = len(blocks) * block_tokens + OWN_TOKENS
        found.append(replace(one, blocks=blocks, tokens=tokens, block_tokens=float(block_tokens)))
    return found


def prompt_of(request: SimulatedRequest, salt: str) -> list[int]:
    """The tokens of a request, those of a block made of its hash."""
    tokens: list[int] = []
    for block in request.blocks:
        made = random.Random(f"{salt} {block}")
        tokens += [made.randrange(3, 1024) for _ in range(round(request.block_tokens))]
    own = random.Random(f"{salt} own {request.number}")
    return tokens + [own.randrange(3, 1024) for _ in range(OWN_TOKENS)]


class Played:
    """What became of a policy's requests, all rounds together."""

    def __init__(self) -> None:
        self.answers: list[Streamed] = []
        self.failed = 0
        self.late_s = 0.0
        """By how much a request was sent too late, at most."""
        self.busy: list[float] = []

    def report(self) -> dict[str, Any]:
        ttfts = [one.ttft_s for one in self.answers]
        cached = sum(one.cached_tokens for one in self.answers)
        return {
            "requests": len(ttfts),
            "failed": self.failed,
            "hit_rate": ratio(cached, sum(one.prompt_tokens for one in self.answers)),
            "ttft_p50_s": rounded(percentile(ttfts, 0.50)),
            "ttft_p90_s": rounded(percentile(ttfts, 0.90)),
            "ttft_p99_s": rounded(percentile(ttfts, 0.99)),
            "sent_late_s": round(self.late_s, 3),
            "processors_busy": round(statistics.fmean(self.busy), 3) if self.busy else None,
        }


class Bench:
    """The engines, the router, and who is asked."""

    def __init__(self, urls: Sequence[str], router: str, session: aiohttp.ClientSession) -> None:
        self._urls = urls
        self._router = router
        self._session = session
        self.played: dict[str, Played] = {}

    async def calibrate(self, tokens: int) -> float:
        """Seconds that a new token costs an engine while all compute prompts of so many."""
        for round_number in range(2):  # the first has what is compiled at first use
            prompts = []
            for at in range(len(self._urls)):
                made = random.Random(f"calibration {round_number} {at}")
                prompts.append([made.randrange(3, 1024) for _ in range(tokens)])
            answers = await asyncio.gather(
                *(
                    stream(self._session, url, prompt, 1)
                    for url, prompt in zip(self._urls, prompts, strict=True)
                )
            )
        return statistics.fmean(one.ttft_s for one in answers) / tokens

    async def play(
        self,
        name: str,
        policy: RoundRobin | PrefixHash | None,
        requests: Sequence[SimulatedRequest],
        salt: str,
    ) -> None:
        """Send all requests at their times, by the policy's choice; None: through the router."""
        played = self.played.setdefault(name, Played())
        prompts = [prompt_of(one, salt) for one in requests]
        first_s = requests[0].arrives_s
        began, spent_s = time.monotonic(), machine_time().busy_s

        async def ask(request: SimulatedRequest, prompt: list[int]) -> None:
            due = began + request.arrives_s - first_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            played.late_s = max(played.late_s, time.monotonic() - due)
            url = self._router
            if policy is not None:
                url = self._urls[policy.choose(request, due)[0]]
            try:
                answer = await stream(self._session, url, prompt, ANSWER_TOKENS)
                played.answers.append(answer)
            except (EngineError, aiohttp.ClientError, TimeoutError) as error:
                say(f"{name}: {error}")
                played.failed += 1
            finally:
                if policy is not None:
                    policy.ended(request, time.monotonic())

        await asyncio.gather(
            *(ask(one, prompt) for one, prompt in zip(requests, prompts, strict=True))
        )
        elapsed_s = time.monotonic() - began
        played.busy.append((machine_time().busy_s - spent_s) / elapsed_s / (os.cpu_count() or 1))
        say(f"{name}: {played.report()}")

    async def wrong_outputs(self, requests: Sequence[SimulatedRequest], salt: str) -> int:
        """The first prompts that the router had, asked of every engine: answers that differ."""
        wrong = 0
        for request in requests[:CHECKED]:
            prompt = prompt_of(request, salt)
            told = [
                (await stream(self._session, url, prompt, ANSWER_TOKENS)).tokens
                for url in (*self._urls, self._router)
            ]
            wrong += sum(tokens != told[0] for tokens in told)
        return wrong


async def run(arguments: argparse.Namespace, so_far: dict[str, Any]) -> dict[str, Any]:
    python = Path(arguments.python).absolute()
    if not python.exists():
        raise CommandError(f"no {python}: make setup-engines")
    requests = requests_of(
        arguments.trace, arguments.requests, arguments.block_tokens, arguments.most_tokens
    )
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(
            arguments.logs
            or stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcast-route-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        model = make_model(python, MODEL_NAME, folder)
        pool = await stack.enter_async_context(
            Pool(
                Star.of(arguments.engines),
                PoolOptions(arena_bytes=512 << 20, replicas=0, lease_s=30.0),
                folder / "pool",
            )
        )
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=600),
                connector=aiohttp.TCPConnector(limit=0),
            )
        )
        processors = sorted(os.sched_getaffinity(0))
        bound = arguments.engines <= len(processors) and shutil.which("taskset") is not None
        say(f"starting {arguments.engines} engines, {'' if bound else 'not '}each on a processor")
        servers = await asyncio.gather(
            *(
                stack.enter_async_context(
                    Server.running(
                        python,
                        folder,
                        node,
                        ("127.0.0.1", arguments.first_port + 1 + at),
                        model,
                        *("--block-size", str(arguments.block_tokens), "--dtype", "bfloat16"),
                        *("--max-model-len", str(arguments.most_tokens + 64)),
                        *("--max-num-seqs", str(SLOTS)),
                        *(
                            "--num-gpu-blocks-override",
                            str(arguments.kv_tokens // arguments.block_tokens),
                        ),
                        transfer=transfer(socket, model=MODEL_NAME, deadline_s=10.0, lookup_s=2.0),
                        processor=processors[at % len(processors)] if bound else None,
                    )
                )
                for at, (node, socket) in enumerate(pool.sockets.items())
            )
        )
        urls = [server.url for server in servers]
        bench = Bench(urls, f"http://127.0.0.1:{arguments.first_port}", session)
        token_s = await bench.calibrate(min(CALIBRATION_TOKENS, arguments.most_tokens))
        costs = CostModel(
            prefill_s_per_token=token_s,
            attention_s_per_token2=0.0,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            pool_bytes_per_s=POOL_BYTES_PER_S,
            pool_latency_s=POOL_LATENCY_S,
        )
        timed, factor = scaled(requests, costs, arguments.engines, arguments.load)
        span_s = timed[-1].arrives_s - timed[0].arrives_s
        say(f"{1 / token_s:.0f} tokens a second and engine; each round takes {span_s:.0f} s or so")
        simulated = simulated_p99_s(
            timed, costs, arguments.engines, arguments.kv_tokens, arguments.prefix_hash_tokens
        )
        so_far["simulated_p99_s"] = simulated
        wrong = 0
        for round_number in range(arguments.rounds):
            router = Part(
                "route",
                [
                    *(sys.executable, "-m", "kvcast.routing.daemon"),
                    *("--listen", f"127.0.0.1:{arguments.first_port}", "--pool-saves-all"),
                    *(
                        word
                        for node, server in zip(pool.sockets, servers, strict=True)
                        for word in ("--engine", f"{node}={server.url},events={server.events}")
                    ),
                    *("--block-tokens", str(arguments.block_tokens), "--slots", str(SLOTS)),
                    *("--max-in-flight", "100000", "--attention-s-per-token2", "0"),
                    *("--prefill-tokens-per-s", f"{1 / token_s:.6g}"),
                    *("--kv-bytes-per-token", str(KV_BYTES_PER_TOKEN)),
                    *("--pool-bytes-per-s", f"{POOL_BYTES_PER_S:g}"),
                    *("--pool-latency", f"{POOL_LATENCY_S:g}"),
                ],
                log_path=folder / f"route-{round_number}.log",
            )
            try:
                await router.start()
                await router.wait_ready(START_S)
                policies = _others(arguments.engines, arguments.prefix_hash_tokens)
                names = ["kvcast", *policies]
                names = names[round_number % len(names) :] + names[: round_number % len(names)]
                for name in names:
                    await bench.play(name, policies.get(name), timed, f"{name} {round_number}")
                    so_far |= report_of(bench.played)
                    if arguments.json and arguments.json != "-":
                        reports.write_json(arguments.json, so_far | {"incomplete": "under way"})
                wrong += await bench.wrong_outputs(timed, f"kvcast {round_number}")
            finally:
                await router.stop()
    return report_of(bench.played) | {
        "wrong_outputs": wrong,
        "simulated_p99_s": simulated,
        "trace": os.path.basename(arguments.trace),
        "requests": len(requests),
        "engines": arguments.engines,
        "each_on_a_processor": bound,
        "load": arguments.load,
        "times_divided_by": round(factor, 4),
        "prefill_tokens_per_s": round(1 / token_s, 1),
        "rounds": arguments.rounds,
        "took_s": round(time.monotonic() - began, 1),
        "provenance": provenance.provenance(),
    }


def _others(engines: int, prefix_hash_tokens: Sequence[int]) -> dict[str, RoundRobin | PrefixHash]:
    """The policies that the router is compared with, which know of no request yet."""
    hashes = {f"prefix_hash_{n}": PrefixHash(engines, n, math.inf) for n in prefix_hash_tokens}
    return {"round_robin": RoundRobin(engines)} | hashes


def simulated_p99_s(
    requests: Sequence[SimulatedRequest],
    costs: CostModel,
    engines: int,
    kv_tokens: int,
    prefix_hash_tokens: Sequence[int],
) -> dict[str, float | None]:
    """The 99th percentile of each policy on the same requests before simulated engines that take
    what the real ones were told to take, and nothing else takes any time of."""
    model = EngineModel(costs, slots=SLOTS, kv_tokens=kv_tokens)
    options = RouterOptions(
        costs=costs,
        slots=SLOTS,
        pool_saves_all=True,
        max_in_flight=100_000,
        prefetches=False,  # as before the real ones: nobody is told of their agents
    )
    found = {}
    short = [replace(one, answer_tokens=ANSWER_TOKENS) for one in requests]
    policies = {"kvcast": Kvcast(engines, options)} | _others(engines, prefix_hash_tokens)
    for name, policy in policies.items():
        simulation = Simulation(model, policy, [1.0] * engines)
        simulation.run(short)
        found[name] = figures(list(simulation.outcomes.values()), 0)["ttft_p99_s"]
    return found


def report_of(played: dict[str, Played]) -> dict[str, Any]:
    """The router's figures on top, everybody's below."""
    policies = {name: one.report() for name, one in played.items()}
    hashes = [one for name, one in policies.items() if name.startswith("prefix_hash")]
    best = min(hashes, key=lambda one: one["ttft_p99_s"] or math.inf, default=None)
    own, turns = policies.get("kvcast"), policies.get("round_robin")
    found: dict[str, Any] = {"policies": policies}
    if own is not None:
        found |= {name: own[name] for name in ("hit_rate", "ttft_p50_s", "ttft_p99_s")}
        for name, other in (("round_robin", turns), ("prefix_hash", best)):
            if other is not None and own["requests"] and other["requests"]:
                found[f"p99_over_{name}"] = ratio(own["ttft_p99_s"], other["ttft_p99_s"])
                found[f"p50_over_{name}"] = ratio(own["ttft_p50_s"], other["ttft_p50_s"])
    return found


def _show(report: dict[str, Any]) -> None:
    for name, found in report["policies"].items():
        print(f"{name}: {found}")
    for name in (
        "p99_over_round_robin",
        "p99_over_prefix_hash",
        "simulated_p99_s",
        "wrong_outputs",
    ):
        print(f"{name}: {report.get(name)}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.route_engines",
        description=__doc__.partition("\n")[0],
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--trace", required=True, metavar="FILE", help="in Mooncake's form")
    parser.add_argument("--requests", type=int, default=240, help="of the trace, from its start")
    parser.add_argument(
        "--engines",
        type=int,
        default=max(2, min(3, os.cpu_count() or 1)),
        help="each on a processor of its own, if there are so many",
    )
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--block-tokens", type=int, default=32, help="of a block of the trace")
    parser.add_argument("--most-tokens", type=int, default=2048, help="of a prompt")
    parser.add_argument("--kv-tokens", type=int, default=32_768, help="an engine's memory")
    parser.add_argument("--prefix-hash-tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument(
        "--first-port", type=int, default=18_400, help="the router's; engines follow"
    )
    add_options(parser)
    return parser


async def _command(arguments: argparse.Namespace) -> int:
    low = min(arguments.engines, arguments.rounds, arguments.block_tokens, arguments.requests - 1)
    if low < 1 or arguments.load <= 0 or arguments.most_tokens < arguments.block_tokens:
        raise CommandError("two requests, an engine, a round and a block are the least")
    return await measured(arguments, run, _show, _is_wrong)


def _is_wrong(report: dict[str, Any]) -> bool:
    failed = any(one["failed"] for one in report["policies"].values())
    return failed or bool(report["wrong_outputs"])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(lambda: _command(arguments), log_level="warning")


if __name__ == "__main__":
    raise SystemExit(main())
