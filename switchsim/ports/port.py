"""What all ports of the switch have in common: options, and what is known of their sockets.

Owns: what a port is to others, and the kernel's buffers. Must not know: P4, tables, how frames are
moved and counted (`loop`), what kinds of ports there are.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from kvcast.service.sockets import set_buffer

MIN_FRAME_BYTES = 14  # an Ethernet header
MAX_FRAME_BYTES = 10_240  # MTU 9000 and a few encapsulations; a UDP tunnel datagram
DEFAULT_QUEUE_DEPTH = 8192
DEFAULT_QUANTUM_S = 0.001

# What a socket's receive buffer is asked to hold; unprivileged, net.core.rmem_max caps it.
RECEIVE_BUFFER_BYTES = 32 << 20
SEND_BUFFER_BYTES = 8 << 20


class PortError(ValueError):
    """A port specification is malformed, or the port cannot be opened."""


@dataclass(frozen=True, slots=True)
class PortOptions:
    """What all kinds of ports have in common."""

    queue_depth: int = DEFAULT_QUEUE_DEPTH
    """Frames that each egress queue of a port with a rate holds, and an uplink."""
    loss: float = 0.0
    """Probability, 0 to 1, with which each received and each sent frame is dropped."""
    seed: int = 0
    """Seed of the losses; every port and direction draws from a sequence of its own."""
    rate_bits_per_s: float | None = None
    """Egress rate; None = as fast as the socket takes it."""
    uplink_bits_per_s: float | None = None
    """Ingress rate, as of a host's own link; None = as fast as frames come."""
    quantum_s: float = DEFAULT_QUANTUM_S
    """How late frames may leave a port with a rate, or be taken from an uplink, so that several go
    in one piece (in real time only; when they would have gone is reckoned without it)."""

    def __post_init__(self) -> None:
        if self.queue_depth < 1:
            raise PortError(f"queue depth {self.queue_depth} is below 1")
        if not 0.0 <= self.loss <= 1.0:
            raise PortError(f"loss {self.loss} is not between 0 and 1")
        if self.rate_bits_per_s is not None and self.rate_bits_per_s <= 0:
            raise PortError(f"port rate {self.rate_bits_per_s} is not above 0")
        if self.uplink_bits_per_s is not None and not self.uplink_bits_per_s > 0:
            raise PortError(f"uplink rate {self.uplink_bits_per_s} is not above 0")
        if not 0 <= self.quantum_s <= 1:
            raise PortError(f"port quantum {self.quantum_s} is not 0 to 1 s")


class Port:
    """One open port. This one has no socket: frames are given to the packet loop and taken from
    it, by tests, simulation, and for the controller."""

    kind: str = "inprocess"

    def __init__(self, number: int, options: PortOptions | None = None) -> None:
        self.number = number
        self.options = options or PortOptions()

    def describe(self) -> str:
        """The specification that would open this port again."""
        return self.kind

    def close(self) -> None:
        """Release what the port holds: nothing."""

    def kernel_drops(self) -> int:
        """Frames that the kernel dropped before this port since it was opened."""
        return 0


def enlarge_buffers(endpoint: socket.socket) -> None:
    """Ask for large kernel buffers."""
    set_buffer(endpoint, RECEIVE_BUFFER_BYTES, receive=True)
    set_buffer(endpoint, SEND_BUFFER_BYTES, receive=False)
