"""The lane: READs that need no decision are answered by compiled code.

Owns: which READs those are, how their block is found in the index beside the arena, and what is
sent for them. Must not know: sockets, clocks, policies. What may be answered here Python says
beforehand (`use`, `open`), and what was it hears at once afterwards (`Answered`); every other READ
goes to Python as ever (`kvcast.protocol.responder`).

A READ is answered here if it is the first of a whole segment (no repeat, no repair), nobody gathers
for it, it names no reader group, its sender may use its namespace, the index has the block, in the
copy that is wanted, the segment is one of it, and the chunks are of a size that leaves this node;
if the home has nothing else to send, and sends no more in this round than it may; and, where a
switch has marked it, while no such answers are held back for readers behind. Such a READ the
responder would answer at once, and with the very same frames.

Nothing is pinned. Whoever calls sends what `jobs` say before it does anything else; until then
nobody runs who could use the bytes for another block, and afterwards they are with the kernel, or
copied.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Final, NamedTuple

from kvcast.native.linux import swap16
from kvcast.native.subset import (
    U8,
    U32,
    U64,
    Inline,
    Library,
    Ptr,
    Struct,
    address_of,
    bytes_at,
    copy,
    ctypes_of,
    native,
    u16_at,
    u64_at,
)
from kvcast.protocol.meetings import Meetings, NativeMeetings, name_of, reads
from kvcast.protocol.messages.offsets import (
    CHUNK_AT,
    DIGEST_AT,
    FLAGS_AT,
    GATHER_AT,
    GROUP_AT,
    KEY_AT,
    NAMESPACE_AT,
    OP_AT,
    SEGMENT_AT,
    SIZE_AT,
    WANTED_AT,
)
from kvcast.protocol.messages.shared import (
    ENTRY_BYTES,
    HELD,
    KIND_WORD,
    MULTIPLIERS,
    NAMESPACES,
    SLOT_BITS,
    SLOTS_A_BUCKET,
    STATE_SHIFT,
    TAGS_OFFSET,
    WORD_BYTES,
    buckets_of,
    entries_offset,
)
from kvcast.protocol.messages.wire import (
    CHUNK_BYTES,
    CHUNKINGS,
    CHUNKS_PER_SEGMENT,
    FLAG_LAST,
    FLAG_PADDED,
    FLAG_SHARED,
    FULL_SEGMENT,
    HEADER_BYTES,
    OFFER_BYTES,
    OP_DATA,
    OP_OFFER,
    OP_READ,
    SEGMENT_BYTES,
    SEGMENT_INDEX_BITS,
)
from kvcast.protocol.placement import (
    FRAME_FOR_PYTHON,
    GO_ON,
    Piece,
    Table,
    address_of_buffer,
    place,
    segment_bytes,
    segment_start,
)

JOBS: Final = 64
"""What is to be sent is told after so many jobs."""
OFFER_CODE: Final = len(CHUNKINGS)
"""What stands for the size of chunks where a job is an OFFER."""
MAX_NAMESPACES_WITH_NODES: Final = 254
"""Namespaces for some nodes only of which the lane knows; READs of others go to Python."""
_ANYBODY: Final = 1
_FIRST_ROW: Final = 2
_INDEX: Final = (1 << SEGMENT_INDEX_BITS) - 1
_SPREAD, _SPREAD_AGAIN, _BY_LOW, _BY_NAMESPACE = MULTIPLIERS
# Words of an index's entry.
_HIGH: Final = 1
_LOW: Final = 2
_OFFSET: Final = 3
_DIGEST: Final = 4


class Job(Struct):
    """Frames to one node: chunks of a segment, one datagram as it is, or an OFFER."""

    header: Annotated[Ptr[U8], Inline(52)]
    """Of all frames; chunk and FLAG_LAST are put in. A datagram has its own."""
    node: U32
    address: U64
    """The segment's first byte, the datagram's, or the OFFER's payload's."""
    length: U64
    """Of the segment, or of the datagram."""
    chunks: U64
    """0: a datagram, or an OFFER."""
    last: U64
    """Whether the last frame carries FLAG_LAST."""
    chunk_code: U64
    """How long the chunks are (`wire.Chunking`); or OFFER_CODE."""


class NativeAnswered(Struct):
    """See `Answered`."""

    cell: U64
    reader: U32
    segment: U32
    marked: U32
    frames: U32
    payload_bytes: U64
    offers: U64


class NativeLane(Struct):
    """What may be answered, and what was."""

    opened: U64
    frames_left: U64
    """So many frames may be sent before the lane is opened again."""
    takes_marked: U64
    """Whether READs that a switch has marked may be answered."""
    index: U64
    bucket_bits: U64
    entries: U64
    """Where in the index its entries begin."""
    arena: U64
    arena_bytes: U64
    max_chunk_code: U64
    access: Ptr[U8]
    """By namespace: 0 = Python decides; 1 = every node; from 2 on: those of that row."""
    rows: Ptr[U8]
    """By row and node, whether it may."""
    row_nodes: U64
    offer: U64
    """Where an OFFER's payload lies; 0: none is made."""
    jobs: Ptr[Job]
    job_count: U64
    answered: Ptr[NativeAnswered]
    answered_count: U64
    meetings: Ptr[NativeMeetings]
    marked_count: U64
    """Those of them that a switch had marked."""
    full: U64
    """READs that found too few `frames_left`, while the lane was open."""
    below: U64
    """2^`below_bits` counters of what lies below DRAM (`hostagent.tiers.counting_filter`),"""
    below_bits: U64
    """0: nothing lies there."""


