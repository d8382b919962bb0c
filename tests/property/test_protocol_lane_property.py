"""A home with a lane says what a home without one says, whatever is asked of it.

Oracle: the same core without a lane, which decides on every READ in Python; what both send, count
and report of heat must be equal after each READ. Where many READs come in one round, the order may
differ, and the lane sends no more than a round's frames. Cannot see: sockets (the mover's tests),
and the index's own faults (`test_hostagent_kept`).
"""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.protocol import lane
from kvcast.protocol.lane import datagrams_of
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    NamespaceInfo,
    NamespaceSettings,
    NodeInfo,
    PoolMap,
    Registered,
)
from kvcast.protocol.messages.shared import index_bytes
from kvcast.protocol.responder import ResponderConfig
from kvcast.protocol.responder.catchup import CatchUpConfig
from msgspec.structs import replace

SLAB = 1 << 20
SLABS = 6
KEYS = [bytes(16), bytes(15) + b"\1", b"\xff" * 16, bytes(8) + b"\1" + bytes(7)]
NAMESPACES = (1, 2, 3, 0xFFFF)
"""For all; for node 2 only; unknown; for all, and blocks live for a second."""
SIZES = (1, 1024, 1025, 65536, 65537, 600_000, 1_200_000)
MOST = 256
lane.compiled()  # the first time takes longer than an example may


class Home:
    """Node 1. `sent`: datagrams with the nodes that they go to, since `take`."""

    def __init__(self, *, with_lane: bool, rate: float = 0.0) -> None:
        self.memory = memoryview(bytearray(SLABS * SLAB))
        store = Store(Allocator(SLABS * SLAB, SLAB))
        index = Index(
            memoryview(bytearray(index_bytes(buckets_for(SLABS * SLAB)))), len(self.memory), 1
        )
        shared = SharedIndex(index, store, barrier=lambda: None)
        responder = ResponderConfig(
            max_chunk_bytes=4096,
            rate_frames_per_s=rate,
            catch_up=CatchUpConfig(after_reads=1, after_reads_alone=1),
        )
        options = AgentOptions("node-1", responder=responder)
        self.core = AgentCore(options, store, self.memory, random.Random(1), shared)
        self.sent: list[tuple[int, bytes]] = []
        self.by_lane = 0
        assert self.core.lane is not None
        self.core.lane.send = self._send_jobs
        if not with_lane:
            self.core.lane.shut()
        self.core.registered(Registered(CONTROL_PROTOCOL_VERSION, 1, 3.0, 0))
        self.give_map([2])

    def give_map(self, nodes_of_2: list[int], deleted: tuple[int, ...] = ()) -> None:
        nodes = [
            NodeInfo(n, f"node-{n}", f"10.7.0.{n}", f"02:00:00:00:00:0{n}", n, 9, f"10.8.0.{n}", n)
            for n in (1, 2, 3)
        ]
        infos = [
            NamespaceInfo(1, "t", "m", "1", "l", []),
            NamespaceInfo(2, "t", "m", "2", "l", [f"node-{n}" for n in (1, *nodes_of_2)]),
            NamespaceInfo(0xFFFF, "t", "m", "4", "l", [], settings=NamespaceSettings(ttl_s=1.0)),
        ]
        pool_map = PoolMap(
            *(1, nodes, [[1]] * wire.BUCKETS),
            *([info for info in infos if info.namespace not in deleted], []),
            deleted=list(deleted),
        )
        self.core.control_message(self.core.store._now, pool_map)
        pool = self.core.pool
        assert pool is not None
        self.core.requester.placement.know(pool.index_by_ip)

    def _send_jobs(self, jobs: int, count: int) -> None:
        frames = list(datagrams_of(jobs, count))
        self.by_lane += len(frames)
        self.sent += frames

    def put(self, now: float, namespace: int, key: bytes, size: int) -> None:
        self.core.store.advance(now)
        block = wire.BlockId(namespace, key)
        if self.core.store.peek(block) is None:
            data = random.Random(size).randbytes(size)
            copy = self.core.store.reserve(block, size)
            self.memory[copy.offset : copy.offset + size] = data
            self.core.store.commit(copy, wire.digest_of(data), home=True)

    def hear(self, now: float, node: int, datagrams: list[bytes], budget: int = MOST) -> None:
        """A round of datagrams from one node, of one length."""
        core = self.core
        found = core.open_lane(now, budget)
        assert found is not None
        core.requester.placement.place_bytes(
            b"".join(datagrams),
            lambda arrivals: core.placed(now, arrivals),
            lambda source, datagram: core.receive(now, source, wire.decode(datagram)),
            stride=len(datagrams[0]),
            sender=0x0A070000 + node,
            instead=found.place,
        )
        core.after_receiving(now)

    def pump(self, now: float, budget: int = MOST) -> None:
        self.core.handle_timer(now)
        self.sent += [
            (node, wire.encode(frame)) for node, frame in self.core.frames_to_send(now, budget)
        ]

    def take(self) -> list[tuple[int, bytes]]:
        sent, self.sent = self.sent, []
        return sent

    def counted(self) -> dict[str, object]:
        counts: dict[str, object] = asdict(self.core.responder.counters)
        for name in ("reads_by_lane", "reads_beyond_lane"):
            del counts[name]
        counts["forbidden"] = self.core.metrics.frames_forbidden_total
        counts["timer"] = self.core.get_timer(self.core.store._now)
        counts["blocks"] = self.core.store.blocks()
        counts["evictable"] = list(self.core.store._evictable)
        return counts


