"""Ethernet, IPv4 and UDP around a datagram.

Oracle: scapy builds and dissects the same frames. Cannot see: what a switch does to them.
"""

from __future__ import annotations

import pytest
from kvcast.protocol.messages.ethernet import (
    FRAME_OVERHEAD_BYTES,
    Encapsulation,
    Endpoint,
    format_mac,
    parse_ip,
    parse_mac,
    unicast_mac,
    unwrap,
)
from kvcast.protocol.messages.wire import MAX_DATAGRAM_BYTES, WireError
from scapy.layers.inet import IP, UDP, Ether
from scapy.packet import Raw

A = Endpoint(parse_mac("02:6b:76:00:00:01"), parse_ip("10.77.0.1"))
B = Endpoint(parse_mac("02:6b:76:00:00:02"), parse_ip("10.77.0.2"), 20_000)


@pytest.mark.parametrize("length", [0, 1, 52, 76, 660, MAX_DATAGRAM_BYTES])
def test_frame_is_what_scapy_would_build(length: int) -> None:
    payload = bytes(i % 251 for i in range(length))
    ours = Encapsulation(A, B).wrap(payload)
    theirs = (
        Ether(dst="02:6b:76:00:00:02", src="02:6b:76:00:00:01")
        / IP(src="10.77.0.1", dst="10.77.0.2", id=0, flags="DF", ttl=64)
        / UDP(sport=19286, dport=20_000, chksum=0)
        / Raw(payload)
    )
    assert ours == bytes(theirs)


def test_unwrap_gives_back_both_ends_and_the_payload() -> None:
    datagram = unwrap(Encapsulation(A, B).wrap(b"payload"))
    assert datagram.src == A
    assert datagram.dst == B
    assert datagram.payload == b"payload"


def test_ethernet_padding_is_cut_off() -> None:
    assert unwrap(Encapsulation(A, B).wrap(b"x") + bytes(17)).payload == b"x"


@pytest.mark.parametrize("payload", [b"even", b"odd"])
def test_udp_checksum_is_verified_where_there_is_one(payload: bytes) -> None:
    frame = bytes(
        Ether(dst="02:6b:76:00:00:02", src="02:6b:76:00:00:01")
        / IP(src="10.77.0.1", dst="10.77.0.2")
        / UDP(sport=1, dport=2)
        / Raw(payload)
    )
    assert unwrap(frame).payload == payload
    with pytest.raises(WireError, match="UDP checksum"):
        unwrap(frame[:-1] + bytes([frame[-1] ^ 1]))


GOOD = Encapsulation(A, B).wrap(b"payload")


def altered(offset: int, value: bytes) -> bytes:
    return GOOD[:offset] + value + GOOD[offset + len(value) :]


def with_checksum(frame: bytes) -> bytes:
    packet = Ether(frame)
    del packet[IP].chksum
    return bytes(packet)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (GOOD[: FRAME_OVERHEAD_BYTES - 1], "shorter than its headers"),
        (altered(12, b"\x08\x06"), "EtherType 0x0806"),
        (altered(14, b"\x46"), "version and header length"),
        (altered(14, b"\x65"), "version and header length"),
        (altered(20, b"\x20\x00"), "fragment"),
        (altered(20, b"\x00\x01"), "fragment"),
        (altered(23, b"\x06"), "protocol 6"),
        (altered(30, b"\x0b"), "checksum"),
        (GOOD[:-1], "total length"),
        (with_checksum(altered(16, b"\x00\x1b")), "total length"),
        (altered(38, b"\x00\x10"), "UDP length"),
    ],
)
def test_anything_else_is_refused(frame: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        unwrap(frame)


def test_too_long_a_datagram_is_refused() -> None:
    with pytest.raises(WireError, match="exceeds"):
        Encapsulation(A, B).wrap(bytes(MAX_DATAGRAM_BYTES + 1))


def test_addresses_as_text() -> None:
    assert format_mac(A.mac) == "02:6b:76:00:00:01"
    assert A.ip == 0x0A4D0001
    for text in ("", "02:6b:76:00:00", "02:6b:76:00:00:zz", "026:b7:60:00:00:01"):
        with pytest.raises(ValueError, match="no MAC address"):
            parse_mac(text)
    for text in ("", "10.77.0", "10.77.0.256", "localhost"):
        with pytest.raises(ValueError, match="no IPv4 address"):
            parse_ip(text)


@pytest.mark.parametrize(
    "text", ["", "02:6b", "02:6b:76:00:00:01\n", "  :6b:76:00:00:01", "02-6b-76-00-00-01", "0g" * 6]
)
def test_what_is_no_mac_address_is_refused(text: str) -> None:
    for parse in (parse_mac, unicast_mac):
        with pytest.raises(ValueError, match="no MAC address"):
            parse(text)


def test_a_hosts_mac_address_is_unicast_and_in_lower_case() -> None:
    assert unicast_mac("02:6B:76:00:00:0A") == "02:6b:76:00:00:0a"
    for text in ("ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", "00:00:00:00:00:00"):
        with pytest.raises(ValueError, match="not a unicast MAC"):
            unicast_mac(text)
