"""The SSD tier's decisions, on a disk that does what a test says, when it says it.

Oracle: what was put, and the bounds that the rules state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from dram import ARENA, SIZE, Dram, block
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.core.ssd import HEAT_S, MAX_ERRORS, RETRY_S, SsdRules, SsdTier
from kvcast.hostagent.core.store import (
    PART_BLOCKS,
    PAUSE_S,
    Copy,
    NoRoomError,
    StoreRules,
)
from kvcast.hostagent.tiers.counting_filter import CountingFilter
from kvcast.hostagent.tiers.ssd.layout import (
    MAX_ORDER,
    Cut,
    Entry,
    Scanned,
    cut_of,
    open_formatted,
    pack_entry,
    scan,
)
from kvcast.hostagent.tiers.ssd.orders import Kind, Order
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.simulation.disk import SimDisk

UNIT, SLAB = 4096, 32 * 4096
CUT = cut_of("node", 5 * SLAB, UNIT, SLAB)
RULES = SsdRules(0.75, 0.5, max_reads=2, max_reads_waiting=3)


class Bench(Dram):
    """A store of sixteen blocks, and a tier over one disk, or several."""

    def __init__(
        self,
        rules: SsdRules = RULES,
        disks: list[SimDisk] | None = None,
        cut: Cut = CUT,
        now: float = 0.0,
        epoch_s: float = 1e9,
        arena_bytes: int = ARENA,
    ) -> None:
        super().__init__(arena_bytes)
        self.disks = disks or [SimDisk(random.Random(1))]
        self.cut = cut
        formatted = [open_formatted(d, cut, 7 + n) for n, d in enumerate(self.disks)]
        self.tier = SsdTier(rules, self.store, self.memory, formatted, epoch_s)
        self.tier.meaning_of = lambda namespace: 70 + namespace
        self.store.below = self.tier
        self.now = now
        self.store.advance(now)
        for number, each in enumerate(formatted):
            if each.found:
                for piece in scan(self.disks[number], each):
                    self.tier.found(number, piece)
                self.tier.scanned()
        self.tier.begin()
        self.waiting: list[Order] = []
        self.got: list[tuple[int, str, float]] = []

    def take(self) -> None:
        self.waiting += self.tier.take_orders(self.now)

    def end(self, order: Order, error: str = "") -> None:
        """An order is done, or fails."""
        self.waiting.remove(order)
        digest = 0
        if not error:
            error, digest = self.disks[order.file].do(order)
        order.ended(self.now, error, digest)
        self.take()

    def work(self, error: str = "", kind: Kind | None = None) -> None:
        """The disk does all that it is to do; orders of that kind fail."""
        self.take()
        while self.waiting:
            order = self.waiting[0]
            self.end(order, error if kind in (None, order.kind) else "")
        self.tier.check()
        self.store.check()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.advance(self.now)

    def read(self, number: int, namespace: int = 1) -> bool:
        room: Copy | None = None

        def begin(size_bytes: int) -> memoryview | None:
            nonlocal room
            try:
                room = self.store.reserve(block(number, namespace), size_bytes)
            except NoRoomError:
                return None
            return self.memory[room.offset : room.offset + size_bytes]

        def ended(_now: float, error: str, digest: int, committed_at: float) -> None:
            self.got.append((number, error, committed_at))
            if room is None:
                return
            if error:
                self.store.abort(room)
                return
            assert bytes(self.memory[room.offset : room.offset + SIZE]) == bytes([number]) * SIZE
            copy = self.store.commit(room, digest, home=True, since=committed_at)
            self.tier.promoted(copy)

        return self.tier.read(block(number, namespace), begin, ended)

    def what(self, order: Order) -> str:
        """Bytes of a block, the table, or a flush; or a read."""
        if order.kind is not Kind.WRITE:
            return order.kind.value[0]
        return "b" if order.offset >= self.cut.blocks_offset else "t"

    def in_dram(self, number: int, namespace: int = 1) -> bool:
        return self.store.known(block(number, namespace)) is not None

    def on_disk(self, number: int, namespace: int = 1) -> bool:
        return self.tier.holds(block(number, namespace))


def counted(bench: Bench) -> CountingFilter:
    """A filter of what lies on disk, from now on; `SsdTier.check` looks that it is."""
    of_blocks = CountingFilter(bench.tier.most_blocks)
    bench.tier.use_filter(of_blocks)
    return of_blocks


def test_a_filter_has_what_lies_on_disk_and_nothing_else() -> None:
    bench = Bench()
    bench.fill(range(10))
    of_blocks = counted(bench)
    assert not any(of_blocks.memory)
    bench.fill(range(10, 40))
    assert bench.tier.counters.demotions_room > 20
    bench.store.drop(block(3))
    for number in range(40):
        assert of_blocks.may_hold(block(number)) == bench.on_disk(number)
    again = counted(bench)
    assert bytes(again.memory) == bytes(of_blocks.memory)
    bench.put(0, b"other" * 800)
    bench.put(50)
    bench.work("an error", Kind.WRITE)
    bench.store.drop_namespace(1)
    bench.work()
    assert not any(again.memory)
    assert any(of_blocks.memory), "it was not used any more"


def test_a_filter_has_what_was_found_before_and_after_it_is_claimed() -> None:
    bench = Bench()
    bench.fill(range(40))
    there = [number for number in range(40) if bench.on_disk(number)]
    cut = bench.cut
    formatted = open_formatted(bench.disks[0], cut, 7)
    tier = SsdTier(RULES, Bench().store, bench.memory, [formatted], 1e9)
    tier.meaning_of = lambda _namespace: 71
    of_blocks = CountingFilter()
    tier.use_filter(of_blocks)
    for piece in scan(bench.disks[0], formatted):
        tier.found(0, piece)
        tier.found(0, piece)  # the same once more is refused
    tier.scanned()
    for _ in range(2):
        assert all(of_blocks.may_hold(block(number)) for number in there)
        assert sum(of_blocks.memory) == 2 * len(there)
        tier.begin()
        tier.take_orders(0.0)
    assert tier.is_ready
    assert len(tier.shelf) == len(there)
    for number in there:
        tier.drop(block(number))
    assert not any(of_blocks.memory)


def test_a_filter_has_nothing_of_a_file_that_is_given_up_or_that_meant_something_else() -> None:
    bench = Bench()
    bench.fill(range(40))
    again = Bench(disks=bench.disks)
    of_blocks = counted(again)
    assert any(of_blocks.memory)
    for number in range(MAX_ERRORS):
        at = next(n for n in range(number, 40) if again.on_disk(n))
        assert again.read(at)
        again.work("an error", Kind.READ)
    assert again.tier.counters.files_failed == 1
    assert not any(of_blocks.memory)
    other = Bench(disks=bench.disks)
    other.tier.meaning_of = lambda _namespace: 99
    of_blocks = counted(other)
    other.work()
    assert not any(of_blocks.memory)


def test_nothing_goes_down_below_the_high_mark_and_what_goes_then_is_what_was_not_used() -> None:
    bench = Bench()
    bench.fill(range(12))
    assert not len(bench.tier.shelf)
    bench.store.get(block(0))
    bench.fill(range(12, 13))
    down = [number for number in range(13) if bench.on_disk(number)]
    assert down == [1, 2, 3, 4, 5]
    assert [number for number in range(13) if not bench.in_dram(number)] == down
    assert bench.tier.counters.demotions_room == 5


def test_the_disk_has_bytes_to_write_while_the_table_is_written_and_a_flush_is_waited_for() -> None:
    bench = Bench(SsdRules(0.75, 0.25, batch_share=2 / 16))
    for number in range(16):
        bench.put(number)
    bench.take()
    rounds = []
    while bench.waiting:
        bench.take()
        rounds.append("".join(bench.what(order) for order in bench.waiting))
        for order in list(bench.waiting):
            bench.end(order)
    assert " ".join(rounds) == "bbbb f tbb f tbb f tbb f tbb f t f t"
    assert sum(bench.on_disk(number) for number in range(16)) == 12
    assert bench.store.used_bytes == ARENA // 4
    for number in range(20, 32):
        bench.put(number)
    bench.take()
    bench.take()
    rounds = []
    while len(rounds) < 3 and bench.waiting:
        waiting = list(bench.waiting)
        rounds.append("".join(bench.what(order) for order in waiting))
        hurried = [order for order in waiting if order.hurried]
        for order in hurried or waiting[:2]:  # those two that were given first
            bench.end(order)
    assert rounds == ["bbbb", "bbf", "bbtbb"]
    bench.work()


def test_what_is_assured_stays_in_dram_and_has_its_share_of_the_disk() -> None:
    bench = Bench()
    share = StoreRules(assured_bytes=4 * SIZE)
    bench.store.configure({1: share})
    bench.tier.configure({1: share, 2: StoreRules()}, set())
    bench.fill(range(1, 7))
    bench.fill(range(20, 20 + 5 * SLAB // SIZE), namespace=2)
    mine = [bench.in_dram(number) for number in range(1, 7)]
    assert sum(mine) == 4, "what is beyond its share went down"
    assert not bench.on_disk(20, 2), "the disk is full, and what came first has left it"
    assert any(bench.on_disk(number, 2) for number in range(100, 180))
    # Its other blocks go down, and nothing of another evicts them there.
    bench.store.configure({1: StoreRules(quota_bytes=SIZE)})
    bench.fill(range(7, 11))
    held = {number for number in range(1, 11) if bench.on_disk(number)}
    assert len(held) >= 4
    bench.fill(range(10, 250), namespace=2)
    assert sum(map(bench.on_disk, held)) >= 4


def test_a_namespace_whose_media_name_no_disk_leaves_nothing_there() -> None:
    bench = Bench()
    rules = {1: StoreRules(), 2: StoreRules()}
    bench.tier.configure(rules, set())
    bench.fill(range(1, 30), namespace=2)
    assert any(bench.on_disk(number, 2) for number in range(1, 30))
    bench.tier.configure(rules, {2})
    bench.work()
    assert not any(bench.on_disk(number, 2) for number in range(1, 30)), "at once"
    bench.fill(range(30, 60), namespace=2)
    bench.fill(range(60, 80), namespace=1)
    assert not any(bench.on_disk(number, 2) for number in range(1, 60))
    assert any(bench.on_disk(number) for number in range(60, 80)), "others go down all the same"


def test_what_is_chosen_while_others_are_written_is_bounded() -> None:
    bench = Bench(SsdRules(0.75, 0.0, batch_share=2 / 16))
    for number in range(16):
        bench.put(number)
    for _ in range(200):
        bench.take()
        if not bench.waiting:
            break
        assert sum(1 for _ in bench.tier._moves()) <= 8
        bench.end(bench.waiting[0])
    assert not len(bench.store)


def test_nothing_is_written_where_by_the_table_on_the_disk_something_lies() -> None:
    bench = Bench(SsdRules(0.75, 0.5, batch_share=4 / 16), cut=cut_of("node", 2 * SLAB, UNIT, SLAB))
    bench.fill(range(40))
    lies_there = set(bench.tier._table.entries)
    assert len(lies_there) > 16
    cleared: set[int] = set()
    seen = 0
    for number in range(40, 80):
        bench.put(number)
        bench.take()
        while bench.waiting:
            order = bench.waiting[0]
            what = bench.what(order)
            if what == "f":
                lies_there -= cleared
                cleared = set()
            elif what == "b":
                assert (order.offset - bench.cut.blocks_offset) // UNIT not in lies_there
                seen += 1
            else:
                first = (order.offset - 4096) // 4096 * 32
                for at in range(first, first + len(order.view) // 128):
                    taken = any(order.view[(at - first) * 128 :][:128])
                    (lies_there if taken else cleared).add(at)
            bench.end(order)
    assert seen > 30


def test_pages_of_the_table_that_lie_beside_each_other_are_one_order() -> None:
    bench = Bench(SsdRules(0.75, 0.0, batch_share=1.0), cut=cut_of("node", 9 * SLAB, UNIT, SLAB))
    table = bench.tier._table
    pages = (0, 1, 5, 40, 41, 120)
    for page in pages:
        table.overwrite(32 * page)
    runs = table.take_dirty(lambda _unit: 32 * 41)
    assert [(run.start // 32, run.stop // 32) for run in runs] == [
        *((0, 6), (40, 41), (41, 42), (120, 121)),
    ]
    assert not table.dirty
    assert not table.clears
    table.write_again(runs[0])
    assert sorted(table.dirty) == [32 * page for page in range(6)]
    assert table.clears


def test_what_is_used_while_it_is_written_stays_and_is_clean() -> None:
    bench = Bench()
    bench.fill(range(12))
    bench.put(12)
    bench.take()
    bench.pass_time(1.0)
    assert bench.store.get(block(0)) is not None
    bench.work()
    assert bench.in_dram(0)
    assert bench.on_disk(0)
    bench.fill(range(13, 20))
    written = bench.tier.counters.demotions_room
    for number in range(20, 30):
        bench.fill(range(number, number + 1))
    assert not bench.in_dram(0)
    assert bench.tier.counters.demotions_clean >= 1
    assert bench.tier.counters.demotions_room > written


def test_what_was_pinned_goes_down_when_it_is_released_and_nothing_else_happens() -> None:
    bench = Bench()
    for number in range(14):
        bench.store.pin(bench.put(number))
    bench.work()
    assert not bench.tier.is_behind
    assert bench.tier.counters.demotions_room == 0
    woken = []
    bench.tier.wake = lambda: woken.append(True)
    for number in range(14):
        copy = bench.store.known(block(number))
        assert copy is not None
        bench.store.unpin(copy)
    assert woken
    bench.work()
    assert bench.tier.counters.demotions_room == 6, "until half of DRAM is free"
    assert bench.tier.counters.left_unwritten == 0


def test_a_disk_that_is_too_slow_costs_blocks_and_no_put() -> None:
    bench = Bench()
    for number in range(60):
        bench.put(number)  # nothing is ever written
        bench.take()
    assert bench.tier.counters.left_unwritten > 30
    assert bench.in_dram(59)
    bench.work()
    bench.fill(range(60, 80))
    assert bench.on_disk(65)


class Timed(Bench):
    """A larger store, over a disk that takes its time: so much for each block."""

    CAPACITY = 256 * SIZE
    BLOCK_S = 0.001

    def __init__(self, rules: SsdRules) -> None:
        cut = cut_of("node", 60 * SLAB, UNIT, SLAB)
        super().__init__(rules, cut=cut, arena_bytes=self.CAPACITY)
        self._free_at = 0.0
        self._number = 0
        self.most_used_bytes = 0

    def until(self, when: float) -> None:
        """The disk works until then, on one order after the other."""
        self.take()
        while self.waiting:
            order = self.waiting[0]
            done_at = max(self._free_at, self.now) + self.BLOCK_S * len(order.view) / SIZE
            if done_at > when:
                break
            self._free_at = self.now = done_at
            self.store.advance(self.now)
            self.end(order)
        self.now = when
        self.store.advance(when)

    def burst(self, blocks: int, pause_s: float) -> None:
        """So many blocks are put, one after the other."""
        for _ in range(blocks):
            self.until(self.now + pause_s)
            self._number += 1
            self.put(self._number, self._number.to_bytes(4, "big") * (SIZE // 4))
            self.most_used_bytes = max(self.most_used_bytes, self.store.used_bytes)

    def unwritten_in(self, bursts: int, blocks: int, pause_s: float) -> int:
        """Of such bursts, one every half a minute: how many blocks DRAM gave up unwritten."""
        before = self.tier.counters.left_unwritten
        for _ in range(bursts):
            self.burst(blocks, pause_s)
            self.until(self.now + 30.0)
        return self.tier.counters.left_unwritten - before


FIXED = SsdRules(0.9, 0.85)


def test_dram_is_filled_nearly_to_the_end_where_little_comes() -> None:
    used = []
    for rules in (SsdRules(), FIXED):
        bench = Timed(rules)
        bench.burst(500, 10.0)
        bench.most_used_bytes = 0
        bench.burst(60, 10.0)
        assert bench.tier.counters.left_unwritten == 0
        used.append(bench.most_used_bytes / bench.CAPACITY)
        bench.tier.check()
    assert used[0] > 0.96
    assert used[1] < 0.91


@pytest.mark.parametrize("pause_s", [0.0, 0.0005, 0.002])
def test_room_is_kept_free_for_as_much_as_comes_while_room_is_made(pause_s: float) -> None:
    """Bursts of a fifth of DRAM, which come faster than the disk takes them."""
    bench = Timed(SsdRules())
    bench.unwritten_in(6, 52, pause_s)  # until DRAM is full, and then two
    assert bench.unwritten_in(20, 52, pause_s) == 0
    if pause_s < bench.BLOCK_S:
        assert Timed(FIXED).unwritten_in(26, 52, pause_s) > 26
    bench.tier.check()
    # An hour later nobody knows of them any more.
    bench.burst(400, 10.0)
    bench.most_used_bytes = 0
    bench.burst(60, 10.0)
    assert bench.most_used_bytes > 0.93 * bench.CAPACITY


def test_what_is_kept_free_is_bounded_whatever_comes() -> None:
    bench = Timed(SsdRules())
    bench.burst(2000, 0.0001)  # ten times what the disk takes
    for quota_bytes in (0, 40 * SIZE):
        of_bytes = quota_bytes or bench.CAPACITY
        high, low = bench.tier._marks(quota_bytes)
        assert 0.74 * of_bytes < high < 0.98 * of_bytes
        assert 0.6 * of_bytes < low < high
    assert bench.tier.values()["ssd_headroom_bytes"] == bench.CAPACITY - bench.tier._marks()[0]
    bench.until(bench.now + 5.0)
    assert bench.store.used_bytes <= bench.tier._marks()[0]
    bench.tier.check()


def test_room_that_a_quota_lacks_is_not_kept_free_of_dram() -> None:
    bench = Timed(SsdRules())
    bench.store.configure({1: StoreRules(quota_bytes=10 * SIZE)})
    before = bench.tier._marks()[0]
    bench.burst(100, 0.0)
    assert bench.tier.counters.left_unwritten > 50
    assert bench.tier._marks()[0] >= before


def test_a_large_namespace_leaves_the_disk_by_and_by_and_does_not_come_back() -> None:
    bench = Bench(cut=cut_of("node", 60 * SLAB, UNIT, SLAB))
    count = 2 * PART_BLOCKS + 100
    for number in range(count):
        bench.put(number, number.to_bytes(2, "big") * (SIZE // 2))
        bench.work()
    bench.fill(range(20), namespace=2)
    shelved = len(bench.tier.shelf)
    assert shelved > 2 * PART_BLOCKS
    bench.store.drop_namespace(1, at_once=False)
    assert len(bench.tier.shelf) == shelved - PART_BLOCKS
    while bench.tier.shelf.is_leaving:
        when = bench.tier.get_timer(bench.now)
        assert when is not None
        bench.pass_time(max(0.0, when - bench.now))
        bench.work()
    assert {held.namespace for held in bench.tier.shelf.blocks()} == {2}
    after = Bench(disks=bench.disks, cut=bench.cut)
    after.work()
    assert {held.namespace for held in after.tier.shelf.blocks()} == {2}


def test_while_a_namespace_leaves_nothing_goes_down() -> None:
    bench = Bench(SsdRules(0.25, 0.1), arena_bytes=2 * PART_BLOCKS * SIZE)
    for number in range(2 * PART_BLOCKS - 10):
        bench.put(number, bytes(SIZE))
    bench.store.drop_namespace(1, at_once=False)
    for number in range(5):
        bench.put(number, namespace=2)
    assert bench.store.used_bytes > bench.tier._marks()[0]
    bench.work()
    assert len(bench.tier.shelf) == 0
    while bench.store.is_leaving:
        bench.pass_time(PAUSE_S)
    for number in range(5, 200):
        bench.put(number, namespace=2)
    bench.work()
    assert len(bench.tier.shelf) > 0


def test_a_block_that_is_dropped_while_it_is_written_does_not_come_back() -> None:
    bench = Bench()
    bench.fill(range(12))
    bench.put(12)
    bench.take()
    assert bench.store.drop(block(0))
    bench.store.drop_namespace(2)
    bench.work()
    assert not bench.on_disk(0)
    assert bench.tier.counters.demotions_cancelled == 1
    again = Bench(disks=bench.disks)
    again.work()
    assert not again.on_disk(0)
    assert again.on_disk(1)


def test_what_is_dropped_before_it_is_claimed_does_not_come_back() -> None:
    bench = Bench()
    bench.fill(range(20))
    bench.fill(range(20), namespace=2)
    there = [(n, s) for s in (1, 2) for n in range(20) if bench.on_disk(n, s)]
    again = Bench(disks=bench.disks)
    assert again.store.drop(block(0))
    assert not again.store.drop(block(0))
    again.store.drop_namespace(2)
    again.work()
    last = Bench(disks=bench.disks)
    last.work()
    left = [(n, s) for s in (1, 2) for n in range(20) if last.on_disk(n, s)]
    assert left == [(n, s) for n, s in there if n != 0 and s == 1]


def test_a_block_that_is_dropped_while_it_is_read_is_not_served() -> None:
    bench = Bench()
    bench.fill(range(20))
    assert bench.read(0)
    bench.take()
    assert bench.store.drop(block(0))
    bench.work()
    assert [(number, bool(error)) for number, error, _ in bench.got] == [(0, True)]
    assert not bench.in_dram(0)


def test_reads_at_once_and_reads_that_wait_are_bounded() -> None:
    bench = Bench()
    bench.fill(range(40))
    down = [n for n in range(40) if not bench.in_dram(n)]
    assert [bench.read(number) for number in down[:7]] == [True] * 5 + [False] * 2
    bench.take()
    assert sum(order.kind is Kind.READ for order in bench.waiting) == RULES.max_reads
    assert bench.tier.counters.reads_refused == 2
    assert not bench.read(99)
    bench.work()
    assert [error for _, error, _ in bench.got] == [""] * 5


def test_what_is_read_once_goes_first_and_what_comes_again_stays() -> None:
    bench = Bench()
    bench.fill(range(20))
    bench.pass_time(1.0)
    assert bench.read(0)
    bench.work()
    assert bench.in_dram(0)
    bench.fill(range(20, 24))
    assert not bench.in_dram(0), "it was used last, and has passed"
    assert bench.tier.counters.passed == 1
    bench.pass_time(HEAT_S / 2)
    assert bench.read(0)
    bench.work()
    assert bench.tier.counters.promotions_hot == 1
    bench.fill(range(24, 28))
    assert bench.in_dram(0)


def test_of_many_blocks_that_pass_a_few_are_looked_at_for_each_that_goes() -> None:
    looked = 0

    class Counted(BoundedMap[BlockId, float]):
        def items(self) -> Iterator[tuple[BlockId, float]]:  # type: ignore[override]
            nonlocal looked
            for each in super().items():
                looked += 1
                yield each

    bench = Bench()
    passing = bench.tier._passing = Counted(65536)
    for number in range(10_000):
        passing[block(number, namespace=2)] = 0.0
    bench.fill(range(20))
    assert not bench.in_dram(0)
    gone = 10_000 - len(passing)
    assert 0 < gone <= looked < 1000


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_before_what_in_a_prefix_is_known_in_either_tier_and_after_a_restart(
    order: int,
) -> None:
    rules = {1: StoreRules("value")}
    bench = Bench()
    bench.store.configure(rules)
    bench.tier.configure(rules, set())
    for number in range(1, 9)[::order]:
        parent = block(number - 1).key if number > 1 else b""
        copy = bench.store.reserve(block(number), SIZE, parent=parent, depth=number - 1)
        bench.memory[copy.offset : copy.offset + SIZE] = bytes([number]) * SIZE
        bench.store.commit(copy, digest_of(bytes([number]) * SIZE), home=True)
        bench.work()
    bench.fill(range(20, 60), namespace=2)
    assert all(bench.on_disk(number) for number in range(1, 9))
    after = Bench(disks=bench.disks)
    after.store.configure(rules)
    after.tier.configure(rules, set())
    after.work()
    behind = [block(number) for number in range(2, 9)]
    assert after.tier.shelf._namespaces[1].policy.descendants(block(1)) == behind
    for number in range(1, 9)[::-order]:
        assert after.read(number)
        after.work()
    assert after.store._namespaces[1].policy.descendants(block(1)) == behind
    deepest = after.store.known(block(8))
    assert deepest is not None
    assert deepest.depth == 7


def test_time_to_live_goes_on_in_either_tier_and_over_a_restart() -> None:
    rules = {1: StoreRules(ttl_s=100.0)}
    bench = Bench()
    bench.store.configure(rules)
    bench.tier.configure(rules, set())
    bench.fill(range(1))
    bench.pass_time(60.0)
    bench.fill(range(1, 20))
    assert bench.on_disk(0)
    assert bench.read(0)
    bench.work()
    assert bench.got[-1][2] == 0.0
    after = Bench(disks=bench.disks, now=5.0, epoch_s=1e9 + 55.0)  # the clock began anew
    after.tier.configure(rules, set())
    after.work()
    assert after.on_disk(0)
    bench.pass_time(41.0)
    assert not bench.in_dram(0)
    assert not bench.on_disk(0)
    assert bench.on_disk(1)
    after.pass_time(41.0)
    assert not after.on_disk(0)
    assert after.store.why_gone(block(0)) == "expired"


def test_a_clock_that_was_set_back_makes_nothing_live_longer_than_from_now_on() -> None:
    rules = {1: StoreRules(ttl_s=100.0)}
    bench = Bench(epoch_s=2e9)
    bench.fill(range(20))
    after = Bench(disks=bench.disks, epoch_s=1e9)
    after.tier.configure(rules, set())
    after.work()
    assert after.on_disk(0)
    after.pass_time(101.0)
    assert not after.on_disk(0)


def test_what_is_written_after_a_clock_was_set_right_is_as_old_as_it_is() -> None:
    rules = {1: StoreRules(ttl_s=100.0)}
    bench = Bench(epoch_s=0.0)  # the machine started without knowing the time
    bench.tier.epoch_s = 1e9
    bench.fill(range(20))
    after = Bench(disks=bench.disks, now=60.0, epoch_s=1e9)
    after.tier.configure(rules, set())
    after.work()
    assert after.on_disk(0)
    after.pass_time(41.0)
    assert not after.on_disk(0)


def test_a_namespace_that_means_something_else_now_is_not_found() -> None:
    bench = Bench()
    bench.fill(range(20))
    after = Bench(disks=bench.disks)
    after.tier.meaning_of = lambda _namespace: 99
    after.work()
    assert after.tier.counters.entries_refused > 0
    assert not len(after.tier.shelf)
    last = Bench(disks=bench.disks)
    last.work()
    assert not len(last.tier.shelf), "what was refused is not there any more"


def test_writes_that_fail_are_tried_again_later_and_nothing_is_lost() -> None:
    bench = Bench()
    bench.fill(range(12))
    bench.put(12)
    bench.take()
    while bench.waiting:
        order = bench.waiting[0]
        bench.end(
            order,
            "an error" if order.kind is Kind.WRITE and order.offset >= CUT.blocks_offset else "",
        )
        if bench.tier.counters.write_errors >= 2:
            break
    bench.work()
    assert bench.tier.get_timer(bench.now) == bench.now + RETRY_S
    assert all(bench.in_dram(n) or bench.on_disk(n) for n in range(13))
    bench.pass_time(RETRY_S)
    bench.work()
    assert bench.store.used_bytes <= ARENA / 2
    assert all(bench.in_dram(n) or bench.on_disk(n) for n in range(13))


def test_a_flush_that_fails_speaks_for_what_was_written_ahead_too_and_the_pause_is_kept() -> None:
    """It may have lost these bytes, and the flush after it would say nothing of them."""
    bench = Bench(SsdRules(0.75, 0.25, batch_share=2 / 16))
    for number in range(16):
        bench.put(number)
    bench.take()
    bench.take()
    assert [bench.what(order) for order in bench.waiting] == ["b"] * 4
    for order in list(bench.waiting[:3]):
        bench.end(order)
    last, flush = bench.waiting
    assert bench.what(flush) == "f"
    bench.end(flush, "an error")
    assert bench.waiting == [last], "nothing else is begun now"
    bench.work()
    assert not len(bench.tier.shelf)
    assert all(map(bench.in_dram, range(16)))
    assert bench.tier.get_timer(bench.now) == bench.now + RETRY_S
    bench.pass_time(RETRY_S)
    bench.take()
    written = 0
    while bench.waiting:
        written += bench.what(bench.waiting[0]) == "b"
        bench.end(bench.waiting[0])
    assert written == 12, "all of them, those four among them"
    assert sum(bench.on_disk(number) for number in range(16)) == 12
    bench.take()
    assert not bench.waiting, "nothing is left to be written"


@pytest.mark.parametrize("kind", [Kind.WRITE, Kind.FLUSH])
def test_a_file_that_only_fails_is_given_up_and_the_other_goes_on(kind: Kind) -> None:
    disks = [SimDisk(random.Random(n)) for n in (1, 2)]
    bench = Bench(disks=disks)
    bench.fill(range(20))
    for round_ in range(40):
        for number in range(100 + 16 * round_ % 64, 116 + 16 * round_ % 64):
            bench.put(number)
            bench.take()
            while bench.waiting:
                order = bench.waiting[0]
                fails = order.file == 0 and order.kind is kind
                bench.end(order, "an error" if fails else "")
        bench.pass_time(RETRY_S)
    assert bench.tier.counters.files_failed == 1
    assert bench.tier.counters.write_errors >= MAX_ERRORS
    bench.work()
    bench.fill(range(200, 240))
    assert bench.on_disk(215)
    assert bench.tier.values()["ssd_files"] == 1
    assert all(
        bench.tier._file_of(bench.tier.shelf.peek(b).offset).number == 1
        for b in bench.tier.shelf.blocks()
    )  # type: ignore[union-attr]


def test_no_block_lies_in_two_files() -> None:
    bench = Bench(
        disks=[SimDisk(random.Random(n)) for n in (1, 2)], cut=cut_of("node", 3 * SLAB, UNIT, SLAB)
    )
    store = bench.tier.shelf
    got = []
    for number in range(8):
        try:
            got.append(store.reserve(block(number), SLAB + 1))
        except NoRoomError:
            break
    assert {bench.tier._file_of(c.offset).number for c in got} == {0, 1}
    assert len(got) == 2


def test_a_block_that_is_put_with_other_bytes_is_not_served_as_it_was() -> None:
    bench = Bench()
    bench.fill(range(20))
    assert bench.on_disk(0)
    bench.put(0, b"other" * 100)
    assert not bench.on_disk(0)
    assert bench.tier.counters.superseded == 1


def test_what_goes_in_a_hurry_lies_on_disk_if_anything_does() -> None:
    bench = Bench()
    bench.fill(range(13))
    for number in (1, 2):
        bench.read(number)
    bench.work()
    bench.tier.rules = SsdRules(2.0, 2.0)
    before = {n for n in range(13) if bench.in_dram(n)}
    for number in range(50, 58):
        bench.put(number)
    assert bench.tier.counters.left_unwritten < 8
    gone = {n for n in before if not bench.in_dram(n)}
    assert {1, 2} <= gone


def test_an_entry_that_says_it_is_the_last_of_all_keeps_nobody_from_writing_another() -> None:
    for order, found in ((2**64 - 1, False), (MAX_ORDER, True)):
        disk = SimDisk(random.Random(1))
        formatted = open_formatted(disk, CUT, 7)
        entry = Entry(0, block(1), SIZE, digest_of(b"\1" * SIZE), 71, order, 1e9, b"", 0)
        disk.pwrite(pack_entry(entry, formatted.identity), 4096)
        disk.pwrite(b"\1" * SIZE, CUT.blocks_offset)
        bench = Bench(disks=[disk])
        bench.work()
        assert bench.on_disk(1) is found
        bench.fill(range(100, 130))
        assert bench.on_disk(100)


ENTRIES = st.lists(
    st.builds(
        Entry,
        unit=st.integers(0, CUT.units - 1),
        block=st.builds(block, st.integers(0, 5), st.integers(1, 2)),
        size_bytes=st.sampled_from((1, 4096, 4097, 20_000, SLAB, SLAB + 1, 3 * SLAB, 1 << 28)),
        digest=st.integers(0, 3),
        meaning=st.sampled_from((71, 72, 9)),
        order=st.integers(0, 6),
        committed_at=st.sampled_from((0.0, 1e9, 1e18, -1e18, float("inf"), float("nan"))),
        parent=st.sampled_from((b"", b"p" * 16)),
        depth=st.integers(0, 2**32 - 1),
    ),
    max_size=12,
)


@pytest.mark.slow
@given(entries=ENTRIES, refused=st.lists(st.integers(0, CUT.units - 1), max_size=4))
@settings(max_examples=200, deadline=None)
def test_whatever_the_table_says_the_tier_goes_on(entries: list[Entry], refused: list[int]) -> None:
    bench = Bench()
    bench.tier._unscanned += 1
    bench.tier.found(0, Scanned(entries, refused, 1))
    bench.tier.scanned()
    bench.work()
    bench.fill(range(100, 130))
    bench.pass_time(1.0)
    for number in range(6):
        bench.read(number)
    bench.work()
    assert all(error for _, error, _ in bench.got), "nothing was there"
