"""What the kernel knows of this node's network interfaces.

Owns: which interface has an address, its MTU and its speed. Must not know: what they are for.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Final

from kvcast.protocol.messages.ethernet import ETHERNET_MTU_BYTES
from kvcast.service.sockets import mtu_of

_SIOCGIFCONF: Final = 0x8912  # linux/sockios.h
_SIOCGIFNETMASK: Final = 0x891B
_IFREQ_BYTES: Final = 40
_MAX_ADDRESSES: Final = 4096
_LARGEST_MTU_BYTES: Final = 65_535
"""An IPv4 packet is no longer, whatever the interface takes (loopback: 65,536)."""


def interface_mtu(ip: str) -> int:
    """The MTU, in bytes of an IPv4 packet, of the interface that has the address `ip`; Ethernet's
    where none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name = "lo" if IPv4Address(ip).is_loopback else _interface_of(sock, ip)
        if name is None:
            return ETHERNET_MTU_BYTES
        return min(mtu_of(sock, name), _LARGEST_MTU_BYTES)


def interface_network(ip: str) -> IPv4Network:
    """The network that the address `ip` of this node is in; itself alone where no interface has
    it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name = _interface_of(sock, ip)
        if name is None:
            return IPv4Network(ip)
        request = struct.pack("16sH2x4s16x", name.encode(), socket.AF_INET, socket.inet_aton(ip))
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFNETMASK, request)
        except OSError:  # under another label only
            return IPv4Network(ip)
    return IPv4Network(f"{ip}/{IPv4Address(answer[20:24])}", strict=False)


def interface_bits_per_s(ip: str) -> int:
    """What the interface that has the address `ip` carries each way; 0 where the kernel does not
    know, as of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name = None if IPv4Address(ip).is_loopback else _interface_of(sock, ip)
    if name is None:
        return 0
    try:
        megabits_per_s = int(Path("/sys/class/net", name, "speed").read_text())
    except (OSError, ValueError):  # EINVAL where the link is down, or has no speed
        return 0
    return max(0, megabits_per_s) * 1_000_000


def _interface_of(sock: socket.socket, ip: str) -> str | None:
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    address, length = buffer.buffer_info()
    answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iP", length, address))
    (used,) = struct.unpack_from("i", answer)
    wanted = socket.inet_aton(ip)
    listed = buffer.tobytes()[:used]
    for at in range(0, used, _IFREQ_BYTES):
        # struct ifreq: the interface's name, and a sockaddr_in whose address is its third field
        if listed[at + 20 : at + 24] == wanted:
            label = listed[at : at + 16].partition(b"\0")[0].decode()
            return label.partition(":")[0]
    return None
