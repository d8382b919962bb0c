"""The questions that the flow simulator answers, as plain data.

Owns: which scenarios are run for which question, and what is kept of them. Must not know: real
pools, pictures, or text. Every function is deterministic: the same arguments, the same numbers.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kvcast.protocol.messages.wire import CELLS, SEGMENT_BYTES
from kvcast.protocol.requester import RequesterConfig
from kvcast.simulation.flows import packets, residency
from kvcast.simulation.flows.demand import Demand, TraceCopies, demand_of
from kvcast.simulation.flows.engine import FlowOptions, simulate
from kvcast.simulation.flows.networks import TOPOLOGIES, leaf_spine, star
from kvcast.simulation.flows.processors import work
from kvcast.simulation.flows.scenarios import (
    DEFAULT_MODEL,
    LINK_GBPS,
    MODELS,
    WORKLOADS,
    Scenario,
    demand_for,
    gain,
    groups_demand,
    requests_of,
    serve_all,
    trace_requests_of,
)
from kvcast.topologies.pool import DATA_FRAME_BYTES
from kvcast.workloads import generators
from kvcast.workloads.generators import Dispatcher, Request, WorkloadOptions
from kvcast.workloads.traces import TraceLine

Numbers = dict[str, Any]
EMULATED_BITS_PER_S = 5e6
"""Of the links in the calibration: `kvcast demo`'s."""
FINEST = FlowOptions()
FOR_MILLIONS = FlowOptions(max_pieces=1, max_rounds=3, coarse=True)
"""How an hour of ten thousand hosts is simulated; calibrated by itself."""
CALIBRATION_NODES = 8
CALIBRATION_BLOCK_BYTES = 65536


def patient(nodes: int, bits_per_s: float) -> RequesterConfig:
    """What agents on emulated links are told (`kvcast.topologies.pool.patience_flags`): that
    silence of a queue's length is no loss."""
    queue_s = nodes * 64 * DATA_FRAME_BYTES * 8 / bits_per_s
    return RequesterConfig(
        rto_initial_s=max(0.5, 0.06 * nodes) + queue_s,
        rto_min_s=max(0.25, 0.03 * nodes) + queue_s,
        quiet_s=max(0.15, 0.015 * nodes) + queue_s,
    )


# --- calibration --------------------------------------------------------------------------------


def calibration_requests(workload: str, reads: int = 160, seed: int = 1) -> list[Request]:
    """A workload for eight nodes behind emulated links, of which its answers fill 0.3."""
    options = WorkloadOptions(nodes=CALIBRATION_NODES, seed=seed, rate_per_s=1.0, prefix_blocks=1)
    requests, _ = generators.take(
        generators.generate(workload, options),
        remote_reads=reads,
        written=1 << 30,
        requests_at_most=1 << 20,
    )
    return _at_load(requests, CALIBRATION_BLOCK_BYTES, EMULATED_BITS_PER_S)


def _at_load(
    requests: Sequence[Request], block_bytes: int, bits_per_s: float, load: float = 0.3
) -> list[Request]:
    """The same requests, at such a pace that a plain pool of CALIBRATION_NODES fills so much of its
    links."""
    demand = demand_of(requests, CALIBRATION_NODES, block_bytes)
    link_s = float(demand.read_bytes.sum()) * 8 / bits_per_s / CALIBRATION_NODES
    stretch = link_s / load / max(1e-9, requests[-1].time_s)
    return [replace(r, time_s=r.time_s * stretch) for r in requests]


def lone_gets(count: int) -> list[Request]:
    """Blocks that one node writes and another reads while nothing else goes on, so that a get's
    time is its links' and its processors'."""
    requests = []
    for turn in range(count):
        key, node = generators.chain(b"", ("alone", turn)), turn % CALIBRATION_NODES
        for step, (reader, writes) in enumerate(((node, True), (node + 3, False))):
            requests.append(
                Request(
                    number=2 * turn + step,
                    time_s=turn * 0.6 + step * 0.3,
                    node=reader % CALIBRATION_NODES,
                    keys=(key,),
                    kind="alone",
                    writes=writes,
                )
            )
    return requests


# --- what kvcast costs where it brings nothing ---------------------------------------------------

BYSTANDER_BITS_PER_S = 10e6
BYSTANDER_BYTES = 80 << 20
"""Of reads, in a stream."""
BYSTANDER_REQUESTS_PER_S = 50.0


