"""The RDMA link's caller: one node's gets and puts with all others, by READ and WRITE.

Owns: one connection and one pair for each node, the requests on it, deadlines, and the order of a
conversation (`kvcast.protocol.messages.rdma`). Must not know: why a call is made, what becomes of
one that RDMA cannot make (`carriers`), or how a card is driven: it orders (`links.rdma`).

Calls that are alike go together, `MAX_RDMA_BLOCKS` in a request, `MAX_RDMA_REQUESTS` at once. While
the card has much to move, a request waits until it has as many blocks as still move: windows are
opened while those do, and one message does for several. Calls beyond wait their turn, at most
`queue_per_peer` of them, and one more fails at once as unreachable. When a pair breaks, a get hears
nothing for `silence_s`, or a call's deadline comes, the connection ends and all its calls as
unreachable: first the pair is closed, since until then the card may still fill the memory that
belongs to them. An idle pair is closed after half of `idle_s`, before the callee does so.

After each event take `instructions`, and do them in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from kvcast.protocol.links.bulk import EVICTED, UNREACHABLE, GetCall, PutCall
from kvcast.protocol.links.rdma import (
    ClosePair,
    Completed,
    JoinPair,
    MakePair,
    Order,
    RdmaCounters,
    RdmaOptions,
    Read,
    Write,
)
from kvcast.protocol.links.stream import LinkError, LinkStream
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import MAX_BULK_BYTES, PutHeader, WantedBlock
from kvcast.protocol.messages.control import NodeInfo
from kvcast.protocol.messages.rdma import (
    MAX_RDMA_BLOCKS,
    MAX_RDMA_MESSAGE_BYTES,
    MAX_RDMA_REQUESTS,
    RDMA_PROTOCOL_VERSION,
    Endpoint,
    RdmaCalleeMessage,
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

RdmaCall = GetCall | PutCall

_MUCH_BYTES: Final = 4 << 20
"""A fast card (100 Gb/s) moves so much in the time in which windows are opened."""


@dataclass(frozen=True, slots=True, eq=False)
class Connect:
    """Make this connection to its `node`; then tell it `connected`, or `lost`."""

    connection: RdmaConnection


@dataclass(frozen=True, slots=True, eq=False)
class Flush:
    """Carry out what this connection has ordered; it has something to send, or is closed."""

    connection: RdmaConnection


@dataclass(frozen=True, slots=True, eq=False)
class Complete:
    """This call has ended: tell its `ended`."""

    call: RdmaCall
    outcome: str


@dataclass(frozen=True, slots=True)
class Failed:
    """RDMA does not work with this node just now; before the ends of the calls that show it."""

    node_id: str
    problem: str


Instruction = Connect | Flush | Complete | Failed


class _Peer:
    """One node that calls go to."""

    def __init__(self) -> None:
        self.connection: RdmaConnection | None = None
        self.queue: deque[RdmaCall] = deque()


class RdmaCaller:
    """See the module's text. `view` gives the bytes of a put's copy."""

    def __init__(
        self,
        node_id: str,
        options: RdmaOptions,
        counters: RdmaCounters,
        view: Callable[[Any], memoryview],
        max_transfer_bytes: int,
    ) -> None:
        self.node_id = node_id
        self.options = options
        self.counters = counters
        self.view = view
        self.max_transfer_bytes = max_transfer_bytes
        self._nodes: Mapping[int, NodeInfo] = {}
        self._peers: dict[tuple[str, str, int], _Peer] = {}
        self._instructions: list[Instruction] = []
        self._closed = False

    def instructions(self) -> list[Instruction]:
        """What is to be done, in this order; each is given once."""
        taken, self._instructions = self._instructions, []
        return taken

    def use_nodes(self, now: float, nodes: Mapping[int, NodeInfo]) -> None:
        """The nodes by index from now on. What is idle towards others is closed."""
        self._nodes = nodes
        present = {_address(node) for node in nodes.values()}
        for address, peer in list(self._peers.items()):
            connection = peer.connection
            if address not in present and (connection is None or connection.is_idle):
                if connection is not None:
                    connection.end(now)
                if not peer.queue:
                    del self._peers[address]

    def ask(self, now: float, *calls: RdmaCall) -> None:
        """Make calls, now or in their turn."""
        asked: dict[_Peer, NodeInfo] = {}
        for call in calls:
            node = self._nodes.get(call.node)
            if node is None or not node.rdma_port or self._closed:
                self._complete(call, UNREACHABLE)
                continue
            peer = self._peers.setdefault(_address(node), _Peer())
            if len(peer.queue) >= self.options.queue_per_peer:
                self._complete(call, UNREACHABLE)
            else:
                self.counters.rdma_requests_sent_total += 1
                peer.queue.append(call)
                asked[peer] = node
        for peer, node in asked.items():
            self.start(now, peer, node)

    def close(self, now: float) -> None:
        """End all calls as unreachable, and close all connections."""
        self._closed = True
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.end(now)
            self._fail_queue(peer)

    def check(self) -> None:
        """AssertionError if this end contradicts itself."""
        for peer in self._peers.values():
            assert len(peer.queue) <= self.options.queue_per_peer
            assert not peer.queue or peer.connection is not None
            if peer.connection is not None:
                peer.connection.check()

    # --- for connections ----------------------------------------------------------------------

    def start(self, now: float, peer: _Peer, node: NodeInfo) -> None:
        """Start the calls whose turn has come."""
        connection = peer.connection
        if connection is None:
            if not peer.queue:
                return
            connection = peer.connection = RdmaConnection(now, self, node, peer)
            self._instructions.append(Connect(connection))
        started = False
        while (
            connection.may_ask
            and len(peer.queue) >= min(connection.worth_waiting_for, MAX_RDMA_BLOCKS)
            and (calls := self._take_alike(now, peer.queue))
        ):
            connection.request(now, calls)
            started = True
        if started:
            self.flush(connection)

    def _take_alike(self, now: float, queue: deque[RdmaCall]) -> list[RdmaCall]:
        """The first calls of a queue, as many as one request can make; those that turn out not to
        be worth making end."""
        calls: list[RdmaCall] = []
        size_bytes = 0
        while queue and len(calls) < MAX_RDMA_BLOCKS:
            call = queue[0]
            if calls and not _alike(calls[0], call):
                break
            if isinstance(call, PutCall):
                size_bytes += call.copy.size_bytes
                if calls and size_bytes > MAX_BULK_BYTES:
                    break
            queue.popleft()
            if isinstance(call, PutCall) and not call.begin():
                self._complete(call, EVICTED)
            elif call.deadline <= now:
                self._complete(call, UNREACHABLE)
            else:
                calls.append(call)
        return calls

    def _complete(self, call: RdmaCall, outcome: str) -> None:
        self._instructions.append(Complete(call, outcome))

    def ended(self, call: RdmaCall, outcome: str) -> None:
        """One of a connection's calls has ended."""
        self._complete(call, outcome)

    def failed(self, connection: RdmaConnection, problem: str) -> None:
        """A connection could not do what it was made for."""
        if not self._closed:
            self._instructions.append(Failed(connection.node.node_id, problem))

    def flush(self, connection: RdmaConnection) -> None:
        """A connection has orders, or something to send."""
        self._instructions.append(Flush(connection))

    def over(self, connection: RdmaConnection) -> None:
        """A connection is closed, its own calls have ended, and what waited ends with them: it
        would only meet the same."""
        connection.peer.connection = None
        self._fail_queue(connection.peer)

    def _fail_queue(self, peer: _Peer) -> None:
        while peer.queue:
            self._complete(peer.queue.popleft(), UNREACHABLE)


