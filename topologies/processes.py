"""The process runner: plain processes, joined by UDP tunnels on the loopback interface; no root.

Owns: the choice of addresses. Every Ethernet frame between the switch and a node is the payload
of one UDP datagram. Must not know: which processes run.

All of 127.0.0.0/8 is this machine's, so every run takes a loopback address of its own, on which
its ports cannot meet those of another run: a socket that is bound there from `up` to `down` says
that the address is taken. Ports lie below the ephemeral range, so no unrelated socket that asked
for "any port" sits on one of them.
"""

from __future__ import annotations

import random
import socket

from kvcast.service.addresses import AGENTS_PORT, HTTP_PORT, P4RUNTIME_PORT
from kvcast.topologies.network import NetworkError
from kvcast.topologies.star import Host, Star

_CLAIM, _SWITCH_SIDE, _NODE_SIDE, _BULK = 19999, 20000, 21000, 22000
_TRIES = 50


class TunnelNetwork:
    """A star over UDP tunnels on one loopback address of its own."""

    def __init__(self, star: Star) -> None:
        self.star = star
        self._claim: socket.socket | None = None
        self._set_address("127.0.0.1")

    def _set_address(self, address: str) -> None:
        self.address = address
        self.grpc_address = (address, P4RUNTIME_PORT)
        self.agents_address = (address, AGENTS_PORT)
        self.http_address = (address, HTTP_PORT)

    def up(self) -> None:
        """Find a loopback address on which every port that the pool needs is free."""
        system = random.SystemRandom()
        for _ in range(_TRIES):
            address = f"127.{system.randint(64, 127)}.{system.randint(0, 255)}.1"
            if self._claimed(address):
                self._set_address(address)
                return
        raise NetworkError("no loopback address with free ports found; is 127.0.0.0/8 usable?")

    def down(self) -> None:
        """Let others have the address."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def prefix(self, part: str) -> list[str]:
        return []

    def switch_side(self, host: Host) -> tuple[str, int]:
        """The switch's end of the host's tunnel."""
        return self.address, _SWITCH_SIDE + host.switch_port

    def node_side(self, host: Host) -> tuple[str, int]:
        """The host's end of its tunnel."""
        return self.address, _NODE_SIDE + host.switch_port

    def switch_port(self, host: Host) -> str:
        return f"udp:{_tunnel(self.switch_side(host), self.node_side(host))}"

    def agent_flags(self, host: Host) -> list[str]:
        return [
            "--transport=tunnel",
            f"--tunnel={_tunnel(self.node_side(host), self.switch_side(host))}",
            f"--bulk-addr={self.address}:{_BULK + host.switch_port}",
        ]

    def open_socket(self) -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def _claimed(self, address: str) -> bool:
        """Take the address, if no other run has it and every port is free; whether that went."""
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind((address, _CLAIM))
        except OSError:
            claim.close()
            return False
        if not self._is_free(address):
            claim.close()
            return False
        self._claim = claim
        return True

    def _is_free(self, address: str) -> bool:
        wanted = [(socket.SOCK_STREAM, port) for port in (P4RUNTIME_PORT, AGENTS_PORT, HTTP_PORT)]
        for host in self.star.hosts:
            wanted += [
                (socket.SOCK_DGRAM, _SWITCH_SIDE + host.switch_port),
                (socket.SOCK_DGRAM, _NODE_SIDE + host.switch_port),
                (socket.SOCK_STREAM, _BULK + host.switch_port),
            ]
        for kind, port in wanted:
            with socket.socket(socket.AF_INET, kind) as probe:
                try:
                    probe.bind((address, port))
                except OSError:
                    return False
        return True


def _tunnel(near: tuple[str, int], far: tuple[str, int]) -> str:
    return f"{near[0]}:{near[1]}:{far[0]}:{far[1]}"
