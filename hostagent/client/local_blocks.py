"""What a client finds and pins by itself: the agent's index, and this client's region.

Owns: looking blocks up, pins and their bound, and what is done where the agent writes at the same
time. Must not know: sockets, or what becomes of a block that is not found here (`conversation`
asks the agent for it). The agent's half is `kvcast.hostagent.core.shared_index`, the layout
`kvcast.protocol.messages.shared`.

To pin: read the slot's generation, then its fields; write the cell; read the generation again.
Where it is still the same, the agent will see the pin before it takes the bytes for anything else,
and the fields are of one copy. Where it is not, the pin is taken back and all begins again, some
times; then the agent is asked.

Pins are taken by one thread at a time. They are given back by any, also by a garbage collector in
the middle of taking one: that clears the cell, and leaves the books to whoever takes the next.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvcast.hostagent.client.errors import AgentGoneError
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.shared import ENTRY_BYTES, FIELDS, WORD_BYTES
from kvcast.protocol.messages.wire import KEY_BYTES

_TRIES: Final = 3
_LEAST_FOR_NUMPY: Final = 24
_MOST_WITHOUT_NUMPY: Final = 64
"""Keys of a longer question take a plain loop more time (1.5 us each) than to ask the agent."""
_WORD: Final = (1 << 64) - 1
_NAMESPACE_WORDS: Final = shared.NAMESPACES_OFFSET // WORD_BYTES


class Found(NamedTuple):
    """A copy that is pinned: by which cell of the region, and where its bytes lie in the arena."""

    pin: int
    offset: int
    size_bytes: int
    reserved_bytes: int
    digest: int


_Place = tuple[int, int, int, int, int, int]
"""An entry, as it was read: the word of its generation, its cell, offset, size in bytes, bytes
that it takes of the arena, and digest."""


class LocalBlocks:
    """`raw`: the index, of which slices are bytes; `words`: the same, and `region` this client's
    region, by words. A client may pin `max_bytes` of an arena of `arena_bytes`. `map_shared` makes
    one. AgentGoneError where there is no index that we can read."""

    def __init__(
        self, raw: Any, words: Any, region: Any, *, arena_bytes: int, max_bytes: int
    ) -> None:
        header = shared.HEADER.unpack(bytes(raw[: shared.HEADER.size]))
        magic, layout, self._incarnation, index_bytes, of_arena_bytes, buckets, *_ = header
        sizes = (index_bytes, of_arena_bytes)
        if (
            (magic, layout) != (shared.INDEX_MAGIC, shared.INDEX_LAYOUT)
            or not 2 <= buckets <= shared.MAX_SLOTS // shared.SLOTS_A_BUCKET
            or buckets & (buckets - 1)
            or sizes != (shared.index_bytes(buckets), arena_bytes)
            or len(raw) != index_bytes
        ):
            raise AgentGoneError("the agent's index is not understood")
        self.given_up = False
        """Set where the region is not ours any more: closed, or our parent's."""
        self.table: Any = None
        """The index as `_Table`, where there is numpy."""
        self._raw = raw
        self._words = words
        self._region = region
        self._bits = buckets.bit_length() - 1
        self._entries = shared.entries_offset(buckets)
        self._arena_bytes = arena_bytes
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._hits = 0
        self._cells_used = 0
        self._free = list(range(shared.PIN_CELLS - 1, -1, -1))
        self._released: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._told: dict[int, int] = {}

    def told(self, namespace: int, meaning: int) -> None:
        """The agent said what a number means: by that alone it is looked up from now on."""
        self._told[namespace] = meaning

    def meaning(self, namespace: int) -> int | None:
        """What the agent said that a number means, 0 where it said nothing; None where it cannot
        be looked up. Whether it may be, only the index says."""
        if self.given_up or not 0 <= namespace < shared.NAMESPACES:
            return None
        return self._told.get(namespace, 0)

    def resumed(self) -> None:
        """Another agent has taken the index over, and knows our region."""
        self._incarnation = self._words[shared.INCARNATION_WORD]

    # --- pins -----------------------------------------------------------------------------------

    def take(self, namespace: int, keys: Sequence[bytes]) -> list[Found | None]:
        """Pin those of these blocks that are here, each to be given to `release`; None for the
        others, for which the agent is to be asked."""
        found: list[Found | None] = []
        with self._lock:
            try:
                if self._readable(namespace):
                    self._settle()
                    table = self.table
                    if table is not None and len(keys) >= _LEAST_FOR_NUMPY:
                        # Of most blocks of a long question both buckets say that they are not here.
                        found += [None] * len(keys)
                        for at in table.may_be_there(namespace, keys):
                            found[at] = self._take(namespace, keys[at])
                    else:
                        for key in keys:
                            found.append(self._take(namespace, key))
                    if not any(found):
                        return found
                    # What it means, and whether we are heard, may have changed meanwhile.
                    if self._readable(namespace):
                        self._tell(found)
                        return found
            except ValueError:
                if not self.given_up:  # closed by another thread in this moment
                    raise
            except BaseException:
                self._undo(found)
                raise
            self._undo(found)
        return [None] * len(keys)

    def release(self, pin: int, reserved_bytes: int) -> None:
        """Undo one pin. From any thread, and never raises."""
        if not self.given_up:
            try:
                self._region[shared.CELLS_WORD + pin] = 0
            except ValueError:
                return  # closed in this moment
            self._released.append((pin, reserved_bytes))

    def dropped(self, may_release: bool, pin: int, reserved_bytes: int) -> bool:
        """A pinned copy was dropped: undo the pin if that may be done. From any thread, and never
        raises; whether it was pinned until then."""
        if self.given_up:
            return False
        if may_release:
            self.release(pin, reserved_bytes)
        return True

    def _settle(self) -> None:
        """Do the books of what was released."""
        while self._released:
            pin, reserved_bytes = self._released.popleft()
            self._held_bytes -= reserved_bytes
            self._free.append(pin)

    def _undo(self, found: list[Found | None]) -> None:
        for one in found:
            if one is not None:
                self.release(one.pin, one.reserved_bytes)

    def _take(self, namespace: int, key: bytes) -> Found | None:
        for _ in range(_TRIES):
            place = self._find(namespace, key)
            if place is None or not self._free:
                return None
            word, cell, offset, size_bytes, reserved_bytes, digest = place
            if self._held_bytes + reserved_bytes > self._max_bytes:
                return None
            pin = self._free.pop()
            if pin >= self._cells_used:
                self._cells_used = pin + 1
                self._region[shared.CELLS_USED_WORD] = pin + 1
            self._region[shared.CELLS_WORD + pin] = cell
            if self._words[word] == cell >> shared.SLOT_BITS:
                self._held_bytes += reserved_bytes
                return Found(pin, offset, size_bytes, reserved_bytes, digest)
            self._region[shared.CELLS_WORD + pin] = 0
            self._free.append(pin)
        return None

    def _tell(self, found: list[Found | None]) -> None:
        """Let the agent know what was of use, at its leisure."""
        region, hits = self._region, self._hits
        for one in found:
            if one is not None:
                cell = region[shared.CELLS_WORD + one.pin]
                region[shared.RING_WORD + hits % shared.RING_CELLS] = cell
                hits += 1
        if hits != self._hits:
            self._hits = hits
            region[shared.HITS_WORD] = hits

    # --- lookups --------------------------------------------------------------------------------

    def prefix(self, namespace: int, chain: bytes) -> int:
        """How many blocks of a chain (keys in a row), counted from the first without a gap, are
        here now; 0 also where it is quicker to ask the agent."""
        try:
            return self._prefix(namespace, chain)
        except ValueError:
            if not self.given_up:  # closed by another thread in this moment
                raise
            return 0

    def _prefix(self, namespace: int, chain: bytes) -> int:
        def is_here(position: int) -> bool:
            key = chain[position * KEY_BYTES : (position + 1) * KEY_BYTES]
            return self._find(namespace, key) is not None

        if not chain or not self._readable(namespace) or not is_here(0):
            return 0
        begin, count = 0, len(chain) // KEY_BYTES
        table = self.table
        if table is not None and count >= _LEAST_FOR_NUMPY:
            # What lies in its second bucket, or is being changed, is looked up alone.
            unsure = table.not_found(namespace, chain)
            begin = next((position for position in unsure if not is_here(position)), count)
        elif count <= _MOST_WITHOUT_NUMPY:
            while begin < count and is_here(begin):
                begin += 1
        return begin if self._readable(namespace) else 0

    def _readable(self, namespace: int) -> bool:
        """Whether a namespace may be looked up and means what we were told, and the agent knows
        us."""
        if self.given_up or not 0 <= namespace < shared.NAMESPACES:
            return False
        words = self._words
        at = _NAMESPACE_WORDS + 2 * namespace
        meaning = self._told.get(namespace)
        return bool(
            words[at + 1] == 1
            and (meaning is None or words[at] == meaning)
            and words[shared.INCARNATION_WORD] == self._incarnation
            and self._region[shared.CLOSED_WORD] == 0
        )

    def _find(self, namespace: int, key: bytes) -> _Place | None:
        high, low = shared.KEY_HALVES.unpack(key)
        tag = key[WORD_BYTES:] if low else shared.tag_of(low).to_bytes(WORD_BYTES, "little")
        raw = self._raw
        for bucket in shared.two_buckets(namespace, high, low, self._bits):
            start = shared.TAGS_OFFSET + bucket * shared.BUCKET_BYTES
            tags = bytes(raw[start : start + shared.BUCKET_BYTES])
            at = tags.find(tag)
            while at >= 0:
                if at % WORD_BYTES == 0:
                    slot = bucket * shared.SLOTS_A_BUCKET + at // WORD_BYTES
                    place = self._read(slot, namespace, high, low)
                    if place is not None:
                        return place
                at = tags.find(tag, at + 1)
        return None

    def _read(self, slot: int, namespace: int, high: int, low: int) -> _Place | None:
        """The entry of a slot, if it is of this block and lies in the arena."""
        start = self._entries + slot * ENTRY_BYTES
        word = start // WORD_BYTES
        generation = self._words[word]
        fields = bytes(self._raw[start + WORD_BYTES : start + ENTRY_BYTES])
        high_, low_, offset, digest, _, size_bytes, namespace_, state, reserved_bytes = (
            FIELDS.unpack(fields)
        )
        if (
            generation % 2
            or generation > shared.LAST_GENERATION
            or (high_, low_, namespace_, state) != (high, low, namespace, shared.HELD)
            or self._words[word] != generation
            or not 0 < size_bytes <= self._arena_bytes
            or offset + size_bytes > self._arena_bytes
        ):
            return None
        cell = shared.cell_of(slot, generation)
        return word, cell, offset, size_bytes, reserved_bytes, digest

    def close(self) -> None:
        """Unmap what is ours; pins are the agent's to undo."""
        self.given_up = True
        self.table = None
        self._raw = b""
        for memory in (self._words, self._region):
            memory.release()


