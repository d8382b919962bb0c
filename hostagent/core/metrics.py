"""The agent's numbers: what it counts, by which names, and the histogram of fetch times.

Owns: the counters' names, which `Stats`, `Renew.counters` and the Prometheus endpoint all use.
Must not know: who counts when. Names that end in `_total` only grow while the agent lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final

from kvcast.protocol.requester import MissReason

_BUCKETS_PER_OCTAVE: Final = 8
_OCTAVES: Final = 40


class LogHistogram:
    """Counts of durations in buckets an eighth of an octave wide (9 %), from 1 us to 12 days."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self._counts = [0] * (_OCTAVES * _BUCKETS_PER_OCTAVE)

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.count += 1
        self.sum_s += seconds
        self.max_s = max(self.max_s, seconds)
        micros = max(1, int(seconds * 1e6))
        octave = micros.bit_length() - 1
        fraction = (micros << 3 >> octave) & (_BUCKETS_PER_OCTAVE - 1)
        index = octave * _BUCKETS_PER_OCTAVE + fraction
        self._counts[min(index, len(self._counts) - 1)] += 1

    def quantile_s(self, q: float) -> float:
        """The upper edge of the bucket that holds the q-quantile, in seconds; 0 while empty."""
        rank = q * self.count
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                octave, fraction = divmod(index, _BUCKETS_PER_OCTAVE)
                edge = (1 << octave) * (1 + (fraction + 1) / _BUCKETS_PER_OCTAVE) / 1e6
                return min(edge, self.max_s)
        return 0.0


@dataclass(slots=True)
class Metrics:
    """Everything that the agent counts itself; the cores and the store count beside it."""

    # gets, by key
    gets_total: int = 0
    hits_local_total: int = 0
    hits_switch_total: int = 0
    hits_shared_total: int = 0
    hits_home_total: int = 0
    hits_bulk_total: int = 0
    gets_refused_total: int = 0
    """Gets of an unknown or forbidden namespace, or before the first map."""
    gets_joined_total: int = 0
    """Gets that waited for a fetch that another get had begun."""
    fetches_total: int = 0
    prefetches_total: int = 0
    # puts, by key
    puts_total: int = 0
    puts_failed_total: int = 0
    replications_total: int = 0
    replications_failed_total: int = 0
    replications_dropped_total: int = 0
    """Copies for further replicas that were not sent: the queue was full, or they were evicted
    while they waited in it."""
    # bytes of blocks, headers not counted
    payload_bytes_sent_bulk_get_total: int = 0
    payload_bytes_sent_bulk_put_total: int = 0
    payload_bytes_received_udp_total: int = 0
    payload_bytes_received_bulk_get_total: int = 0
    payload_bytes_received_bulk_put_total: int = 0
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
    fetch_time: LogHistogram = field(default_factory=LogHistogram)
    misses: dict[str, int] = field(default_factory=lambda: {r.value: 0 for r in MissReason})
    """Gets that ended without a block, by `MissReason` value; `misses_<reason>_total`."""

    def count_hit(self, tier: str) -> None:
        """A get was answered from `tier` (switch, shared, home or bulk)."""
        name = f"hits_{tier}_total"
        setattr(self, name, getattr(self, name) + 1)

    def count_miss(self, reason: str) -> None:
        """A get ended without a block."""
        self.misses[reason] += 1

    def snapshot(self) -> dict[str, float]:
        """All values by name."""
        values: dict[str, float] = {
            item.name: float(getattr(self, item.name))
            for item in fields(self)
            if item.name not in ("fetch_time", "misses")
        }
        values.update({f"misses_{why}_total": float(n) for why, n in self.misses.items()})
        values["misses_total"] = float(sum(self.misses.values()))
        values["fetch_ms_count"] = float(self.fetch_time.count)
        values["fetch_ms_sum"] = self.fetch_time.sum_s * 1e3
        values["fetch_ms_p50"] = self.fetch_time.quantile_s(0.5) * 1e3
        values["fetch_ms_p99"] = self.fetch_time.quantile_s(0.99) * 1e3
        values["fetch_ms_max"] = self.fetch_time.max_s * 1e3
        return values
