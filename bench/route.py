"""How soon does a first token come, by how requests are routed? A simulation.

The router's own core (`kvcast.routing.core.router`, which is what `kvcast route` runs) sends the
requests of a trace, or of a workload made here, to simulated engines (`route_simulation` states
their model), and so do the routers that it is compared with. Nothing here is measured on a real
engine.

    python -m kvcast.bench.route --json route.json
    python -m kvcast.bench.route --trace requests.jsonl --loads 0.5,0.8 --json route.json

A trace is in Mooncake's form (`kvcast.workloads.traces`). Its times are scaled, so that the load is
what `--loads` says. The load is the time that all engines together must compute, if each held
everything that any of them has seen, over the time that they have. Hardly any router reaches 1.0.

Compared with: `round_robin`; `prefix_hash`, by the hash of the prompt's beginning, of the lengths
`--prefix-hash-tokens` the one with the best p99; `prefix_hash_bounded`, the same unless that engine
has 1.25 times its share of the requests in flight, then the next; `least_loaded`, the fewest
requests in flight. And with itself: `kvcast_without_events`, which knows only what it sent where;
`kvcast_misinformed`, whose cost model takes the engines for twice as fast as they are and the pool
for half as fast.

The report's top level has the router's figures at the first load, which is the one to judge by;
`loads` has everybody's at each.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import xxhash
from kvcast.bench.route_simulation import (
    EngineModel,
    Outcome,
    Policy,
    SimulatedRequest,
    Simulation,
)
from kvcast.routing.core.costs import CostModel
from kvcast.routing.core.router import Prompt, Refusal, Router, RouterOptions
from kvcast.service.commands import failed
from kvcast.service.reports import add_json, report_to
from kvcast.service.statistics import percentile, ratio, rounded
from kvcast.workloads.generators import WorkloadError
from kvcast.workloads.traces import TraceLine, read_trace

NO_PREFETCH: Final = range(0)
_BOUND: Final = 1.25


class _Deaf:
    """A policy that hears of nothing but who is in flight."""

    def __init__(self, engines: int) -> None:
        self.in_flight = [0] * engines
        self._at: dict[int, int] = {}

    def sent(self, request: SimulatedRequest, engine: int) -> tuple[int, range]:
        self.in_flight[engine] += 1
        self._at[request.number] = engine
        return engine, NO_PREFETCH

    def first_token(self, request: SimulatedRequest, now: float) -> None:
        pass

    def ended(self, request: SimulatedRequest, now: float) -> None:
        self.in_flight[self._at.pop(request.number)] -= 1

    def stored(self, engine: int, blocks: Sequence[int]) -> None:
        pass

    def removed(self, engine: int, blocks: Sequence[int]) -> None:
        pass

    def pooled(self, blocks: Sequence[int]) -> None:
        pass

    def unpooled(self, blocks: Sequence[int]) -> None:
        pass


class RoundRobin(_Deaf):
    """The next engine, whatever the prompt."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._turn = -1

    def choose(self, request: SimulatedRequest, now: float) -> tuple[int, range]:
        self._turn = (self._turn + 1) % len(self.in_flight)
        return self.sent(request, self._turn)


