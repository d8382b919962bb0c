"""RoCE frames by hand, with the check (ICRC) as network cards compute it.

`check` goes by the InfiniBand annex on RoCEv2 alone: a CRC32 over the packet with the fields that
routers may change as ones. It shares no code with `protocol/messages/roce.py`, whose constants are
tested by it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from kvcast.protocol.messages import roce
from p4_frames import checksum
from pool_switch import Entry, endpoint

POOL_IP = 0x0A4D00FA
POOL_MAC = b"\x02\x6b\x76\x00\x00\xfa"
IDENTIFICATION, SOURCE, DESTINATION, SOURCE_PORT = 18, 26, 30, 34
QUEUE_PAIR, PSN, ADDRESS, KEY, SIZE, IMMEDIATE, PAYLOAD = 47, 51, 54, 62, 66, 70, 74


class Zone(NamedTuple):
    """What a reader has registered."""

    queue_pair: int
    key: int


def zone_of(host: int) -> Zone:
    return Zone(0x11 * host, 0x01020300 + host)


def target_of(host: int) -> roce.Target:
    """A packet as it reaches a host's zone."""
    zone = zone_of(host)
    return roce.Target(POOL_IP, endpoint(host).ip, zone.queue_pair, zone.key)


def to_pool(home: int) -> roce.Target:
    """A packet as a home sends it."""
    return roce.Target(endpoint(home).ip, POOL_IP, roce.POOL_QUEUE_PAIR, roce.POOL_KEY)


def zone_entries(homes: tuple[int, ...], readers: tuple[int, ...]) -> Iterator[Entry]:
    """What a controller writes for readers that have zones, and homes that may write to them."""
    yield Entry("rdma_target", (POOL_IP, roce.POOL_QUEUE_PAIR), "to_pool")
    for reader in readers:
        at, zone = endpoint(reader), zone_of(reader)
        yield Entry("rdma_target", (at.ip, zone.queue_pair), "to_zone")
        for home in homes:
            change = roce.compensation(to_pool(home), target_of(reader))
            yield Entry(
                "landing_zone",
                (home, reader),
                "readdress",
                (
                    int.from_bytes(at.mac, "big"),
                    POOL_IP,
                    at.ip,
                    zone.queue_pair,
                    zone.key,
                    change.identification,
                    change.source_port,
                    1 << (reader - 1),
                ),
            )


def masked(frame: bytes) -> bytes:
    """What the check covers."""
    ip = bytearray(frame[14:])
    ip[1] = ip[8] = ip[10] = ip[11] = ip[26] = ip[27] = ip[32] = 0xFF
    return b"\xff" * 8 + bytes(ip[:-4])


def check(frame: bytes) -> int:
    return zlib.crc32(masked(frame))


def stored(frame: bytes) -> int:
    return int.from_bytes(frame[-4:], "little")


def is_right(frame: bytes) -> bool:
    """Whether a card takes it: both checks."""
    fitting = bytearray(frame)
    checksum(fitting)
    return fitting == frame and check(frame) == stored(frame)


def packet(
    sender: int,
    source: int,
    destination: int,
    queue_pair: int,
    *,
    mac: bytes = POOL_MAC,
    opcode: int = roce.UC_WRITE_ONLY_WITH_IMMEDIATE,
    psn: int = 0,
    rest: bytes = b"",
    identification: int = 0,
    source_port: int = 0xC123,
    solicited: bool = False,
) -> bytes:
    """A RoCE packet as a card sends it."""
    bth = bytes((opcode, 0xC0 if solicited else 0x40)) + b"\xff\xff\0"
    bth += queue_pair.to_bytes(3, "big") + b"\0" + psn.to_bytes(3, "big")
    udp_bytes = 8 + len(bth) + len(rest) + 4
    ip = b"\x45\0" + (20 + udp_bytes).to_bytes(2, "big") + identification.to_bytes(2, "big")
    ip += b"\x40\0\x40\x11\0\0" + source.to_bytes(4, "big") + destination.to_bytes(4, "big")
    udp = source_port.to_bytes(2, "big") + roce.ROCE_UDP_PORT.to_bytes(2, "big")
    udp += udp_bytes.to_bytes(2, "big") + b"\0\0"
    frame = bytearray(mac + endpoint(sender).mac + b"\x08\0" + ip + udp + bth + rest + bytes(4))
    checksum(frame)
    return bytes(frame[:-4]) + check(frame).to_bytes(4, "little")


def write(
    home: int,
    place: roce.Place,
    chunk: int,
    payload: bytes,
    *,
    target: roce.Target | None = None,
    address: int | None = None,
    immediate: int | None = None,
    **fields: int | bytes,
) -> bytes:
    """A home's WRITE of a chunk for whoever waits, or to another target, address or immediate."""
    target = to_pool(home) if target is None else target
    low = place.address_low(chunk)
    at = roce.ZONE_ADDRESS | low if address is None else address
    says = place.immediate(chunk) if immediate is None else immediate
    rest = at.to_bytes(8, "big") + target.key.to_bytes(4, "big")
    rest += len(payload).to_bytes(4, "big") + says.to_bytes(4, "big") + payload
    return packet(
        home,
        target.source,
        target.destination,
        target.queue_pair,
        rest=rest,
        **fields,  # type: ignore[arg-type]
    )
