"""The bulk link's caller: one node's calls to all others.

Owns: connections, their reuse, deadlines and number, and the order of a conversation
(`kvcast.protocol.messages.bulk`). Must not know: why a call is made.

At most `connections_per_peer` connections to a node, each with one request at a time; calls beyond
wait their turn, at most `queue_per_peer` of them and none past its deadline (by more than
`OVERDUE_S`), and one more fails at once as unreachable. Whose calls are next, and which go together
in one request, is `call_queue`'s to say. But a namespace that has none of these connections is
given one beyond them, `assured_per_peer` in all: else it would wait for the end of whatever others
have begun, which may be slow. The bytes of a put that is not long follow it at once; after a node
did not want some, it is asked first, until it wants all. When they leave is `departures`' to say,
where several namespaces' do. A connection is kept for the next call for half of `idle_s`, before
the callee closes it. A reused connection that turns out to be dead before any answer is replaced
once it is known: by another that was kept, in the end by a fresh one.

Call `handle_timer` when `get_timer` says; connections have timers of their own. After each event
take `instructions`: they say which connections to make, which have something to
send or are to be closed, and which calls have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

from kvcast.protocol.links.bulk import (
    UNREACHABLE,
    UNWANTED,
    BulkCall,
    BulkCounters,
    BulkOptions,
    DropCall,
    ExistsCall,
    GetCall,
    PutCall,
)
from kvcast.protocol.links.bulk_request import (
    ANSWERS,
    TRANSITIONS,
    UNANSWERED,
    RequestEvent,
    RequestState,
)
from kvcast.protocol.links.call_queue import CallQueue, namespace_of
from kvcast.protocol.links.departures import Departures, Turn, earliest
from kvcast.protocol.links.stream import LinkError, LinkStream
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    MAX_BULK_BLOCKS,
    MAX_BULK_MESSAGE_BYTES,
    MAX_FOLLOWING_BYTES,
    BlockHeader,
    BulkBlocks,
    BulkDone,
    BulkDrop,
    BulkExists,
    BulkGet,
    BulkGo,
    BulkHeld,
    BulkHello,
    BulkPut,
    BulkTaken,
    CalleeMessage,
    PutHeader,
    WantedBlock,
)
from kvcast.protocol.messages.control import NodeInfo

OVERDUE_S: Final = 0.05
"""Who waits is looked through no more often than this, for calls that have waited too long."""
MAX_SKIPPED_BYTES: Final = 1 << 20
"""So much of blocks that there is no room for, or that nobody wants any more, is read and thrown
away, for the sake of those that follow; more ends the connection."""


@dataclass(frozen=True, slots=True, eq=False)
class Connect:
    """Make this connection to its `node`; then tell it `connected`, or `lost`."""

    connection: BulkConnection


@dataclass(frozen=True, slots=True, eq=False)
class Flush:
    """This connection has something to send, or is closed."""

    connection: BulkConnection


class Complete(NamedTuple):
    """This call has ended: tell its `ended`."""

    call: BulkCall
    outcome: str


Instruction = Connect | Flush | Complete


class _Peer:
    """One node that calls go to."""

    def __init__(self, weight_of: Callable[[int], float]) -> None:
        self.idle: list[BulkConnection] = []
        """Connections without a call; the one used last is the last."""
        self.busy: dict[BulkConnection, None] = {}
        """Connections with calls, those being made included."""
        self.queue: CallQueue[BulkCall] = CallQueue(weight_of)
        self.wants_puts = True
        """Whether it wanted all blocks of the last put."""

    def take_idle(self, namespace: int) -> BulkConnection:
        """One of the idle connections (there is one), rather one that this namespace's calls had
        last: the node may read those of others in small pieces."""
        mine = [one for one in self.idle if one.namespace == namespace]
        connection = (mine or self.idle)[-1]
        self.idle.remove(connection)
        return connection


class BulkCaller:
    """See the module's text. `view` gives the bytes of a put's copy, `weight_of` a namespace's
    weight; `departures` is shared by all that the node's link carries away, None = nobody waits."""

    def __init__(
        self,
        node_id: str,
        options: BulkOptions,
        counters: BulkCounters,
        view: Callable[[Any], memoryview],
        weight_of: Callable[[int], float] = lambda _namespace: 1.0,
        departures: Departures | None = None,
    ) -> None:
        self._weight_of = weight_of
        self.departures = departures or Departures(0.0)
        self.node_id = node_id
        self.options = options
        self.counters = counters
        self.view = view
        self._nodes: Mapping[int, NodeInfo] = {}
        self._peers: dict[tuple[str, str, int], _Peer] = {}
        self._instructions: list[Instruction] = []
        self._closed = False
        self._due = inf
        """No call that waits has a deadline before this."""
        self._looked_at = -inf

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

    def ask(self, now: float, *calls: BulkCall) -> None:
        """Make calls, now or in their turn."""
        asked: dict[_Peer, NodeInfo] = {}
        for call in calls:
            node = self._nodes.get(call.node)
            if node is None or self._closed:
                self._instructions.append(Complete(call, UNREACHABLE))
                continue
            self.counters.bulk_requests_sent_total += 1
            address = (node.node_id, node.bulk_host, node.bulk_port)
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = _Peer(self._weight_of)
            if len(peer.queue) >= self.options.queue_per_peer:
                self._start(now, node, peer)
            if len(peer.queue) >= self.options.queue_per_peer:
                self._complete(call, UNREACHABLE)
            else:
                peer.queue.push(call)
                asked[peer] = node
        for peer, node in asked.items():
            self._start(now, node, peer)
        if any(peer.queue for peer in asked):
            self._note_due(calls)

    def get_timer(self) -> float | None:
        """When `handle_timer` is to be called; None = no need."""
        return None if self._due == inf else max(self._due, self._looked_at + OVERDUE_S)

    def handle_timer(self, now: float) -> None:
        """End the calls that wait and are overdue."""
        when = self.get_timer()
        if when is None or now < when:
            return
        self._looked_at, self._due = now, inf
        for peer in self._peers.values():
            for call in peer.queue.remove(lambda call: call.deadline <= now):
                self._complete(call, UNREACHABLE if _is_wanted(call) else UNWANTED)
            self._note_due(peer.queue)

    def _note_due(self, calls: Iterable[BulkCall]) -> None:
        self._due = min(self._due, min((call.deadline for call in calls), default=inf))

    def end_unwanted(self, now: float) -> None:
        """Some gets may not be wanted any more: those that wait are not made when their turn comes,
        and a connection on which much is on its way, and nothing else, ends."""
        for peer in self._peers.values():
            for connection in list(peer.busy):
                connection.end_unwanted(now)

    def close(self, now: float) -> None:
        """End all calls as unreachable, and close all connections."""
        self._closed = True
        self._due = inf
        for peer in self._peers.values():
            while (namespace := peer.queue.next_flow()) is not None:
                call = peer.queue.take(namespace)
                self._instructions.append(Complete(call, UNREACHABLE))
            for connection in list(peer.busy):
                connection.end(now)
            self._close_idle(now, peer)

    def check(self) -> None:
        """AssertionError if this end contradicts itself."""
        for peer in self._peers.values():
            most = self.options.connections_per_peer
            count = len(peer.busy) + len(peer.idle)
            assert count <= most + self.options.assured_per_peer, f"{count} connections"
            assert not peer.queue or len(peer.busy) >= most
            assert not peer.queue or self._next_flow(peer) is None
            assert len(peer.queue) <= self.options.queue_per_peer
            for connection in (*peer.busy, *peer.idle):
                assert not connection.closed
                assert (not connection.calls) == (connection in peer.idle)
                assert (not connection.calls) == (connection.state is RequestState.IDLE)
                connection.check()

    # --- calls and connections ----------------------------------------------------------------

    def _start(self, now: float, node: NodeInfo, peer: _Peer) -> None:
        """Start the calls whose turn has come."""
        while (namespace := self._next_flow(peer)) is not None:
            calls = peer.queue.take_alike(now, namespace, MAX_BULK_BLOCKS, self._complete)
            if not calls:
                continue
            if peer.idle:
                connection = peer.take_idle(namespace)
                self._instructions.append(Flush(connection))
            else:
                connection = BulkConnection(self, node, peer)
                self._instructions.append(Connect(connection))
            peer.busy[connection] = None
            connection.begin(now, calls)

    def _next_flow(self, peer: _Peer) -> int | None:
        """The namespace whose calls can be made now; None if there is no connection for any."""
        most = self.options.connections_per_peer
        if len(peer.busy) < most:
            return peer.queue.next_flow()
        if not peer.queue or len(peer.busy) >= most + self.options.assured_per_peer:
            return None
        return peer.queue.next_flow({namespace_of(one.calls[0]) for one in peer.busy if one.calls})

    def _complete(self, call: BulkCall, outcome: str) -> None:
        if outcome == UNREACHABLE:
            self.counters.bulk_failures_total += 1
        self._instructions.append(Complete(call, outcome))

    def ended(self, call: BulkCall, outcome: str) -> None:
        """One of a connection's calls has ended."""
        self._complete(call, outcome)

    def free(self, now: float, connection: BulkConnection) -> None:
        """A connection's calls have all ended; it is idle now, or closed."""
        peer = connection.peer
        del peer.busy[connection]
        if not connection.closed:
            peer.idle.append(connection)
        self._start(now, connection.node, peer)

    def again(self, now: float, connection: BulkConnection, calls: Sequence[BulkCall]) -> None:
        """Make these calls of a connection once more, before all others; they began before."""
        if self._closed:
            for call in calls:
                self._complete(call, UNREACHABLE)
        else:
            connection.peer.queue.push_front(calls)
            self._note_due(calls)
            self._start(now, connection.node, connection.peer)

    def closed(self, connection: BulkConnection) -> None:
        """A connection is closed."""
        self._instructions.append(Flush(connection))
        if not connection.calls:
            connection.peer.idle.remove(connection)

    def _close_idle(self, now: float, peer: _Peer) -> None:
        for connection in list(peer.idle):
            connection.end(now)


