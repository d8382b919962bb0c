"""Workloads at real sizes, and the ways in which a pool could serve them.

Owns: how much KV a block holds, how a workload is scaled to links, and what each alternative to the
switch changes in demand or network. Must not know: how a result is shown.

A workload's prompts come at such a rate that, were each byte sent as often as a plain pool sends
it, all hosts' links would be `load` full. Jitter between readers stays what the workload says, in
milliseconds: that is people, schedulers and engines, which get no faster with links. So does the
time for which homes may gather, of which `gather_ms` is the most (the wire counts whole
milliseconds).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from kvcast.p4.figures import TOKEN_KIB
from kvcast.simulation.flows.demand import NS, Demand, columns, demand_of, mix
from kvcast.simulation.flows.engine import FlowOptions, Outcome, simulate
from kvcast.simulation.flows.networks import TOPOLOGIES, Fabric, Ints
from kvcast.workloads import generators
from kvcast.workloads.generators import Request, WorkloadOptions
from kvcast.workloads.traces import TraceLine

WORKLOADS = (
    "tp-mla",
    "rollout",
    "fan-out",
    "storm",
    "prompt-rollout",
    "model-load",
    "prefill-decode",
    "chat",
)
MODELS = {name: round(kib * 1024) for name, kib in TOKEN_KIB.items()}
"""KV bytes of one token in all layers."""
DEFAULT_MODEL = "DeepSeek-V3 (MLA), fp8"
LINK_GBPS = (25, 50, 100, 200, 400, 800)
REPLICAS = 3
"""Homes of a block where it is replicated because it is hot."""
PREFILL_TOKENS_PER_S = 20_000.0
"""What a node computes anew, where nothing is fetched: an assumption, varied in the sensitivity."""


class ScenarioError(ValueError):
    """A scenario that cannot be built; the text says why."""


@dataclass(frozen=True)
class Scenario:
    """A pool and what is asked of it."""

    workload: str = "tp-mla"
    hosts: int = 32
    link_gbps: float = 100.0
    topology: str = "star"
    model: str = DEFAULT_MODEL
    block_tokens: int = 64
    prefix_blocks: int = 8
    load: float = 0.3
    """Share of all hosts' links that the plain pool's answers would fill."""
    gather_ms: int = 1
    reads: int = 300
    """Reads to simulate, about."""
    seed: int = 1

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ScenarioError(f"no topology {self.topology!r}; there are {', '.join(TOPOLOGIES)}")
        if self.model not in MODELS:
            raise ScenarioError(f"no model {self.model!r}; there are {', '.join(MODELS)}")
        if not 0 < self.load < 1:
            raise ScenarioError(f"a load of {self.load} is not between 0 and 1")
        if self.hosts < 2:
            raise ScenarioError("a pool has at least two hosts")
        if not self.link_gbps > 0 or self.block_tokens < 1:
            raise ScenarioError("links have a positive rate, and blocks at least one token")

    @property
    def block_bytes(self) -> int:
        return MODELS[self.model] * self.block_tokens

    @property
    def bits_per_s(self) -> float:
        return self.link_gbps * 1e9

    def fabric(self) -> Fabric:
        return TOPOLOGIES[self.topology](self.hosts, self.bits_per_s)


def requests_of(scenario: Scenario) -> list[Request]:
    """The first requests of the workload with about `reads` reads, their times scaled to links."""
    options = WorkloadOptions(
        nodes=scenario.hosts,
        seed=scenario.seed,
        rate_per_s=1.0,
        prefix_blocks=scenario.prefix_blocks,
    )
    stream = generators.generate(scenario.workload, options)
    requests, _ = generators.take(
        stream, remote_reads=scenario.reads, written=1 << 40, requests_at_most=1 << 20
    )
    return _scaled(requests, scenario)


def _scaled(requests: Sequence[Request], scenario: Scenario) -> list[Request]:
    demand = demand_of(requests, scenario.hosts, scenario.block_bytes)
    link_s = float(demand.read_bytes.sum()) * 8 / scenario.bits_per_s / scenario.hosts
    stretch = link_s / scenario.load / max(1e-9, requests[-1].time_s)
    return [
        replace(r, time_s=r.time_s * stretch, gather_ms=min(r.gather_ms, scenario.gather_ms))
        for r in requests
    ]


def demand_for(scenario: Scenario) -> Demand:
    return demand_of(requests_of(scenario), scenario.hosts, scenario.block_bytes)


def trace_requests_of(
    lines: Sequence[TraceLine], scenario: Scenario
) -> tuple[list[Request], float]:
    """A trace's first requests, and by how much their time was compressed to reach the load."""
    from kvcast.workloads.traces import trace_requests

    options = WorkloadOptions(nodes=scenario.hosts, seed=scenario.seed)
    requests, _ = generators.take(
        itertools.islice(trace_requests(lines, options), 1 << 20),
        remote_reads=scenario.reads,
        written=1 << 40,
        requests_at_most=1 << 20,
    )
    before = max(1e-9, requests[-1].time_s)
    scaled = _scaled(requests, scenario)
    return scaled, before / max(1e-9, scaled[-1].time_s)


