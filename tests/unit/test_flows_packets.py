"""The flow simulator beside the packet-level pool: real cores, P4 program and frames, virtual time.

What it cannot see: processors, sockets, losses.
"""

from __future__ import annotations

import pytest
from kvcast.protocol.requester import RequesterConfig
from kvcast.simulation.flows import packets, questions
from kvcast.simulation.flows.demand import demand_of

AT_MOST = 0.10


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "kvcast"])
@pytest.mark.parametrize("workload", ["tp-mla", "storm", "chat"])
def test_egress_and_time_are_those_of_packets(workload: str, plain: bool) -> None:
    requests = questions.calibration_requests(workload, 60, seed=7)
    demand = demand_of(requests, questions.CALIBRATION_NODES, questions.CALIBRATION_BLOCK_BYTES)
    rate = questions.EMULATED_BITS_PER_S
    config = questions.patient(demand.nodes, rate)
    real = packets.replay(demand, rate, plain=plain, requester=config)
    ours = questions.flows_of_calibration(demand, plain=plain, bits_per_s=rate)
    assert not real.misses
    assert not real.wrong_bytes
    assert ours["egress"] == pytest.approx(
        real.home_payload_bytes / demand.distinct_bytes, rel=AT_MOST
    )
    assert ours["fetch_ms"] == pytest.approx(real.fetch_ns.mean() / 1e6, rel=AT_MOST)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "kvcast"])
def test_an_incast_on_fast_links_is_that_of_packets(plain: bool) -> None:
    demand = questions.incast(8, 512 << 10, spread_ns=2000, seed=3)
    real = packets.replay(demand, 100e9, plain=plain, requester=RequesterConfig())
    ours = questions.flows_of_calibration(demand, plain=plain, bits_per_s=100e9)
    assert ours["egress"] == pytest.approx(
        real.home_payload_bytes / demand.distinct_bytes, rel=AT_MOST
    )
    assert ours["fetch_ms"] == pytest.approx(real.fetch_ns.mean() / 1e6, rel=AT_MOST)
