"""Quotas of the object store: what several nodes put there together, object by object.

Oracle: whenever a node sends an object, what lies in the store of its buckets, and what is on its
way there, is not more than its part of the quota, as many of 1,024 parts as it has buckets; and a
listing brings the count to what is there. The nodes' tiers are real, the store is a dictionary that
is slow, forgets, and does not answer although it has done what it was asked. Cannot see: real
stores, and nodes that disagree about the map.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.core.cold import AGAIN_S, DONE, GONE, HEAD, ColdRules, ColdTier, Errand, Task
from kvcast.hostagent.core.cold_share import LIST_AGAIN_S
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.messages.wire import BUCKETS, BlockId, bucket_of, digest_of

ARENA = 1 << 20
RULES = ColdRules(max_errands=4, max_waiting=64)
SIZE = 1000
OBJECT = HEAD.size + SIZE


@dataclass
class Cloud:
    """The object store of all nodes, and the clock."""

    objects: dict[str, bytes] = field(default_factory=dict)
    sending: list[Task] = field(default_factory=list)
    now: float = 0.0
    quota_bytes: int = 0
    """0 = there is none."""

    def would_take(self, buckets: frozenset[int] | None = None) -> int:
        """Bytes of what is there, and of what is on its way, in these buckets or all."""
        sizes = {name: len(data) for name, data in self.objects.items()}
        for task in self.sending:
            assert task.data is not None
            sizes[task.name] = sum(map(len, task.data))
        return sum(
            size
            for name, size in sizes.items()
            if buckets is None or bucket_of(bytes.fromhex(name[-32:])) in buckets
        )


class Node:
    """One node's cold tier."""

    def __init__(self, cloud: Cloud, buckets: frozenset[int]) -> None:
        self.cloud = cloud
        self.buckets = buckets
        self.tasks: list[Task] = []
        self.start()

    def start(self) -> None:
        """Begin anew: what it had asked for is given up."""
        self.cloud.sending = [t for t in self.cloud.sending if t not in self.tasks]
        self.tasks = []
        self.memory = memoryview(bytearray(ARENA))
        self.store = Store(Allocator(ARENA, 65536))
        self.tier = ColdTier(RULES, self.store, self.memory, "cluster", epoch_s=1e9)
        self.tier.meaning_of = lambda namespace: 76 + namespace
        self.store.beyond = self.tier
        self.configure(self.buckets)

    def configure(self, buckets: frozenset[int]) -> None:
        self.buckets = buckets
        self.tier.configure({1: 0.0}, {1: self.cloud.quota_bytes}, buckets)

    def put(self, number: int) -> None:
        data = random.Random(number).randbytes(SIZE)
        copy = self.store.reserve(block(number), SIZE)
        self.memory[copy.offset : copy.offset + SIZE] = data
        self.store.commit(copy, digest_of(data), home=True)

    def take(self) -> None:
        """Ask what is to be done."""
        for task in self.tier.take_tasks(self.cloud.now):
            self.tasks.append(task)
            if task.errand is Errand.STORE:
                self.cloud.sending.append(task)
                most = self.cloud.quota_bytes * len(self.buckets) / BUCKETS
                taken = self.cloud.would_take(self.buckets)
                assert not most or taken <= most, "beyond its part of the quota"

    def do(self, which: int, *, fails: bool = False, lost: bool = False) -> None:
        """Do one errand; it `fails` before it is done, or its answer is `lost`."""
        if not self.tasks:
            return
        task = self.tasks.pop(which % len(self.tasks))
        error, data = "it does not answer" if fails or lost else DONE, None
        objects = self.cloud.objects
        if task in self.cloud.sending:
            self.cloud.sending.remove(task)
        match task.errand:
            case _ if fails:
                pass
            case Errand.STORE:
                assert task.data is not None
                objects[task.name] = b"".join(task.data)
            case Errand.DELETE:
                objects.pop(task.name, None)
            case Errand.FETCH:
                data = objects.get(task.name)
                error = error or (DONE if data is not None else GONE)
            case Errand.LIST:
                names = [name for name in objects if name.startswith(task.name)]
                self.tier.found(task.name, [(name, len(objects[name])) for name in names])
            case Errand.DELETE_ALL:
                for name in [name for name in objects if name.startswith(task.name)]:
                    del objects[name]
        self.store.advance(self.cloud.now)
        given = memoryview(data) if data is not None and not error else None
        task.ended(self.cloud.now, error, given)

    def work(self) -> None:
        """Until nothing is left to do."""
        self.take()
        while self.tasks:
            self.do(0)
            self.take()


