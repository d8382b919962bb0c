"""The question: how many of the blocks that engines ask for does each eviction policy keep?

Owns: a trace as look-ups of blocks, a cache of so many blocks that asks a policy whom to give up,
Belady's optimum, and the same trace through libCacheSim. Must not know: the store, arenas, pools.

    python -m kvcast.bench.policies --json policies.json --trace conversation.jsonl

A cache is of 1, 5 or 20 % of the trace's working set, in blocks: a block takes one slot of the same
size, as in engines' paged memory, whatever is in it. What is looked up and not held is put in. Hit
rates:

| of | share of |
|---|---|
| requests | look-ups of blocks that found them |
| bytes | the same, each counted by the tokens in the block |
| prefix | look-ups that found the block and all before it in their prompt: what an engine can use |
| compute | the same, each counted by what the block costs to compute (`policies/value.py`) |

libCacheSim (PyPI `libcachesim`, extra `policies`) runs the policies that both have, on the same
look-ups with objects of size 1: in its ARC the target moves by units of size, so that is the size
at which it is the published one. Belady evicts what is asked for last; like the others it puts
everything in.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Final

from kvcast.bench.plotting import drawn
from kvcast.hostagent.tiers import policies
from kvcast.hostagent.tiers.policies import Policy, Search, Verdict
from kvcast.hostagent.tiers.policies.ttl import DEFAULT_TTL_S
from kvcast.hostagent.tiers.policies.value import TWICE_AT_BLOCKS
from kvcast.service import provenance, reports
from kvcast.service.commands import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from kvcast.workloads.generators import NAMES, WorkloadError, WorkloadOptions, generate
from kvcast.workloads.traces import TraceLine, read_trace

SHARES: Final = (0.01, 0.05, 0.2)
BELADY: Final = "belady"
PEERS: Final = {
    "lru": "LRU",
    "lfu": "LFU",
    "fifo": "FIFO",
    "arc": "ARC",
    "s3fifo": "S3FIFO",
    BELADY: "Belady",
}
"""What libCacheSim calls those policies that it has, too."""
RATES: Final = ("requests", "bytes", "prefix", "compute")
_LEAST_OF_S3FIFO: Final = 10
"""Objects, of which a tenth is libCacheSim's small queue."""
TOKENS_OF_GENERATED: Final = 512
NEVER: Final = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Lookup:
    """One block of one prompt. `block`: its number in the trace, from 0; `parent`: that of the
    block before it, -1 at the beginning; `tokens` in it, `prompt`: which one."""

    time_s: float
    block: int
    parent: int
    depth: int
    tokens: int
    prompt: int


@dataclass
class Trace:
    """The look-ups of a trace, and how many different blocks they are of."""

    name: str
    lookups: list[Lookup]
    tokens_a_block: int
    working_set_blocks: int = 0
    next_use: list[int] = field(default_factory=list)
    """For each look-up, which one is the next of its block; `NEVER` if none."""

    def __post_init__(self) -> None:
        last: dict[int, int] = {}
        self.next_use = [NEVER] * len(self.lookups)
        for place in range(len(self.lookups) - 1, -1, -1):
            block = self.lookups[place].block
            self.next_use[place] = last.get(block, NEVER)
            last[block] = place
        self.working_set_blocks = len(last)


def _trace(name: str, prompts: Iterable[tuple[float, Sequence[object], int]], full: int) -> Trace:
    """(seconds, blocks, tokens) of each prompt; all blocks but a prompt's last have `full`
    tokens."""
    numbers: dict[object, int] = {}
    sizes: dict[int, int] = {}
    lookups = []
    for prompt, (at, ids, tokens) in enumerate(prompts):
        parent = -1
        distinct = list(dict.fromkeys(ids))
        for depth, one in enumerate(distinct):
            block = numbers.setdefault(one, len(numbers))
            is_last = depth == len(distinct) - 1
            rest = max(1, min(full, tokens - full * depth)) if is_last else full
            size = sizes.setdefault(block, rest)
            lookups.append(Lookup(at, block, parent, depth, size, prompt))
            parent = block
    return Trace(name, lookups, full)


