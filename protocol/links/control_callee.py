"""The control link's callee: one agent's connection at the controller.

Owns: how long an agent may be silent, how much may wait for one that does not read, what is done to
one that speaks nonsense (closed and counted), and that a connection registers only as the node
that its certificate names. Must not know: what else a message means; it hands each to `received`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec
from kvcast.protocol.links.stream import LinkStream
from kvcast.protocol.messages.control import AgentMessage, Refused, Register
from kvcast.protocol.messages.framing import MessageCodec

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Longest message of an agent; a Renew with 256 hot blocks and 1,024 counters takes about
100 KiB."""
MAX_UNSENT_BYTES: Final = 8 << 20
"""A connection whose peer does not read is closed when so much waits for it."""
REGISTER_TIMEOUT_S: Final = 5.0


class EncodedOnce:
    """Encodes messages of which many are sent to all agents, one after the other."""

    def __init__(self) -> None:
        self._codec: MessageCodec[AgentMessage] = MessageCodec(AgentMessage)
        self._message: msgspec.Struct | None = None
        self._encoded = b""

    def __call__(self, message: msgspec.Struct) -> bytes:
        """The message's bytes; FramingError if there are too many. It must not change later."""
        if message is not self._message:
            self._encoded = self._codec.encode(message)
            self._message = message
        return self._encoded


class ControlCallee(LinkStream[AgentMessage]):
    """See the module's text. `certified`: the only node that it can register as; None = any.
    `idle_s`: how long an agent may be silent once it has said something."""

    def __init__(
        self,
        now: float,
        idle_s: float,
        received: Callable[[AgentMessage], None],
        counts: Counter[str],
        certified: str | None = None,
    ) -> None:
        super().__init__(
            AgentMessage, max_message_bytes=MAX_MESSAGE_BYTES, max_unsent_bytes=MAX_UNSENT_BYTES
        )
        self._idle_s = idle_s
        self._received = received
        self._counts = counts
        self._certified = certified
        self._deadline = now + REGISTER_TIMEOUT_S

    def send(self, now: float, message: msgspec.Struct | bytes) -> None:
        """Send a message, or what `EncodedOnce` made of it; a connection that does not read, or is
        about to close, loses it."""
        if self.closed or self._ending:
            self._counts["sends_to_closed"] += 1
        elif not self._send(message):
            self._counts["closed_not_reading"] += 1
            self._close(now)
        else:
            self._counts["messages_sent"] += 1

    def end(self, now: float) -> None:
        """Close when what was sent has gone out."""
        if not self.closed and not self._ending:
            self._counts["closed"] += 1
            self._end(now)

    def lost(self, now: float, why: str = "") -> None:
        if why and not self.closed:
            self._counts["connections_broken"] += 1
        self._close(now)

    def _message(self, now: float, message: AgentMessage) -> None:
        # Bytes that complete no message are no sign of life.
        self._deadline = now + self._idle_s
        self._counts["messages_received"] += 1
        if (
            self._certified is not None
            and isinstance(message, Register)
            and message.node_id != self._certified
        ):
            reason = f"this certificate is node {self._certified}'s"
            self._counts["refused_peers"] += 1
            self.problem = f"{message.node_id} registers, but {reason}"
            self.send(now, Refused(reason=reason))
            self._end(now)
        else:
            self._received(message)

    def _rules_broken(self, _error: Exception) -> None:
        self._counts["closed_malformed"] += 1

    def _late(self, now: float) -> None:
        self._counts["closed_silent"] += 1
        self._close(now)
