"""Frames that hosts may put on their ports, well meant and not, from a seeded source of chance.

Few keys, segments and hosts, so that reads meet; every kind of kvcast frame, in and out of place;
damaged copies of them; and ordinary traffic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvcast.protocol.messages import ethernet, wire
from pool_switch import NAMESPACE, endpoint

FULL = wire.FULL_SEGMENT
LARGE_CHUNKS = tuple(chunking.number(0) for chunking in wire.CHUNKINGS[1:])


def random_frames(
    rng: random.Random,
    hosts: int,
    contents: dict[bytes, bytes],
    count: int,
    *,
    honest_home: bool = False,
) -> Iterator[tuple[int, bytes]]:
    """`count` frames with the port that each comes in by; host 1 owns all of `contents`, and
    damages no frames if it is honest."""
    for _ in range(count):
        port = rng.randint(1, hosts)
        choice = rng.random()
        if choice < 0.40:
            yield port, wrap(port, 1, read(rng, contents))
        elif choice < 0.75:
            yield 1, wrap(1, rng.randint(2, hosts), answer(rng, contents))
        elif choice < 0.80:
            yield port, wrap(rng.randint(1, hosts), rng.randint(1, hosts), answer(rng, contents))
        elif choice < 0.85:
            yield port, ordinary(rng, port, hosts)
        else:
            if honest_home:
                port = rng.randint(2, hosts)
            frame = rng.choice((read, answer))(rng, contents)
            yield port, damaged(rng, wrap(port, rng.randint(1, hosts), frame))


def wrap(sender: int, receiver: int, frame: wire.Frame) -> bytes:
    datagram = wire.encode(frame)
    return ethernet.Encapsulation(endpoint(sender), endpoint(receiver)).wrap(datagram)


def read(rng: random.Random, contents: dict[bytes, bytes]) -> wire.Frame:
    """A READ, padded, of a whole segment or of some chunks."""
    flags, wanted = wire.FLAG_PADDED, FULL
    choice = rng.random()
    if choice < 0.3:
        flags |= wire.FLAG_PARTIAL
        wanted = rng.choice((1 << rng.randrange(64), rng.getrandbits(64) | 1, 0b111))
    elif choice < 0.4:
        flags |= wire.FLAG_RETRY
    key = rng.choice(list(contents))
    digest = rng.choice((0, 0, wire.digest_of(contents[key]), 4711))
    return wire.Frame(
        wire.OP_READ,
        rng.choice((NAMESPACE,) * 9 + (NAMESPACE + 1,)),
        key,
        segment=rng.choice((0, 0, 0, 1, *LARGE_CHUNKS)),
        flags=flags,
        group=rng.choice((0, 0, 5, 6)),
        digest=digest,
        wanted=wanted,
        gather=rng.randrange(3),
        tag=rng.getrandbits(32),
    )


def answer(rng: random.Random, contents: dict[bytes, bytes]) -> wire.Frame:
    """A DATA, MISS or OFFER for one of the blocks."""
    key = rng.choice(list(contents))
    content = contents[key]
    digest = wire.digest_of(content) if rng.random() < 0.9 else 4711
    partial = wire.FLAG_PARTIAL if rng.random() < 0.2 else 0
    choice = rng.random()
    if choice < 0.1:
        return wire.Frame(wire.OP_MISS, NAMESPACE, key, flags=partial, chunk=rng.randint(1, 4))
    if choice < 0.15:
        offer = wire.encode_offer(wire.Offer(wire.OFFER_TCP, 9000, 1, 2, 0))
        return wire.Frame(
            wire.OP_OFFER, NAMESPACE, key, digest=digest, size=len(content), payload=offer
        )
    chunking = wire.chunking_of(rng.choice((0, 0, 0, *LARGE_CHUNKS)))
    chunk = rng.randrange(chunking.chunks_of(len(content), 0))
    last = wire.FLAG_LAST if rng.random() < 0.2 else 0
    at = chunk * chunking.chunk_bytes
    return wire.Frame(
        wire.OP_DATA,
        NAMESPACE,
        key,
        chunking.number(0),
        flags=partial | last,
        digest=digest,
        size=len(content),
        chunk=chunk,
        tag=rng.getrandbits(32),
        payload=content[at : at + chunking.chunk_bytes],
    )


def ordinary(rng: random.Random, port: int, hosts: int) -> bytes:
    """Traffic that is no business of ours: ARP to all, TCP, UDP to another port, fragments."""
    src, dst = endpoint(port), endpoint(rng.randint(1, hosts))
    if rng.random() < 0.3:
        return b"\xff" * 6 + src.mac + b"\x08\x06" + rng.randbytes(46)
    other = ethernet.Encapsulation(src, dst._replace(udp_port=53))
    frame = bytearray(other.wrap(rng.randbytes(rng.randrange(60, 200))))
    kind = rng.randrange(4)
    if kind == 0:
        frame[23] = 6  # TCP
    elif kind == 1:
        frame[20:22] = b"\x00\x05"  # a later fragment
    elif kind == 2:
        frame[0:6] = b"\x02\x99\x99\x99\x99\x99"  # a MAC that nobody has
    checksum(frame)
    return bytes(frame)


def damaged(rng: random.Random, frame: bytes) -> bytes:
    """A frame cut short, lengthened, or with a few bytes changed; half of the latter with an IPv4
    checksum that fits."""
    kind = rng.randrange(6)
    if kind == 0:
        return frame[: rng.randrange(14, len(frame))]
    if kind == 1:
        return frame + rng.randbytes(rng.randrange(1, 20))
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(12, min(len(frame), 94))] = rng.getrandbits(8)
    if rng.random() < 0.5:
        checksum(changed)
    return bytes(changed)


def checksum(frame: bytearray) -> None:
    """Make the IPv4 header checksum of a frame without options fit."""
    frame[24:26] = b"\0\0"
    total = int.from_bytes(frame[14:34], "big") % 0xFFFF or 0xFFFF
    frame[24:26] = (0xFFFF - total).to_bytes(2, "big")
