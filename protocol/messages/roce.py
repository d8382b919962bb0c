"""Shared answers by RDMA: the packets that a home writes for all who wait, and what a switch makes
of them.

Owns: RoCE version 2's headers as far as the switch reads them, the numbers that stand for "whoever
waits" in a home's packet, where a chunk lies in a reader's landing zone and what its immediate
says, and the constants that leave a packet's check (ICRC) right when a switch readdresses it. Must
not know: verbs, sockets, tables of a switch.

A READ with `FLAG_WRITE` asks that its segment be written into the *landing zones* of all who wait.
A zone is memory that a reader's card has registered under one address for all readers
(`ZONE_ADDRESS`), cut into `ZONE_SLOTS` slots of one segment. Which slot a segment has, and which
pending entry at the switch, its *place* says, 23 bits that every node computes from the segment's
name. The READ's tag carries it.

The home answers such a READ, if a switch has marked it SHARED, with one UC RDMA WRITE ONLY WITH
IMMEDIATE a chunk, from a queue pair whose peer is nobody: the pool's address, `POOL_QUEUE_PAIR` and
`POOL_KEY`. Behind the last it sends WRITTEN, a kvcast frame with the block's digest and size, which
ends the wait. The switch finds who waits from a WRITE's headers alone: the immediate xor the low
half of the address is namespace and index of the pending entry, and the address says slot and
chunk. To each who waits it sends a copy with that reader's address, queue pair and key.

The ICRC of a packet is linear in its bits, and the IP identification and the UDP source port
together span its 32 bits; so for every change of addresses there is one change of these two that
leaves it as it is, whatever the packet says, and however long it is.
"""

from __future__ import annotations

import functools
import zlib
from typing import Final, NamedTuple

import xxhash
from kvcast.protocol.messages.wire import (
    CHUNKINGS,
    CHUNKS_PER_SEGMENT,
    SEGMENT_INDEX_BITS,
    Field,
    Header,
)

ROCE_UDP_PORT: Final = 4791
UC_WRITE_ONLY_WITH_IMMEDIATE: Final = 0x2B
POOL_QUEUE_PAIR: Final = 0x4B5643
"""Whose a packet is that is for whoever waits, together with the pool's own address."""
POOL_KEY: Final = 0x4B56434B

SHARED_CHUNKING: Final = CHUNKINGS[2]
"""Chunks of 4 KiB, the longest that RoCE takes in one packet."""
SLOT_BYTES: Final = CHUNKS_PER_SEGMENT * SHARED_CHUNKING.chunk_bytes
SLOT_BITS: Final = 7
ZONE_SLOTS: Final = 1 << SLOT_BITS
ZONE_BYTES: Final = ZONE_SLOTS * SLOT_BYTES
"""32 MiB."""
ZONE_ADDRESS_HIGH: Final = 0x4B56
ZONE_ADDRESS: Final = ZONE_ADDRESS_HIGH << 32
"""Where every zone begins, to the cards. Its low 32 bits are 0, so those of an address in the zone
are slot and chunk."""
CHUNK_SHIFT: Final = SHARED_CHUNKING.chunk_bytes.bit_length() - 1
SLOT_SHIFT: Final = SLOT_BYTES.bit_length() - 1
_ADDRESS_BITS: Final = (ZONE_BYTES - 1) & ~(SHARED_CHUNKING.chunk_bytes - 1)
ADDRESS_MID_ZEROS: Final = 0xFFFF & ~(_ADDRESS_BITS >> 16)
ADDRESS_LOW_ZEROS: Final = 0xFFFF & ~_ADDRESS_BITS
"""Bits of these two fields that are 0 in every chunk's address."""

_INDEX_BITS: Final = 16
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1
_SEGMENT_MASK: Final = (1 << SEGMENT_INDEX_BITS) - 1
CHUNK_MASK: Final = (CHUNKS_PER_SEGMENT - 1) << CHUNK_SHIFT
"""The bits in which the immediates, and the addresses, of a segment's chunks differ."""

BTH: Final = Header(
    "bth_h",
    "InfiniBand's base transport header, behind UDP port 4791",
    (
        Field("opcode", 8, ""),
        Field("flags", 8, "solicited event, migration, padding, version"),
        Field("partition", 16, ""),
        Field("notices", 8, "FECN, BECN"),
        Field("queue_pair", 24, "of the receiver"),
        Field("ask_ack", 8, ""),
        Field("psn", 24, "UC takes an ONLY at any"),
    ),
)
WRITE: Final = Header(
    "write_h",
    "RETH and immediate of a UC RDMA WRITE ONLY WITH IMMEDIATE",
    (
        Field("address_high", 32, "ZONE_ADDRESS_HIGH"),
        Field("address_mid", 16, "slot << 2 | upper two bits of the chunk"),
        Field("address_low", 16, "lower four bits of the chunk, and 0"),
        Field("key", 32, ""),
        Field("size", 32, "bytes that are written"),
        Field("immediate_high", 16, "namespace ^ address_mid"),
        Field("immediate_low", 16, "index ^ address_low"),
    ),
)
HEADERS: Final = (BTH, WRITE)


