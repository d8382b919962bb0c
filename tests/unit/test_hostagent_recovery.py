"""What an agent takes over from the one before it, in plain memory: index, arena, ledger, clients.

Oracle: what the former agent had committed, block by block, and its bytes. Cannot see: files, locks
and processes (tests/unit/test_hostagent_kept.py, tests/integration/test_restart.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.recovery import Recovery, Unwritten
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.core.shared_index import Region, SharedIndex
from kvcast.hostagent.core.store import (
    COMMITTED,
    DOOMED,
    EXPIRED,
    PART_BLOCKS,
    RESERVED,
    NoRoomError,
    Store,
)
from kvcast.hostagent.core.writes import COMMITTED_AT_ONCE
from kvcast.hostagent.tiers import policies
from kvcast.hostagent.tiers.arena import GRAIN_BYTES, Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.hostagent.tiers.ledger import HANDLE, LEDGER_BYTES, NO_ROW, ROWS, Ledger, Row
from kvcast.protocol.digests import Digested, digests_at_once
from kvcast.protocol.links.bulk import PutCall
from kvcast.protocol.messages import bulk, local, shared
from kvcast.protocol.messages.bulk import meaning_of
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    AgentMessage,
    HandedOver,
    NamespaceInfo,
    NamespaceSettings,
    NodeInfo,
    PoolMap,
    Registered,
)
from kvcast.protocol.messages.wire import BUCKETS, BlockId, digest_of

ARENA_BYTES = 1 << 20
SLAB_BYTES = 64 * 1024
NAMESPACES = [NamespaceInfo(number, "t", "m", str(number), "l") for number in (1, 2)]
REGISTERED = Registered(CONTROL_PROTOCOL_VERSION, 1, 3.0, 0)
NODE = NodeInfo(1, "node-1", "10.0.0.1", "02:00:00:00:00:01", 1, 4791, "127.0.0.1", 1)
OTHER = NodeInfo(2, "node-2", "10.0.0.2", "02:00:00:00:00:02", 2, 4791, "127.0.0.1", 2)


def pool_map(namespaces: list[NamespaceInfo] = NAMESPACES) -> PoolMap:
    return PoolMap(1, [NODE], [[1]] * BUCKETS, namespaces, [])


HERE = BUCKETS
"""Number of the one block whose home is node-1, by"""
TWO_NODES = msgspec.structs.replace(
    pool_map(), epoch=2, nodes=[NODE, OTHER], buckets=[[1], *[[2]] * (BUCKETS - 1)]
)


def block(number: int, namespace: int = 1) -> BlockId:
    return BlockId(namespace, number.to_bytes(16, "big"))


def content(number: int, size_bytes: int) -> bytes:
    return random.Random(number).randbytes(size_bytes)


class Machine:
    """What outlives a process, and the agent that is on it now."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(ARENA_BYTES))
        self.index_memory = memoryview(bytearray(shared.index_bytes(buckets_for(ARENA_BYTES))))
        self.ledger_memory = memoryview(bytearray(LEDGER_BYTES))
        self.lives = 0
        self.start()

    def start(
        self,
        namespaces: list[NamespaceInfo] = NAMESPACES,
        *,
        now: float = 0.0,
        unwritten: Sequence[Unwritten] = (),
        kept: PoolMap | None = None,
    ) -> AgentCore:
        """Another agent, over what there is, at that time of its clock. `kept`: the map that the
        former one had, if it is not that of these namespaces."""
        self.lives += 1
        store = Store(Allocator(ARENA_BYTES, SLAB_BYTES))
        ledger = Ledger(self.ledger_memory)
        self.index = Index(self.index_memory, ARENA_BYTES, self.lives)
        index = SharedIndex(self.index, store, lambda: None, ledger)
        recovery = None
        if self.lives > 1:
            self.index.hide_namespaces()
            recovery = Recovery(self.index, store, index, self.memory, lambda: unwritten)
        self.core = AgentCore(
            *(AgentOptions("node-1"), store, self.memory, random.Random(1), index),
            recovery=recovery,
            ledger=ledger,
        )
        self.core.restore_map(now, REGISTERED, kept or pool_map(namespaces))
        return self.core

    @property
    def store(self) -> Store:
        return self.core.store

    def put(self, number: int, size_bytes: int = 4096, namespace: int = 1) -> None:
        data = content(number, size_bytes)
        copy = self.store.reserve(block(number, namespace), size_bytes)
        self.memory[copy.offset : copy.offset + size_bytes] = data
        self.store.commit(copy, digest_of(data), home=False)

    def recover(self) -> None:
        while self.core.recover():
            pass
        self.store.check()

    def fill(self, numbers: range) -> None:
        for number in numbers:
            self.put(number, SLAB_BYTES)

    def held(self) -> dict[int, bytes]:
        """All blocks, by number, with their bytes."""
        found = {}
        for held in self.store.blocks():
            copy = self.store.peek(held)
            assert copy is not None
            number = int.from_bytes(held.key, "big")
            found[number] = bytes(self.memory[copy.offset : copy.offset + copy.size_bytes])
        return found

    def values(self) -> dict[str, float]:
        return self.core.values()


