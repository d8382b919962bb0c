"""What the agent's cores ask of its adapters: requests to other agents over the bulk link.

Owns: the calls' types. A core appends a call to the shared `Outbox`; an adapter makes it and
reports through the call's own `done`, with the present time, exactly once. Must not know:
sockets (the adapter's) or why a call is made (the core's).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.store import Copy
from kvcast.protocol.messages.wire import BlockId

UNREACHABLE: Final = "unreachable"
"""Outcome of a call whose peer could not be asked, or did not answer in time; beside the
statuses of `kvcast.protocol.messages.bulk`."""

EVICTED: Final = "evicted"
"""Outcome of a put whose copy was no longer there when its turn came."""

Done = Callable[[float, str], None]
"""(now, outcome)"""


@dataclass(slots=True, eq=False)
class PutCall:
    """Send a copy to a node. `begin` pins it when its turn has come; False = it was evicted while
    it waited, and there is nothing to send. After it and whatever happens, `done`."""

    node: int
    copy: Copy
    epoch: int
    meaning: int
    deadline: float
    begin: Callable[[], bool]
    done: Done


@dataclass(slots=True, eq=False)
class GetCall:
    """Fetch a block from a node. `begin(size, digest)` gives the view to write to, or None to
    refuse; after it and whatever happens, `done`. The adapter does not look at the bytes."""

    node: int
    block: BlockId
    digest: int
    deadline: float
    begin: Callable[[int, int], memoryview | None]
    done: Done


@dataclass(slots=True, eq=False)
class DropCall:
    """Have a node forget blocks of a namespace."""

    node: int
    namespace: int
    keys: list[bytes]
    deadline: float
    done: Done


@dataclass(slots=True, eq=False)
class ExistsCall:
    """Ask a node which blocks it holds; `answer` (one flag a key) comes before `done`."""

    node: int
    namespace: int
    keys: list[bytes]
    deadline: float
    answer: Callable[[list[bool]], None]
    done: Done


BulkCall = PutCall | GetCall | DropCall | ExistsCall


@dataclass(slots=True)
class Outbox:
    """What the cores share: the present pool, and the calls that wait to be made."""

    pool: Pool | None = None
    calls: deque[BulkCall] = field(default_factory=deque)
