"""The question: when does an in-network pool pay? All of it: `python -m kvcast.bench.evaluate`.

Owns: which parts run, in which order, and the report's fields. Must not know: how a flow travels
(`kvcast.simulation.flows`), or how the document looks (`evaluate_document`).

Its parts, each a question:

- calibration: is the simulation right? It is compared with the packet-level pool in virtual time
  and, unless `--no-pool`, with real agents and a real switch over emulated links.
- adaptive: does kvcast cost those whom it brings nothing? With real agents, too.
- scale: how large a pool can it say something about?
- memory: what belongs in the switch's memory?
- alternatives: what else would do?
- sizes: from which size on, at which rate of links?
- layers: what is a switch worth that holds the first layers of many blocks?
- frontier: where does it begin to pay?
- sensitivity: what is that sensitive to?

Fields of the report:

- `calibration_error_max`: relative error of home egress or fetch time, over all workloads.
  `calibration_error_max_virtual` and `_pool` say it of either pool alone.
- `chat_p50_over_plain`, `chat_p99_over_plain`, and the same of each trace: the time of a get on
  real agents behind kvcast, as it adapts, over that behind a plain switch. `chat_each_over_plain`:
  the median of the ratios of the single gets, which tells smaller costs from chance. `_low` and
  `_high` are the range of that, had other gets been drawn. `chat_alone_p50_over_plain` and so on:
  the same where a stream's requests follow each other, so that nobody waits for another's bytes.
- `value_over_…`: the bytes that our policy of the switch's memory answers, over those that
  something else would answer:

  | field | over |
  |---|---|
  | `value_over_optimum_min` | an optimum that knows the future |
  | `value_over_optimum_after_fill_min` | that of the reads that a controller can have answered |
  | `value_over_reachable_optimum_min` | the same, where it hears of reads as late as in a pool |
  | `value_over_best_online_min` | the best policy of others, told of each read, filling at once |
  | `value_over_reachable_min` | the reachable optimum |
  | `value_over_best_told_as_late_min` | the best of others, told as late, filled as in a switch |
  | `value_over_best_as_a_switch_fills_min` | theirs, told of each read, filled as in a switch |

  The last three are of the rows with enough to win (`WORTH_COMPARING`), the last two no bounds:
  ours is another rule, and is above 1 where it does better. Those of others are null where the
  extra `policies` is not installed.
- `best_online_over_optimum_min`: the best policy that does not know the future, ours among them,
  over the optimum, if it is told of each read and fills at once.
- `hosts_max`.
- `seconds_per_simulated_hour_10k`: real time for an hour of ten thousand hosts. Where time ran out
  before, `seconds_simulated_of_the_hour_10k` is below 3600, and this is extrapolated from it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from kvcast.bench import evaluate_document
from kvcast.bench.replay import NodeLink, Replay, ReplayOptions, links_to
from kvcast.protocol.messages.wire import KEY_BYTES
from kvcast.service import provenance, reports
from kvcast.service.commands import EXIT_FAILED, EXIT_OK
from kvcast.simulation.flows import questions
from kvcast.simulation.flows.demand import NS, ROUND_S, Demand, as_begun, demand_of
from kvcast.simulation.flows.scenarios import WORKLOADS
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star
from kvcast.workloads.generators import Request, WorkloadError
from kvcast.workloads.traces import TraceLine, read_trace

Numbers = dict[str, Any]
_Get = tuple[int, ...]
"""How often the stream was played before, the request, and the node; or only these."""
PARTS = (
    "calibration",
    "pool",
    "adaptive",
    "alternatives",
    "sizes",
    "frontier",
    "sensitivity",
    "memory",
    "layers",
    "scale",
)
WORTH_COMPARING = 0.02
"""Share of the bytes read that the reachable optimum answers, from which ours is held against
it."""
REAL = ("pool", "adaptive")
"""Those that start agents and switches."""
_POOL_READS = 160
_LONE_GETS = 5
"""Before and after each workload, since a machine that does other things is not always as slow."""
_PIECES = 6
"""Of a stream in `beside_plain`: both pools play one before either plays the next, so that a
machine that gets slower, or is busy with other things, harms both."""
_GETS = 300
"""As many as are to be compared of a stream: a short trace has few,"""
_ROUNDS = 4
"""and is played again, as another tenant's, so many times in all at most."""
_ALONE_S = 55.0
"""For so long a stream's requests follow each other."""
_DRAWS = 400
"""Of gets, for the range that a ratio is in."""
_NEIGHBOURS = 8
"""Gets that are drawn together: who is slow makes those beside it wait."""
_ARENA_BYTES = 192 << 20


