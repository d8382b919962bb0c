"""The datagram adapters over loopback sockets, with a core that only writes down what it gets.

Oracle: the datagrams sent one by one, or in one piece by the kernel's own segmentation
(UDP_SEGMENT), which the test uses directly. Cannot see: what cores do with frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import random
import socket
import struct
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.network.datagrams import (
    RECEIVE_ROUND,
    ROUNDS_BEFORE_TIMERS,
    SEND_ROUND,
    Transport,
    TunnelTransport,
    UdpTransport,
    open_tunnel,
    open_udp,
)
from kvcast.hostagent.network.mover import Mover
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint, parse_ip, parse_mac, unwrap
from kvcast.protocol.placement import Arrived, Placement
from kvcast.protocol.responder import Answer
from kvcast.service.sockets import set_buffer

ME = Endpoint(parse_mac("02:6b:76:00:00:01"), parse_ip("10.77.0.1"))
PEER = Endpoint(parse_mac("02:6b:76:00:00:02"), parse_ip("10.77.0.2"))
OTHER = Endpoint(parse_mac("02:6b:76:00:00:03"), parse_ip("10.77.0.3"))
SIZE = 64 * 1024
BLOCK = wire.BlockId(1, bytes(16))
PAYLOADS = [random.Random(chunk).randbytes(1024) for chunk in range(64)]


class Node:
    def __init__(self, endpoint: Endpoint, ip: str) -> None:
        self.mac = endpoint.mac.hex(":")
        self.ip = ip
        self.udp_port = endpoint.udp_port


class Map:
    def __init__(self, peer_ip: str, port: int = wire.UDP_PORT) -> None:
        self.nodes = {5: Node(PEER, peer_ip)}
        self.nodes[5].udp_port = port
        self.index_by_ip = {parse_ip(peer_ip): 5}


class Recorder:
    """Stands for the AgentCore."""

    def __init__(self, pool: Map) -> None:
        self.metrics = Metrics()
        self.pool = pool
        self.outbox = self
        self.calls: list[Any] = []
        self.reads = self
        self.requester = self
        self.placement = Placement()
        self.block = bytearray(SIZE)
        """Of the one copy that is being put together, all of whose chunks may come from node 5."""
        self.placement.enter(BLOCK, SIZE, 9, memoryview(self.block), wire.CELLS, {5})
        self.frames: list[tuple[int, wire.Frame]] = []
        self.arrivals: list[Arrived] = []
        self.to_send: list[tuple[int, wire.Frame | Answer]] = []
        self.arrived = asyncio.Event()

    lane = None
    waits = False
    writing = SimpleNamespace(full=False)

    def open_lane(self, _now: float, _budget: int) -> None:
        pass

    def receive(self, _now: float, source: int, frame: wire.Frame) -> None:
        self.frames.append((source, frame))

    def placed(self, _now: float, arrivals: list[Arrived]) -> None:
        self.arrivals += arrivals

    @property
    def chunks(self) -> int:
        """All that have arrived, as a bitmap."""
        return functools.reduce(operator.or_, (each.added for each in self.arrivals), 0)

    def after_receiving(self, _now: float, *, heard: bool) -> None:
        self.arrived.set()

    def answers_to_send(self, _now: float, budget: int) -> list[tuple[int, wire.Frame | Answer]]:
        some, self.to_send = self.to_send[:budget], self.to_send[budget:]
        return some

    def get_timer(self, now: float = 0.0) -> float | None:
        return now if self.to_send else None

    def handle_timer(self, _now: float) -> None:
        pass


def data(chunk: int, *, flags: int = 0) -> wire.Frame:
    return wire.Frame(
        wire.OP_DATA,
        1,
        bytes(16),
        flags=flags,
        digest=9,
        size=SIZE,
        chunk=chunk,
        payload=PAYLOADS[chunk],
    )


def send_piece(sock: socket.socket, datagrams: list[bytes]) -> None:
    offload = [(socket.IPPROTO_UDP, 103, struct.pack("=H", len(datagrams[0])))]
    sock.sendmsg(datagrams, offload)


def send_and_see_kept(sock: socket.socket, datagrams: list[bytes], to: socket.socket) -> None:
    """Send a piece, and wait until the kernel keeps it for the other end, which does not read."""

    def kept_bytes() -> int:
        memory = struct.unpack("=9I", to.getsockopt(socket.SOL_SOCKET, 55, 36))  # SO_MEMINFO
        return int(memory[0])

    before_bytes = kept_bytes()
    send_piece(sock, datagrams)
    until_s = time.monotonic() + 30
    while kept_bytes() == before_bytes:
        assert time.monotonic() < until_s, "the kernel keeps nothing of it"
        time.sleep(0.001)


@contextlib.asynccontextmanager
async def tunnel(
    core: Recorder | None = None,
) -> AsyncIterator[tuple[TunnelTransport, Recorder, socket.socket]]:
    """An adapter, its core, and the switch's end."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as switch:
        set_buffer(switch, 1 << 20, receive=True)
        switch.bind(("127.0.0.1", 0))
        switch.settimeout(10)
        sock, _ = open_tunnel(("127.0.0.1", 0), switch.getsockname(), 1 << 20)
        switch.connect(sock.getsockname())
        core = core or Recorder(Map("10.77.0.2"))
        transport = TunnelTransport(cast(AgentCore, core), sock, ME)
        transport.start()
        try:
            yield transport, core, switch
        finally:
            transport.close()


