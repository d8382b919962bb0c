"""Drives a connection's core (`kvcast.protocol.links`) over an asyncio transport.

Owns: moving bytes between a transport and a core, the core's timer, making a connection, and
closing one. Must not know: what is said. Every TCP link of the daemons is driven by this, in both
roles.

A block's bytes go from the socket straight to where the core wants them; everything else passes
through one scratch buffer, which all drivers may share, since what is in it is used at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from kvcast.protocol.links.stream import LINGER_S, LinkStream
from kvcast.service.tls import HANDSHAKE_TIMEOUT_S, Credentials, PeerError

PIECE_BYTES: Final = 256 * 1024
"""How much is read, and handed to a transport, at once."""

Opened = Callable[[asyncio.Transport], LinkStream[Any]]
"""The transport stands, TLS handshake included: the core of this connection; PeerError if the
certificate at the other end is not one that it is for."""


class LinkDriver(asyncio.BufferedProtocol):
    """One connection. `opened`: see `Opened`; `changed` is called after every event of the core;
    `refused` with what `opened` raised; `over` once, when the transport is gone."""

    def __init__(
        self,
        scratch: memoryview,
        opened: Opened,
        *,
        changed: Callable[[], None],
        refused: Callable[[PeerError], None],
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self.link: LinkStream[Any] | None = None
        self._scratch = scratch
        self._opened = opened
        self._changed = changed
        self._refused = refused
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._direct = False
        """The last buffer given was the core's own."""
        self._full = False
        """The transport takes no more for now."""
        self._reading = True
        self._is_over = False

    # --- the transport's events ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        try:
            self.link = self._opened(transport)
        except PeerError as error:
            self._refused(error)
            transport.abort()
        self.flush()

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
        self.lost("" if exc is None else str(exc) or type(exc).__name__)
        if self._timer is not None:
            self._timer.cancel()
        self._end()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.flush()

    # --- what else happens --------------------------------------------------------------------

    def lost(self, why: str) -> None:
        """The connection is gone, or not to be had."""
        if self.link is not None:
            self.link.lost(self._loop.time(), why)
        self.flush()

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
                while not self._full and (data := link.bytes_to_send(now, PIECE_BYTES)):
                    transport.write(data)
                if link.wants_bytes != self._reading and not transport.is_closing():
                    self._reading = link.wants_bytes
                    (transport.resume_reading if self._reading else transport.pause_reading)()
            if link.closed:
                self._hang_up()
            else:
                self._set_timer(link.get_timer())
        self._changed()

    def _hang_up(self) -> None:
        transport = self._transport
        if transport is None:
            self._end()
        elif not transport.is_closing():
            transport.close()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(LINGER_S, transport.abort)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._over()

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
