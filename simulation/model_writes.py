"""What the model sees of shared answers by RDMA (docs/rdma.md): RoCE packets by their offsets.

Owns: what such a packet says, and whether a card would take it. Must not know: any of the
product's code, as the model must not; nor what is right (`model`).
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import xxhash

_PORT = (4791).to_bytes(2, "big")
_BTH_AT = 42
_ADDRESS_AT, _KEY_AT, _SIZE_AT, _IMMEDIATE_AT, _PAYLOAD_AT = 54, 62, 66, 70, 74
_CHECK_BYTES = 4
_WRITE_ONLY_WITH_IMMEDIATE = 0x2B
CHUNK_BYTES = 4096
_IP_HEADER = slice(14, 34)

Place = tuple[int, int, int]
"""Namespace, index of the pending entry, slot of the landing zone."""


class SeenWrite(NamedTuple):
    """An RDMA WRITE of one chunk, as it looks from outside."""

    source_ip: int
    target_ip: int
    queue_pair: int
    key: int
    address: int
    immediate: int
    payload: bytes

    @property
    def place(self) -> Place:
        entry = self.immediate ^ (self.address & 0xFFFFFFFF)
        return entry >> 16, entry & 0xFFFF, self.address >> 18 & 0x7F

    @property
    def chunk(self) -> int:
        return self.address >> 12 & 0x3F


def is_roce(frame: bytes) -> bool:
    """Whether a frame is for an RDMA card."""
    return frame[12:14] == b"\x08\x00" and frame[23:24] == b"\x11" and frame[36:38] == _PORT


def look_write(frame: bytes) -> SeenWrite | None:
    """What a packet says; None if no card would take it, or it is no WRITE of a chunk."""
    if not is_roce(frame) or len(frame) < _PAYLOAD_AT + _CHECK_BYTES:
        return None
    if frame[_BTH_AT] != _WRITE_ONLY_WITH_IMMEDIATE or not checks(frame):
        return None
    size = int.from_bytes(frame[_SIZE_AT:_IMMEDIATE_AT], "big")
    padded = len(frame) - _PAYLOAD_AT - _CHECK_BYTES
    if size > CHUNK_BYTES or padded != -(-size // 4) * 4:
        return None
    return SeenWrite(
        int.from_bytes(frame[26:30], "big"),
        int.from_bytes(frame[30:34], "big"),
        int.from_bytes(frame[47:50], "big"),
        int.from_bytes(frame[_KEY_AT:_SIZE_AT], "big"),
        int.from_bytes(frame[_ADDRESS_AT:_KEY_AT], "big"),
        int.from_bytes(frame[_IMMEDIATE_AT:_PAYLOAD_AT], "big"),
        frame[_PAYLOAD_AT : _PAYLOAD_AT + size],
    )


def checks(frame: bytes) -> bool:
    """Whether both checks of a packet are right: its IPv4 header's, and its own (ICRC)."""
    return (
        int.from_bytes(frame[_IP_HEADER], "big") % 0xFFFF == 0
        and check_of(frame) == frame[-_CHECK_BYTES:]
    )


def check_of(frame: bytes) -> bytes:
    """A packet's check, by the annex on RoCE version 2: a CRC32 over all of it but what routers may
    change."""
    covered = bytearray(frame[14:-_CHECK_BYTES])
    for at in (1, 8, 10, 11, 26, 27, 32):
        covered[at] = 0xFF
    return zlib.crc32(covered, zlib.crc32(b"\xff" * 8)).to_bytes(_CHECK_BYTES, "little")


def slot_of(namespace: int, key: bytes) -> int:
    """The slot of a block's first segment in every landing zone."""
    hashed: int = xxhash.xxh3_64_intdigest(namespace.to_bytes(2, "big") + key)
    return hashed & 0x7F