def block(number: int) -> BlockId:
    return BlockId(1, (number * BUCKETS // 16 + number // 16).to_bytes(16, "big"))


def shared_out(cloud: Cloud, *counts: int) -> list[Node]:
    """Nodes of which each has so many sixteenths of the buckets."""
    nodes, at = [], 0
    for count in counts:
        end = at + count * BUCKETS // 16
        nodes.append(Node(cloud, frozenset(range(at, end))))
        at = end
    return nodes


def alone(quota_bytes: int = OBJECT) -> tuple[Cloud, Node]:
    """An object store, and one node that answers for all of it."""
    cloud = Cloud(quota_bytes=quota_bytes)
    (node,) = shared_out(cloud, 16)
    return cloud, node


def test_nodes_together_store_as_much_as_the_quota_allows_and_count_what_they_leave_out() -> None:
    cloud = Cloud(quota_bytes=16 * OBJECT)
    nodes = shared_out(cloud, 12, 4)
    for number in range(64):
        for node in nodes:  # both are homes, and each stores its own
            node.put(number)
    for node in nodes:
        node.work()
    assert cloud.would_take() == 16 * OBJECT
    assert [node.tier.shares[1].taken_bytes // OBJECT for node in nodes] == [12, 4]
    assert [node.tier.counters.left_out_quota for node in nodes] == [36, 12]
    assert {bucket_of(bytes.fromhex(name[-32:])) in nodes[1].buckets for name in cloud.objects} == {
        True,
        False,
    }
    cloud.now += 1
    nodes[0].store.drop(block(0))
    nodes[0].work()
    nodes[0].put(100 * 16)
    nodes[0].work()
    assert cloud.would_take() == 16 * OBJECT, "what is dropped makes room for one"


def test_a_quota_less_than_an_object_keeps_all_out_and_none_keeps_none() -> None:
    cloud, node = alone(OBJECT - 1)
    node.put(1)
    node.work()
    assert not cloud.objects
    assert node.tier.counters.left_out_quota == 1
    cloud.quota_bytes = 0
    node.tier.configure({1: 0.0})
    node.put(2)
    node.work()
    assert len(cloud.objects) == 1


def test_what_is_there_counts_before_anything_is_stored_whoever_put_it() -> None:
    cloud = Cloud(quota_bytes=4 * OBJECT)
    (before,) = shared_out(cloud, 16)
    for number in range(3):
        before.put(number)
    before.work()
    (after,) = shared_out(cloud, 16)
    for number in range(10, 13):
        after.put(number)
    after.take()
    assert [task.errand for task in after.tasks] == [Errand.LIST]
    assert after.tier.values()["cold_stores_waiting"] == 3
    after.work()
    assert len(cloud.objects) == 4
    assert after.tier.counters.left_out_quota == 2


def test_what_others_deleted_is_found_out_when_there_seems_to_be_no_room() -> None:
    cloud, node = alone(2 * OBJECT)
    for number in range(3):
        node.put(number)
    node.work()
    cloud.objects.clear()
    node.put(4)
    node.work()
    assert not cloud.objects
    cloud.now += LIST_AGAIN_S
    node.put(5)
    node.work()
    assert len(cloud.objects) == 1
    assert node.tier.counters.left_out_quota == 2


def test_who_takes_buckets_over_looks_what_is_there_and_who_gave_them_up_stores_no_more() -> None:
    cloud = Cloud(quota_bytes=16 * OBJECT)
    old, new = shared_out(cloud, 16, 0)
    for number in range(8):
        old.put(number)
    old.work()
    new.work()
    everything = old.buckets
    for node in (old, new):
        node.configure(frozenset() if node is old else everything)
    for number in range(100, 112):
        for node in (old, new):
            node.put(number)
    old.work()
    assert len(cloud.objects) == 8
    assert old.tier.shares[1].taken_bytes == 0
    new.work()
    assert len(cloud.objects) == 16
    assert new.tier.counters.left_out_quota == 4


def test_an_object_that_was_being_sent_when_a_quota_was_set_counts() -> None:
    cloud, node = alone()
    node.tier.configure({1: 0.0})
    node.work()
    node.put(1)
    node.take()
    node.configure(node.buckets)
    node.put(2)
    node.take()
    assert [task.errand for task in node.tasks] == [Errand.STORE, Errand.LIST]
    node.do(1)
    node.take()
    node.work()
    assert len(cloud.objects) == 1


def test_an_object_of_which_it_is_not_known_whether_it_came_counts() -> None:
    cloud, node = alone()
    node.work()
    node.put(1)
    node.take()
    node.do(0, lost=True)
    node.put(2)
    node.work()
    assert len(cloud.objects) == 1
    assert node.tier.counters.left_out_quota == 1


def test_an_object_that_takes_the_place_of_another_counts_once() -> None:
    cloud, node = alone()
    node.put(1)
    node.work()
    node.store.drop(block(1))
    node.take()
    node.do(0, fails=True)
    node.put(1)
    node.work()
    assert node.tier.counters.stored == 2
    assert node.tier.shares[1].taken_bytes == OBJECT == cloud.would_take()


def test_an_object_that_is_sent_while_it_is_deleted_counts() -> None:
    cloud, node = alone()
    node.put(1)
    node.work()
    node.store.drop(block(1))
    node.take()
    node.put(1)
    node.take()
    assert [task.errand for task in node.tasks] == [Errand.DELETE, Errand.STORE]
    node.do(0)
    node.put(2)
    node.work()
    assert node.tier.counters.left_out_quota == 1
    assert node.tier.shares[1].taken_bytes == OBJECT == cloud.would_take()


def test_what_waits_when_its_buckets_go_elsewhere_is_not_stored() -> None:
    cloud, node = alone(4 * OBJECT)
    node.put(1)
    node.take()  # a listing, before which nothing is stored
    node.configure(node.buckets - {bucket_of(block(1).key)})
    node.work()
    assert not cloud.objects


@pytest.mark.parametrize("listing_first", [True, False])
def test_an_object_that_was_being_sent_when_its_bucket_went_elsewhere_does_not_count(
    listing_first: bool,
) -> None:
    cloud, node = alone(4 * OBJECT)
    node.put(1)
    node.work()
    node.put(2)
    node.take()
    assert [task.errand for task in node.tasks] == [Errand.STORE]
    left = node.buckets - {bucket_of(block(2).key)}
    share = node.tier.shares[1]
    listing = object()
    if listing_first:
        share.begin_listing(listing, cloud.now)
    node.configure(left)
    if not listing_first:
        share.begin_listing(listing, cloud.now)
    share.found(block(1), OBJECT)
    share.listed()
    assert share.taken_bytes == OBJECT == cloud.would_take(left)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 1), st.integers(0, 23)),
        st.tuples(st.just("put"), st.integers(0, 1), st.integers(0, 23)),
        st.tuples(st.just("drop"), st.integers(0, 1), st.integers(0, 23)),
        st.tuples(st.just("take"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("do"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("do"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("fail"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("lose"), st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("restart"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("quota"), st.just(0), st.integers(0, 6)),
        st.tuples(st.just("buckets"), st.just(0), st.integers(0, 16)),
        st.tuples(st.just("forgotten"), st.just(0), st.just(0)),
        st.tuples(st.just("all"), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([0, AGAIN_S, LIST_AGAIN_S])),
    ),
    min_size=10,
    max_size=80,
)


@pytest.mark.parametrize("first", [8, pytest.param(16, marks=pytest.mark.slow)])
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_nothing_is_sent_that_exceeds_a_quota(
    first: int, steps: list[tuple[str, int, float]]
) -> None:
    cloud = Cloud(quota_bytes=4 * OBJECT)
    nodes = shared_out(cloud, first, 16 - first)
    for node in nodes:
        node.work()
        for number in range(6):
            node.put(number)
    for verb, number, argument in steps:
        node, value = nodes[number], int(argument)
        match verb:
            case "put" if not node.store.holds(1, block(value).key):
                node.put(value)
            case "drop":
                node.store.drop(block(value))
            case "take":
                node.take()
            case "do":
                node.do(value)
            case "fail":
                node.do(value, fails=True)
            case "lose":
                node.do(value, lost=True)
            case "restart":
                node.start()
            case "quota":
                cloud.quota_bytes = value * OBJECT + 5
                for each in nodes:
                    each.configure(each.buckets)
            case "buckets":  # what is on its way when buckets change hands is not counted by both
                while cloud.sending:
                    for each in nodes:
                        each.do(0)
                cut = value * BUCKETS // 16
                nodes[0].configure(frozenset(range(cut)))
                nodes[1].configure(frozenset(range(cut, BUCKETS)))
            case "forgotten":
                for name in list(cloud.objects)[::2]:
                    del cloud.objects[name]
            case "all":
                for each in nodes:
                    each.work()
            case "wait":
                cloud.now += argument
    for node in nodes:
        node.work()
        cloud.now += AGAIN_S
        node.work()
    for node in nodes:
        there = cloud.would_take(node.buckets)
        assert node.tier.shares[1].taken_bytes >= there
        buckets = node.buckets
        node.configure(frozenset())
        node.configure(buckets)
        node.work()
        assert node.tier.shares[1].taken_bytes == there, "who has looked knows"
