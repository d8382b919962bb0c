"""Switch ports: where frames come in and go out.

Owns: sockets, the bounded queues of each port, injected loss, egress rate limits, and a count for
every frame that is not passed on. Must not know: P4, tables, who processes a frame. One interface
(`Port`), three kinds: in process (tests and the CPU port), UDP tunnel (one datagram is one
Ethernet frame; needs no privilege), AF_PACKET (an interface of the machine; needs CAP_NET_RAW).

Bounds: an ingress queue holds `queue_depth` frames. A full queue leaves what comes in the kernel's
buffer, which drops (rx_kernel_drops), because reading frames only to drop them would take the time
to process the others; an in-process port, which has no such buffer, drops the newest
(rx_queue_drops). So does a rate-limited egress queue (tx_queue_drops). Frames above
MAX_FRAME_BYTES are dropped (rx_oversize).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import logging
import mmap
import os
import random
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

log = logging.getLogger("kvcast.switchsim.ports.ports")

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
    """Received frames dropped because the ingress queue of an in-process port was full."""
    rx_kernel_drops: int = 0
    """Frames that the kernel dropped because the ingress queue, and then its buffer, was full."""
    rx_runts: int = 0
    """Received frames shorter than an Ethernet header."""
    rx_oversize: int = 0
    """Received frames above MAX_FRAME_BYTES or the interface's MTU (offloaded super-packets)."""
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

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class PortOptions:
    """What all kinds of ports have in common."""

    queue_depth: int = DEFAULT_QUEUE_DEPTH
    """Frames that the ingress queue holds, and the egress queue of a rate-limited port."""
    loss: float = 0.0
    """Probability, 0 to 1, with which each received and each sent frame is dropped."""
    seed: int = 0
    """Seed of the losses; every port and direction draws from a sequence of its own."""
    rate_bits_per_s: float | None = None
    """Egress rate; None = as fast as the socket takes it."""
    quantum_s: float = DEFAULT_QUANTUM_S
    """How late frames may leave a port with a rate, so that several leave in one piece (compiled
    loop, real time only; when they would have left is reckoned without it)."""

    def __post_init__(self) -> None:
        if self.queue_depth < 1:
            raise PortError(f"queue depth {self.queue_depth} is below 1")
        if not 0.0 <= self.loss <= 1.0:
            raise PortError(f"loss {self.loss} is not between 0 and 1")
        if self.rate_bits_per_s is not None and self.rate_bits_per_s <= 0:
            raise PortError(f"port rate {self.rate_bits_per_s} is not above 0")
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
        self._queue_depth = options.queue_depth
        self._loss = options.loss
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
        return self.counters.as_dict()

    def _room(self) -> int:
        """How many frames one call of `drain` may take."""
        return min(DRAIN_FRAMES, self._queue_depth - len(self.ingress))

    def transmit(self, frame: bytes, now_s: float) -> None:
        """Send a frame, now or when the port's rate allows it."""
        if self._loss and self._tx_random.random() < self._loss:
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
        if self._loss and self._rx_random.random() < self._loss:
            counters.rx_loss += 1
            return False
        if len(self.ingress) >= self._queue_depth:
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


