"""The bulk link's caller: one node's calls to all others.

Owns: connections, their reuse, deadlines and number, and the order of a conversation
(`kvcast.protocol.messages.bulk`). Must not know: why a call is made.

At most `connections_per_peer` connections to a node, each with one request at a time; calls beyond
wait their turn, at most `queue_per_peer` of them, and one more fails at once as unreachable. A
connection is kept for the next call for half of `idle_s`, before the callee closes it. A reused
connection that turns out to be dead before any answer is replaced once it is known: by another that
was kept, in the end by a fresh one.

After each event take `instructions`: they say which connections to make, which have something to
send or are to be closed, and which calls have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcast.protocol.links.bulk import (
    EVICTED,
    UNREACHABLE,
    BulkCall,
    BulkCounters,
    BulkOptions,
    DropCall,
    ExistsCall,
    GetCall,
    PutCall,
)
from kvcast.protocol.links.stream import LinkError, LinkStream
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
)
from kvcast.protocol.messages.control import NodeInfo


@dataclass(frozen=True, slots=True, eq=False)
class Connect:
    """Make this connection to its `node`; then tell it `connected`, or `lost`."""

    connection: BulkConnection


@dataclass(frozen=True, slots=True, eq=False)
class Flush:
    """This connection has something to send, or is closed."""

    connection: BulkConnection


@dataclass(frozen=True, slots=True, eq=False)
class Complete:
    """This call has ended: tell its `ended`."""

    call: BulkCall
    outcome: str


Instruction = Connect | Flush | Complete


class _Peer:
    """One node that calls go to."""

    def __init__(self) -> None:
        self.idle: list[BulkConnection] = []
        """Connections without a call; the one used last is the last."""
        self.busy: dict[BulkConnection, None] = {}
        """Connections with a call, those being made included."""
        self.queue: deque[BulkCall] = deque()


class BulkCaller:
    """See the module's text. `view` gives the bytes of a put's copy."""

    def __init__(
        self,
        node_id: str,
        options: BulkOptions,
        counters: BulkCounters,
        view: Callable[[Any], memoryview],
    ) -> None:
        self.node_id = node_id
        self.options = options
        self.counters = counters
        self.view = view
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
        present = {(node.node_id, node.bulk_host, node.bulk_port) for node in nodes.values()}
        for address, peer in list(self._peers.items()):
            if address not in present and not peer.busy:
                self._close_idle(now, peer)
                del self._peers[address]

    def ask(self, now: float, call: BulkCall) -> None:
        """Make a call, now or in its turn."""
        node = self._nodes.get(call.node)
        if node is None or self._closed:
            self._instructions.append(Complete(call, UNREACHABLE))
            return
        self.counters.bulk_requests_sent_total += 1
        peer = self._peers.setdefault((node.node_id, node.bulk_host, node.bulk_port), _Peer())
        if len(peer.busy) < self.options.connections_per_peer:
            outcome = self._begin(now, node, peer, call)
            if outcome is not None:
                self._complete(call, outcome)
        elif len(peer.queue) < self.options.queue_per_peer:
            peer.queue.append(call)
        else:
            self._complete(call, UNREACHABLE)

    def close(self, now: float) -> None:
        """End all calls as unreachable, and close all connections."""
        self._closed = True
        for peer in self._peers.values():
            while peer.queue:
                self._instructions.append(Complete(peer.queue.popleft(), UNREACHABLE))
            for connection in list(peer.busy):
                connection.end(now)
            self._close_idle(now, peer)

    def check(self) -> None:
        """AssertionError if this end contradicts itself."""
        for peer in self._peers.values():
            count = len(peer.busy) + len(peer.idle)
            assert count <= self.options.connections_per_peer, f"{count} connections"
            assert not peer.queue or len(peer.busy) == self.options.connections_per_peer
            assert len(peer.queue) <= self.options.queue_per_peer
            for connection in peer.idle:
                assert connection.call is None
                assert connection.is_connected
            for connection in (*peer.busy, *peer.idle):
                assert not connection.closed
                assert (connection.call is None) == (connection in peer.idle)
                connection.check()

    # --- calls and connections ----------------------------------------------------------------

    def _begin(self, now: float, node: NodeInfo, peer: _Peer, call: BulkCall) -> str | None:
        """Start a call whose turn has come; its outcome, if it ends at once."""
        if isinstance(call, PutCall) and not call.begin():
            return EVICTED
        return self._start(now, node, peer, call)

    def _start(self, now: float, node: NodeInfo, peer: _Peer, call: BulkCall) -> str | None:
        if call.deadline <= now:
            return UNREACHABLE
        if peer.idle:
            connection = peer.idle.pop()
            self._instructions.append(Flush(connection))
        else:
            connection = BulkConnection(self, node, peer)
            self._instructions.append(Connect(connection))
        peer.busy[connection] = None
        connection.begin(now, call)
        return None

    def _complete(self, call: BulkCall, outcome: str) -> None:
        if outcome == UNREACHABLE:
            self.counters.bulk_failures_total += 1
        self._instructions.append(Complete(call, outcome))

    def ended(self, now: float, connection: BulkConnection, outcome: str) -> None:
        """A connection's call has ended; the connection is idle now, or closed."""
        call, peer = connection.call, connection.peer
        assert call is not None
        connection.call = None
        del peer.busy[connection]
        if not connection.closed:
            peer.idle.append(connection)
        self._complete(call, outcome)
        while peer.queue and len(peer.busy) < self.options.connections_per_peer:
            call = peer.queue.popleft()
            at_once = self._begin(now, connection.node, peer, call)
            if at_once is not None:
                self._complete(call, at_once)

    def replace(self, now: float, connection: BulkConnection) -> None:
        """A connection that was kept had died before its call: make the call on another."""
        call, peer = connection.call, connection.peer
        assert call is not None
        del peer.busy[connection]
        outcome = UNREACHABLE if self._closed else self._start(now, connection.node, peer, call)
        if outcome is None:
            connection.call = None
            return
        peer.busy[connection] = None
        self.ended(now, connection, outcome)

    def closed(self, connection: BulkConnection) -> None:
        """A connection is closed."""
        self._instructions.append(Flush(connection))
        if connection.call is None:
            connection.peer.idle.remove(connection)

    def _close_idle(self, now: float, peer: _Peer) -> None:
        for connection in list(peer.idle):
            connection.end(now)


