"""An HTTP server of a daemon, with the bounds that all our servers have.

Owns: how many connections, requests and bytes a client may have, how long it may take, what an
error looks like, and what is counted. Must not know: what the routes do, or who may use them
(`admit` is asked). Answers are JSON objects, Prometheus text or files; an error is
`{"error": "why"}`.

Everything is counted (`counts`): connections, and those not let in; `requests`, and `malformed` for
what is no HTTP and the library answers by itself; and for both the answers by status
(`answers_` and the number), or `undelivered` where the client had gone; `rate_limited`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError
from kvcast.service.http_connections import HttpConnections
from kvcast.service.http_limits import RateLimit, client_of
from kvcast.service.listener import Bounds
from kvcast.service.tls import Credentials
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

MAX_BODY_BYTES = 16 * 1024
REQUEST_TIMEOUT_S = 15.0
MAX_CONCURRENT = 64
MAX_CONNECTIONS = 256
"""Open connections, idle ones included."""
FIRST_REQUEST_TIMEOUT_S = 15.0
"""A connection that has made no request by then is closed; later ones have `_KEEP_ALIVE_S` each."""
MAX_CONNECTIONS_PER_ADDRESS = 64
"""Of them, from one address beyond loopback."""
_KEEP_ALIVE_S: Final = 30.0
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]
Routes = Mapping[str, Mapping[str, Handler]]
"""Path -> method -> who answers."""


class HttpError(Exception):
    """An error for the client: an HTTP status, why, and headers to say it with."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers or {}


class _Answer(web.Response):
    """An answer of ours; others come from the HTTP library itself."""


def json_answer(body: Mapping[str, Any], status: int = 200) -> web.Response:
    """An object as the answer."""
    return _Answer(body=msgspec.json.encode(body), status=status, content_type="application/json")


def metrics_answer(families: Iterable[Metric]) -> web.Response:
    """Metrics as the answer to a scrape, in Prometheus' text form."""

    class Families(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    return _Answer(body=generate_latest(Families()), headers={"Content-Type": _METRICS_TYPE})


def file_answer(body: bytes, content_type: str, headers: Mapping[str, str]) -> web.Response:
    """A text file in UTF-8 as the answer."""
    answer = _Answer(body=body, content_type=content_type, charset="utf-8")
    answer.headers.update(headers)
    return answer


def too_many(reason: str, wait_s: float) -> HttpError:
    """The error of a client that is to come back in `wait_s` seconds."""
    return HttpError(429, reason, {"Retry-After": str(max(1, math.ceil(wait_s)))})


def client_of_request(request: web.BaseRequest) -> str:
    """Who asks, for limits."""
    transport = request.transport
    name = None if transport is None else transport.get_extra_info("peername")
    return client_of(str(name[0])) if name else ""


async def _admit_all(_request: web.BaseRequest) -> None:
    pass


class HttpServer:
    """Serves `routes` between `start` and `stop`.

    With `credentials` over TLS; `certificate_required`: to nobody without a certificate of the
    cluster. `rate_per_s`: requests a second a client, 0 = no limit. `admit` is asked before a
    route's handler runs, and raises HttpError for who may not use it.
    """

    def __init__(
        self,
        routes: Routes,
        credentials: Credentials | None = None,
        *,
        certificate_required: bool = True,
        rate_per_s: float = 0.0,
        admit: Callable[[web.BaseRequest], Awaitable[None]] = _admit_all,
        log: logging.Logger,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._routes = routes
        self._rate = RateLimit(rate_per_s)
        self._admit = admit
        self._log = log
        self._busy = 0
        self._connections = HttpConnections(
            Bounds(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS),
            credentials,
            certificate_required=certificate_required,
            first_request_timeout_s=FIRST_REQUEST_TIMEOUT_S,
            count=self._count,
        )

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the port that was picked for 0."""
        server = web.Server(
            self._bounded,
            request_factory=_request,
            access_log_class=self._answer_counter(),
            logger=self._quiet_logger(),
            keepalive_timeout=_KEEP_ALIVE_S,
        )
        return await self._connections.start(server, host, port, shutdown_timeout_s=1.0)

    async def stop(self) -> None:
        """Close the listener and every connection."""
        await self._connections.stop()

    def _count(self, name: str) -> None:
        self.counts[name] += 1

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
        logger = self._log.getChild("server")

        def keep(record: logging.LogRecord) -> bool:
            error = record.exc_info[1] if record.exc_info else None
            return not isinstance(error, HttpProcessingError)

        logger.filters[:] = [keep]
        return logger

    async def _bounded(self, request: web.BaseRequest) -> web.Response:
        """Bounds and errors of every request."""
        self.counts["requests"] += 1
        self._connections.heard(request)
        try:
            return await self._answered(request)
        except HttpError as error:
            status, reason, headers = error.status, str(error), error.headers
        except web.HTTPException as error:
            status, reason, headers = error.status, error.reason, {}
        except TimeoutError:
            status, reason, headers = 408, "the request took too long", {}
        except ConnectionResetError:  # the client left in the middle of its body; nobody hears us
            status, reason, headers = 400, "the connection was closed", {}
            self.counts["disconnects"] += 1
        self.counts[f"errors_{status}"] += 1
        answer = json_answer({"error": reason}, status)
        answer.headers.update(headers)
        return answer

    async def _answered(self, request: web.BaseRequest) -> web.Response:
        wait_s = self._rate.wait_s(client_of_request(request), time.monotonic())
        if wait_s:
            self.counts["rate_limited"] += 1
            raise too_many("too many requests", wait_s)
        handler = self._handler(request)
        await self._admit(request)
        if self._busy >= MAX_CONCURRENT:
            self.counts["requests_at_bound"] += 1
            raise HttpError(503, f"more than {MAX_CONCURRENT} requests at once")
        self._busy += 1
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await handler(request)
        finally:
            self._busy -= 1

    def _handler(self, request: web.BaseRequest) -> Handler:
        """Who answers; HttpError if nobody does.

        The library's own routes are not used: they answer an `Expect` header before anything of
        ours runs, and fail over one that is no text.
        """
        handlers = self._routes.get(request.path)
        if handlers is None:
            raise HttpError(404, "Not Found")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in handlers:
            raise HttpError(405, f"only {' and '.join(handlers)}")
        return handlers[method]


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """A request whose body is bounded."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(
        message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES
    )
