"""`python -m kvcast.simulation`: does anything that may go wrong in a pool make it lose, mix up or
give away a block?

Owns: the command, its report, and which processes run which seeds. Must not know: what a run does
(`cluster.py`) or what is right (`model.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvcast.service import provenance, reports
from kvcast.service.commands import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from kvcast.service.options import HelpFormatter
from kvcast.simulation.cluster import Product
from kvcast.simulation.plan import FEATURES, Mask
from kvcast.simulation.run import Outcome, run_seed
from kvcast.simulation.shrink import shrink
from kvcast.simulation.switch import ENGINES, product_program

PROGRESS_S = 10.0
"""How often a line on standard error tells how far the run is."""

_DESCRIPTION = """\
Runs whole pools in virtual time, each from a seed: the real cores of requester, responder, agent
and controller and the real compiled P4 program, on a network that loses, delays, repeats, reorders
and damages, with hosts, controllers and a switch that crash and come back. An independent model
looks at every frame and every block (docs/simulation.md: what it looks for, and what it does not).

A seed that violates an invariant ends the run: it is printed with a smaller form of the same
failure and with the command that repeats it, and the exit status is 1."""

_EXAMPLES = """\
examples:
  python -m kvcast.simulation --seeds 1000 --jobs 2 --json simulation.json
  python -m kvcast.simulation --seeds 1000000 --for 60          as many as an hour has time for
  python -m kvcast.simulation --first-seed 17 --seeds 1         one seed again
  python -m kvcast.simulation --first-seed 17 --seeds 1 --without hosts=3,o4-9,f0
                    without hosts 4 and up, what clients do as number 4 to 9, and the first fault"""


def build_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.simulation",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="seeds to run")
    parser.add_argument("--first-seed", type=int, default=1, metavar="S", help="the first of them")
    reports.add_json(parser)
    parser.add_argument(
        "--engine",
        choices=sorted(ENGINES),
        default=next(iter(ENGINES)),
        help="the engine that runs the switch's program",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at work")
    parser.add_argument(
        "--for", dest="minutes", type=float, metavar="MINUTES", help="begin no seed after so long"
    )
    parser.add_argument(
        "--without",
        type=Mask.parse,
        metavar="PARTS",
        help="what to leave out, as a failure prints it: hosts beyond hosts=N, oN (what clients "
        "do), fN (faults)",
    )
    parser.add_argument(
        "--features",
        type=_features,
        metavar="NAMES",
        help=f"what every run has, of {'+'.join(FEATURES)}, joined by +: all, or none; without it "
        "each seed draws what it has",
    )
    parser.add_argument(
        "--no-shrink", action="store_true", help="do not look for a smaller form of a failure"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop at the first violation"
    )
    return parser


def _features(text: str) -> frozenset[str]:
    if text in ("all", "none"):
        return frozenset(FEATURES if text == "all" else ())
    names = frozenset(text.split("+"))
    if not names <= set(FEATURES):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(FEATURES)}, joined by +")
    return names


_product: Product | None = None


def product(engine: str) -> Product:
    """What is tested, once a process: the program is loaded only once."""
    global _product
    if _product is None:
        _product = Product(ENGINES[engine], product_program())
    return _product


def _work(job: tuple[int, str, Mask]) -> Outcome:
    seed, engine, mask = job
    return run_seed(seed, product(engine), mask)


def _heed_only_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    """The seeds' outcomes, as they come."""
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    jobs = ((s, options.engine, options.without) for s in seeds if time.monotonic() < until)
    if options.jobs <= 1:
        yield from map(_work, jobs)
        return
    with multiprocessing.get_context("fork").Pool(options.jobs, _heed_only_the_parent) as pool:
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
    if mask.features is not None:
        without = f" --features {'+'.join(sorted(mask.features)) or 'none'}{without}"
    return f"python -m kvcast.simulation --first-seed {seed} --seeds 1 --engine {engine}{without}"


def tell_violation(outcome: Outcome, options: argparse.Namespace) -> dict[str, Any]:
    """Print a violation, in its smallest form, and give it as the report has it."""
    assert outcome.violation is not None
    number, text = outcome.violation
    print(f"seed {outcome.seed}: invariant {number} violated: {text}")
    for more in filter(None, (outcome.detail, outcome.stories)):
        print(more)
    mask = options.without or Mask()
    if not options.no_shrink:

        def fails(candidate: Mask) -> bool:
            again = run_seed(outcome.seed, product(options.engine), candidate)
            return again.violation is not None and again.violation[0] == number

        if not str(mask):
            mask, runs = shrink(outcome.seed, fails, mask=mask)
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


