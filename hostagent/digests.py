"""Digests of large blocks, made beside the event loop.

Owns: the threads that make them, and which are worth their time. Must not know: what becomes of
them (`kvcast.hostagent.core.writes` and `kvcast.protocol.links.rdma_caller` do).

The hash of xxHash runs without the interpreter's lock. To hand blocks to a thread and to hear of
its end takes as long as some MiB take to be hashed, so less is hashed where it is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.writes import COMMITTED_AT_ONCE
from kvcast.protocol.digests import Digested, digests_at_once
from kvcast.protocol.messages.wire import digest_of

INLINE_BYTES: Final = 2 << 20
"""No more than this, all blocks together, is hashed in the event loop: 0.1 ms. Unless they are so
many that others had better have a turn between them."""
_MOST_THREADS: Final = 4


class DigestThreads:
    """Make the digests that `core` wants, from now on and until `close`; `pump` sends what comes
    of it. They are a quarter of the processors: one hashes what a link of 200 Gb/s brings."""

    def __init__(self, core: AgentCore, pump: Callable[[], None]) -> None:
        self._store = core.store
        self._pump = pump
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(
            max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 4)), "kvcast-digests"
        )
        self._closed = False
        core.make_digests = self._make

    def _make(self, now: float, blocks: list[memoryview], then: Digested) -> None:
        few = len(blocks) < COMMITTED_AT_ONCE and sum(map(len, blocks)) <= INLINE_BYTES
        if few or self._closed:
            digests_at_once(now, blocks, then)
            return
        made = self._loop.run_in_executor(self._threads, _digests_of, blocks)
        made.add_done_callback(lambda made: self._made(made, then))

    def _made(self, made: asyncio.Future[list[int]], then: Digested) -> None:
        if self._closed:
            return
        now = self._loop.time()
        self._store.advance(now)
        then(now, made.result())
        self._pump()

    def close(self) -> None:
        """Wait until nobody looks at the arena any more."""
        self._closed = True
        self._threads.shutdown()


def _digests_of(blocks: list[memoryview]) -> list[int]:
    return list(map(digest_of, blocks))
