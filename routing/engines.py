"""The engines behind the router: whether they answer, what they serve, and their event streams.

Owns: health checks, the models of each engine, /tokenize, and who is taken for down. Must not know:
clients' requests, or how one is chosen.

An engine is up when `GET /health` and `GET /v1/models` answer 200. It is down after so many failed
checks in a row, or at once when a connection is refused. What an engine held that was down is
forgotten, since it may be another process; its events, replayed, say what it holds now.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec
import xxhash
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.routing.core.kv_events import EngineEvents
from kvcast.routing.core.router import Router
from kvcast.routing.event_streams import EventStream
from kvcast.routing.options import EngineAddress, HealthOptions
from kvcast.routing.prompts import Names
from kvcast.service.tls import Credentials

log = logging.getLogger("kvcast.routing.engines")

MAX_ANSWER_BYTES: Final = 64 << 20
"""Of an engine to a question of ours: a long prompt's token ids are some bytes each."""
MAX_TOKENIZING: Final = 32
"""Questions at once; beyond, a prompt is named by its text."""
UNANSWERED: Final = (TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError)
"""What comes of asking somebody who is not there, is slow, or answers nonsense."""
_MAX_MODELS: Final = 1024
_KEEP_ALIVE_S: Final = 3.0
"""Idle connections are kept for less than engines keep them (uvicorn: 5 s): a POST on one that its
engine is closing is lost, and nobody knows how far it came."""
POOL_KEY_BYTES: Final = 16


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


@dataclass(slots=True)
class _Engine:
    address: EngineAddress
    models: dict[str, str | None]
    """Name -> the model that it is an adapter of, or None."""
    stream: EventStream | None = None
    failures: int = 0
    problem: str = "not asked yet"
    base: str = ""


