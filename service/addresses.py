"""Addresses as people write them: HOST:PORT, and whether a host is this machine.

Owns: the one parser and the one printer of HOST:PORT, and the ports that daemons have unless they
are told others. Must not know: sockets.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from kvcast.service.values import TextError

P4RUNTIME_PORT: Final = 9559
"""As IANA has it."""
AGENTS_PORT: Final = 9600
"""Where the controller takes agents;"""
HTTP_PORT: Final = 9601
"""and operators."""


def parse_host_port(text: str) -> tuple[str, int]:
    """ "HOST:PORT", ":PORT" or "PORT" as (host, port); TextError otherwise."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise TextError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def format_host_port(address: tuple[str, int]) -> str:
    """(host, port) as `parse_host_port` reads it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a bind address stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