class LeastLoaded(_Deaf):
    """The engine with the fewest requests in flight; of equal ones the next."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._turn = 0

    def choose(self, request: SimulatedRequest, now: float) -> tuple[int, range]:
        engines = len(self.in_flight)
        order = [(self._turn + step) % engines for step in range(engines)]
        engine = min(order, key=lambda each: self.in_flight[each])
        self._turn = engine + 1
        return self.sent(request, engine)


class PrefixHash(_Deaf):
    """By the hash of the prompt's beginning; `bound`: an engine with so many times its share of the
    requests in flight is passed over (infinity: never)."""

    def __init__(self, engines: int, tokens: int, bound: float) -> None:
        super().__init__(engines)
        self._tokens = tokens
        self._bound = bound

    def choose(self, request: SimulatedRequest, now: float) -> tuple[int, range]:
        engines = len(self.in_flight)
        beginning = max(1, round(self._tokens / request.block_tokens))
        # A prompt without a whole block is hashed as what it is: one of its own.
        name = request.blocks[:beginning][-1] if request.blocks else -1 - request.number
        first = xxhash.xxh3_64_intdigest(repr(name).encode()) % engines
        most = self._bound * (sum(self.in_flight) + 1) / engines
        for step in range(engines):
            engine = (first + step) % engines
            if self.in_flight[engine] + 1 <= max(1.0, most):
                return self.sent(request, engine)
        return self.sent(request, first)


class Kvcast:
    """The router's own core."""

    def __init__(
        self,
        engines: int,
        options: RouterOptions,
        deadline_s: float = math.inf,
        *,
        hears_events: bool = True,
    ) -> None:
        self.router = Router(options)
        self._deadline_s = deadline_s
        self._hears_events = hears_events
        self._names = [f"engine-{number}" for number in range(engines)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        for name in self._names:
            self.router.add_engine(name)
        self.choosing_s: list[float] = []

    def choose(self, request: SimulatedRequest, now: float) -> tuple[int, range] | None:
        prompt = Prompt(request.blocks, request.tokens, request.block_tokens)
        begun = time.thread_time()
        choice = self.router.route(str(request.number), prompt, now, deadline_s=self._deadline_s)
        self.choosing_s.append(time.thread_time() - begun)
        if isinstance(choice, Refusal):
            return None
        return self._numbers[choice.engine], choice.prefetch

    def first_token(self, request: SimulatedRequest, now: float) -> None:
        self.router.first_token(str(request.number), now)

    def ended(self, request: SimulatedRequest, now: float) -> None:
        self.router.ended(str(request.number), now)

    def stored(self, engine: int, blocks: Sequence[int]) -> None:
        if self._hears_events:
            self.router.stored(self._names[engine], blocks)

    def removed(self, engine: int, blocks: Sequence[int]) -> None:
        if self._hears_events:
            self.router.removed(self._names[engine], blocks)

    def pooled(self, blocks: Sequence[int]) -> None:
        if self._hears_events:
            self.router.pooled(blocks)

    def unpooled(self, blocks: Sequence[int]) -> None:
        if self._hears_events:
            self.router.unpooled(blocks)


# --- workloads ----------------------------------------------------------------------------------


def of_trace(lines: Sequence[TraceLine]) -> list[SimulatedRequest]:
    """A trace's requests, at its own times. A block's tokens are the prompt's over its blocks:
    traces cut their blocks differently, and some by characters."""
    start = lines[0].timestamp
    found = []
    for number, line in enumerate(lines):
        blocks = tuple(dict.fromkeys(line.hash_ids))
        tokens = max(1, line.input_length)
        size = tokens / len(blocks) if blocks else float(tokens)
        at = (line.timestamp - start) / 1000
        found.append(SimulatedRequest(number, at, blocks, tokens, line.output_length, size))
    return found


def generated(seed: int, requests: int) -> list[SimulatedRequest]:
    """Chats under a few system prompts of very different popularity, some with a long document:
    `requests` turns, about one a second."""
    rng = random.Random(f"route/{seed}")
    block_tokens, now = 64, 0.0
    systems = [tuple(rng.getrandbits(48) for _ in range(rng.randint(8, 40))) for _ in range(12)]
    popularity = [1 / (rank + 1) for rank in range(len(systems))]
    chats: list[tuple[int, ...]] = []
    found = []
    for number in range(requests):
        now += rng.expovariate(1.0)
        if chats and rng.random() < 0.6:
            history = chats.pop(rng.randrange(len(chats)))
        else:
            history = rng.choices(systems, popularity)[0]
            if rng.random() < 0.15:
                history += tuple(rng.getrandbits(48) for _ in range(rng.randint(50, 400)))
        blocks = history + tuple(rng.getrandbits(48) for _ in range(rng.randint(1, 12)))
        tokens = len(blocks) * block_tokens + rng.randrange(block_tokens)
        answer = max(1, round(rng.lognormvariate(5.0, 0.8)))
        found.append(SimulatedRequest(number, now, blocks, tokens, answer, tokens / len(blocks)))
        chats.append(blocks)
        del chats[:-64]
    return found


def scaled(
    requests: Sequence[SimulatedRequest], costs: CostModel, engines: int, load: float
) -> tuple[list[SimulatedRequest], float]:
    """The requests at such times that they are this load, and by what times were divided."""
    seen: set[int] = set()
    work_s = 0.0
    for request in requests:
        held = 0
        for block in request.blocks:
            if block not in seen:
                break
            held += 1
        seen.update(request.blocks)
        work_s += costs.compute_s(request.tokens_of(held), request.tokens)
    span_s = requests[-1].arrives_s - requests[0].arrives_s
    if span_s <= 0:
        raise WorkloadError("all requests come at one time: there is no load to scale to")
    factor = span_s * engines * load / work_s
    return [replace(one, arrives_s=one.arrives_s / factor) for one in requests], factor


# --- measuring ----------------------------------------------------------------------------------


def figures(
    outcomes: Sequence[Outcome], refused: int, deadline_s: float = math.inf
) -> dict[str, Any]:
    """What a policy came to. Rates are shares of prompts' tokens."""
    ttfts = [outcome.ttft_s for outcome in outcomes]
    tokens = sum(outcome.request.tokens for outcome in outcomes)
    here = sum(outcome.engine_tokens for outcome in outcomes)
    pool = sum(outcome.pool_tokens for outcome in outcomes)
    by_engine: dict[int, int] = {}
    for outcome in outcomes:
        by_engine[outcome.engine] = by_engine.get(outcome.engine, 0) + 1
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "refused": refused,
        "hit_rate": ratio(here + pool, tokens),
        "hit_rate_engine": ratio(here, tokens),
        "hit_rate_pool": ratio(pool, tokens),
        "ttft_mean_s": round(statistics.fmean(ttfts), 4) if ttfts else None,
        "ttft_p50_s": rounded(percentile(ttfts, 0.50)),
        "ttft_p90_s": rounded(percentile(ttfts, 0.90)),
        "ttft_p99_s": rounded(percentile(ttfts, 0.99)),
        "most_over_mean_requests_an_engine": ratio(
            max(by_engine.values(), default=0) * len(by_engine), len(outcomes)
        ),
    }
    if deadline_s < math.inf:
        late = sum(1 for ttft in ttfts if ttft > deadline_s)
        found |= {"deadline_s": deadline_s, "late": late, "in_time": len(ttfts) - late}
    return found


