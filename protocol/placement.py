"""Placement: received datagrams go where they belong, in compiled code.

Owns: what makes a datagram well-formed, said a second time in the compiled subset (`wire.decode`
and `ethernet.unwrap` say it in Python, and a test compares them on any bytes); the table of copies
that are being put together; and the one way by which a chunk gets into a block: `_put`. Must not
know: sockets, clocks, or what an arrival means for a fetch.

A caller hands over *pieces*: datagrams of one length that lie side by side, as a kernel hands them
over (UDP_GRO), the last perhaps shorter, or a single one. For DATA of a copy in the table, from a
node that is listened to, the payload is copied to its place and the chunk's bit is cleared; Python
hears of it later, as one *arrival* for all such frames in a row that agree in copy, segment, node,
tag and flags. So it does of the end of an answer by RDMA (WRITTEN), where all that is missing of
its segment has come. Where such an answer is awaited, and no copy of its block is chosen, its end
is *held*: when Python hears of what has arrived, it chooses the copy by the first that is held, and
those behind are taken as any other is. Every other well-formed frame from a known node (READ, MISS,
OFFER, DATA of which no copy is chosen, of another copy, or from elsewhere) stops the work, so that
whoever decides does so in the order in which frames came: first what has arrived until then, then
that frame. What is malformed, for another node, or from nobody known is counted and left.

A copy that leaves the table is written to no more. What Python has not heard of it by then it hears
under a `serial` that nobody knows any more.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any, Final, NamedTuple

from kvcast.native.subset import (
    U32,
    U64,
    Library,
    Ptr,
    Struct,
    bytes_at,
    copy,
    ctypes_of,
    indirect,
    native,
    u16_at,
    u32_at,
    u64_at,
)
from kvcast.protocol.messages.ethernet import (
    FRAGMENT_BITS,
    FRAME_OVERHEAD_BYTES,
    VERSION_IHL,
    Endpoint,
)
from kvcast.protocol.messages.offsets import (
    CHUNK_AT,
    DIGEST_AT,
    FLAGS_AT,
    GATHER_AT,
    KEY_AT,
    NAMESPACE_AT,
    OP_AT,
    SEGMENT_AT,
    SIZE_AT,
    TAG_AT,
    VERSION_AT,
    WANTED_AT,
)
from kvcast.protocol.messages.wire import (
    CHUNK_BYTES,
    CHUNKS_PER_SEGMENT,
    DATA_FLAGS,
    ETHERNET,
    ETHERTYPE_IPV4,
    FLAG_LAST,
    FLAG_PADDED,
    FLAG_PARTIAL,
    FLAG_RETRY,
    FLAG_SHARED,
    FLAG_WRITE,
    HEADER_BYTES,
    IP_PROTOCOL_UDP,
    IPV4,
    MISS_FLAGS,
    MISS_NO_WRITE,
    MISS_NOT_FOUND,
    OFFER_BYTES,
    OP_DATA,
    OP_MISS,
    OP_OFFER,
    OP_READ,
    OP_WRITTEN,
    READ_FLAGS,
    READ_PADDING_BYTES,
    SEGMENT_BYTES,
    SEGMENT_INDEX_BITS,
    UDP,
    VERSION,
    WRITE_CODE,
    BlockId,
    Chunking,
    Header,
)

ARRIVALS: Final = 64
"""Arrivals that are kept until Python takes them; at the bound it is asked to."""
HELD: Final = 32
"""Ends of answers by RDMA that are held; at the bound Python looks at the next at once."""
_AT_ONCE: Final = 2
"""Python hears of segments that came by RDMA when they are this part of those that it awaits."""
_at: Final = Header.offset_of

_LEAD: Final = FRAME_OVERHEAD_BYTES
_ETHER_TYPE_AT: Final = _at(ETHERNET, "ether_type")
_IP_AT: Final = ETHERNET.size_bytes
_TOTAL_LENGTH_AT: Final = _IP_AT + _at(IPV4, "total_length")
_FRAGMENT_AT: Final = _IP_AT + _at(IPV4, "flags")
_PROTOCOL_AT: Final = _IP_AT + _at(IPV4, "protocol")
_SOURCE_IP_AT: Final = _IP_AT + _at(IPV4, "src")
_OWN_IP_AT: Final = _IP_AT + _at(IPV4, "dst")
_UDP_AT: Final = _IP_AT + IPV4.size_bytes
_OWN_PORT_AT: Final = _UDP_AT + _at(UDP, "dst_port")
_UDP_LENGTH_AT: Final = _UDP_AT + _at(UDP, "length")
_UDP_CHECKSUM_AT: Final = _UDP_AT + _at(UDP, "checksum")
_IP_HEADER_BYTES: Final = IPV4.size_bytes
_FULL: Final = (1 << 64) - 1
_INDEX: Final = (1 << SEGMENT_INDEX_BITS) - 1
_NOBODY: Final = 0xFFFF_FFFF

# What `place` returns: all pieces are used up; Python is to take what there is, and to call again;
# the same, and to look at a frame.
ALL_PLACED: Final = 0
GO_ON: Final = 1
FRAME_FOR_PYTHON: Final = 2


class Piece(Struct):
    """Datagrams side by side, each of `stride` bytes, the last perhaps of less."""

    address: U64
    length: U32
    """All of it, in bytes."""
    stride: U32
    """0: it is one datagram."""
    sender: U32
    """The IPv4 address that it came from; of no meaning where Ethernet frames are unwrapped."""
    padding: U32


class Copy(Struct):
    """A copy of a block that is being put together. Numbers are as they lie in a header."""

    serial: U64
    key: U64
    rest_of_key: U64
    digest: U64
    namespace: U32
    size: U32
    """In this machine's order: bytes of the block."""
    address: U64
    """Where the block's first byte goes."""
    missing: Ptr[U64]
    """By segment, the chunks that have not arrived."""
    sources: Ptr[U32]
    """The nodes that are listened to."""
    source_count: U64
    chunk_code: U64
    """How it is cut (`wire.Chunking`)."""


