"""The client library: how an engine on a node talks to the node's agent.

Owns: `Client` (blocking) and `AsyncClient` (asyncio), two drivers of one `conversation`, and what
they raise and return. Must not know: anything of the agent but the local API
(`kvcast.protocol.messages.local`). It imports no engine, and besides the standard library nothing
but msgspec and xxhash (and numpy where there is one, for long questions); a block is a
`memoryview`, which numpy and torch take without copying (``numpy.frombuffer(block.data, dtype)``).

A first example::

    from kvcast.hostagent.client import Client

    with Client("/run/kvcast/agent.sock") as pool:
        ns = pool.namespace(tenant="acme", model="m", version="1", layout="bf16/16")
        pool.put(ns, {key: kv_bytes})              # key: 16 bytes, from the engine's block hash
        for block in pool.get(ns, [key], deadline_s=0.5):
            if block is None:
                ...                                # a miss: compute it
            else:
                with block:                        # pinned until released
                    engine_memory[:] = block.data

What the node holds is got and released without a message to the agent. An engine that writes its
blocks itself puts them without a copy::

    with pool.reserve(ns, {key: size_bytes}) as room:
        room.views[key][:] = engine_memory         # or any kernel that writes there
        pool.commit(room)

Keys are 16 bytes, sizes are bytes, times are seconds unless the name says otherwise. A key names
one content for ever: put the same key twice, and the first copy stays.
"""

from kvcast.hostagent.client.asynchronous import AsyncClient
from kvcast.hostagent.client.blocking import Client
from kvcast.hostagent.client.blocks import Block, Outcome, Reservation
from kvcast.hostagent.client.errors import (
    AgentGoneError,
    AgentRejectedError,
    BusyError,
    ForbiddenError,
    InvalidRequestError,
    KvcastError,
    NoRoomError,
    PutError,
    QuotaError,
    ReleasedError,
    UnavailableError,
    UnknownNamespaceError,
)

__all__ = [
    "AgentGoneError",
    "AgentRejectedError",
    "AsyncClient",
    "Block",
    "BusyError",
    "Client",
    "ForbiddenError",
    "InvalidRequestError",
    "KvcastError",
    "NoRoomError",
    "Outcome",
    "PutError",
    "QuotaError",
    "ReleasedError",
    "Reservation",
    "UnavailableError",
    "UnknownNamespaceError",
]
