"""The driver between a link's core and an asyncio transport, over loopback.

Oracle: a core that writes down what it is told. Cannot see: the links' conversations
(`test_protocol_links_bulk`, `test_protocol_links_control`) and TLS (`test_security_links`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from unittest.mock import Mock

import msgspec
import pytest
from kvcast.hostagent.network.lander import Lander, available
from kvcast.protocol.links.stream import Landed, LinkStream, Room
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.service.link_driver import (
    IMPATIENT_TURNS,
    LEAST_SEGMENTS,
    LEAST_WINDOW_BYTES,
    MOST_WINDOW_BYTES,
    PIECE_BYTES,
    UNSENT_BYTES,
    ConnectingDriver,
    LinkDriver,
    give_up_after,
)
from kvcast.service.tls import PeerError

BLOCK_BYTES = 8 << 20


class Take(msgspec.Struct, tag="take"):
    """Bytes follow."""


class Give(msgspec.Struct, tag="give"):
    """Send bytes."""


class Core(LinkStream[Take | Give]):
    """Takes a block, or gives one."""

    one_at_a_time = True

    def __init__(self) -> None:
        super().__init__(Take | Give, max_message_bytes=1000)
        self.block = bytearray(BLOCK_BYTES)
        self.copied_bytes = 0
        self.given_bytes = 0
        self.blocks = 0
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def give_up_at(self, when: float) -> None:
        self._deadline = when

    def received(self, now: float, data: bytes) -> None:
        self.copied_bytes += len(data)
        super().received(now, data)

    def _message(self, now: float, message: Take | Give) -> None:
        if isinstance(message, Take):
            self._receive_block(memoryview(self.block))
        else:
            self._send_block(memoryview(self.block))

    def _block_came(self, now: float, digest: int | None) -> None:
        self.blocks += 1
        self._send(Take())

    def _block_sending(self, now: float, size_bytes: int) -> None:
        self.given_bytes += size_bytes

    def _over(self, now: float) -> None:
        self.ended.set_result(now)


def fail(error: PeerError) -> None:
    raise error


def driver_of(core: Core, refuse: bool = False) -> LinkDriver:
    def opened(_transport: asyncio.Transport) -> Core:
        if refuse:
            raise PeerError("not for you")
        return core

    return LinkDriver(
        memoryview(bytearray(PIECE_BYTES)), opened, changed=lambda: None,
        refused=(lambda _error: None) if refuse else fail,
    )  # fmt: skip


@asynccontextmanager
async def calling(
    make: Callable[[], LinkDriver],
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(make, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        yield reader, writer
        writer.transport.abort()
        await asyncio.sleep(0.01)


def said(message: msgspec.Struct) -> bytes:
    return MessageCodec[Take | Give](Take | Give).encode(message)


async def test_a_blocks_bytes_do_not_pass_through_the_core() -> None:
    core = Core()
    data = bytes(range(256)) * (BLOCK_BYTES // 256)
    async with calling(lambda: driver_of(core)) as (reader, writer):
        writer.write(said(Take()) + data)
        assert await reader.readexactly(len(said(Take()))) == said(Take())
        assert core.block == data
        # What came together with the message may have been copied, and nothing after it.
        assert core.copied_bytes <= PIECE_BYTES


async def test_a_reader_that_does_not_read_is_not_written_to_without_end() -> None:
    core = Core()
    async with calling(lambda: driver_of(core)) as (reader, writer):
        writer.write(said(Give()) * 3)
        held_back, turns = 0, 0
        while not held_back or turns < 100:  # which it has not been given more in
            turns = turns + 1 if core.given_bytes == held_back else 0
            held_back = core.given_bytes
            await asyncio.sleep(0.001)
        assert held_back < 3 * BLOCK_BYTES, "all of it went into buffers"
        await reader.readexactly(3 * BLOCK_BYTES)
        assert core.given_bytes == 3 * BLOCK_BYTES


async def test_a_core_is_told_when_its_time_has_come_and_its_connection_is_closed() -> None:
    core = Core()
    async with calling(lambda: driver_of(core)) as (reader, writer):
        loop = asyncio.get_running_loop()
        when = loop.time() + 0.2
        core.give_up_at(when)
        writer.write(said(Take()))
        assert await reader.read() == b""
        assert when <= await core.ended


async def test_a_core_is_told_that_its_connection_is_lost() -> None:
    core = Core()
    async with calling(lambda: driver_of(core)) as (_reader, writer):
        writer.write(said(Take()) + b"half")
        writer.transport.close()
        await core.ended
        assert core.blocks == 0


async def test_a_connection_for_which_there_is_no_descriptor_is_lost_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_descriptors(_fd: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "dup", out_of_descriptors)
    core = Core()
    async with calling(lambda: driver_of(core)) as (reader, _writer):
        await asyncio.wait_for(core.ended, 10)
        assert await reader.read() == b""


async def test_who_is_not_let_in_is_not_listened_to() -> None:
    core = Core()
    async with calling(lambda: driver_of(core, refuse=True)) as (reader, writer):
        writer.write(said(Give()))
        with suppress(OSError):  # a reset is no answer, either
            assert await reader.read() == b""
        assert core.given_bytes == 0


async def test_the_kernel_is_given_little_that_it_cannot_send() -> None:
    """What it has been given can no more be decided otherwise."""
    core = Core()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: driver_of(core), "127.0.0.1", 0)
    async with server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
            sock.setblocking(False)
            await loop.sock_connect(sock, server.sockets[0].getsockname()[:2])
            await loop.sock_sendall(sock, said(Give()))
            before = -1
            while before < core.given_bytes or not before:  # until it takes no more
                before = core.given_bytes
                await asyncio.sleep(0.1)
            assert core.given_bytes < 2 * UNSENT_BYTES < BLOCK_BYTES
        await asyncio.wait_for(core.ended, 10)


async def test_a_connect_that_hangs_is_given_up_when_the_core_says_so() -> None:
    core = Core()
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    driver = ConnectingDriver(
        core,
        memoryview(bytearray(PIECE_BYTES)),
        lambda _transport: core,
        changed=lambda: None,
        refused=fail,
        over=lambda: over.set_result(None),
    )
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)  # its backlog is full after one or two: further SYNs are not answered
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        began = loop.time()
        core.give_up_at(began + 0.1)
        driver.connect(*deaf.getsockname(), None)
        await asyncio.wait_for(over, 60.0)  # the kernel tries for longer
        assert await core.ended - began >= 0.1


async def test_a_refused_connection_is_a_loss() -> None:
    core = Core()
    server = await asyncio.get_running_loop().create_server(lambda: driver_of(core), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    server.close()
    await server.wait_closed()
    driver = ConnectingDriver(
        core, memoryview(bytearray(PIECE_BYTES)), lambda _transport: core,
        changed=lambda: None, refused=fail,
    )  # fmt: skip
    driver.connect(host, port, None)
    await asyncio.wait_for(core.ended, 60.0)


async def test_a_connection_that_stands_when_it_was_given_up_is_closed() -> None:
    core = Core()
    driver = ConnectingDriver(
        core, memoryview(bytearray(PIECE_BYTES)), lambda _transport: core,
        changed=lambda: None, refused=fail,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        driver.connect(*server.getsockname(), None)
        driver.lost("given up")
        await core.ended
        transport = Mock(spec=asyncio.Transport)
        driver.connection_made(transport)  # the loop had it on its list
        transport.abort.assert_called_once_with()


class Impassive:
    """A lander that finds nothing, and notes whether it may wait for it."""

    def __init__(self) -> None:
        self.low_water_bytes = 1
        self.patient: list[bool] = []

    def land(self, _rooms: Sequence[Room], _at_most: int, *, patient: bool) -> Landed:
        self.patient.append(patient)
        return Landed(0, [], True, None)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(60_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to be")


async def test_nobody_waits_in_vain_twice_or_while_blocks_move_elsewhere() -> None:
    cores, landers = [Core(), Core()], [Impassive(), Impassive()]
    made = iter(zip(cores, landers, strict=True))

    def make() -> LinkDriver:
        core, lander = next(made)
        return LinkDriver(
            memoryview(bytearray(PIECE_BYTES)), lambda _transport: core, changed=lambda: None,
            refused=fail, lander=lambda _fd: lander,
        )  # fmt: skip

    async with calling(make) as (_, first):
        first.write(said(Take()))
        await until(lambda: bool(cores[0].rooms))
        first.write(b"x" * PIECE_BYTES)  # which stay in the socket, so that it is read once more
        await until(lambda: len(landers[0].patient) >= 2 * IMPATIENT_TURNS)
        told = landers[0].patient
        assert told[: IMPATIENT_TURNS + 2] == [True] + [False] * IMPATIENT_TURNS + [True]
        async with calling(make) as (_, second):
            second.write(said(Take()) + b"x" * PIECE_BYTES)
            await until(lambda: bool(landers[1].patient))
            assert landers[1].patient[0] is False


class InTurns(Core):
    """Reads of a block what it is allowed to, and then no more until it is woken."""

    def __init__(self, allowed_bytes: int) -> None:
        super().__init__()
        self.allowed_bytes = allowed_bytes
        self.came_bytes = 0

    def receivable_bytes(self, now: float) -> int:
        return self.allowed_bytes

    @property
    def window_bytes(self) -> int:
        return LEAST_WINDOW_BYTES if self.allowed_bytes < BLOCK_BYTES else MOST_WINDOW_BYTES

    @property
    def wants_bytes(self) -> bool:
        return super().wants_bytes and (self.allowed_bytes > 0 or not self.rooms)

    def _bytes_coming(self, now: float, size_bytes: int) -> None:
        self.came_bytes += size_bytes
        self.allowed_bytes -= size_bytes


@pytest.mark.parametrize("lander", [None, Lander])
async def test_of_a_block_that_is_to_wait_no_more_is_read_than_is_allowed(
    lander: type[Lander] | None,
) -> None:
    if lander is not None and not available():
        pytest.skip("nothing lands in compiled code on this machine")
    core = InTurns(100_000)
    data = bytes(range(256)) * (BLOCK_BYTES // 256)
    drivers = []

    def make() -> LinkDriver:
        drivers.append(
            LinkDriver(
                *(memoryview(bytearray(PIECE_BYTES)), lambda _transport: core),
                changed=lambda: None,
                refused=fail,
                lander=lander,
            )
        )
        return drivers[0]

    async with calling(make) as (reader, writer):
        writer.write(said(Take()) + data)
        for allowed_bytes in (100_000, 1_000_000, 2_000_000):
            core.allowed_bytes = allowed_bytes - core.came_bytes
            core.wake()
            await until(lambda: core.came_bytes >= allowed_bytes)  # noqa: B023
            came_bytes = core.came_bytes
            # Compiled code reads in pieces.
            assert came_bytes - allowed_bytes <= (0 if lander is None else PIECE_BYTES)
            await asyncio.sleep(0.05)
            assert core.came_bytes == came_bytes
        sock = drivers[0]._socket
        assert sock is not None
        clamp = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP)
        segment_bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        # Newer kernels raise it to what the buffer has room for, which they make twice as large.
        most_bytes = 2 * max(LEAST_WINDOW_BYTES, LEAST_SEGMENTS * segment_bytes)
        assert clamp <= most_bytes, "the other end sends no more ahead"
        narrow_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        core.allowed_bytes = sys.maxsize
        core.wake()
        await until(lambda: core.came_bytes == BLOCK_BYTES)
        wide_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert wide_bytes >= 4 * narrow_bytes, "it sends ahead again, at once"
        assert await reader.readexactly(len(said(Take()))) == said(Take())
        assert core.block == data


async def test_without_descriptors_a_connection_stands_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(_descriptor: int) -> int:
        raise OSError(24, "Too many open files")

    async with await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        monkeypatch.setattr("os.dup", none_left)
        give_up_after(writer.transport, 1.0)  # type: ignore[arg-type]
        monkeypatch.undo()
        writer.close()
