"""What a tier keeps, and what goes, for the sake of prefixes that lie in several tiers of a node.

Two stores, the second below the first, and nothing that moves between them. That nothing leaves a
node without what is behind it, whatever happens, is `test_hostagent_lower_tiers`'s.
"""

from __future__ import annotations

import pytest
from dram import SIZE, block
from kvcast.hostagent.core.prefix_closure import PrefixClosure
from kvcast.hostagent.core.store import Copy, NoRoomError, Store, StoreRules
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.messages.wire import BlockId

PARENT, CHILD, GRANDCHILD = 0, 1, 2
OTHERS = range(100, 120)


class Node:
    """DRAM and a shelf of four blocks each."""

    def __init__(self, policy: str = "value") -> None:
        self.dram, self.shelf = (Store(Allocator(4 * SIZE, 4 * SIZE)) for _ in range(2))
        for store in (self.dram, self.shelf):
            store.configure({1: StoreRules(policy=policy)})
        PrefixClosure(self.dram, [(self.shelf, lambda name: self.shelf.known(name) is not None)])
        self.now = 0.0

    def put(self, store: Store, number: int) -> Copy:
        return store.commit(self.reserve(store, number), number + 1, home=True)

    def reserve(self, store: Store, number: int) -> Copy:
        if number in OTHERS:
            return store.reserve(block(number), SIZE)
        parent = block(number - 1).key if number else b""
        return store.reserve(block(number), SIZE, parent=parent, depth=number)

    def settled(self) -> list[str]:
        """Where the prefix lies after the next event."""
        self.dram.advance(self.now)
        for store in (self.dram, self.shelf):
            store.check()
        return [
            "".join(
                name
                for name, store in (("d", self.dram), ("s", self.shelf))
                if store.known(block(number)) is not None
            )
            for number in (PARENT, CHILD, GRANDCHILD)
        ]


def test_the_last_tier_keeps_what_others_have_the_next_blocks_of() -> None:
    node = Node()
    node.put(node.shelf, PARENT)
    node.put(node.dram, CHILD)
    for number in OTHERS:
        node.put(node.shelf, number)
    assert node.settled() == ["s", "d", ""]
    # But not what lies elsewhere, too, or what nobody is behind.
    node.put(node.dram, PARENT)
    for number in OTHERS:
        node.put(node.shelf, number)
    assert node.settled() == ["d", "d", ""]


def test_a_tier_that_could_only_keep_gives_one_up_with_what_is_behind_it() -> None:
    """Nobody keeps others out of a tier by blocks that are small, and elsewhere."""
    node = Node()
    for number in range(0, 40, 10):
        node.put(node.shelf, number)
        node.put(node.dram, number + 1)
    node.put(node.shelf, OTHERS[0])
    assert node.settled() == ["", "", ""]
    assert len(node.dram) == 3


def test_dram_takes_a_put_and_with_what_it_displaces_goes_what_is_behind() -> None:
    node = Node()
    node.put(node.dram, PARENT)
    node.put(node.shelf, CHILD)
    node.put(node.shelf, GRANDCHILD)
    for number in OTHERS[:4]:
        node.put(node.dram, number)
    assert node.settled() == ["", "", ""]
    assert node.shelf.counters.orphaned == 2
    assert node.dram.why_gone(block(PARENT)) == node.shelf.why_gone(block(CHILD)) == "evicted"


def test_what_is_lost_below_takes_what_is_behind_it_from_dram() -> None:
    node = Node()
    lost = node.put(node.shelf, PARENT)
    held = node.put(node.dram, CHILD)
    node.put(node.dram, GRANDCHILD)
    node.put(node.shelf, GRANDCHILD)
    node.dram.pin(held)
    node.shelf.give_up(lost)
    assert node.settled() == ["", "", ""]
    node.dram.unpin(held)
    assert node.dram.used_bytes == node.shelf.used_bytes == 0


def test_what_has_come_back_meanwhile_keeps_what_is_behind_it() -> None:
    node = Node()
    lost = node.put(node.shelf, PARENT)
    node.put(node.dram, CHILD)
    node.shelf.give_up(lost)
    node.put(node.dram, PARENT)
    assert node.settled() == ["d", "d", ""]


def test_a_block_that_is_being_written_keeps_the_one_before_it_below() -> None:
    node = Node()
    above = node.put(node.shelf, PARENT)
    for aborts in (True, False):
        coming = node.reserve(node.dram, CHILD)
        for number in OTHERS:
            node.put(node.shelf, number)
        assert node.settled() == ["s", "", ""]
        if aborts:
            node.dram.abort(coming)
        else:
            node.dram.commit(coming, 2, home=True)
        assert not above.pins
    with pytest.raises(NoRoomError):
        node.dram.reserve(block(OTHERS[0]), 8 * SIZE, parent=block(PARENT).key, depth=1)
    assert not above.pins


def test_what_lies_beyond_this_node_has_not_left_it() -> None:
    class Beyond:
        def holds(self, name: BlockId) -> bool:
            return name == block(PARENT)

        def committed(self, copy: Copy) -> None:
            pass

        def drop(self, name: BlockId) -> bool:
            return False

        def drop_namespace(self, namespace: int, *, deleted: bool = True) -> None:
            pass

    node = Node()
    node.dram.beyond = Beyond()
    node.put(node.dram, PARENT)
    node.put(node.shelf, CHILD)
    for number in OTHERS[:4]:
        node.put(node.dram, number)
    assert node.settled() == ["", "s", ""]


def test_a_policy_without_prefixes_keeps_nothing() -> None:
    node = Node("lru")
    node.put(node.shelf, PARENT)
    node.put(node.dram, CHILD)
    assert not node.reserve(node.dram, CHILD).waits_on
    for number in OTHERS:
        node.put(node.shelf, number)
    assert node.settled() == ["", "d", ""]
