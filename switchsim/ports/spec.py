"""What `--port` says: which kind of port, and where.

Owns: the text form of a port. Must not know: what any kind of port does.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from kvcast.switchsim.ports.interface import InterfacePort
from kvcast.switchsim.ports.port import Port, PortError, PortOptions
from kvcast.switchsim.ports.udp_tunnel import Address, UdpTunnelPort


@dataclass(frozen=True, slots=True)
class PortSpec:
    """A parsed `N=udp:LOCALIP:LPORT[:PEERIP:PPORT]` or `N=if:NAME`."""

    number: int
    kind: str
    local: Address | None = None
    peer: Address | None = None
    interface: str = ""

    def open(self, options: PortOptions) -> Port:
        """Open the port; PortError says why not."""
        if self.kind == "udp":
            assert self.local is not None
            return UdpTunnelPort(self.number, self.local, self.peer, options)
        return InterfacePort(self.number, self.interface, options)


def parse_port(text: str, *, max_port: int = 510) -> PortSpec:
    """One --port value; PortError says what is wrong with it."""
    number_text, equals, spec = text.partition("=")
    if not equals or not number_text.isascii() or not number_text.isdigit():
        raise PortError(f"{text!r} is not N=udp:... or N=if:NAME")
    number = int(number_text)
    if not 0 <= number <= max_port:
        raise PortError(f"{text!r}: port numbers are 0 to {max_port}")
    kind, _, rest = spec.partition(":")
    if kind == "udp":
        parts = rest.split(":")
        if len(parts) not in (2, 4):
            raise PortError(f"{text!r} is not N=udp:LOCALIP:LPORT[:PEERIP:PPORT]")
        local = _parse_address(text, parts[0], parts[1])
        peer = _parse_address(text, parts[2], parts[3]) if len(parts) == 4 else None
        if peer is not None and peer[1] == 0:
            raise PortError(f"{text!r}: the peer's port cannot be 0")
        return PortSpec(number, "udp", local=local, peer=peer)
    if kind == "if":
        name = rest.encode()
        if not 0 < len(name) < 16 or b"/" in name or os.fsdecode(name).split() != [rest]:
            raise PortError(f"{text!r}: not an interface name")
        return PortSpec(number, kind, interface=rest)
    raise PortError(f"{text!r}: kinds of ports are udp and if")


def _parse_address(text: str, host: str, port: str) -> Address:
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError as error:
        raise PortError(f"{text!r}: {host!r} is not an IPv4 address") from error
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise PortError(f"{text!r}: {port!r} is not a UDP port")
    return str(address), int(port)
