"""Finds, for every planted bug, the first seed that shows it: `python find_planted_bugs.py`.

Writes the table of docs/simulation.md to standard output, and the numbers that
`test_vopr_planted_bugs` relies on. To be run when the plan, the model or a bug has changed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from kvcast.bench.vopr_plan import Mask
from kvcast.bench.vopr_run import plan_of, run_seed
from kvcast.bench.vopr_switch import engines
from vopr_bugs import BUGS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-seeds", type=int, default=300)
    parser.add_argument("--engine", default=next(iter(engines())), choices=sorted(engines()))
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    parser.add_argument("--skip", default="", help="bugs whose name contains any of these, by |")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth bug, from the Ith on")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    logging.disable(logging.CRITICAL)
    engine = engines()[options.engine]
    missed = 0
    for bug in list(BUGS.values())[part::parts]:
        skipped = options.skip and any(part in bug.name for part in options.skip.split("|"))
        if options.only not in bug.name or skipped:
            continue
        started = time.perf_counter()
        with bug.plant(engine) as product:
            for seed in range(1, options.max_seeds + 1):
                if not bug.may_show(plan_of(seed, Mask())):
                    continue
                outcome = run_seed(seed, product)
                if outcome.violation is not None:
                    number, text = outcome.violation
                    took = time.perf_counter() - started
                    if number not in bug.invariants:
                        print(f"{bug.name}: seed {seed}: invariant {number} (unexpected): {text}")
                        continue
                    print(f"| {bug.name} | {number} | {seed} | {took:.0f} s | {text}")
                    break
            else:
                missed += 1
                print(f"| {bug.name} | NOT FOUND | {options.max_seeds} |")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