READS = st.builds(
    lambda namespace, key, code, index, flags, wanted, digest, gather, group, tag: wire.Frame(
        wire.OP_READ,
        namespace,
        key,
        wire.CHUNKINGS[code].number(index),
        flags | (wire.FLAG_PARTIAL if wanted != wire.FULL_SEGMENT else 0),
        group,
        digest,
        gather=gather,
        wanted=wanted,
        tag=tag,
    ),
    st.sampled_from((1, 1, 1, *NAMESPACES)),
    st.sampled_from(KEYS),
    st.sampled_from((0, 0, 2, 3)),
    st.sampled_from((0, 0, 0, 1, 2, 9, 40)),
    st.sampled_from((0, 0, 0, wire.FLAG_SHARED, wire.FLAG_SHARED, wire.FLAG_PADDED)),
    st.sampled_from((wire.FULL_SEGMENT,) * 5 + (1, 6)),
    st.sampled_from((0, 0, 0, 1, wire.digest_of(random.Random(65536).randbytes(65536)))),
    st.sampled_from((0, 0, 0, 0, 5)),
    st.sampled_from((0, 0, 0, 0, 7)),
    st.integers(0, 0xFFFF_FFFF),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.sampled_from((1, 2, 0xFFFF)),
            st.sampled_from(KEYS),
            st.sampled_from(SIZES),
        ),
        st.tuples(st.just("read"), st.sampled_from((2, 3)), READS),
        st.tuples(st.just("read"), st.sampled_from((2, 3)), READS),
        st.tuples(st.just("read"), st.sampled_from((2, 3)), READS),
        st.tuples(st.just("retry"), st.sampled_from((2, 3)), READS),
        st.tuples(st.just("drop"), st.sampled_from((1, 2)), st.sampled_from(KEYS)),
        st.tuples(st.just("map"), st.sampled_from(([2], [3], [2, 3]))),
        st.tuples(st.just("delete"), st.just(2)),
        st.tuples(st.just("wait"), st.sampled_from((0.0001, 0.01, 0.7))),
    ),
    max_size=40,
)


@given(EVENTS, st.sampled_from((0.0, 0.0, 20_000.0)), st.sampled_from((0, 30, MOST, MOST)))
@pytest.mark.slow
def test_a_home_with_a_lane_answers_as_one_without(
    events: list[tuple[object, ...]], rate: float, budget: int
) -> None:
    homes = [Home(with_lane=with_lane, rate=rate) for with_lane in (True, False)]
    now = 1.0
    for number, key in enumerate(KEYS[:3]):
        for home in homes:
            home.put(now, 1, key, SIZES[3 + number])
    for kind, *what in events:
        now += 1e-5
        if kind == "wait":
            now += what[0]
        for home in homes:
            match kind, what:
                case "put", [namespace, key, size]:
                    if namespace in home.core.pool.namespaces:
                        home.put(now, namespace, key, size)
                case "read" | "retry", [node, frame]:
                    if kind == "retry" and not frame.flags & wire.FLAG_PARTIAL:
                        frame = replace(frame, flags=frame.flags | wire.FLAG_RETRY)
                    home.hear(now, node, [wire.encode(frame)], budget)
                case "drop", [namespace, key]:
                    home.core.store.drop(wire.BlockId(namespace, key))
                case "map", [nodes]:
                    home.give_map(nodes)
                case "delete", [namespace]:
                    home.give_map([2], deleted=(namespace,))
            home.pump(now, budget)
        assert homes[0].take() == homes[1].take()
        assert homes[0].counted() == homes[1].counted()
        if rate == 0:
            homes[0].core.store.check()
    for home in homes:
        home.pump(now + 1.0, 100_000)
    assert homes[0].take() == homes[1].take()
    assert homes[0].core.responder.take_heat(100) == homes[1].core.responder.take_heat(100)


def whole(namespace: int, key: bytes, **rest: int) -> bytes:
    """A READ of a block's first segment, in chunks of 1 KiB."""
    wanted = wire.FULL_SEGMENT
    return wire.encode(wire.Frame(wire.OP_READ, namespace, key, wanted=wanted, **rest))


def test_the_lane_answers_what_needs_no_decision() -> None:
    home = Home(with_lane=True)
    for number, size in enumerate((65536, 65537)):
        home.put(1.0, 1, KEYS[number], size)
        home.hear(1.0, 2, [whole(1, KEYS[number], flags=wire.FLAG_SHARED)])
    assert home.by_lane == 64 + 65
    counters = home.core.responder.counters
    assert (counters.reads, counters.reads_by_lane, counters.offers) == (2, 2, 1)
    (warmer, _other) = home.core.responder.take_heat(5)
    assert (warmer.reads, warmer.readers) == (1, 1)


