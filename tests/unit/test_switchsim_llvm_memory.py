"""Native memory: when it may be used again.

Oracle: the rule of `llvm.abi`: nothing that a batch may read is freed before the epoch has moved on
by two, or at once where nobody runs packets.
"""

from __future__ import annotations

import ctypes
import mmap

import pytest
from kvcast.switchsim.llvm import memory
from kvcast.switchsim.llvm.abi import EPOCH_IDLE
from kvcast.switchsim.llvm.memory import Heap, Reclaimer, Region, Slots


class Loop:
    """The thread that runs packets, as far as memory can see it."""

    def __init__(self) -> None:
        self.epoch = EPOCH_IDLE
        self.reclaimer = Reclaimer(lambda: self.epoch, lambda: None)


def test_nothing_waits_while_the_loop_is_idle() -> None:
    loop = Loop()
    freed: list[str] = []
    loop.reclaimer.retire(lambda: freed.append("a"))
    assert freed == ["a"]
    assert len(loop.reclaimer) == 0


@pytest.mark.parametrize(("steps", "free"), [(0, False), (1, False), (2, True), (7, True)])
def test_what_a_batch_may_read_waits_for_two_steps(steps: int, free: bool) -> None:
    loop = Loop()
    loop.epoch = 100
    freed: list[str] = []
    loop.reclaimer.retire(lambda: freed.append("a"))
    loop.epoch += steps
    loop.reclaimer.collect()
    assert bool(freed) == free


def test_a_loop_that_falls_asleep_frees_all() -> None:
    loop = Loop()
    loop.epoch = 5
    freed: list[int] = []
    for number in range(3):
        loop.reclaimer.retire(lambda n=number: freed.append(n))  # type: ignore[misc]
    loop.epoch = EPOCH_IDLE
    loop.reclaimer.collect()
    assert freed == [0, 1, 2]


def test_slots_that_are_retired_are_not_given_out_while_they_may_be_read() -> None:
    loop = Loop()
    slots = Slots(2, loop.reclaimer)
    assert [slots.take(), slots.take()] == [1, 2]
    loop.epoch = 1
    slots.retire(1)
    loop.epoch = 3
    assert slots.take() == 1


def test_a_loop_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "GRACE_S", 0.01)
    loop = Loop()
    slots = Slots(1, loop.reclaimer)
    slots.take()
    loop.epoch = 1
    slots.retire(1)
    with pytest.raises(TimeoutError):
        slots.take()


def test_heap_keeps_blocks_until_they_are_free() -> None:
    loop = Loop()
    heap = Heap(loop.reclaimer)
    loop.epoch = 1
    address = heap.new(b"abc")
    assert address % 16 == 0
    heap.retire(address)
    assert len(heap) == 1
    loop.epoch = 3
    loop.reclaimer.collect()
    assert len(heap) == 0


def test_region_starts_with_zeros_and_is_cleared_to_zeros() -> None:
    region = Region(1 << 20)
    assert region.read(1 << 19, 8) == bytes(8)
    region.write(5, b"\x01\x02")
    region.set_u64(16, 7)
    region.set_u32(24, 9)
    assert (region.read(4, 4), region.u64(16), region.u32(24)) == (b"\0\x01\x02\0", 7, 9)
    region.zero()
    assert region.read(0, 64) == bytes(64)


def resident_pages(region: Region) -> int:
    """Pages of the region that are in memory: of private ones, those that were touched."""
    pages = -(-region.size // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(region.address, region.size, there) == 0
    return sum(one & 1 for one in there)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_pages_are_taken_as_they_are_touched_or_all_at_once(
    old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = Region(40 * mmap.PAGESIZE + 1)
    region.write(3 * mmap.PAGESIZE, b"here already")
    assert resident_pages(region) == 1
    if old_kernel:
        monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    region.populate()
    assert resident_pages(region) == 41
    assert region.read(3 * mmap.PAGESIZE, 12) == b"here already"
    assert region.read(0, mmap.PAGESIZE) == bytes(mmap.PAGESIZE)
