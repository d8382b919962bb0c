"""The local API's adapter: the Unix socket that clients connect to.

Owns: the handshake with the descriptors of the arena, the index and the client's region, framing,
and back-pressure. Must not know: what a request does (`sessions`), or who may connect (`access`).

The socket is 0600, and the kernel's word on the peer is asked for besides: only the agent's own
user, root, and the users and groups that a rule lets in get in. At most `max_clients` at once. A
client that does not read its replies is not read from while more than `HIGH_WATER_BYTES` wait for
it, and is cut off at `MAX_UNSENT_BYTES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, cast

from kvcast.hostagent.core.access import AccessRules, NotAllowedError, Tenants, tenants_of
from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.network.peer_credentials import peer_of
from kvcast.hostagent.tiers.arena import ArenaFile
from kvcast.hostagent.tiers.pin_region import PinRegion
from kvcast.protocol.messages import local
from kvcast.protocol.messages.framing import FramingError, MessageCodec
from kvcast.protocol.messages.local import LOCAL_PROTOCOL_VERSION, MAX_LOCAL_MESSAGE_BYTES

log = logging.getLogger(__name__)

HIGH_WATER_BYTES: Final = 1 << 20
MAX_UNSENT_BYTES: Final = 16 << 20
LOGGED_COMPLAINTS: Final = 100
_HANDSHAKE_TIMEOUT_S: Final = 5.0
_REJECT_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True)
class LocalOptions:
    """Who may use the local API, and how many at once."""

    socket_path: str
    access: AccessRules = field(default_factory=AccessRules)
    """Users and groups besides the agent's own and root."""
    max_clients: int = 256


class SocketInUseError(Exception):
    """Another agent listens on the socket's path."""


class LocalServer:
    """Listens on the Unix socket, and runs a session a client."""

    def __init__(
        self,
        core: AgentCore,
        arena: ArenaFile,
        options: LocalOptions,
        core_told: Callable[[], None],
        index: ArenaFile | None = None,
    ) -> None:
        self._core = core
        self._arena = arena
        self._index = index
        self._options = options
        self._core_told = core_told
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._clients: set[_Client] = set()
        self._complaints = 0

    def start(self) -> None:
        """Bind, listen, and accept on the running loop."""
        path = self._options.socket_path
        _remove_stale_socket(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            mask = os.umask(0o177)
            try:
                sock.bind(path)
            finally:
                os.umask(mask)
            if self._options.access.lets_others_in:
                # The kernel's word on the peer decides; the mode only lets the allowed reach us.
                os.chmod(path, 0o666)
            sock.listen(128)
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock))

    async def close(self) -> None:
        """Stop, cut the clients off, and remove the socket."""
        if self._socket is None or self._accepting is None:
            return
        for task in (self._accepting, *self._handshakes):
            task.cancel()
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)
        for client in list(self._clients):
            client.cut_off()
        self._socket.close()
        self._socket = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._options.socket_path)
        await asyncio.sleep(0)  # lets the transports call connection_lost

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(sock)
            except OSError as error:  # out of descriptors: wait for some to come back
                log.warning("local API: accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            self._core.metrics.local_connections_total += 1
            if len(self._clients) + len(self._handshakes) >= self._options.max_clients:
                self._core.metrics.local_connections_refused_total += 1
                connection.close()
                continue
            task = loop.create_task(self._handshake(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, connection: socket.socket) -> None:
        """Read Hello, pass the descriptor, and hand the connection to its client object."""
        loop = asyncio.get_running_loop()
        codec = MessageCodec[local.ClientMessage](
            local.ClientMessage, max_message_bytes=MAX_LOCAL_MESSAGE_BYTES
        )
        connection.setblocking(False)
        try:
            peer = peer_of(connection)
            try:
                tenants = tenants_of(self._options.access, peer)
            except NotAllowedError as error:
                await self._reject(connection, codec, str(error))
                return
            pending: list[local.ClientMessage] = []
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                while not pending:
                    data = await loop.sock_recv(connection, 65536)
                    if not data:
                        raise ConnectionResetError("no Hello")
                    pending += codec.feed(data)
            hello = pending.pop(0)
            if not isinstance(hello, local.Hello):
                raise FramingError(f"{type(hello).__name__} before Hello")
            if hello.version != LOCAL_PROTOCOL_VERSION:
                reason = (
                    f"version {hello.version} of the client's protocol is not the agent's "
                    f"{LOCAL_PROTOCOL_VERSION}: they must be of one kvcast release"
                )
                await self._reject(connection, codec, reason)
                return
            log.debug("local API: %s (user %d) connects", hello.client, peer.uid)
            client = _Client(self, self._core, codec, self._core_told, tenants, hello.read_only)
            try:
                self._welcome(connection, codec, client, hello)
                await loop.connect_accepted_socket(lambda: client, connection)
            except BaseException:
                client.end_session()
                raise
            client.start(pending)
        except FramingError as error:
            self._core.metrics.local_protocol_errors_total += 1
            self.complain("a client was cut off", str(error))
            connection.close()
        except (OSError, TimeoutError):
            self._core.metrics.local_handshakes_failed_total += 1
            connection.close()
        except BaseException:
            connection.close()
            raise

    def _welcome(
        self,
        connection: socket.socket,
        codec: MessageCodec[local.ClientMessage],
        client: _Client,
        hello: local.Hello,
    ) -> None:
        """Say Welcome, with what the client may map."""
        node_id = self._core.options.node_id
        welcome = local.Welcome(LOCAL_PROTOCOL_VERSION, node_id, self._arena.size_bytes)
        with contextlib.ExitStack() as stack:
            fds = [self._arena.open_for_client(read_only=hello.read_only)]
            stack.callback(os.close, fds[0])
            if hello.index and self._index is not None and client.session.may_share:
                fds.append(self._index.open_for_client(read_only=True))
                stack.callback(os.close, fds[1])
                fds.append(client.share())
                stack.callback(os.close, fds[2])
                welcome = local.Welcome(
                    LOCAL_PROTOCOL_VERSION,
                    node_id,
                    self._arena.size_bytes,
                    self._index.size_bytes,
                    client.session.max_pinned_bytes,
                )
            # A new connection's buffer takes so few bytes whole.
            socket.send_fds(connection, [codec.encode(welcome)], fds)

    async def _reject(
        self,
        connection: socket.socket,
        codec: MessageCodec[local.ClientMessage],
        reason: str,
    ) -> None:
        self._core.metrics.local_connections_refused_total += 1
        self.complain("a client was rejected", reason)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):  # it may have gone
            await loop.sock_sendall(connection, codec.encode(local.Rejected(reason)))
            # Its Hello may still be on the way; closed before that, it would not hear why.
            connection.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_REJECT_TIMEOUT_S):
                while await loop.sock_recv(connection, 65536):
                    pass
        connection.close()

    def complain(self, what: str, why: str) -> None:
        """Log what a client did wrong; the counters go on where the log stops, since a client
        that never learns could fill a disk with it."""
        if self._complaints < LOGGED_COMPLAINTS:
            self._complaints += 1
            log.warning("local API: %s: %s", what, why)

    def joined(self, client: _Client) -> None:
        """A client has finished its handshake."""
        self._clients.add(client)

    def left(self, client: _Client) -> None:
        """A client's connection has ended."""
        self._clients.discard(client)


