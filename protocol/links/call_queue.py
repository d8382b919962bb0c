"""Calls to one node that wait for their turn, whichever way they are made.

Owns: whose call is next, by the weights of namespaces (`fair_queue`); what a call costs; which of
those that wait go together in one request. Must not know: connections, or how a call is made.

Calls go together only if they are alike, and while other namespaces' calls wait, in turns of up to
`NAMESPACE_TURN_BYTES`. A call that turns out not to be worth making when its turn comes ends then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from kvcast.protocol.fair_queue import FairQueue
from kvcast.protocol.links.bulk import (
    EVICTED,
    UNREACHABLE,
    UNWANTED,
    BulkCall,
    GetCall,
    PutCall,
)
from kvcast.protocol.messages.bulk import MAX_BULK_BYTES

C = TypeVar("C", bound=BulkCall)

MERGED_WITHIN_S: Final = 1.0
"""Calls go together only if their deadlines are no further apart, since they end together if the
node does not answer."""
NAMESPACE_TURN_BYTES: Final = 4 << 20
"""Of one namespace's calls in one request, at most, while another's wait."""
PRESUMED_BYTES: Final = 1 << 16
"""What a get counts for until it is known what it brings; and what a call counts for that moves no
block."""


def namespace_of(call: BulkCall) -> int:
    """Whose call it is."""
    match call:
        case PutCall():
            return call.copy.block.namespace
        case GetCall():
            return call.block.namespace
    return call.namespace


class CallQueue(FairQueue[C]):
    """See the module's text. `weight_of` a namespace."""

    def __init__(self, weight_of: Callable[[int], float]) -> None:
        super().__init__(namespace_of, _bytes_of, weight_of)

    def take_alike(
        self, now: float, namespace: int, at_most: int, over: Callable[[C, str], None]
    ) -> list[C]:
        """The first calls of a namespace, `at_most` so many, of which one request can make all.
        `over` is told of those that are not worth making, and the outcome."""
        calls: list[C] = []
        size_bytes = 0
        most_bytes = NAMESPACE_TURN_BYTES if self.is_contended else MAX_BULK_BYTES
        while (call := self.head(namespace)) is not None and len(calls) < at_most:
            if calls and not _alike(calls[0], call):
                break
            if isinstance(call, PutCall) or self.is_contended:
                size_bytes += _bytes_of(call)
                if calls and size_bytes > most_bytes:
                    break
            self.take(namespace)
            if isinstance(call, PutCall) and not call.begin():
                over(call, EVICTED)
            elif isinstance(call, GetCall) and not call.wanted():
                over(call, UNWANTED)
            elif call.deadline <= now:
                over(call, UNREACHABLE)
            else:
                calls.append(call)
        return calls

    def brings(self, call: GetCall, size_bytes: int) -> None:
        """A get that was taken brings so many bytes."""
        self.charge(call.block.namespace, size_bytes - PRESUMED_BYTES)


def _bytes_of(call: BulkCall) -> int:
    return call.copy.size_bytes if isinstance(call, PutCall) else PRESUMED_BYTES


def _alike(first: BulkCall, other: BulkCall) -> bool:
    """Whether one request can make both calls."""
    if abs(first.deadline - other.deadline) > MERGED_WITHIN_S:
        return False
    if isinstance(first, GetCall):
        return (
            isinstance(other, GetCall)
            and first.block.namespace == other.block.namespace
            and first.may_read == other.may_read
        )
    return (
        isinstance(first, PutCall)
        and isinstance(other, PutCall)
        and first.copy.block.namespace == other.copy.block.namespace
        and (first.epoch, first.meaning, first.at_once, first.spare)
        == (other.epoch, other.meaning, other.at_once, other.spare)
    )
