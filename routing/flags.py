"""What `kvcast route` can be told.

Owns: the flags, and what must go together. Must not know: what runs.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from kvcast.routing.core.costs import CostModel
from kvcast.routing.core.router import RouterOptions
from kvcast.routing.options import EngineAddress, HealthOptions, ProxyOptions
from kvcast.service.options import (
    CommonOptions,
    OptionsError,
    address,
    bare,
    choice,
    count,
    many,
    option,
    read_options,
    seconds,
    size,
)
from kvcast.service.tls import Credentials
from kvcast.service.tls_options import TlsOptions, credentials_of, refuse_open_addresses
from kvcast.service.values import TextError, number

_PARTS = ("events", "replay", "agent", "namespace", "slots")


def _url(text: str) -> str:
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise TextError(f"{text!r} is not http://HOST:PORT")
    if parts.query or parts.fragment or parts.username is not None:
        raise TextError(f"{text!r} must be a plain address")
    return text.rstrip("/")


def _endpoint(text: str) -> str:
    if not re.fullmatch(r"tcp://\S+:[0-9]{1,5}|ipc://\S+", text):
        raise TextError(f"{text!r} is not tcp://HOST:PORT or ipc://PATH")
    return text


def _small(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 0xFFFF:
        raise TextError(f"{text!r} is not a number up to 65535")
    return int(text)


def parse_engine(text: str) -> EngineAddress:
    """NAME=URL[,events=…][,replay=…][,agent=URL][,namespace=N][,slots=N]; TextError else."""
    first, *others = text.split(",")
    name, _, url = first.partition("=")
    if not name or not name.isprintable() or not url:
        raise TextError(f"{text!r} is not NAME=URL[,events=tcp://HOST:PORT][,…]")
    given: dict[str, str] = {}
    for part in others:
        key, _, value = part.partition("=")
        if key not in _PARTS or key in given or not value:
            raise TextError(f"{part!r} is none of {', '.join(_PARTS)}, once each")
        given[key] = value
    if "replay" in given and "events" not in given:
        raise TextError("replay goes with events")
    if ("agent" in given) != ("namespace" in given):
        raise TextError("agent goes with namespace, the number that kvcast status shows")
    return EngineAddress(
        name,
        _url(url),
        _endpoint(given["events"]) if "events" in given else None,
        _endpoint(given["replay"]) if "replay" in given else None,
        _url(given["agent"]) if "agent" in given else None,
        _small(given.get("namespace", "0")),
        _small(given.get("slots", "0")),
    )


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """serving"""

    listen: tuple[str, int] = address(
        "where clients connect; port 0 = pick one", default=("127.0.0.1", 8000)
    )
    engine: tuple[EngineAddress, ...] = many(
        "an engine; events and replay: its KV events over ZeroMQ; agent and namespace: its node's "
        "agent (--hints-addr), which is told to prefetch into that namespace; slots: requests that "
        "it runs at once",
        parse=parse_engine,
        metavar="NAME=URL[,events=tcp://…][,replay=tcp://…][,agent=http://…,namespace=N][,slots=N]",
    )
    max_body_bytes: int = size(
        "longest request", default=ProxyOptions.max_body_bytes, flag="max-body"
    )
    max_requests: int = count(
        "requests at once; more are refused",
        default=ProxyOptions.max_requests,
        unit="requests",
        low=1,
    )
    tries: int = count(
        "engines that a request is sent to, at most, until one begins to answer",
        default=ProxyOptions.tries,
        unit="engines",
        low=1,
        high=10,
    )
    first_byte_timeout_s: float = seconds(
        "after which an engine that has not begun to answer has failed",
        default=ProxyOptions.first_byte_timeout_s,
        low=0.01,
    )
    idle_timeout_s: float = seconds(
        "the longest pause in an answer that has begun",
        default=ProxyOptions.idle_timeout_s,
        low=0.01,
    )


@dataclass(frozen=True, kw_only=True)
class ChoiceFlags:
    """choice"""

    prompts: str = choice(
        "how prompts are named: by token ids, which an engine is asked for, or by their text",
        default="tokenize",
        choices=("tokenize", "text"),
    )
    block_tokens: int = count(
        "tokens of an engine's block, until its events say so",
        default=HealthOptions.block_tokens,
        unit="tokens",
        low=1,
    )
    deadline_s: float = seconds(
        "refuse at once what cannot have its first token so soon; 0 = never; a request's "
        "X-Kvcast-Deadline-Ms goes before it",
        default=0.0,
    )
    slots: int = count(
        "requests that an engine runs at once", default=RouterOptions.slots, unit="requests", low=1
    )
    max_in_flight: int = count(
        "requests that an engine may have, running and waiting",
        default=RouterOptions.max_in_flight,
        unit="requests",
        low=1,
    )
    expect_s: float = seconds(
        "how long a prompt that was sent to an engine is taken for held there, unless events say "
        "otherwise",
        default=RouterOptions.expect_s,
    )
    pool_saves_all: bool = bare("the engines' connectors put all that they compute into the pool")
    max_blocks: int = count(
        "blocks in the router's index (about 150 bytes each)",
        default=RouterOptions.max_blocks,
        unit="blocks",
        low=2,
    )


@dataclass(frozen=True, kw_only=True)
class CostFlags:
    """costs"""

    prefill_tokens_per_s: float = option(
        "tokens of a prompt that an engine computes, at its beginning",
        default=1 / CostModel.prefill_s_per_token,
        parse=number(1e-3, 1e9),
        unit="tokens/s",
    )
    attention_s_per_token2: float = option(
        "what each token costs more for each token before it",
        default=CostModel.attention_s_per_token2,
        parse=number(0, 1),
        unit="s",
        metavar="SECONDS",
    )
    kv_bytes_per_token: int = size("KV of a token", default=CostModel.kv_bytes_per_token)
    pool_bytes_per_s: float = option(
        "what one engine gets from the pool",
        default=CostModel.pool_bytes_per_s,
        parse=number(1, 1e15),
        unit="bytes/s",
    )
    pool_latency_s: float = seconds("until the pool's first byte", default=CostModel.pool_latency_s)


@dataclass(frozen=True, kw_only=True)
class HealthFlags:
    """health checks"""

    health_interval_s: float = seconds(
        "pause between two checks of an engine", default=HealthOptions.interval_s, low=0.05
    )
    health_timeout_s: float = seconds(
        "for an engine's answer to a check, and for a connection",
        default=HealthOptions.timeout_s,
        low=0.05,
    )
    health_failures: int = count(
        "failed checks, or requests, in a row until an engine is down",
        default=HealthOptions.failures,
        unit="checks",
        low=1,
    )
    tokenize_timeout_s: float = seconds(
        "for an engine's answer to /tokenize; then the text is what names the prompt",
        default=HealthOptions.tokenize_timeout_s,
    )


@dataclass(frozen=True, kw_only=True)
class RouteFlags(ServeFlags, ChoiceFlags, CostFlags, HealthFlags, TlsOptions, CommonOptions):
    """What `kvcast route` can be told."""

    PROGRAM: ClassVar[str] = "kvcast route"
    DESCRIPTION: ClassVar[str] = """\
