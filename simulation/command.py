"""Does anything that may go wrong in a pool make it lose, mix up, or give away a block?

Question: over many seeds, each a pool of its own with its own faults, does an independent model
ever see an invariant of the design violated? How many blocks were delivered, how many faults of
each kind had an effect, and how many seeds a minute are that?

    python -m kvcast.simulation --seeds 1000 --json simulation.json
    python -m kvcast.simulation --first-seed 17 --seeds 1     # one seed again

The real cores of requester, responder, agent and controller and the real compiled P4 program run in
one process under a seeded network and a virtual clock (`simulation_cluster`); `simulation_model`
judges them. A violation prints its seed, a smaller form of the same failure, and the command that
repeats it.

A simulation (after TigerBeetle's simulator of that name) finds only what its model looks for; what
that is, stands in `simulation_model` and docs/simulation.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvcast.service import provenance
from kvcast.simulation.cluster import Product
from kvcast.simulation.plan import Mask
from kvcast.simulation.run import Outcome, run_seed
from kvcast.simulation.shrink import shrink
from kvcast.simulation.switch import engines, product_program

PROGRESS_EVERY = 500
"""Seeds after which a line tells how far the run is."""


def build_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="seeds to run")
    parser.add_argument("--first-seed", type=int, default=1, metavar="S", help="the first of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here too")
    parser.add_argument(
        "--engine",
        choices=sorted(engines()),
        default=next(iter(engines())),
        help="the engine that runs the switch's program (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at work")
    parser.add_argument(
        "--for", dest="minutes", type=float, metavar="MINUTES", help="begin no seed after so long"
    )
    parser.add_argument(
        "--without",
        type=Mask.parse,
        default=Mask(),
        metavar="PARTS",
        help="what to leave out, as a failure prints it: hosts=N, oN (actions), fN (faults)",
    )
    parser.add_argument(
        "--no-shrink", action="store_true", help="do not look for a smaller form of a failure"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop at the first violation"
    )
    return parser


_product: Product | None = None


def product(engine: str) -> Product:
    """What is tested, once a process: the program is loaded only once."""
    global _product
    if _product is None:
        logging.disable(logging.CRITICAL)  # the product tells of every fault
        _product = Product(engines()[engine], product_program())
    return _product


def _work(job: tuple[int, str, Mask]) -> Outcome:
    seed, engine, mask = job
    return run_seed(seed, product(engine), mask)


def outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    """The seeds' outcomes, as they come."""
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    jobs = ((s, options.engine, options.without) for s in seeds if time.monotonic() < until)
    if options.jobs <= 1:
        yield from map(_work, jobs)
        return
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        # Not `imap`, which would draw all seeds at once, whatever the time.
        batch: list[tuple[int, str, Mask]] = []
        for job in jobs:
            batch.append(job)
            if len(batch) == 8 * options.jobs:
                yield from pool.imap_unordered(_work, batch)
                batch = []
        yield from pool.imap_unordered(_work, batch)


def command_for(seed: int, mask: Mask, engine: str) -> str:
    """What repeats a failure."""
    without = f" --without {mask}" if str(mask) else ""
    return f"python -m kvcast.simulation --first-seed {seed} --seeds 1 --engine {engine}{without}"


def tell_violation(outcome: Outcome, options: argparse.Namespace) -> dict[str, Any]:
    """Print a violation, in its smallest form, and give it as the report has it."""
    assert outcome.violation is not None
    number, text = outcome.violation
    print(f"seed {outcome.seed}: invariant {number} violated: {text}")
    for more in filter(None, (outcome.detail, outcome.stories)):
        print(more)
    mask = options.without
    if not options.no_shrink:

        def fails(candidate: Mask) -> bool:
            again = run_seed(outcome.seed, product(options.engine), candidate)
            return again.violation is not None and again.violation[0] == number

        if not str(mask):
            mask, runs = shrink(outcome.seed, fails)
            smallest = run_seed(outcome.seed, product(options.engine), mask)
            if smallest.violation is not None:
                text = smallest.violation[1]
                print(f"made smaller in {runs} runs: {text}")
    command = command_for(outcome.seed, mask, options.engine)
    print(f"repeat with: {command}", flush=True)
    return {
        "seed": outcome.seed,
        "invariant": number,
        "what": text,
        "repeat": command,
        "trace": outcome.trace,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds, report, and exit with 1 where an invariant did not hold."""
    options = build_parser().parse_args(argv)
    started = time.monotonic()
    total: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    tiers: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    seeds = delivered = hosts = 0
    simulated_s = data_plane_s = took_s = 0.0
    for outcome in outcomes(options):
        seeds += 1
        delivered += outcome.delivered
        hosts += outcome.hosts
        simulated_s += outcome.simulated_s
        data_plane_s += outcome.data_plane_s
        took_s += outcome.took_s
        total.update(outcome.counts)
        faults.update(outcome.faults)
        tiers.update(outcome.delivered_by_tier)
        if outcome.violation is not None:
            violations.append(tell_violation(outcome, options))
            if not options.keep_going:
                break
        if seeds % PROGRESS_EVERY == 0:
            so_far = f"{seeds} seeds, {delivered} blocks, {len(violations)} violations"
            print(so_far, file=sys.stderr)
    minutes = (time.monotonic() - started) / 60
    report = {
        "seeds": seeds,
        "first_seed": options.first_seed,
        "violations": violations,
        "blocks_delivered": delivered,
        "blocks_delivered_by_tier": dict(sorted(tiers.items())),
        "faults": dict(sorted(faults.items())),
        "seeds_per_minute": round(seeds / minutes, 1),
        "minutes": round(minutes, 2),
        "jobs": options.jobs,
        "engine": options.engine,
        "simulated_hours": round(simulated_s / 3600, 2),
        "switch_frames_in": total["switch_frames_in"],
        "switch_frames_out": total["switch_frames_out"],
        "switch_updates": total["switch_updates"],
        "hosts_per_seed": round(hosts / max(1, seeds), 2),
        "data_plane_share_of_time": round(data_plane_s / max(1e-9, took_s), 3),
        "gets": {k[4:]: n for k, n in sorted(total.items()) if k.startswith("get.")},
        "misses": {k[5:]: n for k, n in sorted(total.items()) if k.startswith("miss.")},
        "puts": {k[4:]: n for k, n in sorted(total.items()) if k.startswith("put.")},
        "blocks_held_by_no_home_of_today": total["strays"],
        "machine": provenance.machine(),
        "commit": provenance.commit(),
    }
    text = json.dumps(report, indent=2)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    return 1 if violations else 0
