"""One connection's bytes: framed messages, blocks' bytes between them, and a deadline.

Owns: how bytes that come become messages and fill blocks, however they are cut; the order in which
messages and blocks leave; when a connection is over. Must not know: what a message means (the four
ends of the links, which inherit from this, do), or how bytes travel.

Whoever drives a connection tells it what happens (`received` or `filled`, `lost`, `handle_timer`),
and after each event takes `bytes_to_send` until there are none or its transport is full, looks
whether the connection is `closed`, and when `get_timer` is due. Back-pressure works both ways: what
is not taken stays here, and while `wants_bytes` is False nothing should be read.

A block's bytes need not pass through here: while `destination` is not None, what comes next is to
be written there, and `filled` says how much was. Whoever reads more than that, because messages
and blocks lie close together, hands everything to `received`, which copies.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from kvcast.protocol.messages.framing import FramingError, MessageCodec

M = TypeVar("M", bound=msgspec.Struct)

LINGER_S = 2.0
"""How long a connection that ends may take to send what it still has to."""
MAX_PROBLEM_CHARS = 200
"""How much is kept of what the other side did wrong."""


class LinkError(ValueError):
    """The other side broke the rules of the conversation, or whoever was handed a message of its
    cannot use it: the connection ends."""


class LinkStream(Generic[M]):
    """One end of a connection. `types`: the messages that the other end may send. More than
    `max_unsent_bytes` of messages that the transport does not take end the connection."""

    one_at_a_time: ClassVar[bool] = False
    """The next message is looked at only when everything that was to be sent has been taken."""

    def __init__(
        self, types: Any, *, max_message_bytes: int, max_unsent_bytes: int = 1 << 62
    ) -> None:
        self.closed = False
        """It is over: no more events, and the transport is to be closed."""
        self.problem = ""
        """What the other side did wrong, where that ended it."""
        self._codec: MessageCodec[M] = MessageCodec(types, max_message_bytes=max_message_bytes)
        self._max_unsent_bytes = max_unsent_bytes
        self._buffer = bytearray()
        self._room: memoryview | None = None
        self._filled_bytes = 0
        self._out: deque[bytes | memoryview] = deque()
        """Encoded messages, and what is left of blocks."""
        self._unsent_bytes = 0
        self._deadline: float | None = None
        self._ending = False
        self._proceeding = False

    # --- what an end does about it ------------------------------------------------------------

    def _message(self, now: float, message: M) -> None:
        """A message has come."""
        raise NotImplementedError

    def _block_came(self, now: float) -> None:
        """The room that `_receive_block` gave is full."""

    def _block_sending(self, size_bytes: int) -> None:
        """So many bytes of a block are on their way."""

    def _drained(self, now: float) -> None:
        """Everything that was to be sent has been taken."""

    def _late(self, now: float) -> None:
        """The deadline has passed."""
        self._close(now)

    def _rules_broken(self, error: FramingError | LinkError) -> None:
        """The other side broke them; the connection is about to be closed."""

    def _over(self, now: float) -> None:
        """The connection is over, for whatever reason; called once."""

    # --- for the ends -------------------------------------------------------------------------

    def _send(self, message: msgspec.Struct) -> bool:
        """Send a message; False if so much waits already that the connection must end."""
        if self.closed or self._ending:
            return True
        data = self._codec.encode(message)
        if self._unsent_bytes > self._max_unsent_bytes:
            return False
        self._unsent_bytes += len(data)
        self._out.append(data)
        return True

    def _send_block(self, view: memoryview) -> None:
        self._out.append(view)

    def _receive_block(self, room: memoryview) -> None:
        """What comes next are bytes for `room`, which is not empty."""
        assert self._room is None
        assert len(room) > 0
        self._room = room
        self._filled_bytes = 0

    def _end(self, now: float) -> None:
        """Close when what is to be sent has been taken, or after `LINGER_S`."""
        if not self.closed:
            self._ending = True
            self._room = None
            self._deadline = now + LINGER_S
            self._buffer.clear()
            if not self._out:
                self._close(now)

    def _close(self, now: float) -> None:
        """Close at once."""
        if self.closed:
            return
        self.closed = True
        self._deadline = None
        self._room = None
        self._out.clear()
        self._unsent_bytes = 0
        self._buffer.clear()
        self._over(now)

    # --- bytes in -----------------------------------------------------------------------------

    @property
    def wants_bytes(self) -> bool:
        """Whether to go on reading."""
        return not self.closed and (
            self._room is not None or not (self.one_at_a_time and self._out)
        )

    def destination(self) -> memoryview | None:
        """Where the bytes that come next belong, if they are a block's."""
        return None if self._room is None else self._room[self._filled_bytes :]

    def filled(self, now: float, size_bytes: int) -> None:
        """So many bytes have been written to the beginning of `destination`."""
        if self._room is not None:
            self._filled_bytes += size_bytes
            self._proceed(now)

    def received(self, now: float, data: bytes) -> None:
        """Bytes have come."""
        if not self.closed and not self._ending:
            self._buffer += data
            self._proceed(now)

    def _proceed(self, now: float) -> None:
        if self._proceeding:
            return
        self._proceeding = True
        try:
            while not self.closed and not self._ending and self._step(now):
                pass
        except (FramingError, LinkError) as error:
            self.problem = str(error)[:MAX_PROBLEM_CHARS]
            self._rules_broken(error)
            self._close(now)
        finally:
            self._proceeding = False

    def _step(self, now: float) -> bool:
        """Use up some of what has come; False if that needs more, or has to wait."""
        if self._room is not None:
            size = min(len(self._buffer), len(self._room) - self._filled_bytes)
            if size:
                self._room[self._filled_bytes : self._filled_bytes + size] = self._buffer[:size]
                del self._buffer[:size]
                self._filled_bytes += size
            if self._filled_bytes < len(self._room):
                return False
            self._room = None
            self._block_came(now)
            return True
        if self.one_at_a_time and self._out:
            return False
        message = self._codec.take(self._buffer)
        if message is None:
            return False
        self._message(now, message)
        return True

    # --- bytes out ----------------------------------------------------------------------------

    @property
    def sending_block(self) -> bool:
        """Whether what `bytes_to_send` gives next is a block's."""
        return bool(self._out) and isinstance(self._out[0], memoryview)

    def bytes_to_send(self, now: float, at_most: int) -> bytes:
        """What is to be sent next: messages, or up to `at_most` bytes of a block, copied now; b""
        if there is nothing."""
        out = self._out
        if not out:
            return b""
        if self.sending_block:
            view = out[0]
            data = bytes(view[:at_most])
            if len(data) < len(view):
                out[0] = view[at_most:]
            else:
                out.popleft()
            self._block_sending(len(data))
        else:
            messages = []
            while out and not self.sending_block:
                messages.append(bytes(out.popleft()))
            data = b"".join(messages)
            self._unsent_bytes -= len(data)
        if not out:
            if self._ending:
                self._close(now)
            else:
                self._drained(now)
                self._proceed(now)
        return data

    # --- time, and the end --------------------------------------------------------------------

    def get_timer(self) -> float | None:
        """When `handle_timer` is to be called; None = no need."""
        return self._deadline

    def handle_timer(self, now: float) -> None:
        """Do what has become due by `now`."""
        if self._deadline is not None and now >= self._deadline:
            if self._ending:
                self._close(now)
            else:
                self._late(now)

    def lost(self, now: float, _why: str = "") -> None:
        """The connection is gone, or the other side sends no more. `_why`: what broke it."""
        self._close(now)

    def check(self) -> None:
        """AssertionError if this end contradicts itself."""
        assert self._unsent_bytes == sum(len(item) for item in self._out if isinstance(item, bytes))
        if self.closed:
            assert self._room is None
            assert not self._out
            assert self._deadline is None
        elif self._room is not None:
            assert not self._buffer, "bytes wait though there is room for them"
