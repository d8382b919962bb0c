"""A simulated pool: hosts, a switch, controllers, the cables between them, and one run of a plan.

Owns: putting the parts together, and the phases of a run: form, calm, chaos, heal, and a last look
at everything. Must not know: how a fault is made (`faults.py`), or what is right (`model.py`).
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvcast.controller.core.admission import ValueOptions
from kvcast.controller.core.membership import DrainError
from kvcast.controller.core.namespaces import SecretMode, TenantRules
from kvcast.controller.core.pool import PoolOptions, SavedState
from kvcast.controller.core.program import L2_FORWARD, RDMA_TARGET, Settings
from kvcast.controller.core.replicas import ReplicaOptions
from kvcast.controller.core.tiers import AdmitMode
from kvcast.hostagent.core.agent import AgentOptions
from kvcast.hostagent.core.reads import ReadOptions
from kvcast.hostagent.core.sessions import rows_left
from kvcast.hostagent.core.writes import WriteOptions
from kvcast.hostagent.tiers.ledger import Ledger
from kvcast.protocol.messages.control import NamespaceInfo, PoolMap
from kvcast.protocol.messages.ethernet import parse_ip
from kvcast.protocol.messages.wire import BlockId, bucket_of, chunking_for
from kvcast.protocol.requester import RequesterConfig
from kvcast.protocol.responder import ResponderConfig
from kvcast.simulation.agent import CoreFactory, HostOptions, SimAgent, SimHost, agent_core
from kvcast.simulation.client import Client
from kvcast.simulation.controller import ControllerProcess, SimController
from kvcast.simulation.disk import SimDisk
from kvcast.simulation.held import Held
from kvcast.simulation.model import Model, Name, Rules, ViolationError
from kvcast.simulation.namespaces import Operator
from kvcast.simulation.network import Link, LinkOptions
from kvcast.simulation.objects import SimObjects
from kvcast.simulation.plan import (
    CALM_S,
    CHAOS_S,
    FINAL_S,
    NAMESPACES,
    OPEN,
    TENANTS,
    Fault,
    Op,
    Plan,
    PlanFault,
)
from kvcast.simulation.streams import Stream, StreamEnd
from kvcast.simulation.switch import EngineMaker, SimSwitch
from kvcast.simulation.verbs import Fabric
from kvcast.simulation.world import World
from kvcast.simulation.zones import POOL_ADDRESS
from kvcast.switchsim.ir import Program

LEASE_S: Final = 1.0
REBALANCE_S: Final = 0.5
TICK_S: Final = 0.25
LINK_BITS_PER_S: Final = 1_000_000
"""What hosts say that their links carry, in every other run: so little that they are loaded by
what clients read, and give out replicas."""
SLAB_BYTES: Final = 64 * 1024
FORM_S: Final = 4.0
"""By when a pool without faults must have formed."""
_NEWS_S: Final = 0.02
"""Within so long the controller knows what a node says."""
_GIVES_UP: Final = 0.1
"""How often a client gives a get up,"""
_GIVES_UP_WITHIN_S: Final = 0.2
"""after so long at most."""
HEAL_S: Final = 8.0
"""After the last fault: time-outs, leases, reconnections and restarts all fit into it."""


@dataclass(frozen=True)
class Product:
    """What is being tested, where a test plants a bug in it: the switch's program, the agents'
    cores, and what is done to a controller's options."""

    engine: EngineMaker
    program: Program
    make_core: CoreFactory = agent_core


Begin = Callable[["Cluster", Fault], Callable[[], None] | None]
"""Does the damage; gives what undoes it, to be called when the fault's time is over."""


@dataclass(frozen=True)
class FaultKind:
    """`plan`: which hosts, how much, and for how long; `begin`: see `Begin`. `disturbs`: whether
    it may cost more frames and copies than can be counted one by one."""

    plan: PlanFault
    begin: Begin
    disturbs: bool = True


class Hostile(Protocol):
    """A hostile host, where it may strike in time with others."""

    def strike(self, victim: int, names: list[Name]) -> None: ...


