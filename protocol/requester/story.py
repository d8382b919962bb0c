"""What the requester's state tables share: the *story*, a record of what happened to one fetch,
which errors and traces show.

Owns: that the record is bounded, cheap to write (a tuple), and put into words only when read. Must
not know: any state or event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final, TypeAlias

from kvcast.protocol.messages.wire import BlockId

STORY_ENTRIES: Final = 64
"""How many of the last things that happened to a fetch are remembered."""


_Entry: TypeAlias = tuple[float, str, int, IntEnum, IntEnum]
"""When; what (a segment, a home), and its number; and the event since which it is in that state."""


class Story:
    """What happened to one fetch, the last `STORY_ENTRIES` things of it."""

    __slots__ = ("_entries", "block", "fetch_id", "outcome", "started_at", "tell")

    def __init__(self, fetch_id: int, block: BlockId, started_at: float) -> None:
        self.fetch_id = fetch_id
        self.block = block
        self.started_at = started_at
        self.outcome = "in flight"
        self._entries: deque[_Entry] = deque(maxlen=STORY_ENTRIES)
        self.tell: Callable[[_Entry], None] = self._entries.append

    def __len__(self) -> int:
        return len(self._entries)

    def steps(self) -> Iterator[tuple[float, str]]:
        """(when, what happened) of each."""
        for at, what, number, event, state in self._entries:
            yield at, f"{what} {number}: {event.name} -> {state.name}"

    def __str__(self) -> str:
        block = f"{self.block.namespace}/{self.block.key.hex()}"
        lines = [f"fetch {self.fetch_id} of {block}: {self.outcome}"]
        for at, step in self.steps():
            lines.append(f"{(at - self.started_at) * 1e3:+12.3f} ms  {step}")
        return "\n".join(lines)
