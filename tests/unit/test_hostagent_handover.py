"""Handing over: what is offered to whom when the map changes, and when it is said to be done.

Oracle: the module's text, with a real store and calls that the test ends as it likes. Cannot see:
bytes on their way (`bench/restart.py`, the simulation), or when the controller goes on
(`test_controller_pool.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from kvcast.hostagent.core import handover as handover_module
from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.handover import (
    RETRY_S,
    TRIES,
    Handover,
    HandoverOptions,
)
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.store import Below, Store, StoreRules
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.links.bulk import EVICTED, UNREACHABLE, PutCall
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.control import HandedOver, NamespaceInfo, NodeInfo, PoolMap
from kvcast.protocol.messages.wire import BUCKETS, BlockId

SLAB = 64 * 1024
SIZE = 1000
ME = 1


def block(number: int, bucket: int = 0) -> BlockId:
    return BlockId(1, ((number << 10) | bucket).to_bytes(16, "big"))


def pool(
    homes: list[int],
    settled: int = 0,
    epoch: int = 1,
    nodes: tuple[int, ...] = (1, 2, 3, 4),
    leaving: tuple[int, ...] = (),
    even: list[int] | None = None,
) -> Pool:
    """`even`: the homes of even buckets, if they have others."""
    infos = [
        NodeInfo(n, f"node-{n}", f"10.0.0.{n}", f"02:00:00:00:00:0{n}", n, 1, "h", n) for n in nodes
    ]
    names = [NamespaceInfo(1, "t", "m", "1", "l")]
    others = homes if even is None else even
    buckets = [list(homes if bucket % 2 else others) for bucket in range(BUCKETS)]
    new = PoolMap(epoch, infos, buckets, names, [], settled=settled, leaving=list(leaving))
    return Pool(new, ME, f"node-{ME}")


class Bench:
    """A handover over a store with some blocks."""

    def __init__(self, blocks: int = 3, **options: float) -> None:
        self.now = 10.0
        self.store = Store(Allocator(64 * SLAB, SLAB))
        self.outbox = BulkOutbox()
        chosen = HandoverOptions(**{"rate_bytes_per_s": 1e9, "max_in_flight": 8} | options)
        self.core = Handover(chosen, self.store, self.outbox)
        for number in range(blocks):
            self.hold(block(number))

    def hold(self, which: BlockId) -> None:
        self.store.commit(self.store.reserve(which, SIZE), 7, home=True)

    def use(self, new: Pool) -> None:
        old, self.outbox.pool = self.outbox.pool, new
        self.core.new_map(old, new)
        self.core.advance(self.now)

    def calls(self) -> list[PutCall]:
        calls = [call for call in self.outbox.calls if isinstance(call, PutCall)]
        self.outbox.calls.clear()
        return calls

    def offered(self) -> list[tuple[BlockId, int]]:
        return sorted((call.copy.block, call.node) for call in self.calls())

    def end_all(self, outcome: str = bulk.DONE) -> int:
        """End all calls, and those that follow; how many there were."""
        count = 0
        while calls := self.calls():
            for call in calls:
                assert call.begin()
                call.ended(self.now, outcome)
                count += 1
        return count

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.core.advance(self.now)


def test_who_is_to_take_over_is_offered_all_that_is_held_of_its_buckets() -> None:
    bench = Bench()
    bench.use(pool([1, 2]))
    assert bench.offered() == []
    bench.use(pool([1, 2, 3], settled=2, epoch=2))
    assert bench.offered() == [(block(n), 3) for n in range(3)]


@pytest.mark.parametrize(
    ("homes", "leaving", "heirs"),
    [
        ([1, 2], (1,), [2]),  # nobody takes its place: the other may lack a block
        ([1, 2], (2,), []),
        ([1, 2], (), []),
        ([1, 2, 3], (1,), [3]),  # the one that does has them all then
        ([1, 2], (1, 2), []),
    ],
)
def test_who_leaves_offers_what_it_holds_to_who_stays_where_nobody_takes_its_place(
    homes: list[int], leaving: tuple[int, ...], heirs: list[int]
) -> None:
    bench = Bench(1)
    bench.use(pool([1, 2]))
    bench.use(pool(homes, settled=2, epoch=2, leaving=leaving))
    assert bench.offered() == [(block(0), heir) for heir in heirs]
    bench.hold(block(1))
    bench.core.came(block(1), bulk.OLDEST_MAP)
    bench.core.advance(bench.now)
    assert bench.offered() == [(block(1), heir) for heir in heirs]


def test_who_does_not_hold_a_bucket_offers_nothing_of_it() -> None:
    bench = Bench()
    bench.use(pool([2, 1], settled=1))
    assert bench.offered() == []
    assert bench.core.report(bench.now) == HandedOver(1, 0, 0, 0)


def test_it_is_said_how_much_is_left_and_at_once_when_nothing_is() -> None:
    bench = Bench()
    bench.use(pool([1, 2], settled=1, epoch=5))
    assert bench.core.report(bench.now) == HandedOver(5, 3, 3, 0)
    first, second, third = bench.calls()
    for call in (first, second):
        call.begin()
        call.ended(bench.now, bulk.DONE)
        assert bench.core.report(bench.now) is None, "not that often"
    third.begin()
    third.ended(bench.now, bulk.HELD)
    assert bench.core.report(bench.now) == HandedOver(5, 0, 3, 0)
    assert bench.core.report(bench.now) is None


def test_it_is_said_at_once_that_something_is_left_again() -> None:
    """Else the controller would go on without a block that is still to be handed over."""
    bench = Bench(1)
    bench.use(pool([1, 2], settled=1, epoch=5))
    bench.end_all()
    assert bench.core.report(bench.now) == HandedOver(5, 0, 1, 0)
    bench.hold(block(1))
    bench.core.came(block(1), bulk.OLDEST_MAP)
    assert bench.core.report(bench.now) == HandedOver(5, 1, 2, 0)


def test_a_later_map_of_the_same_moves_offers_nothing_again_and_is_answered() -> None:
    bench = Bench()
    bench.use(pool([1, 2], settled=1, epoch=5))
    bench.end_all()
    bench.use(pool([1, 2], settled=1, epoch=6))
    assert bench.offered() == []
    assert bench.core.report(bench.now) == HandedOver(6, 0, 3, 0)


def test_a_further_node_gets_its_share_too() -> None:
    bench = Bench()
    bench.use(pool([1, 2], settled=1, epoch=5))
    bench.end_all()
    bench.use(pool([1, 2, 3], settled=1, epoch=6))
    assert bench.offered() == [(block(n), 3) for n in range(3)]


def test_what_comes_meanwhile_is_handed_on() -> None:
    bench = Bench(blocks=0)
    bench.use(pool([1, 2], settled=1))
    bench.hold(block(9))
    bench.core.came(block(9), bulk.OLDEST_MAP)
    bench.core.advance(bench.now)
    assert bench.offered() == [(block(9), 2)]
    assert bench.core.report(bench.now) == HandedOver(1, 1, 1, 0)


def test_what_is_put_by_who_knows_of_the_move_is_not_waited_for() -> None:
    """Else a drain would not end while blocks are put faster than they are handed over."""
    bench = Bench(blocks=0)
    bench.use(pool([1, 2], settled=1, epoch=5))
    bench.hold(block(9))
    bench.core.came(block(9), 5)
    bench.core.advance(bench.now)
    assert bench.offered() == []
    assert bench.core.report(bench.now) == HandedOver(5, 0, 0, 0)
    bench.core.came(block(9), 4)
    bench.core.advance(bench.now)
    assert bench.offered() == [(block(9), 2)]


def test_whoever_is_to_see_to_a_block_says_whether_that_is_its_business() -> None:
    bench = Bench(1)
    assert not bench.core.hand_on(block(0)), "there is no map"
    for homes, settled, mine in (
        ([1, 2], 1, True),
        ([2, 1], 1, False),  # it is to take it over itself
        ([1, 2], 0, True),  # where it is now it stays
        ([2], 0, False),
    ):
        bench.use(pool(homes, settled=settled))
        assert bench.core.hand_on(block(0)) == mine


@pytest.mark.parametrize("settled", [0, 2])
def test_a_repair_while_blocks_move_is_handed_on_by_who_gets_it(settled: int) -> None:
    bench = Bench(1)
    bench.use(pool([1, 2]))
    bench.use(pool([2, 3, 4], settled=settled, epoch=2))
    epochs = {call.node: call.epoch for call in bench.calls()}
    assert epochs == ({3: bulk.OLDEST_MAP} if settled else {3: 2, 4: 2})


def test_what_comes_to_a_settled_pool_is_not() -> None:
    bench = Bench(blocks=0)
    bench.use(pool([1, 2]))
    bench.hold(block(9))
    bench.core.came(block(9), bulk.OLDEST_MAP)
    bench.core.advance(bench.now)
    assert bench.offered() == []
    assert bench.core.report(bench.now) is None


@pytest.mark.parametrize("outcome", [UNREACHABLE, bulk.NO_ROOM, bulk.STALE, bulk.NOT_HOME])
def test_a_move_is_tried_until_it_succeeds(outcome: str) -> None:
    bench = Bench(blocks=1)
    bench.use(pool([1, 2], settled=1))
    for _ in range(4 * TRIES):
        assert bench.end_all(outcome) == 1
        assert bench.core.left == 1
        told = bench.core.report(bench.now)
        assert told is None or told.left == 1
        bench.now = bench.core.get_timer() or bench.now
        bench.core.advance(bench.now)
    assert bench.end_all() == 1
    assert bench.core.report(bench.now + 1) == HandedOver(1, 0, 1, 0)


def test_a_move_to_whom_the_block_is_not_for_fails_once_and_is_told() -> None:
    bench = Bench(blocks=1)
    bench.use(pool([1, 2], settled=1))
    assert bench.end_all(bulk.FORBIDDEN) == 1
    assert bench.core.report(bench.now) == HandedOver(1, 0, 1, 1)
    assert bench.core.get_timer() is None


def test_after_the_loss_of_a_node_who_takes_its_place_is_offered_what_there_is_room_for() -> None:
    bench = Bench()
    bench.use(pool([1, 2]))
    bench.use(pool([1, 3], epoch=2, nodes=(1, 3, 4)))
    calls = bench.calls()
    assert {call.node for call in calls} == {3}
    assert all(call.spare for call in calls)
    for call in calls:
        call.begin()
        call.ended(bench.now, bulk.NO_ROOM)
    assert bench.core.left == 0
    assert bench.core.counters.failed == 3


def test_whoever_is_given_a_bucket_at_once_is_offered_what_its_former_holder_has() -> None:
    """The controller had not heard yet that there are blocks, so nothing was to be moved."""
    bench = Bench()
    bench.use(pool([1]))
    bench.use(pool([3], epoch=2))
    assert bench.offered() == [(block(n), 3) for n in range(3)]
    assert bench.core.report(bench.now) is None, "nobody waits for it"
    bench.use(pool([3], epoch=3))
    assert bench.offered() == []


def test_what_was_moved_is_not_offered_again_when_the_move_is_over() -> None:
    bench = Bench()
    bench.use(pool([1]))
    bench.use(pool([1, 3], settled=1, epoch=2))
    assert bench.end_all() == 3
    bench.use(pool([3], epoch=3))
    assert bench.offered() == []


def test_a_repair_that_fails_is_tried_some_times() -> None:
    bench = Bench(blocks=1)
    bench.use(pool([1, 2]))
    bench.use(pool([1, 3], epoch=2, nodes=(1, 3, 4)))
    for _ in range(TRIES):
        assert bench.end_all(UNREACHABLE) == 1
        bench.wait(10 * RETRY_S)
    assert bench.offered() == []
    assert bench.core.counters.failed == 1


def test_a_node_that_was_drained_is_not_repaired() -> None:
    bench = Bench()
    bench.use(pool([1, 2]))
    bench.use(pool([1, 2, 3], settled=2, epoch=2))
    bench.end_all()
    bench.use(pool([1, 3], epoch=3))
    assert bench.offered() == []


def test_no_more_than_the_rate_is_sent_and_no_more_calls_than_the_bound_are_out() -> None:
    bench = Bench(blocks=40, rate_bytes_per_s=10 * SIZE, max_in_flight=4)
    bench.use(pool([1, 2], settled=1))
    sent = bench.end_all()
    assert sent <= 4
    for second in range(1, 4):
        for _ in range(20):
            bench.wait(0.05)
            assert len(bench.outbox.calls) <= 4
            sent += bench.end_all()
        assert sent <= 10 * second + 4
    assert sent >= 25


def test_what_is_held_there_already_costs_no_rate() -> None:
    bench = Bench(blocks=40, rate_bytes_per_s=10 * SIZE)
    bench.use(pool([1, 2], settled=1))
    assert bench.end_all(bulk.HELD) == 40


def test_a_block_that_is_gone_when_its_turn_comes_is_over() -> None:
    bench = Bench(blocks=1)
    bench.use(pool([1, 2], settled=1))
    (call,) = bench.calls()
    bench.store.drop(block(0))
    assert not call.begin()
    call.ended(bench.now, "evicted")
    assert bench.core.report(bench.now) == HandedOver(1, 0, 1, 0)


def test_a_target_that_is_gone_ends_its_moves() -> None:
    bench = Bench(blocks=2, max_in_flight=1)
    bench.use(pool([1, 2], settled=1))
    bench.use(pool([1], epoch=2, nodes=(1, 3)))
    bench.end_all(UNREACHABLE)
    bench.wait(10.0)
    assert bench.core.left == 0


def test_what_lies_in_a_lower_tier_is_brought_and_offered() -> None:
    bench = Bench(blocks=1)
    below = [block(0), block(7), block(8)]
    waiting: list[Callable[[], None]] = []

    def recall(_now: float, which: BlockId, then: Callable[[], None]) -> bool:
        if which == block(8):
            return False  # gone since
        waiting.append(then)
        return True

    bench.core.lower = lambda: below
    bench.core.recall = recall
    bench.use(pool([1, 2], settled=1))
    assert bench.offered() == [(block(0), 2)]
    assert bench.core.report(bench.now) == HandedOver(1, 2, 3, 0)
    bench.hold(block(7))
    (then,) = waiting
    then()
    assert bench.end_all() == 1
    assert bench.core.left == 1, "the first is still out"


def test_nothing_is_brought_of_a_namespace_that_was_deleted_or_for_who_does_not_want_it() -> None:
    """It may lie in a lower tier for a while, and would come to DRAM when it has gone there."""
    bench = Bench(blocks=0)
    deleted = BlockId(2, block(7).key)
    brought: list[BlockId] = []

    def recall(_now: float, which: BlockId, _then: Callable[[], None]) -> bool:
        brought.append(which)
        return True

    bench.core.lower = lambda: [deleted, block(8)]
    bench.core.recall = recall
    bench.use(pool([1, 2], settled=1))
    assert brought == [block(8)]
    assert bench.core.left == 1, "what was deleted is nobody's"


def test_what_was_brought_stays_until_it_is_sent() -> None:
    bench = Bench(blocks=0)
    waiting: list[Callable[[], None]] = []

    def recall(_now: float, _which: BlockId, then: Callable[[], None]) -> bool:
        waiting.append(then)
        return True

    bench.core.lower = lambda: [block(7)]
    bench.core.recall = recall
    bench.use(pool([1, 2], settled=1))
    bench.hold(block(7))
    waiting.pop()()
    copy = bench.store.peek(block(7))
    assert copy is not None
    assert copy.pins == 1, "its call has not begun yet"
    (call,) = bench.calls()
    assert call.begin()
    assert copy.pins == 1
    call.ended(bench.now, bulk.DONE)
    assert (copy.pins, bench.core.left) == (0, 0)


def test_what_was_brought_and_then_dropped_is_over() -> None:
    bench = Bench(blocks=0, rate_bytes_per_s=1.0)
    waiting: list[Callable[[], None]] = []

    def recall(_now: float, _which: BlockId, then: Callable[[], None]) -> bool:
        waiting.append(then)
        return True

    bench.core.lower = lambda: [block(7), block(8)]
    bench.core.recall = recall
    bench.use(pool([1, 2], settled=1))
    for which, then in zip((block(7), block(8)), waiting, strict=True):
        bench.hold(which)
        then()  # the second one waits for its turn at this rate
    (call,) = bench.calls()
    assert bench.store.drop(block(8))
    call.ended(bench.now, bulk.DONE)
    bench.wait(1e4)
    assert bench.offered() == []
    assert bench.core.left == 0
    assert bench.store.held_bytes == 0, "nothing of it is pinned any more"


class Disk:
    """What lies below a bench's store, and has room made for it in DRAM as the test likes."""

    def __init__(self, bench: Bench, *blocks: BlockId) -> None:
        self._bench = bench
        self._blocks = blocks
        self.recalled: list[BlockId] = []
        self.room = True
        self.size_bytes = SIZE
        below = mock.create_autospec(Below, instance=True)
        below.size_of.side_effect = lambda which: self.size_bytes if which in blocks else 0
        below.place_of.return_value = b"", 0
        bench.store.below = below
        bench.core.lower = lambda: blocks
        bench.core.recall = self._recall

    def _recall(self, _now: float, which: BlockId, then: Callable[[], None]) -> bool:
        if which not in self._blocks:
            return False
        self.recalled.append(which)
        if self.room:
            self._bench.hold(which)
        then()
        return True