class Engines:
    """Looks after engines between `start` and `close`, and tells the router of them."""

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        router: Router,
        options: HealthOptions,
        credentials: Credentials | None = None,
    ) -> None:
        self._credentials = credentials
        self._router = router
        self._options = options
        self._engines = {each.name: _Engine(each, {}) for each in addresses}
        for each in addresses:
            router.add_engine(each.name, each.slots or None)
            router.set_up(each.name, False)
        self._tokenizing = 0
        self._turn = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._pool_keys: BoundedMap[int, bytes] = BoundedMap(router.options.max_blocks)
        self.session: aiohttp.ClientSession
        self.checked = asyncio.Event()
        """Set when every engine was asked once."""
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Begin to ask. Certificates of https engines are checked against the system's roots."""
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_KEEP_ALIVE_S)
        self.session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._options.timeout_s),
        )
        firsts = [asyncio.Event() for _ in self._engines]
        for engine, first in zip(self._engines.values(), firsts, strict=True):
            self._tasks.append(asyncio.create_task(self._look_after(engine, first)))
        self._tasks.append(asyncio.create_task(self._all_asked(firsts)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self._engines.values():
            if engine.stream is not None:
                await engine.stream.close()
        await self.session.close()

    # --- what is known --------------------------------------------------------------------------

    def address(self, name: str) -> EngineAddress:
        return self._engines[name].address

    def models(self) -> dict[str, str | None]:
        """What any engine that is up serves, with what it is an adapter of."""
        found: dict[str, str | None] = {}
        for engine in self._up():
            found.update(engine.models)
        return found

    def without(self, model: str) -> set[str]:
        """The engines that do not serve a model."""
        return {name for name, each in self._engines.items() if model not in each.models}

    def names_of(self, model: str) -> Names:
        """How this model's prompts are named."""
        parent = self.models().get(model)
        base = parent or model
        block_tokens = self._options.block_tokens
        for engine in self._up():
            if model in engine.models and engine.stream is not None:
                block_tokens = engine.stream.events.block_tokens or block_tokens
                break
        return Names(block_tokens, model if parent else None, self._seed(base))

    def pool_key(self, block: int) -> bytes | None:
        """The pool's key of a block, if an engine has said its whole hash."""
        return self._pool_keys.get(block)

    def describe(self) -> list[dict[str, Any]]:
        """Every engine, for people."""
        found = []
        for name, engine in self._engines.items():
            load = self._router.load_of(name)
            found.append(
                {
                    "name": name,
                    "url": engine.address.url,
                    "up": self._router.is_up(name),
                    "problem": engine.problem,
                    "models": sorted(engine.models),
                    "queued": load.queued,
                    "decoding": load.decoding,
                    "pace": round(load.pace, 3),
                    "blocks_known": 0 if engine.stream is None else len(engine.stream.events),
                    "events": {} if engine.stream is None else dict(engine.stream.events.counts),
                }
            )
        return found

    async def tokenize(self, question: dict[str, Any]) -> Sequence[int] | None:
        """Ask one of the model's engines, in turn; None if it does not answer in time."""
        able = [each for each in self._up() if question.get("model") in each.models]
        if not able or self._tokenizing >= MAX_TOKENIZING:
            return None
        self._turn += 1
        engine = able[self._turn % len(able)]
        self._tokenizing += 1
        try:
            async with asyncio.timeout(self._options.tokenize_timeout_s):
                async with self.session.post(
                    f"{engine.address.url}/tokenize", json=question
                ) as answer:
                    if answer.status != 200:
                        return None
                    body = await _bounded(answer)
            return msgspec.json.decode(body, type=_Tokens).tokens
        except UNANSWERED:
            return None
        finally:
            self._tokenizing -= 1

    def agents_tls(self) -> ssl.SSLContext | bool:
        """How agents are spoken to: as parts of the cluster, where this is one."""
        return True if self._credentials is None else self._credentials.client()

    def failed(self, name: str, problem: str, *, refused: bool) -> None:
        """An engine did not answer a request; `refused`: nobody was there at all."""
        engine = self._engines[name]
        engine.failures += 1
        if refused or engine.failures >= self._options.failures:
            self._down(engine, problem)

    # --- health ---------------------------------------------------------------------------------

    def _up(self) -> list[_Engine]:
        return [each for name, each in self._engines.items() if self._router.is_up(name)]

    def _seed(self, base: str) -> int:
        return xxhash.xxh3_64_intdigest(base.encode(errors="surrogatepass"), self._options.seed)

    async def _all_asked(self, firsts: Sequence[asyncio.Event]) -> None:
        for first in firsts:
            await first.wait()
        self.checked.set()

    async def _look_after(self, engine: _Engine, first: asyncio.Event) -> None:
        while True:
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    await self._get(engine, "/health")
                    models = msgspec.json.decode(
                        await self._get(engine, "/v1/models"), type=_Models
                    )
                await self._answered(engine, models)
            except UNANSWERED as error:
                problem = str(error) or type(error).__name__
                refused = isinstance(error, aiohttp.ClientConnectorError)
                self.failed(engine.address.name, problem, refused=refused)
            finally:
                first.set()
            await asyncio.sleep(self._options.interval_s)

    async def _get(self, engine: _Engine, path: str) -> bytes:
        async with self.session.get(engine.address.url + path) as answer:
            body = await _bounded(answer)
            if answer.status != 200:
                raise ValueError(f"GET {path}: {answer.status}")
            return body

    async def _answered(self, engine: _Engine, models: _Models) -> None:
        found = {each.id: each.parent for each in models.data[:_MAX_MODELS]}
        bases = [name for name, parent in found.items() if parent is None]
        if not bases:
            raise ValueError("GET /v1/models: it serves none")
        engine.failures = 0
        engine.models = found
        name = engine.address.name
        if engine.base != bases[0]:
            engine.base = bases[0]
            await self._listen(engine)
        if not self._router.is_up(name):
            log.info("engine %s is up", name)
            self._router.set_up(name, True)
        engine.problem = ""

    async def _listen(self, engine: _Engine) -> None:
        """Follow its events, in the names of the model that it serves now."""
        if engine.stream is not None:
            await engine.stream.close()
            engine.stream = None
        self._router.cleared(engine.address.name)
        if engine.address.events is None:
            return
        events = EngineEvents(
            self._router,
            engine.address.name,
            seed=self._seed(engine.base),
            pool_keys=self._keep_key,
        )
        engine.stream = EventStream(events, engine.address.events, engine.address.replay)
        await engine.stream.start()

    def _keep_key(self, ours: int, theirs: bytes) -> None:
        if len(theirs) >= POOL_KEY_BYTES:
            self._pool_keys[ours] = theirs[:POOL_KEY_BYTES]

    def _down(self, engine: _Engine, problem: str) -> None:
        name = engine.address.name
        engine.problem = problem
        if not self._router.is_up(name):
            return
        log.warning("engine %s is down: %s", name, problem)
        self.counts["engines_down_total"] += 1
        self._router.set_up(name, False)
        if engine.stream is not None:
            engine.stream.events.restarted()
        else:
            self._router.cleared(name)


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    """An answer's body; ValueError if it is too long."""
    body = bytearray()
    async for piece in answer.content.iter_chunked(1 << 16):
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError("an answer that is too long")
    return bytes(body)
