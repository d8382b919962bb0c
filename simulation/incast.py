"""The question: what does an incast cost on links that no laptop has?

A simulation, in virtual time. Owns: the hosts' network cards, the clock, and the report of
`kvcast bench incast --simulate`. Must not know: how the switch answers, or how cores decide.

What is real: the requester and responder cores, every byte of every frame, the P4 program
(compiled by the switch's engine), the tables that the controller would write, and the switch's
ports with their rates and queues. What is simulated: time, the links' delay, and hosts whose
processors cost nothing. So the numbers are those of the protocol and the network, not of any
machine: a bound that hosts with RDMA come near and hosts with sockets do not.

A card sends one frame after the other, each for length x 8 / rate, and asks the home for more
when it is idle; a link delays by LINK_DELAY_NS; the switch itself takes no time.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from kvcast.controller.core.membership import Address
from kvcast.controller.core.program import Host as SwitchHost
from kvcast.controller.core.program import Settings, desired_state
from kvcast.p4 import artefact, profiles
from kvcast.protocol.messages import ethernet
from kvcast.protocol.messages.control import NamespaceInfo
from kvcast.protocol.messages.wire import BUCKETS, BlockId, Frame, decode, digest_of, encode
from kvcast.protocol.requester import Fetched, Missed, Requester, RequesterConfig
from kvcast.protocol.responder import Responder, ResponderConfig
from kvcast.service import provenance
from kvcast.switchsim import loader
from kvcast.switchsim.ir import Exact, Lpm
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.loop.runner import NativeLoop
from kvcast.switchsim.ports.ports import InProcessPort, Port, PortOptions
from kvcast.switchsim.reference.switch import Switch
from kvcast.topologies.pool import PoolError
from kvcast.topologies.star import MAX_HOSTS, Star
from kvcast.workloads import content
from kvcast.workloads.generators import chain

LINK_DELAY_NS: Final = 500
"""Of each link and the transceivers at its ends: some 50 m, and a step of the simulation."""
QUEUE_FRAMES: Final = 4096
"""Depth of each port's queue: some 4.5 MB."""
LEASE_S: Final = 0.01
NAMESPACE: Final = 1
DEADLINE_S: Final = 60.0
_CARD_FRAMES: Final = 8
"""What a card holds of the home's answers: enough to be never idle."""


@dataclass(frozen=True)
class SimulationOptions:
    """One simulated incast."""

    readers: int = 8
    blocks: int = 1
    block_bytes: int = 2 << 20
    link_rate_bits_per_s: float = 100e9
    loss: float = 0.0
    """Probability with which the switch loses a frame at each crossing of a port."""
    spread_ns: int = 2000
    """The readers start within so much of each other, at times that the seed draws."""
    gather_ms: int = 0
    seed: int = 1

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


class _Held:
    """A block of the home's."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.digest = digest_of(data)

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class _Room:
    """Memory of a reader's for one block."""

    view: memoryview

    def abort(self) -> None:
        pass


