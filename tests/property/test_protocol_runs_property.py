"""Frames that arrive in one piece have the same effect as frames that arrive one by one.

Oracle: `wire.decode` of each frame by itself and a second requester that is given single frames.
Cannot see: whether the kernel's offload splits datagrams where the adapter believes (that is
tests/unit/test_hostagent_transport.py).
"""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from kvcast.protocol.messages import wire
from kvcast.protocol.requester import Event, Fetched, Requester, RequesterConfig
from protocol_network import Room

BLOCK = wire.BlockId(7, bytes(range(16)))
SIZE = 2 * wire.SEGMENT_BYTES + 3000
BYTES = random.Random(5).randbytes(SIZE)
DIGEST = wire.digest_of(BYTES)
LEAD = 42


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
def frames(draw: st.DrawFn) -> Sent:
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
def answers(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, Sent]]]:
    """Whole segments, as a home sends them: their order, and odd frames in between."""
    order = draw(st.permutations([0, 1, 2]))
    return order, draw(st.lists(st.tuples(st.integers(0, 130), frames()), max_size=12))


def stream_of(order: list[int], odd: list[tuple[int, Sent]]) -> list[wire.Frame]:
    """The frames of `answers`."""
    mixed = []
    for segment in order:
        count = wire.CELLS.chunks_of(SIZE, segment)
        mixed += [Sent(segment, chunk) for chunk in range(count - 1)]
        mixed.append(Sent(segment, count - 1, wire.FLAG_LAST))
    for at, sent in odd:
        mixed.insert(at, sent)
    return [sent.frame for sent in mixed]


def runs_in(data: bytes, lead: int) -> list[wire.DataRun]:
    """As an adapter cuts a piece of frames that are `lead` bytes longer than their datagrams."""
    stride = lead + wire.HEADER_BYTES + wire.CHUNK_BYTES
    found = []
    at = 0
    while at < len(data):
        frame = wire.decode(memoryview(data)[at + lead : at + stride])
        found.append(wire.run_from(frame, data, at + lead, len(data), lead))
        at += stride * len(found[-1].chunks)
    return found


@given(st.lists(frames(), min_size=1, max_size=40), st.sampled_from([0, LEAD]))
def test_runs_hold_what_decoding_each_frame_gives(sent: list[Sent], lead: int) -> None:
    mixed = [each.frame for each in sent]
    data = b"".join(bytes(range(lead)) + wire.encode(frame) for frame in mixed)
    seen = []
    for run in runs_in(data, lead):
        assert run.last == bool(run.frame.flags & wire.FLAG_LAST) or len(run.chunks) > 1
        for number, chunk in enumerate(run.chunks):
            at = run.at + number * run.stride
            ends = run.last and number == len(run.chunks) - 1
            seen.append(
                (
                    run.frame.segment,
                    run.frame.digest,
                    run.frame.tag,
                    run.frame.flags | (wire.FLAG_LAST if ends else 0),
                    chunk,
                    bytes(run.data[at : at + wire.CHUNK_BYTES]),
                )
            )
    assert seen == [
        (f.segment, f.digest, f.tag, f.flags, f.chunk, bytes(f.payload).ljust(1024, b"\0"))
        for f in mixed
    ]


def test_what_lies_in_front_of_a_datagram_is_compared_too() -> None:
    frame = wire.Frame(wire.OP_DATA, *BLOCK, digest=1, size=SIZE, payload=bytes(1024))
    one = wire.encode(frame)
    other = bytearray(one)
    other[38] = 1  # the chunk
    for spoilt in range(LEAD):
        in_front = bytearray(LEAD)
        in_front[spoilt] = 1
        data = bytes(LEAD) + one + bytes(in_front) + bytes(other)
        assert wire.run_from(frame, data, LEAD, len(data), LEAD).chunks == [0]
    data = bytes(LEAD) + one + bytes(LEAD) + bytes(other)
    assert wire.run_from(frame, data, LEAD, len(data), LEAD).chunks == [0, 1]


class Reader:
    """A requester that has asked for the block."""

    def __init__(self) -> None:
        self.core = Requester(
            RequesterConfig(),
            allocate=lambda _block, size: Room(memoryview(bytearray(size))),
            rng=random.Random(1),
        )
        self.core.fetch(0.0, BLOCK, (1, 2), deadline=60.0, expect_size=SIZE)
        self.core.frames_to_send()
        self.ended: list[Event] = []

    def note(self) -> None:
        while (event := self.core.next_event()) is not None:
            self.ended.append(event)

    def bytes(self) -> list[bytes]:
        return [bytes(e.buffer) for e in self.ended if isinstance(e, Fetched)]


@given(answers(), st.integers(1, 60))
def test_a_requester_comes_to_the_same_by_runs_and_by_frames(
    answer: tuple[list[int], list[tuple[int, Sent]]], piece: int
) -> None:
    mixed = stream_of(*answer)
    by_runs, by_frames = Reader(), Reader()
    for start in range(0, len(mixed), piece):
        some = mixed[start : start + piece]
        for run in runs_in(b"".join(wire.encode(frame) for frame in some), 0):
            by_runs.core.receive_run(0.01, 1, run)
            by_runs.note()
        for frame in some:
            by_frames.core.receive(0.01, 1, wire.decode(wire.encode(frame)))
            by_frames.note()
    assert by_runs.bytes() == by_frames.bytes()
    assert all(data == BYTES for data in by_runs.bytes())
    one, other = asdict(by_runs.core.counters), asdict(by_frames.core.counters)
    # What follows a block's last missing chunk in a run is a duplicate there, but unsolicited for
    # a requester that has ended the fetch in between.
    for counters in (one, other):
        counters["surplus"] = counters.pop("unsolicited") + counters.pop("duplicates")
    assert one == other
    assert by_runs.core.frames_to_send() == by_frames.core.frames_to_send()
