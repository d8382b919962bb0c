"""The RDMA link's caller: one node's gets and puts with all others, by READ and WRITE.

Owns: one connection and one pair for each node and card, the requests on them, deadlines, and the
order of a conversation (`kvcast.protocol.messages.rdma`). Must not know: why a call is made, what
becomes of one that RDMA cannot make (`carriers`), or how a card is driven: it orders
(`links.rdma`).

Calls that are alike go together, `MAX_RDMA_BLOCKS` in a request, `MAX_RDMA_REQUESTS` at once. While
the card has much to move, a request waits until it has as many blocks as its namespace's still
move: windows are opened while those do, and one message does for several. Calls beyond wait their
turn, at most `queue_per_peer` of them, and one more fails at once as unreachable. When a pair
breaks, a get hears nothing for `silence_s`, or a call's deadline comes, the connection ends and all
its calls as unreachable: first the pair is closed, since until then the card may still fill the
memory that belongs to them. Only gets that have no windows yet end alone, at their deadlines. An
idle pair is closed after half of `idle_s`, before the callee does so.

Several namespaces share a connection by their weights (`fair_queue`): whose calls are asked for
next (`call_queue`), and whose bytes the card is given next. The last `ASSURED` requests are for
namespaces that have none open there: others may wait long for their windows. While several have
bytes to move, the card is given no more than `AHEAD_BYTES` of them at once, in parts: what it was
given has no weight any more.

Of several cards (`cards`) each connection has one, and takes calls to its node out of one queue: so
blocks are spread, and a call goes to the card that has fewest, or was idle for longest. A large
block is cut in pieces (`_Striped`), which as many cards READ as have nothing to do: a piece is a
request of its own, for a window that begins where it does. What a connection could not end goes on
by another card, once; where there is none, it ends as unreachable.

After each event take `instructions`, and do them in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, Final, NamedTuple

from kvcast.protocol.digests import MakeDigests, digests_at_once
from kvcast.protocol.fair_queue import BoundedQueue
from kvcast.protocol.links.bulk import UNREACHABLE, GetCall, PutCall
from kvcast.protocol.links.call_queue import CallQueue, namespace_of
from kvcast.protocol.links.cards import CardsToPeer, LinkCard
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
from kvcast.protocol.messages.bulk import PutHeader, WantedBlock
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

RdmaCall = GetCall | PutCall

_MUCH_BYTES: Final = 4 << 20
"""A fast card (100 Gb/s) moves so much in the time in which windows are opened."""
_PIECE_BYTES: Final = 1 << 20
"""Of a block that several cards read, each has so much at least."""
ASSURED: Final = 2
"""Of the requests that may be open at once; the others are enough to keep a card busy."""
AHEAD_BYTES: Final = 16 << 20
"""What a card of 100 Gb/s moves in somewhat more than a millisecond, in which it is given more."""
PART_BYTES: Final = 4 << 20
"""Of one READ or WRITE, at most."""


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

    def __init__(self, cards: CardsToPeer, weight_of: Callable[[int], float]) -> None:
        self.cards = cards
        self.connections: dict[LinkCard, RdmaConnection] = {}
        self.queue: CallQueue[RdmaCall] = CallQueue(weight_of)


class RdmaCaller:
    """See the module's text. `view` gives the bytes of a put's copy, `weight_of` a namespace's
    weight; `cards`: this node's."""

    def __init__(
        self,
        node_id: str,
        options: RdmaOptions,
        counters: RdmaCounters,
        view: Callable[[Any], memoryview],
        cards: Sequence[LinkCard],
        weight_of: Callable[[int], float] = lambda _namespace: 1.0,
        make_digests: MakeDigests = digests_at_once,
    ) -> None:
        self.weight_of = weight_of
        self._make_digests = make_digests
        self.wake: Callable[[], None] = lambda: None
        """Told that there may be instructions, if not as the outcome of an event of ours."""
        self.node_id = node_id
        self.options = options
        self.counters = counters
        self.view = view
        self._cards = cards
        self._nodes: Mapping[int, NodeInfo] = {}
        self._peers: dict[tuple[str, str, int], _Peer] = {}
        self._instructions: list[Instruction] = []
        self._news: list[str] = []
        self._turn = 0
        self._closed = False

    def instructions(self) -> list[Instruction]:
        """What is to be done, in this order; each is given once."""
        taken, self._instructions = self._instructions, []
        return taken

    def take_news(self) -> list[str]:
        """What an operator should hear: once when a card is left out towards a node, and once when
        it works again."""
        taken, self._news = self._news, []
        return taken

    def use_nodes(self, now: float, nodes: Mapping[int, NodeInfo]) -> None:
        """The nodes by index from now on. What is idle towards others is closed."""
        self._nodes = nodes
        present = {_address(node) for node in nodes.values()}
        for address, peer in list(self._peers.items()):
            connections = list(peer.connections.values())
            if address not in present and all(item.is_idle for item in connections):
                for connection in connections:
                    connection.end(now)
                if not peer.queue:
                    del self._peers[address]

    def card_failed(self, now: float, card: LinkCard) -> None:
        """A card says that it is of no use (`card.problem`): its calls go on by others."""
        for peer in list(self._peers.values()):
            if connection := peer.connections.get(card):
                connection.card_failed(now)

    def ask(self, now: float, *calls: RdmaCall) -> None:
        """Make calls, now or in their turn."""
        asked: dict[_Peer, NodeInfo] = {}
        for call in calls:
            node = self._nodes.get(call.node)
            if node is None or not node.rdma_port or self._closed:
                self._complete(call, UNREACHABLE)
                continue
            peer = self._peers.get(_address(node))
            if peer is None:
                cards = CardsToPeer(self._cards, self.options)
                peer = self._peers[_address(node)] = _Peer(cards, self.weight_of)
            if len(peer.queue) >= self.options.queue_per_peer:
                self._complete(call, UNREACHABLE)
            else:
                self.counters.rdma_requests_sent_total += 1
                peer.queue.push(call)
                asked[peer] = node
        for peer, node in asked.items():
            self.start(now, peer, node)

    def close(self, now: float) -> None:
        """End all calls as unreachable, and close all connections."""
        self._closed = True
        for peer in self._peers.values():
            for connection in list(peer.connections.values()):
                connection.end(now)
            self._fail_queue(peer)

    def check(self) -> None:
        """AssertionError if this end contradicts itself."""
        # Pieces, and what cards had that failed, wait beside other calls.
        more = (len(self._cards) - 1) * (MAX_RDMA_REQUESTS + 1) * MAX_RDMA_BLOCKS
        for peer in self._peers.values():
            assert len(peer.queue) <= self.options.queue_per_peer + more
            assert not peer.queue or peer.connections
            for connection in peer.connections.values():
                connection.check()
        for card in self._cards:
            connections = (peer.connections.get(card) for peer in self._peers.values())
            assert card.blocks == sum(item.blocks for item in connections if item is not None)

    # --- for connections ----------------------------------------------------------------------

    def start(self, now: float, peer: _Peer, node: NodeInfo) -> None:
        """Start the calls whose turn has come."""
        if not peer.queue:
            return
        cards = peer.cards.usable(now)
        if not cards:
            self._instructions.append(Failed(node.node_id, "no card of this node works"))
            self._fail_queue(peer)
        for card in cards:
            if card not in peer.connections:
                connection = RdmaConnection(now, self, node, peer, card)
                peer.connections[card] = connection
                self._instructions.append(Connect(connection))
        started: dict[RdmaConnection, None] = {}
        ready = self._ready(peer, cards)
        while (turn := self._next(peer, ready)) is not None:
            namespace, connection = turn
            most = min(-(-peer.queue.count(namespace) // len(ready)), MAX_RDMA_BLOCKS)
            if peer.cards.on_trial(connection.card):
                most = 1
            if calls := peer.queue.take_alike(now, namespace, most, self._complete):
                self._turn = connection.card.turn = self._turn + 1
                connection.request(now, calls)
                started[connection] = None
        for connection in started:
            self.flush(connection)

    def _ready(self, peer: _Peer, cards: list[LinkCard]) -> list[RdmaConnection]:
        """The connections by these cards that can be used; while there are none, those that can."""
        ready = [item for item in peer.connections.values() if item.is_ready]
        return [item for item in ready if item.card in cards] or ready

    def _next(self, peer: _Peer, ready: list[RdmaConnection]) -> tuple[int, RdmaConnection] | None:
        """The namespace whose calls can be made now, and the connection that is to make them."""
        passed: set[int] = set()
        while (namespace := peer.queue.next_flow(passed)) is not None:
            if asking := [item for item in ready if self._may_ask(item, namespace)]:
                return namespace, min(asking, key=lambda item: (item.card.blocks, item.card.turn))
            passed.add(namespace)
        return None

    def _may_ask(self, connection: RdmaConnection, namespace: int) -> bool:
        peer = connection.peer
        if peer.cards.on_trial(connection.card) and not connection.is_idle:
            return False
        worth_waiting_for = connection.worth_waiting_for(namespace)
        return connection.may_ask(namespace) and peer.queue.count(namespace) >= worth_waiting_for

    def cut(
        self, now: float, connection: RdmaConnection, call: GetCall, room: memoryview, digest: int
    ) -> GetCall:
        """The piece of a block that this connection is to read, whose window it has; the others
        wait for `start`. The whole, where no other card would read any."""
        peer, left = connection.peer, len(room) - call.start_bytes - _MUCH_BYTES
        idle = [item for item in self._ready(peer, peer.cards.usable(now)) if not item.card.blocks]
        count = min(1 + len(idle), left // _PIECE_BYTES)
        if isinstance(call, _Piece) or count < 2:
            return call
        # The others begin when they have windows, too; until then this one reads `_MUCH_BYTES`.
        ends = [len(room) - left * (count - 1 - n) // count for n in range(count)]
        striped = _Striped(self, call, room, digest, count)
        first, *others = map(striped.piece, [call.start_bytes, *ends], ends)
        for other in others:
            peer.queue.push(other)
        return first

    def _complete(self, call: RdmaCall, outcome: str) -> None:
        self._instructions.append(Complete(call, outcome))

    def ended(self, call: RdmaCall, outcome: str) -> None:
        """One of a connection's calls has ended."""
        self._complete(call, outcome)

    def read(self, now: float, call: RdmaCall, memory: memoryview, digest: int) -> None:
        """A whole block has been read: its call has ended once it is known whether it is what it
        should be."""
        self.counters.rdma_blocks_read_total += 1

        def made(_now: float, digests: list[int]) -> None:
            self._complete(call, bulk.DONE if digests == [digest] else bulk.WRONG_DIGEST)
            self.wake()

        self._make_digests(now, [memory], made)

    def worked(self, connection: RdmaConnection) -> None:
        """A connection has moved bytes."""
        name, card = connection.node.node_id, connection.card
        if connection.peer.cards.worked(card):
            self._news.append(f"RDMA with {name} by {card.name} works again")

    def flush(self, connection: RdmaConnection) -> None:
        """A connection has orders, or something to send."""
        self._instructions.append(Flush(connection))

    def over(
        self, now: float, connection: RdmaConnection, calls: list[RdmaCall], problem: str
    ) -> None:
        """A connection is closed; `calls` have not ended. `problem`: why it could not do what it
        was made for, "" = it was not needed any more. Where no other card is left, what waited
        ends with it: it would only meet the same."""
        peer, card, node = connection.peer, connection.card, connection.node
        del peer.connections[card]
        goes_on = not self._closed
        if problem and not self._closed:
            card.counters.failures += 1
            is_news = peer.cards.failed(now, card)
            # What was never reached is the node's fault, and no card's.
            reached = connection.reached or any(item.reached for item in peer.connections.values())
            goes_on = reached and bool(peer.cards.usable(now))
            if goes_on and is_news:
                what = f"RDMA with {node.node_id} by {card.name}"
                self._news.append(f"{what} failed, other cards go on: {problem}")
            if not goes_on:
                peer.cards.forget()
                self._instructions.append(Failed(node.node_id, problem))
        again = []
        for call in calls:
            if goes_on and not call.moved and call.deadline > now:
                call.moved = True
                self.counters.rdma_calls_moved_total += 1
                again.append(call)
            else:
                self._complete(call, UNREACHABLE)
        peer.queue.push_front(again)
        if goes_on:
            self.start(now, peer, node)
        else:
            self._fail_queue(peer)

    def _fail_queue(self, peer: _Peer) -> None:
        for call in peer.queue.remove(lambda _call: True):
            self._complete(call, UNREACHABLE)


def _address(node: NodeInfo) -> tuple[str, str, int]:
    return node.node_id, node.bulk_host, node.rdma_port


class _Striped:
    """A block that several cards read, and what becomes of its call."""

    def __init__(
        self, link: RdmaCaller, call: GetCall, room: memoryview, digest: int, pieces: int
    ) -> None:
        self._link = link
        self._call = call
        self._room = room
        self._digest = digest
        self._left = pieces
        self._outcome = bulk.DONE

    def piece(self, start: int, end: int) -> GetCall:
        """The get of the bytes from `start` to `end`, to which the room ends there."""
        call = self._call

        def begin(size_bytes: int, digest: int) -> memoryview | None:
            is_same = (size_bytes, digest) == (len(self._room), self._digest)
            return self._room[:end] if is_same else None

        return _Piece(
            *(call.node, call.block, self._digest, call.deadline, begin, self._ended, start),
            *(call.wanted, call.may_read, call.moved),
        )

    def _ended(self, now: float, outcome: str) -> None:
        """A piece is there, or its pair is closed."""
        self._left -= 1
        if self._outcome == bulk.DONE:
            self._outcome = outcome
        if self._left == 0:
            if self._outcome == bulk.DONE:
                self._link.read(now, self._call, self._room, self._digest)
            else:
                self._call.ended(now, self._outcome)


class _Piece(GetCall):
    """The get of a piece: what has come is no whole block yet."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class _Moving:
    """One block whose bytes move."""

    call: RdmaCall
    memory: memoryview
    """All of the block, or of what comes before the end of a piece."""
    digest: int
    start_bytes: int = 0
    """Where in it what moves begins, and the window with it."""
    left: int = 0
    """READs or WRITEs that have not ended."""

    @property
    def size_bytes(self) -> int:
        """Of what moves."""
        return len(self.memory) - self.start_bytes


class _Part(NamedTuple):
    """What one READ or WRITE moves: from where to where in a block."""

    request: _Request
    moving: _Moving
    start: int
    end: int


class _State(Enum):
    """Where a request stands."""

    ASKED = "asked"
    LATE = "late"
    """Its calls have ended before it was answered."""
    MOVING = "moving"
    """It was answered: the bytes of those blocks that have windows move."""
    FINISHED = "finished"
    """The callee may close its windows."""


_AFTER: Final = {
    _State.ASKED: frozenset({_State.MOVING, _State.LATE}),
    _State.LATE: frozenset({_State.FINISHED}),
    _State.MOVING: frozenset({_State.FINISHED}),
    _State.FINISHED: frozenset[_State](),
}
_UNANSWERED: Final = frozenset({_State.ASKED, _State.LATE})


@dataclass(slots=True, eq=False)
class _Request:
    """Calls that one message asks for."""

    number: int
    calls: list[RdmaCall]
    deadline: float
    moving: list[_Moving] = field(default_factory=list)
    left: int = 0
    """Of them, those that have not ended."""
    state: _State = _State.ASKED

    def becomes(self, state: _State) -> None:
        """It goes on to that state, which must be one that can follow."""
        assert state in _AFTER[self.state], f"{self.state} becomes {state}"
        self.state = state

    @property
    def is_get(self) -> bool:
        return isinstance(self.calls[0], GetCall)

    @property
    def namespace(self) -> int:
        return namespace_of(self.calls[0])


class RdmaConnection(LinkStream[RdmaCalleeMessage]):
    """One connection, and its pair on `card`, to `node`."""

    def __init__(
        self, now: float, link: RdmaCaller, node: NodeInfo, peer: _Peer, card: LinkCard
    ) -> None:
        super().__init__(RdmaCalleeMessage, max_message_bytes=MAX_RDMA_MESSAGE_BYTES)
        self.node = node
        self.peer = peer
        self.card = card
        self.reached = False
        """Whether the connection stood."""
        self.blocks = 0
        """Of open requests."""
        self._link = link
        self._requests: dict[int, _Request] = {}
        self._number = 0
        self._ready = False
        """The other half of the pair is known."""
        self._orders: list[Order] = []
        self._token = 0
        self._posted: dict[int, _Part] = {}
        """By the token of each READ or WRITE that the card has."""
        self._waiting: BoundedQueue[_Part] = BoundedQueue(
            AHEAD_BYTES,
            lambda part: part.request.namespace,
            lambda part: part.end - part.start,
            link.weight_of,
        )
        """READs and WRITEs that wait for others to end."""
        self._windows: dict[_Moving, tuple[Window, int]] = {}
        """Of blocks whose bytes move, with their namespaces,"""
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
    def is_ready(self) -> bool:
        return self._ready and not self.closed

    def may_ask(self, namespace: int) -> bool:
        """Whether one more request of a namespace can begin."""
        count = len(self._requests)
        if not self.is_ready or count >= MAX_RDMA_REQUESTS:
            return False
        if count < MAX_RDMA_REQUESTS - ASSURED:
            return True
        return all(request.namespace != namespace for request in self._requests.values())

    def worth_waiting_for(self, namespace: int) -> int:
        """How many blocks of a namespace should be asked for together, if any: they come after
        those of it that move already, and while much is left to move nothing is gained by asking
        now."""
        if self._moving_bytes < _MUCH_BYTES:
            return 1
        mine = sum(whose == namespace for _, whose in self._windows.values())
        return max(1, min(mine, MAX_RDMA_BLOCKS))

    def connected(self, now: float) -> None:
        """The connection stands, and at its other end is whom it was made to."""
        if not self.closed:
            self.reached = True
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
        self.card.counters.pairs_made += 1
        self._send(RdmaHello(RDMA_PROTOCOL_VERSION, self._link.node_id, endpoint))
        self._link.flush(self)

    def completed(self, now: float, done: list[Completed]) -> None:
        """READs and WRITEs have ended."""
        for item in done:
            part = self._posted.pop(item.token, None)
            if part is None or self.closed:
                continue
            request, moving, start, end = part
            self._waiting.use(request.namespace, start - end)
            if item.problem:
                self.broken(now, item.problem)
                return
            moving.left -= 1
            if not moving.left:
                self._moved(now, request, moving)
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

    def card_failed(self, now: float) -> None:
        """Its card is of no use any more."""
        self._fail(now, self.card.problem)

    def lost(self, now: float, why: str = "") -> None:
        """The connection is gone, or not to be had."""
        self._fail(now, why or "the connection was lost")

    # --- requests -----------------------------------------------------------------------------

    def request(self, now: float, calls: list[RdmaCall]) -> None:
        """Make these calls, which are alike."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        deadline = min(call.deadline for call in calls)
        request = self._requests[self._number] = _Request(self._number, calls, deadline)
        self._count(len(calls))
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

    def _count(self, blocks: int) -> None:
        self.blocks += blocks
        self.card.blocks += blocks

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
                if request is None or request.state not in _UNANSWERED:
                    raise LinkError(f"windows for request {number}, which waits for none")
                if len(windows) != len(request.calls):
                    raise LinkError(f"{len(windows)} windows for request {number}")
                self._use(now, request, windows)
            case RdmaTaken(request=number, statuses=statuses) if self._ready:
                request = self._requests.get(number)
                if request is None or request.state is not _State.FINISHED:
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
        if request.state is _State.LATE:
            self._return_windows(now, request, windows)
            return
        request.becomes(_State.MOVING)
        opened = False
        for place, (call, window) in enumerate(zip(request.calls, windows, strict=True)):
            if window.status != wanted:
                self._link.ended(call, window.status)
                continue
            opened = True
            if isinstance(call, GetCall):
                room = call.begin(window.size_bytes, window.digest)
                if room is None:
                    self._link.ended(call, bulk.NO_ROOM)
                    continue
                mine = self._link.cut(now, self, call, room, window.digest)
                if mine is not call:
                    request.calls[place] = mine
                    room = mine.begin(window.size_bytes, window.digest)
                    assert room is not None
                moving = _Moving(mine, room, window.digest, call.start_bytes)
            else:
                moving = _Moving(call, self._link.view(call.copy), call.copy.digest)
            self._move(request, moving, window)
        if not opened:
            self._free(now, request)
        elif not request.left:
            self._finish(request)
        self._post()
        self._set_deadline(now)
        self._link.flush(self)
        self._link.start(now, self.peer, self.node)

    def _move(self, request: _Request, moving: _Moving, window: Window) -> None:
        request.moving.append(moving)
        request.left += 1
        self._windows[moving] = window, request.namespace
        self._moving_bytes += moving.size_bytes
        if isinstance(moving.call, GetCall):
            self.peer.queue.brings(moving.call, moving.size_bytes)
        step = min(self.card.max_transfer_bytes, PART_BYTES)
        for start in range(moving.start_bytes, len(moving.memory), step):
            moving.left += 1
            end = min(start + step, len(moving.memory))
            self._waiting.push(_Part(request, moving, start, end))

    def _return_windows(self, now: float, request: _Request, windows: list[Window]) -> None:
        """Nobody wants the blocks of a get any more: the card was told nothing of its windows."""
        if any(window.status == bulk.DONE for window in windows):
            self._finish(request)
            self._set_deadline(now)
            self._link.flush(self)
        else:
            self._free(now, request)

    def _post(self) -> None:
        """Give the card as much as it may have at once."""
        waiting = self._waiting
        while len(self._posted) < self._link.options.posted:
            namespace = waiting.free_flow()
            if namespace is None:
                break
            part = waiting.take(namespace)
            _, moving, start, end = part
            waiting.use(namespace, end - start)
            window, _ = self._windows[moving]
            self._token += 1
            self._posted[self._token] = part
            memory = moving.memory[start:end]
            order = Read if isinstance(moving.call, GetCall) else Write
            address = window.address + start - moving.start_bytes
            self._orders.append(order(self._token, memory, address, window.key))

    def _moved(self, now: float, request: _Request, moving: _Moving) -> None:
        """All bytes of a block are where they should be; those of a get are looked at."""
        counters, call = self._link.counters, moving.call
        del self._windows[moving]
        self._moving_bytes -= moving.size_bytes
        request.left -= 1
        self._link.worked(self)
        if isinstance(call, GetCall):
            counters.rdma_bytes_read_total += moving.size_bytes
            self.card.counters.bytes_read += moving.size_bytes
            if isinstance(call, _Piece):
                self._link.ended(call, bulk.DONE)
            else:
                self._link.read(now, call, moving.memory, moving.digest)
        else:
            counters.rdma_blocks_written_total += 1
            counters.rdma_bytes_written_total += moving.size_bytes
            self.card.counters.bytes_written += moving.size_bytes
        if not request.left:
            self._finish(request)

    def _finish(self, request: _Request) -> None:
        """Everything has moved: the callee may close its windows."""
        request.becomes(_State.FINISHED)
        self._send(RdmaFinished(request.number))
        if request.is_get:
            request.deadline = inf  # its calls have ended; `silence_s` remains

    def _free(self, now: float, request: _Request) -> None:
        """The calls of a request have all ended."""
        del self._requests[request.number]
        self._count(-len(request.calls))
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
        elif not self._requests:
            self._fail(now, "idle")
        elif not self._end_late_gets(now):
            self._fail(now, "silence")

    def _end_late_gets(self, now: float) -> bool:
        """End the gets without windows whose deadlines have come, which the callee does not know;
        whether that is all that had to be done."""
        for request in self._requests.values():
            if request.deadline <= now and request.is_get and request.state is _State.ASKED:
                request.becomes(_State.LATE)
                request.deadline = inf
                for call in request.calls:
                    self._link.ended(call, UNREACHABLE)
        self._set_deadline(now)
        return self._deadline is not None and self._deadline > now

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
        problem = self._why or "closed" if self._requests or not self._ready else ""
        calls = []
        for request in self._requests.values():
            if request.state is _State.LATE:
                continue
            ended = {moving.call for moving in request.moving if not self._is_open(request, moving)}
            begun = {moving.call for moving in request.moving}
            for call in request.calls:
                if call not in ended and (call in begun or request.state is _State.ASKED):
                    calls.append(call)
        self._requests.clear()
        for part in self._posted.values():
            self._waiting.use(part.request.namespace, part.start - part.end)
        self._posted.clear()
        self._waiting.remove(lambda _part: True)
        self._windows.clear()
        self._moving_bytes = 0
        self._count(-self.blocks)
        self._link.over(now, self, calls, problem)

    def _is_open(self, request: _Request, moving: _Moving) -> bool:
        """Whether a block's call has not ended: a get's does with its bytes, a put's with the word
        of the callee."""
        return moving.left > 0 or not request.is_get

    def check(self) -> None:
        """AssertionError if this end contradicts itself."""
        super().check()
        assert len(self._requests) <= MAX_RDMA_REQUESTS
        assert len(self._posted) <= self._link.options.posted
        self._waiting.check(sum(part.end - part.start for part in self._posted.values()))
        assert self._posted or not self._waiting
        assert self._moving_bytes == sum(moving.size_bytes for moving in self._windows)
        assert self.blocks == sum(len(request.calls) for request in self._requests.values())
