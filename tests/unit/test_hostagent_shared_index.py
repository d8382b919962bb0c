"""The index and the regions in plain memory: what a client finds, what an agent believes.

Oracle: what was put into the store. Cannot see: both at once (tests/property/
test_shared_index_property.py), processes and descriptors (tests/integration/test_local_hits.py).
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from kvcast.hostagent.client import AgentGoneError
from kvcast.hostagent.client import local_blocks as client_module
from kvcast.hostagent.client.local_blocks import Found, LocalBlocks
from kvcast.hostagent.core.shared_index import MOST_HITS_AT_ONCE, Region, SharedIndex
from kvcast.hostagent.core.store import DOOMED, Copy, NoRoomError, QuotaError, Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.shared import WORD_BYTES
from kvcast.protocol.messages.wire import BlockId

ARENA_BYTES = 1 << 20
SLAB_BYTES = 64 * 1024
BLOCK_BYTES = 4096


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def buckets_of(key: bytes, bits: int) -> tuple[int, int]:
    """Of a block of namespace 1."""
    high, low = shared.KEY_HALVES.unpack(key)
    return shared.two_buckets(1, high, low, bits)


class Side:
    """One client with its region."""

    def __init__(self, node: Node, max_bytes: int) -> None:
        self.memory = memoryview(bytearray(shared.REGION_BYTES))
        self.offences: list[str] = []
        self.region = Region(self.memory, max_bytes, self.offences.append)
        node.shared.join(self.region)
        self.words = self.memory.cast("Q")
        self.blocks = LocalBlocks(
            node.memory,
            node.memory.cast("Q"),
            self.words,
            arena_bytes=ARENA_BYTES,
            max_bytes=max_bytes,
        )

    def take(self, *numbers: int) -> list[Found | None]:
        return self.blocks.take(1, [key_of(number) for number in numbers])

    def release(self, found: Found | None) -> None:
        assert found is not None
        self.blocks.release(found.pin, found.reserved_bytes)


class Node:
    """A store with an index, and how often it has issued the barrier."""

    def __init__(self, **options: Any) -> None:
        self.memory = memoryview(bytearray(shared.index_bytes(buckets_for(ARENA_BYTES))))
        self.store = Store(Allocator(ARENA_BYTES, SLAB_BYTES), **options)
        self.index = Index(self.memory, ARENA_BYTES, 99)
        self.index.state_namespace(1, 5, readable=True)
        self.barriers = 0
        self.shared = SharedIndex(self.index, self.store, self._barrier)

    def _barrier(self) -> None:
        self.barriers += 1

    def client(self, max_bytes: int = ARENA_BYTES) -> Side:
        return Side(self, max_bytes)

    def put(self, number: int, size_bytes: int = BLOCK_BYTES, namespace: int = 1) -> Copy:
        copy = self.store.reserve(BlockId(namespace, key_of(number)), size_bytes)
        return self.store.commit(copy, digest=number + 1, home=False)

    def fill(self) -> list[int]:
        count = ARENA_BYTES // BLOCK_BYTES
        for number in range(count):
            self.put(number)
        return list(range(count))


def test_what_is_committed_is_found_where_it_lies() -> None:
    node = Node()
    client = node.client()
    copies = [node.put(number, 1000 + number) for number in range(100)]
    found = client.take(*range(100), 100)
    assert found[-1] is None
    for number, (copy, one) in enumerate(zip(copies, found[:100], strict=True)):
        assert one is not None
        assert (one.offset, one.size_bytes) == (copy.offset, 1000 + number)
        assert (one.digest, one.reserved_bytes) == (number + 1, copy.reserved_bytes)


def test_what_is_reserved_or_dropped_is_not_found() -> None:
    node = Node()
    client = node.client()
    node.store.reserve(BlockId(1, key_of(1)), 100)
    node.put(2)
    node.store.drop(BlockId(1, key_of(2)))
    assert client.take(1, 2) == [None, None]


def test_a_key_of_zeros_and_one_key_in_two_namespaces_are_told_apart() -> None:
    node = Node()
    node.index.state_namespace(2, 6, readable=True)
    client = node.client()
    one, two = node.put(0), node.put(0, 500, namespace=2)
    (first,), (second,) = client.take(0), client.blocks.take(2, [key_of(0)])
    assert first is not None
    assert second is not None
    assert (first.offset, second.offset) == (one.offset, two.offset)


def test_a_pinned_copy_outlives_its_eviction_and_its_bytes_are_free_after_the_pin() -> None:
    node = Node()
    client = node.client()
    node.put(1)
    (found,) = client.take(1)
    node.store.drop(BlockId(1, key_of(1)))
    assert client.take(1) == [None]
    assert node.store.used_bytes == BLOCK_BYTES  # doomed, and pinned
    client.release(found)
    node.shared.refresh()
    assert node.store.used_bytes == 0
    node.store.check()


def test_a_full_arena_evicts_around_what_clients_pin() -> None:
    node = Node()
    client = node.client()
    numbers = node.fill()
    pinned = client.take(0, 1, 2)  # the least recently used
    for number in range(10_000, 10_000 + len(numbers)):
        node.put(number)
    assert client.take(0, 1, 2) != [None] * 3
    for found in pinned:
        assert found is not None
        assert node.store._by_offset[found.offset].block.key == key_of(pinned.index(found))
    node.store.check()


def test_where_clients_pin_everything_a_put_finds_no_room_and_evicts_nothing() -> None:
    node = Node()
    client = node.client()
    numbers = node.fill()
    held = client.take(*numbers)
    with pytest.raises(NoRoomError):
        node.put(9999)
    assert node.store.counters.evictions == 0
    client.release(held[7])
    node.put(9999)
    assert node.store.counters.evictions == 1
    node.store.check()


def test_a_pin_taken_after_the_last_look_dooms_the_victim_and_another_goes() -> None:
    node = Node()
    client = node.client()
    node.fill()
    look = node.shared.refresh

    def pinned_behind_its_back() -> None:
        look()
        client.take(0)

    node.shared.refresh = pinned_behind_its_back  # type: ignore[method-assign]
    copy = node.store._index[BlockId(1, key_of(0))]
    fresh = node.put(9999)
    assert copy.state == DOOMED
    assert copy.pins == 1
    assert fresh.offset != copy.offset
    node.store.check()


def test_a_quota_evicts_around_what_clients_pin() -> None:
    node = Node(quotas={1: 4 * BLOCK_BYTES})
    client = node.client()
    for number in range(4):
        node.put(number)
    held = client.take(0, 1, 2, 3)
    with pytest.raises(QuotaError):
        node.put(9)
    client.release(held[2])
    node.put(9)
    assert [one is not None for one in client.take(0, 1, 2, 3)] == [True, True, False, True]


def test_hits_keep_a_block_from_eviction_and_are_counted() -> None:
    node = Node()
    client = node.client()
    numbers = node.fill()
    client.release(client.take(0)[0])
    for number in range(10_000, 10_000 + len(numbers) - 1):
        node.put(number)
    assert client.take(0) != [None]
    node.shared.refresh()
    assert node.shared.counters.hits == 2


def test_more_hits_than_the_ring_holds_are_counted_and_not_told_apart() -> None:
    node = Node()
    client = node.client()
    node.put(1)
    for _ in range(shared.RING_CELLS + 100):
        client.release(client.take(1)[0])
    node.shared.refresh()
    assert node.shared.counters.hits == shared.RING_CELLS + 100
    assert node.shared.counters.hits_untold == 100


def test_a_client_pins_no_more_than_its_bytes_and_cells() -> None:
    node = Node()
    client = node.client(max_bytes=10 * BLOCK_BYTES)
    node.fill()
    held = client.take(*range(12))
    assert [one is not None for one in held] == [True] * 10 + [False] * 2
    node.shared.refresh()
    assert client.offences == []
    client.release(held[0])
    assert client.take(11) != [None]
    assert client.take(12) == [None]


def test_a_client_without_cells_left_asks_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    client = node.client()
    node.put(1, 1024)
    client.blocks._max_bytes = 1 << 40
    held = [client.take(1)[0] for _ in range(shared.PIN_CELLS)]
    assert None not in held
    assert client.take(1) == [None]
    node.shared.refresh()
    assert client.region.held_bytes == 1024  # one copy, however often
    client.release(held[0])
    assert client.take(1) != [None]


def test_a_client_that_leaves_leaves_nothing_pinned_and_finds_nothing_more() -> None:
    node = Node()
    client, other = node.client(), node.client()
    node.put(1)
    client.take(1)
    other.take(1)
    node.shared.refresh()
    copy = node.store._index[BlockId(1, key_of(1))]
    assert copy.pins == 2
    node.shared.leave(client.region)
    node.shared.leave(client.region)
    assert copy.pins == 1
    assert client.take(1) == [None]
    assert client.blocks.prefix(1, key_of(1)) == 0


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda words, cell: _pins(words, shared.cell_of(shared.MAX_SLOTS - 1, 2)), "not exist"),
        (lambda words, cell: _pins(words, cell + (1 << shared.SLOT_BITS)), "generation"),
        (lambda words, cell: _pins(words, cell + (2 << shared.SLOT_BITS)), "generation"),
        (lambda words, cell: _pins(words, 5), "generation 0"),
        (lambda words, cell: _set(words, shared.CELLS_USED_WORD, shared.PIN_CELLS + 1), "cells"),
        (lambda words, cell: _set(words, shared.HITS_WORD, MOST_HITS_AT_ONCE + 2), "hits at once"),
        (lambda words, cell: _set(words, shared.HITS_WORD, (1 << 64) - 1), "hits at once"),
    ],
)
def test_nonsense_in_a_region_costs_its_client_its_pins_and_nobody_else(
    write: Callable[[Any, int], None], why: str
) -> None:
    node = Node()
    hostile, other = node.client(), node.client()
    copy = node.put(1)
    hostile.take(1)
    other.take(1)
    node.shared.refresh()
    write(hostile.words, copy.cell)
    node.shared.refresh()
    assert len(hostile.offences) == 1
    assert why in hostile.offences[0]
    assert other.offences == []
    assert copy.pins == 1
    assert hostile.words[shared.CLOSED_WORD] == 1
    assert node.shared.counters.offences == 1
    node.store.check()


def _pins(words: Any, cell: int) -> None:
    words[shared.CELLS_USED_WORD] = 2
    words[shared.CELLS_WORD + 1] = cell


def _set(words: Any, at: int, value: int) -> None:
    words[at] = value


def test_who_pins_beyond_its_share_is_cut_off() -> None:
    node = Node()
    numbers = node.fill()
    client = node.client(max_bytes=20 * BLOCK_BYTES)
    client.blocks._max_bytes = ARENA_BYTES  # a client that does not keep to it
    client.take(*numbers)
    node.shared.refresh()
    assert client.offences == [f"it pins more than {20 * BLOCK_BYTES} bytes"]
    assert node.store.held_bytes == 0
    node.store.check()


def test_a_hostile_clients_noise_never_breaks_the_agent() -> None:
    rng = random.Random(5)
    for _ in range(200):
        node = Node()
        client, honest = node.client(), node.client()
        numbers = node.fill()
        kept = honest.take(3, 4)
        cells = [node.store._index[BlockId(1, key_of(number))].cell for number in numbers]
        for _ in range(20):
            at = rng.choice(
                [shared.CELLS_USED_WORD, shared.HITS_WORD, shared.CELLS_WORD + rng.randrange(64)]
            )
            value = rng.choice([0, 1, 64, rng.getrandbits(64), rng.choice(cells), (1 << 64) - 1])
            client.words[at] = value
            node.put(rng.randrange(20_000, 30_000))
            assert honest.offences == []
        for number, one in zip((3, 4), kept, strict=True):
            assert one is not None
            assert node.store._by_offset[one.offset].block.key == key_of(number)
        node.store.check()


def test_a_namespace_that_is_not_readable_or_means_something_else_is_not_looked_up() -> None:
    node = Node()
    client = node.client()
    node.put(1)
    client.blocks.told(1, 5)
    assert client.take(1) != [None]
    node.index.state_namespace(1, 5, readable=False)
    assert client.take(1) == [None]
    node.index.state_namespace(1, 6, readable=True)
    assert client.take(1) == [None]
    assert client.blocks.prefix(1, key_of(1)) == 0
    assert client.blocks.take(-1, [key_of(1)]) == [None]
    assert client.blocks.take(1 << 16, [key_of(1)]) == [None]


def test_a_later_agents_index_is_not_taken_for_the_one_that_was_mapped() -> None:
    node = Node()
    client = node.client()
    node.put(1)
    node.memory.cast("Q")[shared.INCARNATION_WORD] = 100
    assert client.take(1) == [None]
    assert client.blocks.prefix(1, key_of(1)) == 0


def test_a_change_that_never_ends_sends_the_client_to_the_agent() -> None:
    node = Node()
    client = node.client()
    copy = node.put(1)
    slot, generation = shared.slot_of(copy.cell)
    word = (node.index._entries + slot * shared.ENTRY_BYTES) // WORD_BYTES
    node.memory.cast("Q")[word] = generation + 1
    assert client.take(1) == [None]
    assert client.blocks.prefix(1, key_of(1)) == 0


@pytest.mark.parametrize("field", [3, 4, 6, 9])
def test_an_entry_that_lies_outside_the_arena_is_not_believed(field: int) -> None:
    node = Node()
    client = node.client()
    copy = node.put(1)
    slot, _ = shared.slot_of(copy.cell)
    start = node.index._entries + slot * shared.ENTRY_BYTES + WORD_BYTES
    fields = list(shared.FIELDS.unpack_from(node.memory, start))
    if field == 3:
        fields[2] = ARENA_BYTES - 100  # offset
    elif field == 4:
        fields[2] = (1 << 64) - 1
    elif field == 6:
        fields[5] = ARENA_BYTES + 1  # size
    else:
        fields[5] = 0
    shared.FIELDS.pack_into(node.memory, start, *fields)
    assert client.take(1) == [None]


@pytest.mark.parametrize("word", [0, 1, 3, 4, 5])
def test_an_index_with_another_header_is_not_used(word: int) -> None:
    node = Node()
    node.memory.cast("Q")[word] += 1
    with pytest.raises(AgentGoneError, match="not understood"):
        node.client()


def test_a_damaged_index_gives_a_client_no_crash_and_no_bytes_outside_the_arena() -> None:
    rng = random.Random(7)
    node = Node()
    numbers = node.fill()
    spoilt = rng.sample(range(shared.TAGS_OFFSET // 8, len(node.memory) // 8), 4000)
    words = node.memory.cast("Q")
    for word in spoilt:
        words[word] = rng.choice([0, rng.getrandbits(64), words[rng.choice(spoilt)]])
    client = node.client()
    for found in client.take(*numbers):
        assert found is None or 0 <= found.offset <= ARENA_BYTES - found.size_bytes
    client.blocks.prefix(1, b"".join(key_of(number) for number in numbers))


def test_blocks_whose_two_buckets_are_full_cost_a_message_and_no_block() -> None:
    node = Node()
    client = node.client()
    bits = buckets_for(ARENA_BYTES).bit_length() - 1
    rng = random.Random(3)
    wanted = buckets_of(rng.randbytes(16), bits)
    keys: list[bytes] = []
    while len(keys) < 2 * shared.SLOTS_A_BUCKET + 1:
        key = rng.randbytes(16)
        if buckets_of(key, bits) == wanted:
            keys.append(key)
    for key in keys:
        copy = node.store.reserve(BlockId(1, key), 1024)
        node.store.commit(copy, 1, home=False)
    assert [one is not None for one in client.blocks.take(1, keys)] == [True] * 16 + [False]
    assert node.shared.counters.full == 1
    assert node.store.peek(BlockId(1, keys[-1])) is not None
    for key in keys:
        node.store.drop(BlockId(1, key))
    node.store.check()


def test_a_slot_whose_generations_are_used_up_stays_empty() -> None:
    node = Node()
    client = node.client()
    copy = node.put(1)
    slot, _ = shared.slot_of(copy.cell)
    node.store.drop(copy.block)
    word = (node.index._entries + slot * shared.ENTRY_BYTES) // WORD_BYTES
    node.memory.cast("Q")[word] = shared.LAST_GENERATION
    again = node.put(1)
    assert shared.slot_of(again.cell)[0] != slot
    assert client.take(1) != [None]
    assert shared.slot_of(shared.cell_of(slot, shared.LAST_GENERATION)) == (
        slot,
        shared.LAST_GENERATION,
    )
    assert shared.cell_of(shared.MAX_SLOTS - 1, shared.LAST_GENERATION) < 1 << 64


@pytest.mark.parametrize("count", [1, 23, 24, 64, 65, 250])
def test_questions_are_answered_alike_with_numpy_and_without_while_they_are_short(
    count: int,
) -> None:
    numpy = pytest.importorskip("numpy")
    node = Node()
    client = node.client()
    rng = random.Random(count)
    numbers = list(range(count))
    for number in numbers:
        node.put(number)
    keys = [key_of(number) for number in numbers]
    bits = buckets_for(ARENA_BYTES).bit_length() - 1
    for gone in [*rng.sample(numbers, min(5, count)), None]:
        if gone is not None:
            node.store.drop(BlockId(1, key_of(gone)))
        there = count if gone is None else gone
        client.blocks.table = None
        assert client.blocks.prefix(1, b"".join(keys)) == (there if count <= 64 else 0)
        client.blocks.table = client_module._Table(numpy, node.memory, bits)
        assert client.blocks.prefix(1, b"".join(keys)) == there
        if gone is not None:
            node.put(gone)
    assert client.blocks.prefix(1, b"") == 0


def test_dropping_a_namespace_takes_one_barrier_and_no_block_is_found_after_it() -> None:
    node = Node()
    client = node.client()
    node.fill()
    before = node.barriers
    node.store.drop_namespace(1)
    assert node.barriers == before + 1
    assert client.take(*range(10)) == [None] * 10
    node.store.check()


def test_without_clients_no_barrier_is_issued() -> None:
    node = Node()
    node.fill()
    node.put(9999)
    assert node.barriers == 0


def test_a_closed_index_is_written_no_more() -> None:
    node = Node()
    client = node.client()
    node.put(1)
    node.shared.close()
    assert client.take(1) == [None]
    before = bytes(node.memory)
    node.put(2)
    node.store.drop(BlockId(1, key_of(1)))
    assert bytes(node.memory) == before


def test_the_index_keeps_what_a_later_agent_needs_to_know() -> None:
    node = Node()
    copy = node.put(7, 3000)
    slot, generation = shared.slot_of(copy.cell)
    start = node.index._entries + slot * shared.ENTRY_BYTES
    (stored,) = struct.unpack_from("=Q", node.memory, start)
    high, low, offset, digest, commits, size_bytes, namespace, state, reserved = (
        shared.FIELDS.unpack_from(node.memory, start + WORD_BYTES)
    )
    assert stored == generation
    assert shared.KEY_HALVES.pack(high, low) == key_of(7)
    assert (offset, size_bytes, reserved) == (copy.offset, 3000, copy.reserved_bytes)
    assert (digest, commits, namespace, state) == (8, 1, 1, shared.HELD)


def test_of_many_those_are_found_that_lie_in_their_second_bucket_or_have_no_low_half() -> None:
    numpy = pytest.importorskip("numpy")
    node = Node()
    client = node.client()
    bits = buckets_for(ARENA_BYTES).bit_length() - 1
    client.blocks.table = client_module._Table(numpy, node.memory, bits)
    of_one = (n for n in itertools.count() if buckets_of(key_of(n), bits)[0] == 5)
    here = [key_of(n) for n in itertools.islice(of_one, shared.SLOTS_A_BUCKET + 1)]
    here.append(shared.KEY_HALVES.pack(7, 0))
    for key in here:
        node.store.commit(node.store.reserve(BlockId(1, key), 100), digest=1, home=False)
    keys = [*here, *(key_of(n) for n in range(10**6, 10**6 + 30))]
    random.Random(1).shuffle(keys)
    found = client.blocks.take(1, keys)
    assert {key for key, one in zip(keys, found, strict=True) if one is not None} == set(here)


def test_what_is_found_as_the_namespace_is_taken_away_is_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    client = node.client()
    node.put(1)
    find = client.blocks._take

    def found_too_late(namespace: int, key: bytes) -> Found | None:
        found = find(namespace, key)
        node.index.state_namespace(1, 5, readable=False)
        return found

    monkeypatch.setattr(client.blocks, "_take", found_too_late)
    assert client.take(1) == [None]
    assert client.words[shared.CELLS_WORD] == client.words[shared.HITS_WORD] == 0


def test_a_number_that_no_namespace_has_means_nothing() -> None:
    node = Node()
    client = node.client()
    node.put(1)
    for number in (-1, shared.NAMESPACES):
        assert client.blocks.meaning(number) is None
        assert client.blocks.take(number, [key_of(1)]) == [None]
    assert client.blocks.meaning(1) is not None
    client.blocks.close()
    assert client.blocks.meaning(1) is None


def test_a_client_that_another_thread_closes_finds_nothing_and_raises_nothing() -> None:
    node = Node()
    for where in ("_find", "_settle", "_tell"):
        client = node.client()
        node.put(1)
        original = getattr(client.blocks, where)

        def closed_meanwhile(
            *args: Any, blocks: LocalBlocks = client.blocks, original: Any = original
        ) -> Any:
            blocks.close()
            return original(*args)

        setattr(client.blocks, where, closed_meanwhile)
        assert client.take(1) == [None]
        assert client.blocks.prefix(1, key_of(1)) == 0
        client.blocks.release(0, BLOCK_BYTES)
