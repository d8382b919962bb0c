"""The compiled mover over sockets of the kernel's own.

Oracle: `wire.encode` and `Encapsulation.wrap` of each frame, as Python makes them, and the order in
which they were given. A pair of Unix sockets, whose queue is short, stands for a network card that
takes no more. Cannot see: what is received (test_hostagent_transport.py).
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator, Sequence

import pytest
from kvcast.hostagent.network.mover import BATCH, WAITING_FRAMES, Mover
from kvcast.protocol.lane import JOB, OFFER_CODE, datagrams_of
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint
from kvcast.protocol.placement import address_of_buffer
from kvcast.protocol.requester import ReadFrames
from kvcast.protocol.responder import Answer, Responder, ResponderConfig
from msgspec.structs import replace

SIZE = 2 * wire.SEGMENT_BYTES + 5 * 1024 + 77
BYTES = random.Random(3).randbytes(SIZE)
BLOCK = wire.BlockId(0x1234, bytes(range(16)))
ME = Endpoint(b"\x02kv\x00\x00\x01", 0x0A4D0001)
PEERS = {
    index: Endpoint(b"\x02kv\x00\x00" + bytes([index]), 0x0A4D0000 + index) for index in (2, 7)
}
WRAPS = {index: Encapsulation(ME, endpoint) for index, endpoint in PEERS.items()}
READ = wire.Frame(wire.OP_READ, *BLOCK, wanted=wire.FULL_SEGMENT, tag=9)
TOGETHER = [
    (node, ReadFrames(replace(READ, flags=flags), [0x1234, 0xFFFF_FFFF, *range(2 * count - 2)]))
    for node, flags, count in (
        (7, wire.FLAG_SHARED, 2),
        (2, wire.FLAG_PADDED, BATCH + 9),
        (7, 0, 1),
    )
]
"""READs that leave together."""


class Held:
    """A block in memory that can be written to, as an arena can."""

    digest = wire.digest_of(BYTES)

    def __init__(self) -> None:
        self.data = memoryview(bytearray(BYTES))

    def release(self) -> None:
        self.data.release()


def answers(
    *reads: tuple[int, int, int], turn: int = 8
) -> Sequence[tuple[int, wire.Frame | Answer]]:
    """What a home sends to READs (reader, segment, wanted chunks)."""
    home = Responder(ResponderConfig(turn_frames=turn), lookup=lambda _block: Held())
    for tag, (reader, segment, wanted) in enumerate(reads):
        partial = wire.FLAG_PARTIAL if wanted != wire.FULL_SEGMENT else 0
        home.receive(
            0.0, reader, wire.Frame(wire.OP_READ, *BLOCK, segment, partial, wanted=wanted, tag=tag)
        )
    return home.answers_to_send(0.0, 10_000)


def frames_of(
    items: Sequence[tuple[int, wire.Frame | Answer | ReadFrames]],
) -> list[tuple[int, wire.Frame]]:
    """Each as frames."""
    frames: list[tuple[int, wire.Frame]] = []
    for node, item in items:
        frames += [(node, f) for f in ([item] if isinstance(item, wire.Frame) else item.frames())]
    return frames


def unix_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


def all_of(sock: socket.socket) -> list[bytes]:
    """What has arrived."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(sock.recv(65536))
    return found


