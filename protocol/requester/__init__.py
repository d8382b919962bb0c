"""The requester: fetches blocks from their homes."""

from kvcast.protocol.requester.requester import (
    Allocate,
    BulkCopy,
    Discard,
    DuplicateFetchError,
    Event,
    Fetched,
    FetchReport,
    Missed,
    MissReason,
    OfferReceived,
    Requester,
    RequesterConfig,
    RequesterCounters,
    TryBulk,
)

__all__ = [
    "Allocate",
    "BulkCopy",
    "Discard",
    "DuplicateFetchError",
    "Event",
    "FetchReport",
    "Fetched",
    "MissReason",
    "Missed",
    "OfferReceived",
    "Requester",
    "RequesterConfig",
    "RequesterCounters",
    "TryBulk",
]
