"""What an engine says of its blocks: vLLM's KV events, decoded, and put into the router's names.

Owns: both forms of the messages, which batch is the next, and the table from an engine's hashes to
ours. Must not know: sockets, other engines. Follows vLLM's `distributed/kv_events.py`: a message is
topic, sequence number (8 bytes, big-endian, from 0) and a msgpack `KVEventBatch`; replayed batches
come from a ROUTER socket, the last one with number -1. Structs are arrays in older versions and
maps in newer ones; both are taken, and fields that we do not know are ignored. SGLang sends the
same.

An event names blocks by the engine's own hashes, and with `BlockStored` come the parent's and the
token ids. So each engine's table says what each of its hashes is in ours. A block whose parent is
not in the table (its event came before we listened, or was lost) cannot be placed and is counted
as `orphans_total`; that costs hits, and no more.

A hybrid model has several groups of layers, and events for each. Of those that look back over all
of the prompt, the first that is heard of decides; windows hold the same blocks for a shorter time.

A gap in the numbers is filled by a replay if the engine offers one. What cannot be filled is
counted, and what is known is kept: a block that is gone is then believed held until it is
forgotten, which costs a wrong choice; to forget all would cost every hit. A batch whose number was
there before with other bytes is from another process: all that is known of the engine is forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import xxhash
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.routing.core.hashing import ROOT, block_hash
from kvcast.routing.core.router import Place, Router

END_OF_REPLAY: Final = -1
POOL_MEDIUM: Final = "kvcast"
"""What a connector's events call the pool."""
_ENGINE_MEDIA: Final = ("GPU", "")
_REMEMBERED_BATCHES: Final = 4096
"""A batch from so far back that comes again is taken for another process's."""

EngineHash = int | bytes


class EventError(ValueError):
    """A message that is no batch of KV events; says what is wrong."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks in a row behind `parent` (None = the prompt's beginning). `tokens`: of all of them;
    empty where the engine only says that blocks lie in another medium, too. `extra`: one entry a
    block, or none at all."""

    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: Sequence[int]
    block_tokens: int
    medium: str
    extra: Sequence[Sequence[Any] | None]
    group: int | None = None
    windowed: bool = False
    """Of a group of layers that looks back over a window only."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that are gone from a medium."""

    hashes: Sequence[EngineHash]
    medium: str
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks are gone."""


Event = Stored | Removed | Cleared

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""In the order of the array form, behind the name."""


