"""Compiled placement does what a plain model of it in Python does, whatever bytes come.

Oracle: `Model`, which takes one datagram after the other with `ethernet.unwrap` and `wire.decode`
and writes chunks with slices; and, for the requester, a second one that is given frame by frame.
The memory around every block is compared too, so that a write outside of one shows. Cannot see:
whether the kernel joins datagrams where the adapter believes (tests/unit/test_hostagent_transport).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint, unwrap
from kvcast.protocol.placement import Arrived, Placement, compiled
from kvcast.protocol.requester import Event, Fetched, Requester, RequesterConfig
from msgspec.structs import replace
from protocol_network import Room

ME = Endpoint(b"\x02kv\x00\x00\x01", 0x0A4D0001)
OTHER = Endpoint(b"\x02kv\x00\x00\x09", 0x0A4D0009)
NODES = {0x0A4D0002: 2, 0x0A4D0003: 3, 0x0A4D0004: 400}
MARGIN = 512
compiled()  # the first time takes longer than an example may


class Target(NamedTuple):
    """A copy that is being put together."""

    block: wire.BlockId
    size: int
    digest: int
    sources: frozenset[int]
    chunking: wire.Chunking = wire.CELLS


KEYS = [bytes(range(16)), bytes(15) + b"\1", bytes(16)]
TARGETS = [
    Target(wire.BlockId(7, KEYS[0]), 2 * wire.SEGMENT_BYTES + 3000, 0xABCDEF, frozenset({2, 3})),
    Target(wire.BlockId(8, KEYS[0]), 1, 5, frozenset({400})),
    Target(wire.BlockId(7, KEYS[1]), wire.SEGMENT_BYTES, (1 << 64) - 1, frozenset({2})),
    Target(wire.BlockId(0xFFFF, KEYS[2]), 1024, 1, frozenset()),
    Target(wire.BlockId(9, KEYS[0]), 300_000, 7, frozenset({2, 3}), wire.CHUNKINGS[2]),
]


class Model:
    """Placement, plainly. `events`: ("put", source, target, segment, tag, flags, chunk, whether it
    was new, whether LAST), ("frame", source, bytes), or ("told",) where a piece ends."""

    def __init__(self, *, wrapped: bool) -> None:
        self.wrapped = wrapped
        self.memory = [bytearray(MARGIN + target.size + MARGIN) for target in TARGETS]
        self.there: set[tuple[int, int, int]] = set()
        self.events: list[tuple[object, ...]] = []
        self.counts: Counter[str] = Counter()

    def take(self, data: bytes, sender: int) -> None:
        self.counts["frames"] += 1
        try:
            if self.wrapped:
                outer = unwrap(data)
                if outer.dst != ME:
                    self.counts["misaddressed"] += 1
                    return
                data, sender = bytes(outer.payload), outer.src.ip
            frame = wire.decode(data)
        except wire.WireError:
            self.counts["malformed"] += 1
            return
        source = NODES.get(sender)
        if source is None:
            self.counts["unknown_source"] += 1
            return
        for number, target in enumerate(TARGETS):
            same = (frame.block, frame.size, frame.digest) == target[:3]
            same = same and wire.chunking_of(frame.segment) is target.chunking
            if frame.op == wire.OP_DATA and same and source in target.sources:
                self._put(number, target, frame, source)
                return
        self.events.append(("frame", source, data))

    def _put(self, number: int, target: Target, frame: wire.Frame, source: int) -> None:
        index, chunk_bytes = wire.segment_index(frame.segment), target.chunking.chunk_bytes
        place = (number, index, frame.chunk)
        new = place not in self.there
        if new:
            self.there.add(place)
            start = target.chunking.start_of(index) + frame.chunk * chunk_bytes
            room = memoryview(self.memory[number])[MARGIN : MARGIN + target.size]
            room[start : start + chunk_bytes] = bytes(frame.payload)[: target.size - start]
        flags, last = frame.flags & ~wire.FLAG_LAST, bool(frame.flags & wire.FLAG_LAST)
        key = (source, number, index, frame.tag, flags)
        self.events.append(("put", *key, frame.chunk, new, last))


def merged(events: list[tuple[object, ...]]) -> list[object]:
    """The model's events as `Placement` tells them: puts in a row that agree are one."""
    told: list[object] = []
    runs: list[list[tuple[object, ...]]] = []
    for event in events:
        if event[0] != "put":
            told += [event] if event[0] == "frame" else []
            runs = []
            continue
        if runs and runs[-1][-1][:6] == event[:6] and not runs[-1][-1][8]:
            runs[-1].append(event)
        else:
            runs.append([event])
            told.append(runs[-1])
    return told


