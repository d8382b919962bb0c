"""A folder out of the pool, into files.

Owns: what of the folder is there already, how much is asked for at once and in which order, that
every block is checked against its key before it is written, and that a file has its name only when
it is whole. Must not know: how the pool brings a block.

All hosts ask for the blocks in the same order, so hosts that begin together stay together and share
what they read. Hosts that fetch the same folder are a reader group: the one that asks first asks
for all, and a host that is held up finds the blocks in its agent's arena. Hosts are told of each
other, or find each other by the controller (`AsyncClient.company`). A host that comes later takes
the blocks that the others ask for. In the end it asks for what it has missed, together with all
others that missed it. If what the others had before does not come, it goes on alone. Unfinished
files are kept in a folder of their own. What is right in them, or in a file of the same name, is
not fetched again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from kvcast.hostagent.client import AsyncClient, Block, BusyError, KvcastError
from kvcast.hostagent.models.manifest import (
    PARTIAL,
    FolderFile,
    Manifest,
    ManifestError,
    Piece,
    decode,
    identity,
    key_of,
    manifest_key,
    pieces,
)
from kvcast.protocol.messages.control import AT_END

T = TypeVar("T")
Progress = Callable[[int, bool], None]
"""Told of every piece that is right: its size in bytes, and whether it was there already."""
AT_ONCE: Final = 8
"""Blocks that are asked for at the same time."""
AT_ONCE_BYTES: Final = 64 << 20
GET_DEADLINE_S: Final = 10.0
RETRY_WAIT_S: Final = 0.5
BUSY_WITHIN_S: Final = 600.0
"""An agent that is busy, mostly since the namespace is over its rate, is asked again so long,"""
BUSY_WAIT_S: Final = 0.25
"""and so often."""
MEETING_S: Final = 0.3
"""Who begins waits so long for others that begin now."""
COMPANY_PERIOD_S: Final = 0.25
"""How often it is asked who else fetches the same."""
COMPANY_WAIT_S: Final = 2.0
"""How long an answer to that is waited for."""
FOLLOW_WAIT_S: Final = 5.0
"""For so long who comes late waits for the others to get on; they may have been alone before, and
then what they have asked for comes to them alone."""
_LOOK_PERIOD_S: Final = 0.1
_LOOK_AT: Final = 1024
"""How often who comes late looks for what has come here, and at how many blocks."""


class FetchError(KvcastError):
    """The folder cannot be fetched; the text says why."""


class NotInPoolError(FetchError):
    """The folder, or some of its blocks, are not in the pool."""


async def find(
    client: AsyncClient, namespace: int, name: str, version: str, expected: str | None = None
) -> tuple[Manifest, str]:
    """The manifest of a folder, and its identity, which must be `expected` if that is given."""
    key = manifest_key(name, version)
    (block,) = await when_let(lambda: client.get(namespace, [key], GET_DEADLINE_S))
    if block is None:
        raise NotInPoolError(f"no {name!r}, version {version!r}, is in the pool")
    with block:
        data = bytes(block.data)
    if expected is not None and identity(data) != expected:
        raise FetchError(f"{name!r}, version {version!r}, is {identity(data)}, not {expected}")
    try:
        return decode(data), identity(data)
    except ManifestError as error:
        raise FetchError(
            f"the pool's list of files of {name!r} is not to be trusted: {error}"
        ) from (error)


class Fetcher:
    """Fetches one folder. `patience_s`: how long to go on while nothing that is missing comes."""

    def __init__(
        self,
        client: AsyncClient,
        namespace: int,
        manifest: Manifest,
        to: Path,
        *,
        patience_s: float,
        gather_ms: int = 0,
        group: int = 0,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._manifest = manifest
        self._to = to
        self._patience_s = patience_s
        self._gather_ms = gather_ms
        self._group = group
        """The reader group of the hosts that fetch the same now; 0 = none."""
        self._finds_company = not group
        self._at = 0
        """Blocks before this ordinal were asked for."""
        self._others_at = 0
        """How far the first of the others is; 0 = there are none that have begun."""
        self._ordinals: dict[bytes, int] = {}
        """By key: its place in the order in which all hosts ask."""
        self._left: Counter[int] = Counter()
        """By file: pieces that are not there yet."""
        self._places: defaultdict[bytes, list[Piece]] = defaultdict(list)
        """By key: where the block belongs."""
        self._came_at = 0.0
        self._refused = 0
        self.tiers: Counter[str] = Counter()
        self.fetched_bytes = 0

    async def fetch(self, progress: Progress) -> None:
        """Fetch what is missing. FetchError if that cannot be done; what came is kept."""
        try:
            with self._alone():
                await asyncio.to_thread(self._look_around, progress)
                self._check_room()
                if self._places:
                    await self._fetch_missing(progress)
                await asyncio.to_thread(self._tidy_up)
        except OSError as error:
            raise FetchError(f"{error.filename or self._to}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let nobody else fetch into this folder meanwhile: its unfinished files have names."""
        (self._to / PARTIAL).mkdir(parents=True, exist_ok=True)
        folder = os.open(self._to, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise FetchError(f"{self._to}: somebody else fetches into it") from None
            yield
        finally:
            os.close(folder)

    async def _fetch_missing(self, progress: Progress) -> None:
        waiting = deque(self._places)
        if self._finds_company:
            await self._look_for_company()
            await asyncio.sleep(MEETING_S)
            await self._look_for_company()
        self._came_at = time.monotonic()
        company = asyncio.create_task(self._keep_company())
        try:
            if self._others_at:
                await self._follow(waiting, progress)
                waiting = deque(self._places)
            workers = max(1, min(AT_ONCE, AT_ONCE_BYTES // self._manifest.block_bytes))
            await together(self._work(waiting, progress) for _ in range(workers))
        finally:
            company.cancel()
            await asyncio.gather(company, return_exceptions=True)
            if self._finds_company:
                self._at = AT_END
                await self._look_for_company()

    # --- who else fetches it ----------------------------------------------------------------

    async def _keep_company(self) -> None:
        while self._finds_company:
            await asyncio.sleep(COMPANY_PERIOD_S)
            await self._look_for_company()

    async def _look_for_company(self) -> None:
        """Who fetches the same now. A pool that cannot say so has nobody."""
        group = at = 0
        try:
            async with asyncio.timeout(COMPANY_WAIT_S):
                group, at = await self._client.company(self._namespace, self._at)
        except (KvcastError, TimeoutError):
            pass
        if self._finds_company:  # not given up meanwhile
            self._group, self._others_at = group, at if group else 0

    async def _follow(self, waiting: deque[bytes], progress: Progress) -> None:
        """Take what the others ask for, as long as that comes, and ask for nothing."""
        begun_at, until = self._others_at, time.monotonic() + FOLLOW_WAIT_S
        first, *rest = waiting
        rest.sort(key=lambda key: self._ordinals[key] < begun_at)  # what comes next, first
        while self._others_at == begun_at and time.monotonic() < until:
            await self._take_what_is_here(rest, progress)
        came = True
        while came and first in self._places:
            since = time.monotonic()
            asked = asyncio.create_task(self._get(first, progress, expect=True))
            try:
                while not asked.done():
                    await self._take_what_is_here(rest, progress)
                asked.result()
            finally:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
            came = self._came_at >= since

    async def _take_what_is_here(self, keys: list[bytes], progress: Progress) -> None:
        await asyncio.sleep(_LOOK_PERIOD_S)
        keys[:] = [key for key in keys if key in self._places]
        described = await self._client.describe(self._namespace, keys[:_LOOK_AT])
        for block in described.held:
            if block.key in self._places:
                await self._get(block.key, progress)

    # --- what is there ----------------------------------------------------------------------

    def _look_around(self, progress: Progress) -> None:
        """Find out what is missing, file by file."""
        by_file: defaultdict[int, list[Piece]] = defaultdict(list)
        for ordinal, piece in enumerate(pieces(self._manifest)):
            self._ordinals.setdefault(piece.key, ordinal)
            by_file[piece.file].append(piece)
        for number, file in enumerate(self._manifest.files):
            self._look_at(number, file, by_file[number], progress)

    def _look_at(
        self, number: int, file: FolderFile, parts: list[Piece], progress: Progress
    ) -> None:
        whole, partial = self._to / file.path, self._partial(number)
        partial.parent.mkdir(parents=True, exist_ok=True)
        begun = partial.exists()
        if whole.is_file() and not begun:
            right = set(_right_pieces(whole, parts))
            if len(right) == len(parts) and whole.stat().st_size == file.size_bytes:
                for piece in parts:
                    progress(piece.size_bytes, True)
                return
            with whole.open("rb") as source, partial.open("wb") as copy:
                for piece in right:
                    data = os.pread(source.fileno(), piece.size_bytes, piece.offset)
                    os.pwrite(copy.fileno(), data, piece.offset)
            begun = bool(right)
        with partial.open("ab") as opened:
            os.truncate(opened.fileno(), file.size_bytes)
        right = set(_right_pieces(partial, parts)) if begun else set()  # else it is all a hole
        for piece in parts:
            if piece in right:
                progress(piece.size_bytes, True)
            else:
                self._left[number] += 1
                self._places[piece.key].append(piece)
        if not self._left[number]:
            self._finish(number)

    def _check_room(self) -> None:
        """A full disk is told of before, not in the middle."""
        wanted = sum(p.size_bytes for places in self._places.values() for p in places)
        disk = os.statvfs(self._to)
        if wanted > disk.f_bavail * disk.f_frsize:
            free = disk.f_bavail * disk.f_frsize
            raise OSError(
                errno.ENOSPC, f"{wanted:,} bytes are missing, and {free:,} are free", str(self._to)
            )

    # --- what is missing --------------------------------------------------------------------

    async def _work(self, waiting: deque[bytes], progress: Progress) -> None:
        while waiting:
            key = waiting.popleft()
            self._at = self._ordinals[key] + 1
            why = await self._get(key, progress)
            if not why:
                continue
            waiting.append(key)
            self._group, self._finds_company = 0, False
            if time.monotonic() - self._came_at > self._patience_s:
                raise NotInPoolError(self._what_is_missing(why))
            await asyncio.sleep(RETRY_WAIT_S)

    async def _get(self, key: bytes, progress: Progress, *, expect: bool = False) -> str:
        """Get a block, and write it; why it did not come, "" if it did. `expect`: it is asked for
        only when nothing comes any more of what the others ask for."""
        (outcome,) = await when_let(
            lambda: self._client.get_outcomes(
                self._namespace,
                [key],
                GET_DEADLINE_S,
                gather_ms=self._gather_ms,
                group=self._group,
                expect=expect,
            )
        )
        block = outcome.block
        if block is None:
            return outcome.reason or outcome.status
        with block:
            right = await asyncio.to_thread(self._write, key, block)
            size_bytes = len(block)
        if not right:
            self._refused += 1
            return outcome.reason or outcome.status
        self._came_at = time.monotonic()
        self.tiers[block.tier] += 1
        self._came(key, size_bytes, progress)
        return ""

    def _write(self, key: bytes, block: Block) -> bool:
        """Write a block to all its places; False, and nothing, if it is not what its key says."""
        data = block.data
        places = self._places[key]
        if any(len(data) != piece.size_bytes for piece in places) or key_of(data) != key:
            return False
        for piece in places:
            with self._partial(piece.file).open("r+b", buffering=0) as file:
                written = 0
                while written < len(data):
                    written += os.pwrite(file.fileno(), data[written:], piece.offset + written)
        return True

    def _came(self, key: bytes, size_bytes: int, progress: Progress) -> None:
        self.fetched_bytes += size_bytes
        for piece in self._places.pop(key):
            progress(piece.size_bytes, False)
            self._left[piece.file] -= 1
            if not self._left[piece.file]:
                self._finish(piece.file)

    def _finish(self, number: int) -> None:
        """The file is whole: give it its name."""
        file, partial = self._manifest.files[number], self._partial(number)
        whole = self._to / file.path
        whole.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("rb") as opened:
            os.fchmod(opened.fileno(), 0o755 if file.executable else 0o644)
            os.fsync(opened.fileno())
        partial.replace(whole)

    def _tidy_up(self) -> None:
        """Remove the folder of unfinished files, if it is empty."""
        for place, _, _ in os.walk(self._to / PARTIAL, topdown=False):
            try:
                os.rmdir(place)
            except OSError:
                pass

    def _partial(self, number: int) -> Path:
        return self._to / PARTIAL / self._manifest.files[number].path

    def _what_is_missing(self, why: str) -> str:
        blocks = len(self._places)
        size_bytes = sum(places[0].size_bytes for places in self._places.values())
        lied = (
            f"; {self._refused} came with other bytes than their keys say" if self._refused else ""
        )
        return (
            f"{blocks} blocks ({size_bytes:,} bytes) are not in the pool ({why}){lied}. What came"
            f" is in {self._to / PARTIAL}: load the folder again, and fetch it once more"
        )


def _right_pieces(path: Path, parts: list[Piece]) -> Iterator[Piece]:
    """Those that the file holds."""
    with path.open("rb", buffering=0) as file:
        for piece in parts:
            data = os.pread(file.fileno(), piece.size_bytes, piece.offset)
            if len(data) == piece.size_bytes and key_of(data) == piece.key:
                yield piece


async def when_let(call: Callable[[], Awaitable[T]]) -> T:
    """What the call gives, as soon as the agent is not too busy for it; BusyError if it is for
    long."""
    until = time.monotonic() + BUSY_WITHIN_S
    while True:
        try:
            return await call()
        except BusyError:
            if time.monotonic() > until:
                raise
        await asyncio.sleep(BUSY_WAIT_S)


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all of them; where one fails, the others are ended, and its error is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
