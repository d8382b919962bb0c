"""Addresses. Oracle: written cases. Cannot see: sockets."""

from __future__ import annotations

import argparse

import pytest
from kvcast.service.addresses import format_host_port, is_loopback, parse_host_port


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("1.2.3.4:5", ("1.2.3.4", 5)),
        (":80", ("127.0.0.1", 80)),
        ("80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_host_port(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:70000", "host:-1", "host:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_host_port(text)


def test_loopback_is_known_by_name_and_number() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.64.3.1", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "example.org"))


@pytest.mark.parametrize("text", ["1.2.3.4:5", "[::1]:80", "example.org:0"])
def test_an_address_is_written_as_it_is_read(text: str) -> None:
    assert format_host_port(parse_host_port(text)) == text
