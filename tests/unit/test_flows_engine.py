"""The flow simulator beside closed forms, an event-by-event queue, and its own accounts.

Oracles: arithmetic of links; progressive filling for max-min shares; a plain loop for queues. They
cannot see whether the model is that of the real pool: test_flows_packets.py does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.protocol.messages.ethernet import FRAME_OVERHEAD_BYTES
from kvcast.protocol.messages.wire import HEADER_BYTES
from kvcast.simulation.flows.demand import Demand, TraceCopies, demand_of
from kvcast.simulation.flows.engine import READ_BYTES, FlowOptions, Way, serve, simulate
from kvcast.simulation.flows.networks import (
    NONE,
    TOPOLOGIES,
    NetworkError,
    fat_tree,
    leaf_spine,
    star,
)
from kvcast.simulation.flows.questions import chat_lines, incast
from kvcast.simulation.flows.scenarios import Scenario, demand_for, groups_demand
from kvcast.workloads import generators
from kvcast.workloads.generators import WorkloadOptions
from kvcast.workloads.traces import TraceLine

GBPS = 100e9
BLOCK = 2 << 20
OVERHEAD = FRAME_OVERHEAD_BYTES + HEADER_BYTES


def flows(
    pairs: list[tuple[int, int]], nodes: int, size: int, at: list[int] | None = None
) -> Demand:
    """One request for each (home, reader), each of a block of its own."""
    count = len(pairs)
    number = np.arange(count)
    return Demand(
        nodes,
        np.array(at or [0] * count, np.int64),
        np.full(count, -1, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        number,
        np.array([reader for _, reader in pairs]),
        number,
        np.array([home for home, _ in pairs]),
        np.full(count, size, np.int64),
    )


def wire_ns(size: int, bits_per_s: float, chunk: int = 1024) -> float:
    return (size + -(-size // chunk) * OVERHEAD) * 8e9 / bits_per_s


def test_one_reader_takes_what_its_link_and_one_round_trip_take() -> None:
    options = FlowOptions(way="plain")
    outcome = simulate(incast(1, BLOCK, spread_ns=0), star(2, GBPS), options)
    there = READ_BYTES * 8e9 / GBPS + 2 * options.link_delay_ns + options.card_delay_ns
    back = 2 * options.link_delay_ns + options.card_delay_ns + wire_ns(1024, GBPS)
    assert outcome.fetch_ns[0] == pytest.approx(there + wire_ns(BLOCK, GBPS) + back, rel=1e-3)


@pytest.mark.parametrize("readers", [2, 8, 31])
def test_plain_incast_takes_as_long_as_all_copies_and_joined_as_one(readers: int) -> None:
    demand = incast(readers, BLOCK, spread_ns=0)
    network = star(readers + 1, GBPS)
    plain = simulate(demand, network, FlowOptions(way="plain"))
    joined = simulate(demand, network, FlowOptions())
    assert plain.fetch_ns.max() == pytest.approx(readers * wire_ns(BLOCK, GBPS), rel=0.02)
    assert joined.fetch_ns.max() == pytest.approx(wire_ns(BLOCK, GBPS), rel=0.02)
    assert plain.home_payload_bytes == readers * BLOCK
    assert joined.home_payload_bytes == BLOCK


def max_min(pairs: list[tuple[int, int]], nodes: int) -> list[float]:
    """Progressive filling: each flow's share of a link of 1, up at its home, down at its reader."""
    links = [[("up", h), ("down", r)] for h, r in pairs]
    room = {link: 1.0 for path in links for link in path}
    share = [0.0] * len(pairs)
    growing = set(range(len(pairs)))
    while growing:
        users = {link: [f for f in growing if link in links[f]] for link in room}
        step, tight = min((room[k] / len(u), k) for k, u in users.items() if u)
        for link, using in users.items():
            room[link] -= step * len(using)
        for flow in growing:
            share[flow] += step
        growing -= set(users[tight])
        del room[tight]
    return share


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 1), (0, 2)],
        [(0, 2), (0, 3), (1, 3)],
        [(0, 4), (0, 5), (0, 6), (1, 6)],
        [(0, 4), (1, 4), (2, 4), (2, 5)],
    ],
)
def test_long_flows_share_links_max_min_fairly(pairs: list[tuple[int, int]]) -> None:
    """Each takes its size over its share: in these sets, no share grows when another ends. Windows
    and frames make it a few per cent less exact than fluids would be."""
    size, nodes = 8 << 20, 8
    outcome = simulate(flows(pairs, nodes, size), star(nodes, GBPS), FlowOptions(way="plain"))
    expected = [wire_ns(size, GBPS) / share for share in max_min(pairs, nodes)]
    assert outcome.fetch_ns.tolist() == pytest.approx(expected, rel=0.08)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1000), st.integers(1, 50)),
        min_size=1,
        max_size=60,
    )
)
def test_queues_are_what_a_plain_loop_says(items: list[tuple[int, int, int]]) -> None:
    link, ready, need = (np.array(column, np.int64) for column in zip(*items, strict=True))
    _, end = serve(link, ready, need)
    free: dict[int, int] = {}
    for index in sorted(range(len(items)), key=lambda i: (link[i], ready[i], i)):
        starts = max(int(ready[index]), free.get(int(link[index]), 0))
        free[int(link[index])] = starts + int(need[index])
        assert end[index] == free[int(link[index])]