def bystanders(
    traces: Mapping[str, Sequence[TraceLine]],
) -> dict[str, tuple[list[Request], int]]:
    """Independent chats, and traces, for a pool of CALIBRATION_NODES: requests and the size of
    their blocks. A trace's gets are of many blocks, so these are small, that there are enough
    gets. What nobody reads is not written, and requests come no faster than the processors of a
    small machine serve them, so that links are what is waited for."""
    from kvcast.workloads.traces import trace_requests

    options = WorkloadOptions(nodes=CALIBRATION_NODES, rate_per_s=1.0, prefix_blocks=1)
    streams = {"chat": (generators.generate("chat", options), CALIBRATION_BLOCK_BYTES)}
    streams |= {name: (trace_requests(lines, options), 8192) for name, lines in traces.items()}
    found = {}
    for name, (stream, block_bytes) in streams.items():
        requests, _ = generators.take(
            stream,
            remote_reads=BYSTANDER_BYTES // block_bytes,
            written=1 << 40,
            requests_at_most=1 << 12,
        )
        requests = _what_is_read(requests)
        if not requests:  # a trace whose prompts have nothing in common
            continue
        requests = _at_load(requests, block_bytes, BYSTANDER_BITS_PER_S)
        slower = max(1.0, len(requests) / BYSTANDER_REQUESTS_PER_S / requests[-1].time_s)
        found[name] = [replace(r, time_s=r.time_s * slower) for r in requests], block_bytes
    return found


def _what_is_read(requests: Sequence[Request]) -> list[Request]:
    """The same without the ends of prompts that no other request has, which nobody reads."""
    uses = Counter(key for request in requests for key in request.keys)
    kept: dict[int, Request] = {}
    for request in requests:
        shared = sum(1 for _ in itertools.takewhile(lambda key: uses[key] > 1, request.keys))
        if shared:
            after = request.after if request.after in kept else None
            kept[request.number] = replace(request, keys=request.keys[:shared], after=after)
    return list(kept.values())


def flows_of_calibration(
    demand: Demand,
    *,
    plain: bool,
    bits_per_s: float,
    options: FlowOptions = FINEST,
    home_ns: int = 0,
) -> Numbers:
    """What the flow simulator says of a demand on a star, at its finest unless `options` say
    otherwise."""
    options = replace(
        options,
        way="plain" if plain else "coalesce",
        gathers=not plain,
        link_delay_ns=packets.link_delay_ns(bits_per_s),
        home_ns=home_ns,
    )
    outcome = simulate(demand, star(demand.nodes, bits_per_s), options)
    return {
        "egress": outcome.home_payload_bytes / max(1, demand.distinct_bytes),
        "fetch_ms": float(outcome.fetch_ms.mean()),
        "rounds": outcome.rounds,
    }


def compare(name: str, against: str, flows: Numbers, egress: float, fetch_ms: float) -> Numbers:
    """One row of the calibration; errors are relative to the packet level."""
    return {
        "workload": name,
        "against": against,
        "flow_egress": round(flows["egress"], 4),
        "packet_egress": round(egress, 4),
        "egress_error": round(flows["egress"] / egress - 1, 4) if egress else 0.0,
        "flow_fetch_ms": round(flows["fetch_ms"], 5),
        "packet_fetch_ms": round(fetch_ms, 5),
        "fetch_error": round(flows["fetch_ms"] / fetch_ms - 1, 4) if fetch_ms else 0.0,
    }


