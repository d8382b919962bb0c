"""The bulk link's adapter: TCP between agents.

Owns: connections, their reuse, deadlines and number. Must not know: why a call is made, or what
a request deserves (`calls` and `serving` do).

As a caller: at most `connections_per_peer` connections to a node, each with one request at a
time; calls beyond wait their turn, at most `queue_per_peer` of them, and one more fails at once
as unreachable. A connection is kept for the next call for `idle_s`. A reused connection that
turns out to be dead before any answer is replaced once by a fresh one.

As a callee: at most `max_connections` callers at once, one more is closed at once. A caller that
says nothing for `idle_s`, or is slower than `transfer_timeout_s` with a block, is closed.

With credentials the link is TLS: a caller is the node that its certificate names, and bytes are
asked of, and sent to, nobody but the node that the certificate at the other end names.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.bulk_requests import (
    EVICTED,
    UNREACHABLE,
    BulkCall,
    DropCall,
    ExistsCall,
    GetCall,
    PutCall,
)
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.store import Copy
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    MAX_BULK_MESSAGE_BYTES,
    BulkBlock,
    BulkDone,
    BulkDrop,
    BulkExists,
    BulkGet,
    BulkGo,
    BulkHeld,
    BulkHello,
    BulkPut,
    CalleeMessage,
    CallerMessage,
)
from kvcast.protocol.messages.control import NodeInfo
from kvcast.protocol.messages.framing import FramingError, MessageCodec
from kvcast.service.identity import NODE
from kvcast.service.listener import Bounds, Listener, streams
from kvcast.service.tls import HANDSHAKE_TIMEOUT_S, Credentials, PeerError, expect_peer

log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 256 * 1024
_LENGTH_BYTES: Final = 4


@dataclass(frozen=True)
class BulkOptions:
    """Bounds of the bulk link."""

    connections_per_peer: int = 4
    """Connections to one node, in the caller's role."""
    queue_per_peer: int = 8192
    """Calls to one node that wait for a connection; one more fails at once."""
    max_connections: int = 256
    """Connections from all nodes, in the callee's role."""
    max_connections_per_address: int = 64
    """Of them, from one address beyond loopback."""
    connect_timeout_s: float = 2.0
    """How long a connection may take to be made."""
    idle_s: float = 60.0
    """How long a connection without a request is kept."""
    transfer_timeout_s: float = 30.0
    """How long one block may take to arrive or to leave."""


class BulkProtocolError(Exception):
    """The other side broke the conversation's rules."""


class _Stream:
    """One connection: framed messages, and blocks' bytes between them."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        codec: MessageCodec[CallerMessage] | MessageCodec[CalleeMessage],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._codec = codec

    async def read_message(self) -> CallerMessage | CalleeMessage:
        """The next message; FramingError, or IncompleteReadError at the end."""
        length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
        if not 1 <= length <= MAX_BULK_MESSAGE_BYTES:
            raise FramingError(f"message length {length} is outside 1..{MAX_BULK_MESSAGE_BYTES}")
        return self._codec.decode(await self._reader.readexactly(length))

    async def write_message(self, message: CallerMessage | CalleeMessage) -> None:
        self._writer.write(self._codec.encode(message))
        await self._writer.drain()

    async def read_block(self, view: memoryview) -> None:
        """Fill `view` with the bytes that follow."""
        position = 0
        while position < len(view):
            piece = await self._reader.read(min(_PIECE_BYTES, len(view) - position))
            if not piece:
                raise asyncio.IncompleteReadError(b"", len(view) - position)
            view[position : position + len(piece)] = piece
            position += len(piece)

    async def write_block(self, view: memoryview, sent: Callable[[int], None]) -> None:
        """Send a block's bytes; `sent` counts them as they go."""
        for position in range(0, len(view), _PIECE_BYTES):
            piece = bytes(view[position : position + _PIECE_BYTES])
            self._writer.write(piece)
            sent(len(piece))
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


