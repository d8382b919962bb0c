"""What takes an agent's store longer than others may wait goes a part at a time.

Oracle: the store's own books (`Store.check`), and what is said of parts: how many copies go
together, what is found meanwhile, and what there is room for.
"""

from __future__ import annotations

import random
from math import inf
from unittest import mock

import pytest
from kvcast.hostagent.core.store import (
    PART_BLOCKS,
    PAUSE_S,
    QuotaError,
    StaleReservationError,
    Store,
    StoreRules,
)
from kvcast.hostagent.tiers import policies
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.messages.wire import BlockId

SIZE = 1024
SLAB = 64 * SIZE
COUNT = 2 * PART_BLOCKS + PART_BLOCKS // 2
"""Blocks of a namespace: three parts."""


def block(number: int, namespace: int = 1) -> BlockId:
    return BlockId(namespace, number.to_bytes(16, "big"))


def put(store: Store, number: int, namespace: int = 1, size_bytes: int = SIZE) -> None:
    store.commit(store.reserve(block(number, namespace), size_bytes), 7, home=True)


def filled(policy: str = policies.DEFAULT) -> Store:
    """All of the arena but a slab is taken: by namespace 1, and some by namespace 2."""
    slabs = 2 * COUNT * SIZE // SLAB + 1
    store = Store(Allocator(slabs * SLAB, SLAB))
    store.configure({n: StoreRules(policy) for n in (1, 2)})
    for number in range(COUNT):
        put(store, number, 1)
    for number in range(COUNT):
        put(store, number, 2)
    return store


def count_of(store: Store, namespace: int) -> int:
    return sum(block.namespace == namespace for block in store.blocks())


def rest(store: Store, now: float) -> list[int]:
    """How many copies there are after each part that is left."""
    counts = []
    while (when := store.next_expiry()) is not None and when <= now + PAUSE_S:
        assert when >= now
        now = when
        store.advance(now)
        store.check()
        counts.append(len(store))
    return counts


@pytest.mark.parametrize("policy", policies.BY_NAME)
def test_a_namespace_that_nobody_looks_for_goes_by_and_by(policy: str) -> None:
    store = filled(policy)
    assert store.drop_namespace(1, at_once=False) == COUNT
    assert store.is_leaving
    assert len(store) == 2 * COUNT - PART_BLOCKS
    assert rest(store, 0.0) == [2 * COUNT - 2 * PART_BLOCKS, COUNT]
    assert count_of(store, 2) == COUNT
    assert not store.is_leaving
    assert store.counters.drops == COUNT
    assert store.counters.evictions == store.counters.expired == 0


def test_others_have_their_turn_between_two_parts() -> None:
    store = filled()
    store.advance(10.0)
    store.drop_namespace(1, at_once=False)
    for now in (10.0, 10.0 + PAUSE_S / 2):
        store.advance(now)
        assert len(store) == 2 * COUNT - PART_BLOCKS
    assert store.next_expiry() == 10.0 + PAUSE_S
    store.advance(10.0 + PAUSE_S)
    assert len(store) == 2 * COUNT - 2 * PART_BLOCKS


def test_room_that_is_wanted_is_theirs_first() -> None:
    store = filled()
    store.drop_namespace(1, at_once=False)
    for number in range(COUNT):
        put(store, COUNT + number, 2)
    assert count_of(store, 2) == 2 * COUNT
    assert store.counters.evictions == 0
    store.check()


