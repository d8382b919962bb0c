"""What all ports of the switch have in common: options, counters, bounded queues, rates.

Owns: the interface `Port`, injected loss, egress rate limits, and a count for every frame that is
not passed on, by reason. Must not know: P4, tables, who processes a frame, what a port is made of.

Bounds: an ingress queue holds `queue_depth` frames. A full queue leaves what comes in the kernel's
buffer, which drops (rx_kernel_drops), because reading frames only to drop them would take the time
to process the others; an in-process port, which has no such buffer, drops the newest
(rx_queue_drops). So does a rate-limited egress queue (tx_queue_drops). Frames above
MAX_FRAME_BYTES are dropped (rx_oversize).
"""

from __future__ import annotations

import errno
import random
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import asdict, dataclass
from typing import Final

MIN_FRAME_BYTES = 14  # an Ethernet header
MAX_FRAME_BYTES = 10_240  # MTU 9000 and a few encapsulations; a UDP tunnel datagram
DEFAULT_QUEUE_DEPTH = 8192
DEFAULT_QUANTUM_S = 0.001

# Frames that one call of `drain` takes, so that a flood of one port cannot hold the loop. An
# unprivileged receive buffer (208 KiB) holds about as many frames of 1500 bytes.
DRAIN_FRAMES = 64
# What a socket's receive buffer is asked to hold; unprivileged, net.core.rmem_max caps it.
RECEIVE_BUFFER_BYTES = 32 << 20
SEND_BUFFER_BYTES = 8 << 20
# How far a rate-limited port may run ahead of its rate.
BURST_S = 0.002


class PortError(ValueError):
    """A port specification is malformed, or the port cannot be opened."""


@dataclass(slots=True)
class PortCounters:
    """What happened at one port since it was opened."""

    rx_frames: int = 0
    rx_bytes: int = 0
    rx_loss: int = 0
    """Received frames dropped by injected loss."""
    rx_queue_drops: int = 0
    """Received frames dropped because the ingress queue of an in-process port, or an uplink's, was
    full."""
    rx_kernel_drops: int = 0
    """Frames that the kernel dropped because the ingress queue, and then its buffer, was full."""
    rx_runts: int = 0
    """Received frames shorter than an Ethernet header."""
    rx_oversize: int = 0
    """Received frames above MAX_FRAME_BYTES."""
    rx_unsplit: int = 0
    """Received segments that the sender left to hardware to split (offloaded super-packets)."""
    rx_foreign: int = 0
    """Datagrams from somebody who is not the tunnel's peer."""
    rx_errors: int = 0
    tx_frames: int = 0
    tx_bytes: int = 0
    tx_loss: int = 0
    """Frames to send dropped by injected loss."""
    tx_queue_drops: int = 0
    """Frames to send dropped because the rate-limited egress queue was full."""
    tx_no_peer: int = 0
    """Frames to send before the tunnel's peer was heard of."""
    tx_too_long: int = 0
    """Frames that the interface or socket refused for their length (EMSGSIZE)."""
    tx_busy: int = 0
    """Frames dropped because the kernel's send buffer was full."""
    tx_refused: int = 0
    """Times that the kernel said that nobody listens at the peer's address (ICMP unreachable);
    the frames in question are among `tx_frames`."""
    tx_errors: int = 0


@dataclass(frozen=True, slots=True)
class PortOptions:
    """What all kinds of ports have in common."""

    queue_depth: int = DEFAULT_QUEUE_DEPTH
    """Frames that the ingress queue holds, and the egress queue of a rate-limited port, and an
    uplink."""
    loss: float = 0.0
    """Probability, 0 to 1, with which each received and each sent frame is dropped."""
    seed: int = 0
    """Seed of the losses; every port and direction draws from a sequence of its own."""
    rate_bits_per_s: float | None = None
    """Egress rate; None = as fast as the socket takes it."""
    uplink_bits_per_s: float | None = None
    """Ingress rate (compiled loop only), as of a host's own link; None = as fast as frames come."""
    quantum_s: float = DEFAULT_QUANTUM_S
    """How late frames may leave a port with a rate, or be taken from an uplink, so that several go
    in one piece (compiled loop, real time only; when they would have gone is reckoned without
    it)."""

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


