"""On which NUMA node, and in which pages, an arena's memory lies.

Owns: how the kernel is told where new memory is wanted, and what it says of where it is. Must not
know: arenas' files (`arena`, `kept`), or which node a network card is at (an operator says it).

What cannot be had is no error: a machine may have one node, or forbid the call; the agent says in
its numbers what it got. Huge pages are those of the file system on which the arena lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT: Final = 0
_MPOL_PREFERRED: Final = 1
MAX_NODE: Final = 1023
_MASK_WORDS: Final = (MAX_NODE + 1) // 64


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
        log.warning("memory is not placed: %s", os.strerror(ctypes.get_errno()))
    return not done


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
