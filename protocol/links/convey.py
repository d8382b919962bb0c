"""How a reader gets a conveyor from a home: a connection of the bulk link with a single call, after
which the connection is the conveyor.

Owns: what is said until both have agreed. Must not know: sockets, or what goes over the conveyor
(`kvcast.protocol.conveyor`).
"""

from __future__ import annotations

from kvcast.protocol.links.stream import LinkError, LinkStream
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    CONVEYOR_VERSION,
    DONE,
    MAX_BULK_MESSAGE_BYTES,
    BulkConvey,
    BulkDone,
    BulkHello,
)
from kvcast.protocol.messages.control import NodeInfo


class ConveyCall(LinkStream[BulkDone]):
    """Our end of a connection to `node` that is to be a conveyor, until `deadline`."""

    def __init__(
        self, node_id: str, node: NodeInfo, deadline: float, *, pushes: bool = False
    ) -> None:
        """`node_id`: who we are; `pushes`: what it is for, as `BulkConvey` says."""
        super().__init__(BulkDone, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        self.node = node
        self.agreed = False
        """It is one: whoever has the connection takes it, and closes this."""
        self._node_id = node_id
        self._pushes = pushes
        self._deadline = deadline

    def connected(self) -> None:
        """The connection stands."""
        self._send(BulkHello(BULK_PROTOCOL_VERSION, self._node_id))
        self._send(BulkConvey(CONVEYOR_VERSION, self._pushes))

    def end(self, now: float) -> None:
        """Close; harmless when repeated."""
        self._close(now)

    def _message(self, now: float, message: BulkDone) -> None:
        if message.status != DONE:
            self._close(now)
        elif self._buffer:
            raise LinkError("a conveyor begins with bytes that nobody has asked for")
        else:
            self.agreed = self._held_up = True