def compare(
    requests: Sequence[SimulatedRequest],
    model: EngineModel,
    speeds: Sequence[float],
    options: RouterOptions,
    prefix_hash_tokens: Sequence[int],
    deadline_s: float,
) -> dict[str, Any]:
    """Every policy on the same requests and its own engines."""
    engines = len(speeds)

    def played(policy: Policy) -> dict[str, Any]:
        simulation = Simulation(model, policy, speeds)
        simulation.run(requests)
        outcomes = list(simulation.outcomes.values())
        found = figures(outcomes, simulation.refused, deadline_s)
        if isinstance(policy, Kvcast):
            found["choosing_p50_us"] = _microseconds(policy.choosing_s, 0.50)
            found["choosing_p99_us"] = _microseconds(policy.choosing_s, 0.99)
            found["index_blocks"] = len(policy.router.index)
        return found

    def best_hash(bound: float) -> dict[str, Any]:
        tried = [
            played(PrefixHash(engines, tokens, bound)) | {"prefix_hash_tokens": tokens}
            for tokens in prefix_hash_tokens
        ]
        return min(tried, key=lambda found: float(found["ttft_p99_s"]))

    unheard = replace(options, expect_s=600.0)
    report = {
        "kvcast": played(Kvcast(engines, options)),
        "round_robin": played(RoundRobin(engines)),
        "prefix_hash": best_hash(math.inf),
        "prefix_hash_bounded": best_hash(_BOUND),
        "least_loaded": played(LeastLoaded(engines)),
        "kvcast_without_events": played(Kvcast(engines, unheard, hears_events=False)),
        "kvcast_misinformed": played(Kvcast(engines, _misinformed(options))),
    }
    if deadline_s < math.inf:
        report["kvcast_refusing"] = played(Kvcast(engines, options, deadline_s))
    return report


def _misinformed(options: RouterOptions) -> RouterOptions:
    costs = options.costs
    wrong = replace(
        costs,
        prefill_s_per_token=costs.prefill_s_per_token / 2,
        attention_s_per_token2=costs.attention_s_per_token2 / 2,
        pool_bytes_per_s=costs.pool_bytes_per_s / 2,
    )
    return replace(options, costs=wrong)


