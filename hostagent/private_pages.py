"""Memory that a process has before it is in a hurry: what it shares with its parent, and free one.

Owns: which pages, and the system call. Must not know: what lies in them. After a fork each page is
copied as it is first written to, by a page fault of some microseconds: a Python process that only
reads does that, too, since it counts references. Thousands of them are most of the time that a
forked agent needs to start.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import select
from collections.abc import Iterator
from typing import Final

from kvcast.hostagent.mapping import MADV_POPULATE_WRITE

log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 1 << 20
_PAUSE_MS: Final = 2
"""After each piece, which itself takes about a millisecond: nobody waits for this."""
_AREA: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw.p .*\n(?:\w+:.*\n)*?Rss: +(\d+) kB", re.M)
_MOSTLY_USED: Final = 4
"""Of an area less of which than one in so many is present, nothing is copied: the rest would come
into being (stacks of threads)."""
_HEAP_PIECE_BYTES: Final = 64 << 10
"""Less than what malloc takes from the kernel for itself alone (M_MMAP_THRESHOLD)."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def make_private_pages_own(until_readable: int) -> bool:
    """Have the kernel copy what this process shares with its parent and may write, a piece at a
    time, until something can be read from that descriptor. Whether all of it was copied: Linux
    before 5.14 cannot, and /proc must be there."""
    poll = select.poll()
    poll.register(until_readable, select.POLLIN)
    try:
        for start, end in _areas():
            for piece in range(start, end, _PIECE_BYTES):
                if poll.poll(_PAUSE_MS):
                    return False
                _copy(piece, min(_PIECE_BYTES, end - piece))
    except OSError as error:
        log.info("memory is copied only as it is written to: %s", error)
        return False
    return True


def have_free_memory(size_bytes: int) -> bytes:
    """Have so much of the heap free and present: what is allocated there later costs no page fault.
    It stays so as long as what is returned is kept, since malloc gives only the heap's end back."""
    pieces = [b"\1" * _HEAP_PIECE_BYTES for _ in range(0, size_bytes, _HEAP_PIECE_BYTES)]
    return pieces[-1]


def _copy(start: int, size_bytes: int) -> None:
    pointer, size = ctypes.c_void_p(start), ctypes.c_size_t(size_bytes)
    if _LIBC.madvise(pointer, size, MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number != errno.ENOMEM:  # unmapped meanwhile
            raise OSError(number, os.strerror(number))


def _areas() -> Iterator[tuple[int, int]]:
    """Where there is memory of this process's own that it may write; addresses."""
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        text = file.read()
    for start, end, present_kib in _AREA.findall(text):
        area = int(start, 16), int(end, 16)
        if int(present_kib) * 1024 * _MOSTLY_USED > area[1] - area[0]:
            yield area
