"""The control link's server: TCP connections of agents.

Owns: sockets, TLS, connections by number and how many there may be, and that, with TLS, only nodes
get in. Must not know: what is said on a connection, or until when
(`kvcast.protocol.links.control_callee`); it hands each message to `received` and sends what it is
told to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import msgspec
from kvcast.protocol.links.control_callee import ControlCallee, EncodedOnce
from kvcast.protocol.messages.control import AgentMessage
from kvcast.service.identity import NODE
from kvcast.service.link_driver import LinkDriver
from kvcast.service.listener import Bounds, Listener
from kvcast.service.tls import Credentials, PeerError, expect_peer

log = logging.getLogger("kvcast.controller.agent_links")

MAX_CONNECTIONS = 64
"""Twice the agents that a pool can have: old connections may linger."""
MAX_CONNECTIONS_PER_ADDRESS = 40
"""All nodes may be behind one address, but nobody there can take every place."""
CLOSE_TIMEOUT_S = 2.0
READ_BYTES = 64 * 1024


class AgentLink:
    """Serves agents. `received` and `disconnected` are called on the event loop."""

    def __init__(
        self,
        *,
        idle_s: float,
        received: Callable[[int, AgentMessage], None],
        disconnected: Callable[[int], None],
        credentials: Credentials | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._credentials = credentials
        self._idle_s = idle_s
        self._received = received
        self._disconnected = disconnected
        self._connections: dict[int, tuple[LinkDriver, ControlCallee]] = {}
        self._last = 0
        self._encoded = EncodedOnce()
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._empty = asyncio.Event()
        self._empty.set()
        self._listener = Listener(
            self._protocol,
            Bounds(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS),
            credentials,
            count=self._count,
        )

    def _count(self, name: str) -> None:
        self.counts[name] += 1

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the port that was picked for 0."""
        return await self._listener.start(host, port)

    async def stop(self) -> None:
        """Close the listener and every connection."""
        await self._listener.close()
        for driver, _ in list(self._connections.values()):
            driver.lost("")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._empty.wait()
        except TimeoutError:
            for driver, _ in list(self._connections.values()):
                driver.abort()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def send(self, connection: int, message: msgspec.Struct) -> None:
        """Queue a message; a connection that is gone, or does not read, loses it."""
        if connection not in self._connections:
            self.counts["sends_to_closed"] += 1
            return
        driver, link = self._connections[connection]
        link.send(asyncio.get_running_loop().time(), self._encoded(message))
        driver.flush()

    def close(self, connection: int, reason: str) -> None:
        """End a connection when what was sent has gone out."""
        if connection in self._connections:
            driver, link = self._connections[connection]
            log.info("closing an agent's connection: %s", reason)
            link.end(asyncio.get_running_loop().time())
            driver.flush()

    def _protocol(self) -> LinkDriver:
        self._last += 1
        number = self._last

        def opened(transport: asyncio.Transport) -> ControlCallee:
            node_id = None
            if self._credentials is not None:
                node_id = expect_peer(transport, NODE).name
            now = asyncio.get_running_loop().time()
            link = ControlCallee(
                now, self._idle_s, lambda message: self._hand_on(number, message), self.counts,
                node_id,
            )  # fmt: skip
            self._connections[number] = driver, link
            self._empty.clear()
            return link

        def refused(error: PeerError) -> None:
            self.counts["refused_peers"] += 1
            log.warning("a connection to the agents' entry point was refused: %s", error)

        def over() -> None:
            _, link = self._connections.pop(number, (None, None))
            if link is None:
                return
            if link.problem:
                log.warning("an agent's connection was closed: %s", link.problem)
            if not self._connections:
                self._empty.set()
            self._disconnected(number)

        driver = LinkDriver(self._scratch, opened, changed=lambda: None, refused=refused, over=over)
        return driver

    def _hand_on(self, number: int, message: AgentMessage) -> None:
        try:
            self._received(number, message)
        except Exception:
            # A mistake of ours must not cost more than this connection.
            self.counts["closed_on_error"] += 1
            log.exception("an agent's message could not be handled")
            self._connections[number][1].lost(asyncio.get_running_loop().time())
