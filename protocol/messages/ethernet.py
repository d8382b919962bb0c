"""Ethernet, IPv4 and UDP around a kvcast datagram, for agents that send whole frames.

Owns: building and parsing the 42 bytes in front of a datagram when it travels as an Ethernet
frame (inside a UDP tunnel to a software switch). An agent with a UDP socket of its own never
comes here. Must not know: the kvcast header (`wire.py`), tunnels, sockets.

IPv4 without options or fragments (RFC 791, RFC 6864: identification 0 with DF set), UDP with
checksum 0 (RFC 768: none), as the switch writes them too.
"""

from __future__ import annotations

import re
import struct
from ipaddress import AddressValueError, IPv4Address
from typing import Final, NamedTuple

from kvcast.protocol.messages.wire import (
    ETHERNET,
    ETHERTYPE_IPV4,
    IP_PROTOCOL_UDP,
    IPV4,
    MAX_DATAGRAM_BYTES,
    UDP,
    UDP_PORT,
    Buffer,
    WireError,
)

_FRAME: Final = struct.Struct("!6s6sH BBHHHBBHII HHHH")
"""Ethernet, IPv4 and UDP in one go; IPv4's sub-byte fields as whole bytes and halves."""
FRAME_OVERHEAD_BYTES: Final = ETHERNET.size_bytes + IPV4.size_bytes + UDP.size_bytes
assert _FRAME.size == FRAME_OVERHEAD_BYTES
ETHERNET_MTU_BYTES: Final = 1500
"""What an Ethernet carries unless it is set up for more; of an IPv4 packet, its header included."""

_IP_START: Final = ETHERNET.size_bytes
_UDP_START: Final = _IP_START + IPV4.size_bytes
VERSION_IHL: Final = 0x45
"""Version 4, and a header of five words: none with options."""
_DONT_FRAGMENT: Final = 0x4000
FRAGMENT_BITS: Final = 0x3FFF
"""More fragments, and offset."""
_TTL: Final = 64
_unpack = _FRAME.unpack_from
_MAC: Final = re.compile(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}")


class Endpoint(NamedTuple):
    """A node on the network behind the switch: MAC (6 bytes), IPv4 (32-bit integer), UDP port."""

    mac: bytes
    ip: int
    udp_port: int = UDP_PORT


class Datagram(NamedTuple):
    """A parsed frame; `payload` is a view of the frame's UDP payload."""

    src: Endpoint
    dst: Endpoint
    payload: memoryview


def parse_mac(text: str) -> bytes:
    """ "02:6b:76:00:00:01" as 6 bytes; ValueError if it is no MAC address."""
    if _MAC.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no MAC address (six pairs of hexadecimal digits)")
    return bytes.fromhex(text.replace(":", ""))


def unicast_mac(text: str) -> str:
    """The MAC address of one host, in lower case; ValueError if it is not one host's."""
    mac = parse_mac(text)
    if mac[0] & 1 or not any(mac):
        raise ValueError(f"{text!r} is not a unicast MAC address")
    return format_mac(mac)


def format_mac(mac: bytes) -> str:
    """6 bytes as "02:6b:76:00:00:01"."""
    return mac.hex(":")


def parse_ip(text: str) -> int:
    """ "10.77.0.1" as a 32-bit integer; ValueError if it is no IPv4 address."""
    try:
        return int(IPv4Address(text))
    except AddressValueError as error:
        raise ValueError(f"{text!r} is no IPv4 address: {error}") from None


