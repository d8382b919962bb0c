"""What the security tests share: a cluster's certificates, a stranger's, and a talkative client."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    AgentMessage,
    ControllerMessage,
    Register,
)
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.service.authority import Authority, Part
from kvcast.service.identity import CONTROLLER, NODE, OPERATOR, SWITCH, Identity
from kvcast.service.tls import Credentials
from patience import PATIENCE_S

LOCAL = ("localhost", "127.0.0.1")
PARTS = (
    Part(Identity(CONTROLLER, "controller"), LOCAL),
    Part(Identity(SWITCH, "switch"), LOCAL),
    Part(Identity(NODE, "node-1"), LOCAL),
    Part(Identity(NODE, "node-2"), LOCAL),
    Part(Identity(OPERATOR, "operator")),
)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Certificates:
    """A cluster's folders by part, and `stranger`: the same parts of another cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "ours"
        self.authority = Authority.create(self.folder, now=now())
        stranger = Authority.create(folder / "theirs", now=now())
        for part in PARTS:
            self.authority.issue(part, days=30, now=now())
            stranger.issue(part, days=30, now=now())
        self.strangers_folder = folder / "theirs"

    def of(self, part: str) -> Credentials:
        return Credentials.of_folder(self.folder / part)

    def strangers(self, part: str) -> Credentials:
        return Credentials.of_folder(self.strangers_folder / part)

    def renew(self, part: str) -> None:
        (which,) = [p for p in PARTS if part in (p.identity.name, p.identity.role)]
        self.authority.issue(which, days=31, now=now())


def register(node_id: str = "node-1", number: int = 1) -> Register:
    return Register(
        CONTROL_PROTOCOL_VERSION, node_id, 7, f"10.77.0.{number}", f"02:6b:76:00:00:{number:02x}",
        number, 20000, "127.0.0.1", 1, 1 << 20,
    )  # fmt: skip


class Caller:
    """One end of a control link, said what a test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._codec = MessageCodec[ControllerMessage](ControllerMessage)

    def say(self, message: msgspec.Struct) -> None:
        self.writer.write(MessageCodec[AgentMessage](AgentMessage).encode(message))

    async def answers(self) -> list[ControllerMessage]:
        """What comes until the other side closes; [] also where it refuses us."""
        heard: list[ControllerMessage] = []
        try:
            while data := await self.reader.read(65536):
                heard += self._codec.feed(data)
        except OSError:
            pass
        return heard

    async def answers_unless(self, was_heard: Callable[[], bool]) -> list[ControllerMessage] | None:
        """What comes until the other side closes; None if what we said was taken instead."""
        answers = asyncio.ensure_future(self.answers())
        await until(lambda: answers.done() or was_heard())
        if was_heard():
            answers.cancel()
            return None
        return await answers

    @property
    def serial(self) -> str:
        """The serial number of the certificate that the other side showed."""
        certificate = self.writer.get_extra_info("peercert")
        return str(certificate["serialNumber"])


@asynccontextmanager
async def calling(
    address: tuple[str, int], context: ssl.SSLContext | None
) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    try:
        yield Caller(reader, writer)
    finally:
        await hang_up(writer)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
    for _ in range(5):
        await asyncio.sleep(0)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the other side closes the connection, and says nothing before."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the test's own time limit is the only one."""
    while not condition():  # noqa: ASYNC110 - conditions of others' making
        await asyncio.sleep(0.005)
