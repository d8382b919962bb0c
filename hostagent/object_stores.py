"""Stores that others keep well, one narrow interface over all: `obstore`'s, and Mooncake Store.

Owns: what a URL means, and which calls of a library put, get, delete and list an object. Must not
know: what an object is, or who waits how long for it (`cold`). Credentials and regions of object
stores come from the environment, as `obstore` reads them (AWS_…, GOOGLE_…, AZURE_…).

Mooncake's library blocks, and a master that does not answer holds a call up for minutes. So its
calls are made by a few threads that nothing else waits for, and it is connected to in one of
them, again and again. It shows the names of its objects by its master's HTTP port only. What
Mooncake has evicted is gone, which is no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MOONCAKE: Final = "mooncake"
Listed = tuple[str, int]
"""An object's name, and its size in bytes; 0 where the store does not tell it."""
THREADS: Final = 8
"""Calls of a library that blocks, at once."""
MAX_LISTED: Final = 1 << 20
"""Names that are taken of one listing; what is beyond is not known to be there."""
_NAMES_AT_ONCE: Final = 1000
_CONNECT_AGAIN_S: Final = 5.0
_HTTP_S: Final = 30.0
_METRICS_PORT: Final = 9003
"""Of Mooncake's master, unless it was told another."""
_CLOSE_S: Final = 2.0
_BUFFER_MIB: Final = 128
_NOT_FOUND: Final = -704


class ColdError(Exception):
    """A store cannot be used; the text says why."""


class Objects(Protocol):
    """Objects by name. Whatever fails raises an error that says why."""

    async def put(self, name: str, data: bytes) -> None: ...

    async def get(self, name: str) -> memoryview:
        """FileNotFoundError where there is none."""
        ...

    async def delete(self, name: str) -> None:
        """One that is not there is deleted already, or a FileNotFoundError."""
        ...

    async def delete_all(self, prefix: str) -> None: ...

    def objects(self, prefix: str) -> AsyncIterator[Sequence[Listed]]: ...

    async def close(self) -> None: ...


def open_store(url: str) -> Objects:
    """The store at a URL (s3://, gs://, az://, file:///, memory:///; mooncake://HOST:PORT of its
    master). ColdError."""
    return Mooncake(url) if urlsplit(url).scheme == MOONCAKE else Obstore(url)


