"""The controller's HTTP API: health, status, reasons, metrics, pins.

Owns: routes, who may use them, bodies, status codes, bounds on what a client may send. Must not
know: how anything is done; it asks a `Service`. Answers are JSON objects; an error is
`{"error": "why"}`.

| request | role | answer |
|---|---|---|
| GET /healthz | nobody | 200 `{"ok": true}` while the control loop runs; 503 with why otherwise |
| GET /v1/status | viewer | the pool, the switch's counters, the controller (see docs) |
| GET /v1/decisions | viewer | the last admissions, evictions and refusals, newest first |
| GET /metrics | viewer | Prometheus text |
| POST /v1/pin `{"namespace": n, "key": hex}` | operator | 200 resident; 409, 404 or 503 with why |
| DELETE /v1/pin, the same body | operator | 200; 404 if it was not pinned |

Where it authenticates (`HttpOptions.authenticated`), a client has a role by its token
(`Authorization: Bearer …`) or by an operator's certificate. 401: no role; 403: not this one; 429:
too many requests, or too many failed authentications at once. What a client gets wrong is said
back to it; a token is never said, logged or counted by name.

Everything is counted (`counts`): connections, and those not let in; `requests`, and `malformed` for
what is no HTTP and the library answers by itself; and for both the answers by status
(`answers_200`), or `undelivered` where the client had gone; `authentications_failed`, of them
`authentications_slowed`; `rate_limited`.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol
from weakref import WeakSet

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError
from kvcast.controller.http.limits import Failures, RateLimit, client_of
from kvcast.controller.http.metrics import CONTENT_TYPE
from kvcast.controller.http.tokens import OPERATOR, VIEWER, TokensFile
from kvcast.protocol.messages.wire import BlockId
from kvcast.service.identity import OPERATOR as OPERATOR_CERTIFICATE
from kvcast.service.identity import IdentityError, identity_of
from kvcast.service.listener import Bounds, Listener
from kvcast.service.tls import Credentials
from msgspec import Meta

log = logging.getLogger("kvcast.controller.http")

MAX_BODY_BYTES = 16 * 1024
REQUEST_TIMEOUT_S = 15.0
MAX_CONCURRENT = 64
MAX_CONNECTIONS = 256
"""Open connections, idle ones included."""
FIRST_REQUEST_TIMEOUT_S = 15.0
"""A connection that has made no request by then is closed; later ones have 30 s each."""
MAX_CONNECTIONS_PER_ADDRESS = 64
"""Of them, from one address beyond loopback."""
MAX_SLOWED = 32
"""Answers to failed authentications that are held back at once; beyond, 429 at once."""
_SCHEME = "bearer "
_MAX_TOKEN_CHARS = 256


@dataclass(frozen=True)
class HttpOptions:
    """Who may use the API. `client_certificates`: nobody without a certificate of the cluster,
    token or not; `rate_per_s`: requests a second a client, 0 = no limit."""

    tokens: TokensFile | None = None
    client_certificates: bool = False
    authenticated: bool = False
    rate_per_s: float = 0.0


class PinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of both pin requests. `key`: as /v1/status shows it, or, with `engine_key`, as the
    engine has it (the two differ where the namespace has a secret); `wait_s`: how long POST may
    wait
    for the block."""

    namespace: Annotated[int, Meta(ge=1, le=0xFFFF)]
    key: Annotated[str, Meta(pattern="^[0-9a-fA-F]{32}$")]
    wait_s: Annotated[float, Meta(ge=0, le=10)] = 5.0
    engine_key: bool = False

    @property
    def block(self) -> BlockId:
        return BlockId(self.namespace, bytes.fromhex(self.key))


class ApiError(Exception):
    """An error for the client: an HTTP status and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Service(Protocol):
    """What the API needs of the controller."""

    def health(self) -> str | None:
        """Why the controller is not well; None if it is."""

    def status(self) -> dict[str, Any]: ...

    def decisions(self) -> list[dict[str, Any]]: ...

    def metrics(self) -> bytes: ...

    def derived(self, block: BlockId) -> BlockId:
        """An engine's block as the pool knows it."""

    async def pin(self, block: BlockId, wait_s: float) -> dict[str, Any]:
        """Pin and wait until the switch holds the entries; ApiError."""

    def unpin(self, block: BlockId) -> bool: ...


Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


class _Answer(web.Response):
    """An answer of ours; others come from the HTTP library itself."""