@pytest.mark.parametrize("topology", sorted(TOPOLOGIES))
@pytest.mark.parametrize("way", ["plain", "coalesce", "peers"])
def test_every_byte_that_leaves_arrives(topology: str, way: Way) -> None:
    demand = groups_demand(
        hosts=48,
        group=6,
        spread_ns=2e5,
        block_bytes=300_000,
        blocks=2,
        bits_per_s=GBPS,
        load=0.4,
        events=20,
    )
    network = TOPOLOGIES[topology](48, GBPS)
    options = replace(FlowOptions(), way=way)
    outcome = simulate(demand, network, options)
    size = int(demand.read_bytes.sum())
    frames = int((-(-demand.read_bytes // options.chunk_bytes)).sum())
    reads_down = np.bincount(
        network.down[demand.read_home],
        -(-demand.read_bytes // options.segment_bytes) * READ_BYTES,
        len(outcome.link_bytes),
    ).sum()
    down = outcome.link_bytes[network.down].sum()
    assert size + frames * OVERHEAD <= down <= size + frames * OVERHEAD + reads_down
    sent = outcome.home_payload_bytes + outcome.peer_payload_bytes
    if way == "coalesce":
        assert demand.distinct_bytes <= sent < size
    else:
        assert sent == size
    assert (outcome.fetch_ns > 0).all()
    assert outcome.unsettled == 0


@pytest.mark.parametrize("fan_out", [1, 2, 3])
def test_peers_that_take_turns_in_trees_settle(fan_out: int) -> None:
    """Who hands a block on is decided by who asked for any of it first, or else by the future."""
    demand = demand_for(Scenario(workload="model-load", hosts=24, reads=300))
    options = FlowOptions(way="peers", fan_out=fan_out, max_pieces=4, max_rounds=400)
    outcome = simulate(demand, star(24, GBPS), options)
    assert outcome.unsettled == 0
    assert outcome.rounds < options.max_rounds


def test_nobody_waits_longer_because_reads_join_on_an_idle_network() -> None:
    demand = incast(6, BLOCK, spread_ns=50_000)
    network = leaf_spine(7, GBPS, hosts_per_leaf=4)
    plain = simulate(demand, network, FlowOptions(way="plain"))
    joined = simulate(demand, network, FlowOptions())
    assert joined.fetch_ns.mean() < plain.fetch_ns.mean()
    assert joined.home_payload_bytes < plain.home_payload_bytes


@pytest.mark.parametrize("pieces", [1, 4, 1 << 30])
def test_who_joins_midway_gets_nothing_that_passed_before_it_asked(pieces: int) -> None:
    demand = incast(8, BLOCK, spread_ns=round(wire_ns(BLOCK, GBPS)))
    outcome = simulate(demand, star(9, GBPS), FlowOptions(max_pieces=pieces))
    assert outcome.joined_pieces
    assert outcome.fetch_ns.min() > wire_ns(BLOCK, GBPS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_readers_follow_each_other_through_many_blocks_all_times_settle(seed: int) -> None:
    scenario = Scenario(workload="storm", hosts=64, reads=200, seed=seed)
    options = FlowOptions(max_pieces=4, max_rounds=300)
    for gathers in (False, True):
        run = simulate(demand_for(scenario), scenario.fabric(), replace(options, gathers=gathers))
        assert run.unsettled == 0


def test_where_spines_do_not_copy_each_leaf_costs_a_copy_on_the_way_up() -> None:
    demand = incast(12, 64 << 10, spread_ns=0)
    network = leaf_spine(13, GBPS, hosts_per_leaf=4, spines=1)
    everywhere = simulate(demand, network, FlowOptions())
    at_edges = simulate(demand, network, FlowOptions(copies_part_at_edges=True))
    rise = network.ends.index(("e0", "s0"))
    # Readers are on three leaves besides the home's own.
    assert at_edges.link_bytes[rise] == 3 * everywhere.link_bytes[rise]
    assert at_edges.home_payload_bytes == everywhere.home_payload_bytes == 64 << 10


def test_the_same_seed_gives_the_same_numbers_and_another_others() -> None:
    def run(seed: int) -> list[int]:
        requests, _ = generators.take(
            generators.generate("rollout", WorkloadOptions(nodes=8, seed=seed)),
            remote_reads=80,
            written=1000,
            requests_at_most=1000,
        )
        demand = demand_of(requests, 8, 65536)
        return simulate(demand, star(8, 1e9)).fetch_ns.tolist()  # type: ignore[no-any-return]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_request_waits_for_the_one_before_it_even_if_that_reads_nothing() -> None:
    demand = flows([(0, 1), (0, 2)], 3, 65536)
    demand = replace(
        demand,
        request_at=np.array([0, 5, 7]),
        request_after=np.array([-1, 0, 1]),
        request_jitter=np.array([0, 100, 0]),
        request_gather=np.zeros(3, np.int64),
        read_request=np.array([0, 2]),
    )
    outcome = simulate(demand, star(3, GBPS))
    assert outcome.request_start[1] == outcome.read_end[0] + 100
    assert outcome.request_start[2] == outcome.request_start[1]


@pytest.mark.parametrize("topology", sorted(TOPOLOGIES))
def test_paths_are_shortest_paths_of_the_graph(topology: str) -> None:
    network = TOPOLOGIES[topology](70, GBPS)
    ends, graph = network.ends, nx.DiGraph(network.ends)
    rng = np.random.default_rng(5)
    for home, reader in rng.integers(0, 70, (40, 2)):
        if home == reader:
            continue
        edges = network.edge[[home]], network.edge[[reader]]
        hops = network.middle(*edges, rng.integers(0, 1 << 40, 1))
        middle = [int(hop[0]) for hop in hops if hop[0] != NONE]
        path = [int(network.up[home]), *middle, int(network.down[reader])]
        assert ends[path[0]][0] == f"h{home}"
        assert ends[path[-1]][1] == f"h{reader}"
        assert all(ends[a][1] == ends[b][0] for a, b in pairwise(path))
        shortest = nx.shortest_path_length(graph, f"h{home}", f"h{reader}")
        assert len(path) == shortest


def test_networks_that_cannot_be_are_refused() -> None:
    with pytest.raises(NetworkError, match="at least one host"):
        star(0, GBPS)
    with pytest.raises(NetworkError, match="not positive"):
        fat_tree(8, 0)
    with pytest.raises(ValueError, match="3 nodes"):
        simulate(flows([(0, 1)], 3, 1), star(2, GBPS))


def test_copies_of_a_trace_ask_for_the_same_blocks_only_where_they_share_a_library() -> None:
    lines = chat_lines(300.0)
    apart = TraceCopies(lines, 512, 65536, copies=8, seed=3).between(0, 600)
    joint = TraceCopies(lines, 512, 65536, copies=8, shared=1.0, seed=3).between(0, 600)
    assert len(apart.request_at) == len(joint.request_at)
    assert len(np.unique(joint.read_block)) < len(np.unique(apart.read_block)) / 4
    assert (np.diff(apart.request_at) >= 0).all()
    assert (apart.read_home != apart.read_node).all()


def test_a_trace_without_length_comes_once_a_minute() -> None:
    lines = [TraceLine(7.0, 512, 1, [1, 2]) for _ in range(3)]
    copies = TraceCopies(lines, 256, 65536, copies=10)
    assert copies.reads_per_s == 10 * 4 / 60
    assert len(copies.between(0, 600).request_at) == 10 * 3 * 10


def test_slices_of_a_trace_make_the_whole() -> None:
    copies = TraceCopies(chat_lines(300.0), 256, 65536, copies=4, seed=1)
    whole = copies.between(0, 120)
    parts = [copies.between(0, 50), copies.between(50, 120)]
    assert sum(len(p.request_at) for p in parts) == len(whole.request_at)
