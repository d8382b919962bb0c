"""Which way a block goes between two agents: by RDMA where both have it and it works, else by TCP.

Owns: the choice for each call, and how long a node is left alone by RDMA after that failed with it.
Must not know: how either link makes a call.

Gets and puts of blocks go by RDMA to nodes whose address in the pool's map says that they have it;
questions and drops go by TCP. A call that RDMA could not make (`unreachable`, whatever the reason)
is made once more by TCP, if there is time, and to the same node: a controller that has lost its
state may have given its number to another meanwhile. The node is asked by TCP alone for `retry_s`,
twice as long after each failure that follows, at most `retry_max_s`. A get's room is asked for
once: what TCP brings goes to the same place, if it is the same copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.links.backoff import Pauses
from kvcast.protocol.links.bulk import (
    EVICTED,
    UNREACHABLE,
    UNWANTED,
    BulkCall,
    GetCall,
    PutCall,
)
from kvcast.protocol.links.rdma import RdmaCounters, RdmaOptions
from kvcast.protocol.links.rdma_caller import RdmaCall
from kvcast.protocol.messages.control import NodeInfo

_NOT_MADE: Final = frozenset({UNREACHABLE, EVICTED, UNWANTED})
"""Outcomes that say nothing good of RDMA."""
_GONE: Final = -1
"""Instead of the number of a node that is in no map any more."""
MAX_NODES: Final = 4096
"""Nodes whose failures are known; of more, the first are forgotten."""


class Carriers:
    """See the module's text."""

    def __init__(self, options: RdmaOptions, counters: RdmaCounters) -> None:
        self._options = options
        self._counters = counters
        self._nodes: Mapping[int, NodeInfo] = {}
        self._trouble: BoundedMap[str, Pauses] = BoundedMap(MAX_NODES)
        """By id, the nodes with which RDMA did not work when it was last tried; all are told of."""
        self._by_tcp: list[BulkCall] = []
        self._news: list[str] = []

    def use_nodes(self, nodes: Mapping[int, NodeInfo]) -> None:
        """The nodes by index from now on."""
        self._nodes = nodes

    def choose(self, now: float, calls: list[BulkCall]) -> tuple[list[RdmaCall], list[BulkCall]]:
        """The calls that RDMA is to make (and whose ends come back here first), and those that TCP
        is to make."""
        by_rdma: list[RdmaCall] = []
        by_tcp: list[BulkCall] = []
        for call in calls:
            node = self._nodes.get(call.node)
            if isinstance(call, PutCall) and call.spare:  # which only TCP's requests can say
                by_tcp.append(call)
            elif isinstance(call, GetCall | PutCall) and call.by_tcp_to:
                if node is None or node.node_id != call.by_tcp_to:
                    call.node = self._number_of(call.by_tcp_to)
                by_tcp.append(call)
            elif (
                isinstance(call, GetCall | PutCall) and node is not None and self._works(now, node)
            ):
                by_rdma.append(self._watched(call, node.node_id))
            else:
                by_tcp.append(call)
        return by_rdma, by_tcp

    def take_again(self) -> list[BulkCall]:
        """The calls that TCP is to make since RDMA could not."""
        taken, self._by_tcp = self._by_tcp, []
        return taken

    def take_news(self) -> list[str]:
        """What an operator should hear: once when a node falls back to TCP, and once when RDMA
        works again."""
        taken, self._news = self._news, []
        return taken

    def failed(self, now: float, node_id: str, problem: str) -> None:
        """RDMA does not work with a node just now."""
        pauses = self._trouble.get(node_id)
        if pauses is None:
            pauses = Pauses(self._options.retry_s, self._options.retry_max_s)
            self._trouble[node_id] = pauses
            self._news.append(f"RDMA with {node_id} failed, TCP takes over: {problem}")
        if pauses.may_try(now):
            pauses.failed(now)

    def _number_of(self, node_id: str) -> int:
        numbers = (number for number, node in self._nodes.items() if node.node_id == node_id)
        return next(numbers, _GONE)

    def _works(self, now: float, node: NodeInfo) -> bool:
        if not node.rdma_port:
            return False
        pauses = self._trouble.get(node.node_id)
        return pauses is None or pauses.may_try(now)

    def _worked(self, node_id: str) -> None:
        if self._trouble.pop(node_id, None) is not None:
            self._news.append(f"RDMA with {node_id} works again")

    def _watched(self, call: RdmaCall, node_id: str) -> RdmaCall:
        if isinstance(call, PutCall):
            return PutCall(
                call.node,
                call.copy,
                call.epoch,
                call.meaning,
                call.deadline,
                call.begin,
                _Ended(self, call, node_id, call),
            )
        once = _Once(call)
        by_tcp = GetCall(
            call.node,
            call.block,
            call.digest,
            call.deadline,
            once.begin,
            call.ended,
            call.start_bytes,
            call.wanted,
            call.may_read,
        )
        return GetCall(
            call.node,
            call.block,
            call.digest,
            call.deadline,
            once.begin,
            _Ended(self, call, node_id, by_tcp),
            call.start_bytes,
            call.wanted,
            call.may_read,
        )

    def ended(
        self, now: float, call: RdmaCall, by_tcp: RdmaCall, node_id: str, outcome: str
    ) -> None:
        """A call by RDMA has ended."""
        if outcome == UNREACHABLE and now < call.deadline:
            self._counters.rdma_fallbacks_total += 1
            by_tcp.by_tcp_to = node_id
            self._by_tcp.append(by_tcp)
            return
        if outcome not in _NOT_MADE:
            self._worked(node_id)
        call.ended(now, outcome)


class _Ended:
    """What a call by RDMA tells when it has ended."""

    __slots__ = ("_by_tcp", "_call", "_carriers", "_node_id")

    def __init__(self, carriers: Carriers, call: RdmaCall, node_id: str, by_tcp: RdmaCall) -> None:
        self._carriers = carriers
        self._call = call
        self._node_id = node_id
        self._by_tcp = by_tcp

    def __call__(self, now: float, outcome: str) -> None:
        self._carriers.ended(now, self._call, self._by_tcp, self._node_id, outcome)


class _Once:
    """A get's room, asked for once."""

    __slots__ = ("_asked", "_call", "_room")

    def __init__(self, call: GetCall) -> None:
        self._call = call
        self._asked: tuple[int, int] | None = None
        self._room: memoryview | None = None

    def begin(self, size_bytes: int, digest: int) -> memoryview | None:
        if self._asked is None:
            self._asked = (size_bytes, digest)
            self._room = self._call.begin(size_bytes, digest)
        return self._room if self._asked == (size_bytes, digest) else None
