"""An agent's core with all that an agent can have: a kept arena that a former agent has left,
further arenas, a disk, an object store, and compiled code for gets and puts. All is still."""

from __future__ import annotations

import random
from functools import partial
from typing import Final

from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.cold import ColdRules, ColdTier
from kvcast.hostagent.core.courier import Courier
from kvcast.hostagent.core.pushing import Pushes, put_lately
from kvcast.hostagent.core.recovery import Recovery
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.ssd import ARENA, SSD, SsdRules, SsdTier
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.flags import MAX_FURTHER_ARENAS
from kvcast.hostagent.network.lander import hashing
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.hostagent.tiers.ledger import LEDGER_BYTES, Ledger
from kvcast.hostagent.tiers.memory_placement import Placement
from kvcast.hostagent.tiers.ssd.layout import cut_of, open_formatted
from kvcast.protocol.messages.questions import FIRST_HANDLE
from kvcast.protocol.messages.shared import index_bytes
from kvcast.protocol.placement import address_of_buffer
from kvcast.simulation.disk import SimDisk

SLAB: Final = 64 * 1024
UNIT: Final = 4096
TIER_BYTES: Final = 5 * 32 * UNIT
"""Of each file below DRAM."""
NUMA_NODES: Final = 8


def tier_of(core: AgentCore, memory: memoryview, tier: str, name: str, number: int) -> SsdTier:
    """A tier below DRAM, on one simulated file, which is empty."""
    disk = SimDisk(random.Random(number))
    formatted = open_formatted(disk, cut_of("node", TIER_BYTES, UNIT, 32 * UNIT), number)
    rules = SsdRules(0.75, 0.5, max_reads=2, max_reads_waiting=3)
    return SsdTier(rules, core.store, memory, [formatted], 1e9, tier, name)


def equipped_core(further_arenas: int = MAX_FURTHER_ARENAS) -> AgentCore:
    """See the module's text."""
    size_bytes = 16 * SLAB
    arena = bytearray(size_bytes)
    memory = memoryview(arena)
    store = Store(Allocator(size_bytes, SLAB))
    index_memory = memoryview(bytearray(index_bytes(buckets_for(size_bytes))))
    index = Index(index_memory, size_bytes, 1)
    ledger = Ledger(memoryview(bytearray(LEDGER_BYTES)))
    shared = SharedIndex(index, store, lambda: None, ledger)
    recovery = Recovery(index, store, shared, memory, partial(put_lately, ledger))
    core = AgentCore(
        *(AgentOptions("node-1"), store, memory, random.Random(1), shared),
        recovery=recovery,
        ledger=ledger,
    )
    functions = hashing()
    assert functions is not None
    core.reads.courier = courier = Courier(
        *(store, core.requester, core.outbox, core.spread, core.metrics),
        index_address=address_of_buffer(index_memory),
        index_bits=index.bits,
        arena_address=address_of_buffer(arena),
        most_bytes=size_bytes // 8,
        hashing=functions,
        ledger=ledger,
        first_handle=FIRST_HANDLE,
    )
    Pushes(
        *(courier, store, core.writes, core.serving, core.outbox, core.metrics),
        arena_address=address_of_buffer(arena),
        lane=0 if core.lane is None else core.lane.address,
        ledger=ledger,
    )
    names = [(ARENA, f"arena{n + 1}") for n in range(further_arenas)]
    core.use_tiers(
        [tier_of(core, memory, *name, number) for number, name in enumerate([*names, (SSD, SSD)])]
    )
    core.use_cold(ColdTier(ColdRules(), store, memory, "cluster", epoch_s=1e9))
    placement = Placement(page_bytes=4096, bytes_by_node=dict.fromkeys(range(NUMA_NODES), 4096))
    core.facts |= placement.values() | {"arena_huge_bytes": 0.0}
    return core