class BulkConnection(LinkStream[CalleeMessage]):
    """One connection to `node`: being made, idle, or with a call."""

    one_at_a_time = True

    def __init__(self, link: BulkCaller, node: NodeInfo, peer: _Peer) -> None:
        super().__init__(CalleeMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        self.node = node
        self.peer = peer
        self.call: BulkCall | None = None
        self.is_connected = False
        self._link = link
        self._reused = False
        """The call began on a connection that was there already."""
        self._answered = False
        """The callee has said something about this call."""
        self._outcome = UNREACHABLE
        """Of the call, should the connection end now."""

    # --- events -------------------------------------------------------------------------------

    def begin(self, now: float, call: BulkCall) -> None:
        """Make this call, as soon as the connection stands."""
        self.call = call
        self._reused = self.is_connected
        self._answered = False
        self._outcome = UNREACHABLE
        self._deadline = call.deadline
        if self.is_connected:
            self._request(call)
        else:
            self._deadline = min(call.deadline, now + self._link.options.connect_timeout_s)

    def connected(self, now: float) -> None:
        """The connection stands, and at its other end is whom it was made to."""
        if self.closed:
            return
        assert self.call is not None
        self.is_connected = True
        self._deadline = self.call.deadline
        self._send(BulkHello(BULK_PROTOCOL_VERSION, self._link.node_id))
        self._request(self.call)

    def wrong_peer(self, now: float, problem: str) -> None:
        """Somebody else is at the other end."""
        self._link.counters.bulk_wrong_peers_total += 1
        self.problem = problem
        self.end(now)

    def end(self, now: float) -> None:
        """Close, and end the call as unreachable."""
        self._reused = False
        self._close(now)

    # --- the conversation ---------------------------------------------------------------------

    def _request(self, call: BulkCall) -> None:
        match call:
            case PutCall(copy=copy):
                namespace, key = copy.block
                size, digest = copy.size_bytes, copy.digest
                self._send(BulkPut(namespace, key, size, digest, call.epoch, call.meaning))
            case GetCall(block=block):
                self._send(BulkGet(block.namespace, block.key, call.digest))
            case DropCall():
                self._send(BulkDrop(call.namespace, call.keys))
            case ExistsCall():
                self._send(BulkExists(call.namespace, call.keys))

    def _message(self, now: float, message: CalleeMessage) -> None:
        first, self._answered = not self._answered, True
        match self.call, message:
            case None, _:
                raise LinkError(f"{type(message).__name__} without a request")
            case _, BulkDone(status=status):
                self._done(now, status)
            case PutCall(copy=copy), BulkGo() if first:
                self._send_block(self._link.view(copy))
            case ExistsCall() as call, BulkHeld(bitmap=bitmap):
                call.answer(bulk.unpack_bitmap(bitmap, len(call.keys)))
                self._done(now, bulk.DONE)
            case GetCall() as call, BulkBlock(size_bytes=size_bytes, digest=digest):
                room = call.begin(size_bytes, digest)
                if room is None:  # the bytes are on their way, and nobody wants them
                    self._outcome = bulk.NO_ROOM
                    self._close(now)
                else:
                    self._receive_block(room)
            case call, _:
                raise LinkError(f"{type(message).__name__} as answer to a {type(call).__name__}")

    def _block_came(self, now: float) -> None:
        self._done(now, bulk.DONE)

    def _block_sending(self, size_bytes: int) -> None:
        self._link.counters.payload_bytes_sent_bulk_put_total += size_bytes

    def _done(self, now: float, outcome: str) -> None:
        """The call has ended well enough for the connection to be kept."""
        # The callee closes after `idle_s`; leave it the first half of that.
        self._deadline = now + self._link.options.idle_s / 2
        self._link.ended(now, self, outcome)

    def _late(self, now: float) -> None:
        self.end(now)

    def _rules_broken(self, error: Exception) -> None:
        self._link.counters.bulk_protocol_errors_total += 1
        self._reused = False

    def _over(self, now: float) -> None:
        self._link.closed(self)
        if self.call is None:
            return
        if self._reused and not self._answered:
            self._link.replace(now, self)
        else:
            self._link.ended(now, self, self._outcome)
