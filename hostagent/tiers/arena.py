"""The DRAM arena: one shared-memory file, and the slab allocator that cuts it into extents.

Owns: which bytes of the arena are taken, and the file's life (made 0600, locked while the agent
lives, unlinked at a clean shutdown, replaced or removed when its maker is dead). Must not know:
blocks, keys, namespaces, pins or eviction; `kvcast.hostagent.core.store` decides those.

The arena is cut into slabs (1 MiB by default). An extent of up to one slab comes from a slab of
its size class; a larger one is a run of whole slabs. An empty slab goes back to the free runs
at once, so no size class keeps memory that it does not use. Every operation is O(1).

Fragmentation, stated: classes are a quarter of an octave apart below an eighth of a slab
(at most 20 % of an extent is rounding), and 1/8, 1/7 … 1/1 of a slab above (at most 50 %, just
over half a slab); a run wastes less than one slab. A run of n slabs is found at once if a free
run of 2^ceil(log2 n) exists, else among the first 16 runs of the size below, or among all
(`thorough`). An allocation may fail with enough bytes free but scattered; the store then evicts
what lies between.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from kvcast.hostagent.mapping import SharedMapping
from kvcast.hostagent.tiers.huge_pages import why_no_room

SLAB_BYTES = 1 << 20
"""Default slab, in bytes."""

GRAIN_BYTES = 1024
"""Extents start at multiples of this and are multiples of it: one wire chunk."""

LEAST_SLAB_BYTES = 8 * GRAIN_BYTES
"""Below that there would be no classes."""

_RUNS_SCANNED = 16
_TRIES = 8


class ArenaError(Exception):
    """The arena's file cannot be made or used; the message says which and why."""


class ArenaInUseError(ArenaError):
    """The arena's file belongs to an agent that is alive."""