def trace_of_file(path: str) -> Trace:
    """A trace in Mooncake's form; WorkloadError with line and field if it is none. How many tokens
    a full block has is what the densest prompt needs."""
    lines: list[TraceLine] = [line for line in read_trace(path) if line.hash_ids]
    full = max(1, max(math.ceil(line.input_length / len(line.hash_ids)) for line in lines))
    prompts = ((line.timestamp / 1000, line.hash_ids, line.input_length) for line in lines)
    return _trace(Path(path).name, prompts, full)


def trace_of_workload(name: str, requests: int, seed: int) -> Trace:
    """The first so many requests of a generated workload."""
    made = itertools.islice(generate(name, WorkloadOptions(seed=seed, prefix_blocks=16)), requests)
    full = TOKENS_OF_GENERATED
    prompts = ((r.time_s, [(r.namespace, k) for k in r.keys], full * len(r.keys)) for r in made)
    return _trace(f"{name}, seed {seed}", prompts, full)


class Cache:
    """So many slots for blocks, and a policy that says whose is given up."""

    def __init__(self, policy: Policy[int], slots: int) -> None:
        self._policy = policy
        self._slots = slots
        self._held: set[int] = set()

    def look_up(self, lookup: Lookup) -> bool:
        """Whether the block was held; it is put in if not, unless its own ancestors take all
        the room."""
        policy, held, block = self._policy, self._held, lookup.block
        if policy.AGES:
            policy.advance(lookup.time_s)
            while (old := policy.expired()) is not None:
                held.remove(old)
                policy.removed(old)
        if block in held:
            policy.hit(block)
            return True
        parent = lookup.parent if lookup.parent in held else None
        if policy.PREFIXES and parent is None and lookup.parent >= 0:
            return False
        policy.expected(block, 1)
        kept = parent if policy.PREFIXES else None

        def look(one: int) -> Verdict:
            return Verdict.PINNED if one == kept else Verdict.GO

        fits = len(held) < self._slots
        if not fits:
            victim = policy.choose(Search(look))
            if victim is not None:
                held.remove(victim)
                policy.evicted(victim)
                fits = True
            if kept is not None:
                policy.freed(kept)
        if fits:
            held.add(block)
            policy.inserted(block, 1, parent, lookup.depth)
        return False


def hits_of(name: str, trace: Trace, slots: int, ttl_s: float) -> list[bool]:
    """Which look-ups hit in a cache of so many slots under the policy of that name."""
    policy: Policy[int] = policies.make(name, slots, ttl_s)
    return list(map(Cache(policy, slots).look_up, trace.lookups))


def hits_of_belady(trace: Trace, slots: int) -> list[bool]:
    """The same where what is looked up again last is evicted; of several that never are, any."""
    uses: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = []
    for lookup, next_use in zip(trace.lookups, trace.next_use, strict=True):
        block = lookup.block
        hits.append(block in uses)
        if block not in uses and len(uses) == slots:
            while True:
                use, victim = heapq.heappop(heap)
                if uses.get(victim) == -use:
                    break
            del uses[victim]
        uses[block] = next_use
        heapq.heappush(heap, (-next_use, block))
    return hits


def why_no_peer() -> str | None:
    """Why libCacheSim cannot run here, if it cannot."""
    try:
        import_module("libcachesim")
    except ModuleNotFoundError:
        return "libcachesim is not installed (extra `policies`)"
    except ImportError as error:  # it links GLib
        return f"libcachesim cannot be loaded: {error} (Debian: libglib2.0-0)"
    return None


def _hits_of_peer(name: str, trace: Trace, slots: int) -> list[bool]:
    peer = import_module("libcachesim")
    cache = getattr(peer, PEERS[name])(slots)
    request = peer.Request()
    request.obj_size = 1
    hits = []
    for number, (lookup, next_use) in enumerate(zip(trace.lookups, trace.next_use, strict=True), 1):
        request.clock_time = number
        request.obj_id = lookup.block
        request.next_access_vtime = next_use
        hits.append(bool(cache.get(request)))
    return hits