def readable(machine: Machine, namespace: int = 1) -> bool:
    word = (shared.NAMESPACES_OFFSET + namespace * shared.NAMESPACE_BYTES) // 8 + 1
    return machine.index_memory.cast("Q")[word] == 1


def with_settings(**settings: Any) -> list[NamespaceInfo]:
    """The namespaces, of which the first has these settings."""
    return [
        msgspec.structs.replace(NAMESPACES[0], settings=NamespaceSettings(**settings)),
        NAMESPACES[1],
    ]


# --- copies ---------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 3 * SLAB_BYTES), max_size=60),
    dropped=st.sets(st.integers(0, 59)),
    asked=st.lists(st.integers(0, 59), max_size=10),
)
@settings(max_examples=60, deadline=None)
def test_a_restart_keeps_every_committed_copy_and_its_place(
    sizes: list[int], dropped: set[int], asked: list[int]
) -> None:
    machine = Machine()
    for number, size_bytes in enumerate(sizes):
        machine.put(number, size_bytes)
    for number in dropped:
        machine.store.drop(block(number))
    before = machine.held()
    places = {n: machine.store.peek(block(n)).offset for n in before}  # type: ignore[union-attr]
    machine.start()
    for number in asked:  # before anything was gone through
        copy = machine.store.get(block(number))
        assert (copy is not None) == (number in before)
    machine.recover()
    assert machine.held() == before
    assert {n: machine.store.peek(block(n)).offset for n in before} == places  # type: ignore[union-attr]
    assert machine.values()["recovery_copies_total"] == len(before)
    assert machine.values()["recovery_left"] == 0


def test_what_was_taken_over_is_handed_over_whenever_the_map_of_that_came() -> None:
    machine = Machine()
    machine.put(1)
    core = machine.start()
    said: list[AgentMessage] = []
    core.control_connected(said.append)
    moving = msgspec.structs.replace(
        pool_map(), epoch=2, nodes=[NODE, OTHER], buckets=[[1, 2]] * BUCKETS, settled=1
    )
    core.control_message(0.0, moving)
    assert not said, "it is not known yet what there is to hand over"
    machine.recover()
    (call,) = core.outbox.calls
    assert isinstance(call, PutCall)
    assert (call.node, call.copy.block) == (2, block(1))
    assert said == [HandedOver(2, 1, 1, 0)]


def land(machine: Machine, number: int, size_bytes: int, room_bytes: int) -> None:
    """A block comes into room that was made for a larger one."""
    data = content(number, size_bytes)
    copy = machine.store.reserve(BlockId(1, b""), room_bytes)
    machine.memory[copy.offset : copy.offset + size_bytes] = data
    landed = machine.store.land(copy, block(number), size_bytes, digest_of(data))
    machine.store.unpin(landed)


def test_blocks_that_lie_in_larger_rooms_are_kept_and_so_is_what_lies_beside_them() -> None:
    machine = Machine()
    for number in range(12):
        land(machine, number, 2500 + 700 * (number % 4), 5000)
    machine.put(50, 5000)
    used_bytes = machine.store.used_bytes
    guest = Guest(machine)
    got = guest.get(2)
    guest.pin_by_itself(5)
    machine.store.elsewhere.refresh()
    pinned = machine.store.peek(block(5))
    assert pinned is not None
    for number in (2, 5):
        machine.store.drop(block(number))  # only their readers have them now
    machine.start()
    guest.reborn([got.handle])
    assert machine.store.lying_at(got.offset) is not None
    assert machine.store.lying_at(pinned.offset) is not None
    machine.recover()
    assert machine.store.used_bytes == used_bytes
    sizes = {number: 2500 + 700 * (number % 4) for number in range(12)} | {50: 5000}
    del sizes[2], sizes[5]
    assert machine.held() == {number: content(number, size) for number, size in sizes.items()}
    assert machine.values()["recovery_entries_refused_total"] == 0
    guest.session.close()
    machine.store.check()


def lying(machine: Machine, number: int, size_bytes: int, room_bytes: int) -> Unwritten:
    """A block that lies in room of the machine's, in no index."""
    data = content(number, size_bytes)
    copy = machine.store.reserve(BlockId(1, b""), room_bytes)
    machine.memory[copy.offset : copy.offset + size_bytes] = data
    return Unwritten(block(number), copy.offset, room_bytes, size_bytes, digest_of(data))


def test_what_was_acknowledged_and_not_written_down_is_taken_over_and_stays() -> None:
    machine = Machine()
    for number in range(4):
        machine.put(number)
    put, larger = lying(machine, 10, 4096, 4096), lying(machine, 11, 3000, 4096)
    wrong = lying(machine, 12, 4096, 4096)._replace(digest=7)
    elsewhere = lying(machine, 13, 4096, 4096)._replace(offset=put.offset)
    known = lying(machine, 3, 4096, 4096)  # it was written down after all
    unnamed = put._replace(block=block(14, namespace=9))
    unwritten = (put, larger, wrong, elsewhere, known, unnamed)
    machine.start(unwritten=unwritten)
    assert machine.store.get(block(12)) is None, "nobody gets wrong bytes"
    machine.recover()
    expected = {number: content(number, 4096) for number in (0, 1, 2, 3, 10)}
    expected[11] = content(11, 3000)
    assert machine.held() == expected
    machine.start(unwritten=unwritten)  # the one before died before it had cleared them away
    machine.recover()
    assert machine.held() == expected
    machine.start()
    machine.recover()
    assert machine.held() == expected, "they are in the index"


