"""The RDMA link's callee: one connection on which another agent asks for windows.

Owns: the order of the conversation (`kvcast.protocol.messages.rdma`), how many windows are open and
until when, and that memory is given back only when nothing reaches it any more. Must not know: what
a request deserves (`BulkService` does), how the caller proved who it is, or how a card is driven:
it orders (`kvcast.protocol.links.rdma`).

When windows are opened is `grants`' to say, where several namespaces want some. Until then nothing
is pinned and no room set aside, and what the request deserves is decided when it is its turn. One
that waits for longer than `grant_wait_s` gets no windows, and its caller goes another way.

A caller that says nothing for `idle_s`, or leaves windows open for longer than `lease_s`, is
closed, and its pair with it. One that opens more requests than the protocol allows breaks its
rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from kvcast.protocol.links.bulk import UNREACHABLE
from kvcast.protocol.links.bulk_callee import BulkService, Sized, WrongCallerError
from kvcast.protocol.links.grants import Grant, Grants
from kvcast.protocol.links.rdma import (
    ClosePair,
    CloseWindow,
    Completed,
    JoinPair,
    MakePair,
    OpenWindow,
    Order,
    RdmaCounters,
    RdmaOptions,
)
from kvcast.protocol.links.stream import LinkError, LinkStream
from kvcast.protocol.messages.bulk import (
    DONE,
    MAX_BULK_BYTES,
    NO_ROOM,
    NOT_FOUND,
    WANTED,
    BulkGet,
    BulkPut,
)
from kvcast.protocol.messages.rdma import (
    MAX_RDMA_MESSAGE_BYTES,
    MAX_RDMA_REQUESTS,
    RDMA_PROTOCOL_VERSION,
    Endpoint,
    RdmaCallerMessage,
    RdmaFinished,
    RdmaGet,
    RdmaHello,
    RdmaPut,
    RdmaRefusal,
    RdmaTaken,
    RdmaWelcome,
    RdmaWindows,
    Window,
)
from kvcast.protocol.messages.wire import digest_of

S = TypeVar("S", bound=Sized)


@dataclass(slots=True, eq=False)
class _Opened(Generic[S]):
    """One block's window."""

    position: int
    copy: S
    put: BulkPut | None
    """None of a get."""
    size_bytes: int
    """In the window."""


class _State(Enum):
    """Where a request stands; it goes from one to the next."""

    HELD = "held"
    """It is not its turn yet."""
    ANSWERED = "answered"
    """Its windows are being opened, or are open; one that was late has none."""
    FINISHED = "finished"
    """Its windows are being closed."""


@dataclass(slots=True, eq=False)
class _Request(Generic[S]):
    """A get or a put, until its windows are closed."""

    number: int
    grant: Grant
    deadline: float
    """Until when it waits for its turn; then, the end of its lease."""
    windows: list[Window]
    state: _State = _State.HELD
    opened: dict[int, _Opened[S]] = field(default_factory=dict)
    """By the token of the order that opened it."""
    waiting: int = 0
    """Orders that have not been carried out."""

    @property
    def open_bytes(self) -> int:
        """In its windows."""
        return sum(opened.size_bytes for opened in self.opened.values())


