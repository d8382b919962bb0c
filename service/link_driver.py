"""Drives a connection's core (`kvcast.protocol.links`) over an asyncio transport.

Owns: moving bytes between a transport and a core, the core's timer, making a connection, and
closing one. Must not know: what is said. Every TCP link of the daemons is driven by this, in both
roles.

Without TLS the driver reads and writes the socket itself, and the transport only keeps it open:
blocks go straight from where they lie to the kernel and from the kernel to where they belong. (A
transport's `write` copies what the socket does not take, and a transport does not read into several
places at once.) With TLS the transport does both, and blocks are copied once on their way out.
Everything else passes through one scratch buffer, which all drivers may share, since what is in it
is used at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

from kvcast.protocol.links.stream import LINGER_S, Landed, LinkStream, Room
from kvcast.service.tls import HANDSHAKE_TIMEOUT_S, Credentials, PeerError

PIECE_BYTES: Final = 256 * 1024
"""How much is handed to a transport at once, and the size of the scratch buffer."""
TURN_BYTES: Final = 4 << 20
"""How much one connection may read, or write, before others have their turn."""
MOMENT_S: Final = 0.0002
"""How long a turn in the middle of blocks waits for the other end, all in all, before the loop goes
on: to come back to the socket would take as long as what is waited for mostly takes."""
IMPATIENT_TURNS: Final = 16
"""After a turn that has waited in vain, for so many turns its connection does not wait: the other
end, or what lies between, is slower than this one."""
LOW_WATER_BYTES: Final = 128 * 1024
"""Of a block that is coming, so much is waited for before it is read, or what is left of it."""
LEAST_WINDOW_BYTES: Final = 4 * 1024
"""What the other end may always send before it is read, so that a connection is never still for
longer than its way takes;"""
LEAST_SEGMENTS: Final = 4
"""and so many segments of the network. More would stand on the link before those who go first."""
WIDE_WINDOW_BYTES: Final = 4 << 20
"""What is asked of the kernel first when it need not be narrow any more."""
MOST_WINDOW_BYTES: Final = 1 << 30
"""What the kernel thinks right."""
UNSENT_BYTES: Final = 256 * 1024
"""The kernel takes no more than so much that it cannot send yet: what waits here may still be
decided otherwise."""
_TCP_NOTSENT_LOWAT: Final = 25
"""Not among the socket module's names before Python 3.12."""
_SO_BUF_LOCK: Final = 72
_SELECTABLE: Final = 1024
"""Descriptors below this can be waited for by select(2), which counts microseconds."""

Opened = Callable[[asyncio.Transport], LinkStream[Any]]
"""The transport stands, TLS handshake included: the core of this connection; PeerError if the
certificate at the other end is not one that it is for."""


class Lander(Protocol):
    """Reads blocks from one socket, in a quicker way than this driver knows."""

    low_water_bytes: int
    """What the socket's SO_RCVLOWAT is."""

    def land(self, rooms: Sequence[Room], at_most: int, *, patient: bool) -> Landed:
        """Read into these rooms, of which there is at least one, about so many bytes; if `patient`,
        wait a moment for them."""


