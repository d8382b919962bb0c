"""The simulated bulk link: the calls that agents make to each other over TCP.

Owns: what `kvcast.hostagent.network.bulk_link` owns: connections, their number, deadlines, the
order of a conversation. Must not know: why a call is made, or what a request deserves. A transport
other than TCP (RDMA) joins here: it makes `GetCall`s and `PutCall`s some other way, and reports
the same.

One connection carries one call. Bytes travel in pieces, so that either side may die between two.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvcast.hostagent.core.bulk_requests import (
    EVICTED,
    UNREACHABLE,
    BulkCall,
    DropCall,
    ExistsCall,
    GetCall,
    PutCall,
)
from kvcast.hostagent.core.store import Copy
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import (
    BulkBlock,
    BulkDone,
    BulkDrop,
    BulkExists,
    BulkGet,
    BulkGo,
    BulkHeld,
    BulkHello,
    BulkPut,
)
from kvcast.simulation.network import Stream, StreamEnd

if TYPE_CHECKING:
    from kvcast.simulation.agent import SimAgent

PIECE_BYTES: Final = 16 * 1024
PIECE_S: Final = 20e-6
CONNECTIONS_PER_PEER: Final = 4
QUEUE_PER_PEER: Final = 8192


class _Peer:
    def __init__(self) -> None:
        self.calls = 0
        self.queue: deque[BulkCall] = deque()


class BulkSide:
    """One agent's calls to others, and others' calls to it."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent
        self._world = agent.host.world
        self._peers: dict[str, _Peer] = {}
        self._streams: dict[Stream, None] = {}

    def die(self) -> None:
        """The process is gone: the kernel resets its connections."""
        for stream in list(self._streams):
            self._world.after(0.0, stream.broken)

    # --- calls ------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Start the calls that wait in the outbox."""
        core = self._agent.core
        while core.outbox.calls:
            call = core.outbox.calls.popleft()
            node = core.pool.nodes.get(call.node) if core.pool is not None else None
            if node is None:
                self._soon(functools.partial(self._done, call, UNREACHABLE))
                continue
            core.metrics.bulk_requests_sent_total += 1
            peer = self._peers.setdefault(node.node_id, _Peer())
            if peer.calls < CONNECTIONS_PER_PEER:
                peer.calls += 1
                # The adapter makes the call in a task of its own.
                self._soon(functools.partial(self._make, node.node_id, peer, call))
            elif len(peer.queue) < QUEUE_PER_PEER:
                peer.queue.append(call)
            else:
                core.metrics.bulk_failures_total += 1
                self._soon(functools.partial(self._done, call, UNREACHABLE))

    def _soon(self, action: Callable[[], None]) -> None:
        agent = self._agent
        self._world.after(0.0, lambda: agent.host.when_running(agent, action))

    def _done(self, call: BulkCall, outcome: str) -> None:
        if not self._agent.dead:
            call.done(self._agent.now, outcome)
            self._agent.pump()

    def _make(self, node_id: str, peer: _Peer, call: BulkCall) -> None:
        agent = self._agent

        def finished(outcome: str) -> None:
            if outcome == UNREACHABLE:
                agent.core.metrics.bulk_failures_total += 1
            self._done(call, outcome)
            if peer.queue:
                self._make(node_id, peer, peer.queue.popleft())
            else:
                peer.calls -= 1

        if isinstance(call, PutCall) and not call.begin():
            self._soon(lambda: finished(EVICTED))
            return
        stream = agent.host.network.open_bulk(agent.host, node_id)
        if call.deadline <= agent.now or stream is None:
            self._soon(lambda: finished(UNREACHABLE))
            return
        self._streams[stream] = None
        _Conversation(agent, stream, call, self._ended(stream, finished))

    def _ended(self, stream: Stream, finished: Callable[[str], None]) -> Callable[[str], None]:
        def ended(outcome: str) -> None:
            del self._streams[stream]
            stream.ends[0].close()
            finished(outcome)

        return ended

    # --- requests ---------------------------------------------------------------------------

    def accept(self, stream: Stream) -> None:
        """Another agent has connected."""
        self._streams[stream] = None
        _Service(self._agent, stream.ends[1], lambda: self._streams.pop(stream, None))


