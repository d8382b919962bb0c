"""Who is at the other end of a Unix socket, in the kernel's words.

Owns: unix(7)'s SO_PEERCRED and SO_PEERGROUPS. Must not know: what a peer may do
(`kvcast.hostagent.core.access`).
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Final

from kvcast.hostagent.core.access import Peer

_UCRED: Final = struct.Struct("3i")
_SO_PEERGROUPS: Final = 59  # asm-generic/socket.h; Python's socket module does not name it
_MAX_GROUPS: Final = 65536  # NGROUPS_MAX


def peer_of(connection: socket.socket) -> Peer:
    """Who has connected, in the kernel's words; it cannot be forged."""
    _pid, uid, gid = _UCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return Peer(uid, frozenset({gid, *_further_groups(connection)}))


def _further_groups(connection: socket.socket) -> tuple[int, ...]:
    size_bytes = 64 * 4
    while size_bytes <= 4 * _MAX_GROUPS:
        try:
            packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, size_bytes)
        except OSError as error:
            if error.errno != errno.ERANGE:
                return ()  # a kernel before 4.13 does not tell
            size_bytes *= 4
        else:
            return struct.unpack(f"{len(packed) // 4}I", packed)
    return ()