class Arrival(Struct):
    """DATA frames in a row that agree in everything but the chunk, and that none but the last of
    which may carry FLAG_LAST."""

    serial: U64
    added: U64
    """The chunks that were not there."""
    missing: U64
    """The chunks of the segment that are not there now."""
    segment: U32
    """Its index."""
    source: U32
    flags: U32
    """Without FLAG_LAST."""
    tag: U32
    frames: U32
    last: U32
    """Whether the last frame carries FLAG_LAST: _NOT_LAST, _LAST_AGAIN (its chunk was there), or
    _LAST_NEW."""


_NOT_LAST: Final = 0
_LAST_AGAIN: Final = 1
_LAST_NEW: Final = 2


class KnownNode(Struct):
    """An address and the node that has it; node _NOBODY: a free place."""

    ip: U32
    node: U32


class Table(Struct):
    """All that `place` works on."""

    index: Ptr[U32]
    """Open addressing by block: the number of a copy, plus 1; 0 = free. At most half is in use."""
    index_mask: U64
    seed: U64
    copies: Ptr[Copy]
    nodes: Ptr[KnownNode]
    """Open addressing by address; at most half is in use."""
    nodes_mask: U64
    lead: U64
    """Bytes of Ethernet, IPv4 and UDP in front of a datagram: 0, or _LEAD."""
    own_mac: U32
    own_mac_rest: U32
    own_ip: U32
    own_port: U32
    piece: U64
    """The piece that is next,"""
    offset: U64
    """and where in it."""
    arrivals: Ptr[Arrival]
    arrival_count: U64
    asks_more: U64
    """Whether Python asks for more when it hears of segments that have come by RDMA."""
    hurry: U64
    """Whether Python had better hear of the arrivals at once (`_need_not_hurry` says when not)."""
    held: U64
    """Ends of answers that are held, as they came,"""
    held_sources: Ptr[U32]
    """the nodes that they are from,"""
    held_count: U64
    held_next: U64
    """and the one that is next when they are taken."""
    frame: U64
    """The datagram that Python is to look at,"""
    frame_length: U32
    frame_source: U32
    """and the node that it is from;"""
    frame_taken: U64
    """whether somebody else has looked at it."""
    landing: U64
    """What puts chunks that came by RDMA in their places (see `call_landing`); 0 = nothing,"""
    landing_of: U64
    """and its first argument."""
    frames: U64
    malformed: U64
    misaddressed: U64
    unknown_source: U64


# --- numbers on the wire ----------------------------------------------------------------------


@native
def _u16(at: U64) -> U64:
    """A number of 16 bits in network order."""
    b = bytes_at(at)
    return (b[0] << 8) | b[1]


@native
def _u32(at: U64) -> U64:
    """A number of 32 bits in network order."""
    b = bytes_at(at)
    return (b[0] << 24) | (b[1] << 16) | (b[2] << 8) | b[3]


# --- how a block is cut -----------------------------------------------------------------------


@native
def segment_bytes(index: U64, chunk_bytes: U64) -> U64:
    """How long a segment can be."""
    return SEGMENT_BYTES if index == 0 else CHUNKS_PER_SEGMENT * chunk_bytes


@native
def segment_start(index: U64, chunk_bytes: U64) -> U64:
    """Where a segment begins in its block, in bytes."""
    if index == 0:
        return 0
    return SEGMENT_BYTES + (index - 1) * CHUNKS_PER_SEGMENT * chunk_bytes


# --- what is well-formed ----------------------------------------------------------------------


