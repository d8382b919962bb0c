"""The cold tier of a running agent: its core, and an object store by way of `obstore`.

Owns: the errands that are under way, and how long each may take. Must not know: what is stored and
why (`core.cold`). Credentials and regions come from the environment, as `obstore` reads them
(AWS_…, GOOGLE_…, AZURE_…).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.cold import DONE, GONE, ColdRules, ColdTier, Errand, Task

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

ERRAND_S: Final = 30.0
"""How long one errand may take."""
_ALL_S: Final = 3600.0
"""How long it may take to list, or delete, all of a namespace."""


class ColdError(Exception):
    """The object store cannot be used; the text says why."""


def open_store(url: str) -> ObjectStore:
    """The object store at a URL (s3://, gs://, az://, file:///, memory:///). ColdError."""
    try:
        from obstore.store import from_url
    except ImportError:
        raise ColdError("--cold needs pip install 'kvcast[cold]'") from None
    try:
        return from_url(url)
    except Exception as error:  # obstore's own have no common base
        raise ColdError(f"{url}: {error}") from error


class ColdOfAgent:
    """See the module's description. `start`, then `close`."""

    def __init__(
        self, core: AgentCore, store: ObjectStore, cluster: str, pump: Callable[[], None]
    ) -> None:
        self._store = store
        self._pump = pump
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = False
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
        for task in self.tier.take_tasks(self._loop.time()):
            running = asyncio.create_task(self._do(task))
            self._tasks.add(running)
            running.add_done_callback(self._tasks.discard)

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
        except Exception as failure:  # obstore's own have no common base
            error = str(failure) or type(failure).__name__
        if error:
            log.debug("cold: %s %s: %s", task.errand.value, task.name, error)
        now = self._loop.time()
        self._core.store.advance(now)
        task.ended(now, error, data)
        self._pump()

    async def _errand(self, task: Task) -> memoryview | None:
        import obstore

        match task.errand:
            case Errand.STORE:
                assert task.data is not None
                await obstore.put_async(self._store, task.name, b"".join(task.data))
            case Errand.FETCH:
                found = await obstore.get_async(self._store, task.name)
                return memoryview(await found.bytes_async())
            case Errand.DELETE:
                await obstore.delete_async(self._store, [task.name])
            case _:
                async for some in obstore.list(self._store, prefix=task.name.rstrip("/")):
                    names = [one["path"] for one in some]
                    if task.errand is Errand.LIST:
                        self.tier.found(task.name, names)
                    else:
                        await obstore.delete_async(self._store, names)
        return None

    async def close(self) -> None:
        """End all errands."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