class _Table:
    """The index in arrays, to look many blocks up at once."""

    def __init__(self, numpy: Any, raw: mmap.mmap, bits: int) -> None:
        self._numpy = numpy
        words = numpy.frombuffer(raw, numpy.uint64)
        buckets = 1 << bits
        tags = shared.TAGS_OFFSET // WORD_BYTES
        entries = shared.entries_offset(buckets) // WORD_BYTES
        self._tags = words[tags:entries].reshape(buckets, shared.SLOTS_A_BUCKET)
        self._entries = words[entries:].reshape(-1, ENTRY_BYTES // WORD_BYTES)
        self._shift = numpy.uint64(64 - bits)
        self._again = numpy.uint64(shared.MULTIPLIERS[1])

    def may_be_there(self, namespace: int, keys: Sequence[bytes]) -> list[int]:
        """The positions of those that have their tag in one of their buckets."""
        numpy = self._numpy
        _, _, wanted, mixed = self._parts_of(namespace, b"".join(keys))
        buckets = numpy.array((mixed, mixed * self._again)) >> self._shift
        there = self._tags[buckets.astype(numpy.intp)] == wanted[:, None]
        return list(there.any(axis=(0, 2)).nonzero()[0].tolist()) if there.any() else []

    def _parts_of(self, namespace: int, chain: bytes) -> tuple[Any, Any, Any, Any]:
        """Of keys in a row: both halves, tags, and hashes (as in `shared.two_buckets`)."""
        numpy = self._numpy
        spread, _, by_low, by_namespace = shared.MULTIPLIERS
        halves = numpy.frombuffer(chain, numpy.uint64).reshape(-1, 2)
        high, low = halves[:, 0], halves[:, 1]
        of_namespace = numpy.uint64(namespace * by_namespace & _WORD)
        mixed = (high + low * numpy.uint64(by_low) + of_namespace) * numpy.uint64(spread)
        return high, low, low + (low == 0) * numpy.uint64(shared.tag_of(0)), mixed

    def not_found(self, namespace: int, chain: bytes) -> list[int]:
        """The positions of those that are not, or not for certain, in their first buckets."""
        numpy = self._numpy
        high, low, wanted, mixed = self._parts_of(namespace, chain)
        buckets = (mixed >> self._shift).astype(numpy.intp)
        columns = (self._tags[buckets] == wanted[:, None]).argmax(axis=1)
        slots = buckets * shared.SLOTS_A_BUCKET + columns
        generations = self._entries[slots, 0]
        entries = self._entries[slots]
        # Of the sixth word: size, namespace and state, from below.
        kind = numpy.uint64(namespace | shared.HELD << 16)
        found = (
            (entries[:, 1] == high)
            & (entries[:, 2] == low)
            & (entries[:, 6] >> numpy.uint64(32) == kind)
            & (generations & numpy.uint64(1) == 0)
            & (generations == self._entries[slots, 0])
        )
        return [] if found.all() else list(numpy.flatnonzero(~found).tolist())


def map_shared(
    index_fd: int, region_fd: int, *, index_bytes: int, arena_bytes: int, max_bytes: int
) -> LocalBlocks:
    """Map what the agent has passed; the descriptors are closed. AgentGoneError where it is not
    what the agent says."""
    try:
        if (
            os.fstat(index_fd).st_size != index_bytes
            or os.fstat(region_fd).st_size != shared.REGION_BYTES
        ):
            raise AgentGoneError("the agent's index or region is not of the size that it says")
        raw = mmap.mmap(index_fd, index_bytes, prot=mmap.PROT_READ)
        region = memoryview(mmap.mmap(region_fd, shared.REGION_BYTES)).cast("Q")
    finally:
        os.close(index_fd)
        os.close(region_fd)
    blocks = LocalBlocks(
        raw, memoryview(raw).cast("Q"), region, arena_bytes=arena_bytes, max_bytes=max_bytes
    )
    # Imported when somebody connects, so that who only imports the library does not wait for it.
    with contextlib.suppress(ImportError):
        blocks.table = _Table(importlib.import_module("numpy"), raw, blocks._bits)
    return blocks