@native
def well_formed(at: U64, length: U64) -> bool:
    """Whether `wire.decode` takes these bytes."""
    if length < HEADER_BYTES:
        return False
    b = bytes_at(at)
    if b[VERSION_AT] != VERSION:
        return False
    op = 0 + b[OP_AT]
    flags = _u16(at + FLAGS_AT)
    size = _u32(at + SIZE_AT)
    chunk = 0 + b[CHUNK_AT]
    gather = 0 + b[GATHER_AT]
    wanted = u64_at(at + WANTED_AT)[0]
    if op == OP_DATA:
        segment = _u16(at + SEGMENT_AT)
        chunk_bytes = CHUNK_BYTES << (segment >> SEGMENT_INDEX_BITS)
        if length != HEADER_BYTES + chunk_bytes or (flags & ~DATA_FLAGS) != 0:
            return False
        longest = segment_bytes(segment & _INDEX, chunk_bytes)
        start = segment_start(segment & _INDEX, chunk_bytes) + chunk * chunk_bytes
        if chunk * chunk_bytes >= longest or start >= size:
            return False
        return u64_at(at + DIGEST_AT)[0] != 0 and gather == 0 and wanted == 0
    if op == OP_READ:
        expected = 0 + HEADER_BYTES
        if flags & FLAG_PADDED:
            expected += READ_PADDING_BYTES
        if length != expected or (flags & ~READ_FLAGS) != 0 or wanted == 0:
            return False
        if flags & FLAG_WRITE:
            code = _u16(at + SEGMENT_AT) >> SEGMENT_INDEX_BITS
            if (flags & (FLAG_PARTIAL | FLAG_PADDED)) != 0 or code != WRITE_CODE:
                return False
        partial = flags & FLAG_PARTIAL
        if wanted == _FULL and partial != 0:
            return False
        if wanted != _FULL and partial == 0:
            return False
        return (partial == 0 or (flags & FLAG_RETRY) == 0) and size == 0 and chunk == 0
    if op == OP_MISS:
        if length != HEADER_BYTES or (flags & ~MISS_FLAGS) != 0:
            return False
        reason_holds = chunk >= MISS_NOT_FOUND and chunk <= MISS_NO_WRITE
        return reason_holds and size == 0 and gather == 0 and wanted == 0
    if op == OP_OFFER:
        if length != HEADER_BYTES + OFFER_BYTES or flags != 0:
            return False
        if size == 0 or u64_at(at + DIGEST_AT)[0] == 0:
            return False
        return chunk == 0 and gather == 0 and wanted == 0
    if op == OP_WRITTEN:
        segment = _u16(at + SEGMENT_AT)
        if length != HEADER_BYTES or (flags & ~FLAG_SHARED) != FLAG_WRITE:
            return False
        if (segment >> SEGMENT_INDEX_BITS) != WRITE_CODE or u64_at(at + DIGEST_AT)[0] == 0:
            return False
        if segment_start(segment & _INDEX, CHUNK_BYTES << WRITE_CODE) >= size:
            return False
        return chunk == 0 and gather == 0 and wanted == 0
    return False


@native
def sum_of_words(at: U64, length: U64) -> U64:
    """The sum of 16-bit words (RFC 1071), an odd byte filled up with a zero, in this machine's
    order: it is a multiple of 0xFFFF in both orders or in none."""
    words = u16_at(at)
    total = 0
    for i in range(length // 2):
        total += words[i]
    if length & 1:
        total += bytes_at(at)[length - 1]
    return total


@native
def unwrapped_end(at: U64, length: U64) -> U64:
    """Where the UDP datagram ends in an Ethernet frame that `ethernet.unwrap` takes; else 0."""
    if length < _LEAD or _u16(at + _ETHER_TYPE_AT) != ETHERTYPE_IPV4:
        return 0
    b = bytes_at(at)
    if b[_IP_AT] != VERSION_IHL or (_u16(at + _FRAGMENT_AT) & FRAGMENT_BITS) != 0:
        return 0
    if b[_PROTOCOL_AT] != IP_PROTOCOL_UDP:
        return 0
    if sum_of_words(at + _IP_AT, _IP_HEADER_BYTES) % 0xFFFF != 0:
        return 0
    total = _u16(at + _TOTAL_LENGTH_AT)
    end = _IP_AT + total
    if end > length or end < _LEAD:
        return 0
    if _u16(at + _UDP_LENGTH_AT) != total - _IP_HEADER_BYTES:
        return 0
    if u16_at(at + _UDP_CHECKSUM_AT)[0] != 0:
        udp = sum_of_words(at + _UDP_AT, end - _UDP_AT)
        # The pseudo-header's protocol and length, as this machine reads them from the wire.
        length_word = u16_at(at + _UDP_LENGTH_AT)[0]
        pseudo = sum_of_words(at + _SOURCE_IP_AT, 8) + (IP_PROTOCOL_UDP << 8) + length_word
        if (udp + pseudo) % 0xFFFF != 0:
            return 0
    return end


# --- who, and which copy ----------------------------------------------------------------------


@native
def _node_of(t: Table, ip: U64) -> U64:
    """The node that has this address, or _NOBODY."""
    place = (ip * 0x9E3779B97F4A7C15 >> 32) & t.nodes_mask
    while True:
        known = t.nodes[place]
        if known.node == _NOBODY or known.ip == ip:
            return 0 + known.node
        place = (place + 1) & t.nodes_mask


@native
def know_node(t: Table, ip: U32, node: U32) -> None:
    """Add an address that is not there yet; there is room."""
    place = (ip * 0x9E3779B97F4A7C15 >> 32) & t.nodes_mask
    while t.nodes[place].node != _NOBODY:
        place = (place + 1) & t.nodes_mask
    t.nodes[place].ip = ip
    t.nodes[place].node = node


@native
def _place_of(t: Table, namespace: U64, key: U64, rest: U64) -> U64:
    """Where the search for a block begins."""
    mixed = (key ^ t.seed) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29) ^ rest) * 0xC2B2AE3D27D4EB4F
    mixed = (mixed ^ (mixed >> 31) ^ namespace) * 0x165667B19E3779F9
    return (mixed >> 24) & t.index_mask


