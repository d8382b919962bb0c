"""The question: what does an incast cost on links that no laptop has?

A set-up of the simulated world: one home, N readers and a switch in virtual time. Owns: who stands
where, and the report of `kvcast bench incast-simulation`. Must not know: how the switch answers,
or how cores decide.

What is real: the requester and responder cores, every byte of every frame, the P4 program
(compiled by the switch's engine), the tables that the controller would write, and the switch's
ports with their rates and queues. What is simulated: time, the cables, and hosts whose processors
cost nothing. So the numbers are those of the protocol and the network, not of any machine: a bound
that hosts with RDMA come near and hosts with sockets do not. With `stall_ms` readers share
processors with others, and come late to what has arrived, by up to so much: then it shows how well
readers keep step that are held up again and again.

A host's card sends one frame after the other at the link's rate, and asks the home for more when
it is idle; a cable delays by LINK_DELAY_NS, a card that hands a frame over by CARD_DELAY_NS; the
switch itself takes no time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvcast.controller.core.node import Address
from kvcast.controller.core.program import COALESCE_LEASE_S, Settings, desired_state
from kvcast.controller.core.program import Host as SwitchHost
from kvcast.controller.core.reconcile import SwitchState, diff
from kvcast.p4 import profiles
from kvcast.protocol.messages import ethernet
from kvcast.protocol.messages.control import NamespaceInfo
from kvcast.protocol.messages.wire import BUCKETS, BlockId, decode, digest_of
from kvcast.protocol.requester import Fetched, Missed, Requester, RequesterConfig
from kvcast.protocol.responder import Responder, ResponderConfig
from kvcast.service import provenance
from kvcast.service.options import option, size
from kvcast.service.statistics import ratio, summary
from kvcast.simulation.card_host import CardHost
from kvcast.simulation.network import LinkOptions
from kvcast.simulation.switch import SimSwitch, product_program
from kvcast.simulation.world import Alarm, World
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.loop.runner import NativeLoop
from kvcast.switchsim.ports.port import Port, PortOptions
from kvcast.topologies.pool import PoolError
from kvcast.topologies.star import MAX_HOSTS, Star
from kvcast.workloads import content
from kvcast.workloads.generators import chain

LINK_DELAY_NS: Final = 500
"""Of each link and the transceivers at its ends: some 50 m."""
CARD_DELAY_NS: Final = 250
"""From a frame's arrival until the host's core has it; assumed, and it matters: without it, readers
of the same block come out a little further apart."""
QUEUE_FRAMES: Final = 4096
"""Depth of each port's queue: some 4.5 MB."""
LEASE_S: Final = COALESCE_LEASE_S
"""Of what waits in the switch: where links are slow, answers take longer than milliseconds."""
NAMESPACE: Final = 1
DEADLINE_S: Final = 60.0
_LINK_S: Final = LINK_DELAY_NS / 1e9
SOCKET_FRAMES: Final = 4096
"""What a host's socket keeps while the host waits for a processor; one more is dropped."""
STALLED_PART: Final = 0.2
READY_S: Final = 0.0015


