"""The agent's numbers: what it counts, by which names, and its histograms.

Owns: the names, which `Stats`, `Renew.counters` and the Prometheus endpoint all use. Must not know:
who counts when. Names that end in `_total` only grow while the agent lives. A histogram is reported
by Prometheus' own sample names (`fetch_seconds_bucket{le="0.001"}`, `_sum`, `_count`), buckets
counting all that is below them: so that adding several agents' numbers, name by name, adds their
histograms, of which `quantile` then tells the pool's. Quantiles themselves cannot be added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from kvcast.hostagent.core.histogram import FETCH_BOUNDS_S, Histogram
from kvcast.hostagent.core.namespace_metrics import NamespacesMetrics
from kvcast.protocol.requester import MissReason


def added(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Several agents' totals and histograms as one's; present values are left out."""
    sums: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            if name.partition("{")[0].endswith(("_total", "_bucket", "_sum", "_count")):
                sums[name] = sums.get(name, 0.0) + value
    return sums


def quantile(samples: Mapping[str, float], name: str, q: float) -> float | None:
    """The q-quantile of the histogram of that name, as Prometheus' histogram_quantile has it:
    linear within a bucket, the last finite bound beyond it; None of an empty or absent one."""
    start = f'{name}_bucket{{le="'
    buckets = sorted(
        (float(key[len(start) : -2]), count)
        for key, count in samples.items()
        if key.startswith(start)
    )
    if not buckets or not buckets[-1][1]:
        return None
    rank = q * buckets[-1][1]
    below_bound, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound):
                break
            return below_bound + (bound - below_bound) * max(0.0, rank - below) / (count - below)
        below_bound, below = bound, count
    return below_bound


