"""Hostile clients of a stream: say something, listen to the end, and name what came of it.

Owns: one connection after the other, and from the client's side an outcome for each connection
and for each answer. Must not know: what the server counts; the bench compares the two.

A client sends its bytes, and listens until the server closes or is silent for `_SILENCE_S`. It
then closes its own half only, and reads what still comes: so every answer that the server gave is
counted here too. Where closing could hide what a slow server is about to do, `fence` comes first: a
well-formed request on a connection of its own, and once that is answered, what was said before it
has been dealt with.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvcast.protocol.messages import framing, local
from kvcast.protocol.messages.local import LOCAL_PROTOCOL_VERSION

_SILENCE_S = 0.2
_PATIENCE_S = 60.0
"""After so long a server that neither answers nor closes hangs; the connection is counted so."""

CLOSED = "closed by the server"
RESET = "reset by the server"
SILENT = "silent"


class HostileStream:
    """Clients of one server. `next_client()`: what the next one says, and who understands what
    comes back. `outcomes` counts connections, `answers` what was answered on them."""

    def __init__(
        self,
        family: socket.AddressFamily,
        address: Any,
        next_client: Callable[[], tuple[bytes, _Listener]],
    ) -> None:
        self._family = family
        self._address = address
        self._next_client = next_client
        self.connections = 0
        self.outcomes: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()

    async def fence(self) -> bool:
        """Have a well-formed request answered on a connection of its own, where it matters."""
        return False

    async def one(self) -> int:
        """One connection; returns how many bytes were sent."""
        loop = asyncio.get_running_loop()
        payload, listener = self._next_client()
        with socket.socket(self._family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await loop.sock_connect(sock, self._address)
            except (OSError, TimeoutError) as error:
                self.outcomes[f"not connected ({type(error).__name__})"] += 1
                return 0
            self.connections += 1
            writing = asyncio.create_task(self._write(sock, payload))
            try:
                ending = await self._listen(sock, listener)
            finally:
                sent = await writing
            self.outcomes[listener.outcome(ending)] += 1
            self.answers.update(listener.answers)
        return sent

    async def _write(self, sock: socket.socket, payload: bytes) -> int:
        """How much of it the kernel took before the server closed."""
        loop = asyncio.get_running_loop()
        view, sent = memoryview(payload), 0
        while sent < len(payload):
            try:
                sent += sock.send(view[sent:])
            except BlockingIOError:
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        await loop.sock_sendall(sock, view[sent:])
                except (OSError, TimeoutError):
                    return sent
                return len(payload)
            except OSError:
                return sent
        return sent

    async def _listen(self, sock: socket.socket, listener: _Listener) -> str:
        """Listen to the end; how it ended, before our own half was closed."""
        ending = await self._until_silent(sock, listener)
        if ending == SILENT and not listener.finished and await self.fence():
            ending = await self._until_silent(sock, listener)
        if ending != SILENT:
            return ending
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            return RESET
        end = await self._until_silent(sock, listener, _PATIENCE_S)
        return "hung" if end == SILENT else SILENT

    async def _until_silent(
        self, sock: socket.socket, listener: _Listener, silence_s: float = _SILENCE_S
    ) -> str:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    data = await loop.sock_recv(sock, 65536)
            except TimeoutError:
                return SILENT
            except OSError:
                return RESET
            if not data:
                return CLOSED
            listener.hear(data)
            if listener.finished and silence_s == _SILENCE_S:
                return SILENT


class _Listener:
    """Understands what comes back on one connection; this one counts bytes."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.finished = False
        """Nothing more needs to be waited for."""

    def hear(self, data: bytes) -> None:
        self.answers["bytes"] += len(data)

    def outcome(self, ending: str) -> str:
        """What the connection came to; `ending` is how it ended."""
        return ending


# --- an agent's Unix socket -------------------------------------------------------------------


TO_THE_END = "answered to the end"
REJECTED = "rejected"
CUT_OFF = "cut off"
IGNORED = "waited for more"


