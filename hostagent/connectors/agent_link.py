"""A thread that is connected to the agent, whatever is then done with it.

Owns: the thread with its event loop, the connection and when it is made again, the numbers of
namespaces, and what is told whatever else is done. Must not know: engines, or what is asked of the
pool (`link`, `block_link`).

Everything that a connector has to say to the pool happens in one thread with an event loop of its
own, so that no step of an engine waits for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from kvcast.hostagent.client import AsyncClient, KvcastError, UnknownNamespaceError
from kvcast.hostagent.connectors.naming import HASHING_KEY, NamespaceName
from kvcast.hostagent.connectors.weighing import Weighed
from kvcast.protocol.messages.local import TIERS

CONNECT_S: Final = 1.0
"""How long a connection to the agent may take; it is on this node."""
RECONNECT_S: Final = 1.0
"""How long after a connection that failed none is tried."""
NOT_NEAR: Final = TIERS.index("ssd")
"""What comes out of tiers before this one was in this node's memory."""
SAVES_AT_ONCE: Final = 4
ARENA_SHARE: Final = 8
"""One load or save has at most an eighth of the arena at once."""
TELL_S: Final = 1.0
"""How long what became of prefixes is gathered before the agent is told of it."""

_log = logging.getLogger("kvcast.connector")


class UnreachableError(Exception):
    """The agent cannot be reached, or the namespace is not to be had."""


class AgentLink:
    """A way to the agent; the thread begins with the first thing to do. Public methods may be
    called in any thread, those with an underscore in the link's own."""

    def __init__(self, socket: str, name: str) -> None:
        self._socket = socket
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: AsyncClient | None = None
        self._connecting: asyncio.Lock | None = None
        self._retry_at = 0.0
        self._numbers: dict[NamespaceName, int] = {}
        self._untold = Weighed()
        self._paces = 0.0, 0.0
        self._telling = False
        self._closed = False

    # --- the thread -----------------------------------------------------------------------------

    def node_id(self, timeout_s: float = CONNECT_S + 1.0) -> str:
        """The name of the agent's node; "" where it cannot be reached just now."""

        async def ask() -> str:
            return (await self._connected()).node_id

        try:
            future = asyncio.run_coroutine_threadsafe(ask(), self._running_loop())
            return future.result(timeout_s)
        except (UnreachableError, KvcastError, concurrent.futures.TimeoutError):
            return ""

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="kvcast-connector", daemon=True
                )
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Run `work` on the thread; False once the link is closed."""
        if self._closed:
            return False
        loop = self._running_loop()

        def begin() -> None:
            task = loop.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

        try:
            loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the loop was closed in this moment
            return False
        return True

    def _soon(self, call: Callable[[], None]) -> None:
        """Make a call in the thread, if it runs."""
        with self._lock:
            loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed in this moment
                loop.call_soon_threadsafe(call)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("kvcast's connector has failed", exc_info=task.exception())

    def close(self, timeout_s: float = 2.0) -> None:
        """End all work, disconnect, and end the thread."""
        self._closed = True
        with self._lock:
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return

        async def end() -> None:
            tasks = [task for task in self._tasks if not task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._disconnect()

        with contextlib.suppress(concurrent.futures.TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(end(), loop).result(timeout_s)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout_s)

    # --- the connection -------------------------------------------------------------------------

    async def _connected(self) -> AsyncClient:
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is not None and self._client.connected:
                return self._client
            if time.monotonic() < self._retry_at:
                raise UnreachableError(f"{self._socket} could not be reached a moment ago")
            await self._disconnect()
            try:
                self._client = await AsyncClient.connect(
                    self._socket, name=self._name, timeout_s=CONNECT_S
                )
            except KvcastError as error:
                self._retry_at = time.monotonic() + RECONNECT_S
                _log.warning("kvcast's agent cannot be reached: %s", error)
                raise UnreachableError(str(error)) from error
            return self._client

    async def _number(self, client: AsyncClient, name: NamespaceName) -> int:
        """The number of a namespace."""
        number = self._numbers.get(name)
        if number is None:
            number = await client.namespace(name.tenant, name.model, name.version, name.layout)
            self._numbers[name] = number
        return number

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        self._numbers.clear()
        if client is not None:
            await client.close()

    @contextlib.contextmanager
    def _remembered(self) -> Iterator[None]:
        """Numbers that mean something else by now are asked for again next time."""
        try:
            yield
        except UnknownNamespaceError:
            self._numbers.clear()
            raise

    # --- telling --------------------------------------------------------------------------------

    def tell(self, weighed: Weighed, paces: tuple[float, float]) -> None:
        """Have the agent know what became of prefixes, and at what pace they are loaded and
        computed (`Weighing.paces`). What it could not be told goes with what comes next."""
        with self._lock:
            self._untold += weighed
            self._paces = paces
            if self._telling:
                return
            self._telling = True
        self._do(self._tell)

    async def _tell(self) -> None:
        await asyncio.sleep(TELL_S)
        with self._lock:
            told, self._untold = self._untold, Weighed()
            paces, self._telling = self._paces, False
        try:
            client = await self._connected()
            await client.weighed(told.whole, told.part, told.computed, *paces)
        except (KvcastError, UnreachableError) as error:
            _log.debug("the agent was not told: %r", error)
            with self._lock:
                self._untold += told

    # --- hashing --------------------------------------------------------------------------------

    def compare(self, name: NamespaceName, facts: bytes, differs: Callable[[bytes], None]) -> None:
        """Leave word in a namespace of how this engine hashes; `differs` is called where another
        has left another word. `facts`: see `naming.hashing_facts`."""

        async def ask() -> None:
            with contextlib.suppress(KvcastError, UnreachableError):
                client = await self._connected()
                number = await self._number(client, name)
                [block] = await client.get(number, [HASHING_KEY], 1.0)
                if block is None:
                    await client.put(number, {HASHING_KEY: facts})
                    return
                with block:
                    theirs = bytes(block.data)
                if theirs != facts:
                    differs(theirs)

        self._do(ask)
