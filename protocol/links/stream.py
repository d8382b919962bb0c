"""One connection's bytes: framed messages, blocks' bytes between them, and a deadline.

Owns: how bytes that come become messages and fill blocks, however they are cut; the order in which
messages and blocks leave; when a connection is over. Must not know: what a message means (the four
ends of the links, which inherit from this, do), or how bytes travel.

Whoever drives a connection tells it what happens (`received` or `filled`, `lost`, `handle_timer`),
and after each event takes what there is to send until there is none or its transport is full, looks
whether the connection is `closed`, and when `get_timer` is due. Back-pressure works both ways: what
is not taken stays here, and while `wants_bytes` is False nothing should be read.

A block's bytes need not pass through here. While there are `destinations`, what comes next is to be
written there, one after the other, and `filled` says how much was; `pieces_to_send` gives blocks in
place, and `sent` says how much has been taken. Whoever reads more than there are destinations
for hands everything to `received`, which copies; so it had better read no more than `scratch_bytes`
at once. Who makes the digest of a block while its bytes come, when they are in the cache anyway,
fills `rooms` and says what it is; else it is made when all are there.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import msgspec
from kvcast.protocol.messages.framing import FramingError, MessageCodec
from kvcast.protocol.messages.wire import digest_of

M = TypeVar("M", bound=msgspec.Struct)

LINGER_S = 2.0
"""How long a connection that ends may take to send what it still has to."""
MAX_PROBLEM_CHARS = 200
"""How much is kept of what the other side did wrong."""


MAX_PIECES: Final = 64
"""Destinations, and pieces to send, that are named at once."""
DESTINED_BYTES: Final = 256 * 1024
"""So much of destinations is named at once: what a processor's cache still has when its digest is
made."""
_SCRATCH_BYTES: Final = 4096
_SINK: Final = memoryview(bytearray(64 * 1024))
"""Where bytes go that nobody wants."""


class LinkError(ValueError):
    """The other side broke the rules of the conversation, or whoever was handed a message of its
    cannot use it: the connection ends."""


class Room:
    """A block that is coming, of `size` bytes, the first `there` of which are in `block`."""

    __slots__ = ("block", "size", "there")

    def __init__(self, block: memoryview | None, size: int, there: int) -> None:
        self.block = block
        """None: nobody wants these bytes."""
        self.size = size
        self.there = there

    def next(self, at_most: int) -> memoryview:
        """Where the next bytes go, up to so many."""
        if self.block is None:
            return _SINK[: min(at_most, self.size - self.there)]
        return self.block[self.there : self.there + at_most]


class Landed(NamedTuple):
    """What came of filling `LinkStream.rooms`."""

    size_bytes: int
    digests: list[int]
    """Of the blocks that are complete now; of those that nobody wants anything."""
    waits: bool
    """There is no more just now."""
    lost: str | None
    """The connection is gone, and why ("" = it was closed)."""


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
        self.rooms: deque[Room] = deque()
        """What comes next belongs there, in this order."""
        self._out: deque[bytes | memoryview] = deque()
        """Encoded messages, and what is left of blocks."""
        self._unsent_bytes = 0
        self._deadline: float | None = None
        self._ending = False
        self._proceeding = False
        self._held_up = False
        """What was asked for is not there yet: nothing more is looked at until it is."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to send without an event; the driver sets it."""

    # --- what an end does about it ------------------------------------------------------------

    def _message(self, now: float, message: M) -> None:
        """A message has come."""
        raise NotImplementedError

    def _block_came(self, now: float, digest: int | None) -> None:
        """The first of the blocks that are expected is there; the digest of the whole block, None
        if nobody wanted it."""

    def _block_coming(self, now: float) -> None:
        """Some of a block has come."""

    def _bytes_coming(self, now: float, size_bytes: int) -> None:
        """So many bytes of a block have come."""

    def _block_sending(self, now: float, size_bytes: int) -> None:
        """So many bytes of a block are on their way."""

    def _allowed_bytes(self, now: float) -> int:
        """How many bytes of blocks may be sent now; 0: it is asked again when the timer is due."""
        return sys.maxsize

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

    def _send(self, message: msgspec.Struct | bytes) -> bool:
        """Send a message, which may be encoded already; False if so much waits already that the
        connection must end."""
        if self.closed or self._ending:
            return True
        data = message if isinstance(message, bytes) else self._codec.encode(message)
        if self._unsent_bytes > self._max_unsent_bytes:
            return False
        self._unsent_bytes += len(data)
        self._out.append(data)
        return True

    def _send_block(self, view: memoryview) -> None:
        self._out.append(view)

    def _receive_block(self, block: memoryview, start_bytes: int = 0) -> None:
        """What comes next, after what is expected already, are the bytes of `block` from
        `start_bytes` on, at least one; those before are there."""
        assert 0 <= start_bytes < len(block)
        self.rooms.append(Room(block, len(block), start_bytes))

    def _skip_block(self, size_bytes: int) -> None:
        """What comes next, after what is expected already, nobody wants."""
        self.rooms.append(Room(None, size_bytes, 0))

    def _end(self, now: float) -> None:
        """Close when what is to be sent has been taken, or after `LINGER_S`."""
        if not self.closed:
            self._ending = True
            self.rooms.clear()
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
        self.rooms.clear()
        self._out.clear()
        self._unsent_bytes = 0
        self._buffer.clear()
        self._over(now)

    @property
    def busy(self) -> bool:
        """Whether something is on its way, either way, as far as can be seen from here."""
        return not self.closed and bool(self.rooms or self._out or self._buffer or self._held_up)

    # --- bytes in -----------------------------------------------------------------------------

    @property
    def wants_bytes(self) -> bool:
        """Whether to go on reading."""
        waits = self._held_up or (self.one_at_a_time and bool(self._out))
        return not self.closed and (bool(self.rooms) or not waits)

    def receivable_bytes(self, now: float) -> int:
        """How many bytes of blocks may be read now, where there are `rooms`; 0: none, and nothing
        at all until `wants_bytes` again. To be asked where there is something to read."""
        return sys.maxsize

    @property
    def window_bytes(self) -> int:
        """How much the other end may send of blocks before it is read, where that can be said."""
        return sys.maxsize

    @property
    def least_bytes(self) -> int:
        """So many bytes are sure to come, or 1: fewer are not worth waking up for."""
        return self.rooms[0].size - self.rooms[0].there if self.rooms else 1

    @property
    def scratch_bytes(self) -> int:
        """How much to read at once while there are no destinations: not much, since blocks may
        follow, but what is left of a long message."""
        return max(_SCRATCH_BYTES, self._codec.missing_bytes(self._buffer))

    def destinations(self) -> list[memoryview]:
        """Where the bytes that come next belong, if they are blocks'; at most `MAX_PIECES`, of
        `DESTINED_BYTES` together."""
        views = []
        left_bytes = DESTINED_BYTES
        for room in islice(self.rooms, MAX_PIECES):
            view = room.next(left_bytes)
            views.append(view)
            left_bytes -= len(view)
            if room.there + len(view) < room.size or not left_bytes:
                break
        return views

    def destination(self) -> memoryview | None:
        """The first of the `destinations`; None if there are none."""
        if not self.rooms:
            return None
        return self.rooms[0].next(self.rooms[0].size)

    def filled(self, now: float, size_bytes: int, digests: Sequence[int] | None = None) -> None:
        """So many bytes have been written to the `destinations`, or `rooms`. `digests`: those of
        the blocks that are complete by that, where they are known."""
        rooms = self.rooms
        known = iter(digests) if digests is not None else None
        try:
            while size_bytes and rooms:
                room = rooms[0]
                part = min(size_bytes, room.size - room.there)
                size_bytes -= part
                complete = room.there + part == room.size
                self._take(now, part, next(known) if complete and known is not None else None)
        except LinkError as error:
            self._break(now, error)
        self._proceed(now)

    def received(self, now: float, data: bytes) -> None:
        """Bytes have come."""
        if not self.closed and not self._ending:
            self._buffer += data
            self._proceed(now)

    def _take(self, now: float, size_bytes: int, digest: int | None) -> None:
        """So many more bytes are in the first room; the digest of them all, where it is known."""
        room = self.rooms[0]
        room.there += size_bytes
        self._bytes_coming(now, size_bytes)
        if room.there < room.size:
            self._block_coming(now)
            return
        self.rooms.popleft()
        if room.block is None:
            digest = None
        elif digest is None:
            digest = digest_of(room.block)
        self._block_came(now, digest)

    def _break(self, now: float, error: FramingError | LinkError) -> None:
        self.problem = str(error)[:MAX_PROBLEM_CHARS]
        self._rules_broken(error)
        self._close(now)

    def _proceed(self, now: float) -> None:
        if self._proceeding:
            return
        self._proceeding = True
        try:
            while not self.closed and not self._ending and self._step(now):
                pass
        except (FramingError, LinkError) as error:
            self._break(now, error)
        finally:
            self._proceeding = False

    def _step(self, now: float) -> bool:
        """Use up some of what has come; False if that needs more, or has to wait."""
        if self.rooms:
            room = self.rooms[0]
            size = min(len(self._buffer), room.size - room.there)
            if not size:
                return False
            if room.block is not None:
                room.block[room.there : room.there + size] = self._buffer[:size]
            del self._buffer[:size]
            self._take(now, size, None)
            return True
        if self._held_up or (self.one_at_a_time and self._out):
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
        if there is nothing. It counts as sent."""
        out = self._out
        if not out:
            return b""
        if self.sending_block:
            data = bytes(out[0][: min(at_most, self._allowed_bytes(now))])
        else:
            data = b"".join(takewhile(_is_message, out))
        self.sent(now, len(data))
        return data

    def pieces_to_send(self, now: float) -> list[bytes | memoryview]:
        """What is to be sent next, at most `MAX_PIECES` of messages and of what is left of blocks,
        which are not copied: they stay as they are until `sent` says that they were taken."""
        pieces = list(islice(self._out, MAX_PIECES))
        if any(isinstance(piece, memoryview) for piece in pieces):
            left = self._allowed_bytes(now)
            if left < sum(map(len, pieces)):
                return _cut(pieces, left)
        return pieces

    def sent(self, now: float, size_bytes: int) -> None:
        """So many bytes of the `pieces_to_send` have been taken."""
        out = self._out
        of_blocks = 0
        while size_bytes:
            piece = out[0]
            part = min(size_bytes, len(piece))
            size_bytes -= part
            if isinstance(piece, memoryview):
                of_blocks += part
            else:
                self._unsent_bytes -= part
            if part < len(piece):
                out[0] = piece[part:]
            else:
                out.popleft()
        if of_blocks:
            self._block_sending(now, of_blocks)
        if not out:
            if self._ending:
                self._close(now)
            else:
                self._drained(now)
                self._proceed(now)

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
            assert not self.rooms
            assert not self._out
            assert self._deadline is None
        elif self.rooms:
            assert all(room.there < room.size for room in self.rooms)
            assert not self._buffer, "bytes wait though there is room for them"


def _is_message(piece: object) -> bool:
    return isinstance(piece, bytes)


def _cut(pieces: list[bytes | memoryview], left: int) -> list[bytes | memoryview]:
    """Messages whole, and of blocks no more than so many bytes in all; nothing behind a cut."""
    cut: list[bytes | memoryview] = []
    for piece in pieces:
        part = piece[:left] if isinstance(piece, memoryview) else piece
        if part:
            cut.append(part)
        if len(part) < len(piece):
            break
        if isinstance(piece, memoryview):
            left -= len(part)
    return cut
