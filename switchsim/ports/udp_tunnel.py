"""A port by UDP: one datagram is one Ethernet frame; needs no privilege.

Owns: the socket. Must not know: what is in a frame.
"""

from __future__ import annotations

import socket

from kvcast.native.linux import SOL_UDP, UDP_GRO
from kvcast.service.sockets import kernel_drops
from kvcast.switchsim.ports.port import Port, PortError, PortOptions, enlarge_buffers

Address = tuple[str, int]


class UdpTunnelPort(Port):
    """Ethernet over UDP: one datagram is one frame, with nothing before or behind it.

    With a peer, the socket is connected and the kernel drops what others send. Without one, the
    sender of the last datagram is the peer; only senders on this machine (a loopback address, or
    the address that the port is bound to) are believed.
    """

    kind = "udp"

    def __init__(
        self, number: int, local: Address, peer: Address | None, options: PortOptions | None = None
    ) -> None:
        super().__init__(number, options)
        self.fixed_peer = peer is not None
        self.peer = peer
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(local)
            if peer is not None:
                self._socket.connect(peer)
        except OSError as error:
            self._socket.close()
            raise PortError(f"port {number}: UDP {local} to {peer}: {error}") from error
        enlarge_buffers(self._socket)
        self.local: Address = self._socket.getsockname()

    def segment_frames(self) -> bool:
        """Ask the kernel to hand over frames of one length in one piece (UDP_GRO), and say
        whether it can."""
        try:
            self._socket.setsockopt(SOL_UDP, UDP_GRO, 1)
        except OSError:
            return False
        return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def kernel_drops(self) -> int:
        return kernel_drops(self._socket)

    def describe(self) -> str:
        text = f"udp:{self.local[0]}:{self.local[1]}"
        return f"{text}:{self.peer[0]}:{self.peer[1]}" if self.fixed_peer and self.peer else text

    def close(self) -> None:
        self._socket.close()
