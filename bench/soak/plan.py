"""What a pool in a soak is made of, which faults strike it, when and whom: functions of a seed.

Owns: the tiers of every node, the settings of the load's namespaces, the kinds of faults, how often
each strikes, and which parts are spared. Must not know: pools, processes, sockets; faults.py does
what stands here.

Faults come in lanes. Those of one lane strike one after the other, at the planned time or as soon
as the one before is over; lanes run side by side. So at most one part is dead and one stopped at a
time, while frames, messages, dying clients and an operator's work go on. What moves blocks from
node to node (a drain, a join), or from agent to agent (a takeover), is in the lane of the kills:
while it goes on nothing is killed, and so nothing that was acknowledged may be lost.

Kills restart processes, and a leak shows only in one that lives. So:
- the first half of the nodes is never killed, nor do they leave: their agents live as long as the
  soak;
- the switch is killed in the first fifth of the soak only, and lives for the other four, longer
  than it takes until all pages of its tables have been touched; the controller is killed in the
  third fifth only, and lives for two fifths before and after. So neither is killed in the second
  and in the last fifth, whose hit rates are compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvcast.protocol.messages.control import POLICIES

KILL_AGENT: Final = "agent killed"
KILL_SWITCH: Final = "switch killed"
KILL_CONTROLLER: Final = "controller killed"
DRAIN_NODE: Final = "nodes drained and taken back"
JOIN_NODE: Final = "nodes drained, gone, and joined anew"
TAKE_OVER: Final = "agents replaced over their arena"
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
        (
            (KILL_AGENT, 2.0),
            (KILL_SWITCH, 1.0),
            (KILL_CONTROLLER, 1.0),
            (DRAIN_NODE, 1.0),
            (JOIN_NODE, 1.0),
            (TAKE_OVER, 1.0),
        ),
        12.0,
        (0.2, 6.0),
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
"""Those that take a part away for a while, or what it holds; they have to come to their end."""

MOVES: Final = (DRAIN_NODE, JOIN_NODE, TAKE_OVER)
"""Those in which what was acknowledged must stay, and no get may fail."""

DISK: Final = "disk"
FURTHER_ARENA: Final = "further arena"
OBJECT_STORE: Final = "object store"
LOWER: Final = ((FURTHER_ARENA, DISK), (DISK,), (FURTHER_ARENA,), ())
"""What nodes have below their DRAM, beside the object store that is everybody's."""

TTL_S: Final = (10.0, 60.0)


def spared(nodes: int) -> int:
    """How many nodes, the first ones, keep their agents for the whole soak."""
    return (nodes + 1) // 2


def lower_tiers(seed: int, nodes: int) -> list[tuple[str, ...]]:
    """What each node has below its DRAM; of few nodes, the first of `LOWER`."""
    dealt: list[tuple[str, ...]] = [LOWER[number % len(LOWER)] for number in range(nodes)]
    random.Random(f"tiers/{seed}").shuffle(dealt)
    return dealt


def keepers(seed: int, nodes: int) -> list[int]:
    """The nodes that keep their arena when their agent ends: about half of those that are killed,
    one at least, and about half of the others."""
    rng, first = random.Random(f"keepers/{seed}"), spared(nodes)
    lasting, mortal = range(first), range(first, nodes)
    return sorted(rng.sample(lasting, first // 2) + rng.sample(mortal, -(-len(mortal) // 2)))


def settings_of(seed: int, namespaces: int) -> list[dict[str, Any]]:
    """What an operator says of each namespace: a policy (of one at least, `ttl`), a weight, and
    whether it may lie in the object store, as about half of them may. Ages in seconds."""
    rng = random.Random(f"settings/{seed}")
    others = [policy for policy in POLICIES if policy != "ttl"]
    rng.shuffle(others)
    policies = ["ttl", *(others[n % len(others)] for n in range(namespaces - 1))]
    cold = [number % 2 == 0 for number in range(namespaces)]
    rng.shuffle(policies)
    rng.shuffle(cold)
    return [
        {"policy": policy, "weight": rng.randint(1, 4)}
        | ({"ttl_s": round(rng.uniform(*TTL_S), 1)} if policy == "ttl" else {})
        | ({"media": ["dram", "ssd", "switch", "cold"]} if stored else {})
        for policy, stored in zip(policies, cold, strict=True)
    ]


def allowed(kind: str, at_s: float, duration_s: float) -> bool:
    """Whether that kind may strike then."""
    fifth = int(5 * at_s / duration_s)
    return _FIFTH_OF_KILLS.get(kind, fifth) == fifth


def plan(seed: int, duration_s: float, nodes: int) -> dict[str, list[Fault]]:
    """By lane, the faults of a soak of `nodes` nodes (at least 2), in order of time."""
    assert nodes >= 2
    return {
        name: list(_faults(lane, seed, random.Random(f"{name}/{seed}"), duration_s, nodes))
        for name, lane in LANES.items()
    }


def _faults(
    lane: Lane, seed: int, rng: random.Random, duration_s: float, nodes: int
) -> Iterator[Fault]:
    mortal = range(spared(nodes), nodes)
    whom = {
        KILL_AGENT: mortal,
        JOIN_NODE: mortal,
        TAKE_OVER: [node for node in keepers(seed, nodes) if node in mortal],
    }
    at_s = rng.uniform(0.3, 1.0) * lane.period_s
    while at_s < duration_s:
        kinds = [(kind, weight) for kind, weight in lane.kinds if allowed(kind, at_s, duration_s)]
        (kind,) = rng.choices([k for k, _ in kinds], [weight for _, weight in kinds])
        # Short ones more often than long ones.
        low, high = lane.lasts_s
        lasts_s = low + (high - low) * rng.random() ** 2
        node = rng.choice(whom.get(kind, range(nodes)))
        yield Fault(round(at_s, 2), kind, node, round(lasts_s, 2))
        at_s += rng.uniform(0.5, 1.5) * lane.period_s
