"""The proxy: OpenAI's requests in, to the engine that the router says, and its answer back.

Owns: routes, bodies, retries, streams, errors as OpenAI's clients expect them. Must not know: how
an engine is chosen (`core.router`), or how it is found to be up (`engines`).

| request | answer |
|---|---|
| POST /v1/completions, /v1/chat/completions | the engine's, as it comes |
| GET /v1/models | what the engines that are up serve |
| GET /healthz | 200 while an engine is up, else 503 |
| GET /v1/route/status | engines, loads, the index |
| GET /metrics | Prometheus text |

An answer has begun when the first byte of its body has come from the engine; until then nothing
was sent to the client, and a request whose engine refused, failed (500, 502, 503, 504, or 429: it
is full) or went away is sent to another one, at most `tries` times in all. From then on never: a
stream whose engine dies ends in an error event and without `[DONE]`, any other answer in a broken
connection. A client that goes away takes its request with it. Headers go through, but for those of
a connection; `X-Request-Id` is made where the client gave none. With `X-Kvcast-Deadline-Ms` a
request that cannot have its first token so soon is refused at once: 429 and `Retry-After` if that
may change, 503 if not. Every refusal has a reason (`error.code`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Mapping
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web
from kvcast.routing.core.router import Choice, Prompt, Reason, Refusal, Router
from kvcast.routing.engines import Engines
from kvcast.routing.metrics import metrics_text
from kvcast.routing.options import ProxyOptions
from kvcast.routing.prefetches import Prefetches
from kvcast.routing.prompts import PromptError, Prompts, body_of
from kvcast.service.http_connections import HttpConnections
from kvcast.service.listener import Bounds
from kvcast.service.tls import Credentials
from multidict import CIMultiDict, CIMultiDictProxy

log = logging.getLogger("kvcast.routing.proxy")

GENERATES: Final = ("/v1/completions", "/v1/chat/completions")
DEADLINE_HEADER: Final = "X-Kvcast-Deadline-Ms"
ENGINE_HEADER: Final = "X-Kvcast-Engine"
_RETRIED: Final = frozenset({429, 500, 502, 503, 504})
_PIECE_BYTES: Final = 1 << 16
_KEEP_ALIVE_S: Final = 75.0
_OF_A_CONNECTION: Final = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        DEADLINE_HEADER.lower(),
    }
)


class RefusedError(Exception):
    """An error for the client, in OpenAI's form."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class _EngineFailedError(Exception):
    """An engine did not begin an answer; another one may."""

    def __init__(self, problem: str, *, refused: bool = False, status: int = 0) -> None:
        super().__init__(problem)
        self.refused = refused
        """Nobody was there."""
        self.status = status
        """What it answered; 0 = nothing."""