class InProcessPort(Port):
    """A port without a socket: `receive` puts frames in, `on_transmit` takes them out."""

    kind = "inprocess"

    def __init__(
        self,
        number: int,
        options: PortOptions | None = None,
        on_transmit: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`on_transmit` returns whether it took the frame; without it, frames pile up in `sent`,
        which is bounded like any other queue."""
        super().__init__(number, options or PortOptions())
        self._on_transmit = on_transmit
        self.sent: deque[bytes] = deque()

    def fileno(self) -> int | None:
        return None

    def drain(self) -> int:
        return 0

    def describe(self) -> str:
        return self.kind

    def _send(self, frame: bytes) -> bool:
        if self._on_transmit is not None:
            taken = self._on_transmit(frame)
        else:
            taken = len(self.sent) < self._queue_depth
            if taken:
                self.sent.append(frame)
        if not taken:
            self.counters.tx_queue_drops += 1
        return taken


Address = tuple[str, int]

_SOL_UDP: Final = 17
_UDP_GRO: Final = 104  # linux/udp.h


class UdpTunnelPort(Port):
    """Ethernet over UDP: one datagram is one frame, with nothing before or behind it.

    With a peer, the socket is connected and the kernel drops what others send. Without one, the
    sender of the last datagram is the peer; only senders on this machine (a loopback address, or
    the address that the port is bound to) are believed.
    """

    kind = "udp"

    def __init__(
        self, number: int, local: Address, peer: Address | None, options: PortOptions | None = None
    ) -> None:
        super().__init__(number, options or PortOptions())
        self.fixed_peer = peer is not None
        self.peer = peer
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(local)
            if peer is not None:
                self._socket.connect(peer)
        except OSError as error:
            self._socket.close()
            raise PortError(f"port {number}: UDP {local} to {peer}: {error}") from error
        _enlarge_buffers(self._socket)
        self.local: Address = self._socket.getsockname()
        self._local_addresses = {self.local[0]}

    def segment_frames(self) -> bool:
        """Ask the kernel to hand over frames of one length in one piece (UDP_GRO), and say
        whether it can. `drain` cannot take them apart: for the compiled loop."""
        try:
            self._socket.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        except OSError:
            return False
        return True

    def fileno(self) -> int | None:
        return self._socket.fileno()

    def drain(self) -> int:
        return self._drain_connected() if self.fixed_peer else self._drain_learning()

    def _drain_connected(self) -> int:
        receive = self._socket.recv
        arrived = 0
        for _ in range(self._room()):
            try:
                frame = receive(MAX_FRAME_BYTES + 1)
            except BlockingIOError:
                break
            except ConnectionRefusedError:
                # An earlier frame found nobody at the peer's address; the socket stays usable.
                self.counters.tx_refused += 1
                continue
            except OSError as error:
                self._receive_error(error)
                break
            self.receive(frame)
            arrived += 1
        return arrived

    def _drain_learning(self) -> int:
        arrived = 0
        for _ in range(self._room()):
            try:
                frame, sender = self._socket.recvfrom(MAX_FRAME_BYTES + 1)
            except BlockingIOError:
                break
            except OSError as error:
                self._receive_error(error)
                break
            if sender != self.peer and not self._learn(sender):
                self.counters.rx_foreign += 1
                continue
            self.receive(frame)
            arrived += 1
        return arrived

    def _learn(self, sender: Address) -> bool:
        address = sender[0]
        if address not in self._local_addresses:
            if not ipaddress.IPv4Address(address).is_loopback:
                return False
            self._local_addresses.add(address)
        log.info("port peer learned", extra={"port": self.number, "peer": f"{address}:{sender[1]}"})
        self.peer = sender
        return True

    def _send(self, frame: bytes) -> bool:
        try:
            if self.fixed_peer:
                self._send_connected(frame)
            elif self.peer is None:
                self.counters.tx_no_peer += 1
                return False
            else:
                self._socket.sendto(frame, self.peer)
        except OSError as error:
            _count_send_error(self.counters, error)
            return False
        return True

    def _send_connected(self, frame: bytes) -> None:
        try:
            self._socket.send(frame)
        except ConnectionRefusedError:
            # The error belongs to an earlier frame; this one has not been sent yet.
            self.counters.tx_refused += 1
            self._socket.send(frame)

    def _receive_error(self, error: OSError) -> None:
        self.counters.rx_errors += 1
        log.warning("port receive failed", extra={"port": self.number, "error": str(error)})

    def read_counters(self) -> dict[str, int]:
        self.counters.rx_kernel_drops = _kernel_drops(self._socket)
        return super().read_counters()

    def describe(self) -> str:
        text = f"udp:{self.local[0]}:{self.local[1]}"
        return f"{text}:{self.peer[0]}:{self.peer[1]}" if self.fixed_peer and self.peer else text

    def close(self) -> None:
        super().close()
        self._socket.close()


# From linux/if_packet.h and linux/if_ether.h; the socket module does not name them all.
_ETH_P_ALL: Final = 0x0003
_SOL_PACKET: Final = 263
_PACKET_ADD_MEMBERSHIP: Final = 1
_PACKET_MR_PROMISC: Final = 1
_PACKET_AUXDATA: Final = 8
_PACKET_VNET_HDR: Final = 15
_PACKET_QDISC_BYPASS: Final = 20
_PACKET_IGNORE_OUTGOING: Final = 23  # Linux 4.20
_TP_STATUS_VLAN_VALID: Final = 1 << 4
_TP_STATUS_VLAN_TPID_VALID: Final = 1 << 6
_TPACKET_AUXDATA: Final = struct.Struct("=IIIHHHH")
# struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
_VNET_HEADER: Final = struct.Struct("=BBHHHH")
_VNET_NEEDS_CSUM: Final = 1
_VNET_NO_OFFLOAD: Final = bytes(_VNET_HEADER.size)
_PACKET_RX_RING: Final = 5
_PACKET_STATISTICS: Final = 6
_PACKET_VERSION: Final = 10
_TPACKET_V2: Final = 1
_RING_FRAMES: Final = 4096
_RING_STRIDE: Final = 2048
_RING_BLOCK_BYTES: Final = 64 << 10
# struct tpacket2_hdr, struct sockaddr_ll, alignment, virtio header, link header
_RING_HEAD_BYTES: Final = 96
_SIOCGIFMTU: Final = 0x8921
_SIOCETHTOOL: Final = 0x8946
# linux/ethtool.h: ETHTOOL_S{RXCSUM,TXCSUM,SG,TSO,UFO,GSO,GRO}
_OFFLOADS: Final = {
    "rx-checksum": 0x15,
    "tx-checksum": 0x17,
    "scatter-gather": 0x19,
    "tso": 0x1F,
    "ufo": 0x22,
    "gso": 0x24,
    "gro": 0x2C,
}
_ETHERNET_AND_VLAN_BYTES: Final = 18


@dataclass(frozen=True, slots=True)
class MappedRing:
    """Memory that the kernel fills with frames (TPACKET_V2)."""

    address: int
    frames: int
    stride: int
    """Bytes from one frame to the next."""


class InterfacePort(Port):
    """A network interface, by AF_PACKET.

    Hears what arrives there (promiscuous, not what the machine itself sends) and turns the
    interface's offloads off. veth still hands over frames whose sender left the checksum to the
    "hardware", and tags that it took off: both are put right here, so the program sees the frame
    as it would be on a wire. Segments that were to be split by hardware are counted and dropped.
    """

    kind = "if"

    def __init__(self, number: int, interface: str, options: PortOptions | None = None) -> None:
        super().__init__(number, options or PortOptions())
        self.interface = interface
        try:
            # Protocol 0 hears nothing until bind names the interface and ETH_P_ALL.
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except PermissionError as error:
            raise PortError(f"port {number}: if:{interface} needs CAP_NET_RAW") from error
        try:
            self._open(interface)
        except OSError as error:
            self._socket.close()
            raise PortError(f"port {number}: if:{interface}: {error}") from error

    def _open(self, interface: str) -> None:
        packets = self._socket
        packets.setblocking(False)
        index = socket.if_nametoindex(interface)
        packets.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        packets.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        packets.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
        _enlarge_buffers(packets)
        reply = fcntl.ioctl(packets, _SIOCGIFMTU, struct.pack("16si12x", interface.encode(), 0))
        self.mtu_bytes: int = struct.unpack_from("16si", reply)[1]
        self.max_frame_bytes = self.mtu_bytes + _ETHERNET_AND_VLAN_BYTES
        self._disable_offloads()
        packets.setsockopt(
            _SOL_PACKET,
            _PACKET_ADD_MEMBERSHIP,
            struct.pack("iHH8x", index, _PACKET_MR_PROMISC, 0),
        )
        packets.bind((interface, _ETH_P_ALL))
        self._sender: socket.socket | None = None
        self._ring: mmap.mmap | None = None

    def map_ring(self) -> MappedRing | None:
        """Let the kernel put received frames into memory that is mapped here, instead of handing
        them over one by one; None where it has no such memory. `drain` finds nothing from then
        on."""
        stride = _RING_STRIDE
        while stride < _RING_HEAD_BYTES + self.max_frame_bytes:
            stride += 2 * stride if stride == _RING_STRIDE else 2 * _RING_STRIDE
        block = max(stride, _RING_BLOCK_BYTES // stride * stride)
        blocks = _RING_FRAMES * stride // block
        frames = blocks * (block // stride)
        try:
            self._socket.setsockopt(_SOL_PACKET, _PACKET_VERSION, _TPACKET_V2)
            request = struct.pack("IIII", block, blocks, stride, frames)
            self._socket.setsockopt(_SOL_PACKET, _PACKET_RX_RING, request)
            self._ring = mmap.mmap(self._socket.fileno(), block * blocks)
        except OSError as error:
            log.info("no mapped ring", extra={"interface": self.interface, "error": str(error)})
            return None
        self._ring_view = (ctypes.c_uint8 * (block * blocks)).from_buffer(self._ring)
        return MappedRing(ctypes.addressof(self._ring_view), frames, stride)

    def open_sender(self) -> int:
        """A descriptor that only sends, frames without the virtio header and past the queueing
        discipline; PortError where the kernel refuses."""
        try:
            sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
            sender.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
            _enlarge_buffers(sender)
            sender.bind((self.interface, 0))
        except OSError as error:
            raise PortError(f"port {self.number}: if:{self.interface}: {error}") from error
        self._sender = sender
        return sender.fileno()

    def _disable_offloads(self) -> None:
        for name, command in _OFFLOADS.items():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", self.interface.encode(), ctypes.addressof(value))
            try:
                fcntl.ioctl(self._socket, _SIOCETHTOOL, request)
            except OSError as error:
                # Drivers lack some of them; what matters is caught again on reception.
                log.debug(
                    "offload not switched off",
                    extra={"interface": self.interface, "offload": name, "error": str(error)},
                )

    def fileno(self) -> int | None:
        return self._socket.fileno()

    def drain(self) -> int:
        size = _VNET_HEADER.size + MAX_FRAME_BYTES + 1
        aux_space = socket.CMSG_SPACE(_TPACKET_AUXDATA.size)
        arrived = 0
        for _ in range(self._room()):
            try:
                data, ancillary, _flags, _address = self._socket.recvmsg(size, aux_space)
            except BlockingIOError:
                break
            except OSError as error:
                self.counters.rx_errors += 1
                if error.errno != errno.ENETDOWN:
                    log.warning(
                        "port receive failed", extra={"port": self.number, "error": str(error)}
                    )
                break
            arrived += 1
            frame = self._as_on_the_wire(data, ancillary)
            if frame is None:
                self.counters.rx_oversize += 1
            else:
                self.receive(frame)
        return arrived

    def _as_on_the_wire(self, data: bytes, ancillary: list[tuple[int, int, bytes]]) -> bytes | None:
        """The frame with checksum and tag put right; None for an unsplit segment."""
        flags, gso_type, _, _, start, offset = _VNET_HEADER.unpack_from(data)
        frame = data[_VNET_HEADER.size :]
        if gso_type or len(frame) > self.max_frame_bytes:
            return None
        if flags & _VNET_NEEDS_CSUM:
            frame = complete_checksum(frame, start, offset)
        for level, kind, payload in ancillary:
            if level == _SOL_PACKET and kind == _PACKET_AUXDATA:
                status, _, _, _, _, tci, tpid = _TPACKET_AUXDATA.unpack_from(payload)
                if status & _TP_STATUS_VLAN_VALID:
                    if not status & _TP_STATUS_VLAN_TPID_VALID:
                        tpid = 0x8100
                    frame = frame[:12] + struct.pack("!HH", tpid, tci) + frame[12:]
        return frame

    def _send(self, frame: bytes) -> bool:
        try:
            self._socket.send(_VNET_NO_OFFLOAD + frame)
        except OSError as error:
            _count_send_error(self.counters, error)
            return False
        return True

    def read_counters(self) -> dict[str, int]:
        if self._ring is None:
            self.counters.rx_kernel_drops = _kernel_drops(self._socket)
        else:
            # struct tpacket_stats; reading it sets it back to 0.
            stats = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
            self.counters.rx_kernel_drops += struct.unpack("II", stats)[1]
        return super().read_counters()

    def describe(self) -> str:
        return f"if:{self.interface}"

    def close(self) -> None:
        super().close()
        if self._sender is not None:
            self._sender.close()
        self._socket.close()


def complete_checksum(frame: bytes, start: int, offset: int) -> bytes:
    """Do what the sender left to the hardware: the Internet checksum (RFC 1071) of everything
    from `start`, where the field at `start + offset` holds the pseudo-header's sum.

    A frame that is too short for its own instructions is returned as it is.
    """
    at = start + offset
    if at + 2 > len(frame):
        return frame
    covered = frame[start:] if (len(frame) - start) % 2 == 0 else frame[start:] + b"\0"
    # A number modulo 0xffff is the one's complement sum of its 16-bit digits.
    total = int.from_bytes(covered, "big")
    checksum = 0xFFFF - (total % 0xFFFF or (0xFFFF if total else 0))
    if checksum == 0 and offset == 6:
        checksum = 0xFFFF  # UDP: 0 would mean "no checksum" (RFC 768)
    return frame[:at] + checksum.to_bytes(2, "big") + frame[at + 2 :]


def _count_send_error(counters: PortCounters, error: OSError) -> None:
    if isinstance(error, BlockingIOError) or error.errno == errno.ENOBUFS:
        counters.tx_busy += 1
    elif error.errno == errno.EMSGSIZE:
        counters.tx_too_long += 1
    else:
        counters.tx_errors += 1


_SO_MEMINFO: Final = 55  # asm-generic/socket.h; nine u32, the last counts drops
_MEMINFO: Final = struct.Struct("=9I")


def _kernel_drops(endpoint: socket.socket) -> int:
    """Frames that the kernel dropped before this socket since it was made."""
    info = endpoint.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    return int(_MEMINFO.unpack(info)[8])


def _enlarge_buffers(endpoint: socket.socket) -> None:
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


@dataclass(frozen=True, slots=True)
class PortSpec:
    """A parsed `N=udp:LOCALIP:LPORT[:PEERIP:PPORT]`, `N=if:NAME` or `N=xdp:NAME`."""

    number: int
    kind: str
    local: Address | None = None
    peer: Address | None = None
    interface: str = ""

    def open(self, options: PortOptions) -> Port:
        """Open the port; PortError says why not."""
        if self.kind == "udp":
            assert self.local is not None
            return UdpTunnelPort(self.number, self.local, self.peer, options)
        if self.kind == "xdp":
            from kvcast.switchsim.ports.xdp import XdpPort

            return XdpPort(self.number, self.interface, options)
        return InterfacePort(self.number, self.interface, options)


def parse_port(text: str, *, max_port: int = 510) -> PortSpec:
    """One --port value; PortError says what is wrong with it."""
    number_text, equals, spec = text.partition("=")
    if not equals or not number_text.isascii() or not number_text.isdigit():
        raise PortError(f"{text!r} is not N=udp:..., N=if:NAME or N=xdp:NAME")
    number = int(number_text)
    if not 0 <= number <= max_port:
        raise PortError(f"{text!r}: port numbers are 0 to {max_port}")
    kind, _, rest = spec.partition(":")
    if kind == "udp":
        parts = rest.split(":")
        if len(parts) not in (2, 4):
            raise PortError(f"{text!r} is not N=udp:LOCALIP:LPORT[:PEERIP:PPORT]")
        local = _parse_address(text, parts[0], parts[1])
        peer = _parse_address(text, parts[2], parts[3]) if len(parts) == 4 else None
        if peer is not None and peer[1] == 0:
            raise PortError(f"{text!r}: the peer's port cannot be 0")
        return PortSpec(number, "udp", local=local, peer=peer)
    if kind in ("if", "xdp"):
        name = rest.encode()
        if not 0 < len(name) < 16 or b"/" in name or os.fsdecode(name).split() != [rest]:
            raise PortError(f"{text!r}: not an interface name")
        return PortSpec(number, kind, interface=rest)
    raise PortError(f"{text!r}: kinds of ports are udp, if and xdp")


def _parse_address(text: str, host: str, port: str) -> Address:
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError as error:
        raise PortError(f"{text!r}: {host!r} is not an IPv4 address") from error
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise PortError(f"{text!r}: {port!r} is not a UDP port")
    return str(address), int(port)
