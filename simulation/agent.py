"""The simulated host: a machine with a network card, an arena and a clock, and the agent on it.

Owns: what the agent's adapters own in the product: when the core's timer is called, what its
frames look like on the wire, the control link, and the life of a process. Must not know: what the
core decides, or what is checked.

A host's memory outlives its processes, as shared memory does; what a new process makes of it is
the product's business (`agent_core`). A process may die between any two events, or stand still
for a while (a stop signal, a page fault storm) and then find its work waiting.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, cast

import msgspec
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.courier import Courier
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.pushing import Pushes, put_lately
from kvcast.hostagent.core.recovery import Recovery
from kvcast.hostagent.core.serving import Serving
from kvcast.hostagent.core.sessions import Session, rows_left
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.ssd import ARENA
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.network.lander import hashing
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.hostagent.tiers.ledger import LEDGER_BYTES, Ledger
from kvcast.protocol.digests import Digested, digests_at_once
from kvcast.protocol.lane import datagrams_of
from kvcast.protocol.links.control_caller import (
    ControlCaller,
    ControlConnection,
    ControlOptions,
)
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    PoolMap,
    Register,
    Registered,
)
from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint, parse_ip, parse_mac
from kvcast.protocol.messages.questions import EXISTS, FIRST_HANDLE, PUT
from kvcast.protocol.messages.roce import SHARED_CHUNKING
from kvcast.protocol.messages.shared import index_bytes
from kvcast.protocol.messages.wire import UDP_PORT, decode, encode
from kvcast.protocol.placement import address_of_buffer
from kvcast.simulation.bulk import BulkSide
from kvcast.simulation.conveyor import ConveyorSide
from kvcast.simulation.disk import SimDisk
from kvcast.simulation.disk_side import DiskSide
from kvcast.simulation.model_writes import is_roce
from kvcast.simulation.network import Link
from kvcast.simulation.objects import ColdSide, SimObjects
from kvcast.simulation.pushing import PushSide
from kvcast.simulation.rdma import RdmaSide
from kvcast.simulation.streams import Process, StreamDriver, StreamEnd
from kvcast.simulation.verbs import Fabric
from kvcast.simulation.world import Alarm, DiedError, World
from kvcast.simulation.zones import ZoneSide

SEND_ROUND: Final = 64
LANE_ROUND: Final = 65
"""A segment of small chunks and its OFFER."""
RECOVERY_PAUSE_S: Final = 0.15
"""So long that much happens while an agent still goes through what it found."""
_ENTRY_WORDS: Final = shared.ENTRY_BYTES // shared.WORD_BYTES
DIGESTS_TAKE_S: Final = 0.002
DIGESTS_ARE_LATE_S: Final = 0.5
"""A processor that has much else to do."""
EPOCH_S: Final = 1e9
"""Seconds since 1970 when a run begins."""
STALLED_FRAMES: Final = 256
"""What a socket keeps for a process that stands still."""
CONTROL: Final = ControlOptions(
    "controller", 0, retry_max_s=1.0, connect_timeout_s=1.0, register_timeout_s=1.0
)


@dataclass(frozen=True)
class HostOptions:
    """One machine. `number` is also its port of the switch; `clock_rate`: its seconds in a real
    one; `arena_bytes` a multiple of `slab_bytes`."""

    number: int
    arena_bytes: int
    slab_bytes: int
    clock_offset_s: float
    clock_rate: float
    agent: AgentOptions
    default_quota_bytes: int = 0
    mtu_bytes: int = 1500
    link_bits_per_s: int = 0
    """What it says that its link carries, by which its load is told; 0 = it does not say."""
    keeps: bool = False
    """Whether clients outlive their agent, as with `--arena-keep` and a supervisor."""
    shares_by_rdma: bool = False
    """Whether its card, if it has one, takes and writes shared answers."""
    digests_later: bool = False
    """Whether digests are made beside all else, as threads make those of large blocks."""

    @property
    def node_id(self) -> str:
        return f"node-{self.number}"

    @property
    def ip(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def mac(self) -> str:
        return f"02:6b:76:00:00:{self.number:02x}"

    @property
    def may_share_by_rdma(self) -> bool:
        """Whether chunks of shared answers fit, written and by DATA, as `kvcast.hostagent.agent`
        asks."""
        return self.shares_by_rdma and self.mtu_bytes >= SHARED_CHUNKING.mtu_bytes

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(parse_mac(self.mac), parse_ip(self.ip), UDP_PORT)


class Network(Protocol):
    """The streams that a process can open."""

    def open_control(self, host: SimHost) -> StreamEnd: ...

    def open_bulk(self, host: SimHost, to: str) -> StreamEnd: ...

    def open_rdma(self, host: SimHost, to: str) -> StreamEnd: ...


class HostObserver(Protocol):
    """Whoever watches the hosts."""

    def sent(self, host: int, frame: bytes) -> None: ...

    def frame_missed(self, host: int, frame: bytes) -> None: ...

    def acknowledged(self, host: int, namespace: int, key: bytes) -> None: ...

    def zone_made(self, host: int, queue_pair: int) -> None: ...


_PUT: Final = PUT.to_bytes(2, "little")
_EXISTS: Final = EXISTS.to_bytes(2, "little")
_LANDINGS_SHARE: Final = 8
"""Landing places of the courier take more of these small arenas than of real ones."""

CoreFactory = Callable[["SimHost", random.Random], AgentCore]


def _courier_of(host: SimHost, core: AgentCore) -> Courier | None:
    """The courier of a new process, as `kvcast.hostagent.agent` makes it."""
    functions = hashing()
    if (core.recovery is not None and core.ledger is None) or functions is None:
        return None
    first_handle = FIRST_HANDLE
    if core.ledger is not None:  # no handle of a former agent's may be taken for one of this one's
        rng = host.world.stream(f"handles/{host.number}/{host.lives}")
        first_handle |= rng.getrandbits(29) << 32
    return Courier(
        *(core.store, core.requester, core.outbox, core.spread, core.metrics),
        index_address=address_of_buffer(host.index),
        index_bits=buckets_for(host.options.arena_bytes).bit_length() - 1,
        arena_address=address_of_buffer(host.memory),
        most_bytes=host.options.arena_bytes // _LANDINGS_SHARE,
        hashing=functions,
        ledger=core.ledger,
        first_handle=first_handle,
    )


def _pushes_of(host: SimHost, core: AgentCore, courier: Courier, serving: Serving) -> Pushes:
    """Its puts by compiled code, likewise."""
    pushes = Pushes(
        *(courier, core.store, core.writes, serving, core.outbox, core.metrics),
        arena_address=address_of_buffer(host.memory),
        lane=0 if core.lane is None else core.lane.address,
        ledger=core.ledger,
    )
    core.serving.stored = pushes.stored
    return pushes


def agent_core(host: SimHost, rng: random.Random) -> AgentCore:
    """The core of a new process, as `kvcast.hostagent.agent` makes it: over the host's memory,
    whatever is in it, and over the index and the map that the process before has kept, if the
    machine still has them. A tier that outlives the process joins here.

    Nothing happens between a client's write and its look at the index here, so the barrier has
    nothing to do; how they interleave is `tests/property/test_shared_index_property.py`'s."""
    options = host.options
    store = Store(
        Allocator(options.arena_bytes, options.slab_bytes),
        default_quota_bytes=options.default_quota_bytes,
    )
    found = len(host.index) > 0
    if not found:
        host.index = memoryview(bytearray(index_bytes(buckets_for(options.arena_bytes))))
    index = Index(host.index, options.arena_bytes, host.lives)
    ledger = Ledger(host.ledger) if options.keeps else None
    shared_index = SharedIndex(index, store, lambda: None, ledger)
    memory = memoryview(host.memory)
    recovery = None
    if found:
        index.hide_namespaces()
        lately = partial(put_lately, ledger) if ledger is not None else tuple
        recovery = Recovery(index, store, shared_index, memory, lately)
    core = AgentCore(
        options.agent, store, memory, rng, shared_index, recovery=recovery, ledger=ledger
    )
    if found and host.kept_map is not None:
        core.restore_map(host.local(), *host.kept_map)
    core.keep_map = host.keep_map
    return core


