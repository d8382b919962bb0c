"""What ports drop, told in words: once in the log when it begins, and once when the switch stops.

Owns: the sentence for each reason. Must not know: how frames are counted
(`loop.state.PortCounters`). Losses that were asked for (`--loss`) are no reason to speak.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from kvcast.switchsim.ports.port import MAX_FRAME_BYTES, MIN_FRAME_BYTES

log = logging.getLogger("kvcast.switchsim.ports.drops")

REASONS: Final = {
    "rx_queue_drops": "frames that found the queue before the program full",
    "rx_kernel_drops": "frames that came faster than the switch takes them",
    "rx_runts": f"frames shorter than {MIN_FRAME_BYTES} bytes",
    "rx_oversize": f"frames longer than {MAX_FRAME_BYTES} bytes",
    "rx_unsplit": "segments that the sender left to hardware to split (switch its offloads off)",
    "rx_foreign": "datagrams from somebody who is not the tunnel's peer",
    "tx_queue_drops": "frames that found the queue of the port full",
    "tx_no_peer": "frames to a tunnel whose peer was not heard of yet",
    "tx_too_long": "frames longer than the interface (its MTU) or the socket takes",
    "tx_busy": "frames that found the kernel's send buffer full",
    "tx_errors": "frames that the interface or socket refused",
}
"""By counter, for those that count frames which went no further."""


class DropLog:
    """Says the first time that a port drops frames for a reason, and the totals at the end."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def note(self, port: str, counters: Mapping[str, int]) -> None:
        """The present counters of a port, named as in the statistics."""
        for name, reason in REASONS.items():
            if counters[name] and (port, name) not in self._told:
                self._told.add((port, name))
                log.warning("port %s drops %s", port, reason, extra={name: counters[name]})

    def total(self, port: str, counters: Mapping[str, int]) -> None:
        """The last counters of a port."""
        dropped = {name: counters[name] for name in REASONS if counters[name]}
        if dropped:
            log.warning("port %s dropped in all", port, extra=dropped)
