"""The controller's HTTP API: health, status, reasons, metrics, pins.

Owns: routes, who may use them, bodies and status codes. Must not know: how anything is done (it
asks a `Service`), or what bounds a client (`kvcast.service.http`).

| request | role | answer |
|---|---|---|
| GET / | nobody | a page that shows the pool (`page`); it asks the routes below |
| GET /healthz | nobody | 200 `{"ok": true}` while the control loop runs; 503 with why otherwise |
| GET /v1/status | viewer | the pool, the switch's counters, the controller (see docs) |
| GET /v1/decisions | viewer | the last admissions, evictions and refusals, newest first |
| GET /v1/worth | viewer | what the switch has brought so far, and whether it pays |
| GET /metrics | viewer | Prometheus text |
| POST /v1/pin `{"namespace": n, "key": hex}` | operator | 200 resident; 409, 404 or 503 with why |
| DELETE /v1/pin, the same body | operator | 200; 404 if it was not pinned |
| GET /v1/namespaces | viewer | all namespaces, with their settings |
| POST /v1/namespaces (`NamespaceBody`) | operator | 200: found or made; 409 with why not |
| PATCH /v1/namespaces `{"namespace": n, "settings": {…}}` | operator | 200; 404 |
| DELETE /v1/namespaces `{"namespace": n}` | operator | 200; 404 |
| POST /v1/drain `{"node_id": name}` | operator | 200: its blocks are handed over; 409: why not |
| DELETE /v1/drain, the same body | operator | 200: it holds blocks again, or on; 409 |

Where it authenticates (`HttpOptions.authenticated`), a client has a role by its token
(`Authorization: Bearer …`) or by an operator's certificate. 401: no role; 403: not this one; 429:
too many requests, or too many failed authentications at once. What a client gets wrong is said
back to it; a token is never said, logged or counted by name.

Besides what every server of ours counts, `counts` has `authentications_failed`, of them
`authentications_slowed`.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from aiohttp import web
from kvcast.controller.http.page import page_routes
from kvcast.controller.http.tokens import OPERATOR, VIEWER, TokensFile
from kvcast.protocol.messages.control import (
    NamespaceInfo,
    NamespaceSettings,
    NodeId,
    Text,
)
from kvcast.protocol.messages.wire import BlockId
from kvcast.service.http import (
    HttpError,
    HttpServer,
    Routes,
    client_of_request,
    json_answer,
    metrics_answer,
    too_many,
)
from kvcast.service.http_limits import Failures
from kvcast.service.identity import OPERATOR as OPERATOR_CERTIFICATE
from kvcast.service.identity import IdentityError, identity_of
from kvcast.service.tls import Credentials
from msgspec import Meta
from prometheus_client.metrics_core import Metric

log = logging.getLogger("kvcast.controller.http")

MAX_SLOWED = 32
"""Answers to failed authentications that are held back at once; beyond, 429 at once."""
_SCHEME = "bearer "
_MAX_TOKEN_CHARS = 256
_ROLES = {
    "/v1/status": VIEWER,
    "/v1/decisions": VIEWER,
    "/v1/worth": VIEWER,
    "/metrics": VIEWER,
    "/v1/pin": OPERATOR,
    "/v1/namespaces": OPERATOR,
    "/v1/drain": OPERATOR,
}
"""What it takes to use a route; the others are everybody's."""
_VIEWED = frozenset({"/v1/namespaces"})
"""Routes of operators that viewers may GET."""


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


Number = Annotated[int, Meta(ge=1, le=0xFFFF)]


class NamespaceBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/namespaces: what it is to stand for, and its settings; without them it
    keeps those that it has."""

    tenant: Text
    model: Text
    version: Text
    layout: Text
    settings: NamespaceSettings | None = None


class SettingsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of PATCH /v1/namespaces. What `settings` names is changed, the rest stays."""

    namespace: Number
    settings: dict[str, Any]


class NumberBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of DELETE /v1/namespaces."""

    namespace: Number


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of both drain requests."""

    node_id: NodeId


