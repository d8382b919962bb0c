"""The control link's server: TCP connections of agents, framed messages in and out.

Owns: connections by number, their bounds (how many, how long silent, how much unsent), what is done
to one that speaks nonsense (closed and counted), and, with TLS, that only nodes get in and that a
connection registers only as the node that its certificate names. Must not know: what else a
message means; it hands each to `received` and sends what it is told to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import msgspec
from kvcast.protocol.messages.control import AgentMessage, Refused, Register
from kvcast.protocol.messages.framing import FramingError, MessageCodec
from kvcast.service.identity import NODE
from kvcast.service.listener import Bounds, Listener, streams
from kvcast.service.tls import Credentials, PeerError, expect_peer

log = logging.getLogger("kvcast.controller.agent_links")

MAX_CONNECTIONS = 64
"""Twice the agents that a pool can have: old connections may linger."""
MAX_CONNECTIONS_PER_ADDRESS = 40
"""All nodes may be behind one address, but nobody there can take every place."""
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
        credentials: Credentials | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._credentials = credentials
        self._idle_s = idle_s
        self._received = received
        self._disconnected = disconnected
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._codec: MessageCodec[AgentMessage] = MessageCodec(AgentMessage)
        self._last = 0
        self._listener = Listener(
            streams(self._accepted),
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
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)

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
        self._tasks.add(task)
        self._last += 1
        connection = self._last
        self._connections[connection] = writer
        try:
            node_id = None
            if self._credentials is not None:
                node_id = expect_peer(writer, NODE).name
            await self._serve(connection, reader, node_id)
        except PeerError as error:
            self.counts["refused_peers"] += 1
            log.warning("a connection to the agents' entry point was refused: %s", error)
        except FramingError as error:
            self.counts["closed_malformed"] += 1
            log.warning("an agent's bytes are no message: %s", str(error)[:200])
        except TimeoutError:
            self.counts["closed_silent"] += 1
        except OSError:
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
            except (TimeoutError, OSError, asyncio.CancelledError):
                writer.transport.abort()

    async def _serve(
        self, connection: int, reader: asyncio.StreamReader, node_id: str | None
    ) -> None:
        """Hand on what comes; `node_id`: the node that the certificate names, None without TLS."""
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
                        if (
                            node_id is not None
                            and isinstance(message, Register)
                            and message.node_id != node_id
                        ):
                            reason = f"this certificate is node {node_id}'s"
                            self.send(connection, Refused(reason=reason))
                            raise PeerError(f"{message.node_id} registers, but {reason}")
                        self._received(connection, message)
            timeout_s = self._idle_s
