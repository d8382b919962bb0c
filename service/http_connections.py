"""HTTP connections of a daemon: aiohttp behind `Listener`; who asks for nothing is closed.

Owns: the sockets, and how long a new connection may take over its first request. Must not know:
what is asked for, or what is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from kvcast.service.listener import Bounds, Listener
from kvcast.service.tls import Credentials


class HttpConnections:
    """Connections between `start` and `stop`. `count` hears what `Listener` counts, and
    `connections_silent` of each that made no request within `first_request_timeout_s`."""

    def __init__(
        self,
        bounds: Bounds,
        credentials: Credentials | None,
        *,
        certificate_required: bool,
        first_request_timeout_s: float,
        count: Callable[[str], None],
    ) -> None:
        self._first_request_timeout_s = first_request_timeout_s
        self._count = count
        self._silent: set[web.RequestHandler] = set()
        """Connections on which no request was made yet, until they must have made one."""
        self._runner: web.ServerRunner | None = None
        self._listener = Listener(
            self._connected,
            bounds,
            credentials,
            certificate_required=certificate_required,
            count=count,
        )

    async def start(
        self, server: web.Server, host: str, port: int, *, shutdown_timeout_s: float
    ) -> tuple[str, int]:
        """Listen, and let `server` answer; returns the address, with the port that was picked
        for 0."""
        self._runner = web.ServerRunner(
            server, handle_signals=False, shutdown_timeout=shutdown_timeout_s
        )
        await self._runner.setup()
        return await self._listener.start(host, port)

    async def stop(self) -> None:
        """Close the listener, and every connection after the time for that at the latest."""
        await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def heard(self, request: web.BaseRequest) -> None:
        """A request has come."""
        self._silent.discard(request.protocol)

    def _connected(self) -> asyncio.BaseProtocol:
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        protocol = server()
        self._silent.add(protocol)
        loop = asyncio.get_running_loop()
        loop.call_later(self._first_request_timeout_s, self._must_speak, protocol)
        return protocol

    def _must_speak(self, protocol: web.RequestHandler) -> None:
        """Close a connection that has asked for nothing, or for half of something."""
        transport = protocol.transport
        if protocol in self._silent and transport is not None:
            self._count("connections_silent")
            transport.abort()
        self._silent.discard(protocol)
