"""Memory that compiled code reads and the control plane writes.

Owns where bytes live outside of Python's heap, and when they may be used again: a `Region` is
reserved at once and takes pages only as they are touched; what a packet may still be reading goes
to the `Reclaimer`, which waits until the thread that runs packets has moved on (`llvm.abi`).
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections import deque
from collections.abc import Callable

from kvcast.switchsim.llvm.abi import EPOCH_IDLE

_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE is new in Python 3.13
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap

GRACE_S = 5.0
"""How long to wait for a thread that runs packets before giving up on it."""


class Region:
    """Zeroed bytes at a fixed address, until the object is gone."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, self.size, flags=flags)
        self._pin = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._pin)

    def read(self, offset: int, size: int) -> bytes:
        return self._map[offset : offset + size]

    def write(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def zero(self) -> None:
        """All bytes 0 again, without keeping the pages."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def populate(self) -> None:
        """Take all pages now, and not each as it is first touched."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # an older kernel
            for at in range(0, self.size, mmap.PAGESIZE):
                self._map[at] = self._map[at]

    def u64(self, offset: int) -> int:
        return ctypes.c_uint64.from_address(self.address + offset).value

    def set_u64(self, offset: int, value: int) -> None:
        """One store of 64 bits."""
        ctypes.c_uint64.from_address(self.address + offset).value = value

    def u32(self, offset: int) -> int:
        return ctypes.c_uint32.from_address(self.address + offset).value

    def set_u32(self, offset: int, value: int) -> None:
        """One store of 32 bits."""
        ctypes.c_uint32.from_address(self.address + offset).value = value


class Reclaimer:
    """Things that may still be read, and what to do when they no longer can be."""

    def __init__(self, epoch: Callable[[], int], fence: Callable[[], None]) -> None:
        self._epoch = epoch
        self.fence = fence
        """Between writing something and publishing it by a plain store."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def retire(self, free: Callable[[], None]) -> None:
        """Call `free` when no packet can see any more what was just taken away."""
        self.fence()
        epoch = self._epoch()
        if epoch == EPOCH_IDLE and not self._waiting:
            free()
            return
        self._waiting.append((epoch, free))
        if len(self._waiting) >= 64:
            self.collect()

    def collect(self) -> None:
        """Free what can be freed."""
        now = self._epoch()
        waiting = self._waiting
        # Two steps: the first may have been in flight when the epoch was read.
        while waiting and (
            now == EPOCH_IDLE or waiting[0][0] == EPOCH_IDLE or now - waiting[0][0] not in (0, 1)
        ):
            waiting.popleft()[1]()

    def wait(self) -> None:
        """Free all, waiting for the packets that are in flight."""
        deadline = time.monotonic() + GRACE_S
        while self._waiting:
            self.collect()
            if self._waiting:
                if time.monotonic() > deadline:
                    raise TimeoutError("the packet loop does not move on")
                time.sleep(0.0001)

    def __len__(self) -> int:
        return len(self._waiting)


class Slots:
    """Numbers 1 .. capacity of records; 0 is never given out."""

    def __init__(self, capacity: int, reclaimer: Reclaimer) -> None:
        self._fresh = 1
        self._capacity = capacity
        self._free: list[int] = []
        self._reclaimer = reclaimer

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        if self._fresh <= self._capacity:
            self._fresh += 1
            return self._fresh - 1
        self._reclaimer.wait()
        return self._free.pop()

    def retire(self, number: int) -> None:
        self._reclaimer.retire(lambda: self._free.append(number))


class Heap:
    """Blocks of memory by address, freed after a time of grace.

    Blocks are ctypes buffers: Python's allocator owns them, this object keeps them alive."""

    def __init__(self, reclaimer: Reclaimer) -> None:
        self._blocks: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._reclaimer = reclaimer

    def new(self, data: bytes) -> int:
        """The address (a multiple of 16) of a copy of data, ready to be published."""
        block = (ctypes.c_char * (len(data) + 16))()
        address = (ctypes.addressof(block) + 15) & ~15
        ctypes.memmove(address, data, len(data))
        self._blocks[address] = block
        self._reclaimer.fence()
        return address

    def zeros(self, size: int) -> int:
        block = (ctypes.c_char * (size + 16))()
        address = (ctypes.addressof(block) + 15) & ~15
        self._blocks[address] = block
        return address

    def retire(self, address: int) -> None:
        if address:
            self._reclaimer.retire(lambda: self._free(address))

    def _free(self, address: int) -> None:
        del self._blocks[address]

    def __len__(self) -> int:
        return len(self._blocks)