class Port(ABC):
    """One port. Frames received wait in `ingress`; `transmit` sends one."""

    kind: str = "abstract"

    def __init__(self, number: int, options: PortOptions) -> None:
        self.number = number
        self.counters = PortCounters()
        self.ingress: deque[bytes] = deque()
        self.options = options
        self._rx_random = random.Random(f"{options.seed}/{number}/rx")
        self._tx_random = random.Random(f"{options.seed}/{number}/tx")
        self._pacer = (
            None
            if options.rate_bits_per_s is None
            else _Pacer(options.rate_bits_per_s, options.queue_depth)
        )

    @abstractmethod
    def fileno(self) -> int | None:
        """The descriptor that becomes readable when `drain` has something to do, if any."""

    @abstractmethod
    def drain(self) -> int:
        """Move what the kernel holds into `ingress`, as far as there is room; returns how many
        frames came."""

    @abstractmethod
    def _send(self, frame: bytes) -> bool:
        """Hand one frame to the wire; False (and a count) where that was not possible."""

    @abstractmethod
    def describe(self) -> str:
        """The specification that would open this port again."""

    def close(self) -> None:
        """Release what the port holds. Queued frames are lost."""
        self.ingress.clear()

    def read_counters(self) -> dict[str, int]:
        """All counters by name, the kernel's included."""
        return asdict(self.counters)

    def _room(self) -> int:
        """How many frames one call of `drain` may take."""
        return min(DRAIN_FRAMES, self.options.queue_depth - len(self.ingress))

    def transmit(self, frame: bytes, now_s: float) -> None:
        """Send a frame, now or when the port's rate allows it."""
        if self.options.loss and self._tx_random.random() < self.options.loss:
            self.counters.tx_loss += 1
        elif self._pacer is None:
            self._send_counted(frame)
        elif not self._pacer.enqueue(frame):
            self.counters.tx_queue_drops += 1
        else:
            self.release(now_s)

    def release(self, now_s: float) -> float | None:
        """Send what the rate allows by now; returns when there will be more, or None."""
        if self._pacer is None:
            return None
        while (frame := self._pacer.take(now_s)) is not None:
            self._send_counted(frame)
        return self._pacer.next_release_s()

    @property
    def egress_backlog(self) -> int:
        """Frames that wait for the port's rate."""
        return 0 if self._pacer is None else self._pacer.backlog

    def receive(self, frame: bytes) -> bool:
        """A frame has arrived: queue it, or drop and count it."""
        counters = self.counters
        size = len(frame)
        if size < MIN_FRAME_BYTES:
            counters.rx_runts += 1
            return False
        if size > MAX_FRAME_BYTES:
            counters.rx_oversize += 1
            return False
        if self.options.loss and self._rx_random.random() < self.options.loss:
            counters.rx_loss += 1
            return False
        if len(self.ingress) >= self.options.queue_depth:
            counters.rx_queue_drops += 1
            return False
        counters.rx_frames += 1
        counters.rx_bytes += size
        self.ingress.append(frame)
        return True

    def _send_counted(self, frame: bytes) -> None:
        if self._send(frame):
            self.counters.tx_frames += 1
            self.counters.tx_bytes += len(frame)


class _Pacer:
    """A token bucket before a bounded queue. Times are monotonic seconds."""

    def __init__(self, bits_per_s: float, depth: int) -> None:
        self._bytes_per_s = bits_per_s / 8
        self._depth = depth
        self._queue: deque[bytes] = deque()
        # The bucket goes into debt for a frame larger than itself: no frame waits for ever.
        self._burst_bytes = self._bytes_per_s * BURST_S
        self._tokens = self._burst_bytes
        self._at_s: float | None = None

    @property
    def backlog(self) -> int:
        return len(self._queue)

    def enqueue(self, frame: bytes) -> bool:
        if len(self._queue) >= self._depth:
            return False
        self._queue.append(frame)
        return True

    def take(self, now_s: float) -> bytes | None:
        if self._at_s is not None:
            gained = (now_s - self._at_s) * self._bytes_per_s
            self._tokens = min(self._burst_bytes, self._tokens + gained)
        self._at_s = now_s
        if not self._queue or self._tokens < 0:
            return None
        frame = self._queue.popleft()
        self._tokens -= len(frame)
        return frame

    def next_release_s(self) -> float | None:
        if not self._queue or self._at_s is None:
            return None
        return self._at_s + max(0.0, -self._tokens) / self._bytes_per_s


def count_send_error(counters: PortCounters, error: OSError) -> None:
    if isinstance(error, BlockingIOError) or error.errno == errno.ENOBUFS:
        counters.tx_busy += 1
    elif error.errno == errno.EMSGSIZE:
        counters.tx_too_long += 1
    else:
        counters.tx_errors += 1


_SO_MEMINFO: Final = 55  # asm-generic/socket.h; nine u32, the last counts drops
_MEMINFO: Final = struct.Struct("=9I")


def kernel_drops(endpoint: socket.socket) -> int:
    """Frames that the kernel dropped before this socket since it was made."""
    info = endpoint.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    return int(_MEMINFO.unpack(info)[8])


def enlarge_buffers(endpoint: socket.socket) -> None:
    """Ask for large kernel buffers: beyond the system's limit with CAP_NET_ADMIN, else up to it."""
    so_sndbufforce, so_rcvbufforce = 32, 33  # asm-generic/socket.h
    for force, plain, size in (
        (so_rcvbufforce, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES),
        (so_sndbufforce, socket.SO_SNDBUF, SEND_BUFFER_BYTES),
    ):
        try:
            endpoint.setsockopt(socket.SOL_SOCKET, force, size)
        except OSError:
            endpoint.setsockopt(socket.SOL_SOCKET, plain, size)
