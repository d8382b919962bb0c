"""What lookups in compiled code are told, and what they have done.

Owns: whom they ask about which bucket, and whether what the index has not is certainly not on this
node. Must not know: sockets, the event loop, or how a lookup goes (`kvcast.protocol.lookups`, which
works on the tables made here).
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.store import Store
from kvcast.native.subset import ctypes_of
from kvcast.protocol import lookups
from kvcast.protocol.chains import NOBODY
from kvcast.protocol.conveyor import NODES
from kvcast.protocol.courier import MOST_HOMES
from kvcast.protocol.lane import NativeLane
from kvcast.protocol.messages.questions import MAX_CHAIN
from kvcast.protocol.messages.shared import entries_offset
from kvcast.protocol.messages.wire import BUCKETS, KEY_BYTES

_HOMES: Final = MOST_HOMES * BUCKETS


class Lookups:
    """The tables. `courier`: the address of the native courier, by whose conveyors homes are asked;
    the index of `index_bits` bits of buckets lies at `index_address`."""

    def __init__(self, store: Store, courier: int, *, index_address: int, index_bits: int) -> None:
        self.code = lookups.compiled()
        self._store = store
        self._pool: Pool | None = None
        native: Any = lookups.blank()
        self.native = native
        self.address = ctypes.addressof(native)
        self.knows_all_at = self.address + type(native).knows_all.offset
        """Where it stands whether what the index has not is certainly not on this node."""
        lane: Any = ctypes_of(NativeLane)()
        lane.index, lane.bucket_bits = index_address, index_bits
        lane.entries = entries_offset(1 << index_bits)
        asked = (ctypes_of(lookups.Lookup) * lookups.LOOKUPS)()
        parts = (ctypes_of(lookups.Part) * NODES)()
        keys = (ctypes.c_uint8 * (lookups.LOOKUPS * MAX_CHAIN * KEY_BYTES))()
        positions = (ctypes.c_uint16 * (NODES * MAX_CHAIN))()
        self._homes = (ctypes.c_uint16 * _HOMES)(*[NOBODY] * _HOMES)
        held = (ctypes.c_uint8 * (MAX_CHAIN // 8))()
        nodes = (ctypes.c_uint16 * MAX_CHAIN)()
        self._kept = (lane, asked, parts, keys, positions, held, nodes)
        for number, lookup in enumerate(asked):
            lookup.keys = ctypes.addressof(keys) + number * MAX_CHAIN * KEY_BYTES
        for number, part in enumerate(parts):
            part.positions = ctypes.addressof(positions) + number * MAX_CHAIN * 2
        native.courier = courier
        native.lane = ctypes.addressof(lane)
        native.lookups = ctypes.addressof(asked)
        native.parts = ctypes.addressof(parts)
        native.homes = ctypes.addressof(self._homes)
        native.held = ctypes.addressof(held)
        native.nodes = ctypes.addressof(nodes)

    def prepare(self, pool: Pool | None) -> None:
        """From now on they run."""
        self.native.knows_all = self._store.is_all_in_index
        if pool is self._pool:
            return
        self._pool = pool
        homes = [NOBODY] * _HOMES
        for bucket in range(BUCKETS if pool is not None else 0):
            assert pool is not None
            others = [node for node in pool.homes_of_bucket(bucket) if node != pool.index]
            for number, node in enumerate(others[:MOST_HOMES]):
                homes[number * BUCKETS + bucket] = node
        ctypes.memmove(self._homes, (ctypes.c_uint16 * _HOMES)(*homes), 2 * _HOMES)

    def values(self) -> dict[str, float]:
        """Totals by name."""
        return {
            "courier_lookups_total": float(self.native.answered),
            "courier_lookups_handed_over_total": float(self.native.handed_over),
        }

    # --- without sockets: the simulation, fuzzers and tests ---------------------------------------

    def hear(self, client: int, data: bytes, now: float) -> bool:
        """What a client says, at a time; False if no client of ours says it."""
        buffer = ctypes.create_string_buffer(data, len(data))
        at = ctypes.addressof(buffer)
        return self.code.hear_lookup(self.address, client, at, len(data), int(now * 1e9))

    def expire(self, now: float) -> float | None:
        """Hand over what was waited for long enough; when the next will have been, None: there is
        none."""
        return self.code.expire_lookups(self.address, int(now * 1e9)) / 1e9 or None
