"""Huge pages that are set aside for hugetlbfs: who needs them, and what to say where they lack.

Owns: what the kernel says of them. Must not know: what lies in them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
MOUNTS: Final = Path("/proc/self/mountinfo")


def huge_page_bytes_of(path: str, mounts: Path = MOUNTS) -> int:
    """The size of the pages of a file on hugetlbfs, which need not be there yet; 0 elsewhere."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        device = os.stat(folder).st_dev
        lines = mounts.read_text().splitlines()
    except OSError:
        return 0
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        if line.split(" ")[2] == number and line.partition(" - ")[2].startswith("hugetlbfs "):
            return os.statvfs(folder).f_bsize
    return 0


def why_no_room(path: str, size_bytes: int, error: OSError, sysfs: Path = SYSFS) -> str:
    """Why there is no file of that size at a path, for an operator."""
    text = error.strerror or str(error)
    page_bytes = huge_page_bytes_of(path)
    if not page_bytes:
        return text
    if size_bytes % page_bytes:
        return f"{text}: on hugetlbfs, sizes are multiples of {page_bytes} bytes"
    pool = sysfs / "kernel" / "mm" / "hugepages" / f"hugepages-{page_bytes >> 10}kB"
    try:
        free = (pool / "free_hugepages").read_text().strip()
    except OSError:
        free = "an unknown number"
    count = size_bytes // page_bytes
    return (
        f"{text}: {count} huge pages of {page_bytes} bytes are wanted, and {free} are free; have"
        " the kernel set more aside (vm.nr_hugepages), or name less"
    )