def test_room_of_another_size_is_theirs_first_too() -> None:
    store = filled()
    store.drop_namespace(1, at_once=False)
    for number in range(COUNT * SIZE // SLAB):
        put(store, COUNT + number, 2, SLAB)
    assert store.counters.evictions == 0
    assert count_of(store, 1) == 0


def test_what_is_being_written_there_is_not_taken_any_more() -> None:
    store = filled()
    copy = store.reserve(block(5000), SIZE)
    store.drop_namespace(1, at_once=False)
    with pytest.raises(StaleReservationError):
        store.commit(copy, 7, home=True)
    rest(store, 0.0)
    store.check()


def test_what_is_pinned_there_keeps_its_bytes_until_it_is_let_go() -> None:
    store = filled()
    pinned = store.get(block(3))
    assert pinned is not None
    store.pin(pinned)
    store.drop_namespace(1, at_once=False)
    rest(store, 0.0)
    assert count_of(store, 1) == 0
    assert store.lying_at(pinned.offset) is pinned
    store.unpin(pinned)
    assert store.lying_at(pinned.offset) is None
    store.check()


def test_a_number_that_is_used_again_begins_empty() -> None:
    store = filled()
    store.drop_namespace(1, at_once=False)
    store.configure({2: StoreRules()})
    assert count_of(store, 1) == COUNT - PART_BLOCKS, "it is not named, so nobody uses it"
    store.configure({1: StoreRules(), 2: StoreRules()})
    assert count_of(store, 1) == 0
    put(store, 1)
    assert rest(store, 0.0) == []
    assert count_of(store, 1) == 1


def test_what_leaves_is_not_ordered_anew_by_another_policy() -> None:
    store = filled("lfu")
    store.drop_namespace(1, at_once=False)
    with mock.patch.object(store, "_make_policy") as made:
        store.configure({2: StoreRules("lfu")})
    assert not made.called, "nobody will ask it"


def test_blocks_of_prefixes_leave_whichever_part_their_beginning_is_in() -> None:
    store = Store(Allocator(2 * COUNT * SIZE, SLAB))
    store.configure({1: StoreRules("value")})
    numbers = list(range(1, COUNT))
    random.Random(1).shuffle(numbers)  # so that a part has beginnings, and ends of others
    for number in numbers:
        parent = block(number - 1).key if number % 50 else b""
        copy = store.reserve(block(number), SIZE, parent=parent, depth=number % 50)
        store.commit(copy, 7, home=True)
    assert store.drop_namespace(1, at_once=False) == COUNT - 1
    store.check()
    rest(store, 0.0)
    assert len(store) == store.used_bytes == 0


def test_a_namespace_that_leaves_and_is_dropped_again_is_gone() -> None:
    store = filled()
    store.drop_namespace(1, at_once=False)
    assert store.drop_namespace(1) == COUNT - PART_BLOCKS
    assert (count_of(store, 1), store.next_expiry()) == (0, None)
    store.check()


def test_several_leave_one_after_the_other() -> None:
    store = filled()
    for namespace in (1, 2):
        store.drop_namespace(namespace, at_once=False)
    assert rest(store, 0.0)[-1] == 0


@pytest.mark.parametrize("policy", policies.BY_NAME)
def test_what_exceeds_a_quota_goes_by_and_by(policy: str) -> None:
    store = filled(policy)
    quota = 100 * SIZE
    store.configure({1: StoreRules(policy, quota_bytes=quota), 2: StoreRules(policy)})
    assert store.namespace_bytes(1) == (COUNT - PART_BLOCKS) * SIZE
    rest(store, 0.0)
    assert store.namespace_bytes(1) == quota
    assert count_of(store, 2) == COUNT


def test_while_a_namespace_becomes_smaller_a_put_there_makes_it_no_larger() -> None:
    store = filled()
    store.configure({1: StoreRules(quota_bytes=10 * SIZE)})
    before = store.namespace_bytes(1)
    evictions = store.counters.evictions
    for number in range(5):
        put(store, 5000 + number)
        assert store.namespace_bytes(1) == before
    assert store.counters.evictions == evictions + 5, "nobody waits for the rest"
    with pytest.raises(QuotaError):
        store.reserve(block(6000), 11 * SIZE)
    rest(store, 0.0)
    assert store.namespace_bytes(1) == 10 * SIZE
    put(store, 7000)
    assert store.namespace_bytes(1) == 10 * SIZE


def test_a_quota_that_is_raised_or_taken_back_meanwhile_stops_it() -> None:
    for quota in (0, COUNT * SIZE):
        store = filled()
        store.configure({1: StoreRules(quota_bytes=10 * SIZE)})
        store.configure({1: StoreRules(quota_bytes=quota)})
        rest(store, 0.0)
        assert count_of(store, 1) == COUNT - PART_BLOCKS
        put(store, 5000)
        assert count_of(store, 1) == COUNT - PART_BLOCKS + 1


def test_what_is_pinned_does_not_keep_the_clock_busy() -> None:
    store = filled()
    for number in range(COUNT):
        copy = store.get(block(number))
        assert copy is not None
        store.pin(copy)
    store.configure({1: StoreRules(quota_bytes=10 * SIZE)})
    assert store.next_expiry() is None
    store.advance(inf)
    assert count_of(store, 1) == COUNT
