"""What the tests of ports share, of the reference loop and of the compiled one: waiting for what a
loop does in its own time, and what a datagram has on a wire."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds; fail where it does not within twenty seconds."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.001)


def assert_udp_checksum(frame: bytes) -> None:
    """An untagged IPv4 frame without options has a UDP checksum, and it is right."""
    udp = frame[34:]
    pseudo = frame[26:34] + struct.pack("!BBH", 0, 17, len(udp))
    covered = pseudo + udp + b"\0" * (len(udp) % 2)
    assert udp[6:8] != b"\0\0"
    assert int.from_bytes(covered, "big") % 0xFFFF == 0