def rates_of(trace: Trace, hits: list[bool]) -> dict[str, float]:
    """Hit rates in percent, by `RATES`."""
    found = dict.fromkeys(RATES, 0.0)
    asked = dict.fromkeys(RATES, 0.0)
    prompt, whole = -1, True
    for lookup, hit in zip(trace.lookups, hits, strict=True):
        whole = hit and (whole or lookup.prompt != prompt)
        prompt = lookup.prompt
        cost = 1.0 + lookup.depth / TWICE_AT_BLOCKS
        weights = (1.0, float(lookup.tokens), 1.0, cost)
        for name, weight, counts in zip(RATES, weights, (hit, hit, whole, whole), strict=True):
            asked[name] += weight
            found[name] += weight * counts
    return {name: 100 * found[name] / asked[name] for name in RATES}


def _can_be_asked(name: str, slots: int) -> bool:
    """Whether the peer has such a cache; of one that it has not, it ends the process."""
    return name in PEERS and (name != "s3fifo" or slots >= _LEAST_OF_S3FIFO)


def _note(name: str, slots: int) -> str | None:
    """Why the peer's figure is none to compare with, if it is not."""
    if name == "s3fifo" and slots < 20:
        return "libCacheSim puts nothing into a small queue that has room for a single object"
    return None


def measure(
    trace: Trace,
    *,
    shares: Sequence[float],
    ttl_s: float,
    progress: Callable[[str], None],
    report: dict[str, Any],
) -> None:
    """Fill in the report: every policy at every size, and beside it the peer, if it is there."""
    missing = why_no_peer()
    report |= {
        "trace": trace.name,
        "prompts": trace.lookups[-1].prompt + 1,
        "lookups": len(trace.lookups),
        "working_set_blocks": trace.working_set_blocks,
        "tokens_a_block": trace.tokens_a_block,
        "ttl_s": ttl_s,
        "peer": None if missing else f"libcachesim {metadata.version('libcachesim')}",
        "peer_missing": missing,
        "peer_max_difference_points": None,
        "results": [],
        "provenance": provenance.provenance(),
    }
    names = [*policies.BY_NAME, BELADY]
    total = len(names) * len(shares)
    for done, (share, name) in enumerate(itertools.product(shares, names), 1):
        slots = max(1, int(trace.working_set_blocks * share))
        began = time.perf_counter()
        if name == BELADY:
            hits = hits_of_belady(trace, slots)
        else:
            hits = hits_of(name, trace, slots, ttl_s)
        took_s = time.perf_counter() - began
        rates = rates_of(trace, hits)
        row: dict[str, Any] = {
            "policy": name,
            "share_of_working_set": share,
            "blocks": slots,
            **{f"hit_rate_{of}": round(rate, 4) for of, rate in rates.items()},
            "microseconds_a_lookup": round(1e6 * took_s / len(trace.lookups), 3),
        }
        if not missing and _can_be_asked(name, slots):
            theirs = rates_of(trace, _hits_of_peer(name, trace, slots))
            row |= {f"peer_hit_rate_{of}": round(theirs[of], 4) for of in ("requests", "bytes")}
            row["peer_note"] = _note(name, slots)
            apart = max(abs(theirs[of] - rates[of]) for of in ("requests", "bytes"))
            row["peer_difference_points"] = round(apart, 4)
            if row["peer_note"] is None:
                worst = report["peer_max_difference_points"] or 0.0
                report["peer_max_difference_points"] = round(max(worst, apart), 4)
        report["results"].append(row)
        progress(
            f"{done}/{total}: {name} with {slots} blocks ({share:.0%}): {rates['requests']:.2f} %"
        )


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"{report['trace']}: {report['lookups']:,} look-ups of {report['working_set_blocks']:,} "
        f"blocks in {report['prompts']:,} prompts. Hit rates in percent.",
        "",
        f"{'cache':>6} {'policy':8}" + "".join(f"{of:>10}" for of in RATES) + f"{'peer':>10}",
    ]
    for row in report["results"]:
        if row["policy"] == next(iter(policies.BY_NAME)) and row is not report["results"][0]:
            lines.append("")
        rates = "".join(f"{row[f'hit_rate_{of}']:10.2f}" for of in RATES)
        peer = row.get("peer_hit_rate_requests")
        share = f"{row['share_of_working_set']:.0%}"
        note = " *" if row.get("peer_note") else ""
        beside = "" if peer is None else f"{peer:10.2f}{note}"
        lines.append(f"{share:>6} {row['policy']:8}{rates}{beside}")
    lines.append("")
    if report["peer"]:
        apart = report["peer_max_difference_points"]
        most = "nothing to compare" if apart is None else f"at most {apart:.3f} points apart"
        lines.append(f"peer: {report['peer']}, by requests; {most}")
        notes = {row.get("peer_note") for row in report["results"]} - {None}
        lines += [f"* not counted: {note}" for note in sorted(notes)]
    else:
        lines.append(f"no peer: {report['peer_missing']}")
    return "\n".join(lines)


