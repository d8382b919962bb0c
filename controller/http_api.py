"""The controller's HTTP API: health, status, reasons, metrics, pins.

Owns: routes, bodies, status codes, bounds on what a client may send. Must not know: how anything
is done; it asks a `Service`. Answers are JSON objects; an error is `{"error": "why"}`.

| request | answer |
|---|---|
| GET /healthz | 200 `{"ok": true}` while the control loop runs; 503 with why otherwise |
| GET /v1/status | the pool, the switch's counters, the controller (see docs) |
| GET /v1/decisions | the last admissions, evictions and refusals, newest first, with reasons |
| GET /metrics | Prometheus text |
| POST /v1/pin `{"namespace": n, "key": hex}` | 200 resident; 409, 404 or 503 with why |
| DELETE /v1/pin, the same body | 200; 404 if it was not pinned |

Everything is counted (`counts`): connections; `requests`, and `malformed` for what is no HTTP and
the library answers by itself; and for both the answers by status (`answers_200`), or `undelivered`
where the client had gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError
from kvcast.protocol.wire import BlockId
from msgspec import Meta

from .metrics import CONTENT_TYPE

log = logging.getLogger("kvcast.controller.http")

MAX_BODY_BYTES = 16 * 1024
REQUEST_TIMEOUT_S = 15.0
MAX_CONCURRENT = 64
MAX_CONNECTIONS = 256
"""Open connections, idle ones included."""


class PinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of both pin requests; `wait_s`: how long POST may wait for the block."""

    namespace: Annotated[int, Meta(ge=1, le=0xFFFF)]
    key: Annotated[str, Meta(pattern="^[0-9a-fA-F]{32}$")]
    wait_s: Annotated[float, Meta(ge=0, le=10)] = 5.0

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

    async def pin(self, block: BlockId, wait_s: float) -> dict[str, Any]:
        """Pin and wait until the switch holds the entries; ApiError."""

    def unpin(self, block: BlockId) -> bool: ...


Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


class _Answer(web.Response):
    """An answer of ours; others come from the HTTP library itself."""


class HttpApi:
    """Serves a `Service`."""

    def __init__(self, service: Service) -> None:
        self.counts: Counter[str] = Counter()
        self._service = service
        self._routes: dict[str, dict[str, Handler]] = {
            "/healthz": {"GET": self._healthz, "HEAD": self._healthz},
            "/v1/status": {"GET": self._status, "HEAD": self._status},
            "/v1/decisions": {"GET": self._decisions, "HEAD": self._decisions},
            "/metrics": {"GET": self._metrics, "HEAD": self._metrics},
            "/v1/pin": {"POST": self._pin, "DELETE": self._unpin},
        }
        self._runner: web.ServerRunner | None = None
        self._server: asyncio.Server | None = None
        self._busy = 0

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
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connected, host, port, backlog=64)
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def stop(self) -> None:
        """Close the listener and every connection."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _connected(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection: aiohttp's, or at the bound one that hangs up."""
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        self.counts["connections"] += 1
        if len(server.connections) >= MAX_CONNECTIONS:
            self.counts["connections_at_bound"] += 1
            return _HangUp()
        return server()

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
        if self._busy >= MAX_CONCURRENT:
            self.counts["requests_at_bound"] += 1
            return _error(503, f"more than {MAX_CONCURRENT} requests at once")
        self._busy += 1
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await self._route(request)(request)
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

    def _route(self, request: web.BaseRequest) -> Handler:
        """Who answers; ApiError if nobody does.

        The library's own routes are not used: they answer an `Expect` header before anything of
        ours runs, and fail over one that is no text.
        """
        handlers = self._routes.get(request.path)
        if handlers is None:
            raise ApiError(404, "Not Found")
        handler = handlers.get(request.method)
        if handler is None:
            raise ApiError(405, f"only {' and '.join(handlers)}")
        return handler

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
        return _json(await self._service.pin(body.block, body.wait_s))

    async def _unpin(self, request: web.BaseRequest) -> web.Response:
        body = await _pin_body(request)
        if not self._service.unpin(body.block):
            raise ApiError(404, "the block is not pinned")
        return _json({"unpinned": True})


class _HangUp(asyncio.Protocol):
    """Ends a connection as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


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


def _error(status: int, reason: str) -> web.Response:
    return _json({"error": reason}, status)
