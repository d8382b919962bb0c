"""The two sides that every store is asked across: one loopback address each, or two network
namespaces joined by a veth pair (root).

Owns: addresses, and which part of a pool runs on which side. Must not know: stores, processes.

Side 1 (node-1) is where readers ask; the holder, the servers of all stores, and kvcast's switch and
controller are on side 2. Agents use the kernel's UDP, so their frames pass no switch; the pool's
switch is there for the controller, and its ports lead nowhere.
"""

from __future__ import annotations

import os
import shutil
from typing import Protocol, TypeAlias

from kvcast.topologies.namespaces import (
    NamespaceNetwork,
    ip_batch,
    remove_stale_namespaces,
    why_not,
)
from kvcast.topologies.network import Network, NetworkError
from kvcast.topologies.processes import TunnelNetwork
from kvcast.topologies.star import Host, Star

READER_SIDE, HOLDER_SIDE = 0, 1
"""Indices of the hosts of `STAR`."""
STAR = Star.of(2)
_BULK_PORT = 9700
Processors: TypeAlias = tuple[list[int], list[int]]
"""By side, the numbers of those that are its own."""


def halves() -> Processors | None:
    """This machine's processors, half of them for each side; None where there is only one, or no
    `taskset`."""
    processors = sorted(os.sched_getaffinity(0))
    half = len(processors) // 2
    if not half or shutil.which("taskset") is None:
        return None
    return processors[:half], processors[half:]


def _side(part: str) -> int:
    return READER_SIDE if part == STAR.hosts[READER_SIDE].node_id else HOLDER_SIDE


def _bound(part: str, processors: Processors | None) -> list[str]:
    """Words before a command that keep it on the processors of its side."""
    if processors is None:
        return []
    return ["taskset", "--cpu-list", ",".join(map(str, processors[_side(part)]))]


class Link(Network, Protocol):
    """A network of two sides."""

    device: str
    """The interface of the link, on both sides."""

    def ip(self, host: Host) -> str:
        """The address of a side."""


def _agent_flags(address: str) -> list[str]:
    return ["--transport=udp", f"--ip={address}", f"--bulk-addr={address}:{_BULK_PORT}"]


class LoopbackLink(TunnelNetwork):
    """Both sides on this machine's loopback interface, each with an address of its own."""

    device = "lo"

    def __init__(self, processors: Processors | None = None) -> None:
        super().__init__(STAR)
        self._processors = processors

    def prefix(self, part: str) -> list[str]:
        return [*super().prefix(part), *_bound(part, self._processors)]

    def ip(self, host: Host) -> str:
        return f"{self.address.rpartition('.')[0]}.{1 + host.switch_port}"

    def agent_flags(self, host: Host) -> list[str]:
        return _agent_flags(self.ip(host))


class VethLink(NamespaceNetwork):
    """Each side in a network namespace, joined by a veth pair with the kernel's offloads."""

    device = "eth0"

    def __init__(self, processors: Processors | None = None) -> None:
        super().__init__(STAR)
        self._processors = processors
        holder = STAR.hosts[HOLDER_SIDE]
        self.agents_address = (holder.ip, self.agents_address[1])
        self.http_address = (holder.ip, self.http_address[1])

    def namespace(self, part: str) -> str:
        return f"{self.tag}-h{STAR.hosts[_side(part)].switch_port}"

    def prefix(self, part: str) -> list[str]:
        return [*super().prefix(part), *_bound(part, self._processors)]

    def up(self) -> None:
        reason = why_not()
        if reason is not None:
            raise NetworkError(reason)
        remove_stale_namespaces()
        self._made = True
        near, far = (self.namespace(host.node_id) for host in STAR.hosts)
        ip_batch([f"netns add {near}", f"netns add {far}"])
        ip_batch([f"link add {self.device} type veth peer name {self.device} netns {far}"], near)
        for host in STAR.hosts:
            self._quiet(host.node_id)
            ip_batch(
                [
                    "link set lo up",
                    f"address add {host.ip}/24 dev {self.device}",
                    f"link set {self.device} up",
                ],
                self.namespace(host.node_id),
            )

    def ip(self, host: Host) -> str:
        return host.ip

    def switch_port(self, host: Host) -> str:
        port = host.switch_port
        return f"udp:127.0.0.1:{20000 + port}:127.0.0.1:{21000 + port}"

    def agent_flags(self, host: Host) -> list[str]:
        return _agent_flags(self.ip(host))
