"""What this node answers to other agents over the bulk link.

Owns: the decision on every bulk request: is the caller's namespace allowed, is the block ours to
hold, is there room, do the bytes match their digest. Must not know: sockets; the adapter calls
`begin_put`, writes the bytes where it is told, and calls `end_put` or `abort_put`.

Who the caller is, the link knows: with TLS by its certificate; without, the caller says so itself
(`BulkHello`) and is believed. What it may do is bounded by the namespace's list of nodes.
"""

from __future__ import annotations

from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.store import Copy, StaleReservationError, Store, StoreError
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import BulkDone, BulkDrop, BulkExists, BulkGet, BulkHeld, BulkPut
from kvcast.protocol.messages.wire import BlockId, digest_of


class Serving:
    """Decides what a bulk request gets."""

    def __init__(
        self, store: Store, memory: memoryview, outbox: BulkOutbox, metrics: Metrics
    ) -> None:
        self._store = store
        self._memory = memory
        self._outbox = outbox
        self._metrics = metrics

    def _may_use(self, caller: str, namespace: int) -> bool:
        pool = self._outbox.pool
        if pool is not None and pool.may_use(namespace, caller):
            return True
        self._metrics.bulk_requests_refused_total += 1
        return False

    def view(self, copy: Copy) -> memoryview:
        """A copy's bytes in the arena."""
        return self._memory[copy.offset : copy.offset + copy.size_bytes]

    def begin_put(self, caller: str, put: BulkPut) -> Copy | BulkDone:
        """Room for the block, or why the bytes are not wanted."""
        pool = self._outbox.pool
        if pool is None or not self._may_use(caller, put.namespace):
            return BulkDone(bulk.FORBIDDEN)
        if put.meaning != pool.meaning_of(put.namespace):
            self._metrics.bulk_requests_refused_total += 1
            return BulkDone(bulk.STALE)
        block = BlockId(put.namespace, put.key)
        # A caller with a newer map may know better than we do whose block it is.
        if not pool.is_home(block) and put.epoch <= pool.epoch:
            self._metrics.bulk_requests_refused_total += 1
            return BulkDone(bulk.NOT_HOME)
        held = self._store.get(block)
        if held is not None:
            if held.digest == put.digest:
                self._store.counters.duplicates += 1
            else:
                self._store.counters.conflicts += 1
            held.home = True
            return BulkDone(bulk.HELD)
        try:
            return self._store.reserve(block, put.size_bytes)
        except StoreError:
            self._metrics.bulk_requests_refused_total += 1
            return BulkDone(bulk.NO_ROOM)

    def end_put(self, put: BulkPut, copy: Copy) -> BulkDone:
        """The bytes are there: commit them if they are what the header promised."""
        self._metrics.payload_bytes_received_bulk_put_total += put.size_bytes
        if digest_of(self.view(copy)) != put.digest:
            self._store.abort(copy)
            self._metrics.bulk_wrong_digest_total += 1
            return BulkDone(bulk.WRONG_DIGEST)
        try:
            in_force = self._store.commit(copy, put.digest, home=True)
        except StaleReservationError:
            return BulkDone(bulk.FORBIDDEN)
        return BulkDone(bulk.DONE if in_force is copy else bulk.HELD)

    def abort_put(self, copy: Copy) -> None:
        """The bytes did not come."""
        self._store.abort(copy)

    def get(self, caller: str, get: BulkGet) -> Copy | BulkDone:
        """A pinned copy to send (see `end_get`), or why there is none."""
        if not self._may_use(caller, get.namespace):
            return BulkDone(bulk.FORBIDDEN)
        copy = self._store.get(BlockId(get.namespace, get.key))
        if copy is None or (get.digest and get.digest != copy.digest):
            return BulkDone(bulk.NOT_FOUND)
        self._store.pin(copy)
        return copy

    def end_get(self, copy: Copy) -> None:
        """The copy was sent, or its caller went away."""
        self._store.unpin(copy)

    def drop(self, caller: str, drop: BulkDrop) -> BulkDone:
        """Forget blocks."""
        if not self._may_use(caller, drop.namespace):
            return BulkDone(bulk.FORBIDDEN)
        count = sum(self._store.drop(BlockId(drop.namespace, key)) for key in drop.keys)
        return BulkDone(bulk.DONE, count)

    def exists(self, caller: str, exists: BulkExists) -> BulkHeld | BulkDone:
        """Which blocks are here."""
        if not self._may_use(caller, exists.namespace):
            return BulkDone(bulk.FORBIDDEN)
        return BulkHeld(bulk.pack_bitmap(self._store.holds(exists.namespace, exists.keys)))
