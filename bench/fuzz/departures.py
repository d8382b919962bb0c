"""What a caller over TCP says to a node that shares its link among namespaces, fuzzed.

Owns: the entry point, and another tenant's caller beside it, whose blocks have to leave whatever
the first one says. Must not know: how inputs are found (`engine`).
"""

from __future__ import annotations

from typing import Final

import msgspec
from kvcast.bench.fuzz.entry_points import agent_of_two, check_store
from kvcast.bench.fuzz.targets import (
    KEY,
    NAMESPACE,
    StreamHarness,
    caller_messages,
    entry_point,
    pool_map,
    stream_of,
)
from kvcast.hostagent.core.store import Copy, Store
from kvcast.protocol.links import bulk_callee, departures
from kvcast.protocol.links.bulk import BulkOptions
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.wire import BlockId, digest_of

RATE_BYTES_PER_S: Final = 1e6
OTHER: Final = 2
"""The other tenant's namespace."""
BLOCK_BYTES: Final = 3000
BLOCKS: Final = 16
WITHIN_S: Final = 1.5
"""The other tenant has its blocks so soon: they are a twentieth of what the link carries, and what
the first can have saved is half a second's worth."""
_STEP_S: Final = 0.001
_PIECE_BYTES: Final = 1000


def _hold(store: Store, memory: memoryview, namespace: int, data: bytes) -> None:
    copy = store.reserve(BlockId(namespace, KEY[::-1]), len(data))
    memory[copy.offset : copy.offset + len(data)] = data
    store.commit(copy, digest_of(data), home=True)


@entry_point(
    "bulk-departures",
    "what other agents say over TCP to one that shares its link among namespaces",
    departures,
    bulk_callee,
)
class BulkDeparturesHarness(StreamHarness):
    """One agent says what it likes; another asks for some blocks of another namespace meanwhile."""

    good = caller_messages

    def __init__(self) -> None:
        self._agent = agent_of_two()
        other = msgspec.structs.replace(NAMESPACE, namespace=OTHER, model="other")
        both = msgspec.structs.replace(pool_map([NAMESPACE, other]), epoch=4)
        self._agent.control_message(0.0, both)
        for namespace in (NAMESPACE.namespace, OTHER):
            _hold(self._agent.store, self._agent.memory, namespace, b"y" * BLOCK_BYTES)

    def corpus(self) -> list[bytes]:
        hello, put, follows, get, *_ = caller_messages()
        many = bulk.BulkGet(1, [bulk.WantedBlock(KEY[::-1])] * 200)
        return [
            stream_of([hello, many, many]),
            stream_of([hello, get, many, get]),
            stream_of([hello, put]) + b"hello" + stream_of([many, follows, many]),
        ]

    def run(self, data: bytes) -> None:
        agent = self._agent
        shared, arriving = (departures.Departures(RATE_BYTES_PER_S) for _ in range(2))

        def callee() -> bulk_callee.BulkCallee[Copy]:
            return bulk_callee.BulkCallee(
                *(0.0, agent.serving, BulkOptions(), agent.metrics, None, shared, arriving)
            )

        first, other = callee(), callee()
        get = bulk.BulkGet(OTHER, [bulk.WantedBlock(KEY[::-1])] * BLOCKS)
        hello = bulk.BulkHello(bulk.BULK_PROTOCOL_VERSION, "node-2")
        other.received(0.0, stream_of([hello, get]))
        left, now, sent_bytes = data, 0.0, 0
        while sent_bytes < BLOCKS * BLOCK_BYTES or left:
            assert now < WITHIN_S or sent_bytes >= BLOCKS * BLOCK_BYTES, (
                f"{sent_bytes} bytes have left for the other tenant in {WITHIN_S} s"
            )
            arriving.sent_by_reads(now, OTHER, 1)  # so somebody else is there all the time
            if left and first.wants_bytes and not first.closed:
                size = _PIECE_BYTES
                if first.rooms:
                    size = min(size, first.receivable_bytes(now))
                first.received(now, left[:size])
                left = left[size:]
            elif now >= WITHIN_S or first.closed:
                left = b""
            first.bytes_to_send(now, 4 * _PIECE_BYTES)
            while of_other := other.bytes_to_send(now, _PIECE_BYTES):
                sent_bytes += len(of_other)
            for link in (first, other):
                link.check()
                when = link.get_timer()
                if when is not None and when <= now:
                    link.handle_timer(now)
            now += _STEP_S
        for link in (first, other):
            link.lost(now)
        assert not shared._waiting, "who is gone waits"
        assert not arriving._waiting, "who is gone waits"
        check_store(agent.store)

    def close(self) -> None:
        self._agent.close()
