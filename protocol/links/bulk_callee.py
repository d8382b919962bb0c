"""The bulk link's callee: one connection on which another agent asks.

Owns: the order of the conversation (`kvcast.protocol.messages.bulk`), the version check, and how
long a caller may be silent or slow. Must not know: what a request deserves (`BulkService` does), or
how the caller proved who it is.

A caller that says nothing for `idle_s`, or is slower than `transfer_timeout_s` with a request, is
closed. One that sends requests ahead is answered in order, and not read from meanwhile. For one
connection at most `MAX_BULK_BYTES` are set aside or held, unless one block alone has more. When
the bytes of blocks leave is `departures`' to say, where several namespaces' do, and when those of
puts are read, `arrivals`'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from kvcast.protocol.links.bulk import BulkCounters, BulkOptions
from kvcast.protocol.links.departures import Departures, Turn, earliest
from kvcast.protocol.links.stream import LinkError, LinkStream
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    COMPANY,
    DONE,
    LATER,
    MAX_BULK_BYTES,
    MAX_BULK_MESSAGE_BYTES,
    MAX_FOLLOWING_BYTES,
    NO_ROOM,
    NOT_FOUND,
    WANTED,
    BlockHeader,
    BulkBlocks,
    BulkConvey,
    BulkDone,
    BulkDrop,
    BulkExists,
    BulkGet,
    BulkGo,
    BulkHeld,
    BulkHello,
    BulkPut,
    BulkTaken,
    CallerMessage,
    PutHeader,
    WantedBlock,
)
from kvcast.protocol.messages.wire import KEY_BYTES

QUICK_S: Final = 0.01
"""A part that has left within so long is followed by one twice as long,"""
SLOW_S: Final = 0.05
"""and one that has taken longer by one half as long."""


class WrongCallerError(LinkError):
    """A caller is another node than it says it is."""


class Sized(Protocol):
    """A copy of a block, as far as a get says what it is."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def digest(self) -> int: ...


S = TypeVar("S", bound=Sized)


class BulkService(Protocol[S]):
    """Whoever decides what a request gets: first whether the caller may ask at all (None), then
    block by block a copy, or a status. A copy that `begin_put` gave is given back by `end_put`
    or `abort_put`, one that `get` gave by `end_get`."""

    def view(self, copy: S) -> memoryview: ...

    def refuse_put(self, caller: str, put: BulkPut) -> str | None: ...

    def begin_put(self, put: BulkPut, block: PutHeader) -> S | str: ...

    def end_put(self, put: BulkPut, block: PutHeader, copy: S, digest: int) -> str:
        """`digest`: of the bytes that have come."""

    def abort_put(self, copy: S) -> None: ...

    def refuse_get(self, caller: str, get: BulkGet) -> str | None: ...

    def asks(self, now: float, caller: str, get: BulkGet) -> None:
        """A get that was not refused waits: each of its blocks until the caller is `told` of it, or
        `leaves`."""

    def is_met(self, now: float, namespace: int, block: WantedBlock) -> bool:
        """Whether others want a block, too."""

    def told(self, now: float, caller: str, namespace: int, block: WantedBlock) -> None:
        """The caller is told to READ a block."""

    def leaves(self, now: float, caller: str, namespace: int, block: WantedBlock) -> None:
        """The caller waits for a block no more: it is its turn, or the caller is gone."""

    def convey(self, caller: str, convey: BulkConvey) -> str:
        """DONE: the connection may become a conveyor."""

    def bring(self, now: float, get: BulkGet, then: Callable[[float], None]) -> bool:
        """Whether the blocks' bytes are to be waited for; if so, `then` is called once,
        with the present time."""

    def is_below(self, namespace: int, block: WantedBlock) -> bool:
        """Whether the block can be had, but not at once."""

    def get(self, caller: str, namespace: int, block: WantedBlock) -> S | str: ...

    def end_get(self, copy: S) -> None: ...

    def drop(self, caller: str, drop: BulkDrop) -> BulkDone: ...

    def exists(self, caller: str, exists: BulkExists) -> BulkHeld | BulkDone: ...