class _Conversation:
    """The caller's side of one call."""

    def __init__(
        self, agent: SimAgent, stream: Stream, call: BulkCall, ended: Callable[[str], None]
    ) -> None:
        self._agent = agent
        self._end = stream.ends[0]
        self._call = call
        self._ended: Callable[[str], None] | None = ended
        self._view: memoryview | None = None
        self._at = 0
        host = agent.host
        self._end.received = lambda message: host.when_running(
            agent, lambda: self._received(message)
        )
        self._end.closed = lambda: host.when_running(agent, lambda: self._finish(UNREACHABLE))
        host.world.at(
            host.world_time(call.deadline),
            lambda: host.when_running(agent, lambda: self._finish(UNREACHABLE)),
        )
        self._end.send(BulkHello(bulk.BULK_PROTOCOL_VERSION, host.options.node_id))
        match call:
            case PutCall(copy=copy):
                namespace, key = copy.block
                size, digest = copy.size_bytes, copy.digest
                put = BulkPut(namespace, key, size, digest, call.epoch, call.meaning)
                self._end.send(put)
            case GetCall(block=block):
                self._end.send(BulkGet(block.namespace, block.key, call.digest))
            case DropCall():
                self._end.send(BulkDrop(call.namespace, call.keys))
            case ExistsCall():
                self._end.send(BulkExists(call.namespace, call.keys))

    def _finish(self, outcome: str) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(outcome)

    def _received(self, message: Any) -> None:
        if self._ended is None:
            return
        call, agent = self._call, self._agent
        match message:
            case BulkDone(status=status):
                self._finish(status)
            case BulkGo() if isinstance(call, PutCall):
                view = agent.core.serving.view(call.copy)
                _send_bytes(agent, self._end, view, lambda: self._ended is not None)
            case BulkHeld(bitmap=bitmap) if isinstance(call, ExistsCall):
                call.answer(bulk.unpack_bitmap(bitmap, len(call.keys)))
                self._finish(bulk.DONE)
            case BulkBlock() if isinstance(call, GetCall):
                self._view = call.begin(message.size_bytes, message.digest)
                if self._view is None:
                    self._finish(bulk.NO_ROOM)
            case bytes() if self._view is not None:
                self._view[self._at : self._at + len(message)] = message
                self._at += len(message)
                if self._at == len(self._view):
                    self._finish(bulk.DONE)
            case _:
                self._finish(UNREACHABLE)


class _Service:
    """The callee's side of one connection."""

    def __init__(self, agent: SimAgent, end: StreamEnd, gone: Callable[[], object]) -> None:
        self._agent = agent
        self._end = end
        self._gone = gone
        self._caller = ""
        self._put: BulkPut | None = None
        self._room: Copy | None = None
        self._at = 0
        self._sending: Copy | None = None
        end.received = lambda message: agent.host.when_running(
            agent, lambda: self._received(message)
        )
        end.closed = lambda: agent.host.when_running(agent, self._closed)

    def _closed(self) -> None:
        self._gone()
        serving = self._agent.core.serving
        if self._room is not None:
            serving.abort_put(self._room)
            self._room = None
        self._sent()

    def _sent(self) -> None:
        if self._sending is not None:
            self._agent.core.serving.end_get(self._sending)
            self._sending = None

    def _received(self, message: Any) -> None:
        serving = self._agent.core.serving
        match message:
            case BulkHello(node_id=node_id):
                self._caller = node_id
            case BulkPut():
                room = serving.begin_put(self._caller, message)
                if isinstance(room, Copy):
                    self._put, self._room, self._at = message, room, 0
                    self._end.send(BulkGo())
                else:
                    self._acknowledge(message, room)
            case bytes() if self._room is not None and self._put is not None:
                serving.view(self._room)[self._at : self._at + len(message)] = message
                self._at += len(message)
                if self._at == self._room.size_bytes:
                    room, self._room = self._room, None
                    self._acknowledge(self._put, serving.end_put(self._put, room))
            case BulkGet():
                copy = serving.get(self._caller, message)
                if isinstance(copy, Copy):
                    self._sending = copy
                    self._end.send(BulkBlock(copy.size_bytes, copy.digest))
                    _send_bytes(
                        self._agent,
                        self._end,
                        serving.view(copy),
                        lambda: self._sending is not None,
                        self._sent,
                    )
                else:
                    self._end.send(copy)
            case BulkDrop():
                self._end.send(serving.drop(self._caller, message))
            case BulkExists():
                self._end.send(serving.exists(self._caller, message))
            case _:
                pass
        self._agent.pump()

    def _acknowledge(self, put: BulkPut, answer: BulkDone) -> None:
        if answer.status in (bulk.DONE, bulk.HELD):
            host = self._agent.host
            host.observer.acknowledged(host.number, put.namespace, put.key)
        self._end.send(answer)


def _send_bytes(
    agent: SimAgent,
    end: StreamEnd,
    view: memoryview,
    wanted: Callable[[], bool],
    sent: Callable[[], None] | None = None,
) -> None:
    """Send a block piece by piece, each read when its turn comes."""

    def piece(at: int) -> None:
        if not wanted():
            return
        end.send(bytes(view[at : at + PIECE_BYTES]))
        if at + PIECE_BYTES < len(view):
            agent.host.world.after(
                PIECE_S, lambda: agent.host.when_running(agent, lambda: piece(at + PIECE_BYTES))
            )
        elif sent is not None:
            sent()

    piece(0)
