"""What both ends of the bulk link share: the calls, their outcomes, the bounds and the counters.

Owns: the calls' types. A core of the agent appends a call to its outbox; the link makes it and
reports through the call's own `ended`, with the present time, exactly once. Must not know: why a
call is made (the agent's cores do).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvcast.protocol.messages.wire import BlockId

UNREACHABLE: Final = "unreachable"
"""Outcome of a call whose peer could not be asked, or did not answer in time; beside the
statuses of `kvcast.protocol.messages.bulk`."""

EVICTED: Final = "evicted"
"""Outcome of a put whose copy was no longer there when its turn came."""

UNWANTED: Final = "unwanted"
"""Outcome of a get that was not wanted any more."""

Ended = Callable[[float, str], None]
"""(now, outcome)"""


def _always() -> bool:
    return True


@dataclass(frozen=True)
class BulkOptions:
    """Bounds of the bulk link."""

    connections_per_peer: int = 4
    """Connections to one node, in the caller's role."""
    assured_per_peer: int = 4
    """Further ones, of which each is for a namespace that has no other to that node."""
    queue_per_peer: int = 8192
    """Calls to one node that wait for a connection; one more fails at once."""
    max_connections: int = 256
    """Connections from all nodes, in the callee's role."""
    max_connections_per_address: int = 64
    """Of them, from one address beyond loopback."""
    connect_timeout_s: float = 2.0
    """How long a connection may take to be made."""
    idle_s: float = 60.0
    """How long a connection without a request is kept."""
    transfer_timeout_s: float = 30.0
    """How long the callee takes over one request, the bytes of its blocks included."""
    part_bytes: int = 256 << 10
    """So much of an answer to a get is promised at once, unless the link carries more in some
    milliseconds: what was promised is sent, whoever else asks for it meanwhile."""
    connection_s: float = 6.0
    """An answer to a get that has been leaving for so long goes on over another connection. The
    kernel's BBR has one that was full for 10 s nearly empty for 0.2 s; not one that has rested."""
    silence_s: float = 2.0
    """How long a get may wait for the next bytes of its answer; there is another way."""


class HeldCopy(Protocol):
    """A copy of a block, as far as a put says what it is."""

    @property
    def block(self) -> BlockId: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def digest(self) -> int: ...

    @property
    def parent(self) -> bytes: ...

    @property
    def depth(self) -> int: ...


@dataclass(slots=True, eq=False)
class PutCall:
    """Send a copy to a node. `begin` pins it when its turn has come; False = it was evicted while
    it waited, and there is nothing to send. After it and whatever happens, `ended`. `at_once`:
    whether the bytes may be sent before the node has said that it wants them; `spare`: the node is
    to evict nothing for it; `moved`: whether a network card has failed with it, and another goes
    on; `by_tcp_to`: the node's id, where RDMA could not make it: by now `node` may be another's
    number."""

    node: int
    copy: HeldCopy
    epoch: int
    meaning: int
    deadline: float
    begin: Callable[[], bool]
    ended: Ended
    at_once: bool = False
    spare: bool = False
    moved: bool = False
    by_tcp_to: str = ""


@dataclass(slots=True, eq=False)
class GetCall:
    """Fetch a block from a node. `begin(size, digest)` gives the room for the whole block, whose
    first `start_bytes` are there already, or None to refuse; after it and whatever happens,
    `ended`. Outcome "done": all bytes are there, and have that digest. `wanted`: whether anybody
    still waits for it; else it may end early. `may_read`: whether the block can be READ as well;
    then the outcome may be "company". `moved`: as of a put; `begin` may then be asked
    again. `by_tcp_to`: as of a put."""

    node: int
    block: BlockId
    digest: int
    deadline: float
    begin: Callable[[int, int], memoryview | None]
    ended: Ended
    start_bytes: int = 0
    wanted: Callable[[], bool] = _always
    may_read: bool = False
    moved: bool = False
    by_tcp_to: str = ""


@dataclass(slots=True, eq=False)
class DropCall:
    """Have a node forget blocks of a namespace."""

    node: int
    namespace: int
    keys: list[bytes]
    deadline: float
    ended: Ended


@dataclass(slots=True, eq=False)
class ExistsCall:
    """Ask a node which blocks of a chain it holds; `answer` (their bits, and whatever else it may
    have said) comes before `ended`."""

    node: int
    namespace: int
    keys: bytes
    deadline: float
    answer: Callable[[int], None]
    ended: Ended


BulkCall = PutCall | GetCall | DropCall | ExistsCall


class BulkCounters(Protocol):
    """What the link counts, by the names of the agent's metrics."""

    bulk_requests_sent_total: int
    bulk_requests_served_total: int
    bulk_failures_total: int
    bulk_protocol_errors_total: int
    bulk_connections_refused_total: int
    bulk_wrong_peers_total: int
    payload_bytes_sent_bulk_put_total: int
    payload_bytes_sent_bulk_get_total: int
