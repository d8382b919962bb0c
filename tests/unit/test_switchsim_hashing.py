"""Hash algorithms of BMv2, and what they are given.

Oracle: published check values of the CRC catalogue for "123456789" (crc16 is CRC-16/ARC,
crcCCITT is CRC-16/CCITT-FALSE), RFC 1071's example, zlib, and hand-written C-like loops.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcast.switchsim import hashing, ir, loader
from kvcast.switchsim.engine import SwitchStats
from kvcast.switchsim.reference.actions import Actions
from kvcast.switchsim.reference.expressions import Expressions
from kvcast.switchsim.reference.phv import Layout

CHECK = b"123456789"
PROGRAMS = Path(__file__).resolve().parents[1] / "stf" / "programs"


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [
        ("crc16", 0xBB3D),
        ("crc16_custom", 0xBB3D),
        ("crc32", 0xCBF43926),
        ("crc32_custom", 0xCBF43926),
        ("crcCCITT", 0x29B1),
        ("crc8_custom", 0xF4),
        ("crc64_custom", 0x46A5A9388A5BEFFE),
        ("xxh64", 0x8CB841DB40E6AE83),
        ("bmv2_hash", 0x8CB841DB40E6AE83),
        ("identity", 0x3132333435363738),
        ("xor16", 0x3132 ^ 0x3334 ^ 0x3536 ^ 0x3738 ^ 0x3900),
        ("xor32", 0x31323334 ^ 0x35363738 ^ 0x39000000),
    ],
)
def test_check_value(algorithm: str, value: int) -> None:
    assert hashing.make(algorithm)(CHECK) == value


def test_internet_checksum_of_rfc_1071() -> None:
    assert hashing.csum16(bytes.fromhex("0001f203f4f5f6f7")) == 0xFFFF ^ 0xDDF2


def test_internet_checksum_of_nothing_and_of_zeros_is_all_ones() -> None:
    assert hashing.csum16(b"") == 0xFFFF
    assert hashing.csum16(bytes(20)) == 0xFFFF
    assert hashing.csum16(b"\xff\xff") == 0


@given(st.binary(max_size=70))
def test_internet_checksum_equals_the_plain_loop(data: bytes) -> None:
    total = 0
    padded = data + bytes(len(data) % 2)
    for at in range(0, len(padded), 2):
        total += padded[at] << 8 | padded[at + 1]
        total = (total & 0xFFFF) + (total >> 16)
    assert hashing.csum16(data) == total ^ 0xFFFF


@given(st.binary(max_size=40))
def test_crc32_is_the_one_of_zlib(data: bytes) -> None:
    assert hashing.make("crc32")(data) == zlib.crc32(data)


def test_hash_ex_reads_bytes_as_signed_chars() -> None:
    def step(h: int, char: int) -> int:
        return ((h ^ char) * 16777619) % 2**32

    h = step(step(2166136261, 0x41), -1)
    h = (h + (h << 13)) % 2**32
    h ^= h >> 7
    h = (h + (h << 3)) % 2**32
    h ^= h >> 17
    assert hashing.make("hash_ex")(b"A\xff") == (h + (h << 5)) % 2**32


def test_each_round_robin_has_a_count_of_its_own() -> None:
    one, other = hashing.make("round_robin"), hashing.make("round_robin")
    assert [one(b"x"), one(b"x"), other(b"x"), one(b"y")] == [0, 1, 0, 2]


def test_consistent_round_robin_repeats_itself_and_forgets_at_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hashing, "ROUND_ROBIN_MEMORY", 2)
    spread = hashing.make("round_robin_consistent")
    assert [spread(b"a"), spread(b"b"), spread(b"a")] == [0, 1, 0]
    assert spread(b"c") == 0


def test_fields_are_packed_as_long_as_they_are_and_those_of_invalid_headers_not_at_all() -> None:
    program = loader.load_file(PROGRAMS / "headers.json")
    names = [header.name for header in program.headers]
    options, num = names.index("options"), names.index("num")
    layout = Layout(program)
    actions = Actions(Expressions(layout, []), [], [], [], 511, random.Random(0), SwitchStats())
    items = [ir.PackedHeader(options), ir.PackedConst(0x3AB, 8), ir.FieldRef(num, 0)]
    pack = actions.packer([*items, ir.PackedConst(0b101, 3)])
    phv = layout.empty[:]
    assert pack(phv, b"payload") == bytes([0xAB, 0b101_00000]) + b"payload"
    length, data = layout.first_field[options], layout.length_slot[options]
    assert data is not None
    phv[layout.valid[options]] = phv[layout.valid[num]] = 1
    phv[length], phv[length + 1], phv[data] = 2, 0xF0A55A, 16  # of at most 64 bits
    phv[layout.first_field[num]] = -2
    assert pack(phv, b"") == bytes([2, 0xA5, 0x5A, 0xAB, 0xFE, 0b101_00000])
