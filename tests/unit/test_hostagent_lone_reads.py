"""Lone reads: what a node does with the offers of homes, and with batches of gets.

Agents' cores and the bulk link's, put before each other without a network or a clock. Oracle: the
bytes that homes hold, and the frames, requests and outcomes written out here. Cannot see: sockets
(`test_hostagent_pool`), and the requester's own states (`test_protocol_requester`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.fetches import GetBatch, GetItem
from kvcast.hostagent.core.reads import FEW_FOLLOWERS
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.links.bulk import UNREACHABLE, BulkOptions
from kvcast.protocol.links.bulk_callee import BulkCallee
from kvcast.protocol.links.bulk_caller import BulkCaller, BulkConnection, Complete, Connect
from kvcast.protocol.messages import local
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    BulkGet,
    BulkHello,
    CallerMessage,
    WantedBlock,
)
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    BlockRef,
    NamespaceInfo,
    NodeInfo,
    PoolMap,
    Registered,
    Residents,
)
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.wire import (
    BUCKETS,
    FLAG_SHARED,
    OP_DATA,
    OP_MISS,
    OP_OFFER,
    OP_READ,
    SEGMENT_BYTES,
    BlockId,
    Frame,
    digest_of,
)

SLAB = 1 << 18
BIG = 3 * SEGMENT_BYTES + 1000


def key(number: int) -> bytes:
    return (number << 10).to_bytes(16, "big")


def noise(number: int, size_bytes: int) -> bytes:
    return random.Random(number).randbytes(size_bytes)


class Node:
    """One core, with all that it says to others at hand."""

    def __init__(self, index: int, homes: list[int]) -> None:
        self.index = index
        self.memory = memoryview(bytearray(64 * SLAB))
        self.core = AgentCore(
            AgentOptions(node_id=f"node-{index}"),
            Store(Allocator(64 * SLAB, SLAB)),
            self.memory,
            random.Random(index),
        )
        self.core.registered(Registered(CONTROL_PROTOCOL_VERSION, index, 3.0, 0))
        self.give_map(homes)
        self.link = BulkCaller(
            f"node-{index}", BulkOptions(), self.core.metrics, self.core.serving.view
        )

    def give_map(
        self, homes: list[int], epoch: int = 1, namespaces: tuple[int, ...] = (1,)
    ) -> None:
        nodes = [
            NodeInfo(n, f"node-{n}", f"10.7.0.{n}", f"02:00:00:00:00:0{n}", n, 9, f"10.8.0.{n}", n)
            for n in (1, 2, 3)
        ]
        infos = [NamespaceInfo(n, "t", "m", str(n), "l", []) for n in namespaces]
        buckets = [list(homes) for _ in range(BUCKETS)]
        self.core.control_message(0.0, PoolMap(epoch, nodes, buckets, infos, []))

    def hold(self, number: int, data: bytes, digest: int = 0) -> None:
        copy = self.core.store.reserve(BlockId(1, key(number)), len(data))
        self.memory[copy.offset : copy.offset + len(data)] = data
        self.core.store.commit(copy, digest or digest_of(data), home=True)

    def get(
        self, numbers: list[int], deadline_s: float = 5.0, now: float = 0.0, **rest: int
    ) -> list[GetItem]:
        """Start a get; the list fills when it ends."""
        items: list[GetItem] = []

        def answered(batch: GetBatch) -> None:
            items.extend(item for item in batch.items if item is not None)

        keys = [key(number) for number in numbers]
        self.core.reads.get(now, 1, keys, deadline_s, answered, **rest)
        return items

    def bytes_of(self, item: GetItem) -> bytes:
        assert item.copy is not None
        return bytes(self.memory[item.copy.offset : item.copy.offset + item.copy.size_bytes])


class Pool:
    """Nodes 1 to 3 and what is between them. `change` a frame, or lose it (None); `spoil` what is
    sent by TCP; `listens`: whether a connection is taken, but for those to nodes that it `refuses`.
    """

    def __init__(self, homes: list[int] | None = None) -> None:
        self.nodes = {index: Node(index, homes or [2]) for index in (1, 2, 3)}
        self.reader, self.home = self.nodes[1], self.nodes[2]
        self.now = 0.0
        self.change: Callable[[Frame], Frame | None] = lambda frame: frame
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self.listens = True
        self.refuses: set[int] = set()
        self.reads: list[tuple[bytes, int]] = []
        self.requests = 0
        self._callees: dict[BulkConnection, BulkCallee[object]] = {}

    def settle(self) -> None:
        """Carry frames and bytes until nobody has anything to say."""
        while self._frames() or self._calls():
            pass
        for node in self.nodes.values():
            node.core.requester.check()
            node.core.reads.check()
            node.link.check()
            node.core.store.check()

    def meanwhile(self) -> None:
        """Carry frames, and what is asked for by TCP, but nothing of its answers."""
        held, self.spoil = self.spoil, lambda data: data
        while self._frames() or self._calls(answers=False):
            pass
        self.spoil = held

    def pass_time(self, seconds: float) -> None:
        """Let all timers come up that do within so much time."""
        until = self.now + seconds
        while True:
            self.settle()
            timers = [node.core.get_timer(self.now) for node in self.nodes.values()]
            times = [when for when in timers if when is not None]
            for connection in self._callees:
                if not connection.closed and (t := connection.get_timer()) is not None:
                    times.append(t)
            when = min(times, default=until)
            if when > until:
                break
            self.now = max(self.now, when)
            for node in self.nodes.values():
                node.core.handle_timer(self.now)
            for connection in list(self._callees):
                connection.handle_timer(self.now)
            if when == until:
                break
        self.now = until

    def _frames(self) -> bool:
        moved = False
        for node in self.nodes.values():
            for target, frame in node.core.frames_to_send(self.now, 1000):
                moved = True
                payload = bytes(frame.payload)
                if frame.op == OP_DATA:
                    payload = payload.ljust(1024, b"\0")
                if frame.op == OP_READ:
                    self.reads.append((frame.key, frame.segment))
                sent = Frame(
                    frame.op, frame.namespace, frame.key, frame.segment, frame.flags, frame.group,
                    frame.digest, frame.size, frame.chunk, frame.gather, frame.wanted, frame.tag,
                    payload,
                )  # fmt: skip
                changed = self.change(sent)
                if changed is not None:
                    self.nodes[target].core.receive(self.now, node.index, changed)
            node.core.after_receiving(self.now)
        return moved

    def _calls(self, *, answers: bool = True) -> bool:
        moved = False
        for node in self.nodes.values():
            pool = node.core.pool
            assert pool is not None
            node.link.use_nodes(self.now, pool.nodes)
            calls = list(node.core.outbox.calls)
            node.core.outbox.calls.clear()
            node.link.ask(self.now, *calls)
            if node.core.outbox.unwanted:
                node.core.outbox.unwanted = False
                node.link.end_unwanted(self.now)
            for instruction in node.link.instructions():
                moved = True
                match instruction:
                    case Complete(call=call, outcome=outcome):
                        call.ended(self.now, outcome)
                    case Connect(connection=connection) if (
                        self.listens and connection.node.index not in self.refuses
                    ):
                        other = self.nodes[connection.node.index].core
                        self._callees[connection] = BulkCallee(
                            self.now, other.serving, BulkOptions(), other.metrics
                        )
                        connection.connected(self.now)
                    case Connect(connection=connection):
                        connection.lost(self.now)
        for connection, callee in list(self._callees.items()):
            while not connection.closed and (data := connection.bytes_to_send(self.now, 1 << 20)):
                callee.received(self.now, data)
                moved = True
            while (
                answers and not callee.closed and (data := callee.bytes_to_send(self.now, 1 << 20))
            ):
                connection.received(self.now, self.spoil(data))
                moved = True
                if connection.closed:
                    callee.lost(self.now)
        return moved


def check_at_rest(pool: Pool) -> None:
    for node in pool.nodes.values():
        assert node.core.reads.waiting == 0
        assert node.core.requester.fetches_in_flight == 0
        held = [c for b in node.core.store.blocks() if (c := node.core.store.peek(b)) and c.pins]
        assert len(held) == 0 or node is pool.reader, "the home still holds what it has sent"


def test_what_the_probe_brought_stays_and_the_rest_comes_by_tcp() -> None:
    pool = Pool()
    data = noise(1, BIG)
    pool.home.hold(1, data)
    held = pool.home.core.store.peek(BlockId(1, key(1)))
    assert held is not None
    held.depth = 3
    items = pool.reader.get([1])
    pool.settle()
    assert [(item.status, item.tier) for item in items] == [(local.OK, "bulk")]
    assert pool.reader.bytes_of(items[0]) == data
    assert pool.reads == [(key(1), 0)]
    sent = pool.home.core.values()
    assert sent["payload_bytes_sent_udp_total"] == SEGMENT_BYTES
    assert sent["payload_bytes_sent_bulk_get_total"] == BIG - SEGMENT_BYTES
    came = pool.reader.core.values()
    assert came["payload_bytes_received_udp_total"] == SEGMENT_BYTES
    assert came["payload_bytes_received_bulk_get_total"] == BIG - SEGMENT_BYTES
    assert came["hits_bulk_total"] == 1
    (heat,) = pool.home.core.renewal().hot
    assert (heat.reads, heat.readers, heat.depth) == (4, 1, 3), (
        "the controller hears of what came by TCP, too"
    )
    check_at_rest(pool)


@pytest.mark.parametrize("first_size", [100, BIG])
def test_of_a_batch_only_the_first_block_probes(first_size: int) -> None:
    pool = Pool()
    sizes = [first_size, 65_536, 1, 200_000, *[5000] * 60]
    blocks = {number: noise(number, size) for number, size in enumerate(sizes)}
    for number, data in blocks.items():
        if number != 7:
            pool.home.hold(number, data)
    items = pool.reader.get(list(blocks))
    pool.settle()
    assert items[7].status == local.MISS
    for number, item in enumerate(items):
        if number != 7:
            assert pool.reader.bytes_of(item) == blocks[number]
            assert item.tier == ("home" if number == 0 and first_size == 100 else "bulk")
    assert pool.reads == [(key(0), 0)], "that 7 is not there, the answer by TCP has said"
    assert pool.home.core.metrics.bulk_requests_served_total == 1
    check_at_rest(pool)


def test_a_batch_whose_probe_is_shared_is_read() -> None:
    pool = Pool()

    def shared(frame: Frame) -> Frame:
        flags = FLAG_SHARED if frame.op == OP_DATA else 0
        return Frame(
            frame.op, frame.namespace, frame.key, frame.segment, frame.flags | flags, frame.group,
            frame.digest, frame.size, frame.chunk, frame.gather, frame.wanted, frame.tag,
            frame.payload,
        )  # fmt: skip

    pool.change = shared
    blocks = {number: noise(number, BIG) for number in range(3)}
    for number, data in blocks.items():
        pool.home.hold(number, data)
    items = pool.reader.get(list(blocks))
    pool.settle()
    assert [item.tier for item in items] == ["shared"] * 3
    assert [pool.reader.bytes_of(item) for item in items] == list(blocks.values())
    assert pool.home.core.metrics.bulk_requests_served_total == 0
    check_at_rest(pool)


def test_what_the_switch_keeps_is_read_and_does_not_follow() -> None:
    """Only READs are answered from its memory, and only their answers fill it."""
    pool = Pool()
    blocks = {number: noise(number, BIG) for number in range(3)}
    for number, data in blocks.items():
        pool.home.hold(number, data)
    core = pool.reader.core
    core.control_message(0.0, Residents([BlockRef(1, key(0)), BlockRef(1, key(2))]))
    items = pool.reader.get(list(blocks))
    pool.settle()
    assert [item.tier for item in items] == ["home", "bulk", "home"]
    assert [pool.reader.bytes_of(item) for item in items] == list(blocks.values())
    assert {(k, s) for k, s in pool.reads if k == key(2)} == {(key(2), s) for s in range(4)}
    check_at_rest(pool)


def test_who_looks_for_company_neither_probes_nor_follows() -> None:
    for company in ({"gather_ms": 1}, {"group": 1}):
        pool = Pool()
        for number in range(3):
            pool.home.hold(number, noise(number, BIG))
        items = pool.reader.get([0, 1, 2], **company)
        pool.pass_time(0.1)
        assert [item.tier for item in items] == ["home"] * 3
        assert pool.home.core.metrics.bulk_requests_served_total == 0


@pytest.mark.parametrize(
    "why", ["nobody listens", "cut off", "wrong bytes", "stalls", "gone", "other copy"]
)
def test_an_offer_that_leads_nowhere_is_replaced_by_reads(why: str) -> None:
    pool = Pool()
    blocks = {number: noise(number, BIG) for number in range(3)}
    for number, data in blocks.items():
        pool.home.hold(number, data)
    seen = iter(range(1000))
    if why == "nobody listens":
        pool.listens = False
    elif why == "cut off":
        pool.spoil = lambda data: b"\0\0\0\0" if next(seen) == 0 else data
    elif why == "wrong bytes":
        pool.spoil = lambda data: data[:-1] + bytes([data[-1] ^ 1]) if next(seen) > 0 else data
    elif why == "stalls":
        pool.spoil = lambda data: data if next(seen) == 0 else b""
    else:
        # The home restarts between the offer and the get, or computes the block anew.
        def forgets(frame: Frame) -> Frame:
            if frame.op == OP_DATA and frame.segment == 0 and frame.chunk == 63:
                for number, data in blocks.items():
                    pool.home.core.store.drop(BlockId(1, key(number)))
                    if why == "other copy":
                        blocks[number] = data = data[:-1] + b"!"
                        pool.home.hold(number, data)
                pool.change = lambda frame: frame
            return frame

        pool.change = forgets
    items = pool.reader.get(list(blocks))
    pool.pass_time(4.0)
    if why == "gone":
        assert [item.reason for item in items] == ["not_found"] * 3
    else:
        assert [pool.reader.bytes_of(item) for item in items] == list(blocks.values())
        tiers = {item.tier for item in items}
        assert tiers == ({"bulk", "home"} if why == "other copy" else {"home"})
    assert (pool.reader.core.metrics.bulk_wrong_digest_total > 0) == (why == "wrong bytes")
    check_at_rest(pool)


def test_every_get_of_a_batch_ends_at_its_deadline_whatever_the_home_does() -> None:
    pool = Pool()
    for number in range(5):
        pool.home.hold(number, noise(number, BIG))
    pool.spoil = lambda _data: b""
    items = pool.reader.get([0, 1, 2, 3, 4], deadline_s=0.5)
    pool.pass_time(0.49)
    assert items == []
    pool.pass_time(0.02)
    assert [item.reason for item in items] == ["deadline"] * 5
    pool.pass_time(10.0)
    check_at_rest(pool)
    assert pool.reader.core.store.used_bytes == 0, "what had come is given back"


def test_a_home_that_does_not_answer_is_left_and_its_batch_is_read_elsewhere() -> None:
    pool = Pool([2, 3])
    blocks = {number: noise(number, 5000) for number in range(4)}
    for number, data in blocks.items():
        pool.nodes[3].hold(number, data)
    pool.change = lambda frame: None if frame.op == OP_READ and not pool.reads[6:] else frame
    items = pool.reader.get(list(blocks))
    pool.pass_time(4.0)
    assert [pool.reader.bytes_of(item) for item in items] == list(blocks.values())
    check_at_rest(pool)


def test_an_offer_names_the_bulk_link_and_no_offer_sends_a_reader_elsewhere() -> None:
    """Anybody on the way can write an OFFER. A reader connects to where the map says."""
    pool = Pool()
    offers = []

    def forged(frame: Frame) -> Frame:
        if frame.op == OP_OFFER:
            offers.append(frame.payload)
            payload = bytes(frame.payload[:2]) + b"\xff" * 22
            return Frame(
                frame.op, frame.namespace, frame.key, digest=frame.digest, size=frame.size,
                tag=frame.tag, payload=payload,
            )  # fmt: skip
        return frame

    pool.change = forged
    pool.home.hold(1, noise(1, BIG))
    items = pool.reader.get([1])
    pool.settle()
    assert items[0].tier == "bulk"
    assert offers == [bytes([1, 0, 0, 2, 10, 8, 0, 2]) + bytes(16)]


def test_blocks_that_follow_a_probe_are_let_go_with_their_namespace() -> None:
    pool = Pool()
    pool.change = lambda _frame: None
    items = pool.reader.get([1, 2, 3])
    joined = pool.reader.get([2])
    pool.reader.give_map([2], epoch=2, namespaces=())
    assert [item.reason for item in (*items, *joined)] == ["cancelled"] * 4
    pool.pass_time(6.0)
    check_at_rest(pool)


def test_a_batch_that_is_given_up_takes_along_what_follows_its_probe_and_no_other_needs() -> None:
    pool = Pool()
    for number in (1, 2, 3, 4):
        pool.home.hold(number, noise(number, BIG))
    reads = pool.reader.core.reads
    batch = reads.get(0.0, 1, [key(n) for n in (1, 2, 3)], 5.0, lambda _batch: None)
    joined = pool.reader.get([2])
    reads.give_up(0.0, batch)
    assert [item.reason for item in batch.items if item] == ["given_up"] * 3
    assert reads.waiting == 2, "the probe goes on, since what follows it is wanted"
    pool.settle()
    assert [item.status for item in joined] == [local.OK]
    assert pool.reader.core.store.peek(BlockId(1, key(3))) is None
    batch = reads.get(0.0, 1, [key(n) for n in (3, 4)], 5.0, lambda _batch: None)
    reads.give_up(0.0, batch)
    assert reads.waiting == 0
    pool.settle()
    check_at_rest(pool)


def test_what_is_given_up_while_it_comes_by_tcp_leaves_its_room_and_the_link() -> None:
    pool = Pool()
    size_bytes = 3 << 20
    pool.home.hold(1, noise(1, size_bytes))
    batches: list[GetBatch] = []
    reads = pool.reader.core.reads
    came = 0

    def give_up_half_way(data: bytes) -> bytes:
        nonlocal came
        came += len(data)
        if came > 1 << 20 and batches[0].left:
            reads.give_up(0.0, batches[0])
            pool.reader.link.end_unwanted(0.0)
        return data

    pool.spoil = give_up_half_way
    batches.append(reads.get(0.0, 1, [key(1)], 5.0, lambda _batch: None))
    pool.settle()
    assert [item.reason for item in batches[0].items if item] == ["given_up"]
    assert came < size_bytes, "the rest does not come"
    assert pool.reader.core.store.used_bytes == 0
    assert pool.reader.core.metrics.bulk_failures_total == 0
    check_at_rest(pool)
    items = pool.reader.get([1])
    pool.settle()
    assert [item.status for item in items] == [local.OK]


def test_a_follower_can_be_joined_kept_and_waited_for_longer() -> None:
    pool = Pool()
    for number in (1, 2):
        pool.home.hold(number, noise(number, BIG))
    kept: list[bool] = []
    first = pool.reader.get([1, 2], deadline_s=1.0)
    second = pool.reader.get([2], deadline_s=3.0)
    pool.reader.core.reads.keep(0.0, BlockId(1, key(2)), BIG, 0, kept.append)
    assert pool.reader.core.metrics.gets_joined_total == 2
    pool.settle()
    assert [item.status for item in (*first, *second)] == [local.OK] * 3
    assert kept == [True]


def test_a_get_that_joins_a_fetch_finds_what_was_put_behind_that_ones_back() -> None:
    pool = Pool()
    joined: list[list[GetItem]] = []

    def change(frame: Frame) -> Frame:
        if frame.op == OP_MISS and not joined:
            pool.home.hold(1, noise(1, BIG))
            joined.extend(pool.reader.get([1, 2], deadline_s, now=0.1) for deadline_s in (3.0, 4.0))
        return frame

    pool.change = change
    first = pool.reader.get([1, 2])
    pool.pass_time(1.0)
    assert [(item.status, item.reason) for item in first] == [(local.MISS, "not_found")] * 2
    for later in joined:
        assert [item.status for item in later] == [local.OK, local.MISS]
        assert pool.reader.bytes_of(later[0]) == noise(1, BIG)
    assert sum(read[0] == key(2) for read in pool.reads) == 2, "once for all that had joined"


# --- what homes lack ------------------------------------------------------------------------------


MANY = FEW_FOLLOWERS + 30


def test_many_blocks_that_nobody_has_cost_a_read_and_a_request_of_each_home() -> None:
    pool = Pool([2, 3])
    items = pool.reader.get(list(range(MANY)))
    pool.settle()
    assert [(item.status, item.reason) for item in items] == [(local.MISS, "not_found")] * MANY
    assert pool.reads == [(key(0), 0)] * 2
    assert [pool.nodes[n].core.metrics.bulk_requests_served_total for n in (2, 3)] == [1, 1]
    assert pool.reader.core.metrics.misses["not_found"] == MANY
    for home in (2, 3):
        of_home = pool.nodes[home].core.metrics.by_namespace.of(1)
        assert of_home.home_misses.total() == MANY, "each home counts what it lacks"
    check_at_rest(pool)


@pytest.mark.parametrize("followers", [FEW_FOLLOWERS, FEW_FOLLOWERS + 1])
def test_few_blocks_behind_one_that_nobody_has_are_read(followers: int) -> None:
    pool = Pool()
    items = pool.reader.get(list(range(1 + followers)))
    pool.pass_time(0.2)
    assert [item.reason for item in items] == ["not_found"] * (1 + followers)
    few = followers == FEW_FOLLOWERS
    assert pool.home.core.metrics.bulk_requests_served_total == (0 if few else 1)
    assert len({asked for asked, _ in pool.reads}) == (1 + followers if few else 1)
    check_at_rest(pool)


def test_behind_a_block_that_nobody_has_the_others_come_from_whichever_home_has_them() -> None:
    pool = Pool([2, 3])
    blocks = {number: noise(number, 5000) for number in range(1, MANY)}
    for number, data in blocks.items():
        pool.nodes[2 + number % 2].hold(number, data)
    items = pool.reader.get(list(range(MANY)))
    pool.settle()
    assert items[0].status == local.MISS
    assert [pool.reader.bytes_of(item) for item in items[1:]] == list(blocks.values())
    assert {item.tier for item in items[1:]} == {"bulk"}
    assert pool.reads == [(key(0), 0)] * 2
    check_at_rest(pool)


def test_what_one_home_lacks_and_the_next_cannot_be_asked_for_by_tcp_is_read() -> None:
    pool = Pool([2, 3])
    pool.nodes[2].hold(0, noise(0, 5000))
    pool.nodes[3].hold(1, noise(1, 5000))
    items = pool.reader.get([0, 1, 2])
    pool.refuses = {3}
    pool.settle()
    assert [item.tier for item in items] == ["home", "home", ""]
    assert pool.reader.bytes_of(items[1]) == noise(1, 5000)
    assert items[2].reason == "not_found"
    check_at_rest(pool)


def test_what_lies_below_a_homes_dram_is_not_lacking_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a home answers a READ when its disk has answered."""
    pool = Pool()
    pool.home.hold(0, noise(0, 5000))
    on_disk = BlockId(1, key(1))

    def lies_below(block: BlockId) -> bool:
        return block == on_disk

    monkeypatch.setattr(type(pool.home.core.store), "lies_below", staticmethod(lies_below))
    items = pool.reader.get([0, 1, 2])
    pool.settle()
    assert [item.status for item in items] == [local.OK, local.MISS, local.MISS]
    assert pool.reads == [(key(0), 0), (key(1), 0)]
    why = pool.home.core.metrics.by_namespace.of(1).home_misses
    assert why.total() == 2, "the READ of 1, and 2 by TCP"