class _Host:
    """A node: its cores and its card."""

    def __init__(self, sim: _Simulation, index: int) -> None:
        self.sim = sim
        self.index = index
        self.card: deque[bytes] = deque()
        self.free_at_ns = 0
        self.wraps = {
            other: ethernet.Encapsulation(sim.endpoints[index], sim.endpoints[other])
            for other in range(len(sim.endpoints))
            if other != index
        }
        self.requester = Requester(
            RequesterConfig(),
            allocate=lambda _block, size: _Room(memoryview(bytearray(size))),
            rng=random.Random(f"{sim.options.seed}/{index}"),
        )
        self.responder = Responder(ResponderConfig(), lookup=self._lookup)

    def _lookup(self, block: BlockId) -> _Held | None:
        return self.sim.blocks.get(block) if self.index == 0 else None

    def receive(self, now_s: float, data: bytes) -> None:
        datagram = ethernet.unwrap(data)
        frame = decode(datagram.payload)
        source = self.sim.index_by_ip[datagram.src.ip]
        if self.index == 0:
            self.responder.receive(now_s, source, frame)
        else:
            self.requester.receive(now_s, source, frame)

    def timer_ns(self) -> int | None:
        """When this node has something to do that no frame causes."""
        now_s = self.sim.now_ns / 1e9
        times = [t for t in (self.requester.get_timer(), self.responder.get_timer(now_s)) if t]
        wanted = [round(t * 1e9) for t in times]
        if self.card:
            wanted.append(self.free_at_ns)
        return min(wanted, default=None)

    def work(self, until_ns: int) -> None:
        """Decide, and send what leaves the card by `until_ns`."""
        now_s = self.sim.now_ns / 1e9
        if (due := self.requester.get_timer()) is not None and due <= now_s:
            self.requester.handle_timer(now_s)
        self._load(self.requester.frames_to_send())
        while True:
            if len(self.card) < _CARD_FRAMES:
                self._load(self.responder.frames_to_send(now_s, _CARD_FRAMES))
            if not self.card or self.free_at_ns >= until_ns:
                break
            frame = self.card.popleft()
            start_ns = max(self.free_at_ns, self.sim.now_ns)
            self.free_at_ns = start_ns + self.sim.duration_ns(len(frame))
            self.sim.to_switch(self.index, self.free_at_ns + LINK_DELAY_NS, frame)
        while (event := self.requester.next_event()) is not None:
            if isinstance(event, Fetched | Missed):
                self.sim.ended(self, event)

    def _load(self, frames: list[tuple[int, Frame]]) -> None:
        self.card.extend(self.wraps[node].wrap(encode(frame)) for node, frame in frames)


class _Simulation:
    """One run: a star of one home (host 0) and its readers."""

    def __init__(self, options: SimulationOptions, readers: int, *, plain: bool) -> None:
        self.options = options
        self.now_ns = 0
        self.wrong_bytes = 0
        self.misses = 0
        self.gets = 0
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
            BlockId(NAMESPACE, key): _Held(content.block_bytes(key, options.block_bytes))
            for key in self.keys
        }
        self._arrivals: list[tuple[int, int, int, bytes]] = []
        self._departures: list[tuple[int, int, int, bytes]] = []
        self._sequence = 0
        self._ps_per_byte = 8e12 / options.link_rate_bits_per_s
        self._engine = CompiledSwitch()
        self._engine.load(loader.load(artefact("v1model").json.read_bytes(), "kvcast"))
        _program(self._engine, star, enabled=not plain)
        port_options = PortOptions(
            queue_depth=QUEUE_FRAMES,
            loss=options.loss,
            seed=options.seed,
            rate_bits_per_s=options.link_rate_bits_per_s,
        )
        ports: list[Port] = [InProcessPort(h.switch_port, port_options) for h in star.hosts]
        self._ports = ports
        self._loop = NativeLoop(ports, ring_bytes=64 << 20)
        self._loop.use(self._engine.native_entry)
        self._hosts = [_Host(self, index) for index in range(readers + 1)]
        rng = random.Random(f"{options.seed}/start")
        self._starts = {
            host: rng.randrange(options.spread_ns + 1) if options.spread_ns else 0
            for host in self._hosts[1:]
        }
        self._waiting = readers * options.blocks

    def duration_ns(self, length: int) -> int:
        return round(length * self._ps_per_byte / 1000)

    def to_switch(self, index: int, arrival_ns: int, frame: bytes) -> None:
        """A frame is on its way; it reaches the switch's port then."""
        self._sequence += 1
        heapq.heappush(self._departures, (arrival_ns, self._sequence, index, frame))

    def ended(self, host: _Host, event: Fetched | Missed) -> None:
        self._waiting -= 1
        self.gets += 1
        if isinstance(event, Missed):
            self.misses += 1
            return
        expected = self.blocks[event.block]
        self.wrong_bytes += content.wrong_bytes(event.block.key, len(expected.data), event.buffer)
        self.fetch_us.append((self.now_ns - self._starts[host]) / 1e3)

    def run(self) -> None:
        """Until every fetch has ended."""
        try:
            while self._waiting:
                self._step()
        finally:
            self._loop.close()

    def _step(self) -> None:
        """Advance to the next thing that happens, and by one link delay from there: within it
        nothing that a node sends can reach another."""
        self.now_ns = max(self.now_ns, self._next_ns())
        until_ns = self.now_ns + LINK_DELAY_NS
        for host in list(self._starts):
            if self._starts[host] <= self.now_ns and not host.requester.counters.fetches:
                self._start(host)
        while self._arrivals and self._arrivals[0][0] <= self.now_ns:
            _, _, index, frame = heapq.heappop(self._arrivals)
            self._hosts[index].receive(self.now_ns / 1e9, frame)
        for host in self._hosts:
            host.work(until_ns)
        while self._departures and self._departures[0][0] <= until_ns:
            arrival_ns, _, index, frame = heapq.heappop(self._departures)
            if not self._loop.inject(index + 1, frame, arrival_ns):
                raise PoolError("the simulation's ring is full")
        for emitted in self._loop.run_until(until_ns):
            self._sequence += 1
            at_ns = max(emitted.time_ns + LINK_DELAY_NS, until_ns)
            heapq.heappush(self._arrivals, (at_ns, self._sequence, emitted.port - 1, emitted.frame))
        self.now_ns = until_ns

    def _next_ns(self) -> int:
        times = [host.timer_ns() for host in self._hosts]
        times += [at for host, at in self._starts.items() if not host.requester.counters.fetches]
        times += [queue[0][0] for queue in (self._arrivals, self._departures) if queue]
        if any(self._loop.egress_backlog(port.number) for port in self._ports):
            times.append(self.now_ns)
        wanted = [at for at in times if at is not None]
        if not wanted:
            raise PoolError("the simulation stands still with fetches under way: a bug")
        return min(wanted)

    def _start(self, host: _Host) -> None:
        now_s = self.now_ns / 1e9
        for key in self.keys:
            host.requester.fetch(
                now_s,
                BlockId(NAMESPACE, key),
                (0,),
                deadline=now_s + DEADLINE_S,
                expect_size=self.options.block_bytes,
                gather_ms=self.options.gather_ms,
            )

    @property
    def home_bytes(self) -> int:
        return self._hosts[0].responder.counters.payload_bytes

    @property
    def queue_drops(self) -> int:
        counts = [self._loop.read_counters(port.number) for port in self._ports]
        return sum(each["tx_queue_drops"] for each in counts)


