"""A file of shared memory in this process: mapped where its huge pages can be used as such.

Owns: at which address a file is mapped. Must not know: what lies in it, or how its pages came to be
huge (`kvcast.hostagent.tiers.memory_placement`).

A huge page is one entry of the page table only where it is mapped at a multiple of its size; else
it is 512 of small pages, each of which is looked up, and may be a page fault, by itself. The kernel
chooses such addresses only for memory that it makes of huge pages unasked. So room for the mapping,
and a huge page more, is taken first, which costs nothing, and the file is mapped into that.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final

_HUGE_BYTES: Final = 2 << 20
"""Of x86-64, and of others whose small pages are of 4 KiB; elsewhere it does no harm."""
MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000  # linux/mman.h of all that Python's wheels are made for
MADV_POPULATE_WRITE: Final = 23  # linux/mman.h
_FAILED: Final = ctypes.c_void_p(-1).value


class SharedMapping:
    """A file's first `size_bytes`, mapped; `memory` is a view of them. With `populate` all pages
    are there at once. OSError where it cannot be mapped."""

    def __init__(
        self, fd: int, size_bytes: int, *, writable: bool = True, populate: bool = False
    ) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        room = _mapped_in_room(fd, size_bytes, protection, flags)
        if room is None:
            room = mmap.mmap(fd, size_bytes, flags, protection), 0
        self._map, self._start = room
        memory = memoryview(self._map)[self._start : self._start + size_bytes]
        self.memory = memory if writable else memory.toreadonly()

    def populate(self, start: int, size_bytes: int) -> None:
        """Have the pages of a part of it mapped, to be written. OSError where the kernel cannot."""
        first = self._start + start
        first -= first % mmap.PAGESIZE
        self._map.madvise(MADV_POPULATE_WRITE, first, self._start + start + size_bytes - first)

    def close(self) -> None:
        """Unmap it, or leave that to the last view of it that is still used."""
        self.memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()


def _mapped_in_room(
    fd: int, size_bytes: int, protection: int, flags: int
) -> tuple[mmap.mmap, int] | None:
    """A mapping that has the file from some offset on, which is returned, too; None where there is
    no such room, or the file wants another (huge pages of a gigabyte)."""
    try:
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        room = mmap.mmap(-1, size_bytes + _HUGE_BYTES, anonymous)
    except OSError:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_void_p
    libc.mmap.restype = word
    libc.mmap.argtypes = (word, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    start = -address % _HUGE_BYTES
    if libc.mmap(address + start, size_bytes, protection, flags | MAP_FIXED, fd, 0) != _FAILED:
        return room, start
    room.close()
    return None