class Compiled:
    """The same, compiled."""

    def __init__(self, *, wrapped: bool, seed: int = 0) -> None:
        self.placement = Placement(seed=seed)
        self.placement.know(NODES)
        if wrapped:
            self.placement.unwrap_for(ME)
        self.memory = [bytearray(MARGIN + target.size + MARGIN) for target in TARGETS]
        self.number_of: dict[int, int] = {}
        self.events: list[object] = []
        for number, (target, memory) in enumerate(zip(TARGETS, self.memory, strict=True)):
            room = memoryview(memory)[MARGIN : MARGIN + target.size]
            _, serial, missing = self.placement.enter(
                target.block, target.size, target.digest, room, target.chunking, target.sources
            )
            segments = range(target.chunking.segments_of(target.size))
            assert missing == [target.chunking.bitmap(target.size, index) for index in segments]
            self.number_of[serial] = number

    def take(self, data: bytes, stride: int, sender: int) -> None:
        self.placement.place_bytes(
            data,
            self.events.extend,
            lambda source, datagram: self.events.append(("frame", source, datagram)),
            stride=stride,
            sender=sender,
        )


def agree(model: Model, native: Compiled) -> None:
    assert native.memory == model.memory
    there: dict[tuple[int, int], int] = {}
    told = merged(model.events)
    assert len(told) == len(native.events)
    for one, other in zip(told, native.events, strict=True):
        if isinstance(one, tuple):
            assert one == other
            continue
        assert isinstance(one, list)
        assert isinstance(other, Arrived)
        _, source, number, segment, tag, flags, *_ = one[0]
        assert isinstance(number, int)
        assert isinstance(segment, int)
        added = 0
        for *_, chunk, new, _last in one:
            added |= new << chunk
        there[number, segment] = there.get((number, segment), 0) | added
        target = TARGETS[number]
        missing = target.chunking.bitmap(target.size, segment) & ~there[number, segment]
        *_, new, last = one[-1]
        assert native.number_of[other.serial] == number
        assert other[1:8] == (added, missing, segment, source, flags, tag, len(one))
        assert other.ends_anew == (new and last)
    counts = native.placement.take_counts()
    assert counts == tuple(model.counts[name] for name in counts._fields)


# --- what comes -------------------------------------------------------------------------------