def test_what_goes_to_the_lower_tier_before_its_turn_is_brought_back() -> None:
    bench = Bench(blocks=2)
    disk = Disk(bench, block(0))
    bench.use(pool([1, 2], settled=1))
    for call in bench.calls():
        bench.store.evict(call.copy)
        assert not call.begin()
        call.ended(bench.now, EVICTED)
    assert disk.recalled == [block(0)]
    assert bench.core.left == 1, "the other one is gone altogether"
    assert bench.core.report(bench.now) == HandedOver(1, 1, 2, 0)
    assert bench.end_all() == 1
    assert bench.core.report(bench.now) == HandedOver(1, 0, 2, 0)
    assert bench.core.counters.blocks == 1


def test_however_many_dram_has_no_room_for_they_are_tried_one_after_the_other() -> None:
    """Each recall ends at once, and was the call in which the next was made."""
    bench = Bench(blocks=0)
    blocks = [block(n) for n in range(2000)]
    disk = Disk(bench, *blocks)
    disk.room = False
    bench.use(pool([1, 2], settled=1))
    assert disk.recalled == blocks
    assert bench.core.report(bench.now) == HandedOver(1, 2000, 2000, 0, no_room=2000)
    assert bench.core.left == 2000, "each of them once, and none is out"


def test_what_dram_has_no_room_for_is_waited_for() -> None:
    bench = Bench(blocks=0)
    disk = Disk(bench, block(7))
    disk.room = False
    bench.use(pool([1, 2], settled=1))
    for _ in range(TRIES):
        assert bench.core.get_timer() is not None
        bench.wait(10 * RETRY_S)
        assert bench.offered() == []
        assert bench.core.report(bench.now) in (HandedOver(1, 1, 1, 0, no_room=1), None)
    assert len(disk.recalled) == TRIES + 1
    disk.room = True
    bench.wait(10 * RETRY_S)
    assert bench.end_all() == 1
    assert bench.core.report(bench.now) == HandedOver(1, 0, 1, 0)


