"""The client library: how an engine on a node talks to the node's agent.

Owns: `Client` (blocking) and `AsyncClient` (asyncio), and what they raise and return. Must not
know: anything of the agent but the local API (`kvcast.protocol.messages.local`). It imports no
engine and no numpy; a block is a `memoryview`, which numpy and torch take without copying
(``numpy.frombuffer(block.data, dtype)``).

A first example::

    from kvcast.hostagent.client import Client

    with Client("/run/kvcast/agent.sock") as pool:
        ns = pool.namespace(tenant="acme", model="m", version="1", layout="bf16/16")
        pool.put(ns, {key: kv_bytes})              # key: 16 bytes, from the engine's block hash
        for block in pool.get(ns, [key], deadline_s=0.5):
            if block is None:
                ...                                # a miss: compute it
            else:
                with block:                        # pinned until released
                    engine_memory[:] = block.data

Keys are 16 bytes, sizes are bytes, times are seconds unless the name says otherwise. A key names
one content for ever: put the same key twice, and the first copy stays.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, TypeAlias, TypeVar

from kvcast.protocol.messages import local
from kvcast.protocol.messages.framing import FramingError, MessageCodec
from kvcast.protocol.messages.local import LOCAL_PROTOCOL_VERSION, MAX_KEYS, MAX_LOCAL_MESSAGE_BYTES
from kvcast.protocol.messages.wire import KEY_BYTES, digest_of

Buffer: TypeAlias = bytes | bytearray | memoryview

_READ_BYTES: Final = 256 * 1024
_PUT_BATCH_BYTES: Final = 16 << 20
_PUT_BATCH_SHARE: Final = 8
"""A put writes this many bytes, or an eighth of the arena, before it commits them, so that a large
put needs no large part of the arena at once."""
_GRACE_S: Final = 5.0
"""Beyond a request's own deadline, how long the agent may take to answer."""
_SLOW_REQUEST_S: Final = 60.0
"""How long the agent may take to answer requests without a deadline of their own."""


class KvcastError(Exception):
    """Base of everything that this module raises about the pool. `status` is the agent's word
    for it (a status of `kvcast.protocol.messages.local`), or "" where the agent was not asked."""

    status = ""


class AgentGoneError(KvcastError):
    """There is no agent at the socket, it closed the connection, or it did not answer in time.
    The client is useless from then on (blocks that it returned keep their bytes only while the
    agent that pinned them lives); make a new one."""


class AgentRejectedError(KvcastError):
    """The agent does not let this process in; the message says why."""


class BusyError(KvcastError):
    """A bound was met: requests in flight, handles, or this client's share of the arena. Release
    blocks, or try again later."""

    status = local.BUSY


class NoRoomError(KvcastError):
    """The arena has no room: all that could be evicted is pinned, or the block is too large."""

    status = local.NO_ROOM


class QuotaError(KvcastError):
    """The namespace's quota has no room."""

    status = local.QUOTA


class UnknownNamespaceError(KvcastError):
    """The agent's map has no such namespace. Ask for it by `namespace(...)` first."""

    status = local.UNKNOWN_NAMESPACE


class ForbiddenError(KvcastError):
    """The namespace is not this node's to use."""

    status = local.FORBIDDEN


class UnavailableError(KvcastError):
    """The agent has never reached its controller, or no home of a block took the put."""

    status = local.UNAVAILABLE


class InvalidRequestError(KvcastError):
    """The request names something that does not exist, or contradicts itself."""

    status = local.INVALID


_ERROR_BY_STATUS: Final[dict[str, type[KvcastError]]] = {
    error.status: error
    for error in (
        BusyError,
        NoRoomError,
        QuotaError,
        UnknownNamespaceError,
        ForbiddenError,
        UnavailableError,
        InvalidRequestError,
    )
}


class PutError(KvcastError):
    """Some blocks of a put were not taken; the others were. `failed` maps their keys to the
    status of each (a status of `kvcast.protocol.messages.local`)."""

    def __init__(self, failed: dict[bytes, str]) -> None:
        self.failed = failed
        statuses = ", ".join(sorted(set(failed.values())))
        super().__init__(f"{len(failed)} blocks were not put: {statuses}")


class ReleasedError(KvcastError):
    """The block was released; its bytes may be another block's by now."""