@native
def slot_in(lane: NativeLane, bucket: U64, namespace: U64, high: U64, low: U64) -> U64:
    """Where in that bucket the entry of a block lies that is held; 0 if it does not."""
    tag = low
    if tag == 0:
        tag = 0 + 1
    tags = u64_at(lane.index + TAGS_OFFSET + bucket * (SLOTS_A_BUCKET * WORD_BYTES))
    kind = (HELD << STATE_SHIFT) | (namespace << 32)
    for number in range(SLOTS_A_BUCKET):
        if tags[number] == tag:
            slot = bucket * SLOTS_A_BUCKET + number
            at = lane.index + lane.entries + slot * ENTRY_BYTES
            entry = u64_at(at)
            same = entry[_HIGH] == high and entry[_LOW] == low and (entry[0] & 1) == 0
            if same and (entry[KIND_WORD] & ~0xFFFF_FFFF) == kind:
                return at
    return 0


@native
def mixed_of(namespace: U64, high: U64, low: U64) -> U64:
    """A block's hash, as in `shared.two_buckets`."""
    return (high + low * _BY_LOW + namespace * _BY_NAMESPACE) * _SPREAD


@native
def may_be_counted(counters: U64, bits: U64, mixed: U64) -> bool:
    """Whether neither of a block's two of 2^`bits` counters says that it is not there; with no bits
    nothing is."""
    if bits == 0 or bytes_at(counters)[mixed >> (64 - bits)] == 0:
        return False
    return bytes_at(counters)[(mixed * _SPREAD_AGAIN) >> (64 - bits)] != 0


@native
def may_lie_below(lane: NativeLane, namespace: U64, key: U64) -> bool:
    """Whether the block whose key is at an address may lie below DRAM."""
    words = u64_at(key)
    mixed = mixed_of(namespace, 0 + words[0], 0 + words[1])
    return may_be_counted(0 + lane.below, 0 + lane.below_bits, mixed)


@native
def entry_of(lane: NativeLane, namespace: U64, high: U64, low: U64) -> U64:
    """Where the index's entry of a block lies that is held; 0 if there is none."""
    mixed = mixed_of(namespace, high, low)
    shift = 64 - lane.bucket_bits
    at = slot_in(lane, mixed >> shift, namespace, high, low)
    if at == 0:
        at = slot_in(lane, (mixed * _SPREAD_AGAIN) >> shift, namespace, high, low)
    return at