@pytest.mark.parametrize(
    ("size_bytes", "quota_bytes"), [(64 * SLAB + 1, 0), (2 * SLAB, SLAB), (SLAB, SLAB // 2)]
)
def test_what_can_never_come_to_dram_fails_at_once_and_is_named(
    size_bytes: int, quota_bytes: int
) -> None:
    bench = Bench(blocks=0)
    bench.store.configure({1: StoreRules(quota_bytes=quota_bytes)})
    disk = Disk(bench, block(7), block(8))
    disk.room = False
    disk.size_bytes = size_bytes
    told: list[tuple[BlockId, int]] = []
    bench.core.too_large = lambda which, size: told.append((which, size))
    bench.use(pool([1, 2], settled=1))
    assert bench.core.report(bench.now) == HandedOver(1, 0, 2, 2)
    assert bench.core.get_timer() is None, "nothing is tried again"
    assert (bench.core.counters.failed, bench.core.counters.too_large) == (2, 2)
    assert told == [(block(7), size_bytes)], "once for each map"


def test_what_just_fits_is_waited_for() -> None:
    bench = Bench(blocks=0)
    bench.store.configure({1: StoreRules(quota_bytes=2 * SLAB)})
    disk = Disk(bench, block(7))
    disk.room = False
    disk.size_bytes = 2 * SLAB
    bench.use(pool([1, 2], settled=1))
    assert bench.core.report(bench.now) == HandedOver(1, 1, 1, 0, no_room=1)


def test_it_is_said_how_many_find_no_room_where_they_go() -> None:
    bench = Bench(blocks=3)
    bench.use(pool([1, 2], settled=1))
    first, second, third = bench.calls()
    for call, outcome in ((first, bulk.NO_ROOM), (second, UNREACHABLE), (third, bulk.DONE)):
        assert call.begin()
        call.ended(bench.now, outcome)
    assert bench.core.report(bench.now) == HandedOver(1, 2, 3, 0, no_room=1)
    bench.wait(10 * RETRY_S)
    assert bench.end_all() == 2
    assert bench.core.report(bench.now) == HandedOver(1, 0, 3, 0)


def test_what_finds_no_room_is_not_counted_any_more_when_its_target_is_gone() -> None:
    bench = Bench(blocks=1)
    bench.use(pool([1, 2], settled=1))
    assert bench.end_all(bulk.NO_ROOM) == 1
    bench.use(pool([1, 3], settled=1, epoch=2, nodes=(1, 3)))
    assert bench.end_all() == 1
    bench.wait(10 * RETRY_S)
    assert bench.core.report(bench.now) == HandedOver(2, 0, 2, 0)


def test_a_repair_that_dram_has_no_room_for_is_tried_some_times() -> None:
    bench = Bench(blocks=0)
    disk = Disk(bench, block(7))
    disk.room = False
    bench.use(pool([1, 2]))
    bench.use(pool([1, 3], epoch=2, nodes=(1, 3, 4)))
    for _ in range(2 * TRIES):
        bench.wait(10 * RETRY_S)
    assert len(disk.recalled) == TRIES
    assert (bench.core.left, bench.core.counters.failed) == (0, 1)


def test_what_dram_has_no_room_for_is_over_with_its_target() -> None:
    bench = Bench(blocks=0)
    disk = Disk(bench, block(7))
    disk.room = False
    bench.use(pool([1, 2], settled=1))
    bench.use(pool([1], epoch=2, nodes=(1, 3)))
    bench.wait(10 * RETRY_S)
    assert bench.core.left == 0


def test_a_late_replica_is_no_move_and_is_given_up_where_there_is_no_room() -> None:
    bench = Bench(blocks=1)
    bench.use(pool([1, 2], settled=1, epoch=5))
    assert bench.end_all() == 1
    assert bench.core.report(bench.now) == HandedOver(5, 0, 1, 0)
    for outcome in (bulk.DONE, bulk.NO_ROOM):
        assert bench.core.replicate(block(0), "node-2")
        assert bench.core.report(bench.now) is None, "nothing that the map waits for"
        bench.core.advance(bench.now)
        (call,) = bench.calls()
        assert not call.spare
        assert call.begin()
        call.ended(bench.now, outcome)
        assert (bench.core.left, bench.core.report(bench.now)) == (0, None)
    assert bench.core.counters.failed == 1


def test_a_late_replica_that_cannot_be_reached_is_tried_some_times() -> None:
    bench = Bench(blocks=1)
    bench.use(pool([1, 2]))
    assert bench.core.replicate(block(0), "node-2")
    for _ in range(2 * TRIES):
        bench.wait(10 * RETRY_S)
        bench.end_all(UNREACHABLE)
    assert (bench.core.left, bench.core.counters.failed) == (0, 1)
    assert not bench.core.replicate(block(5), "node-2"), "there is no such block"


def test_what_would_wait_beyond_the_bound_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where what waits does so for another try."""
    monkeypatch.setattr(handover_module, "MAX_WAITING", 3)
    bench = Bench()
    bench.use(pool([1, 2], settled=1))
    for call in bench.calls():
        call.ended(bench.now, UNREACHABLE)
    bench.hold(block(7))
    bench.core.came(block(7), bulk.OLDEST_MAP)
    assert bench.core.left == 3
    assert bench.core.counters.failed == 1
    assert bench.core.report(bench.now) == HandedOver(1, 3, 3, 1)
    bench.wait(RETRY_S)
    assert bench.end_all() == 3
    bench.core.came(block(7), bulk.OLDEST_MAP)
    assert bench.core.left == 1


def turns(bench: Bench) -> tuple[list[tuple[BlockId, int]], list[int]]:
    """What is offered until nothing is left, and how much is said to be left meanwhile."""
    offered: list[tuple[BlockId, int]] = []
    left: list[int] = []
    while True:
        calls = bench.calls()
        for call in calls:
            assert call.begin()
            call.ended(bench.now, bulk.DONE)
        told = bench.core.report(bench.now)
        offered += [(call.copy.block, call.node) for call in calls]
        left += [told.left] if told is not None else []
        timer = bench.core.get_timer()
        if timer is None and not bench.outbox.calls:
            return offered, left
        if timer is not None:
            bench.now = max(bench.now, timer, bench.now + handover_module.REPORT_S)
        bench.core.advance(bench.now)


def test_very_many_blocks_are_looked_at_by_and_by_and_nothing_is_said_to_be_done_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover_module, "PART_BLOCKS", 4)
    bench = Bench(blocks=0)
    for number in range(20):
        bench.hold(block(number, bucket=number % 2))
    bench.use(pool([1, 2]))
    bench.use(pool([1, 2, 3], settled=2, epoch=2, even=[1, 2]))
    assert bench.core.left == 20 - 4 + 2
    assert bench.core.report(bench.now) == HandedOver(2, 18, 18, 0)
    offered, left = turns(bench)
    assert offered == [(block(n, 1), 3) for n in range(1, 20, 2)]
    assert left.index(0) == len(left) - 1
    assert bench.core.left == 0


def test_a_further_map_while_blocks_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is still to have them gets all of them once, and whoever is not any more is not
    looked for."""
    monkeypatch.setattr(handover_module, "PART_BLOCKS", 4)
    bench = Bench(blocks=12)
    bench.use(pool([1, 2]))
    bench.use(pool([1, 2, 3], settled=2, epoch=2))
    bench.use(pool([1, 2, 3, 4], settled=2, epoch=3))
    offered = turns(bench)[0]
    assert sorted(offered) == [(block(n), node) for n in range(12) for node in (3, 4)]
    bench.use(pool([1, 2], epoch=4))
    bench.use(pool([1, 2, 3], settled=2, epoch=5))
    assert bench.end_all() == 4
    bench.use(pool([1, 2, 4], settled=2, epoch=6))
    offered = turns(bench)[0]
    assert sorted(offered) == [(block(n), 4) for n in range(12)]


def test_a_repair_goes_on_with_what_was_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_module, "PART_BLOCKS", 4)
    bench = Bench(blocks=12)
    bench.use(pool([1, 2]))
    bench.use(pool([1, 3], epoch=2, nodes=(1, 3, 4)))
    bench.use(pool([1, 3], epoch=3, nodes=(1, 3)))
    assert turns(bench)[0] == [(block(n), 3) for n in range(12)]
    bench.use(pool([1, 4], epoch=4, nodes=(1, 4)))
    assert bench.end_all() == 4
    bench.use(pool([1], epoch=5, nodes=(1,)))
    assert bench.core.left == 0
    assert turns(bench)[0] == []


def test_what_lies_in_two_tiers_is_offered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_module, "PART_BLOCKS", 4)
    bench = Bench(blocks=6)
    bench.core.lower = lambda: iter([block(n) for n in (*range(6), *range(6))])
    bench.use(pool([1, 2]))
    bench.use(pool([1, 2, 3], settled=2, epoch=2))
    assert turns(bench)[0] == [(block(n), 3) for n in range(6)]


