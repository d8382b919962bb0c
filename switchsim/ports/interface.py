"""A port by AF_PACKET: an interface of the machine; needs CAP_NET_RAW.

Owns: the sockets, their options, and the mapped receive ring. Must not know: what is in a frame,
and what `loop.ingress` puts right in it where the kernel left that to hardware not there.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import socket
import struct
from dataclasses import dataclass
from typing import Final

from kvcast.native.linux import PACKET_AUXDATA, SOL_PACKET
from kvcast.service.sockets import kernel_drops, mtu_of
from kvcast.switchsim.ports.port import (
    MAX_FRAME_BYTES,
    Port,
    PortError,
    PortOptions,
    enlarge_buffers,
)

log = logging.getLogger("kvcast.switchsim.ports.interface")

# From linux/if_packet.h and linux/if_ether.h; the socket module does not name them all.
_ETH_P_ALL: Final = 0x0003
_PACKET_ADD_MEMBERSHIP: Final = 1
_PACKET_MR_PROMISC: Final = 1
_PACKET_VNET_HDR: Final = 15
_PACKET_QDISC_BYPASS: Final = 20
_PACKET_IGNORE_OUTGOING: Final = 23  # Linux 4.20
_PACKET_RX_RING: Final = 5
_PACKET_STATISTICS: Final = 6
_PACKET_COPY_THRESH: Final = 7
_PACKET_VERSION: Final = 10
_TPACKET_V2: Final = 1
_RING_FRAMES: Final = 4096
_RING_STRIDE: Final = 2048
_RING_BLOCK_BYTES: Final = 64 << 10
# struct tpacket2_hdr, struct sockaddr_ll, alignment, virtio header, link header
_RING_HEAD_BYTES: Final = 96
_SIOCETHTOOL: Final = 0x8946
# linux/ethtool.h: ETHTOOL_S{RXCSUM,TXCSUM,SG,TSO,UFO,GSO,GRO}
_OFFLOADS: Final = {
    "rx-checksum": 0x15,
    "tx-checksum": 0x17,
    "scatter-gather": 0x19,
    "tso": 0x1F,
    "ufo": 0x22,
    "gso": 0x24,
    "gro": 0x2C,
}
_ETHERNET_AND_VLAN_BYTES: Final = 18


def switch_offloads_off(control: socket.socket, interface: str) -> None:
    """Have an interface leave checksums and segments alone. `control`: any socket in the network
    namespace of the interface."""
    for name, command in _OFFLOADS.items():
        value = ctypes.create_string_buffer(struct.pack("II", command, 0))
        request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
        try:
            fcntl.ioctl(control, _SIOCETHTOOL, request)
        except OSError as error:
            # Drivers lack some of them; what matters is caught again on reception.
            log.debug(
                "offload not switched off",
                extra={"interface": interface, "offload": name, "error": str(error)},
            )


@dataclass(frozen=True, slots=True)
class MappedRing:
    """Memory that the kernel fills with frames (TPACKET_V2)."""

    address: int
    frames: int
    stride: int
    """Bytes from one frame to the next."""


class InterfacePort(Port):
    """A network interface, by AF_PACKET.

    Hears what arrives there (promiscuous, not what the machine itself sends) and turns the
    interface's offloads off. veth still hands over frames whose sender left the checksum to the
    "hardware", and tags that it took off: the loop puts both right, so the program sees the frame
    as it would be on a wire. Segments that were to be split by hardware are counted and dropped.

    The MTU may change while the port is open, and nothing here depends on it: frames up to
    MAX_FRAME_BYTES come in, whatever it was, and the kernel says which do not go out.
    """

    kind = "if"

    def __init__(self, number: int, interface: str, options: PortOptions | None = None) -> None:
        super().__init__(number, options)
        self.interface = interface
        try:
            # Protocol 0 hears nothing until bind names the interface and ETH_P_ALL.
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except PermissionError as error:
            raise PortError(f"port {number}: if:{interface} needs CAP_NET_RAW") from error
        try:
            self._open(interface)
        except OSError as error:
            self._socket.close()
            raise PortError(f"port {number}: if:{interface}: {error}") from error

    def _open(self, interface: str) -> None:
        packets = self._socket
        packets.setblocking(False)
        index = socket.if_nametoindex(interface)
        packets.setsockopt(SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        packets.setsockopt(SOL_PACKET, _PACKET_VNET_HDR, 1)
        packets.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
        enlarge_buffers(packets)
        switch_offloads_off(packets, interface)
        packets.setsockopt(
            SOL_PACKET,
            _PACKET_ADD_MEMBERSHIP,
            struct.pack("iHH8x", index, _PACKET_MR_PROMISC, 0),
        )
        packets.bind((interface, _ETH_P_ALL))
        self._sender: socket.socket | None = None
        self._ring: mmap.mmap | None = None
        self._ring_drops = 0

    def map_ring(self) -> MappedRing | None:
        """Let the kernel put received frames into memory that is mapped here, instead of handing
        them over one by one; None where it has no such memory. The places fit the present MTU; of
        a frame that is longer, because the MTU was raised since, the ring holds the beginning,
        marked TP_STATUS_COPY, and the socket all of it."""
        mtu_bytes = mtu_of(self._socket, self.interface)
        longest = min(mtu_bytes + _ETHERNET_AND_VLAN_BYTES, MAX_FRAME_BYTES)
        stride = _RING_STRIDE
        while stride < _RING_HEAD_BYTES + longest:
            stride += 2 * stride if stride == _RING_STRIDE else 2 * _RING_STRIDE
        block = max(stride, _RING_BLOCK_BYTES // stride * stride)
        blocks = _RING_FRAMES * stride // block
        frames = blocks * (block // stride)
        try:
            self._socket.setsockopt(SOL_PACKET, _PACKET_VERSION, _TPACKET_V2)
            self._socket.setsockopt(SOL_PACKET, _PACKET_COPY_THRESH, 1)
            request = struct.pack("IIII", block, blocks, stride, frames)
            self._socket.setsockopt(SOL_PACKET, _PACKET_RX_RING, request)
            self._ring = mmap.mmap(self._socket.fileno(), block * blocks)
        except OSError as error:
            log.info("no mapped ring", extra={"interface": self.interface, "error": str(error)})
            return None
        self._ring_view = (ctypes.c_uint8 * (block * blocks)).from_buffer(self._ring)
        return MappedRing(ctypes.addressof(self._ring_view), frames, stride)

    def open_sender(self) -> int:
        """A descriptor that only sends, frames without the virtio header and past the queueing
        discipline; PortError where the kernel refuses."""
        try:
            sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
            sender.setsockopt(SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
            enlarge_buffers(sender)
            sender.bind((self.interface, 0))
        except OSError as error:
            raise PortError(f"port {self.number}: if:{self.interface}: {error}") from error
        self._sender = sender
        return sender.fileno()

    def fileno(self) -> int:
        return self._socket.fileno()

    def kernel_drops(self) -> int:
        if self._ring is None:
            return kernel_drops(self._socket)
        # struct tpacket_stats; reading it sets it back to 0.
        stats = self._socket.getsockopt(SOL_PACKET, _PACKET_STATISTICS, 8)
        self._ring_drops += struct.unpack("II", stats)[1]
        return self._ring_drops

    def describe(self) -> str:
        return f"if:{self.interface}"

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._socket.close()