class Proxy:
    """Serves between `start` and `stop`."""

    def __init__(
        self,
        router: Router,
        engines: Engines,
        options: ProxyOptions,
        credentials: Credentials | None = None,
        *,
        tokenizes: bool = True,
    ) -> None:
        self._router = router
        self._engines = engines
        self._options = options
        self.prompts = Prompts(engines.tokenize if tokenizes else None)
        self.prefetches = Prefetches(router, engines)
        self.counts: Counter[str] = Counter()
        self._requests = 0
        self._connections = HttpConnections(
            Bounds(options.max_connections, options.max_connections_per_address),
            credentials,
            certificate_required=False,
            first_request_timeout_s=options.first_request_timeout_s,
            count=self._count,
        )

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the port that was picked for 0."""
        server = web.Server(
            self._answer,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_S,
        )
        return await self._connections.start(server, host, port, shutdown_timeout_s=5.0)

    async def stop(self) -> None:
        """Close the listener, and after some seconds every connection."""
        await self._connections.stop()
        await self.prefetches.close()

    def _count(self, name: str) -> None:
        self.counts[f"{name}_total"] += 1

    def _request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        most = self._options.max_body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=most)

    # --- routes ----------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.counts["requests_total"] += 1
        self._connections.heard(request)
        try:
            answer = await self._routed(request)
        except RefusedError as error:
            answer = _error(error)
            self.counts[f"refused_{error.code}_total"] += 1
        except ConnectionError:
            self.counts["clients_gone_total"] += 1
            raise
        except asyncio.CancelledError:
            self.counts["clients_gone_total"] += 1
            raise
        self.counts[f"answers_{answer.status}_total"] += 1
        return answer

    async def _routed(self, request: web.BaseRequest) -> web.StreamResponse:
        path, method = request.path, request.method
        if path in GENERATES:
            _only(method, "POST")
            return await self._generate(request)
        if path == "/v1/models":
            _only(method, "GET")
            return _json({"object": "list", "data": self._models()})
        if path in ("/healthz", "/health"):
            _only(method, "GET")
            if not any(self._router.is_up(name) for name in self._router.engines):
                raise RefusedError(503, "no_engine", "no engine is up")
            return _json({"ok": True})
        if path == "/v1/route/status":
            _only(method, "GET")
            return _json(self.status())
        if path == "/metrics":
            _only(method, "GET")
            text, kind = metrics_text(self._router, self._engines, self._numbers())
            return web.Response(body=text, headers={"Content-Type": kind})
        raise RefusedError(404, "not_found", f"there is no {path}")

    def _models(self) -> list[dict[str, Any]]:
        return [
            {"id": name, "object": "model", "owned_by": "kvcast", "parent": parent}
            for name, parent in sorted(self._engines.models().items())
        ]

    def status(self) -> dict[str, Any]:
        """What the router knows, for people."""
        index = self._router.index
        return {
            "engines": self._engines.describe(),
            "index": {
                "blocks": len(index),
                "expected": index.expected,
                "forgotten_total": index.forgotten_total,
            },
            "counts": self._numbers(),
        }

    def _numbers(self) -> dict[str, int]:
        numbers = Counter(self.counts)
        for each in (self.prompts.counts, self.prefetches.counts, self._engines.counts):
            numbers.update(each)
        return dict(sorted(numbers.items()))

    # --- a request -------------------------------------------------------------------------------

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._is_full():
            raise RefusedError(
                429, "too_many_requests", "too many requests at once", _retry_after(1)
            )
        self._requests += 1
        begun = asyncio.get_running_loop().time()
        try:
            raw, body = await self._read(request)
            deadline_s = _deadline(request, self._options.deadline_s)
            model = body.get("model")
            if not isinstance(model, str):
                raise RefusedError(400, "no_model", "model must be a text")
            if model not in self._engines.models():
                if not self._engines.models():
                    raise RefusedError(503, "no_engine", "no engine is up", _retry_after(1))
                raise RefusedError(404, "model_not_found", f"no engine serves {model[:200]!r}")
            try:
                prompt = await self.prompts.named(body, self._engines.names_of(model))
            except PromptError as error:
                raise RefusedError(400, "bad_prompt", str(error)) from error
            streams = body.get("stream") is True
            return await self._send(request, raw, model, prompt, streams, begun, deadline_s)
        finally:
            self._requests -= 1

    def _is_full(self) -> bool:
        return self._requests >= self._options.max_requests

    async def _read(self, request: web.BaseRequest) -> tuple[bytes, dict[str, Any]]:
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                expects = request.headers.get("Expect", "").lower()
                if expects == "100-continue" and request.version >= aiohttp.HttpVersion11:
                    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    request.writer.output_size = 0  # the answer itself has not begun
                raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise RefusedError(413, "too_large", "the request is too large") from error
        except TimeoutError as error:
            raise RefusedError(408, "too_slow", "the request took too long to come") from error
        try:
            return raw, body_of(raw)
        except PromptError as error:
            raise RefusedError(400, "bad_json", str(error)) from error

    async def _send(
        self,
        request: web.BaseRequest,
        raw: bytes,
        model: str,
        prompt: Prompt,
        streams: bool,
        begun: float,
        deadline_s: float,
    ) -> web.StreamResponse:
        """Try engines until one begins to answer."""
        loop = asyncio.get_running_loop()
        failed: dict[str, _EngineFailedError] = {}
        last: _EngineFailedError | None = None
        for number in range(self._options.tries):
            now = loop.time()
            name = f"{secrets.token_hex(8)}"
            choice = self._router.route(
                name,
                prompt,
                now,
                deadline_s=deadline_s - (now - begun),
                without=failed.keys() | self._engines.without(model),
            )
            if isinstance(choice, Refusal):
                if last is not None:
                    break
                raise _refused(choice)
            self.counts["routed_total"] += 1
            self.counts["prompt_tokens_total"] += prompt.tokens
            self.counts["engine_tokens_total"] += choice.estimate.engine_tokens
            self.counts["pool_tokens_total"] += choice.estimate.pool_tokens
            if number:
                self.counts["retries_total"] += 1
            attempt = _Attempt(self._router, name, choice, streams)
            try:
                self.prefetches.send(choice, prompt)
                answer = await self._forward(request, raw, attempt)
                for engine, problem in failed.items():
                    if problem.status == 500:  # so it is not the request that is to blame
                        self._engines.failed(engine, str(problem), refused=False)
                return answer
            except _EngineFailedError as error:
                last = failed[choice.engine] = error
                self.counts["engine_failures_total"] += 1
                log.info("engine %s failed a request: %s", choice.engine, error)
                # 429 says that it is busy, not that it is ill; 500 may be the request's fault.
                if error.status not in (429, 500):
                    self._engines.failed(choice.engine, str(error), refused=error.refused)
            finally:
                attempt.end()
        assert last is not None
        status = last.status if last.status in (429, 503) else 502
        raise RefusedError(status, "engine_failed", f"no engine answered: {last}", _retry_after(1))

    async def _forward(
        self, request: web.BaseRequest, raw: bytes, attempt: _Attempt
    ) -> web.StreamResponse:
        """Send it, and pass the answer on; _EngineFailedError while nothing of it was passed on."""
        options = self._options
        headers = _end_to_end(request.headers)
        headers.popall("Content-Encoding", None)  # it was unpacked
        headers.setdefault("X-Request-Id", attempt.name)
        url = self._engines.address(attempt.choice.engine).url + request.path_qs
        try:
            async with asyncio.timeout(options.first_byte_timeout_s):
                answer = await self._engines.session.post(
                    url, data=raw, headers=headers, allow_redirects=False
                )
        except aiohttp.ClientConnectorError as error:
            raise _EngineFailedError(str(error), refused=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _EngineFailedError(str(error) or type(error).__name__) from error
        try:
            if answer.status in _RETRIED:
                raise _EngineFailedError(f"it answered {answer.status}", status=answer.status)
            try:
                async with asyncio.timeout(options.first_byte_timeout_s):
                    first = await answer.content.read(_PIECE_BYTES)
            except (aiohttp.ClientError, OSError) as error:
                raise _EngineFailedError(str(error) or type(error).__name__) from error
            if not first and attempt.streams:
                raise _EngineFailedError("it ended a stream before it began")
            attempt.answer_began(200 <= answer.status < 300)
            return await self._pass_on(request, answer, first, attempt)
        finally:
            # What is left unread would keep the engine at work; a whole answer's connection is
            # used again.
            answer.release() if answer.content.at_eof() else answer.close()

    async def _pass_on(
        self,
        request: web.BaseRequest,
        answer: aiohttp.ClientResponse,
        first: bytes,
        attempt: _Attempt,
    ) -> web.StreamResponse:
        out = web.StreamResponse(status=answer.status, reason=answer.reason)
        out.headers.extend(_end_to_end(answer.headers))
        out.headers[ENGINE_HEADER] = attempt.choice.engine
        if answer.content_length is not None:
            out.content_length = answer.content_length
        await out.prepare(request)
        piece = first
        while piece:
            await self._written(request, out.write(piece))
            try:
                async with asyncio.timeout(self._options.idle_timeout_s):
                    piece = await answer.content.readany()
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
                await self._broke_off(request, out, answer, attempt, error)
                return out
        await self._written(request, out.write_eof())
        return out

    async def _written(self, request: web.BaseRequest, writing: Awaitable[None]) -> None:
        """Write to a client, which must read before long."""
        try:
            async with asyncio.timeout(self._options.idle_timeout_s):
                await writing
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()  # to close it would wait for what it does not read
            raise ConnectionResetError("the client does not read") from error

    async def _broke_off(
        self,
        request: web.BaseRequest,
        out: web.StreamResponse,
        answer: aiohttp.ClientResponse,
        attempt: _Attempt,
        error: Exception,
    ) -> None:
        """The engine went away in the middle: say so as far as that can be said."""
        self.counts["answers_broken_off_total"] += 1
        problem = str(error) or type(error).__name__
        self._engines.failed(attempt.choice.engine, problem, refused=False)
        if answer.content_type == "text/event-stream":
            event = _body("engine_failed", "the engine broke off its answer", "server_error")
            said = b"\n\ndata: " + json.dumps(event).encode() + b"\n\n"
            await self._written(request, out.write(said))
            await self._written(request, out.write_eof())
        elif request.transport is not None:
            request.transport.abort()


class _Attempt:
    """One engine's try at a request, as the router is to hear of it.

    An answer that is not streamed begins when it ends; until then its engine is taken to compute it
    for as long as was estimated, and to decode from then on.
    """

    def __init__(self, router: Router, name: str, choice: Choice, streams: bool) -> None:
        self.name = name
        self.choice = choice
        self._router = router
        self._loop = asyncio.get_running_loop()
        self.streams = streams
        self._computed = False
        self._timer: asyncio.TimerHandle | None = None
        if not streams:
            self._timer = self._loop.call_later(choice.estimate.ttft_s, self._taken_for_begun)

    def answer_began(self, well: bool) -> None:
        """The first byte came; `well`: it is no error."""
        self._computed = well
        if well and self.streams:
            self._router.first_token(self.name, self._loop.time())

    def _taken_for_begun(self) -> None:
        self._router.first_token(self.name, self._loop.time(), seen=False)

    def end(self) -> None:
        """It is over, whichever way."""
        if self._timer is not None:
            self._timer.cancel()
        self._router.ended(self.name, self._loop.time(), computed=self._computed)


# --- small things ---------------------------------------------------------------------------------


def _only(method: str, allowed: str) -> None:
    if method != allowed:
        raise RefusedError(405, "method_not_allowed", f"only {allowed}", {"Allow": allowed})


def _end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Those that are not for one connection alone; `Connection` may name more (RFC 9110, 7.6.1)."""
    named = ",".join(headers.getall("Connection", ())).split(",")
    left_out = _OF_A_CONNECTION.union(name.strip().lower() for name in named)
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in left_out
    )


def _deadline(request: web.BaseRequest, default_s: float) -> float:
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return default_s
    try:
        deadline_s = float(text) / 1000
    except ValueError:
        deadline_s = math.nan
    if not 0 < deadline_s < math.inf:
        raise RefusedError(400, "bad_deadline", f"{DEADLINE_HEADER} must be milliseconds above 0")
    return deadline_s


def _retry_after(wait_s: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(min(wait_s, 3600))))}


def _refused(refusal: Refusal) -> RefusedError:
    reason = refusal.reason
    status = 503 if reason in (Reason.NO_ENGINE, Reason.TOO_LONG) else 429
    headers = {} if reason is Reason.TOO_LONG else _retry_after(refusal.retry_after_s)
    return RefusedError(status, reason.name.lower(), reason.value, headers)


def _body(code: str, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _error(error: RefusedError) -> web.Response:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    answer = _json(_body(error.code, str(error), kind), error.status)
    answer.headers.update(error.headers)
    return answer


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )
