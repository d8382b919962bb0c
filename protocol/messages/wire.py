"""The wire format: what a kvcast datagram looks like, stated once.

Owns: the header's fields and widths, opcodes, flags, the UDP port, the sizes of chunks and
segments, and the codec between a `Frame` and bytes. `kvcast.p4.generate` writes the P4
program's headers from the same tables. Must not know: sockets, Ethernet (see `ethernet.py`),
or what a node does with a frame.

A datagram is the 52-byte kvcast header (big-endian) and a payload: one chunk in DATA, 24 bytes in
OFFER, nothing in MISS and WRITTEN, and in READ nothing or 608 bytes of padding.

A block is cut into chunks of 1 KiB, or of 2, 4 or 8 where the network takes such frames (a
`Chunking`), and these are grouped into segments: the first of 64 KiB, so that a read finds out at
little cost what there is and who else wants it, all others of 64 chunks. How large the chunks are
stands in the two highest bits of the segment's number, so that READs of different chunks are READs
of different segments to everybody who does not look into them: a switch coalesces each kind for
itself.
What a peer may send is checked here, and anything else is a `WireError`, so that the cores behind
this module may rely on every frame being consistent in itself.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, TypeAlias

import msgspec
import xxhash

# --- numbers --------------------------------------------------------------------------------

UDP_PORT: Final = 19286
"""0x4B56, "KV": the destination port by which a switch knows a kvcast datagram."""
VERSION: Final = 1

CHUNK_BYTES: Final = 1024
"""Payload of one DATA frame at an MTU of 1500, and of a cell of switch memory."""
CHUNKS_PER_SEGMENT: Final = 64
"""One 64-bit bitmap a segment."""
SEGMENT_BYTES: Final = CHUNK_BYTES * CHUNKS_PER_SEGMENT
FULL_SEGMENT: Final = (1 << CHUNKS_PER_SEGMENT) - 1
"""As `wanted`: the whole segment, whatever its length (a block's last segment may be short)."""
SEGMENT_INDEX_BITS: Final = 14
"""Of the 16 bits of `segment`; the two above say how large the chunks are."""
MAX_BLOCK_BYTES: Final = SEGMENT_BYTES << SEGMENT_INDEX_BITS
"""1 GiB: what the segments of the smallest chunks can number."""

BUCKET_BITS: Final = 10
BUCKETS: Final = 1 << BUCKET_BITS

KEY_BYTES: Final = 16
READ_PADDING_BYTES: Final = 608
"""Zeros after the header of a PADDED READ. BMv2 cannot grow a packet by more than 512 bytes, and
a READ answered from the switch's memory grows by 1024; two bit<2048> and one bit<768>."""

OP_READ: Final = 1
OP_DATA: Final = 2
OP_MISS: Final = 3
OP_OFFER: Final = 4
OP_WRITTEN: Final = 5
"""The end of an answer whose chunks were written by RDMA (`roce`)."""

FLAG_RETRY: Final = 0x0001
"""READ: a repeat of an unanswered READ of a full segment."""
FLAG_PARTIAL: Final = 0x0002
"""READ: `wanted` is not the full segment. DATA, MISS: answers such a READ."""
FLAG_LAST: Final = 0x0004
"""DATA: the last chunk of this answer."""
FLAG_SHARED: Final = 0x0008
"""DATA, MISS: set by a switch where more than one port waited; DATA also by a home that knows of
another node that is about to READ the block. READ: set by a switch that will
copy the answer to this reader; the home may answer READs so marked together."""
FLAG_PADDED: Final = 0x0010
"""READ: READ_PADDING_BYTES follow the header."""
FLAG_RESIDENT: Final = 0x0020
"""DATA: served from a switch's memory."""
FLAG_WRITE: Final = 0x0040
"""READ: its answer may come by RDMA WRITE into the landing zone (`roce`), chunks are of 4 KiB, and
the tag says the place. WRITTEN, MISS: answers such a READ, and has its tag."""

MISS_NOT_FOUND: Final = 1
MISS_DIGEST_GONE: Final = 2
MISS_OVERLOADED: Final = 3
MISS_NOT_HOME: Final = 4
MISS_CHUNK_SIZE: Final = 5
"""The home's network does not take frames with chunks as large as the READ asks for."""
MISS_NO_WRITE: Final = 6
"""The home cannot answer a READ with FLAG_WRITE by RDMA, now or ever."""

OFFER_TCP: Final = 1
OFFER_RDMA: Final = 2

ETHERTYPE_IPV4: Final = 0x0800
IP_PROTOCOL_UDP: Final = 17


# --- headers --------------------------------------------------------------------------------


class Field(NamedTuple):
    """One header field: its name, width in bits, and what it means."""

    name: str
    bits: int
    doc: str


class Header(NamedTuple):
    """One header as it lies on the wire; `name` is its P4 type."""

    name: str
    doc: str
    fields: tuple[Field, ...]

    @property
    def size_bytes(self) -> int:
        """Length on the wire; every header is a whole number of bytes."""
        return sum(field.bits for field in self.fields) // 8

    def offset_of(self, name: str) -> int:
        """Where a field begins, in bytes."""
        bits = 0
        for field in self.fields:
            if field.name == name:
                return bits // 8
            bits += field.bits
        raise KeyError(name)


ETHERNET: Final = Header(
    "ethernet_h",
    "IEEE 802.3",
    (
        Field("dst", 48, ""),
        Field("src", 48, ""),
        Field("ether_type", 16, ""),
    ),
)

IPV4: Final = Header(
    "ipv4_h",
    "RFC 791, without options",
    (
        Field("version", 4, ""),
        Field("ihl", 4, "5: kvcast datagrams carry no options"),
        Field("dscp", 6, ""),
        Field("ecn", 2, ""),
        Field("total_length", 16, ""),
        Field("identification", 16, ""),
        Field("flags", 3, ""),
        Field("fragment_offset", 13, ""),
        Field("ttl", 8, ""),
        Field("protocol", 8, ""),
        Field("checksum", 16, ""),
        Field("src", 32, ""),
        Field("dst", 32, ""),
    ),
)

UDP: Final = Header(
    "udp_h",
    "RFC 768; checksum 0 (none) in kvcast datagrams",
    (
        Field("src_port", 16, ""),
        Field("dst_port", 16, ""),
        Field("length", 16, ""),
        Field("checksum", 16, ""),
    ),
)

KVCAST: Final = Header(
    "kvcast_h",
    "the kvcast header, after UDP",
    (
        Field("version", 8, "1"),
        Field("op", 8, "OP_*"),
        Field("flags", 16, "FLAG_*"),
        Field("namespace", 16, "tenant, model, version and layout, as assigned by the controller"),
        Field("group", 16, "reader group, 0 = none; DATA echoes the READ's"),
        Field("key", 128, "the block within its namespace"),
        Field("digest", 64, "xxh3_64 of the copy; READ: the copy wanted, 0 = any; MISS: echo"),
        Field("size", 32, "block size in bytes (DATA, OFFER), else 0"),
        Field("segment", 16, "chunks of 1024 << (bits 15, 14) bytes; segment index"),
        Field("chunk", 8, "DATA: index in the segment; MISS: reason; else 0"),
        Field("gather", 8, "READ: ms for which the home may hold its answer for joiners; else 0"),
        Field("wanted", 64, "READ: bit i = chunk i; FULL_SEGMENT = all there are; else 0"),
        Field("tag", 32, "READ: the requester's; echoed in DATA, MISS and OFFER"),
    ),
)

CELL: Final = Header(
    "cell_h",
    "a chunk, as four of the widest words that p4c takes",
    tuple(Field(f"w{i}", 2048, "") for i in range(4)),
)

READ_PADDING: Final = Header(
    "read_padding_h",
    "follows the kvcast header of a PADDED READ",
    (Field("p0", 2048, ""), Field("p1", 2048, ""), Field("p2", 768, "")),
)

OFFER: Final = Header(
    "offer_h",
    "payload of an OFFER: another way to fetch the block",
    (
        Field("kind", 8, "OFFER_*"),
        Field("reserved", 8, "0"),
        Field("port", 16, "TCP port, or 0"),
        Field("ipv4", 32, "where the port listens"),
        Field("token", 64, "rkey (RDMA) or access token (TCP)"),
        Field("address", 64, "remote address (RDMA), else 0"),
    ),
)

HEADERS: Final = (ETHERNET, IPV4, UDP, KVCAST, CELL, READ_PADDING, OFFER)

_STRUCT_CODES: Final = {8: "B", 16: "H", 32: "I", 64: "Q", 128: "16s"}


def _struct_of(header: Header) -> struct.Struct:
    return struct.Struct("!" + "".join(_STRUCT_CODES[field.bits] for field in header.fields))


_KVCAST_STRUCT: Final = _struct_of(KVCAST)
_OFFER_STRUCT: Final = _struct_of(OFFER)
_unpack = _KVCAST_STRUCT.unpack_from
_pack = _KVCAST_STRUCT.pack

HEADER_BYTES: Final = KVCAST.size_bytes
OFFER_BYTES: Final = OFFER.size_bytes
IP_UDP_BYTES: Final = IPV4.size_bytes + UDP.size_bytes

Buffer: TypeAlias = bytes | bytearray | memoryview

# --- chunks and segments --------------------------------------------------------------------


class Chunking(NamedTuple):
    """A way to cut blocks: chunks of `chunk_bytes` = 1024 << `code` bytes, 64 to a segment; but the
    first segment is of `SEGMENT_BYTES` whatever the chunks, since it is what a read probes by."""

    code: int
    chunk_bytes: int

    @property
    def segment_bytes(self) -> int:
        """Bytes of a whole segment that is not the first."""
        return CHUNKS_PER_SEGMENT * self.chunk_bytes

    @property
    def mtu_bytes(self) -> int:
        """The longest IPv4 packet: one with a chunk."""
        return IP_UDP_BYTES + HEADER_BYTES + self.chunk_bytes

    def start_of(self, index: int) -> int:
        """Where segment `index` begins, in bytes of the block."""
        return SEGMENT_BYTES + (index - 1) * self.segment_bytes if index else 0

    def segments_of(self, size: int) -> int:
        """How many segments a block of `size` bytes has; at least 1."""
        return 1 + max(0, -(-(size - SEGMENT_BYTES) // self.segment_bytes))

    def bytes_of(self, size: int, index: int) -> int:
        """How many bytes segment `index` of a block of `size` bytes has; 0 if it lies beyond."""
        longest = self.segment_bytes if index else SEGMENT_BYTES
        return max(0, min(longest, size - self.start_of(index)))

    def chunks_of(self, size: int, index: int) -> int:
        """How many chunks segment `index` of a block of `size` bytes has; 0 if it lies beyond."""
        return -(-self.bytes_of(size, index) // self.chunk_bytes)

    def bitmap(self, size: int, index: int) -> int:
        """The chunks that segment `index` of a block of `size` bytes has, as a bitmap."""
        return int((1 << self.chunks_of(size, index)) - 1)

    def number(self, index: int) -> int:
        """What the header's `segment` says for segment `index`."""
        return self.code << SEGMENT_INDEX_BITS | index


CHUNKINGS: Final = tuple(Chunking(code, CHUNK_BYTES << code) for code in range(4))
"""By code: chunks of 1, 2, 4 and 8 KiB."""
WRITE_CODE: Final = 2
"""Of the chunks of a READ with FLAG_WRITE: 4 KiB."""
CELLS: Final = CHUNKINGS[0]
"""As switch memory has it, and as every network takes it."""
MAX_DATAGRAM_BYTES: Final = HEADER_BYTES + CHUNKINGS[-1].chunk_bytes
"""The longest datagram of the protocol: a DATA of the largest chunk."""


def chunking_for(mtu_bytes: int) -> Chunking:
    """The largest chunks whose frames fit an MTU (bytes of an IPv4 packet); the smallest, if none
    do."""
    return next((c for c in reversed(CHUNKINGS) if c.mtu_bytes <= mtu_bytes), CELLS)


def chunking_of(segment: int) -> Chunking:
    """How the header's `segment` says that the block is cut."""
    return CHUNKINGS[segment >> SEGMENT_INDEX_BITS]


def segment_index(segment: int) -> int:
    """The place of the header's `segment` in its block."""
    return segment & ((1 << SEGMENT_INDEX_BITS) - 1)


# --- frames ---------------------------------------------------------------------------------


class WireError(ValueError):
    """Bytes from the network that are no well-formed kvcast datagram."""


class BlockId(NamedTuple):
    """Names a block: 16-bit namespace and 128-bit key (16 bytes)."""

    namespace: int
    key: bytes


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One datagram. Fields as in `KVCAST`, in an order that lets defaults stand last.

    `payload`: DATA: a chunk (a view of the received datagram; when sending, the block's last
    chunk may be given short and is padded with zeros); OFFER: 24 bytes; else empty. A READ's
    padding is no payload: it shows as FLAG_PADDED and is written by `encode`.
    """

    op: int
    namespace: int
    key: bytes
    segment: int = 0
    flags: int = 0
    group: int = 0
    digest: int = 0
    size: int = 0
    chunk: int = 0
    gather: int = 0
    wanted: int = 0
    tag: int = 0
    payload: Buffer = b""

    @property
    def block(self) -> BlockId:
        """The block that the frame is about."""
        return BlockId(self.namespace, self.key)


class Offer(NamedTuple):
    """Payload of an OFFER frame; `ipv4` as a 32-bit integer."""

    kind: int
    port: int
    ipv4: int
    token: int
    address: int


READ_FLAGS: Final = FLAG_RETRY | FLAG_PARTIAL | FLAG_SHARED | FLAG_PADDED | FLAG_WRITE
DATA_FLAGS: Final = FLAG_PARTIAL | FLAG_LAST | FLAG_SHARED | FLAG_RESIDENT
MISS_FLAGS: Final = FLAG_PARTIAL | FLAG_SHARED | FLAG_WRITE
_NOT_READ_FLAGS: Final = 0xFFFF & ~READ_FLAGS
_NOT_DATA_FLAGS: Final = 0xFFFF & ~DATA_FLAGS
_NOT_MISS_FLAGS: Final = 0xFFFF & ~MISS_FLAGS
_PADDING: Final = bytes(READ_PADDING_BYTES)


def decode(data: Buffer) -> Frame:
    """The frame in one datagram; its payload is a view of `data`, not a copy.

    Raises WireError for anything that no kvcast node sends.
    """
    length = len(data)
    if length < HEADER_BYTES:
        raise WireError(f"datagram of {length} bytes is shorter than the header")
    (
        version,
        op,
        flags,
        namespace,
        group,
        key,
        digest,
        size,
        segment,
        chunk,
        gather,
        wanted,
        tag,
    ) = _unpack(data)
    if version != VERSION:
        raise WireError(f"version {version} is not {VERSION}")
    if op == OP_DATA:
        chunk_bytes = CHUNK_BYTES << (segment >> SEGMENT_INDEX_BITS)
        if length != HEADER_BYTES + chunk_bytes:
            raise WireError(f"DATA carries {length - HEADER_BYTES} bytes, not {chunk_bytes}")
        if flags & _NOT_DATA_FLAGS:
            raise WireError(f"DATA with flags {flags:#06x}")
        before = chunk * chunk_bytes
        most = CHUNKS_PER_SEGMENT * chunk_bytes
        index = segment_index(segment)
        if index:
            before += SEGMENT_BYTES + (index - 1) * most
        else:
            most = SEGMENT_BYTES
        if chunk * chunk_bytes >= most or before >= size:
            raise WireError(f"chunk {chunk} of segment {segment} is beyond {size} bytes")
        if digest == 0:
            raise WireError("DATA with digest 0")
        if gather or wanted:
            raise WireError("DATA with gather or wanted")
        return Frame(
            op,
            namespace,
            key,
            segment,
            flags,
            group,
            digest,
            size,
            chunk,
            0,
            0,
            tag,
            memoryview(data)[HEADER_BYTES:],
        )
    if op == OP_READ:
        _check_read(length, flags, size, segment, chunk, wanted)
        return Frame(
            op, namespace, key, segment, flags, group, digest, 0, 0, gather, wanted, tag, b""
        )
    if op == OP_MISS:
        if length != HEADER_BYTES:
            raise WireError(f"MISS with a payload of {length - HEADER_BYTES} bytes")
        if flags & _NOT_MISS_FLAGS:
            raise WireError(f"MISS with flags {flags:#06x}")
        if not MISS_NOT_FOUND <= chunk <= MISS_NO_WRITE:
            raise WireError(f"MISS with reason {chunk}")
        if size or gather or wanted:
            raise WireError("MISS with size, gather or wanted")
        return Frame(op, namespace, key, segment, flags, group, digest, 0, chunk, 0, 0, tag, b"")
    if op == OP_WRITTEN:
        if length != HEADER_BYTES:
            raise WireError(f"WRITTEN with a payload of {length - HEADER_BYTES} bytes")
        if flags & ~FLAG_SHARED != FLAG_WRITE:
            raise WireError(f"WRITTEN with flags {flags:#06x}")
        if segment >> SEGMENT_INDEX_BITS != WRITE_CODE:
            raise WireError(f"WRITTEN of segment {segment:#06x}")
        if digest == 0 or CHUNKINGS[WRITE_CODE].bytes_of(size, segment_index(segment)) == 0:
            raise WireError(f"WRITTEN beyond {size} bytes, or of no copy")
        if chunk or gather or wanted:
            raise WireError("WRITTEN with chunk, gather or wanted")
        return Frame(op, namespace, key, segment, flags, group, digest, size, 0, 0, 0, tag, b"")
    if op == OP_OFFER:
        if length != HEADER_BYTES + OFFER_BYTES:
            raise WireError(f"OFFER carries {length - HEADER_BYTES} bytes, not {OFFER_BYTES}")
        if flags:
            raise WireError(f"OFFER with flags {flags:#06x}")
        if size == 0 or digest == 0:
            raise WireError("OFFER of no block: size or digest is 0")
        if chunk or gather or wanted:
            raise WireError("OFFER with chunk, gather or wanted")
        payload = memoryview(data)[HEADER_BYTES:]
        return Frame(op, namespace, key, segment, flags, group, digest, size, 0, 0, 0, tag, payload)
    raise WireError(f"unknown op {op}")


def _check_read(length: int, flags: int, size: int, segment: int, chunk: int, wanted: int) -> None:
    if flags & _NOT_READ_FLAGS:
        raise WireError(f"READ with flags {flags:#06x}")
    if flags & FLAG_WRITE and (
        flags & (FLAG_PARTIAL | FLAG_PADDED) or segment >> SEGMENT_INDEX_BITS != WRITE_CODE
    ):
        raise WireError(f"READ of segment {segment:#06x} with flags {flags:#06x}")
    expected = HEADER_BYTES + (READ_PADDING_BYTES if flags & FLAG_PADDED else 0)
    if length != expected:
        raise WireError(f"READ of {length} bytes, not {expected}")
    if wanted == 0:
        raise WireError("READ that wants no chunk")
    if (wanted == FULL_SEGMENT) == bool(flags & FLAG_PARTIAL):
        raise WireError("READ whose PARTIAL flag contradicts its wanted chunks")
    if flags & FLAG_RETRY and flags & FLAG_PARTIAL:
        raise WireError("READ with both RETRY and PARTIAL")
    if size or chunk:
        raise WireError("READ with size or chunk")


def header_of(frame: Frame) -> bytes:
    """The header of a datagram. Raises WireError where a field is out of range."""
    if len(frame.key) != KEY_BYTES:  # struct would pad or cut it
        raise WireError(f"key of {len(frame.key)} bytes")
    try:
        return _pack(
            VERSION,
            frame.op,
            frame.flags,
            frame.namespace,
            frame.group,
            frame.key,
            frame.digest,
            frame.size,
            frame.segment,
            frame.chunk,
            frame.gather,
            frame.wanted,
            frame.tag,
        )
    except struct.error as error:
        raise WireError(f"field out of range: {error}") from error


def encode(frame: Frame) -> bytes:
    """One datagram. Raises WireError where a field is out of range or the payload of a wrong
    length; that `decode` takes the rest is up to whoever made the frame."""
    header = header_of(frame)
    payload = frame.payload
    if frame.op == OP_DATA:
        chunk_bytes = CHUNK_BYTES << (frame.segment >> SEGMENT_INDEX_BITS)
        missing = chunk_bytes - len(payload)
        if missing == 0:
            return b"".join((header, payload))
        if not 0 < missing < chunk_bytes:
            raise WireError(f"DATA payload of {len(payload)} bytes")
        return b"".join((header, payload, bytes(missing)))
    if frame.flags & FLAG_PADDED:
        return header + _PADDING
    return header + payload if payload else header


def encode_offer(offer: Offer) -> bytes:
    """Payload of an OFFER frame; WireError where a field is out of range."""
    try:
        return _OFFER_STRUCT.pack(offer.kind, 0, offer.port, offer.ipv4, offer.token, offer.address)
    except struct.error as error:
        raise WireError(f"offer field out of range: {error}") from error


def decode_offer(payload: Buffer) -> Offer:
    """The offer in an OFFER frame's payload. A kind that we do not know is no error: whoever
    reads the offer knows which kinds it can use."""
    if len(payload) != OFFER_BYTES:
        raise WireError(f"offer of {len(payload)} bytes, not {OFFER_BYTES}")
    kind, _reserved, port, ipv4, token, address = _OFFER_STRUCT.unpack(payload)
    return Offer(kind, port, ipv4, token, address)


# --- arithmetic of blocks -------------------------------------------------------------------


def bucket_of(key: bytes) -> int:
    """The bucket of a key: the low 10 bits of its 128-bit big-endian number."""
    return (key[-2] << 8 | key[-1]) & (BUCKETS - 1)


DIGEST_STATE_BYTES: Final = 1024
"""Room for a digest that is made piece by piece: XXH3_state_t has 576, at a multiple of 64."""


def digest_of(data: Buffer) -> int:
    """The content digest of a block's bytes: xxh3_64, and 1 where that is 0 (0 means "any")."""
    return int(xxhash.xxh3_64_intdigest(data)) or 1
