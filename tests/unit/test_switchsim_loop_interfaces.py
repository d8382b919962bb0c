"""The compiled loop on network interfaces: veth pairs that the test makes (root).

Oracle: raw sockets at the far ends, the kernel's own stack in a namespace, and
`port_checks.complete_checksum`. The program is `native_double`. Cannot see: what real NICs hand
over.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import secrets
import subprocess
import time
from collections.abc import Iterator

import pytest
import veth_pairs
from kvcast.native.subset import Library
from kvcast.switchsim.loop.ingress import complete_checksum as compiled_checksum
from kvcast.switchsim.loop.runner import NativeLoop
from kvcast.switchsim.ports.interface import InterfacePort
from kvcast.switchsim.ports.port import MAX_FRAME_BYTES
from native_double import Double, frame_to
from port_checks import assert_udp_checksum, complete_checksum, wait_until
from veth_pairs import Wires, ip, needs_root, set_mtu, up


def test_the_checksum_is_that_of_plain_python() -> None:
    call = Library(compiled_checksum).call(compiled_checksum)
    rng = random.Random(3)
    for _ in range(3000):
        frame = rng.randbytes(rng.randrange(14, 200))
        if rng.random() < 0.1:
            frame = bytes(len(frame))
        start, offset = rng.randrange(0, 120), rng.choice((6, 16, rng.randrange(40)))
        buffer = ctypes.create_string_buffer(frame, len(frame))
        call(ctypes.addressof(buffer), len(frame), start, offset)
        assert buffer.raw == complete_checksum(frame, start, offset), (start, offset, frame.hex())


def test_plain_python_completes_checksums_as_the_hardware_would() -> None:
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


# --- a star of two veth pairs -------------------------------------------------------------------


@pytest.fixture
def wires(request: pytest.FixtureRequest) -> Iterator[Wires]:
    with veth_pairs.wires(getattr(request, "param", 1500)) as made:
        yield made


@contextlib.contextmanager
def running(
    wires: Wires, *, kind: str = "mapped", double: Double | None = None
) -> Iterator[NativeLoop]:
    ports = [InterfacePort(n + 1, wires.ours[n]) for n in range(2)]
    if kind == "recvmmsg":
        for port in ports:
            port.map_ring = lambda: None  # type: ignore[method-assign]
    loop = NativeLoop(ports)
    try:
        loop.use((double or Double()).entry)
        loop.start()
        yield loop
    finally:
        loop.close()
        for port in ports:
            port.close()


@pytest.mark.parametrize("kind", ["mapped", "recvmmsg"])
class TestOnVeth:
    pytestmark = needs_root

    def test_frames_pass_unchanged_both_ways(self, wires: Wires, kind: str) -> None:
        rng = random.Random(1)
        with running(wires, kind=kind) as loop:
            there = [frame_to(2, rng.randrange(60, 1515), label=i) for i in range(3000)]
            back = [frame_to(1, rng.randrange(60, 1515), label=i) for i in range(3000)]
            heard: list[list[bytes]] = [[], []]
            for one, two in zip(there, back, strict=True):
                wires.far[0].send(one)
                wires.far[1].send(two)
                if len(heard[0]) % 100 == 0:
                    time.sleep(0.0005)
                heard[0] += wires.hears(0)
                heard[1] += wires.hears(1)

            def complete() -> bool:
                heard[0] += wires.hears(0)
                heard[1] += wires.hears(1)
                return len(heard[0]) >= 3000 and len(heard[1]) >= 3000

            wait_until(complete)
            assert heard[1] == there
            assert heard[0] == back
            assert loop.read_counters(1)["rx_kernel_drops"] == 0
            assert loop.read_counters(1)["tx_frames"] == 3000

    def test_more_frames_than_the_ring_holds_come_through_in_order(
        self, wires: Wires, kind: str
    ) -> None:
        with running(wires, kind=kind):
            heard: list[bytes] = []
            for start in range(0, 10_000, 500):
                for label in range(start, start + 500):
                    wires.far[0].send(frame_to(2, 100, label=label))
                wait_until(
                    lambda start=start: heard.extend(wires.hears(1)) or len(heard) == start + 500  # type: ignore[misc]
                )
            assert heard == [frame_to(2, 100, label=label) for label in range(10_000)]

    @pytest.mark.parametrize("wires", [9000], indirect=True)
    def test_jumbo_frames_pass(self, wires: Wires, kind: str) -> None:
        with running(wires, kind=kind):
            sent = [frame_to(2, size, label=size) for size in (60, 1514, 4000, 9014)]
            for frame in sent:
                wires.far[0].send(frame)
            heard: list[bytes] = []
            wait_until(lambda: heard.extend(wires.hears(1)) or len(heard) == 4)  # type: ignore[func-returns-value]
            assert heard == sent

    def test_frames_pass_when_the_mtu_was_raised_after_the_start(
        self, wires: Wires, kind: str
    ) -> None:
        """Long frames keep their place among short ones, also where the mapped ring was made for
        short ones; what is longer than the switch takes is counted as that."""
        rng = random.Random(5)
        with running(wires, kind=kind) as loop:
            set_mtu(wires, 12_000)
            sent = [
                frame_to(2, rng.choice((60, 1514, 1950, 2100, 9014, MAX_FRAME_BYTES)), label=label)
                for label in range(600)
            ]
            heard: list[bytes] = []
            for number, frame in enumerate(sent, start=1):
                wires.far[0].send(frame)
                if number % 50 == 0:
                    wait_until(lambda n=number: heard.extend(wires.hears(1)) or len(heard) >= n)  # type: ignore[misc]
            assert heard == sent
            assert loop.read_counters(1)["rx_frames"] == 600
            for size in (MAX_FRAME_BYTES + 1, 12_000):
                wires.far[0].send(frame_to(2, size))
            wait_until(lambda: loop.read_counters(1)["rx_oversize"] == 2)
            wires.far[0].send(frame_to(2, 9014, label=9))
            wait_until(lambda: wires.hears(1) == [frame_to(2, 9014, label=9)])
            counts = loop.read_counters(1)
            assert (counts["rx_kernel_drops"], counts["rx_errors"]) == (0, 0)

    def test_an_interface_that_goes_down_between_long_frames_leaves_none_in_another_s_place(
        self, wires: Wires, kind: str
    ) -> None:
        with running(wires, kind=kind) as loop:
            set_mtu(wires, 9000)
            for round_ in range(5):
                loop.stop()
                first, second = (frame_to(2, 9014, label=2 * round_ + i) for i in range(2))
                wires.far[0].send(first)
                ip("link", "set", wires.ours[0], "down")
                ip("link", "set", wires.ours[0], "up")
                wait_until(lambda: up(wires.ours[0]) and up(wires.theirs[0]))
                wires.far[0].send(second)
                loop.start()
                heard: list[bytes] = []
                wait_until(lambda: heard.extend(wires.hears(1)) or len(heard) == 2)  # type: ignore[func-returns-value] # noqa: B023
                assert heard == [first, second]
            assert loop.read_counters(1)["rx_errors"] == 5

    def test_vlan_tags_that_the_kernel_took_off_are_put_back(self, wires: Wires, kind: str) -> None:
        with running(wires, kind=kind):
            tags = (bytes.fromhex("8100 2064"), bytes.fromhex("88a8 0065"))
            frames = [frame_to(2)[:12] + tag + frame_to(2, 80)[12:] for tag in tags]
            for frame in frames:
                wires.far[0].send(frame)
            heard: list[bytes] = []
            # The far end's socket has the tags taken off again: what it hears is the rest.
            wait_until(lambda: heard.extend(wires.hears(1)) or len(heard) == 2)  # type: ignore[func-returns-value]
            assert {len(frame) for frame in heard} <= {80, 84}

    def test_frames_above_the_mtu_are_counted_where_they_cannot_leave(
        self, wires: Wires, kind: str
    ) -> None:
        with running(wires, kind=kind) as loop:
            loop.inject(1, frame_to(2, 3000))
            loop.wake()
            wait_until(lambda: loop.read_counters(2)["tx_too_long"] == 1)
            loop.inject(1, frame_to(2, 300, label=9))
            loop.wake()
            heard: list[bytes] = []
            wait_until(lambda: heard.extend(wires.hears(1)) or bool(heard))  # type: ignore[func-returns-value]
            assert heard == [frame_to(2, 300, label=9)]

    def test_an_interface_that_goes_down_and_up_is_no_end_and_no_busy_loop(
        self, wires: Wires, kind: str
    ) -> None:
        with running(wires, kind=kind) as loop:
            ip("link", "set", wires.ours[0], "down")
            wait_until(lambda: loop.read_counters(1)["rx_errors"] == 1)
            busy_us = loop.counters["busy_us"]
            time.sleep(0.3)
            assert loop.counters["busy_us"] - busy_us < 150_000
            assert loop.read_counters(1)["rx_errors"] == 1
            loop.inject(2, frame_to(1))
            loop.wake()
            wait_until(lambda: loop.read_counters(1)["tx_errors"] == 1)
            ip("link", "set", wires.ours[0], "up")
            wait_until(lambda: up(wires.ours[0]))
            heard: list[bytes] = []

            def arrives() -> bool:
                wires.far[0].send(frame_to(2, label=3))
                heard.extend(wires.hears(1))
                return bool(heard)

            wait_until(arrives)
            assert heard[0] == frame_to(2, label=3)

    def test_hostile_frames_are_counted_and_stop_nothing(self, wires: Wires, kind: str) -> None:
        rng = random.Random(11)
        with running(wires, kind=kind, double=Double(flood_ports=600)) as loop:
            sent = 0
            for _ in range(3000):
                with contextlib.suppress(OSError):
                    wires.far[0].send(rng.randbytes(rng.randrange(1, 1515)))
                    sent += 1
            wires.far[0].send(frame_to(2, label=77))
            heard: list[bytes] = []
            wait_until(lambda: heard.extend(wires.hears(1)) or frame_to(2, label=77) in heard)  # type: ignore[func-returns-value]
            counts = loop.read_counters(1)
            assert counts["rx_frames"] + counts["rx_runts"] + counts["rx_kernel_drops"] >= sent
            assert loop.counters["no_such_port"] > 0

    def test_what_the_stack_left_to_the_hardware_is_done(self, wires: Wires, kind: str) -> None:
        """A datagram from the kernel's own stack has its checksum, and one that the kernel would
        have split in hardware is counted and dropped."""
        namespace = f"kvt{secrets.token_hex(3)}"
        ip("netns", "add", namespace)
        try:
            inside, far = ["-n", namespace], wires.theirs[0]
            wires.far[0].close()
            ip("link", "set", far, "netns", namespace)
            ip(*inside, "addr", "add", "10.99.0.1/24", "dev", far)
            ip(*inside, "link", "set", far, "up")
            ip(*inside, "neigh", "add", "10.99.0.2", "lladdr", "02:00:00:00:00:02", "dev", far)
            double = Double(flood_ports=2)
            with running(wires, kind=kind, double=double) as loop:
                wait_until(lambda: up(wires.ours[0]))
                send = (
                    "import socket; s = socket.socket(type=socket.SOCK_DGRAM);"
                    "s.sendto(b'kvcast!', ('10.99.0.2', 4242));"
                    # UDP_SEGMENT: four datagrams of 500 bytes, for the hardware to split
                    "s.setsockopt(17, 103, 500); s.sendto(bytes(2000), ('10.99.0.2', 4242))"
                )
                subprocess.run(
                    ["ip", "netns", "exec", namespace, "python3", "-c", send], check=True
                )
                frames: list[bytes] = []

                def heard() -> bytes | None:
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            frames.append(wires.far[1].recv(20_000))
                    return next((f for f in frames if f.endswith(b"kvcast!")), None)

                wait_until(lambda: heard() is not None)
                frame = heard()
                assert frame is not None
                # Split by the kernel, since the interface's offloads are off; or not, and counted.
                wait_until(
                    lambda: (
                        loop.read_counters(1)["rx_unsplit"] == 1
                        or (heard() is not None and sum(len(f) == 542 for f in frames) == 4)
                    )
                )
            assert_udp_checksum(frame)
        finally:
            ip("netns", "del", namespace)


class TestMappedRing:
    pytestmark = needs_root

    def test_what_a_full_ring_loses_is_counted(self, wires: Wires) -> None:
        ports = [InterfacePort(n + 1, wires.ours[n]) for n in range(2)]
        loop = NativeLoop(ports)
        try:
            for label in range(6000):
                wires.far[0].send(frame_to(2, label=label))
            loop.use(Double().entry)
            loop.start()
            wait_until(
                lambda: (
                    loop.read_counters(1)["rx_frames"] + loop.read_counters(1)["rx_kernel_drops"]
                    >= 6000
                )
            )
            assert loop.read_counters(1)["rx_kernel_drops"] > 0
            drops = loop.read_counters(1)["rx_kernel_drops"]
            assert loop.read_counters(1)["rx_kernel_drops"] == drops
        finally:
            loop.close()
            for port in ports:
                port.close()
