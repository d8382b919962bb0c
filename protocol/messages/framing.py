"""Length-prefixed MessagePack: the framing of every stream that kvcast's own parts speak.

Owns: how a typed message becomes bytes on a stream and back. The control link (agent to
controller), the local API (Unix socket) and the bulk link (agent to agent) differ only in their
message types. Must not know: sockets, tasks, clocks, or what a message means.

A frame is a 4-byte big-endian length N, 1 <= N <= limit, and N bytes of MessagePack: a map that
msgspec decodes into one of a closed union of tagged structs. Anything else is a `FramingError`,
after which the stream is useless and must be closed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Longest message accepted on a stream, in bytes; a bucket map of 32 nodes takes 20 KiB."""

MAX_QUOTED_CHARS = 200
"""How much of the reason, which quotes the message, an error repeats."""

_LENGTH = struct.Struct("!I")

M = TypeVar("M", bound=msgspec.Struct)


class FramingError(ValueError):
    """A peer sent bytes that are no message of this stream."""


class MessageCodec(Generic[M]):
    """Encodes and incrementally decodes the messages of one stream.

    `types` is the union that `decode` accepts, e.g. ``Register | Renew``. One instance serves one
    stream: `feed` keeps the bytes of an incomplete message, never more than
    `max_message_bytes` + 4.
    """

    def __init__(self, types: Any, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(types)
        self._limit = max_message_bytes
        self._buffer = bytearray()

    def encode(self, message: msgspec.Struct) -> bytes:
        """One message as bytes, length prefix included; FramingError if it exceeds the limit."""
        body = self._encoder.encode(message)
        if len(body) > self._limit:
            raise FramingError(f"message of {len(body)} bytes exceeds the limit of {self._limit}")
        return _LENGTH.pack(len(body)) + body

    def feed(self, data: bytes) -> Iterator[M]:
        """Add received bytes; yield every message that they complete.

        Raises FramingError for a length of 0 or over the limit, and for a body that is not one
        of the stream's messages.
        """
        self._buffer += data
        while (message := self.take(self._buffer)) is not None:
            yield message

    def take(self, buffer: bytearray) -> M | None:
        """The first message of `buffer`, which is taken out of it; None if it is not whole yet.
        FramingError as in `feed`."""
        if len(buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if not 1 <= length <= self._limit:
            raise FramingError(f"message length {length} is outside 1..{self._limit}")
        end = _LENGTH.size + length
        if len(buffer) < end:
            return None
        body = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        return self.decode(body)

    def missing_bytes(self, buffer: bytearray) -> int:
        """How many bytes the first message of `buffer` lacks; 0 if that is not known."""
        if len(buffer) < _LENGTH.size:
            return 0
        length: int = _LENGTH.unpack_from(buffer)[0]
        return max(0, min(length, self._limit) + _LENGTH.size - len(buffer))

    def decode(self, body: bytes) -> M:
        """One message from its body, without the length prefix; FramingError if malformed."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            why = str(error)[:MAX_QUOTED_CHARS]  # it may quote a megabyte of what was sent
            raise FramingError(f"not a message of this stream: {why}") from error
