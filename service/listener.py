"""A TCP listener of a daemon: accepts, within bounds, and with TLS where there are credentials.

Owns: the listening sockets, how many connections may stand at once (in all, and from one
address), and the TLS handshake with its time limit. Must not know: what is said on a connection.

asyncio's own servers take one TLS context for life, and count a connection only when its
handshake is over. Here every connection gets the context of its moment, so that a new certificate
needs no restart, and a peer that dawdles over its handshake takes one of the places that it would
take anyway. Beyond a bound a connection is closed at once, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcast.service.addresses import is_loopback
from kvcast.service.http_limits import client_of
from kvcast.service.tls import HANDSHAKE_TIMEOUT_S, Credentials

log = logging.getLogger("kvcast.listener")

_BACKLOG: Final = 128
_NO_SUCH_ADDRESS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_OUT_OF_DESCRIPTORS_PAUSE_S: Final = 0.1

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Bounds:
    """How many connections may stand at once, handshakes included."""

    connections: int
    per_address: int
    """From one address beyond loopback (behind that are all of this machine's processes), or, of
    IPv6, from one network of 64 bits."""


class Listener:
    """Listens between `start` and `close`. `count` hears what became of connections, by name:
    `connections` of each that was accepted, and `connections_at_bound`,
    `connections_at_address_bound` or `handshakes_failed` of one that was not let in.

    `protocol` makes the protocol of a connection that was let in. Connections that stand are not
    closed by `close`: whoever serves them does that.
    """

    def __init__(
        self,
        protocol: Callable[[], asyncio.BaseProtocol],
        bounds: Bounds,
        credentials: Credentials | None = None,
        *,
        certificate_required: bool = True,
        count: Callable[[str], None],
    ) -> None:
        self._count = count
        self._protocol = protocol
        self._bounds = bounds
        self._credentials = credentials
        self._certificate_required = certificate_required
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[None], str] = {}
        self._open: dict[asyncio.BaseTransport, str] = {}

    async def start(
        self, host: str, port: int, sockets: Sequence[socket.socket] = ()
    ) -> tuple[str, int]:
        """Listen on every address of `host`, or on sockets that listen already, which are ours
        from now on; the first, with the port that was picked for 0."""
        loop = asyncio.get_running_loop()
        if not sockets:
            found = await loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            sockets = _listen_on_all(host, port, found)
        self._sockets = list(sockets)
        self._accepting = [loop.create_task(self._accept(sock)) for sock in self._sockets]
        name = self._sockets[0].getsockname()
        return name[0], name[1]

    async def close(self) -> None:
        """Stop listening, and end the handshakes that have not ended."""
        for sock, accepting in zip(self._sockets, self._accepting, strict=True):
            stop_accepting(sock, accepting)
        for handshake in self._handshakes:
            handshake.cancel()
        await asyncio.gather(*self._accepting, *self._handshakes, return_exceptions=True)
        self._accepting = []
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    @property
    def connections(self) -> int:
        """Connections that stand or shake hands."""
        self._forget_closed()
        return len(self._open) + len(self._handshakes)

    def _forget_closed(self) -> None:
        for transport in [t for t in self._open if t.is_closing()]:
            del self._open[transport]

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._count("accept_errors")
                    log.warning("accept: %s", error)
                    await asyncio.sleep(_OUT_OF_DESCRIPTORS_PAUSE_S)
                continue  # else the peer left before we came
            self._count("connections")
            bound = self._bound_met(address[0])
            if bound is not None:
                self._count(bound)
                _hang_up(connection)
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(self._let_in(connection, address[0]))
            self._handshakes[task] = address[0]
            task.add_done_callback(self._handshake_over)

    def _bound_met(self, address: str) -> str | None:
        """The counter of the bound at which a connection from there is refused."""
        if self.connections >= self._bounds.connections:
            return "connections_at_bound"
        if is_loopback(address):
            return None
        peer = client_of(address)
        peers = [*self._open.values(), *self._handshakes.values()]
        if sum(client_of(one) == peer for one in peers) >= self._bounds.per_address:
            return "connections_at_address_bound"
        return None

    def _handshake_over(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._count("errors")
            log.error("a connection could not be served", exc_info=error)

    async def _let_in(self, connection: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        context: ssl.SSLContext | None = None
        if self._credentials is not None:
            context = self._credentials.server(certificate_required=self._certificate_required)
        try:
            transport, _ = await loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if context is not None else None,
            )
        except (OSError, TimeoutError) as error:
            # No certificate of ours, no TLS at all, too slow, or gone: counted, not written line
            # by line, since whoever does it could fill a disk with it.
            self._count("handshakes_failed")
            log.debug("handshake with %s failed: %s", address, error)
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            self._open[transport] = address
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._handshakes.pop(task, None)


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """What `Listener.start` listens on, made beforehand, without a loop."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return _listen_on_all(host, port, found)


def _listen_on_all(host: str, port: int, found: Iterable[Any]) -> list[socket.socket]:
    absent: OSError | None = None
    sockets: list[socket.socket] = []
    for family, kind, proto, _, address in dict.fromkeys(found):
        try:
            sock = _listening(family, kind, proto, (address[0], port, *address[2:]))
        except OSError as error:
            if error.errno not in _NO_SUCH_ADDRESS:
                for each in sockets:
                    each.close()
                raise _cannot_listen(host, port, error) from None
            absent = error  # a name may stand for addresses that this machine does without
            continue
        sockets.append(sock)
        port = sock.getsockname()[1]
    if absent is not None and not sockets:
        raise _cannot_listen(host, port, absent)
    return sockets


def _listening(family: int, kind: int, proto: int, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> OSError:
    return OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}")


def stop_accepting(listening: socket.socket, accepting: asyncio.Task[None]) -> None:
    """Cancel a task that is in `sock_accept`. If somebody connects in the same round of the loop,
    asyncio (Python 3.11) would accept for the cancelled future, and log that as an error."""
    asyncio.get_running_loop().remove_reader(listening)
    accepting.cancel()


def _hang_up(connection: socket.socket) -> None:
    """Reset a connection: one that was refused leaves nothing behind."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()


def streams(serve: Serve, *, limit: int = 64 * 1024) -> Callable[[], asyncio.BaseProtocol]:
    """A `protocol` for `Listener` that runs `serve(reader, writer)` as a task a connection."""

    def protocol() -> asyncio.BaseProtocol:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=limit, loop=loop)
        return asyncio.StreamReaderProtocol(reader, serve, loop=loop)

    return protocol