class Service(Protocol):
    """What the API needs of the controller."""

    def health(self) -> str | None:
        """Why the controller is not well; None if it is."""

    def status(self) -> dict[str, Any]: ...

    def decisions(self) -> list[dict[str, Any]]: ...

    def worth(self) -> dict[str, Any]: ...

    def metrics(self) -> Iterable[Metric]: ...

    def derived(self, block: BlockId) -> BlockId:
        """An engine's block as the pool knows it."""

    async def pin(self, block: BlockId, wait_s: float) -> dict[str, Any]:
        """Pin and wait until the switch holds the entries; HttpError."""

    def unpin(self, block: BlockId) -> bool: ...

    def namespaces(self) -> list[NamespaceInfo]: ...

    def make_namespace(self, body: NamespaceBody) -> tuple[NamespaceInfo, bool]:
        """The namespace, and whether it had to be made; HttpError."""

    def change_namespace(self, body: SettingsBody) -> NamespaceInfo:
        """HttpError."""

    def delete_namespace(self, namespace: int) -> None:
        """HttpError."""

    def drain(self, node_id: str) -> None:
        """HttpError."""

    def undrain(self, node_id: str) -> None:
        """HttpError."""


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
        self.options = options = options or HttpOptions()
        self._service = service
        self._failures = Failures()
        self._sleep = sleep
        self._slowed = 0
        routes: Routes = {
            **page_routes(),
            "/healthz": {"GET": self._healthz},
            "/v1/status": {"GET": self._status},
            "/v1/decisions": {"GET": self._decisions},
            "/v1/worth": {"GET": self._worth},
            "/metrics": {"GET": self._metrics},
            "/v1/pin": {"POST": self._pin, "DELETE": self._unpin},
            "/v1/drain": {"POST": self._drain, "DELETE": self._undrain},
            "/v1/namespaces": {
                "GET": self._namespaces,
                "POST": self._make_namespace,
                "PATCH": self._change_namespace,
                "DELETE": self._delete_namespace,
            },
        }
        self._server = HttpServer(
            routes,
            credentials,
            certificate_required=options.client_certificates,
            rate_per_s=options.rate_per_s,
            admit=self._admit,
            log=log,
        )
        self.counts: Counter[str] = self._server.counts
        self.start = self._server.start
        self.stop = self._server.stop

    async def _admit(self, request: web.BaseRequest) -> None:
        """HttpError if this client may not use the route."""
        role = _ROLES.get(request.path)
        if request.path in _VIEWED and request.method == "GET":
            role = VIEWER
        if role is None or not self.options.authenticated:
            return
        client = client_of_request(request)
        roles = self._roles(request)
        if role in roles:
            self._failures.succeeded(client)
            return
        if roles:
            raise HttpError(403, f"this takes an {role}'s token or certificate")
        self.counts["authentications_failed"] += 1
        delay_s = self._failures.failed(client, time.monotonic())
        if delay_s:
            self.counts["authentications_slowed"] += 1
            if self._slowed >= MAX_SLOWED:
                raise too_many("too many failed authentications", delay_s)
            self._slowed += 1
            try:
                await self._sleep(delay_s)
            finally:
                self._slowed -= 1
        raise HttpError(
            401,
            "this takes a token (Authorization: Bearer …) that is known and valid",
            {"WWW-Authenticate": 'Bearer realm="kvcast"'},
        )

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
        if problem is not None:
            raise HttpError(503, problem)
        return json_answer({"ok": True})

    async def _status(self, _request: web.BaseRequest) -> web.Response:
        return json_answer(self._service.status())

    async def _decisions(self, _request: web.BaseRequest) -> web.Response:
        return json_answer({"decisions": self._service.decisions()})

    async def _worth(self, _request: web.BaseRequest) -> web.Response:
        return json_answer(self._service.worth())

    async def _metrics(self, _request: web.BaseRequest) -> web.Response:
        return metrics_answer(self._service.metrics())

    async def _namespaces(self, _request: web.BaseRequest) -> web.Response:
        infos = self._service.namespaces()
        return json_answer({"namespaces": [msgspec.to_builtins(info) for info in infos]})

    async def _make_namespace(self, request: web.BaseRequest) -> web.Response:
        info, made = self._service.make_namespace(await _body(request, NamespaceBody))
        return json_answer({**msgspec.to_builtins(info), "made": made})

    async def _change_namespace(self, request: web.BaseRequest) -> web.Response:
        info = self._service.change_namespace(await _body(request, SettingsBody))
        return json_answer(msgspec.to_builtins(info))

    async def _delete_namespace(self, request: web.BaseRequest) -> web.Response:
        self._service.delete_namespace((await _body(request, NumberBody)).namespace)
        return json_answer({"deleted": True})

    async def _drain(self, request: web.BaseRequest) -> web.Response:
        self._service.drain((await _body(request, DrainBody)).node_id)
        return json_answer({"draining": True})

    async def _undrain(self, request: web.BaseRequest) -> web.Response:
        self._service.undrain((await _body(request, DrainBody)).node_id)
        return json_answer({"draining": False})

    async def _pin(self, request: web.BaseRequest) -> web.Response:
        body = await _body(request, PinBody)
        return json_answer(await self._service.pin(self._block(body), body.wait_s))

    async def _unpin(self, request: web.BaseRequest) -> web.Response:
        body = await _body(request, PinBody)
        if not self._service.unpin(self._block(body)):
            raise HttpError(404, "the block is not pinned")
        return json_answer({"unpinned": True})

    def _block(self, body: PinBody) -> BlockId:
        return self._service.derived(body.block) if body.engine_key else body.block


T = TypeVar("T")


async def _body(request: web.BaseRequest, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"body: {error}") from error