def test_a_read_of_what_another_node_waits_for_by_tcp_needs_a_decision() -> None:
    home = Home(with_lane=True)
    home.put(0.0, 1, KEYS[0], 200_000)
    block = wire.BlockId(1, KEYS[0])
    read = wire.encode(wire.Frame(wire.OP_READ, *block, wanted=wire.FULL_SEGMENT))
    home.core.meetings.asks(0.0, block, 3)
    home.hear(0.0, 3, [read])
    by_lane = home.by_lane
    assert by_lane, "its own READ"
    home.take()
    home.hear(0.0, 2, [read])
    home.pump(0.0)
    assert home.by_lane == by_lane
    frames = [wire.decode(datagram) for node, datagram in home.take() if node == 2]
    assert [frame.op for frame in frames] == [wire.OP_DATA] * 64
    assert all(frame.flags & wire.FLAG_SHARED for frame in frames)
    assert home.core.meetings.is_met(0.0, block)


def test_compiled_code_answers_no_node_that_a_namespace_is_not_for() -> None:
    home = Home(with_lane=True)
    home.put(1.0, 2, KEYS[0], 1000)
    home.hear(1.0, 3, [whole(2, KEYS[0])])
    home.pump(1.0)
    assert home.take() == []
    assert home.core.metrics.frames_forbidden_total == 1
    home.hear(1.0, 2, [whole(2, KEYS[0])])
    assert home.by_lane == len(home.take()) == 1
    home.give_map([3])
    home.hear(1.0, 2, [whole(2, KEYS[0])])
    home.pump(1.0)
    assert home.take() == []
    home.hear(1.0, 3, [whole(2, KEYS[0])])
    assert home.by_lane == 2


def test_a_round_is_answered_by_no_more_frames_than_may_go_out_at_once() -> None:
    home = Home(with_lane=True)
    home.put(1.0, 1, KEYS[0], 65536)
    reads = [whole(1, KEYS[0], tag=tag) for tag in range(10)]
    home.hear(1.0, 2, reads)
    assert home.by_lane == len(home.take()) == MOST
    counters = home.core.responder.counters
    # The fifth finds no frames left; it waits for its turn, and those after it ask for the same.
    assert (counters.reads_by_lane, counters.reads_beyond_lane) == (4, 1)
    assert (counters.reads_answered, counters.reads_collapsed) == (5, 5)
    home.hear(1.0, 3, reads[:1])
    assert home.by_lane == MOST, "something waits, which it may have to be answered with"
    home.pump(1.0)
    assert len(home.take()) == 2 * 64
    home.hear(1.0, 3, reads[:1])
    assert home.by_lane == MOST + 64


def test_many_reads_of_little_are_told_of_in_the_order_in_which_they_came() -> None:
    home = Home(with_lane=True)
    for key in KEYS:
        home.put(1.0, 1, key, 1)
    home.hear(1.0, 2, [whole(1, KEYS[number % 4], tag=number) for number in range(200)])
    assert [wire.decode(datagram).tag for _, datagram in home.take()] == list(range(200))
    assert home.core.responder.counters.reads_by_lane == 200
    assert home.core.store.blocks()
    assert list(home.core.store._evictable) == [wire.BlockId(1, key) for key in KEYS]


def test_what_is_dropped_or_in_doubt_is_not_answered_by_the_lane() -> None:
    home = Home(with_lane=True)
    home.put(1.0, 1, KEYS[0], 1000)
    home.core.store.drop(wire.BlockId(1, KEYS[0]))
    home.hear(1.0, 2, [whole(1, KEYS[0])])
    home.put(1.0, 0xFFFF, KEYS[0], 1000)
    home.hear(2.5, 2, [whole(0xFFFF, KEYS[0])])
    home.pump(2.5)
    assert {wire.decode(datagram).op for _, datagram in home.take()} == {wire.OP_MISS}
    home.put(3.0, 1, KEYS[0], 1000)
    home.core.recovery = object()  # type: ignore[assignment]
    home.hear(3.0, 2, [whole(1, KEYS[0])])
    home.core.recovery = None
    assert home.by_lane == 0
    home.pump(3.0)
    home.core.close()
    home.hear(3.0, 2, [whole(1, KEYS[0])])
    assert home.by_lane == 0


def test_more_namespaces_for_some_nodes_than_the_lane_knows_are_left_to_python() -> None:
    home = Home(with_lane=True)
    assert home.core.lane is not None
    home.put(1.0, 1, KEYS[0], 1000)
    some = {namespace: [2] for namespace in range(1000, 1000 + lane.MAX_NAMESPACES_WITH_NODES)}
    home.core.lane.use({**some, 1: [2]}, b"")
    home.hear(1.0, 2, [whole(1, KEYS[0])])
    assert home.by_lane == 0
    home.core.lane.use({1: [2], **some}, b"")
    home.pump(1.0)
    home.hear(1.0, 3, [whole(1, KEYS[0])])
    assert home.by_lane == 0
    home.pump(1.0)
    home.hear(1.0, 2, [whole(1, KEYS[0])])
    assert home.by_lane == 1