class _Client(asyncio.Protocol):
    """One client's connection after the handshake."""

    def __init__(
        self,
        server: LocalServer,
        core: AgentCore,
        codec: MessageCodec[local.ClientMessage],
        core_told: Callable[[], None],
        tenants: Tenants,
        read_only: bool = False,
    ) -> None:
        self._server = server
        self._core = core
        self._codec = codec
        self._core_told = core_told
        self.session = Session(core, self._send, tenants, read_only=read_only)
        self._region: PinRegion | None = None
        self._transport: asyncio.Transport | None = None
        self._cut_off = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        if self._cut_off:  # by what it wrote into its region before this
            self._transport.abort()
        self._server.joined(self)

    def share(self) -> int:
        """Make a region for this client; its descriptor, to be sent and closed."""
        self._region = PinRegion()
        self.session.share(self._region.memory, self._offends)
        return self._region.fd

    def end_session(self) -> None:
        """Let go of what the client held."""
        self.session.close()
        if self._region is not None:
            self._region.close()
            self._region = None

    def start(self, pending: list[local.ClientMessage]) -> None:
        """Handle what came together with Hello."""
        self._handle(pending)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._cut_off:
            self._core.metrics.local_clients_left_total += 1
        self.end_session()
        self._server.left(self)
        self._core_told()

    def data_received(self, data: bytes) -> None:
        self._handle(self._codec.feed(data))

    def _handle(self, messages: Iterable[local.ClientMessage]) -> None:
        now = asyncio.get_running_loop().time()
        told = False
        try:
            for message in messages:
                if isinstance(message, local.Hello):
                    raise FramingError("a second Hello")
                self.session.handle(now, message)
                told = told or not isinstance(message, local.Release)  # which asks for nothing
        except FramingError as error:
            self._offends(str(error))
        if told:
            self._core_told()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def cut_off(self) -> None:
        """Close the connection without waiting for what is unsent."""
        self._cut_off = True
        if self._transport is not None:
            self._transport.abort()

    def _offends(self, reason: str) -> None:
        if self._cut_off:
            return
        self._core.metrics.local_protocol_errors_total += 1
        self._server.complain("a client was cut off", reason)
        self.cut_off()

    def _send(self, reply: local.AgentReply) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            self._core.metrics.local_replies_dropped_total += 1
            return
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._core.metrics.local_replies_dropped_total += 1
            self._offends("it does not read its replies")
            return
        self._core.metrics.local_replies_total += 1
        try:
            data = self._codec.encode(reply)
        except FramingError as error:
            failed = local.Failed(reply.request, local.INVALID, str(error)[:256])
            data = self._codec.encode(failed)
        transport.write(data)


def _remove_stale_socket(path: str) -> None:
    """Remove a socket that nobody listens on any more."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise SocketInUseError(f"{path} exists and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            pass
        except OSError as error:
            raise SocketInUseError(f"{path}: {error}") from error
        else:
            raise SocketInUseError(f"another agent listens on {path}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
