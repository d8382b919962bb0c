"""A forked process copies what it shares with its parent before it writes to it.

Oracle: the page faults that the kernel counts while the process then writes. Cannot see: whether
that is soon enough (`kvcast.bench.restart`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from kvcast.hostagent.private_pages import have_free_memory, make_private_pages_own

PAGES = 2048


def write_to(memory: bytearray) -> None:
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1


def page_faults(
    prepare: Callable[[int], object],
    readable: bool = False,
    work: Callable[[bytearray], None] = write_to,
) -> int:
    """Of a child that prepares itself, and then works with memory that it has from here."""
    memory = bytearray(PAGES * mmap.PAGESIZE)
    waits, tells = os.pipe()
    answer, child_says = os.pipe()
    if readable:
        os.write(tells, b"x")
    pid = os.fork()
    if pid == 0:
        try:
            prepare(waits)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            work(memory)
            after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            os.write(child_says, str(after - before).encode())
        finally:
            os._exit(0)
    os.close(child_says)
    said = os.read(answer, 64)
    os.waitpid(pid, 0)
    for fd in (waits, tells, answer):
        os.close(fd)
    assert not any(memory)
    return int(said)


@pytest.mark.slow
def test_what_it_has_made_its_own_costs_no_page_fault_when_it_is_written_to() -> None:
    if not make_private_pages_own(_never()):
        pytest.skip("the kernel cannot populate memory (Linux 5.14)")
    assert page_faults(lambda _waits: None) >= PAGES
    assert page_faults(make_private_pages_own) < PAGES // 8


@pytest.mark.slow
def test_what_is_allocated_where_memory_was_made_free_costs_no_page_fault() -> None:
    kept: list[object] = []

    def allocate() -> None:
        kept.append([b"\2" * 50_000 for _ in range(100)])

    def faults(size_bytes: int) -> int:
        def prepare(waits: int) -> None:
            make_private_pages_own(waits)
            ctypes.CDLL(None).malloc_trim(0)  # this process may have run for long
            if size_bytes:
                kept.append(have_free_memory(size_bytes))

        return page_faults(prepare, work=lambda _memory: allocate())

    assert faults(0) > 1000
    assert faults(8 << 20) < 500


def _never() -> int:
    """A descriptor from which nothing can be read, ever."""
    return os.eventfd(0)


def test_who_is_called_meanwhile_does_not_go_on() -> None:
    assert page_faults(make_private_pages_own, readable=True) >= PAGES // 2


def test_without_proc_memory_is_copied_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_named: object) -> None:
        raise FileNotFoundError("/proc/self/smaps")

    monkeypatch.setattr("builtins.open", fail)
    assert not make_private_pages_own(_never())


@pytest.mark.slow
def test_what_is_hardly_used_does_not_come_into_being() -> None:
    """As the stack of a thread, of which a few pages are there."""
    area = mmap.mmap(-1, 256 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[0] = 1
    before = _resident_kib()
    make_private_pages_own(_never())
    assert _resident_kib() - before < 64 << 10


def _resident_kib() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0])