def test_what_a_switch_keeps_by_now_is_read_though_its_home_lacks_it() -> None:
    pool = Pool()
    pool.home.hold(0, noise(0, 5000))
    core = pool.reader.core
    items = pool.reader.get([0, 1, 2])
    pool.meanwhile()
    core.control_message(0.0, Residents([BlockRef(1, key(2))]))
    pool.settle()
    assert [item.status for item in items] == [local.OK, local.MISS, local.MISS]
    assert pool.reads == [(key(0), 0), (key(2), 0)]
    check_at_rest(pool)


def test_a_get_that_joins_what_a_home_is_found_to_lack_asks_anew() -> None:
    pool = Pool()
    pool.home.hold(0, noise(0, 5000))
    first = pool.reader.get([0, 1])
    pool.meanwhile()
    later = pool.reader.get([1], now=0.1)
    joined = pool.reader.core.metrics.gets_joined_total
    callee_answered = pool.spoil

    def put_meanwhile(data: bytes) -> bytes:
        if pool.home.core.store.peek(BlockId(1, key(1))) is None:
            pool.home.hold(1, noise(1, 5000))
        return callee_answered(data)

    pool.spoil = put_meanwhile
    pool.settle()
    assert joined == 1
    assert [item.status for item in first] == [local.OK, local.MISS]
    assert [pool.reader.bytes_of(item) for item in later] == [noise(1, 5000)]


