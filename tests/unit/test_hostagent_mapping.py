"""Files of shared memory, mapped: the same bytes wherever the kernel lets them begin."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
from kvcast.hostagent import mapping
from kvcast.hostagent.mapping import SharedMapping

HUGE_BYTES = 2 << 20
SIZE_BYTES = 3 * HUGE_BYTES + 4096


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("arena")
    os.ftruncate(made, SIZE_BYTES)
    yield made
    os.close(made)


def test_a_mapping_begins_where_a_huge_page_may_and_has_the_whole_file(fd: int) -> None:
    one, other = SharedMapping(fd, SIZE_BYTES, populate=True), SharedMapping(fd, SIZE_BYTES)
    assert len(one.memory) == SIZE_BYTES
    one.memory[0], one.memory[SIZE_BYTES - 1] = 7, 8
    assert (other.memory[0], other.memory[SIZE_BYTES - 1]) == (7, 8)
    for each in (one, other):
        assert ctypes.addressof(ctypes.c_char.from_buffer(each.memory)) % HUGE_BYTES == 0
        each.close()


def test_what_is_mapped_to_be_read_cannot_be_written(fd: int) -> None:
    mapped = SharedMapping(fd, SIZE_BYTES, writable=False)
    assert mapped.memory.readonly
    assert bytes(mapped.memory[:2]) == b"\0\0"
    mapped.close()


def test_where_there_is_no_room_for_more_a_file_is_mapped_anywhere(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_HUGE_BYTES", 1 << 62)
    for writable in (True, False):
        mapped = SharedMapping(fd, SIZE_BYTES, writable=writable)
        assert len(mapped.memory) == SIZE_BYTES
        assert mapped.memory.readonly is not writable
        mapped.close()


def test_a_file_that_cannot_be_mapped_into_the_room_is_an_error_as_ever(fd: int) -> None:
    closed = os.dup(fd)
    os.close(closed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        SharedMapping(closed, SIZE_BYTES)


def test_pages_can_be_had_before_they_are_written(fd: int) -> None:
    mapped = SharedMapping(fd, SIZE_BYTES)
    try:
        mapped.populate(HUGE_BYTES + 5, 10_000)
    except OSError:
        mapped.close()
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert os.fstat(fd).st_blocks * 512 in range(10_000, SIZE_BYTES)
    mapped.close()


def test_a_view_outlives_its_mapping(fd: int) -> None:
    mapped = SharedMapping(fd, SIZE_BYTES)
    view = mapped.memory[100:110]
    mapped.close()
    mapped.close()
    view[:] = b"0123456789"
    assert os.pread(fd, 10, 100) == b"0123456789"