@native
def may_use(lane: NativeLane, namespace: U64, node: U64) -> bool:
    row = 0 + lane.access[namespace]
    if row < _FIRST_ROW:
        return row == _ANYBODY
    if node >= lane.row_nodes:
        return False
    return lane.rows[(row - _FIRST_ROW) * lane.row_nodes + node] != 0


@native
def put_number(at: U64, length: U64, number: U64) -> None:
    """Write a number of so many bytes in network order."""
    b = bytes_at(at)
    for i in range(length):
        b[length - 1 - i] = number >> (8 * i)


@native
def header_for(lane: NativeLane, read: U64, op: U64, digest: U64, size: U64, node: U64) -> None:
    """Begin the next job: its frames' header, from that of the READ."""
    job = lane.jobs[lane.job_count]
    lane.job_count += 1
    at = address_of(job.header)
    copy(at, read, HEADER_BYTES)
    b = bytes_at(at)
    b[OP_AT] = op
    b[GATHER_AT] = 0
    put_number(at + FLAGS_AT, 2, 0)
    put_number(at + DIGEST_AT, 8, digest)
    put_number(at + SIZE_AT, 4, size)
    u64_at(at + WANTED_AT)[0] = 0
    job.node = node


@native
def answer(lane: NativeLane, read: U64, node: U64) -> bool:
    """Answer a well-formed frame from a node, if it is a READ that needs no decision."""
    if lane.opened == 0 or lane.job_count + 2 > JOBS or lane.answered_count == JOBS:
        return False
    b = bytes_at(read)
    flags = swap16(u16_at(read + FLAGS_AT)[0])
    plain = b[OP_AT] == OP_READ and (flags & ~(FLAG_PADDED | FLAG_SHARED)) == 0
    alone = b[GATHER_AT] == 0 and u16_at(read + GROUP_AT)[0] == 0
    if not plain or not alone or u64_at(read + WANTED_AT)[0] != FULL_SEGMENT:
        return False
    marked = (flags & FLAG_SHARED) != 0
    namespace = swap16(u16_at(read + NAMESPACE_AT)[0])
    if (marked and lane.takes_marked == 0) or not may_use(lane, namespace, node):
        return False
    key = u64_at(read + KEY_AT)
    at = entry_of(lane, namespace, 0 + key[0], 0 + key[1])
    if at == 0:
        return False
    entry = u64_at(at)
    digest = 0 + entry[_DIGEST]
    size = entry[KIND_WORD] & 0xFFFF_FFFF
    offset = 0 + entry[_OFFSET]
    if offset > lane.arena_bytes or size > lane.arena_bytes - offset:
        return False
    if u64_at(read + DIGEST_AT)[0] != 0:
        put_number(address_of(lane.jobs[lane.job_count].header), 8, digest)
        wanted = u64_at(address_of(lane.jobs[lane.job_count].header))[0]
        if u64_at(read + DIGEST_AT)[0] != wanted:
            return False
    number = swap16(u16_at(read + SEGMENT_AT)[0])
    code = number >> SEGMENT_INDEX_BITS
    index = number & _INDEX
    chunk_bytes = CHUNK_BYTES << code
    start = segment_start(index, chunk_bytes)
    if code > lane.max_chunk_code or start >= size:
        return False
    if index == 0 and reads(lane.meetings[0], name_of(namespace, 0 + key[0], 0 + key[1]), node):
        return False
    length = size - start
    longest = segment_bytes(index, chunk_bytes)
    offers = 0
    if length > longest:
        length = longest
        if index == 0 and lane.offer != 0:
            offers = 0 + 1
    count = (length + chunk_bytes - 1) // chunk_bytes
    if count + offers > lane.frames_left:
        lane.full += 1
        return False
    lane.frames_left -= count + offers
    if offers != 0:
        offer = lane.jobs[lane.job_count]
        header_for(lane, read, OP_OFFER, digest, size, node)
        offer.address = lane.offer
        offer.length = 0 + OFFER_BYTES
        offer.chunks = 0
        offer.last = 0
        offer.chunk_code = 0 + OFFER_CODE
    job = lane.jobs[lane.job_count]
    header_for(lane, read, OP_DATA, digest, size, node)
    job.address = lane.arena + offset + start
    job.length = length
    job.chunks = FULL_SEGMENT >> (CHUNKS_PER_SEGMENT - count)
    job.last = 1
    job.chunk_code = code
    told = lane.answered[lane.answered_count]
    lane.answered_count += 1
    slot = (at - lane.index - lane.entries) // ENTRY_BYTES
    told.cell = (entry[0] << SLOT_BITS) | slot
    told.reader = node
    told.segment = number
    told.marked = 0
    if marked:
        told.marked = 1
        lane.marked_count += 1
    told.frames = count
    told.payload_bytes = length
    told.offers = offers
    return True