@dataclass(frozen=True)
class SimulationOptions:
    """One simulated incast."""

    readers: int = option("nodes that read", default=8, parse=int)
    blocks: int = option("distinct blocks", default=1, parse=int, metavar="K")
    block_bytes: int = size("size of each block", default=2 << 20, flag="block-size")
    link_rate_bits_per_s: float = option(
        "speed of every link", default=100e9, parse=float, unit="bits/s", flag="link-rate"
    )
    loss: float = option(
        "probability of losing a frame at each port it crosses",
        default=0.0,
        parse=float,
        metavar="P",
    )
    spread_ns: int = option(
        "the readers start within so much of each other, at times that the seed draws; 2000 is "
        "about one round trip",
        default=2000,
        parse=int,
        unit="ns",
    )
    gather_ms: int = option("how long READs let the home gather", default=0, parse=int, unit="ms")
    stall_ms: float = option(
        "readers share processors: one time in five that a reader needs one, it waits for up to "
        "so long, else for up to 1.5 ms; 0: each has its own",
        default=0.0,
        parse=float,
        unit="ms",
    )
    seed: int = option("seeds starts, losses and keys", default=1, parse=int)

    def __post_init__(self) -> None:
        if not 1 <= self.readers < MAX_HOSTS:
            raise PoolError(f"{self.readers} readers: a star has room for 1 to {MAX_HOSTS - 1}")
        if self.blocks < 1 or not 1 <= self.block_bytes <= 256 << 20:
            raise PoolError("there is at least one block, of 1 byte to 256 MiB")
        if not 1e3 <= self.link_rate_bits_per_s <= 1e13:
            raise PoolError("a link has 1e3 to 1e13 bits a second")
        if not 0 <= self.loss < 1:
            raise PoolError(f"loss {self.loss} is no probability below 1")
        if not 0 <= self.gather_ms <= 255 or self.spread_ns < 0:
            raise PoolError("the gather time is 0 to 255 ms, and the spread is not negative")
        if self.stall_ms < 0:
            raise PoolError("a stall is not negative")


class Held:
    """A block of the home's."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.digest = digest_of(data)

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class Room:
    """Memory of a reader's for one block."""

    view: memoryview

    def abort(self) -> None:
        pass


class Switch:
    """The switch: program, tables, and the compiled loop with its ports, in the world's time.

    Whatever leaves a port takes a cable's delay to its host. So the loop may lag by as much, and is
    run once for all that came within that time: nobody hears of a frame too late.
    """

    def __init__(
        self,
        world: World,
        star: Star,
        options: SimulationOptions,
        *,
        plain: bool,
        homes: Sequence[Sequence[str]] | None = None,
        link_s: float = _LINK_S,
    ) -> None:
        homes = homes or [[star.hosts[0].node_id]] * BUCKETS
        self.hosts: dict[int, Callable[[bytes], None]] = {}
        """By port: who hears what leaves there."""
        self._world = world
        self._link_s = link_s
        self._alarm = Alarm(world, self._turn)
        # This holds the engine and writes its tables; frames pass through the loop's ports.
        self._tables = SimSwitch(world, CompiledSwitch, product_program(), 0.0)
        self._tables.push()
        for change in diff(SwitchState(), _tables_of(star, homes, enabled=not plain)).upserts:
            assert self._tables.make(change), change
        port_options = PortOptions(
            queue_depth=QUEUE_FRAMES,
            loss=options.loss,
            seed=options.seed,
            rate_bits_per_s=options.link_rate_bits_per_s,
        )
        ports: list[Port] = [Port(h.switch_port, port_options) for h in star.hosts]
        self._ports = ports
        self._loop = NativeLoop(ports, ring_bytes=64 << 20)
        engine = self._tables.engine
        assert isinstance(engine, CompiledSwitch)
        self._loop.use(engine.native_entry)

    def receive(self, port: int, frame: bytes) -> None:
        """A frame has come by `port`."""
        if not self._loop.inject(port, frame, round(self._world.now * 1e9)):
            raise PoolError("the simulation's ring is full")
        self._alarm.set(self._world.now + self._link_s)

    def _turn(self) -> None:
        for sent in self._loop.run_until(round(self._world.now * 1e9)):
            hear = functools.partial(self.hosts[sent.port], sent.frame)
            self._world.at(sent.time_ns / 1e9 + self._link_s + CARD_DELAY_NS / 1e9, hear)
        if any(self._loop.egress_backlog(port.number) for port in self._ports):
            self._alarm.set(self._world.now + self._link_s)

    @property
    def queue_drops(self) -> int:
        counts = [self._loop.read_counters(port.number) for port in self._ports]
        return sum(each["tx_queue_drops"] for each in counts)

    def close(self) -> None:
        self._loop.close()