# --- the caller's side ------------------------------------------------------------------------


class _Peer:
    """One node that calls go to: its idle connections, its workers, its queue."""

    def __init__(self) -> None:
        self.idle: deque[tuple[_Stream, float]] = deque()
        self.queue: deque[BulkCall] = deque()
        self.workers = 0


class BulkCaller:
    """Makes the calls that the cores ask for."""

    def __init__(
        self,
        core: AgentCore,
        options: BulkOptions,
        after: Callable[[], None],
        credentials: Credentials | None = None,
    ) -> None:
        self._core = core
        self._credentials = credentials
        self._options = options
        self._after = after  # after a core was told something: do what that has caused
        self._peers: dict[tuple[str, str, int], _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._pool: Pool | None = None

    def dispatch(self) -> None:
        """Start the calls that wait in the outbox."""
        if self._core.pool is not self._pool:
            self._forget_peers()
        calls = self._core.outbox.calls
        while calls:
            self._start(calls.popleft())

    def _forget_peers(self) -> None:
        """Close what is idle towards nodes that have left the map or moved."""
        self._pool = self._core.pool
        nodes = self._pool.nodes.values() if self._pool is not None else ()
        present = {(node.node_id, node.bulk_host, node.bulk_port) for node in nodes}
        for address, peer in list(self._peers.items()):
            if address not in present and not peer.workers:
                for stream, _since in peer.idle:
                    stream.close()
                del self._peers[address]

    def _start(self, call: BulkCall) -> None:
        loop = asyncio.get_running_loop()
        pool = self._core.pool
        node = pool.nodes.get(call.node) if pool is not None else None
        if node is None or self._closed:
            loop.call_soon(self._finish, call, UNREACHABLE)
            return
        self._core.metrics.bulk_requests_sent_total += 1
        peer = self._peers.setdefault((node.node_id, node.bulk_host, node.bulk_port), _Peer())
        if peer.workers < self._options.connections_per_peer:
            peer.workers += 1
            task = loop.create_task(self._work(node, peer, call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif len(peer.queue) < self._options.queue_per_peer:
            peer.queue.append(call)
        else:
            self._core.metrics.bulk_failures_total += 1
            loop.call_soon(self._finish, call, UNREACHABLE)

    def _finish(self, call: BulkCall, outcome: str) -> None:
        call.done(asyncio.get_running_loop().time(), outcome)
        self._after()

    async def _work(self, node: NodeInfo, peer: _Peer, call: BulkCall | None) -> None:
        """Make one call after the other, until the queue is empty."""
        try:
            while call is not None:
                outcome = UNREACHABLE
                try:
                    outcome = await self._make(node, peer, call)
                finally:
                    if outcome == UNREACHABLE:
                        self._core.metrics.bulk_failures_total += 1
                    self._finish(call, outcome)
                call = peer.queue.popleft() if peer.queue else None
        finally:
            peer.workers -= 1

    async def _make(self, node: NodeInfo, peer: _Peer, call: BulkCall) -> str:
        loop = asyncio.get_running_loop()
        if isinstance(call, PutCall) and not call.begin():
            return EVICTED
        while True:
            if call.deadline <= loop.time():
                return UNREACHABLE
            stream = self._reuse(peer, loop.time())
            reused = stream is not None
            progress = _Progress()
            try:
                async with asyncio.timeout_at(call.deadline):
                    if stream is None:
                        stream = await self._connect(node)
                    outcome = await self._converse(stream, call, progress)
            except (
                OSError,
                TimeoutError,
                asyncio.IncompleteReadError,
                FramingError,
                BulkProtocolError,
            ) as error:
                if stream is not None:
                    stream.close()
                if isinstance(error, PeerError):
                    self._core.metrics.bulk_wrong_peers_total += 1
                    log.error("bulk: %s", error)
                    return UNREACHABLE
                if isinstance(error, (FramingError, BulkProtocolError)):
                    self._core.metrics.bulk_protocol_errors_total += 1
                    log.warning("bulk: %s: %s", node.node_id, error)
                    return UNREACHABLE
                if reused and not progress.answered and not isinstance(error, TimeoutError):
                    continue
                log.debug("bulk: %s: %s", node.node_id, error)
                return UNREACHABLE
            except BaseException:
                if stream is not None:
                    stream.close()
                raise
            if progress.poisoned:
                stream.close()
            else:
                peer.idle.append((stream, loop.time()))
            return outcome

    def _reuse(self, peer: _Peer, now: float) -> _Stream | None:
        # The callee closes after `idle_s`; leave it the first half of that.
        while peer.idle:
            stream, since = peer.idle.pop()
            if now - since < self._options.idle_s / 2:
                return stream
            stream.close()
        return None

    async def _connect(self, node: NodeInfo) -> _Stream:
        tls = None if self._credentials is None else self._credentials.client()
        async with asyncio.timeout(self._options.connect_timeout_s):
            reader, writer = await asyncio.open_connection(
                node.bulk_host,
                node.bulk_port,
                limit=2 * _PIECE_BYTES,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
            )
        if tls is not None:
            try:
                expect_peer(writer, NODE, node.node_id)
            except PeerError:
                writer.transport.abort()
                raise
        codec = MessageCodec[CalleeMessage](CalleeMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        stream = _Stream(reader, writer, codec)
        await stream.write_message(BulkHello(BULK_PROTOCOL_VERSION, self._core.options.node_id))
        return stream

    async def _converse(self, stream: _Stream, call: BulkCall, progress: _Progress) -> str:
        if isinstance(call, PutCall):
            return await self._put(stream, call, progress)
        if isinstance(call, GetCall):
            return await self._get(stream, call, progress)
        if isinstance(call, DropCall):
            await stream.write_message(BulkDrop(call.namespace, call.keys))
            answer = await stream.read_message()
        else:
            await stream.write_message(BulkExists(call.namespace, call.keys))
            answer = await stream.read_message()
            if isinstance(answer, BulkHeld):
                assert isinstance(call, ExistsCall)
                call.answer(bulk.unpack_bitmap(answer.bitmap, len(call.keys)))
                return bulk.DONE
        if not isinstance(answer, BulkDone):
            raise BulkProtocolError(f"{type(answer).__name__} as answer to a request")
        return answer.status

    async def _put(self, stream: _Stream, call: PutCall, progress: _Progress) -> str:
        copy = call.copy
        namespace, key = copy.block
        await stream.write_message(
            BulkPut(namespace, key, copy.size_bytes, copy.digest, call.epoch, call.meaning)
        )
        answer = await stream.read_message()
        progress.answered = True
        if isinstance(answer, BulkGo):
            await stream.write_block(self._core.serving.view(copy), self._count_put)
            answer = await stream.read_message()
        if not isinstance(answer, BulkDone):
            raise BulkProtocolError(f"{type(answer).__name__} as answer to a put")
        return answer.status

    def _count_put(self, size_bytes: int) -> None:
        self._core.metrics.payload_bytes_sent_bulk_put_total += size_bytes

    async def _get(self, stream: _Stream, call: GetCall, progress: _Progress) -> str:
        await stream.write_message(BulkGet(call.block.namespace, call.block.key, call.digest))
        answer = await stream.read_message()
        progress.answered = True
        if isinstance(answer, BulkDone):
            return answer.status
        if not isinstance(answer, BulkBlock):
            raise BulkProtocolError(f"{type(answer).__name__} as answer to a get")
        view = call.begin(answer.size_bytes, answer.digest)
        if view is None:
            progress.poisoned = True  # its bytes are on their way and nobody wants them
            return bulk.NO_ROOM
        await stream.read_block(view)
        return bulk.DONE

    async def close(self) -> None:
        """End all calls as unreachable, and close all connections."""
        self._closed = True
        for peer in self._peers.values():
            while peer.queue:
                self._finish(peer.queue.popleft(), UNREACHABLE)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self._peers.values():
            for stream, _since in peer.idle:
                stream.close()
            peer.idle.clear()


class _Progress:
    """How far a conversation went."""

    __slots__ = ("answered", "poisoned")

    def __init__(self) -> None:
        self.answered = False
        self.poisoned = False


# --- the callee's side ------------------------------------------------------------------------


class BulkServer:
    """Answers other agents."""

    def __init__(
        self, core: AgentCore, options: BulkOptions, credentials: Credentials | None = None
    ) -> None:
        self._core = core
        self._options = options
        self._credentials = credentials
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = Listener(
            streams(self._accept, limit=2 * _PIECE_BYTES),
            Bounds(options.max_connections, options.max_connections_per_address),
            credentials,
            count=self._count,
        )

    def _count(self, name: str) -> None:
        if name != "connections":
            self._core.metrics.bulk_connections_refused_total += 1

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the port chosen where 0 was asked for."""
        return await self._listener.start(host, port)

    async def close(self) -> None:
        """Stop listening and end all conversations."""
        await self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # only `close` cancels; ending normally keeps asyncio from logging it
        finally:
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        codec = MessageCodec[CallerMessage](CallerMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        stream = _Stream(reader, writer, codec)
        try:
            named = None if self._credentials is None else expect_peer(writer, NODE).name
            async with asyncio.timeout(self._options.idle_s):
                hello = await stream.read_message()
            if not isinstance(hello, BulkHello) or hello.version != BULK_PROTOCOL_VERSION:
                raise BulkProtocolError("the first message is no BulkHello of our version")
            if named is not None and named != hello.node_id:
                raise PeerError(f"node {named} calls itself {hello.node_id}")
            while True:
                async with asyncio.timeout(self._options.idle_s):
                    request = await stream.read_message()
                async with asyncio.timeout(self._options.transfer_timeout_s):
                    await self._answer(stream, hello.node_id, request)
        except PeerError as error:
            self._core.metrics.bulk_connections_refused_total += 1
            log.warning("bulk: a caller was refused: %s", error)
        except (FramingError, BulkProtocolError) as error:
            self._core.metrics.bulk_protocol_errors_total += 1
            log.warning("bulk: a caller was cut off: %s", error)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # it went away, or was too slow
        finally:
            stream.close()

    async def _answer(
        self, stream: _Stream, caller: str, request: CallerMessage | CalleeMessage
    ) -> None:
        self._core.metrics.bulk_requests_served_total += 1
        serving = self._core.serving
        if isinstance(request, BulkPut):
            await self._take_put(stream, caller, request)
        elif isinstance(request, BulkGet):
            await self._send_block(stream, caller, request)
        elif isinstance(request, BulkDrop):
            await stream.write_message(serving.drop(caller, request))
        elif isinstance(request, BulkExists):
            await stream.write_message(serving.exists(caller, request))
        else:
            raise BulkProtocolError(f"{type(request).__name__} as a request")

    async def _take_put(self, stream: _Stream, caller: str, put: BulkPut) -> None:
        serving = self._core.serving
        room = serving.begin_put(caller, put)
        if not isinstance(room, Copy):
            await stream.write_message(room)
            return
        try:
            await stream.write_message(BulkGo())
            await stream.read_block(serving.view(room))
        except BaseException:
            serving.abort_put(room)
            raise
        await stream.write_message(serving.end_put(put, room))

    async def _send_block(self, stream: _Stream, caller: str, get: BulkGet) -> None:
        serving = self._core.serving
        copy = serving.get(caller, get)
        if not isinstance(copy, Copy):
            await stream.write_message(copy)
            return
        try:
            await stream.write_message(BulkBlock(copy.size_bytes, copy.digest))
            await stream.write_block(serving.view(copy), self._count_get)
        finally:
            serving.end_get(copy)

    def _count_get(self, size_bytes: int) -> None:
        self._core.metrics.payload_bytes_sent_bulk_get_total += size_bytes
