"""What the tests of ports share: waiting for what a loop does in its own time, and what a datagram
has on a wire."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds; fail where it does not within a minute."""
    deadline_s = time.monotonic() + 60
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


def complete_checksum(frame: bytes, start: int, offset: int) -> bytes:
    """Do what the sender left to the hardware: the Internet checksum (RFC 1071) of everything
    from `start`, where the field at `start + offset` holds the pseudo-header's sum.

    A frame that is too short for its own instructions is returned as it is.
    """
    at = start + offset
    if at + 2 > len(frame):
        return frame
    covered = frame[start:] if (len(frame) - start) % 2 == 0 else frame[start:] + b"\0"
    # A number modulo 0xffff is the one's complement sum of its 16-bit digits.
    total = int.from_bytes(covered, "big")
    checksum = 0xFFFF - (total % 0xFFFF or (0xFFFF if total else 0))
    if checksum == 0 and offset == 6:
        checksum = 0xFFFF  # UDP: 0 would mean "no checksum" (RFC 768)
    return frame[:at] + checksum.to_bytes(2, "big") + frame[at + 2 :]
