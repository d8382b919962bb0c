"""Ports, and the packet loop on an event loop with a program in Python.

Oracle: arithmetic on what was sent, and the kernel's own sockets at the other end. Cannot see: the
loop in a thread (test_switchsim_loop), interfaces (test_switchsim_loop_interfaces), speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.loop.interpreted import interpreted_entry
from kvcast.switchsim.loop.packet_loop import PacketLoop
from kvcast.switchsim.loop.state import OUTBOX_BYTES, PortCounters
from kvcast.switchsim.ports.drops import REASONS
from kvcast.switchsim.ports.interface import InterfacePort
from kvcast.switchsim.ports.port import MAX_FRAME_BYTES, Port, PortError, PortOptions
from kvcast.switchsim.ports.spec import PortSpec, parse_port
from kvcast.switchsim.ports.udp_tunnel import UdpTunnelPort

FRAME = bytes.fromhex("020000000002 020000000001 88b5") + b"payload"


def frames(count: int) -> list[bytes]:
    return [FRAME + struct.pack("!I", i) for i in range(count)]


@pytest.fixture
def peer() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        endpoint.bind(("127.0.0.1", 0))
        endpoint.settimeout(5)
        yield endpoint


def test_specifications_are_parsed() -> None:
    assert parse_port("3=udp:127.0.0.1:7001:127.0.0.1:8001") == PortSpec(
        3, "udp", local=("127.0.0.1", 7001), peer=("127.0.0.1", 8001)
    )
    assert parse_port("1=udp:10.0.0.1:7001") == PortSpec(1, "udp", local=("10.0.0.1", 7001))
    assert parse_port("2=if:veth0") == PortSpec(2, "if", interface="veth0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "x=if:eth0",
        "-1=if:eth0",
        "512=if:eth0",
        "1=if:",
        "1=if:a/b",
        "1=if:" + "x" * 16,
        "1=if:a b",
        "1=tap:x",
        "1=udp:",
        "1=udp:127.0.0.1",
        "1=udp:127.0.0.1:70000",
        "1=udp:localhost:7000",
        "1=udp:127.0.0.1:7000:127.0.0.1",
        "1=udp:127.0.0.1:7000:127.0.0.1:0",
        "1=udp:127.0.0.1:7000:127.0.0.1:1:2",
        "1=udp:127.0.0.1:+7000",
    ],
)
def test_malformed_specifications_are_named_errors(text: str) -> None:
    with pytest.raises(PortError):
        parse_port(text, max_port=511)


@pytest.mark.parametrize(
    "options",
    [{"loss": 1.5}, {"queue_depth": 0}, {"rate_bits_per_s": 0.0}, {"uplink_bits_per_s": -1.0}],
)
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(PortError):
        PortOptions(**options)  # type: ignore[arg-type]


@pytest.fixture
def receiver() -> Iterator[socket.socket]:
    with socket.socket(type=socket.SOCK_DGRAM) as endpoint:
        endpoint.bind(("127.0.0.1", 0))
        endpoint.setblocking(False)
        yield endpoint


def test_a_tunnel_says_what_would_open_it_again(peer: socket.socket) -> None:
    port = UdpTunnelPort(1, ("127.0.0.1", 0), peer.getsockname())
    with contextlib.closing(port):
        near, far = port.local[1], peer.getsockname()[1]
        assert port.describe() == f"udp:127.0.0.1:{near}:127.0.0.1:{far}"


def test_address_in_use_is_a_named_error(peer: socket.socket) -> None:
    with pytest.raises(PortError, match="port 5"):
        UdpTunnelPort(5, peer.getsockname(), None)


def test_interface_that_does_not_exist_is_a_named_error() -> None:
    with pytest.raises(PortError, match="port 1: if:kvt-none"):
        InterfacePort(1, "kvt-none")


def test_every_counter_of_a_port_is_told_when_it_counts_drops() -> None:
    passed_on = {"rx_frames", "rx_bytes", "tx_frames", "tx_bytes"}
    asked_for, not_lost = {"rx_loss", "tx_loss"}, {"rx_errors", "tx_refused"}
    counted = set(PortCounters.__annotations__)
    assert set(REASONS) == counted - passed_on - asked_for - not_lost


# --- the loop -----------------------------------------------------------------------------------

Process = Callable[[int, bytes, int], list[tuple[int, bytes]]]


def swap(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
    """A program: port 1 to 2 and back."""
    return [(3 - port, frame)]


@contextlib.asynccontextmanager
async def running(
    process: Process, *ports: Port, taken: list[bytes] | None = None
) -> AsyncIterator[PacketLoop]:
    """Ports served by a program in Python; frames for port 9 are `taken`."""

    def take(frame: bytes) -> bool:
        assert taken is not None
        taken.append(frame)
        return True

    loop = PacketLoop(
        [*ports, Port(9)],
        cpu_port=9,
        packet_in=take,
        after_frames=lambda: None,
        clock_base_ns=time.monotonic_ns(),
        queue_depth=100,
        threaded=False,
    )
    engine = SimpleNamespace(process=process, stats=SimpleNamespace(digests=0))
    loop.native.use(interpreted_entry(cast("Engine", engine)))
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        loop.native.close()
        for port in ports:
            port.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def tunnel(number: int, peer: socket.socket, **options: Any) -> UdpTunnelPort:
    return UdpTunnelPort(number, ("127.0.0.1", 0), peer.getsockname(), PortOptions(**options))


async def test_a_long_queue_at_one_port_does_not_keep_the_others_waiting(
    peer: socket.socket,
) -> None:
    """Of each port, a turn takes a frame or two."""
    order: list[int] = []

    def note(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        order.append(port)
        return []

    ports = [tunnel(number, peer) for number in (1, 2, 3)]
    for port, count in zip(ports, (20, 2, 1), strict=True):
        for frame in frames(count):
            peer.sendto(frame, port.local)
    async with running(note, *ports):
        await until(lambda: len(order) == 23)
    assert set(order[:5]) == {1, 2, 3}
    assert order[:9].count(2) == 2


async def test_frames_to_ports_that_do_not_exist_are_counted(
    peer: socket.socket, receiver: socket.socket
) -> None:
    one, two = tunnel(1, peer), tunnel(2, receiver)
    async with running(lambda p, f, t: [(77, f), (2, f)], one, two) as loop:
        peer.sendto(FRAME, one.local)
        assert await asyncio.get_running_loop().sock_recv(receiver, 2000) == FRAME
        assert loop.native.counters["no_such_port"] == 1


async def test_the_loop_survives_a_program_that_fails(peer: socket.socket) -> None:
    def fail_once(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        if frame == FRAME:
            raise ZeroDivisionError
        return [(9, frame)]

    one, taken = tunnel(1, peer), list[bytes]()
    async with running(fail_once, one, taken=taken) as loop:
        peer.sendto(FRAME, one.local)
        peer.sendto(FRAME + b"ok", one.local)
        await until(lambda: taken == [FRAME + b"ok"])
        assert loop.native.counters["process_errors"] == 1


async def test_a_frame_that_becomes_more_than_the_outbox_holds_loses_the_rest(
    peer: socket.socket,
) -> None:
    one, taken = tunnel(1, peer), list[bytes]()
    copies = OUTBOX_BYTES // MAX_FRAME_BYTES + 10
    async with running(lambda p, f, t: [(9, f)] * copies, one, taken=taken) as loop:
        peer.sendto(FRAME + bytes(MAX_FRAME_BYTES - len(FRAME)), one.local)
        await until(lambda: loop.native.counters["processed"] == 1)
        assert loop.native.counters["emitted"] == OUTBOX_BYTES // MAX_FRAME_BYTES
        peer.sendto(FRAME, one.local)
        await until(lambda: FRAME in taken)


async def test_the_loop_serves_sockets_and_yields_to_others(
    peer: socket.socket, receiver: socket.socket
) -> None:
    """Frames pass between two tunnels while another task of the same loop gets its turns."""
    one, two = tunnel(1, peer), tunnel(2, receiver)
    turns = 0

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with running(swap, one, two):
        task = asyncio.create_task(bystander())
        sent = frames(50)
        for frame in sent:
            peer.sendto(frame, one.local)
        events = asyncio.get_running_loop()
        got = [await asyncio.wait_for(events.sock_recv(receiver, 2000), 60) for _ in sent]
        assert got == sent
        assert turns > 25
        task.cancel()


async def test_the_loop_wakes_for_a_paced_port(
    peer: socket.socket, receiver: socket.socket
) -> None:
    """With nothing to read, the loop still sends what a rate held back; links have both ways."""
    one = tunnel(1, peer, uplink_bits_per_s=8 * 20_000)
    two = tunnel(2, receiver, rate_bits_per_s=8 * 20_000)
    async with running(swap, one, two) as loop:
        start_s = time.monotonic()
        for _ in range(4):
            peer.sendto(FRAME + bytes(100 - len(FRAME)), one.local)
        events = asyncio.get_running_loop()
        for _ in range(4):
            await asyncio.wait_for(events.sock_recv(receiver, 2000), 60)
        # 4 x 100 bytes at 20 kB/s on the way in, and the last of them on the way out.
        assert time.monotonic() - start_s >= 0.025
        assert loop.native.egress_backlog(2) == 0


async def test_packet_outs_reach_the_program_and_are_bounded(peer: socket.socket) -> None:
    seen: list[tuple[int, bytes]] = []

    def note(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        seen.append((port, frame))
        return []

    async with running(note, tunnel(1, peer)) as loop:
        cpu = Port(9)
        assert not loop.packet_out(cpu, bytes(13))
        assert not loop.packet_out(cpu, bytes(MAX_FRAME_BYTES + 1))
        taken = [loop.packet_out(cpu, FRAME) for _ in range(101)]
        assert taken == [True] * 100 + [False]
        await until(lambda: seen == [(9, FRAME)] * 100)
        counts = loop.read_counters(cpu)
        assert (counts["rx_runts"], counts["rx_oversize"]) == (1, 1)
