"""Traces of gets: which of them are told, and what is told of each.

Owns: the choice (a share of all, and all that were slow), and a bounded account of one batch of
gets: what became of each key, and, for those that were fetched, step by step how (the requester's
stories). Must not know: where traces go. A get that a client makes in the shared index never
reaches the agent, and so is in no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from kvcast.hostagent.core.fetches import GetBatch
from kvcast.protocol.messages.local import LOCAL_TIER
from kvcast.protocol.messages.wire import BlockId
from kvcast.protocol.requester import Story

MOST_KEYS: Final = 64
"""Keys of a batch that a trace tells of, the slowest tiers first; the others are counted."""


@dataclass(frozen=True, slots=True)
class KeyTrace:
    """What became of one key; times are the core's, in seconds."""

    block: BlockId
    status: str
    reason: str
    tier: str
    """"" where it did not come."""
    size_bytes: int
    started_at: float
    ended_at: float
    steps: tuple[tuple[float, str], ...] = ()
    """(time, what happened) of a fetch by READs, its last ones."""


@dataclass(frozen=True, slots=True)
class GetTrace:
    """One batch of gets."""

    namespace: int
    started_at: float
    ended_at: float
    keys: int
    hits: dict[str, int]
    """Keys by the tier that they came from; "" for those that did not come."""
    told: tuple[KeyTrace, ...]
    """At most `MOST_KEYS`."""


class Traces:
    """Decides which batches are told, and tells `sink` of them."""

    def __init__(
        self,
        share: float,
        slow_s: float,
        rng: Random,
        stories: Callable[[], Iterable[Story]],
        sink: Callable[[GetTrace], None],
    ) -> None:
        """`share`: of all batches, 0 to 1; `slow_s`: those that took longer are told anyhow."""
        self._share = share
        self._slow_s = slow_s
        self._rng = rng
        self._stories = stories
        self._sink = sink

    def ended(self, now: float, batch: GetBatch) -> None:
        """A batch has ended."""
        if now - batch.started_at > self._slow_s or self._rng.random() < self._share:
            self._sink(trace_of(now, batch, self._stories()))


def trace_of(now: float, batch: GetBatch, stories: Iterable[Story]) -> GetTrace:
    """The account of a batch that has ended. Of a block's stories the last one counts."""
    by_block = {story.block: story for story in stories}
    hits: dict[str, int] = {}
    keys: list[KeyTrace] = []
    for block, item in zip(batch.blocks, batch.items, strict=True):
        if item is None:
            continue
        hits[item.tier] = hits.get(item.tier, 0) + 1
        size_bytes = 0 if item.copy is None else item.copy.size_bytes
        started_at, ended_at = batch.started_at, batch.started_at
        steps: tuple[tuple[float, str], ...] = ()
        if item.tier != LOCAL_TIER:
            ended_at = now
            story = by_block.get(block)
            if story is not None and story.started_at >= batch.started_at:
                started_at, steps = story.started_at, tuple(story.steps())
                ended_at = steps[-1][0] if steps else now
        keys.append(
            KeyTrace(
                *(block, item.status, item.reason, item.tier, size_bytes),
                *(started_at, ended_at, steps),
            )
        )
    keys.sort(key=lambda key: key.started_at - key.ended_at)
    return GetTrace(
        batch.blocks[0].namespace, batch.started_at, now, len(keys), hits, tuple(keys[:MOST_KEYS])
    )
