"""The agent's hints over HTTP: POST /v1/prefetch, for a router that sends a request to this node.

Owns: the form of a hint, and what may be asked at once. Must not know: how blocks are fetched, or
how a client is bounded (`kvcast.service.http`). Imported only where hints are asked for, like
`metrics_server`.

A hint is `{"namespace": n, "keys": ["hex", …]}`: the keys of a prefix in order, as the engine has
them. The agent asks the pool how many of them in a row it holds, has those fetched into its arena,
and answers `{"held": so many}`. So a hint can bring blocks into this node's memory and tell whether
somebody has computed a prefix; it can neither read nor change one. Give the address to routers
alone: beyond loopback it takes a certificate of the cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from aiohttp import web
from kvcast.hostagent.core.agent import AgentCore, MissingSecretError
from kvcast.protocol.messages import local
from kvcast.service.http import HttpError, HttpServer, json_answer
from kvcast.service.tls import Credentials
from msgspec import Meta

log = logging.getLogger(__name__)

HINTS_PER_S: Final = 200.0
"""Of one client."""
MAX_KEYS: Final = 256
_ASK_TIMEOUT_S: Final = 1.0
_FETCH_TIMEOUT_S: Final = 5.0
_STATUS: Final = {local.FORBIDDEN: 403, local.UNKNOWN_NAMESPACE: 404}


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a hint."""

    namespace: Annotated[int, Meta(ge=1, le=0xFFFF)]
    keys: Annotated[
        list[Annotated[str, Meta(pattern="^[0-9a-fA-F]{32}$")]],
        Meta(min_length=1, max_length=MAX_KEYS),
    ]


def hints_server(
    core: AgentCore, pump: Callable[[], None], credentials: Credentials | None
) -> HttpServer:
    """A server of hints to this agent; `pump` sends what the core has to say."""

    async def prefetch(request: web.BaseRequest) -> web.Response:
        try:
            hint = msgspec.json.decode(await request.read(), type=Hint)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(400, f"body: {error}") from error
        return json_answer({"held": await _prefetched(core, pump, hint)})

    routes = {"/v1/prefetch": {"POST": prefetch}}
    return HttpServer(routes, credentials, rate_per_s=HINTS_PER_S, log=log)


async def _prefetched(core: AgentCore, pump: Callable[[], None], hint: Hint) -> int:
    refusal = core.reads.refusal(hint.namespace)
    if refusal is not None:
        raise HttpError(_STATUS.get(refusal, 503), f"namespace {hint.namespace}: {refusal}")
    try:
        keys = core.pool_keys(hint.namespace, [bytes.fromhex(key) for key in hint.keys])
    except MissingSecretError as error:
        raise HttpError(503, str(error)) from error
    loop = asyncio.get_running_loop()
    counted: asyncio.Future[int] = loop.create_future()

    def found(count: int) -> None:
        if not counted.done():
            counted.set_result(count)

    core.queries.exists(hint.namespace, b"".join(keys), loop.time() + _ASK_TIMEOUT_S, found)
    pump()
    held = await counted
    if held:
        now = loop.time()
        core.reads.prefetch(now, hint.namespace, keys[:held], now + _FETCH_TIMEOUT_S)
        pump()
    return held
