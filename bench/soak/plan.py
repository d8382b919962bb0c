"""Which faults strike a pool in a soak, when and whom: a function of a seed.

Owns: the kinds of faults, how often each strikes, and which parts are spared. Must not know: pools,
processes, sockets; faults.py does what stands here.

Faults come in lanes. Those of one lane strike one after the other, at the planned time or as soon
as the one before is over; lanes run side by side. So at most one part is dead and one stopped at a
time, while frames, messages, dying clients and an operator's work go on.

Kills restart processes, and a leak shows only in one that lives. So:
- the first half of the nodes is never killed: their agents live as long as the soak;
- the switch is killed in the first fifth of the soak only, and lives for the other four, longer
  than it takes until all pages of its tables have been touched; the controller is killed in the
  third fifth only, and lives for two fifths before and after. So neither is killed in the second
  and in the last fifth, whose hit rates are compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

KILL_AGENT: Final = "agent killed"
KILL_SWITCH: Final = "switch killed"
KILL_CONTROLLER: Final = "controller killed"
STOP_AGENT: Final = "agent stopped"
STOP_SWITCH: Final = "switch stopped"
STOP_CONTROLLER: Final = "controller stopped"
KILL_CLIENT: Final = "client killed with pins"
STOP_CLIENT: Final = "client stopped"
HOSTILE_FRAMES: Final = "hostile frames to the switch"
HOSTILE_LOCAL: Final = "hostile bytes to a local socket"
HOSTILE_HTTP: Final = "hostile bytes to the HTTP API"
HOSTILE_TCP: Final = "hostile bytes to a TCP port"
MAKE_NAMES: Final = "namespaces and groups asked for"
SET_PINS: Final = "pins set in the switch"
REMOVE_PINS: Final = "pins removed from the switch"
DROP_BLOCKS: Final = "blocks dropped"

# What comes with one of those, and is counted by itself.
HOSTILE_AS_DEAD: Final = "hostile frames as a dead node"
HOSTILE_TO_AGENTS: Final = "hostile frames to the agents"
LOST_FRAMES: Final = "frames lost"

_FIFTH_OF_KILLS: Final = {KILL_SWITCH: 0, KILL_CONTROLLER: 2}
"""Of the soak's five; whatever is not here may strike in all of them."""


@dataclass(frozen=True)
class Fault:
    """One fault: not before `at_s` of the soak; `lasts_s` for what is taken away and given back.

    `node` is an index: of the agent for faults of agents, local sockets and clients.
    """

    at_s: float
    kind: str
    node: int = 0
    lasts_s: float = 0.0


@dataclass(frozen=True)
class Lane:
    """`kinds` with their weights, one about every `period_s`; `lasts_s`: from, to."""

    kinds: tuple[tuple[str, float], ...]
    period_s: float
    lasts_s: tuple[float, float] = (0.0, 0.0)


LANES: Final = {
    "kills": Lane(
        ((KILL_AGENT, 2.0), (KILL_SWITCH, 1.0), (KILL_CONTROLLER, 1.0)), 20.0, (0.2, 6.0)
    ),
    # Longer than a lease, now and then: then the part counts as dead, and comes back.
    "stops": Lane(
        ((STOP_AGENT, 3.0), (STOP_SWITCH, 1.0), (STOP_CONTROLLER, 1.0)), 11.0, (0.1, 6.0)
    ),
    "clients": Lane(((KILL_CLIENT, 3.0), (STOP_CLIENT, 1.0)), 7.0, (0.2, 4.0)),
    "frames": Lane(((HOSTILE_FRAMES, 1.0),), 2.0),
    "streams": Lane(((HOSTILE_LOCAL, 2.0), (HOSTILE_HTTP, 1.0), (HOSTILE_TCP, 1.0)), 4.0),
    "operator": Lane(
        ((SET_PINS, 3.0), (REMOVE_PINS, 3.0), (MAKE_NAMES, 2.0), (DROP_BLOCKS, 1.0)), 3.0
    ),
}


PLANNED: Final = tuple(kind for lane in LANES.values() for kind, _ in lane.kinds)
KINDS: Final = (*PLANNED, HOSTILE_AS_DEAD, HOSTILE_TO_AGENTS, LOST_FRAMES)
"""Every kind that a report counts."""

DISRUPTIVE: Final = tuple(kind for name in ("kills", "stops") for kind, _ in LANES[name].kinds)
"""Those that take a part away for a while."""


def spared(nodes: int) -> int:
    """How many nodes, the first ones, keep their agents for the whole soak."""
    return (nodes + 1) // 2


def allowed(kind: str, at_s: float, duration_s: float) -> bool:
    """Whether that kind may strike then."""
    fifth = int(5 * at_s / duration_s)
    return _FIFTH_OF_KILLS.get(kind, fifth) == fifth


def plan(seed: int, duration_s: float, nodes: int) -> dict[str, list[Fault]]:
    """By lane, the faults of a soak of `nodes` nodes (at least 2), in order of time."""
    assert nodes >= 2
    return {
        name: list(_faults(lane, random.Random(f"{name}/{seed}"), duration_s, nodes))
        for name, lane in LANES.items()
    }


def _faults(lane: Lane, rng: random.Random, duration_s: float, nodes: int) -> Iterator[Fault]:
    at_s = rng.uniform(0.3, 1.0) * lane.period_s
    while at_s < duration_s:
        kinds = [(kind, weight) for kind, weight in lane.kinds if allowed(kind, at_s, duration_s)]
        (kind,) = rng.choices([k for k, _ in kinds], [weight for _, weight in kinds])
        first = spared(nodes) if kind == KILL_AGENT else 0
        # Short ones more often than long ones.
        low, high = lane.lasts_s
        lasts_s = low + (high - low) * rng.random() ** 2
        yield Fault(round(at_s, 2), kind, rng.randrange(first, nodes), round(lasts_s, 2))
        at_s += rng.uniform(0.5, 1.5) * lane.period_s