class LocalHostiles(HostileStream):
    """Clients of an agent's Unix socket."""

    def __init__(self, path: str, make: Callable[[int], bytes]) -> None:
        """`make(number)` gives one connection's bytes, the last of them GetStats of `number`."""
        numbers = itertools.count(1 << 40)  # no hostile request has so large a number

        def next_client() -> tuple[bytes, _Listener]:
            number = next(numbers)
            return make(number), _LocalListener(number)

        super().__init__(socket.AF_UNIX, path, next_client)
        self.fences = 0

    async def fence(self) -> bool:
        codec = _server_codec()
        self.fences += 1
        reader, writer = await asyncio.open_unix_connection(self._address)
        try:
            for message in (local.Hello(LOCAL_PROTOCOL_VERSION, "fence"), local.GetStats(1)):
                writer.write(codec.encode(message))
                answered = False
                while not answered:
                    async with asyncio.timeout(_PATIENCE_S):
                        data = await reader.read(65536)
                    if not data:
                        raise ConnectionResetError("a well-formed client was cut off")
                    answered = any(True for _ in codec.feed(data))
        finally:
            writer.close()
            await writer.wait_closed()
        return True


def _server_codec() -> framing.MessageCodec[Any]:
    return framing.MessageCodec(
        local.ServerMessage, max_message_bytes=local.MAX_LOCAL_MESSAGE_BYTES
    )


class _LocalListener(_Listener):
    def __init__(self, last_request: int) -> None:
        super().__init__()
        self._last = last_request
        self._codec = _server_codec()
        self._rejected = False

    def hear(self, data: bytes) -> None:
        for message in self._codec.feed(data):
            if isinstance(message, local.Rejected):
                self._rejected = True
            elif not isinstance(message, local.Welcome):
                status = message.status if isinstance(message, local.Failed) else "done"
                self.answers[f"{type(message).__name__} {status}"] += 1
                self.finished = self.finished or message.request == self._last

    def outcome(self, ending: str) -> str:
        if ending == "hung":
            return ending
        if self._rejected:
            return REJECTED
        if self.finished:
            return TO_THE_END
        return IGNORED if ending == SILENT else CUT_OFF


# --- the HTTP API -----------------------------------------------------------------------------


UNANSWERED = "closed unanswered"


def http_hostiles(address: tuple[str, int], make: Callable[[], bytes]) -> HostileStream:
    """Clients of the HTTP API; `make()` gives one connection's bytes."""
    return HostileStream(socket.AF_INET, address, lambda: (make(), _HttpListener()))


class _HttpListener(_Listener):
    _buffer = b""

    def hear(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            first, *lines = head.split(b"\r\n")
            words = first.split(b" ", 2)
            if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
                self.answers["no HTTP"] += 1
                self._buffer = b""
                return
            headers = dict(line.lower().split(b": ", 1) for line in lines)
            length = int(headers.get(b"content-length", b"0"))
            if len(rest) < length:
                return
            self.answers[words[1].decode()] += 1
            self._buffer = rest[length:]

    def outcome(self, ending: str) -> str:
        if ending == "hung":
            return ending
        if self.answers:
            return "answered"
        return IGNORED if ending == SILENT else UNANSWERED


# --- any TCP port -----------------------------------------------------------------------------


def noise_hostiles(address: tuple[str, int], rng: random.Random) -> HostileStream:
    """Clients of a TCP port that do not speak its protocol: noise, at times behind a length.

    Nothing that could be understood: where no TLS asks who is there, a well-formed message on a
    link between parts is believed, and no hostile input.
    """

    def next_client() -> tuple[bytes, _Listener]:
        noise = rng.randbytes(rng.choice((0, 1, 3, 100, 5_000, 100_000)))
        draw = rng.random()
        if draw < 0.3:
            noise = len(noise).to_bytes(4, "big") + noise
        elif draw < 0.5:
            noise = b"\x16\x03\x01" + noise  # as TLS begins
        return noise, _Listener()

    return HostileStream(socket.AF_INET, address, next_client)