def test_however_many_are_here_all_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_module, "MAX_WAITING", 10)
    monkeypatch.setattr(handover_module, "PART_BLOCKS", 4)
    bench = Bench(blocks=30)
    bench.use(pool([1, 2]))
    bench.use(pool([1, 2, 3], settled=2, epoch=2))
    bench.hold(block(99))
    bench.core.came(block(99), bulk.OLDEST_MAP)
    assert len(turns(bench)[0]) == 31
    assert bench.core.counters.failed == 0


def test_it_is_told_when_nothing_was_found_for_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the controller would wait for ever: no call ends that could tell."""
    monkeypatch.setattr(handover_module, "PART_BLOCKS", 4)
    bench = Bench(blocks=10)  # in bucket 0
    bench.use(pool([1, 2]))
    bench.use(pool([1, 2, 3], settled=2, epoch=2, even=[1, 2]))
    left = [bench.core.report(bench.now)]
    bench.core.progressed = lambda now: left.append(bench.core.report(now))
    while (timer := bench.core.get_timer()) is not None:
        bench.now = max(bench.now, timer)
        bench.core.advance(bench.now)
    assert (left[0], left[-1]) == (HandedOver(2, 6, 6, 0), HandedOver(2, 0, 0, 0))


def test_tasks_that_nobody_takes_any_more_do_not_hold_others_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover_module, "PART_BLOCKS", 10)
    bench = Bench(blocks=30, max_in_flight=0)
    bench.use(pool([1, 2]))
    bench.use(pool([1, 2, 3], settled=2, epoch=2))
    turns_ = 0
    while (timer := bench.core.get_timer()) is not None:
        bench.now = max(bench.now, timer)
        bench.core.advance(bench.now)
    assert bench.core.left == 30
    bench.core.options = HandoverOptions(1e9, 8)
    bench.use(pool([1, 2], epoch=3))
    while bench.core.left:
        turns_ += 1
        assert bench.core.get_timer() is not None
        bench.core.advance(bench.now)
    assert (turns_, bench.calls()) == (2, [])
