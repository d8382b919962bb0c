"""Requests: the questions that the controller has put to agents and that are still open.

Owns: request numbers, deadlines, and the bound on how many may be open. Must not know: what the
answers mean; the pool matches them to what it asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from kvcast.protocol.messages.wire import BlockId

Outgoing = list[tuple[str, msgspec.Struct]]
"""(node id, message): what is to be said to agents."""
MAX_OPEN = 128
"""Beyond it a question is not asked now; the tick that wanted it will want it again."""
DESCRIBE_BATCH = 64
"""Blocks a Describe asks about; also the most candidates that `tiers` looks at in a tick."""


@dataclass(frozen=True)
class Request:
    """A question to a node: which of `blocks` does it hold? Or, where there is an `attempt`
    (counted from 0): will it keep this one?"""

    number: int
    node_id: str
    blocks: tuple[BlockId, ...]
    deadline: float
    attempt: int | None


class OpenRequests:
    """Open questions by number; numbers never repeat, 0 is none's."""

    def __init__(self, first: int = 1) -> None:
        """`first`: the number of the first question; who asks beside others counts elsewhere."""
        self._open: dict[int, Request] = {}
        self._last = first - 1

    def __len__(self) -> int:
        return len(self._open)

    def ask(
        self,
        node_id: str,
        blocks: Iterable[BlockId],
        deadline: float,
        attempt: int | None = None,
    ) -> Request | None:
        """A new question, or None at the bound."""
        if len(self._open) >= MAX_OPEN:
            return None
        self._last += 1
        request = Request(self._last, node_id, tuple(blocks), deadline, attempt)
        self._open[request.number] = request
        return request

    def answered(self, number: int, node_id: str) -> Request | None:
        """The question that this node answers; None if it was put to another, or is closed."""
        request = self._open.get(number)
        if request is None or request.node_id != node_id:
            return None
        return self._open.pop(number)

    def open(self, number: int) -> Request:
        """An open question."""
        return self._open[number]

    def expired(self, now: float) -> list[Request]:
        """Close and return the questions that were not answered in time."""
        late = [r for r in self._open.values() if now >= r.deadline]
        for request in late:
            del self._open[request.number]
        return late

    def asked_about(self) -> set[BlockId]:
        """Blocks that a description or a promise is awaited for."""
        return {block for request in self._open.values() for block in request.blocks}

    def next_deadline(self) -> float | None:
        return min((r.deadline for r in self._open.values()), default=None)