def test_beyond_the_bound_of_fetches_a_block_does_not_follow() -> None:
    pool = Pool()
    most = pool.reader.core.requester.config.max_fetches
    pool.change = lambda _frame: None
    items = pool.reader.get(list(range(most + 10)), deadline_s=1.0)
    assert pool.reader.core.reads.waiting <= most + 10
    pool.pass_time(9.0)
    assert len(items) == most + 10
    check_at_rest(pool)
    assert pool.reader.core.metrics.bulk_failures_total == 0
    assert {item.reason or item.status for item in items} <= {"deadline", "busy", UNREACHABLE}


CHAIN = {number: noise(number, 200_000) for number in range(40)}


def meet(pool: Pool, second: list[int], *, by_reads: bool = False) -> list[list[GetItem]]:
    """Node 1 asks for a chain, and node 3 for some of it when the first of its blocks leave."""
    for number, data in CHAIN.items():
        pool.home.hold(number, data)
    asked = [pool.reader.get(list(CHAIN))]
    gather = {"gather_ms": 1} if by_reads else {}

    def come(data: bytes) -> bytes:
        if len(asked) == 1 and len(data) > 100_000:
            asked.append(pool.nodes[3].get(second, now=pool.now, **gather))
            pool.meanwhile()
        return data

    pool.spoil = come
    pool.pass_time(1.0)
    return asked


