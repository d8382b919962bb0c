"""Answers by RDMA: what this node writes for all who wait, as a home.

Owns: that a block stays while the card reads it, and that WRITTEN follows the last chunk when the
card has sent it. Must not know: verbs, which answer goes out next (the responder says), or who
waits (the switch knows).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvcast.protocol.messages.roce import Place, place_of
from kvcast.protocol.messages.wire import FLAG_WRITE, OP_WRITTEN, BlockId, Frame, segment_index
from kvcast.protocol.responder import Answer, HeldBlock


class WriteCard(Protocol):
    """A queue pair whose peer is whoever waits."""

    @property
    def full(self) -> bool:
        """Whether it has as much to send as it should have."""

    def write(
        self, place: Place, segment: memoryview, chunks: int, done: Callable[[bool], None]
    ) -> None:
        """Send `chunks`, a bitmap, of a segment; `done` is called once, later, with whether they
        were sent: until then the card reads from `segment`."""


@dataclass(slots=True)
class WritingCounters:
    """Totals since the agent began."""

    chunks: int = 0
    """Chunks that were sent, once for all who wait."""
    segments: int = 0
    """Answers that were sent to their end."""
    failed: int = 0
    """Answers, or parts of them, that the card did not send; their readers ask again."""


class Writing:
    """See the module's description. `lookup`: the block, held, as the responder has it."""

    def __init__(self, lookup: Callable[[BlockId], HeldBlock | None]) -> None:
        self.card: WriteCard | None = None
        self.counters = WritingCounters()
        self._lookup = lookup
        self._written: deque[tuple[int, Frame]] = deque()

    @property
    def full(self) -> bool:
        """Whether nothing more should be asked of the responder now."""
        return self.card is not None and self.card.full

    def write(self, reader: int, answer: Answer) -> None:
        """Send an answer, or a part of one."""
        frame = answer.frame
        held = self._lookup(frame.block)
        if self.card is None or held is None or held.digest != frame.digest:
            if held is not None:
                held.release()
            self.counters.failed += 1
            return
        start = answer.chunking.start_of(segment_index(frame.segment))
        segment = held.data[start : start + len(answer.segment)]
        chunks, last = answer.chunks, answer.last

        def done(sent: bool) -> None:
            segment.release()
            held.release()
            if not sent:
                self.counters.failed += 1
                return
            self.counters.chunks += chunks.bit_count()
            if last:
                self.counters.segments += 1
                self._written.append((reader, _written(frame)))

        place = place_of(frame.namespace, frame.key, frame.segment)
        self.card.write(place, segment, chunks, done)

    def take_frames(self) -> list[tuple[int, Frame]]:
        """The ends of answers that have been sent, each with the node it is addressed to."""
        frames = list(self._written)
        self._written.clear()
        return frames


def _written(frame: Frame) -> Frame:
    return Frame(
        OP_WRITTEN,
        frame.namespace,
        frame.key,
        frame.segment,
        FLAG_WRITE,
        frame.group,
        frame.digest,
        frame.size,
        tag=frame.tag,
    )