# --- ways to serve ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """What a way came to. `wait_ms`: (gets of the plain pool,), zeros where nothing was fetched."""

    wait_ms: Any
    outcome: Outcome | None
    home_bytes: int
    peer_bytes: int = 0
    note: str = ""

    def summary(self, distinct: int) -> dict[str, float]:
        waits = np.sort(self.wait_ms)
        return {
            "mean_ms": round(float(waits.mean()), 4) if len(waits) else 0.0,
            "p50_ms": round(float(np.percentile(waits, 50)), 4) if len(waits) else 0.0,
            "p99_ms": round(float(np.percentile(waits, 99)), 4) if len(waits) else 0.0,
            "home_egress_ratio": round(self.home_bytes / max(1, distinct), 4),
            "peer_egress_ratio": round(self.peer_bytes / max(1, distinct), 4),
        }


def _served(outcome: Outcome, gets: int, **more: Any) -> Served:
    waits = np.zeros(max(gets, len(outcome.fetch_ns)))
    waits[: len(outcome.fetch_ns)] = outcome.fetch_ms
    return Served(waits, outcome, outcome.home_payload_bytes, outcome.peer_payload_bytes, **more)


def serve_all(
    scenario: Scenario,
    requests: Sequence[Request],
    affinity: Sequence[Request] | None = None,
) -> tuple[dict[str, Served], Demand]:
    """Every way to serve these requests, by name; `affinity`: the same prompts, sent to the nodes
    that served their prefixes."""
    options = FlowOptions(max_pieces=4, max_rounds=1000)
    fabric, size = scenario.fabric(), scenario.block_bytes
    demand = demand_of(requests, scenario.hosts, size)
    plain = simulate(demand, fabric, replace(options, way="plain", gathers=False))
    gets = len(plain.fetch_ns)
    ways = {"plain pool": _served(plain, gets)}
    ways["kvcast"] = _best_gather(demand, fabric, options, gets)
    rank = _rank_of_readers(demand)
    homes = replica_homes(demand)
    for name, choice in (
        ("hot replicas", mix(demand.read_node * 1_000_003 + demand.read_block) % REPLICAS),
        ("switch that only routes", rank % REPLICAS),
    ):
        spread = replace(demand, read_home=homes[choice, np.arange(len(choice))])
        spread = spread.reads_where(spread.read_home != spread.read_node)
        outcome = simulate(spread, fabric, replace(options, way="plain", gathers=False))
        ways[name] = _served(outcome, gets)
    for name, fan_out in (("peers' chain", 1), ("peers' tree", 2)):
        outcome = simulate(
            demand, fabric, replace(options, way="peers", fan_out=fan_out, gathers=False)
        )
        ways[name] = _served(outcome, gets)
    ways["single flight at hosts of 4"] = _single_flight(scenario, demand, options, gets)
    if affinity is not None:
        near = demand_of(affinity, scenario.hosts, size)
        outcome = simulate(near, fabric, replace(options, way="plain", gathers=False))
        load = np.bincount([r.node for r in affinity], minlength=scenario.hosts)
        note = f"busiest node {load.max() / max(1e-9, load.mean()):.2f} times the mean"
        ways["prefix-aware routing"] = _served(outcome, gets, note=note)
    tokens = (
        np.bincount(
            np.unique(demand.read_request * demand.nodes + demand.read_node, return_inverse=True)[1]
        )
        * scenario.block_tokens
        if len(demand.read_block)
        else np.zeros(0)
    )
    ways["recomputation"] = Served(tokens / PREFILL_TOKENS_PER_S * 1e3, None, 0)
    return ways, demand


def _best_gather(demand: Demand, fabric: Fabric, options: FlowOptions, gets: int) -> Served:
    """kvcast as a sensible operator has it: with the gather time that the workload allows, or
    without, whichever gives the lower mean."""
    runs = [
        _served(
            simulate(demand, fabric, replace(options, way="coalesce", gathers=gathers)),
            gets,
            note="gathers" if gathers else "",
        )
        for gathers in ((False, True) if demand.request_gather.any() else (False,))
    ]
    return min(runs, key=lambda run: float(run.wait_ms.mean()) if len(run.wait_ms) else 0.0)


