"""A hugetlbfs for tests, where there are root's rights and memory for one."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = 2 << 20
_POOL = Path(f"/sys/kernel/mm/hugepages/hugepages-{PAGE >> 10}kB")
_SETTING = _POOL / "nr_hugepages"


@contextlib.contextmanager
def huge_pages(folder: Path, pages: int) -> Iterator[Path]:
    """A hugetlbfs with so many pages of 2 MiB, which the kernel gets back at the end; the test is
    skipped where it has none to give."""
    if os.geteuid() != 0 or not os.access(_SETTING, os.W_OK):
        pytest.skip("it takes root to have huge pages set aside")
    with _SETTING.open() as setting:
        fcntl.flock(setting, fcntl.LOCK_EX)  # the number is the whole machine's
        # Surplus ones are in use, and beyond what was set aside: they go when they are let go.
        there = _number("nr_hugepages")
        before = there - _number("surplus_hugepages")
        try:
            _SETTING.write_text(str(there + pages))
            if _number("free_hugepages") < pages:
                pytest.skip(f"the kernel has no {pages} huge pages to give")
            with _mounted(folder, pages):
                yield folder
        finally:
            _SETTING.write_text(str(before))


def _number(name: str) -> int:
    return int((_POOL / name).read_text())


@contextlib.contextmanager
def _mounted(folder: Path, pages: int) -> Iterator[None]:
    folder.mkdir()
    words = ["mount", "-t", "hugetlbfs", "-o", f"pagesize=2M,size={pages * PAGE}", "none"]
    done = subprocess.run([*words, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no hugetlbfs can be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        gc.collect()  # what a stopped agent of this process has mapped may outlive it
        subprocess.run(["umount", "--lazy", folder], check=True)
