"""Files of a further arena that can only be mapped: a memory device, or a file of huge pages.

Owns: how long such a medium is and where mappings of it may end, that all of it is there before it
is touched, and the copying. Must not know: what is written where and why
(`kvcast.hostagent.core.ssd`).

| medium | its size | mappings end at multiples of | what is taken at the start |
|---|---|---|---|
| `/dev/dax*` (persistent memory, CXL) | the device's, from sysfs | its `align`, mostly 2 MiB | – |
| a file on hugetlbfs | whole huge pages | a huge page | every page, so none is missed later |

Nothing is flushed here. What a power cut keeps from reaching persistent memory is found out as on a
disk that does not keep to flushes: by the entries' checks and the blocks' digests.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvcast.hostagent.tiers.huge_pages import SYSFS, huge_page_bytes_of, why_no_room
from kvcast.hostagent.tiers.ssd.files import SsdFile, address_of
from kvcast.hostagent.tiers.ssd.layout import SsdError

_ALIGN_BYTES: Final = 2 << 20
"""Of a device that does not say."""


def must_be_mapped(path: str) -> bool:
    """Whether what is, or would be made, at a path cannot be read and written like a file."""
    try:
        if stat.S_ISCHR(os.stat(path).st_mode):
            return True
    except OSError:
        pass  # it is to be made, or whoever opens it says what is wrong
    return huge_page_bytes_of(path) > 0


def open_arena(path: str, wanted_bytes: int | None = None, *, makes: bool = True) -> SsdFile:
    """A file of a further arena, or a device, as it has to be used. SsdError, SsdInUseError."""
    if must_be_mapped(path):
        return MappedFile(path, wanted_bytes, makes=makes)
    return SsdFile(path, makes=makes)


class MappedFile(SsdFile):
    """As `SsdFile`, by a mapping. `wanted_bytes`: how much of it is to be used; None: all that is
    there."""

    def __init__(
        self,
        path: str,
        wanted_bytes: int | None = None,
        *,
        makes: bool = True,
        sysfs: Path = SYSFS,
    ) -> None:
        self._sysfs = sysfs
        self._device_bytes = 0
        self._page_bytes = 0
        self._memory = memoryview(b"")
        super().__init__(path, makes=makes)
        self.sector_bytes = 1
        self._wanted_bytes = self.size_bytes() if wanted_bytes is None else wanted_bytes
        if self._device_bytes and self._device_bytes < self._wanted_bytes:
            self.close()
            raise SsdError(
                f"{path} has {self._device_bytes} bytes, and {self._wanted_bytes} are to be used"
            )

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISCHR(found.st_mode):
            super()._check(found)
            self._page_bytes = os.statvfs(self.fd).f_bsize
            return
        number = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
        device = self._sysfs / "dev" / "char" / number
        if (device / "subsystem").resolve().name != "dax":
            raise SsdError(f"{self.path} is no regular file, and no memory device (/dev/dax*)")
        try:
            self._device_bytes = int((device / "size").read_text())
        except (OSError, ValueError) as error:
            raise SsdError(f"{self.path}: its size is not known: {error}") from error
        self._page_bytes = _ALIGN_BYTES
        for at in (device / "align", device / "device" / "align"):
            try:
                self._page_bytes = int(at.read_text())
            except (OSError, ValueError):
                continue
            break

    def use_direct(self) -> None:
        """There is no page cache to go past."""

    def size_bytes(self) -> int:
        """As `layout.Medium`."""
        return self._device_bytes or super().size_bytes()

    def extend(self, size_bytes: int) -> None:
        """As `layout.Medium`."""
        if self._device_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._mapped(size_bytes)

    def pread(self, size_bytes: int, offset: int) -> bytes:
        """As `layout.Medium`."""
        end = max(offset, min(offset + size_bytes, self.size_bytes()))
        return bytes(self._mapped(end)[offset:end])

    def pwrite(self, data: bytes, offset: int) -> None:
        """As `layout.Medium`."""
        self._mapped(offset + len(data))[offset : offset + len(data)] = data

    def preadv(self, views: Sequence[memoryview], offset: int) -> int:
        """As `SsdFile`."""
        for view, memory in self._parts(views, offset):
            ctypes.memmove(address_of(view), address_of(memory), len(view))  # others run meanwhile
        return sum(map(len, views))

    def pwritev(self, views: Sequence[memoryview], offset: int) -> int:
        """As `SsdFile`."""
        for view, memory in self._parts(views, offset):
            ctypes.memmove(address_of(memory), address_of(view), len(view))
        return sum(map(len, views))

    def flush(self) -> None:
        """As `layout.Medium`; see the module's text."""

    def map(self, offset: int, size_bytes: int) -> memoryview:
        """As `SsdFile`."""
        return self._mapped(offset + size_bytes)[offset : offset + size_bytes]

    def close(self) -> None:
        """As `SsdFile`; the mapping goes with the last view of it."""
        self._memory = memoryview(b"")
        super().close()

    def _parts(
        self, views: Sequence[memoryview], offset: int
    ) -> Iterator[tuple[memoryview, memoryview]]:
        for view in views:
            yield view, self._part(offset, len(view))
            offset += len(view)

    def _part(self, offset: int, size_bytes: int) -> memoryview:
        part = self._memory[offset : offset + size_bytes]
        if len(part) < size_bytes:
            raise OSError(errno.EIO, "the file ends there")
        return part

    def _mapped(self, end: int) -> memoryview:
        """The memory up to there at least; as much of what is wanted as there is."""
        if end <= len(self._memory):
            return self._memory
        end = max(end, min(self._wanted_bytes, self.size_bytes()))
        end = -(-end // self._page_bytes) * self._page_bytes
        if not self._device_bytes:
            self._take(end)
        elif end > self._device_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # Opened anew, as in `SsdFile.map`.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = memoryview(mmap.mmap(fd, end))
        finally:
            os.close(fd)
        return self._memory

    def _take(self, end: int) -> None:
        """Have all huge pages up to there: one that lacked later would be the agent's end."""
        before = super().size_bytes()
        try:
            os.posix_fallocate(self.fd, 0, end)
        except OSError as error:
            os.ftruncate(self.fd, before)  # and so give back those that were found
            why = why_no_room(self.path, end, error, self._sysfs)
            raise SsdError(f"{self.path}: {why}") from error
