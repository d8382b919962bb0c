"""Reader groups at their nodes: whoever asks first, all take what comes, and one copy leaves home.

Oracle: counts of READs and of chunks, and what each node holds in the end; by hand, in virtual
time. Cannot see: the switch that sends DATA to a whole group (here a loop does), and how far apart
real ranks are (`kvcast.bench.ttft` measures that).
"""

from __future__ import annotations

from collections import Counter
from unittest import mock

import msgspec
from kvcast.hostagent.core.fetches import GetBatch, GetItem
from kvcast.protocol.messages import local
from kvcast.protocol.messages.control import GroupInfo
from kvcast.protocol.messages.wire import CHUNK_BYTES, OP_DATA, OP_READ, BlockId, Frame
from test_hostagent_core import Node, key, pool_map, session_of

GROUP = 7
BYTES = bytes(range(256)) * 200
CHUNKS = -(-len(BYTES) // CHUNK_BYTES)


class Rack:
    """Node 1 is the home of all, nodes 2 to 4 are a group; DATA of the group goes to all of it."""

    def __init__(self, members: tuple[int, ...] = (2, 3, 4)) -> None:
        self.nodes = {index: Node(index, slabs=256) for index in (1, 2, 3, 4)}
        self.members = members
        groups = [GroupInfo(1, GROUP, [f"node-{index}" for index in members])]
        for node in self.nodes.values():
            node.take_map(msgspec.structs.replace(pool_map([1], nodes=4), groups=groups))
        self.reads: Counter[int] = Counter()
        """By reader."""
        self.data = 0

    def get(self, index: int, *numbers: int, expect: bool = False) -> list[GetItem]:
        items: list[GetItem] = []

        def answered(batch: GetBatch) -> None:
            items.extend(item for item in batch.items if item is not None)

        node = self.nodes[index]
        keys, end = [key(number) for number in numbers], node.now + 5
        node.core.reads.get(node.now, 1, keys, end, answered, group=GROUP, expect=expect)
        return items

    def run(self, seconds: float) -> None:
        """Deliver what is sent, and let time pass."""
        for _ in range(round(seconds * 1000)):
            while self._deliver():
                pass
            for node in self.nodes.values():
                node.now += 0.001
                node.core.handle_timer(node.now)

    def _deliver(self) -> int:
        moved = 0
        for source, node in self.nodes.items():
            for target, frame in node.frames():
                moved += 1
                self.reads[source] += frame.op == OP_READ
                self.data += frame.op == OP_DATA
                grouped = frame.op == OP_DATA and frame.group
                for each in self.members if grouped else (target,):
                    self.hear(each, source, frame)
        for node in self.nodes.values():
            node.core.after_receiving(node.now)
        return moved

    def hear(self, target: int, source: int, frame: Frame) -> None:
        payload = bytes(frame.payload)
        if frame.op == OP_DATA:
            payload = payload.ljust(CHUNK_BYTES, b"\0")
        node = self.nodes[target]
        node.core.receive(node.now, source, msgspec.structs.replace(frame, payload=payload))

    def holds(self, index: int, number: int) -> bool:
        return self.nodes[index].core.store.peek(BlockId(1, key(number))) is not None


def test_a_rank_that_comes_late_finds_what_another_asked_for() -> None:
    rack = Rack()
    rack.nodes[1].hold(1, BYTES)
    items = rack.get(4, 1)
    rack.run(0.5)
    assert items[0].status == "ok"
    assert rack.data == CHUNKS
    for late in (2, 3):
        assert rack.holds(late, 1)
        [item] = rack.get(late, 1, expect=True)
        assert item.tier == "local"
        assert rack.nodes[late].bytes_of(item) == BYTES
    rack.run(0.5)
    assert rack.data == CHUNKS
    assert [rack.nodes[i].core.metrics.overheard_total for i in (2, 3, 4)] == [1, 1, 0]


def test_while_the_groups_data_flows_nobody_asks_for_what_is_yet_to_come() -> None:
    rack = Rack()
    for number in range(1, 4):
        rack.nodes[1].hold(number, BYTES)
    expecting = rack.get(2, 3, expect=True)
    for number in (1, 2, 3):
        rack.get(4, number)
        rack.run(0.08)  # longer than who expects waits in silence
    assert expecting[0].status == "ok"
    assert rack.reads[2] == 0
    assert rack.data == 3 * CHUNKS


def test_where_nobody_asks_one_of_those_who_expect_does() -> None:
    rack = Rack()
    rack.nodes[1].hold(1, BYTES)
    everybody = [rack.get(index, 1, expect=True) for index in (2, 3)]
    rack.run(1.0)
    assert [items[0].status for items in everybody] == ["ok", "ok"]
    assert rack.data == CHUNKS
    assert rack.reads[3] == 0, "its turn comes after that of the first"


def test_who_was_to_ask_and_comes_late_expects_what_another_asks_for() -> None:
    rack = Rack()
    for number in (1, 2):
        rack.nodes[1].hold(number, BYTES)
    rack.get(2, 1)
    rack.run(0.02)
    late = rack.get(4, 2)
    rack.run(0.02)
    assert rack.reads[4] == 0
    rack.get(2, 2)
    rack.run(0.5)
    assert late[0].status == "ok"
    assert (rack.reads[4], rack.data) == (0, 2 * CHUNKS)


def test_only_members_take_what_they_did_not_ask_for_and_of_homes_alone() -> None:
    rack = Rack(members=(2, 4))
    rack.nodes[1].hold(1, BYTES)
    rack.nodes[3].hold(1, BYTES)
    frame = Frame(OP_DATA, 1, key(1), group=GROUP, size=len(BYTES), digest=1)
    rack.hear(3, 1, frame)  # no member
    rack.hear(2, 3, frame)  # not from a home
    rack.hear(2, 1, msgspec.structs.replace(frame, group=GROUP + 1))  # no such group
    rack.hear(2, 1, msgspec.structs.replace(frame, namespace=9))
    assert [node.core.metrics.overheard_total for node in rack.nodes.values()] == [0, 0, 0, 0]
    assert not any(node.core.reads.waiting for node in rack.nodes.values())


def test_what_a_members_disk_has_it_does_not_take_unasked() -> None:
    rack = Rack()
    node = rack.nodes[2].core
    frame = Frame(OP_DATA, 1, key(1), group=GROUP, size=len(BYTES), digest=1)
    with mock.patch.object(node.store.below, "holds", lambda block: block.key == key(1)):
        rack.hear(2, 1, frame)
        assert (node.reads.waiting, node.metrics.overheard_total) == (0, 0)
        rack.hear(2, 1, msgspec.structs.replace(frame, key=key(2)))
        assert (node.reads.waiting, node.metrics.overheard_total) == (1, 1)


def test_what_was_taken_unasked_in_vain_is_left_to_others_for_a_while() -> None:
    """Who takes it asks for it in the end, and the others overhear that: of a block that is damaged
    in the switch's memory the members would make each other ask for ever."""
    rack = Rack()
    node = rack.nodes[2].core
    frame = Frame(OP_DATA, 1, key(1), group=GROUP, size=len(BYTES), digest=1)
    for heard in (1, 2):
        rack.hear(2, 1, frame)
        assert (node.reads.waiting, node.metrics.overheard_total) == (1, heard)
        rack.run(1.0)  # the home has none
        assert node.reads.waiting == 0
        rack.hear(2, 1, frame)
        assert (node.reads.waiting, node.metrics.overheard_total) == (0, heard)
        rack.run(node.options.reads.overheard_s)


def test_what_is_taken_unasked_is_bounded_and_ends() -> None:
    rack = Rack()
    node = rack.nodes[2].core
    bound = node.options.reads.most_overheard
    for number in range(bound + 3):
        rack.hear(2, 1, Frame(OP_DATA, 1, key(number), group=GROUP, size=1 << 20, digest=1))
    assert node.reads.waiting == bound
    assert (node.metrics.overheard_total, node.metrics.overheard_refused_total) == (bound, 3)
    rack.run(node.options.reads.overheard_s + 1.0)  # the home has none of them
    assert node.reads.waiting == 0
    assert node.store.used_bytes == 0
    rack.hear(2, 1, Frame(OP_DATA, 1, key(999), group=GROUP, size=1 << 20, digest=1))
    assert node.reads.waiting == 1


def test_an_agent_says_who_answers_for_a_key() -> None:
    session, replies = session_of(Rack().nodes[2])
    session.handle(0.0, local.DescribePool(1, 1, [key(1), key(2)]))
    [described] = replies
    assert isinstance(described, local.PoolDescription)
    assert described.homes == ["node-1", "node-1"]