def calibrate(reads: int = 120) -> list[Numbers]:
    """Every workload, and incasts on fast links, beside the packet-level pool in virtual time."""
    rows = []
    for workload in WORKLOADS:
        requests = calibration_requests(workload, reads)
        demand = demand_of(requests, CALIBRATION_NODES, CALIBRATION_BLOCK_BYTES)
        rows += _beside_packets(workload, demand, EMULATED_BITS_PER_S)
    for readers in (4, 16, 31):
        demand = incast(readers, 2 << 20, spread_ns=2000)
        rows += _beside_packets(f"incast of {readers}, 100 Gb/s", demand, 100e9)
    for blocks in (1, 8):
        demand = _sparse_chats(blocks, reads // 2)
        name = f"chats on idle links, prefixes of {blocks}"
        rows += _beside_packets(name, demand, 100e9, FOR_MILLIONS)
    return rows


IDLE = 0.01
"""How full links are in the calibration of FOR_MILLIONS."""


def _sparse_chats(prefix_blocks: int, reads: int) -> Demand:
    options = WorkloadOptions(nodes=CALIBRATION_NODES, rate_per_s=1.0, prefix_blocks=prefix_blocks)
    requests, _ = generators.take(
        generators.generate("chat", options),
        remote_reads=reads,
        written=1 << 40,
        requests_at_most=1 << 20,
    )
    requests = _at_load(requests, CALIBRATION_BLOCK_BYTES, 100e9, IDLE)
    return demand_of(requests, CALIBRATION_NODES, CALIBRATION_BLOCK_BYTES)


def _beside_packets(
    name: str, demand: Demand, bits_per_s: float, options: FlowOptions = FINEST
) -> list[Numbers]:
    rows = []
    slow = bits_per_s < 1e9
    config = patient(demand.nodes, bits_per_s) if slow else RequesterConfig()
    for plain in (True, False):
        real = packets.replay(demand, bits_per_s, plain=plain, requester=config)
        if real.misses or real.wrong_bytes:
            raise RuntimeError(f"{name}: the packet-level pool had misses or wrong bytes")
        flows = flows_of_calibration(demand, plain=plain, bits_per_s=bits_per_s, options=options)
        row = compare(
            name,
            "packets, virtual time",
            flows,
            real.home_payload_bytes / max(1, demand.distinct_bytes),
            float(real.fetch_ns.mean()) / 1e6,
        )
        rows.append(row | {"switch": "plain" if plain else "kvcast"})
    return rows


def incast(readers: int, block_bytes: int, *, spread_ns: int, seed: int = 1) -> Demand:
    """One block at one home, and so many readers who start within that time."""
    rng = np.random.default_rng(seed)
    zeros = np.zeros(readers, np.int64)
    return Demand(
        readers + 1,
        np.sort(rng.integers(0, spread_ns + 1, readers)),
        zeros - 1,
        zeros,
        zeros,
        np.arange(readers),
        1 + np.arange(readers),
        zeros,
        zeros,
        np.array([block_bytes], np.int64),
    )


# --- scale --------------------------------------------------------------------------------------


def chat_lines(seconds: float = 3600.0, nodes: int = 16, seed: int = 1) -> list[TraceLine]:
    """A trace like `chat` for 16 nodes, in Mooncake's form, for when none is given."""
    options = WorkloadOptions(nodes=nodes, seed=seed, rate_per_s=3.2, prefix_blocks=3)
    ids: dict[bytes, int] = {}
    lines = []
    for request in generators.generate("chat", options):
        if request.time_s > seconds:
            break
        names = [ids.setdefault(key, len(ids)) for key in request.keys]
        lines.append(TraceLine(request.time_s * 1000, 512 * len(names), 0, names))
    return lines


_SLICE_READS = 1e6
"""What a run takes in memory grows with its reads."""


def scale(
    lines: Sequence[TraceLine],
    *,
    hosts: int = 10_240,
    seconds: float = 3600.0,
    link_gbps: float = 100.0,
    block_bytes: int = 512 * 35123,
    nodes_of_trace: int = 16,
    slice_s: float = 20.0,
    budget_s: float = 300.0,
    seed: int = 1,
) -> Numbers:
    """An hour of a trace on ten thousand hosts behind leaves and spines, each with as much to do
    as one of `nodes_of_trace` hosts would have with the trace alone.

    Every slice of simulated time, `slice_s` or what has a million reads, is a run of its own, which
    begins with empty queues; a fetch takes milliseconds. It ends early, though not before the
    first, if `budget_s` is spent: `simulated_s` says how much was simulated, and `extrapolated`
    whether what an hour takes is reckoned from less than that.
    """
    fabric = leaf_spine(hosts, link_gbps * 1e9)
    options = FOR_MILLIONS
    copies = TraceCopies(
        lines, hosts, block_bytes, copies=max(1, hosts // nodes_of_trace), seed=seed
    )
    slice_s = min(slice_s, _SLICE_READS / max(1.0, copies.reads_per_s))
    totals = dict.fromkeys(("reads", "requests", "home", "passes", "joined", "collisions"), 0)
    processors = Counter[str]()
    busiest_host = 0.0
    waits: list[Any] = []
    peak, done_s, unsettled = 0, 0.0, 0.0
    link_bytes = np.zeros(len(fabric.bits_per_s), np.int64)
    began, used = time.monotonic(), time.process_time()
    while done_s < seconds and (not waits or time.monotonic() - began < budget_s):
        demand = copies.between(done_s, done_s + slice_s)
        outcome = simulate(demand, fabric, options)
        waits.append(outcome.fetch_ms)
        totals["home"] += outcome.home_payload_bytes
        totals["reads"] += len(demand.read_block)
        totals["requests"] += len(demand.request_at)
        totals["passes"] += outcome.switch_passes
        totals["joined"] += outcome.joined_pieces
        totals["collisions"] += outcome.collisions
        did = work(demand, outcome, slice_s)
        processors.update(
            control_messages=did.control_messages,
            homes_ms=round(did.homes_s * 1e3),
            readers_ms=round(did.readers_s * 1e3),
            controller_ms=round(did.controller_s * 1e3),
        )
        busiest_host = max(busiest_host, did.busiest_host)
        peak = max(peak, outcome.pending_peak)
        unsettled = max(unsettled, outcome.unsettled)
        link_bytes += outcome.link_bytes
        done_s += slice_s
    took, used = time.monotonic() - began, time.process_time() - used
    demand = copies.between(0.0, slice_s)
    one = simulate(demand, fabric, replace(options, way="plain"))
    kvcast = np.concatenate(waits)
    return {
        "hosts": hosts,
        "simulated_s": done_s,
        "extrapolated": done_s < 3600,
        "took_s": round(took, 1),
        "seconds_per_hour": round(took * 3600 / max(1e-9, done_s), 1),
        "processor_seconds_per_hour": round(used * 3600 / max(1e-9, done_s), 1),
        **totals,
        **processors,
        "busiest_host": round(busiest_host, 4),
        "pending_peak": peak,
        "unsettled": round(unsettled, 5),
        "plain_mean_ms": round(float(one.fetch_ms.mean()), 4),
        "kvcast_first_slice_mean_ms": round(float(waits[0].mean()), 4),
        "kvcast_mean_ms": round(float(kvcast.mean()), 4),
        "busiest_link": round(float((link_bytes * 8 / fabric.bits_per_s).max() / done_s), 4),
    }


# --- what belongs in the switch -------------------------------------------------------------------

JOIN_NS = 100_000_000
"""Reads of one block within so much of each other share an answer, with or without memory."""


def stream_of(requests: Sequence[Request], nodes: int, block_bytes: int) -> residency.Stream:
    return residency.Stream.of(demand_of(requests, nodes, block_bytes)).without_joins(JOIN_NS)


def memory_streams(
    traces: Mapping[str, Sequence[TraceLine]], *, nodes: int = 16, reads: int = 2000, seed: int = 1
) -> dict[str, residency.Stream]:
    """The reads of every workload and trace, blocks of one segment; and those of chats and traces
    once more, *sizes mixed*: as if models of several sizes shared the switch."""
    from kvcast.workloads.traces import trace_requests

    options = WorkloadOptions(nodes=nodes, seed=seed, rate_per_s=4.0, prefix_blocks=8)
    streams: dict[str, residency.Stream] = {}
    for name in WORKLOADS:
        requests, _ = generators.take(
            generators.generate(name, options),
            remote_reads=reads,
            written=1 << 40,
            requests_at_most=1 << 20,
        )
        streams[name] = stream_of(requests, nodes, SEGMENT_BYTES)
    for name, lines in traces.items():
        requests, _ = generators.take(
            trace_requests(lines, options),
            remote_reads=2 * reads,
            written=1 << 40,
            requests_at_most=1 << 20,
        )
        streams[name] = stream_of(requests, nodes, SEGMENT_BYTES)
    rng = np.random.default_rng(seed)
    for name in ("chat", *traces):
        sizes = SEGMENT_BYTES << rng.integers(0, 4, len(streams[name].block_bytes))
        streams[f"{name}, sizes mixed"] = replace(streams[name], block_bytes=sizes)
    return streams


def memory(traces: Mapping[str, Sequence[TraceLine]]) -> list[Numbers]:
    """Every policy on every workload and trace, three sizes of memory."""
    rows = []
    for name, stream in memory_streams(traces).items():
        for slots in (64, 128, 256):
            hits = residency.compared(stream, slots)
            total = int(stream.bytes.sum())
            compared = residency.others()
            best = max((hits[name] for name in compared), default=None)
            as_filled = hits["best, as a switch fills"] if compared else None
            as_late = hits["best, told as late"] if compared else None
            ours = max(hits["value"], hits["value, told at once"])
            rows.append(
                {
                    "stream": name,
                    "slots": slots,
                    "reads": len(stream.at),
                    "segments": total // SEGMENT_BYTES,
                    "optimum_is_exact": len(np.unique(stream.bytes)) <= 1,
                    "hit_share": {k: round(v / max(1, total), 4) for k, v in hits.items()},
                    "optimum_segments": {
                        what: hit_bytes // SEGMENT_BYTES
                        for what, hit_bytes in residency.parts_of_optimum(hits).items()
                    },
                    "value_over_optimum": _over(hits["value"], hits["optimum"]),
                    "best_online_over_optimum": _over(max(ours, best or 0), hits["optimum"]),
                    "value_over_best_online": _over(hits["value"], best),
                    "value_over_optimum_after_fill": _over(
                        hits["value"], hits["optimum, after the fill"]
                    ),
                    "value_over_reachable_optimum": _over(hits["value"], hits["reachable optimum"]),
                    "value_over_best_as_a_switch_fills": _over(hits["value"], as_filled),
                    "value_over_best_told_as_late": _over(hits["value"], as_late),
                }
            )
    return rows


def _over(bytes_: int, others: int | None) -> float | None:
    """As a share; of nothing, all; of what was not compared, nobody knows."""
    if others is None:
        return None
    return round(bytes_ / others, 4) if others else 1.0


MLA_LAYERS = 61
"""Of DeepSeek-V3, whose KV bytes a token the rows below are for."""


def block_tokens(lines: Sequence[TraceLine]) -> int:
    """Tokens of a block, as a trace has them."""
    ratios = [line.input_length / len(line.hash_ids) for line in lines if line.hash_ids]
    return max(1, round(float(np.median(ratios))))


def layers(
    traces: Mapping[str, Sequence[TraceLine]], *, nodes: int = 16, reads: int = 1500
) -> list[Numbers]:
    """The switch's memory at real sizes: filled with whole blocks, with compressed ones, or with
    the first layers of many; what share of reads it answers, wholly or to begin with."""
    from kvcast.workloads.traces import trace_requests

    rows = []
    for trace, lines in traces.items():
        tokens = block_tokens(lines)
        whole = MODELS[DEFAULT_MODEL] * tokens
        requests, _ = generators.take(
            trace_requests(lines, WorkloadOptions(nodes=nodes)),
            remote_reads=reads,
            written=1 << 40,
            requests_at_most=1 << 20,
        )
        # As many layers as go into one slot, or one layer, where that takes more.
        few = max(1, MLA_LAYERS * SEGMENT_BYTES // whole)
        first = f"first {few} of {MLA_LAYERS} layers"
        for what, size, share in (
            ("whole blocks", whole, 1.0),
            ("compressed to a half", whole // 2, 1.0),
            ("compressed to a quarter", whole // 4, 1.0),
            (first, whole * few // MLA_LAYERS, few / MLA_LAYERS),
        ):
            stream = stream_of(requests, nodes, size)
            for slots in (64, 128):
                hits = residency.value(stream, slots)
                answered = float(hits.mean()) if len(hits) else 0.0
                rows.append(
                    {
                        "trace": trace,
                        "block_tokens": tokens,
                        "what": what,
                        "bytes": size,
                        "slots": slots,
                        "blocks_that_fit": slots // CELLS.segments_of(size),
                        "reads_answered": round(answered, 4),
                        "bytes_saved": round(answered * share, 4),
                    }
                )
    return rows


# --- alternatives -------------------------------------------------------------------------------


def alternatives(
    traces: Mapping[str, Sequence[TraceLine]], scenario: Scenario | None = None
) -> list[Numbers]:
    """Every way to serve every workload and trace."""
    scenario = scenario or Scenario(reads=800)
    rows = []
    for name in (*WORKLOADS, *traces):
        compression = 1.0
        if name in traces:
            mine = replace(scenario, workload="chat")
            requests, compression = trace_requests_of(traces[name], mine)
            near = _near(requests, scenario.hosts)
        else:
            mine = replace(scenario, workload=name)
            requests = requests_of(mine)
            near = _near(requests, scenario.hosts) if name == "chat" else []
        ways, demand = serve_all(mine, requests, near or None)
        for way, served in ways.items():
            rows.append(
                {
                    "workload": name,
                    "way": way,
                    "note": served.note,
                    "time_compression": round(compression, 2),
                    "unsettled": round(served.outcome.unsettled, 4) if served.outcome else 0.0,
                    **served.summary(demand.distinct_bytes),
                }
            )
    return rows


def _near(requests: Sequence[Request], nodes: int) -> list[Request]:
    """The same prompts, each sent to the node that served its prefix before."""
    dispatcher = Dispatcher("affinity", nodes)
    return [replace(request, node=dispatcher.node(request.keys)) for request in requests]


# --- the frontier -------------------------------------------------------------------------------


def _groups(**changed: Any) -> Demand:
    base: dict[str, Any] = {
        "hosts": 64,
        "group": 8,
        "spread_ns": 10_000.0,
        "block_bytes": 2 << 20,
        "blocks": 1,
        "bits_per_s": 100e9,
        "load": 0.3,
        "events": 30,
    }
    return groups_demand(**(base | changed))


def _gain(topology: str = "star", options: FlowOptions | None = None, **changed: Any) -> Numbers:
    demand = _groups(**changed)
    fabric = TOPOLOGIES[topology](demand.nodes, float(changed.get("bits_per_s", 100e9)))
    return gain(demand, fabric, options)


def frontier() -> Numbers:
    """Where joining pays, by group, spread, block, links, cluster, and share of joint reads."""
    spreads = (0.0, 1e4, 1e5, 3e5, 1e6, 1e7)
    groups = (2, 4, 8, 16, 32)
    sizes = (64 << 10, 512 << 10, 2 << 20, 16 << 20)
    return {
        "spread_by_group": [
            {"group": g, "spread_us": s / 1e3, **_gain(group=g, spread_ns=s)}
            for g in groups
            for s in spreads
        ],
        "block_by_link": [
            {"gbps": r, "block_bytes": b, "gather_ms": m}
            | _gain(bits_per_s=r * 1e9, block_bytes=b, spread_ns=1e5, gather_ns=m * 1_000_000)
            for r in LINK_GBPS
            for b in sizes
            for m in (0, 1)
        ],
        "cluster": [
            {"hosts": n, "topology": t, "group": g, **_gain(t, hosts=n, group=g)}
            for t, n in (
                ("star", 8),
                ("star", 32),
                ("leaf-spine", 128),
                ("fat-tree", 128),
                ("rail-optimised", 128),
                ("leaf-spine", 512),
                ("leaf-spine", 1024),
            )
            for g in (4, 8, 32)
            if g < n
        ],
        "correlation": [
            {"correlated": c, "load": load, **_gain(correlated=c, load=load)}
            for c in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
            for load in (0.1, 0.3, 0.6)
        ],
    }


def sensitivity() -> list[Numbers]:
    """How far the gain of the middle case moves with each thing that we assumed."""
    base = FlowOptions(max_pieces=8, max_rounds=200)
    middle = _gain(options=base)
    cases: list[tuple[str, Callable[[], Numbers]]] = [
        ("cables of 5 µs", lambda: _gain(options=replace(base, link_delay_ns=5000))),
        ("homes take 20 µs to answer", lambda: _gain(options=replace(base, home_ns=20_000))),
        ("readers take 20 µs a segment", lambda: _gain(options=replace(base, reader_ns=20_000))),
        ("window of 2 segments", lambda: _gain(options=replace(base, window=2))),
        ("window of 32 segments", lambda: _gain(options=replace(base, window=32))),
        ("chunks of 8 KiB", lambda: _gain(options=replace(base, chunk_bytes=8192))),
        ("links 10 % full", lambda: _gain(options=base, load=0.1)),
        ("links 60 % full", lambda: _gain(options=base, load=0.6)),
        ("gets of 4 blocks", lambda: _gain(options=base, blocks=4)),
        ("gets of 16 blocks", lambda: _gain(options=base, blocks=16, events=20)),
        ("leaves and spines", lambda: _gain("leaf-spine", options=base)),
        (
            "leaves and plain spines",
            lambda: _gain("leaf-spine", options=replace(base, copies_part_at_edges=True)),
        ),
        ("another seed", lambda: _gain(options=base, seed=2)),
        ("spread of 100 µs", lambda: _gain(options=base, spread_ns=1e5)),
        ("spread of 1 ms", lambda: _gain(options=base, spread_ns=1e6)),
    ]
    rows = [{"case": "as in the text", **middle}]
    rows += [{"case": name, **case()} for name, case in cases]
    return rows


def real_sizes(reads: int = 600) -> list[Numbers]:
    """Every workload at real sizes on links of several rates: joined beside plain."""
    rows = []
    for workload in WORKLOADS:
        for gbps in (25, 100, 400, 800):
            scenario = Scenario(workload=workload, link_gbps=gbps, reads=reads)
            row = gain(demand_for(scenario), scenario.fabric())
            rows.append({"workload": workload, "gbps": gbps, **row})
    return rows
