"""The control link's adapter: the agent's connection to the controller.

Owns: sockets, TLS, when an attempt begins, and what is logged. Must not know: what is said on the
connection, or when it is made anew (`kvcast.protocol.links.control_caller`).

With credentials the link is TLS, and nothing is said before the peer's certificate has proved that
it is a controller of this cluster.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from kvcast.hostagent.core.agent import AgentCore
from kvcast.protocol.links.control_caller import (
    Attempt,
    ControlCaller,
    ControlConnection,
    ControlOptions,
)
from kvcast.protocol.messages.control import Register
from kvcast.service.identity import CONTROLLER
from kvcast.service.link_driver import ConnectingDriver, give_up_after
from kvcast.service.tls import Credentials, expect_peer

log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024
_LEAVE_TIMEOUT_S = 1.0


class ControlLink:
    """Keeps the agent registered, from `start` to `close`. `ready` is set when the first map has
    come."""

    def __init__(
        self,
        core: AgentCore,
        options: ControlOptions,
        register: Register,
        rng: random.Random,
        core_told: Callable[[], None],
        credentials: Credentials | None = None,
    ) -> None:
        self.ready = asyncio.Event()
        self._core = core
        self._options = options
        self._credentials = credentials
        self._core_told = core_told
        self._link = ControlCaller(core, options, register, rng, core.metrics, self._wake)
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self._driver: ConnectingDriver | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._registered = False
        self._gone = asyncio.Event()
        """The last connection is over, after `close` was called."""

    def start(self) -> None:
        """Connect, and connect again after every loss."""
        self._link.start(asyncio.get_running_loop().time())
        self._act()

    async def close(self) -> None:
        """Say goodbye, so that the controller need not wait for the lease."""
        self._link.leave(asyncio.get_running_loop().time())
        if self._retry is not None:
            self._retry.cancel()
        if self._driver is not None:
            self._driver.flush()
            try:
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await self._gone.wait()
            except TimeoutError:
                self._driver.abort()

    def register_anew(self, register: Register) -> None:
        """Be known by this from now on."""
        self._link.register_anew(register)

    def _wake(self) -> None:
        """The core has something to say: it may be in the middle of an event."""
        if self._driver is not None:
            asyncio.get_running_loop().call_soon(self._driver.flush)

    def _act(self) -> None:
        """Do what the link and the core want done."""
        loop = asyncio.get_running_loop()
        for attempt in self._link.attempts():
            if attempt.after:
                log.log(
                    logging.ERROR if attempt.grave else logging.WARNING,
                    "control link: %s",
                    attempt.after,
                )
            self._retry = loop.call_at(attempt.when, self._attempt, attempt)
        registered = self._core.connected
        if registered and not self._registered:
            log.info("registered with the controller", extra={"lease_s": self._core.lease_s})
        self._registered = registered
        if self._core.pool is not None:
            self.ready.set()
        self._core_told()

    def _attempt(self, attempt: Attempt) -> None:
        connection = attempt.connection
        loop = asyncio.get_running_loop()

        def opened(transport: asyncio.Transport) -> ControlConnection:
            if self._credentials is not None:
                expect_peer(transport, CONTROLLER)
            give_up_after(transport, self._options.silence_s)
            connection.connected(loop.time())
            return connection

        def over() -> None:
            if self._driver is driver:
                self._driver = None
                self._gone.set()

        driver = self._driver = ConnectingDriver(
            connection,
            self._scratch,
            opened,
            changed=self._act,
            refused=lambda error: connection.wrong_peer(loop.time(), str(error)),
            over=over,
        )
        self._gone.clear()
        connection.connecting(loop.time())
        driver.connect(self._options.host, self._options.port, self._credentials)
