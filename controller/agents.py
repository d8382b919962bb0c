"""The control link's server: TCP connections of agents, framed messages in and out.

Owns: the listening socket, connections by number, their bounds (how many, how long silent, how
much unsent), and what is done to one that speaks nonsense (closed and counted). Must not know:
what a message means; it hands each to `received` and sends what it is told to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import msgspec
from kvcast.protocol.control import AgentMessage
from kvcast.protocol.framing import FramingError, MessageCodec

log = logging.getLogger("kvcast.controller.agents")

MAX_CONNECTIONS = 64
"""Twice the agents that a pool can have: old connections may linger."""
MAX_MESSAGE_BYTES = 1 << 20
"""Longest message of an agent; a Renew with 256 hot blocks takes about 16 KiB."""
MAX_UNSENT_BYTES = 8 << 20
"""A connection whose peer does not read is closed when so much waits for it."""
REGISTER_TIMEOUT_S = 5.0
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
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._idle_s = idle_s
        self._received = received
        self._disconnected = disconnected
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._codec: MessageCodec[AgentMessage] = MessageCodec(AgentMessage)
        self._last = 0
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address, with the port that was picked for 0."""
        self._server = await asyncio.start_server(self._accepted, host, port, backlog=128)
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def stop(self) -> None:
        """Close the listener and every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        if self._server is not None:
            await self._server.wait_closed()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def send(self, connection: int, message: msgspec.Struct) -> None:
        """Queue a message; a connection that is gone, or does not read, loses it."""
        writer = self._connections.get(connection)
        if writer is None or writer.transport.is_closing():
            self.counts["sends_to_closed"] += 1
            return
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.counts["closed_not_reading"] += 1
            writer.transport.abort()
            return
        writer.write(self._codec.encode(message))
        self.counts["messages_sent"] += 1

    def close(self, connection: int, reason: str) -> None:
        """End a connection when what was sent has gone out."""
        writer = self._connections.get(connection)
        if writer is not None and not writer.transport.is_closing():
            log.info("closing an agent's connection: %s", reason)
            self.counts["closed"] += 1
            writer.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            self.counts["refused_at_bound"] += 1
            writer.transport.abort()
            return
        self._tasks.add(task)
        self._last += 1
        connection = self._last
        self._connections[connection] = writer
        self.counts["connections"] += 1
        try:
            await self._serve(connection, reader)
        except FramingError as error:
            self.counts["closed_malformed"] += 1
            log.warning("an agent's bytes are no message: %s", str(error)[:200])
        except TimeoutError:
            self.counts["closed_silent"] += 1
        except ConnectionError:
            self.counts["connections_broken"] += 1
        except Exception:
            # A mistake of ours must not cost more than this connection.
            self.counts["closed_on_error"] += 1
            log.exception("an agent's message could not be handled")
        except asyncio.CancelledError:
            # Only `stop` cancels; ending normally keeps asyncio's stream server from logging it.
            pass
        finally:
            del self._connections[connection]
            self._tasks.discard(task)
            self._disconnected(connection)
            writer.close()
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await writer.wait_closed()
            except (TimeoutError, ConnectionError, asyncio.CancelledError):
                writer.transport.abort()

    async def _serve(self, connection: int, reader: asyncio.StreamReader) -> None:
        codec: MessageCodec[AgentMessage] = MessageCodec(
            AgentMessage, max_message_bytes=MAX_MESSAGE_BYTES
        )
        timeout_s = REGISTER_TIMEOUT_S
        while True:
            # Bytes that complete no message do not count as a sign of life.
            async with asyncio.timeout(timeout_s):
                heard = False
                while not heard:
                    data = await reader.read(READ_BYTES)
                    if not data:
                        return
                    for message in codec.feed(data):
                        heard = True
                        self.counts["messages_received"] += 1
                        self._received(connection, message)
            timeout_s = self._idle_s
