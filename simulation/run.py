"""One run of one seed, and what came of it.

Owns: from a seed and a mask to an `Outcome`. Must not know: processes, reports, files.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvcast.simulation.cluster import Cluster, Product
from kvcast.simulation.faults import FAULTS
from kvcast.simulation.model import ViolationError
from kvcast.simulation.plan import Mask, Plan, make_plan


@dataclass(frozen=True)
class Outcome:
    """What a run showed. `violation`: the invariant's number and what was seen; None = all held.
    Times in real seconds."""

    seed: int
    violation: tuple[int, str] | None
    trace: str
    delivered: int
    delivered_by_tier: dict[str, int]
    counts: Counter[str]
    hosts: int
    simulated_s: float
    took_s: float
    data_plane_s: float
    detail: str = ""
    """Where in the product an exception came from."""
    stories: str = ""
    """What happened to the fetches of the blocks that the violation names."""

    @property
    def faults(self) -> dict[str, int]:
        """Faults that had an effect, by kind."""
        prefix = "fault."
        return {k[len(prefix) :]: n for k, n in self.counts.items() if k.startswith(prefix)}


MAX_STORIES: Final = 6
"""Fetches that are told of; the last ones."""


def stories_of(cluster: Cluster, text: str) -> str:
    """The stories of the fetches of blocks that `text` names; a name begins with eight digits of
    the key."""
    told = [
        f"host {host.number}, {story}"
        for host in cluster.hosts.values()
        if host.process is not None
        for story in host.process.core.requester.stories()
        if story.block.key.hex()[:8] in text
    ]
    return "\n".join(told[-MAX_STORIES:])


def plan_of(seed: int, mask: Mask) -> Plan:
    """The plan of a seed, without what the mask leaves out."""
    return make_plan(seed, {name: kind.plan for name, kind in FAULTS.items()}, mask)


def run_seed(seed: int, product: Product, mask: Mask | None = None) -> Outcome:
    """Simulate a seed until its end or the first violation. An exception anywhere in the product
    is a violation too, of number 0."""
    started = time.perf_counter()
    plan = plan_of(seed, mask or Mask())
    cluster = Cluster(plan, product, FAULTS)
    violation: tuple[int, str] | None = None
    detail = ""
    try:
        cluster.run()
    except ViolationError as error:
        violation = (error.number, error.text)
    except Exception as error:
        violation = (0, f"{type(error).__name__}: {error}")
        detail = traceback.format_exc()
    stories = stories_of(cluster, violation[1]) if violation is not None else ""
    counts = cluster.world.counts
    for host in cluster.hosts.values():
        if host.process is not None:
            store = host.process.core.store.counters
            counts["evictions"] += store.evictions
            counts["expired"] += store.expired
            counts["orphaned"] += store.orphaned
            counts["policy_faults"] += store.policy_faults
            counts["fault.arena_without_room"] += store.no_room
            counts["fault.different_bytes_of_one_block"] += store.conflicts
    model = cluster.model
    return Outcome(
        seed=seed,
        violation=violation,
        trace=cluster.world.trace,
        delivered=model.delivered,
        delivered_by_tier=dict(sorted(model.delivered_by_tier.items())),
        counts=+counts,
        hosts=len(plan.hosts),
        simulated_s=cluster.world.now,
        took_s=time.perf_counter() - started,
        data_plane_s=cluster.switch.process_s,
        detail=detail,
        stories=stories,
    )
