"""A folder into the pool.

Owns: which files of a folder are taken, how much of it is on its way at once, what is put again
since it was displaced, and that the manifest is put last: a folder that is found was whole at that
moment. Must not know: how the pool keeps it.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvcast.hostagent.client import AsyncClient, BusyError, KvcastError, PutError
from kvcast.hostagent.models.fetching import together, when_let
from kvcast.hostagent.models.manifest import (
    FORMAT,
    MIN_BLOCK_BYTES,
    PARTIAL,
    FolderFile,
    Manifest,
    ManifestError,
    encode,
    identity,
    key_of,
    manifest_key,
    parts_of,
)
from kvcast.protocol.links.backoff import pause_after
from kvcast.protocol.messages import local
from kvcast.protocol.messages.wire import KEY_BYTES

Progress = Callable[[int], None]
"""Told of every piece that is done: its size in bytes."""
AT_ONCE: Final = 4
"""Blocks that are read and put at the same time."""
_LEAST_BYTES: Final = 1024
"""A block takes as much, however small."""
_NAMED_BYTES: Final = 64
"""Of the manifest, for each file, besides its path and keys."""
BUSY_TRIES: Final = 50
BUSY_WAIT_S: Final = 0.1
BUSY_WAIT_MAX_S: Final = 1.0
"""How often a block is put that the pool does not take yet, and how long is waited before it is put
again: at first, and at most."""
SETTLE_S: Final = 1.0
"""Before what was displaced is put again: for disks, to take what is in DRAM only."""
_LOOK_AT: Final = 1024
"""Blocks of which one question asks whether they are there."""
LEFT_OUT: Final = frozenset({PARTIAL, ".git", ".cache"})
"""Folders that are no part of a model: of unfinished fetches, of git, of the hub's client."""


class LoadError(KvcastError):
    """The folder cannot be loaded; the text says why."""


@dataclass
class Loaded:
    """What came of it. Sizes in bytes."""

    identity: str
    """Of the manifest (`manifest.identity`)."""
    files: int
    size_bytes: int
    blocks: int
    put_blocks: int
    """Those that the pool did not hold before."""


@dataclass
class Source:
    """A file that is being loaded."""

    path: str
    """Within the folder."""
    at: Path
    size_bytes: int
    changed_ns: int
    executable: bool
    keys: list[bytes] = field(default_factory=list)

    def blocks(self, block_bytes: int) -> range:
        """Where its blocks begin."""
        return range(0, self.size_bytes, block_bytes)


def sources(folder: Path) -> list[Source]:
    """The files of a folder and of those in it, by path. Links to files are followed, links to
    folders are not. LoadError for a folder that cannot be read or holds none, or one whose name
    nobody would write."""
    found: list[Source] = []

    def failed(error: OSError) -> None:
        raise LoadError(f"{error.filename}: {error.strerror}") from error

    for place, folders, names in os.walk(folder, onerror=failed):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        for name in sorted(names):
            at = Path(place, name)
            try:
                facts = at.stat()
            except OSError as error:
                raise LoadError(f"{at}: {error.strerror}") from error
            if stat.S_ISREG(facts.st_mode):
                path = at.relative_to(folder).as_posix()
                try:
                    parts_of(path)
                except ManifestError as error:
                    raise LoadError(f"this folder cannot be in the pool: {error}") from error
                found.append(
                    Source(
                        path,
                        at,
                        facts.st_size,
                        facts.st_mtime_ns,
                        bool(facts.st_mode & stat.S_IXUSR),
                    )
                )
    if not found:
        raise LoadError(f"{folder} holds no files")
    return sorted(found, key=lambda source: source.path.split("/"))


def most_room(found: list[Source], block_bytes: int) -> int:
    """What the blocks of a folder and its manifest take of a node's arena at most, in bytes."""
    blocks = [
        min(block_bytes, source.size_bytes - at)
        for source in found
        for at in source.blocks(block_bytes)
    ]
    manifest_bytes = MIN_BLOCK_BYTES + KEY_BYTES * len(blocks)
    manifest_bytes += sum(_NAMED_BYTES + len(source.path.encode()) for source in found)
    # No extent is larger than the power of two above what lies in it, but for the smallest.
    return sum(max(_LEAST_BYTES, 1 << (n - 1).bit_length()) for n in (*blocks, manifest_bytes))