class SimHost:
    """One machine; `start` begins an agent's process, `crash` ends it."""

    def __init__(
        self,
        world: World,
        options: HostOptions,
        network: Network,
        observer: HostObserver,
        make_core: CoreFactory,
    ) -> None:
        self.world = world
        self.options = options
        self.number = options.number
        self.memory = bytearray(world.stream(f"memory/{options.number}").randbytes(1024)) * (
            options.arena_bytes // 1024
        )
        self.index = memoryview(b"")
        """What the present process, or the last one, has written for its clients."""
        self.ledger = memoryview(bytearray(LEDGER_BYTES if options.keeps else 0))
        """Where it stands what clients hold, for the process that comes after."""
        self.survivors: dict[int, memoryview] = {}
        """By number in the ledger, the regions of clients that may outlive the process."""
        self.clients = 0
        """How many clients there have been."""
        self.kept_map: tuple[Registered, PoolMap] | None = None
        self.memory_lives = 1
        """How often the memory was lost, or parts of it: what it held before is owed to nobody."""
        self.network = network
        self.observer = observer
        self.process: SimAgent | None = None
        self.lives = 0
        self.stalled_until = 0.0
        self.clock_set_s = 0.0
        """By how much somebody has set its wall clock."""
        self.uplink: Link | None = None
        self.disk: SimDisk | None = None
        self.arena: SimDisk | None = None
        """A further one, which outlives machines, too."""
        self.objects: SimObjects | None = None
        """The object store below all hosts; None = there is none."""
        self.fabric: Fabric | None = None
        """What its RDMA card is connected to; None = it has no card."""
        self.committing: list[Callable[[], None]] = []
        """Of puts without an answer, who is told before any are committed, if that takes a while:
        the map may have changed since they were asked for."""
        self.tamper: Callable[[bytes], bytes | None] | None = None
        """A hostile host changes what its agent sends; None = the frame is not sent."""
        self.overhear: Callable[[bytes], None] | None = None
        """A hostile host also looks at what arrives."""
        self._make_core = make_core

    def keep_map(self, registered: Registered, pool_map: PoolMap) -> None:
        """The process has a map for the one that comes after."""
        self.kept_map = registered, pool_map

    def lose_memory(self, rng: random.Random) -> None:
        """No electricity: what lies in memory is anything, and shared files are gone."""
        self.memory[:] = rng.randbytes(1024) * (len(self.memory) // 1024)
        self.index = memoryview(b"")
        self.ledger = memoryview(bytearray(len(self.ledger)))
        self.kept_map = None
        self.memory_lives += 1

    def damage_memory(self, rng: random.Random, bits: int) -> None:
        """A memory that fails: some bits of the arena flip, and of the index."""
        self.memory_lives += 1
        for memory in (memoryview(self.memory), self.index[shared.TAGS_OFFSET :]):
            # Most of it is empty: what flips there does no harm, and shows nothing.
            used = [at for at in range(0, len(memory), 64) if any(memory[at : at + 64])]
            for at in rng.sample(used, min(bits, len(used))):
                memory[at + rng.randrange(64)] ^= 1 << rng.randrange(8)

    def tear_index(self, rng: random.Random, entries: int) -> None:
        """The process dies while it writes the index: some entries are half of what they were, and
        half of what they were to be; on memory that does not keep the order of stores, with a tag
        and an even generation. (Between two events, where the simulation lets processes die, all
        of it is written; so it is torn here.)"""
        self.memory_lives += 1
        words = self.index.cast("Q")
        first = shared.TAGS_OFFSET // shared.WORD_BYTES
        last = shared.entries_offset(buckets_for(self.options.arena_bytes)) // shared.WORD_BYTES
        used = [slot for slot in range(last - first) if words[first + slot]]
        for slot in rng.sample(used, min(entries, len(used))):
            other = rng.choice(used)
            word, to_be = (last + each * _ENTRY_WORDS for each in (slot, other))
            changed = rng.randrange(_ENTRY_WORDS)
            if rng.random() < 0.5:
                words[first + slot] = 0
                words[word] += 1
            elif changed >= 2:
                words[first + slot] = words[first + other]
            words[word + 1 : word + 1 + changed] = words[to_be + 1 : to_be + 1 + changed]
        words.release()

    # --- time -------------------------------------------------------------------------------

    def local(self) -> float:
        """The present time by this host's clock."""
        return self.options.clock_offset_s + self.world.now * self.options.clock_rate

    @property
    def wall_s(self) -> float:
        """What this host takes for the seconds since 1970."""
        return EPOCH_S + self.world.now + self.clock_set_s

    def world_time(self, local: float) -> float:
        """When this host's clock will show `local`."""
        return (local - self.options.clock_offset_s) / self.options.clock_rate

    # --- life -------------------------------------------------------------------------------

    def start(self) -> SimAgent:
        """Begin a process over whatever the memory holds."""
        assert self.process is None
        self.lives += 1
        rng = self.world.stream(f"agent/{self.number}/{self.lives}")
        process = self.process = SimAgent(self, self._make_core(self, rng), rng)
        process.restore()
        process.start()
        return process

    def crash(self, *, machine: bool = False) -> None:
        """End the process where it stands, or the whole machine."""
        assert self.process is not None
        process, self.process = self.process, None
        self.stalled_until = 0.0
        process.die(machine=machine)

    def stall(self, seconds: float) -> None:
        """The process stands still for so long."""
        self.stalled_until = max(self.stalled_until, self.world.now + seconds)

    def when_running(self, process: SimAgent, action: Callable[[], None]) -> None:
        """Do it in this life of the process, now or when it runs again."""
        if process.dead:
            return
        if self.world.now < self.stalled_until:
            self.world.at(self.stalled_until, lambda: self.when_running(process, action))
            return
        process.events += 1
        try:
            action()
        finally:
            process.events -= 1

    # --- network card -----------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        """The agent sends an Ethernet frame."""
        if self.tamper is None:
            self.observer.sent(self.number, frame)
        else:
            changed = self.tamper(frame)
            if changed is None:
                return
            frame = changed
        self.send_raw(frame)

    # Of the card for shared answers (`zones.Cable`):

    def send_packet(self, packet: bytes) -> None:
        """The card sends a packet."""
        self.observer.sent(self.number, packet)
        self.send_raw(packet)

    def packet_missed(self, packet: bytes) -> None:
        """The card does not take a packet, or not yet."""
        self.observer.frame_missed(self.number, packet)

    def zone_made(self, queue_pair: int) -> None:
        """The card takes what is written to a landing zone."""
        self.observer.zone_made(self.number, queue_pair)

    def send_raw(self, frame: bytes) -> None:
        """Anybody on this host sends a frame."""
        assert self.uplink is not None
        self.world.note(64 + self.number, frame)
        self.uplink.send(frame)

    def receive(self, frame: bytes) -> None:
        """A frame has come over the wire."""
        if self.overhear is not None:
            self.overhear(frame)
        process = self.process
        if is_roce(frame):
            if process is None or process.zones is None:
                self.observer.frame_missed(self.number, frame)
            else:
                process.zones.receive(frame)
            return
        if process is None:
            self.observer.frame_missed(self.number, frame)
        elif self.world.now < self.stalled_until:
            if process.waiting >= STALLED_FRAMES:
                self.world.counts["fault.socket_overflow"] += 1
                self.observer.frame_missed(self.number, frame)
                return
            process.waiting += 1
            self.when_running(process, lambda: process.take_waiting(frame))
        else:
            process.take(frame)


class SimAgent(Process):
    """One life of an agent: the core, and what surrounds it."""

    def __init__(self, host: SimHost, core: AgentCore, rng: random.Random) -> None:
        super().__init__(host.world)
        self.host = host
        self.core = core
        self.rng = rng
        self.dead = False
        self.events = 0
        """That are under way: one may be within another."""
        self.waiting = 0
        """Frames in the socket while the process stands still."""
        self.on_death: list[Callable[[], None]] = []
        self.in_the_moment: Callable[[], None] | None = None
        """Kills this process once compiled code has done something, before that is booked."""
        self.waiting_sessions: dict[int, Session] = {}
        """By number, those of clients of the process before that have not come back yet."""
        self.bulk = BulkSide(
            host.world,
            self,
            core,
            open_stream=lambda node_id: host.network.open_bulk(host, node_id),
            pump=self.pump,
            acknowledged=lambda *block: host.observer.acknowledged(host.number, *block),
        )
        self.rdma: RdmaSide | None = None
        if host.fabric is not None:
            self.rdma = RdmaSide(
                host.world,
                self,
                core,
                host.fabric,
                open_stream=lambda node_id: host.network.open_rdma(host, node_id),
                pump=self.pump,
                acknowledged=lambda *block: host.observer.acknowledged(host.number, *block),
            )
        self.zones: ZoneSide | None = None
        if self.rdma is not None and host.options.may_share_by_rdma:
            self.zones = ZoneSide(
                *(host.world, self, core, self.rdma.card, host, host.options.endpoint),
                register=self._register_zone,
                pump=self.pump,
            )
        self.disk: DiskSide | None = None
        if host.disk is not None:
            self.disk = DiskSide(
                host.world, self, core, host.disk, host.options.node_id, rng, self.pump
            )
        self.arena: DiskSide | None = None
        """The further one."""
        if host.arena is not None:
            self.arena = DiskSide(
                *(host.world, self, core, host.arena, f"{host.options.node_id}, arena"),
                host.world.stream(f"arena/{host.number}/{host.lives}"),
                self.pump,
                kind=ARENA,
            )
        self.cold: ColdSide | None = None
        if host.objects is not None:
            self.cold = ColdSide(host.world, self, core, host.objects, rng, self.pump)
        self._pool: Pool | None = None
        self._wrap: dict[int, Encapsulation] = {}
        self._placement = core.requester.placement
        self._placement.unwrap_for(host.options.endpoint)
        if core.lane is not None:
            core.lane.send = self._send_jobs
        self._digesting = host.world.stream(f"digests/{host.number}/{host.lives}")
        if host.options.digests_later:
            core.make_digests = self._digest_later
        self.courier = _courier_of(host, core)
        """As the client's library asks it; None in a process that found what another has left."""
        self.courier_told: dict[int, Callable[[bytes], None]] = {}
        """By number in the courier, who hears its answers."""
        self.conveyors: ConveyorSide | None = None
        if self.courier is not None:
            core.reads.courier = self.courier
            self._placement.before_python = self._courier_first
            self.conveyors = ConveyorSide(
                *(host.world, self, core, self.courier),
                open_stream=lambda node_id: host.network.open_bulk(host, node_id),
                settled=self._settled,
            )
            self.bulk.give_to = self.conveyors.accept
            self.pushes = _pushes_of(host, core, self.courier, cast(Serving, self.bulk.served))
            self.push_side = PushSide(
                *(host.world, self, core, self.pushes),
                open_stream=lambda node_id: host.network.open_bulk(host, node_id),
                settled=self._settled,
            )
            self.bulk.take_from = self.push_side.accept
        self._alarm = Alarm(host.world, lambda: host.when_running(self, self._wake))
        self._control = ControlCaller(
            core, CONTROL, self._registration(), rng, core.metrics, self._flush
        )
        self._driver: StreamDriver | None = None

    def start(self) -> None:
        self._start_tiers()
        if self.cold is not None:
            self.cold.start()
        self._control.start(self.now)
        self._act()
        self._recover()

    def _start_tiers(self) -> None:
        """As `SsdOfAgent` does."""
        store, memory = self.core.store, self.core.memory
        sides = [side for side in (self.arena, self.disk) if side is not None]
        tiers = []
        for side in sides:
            tier = side.open(store, memory)
            if tier is not None:
                tiers.append(tier)
                if side is self.arena:
                    store, memory = tier.shelf, side.memory
        if tiers:
            self.core.use_tiers(tiers)
        for side in sides:
            side.scan()

    def restore(self) -> None:
        """Hold what clients of the process before hold, until they come back, as
        `LocalServer.restore` does."""
        core, survivors = self.core, self.host.survivors
        if core.ledger is None:
            return
        rows = rows_left(core.ledger)
        assert not survivors or (core.recovery is not None and core.recovery.begun)
        for number, region in survivors.items():
            session = Session(
                *(core, lambda _reply: None),
                number=number,
                first_handle=self.rng.getrandbits(30) << 32 | 1,
            )
            session.restore(rows.pop(number, []), region)
            self.waiting_sessions[number] = session
        for nobodys in rows.values():
            for at, _ in nobodys:
                core.ledger.strike(at)

    def _recover(self) -> None:
        """As `kvcast.hostagent.agent` does: a little at a time."""
        self.core.recover()
        if self.core.recovery is not None:
            self.host.world.after(
                RECOVERY_PAUSE_S, lambda: self.host.when_running(self, self._recover)
            )

    def die(self, *, machine: bool) -> None:
        """SIGKILL, or no electricity."""
        self.dead = True
        for action in self.on_death:
            action()
        self.bulk.die(machine=machine)
        if self.conveyors is not None:
            self.conveyors.die(machine=machine)
            self.push_side.die(machine=machine)
        if self.rdma is not None:
            self.rdma.die(machine=machine)
        if self.zones is not None:
            self.zones.die()
        for side in (self.arena, self.disk):
            if side is not None:
                side.die(machine=machine)
        if self._driver is not None:
            self._driver.end.stream.reset(by=0, machine=machine)

    @property
    def now(self) -> float:
        return self.host.local()

    @property
    def wall_s(self) -> float:
        return self.host.wall_s

    def world_time(self, when: float) -> float:
        return self.host.world_time(when)

    def when_running(self, action: Callable[[], None]) -> None:
        self.host.when_running(self, action)

    # --- datagrams --------------------------------------------------------------------------

    def take_waiting(self, frame: bytes) -> None:
        self.waiting -= 1
        self.take(frame)

    def take(self, frame: bytes) -> None:
        """As `TunnelTransport` takes a frame, by the same compiled code."""
        core, metrics = self.core, self.core.metrics
        self._follow_pool()
        lane = core.open_lane(self.now, LANE_ROUND)
        self._placement.place_bytes(
            frame,
            lambda arrivals: core.placed(self.now, arrivals),
            lambda source, datagram: core.receive(self.now, source, decode(datagram)),
            instead=None if lane is None else lane.place,
        )
        counts = self._placement.take_counts()
        metrics.frames_received_total += counts.frames
        metrics.frames_misaddressed_total += counts.misaddressed
        metrics.frames_malformed_total += counts.malformed
        metrics.frames_unknown_source_total += counts.unknown_source
        if counts.misaddressed + counts.malformed + counts.unknown_source == 0:
            core.after_receiving(self.now)
            self.pump()

    # --- the courier ---------------------------------------------------------------------------

    def ask_courier(self, number: int, question: bytes) -> None:
        """A client's question: as the wait of an agent would have it."""
        courier = self.courier
        assert courier is not None
        courier.prepare(self.now)
        self.pushes.prepare()
        if question[:2] == _PUT:
            assert self.pushes.hear(number, question, self.now), "an honest client's put"
            self._end_courier()
            self.pump()
            return
        if question[:2] == _EXISTS:
            assert courier.lookups.hear(number, question, self.now), "an honest client's exists"
            self._end_courier()
            self.pump()
            return
        self._send_reads(courier.hear(number, question, self.now))
        self._end_courier()
        self.pump()

    def _send_reads(self, reads: list[tuple[int, bytes]]) -> None:
        self._follow_pool()
        for node, datagram in reads:
            self._send(node, datagram)

    def _courier_first(self, why: int) -> bool:
        assert self.courier is not None
        mine = self.courier.frames_came(why, self.now)
        self._end_courier()
        return mine

    def _end_courier(self) -> None:
        """Clients hear their answers, which the books have by then."""
        courier = self.courier
        assert courier is not None
        assert self.conveyors is not None
        if self.in_the_moment is not None and (courier.unbooked or self.pushes.untold):
            self._die_in_the_moment(courier, self.in_the_moment)
        self.conveyors.act()
        courier.book(self.now)
        self.pushes.book(self.now)
        self.push_side.act()
        self.pushes.book(self.now)
        for number, answer in courier.take_answers():
            told = self.courier_told[number]
            self.host.world.after(
                0.0,
                lambda told=told, answer=answer: self.when_running(lambda: told(answer)),  # type: ignore[misc]
            )

    def _die_in_the_moment(self, courier: Courier, kill: Callable[[], None]) -> None:
        """Compiled code has told clients of what no Python has heard yet."""
        self.in_the_moment = None
        world = self.host.world
        world.counts["kept.died_in_the_moment"] += 1
        copy = Ledger(memoryview(bytearray(self.host.ledger)))
        for put in put_lately(copy):
            world.counts["kept.put_in_the_moment"] += 1
            self.host.observer.acknowledged(self.host.number, *put.block)
        answers = courier.take_answers()
        kill()
        for number, answer in answers:
            world.counts["kept.told_in_the_moment"] += 1
            self.courier_told[number](answer)
        raise DiedError

    def _settled(self) -> None:
        self._end_courier()
        self.pump()

    def _follow_pool(self) -> None:
        pool = self.core.pool
        if pool is not self._pool and pool is not None:
            self._pool = pool
            if self.conveyors is not None:
                self.conveyors.follow()
                self.push_side.follow()
            if self.zones is not None:
                self.zones.follow()
            self._placement.know(pool.index_by_ip)
            local = self.host.options.endpoint
            self._wrap = {
                index: Encapsulation(
                    local, Endpoint(parse_mac(node.mac), parse_ip(node.ip), node.udp_port)
                )
                for index, node in pool.nodes.items()
            }

    def _digest_later(self, _now: float, blocks: list[memoryview], then: Digested) -> None:
        """As `kvcast.hostagent.digests` does, of blocks of any size and in any order; of the bytes
        that are there in the end."""

        def made() -> None:
            self.core.store.advance(self.now)
            for told in self.host.committing:
                told()
            digests_at_once(self.now, blocks, then)
            self.pump()

        longest_s = DIGESTS_TAKE_S if self._digesting.random() < 0.9 else DIGESTS_ARE_LATE_S
        self.host.world.after(
            self._digesting.uniform(0.0, longest_s), lambda: self.host.when_running(self, made)
        )

    def pump(self) -> None:
        """Send and call what the core wants sent and called; to be done after any event."""
        core = self.core
        if self.events <= 1:  # in an event within another, what the outer one has begun is not done
            core.requester.check()
            core.reads.check()
            if self.courier is not None:
                self.courier.check()
        if core.outbox.waits:
            if self.rdma is not None:
                self.rdma.take()
            self.bulk.dispatch()
        self._follow_pool()
        for node, frame in core.frames_to_send(self.now, SEND_ROUND):
            self._send(node, encode(frame))
        self._set_timer()

    def _send_jobs(self, jobs: int, count: int) -> None:
        """As the mover does."""
        for node, datagram in datagrams_of(jobs, count):
            self._send(node, datagram)

    def _send(self, node: int, datagram: bytes) -> None:
        wrap = self._wrap.get(node)
        if wrap is None:
            self.core.metrics.frames_addressee_left_total += 1
        else:
            self.core.metrics.frames_sent_total += 1
            self.host.send(wrap.wrap(datagram))

    def _set_timer(self) -> None:
        when = self.core.get_timer(self.now)
        if self.courier is not None:
            times = (
                *(when, self.courier.lookups.expire(self.now), self.courier.expire(self.now)),
                self.push_side.expire(),
            )
            self._send_reads(self.courier.reads_to_send())
            self._end_courier()
            when = min((each for each in times if each is not None), default=None)
        if when is not None:
            self._alarm.set(max(self.host.world_time(when), self.host.world.now) + 1e-7)

    def _wake(self) -> None:
        self.core.handle_timer(self.now)
        self.pump()

    # --- the control link -------------------------------------------------------------------

    def _act(self) -> None:
        """Do what the control link and the core want done."""
        host = self.host
        for attempt in self._control.attempts():
            host.world.at(
                host.world_time(attempt.when),
                lambda attempt=attempt: self.when_running(  # type: ignore[misc]
                    lambda: self._connect(attempt.connection)
                ),
            )
        self.pump()

    def _connect(self, connection: ControlConnection) -> None:
        connection.connecting(self.now)
        self._driver = StreamDriver(
            self.host.world,
            self,
            self.host.network.open_control(self.host),
            connection,
            opened=lambda: connection.connected(self.now),
            changed=self._act,
        )
        self._driver.flush()

    def _flush(self) -> None:
        """The core has something to say: it may be in the middle of an event."""
        self.host.world.after(
            0.0, lambda: self.when_running(lambda: self._driver.flush() if self._driver else None)
        )

    def _register_zone(self, queue_pair: int, key: int) -> None:
        """The controller is to know of a landing zone, or that there is none any more."""
        self._control.register_anew(
            msgspec.structs.replace(
                self._control.register, zone_queue_pair=queue_pair, zone_key=key
            )
        )

    def _registration(self) -> Register:
        options = self.host.options
        return Register(
            version=CONTROL_PROTOCOL_VERSION,
            node_id=options.node_id,
            incarnation=self.host.memory_lives,
            ip=options.ip,
            mac=options.mac,
            switch_port=options.number,
            udp_port=UDP_PORT,
            bulk_host=options.node_id,
            bulk_port=7000,
            arena_bytes=options.arena_bytes,
            mtu_bytes=options.mtu_bytes,
            rdma_port=0 if self.rdma is None else 7001,
            link_bits_per_s=options.link_bits_per_s,
        )