class HttpApi:
    """Serves a `Service`."""

    def __init__(
        self,
        service: Service,
        options: HttpOptions | None = None,
        credentials: Credentials | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.options = options = options or HttpOptions()
        self._service = service
        self._routes: dict[str, tuple[str, dict[str, Handler]]] = {
            "/healthz": ("", {"GET": self._healthz, "HEAD": self._healthz}),
            "/v1/status": (VIEWER, {"GET": self._status, "HEAD": self._status}),
            "/v1/decisions": (VIEWER, {"GET": self._decisions, "HEAD": self._decisions}),
            "/metrics": (VIEWER, {"GET": self._metrics, "HEAD": self._metrics}),
            "/v1/pin": (OPERATOR, {"POST": self._pin, "DELETE": self._unpin}),
        }
        self._rate = RateLimit(options.rate_per_s)
        self._failures = Failures()
        self._sleep = sleep
        self._slowed = 0
        self._spoken: WeakSet[asyncio.BaseTransport] = WeakSet()
        """Connections on which a request was made."""
        self._runner: web.ServerRunner | None = None
        self._busy = 0
        self._listener = Listener(
            self._connected,
            Bounds(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS),
            credentials,
            certificate_required=options.client_certificates,
            count=self._count,
        )

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the port that was picked for 0."""
        server = web.Server(
            self._bounded,
            request_factory=_request,
            access_log_class=self._answer_counter(),
            logger=self._quiet_logger(),
            keepalive_timeout=30.0,
        )
        self._runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        return await self._listener.start(host, port)

    async def stop(self) -> None:
        """Close the listener and every connection."""
        await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _count(self, name: str) -> None:
        self.counts[name] += 1

    def _connected(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        protocol = server()
        asyncio.get_running_loop().call_later(FIRST_REQUEST_TIMEOUT_S, self._must_speak, protocol)
        return protocol

    def _must_speak(self, protocol: web.RequestHandler) -> None:
        """Close a connection that has asked for nothing, or for half of something."""
        transport = protocol.transport
        if transport is not None and transport not in self._spoken:
            self.counts["connections_silent"] += 1
            transport.abort()

    def _answer_counter(self) -> type[AbstractAccessLogger]:
        """What aiohttp calls behind every answer, also those that it makes itself."""
        counts = self.counts

        class AnswerCounter(AbstractAccessLogger):
            def log(
                self, request: web.BaseRequest, response: web.StreamResponse, time: float
            ) -> None:
                if not isinstance(response, _Answer):
                    counts["malformed"] += 1
                transport = request.transport
                gone = transport is None or transport.is_closing()
                counts["undelivered" if gone else f"answers_{response.status}"] += 1

        return AnswerCounter

    def _quiet_logger(self) -> logging.Logger:
        """aiohttp's log of its own, but for what is no HTTP: that is counted, and not written line
        by line, since whoever sends it could fill a disk with it."""
        logger = logging.getLogger("kvcast.controller.http.server")

        def keep(record: logging.LogRecord) -> bool:
            error = record.exc_info[1] if record.exc_info else None
            return not isinstance(error, HttpProcessingError)

        logger.filters[:] = [keep]
        return logger

    async def _bounded(self, request: web.BaseRequest) -> web.Response:
        """Bounds and errors of every request."""
        self.counts["requests"] += 1
        if request.transport is not None:
            self._spoken.add(request.transport)
        client = _client(request)
        wait_s = self._rate.wait_s(client, time.monotonic())
        if wait_s:
            self.counts["rate_limited"] += 1
            return _too_many("too many requests", wait_s)
        try:
            handler, role = self._route(request)
            if role and self.options.authenticated:
                refusal = await self._refusal(request, client, role)
                if refusal is not None:
                    return refusal
        except ApiError as error:
            self.counts[f"errors_{error.status}"] += 1
            return _error(error.status, str(error))
        if self._busy >= MAX_CONCURRENT:
            self.counts["requests_at_bound"] += 1
            return _error(503, f"more than {MAX_CONCURRENT} requests at once")
        self._busy += 1
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await handler(request)
        except ApiError as error:
            self.counts[f"errors_{error.status}"] += 1
            return _error(error.status, str(error))
        except web.HTTPException as error:
            self.counts[f"errors_{error.status}"] += 1
            return _error(error.status, error.reason)
        except TimeoutError:
            self.counts["errors_408"] += 1
            return _error(408, "the request took too long")
        except ConnectionResetError:  # the client left in the middle of its body; nobody hears us
            self.counts["disconnects"] += 1
            return _error(400, "the connection was closed")
        finally:
            self._busy -= 1

    def _route(self, request: web.BaseRequest) -> tuple[Handler, str]:
        """Who answers, and the role that it takes; ApiError if nobody does.

        The library's own routes are not used: they answer an `Expect` header before anything of
        ours runs, and fail over one that is no text.
        """
        role, handlers = self._routes.get(request.path, ("", {}))
        if not handlers:
            raise ApiError(404, "Not Found")
        handler = handlers.get(request.method)
        if handler is None:
            raise ApiError(405, f"only {' and '.join(handlers)}")
        return handler, role

    async def _refusal(
        self, request: web.BaseRequest, client: str, role: str
    ) -> web.Response | None:
        """Why this client may not do what takes `role`; None if it may."""
        roles = self._roles(request)
        if role in roles:
            self._failures.succeeded(client)
            return None
        if roles:
            self.counts["errors_403"] += 1
            return _error(403, f"this takes an {role}'s token or certificate")
        self.counts["authentications_failed"] += 1
        delay_s = self._failures.failed(client, time.monotonic())
        if delay_s:
            self.counts["authentications_slowed"] += 1
            if self._slowed >= MAX_SLOWED:
                return _too_many("too many failed authentications", delay_s)
            self._slowed += 1
            try:
                await self._sleep(delay_s)
            finally:
                self._slowed -= 1
        self.counts["errors_401"] += 1
        answer = _error(401, "this takes a token (Authorization: Bearer …) that is known and valid")
        answer.headers["WWW-Authenticate"] = 'Bearer realm="kvcast"'
        return answer

    def _roles(self, request: web.BaseRequest) -> tuple[str, ...]:
        """What the client may do, by its certificate or its token."""
        transport = request.transport
        certificate = None if transport is None else transport.get_extra_info("peercert")
        try:
            if identity_of(certificate).role == OPERATOR_CERTIFICATE:
                return (VIEWER, OPERATOR)
        except IdentityError:
            pass
        tokens = self.options.tokens
        header = request.headers.get("Authorization", "")
        if tokens is None or header[: len(_SCHEME)].lower() != _SCHEME:
            return ()
        tokens.refresh()
        secret = header[len(_SCHEME) :].strip()[:_MAX_TOKEN_CHARS]
        token = tokens.who(secret, datetime.datetime.now(datetime.UTC).date())
        if token is None:
            return ()
        return (VIEWER, OPERATOR) if token.role == OPERATOR else (VIEWER,)

    async def _healthz(self, _request: web.BaseRequest) -> web.Response:
        problem = self._service.health()
        return _json({"ok": True}) if problem is None else _error(503, problem)

    async def _status(self, _request: web.BaseRequest) -> web.Response:
        return _json(self._service.status())

    async def _decisions(self, _request: web.BaseRequest) -> web.Response:
        return _json({"decisions": self._service.decisions()})

    async def _metrics(self, _request: web.BaseRequest) -> web.Response:
        return _Answer(body=self._service.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def _pin(self, request: web.BaseRequest) -> web.Response:
        body = await _pin_body(request)
        return _json(await self._service.pin(self._block(body), body.wait_s))

    async def _unpin(self, request: web.BaseRequest) -> web.Response:
        body = await _pin_body(request)
        if not self._service.unpin(self._block(body)):
            raise ApiError(404, "the block is not pinned")
        return _json({"unpinned": True})

    def _block(self, body: PinBody) -> BlockId:
        return self._service.derived(body.block) if body.engine_key else body.block


async def _pin_body(request: web.BaseRequest) -> PinBody:
    try:
        return msgspec.json.decode(await request.read(), type=PinBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"body: {error}") from error


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """A request whose body is bounded."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(
        message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES
    )


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return _Answer(body=json.dumps(body).encode(), status=status, content_type="application/json")


def _client(request: web.BaseRequest) -> str:
    """Who asks, for the limits."""
    transport = request.transport
    name = None if transport is None else transport.get_extra_info("peername")
    return client_of(str(name[0])) if name else ""


def _too_many(reason: str, wait_s: float) -> web.Response:
    answer = _error(429, reason)
    answer.headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    return answer


def _error(status: int, reason: str) -> web.Response:
    return _json({"error": reason}, status)
