"""The arena and the store keep their books under any sequence of operations.

Oracle: the invariant checkers (`Allocator.check`, `Store.check`) and a model that is a plain
dictionary. Cannot see: concurrency (there is none in the agent) and what clients write.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvcast.hostagent.core.store import DOOMED, Copy, NoRoomError, QuotaError, Store, StoreError
from kvcast.hostagent.tiers import arena as arena_module
from kvcast.hostagent.tiers.arena import (
    GRAIN_BYTES,
    Allocator,
    ArenaError,
    ArenaFile,
    ArenaInUseError,
    size_classes,
)
from kvcast.protocol.messages.wire import BlockId

SLAB = 64 * 1024


def block(number: int, namespace: int = 1) -> BlockId:
    return BlockId(namespace, number.to_bytes(16, "big"))


def test_every_size_gets_the_smallest_class_that_holds_it() -> None:
    allocator = Allocator(SLAB, SLAB)
    classes = size_classes(SLAB)
    for size in range(1, SLAB + 1, 97):
        assert allocator.extent_bytes(size) == min(c for c in classes if c >= size)
    assert all(c % GRAIN_BYTES == 0 for c in classes)


def test_blocks_larger_than_a_slab_take_runs_of_slabs() -> None:
    allocator = Allocator(4 * SLAB, SLAB)
    first = allocator.allocate(2 * SLAB + 1)
    assert first is not None
    assert allocator.used_bytes == 3 * SLAB
    assert allocator.allocate(2 * SLAB) is None
    assert allocator.allocate(SLAB) is not None
    allocator.free(first)
    assert allocator.allocate(3 * SLAB) is not None
    allocator.check()


def test_an_empty_slab_serves_another_size() -> None:
    allocator = Allocator(SLAB, SLAB)
    small = [allocator.allocate(1024) for _ in range(SLAB // 1024)]
    assert None not in small
    assert allocator.allocate(2048) is None
    for offset in small:
        assert offset is not None
        allocator.free(offset)
    assert allocator.allocate(SLAB) == 0


def test_freeing_twice_is_caught() -> None:
    allocator = Allocator(SLAB, SLAB)
    offset = allocator.allocate(1)
    assert offset is not None
    allocator.free(offset)
    with pytest.raises(KeyError):
        allocator.free(offset)


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(16 * SLAB, SLAB)
        self.live: dict[int, int] = {}

    @rule(size=st.one_of(st.integers(1, SLAB), st.integers(SLAB, 6 * SLAB)))
    def allocate(self, size: int) -> None:
        offset = self.allocator.allocate(size)
        if offset is None:
            assert self.live, "an empty arena has room for everything up to its size"
            return
        end = offset + size
        assert end <= self.allocator.capacity_bytes
        for other, other_size in self.live.items():
            assert end <= other or other + other_size <= offset, "extents overlap"
        self.live[offset] = size

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[offset]
        self.allocator.free(offset)

    @invariant()
    def books_are_right(self) -> None:
        self.allocator.check()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


class StoreMachine(RuleBasedStateMachine):
    QUOTA = 5 * SLAB

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(Allocator(8 * SLAB, SLAB), quotas={2: self.QUOTA})
        self.reserved: list[Copy] = []
        self.pinned: list[Copy] = []

    @rule(
        number=st.integers(0, 12),
        namespace=st.sampled_from([1, 2]),
        size=st.one_of(st.integers(1, SLAB), st.integers(SLAB, 3 * SLAB)),
    )
    def reserve(self, number: int, namespace: int, size: int) -> None:
        if len(self.reserved) > 6:
            return
        try:
            self.reserved.append(self.store.reserve(block(number, namespace), size))
        except StoreError:
            assert self.reserved or self.pinned or size > self.QUOTA

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), digest=st.integers(1, 3), home=st.booleans())
    def commit(self, data: st.DataObject, digest: int, home: bool) -> None:
        copy = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        before = self.store.peek(copy.block)
        after = self.store.commit(copy, digest, home=home)
        assert after is (before if before is not None else copy)
        assert self.store.peek(copy.block) is after

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.store.abort(self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1))))

    @rule(number=st.integers(0, 12), namespace=st.sampled_from([1, 2]))
    def get_and_pin(self, number: int, namespace: int) -> None:
        copy = self.store.get(block(number, namespace))
        if copy is not None and len(self.pinned) < 6:
            self.store.pin(copy)
            self.pinned.append(copy)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        copy = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.store.unpin(copy)

    @rule(number=st.integers(0, 12), namespace=st.sampled_from([1, 2]))
    def drop(self, number: int, namespace: int) -> None:
        held = self.store.peek(block(number, namespace)) is not None
        assert self.store.drop(block(number, namespace)) == held
        assert self.store.peek(block(number, namespace)) is None

    @invariant()
    def books_are_right(self) -> None:
        self.store.check()
        assert self.store.namespace_bytes(2) <= self.QUOTA
        for copy in self.pinned:
            assert copy.pins > 0, "a pinned copy lost its bytes"


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def put(store: Store, number: int, size: int = SLAB, namespace: int = 1) -> Copy:
    return store.commit(store.reserve(block(number, namespace), size), 7, home=False)


def test_the_least_recently_used_copy_is_evicted_first() -> None:
    store = Store(Allocator(3 * SLAB, SLAB))
    for number in range(3):
        put(store, number)
    assert store.get(block(0)) is not None
    put(store, 3)
    assert store.peek(block(1)) is None
    assert {b.key[-1] for b in store.blocks()} == {0, 2, 3}


def test_a_pinned_copy_survives_and_a_dropped_one_keeps_its_bytes_until_unpinned() -> None:
    store = Store(Allocator(2 * SLAB, SLAB))
    pinned = put(store, 0)
    store.pin(pinned)
    for number in range(1, 5):
        put(store, number)
    assert store.peek(block(0)) is pinned
    assert store.drop(block(0))
    assert store.peek(block(0)) is None
    assert pinned.state == DOOMED
    used = store.used_bytes
    again = put(store, 0)
    assert again.offset != pinned.offset
    store.unpin(pinned)
    assert store.used_bytes == used - SLAB
    store.check()


def test_an_arena_full_of_pins_refuses_and_evicts_nothing() -> None:
    store = Store(Allocator(4 * SLAB, SLAB))
    for number in range(2):
        store.pin(put(store, number))
    put(store, 2)
    with pytest.raises(NoRoomError):
        store.reserve(block(9), 3 * SLAB)
    assert store.peek(block(2)) is not None
    assert store.counters.no_room == 1


def test_a_namespace_evicts_only_its_own_blocks_for_its_quota() -> None:
    store = Store(Allocator(8 * SLAB, SLAB), default_quota_bytes=2 * SLAB)
    put(store, 0, namespace=1)
    for number in range(5):
        put(store, number, namespace=2)
    assert store.peek(block(0, 1)) is not None
    assert store.namespace_bytes(2) == 2 * SLAB
    with pytest.raises(QuotaError):
        store.reserve(block(9, 2), 3 * SLAB)


def test_another_size_empties_the_victims_slab() -> None:
    store = Store(Allocator(2 * SLAB, SLAB))
    for number in range(2 * SLAB // 1024):
        put(store, number, 1024)
    put(store, 10_000, SLAB)
    assert store.counters.evictions == SLAB // 1024
    store.check()


def test_what_was_just_put_stays_where_another_size_empties_the_slab_that_it_shares() -> None:
    """As when a folder's small files come into an arena that is full of other folders' blocks."""
    store = Store(Allocator(4 * SLAB, SLAB))
    for number in range(4):
        store.advance(float(number))
        put(store, number, 1024)
    for number in range(100, 103):
        store.advance(float(number))
        put(store, number)
    store.advance(200.0)
    put(store, 200, 1024)
    for number in range(201, 204):
        store.advance(float(number))
        put(store, number)
    held = {
        number
        for number in (*range(4), *range(100, 103), *range(200, 204))
        if store.peek(block(number)) is not None
    }
    assert held == {0, 1, 2, 3, 200, 201, 202, 203}, "old copies in the same slab stay as well"
    store.check()


@pytest.mark.parametrize("slabs", [1, 2, 5])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_block_of_another_size_evicts_what_lies_in_its_slabs_and_no_more(
    slabs: int, shuffled: bool
) -> None:
    """Whenever which of the others was used."""
    store = Store(Allocator(64 * SLAB, SLAB))
    each = SLAB // 8
    numbers = list(range(64 * 8))
    for number in numbers:
        put(store, number, each)
    rng = random.Random(1)
    if shuffled:
        rng.shuffle(numbers)
    for at, number in enumerate(numbers):
        store.advance(float(at))
        assert store.get(block(number)) is not None
    stuck = store.peek(block(rng.randrange(64 * 8)))
    assert stuck is not None
    store.pin(stuck)
    before = 0
    for number in range(5):
        store.advance(1000.0 + number)
        put(store, 10_000 + number, slabs * SLAB)
        assert store.counters.evictions - before == 8 * slabs
        before = store.counters.evictions
    gone = [number for number in numbers if store.peek(block(number)) is None]
    if slabs == 1 or not shuffled:
        assert not {*gone} & {*numbers[-40:]}, "nor what was used last"
    store.check()


def slabs_with_a_pin_each(count: int, size: int, *, but: int | None = None) -> tuple[Store, int]:
    """A full arena of `count` slabs of copies of that size, of which one a slab is pinned, `but`
    for one slab; and how many copies it holds."""
    store = Store(Allocator(count * SLAB, SLAB))
    copies = [put(store, n, size) for n in range(count * (SLAB // size))]
    pinned = {copy.offset // SLAB: copy for copy in copies}
    for index, copy in pinned.items():
        if index != but:
            store.pin(copy)
    store.check()
    return store, len(copies)


@pytest.mark.parametrize("size", [1000, SLAB, 2 * SLAB])
def test_what_no_eviction_makes_room_for_evicts_nothing(size: int) -> None:
    store, held = slabs_with_a_pin_each(8, 4096)
    with pytest.raises(NoRoomError):
        store.reserve(block(10_000), size)
    assert len(store) == held
    assert (store.counters.evictions, store.counters.no_room) == (0, 1)
    store.check()


def test_the_one_slab_that_can_be_emptied_is_found_however_lately_it_was_used() -> None:
    store, held = slabs_with_a_pin_each(8, 1024, but=7)
    for number in range(held - SLAB // 1024, held):
        assert store.get(block(number)) is not None
    copy = store.reserve(block(10_000), 4096)
    assert copy.offset // SLAB == 7
    assert store.counters.evictions == SLAB // 1024
    store.check()


def test_the_one_copy_of_the_right_size_is_found_however_lately_it_was_used() -> None:
    store = Store(Allocator(8 * SLAB, SLAB))
    wanted = put(store, 20_000, 4096)
    others = [put(store, 30_000 + n, 4096) for n in range(SLAB // 4096 - 1)]
    small = [put(store, n, 1024) for n in range(7 * SLAB // 1024)]
    for copy in others:
        store.pin(copy)
    for copy in small[:: SLAB // 1024]:
        store.pin(copy)
    assert store.get(block(20_000)) is wanted
    assert store.reserve(block(10_000), 4096).offset == wanted.offset
    assert store.counters.evictions == 1
    store.check()


def test_a_run_of_slabs_that_no_eviction_makes_evicts_nothing_and_one_that_some_do_is_made() -> (
    None
):
    store = Store(Allocator(8 * SLAB, SLAB))
    copies = [put(store, number) for number in range(8)]
    for copy in copies[1::3]:  # 1, 4 and 7: never three in a row without
        store.pin(copy)
    with pytest.raises(NoRoomError):
        store.reserve(block(100), 3 * SLAB)
    assert store.counters.evictions == 0
    assert store.reserve(block(100), 2 * SLAB).offset in (2 * SLAB, 5 * SLAB)
    store.check()


def test_making_room_looks_into_no_more_slabs_than_it_empties() -> None:
    store, _ = slabs_with_a_pin_each(32, 1024, but=31)
    looked_into: list[int] = []
    neighbours = store.allocator.neighbours

    def counted(offset: int) -> list[int]:
        looked_into.append(offset // SLAB)
        return neighbours(offset)

    store.allocator.neighbours = counted  # type: ignore[method-assign]
    store.reserve(block(10_000), 4096)
    for number in range(SLAB // 4096 - 1):
        store.reserve(block(10_001 + number), 4096)
    with pytest.raises(NoRoomError):
        store.reserve(block(20_000), 4096)
    assert looked_into == [31]


def test_the_first_copy_of_a_block_wins() -> None:
    store = Store(Allocator(4 * SLAB, SLAB))
    first, second, third = (store.reserve(block(1), 100) for _ in range(3))
    assert store.commit(second, 22, home=False) is second
    assert store.commit(first, 11, home=True) is second
    assert store.commit(third, 22, home=False) is second
    assert second.home
    assert (store.counters.conflicts, store.counters.duplicates) == (1, 1)


def test_the_arena_file_is_private_and_gone_after_close(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "a.arena")
    arena = ArenaFile(1 << 20, path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    arena.memory[:5] = b"hello"
    fd = arena.open_for_client()
    assert os.pread(fd, 5, 0) == b"hello"
    os.close(fd)
    arena.close()
    arena.close()
    assert not os.path.exists(path)


def test_a_live_agents_arena_is_not_taken_and_a_dead_ones_is_replaced(
    tmp_path: os.PathLike[str],
) -> None:
    path = os.path.join(tmp_path, "a.arena")
    code = (
        "import sys, os\n"
        "from kvcast.hostagent.tiers.arena import ArenaFile\n"
        f"arena = ArenaFile(1 << 20, {path!r})\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "os._exit(1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(ArenaInUseError):
            ArenaFile(1 << 20, path)
        other.communicate(b"die\n")
    assert os.path.exists(path)
    arena = ArenaFile(1 << 21, path)
    assert os.stat(path).st_size == 1 << 21
    arena.close()


def test_what_a_process_that_lives_is_just_making_stays_though_it_is_not_locked_yet() -> None:
    path = f"/dev/shm/kvcast-{os.getuid()}-{os.getppid()}.arena"
    if os.path.exists(path):
        pytest.skip("the process above this one has an arena")
    with open(path, "xb"):
        pass
    try:
        ArenaFile(1 << 20).close()
        assert os.path.exists(path)
    finally:
        os.unlink(path)


def test_what_a_killed_agent_left_under_a_name_of_its_own_goes_when_another_starts() -> None:
    """Its name has its process's number in it, so nobody would ever replace it."""
    code = (
        "import os, sys\n"
        "from kvcast.hostagent.tiers.arena import ArenaFile\n"
        "arena = ArenaFile(1 << 20)\n"
        "index = ArenaFile(1 << 20, arena.path + '.index')\n"
        "print(arena.path, flush=True)\n"
        "sys.stdin.readline()\n"
        "os._exit(1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        path = other.stdout.readline().strip()
        ArenaFile(1 << 20).close()
        assert os.path.exists(path), "it was in use"
        other.communicate("die\n")
    assert os.path.exists(path)
    assert os.path.exists(f"{path}.index")
    arena = ArenaFile(1 << 20)
    assert not os.path.exists(path)
    assert not os.path.exists(f"{path}.index")
    assert os.path.exists(arena.path)
    arena.close()


def test_an_arena_that_cannot_be_made_names_the_place_and_the_reason(
    tmp_path: os.PathLike[str],
) -> None:
    with pytest.raises(ArenaError, match=r"nowhere/a: No such file"):
        ArenaFile(1 << 20, os.path.join(tmp_path, "nowhere", "a"))
    folder = os.path.join(tmp_path, "folder")
    os.mkdir(folder)
    with pytest.raises(ArenaError):
        ArenaFile(1 << 20, folder)


def test_an_agent_that_is_overtaken_leaves_the_others_file_alone(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a file's making and its lock another agent may have taken it for a dead one's."""
    path = os.path.join(tmp_path, "a.arena")
    real = arena_module.try_lock
    others: list[ArenaFile] = []

    def lock(fd: int) -> bool:
        if not others:
            others.append(None)  # type: ignore[arg-type]
            others[0] = ArenaFile(1 << 20, path)
        return real(fd)

    monkeypatch.setattr(arena_module, "try_lock", lock)
    with pytest.raises(ArenaInUseError):
        ArenaFile(1 << 20, path)
    (other,) = others
    other.memory[:5] = b"alive"
    with open(path, "rb") as file:
        assert file.read(5) == b"alive"
    other.close()
    assert not os.path.exists(path)


def test_room_that_is_hard_to_find_is_found() -> None:
    """Behind many free runs that are just too short lies one that is long enough."""
    runs, short, long = 24, 4, 6
    store = Store(Allocator((runs * (short + 1) + long) * SLAB, SLAB))
    pinned = []
    for number in range(runs):
        filler = put(store, 2 * number, short * SLAB)
        pinned.append(put(store, 2 * number + 1, SLAB))
        store.pin(pinned[-1])
        assert filler.offset + short * SLAB == pinned[-1].offset
    put(store, 1000, long * SLAB)
    # The first of the runs are free, and none of them fits; the last is taken by what is evicted.
    for number in range(runs):
        store.drop(BlockId(1, (2 * number).to_bytes(16, "big")))
    wanted = put(store, 2000, long * SLAB)
    assert wanted.size_bytes == long * SLAB
    store.check()
    store.drop(wanted.block)
    assert store.allocator.allocate(long * SLAB) is None, "a quick look does not find it"
    again = put(store, 2001, long * SLAB)
    assert again.size_bytes == long * SLAB
    store.check()
