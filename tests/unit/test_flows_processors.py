"""Processors' work and control messages beside sums by hand."""

from __future__ import annotations

import numpy as np
import pytest
from kvcast.protocol.messages.wire import SEGMENT_BYTES
from kvcast.simulation.flows.demand import NS, Demand
from kvcast.simulation.flows.engine import FlowOptions, simulate
from kvcast.simulation.flows.networks import star
from kvcast.simulation.flows.processors import ProcessorCosts, work

COSTS = ProcessorCosts(
    home_ns_a_byte=1.0,
    reader_ns_a_byte=2.0,
    home_ns_a_read=1000.0,
    reader_ns_a_block=5000.0,
    controller_ns_a_report=10.0,
    controller_ns_a_digest=100.0,
    blocks_a_report=2,
)


def reads(at_s: list[float], node: list[int], block: list[int], size: int) -> Demand:
    count = len(at_s)
    zeros = np.zeros(count, np.int64)
    return Demand(
        5,
        (np.array(at_s) * NS).astype(np.int64),
        zeros - 1,
        zeros,
        zeros,
        np.arange(count),
        np.array(node, np.int64),
        np.array(block, np.int64),
        zeros,
        np.full(max(block) + 1, size, np.int64),
    )


def test_what_is_sent_to_each_reader_costs_its_home_each_time() -> None:
    demand = reads([0.0, 0.1, 0.2, 1.5], [1, 2, 3, 4], [0, 0, 0, 0], 2 * SEGMENT_BYTES)
    outcome = simulate(demand, star(5, 100e9), FlowOptions(way="plain"))
    found = work(demand, outcome, 2.0, COSTS)
    home_ns = 4 * (2 * SEGMENT_BYTES + 2 * 1000)
    assert found.homes_s == pytest.approx(home_ns / NS)
    assert found.readers_s == pytest.approx(4 * (2 * 2 * SEGMENT_BYTES + 5000) / NS)
    assert found.busiest_host == pytest.approx(home_ns / NS / 2.0)
    # The first second has three READs of each of two segments; both seconds are reported.
    assert found.digests == 2
    assert found.control_messages == 2 * 5 * 2 + 2
    assert found.controller_s == pytest.approx((2 * 10 + 2 * 100) / NS)


def test_what_the_switch_copies_costs_the_home_once() -> None:
    demand = reads([0.0] * 4, [1, 2, 3, 4], [0] * 4, SEGMENT_BYTES)
    outcome = simulate(demand, star(5, 100e9), FlowOptions(way="coalesce"))
    assert work(demand, outcome, 1.0, COSTS).homes_s == pytest.approx((SEGMENT_BYTES + 1000) / NS)


def test_a_home_reports_so_many_blocks_at_most() -> None:
    demand = reads([0.0] * 4, [1, 2, 3, 4], [0, 1, 2, 3], SEGMENT_BYTES)
    outcome = simulate(demand, star(5, 100e9), FlowOptions(way="plain"))
    found = work(demand, outcome, 1.0, COSTS)
    assert (found.digests, found.controller_s) == (0, pytest.approx(2 * 10 / NS))
