"""The cold tier of a running agent: its core, and a store that others keep.

Owns: the errands that are under way, and how long each may take. Must not know: what is stored and
why (`core.cold`), or which store it is (`object_stores`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.cold import DONE, GONE, ColdRules, ColdTier, Errand, Task
from kvcast.hostagent.object_stores import Objects

log = logging.getLogger(__name__)

ERRAND_S: Final = 30.0
"""How long one errand may take."""
_ALL_S: Final = 3600.0
"""How long it may take to list, or delete, all of a namespace."""


class ColdOfAgent:
    """See the module's description. `start`, then `close`."""

    def __init__(
        self, core: AgentCore, store: Objects, cluster: str, pump: Callable[[], None]
    ) -> None:
        self._store = store
        self._pump = pump
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        epoch_s = time.time() - self._loop.time()
        self.tier = ColdTier(ColdRules(), core.store, core.memory, cluster, epoch_s)

    def start(self) -> None:
        """Begin."""
        self.tier.wake = self._wake
        self.tier.advance(self._loop.time())
        self._core.use_cold(self.tier)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._woken = False
        self.tier.epoch_s = time.time() - self._loop.time()
        for task in self.tier.take_tasks(self._loop.time()):
            running = asyncio.create_task(self._do(task))
            self._tasks.add(running)
            running.add_done_callback(self._tasks.discard)
        if self._timer is not None:
            self._timer.cancel()
        when = self.tier.get_timer()
        self._timer = None if when is None else self._loop.call_at(when, self._wake)

    async def _do(self, task: Task) -> None:
        error, data = DONE, None
        many = task.errand in (Errand.LIST, Errand.DELETE_ALL)
        try:
            async with asyncio.timeout(_ALL_S if many else ERRAND_S):
                data = await self._errand(task)
        except FileNotFoundError:
            error = GONE
        except TimeoutError:
            error = "the object store does not answer"
        except Exception as failure:  # the libraries' own have no common base
            error = str(failure) or type(failure).__name__
        if error:
            log.debug("cold: %s %s: %s", task.errand.value, task.name, error)
        now = self._loop.time()
        self._core.store.advance(now)
        task.ended(now, error, data)
        self._pump()

    async def _errand(self, task: Task) -> memoryview | None:
        match task.errand:
            case Errand.STORE:
                assert task.data is not None
                await self._store.put(task.name, b"".join(task.data))
            case Errand.FETCH:
                return await self._store.get(task.name)
            case Errand.DELETE:
                await self._store.delete(task.name)
            case Errand.DELETE_ALL:
                await self._store.delete_all(task.name)
            case Errand.LIST:
                async for some in self._store.objects(task.name):
                    self.tier.found(task.name, some)
        return None

    async def close(self) -> None:
        """End all errands."""
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()
