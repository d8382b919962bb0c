"""The SSD tier's files on a real disk: opened, locked, read and written without the page cache.

Owns: descriptors, locks, alignment, and the threads that wait for the disk. Must not know: what is
written where and why (`kvcast.hostagent.core.ssd`).

Every order is one system call of a thread that does nothing else (preadv and pwritev with O_DIRECT,
straight from and to the arena), so a disk that stands still holds up its threads, and nobody else;
the event loop only hands orders out and hears of their ends. Where more orders come at once than
there are threads, those that follow each other in the file share a call: of small blocks the calls
would take longer than the disk. Not io_uring: there is no binding of
it that is widely kept, containers' usual seccomp profiles forbid it, and at blocks of 64 KiB and
more sixteen threads keep a disk as busy (`python -m kvcast.bench.ssd`).

Where a file system has no O_DIRECT, the page cache is used, and `is_direct` says so.
What is not aligned as the disk wants it (the end of a block; on disks with sectors of 4 KiB all of
it) goes through a page of the thread's own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import logging
import mmap
import os
import queue
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvcast.hostagent.tiers.arena import is_at, is_ours_alone, may_be_made, try_lock
from kvcast.hostagent.tiers.ssd.layout import (
    PAGE_BYTES,
    Cut,
    Formatted,
    SsdError,
    SsdInUseError,
    open_formatted,
)
from kvcast.hostagent.tiers.ssd.orders import DONE, Kind, Order
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES, digest_of

log = logging.getLogger(__name__)

THREADS: Final = 16
"""Orders that the disk is given at once."""
TOGETHER_BYTES: Final = 4 << 20
"""Of orders that share a call, at most: a thread that has to wait for the interpreter's lock has
given the disk something to do meanwhile."""
TOGETHER_BESIDE_READS_BYTES: Final = 1 << 20
"""The same where somebody reads, who may have to wait for what all threads are writing."""
_SECTORS: Final = (512, 1024, PAGE_BYTES)
_OPEN: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class SsdFile:
    """One open, locked file: a `layout.Medium`, and more. `makes`: whether it is made where there
    is none. SsdError, SsdInUseError."""

    def __init__(self, path: str, *, makes: bool = True) -> None:
        self.path = path
        flags = _OPEN | os.O_CREAT if makes and may_be_made(path) else _OPEN
        try:
            self.fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise SsdError(f"{path}: {error.strerror}") from error
        self.is_direct = False
        self.sector_bytes = PAGE_BYTES
        try:
            self._check(os.fstat(self.fd))
            if not try_lock(self.fd) or not is_at(path, self.fd):
                raise SsdInUseError(f"{path} belongs to a running agent")
        except BaseException:
            os.close(self.fd)
            raise

    def _check(self, found: os.stat_result) -> None:
        """SsdError where it is no file that can be used."""
        if not stat.S_ISREG(found.st_mode):
            raise SsdError(f"{self.path} exists and is no regular file")
        if not is_ours_alone(found):
            raise SsdError(f"{self.path} is not this user's alone, so what it says is not trusted")

    def use_direct(self) -> None:
        """From now on without the page cache, where the file system allows it."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            log.warning("%s is used through the page cache: %s", self.path, error.strerror)
            return
        for sector in _SECTORS:
            if self._takes(sector):
                self.is_direct, self.sector_bytes = True, sector
                return
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
        log.warning("%s is used through the page cache: it cannot be read without", self.path)

    def _takes(self, sector: int) -> bool:
        """Whether the disk reads to addresses, and lengths, that are multiples of so much."""
        page = mmap.mmap(-1, 2 * PAGE_BYTES)
        view = memoryview(page)[sector : 2 * sector]
        try:
            return os.preadv(self.fd, [view], 0) == sector
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            view.release()
            page.close()

    def size_bytes(self) -> int:
        """As `layout.Medium`."""
        return os.fstat(self.fd).st_size

    def extend(self, size_bytes: int) -> None:
        """As `layout.Medium`."""
        os.posix_fallocate(self.fd, 0, size_bytes)

    def pread(self, size_bytes: int, offset: int) -> bytes:
        """As `layout.Medium`, however long; of pages, once `use_direct` was called."""
        with mmap.mmap(-1, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES) as room:
            view = memoryview(room)
            done = os.preadv(self.fd, [view[:size_bytes]], offset)
            view.release()
            return room[:done]

    def pwrite(self, data: bytes, offset: int) -> None:
        """As `layout.Medium`."""
        with mmap.mmap(-1, -(-len(data) // PAGE_BYTES) * PAGE_BYTES) as room:
            room[: len(data)] = data
            view = memoryview(room)
            done = os.pwritev(self.fd, [view[: len(data)]], offset)
            view.release()
        if done != len(data):
            raise OSError(errno.EIO, f"{done} bytes of {len(data)} were written")

    def preadv(self, views: Sequence[memoryview], offset: int) -> int:
        """As `os.preadv`."""
        return os.preadv(self.fd, views, offset)

    def pwritev(self, views: Sequence[memoryview], offset: int) -> int:
        """As `os.pwritev`."""
        return os.pwritev(self.fd, views, offset)

    def flush(self) -> None:
        """As `layout.Medium`."""
        os.fdatasync(self.fd)

    def map(self, offset: int, size_bytes: int) -> memoryview:
        """A part of the file as memory, as long as somebody looks at it."""
        # Opened anew: a mapping keeps a duplicate, which would keep our lock.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return memoryview(mmap.mmap(fd, offset + size_bytes))[offset:]
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the file, and of its lock; harmless when repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_files(
    paths: Sequence[str],
    cuts: Sequence[Cut],
    new_identity: Callable[[], int],
    *,
    direct: bool = True,
    opened: Callable[[str, int], SsdFile] = lambda path, _size_bytes: SsdFile(path),
) -> tuple[list[SsdFile], list[Formatted]]:
    """Open, lock and, where need be, make the files. SsdError, SsdInUseError; on failure nothing
    is left open. `direct`: as `SsdFile.use_direct`; files that are memory have no page cache to go
    past. `opened` opens one, of which so many bytes are to be used."""
    files: list[SsdFile] = []
    formatted: list[Formatted] = []
    try:
        for path, cut in zip(paths, cuts, strict=True):
            file = opened(path, cut.file_bytes)
            files.append(file)
            try:
                formatted.append(open_formatted(file, cut, new_identity()))
                if direct:
                    file.use_direct()
            except OSError as error:
                raise SsdError(
                    f"{path}: no file of {cut.file_bytes} bytes: {error.strerror}"
                ) from error
    except BaseException:
        for file in files:
            file.close()
        raise
    return files, formatted


def address_of(view: memoryview) -> int:
    """Where in memory a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


class Disk:
    """Does orders, in threads. `ended` is called, in any of them, with each order that is done, its
    error and its digest.

    Writes come in batches of hundreds, and nobody waits for one of them. So reads do not queue
    behind them: while there are both, each thread does one of these and one of those. What is
    hurried goes before all reads."""

    def __init__(
        self,
        files: Sequence[SsdFile],
        ended: Callable[[Order, str, int], None],
        threads: int = THREADS,
    ) -> None:
        self._files = files
        self._ended = ended
        self._writes: deque[list[Order]] = deque()
        self._others: deque[list[Order]] = deque()
        """Orders that share a call each."""
        self._reading: set[Order] = set()
        self._queue: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """An item for each of either; False: a thread is to end."""
        # Daemons: a disk that never answers shall not keep the process from its end.
        self._threads = [
            threading.Thread(target=self._work, name=f"kvcast-ssd-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, orders: Sequence[Order]) -> None:
        """Begin these orders; they wait where others are being done."""
        self._reading.update(order for order in orders if order.kind is Kind.READ)
        most_bytes = TOGETHER_BESIDE_READS_BYTES if self._reading else TOGETHER_BYTES
        for together in _runs(orders, -(-len(orders) // len(self._threads)), most_bytes):
            if together[0].hurried:
                self._others.appendleft(together)
            elif together[0].kind is Kind.WRITE:
                self._writes.append(together)
            else:
                self._others.append(together)
            self._queue.put(True)

    def close(self, patience_s: float) -> bool:
        """End the threads; whether all have ended within so much time each, and no order is being
        done. What is still waiting is done first."""
        for _ in self._threads:
            self._queue.put(False)
        for thread in self._threads:
            thread.join(patience_s)
            if thread.is_alive():
                return False
        return True

    def _work(self) -> None:
        own = _Own()
        turns = itertools.cycle(((self._others, self._writes), (self._writes, self._others)))
        while self._queue.get():
            together = _first_of(*next(turns))
            file = self._files[together[0].file]
            if len(together) > 1 and _moved_together(together, file):
                for order in together:
                    digest = digest_of(order.view) if order.kind is Kind.READ else 0
                    self._tell(order, DONE, digest)
                continue
            for order in together:
                self._one(own, order, file)

    def _one(self, own: _Own, order: Order, file: SsdFile) -> None:
        digest, error = 0, DONE
        try:
            digest = own.do(order, file)
        except OSError as failure:
            error = failure.strerror or str(failure)
        except Exception as failure:  # a thread that ended would be missed for ever
            log.exception("an order to the disk failed")
            error = str(failure) or type(failure).__name__
        self._tell(order, error, digest)

    def _tell(self, order: Order, error: str, digest: int) -> None:
        self._reading.discard(order)
        self._ended(order, error, digest)


def _runs(orders: Sequence[Order], most: int, most_bytes: int) -> Iterator[list[Order]]:
    """All orders, in this order, in rows of `most` and `most_bytes` at most that follow each other
    in the file."""
    run: list[Order] = []
    end = size_bytes = 0
    for order in orders:
        goes_on = (
            0 < len(run) < most
            and order.offset == end
            and size_bytes + len(order.view) <= most_bytes
            and order.kind is run[0].kind is not Kind.FLUSH
            and (order.file, order.hurried) == (run[0].file, run[0].hurried)
        )
        if run and not goes_on:
            yield run
            run, size_bytes = [], 0
        run.append(order)
        size_bytes += len(order.view)
        end = order.offset + len(order.view)
    if run:
        yield run


def _moved_together(orders: Sequence[Order], file: SsdFile) -> bool:
    """Move the bytes of orders that follow each other in the file; False, and each is to be
    done by itself, where one call cannot do that: one is not aligned as the disk wants it, or
    fails."""
    views = [order.view for order in orders]
    call = file.preadv if orders[0].kind is Kind.READ else file.pwritev
    try:
        return call(views, orders[0].offset) == sum(map(len, views))
    except Exception:  # whatever it is, it is told of the order that meets it again
        return False


def _first_of(*queues: deque[list[Order]]) -> list[Order]:
    """The next of the first queue that has one. One of them has, but another thread may take what
    was seen, and leave what comes in a queue that was seen empty."""
    while True:
        for each in queues:
            if each:
                try:
                    return each.popleft()
                except IndexError:
                    continue


class _Own:
    """What one thread has for itself."""

    def __init__(self) -> None:
        self._page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        self._room = memoryview(b"")

    def do(self, order: Order, file: SsdFile) -> int:
        """Do an order; the digest of what was read. OSError."""
        if order.kind is Kind.FLUSH:
            file.flush()
            return 0
        if order.kind is Kind.READ:
            self._transfer(file.preadv, order, file)
            return digest_of(order.view)
        self._transfer(file.pwritev, order, file)
        return 0

    def _transfer(
        self,
        call: Callable[[list[memoryview], int], int],
        order: Order,
        file: SsdFile,
    ) -> None:
        view, reads = order.view, order.kind is Kind.READ
        size = len(view)
        sector = file.sector_bytes
        if view.readonly or address_of(view) % sector:
            room = self._roomy(size)
            if not reads:
                room[:size] = view
                room[size:] = bytes(len(room) - size)
            self._all(call, file, room, order.offset)
            if reads:
                view[:] = room[:size]
            return
        whole = size - size % sector
        if whole:
            self._all(call, file, view[:whole], order.offset)
        rest = size - whole
        if rest:
            page = self._page[:sector]
            if not reads:
                page[:rest] = view[whole:]
                page[rest:] = bytes(sector - rest)
            self._all(call, file, page, order.offset + whole)
            if reads:
                view[whole:] = page[:rest]

    def _roomy(self, size: int) -> memoryview:
        """A room for so many bytes, in whole pages."""
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        assert pages <= MAX_BLOCK_BYTES + PAGE_BYTES
        if len(self._room) < pages:
            self._room = memoryview(mmap.mmap(-1, pages))
        return self._room[:pages]

    def _all(
        self,
        call: Callable[[list[memoryview], int], int],
        file: SsdFile,
        view: memoryview,
        offset: int,
    ) -> None:
        """As often as the kernel does less than it was asked for."""
        while len(view):
            done = call([view], offset)
            if done <= 0 or (done < len(view) and done % file.sector_bytes):
                raise OSError(errno.EIO, "the file ends there")
            view, offset = view[done:], offset + done
