"""The datagram adapters: sockets and the timer around the agent's cores.

Owns: the UDP socket, its buffers, what waits to be sent, and when the cores' timer is called.
Must not know: what a frame means. Two ways to the network:

- `UdpTransport`: a kernel UDP socket on the node's own address; the kernel does the rest.
- `TunnelTransport`: Ethernet frames, each in one datagram to a software switch's port, so that a
  node needs no interface and no root. The frame's MAC, address and port are checked here, as a
  network card and a kernel would.

Frames travel one to a datagram, but where the kernel can it hands a run of them over in one piece
(UDP_GRO), and takes a run of equal length from a tunnel in one piece (UDP_SEGMENT); on loopback
that takes 0.13 us a frame instead of 3.8 us. `UdpTransport` does not send so: a switch in software
on a veth would get the pieces unsegmented.

Received frames are read in rounds of some `RECEIVE_ROUND`, then the cores act on them, then
answers go out in rounds of at most `SEND_ROUND`; so neither direction starves the other or the
local API. What the socket does not take waits in a queue of `SEND_QUEUE` frames; while anything
waits the home is asked for nothing more, and a READ that finds the queue full is dropped and
counted: the requester's timer repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.pool import Pool
from kvcast.protocol.messages.ethernet import (
    FRAME_OVERHEAD_BYTES,
    Encapsulation,
    Endpoint,
    parse_ip,
    parse_mac,
    unwrap,
)
from kvcast.protocol.messages.wire import (
    CHUNK_BYTES,
    HEADER_BYTES,
    OP_DATA,
    WireError,
    decode,
    encode,
    run_from,
)

log = logging.getLogger("kvcast.hostagent.network.datagrams")

RECEIVE_ROUND: Final = 256
"""Frames after which the cores act; one piece more may come with the last of them."""
SEND_ROUND: Final = 64
SEND_QUEUE: Final = 1024
_RECEIVE_BYTES: Final = 65_536
_DATA_BYTES: Final = HEADER_BYTES + CHUNK_BYTES
_UDP_SEGMENT: Final = 103  # linux/udp.h
_UDP_GRO: Final = 104
_GRO_SPACE: Final = socket.CMSG_SPACE(4)
_PIECE_BYTES: Final = 64_000
"""What is sent in one piece: IPv4's 65,535 bytes, less headers and some."""
_PIECE_FRAMES: Final = 60  # the kernel's UDP_MAX_SEGMENTS was 64 for long
_NO_OFFLOAD: Final = (errno.EINVAL, errno.EIO, errno.EOPNOTSUPP, errno.ENOPROTOOPT)
_KERNEL_BYTES_A_FRAME: Final = 2304
"""What the kernel charges a socket's buffer for a datagram of up to 2 KiB, measured."""
_FULL_PAUSE_S: Final = 0.001
"""How soon a timer that is due is looked at again while the socket takes nothing."""
_SO_MEMINFO: Final = 55  # asm-generic/socket.h; nine u32, the last counts drops
_MEMINFO: Final = struct.Struct("=9I")
_SO_SNDBUFFORCE: Final = 32
_SO_RCVBUFFORCE: Final = 33


def set_buffer(sock: socket.socket, size_bytes: int, *, receive: bool) -> int:
    """Ask for a socket buffer, by force where we may; returns what the kernel gave, in bytes."""
    option = socket.SO_RCVBUF if receive else socket.SO_SNDBUF
    force = _SO_RCVBUFFORCE if receive else _SO_SNDBUFFORCE
    try:
        sock.setsockopt(socket.SOL_SOCKET, force, size_bytes)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, option, size_bytes)
    return sock.getsockopt(socket.SOL_SOCKET, option)


def _kernel_drops(sock: socket.socket) -> int:
    """Datagrams that the kernel has dropped before this socket, since it was made."""
    return int(_MEMINFO.unpack(sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size))[8])


