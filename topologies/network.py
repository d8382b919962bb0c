"""What a pool needs to know of the network that it runs on; one implementation a runner.

Owns: the interface between pool.py (which processes run, in which order) and the runners (what
connects them). Must not know: processes, or how any one network is made.
"""

from __future__ import annotations

import socket
from typing import Protocol

from kvcast.topologies.star import Host, Star


class NetworkError(RuntimeError):
    """A network that cannot be made here, and why."""


class Network(Protocol):
    """One star, made real by `up` and taken away by `down`.

    Addresses are (host, port) pairs, valid for the parts of the pool; the process that made the
    network reaches the controller's HTTP address through `open_socket`.
    """

    star: Star
    grpc_address: tuple[str, int]
    agents_address: tuple[str, int]
    http_address: tuple[str, int]

    def up(self) -> None:
        """Make the network; NetworkError if that is not possible."""

    def down(self) -> None:
        """Take away everything that `up` made; may be called twice, never raises."""

    def prefix(self, part: str) -> list[str]:
        """Words before the command of "switch", "controller" or a node's agent."""

    def switch_port(self, host: Host) -> str:
        """Where the switch finds this host: "udp:LIP:LPORT:PIP:PPORT" or "if:NAME"."""

    def agent_flags(self, host: Host) -> list[str]:
        """The agent's flags that say how it reaches the switch and its peers."""

    def open_socket(self) -> socket.socket:
        """A TCP socket, not connected yet, that can reach `http_address`."""
