"""The arena as a client maps it: rooms that are about to be written.

Oracle: the kernel's count of this process's page faults. Cannot see: how long they take.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Callable

import pytest
from kvcast.hostagent import mapping
from kvcast.hostagent.client.blocks import GRANULE_BYTES, Arena


def _faults(action: Callable[[], None]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    action()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_large_room_is_written_without_a_page_fault_for_every_page() -> None:
    size_bytes = 8 << 20
    fd = os.memfd_create("arena")
    os.ftruncate(fd, size_bytes)
    with mmap.mmap(fd, size_bytes) as agents:
        agents.write(bytes(size_bytes))  # the agent has the pages; only our map of them is empty
    arena = Arena(fd, size_bytes)
    # Neither begins nor ends where a granule does.
    room = arena.room(5 * GRANULE_BYTES + 8192, 4 << 20)
    if not arena._maps_ahead:
        pytest.skip("Linux before 5.14 cannot map pages ahead")
    data = os.urandom(4 << 20)

    def write() -> None:
        room[:] = data

    assert _faults(write) < len(data) // mmap.PAGESIZE // 4
    assert _faults(lambda: arena.room(6 * GRANULE_BYTES, GRANULE_BYTES).release()) < 8
    room.release()
    arena.close()


def test_where_the_kernel_cannot_map_ahead_rooms_are_written_all_the_same() -> None:
    size_bytes = 4 * GRANULE_BYTES
    fd = os.memfd_create("arena")
    os.ftruncate(fd, size_bytes)
    arena = Arena(fd, size_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapping, "MADV_POPULATE_WRITE", 9999)
        room = arena.room(GRANULE_BYTES, 2 * GRANULE_BYTES)
    room[:] = b"x" * len(room)
    assert bytes(arena.read(GRANULE_BYTES, 2)) == b"xx"
    assert not arena._maps_ahead
    room.release()
    arena.close()