def _address(node: NodeInfo) -> tuple[str, str, int]:
    return node.node_id, node.bulk_host, node.rdma_port


def _alike(first: RdmaCall, other: RdmaCall) -> bool:
    """Whether one request can make both calls."""
    if isinstance(first, GetCall):
        return isinstance(other, GetCall) and first.block.namespace == other.block.namespace
    return (
        isinstance(other, PutCall)
        and first.copy.block.namespace == other.copy.block.namespace
        and (first.epoch, first.meaning) == (other.epoch, other.meaning)
    )


@dataclass(slots=True, eq=False)
class _Moving:
    """One block whose bytes move."""

    call: RdmaCall
    memory: memoryview
    """All of the block."""
    digest: int
    left: int = 0
    """READs or WRITEs that have not ended."""


@dataclass(slots=True, eq=False)
class _Request:
    """Calls that one message asks for."""

    number: int
    calls: list[RdmaCall]
    deadline: float
    moving: list[_Moving] = field(default_factory=list)
    left: int = 0
    """Of them, those that have not ended."""
    answered: bool = False
    finished: bool = False

    @property
    def is_get(self) -> bool:
        return isinstance(self.calls[0], GetCall)


class RdmaConnection(LinkStream[RdmaCalleeMessage]):
    """One connection, and its pair, to `node`."""

    def __init__(self, now: float, link: RdmaCaller, node: NodeInfo, peer: _Peer) -> None:
        super().__init__(RdmaCalleeMessage, max_message_bytes=MAX_RDMA_MESSAGE_BYTES)
        self.node = node
        self.peer = peer
        self._link = link
        self._requests: dict[int, _Request] = {}
        self._number = 0
        self._ready = False
        """The other half of the pair is known."""
        self._orders: list[Order] = []
        self._token = 0
        self._moving: dict[int, tuple[_Request, _Moving]] = {}
        """By the token of each READ or WRITE that the card has."""
        self._waiting: deque[tuple[_Request, _Moving, int, int, int]] = deque()
        """READs and WRITEs that wait for others to end: from where to where in the block, and where
        its window begins."""
        self._windows: dict[_Moving, Window] = {}
        """Of blocks whose bytes move,"""
        self._moving_bytes = 0
        """so many."""
        self._heard_at = now
        self._why = ""
        self._deadline = now + link.options.connect_timeout_s

    # --- events -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self._ready and not self._requests

    @property
    def may_ask(self) -> bool:
        """Whether one more request can begin."""
        return self._ready and not self.closed and len(self._requests) < MAX_RDMA_REQUESTS

    @property
    def worth_waiting_for(self) -> int:
        """How many blocks should be asked for together, if any: they come after those that move
        already, and while much of that is left nothing is gained by asking now."""
        if self._moving_bytes < _MUCH_BYTES:
            return 1
        return max(1, len(self._windows))

    def connected(self, now: float) -> None:
        """The connection stands, and at its other end is whom it was made to."""
        if not self.closed:
            self._orders.append(MakePair())
            self._link.flush(self)

    def wrong_peer(self, now: float, problem: str) -> None:
        """Somebody else is at the other end."""
        self._link.counters.bulk_wrong_peers_total += 1
        self.problem = problem
        self.end(now)

    def take_orders(self) -> list[Order]:
        """What the card is to do, in this order; each is given once."""
        taken, self._orders = self._orders, []
        return taken

    def pair_made(self, now: float, endpoint: Endpoint | None) -> None:
        """Our half of the pair; None = there is none to be had."""
        if self.closed:
            return
        if endpoint is None:
            self._link.counters.rdma_refused_total += 1
            self._fail(now, "this node has no more queue pairs")
            return
        self._link.counters.rdma_pairs_made_total += 1
        self._send(RdmaHello(RDMA_PROTOCOL_VERSION, self._link.node_id, endpoint))
        self._link.flush(self)

    def completed(self, now: float, done: list[Completed]) -> None:
        """READs and WRITEs have ended."""
        for item in done:
            entry = self._moving.pop(item.token, None)
            if entry is None or self.closed:
                continue
            if item.problem:
                self.broken(now, item.problem)
                return
            request, moving = entry
            moving.left -= 1
            if not moving.left:
                self._moved(request, moving)
        if not self.closed:
            self._heard_at = now
            self._post()
            self._set_deadline(now)
            self._link.flush(self)
            self._link.start(now, self.peer, self.node)

    def broken(self, now: float, problem: str) -> None:
        """The pair does nothing more."""
        if not self.closed:
            self._link.counters.rdma_pairs_broken_total += 1
            self._fail(now, problem)

    def pair_closed(self, now: float) -> None:
        """Nothing to do: the calls end after this, by the order of the instructions."""

    def end(self, now: float) -> None:
        """Close, and end the calls as unreachable."""
        self._fail(now, self.problem or "closed")

    def lost(self, now: float, why: str = "") -> None:
        """The connection is gone, or not to be had."""
        self._fail(now, why or "the connection was lost")

    # --- requests -----------------------------------------------------------------------------

    def request(self, now: float, calls: list[RdmaCall]) -> None:
        """Make these calls, which are alike."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        deadline = min(call.deadline for call in calls)
        request = self._requests[self._number] = _Request(self._number, calls, deadline)
        first = calls[0]
        if isinstance(first, GetCall):
            wanted = []
            for call in calls:
                assert isinstance(call, GetCall)
                wanted.append(WantedBlock(call.block.key, call.digest, call.start_bytes))
            self._send(RdmaGet(request.number, first.block.namespace, wanted))
        else:
            headers = []
            for call in calls:
                assert isinstance(call, PutCall)
                copy = call.copy
                headers.append(PutHeader(copy.block.key, copy.size_bytes, copy.digest))
            self._send(
                RdmaPut(
                    request.number, first.copy.block.namespace, first.epoch, first.meaning, headers
                )
            )
        self._heard_at = now
        self._set_deadline(now)

    def _message(self, now: float, message: RdmaCalleeMessage) -> None:
        self._heard_at = now
        match message:
            case RdmaWelcome(endpoint=endpoint) if not self._ready:
                self._ready = True
                self._orders.append(JoinPair(endpoint))
                self._set_deadline(now)
                self._link.flush(self)
                self._link.start(now, self.peer, self.node)
            case RdmaRefusal() if not self._ready:
                self._fail(now, "the node has no more queue pairs")
            case RdmaWindows(request=number, windows=windows) if self._ready:
                request = self._requests.get(number)
                if request is None or request.answered or len(windows) != len(request.calls):
                    raise LinkError(f"{len(windows)} windows for request {number}")
                self._use(now, request, windows)
            case RdmaTaken(request=number, statuses=statuses) if self._ready:
                request = self._requests.get(number)
                if request is None or not request.finished:
                    raise LinkError(f"request {number} is taken, which is not finished")
                if len(statuses) != (0 if request.is_get else len(request.moving)):
                    raise LinkError(f"{len(statuses)} statuses for request {number}")
                if not request.is_get:
                    for moving, status in zip(request.moving, statuses, strict=True):
                        self._link.ended(moving.call, status)
                self._free(now, request)
            case _:
                raise LinkError(f"{type(message).__name__} out of turn")

    def _use(self, now: float, request: _Request, windows: list[Window]) -> None:
        """Move the bytes of those blocks that have windows; the other calls have ended."""
        wanted, strange = (bulk.DONE, bulk.WANTED) if request.is_get else (bulk.WANTED, bulk.DONE)
        for call, window in zip(request.calls, windows, strict=True):
            if window.status == strange:
                raise LinkError(f"a window that is {window.status}")
            is_short = isinstance(call, GetCall) and window.size_bytes <= call.start_bytes
            if window.status == wanted and is_short:
                raise LinkError(f"a block of {window.size_bytes} bytes, of which there are more")
        request.answered = True
        opened = False
        for call, window in zip(request.calls, windows, strict=True):
            if window.status != wanted:
                self._link.ended(call, window.status)
                continue
            opened = True
            if isinstance(call, GetCall):
                room = call.begin(window.size_bytes, window.digest)
                if room is None:
                    self._link.ended(call, bulk.NO_ROOM)
                    continue
                self._move(request, _Moving(call, room, window.digest), window, call.start_bytes)
            else:
                memory = self._link.view(call.copy)
                self._move(request, _Moving(call, memory, call.copy.digest), window, 0)
        if not opened:
            self._free(now, request)
        elif not request.left:
            self._finish(request)
        self._post()
        self._set_deadline(now)
        self._link.flush(self)

    def _move(self, request: _Request, moving: _Moving, window: Window, start_bytes: int) -> None:
        request.moving.append(moving)
        request.left += 1
        self._windows[moving] = window
        self._moving_bytes += len(moving.memory)
        step = self._link.max_transfer_bytes
        for start in range(start_bytes, len(moving.memory), step):
            moving.left += 1
            end = min(start + step, len(moving.memory))
            self._waiting.append((request, moving, start, end, start_bytes))

    def _post(self) -> None:
        """Give the card as much as it may have at once."""
        while self._waiting and len(self._moving) < self._link.options.posted:
            request, moving, start, end, start_bytes = self._waiting.popleft()
            window = self._windows[moving]
            self._token += 1
            self._moving[self._token] = (request, moving)
            part = moving.memory[start:end]
            order = Read if isinstance(moving.call, GetCall) else Write
            address = window.address + start - start_bytes
            self._orders.append(order(self._token, part, address, window.key))

    def _moved(self, request: _Request, moving: _Moving) -> None:
        """All bytes of a block are where they should be; those of a get are looked at."""
        counters, call = self._link.counters, moving.call
        del self._windows[moving]
        self._moving_bytes -= len(moving.memory)
        request.left -= 1
        if isinstance(call, GetCall):
            counters.rdma_blocks_read_total += 1
            counters.rdma_bytes_read_total += len(moving.memory) - call.start_bytes
            right = digest_of(moving.memory) == moving.digest
            self._link.ended(call, bulk.DONE if right else bulk.WRONG_DIGEST)
        else:
            counters.rdma_blocks_written_total += 1
            counters.rdma_bytes_written_total += len(moving.memory)
        if not request.left:
            self._finish(request)

    def _finish(self, request: _Request) -> None:
        """Everything has moved: the callee may close its windows."""
        request.finished = True
        self._send(RdmaFinished(request.number))
        if request.is_get:
            request.deadline = inf  # its calls have ended; `silence_s` remains

    def _free(self, now: float, request: _Request) -> None:
        """The calls of a request have all ended."""
        del self._requests[request.number]
        self._set_deadline(now)
        self._link.start(now, self.peer, self.node)

    # --- time, and the end --------------------------------------------------------------------

    def _set_deadline(self, now: float) -> None:
        if self.closed:
            return
        options = self._link.options
        requests = self._requests.values()
        if not requests:
            self._deadline = now + options.idle_s / 2
            return
        self._deadline = min(request.deadline for request in requests)
        if any(request.is_get for request in requests):
            self._deadline = min(self._deadline, self._heard_at + options.silence_s)

    def _late(self, now: float) -> None:
        if not self._ready:
            self._fail(now, "no pair in time")
        else:
            self._fail(now, "silence" if self._requests else "idle")

    def _fail(self, now: float, why: str) -> None:
        self._why = self._why or why
        self._close(now)

    def _rules_broken(self, error: Exception) -> None:
        self._link.counters.rdma_protocol_errors_total += 1
        self._why = str(error)

    def _over(self, now: float) -> None:
        # First the pair: until it is closed, the card may still fill what belongs to the calls.
        self._orders = [ClosePair()]
        self._link.flush(self)
        if self._requests or not self._ready:
            self._link.failed(self, self._why)
        for request in self._requests.values():
            ended = {moving.call for moving in request.moving if not self._is_open(request, moving)}
            begun = {moving.call for moving in request.moving}
            for call in request.calls:
                if call not in ended and (call in begun or not request.answered):
                    self._link.ended(call, UNREACHABLE)
        self._requests.clear()
        self._moving.clear()
        self._waiting.clear()
        self._windows.clear()
        self._moving_bytes = 0
        self._link.over(self)

    def _is_open(self, request: _Request, moving: _Moving) -> bool:
        """Whether a block's call has not ended: a get's does with its bytes, a put's with the word
        of the callee."""
        return moving.left > 0 or not request.is_get

    def check(self) -> None:
        """AssertionError if this end contradicts itself."""
        super().check()
        assert len(self._requests) <= MAX_RDMA_REQUESTS
        assert len(self._moving) <= self._link.options.posted
        assert not self._waiting or self._moving
        assert self._moving_bytes == sum(len(moving.memory) for moving in self._windows)
