"""Compiled code that reads blocks from a socket, against a plain model, over loopback TCP.

Oracle: the bytes sent, cut into rooms by slices, and `digest_of`. Margins around each block show a
byte that went astray. Cannot see: what a connection makes of what has come
(`test_protocol_links_bulk`).
"""

from __future__ import annotations

import random
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvcast.hostagent.network import lander
from kvcast.hostagent.network.lander import PIECE_BYTES, Lander
from kvcast.protocol.links.stream import Room
from kvcast.protocol.messages.wire import digest_of

pytestmark = pytest.mark.skipif(not lander.available(), reason="this xxHash hides its functions")

MARGIN = 64
SIZES = st.one_of(
    st.integers(1, 20), st.integers(60_000, 70_000), st.just(PIECE_BYTES), st.just(PIECE_BYTES + 1)
)


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        reader, _ = server.accept()
    with sender, reader:
        reader.setblocking(False)
        yield sender, reader


def tell(rooms: deque[Room], size_bytes: int) -> list[Room]:
    """What `LinkStream.filled` makes of it; the rooms that are full."""
    full = []
    while size_bytes:
        room = rooms[0]
        part = min(size_bytes, room.size - room.there)
        room.there += part
        size_bytes -= part
        if room.there == room.size:
            full.append(rooms.popleft())
    return full


@given(
    shapes=st.lists(st.tuples(SIZES, st.booleans(), st.floats(0, 0.99)), min_size=1, max_size=80),
    cuts=st.lists(st.integers(1, 300_000), min_size=1, max_size=8),
    at_most=st.sampled_from([1, 1000, PIECE_BYTES, 1 << 22]),
    seed=st.integers(0, 1000),
)
@example(shapes=[(5, True, 0.0)] * 70, cuts=[1000], at_most=1 << 22, seed=1)
@settings(deadline=None, max_examples=40)
def test_bytes_go_into_their_rooms_and_nowhere_else(
    shapes: list[tuple[int, bool, float]], cuts: list[int], at_most: int, seed: int
) -> None:
    rng = random.Random(seed)
    whole = [rng.randbytes(size) for size, _, _ in shapes]
    memories = [bytearray(MARGIN + size + MARGIN) for size, _, _ in shapes]
    rooms: deque[Room] = deque()
    stream = b""
    for data, memory, (size, wanted, part) in zip(whole, memories, shapes, strict=True):
        there = int(part * size) if wanted else 0
        view = memoryview(memory)[MARGIN : MARGIN + size]
        view[:there] = data[:there]
        rooms.append(Room(view if wanted else None, size, there))
        stream += data[there:]
    expected = [digest_of(d) for d, (_, wanted, _) in zip(whole, shapes, strict=True) if wanted]
    behind = b"a message"
    digests: list[int] = []
    with connected() as (sender, reader):
        landing = Lander(reader.fileno())
        left = stream + behind
        turn = 0
        while rooms:
            cut, turn = cuts[turn] if turn < len(cuts) else 1 << 20, turn + 1
            if left:
                sender.settimeout(0.01)
                try:
                    left = left[sender.send(left[:cut]) :]
                except TimeoutError:
                    pass  # its buffer is full: read first
            landed = landing.land(rooms, at_most)
            assert landed.lost is None
            full = tell(rooms, landed.size_bytes)
            assert len(full) == len(landed.digests)
            pairs = zip(full, landed.digests, strict=True)
            digests += [digest for room, digest in pairs if room.block is not None]
        sender.settimeout(60.0)
        sender.sendall(left)
        reader.setblocking(True)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)  # as the driver does
        assert reader.recv(len(behind), socket.MSG_WAITALL) == behind
    assert digests == expected
    for data, memory, (size, wanted, _) in zip(whole, memories, shapes, strict=True):
        assert memory[:MARGIN] == memory[MARGIN + size :] == bytes(MARGIN)
        assert memory[MARGIN : MARGIN + size] == (data if wanted else bytes(size))


def test_the_end_of_a_connection_is_told() -> None:
    room = Room(memoryview(bytearray(100)), 100, 0)
    with connected() as (sender, reader):
        sender.sendall(b"x" * 60)
        sender.shutdown(socket.SHUT_WR)
        landing, rooms = Lander(reader.fileno()), deque([room])
        landed = landing.land(rooms, 1 << 20)
        assert (landed.size_bytes, landed.digests, landed.lost) == (60, [], "")
    with connected() as (sender, reader):
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sender.close()  # a reset
        landed = Lander(reader.fileno()).land(deque([Room(None, 9, 0)]), 100)
        assert landed.lost
        assert not landed.size_bytes


def test_who_has_nothing_to_say_is_waited_for_a_moment_only() -> None:
    with connected() as (sender, reader):
        sender.sendall(b"x")
        landing = Lander(reader.fileno())
        landed = landing.land(deque([Room(None, 1 << 30, 0)]), 1 << 20)
        assert landed.waits
        assert landed.size_bytes in (0, 1)  # so little is not worth waking up for


def test_a_room_that_was_changed_meanwhile_is_known_anew() -> None:
    data = random.Random(1).randbytes(3000)
    memory = bytearray(3000)
    room = Room(memoryview(memory), 3000, 0)
    rooms = deque([room])
    with connected() as (sender, reader):
        landing = Lander(reader.fileno())
        landing.low_water_bytes = 1
        sender.sendall(data[:1000])
        assert tell(rooms, landing.land(rooms, 1000).size_bytes) == []
        at = room.there
        memory[at:2000] = data[at:2000]  # as if the core had been given these
        rest = data[2000:]
        if at < 1000:
            reader.setblocking(True)
            reader.recv(1000 - at, socket.MSG_WAITALL)
            reader.setblocking(False)
        room.there = 2000
        sender.sendall(rest)
        digests: list[int] = []
        while rooms:
            landed = landing.land(rooms, 1 << 20)
            digests += landed.digests
            tell(rooms, landed.size_bytes)
    assert memory == data
    assert digests == [digest_of(data)]
