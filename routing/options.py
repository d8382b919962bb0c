"""What the router's adapters are started with.

Owns: the options. Must not know: flags, or anything that takes long to import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine is. `events`, `replay`: its ZeroMQ endpoints; `agent`: the URL of its node's
    agent, which is told to prefetch into the pool namespace `namespace`."""

    name: str
    url: str
    events: str | None = None
    replay: str | None = None
    agent: str | None = None
    namespace: int = 0
    slots: int = 0


@dataclass(frozen=True)
class HealthOptions:
    """How engines are looked after."""

    interval_s: float = 2.0
    timeout_s: float = 2.0
    failures: int = 2
    """Checks in a row that must fail until an engine is down."""
    tokenize_timeout_s: float = 0.5
    block_tokens: int = 16
    """Tokens a block, until an engine's events say otherwise."""
    seed: int = 0


@dataclass(frozen=True)
class ProxyOptions:
    """Bounds of the proxy."""

    tries: int = 2
    """Engines that a request is sent to at most."""
    max_body_bytes: int = 32 << 20
    max_requests: int = 2048
    """Requests at once; more are refused."""
    max_connections: int = 4096
    max_connections_per_address: int = 2048
    deadline_s: float = math.inf
    """Of a first token, for requests that do not say; infinity = none."""
    first_byte_timeout_s: float = 600.0
    """After which an engine that has not begun to answer has failed. Answers that are not streamed
    begin when they are whole."""
    idle_timeout_s: float = 120.0
    """The longest pause in an answer that has begun."""
    first_request_timeout_s: float = 15.0
    """A connection that has made no request by then is closed."""
    body_timeout_s: float = 60.0
    """For a client to send its request."""
