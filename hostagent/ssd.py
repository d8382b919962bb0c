"""The tiers below a running agent's DRAM: their cores, their files, and the event loop between.

Owns: when the files are opened and closed, and how orders and their ends pass between the loop and
the disk's threads. Must not know: what is moved and why (`core.ssd`), or how the disk is used
(`tiers.ssd.files`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.ssd import ARENA, SSD, SsdTier
from kvcast.hostagent.options import SsdOptions
from kvcast.hostagent.tiers.ssd.files import Disk, SsdFile, open_files
from kvcast.hostagent.tiers.ssd.layout import (
    Formatted,
    Scanned,
    SsdInUseError,
    cut_of,
    scan,
)
from kvcast.hostagent.tiers.ssd.mapped import open_arena
from kvcast.hostagent.tiers.ssd.orders import Order
from kvcast.protocol.messages.wire import BlockId

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.05
_RETRIES_S: Final = 30.0
"""How long an agent that comes after another waits for its files: as long as the kernel, or an
upgrade, may take to end the other."""
_PATIENCE_S: Final = 2.0
"""How long a closing agent waits for what a disk is doing."""
_SCANS_WAITING: Final = 4
"""Pieces of a table that are read ahead of the loop."""


_ARENA_THREADS: Final = 4
"""Of a further arena: what they do is copy."""


@dataclass(frozen=True)
class _Level:
    tier: SsdTier
    files: list[SsdFile]
    disk: Disk


class SsdOfAgent:
    """See the module's description. `start`, then `close`."""

    def __init__(self, core: AgentCore, options: SsdOptions, owner: str, pump: Callable[[], None]):
        self._core = core
        self._options = options
        self._owner = owner
        self._pump = pump
        self._loop = asyncio.get_running_loop()
        self._levels: list[_Level] = []
        self._ended: deque[tuple[Order, str, int]] = deque()
        self._told = False
        self._lock = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def tiers(self) -> list[SsdTier]:
        """The nearest first; none before the files are open."""
        return [level.tier for level in self._levels]

    @property
    def tier(self) -> SsdTier | None:
        """The last of them: the disk, where there is one."""
        return self._levels[-1].tier if self._levels else None

    @property
    def is_direct(self) -> bool:
        """Whether the last of them is used without the page cache."""
        return all(file.is_direct for file in self._levels[-1].files)

    def start(self, *, patient: bool) -> None:
        """Open the files and begin. SsdError. `patient`: another agent of this node may still have
        them: then they are opened as soon as it has let go, and until then there is no tier."""
        if patient:
            self._core.awaits_tiers = True
            self._opening = asyncio.create_task(self._open_when_free())
        else:
            self._open()

    async def _open_when_free(self) -> None:
        until = self._loop.time() + _RETRIES_S
        while True:
            try:
                self._open()
                return
            except SsdInUseError:
                if self._loop.time() > until:
                    log.exception("there is no SSD tier: its files are not let go")
                    break
            except Exception:  # whatever it is: drains must not wait for what never comes
                log.exception("there is no SSD tier")
                break
            await asyncio.sleep(_RETRY_S)
        self._core.await_tiers_no_more()

    def _open(self) -> None:
        options = self._options
        opened: list[tuple[str, str, list[SsdFile], list[Formatted]]] = []
        try:
            for number, (path, size_bytes) in enumerate(options.arenas, start=1):
                files = self._open_files((path,), size_bytes, memory=True)
                opened.append((ARENA, f"{ARENA}{number}", *files))
            if options.paths:
                files = self._open_files(options.paths, options.size_bytes, memory=False)
                opened.append((SSD, SSD, *files))
        except BaseException:
            for *_, each, _ in opened:
                for file in each:
                    file.close()
            raise
        core, now = self._core, self._loop.time()
        epoch_s = time.time() - now
        store, memory = core.store, core.memory
        for kind, name, each, formatted in opened:
            tier = SsdTier(options.rules, store, memory, formatted, epoch_s, kind, name)
            tier.wake = self._wake
            tier.advance(now)
            threads = options.threads if kind == SSD else _ARENA_THREADS
            self._levels.append(_Level(tier, each, Disk(each, self._order_ended, threads)))
            if kind == ARENA:
                cut = formatted[0].cut
                store = tier.shelf
                memory = each[0].map(cut.blocks_offset, cut.slabs * cut.slab_bytes)
        core.use_tiers(self.tiers)
        core.handover.too_large = _too_large
        for level, (*_, formatted) in zip(self._levels, opened, strict=True):
            found = [number for number, each in enumerate(formatted) if each.found]
            if found:
                threading.Thread(
                    target=self._scan,
                    args=(level, found, formatted),
                    name="kvcast-ssd-scan",
                    daemon=True,
                ).start()

    def _open_files(
        self, paths: Sequence[str], size_bytes: int, *, memory: bool
    ) -> tuple[list[SsdFile], list[Formatted]]:
        options = self._options
        cuts = [cut_of(self._owner, size_bytes, options.unit_bytes, options.slab_bytes)]
        if memory:
            return open_files(paths, cuts, _new_identity, direct=False, opened=open_arena)
        return open_files(paths, cuts * len(paths), _new_identity)

    # --- orders -------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        """Have done what the tier wants done."""
        if self._closed:
            return
        now = self._loop.time()
        epoch_s = time.time() - now
        times = []
        for level in self._levels:
            level.tier.epoch_s = epoch_s
            level.disk.do(level.tier.take_orders(now))
            times.append(level.tier.get_timer(now))
        when = min((at for at in times if at is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when is not None:
            # A pause, however short, in which others have their turn.
            self._timer = self._loop.call_at(max(when, now + 0.001), self._run)
        if self._core.outbox.waits:  # what was found is handed over
            self._pump()

    def _order_ended(self, order: Order, error: str, digest: int) -> None:
        """In a thread of the disk's."""
        with self._lock:
            self._ended.append((order, error, digest))
            if self._told:
                return
            self._told = True
        self._call_in_loop(self._take_ended)

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop is closed, and the agent with it

    def _take_ended(self) -> None:
        with self._lock:
            self._told = False
            ended, self._ended = self._ended, deque()
        if self._closed:
            return
        now = self._loop.time()
        self._core.store.advance(now)
        for order, error, digest in ended:
            order.ended(now, error, digest)
        self._run()
        self._pump()

    # --- what is found ------------------------------------------------------------------------

    def _scan(self, level: _Level, numbers: list[int], formatted: list[Formatted]) -> None:
        """In a thread: read the tables, and hand them over a piece at a time."""
        tier, files = level.tier, level.files
        room = threading.Semaphore(_SCANS_WAITING)

        def hand_over(number: int, piece: Scanned) -> Callable[[], None]:
            def take() -> None:
                room.release()
                tier.found(number, piece)

            return take

        for number in numbers:
            try:
                for piece in scan(files[number], formatted[number]):
                    if not room.acquire(timeout=_RETRIES_S) or self._closed:
                        return
                    self._call_in_loop(hand_over(number, piece))
            except OSError:
                log.exception("%s cannot be read to its end", files[number].path)
            self._call_in_loop(tier.scanned)

    # --- the end ------------------------------------------------------------------------------

    async def close(self) -> None:
        """End what the disk is doing, and let go of the files."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._timer is not None:
            self._timer.cancel()
        for level in self._levels:
            if not await asyncio.to_thread(level.disk.close, _PATIENCE_S):
                log.warning("%s: its disk does not answer, and is left as it is", level.tier.name)
                return
        for level in self._levels:
            for file in level.files:
                file.close()


def _new_identity() -> int:
    return secrets.randbits(63) | 1


def _too_large(block: BlockId, size_bytes: int) -> None:
    log.warning(
        "blocks cannot be handed over, since they are larger than the arena or their namespace's "
        "quota: the first is %s of namespace %d, %d bytes",
        *(block.key.hex(), block.namespace, size_bytes),
    )
