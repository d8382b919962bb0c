"""The agent's cores without I/O: a virtual clock, frames and calls delivered by hand.

Oracle: what docs/architecture.md ("The agent") and the modules' own descriptions promise. Cannot
see: sockets, asyncio, timing of real machines.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.fetches import GetBatch, GetItem
from kvcast.hostagent.core.handover import REPORT_S
from kvcast.hostagent.core.namespace_metrics import EVICTED_DRAM
from kvcast.hostagent.core.pool import Pool, PoolMapError
from kvcast.hostagent.core.sessions import AHEAD_OF_ARENA, AHEAD_OF_QUOTA, Session
from kvcast.hostagent.core.ssd import SsdRules, SsdTier
from kvcast.hostagent.core.store import Copy, Store, StoreRules
from kvcast.hostagent.core.writes import PutBatch, WriteOptions
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.ssd.layout import cut_of, open_formatted, scan
from kvcast.protocol.links.bulk import (
    EVICTED,
    UNREACHABLE,
    BulkCall,
    DropCall,
    ExistsCall,
    GetCall,
    PutCall,
)
from kvcast.protocol.links.departures import LATELY_S, Departures
from kvcast.protocol.messages import bulk, local, wire
from kvcast.protocol.messages.bulk import BulkPut, PutHeader
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    AgentMessage,
    BlockRef,
    Credit,
    HandedOver,
    Keep,
    Kept,
    NamespaceInfo,
    NamespaceReads,
    NamespaceReply,
    NamespaceRequest,
    NodeInfo,
    PoolMap,
    Refused,
    Registered,
    Residents,
)
from kvcast.protocol.messages.wire import (
    BUCKETS,
    FLAG_LAST,
    FLAG_RESIDENT,
    OP_DATA,
    OP_READ,
    BlockId,
    Frame,
    digest_of,
)
from kvcast.protocol.requester import MissReason
from kvcast.simulation.disk import SimDisk

SLAB = 64 * 1024


def key(number: int, bucket: int = 0) -> bytes:
    return ((number << 10) | bucket).to_bytes(16, "big")


def pool_map(
    homes: list[int],
    epoch: int = 1,
    namespaces: tuple[int, ...] = (1,),
    nodes: int = 3,
    allowed: list[str] | None = None,
) -> PoolMap:
    return PoolMap(
        epoch,
        [
            NodeInfo(
                n, f"node-{n}", f"10.77.0.{n}", f"02:6b:76:00:00:0{n}", n, 19286, "127.0.0.1", n
            )
            for n in range(1, nodes + 1)
        ],
        [list(homes) for _ in range(BUCKETS)],
        [NamespaceInfo(n, "t", "m", str(n), "l", allowed or []) for n in namespaces],
        [],
    )


class Node:
    """One core with its clock at `now`; frames and calls are taken by the test."""

    def __init__(
        self,
        index: int,
        slabs: int = 16,
        writes: WriteOptions | None = None,
        *,
        lone_reads_by_tcp: bool = False,
    ) -> None:
        self.now = 100.0
        self.index = index
        self.memory = memoryview(bytearray(slabs * SLAB))
        options = AgentOptions(
            node_id=f"node-{index}",
            writes=writes or WriteOptions(),
            lone_reads_by_tcp=lone_reads_by_tcp,
        )
        self.core = AgentCore(
            options, Store(Allocator(slabs * SLAB, SLAB)), self.memory, random.Random(index)
        )
        self.said: list[AgentMessage] = []
        self.core.registered(Registered(CONTROL_PROTOCOL_VERSION, index, 3.0, 0))

    def take_map(self, message: PoolMap) -> None:
        self.core.control_message(self.now, message)

    def hold(self, number: int, data: bytes, namespace: int = 1) -> None:
        block = BlockId(namespace, key(number))
        copy = self.core.store.reserve(block, len(data))
        self.memory[copy.offset : copy.offset + len(data)] = data
        self.core.store.commit(copy, digest_of(data), home=False)

    def get(self, number: int, deadline_s: float = 1.0) -> list[GetItem]:
        """Start a get; the list fills when it ends."""
        items: list[GetItem] = []

        def answered(batch: GetBatch) -> None:
            items.extend(item for item in batch.items if item is not None)

        self.core.reads.get(self.now, 1, [key(number)], self.now + deadline_s, answered)
        return items

    def put(self, number: int, data: bytes, ack: str = "") -> list[local.PutBlock]:
        """Start a put; the list fills when it is acknowledged."""
        results: list[local.PutBlock] = []

        def answered(batch: PutBatch) -> None:
            results.extend(item for item in batch.results if item is not None)

        copy = self.core.store.reserve(BlockId(1, key(number)), len(data))
        self.memory[copy.offset : copy.offset + len(data)] = data
        self.core.writes.commit(self.now, [copy], answered, ack)
        return results

    def calls(self) -> list[BulkCall]:
        calls = list(self.core.outbox.calls)
        self.core.outbox.calls.clear()
        return calls

    def frames(self) -> list[tuple[int, Frame]]:
        return self.core.frames_to_send(self.now, 1000)

    def bytes_of(self, item: GetItem) -> bytes:
        assert item.copy is not None
        return bytes(self.memory[item.copy.offset : item.copy.offset + item.copy.size_bytes])


def exchange(*nodes: Node) -> int:
    """Deliver frames between nodes until none is left; how many there were."""
    by_index = {node.index: node for node in nodes}
    total = 0
    while True:
        moved = 0
        for node in nodes:
            for target, frame in node.frames():
                moved += 1
                if target in by_index:
                    payload = bytes(frame.payload)
                    if frame.op == OP_DATA:
                        payload = payload.ljust(1024, b"\0")
                    copied = Frame(
                        frame.op,
                        frame.namespace,
                        frame.key,
                        frame.segment,
                        frame.flags,
                        frame.group,
                        frame.digest,
                        frame.size,
                        frame.chunk,
                        frame.gather,
                        frame.wanted,
                        frame.tag,
                        payload,
                    )
                    by_index[target].core.receive(by_index[target].now, node.index, copied)
        for node in nodes:
            node.core.after_receiving(node.now)
        total += moved
        if not moved:
            return total


def pool_of(homes: list[int], count: int = 3) -> list[Node]:
    nodes = [Node(index) for index in range(1, count + 1)]
    for node in nodes:
        node.take_map(pool_map(homes, nodes=count))
    return nodes


def test_before_the_first_map_a_namespace_is_unavailable() -> None:
    assert Node(1).core.reads.refusal(1) == local.UNAVAILABLE


def test_a_namespace_is_checked_against_the_map() -> None:
    node = Node(1)
    node.take_map(pool_map([2], allowed=["node-2"]))
    assert node.core.reads.refusal(1) == local.FORBIDDEN
    assert node.core.reads.refusal(5) == local.UNKNOWN_NAMESPACE


def test_gets_of_one_block_share_one_fetch_and_each_pins() -> None:
    reader, home, _ = pool_of([2])
    home.hold(1, b"x" * 70_000)
    first, second = reader.get(1), reader.get(1)
    reads = [frame for _, frame in reader.frames() if frame.op == OP_READ]
    assert len(reads) == 1
    home.core.receive(home.now, 1, reads[0])
    exchange(reader, home)
    assert first[0].status == second[0].status == local.OK
    assert reader.bytes_of(first[0]) == b"x" * 70_000
    assert first[0].copy is second[0].copy
    assert first[0].copy is not None
    assert first[0].copy.pins == 2
    assert home.core.store.peek(BlockId(1, key(1))).pins == 0  # type: ignore[union-attr]


def test_a_local_block_asks_nobody() -> None:
    node = pool_of([2])[0]
    node.hold(1, b"here")
    (item,) = node.get(1)
    assert (item.status, item.tier) == (local.OK, "local")
    assert node.frames() == []


def evict(node: Node, block: BlockId) -> None:
    """Let a home lose a block that it holds."""
    copy = node.core.store.peek(block)
    assert copy is not None
    copy.home = True
    node.core.store._evict(copy)


def test_the_sole_home_asks_the_switch_for_what_it_evicted_and_only_briefly() -> None:
    node, other, _ = pool_of([1])
    node.hold(1, b"here")
    evict(node, BlockId(1, key(1)))
    items = node.get(1, deadline_s=60)
    ((target, frame),) = node.frames()
    assert (target, frame.op, frame.digest) == (other.index, OP_READ, digest_of(b"here"))
    node.now += 0.06
    node.core.handle_timer(node.now)
    assert items[0].status == local.MISS


def test_a_map_that_numbers_the_nodes_anew_ends_reads_from_the_old_numbers() -> None:
    # A controller that lost its state gives indices anew; what was asked of node 2 must not be
    # taken from whoever has its number now.
    node, _, _ = pool_of([2])
    items = node.get(1, deadline_s=60)
    ((target, _),) = node.frames()
    assert target == 2
    renumbered = pool_map([2], epoch=2)
    second, third = renumbered.nodes[1], renumbered.nodes[2]
    renumbered.nodes[1] = msgspec.structs.replace(third, index=2)
    renumbered.nodes[2] = msgspec.structs.replace(second, index=3)
    node.take_map(renumbered)
    assert (items[0].status, items[0].reason) == (local.MISS, "unreachable")
    assert node.core.reads.waiting == 0


def test_the_sole_home_asks_nobody_for_what_it_never_had() -> None:
    # Whoever is asked is no home of the block, and could answer anything.
    node = pool_of([1])[0]
    items = node.get(1, deadline_s=60)
    assert node.frames() == []
    assert (items[0].status, items[0].reason) == (local.MISS, "no_home")


def test_the_sole_home_takes_no_other_copy_from_the_node_that_it_asks() -> None:
    node, other, _ = pool_of([1])
    node.hold(1, b"here")
    evict(node, BlockId(1, key(1)))
    items = node.get(1, deadline_s=60)
    forged = b"not what was here"
    frame = Frame(
        OP_DATA, 1, key(1), 0, FLAG_LAST | FLAG_RESIDENT, digest=digest_of(forged),
        size=len(forged), payload=forged + bytes(1024 - len(forged)),
    )  # fmt: skip
    node.core.receive(node.now, other.index, frame)
    node.core.after_receiving(node.now)
    assert items == []
    node.now += 0.06
    node.core.handle_timer(node.now)
    assert items[0].status == local.MISS


def test_every_get_ends_by_its_own_deadline_and_the_fetch_goes_on() -> None:
    node = pool_of([2])[0]
    long, short = node.get(1, 10.0), node.get(1, 0.01)
    node.now += 0.02
    node.core.handle_timer(node.now)
    assert short[0].reason == "deadline"
    assert long == []
    assert node.core.reads.waiting == 1


def test_what_only_a_switch_can_have_is_asked_for_for_a_moment_however_many_join() -> None:
    node = Node(1, slabs=2)
    node.take_map(pool_map([1]))
    for number in (1, 2, 3):
        node.put(number, b"a" * SLAB)
    items = [node.get(1, 5.0), node.get(1, 10.0)]
    assert [frame.op for _, frame in node.frames()] == [OP_READ]
    node.now += 0.06
    node.core.handle_timer(node.now)
    assert [(item.status, item.reason) for (item,) in items] == [(local.MISS, "not_found")] * 2
    assert node.core.namespace_metrics()[1].misses == {EVICTED_DRAM: 2}


class SlowTier:
    """A tier below DRAM that has every block; what is read there ends when the test says so."""

    patience_s = 0.3

    def __init__(self, tier: str, *, is_shared: bool = False) -> None:
        self.tier = tier
        self.is_shared = is_shared
        self.begin: Callable[[int], memoryview | None] = lambda _size: None
        self.ended: Callable[[float, str, int, float], None] | None = None

    def holds(self, block: BlockId) -> bool:
        return True

    def read(
        self,
        block: BlockId,
        begin: Callable[[int], memoryview | None],
        ended: Callable[[float, str, int, float], None],
    ) -> bool:
        self.begin, self.ended = begin, ended
        return True

    def give(self, now: float, data: bytes) -> None:
        room = self.begin(len(data))
        assert room is not None
        assert self.ended is not None
        room[:] = data
        self.ended(now, "", digest_of(data), 0.0)

    def promoted(self, copy: Copy) -> None:
        pass


def test_a_block_that_neither_of_two_tiers_gives_in_time_is_asked_for_elsewhere_once() -> None:
    reader, home, _ = pool_of([2])
    home.hold(1, b"from its home")
    disk, cold = SlowTier("ssd"), SlowTier("cold")
    reader.core.reads.sources += [disk, cold]
    items = reader.get(1, deadline_s=5.0)
    reader.now += 0.1
    assert disk.ended is not None
    disk.ended(reader.now, "damaged", 0, 0.0)
    assert cold.ended is not None
    reads = []
    for _ in range(5):  # past the patience with the one, and with the other
        reader.now += 0.1
        reader.core.handle_timer(reader.now)
        reads += [frame for _, frame in reader.frames() if frame.op == OP_READ]
        if len(reads) == 1:
            home.core.receive(home.now, 1, reads[0])
    exchange(reader, home)
    assert [reader.bytes_of(item) for item in items] == [b"from its home"]
    cold.ended(reader.now, "too late", 0, 0.0)
    assert reader.core.reads.waiting == 0


def test_what_the_disk_gives_before_anybody_else_is_taken_however_long_it_took() -> None:
    reader, home, _ = pool_of([2])
    home.hold(1, b"from its home")
    disk = SlowTier("ssd")
    reader.core.reads.sources.append(disk)
    items = reader.get(1, deadline_s=5.0)
    kept: list[bool] = []
    block = BlockId(1, key(1))
    reader.core.reads.keep(reader.now, block, 0, 0, kept.append)
    reader.now += 2 * disk.patience_s
    reader.core.handle_timer(reader.now)
    (read,) = [frame for _, frame in reader.frames() if frame.op == OP_READ]
    home.core.receive(home.now, 1, read)
    disk.give(reader.now, b"from the disk")
    assert [(item.tier, reader.bytes_of(item)) for item in items] == [("ssd", b"from the disk")]
    assert kept == [True]
    assert reader.core.reads.waiting == 0
    exchange(reader, home)  # which is too late, and leaves nothing behind
    copy = reader.core.store.peek(block)
    assert copy is not None
    assert copy.pins == 1
    assert reader.core.store.used_bytes == copy.reserved_bytes
    reader.core.store.check()


def test_what_lies_where_all_can_read_it_is_asked_of_its_home() -> None:
    reader, home, _ = pool_of([2])
    home.hold(1, b"from its home")
    cold = SlowTier("cold", is_shared=True)
    reader.core.reads.sources.append(cold)
    items = reader.get(1, deadline_s=5.0)
    exchange(reader, home)
    assert [reader.bytes_of(item) for item in items] == [b"from its home"]
    assert cold.ended is None


@pytest.mark.parametrize("how", ["get", "prefetch", "gone"])
def test_what_no_home_has_is_read_where_all_can_read_it(how: str) -> None:
    reader, home, _ = pool_of([2])
    cold = SlowTier("cold", is_shared=True)
    reader.core.reads.sources.append(cold)
    items: list[GetItem] = []
    if how == "prefetch":
        reader.core.reads.prefetch(reader.now, 1, [key(1)], reader.now + 5.0)
    else:
        items = reader.get(1, deadline_s=5.0)
    exchange(reader, home)
    assert not items
    assert cold.ended is not None
    reader.now += 1.0  # past the patience with disks: nobody else is left to be asked
    reader.core.handle_timer(reader.now)
    assert reader.frames() == []
    if how == "gone":
        cold.ended(reader.now, "gone", 0, 0.0)
        assert (items[0].status, items[0].reason) == (local.MISS, "not_found")
    else:
        cold.give(reader.now, b"stored")
        assert reader.core.store.peek(BlockId(1, key(1))) is not None
        assert [reader.bytes_of(item) for item in items] == [b"stored"] * (how == "get")
    assert reader.core.reads.waiting == 0
    assert reader.core.store.counters.no_room == 0


def test_who_came_after_the_homes_were_asked_is_not_told_that_they_lack_what_was_put() -> None:
    reader, home, _ = pool_of([2])
    cold = SlowTier("cold", is_shared=True)
    reader.core.reads.sources.append(cold)
    before = reader.get(1, deadline_s=5.0)
    exchange(reader, home)
    home.hold(1, b"put since")
    reader.now += 0.1
    after = reader.get(1, deadline_s=5.0)
    assert cold.ended is not None
    cold.ended(reader.now, "it does not answer", 0, 0.0)
    assert [(item.status, item.reason) for item in before] == [(local.MISS, "not_found")]
    exchange(reader, home)
    assert [reader.bytes_of(item) for item in after] == [b"put since"]
    assert reader.core.reads.waiting == 0


def test_who_waits_no_more_has_nothing_read_where_all_can_read_it() -> None:
    reader, _, _ = pool_of([2])
    cold = SlowTier("cold", is_shared=True)
    reader.core.reads.sources.append(cold)
    items = reader.get(1, deadline_s=0.2)
    reader.frames()
    for _ in range(4):
        reader.now += 0.1
        reader.core.handle_timer(reader.now)
        reader.frames()
    assert items[0].reason == "deadline"
    assert cold.ended is None


def test_a_home_reads_what_it_has_not_where_all_can_read_it() -> None:
    home, _, _ = pool_of([1, 2])
    cold = SlowTier("cold", is_shared=True)
    home.core.reads.sources.append(cold)
    items = home.get(1, deadline_s=5.0)
    assert home.frames() == []
    cold.give(home.now, b"stored")
    assert [home.bytes_of(item) for item in items] == [b"stored"]


def test_no_room_for_a_block_is_said_and_leaves_nothing_behind() -> None:
    reader, home, _ = pool_of([2])
    big = Node(1, slabs=1)
    big.take_map(pool_map([2]))
    home.hold(1, b"y" * 70_000)
    items = big.get(1)
    exchange(big, home)
    assert items[0].status == local.NO_ROOM
    assert big.core.store.used_bytes == 0
    assert reader.core.reads.waiting == 0


def first_bulk_get(node: Node) -> GetCall:
    """What a node asks for by the bulk way when its READs have led to nothing."""
    calls: list[BulkCall] = []
    while not calls:
        node.frames()
        when = node.core.get_timer(node.now)
        assert when is not None
        node.now = max(when, node.now)
        node.core.handle_timer(node.now)
        calls = node.calls()
    (call,) = calls
    assert isinstance(call, GetCall)
    return call


def test_when_the_udp_way_fails_the_bulk_way_is_tried_and_its_digest_checked() -> None:
    for lie in (False, True):
        node = pool_of([2])[0]
        items = node.get(1, deadline_s=60)
        call = first_bulk_get(node)
        assert call.node == 2
        data = b"z" * 3000
        view = call.begin(len(data), digest_of(data))
        assert view is not None
        view[:] = data if not lie else b"!" * 3000
        call.ended(node.now, bulk.WRONG_DIGEST if lie else bulk.DONE)
        assert node.core.metrics.bulk_wrong_digest_total == int(lie)
        if lie:
            assert items[0].status == local.MISS
            assert node.core.store.used_bytes == 0
        else:
            assert (items[0].status, items[0].tier) == (local.OK, "bulk")
            assert node.bytes_of(items[0]) == data
        node.core.store.check()


@pytest.mark.parametrize(
    ("size_bytes", "then", "status"),
    [
        (70_000, "", local.NO_ROOM),
        (70_000, UNREACHABLE, local.NO_ROOM),
        (70_000, bulk.DONE, local.OK),
        (1 << 40, "", local.MISS),
        (1 << 40, UNREACHABLE, local.MISS),
    ],
)
def test_what_comes_the_bulk_way_and_finds_no_room_is_said_to_have_found_none(
    size_bytes: int, then: str, status: str
) -> None:
    """Room that is not there is no fault of the homes, whatever READs have shown of them before;
    a size that no block has is. `then`: what becomes of the call to a second home, if any."""
    node = Node(1, slabs=1)
    node.take_map(pool_map([2, 3] if then else [2]))
    items = node.get(1, deadline_s=60)
    call = first_bulk_get(node)
    assert call.begin(size_bytes, 5) is None
    call.ended(node.now, bulk.NO_ROOM)
    if then:
        (call,) = node.calls()
        assert isinstance(call, GetCall)
        if then == bulk.DONE:
            view = call.begin(4, digest_of(b"data"))
            assert view is not None
            view[:] = b"data"
        call.ended(node.now, then)
    assert [item.status for item in items] == [status]
    assert node.core.requester.counters.no_memory == (status == local.NO_ROOM)
    node.core.store.check()


def test_a_bulk_answer_after_the_deadline_gives_its_room_back() -> None:
    node = pool_of([2])[0]
    items = node.get(1, deadline_s=30)
    call = first_bulk_get(node)
    view = call.begin(1000, 5)
    assert view is not None
    node.now += 60
    node.core.handle_timer(node.now)
    assert items[0].reason == "deadline"
    call.ended(node.now, UNREACHABLE)
    assert node.core.store.used_bytes == 0


def test_a_put_is_acknowledged_when_its_home_has_it() -> None:
    node = pool_of([2, 3])[0]
    results = node.put(1, b"data")
    to_home, to_replica = node.calls()
    assert isinstance(to_home, PutCall)
    assert isinstance(to_replica, PutCall)
    assert (to_home.node, to_replica.node) == (2, 3)
    assert to_replica.begin()
    to_replica.ended(node.now, bulk.DONE)
    assert results == []
    assert to_home.begin()
    to_home.ended(node.now, bulk.HELD)
    assert results == [local.PutBlock(local.OK, 2, digest_of(b"data"))]
    assert node.core.store.peek(BlockId(1, key(1))).pins == 0  # type: ignore[union-attr]


def test_a_put_whose_home_is_dead_is_acknowledged_by_the_replica() -> None:
    node = pool_of([2, 3])[0]
    results = node.put(1, b"data")
    to_home, to_replica = node.calls()
    to_home.ended(node.now, UNREACHABLE)
    assert results == []
    to_replica.ended(node.now, bulk.DONE)
    assert [r.status for r in results] == [local.OK]


def test_a_put_says_what_its_acknowledgement_waits_for() -> None:
    node = pool_of([2, 3])[0]
    assert [r.status for r in node.put(1, b"data", "local")] == [local.OK]
    node.calls()
    results = node.put(2, b"data", "replicas")
    to_home, to_replica = node.calls()
    to_home.ended(node.now, bulk.DONE)
    assert results == []
    to_replica.ended(node.now, bulk.HELD)
    assert [(r.status, r.copies) for r in results] == [(local.OK, 2)]
    # Some of the homes are not all of them, and the writer is told how many there are.
    results = node.put(3, b"data", "replicas")
    to_home, to_replica = node.calls()
    to_replica.ended(node.now, UNREACHABLE)
    to_home.ended(node.now, bulk.DONE)
    assert [(r.status, r.copies) for r in results] == [(local.UNAVAILABLE, 1)]
    home = pool_of([1, 3])[0]
    results = home.put(1, b"data", "replicas")
    assert results == [], "the writer is the first home, and not all of them"
    (to_replica,) = home.calls()
    to_replica.ended(home.now, bulk.DONE)
    assert [(r.status, r.copies) for r in results] == [(local.OK, 2)]


def test_a_put_on_the_home_itself_is_acknowledged_at_once() -> None:
    node = pool_of([1, 3])[0]
    assert [r.status for r in node.put(1, b"data")] == [local.OK]
    assert len(node.calls()) == 1


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (UNREACHABLE, local.UNAVAILABLE),
        (bulk.NO_ROOM, local.NO_ROOM),
        (bulk.FORBIDDEN, local.FORBIDDEN),
        (bulk.WRONG_DIGEST, local.UNAVAILABLE),
    ],
)
def test_a_put_that_no_home_took_says_why(outcome: str, status: str) -> None:
    node = pool_of([2])[0]
    results = node.put(1, b"data")
    (call,) = node.calls()
    call.ended(node.now, outcome)
    assert [r.status for r in results] == [status]


def test_a_waiting_replication_may_be_evicted_and_a_waited_for_one_may_not() -> None:
    node = Node(1, slabs=2)
    node.take_map(pool_map([1, 3]))
    node.put(1, b"a" * SLAB)
    (waiting,) = node.calls()
    for number in (2, 3):
        node.put(number, b"b" * SLAB)
    assert isinstance(waiting, PutCall)
    assert not waiting.begin()
    waiting.ended(node.now, EVICTED)
    assert node.core.metrics.replications_dropped_total == 1

    node = Node(1, slabs=2)
    node.take_map(pool_map([3]))
    node.put(1, b"a" * SLAB)
    copy = node.core.store.peek(BlockId(1, key(1)))
    assert copy is not None
    assert copy.pins == 1


def over_a_disk(node: Node, disk: SimDisk | None = None) -> Callable[[], None]:
    """Put a disk below a node's DRAM; what is returned has the disk do all that it is to do, after
    it has handed over its table, where there was one."""
    disk, cut = disk or SimDisk(random.Random(1)), cut_of("node", 8 * SLAB, SLAB // 16, SLAB * 2)
    formatted = open_formatted(disk, cut, 7)
    rules = SsdRules(high_share=0.5, low_share=0.25)
    tier = SsdTier(rules, node.core.store, node.memory, [formatted], epoch_s=1e9)
    node.core.use_tiers([tier])
    unread = [disk] if formatted.found else []

    def work() -> None:
        while unread:
            for piece in scan(unread.pop(), formatted):
                tier.found(0, piece)
            tier.scanned()
        while orders := tier.take_orders(node.now):
            for order in orders:
                error, digest = disk.do(order)
                order.ended(node.now, error, digest)

    return work


def test_a_replica_whose_copy_has_gone_to_the_disk_meanwhile_is_sent_from_there() -> None:
    node = Node(1, slabs=4)
    work = over_a_disk(node)
    node.take_map(pool_map([1, 3]))
    node.put(1, b"a" * SLAB)
    (waiting,) = node.calls()
    for number in (2, 3, 4):
        node.put(number, b"b" * SLAB)
        work()
    block = BlockId(1, key(1))
    assert node.core.store.peek(block) is None
    assert node.core.store.lies_below(block)
    node.calls()
    assert isinstance(waiting, PutCall)
    assert not waiting.begin()
    waiting.ended(node.now, EVICTED)
    node.core.handle_timer(node.now)
    work()
    (late,) = node.calls()
    assert isinstance(late, PutCall)
    assert (late.node, late.copy.block, late.spare) == (3, block, False)
    assert late.begin()
    copy = node.core.store.peek(block)
    assert copy is late.copy
    assert bytes(node.memory[copy.offset : copy.offset + copy.size_bytes]) == b"a" * SLAB
    late.ended(node.now, bulk.DONE)
    assert copy.pins == 0
    assert node.core.metrics.replications_late_total == 1
    assert node.core.metrics.replications_dropped_total == 0
    assert (node.core.handover.left, node.core.handover.counters.blocks) == (0, 1)


@pytest.mark.parametrize("most", [0, 1])
def test_what_who_hands_over_puts_is_handed_over_where_it_did_not_get_there(most: int) -> None:
    node = Node(1, slabs=4, writes=WriteOptions(max_replications=most))
    said: list[AgentMessage] = []
    node.core.control_connected(said.append)
    node.take_map(msgspec.structs.replace(pool_map([1, 3]), settled=1))
    assert said == [HandedOver(1, 0, 0, 0)]
    results = node.put(1, b"a" * SLAB)
    sent = node.calls()
    assert len(sent) == most
    for call in sent:
        assert isinstance(call, PutCall)
        call.ended(node.now, UNREACHABLE)
    assert [result.status for result in results] == [local.OK]
    node.now += REPORT_S
    node.core.handle_timer(node.now)
    assert said[1:] == [HandedOver(1, 1, 1, 0)], "whoever is drained must not go with it"
    (again,) = node.calls()
    assert isinstance(again, PutCall)
    assert (again.node, again.copy.block) == (3, BlockId(1, key(1)))
    again.ended(node.now, bulk.DONE)
    assert said[2:] == [HandedOver(1, 0, 1, 0)]


def moving(
    homes: list[int], *, ack: str = "", leaving: tuple[int, ...] = ()
) -> tuple[Node, list[local.PutBlock], dict[int, PutCall]]:
    """Node 1, a put of it while buckets move whose first two homes hold the blocks, and the calls
    by the home that they go to."""
    node = Node(1)
    node.take_map(
        msgspec.structs.replace(
            pool_map(homes, epoch=4, nodes=5), settled=min(2, len(homes)), leaving=list(leaving)
        )
    )
    results = node.put(1, b"data", ack)
    calls = {call.node: call for call in node.calls() if isinstance(call, PutCall)}
    assert calls.keys() == {*homes} - {1}
    return node, results, calls


@pytest.mark.parametrize("first", [2, 5])
def test_a_put_while_blocks_are_handed_over_waits_for_one_who_takes_them(first: int) -> None:
    node, results, calls = moving([2, 3, 4, 5])
    calls[3].ended(node.now, bulk.DONE)
    calls[first].ended(node.now, bulk.DONE)
    assert results == []
    calls[7 - first].ended(node.now, bulk.DONE)
    assert [(r.status, r.copies) for r in results] == [(local.OK, 3)]
    calls[4].ended(node.now, UNREACHABLE)
    assert node.calls() == [], "nobody need be told: another of them has it"


def test_where_nobody_takes_a_bucket_a_put_waits_for_one_of_those_that_stay() -> None:
    node, results, calls = moving([2, 3], leaving=(2,))
    calls[2].ended(node.now, bulk.DONE)
    assert results == []
    calls[3].ended(node.now, bulk.DONE)
    assert [r.status for r in results] == [local.OK]
    node, results, calls = moving([3, 2], leaving=(2,))
    calls[3].ended(node.now, bulk.DONE)
    assert [r.status for r in results] == [local.OK]
    node, results, calls = moving([2, 3], leaving=(4,))
    calls[2].ended(node.now, bulk.DONE)
    assert [r.status for r in results] == [local.OK], "it stays where it is"


def test_a_home_that_hands_its_blocks_over_waits_for_one_who_takes_them_too() -> None:
    node, results, calls = moving([1, 2, 3])
    assert results == []
    calls[3].ended(node.now, bulk.DONE)
    assert [r.status for r in results] == [local.OK]
    _, results, _ = moving([1, 2, 3], ack="local")
    assert [r.status for r in results] == [local.OK]
    _, results, _ = moving([2, 3, 1])
    assert results == [], "who takes it over is not its first home"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(bulk.HELD, local.OK), (UNREACHABLE, local.UNAVAILABLE), (bulk.NOT_HOME, local.UNAVAILABLE)],
)
def test_a_put_that_no_taker_got_is_handed_on_by_a_home_that_has_it(
    outcome: str, status: str
) -> None:
    node, results, calls = moving([2, 3, 4])
    calls[4].ended(node.now, UNREACHABLE)
    calls[2].ended(node.now, UNREACHABLE)
    calls[3].ended(node.now, bulk.DONE)
    assert results == [], "whoever leaves must not go with the only copy"
    (asked,) = node.calls()
    assert isinstance(asked, PutCall)
    assert (asked.node, asked.epoch, asked.begin()) == (3, bulk.OLDEST_MAP, True)
    asked.ended(node.now, outcome)
    assert [r.status for r in results] == [status]
    assert node.calls() == []
    copy = node.core.store.peek(BlockId(1, key(1)))
    assert copy is not None
    assert copy.pins == 0


def test_a_put_that_nobody_got_while_blocks_are_handed_over_is_refused() -> None:
    node, results, calls = moving([2, 3, 4])
    for call in calls.values():
        call.ended(node.now, bulk.NO_ROOM)
    assert [r.status for r in results] == [local.NO_ROOM]
    assert node.calls() == []


def test_a_home_that_is_told_by_an_old_map_hands_a_block_on_that_it_has() -> None:
    node = Node(1)
    node.take_map(msgspec.structs.replace(pool_map([1, 3], epoch=4), settled=1))
    node.put(1, b"data")
    node.calls()
    serving, pool = node.core.serving, node.core.pool
    assert pool is not None
    header = PutHeader(key(1), 4, digest_of(b"data"))
    for epoch, handed_on in ((4, 0), (bulk.OLDEST_MAP, 1)):
        put = BulkPut(1, epoch, pool.meaning_of(1) or 0, [header])
        assert serving.begin_put(put, header) == bulk.HELD
        assert node.core.handover.left == handed_on
    serving.pushed(BlockId(1, key(1)), 4)
    assert node.core.handover.left == 2, "who pushes does not say by which map"


def test_what_is_found_on_the_disk_after_the_map_came_is_handed_over() -> None:
    disk = SimDisk(random.Random(1))
    before = Node(1, slabs=4)
    work = over_a_disk(before, disk)
    before.take_map(pool_map([1]))
    for number in range(1, 5):
        before.put(number, b"a" * SLAB)
        work()
    there = {n for n in range(1, 5) if before.core.store.below.holds(BlockId(1, key(n)))}
    assert there
    node = Node(1, slabs=4)
    said: list[AgentMessage] = []
    node.core.control_connected(said.append)
    work = over_a_disk(node, disk)
    node.take_map(msgspec.structs.replace(pool_map([1, 3]), settled=1))
    assert (node.calls(), said) == ([], []), "it is not known yet what there is to hand over"
    work()
    offered = set()
    while calls := node.calls():
        for call in calls:
            assert isinstance(call, PutCall)
            assert call.begin()
            offered.add(int.from_bytes(call.copy.block.key, "big") >> 10)
            call.ended(node.now, bulk.DONE)
        work()
    assert len(offered) == len(there)
    (*_, last) = said
    assert last == HandedOver(1, 0, len(there), 0)


def test_a_put_that_all_homes_acknowledge_keeps_its_copy_in_dram_until_they_have() -> None:
    node = Node(1, slabs=4)
    work = over_a_disk(node)
    node.take_map(pool_map([1, 3]))
    results = node.put(1, b"a" * SLAB, "replicas")
    (waiting,) = node.calls()
    for number in (2, 3, 4):
        node.put(number, b"b" * SLAB, "local")
        work()
    assert isinstance(waiting, PutCall)
    assert waiting.begin()
    assert results == []
    waiting.ended(node.now, bulk.DONE)
    assert [(r.status, r.copies) for r in results] == [(local.OK, 2)]


def test_replications_are_bounded() -> None:
    node = Node(1, writes=WriteOptions(max_replications=2))
    node.take_map(pool_map([2]))
    results = [node.put(number, b"x") for number in range(3)]
    assert [r.status for r in results[2]] == [local.BUSY]
    assert node.core.metrics.replications_dropped_total == 1


def test_exists_asks_each_home_once_a_round_and_stops_at_the_gap() -> None:
    node = Node(1)
    node.take_map(pool_map([2, 3]))
    node.hold(0, b"here")
    answers: list[int] = []
    keys = [key(number) for number in range(5)]
    node.core.queries.exists(1, b"".join(keys), node.now + 1, answers.append)
    (first,) = node.calls()
    assert isinstance(first, ExistsCall)
    assert (first.node, first.keys) == (2, b"".join(keys[1:]))
    first.answer(0b0101)
    first.ended(node.now, bulk.DONE)
    (second,) = node.calls()
    assert isinstance(second, ExistsCall)
    assert (second.node, second.keys) == (3, keys[2] + keys[4])
    assert answers == []
    second.answer(0b11101)  # of three more than it was asked about
    second.ended(node.now, bulk.DONE)
    assert answers == [4]
    assert node.calls() == []


def test_exists_counts_a_silent_home_as_one_without_the_block() -> None:
    node = pool_of([2, 3])[0]
    answers: list[int] = []
    node.core.queries.exists(1, key(1), node.now + 1, answers.append)
    for _ in range(2):
        (call,) = node.calls()
        call.ended(node.now, UNREACHABLE)
    assert answers == [0]


def test_drop_reports_only_what_every_home_has_forgotten() -> None:
    node = pool_of([2, 3])[0]
    node.hold(1, b"x")
    answers: list[int] = []
    node.core.queries.drop(1, [key(1), key(2)], node.now + 1, answers.append)
    assert node.core.store.peek(BlockId(1, key(1))) is None
    first, second = node.calls()
    assert isinstance(first, DropCall)
    first.ended(node.now, bulk.DONE)
    second.ended(node.now, UNREACHABLE)
    assert answers == [0]


def test_a_credit_keeps_a_block_from_being_the_next_victim() -> None:
    node = Node(1, slabs=2)
    node.take_map(pool_map([2]))
    node.hold(1, b"a" * SLAB)
    node.hold(2, b"b" * SLAB)
    node.core.control_message(node.now, Credit([(1, key(1), 10)]))
    node.hold(3, b"c" * SLAB)
    assert {b.key for b in node.core.store.blocks()} == {key(1), key(3)}


def test_keep_fetches_what_is_missing_and_answers_either_way() -> None:
    node, replica, _ = pool_of([1, 2])
    node.core.control_connected(node.said.append)
    replica.hold(1, b"k" * 2000)
    node.core.control_message(node.now, Keep(1, 1, key(1), 2000, digest_of(b"k" * 2000)))
    node.core.control_message(node.now, Keep(2, 1, key(2), 2000, 1))
    exchange(node, replica)
    assert {(m.request, m.held) for m in node.said if isinstance(m, Kept)} == {
        (1, True),
        (2, False),
    }
    copy = node.core.store.peek(BlockId(1, key(1)))
    assert copy is not None
    assert copy.home


def test_a_read_of_a_namespace_its_sender_may_not_use_is_dropped() -> None:
    node = Node(1)
    node.take_map(pool_map([1], allowed=["node-1"]))
    node.hold(1, b"secret")
    node.core.receive(node.now, 2, Frame(OP_READ, 1, key(1), wanted=1, flags=2))
    assert node.frames() == []
    assert node.core.metrics.frames_forbidden_total == 1


def test_bulk_requests_in_a_namespace_that_is_not_the_callers_are_refused() -> None:
    node = Node(1)
    node.take_map(pool_map([1], allowed=["node-1"]))
    node.hold(1, b"secret")
    serving = node.core.serving
    forbidden = bulk.BulkDone(bulk.FORBIDDEN)
    get = bulk.BulkGet(1, [bulk.WantedBlock(key(1))])
    assert serving.refuse_get("node-2", get) == bulk.FORBIDDEN
    assert serving.exists("node-2", bulk.BulkExists(1, key(1))) == forbidden
    assert serving.drop("node-2", bulk.BulkDrop(1, [key(1)])) == forbidden
    assert node.core.pool is not None
    meaning = node.core.pool.meaning_of(1)
    assert meaning is not None
    put = bulk.BulkPut(1, 99, meaning, [bulk.PutHeader(key(2), 5, 1)])
    assert serving.refuse_put("node-2", put) == bulk.FORBIDDEN
    assert node.core.metrics.bulk_requests_refused_total == 4
    assert serving.exists("node-1", bulk.BulkExists(1, key(1))) != forbidden


def test_a_home_hands_on_the_blocks_of_a_namespace_that_it_may_not_use() -> None:
    node = Node(1)
    node.take_map(pool_map([1, 2], allowed=["node-1"]))
    assert node.core.pool is not None
    meaning = node.core.pool.meaning_of(1)
    assert meaning is not None
    put = bulk.BulkPut(1, 99, meaning, [bulk.PutHeader(key(2), 5, 1)])
    assert node.core.serving.refuse_put("node-2", put) is None
    assert node.core.serving.refuse_put("node-3", put) == bulk.FORBIDDEN


@pytest.mark.parametrize("pushes", [False, True])
def test_a_node_of_another_release_gets_no_conveyor(pushes: bool) -> None:
    """Its replies may be of another length."""
    node = Node(1)
    node.take_map(pool_map([1]))
    serving = node.core.serving
    serving.conveys = serving.takes_pushes = True
    for version in (bulk.CONVEYOR_VERSION - 1, bulk.CONVEYOR_VERSION + 1):
        assert serving.convey("node-2", bulk.BulkConvey(version, pushes)) == bulk.FORBIDDEN
    assert node.core.metrics.bulk_requests_refused_total == 2
    mine = bulk.BulkConvey(bulk.CONVEYOR_VERSION, pushes)
    assert serving.convey("node-2", mine) == bulk.DONE
    assert serving.convey("node-9", mine) == bulk.FORBIDDEN, "it is not of the pool"


def test_where_namespaces_compete_for_the_link_nothing_passes_their_turns_by() -> None:
    node = Node(1)
    node.take_map(pool_map([1]))
    core = node.core
    core.departures = Departures(1e6)
    core.serving.conveys = True
    stopped: list[bool] = []
    core.stop_conveying = lambda: stopped.append(True)
    ask = bulk.BulkConvey(bulk.CONVEYOR_VERSION)
    now = core.store.now
    assert core.serving.convey("node-2", ask) == bulk.DONE
    core.conveyed([], 0)
    assert not stopped
    for namespace in (1, 2):
        core.departures.sent(now, namespace, 200_000)
    assert core.serving.convey("node-2", ask) == bulk.FORBIDDEN
    core.conveyed([], 0)
    assert stopped
    core.store.advance(now + LATELY_S)
    assert core.serving.convey("node-2", ask) == bulk.DONE, "it is long ago"


def test_where_puts_of_several_namespaces_compete_none_is_pushed_past_their_turns() -> None:
    node = Node(1)
    node.take_map(pool_map([1], namespaces=(1, 2)))
    core = node.core
    core.departures, core.arrivals = Departures(1e6), Departures(1e6)
    core.serving.takes_pushes = True
    stopped: list[str] = []
    core.stop_pushing = lambda: stopped.append("pushing")
    core.stop_taking = lambda: stopped.append("taking")
    ask = bulk.BulkConvey(bulk.CONVEYOR_VERSION, True)
    for _ in range(10):
        core.serving.pushed(BlockId(1, key(1)), 20_000)
    assert stopped == [], "nobody competes"
    assert core.serving.convey("node-2", ask) == bulk.DONE
    for namespace in (1, 2, 1, 2):
        core.serving.pushed(BlockId(namespace, key(namespace)), 20_000)
    assert set(stopped) == {"taking"}
    assert core.serving.convey("node-2", ask) == bulk.FORBIDDEN
    stopped.clear()
    for namespace in (1, 2, 1, 2):
        copy = core.store.reserve(BlockId(namespace, key(namespace)), 20_000)
        core.writes.put(node.now, copy, 1, [2], 0.0)
    assert set(stopped) == {"pushing"}
    core.store.advance(core.store.now + LATELY_S)
    assert core.serving.convey("node-2", ask) == bulk.DONE, "it is long ago"


def test_a_puts_bytes_follow_unasked_only_to_whom_the_namespace_is_for() -> None:
    for nodes, at_once in ([], True), (["node-1", "node-2"], True), (["node-1"], False):
        writer = pool_of([2])[0]
        changed = pool_map([2], epoch=2)
        info = NamespaceInfo(1, "t", "m", "1", "l", nodes)
        writer.take_map(PoolMap(2, changed.nodes, changed.buckets, [info], []))
        writer.put(1, b"a tenant's")
        (call,) = writer.calls()
        assert isinstance(call, PutCall)
        assert call.at_once is at_once


def test_reads_are_for_chunks_of_the_maps_size_but_for_what_the_switch_holds() -> None:
    node = pool_of([2])[0]
    node.take_map(msgspec.structs.replace(pool_map([2], epoch=2), chunk_bytes=8192))
    config = node.core.requester.config
    base = node.core.options.requester
    assert config.credit_segments == base.credit_segments // 8
    resident = BlockRef(1, key(7))
    node.core.control_message(node.now, Residents([resident]))
    node.get(7)
    node.get(8)
    small, large = (frame for _, frame in node.frames())
    assert (small.key, wire.chunking_of(small.segment).chunk_bytes) == (key(7), 1024)
    assert (large.key, wire.chunking_of(large.segment).chunk_bytes) == (key(8), 8192)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda m: PoolMap(m.epoch, m.nodes, m.buckets[:-1], m.namespaces, m.groups),
        lambda m: PoolMap(m.epoch, m.nodes[:1], m.buckets, m.namespaces, m.groups),
        lambda m: PoolMap(m.epoch, m.nodes + m.nodes[:1], m.buckets, m.namespaces, m.groups),
        lambda m: PoolMap(m.epoch, m.nodes, m.buckets, m.namespaces, m.groups, 1500),
    ],
    ids=[
        "a bucket too few",
        "a bucket of an unknown node",
        "a node twice",
        "chunks that there are not",
    ],
)
def test_a_map_that_contradicts_itself_is_refused(
    break_it: Callable[[PoolMap], PoolMap],
) -> None:
    node = pool_of([2])[0]
    before = node.core.pool
    with pytest.raises(PoolMapError):
        node.take_map(break_it(pool_map([2], epoch=2)))
    assert node.core.pool is before
    assert node.core.metrics.maps_refused_total == 1


def test_nodes_are_found_by_index_and_address() -> None:
    pool = Pool(pool_map([2, 3]), 2, "node-2")
    assert pool.homes_of(BlockId(1, key(1))) == (2, 3)
    assert pool.other_homes_of(BlockId(1, key(1))) == [3]
    assert pool.is_home(BlockId(1, key(1)))
    assert pool.another_node() == 3
    assert Pool(pool_map([1], nodes=1), 1, "node-1").another_node() == -1


def test_the_homes_of_many_blocks_are_those_of_each() -> None:
    buckets = [[1 + n % 3] for n in range(BUCKETS)]
    pool = Pool(msgspec.structs.replace(pool_map([2]), buckets=buckets), 2, "node-2")
    rng = random.Random(1)
    keys = [rng.randbytes(16) for _ in range(2000)]
    assert pool.homes_of_all(keys) == [pool.homes_of(BlockId(1, key)) for key in keys]
    assert len(set(pool.homes_of_all(keys))) == 3
    assert pool.homes_of_all([]) == []


def test_a_namespace_with_another_meaning_starts_empty() -> None:
    node = pool_of([2])[0]
    node.hold(1, b"old")
    changed = pool_map([2], epoch=2)
    info = NamespaceInfo(1, "t", "m", "another version", "l")
    node.take_map(PoolMap(2, changed.nodes, changed.buckets, [info], []))
    assert len(node.core.store) == 0


def test_a_bulk_put_by_a_newer_map_is_believed_and_by_an_older_one_not() -> None:
    node = pool_of([2])[0]
    meaning = bulk.meaning_of(NamespaceInfo(1, "t", "m", "1", "l"))
    header = PutHeader(key(1), 10, 5)
    serving = node.core.serving
    assert serving.begin_put(BulkPut(1, 1, meaning, [header]), header) == bulk.NOT_HOME
    room = serving.begin_put(BulkPut(1, 2, meaning, [header]), header)
    assert not isinstance(room, str)
    node.core.serving.abort_put(room)
    assert node.core.store.used_bytes == 0


def renamed(node: Node, info: NamespaceInfo | None, epoch: int = 2, homes: int = 2) -> None:
    """Namespace 1 means something else now, or nothing."""
    changed = pool_map([homes], epoch=epoch)
    infos = [info] if info is not None else []
    node.take_map(PoolMap(epoch, changed.nodes, changed.buckets, infos, []))


SECRET_INFO = NamespaceInfo(1, "t", "m", "1", "l", [], True)


def test_a_put_that_was_begun_before_the_secret_is_not_taken_after_it() -> None:
    writer, home, _ = pool_of([2])
    results = writer.put(1, b"under an plain key")
    (call,) = writer.calls()
    assert isinstance(call, PutCall)
    renamed(home, SECRET_INFO)
    header = PutHeader(call.copy.block.key, 21, call.copy.digest)
    put = BulkPut(1, call.epoch, call.meaning, [header])
    assert home.core.serving.refuse_put("node-1", put) == bulk.STALE
    assert len(home.core.store) == 0
    call.begin()
    call.ended(writer.now, bulk.STALE)
    assert [result.status for result in results] == [local.UNAVAILABLE], "it may be tried again"
    # Who has heard of the secret is not believed by who has not, either.
    late, early = pool_of([2])[:2]
    renamed(late, SECRET_INFO)
    late.put(1, b"under a secret's key")
    (call,) = late.calls()
    assert isinstance(call, PutCall)
    header = PutHeader(call.copy.block.key, 18, call.copy.digest)
    put = BulkPut(1, call.epoch, call.meaning, [header])
    assert early.core.serving.refuse_put("node-1", put) == bulk.STALE


@pytest.mark.parametrize("info", [SECRET_INFO, None], ids=["has_secret", "unknown"])
def test_a_fetch_ends_when_what_its_key_names_is_not_known_any_more(
    info: NamespaceInfo | None,
) -> None:
    reader, home, _ = pool_of([2])
    home.hold(1, b"x" * 5000)
    items = reader.get(1)
    assert items == []
    renamed(reader, info)
    assert [item.reason for item in items] == [MissReason.CANCELLED.value]
    exchange(reader, home)  # the home has not heard of it yet, and answers
    assert len(reader.core.store) == 0
    assert reader.core.store.used_bytes == 0


def heard(node: Node) -> list[NamespaceRequest]:
    asked = [message for message in node.said if isinstance(message, NamespaceRequest)]
    node.said.clear()
    return asked


def connected(node: Node) -> Node:
    node.core.control_connected(node.said.append)
    return node


def test_a_namespace_that_the_controller_has_forgotten_is_asked_for_again_and_kept() -> None:
    node = connected(pool_of([2])[0])
    node.hold(1, b"worth keeping")
    renamed(node, None)
    (asked,) = heard(node)
    assert (asked.tenant, asked.model, asked.version, asked.layout) == ("t", "m", "1", "l")
    assert node.core.reads.refusal(1) == local.UNKNOWN_NAMESPACE, "until there is an answer"
    renamed(node, None, epoch=3)
    assert heard(node) == [], "asked once"
    info = NamespaceInfo(1, "t", "m", "1", "l")
    node.core.control_message(node.now, NamespaceReply(asked.request, info))
    assert node.core.reads.refusal(1) is None
    assert node.get(1)[0].status == local.OK
    renamed(node, info, epoch=4)
    assert node.get(1)[0].status == local.OK


def test_an_answer_about_what_was_deleted_meanwhile_makes_nothing_known() -> None:
    node = connected(pool_of([2])[0])
    found: list[tuple[str, str]] = []
    node.core.ask_controller(
        lambda number: NamespaceRequest(number, "t", "m", "2", "l"),
        lambda _info, status, reason: found.append((status, reason)),
    )
    (asked,) = heard(node)
    changed = pool_map([2], epoch=2)
    node.take_map(msgspec.structs.replace(changed, deleted=[7]))
    node.core.control_message(
        node.now, NamespaceReply(asked.request, NamespaceInfo(7, "t", "m", "2", "l"))
    )
    assert found == [(local.UNAVAILABLE, "namespace 7 was deleted meanwhile")]
    assert node.core.reads.refusal(7) == local.UNKNOWN_NAMESPACE


def test_it_is_asked_for_on_the_next_connection_where_the_last_one_broke() -> None:
    node = connected(pool_of([2])[0])
    node.hold(1, b"worth keeping")
    renamed(node, None)
    assert len(heard(node)) == 1
    node.core.control_lost()
    assert len(node.core.store) == 1
    connected(node)
    renamed(node, None, epoch=3)
    assert len(heard(node)) == 1
    # Another node was quicker, and the map has it already.
    node.core.control_lost()
    connected(node)
    renamed(node, NamespaceInfo(1, "t", "m", "1", "l"), epoch=4)
    assert heard(node) == []
    assert node.get(1)[0].status == local.OK


@pytest.mark.parametrize("answer", ["refused", "another number", "has_secret", "another meaning"])
def test_what_cannot_be_had_again_is_forgotten(answer: str) -> None:
    node = connected(pool_of([2])[0])
    node.hold(1, b"of no use")
    renamed(node, None)
    (asked,) = heard(node)
    if answer == "refused":
        node.core.control_message(node.now, Refused("there is no such tenant", asked.request))
    elif answer == "another meaning":
        renamed(node, NamespaceInfo(1, "t", "m", "2", "l"), epoch=3)
    else:
        number = 2 if answer == "another number" else 1
        info = NamespaceInfo(number, "t", "m", "1", "l", [], answer == "has_secret")
        node.core.control_message(node.now, NamespaceReply(asked.request, info))
    assert len(node.core.store) == 0


def test_a_late_answer_about_a_forgotten_namespace_leaves_alone_who_has_its_number_now() -> None:
    node = connected(pool_of([2])[0])
    node.hold(1, b"of version 1")
    renamed(node, None)
    (asked,) = heard(node)
    renamed(node, NamespaceInfo(1, "t", "m", "2", "l"), epoch=3)
    node.hold(1, b"of version 2")
    info = NamespaceInfo(2, "t", "m", "1", "l")
    node.core.control_message(node.now, NamespaceReply(asked.request, info))
    assert len(node.core.store) == 1


class Below:
    """A tier below, which answers when the test says so."""

    patience_s = 2.0

    def __init__(self, tier: str, *, is_shared: bool) -> None:
        self.tier = tier
        self.is_shared = is_shared
        self.asked: list[Callable[[float, str, int, float], None]] = []

    def holds(self, _block: BlockId) -> bool:
        return True

    def read(
        self,
        _block: BlockId,
        _begin: Callable[[int], memoryview | None],
        ended: Callable[[float, str, int, float], None],
    ) -> bool:
        self.asked.append(ended)
        return True

    def promoted(self, _copy: Copy) -> None:
        pass


def test_a_disk_that_fails_has_the_homes_asked_before_the_store_that_all_share() -> None:
    node, home, _ = pool_of([2])
    disk, store = Below("ssd", is_shared=False), Below("cold", is_shared=True)
    node.core.reads.sources = [disk, store]
    node.get(1)
    (failed,) = disk.asked
    failed(node.now, "it cannot be read", 0, 0.0)
    assert not store.asked
    exchange(node, home)
    assert len(store.asked) == 1, "no home has it"
    assert len(disk.asked) == 1


@pytest.mark.parametrize("comes", [False, True])
def test_nothing_is_left_to_hand_over_only_once_the_disk_is_there(comes: bool) -> None:
    node = connected(Node(1))
    node.core.awaits_tiers = True  # another agent of this node still has its files
    node.take_map(msgspec.structs.replace(pool_map([1, 2]), settled=1))
    assert node.said == []
    if comes:
        over_a_disk(node)
    else:
        node.core.await_tiers_no_more()
    (told,) = node.said
    assert isinstance(told, HandedOver)
    assert told.left == 0


def test_a_namespace_for_other_nodes_is_left_to_them() -> None:
    node = connected(Node(1))
    node.take_map(pool_map([1], allowed=["node-2"]))
    node.hold(1, b"kept for node-2")
    renamed(node, None)
    assert heard(node) == []
    renamed(node, NamespaceInfo(1, "t", "m", "1", "l", ["node-2"]), epoch=3)
    assert len(node.core.store) == 1


def test_a_client_does_not_read_another_namespace_under_the_number_that_it_was_told() -> None:
    node = connected(pool_of([2])[0])
    session, replies = session_of(node)
    session.handle(node.now, local.FindNamespace(1, "t", "m", "1", "l"))
    (asked,) = heard(node)
    info = NamespaceInfo(1, "t", "m", "1", "l")
    node.core.control_message(node.now, NamespaceReply(asked.request, info))
    node.hold(1, b"of version 1")
    session.handle(node.now, local.Get(2, 1, [key(1)], 1.0))
    assert isinstance(replies[-1], local.Got)
    renamed(node, NamespaceInfo(1, "t", "m", "2", "l"))
    node.hold(1, b"of version 2")
    session.handle(node.now, local.Get(3, 1, [key(1)], 1.0))
    failed = replies[-1]
    assert isinstance(failed, local.Failed)
    assert failed.status == local.UNKNOWN_NAMESPACE
    assert "stands for another one now" in failed.reason
    other, others_replies = session_of(node)
    other.handle(node.now, local.Get(4, 1, [key(1)], 1.0))
    assert isinstance(others_replies[-1], local.Got), "it was told nothing else"


def session_of(node: Node) -> tuple[Session, list[local.AgentReply]]:
    replies: list[local.AgentReply] = []
    return Session(node.core, replies.append), replies


def ahead_node() -> Node:
    node = Node(1, slabs=64)
    node.take_map(pool_map([1]))
    return node


def ahead_of(
    session: Session, replies: list[local.AgentReply], node: Node, number: int, size: int
) -> local.Extent | None:
    """Put a block of a client that says that another follows; the room that came for that."""
    session.handle(node.now, local.Alloc(1, 1, [key(number)], [size]))
    allocated = replies.pop()
    assert isinstance(allocated, local.Allocated)
    session.handle(node.now, local.Commit(2, [allocated.extents[0].ticket], "local", True))
    committed = replies.pop()
    assert isinstance(committed, local.Committed)
    return committed.room


def test_a_block_is_put_by_one_request_in_room_that_was_given_ahead() -> None:
    node = ahead_node()
    session, replies = session_of(node)
    room = ahead_of(session, replies, node, 1, 100)
    for number in range(2, 6):
        assert room is not None
        node.memory[room.offset : room.offset + 100] = bytes([number]) * 100
        session.handle(node.now, local.Put(3, 1, [key(number)], room.ticket, "local"))
        committed = replies.pop()
        assert isinstance(committed, local.Committed)
        assert [block.status for block in committed.blocks] == [local.OK]
        copy = node.core.store.peek(BlockId(1, key(number)))
        assert copy is not None
        assert (copy.offset, copy.size_bytes) == (room.offset, 100)
        assert copy.digest == digest_of(bytes([number]) * 100)
        room = committed.room
    assert node.core.ahead_bytes > 0
    assert node.core.store.peek(BlockId(1, b"")) is None
    node.core.store.check()
    session.close()
    assert node.core.ahead_bytes == 0
    node.core.store.check()


def test_room_that_was_given_ahead_is_for_a_put_of_its_namespace_alone() -> None:
    node = ahead_node()
    node.take_map(pool_map([1], epoch=9, namespaces=(1, 2)))
    session, replies = session_of(node)
    room = ahead_of(session, replies, node, 1, 100)
    assert room is not None
    session.handle(node.now, local.Alloc(3, 1, [key(2)], [100]))
    allocated = replies.pop()
    assert isinstance(allocated, local.Allocated)
    for wrong in (
        local.Put(4, 1, [key(2)], allocated.extents[0].ticket, "local"),
        local.Put(4, 1, [key(2)], 99, "local"),
        local.Put(4, 1, [key(2)], 0, "local"),
        local.Put(4, 2, [key(2)], room.ticket, "local"),
        local.Commit(4, [room.ticket], "local"),
    ):
        session.handle(node.now, wrong)
        failed = replies.pop()
        assert isinstance(failed, local.Failed), wrong
        assert failed.status == local.INVALID
    assert [block.key for block in node.core.store.blocks()] == [key(1)]
    session.handle(node.now, local.Abort(5, [room.ticket, allocated.extents[0].ticket]))
    assert replies.pop() == local.Ack(5, 2)
    assert node.core.ahead_bytes == 0
    node.core.store.check()


def test_rooms_are_given_back_beside_one_that_an_agent_before_has_put() -> None:
    """A client whose agent died in the middle of a put names all its rooms to the next."""
    node = pool_of([1])[0]
    session, replies = session_of(node)
    session.handle(node.now, local.Alloc(1, 1, [key(1), key(2)], [100, 100]))
    allocated = replies.pop()
    assert isinstance(allocated, local.Allocated)
    tickets = [extent.ticket for extent in allocated.extents]
    session.handle(node.now, local.Commit(2, tickets[:1], "local"))
    free = node.core.store.used_bytes
    session.handle(node.now, local.Abort(3, tickets))
    assert replies.pop() == local.Ack(3, 1)
    assert node.core.store.used_bytes < free
    session.handle(node.now, local.Abort(4, tickets))
    assert isinstance(replies.pop(), local.Failed)


def test_rooms_given_ahead_are_few() -> None:
    node = ahead_node()
    most = node.core.store.allocator.capacity_bytes // AHEAD_OF_ARENA
    sessions = [session_of(node) for _ in range(20)]
    rooms = [
        ahead_of(session, replies, node, number, SLAB)
        for number, (session, replies) in enumerate(sessions)
    ]
    given = [room for room in rooms if room is not None]
    assert node.core.ahead_bytes == len(given) * SLAB == most
    # None that is larger than all of them may be, and no second one.
    session, replies = sessions[-1]
    assert ahead_of(session, replies, node, 30, most + SLAB) is None
    session, replies = sessions[0]
    sessions[1][0].close()
    assert ahead_of(session, replies, node, 31, SLAB) is None
    for session, _ in sessions:
        session.close()
    assert node.core.ahead_bytes == 0
    node.core.store.configure({1: StoreRules(quota_bytes=AHEAD_OF_QUOTA * SLAB - 1)})
    session, replies = session_of(node)
    assert ahead_of(session, replies, node, 32, SLAB) is None
    assert ahead_of(session, replies, node, 33, 10) is not None


def test_a_chain_of_half_a_key_is_refused_and_the_next_is_answered() -> None:
    node = pool_of([1])[0]
    node.put(1, b"here")
    session, replies = session_of(node)
    session.handle(node.now, local.Exists(1, 1, key(1) + key(2)[:8]))
    assert isinstance(replies[-1], local.Failed)
    assert replies[-1].status == local.INVALID
    session.handle(node.now, local.Exists(2, 1, key(1) + key(2)))
    assert replies[-1] == local.Ack(2, 1)
    assert session.in_flight == 0


def test_a_session_answers_every_request_once_and_gives_all_back_at_its_end() -> None:
    node = pool_of([1])[0]
    session, replies = session_of(node)
    keys = [key(number) for number in range(4)]
    session.handle(node.now, local.Alloc(1, 1, keys, [100, 200, 300, SLAB * 99]))
    allocated = replies.pop()
    assert isinstance(allocated, local.Allocated)
    assert [e.status for e in allocated.extents] == ["ok", "ok", "ok", "no_room"]
    tickets = [e.ticket for e in allocated.extents[:3]]
    session.handle(node.now, local.Commit(2, tickets[:1]))
    session.handle(node.now, local.Abort(3, tickets[1:2]))
    session.handle(node.now, local.Commit(4, tickets[:1]))
    session.handle(node.now, local.Commit(5, [tickets[2], tickets[2]]))
    assert [type(r).__name__ for r in replies] == ["Committed", "Ack", "Failed", "Failed"]
    session.handle(node.now, local.Get(6, 1, keys[:1], 1.0))
    session.handle(node.now, local.Get(7, 1, keys[:1], 1.0))
    session.handle(node.now, local.Pin(8, 1, keys[:2]))
    copy = node.core.store.peek(BlockId(1, keys[0]))
    assert copy is not None
    assert copy.pins == 3
    got = replies[4]
    assert isinstance(got, local.Got)
    session.handle(node.now, local.Release([got.blocks[0].handle, 999_999]))
    assert copy.pins == 2
    assert node.core.metrics.local_unknown_handles_total == 1
    assert session.in_flight == 0
    session.close()
    assert copy.pins == 0
    assert node.core.store.used_bytes == copy.reserved_bytes
    node.core.store.check()


def test_what_a_client_that_has_gone_waited_for_is_fetched_no_more() -> None:
    reader, home, _ = pool_of([2])
    home.hold(1, b"late")
    session, replies = session_of(reader)
    session.handle(reader.now, local.Get(1, 1, [key(1)], 1.0))
    session.close()
    assert reader.core.reads.waiting == 0
    exchange(reader, home)
    assert reader.core.store.peek(BlockId(1, key(1))) is None
    assert replies == []
    assert reader.core.metrics.local_replies_dropped_total == 1
    reader.core.requester.check()
    reader.core.reads.check()
    reader.core.store.check()


def test_a_get_that_is_given_up_is_answered_at_once_with_what_has_come() -> None:
    reader, home, _ = pool_of([2])
    reader.hold(1, b"here")
    home.hold(2, b"there")
    session, replies = session_of(reader)
    session.handle(reader.now, local.Get(5, 1, [key(1), key(2)], 1.0))
    session.handle(reader.now, local.Release([], [4, 5, 6]))
    (got,) = replies
    assert isinstance(got, local.Got)
    assert [(one.status, one.reason) for one in got.blocks] == [
        (local.OK, ""),
        (local.MISS, "given_up"),
    ]
    assert reader.core.reads.waiting == reader.core.requester.fetches_in_flight == 0
    assert reader.core.metrics.by_namespace.of(1).misses == {"given_up": 1}
    session.handle(reader.now, local.Release([got.blocks[0].handle], [5]))
    exchange(reader, home)
    assert len(replies) == 1, "a get is answered once"
    reader.core.store.check()


@pytest.mark.parametrize("who", ["another client", "prefetch", "keep", "reader group", "nobody"])
def test_a_fetch_that_others_count_on_outlives_who_gave_it_up(who: str) -> None:
    reader, home, _ = pool_of([2])
    home.hold(1, b"wanted")
    block = BlockId(1, key(1))
    session, replies = session_of(reader)
    other, others_replies = session_of(reader)
    kept: list[bool] = []
    group = 7 if who == "reader group" else 0
    session.handle(reader.now, local.Get(1, 1, [key(1)], 1.0, group=group))
    match who:
        case "another client":
            other.handle(reader.now, local.Get(1, 1, [key(1)], 1.0))
        case "prefetch":
            other.handle(reader.now, local.Prefetch(1, 1, [key(1)], 1.0))
        case "keep":
            reader.core.reads.keep(reader.now, block, 6, digest_of(b"wanted"), kept.append)
    session.handle(reader.now, local.Release([], [1]))
    assert len(replies) == 1
    exchange(reader, home)
    copy = reader.core.store.peek(block)
    assert (copy is None) == (who == "nobody")
    assert kept == ([True] if who == "keep" else [])
    if who == "another client":
        (got,) = others_replies
        assert isinstance(got, local.Got)
        assert got.blocks[0].status == local.OK
    else:
        assert copy is None or copy.pins == 0


def test_a_get_that_ends_after_its_client_leaves_nothing_pinned() -> None:
    reader, home, _ = pool_of([2])
    home.hold(1, b"late")
    session, replies = session_of(reader)
    reader.core.reads.prefetch(reader.now, 1, [key(1)], reader.now + 1.0)
    session.handle(reader.now, local.Get(1, 1, [key(1)], 1.0))
    session.close()
    exchange(reader, home)
    copy = reader.core.store.peek(BlockId(1, key(1)))
    assert copy is not None
    assert copy.pins == 0
    assert replies == []


def test_a_request_for_an_unknown_namespace_fails_as_a_whole() -> None:
    node = pool_of([1])[0]
    session, replies = session_of(node)
    session.handle(node.now, local.Get(1, 9, [key(1)], 1.0))
    session.handle(node.now, local.Alloc(2, 1, [key(1)], []))
    session.handle(node.now, local.FindNamespace(3, "t", "m", "v", "l"))
    statuses = [r.status for r in replies if isinstance(r, local.Failed)]
    assert statuses == [local.UNKNOWN_NAMESPACE, local.INVALID, local.UNAVAILABLE]


def test_a_namespace_of_the_last_map_is_found_while_the_controller_is_away() -> None:
    node = connected(pool_of([1])[0])
    session, replies = session_of(node)
    session.handle(node.now, local.FindNamespace(1, "t", "m", "1", "l"))
    assert replies == [], "the controller is asked"
    node.core.control_lost()
    session.handle(node.now, local.FindNamespace(2, "t", "m", "1", "l"))
    session.handle(node.now, local.FindNamespace(3, "t", "m", "2", "l"))
    info = NamespaceInfo(1, "t", "m", "1", "l")
    assert replies[:2] == [local.FoundNamespace(1, info), local.FoundNamespace(2, info)]
    assert isinstance(replies[2], local.Failed)
    assert replies[2].status == local.UNAVAILABLE


def test_a_refusal_says_what_is_wrong_with_the_namespace() -> None:
    node = pool_of([1])[0]
    session, replies = session_of(node)
    session.handle(node.now, local.Get(1, 9, [key(1)], 1.0))
    (failed,) = replies
    assert isinstance(failed, local.Failed)
    assert failed.reason == "the pool has no namespace 9"


def test_counters_have_one_name_each_and_cover_every_part() -> None:
    counters = pool_of([1])[0].core.counters()
    assert all(isinstance(value, float) for value in counters.values())
    for name in (
        "payload_bytes_sent_udp_total",
        "payload_bytes_sent_bulk_get_total",
        "payload_bytes_sent_bulk_put_total",
        "hits_switch_total",
        "misses_not_found_total",
        "wrong_digest_total",
        "fetch_seconds_count",
        "arena_used_bytes",
        "store_evictions_total",
    ):
        assert name in counters


@pytest.mark.parametrize("alone", [[], [1]])
def test_reads_of_a_namespace_that_is_alone_gather_for_nobody(alone: list[int]) -> None:
    node = Node(1)
    node.take_map(msgspec.structs.replace(pool_map([2]), alone=alone))
    node.core.reads.get(node.now, 1, [key(1)], node.now + 1, lambda _batch: None, gather_ms=50)
    gathers = [frame.gather for _, frame in node.core.frames_to_send(node.now, 9)]
    assert gathers == ([0] if alone else [50])


def test_a_report_says_once_what_came_wrong_from_the_switch() -> None:
    node = Node(1)
    node.take_map(pool_map([2]))
    node.core.reads.get(node.now, 1, [key(1)], node.now + 1, lambda _batch: None)
    wrong = Frame(
        *(OP_DATA, 1, key(1), 0, FLAG_LAST | FLAG_RESIDENT),
        digest=7, size=3, payload=b"abc" + bytes(1021),
    )  # fmt: skip
    node.core.receive(node.now, 2, wrong)
    node.core.after_receiving(node.now)
    assert node.core.renewal().wrong == [(1, key(1), 7)]
    assert node.core.renewal().wrong == []


def test_a_report_says_what_each_namespace_got_from_elsewhere() -> None:
    node = Node(1)
    node.take_map(pool_map([2], namespaces=(1, 2)))
    assert node.core.renewal().reads == []
    hits = node.core.metrics.by_namespace.of(2).hits
    hits.update({"local": 9, "shared": 3, "switch": 2, "home": 1, "bulk": 1})
    assert node.core.renewal().reads == [NamespaceReads(2, 7, 3, 2)]
