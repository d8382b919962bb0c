"""The bulk link's callee: one connection on which another agent asks.

Owns: the order of the conversation (`kvcast.protocol.messages.bulk`), the version check, and how
long a caller may be silent or slow. Must not know: what a request deserves (`BulkService` does), or
how the caller proved who it is.

A caller that says nothing for `idle_s`, or is slower than `transfer_timeout_s` with a request, is
closed. One that sends requests ahead is answered in order, and not read from meanwhile.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from kvcast.protocol.links.bulk import BulkCounters, BulkOptions
from kvcast.protocol.links.stream import LinkError, LinkStream
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
    CallerMessage,
)


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
    """Whoever decides what a request gets. A copy that `begin_put` gave is given back by `end_put`
    or `abort_put`, one that `get` gave by `end_get`."""

    def view(self, copy: S) -> memoryview: ...

    def begin_put(self, caller: str, put: BulkPut) -> S | BulkDone: ...

    def end_put(self, put: BulkPut, copy: S) -> BulkDone: ...

    def abort_put(self, copy: S) -> None: ...

    def get(self, caller: str, get: BulkGet) -> S | BulkDone: ...

    def end_get(self, copy: S) -> None: ...

    def drop(self, caller: str, drop: BulkDrop) -> BulkDone: ...

    def exists(self, caller: str, exists: BulkExists) -> BulkHeld | BulkDone: ...


class BulkCallee(LinkStream[CallerMessage], Generic[S]):
    """See the module's text. `certified`: the only node that the caller can be; None = it is
    believed."""

    one_at_a_time = True

    def __init__(
        self,
        now: float,
        service: BulkService[S],
        options: BulkOptions,
        counters: BulkCounters,
        certified: str | None = None,
    ) -> None:
        super().__init__(CallerMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        self._service = service
        self._options = options
        self._counters = counters
        self._certified = certified
        self._caller: str | None = None
        """Who calls; None before its BulkHello."""
        self._put: tuple[BulkPut, S] | None = None
        """The put whose bytes are coming, and the room for them."""
        self._sending: S | None = None
        """The copy whose bytes are leaving."""
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
                room = service.begin_put(caller, message)
                if isinstance(room, BulkDone):
                    self._send(room)
                else:
                    self._put = message, room
                    self._send(BulkGo())
                    self._receive_block(service.view(room))
            case BulkGet():
                copy = service.get(caller, message)
                if isinstance(copy, BulkDone):
                    self._send(copy)
                else:
                    self._sending = copy
                    self._send(BulkBlock(copy.size_bytes, copy.digest))
                    self._send_block(service.view(copy))
            case BulkDrop():
                self._send(service.drop(caller, message))
            case BulkExists():
                self._send(service.exists(caller, message))
            case _:
                raise LinkError(f"{type(message).__name__} as a request")

    def _caller_of(self, message: CallerMessage) -> str:
        if not isinstance(message, BulkHello) or message.version != BULK_PROTOCOL_VERSION:
            raise LinkError("the first message is no BulkHello of our version")
        if self._certified is not None and self._certified != message.node_id:
            raise WrongCallerError(f"node {self._certified} calls itself {message.node_id}")
        return message.node_id

    def _block_came(self, now: float) -> None:
        assert self._put is not None
        (put, room), self._put = self._put, None
        self._send(self._service.end_put(put, room))

    def _block_sending(self, size_bytes: int) -> None:
        self._counters.payload_bytes_sent_bulk_get_total += size_bytes

    def _drained(self, now: float) -> None:
        if self._sending is not None:
            copy, self._sending = self._sending, None
            self._service.end_get(copy)
        if self._put is None:
            self._deadline = now + self._options.idle_s

    def _rules_broken(self, error: Exception) -> None:
        if isinstance(error, WrongCallerError):
            self._counters.bulk_connections_refused_total += 1
        else:
            self._counters.bulk_protocol_errors_total += 1

    def _over(self, now: float) -> None:
        if self._put is not None:
            (_, room), self._put = self._put, None
            self._service.abort_put(room)
        if self._sending is not None:
            copy, self._sending = self._sending, None
            self._service.end_get(copy)
