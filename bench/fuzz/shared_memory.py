"""Entry points in shared memory: a client's region before its agent, and an index before a client.

Owns: what a hostile process may have written there, and what must hold all the same. Must not
know: how either side reads it.

An input is a run of twelve bytes each: where a word is written, as four bytes, and the word. For a
region the place is one of its first words or cells, or anywhere; the word is taken as it is, or
(if its first byte is odd) made into a cell near one that exists. For an index the place is
anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from kvcast.bench.fuzz.engine import Harness
from kvcast.bench.fuzz.targets import entry_point
from kvcast.hostagent.client import local_blocks
from kvcast.hostagent.client.errors import AgentGoneError
from kvcast.hostagent.client.local_blocks import LocalBlocks
from kvcast.hostagent.core import shared_index
from kvcast.hostagent.core.shared_index import Region, SharedIndex
from kvcast.hostagent.core.store import Store, StoreError, StoreRules
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.control import POLICIES
from kvcast.protocol.messages.shared import WORD_BYTES
from kvcast.protocol.messages.wire import BlockId

_ARENA_BYTES: Final = 256 * 1024
_BLOCK_BYTES: Final = 4096
_BLOCKS: Final = _ARENA_BYTES // _BLOCK_BYTES
_WRITE: Final = struct.Struct("<IQ")


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _writes(data: bytes) -> Iterator[tuple[int, int]]:
    """Places and words."""
    whole = len(data) // _WRITE.size * _WRITE.size
    return _WRITE.iter_unpack(data[:whole])


def _index_memory() -> memoryview:
    return memoryview(bytearray(shared.index_bytes(buckets_for(_ARENA_BYTES))))


class _Node:
    """An agent's store that is full, with its index."""

    def __init__(self, memory: memoryview, policy: str = POLICIES[0]) -> None:
        memory[:] = bytes(len(memory))
        self.memory = memory
        self.store = Store(Allocator(_ARENA_BYTES, 64 * 1024))
        self.store.configure({1: StoreRules(policy, ttl_s=20.0 if policy == "ttl" else 0.0)})
        index = Index(self.memory, _ARENA_BYTES, 1)
        index.state_namespace(1, 1, readable=True)
        self.shared = SharedIndex(index, self.store, lambda: None)
        for number in range(_BLOCKS):
            self.put(number)

    def put(self, number: int) -> None:
        copy = self.store.reserve(BlockId(1, _key(number)), _BLOCK_BYTES)
        self.store.commit(copy, number, home=False)

    def client(self, pins: memoryview) -> LocalBlocks:
        return LocalBlocks(
            self.memory,
            self.memory.cast("Q"),
            pins.cast("Q"),
            arena_bytes=_ARENA_BYTES,
            max_bytes=_ARENA_BYTES // 4,
        )


@entry_point("pin-region", "what a client writes where it says what it pins", shared_index)
class RegionHarness(Harness):
    """A hostile client beside an honest one, before one agent that evicts."""

    def __init__(self) -> None:
        self._memory = _index_memory()

    def corpus(self) -> list[bytes]:
        return [
            _WRITE.pack(shared.CELLS_USED_WORD, 2) + _WRITE.pack(shared.CELLS_WORD, 1),
            _WRITE.pack(shared.HITS_WORD, 6) * 3,
            _WRITE.pack(shared.CELLS_USED_WORD, 200) + _WRITE.pack(shared.CELLS_WORD + 9, 3) * 40,
            _WRITE.pack(shared.RING_WORD, 5) + _WRITE.pack(shared.HITS_WORD, 1 << 40),
        ]

    def run(self, data: bytes) -> None:
        node = _Node(self._memory, POLICIES[len(data) % len(POLICIES)])
        offences: list[str] = []
        words = memoryview(bytearray(shared.REGION_BYTES)).cast("Q")
        hostile = Region(words.cast("B"), _ARENA_BYTES // 2, offences.append)
        pins = memoryview(bytearray(shared.REGION_BYTES))
        honest = Region(pins, _ARENA_BYTES // 2, self._honest_offended)
        node.shared.join(hostile)
        node.shared.join(honest)
        client = node.client(pins)
        held = client.take(1, [_key(number) for number in range(5)])
        cells = [node.store.peek(block).cell for block in node.store.blocks()]  # type: ignore[union-attr]
        for turn, (at, word) in enumerate(_writes(data[: 200 * _WRITE.size])):
            place = at % (shared.CELLS_WORD + 64) if at % 4 else at % len(words)
            words[place] = cells[word % len(cells)] + (word >> 60) if word & 1 else word
            try:
                node.put(1000 + turn)
            except StoreError:
                pass  # they may pin most of it between them
            if turn % 8 == 0:
                node.store.advance(float(turn))
                node.shared.refresh()
        for number, found in enumerate(held):
            assert found is not None
            copy = node.store._by_offset[found.offset]
            assert copy.block == BlockId(1, _key(number)), "an honest client's block was evicted"
        assert len(offences) <= 1, "it was cut off twice"
        node.shared.leave(hostile)
        node.shared.leave(honest)
        node.store.check()
        assert not any(c.pins for c in node.store._by_offset.values()), "pinned by the gone"

    @staticmethod
    def _honest_offended(reason: str) -> None:
        raise AssertionError(f"an honest client was cut off: {reason}")


@entry_point("index", "an index that is damaged, before a client", local_blocks)
class IndexHarness(Harness):
    """A client that looks up and pins in an index that is damaged."""

    def __init__(self) -> None:
        self._memory = _index_memory()

    def corpus(self) -> list[bytes]:
        buckets = buckets_for(_ARENA_BYTES)
        entries = shared.entries_offset(buckets) // WORD_BYTES
        tags = shared.TAGS_OFFSET // WORD_BYTES
        return [
            _WRITE.pack(0, 7),
            *(_WRITE.pack(tags + n * 7, n) * 5 for n in range(4)),
            *(_WRITE.pack(entries + n * 8 + n % 8, 1 << (8 * n)) * 5 for n in range(8)),
        ]

    def run(self, data: bytes) -> None:
        node = _Node(self._memory)
        pins = memoryview(bytearray(shared.REGION_BYTES))
        keys = [_key(number) for number in range(_BLOCKS)]
        words = node.memory.cast("Q")
        writes = list(_writes(data))
        # Half of it before the client comes, half while it is there.
        for at, word in writes[: len(writes) // 2]:
            words[at % len(words)] = word
        try:
            client = node.client(pins)
        except AgentGoneError:
            return
        for at, word in writes[len(writes) // 2 :]:
            words[at % len(words)] = word
        for found in client.take(1, keys):
            if found is not None:
                assert found.size_bytes > 0
                assert 0 <= found.offset <= _ARENA_BYTES - found.size_bytes, "outside the arena"
                client.release(found.pin, found.reserved_bytes)
        assert 0 <= client.prefix(1, b"".join(keys)) <= len(keys)
        assert not any(pins.cast("Q")[shared.CELLS_WORD : shared.RING_WORD]), "a pin was forgotten"