def credit_of_buffer(receive_buffer_bytes: int) -> int:
    """How many segments of 64 frames a receive buffer holds, at least 1, at most 64: the credit
    that a requester may have in flight without the kernel dropping answers."""
    return max(1, min(64, receive_buffer_bytes // (64 * _KERNEL_BYTES_A_FRAME)))


class Transport(ABC):
    """What both adapters share. Make it, then `start` it on the running loop."""

    def __init__(self, core: AgentCore, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # a kernel before 5.0: each datagram comes alone
            sock.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
        self._core = core
        self._socket = sock
        self._metrics = core.metrics
        self._queue: deque[tuple[int, bytes]] = deque()
        self._pool: Pool | None = None
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._soon = False
        self._closed = False
        self.dispatch_calls: Callable[[], None] = lambda: None
        """Makes the bulk calls that wait in the core's outbox; set by whoever assembles."""

    def start(self) -> None:
        """Begin to receive, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def close(self) -> None:
        """Stop, and close the socket."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        if self._writing:
            self._loop.remove_writer(self._socket.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()

    @property
    def queue_length(self) -> int:
        """Frames that wait for the socket."""
        return len(self._queue)

    # --- in -----------------------------------------------------------------------------------

    @abstractmethod
    def _take(self, now: float, data: bytes, at: int, end: int, stride: int, sender: str) -> int:
        """Hand the frame at `data[at : at + stride]`, sent from the address `sender`, to the core,
        and those up to `end` that make a run with it; returns how many."""

    @abstractmethod
    def _new_pool(self, pool: Pool) -> None:
        """The map has changed."""

    @abstractmethod
    def _send(self, node: int, datagram: bytes) -> None:
        """Send to a node of the map; BlockingIOError if the socket is full."""

    def _send_all(self, datagrams: list[tuple[int, bytes]]) -> int:
        """Send what the socket takes; returns how many were dealt with."""
        for sent, (node, datagram) in enumerate(datagrams):
            try:
                self._send(node, datagram)
                self._metrics.frames_sent_total += 1
            except BlockingIOError:
                return sent
            except OSError:
                self._metrics.socket_errors_total += 1
        return len(datagrams)

    def _follow_pool(self) -> None:
        pool = self._core.pool
        if pool is not self._pool and pool is not None:
            self._pool = pool
            self._new_pool(pool)

    def _readable(self) -> None:
        self._follow_pool()
        now = self._loop.time()
        metrics = self._metrics
        taken = 0
        while taken < RECEIVE_ROUND:
            try:
                data, offload, _flags, address = self._socket.recvmsg(_RECEIVE_BYTES, _GRO_SPACE)
            except BlockingIOError:
                break
            except OSError:
                # The peer's port is closed (ICMP), or the interface is down: frames are lost.
                metrics.socket_errors_total += 1
                break
            stride = _stride(offload) or len(data)
            at, end = 0, len(data)
            while True:
                try:
                    count = self._take(now, data, at, end, min(stride, end - at), address[0])
                except WireError:
                    metrics.frames_malformed_total += 1
                    count = 1
                metrics.frames_received_total += count
                taken += count
                at += count * stride
                if at >= end:
                    break
        metrics.frames_dropped_receiving_total = _kernel_drops(self._socket)
        self._core.after_receiving(now)
        self.pump()

    # --- out ----------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what the cores have to send, make their calls, and set the timer; to be called
        after any event."""
        if self._core.outbox.calls:
            self.dispatch_calls()
        if self._closed:
            return
        self._follow_pool()
        now = self._loop.time()
        frames = self._core.frames_to_send(now, 0 if self._queue else SEND_ROUND)
        if frames:
            datagrams = [(node, encode(frame)) for node, frame in frames]
            sent = 0 if self._queue else self._send_all(datagrams)
            for node, datagram in datagrams[sent:]:
                self._enqueue(node, datagram)
        if self._queue and not self._writing:
            self._writing = True
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._set_timer(now)

    def _enqueue(self, node: int, datagram: bytes) -> None:
        if len(self._queue) >= SEND_QUEUE:
            self._metrics.frames_dropped_sending_total += 1
        else:
            self._queue.append((node, datagram))

    def _writable(self) -> None:
        queue = self._queue
        for _ in range(SEND_ROUND):
            if not queue:
                break
            node, datagram = queue[0]
            try:
                self._send(node, datagram)
                self._metrics.frames_sent_total += 1
            except BlockingIOError:
                return
            except OSError:
                self._metrics.socket_errors_total += 1
            queue.popleft()
        if not queue:
            self._writing = False
            self._loop.remove_writer(self._socket.fileno())
            self.pump()

    # --- time ---------------------------------------------------------------------------------

    def _set_timer(self, now: float) -> None:
        if self._queue:
            # The home waits for the socket, and `_writable` will pump: only fetches have timers.
            when = self._core.reads.get_timer()
            if when is not None and when <= now:
                when = now + _FULL_PAUSE_S
        else:
            when = self._core.get_timer(now)
        if when is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        if when <= now:
            if not self._soon:
                self._soon = True
                self._loop.call_soon(self._on_soon)
            return
        if self._timer is not None:
            if self._timer_at <= when and not self._timer.cancelled():
                return  # it comes up early, finds what is due, and is set anew
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_soon(self) -> None:
        self._soon = False
        self._due()

    def _on_timer(self) -> None:
        self._timer = None
        self._due()

    def _due(self) -> None:
        if self._closed:
            return
        self._core.handle_timer(self._loop.time())
        self.pump()


class UdpTransport(Transport):
    """Datagrams by the kernel's UDP, to and from the addresses in the map."""

    def __init__(self, core: AgentCore, sock: socket.socket) -> None:
        super().__init__(core, sock)
        self._index_by_host: dict[str, int] = {}
        self._address_by_index: dict[int, tuple[str, int]] = {}

    def _new_pool(self, pool: Pool) -> None:
        self._index_by_host = {node.ip: index for index, node in pool.nodes.items()}
        self._address_by_index = {
            index: (node.ip, node.udp_port) for index, node in pool.nodes.items()
        }

    def _take(self, now: float, data: bytes, at: int, end: int, stride: int, sender: str) -> int:
        frame = decode(memoryview(data)[at : at + stride])
        source = self._index_by_host.get(sender)
        if source is None:
            self._metrics.frames_unknown_source_total += 1
            return 1
        if frame.op != OP_DATA:
            self._core.receive(now, source, frame)
            return 1
        run = run_from(frame, data, at, end)
        self._core.receive_run(now, source, run)
        return len(run.chunks)

    def _send(self, node: int, datagram: bytes) -> None:
        address = self._address_by_index.get(node)
        if address is None:  # left the map while its answer waited
            self._metrics.frames_addressee_left_total += 1
            return
        self._socket.sendto(datagram, address)


class TunnelTransport(Transport):
    """Ethernet frames in datagrams; `sock` is connected to the switch's port."""

    def __init__(self, core: AgentCore, sock: socket.socket, local: Endpoint) -> None:
        super().__init__(core, sock)
        self._local = local
        self._pieces = True
        self._index_by_ip: dict[int, int] = {}
        self._wrap_by_index: dict[int, Encapsulation] = {}

    def _new_pool(self, pool: Pool) -> None:
        self._index_by_ip = pool.index_by_ip
        self._wrap_by_index = {
            index: Encapsulation(
                self._local, Endpoint(parse_mac(node.mac), parse_ip(node.ip), node.udp_port)
            )
            for index, node in pool.nodes.items()
        }

    def _take(self, now: float, data: bytes, at: int, end: int, stride: int, sender: str) -> int:
        metrics = self._metrics
        outer = unwrap(memoryview(data)[at : at + stride])
        if outer.dst != self._local:
            metrics.frames_misaddressed_total += 1
            return 1
        frame = decode(outer.payload)
        source = self._index_by_ip.get(outer.src.ip)
        if source is None:
            metrics.frames_unknown_source_total += 1
            return 1
        if frame.op != OP_DATA:
            self._core.receive(now, source, frame)
            return 1
        lead = FRAME_OVERHEAD_BYTES
        # A frame that Ethernet padded stands alone, since those behind it lie elsewhere; and so
        # does one with a UDP checksum, since theirs must be verified too.
        alone = stride != lead + _DATA_BYTES or any(data[at + lead - 2 : at + lead])
        run = run_from(frame, data, at + lead, 0 if alone else end, lead)
        self._core.receive_run(now, source, run)
        return len(run.chunks)

    def _send(self, node: int, datagram: bytes) -> None:
        wrap = self._wrap_by_index.get(node)
        if wrap is None:  # left the map while its answer waited
            self._metrics.frames_addressee_left_total += 1
            return
        self._socket.send(wrap.wrap(datagram))

    def _send_all(self, datagrams: list[tuple[int, bytes]]) -> int:
        """As the base does, but runs of frames of one length in one piece each."""
        done = 0
        while done < len(datagrams) and self._pieces:
            length = len(datagrams[done][1])
            most = min(_PIECE_FRAMES, _PIECE_BYTES // (length + FRAME_OVERHEAD_BYTES))
            piece: list[bytes] = []
            upto = done
            while upto < len(datagrams) and len(piece) < most:
                node, datagram = datagrams[upto]
                wrap = self._wrap_by_index.get(node)
                if wrap is None or len(datagram) != length:
                    break
                piece.append(wrap.wrap(datagram))
                upto += 1
            if len(piece) < 2:
                upto = done + 1
                if super()._send_all(datagrams[done:upto]) == 0:
                    return done
            elif not self._send_piece(piece, length + FRAME_OVERHEAD_BYTES):
                return done
            done = upto
        return done + super()._send_all(datagrams[done:])

    def _send_piece(self, frames: list[bytes], length: int) -> bool:
        """Send frames of one length in one piece; False if the socket is full."""
        offload = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("=H", length))]
        try:
            self._socket.sendmsg(frames, offload)
            self._metrics.frames_sent_total += len(frames)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_OFFLOAD:
                self._pieces = False
                log.info("frames are sent one by one, since UDP_SEGMENT fails: %s", error)
        # An error of an earlier datagram (ICMP) is reported once, so most of these will go.
        for sent, frame in enumerate(frames):
            try:
                self._socket.send(frame)
                self._metrics.frames_sent_total += 1
            except BlockingIOError:
                self._metrics.frames_dropped_sending_total += len(frames) - sent
                break
            except OSError:
                self._metrics.socket_errors_total += 1
        return True


def _stride(offload: list[tuple[int, int, bytes]]) -> int:
    """The length of each datagram in a piece that the kernel put together; 0 if it is one."""
    for level, kind, value in offload:
        if level == socket.IPPROTO_UDP and kind == _UDP_GRO and len(value) >= 4:
            return int(struct.unpack_from("=i", value)[0])
    return 0


def open_udp(host: str, port: int, buffer_bytes: int) -> tuple[socket.socket, int]:
    """A bound UDP socket, and its receive buffer in bytes."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        received = set_buffer(sock, buffer_bytes, receive=True)
        set_buffer(sock, buffer_bytes, receive=False)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock, received


def open_tunnel(
    local: tuple[str, int], peer: tuple[str, int], buffer_bytes: int
) -> tuple[socket.socket, int]:
    """A UDP socket connected to a switch's port, and its receive buffer in bytes. Connected, so
    that the kernel drops what anybody else sends to it."""
    sock, received = open_udp(*local, buffer_bytes)
    try:
        sock.connect(peer)
    except BaseException:
        sock.close()
        raise
    return sock, received