def picture(report: dict[str, Any]) -> bytes:
    """The hit rates by requests and by bytes against the size of the cache, as PNG."""
    names = dict.fromkeys(row["policy"] for row in report["results"])

    def fill(figure: Any) -> None:
        for axes, of in zip(figure.subplots(1, 2, sharey=True), ("requests", "bytes"), strict=True):
            for name in names:
                rows = [row for row in report["results"] if row["policy"] == name]
                axes.plot(
                    [100 * row["share_of_working_set"] for row in rows],
                    [row[f"hit_rate_{of}"] for row in rows],
                    marker="o",
                    markersize=3,
                    linewidth=1.4,
                    label=name,
                    **({"color": "#0f172a", "linestyle": "--"} if name == BELADY else {}),
                )
            axes.set_xscale("log")
            axes.set_xlabel("cache, % of the working set")
            axes.set_title(f"by {of}")
            axes.grid(visible=True, color="#e2e8f0")
        figure.axes[0].set_ylabel("hit rate, %")
        figure.axes[0].legend(frameon=False, fontsize=8)
        figure.suptitle(report["trace"], x=0.01, ha="left")

    return drawn(fill, (9, 4), dpi=150)


def _share(text: str) -> float:
    try:
        percent = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of percent") from None
    if not 0 < percent <= 100:
        raise argparse.ArgumentTypeError(f"{text} percent is not above 0 and at most 100")
    return percent / 100


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.policies",
        description="Hit rates of every eviction policy on a trace, beside Belady's optimum.",
    )
    reports.add_json(parser)
    parser.add_argument("--trace", metavar="FILE", help="a trace in Mooncake's form (JSON lines)")
    parser.add_argument(
        "--workload", choices=NAMES, default="mix", help="what is generated without --trace"
    )
    parser.add_argument("--requests", type=_positive, default=3000, help="how many are generated")
    parser.add_argument("--seed", type=int, default=1, help="of what is generated")
    parser.add_argument(
        "--percent",
        type=_share,
        nargs="+",
        default=list(SHARES),
        help="sizes of the cache, in percent of the working set (default: 1 5 20)",
    )
    parser.add_argument(
        "--ttl", type=_seconds, default=DEFAULT_TTL_S, help="seconds, of the policy ttl"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="where the picture goes (default: beside --json's file)"
    )
    arguments = parser.parse_args(argv)
    plot = arguments.plot
    if plot is None and arguments.json and arguments.json != "-":
        plot = str(Path(arguments.json).with_suffix(".png"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        if arguments.trace:
            trace = trace_of_file(arguments.trace)
        else:
            trace = trace_of_workload(arguments.workload, arguments.requests, arguments.seed)
    except WorkloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with reports.in_the_making(arguments.json) as report:
            measure(
                trace,
                shares=sorted(set(arguments.percent)),
                ttl_s=arguments.ttl,
                progress=progress,
                report=report,
            )
        reports.report_to(arguments.json, report, lambda measured: print(table(measured)))
        if plot:
            Path(plot).parent.mkdir(parents=True, exist_ok=True)
            Path(plot).write_bytes(picture(report))
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