class Block:
    """A block in the arena of this node, pinned until `release`.

    Use it as a context manager, or call `release`; a forgotten block stays pinned until its
    client closes. `tier` says where it came from: "local" (this node's arena), "switch" (at
    least partly from the switch's memory), "shared" (an answer that several readers got),
    "home" (one that only this node got), or "bulk" (TCP).
    """

    __slots__ = ("_data", "_release", "digest", "key", "size_bytes", "tier")

    def __init__(
        self, key: bytes, data: memoryview, digest: int, tier: str, release: Callable[[], None]
    ) -> None:
        self.key = key
        self.size_bytes = len(data)
        self.digest = digest
        self.tier = tier
        self._data: memoryview | None = data
        self._release = release

    @property
    def data(self) -> memoryview:
        """The bytes, shape (size_bytes,), format "B", read-only; ReleasedError once released.
        Views taken from it must not be used after `release`."""
        if self._data is None:
            raise ReleasedError(f"block {self.key.hex()} was released")
        return self._data

    def __len__(self) -> int:
        return self.size_bytes

    def verify(self) -> bool:
        """Whether the bytes still have their digest (xxh3_64). The agent has checked a block
        that it fetched; this checks once more, after everybody who can write the arena."""
        return digest_of(self.data) == self.digest

    def release(self) -> None:
        """Let the agent evict the block; harmless when repeated."""
        if self._data is not None:
            self._data = None
            self._release()

    def __enter__(self) -> Block:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Block {self.key.hex()} {self.size_bytes} B from {self.tier}>"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One key of `get_outcomes`: the block, or why there is none. `status` and `reason` are as
    in `kvcast.protocol.messages.local.GotBlock`."""

    block: Block | None
    status: str
    reason: str


class _Arena:
    """The agent's arena, mapped into this process."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        try:
            if os.fstat(fd).st_size < size_bytes:
                raise AgentGoneError("the arena is smaller than the agent says")
            self._map = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
        self.put_batch_bytes = min(_PUT_BATCH_BYTES, size_bytes // _PUT_BATCH_SHARE)
        self._memory = memoryview(self._map)
        self._readable = self._memory.toreadonly()

    def read(self, offset: int, size_bytes: int) -> memoryview:
        self._check(offset, size_bytes)
        return self._readable[offset : offset + size_bytes]

    def write(self, offset: int, data: Buffer) -> None:
        size_bytes = len(data)
        self._check(offset, size_bytes)
        self._memory[offset : offset + size_bytes] = data

    def _check(self, offset: int, size_bytes: int) -> None:
        if offset + size_bytes > len(self._memory):
            raise AgentGoneError("the agent named bytes outside the arena")

    def close(self) -> None:
        self._readable.release()
        self._memory.release()
        try:
            self._map.close()
        except BufferError:
            pass  # the caller still has views; the mapping goes with them


def _check_keys(keys: Sequence[bytes]) -> list[bytes]:
    checked = [bytes(key) for key in keys]
    for key in checked:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key is {KEY_BYTES} bytes, not {len(key)}")
    return checked


def _as_bytes(data: Buffer) -> memoryview:
    view = memoryview(data)
    if view.nbytes == 0:
        raise ValueError("a block has at least one byte")
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view


def _batches(keys: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), MAX_KEYS):
        yield keys[start : start + MAX_KEYS]


def _put_batches(
    blocks: Mapping[bytes, Buffer], batch_bytes: int
) -> Iterator[list[tuple[bytes, memoryview]]]:
    batch: list[tuple[bytes, memoryview]] = []
    size_bytes = 0
    for key, data in blocks.items():
        view = _as_bytes(data)
        if batch and (len(batch) == MAX_KEYS or size_bytes + len(view) > batch_bytes):
            yield batch
            batch, size_bytes = [], 0
        batch.append((key, view))
        size_bytes += len(view)
    if batch:
        yield batch


def _raise(status: str, reason: str) -> None:
    raise _ERROR_BY_STATUS.get(status, KvcastError)(reason or status)


R = TypeVar("R", bound=local.AgentReply)


def _expect(reply: local.AgentReply, kind: type[R]) -> R:
    if isinstance(reply, local.Failed):
        _raise(reply.status, reply.reason)
    if not isinstance(reply, kind):
        raise AgentGoneError(f"the agent answered with {type(reply).__name__}")
    return reply