@native
def place_or_answer(lane: NativeLane, t: Table, pieces: Ptr[Piece], count: U32) -> U32:
    """As `place`, but READs that need no decision are answered."""
    while lane.job_count + 2 <= JOBS:
        why = place(t, pieces, count)
        if why != FRAME_FOR_PYTHON:
            return why
        if not answer(lane, t.frame, t.frame_source):
            return why
    return GO_ON


# --- Python's side ----------------------------------------------------------------------------

JOB: Final = struct.Struct("=52sIQQQQQ")
"""A `Job`."""
assert JOB.size == ctypes.sizeof(ctypes_of(Job))
assert SEGMENT_BYTES <= CHUNKS_PER_SEGMENT * CHUNK_BYTES
_ANSWERED: Final = struct.Struct("=QIIIIQQ")
assert _ANSWERED.size == ctypes.sizeof(ctypes_of(NativeAnswered))


class Answered(NamedTuple):
    """A READ that was answered."""

    cell: int
    """Of the copy (`shared.cell_of`)."""
    reader: int
    segment: int
    """As the header says it."""
    marked: int
    """Whether a switch had marked the READ."""
    frames: int
    """Of DATA."""
    payload_bytes: int
    offers: int


@cache
def compiled() -> Callable[[int, int, int, int], int]:
    """The compiled function."""
    return Library(place_or_answer).call(place_or_answer)