@pytest.fixture
def udp() -> Iterator[tuple[socket.socket, dict[int, socket.socket]]]:
    """A socket, and those of two nodes."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(3):
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            sock.bind(("127.0.0.1", 0))
            sock.setblocking(False)
            sockets.append(sock)
        yield sockets[0], dict(zip(PEERS, sockets[1:], strict=True))


ODD = 0x8000_0000_0000_0001
READS = [(2, 0, wire.FULL_SEGMENT), (7, 0, ODD), (2, 1, ODD | 0xF0), (7, 2, wire.FULL_SEGMENT)]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("turn", [1, 8, 64])
def test_answers_leave_as_the_datagrams_that_python_would_make(
    udp: tuple[socket.socket, dict[int, socket.socket]], joins: bool, turn: int
) -> None:
    sock, nodes = udp
    mover = Mover(sock, connected=False, joins=joins)
    mover.know({index: node.getsockname() for index, node in nodes.items()}, {})
    sent = [(7, READ), *answers(*READS, turn=turn), *[(2, READ)] * (BATCH + 3)]
    sent[1:1], sent[6:6], sent[9:9] = ([each] for each in TOGETHER)
    expected = frames_of(sent)
    mover.send(sent)
    for index, node in nodes.items():
        assert all_of(node) == [wire.encode(frame) for to, frame in expected if to == index]
    assert mover.take_counts() == (len(expected), 0, 0, 0)
    assert mover.take_counts() == (0, 0, 0, 0)
    assert mover.joins == joins


@pytest.mark.parametrize("joins", [False, True])
def test_a_tunnel_wraps_them(joins: bool) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as switch,
    ):
        switch.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        switch.bind(("127.0.0.1", 0))
        switch.setblocking(False)
        ours.connect(switch.getsockname())
        ours.setblocking(False)
        mover = Mover(ours, connected=True, joins=joins)
        mover.know({}, WRAPS)
        sent = [*answers(*READS), (2, READ), *TOGETHER, (7, READ)]
        expected = [WRAPS[to].wrap(wire.encode(frame)) for to, frame in frames_of(sent)]
        mover.send(sent)
        assert all_of(switch) == expected


def test_reads_for_nobody_known_are_counted() -> None:
    ours, theirs = unix_pair()
    with ours, theirs:
        mover = Mover(ours, connected=True, joins=False)
        mover.know({}, WRAPS)
        mover.send([(5, TOGETHER[0][1]), (100, TOGETHER[0][1]), (2, READ)])
        assert mover.take_counts() == (1, 0, 4, 0)
        assert all_of(theirs) == [WRAPS[2].wrap(wire.encode(READ))]


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_lanes_jobs_leave_as_the_datagrams_that_python_would_make(wrapped: bool) -> None:
    ours, theirs = unix_pair()
    payload, segment = bytearray(range(wire.OFFER_BYTES)), bytearray(BYTES[:65000])
    data = wire.Frame(wire.OP_DATA, *BLOCK, digest=5, size=SIZE, tag=9)
    offer = replace(data, op=wire.OP_OFFER, payload=bytes(payload))
    jobs = bytearray(
        JOB.pack(wire.header_of(offer), 7, address_of_buffer(payload), 24, 0, 0, OFFER_CODE)
        + JOB.pack(wire.header_of(data), 7, address_of_buffer(segment), 65000, 0b1001, 1, 0)
        + JOB.pack(wire.header_of(data), 2, address_of_buffer(segment), 65000, 1 << 63, 0, 0)
    )
    frames = [
        (7, offer),
        (7, replace(data, payload=segment[:1024])),
        (7, replace(data, chunk=3, flags=wire.FLAG_LAST, payload=segment[3072:4096])),
        (2, replace(data, chunk=63, payload=segment[63 * 1024 :])),
    ]
    expected = [(node, wire.encode(frame)) for node, frame in frames]
    address = address_of_buffer(jobs)
    assert list(datagrams_of(address, 3)) == expected
    with ours, theirs, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as node:
        if wrapped:
            mover = Mover(ours, connected=True, joins=False)
            mover.know({}, WRAPS)
            mover.send_jobs(address, 3)
            assert all_of(theirs) == [WRAPS[to].wrap(datagram) for to, datagram in expected]
        else:
            node.bind(("127.0.0.1", 0))
            node.setblocking(False)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                mover = Mover(sock, connected=False, joins=True)
                mover.know(dict.fromkeys((2, 7), node.getsockname()), {})
                mover.send_jobs(address, 3)
                assert all_of(node) == [datagram for _, datagram in expected]
                mover.send([(2, READ)])  # its own jobs are where they were
                assert all_of(node) == [wire.encode(READ)]
                assert mover.take_counts() == (5, 0, 0, 0)


def test_larger_chunks_leave_as_they_lie(
    udp: tuple[socket.socket, dict[int, socket.socket]],
) -> None:
    sock, nodes = udp
    mover = Mover(sock, connected=False, joins=False)
    mover.know({index: node.getsockname() for index, node in nodes.items()}, {})
    for chunking in wire.CHUNKINGS[1:]:
        sent = answers((2, chunking.number(0), wire.FULL_SEGMENT))
        expected = [wire.encode(frame) for _, frame in frames_of(sent)]
        mover.send(sent)
        assert all_of(nodes[2]) == expected
        assert len(expected) == chunking.chunks_of(len(BYTES), 0)


def test_what_the_socket_does_not_take_waits_in_order_up_to_the_bound() -> None:
    ours, theirs = unix_pair()
    with ours, theirs:
        mover = Mover(ours, connected=True, joins=False)
        mover.know({}, WRAPS)
        sent = answers(*[(2, segment, wire.FULL_SEGMENT) for segment in (0, 1)])
        expected = [WRAPS[2].wrap(wire.encode(frame)) for _, frame in frames_of(sent)]
        mover.send(sent)
        counts = mover.take_counts()
        assert 0 < counts.sent < len(expected)
        assert mover.waiting == len(expected) - counts.sent
        for _, answer in sent:  # nothing of the block is needed any more
            assert isinstance(answer, Answer)
            answer.segment[:] = bytes(len(answer.segment))
        mover.send([(7, READ)])
        assert mover.take_counts().sent == 0, "it goes behind what waits"
        arrived = all_of(theirs)
        while mover.waiting:
            mover.send_waiting()
            arrived += all_of(theirs)
        assert arrived == [*expected, WRAPS[7].wrap(wire.encode(READ))]
        taken = counts.sent + mover.take_counts().sent
        assert taken == len(expected) + 1

        mover.send([(2, READ)] * (WAITING_FRAMES + 600))
        first = mover.take_counts()
        assert mover.waiting == WAITING_FRAMES
        assert (first.sent + WAITING_FRAMES + first.dropped, first.errors) == (
            WAITING_FRAMES + 600,
            0,
        )
        assert first.dropped > 0


def test_frames_for_a_node_that_has_left_are_counted_and_not_sent() -> None:
    ours, theirs = unix_pair()
    with ours, theirs:
        mover = Mover(ours, connected=True, joins=False)
        mover.know({}, WRAPS)
        lost = answers((3, 0, 0b111))
        mover.send([*lost, (99, READ), (2, READ)])
        assert mover.take_counts() == (1, 0, 4, 0)
        mover.send([(2, READ), (7, READ)] * 400)
        counts = mover.take_counts()
        waiting = mover.waiting
        assert waiting == 800 - counts.sent > 0
        mover.know({}, {7: WRAPS[7]})
        arrived = len(all_of(theirs)) - 1
        while mover.waiting:
            mover.send_waiting()
            arrived += len(all_of(theirs))
        after = mover.take_counts()
        assert after.left == waiting // 2 + waiting % 2 * (counts.sent % 2 == 0)
        assert arrived == counts.sent + after.sent == 800 - after.left


def test_where_the_kernel_cannot_split_frames_they_leave_one_by_one(
    udp: tuple[socket.socket, dict[int, socket.socket]],
) -> None:
    sock, nodes = udp
    sock.setsockopt(socket.SOL_SOCKET, 11, 1)  # SO_NO_CHECK: UDP_SEGMENT is refused
    mover = Mover(sock, connected=False, joins=True)
    mover.know({index: node.getsockname() for index, node in nodes.items()}, {})
    sent = answers((2, 0, wire.FULL_SEGMENT))
    expected = [wire.encode(frame) for _, frame in frames_of(sent)]
    mover.send(sent)
    assert all_of(nodes[2]) == expected
    assert not mover.joins
    assert mover.take_counts() == (64, 0, 0, 0)


def test_an_error_of_an_earlier_datagram_costs_no_frame_of_a_piece() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as switch,
    ):
        switch.bind(("127.0.0.1", 0))
        address = switch.getsockname()
        ours.connect(address)
        ours.setblocking(False)
        mover = Mover(ours, connected=True, joins=True)
        mover.know({}, WRAPS)
        switch.close()
        mover.send([(2, READ)])  # the kernel reports that nobody is there
        mover.send(answers((2, 0, wire.FULL_SEGMENT)))
        counts = mover.take_counts()
        assert counts.errors > 0
        assert counts.sent + counts.errors >= 65
        assert mover.joins
        assert mover.waiting == 0