class Cluster:
    """One run; see the module's text."""

    def __init__(self, plan: Plan, product: Product, faults: dict[str, FaultKind]) -> None:
        self.plan = plan
        self._fault_kinds = faults
        self.world = World(plan.seed)
        self.spoilers: list[Callable[[bytes], bytes]] = []
        self.breakers: list[Callable[[frozenset[int]], bool]] = []
        """Whether a connection between these hosts breaks in the middle of a block."""
        self.objects = SimObjects(self.world.stream("objects")) if plan.cold else None
        """What lies below all hosts; None = there is no object store."""
        self.hosts: dict[int, SimHost] = {}
        self.links: dict[int, tuple[Link, Link]] = {}
        """By host: to the switch, from the switch."""
        self.hostiles: list[Hostile] = []
        self._streams_made = 0
        self._cuts: list[tuple[str, frozenset[int]]] = []
        self._streams: dict[Stream, tuple[str, frozenset[int]]] = {}
        self._clients: dict[int, Client] = {}
        self._held: dict[int, Held] = {}
        self._last_map: PoolMap | None = None
        self._not_handed_over: ViolationError | None = None
        """Found out in the middle of a controller's round, which is not to hear of it."""
        self.faults_on = 0
        self.faults_begun = 0
        self._severe_on = 0
        self._last_severe_at = -1e9
        count = len(plan.hosts)
        self.model = Model(
            self.world,
            Rules(
                rights=dict(plan.rights),
                ip_of_port={n: 0x0A4D0000 + n for n in range(1, 33)},
                lease_s=plan.coalesce_lease_s,
                pool_ip=parse_ip(POOL_ADDRESS),
            ),
        )
        self.operator = Operator(self.world, self.model, plan, self._controller_process)
        self.switch = SimSwitch(self.world, product.engine, product.program, plan.switch_clock_s)
        self.switch.observer = self.model
        self.model.enabled = lambda: self.switch.up and self.switch.enabled
        self.model.known_mac = lambda mac: (
            (L2_FORWARD, (int.from_bytes(mac, "big"),)) in self.switch.holds.entries
        )
        self.model.known_zone = lambda ip, queue_pair: (
            (RDMA_TARGET, (ip, queue_pair)) in self.switch.holds.entries
        )
        self.model.patience_s = self._patience_s
        fabric = Fabric(self.world)
        for number, host_plan in enumerate(plan.hosts, 1):
            options = HostOptions(
                number=number,
                arena_bytes=host_plan.arena_slabs * SLAB_BYTES,
                slab_bytes=SLAB_BYTES,
                clock_offset_s=host_plan.clock_offset_s,
                clock_rate=host_plan.clock_rate,
                agent=_agent_options(plan, f"node-{number}", host_plan.mtu_bytes),
                mtu_bytes=host_plan.mtu_bytes,
                link_bits_per_s=LINK_BITS_PER_S if plan.replicates else 0,
                shares_by_rdma=plan.zones,
                keeps="kept" in plan.features,
                digests_later="digests" in plan.features,
            )
            link = LinkOptions(mtu_bytes=host_plan.mtu_bytes)
            host = SimHost(self.world, options, self, self, product.make_core)
            up = Link(
                self.world,
                f"{number} to switch",
                functools.partial(self.switch.receive, number),
                self._lost,
                link,
            )
            down = Link(self.world, f"switch to {number}", host.receive, self._lost, link)
            host.uplink = up
            self.switch.ports[number] = down
            self.links[number] = (up, down)
            self.hosts[number] = host
            if number in plan.disks:
                host.disk = SimDisk(self.world.stream(f"disk/{number}"), f"disk of {number}")
            arenas = self.world.stream(f"arena/{number}")
            if "arenas" in plan.features and arenas.random() < 0.8:
                host.arena = SimDisk(arenas, f"arena of {number}")
            host.objects = self.objects
            if number in plan.cards:
                host.fabric = fabric
            if host_plan.clock_rate != 1.0:
                self.world.counts["fault.clock_skew"] += 1
        self.controllers = [
            SimController(
                self.world,
                f"controller-{n}",
                self.switch,
                _pool_options(plan),
                election_id=10 - n,
                tick_s=TICK_S,
                decided=self._decided,
                may_answer=self._may_answer,
            )
            for n in range(plan.controllers)
        ]
        for controller in self.controllers:
            controller.store.load()
            controller.store.save(_first_state(plan))
        self._limits = any(
            said.quota_bytes or said.ttl_s or said.policy == "value"
            for said in plan.settings.values()
        ) or bool(plan.disks or plan.cold or plan.features & {"operator", "arenas"})
        """Whether there is something in the settings that what hosts hold is judged by."""
        self._latecomers = {n for n in range(1, count + 1) if n > count - plan.latecomers}

    # --- what parts ask for -----------------------------------------------------------------

    def _lost(self, _link: Link, frame: bytes, _kind: str) -> None:
        self.model.lost(frame)

    def _patience_s(self, number: int, ip: int) -> float:
        process = self.hosts[number].process
        pool = process.core.pool if process is not None else None
        if process is None or pool is None or ip not in pool.index_by_ip:
            return 0.0
        return process.core.requester.rto_s(pool.index_by_ip[ip])

    def sent(self, host: int, frame: bytes) -> None:
        self.model.sent(host, frame)

    def frame_missed(self, host: int, frame: bytes) -> None:
        self.model.lost(frame)

    def zone_made(self, host: int, queue_pair: int) -> None:
        self.model.zone_made(host, queue_pair)

    def acknowledged(self, host: int, namespace: int, key: bytes) -> None:
        self.model.acknowledged(host, self.hosts[host].memory_lives, (namespace, key))

    def _decided(self, process: ControllerProcess, pool_map: PoolMap) -> None:
        if pool_map is self._last_map:
            return
        number = {node.index: int(node.node_id.removeprefix("node-")) for node in pool_map.nodes}
        buckets = list(map(tuple, pool_map.buckets))
        hosts = {nodes: [number[i] for i in nodes] for nodes in set(buckets)}  # few, of 1,024
        if process.loop.is_backup:
            for bucket, nodes in enumerate(buckets):
                for host in hosts[nodes]:
                    self.model.may_answer(bucket, host)
            return
        former, self._last_map = self._last_map, pool_map
        if former is not None and former.settled and not pool_map.settled and self._calm():
            self._check_handed_over(former, pool_map)
        self.model.homes_are([hosts[nodes] for nodes in buckets])
        self.operator.decided(process, pool_map)

    def _may_answer(self, guarded: frozenset[tuple[int, str]]) -> None:
        for bucket, node_id in guarded:
            self.model.may_answer(bucket, int(node_id.removeprefix("node-")))
        self.world.counts["replicas"] += len(guarded)

    def _check_handed_over(self, former: PoolMap, pool_map: PoolMap) -> None:
        """Who takes a bucket over has every block that those before it hold, and have
        acknowledged, but for what it has evicted, or what they acknowledged just now: the
        controller has not heard of it, and it is being sent."""
        if {n.node_id for n in former.nodes} != {n.node_id for n in pool_map.nodes}:
            return
        number = {node.index: int(node.node_id.removeprefix("node-")) for node in pool_map.nodes}
        self.world.counts["handed_over"] += 1
        for block in self.plan.all_blocks:
            name = self._present(block.name)
            bucket = bucket_of(name[1])
            before = [number[i] for i in former.buckets[bucket][: former.settled]]
            now = [number[i] for i in pool_map.buckets[bucket]]
            holders = self.model.holders(name)
            held = [n for n in before if self._holds(n, name)]
            if not any(holders.get(n) == self.hosts[n].memory_lives for n in held):
                continue
            if self.world.now - self.model.acknowledged_at(name) < _NEWS_S:
                continue
            excused = any(self._has_evicted(n, name) for n in now)
            if now and not excused and not any(self._holds(n, name) for n in now):
                self._not_handed_over = self._not_handed_over or ViolationError(
                    3, f"hosts {now} took over a bucket without a block that {held} hold"
                )

    def _present(self, name: Name) -> Name:
        """A block of the plan, as it is named at present."""
        return (self.operator.number_of(name[0]), name[1]) if self.operator.acts else name

    def _before(self, name: Name) -> tuple[bytes, int]:
        return self.plan.before((self.operator.planned(name[0]), name[1]))

    def _controller_process(self) -> ControllerProcess | None:
        controller = self.primary_controller()
        return None if controller is None else controller.process

    def _holds(self, number: int, name: Name) -> bool:
        """Whether a host has a block in its own memory or on its own disk: what lies in the object
        store is everybody's, and is not handed over."""
        process = self.hosts[number].process
        if process is None:
            return False
        store, block = process.core.store, BlockId(*name)
        return store.peek(block) is not None or store.below.holds(block)

    def _has_evicted(self, number: int, name: Name) -> bool:
        process = self.hosts[number].process
        if process is None:
            return True
        store = process.core.store
        # What a block takes along, when it is dropped, is gone as well, and says no reason.
        gone = store.counters.evictions + store.counters.orphaned
        return gone > 0 or bool(store.why_gone(BlockId(*name)))

    def drain(self, node_id: str) -> Callable[[], None] | None:
        """An operator drains a node; gives what undoes it. None: it cannot be."""
        controller = self.primary_controller()
        if controller is None or controller.process is None:
            return None
        try:
            controller.process.drain(node_id)
        except DrainError:
            return None

        def end(tries: int = 200) -> None:
            now = self.primary_controller()
            if now is not None and now.process is not None:
                with contextlib.suppress(DrainError):
                    now.process.undrain(node_id)
                    return
            if tries:  # nobody answers operators now, or who does has not heard of the node yet
                self.world.after(0.1, lambda: end(tries - 1))

        return end

    def open_control(self, host: SimHost) -> StreamEnd:
        """An agent's connection to a controller: the primary's, or whoever listens."""

        def listen(end: StreamEnd) -> bool:
            controller = self.primary_controller()
            if controller is None or controller.process is None:
                return False
            controller.process.accept(end)
            return True

        return self._stream("control", frozenset({host.number})).connect(listen)

    def open_bulk(self, host: SimHost, to: str) -> StreamEnd:
        """A connection to another agent's bulk port."""
        other = self.hosts[int(to.removeprefix("node-"))]

        def listen(end: StreamEnd) -> bool:
            return other.process is not None and other.process.bulk.accept(end)

        return self._stream("bulk", frozenset({host.number, other.number})).connect(listen)

    def open_rdma(self, host: SimHost, to: str) -> StreamEnd:
        """A connection to the port of another agent's RDMA link; cut where TCP is."""
        other = self.hosts[int(to.removeprefix("node-"))]

        def listen(end: StreamEnd) -> bool:
            rdma = other.process.rdma if other.process is not None else None
            return rdma is not None and rdma.accept(end)

        return self._stream("bulk", frozenset({host.number, other.number})).connect(listen)

    def _stream(self, kind: str, between: frozenset[int]) -> Stream:
        self._streams_made += 1
        stream = Stream(self.world, f"stream/{self._streams_made}")
        if kind == "bulk":
            stream.spoil = lambda data: self._spoil(stream, between, data)
        for old in [s for s in self._streams if not s.open]:
            del self._streams[old]
        self._streams[stream] = (kind, between)
        if (kind, between) in self._cuts:
            stream.block()
        return stream

    def _spoil(self, stream: Stream, between: frozenset[int], data: bytes) -> bytes:
        """What becomes of some of a block's bytes."""
        if any(breaks(between) for breaks in self.breakers):
            stream.break_off()
        for spoiler in self.spoilers:
            data = spoiler(data)
        return data

    # --- what faults ask for ----------------------------------------------------------------

    def cut(self, kind: str, between: frozenset[int]) -> Callable[[], None]:
        """Nothing passes between these on streams of this kind, until what is returned is
        called."""
        cut = (kind, between)
        self._cuts.append(cut)
        for stream, what in list(self._streams.items()):
            if what == cut and stream.open:
                stream.block()

        def heal() -> None:
            self._cuts.remove(cut)
            if cut not in self._cuts:
                for stream, what in list(self._streams.items()):
                    if what == cut and stream.open:
                        stream.unblock()

        return heal

    def primary_controller(self) -> SimController | None:
        """The live controller that may write to the switch, else any that lives."""
        alive = [c for c in self.controllers if c.process is not None]
        primary = [c for c in alive if c.process is not None and c.process.switch.primary]
        return next(iter(primary or alive), None)

    def running(self) -> list[SimHost]:
        """Hosts with an agent."""
        return [host for host in self.hosts.values() if host.process is not None]

    def crash_host(self, number: int, *, machine: bool, clients_outlive: bool = False) -> None:
        """The agent's process is killed, or the machine dies, and its clients' connections with
        it, unless they may outlive it."""
        self._held.pop(number, None)
        host, client = self.hosts[number], self._clients.get(number)
        if client is not None and clients_outlive and client.keeps and host.kept_map is not None:
            client.outlives = True
        elif client is not None:
            del self._clients[number]
            self.model.voided(number)
            client.closed = True  # nobody is left to tidy up after it
            host.survivors.pop(client.number, None)
        host.crash(machine=machine)

    def is_asked(self, number: int) -> bool:
        """Whether the host's client waits for an answer."""
        client = self._clients.get(number)
        return client is not None and client.asks

    def start_host(self, number: int) -> None:
        """Start the agent, and a client beside it."""
        host = self.hosts[number]
        if host.process is None:
            process = host.start()
            client = self._clients.get(number)
            if client is None:
                self._clients[number] = self._new_client(process)
            else:
                wait_s = process.rng.choice((0.0, 0.005, process.rng.uniform(0.0, 0.5)))
                self.world.after(
                    wait_s, lambda: host.when_running(process, lambda: client.resume(process))
                )
            if self._limits:
                self._held[number] = Held(process)

    def _new_client(self, process: SimAgent) -> Client:
        return Client(process, self.model, self._owed, self._before, self.operator)

    def put(self, number: int, namespace: int, key: bytes, content: bytes) -> bool:
        """A client of that host puts a block; whether there is one."""
        client = self._clients.get(number)
        if client is None or client.closed:
            return False
        self.hosts[number].when_running(client.agent, lambda: client.put((namespace, key), content))
        return not client.agent.dead

    def foreign_block(self, number: int) -> BlockId:
        """A block of nobody's, for whoever only wants its room."""
        return BlockId(OPEN, b"room" + number.to_bytes(12, "big"))

    # --- what is owed -----------------------------------------------------------------------

    def _calm(self) -> bool:
        """Whether nothing is wrong that could keep a patient get from its block."""
        return self._severe_on == 0 and self.world.now - self._last_severe_at > HEAL_S - 1.0

    def _owed(self, reader: int, name: Name) -> frozenset[tuple[int, int]]:
        """See `client.Owed`: the copies at homes that acknowledged the block, hold it
        and are homes of it still; nothing in times when anything may be wrong."""
        if not self._calm() or not self.model.may_use(reader, name[0]):
            return frozenset()
        holders = self.model.holders(name)
        copies = set()
        for number in self.model.homes_of(name):
            host = self.hosts[number]
            if host.process is None or holders.get(number) != host.memory_lives:
                continue
            copy = host.process.core.store.peek(BlockId(*name))
            if copy is not None:
                # A copy's place in its store's order of commits would do; its place in the arena
                # and length tell two copies of one block apart just as well.
                copies.add((number, copy.offset << 32 | copy.digest & 0xFFFFFFFF))
        return frozenset(copies)

    # --- a run ------------------------------------------------------------------------------

    def run(self) -> None:
        """All phases; ViolationError at the first thing that must not be."""
        self._form()
        began = self.world.now
        self._schedule(0, began)
        self._step_to(began + CALM_S)
        chaos = began + CALM_S
        self._schedule(1, chaos)
        for number in sorted(self._latecomers):
            when = chaos + self.world.stream(f"latecomer/{number}").uniform(0.1, CHAOS_S)
            self.world.at(when, functools.partial(self._comes_late, number))
        for fault in self.plan.faults:
            self.world.at(chaos + fault.at, functools.partial(self._fault_begins, fault))
        self._step_to(chaos + CHAOS_S)
        while self.faults_on:
            self._step_to(self.world.now + 0.1)
        eventful = self.plan.faults or self._latecomers
        self._step_to(self.world.now + (HEAL_S if eventful else 1.0))
        final = self.world.now
        self._schedule(2, final)
        self._step_to(final + FINAL_S)
        self._look_at_all()
        self._check_at_rest()

    def _step_to(self, until: float) -> None:
        """Run, and look at the clock's invariants often."""
        while self.world.now < until:
            self.world.run(min(until, self.world.now + 0.05))
            if self._not_handed_over is not None:
                raise self._not_handed_over
            self.model.check_clock()
            for held in self._held.values():
                held.look()

    def _form(self) -> None:
        for controller in self.controllers:
            controller.start()
        for number in self.hosts:
            if number not in self._latecomers:
                self.start_host(number)
        while not self._formed():
            self._step_to(self.world.now + 0.05)
            if self.world.now > FORM_S:
                raise ViolationError(2, f"the pool has not formed within {FORM_S} s")
        self._step_to(self.world.now + 0.1)
        self.model.all_is_well()

    def _formed(self) -> bool:
        running = self.running()
        for host in running:
            pool = host.process.core.pool if host.process is not None else None
            if pool is None or len(pool.nodes) < len(running):
                return False
            if any(not homes for homes in pool._buckets):
                return False
        return bool(self.switch.holds.entries) and (self.plan.plain or self.switch.enabled)

    def _comes_late(self, number: int) -> None:
        """A host joins, and takes buckets from others whose blocks it has not got."""
        self._last_severe_at = self.world.now
        self.model.disturbed()
        self.start_host(number)

    # --- faults -----------------------------------------------------------------------------

    def _fault_begins(self, fault: Fault) -> None:
        kind = self._fault_kinds[fault.kind]
        end = kind.begin(self, fault)
        if end is None and fault.kind != "host_gone":
            return  # nobody there to be hit
        if not fault.kind.startswith("hostile") and kind.disturbs:
            self.world.counts[f"fault.{fault.kind}"] += fault.kind != "bulk_corruption"
        self.world.note(255, f"{fault.number} {fault.kind}".encode())
        if kind.disturbs:
            self.model.disturbed()
        self.faults_on += 1
        self.faults_begun += 1
        self._severe_on += not fault.mild
        self.world.after(fault.for_s, lambda: self._fault_ends(fault, end))

    def _fault_ends(self, fault: Fault, end: Callable[[], None] | None) -> None:
        if end is not None:
            end()
        if self._fault_kinds[fault.kind].disturbs:
            self.model.disturbed()
        self.faults_on -= 1
        if not fault.mild:
            self._severe_on -= 1
            self._last_severe_at = self.world.now

    # --- what clients do --------------------------------------------------------------------

    def _schedule(self, phase: int, start: float) -> None:
        for op in self.plan.ops:
            if op.phase == phase:
                self.world.at(start + op.at, functools.partial(self._do, op))

    def _do(self, op: Op) -> None:
        rng = self.world.stream(f"op/{op.number}")
        if op.kind == "group_get":
            self._group_get(op)
            return
        for host in op.hosts:
            delay = rng.uniform(0.0, op.spread_s) if op.spread_s else 0.0
            self.world.after(delay, functools.partial(self._do_at, op, host))

    def _do_at(self, op: Op, number: int, group: int = 0, expect: bool = False) -> None:
        client = self._clients.get(number)
        if client is None:
            return
        host = self.hosts[number]
        all_blocks = self.plan.all_blocks
        blocks = [all_blocks[n] for n in op.blocks]

        def act() -> None:
            if client.closed:
                return
            names = [client.known(block.name) for block in blocks]
            match op.kind:
                case "get" | "group_get":
                    for hostile in self.hostiles:
                        hostile.strike(number, names)
                    client.get(
                        names,
                        op.deadline_s,
                        hold_s=op.hold_s,
                        gather_ms=op.gather_ms,
                        group=group,
                        expect=expect,
                        gives_up_s=self._gives_up_s(op, number),
                        then=functools.partial(self._shed, number) if op.sheds else None,
                    )
                case "put":
                    client.put(names[0], self.operator.copy_of(blocks[0], op.copy))
                case "put_many":
                    copies = [self.operator.copy_of(each, op.copy) for each in blocks]
                    client.put_many(names, copies, op.ack)
                    if op.leaves_after_s is not None:
                        self.world.after(op.leaves_after_s, lambda: self._leave(number, client))
                case "half_put":
                    content = self.operator.copy_of(blocks[0], op.copy)
                    client.put(names[0], content, give_up=True)
                case "exists":
                    of_it = blocks[0].name[0]
                    client.exists(
                        [client.known(b.name) for b in self.plan.blocks if b.name[0] == of_it]
                    )
                case "prefetch":
                    client.prefetch(names, op.deadline_s)
                case "drop":
                    client.drop(names[0])
                case _:
                    assert op.kind == "leave_open", op.kind
                    self._leave(number, client)

        host.when_running(client.agent, act)

    def _leave(self, number: int, client: Client) -> None:
        """A client goes without a word, its agent finds what it held; and another comes."""

        def leave() -> None:
            if client.closed:
                return
            client.close()
            self.model.voided(number)
            self._clients[number] = self._new_client(client.agent)

        self.hosts[number].when_running(client.agent, leave)

    def _gives_up_s(self, op: Op, number: int) -> float | None:
        """After how long a client waits no more for this get, if it does not wait to the end."""
        rng = self.world.stream(f"gives up/{op.number}/{number}")
        return rng.uniform(0.0, _GIVES_UP_WITHIN_S) if rng.random() < _GIVES_UP else None

    def _group_get(self, op: Op) -> None:
        """One of a reader group asks; the others are told to expect the blocks. Or they find each
        other, and all ask."""
        namespace, _ = self._present(self.plan.blocks[op.blocks[0]].name)
        if op.blocks[0] % 2:
            for host in op.hosts:
                if host in self._clients:
                    self._get_in_company(op, host, namespace)
            return
        first = op.hosts[0]
        client = self._clients.get(first)
        if client is None:
            return

        def found(group: int) -> None:
            for host in op.hosts:
                self._do_at(op, host, group, expect=host != first)

        names = [f"node-{n}" for n in sorted(op.hosts)]
        self.hosts[first].when_running(
            client.agent, lambda: client.find_group(namespace, names, found)
        )

    def _get_in_company(self, op: Op, host: int, namespace: int) -> None:
        client = self._clients[host]
        self.hosts[host].when_running(
            client.agent,
            lambda: client.find_group(
                namespace, [], lambda group: self._do_at(op, host, group), at=op.blocks[0]
            ),
        )

    def _shed(self, number: int, name: Name, _got: bool) -> None:
        """A host that is no home forgets the block, as if its arena had been wanted for others."""
        process = self.hosts[number].process
        block = BlockId(*name)
        pool = process.core.pool if process is not None else None
        if process is not None and pool is not None and not pool.is_home(block):
            process.core.store.drop(block)

    # --- the last look ----------------------------------------------------------------------

    def _look_at_all(self) -> None:
        """Every block that somebody must have is read by two hosts; every host can put."""
        rng = self.world.stream("last look")
        while self._busy():
            self._step_to(self.world.now + 0.1)
        for block in (*self.plan.blocks, *self.plan.later):
            name = self._present(block.name)
            self._count_strays(name)
            users = [h for h in self._clients if self.model.may_use(h, name[0])]
            for number in rng.sample(users, min(2, len(users))):
                self._clients[number].get([name], 6.0, hold_s=0.0)
        self._look_at_more(rng)
        refused: list[str] = []
        for number, client in self._clients.items():
            name = (self._present((OPEN, b""))[0], rng.randbytes(16))
            client.put(
                name,
                rng.randbytes(100),
                then=functools.partial(self._note_refusal, refused, number),
            )
        self._step_to(self.world.now + 0.5)
        while self._busy():
            self._step_to(self.world.now + 0.1)
        if refused and self._calm():
            raise ViolationError(2, f"nothing is wrong, and a put was refused: {refused[0]}")
        self._step_to(self.world.now + 0.5)

    def _look_at_more(self, rng: random.Random) -> None:
        """The same of what was put with others, all of a namespace by one get."""
        for namespace in dict.fromkeys(block.name[0] for block in self.plan.more):
            names = [self._present(b.name) for b in self.plan.more if b.name[0] == namespace]
            users = [h for h in self._clients if self.model.may_use(h, namespace)]
            for number in rng.sample(users, min(2, len(users))):
                self._clients[number].get(names, 6.0, hold_s=0.0)

    def _count_strays(self, name: Name) -> None:
        """Count a block that somebody who acknowledged it still holds, but no home of today."""
        holders = self.model.holders(name)
        keep = [
            host.number
            for host in self.running()
            if holders.get(host.number) == host.memory_lives
            and host.process is not None
            and host.process.core.store.peek(BlockId(*name)) is not None
        ]
        if keep and not set(keep) & set(self.model.homes_of(name)):
            self.world.counts["strays"] += 1

    def _note_refusal(self, refused: list[str], number: int, status: str) -> None:
        accepted = ["ok", "no_room", "busy"]  # an arena may be full of what is being read
        if self.operator.acts:
            accepted += ["quota", "unknown_namespace"]
        if status not in accepted:
            refused.append(f"{status} at host {number}")

    def _busy(self) -> bool:
        return self.model.under_way > 0

    def _check_at_rest(self) -> None:
        """Nothing is held that nobody holds."""
        while self._busy():  # a reader group may have been found only now, and read
            self._step_to(self.world.now + 0.1)
        for client in self._clients.values():
            client.close()
        self._step_to(self.world.now + 4.0)
        for host in self.running():
            assert host.process is not None
            core = host.process.core
            if host.process.courier is not None:
                host.process.courier.give_room_back()
            core.store.check()
            if core.store.counters.policy_faults:
                raise ViolationError(0, f"agent {host.number}: a policy chose what could not go")
            if host.process.zones is not None:
                host.process.zones.check()
            for side in (host.process.arena, host.process.disk):
                if side is not None:
                    side.check()
            if host.process.cold is not None and host.process.cold.under_way:
                raise ViolationError(0, f"agent {host.number}: errands to the object store wait")
            where = f"agent {host.number} at rest:"
            if core.ledger is not None and (left := rows_left(Ledger(host.ledger))):
                raise ViolationError(0, f"{where} the ledger has {left}")
            pinned = [c for c in core.store._by_offset.values() if c.pins or c.state == 0]
            for what, there in (
                ("copies pinned or reserved", pinned),
                ("fetches", core.requester.fetches_in_flight),
                ("segments in flight", core.requester.segments_in_flight),
                ("answers waiting", core.responder.segments_waiting),
                ("gets waiting", core.reads.waiting),
                ("replications waiting", core.writes.replications),
            ):
                if there:
                    raise ViolationError(0, f"{where} {what}: {there}")
        for controller in self.controllers:
            if controller.process is not None:
                controller.process.pool.membership.check()
                controller.process.pool.tiers.residency.check()


