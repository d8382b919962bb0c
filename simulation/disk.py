"""The simulated disk: one file that outlives processes and machines, and what can happen to it.

Owns: which bytes a read finds, which are still there when the machine has lost its electricity, and
the faults of a disk. Must not know: what is written there, or when (whoever drives it does its
orders).

What was written is seen at once, and is safe when a flush has begun and ended after it. A machine
that dies loses of every other write all, nothing, or a part: it stops at some byte, or some sectors
of it are there and others not. A disk that *lies* says that it has flushed, and has not.
"""

from __future__ import annotations

import errno
import os
import random
from typing import Final

from kvcast.hostagent.tiers.ssd.orders import DONE, Kind, Order
from kvcast.protocol.messages.wire import digest_of

SECTOR_BYTES: Final = 512


class SimDisk:
    """See the module's text; a `layout.Medium`."""

    def __init__(self, rng: random.Random, path: str = "disk", room_bytes: int = 1 << 40) -> None:
        self.path = path
        self.room_bytes = room_bytes
        """The file system has so much; a longer file is an error."""
        self.lies = False
        self.slow_s = 0.0
        """How much longer an order may take; for whoever does them."""
        self.full = False
        """Nothing can be written: a file system that promised room and has none."""
        self.read_errors = 0.0
        self.write_errors = 0.0
        """How likely an order fails."""
        self.wrong_reads = 0.0
        """How likely a read finds a bit that is not as it was written."""
        self._rng = rng
        self._seen = bytearray()
        self._safe = bytearray()
        self._unsafe: list[tuple[int, bytes]] = []

    # --- a file -----------------------------------------------------------------------------------

    def size_bytes(self) -> int:
        return len(self._seen)

    def extend(self, size_bytes: int) -> None:
        if size_bytes > self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for data in (self._seen, self._safe):
            data += bytes(max(0, size_bytes - len(data)))

    def pread(self, size_bytes: int, offset: int) -> bytes:
        return bytes(self._seen[offset : offset + size_bytes])

    def pwrite(self, data: bytes, offset: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.extend(offset + len(data))  # as a file does that somebody has shortened
        self._seen[offset : offset + len(data)] = data
        self._unsafe.append((offset, bytes(data)))

    def map(self, offset: int, size_bytes: int) -> memoryview:
        """A part of it as memory, for as long as it is not made longer or another's."""
        return memoryview(self._seen)[offset : offset + size_bytes]

    def flush(self) -> None:
        if self.lies:
            return
        for offset, data in self._unsafe:
            self._safe[offset : offset + len(data)] = data
        self._unsafe.clear()

    # --- orders -----------------------------------------------------------------------------------

    def do(self, order: Order) -> tuple[str, int]:
        """What becomes of an order: its error, and its digest."""
        rng = self._rng
        try:
            if order.kind is Kind.FLUSH:
                self.flush()
            elif order.kind is Kind.WRITE:
                if rng.random() < self.write_errors:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                self.pwrite(bytes(order.view), order.offset)
            else:
                if rng.random() < self.read_errors:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                found = self.pread(len(order.view), order.offset)
                if len(found) < len(order.view):
                    raise OSError(errno.EIO, "the file ends there")
                order.view[:] = found
                if rng.random() < self.wrong_reads:
                    order.view[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
                return DONE, digest_of(order.view)
        except OSError as error:
            return error.strerror or str(error), 0
        return DONE, 0

    def tear(self, order: Order) -> None:
        """The process dies while this is being written: a part of it is."""
        if order.kind is Kind.WRITE and not self.full:
            self._tear(self._seen, order.offset, bytes(order.view))
            # What is in the kernel's hands is as good as written, until the machine dies.
            self._unsafe.append((order.offset, self.pread(len(order.view), order.offset)))

    # --- what happens to machines and files -------------------------------------------------------

    def lose_power(self) -> None:
        """What was not safe may be there, or not, or in part."""
        writes = self._unsafe
        self._rng.shuffle(writes)
        for offset, data in writes:
            chance = self._rng.random()
            if chance < 0.4:
                self._safe[offset : offset + len(data)] = data
            elif chance < 0.8:
                self._tear(self._safe, offset, data)
        self._unsafe = []
        self._seen[:] = self._safe

    def _tear(self, into: bytearray, offset: int, data: bytes) -> None:
        rng = self._rng
        if rng.random() < 0.5:
            part = rng.randrange(len(data) + 1)
            into[offset : offset + part] = data[:part]
            return
        for at in range(0, len(data), SECTOR_BYTES):
            if rng.random() < 0.5:
                piece = data[at : at + SECTOR_BYTES]
                into[offset + at : offset + at + len(piece)] = piece

    def damage(self, bits: int) -> None:
        """Some bits are others."""
        for _ in range(bits if self._seen else 0):
            at = self._rng.randrange(len(self._seen))
            bit = 1 << self._rng.randrange(8)
            self._seen[at] ^= bit
            self._safe[at] ^= bit

    def truncate(self, size_bytes: int) -> None:
        """The file is shorter."""
        del self._seen[size_bytes:]
        del self._safe[size_bytes:]
        self._unsafe = [
            (offset, data) for offset, data in self._unsafe if offset + len(data) <= size_bytes
        ]

    def lose(self) -> None:
        """The file is gone."""
        self.truncate(0)

    def picture(self) -> bytes:
        """All bytes, for `restore`."""
        return bytes(self._seen)

    def restore(self, picture: bytes) -> None:
        """Somebody puts an older file, or another's, in its place."""
        self._seen = bytearray(picture)
        self._safe = bytearray(picture)
        self._unsafe = []
