"""A plan: what kvcast would bring to a pool that an operator describes, and what to switch on.

Owns: which runs answer that, the ranges, and the rule that makes a recommendation of them. Must not
know: flags, or how a plan is printed.

A range is the least and the most of several runs: other seeds, and links half and one and a half
times as full as said. What is recommended must hold at the lower end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kvcast.p4.targets import profiles
from kvcast.protocol.messages.wire import CELLS
from kvcast.simulation.flows import residency
from kvcast.simulation.flows.demand import Demand, demand_of, mix
from kvcast.simulation.flows.engine import FlowOptions, simulate
from kvcast.simulation.flows.questions import JOIN_NS
from kvcast.simulation.flows.scenarios import (
    REPLICAS,
    Scenario,
    gain,
    replica_homes,
    requests_of,
    trace_requests_of,
)
from kvcast.workloads.traces import TraceLine

Numbers = dict[str, Any]
SLOTS = {name: profiles[name].slots for name in ("tofino1", "tofino2", "v1model")} | {"none": 0}
"""Segments that each switch keeps."""
KNOWN_GROUPS = ("tp-mla", "prefill-decode", "rollout")
"""Workloads whose readers are known beforehand."""
MODEL_ERROR = 0.04
"""Of a simulated time, beside the packet-level pool in virtual time: the largest that the
calibration in docs/evaluation.md shows (0.035), rounded up."""


def worth_it(error: float = MODEL_ERROR) -> float:
    """Times as fast from which on a gain is one: what that error in both simulated times could
    not make of no gain at all."""
    return (1 + error) / (1 - error)


WORTH_IT = worth_it()
"""At the lower end of the range; below, it is not worth switching on."""
BYTES_WORTH_IT, NO_SLOWER = 0.8, 0.98
"""Or: what homes send at most, of the plain pool's bytes, where gets are at least so fast."""
RESIDENCY_SHARE = 0.02
"""Share of reads that switch memory must answer."""


def plan(
    scenario: Scenario,
    *,
    switch: str = "tofino2",
    lines: Sequence[TraceLine] | None = None,
    seeds: int = 3,
) -> Numbers:
    """Simulate the scenario and recommend. KeyError for an unknown switch; ScenarioError and
    SpanError as the simulator's."""
    slots = SLOTS[switch]
    cases = [replace(scenario, seed=scenario.seed + n) for n in range(seeds)]
    cases += [
        replace(scenario, load=share * scenario.load)
        for share in (0.5, 1.5)
        if share * scenario.load < 1
    ]
    gains, spreads, compressions = [], [], []
    for case in cases:
        requests, compression = (
            (requests_of(case), 1.0) if lines is None else trace_requests_of(lines, case)
        )
        demand = demand_of(requests, case.hosts, case.block_bytes)
        if not len(demand.read_block):
            continue
        compressions.append(compression)
        gains.append(gain(demand, case.fabric()))
        spreads.append(_with_replicas(demand, case))
    if not gains:
        return {"recommendation": ["off"], "why": ["no block is read from another node"]}
    share = _resident_share(scenario, slots, lines)
    report: Numbers = {
        "assumed": {
            "hosts": scenario.hosts,
            "topology": scenario.topology,
            "link_gbps": scenario.link_gbps,
            "switch": switch,
            "slots": slots,
            "slots_a_block": CELLS.segments_of(scenario.block_bytes),
            "model": scenario.model,
            "block_tokens": scenario.block_tokens,
            "block_bytes": scenario.block_bytes,
            "workload": scenario.workload if lines is None else "trace",
            "load": scenario.load,
        },
        "times_as_fast": _range(g["speedup"] for g in gains),
        "times_as_fast_p99": _range(g["p99_speedup"] for g in gains),
        "home_egress": _range(g["egress"] for g in gains),
        "get_ms_plain": _range(g["plain_mean_ms"] for g in gains),
        "get_ms_kvcast": _range(g["kvcast_mean_ms"] for g in gains),
        "times_as_fast_with_replicas": _range(spreads),
        "reads_from_switch_memory": round(share, 4),
        "gathers": any(g["gathers"] for g in gains),
        "unsettled": max(g["unsettled"] for g in gains),
        "time_compression": _range(compressions),
        "runs": len(gains),
    }
    report["recommendation"], report["why"] = recommend(report, scenario.workload, lines is None)
    return report


def recommend(
    report: Numbers, workload: str, generated: bool = True
) -> tuple[list[str], list[str]]:
    """What to switch on, and why, of a plan's ranges."""
    chosen, why = [], []
    low, high = report["times_as_fast"]
    egress = report["home_egress"][1]
    if low >= WORTH_IT or (egress <= BYTES_WORTH_IT and low >= NO_SLOWER):
        known = generated and workload in KNOWN_GROUPS
        chosen.append("reader groups" if known else "coalescing only")
        why.append(
            f"joined reads make gets {low:.2f} to {high:.2f} times as fast, and homes send at "
            f"most {egress:.2f} of the bytes"
            + (", and who reads together is known beforehand" if known else "")
        )
    else:
        why.append(
            f"joined reads make gets {low:.2f} to {high:.2f} times as fast, and homes send at most "
            f"{egress:.2f} of the bytes: worth it from {WORTH_IT:.2f} on at the least, or where "
            f"gets are no slower and homes send at most {BYTES_WORTH_IT:g}"
        )
    share = report["reads_from_switch_memory"]
    if share >= RESIDENCY_SHARE:
        chosen = ["coalescing and residency" if c == "coalescing only" else c for c in chosen]
        if "coalescing and residency" not in chosen:
            chosen.append("residency")
        why.append(f"switch memory would answer {share:.1%} of reads")
    else:
        why.append(f"switch memory would answer {share:.1%} of reads: leave it out")
    replicas = report["times_as_fast_with_replicas"]
    if replicas[0] >= WORTH_IT and replicas[0] > high:
        chosen.insert(0, "replicas")
        why.insert(
            0,
            f"{REPLICAS} homes of every block make gets {replicas[0]:.2f} to {replicas[1]:.2f} "
            "times as fast, more than joining does",
        )
    return chosen or ["off"], why


def _range(values: Any) -> tuple[float, float]:
    found = [float(value) for value in values]
    return round(min(found), 4), round(max(found), 4)


def _with_replicas(demand: Demand, scenario: Scenario) -> float:
    options = FlowOptions(way="plain", gathers=False, max_pieces=4, max_rounds=300)
    fabric = scenario.fabric()
    plain = simulate(demand, fabric, options)
    choice = mix(demand.read_node * 1_000_003 + demand.read_block) % REPLICAS
    homes = replica_homes(demand)[choice, np.arange(len(choice))]
    spread = replace(demand, read_home=homes)
    spread = spread.reads_where(spread.read_home != spread.read_node)
    outcome = simulate(spread, fabric, options)
    waited = float(outcome.fetch_ns.sum()) / len(plain.fetch_ns)
    return float(plain.fetch_ns.mean()) / max(1.0, waited)


def _resident_share(scenario: Scenario, slots: int, lines: Sequence[TraceLine] | None) -> float:
    """Of the reads that do not share an answer anyway, at the pace that they come at."""
    if CELLS.segments_of(min(scenario.block_bytes, 64 << 20)) > slots:
        return 0.0
    requests = requests_of(scenario) if lines is None else trace_requests_of(lines, scenario)[0]
    demand = demand_of(requests, scenario.hosts, scenario.block_bytes)
    stream = residency.Stream.of(demand)
    alone = stream.without_joins(JOIN_NS)
    hits = residency.value(alone, slots)
    return float(hits.sum()) / max(1, len(stream.at))
