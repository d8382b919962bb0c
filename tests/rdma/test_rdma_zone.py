"""A landing zone on a card (Soft-RoCE on a veth), and frames by hand at the other end: what the
card takes of what a switch could send, and what it sends itself.

Oracle: the zone's bytes, and ICRCs made by the book (`roce_frames`).
"""

from __future__ import annotations

import asyncio
import mmap
import random
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from kvcast.hostagent.network.landing_zone import LandingZone
from kvcast.hostagent.network.verbs import Card
from kvcast.protocol.links.rdma import RdmaOptions
from kvcast.protocol.messages import roce
from kvcast.protocol.messages.ethernet import parse_ip, parse_mac
from kvcast.protocol.requester.landing import LandingCounters
from p4_frames import checksum
from roce_frames import (
    DESTINATION,
    IDENTIFICATION,
    QUEUE_PAIR,
    SOURCE,
    SOURCE_PORT,
    is_right,
    write,
)
from roce_frames import KEY as WRITE_KEY

OWN, POOL = "10.79.0.1", "10.79.0.250"
POOL_MAC = "02:6b:76:00:00:fa"
PLACE = roce.place_of(7, bytes(range(16)), roce.SHARED_CHUNKING.number(1))
CHUNK = roce.SHARED_CHUNKING.chunk_bytes
REWRITTEN = (
    (IDENTIFICATION, 2),
    (SOURCE, 4),
    (DESTINATION, 4),
    (SOURCE_PORT, 2),
    (QUEUE_PAIR, 3),
    (WRITE_KEY, 4),
)


def run(*words: str) -> None:
    subprocess.run(words, check=True)


@pytest.fixture(scope="module")
def wire_end() -> Iterator[socket.socket]:
    """The other end of the cable of a card of its own."""
    run("ip", "link", "add", "zone0", "mtu", "9000", "type", "veth", "peer", "name", "zone1")
    for name in ("zone0", "zone1"):
        run("ip", "link", "set", name, "mtu", "9000", "up")
    run("ip", "address", "add", f"{OWN}/24", "dev", "zone0")
    run("ip", "neighbour", "add", POOL, "lladdr", POOL_MAC, "dev", "zone0")
    run("rdma", "link", "add", "rxe1", "type", "rxe", "netdev", "zone0")
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as end:
        end.bind(("zone1", 0x0800))
        yield end
    run("rdma", "link", "delete", "rxe1")
    run("ip", "link", "delete", "zone0")


