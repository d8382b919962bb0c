"""Hot replicas: when they are given, to whom, and when they are taken back.

Oracle: the rules in the module's text, in a world where a block's reads are shared evenly among
those who answer for it. Cannot see: what nodes really send (`bench/replicas.py`), or that what is
asked for is fetched (the simulation).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.controller.core.replicas import (
    FIRST_REQUEST,
    MAX_BLOCKS_A_NODE,
    HotReplicas,
    NodeView,
    ReplicaOptions,
)
from kvcast.protocol.messages.control import Describe, Described, HotBlock, Keep, Kept
from kvcast.protocol.messages.wire import SEGMENT_BYTES, BlockId, bucket_of

LINK = 1e8
"""Bytes a second of every node's link."""
SIZE = SEGMENT_BYTES


def block(number: int) -> BlockId:
    return BlockId(1, number.to_bytes(16, "big"))


class World:
    """Nodes of one arena and one link each; node-1 is the home of all blocks."""

    def __init__(self, nodes: int = 4, options: ReplicaOptions | None = None) -> None:
        self.now = 0.0
        self.nodes = [f"node-{n}" for n in range(1, nodes + 1)]
        self.allowed = set(self.nodes)
        self.arena_bytes = dict.fromkeys(self.nodes, 64 * SIZE)
        self.used_bytes = dict.fromkeys(self.nodes, 0)
        self.link = dict.fromkeys(self.nodes, LINK)
        self.homes: tuple[str, ...] = ("node-1",)
        self.guard_room = 1000
        self.rates: dict[BlockId, float] = {}
        """How much of each block readers want, in bytes a second."""
        self.sent: dict[str, float] = dict.fromkeys(self.nodes, 0.0)
        self.refuses: set[str] = set()
        self.forgot: set[tuple[str, BlockId]] = set()
        self.hot = HotReplicas(
            options or ReplicaOptions(),
            lambda _block: self.homes,
            lambda _namespace, node_id: node_id in self.allowed,
        )

    def answering(self, of: BlockId) -> Sequence[str]:
        return [*self.homes[:1], *self.hot.listed.get(of, ())]

    def pass_time(self, seconds: float) -> None:
        """Reads go on, and nodes report every half second and do as they are asked."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for node_id in self.nodes:
                mine = {
                    b: rate / len(self.answering(b))
                    for b, rate in self.rates.items()
                    if node_id in self.answering(b)
                }
                carried = min(1.0, self.link[node_id] / max(1.0, sum(mine.values())))
                reads = {b: rate * carried * 0.5 for b, rate in mine.items()}
                self.sent[node_id] += sum(reads.values())
                hot = [
                    (b, HotBlock(b.namespace, b.key, round(sent / SIZE), 1, 0, SIZE, 7))
                    for b, sent in reads.items()
                ]
                self.hot.heard(node_id, self.sent[node_id], hot, self.now)
            self.step()

    def step(self) -> None:
        views = [
            NodeView(n, self.link[n], self.arena_bytes[n], self.used_bytes[n]) for n in self.nodes
        ]
        for node_id, message in self.hot.advance(views, self.guard_room, self.now):
            if isinstance(message, Keep):
                assert message.request >= FIRST_REQUEST
                held = node_id not in self.refuses
                kept = Kept(message.request, message.namespace, message.key, held)
                self.hot.kept(kept, node_id, self.now)
            else:
                assert isinstance(message, Describe)
                named = [BlockId(b.namespace, b.key) for b in message.blocks]
                held_blocks = [
                    (b.namespace, b.key, SIZE, 7) for b in named if (node_id, b) not in self.forgot
                ]
                self.hot.described(Described(message.request, held_blocks), node_id, self.now)

    @property
    def holders(self) -> set[str]:
        return {n for nodes in self.hot.listed.values() for n in nodes}


def hot_world() -> World:
    world = World()
    world.rates = {block(n): 0.3 * LINK for n in range(4)}
    return world


def test_a_loaded_home_is_relieved_until_it_can_bear_the_rest() -> None:
    world = hot_world()
    world.pass_time(30)
    assert world.hot.listed
    assert world.hot.load_of("node-1") < world.hot.options.high_load
    assert world.holders <= {"node-2", "node-3", "node-4"}


def test_nothing_is_given_while_a_home_can_bear_its_load() -> None:
    world = World()
    world.rates = {block(1): 0.55 * LINK}
    world.pass_time(30)
    assert not world.hot.listed
    assert not world.hot.guarded


def test_what_is_gone_through_once_is_given_to_nobody_until_it_is_read_again() -> None:
    world = World()
    segments = 16
    size = segments * SIZE
    a_step = round(0.9 * LINK * 0.5 / size)

    def go_through(first: int) -> None:
        for number in range(first, first + 8):
            world.now += 0.5
            world.sent["node-1"] += a_step * size
            blocks = [block(number * a_step + n) for n in range(a_step)]
            hot = [(b, HotBlock(b.namespace, b.key, segments, 1, 0, size, 7)) for b in blocks]
            world.hot.heard("node-1", world.sent["node-1"], hot, world.now)
            world.step()

    world.hot.heard("node-1", 0.0, [], 0.0)
    world.hot.heard("node-2", 0.0, [], 0.0)
    go_through(0)
    assert world.hot.load_of("node-1") > world.hot.options.high_load
    assert not world.hot.listed
    world.now += 120.0
    go_through(0)
    assert not world.hot.listed, "that was long ago"
    go_through(0)
    assert world.hot.listed


def test_a_load_that_stands_still_moves_nothing() -> None:
    world = hot_world()
    world.pass_time(60)
    before = dict(world.hot.listed)
    counts = world.hot.counts.copy()
    world.pass_time(60)
    assert dict(world.hot.listed) == before
    assert world.hot.counts == counts


def test_replicas_are_taken_back_after_the_load() -> None:
    world = hot_world()
    world.pass_time(30)
    world.rates = {}
    world.pass_time(5)
    assert world.hot.listed  # it might come again
    world.pass_time(25)
    assert not world.hot.listed
    assert not world.hot.guarded


def test_the_guard_lets_a_relieved_node_answer_for_a_moment_more() -> None:
    world = hot_world()
    world.pass_time(30)
    (some, holders) = next(iter(world.hot.listed.items()))
    world.hot.forget((1,), world.now, "a test")
    assert not world.hot.listed
    assert (bucket_of(some.key), holders[0]) in world.hot.guarded
    assert world.hot.next_deadline() == pytest.approx(world.now + world.hot.options.rest_s)
    world.now += world.hot.options.rest_s
    world.step()
    assert not world.hot.guarded


def test_heat_that_moves_on_takes_its_replicas_along() -> None:
    world = hot_world()
    world.pass_time(30)
    former = set(world.hot.listed)
    world.rates = {block(n): 0.3 * LINK for n in range(10, 14)}
    world.pass_time(40)
    assert not former & set(world.hot.listed)
    assert world.hot.listed


def test_one_block_that_all_want_gets_several_copies_and_no_more_than_the_bound() -> None:
    world = World(nodes=8, options=ReplicaOptions(max_copies=3))
    world.rates = {block(1): 8 * LINK}
    world.pass_time(60)
    assert len(world.hot.listed[block(1)]) == 3


def test_a_dead_replica_is_not_listed_and_another_comes_in_its_place() -> None:
    world = World()
    world.rates = {block(1): 1.2 * LINK}
    world.pass_time(30)
    (dead, *_) = world.hot.listed[block(1)]
    world.nodes.remove(dead)
    world.step()
    assert dead not in world.holders
    world.pass_time(30)
    assert world.hot.load_of("node-1") < 0.7


def test_who_may_not_use_the_namespace_gets_nothing_and_keeps_nothing() -> None:
    world = hot_world()
    world.allowed = {"node-1", "node-2"}
    world.pass_time(30)
    assert world.holders == {"node-2"}
    world.allowed = {"node-1"}
    world.step()
    assert not world.hot.listed


def test_a_full_node_displaces_a_small_part_of_what_it_holds_for_replicas() -> None:
    world = World()
    world.rates = {block(n): 0.3 * LINK for n in range(20)}
    world.used_bytes = dict(world.arena_bytes)
    world.pass_time(60)
    held = [sum(node in nodes for nodes in world.hot.listed.values()) for node in world.nodes]
    assert held == [0, 4, 4, 4]  # of 64
    assert world.hot.counts["replicas_no_room"]


def test_who_has_much_to_do_is_given_nothing() -> None:
    world = hot_world()
    world.homes = ("node-1",)
    busy = 0.9 * LINK * 0.5
    for _ in range(60):
        for node_id in ("node-2", "node-3"):  # they send much that nobody can relieve them of
            world.sent[node_id] += busy
        world.pass_time(0.5)
    assert world.holders == {"node-4"}


def test_no_node_gives_more_of_its_arena_than_its_share() -> None:
    world = World(options=ReplicaOptions(arena_share=2 / 64))
    world.rates = {block(n): 0.3 * LINK for n in range(20)}
    world.pass_time(60)
    for node_id in world.nodes:
        assert sum(node_id in nodes for nodes in world.hot.listed.values()) <= 2


def test_where_the_link_is_not_known_nothing_is_given() -> None:
    world = hot_world()
    world.link = dict.fromkeys(world.nodes, 0.0)
    world.pass_time(30)
    assert not world.hot.listed


def test_the_guard_is_never_asked_for_more_entries_than_it_has() -> None:
    world = World()
    world.rates = {block(n): 0.3 * LINK for n in range(20)}
    world.guard_room = 3
    for _ in range(60):
        world.pass_time(0.5)
        assert len(world.hot.guarded) <= 3
    assert world.hot.listed
    world.guard_room = 1
    world.pass_time(1)
    assert len(world.hot.guarded) <= 1


def test_who_does_not_hold_the_block_any_more_does_not_answer_for_it() -> None:
    world = hot_world()
    world.pass_time(30)
    some, holders = next(iter(world.hot.listed.items()))
    world.forgot = {(holders[0], some)}
    world.rates = {}
    world.now += world.hot.options.refresh_s
    world.step()
    assert holders[0] not in world.hot.listed.get(some, ())


def test_a_node_that_cannot_fetch_the_block_is_not_listed() -> None:
    world = hot_world()
    world.refuses = {"node-2", "node-3", "node-4"}
    world.pass_time(30)
    assert not world.hot.listed
    assert world.hot.counts["replicas_not_kept"]


def test_answers_that_nobody_asked_for_are_counted() -> None:
    world = hot_world()
    world.pass_time(5)
    world.hot.kept(Kept(FIRST_REQUEST + 10**6, 1, bytes(16), held=True), "node-2", world.now)
    world.hot.described(Described(FIRST_REQUEST + 10**6, []), "node-2", world.now)
    assert world.hot.counts["replica_answers_unexpected"] == 2


def test_a_home_of_the_block_is_no_replica_of_it() -> None:
    world = hot_world()
    world.pass_time(30)
    world.homes = ("node-1", *sorted(world.holders))
    world.step()
    assert not world.hot.listed


def test_a_restarted_node_begins_with_no_load() -> None:
    world = hot_world()
    world.pass_time(30)
    world.sent["node-1"] = 0.0
    world.hot.heard("node-1", 0.0, [], world.now)
    assert world.hot.load_of("node-1") == 0.0


def report(number: int, reads: int) -> tuple[BlockId, HotBlock]:
    name = block(number)
    return name, HotBlock(name.namespace, name.key, reads, 1, 0, SIZE, 7)


def test_a_rate_is_right_however_long_a_node_reports() -> None:
    hot = World().hot
    for second in range(3000):  # a rate halves in 1.5 s: 2 ** -2000 is no float
        hot.heard("node-1", 3.0 * SIZE * second, [report(1, 3)], float(second))
        hot.advance([NodeView("node-1", LINK, 0, 0)], 0, float(second))
        if second > 30:
            assert hot.load_of("node-1") == pytest.approx(3 * SIZE / LINK)
            assert hot._loads["node-1"].rate(block(1)) == pytest.approx(3 * SIZE, rel=1e-4)
    hot.heard("node-1", 3.0 * SIZE * 3000, [], 1e9)  # after decades it has sent nothing
    assert hot._loads["node-1"].rate(block(1)) == 0.0


def test_of_many_blocks_the_most_read_are_remembered() -> None:
    hot = World().hot
    for second in range(40):
        often = [report(1, 1000), report(2, 500)] if second < 38 else []
        others = [report(100 * second + n, 1 + n) for n in range(100)]
        hot.heard("node-1", float(second), [*often, *others], float(second))
        assert len(hot._loads["node-1"].blocks) <= MAX_BLOCKS_A_NODE * 3 // 2
    assert hot._loads["node-1"].most_read()[:2] == [block(1), block(2)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.floats(0, 3), st.sampled_from([0.5, 2.0, 20.0])),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_the_load_does_the_bounds_hold_and_all_comes_back(
    phases: list[tuple[int, float, float]],
) -> None:
    world = World(options=ReplicaOptions(max_copies=2))
    for number, links, seconds in phases:
        world.rates = {block(number): links * LINK, block(number + 1): links * LINK / 2}
        world.pass_time(seconds)
        for nodes in world.hot.listed.values():
            assert 1 <= len(set(nodes)) == len(nodes) <= 2
            assert "node-1" not in nodes
        for listed, nodes in world.hot.listed.items():
            assert {(bucket_of(listed.key), n) for n in nodes} <= world.hot.guarded
    world.rates = {}
    world.pass_time(40)
    assert not world.hot.listed
    assert not world.hot.guarded