def _program(engine: Switch, star: Star, *, enabled: bool) -> None:
    """Write the tables that the controller would write; the first host owns every bucket."""
    hosts = [
        SwitchHost(h.node_id, Address(h.ip, h.mac, h.switch_port, h.udp_port, h.ip, 1))
        for h in star.hosts
    ]
    profile = profiles["v1model"]
    state = desired_state(
        Settings(
            enabled=enabled,
            lease_ticks=max(1, round(LEASE_S * 1e6 / profile.tick_us)),
            heat_threshold=0xFFFFFFFF,
            recirculate_rid=profile.recirculate_rid,
        ),
        hosts,
        [[hosts[0].node_id]] * BUCKETS,
        [NamespaceInfo(NAMESPACE, "bench", "incast", "1", "bytes")],
        [],
        [],
        {},
    )
    for group, replicas in state.groups.items():
        engine.set_multicast_group(group, sorted(replicas))
    tables = {name.split(".")[-1]: table for name, table in engine.tables.items()}
    for (name, match), call in state.entries.items():
        table = tables[name]
        action = next(a for a in table.action_names if a.split(".")[-1] == call.name)
        if not match:
            table.set_default(action, call.params)
        else:
            values = [Lpm(*v) if isinstance(v, tuple) else Exact(v) for v in match]
            table.add(values, 0, action, call.params)


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
    sim = _Simulation(options, readers, plain=plain)
    sim.run()
    return _Result(
        sim.home_bytes,
        sim.queue_drops,
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
        "home_egress_ratio": provenance.ratio(kvcast.home_bytes, distinct),
        "plain_home_egress_ratio": provenance.ratio(plain.home_bytes, distinct),
        "over_one_reader": {
            name: round(max(result.fetch_us) / slowest_alone, 4)
            for name, result in results.items()
            if result.fetch_us and slowest_alone and result is not alone
        },
        "gets": kvcast.gets,
        "misses": sum(result.misses for result in results.values()),
        "wrong_bytes": sum(result.wrong_bytes for result in results.values()),
        "fetch_us": {name: provenance.summary(r.fetch_us) for name, r in results.items()},
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
            "seed": options.seed,
        },
        **provenance.provenance(),
    }
