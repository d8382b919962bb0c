"""Hostile bytes, made from well-formed ones; the same for the same seed.

Owns: what is sent at each entry point of a pool. Must not know: sockets, or how any part defends
itself. A frame or a message is well-formed, mutated, or noise; a mutated one has a few bits, bytes
or lengths changed, is cut short, or is longer than it says.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from kvcast.protocol.messages import ethernet, framing, local, wire
from kvcast.topologies.star import Host
from kvcast.workloads import content

BLOCK_BYTES = 16 * 1024
"""Size of the blocks that hostile frames are about."""


def mutate(message: bytes, rng: random.Random) -> bytes:
    """`message` with something wrong about it (now and then nothing)."""
    data = bytearray(message)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        kind = rng.randrange(8)
        at = rng.randrange(len(data)) if data and kind else 0
        if not data or kind == 0:
            data += rng.randbytes(rng.choice((1, 7, 64, 600)))
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 4:
            width = rng.choice((2, 4, 8))
            data[at : at + width] = rng.choice((b"\x00", b"\xff")) * width
        elif kind == 5:
            data[at:at] = data[at : at + rng.randrange(1, 32)]
        elif kind == 6:
            del data[at : at + rng.randrange(1, 32)]
        else:
            data[at : at + 8] = rng.randbytes(8)
    return bytes(data)


def encapsulation(me: Host, other: Host) -> ethernet.Encapsulation:
    """What wraps datagrams from one host to another."""
    ends = [
        ethernet.Endpoint(ethernet.parse_mac(h.mac), ethernet.parse_ip(h.ip), h.udp_port)
        for h in (me, other)
    ]
    return ethernet.Encapsulation(*ends)


def seed_datagrams(namespace: int, key: bytes) -> list[bytes]:
    """Well-formed kvcast datagrams about one block: every operation, with many flags."""
    data = content.block_bytes(key, BLOCK_BYTES)
    digest = wire.digest_of(data)
    frames = [
        wire.Frame(wire.OP_READ, namespace, key, wanted=wire.FULL_SEGMENT, tag=7, gather=20),
        wire.Frame(wire.OP_READ, namespace, key, flags=wire.FLAG_RETRY, wanted=wire.FULL_SEGMENT),
        wire.Frame(wire.OP_READ, namespace, key, flags=wire.FLAG_PARTIAL, wanted=0b1010, tag=9),
        wire.Frame(wire.OP_READ, namespace, key, digest=digest, wanted=wire.FULL_SEGMENT, group=1),
        wire.Frame(wire.OP_MISS, namespace, key, chunk=wire.MISS_NOT_FOUND),
        wire.Frame(
            wire.OP_OFFER,
            namespace,
            key,
            digest=digest,
            size=len(data),
            payload=wire.encode_offer(wire.Offer(wire.OFFER_TCP, 9, 0x0A4D0001, 1, 0)),
        ),
    ]
    chunks = len(data) // wire.CHUNK_BYTES
    for chunk in (0, chunks // 2, chunks - 1):
        part = data[chunk * wire.CHUNK_BYTES : (chunk + 1) * wire.CHUNK_BYTES]
        flags = wire.FLAG_LAST if chunk == chunks - 1 else 0
        frames.append(
            wire.Frame(
                wire.OP_DATA,
                namespace,
                key,
                flags=flags,
                digest=digest,
                size=len(data),
                chunk=chunk,
                payload=bytes(len(part)),  # not the block's bytes: must never be delivered
            )
        )
    return [wire.encode(frame) for frame in frames]


def foreign_frames(me: Host) -> list[bytes]:
    """Ethernet frames that are none of ours."""
    source = ethernet.parse_mac(me.mac)
    broadcast = b"\xff" * 6 + source
    return [broadcast + b"\x08\x06" + bytes(46), broadcast + b"\x86\xdd" + bytes(60)]


def hostile_frames(
    rng: random.Random,
    me: Host,
    other: Host,
    namespace: int,
    keys: Sequence[bytes],
    *,
    backward: float,
) -> Iterator[bytes]:
    """Hostile frames without end from one host to another about some blocks; of `backward`, that
    share goes the other way, as if the other had sent it. Each is noise, a well-formed one, a
    mutated one, or one whose datagram is mutated and whose Ethernet, IPv4 and UDP headers are
    right."""
    wraps = [encapsulation(me, other).wrap, encapsulation(other, me).wrap]
    datagrams = [each for key in keys for each in seed_datagrams(namespace, key)]
    foreign = foreign_frames(me)
    while True:
        draw = rng.random()
        if draw < 0.05:
            yield rng.randbytes(rng.randrange(1, 1500))
            continue
        if draw < 0.06:
            yield rng.choice(foreign)
            continue
        wrap = wraps[rng.random() < backward]
        datagram = rng.choice(datagrams)
        if draw < 0.2:
            yield wrap(datagram)
        elif draw < 0.5:
            yield mutate(wrap(datagram), rng)
        else:
            yield wrap(mutate(datagram, rng)[: wire.MAX_DATAGRAM_BYTES])


def local_stream(
    rng: random.Random, namespace: int, keys: Sequence[bytes], last_request: int
) -> bytes:
    """What a hostile client says on one connection to an agent's Unix socket: a greeting, requests,
    and at last GetStats of that number, whose answer shows that the agent has read on to the end.
    """
    encode = framing.MessageCodec[Any](local.ClientMessage).encode
    share = rng.choice((0.0, 0.02, 0.1, 0.5))  # of messages that are not well-formed
    version = local.LOCAL_PROTOCOL_VERSION if rng.random() < 0.95 else rng.randrange(1 << 16)
    hello = encode(local.Hello(version, "hostile"))
    stream = hello if rng.random() < 0.9 else mutate(hello, rng)
    length = rng.choice((200, 1000, 4000, 8000))
    while len(stream) < length:
        message = encode(_request(rng, namespace, keys))
        if rng.random() < share:
            message = _spoiled(message, rng)
        stream += message
    return stream + encode(local.GetStats(last_request))


def _request(rng: random.Random, namespace: int, held: Sequence[bytes]) -> Any:
    number = rng.randrange(1 << 31)
    some = rng.choice((1, 1, 4, 40))
    keys = [rng.choice((rng.choice(held), rng.randbytes(16))) for _ in range(some)]
    fresh = [rng.randbytes(16) for _ in range(some)]  # the blocks put before stay what they are
    handles = [rng.randrange(1 << 16) for _ in range(some)]
    return rng.choice(
        (
            local.Get(number, namespace, keys, rng.choice((0.0, 0.001, 0.02))),
            local.Get(number, namespace, keys, 0.02, parents=keys[::-1], depths=handles),
            local.Exists(number, namespace, b"".join(keys[:4])[: rng.choice((64, 64, 63))], 0.02),
            local.Alloc(number, namespace, fresh, [rng.choice((1, 1000, 1 << 30))] * some),
            local.Alloc(number, namespace, fresh, [1] * (some + 1)),
            local.Commit(number, handles),
            local.Commit(number, handles[:1], "", True),
            local.Put(number, namespace, fresh[:1], handles[0]),
            local.Abort(number, handles),
            local.Release(handles),
            local.Drop(number, namespace, fresh[:4]),
            local.Pin(number, namespace, keys),
            local.Unpin(number, namespace, keys),
            local.DescribePool(number, namespace, keys),
            local.Get(number, rng.randrange(1 << 16), keys, 1.0),
        )
    )


def _spoiled(message: bytes, rng: random.Random) -> bytes:
    draw = rng.random()
    if draw < 0.4:  # a right length, and wrong bytes behind it
        body = mutate(message[4:], rng)
        return struct.pack("!I", len(body)) + body
    if draw < 0.85:
        return mutate(message, rng)
    return rng.randbytes(rng.randrange(1, 512))


def http_stream(rng: random.Random, namespace: int, key: bytes) -> bytes:
    """What a hostile client says on one connection to the HTTP API: one request, and what may
    follow on it."""
    body = json.dumps({"namespace": namespace, "key": key.hex()}).encode()
    if rng.random() < 0.5:
        body = mutate(body, rng)
    if rng.random() < 0.4:
        body += rng.randbytes(rng.choice((100, 4_000, 20_000)))
    method = rng.choice(("GET", "POST", "DELETE", "PUT", "BREW"))
    path = rng.choice(("/healthz", "/v1/status", "/v1/pin", "/v1/decisions", "/metrics", "/x"))
    path += rng.choice(("", "?" + "a" * rng.randrange(2000), "/../" * rng.randrange(20)))
    extra = rng.choice(
        (
            "Connection: close\r\n",
            "Connection: close\r\nX: " + "y" * rng.choice((10, 1_000, 10_000)) + "\r\n",
            "Connection: close\r\nExpect: everything\r\n",
            "",
        )
    )
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{extra}\r\n"
    ).encode()
    draw = rng.random()
    if draw < 0.5:
        return head + body
    if draw < 0.7:
        return mutate(head, rng) + body
    if draw < 0.95:
        return mutate(head + body, rng)
    return rng.randbytes(rng.choice((1, 100, 3_000)))
