"""The requester: fetches blocks from their homes. Start at `requester`, which has the map."""

from kvcast.protocol.impossible import ImpossibleEventError
from kvcast.protocol.requester.events import (
    Allocate,
    BulkCopy,
    DuplicateFetchError,
    Event,
    Fetched,
    FetchReport,
    Missed,
    MissReason,
    OfferReceived,
    ProbeEnded,
    ReadFrames,
    RequesterConfig,
    RequesterCounters,
    Reservation,
    TryBulk,
    WrongResident,
)
from kvcast.protocol.requester.requester import Requester
from kvcast.protocol.requester.story import Story

__all__ = [
    "Allocate",
    "BulkCopy",
    "DuplicateFetchError",
    "Event",
    "FetchReport",
    "Fetched",
    "ImpossibleEventError",
    "MissReason",
    "Missed",
    "OfferReceived",
    "ProbeEnded",
    "ReadFrames",
    "Requester",
    "RequesterConfig",
    "RequesterCounters",
    "Reservation",
    "Story",
    "TryBulk",
    "WrongResident",
]
