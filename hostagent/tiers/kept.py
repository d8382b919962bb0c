"""An arena and its index that outlive the agent: two named files, which the next one finds.

Owns: whose files may be taken over, the locks by which it is known who is alive on them, and how
they are made so that a death at any moment leaves either an arena that proves itself or none. Must
not know: what an entry says (`index`), or what is done with it (`core.recovery`).

| what is found | what becomes of it |
|---|---|
| nothing, or what was being made when its maker died | made anew |
| another agent is alive on it (it locks the index) | ArenaInUseError |
| of another node, cluster, format, size or slab, or no file of ours | ArenaError: an operator \
decides |
| clients of a dead agent still map the arena (each holds a lock of it), and what they hold is not \
known | the files are left to them, without a name, and made anew; a device is refused |
| else | taken over |

The paths may lie in /dev/shm, on hugetlbfs (the arena; the index then elsewhere, since its size is
no multiple of a huge page), or on a file system or character device over persistent or CXL memory.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
from dataclasses import dataclass
from typing import Final

import xxhash
from kvcast.hostagent.mapping import SharedMapping
from kvcast.hostagent.tiers.arena import (
    ArenaError,
    ArenaInUseError,
    is_at,
    is_ours_alone,
    may_be_made,
    try_lock,
)
from kvcast.hostagent.tiers.huge_pages import why_no_room
from kvcast.hostagent.tiers.index import buckets_for
from kvcast.hostagent.tiers.ledger import LEDGER_BYTES
from kvcast.protocol.messages import shared

log = logging.getLogger(__name__)

MAX_OWNER_BYTES: Final = 1024
"""Of what says whose a kept arena is; the rest is left out."""
_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OWNER_OFFSET: Final = shared.KEPT_OFFSET + shared.KEPT.size
_TRIES: Final = 8


@dataclass(frozen=True)
class KeptOptions:
    """`owner`: node and cluster, as an operator would name them; only the same takes over."""

    owner: str
    arena_path: str
    index_path: str
    arena_bytes: int
    slab_bytes: int
    reserve: bool = True


class KeptFile:
    """A file, mapped read-write; closing it leaves it where it is."""

    def __init__(self, path: str, fd: int, size_bytes: int, *, populate: bool) -> None:
        self.path = path
        self.fd = fd
        self.size_bytes = size_bytes
        self.locked_by_clients = False
        """Whether whoever maps it holds a lock of it: the arena; the index is its agent's."""
        self._map = SharedMapping(fd, size_bytes, populate=populate)
        self.memory = self._map.memory

    def open_for_client(self, *, read_only: bool = False) -> int:
        """As `ArenaFile.open_for_client`."""
        mode = os.O_RDONLY if read_only else os.O_RDWR
        fd = os.open(f"/proc/self/fd/{self.fd}", mode | os.O_CLOEXEC)
        if self.locked_by_clients:
            # Of the client's own description of the file, so it goes when its last mapping goes.
            fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def close(self) -> None:
        """Let go of the mapping and the locks; harmless when repeated."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._map.close()


@dataclass
class Kept:
    """The arena, its index, and the ledger of those who hold something; `found`: whether they say
    what a former agent has left; `incarnation` of the node in the pool, as long as they last."""

    arena: KeptFile
    index: KeptFile
    ledger_fd: int
    ledger: memoryview
    found: bool
    incarnation: int

    def close(self) -> None:
        """Let go of all of it."""
        self.arena.close()
        self.index.close()
        self.ledger.release()
        os.close(self.ledger_fd)


def open_kept(options: KeptOptions, new_incarnation: int) -> Kept:
    """Find the files or make them, as the table above says. ArenaError, ArenaInUseError."""
    for _ in range(_TRIES):
        kept = _try_open(options, new_incarnation)
        if kept is not None:
            return kept
    raise ArenaInUseError(f"{options.index_path} is being taken by other agents")


def from_descriptors(options: KeptOptions, arena_fd: int, index_fd: int, ledger_fd: int) -> Kept:
    """What another process of this node hands over, with its locks and those who hold something
    there; ArenaError where it is not what the options say."""
    owned = _state_of(options, index_fd)
    if owned is None:
        raise ArenaError(f"{options.index_path}: what is handed over is no index")
    if _size_of(ledger_fd) < LEDGER_BYTES:  # of a release whose couriers left nothing in it
        os.ftruncate(ledger_fd, LEDGER_BYTES)
    return _map(options, arena_fd, index_fd, ledger_fd, owned, 0)


@dataclass
class Stopped:
    """What a stopped agent has kept. `index`: a copy, unless it was opened to be written."""

    owner: str
    slab_bytes: int
    arena: memoryview
    index: memoryview
    fds: tuple[int, int]

    def close(self) -> None:
        """Let go of it; the memory goes with the last view."""
        for fd in self.fds:
            os.close(fd)


def open_stopped(arena_path: str, index_path: str, *, write: bool) -> Stopped:
    """What lies there, for whoever looks at it while no agent runs; ArenaError where it says
    nothing, ArenaInUseError."""
    fds: list[int] = []
    try:
        for path in (index_path, arena_path):
            fds.append(_open_there(path))
            if not try_lock(fds[-1]):
                raise ArenaInUseError(f"{path} belongs to a running agent, or its clients map it")
        head = os.pread(fds[0], shared.NAMESPACES_OFFSET, 0)
        if len(head) < shared.NAMESPACES_OFFSET:
            raise ArenaError(f"{index_path} is no index of kvcast")
        magic, layout, _, index_bytes, arena_bytes, _, *_ = shared.HEADER.unpack_from(head)
        length, slab_bytes, incarnation, check = shared.KEPT.unpack_from(head, shared.KEPT_OFFSET)
        owner = head[_OWNER_OFFSET : _OWNER_OFFSET + min(length, MAX_OWNER_BYTES)]
        if (magic, layout) != (shared.INDEX_MAGIC, shared.INDEX_LAYOUT):
            raise ArenaError(f"{index_path} is no index of this release's format")
        if check != _check(owner, slab_bytes, incarnation, index_bytes, arena_bytes):
            raise ArenaError(f"{index_path} has a damaged head: an agent begins anew")
        if _size_of(fds[0]) < index_bytes or _size_of(fds[1]) < arena_bytes:
            raise ArenaError(f"{index_path} or {arena_path} is shorter than it says")
        arena = mmap.mmap(fds[1], arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        if write:
            index = memoryview(mmap.mmap(fds[0], index_bytes, mmap.MAP_SHARED))
        else:
            index = memoryview(bytearray(os.pread(fds[0], index_bytes, 0)))
        return Stopped(
            *(owner.decode(errors="replace"), slab_bytes, memoryview(arena), index),
            (fds[0], fds[1]),
        )
    except (OSError, ValueError) as error:
        _close_all(fds)
        raise ArenaError(f"{index_path}, {arena_path}: {error}") from error
    except ArenaError:
        _close_all(fds)
        raise


def _open_there(path: str) -> int:
    try:
        return os.open(path, _OPEN & ~os.O_CREAT)
    except OSError as error:
        raise ArenaError(f"{path}: {error.strerror}") from error


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        _close_quietly(fd)


def _try_open(options: KeptOptions, new_incarnation: int) -> Kept | None:
    index_fd = _open(options.index_path)
    try:
        if not try_lock(index_fd):
            raise ArenaInUseError(f"{options.index_path} belongs to a running agent")
        if not is_at(options.index_path, index_fd):
            os.close(index_fd)
            return None
        owned = _state_of(options, index_fd)
        arena_fd = _open(options.arena_path)
        try:
            if not try_lock(arena_fd) and not _let_go(index_fd):
                _leave_to_clients(options, index_fd, arena_fd)
                os.close(arena_fd)
                os.close(index_fd)
                return None
            fcntl.flock(arena_fd, fcntl.LOCK_UN)
            if _is_of_no_use(options, index_fd, arena_fd, owned):
                os.close(arena_fd)
                os.close(index_fd)
                return None
            ledger_fd = os.memfd_create("kvcast-ledger", os.MFD_CLOEXEC)
            os.posix_fallocate(ledger_fd, 0, LEDGER_BYTES)
            try:
                return _map(options, arena_fd, index_fd, ledger_fd, owned, new_incarnation)
            except BaseException:
                os.close(ledger_fd)
                raise
        except BaseException:
            _close_quietly(arena_fd)
            raise
    except BaseException:
        _close_quietly(index_fd)
        raise


def _map(
    options: KeptOptions,
    arena_fd: int,
    index_fd: int,
    ledger_fd: int,
    incarnation: int | None,
    new_incarnation: int,
) -> Kept:
    new = incarnation is None
    index_bytes = shared.index_bytes(buckets_for(options.arena_bytes))
    try:
        if new:
            os.ftruncate(index_fd, index_bytes)
            if stat.S_ISREG(os.fstat(arena_fd).st_mode):
                os.ftruncate(arena_fd, options.arena_bytes)
        if options.reserve and new:
            os.posix_fallocate(index_fd, 0, index_bytes)
            if stat.S_ISREG(os.fstat(arena_fd).st_mode):
                os.posix_fallocate(arena_fd, 0, options.arena_bytes)
        populate = options.reserve and new
        index = KeptFile(options.index_path, index_fd, index_bytes, populate=populate)
        arena = KeptFile(options.arena_path, arena_fd, options.arena_bytes, populate=populate)
    except (OSError, ValueError) as error:
        if new and stat.S_ISREG(os.fstat(arena_fd).st_mode):
            os.ftruncate(arena_fd, 0)  # huge pages that were had are nobody else's until then
        path, why = options.arena_path, str(error)
        if isinstance(error, OSError):
            why = why_no_room(path, options.arena_bytes, error)
        raise ArenaError(f"no arena of {options.arena_bytes} bytes at {path}: {why}") from error
    arena.locked_by_clients = True
    ledger = memoryview(mmap.mmap(ledger_fd, LEDGER_BYTES))
    if incarnation is None:
        incarnation = new_incarnation
        _write_state(options, index.memory, incarnation)
    return Kept(arena, index, ledger_fd, ledger, not new, incarnation)


def _state_of(options: KeptOptions, index_fd: int) -> int | None:
    """The incarnation of the node whose index this is; None where nothing was made yet; ArenaError
    where it is not ours."""
    path = options.index_path
    head = os.pread(index_fd, shared.NAMESPACES_OFFSET, 0)
    being_made = shared.index_bytes(buckets_for(options.arena_bytes))
    if not head or (not any(head[: shared.HEADER.size]) and _size_of(index_fd) == being_made):
        return None
    if len(head) < shared.NAMESPACES_OFFSET:
        raise ArenaError(f"{path} is no index of kvcast; name another file, or remove it")
    magic, layout, _, index_bytes, arena_bytes, _, *_ = shared.HEADER.unpack_from(head)
    length, slab_bytes, incarnation, check = shared.KEPT.unpack_from(head, shared.KEPT_OFFSET)
    if magic != shared.INDEX_MAGIC:
        raise ArenaError(f"{path} is no index of kvcast; name another file, or remove it")
    if layout != shared.INDEX_LAYOUT:
        raise ArenaError(
            f"{path} has format {layout}, and this release {shared.INDEX_LAYOUT}: "
            "remove it to begin with an empty arena"
        )
    owner = head[_OWNER_OFFSET : _OWNER_OFFSET + min(length, MAX_OWNER_BYTES)]
    if check != _check(owner, slab_bytes, incarnation, index_bytes, arena_bytes):
        log.error("%s has a damaged head: begun anew", path)
        return None
    if owner != _encoded(options.owner):
        raise ArenaError(
            f"{path} is of {owner.decode(errors='replace')}, and this is {options.owner}: "
            "name another file, or remove it"
        )
    if (arena_bytes, slab_bytes) != (options.arena_bytes, options.slab_bytes):
        raise ArenaError(
            f"{path} is of an arena of {arena_bytes} bytes in slabs of {slab_bytes}, and not of "
            f"{options.arena_bytes} in slabs of {options.slab_bytes}: remove it to begin anew"
        )
    if _size_of(index_fd) < index_bytes:
        log.error("%s is shorter than it says: begun anew", path)
        return None
    return int(incarnation)


def _is_of_no_use(
    options: KeptOptions, index_fd: int, arena_fd: int, incarnation: int | None
) -> bool:
    """Whether what lies there says nothing: then it has no name any more. Its bytes stay as they
    are, since the files may have other names."""
    if incarnation is None:
        stale = {options.index_path: index_fd, options.arena_path: arena_fd}
    elif _size_of(arena_fd) < options.arena_bytes:
        log.error("%s is shorter than its index says: begun anew", options.arena_path)
        stale = {options.index_path: index_fd}
    else:
        return False
    stale = {
        path: fd
        for path, fd in stale.items()
        if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_size
    }
    for path in stale:
        os.unlink(path)
    return bool(stale)


def _write_state(options: KeptOptions, memory: memoryview, incarnation: int) -> None:
    """Say whose it is. The header itself is written after this, by `Index`, its first word with
    the rest: until then the file counts as being made."""
    owner = _encoded(options.owner)
    check = _check(owner, options.slab_bytes, incarnation, len(memory), options.arena_bytes)
    state = shared.KEPT.pack(len(owner), options.slab_bytes, incarnation, check)
    memory[shared.KEPT_OFFSET : _OWNER_OFFSET] = state
    memory[_OWNER_OFFSET : _OWNER_OFFSET + len(owner)] = owner


def _encoded(owner: str) -> bytes:
    return owner.encode()[:MAX_OWNER_BYTES]


def _check(
    owner: bytes, slab_bytes: int, incarnation: int, index_bytes: int, arena_bytes: int
) -> int:
    data = shared.KEPT.pack(slab_bytes, incarnation, index_bytes, arena_bytes) + owner
    return xxhash.xxh3_64_intdigest(data)


def _let_go(index_fd: int) -> bool:
    """Whether the agent before was stopped while no client held anything."""
    offset = shared.LET_GO_WORD * shared.WORD_BYTES
    return os.pread(index_fd, shared.WORD_BYTES, offset) == (1).to_bytes(8, "little")


def _leave_to_clients(options: KeptOptions, index_fd: int, arena_fd: int) -> None:
    """Somebody still maps the arena, and what he pins nobody knows: the files are his, and he
    finds nothing more in them."""
    if not stat.S_ISREG(os.fstat(arena_fd).st_mode):
        raise ArenaInUseError(f"{options.arena_path} is still mapped by clients of a dead agent")
    log.warning(
        "clients of a dead agent still map %s: it is left to them, and begun anew",
        options.arena_path,
    )
    if _size_of(index_fd) >= shared.HEADER.size:
        offset = shared.INCARNATION_WORD * shared.WORD_BYTES
        os.pwrite(index_fd, bytes(shared.WORD_BYTES), offset)
    os.unlink(options.index_path)
    os.unlink(options.arena_path)


def _open(path: str) -> int:
    try:
        fd = os.open(path, _OPEN if may_be_made(path) else _OPEN & ~os.O_CREAT, 0o600)
    except OSError as error:
        raise ArenaError(f"{path}: {error.strerror}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISCHR(found.st_mode):
        os.close(fd)
        raise ArenaError(f"{path} exists and is no regular file, and no memory device")
    if stat.S_ISREG(found.st_mode) and not is_ours_alone(found):
        os.close(fd)
        raise ArenaError(f"{path} is not this user's alone, so what it says cannot be trusted")
    return fd


def _size_of(fd: int) -> int:
    """In bytes; a device is as long as can be mapped of it."""
    found = os.fstat(fd)
    return found.st_size if stat.S_ISREG(found.st_mode) else 1 << 63


def _close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass  # it was closed on the way
