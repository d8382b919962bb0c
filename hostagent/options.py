"""What an agent is started with, as plain data.

Owns: the options and their defaults. Must not know: command lines (`flags`), or what is made of
them (`agent`, `standing`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Final

from kvcast.hostagent.core.agent import AgentOptions
from kvcast.hostagent.core.ssd import SsdRules
from kvcast.hostagent.network.local_server import LocalOptions
from kvcast.hostagent.tiers.arena import SLAB_BYTES
from kvcast.hostagent.tiers.ssd.files import THREADS
from kvcast.hostagent.tiers.ssd.layout import SLAB_BYTES as SSD_SLAB_BYTES
from kvcast.hostagent.tiers.ssd.layout import UNIT_BYTES
from kvcast.protocol.links.bulk import BulkOptions
from kvcast.protocol.links.control_caller import ControlOptions
from kvcast.protocol.links.rdma import RdmaOptions
from kvcast.protocol.messages.wire import UDP_PORT
from kvcast.service.tls import Credentials

RDMA_OFF: Final = "off"
RDMA_AUTO: Final = "auto"
RDMA_REQUIRED: Final = "required"
RDMAS: Final = (RDMA_AUTO, RDMA_OFF, RDMA_REQUIRED)
"""Use the card that has the node's address, if there is one; use none; or do not start without."""


@dataclass(frozen=True)
class NetworkOptions:
    """Where the node is on the network."""

    ip: str
    mac: str
    switch_port: int
    udp_port: int = UDP_PORT
    tunnel: tuple[tuple[str, int], tuple[str, int]] | None = None
    """(local, peer) addresses of a tunnel to a software switch; None = kernel UDP on `ip`."""
    udp_segments: bool = False
    """Without a tunnel: let the kernel or the network card split runs of frames (UDP_SEGMENT). On a
    veth pair whose other end a switch in software reads by AF_PACKET they would stay unsplit."""
    polls: bool = False
    """Whether the agent looks for frames and questions all the time, and never sleeps."""
    buffer_bytes: int = 8 << 20
    """Socket buffers to ask the kernel for."""
    mtu_bytes: int = 0
    """The longest IPv4 packet on the way to the other nodes; 0 = as the interface of `ip` says,
    and Ethernet's 1500 behind a tunnel."""
    link_bits_per_s: int = 0
    """What the link to the switch carries each way; 0 = as the interface of `ip` says, and not
    known behind a tunnel."""
    bulk_host: str = "127.0.0.1"
    bulk_port: int = 0
    bulk_link_bits_per_s: int = 0
    """What the link that `bulk_host` is on carries each way; 0 = as its interface says, or, where
    it is `ip`, as `link_bits_per_s`."""
    rdma: str = RDMA_OFF
    """One of `RDMAS`: whether blocks go by RDMA where the other node has it, too."""
    rdma_devices: tuple[str, ...] = ()
    """The cards' names, or `all`; without any it is the one that has `ip`."""

    @property
    def joins(self) -> bool:
        """Whether runs of frames leave in one piece: if so told, and over loopback, where none but
        the nodes' own sockets read."""
        return self.udp_segments or IPv4Address(self.ip).is_loopback


@dataclass(frozen=True)
class ArenaOptions:
    """The DRAM tier."""

    size_bytes: int = 256 << 20
    path: str | None = None
    reserve: bool = True
    keep: bool = False
    """Whether the arena outlives the agent, at its path; the next one takes it over."""
    index_path: str | None = None
    """Where the index of a kept arena lies; None = beside it."""
    cluster: str = "kvcast"
    """What is kept is taken over within this cluster only."""
    slab_bytes: int = SLAB_BYTES
    default_quota_bytes: int = 0
    quotas: dict[int, int] = field(default_factory=dict)
    huge_pages: bool = True
    """Whether the kernel is asked to put the arena's pages into huge ones, once it has them all."""
    numa_node: int | None = None
    """From which node the arena's memory is wanted; None = wherever the kernel takes it."""


@dataclass(frozen=True)
class SsdOptions:
    """What lies below the arena: further ones, the nearest first, and the SSD tier, which is there
    if there are paths."""

    paths: tuple[str, ...] = ()
    size_bytes: int = 16 << 30
    """Of each file."""
    unit_bytes: int = UNIT_BYTES
    slab_bytes: int = SSD_SLAB_BYTES
    threads: int = THREADS
    rules: SsdRules = field(default_factory=SsdRules)
    arenas: tuple[tuple[str, int], ...] = ()
    """Files of further arenas, or devices, and their sizes in bytes."""

    @property
    def is_used(self) -> bool:
        return bool(self.paths or self.arenas)


@dataclass(frozen=True)
class Options:
    """Everything that an agent is started with."""

    agent: AgentOptions
    network: NetworkOptions
    control: ControlOptions
    local: LocalOptions
    arena: ArenaOptions = field(default_factory=ArenaOptions)
    ssd: SsdOptions = field(default_factory=SsdOptions)
    cold: str = ""
    """URL of a store (`object_stores`) for blocks of namespaces whose media name `cold`."""
    bulk: BulkOptions = field(default_factory=BulkOptions)
    rdma: RdmaOptions = field(default_factory=RdmaOptions)
    credit_from_buffer: bool = True
    """Lower the requester's credit to what the receive buffer holds."""
    seed: int | None = None
    """Of the agent's random numbers (tags, jitter); None = from the system."""
    credentials: Credentials | None = None
    """With them, the control link and the bulk link are TLS, both ways; without, plain."""

    @property
    def owner(self) -> str:
        """Whose files are this agent's, as kept arenas and disks say it and operators read it."""
        return f"node {self.agent.node_id} of cluster {self.arena.cluster}"
