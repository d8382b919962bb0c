"""The codec of one datagram: what it writes, and what it refuses.

Oracle: byte strings and widths written out by hand from the header's table in the documentation.
Cannot see: whether the P4 parser agrees (see test_p4_generate.py and the stf tests).
"""

from __future__ import annotations

import pytest
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.wire import (
    BlockId,
    Frame,
    Offer,
    WireError,
    bucket_of,
    decode,
    decode_offer,
    digest_of,
    encode,
    encode_offer,
)

KEY = bytes(range(16))
CHUNK = bytes(range(256)) * 4

READ = Frame(
    wire.OP_READ,
    0x0102,
    KEY,
    segment=0x0304,
    group=0x0506,
    digest=0x1122334455667788,
    gather=7,
    wanted=wire.FULL_SEGMENT,
    tag=0xA1A2A3A4,
)
DATA = Frame(
    wire.OP_DATA, 1, KEY, segment=1, flags=wire.FLAG_LAST, digest=9, size=66_000, payload=CHUNK
)
MISS = Frame(wire.OP_MISS, 1, KEY, chunk=wire.MISS_NOT_FOUND, digest=9, tag=5)
OFFER = Frame(
    wire.OP_OFFER,
    1,
    KEY,
    digest=9,
    size=66_000,
    payload=encode_offer(Offer(wire.OFFER_TCP, 80, 0x0A4D0001, 1, 2)),
)


def changed(frame: Frame, **fields: object) -> Frame:
    """`frame` with some fields changed."""
    values = {name: getattr(frame, name) for name in Frame.__struct_fields__}
    return Frame(**(values | fields))  # type: ignore[arg-type]


def test_read_lies_on_the_wire_as_the_table_says() -> None:
    assert encode(READ) == bytes.fromhex(
        "01 01 0000 0102 0506"
        "000102030405060708090a0b0c0d0e0f"
        "1122334455667788 00000000 0304 00 07"
        "ffffffffffffffff a1a2a3a4"
    )


def test_data_is_the_header_and_1024_bytes() -> None:
    datagram = encode(DATA)
    assert len(datagram) == 52 + 1024
    assert datagram[:4] == bytes.fromhex("01 02 0004")
    assert datagram[32:40] == (66_000).to_bytes(4, "big") + bytes.fromhex("0001 00 00")
    assert datagram[52:] == CHUNK


WRITE_SEGMENT = wire.CHUNKINGS[wire.WRITE_CODE].number(1)
WRITE_READ = Frame(
    wire.OP_READ, 3, bytes(16), WRITE_SEGMENT, wire.FLAG_WRITE, wanted=wire.FULL_SEGMENT, tag=7
)
WRITTEN = Frame(
    wire.OP_WRITTEN, 3, bytes(16), WRITE_SEGMENT, wire.FLAG_WRITE, digest=9, size=1 << 20, tag=7
)


@pytest.mark.parametrize(
    "frame",
    [READ, DATA, MISS, OFFER, WRITE_READ, WRITTEN],
    ids=["READ", "DATA", "MISS", "OFFER", "READ by RDMA", "WRITTEN"],
)
def test_decode_gives_back_what_encode_took(frame: Frame) -> None:
    assert decode(encode(frame)) == frame
    assert decode(memoryview(bytearray(encode(frame)))) == frame


def test_payload_is_a_view_of_the_datagram() -> None:
    datagram = bytearray(encode(DATA))
    frame = decode(datagram)
    datagram[52] = 0xEE
    assert frame.payload[0] == 0xEE


def test_short_last_chunk_is_padded_with_zeros() -> None:
    datagram = encode(changed(DATA, payload=b"end"))
    assert datagram[52:] == b"end" + bytes(1021)


