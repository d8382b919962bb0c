"""A port by UDP: one datagram is one Ethernet frame; needs no privilege.

Owns: the socket and who is believed to be the peer. Must not know: what is in a frame.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from typing import Final

from kvcast.switchsim.ports.port import (
    MAX_FRAME_BYTES,
    Port,
    PortError,
    PortOptions,
    count_send_error,
    enlarge_buffers,
    kernel_drops,
)

log = logging.getLogger("kvcast.switchsim.ports.udp_tunnel")

Address = tuple[str, int]

_SOL_UDP: Final = 17
_UDP_GRO: Final = 104  # linux/udp.h


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
        super().__init__(number, options or PortOptions())
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
        self._local_addresses = {self.local[0]}

    def segment_frames(self) -> bool:
        """Ask the kernel to hand over frames of one length in one piece (UDP_GRO), and say
        whether it can. `drain` cannot take them apart: for the compiled loop."""
        try:
            self._socket.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        except OSError:
            return False
        return True

    def fileno(self) -> int | None:
        return self._socket.fileno()

    def drain(self) -> int:
        arrived = 0
        for _ in range(self._room()):
            try:
                frame, sender = self._socket.recvfrom(MAX_FRAME_BYTES + 1)
            except BlockingIOError:
                break
            except ConnectionRefusedError:
                # An earlier frame found nobody at the peer's address; the socket stays usable.
                self.counters.tx_refused += 1
                continue
            except OSError as error:
                self.counters.rx_errors += 1
                log.warning("port receive failed", extra={"port": self.number, "error": str(error)})
                break
            if not self.fixed_peer and sender != self.peer and not self._learn(sender):
                self.counters.rx_foreign += 1
                continue
            self.receive(frame)
            arrived += 1
        return arrived

    def _learn(self, sender: Address) -> bool:
        address = sender[0]
        if address not in self._local_addresses:
            if not ipaddress.IPv4Address(address).is_loopback:
                return False
            self._local_addresses.add(address)
        log.info("port peer learned", extra={"port": self.number, "peer": f"{address}:{sender[1]}"})
        self.peer = sender
        return True

    def _send(self, frame: bytes) -> bool:
        try:
            if self.fixed_peer:
                self._send_connected(frame)
            elif self.peer is None:
                self.counters.tx_no_peer += 1
                return False
            else:
                self._socket.sendto(frame, self.peer)
        except OSError as error:
            count_send_error(self.counters, error)
            return False
        return True

    def _send_connected(self, frame: bytes) -> None:
        try:
            self._socket.send(frame)
        except ConnectionRefusedError:
            # The error belongs to an earlier frame; this one has not been sent yet.
            self.counters.tx_refused += 1
            self._socket.send(frame)

    def read_counters(self) -> dict[str, int]:
        self.counters.rx_kernel_drops = kernel_drops(self._socket)
        return super().read_counters()

    def describe(self) -> str:
        text = f"udp:{self.local[0]}:{self.local[1]}"
        return f"{text}:{self.peer[0]}:{self.peer[1]}" if self.fixed_peer and self.peer else text

    def close(self) -> None:
        super().close()
        self._socket.close()