def test_what_was_used_last_is_evicted_last_after_a_restart() -> None:
    machine = Machine()
    machine.fill(range(16))
    machine.start()
    assert machine.store.get(block(3)) is not None
    machine.recover()
    machine.put(100, SLAB_BYTES)
    machine.put(101, SLAB_BYTES)
    assert set(machine.held()) == {*range(2, 16), 100, 101}
    machine.put(102, SLAB_BYTES)
    machine.put(103, SLAB_BYTES)
    assert 3 in machine.held()
    assert 2 not in machine.held()


def test_no_conveyor_gives_what_a_former_agent_has_left_before_it_is_looked_at() -> None:
    machine = Machine()
    machine.put(1)
    core = machine.start()
    core.serving.conveys = True
    core.control_message(0.0, msgspec.structs.replace(pool_map(), epoch=2, nodes=[NODE, OTHER]))
    ask = bulk.BulkConvey(bulk.CONVEYOR_VERSION)
    assert core.serving.convey("node-2", ask) == bulk.FORBIDDEN
    machine.recover()
    assert core.serving.convey("node-2", ask) == bulk.DONE


def test_room_is_given_only_where_no_copy_lies_however_early_it_is_asked_for() -> None:
    machine = Machine()
    machine.fill(range(12))
    before = machine.held()
    machine.start()
    machine.fill(range(100, 104))
    machine.recover()
    assert {n: data for n, data in machine.held().items() if n < 100} == before
    assert machine.values()["store_evictions_total"] == 0


def test_a_copy_whose_bytes_have_changed_is_never_given_to_anybody() -> None:
    machine = Machine()
    for number in range(10):
        machine.put(number)
    for number in (2, 7):
        copy = machine.store.peek(block(number))
        assert copy is not None
        machine.memory[copy.offset + 100] ^= 1
    machine.start()
    assert machine.store.get(block(2)) is None
    machine.recover()
    assert set(machine.held()) == {0, 1, 3, 4, 5, 6, 8, 9}
    assert machine.values()["recovery_copies_damaged_total"] == 2


def test_clients_see_nothing_before_every_copy_is_checked() -> None:
    machine = Machine()
    machine.put(1)
    assert readable(machine)
    machine.start()
    assert not readable(machine)
    machine.recover()
    assert readable(machine)


@pytest.mark.parametrize("policy", sorted(policies.BY_NAME))
def test_policies_choose_among_what_was_taken_over_as_among_what_was_put(policy: str) -> None:
    machine = Machine()
    namespaces = with_settings(policy=policy, ttl_s=60.0 if policy == "ttl" else 0.0)
    machine.fill(range(16))
    machine.start(namespaces, now=1000.0)
    machine.recover()
    assert len(machine.held()) == 16
    for number in range(8):
        assert machine.store.get(block(number)) is not None
    machine.put(16, SLAB_BYTES)
    machine.store.check()
    assert len(machine.held()) == 16
    assert machine.store.counters.policy_faults == 0
    assert machine.store.counters.evictions == 1


@pytest.mark.parametrize("policy", ["lru", "ttl"])
def test_what_was_taken_over_begins_to_age_when_the_agent_starts(policy: str) -> None:
    machine = Machine()
    machine.put(1)
    machine.put(2)
    # Clocks of machines that have run for long are far from 0, where a store begins.
    machine.start(with_settings(policy=policy, ttl_s=10.0), now=5000.0)
    assert machine.store.peek(block(1)) is not None  # before the others are known
    machine.recover()
    machine.store.advance(5009.0)
    assert set(machine.held()) == {1, 2}
    assert machine.store.next_expiry() == 5010.0
    machine.store.advance(5010.5)
    machine.store.check()
    assert machine.held() == {}
    assert machine.store.why_gone(block(1)) == EXPIRED


def test_a_question_finds_copies_of_a_namespace_of_which_nothing_is_known_yet() -> None:
    machine = Machine()
    machine.put(1)
    machine.start()
    assert machine.store.namespace_bytes(1) == 0
    assert machine.store.holds(1, block(1).key + block(2).key) == 0b01
    assert machine.store.namespace_bytes(1) > 0


def test_what_belongs_to_another_meaning_of_its_namespace_is_cleared_away() -> None:
    machine = Machine()
    machine.put(1)
    machine.put(2, namespace=2)
    machine.start([NAMESPACES[0], NamespaceInfo(2, "other", "m", "2", "l")])
    machine.recover()
    assert set(machine.held()) == {1}
    assert machine.values()["recovery_entries_refused_total"] == 1
    machine.start()
    machine.recover()
    assert set(machine.held()) == {1}, "it comes back with its old meaning"


def test_what_belongs_to_another_meaning_stays_so_when_its_clearing_away_is_cut_short() -> None:
    machine = Machine()
    machine.put(1)
    machine.put(2, namespace=2)
    other = [NAMESPACES[0], NamespaceInfo(2, "other", "m", "2", "l")]
    machine.start(other)  # and dies before it has looked at any entry
    assert machine.index.meaning(1) == meaning_of(NAMESPACES[0])
    machine.start(other)
    machine.recover()
    assert set(machine.held()) == {1}
    assert machine.index.meaning(2) == meaning_of(other[1])
    machine.put(3, namespace=2)
    machine.start(other)
    machine.recover()
    assert set(machine.held()) == {1, 3}