class BulkCallee(LinkStream[CallerMessage], Generic[S]):
    """See the module's text. `certified`: the only node that the caller can be; None = it is
    believed. `departures`, `arrivals`: each shared by all that a node's link carries that way;
    None = nobody waits."""

    one_at_a_time = True

    def __init__(
        self,
        now: float,
        service: BulkService[S],
        options: BulkOptions,
        counters: BulkCounters,
        certified: str | None = None,
        departures: Departures | None = None,
        arrivals: Departures | None = None,
    ) -> None:
        super().__init__(CallerMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        self._service = service
        self._options = options
        self._counters = counters
        self._certified = certified
        self._caller: str | None = None
        """Who calls; None before its BulkHello."""
        self._putting: deque[tuple[BulkPut, PutHeader, S | str]] = deque()
        """The blocks whose bytes are coming, and the room for them, or why there is none."""
        self._refusal: str | None = None
        """Why the put whose bytes are coming is refused as a whole."""
        self._taken: list[str] = []
        """What became of those of the same put that have come."""
        self._conveys = False
        self.pushes = False
        """Whether the caller is to push blocks on this connection, if it `conveys`."""
        self._sending: list[S] = []
        """The copies whose bytes are leaving,"""
        self._namespace = 0
        """of this namespace,"""
        self._left: deque[WantedBlock] = deque()
        """and what is wanted behind them."""
        self._in_parts = False
        self._answer_bytes = 0
        """Of the present get, promised so far,"""
        self._answer_at = now
        """the first of them at that time."""
        self._part_bytes = options.part_bytes
        self._part_at = now
        self._put_namespace = 0
        """The same of those that are coming."""
        self._leaving = Turn(departures or Departures(0.0), lambda: self.wake())
        self._coming = Turn(arrivals or Departures(0.0), lambda: self.wake())
        self._deadline = now + options.idle_s

    def _message(self, now: float, message: CallerMessage) -> None:
        if self._caller is None:
            self._caller = self._caller_of(message)
            self._deadline = now + self._options.idle_s
            return
        self._deadline = now + self._options.transfer_timeout_s
        self._counters.bulk_requests_served_total += 1
        service, caller = self._service, self._caller
        match message:
            case BulkPut():
                self._put_namespace = message.namespace
                refusal = service.refuse_put(caller, message)
                if message.follows:
                    self._begin_following(message, refusal)
                else:
                    self._send(BulkDone(refusal) if refusal else BulkGo(self._begin_put(message)))
                coming_bytes = sum(room.size - room.there for room in self.rooms)
                self._coming.begin(now, message.namespace, coming_bytes)
            case BulkGet():
                refusal = service.refuse_get(caller, message)
                if refusal:
                    self._send(BulkDone(refusal))
                else:
                    self._begin_get(now, caller, message)
            case BulkDrop():
                self._send(service.drop(caller, message))
            case BulkExists(keys=keys):
                if len(keys) % KEY_BYTES:
                    raise LinkError(f"a chain of {len(keys)} bytes")
                self._send(service.exists(caller, message))
            case BulkConvey():
                status = service.convey(caller, message)
                self.pushes = message.pushes
                self._conveys = self._held_up = status == DONE
                self._send(BulkDone(status))
            case _:
                raise LinkError(f"{type(message).__name__} as a request")

    @property
    def conveys(self) -> str:
        """Who calls, if the connection is a conveyor from now on, and everything was sent; else
        nothing, and nothing once this is closed. Whoever has the connection takes it, and closes
        this."""
        is_taken = not self._conveys or self._out or self.closed
        return "" if is_taken else self._caller or ""

    def end(self, now: float) -> None:
        """Close; harmless when repeated."""
        self._close(now)

    def _begin_put(self, put: BulkPut) -> list[str]:
        """Make room for the blocks that are wanted; one status a block."""
        service = self._service
        self._taken = []
        statuses = []
        room_bytes = 0
        for block in put.blocks:
            if self._putting and room_bytes + block.size_bytes > MAX_BULK_BYTES:
                statuses.append(NO_ROOM)
                continue
            room = service.begin_put(put, block)
            if isinstance(room, str):
                statuses.append(room)
                continue
            statuses.append(WANTED)
            room_bytes += block.size_bytes
            self._putting.append((put, block, room))
            self._receive_block(service.view(room))
        return statuses

    def _begin_following(self, put: BulkPut, refusal: str | None) -> None:
        """Make room for blocks whose bytes come at once, wanted or not."""
        if sum(block.size_bytes for block in put.blocks) > MAX_FOLLOWING_BYTES:
            raise LinkError("a put whose bytes follow is too long")
        self._taken = []
        self._refusal = refusal
        for block in put.blocks:
            room = refusal or self._service.begin_put(put, block)
            self._putting.append((put, block, room))
            if isinstance(room, str):
                self._skip_block(block.size_bytes)
            else:
                self._receive_block(self._service.view(room))

    def _begin_get(self, now: float, caller: str, get: BulkGet) -> None:
        self._namespace = get.namespace
        self._left.extend(get.blocks)
        self._in_parts = get.may_read
        self._answer_bytes = 0
        self._part_at = now
        if get.may_read:
            self._service.asks(now, caller, get)
        self._held_up = self._service.bring(now, get, self._brought)
        if not self._held_up:
            self._send_part(now)

    def _brought(self, now: float) -> None:
        """What the present get waited for is there, or will not be."""
        if not self.closed and self._held_up:
            self._held_up = False
            self._send_part(now)
            self.wake()

    def _send_part(self, now: float) -> None:
        """Send what is held of the blocks that are left, as far as it fits into one answer, or into
        this part of it."""
        service, caller, namespace = self._service, self._caller, self._namespace
        assert caller is not None
        headers: list[BlockHeader] = []
        views: list[memoryview] = []
        part_bytes = 0
        meets = self._meets(now)
        if not self._answer_bytes:
            self._answer_at = now
        is_last = now - self._answer_at >= self._options.connection_s
        while self._left:
            is_full = self._in_parts and part_bytes >= self._part_bytes
            if is_full and not is_last:
                break
            block = self._left.popleft()
            if meets(block):
                service.told(now, caller, namespace, block)
                headers.append(BlockHeader(COMPANY))
                continue
            if self._in_parts:
                service.leaves(now, caller, namespace, block)
            if self._answer_bytes and (is_full or service.is_below(namespace, block)):
                headers.append(BlockHeader(LATER))
                continue
            copy = service.get(caller, namespace, block)
            if isinstance(copy, str):
                headers.append(BlockHeader(copy))
                continue
            length = copy.size_bytes - block.start_bytes
            if length <= 0 or (self._answer_bytes and self._answer_bytes + length > MAX_BULK_BYTES):
                service.end_get(copy)
                headers.append(BlockHeader(NOT_FOUND if length <= 0 else LATER))
                continue
            self._answer_bytes += length
            part_bytes += length
            self._sending.append(copy)
            headers.append(BlockHeader(DONE, copy.size_bytes, copy.digest))
            views.append(service.view(copy)[block.start_bytes :])
        self._send(BulkBlocks(headers))
        self._part_at = now
        for view in views:
            self._send_block(view)

    def _meets(self, now: float) -> Callable[[WantedBlock], bool]:
        """Which of the blocks that are left had better be READ: those that others want, too; and
        all, if those are most: what came by TCP beside them would take the link from them."""
        if not self._in_parts:
            return lambda _block: False
        met = [self._service.is_met(now, self._namespace, block) for block in self._left]
        if 2 * sum(met) >= len(met):
            return lambda _block: True
        keys = {block.key for block, is_met in zip(self._left, met, strict=True) if is_met}
        return lambda block: block.key in keys

    def _adapt_parts(self, now: float) -> None:
        """The last part of an answer has left."""
        took_s = now - self._part_at
        if took_s < QUICK_S:
            self._part_bytes = min(2 * self._part_bytes, MAX_BULK_BYTES)
        elif took_s > SLOW_S:
            self._part_bytes = max(self._part_bytes // 2, self._options.part_bytes)

    def _caller_of(self, message: CallerMessage) -> str:
        if not isinstance(message, BulkHello) or message.version != BULK_PROTOCOL_VERSION:
            raise LinkError("the first message is no BulkHello of our version")
        if self._certified is not None and self._certified != message.node_id:
            raise WrongCallerError(f"node {self._certified} calls itself {message.node_id}")
        return message.node_id

    def _block_came(self, now: float, digest: int | None) -> None:
        put, block, room = self._putting.popleft()
        if isinstance(room, str):
            self._taken.append(room)
        else:
            assert digest is not None
            self._taken.append(self._service.end_put(put, block, room, digest))
        if not self._putting:
            refusal, self._refusal = self._refusal, None
            self._send(BulkDone(refusal) if refusal else BulkTaken(self._taken))

    def _allowed_bytes(self, now: float) -> int:
        return self._leaving.allowed(now, self._namespace)

    def receivable_bytes(self, now: float) -> int:
        return self._coming.allowed(now, self._put_namespace)

    @property
    def window_bytes(self) -> int:
        """Not more than a turn of who waits for turns: what is on its way has no weight."""
        return self._coming.ahead_bytes

    @property
    def wants_bytes(self) -> bool:
        return super().wants_bytes and self._coming.until is None

    def get_timer(self) -> float | None:
        """When `handle_timer` is to be called, or there may be more to send, or to read."""
        if self.closed:
            return None
        return earliest(self._deadline, self._leaving.until, self._coming.until)

    def handle_timer(self, now: float) -> None:
        self._leaving.due(now)
        self._coming.due(now)
        super().handle_timer(now)

    def _block_sending(self, now: float, size_bytes: int) -> None:
        self._leaving.moved(now, self._namespace, size_bytes)
        self._counters.payload_bytes_sent_bulk_get_total += size_bytes

    def _bytes_coming(self, now: float, size_bytes: int) -> None:
        self._coming.moved(now, self._put_namespace, size_bytes)

    def _drained(self, now: float) -> None:
        if self._sending:
            self._adapt_parts(now)
        self._end_gets()
        if self._left and not self._held_up:
            self._send_part(now)
            return
        if not self._putting:
            self._deadline = now + self._options.idle_s

    def _end_gets(self) -> None:
        sending, self._sending = self._sending, []
        for copy in sending:
            self._service.end_get(copy)

    def _rules_broken(self, error: Exception) -> None:
        if isinstance(error, WrongCallerError):
            self._counters.bulk_connections_refused_total += 1
        else:
            self._counters.bulk_protocol_errors_total += 1

    def _over(self, now: float) -> None:
        waited = [turn for turn in (self._leaving, self._coming) if turn.leave()]
        while self._putting:
            _, _, room = self._putting.popleft()
            if not isinstance(room, str):
                self._service.abort_put(room)
        self._end_gets()
        for block in self._left if self._in_parts else ():
            assert self._caller is not None
            self._service.leaves(now, self._caller, self._namespace, block)
        self._left.clear()
        for turn in waited:
            turn.pass_on()
