"""The datagram adapters: sockets and the timer around the agent's cores.

Owns: the UDP socket, its buffers, what waits to be sent, and when the cores' timer is called.
Must not know: what a frame means. Two ways to the network:

- `UdpTransport`: a kernel UDP socket on the node's own address; the kernel does the rest.
- `TunnelTransport`: Ethernet frames, each in one datagram to a software switch's port, so that a
  node needs no interface and no root. The frame's MAC, address and port are checked here, as a
  network card and a kernel would.

Received frames are read in rounds of at most `RECEIVE_ROUND`, then the cores act on them, then
answers go out in rounds of at most `SEND_ROUND`; so neither direction starves the other or the
local API. What the socket does not take waits in a queue of `SEND_QUEUE` frames; while anything
waits the owner is asked for nothing more, and a READ that finds the queue full is dropped and
counted: the requester's timer repeats it.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core import AgentCore
from kvcast.hostagent.pool import Pool
from kvcast.protocol.ethernet import Encapsulation, Endpoint, parse_ip, parse_mac, unwrap
from kvcast.protocol.wire import MAX_DATAGRAM_BYTES, WireError, decode, encode

RECEIVE_ROUND: Final = 64
SEND_ROUND: Final = 64
SEND_QUEUE: Final = 1024
_RECEIVE_BYTES: Final = 2048
_KERNEL_BYTES_A_FRAME: Final = 2304
"""What the kernel charges a socket's buffer for a datagram of up to 2 KiB, measured."""
_FULL_PAUSE_S: Final = 0.001
"""How soon a timer that is due is looked at again while the socket takes nothing."""
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


def credit_of_buffer(receive_buffer_bytes: int) -> int:
    """How many segments of 64 frames a receive buffer holds, at least 1, at most 64: the credit
    that a requester may have in flight without the kernel dropping answers."""
    return max(1, min(64, receive_buffer_bytes // (64 * _KERNEL_BYTES_A_FRAME)))


class Transport(ABC):
    """What both adapters share. Make it, then `start` it on the running loop."""

    def __init__(self, core: AgentCore, sock: socket.socket) -> None:
        sock.setblocking(False)
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
    def _receive_one(self, now: float) -> None:
        """Receive one datagram and hand its frame to the core; BlockingIOError if none waits."""

    @abstractmethod
    def _new_pool(self, pool: Pool) -> None:
        """The map has changed."""

    @abstractmethod
    def _send(self, node: int, datagram: bytes) -> None:
        """Send to a node of the map; BlockingIOError if the socket is full."""

    def _follow_pool(self) -> None:
        pool = self._core.pool
        if pool is not self._pool and pool is not None:
            self._pool = pool
            self._new_pool(pool)

    def _readable(self) -> None:
        self._follow_pool()
        now = self._loop.time()
        metrics = self._metrics
        receive_one = self._receive_one
        for _ in range(RECEIVE_ROUND):
            try:
                receive_one(now)
            except BlockingIOError:
                break
            except WireError:
                metrics.frames_malformed_total += 1
            except OSError:
                # The peer's port is closed (ICMP), or the interface is down: frames are lost.
                metrics.socket_errors_total += 1
                break
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
        for node, frame in frames:
            datagram = encode(frame)
            if self._queue:
                self._enqueue(node, datagram)
                continue
            try:
                self._send(node, datagram)
                self._metrics.frames_sent_total += 1
            except BlockingIOError:
                self._enqueue(node, datagram)
            except OSError:
                self._metrics.socket_errors_total += 1
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
            # The owner waits for the socket, and `_writable` will pump: only fetches have timers.
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

    def _receive_one(self, now: float) -> None:
        datagram, address = self._socket.recvfrom(_RECEIVE_BYTES)
        self._metrics.frames_received_total += 1
        frame = decode(datagram)
        source = self._index_by_host.get(address[0])
        if source is None:
            self._metrics.frames_unknown_source_total += 1
            return
        self._core.receive(now, source, frame)

    def _send(self, node: int, datagram: bytes) -> None:
        address = self._address_by_index.get(node)
        if address is None:  # left the map while its answer waited
            self._metrics.frames_unknown_source_total += 1
            return
        self._socket.sendto(datagram, address)


class TunnelTransport(Transport):
    """Ethernet frames in datagrams; `sock` is connected to the switch's port."""

    def __init__(self, core: AgentCore, sock: socket.socket, local: Endpoint) -> None:
        super().__init__(core, sock)
        self._local = local
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

    def _receive_one(self, now: float) -> None:
        data = self._socket.recv(_RECEIVE_BYTES)
        metrics = self._metrics
        metrics.frames_received_total += 1
        outer = unwrap(data)
        if outer.dst != self._local:
            metrics.frames_misaddressed_total += 1
            return
        frame = decode(outer.payload)
        source = self._index_by_ip.get(outer.src.ip)
        if source is None:
            metrics.frames_unknown_source_total += 1
            return
        self._core.receive(now, source, frame)

    def _send(self, node: int, datagram: bytes) -> None:
        wrap = self._wrap_by_index.get(node)
        if wrap is None:  # left the map while its answer waited
            self._metrics.frames_unknown_source_total += 1
            return
        self._socket.send(wrap.wrap(datagram))


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


assert MAX_DATAGRAM_BYTES + 42 < _RECEIVE_BYTES