@dataclass(slots=True)
class Metrics:
    """Everything that the agent counts itself; the cores and the store count beside it."""

    # gets, by key
    gets_total: int = 0
    """Keys that clients asked for."""
    hits_local_total: int = 0
    """Gets answered from this node's arena."""
    hits_arena_total: int = 0
    """Gets answered from further arenas of this node."""
    hits_ssd_total: int = 0
    """Gets answered from this node's disk."""
    hits_cold_total: int = 0
    """Gets answered from the object store."""
    hits_switch_total: int = 0
    """Gets answered at least partly from the switch's memory."""
    hits_shared_total: int = 0
    """Gets answered by another node's READ answers that several readers got."""
    hits_home_total: int = 0
    """Gets answered by another node's READ answers that only this node got."""
    hits_bulk_total: int = 0
    """Gets answered by another node over the bulk link."""
    gets_refused_total: int = 0
    """Gets of an unknown or forbidden namespace, beyond its rate, or before the first map."""
    gets_joined_total: int = 0
    """Gets that waited for a fetch that another get had begun."""
    fetches_total: int = 0
    overheard_total: int = 0
    """Blocks that came because another node of a reader group asked for them."""
    overheard_refused_total: int = 0
    """Blocks that another node of a reader group asked for, and that were not taken: too many were
    on their way."""
    prefetches_total: int = 0
    # puts, by key
    puts_total: int = 0
    puts_failed_total: int = 0
    replications_total: int = 0
    replications_failed_total: int = 0
    replications_dropped_total: int = 0
    """Copies for further replicas that were not sent: the queue was full, or they were evicted
    while they waited in it."""
    replications_late_total: int = 0
    """Copies for further replicas that had left DRAM for a lower tier when their turn came, and are
    sent from there."""
    payload_bytes_sent_bulk_get_total: int = 0
    """Bytes of blocks, headers not counted, sent over the bulk link in answer to gets."""
    payload_bytes_sent_bulk_put_total: int = 0
    """Bytes of blocks, headers not counted, sent over the bulk link as puts."""
    payload_bytes_received_udp_total: int = 0
    """Bytes of blocks, headers not counted, that came in answer to READs."""
    payload_bytes_received_bulk_get_total: int = 0
    """Bytes of blocks, headers not counted, that came over the bulk link in answer to gets."""
    payload_bytes_received_bulk_put_total: int = 0
    """Bytes of blocks, headers not counted, that other nodes put here over the bulk link."""
    # frames
    frames_received_total: int = 0
    frames_answers_total: int = 0
    """DATA, MISS and OFFER handed to the requester. With the READs (`responder_reads_total`), and
    the frames malformed, misaddressed, of unknown sources and forbidden: all that was received."""
    frames_dropped_receiving_total: int = 0
    """Datagrams that the kernel dropped since the socket's buffer was full: never received."""
    frames_sent_total: int = 0
    frames_malformed_total: int = 0
    """Bytes that are no frame of ours: the header, Ethernet, IPv4 or UDP is wrong."""
    frames_misaddressed_total: int = 0
    """Frames for another MAC, address or port (a switch that floods sends those)."""
    frames_unknown_source_total: int = 0
    """Frames from an address that the map does not know."""
    ssd_reads_dropped_total: int = 0
    """READs of blocks on this node's disk that were dropped, since too many waited for it."""
    frames_forbidden_total: int = 0
    """READs of a namespace that their sender may not use."""
    frames_dropped_sending_total: int = 0
    """Frames not sent because the queue to the socket was full; the cores ask again."""
    frames_addressee_left_total: int = 0
    """Frames not sent because their addressee had left the map while they waited."""
    socket_errors_total: int = 0
    # the bulk link
    bulk_requests_sent_total: int = 0
    bulk_requests_served_total: int = 0
    bulk_requests_refused_total: int = 0
    bulk_failures_total: int = 0
    bulk_wrong_digest_total: int = 0
    bulk_protocol_errors_total: int = 0
    bulk_connections_refused_total: int = 0
    """Callers beyond a bound, without TLS or a node's certificate, or with another name than their
    certificate's."""
    bulk_wrong_peers_total: int = 0
    """Connections to something whose certificate is not the node's that was called."""
    # the RDMA link
    rdma_requests_sent_total: int = 0
    rdma_requests_served_total: int = 0
    rdma_requests_held_total: int = 0
    """Requests to us that waited for their windows, since several namespaces wanted some."""
    rdma_requests_late_total: int = 0
    """Requests to us for windows whose turn did not come in time, and which went by TCP."""
    rdma_blocks_read_total: int = 0
    """Blocks that our card has read from other nodes' memory, and whose digest was looked at; they
    count as received over the bulk link, too."""
    rdma_blocks_written_total: int = 0
    rdma_bytes_read_total: int = 0
    rdma_bytes_written_total: int = 0
    rdma_pairs_made_total: int = 0
    rdma_pairs_broken_total: int = 0
    """Queue pairs that ended in an error: a window was closed, a peer did not answer its card, the
    card refused."""
    rdma_refused_total: int = 0
    """Queue pairs that could not be had, in either role."""
    rdma_calls_moved_total: int = 0
    """Calls that one card could not make, and another went on with."""
    rdma_fallbacks_total: int = 0
    """Calls that RDMA could not make, and TCP was asked to."""
    rdma_protocol_errors_total: int = 0
    # the local API
    local_connections_total: int = 0
    """Connections accepted. Each is refused, ends in the handshake, is cut off for a protocol
    error, or is left by its client; or it still stands."""
    local_connections_refused_total: int = 0
    local_handshakes_failed_total: int = 0
    """Connections that ended, or waited too long, before their Hello was whole."""
    local_protocol_errors_total: int = 0
    """Clients cut off: what they sent is no message, or they did not read."""
    local_clients_left_total: int = 0
    local_requests_total: int = 0
    """Requests taken. Each is a Release, is replied to, has its reply dropped, or waits."""
    local_releases_total: int = 0
    local_replies_total: int = 0
    local_replies_dropped_total: int = 0
    """Replies to clients that had gone."""
    local_busy_total: int = 0
    local_unknown_handles_total: int = 0
    local_forbidden_total: int = 0
    """Requests for a tenant's namespace that the rule which let the client in does not name."""
    # the control link
    control_connects_total: int = 0
    control_errors_total: int = 0
    control_wrong_peers_total: int = 0
    """Connections to something whose certificate is no controller's."""
    maps_refused_total: int = 0
    """Bucket maps that contradict themselves; the last good one stays in force."""
    credits_total: int = 0
    keeps_total: int = 0
    keeps_failed_total: int = 0
    fetch_time: Histogram = field(default_factory=lambda: Histogram(FETCH_BOUNDS_S))
    """Seconds from a fetch's beginning to its block; what ended without one is not in it."""
    local_rate_limited_total: int = 0
    """Requests refused for their namespace's rate."""
    misses: dict[str, int] = field(default_factory=lambda: {r.value: 0 for r in MissReason})
    """Gets that ended without a block, by `MissReason` value; `misses_<reason>_total`."""

    by_namespace: NamespacesMetrics = field(default_factory=NamespacesMetrics)

    def count_hit(self, tier: str) -> None:
        """A get was answered from `tier` (of `local.TIERS`)."""
        name = f"hits_{tier}_total"
        setattr(self, name, getattr(self, name) + 1)

    def count_miss(self, reason: str) -> None:
        """A get ended without a block."""
        self.misses[reason] += 1

    def snapshot(self) -> dict[str, float]:
        """All values by name, without the histograms."""
        values: dict[str, float] = {
            item.name: float(getattr(self, item.name))
            for item in fields(self)
            if item.name not in ("fetch_time", "misses", "by_namespace")
        }
        values.update({f"misses_{why}_total": float(n) for why, n in self.misses.items()})
        values["misses_total"] = float(sum(self.misses.values()))
        return values

    def histograms(self) -> dict[str, Histogram]:
        """All histograms by name."""
        return {"fetch_seconds": self.fetch_time}
