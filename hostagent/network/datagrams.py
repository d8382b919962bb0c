"""The datagram adapters: sockets and the timer around the agent's cores.

Owns: the UDP socket, and when it is read, when what waits is sent, and when the cores' timer is
called. Must not know: what a frame means, or how it gets in and out (`mover`). Two ways to the
network:

- `UdpTransport`: a kernel UDP socket on the node's own address; the kernel does the rest.
- `TunnelTransport`: Ethernet frames, each in one datagram to a software switch's port, so that a
  node needs no interface and no root. The frame's MAC, address and port are checked here, as a
  network card and a kernel would.

Frames travel one to a datagram, but where the kernel can it hands a run of them over in one piece
(UDP_GRO), and takes a run of equal length from a tunnel in one piece (UDP_SEGMENT). `UdpTransport`
sends so only if it is told to: a switch in software on a veth would get the pieces unsegmented.

Received frames are read in rounds of some `RECEIVE_ROUND`, then the cores act on them, then
answers go out in rounds of at most `SEND_ROUND`; so neither direction starves the other or the
local API. Before a fetch may take silence for a loss, what lies in the socket is read.
What the socket does not take waits in the mover's queue; while anything waits the home
is asked for nothing more, and a READ that finds the queue full is dropped and counted: the
requester's timer repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.network.mover import ROUND_FRAMES, Mover
from kvcast.native.linux import UDP_GRO
from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint, parse_ip, parse_mac
from kvcast.protocol.messages.wire import decode
from kvcast.protocol.placement import Arrived
from kvcast.service.sockets import kernel_drops, set_buffer

log = logging.getLogger("kvcast.hostagent.network.datagrams")

RECEIVE_ROUND: Final = ROUND_FRAMES
"""Frames after which the cores act; one message more may come with the last of them."""
SEND_ROUND: Final = 256
"""Four segments."""
ROUNDS_BEFORE_TIMERS: Final = 16
"""Rounds that are read, at most, before a fetch whose time is over hears of it: what may be in
flight to an agent at once."""
_KERNEL_BYTES_A_FRAME: Final = 2304
"""What the kernel charges a socket's buffer for a datagram of up to 2 KiB, measured."""
_FULL_PAUSE_S: Final = 0.001
"""How soon a timer that is due is looked at again while the socket takes nothing."""


