"""The index beside the arena: what it holds, in shared memory, for clients and for the next agent.

Owns: which slot names which copy, and the order of the stores into it. Must not know: files,
clients, pins or eviction. It is written by one agent; whoever reads at the same time sees a slot's
generation odd, or changed, where what it read may be of two entries
(`kvcast.protocol.messages.shared` has the layout).

What is taken into the index is only what is committed, with its digest; so it tells a later agent,
too, what the arena holds, and each namespace's number beside what that meant. A block whose two
buckets are full is left out, and costs its readers a message.

A later agent believes of it what proves itself (`entry`, `tombstone`): a tag, an even generation,
and the check of all that the entry says, by slot and generation. So an entry at which its writer
died, or which a failing memory has changed, is found out, and its slot is used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import xxhash
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.shared import ENTRY_BYTES, FIELDS, SLOTS_A_BUCKET, WORD_BYTES
from kvcast.protocol.messages.wire import BlockId

BYTES_A_SLOT = 8192
"""The index has a slot for so much of the arena: 0.9 % of it, and half full at blocks of 16 KiB."""


class Entry(NamedTuple):
    """What a slot says of a copy. `order`: when it was committed, among the others."""

    cell: int
    block: BlockId
    offset: int
    size_bytes: int
    reserved_bytes: int
    digest: int
    order: int

    @property
    def slot(self) -> int:
        """Where it stands."""
        return self.slot_of(self.cell)

    @staticmethod
    def slot_of(cell: int) -> int:
        """The slot of a cell."""
        return shared.slot_of(cell)[0]


def buckets_for(arena_bytes: int) -> int:
    """How many buckets the index of such an arena has."""
    slots = min(arena_bytes // BYTES_A_SLOT, shared.MAX_SLOTS)
    return max(shared.MIN_BUCKETS, 1 << (slots // SLOTS_A_BUCKET - 1).bit_length())


class Index:
    """Writes the index of an arena of `arena_bytes` into `memory`, of `index_bytes(buckets)` zero
    bytes, or as another agent has left it. `incarnation` is not 0, and another one for each agent.
    """

    def __init__(self, memory: memoryview, arena_bytes: int, incarnation: int) -> None:
        buckets = buckets_for(arena_bytes)
        assert len(memory) == shared.index_bytes(buckets)
        self._buckets = buckets
        self._arena_bytes = arena_bytes
        self._bits = buckets.bit_length() - 1
        self.memory = memory
        """All of it, for whoever reads it in this process."""
        self._words = memory.cast("Q")
        self._tags_word = shared.TAGS_OFFSET // WORD_BYTES
        self._entries = shared.entries_offset(buckets)
        self._checks_word = shared.checks_offset(buckets) // WORD_BYTES
        self.commits = 0
        """The last order that was given; whoever takes an index over counts on from its greatest.
        """
        self.slots = buckets * SLOTS_A_BUCKET
        memory[: shared.HEADER.size] = shared.HEADER.pack(
            *(shared.INDEX_MAGIC, shared.INDEX_LAYOUT, incarnation),
            *(len(memory), arena_bytes, buckets, 0, 0),
        )

    def publish(
        self, block: BlockId, offset: int, size_bytes: int, reserved_bytes: int, digest: int
    ) -> int:
        """Enter a copy, which takes `reserved_bytes` of the arena; the cell by which it can be
        pinned, or 0 where there is no slot for it."""
        high, low = shared.KEY_HALVES.unpack(block.key)
        words = self._words
        for bucket in shared.two_buckets(block.namespace, high, low, self._bits):
            first = bucket * SLOTS_A_BUCKET
            at = self._tags_word + first
            for number, tag in enumerate(words[at : at + SLOTS_A_BUCKET].tolist()):
                if tag:
                    continue
                slot = first + number
                generation = words[(self._entries + slot * ENTRY_BYTES) // WORD_BYTES]
                if generation >= shared.LAST_GENERATION:
                    continue
                generation += generation & 1  # whoever wrote here before has died at it
                self.commits += 1
                entry = high, low, offset, digest, self.commits, size_bytes, block.namespace
                fields = FIELDS.pack(*entry, shared.HELD, reserved_bytes)
                self._change(slot, generation, fields)
                words[at + number] = shared.tag_of(low)
                return shared.cell_of(slot, generation + 2)
        return 0

    def withdraw(self, cell: int) -> None:
        """Take a copy out; whoever looks it up or at it again from now on finds it gone, once the
        barrier has passed."""
        slot, generation = shared.slot_of(cell)
        start = self._entries + slot * ENTRY_BYTES
        word = start // WORD_BYTES
        assert self._words[word] == generation, f"slot {slot} has been withdrawn"
        self._words[self._tags_word + slot] = 0
        self._words[word] = generation + 1
        self._words[word + shared.KIND_WORD] &= shared.NOT_HELD
        self._words[word] = generation + 2

    def _change(self, slot: int, generation: int, fields: bytes) -> None:
        """Write an entry, odd while that lasts."""
        start, words = self._entries + slot * ENTRY_BYTES, self._words
        word = start // WORD_BYTES
        words[word] = generation + 1
        self.memory[start + WORD_BYTES : start + ENTRY_BYTES] = fields
        words[self._checks_word + slot] = _check_of(slot, generation + 2, fields)
        words[word] = generation + 2

    # --- what another agent has left --------------------------------------------------------------

    def entry(self, slot: int) -> Entry | None:
        """What a slot with a tag says, if it proves itself."""
        generation = self.generation(slot)
        entry = self._proven(slot, generation, self._fields(slot))
        if entry is None or self._words[self._tags_word + slot] != shared.tag_of(
            shared.KEY_HALVES.unpack(entry.block.key)[1]
        ):
            return None
        return entry

    def tombstone(self, cell: int) -> Entry | None:
        """What a cell's copy was that is withdrawn, or was being withdrawn, if its slot still
        says so."""
        slot, generation = shared.slot_of(cell)
        if not 0 <= slot < self.slots or self.generation(slot) - generation not in (0, 1, 2):
            return None
        fields = bytearray(self._fields(slot))
        kind = memoryview(fields).cast("Q")
        kind[shared.KIND_WORD - 1] |= shared.HELD << shared.STATE_SHIFT
        return self._proven(slot, generation, bytes(fields))

    def slots_in_use(self, first: int, count: int) -> list[int]:
        """Of `count` slots from `first` on, those that have a tag."""
        at = self._tags_word + first
        tags = self._words[at : at + min(count, self.slots - first)].tolist()
        return [first + number for number, tag in enumerate(tags) if tag]

    def find(self, block: BlockId) -> Iterator[int]:
        """The slots that have the tag of a block, and in which it may lie."""
        high, low = shared.KEY_HALVES.unpack(block.key)
        tag = shared.tag_of(low)
        for bucket in shared.two_buckets(block.namespace, high, low, self._bits):
            for slot in self.slots_in_use(bucket * SLOTS_A_BUCKET, SLOTS_A_BUCKET):
                if self._words[self._tags_word + slot] == tag:
                    yield slot

    def clear(self, slot: int) -> None:
        """Let a slot be used again that says nothing to be believed, or what nobody wants."""
        generation = self.generation(slot)
        self._words[self._tags_word + slot] = 0
        if generation < shared.LAST_GENERATION:
            self._change(slot, generation + (generation & 1), bytes(FIELDS.size))

    @property
    def bits(self) -> int:
        """It has 2^that buckets."""
        return self._bits

    def meaning(self, namespace: int) -> int:
        """What a namespace meant to whoever wrote here last; 0 where it meant nothing."""
        word = (shared.NAMESPACES_OFFSET + namespace * shared.NAMESPACE_BYTES) // WORD_BYTES
        return self._words[word]

    def hide_namespaces(self) -> None:
        """Clients look nothing up, in any namespace, until it is stated anew."""
        words = bytes(self.memory[shared.NAMESPACES_OFFSET : shared.TAGS_OFFSET])
        at = words.find(1)
        while at >= 0:
            if at % shared.NAMESPACE_BYTES == WORD_BYTES:
                self._words[(shared.NAMESPACES_OFFSET + at) // WORD_BYTES] = 0
            at = words.find(1, at + 1)

    def _fields(self, slot: int) -> bytes:
        start = self._entries + slot * ENTRY_BYTES
        return bytes(self.memory[start + WORD_BYTES : start + ENTRY_BYTES])

    def _proven(self, slot: int, generation: int, fields: bytes) -> Entry | None:
        if (
            generation % 2
            or not 0 < generation <= shared.LAST_GENERATION
            or self._words[self._checks_word + slot] != _check_of(slot, generation, fields)
        ):
            return None
        high, low, offset, digest, order, size_bytes, namespace, state, reserved_bytes = (
            FIELDS.unpack(fields)
        )
        if (
            state != shared.HELD
            or not 0 < size_bytes <= reserved_bytes
            or offset + reserved_bytes > self._arena_bytes
        ):
            return None
        block = BlockId(namespace, shared.KEY_HALVES.pack(high, low))
        cell = shared.cell_of(slot, generation)
        return Entry(cell, block, offset, size_bytes, reserved_bytes, digest, order)

    def generation(self, slot: int) -> int:
        """The present generation of a slot; LookupError if there is no such slot."""
        if not 0 <= slot < self.slots:
            raise LookupError(slot)
        return self._words[(self._entries + slot * ENTRY_BYTES) // WORD_BYTES]

    def state_namespace(self, namespace: int, meaning: int, *, readable: bool) -> None:
        """Say what a namespace means, and whether clients may look its blocks up."""
        word = (shared.NAMESPACES_OFFSET + namespace * shared.NAMESPACE_BYTES) // WORD_BYTES
        if self._words[word] == meaning and self._words[word + 1] == int(readable):
            return
        self._words[word + 1] = 0
        self._words[word] = meaning
        self._words[word + 1] = int(readable)

    def let_go(self) -> None:
        """Say that no client holds anything of the arena any more: it may be mapped still."""
        self._words[shared.LET_GO_WORD] = 1

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()


def _check_of(slot: int, generation: int, fields: bytes) -> int:
    """What stands beside an entry: of its slot, too, so that no other can pass for it."""
    return xxhash.xxh3_64_intdigest(generation.to_bytes(8, "little") + fields, slot)