def _tables_of(star: Star, homes: Sequence[Sequence[str]], *, enabled: bool) -> SwitchState:
    """What the controller would write; `homes`: the homes of every bucket."""
    hosts = [
        SwitchHost(h.node_id, Address(h.ip, h.mac, h.switch_port, h.udp_port, h.ip, 1))
        for h in star.hosts
    ]
    profile = profiles["v1model"]
    return desired_state(
        Settings(
            enabled=enabled,
            lease_ticks=max(1, round(LEASE_S * 1e6 / profile.tick_us)),
            heat_threshold=0xFFFFFFFF,
        ),
        hosts,
        homes,
        [NamespaceInfo(NAMESPACE, "bench", "incast", "1", "bytes")],
        [],
        [],
        {},
    )


class _Host(CardHost):
    """A node: the home, or a reader."""

    def __init__(self, run: _Incast, index: int, port: int) -> None:
        self._run = run
        self.begins_at = 0.0
        self._stalls = run.world.stream(f"stall/{index}")
        self._arrived: list[bytes] = []
        self._waits = False
        """For a processor."""
        super().__init__(
            run.world,
            index,
            run.endpoints,
            functools.partial(run.switch.receive, port),
            LinkOptions(_LINK_S, run.options.link_rate_bits_per_s, QUEUE_FRAMES),
            Requester(
                RequesterConfig(),
                allocate=lambda _block, size: Room(memoryview(bytearray(size))),
                rng=run.world.stream(str(index)),
            ),
            Responder(ResponderConfig(), lookup=self._lookup),
            functools.partial(run.ended, self),
        )
        run.switch.hosts[port] = self._receive

    def _lookup(self, block: BlockId) -> Held | None:
        return self._run.blocks.get(block) if self.index == 0 else None

    def begin(self) -> None:
        """Ask for every block."""
        now = self.begins_at = self._world.now
        for key in self._run.keys:
            self.requester.fetch(
                now,
                BlockId(NAMESPACE, key),
                (0,),
                deadline=now + DEADLINE_S,
                expect_size=self._run.options.block_bytes,
                gather_ms=self._run.options.gather_ms,
            )
        self.work()

    def _receive(self, data: bytes) -> None:
        if len(self._arrived) < SOCKET_FRAMES:
            self._arrived.append(data)
            self.turn()

    def turn(self) -> None:
        """Something is to be done: do it, as soon as there is a processor."""
        if not self._run.options.stall_ms or self.index == 0:
            self.work()
        elif not self._waits:
            self._waits = True
            self._world.at(self._world.now + self._stall_s(), self._have_processor)

    def _stall_s(self) -> float:
        longest_s = self._run.options.stall_ms / 1e3
        if self._stalls.random() < STALLED_PART:
            return self._stalls.uniform(0.0, longest_s)
        return self._stalls.uniform(0.0, min(longest_s, READY_S))

    def _have_processor(self) -> None:
        self._waits = False
        self.work()

    def _take_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for data in arrived:
            datagram = ethernet.unwrap(data)
            frame = decode(datagram.payload)
            source = self._run.index_by_ip[datagram.src.ip]
            core = self.responder if self.index == 0 else self.requester
            core.receive(self._world.now, source, frame)

    def work(self) -> None:
        # While a host waits for a processor, what is due waits too.
        self._take_arrived()
        super().work()