def _agent_options(plan: Plan, node_id: str, mtu_bytes: int) -> AgentOptions:
    return AgentOptions(
        node_id,
        requester=RequesterConfig(max_block_bytes=192 * 1024),
        responder=ResponderConfig(
            rate_frames_per_s=5000.0 if plan.paced else 0.0,
            burst_frames=16,
            max_chunk_bytes=chunking_for(mtu_bytes).chunk_bytes,
        ),
        reads=ReadOptions(keep_timeout_s=1.0),
        writes=WriteOptions(
            put_ack="local" if plan.put_ack_local else "home", replicate_timeout_s=1.5
        ),
        lone_reads_by_tcp=plan.lone_reads_by_tcp,
        bulk_link_bits_per_s=plan.bulk_link_bits_per_s,
    )


def _pool_options(plan: Plan) -> PoolOptions:
    return PoolOptions(
        settings=Settings(
            enabled=not plan.plain,
            lease_ticks=round(plan.coalesce_lease_s * 1e6 / 64),
            heat_threshold=plan.heat_threshold,
            rdma_address=POOL_ADDRESS if plan.zones else None,
        ),
        slots=plan.slots,
        read_padding_bytes=0,
        read_lease_s=plan.coalesce_lease_s,
        lease_s=LEASE_S,
        rebalance_after_s=REBALANCE_S,
        replicas=plan.replicas,
        admit=AdmitMode.AUTO if plan.admit else AdmitMode.OFF,
        value=ValueOptions(
            half_life_s=1.0, horizon_s=2.0, min_reads=0.5, displace_reads=1.0, min_stay_s=0.3
        ),
        drain_s=0.05,
        refresh_s=1.0,
        port_sets=4,
        hot=ReplicaOptions(
            high_load=0.3,
            low_load=0.1,
            aim_load=0.2,
            half_life_s=0.5,
            settle_s=0.5,
            calm_s=1.0,
            rest_s=0.3,
            period_s=0.25,
            refresh_s=1.0,
        ),
        tenants=_tenant_rules(plan),
    )


def _tenant_rules(plan: Plan) -> TenantRules:
    """What an operator has configured: who there is, and which nodes are for whom."""
    users = {
        TENANTS[NAMESPACES.index(namespace)]: frozenset(
            () if namespace == OPEN else (f"node-{n}" for n in hosts)
        )
        for namespace, hosts in plan.rights.items()
    }
    return TenantRules(users, SecretMode.NEVER)


def _first_state(plan: Plan) -> SavedState:
    """What an operator has set up: the namespaces, and who may use them."""
    return SavedState(
        namespaces=tuple(
            NamespaceInfo(
                namespace,
                TENANTS[NAMESPACES.index(namespace)],
                "model",
                "1",
                "layout",
                [] if namespace == OPEN else [f"node-{n}" for n in sorted(hosts)],
                settings=plan.settings[namespace],
            )
            for namespace, hosts in sorted(plan.rights.items())
        )
    )