async def settle(core: Recorder, frames: int) -> None:
    """Wait until so many frames have arrived; pytest's time limit is the only one."""
    while core.metrics.frames_received_total < frames:
        core.arrived.clear()
        await core.arrived.wait()


async def test_a_piece_is_a_run_and_every_frame_counts() -> None:
    async with tunnel() as (_transport, core, switch):
        to_me = Encapsulation(PEER, ME)
        sent = [to_me.wrap(wire.encode(data(chunk))) for chunk in range(40)]
        sent.append(to_me.wrap(wire.encode(data(40, flags=wire.FLAG_LAST))))
        send_piece(switch, sent)
        await settle(core, 41)
        assert core.chunks == (1 << 41) - 1
        assert core.block[: 41 * 1024] == b"".join(PAYLOADS[:41])
        assert {arrived.source for arrived in core.arrivals} == {5}
        assert sum(arrived.frames for arrived in core.arrivals) == 41
        assert [arrived.ends_anew for arrived in core.arrivals][-1]
        assert len(core.arrivals) < 41, "frames in a row are one arrival"


async def test_what_is_wrong_in_a_piece_does_not_spoil_the_rest() -> None:
    async with tunnel() as (_transport, core, switch):
        to_me, to_other = Encapsulation(PEER, ME), Encapsulation(PEER, OTHER)
        from_stranger = Encapsulation(OTHER, ME)
        good = [to_me.wrap(wire.encode(data(chunk))) for chunk in range(6)]
        bad_version = bytearray(good[0])
        bad_version[42] = 7
        bad_checksum = bytearray(good[0])
        bad_checksum[24] ^= 0xFF
        udp_checksum = bytearray(good[5])  # of which the sum does not hold
        udp_checksum[40:42] = b"\x12\x34"
        send_piece(
            switch,
            [
                *good[:3],
                bytes(bad_version),
                good[3],
                to_other.wrap(wire.encode(data(4))),
                from_stranger.wrap(wire.encode(data(4))),
                bytes(bad_checksum),
                good[4],
                bytes(udp_checksum),
                good[5][:700],
            ],
        )
        await settle(core, 11)
        metrics = core.metrics
        assert core.chunks == 0b11111
        assert core.block == b"".join(PAYLOADS[:5]) + bytes(SIZE - 5 * 1024)
        assert metrics.frames_malformed_total == 4
        assert metrics.frames_misaddressed_total == 1
        assert metrics.frames_unknown_source_total == 1
        assert metrics.frames_received_total == 11


async def test_datagrams_one_by_one_empty_and_oversized() -> None:
    async with tunnel() as (_transport, core, switch):
        to_me = Encapsulation(PEER, ME)
        read = wire.Frame(wire.OP_READ, 1, bytes(16), wanted=wire.FULL_SEGMENT)
        for datagram in (b"", bytes(60_000), to_me.wrap(wire.encode(read)) + bytes(20)):
            switch.send(datagram)
        await settle(core, 3)
        assert core.metrics.frames_malformed_total == 2
        assert [(source, frame.op) for source, frame in core.frames] == [(5, wire.OP_READ)]


