"""A client that asks an agent without sockets how many blocks there are, and homes that are asked.

Cannot see: sockets (`test_hostagent_conveyor_pool`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec
import pytest
from kvcast.bench.fuzz.courier import HOME, NAMESPACE, Stand, key_of
from kvcast.hostagent.core.shared_index import Region, SharedIndex
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.counting_filter import CountingFilter
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.protocol.conveyor import REQUEST, Givers
from kvcast.protocol.lane import Lane
from kvcast.protocol.messages.control import PoolMap
from kvcast.protocol.messages.questions import ANSWER, EXISTS, QUESTION
from kvcast.protocol.messages.shared import REGION_BYTES, index_bytes
from kvcast.protocol.messages.wire import BlockId

READER = 1
OTHER = HOME + 1
_SLAB = 8192
_SLABS = 32


def counted_of(blocks: Sequence[int]) -> CountingFilter:
    """A filter of these blocks."""
    counted = CountingFilter()
    for block in blocks:
        counted.add(BlockId(NAMESPACE, key_of(block)))
    return counted


class Home:
    """A node that has some blocks, and what it says on its end of a conveyor. `below`: what may lie
    below its DRAM."""

    def __init__(
        self, held: Sequence[int], *, knows_all: bool = True, below: Sequence[int] = ()
    ) -> None:
        size_bytes = _SLAB * _SLABS
        self._memory = memoryview(bytearray(size_bytes))
        store = Store(Allocator(size_bytes, _SLAB))
        index_memory = memoryview(bytearray(index_bytes(buckets_for(size_bytes))))
        shared = SharedIndex(Index(index_memory, size_bytes, 1), store, barrier=lambda: None)
        lane = Lane(index_memory, self._memory, max_chunk_bytes=1024)
        lane.use({NAMESPACE: None, 2: [HOME]}, b"")
        if below:
            counted = counted_of(below)
            lane.use_below(counted.memory, counted.bits)
        pins = memoryview(bytearray(REGION_BYTES))
        shared.join(Region(pins, size_bytes, lambda why: pytest.fail(why)))
        self._knows_all = ctypes.c_uint64(knows_all)
        self._kept = (lane, shared)
        self.givers = Givers(lane.address, pins, knows_all=ctypes.addressof(self._knows_all))
        number = self.givers.begin(READER)
        assert number is not None
        self.number = number
        for block in held:
            store.commit(store.reserve(BlockId(NAMESPACE, key_of(block)), 100), 1, home=True)

    def says(self, heard: bytes) -> bytes:
        self.givers.hear(self.number, heard)
        return self.givers.bytes_to_send(self.number, 1 << 20)


class Asking:
    """A stand whose clients ask how many blocks there are."""

    def __init__(self, homes: list[int] | None = None) -> None:
        self.stand = Stand()
        self.courier = self.stand.courier
        self.asked = 0
        if homes is not None:
            self.live_at([homes])
        self.conveyors = {HOME: self.courier.conveyor_stands(HOME)}
        self.conveyors[OTHER] = self.courier.conveyor_stands(OTHER)

    def live_at(self, homes: list[list[int]]) -> None:
        """A map says so: bucket i is at the homes of that place, again from the first."""
        known = self.stand
        known.new_map()
        held = known.core.pool
        assert held is not None
        known._epoch += 1
        other = msgspec.structs.replace(
            held.nodes[HOME],
            index=OTHER,
            node_id="node-3",
            ip="10.77.0.3",
            mac="02:6b:76:00:00:03",
            switch_port=3,
        )
        changed = PoolMap(
            *(
                known._epoch,
                [node for node in held.nodes.values() if node.index != OTHER] + [other],
            ),
            *([homes[n % len(homes)] for n in range(1024)], list(held.namespaces.values()), []),
        )
        known.core.control_message(known.now, changed)

    def ask(self, blocks: Sequence[int], deadline_ms: int = 1000) -> int:
        """The question's number."""
        self.asked += 1
        first, *rest = map(key_of, blocks)
        meaning = self.stand.meaning
        question = QUESTION.pack(EXISTS, NAMESPACE, deadline_ms, self.asked, first, meaning)
        assert self.says(question + b"".join(rest))
        return self.asked

    def says(self, question: bytes) -> bool:
        self.courier.prepare(self.stand.now)
        client = self.stand.numbers[0]
        return self.courier.lookups.hear(client, question, self.stand.now)

    def request_to(self, node: int) -> bytes:
        conveyor = self.conveyors[node]
        assert conveyor is not None
        return self.courier.requests_to_send(conveyor)

    def replies(self, node: int, data: bytes) -> None:
        conveyor = self.conveyors[node]
        assert conveyor is not None
        self.courier.brought(conveyor, data, self.stand.now)

    def converse(self, homes: dict[int, Home]) -> list[int]:
        """Have all homes answer until nothing is asked; how many keys each request named."""
        counts = []
        said = True
        while said:
            said = False
            for node, home in homes.items():
                request = self.request_to(node)
                if request:
                    said = True
                    counts.append((len(request) - REQUEST.size) // 16)
                    self.replies(node, home.says(request))
        return counts

    def answer(self) -> tuple[int, int, int]:
        """(status, whether the agent is to be asked of the rest, how many), of the one there is."""
        ((client, answer),) = self.courier.take_answers()
        assert client == self.stand.numbers[0]
        status, more, _, number, _, _, count, _ = ANSWER.unpack(answer)
        assert number == self.asked
        return status, more, count

    def pass_time(self, seconds: float) -> None:
        self.stand.now += seconds
        self.courier.lookups.expire(self.stand.now)
