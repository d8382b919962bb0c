"""A fake engine: OpenAI's API without a model, slow, failing or dying as a test says; and a
publisher of KV events in vLLM's form.

It answers `say` words, one a chunk. Its tokenizer gives each byte of the prompt's text as a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web
from multidict import CIMultiDict


@dataclass
class Behaviour:
    """What the fake engine does with a request."""

    status: int = 200
    delay_s: float = 0.0
    """Before anything is answered."""
    word_delay_s: float = 0.0
    goes_on: asyncio.Event | None = None
    """Waited for before the second word."""
    dies_before_headers: bool = False
    dies_before_first_word: bool = False
    dies_after_words: int | None = None
    stops_after_words: int | None = None
    """Sends nothing more then, and stays."""
    say: tuple[str, ...] = ("one", "two", "three")
    healthy: bool = True
    tokenizes: bool = True
    tokenize_delay_s: float = 0.0


@dataclass
class FakeEngine:
    """`async with FakeEngine("name")`: it serves at `url`."""

    name: str
    models: dict[str, str | None] = field(default_factory=lambda: {"m": None})
    behaviour: Behaviour = field(default_factory=Behaviour)
    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[CIMultiDict[str]] = field(default_factory=list)
    tokenized: int = 0
    finished: int = 0
    abandoned: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeEngine:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.behaviour.healthy else 500)

    async def _models(self, _request: web.Request) -> web.Response:
        data = [{"id": name, "parent": parent} for name, parent in self.models.items()]
        return web.json_response({"object": "list", "data": data})

    async def _tokenize(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.behaviour.tokenize_delay_s)
        if not self.behaviour.tokenizes:
            raise web.HTTPNotFound
        self.tokenized += 1
        tokens = tokens_of(await request.json())
        return web.json_response({"count": len(tokens), "tokens": tokens})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers.copy())
        done = False
        try:
            answer = await self._answer(request, body)
            done = True
            return answer
        finally:
            self.finished += done
            self.abandoned += not done

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        how = self.behaviour
        await asyncio.sleep(how.delay_s)
        assert request.transport is not None
        if how.dies_before_headers:
            request.transport.abort()
            raise ConnectionResetError
        if how.status != 200:
            return web.json_response({"error": {"message": "so it is"}}, status=how.status)
        if not body.get("stream"):
            said = " ".join(how.say)
            choices = [{"index": 0, "text": said}]
            return web.json_response({"engine": self.name, "text": said, "choices": choices})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number, word in enumerate(how.say):
            dies = how.dies_before_first_word and number == 0
            if dies or number == how.dies_after_words:
                await asyncio.sleep(0.05)  # what was written before is on its way
                request.transport.abort()
                raise ConnectionResetError
            if number == how.stops_after_words:
                await asyncio.sleep(3600)
            await asyncio.sleep(how.word_delay_s)
            if how.goes_on is not None and number == 1:
                await how.goes_on.wait()
            event = {"word": word, "choices": [{"delta": {"content": word}}]}
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


def tokens_of(body: dict[str, Any]) -> list[int]:
    """What the fake tokenizer makes of a request."""
    if "messages" in body:
        text = "".join(f"<{each['role']}>{each['content']}" for each in body["messages"])
    else:
        text = body["prompt"]
    return list(text.encode())


class FakePublisher:
    """KV events as vLLM publishes them: PUB, and a ROUTER that replays; `publish` sends a batch.

    Batches are packed like vLLM's structs, as arrays or as maps (`as_maps`).
    """

    def __init__(self, *, as_maps: bool = False, kept: int = 1000) -> None:
        self._as_maps = as_maps
        self._kept = kept
        self.sent: list[tuple[int, bytes]] = []
        self.next = 0
        self.replays = 0
        self._context = zmq.asyncio.Context()

    async def start(self, endpoint: str, replay: str) -> None:
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(replay)
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        """`lost`: subscribers do not get it; it can be replayed all the same."""
        shown = [each if self._as_maps else _as_array(each) for each in events]
        batch = {"ts": 1.0, "events": shown} if self._as_maps else [1.0, shown, 0]
        payload = msgspec.msgpack.encode(batch)
        number = self.next
        self.next += 1
        self.sent = [*self.sent, (number, payload)][-self._kept :]
        if not lost:
            await self._pub.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def _serve(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            self.replays += 1
            for number, payload in self.sent:
                if number >= int.from_bytes(first, "big"):
                    frames = [client, b"", number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            await self._router.send_multipart([client, b"", end, b""])


def stored(
    hashes: list[int | bytes],
    tokens: list[int],
    *,
    parent: int | bytes | None = None,
    medium: str | None = "GPU",
    lora: str | None = None,
    extra: list[Any] | None = None,
) -> dict[str, Any]:
    """A BlockStored; a block's tokens are what is its share of them."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens) // len(hashes),
        "lora_id": None,
        "medium": medium,
        "lora_name": lora,
        "extra_keys": extra,
    }


def removed(hashes: list[int | bytes], medium: str | None = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def _as_array(event: dict[str, Any]) -> list[Any]:
    return list(event.values())


@contextlib.asynccontextmanager
async def fake_engines(*names: str, **fields: Any) -> AsyncIterator[list[FakeEngine]]:
    """Several, running."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeEngine(name, **fields)) for name in names]