@native
def find_copy(t: Table, at: U64) -> U64:
    """The number of the copy of the block that a datagram is about, plus 1; 0 = none."""
    namespace = u16_at(at + NAMESPACE_AT)[0]
    key = u64_at(at + KEY_AT)[0]
    rest = u64_at(at + KEY_AT + 8)[0]
    place = _place_of(t, namespace, key, rest)
    while True:
        number = 0 + t.index[place]
        if number == 0:
            return 0
        found = t.copies[number - 1]
        if found.key == key and found.rest_of_key == rest and found.namespace == namespace:
            return number
        place = (place + 1) & t.index_mask


@native
def enter_copy(t: Table, number: U32) -> None:
    """Let the copy of that number be found; there is room, and none of that block yet."""
    entered = t.copies[number]
    place = _place_of(t, entered.namespace, entered.key, entered.rest_of_key)
    while t.index[place] != 0:
        place = (place + 1) & t.index_mask
    t.index[place] = number + 1


@native
def leave_copy(t: Table, number: U32) -> None:
    """Let the copy of that number, which is there, be found no more."""
    gone = t.copies[number]
    hole = _place_of(t, gone.namespace, gone.key, gone.rest_of_key)
    while t.index[hole] != number + 1:
        hole = (hole + 1) & t.index_mask
    # Whoever stands behind the hole and began its search at or before it moves up.
    place = hole
    while True:
        t.index[hole] = 0
        while True:
            place = (place + 1) & t.index_mask
            other = 0 + t.index[place]
            if other == 0:
                return
            moved = t.copies[other - 1]
            home = _place_of(t, moved.namespace, moved.key, moved.rest_of_key)
            if ((place - home) & t.index_mask) >= ((place - hole) & t.index_mask):
                break
        t.index[hole] = other
        hole = 0 + place


@native
def _is_of(of: Copy, at: U64) -> bool:
    """Whether a well-formed DATA of the copy's block is of this copy, and cut as it is."""
    same = of.digest == u64_at(at + DIGEST_AT)[0] and of.size == _u32(at + SIZE_AT)
    return same and (_u16(at + SEGMENT_AT) >> SEGMENT_INDEX_BITS) == of.chunk_code


@native
def _is_source(of: Copy, node: U64) -> bool:
    listened = False
    for i in range(of.source_count):
        if of.sources[i] == node:
            listened = True
    return listened


# --- placing ----------------------------------------------------------------------------------


@native
def _put(t: Table, to: Copy, at: U64, source: U64) -> None:
    """Put the payload of a well-formed DATA of this copy where it belongs, once, and note it."""
    t.hurry = 1
    segment = _u16(at + SEGMENT_AT) & _INDEX
    chunk = 0 + bytes_at(at)[CHUNK_AT]
    chunk_bytes = CHUNK_BYTES << to.chunk_code
    flags = _u16(at + FLAGS_AT)
    bit = 1 << chunk
    missing = 0 + to.missing[segment]
    added = missing & bit
    if added != 0:
        start = segment_start(segment, chunk_bytes) + chunk * chunk_bytes
        length = to.size - start
        if length > chunk_bytes:
            length = 0 + chunk_bytes
        copy(to.address + start, at + HEADER_BYTES, length)
        missing ^= bit
        to.missing[segment] = missing
    last = _NOT_LAST
    if flags & FLAG_LAST:
        last = _LAST_NEW if added != 0 else _LAST_AGAIN
        flags ^= FLAG_LAST
    tag = _u32(at + TAG_AT)
    if t.arrival_count != 0:
        before = t.arrivals[t.arrival_count - 1]
        same_copy = before.serial == to.serial and before.segment == segment
        same_answer = before.source == source and before.tag == tag and before.flags == flags
        if same_copy and same_answer and before.last == _NOT_LAST:
            before.added |= added
            before.missing = missing
            before.frames += 1
            before.last = last
            return
    new = t.arrivals[t.arrival_count]
    t.arrival_count += 1
    new.serial = to.serial
    new.added = added
    new.missing = missing
    new.segment = segment
    new.source = source
    new.flags = flags
    new.tag = tag
    new.frames = 1
    new.last = last


@native
def put_frame(t: Table, number: U32, at: U64, length: U32, source: U32) -> bool:
    """Put one DATA in its place, whoever sent it, if it is well-formed and of the copy of that
    number."""
    if not well_formed(at, length) or bytes_at(at)[OP_AT] != OP_DATA:
        return False
    if find_copy(t, at) != number + 1:
        return False
    to = t.copies[number]
    if not _is_of(to, at):
        return False
    _put(t, to, at, source)
    return True


