"""Digests of blocks that have come, taken by several threads while others are copied.

Owns: which checks are under way, and that each block is released. Must not know: engines, sockets,
what becomes of a block.

A thread takes the digest of 4 to 20 GB/s, a GPU the bytes of 30 and more. So where there are
processors to spare, large blocks are checked by some threads beside the one that has them copied.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Final

from kvcast.hostagent.client import Block

THREADS: Final = min(4, len(os.sched_getaffinity(0)) // 4)
"""Of one link. 0: who has blocks copied checks them, too."""
LEAST_BYTES: Final = 128 * 1024
"""Smaller blocks are checked sooner than given to another thread."""

_log = logging.getLogger("kvcast.connector")


class Checkers:
    """One link's threads; they begin with the first check."""

    def __init__(self) -> None:
        self.threads: Executor | None = None
        if THREADS:
            self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvcast-check")

    def close(self) -> None:
        """No more checks."""
        if self.threads is not None:
            self.threads.shutdown(wait=False, cancel_futures=True)
            self.threads = None


class Checks:
    """Blocks of one load that are being checked. `landed` is called for each in the event loop's
    thread, with its place and whether its bytes are right; then it is released. `verify`: whether
    there is anything to check; else all are right."""

    def __init__(
        self, checkers: Checkers, landed: Callable[[int, Block, bool], None], *, verify: bool
    ) -> None:
        self._checkers = checkers
        self._landed = landed
        self._verify = verify
        self._under_way: deque[tuple[int, Block, Future[bool]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._failed: BaseException | None = None

    def add(self, place: int, block: Block) -> None:
        """Take a block over. Raises what `landed` has raised for an earlier one."""
        if self._failed is not None:
            block.release()
        self._raise()
        threads = self._checkers.threads
        if not self._verify or threads is None or block.size_bytes < LEAST_BYTES:
            self._land(place, block, not self._verify or block.verify())
            return
        if not self._under_way:  # nothing comes after it in this moment: then it lands
            self._loop.call_soon(self._land_all)
        self._under_way.append((place, block, threads.submit(block.verify)))
        if len(self._under_way) > 2 * THREADS:
            self._land_first()

    def finish(self) -> None:
        """Let all that were added land. Raises as `add`."""
        self._raise()
        self._land_all()
        self._raise()

    def close(self) -> None:
        """Release what has not landed; whoever was not told of a failure finds it in the log."""
        if self._failed is not None:
            _log.error("a block could not be copied", exc_info=self._failed)
        while self._under_way:
            _, block, check = self._under_way.popleft()
            check.cancel()
            block.release()

    def _land_all(self) -> None:
        try:
            while self._under_way:
                self._land_first()
        except Exception as error:
            self._failed = error

    def _land_first(self) -> None:
        place, block, check = self._under_way.popleft()
        try:
            right = check.result()
        except BaseException:
            block.release()
            raise
        self._land(place, block, right)

    def _land(self, place: int, block: Block, right: bool) -> None:
        with block:
            self._landed(place, block, right)

    def _raise(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
