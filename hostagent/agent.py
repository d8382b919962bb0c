"""The agent, assembled: cores in the middle, adapters around them, one start and one end.

Owns: the order in which parts are made, started and closed. Must not know: command lines
(`daemon`) or decisions (`core`). Tests start agents in their own process through this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import threading
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec
from kvcast.hostagent import membarrier
from kvcast.hostagent.cold import ColdOfAgent
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.courier import Courier, given_lately
from kvcast.hostagent.core.pushing import Pushes, put_lately
from kvcast.hostagent.core.recovery import Recovery
from kvcast.hostagent.core.shared_index import Region, SharedIndex
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.digests import DigestThreads
from kvcast.hostagent.network.bulk_link import BulkCaller, BulkServer
from kvcast.hostagent.network.cards import Cards, node_of_most, open_cards
from kvcast.hostagent.network.control_link import ControlLink
from kvcast.hostagent.network.courier import CourierDriver, CourierLoop
from kvcast.hostagent.network.datagrams import (
    Transport,
    TunnelTransport,
    UdpTransport,
    credit_of_buffer,
)
from kvcast.hostagent.network.interfaces import interface_bits_per_s, interface_mtu
from kvcast.hostagent.network.lander import hashing
from kvcast.hostagent.network.landing_zone import ZoneKeeper
from kvcast.hostagent.network.local_server import LocalServer
from kvcast.hostagent.network.rdma_link import RdmaCalls, RdmaServer
from kvcast.hostagent.network.survivors import NOBODY
from kvcast.hostagent.network.verbs import Card
from kvcast.hostagent.object_stores import open_store
from kvcast.hostagent.options import RDMA_OFF, RDMA_REQUIRED, Options
from kvcast.hostagent.ssd import SsdOfAgent
from kvcast.hostagent.standing import (
    KeptMap,
    Standing,
    index_beside,
    index_path_of,
    open_frames,
    stand_up,
)
from kvcast.hostagent.tiers.arena import Allocator, ArenaError, ArenaFile
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.hostagent.tiers.kept import KeptFile
from kvcast.hostagent.tiers.ledger import Ledger
from kvcast.hostagent.tiers.memory_placement import gather_pages, placement_of, preferring
from kvcast.protocol.links.cards import LinkCard
from kvcast.protocol.links.rdma import VerbsError
from kvcast.protocol.links.stream import LinkError
from kvcast.protocol.messages.control import CONTROL_PROTOCOL_VERSION, Register
from kvcast.protocol.messages.ethernet import ETHERNET_MTU_BYTES, Endpoint, parse_ip, parse_mac
from kvcast.protocol.messages.questions import FIRST_HANDLE
from kvcast.protocol.messages.roce import SHARED_CHUNKING
from kvcast.protocol.messages.shared import REGION_BYTES, index_bytes
from kvcast.protocol.messages.wire import chunking_for
from kvcast.protocol.placement import address_of_buffer

log = logging.getLogger(__name__)

_RECOVERY_PAUSE_S: Final = 0.002
"""Between two steps of a recovery, in which others have their turn."""
_RECOVERY_BEGINS_S: Final = 0.1
"""First come those who have waited for an agent."""
_NO_MAP_PAUSE_S: Final = 0.01
"""How often it is seen whether there is a map, without which nothing can be recovered."""
_LANDINGS_SHARE: Final = 32
"""All landing places of the courier take this part of the arena at most."""
_TELLS_A_QUIET: Final = 5
"""How often in the time that a silence takes a segment that came by RDMA is told of at least."""
_LOOK_AT_MEMORY_S: Final = 1.0
_REST_S: Final = 2.0
"""How long an agent that gives way to another waits for what was begun."""


@dataclass(frozen=True)
class _Made:
    """What the core was made of, which adapters need, too."""

    incarnation: int
    udp_port: int
    store: Store
    index: Index | None
    ledger: Ledger | None
    recovery: Recovery | None


class Agent:
    """One agent. `start`, then `close`; `ready` is set when the first bucket map has come."""

    def __init__(self, options: Options, standing: Standing | None = None) -> None:
        """`standing`: what there is already, for an agent that comes after another; it stays open
        when this one ends."""
        self._options = options
        self._standing = standing
        self._recovering: asyncio.TimerHandle | None = None
        self.cards: Cards | None = None
        """With which blocks go by RDMA,"""
        self.card: Card | None = None
        """and that of them, if any, which has the node's address: shared answers go by it."""

    async def start(self) -> None:
        """Make the arena and the sockets and begin to serve. On failure nothing is left; but what
        stood before is left as it is, with what clients hold there: it is another agent's then."""
        stands = self._standing is not None
        async with contextlib.AsyncExitStack() as stack:
            try:
                await self._start(stack, stands)
            except BaseException:
                if stands:
                    stack.pop_all()
                raise
            self._stack = stack.pop_all()

    def let_clients_in(self) -> None:
        """Begin to serve engines; over what stood before, `start` leaves that to whoever knows
        that no other agent does."""
        self._local_server.start(self._standing.local if self._standing is not None else None)

    async def _start(self, stack: contextlib.AsyncExitStack, stands: bool) -> None:
        rng = random.Random(self._options.seed)
        self._make_arena(stack)
        made = self._make_core(stack, rng)
        driver = await self._meet_agents(stack, stands, made)
        self._use_tiers(stack)
        self._meet_clients(stack, stands, made, driver)
        self._meet_controller(stack, rng, made)
        if made.recovery is not None:
            self._recovering = asyncio.get_running_loop().call_later(
                _RECOVERY_BEGINS_S, self._recover
            )
        stack.callback(self._end_recovery)
        looking = asyncio.create_task(self._look_at_memory())
        stack.callback(looking.cancel)

    def _make_arena(self, stack: contextlib.AsyncExitStack) -> None:
        options = self._options
        standing = self._standing
        if standing is None and options.arena.keep:
            standing = self._standing = stand_up(options)
            stack.callback(standing.close)
        self.arena: ArenaFile | KeptFile
        if standing is not None:
            self.arena = standing.kept.arena
        else:
            with preferring(options.arena.numa_node):
                self.arena = ArenaFile(
                    options.arena.size_bytes, options.arena.path, reserve=options.arena.reserve
                )
            stack.callback(self.arena.close)

    def _make_core(self, stack: contextlib.AsyncExitStack, rng: random.Random) -> _Made:
        """The core, with what was in the arena, and the socket for frames, which waits yet."""
        options = self._options
        network = options.network
        standing = self._standing
        store = Store(
            Allocator(options.arena.size_bytes, options.arena.slab_bytes),
            default_quota_bytes=options.arena.default_quota_bytes,
            quotas=options.arena.quotas,
        )
        incarnation = secrets.randbits(62) + 1
        ledger = Ledger(standing.kept.ledger) if standing is not None else None
        shared, index = self._share(stack, store, incarnation, ledger)
        recovery: Recovery | None = None
        if standing is not None:
            assert shared is not None
            assert index is not None
            incarnation = standing.kept.incarnation  # the node is who it was
            if standing.kept.found:
                index.hide_namespaces()
                if self.index_file is not None:
                    membarrier.barrier()  # who pins after this sees that another agent is here
                lately = partial(put_lately, ledger) if ledger is not None else tuple
                recovery = Recovery(index, store, shared, self.arena.memory, lately)
            standing.kept.found = True
            sock, buffer_bytes = standing.frames, standing.buffer_bytes
        else:
            sock, buffer_bytes = open_frames(network)
        stack.callback(sock.close)
        udp_port = sock.getsockname()[1] if network.tunnel is None else network.udp_port
        self.tunnel_address: tuple[str, int] | None = (
            sock.getsockname() if network.tunnel is not None else None
        )
        self.mtu_bytes = network.mtu_bytes or (
            interface_mtu(network.ip) if network.tunnel is None else ETHERNET_MTU_BYTES
        )
        agent_options = self._fitted(buffer_bytes)
        self.core = AgentCore(
            *(agent_options, store, self.arena.memory, rng, shared),
            recovery=recovery,
            ledger=ledger,
        )
        stack.callback(self.core.close)
        if standing is not None:
            kept_map = KeptMap(f"{index_path_of(options)}.map")
            last = kept_map.read() if recovery is not None else None
            if last is not None:
                try:
                    self.core.restore_map(asyncio.get_running_loop().time(), *last)
                except LinkError as error:
                    log.error("the map of the agent before is of no use: %s", error)
            self.core.keep_map = kept_map.write
        self.transport: Transport = (
            UdpTransport(self.core, sock, joins=network.joins)
            if network.tunnel is None
            else TunnelTransport(
                self.core,
                sock,
                Endpoint(parse_mac(network.mac), parse_ip(network.ip), network.udp_port),
            )
        )
        stack.callback(DigestThreads(self.core, self.transport.pump).close)
        return _Made(incarnation, udp_port, store, index, ledger, recovery)

    async def _meet_agents(
        self, stack: contextlib.AsyncExitStack, stands: bool, made: _Made
    ) -> CourierDriver | None:
        """The links to other agents, but for frames, and the courier, if there is one."""
        options = self._options
        network = options.network
        standing = self._standing
        loop = asyncio.get_running_loop()
        driver: CourierDriver | None = None
        if isinstance(loop, CourierLoop) and made.index is not None:
            driver = self._make_courier(loop, made.index, made.store)
        if driver is None and network.polls:
            log.warning("--busy-poll: there is no compiled code here to poll with")
        self._bulk_caller = BulkCaller(
            self.core, options.bulk, self.transport.pump, options.credentials
        )
        self.transport.dispatch_calls = self._bulk_caller.dispatch
        self.bulk_server = BulkServer(self.core, options.bulk, options.credentials)
        if driver is not None and options.credentials is None:
            self._use_conveyors(driver)
        self.bulk_address = await self.bulk_server.start(
            network.bulk_host, network.bulk_port, standing.bulk if standing is not None else ()
        )
        stack.push_async_callback(self.bulk_server.close)
        stack.push_async_callback(self._bulk_caller.close)
        if not stands and options.network.rdma != RDMA_OFF:
            await self._gather_pages()  # a card would hold them where they are
        self.rdma_port = await self._use_rdma(stack)
        return driver

    def _use_tiers(self, stack: contextlib.AsyncExitStack) -> None:
        """Those below the arena."""
        options = self._options
        self.ssd: SsdOfAgent | None = None
        if options.ssd.is_used:
            self.ssd = SsdOfAgent(self.core, options.ssd, options.owner, self.transport.pump)
            stack.push_async_callback(self.ssd.close)
            self.ssd.start(patient=self._standing is not None)
        self.cold: ColdOfAgent | None = None
        if options.cold:
            objects = open_store(options.cold)
            self.cold = ColdOfAgent(self.core, objects, options.arena.cluster, self.transport.pump)
            stack.push_async_callback(self.cold.close)
            self.cold.start()

    def _meet_clients(
        self,
        stack: contextlib.AsyncExitStack,
        stands: bool,
        made: _Made,
        driver: CourierDriver | None,
    ) -> None:
        """Serve engines; frames are received from now on, too."""
        options = self._options
        standing = self._standing
        index, recovery = made.index, made.recovery
        self._local_server = LocalServer(
            *(self.core, self.arena, options.local, self.transport.pump, self.index_file),
            keeper=standing.keeper if standing is not None else NOBODY,
            courier=driver,
        )
        if index is not None and standing is not None:
            stack.callback(self._let_go, index)  # after the clients were cut off
        if standing is not None:
            if recovery is not None and recovery.begun:
                self._local_server.restore(standing.survivors.values())
            elif standing.survivors:
                raise ArenaError("clients outlive their agent, and no map says what they hold")
            elif made.ledger is not None:
                deque(given_lately(made.ledger), 0)  # to clients that are gone
        if not stands:
            self.let_clients_in()
        stack.push_async_callback(self._local_server.close)
        if driver is not None:
            stack.callback(driver.close)
        self.transport.start()
        stack.callback(self.transport.close)

    def _meet_controller(
        self, stack: contextlib.AsyncExitStack, rng: random.Random, made: _Made
    ) -> None:
        """Ask to be in the pool, and say where this node is."""
        options = self._options
        network = options.network
        register = Register(
            version=CONTROL_PROTOCOL_VERSION,
            node_id=self.core.options.node_id,
            incarnation=made.incarnation,
            ip=network.ip,
            mac=network.mac,
            switch_port=network.switch_port,
            udp_port=made.udp_port,
            bulk_host=self.bulk_address[0],
            bulk_port=self.bulk_address[1],
            arena_bytes=options.arena.size_bytes,
            mtu_bytes=self.mtu_bytes,
            rdma_port=self.rdma_port,
            link_bits_per_s=self._link_bits_per_s(),
        )
        self._control = ControlLink(
            self.core, options.control, register, rng, self._core_told, options.credentials
        )
        self._zone: ZoneKeeper | None = None
        if self.card is not None and self._may_share_by_rdma(self.card):

            def tell(queue_pair: int, key: int) -> None:
                self._control.register_anew(
                    msgspec.structs.replace(register, zone_queue_pair=queue_pair, zone_key=key)
                )

            self._zone = ZoneKeeper(
                self.core, self.card, self.arena.memory, tell, self.transport.pump
            )
            stack.callback(self._zone.close)
        self.ready = self._control.ready
        self._control.start()
        stack.push_async_callback(self._control.close)

    def _make_courier(self, loop: CourierLoop, index: Index, store: Store) -> CourierDriver | None:
        """Have small blocks fetched in compiled code, where that can be."""
        functions = hashing()
        taken = loop.selector.runs is not None
        if self.index_file is None or functions is None or taken:
            return None
        core, transport = self.core, self.transport
        assert core.shared is not None
        pins = memoryview(bytearray(REGION_BYTES))
        core.shared.join(
            Region(
                pins,
                core.store.allocator.capacity_bytes,
                lambda why: log.error("what leaves by conveyors: %s", why),
            )
        )
        core.reads.courier = courier = Courier(
            *(store, core.requester, core.outbox, core.spread, core.metrics),
            index_address=address_of_buffer(index.memory),
            index_bits=index.bits,
            arena_address=address_of_buffer(self.arena.memory),
            most_bytes=core.store.allocator.capacity_bytes // _LANDINGS_SHARE,
            hashing=functions,
            ledger=core.ledger,
            # No handle of a former agent's may be taken for one of ours.
            first_handle=FIRST_HANDLE | secrets.randbits(29) << 32,
        )
        pushes = Pushes(
            *(courier, store, core.writes, core.serving, core.outbox, core.metrics),
            arena_address=address_of_buffer(self.arena.memory),
            lane=0 if core.lane is None else core.lane.address,
            ledger=core.ledger,
        )
        core.serving.stored = pushes.stored
        return CourierDriver(
            *(courier, pushes, loop.selector, core.requester.placement),
            frames=transport.socket,
            mover=transport.mover,
            go_on=transport.go_on,
            pump=transport.pump,
            count=transport.count_frames,
            lane=core.lane,
            pins=pins,
            meetings=core.meetings,
            given=core.conveyed,
            open_lane=transport.open_lane,
            close_lane=transport.close_lane,
            tell_within_s=core.requester.config.quiet_s / _TELLS_A_QUIET,
            polls=self._options.network.polls,
        )

    def _use_conveyors(self, driver: CourierDriver) -> None:
        """Have large blocks come and go in compiled code, too. With TLS they do not: it is
        Python's."""
        conveyors = driver.conveyors
        self.bulk_server.conveyors = self._bulk_caller.conveyors = conveyors
        driver.connect = self._bulk_caller.convey
        self.bulk_server.pushes = self._bulk_caller.pushes = driver.push_sockets
        driver.connect_to_push = self._connect_to_push
        driver.pushes.connects = True
        self.core.serving.takes_pushes = driver.pushes.takes
        driver.courier.takes_conveyors = self.core.options.lone_reads_by_tcp
        self.core.serving.conveys = conveyors.gives
        self.core.stop_conveying = conveyors.stop_giving
        # Not now: what has ended and what has landed is being heard of.
        loop, sockets = asyncio.get_running_loop(), driver.push_sockets
        self.core.stop_pushing = lambda: loop.call_soon(sockets.stop_pushing)
        self.core.stop_taking = lambda: loop.call_soon(sockets.stop_taking)

    def _connect_to_push(self, node: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._bulk_caller.pushes is not None and self.core.departures.is_tight(now):
            self._bulk_caller.pushes.failed(now, node)
        else:
            self._bulk_caller.convey(node, pushes=True)

    def _core_told(self) -> None:
        if self._zone is not None:
            self._zone.follow()
        self.transport.pump()

    def _may_share_by_rdma(self, card: Card) -> bool:
        """Whether chunks of shared answers fit, written and by DATA."""
        chunking = SHARED_CHUNKING
        fits: int = min(self.mtu_bytes, card.mtu_bytes + chunking.mtu_bytes - chunking.chunk_bytes)
        if fits < chunking.mtu_bytes:
            log.info("shared answers go by DATA: RDMA's need an MTU of %d", chunking.mtu_bytes)
        return fits >= chunking.mtu_bytes

    def _let_go(self, index: Index) -> None:
        if not self._local_server.cut_off_holders:
            index.let_go()

    def _recover(self) -> None:
        """Go through what a former agent has left, a little at a time."""
        busy = self.core.recover()
        if self.core.recovery is not None:
            pause_s = _RECOVERY_PAUSE_S if busy else _NO_MAP_PAUSE_S
            loop = asyncio.get_running_loop()
            self._recovering = loop.call_later(pause_s, self._recover)
        elif self.core.recovery_counters is not None:
            counters = self.core.recovery_counters
            log.log(
                logging.WARNING if counters.copies_damaged else logging.INFO,
                "took over %d blocks of the agent before; %d were damaged, and %d entries refused",
                *(counters.copies, counters.copies_damaged, counters.entries_refused),
            )
            self.transport.pump()  # what was found may be to be handed over

    async def _look_at_memory(self) -> None:
        """Say where the arena's memory is, when everything else has begun."""
        await asyncio.sleep(_LOOK_AT_MEMORY_S)
        await self._gather_pages()
        placement = await asyncio.to_thread(placement_of, self.arena.path)
        self.core.facts |= placement.values()

    async def _gather_pages(self) -> None:
        """Have the arena's pages be huge ones, where that can be."""
        arena = self._options.arena
        if not (arena.huge_pages and arena.reserve):
            return
        loop = asyncio.get_running_loop()
        ends = threading.Event()
        fd = self.arena.open_for_client()

        def gather() -> int:
            try:
                return gather_pages(fd, arena.size_bytes, lambda: not ends.is_set())
            finally:
                os.close(fd)

        gathering = loop.run_in_executor(None, gather)
        try:
            gathered = await asyncio.shield(gathering)
        finally:
            ends.set()
        self.core.facts["arena_huge_bytes"] = float(gathered)

    def _end_recovery(self) -> None:
        if self._recovering is not None:
            self._recovering.cancel()

    async def rest(self) -> None:
        """Take nothing new, and end what was begun, before another agent takes over. What is held
        for clients stays held: the process ends after this, and closes nothing."""
        await asyncio.gather(self._local_server.rest(_REST_S), self.bulk_server.rest(_REST_S))

    async def _use_rdma(self, stack: contextlib.AsyncExitStack) -> int:
        """Have blocks go by RDMA, where that is wanted and there is a card; the port of the link,
        0 without."""
        options = self._options
        if options.network.rdma == RDMA_OFF:
            return 0
        names, ip = options.network.rdma_devices, options.network.ip
        node = await self._arena_node() if names else None
        try:
            cards = open_cards(ip, names, self.arena.memory, options.rdma, node)
        except VerbsError as error:
            if options.network.rdma == RDMA_REQUIRED:
                raise
            log.info("blocks go by TCP, not by RDMA: %s", error)
            return 0
        stack.callback(cards.close)
        self.cards, self.card = cards, cards.card_with(ip)
        if self.card is None:
            log.info("shared answers go by DATA: none of the named RDMA cards has %s", ip)
        self.core.cards = cards.values
        calls = RdmaCalls(self.core, options.rdma, cards, self.transport.pump, options.credentials)
        stack.push_async_callback(calls.close)
        server = self.rdma_server = RdmaServer(
            self.core, options.rdma, options.bulk, cards, options.credentials
        )
        stack.push_async_callback(server.close)

        def card_changed(card: LinkCard) -> None:
            calls.card_changed(card)
            server.card_changed(card)

        cards.changed = card_changed

        def dispatch() -> None:
            calls.take()
            self._bulk_caller.dispatch()

        self.transport.dispatch_calls = dispatch
        return await server.start(options.network.bulk_host)

    async def _arena_node(self) -> int | None:
        """The NUMA node that the arena is on: as the kernel says, or else as it was wanted."""
        found = await asyncio.to_thread(placement_of, self.arena.path)
        if found.bytes_by_node:
            return node_of_most(found.bytes_by_node)
        return self._options.arena.numa_node

    def _share(
        self,
        stack: contextlib.AsyncExitStack,
        store: Store,
        incarnation: int,
        ledger: Ledger | None,
    ) -> tuple[SharedIndex | None, Index | None]:
        """Make the index beside the arena, where clients can use one."""
        self.index_file: ArenaFile | KeptFile | None = None
        arena_bytes = self.arena.size_bytes
        usable = membarrier.available()
        if self._standing is not None:
            index = Index(self._standing.kept.index.memory, arena_bytes, incarnation)
            stack.callback(index.close)
            if usable:
                self.index_file = self._standing.kept.index
            barrier = membarrier.barrier if usable else _no_barrier
            return SharedIndex(index, store, barrier, ledger), index
        if not usable:
            log.info("clients ask for every block: this machine has no barrier for an index")
            return None, None
        self.index_file = ArenaFile(
            index_bytes(buckets_for(arena_bytes)),
            index_beside(self.arena.path),
            reserve=self._options.arena.reserve,
        )
        stack.callback(self.index_file.close)
        index = Index(self.index_file.memory, arena_bytes, incarnation)
        stack.callback(index.close)
        return SharedIndex(index, store, membarrier.barrier), index

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
        network = self._options.network
        return replace(
            options,
            requester=requester,
            responder=responder,
            bulk_link_bits_per_s=self._bulk_link_bits_per_s(),
            reads_share_bulk_link=network.bulk_host == network.ip,
            placement_seed=secrets.randbits(64),
        )

    def _link_bits_per_s(self) -> int:
        """What the link to the switch carries; 0 = nobody knows."""
        network = self._options.network
        if network.link_bits_per_s or network.tunnel is not None:
            return network.link_bits_per_s
        return interface_bits_per_s(network.ip)

    def _bulk_link_bits_per_s(self) -> int:
        """What the link of the bulk link's address carries; 0 = nobody knows."""
        network = self._options.network
        if network.bulk_link_bits_per_s:
            return network.bulk_link_bits_per_s
        if network.bulk_host == network.ip:
            return self._link_bits_per_s()
        try:
            return interface_bits_per_s(network.bulk_host)
        except ValueError:  # a name, or no IPv4 address
            return 0

    async def close(self) -> None:
        """Leave the pool, end everything, and unlink the arena."""
        await self._stack.aclose()


def _no_barrier() -> None:
    """There are no regions on this machine, and so nobody to be ordered against."""
