"""The store under any policy, wrong ones included.

Oracle: `Store.check`, which reckons everything anew from the copies; a quota that is never
exceeded, an assured share that no other takes; pinned copies whose bytes nobody else is given; no
more evicted than lies in the slabs that are needed; and, for the value policy, that whoever came
behind a block went before it. Cannot see: what the agent
makes of it.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.core.store import (
    EVICTED,
    EXPIRED,
    MOST_ASSURED,
    Copy,
    NoRoomError,
    QuotaError,
    Store,
    StoreError,
    StoreRules,
)
from kvcast.hostagent.tiers import policies
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.policies.base import Policy, QueuePolicy, Search
from kvcast.protocol.messages.wire import BlockId

SLAB = 8192
SLABS = 6
CHAIN = 5
"""Blocks 0 to 4 are one prefix, 5 to 9 the next."""
SIZES = (900, 1000, 2000, 8192, 12000)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Liar(QueuePolicy[BlockId]):
    """It names blocks that are pinned, unknown, of others, or unsuitable, and forgets the time."""

    NAME = "liar"

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.rng = random.Random(1)

    def choose(self, search: Search[BlockId]) -> BlockId | None:
        return self.rng.choice([*self.queue.blocks(), BlockId(9, key(1)), BlockId(2, key(3))])


NAMES = [*sorted(policies.BY_NAME), Liar.NAME]


@dataclass
class Scene:
    store: Store
    writing: list[Copy] = field(default_factory=list)
    pinned: list[Copy] = field(default_factory=list)
    now: float = 0.0

    def do(self, what: str, namespace: int, number: int, choice: int) -> None:
        store = self.store
        block = BlockId(namespace, key(number))
        if what == "reserve":
            parent = key(number - 1) if number % CHAIN else b""
            try:
                copy = store.reserve(
                    block, SIZES[choice % len(SIZES)], parent=parent, depth=number % CHAIN
                )
            except StoreError:
                return
            self.writing.append(copy)
        elif what in ("commit", "abort") and self.writing:
            copy = self.writing.pop(choice % len(self.writing))
            if what == "abort":
                store.abort(copy)
                return
            store.commit(copy, 7, home=True)
        elif what == "pin":
            held = store.get(block)
            if held is not None:
                store.pin(held)
                self.pinned.append(held)
        elif what == "unpin" and self.pinned:
            store.unpin(self.pinned.pop(choice % len(self.pinned)))
        elif what == "get":
            store.get(block)
        elif what == "credit":
            store.credit(block, choice)
        elif what == "wait":
            self.now += choice / 2
            store.advance(self.now)


STEP = st.tuples(
    st.sampled_from(
        ("reserve", "reserve", "commit", "commit", "abort", "pin", "unpin", "get", "credit", "wait")
    ),
    st.integers(1, 2),
    st.integers(0, 14),
    st.integers(0, 20),
)
RULES = st.builds(
    StoreRules,
    policy=st.sampled_from(NAMES),
    quota_bytes=st.sampled_from((None, 0, 2 * SLAB, 3 * SLAB)),
    ttl_s=st.sampled_from((0.0, 3.0)),
    assured_bytes=st.sampled_from((0, 0, SLAB // 2, 2 * SLAB, 3 * SLAB)),
)


@pytest.fixture(autouse=True)
def liar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies.BY_NAME, Liar.NAME, Liar)


def used(store: Store, rules: dict[int, StoreRules]) -> None:
    for namespace, rule in rules.items():
        if rule.quota_bytes:
            assert store.namespace_bytes(namespace) <= rule.quota_bytes


@given(rules=st.tuples(RULES, RULES), steps=st.lists(STEP, max_size=100))
@settings(max_examples=400, deadline=None)
def test_no_policy_breaks_what_the_store_promises(
    rules: tuple[StoreRules, StoreRules], steps: list[tuple[str, int, int, int]]
) -> None:
    store = Store(Allocator(SLABS * SLAB, SLAB))
    by_namespace = dict(enumerate(rules, 1))
    store.configure(by_namespace)
    scene = Scene(store)
    for step in steps:
        before = {namespace: store.namespace_bytes(namespace) for namespace in (1, 2)}
        scene.do(*step)
        store.check()
        used(store, by_namespace)
        what, namespace, *_ = step
        other = 3 - namespace
        if what == "reserve":
            kept = min(before[other], store.assured_bytes(other))
            assert store.namespace_bytes(other) >= kept, "another took what was assured"
        for copy in scene.pinned:
            assert copy.pins > 0
    assert all(isinstance(copy, Copy) for copy in scene.pinned)


@given(steps=st.lists(STEP, max_size=150))
@settings(max_examples=400, deadline=None)
def test_under_value_nothing_is_held_whose_ancestor_has_gone(
    steps: list[tuple[str, int, int, int]],
) -> None:
    store = Store(Allocator(SLABS * SLAB, SLAB))
    store.configure({1: StoreRules("value", 3 * SLAB), 2: StoreRules("lru")})
    scene = Scene(store)
    behind: dict[BlockId, BlockId] = {}
    for step in steps:
        scene.do(*step)
        store.check()
        for block, parent in behind.items():
            assert store.peek(block) is None or store.peek(parent) is not None
        behind = {}
        for copy in map(store.peek, store.blocks()):
            if copy is not None and copy.block.namespace == 1 and copy.parent:
                parent = BlockId(1, copy.parent)
                if store.peek(parent) is not None:
                    behind[copy.block] = parent


@given(
    first=RULES, second=RULES, steps=st.lists(STEP, max_size=60), more=st.lists(STEP, max_size=60)
)
@settings(max_examples=150, deadline=None)
def test_rules_may_change_at_any_time(
    first: StoreRules,
    second: StoreRules,
    steps: list[tuple[str, int, int, int]],
    more: list[tuple[str, int, int, int]],
) -> None:
    store = Store(Allocator(SLABS * SLAB, SLAB))
    store.configure({1: first})
    scene = Scene(store)
    for step in steps:
        scene.do(*step)
    store.configure({1: second})
    store.check()
    for step in more:
        scene.do(*step)
        store.check()


@pytest.mark.slow
@given(
    seed=st.integers(0, 1 << 32),
    names=st.tuples(*[st.sampled_from([name for name in NAMES if name != "value"])] * 2),
    pins=st.integers(0, 6),
)
@settings(max_examples=200, deadline=None)
def test_no_more_goes_than_lies_in_the_slabs_that_are_needed(
    seed: int, names: tuple[str, str], pins: int
) -> None:
    rng = random.Random(seed)
    store = Store(Allocator(4 * SLABS * SLAB, SLAB))
    store.configure({number: StoreRules(name) for number, name in enumerate(names, 1)})
    for number in range(200):
        store.advance(number / 10)
        _put(store, rng.randint(1, 2), number, rng.choice(SIZES))
    for block in rng.choices(sorted(store.blocks()), k=200):
        number += 1
        store.advance(number / 10)
        store.get(block)
    for block in rng.sample(sorted(store.blocks()), pins):
        pinned = store.peek(block)
        assert pinned is not None
        store.pin(pinned)
    for number in range(1000, 1020):
        store.advance(float(number))
        before = store.counters.evicted_bytes
        size_bytes = rng.choice(SIZES)
        with contextlib.suppress(NoRoomError):
            _put(store, rng.randint(1, 2), number, size_bytes)
        # One more, where a block of two slabs goes and one of them is enough.
        slabs = -(-size_bytes // SLAB) + 1
        assert store.counters.evicted_bytes - before <= slabs * SLAB
        store.check()


def filled(rules: StoreRules, blocks: int) -> Store:
    store = Store(Allocator(4 * SLAB, SLAB))
    store.configure({1: rules})
    for number in range(blocks):
        store.advance(float(number))
        store.commit(store.reserve(BlockId(1, key(number)), SLAB), 7, home=True)
    return store


def test_a_quota_is_exact_to_one_block() -> None:
    store = filled(StoreRules(quota_bytes=3 * SLAB), 3)
    assert len(store) == 3
    store.commit(store.reserve(BlockId(1, key(3)), SLAB), 7, home=True)
    assert len(store) == 3
    assert store.namespace_bytes(1) == 3 * SLAB
    with pytest.raises(QuotaError):
        store.reserve(BlockId(1, key(4)), 3 * SLAB + 1)
    assert len(store) == 3


def _put(store: Store, namespace: int, number: int, size_bytes: int = SLAB) -> None:
    store.commit(store.reserve(BlockId(namespace, key(number)), size_bytes), 7, home=True)


@pytest.mark.parametrize("policy", NAMES)
def test_what_is_assured_is_had_and_kept(policy: str) -> None:
    store = Store(Allocator(SLABS * SLAB, SLAB))
    store.configure({1: StoreRules(assured_bytes=2 * SLAB), 2: StoreRules(policy)})
    for number in range(20):
        _put(store, 2, number)
    assert store.namespace_bytes(2) == SLABS * SLAB, "nobody else is there"
    _put(store, 1, 0)
    _put(store, 1, 1)
    for number in range(20, 40):
        _put(store, 2, number)
    assert {b.key for b in store.blocks() if b.namespace == 1} == {key(0), key(1)}
    # What it has beyond its share is anybody's.
    _put(store, 1, 2)
    assert store.namespace_bytes(1) == 3 * SLAB
    for number in range(40, 60):
        _put(store, 2, number)
    assert store.namespace_bytes(1) >= 2 * SLAB
    # Others may not have it for small blocks either, nor for one of several slabs.
    for number in range(60, 120):
        _put(store, 2, number, 900)
    with pytest.raises(NoRoomError):
        store.reserve(BlockId(2, key(200)), 5 * SLAB)
    assert store.namespace_bytes(1) >= 2 * SLAB
    # Its own puts may, and so may its own quota.
    for number in range(10, 20):
        _put(store, 1, number)
    store.configure({1: StoreRules(quota_bytes=SLAB, assured_bytes=2 * SLAB)})
    assert (store.namespace_bytes(1), store.assured_bytes(1)) == (SLAB, SLAB)
    store.check()


def test_more_than_there_is_cannot_be_assured() -> None:
    store = Store(Allocator(SLABS * SLAB, SLAB))
    store.configure({n: StoreRules(assured_bytes=SLABS * SLAB) for n in (1, 2, 3)})
    assured = [store.assured_bytes(namespace) for namespace in (1, 2, 3)]
    assert assured == [int(MOST_ASSURED * SLABS * SLAB) // 3] * 3
    for namespace in (1, 2, 3):
        for number in range(10):
            _put(store, namespace, number)
    assert all(store.namespace_bytes(namespace) for namespace in (1, 2, 3))


def test_a_quota_that_shrinks_frees_at_once_and_one_that_grows_lets_more_in() -> None:
    store = filled(StoreRules(), 4)
    store.configure({1: StoreRules(quota_bytes=2 * SLAB)})
    assert {block.key for block in store.blocks()} == {key(2), key(3)}
    store.configure({1: StoreRules(quota_bytes=3 * SLAB)})
    store.commit(store.reserve(BlockId(1, key(0)), SLAB), 7, home=True)
    assert len(store) == 3


def test_a_policy_that_takes_over_knows_what_was_used_last() -> None:
    store = filled(StoreRules("fifo"), 3)
    store.get(BlockId(1, key(0)))
    store.configure({1: StoreRules("lru")})
    store.configure({1: StoreRules("lru", quota_bytes=2 * SLAB)})
    assert store.why_gone(BlockId(1, key(1))) == EVICTED
    assert store.peek(BlockId(1, key(0))) is not None


def test_blocks_are_gone_when_their_time_is_over_and_it_is_known_why() -> None:
    store = filled(StoreRules(ttl_s=10.0), 2)
    assert store.next_expiry() == 10.0
    store.get(BlockId(1, key(0)))
    store.advance(10.0)
    assert [block.key for block in store.blocks()] == [key(1)]
    assert store.why_gone(BlockId(1, key(0))) == EXPIRED
    store.check()


def test_under_the_policy_ttl_a_use_prolongs_a_life() -> None:
    store = filled(StoreRules("ttl", ttl_s=10.0), 2)
    store.advance(5.0)
    store.get(BlockId(1, key(0)))
    store.advance(11.0)
    assert [block.key for block in store.blocks()] == [key(0)]
    store.advance(15.0)
    assert not store.blocks()


def test_hits_of_the_switch_count_for_whatever_policy_is_in_force() -> None:
    for name in ("lru", "lfu", "s3fifo", "arc", "value"):
        store = filled(StoreRules(name), 4)
        store.credit(BlockId(1, key(0)), 5)
        for number in (10, 11, 12):
            store.commit(store.reserve(BlockId(1, key(number)), SLAB), 7, home=True)
        assert store.peek(BlockId(1, key(0))) is not None, name


def test_segments_of_one_read_are_one_use() -> None:
    store = filled(StoreRules("lfu"), 3)
    store.advance(10.0)
    for _ in range(8):
        store.get(BlockId(1, key(1)))
    for now in (11.0, 12.0):
        store.advance(now)
        store.get(BlockId(1, key(0)))
        store.get(BlockId(1, key(2)))
    store.configure({1: StoreRules("lfu", quota_bytes=2 * SLAB)})
    assert store.why_gone(BlockId(1, key(1))) == EVICTED


def test_a_wrong_choice_is_counted_and_something_else_goes() -> None:
    store = filled(StoreRules(Liar.NAME), 3)
    pinned = store.peek(BlockId(1, key(0)))
    assert pinned is not None
    store.pin(pinned)
    for number in range(20, 60):
        store.commit(store.reserve(BlockId(1, key(number)), SLAB), 7, home=True)
        store.check()
    assert store.peek(BlockId(1, key(0))) is pinned
    assert store.counters.policy_faults > 0


def test_a_block_waits_for_room_that_its_own_ancestors_take() -> None:
    """Better none of its end than none of its beginning."""
    store = Store(Allocator(4 * SLAB, SLAB))
    store.configure({1: StoreRules("value", quota_bytes=3 * SLAB)})
    for number in range(3):
        copy = store.reserve(
            BlockId(1, key(number)), SLAB, parent=key(number - 1) if number else b"", depth=number
        )
        store.commit(copy, 7, home=True)
    with pytest.raises(QuotaError):
        store.reserve(BlockId(1, key(3)), SLAB, parent=key(2), depth=3)
    assert len(store) == 3
    store.check()


def test_where_nothing_is_said_of_a_blocks_place_what_was_said_before_holds() -> None:
    store = Store(Allocator(8 * SLAB, SLAB))
    store.configure({1: StoreRules("value"), 2: StoreRules("lru")})
    for namespace in (1, 2):
        store.note_place(BlockId(namespace, key(5)), key(4), 5)
    first = store.reserve(BlockId(1, key(5)), SLAB)
    assert (first.parent, first.depth) == (key(4), 5)
    said = store.reserve(BlockId(1, key(5)), SLAB, parent=key(3), depth=4)
    assert (said.parent, said.depth) == (key(3), 4)
    assert store.reserve(BlockId(2, key(5)), SLAB).parent == b"", "its policy does not look at it"
    store.commit(first, 7, home=False)
    store.note_place(BlockId(1, key(5)), key(3), 4)
    store.drop(BlockId(1, key(5)))
    assert store.reserve(BlockId(1, key(5)), SLAB).parent == key(4), "as it came"
    store.check()


def test_policies_are_asked_under_their_own_names() -> None:
    assert {name: kind.NAME for name, kind in policies.BY_NAME.items()} == {
        name: name for name in policies.BY_NAME
    }
    made: Policy[int] = policies.make(policies.DEFAULT, 1)
    assert made.NAME == policies.DEFAULT