class _Total:
    """What all seeds came to."""

    def __init__(self) -> None:
        self.seeds = self.delivered = self.hosts = 0
        self.violations: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._tiers: Counter[str] = Counter()
        self._simulated_s = self._data_plane_s = self._took_s = 0.0

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.delivered += outcome.delivered
        self.hosts += outcome.hosts
        self._simulated_s += outcome.simulated_s
        self._data_plane_s += outcome.data_plane_s
        self._took_s += outcome.took_s
        self._counts.update(outcome.counts)
        self._faults.update(outcome.faults)
        self._tiers.update(outcome.delivered_by_tier)

    def report(self, options: argparse.Namespace, minutes: float) -> dict[str, Any]:
        """The numbers as plain data."""
        counts = self._counts
        return {
            "seeds": self.seeds,
            "first_seed": options.first_seed,
            "violations": self.violations,
            "blocks_delivered": self.delivered,
            "blocks_delivered_by_tier": dict(sorted(self._tiers.items())),
            "faults": dict(sorted(self._faults.items())),
            "seeds_per_minute": round(self.seeds / minutes, 1),
            "minutes": round(minutes, 2),
            "jobs": options.jobs,
            "engine": options.engine,
            "simulated_hours": round(self._simulated_s / 3600, 2),
            "switch_frames_in": counts["switch_frames_in"],
            "switch_frames_out": counts["switch_frames_out"],
            "switch_updates": counts["switch_updates"],
            "hosts_per_seed": round(self.hosts / max(1, self.seeds), 2),
            "data_plane_share_of_time": round(self._data_plane_s / max(1e-9, self._took_s), 3),
            "gets": {k[4:]: n for k, n in sorted(counts.items()) if k.startswith("get.")},
            "conveyors": {k[9:]: n for k, n in counts.items() if k.startswith("conveyor.")},
            "misses": {k[5:]: n for k, n in sorted(counts.items()) if k.startswith("miss.")},
            "puts": {k[4:]: n for k, n in sorted(counts.items()) if k.startswith("put.")},
            "clients_that_outlived_their_agent": {
                name: counts[name]
                for name in ("clients_resumed", "clients_resumed_holding", "agents_upgraded")
            }
            | {k[5:]: n for k, n in sorted(counts.items()) if k.startswith("kept.")},
            "further_arenas": {
                k[6:]: n for k, n in sorted(counts.items()) if k.startswith("arena.")
            },
            "namespaces": {
                name: counts[name] for name in ("namespaces_deleted", "namespaces_found_again")
            },
            "blocks_held_by_no_home_of_today": counts["strays"],
            "machine": provenance.machine(),
            "commit": provenance.commit(),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds, report, and exit with 1 where an invariant did not hold; interrupted, report on
    the seeds that have run."""
    options = build_parser().parse_args(argv)
    options.without = options.without or Mask()
    options.without = dataclasses.replace(options.without, features=options.features)
    started = time.monotonic()
    next_line = started + PROGRESS_S
    total = _Total()
    interrupted = {}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the product tells of every fault
    try:
        for outcome in outcomes(options):
            total.add(outcome)
            if outcome.violation is not None:
                total.violations.append(tell_violation(outcome, options))
                if not options.keep_going:
                    break
            now = time.monotonic()
            if now >= next_line:
                next_line = now + PROGRESS_S
                print(
                    f"{total.seeds:,} of {options.seeds:,} seeds, {total.delivered:,} blocks, "
                    f"{len(total.violations)} violations, "
                    f"{60 * total.seeds / (now - started):.0f} seeds a minute",
                    file=sys.stderr,
                )
    except KeyboardInterrupt as error:
        interrupted = {"incomplete": reports.why(error)}
    finally:
        logging.disable(disabled)
    report = total.report(options, (time.monotonic() - started) / 60) | interrupted
    reports.report_to(options.json, report)
    if total.violations:
        return EXIT_FAILED
    return EXIT_INTERRUPTED if interrupted else EXIT_OK
