"""Clients that outlive their agent: what is kept of each for the agent that comes after.

Owns: how an agent gives this to `hostagent.supervisor`, which keeps it: the descriptor of a
client's connection (when it ends, the client is gone), and the memory in which the client pins.
Must not know: processes, or what a client holds (`tiers.ledger`).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final, Protocol


@dataclass(frozen=True)
class Survivor:
    """A client: its number in the ledger, the token by which it comes back, its connection, and
    the descriptor of its region, if it has one."""

    number: int
    token: bytes
    connection: socket.socket
    region_fd: int | None
    read_only: bool


class Keeper(Protocol):
    """Whoever keeps clients for the agent that comes after."""

    def joined(self, client: Survivor) -> None:
        """A client has come, or come back, as the number says: keep its descriptors' duplicates."""
        ...

    def left(self, number: int) -> None:
        """It is gone; nobody waits for it. Harmless when repeated."""
        ...


class _Nobody:
    def joined(self, client: Survivor) -> None:
        pass

    def left(self, number: int) -> None:
        pass


NOBODY: Final[Keeper] = _Nobody()
"""No agent comes after."""
