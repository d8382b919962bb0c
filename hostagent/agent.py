"""The agent, assembled: cores in the middle, adapters around them, one start and one end.

Owns: the order in which parts are made, started and closed. Must not know: command lines
(`daemon`) or decisions (`core`). Tests start agents in their own process through this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from typing import Final

from kvcast.hostagent import membarrier
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.network.bulk_link import BulkCaller, BulkServer
from kvcast.hostagent.network.control_link import ControlLink
from kvcast.hostagent.network.datagrams import (
    Transport,
    TunnelTransport,
    UdpTransport,
    credit_of_buffer,
    open_tunnel,
    open_udp,
)
from kvcast.hostagent.network.interfaces import ETHERNET_MTU_BYTES, interface_mtu
from kvcast.hostagent.network.local_server import LocalOptions, LocalServer
from kvcast.hostagent.network.rdma_link import RdmaCalls, RdmaServer
from kvcast.hostagent.network.verbs import Card
from kvcast.hostagent.tiers.arena import SLAB_BYTES, Allocator, ArenaFile
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.protocol.links.bulk import BulkOptions
from kvcast.protocol.links.control_caller import ControlOptions
from kvcast.protocol.links.rdma import RdmaOptions, VerbsError
from kvcast.protocol.messages.control import CONTROL_PROTOCOL_VERSION, Register
from kvcast.protocol.messages.ethernet import Endpoint, parse_ip, parse_mac
from kvcast.protocol.messages.shared import index_bytes
from kvcast.protocol.messages.wire import UDP_PORT, chunking_for
from kvcast.service.tls import Credentials

_HUGE_PAGE_BYTES = 2 << 20

log = logging.getLogger(__name__)

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
    buffer_bytes: int = 8 << 20
    """Socket buffers to ask the kernel for."""
    mtu_bytes: int = 0
    """The longest IPv4 packet on the way to the other nodes; 0 = as the interface of `ip` says,
    and Ethernet's 1500 behind a tunnel."""
    bulk_host: str = "127.0.0.1"
    bulk_port: int = 0
    rdma: str = RDMA_OFF
    """One of `RDMAS`: whether blocks go by RDMA where the other node has it, too."""

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
    slab_bytes: int = SLAB_BYTES
    default_quota_bytes: int = 0
    quotas: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """Everything that an agent is started with."""

    agent: AgentOptions
    network: NetworkOptions
    control: ControlOptions
    local: LocalOptions
    arena: ArenaOptions = field(default_factory=ArenaOptions)
    bulk: BulkOptions = field(default_factory=BulkOptions)
    rdma: RdmaOptions = field(default_factory=RdmaOptions)
    credit_from_buffer: bool = True
    """Lower the requester's credit to what the receive buffer holds."""
    seed: int | None = None
    """Of the agent's random numbers (tags, jitter); None = from the system."""
    credentials: Credentials | None = None
    """With them, the control link and the bulk link are TLS, both ways; without, plain."""