def _microseconds(values: Sequence[float], share: float) -> float | None:
    found = percentile(values, share)
    return None if found is None else round(found * 1e6, 1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    costs = CostModel()
    model = EngineModel(
        costs=costs,
        kv_tokens=options.kv_tokens,
        pool_tokens=0 if options.no_pool else options.pool_tokens,
        slots=options.slots,
    )
    speeds = [1.0] * options.engines
    for number in range(options.slow_engines):
        speeds[number] = 0.5
    requests = (
        of_trace(read_trace(options.trace))
        if options.trace
        else generated(options.seed, options.requests)
    )
    router = RouterOptions(
        costs=costs,
        slots=model.slots,
        max_in_flight=100_000,  # nobody else refuses: all have the same requests to serve
        pool_saves_all=not options.no_pool,
        prefetches=not options.no_prefetch,
    )
    loads: list[dict[str, Any]] = []
    for load in options.loads:
        timed, factor = scaled(requests, costs, options.engines, load)
        compared = compare(
            timed, model, speeds, router, options.prefix_hash_tokens, options.deadline_s
        )
        loads.append({"load": load, "times_divided_by": round(factor, 4), "policies": compared})
    judged = loads[0]["policies"]
    own = judged["kvcast"]
    return {
        "what": "a simulation: engines, pool and links are simulated, the router's core is real",
        "trace": os.path.basename(options.trace) if options.trace else "generated",
        "requests": len(requests),
        "engines": options.engines,
        "load": loads[0]["load"],
        "hit_rate": own["hit_rate"],
        "ttft_p50_s": own["ttft_p50_s"],
        "ttft_p99_s": own["ttft_p99_s"],
        "p99_over_round_robin": ratio(own["ttft_p99_s"], judged["round_robin"]["ttft_p99_s"]),
        "p99_over_prefix_hash": ratio(own["ttft_p99_s"], judged["prefix_hash"]["ttft_p99_s"]),
        "p50_over_round_robin": ratio(own["ttft_p50_s"], judged["round_robin"]["ttft_p50_s"]),
        "p50_over_prefix_hash": ratio(own["ttft_p50_s"], judged["prefix_hash"]["ttft_p50_s"]),
        "loads": loads,
        "model": {
            "prefill_tokens_per_s": round(1 / costs.prefill_s_per_token),
            "attention_s_per_token2": costs.attention_s_per_token2,
            "kv_bytes_per_token": costs.kv_bytes_per_token,
            "pool_bytes_per_s": costs.pool_bytes_per_s,
            "pool_latency_s": costs.pool_latency_s,
            "slots": model.slots,
            "kv_tokens": model.kv_tokens,
            "pool_tokens": model.pool_tokens,
            "decode_s_per_token": model.decode_s_per_token,
            "decode_s_per_sequence": model.decode_s_per_sequence,
            "event_delay_s": model.event_delay_s,
            "speeds": speeds,
        },
        "seed": options.seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
    }


def show(report: dict[str, Any]) -> None:
    """For people."""
    print(f"{report['what']}\n{report['trace']}: {report['requests']} requests")
    for each in report["loads"]:
        print(f"\nload {each['load']}, times divided by {each['times_divided_by']}")
        for name, found in each["policies"].items():
            print(
                f"  {name:22} hits {found['hit_rate'] or 0:6.1%} (engine "
                f"{found['hit_rate_engine'] or 0:6.1%})  first token p50 {found['ttft_p50_s']} s, "
                f"p99 {found['ttft_p99_s']} s  refused {found['refused']}"
            )


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas") from None
    if not all(0 < load < 100 for load in loads):
        raise argparse.ArgumentTypeError("a load is above 0")
    return loads


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas") from None
    if min(lengths) < 1:
        raise argparse.ArgumentTypeError("a length is above 0")
    return lengths


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", help="requests in Mooncake's form (default: generated)")
    parser.add_argument("--requests", type=int, default=4000, help="how many are generated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--slow-engines", type=int, default=0, help="of them at half the speed")
    parser.add_argument("--slots", type=int, default=64, help="requests an engine runs at once")
    parser.add_argument("--kv-tokens", type=int, default=500_000, help="an engine's memory")
    parser.add_argument("--pool-tokens", type=int, default=8_000_000)
    parser.add_argument("--no-pool", action="store_true")
    parser.add_argument("--no-prefetch", action="store_true")
    parser.add_argument("--loads", type=_loads, default=[0.7, 0.5, 0.85])
    parser.add_argument("--prefix-hash-tokens", type=_lengths, default=[256, 1024, 4096])
    parser.add_argument("--deadline-s", type=float, default=math.inf, help="of a first token")
    add_json(parser)
    options = parser.parse_args(argv)
    low = min(options.requests - 1, options.engines, options.slots, options.kv_tokens)
    if low < 1 or not 0 <= options.slow_engines <= options.engines:
        parser.error("two requests, an engine, a slot and a token are the least")
    try:
        report_to(options.json, run(options), show)
    except WorkloadError as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