async def beside_pool() -> list[Numbers]:
    """Every workload on real agents and a real switch, plain and kvcast, beside the flows.

    Agents, switch and whoever plays the workload share this machine's processors, and the flows
    know of those what is measured here: when each get in fact began, and what a get alone takes
    longer than its links do. The pool is one that the flows' model is of: each block has one home
    (readers choose among several by load, and loaded homes are given more, which are alternatives
    of their own in the evaluation), and homes hand no more to their links ahead of time than two
    turns, since what lies in a link's queue is served as it came."""
    rows = []
    for plain in (True, False):
        star = Star.of(questions.CALIBRATION_NODES)
        options = PoolOptions(
            plain=plain,
            admit="off",
            replicas=0,
            link_rate_bits_per_s=questions.EMULATED_BITS_PER_S,
            arena_bytes=_ARENA_BYTES,
            controller_flags=("--no-hot-replicas",),
            agent_flags=(f"--responder-burst={2 * questions.FINEST.turn_frames}",),
        )
        async with Pool(star, options) as pool:
            sockets = [pool.sockets[host.node_id] for host in star.hosts]
            async with links_to(sockets) as links:
                nodes = [host.node_id for host in star.hosts]
                alone_ns = [await _alone_ns(links, nodes, plain, "at first")]
                for workload in WORKLOADS:
                    requests = questions.calibration_requests(workload, _POOL_READS)
                    played = await _play(requests, links, nodes, plain, workload)
                    alone_ns.append(await _alone_ns(links, nodes, plain, f"after {workload}"))
                    home_ns = max(0, sum(alone_ns[-2:]) // 2)
                    row = played.beside_flows(workload, plain, home_ns)
                    rows.append(row | {"home_us": home_ns // 1000})
    return rows


@dataclass(frozen=True)
class _Played:
    """What a workload came to on the real pool, and its demand, with each get when it began."""

    demand: Demand
    egress: float
    fetch_ms: float

    def beside_flows(self, name: str, plain: bool, home_ns: int) -> Numbers:
        """A row of the calibration: beside flows whose homes take `home_ns` to answer."""
        flows = questions.flows_of_calibration(
            self.demand,
            plain=plain,
            bits_per_s=questions.EMULATED_BITS_PER_S,
            home_ns=home_ns,
        )
        against = "real pool, emulated links"
        row = questions.compare(name, against, flows, self.egress, self.fetch_ms)
        return row | {"switch": "plain" if plain else "kvcast"}


async def _alone_ns(links: Sequence[NodeLink], nodes: Sequence[str], plain: bool, when: str) -> int:
    """By how much a get alone takes longer just now than its links do."""
    requests = questions.lone_gets(_LONE_GETS)
    played = await _play(requests, links, nodes, plain, f"alone {when}")
    row = played.beside_flows("alone", plain, 0)
    late_ms: float = row["packet_fetch_ms"] - row["flow_fetch_ms"]
    return round(late_ms * 1e6)


async def _play(
    requests: Sequence[Request],
    links: Sequence[NodeLink],
    nodes: Sequence[str],
    plain: bool,
    name: str,
) -> _Played:
    size = questions.CALIBRATION_BLOCK_BYTES
    played = ReplayOptions(
        block_bytes=size,
        in_flight=256,
        budget_s=60.0,
        reader_groups=False,
        gather=not plain,
        namespace_tag=name,
    )
    tally = await Replay(requests, links, nodes, played).run()
    if tally.misses or tally.wrong_bytes or tally.skipped_requests:
        raise RuntimeError(f"{name}: misses, wrong bytes or skipped requests")
    index_of = {request.number: index for index, request in enumerate(requests)}
    first = min(began for _, _, began in tally.fetches)
    begun = {
        (index_of[number], node): round((began - first) * NS)
        for number, node, began in tally.fetches
    }
    return _Played(
        as_begun(demand_of(requests, len(nodes), size, replicas=0), begun),
        tally.egress_bytes / max(1, len(tally.fetched) * size),
        sum(tally.fetch_ms) / max(1, len(tally.fetch_ms)),
    )


async def beside_plain(
    traces: dict[str, list[TraceLine]], *, plain_twice: bool = False
) -> list[Numbers]:
    """Chats and traces on real agents behind a plain switch, and behind kvcast with all of it on
    and left to itself, or, if `plain_twice`, behind another plain switch, which shows what chance
    does. Both pools run all the time, and play one piece of a stream after the other; then both at
    once its requests one after the other (`alone`), where no chance decides who waits for whom.
    By then kvcast has judged what pays for their namespaces. Compared are gets that had something
    to fetch in both: which of two that want the same waits for it differs from time to time."""
    rows: list[Numbers] = []
    judged: set[int] = set()
    """Namespaces of the streams before."""
    async with contextlib.AsyncExitStack() as stack:
        pools: dict[bool, Pool] = {}
        links: dict[bool, list[NodeLink]] = {}
        for plain in (True, False):
            options = PoolOptions(
                plain=plain or plain_twice,
                link_rate_bits_per_s=questions.BYSTANDER_BITS_PER_S,
                arena_bytes=_ARENA_BYTES,
            )
            star = Star.of(questions.CALIBRATION_NODES)
            pools[plain] = await stack.enter_async_context(Pool(star, options))
            nodes = [host.node_id for host in star.hosts]
            sockets = [pools[plain].sockets[node] for node in nodes]
            links[plain] = await stack.enter_async_context(links_to(sockets))

        async def play(
            plain: bool, requests: Sequence[Request], played: ReplayOptions
        ) -> tuple[dict[_Get, float], Counter[str]]:
            """What each get took, by request and node, in milliseconds; and where blocks came
            from."""
            played = replace(played, gather=not (plain or plain_twice))
            tally = await Replay(requests, links[plain], nodes, played).run()
            left_out = tally.skipped_requests and played.in_flight > 1
            if tally.misses or tally.wrong_bytes or left_out:
                raise RuntimeError(
                    f"{played.namespace_tag}: misses, wrong bytes or skipped requests"
                )
            took = zip(tally.fetches, tally.fetch_ms, strict=True)
            return {(request, node): ms for (request, node, _), ms in took}, tally.hits

        for name, (requests, block_bytes) in questions.bystanders(traces).items():
            waits: dict[bool, dict[_Get, float]] = {True: {}, False: {}}
            """By pool, what each get took, in milliseconds."""
            hits: Counter[str] = Counter()
            played = ReplayOptions(block_bytes=block_bytes, in_flight=256, budget_s=120.0)
            for turn in range(2 * _PIECES * _ROUNDS):
                piece, plain = turn // 2, turn % 4 in (0, 3)
                number, place = divmod(piece, _PIECES)
                if place == 0 and len(waits[False].keys() & waits[True].keys()) >= _GETS:
                    break
                tagged = replace(played, namespace_tag=f"{name} {number}")
                took, came = await play(plain, _piece(requests, place), tagged)
                waits[plain] |= {(number, *get): ms for get, ms in took.items()}
                if not plain:
                    hits.update(came)
            if not waits[False].keys() & waits[True].keys():  # nobody had anything to fetch
                continue
            played = replace(played, in_flight=1, budget_s=_ALONE_S, namespace_tag=f"{name} 0")
            (plain_took, _), (took, _) = await asyncio.gather(
                *(play(plain, _in_a_row(requests), played) for plain in (True, False))
            )
            row = {"stream": name, **compared(waits[False], waits[True]), "hits": dict(hits)}
            if took.keys() & plain_took.keys():
                row["alone"] = compared(took, plain_took)
            said = (await pools[False].http("GET", "/v1/worth"))["adaptive"]
            rows.append(row | {"namespaces": dict(turned_in(said, judged))})
            judged.update(row["namespace"] for row in said)
    return rows


def _piece(requests: Sequence[Request], number: int) -> list[Request]:
    """One of `_PIECES` pieces of a stream, from its own beginning on."""
    first, end = (len(requests) * place // _PIECES for place in (number, number + 1))
    part = requests[first:end]
    return [replace(request, time_s=request.time_s - part[0].time_s) for request in part]


def _in_a_row(requests: Sequence[Request]) -> list[Request]:
    """The same for blocks that nobody has had, each as soon as the one before has ended."""
    return [
        replace(
            request,
            time_s=0.0,
            keys=tuple(blake2b(key, digest_size=KEY_BYTES).digest() for key in request.keys),
        )
        for request in requests
    ]


def turned_in(said: Sequence[Mapping[str, Any]], judged: Collection[int]) -> Counter[str]:
    """In how many namespaces that were not judged before each thing is on or off, of what the
    controller says under `adaptive`."""
    return Counter(
        f"{row['thing']} {'on' if row['on'] else 'off'}"
        for row in said
        if row["namespace"] not in judged
    )


def compared(ours: Mapping[_Get, float], plain: Mapping[_Get, float]) -> Numbers:
    """Two pools' gets, in milliseconds: percentiles of those that both had, their ratios, the
    median of each get's own ratio, and within which a ratio is in 19 of 20 cases, were other gets
    drawn from these (a bootstrap of pairs, some neighbours at a time: Künsch 1989)."""
    both = sorted(ours.keys() & plain.keys())
    took = np.array([[ours[get], plain[get]] for get in both])
    rng = np.random.default_rng(1)
    starts = rng.integers(0, len(both), (_DRAWS, -(-len(both) // _NEIGHBOURS)))
    draws = np.add.outer(starts, np.arange(_NEIGHBOURS)).reshape(_DRAWS, -1) % len(both)
    ranges = np.percentile([_ratios(took[gets]) for gets in draws], (2.5, 97.5), axis=0).T
    row: Numbers = {"gets": len(both)}
    for point in (50, 99):
        mine, theirs = np.percentile(took, point, axis=0)
        row |= {f"p{point}_ms": round(mine, 3), f"plain_p{point}_ms": round(theirs, 3)}
    names = ("p50_over_plain", "p99_over_plain", "each_over_plain")
    for name, ratio, (low, high) in zip(names, _ratios(took), ranges, strict=True):
        row |= {name: round(ratio, 4), f"{name}_low": round(low, 4), f"{name}_high": round(high, 4)}
    return row


def _ratios(took: np.ndarray) -> list[float]:
    """Of gets, each in two pools: the ratios of their medians, of their 99th percentiles, and the
    median of their ratios."""
    medians, tails = np.percentile(took, (50, 99), axis=0)
    each = np.median(took[:, 0] / took[:, 1])
    return [float(medians[0] / medians[1]), float(tails[0] / tails[1]), float(each)]


def evaluate(
    traces: dict[str, list[TraceLine]],
    *,
    parts: Sequence[str] = PARTS,
    plain_twice: bool = False,
    say: Callable[[str], None] = lambda _text: None,
    so_far: Callable[[Numbers], None] = lambda _report: None,
) -> Numbers:
    """Run the parts; their numbers by name, and what they come to at the top. `so_far` gets what
    there is after each part; a part that fails is named under `failed`, and the others go on."""
    report: Numbers = {"bench": "evaluate", "traces": list(traces)}
    report |= {"failed": {}, "took_s": {}, "load": {}, "plain_twice": plain_twice}
    read = (lines for lines in traces.values() if _is_read(lines))
    lines = max((questions.chat_lines(), *read), key=_per_second)
    run: dict[str, Callable[[], Any]] = {
        "calibration": questions.calibrate,
        "pool": lambda: asyncio.run(beside_pool()),
        "adaptive": lambda: asyncio.run(beside_plain(traces, plain_twice=plain_twice)),
        "scale": lambda: questions.scale(lines),
        "memory": lambda: questions.memory(traces),
        "layers": lambda: questions.layers(traces or {"chat": lines}),
        "sizes": questions.real_sizes,
        "alternatives": lambda: questions.alternatives(traces),
        "frontier": questions.frontier,
        "sensitivity": questions.sensitivity,
    }
    for part in parts:
        say(f"{part} …")
        began = time.monotonic()
        try:
            report[part] = run[part]()
        except Exception as error:  # the other parts' answers stand
            report["failed"][part] = f"{type(error).__name__}: {error}"
            say(f"{part} failed: {report['failed'][part]}")
        report["load"][part] = round(os.getloadavg()[0], 1)
        report["took_s"][part] = round(time.monotonic() - began, 1)
        say(f"{part}: {report['took_s'][part]} s")
        if part == "scale" and report.get(part, {}).get("extrapolated"):
            say(
                f"scale: the time for it ran out after {report[part]['simulated_s']:.0f} s of the "
                "hour; what the hour takes is extrapolated"
            )
        so_far(report | headline(report))
    return report | headline(report) | provenance.provenance()


def _per_second(lines: list[TraceLine]) -> float:
    """How dense a trace is that goes round and round (`TraceCopies`); the densest is what ten
    thousand hosts are given."""
    return len(lines) / max(ROUND_S, (lines[-1].timestamp - lines[0].timestamp) / 1000)


def _is_read(lines: list[TraceLine]) -> bool:
    """Whether two prompts have a block in common."""
    blocks = [one for line in lines for one in dict.fromkeys(line.hash_ids)]
    return len(set(blocks)) < len(blocks)


def headline(report: Numbers) -> Numbers:
    """The fields at the top, of the parts that were run."""
    top: Numbers = {}
    worst = {
        part: max(max(abs(r["egress_error"]), abs(r["fetch_error"])) for r in report[part])
        for part in ("calibration", "pool")
        if report.get(part)
    }
    if worst:
        top["calibration_error_max"] = max(worst.values())
        top["calibration_error_max_virtual"] = worst.get("calibration")
        top["calibration_error_max_pool"] = worst.get("pool")
    for row in report.get("adaptive") or ():
        for name, found in (("", row), ("alone_", row.get("alone", {}))):
            ratios = {k: v for k, v in found.items() if "_over_plain" in k}
            top |= {f"{row['stream']}_{name}{k}": v for k, v in ratios.items()}
    if memory := report.get("memory"):
        enough = [r for r in memory if r["hit_share"]["reachable optimum"] >= WORTH_COMPARING]
        for field, ratio, rows in (
            ("value_over_optimum", "value_over_optimum", memory),
            ("best_online_over_optimum", "best_online_over_optimum", memory),
            ("value_over_best_online", "value_over_best_online", memory),
            ("value_over_optimum_after_fill", "value_over_optimum_after_fill", memory),
            ("value_over_reachable_optimum", "value_over_reachable_optimum", memory),
            ("value_over_reachable", "value_over_reachable_optimum", enough),
            ("value_over_best_as_a_switch_fills", "value_over_best_as_a_switch_fills", enough),
            ("value_over_best_told_as_late", "value_over_best_told_as_late", enough),
        ):
            # None where the other policies are not installed.
            known = [row[ratio] for row in rows if row[ratio] is not None]
            top[f"{field}_min"] = min(known, default=None)
    if scale := report.get("scale"):
        top["hosts_max"] = scale["hosts"]
        top["seconds_per_simulated_hour_10k"] = scale["seconds_per_hour"]
        top["seconds_simulated_of_the_hour_10k"] = scale["simulated_s"]
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m kvcast.bench.evaluate`; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.evaluate", description="When does an in-network pool pay?"
    )
    reports.add_json(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a trace in Mooncake's JSONL form, evaluated beside the workloads; may be repeated",
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.add_argument("--no-pool", action="store_true", help="start no real pool")
    parser.add_argument(
        "--plain-twice",
        action="store_true",
        help="in `adaptive`, compare a plain pool with another, not with kvcast: what chance does",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="DIR", help="write evaluation.md and its pictures there"
    )
    args = parser.parse_args(argv)
    parts = [part for part in args.parts.split(",") if not (args.no_pool and part in REAL)]
    if args.plain_twice and args.docs:
        parser.error("--plain-twice measures no kvcast: there is nothing to write of it")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    try:
        traces = {path.stem: read_trace(path) for path in args.trace}
    except WorkloadError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED

    def so_far(report: Numbers) -> None:
        if args.json:
            reports.write_json(args.json, report)

    report = evaluate(
        traces,
        parts=parts,
        plain_twice=args.plain_twice,
        say=lambda text: print(text, file=sys.stderr),
        so_far=so_far,
    )
    so_far(report)
    if args.docs:
        evaluate_document.write(report, args.docs)
    for name, value in headline(report).items():
        print(f"{name}: {value}")
    return EXIT_FAILED if report["failed"] else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
