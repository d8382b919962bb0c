"""The index beside the arena: what it holds, in shared memory, for clients and for the next agent.

Owns: which slot names which copy, and the order of the stores into it. Must not know: files,
clients, pins or eviction. It is written by one agent; whoever reads at the same time sees a slot's
generation odd, or changed, where what it read may be of two entries
(`kvcast.protocol.messages.shared` has the layout).

What is taken into the index is only what is committed, with its digest; so it tells a later agent,
too, what the arena holds, and each namespace's number beside what that meant. A block whose two
buckets are full is left out, and costs its readers a message.
"""

from __future__ import annotations

from typing import Final

from kvcast.protocol.messages import shared
from kvcast.protocol.messages.shared import ENTRY_BYTES, FIELDS, SLOTS_A_BUCKET, WORD_BYTES
from kvcast.protocol.messages.wire import BlockId

BYTES_A_SLOT = 8192
"""The index has a slot for so much of the arena: 0.9 % of it, and half full at blocks of 16 KiB."""

_NO_FIELDS: Final = bytes(FIELDS.size)


def buckets_for(arena_bytes: int) -> int:
    """How many buckets the index of such an arena has."""
    slots = min(arena_bytes // BYTES_A_SLOT, shared.MAX_SLOTS)
    return max(shared.MIN_BUCKETS, 1 << (slots // SLOTS_A_BUCKET - 1).bit_length())


class Index:
    """Writes the index of an arena of `arena_bytes` into `memory`, of `index_bytes(buckets)` zero
    bytes. `incarnation` is not 0, and another one for each agent."""

    def __init__(self, memory: memoryview, arena_bytes: int, incarnation: int) -> None:
        buckets = buckets_for(arena_bytes)
        assert len(memory) == shared.index_bytes(buckets)
        self._bits = buckets.bit_length() - 1
        self._memory = memory
        self._words = memory.cast("Q")
        self._tags_word = shared.TAGS_OFFSET // WORD_BYTES
        self._entries = shared.entries_offset(buckets)
        self._commits = 0
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
        tags = self._words
        mixed = shared.mixed(block.namespace, high, low)
        for bucket_of in (shared.first_bucket, shared.second_bucket):
            bucket = bucket_of(mixed, self._bits)
            first = bucket * SLOTS_A_BUCKET
            at = self._tags_word + first
            for number, tag in enumerate(tags[at : at + SLOTS_A_BUCKET].tolist()):
                slot = first + number
                word = (self._entries + slot * ENTRY_BYTES) // WORD_BYTES
                generation = self._words[word]
                if tag or generation >= shared.LAST_GENERATION:
                    continue
                self._commits += 1
                fields = FIELDS.pack(
                    *(high, low, offset, digest, self._commits),
                    *(size_bytes, block.namespace, shared.HELD, reserved_bytes),
                )
                self._change(slot, generation, fields)
                tags[at + number] = shared.tag_of(low)
                return shared.cell_of(slot, generation + 2)
        return 0

    def withdraw(self, cell: int) -> None:
        """Take a copy out; whoever looks it up or at it again from now on finds it gone, once the
        barrier has passed."""
        slot, generation = shared.slot_of(cell)
        word = (self._entries + slot * ENTRY_BYTES) // WORD_BYTES
        assert self._words[word] == generation, f"slot {slot} has been withdrawn"
        self._words[self._tags_word + slot] = 0
        self._change(slot, generation, _NO_FIELDS)

    def _change(self, slot: int, generation: int, fields: bytes) -> None:
        """Write an entry, odd while that lasts."""
        start = self._entries + slot * ENTRY_BYTES
        self._words[start // WORD_BYTES] = generation + 1
        self._memory[start + WORD_BYTES : start + ENTRY_BYTES] = fields
        self._words[start // WORD_BYTES] = generation + 2

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

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
