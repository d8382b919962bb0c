"""A port by AF_PACKET: an interface of the machine; needs CAP_NET_RAW.

Owns: the sockets, the mapped receive ring, and what the kernel leaves to hardware that is not
there: checksums, VLAN tags, segments. Must not know: what is in a frame beyond that.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import socket
import struct
from dataclasses import dataclass
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

log = logging.getLogger("kvcast.switchsim.ports.interface")

# From linux/if_packet.h and linux/if_ether.h; the socket module does not name them all.
_ETH_P_ALL: Final = 0x0003
_SOL_PACKET: Final = 263
_PACKET_ADD_MEMBERSHIP: Final = 1
_PACKET_MR_PROMISC: Final = 1
_PACKET_AUXDATA: Final = 8
_PACKET_VNET_HDR: Final = 15
_PACKET_QDISC_BYPASS: Final = 20
_PACKET_IGNORE_OUTGOING: Final = 23  # Linux 4.20
_TP_STATUS_VLAN_VALID: Final = 1 << 4
_TP_STATUS_VLAN_TPID_VALID: Final = 1 << 6
_TPACKET_AUXDATA: Final = struct.Struct("=IIIHHHH")
# struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
_VNET_HEADER: Final = struct.Struct("=BBHHHH")
_VNET_NEEDS_CSUM: Final = 1
_VNET_NO_OFFLOAD: Final = bytes(_VNET_HEADER.size)
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
_SIOCGIFMTU: Final = 0x8921
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
    "hardware", and tags that it took off: both are put right here, so the program sees the frame
    as it would be on a wire. Segments that were to be split by hardware are counted and dropped.

    The MTU may change while the port is open, and nothing here depends on it: frames up to
    MAX_FRAME_BYTES come in, whatever it was, and the kernel says which do not go out.
    """

    kind = "if"

    def __init__(self, number: int, interface: str, options: PortOptions | None = None) -> None:
        super().__init__(number, options or PortOptions())
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
        packets.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        packets.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        packets.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
        enlarge_buffers(packets)
        self._disable_offloads()
        packets.setsockopt(
            _SOL_PACKET,
            _PACKET_ADD_MEMBERSHIP,
            struct.pack("iHH8x", index, _PACKET_MR_PROMISC, 0),
        )
        packets.bind((interface, _ETH_P_ALL))
        self._sender: socket.socket | None = None
        self._ring: mmap.mmap | None = None

    def map_ring(self) -> MappedRing | None:
        """Let the kernel put received frames into memory that is mapped here, instead of handing
        them over one by one; None where it has no such memory. `drain` finds nothing from then
        on. The places fit the present MTU; of a frame that is longer, because the MTU was raised
        since, the ring holds the beginning, marked TP_STATUS_COPY, and the socket all of it."""
        reply = fcntl.ioctl(
            self._socket, _SIOCGIFMTU, struct.pack("16si12x", self.interface.encode(), 0)
        )
        mtu_bytes: int = struct.unpack_from("16si", reply)[1]
        longest = min(mtu_bytes + _ETHERNET_AND_VLAN_BYTES, MAX_FRAME_BYTES)
        stride = _RING_STRIDE
        while stride < _RING_HEAD_BYTES + longest:
            stride += 2 * stride if stride == _RING_STRIDE else 2 * _RING_STRIDE
        block = max(stride, _RING_BLOCK_BYTES // stride * stride)
        blocks = _RING_FRAMES * stride // block
        frames = blocks * (block // stride)
        try:
            self._socket.setsockopt(_SOL_PACKET, _PACKET_VERSION, _TPACKET_V2)
            self._socket.setsockopt(_SOL_PACKET, _PACKET_COPY_THRESH, 1)
            request = struct.pack("IIII", block, blocks, stride, frames)
            self._socket.setsockopt(_SOL_PACKET, _PACKET_RX_RING, request)
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
            sender.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
            enlarge_buffers(sender)
            sender.bind((self.interface, 0))
        except OSError as error:
            raise PortError(f"port {self.number}: if:{self.interface}: {error}") from error
        self._sender = sender
        return sender.fileno()

    def _disable_offloads(self) -> None:
        for name, command in _OFFLOADS.items():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", self.interface.encode(), ctypes.addressof(value))
            try:
                fcntl.ioctl(self._socket, _SIOCETHTOOL, request)
            except OSError as error:
                # Drivers lack some of them; what matters is caught again on reception.
                log.debug(
                    "offload not switched off",
                    extra={"interface": self.interface, "offload": name, "error": str(error)},
                )

    def fileno(self) -> int | None:
        return self._socket.fileno()

    def drain(self) -> int:
        size = _VNET_HEADER.size + MAX_FRAME_BYTES + 1
        aux_space = socket.CMSG_SPACE(_TPACKET_AUXDATA.size)
        arrived = 0
        for _ in range(self._room()):
            try:
                data, ancillary, _flags, _address = self._socket.recvmsg(size, aux_space)
            except BlockingIOError:
                break
            except OSError as error:
                self.counters.rx_errors += 1
                if error.errno != errno.ENETDOWN:
                    log.warning(
                        "port receive failed", extra={"port": self.number, "error": str(error)}
                    )
                break
            arrived += 1
            frame = self._as_on_the_wire(data, ancillary)
            if frame is None:
                self.counters.rx_unsplit += 1
            else:
                self.receive(frame)
        return arrived

    def _as_on_the_wire(self, data: bytes, ancillary: list[tuple[int, int, bytes]]) -> bytes | None:
        """The frame with checksum and tag put right; None for an unsplit segment."""
        flags, gso_type, _, _, start, offset = _VNET_HEADER.unpack_from(data)
        frame = data[_VNET_HEADER.size :]
        if gso_type:
            return None
        if flags & _VNET_NEEDS_CSUM:
            frame = complete_checksum(frame, start, offset)
        for level, kind, payload in ancillary:
            if level == _SOL_PACKET and kind == _PACKET_AUXDATA:
                status, _, _, _, _, tci, tpid = _TPACKET_AUXDATA.unpack_from(payload)
                if status & _TP_STATUS_VLAN_VALID:
                    if not status & _TP_STATUS_VLAN_TPID_VALID:
                        tpid = 0x8100
                    frame = frame[:12] + struct.pack("!HH", tpid, tci) + frame[12:]
        return frame

    def _send(self, frame: bytes) -> bool:
        try:
            self._socket.send(_VNET_NO_OFFLOAD + frame)
        except OSError as error:
            count_send_error(self.counters, error)
            return False
        return True

    def read_counters(self) -> dict[str, int]:
        if self._ring is None:
            self.counters.rx_kernel_drops = kernel_drops(self._socket)
        else:
            # struct tpacket_stats; reading it sets it back to 0.
            stats = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
            self.counters.rx_kernel_drops += struct.unpack("II", stats)[1]
        return super().read_counters()

    def describe(self) -> str:
        return f"if:{self.interface}"

    def close(self) -> None:
        super().close()
        if self._sender is not None:
            self._sender.close()
        self._socket.close()


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