@indirect
def call_landing(
    address: U64, of: U64, first: U64, tag: U64, missing: U64, to: U64, size: U64
) -> U64:
    """Put the chunks that are missing of a segment in their places, if all of them have come by
    RDMA, and are those of the READ with that tag; `first`: the immediate of the first chunk, `to`
    and `size`: of what is there of the block from the segment on. 0: they are not, or the segment
    is not awaited by RDMA; else how many segments are, this one included."""
    raise NotImplementedError


@native
def _are_enough(t: Table, awaited: U64) -> bool:
    """Whether enough of what is awaited by RDMA has come for Python to hear of it."""
    return _AT_ONCE * (t.arrival_count + t.held_count) >= awaited


@native
def _need_not_hurry(t: Table, to: Copy, awaited: U64) -> bool:
    """Whether Python may hear later that a segment has come by RDMA: more of its block is missing,
    and most of what was asked for is still on its way. Then the link does not rest for it, and
    Python asks for several segments at once, instead of waking for each. Where it has nothing more
    to ask for, it hears when the block is there."""
    if to.size <= SEGMENT_BYTES or (t.asks_more != 0 and _are_enough(t, awaited)):
        return False
    segment_length = CHUNKS_PER_SEGMENT * (CHUNK_BYTES << to.chunk_code)
    segment = (to.size - SEGMENT_BYTES + segment_length - 1) // segment_length
    while to.missing[segment] == 0:
        if segment == 0:
            return False
        segment -= 1
    return True


@native
def _hold(t: Table, at: U64, source: U64) -> bool:
    """Hold the end of an answer by RDMA that is awaited and of which no copy is chosen."""
    if t.landing == 0 or t.held_count == HELD:
        return False
    tag = _u32(at + TAG_AT)
    first = (_u16(at + NAMESPACE_AT) << 16) ^ tag
    awaited = call_landing(t.landing, t.landing_of, first, tag, 0, 0, 0)
    if awaited == 0:
        return False
    copy(t.held + t.held_count * HEADER_BYTES, at, HEADER_BYTES)
    t.held_sources[t.held_count] = source
    t.held_count += 1
    if _u32(at + SIZE_AT) <= SEGMENT_BYTES or _are_enough(t, awaited):
        t.hurry = 1
    return True


@native
def take_again(t: Table, number: U64) -> bool:
    """Take what was held under that number, if a copy of its block is chosen by now."""
    at = t.held + number * HEADER_BYTES
    return find_copy(t, at) != 0 and _take_written(t, at, t.held_sources[number])


@native
def take_held(t: Table) -> U64:
    """Go on with what is held, up to what Python is to look at: its number, plus 1; 0 = nothing is
    held any more."""
    while t.held_next < t.held_count:
        number = 0 + t.held_next
        t.held_next += 1
        if not take_again(t, number):
            return number + 1
    t.held_next = 0
    t.held_count = 0
    t.hurry = 0
    return 0


@native
def _take_written(t: Table, at: U64, source: U64) -> bool:
    """Take the end of an answer by RDMA if that completes its segment, or hold it; else Python
    looks at it."""
    number = find_copy(t, at)
    if number == 0:
        return _hold(t, at, source)
    if t.landing == 0 or t.arrival_count == ARRIVALS:
        return False
    to = t.copies[number - 1]
    if not _is_of(to, at) or not _is_source(to, source):
        return False
    segment = _u16(at + SEGMENT_AT) & _INDEX
    start = segment_start(segment, CHUNK_BYTES << to.chunk_code)
    missing = 0 + to.missing[segment]
    tag = _u32(at + TAG_AT)
    first = (_u16(at + NAMESPACE_AT) << 16) ^ tag
    if missing == 0:
        return False
    awaited = call_landing(
        t.landing, t.landing_of, first, tag, missing, to.address + start, to.size - start
    )
    if awaited == 0:
        return False
    to.missing[segment] = 0
    new = t.arrivals[t.arrival_count]
    t.arrival_count += 1
    new.serial = to.serial
    new.added = missing
    new.missing = 0
    new.segment = segment
    new.source = source
    new.flags = _u16(at + FLAGS_AT)
    new.tag = tag
    new.frames = 0
    while missing != 0:
        missing &= missing - 1
        new.frames += 1
    new.last = _LAST_NEW
    if not _need_not_hurry(t, to, awaited):
        t.hurry = 1
    return True