@pytest.mark.parametrize("by_reads", [False, True])
def test_who_asks_for_what_another_is_still_to_be_given_by_tcp_reads_it_with_that(
    by_reads: bool,
) -> None:
    pool = Pool()
    first, second = meet(pool, list(CHAIN), by_reads=by_reads)
    for node, items in ((pool.reader, first), (pool.nodes[3], second)):
        assert [node.bytes_of(item) for item in items] == list(CHAIN.values())
    sent = pool.home.core.values()
    assert sent["reads_met_total"] >= len(CHAIN) / 2
    assert sent["payload_bytes_sent_bulk_get_total"] < 200_000 * len(CHAIN) / 2
    came = pool.reader.core.values()
    assert came["requester_met_total"] >= len(CHAIN) / 2
    assert first[0].tier == "bulk", "what had begun to come is not begun anew"
    assert first[-1].tier != "bulk"
    for node in pool.nodes.values():
        assert node.core.reads.waiting == 0


def test_who_wants_another_part_of_it_is_not_told_to_read() -> None:
    pool = Pool()
    pool.nodes[2].hold(99, noise(99, BIG))
    first, second = meet(pool, [99])
    assert [item.tier for item in (*first, *second)] == ["bulk"] * (len(CHAIN) + 1)
    assert pool.home.core.values()["reads_met_total"] == 0


def test_what_cannot_be_read_is_given_whoever_wants_it() -> None:
    """The last resort, and who does not know of companies, ask without `may_read`."""
    pool = Pool()
    pool.home.hold(1, noise(1, BIG))
    get = BulkGet(1, [WantedBlock(key(1))])
    serving, metrics = pool.home.core.serving, pool.home.core.metrics
    serving.asks(0.0, "node-1", get)
    serving.asks(0.0, "node-3", get)
    sent = []
    for may_read in (False, True):
        callee = BulkCallee(0.0, serving, BulkOptions(), metrics)
        codec = MessageCodec(CallerMessage, max_message_bytes=1 << 16)
        asked = BulkGet(1, [WantedBlock(key(1))], may_read)
        for message in (BulkHello(BULK_PROTOCOL_VERSION, "node-1"), asked):
            callee.received(0.0, codec.encode(message))
        sent.append(b"")
        while data := callee.bytes_to_send(0.0, 1 << 20):
            sent[-1] += data
        callee.lost(0.0)
    assert sent[0].endswith(noise(1, BIG))
    assert len(sent[1]) < 100
    assert b"company" in sent[1]
