"""The control link's adapter: the agent's connection to the controller.

Owns: connecting, registering, renewing, and coming back after a loss. Must not know: what the
controller's messages mean (`core`).

One connection at a time. It is renewed every third of the lease; a controller that has been
silent is noticed by the connection's end or by a write that fails. After a loss the agent tries
again after a pause that doubles from `retry_min_s` to `retry_max_s`, with jitter, so that a
controller that restarts is not met by all its agents at once. Meanwhile the agent goes on
serving by the last map.

With credentials the link is TLS, and nothing is said before the peer's certificate has proved that
it is a controller of this cluster.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.pool import PoolMapError
from kvcast.protocol.messages.control import (
    AgentMessage,
    ControllerMessage,
    Leave,
    Refused,
    Register,
    Registered,
)
from kvcast.protocol.messages.framing import FramingError, MessageCodec
from kvcast.service.identity import CONTROLLER
from kvcast.service.tls import HANDSHAKE_TIMEOUT_S, Credentials, PeerError, expect_peer

log = logging.getLogger(__name__)

_READ_BYTES: Final = 256 * 1024
_MAX_UNSENT_BYTES: Final = 4 * 1024 * 1024
"""What may wait to be sent to a controller that does not read; beyond, the link is made anew."""


@dataclass(frozen=True)
class ControlOptions:
    """Where the controller is, and how patient the agent is with it."""

    host: str
    port: int
    retry_min_s: float = 0.1
    retry_max_s: float = 3.0
    connect_timeout_s: float = 3.0
    register_timeout_s: float = 5.0


class RefusedError(Exception):
    """The controller does not take this agent; the message says why."""


class ControlLink:
    """Keeps the agent registered. `ready` is set when the first map has come."""

    def __init__(
        self,
        core: AgentCore,
        options: ControlOptions,
        register: Register,
        rng: random.Random,
        after: Callable[[], None],
        credentials: Credentials | None = None,
    ) -> None:
        self._core = core
        self._credentials = credentials
        self._options = options
        self._register = register
        self._rng = rng
        self._after = after
        self._writer: asyncio.StreamWriter | None = None
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        pause_s = self._options.retry_min_s
        while True:
            try:
                await self._connection()
            except RefusedError as error:
                log.error("the controller refuses this agent: %s", error)
                pause_s = self._options.retry_max_s
            except PeerError as error:
                self._core.metrics.control_wrong_peers_total += 1
                log.error("control link: %s", error)
                pause_s = self._options.retry_max_s
            except (
                OSError,
                TimeoutError,
                FramingError,
                PoolMapError,
                asyncio.IncompleteReadError,
            ) as error:
                log.warning("control link: %s", error or type(error).__name__)
            was_up = self._core.connected
            self._core.metrics.control_errors_total += 1
            self._core.control_lost()
            self._after()
            pause_s = (
                self._options.retry_min_s if was_up else min(2 * pause_s, self._options.retry_max_s)
            )
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))

    async def _connection(self) -> None:
        options = self._options
        tls = None if self._credentials is None else self._credentials.client()
        async with asyncio.timeout(options.connect_timeout_s):
            reader, writer = await asyncio.open_connection(
                options.host,
                options.port,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
            )
        if tls is not None:
            try:
                expect_peer(writer, CONTROLLER)
            except PeerError:
                writer.transport.abort()
                raise
        self._core.metrics.control_connects_total += 1
        codec = MessageCodec[ControllerMessage](ControllerMessage)
        renewing: asyncio.Task[None] | None = None
        try:
            writer.write(codec.encode(self._register))
            registered = False
            while True:
                if registered:
                    data = await reader.read(_READ_BYTES)
                else:
                    async with asyncio.timeout(options.register_timeout_s):
                        data = await reader.read(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the controller closed the connection")
                for message in codec.feed(data):
                    if registered:
                        self._core.control_message(asyncio.get_running_loop().time(), message)
                    elif isinstance(message, Registered):
                        registered = True
                        self._core.registered(message)
                        log.info(
                            "registered with the controller",
                            extra={"index": message.index, "lease_s": message.lease_s},
                        )
                        self._writer = writer
                        self._core.control_connected(self._teller(writer, codec))
                        renewing = asyncio.create_task(self._renew(writer, codec))
                    elif isinstance(message, Refused):
                        raise RefusedError(message.reason)
                    else:
                        raise FramingError(f"{type(message).__name__} before Registered")
                if self._core.pool is not None:
                    self.ready.set()
                self._after()
        finally:
            self._writer = None
            if renewing is not None:
                renewing.cancel()
            writer.close()

    def _teller(
        self, writer: asyncio.StreamWriter, codec: MessageCodec[ControllerMessage]
    ) -> Callable[[AgentMessage], None]:
        def tell(message: AgentMessage) -> None:
            if writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
                writer.transport.abort()
                return
            writer.write(codec.encode(message))

        return tell

    async def _renew(
        self, writer: asyncio.StreamWriter, codec: MessageCodec[ControllerMessage]
    ) -> None:
        tell = self._teller(writer, codec)
        while True:
            tell(self._core.renewal())
            await asyncio.sleep(self._core.lease_s / 3)

    async def leave(self) -> None:
        """Say goodbye, so that the controller need not wait for the lease."""
        if self._writer is None:
            return
        try:
            codec = MessageCodec[ControllerMessage](ControllerMessage)
            self._writer.write(codec.encode(Leave()))
            async with asyncio.timeout(1.0):
                await self._writer.drain()
        except (OSError, TimeoutError):
            pass