@native
def _take(t: Table, frame: U64, length: U64, sender: U64) -> bool:
    """Take one datagram; True = Python is to look at it."""
    t.frames += 1
    at = frame + t.lead
    ip = 0 + sender
    if t.lead != 0:
        end = unwrapped_end(frame, length)
        if end == 0:
            t.malformed += 1
            return False
        own = u32_at(frame)[0] == t.own_mac and u16_at(frame + 4)[0] == t.own_mac_rest
        if (
            not own
            or _u32(frame + _OWN_IP_AT) != t.own_ip
            or _u16(frame + _OWN_PORT_AT) != t.own_port
        ):
            t.misaddressed += 1
            return False
        length = end - _LEAD
        ip = _u32(frame + _SOURCE_IP_AT)
    if not well_formed(at, length):
        t.malformed += 1
        return False
    source = _node_of(t, ip)
    if source == _NOBODY:
        t.unknown_source += 1
        return False
    if bytes_at(at)[OP_AT] == OP_DATA:
        number = find_copy(t, at)
        if number != 0:
            to = t.copies[number - 1]
            if _is_of(to, at) and _is_source(to, source):
                _put(t, to, at, source)
                return False
    elif bytes_at(at)[OP_AT] == OP_WRITTEN and _take_written(t, at, source):
        return False
    t.frame = at
    t.frame_length = length
    t.frame_source = source
    return True


@native
def place(t: Table, pieces: Ptr[Piece], count: U32) -> U32:
    """Go on with these pieces, up to a frame that Python is to look at."""
    while t.piece < count:
        piece = pieces[t.piece]
        while True:
            if t.arrival_count == ARRIVALS:
                return GO_ON
            left = piece.length - t.offset
            length = 0 + piece.stride
            if length == 0 or length > left:
                length = 0 + left
            at = piece.address + t.offset
            t.offset += length
            stops = _take(t, at, length, piece.sender)
            if t.offset >= piece.length:
                t.piece += 1
                t.offset = 0
                if stops:
                    return FRAME_FOR_PYTHON
                break
            if stops:
                return FRAME_FOR_PYTHON
    return ALL_PLACED


# --- Python's side ----------------------------------------------------------------------------


class Arrived(NamedTuple):
    """An `Arrival`, for Python."""

    serial: int
    added: int
    missing: int
    segment: int
    source: int
    flags: int
    tag: int
    frames: int
    last: int

    @property
    def ends_anew(self) -> bool:
        """Whether the last frame carries FLAG_LAST and its chunk was not there."""
        return self.last == _LAST_NEW


_as_arrived: Final[Callable[[tuple[int, ...]], Arrived]] = partial(tuple.__new__, Arrived)
"""As `Arrived._make`, but without Python for each."""


class Counts(NamedTuple):
    """Frames since the last time."""

    frames: int
    """All, those below included."""
    malformed: int
    misaddressed: int
    unknown_source: int


_COPY: Final = struct.Struct("=Q16s8s2s2xI5Q")
"""A `Copy`; key, digest and namespace as they lie in a header."""
assert _COPY.size == ctypes.sizeof(ctypes_of(Copy))
_ARRIVAL: Final = struct.Struct("=QQQIIIIII")
assert _ARRIVAL.size == ctypes.sizeof(ctypes_of(Arrival))


class _Compiled(NamedTuple):
    place: Callable[[int, int, int], int]
    put_frame: Callable[[int, int, int, int, int], bool]
    enter_copy: Callable[[int, int], None]
    leave_copy: Callable[[int, int], None]
    take_again: Callable[[int, int], bool]
    take_held: Callable[[int], int]
    know_node: Callable[[int, int, int], None]


@cache
def compiled() -> _Compiled:
    """The compiled functions; made, or read from the cache on disk, when first asked for."""
    functions = (place, put_frame, enter_copy, leave_copy, take_again, take_held, know_node)
    library = Library(*functions)
    return _Compiled(*(library.call(function) for function in functions))