def credit_of_buffer(receive_buffer_bytes: int) -> int:
    """How many segments of 64 frames a receive buffer holds, at least 1, at most 64: the credit
    that a requester may have in flight without the kernel dropping answers."""
    return max(1, min(64, receive_buffer_bytes // (64 * _KERNEL_BYTES_A_FRAME)))


class Transport(ABC):
    """What both adapters share. Make it, then `start` it on the running loop."""

    def __init__(self, core: AgentCore, sock: socket.socket, mover: Mover) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # a kernel before 5.0: each datagram comes alone
            sock.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
        self._core = core
        self.socket = sock
        self.mover = mover
        self._joins = mover.joins
        self._placement = core.requester.placement
        self._placement.choose = self._choose
        if core.lane is not None:
            core.lane.send = mover.send_jobs
        self._metrics = core.metrics
        self._pool: Pool | None = None
        self._now = 0.0
        """When what is being received was received."""
        self._heard = False
        """The cores were told something of it, but for what the lane has answered."""
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
        self._loop.add_reader(self.socket.fileno(), self._readable)

    def close(self) -> None:
        """Stop, and close the socket."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self.socket.fileno())
        if self._writing:
            self._loop.remove_writer(self.socket.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self.socket.close()

    @abstractmethod
    def _new_pool(self, pool: Pool) -> None:
        """The map has changed: tell the mover who can be sent to."""

    def _follow_pool(self) -> None:
        pool = self._core.pool
        if pool is not self._pool and pool is not None:
            self._pool = pool
            self._placement.know(pool.index_by_ip)
            self._new_pool(pool)

    # --- in -----------------------------------------------------------------------------------

    def _readable(self) -> None:
        self._follow_pool()
        now = self._now = self._loop.time()
        metrics, mover, placement = self._metrics, self.mover, self._placement
        lane = self._core.open_lane(now, 0 if mover.waiting else SEND_ROUND)
        instead = None if lane is None else lane.place
        self._heard = False
        taken = 0
        while taken < RECEIVE_ROUND:
            pieces = mover.receive()
            if not pieces:
                break
            placement.place(mover.pieces, pieces, self._placed, self._frame, instead=instead)
            taken += self._count_received()
            if mover.drained:
                break
        metrics.frames_dropped_receiving_total = kernel_drops(self.socket)
        # What the lane has sent; or it was an error that woke us.
        self._count_sent()
        self._core.after_receiving(now, heard=self._heard)
        if self._heard or mover.waiting:
            self.pump()

    def go_on(self, why: int, pieces: int) -> None:
        """Frames were taken in compiled code, up to these pieces, of which `place` has said why it
        stopped."""
        self._follow_pool()
        self._now = self._loop.time()
        lane = self._core.open_lane(self._now, 0 if self.mover.waiting else SEND_ROUND)
        instead = None if lane is None else lane.place
        mine = self._placed, self._frame
        self._placement.go_on(why, self.mover.pieces, pieces, *mine, instead=instead)
        self._count_received()
        self._count_sent()
        self._core.after_receiving(self._now)
        self.pump()

    def open_lane(self, now: float) -> None:
        """Frames may be taken in compiled code from now on."""
        self._follow_pool()
        self._core.open_lane(now, 0 if self.mover.waiting else SEND_ROUND)

    def close_lane(self, now: float) -> bool:
        """No more; whether the lane has answered any."""
        return self._core.after_lane(now)

    def count_frames(self) -> None:
        """Frames were received, and sent, in compiled code."""
        self._count_received()
        self._metrics.frames_dropped_receiving_total = kernel_drops(self.socket)
        self._count_sent()

    def _count_received(self) -> int:
        metrics = self._metrics
        counts = self._placement.take_counts()
        metrics.frames_received_total += counts.frames
        metrics.frames_malformed_total += counts.malformed
        metrics.frames_misaddressed_total += counts.misaddressed
        metrics.frames_unknown_source_total += counts.unknown_source
        return counts.frames

    def _placed(self, arrivals: list[Arrived]) -> None:
        self._heard = True
        self._core.placed(self._now, arrivals)

    def _choose(self, source: int, datagram: bytes) -> bool:
        self._heard = True
        return self._core.choose(self._now, source, decode(datagram))

    def _frame(self, source: int, datagram: bytes) -> None:
        self._heard = True
        self._core.receive(self._now, source, decode(datagram))

    # --- out ----------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what the cores have to send, make their calls, and set the timer; to be called
        after any event."""
        if self._core.outbox.waits:
            self.dispatch_calls()
        if self._closed:
            return
        self._follow_pool()
        now = self._loop.time()
        answers = self._core.answers_to_send(now, 0 if self.mover.waiting else SEND_ROUND)
        if answers:
            self.mover.send(answers)
            self._count_sent()
        if not self._writing and self.mover.waiting:
            self._writing = True
            self._loop.add_writer(self.socket.fileno(), self._writable)
        self._set_timer(now)

    def _writable(self) -> None:
        self.mover.send_waiting()
        self._count_sent()
        if not self.mover.waiting:
            self._writing = False
            self._loop.remove_writer(self.socket.fileno())
            self.pump()

    def _count_sent(self) -> None:
        metrics = self._metrics
        moved = self.mover.take_counts()
        metrics.frames_sent_total += moved.sent
        metrics.frames_dropped_sending_total += moved.dropped
        metrics.frames_addressee_left_total += moved.left
        metrics.socket_errors_total += moved.errors
        if self._joins and not self.mover.joins:
            self._joins = False
            log.info("frames are sent one by one, since UDP_SEGMENT fails")

    # --- time ---------------------------------------------------------------------------------

    def _set_timer(self, now: float) -> None:
        if self.mover.waiting or self._core.writing.full:
            # The home waits for the socket, or for the card, which will pump: only fetches have
            # timers.
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
        if not self._closed:
            self._due()

    def _on_timer(self) -> None:
        self._timer = None
        self._due()

    def _due(self) -> None:
        # A process that had no processor for a while finds its time-outs over, and in the socket
        # what it would ask for again.
        overdue_at = self._core.reads.get_timer()
        if overdue_at is not None and overdue_at <= self._loop.time():
            for _ in range(ROUNDS_BEFORE_TIMERS):
                self._readable()
                if self._closed or self.mover.drained:
                    break
        if self._closed:
            return
        self._core.handle_timer(self._loop.time())
        self.pump()


class UdpTransport(Transport):
    """Datagrams by the kernel's UDP, to and from the addresses in the map."""

    def __init__(self, core: AgentCore, sock: socket.socket, *, joins: bool = False) -> None:
        """`joins`: let the kernel, or the network card, split runs of frames (UDP_SEGMENT)."""
        super().__init__(core, sock, Mover(sock, connected=False, joins=joins))

    def _new_pool(self, pool: Pool) -> None:
        self.mover.know({index: (node.ip, node.udp_port) for index, node in pool.nodes.items()}, {})


class TunnelTransport(Transport):
    """Ethernet frames in datagrams; `sock` is connected to the switch's port."""

    def __init__(self, core: AgentCore, sock: socket.socket, local: Endpoint) -> None:
        super().__init__(core, sock, Mover(sock, connected=True, joins=True))
        self._local = local
        self._placement.unwrap_for(local)

    def _new_pool(self, pool: Pool) -> None:
        wraps = {
            index: Encapsulation(
                self._local, Endpoint(parse_mac(node.mac), parse_ip(node.ip), node.udp_port)
            )
            for index, node in pool.nodes.items()
        }
        self.mover.know({}, wraps)


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
