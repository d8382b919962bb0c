"""The local API's shared memory: what an agent writes for its clients, and they for it, byte by
byte.

Owns: the layout of two kinds of memory, and where in them a block or a pin lies. Must not know: who
maps them, or when anything is read or written (`kvcast.hostagent.core.shared_index` says that). All
words are 64 bits in the machine's own order, and aligned: a word is read and written as a whole.

**The index** says what the arena holds. One agent writes it, clients map it read-only. After a
header come two words a namespace (what it means, `bulk.meaning_of`; and whether clients may look
it up), then the tags, then the entries. A block lies in one of two buckets of `SLOTS_A_BUCKET`
slots, by a hash of its name; the bucket's tags are one cache line. A tag is half of a key, so that
most lookups read one line of tags and one entry. A slot's generation is even while its entry is
stable, and odd while it is changed; every change adds to it, for as long as the file lives. So a
slot and an even generation name one copy of one block for ever, and both together in one word are
a *cell*: what a client pins. After the entries comes a check a slot, which is for the next agent
alone: it says that an entry is what was written there, and not what a failing memory made of it.

**A region** is one client's own: a word that the agent sets when it takes no notice of the region
any more; how many cells are in use, at most; how many hits there were; the cells of the copies
that the client pins; and a ring of the cells of its last hits.
"""

from __future__ import annotations

import struct
from typing import Final

WORD_BYTES: Final = 8

# --- the index ----------------------------------------------------------------------------------

INDEX_MAGIC: Final = int.from_bytes(b"kvcastix", "little")
INDEX_LAYOUT: Final = 2
"""Version of the layout of the index and of the regions."""

HEADER: Final = struct.Struct("=8Q")
"""INDEX_MAGIC, INDEX_LAYOUT, incarnation of the agent that writes (never 0), bytes of the whole
index, bytes of the arena, buckets (a power of two), whether the agent was stopped while no client
held anything (1, else 0), and 0."""
INCARNATION_WORD: Final = 2
LET_GO_WORD: Final = 6
KEPT: Final = struct.Struct("=4Q")
KEPT_OFFSET: Final = HEADER.size
"""For the agent that comes after: whose blocks these are (a hash, `tiers.kept`), the slab of the
arena's allocator in bytes, the incarnation in the pool, and a digest of these three and of the
sizes in the header."""
NAMESPACES_OFFSET: Final = 4096
NAMESPACES: Final = 1 << 16
NAMESPACE_BYTES: Final = 2 * WORD_BYTES
TAGS_OFFSET: Final = NAMESPACES_OFFSET + NAMESPACES * NAMESPACE_BYTES
SLOTS_A_BUCKET: Final = 8
BUCKET_BYTES: Final = SLOTS_A_BUCKET * WORD_BYTES
ENTRY_BYTES: Final = 64
FIELDS: Final = struct.Struct("=5QI2HQ")
"""A slot's entry is a word with its generation, and then: high and low half of the key, offset in
the arena, digest, order of the commit (counted up by the agent, so that what was committed last is
known), size in bytes, namespace, state, and how much of the arena it takes. These are read and
written in no order: see the generation."""
assert WORD_BYTES + FIELDS.size == ENTRY_BYTES
HELD: Final = 1
"""State of an entry that holds a copy, which is whole; 0 is that of an empty one, or of one that
was withdrawn, which else says what it said before."""
KIND_WORD: Final = 6
"""Which word of an entry has size, namespace and state, from below."""
STATE_SHIFT: Final = 48
NOT_HELD: Final = (1 << STATE_SHIFT) - 1
"""What is left of that word without the state."""

KEY_HALVES: Final = struct.Struct("=2Q")

SLOT_BITS: Final = 26
MAX_SLOTS: Final = 1 << SLOT_BITS
MIN_BUCKETS: Final = 128
LAST_GENERATION: Final = (1 << (64 - SLOT_BITS)) - 2
"""A slot that has got so far stays empty for ever; a cell holds no more."""

_SPREAD: Final = 0x9E3779B97F4A7C15
_SPREAD_AGAIN: Final = 0xD6E8FEB86659FD93
_BY_LOW: Final = 0xC2B2AE3D27D4EB4F
_BY_NAMESPACE: Final = 0xFF51AFD7ED558CCD
_WORD: Final = (1 << 64) - 1
MULTIPLIERS: Final = (_SPREAD, _SPREAD_AGAIN, _BY_LOW, _BY_NAMESPACE)
"""Of `two_buckets`, for those who compute many at once: of the hash, then of the second bucket."""


def two_buckets(namespace: int, high: int, low: int, bits: int) -> tuple[int, int]:
    """The bucket, of 2^bits, in which a block lies where there is room, and the one in which it
    lies where that was full; `high` and `low` are its key's halves."""
    mixed = (high + low * _BY_LOW + namespace * _BY_NAMESPACE) * _SPREAD & _WORD
    return mixed >> (64 - bits), (mixed * _SPREAD_AGAIN & _WORD) >> (64 - bits)


def tag_of(low: int) -> int:
    """The tag of a key with that low half; 0 is no tag but an empty slot."""
    return low or 1


def index_bytes(buckets: int) -> int:
    """How large an index of so many buckets is."""
    return TAGS_OFFSET + buckets * SLOTS_A_BUCKET * (WORD_BYTES + ENTRY_BYTES + WORD_BYTES)


def buckets_of(index_bytes: int) -> int:
    """How many buckets an index of that size has."""
    return (index_bytes - TAGS_OFFSET) // (SLOTS_A_BUCKET * (WORD_BYTES + ENTRY_BYTES + WORD_BYTES))


def entries_offset(buckets: int) -> int:
    """Where its entries begin, in bytes."""
    return TAGS_OFFSET + buckets * BUCKET_BYTES


def checks_offset(buckets: int) -> int:
    """Where its checks begin, in bytes."""
    return entries_offset(buckets) + buckets * SLOTS_A_BUCKET * ENTRY_BYTES


def cell_of(slot: int, generation: int) -> int:
    """A copy, as a client names it to pin it; never 0."""
    return generation << SLOT_BITS | slot


def slot_of(cell: int) -> tuple[int, int]:
    """The slot and the generation of a cell."""
    return cell & (MAX_SLOTS - 1), cell >> SLOT_BITS


# --- a client's region ----------------------------------------------------------------------------

CLOSED_WORD: Final = 0
CELLS_USED_WORD: Final = 1
HITS_WORD: Final = 2
CELLS_WORD: Final = 8
PIN_CELLS: Final = 4096
"""Copies that a client may pin by itself at once; beyond them it asks the agent."""
RING_WORD: Final = CELLS_WORD + PIN_CELLS
RING_CELLS: Final = 4096
"""Hits that the agent can tell apart when it looks; of more it learns how many there were."""
REGION_BYTES: Final = (RING_WORD + RING_CELLS) * WORD_BYTES