async def test_frames_of_equal_length_leave_in_one_piece_and_arrive_one_by_one() -> None:
    async with tunnel() as (transport, core, switch):
        read = wire.Frame(wire.OP_READ, 1, bytes(16), wanted=wire.FULL_SEGMENT)
        frames = [read, *(data(chunk) for chunk in range(64)), *[read] * SEND_ROUND]
        expected = [(5, frame) for frame in frames]
        core.to_send = list(expected)
        transport.pump()
        got = []
        for _ in expected:
            datagram = await asyncio.get_running_loop().run_in_executor(None, switch.recv, 4096)
            outer = unwrap(datagram)
            assert (outer.src, outer.dst) == (ME, PEER)
            got.append((5, wire.decode(bytes(outer.payload))))
        assert [(n, wire.encode(f)) for n, f in got] == [(n, wire.encode(f)) for n, f in expected]
        assert core.metrics.frames_sent_total == len(expected) > SEND_ROUND
        assert core.metrics.socket_errors_total == 0


class Overdue(Recorder):
    """A fetch's time-out is over, and says what had come by then."""

    def __init__(self, pool: Map) -> None:
        super().__init__(pool)
        self.came: int | None = None
        self.over = asyncio.Event()

    def get_timer(self, now: float = 0.0) -> float | None:
        return now if self.came is None else None

    def handle_timer(self, _now: float) -> None:
        self.came = self.metrics.frames_received_total
        self.over.set()


async def test_what_lies_in_the_socket_is_heard_before_silence_is_a_loss() -> None:
    core = Overdue(Map("10.77.0.2"))
    async with tunnel(core) as (transport, _core, switch):
        read = wire.Frame(wire.OP_READ, 1, bytes(16), wanted=wire.FULL_SEGMENT)
        piece = [Encapsulation(PEER, ME).wrap(wire.encode(read))] * 50
        for _ in range(2 * RECEIVE_ROUND // 50):  # the process stands still meanwhile
            send_and_see_kept(switch, piece, transport.socket)
        transport.pump()  # which sets the timer
        await core.over.wait()
        assert core.came == 2 * RECEIVE_ROUND // 50 * 50 > RECEIVE_ROUND


async def test_a_flood_holds_no_timer_up(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Overdue(Map("10.77.0.2"))
    async with tunnel(core) as (transport, _core, _switch):
        rounds = 0

        def flooded() -> None:
            nonlocal rounds
            rounds += 1

        monkeypatch.setattr(transport, "_readable", flooded)
        monkeypatch.setattr(Mover, "drained", False)
        transport.pump()
        await core.over.wait()
        assert rounds == ROUNDS_BEFORE_TIMERS


async def test_what_was_due_when_it_was_closed_is_not_done_any_more() -> None:
    """Its descriptor may be another file's by then."""
    went_wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: went_wrong.append(what))
    core = Overdue(Map("10.77.0.2"))
    async with tunnel(core) as (transport, _core, _switch):
        transport.pump()
        transport.close()
        for _ in range(3):
            await asyncio.sleep(0)
    assert (core.came, went_wrong) == (None, [])


async def test_a_closed_peer_costs_frames_and_is_counted() -> None:
    async with tunnel() as (transport, core, switch):
        switch.close()
        for _ in range(3):
            core.to_send = [(5, data(chunk)) for chunk in range(20)]
            transport.pump()
            await asyncio.sleep(0)
        metrics = core.metrics
        assert metrics.socket_errors_total > 0
        assert metrics.frames_sent_total + metrics.socket_errors_total >= 60
        assert transport.mover.waiting == 0


@pytest.fixture
def peer() -> Any:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


async def test_kernel_udp_takes_pieces_too(peer: socket.socket) -> None:
    sock, _ = open_udp("127.0.0.1", 0, 1 << 20)
    core = Recorder(Map("127.0.0.1", peer.getsockname()[1]))
    transport: Transport = UdpTransport(cast(AgentCore, core), sock)
    transport.start()
    try:
        peer.connect(sock.getsockname())
        send_piece(peer, [wire.encode(data(chunk)) for chunk in range(30)])
        await settle(core, 30)
        assert core.chunks == (1 << 30) - 1
        assert core.block[: 30 * 1024] == b"".join(PAYLOADS[:30])
        assert len(core.arrivals) < 30
        core.pool = Map("127.0.0.9")
        send_piece(peer, [wire.encode(data(chunk)) for chunk in range(5)])
        await settle(core, 35)
        assert core.metrics.frames_unknown_source_total == 5
    finally:
        transport.close()