class Obstore:
    """Whatever `obstore` can reach."""

    def __init__(self, url: str) -> None:
        try:
            from obstore.store import from_url
        except ImportError:
            raise ColdError("--cold needs pip install 'kvcast[cold]'") from None
        parts = urlsplit(url)
        folder = Path(unquote(parts.path))
        if parts.scheme == "file" and not folder.is_dir():
            raise ColdError(f"{url}: there is no folder {folder}; make it first: mkdir -p {folder}")
        try:
            self._store: ObjectStore = from_url(url)
        except Exception as error:  # obstore's own have no common base
            what = str(error).partition("\n")[0]  # below it are the library's own structures
            raise ColdError(f"{url}: {what}") from error

    async def put(self, name: str, data: bytes) -> None:
        import obstore

        await obstore.put_async(self._store, name, data)

    async def get(self, name: str) -> memoryview:
        import obstore

        found = await obstore.get_async(self._store, name)
        return memoryview(await found.bytes_async())

    async def delete(self, name: str) -> None:
        import obstore

        await obstore.delete_async(self._store, [name])

    async def delete_all(self, prefix: str) -> None:
        import obstore

        async for some in self.objects(prefix):
            names = [name for name, _size in some]
            try:
                await obstore.delete_async(self._store, names)
            except FileNotFoundError:  # others delete them, too; it may have ended at that one
                await asyncio.gather(*map(self._delete_if_there, names))

    async def _delete_if_there(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self.delete(name)

    async def objects(self, prefix: str) -> AsyncIterator[Sequence[Listed]]:
        import obstore

        async for some in obstore.list(self._store, prefix=prefix.rstrip("/")):
            yield [(one["path"], one["size"]) for one in some]

    async def close(self) -> None:
        pass


class Threads:
    """Calls of a library that blocks, in threads that a process's end does not wait for."""

    def __init__(self, count: int = THREADS) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvcast-cold-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def do(self, call: Callable[[], Result]) -> Result:
        """What `call` returns, or raises. Who is cancelled does not wait, and if it was not begun
        it is not made."""
        ended: asyncio.Future[Result] = self._loop.create_future()

        def make() -> None:
            if ended.cancelled():
                return
            try:
                result = call()
            except Exception as error:
                tell(_set_error, error)
            else:
                tell(_set_result, result)

        def tell(what: Callable[..., None], value: object) -> None:
            try:
                self._loop.call_soon_threadsafe(what, ended, value)
            except RuntimeError:
                pass  # the loop is closed, and nobody waits

        self._calls.put(make)
        return await ended

    def close(self) -> None:
        """End them, as soon as each has done what it is doing."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _set_error(ended: asyncio.Future[Any], error: Exception) -> None:
    if not ended.done():
        ended.set_exception(error)


def _set_result(ended: asyncio.Future[Any], result: object) -> None:
    if not ended.done():
        ended.set_result(result)


class Mooncake:
    """Mooncake Store, as a client that gives it no memory of its own:

        mooncake://HOST:PORT?metrics=PORT&host=ADDRESS&protocol=tcp&device=&buffer_mib=128

    `metrics`: the master's HTTP port; `host`: this node's address for Mooncake, by default the one
    from which the master is reached; `protocol`, `device`: as Mooncake's own; `buffer_mib`: memory
    that its client takes, more than `THREADS` times the largest block if none is to be refused."""

    def __init__(self, url: str) -> None:
        try:
            self._library: Any = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise ColdError(f"{MOONCAKE}:// needs Mooncake's package: {error}") from None
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            said = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            metrics = int(said.pop("metrics", _METRICS_PORT))
            self._buffer_bytes = int(said.pop("buffer_mib", _BUFFER_MIB)) << 20
        except ValueError as error:
            raise ColdError(f"{url}: {error}") from error
        if host is None or port is None:
            raise ColdError(f"{url}: no HOST:PORT of Mooncake's master")
        if not 0 < metrics < 65536 or self._buffer_bytes <= 0:
            raise ColdError(f"{url}: metrics is a port, and buffer_mib more than 0")
        self._master = f"{host}:{port}"
        self._names_at = f"http://{host}:{metrics}/get_all_keys"
        try:
            self._host = said.pop("host", "") or _address_towards(host, port)
        except OSError as error:
            raise ColdError(f"{url}: {error}") from error
        self._protocol = said.pop("protocol", "tcp")
        self._device = said.pop("device", "")
        if said:
            raise ColdError(f"{url}: unknown: {', '.join(sorted(said))}")
        self._threads = Threads()
        self._connecting = threading.Lock()
        self._connect_at = 0.0
        self._store: Any = None

    def _connected(self) -> Any:
        """In a thread: the store. OSError where the master does not answer."""
        if self._store is not None:
            return self._store
        if not self._connecting.acquire(blocking=False):
            raise ConnectionError(f"no connection to Mooncake's master at {self._master} yet")
        try:
            if self._store is None and time.monotonic() >= self._connect_at:
                store = self._library.MooncakeDistributedStore()
                code = store.setup(
                    *(self._host, "P2PHANDSHAKE", 0, self._buffer_bytes),
                    *(self._protocol, self._device, self._master),
                )
                if code == 0:
                    self._store = store
                else:
                    self._connect_at = time.monotonic() + _CONNECT_AGAIN_S
                    log.warning("Mooncake's master at %s: %s", self._master, code)
            if self._store is None:
                raise ConnectionError(f"Mooncake's master at {self._master} does not answer")
            return self._store
        finally:
            self._connecting.release()

    async def put(self, name: str, data: bytes) -> None:
        def call() -> None:
            _check("put", self._connected().put(name, data))

        await self._threads.do(call)

    async def get(self, name: str) -> memoryview:
        def call() -> memoryview:
            store = self._connected()
            found = store.get_buffer(name)
            if found is not None:
                return memoryview(found).cast("B")
            if store.is_exist(name) == 0:
                raise FileNotFoundError(name)
            raise OSError("Mooncake Store did not give the object")

        return await self._threads.do(call)

    async def delete(self, name: str) -> None:
        def call() -> None:
            # By force: otherwise what was read lately could not be removed.
            code = self._connected().remove(name, True)
            if code != _NOT_FOUND:
                _check("remove", code)

        await self._threads.do(call)

    async def delete_all(self, prefix: str) -> None:
        pattern = "^" + "".join(c if c.isalnum() or c == "/" else f"[{c}]" for c in prefix)

        def call() -> None:
            _check("remove_by_regex", min(0, self._connected().remove_by_regex(pattern, True)))

        await self._threads.do(call)

    async def objects(self, prefix: str) -> AsyncIterator[Sequence[Listed]]:
        def call() -> list[Listed]:
            found: list[Listed] = []
            with urllib.request.urlopen(self._names_at, timeout=_HTTP_S) as answer:
                for line in answer:
                    name = line.decode(errors="replace").rstrip("\r\n")
                    if name.startswith(prefix):
                        found.append((name, 0))
                        if len(found) >= MAX_LISTED:
                            log.warning("more than %d objects in %s", MAX_LISTED, prefix)
                            break
            return found

        found = await self._threads.do(call)
        for at in range(0, len(found), _NAMES_AT_ONCE):
            yield found[at : at + _NAMES_AT_ONCE]

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._threads.do(store.close)
            except TimeoutError:
                log.warning("Mooncake Store does not end; it is left as it is")
        self._threads.close()


def _check(what: str, code: int) -> None:
    if code != 0:
        raise OSError(f"Mooncake Store: {what} failed with {code}")


def _address_towards(host: str, port: int) -> str:
    """The address of this machine from which another is reached; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