class Place(NamedTuple):
    """Where a shared answer goes: the pending entry's index at the switch, and the zone's slot.
    `namespace` belongs to it, so that no two tenants' segments ever have the same place. `Place.of`
    makes one."""

    namespace: int
    entry_index: int
    slot: int
    tag: int
    """The tag of a READ with FLAG_WRITE, and of what answers it."""
    first: int
    """The immediate of the first chunk."""
    name: int
    """What the immediates of all chunks have in common, beside the chunk's own bits (`name_of`):
    two segments with one name cannot be told apart while they come."""

    @classmethod
    def of(cls, namespace: int, entry_index: int, slot: int) -> Place:
        """The place with these."""
        low = slot << SLOT_SHIFT
        first = namespace << _INDEX_BITS ^ entry_index ^ low
        return cls(namespace, entry_index, slot, low | entry_index, first, first & ~CHUNK_MASK)

    def address_low(self, chunk: int) -> int:
        """The low half of a chunk's address."""
        return self.slot << SLOT_SHIFT | chunk << CHUNK_SHIFT

    def immediate(self, chunk: int) -> int:
        """What the completion of a chunk says."""
        return self.first ^ chunk << CHUNK_SHIFT


def name_of(immediate: int) -> int:
    """The `Place.name` of which a completion's immediate is."""
    return immediate & ~CHUNK_MASK


_hash: Final = xxhash.xxh3_64_intdigest


@functools.lru_cache(maxsize=1024)
def place_of(namespace: int, key: bytes, segment: int) -> Place:
    """The place of a segment: `segment` is the header's number. The segments of a block have slots
    side by side, so that they do not wait for each other: readers that had to ask for one of them
    later would ask at different times."""
    block = namespace.to_bytes(2, "big") + key
    slot = _hash(block) + (segment & _SEGMENT_MASK) & (ZONE_SLOTS - 1)
    entry = _hash(block + segment.to_bytes(2, "big")) & _INDEX_MASK
    low = slot << SLOT_SHIFT  # as `Place.of` has it
    first = namespace << _INDEX_BITS ^ entry ^ low
    return Place(namespace, entry, slot, low | entry, first, first & ~CHUNK_MASK)


# --- the check of a packet ------------------------------------------------------------------

_ETHERNET_BYTES: Final = 14
_IP_AT: Final = _ETHERNET_BYTES
_UDP_AT: Final = _IP_AT + 20
_BTH_AT: Final = _UDP_AT + 8
_WRITE_AT: Final = _BTH_AT + BTH.size_bytes
_IDENTIFICATION_AT: Final = _IP_AT + 4
_SOURCE_AT: Final = _IP_AT + 12
_DESTINATION_AT: Final = _IP_AT + 16
_UDP_SOURCE_AT: Final = _UDP_AT
_QUEUE_PAIR_AT: Final = _BTH_AT + 5
_KEY_AT: Final = _WRITE_AT + 8
_END: Final = _KEY_AT + 4
"""Behind the last byte that changes. What follows shifts a difference of checks by an invertible
map, which is the same for both sides of an equation."""


def _difference(at: int, difference: bytes) -> int:
    """How the check of a packet that ends at `_END` differs where bytes from `at` on do so."""
    behind = bytes(_END - at - len(difference))
    return zlib.crc32(difference + behind) ^ zlib.crc32(bytes(len(difference)) + behind)


@functools.lru_cache(maxsize=1)
def _basis() -> list[tuple[int, int]]:
    """The 32 bits of identification and source port: what each does to the check, as an echelon of
    (check, bits), the highest first."""
    basis: list[tuple[int, int]] = []
    for at, shift in ((_IDENTIFICATION_AT, 16), (_UDP_SOURCE_AT, 0)):
        for bit in range(16):
            check, bits = _difference(at, (1 << bit).to_bytes(2, "big")), 1 << (shift + bit)
            for other, others in basis:
                if check ^ other < check:
                    check, bits = check ^ other, bits ^ others
            assert check, "the two fields do not span the check"
            basis.append((check, bits))
            basis.sort(reverse=True)
    return basis


class Target(NamedTuple):
    """Whom a packet is for, and from: IPv4 addresses, queue pair and key as integers."""

    source: int
    destination: int
    queue_pair: int
    key: int


class Compensation(NamedTuple):
    """What leaves the check right: to be xored into IP identification and UDP source port."""

    identification: int
    source_port: int


def compensation(old: Target, new: Target) -> Compensation:
    """What a packet for `old` needs to be one for `new` with the same ICRC."""
    places = ((_SOURCE_AT, 4), (_DESTINATION_AT, 4), (_QUEUE_PAIR_AT, 3), (_KEY_AT, 4))
    check = 0
    for (at, size), before, after in zip(places, old, new, strict=True):
        check ^= _difference(at, (before ^ after).to_bytes(size, "big"))
    wanted = 0
    for other, bits in _basis():
        if check ^ other < check:
            check, wanted = check ^ other, wanted ^ bits
    assert check == 0
    return Compensation(wanted >> 16, wanted & 0xFFFF)