def test_a_namespace_that_is_made_during_the_taking_over_inherits_nothing_by_a_crash() -> None:
    machine = Machine()
    machine.put(2, namespace=2)
    machine.start([NAMESPACES[0]])
    machine.core.control_message(
        1.0, pool_map([NAMESPACES[0], NamespaceInfo(2, "other", "m", "2", "l")])
    )
    machine.start([NAMESPACES[0], NamespaceInfo(2, "other", "m", "2", "l")])
    machine.recover()
    assert machine.held() == {}


def test_without_a_map_nothing_is_taken_over_until_there_is_one() -> None:
    machine = Machine()
    machine.put(1)
    store = Store(Allocator(ARENA_BYTES, SLAB_BYTES))
    index = Index(machine.index_memory, ARENA_BYTES, 77)
    recovery = Recovery(index, store, SharedIndex(index, store, lambda: None), machine.memory)
    core = AgentCore(
        AgentOptions("node-1"), store, machine.memory, random.Random(1), recovery=recovery
    )
    assert not core.recover()
    assert store.get(block(1)) is None
    core.registered(REGISTERED)
    core.control_message(0.0, pool_map())
    assert store.get(block(1)) is not None


@pytest.mark.slow
def test_an_entry_with_a_flipped_bit_is_not_another_blocks() -> None:
    """Every bit of the words around what says something of the one copy that there is."""
    machine = Machine()
    empty = bytes(machine.index_memory)
    machine.put(1)
    first = shared.TAGS_OFFSET
    kept = bytes(machine.index_memory)
    lines = {at // 64 * 64 for at in range(first, len(kept)) if kept[at] != empty[at]}
    assert len(lines) >= 2
    for at in (line + byte for line in sorted(lines) for byte in range(64)):
        for bit in range(8):
            machine.index_memory[:] = kept
            machine.index_memory[at] ^= 1 << bit
            machine.start()
            machine.recover()
            assert machine.held() in ({}, {1: content(1, 4096)}), (at - first, bit)


@pytest.mark.slow
@given(seed=st.integers(0, 10**9), changes=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_a_damaged_index_costs_blocks_and_never_gives_wrong_ones(seed: int, changes: int) -> None:
    """Whatever words of tags, entries, checks and arena are changed: what is there afterwards is
    what was put under that name."""
    machine = Machine()
    for number in range(40):
        machine.put(number, 1000 + 137 * number)
    before = machine.held()
    rng = random.Random(seed)
    words = machine.index_memory.cast("Q")
    first = shared.TAGS_OFFSET // 8
    used = [at for at in range(first, len(words)) if words[at]]
    for _ in range(changes):
        kind = rng.randrange(4)
        at = rng.choice(used)
        if kind == 0:
            words[at] ^= 1 << rng.randrange(64)
        elif kind == 1:
            words[at] = words[rng.choice(used)]  # of another entry, perhaps
        elif kind == 2:
            words[rng.randrange(first, len(words))] = rng.getrandbits(64)
        else:
            machine.memory[rng.randrange(ARENA_BYTES)] ^= 1 << rng.randrange(8)
    machine.start()
    for number in rng.sample(range(40), 10):
        machine.store.get(block(number))
    machine.recover()
    after = machine.held()
    assert after.items() <= before.items()
    machine.put(1000)  # and the agent goes on
    assert machine.held()[1000] == content(1000, 4096)
    machine.start()
    machine.recover()
    assert machine.held().items() >= after.items()


@given(number=st.integers(0, 30), step=st.integers(0, 12))
@settings(max_examples=80, deadline=None)
def test_a_writer_that_dies_between_two_stores_leaves_an_index_that_holds(
    number: int, step: int
) -> None:
    """Every change of the index is cut off after `step` stores of a word, for a publish, and for a
    withdrawal."""
    machine = Machine()
    for each in range(20):
        machine.put(each)
    before = machine.held()
    dying = _Dying(machine.index_memory, step)
    machine.index._words = dying  # type: ignore[assignment]
    machine.index._memory = dying  # type: ignore[assignment]
    try:
        if number < 20:
            machine.store.drop(block(number))
        else:
            machine.put(number)
    except _DeadError:
        pass
    machine.start()
    machine.recover()
    after = machine.held()
    assert set(before) - {number} <= set(after) <= set(before) | {number}
    for each, data in after.items():
        assert data == content(each, 4096)
    machine.put(number + 100)
    machine.start()
    machine.recover()
    assert number + 100 in machine.held()


class _DeadError(Exception):
    """The writer was killed."""


class _Dying:
    """Memory whose writer is killed after so many stores."""

    def __init__(self, memory: memoryview, stores: int) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._left = stores

    def __getitem__(self, at: Any) -> Any:
        return (
            self._memory[at]
            if isinstance(at, slice) and at.start > len(self._words)
            else (self._words[at])
        )

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(at, slice):
            for word in range(at.start // 8, at.stop // 8):
                start = word * 8 - at.start
                self[word] = int.from_bytes(value[start : start + 8], "little")
            return
        if self._left == 0:
            raise _DeadError
        self._left -= 1
        self._words[at] = value

    def __len__(self) -> int:
        return len(self._memory)


# --- the allocator --------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_claims_in_any_order_make_the_allocator_that_gave_the_extents(data: st.DataObject) -> None:
    giver = Allocator(16 * SLAB_BYTES, SLAB_BYTES)
    sizes = data.draw(st.lists(st.integers(1, 3 * SLAB_BYTES), max_size=40))
    given_ = {giver.allocate(size): size for size in sizes}
    given_.pop(None, None)
    for offset in data.draw(st.sets(st.sampled_from(sorted(given_)))) if given_ else ():
        giver.free(offset)  # type: ignore[arg-type]
        del given_[offset]
    taker = Allocator(16 * SLAB_BYTES, SLAB_BYTES)
    for offset in data.draw(st.permutations(sorted(given_))):  # type: ignore[type-var]
        assert taker.claim(offset, given_[offset])  # type: ignore[arg-type]
        assert not taker.claim(offset, given_[offset])  # type: ignore[arg-type]
    taker.check()
    assert taker.used_bytes == giver.used_bytes
    assert taker.free_slabs == giver.free_slabs


@given(offset=st.integers(-SLAB_BYTES, 20 * SLAB_BYTES), size=st.integers(-5, 5 * SLAB_BYTES))
@settings(max_examples=200, deadline=None)
def test_no_claim_breaks_the_allocators_books(offset: int, size: int) -> None:
    allocator = Allocator(16 * SLAB_BYTES, SLAB_BYTES)
    for each in (1000, 70_000, 5000):
        allocator.allocate(each)
    if allocator.claim(offset, size):
        assert offset % GRAIN_BYTES == 0
        assert offset >= 0
        assert offset + size <= allocator.capacity_bytes
    allocator.check()


# --- clients that outlive their agent -------------------------------------------------------------


class Guest:
    """A client of the machine's agent, with a region, that may outlive it."""

    def __init__(self, machine: Machine, number: int = 1) -> None:
        self.machine = machine
        self.number = number
        self.replies: list[local.AgentReply] = []
        self.region = memoryview(bytearray(shared.REGION_BYTES))
        self.session = Session(machine.core, self.replies.append, number=number, first_handle=100)
        self.session.share(self.region, lambda _: None)

    def ask(self, request: local.Request) -> Any:
        self.session.handle(0.0, request)
        return self.replies.pop() if self.replies else None

    def get(self, number: int) -> local.GotBlock:
        got: local.GotBlock = self.ask(local.Get(1, 1, [block(number).key], 1.0)).blocks[0]
        assert got.status == local.OK
        return got

    def pin_by_itself(self, number: int) -> None:
        copy = self.machine.store.peek(block(number))
        assert copy is not None
        words = self.region.cast("Q")
        place = words[shared.CELLS_USED_WORD]
        words[shared.CELLS_WORD + place] = copy.cell
        words[shared.CELLS_USED_WORD] = place + 1

    def reborn(self, held: list[int] | None = None) -> None:
        """The client is back, at the agent that runs now."""
        rows = [
            (at, row)
            for at, row in self.machine.core.ledger.found()  # type: ignore[union-attr]
            if row.session == self.number
        ]
        self.session = Session(
            self.machine.core, lambda _: None, number=self.number, first_handle=1 << 40
        )
        self.session.restore(rows, self.region)
        if held is not None:
            self.session.resume(self.replies.append, self.session._tenants, lambda _: None, held)


def test_what_a_client_was_given_stays_where_it_is_for_the_next_agent() -> None:
    machine = Machine()
    machine.fill(range(16))
    guest = Guest(machine)
    got = guest.get(3)
    guest.pin_by_itself(5)
    machine.start()
    guest.reborn([got.handle])
    machine.recover()
    machine.fill(range(100, 120))
    assert machine.held().get(3) == content(3, SLAB_BYTES)
    assert machine.held().get(5) == content(5, SLAB_BYTES)
    assert 4 not in machine.held()
    guest.ask(local.Release([got.handle]))
    guest.region.cast("Q")[shared.CELLS_WORD] = 0
    machine.fill(range(200, 216))
    assert not {3, 5} & set(machine.held())
    guest.session.close()
    assert machine.store.held_bytes == 0


def test_a_block_that_was_dropped_under_its_reader_keeps_its_bytes_for_the_next_agent() -> None:
    machine = Machine()
    machine.fill(range(16))
    guest = Guest(machine)
    got = guest.get(3)
    guest.pin_by_itself(5)
    machine.store.drop(block(3))
    machine.store.drop(block(5))
    machine.start()
    guest.reborn([got.handle])
    machine.recover()
    machine.fill(range(100, 130))
    assert bytes(machine.memory[got.offset : got.offset + SLAB_BYTES]) == content(3, SLAB_BYTES)
    doomed = [c for c in machine.store._by_offset.values() if c.state == DOOMED]
    assert {int.from_bytes(c.block.key, "big") for c in doomed} == {3, 5}
    guest.session.close()
    assert machine.store.held_bytes == 0


def test_a_copy_withdrawn_in_the_moment_of_death_is_known_by_its_tombstone() -> None:
    machine = Machine()
    machine.fill(range(16))
    guest = Guest(machine)
    guest.pin_by_itself(5)
    copy = machine.store.peek(block(5))
    assert copy is not None
    machine.index.withdraw(copy.cell)  # and here it died: nothing is written down
    machine.start()
    guest.reborn([])
    machine.recover()
    machine.fill(range(100, 130))
    data = machine.memory[copy.offset : copy.offset + SLAB_BYTES]
    assert bytes(data) == content(5, SLAB_BYTES)


def test_what_clients_hold_of_a_namespace_that_is_gone_stays_for_every_agent_that_comes() -> None:
    other = [NamespaceInfo(1, "other", "m", "2", "l"), NAMESPACES[1]]
    machine = Machine()
    machine.fill(range(16))
    guests = [Guest(machine, 1), Guest(machine, 2)]
    for guest in guests:
        guest.pin_by_itself(5)
    copy = machine.store.peek(block(5))
    assert copy is not None

    def stays() -> bool:
        data = machine.memory[copy.offset : copy.offset + SLAB_BYTES]
        return bytes(data) == content(5, SLAB_BYTES)

    machine.start(other)
    for guest in guests:
        guest.reborn([])
    machine.recover()
    guests.pop(0).session.close()
    for number in range(100, 400):  # its place in the index is others' by then
        machine.put(number, SLAB_BYTES, namespace=2)
    assert stays(), "one of the two holds it still"
    assert machine.index.tombstone(copy.cell) is None
    for _ in range(2):
        machine.start(other)
        guests[0].reborn([])
        machine.recover()
        for number in range(400, 430):
            machine.put(number, SLAB_BYTES, namespace=2)
        assert stays()
    guests[0].region.cast("Q")[shared.CELLS_WORD] = 0
    for number in range(500, 530):
        machine.put(number, SLAB_BYTES, namespace=2)
    assert not stays()


def test_a_put_that_was_begun_ends_at_the_next_agent() -> None:
    machine = Machine()
    guest = Guest(machine)
    (extent,) = guest.ask(local.Alloc(1, 1, [block(9).key], [5000])).extents
    data = content(9, 5000)
    machine.memory[extent.offset : extent.offset + 2000] = data[:2000]
    machine.start()
    guest.reborn([extent.ticket])
    assert machine.store.get(block(9)) is None
    machine.fill(range(100, 130))
    machine.memory[extent.offset + 2000 : extent.offset + 5000] = data[2000:]
    committed = guest.ask(local.Commit(2, [extent.ticket], "local"))
    assert isinstance(committed, local.Committed)
    assert [result.status for result in committed.blocks] == [local.OK]
    assert machine.held()[9] == data
    assert machine.core.ledger is not None
    assert not list(Ledger(machine.ledger_memory).found())


def died_in_a_commit() -> tuple[Machine, Guest, int]:
    """A client put block 9 by this ticket, and the agent died before it answered."""
    machine = Machine()
    guest = Guest(machine)
    (extent,) = guest.ask(local.Alloc(1, 1, [block(9).key], [5000])).extents
    machine.memory[extent.offset : extent.offset + 5000] = content(9, 5000)
    copy = guest.session._tickets[extent.ticket]
    machine.store.commit(copy, digest_of(content(9, 5000)), home=True)
    machine.start()
    guest.reborn([extent.ticket])
    return machine, guest, extent.ticket


def test_a_commit_that_was_not_answered_may_be_asked_for_again() -> None:
    machine, guest, ticket = died_in_a_commit()
    committed = guest.ask(local.Commit(2, [ticket], "local"))
    assert [result.status for result in committed.blocks] == [local.OK]
    machine.recover()
    assert machine.held()[9] == content(9, 5000)
    assert machine.store.held_bytes == 0


def test_a_commit_that_was_not_answered_ends_even_if_the_block_was_dropped_since() -> None:
    machine, guest, ticket = died_in_a_commit()
    assert machine.store.drop(block(9))
    committed = guest.ask(local.Commit(2, [ticket], "local"))
    assert [result.status for result in committed.blocks] == [local.OK]
    machine.recover()
    assert machine.held() == {}
    assert machine.store.used_bytes == 0


class Putting:
    """A client has put blocks together, and waits for a home that does not answer (`TWO_NODES`)."""

    def __init__(self, machine: Machine, numbers: list[int], size_bytes: int = SLAB_BYTES) -> None:
        self.machine = machine
        machine.core.control_message(0.0, TWO_NODES)
        self.guest = Guest(machine)
        keys = [block(number).key for number in numbers]
        sizes = [size_bytes] * len(keys)
        self.extents = self.guest.ask(local.Alloc(1, 1, keys, sizes)).extents
        for number, extent in zip(numbers, self.extents, strict=True):
            end = extent.offset + size_bytes
            machine.memory[extent.offset : end] = content(number, size_bytes)
        assert self.commit() is None

    def commit(self) -> Any:
        """What the agent says of the put; None: nothing yet."""
        return self.guest.ask(local.Commit(2, [extent.ticket for extent in self.extents], "home"))

    def next_agent(self) -> None:
        self.machine.start(kept=TWO_NODES)
        self.guest.reborn([extent.ticket for extent in self.extents])


@pytest.mark.parametrize("held", [False, True])
def test_a_put_that_waited_for_its_home_is_not_what_others_wrote_in_its_room(held: bool) -> None:
    """Where the node has the block already (`held`), the room is free as soon as it is put."""
    machine = Machine()
    if held:
        machine.put(9, SLAB_BYTES)
    putting = Putting(machine, [9])
    machine.fill(range(100, 115))
    before = machine.held()
    (room,) = putting.extents
    lies_there = bytes(machine.memory[room.offset : room.offset + SLAB_BYTES])
    assert (lies_there == content(9, SLAB_BYTES)) != held
    for _ in range(2):  # the next agent dies in the same put
        putting.next_agent()
        machine.recover()
        assert putting.commit() is None
    assert machine.held() == before
    assert before[9] == content(9, SLAB_BYTES)
    (call,) = machine.core.outbox.calls
    assert isinstance(call, PutCall)
    assert call.begin()
    call.ended(1.0, bulk.DONE)
    (put,) = putting.guest.replies.pop().blocks  # type: ignore[union-attr]
    assert put == local.PutBlock(local.OK, 1, digest_of(before[9]))
    assert not list(Ledger(machine.ledger_memory).found())
    assert machine.store.held_bytes == 0


def test_of_blocks_put_together_the_next_agent_has_those_that_are_at_home_already() -> None:
    """The first is at home here, and nothing but the answer to the others keeps it here."""
    machine = Machine()
    putting = Putting(machine, [HERE, 9])
    machine.fill(range(100, 130))
    putting.next_agent()
    assert putting.commit() is None
    machine.recover()
    held = machine.held()
    assert [held.get(n) for n in (HERE, 9)] == [content(n, SLAB_BYTES) for n in (HERE, 9)]
    (call,) = machine.core.outbox.calls
    assert call.begin()  # type: ignore[call-arg, union-attr]
    call.ended(1.0, bulk.DONE)  # type: ignore[call-arg]
    statuses = [put.status for put in putting.guest.replies.pop().blocks]  # type: ignore[union-attr]
    assert statuses == [local.OK, local.OK]
    assert machine.store.held_bytes == 0


class Digesting(Putting):
    """The same, and the agent still makes digests, of which it is told by `make`."""

    def __init__(self, machine: Machine, numbers: list[int]) -> None:
        self.waiting: list[tuple[list[memoryview], Digested]] = []
        machine.core.make_digests = lambda _now, *asked: self.waiting.append(asked)
        super().__init__(machine, numbers, 4096)

    def make(self) -> None:
        ((blocks, then),) = self.waiting
        self.waiting.clear()
        digests_at_once(0.0, blocks, then)


def test_of_blocks_put_together_those_are_safe_of_which_the_agent_has_made_digests() -> None:
    """The rooms of the first could be others', and free again, before it has made the next ones."""
    machine = Machine()
    numbers = [HERE * (each + 1) for each in range(COMMITTED_AT_ONCE + 1)]
    putting = Digesting(machine, numbers)
    putting.make()
    assert len(putting.waiting) == 1  # the last one's, which never comes
    machine.fill(range(100, 112))
    for number in range(100, 112):
        machine.store.drop(block(number))
    putting.next_agent()
    assert {put.status for put in putting.commit().blocks} == {local.OK}
    machine.recover()
    held = machine.held()
    assert [held.get(number) for number in numbers] == [content(n, 4096) for n in numbers]
    assert not list(Ledger(machine.ledger_memory).found())
    assert machine.store.held_bytes == 0


def test_a_client_that_left_while_its_digests_were_made_leaves_nothing_in_the_ledger() -> None:
    machine = Machine()
    putting = Digesting(machine, [9])
    putting.guest.session.close()
    putting.make()
    assert not list(Ledger(machine.ledger_memory).found())
    assert machine.held()[9] == content(9, 4096)


@pytest.mark.parametrize("held", [False, True])
def test_a_put_that_was_dropped_before_any_home_had_it_is_nothing_to_the_next(held: bool) -> None:
    """Not a block of what others wrote in its room, either: seed 1540905 of the simulation."""
    machine = Machine()
    if held:
        machine.put(9, SLAB_BYTES)
    putting = Putting(machine, [9])
    machine.fill(range(100, 115))
    machine.store.drop(block(9))
    before = machine.held()
    putting.next_agent()
    assert [put.status for put in putting.commit().blocks] == [local.UNAVAILABLE]
    machine.recover()
    assert machine.held() == before
    assert not machine.core.outbox.calls
    assert machine.store.held_bytes == 0


def test_what_the_client_never_heard_of_is_given_back_when_it_returns() -> None:
    machine = Machine()
    machine.put(1)
    guest = Guest(machine)
    guest.get(1)
    guest.ask(local.Alloc(1, 1, [block(9).key], [5000]))
    machine.start()
    guest.reborn([])
    machine.recover()
    assert machine.store.held_bytes == 0
    states = {copy.state for copy in machine.store._by_offset.values()}
    assert states == {COMMITTED}
    assert RESERVED not in states


def test_a_client_that_is_overtaken_while_it_pins_is_not_cut_off() -> None:
    machine = Machine()
    machine.put(1)
    copy = machine.store.peek(block(1))
    assert copy is not None
    cell = copy.cell
    machine.start()
    guest = Guest(machine)
    words = guest.region.cast("Q")
    words[shared.CELLS_WORD], words[shared.CELLS_USED_WORD] = cell, 1
    machine.store.elsewhere.refresh()
    words[shared.CELLS_WORD] = 0
    machine.recover()
    assert machine.values()["index_offences_total"] == 0
    words[shared.CELLS_WORD] = cell + (2 << shared.SLOT_BITS)
    machine.store.elsewhere.refresh()
    assert machine.values()["index_offences_total"] == 1


def test_room_of_a_namespace_that_was_deleted_meanwhile_becomes_no_block() -> None:
    """The former agent knew that the room was of no use any more, the next knows the namespace
    only as deleted."""
    machine = Machine()
    guest = Guest(machine)
    (extent,) = guest.ask(local.Alloc(1, 1, [block(9).key], [5000])).extents
    machine.start(NAMESPACES[1:])
    guest.reborn([extent.ticket])
    deleted = msgspec.structs.replace(pool_map(NAMESPACES[1:]), deleted=[NAMESPACES[0].namespace])
    machine.core.control_message(0.0, deleted)
    committed = guest.ask(local.Commit(2, [extent.ticket], "local"))
    assert [put.status for put in committed.blocks] == [local.UNKNOWN_NAMESPACE]
    assert not list(machine.store.blocks())
    assert machine.store.used_bytes == 0


def test_of_a_large_namespace_that_is_deleted_no_client_and_no_later_agent_finds_anything() -> None:
    machine = Machine()
    for number in range(2 * PART_BLOCKS + 10):
        machine.put(number, 1024)
    machine.put(1, namespace=2)
    deleted = msgspec.structs.replace(pool_map(NAMESPACES[1:]), deleted=[NAMESPACES[0].namespace])
    machine.core.control_message(0.0, deleted)
    assert not readable(machine)
    assert len(machine.store) == PART_BLOCKS + 11, "they go by and by"
    machine.start(NAMESPACES[1:], kept=deleted)
    machine.recover()
    assert list(machine.store.blocks()) == [block(1, namespace=2)]
    assert machine.store.used_bytes == machine.store.allocator.extent_bytes(4096)


def test_pins_by_name_outlive_the_agent() -> None:
    machine = Machine()
    machine.fill(range(16))
    guest = Guest(machine)
    assert guest.ask(local.Pin(1, 1, [block(3).key])).count == 1
    machine.start()
    guest.reborn([])
    machine.fill(range(100, 130))
    assert machine.store.peek(block(3)) is not None
    assert guest.ask(local.Unpin(1, 1, [block(3).key])).count == 1
    machine.recover()
    assert machine.store.held_bytes == 0


# --- the ledger -----------------------------------------------------------------------------------


def row(number: int) -> Row:
    return Row(7, number, block(number), number * 1024, 1000, 5, HANDLE)


def test_rows_are_found_again_and_a_torn_one_is_none() -> None:
    memory = memoryview(bytearray(LEDGER_BYTES))
    ledger = Ledger(memory)
    places = [ledger.write(row(number)) for number in range(5)]
    ledger.strike(places[1])
    memory[places[3] * 64 + 20] ^= 1
    found = dict(Ledger(memory).found())
    assert found == {places[number]: row(number) for number in (0, 2, 4)}


def test_a_full_ledger_says_so_and_takes_rows_again_when_some_are_struck() -> None:
    ledger = Ledger(memoryview(bytearray(LEDGER_BYTES)))
    places = [ledger.write(row(number)) for number in range(ROWS)]
    assert places.count(NO_ROW) == 1
    ledger.strike(places[10])
    assert ledger.write(row(1)) == places[10]
    assert ledger.write(row(1)) == NO_ROW


def test_a_client_is_told_busy_where_there_is_no_row_left() -> None:
    machine = Machine()
    machine.put(1)
    assert machine.core.ledger is not None
    while machine.core.ledger.write(row(1)) != NO_ROW:
        pass
    guest = Guest(machine)
    assert guest.ask(local.Get(1, 1, [block(1).key], 1.0)).blocks[0].status == local.BUSY
    assert guest.ask(local.Alloc(1, 1, [block(2).key], [10])).extents[0].status == local.BUSY
    assert guest.ask(local.Pin(1, 1, [block(1).key])).count == 0
    assert machine.store.held_bytes == 0


def test_a_store_that_recovers_knows_when_there_is_no_room() -> None:
    machine = Machine()
    machine.fill(range(16))
    guest = Guest(machine)
    for number in range(4):
        guest.get(number)
    machine.start()
    guest.reborn(list(range(100, 120)))
    with pytest.raises(NoRoomError):
        machine.store.reserve(block(99), ARENA_BYTES)
    machine.recover()


def test_meanings_in_the_index_are_those_of_the_map() -> None:
    machine = Machine()
    assert machine.index.meaning(1) == meaning_of(NAMESPACES[0])


def test_a_region_of_another_life_counts_no_old_hits() -> None:
    memory = memoryview(bytearray(shared.REGION_BYTES))
    memory.cast("Q")[shared.HITS_WORD] = 12
    assert Region(memory, 1, lambda _: None).hits == 12
