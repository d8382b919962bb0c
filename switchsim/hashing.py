"""BMv2's hash algorithms, by the names that they have in the JSON file.

Pure functions from bytes to an unsigned number of at most 64 bits, as in behavioral-model
src/bm_sim/calculations.cpp and simple_switch.cpp. `random` and `toeplitz` are missing on
purpose: BMv2 has no algorithm of the first name, and needs a key set by Thrift for the second.
"""

from __future__ import annotations

import binascii
import itertools
import zlib
from collections.abc import Callable
from typing import TypeAlias

import xxhash

Algorithm: TypeAlias = Callable[[bytes], int]


def reflect(value: int, width: int) -> int:
    """The lowest bit becomes the highest."""
    return int(f"{value:0{width}b}"[::-1], 2)


def crc_table(width: int, polynomial: int, *, reflected: bool) -> list[int]:
    """What each byte becomes in a CRC, the highest bit first, or (reflected) the lowest."""
    top, ones = 1 << (width - 1), (1 << width) - 1
    backwards = reflect(polynomial, width)
    table: list[int] = []
    for byte in range(256):
        r = byte if reflected else byte << (width - 8)
        for _ in range(8):
            if reflected:
                r = (r >> 1) ^ (backwards if r & 1 else 0)
            else:
                r = ((r << 1) ^ (polynomial if r & top else 0)) & ones
        table.append(r)
    return table


def _reflected_crc(width: int, polynomial: int) -> Algorithm:
    """A CRC that reflects its input and output, computed in reflected form."""
    table = crc_table(width, polynomial, reflected=True)

    def crc(data: bytes) -> int:
        r = 0
        for byte in data:
            r = table[(r ^ byte) & 0xFF] ^ (r >> 8)
        return r

    return crc


def _plain_crc8(data: bytes) -> int:
    r = 0
    for byte in data:
        r = _CRC8_TABLE[r ^ byte]
    return r


_CRC8_TABLE = crc_table(8, 0x07, reflected=False)


def csum16(data: bytes) -> int:
    """The Internet checksum (RFC 1071); an odd last byte is padded with zeros."""
    value = int.from_bytes(data + b"\0" if len(data) & 1 else data)
    total = value % 0xFFFF  # end-around carry: 2**16 == 1 modulo 2**16 - 1
    if total == 0 and value:
        total = 0xFFFF
    return total ^ 0xFFFF


def _crc_ccitt(data: bytes) -> int:
    return binascii.crc_hqx(data, 0xFFFF)


def _xxh64(data: bytes) -> int:
    return int(xxhash.xxh64_intdigest(data))


def _identity(data: bytes) -> int:
    return int.from_bytes(data[:8])


def _xor(width_bytes: int) -> Algorithm:
    def xor(data: bytes) -> int:
        result = 0
        for at in range(0, len(data), width_bytes):
            result ^= int.from_bytes(data[at : at + width_bytes].ljust(width_bytes, b"\0"))
        return result

    return xor


def _hash_ex(data: bytes) -> int:
    """simple_switch's hash_ex; its bytes are C++ chars, which are signed."""
    h = 2166136261
    for byte in data:
        h = ((h ^ (byte - 256 if byte > 127 else byte)) * 16777619) & 0xFFFFFFFF
    h = (h + (h << 13)) & 0xFFFFFFFF
    h ^= h >> 7
    h = (h + (h << 3)) & 0xFFFFFFFF
    h ^= h >> 17
    return (h + (h << 5)) & 0xFFFFFFFF


_crc16 = _reflected_crc(16, 0x8005)
_crc64 = _reflected_crc(64, 0x1B)

_PURE: dict[str, Algorithm] = {
    "xxh64": _xxh64,
    "bmv2_hash": _xxh64,
    "hash_ex": _hash_ex,
    "crc16": _crc16,
    "crc32": zlib.crc32,
    "crcCCITT": _crc_ccitt,
    "cksum16": csum16,
    "csum16": csum16,
    "identity": _identity,
    "xor16": _xor(2),
    "xor32": _xor(4),
    # The custom ones start with these parameters; only Thrift could change them.
    "crc8_custom": _plain_crc8,
    "crc16_custom": _crc16,
    "crc32_custom": zlib.crc32,
    "crc64_custom": _crc64,
}

ROUND_ROBIN_MEMORY = 65536
"""Distinct inputs that `round_robin_consistent` remembers; then it starts anew."""


def _round_robin() -> Algorithm:
    numbers = itertools.count()
    return lambda _data: next(numbers)


def _round_robin_consistent() -> Algorithm:
    seen: dict[bytes, int] = {}

    def number(data: bytes) -> int:
        if data not in seen and len(seen) >= ROUND_ROBIN_MEMORY:
            seen.clear()
        return seen.setdefault(data, len(seen))

    return number


ALGORITHMS = frozenset(_PURE) | {"round_robin", "round_robin_consistent"}


def make(name: str) -> Algorithm:
    """An instance of the algorithm (the round robins keep a count of their own)."""
    if name == "round_robin":
        return _round_robin()
    if name == "round_robin_consistent":
        return _round_robin_consistent()
    return _PURE[name]
