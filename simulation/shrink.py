"""Makes a failing run smaller: fewer hosts, fewer faults, fewer of the clients' actions.

Owns: which parts are tried without. Must not know: what they are. As in delta debugging (Zeller
and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002), ever smaller groups are
left out for as long as the same invariant is still violated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvcast.simulation.plan import Mask
from kvcast.simulation.run import plan_of

StillFails = Callable[[Mask], bool]

MIN_HOSTS = 2


def shrink(
    seed: int, fails: StillFails, *, budget: int = 200, mask: Mask | None = None
) -> tuple[Mask, int]:
    """The smallest mask found with which the seed still fails, and how many runs it took.

    `fails` runs the seed under a mask and says whether it fails in the same way; `budget` bounds
    the runs; `mask`: with which to begin.
    """
    mask = mask or Mask()
    runs = 0

    def try_(candidate: Mask) -> bool:
        nonlocal runs, mask
        if runs >= budget:
            return False
        runs += 1
        if fails(candidate):
            mask = candidate
            return True
        return False

    plan = plan_of(seed, mask)
    for hosts in range(MIN_HOSTS, len(plan.hosts)):
        if try_(replace(mask, hosts=hosts)):
            break
    for feature in sorted(plan.features):
        try_(replace(mask, features=plan_of(seed, mask).features - {feature}))
    plan = plan_of(seed, mask)
    faults = [fault.number for fault in plan.faults]
    _without(faults, lambda gone: try_(replace(mask, faults=mask.faults | gone)))
    # Actions of the last phase first: a violation ends the run, so they are rarely needed.
    ops = [op.number for op in sorted(plan.ops, key=lambda op: (-op.phase, -op.at))]
    _without(ops, lambda gone: try_(replace(mask, ops=mask.ops | gone)))
    return mask, runs


def _without(parts: Sequence[int], try_: Callable[[frozenset[int]], bool]) -> None:
    left = list(parts)
    size = max(1, len(left) // 2)
    while left:
        at = 0
        while at < len(left):
            group = frozenset(left[at : at + size])
            if try_(group):
                left = [part for part in left if part not in group]
            else:
                at += size
        if size == 1:
            return
        size = max(1, size // 2)