A proxy for engines that speak OpenAI's API: it sends a request where the longest prefix of its
prompt is held, all considered, tells that node's agent to fetch the rest from the pool meanwhile,
and refuses at once what would come too late.

  kvcast route --listen 127.0.0.1:8000 \\
      --engine a=http://127.0.0.1:8001,events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558 \\
      --engine b=http://127.0.0.1:8002,events=tcp://127.0.0.1:5567,replay=tcp://127.0.0.1:5568
"""


@dataclass(frozen=True)
class Setup:
    """Checked flags, and the certificates that they name."""

    flags: RouteFlags
    credentials: Credentials | None


def parse(argv: Sequence[str] | None) -> Setup:
    """Flags and file, checked; exits with status 2 and a message on an error."""
    return read_options(RouteFlags, argv, _settle)


def _settle(flags: RouteFlags) -> Setup:
    if not flags.engine:
        raise OptionsError("there is no --engine to send a request to")
    names = [each.name for each in flags.engine]
    if len(set(names)) < len(names):
        raise OptionsError("two engines have one name")
    refuse_open_addresses(flags, [("--listen", flags.listen[0])])
    return Setup(flags, credentials_of(flags.tls))


def router_options(flags: RouteFlags) -> RouterOptions:
    """The core's options."""
    return RouterOptions(
        costs=CostModel(
            prefill_s_per_token=1 / flags.prefill_tokens_per_s,
            attention_s_per_token2=flags.attention_s_per_token2,
            kv_bytes_per_token=flags.kv_bytes_per_token,
            pool_bytes_per_s=flags.pool_bytes_per_s,
            pool_latency_s=flags.pool_latency_s,
        ),
        slots=flags.slots,
        max_in_flight=flags.max_in_flight,
        expect_s=flags.expect_s,
        pool_saves_all=flags.pool_saves_all,
        prefetches=any(each.agent is not None for each in flags.engine),
        max_blocks=flags.max_blocks,
    )


def health_options(flags: RouteFlags) -> HealthOptions:
    """How engines are looked after; the seed of the hashes is this process's own."""
    return HealthOptions(
        interval_s=flags.health_interval_s,
        timeout_s=flags.health_timeout_s,
        failures=flags.health_failures,
        tokenize_timeout_s=flags.tokenize_timeout_s,
        block_tokens=flags.block_tokens,
        seed=secrets.randbits(64),
    )


def proxy_options(flags: RouteFlags) -> ProxyOptions:
    """The proxy's bounds."""
    return ProxyOptions(
        tries=flags.tries,
        max_body_bytes=flags.max_body_bytes,
        max_requests=flags.max_requests,
        deadline_s=flags.deadline_s or math.inf,
        first_byte_timeout_s=flags.first_byte_timeout_s,
        idle_timeout_s=flags.idle_timeout_s,
    )