@st.composite
def data_frames(draw: st.DrawFn) -> wire.Frame:
    """DATA of one of the targets, mostly; now and then of something near it."""
    target = draw(st.sampled_from(TARGETS[:1] * 3 + TARGETS))
    chunking = draw(st.sampled_from([target.chunking] * 5 + [wire.CHUNKINGS[1]]))
    segment = draw(st.integers(0, chunking.segments_of(target.size) - 1))
    flags = draw(st.sampled_from([0, 0, wire.FLAG_SHARED, wire.FLAG_RESIDENT, wire.FLAG_PARTIAL]))
    chunk = draw(st.integers(0, chunking.chunks_of(target.size, segment) - 1))
    return wire.Frame(
        wire.OP_DATA,
        *target.block,
        chunking.number(segment),
        flags | draw(st.sampled_from([0, 0, 0, wire.FLAG_LAST])),
        draw(st.sampled_from([0, 0, 9])),
        draw(st.sampled_from([target.digest] * 5 + [99])),
        draw(st.sampled_from([target.size] * 5 + [(1 << 32) - 1])),
        chunk,
        tag=draw(st.sampled_from([1, 1, 1, 2])),
        payload=draw(st.binary(min_size=4, max_size=4)) * (chunking.chunk_bytes // 4),
    )


def other_frames() -> st.SearchStrategy[wire.Frame]:
    block = st.sampled_from([target.block for target in TARGETS])
    return st.one_of(
        block.map(lambda b: wire.Frame(wire.OP_READ, *b, wanted=wire.FULL_SEGMENT)),
        block.map(lambda b: wire.Frame(wire.OP_READ, *b, flags=2, wanted=3, gather=4)),
        block.map(lambda b: wire.Frame(wire.OP_READ, *b, flags=0x10, wanted=wire.FULL_SEGMENT)),
        block.map(lambda b: wire.Frame(wire.OP_MISS, *b, chunk=2, digest=5)),
        block.map(lambda b: wire.Frame(wire.OP_OFFER, *b, size=9, digest=5, payload=bytes(24))),
    )


@st.composite
def datagrams(draw: st.DrawFn, *, wrapped: bool) -> bytes:
    """A datagram, whole, spoilt in a few bytes, cut, or longer than it says."""
    frame = draw(st.one_of(data_frames(), data_frames(), data_frames(), other_frames()))
    data = wire.encode(frame)
    if wrapped:
        src = draw(st.sampled_from([*NODES, *NODES, 0x0A4D0005]))
        dst = draw(st.sampled_from([ME] * 6 + [OTHER, ME._replace(udp_port=1)]))
        data = Encapsulation(Endpoint(b"\2kv\0\0\2", src), dst).wrap(data)
    spoilt = bytearray(data)
    headers = min(len(data), 42 * wrapped + 52) - 1
    for at, value in draw(
        st.lists(st.tuples(st.integers(0, headers), st.integers(0, 255)), max_size=2)
        if draw(st.integers(0, 2)) == 0
        else st.just([])
    ):
        spoilt[at] = value
    cut = draw(st.sampled_from([None] * 8 + [0, 1, 30, 51, 94, 700, -1]))
    more = draw(st.sampled_from([b""] * 8 + [bytes(1), bytes(18)]))
    return bytes(spoilt[:cut]) + more


@st.composite
def streams(draw: st.DrawFn, *, wrapped: bool) -> list[tuple[int, list[bytes]]]:
    """Pieces: who sent them, and datagrams of which all but the last are of one length."""
    pieces: list[tuple[int, list[bytes]]] = []
    for _ in range(draw(st.integers(1, 6))):
        sender = draw(st.sampled_from([*NODES, *NODES, 0x0A4D0005]))
        alike: list[bytes] = []
        for data in draw(st.lists(datagrams(wrapped=wrapped), min_size=1, max_size=12)):
            if alike and (len(data) > len(alike[0]) or not data or len(alike[-1]) < len(alike[0])):
                pieces.append((sender, alike))
                alike = []
            alike.append(data)
        pieces.append((sender, alike))
    return pieces


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
@given(data=st.data())
def test_any_datagrams_have_the_effect_that_the_model_says(
    wrapped: bool, data: st.DataObject
) -> None:
    model = Model(wrapped=wrapped)
    native = Compiled(wrapped=wrapped, seed=data.draw(st.integers(0, (1 << 64) - 1)))
    for sender, piece in data.draw(streams(wrapped=wrapped)):
        for datagram in piece:
            model.take(datagram, sender)
        model.events.append(("told",))
        native.take(b"".join(piece), len(piece[0]), sender)
    agree(model, native)


@given(st.binary(max_size=1200), st.booleans())
def test_any_bytes_are_taken_or_counted(data: bytes, wrapped: bool) -> None:
    model, native = Model(wrapped=wrapped), Compiled(wrapped=wrapped)
    model.take(data, 0x0A4D0002)
    native.take(data, 0, 0x0A4D0002)
    agree(model, native)


@given(st.integers(0, 255), st.integers(0, 51), st.sampled_from([False, True]))
def test_every_byte_of_a_header_counts_as_it_does_in_python(
    value: int, at: int, wrapped: bool
) -> None:
    """One byte of each kind of frame, and, where it is wrapped, of what is around it."""
    for frame in (
        wire.Frame(
            wire.OP_DATA, *TARGETS[0].block, digest=0xABCDEF, size=TARGETS[0].size,
            payload=bytes(1024),
        ),
        wire.Frame(
            wire.OP_DATA, *TARGETS[4].block, wire.CHUNKINGS[2].number(1), digest=7,
            size=TARGETS[4].size, payload=bytes(4096),
        ),
        wire.Frame(wire.OP_READ, *KEYED, wanted=wire.FULL_SEGMENT),
        wire.Frame(wire.OP_READ, *KEYED, flags=wire.FLAG_PADDED, wanted=wire.FULL_SEGMENT),
        wire.Frame(wire.OP_MISS, *KEYED, chunk=wire.MISS_NOT_FOUND),
        wire.Frame(wire.OP_OFFER, *KEYED, size=9, digest=5, payload=bytes(24)),
    ):  # fmt: skip
        model, native = Model(wrapped=wrapped), Compiled(wrapped=wrapped)
        data = wire.encode(frame)
        if wrapped:
            data = Encapsulation(Endpoint(b"\2kv\0\0\2", 0x0A4D0002), ME).wrap(data)
        for place in (at, at + 42) if wrapped else (at,):
            spoilt = bytearray(data)
            spoilt[place] = value
            model.take(bytes(spoilt), 0x0A4D0002)
            model.events.append(("told",))
            native.take(bytes(spoilt), 0, 0x0A4D0002)
        agree(model, native)


KEYED = TARGETS[0].block


def test_a_udp_checksum_is_verified_where_there_is_one() -> None:
    frame = wire.Frame(
        wire.OP_DATA, *KEYED, digest=0xABCDEF, size=TARGETS[0].size, payload=bytes([7]) * 1024
    )
    plain = Encapsulation(Endpoint(b"\2kv\0\0\2", 0x0A4D0002), ME).wrap(wire.encode(frame))
    words = plain[26:34] + bytes([0, 17]) + plain[38:40] + plain[34:]
    right = (0xFFFF - int.from_bytes(words, "big") % 0xFFFF).to_bytes(2, "big")
    wrong = bytes([right[0] ^ 1, right[1]])
    for checksum in (right, wrong):
        model, native = Model(wrapped=True), Compiled(wrapped=True)
        data = plain[:40] + checksum + plain[42:]
        model.take(data, 0)
        native.take(data, 0, 0)
        agree(model, native)
        assert model.counts["malformed"] == (checksum == wrong)


def test_more_arrivals_than_are_kept_are_told_in_turn() -> None:
    model, native = Model(wrapped=False), Compiled(wrapped=False)
    frames = [
        wire.Frame(
            wire.OP_DATA, *KEYED, digest=0xABCDEF, size=TARGETS[0].size, chunk=number % 64,
            tag=number, payload=bytes([number % 251]) * 1024,
        )
        for number in range(300)
    ]  # fmt: skip
    sent = [wire.encode(frame) for frame in frames]
    for data in sent:
        model.take(data, 0x0A4D0002)
    native.take(b"".join(sent), len(sent[0]), 0x0A4D0002)
    agree(model, native)


def is_placed(placement: Placement, frame: wire.Frame, sender: int) -> bool:
    """Whether a frame is not one for Python."""
    stopped: list[bytes] = []
    placement.place_bytes(
        wire.encode(frame),
        lambda _: None,
        lambda _, datagram: stopped.append(datagram),
        sender=sender,
    )
    return not stopped


# --- the table --------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=200), st.booleans())
def test_what_is_entered_is_found_until_it_leaves(
    steps: list[tuple[int, bool]], alike: bool
) -> None:
    """`alike`: keys that differ where a table is tempted not to look."""
    placement = Placement()
    placement.know(NODES)
    numbers: dict[int, int] = {}
    rooms: dict[int, bytearray] = {}

    def block(key: int) -> wire.BlockId:
        number = key << 64 if alike else key * 0x9E3779B97F4A7C15
        return wire.BlockId(1, number.to_bytes(16, "big"))

    for key, entering in steps:
        if entering and key not in numbers:
            rooms[key] = bytearray(10)
            numbers[key], _, _ = placement.enter(
                block(key), 10, 1, memoryview(rooms[key]), wire.CELLS, {2}
            )
        elif not entering and key in numbers:
            placement.leave(numbers.pop(key))
        assert len(placement) == len(numbers)
    for key in range(61):
        frame = wire.Frame(
            wire.OP_DATA, *block(key), digest=1, size=10, payload=bytes([key + 1]) * 10
        )
        assert is_placed(placement, frame, 0x0A4D0002) == (key in numbers)
    for key, room in rooms.items():
        assert room == (bytes([key + 1]) * 10 if key in numbers else bytes(10))


def test_compiled_code_takes_data_from_those_who_are_listened_to() -> None:
    placement = Placement()
    placement.know(NODES)
    room = bytearray(10)
    number, _, _ = placement.enter(KEYED, 10, 1, memoryview(room), wire.CELLS, {2, 3})
    frame = wire.Frame(wire.OP_DATA, *KEYED, digest=1, size=10, payload=bytes(10))

    assert [is_placed(placement, frame, ip) for ip in NODES] == [True, True, False]
    placement.listen(number, {400})
    assert placement.listens_to(number) == {400}
    assert [is_placed(placement, frame, ip) for ip in NODES] == [False, False, True]


def test_compiled_code_takes_chunks_of_the_chosen_copy() -> None:
    placement = Placement()
    placement.know(NODES)
    room = bytearray(10)
    placement.enter(KEYED, 10, 1, memoryview(room), wire.CELLS, {2})
    frame = wire.Frame(wire.OP_DATA, *KEYED, digest=1, size=10, payload=b"x" * 10)
    for other in (replace(frame, digest=2), replace(frame, size=11), replace(frame, namespace=8)):
        assert not is_placed(placement, other, 0x0A4D0002)
        assert room == bytes(10)
    assert is_placed(placement, frame, 0x0A4D0002)
    assert room == b"x" * 10


@pytest.mark.parametrize("chunking", wire.CHUNKINGS[1:])
def test_chunks_may_be_larger(chunking: wire.Chunking) -> None:
    placement = Placement()
    chunk_bytes = chunking.chunk_bytes
    size = wire.SEGMENT_BYTES + 64 * chunk_bytes + chunk_bytes + 5
    data = random.Random(1).randbytes(size)
    memory = bytearray(MARGIN + size + MARGIN)
    number, _, missing = placement.enter(
        KEYED, size, 1, memoryview(memory)[MARGIN : MARGIN + size], chunking, {2}
    )
    of_first = wire.SEGMENT_BYTES // chunk_bytes
    assert missing == [(1 << of_first) - 1, (1 << 64) - 1, 0b11]
    places = [(0, c) for c in range(of_first)] + [(1, c) for c in range(64)] + [(2, 0), (2, 1)]
    for number_of_place, (segment, chunk) in enumerate(places):
        start = number_of_place * chunk_bytes
        header = wire.header_of(
            wire.Frame(
                wire.OP_DATA, *KEYED, chunking.number(segment), digest=1, size=size, chunk=chunk
            )
        )
        payload = data[start : start + chunk_bytes].ljust(chunk_bytes, b"\xee")
        assert placement.put(number, header + payload, 2) is not None
        assert placement.put(number, header + payload[:1024], 2) is None, "of another length"
    assert memory == bytes(MARGIN) + data + bytes(MARGIN)


# --- a requester ------------------------------------------------------------------------------

BLOCK = wire.BlockId(7, bytes(range(16)))
SIZE = 2 * wire.SEGMENT_BYTES + 3000
BYTES = random.Random(5).randbytes(SIZE)
DIGEST = wire.digest_of(BYTES)


class Sent(NamedTuple):
    """What varies between the DATA frames of these tests."""

    segment: int
    chunk: int
    flags: int = 0
    digest: int = DIGEST
    tag: int = 1

    @property
    def frame(self) -> wire.Frame:
        start = self.segment * wire.SEGMENT_BYTES + self.chunk * wire.CHUNK_BYTES
        return wire.Frame(
            wire.OP_DATA,
            *BLOCK,
            self.segment,
            self.flags,
            digest=self.digest,
            size=SIZE,
            chunk=self.chunk,
            tag=self.tag,
            payload=BYTES[start : start + wire.CHUNK_BYTES],
        )


@st.composite
def odd_frames(draw: st.DrawFn) -> Sent:
    """DATA of the block, mostly; now and then of another copy, segment or tag."""
    segment = draw(st.sampled_from([0, 0, 0, 1, 2]))
    flags = draw(st.sampled_from([0, 0, 0, 0, wire.FLAG_SHARED, wire.FLAG_RESIDENT]))
    return Sent(
        segment,
        draw(st.integers(0, wire.CELLS.chunks_of(SIZE, segment) - 1)),
        flags | draw(st.sampled_from([0, 0, 0, wire.FLAG_LAST])),
        draw(st.sampled_from([DIGEST, DIGEST, DIGEST, DIGEST, 99])),
        draw(st.sampled_from([1, 1, 1, 2])),
    )


@st.composite
def answers(draw: st.DrawFn) -> list[wire.Frame]:
    """Whole segments, as a home sends them, and odd frames in between."""
    mixed = []
    for segment in draw(st.permutations([0, 1, 2])):
        count = wire.CELLS.chunks_of(SIZE, segment)
        mixed += [Sent(segment, chunk) for chunk in range(count - 1)]
        mixed.append(Sent(segment, count - 1, wire.FLAG_LAST))
    for at, sent in draw(st.lists(st.tuples(st.integers(0, 130), odd_frames()), max_size=12)):
        mixed.insert(at, sent)
    return [sent.frame for sent in mixed]


class Reader:
    """A requester that has asked for the block."""

    def __init__(self) -> None:
        self.core = Requester(
            RequesterConfig(),
            allocate=lambda _block, size: Room(memoryview(bytearray(size))),
            rng=random.Random(1),
        )
        self.core.placement.know({1: 1, 2: 2})
        self.core.fetch(0.0, BLOCK, (1, 2), deadline=60.0, expect_size=SIZE)
        self.core.frames_to_send()
        self.ended: list[Event] = []

    def receive_pieces(self, data: bytes) -> None:
        def arrived(arrivals: list[Arrived]) -> None:
            self.core.placed(0.01, arrivals)

        def frame(source: int, datagram: bytes) -> None:
            self.core.receive(0.01, source, wire.decode(datagram))

        self.core.placement.place_bytes(
            data, arrived, frame, stride=wire.HEADER_BYTES + wire.CHUNK_BYTES, sender=1
        )
        self.note()

    def note(self) -> None:
        self.core.check()
        while (event := self.core.next_event()) is not None:
            self.ended.append(event)

    def bytes(self) -> list[bytes]:
        return [bytes(e.buffer) for e in self.ended if isinstance(e, Fetched)]


@given(answers(), st.integers(1, 200))
@pytest.mark.slow
def test_a_requester_comes_to_the_same_by_pieces_and_by_frames(
    answer: list[wire.Frame], piece: int
) -> None:
    by_pieces, by_frames = Reader(), Reader()
    for start in range(0, len(answer), piece):
        some = answer[start : start + piece]
        by_pieces.receive_pieces(b"".join(wire.encode(frame) for frame in some))
        for frame in some:
            by_frames.core.receive(0.01, 1, wire.decode(wire.encode(frame)))
            by_frames.note()
    assert by_pieces.bytes() == by_frames.bytes()
    assert all(data == BYTES for data in by_pieces.bytes())
    one, other = asdict(by_pieces.core.counters), asdict(by_frames.core.counters)
    # What follows a block's last missing chunk in a piece was in its place before anybody knew that
    # the fetch had ended: a duplicate there, and unsolicited for a requester that is told at once.
    for counters in (one, other):
        counters["surplus"] = counters.pop("unsolicited") + counters.pop("duplicates")
    assert one == other
    assert by_pieces.core.frames_to_send() == by_frames.core.frames_to_send()