def _rank_of_readers(demand: Demand) -> Ints:
    """The how-manieth reader of its block each read is."""
    order = np.argsort(demand.read_block, kind="stable")
    block = demand.read_block[order]
    begins = np.flatnonzero(np.r_[True, block[1:] != block[:-1]]) if len(block) else block
    rank = np.empty(len(block), np.int64)
    lengths = np.diff(np.r_[begins, len(block)])
    rank[order] = np.arange(len(block)) - np.repeat(begins, lengths)
    return rank


def replica_homes(demand: Demand) -> Ints:
    """REPLICAS nodes for each read's block, home first: shape (REPLICAS, reads)."""
    step = 1 + mix(demand.read_block) % max(1, demand.nodes // REPLICAS)
    return np.stack([(demand.read_home + i * step) % demand.nodes for i in range(REPLICAS)])


def _single_flight(scenario: Scenario, demand: Demand, options: FlowOptions, gets: int) -> Served:
    """Four engines share a host's memory, and a card of four times the rate: one fetches."""
    together = 4
    hosts = -(-scenario.hosts // together)
    node, home = demand.read_node // together, demand.read_home // together
    _, first = np.unique(node * (1 << 40) + demand.read_block, return_index=True)
    keep = np.zeros(len(node), bool)
    keep[first] = True
    packed = replace(demand, nodes=hosts, read_node=node, read_home=home)
    packed = packed.reads_where(keep & (node != home))
    order = np.lexsort((packed.read_node, packed.read_request))
    packed = packed.reads_where(order)  # type: ignore[arg-type]
    fabric = TOPOLOGIES[scenario.topology](max(2, hosts), scenario.bits_per_s * together)
    packed = replace(packed, nodes=max(2, hosts))
    outcome = simulate(packed, fabric, replace(options, way="plain", gathers=False))
    return _served(outcome, gets)


# --- the frontier -------------------------------------------------------------------------------


def groups_demand(
    *,
    hosts: int,
    group: int,
    spread_ns: float,
    block_bytes: int,
    blocks: int,
    bits_per_s: float,
    load: float,
    events: int,
    correlated: float = 1.0,
    gather_ns: int = 0,
    seed: int = 1,
) -> Demand:
    """Events in which `group` nodes read the same blocks, starting within `spread_ns` of each
    other; the rest (1 - correlated) of the reads are of blocks that nobody else wants."""
    rng = np.random.default_rng(seed)
    group = min(group, hosts - 1)
    together = rng.random(events) < correlated
    per_event_s = group * blocks * block_bytes * 8 / bits_per_s
    at = np.cumsum(rng.exponential(per_event_s / hosts / load * NS, events))
    request_at, read = [], []
    number = block = 0
    for event in range(events):
        readers = rng.permutation(hosts)[:group]
        home = rng.integers(0, hosts, blocks)
        late = np.sort(rng.uniform(0, spread_ns, group))
        for place, node in enumerate(readers):
            request_at.append(at[event] + late[place])
            for piece in range(blocks):
                own = 0 if together[event] else place * blocks
                where = int(home[piece])
                if where == node:
                    where = (where + 1) % hosts
                read.append((number, node, block + own + piece, where))
            number += 1
        block += blocks * (1 if together[event] else group)
    table = np.array(read, np.int64)
    # A block has one home; a reader that is it reads from the next node, as from a replica.
    count = number
    return Demand(
        hosts,
        np.array(request_at, np.float64).astype(np.int64),
        np.full(count, -1, np.int64),
        np.zeros(count, np.int64),
        np.full(count, gather_ns, np.int64),
        *columns(table),
        np.full(block, block_bytes, np.int64),
    )


def gain(demand: Demand, fabric: Fabric, options: FlowOptions | None = None) -> dict[str, float]:
    """How many times as fast, and how many bytes of homes fewer, with joins than without."""
    options = options or FlowOptions(max_pieces=4, max_rounds=1000)
    plain = simulate(demand, fabric, replace(options, way="plain", gathers=False))
    runs = [simulate(demand, fabric, replace(options, way="coalesce", gathers=False))]
    if demand.request_gather.any():
        runs.append(simulate(demand, fabric, replace(options, way="coalesce", gathers=True)))
    kvcast = min(runs, key=lambda run: float(run.fetch_ns.mean()))
    return {
        "speedup": round(float(plain.fetch_ns.mean()) / float(kvcast.fetch_ns.mean()), 4),
        "p99_speedup": round(
            float(np.percentile(plain.fetch_ns, 99)) / float(np.percentile(kvcast.fetch_ns, 99)), 4
        ),
        "egress": round(kvcast.home_payload_bytes / max(1, plain.home_payload_bytes), 4),
        "plain_mean_ms": round(float(plain.fetch_ms.mean()), 4),
        "kvcast_mean_ms": round(float(kvcast.fetch_ms.mean()), 4),
        "gathers": float(len(runs) > 1 and kvcast is runs[1]),
        "unsettled": round(max(plain.unsettled, kvcast.unsettled), 4),
    }