def _is_wanted(call: BulkCall) -> bool:
    return not isinstance(call, GetCall) or call.wanted()


class BulkConnection(LinkStream[CalleeMessage]):
    """One connection to `node`: being made, idle, or with calls, which are one request."""

    one_at_a_time = True

    def __init__(self, link: BulkCaller, node: NodeInfo, peer: _Peer) -> None:
        super().__init__(CalleeMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        self.node = node
        self.peer = peer
        self.calls: deque[BulkCall] = deque()
        """Those that have not ended, in order."""
        self.state = RequestState.CONNECTING
        """Of the calls that have not ended."""
        self._last_moment = 0.0
        """When the first of the calls must have ended."""
        self._link = link
        self._reused = False
        """The calls began on a connection that was there already."""
        self._promised: deque[int] = deque()
        """The digests of the blocks that are coming, one for each call."""
        self._refused: set[BulkCall] = set()
        """Gets whose blocks are coming and have no room."""
        self._unwanted = False
        """Nobody wants what is coming."""
        self.namespace = 0
        """Of the calls that are made, or were made last."""
        self._leaving = Turn(link.departures, lambda: self.wake())

    def _happen(self, event: RequestEvent) -> None:
        after = TRANSITIONS[self.state].get(event)
        assert after is not None, f"{event} in {self.state}"
        self.state = after

    # --- events -------------------------------------------------------------------------------

    def begin(self, now: float, calls: Sequence[BulkCall]) -> None:
        """Make these calls, which are alike, as soon as the connection stands."""
        self.calls.extend(calls)
        self.namespace = namespace_of(calls[0])
        self._last_moment = min(call.deadline for call in calls)
        self._reused = self.state is RequestState.IDLE
        if self._reused:
            self._request(now)
        else:
            self._deadline = min(self._last_moment, now + self._link.options.connect_timeout_s)

    def connected(self, now: float) -> None:
        """The connection stands, and at its other end is whom it was made to."""
        if self.closed:
            return
        assert self.calls
        self._send(BulkHello(BULK_PROTOCOL_VERSION, self._link.node_id))
        self._request(now)

    def wrong_peer(self, now: float, problem: str) -> None:
        """Somebody else is at the other end."""
        self._link.counters.bulk_wrong_peers_total += 1
        self.problem = problem
        self.end(now)

    def end(self, now: float) -> None:
        """Close, and end the calls as unreachable."""
        self._reused = False
        self._close(now)

    def end_unwanted(self, now: float) -> None:
        """Close if much is coming that nobody wants any more, and nothing else."""
        left_bytes = sum(room.size - room.there for room in self.rooms)
        if left_bytes > MAX_SKIPPED_BYTES and not any(map(_is_wanted, self.calls)):
            self._unwanted = True
            self.end(now)

    # --- the conversation ---------------------------------------------------------------------

    def _wait(self, now: float) -> None:
        """Set the deadline for the next thing that the callee says."""
        self._deadline = self._last_moment
        if isinstance(self.calls[0], GetCall):
            self._deadline = min(self._deadline, now + self._link.options.silence_s)

    def _request(self, now: float) -> None:
        self._wait(now)
        match self.calls[0]:
            case PutCall() as first:
                headers = []
                for call in self.calls:
                    assert isinstance(call, PutCall)
                    copy = call.copy
                    key, size_bytes = copy.block.key, copy.size_bytes
                    header = PutHeader(key, size_bytes, copy.digest, copy.parent, copy.depth)
                    headers.append(header)
                in_all_bytes = sum(header.size_bytes for header in headers)
                short = in_all_bytes <= MAX_FOLLOWING_BYTES
                unasked = first.at_once and short and self.peer.wants_puts
                self._happen(RequestEvent.PUT_AHEAD if unasked else RequestEvent.ASK)
                self._send(
                    BulkPut(
                        first.copy.block.namespace,
                        first.epoch,
                        first.meaning,
                        headers,
                        unasked,
                        first.spare,
                    )
                )
                if unasked:
                    for call in self.calls:
                        assert isinstance(call, PutCall)
                        self._send_block(self._link.view(call.copy))
            case GetCall(block=block) as first:
                self._happen(RequestEvent.ASK)
                wanted = []
                for call in self.calls:
                    assert isinstance(call, GetCall)
                    wanted.append(WantedBlock(call.block.key, call.digest, call.start_bytes))
                self._send(BulkGet(block.namespace, wanted, first.may_read))
            case DropCall() as call:
                self._happen(RequestEvent.ASK)
                self._send(BulkDrop(call.namespace, call.keys))
            case ExistsCall() as call:
                self._happen(RequestEvent.ASK)
                self._send(BulkExists(call.namespace, call.keys))

    def _message(self, now: float, message: CalleeMessage) -> None:
        if not self.calls:
            raise LinkError(f"{type(message).__name__} without a request")
        call = self.calls[0]
        if not isinstance(message, ANSWERS[self.state]):
            raise LinkError(f"{type(message).__name__} as answer to a {type(call).__name__}")
        match call, message:
            case GetCall(), BulkDone(status=bulk.DONE):
                raise LinkError("a get is done, and there are no blocks")
            case _, BulkDone(status=status):
                self._all_done(now, [status] * len(self.calls))
            case PutCall(), BulkGo(statuses=statuses):
                self._go(now, statuses)
            case PutCall(), BulkTaken(statuses=statuses):
                if self.state is RequestState.FOLLOWED:
                    self.peer.wants_puts = set(statuses) == {bulk.DONE}
                self._all_done(now, statuses)
            case ExistsCall() as call, BulkHeld(bitmap=bitmap):
                call.answer(int.from_bytes(bitmap, "little"))
                self._all_done(now, [bulk.DONE])
            case GetCall(), BulkBlocks(blocks=blocks):
                self._receive_blocks(now, blocks)
            case _:
                raise LinkError(f"{type(message).__name__} as answer to a {type(call).__name__}")

    def _go(self, now: float, statuses: list[str]) -> None:
        """Send what is wanted; the other puts have ended."""
        if len(statuses) != len(self.calls):
            raise LinkError(f"{len(statuses)} statuses for {len(self.calls)} blocks")
        self._happen(RequestEvent.GO)
        self.peer.wants_puts = set(statuses) == {bulk.WANTED}
        calls, self.calls = self.calls, deque()
        for call, status in zip(calls, statuses, strict=True):
            assert isinstance(call, PutCall)
            if status == bulk.WANTED:
                self.calls.append(call)
                self._send_block(self._link.view(call.copy))
            else:
                self._link.ended(call, status)
        if not self.calls:
            self._free(now)

    def _receive_blocks(self, now: float, headers: list[BlockHeader]) -> None:
        """Of the first of the calls, the blocks that are held come now; the other gets have ended,
        or must be asked again."""
        first, count = self.calls[0], len(self.calls)
        assert isinstance(first, GetCall)
        wrong = len(headers) > count if first.may_read else len(headers) != count
        if wrong or self._promised:
            raise LinkError(f"{len(headers)} blocks in answer to {len(self.calls)} gets")
        told = list(zip(self.calls, headers, strict=False))
        for call, header in told:
            assert isinstance(call, GetCall)
            if header.status == bulk.DONE and header.size_bytes <= call.start_bytes:
                raise LinkError(f"a block of {header.size_bytes} bytes from {call.start_bytes} on")
        if headers[0].status == bulk.LATER and self.state is not RequestState.GIVEN:
            raise LinkError("the first block is for later")
        gives = any(header.status == bulk.DONE for header in headers)
        self._happen(RequestEvent.GIVE if gives else RequestEvent.REFUSE)
        behind = list(self.calls)[len(headers) :]
        self.calls.clear()
        later: list[BulkCall] = []
        skipped_bytes = 0
        for call, header in told:
            assert isinstance(call, GetCall)
            if header.status == bulk.LATER:
                later.append(call)
                continue
            if header.status != bulk.DONE:
                self._link.ended(call, header.status)
                continue
            self.calls.append(call)
            self._promised.append(header.digest)
            self.peer.queue.brings(call, header.size_bytes - call.start_bytes)
            room = call.begin(header.size_bytes, header.digest)
            if room is not None:
                self._receive_block(room, call.start_bytes)
            else:  # the bytes are on their way, and nobody wants them
                self._refused.add(call)
                skipped_bytes += header.size_bytes - call.start_bytes
                self._skip_block(header.size_bytes - call.start_bytes)
        self.calls.extend(behind)
        if later:
            self._link.again(now, self, later)
        if skipped_bytes > MAX_SKIPPED_BYTES:
            self.end(now)
        elif self.calls:
            self._wait(now)
        else:
            self._free(now)

    def _block_coming(self, now: float) -> None:
        self._wait(now)

    def _block_came(self, now: float, digest: int | None) -> None:
        call = self.calls.popleft()
        right = self._promised.popleft() == digest
        if call in self._refused:
            self._refused.remove(call)
            self._link.ended(call, bulk.NO_ROOM)
        else:
            self._link.ended(call, bulk.DONE if right else bulk.WRONG_DIGEST)
        if self.calls:
            self._wait(now)
        else:
            self._free(now)

    def _allowed_bytes(self, now: float) -> int:
        return self._leaving.allowed(now, self.namespace)

    def _block_sending(self, now: float, size_bytes: int) -> None:
        self._leaving.moved(now, self.namespace, size_bytes)
        self._link.counters.payload_bytes_sent_bulk_put_total += size_bytes

    def get_timer(self) -> float | None:
        """When `handle_timer` is to be called, or there may be more to send."""
        return None if self.closed else earliest(self._deadline, self._leaving.until)

    def handle_timer(self, now: float) -> None:
        self._leaving.due(now)
        super().handle_timer(now)

    def _all_done(self, now: float, statuses: list[str]) -> None:
        """All calls have ended well enough for the connection to be kept."""
        if len(statuses) != len(self.calls) or self._promised:
            raise LinkError(f"{len(statuses)} statuses for {len(self.calls)} calls")
        for status in statuses:
            self._link.ended(self.calls.popleft(), status)
        self._free(now)

    def _free(self, now: float) -> None:
        self._happen(RequestEvent.END)
        # The callee closes after `idle_s`; leave it the first half of that.
        self._deadline = now + self._link.options.idle_s / 2
        self._link.free(now, self)

    def _late(self, now: float) -> None:
        self.end(now)

    def _rules_broken(self, error: Exception) -> None:
        self._link.counters.bulk_protocol_errors_total += 1
        self._reused = False

    def _over(self, now: float) -> None:
        waited = self._leaving.leave()
        self._link.closed(self)
        if self.calls:
            self._end_calls(now)
        if waited:
            self._leaving.pass_on()

    def _end_calls(self, now: float) -> None:
        calls, self.calls = self.calls, deque()
        if self._reused and self.state in UNANSWERED:
            self._link.again(now, self, calls)
        else:
            failed = UNWANTED if self._unwanted else UNREACHABLE
            for call in calls:
                self._link.ended(call, bulk.NO_ROOM if call in self._refused else failed)
        self._link.free(now, self)