class Lane:
    """The lane of one home. It is closed until it is opened."""

    def __init__(
        self,
        index: memoryview,
        arena: memoryview,
        *,
        max_chunk_bytes: int,
        meetings: Meetings | None = None,
    ) -> None:
        """`index` and `arena` stay where they are until `shut`; what the one says of the other is
        believed. `meetings`: of those who want one block; a READ by which some meet is left."""
        self._code = compiled()
        self._lane: Any = ctypes_of(NativeLane)()
        self.address = ctypes.addressof(self._lane)
        """For compiled code that answers by it, and has what was answered told (`tell`)."""
        self._jobs = (ctypes_of(Job) * JOBS)()
        self._answered = (ctypes_of(NativeAnswered) * JOBS)()
        self._answered_view = memoryview(self._answered).cast("B")
        self._access = bytearray(NAMESPACES)
        self._rows = bytearray(1)
        self._offer = bytearray(OFFER_BYTES)
        self.send: Callable[[int, int], None] = lambda _jobs, _count: None
        """Sends what so many jobs at an address say, before it returns."""
        self.told: Callable[[list[Answered]], None] = lambda _answered: None
        """Hears of every READ that was answered, after its answer was sent."""
        lane = self._lane
        buckets = buckets_of(len(index))
        lane.index = address_of_buffer(index)
        lane.bucket_bits = buckets.bit_length() - 1
        lane.entries = entries_offset(buckets)
        self._meetings = meetings or Meetings()
        lane.meetings = self._meetings.address
        lane.arena = address_of_buffer(arena)
        lane.arena_bytes = len(arena)
        lane.max_chunk_code = max(c.code for c in CHUNKINGS if c.chunk_bytes <= max_chunk_bytes)
        lane.access = address_of_buffer(self._access)
        lane.rows = address_of_buffer(self._rows)
        lane.jobs = ctypes.addressof(self._jobs)
        lane.answered = ctypes.addressof(self._answered)
        self._shut = False

    def use_below(self, counters: memoryview, bits: int) -> None:
        """What may lie below DRAM by these 2^bits counters may be there, and nothing else."""
        self._below = counters
        self._lane.below = address_of_buffer(counters)
        self._lane.below_bits = bits

    def use(self, access: Mapping[int, Collection[int] | None], offer: bytes) -> None:
        """What follows from the pool's map: by namespace which nodes may use it (None: all), and
        an OFFER's payload (b"": none is made)."""
        assert len(offer) in (0, OFFER_BYTES)
        self._access[:] = bytes(NAMESPACES)
        restricted = [(n, nodes) for n, nodes in access.items() if nodes is not None]
        restricted = restricted[:MAX_NAMESPACES_WITH_NODES]
        room = 1 + max((node for _, nodes in restricted for node in nodes), default=0)
        self._rows = bytearray(max(1, len(restricted) * room))
        for row, (namespace, nodes) in enumerate(restricted):
            self._access[namespace] = _FIRST_ROW + row
            for node in nodes:
                self._rows[row * room + node] = 1
        for namespace, for_some in access.items():
            if for_some is None:
                self._access[namespace] = _ANYBODY
        lane = self._lane
        lane.rows = address_of_buffer(self._rows)
        lane.row_nodes = room
        lane.offer = 0
        if offer:
            self._offer[:] = offer
            lane.offer = address_of_buffer(self._offer)

    def open(self, frames: int, *, takes_marked: bool) -> None:
        """Answer READs from now on, by so many frames altogether; with `takes_marked`, also those
        that a switch has marked."""
        if not self._shut:
            self._lane.opened = frames > 0
            self._lane.frames_left = frames
            self._lane.takes_marked = takes_marked

    def close(self) -> None:
        """Answer none until it is opened again."""
        self._lane.opened = 0

    def shut(self) -> None:
        """Close it for good: the arena goes."""
        self.close()
        self._shut = True

    def place(self, table: int, pieces: int, count: int) -> int:
        """What `Placement.place` calls instead of the compiled `place`."""
        why = self._code(self.address, table, pieces, count)
        lane = self._lane
        if lane.job_count:
            self.send(lane.jobs, lane.job_count)
            lane.job_count = 0
        self.tell()
        return why

    def tell(self) -> bool:
        """Say what was answered; False if nothing was. The answers have been sent."""
        lane = self._lane
        count = lane.answered_count
        if count:
            view = self._answered_view[: count * _ANSWERED.size]
            lane.answered_count = lane.marked_count = 0
            self.told([Answered._make(each) for each in _ANSWERED.iter_unpack(view)])
        return bool(count)

    def take_full(self) -> int:
        """READs since the last time that went to Python since the frames of the round were used
        up."""
        full: int = self._lane.full
        self._lane.full = 0
        return full


def datagrams_of(jobs: int, count: int) -> Iterator[tuple[int, bytes]]:
    """The datagrams that so many jobs at an address stand for, each with its node: what whoever
    has no mover sends."""
    for number in range(count):
        packed = ctypes.string_at(jobs + number * JOB.size, JOB.size)
        header, node, address, length, chunks, last, code = JOB.unpack(packed)
        if code == OFFER_CODE:
            yield node, header + ctypes.string_at(address, OFFER_BYTES)
            continue
        segment = ctypes.string_at(address, length)
        if not chunks:
            yield node, segment
        chunk_bytes = CHUNK_BYTES << code
        while chunks:
            chunk = (chunks & -chunks).bit_length() - 1
            chunks &= chunks - 1
            frame = bytearray(header)
            frame[CHUNK_AT] = chunk
            if last and not chunks:
                frame[FLAGS_AT + 1] |= FLAG_LAST
            payload = segment[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
            yield node, bytes(frame) + payload.ljust(chunk_bytes, b"\0")
