"""What a demand asks of processors and of the control channel, beside what links carry.

Owns: unit costs, and the sums over a run: agents' and the controller's processor time, and control
messages. Must not know: how flows travel. Times do not wait for processors (`FlowOptions.home_ns`
and `reader_ns` say what one answer waits); so a share near one says that a run is not to be
believed.

The costs are measured (docs/measurements.md: lone reads, shared reads, the controller): chunks of
8 KiB by kernel UDP, one core of a server.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kvcast.protocol.messages.wire import SEGMENT_BYTES
from kvcast.simulation.flows.demand import NS, Demand
from kvcast.simulation.flows.engine import Outcome


@dataclass(frozen=True)
class ProcessorCosts:
    """Processor time of one core."""

    home_ns_a_byte: float = 0.21
    reader_ns_a_byte: float = 0.20
    home_ns_a_read: float = 41_000.0
    """For each READ of a segment that it answers."""
    reader_ns_a_block: float = 35_000.0
    controller_ns_a_report: float = 2_000.0
    """For each block in a home's report."""
    controller_ns_a_digest: float = 28_000.0
    renewal_s: float = 1.0
    """How often an agent reports; each report is answered."""
    blocks_a_report: int = 256
    digest_reads: int = 3
    """READs of a segment in about a second that raise a digest of the switch."""


MEASURED = ProcessorCosts()


@dataclass(frozen=True)
class Work:
    """Sums over a run. `busiest_host`: share of one core that the busiest host's agent was busy."""

    control_messages: int
    digests: int
    homes_s: float
    readers_s: float
    controller_s: float
    busiest_host: float


def work(demand: Demand, outcome: Outcome, span_s: float, costs: ProcessorCosts = MEASURED) -> Work:
    """What a run of so many seconds took. What switches copy costs no home anything: its work is
    shared out among the answers that were sent, by bytes."""
    size = demand.read_bytes
    second = (outcome.request_start[demand.read_request] / (costs.renewal_s * NS)).astype(np.int64)
    sent = outcome.home_payload_bytes / max(1, int(size.sum()))
    segments = -(-size // SEGMENT_BYTES)
    home_ns = sent * (size * costs.home_ns_a_byte + segments * costs.home_ns_a_read)
    reader_ns = size * costs.reader_ns_a_byte + costs.reader_ns_a_block
    host_ns = np.bincount(demand.read_home, home_ns, demand.nodes)
    host_ns += np.bincount(demand.read_node, reader_ns, demand.nodes)
    blocks = len(demand.block_bytes)
    name = second * blocks + demand.read_block
    _, first, reads = np.unique(name, return_index=True, return_counts=True)
    homes = second[first] * demand.nodes + demand.read_home[first]
    reported = int(np.minimum(np.unique(homes, return_counts=True)[1], costs.blocks_a_report).sum())
    digests = int(segments[first][reads >= costs.digest_reads].sum())
    reports = int(demand.nodes * span_s / costs.renewal_s)
    controller_ns = reported * costs.controller_ns_a_report + digests * costs.controller_ns_a_digest
    return Work(
        2 * reports + digests,
        digests,
        float(home_ns.sum()) / NS,
        float(reader_ns.sum()) / NS,
        controller_ns / NS,
        float(host_ns.max(initial=0.0)) / NS / span_s,
    )