def decode_batch(payload: bytes) -> list[Event]:
    """The events of a batch; EventError if it is none. Kinds that we do not know are left out."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise EventError(f"not msgpack: {error}") from error
    if isinstance(batch, dict):
        events = batch.get("events")
    else:
        events = batch[1] if isinstance(batch, list) and len(batch) > 1 else None
    if not isinstance(events, list):
        raise EventError("a batch without a list of events")
    decoded = (_decoded(event) for event in events)
    return [event for event in decoded if event is not None]


def _decoded(event: object) -> Event | None:
    if isinstance(event, dict):
        kind, fields = event.get("type"), event
    elif isinstance(event, list) and event:
        kind = event[0]
        names = _FIELDS.get(kind, ()) if isinstance(kind, str) else ()
        fields = dict(zip(names, event[1:], strict=False))
    else:
        raise EventError("an event that is neither a map nor an array")
    if not isinstance(kind, str):
        raise EventError("an event without a name")
    if kind not in _FIELDS:
        return None
    if kind == "AllBlocksCleared":
        return Cleared()
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(one, int | bytes) for one in hashes):
        raise EventError(f"{kind}: block_hashes are no list of hashes")
    medium = fields.get("medium") or ""
    if not isinstance(medium, str):
        raise EventError(f"{kind}: the medium is no text")
    group = fields.get("group_idx")
    if not (group is None or isinstance(group, int)):
        raise EventError(f"{kind}: the group is no number")
    if kind == "BlockRemoved":
        return Removed(hashes, medium, group)
    return _stored(hashes, medium, group, fields)


def _stored(
    hashes: list[EngineHash], medium: str, group: int | None, fields: Mapping[str, Any]
) -> Stored:
    parent, tokens = fields.get("parent_block_hash"), fields.get("token_ids") or []
    block_tokens, extra = fields.get("block_size") or 0, fields.get("extra_keys")
    if not (parent is None or isinstance(parent, int | bytes)):
        raise EventError("BlockStored: the parent is no hash")
    if not isinstance(tokens, list) or not isinstance(block_tokens, int):
        raise EventError("BlockStored: no token ids, or no block size")
    if tokens and (block_tokens < 1 or len(tokens) != len(hashes) * block_tokens):
        raise EventError("BlockStored: so many tokens are not so many blocks")
    if extra is None:
        name = fields.get("lora_name")
        extra = [[name] if isinstance(name, str) else None] * len(hashes)
    if not isinstance(extra, list) or len(extra) != len(hashes):
        raise EventError("BlockStored: extra_keys are not one a block")
    if not all(one is None or isinstance(one, list) for one in extra):
        raise EventError("BlockStored: extra keys are no list")
    windowed = fields.get("kv_cache_spec_sliding_window") is not None
    return Stored(hashes, parent, tokens, block_tokens, medium, extra, group, windowed)


class EngineEvents:
    """One engine's stream. `heard` takes its batches, in any order that a replay brings about.

    `pool_keys(ours, theirs)` is told of blocks whose whole hash the engine says (it may send only
    64 bits of it): what the pool's keys are made of.
    """

    def __init__(
        self,
        router: Router,
        engine: str,
        *,
        seed: int = 0,
        max_blocks: int = 1_000_000,
        pool_keys: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self._router = router
        self._engine = engine
        self._seed = seed
        self._max_blocks = max_blocks
        self._pool_keys = pool_keys
        self._next: int | None = None
        self._digests: BoundedMap[int, int] = BoundedMap(_REMEMBERED_BATCHES)
        self._ours: dict[EngineHash, int] = {}
        self._media: dict[EngineHash, set[str]] = {}
        self._group: int | None = None
        """The group of layers whose blocks count."""
        self.block_tokens: int | None = None
        """Tokens of the engine's blocks, once it has said so."""
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Blocks in the table."""
        return len(self._ours)

    @property
    def next_sequence(self) -> int:
        """From which batch on a replay is wanted."""
        return self._next or 0

    def heard(self, sequence: int, payload: bytes) -> Literal["taken", "gap", "old"]:
        """A batch came. "gap": it was not taken, since earlier ones are missing: replay from
        `next_sequence`, or say `skip_to`. "old": it was known. EventError: it is no batch, and
        counts as taken."""
        digest = xxhash.xxh3_64_intdigest(payload)
        if sequence < self.next_sequence:
            if self._digests.get(sequence) == digest:
                self.counts["old_batches_total"] += 1
                return "old"
            self.restarted()
        if sequence > self.next_sequence:
            return "gap"
        self._digests[sequence] = digest
        self._next = sequence + 1
        self.counts["batches_total"] += 1
        try:
            events = decode_batch(payload)
        except EventError:
            self.counts["malformed_total"] += 1
            raise
        for event in events:
            self._apply(event)
        return "taken"

    def skip_to(self, sequence: int) -> None:
        """What is missing before this batch will not come."""
        if sequence > self.next_sequence:
            self.counts["batches_lost_total"] += sequence - self.next_sequence
        self._next = sequence

    def restarted(self) -> None:
        """The engine is another process, or may be one: nothing that is known of it holds."""
        self._next = None
        self._group = None
        self._digests.clear()
        self._clear()
        self.counts["restarts_total"] += 1

    def _clear(self) -> None:
        self._ours.clear()
        self._media.clear()
        self._router.cleared(self._engine)

    def _apply(self, event: Event) -> None:
        if isinstance(event, Stored):
            if event.windowed or not self._counts(event.group):
                self.counts["other_groups_total"] += len(event.hashes)
                return
            self.counts["stored_total"] += len(event.hashes)
            self._place(event.medium, self._named(event))
        elif isinstance(event, Removed):
            if event.group in (None, self._group):
                self.counts["removed_total"] += len(event.hashes)
                self._remove(event)
        else:
            self.counts["cleared_total"] += 1
            self._clear()

    def _counts(self, group: int | None) -> bool:
        """Whether blocks of this group count; the first one's do."""
        if group is not None and self._group is None:
            self._group = group
        return group in (None, self._group)

    def _named(self, event: Stored) -> list[int]:
        """Our hashes of what was stored, as far as they can be known."""
        if not event.tokens:
            known = [one for one in event.hashes if one in self._ours]
            self.counts["orphans_total"] += len(event.hashes) - len(known)
            return self._held(known, event.medium)
        if self.block_tokens is None:
            self.block_tokens = event.block_tokens
        if event.block_tokens != self.block_tokens:
            self.counts["other_block_sizes_total"] += len(event.hashes)
            return []
        parent = ROOT if event.parent is None else self._ours.get(event.parent)
        if parent is None:
            self.counts["orphans_total"] += len(event.hashes)
            return []
        taken: list[EngineHash] = []
        for place, theirs in enumerate(event.hashes):
            if theirs not in self._ours and len(self._ours) >= self._max_blocks:
                self.counts["beyond_bound_total"] += len(event.hashes) - place
                break
            first = place * event.block_tokens
            tokens = event.tokens[first : first + event.block_tokens]
            try:
                parent = block_hash(parent, tokens, event.extra[place], seed=self._seed)
            except (ValueError, TypeError):
                self.counts["malformed_total"] += 1
                break
            self._ours[theirs] = parent
            if self._pool_keys is not None and isinstance(theirs, bytes):
                self._pool_keys(parent, theirs)
            taken.append(theirs)
        return self._held(taken, event.medium)

    def _held(self, theirs: Iterable[EngineHash], medium: str) -> list[int]:
        found = []
        for one in theirs:
            self._media.setdefault(one, set()).add(medium)
            found.append(self._ours[one])
        return found

    def _place(self, medium: str, ours: list[int]) -> None:
        if medium.lower() == POOL_MEDIUM:
            self._router.pooled(ours)
        else:
            self._router.stored(self._engine, ours, _place_of(medium))

    def _remove(self, event: Removed) -> None:
        ours = [self._ours[one] for one in event.hashes if one in self._ours]
        for one in event.hashes:
            media = self._media.get(one)
            if media is None:
                self.counts["orphans_total"] += 1
                continue
            media.discard(event.medium)
            if not media:
                del self._media[one], self._ours[one]
        if event.medium.lower() == POOL_MEDIUM:
            self._router.unpooled(ours)
        else:
            self._router.removed(self._engine, ours, _place_of(event.medium))


def _place_of(medium: str) -> Place:
    return Place.ENGINE if medium.upper() in _ENGINE_MEDIA else Place.HOST
