"""On which NUMA node, and in which pages, an arena's memory lies.

Owns: how the kernel is told where new memory is wanted, and what it says of where it is. Must not
know: arenas' files (`arena`, `kept`), or which node a network card is at (an operator says it).

What cannot be had is no error: a machine may have one node, or forbid the call; the agent says in
its numbers what it got. Huge pages are those of the file system on which the arena lies
(hugetlbfs), or, on tmpfs, such as the kernel makes of small ones that lie beside each other when it
is asked to (`gather_pages`), whatever it was told to do unasked. A disk, or a card, then moves a
block as one piece of memory, and not as hundreds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvcast.hostagent.mapping import MAP_FIXED

log = logging.getLogger(__name__)

_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT: Final = 0
_MPOL_PREFERRED: Final = 1
MAX_NODE: Final = 1023
_MASK_WORDS: Final = (MAX_NODE + 1) // 64
_HUGE_PAGE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MADV_COLLAPSE: Final = 25
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


@contextlib.contextmanager
def preferring(node: int | None) -> Iterator[None]:
    """Memory that this thread first uses comes from this node, as long as that has some; None =
    wherever the kernel takes it."""
    told = node is not None and _set_policy(_MPOL_PREFERRED, node)
    try:
        yield
    finally:
        if told:
            _set_policy(_MPOL_DEFAULT, None)


def _set_policy(mode: int, node: int | None) -> bool:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        log.warning("memory is not placed: not known how on %s", platform.machine())
        return False
    mask = (ctypes.c_uint64 * _MASK_WORDS)()
    if node is not None:
        mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (mask, MAX_NODE + 2) if node is not None else (None, 0)
    done = libc.syscall(ctypes.c_long(number), ctypes.c_long(mode), *arguments)
    if done:
        why = os.strerror(ctypes.get_errno())
        log.warning("memory is not placed on NUMA node %s: %s", "-" if node is None else node, why)
    return not done


def gather_pages(fd: int, size_bytes: int, goes_on: Callable[[], bool] = lambda: True) -> int:
    """Have the kernel put the pages of this file, all of which it has, into huge ones; how many
    bytes are in such then. 0 where it cannot: before Linux 6.1, or not for this file system. What
    others use meanwhile stays where it is, as they see it. Half a second a GiB, and so for a thread
    of its own; `goes_on` is asked between two pages."""
    try:
        page_bytes = int(_HUGE_PAGE.read_text())
    except (OSError, ValueError):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)  # lets other threads run meanwhile, unlike `mmap`
    word, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = word
    libc.mmap.argtypes = (word, size, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (word, size)
    libc.madvise.argtypes = (word, size, ctypes.c_int)
    # A mapping of its own, since it must begin where a huge page may.
    room_bytes = size_bytes + page_bytes
    room = libc.mmap(None, room_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == _MAP_FAILED:
        return 0
    first = -(-room // page_bytes) * page_bytes
    gathered = 0
    try:
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
        if libc.mmap(first, size_bytes, access, flags, fd, 0) == _MAP_FAILED:
            return 0
        for at in range(0, size_bytes - page_bytes + 1, page_bytes):
            if not goes_on():
                break
            if libc.madvise(first + at, page_bytes, _MADV_COLLAPSE) == 0:
                gathered += page_bytes
            elif ctypes.get_errno() == errno.EINVAL and not gathered:
                break  # it never will
    finally:
        libc.munmap(room, room_bytes)
    return gathered


@dataclass
class Placement:
    """Where a mapping's memory is, as far as it was used. `page_bytes` 0: nobody says."""

    page_bytes: int = 0
    bytes_by_node: dict[int, int] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """As an agent's numbers, by name."""
        values = {f"arena_node{n}_bytes": float(b) for n, b in self.bytes_by_node.items()}
        return values | {"arena_page_bytes": float(self.page_bytes)}


def placement_of(path: str, maps: str = "/proc/self/numa_maps") -> Placement:
    """Where the memory of a file is that this process maps. The kernel looks at each page: tens of
    milliseconds a GiB of small ones."""
    found = Placement()
    name = "file=" + path.replace("\\", "\\134").replace(" ", "\\040").replace("\n", "\\012")
    try:
        lines = Path(maps).read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        words = line.split(" ")
        if name not in words:
            continue
        size = re.search(r"\bkernelpagesize_kB=(\d+)", line)
        if size is None:
            continue
        found.page_bytes = int(size[1]) * 1024
        for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
            taken = found.bytes_by_node.get(int(node), 0)
            found.bytes_by_node[int(node)] = taken + int(pages) * found.page_bytes
    return found