def test_padding_of_a_read_is_written_and_is_no_payload() -> None:
    padded = changed(READ, flags=wire.FLAG_PADDED)
    datagram = encode(padded)
    assert len(datagram) == 52 + 608
    assert decode(datagram) == padded


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (changed(READ, op=6), "unknown op"),
        (changed(READ, op=0), "unknown op"),
        (changed(READ, wanted=0), "wants no chunk"),
        (changed(READ, wanted=5), "PARTIAL flag contradicts"),
        (changed(READ, flags=wire.FLAG_PARTIAL), "PARTIAL flag contradicts"),
        (
            changed(READ, wanted=5, flags=wire.FLAG_PARTIAL | wire.FLAG_RETRY),
            "both RETRY and PARTIAL",
        ),
        (changed(READ, flags=wire.FLAG_LAST), "flags"),
        (changed(READ, flags=0x8000), "flags"),
        (changed(READ, size=1), "size or chunk"),
        (changed(READ, chunk=1), "size or chunk"),
        (changed(DATA, flags=wire.FLAG_RETRY), "flags"),
        (changed(DATA, chunk=64, size=1 << 30), "beyond"),
        (changed(DATA, chunk=1), "beyond"),
        (changed(DATA, segment=2), "beyond"),
        (changed(DATA, size=0), "beyond"),
        (changed(DATA, digest=0), "digest 0"),
        (changed(DATA, wanted=1), "gather or wanted"),
        (changed(DATA, gather=1), "gather or wanted"),
        (changed(MISS, chunk=0), "reason"),
        (changed(MISS, chunk=7), "reason"),
        (changed(WRITE_READ, segment=1), "READ of segment"),
        (changed(WRITE_READ, flags=wire.FLAG_WRITE | wire.FLAG_PADDED), "READ of segment"),
        (changed(WRITE_READ, flags=wire.FLAG_WRITE | wire.FLAG_PARTIAL, wanted=1), "READ of"),
        (changed(WRITTEN, flags=0), "WRITTEN with flags"),
        (changed(WRITTEN, flags=wire.FLAG_WRITE | wire.FLAG_LAST), "WRITTEN with flags"),
        (changed(WRITTEN, segment=1), "WRITTEN of segment"),
        (changed(WRITTEN, size=wire.SEGMENT_BYTES), "WRITTEN beyond"),
        (changed(WRITTEN, digest=0), "of no copy"),
        (changed(WRITTEN, chunk=1), "WRITTEN with chunk"),
        (changed(WRITTEN, payload=b"x"), "payload of 1"),
        (changed(MISS, flags=wire.FLAG_LAST), "flags"),
        (changed(MISS, wanted=1), "wanted"),
        (changed(MISS, payload=b"x"), "payload"),
        (changed(OFFER, flags=wire.FLAG_SHARED), "flags"),
        (changed(OFFER, size=0), "no block"),
        (changed(OFFER, chunk=1), "chunk"),
        (changed(OFFER, payload=b"x" * 23), "OFFER carries 23"),
    ],
)
def test_inconsistent_datagram_is_refused(frame: Frame, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode(encode(frame))


def test_other_lengths_and_versions_are_refused() -> None:
    with pytest.raises(WireError, match="shorter"):
        decode(encode(READ)[:-1])
    with pytest.raises(WireError, match="READ of 53"):
        decode(encode(READ) + b"x")
    with pytest.raises(WireError, match="DATA carries 1023"):
        decode(encode(DATA)[:-1])
    with pytest.raises(WireError, match="DATA carries 1025"):
        decode(encode(DATA) + b"x")
    with pytest.raises(WireError, match="version 2"):
        decode(b"\x02" + encode(READ)[1:])


@pytest.mark.parametrize(
    "frame",
    [
        changed(READ, namespace=0x10000),
        changed(READ, tag=-1),
        changed(READ, key=b"short"),
        changed(READ, key=bytes(17)),
        changed(DATA, payload=bytes(1025)),
        changed(DATA, payload=b""),
    ],
)
def test_encode_refuses_what_the_header_cannot_say(frame: Frame) -> None:
    with pytest.raises(WireError):
        encode(frame)


def test_offer_round_trips_and_refuses_other_lengths() -> None:
    offer = Offer(wire.OFFER_RDMA, 4791, 0x0A4D0001, 0xFFFFFFFFFFFFFFFF, 0x7F0000001000)
    assert len(encode_offer(offer)) == 24
    assert decode_offer(encode_offer(offer)) == offer
    with pytest.raises(WireError):
        decode_offer(encode_offer(offer)[:-1])
    with pytest.raises(WireError):
        encode_offer(Offer(1, 0x10000, 0, 0, 0))


def test_bucket_is_the_low_ten_bits_of_the_key() -> None:
    assert bucket_of(bytes(16)) == 0
    assert bucket_of((0x3FF).to_bytes(16, "big")) == 1023
    assert bucket_of((0xABCDEF).to_bytes(16, "big")) == 0xABCDEF % 1024
    assert wire.BUCKETS == 1024


def test_digest_of_nothing_known_is_never_zero() -> None:
    assert digest_of(b"") == 0x2D06800538D394C2  # xxh3_64 of nothing, by its specification
    assert digest_of(memoryview(b"abc")) == digest_of(b"abc") != 0


@pytest.mark.parametrize(
    ("size", "segments", "chunks_of_last"),
    [(1, 1, 1), (1024, 1, 1), (1025, 1, 2), (65_536, 1, 64), (65_537, 2, 1), (200_000, 4, 4)],
)
def test_segments_and_chunks_of_a_block(size: int, segments: int, chunks_of_last: int) -> None:
    assert wire.CELLS.segments_of(size) == segments
    assert wire.CELLS.chunks_of(size, segments - 1) == chunks_of_last
    assert wire.CELLS.bitmap(size, segments - 1) == (1 << chunks_of_last) - 1
    assert wire.CELLS.chunks_of(size, segments) == 0


@pytest.mark.parametrize("chunking", wire.CHUNKINGS)
def test_data_carries_a_chunk_of_the_size_that_its_segment_says(chunking: wire.Chunking) -> None:
    size = chunking.start_of(3)
    data = changed(
        DATA,
        segment=chunking.number(2),
        chunk=63,
        size=size,
        payload=bytes(range(256)) * (chunking.chunk_bytes // 256),
    )
    datagram = encode(data)
    assert len(datagram) == 52 + chunking.chunk_bytes <= wire.MAX_DATAGRAM_BYTES
    assert decode(datagram) == data
    assert wire.chunking_of(data.segment) is chunking
    assert wire.segment_index(data.segment) == 2
    for other in wire.CHUNKINGS:
        if other is not chunking:
            wrong = datagram[:36] + other.number(2).to_bytes(2, "big") + datagram[38:]
            with pytest.raises(WireError):
                decode(wrong)
    with pytest.raises(WireError, match="beyond"):
        decode(datagram[:32] + (size - chunking.chunk_bytes).to_bytes(4, "big") + datagram[36:])


@pytest.mark.parametrize("chunking", wire.CHUNKINGS)
def test_the_first_segment_is_of_64_kib_whatever_the_chunks(chunking: wire.Chunking) -> None:
    first, size = wire.SEGMENT_BYTES, wire.SEGMENT_BYTES + chunking.segment_bytes + 1
    assert [chunking.start_of(i) for i in range(3)] == [0, first, first + chunking.segment_bytes]
    assert [chunking.bytes_of(size, i) for i in range(4)] == [first, chunking.segment_bytes, 1, 0]
    assert [chunking.segments_of(n) for n in (1, first, first + 1, size)] == [1, 1, 2, 3]
    assert chunking.bitmap(size, 0).bit_count() * chunking.chunk_bytes == first
    beyond = changed(
        DATA,
        segment=chunking.number(0),
        chunk=first // chunking.chunk_bytes,
        size=size,
        payload=bytes(chunking.chunk_bytes),
    )
    with pytest.raises(WireError, match="beyond"):
        decode(encode(beyond))


@pytest.mark.parametrize(
    ("mtu_bytes", "chunk_bytes"),
    [(576, 1024), (1500, 1024), (2127, 1024), (2128, 2048), (4176, 4096), (9000, 8192)],
)
def test_chunks_are_as_large_as_the_mtu_takes(mtu_bytes: int, chunk_bytes: int) -> None:
    assert wire.chunking_for(mtu_bytes).chunk_bytes == chunk_bytes


def test_header_widths_are_those_of_the_specification() -> None:
    sizes = {header.name: header.size_bytes for header in wire.HEADERS}
    assert sizes == {
        "ethernet_h": 14,
        "ipv4_h": 20,
        "udp_h": 8,
        "kvcast_h": 52,
        "cell_h": 1024,
        "read_padding_h": 608,
        "offer_h": 24,
    }


def test_block_of_a_frame_equals_the_plain_pair() -> None:
    assert READ.block == BlockId(0x0102, KEY) == (0x0102, KEY)