class Bed:
    """A zone, and what has landed."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.arena = mmap.mmap(-1, 1 << 20)
        self.told: list[object] = []
        self.problems: list[str] = []
        view = memoryview(self.arena)
        self.card = Card(OWN, view, RdmaOptions(max_pairs=2))
        self.zone = LandingZone(
            self.card.name,
            self.card.port,
            self.card.gid_index,
            POOL,
            view,
            landed=self.told.extend,
            changed=lambda: None,
            failed=self.problems.append,
            counters=LandingCounters(),
        )
        self.zone.landing.claim(PLACE, "segment")
        self.mac = parse_mac(Path("/sys/class/net/zone0/address").read_text().strip())

    @property
    def target(self) -> roce.Target:
        return roce.Target(parse_ip(POOL), parse_ip(OWN), self.zone.queue_pair, self.zone.key)

    def frame(self, chunk: int, payload: bytes, **fields: int | bool) -> bytes:
        """As a switch sends it."""
        return write(1, PLACE, chunk, payload, target=self.target, mac=self.mac, **fields)

    def chunk(self, chunk: int) -> bytes:
        at = chunk * CHUNK
        return bytes(self.zone.landing.view(PLACE)[at : at + CHUNK])

    def landed(self) -> set[int]:
        """The chunks that the card has reported, as far as it was looked at."""
        came = self.zone.landing.peek(PLACE)
        return {chunk for chunk in range(64) if came >> chunk & 1}

    async def wait(self, chunk: int, *, look: bool = True) -> None:
        for _ in range(1000):
            if look:
                self.zone.look()
            if chunk in self.landed():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("nothing landed")


@pytest.fixture
async def bed(wire_end: socket.socket) -> AsyncIterator[Bed]:
    bed = Bed(wire_end)
    yield bed
    bed.zone.close()
    bed.card.close()
    assert not bed.problems


async def test_a_packet_lands_where_its_address_says_at_any_psn(bed: Bed) -> None:
    rng = random.Random(1)
    for chunk, psn in ((0, 7), (63, 0xFFFFFF), (5, 3)):
        data = rng.randbytes(CHUNK)
        bed.end.send(bed.frame(chunk, data, psn=psn))
        await bed.wait(chunk)
        assert bed.chunk(chunk) == data


async def test_the_last_packet_of_an_answer_wakes_whoever_awaits_one(bed: Bed) -> None:
    """And no other packet, and nobody else."""
    bed.end.send(bed.frame(0, bytes(CHUNK), solicited=True))
    await asyncio.sleep(0.5)
    assert not bed.landed()
    bed.zone.landing.await_more()  # what is there already is looked at, too
    await bed.wait(0, look=False)
    bed.zone.landing.await_end(PLACE, 0b11111, 1 << 4)
    await asyncio.sleep(0.1)
    bed.end.send(bed.frame(1, bytes(CHUNK)))
    await asyncio.sleep(0.5)
    assert bed.landed() == {0}
    bed.end.send(bed.frame(2, bytes(CHUNK), solicited=True))  # as another segment's last
    await bed.wait(2, look=False)
    assert bed.told == []
    bed.end.send(bed.frame(4, bytes(CHUNK), solicited=True))
    await bed.wait(4, look=False)
    assert bed.told == ["segment"]
    assert bed.landed() == {0, 1, 2, 4}


async def test_one_wrong_bit_in_any_field_that_a_switch_rewrites_is_refused(bed: Bed) -> None:
    """By the card: nothing lands, and nothing is reported."""
    before = bed.chunk(1)
    right = bed.frame(1, bytes(range(256)) * 16)
    for at, size in REWRITTEN:
        for bit in range(8 * size):
            changed = bytearray(right)
            changed[at + bit // 8] ^= 1 << bit % 8
            checksum(changed)
            bed.end.send(changed)
            if bit % 8 == 7:
                await asyncio.sleep(0.02)
    bed.end.send(bed.frame(2, bytes(CHUNK)))
    await bed.wait(2)
    assert bed.landed() == {2}
    assert bed.chunk(1) == before
    bed.end.send(right)
    await bed.wait(1)
    assert bed.chunk(1) == bytes(range(256)) * 16


async def test_what_the_card_sends_is_right_for_every_reader_once_readdressed(bed: Bed) -> None:
    """A whole segment with a short end, out of the arena and, readdressed, back into the zone."""
    data = random.Random(3).randbytes(2 * CHUNK + 1001)
    bed.arena[: len(data)] = data
    sent: list[bool] = []
    segment = memoryview(bed.arena)[: len(data)]
    bed.zone.write(PLACE, segment, 0b111, sent.append)
    origin = roce.Target(parse_ip(OWN), parse_ip(POOL), roce.POOL_QUEUE_PAIR, roce.POOL_KEY)
    change = roce.compensation(origin, bed.target)
    frames = []
    end = time.monotonic() + 20
    bed.end.setblocking(False)
    while len(frames) < 3 and time.monotonic() < end:
        await asyncio.sleep(0.02)
        try:
            frame = bed.end.recv(16_384)
        except BlockingIOError:
            continue
        if frame[0:6] == parse_mac(POOL_MAC):
            frames.append(frame)
    bed.end.setblocking(True)
    assert len(frames) == 3
    for frame in frames:
        assert is_right(frame)
        changed = bytearray(frame)
        changed[0:6] = bed.mac
        target = bed.target
        for at, size, value in (
            (SOURCE, 4, target.source),
            (DESTINATION, 4, target.destination),
            (QUEUE_PAIR, 3, target.queue_pair),
            (WRITE_KEY, 4, target.key),
        ):
            changed[at : at + size] = value.to_bytes(size, "big")
        for at, bits in (
            (IDENTIFICATION, change.identification),
            (SOURCE_PORT, change.source_port),
        ):
            changed[at] ^= bits >> 8
            changed[at + 1] ^= bits & 0xFF
        checksum(changed)
        assert is_right(bytes(changed))
        bed.end.send(changed)
    for chunk in range(3):
        await bed.wait(chunk)
    assert b"".join(map(bed.chunk, range(3)))[: len(data)] == data
    assert sent == [True]
    segment.release()