def address_of_buffer(buffer: memoryview | bytearray) -> int:
    """Where a writable buffer of at least one byte lies; it must stay there while that is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Placement:
    """The table of one requester. Grows with the copies that are in it."""

    def __init__(self, *, seed: int = 0) -> None:
        """`seed`, of 64 bits, keeps whoever chooses keys from choosing where they meet in the
        table."""
        self._code = compiled()
        self._table: Any = ctypes_of(Table)()
        self.address = ctypes.addressof(self._table)
        """Where the table lies, for compiled code."""
        self.table = self._table
        self.before_python: Callable[[int], bool] = lambda _why: False
        """Asked before anything is told, with what `place` has returned: takes what is its own of
        the arrivals, and says whether the frame at which the work stopped is its own, too."""
        self.choose: Callable[[int, bytes], bool] = lambda _node, _datagram: False
        """Told of the end of an answer by RDMA (node, datagram) that was held: chooses the copy
        that it is of. True = that cannot be, and what follows from it is done."""
        self._arrivals = (ctypes_of(Arrival) * ARRIVALS)()
        self._arrivals_view = memoryview(self._arrivals).cast("B")
        self._table.arrivals = ctypes.addressof(self._arrivals)
        self._held = bytearray(HELD * HEADER_BYTES)
        self._held_sources = array("I", bytes(4 * HELD))
        self._table.held = address_of_buffer(self._held)
        self._table.held_sources = self._held_sources.buffer_info()[0]
        self._table.asks_more = 1
        self._table.seed = seed
        self._next_serial = 1
        self._kept: dict[int, tuple[array[int], array[int]]] = {}  # bitmaps and sources
        self._free: list[int] = []
        self._copies: Any = None
        self._grow(16)
        self.know({})

    # --- copies

    def _grow(self, room: int) -> None:
        old = self._copies
        self._copies = (ctypes_of(Copy) * room)()
        self._index = (ctypes.c_uint32 * (2 * room))()
        self._table.copies = ctypes.addressof(self._copies)
        self._table.index = ctypes.addressof(self._index)
        self._table.index_mask = 2 * room - 1
        before = 0
        if old is not None:
            before = len(old)
            ctypes.memmove(self._copies, old, ctypes.sizeof(old))
            for number in range(before):
                if self._copies[number].serial:
                    self._code.enter_copy(self.address, number)
        self._free.extend(range(room - 1, before - 1, -1))

    def enter(
        self,
        block: BlockId,
        size: int,
        digest: int,
        buffer: memoryview,
        chunking: Chunking,
        sources: Collection[int],
    ) -> tuple[int, int, list[int]]:
        """Let DATA of this copy, cut like that, go into `buffer`, of `size` bytes, which stays
        where it is until `leave`: (number, serial, by segment all chunks)."""
        if not self._free:
            self._grow(2 * len(self._copies))
        number = self._free.pop()
        count = chunking.segments_of(size)
        chunks = [_FULL] * count
        chunks[0], chunks[-1] = chunking.bitmap(size, 0), chunking.bitmap(size, count - 1)
        missing = array("Q", chunks)
        listened = array("I", sources)
        serial = self._next_serial
        self._next_serial += 1
        _COPY.pack_into(
            self._copies,
            number * _COPY.size,
            serial,
            block.key,
            digest.to_bytes(8, "big"),
            block.namespace.to_bytes(2, "big"),
            size,
            address_of_buffer(buffer),
            missing.buffer_info()[0],
            listened.buffer_info()[0],
            len(listened),
            chunking.code,
        )
        self._kept[number] = (missing, listened)
        self._code.enter_copy(self.address, number)
        return number, serial, chunks

    def listen(self, number: int, sources: Collection[int]) -> None:
        """Take DATA of this copy from these nodes."""
        nodes = array("I", sources)
        entered = self._copies[number]
        entered.source_count = 0
        entered.sources = nodes.buffer_info()[0]
        entered.source_count = len(sources)
        self._kept[number] = (self._kept[number][0], nodes)

    def put_written(
        self,
        number: int,
        segment: int,
        chunks: int,
        slot: memoryview,
        flags: int,
        tag: int,
        source: int,
        *,
        last: bool,
    ) -> Arrived:
        """Put those of `chunks` that are not there yet in their places, from where they lie side by
        side in `slot`. Arrivals until now must have been taken."""
        missing = self._kept[number][0]
        to = self._copies[number]
        chunk_bytes = CHUNK_BYTES << to.chunk_code
        start = SEGMENT_BYTES + (segment - 1) * CHUNKS_PER_SEGMENT * chunk_bytes if segment else 0
        added = missing[segment] & chunks
        address, left = address_of_buffer(slot), added
        while left:
            first = (left & -left).bit_length() - 1
            run = (~(left >> first) & -~(left >> first)).bit_length() - 1
            left &= ~(((1 << run) - 1) << first)
            at, end = start + first * chunk_bytes, start + (first + run) * chunk_bytes
            ctypes.memmove(to.address + at, address + first * chunk_bytes, min(end, to.size) - at)
        missing[segment] &= ~added
        ended = _NOT_LAST if not last else _LAST_NEW if added else _LAST_AGAIN
        return Arrived(
            to.serial,
            added,
            missing[segment],
            segment,
            source,
            flags,
            tag,
            chunks.bit_count(),
            ended,
        )

    def listens_to(self, number: int) -> frozenset[int]:
        """The nodes that DATA of this copy is taken from."""
        return frozenset(self._kept[number][1])

    def leave(self, number: int) -> None:
        """Let nothing of this copy be written any more."""
        self._code.leave_copy(self.address, number)
        self._copies[number].serial = 0
        del self._kept[number]
        self._free.append(number)

    def __len__(self) -> int:
        return len(self._kept)

    # --- copies that compiled code enters, and takes out again, by itself

    def lend(self, count: int) -> list[int]:
        """Numbers of copies that are not used here any more. Whoever has them sets the serial to 0
        of what has left the table, and to what none of ours is of what is in it."""
        while len(self._free) < count:
            self._grow(2 * len(self._copies))
        return [self._free.pop() for _ in range(count)]

    def aim(self, number: int, address: int, missing: int, sources: int) -> None:
        """Where the bytes of a lent copy go, its bitmap and its sources lie; it is not in the
        table."""
        copy = self._copies[number]
        assert not copy.serial
        copy.address, copy.missing, copy.sources = address, missing, sources

    # --- nodes

    def know(self, index_by_ip: Mapping[int, int]) -> None:
        """Who has which address (IPv4, 32-bit integer); nobody else is listened to."""
        room = 16
        while room < 2 * len(index_by_ip):
            room *= 2
        nodes = (ctypes_of(KnownNode) * room)()
        ctypes.memset(nodes, 0xFF, ctypes.sizeof(nodes))
        self._nodes = nodes
        self._table.nodes = ctypes.addressof(nodes)
        self._table.nodes_mask = room - 1
        for ip, node in index_by_ip.items():
            self._code.know_node(self.address, ip, node)

    def unwrap_for(self, own: Endpoint) -> None:
        """From now on datagrams come as Ethernet frames, and only what is sent to `own` is
        taken."""
        table = self._table
        table.lead = _LEAD
        table.own_mac = int.from_bytes(own.mac[:4], "little")
        table.own_mac_rest = int.from_bytes(own.mac[4:], "little")
        table.own_ip = own.ip
        table.own_port = own.udp_port

    # --- frames

    def put(self, number: int, datagram: bytes, source: int) -> Arrived | None:
        """Put one DATA in its place, whoever sent it; None if it is none of this copy."""
        buffer = ctypes.create_string_buffer(datagram, len(datagram))
        at = ctypes.addressof(buffer)
        if not self._code.put_frame(self.address, number, at, len(datagram), source):
            return None
        (arrived,) = self._take_arrivals()
        return arrived

    def place(
        self,
        pieces: int,
        count: int,
        arrived: Callable[[list[Arrived]], None],
        frame: Callable[[int, bytes], None],
        *,
        instead: Callable[[int, int, int], int] | None = None,
    ) -> None:
        """Take `count` pieces, which lie at the address `pieces`. `arrived` is told of what was put
        in its place, and `frame` (node, datagram) of what Python is to look at, in the order in
        which they came. `instead` is called instead of the compiled `place`, and does what that
        does, and more."""
        table = self._table
        code = self._code.place if instead is None else instead
        table.piece = table.offset = 0
        why = code(self.address, pieces, count)
        table.frame_taken = self.before_python(why)
        self.go_on(why, pieces, count, arrived, frame, instead=instead)

    def go_on(
        self,
        why: int,
        pieces: int,
        count: int,
        arrived: Callable[[list[Arrived]], None],
        frame: Callable[[int, bytes], None],
        *,
        instead: Callable[[int, int, int], int] | None = None,
    ) -> None:
        """The rest of `place`, where compiled code has begun, and stopped because of `why`."""
        table = self._table
        code = self._code.place if instead is None else instead
        while True:
            if table.held_count:
                self._go_on_with_held(arrived, frame)
            if table.arrival_count:
                arrived(self._take_arrivals())
            if why == ALL_PLACED:
                return
            if why == FRAME_FOR_PYTHON and not table.frame_taken:
                frame(table.frame_source, ctypes.string_at(table.frame, table.frame_length))
            why = code(self.address, pieces, count)
            table.frame_taken = self.before_python(why)

    def _go_on_with_held(
        self, arrived: Callable[[list[Arrived]], None], frame: Callable[[int, bytes], None]
    ) -> None:
        while (number := self._code.take_held(self.address)) != 0:
            at = (number - 1) * HEADER_BYTES
            source = self._held_sources[number - 1]
            datagram = bytes(self._held[at : at + HEADER_BYTES])
            if self.choose(source, datagram) or self._code.take_again(self.address, number - 1):
                continue
            if self._table.arrival_count:
                arrived(self._take_arrivals())
            frame(source, datagram)

    def place_bytes(
        self,
        data: bytes,
        arrived: Callable[[list[Arrived]], None],
        frame: Callable[[int, bytes], None],
        *,
        stride: int = 0,
        sender: int = 0,
        instead: Callable[[int, int, int], int] | None = None,
    ) -> None:
        """The same for one piece that lies anywhere."""
        buffer = ctypes.create_string_buffer(data, max(1, len(data)))
        piece = ctypes_of(Piece)(ctypes.addressof(buffer), len(data), stride, sender)
        self.place(ctypes.addressof(piece), 1, arrived, frame, instead=instead)

    def ask_more(self, *, more: bool) -> None:
        """Whether there is more to ask for as soon as something has come; so it is at first."""
        self._table.asks_more = more

    def use_landing(self, landing: int, of: int) -> None:
        """What puts chunks that came by RDMA in their places (`call_landing`), and its first
        argument; 0: nothing does, and Python hears of the ends of such answers."""
        self._table.landing, self._table.landing_of = landing, of

    @property
    def uncounted(self) -> bool:
        """Whether there are any for `take_counts`."""
        return bool(self._table.frames)

    def take_counts(self) -> Counts:
        """Frames since the last time."""
        table = self._table
        counts = Counts(table.frames, table.malformed, table.misaddressed, table.unknown_source)
        table.frames = table.malformed = table.misaddressed = table.unknown_source = 0
        return counts

    def _take_arrivals(self) -> list[Arrived]:
        count = self._table.arrival_count
        self._table.arrival_count = self._table.hurry = 0
        view = self._arrivals_view[: count * _ARRIVAL.size]
        return list(map(_as_arrived, _ARRIVAL.iter_unpack(view)))