class LinkDriver(asyncio.BufferedProtocol):
    """One connection. `opened`: see `Opened`; `changed` is called after every event of the core;
    `refused` with what `opened` raised; `over` once, when the transport is gone. `lander` makes one
    for a socket's descriptor."""

    def __init__(
        self,
        scratch: memoryview,
        opened: Opened,
        *,
        changed: Callable[[], None],
        refused: Callable[[PeerError], None],
        over: Callable[[], None] = lambda: None,
        lander: Callable[[int], Lander] | None = None,
    ) -> None:
        self._impatient_turns = 0
        self._make_lander = lander
        self._lander: Lander | None = None
        self.link: LinkStream[Any] | None = None
        self._scratch = scratch
        self._opened = opened
        self._changed = changed
        self._refused = refused
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        """The connection's socket, where it is ours to read and write."""
        self._fd = -1
        """Its descriptor. The loop is told this: of a socket that it does not know yet it makes a
        description, by four system calls, and throws it away."""
        self._writing = False
        """Nothing is sent for now: the socket took no more, and tells when it will, or others have
        their turn."""
        self._timer: asyncio.TimerHandle | None = None
        self._low_water_bytes = 1
        """The socket says that it can be read when so much is there."""
        self._window_bytes = MOST_WINDOW_BYTES
        """What the other end may send before it is read, at most."""
        self._direct = False
        """The last buffer given was the core's own."""
        self._full = False
        """The transport takes no more for now."""
        self._reading = True
        self._is_over = False

    # --- the transport's events ---------------------------------------------------------------

    def connection_made(self, base: asyncio.BaseTransport) -> None:
        transport = self._transport = cast(asyncio.Transport, base)  # uvloop's are no subclass
        if self._is_over:  # it was given up when the loop was about to say this
            transport.abort()
            return
        try:
            self.link = self._opened(transport)
            self.link.wake = self.flush
        except PeerError as error:
            self._refused(error)
            transport.abort()
        else:
            if transport.get_extra_info("sslcontext") is None:
                # Not yet: a transport begins to read after this, whatever it is told now.
                self._full = True
                self._loop.call_soon(self._take_socket, transport)
        self.flush()

    def _take_socket(self, transport: asyncio.Transport) -> None:
        """Read and write the socket ourselves, by a descriptor of our own, so that the transport
        neither does nor minds."""
        self._full = False
        if transport.is_closing():
            return
        transport.pause_reading()
        theirs = transport.get_extra_info("socket")
        try:
            self._socket = socket.socket(fileno=os.dup(theirs.fileno()))
        except OSError as error:  # out of descriptors: nobody would read
            self.lost(str(error))
            return
        self._fd = self._socket.fileno()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if self._make_lander is not None:
            self._lander = self._make_lander(self._fd)
        if self._reading:
            self._loop.add_reader(self._fd, self._readable)
        self.flush()

    def _let_go_of_socket(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            if self._reading:
                self._loop.remove_reader(self._fd)
            if self._writing:
                self._loop.remove_writer(self._fd)
            sock.close()

    def get_buffer(self, _sizehint: int) -> memoryview:
        room = self.link.destination() if self.link is not None else None
        self._direct = room is not None
        return self._scratch if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        if self.link is None:
            return
        now = self._loop.time()
        if self._direct:
            self.link.filled(now, nbytes)
        else:
            self.link.received(now, bytes(self._scratch[:nbytes]))
        self.flush()

    def eof_received(self) -> None:
        self.lost("")

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go_of_socket()
        self.lost("" if exc is None else str(exc) or type(exc).__name__)
        if self._timer is not None:
            self._timer.cancel()
        self._end()
        self._forget()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.flush()

    # --- the socket's events ------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            self._read_socket()
        except Exception:
            self.abort()  # as a transport does whose protocol fails
            raise

    def _read_socket(self) -> None:
        sock, link = self._socket, self.link
        assert link is not None
        left = TURN_BYTES
        limited = False
        now = self._loop.time()
        patience = _Patience(sock, self._may_wait())
        lander = self._lander
        while sock is not None and left > 0 and link.wants_bytes:
            if link.rooms:
                if limited:
                    break  # who asks is waited for, and there may be no more just now
                allowed = link.receivable_bytes(now)
                self._set_window(sock, link.window_bytes)
                if not allowed:
                    break
                limited = allowed < sys.maxsize
                left = min(left, allowed)
            if lander is not None and link.rooms:
                lander.low_water_bytes = self._low_water_bytes
                landed = lander.land(link.rooms, left, patient=patience.allowed)
                self._low_water_bytes = lander.low_water_bytes
                left -= landed.size_bytes
                if landed.size_bytes:
                    link.filled(now, landed.size_bytes, landed.digests)
                if landed.lost is not None:
                    self.lost(landed.lost)
                    return
                if landed.waits:
                    patience.over = patience.allowed
                    break
                continue
            rooms = link.destinations()
            views = _up_to(rooms, left) or [self._scratch[: link.scratch_bytes]]
            self._set_low_water(sock, link)
            try:
                size = sock.recvmsg_into(views)[0]
            except BlockingIOError:
                if rooms and patience.readable():
                    continue
                break
            except OSError as error:
                self.lost(str(error) or type(error).__name__)
                return
            if not size:
                self.lost("")
                return
            if rooms:
                link.filled(now, size)
            else:
                link.received(now, bytes(views[0][:size]))
            left -= size
            if not rooms and size < len(views[0]):
                break  # there is no more just now
        self._note_wait(patience)
        self.flush()

    def _set_window(self, sock: socket.socket, size_bytes: int) -> None:
        size_bytes = min(size_bytes, MOST_WINDOW_BYTES)
        if size_bytes != self._window_bytes:
            self._window_bytes = size_bytes
            if size_bytes < MOST_WINDOW_BYTES:
                segment_bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
                size_bytes = window_in_turns(size_bytes, segment_bytes)
                # The kernel enlarges buffers by itself, and with them windows, unless it is told.
                # It makes them twice as large, and some kernels make the windows so, too.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size_bytes)
            else:
                # It would take the kernel some turns of bytes to enlarge it again.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WIDE_WINDOW_BYTES)
                with contextlib.suppress(OSError):  # Linux before 5.14: it stays as it is
                    sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, size_bytes)

    def _set_low_water(self, sock: socket.socket, link: LinkStream[Any]) -> None:
        size_bytes = min(LOW_WATER_BYTES, link.least_bytes, self._window_bytes // 4)
        if size_bytes != self._low_water_bytes:
            self._low_water_bytes = size_bytes
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def _writable(self) -> None:
        self._loop.remove_writer(self._fd)
        self._go_on_writing()

    def _go_on_writing(self) -> None:
        if self._socket is not None:
            self._writing = False
            self.flush()

    def _write_socket(self, link: LinkStream[Any], sock: socket.socket, now: float) -> str | None:
        """Send what the socket takes now; what broke the connection, if anything."""
        left = TURN_BYTES
        patience = _Patience(sock, self._may_wait())
        of_block = link.sending_block
        while not self._writing and (pieces := link.pieces_to_send(now)):
            if left <= 0:  # others have their turn; the socket may well take more
                self._writing = True
                self._loop.call_soon(self._go_on_writing)
                break
            try:
                size = sock.sendmsg(pieces)
            except BlockingIOError:
                if patience.writable():
                    continue
                self._writing = True
                self._loop.add_writer(self._fd, self._writable)
            except OSError as error:
                return str(error) or type(error).__name__
            else:
                left -= size
                link.sent(now, size)
        if of_block:
            self._note_wait(patience)
        return None

    # --- patience -----------------------------------------------------------------------------

    def _may_wait(self) -> bool:
        """Whether a turn may wait: not while blocks move on another connection, for which that
        would be time lost, nor where it was in vain a moment ago."""
        return not self._impatient_turns and _moving <= {self}

    def _note_wait(self, patience: _Patience) -> None:
        if patience.over:
            self._impatient_turns = IMPATIENT_TURNS
        elif self._impatient_turns:
            self._impatient_turns -= 1

    # --- what else happens --------------------------------------------------------------------

    def lost(self, why: str) -> None:
        """The connection is gone, or not to be had."""
        if self.link is not None:
            self.link.lost(self._loop.time(), why)
        self.flush()

    def detach(self) -> socket.socket:
        """The connection itself, of which nothing waits to be read or sent here; the core is to be
        closed now, and the driver forgets it."""
        assert self._transport is not None
        if self._socket is None:
            theirs = self._transport.get_extra_info("socket")
            sock = socket.socket(fileno=os.dup(theirs.fileno()))
        else:
            sock = socket.socket(fileno=os.dup(self._fd))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def abort(self) -> None:
        """Close without sending what is left."""
        if self._transport is not None:
            self._transport.abort()

    def flush(self) -> None:
        """Do what the core wants: to be called after whatever else it was told."""
        link, transport = self.link, self._transport
        if link is not None:
            if transport is not None:
                now = self._loop.time()
                if self._socket is not None:
                    problem = self._write_socket(link, self._socket, now)
                    if problem is not None:
                        link.lost(now, problem)
                else:
                    while not self._full and (data := link.bytes_to_send(now, PIECE_BYTES)):
                        transport.write(data)
                if self._socket is not None:
                    self._set_low_water(self._socket, link)
                if link.rooms or (self._writing and link.sending_block):
                    _moving.add(self)
                else:
                    _moving.discard(self)
                if link.wants_bytes != self._reading and not transport.is_closing():
                    self._read_or_not(transport, reading=link.wants_bytes)
            if link.closed:
                self._hang_up()
            else:
                self._set_timer(link.get_timer())
        self._changed()
        if self._is_over:
            self._forget()

    def _read_or_not(self, transport: asyncio.Transport, *, reading: bool) -> None:
        self._reading = reading
        if self._socket is None:
            (transport.resume_reading if reading else transport.pause_reading)()
        elif reading:
            self._loop.add_reader(self._fd, self._readable)
        else:
            self._loop.remove_reader(self._fd)

    def _hang_up(self) -> None:
        transport = self._transport
        if transport is None:
            self._end()
        elif not transport.is_closing():
            self._let_go_of_socket()
            transport.close()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(LINGER_S, transport.abort)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            _moving.discard(self)
            self._over()

    def _forget(self) -> None:
        """Nobody is told anything any more. Whoever was knows this driver, and would be found only
        by the garbage collector, which is slow to come (`kvcast.service.garbage`)."""
        self._opened = self._changed = self._refused = self._over = _nothing
        self._lander = self._make_lander = None
        if self.link is not None:
            self.link.wake = _nothing

    # --- the core's timer ---------------------------------------------------------------------

    def _set_timer(self, when: float | None) -> None:
        """Have the core's timer handled at `when`; one that is set for earlier is left, and set
        again when it comes up, since most are put off before."""
        if self._timer is not None:
            if when is not None and self._timer.when() <= when:
                return
            self._timer.cancel()
            self._timer = None
        if when is not None:
            self._timer = self._loop.call_at(when, self._due)

    def _due(self) -> None:
        self._timer = None
        if self.link is not None:
            self.link.handle_timer(self._loop.time())
        self.flush()


def _nothing(*_: object) -> Any:
    """Told of what nobody minds."""


def window_in_turns(size_bytes: int, segment_bytes: int) -> int:
    """What the other end may send before it is read, where that had better be no more than so many
    bytes."""
    return max(size_bytes, LEAST_WINDOW_BYTES, LEAST_SEGMENTS * segment_bytes)


def give_up_after(transport: asyncio.Transport, seconds: float) -> None:
    """End a connection at whose other end nothing is acknowledged for so long; a peer that lost its
    power says nothing, and the kernel would go on sending to it for a quarter of an hour. Without a
    descriptor to say so by, it is left as it is."""
    theirs = transport.get_extra_info("socket").fileno()
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(theirs)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


def _up_to(views: Sequence[memoryview], at_most: int) -> list[memoryview]:
    """The first of these bytes."""
    cut = []
    for view in views:
        if at_most > 0:
            cut.append(view[:at_most])
        at_most -= len(view)
    return cut


_moving: Final[set[LinkDriver]] = set()
"""Connections in the middle of blocks."""


class _Patience:
    """What is left of a turn's `MOMENT_S`, and waiting for a socket as long as there is some."""

    __slots__ = ("_end", "_sock", "allowed", "over")

    def __init__(self, sock: socket.socket | None, allowed: bool) -> None:
        self._sock = sock
        self._end = 0.0
        self.allowed = allowed
        self.over = False
        """It was waited for as long as may be."""

    def readable(self) -> bool:
        """Wait until the socket has something; False if that takes too long."""
        return self._wait(reads=True)

    def writable(self) -> bool:
        """Wait until the socket takes something; False if that takes too long."""
        return self._wait(reads=False)

    def _wait(self, *, reads: bool) -> bool:
        sock = self._sock
        if not self.allowed or sock is None or sock.fileno() >= _SELECTABLE:
            return False
        now = time.monotonic()
        if not self._end:
            self._end = now + MOMENT_S
        mine, none = (sock,), ()
        readers, writers = (mine, none) if reads else (none, mine)
        if now < self._end and any(select.select(readers, writers, none, self._end - now)):
            return True
        self.over = True
        return False


class ConnectingDriver(LinkDriver):
    """One connection that we make: the core is there before the transport."""

    def __init__(self, link: LinkStream[Any], scratch: memoryview, opened: Opened, **rest: Any):
        super().__init__(scratch, opened, **rest)
        self.link = link
        self._task: asyncio.Task[None] | None = None

    def connect(self, host: str, port: int, credentials: Credentials | None) -> None:
        """Begin to connect; the core's timer says until when."""
        self._task = self._loop.create_task(self._connect(host, port, credentials))
        self.flush()

    async def _connect(self, host: str, port: int, credentials: Credentials | None) -> None:
        tls = None if credentials is None else credentials.client()
        try:
            await self._loop.create_connection(
                lambda: self,
                host,
                port,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
            )
        except OSError as error:
            self.lost(str(error) or type(error).__name__)

    def _hang_up(self) -> None:
        if self._transport is None and self._task is not None:
            self._task.cancel()
        super()._hang_up()