def _welcome(message: local.ServerMessage) -> local.Welcome:
    if isinstance(message, local.Rejected):
        raise AgentRejectedError(message.reason)
    if not isinstance(message, local.Welcome):
        raise AgentGoneError(f"the agent began with {type(message).__name__}")
    return message


def _codec() -> MessageCodec[local.ServerMessage]:
    return MessageCodec[local.ServerMessage](
        local.ServerMessage, max_message_bytes=MAX_LOCAL_MESSAGE_BYTES
    )


def _allocated(
    batch: list[tuple[bytes, memoryview]],
    extents: list[local.Extent],
    arena: _Arena,
    failed: dict[bytes, str],
) -> tuple[list[bytes], list[int]]:
    """Write a batch's blocks to their extents; the keys and tickets to commit."""
    keys: list[bytes] = []
    tickets: list[int] = []
    for (key, view), extent in zip(batch, extents, strict=True):
        if extent.status != local.OK:
            failed[key] = extent.status
            continue
        arena.write(extent.offset, view)
        keys.append(key)
        tickets.append(extent.ticket)
    return keys, tickets


def _committed(keys: list[bytes], results: list[local.PutBlock], failed: dict[bytes, str]) -> None:
    for key, result in zip(keys, results, strict=True):
        if result.status != local.OK:
            failed[key] = result.status