class RdmaCallee(LinkStream[RdmaCallerMessage], Generic[S]):
    """See the module's text. `grants`: shared by all connections of a node; `certified`: the only
    node that the caller can be; None = it is believed."""

    def __init__(
        self,
        now: float,
        service: BulkService[S],
        options: RdmaOptions,
        counters: RdmaCounters,
        grants: Grants,
        certified: str | None = None,
    ) -> None:
        super().__init__(
            RdmaCallerMessage,
            max_message_bytes=MAX_RDMA_MESSAGE_BYTES,
            max_unsent_bytes=4 * MAX_RDMA_REQUESTS * MAX_RDMA_MESSAGE_BYTES,
        )
        self._service = service
        self._options = options
        self._counters = counters
        self._grants = grants
        self._certified = certified
        self._caller: str | None = None
        self.remote: Endpoint | None = None
        """The caller's half of the pair."""
        self._welcomed = False
        self._requests: dict[int, _Request[S]] = {}
        self._of_token: dict[int, _Request[S]] = {}
        """The request of each order that has not been carried out."""
        self._next_token = 0
        self._orders: list[Order] = []
        self._deadline = now + options.connect_timeout_s

    @property
    def open_bytes(self) -> int:
        """In windows that are open for the caller."""
        return sum(request.open_bytes for request in self._requests.values())

    def take_orders(self) -> list[Order]:
        """What the card is to do, in this order; each is given once."""
        taken, self._orders = self._orders, []
        return taken

    # --- the caller ---------------------------------------------------------------------------

    def _message(self, now: float, message: RdmaCallerMessage) -> None:
        if self._caller is None:
            self._caller, self.remote = self._caller_of(message)
            self._deadline = now + self._options.connect_timeout_s
            self._orders.append(MakePair())
            return
        if not self._welcomed:
            raise LinkError("a request before the welcome")
        self._set_deadline(now)
        match message:
            case RdmaGet() | RdmaPut():
                self._ask(now, self._caller, message)
            case RdmaFinished(request=number):
                request = self._requests.get(number)
                if request is None or request.state is not _State.ANSWERED or request.waiting:
                    raise LinkError(f"request {number} is finished, which is not open")
                self._close_windows(now, request)
            case _:
                raise LinkError(f"{type(message).__name__} as a request")

    def _caller_of(self, message: RdmaCallerMessage) -> tuple[str, Endpoint]:
        if not isinstance(message, RdmaHello) or message.version != RDMA_PROTOCOL_VERSION:
            raise LinkError("the first message is no RdmaHello of our version")
        if self._certified is not None and self._certified != message.node_id:
            raise WrongCallerError(f"node {self._certified} calls itself {message.node_id}")
        return message.node_id, message.endpoint

    def _ask(self, now: float, caller: str, message: RdmaGet | RdmaPut) -> None:
        number = message.request
        if number in self._requests or len(self._requests) >= MAX_RDMA_REQUESTS:
            raise LinkError(f"request {number} is open, or one too many")
        self._counters.rdma_requests_served_total += 1

        def begin(now: float) -> int:
            request.state = _State.ANSWERED
            request.deadline = now + self._options.lease_s
            if isinstance(message, RdmaGet):
                self._get(caller, request, message)
            else:
                self._put(caller, request, message)
            self._answer(now, request)
            self._set_deadline(now)
            return request.open_bytes

        grant = Grant(message.namespace, begin, self._woken)
        windows = [Window(NO_ROOM)] * len(message.blocks)
        deadline = now + self._options.grant_wait_s
        request = self._requests[number] = _Request[S](number, grant, deadline, windows)
        self._grants.ask(now, grant)
        if request.state is _State.HELD:
            self._counters.rdma_requests_held_total += 1
            self._set_deadline(now)

    def _woken(self) -> None:
        self.wake()

    def _get(self, caller: str, request: _Request[S], message: RdmaGet) -> None:
        service = self._service
        refusal = service.refuse_get(caller, BulkGet(message.namespace, message.blocks))
        for position, wanted in enumerate(message.blocks):
            if refusal is not None:
                request.windows[position] = Window(refusal)
                continue
            copy = service.get(caller, message.namespace, wanted)
            if isinstance(copy, str):
                request.windows[position] = Window(copy)
            elif copy.size_bytes <= wanted.start_bytes:
                service.end_get(copy)
                request.windows[position] = Window(NOT_FOUND)
            else:
                memory = service.view(copy)[wanted.start_bytes :]
                self._open(request, _Opened(position, copy, None, len(memory)), memory)

    def _put(self, caller: str, request: _Request[S], message: RdmaPut) -> None:
        service = self._service
        put = BulkPut(message.namespace, message.epoch, message.meaning, message.blocks)
        refusal = service.refuse_put(caller, put)
        room_bytes = 0
        for position, header in enumerate(message.blocks):
            if refusal is not None:
                request.windows[position] = Window(refusal)
                continue
            if request.opened and room_bytes + header.size_bytes > MAX_BULK_BYTES:
                continue
            room = service.begin_put(put, header)
            if isinstance(room, str):
                request.windows[position] = Window(room)
            else:
                room_bytes += header.size_bytes
                memory = service.view(room)
                self._open(request, _Opened(position, room, put, len(memory)), memory)

    # --- windows ------------------------------------------------------------------------------

    def _open(self, request: _Request[S], opened: _Opened[S], memory: memoryview) -> None:
        token = self._token(request)
        request.opened[token] = opened
        self._orders.append(OpenWindow(token, memory, writable=opened.put is not None))

    def _token(self, request: _Request[S]) -> int:
        self._next_token += 1
        request.waiting += 1
        self._of_token[self._next_token] = request
        return self._next_token

    def _answer(self, now: float, request: _Request[S]) -> None:
        """Tell the caller of its windows, when all are open."""
        if not request.waiting:
            self._send(RdmaWindows(request.number, request.windows))
            if not request.opened:
                del self._requests[request.number]
            self._set_deadline(now)

    def _close_windows(self, now: float, request: _Request[S]) -> None:
        request.state = _State.FINISHED
        for opening in list(request.opened):
            self._orders.append(CloseWindow(self._token(request), opening))

    def _end_request(self, now: float, request: _Request[S]) -> None:
        """All windows are closed: what lies there stays as it is."""
        del self._requests[request.number]
        statuses = [self._settle(opened) for opened in request.opened.values()]
        self._send(RdmaTaken(request.number, [status for status in statuses if status]))
        self._set_deadline(now)
        self._grants.end(now, request.grant)

    def _settle(self, opened: _Opened[S]) -> str | None:
        """Give a get's copy back, or take what was put; the status of a put."""
        service, copy, put = self._service, opened.copy, opened.put
        if put is None:
            service.end_get(copy)
            return None
        header = put.blocks[opened.position]
        return service.end_put(put, header, copy, digest_of(service.view(copy)))

    def _set_deadline(self, now: float) -> None:
        if self.closed or self._ending:
            return
        leases = [request.deadline for request in self._requests.values()]
        self._deadline = min(leases, default=now + self._options.idle_s)

    def _held(self) -> list[_Request[S]]:
        return [item for item in self._requests.values() if item.state is _State.HELD]

    def _late(self, now: float) -> None:
        late = [item for item in self._held() if item.deadline <= now]
        if not late:
            self._close(now)
            return
        for request in late:
            request.state = _State.ANSWERED
            request.windows = [Window(UNREACHABLE)] * len(request.windows)
            self._counters.rdma_requests_late_total += 1
            self._answer(now, request)
        self._grants.end(now, *(request.grant for request in late))

    # --- what the card reports ----------------------------------------------------------------

    def pair_made(self, now: float, endpoint: Endpoint | None) -> None:
        """Our half of the pair; None = there is none to be had."""
        if self.closed:
            return
        if endpoint is None:
            self._counters.rdma_refused_total += 1
            self._send(RdmaRefusal())
            self._end(now)
            return
        assert self.remote is not None
        self._orders.append(JoinPair(self.remote))
        self._counters.rdma_pairs_made_total += 1
        self._welcomed = True
        self._send(RdmaWelcome(endpoint))
        self._set_deadline(now)

    def completed(self, now: float, done: list[Completed]) -> None:
        """Orders were carried out, or failed."""
        for item in done:
            request = self._of_token.pop(item.token, None)
            if request is None or self.closed:
                continue
            if item.problem:
                self.broken(now, item.problem)
                return
            request.waiting -= 1
            opened = request.opened.get(item.token)
            if opened is not None:
                status = DONE if opened.put is None else WANTED
                size_bytes, digest = opened.copy.size_bytes, opened.copy.digest
                if opened.put is not None:
                    header = opened.put.blocks[opened.position]
                    size_bytes, digest = header.size_bytes, header.digest
                request.windows[opened.position] = Window(
                    status, size_bytes, digest, item.address, item.key
                )
                self._answer(now, request)
            elif not request.waiting:
                self._end_request(now, request)

    def broken(self, now: float, problem: str) -> None:
        """The pair does nothing more."""
        if not self.closed:
            self._counters.rdma_pairs_broken_total += 1
            self.problem = problem
            self._close(now)

    def pair_closed(self, now: float) -> None:
        """Nothing reaches our memory through this pair any more: give back what was held for it."""
        assert self.closed
        requests, self._requests = self._requests, {}
        self._of_token.clear()
        for request in requests.values():
            for opened in request.opened.values():
                if opened.put is None:
                    self._service.end_get(opened.copy)
                else:
                    self._service.abort_put(opened.copy)
        self._grants.end(now, *(request.grant for request in requests.values()))

    def _over(self, now: float) -> None:
        self._orders = [ClosePair()]
        # What is open stays granted until the pair is closed.
        self._grants.end(now, *(item.grant for item in self._held()))

    def _rules_broken(self, error: Exception) -> None:
        if isinstance(error, WrongCallerError):
            self._counters.bulk_connections_refused_total += 1
        else:
            self._counters.rdma_protocol_errors_total += 1

    def check(self) -> None:
        """AssertionError if this end contradicts itself."""
        super().check()
        assert len(self._requests) <= MAX_RDMA_REQUESTS or self.closed
        waiting = sum(request.waiting for request in self._requests.values())
        assert self.closed or waiting == len(self._of_token)
        assert not any(item.opened for item in self._held())
        assert all(item.grant.size_bytes == item.open_bytes for item in self._requests.values())
