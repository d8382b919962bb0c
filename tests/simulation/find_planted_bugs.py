"""Finds, for every planted bug, the first seed that shows it:
`PYTHONPATH=tests/support:tests/integration python tests/simulation/find_planted_bugs.py`.

Writes the rows of docs/simulation.md's table to standard output, with the seed that shows the bug
in the least time, which `test_simulation_planted_bugs` takes. To be run when the plan, the model
or a bug has changed. Seeds in which a bug cannot show (`Bug.may_show`) count, but are not run.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from kvcast.simulation.run import plan_of, run_seed
from kvcast.simulation.switch import ENGINES
from planted_bugs import BUGS, Bug


def find(bug: Bug, options: argparse.Namespace) -> bool:
    """Print a row for the bug; False if no seed shows it."""
    product_engine = ENGINES[options.engine]
    started = time.process_time()
    last = options.max_seeds
    first: tuple[int, int] | None = None
    quickest = (float("inf"), 0, 0)
    runs = 0
    what = ""
    with bug.plant(product_engine) as product:
        seed = 0
        while seed < last and time.process_time() - started < options.seconds:
            seed += 1
            if not bug.may_show(plan_of(seed, bug.mask)):
                continue
            runs += 1
            outcome = run_seed(seed, product, bug.mask)
            if outcome.violation is None:
                continue
            number, text = outcome.violation
            if number not in bug.invariants:
                print(f"{bug.name}: seed {seed}: invariant {number} (unexpected): {text}")
                continue
            if first is None:
                first, what = (seed, runs), f"{number}: {text}"
                last = seed + options.more_seeds
            quickest = min(quickest, (outcome.took_s, seed, number))
            if quickest[0] < options.quick:
                break
    if first is None:
        print(f"| {bug.name} | NOT FOUND | by {seed} seeds, {runs} run |", flush=True)
        return False
    took, quick, number = quickest
    print(
        f"| {bug.name} | {number} | {first[0]} | {first[1]} | {quick} | {took:.1f} s | {what}",
        flush=True,
    )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-seeds", type=int, default=300)
    parser.add_argument("--more-seeds", type=int, default=12, help="to look for a quicker one in")
    parser.add_argument("--quick", type=float, default=0.4, help="seconds that are quick enough")
    parser.add_argument("--seconds", type=float, default=600.0, help="at most so long for one bug")
    parser.add_argument("--engine", default=next(iter(ENGINES)), choices=sorted(ENGINES))
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    parser.add_argument("--skip", default="", help="bugs whose name contains any of these, by |")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth bug, from the Ith on")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    logging.disable(logging.CRITICAL)
    missed = 0
    for bug in list(BUGS.values())[part::parts]:
        skipped = options.skip and any(part in bug.name for part in options.skip.split("|"))
        if options.only in bug.name and not skipped:
            missed += not find(bug, options)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