class Client:
    """A blocking client of the agent at `socket_path`.

    May be used from several threads; they take turns, a whole request each. `timeout_s` is how
    long to wait for the agent's Welcome. Raises AgentGoneError where no agent listens, and
    AgentRejectedError where it does not let us in.
    """

    def __init__(self, socket_path: str, *, name: str = "", timeout_s: float = 5.0) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._codec = _codec()
        self._replies: list[local.ServerMessage] = []
        self._to_release: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(socket_path)
            hello = local.Hello(LOCAL_PROTOCOL_VERSION, (name or f"pid {os.getpid()}")[:256])
            self._socket.sendall(self._codec.encode(hello))
            self._arena, self.node_id = self._handshake()
        except OSError as error:
            self._socket.close()
            raise AgentGoneError(f"{socket_path}: {error}") from error
        except BaseException:
            self._socket.close()
            raise

    def _handshake(self) -> tuple[_Arena, str]:
        fds: list[int] = []
        while not self._replies:
            data, more, _flags, _address = socket.recv_fds(self._socket, _READ_BYTES, 4)
            fds += more
            if not data:
                raise AgentGoneError("the agent closed the connection")
            self._feed(data)
        welcome = _welcome(self._replies.pop(0))
        if len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise AgentGoneError(f"the agent passed {len(fds)} descriptors")
        return _Arena(fds[0], welcome.arena_bytes), welcome.node_id

    def _feed(self, data: bytes) -> None:
        try:
            self._replies += self._codec.feed(data)
        except FramingError as error:
            raise AgentGoneError(f"the agent is not understood: {error}") from error

    def _ask(self, request: local.Numbered, kind: type[R], patience_s: float) -> R:
        """Send a request and wait for its answer."""
        with self._lock:
            try:
                self._send_releases()
                self._socket.sendall(self._codec.encode(request))
                self._socket.settimeout(patience_s)
                while (reply := self._reply_to(request.request)) is None:
                    data = self._socket.recv(_READ_BYTES)
                    if not data:
                        raise AgentGoneError("the agent closed the connection")
                    self._feed(data)
            except OSError as error:
                self._socket.close()
                raise AgentGoneError(f"the agent does not answer: {error}") from error
            except AgentGoneError:
                self._socket.close()
                raise
        return _expect(reply, kind)

    def _reply_to(self, number: int) -> local.AgentReply | None:
        """The answer to request `number`, if it is there. Answers to requests that an interrupt
        abandoned are undone on the way."""
        while self._replies:
            reply = self._replies.pop(0)
            if isinstance(reply, (local.Welcome, local.Rejected)):
                raise AgentGoneError(f"the agent answered with {type(reply).__name__}")
            if reply.request == number:
                return reply
            if isinstance(reply, local.Got):
                self._to_release += [b.handle for b in reply.blocks if b.status == local.OK]
        return None

    def _send_releases(self) -> None:
        while self._to_release:
            handles = self._to_release[:MAX_KEYS]
            del self._to_release[:MAX_KEYS]
            self._socket.sendall(self._codec.encode(local.Release(handles)))

    def _release(self, handle: int) -> None:
        # list.append is atomic; a garbage collector may call this in the middle of _ask.
        self._to_release.append(handle)
        if self._lock.acquire(blocking=False):
            try:
                self._send_releases()
            except OSError:
                pass  # the agent is gone, and our pins with it
            finally:
                self._lock.release()

    def _block(self, key: bytes, got: local.GotBlock) -> Block:
        data = self._arena.read(got.offset, got.size_bytes)
        handle = got.handle
        return Block(key, data, got.digest, got.tier, lambda: self._release(handle))

    # --- what it offers -------------------------------------------------------------------------

    def get(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 1.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
    ) -> list[Block | None]:
        """Get blocks, pinned in the arena; None for each that could not be had in time.

        Waits at most `deadline_s` for the slowest of them. `gather_ms` (0 to 255): how long a
        home may hold its answer so that others can join; worth it where many nodes read the same
        at about the same time. `group`: a reader group of `namespace` (see `group`), all of whose
        members get the answer; with `expect`, another member is known to read these blocks, and
        this node only asks for what then is missing.

        Raises UnknownNamespaceError, ForbiddenError or UnavailableError for the namespace;
        BusyError, NoRoomError or QuotaError never: such a block counts as a miss, and
        `get_outcomes` says why.
        """
        outcomes = self.get_outcomes(
            namespace, keys, deadline_s, gather_ms=gather_ms, group=group, expect=expect
        )
        return [outcome.block for outcome in outcomes]

    def get_outcomes(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 1.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
    ) -> list[Outcome]:
        """As `get`, with the reason for every block that is missing."""
        outcomes: list[Outcome] = []
        for batch in _batches(_check_keys(keys)):
            request = local.Get(
                next(self._numbers), namespace, batch, deadline_s, gather_ms, group, expect
            )
            got = self._ask(request, local.Got, deadline_s + _GRACE_S)
            outcomes += [
                Outcome(
                    self._block(key, item) if item.status == local.OK else None,
                    item.status,
                    item.reason,
                )
                for key, item in zip(batch, got.blocks, strict=True)
            ]
        return outcomes

    def prefetch(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 10.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
    ) -> int:
        """Have blocks fetched into the arena, without waiting and without pinning them; returns
        how many of them were not there yet."""
        count = 0
        for batch in _batches(_check_keys(keys)):
            request = local.Prefetch(
                next(self._numbers), namespace, batch, deadline_s, gather_ms, group, expect
            )
            count += self._ask(request, local.Ack, _GRACE_S).count
        return count

    def put(self, namespace: int, blocks: Mapping[bytes, Buffer]) -> None:
        """Put blocks (16-byte key to bytes) into the pool; returns when each is at its home (or,
        with the agent's `--put-ack local`, when it is on this node).

        The bytes are copied once, into the arena. Raises PutError if some were not taken, and
        what `get` raises for the namespace.
        """
        _check_keys(list(blocks))
        failed: dict[bytes, str] = {}
        for batch in _put_batches(blocks, self._arena.put_batch_bytes):
            keys = [key for key, _ in batch]
            sizes = [len(view) for _, view in batch]
            alloc = local.Alloc(next(self._numbers), namespace, keys, sizes)
            extents = self._ask(alloc, local.Allocated, _GRACE_S).extents
            keys, tickets = _allocated(batch, extents, self._arena, failed)
            if tickets:
                commit = local.Commit(next(self._numbers), tickets)
                results = self._ask(commit, local.Committed, _SLOW_REQUEST_S).blocks
                _committed(keys, results, failed)
        if failed:
            raise PutError(failed)

    def exists(self, namespace: int, keys: Sequence[bytes], deadline_s: float = 1.0) -> int:
        """How many of `keys`, counted from the first without a gap, the pool holds now."""
        total = 0
        for batch in _batches(_check_keys(keys)):
            request = local.Exists(next(self._numbers), namespace, batch, deadline_s)
            count = self._ask(request, local.Ack, deadline_s + _GRACE_S).count
            total += count
            if count < len(batch):
                break
        return total

    def drop(self, namespace: int, keys: Sequence[bytes]) -> int:
        """Forget blocks here and at their homes; returns how many are now forgotten by every
        one of their homes. Copies that other nodes or the switch have cached stay until they are
        evicted: a key is never to be used again for other bytes."""
        count = 0
        for batch in _batches(_check_keys(keys)):
            request = local.Drop(next(self._numbers), namespace, batch)
            count += self._ask(request, local.Ack, _SLOW_REQUEST_S).count
        return count

    def pin(self, namespace: int, keys: Sequence[bytes]) -> int:
        """Keep blocks that are in this node's arena there, until `unpin` or `close`; returns how
        many were there and within this client's bounds."""
        count = 0
        for batch in _batches(_check_keys(keys)):
            request = local.Pin(next(self._numbers), namespace, batch)
            count += self._ask(request, local.Ack, _GRACE_S).count
        return count

    def unpin(self, namespace: int, keys: Sequence[bytes]) -> int:
        """Undo one `pin` of each block; returns how many there were."""
        count = 0
        for batch in _batches(_check_keys(keys)):
            request = local.Unpin(next(self._numbers), namespace, batch)
            count += self._ask(request, local.Ack, _GRACE_S).count
        return count

    def stats(self) -> dict[str, float]:
        """The agent's counters and present values, by name (`kvcast.hostagent.core.metrics`)."""
        return self._ask(local.GetStats(next(self._numbers)), local.Stats, _GRACE_S).counters

    def namespace(self, tenant: str, model: str, version: str, layout: str) -> int:
        """The namespace's number, made by the controller if it is new. `layout` must say all
        that decides what the bytes mean (dtype, block size, and the parallel rank where ranks
        hold different bytes). Raises UnavailableError without a controller."""
        request = local.FindNamespace(next(self._numbers), tenant, model, version, layout)
        return self._ask(request, local.FoundNamespace, _SLOW_REQUEST_S).info.namespace

    def group(self, namespace: int, nodes: Sequence[str]) -> int:
        """The number of the reader group of these nodes (node ids), made if it is new."""
        request = local.FindGroup(next(self._numbers), namespace, list(nodes))
        return self._ask(request, local.FoundGroup, _SLOW_REQUEST_S).info.group

    def describe(self, namespace: int = 0, keys: Sequence[bytes] = ()) -> local.PoolDescription:
        """What the agent knows of the pool, and which of `keys` this node holds."""
        request = local.DescribePool(next(self._numbers), namespace, _check_keys(keys))
        return self._ask(request, local.PoolDescription, _GRACE_S)

    def close(self) -> None:
        """Disconnect; the agent unpins all that this client held. Its blocks are useless."""
        self._socket.close()
        self._arena.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """A client for asyncio; many requests may be under way at once, on one connection.

    ``async with await AsyncClient.connect(path) as pool: ...``. Methods, results and errors are
    those of `Client`; cancelling a call forgets its answer (blocks that come all the same are
    released).
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        arena: _Arena,
        node_id: str,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._arena = arena
        self.node_id = node_id
        self._codec = _codec()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[local.AgentReply]] = {}
        self._gone: str = ""
        self._task = asyncio.create_task(self._read())

    @property
    def connected(self) -> bool:
        """False once the agent is gone or the client was closed; then make a new client."""
        return not self._gone

    @classmethod
    async def connect(
        cls, socket_path: str, *, name: str = "", timeout_s: float = 5.0
    ) -> AsyncClient:
        """Connect to the agent at `socket_path`; errors as for `Client`."""
        loop = asyncio.get_running_loop()
        codec = _codec()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        arena: _Arena | None = None
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, socket_path)
                hello = local.Hello(LOCAL_PROTOCOL_VERSION, (name or f"pid {os.getpid()}")[:256])
                await loop.sock_sendall(sock, codec.encode(hello))
                data, fds = await _receive_fds(loop, sock)
                while not (messages := list(codec.feed(data))):
                    data = await loop.sock_recv(sock, _READ_BYTES)
                    if not data:
                        raise AgentGoneError("the agent closed the connection")
            try:
                welcome = _welcome(messages[0])
                if len(fds) != 1 or len(messages) != 1:
                    raise AgentGoneError("the agent's welcome is not understood")
            except KvcastError:
                for fd in fds:
                    os.close(fd)
                raise
            arena = _Arena(fds[0], welcome.arena_bytes)
            reader, writer = await asyncio.open_unix_connection(sock=sock)
        except FramingError as error:
            sock.close()
            raise AgentGoneError(f"{socket_path}: {error}") from error
        except OSError as error:  # TimeoutError is one
            sock.close()
            raise AgentGoneError(f"{socket_path}: {error or 'no answer'}") from error
        except BaseException:
            sock.close()
            raise
        return cls(reader, writer, arena, welcome.node_id)

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(_READ_BYTES):
                for message in self._codec.feed(data):
                    if isinstance(message, (local.Welcome, local.Rejected)):
                        raise FramingError(f"a {type(message).__name__} in mid-stream")
                    self._answered(message)
            self._end("the agent closed the connection")
        except (OSError, FramingError) as error:
            self._end(f"the connection to the agent broke: {error}")

    def _answered(self, reply: local.AgentReply) -> None:
        future = self._waiting.pop(reply.request, None)
        if future is not None and not future.done():
            future.set_result(reply)
        else:
            self._give_back(reply)

    def _give_back(self, reply: local.AgentReply) -> None:
        """Nobody takes this answer: release what it holds."""
        if self._gone or self._writer.is_closing():
            return
        if isinstance(reply, local.Got):
            for got in reply.blocks:
                if got.status == local.OK:
                    self._release(got.handle)
        elif isinstance(reply, local.Allocated):
            tickets = [e.ticket for e in reply.extents if e.status == local.OK]
            self._writer.write(self._codec.encode(local.Abort(next(self._numbers), tickets)))

    def _end(self, reason: str) -> None:
        self._gone = self._gone or reason
        self._writer.close()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(AgentGoneError(reason))

    async def _ask(
        self,
        make: Callable[[int], local.Request],
        kind: type[R],
        patience_s: float,
    ) -> R:
        if self._gone:
            raise AgentGoneError(self._gone)
        number = next(self._numbers)
        future: asyncio.Future[local.AgentReply] = asyncio.get_running_loop().create_future()
        data = self._codec.encode(make(number))
        self._waiting[number] = future
        self._writer.write(data)
        reply: local.AgentReply | None = None
        try:
            async with asyncio.timeout(patience_s):
                await self._writer.drain()
                reply = await future
            return _expect(reply, kind)
        except TimeoutError:
            raise AgentGoneError(f"the agent did not answer within {patience_s} s") from None
        except OSError as error:
            raise AgentGoneError(f"the connection to the agent broke: {error}") from error
        finally:
            # Nobody waits for the answer any more. If it still comes, what it holds is given back.
            if self._waiting.get(number) is future:
                del self._waiting[number]
            if future.cancel() or future.cancelled():
                pass  # it did not come
            elif future.exception() is None and reply is None:
                # It came at the moment at which we were cancelled.
                self._give_back(future.result())

    def _release(self, handle: int) -> None:
        if not self._gone and not self._writer.is_closing():
            self._writer.write(self._codec.encode(local.Release([handle])))

    def _block(self, key: bytes, got: local.GotBlock) -> Block:
        data = self._arena.read(got.offset, got.size_bytes)
        handle = got.handle
        return Block(key, data, got.digest, got.tier, lambda: self._release(handle))

    async def get(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 1.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
    ) -> list[Block | None]:
        """See `Client.get`."""
        outcomes = await self.get_outcomes(
            namespace, keys, deadline_s, gather_ms=gather_ms, group=group, expect=expect
        )
        return [outcome.block for outcome in outcomes]

    async def get_outcomes(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 1.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
    ) -> list[Outcome]:
        """See `Client.get_outcomes`."""
        outcomes: list[Outcome] = []
        try:
            for batch in _batches(_check_keys(keys)):
                got = await self._ask(
                    partial(
                        local.Get,
                        namespace=namespace,
                        keys=batch,
                        deadline_s=deadline_s,
                        gather_ms=gather_ms,
                        group=group,
                        expect=expect,
                    ),
                    local.Got,
                    deadline_s + _GRACE_S,
                )
                outcomes += [
                    Outcome(
                        self._block(key, item) if item.status == local.OK else None,
                        item.status,
                        item.reason,
                    )
                    for key, item in zip(batch, got.blocks, strict=True)
                ]
        except BaseException:
            for outcome in outcomes:
                if outcome.block is not None:
                    outcome.block.release()
            raise
        return outcomes

    async def prefetch(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 10.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
    ) -> int:
        """See `Client.prefetch`."""
        count = 0
        for batch in _batches(_check_keys(keys)):
            ack = await self._ask(
                partial(
                    local.Prefetch,
                    namespace=namespace,
                    keys=batch,
                    deadline_s=deadline_s,
                    gather_ms=gather_ms,
                    group=group,
                    expect=expect,
                ),
                local.Ack,
                _GRACE_S,
            )
            count += ack.count
        return count

    async def put(self, namespace: int, blocks: Mapping[bytes, Buffer]) -> None:
        """See `Client.put`."""
        _check_keys(list(blocks))
        failed: dict[bytes, str] = {}
        for batch in _put_batches(blocks, self._arena.put_batch_bytes):
            keys = [key for key, _ in batch]
            sizes = [len(view) for _, view in batch]
            allocated = await self._ask(
                partial(local.Alloc, namespace=namespace, keys=keys, sizes=sizes),
                local.Allocated,
                _GRACE_S,
            )
            keys, tickets = _allocated(batch, allocated.extents, self._arena, failed)
            if tickets:
                committed = await self._ask(
                    partial(local.Commit, tickets=tickets),
                    local.Committed,
                    _SLOW_REQUEST_S,
                )
                _committed(keys, committed.blocks, failed)
        if failed:
            raise PutError(failed)

    async def exists(self, namespace: int, keys: Sequence[bytes], deadline_s: float = 1.0) -> int:
        """See `Client.exists`."""
        total = 0
        for batch in _batches(_check_keys(keys)):
            ack = await self._ask(
                partial(local.Exists, namespace=namespace, keys=batch, deadline_s=deadline_s),
                local.Ack,
                deadline_s + _GRACE_S,
            )
            total += ack.count
            if ack.count < len(batch):
                break
        return total

    async def _count(
        self,
        kind: type[local.Drop | local.Pin | local.Unpin],
        namespace: int,
        keys: Sequence[bytes],
        patience_s: float,
    ) -> int:
        count = 0
        for batch in _batches(_check_keys(keys)):
            make = partial(kind, namespace=namespace, keys=batch)
            ack = await self._ask(make, local.Ack, patience_s)
            count += ack.count
        return count

    async def drop(self, namespace: int, keys: Sequence[bytes]) -> int:
        """See `Client.drop`."""
        return await self._count(local.Drop, namespace, keys, _SLOW_REQUEST_S)

    async def pin(self, namespace: int, keys: Sequence[bytes]) -> int:
        """See `Client.pin`."""
        return await self._count(local.Pin, namespace, keys, _GRACE_S)

    async def unpin(self, namespace: int, keys: Sequence[bytes]) -> int:
        """See `Client.unpin`."""
        return await self._count(local.Unpin, namespace, keys, _GRACE_S)

    async def stats(self) -> dict[str, float]:
        """See `Client.stats`."""
        return (await self._ask(local.GetStats, local.Stats, _GRACE_S)).counters

    async def namespace(self, tenant: str, model: str, version: str, layout: str) -> int:
        """See `Client.namespace`."""
        found = await self._ask(
            lambda number: local.FindNamespace(number, tenant, model, version, layout),
            local.FoundNamespace,
            _SLOW_REQUEST_S,
        )
        return found.info.namespace

    async def group(self, namespace: int, nodes: Sequence[str]) -> int:
        """See `Client.group`."""
        found = await self._ask(
            lambda number: local.FindGroup(number, namespace, list(nodes)),
            local.FoundGroup,
            _SLOW_REQUEST_S,
        )
        return found.info.group

    async def describe(
        self, namespace: int = 0, keys: Sequence[bytes] = ()
    ) -> local.PoolDescription:
        """See `Client.describe`."""
        checked = _check_keys(keys)
        return await self._ask(
            lambda number: local.DescribePool(number, namespace, checked),
            local.PoolDescription,
            _GRACE_S,
        )

    async def close(self) -> None:
        """Disconnect; the agent unpins all that this client held. Its blocks are useless."""
        self._end("the client was closed")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._writer.wait_closed()
        except OSError:
            pass
        self._arena.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _receive_fds(
    loop: asyncio.AbstractEventLoop, sock: socket.socket
) -> tuple[bytes, list[int]]:
    """The first bytes of a connection and the descriptors that came with them."""
    while True:
        readable = asyncio.Event()
        loop.add_reader(sock.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(sock.fileno())
        try:
            data, fds, _flags, _address = socket.recv_fds(sock, _READ_BYTES, 4)
        except BlockingIOError:
            continue
        if not data:
            raise AgentGoneError("the agent closed the connection")
        return data, fds