class Loader:
    """Loads one folder. See the module's text."""

    def __init__(self, client: AsyncClient, namespace: int, block_bytes: int) -> None:
        self._client = client
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._put: set[bytes] = set()

    async def load(
        self, found: list[Source], name: str, version: str, progress: Progress
    ) -> Loaded:
        """Put these files and their manifest; LoadError if that cannot be done, or the folder of
        that name and version is another one."""
        for source in found:
            source.keys = [b""] * len(source.blocks(self._block_bytes))
        blocks = [(source, number) for source in found for number in range(len(source.keys))]
        await self._work_on(blocks, progress)
        manifest = Manifest(
            FORMAT,
            self._block_bytes,
            [FolderFile(s.path, s.size_bytes, b"".join(s.keys), s.executable) for s in found],
        )
        try:
            data = encode(manifest)
        except ManifestError as error:
            raise LoadError(f"this folder cannot be in the pool: {error}") from error
        await self._put_displaced(blocks, manifest.size_bytes)
        await self._publish(manifest_key(name, version), data, name, version)
        size_bytes, put_blocks = manifest.size_bytes, len(self._put)
        return Loaded(identity(data), len(found), size_bytes, len(blocks), put_blocks)

    async def _work_on(self, blocks: list[tuple[Source, int]], progress: Progress) -> None:
        left = iter(blocks)
        await together(self._work(left, progress) for _ in range(AT_ONCE))

    async def _work(self, blocks: Iterator[tuple[Source, int]], progress: Progress) -> None:
        buffer = memoryview(bytearray(self._block_bytes))
        for source, number in blocks:
            offset = number * self._block_bytes
            view = buffer[: min(self._block_bytes, source.size_bytes - offset)]
            source.keys[number] = key = await asyncio.to_thread(_read, source, offset, view)
            if not await self._client.exists(self._namespace, [key]):
                await self._put_block(key, view)
                self._put.add(key)
            progress(len(view))

    async def _put_block(self, key: bytes, view: memoryview) -> None:
        for failures in range(1, BUSY_TRIES + 1):
            try:
                await self._client.put(self._namespace, {key: view})
                return
            except PutError as error:
                status = error.failed[key]
            except BusyError as error:
                status = error.status
            if status not in (local.BUSY, local.NO_ROOM, local.UNAVAILABLE):
                break
            await asyncio.sleep(pause_after(failures, BUSY_WAIT_S, BUSY_WAIT_MAX_S))
        raise LoadError(f"the pool does not take a block of {len(view)} bytes: {status}")

    async def _put_displaced(self, blocks: list[tuple[Source, int]], size_bytes: int) -> None:
        """See to it that all blocks are there at once. Where they come faster than a disk takes
        them, some are evicted before they are written: they are put again, as long as each time
        an eighth less is missing. Else the pool has no room for the folder: LoadError."""
        most = len(blocks)
        while missing := await self._missing(blocks):
            if len(missing) > most:
                raise LoadError(
                    f"the pool keeps only {len(blocks) - len(missing)} of {len(blocks)} blocks: it"
                    f" has no room for {size_bytes / (1 << 30):.2f} GiB, or a node was lost"
                    " meanwhile"
                )
            most = len(missing) - max(1, len(missing) // 8)
            await asyncio.sleep(SETTLE_S)
            await self._work_on(missing, lambda _size_bytes: None)

    async def _missing(self, blocks: list[tuple[Source, int]]) -> list[tuple[Source, int]]:
        """Those of the blocks that the pool does not hold."""
        keys = [source.keys[number] for source, number in blocks]
        missing = []
        at = 0
        while at < len(keys):
            asked = keys[at : at + _LOOK_AT]
            there = await self._client.exists(self._namespace, asked, 10.0)
            at += there
            if there < len(asked):
                missing.append(blocks[at])
                at += 1
        return missing

    async def _publish(self, key: bytes, data: bytes, name: str, version: str) -> None:
        (former,) = await when_let(lambda: self._client.get(self._namespace, [key], 5.0))
        if former is None:
            await self._put_block(key, memoryview(data))
            return
        with former:
            if bytes(former.data) != data:
                raise LoadError(
                    f"the pool holds another {name!r}, version {version!r}"
                    f" ({identity(former.data)}): give this one a version of its own"
                )


def _read(source: Source, offset: int, view: memoryview) -> bytes:
    """Read a block of a file; its key."""
    try:
        with source.at.open("rb", buffering=0) as file:
            filled = 0
            while filled < len(view):
                count = os.preadv(file.fileno(), [view[filled:]], offset + filled)
                if not count:
                    break
                filled += count
            facts = os.fstat(file.fileno())
    except OSError as error:
        raise LoadError(f"{source.at}: {error.strerror}") from error
    if filled < len(view) or (facts.st_size, facts.st_mtime_ns) != (
        source.size_bytes,
        source.changed_ns,
    ):
        raise LoadError(f"{source.at} changed while it was loaded")
    return key_of(view)
