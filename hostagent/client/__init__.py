"""The client library: how an engine on a node talks to the node's agent."""

from kvcast.hostagent.client.client import (
    AgentGoneError,
    AgentRejectedError,
    AsyncClient,
    Block,
    BusyError,
    Client,
    ForbiddenError,
    InvalidRequestError,
    KvcastError,
    NoRoomError,
    Outcome,
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
    "UnavailableError",
    "UnknownNamespaceError",
]
