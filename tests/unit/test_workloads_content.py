"""The bytes that a bench writes and checks. Oracle: themselves, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcast.workloads.content import block_bytes, wrong_bytes

_KEYS = st.binary(min_size=16, max_size=16)


@given(_KEYS, st.integers(1, 5000))
def test_a_key_has_the_same_bytes_at_every_size(key: bytes, size: int) -> None:
    data = block_bytes(key, size)
    assert len(data) == size
    assert block_bytes(key, 5000)[:size] == data
    assert wrong_bytes(key, size, memoryview(data)) == 0


@given(_KEYS, st.integers(1, 3000), st.data())
def test_every_changed_byte_is_counted(key: bytes, size: int, draw: st.DataObject) -> None:
    data = bytearray(block_bytes(key, size))
    places = draw.draw(st.sets(st.integers(0, size - 1), max_size=20))
    for place in places:
        data[place] ^= draw.draw(st.integers(1, 255))
    assert wrong_bytes(key, size, memoryview(data)) == len(places)


def test_missing_and_surplus_bytes_count() -> None:
    key = bytes(16)
    data = block_bytes(key, 100)
    assert wrong_bytes(key, 100, data[:60]) == 40
    assert wrong_bytes(key, 100, data + b"xyz") == 3
    assert wrong_bytes(key, 100, b"") == 100


def test_the_stream_never_changes() -> None:
    assert block_bytes(bytes(range(16)), 16).hex() == "aeaf93590d68f36858ec4c329ebe9444"


def test_what_is_no_key_or_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        block_bytes(b"short", 10)
    with pytest.raises(ValueError, match="at least one byte"):
        block_bytes(bytes(16), 0)
