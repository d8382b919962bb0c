"""Two veth pairs: a switch has one end of each, the test has raw sockets at the others (root)."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root (veth, AF_PACKET)"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs the ip command (iproute2)"),
]


@dataclass
class Wires:
    """Two veth pairs; the switch has `ours`, the test has sockets at the other ends."""

    ours: tuple[str, str]
    theirs: tuple[str, str]
    far: list[socket.socket]

    def hears(self, end: int) -> list[bytes]:
        """Frames of the double that have come to a far end, up to now."""
        heard = []
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = self.far[end].recv(20_000)
                if frame[6:11] == bytes((2, 0, 0, 0, 0)):
                    heard.append(frame)
        return heard


def _far_socket(interface: str) -> socket.socket:
    endpoint = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    endpoint.setsockopt(263, 23, 1)  # PACKET_IGNORE_OUTGOING
    endpoint.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
    endpoint.setsockopt(socket.SOL_SOCKET, 32, 64 << 20)  # SO_SNDBUFFORCE
    endpoint.bind((interface, 3))  # ETH_P_ALL
    return endpoint


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def up(interface: str) -> bool:
    return Path(f"/sys/class/net/{interface}/operstate").read_text().strip() == "up"


@contextlib.contextmanager
def wires(mtu_bytes: int = 1500) -> Iterator[Wires]:
    """Two pairs of that MTU, all ends up; gone on leaving."""
    mtu = str(mtu_bytes)
    suffix = secrets.token_hex(3)
    ours = (f"kvn{suffix}a", f"kvn{suffix}b")
    theirs = (f"kvn{suffix}c", f"kvn{suffix}d")
    with contextlib.ExitStack() as stack:
        for near, away in zip(ours, theirs, strict=True):
            ip("link", "add", near, "mtu", mtu, "type", "veth", "peer", "name", away)
            # It is gone already where its other end went with a namespace.
            stack.callback(
                subprocess.run, ["ip", "link", "del", near], check=False, capture_output=True
            )
            ip("link", "set", away, "mtu", mtu)
            for name in (near, away):
                Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
                ip("link", "set", name, "up")
        deadline_s = time.monotonic() + 20
        while not all(map(up, (*ours, *theirs))):
            assert time.monotonic() < deadline_s, "the interfaces do not come up"
            time.sleep(0.01)
        far = [stack.enter_context(_far_socket(name)) for name in theirs]
        yield Wires(ours, theirs, far)


def set_mtu(wires: Wires, mtu_bytes: int) -> None:
    """Of all four ends."""
    for name in (*wires.ours, *wires.theirs):
        ip("link", "set", name, "mtu", str(mtu_bytes))