class Encapsulation:
    """Wraps datagrams from one endpoint to one peer; the prefix is made once a datagram length."""

    def __init__(self, local: Endpoint, peer: Endpoint) -> None:
        self._local = local
        self._peer = peer
        self._prefixes: dict[int, bytes] = {}  # at most MAX_DATAGRAM_BYTES + 1 lengths

    def wrap(self, datagram: Buffer) -> bytes:
        """One Ethernet frame around `datagram`, without padding to 60 bytes or a checksum
        sequence; WireError if it is longer than any kvcast datagram."""
        length = len(datagram)
        prefix = self._prefixes.get(length)
        if prefix is None:
            prefix = self._prefixes[length] = self._prefix(length)
        return b"".join((prefix, datagram))

    def _prefix(self, length: int) -> bytes:
        if length > MAX_DATAGRAM_BYTES:
            raise WireError(f"datagram of {length} bytes exceeds {MAX_DATAGRAM_BYTES}")
        local, peer = self._local, self._peer

        def pack(checksum: int) -> bytes:
            return _FRAME.pack(
                peer.mac,
                local.mac,
                ETHERTYPE_IPV4,
                VERSION_IHL,
                0,
                IPV4.size_bytes + UDP.size_bytes + length,
                0,
                _DONT_FRAGMENT,
                _TTL,
                IP_PROTOCOL_UDP,
                checksum,
                local.ip,
                peer.ip,
                local.udp_port,
                peer.udp_port,
                UDP.size_bytes + length,
                0,
            )

        return pack(_ones_complement(pack(0)[_IP_START:_UDP_START]))


def _ones_complement(data: bytes) -> int:
    """RFC 1071 checksum. The ones' complement sum of 16-bit words is the number that the bytes
    spell, modulo 0xFFFF, with 0xFFFF in place of 0 unless every word is 0."""
    return 0xFFFF - (int.from_bytes(data, "big") % 0xFFFF or 0xFFFF)


def unwrap(frame: Buffer) -> Datagram:
    """The UDP datagram in an Ethernet frame; bytes after the IPv4 total length are ignored, since
    Ethernet pads short frames.

    Raises WireError for anything but a whole, unfragmented UDP datagram with an intact IPv4
    header. A UDP checksum is verified where there is one.
    """
    if len(frame) < FRAME_OVERHEAD_BYTES:
        raise WireError(f"frame of {len(frame)} bytes is shorter than its headers")
    (
        dst_mac,
        src_mac,
        ether_type,
        version_ihl,
        _tos,
        total_length,
        _identification,
        fragment,
        _ttl,
        protocol,
        _checksum,
        src_ip,
        dst_ip,
        src_port,
        dst_port,
        udp_length,
        udp_checksum,
    ) = _unpack(frame)
    if ether_type != ETHERTYPE_IPV4:
        raise WireError(f"EtherType {ether_type:#06x} is not IPv4")
    if version_ihl != VERSION_IHL:
        raise WireError(f"IPv4 version and header length {version_ihl:#04x}, not 0x45")
    if fragment & FRAGMENT_BITS:
        raise WireError("IPv4 fragment")
    if protocol != IP_PROTOCOL_UDP:
        raise WireError(f"IP protocol {protocol} is not UDP")
    view = memoryview(frame)
    if int.from_bytes(view[_IP_START:_UDP_START], "big") % 0xFFFF:
        raise WireError("IPv4 header checksum is wrong")
    end = _IP_START + total_length
    if end > len(frame) or end < FRAME_OVERHEAD_BYTES:
        raise WireError(f"IPv4 total length {total_length} in a frame of {len(frame)} bytes")
    if udp_length != total_length - IPV4.size_bytes:
        raise WireError(f"UDP length {udp_length} in an IPv4 packet of {total_length} bytes")
    if udp_checksum and not _udp_checksum_holds(view, end):
        raise WireError("UDP checksum is wrong")
    return Datagram(
        Endpoint(src_mac, src_ip, src_port),
        Endpoint(dst_mac, dst_ip, dst_port),
        view[FRAME_OVERHEAD_BYTES:end],
    )


def _udp_checksum_holds(frame: memoryview, end: int) -> bool:
    udp = bytes(frame[_UDP_START:end])
    pseudo = bytes(frame[_IP_START + 12 : _UDP_START]) + struct.pack(
        "!HH", IP_PROTOCOL_UDP, len(udp)
    )
    odd = b"\0" if len(udp) % 2 else b""
    return int.from_bytes(pseudo + udp + odd, "big") % 0xFFFF == 0
