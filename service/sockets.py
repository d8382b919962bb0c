"""What the kernel says and gives of a socket, where Python has no words for it.

Owns: buffers beyond the system's limit, the count of what was dropped before a socket, an
interface's MTU. Must not know: what a socket is for.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

_SO_SNDBUFFORCE: Final = 32  # asm-generic/socket.h
_SO_RCVBUFFORCE: Final = 33
_SO_MEMINFO: Final = 55  # nine u32, the last counts drops
_MEMINFO: Final = struct.Struct("=9I")
_SIOCGIFMTU: Final = 0x8921  # linux/sockios.h
_MTU_REQUEST: Final = struct.Struct("16si20x")  # struct ifreq


def set_buffer(sock: socket.socket, size_bytes: int, *, receive: bool) -> int:
    """Ask for a socket buffer, beyond the system's limit with CAP_NET_ADMIN, else up to it; what
    the kernel gave, in bytes."""
    option = socket.SO_RCVBUF if receive else socket.SO_SNDBUF
    force = _SO_RCVBUFFORCE if receive else _SO_SNDBUFFORCE
    try:
        sock.setsockopt(socket.SOL_SOCKET, force, size_bytes)
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, option, size_bytes)
    return sock.getsockopt(socket.SOL_SOCKET, option)


def kernel_drops(sock: socket.socket) -> int:
    """Datagrams or frames that the kernel has dropped before this socket, since it was made."""
    return int(_MEMINFO.unpack(sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size))[8])


def mtu_of(sock: socket.socket, interface: str) -> int:
    """An interface's MTU in bytes, asked by way of any socket. OSError if there is none."""
    reply = fcntl.ioctl(sock, _SIOCGIFMTU, _MTU_REQUEST.pack(interface.encode(), 0))
    return int(_MTU_REQUEST.unpack(reply)[1])
