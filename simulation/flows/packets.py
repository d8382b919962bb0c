"""The packet-level pool that the flow simulator is compared with, in virtual time.

A set-up of the simulated world like `simulation.incast`, but for any demand: every host is a home
and a reader. Owns: who asks whom for what when, and what is counted. Must not know: the flow
simulator's model.

Real are the requester and responder cores, every byte of every frame, the P4 program, the tables
that the controller would write, and the switch's ports, rates and queues. Simulated are time,
cables, and processors, which cost nothing. Blocks lie at their homes from the beginning: puts, and
what readers pass on, are not played. `simulation.incast` says what a cable and a card take.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from kvcast.protocol.messages import ethernet
from kvcast.protocol.messages.wire import BUCKETS, OP_READ, BlockId, decode
from kvcast.protocol.requester import Fetched, Missed, Requester, RequesterConfig
from kvcast.protocol.responder import Responder, ResponderConfig
from kvcast.simulation.card_host import CardHost
from kvcast.simulation.flows.demand import Demand
from kvcast.simulation.flows.networks import Ints
from kvcast.simulation.incast import (
    LINK_DELAY_NS,
    NAMESPACE,
    QUEUE_FRAMES,
    Held,
    Room,
    SimulationOptions,
    Switch,
)
from kvcast.simulation.network import LinkOptions
from kvcast.simulation.world import World
from kvcast.topologies.pool import DATA_FRAME_BYTES
from kvcast.topologies.star import Star
from kvcast.workloads import content

_DEADLINE_S = 600.0


@dataclass
class PacketOutcome:
    """What was counted: payload that homes sent, and `fetch_ns` by (request, node), in their order;
    the order is that of the flow simulator's `Outcome`."""

    home_payload_bytes: int
    fetch_ns: Ints
    misses: int
    wrong_bytes: int
    queue_drops: int
    switch_passes: int = 0
    fetches: list[tuple[int, int]] = field(default_factory=list)


class _Node(CardHost):
    """A host of a replay."""

    def __init__(self, run: _Replay, index: int, port: int) -> None:
        self._run = run
        super().__init__(
            run.world,
            index,
            run.endpoints,
            functools.partial(run.switch.receive, port),
            LinkOptions(run.link_s, run.options.link_rate_bits_per_s, QUEUE_FRAMES),
            Requester(
                run.requester,
                allocate=lambda _block, size: Room(memoryview(bytearray(size))),
                rng=run.world.stream(str(index)),
            ),
            Responder(run.responder, lookup=run.held[index].get),
            functools.partial(run.ended, index),
        )
        run.switch.hosts[port] = self._receive

    def fetch(self, block: BlockId, home: int, size: int, gather_ms: int) -> None:
        now = self._world.now
        self.requester.fetch(
            now,
            block,
            (home,),
            deadline=now + _DEADLINE_S,
            expect_size=size,
            gather_ms=gather_ms,
        )

    def _receive(self, data: bytes) -> None:
        datagram = ethernet.unwrap(data)
        frame = decode(datagram.payload)
        source = self._run.index_by_ip[datagram.src.ip]
        core = self.responder if frame.op == OP_READ else self.requester
        core.receive(self._world.now, source, frame)
        self.work()


