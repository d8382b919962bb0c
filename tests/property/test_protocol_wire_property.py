"""The codecs under any input: a round trip, or the one named error.

Oracle: the input itself. Cannot see: whether the fields mean anything.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvcast.protocol.messages import ethernet, wire
from kvcast.protocol.messages.wire import Frame, WireError, decode, encode

U8 = st.integers(0, 0xFF)
U16 = st.integers(0, 0xFFFF)
U32 = st.integers(0, 0xFFFFFFFF)
U64 = st.integers(0, 0xFFFFFFFFFFFFFFFF)
KEYS = st.binary(min_size=16, max_size=16)


@st.composite
def reads(draw: st.DrawFn) -> Frame:
    wanted = draw(st.one_of(st.just(wire.FULL_SEGMENT), st.integers(1, wire.FULL_SEGMENT)))
    full = wanted == wire.FULL_SEGMENT
    flags = draw(st.sampled_from([0, wire.FLAG_RETRY])) if full else wire.FLAG_PARTIAL
    flags |= draw(st.sampled_from([0, wire.FLAG_PADDED]))
    return Frame(
        wire.OP_READ,
        draw(U16),
        draw(KEYS),
        segment=draw(U16),
        flags=flags,
        group=draw(U16),
        digest=draw(U64),
        gather=draw(U8),
        wanted=wanted,
        tag=draw(U32),
    )


@st.composite
def datas(draw: st.DrawFn) -> Frame:
    size = draw(st.integers(1, wire.MAX_BLOCK_BYTES))
    segment = draw(st.integers(0, wire.CELLS.segments_of(size) - 1))
    return Frame(
        wire.OP_DATA,
        draw(U16),
        draw(KEYS),
        segment=segment,
        flags=draw(st.sampled_from([0, 2, 4, 8, 0x20, 0x2E])),
        group=draw(U16),
        digest=draw(st.integers(1, 2**64 - 1)),
        size=size,
        chunk=draw(st.integers(0, wire.CELLS.chunks_of(size, segment) - 1)),
        tag=draw(U32),
        payload=draw(st.binary(min_size=4, max_size=4)) * 256,
    )


@st.composite
def misses(draw: st.DrawFn) -> Frame:
    return Frame(
        wire.OP_MISS,
        draw(U16),
        draw(KEYS),
        segment=draw(U16),
        flags=draw(st.sampled_from([0, wire.FLAG_PARTIAL, wire.FLAG_SHARED])),
        group=draw(U16),
        digest=draw(U64),
        chunk=draw(st.integers(1, 4)),
        tag=draw(U32),
    )


FRAMES = st.one_of(reads(), datas(), misses())


@given(FRAMES)
def test_every_frame_survives_the_wire(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@given(st.one_of(st.binary(max_size=1200), st.binary(max_size=60).map(lambda b: b"\x01" + b)))
def test_any_bytes_are_a_frame_or_a_wire_error(data: bytes) -> None:
    try:
        frame = decode(data)
    except WireError:
        return
    assert encode(frame)[: wire.HEADER_BYTES] == data[: wire.HEADER_BYTES]


@given(FRAMES, st.integers(0, 1075), U8)
def test_a_frame_with_one_byte_changed_is_a_frame_or_a_wire_error(
    frame: Frame, position: int, value: int
) -> None:
    data = bytearray(encode(frame))
    data[position % len(data)] = value
    try:
        altered = decode(data)
    except WireError:
        return
    if not altered.flags & wire.FLAG_PADDED:  # padding is written as zeros
        assert encode(altered) == data


ENDPOINTS = st.builds(
    ethernet.Endpoint, st.binary(min_size=6, max_size=6), U32, st.integers(1, 0xFFFF)
)


@given(ENDPOINTS, ENDPOINTS, st.binary(max_size=wire.MAX_DATAGRAM_BYTES), st.binary(max_size=60))
def test_encapsulation_round_trips(
    local: ethernet.Endpoint, peer: ethernet.Endpoint, payload: bytes, padding: bytes
) -> None:
    frame = ethernet.Encapsulation(local, peer).wrap(payload)
    assert ethernet.unwrap(frame + padding) == (local, peer, payload)


@given(st.binary(max_size=1200), st.integers(0, 41), U8)
def test_any_frame_is_a_datagram_or_a_wire_error(data: bytes, position: int, value: int) -> None:
    endpoint = ethernet.Endpoint(bytes(6), 1)
    almost = bytearray(ethernet.Encapsulation(endpoint, endpoint).wrap(data[:1000]))
    almost[position] = value
    for frame in (data, almost):
        try:
            ethernet.unwrap(frame)
        except WireError:
            continue
