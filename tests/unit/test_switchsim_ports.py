"""Ports, their bounds and counts, and the loop that serves them.

Oracle: arithmetic on what was sent, and the kernel's own sockets at the other end. Cannot see:
speed; how a real NIC's offloads behave (only veth's are exercised, and only as root).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcast.switchsim.loop.interpreted import SLICE_S, PacketLoop
from kvcast.switchsim.ports.drops import REASONS
from kvcast.switchsim.ports.in_process import InProcessPort
from kvcast.switchsim.ports.interface import InterfacePort, complete_checksum
from kvcast.switchsim.ports.port import MAX_FRAME_BYTES, Port, PortError, PortOptions
from kvcast.switchsim.ports.spec import PortSpec, parse_port
from kvcast.switchsim.ports.udp_tunnel import UdpTunnelPort
from port_checks import assert_udp_checksum, wait_until

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


def test_ingress_queue_drops_the_newest_and_counts() -> None:
    port = InProcessPort(1, PortOptions(queue_depth=3))
    sent = frames(5)
    assert [port.receive(frame) for frame in sent] == [True, True, True, False, False]
    assert list(port.ingress) == sent[:3]
    assert port.counters.rx_frames == 3
    assert port.counters.rx_queue_drops == 2
    assert port.counters.rx_bytes == sum(map(len, sent[:3]))


def test_frames_of_impossible_length_are_dropped_and_counted() -> None:
    port = InProcessPort(1)
    assert not port.receive(b"")
    assert not port.receive(bytes(13))
    assert not port.receive(bytes(MAX_FRAME_BYTES + 1))
    assert port.receive(bytes(MAX_FRAME_BYTES))
    assert (port.counters.rx_runts, port.counters.rx_oversize) == (2, 1)


def test_in_process_output_is_bounded() -> None:
    port = InProcessPort(1, PortOptions(queue_depth=2))
    for frame in frames(3):
        port.transmit(frame, 0.0)
    assert list(port.sent) == frames(2)
    assert port.counters.tx_queue_drops == 1


def test_loss_is_seeded_and_separate_for_each_direction() -> None:
    def survivors(seed: int) -> tuple[list[bytes], list[bytes]]:
        port = InProcessPort(4, PortOptions(loss=0.3, seed=seed))
        for frame in frames(400):
            port.receive(frame)
            port.transmit(frame, 0.0)
        assert port.counters.rx_loss + port.counters.rx_frames == 400
        assert port.counters.tx_loss + port.counters.tx_frames == 400
        return list(port.ingress), list(port.sent)

    received, sent = survivors(7)
    assert survivors(7) == (received, sent)
    assert survivors(8) != (received, sent)
    assert received != sent
    # 400 draws at 0.3: more than six standard deviations on either side.
    assert 220 < len(received) < 340
    assert 220 < len(sent) < 340


def test_total_loss_passes_nothing() -> None:
    port = InProcessPort(1, PortOptions(loss=1.0))
    port.receive(FRAME)
    port.transmit(FRAME, 0.0)
    assert (port.counters.rx_loss, port.counters.tx_loss) == (1, 1)
    assert not port.ingress
    assert not port.sent


def test_rate_limit_paces_and_bounds_the_backlog() -> None:
    # 1000 bytes a 10 ms; the bucket holds 2 ms of that and may go into debt for one frame.
    sent_at: list[float] = []
    now_s = 0.0

    def note(frame: bytes) -> bool:
        sent_at.append(now_s)
        return True

    port = InProcessPort(1, PortOptions(queue_depth=4, rate_bits_per_s=800_000), note)
    for _ in range(6):
        port.transmit(bytes(1000), now_s)
    assert len(sent_at) == 1
    assert port.egress_backlog == 4
    assert port.counters.tx_queue_drops == 1
    while (next_s := port.release(now_s)) is not None:
        assert next_s >= now_s
        now_s = next_s + 1e-9
    assert len(sent_at) == 5
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent_at)]
    assert gaps == pytest.approx([0.008, 0.01, 0.01, 0.01], rel=1e-3)


def test_rate_limit_sends_a_frame_larger_than_its_bucket() -> None:
    port = InProcessPort(1, PortOptions(rate_bits_per_s=8.0))
    port.transmit(bytes(5000), 0.0)
    assert port.counters.tx_frames == 1


def test_udp_tunnel_carries_frames_both_ways(peer: socket.socket) -> None:
    port = UdpTunnelPort(1, ("127.0.0.1", 0), peer.getsockname())
    with contextlib.closing(port):
        for frame in frames(20):
            peer.sendto(frame, port.local)
        wait_until(lambda: port.drain() >= 0 and len(port.ingress) >= 20)
        assert list(port.ingress) == frames(20)
        port.transmit(FRAME, 0.0)
        assert peer.recv(2000) == FRAME
        assert port.describe() == f"udp:127.0.0.1:{port.local[1]}:127.0.0.1:{port.peer[1]}"


def test_udp_tunnel_with_a_peer_hears_nobody_else(peer: socket.socket) -> None:
    port = UdpTunnelPort(1, ("127.0.0.1", 0), peer.getsockname())
    with contextlib.closing(port), socket.socket(type=socket.SOCK_DGRAM) as other:
        other.sendto(frames(1)[0], port.local)
        peer.sendto(FRAME, port.local)
        wait_until(lambda: port.drain() >= 0 and len(port.ingress) > 0)
        assert list(port.ingress) == [FRAME]


def test_udp_tunnel_learns_and_relearns_its_peer(peer: socket.socket) -> None:
    port = UdpTunnelPort(1, ("127.0.0.1", 0), None)
    with contextlib.closing(port), socket.socket(type=socket.SOCK_DGRAM) as second:
        port.transmit(FRAME, 0.0)
        assert port.counters.tx_no_peer == 1
        second.bind(("127.0.0.1", 0))
        second.settimeout(5)
        for endpoint in (peer, second):
            endpoint.sendto(FRAME, port.local)
            wait_until(lambda: port.drain() >= 0 and len(port.ingress) > 0)
            port.ingress.clear()
            port.transmit(FRAME, 0.0)
            assert endpoint.recv(2000) == FRAME


def test_udp_tunnel_does_not_learn_a_distant_peer() -> None:
    port = UdpTunnelPort(1, ("127.0.0.1", 0), None)
    with contextlib.closing(port):
        assert not port._learn(("192.0.2.1", 1))
        assert port._learn(("127.8.8.8", 1))


def test_udp_tunnel_drops_what_is_no_frame(peer: socket.socket) -> None:
    port = UdpTunnelPort(1, ("127.0.0.1", 0), peer.getsockname())
    with contextlib.closing(port):
        peer.sendto(b"", port.local)
        peer.sendto(b"short", port.local)
        peer.sendto(bytes(MAX_FRAME_BYTES + 100), port.local)
        peer.sendto(FRAME, port.local)
        wait_until(lambda: port.drain() >= 0 and len(port.ingress) > 0)
        assert (port.counters.rx_runts, port.counters.rx_oversize) == (2, 1)


def test_udp_tunnel_survives_a_peer_that_is_away() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        address = gone.getsockname()
    port = UdpTunnelPort(1, ("127.0.0.1", 0), address)
    with contextlib.closing(port):
        for _ in range(3):
            port.transmit(FRAME, 0.0)
            port.drain()
        assert port.counters.tx_refused > 0
        with socket.socket(type=socket.SOCK_DGRAM) as back:
            back.bind(address)
            back.settimeout(5)
            port.transmit(FRAME, 0.0)
            assert back.recv(2000) == FRAME


def test_udp_tunnel_counts_a_frame_that_is_too_long_for_udp(peer: socket.socket) -> None:
    port = UdpTunnelPort(1, ("127.0.0.1", 0), peer.getsockname())
    with contextlib.closing(port):
        port.transmit(bytes(70_000), 0.0)
        assert port.counters.tx_too_long == 1
        assert port.counters.tx_frames == 0


def test_a_full_queue_leaves_frames_to_the_kernel_which_counts_its_drops(
    peer: socket.socket,
) -> None:
    port = UdpTunnelPort(1, ("127.0.0.1", 0), peer.getsockname(), PortOptions(queue_depth=5))
    with contextlib.closing(port):
        port._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for frame in frames(200):
            peer.sendto(frame, port.local)
        wait_until(lambda: port.drain() >= 0 and len(port.ingress) == 5)
        assert port.drain() == 0
        assert list(port.ingress) == frames(5)
        port.ingress.clear()
        received = 5
        while (arrived := port.drain()) > 0:
            received += arrived
            port.ingress.clear()
        counters = port.read_counters()
        assert counters["rx_frames"] == received
        assert counters["rx_kernel_drops"] == 200 - received > 0


def test_address_in_use_is_a_named_error(peer: socket.socket) -> None:
    with pytest.raises(PortError, match="port 5"):
        UdpTunnelPort(5, peer.getsockname(), None)


def test_checksum_is_completed_as_the_hardware_would() -> None:
    # RFC 1071's example: 00 01 f2 03 f4 f5 f6 f7 sums to ddf2; the field is at offset 8.
    frame = b"\xaa" * 14 + bytes.fromhex("0001f203f4f5f6f7") + b"\0\0"
    assert complete_checksum(frame, 14, 8)[-2:] == bytes.fromhex("220d")
    odd = b"\xaa" * 14 + bytes.fromhex("0001f203f4f5f6f7") + b"\0\0" + b"\x12"
    assert complete_checksum(odd, 14, 8)[22:24] == ((~(0xDDF2 + 0x1200)) & 0xFFFF).to_bytes(
        2, "big"
    )
    udp_zero = b"\xaa" * 14 + bytes.fromhex("ffff0000 0000 0000")
    assert complete_checksum(udp_zero, 14, 6)[20:22] == b"\xff\xff"
    assert complete_checksum(udp_zero, 14, 4)[18:20] == b"\0\0"
    assert complete_checksum(b"too short", 14, 6) == b"too short"


# --- the loop -----------------------------------------------------------------------------------


def swap(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
    """A program: port 1 to 2 and back."""
    return [(3 - port, frame)]


def loop_of(*ports: Port, process: object = swap) -> PacketLoop:
    return PacketLoop(ports, process, lambda: None, lambda: 0)  # type: ignore[arg-type]


def test_loop_takes_one_frame_of_each_port_in_turn() -> None:
    order: list[int] = []

    def note(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        order.append(port)
        return []

    ports = [InProcessPort(n) for n in (1, 2, 3)]
    loop = loop_of(*ports, process=note)
    for port, count in zip(ports, (3, 1, 2), strict=True):
        for frame in frames(count):
            port.receive(frame)
    assert loop.run_until_idle() == 6
    assert order == [1, 2, 3, 1, 3, 1]
    loop.close()


async def test_turns_go_on_when_a_slice_is_over_after_one_frame() -> None:
    """A long queue at the first port must not keep the others' frames waiting."""
    order: list[int] = []

    def slow(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        time.sleep(2 * SLICE_S)
        order.append(port)
        if len(order) == 8:
            enough.set()
        return []

    enough = asyncio.Event()
    ports = [InProcessPort(n) for n in (1, 2, 3)]
    for port, count in zip(ports, (20, 2, 1), strict=True):
        for frame in frames(count):
            port.receive(frame)
    loop = loop_of(*ports, process=slow)
    task = asyncio.create_task(loop.run())
    await enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert loop.counters.slices >= 7, "this program makes each slice one frame long"
    assert order[:8] == [1, 2, 3, 1, 2, 1, 1, 1]
    loop.close()


def test_loop_counts_frames_to_ports_that_do_not_exist() -> None:
    port = InProcessPort(1)
    loop = loop_of(port, process=lambda p, f, t: [(77, f), (1, f)])
    port.receive(FRAME)
    loop.run_until_idle()
    assert loop.counters.no_such_port == 1
    assert list(port.sent) == [FRAME]
    loop.close()


def test_loop_survives_a_program_that_fails() -> None:
    def fail_once(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        if frame == FRAME:
            raise ZeroDivisionError
        return [(1, frame)]

    port = InProcessPort(1)
    loop = loop_of(port, process=fail_once)
    port.receive(FRAME)
    port.receive(FRAME + b"ok")
    loop.run_until_idle()
    assert loop.counters.process_errors == 1
    assert list(port.sent) == [FRAME + b"ok"]
    loop.close()


def test_loop_refuses_two_ports_of_one_number() -> None:
    with pytest.raises(ValueError, match="same number"):
        loop_of(InProcessPort(1), InProcessPort(1))


async def test_loop_serves_sockets_and_yields_to_others(peer: socket.socket) -> None:
    """Frames pass between two tunnels while another task of the same loop gets its turns."""
    with socket.socket(type=socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        one = UdpTunnelPort(1, ("127.0.0.1", 0), peer.getsockname())
        two = UdpTunnelPort(2, ("127.0.0.1", 0), receiver.getsockname())
        loop = loop_of(one, two)
        turns = 0

        async def bystander() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(loop.run()), asyncio.create_task(bystander())]
        sent = frames(50)
        for frame in sent:
            peer.sendto(frame, one.local)
        events = asyncio.get_running_loop()
        got = [await asyncio.wait_for(events.sock_recv(receiver, 2000), 5) for _ in sent]
        assert got == sent
        assert turns > 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.close()
        one.close()
        two.close()


async def test_loop_keeps_the_kernel_buffer_empty_while_the_program_is_slow(
    peer: socket.socket,
) -> None:
    """A burst many times the kernel's unprivileged buffer survives a slow program: the socket is
    emptied into the port's queue before every frame."""

    def slow(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        # Meanwhile the sender goes on: this is where a busy interpreter would lose frames.
        for data in burst[loop.counters.processed * 4 : loop.counters.processed * 4 + 4]:
            peer.sendto(data, one.local)
        return []

    one = UdpTunnelPort(1, ("127.0.0.1", 0), peer.getsockname())
    burst = [bytes(1400) + struct.pack("!I", i) for i in range(2000)]
    loop = loop_of(one, process=slow)
    one.receive(FRAME)
    assert loop.run_until_idle() == 1 + 2000 - 4
    assert one.counters.rx_queue_drops == 0
    loop.close()
    one.close()


async def test_loop_wakes_for_a_paced_port() -> None:
    """With nothing to read, the loop still sends what a rate limit held back."""
    source = InProcessPort(1)
    sent: asyncio.Queue[bytes] = asyncio.Queue()

    def take(frame: bytes) -> bool:
        sent.put_nowait(frame)
        return True

    paced = InProcessPort(2, PortOptions(rate_bits_per_s=8 * 20_000), take)
    loop = loop_of(source, paced)
    task = asyncio.create_task(loop.run())
    for _ in range(4):
        source.receive(bytes(100))
    loop.wake()
    for _ in range(4):
        assert await asyncio.wait_for(sent.get(), 5) == bytes(100)
    assert paced.egress_backlog == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    loop.close()


# --- interfaces, as root ------------------------------------------------------------------------


def operational(interface: str) -> bool:
    return Path(f"/sys/class/net/{interface}/operstate").read_text().strip() == "up"


def hears(port: Port, frame: bytes) -> bool:
    port.drain()
    return frame in port.ingress


@pytest.fixture
def veth() -> Iterator[tuple[str, str]]:
    if os.geteuid() != 0:
        pytest.skip("needs root (veth, AF_PACKET)")
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command (iproute2)")
    suffix = secrets.token_hex(3)
    names = f"kvt{suffix}a", f"kvt{suffix}b"
    made = subprocess.run(
        ["ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1]],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"cannot make a veth pair: {made.stderr.strip()}")
    try:
        for name in names:
            subprocess.run(["ip", "link", "set", name, "up"], check=True)
        wait_until(lambda: all(operational(name) for name in names))
        yield names
    finally:
        # It is gone already where its other end went with a namespace.
        subprocess.run(["ip", "link", "del", names[0]], check=False, capture_output=True)


@pytest.mark.root
def test_interface_port_carries_frames_both_ways(veth: tuple[str, str]) -> None:
    ours = InterfacePort(1, veth[0])
    theirs = InterfacePort(2, veth[1])
    with contextlib.closing(ours), contextlib.closing(theirs):
        probe = FRAME + secrets.token_bytes(40)
        ours.transmit(probe, 0.0)
        assert ours.counters.tx_frames == 1
        wait_until(lambda: hears(theirs, probe))
        theirs.transmit(probe + b"!", 0.0)
        wait_until(lambda: hears(ours, probe + b"!"))
        # An interface does not hear itself.
        assert probe not in ours.ingress


@pytest.mark.root
def test_interface_ports_carry_long_frames_when_the_mtu_is_raised_later(
    veth: tuple[str, str],
) -> None:
    ours, theirs = InterfacePort(1, veth[0]), InterfacePort(2, veth[1])
    with contextlib.closing(ours), contextlib.closing(theirs):
        for name in veth:
            subprocess.run(["ip", "link", "set", name, "mtu", "12000"], check=True)
        for size in (1500, 9014, MAX_FRAME_BYTES):
            probe = FRAME + secrets.token_bytes(size - len(FRAME))
            ours.transmit(probe, 0.0)
            wait_until(lambda probe=probe: hears(theirs, probe))  # type: ignore[misc]
        ours.transmit(FRAME + bytes(MAX_FRAME_BYTES + 1 - len(FRAME)), 0.0)
        wait_until(lambda: theirs.drain() >= 0 and theirs.counters.rx_oversize == 1)
        assert ours.counters.tx_too_long == 0


@pytest.mark.root
def test_interface_port_counts_frames_above_the_mtu(veth: tuple[str, str]) -> None:
    port = InterfacePort(1, veth[0])
    with contextlib.closing(port):
        port.transmit(FRAME + bytes(3000), 0.0)
        assert port.counters.tx_too_long == 1
        assert port.counters.tx_frames == 0


@pytest.mark.root
def test_interface_port_keeps_vlan_tags(veth: tuple[str, str]) -> None:
    ours = InterfacePort(1, veth[0])
    theirs = InterfacePort(2, veth[1])
    with contextlib.closing(ours), contextlib.closing(theirs):
        tagged = FRAME[:12] + bytes.fromhex("8100 2064 88b5") + bytes(50)
        ours.transmit(tagged, 0.0)
        wait_until(lambda: hears(theirs, tagged))


@pytest.mark.root
def test_interface_port_completes_checksums_that_were_left_to_hardware(
    veth: tuple[str, str],
) -> None:
    """A UDP datagram from the kernel's own stack arrives with the checksum it has on a wire."""
    namespace = f"kvt{secrets.token_hex(3)}"
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        inside = ["ip", "-n", namespace]
        subprocess.run(["ip", "link", "set", veth[1], "netns", namespace], check=True)
        subprocess.run([*inside, "addr", "add", "10.99.0.1/24", "dev", veth[1]], check=True)
        subprocess.run([*inside, "link", "set", veth[1], "up"], check=True)
        subprocess.run(
            [*inside, "neigh", "add", "10.99.0.2", "lladdr", "02:00:00:00:00:02", "dev", veth[1]],
            check=True,
        )
        port = InterfacePort(1, veth[0])
        with contextlib.closing(port):
            send = (
                "import socket; s = socket.socket(type=socket.SOCK_DGRAM);"
                "s.sendto(b'kvcast!', ('10.99.0.2', 4242))"
            )
            subprocess.run(["ip", "netns", "exec", namespace, "python3", "-c", send], check=True)

            def heard() -> bytes | None:
                port.drain()
                return next((f for f in port.ingress if f.endswith(b"kvcast!")), None)

            wait_until(lambda: heard() is not None)
            frame = heard()
            assert frame is not None
        assert_udp_checksum(frame)
    finally:
        subprocess.run(["ip", "netns", "del", namespace], check=True)


def test_interface_that_does_not_exist_is_a_named_error() -> None:
    with pytest.raises(PortError, match="port 1: if:kvt-none"):
        InterfacePort(1, "kvt-none")


def test_every_counter_of_a_port_is_told_when_it_counts_drops() -> None:
    passed_on = {"rx_frames", "rx_bytes", "tx_frames", "tx_bytes"}
    asked_for, not_lost = {"rx_loss", "tx_loss"}, {"rx_errors", "tx_refused"}
    counted = set(InProcessPort(1).read_counters())
    assert set(REASONS) == counted - passed_on - asked_for - not_lost