class Agent:
    """One agent. `start`, then `close`; `ready` is set when the first bucket map has come."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.card: Card | None = None
        """With which blocks go by RDMA."""

    async def start(self) -> None:
        """Make the arena and the sockets and begin to serve. On failure nothing is left."""
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        options = self._options
        network = options.network
        rng = random.Random(options.seed)
        self.arena = ArenaFile(
            options.arena.size_bytes, options.arena.path, reserve=options.arena.reserve
        )
        stack.callback(self.arena.close)
        store = Store(
            Allocator(options.arena.size_bytes, options.arena.slab_bytes),
            default_quota_bytes=options.arena.default_quota_bytes,
            quotas=options.arena.quotas,
        )
        incarnation = secrets.randbits(62) + 1
        shared = self._share(stack, store, incarnation)
        if network.tunnel is None:
            sock, buffer_bytes = open_udp(network.ip, network.udp_port, network.buffer_bytes)
        else:
            sock, buffer_bytes = open_tunnel(*network.tunnel, network.buffer_bytes)
        stack.callback(sock.close)
        udp_port = sock.getsockname()[1] if network.tunnel is None else network.udp_port
        self.tunnel_address: tuple[str, int] | None = (
            sock.getsockname() if network.tunnel is not None else None
        )
        self.mtu_bytes = network.mtu_bytes or (
            interface_mtu(network.ip) if network.tunnel is None else ETHERNET_MTU_BYTES
        )
        agent_options = self._fitted(buffer_bytes)
        self.core = AgentCore(agent_options, store, self.arena.memory, rng, shared)
        stack.callback(self.core.close)
        self.transport: Transport = (
            UdpTransport(self.core, sock, joins=network.joins)
            if network.tunnel is None
            else TunnelTransport(
                self.core,
                sock,
                Endpoint(parse_mac(network.mac), parse_ip(network.ip), network.udp_port),
            )
        )
        self._bulk_caller = BulkCaller(
            self.core, options.bulk, self.transport.pump, options.credentials
        )
        self.transport.dispatch_calls = self._bulk_caller.dispatch
        self.bulk_server = BulkServer(self.core, options.bulk, options.credentials)
        self.bulk_address = await self.bulk_server.start(network.bulk_host, network.bulk_port)
        stack.push_async_callback(self.bulk_server.close)
        stack.push_async_callback(self._bulk_caller.close)
        self.rdma_port = await self._use_rdma(stack)
        self._local_server = LocalServer(
            self.core, self.arena, options.local, self.transport.pump, self.index_file
        )
        self._local_server.start()
        stack.push_async_callback(self._local_server.close)
        self.transport.start()
        stack.callback(self.transport.close)
        register = Register(
            version=CONTROL_PROTOCOL_VERSION,
            node_id=agent_options.node_id,
            incarnation=incarnation,
            ip=network.ip,
            mac=network.mac,
            switch_port=network.switch_port,
            udp_port=udp_port,
            bulk_host=self.bulk_address[0],
            bulk_port=self.bulk_address[1],
            arena_bytes=options.arena.size_bytes,
            mtu_bytes=self.mtu_bytes,
            rdma_port=self.rdma_port,
        )
        self._control = ControlLink(
            self.core, options.control, register, rng, self.transport.pump, options.credentials
        )
        self.ready = self._control.ready
        self._control.start()
        stack.push_async_callback(self._control.close)

    async def _use_rdma(self, stack: contextlib.AsyncExitStack) -> int:
        """Have blocks go by RDMA, where that is wanted and there is a card; the port of the link,
        0 without."""
        options = self._options
        if options.network.rdma == RDMA_OFF:
            return 0
        try:
            card = Card(options.network.ip, self.arena.memory, options.rdma)
        except VerbsError as error:
            if options.network.rdma == RDMA_REQUIRED:
                raise
            log.info("blocks go by TCP, not by RDMA: %s", error)
            return 0
        stack.callback(card.close)
        self.card = card
        calls = RdmaCalls(self.core, options.rdma, card, self.transport.pump, options.credentials)
        stack.push_async_callback(calls.close)
        server = self.rdma_server = RdmaServer(
            self.core, options.rdma, options.bulk, card, options.credentials
        )
        stack.push_async_callback(server.close)

        def dispatch() -> None:
            calls.take()
            self._bulk_caller.dispatch()

        self.transport.dispatch_calls = dispatch
        return await server.start(options.network.bulk_host)

    def _share(
        self, stack: contextlib.AsyncExitStack, store: Store, incarnation: int
    ) -> SharedIndex | None:
        """Make the index beside the arena, where clients can use one."""
        self.index_file: ArenaFile | None = None
        if not membarrier.available():
            log.info("clients ask for every block: this machine has no barrier for an index")
            return None
        arena_bytes = self.arena.size_bytes
        path = f"{self.arena.path}.index"
        if os.statvfs(self.arena.path).f_bsize >= _HUGE_PAGE_BYTES:
            # A file there is a whole number of huge pages, which the index is not.
            path = f"/dev/shm/kvcast{os.path.abspath(path).replace('/', '-')}"
        self.index_file = ArenaFile(
            index_bytes(buckets_for(arena_bytes)),
            path,
            reserve=self._options.arena.reserve,
        )
        stack.callback(self.index_file.close)
        index = Index(self.index_file.memory, arena_bytes, incarnation)
        stack.callback(index.close)
        return SharedIndex(index, store, membarrier.barrier)

    def _fitted(self, buffer_bytes: int) -> AgentOptions:
        """The options, as far as the receive buffer and the MTU allow."""
        options = self._options.agent
        requester = options.requester
        if self._options.credit_from_buffer:
            credit = min(requester.credit_segments, credit_of_buffer(buffer_bytes))
            if credit < requester.credit_segments:
                log.info(
                    "the receive buffer lets fewer segments be in flight than configured",
                    extra={"credit_segments": credit, "buffer_bytes": buffer_bytes},
                )
            requester = replace(requester, credit_segments=credit)
        responder = replace(
            options.responder, max_chunk_bytes=chunking_for(self.mtu_bytes).chunk_bytes
        )
        return replace(
            options,
            requester=requester,
            responder=responder,
            placement_seed=secrets.randbits(64),
        )

    async def close(self) -> None:
        """Leave the pool, end everything, and unlink the arena."""
        await self._stack.aclose()
