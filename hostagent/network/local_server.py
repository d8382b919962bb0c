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
import itertools
import logging
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec
from kvcast.hostagent.core.access import (
    ALL_TENANTS,
    AccessRules,
    NotAllowedError,
    Tenants,
    tenants_of,
)
from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.courier import Holder
from kvcast.hostagent.core.sessions import Session, rows_left
from kvcast.hostagent.network.courier import CourierDriver
from kvcast.hostagent.network.peer_credentials import peer_of
from kvcast.hostagent.network.survivors import NOBODY, Keeper, Survivor
from kvcast.hostagent.tiers.arena import ArenaFile
from kvcast.hostagent.tiers.kept import KeptFile
from kvcast.hostagent.tiers.pin_region import PinRegion
from kvcast.protocol.messages import local
from kvcast.protocol.messages.framing import FramingError, MessageCodec
from kvcast.protocol.messages.local import LOCAL_PROTOCOL_VERSION, MAX_LOCAL_MESSAGE_BYTES
from kvcast.service.listener import stop_accepting

log = logging.getLogger(__name__)

HIGH_WATER_BYTES: Final = 1 << 20
MAX_UNSENT_BYTES: Final = 16 << 20
LOGGED_COMPLAINTS: Final = 100
_RESTING_S: Final = 0.002
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
        arena: ArenaFile | KeptFile,
        options: LocalOptions,
        core_told: Callable[[], None],
        index: ArenaFile | KeptFile | None = None,
        keeper: Keeper = NOBODY,
        courier: CourierDriver | None = None,
    ) -> None:
        """`keeper`: who keeps the clients' connections for the agent that comes after."""
        self.courier = courier
        if courier is not None:
            courier.offended = self._offended
        self._keeper = keeper
        self._survivors: dict[bytes, _Waiting] = {}
        self._numbers = itertools.count(1)
        self._core = core
        self._arena = arena
        self._index = index
        self._options = options
        self._core_told = core_told
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._clients: set[_Client] = set()
        self._on_courier: dict[Holder, _Client] = {}
        """By session, those with a courier: they may speak there before their handshake is over."""
        self._complaints = 0
        self.cut_off_holders = False
        """Whether clients held something when `close` cut them off."""

    def start(self, listening: socket.socket | None = None) -> None:
        """Listen, and accept on the running loop; or take over a socket that listens already, and
        whose path is not ours to remove."""
        self._keeps_path = listening is not None
        self._socket = listening if listening is not None else listen_locally(self._options)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._socket))

    def restore(self, survivors: Iterable[Survivor]) -> None:
        """Hold what clients of a former agent hold, until they come back or go. The core has a
        map, and nothing has been stored yet."""
        ledger = self._core.ledger
        assert ledger is not None
        rows = rows_left(ledger)
        last = 0
        for survivor in survivors:
            last = max(last, survivor.number)
            session = Session(
                *(self._core, _unheard, ALL_TENANTS),
                read_only=survivor.read_only,
                number=survivor.number,
                first_handle=_first_handle(),
            )
            region = PinRegion(survivor.region_fd) if survivor.region_fd is not None else None
            session.restore(
                rows.pop(survivor.number, []), region.memory if region is not None else None
            )
            waiting = _Waiting(survivor, session, region)
            self._survivors[survivor.token] = waiting
            # What it asked for will not be answered there; and it must not say more there.
            with contextlib.suppress(OSError):
                survivor.connection.shutdown(socket.SHUT_WR)
            survivor.connection.setblocking(False)
            asyncio.get_running_loop().add_reader(
                survivor.connection.fileno(), self._survivor_readable, waiting
            )
        for nobodys in rows.values():
            for at, _ in nobodys:
                ledger.strike(at)
        self._numbers = itertools.count(last + 1)

    def _survivor_readable(self, waiting: _Waiting) -> None:
        try:
            if waiting.survivor.connection.recv(65536):
                return  # said before it knew; it will say it again
        except BlockingIOError:
            return
        except OSError:
            pass
        self._forget(waiting)
        waiting.end()
        self._keeper.left(waiting.survivor.number)

    def _forget(self, waiting: _Waiting) -> None:
        """Nobody waits for this client any more: it is back, or gone."""
        asyncio.get_running_loop().remove_reader(waiting.survivor.connection.fileno())
        waiting.survivor.connection.close()
        del self._survivors[waiting.survivor.token]

    async def rest(self, patience_s: float) -> None:
        """Take no more clients and no more requests, and wait until what was asked is answered."""
        assert self._socket is not None
        assert self._accepting is not None
        stop_accepting(self._socket, self._accepting)
        loop = asyncio.get_running_loop()
        end = loop.time() + patience_s
        for client in self._clients:
            client.pause()
        while self._handshakes or any(not client.at_rest for client in self._clients):
            if loop.time() > end:
                return
            await asyncio.sleep(_RESTING_S)

    async def close(self) -> None:
        """Stop, cut the clients off, and remove the socket."""
        for waiting in list(self._survivors.values()):
            self._forget(waiting)
            self.cut_off_holders |= waiting.end()
        if self._socket is None or self._accepting is None:
            return
        stop_accepting(self._socket, self._accepting)
        for handshake in self._handshakes:
            handshake.cancel()
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)
        for client in list(self._clients):
            self.cut_off_holders |= client.end_session()
            client.cut_off()
        self._socket.close()
        self._socket = None
        if not self._keeps_path:
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
            waiting = self._resumable(hello, tenants)
            client = _Client(
                *(self, self._core, codec, self._core_told, tenants, hello.read_only),
                number=next(self._numbers),
                waiting=waiting,
            )
            try:
                if waiting is not None:
                    assert hello.resume is not None
                    self._forget(waiting)
                    client.resume(hello.resume.held)
                self._welcome(connection, codec, client, hello)
                await loop.connect_accepted_socket(lambda: client, connection)
            except BaseException:
                client.end_session()
                self._keeper.left(client.session.number)
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

    def _resumable(self, hello: local.Hello, tenants: Tenants) -> _Waiting | None:
        """Whom this client was to a former agent; None where it is a new one, or may not be who it
        was."""
        waiting = self._survivors.get(hello.resume.token) if hello.resume is not None else None
        if (
            waiting is None
            or waiting.survivor.read_only != hello.read_only
            or (waiting.region is not None and tenants is not ALL_TENANTS)
        ):
            return None
        return waiting

    def _welcome(
        self,
        connection: socket.socket,
        codec: MessageCodec[local.ClientMessage],
        client: _Client,
        hello: local.Hello,
    ) -> None:
        """Say Welcome, with what the client may map."""
        node_id = self._core.options.node_id
        keeper, token = self._keeper, client.token
        welcome = local.Welcome(
            LOCAL_PROTOCOL_VERSION, node_id, self._arena.size_bytes, token=token
        )
        if client.resumed:
            keeper.joined(client.survivor(connection))
            client.close_region_fd()
            with contextlib.ExitStack() as stack:
                fds = self._join_courier(client, stack) if client.session.region else []
                welcome = msgspec.structs.replace(welcome, resumed=True, courier=bool(fds))
                socket.send_fds(connection, [codec.encode(welcome)], fds)
            return
        with contextlib.ExitStack() as stack:
            fds = [self._arena.open_for_client(read_only=hello.read_only)]
            stack.callback(os.close, fds[0])
            if hello.index and self._index is not None and client.session.may_share:
                fds.append(self._index.open_for_client(read_only=True))
                stack.callback(os.close, fds[1])
                fds.append(client.share())
                stack.callback(os.close, fds[2])
                courier = self._join_courier(client, stack)
                fds += courier
                welcome = local.Welcome(
                    *(LOCAL_PROTOCOL_VERSION, node_id, self._arena.size_bytes),
                    *(self._index.size_bytes, client.session.max_pinned_bytes),
                    token=token,
                    courier=bool(courier),
                )
            if token:
                keeper.joined(client.survivor(connection))
            # A new connection's buffer takes so few bytes whole.
            socket.send_fds(connection, [codec.encode(welcome)], fds)

    @staticmethod
    def _join_courier(client: _Client, stack: contextlib.ExitStack) -> list[int]:
        """The descriptor of the client's end of its courier's socket, until the stack ends, if it
        can have one."""
        courier = client.join_courier()
        if courier is None:
            return []
        stack.callback(courier.close)
        return [courier.fileno()]

    def _offended(self, holder: Holder) -> None:
        client = self._on_courier.get(holder)
        if client is not None:
            client.offends("what it says on its courier is no question")

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

    def on_courier(self, client: _Client) -> None:
        """A client is about to have a courier,"""
        self._on_courier[client.session] = client

    def off_courier(self, client: _Client) -> None:
        """and has none any more. Harmless when repeated."""
        self._on_courier.pop(client.session, None)

    def left(self, client: _Client) -> None:
        """A client's connection has ended."""
        self._clients.discard(client)
        self._keeper.left(client.session.number)

    @property
    def keeps(self) -> bool:
        """Whether a client may come back to the agent that comes after."""
        return self._keeper is not NOBODY


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
        *,
        number: int = 0,
        waiting: _Waiting | None = None,
    ) -> None:
        self._server = server
        self._core = core
        self._codec = codec
        self._core_told = core_told
        self._tenants = tenants
        self._read_only = read_only
        self._region: PinRegion | None = None
        self._resting = False
        self.resumed = waiting is not None
        self.token = b""
        if waiting is not None:
            self.session, self._region = waiting.session, waiting.region
            self.token = waiting.survivor.token
        else:
            first = _first_handle() if server.keeps else 1
            self.session = Session(
                core, self._send, tenants, read_only=read_only, number=number, first_handle=first
            )
            if server.keeps:
                self.token = secrets.token_bytes(16)
        self._transport: asyncio.Transport | None = None
        self._cut_off = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        if self._cut_off:  # by what it wrote into its region before this
            self._transport.abort()
        self._server.joined(self)

    def resume(self, held: list[int]) -> None:
        """Go on with the session of a former agent's client."""
        self.session.resume(self._send, self._tenants, self.offends, held)

    def survivor(self, connection: socket.socket) -> Survivor:
        """What is to be kept of this client for the agent that comes after."""
        region_fd = self._region.fd if self._region is not None else None
        number = self.session.number
        return Survivor(number, self.token, connection, region_fd, self._read_only)

    def close_region_fd(self) -> None:
        """Of a region that was found: the client has it, and so has whoever keeps it."""
        if self._region is not None:
            os.close(self._region.fd)

    def pause(self) -> None:
        """Take no more requests."""
        self._resting = True
        if self._transport is not None:
            self._transport.pause_reading()

    @property
    def at_rest(self) -> bool:
        """Whether everything that was asked is answered, and the answers are on their way."""
        transport = self._transport
        return not self.session.in_flight and (
            transport is None or transport.get_write_buffer_size() == 0
        )

    def share(self) -> int:
        """Make a region for this client; its descriptor, to be sent and closed."""
        self._region = PinRegion()
        self.session.share(self._region.memory, self.offends)
        return self._region.fd

    def join_courier(self) -> socket.socket | None:
        """The client's end of its courier's socket, to be sent and closed, if it can have one."""
        courier = self._server.courier
        if courier is None:
            return None
        self._server.on_courier(self)
        return courier.add(self.session)

    def end_session(self) -> bool:
        """Let go of what the client held; whether that was anything."""
        self._server.off_courier(self)
        if self._server.courier is not None:
            self._server.courier.remove(self.session)
        held = self.session.close()
        if self._region is not None:
            self._region.close()
            self._region = None
        return held

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
                # A Release asks for nothing.
                told = told or not isinstance(message, local.Release) or bool(message.given_up)
        except FramingError as error:
            self.offends(str(error))
        if told:
            self._core_told()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._resting:
            self._transport.resume_reading()

    def cut_off(self) -> None:
        """Close the connection without waiting for what is unsent."""
        self._cut_off = True
        if self._transport is not None:
            self._transport.abort()

    def offends(self, reason: str) -> None:
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
            self.offends("it does not read its replies")
            return
        self._core.metrics.local_replies_total += 1
        try:
            data = self._codec.encode(reply)
        except FramingError as error:
            failed = local.Failed(reply.request, local.INVALID, str(error)[:256])
            data = self._codec.encode(failed)
        transport.write(data)


@dataclass
class _Waiting:
    """A client of a former agent that has not come back yet."""

    survivor: Survivor
    session: Session
    region: PinRegion | None

    def end(self) -> bool:
        """It does not come; whether it held anything."""
        held = self.session.close()
        if self.region is not None:
            self.region.close()
        return held


def _unheard(_reply: local.AgentReply) -> None:
    """Of a client that is not here."""


def _first_handle() -> int:
    """Where a session begins to count, so that no handle of another life is taken for its own, nor
    for one of the courier's."""
    return secrets.randbits(30) << 32 | 1


def listen_locally(options: LocalOptions) -> socket.socket:
    """A socket that listens at the path of the options; SocketInUseError."""
    path = options.socket_path
    _remove_stale_socket(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        mask = os.umask(0o177)
        try:
            sock.bind(path)
        except OSError as error:  # which does not say where
            raise SocketInUseError(f"{path}: {error.strerror or error}") from error
        finally:
            os.umask(mask)
        if options.access.lets_others_in:
            # The kernel's word on the peer decides; the mode only lets the allowed reach us.
            os.chmod(path, 0o666)
        sock.listen(128)
    except BaseException:
        sock.close()
        raise
    return sock


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