class _Replay:
    """One run of a demand."""

    def __init__(
        self,
        demand: Demand,
        bits_per_s: float,
        requester: RequesterConfig,
        responder: ResponderConfig,
        *,
        link_delay_ns: int,
        plain: bool,
        seed: int,
    ) -> None:
        self.demand, self.requester, self.plain = demand, requester, plain
        self.responder, self.link_s = responder, link_delay_ns / 1e9
        self.options = SimulationOptions(link_rate_bits_per_s=bits_per_s, seed=seed)
        self.world = World(seed)
        star = Star.of(demand.nodes)
        self.endpoints = [
            ethernet.Endpoint(ethernet.parse_mac(h.mac), ethernet.parse_ip(h.ip), h.udp_port)
            for h in star.hosts
        ]
        self.index_by_ip = {e.ip: index for index, e in enumerate(self.endpoints)}
        self.blocks: dict[int, BlockId] = {}
        self.held: list[dict[BlockId, Held]] = [{} for _ in star.hosts]
        for block, home in set(
            zip(demand.read_block.tolist(), demand.read_home.tolist(), strict=True)
        ):
            key = _key(block, home, demand.nodes)
            self.blocks[block] = BlockId(NAMESPACE, key)
            size = int(demand.block_bytes[block])
            self.held[home][self.blocks[block]] = Held(content.block_bytes(key, size))
        self.number_of = {name: number for number, name in self.blocks.items()}
        self.switch = Switch(
            self.world,
            star,
            self.options,
            plain=plain,
            homes=[[star.hosts[bucket % demand.nodes].node_id] for bucket in range(BUCKETS)],
            link_s=self.link_s,
        )
        self.nodes = [_Node(self, index, h.switch_port) for index, h in enumerate(star.hosts)]
        self.misses = self.wrong_bytes = 0
        self.waiting: dict[tuple[int, int], list[int]] = {}
        """(node, block) to the gets that want it."""
        self.left: Counter[int] = Counter()
        """Reads of each request that have not ended."""
        self.left_of_get: Counter[tuple[int, int]] = Counter()
        self.began: dict[int, float] = {}
        self.took: dict[tuple[int, int], float] = {}
        self.arrived: set[tuple[int, int]] = set()
        self.after: dict[int, list[int]] = {}
        self.reads: dict[int, list[tuple[int, int, int]]] = {}
        rows = zip(
            demand.read_request.tolist(),
            demand.read_node.tolist(),
            demand.read_block.tolist(),
            demand.read_home.tolist(),
            strict=True,
        )
        for request, node, block, home in rows:
            self.reads.setdefault(request, []).append((node, block, home))
            self.left[request] += 1
            self.left_of_get[request, node] += 1
        after = demand.request_after.tolist()
        for request, before in enumerate(after):
            if before >= 0:
                self.after.setdefault(before, []).append(request)
            else:
                self._at(int(demand.request_at[request]), request)

    def _at(self, at_ns: int, request: int) -> None:
        at = (at_ns + int(self.demand.request_jitter[request])) / 1e9
        self.world.at(max(at, self.world.now), functools.partial(self._begin, request))

    def _begin(self, request: int) -> None:
        now = self.began[request] = self.world.now
        reads = self.reads.get(request, [])
        gather_ms = 0 if self.plain else int(self.demand.request_gather[request]) // 1_000_000
        touched = []
        for node, block, home in reads:
            self.waiting.setdefault((node, block), []).append(request)
            size = int(self.demand.block_bytes[block])
            self.nodes[node].fetch(self.blocks[block], home, size, gather_ms)
            touched.append(node)
        for node in dict.fromkeys(touched):
            self.nodes[node].work()
        if not reads:
            self._request_ended(request, now)

    def _request_ended(self, request: int, _now: float) -> None:
        for follower in self.after.get(request, ()):
            at_ns = max(int(self.demand.request_at[follower]), round(self.world.now * 1e9))
            self._at(at_ns, follower)

    def ended(self, node: int, event: Fetched | Missed) -> None:
        block = self.number_of[event.block]
        if isinstance(event, Missed):
            self.misses += 1
        else:
            size = int(self.demand.block_bytes[block])
            self.wrong_bytes += content.wrong_bytes(event.block.key, size, event.buffer)
        for request in self.waiting.pop((node, block)):
            self.left_of_get[request, node] -= 1
            if not self.left_of_get[request, node]:
                self.took[request, node] = self.world.now - self.began[request]
            self.left[request] -= 1
            if not self.left[request]:
                self._request_ended(request, self.world.now)

    def run(self) -> PacketOutcome:
        try:
            self.world.run()
        finally:
            self.switch.close()
        assert not +self.left, "reads have not ended"
        names = sorted(self.took)
        return PacketOutcome(
            sum(node.responder.counters.payload_bytes for node in self.nodes),
            np.array([round(self.took[name] * 1e9) for name in names], np.int64),
            self.misses,
            self.wrong_bytes,
            self.switch.queue_drops,
            fetches=names,
        )


def _key(block: int, home: int, nodes: int) -> bytes:
    """A key whose bucket has that home, where bucket b is at home at node b % nodes."""
    bucket = home + nodes * (block % ((BUCKETS - nodes) // nodes))
    return (block << 10 | bucket).to_bytes(16, "big")


def link_delay_ns(bits_per_s: float) -> int:
    """A cable's delay: 500 ns, or on slow links a sixteenth of a frame's time, so that what the
    simulated switch looks at between two frames stays bounded."""
    return max(LINK_DELAY_NS, round(DATA_FRAME_BYTES * 8e9 / bits_per_s / 16))


def replay(
    demand: Demand,
    bits_per_s: float,
    *,
    plain: bool,
    requester: RequesterConfig | None = None,
    responder: ResponderConfig | None = None,
    seed: int = 1,
) -> PacketOutcome:
    """Play a demand of at most 32 nodes frame by frame, over a star of links of that rate."""
    return _Replay(
        demand,
        bits_per_s,
        requester or RequesterConfig(),
        responder or ResponderConfig(),
        link_delay_ns=link_delay_ns(bits_per_s),
        plain=plain,
        seed=seed,
    ).run()