class _Incast:
    """One run: a star of one home (host 0) and its readers."""

    def __init__(self, options: SimulationOptions, readers: int, *, plain: bool) -> None:
        self.options = options
        self.world = World(options.seed)
        self.wrong_bytes = self.misses = self.gets = 0
        self.fetch_us: list[float] = []
        star = Star.of(readers + 1)
        self.endpoints = [
            ethernet.Endpoint(ethernet.parse_mac(h.mac), ethernet.parse_ip(h.ip), h.udp_port)
            for h in star.hosts
        ]
        self.index_by_ip = {e.ip: index for index, e in enumerate(self.endpoints)}
        self.keys = [
            chain(b"incast-simulation", (options.seed, number)) for number in range(options.blocks)
        ]
        self.blocks = {
            BlockId(NAMESPACE, key): Held(content.block_bytes(key, options.block_bytes))
            for key in self.keys
        }
        self.switch = Switch(self.world, star, options, plain=plain)
        self.hosts = [_Host(self, index, h.switch_port) for index, h in enumerate(star.hosts)]
        starts = self.world.stream("start")
        for host in self.hosts[1:]:
            late_ns = starts.randrange(options.spread_ns + 1) if options.spread_ns else 0
            self.world.at(late_ns / 1e9, host.begin)

    def ended(self, host: _Host, event: Fetched | Missed) -> None:
        self.gets += 1
        if isinstance(event, Missed):
            self.misses += 1
            return
        expected = self.blocks[event.block]
        self.wrong_bytes += content.wrong_bytes(event.block.key, len(expected.data), event.buffer)
        self.fetch_us.append((self.world.now - host.begins_at) * 1e6)

    def run(self) -> None:
        """Until nothing is left to happen."""
        try:
            self.world.run()
        finally:
            self.switch.close()
        wanted = (len(self.hosts) - 1) * self.options.blocks
        assert self.gets == wanted, f"{self.gets} of {wanted} fetches have ended"


@dataclass
class _Result:
    home_bytes: int
    queue_drops: int
    gets: int
    misses: int
    wrong_bytes: int
    took_s: float
    fetch_us: list[float] = field(default_factory=list)


def _run(options: SimulationOptions, readers: int, *, plain: bool) -> _Result:
    started = time.monotonic()
    sim = _Incast(options, readers, plain=plain)
    sim.run()
    return _Result(
        sim.hosts[0].responder.counters.payload_bytes,
        sim.switch.queue_drops,
        sim.gets,
        sim.misses,
        sim.wrong_bytes,
        time.monotonic() - started,
        sim.fetch_us,
    )


def run(options: SimulationOptions) -> dict[str, Any]:
    """Simulate the incast with one reader, through a plain switch, and through kvcast."""
    results = {
        "one_reader": _run(options, 1, plain=False),
        "plain": _run(options, options.readers, plain=True),
        "kvcast": _run(options, options.readers, plain=False),
    }
    distinct = options.blocks * options.block_bytes
    kvcast, plain, alone = results["kvcast"], results["plain"], results["one_reader"]
    slowest_alone = max(alone.fetch_us, default=0.0)
    return {
        "bench": "incast-simulation",
        "simulated": True,
        "home_egress_ratio": ratio(kvcast.home_bytes, distinct),
        "plain_home_egress_ratio": ratio(plain.home_bytes, distinct),
        "over_one_reader": {
            name: round(max(result.fetch_us) / slowest_alone, 4)
            for name, result in results.items()
            if result.fetch_us and slowest_alone and result is not alone
        },
        "gets": kvcast.gets,
        "misses": sum(result.misses for result in results.values()),
        "wrong_bytes": sum(result.wrong_bytes for result in results.values()),
        "fetch_us": {name: summary(r.fetch_us) for name, r in results.items()},
        "queue_drops": {name: r.queue_drops for name, r in results.items()},
        "real_s": {name: round(r.took_s, 2) for name, r in results.items()},
        "parameters": {
            "readers": options.readers,
            "blocks": options.blocks,
            "block_bytes": options.block_bytes,
            "link_rate_bits_per_s": options.link_rate_bits_per_s,
            "link_delay_ns": LINK_DELAY_NS,
            "loss": options.loss,
            "spread_ns": options.spread_ns,
            "gather_ms": options.gather_ms,
            "stall_ms": options.stall_ms,
            "seed": options.seed,
        },
        **provenance.provenance(),
    }