class _SlabRuns:
    """Free runs of whole slabs: segregated by size, merged with their neighbours when freed."""

    def __init__(self, count: int) -> None:
        self._length: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(count.bit_length())]
        self._nonempty = 0
        self.free_slabs = count
        self._insert(0, count)

    def _insert(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start_by_end[start + length] = start
        index = length.bit_length() - 1
        self._bins[index][start] = None
        self._nonempty |= 1 << index

    def _remove(self, start: int) -> int:
        length = self._length.pop(start)
        del self._start_by_end[start + length]
        index = length.bit_length() - 1
        del self._bins[index][start]
        if not self._bins[index]:
            self._nonempty &= ~(1 << index)
        return length

    def _find(self, count: int, thorough: bool) -> int | None:
        fits_all = self._nonempty >> (count - 1).bit_length() << (count - 1).bit_length()
        if fits_all:
            return next(iter(self._bins[(fits_all & -fits_all).bit_length() - 1]))
        index = count.bit_length() - 1
        if index < len(self._bins):
            for seen, start in enumerate(self._bins[index]):
                if seen == _RUNS_SCANNED and not thorough:
                    break
                if self._length[start] >= count:
                    return start
        return None

    def take(self, count: int, *, thorough: bool = False) -> int | None:
        """The first slab of a run of `count`, or None."""
        start = self._find(count, thorough)
        if start is None:
            return None
        length = self._remove(start)
        if length > count:
            self._insert(start + count, length - count)
        self.free_slabs -= count
        return start

    def take_at(self, start: int, count: int) -> bool:
        """Take this very run; False where it is not all free. Steps backwards to the beginning of
        the free run: as many slabs as that is long."""
        first = start
        while first >= 0 and first not in self._length:
            first -= 1
        if first < 0 or first + self._length[first] < start + count:
            return False
        length = self._remove(first)
        if start > first:
            self._insert(first, start - first)
        if first + length > start + count:
            self._insert(start + count, first + length - start - count)
        self.free_slabs -= count
        return True

    def give(self, start: int, count: int) -> None:
        """Return a run, merging it with free neighbours."""
        self.free_slabs += count
        if start + count in self._length:
            count += self._remove(start + count)
        before = self._start_by_end.get(start)
        if before is not None:
            count += self._remove(before)
            start = before
        self._insert(start, count)

    def length_at(self, start: int) -> int:
        """Of the free run that begins there; 0 where none does."""
        return self._length.get(start, 0)

    def runs(self) -> list[tuple[int, int]]:
        """All free runs as (start, length), in order; for checks."""
        return sorted(self._length.items())


@dataclass(slots=True)
class _SizeClass:
    """One extent size: its slabs that have a free slot, in the order in which they got one."""

    extent_bytes: int
    slots: int
    partial: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Slab:
    """A slab cut into slots of one class; slots from `fresh` on were never handed out."""

    size_class: _SizeClass
    fresh: int = 0
    freed: list[int] = field(default_factory=list)
    live: int = 0


def size_classes(slab_bytes: int, grain_bytes: int = GRAIN_BYTES) -> list[int]:
    """The extent sizes of up to one slab, ascending, in bytes; multiples of a grain."""
    sizes = {slab_bytes // k // grain_bytes * grain_bytes for k in range(1, 9)}
    octave = grain_bytes
    while octave < slab_bytes // 8:
        sizes |= {octave * quarter // 4 // grain_bytes * grain_bytes for quarter in range(4, 8)}
        octave *= 2
    return sorted(size for size in sizes if grain_bytes <= size <= slab_bytes)


class Allocator:
    """Hands out extents of an arena of `capacity_bytes`; offsets are bytes from its start."""

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int = SLAB_BYTES,
        grain_bytes: int = GRAIN_BYTES,
    ) -> None:
        if slab_bytes < 8 * grain_bytes or slab_bytes % grain_bytes:
            raise ValueError(f"slab of {slab_bytes} bytes is not a multiple of {grain_bytes}")
        if capacity_bytes < slab_bytes:
            raise ValueError(f"arena of {capacity_bytes} bytes is smaller than a slab")
        self.slab_bytes = slab_bytes
        self.grain_bytes = grain_bytes
        self.retired: set[int] = set()
        """Slabs that hold nothing, and are handed out no more."""
        self.slab_count = capacity_bytes // slab_bytes
        self.capacity_bytes = self.slab_count * slab_bytes
        self.used_bytes = 0
        self._free = _SlabRuns(self.slab_count)
        self._classes = [
            _SizeClass(s, slab_bytes // s) for s in size_classes(slab_bytes, grain_bytes)
        ]
        self._class_by_grains: list[_SizeClass] = []
        position = 0
        for grains in range(slab_bytes // grain_bytes + 1):
            if grains * grain_bytes > self._classes[position].extent_bytes:
                position += 1
            self._class_by_grains.append(self._classes[position])
        self._slabs: dict[int, _Slab] = {}
        self._runs: dict[int, int] = {}
        self._live: set[int] = set()

    def extent_bytes(self, size_bytes: int) -> int:
        """What an extent for `size_bytes` takes of the arena."""
        if size_bytes <= self.slab_bytes:
            return self._class_by_grains[-(-size_bytes // self.grain_bytes)].extent_bytes
        return -(-size_bytes // self.slab_bytes) * self.slab_bytes

    def allocate(self, size_bytes: int, *, thorough: bool = False) -> int | None:
        """The offset of an extent that holds `size_bytes`, or None where nothing fits; `thorough`:
        look at every free run, and not only at the first of those that may fit."""
        if size_bytes <= 0:
            raise ValueError(f"extent of {size_bytes} bytes")
        if size_bytes > self.slab_bytes:
            count = -(-size_bytes // self.slab_bytes)
            if count > self.slab_count:
                return None
            start = self._free.take(count, thorough=thorough)
            if start is None:
                return None
            self._runs[start] = count
            offset = start * self.slab_bytes
            self.used_bytes += count * self.slab_bytes
            self._live.add(offset)
            return offset
        size_class = self._class_by_grains[-(-size_bytes // self.grain_bytes)]
        if size_class.partial:
            index = next(iter(size_class.partial))
            slab = self._slabs[index]
        else:
            start = self._free.take(1)
            if start is None:
                return None
            index = start
            slab = self._slabs[index] = _Slab(size_class)
            size_class.partial[index] = None
        if slab.freed:
            slot = slab.freed.pop()
        else:
            slot = slab.fresh
            slab.fresh += 1
        slab.live += 1
        if slab.live == size_class.slots:
            del size_class.partial[index]
        offset = index * self.slab_bytes + slot * size_class.extent_bytes
        self.used_bytes += size_class.extent_bytes
        self._live.add(offset)
        return offset

    def claim(self, offset: int, size_bytes: int) -> bool:
        """Take the extent at `offset`, which another allocator of such an arena once gave for
        `size_bytes`; False where there can be none, or it is taken."""
        index, place = divmod(offset, self.slab_bytes)
        if size_bytes <= 0 or not 0 <= index < self.slab_count:
            return False
        if size_bytes > self.slab_bytes:
            count = -(-size_bytes // self.slab_bytes)
            if place or index + count > self.slab_count or not self._free.take_at(index, count):
                return False
            self._runs[index] = count
            self.used_bytes += count * self.slab_bytes
            self._live.add(offset)
            return True
        size_class = self._class_by_grains[-(-size_bytes // self.grain_bytes)]
        slot, rest = divmod(place, size_class.extent_bytes)
        if rest or slot >= size_class.slots or offset in self._live:
            return False
        slab = self._slabs.get(index)
        if slab is None:
            if not self._free.take_at(index, 1):
                return False
            slab = self._slabs[index] = _Slab(size_class)
            size_class.partial[index] = None
        elif slab.size_class is not size_class:
            return False
        if slot < slab.fresh:
            slab.freed.remove(slot)
        else:
            slab.freed += range(slab.fresh, slot)
            slab.fresh = slot + 1
        slab.live += 1
        if slab.live == size_class.slots:
            del size_class.partial[index]
        self.used_bytes += size_class.extent_bytes
        self._live.add(offset)
        return True

    def free(self, offset: int) -> None:
        """Give an extent back; freeing what is not allocated is an error of ours."""
        self._live.remove(offset)
        index = offset // self.slab_bytes
        count = self._runs.pop(index, None)
        if count is not None:
            self.used_bytes -= count * self.slab_bytes
            self._free.give(index, count)
            return
        slab = self._slabs[index]
        size_class = slab.size_class
        self.used_bytes -= size_class.extent_bytes
        slab.live -= 1
        if slab.live == 0:
            del self._slabs[index]
            size_class.partial.pop(index, None)
            self._free.give(index, 1)
            return
        slab.freed.append((offset - index * self.slab_bytes) // size_class.extent_bytes)
        size_class.partial[index] = None

    def neighbours(self, offset: int) -> list[int]:
        """The live extents in the same slab or run as `offset`, itself included."""
        index = offset // self.slab_bytes
        if index in self._runs:
            return [offset]
        slab = self._slabs[index]
        first = index * self.slab_bytes
        places = (first + i * slab.size_class.extent_bytes for i in range(slab.fresh))
        return [place for place in places if place in self._live]

    def piece(self, index: int) -> range | None:
        """The slabs that are taken, or free, together with this one: itself, those of an extent of
        several, or a free run. None where there is no such slab, or it is handed out no more. As
        many steps as slabs of it come before."""
        if index in self.retired or not 0 <= index < self.slab_count:
            return None
        start = index
        while start not in self._slabs:
            count = self._runs.get(start) or self._free.length_at(start)
            if count:
                return range(start, start + count)
            start -= 1
        return range(start, start + 1)

    def retire(self, index: int) -> bool:
        """Hand a slab out no more; False where something lies in it."""
        if index in self.retired:
            return True
        if not self._free.take_at(index, 1):
            return False
        self.retired.add(index)
        return True

    @property
    def free_slabs(self) -> int:
        """Slabs that no extent touches."""
        return self._free.free_slabs

    def check(self) -> None:
        """Assert every invariant of the allocator; for tests, O(arena)."""
        responder: list[str | None] = [None] * self.slab_count

        def claim(start: int, count: int, who: str) -> None:
            for index in range(start, start + count):
                assert responder[index] is None, (
                    f"slab {index} is both {responder[index]} and {who}"
                )
                responder[index] = who

        previous_end = -1
        for start, length in self._free.runs():
            assert start > previous_end, "free runs overlap or were not merged"
            previous_end = start + length
            claim(start, length, "free")
        assert sum(length for _, length in self._free.runs()) == self.free_slabs
        for index in self.retired:
            claim(index, 1, "retired")
        for start, count in self._runs.items():
            claim(start, count, "run")
        expected = {start * self.slab_bytes for start in self._runs}
        used = sum(self._runs.values()) * self.slab_bytes
        for index, slab in self._slabs.items():
            claim(index, 1, "slab")
            size_class = slab.size_class
            assert 0 < slab.live <= size_class.slots
            assert slab.live == slab.fresh - len(slab.freed)
            assert len(set(slab.freed)) == len(slab.freed)
            assert all(0 <= slot < slab.fresh for slot in slab.freed)
            assert (index in size_class.partial) == (slab.live < size_class.slots)
            used += slab.live * size_class.extent_bytes
            taken = set(range(slab.fresh)) - set(slab.freed)
            expected |= {index * self.slab_bytes + slot * size_class.extent_bytes for slot in taken}
        assert None not in responder, "a slab is lost"
        assert expected == self._live
        assert used == self.used_bytes


class ArenaFile:
    """The arena's bytes, or the index's: a locked shared-memory file, mapped read-write.

    `path` None: a file named after the process in /dev/shm, or in the temporary directory where
    /dev/shm is missing or too small; what processes of this user that were killed have left there
    is removed first, since nobody else would ever name it. `reserve` allocates and maps the pages
    now, so that a full tmpfs is an error here and not a SIGBUS later, and no block pays for their
    page faults.
    """

    def __init__(self, size_bytes: int, path: str | None = None, *, reserve: bool = True) -> None:
        self.size_bytes = size_bytes
        errors: list[str] = []
        for candidate in [path] if path is not None else _default_paths():
            if path is None:
                _remove_left(os.path.dirname(candidate))
            try:
                self._fd, self._map = _create(candidate, size_bytes, reserve)
            except ArenaInUseError:
                raise
            except OSError as error:
                errors.append(f"{candidate}: {why_no_room(candidate, size_bytes, error)}")
                continue
            self.path = candidate
            break
        else:
            raise ArenaError(f"no arena of {size_bytes} bytes: {'; '.join(errors)}")
        self.memory = self._map.memory

    def open_for_client(self, *, read_only: bool = False) -> int:
        """A file descriptor of the file to hand to a client; the caller closes it.

        Opened anew, because a duplicate would share our lock and keep it after our death, and what
        a client may do follows from how it was opened.
        """
        mode = os.O_RDONLY if read_only else os.O_RDWR
        return os.open(f"/proc/self/fd/{self._fd}", mode | os.O_CLOEXEC)

    def close(self) -> None:
        """Unlink the file and let go of the mapping; harmless when repeated."""
        if self._fd < 0:
            return
        if is_at(self.path, self._fd):
            os.unlink(self.path)
        os.close(self._fd)
        self._fd = -1
        self._map.close()


def _default_paths() -> list[str]:
    name = f"kvcast-{os.getuid()}-{os.getpid()}.arena"
    return [str(Path(folder) / name) for folder in ("/dev/shm", tempfile.gettempdir())]


def _remove_left(folder: str) -> None:
    """Unlink the arenas, and their indexes, that this user's dead processes have left under the
    names that `_default_paths` gives. Those of processes that live are not touched: one that is
    just being made has no lock yet."""
    ours = re.compile(rf"kvcast-{os.getuid()}-(\d+)\.arena(\.index)?")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            found = ours.fullmatch(name)
            if found is None or os.path.exists(f"/proc/{found[1]}"):
                continue
            with contextlib.suppress(OSError, ArenaError):
                _remove_stale(os.path.join(folder, name))


def _create(path: str, size_bytes: int, reserve: bool) -> tuple[int, SharedMapping]:
    """Make, lock and map the file at `path`, replacing one whose maker is dead."""
    fd = _make_locked(path)
    try:
        os.ftruncate(fd, size_bytes)
        if reserve:
            os.posix_fallocate(fd, 0, size_bytes)
        return fd, SharedMapping(fd, size_bytes, populate=reserve)
    except BaseException:
        if is_at(path, fd):
            os.unlink(path)
        os.close(fd)
        raise


def _make_locked(path: str) -> int:
    """A new, empty, locked file at `path`. Of several agents that try at once one gets there:
    whoever finds another file at the path than the one that it has locked was overtaken."""
    if not may_be_made(path) and not os.path.exists(path):
        raise ArenaError(f"{path}: no such device")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(_TRIES):
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError:
            _remove_stale(path)
            continue
        if try_lock(fd) and is_at(path, fd):
            return fd
        os.close(fd)
    raise ArenaInUseError(f"{path} is being taken by other agents")


def _remove_stale(path: str) -> None:
    """Unlink what a dead agent has left; its bytes are never looked at."""
    try:
        old = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return  # another agent was quicker
    try:
        if not stat.S_ISREG(os.fstat(old).st_mode):
            raise ArenaError(f"{path} exists and is no regular file")
        if not try_lock(old):
            raise ArenaInUseError(f"{path} belongs to a running agent")
        if is_at(path, old):
            os.unlink(path)
    finally:
        os.close(old)


def is_ours_alone(found: os.stat_result) -> bool:
    """Whether nobody else can have written a file: only then is believed what it says."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def may_be_made(path: str) -> bool:
    """Whether a file may be made there where there is none. In /dev itself a name is a device's: if
    that is missing, a file in its place would take the machine's memory."""
    return os.path.realpath(os.path.dirname(os.path.abspath(path))) != "/dev"


def try_lock(fd: int) -> bool:
    """Lock an open file; whether nobody else has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(path: str, fd: int) -> bool:
    """Whether the path still names the file that `fd` has open."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
