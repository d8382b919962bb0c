"""What is counted for each namespace by itself.

Owns: the numbers, and why a block was not there. Must not know: who counts when, or how numbers are
shown. Namespaces that the pool does not have any more are forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from kvcast.hostagent.core.histogram import FETCH_BOUNDS_S, Histogram
from kvcast.hostagent.core.store import EVICTED, EXPIRED
from kvcast.protocol.requester import MissReason

COLD: Final = "cold"
"""As far as this node knows, nobody ever had it."""
EVICTED_DRAM: Final = "evicted_dram"
EVICTED_ARENA: Final = "evicted_arena"
EVICTED_SSD: Final = "evicted_ssd"
TIMED_OUT: Final = "timed_out"
FAILED: Final = "failed"
NO_ROOM: Final = "no_room"
"""It is somewhere, and there is no room for it here."""
GIVEN_UP: Final = "given_up"
"""Its client did not wait for it."""

_OF_REQUESTER: Final = {
    MissReason.DEADLINE: TIMED_OUT,
    MissReason.UNREACHABLE: TIMED_OUT,
    MissReason.NO_MEMORY: NO_ROOM,
    MissReason.GIVEN_UP: GIVEN_UP,
}
"""Those that nobody's memory explains; NOT_FOUND and NO_HOME are for the store to explain, and all
others failed."""
_NOWHERE: Final = frozenset({MissReason.NOT_FOUND, MissReason.NO_HOME})
_WHY_GONE: Final = {
    EVICTED: EVICTED_DRAM,
    EVICTED_ARENA: EVICTED_ARENA,
    EVICTED_SSD: EVICTED_SSD,
    EXPIRED: EXPIRED,
    "": COLD,
}


def explained(why_gone: str) -> str:
    """The reason of a miss of which the store says so (`Store.why_gone`)."""
    return _WHY_GONE[why_gone]


def explained_by(reason: MissReason, why_gone: str) -> str:
    """The reason of a miss that the requester reports so, and of which the store says so."""
    if reason in _NOWHERE:
        return explained(why_gone)
    return _OF_REQUESTER.get(reason, FAILED)


@dataclass(slots=True)
class NamespaceMetrics:
    """Totals since this node first knew the namespace."""

    gets: int = 0
    """Keys that clients asked for."""
    hits: Counter[str] = field(default_factory=Counter)
    """By tier (`protocol.messages.local.TIERS`)."""
    misses: Counter[str] = field(default_factory=Counter)
    """By reason: `COLD` and those below it."""
    home_misses: Counter[str] = field(default_factory=Counter)
    """Other nodes' READs and gets that found nothing here, by reason."""
    puts: int = 0
    got_bytes: int = 0
    put_bytes: int = 0
    rate_limited: int = 0
    """Keys of requests that were refused for the namespace's rate."""
    get_time: Histogram = field(default_factory=lambda: Histogram(FETCH_BOUNDS_S))
    """Seconds from a client's get to its block, by key; misses are not in it, nor what clients get
    without asking."""
    put_time: Histogram = field(default_factory=lambda: Histogram(FETCH_BOUNDS_S))
    """Seconds from when a client said that its block is whole to the acknowledgement, by key,
    whatever that waits for (`writes.ACKS`); puts that failed are not in it."""


class NamespacesMetrics:
    """Those of all namespaces."""

    def __init__(self) -> None:
        self._of: dict[int, NamespaceMetrics] = {}

    def of(self, namespace: int) -> NamespaceMetrics:
        """Those of one namespace, which the pool has."""
        found = self._of.get(namespace)
        if found is None:
            found = self._of[namespace] = NamespaceMetrics()
        return found

    def keep(self, namespaces: Collection[int]) -> None:
        """Forget all others."""
        self._of = {n: metrics for n, metrics in self._of.items() if n in namespaces}

    def all(self) -> dict[int, NamespaceMetrics]:
        """By namespace, in order."""
        return dict(sorted(self._of.items()))
