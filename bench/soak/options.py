"""What a soak is told: of a pool, or of a switch.

Owns: the options of both, of which `kvcast bench soak` makes its flags. Must not know: how either
is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvcast.bench.soak.plan import Fault
from kvcast.bench.soak.verdict import Bounds
from kvcast.service.options import option, size
from kvcast.topologies.pool import PoolError
from kvcast.topologies.star import MAX_HOSTS


@dataclass(frozen=True)
class SeededOptions:
    """Options of every soak."""

    seed: int = option("seeds the faults, the load and the damaged frames", default=1, parse=int)


@dataclass(frozen=True)
class SoakOptions(SeededOptions):
    """One soak of a pool."""

    minutes: float = option("how long faults and load go on", default=10.0, parse=float, unit="min")
    nodes: int = option("nodes with an agent; one more is the attacker's", default=6, parse=int)
    loss: float = option(
        "probability of losing a frame each time it crosses a link",
        default=0.002,
        parse=float,
        metavar="P",
    )
    arena_bytes: int = size(
        "memory of each agent for blocks; small, so that it evicts all the time", default=32 << 20
    )
    disk_bytes: int = 32 << 20
    """Disk tier of the agents that have one, a file in the temporary folder; 0 = none has one."""
    further_arena_bytes: int = 32 << 20
    """The same of a further arena."""
    object_bytes: int = 128 << 20
    """What the object store, a folder there, keeps: beyond it the oldest objects are deleted."""
    in_flight: int = 8
    """Requests at once for each node."""
    bounds: Bounds = field(default_factory=Bounds)
    plan: dict[str, list[Fault]] | None = None
    """None: by the seed."""
    run_dir: Path | None = None
    """Where the logs go; None: removed at the end."""

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise PoolError(f"a soak of {self.minutes:g} minutes is none")
        if not 2 <= self.nodes < MAX_HOSTS:
            raise PoolError(f"a soak needs 2 to {MAX_HOSTS - 1} nodes, and one for the attacker")


@dataclass(frozen=True)
class SwitchSoakOptions(SeededOptions):
    """One soak of a switch."""

    frames: int = option("frames to process", default=2_000_000, parse=int)
