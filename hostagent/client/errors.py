"""What the client library raises about the pool.

Owns: the errors, and which status of the local API stands for which. Must not know: who raises
them.
"""

from __future__ import annotations

from typing import Final

from kvcast.protocol.messages import local


class KvcastError(Exception):
    """Base of everything that the client raises about the pool. `status` is the agent's word
    for it (a status of `kvcast.protocol.messages.local`), or "" where the agent was not asked."""

    status = ""


class AgentGoneError(KvcastError):
    """There is no agent at the socket, it closed the connection, or it did not answer in time.
    Where the agent keeps its arena, the client has tried to come back to the one that comes after
    until the call's deadline, with all that it holds; later calls try again. Else it is useless
    from then on (blocks that it returned keep their bytes only while the agent that pinned them
    lives); make a new one."""


class AgentRejectedError(KvcastError):
    """The agent does not let this process in; the message says why."""


class BusyError(KvcastError):
    """A bound was met: requests in flight, handles, or this client's share of the arena. Release
    blocks, or try again later."""

    status = local.BUSY


class NoRoomError(KvcastError):
    """The arena has no room: all that could be evicted is pinned, or the block is too large."""

    status = local.NO_ROOM


class QuotaError(KvcastError):
    """The namespace's quota has no room."""

    status = local.QUOTA


class UnknownNamespaceError(KvcastError):
    """The agent's map has no such namespace. Ask for it by `namespace(...)` first."""

    status = local.UNKNOWN_NAMESPACE


class ForbiddenError(KvcastError):
    """The namespace is not this node's to use."""

    status = local.FORBIDDEN


class UnavailableError(KvcastError):
    """The agent has never reached its controller, or no home of a block took the put."""

    status = local.UNAVAILABLE


class InvalidRequestError(KvcastError):
    """The request names something that does not exist, or contradicts itself."""

    status = local.INVALID


class PutError(KvcastError):
    """Some blocks of a put were not taken; the others were. `failed` maps their keys to the
    status of each (a status of `kvcast.protocol.messages.local`)."""

    def __init__(self, failed: dict[bytes, str]) -> None:
        self.failed = failed
        statuses = ", ".join(sorted(set(failed.values())))
        super().__init__(f"{len(failed)} blocks were not put: {statuses}")


class ReleasedError(KvcastError):
    """The block was released; its bytes may be another block's by now."""


ERROR_BY_STATUS: Final[dict[str, type[KvcastError]]] = {
    error.status: error
    for error in (
        BusyError,
        NoRoomError,
        QuotaError,
        UnknownNamespaceError,
        ForbiddenError,
        UnavailableError,
        InvalidRequestError,
    )
}
