"""What this node answers to other agents over the bulk link.

Owns: the decision on every bulk request: is the caller's namespace allowed, is the block ours to
hold, is there room, do the bytes match their digest. Must not know: sockets; the adapter calls
`begin_put`, writes the bytes where it is told, and calls `end_put`, with their digest, or
`abort_put`.

Who the caller is, the link knows: with TLS by its certificate; without, the caller says so itself
(`BulkHello`) and is believed. What it may do is bounded by the namespace's list of nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.namespace_metrics import explained
from kvcast.hostagent.core.store import Copy, StaleReservationError, Store, StoreError
from kvcast.protocol.chains import count_of
from kvcast.protocol.meetings import Meetings
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import (
    CONVEYOR_VERSION,
    OLDEST_MAP,
    BulkConvey,
    BulkDone,
    BulkDrop,
    BulkExists,
    BulkGet,
    BulkHeld,
    BulkPut,
    PutHeader,
    WantedBlock,
)
from kvcast.protocol.messages.wire import CELLS, BlockId, bucket_of

MAX_BROUGHT: Final = 32
"""Blocks that are brought from the tier below for one get at once; more are for later."""


class Serving:
    """Decides what a bulk request gets."""

    def __init__(
        self,
        store: Store,
        memory: memoryview,
        outbox: BulkOutbox,
        metrics: Metrics,
        note_heat: Callable[[int, BlockId, int, int, int], None],
        recall: Callable[[float, BlockId, Callable[[], None]], bool] = lambda *_: False,
        meetings: Meetings | None = None,
    ) -> None:
        """`note_heat` hears how many segments of which copy (size, digest) went to which node.
        `recall(now, block, then)` brings a block to DRAM from the tier below, if it is there and
        not here, and calls `then` once; whether it does. `meetings`: of those who want one block;
        None: nobody is told of others."""
        self._meetings = meetings
        self._recall = recall
        self._store = store
        self._memory = memory
        self._outbox = outbox
        self._metrics = metrics
        self._note_heat = note_heat
        self.conveys = False
        """Whether there can be conveyors from here,"""
        self.takes_pushes = False
        """whether other nodes may push blocks here on connections of their own,"""
        self.is_tight: Callable[[bool], bool] = lambda _pushes: False
        """and whether there had better be none, of either kind, for the sake of other namespaces.
        """
        self.was_pushed: Callable[[int, int], None] = lambda _namespace, _size_bytes: None
        """Told of what has come so."""
        self.stored: Callable[[BlockId, int], None] = lambda _block, _size_bytes: None
        """Told of every block, and its size in bytes, that has come by a call."""
        self.came: Callable[[BlockId, int], None] = lambda _block, _epoch: None
        """Told of every block that another node has put here, and the epoch of the map by which it
        has: one that knows of no move has the block handed on. So where a map is not settled, no
        put may pass this by."""

    def _may_use(self, caller: str, namespace: int) -> bool:
        pool = self._outbox.pool
        if pool is not None and pool.may_use(namespace, caller):
            return True
        self._metrics.bulk_requests_refused_total += 1
        return False

    def view(self, copy: Copy) -> memoryview:
        """A copy's bytes in the arena."""
        return self._memory[copy.offset : copy.offset + copy.size_bytes]

    def _may_put(self, caller: str, put: BulkPut) -> bool:
        """A home hands on the blocks of its buckets, whether or not it may use their namespace: it
        answers for them in any case."""
        pool = self._outbox.pool
        allowed = pool.may_use(put.namespace, caller) if pool is not None else None
        if pool is not None and allowed is False:
            buckets = {bucket_of(header.key) for header in put.blocks}
            allowed = all(caller in pool.holders_of(bucket) for bucket in buckets)
        if not allowed:
            self._metrics.bulk_requests_refused_total += 1
        return bool(allowed)

    def refuse_put(self, caller: str, put: BulkPut) -> str | None:
        """Why the caller may not put there; None if it may."""
        pool = self._outbox.pool
        if pool is None or not self._may_put(caller, put):
            return bulk.FORBIDDEN
        if put.meaning != pool.meaning_of(put.namespace):
            self._metrics.bulk_requests_refused_total += 1
            return bulk.STALE
        return None

    def begin_put(self, put: BulkPut, header: PutHeader) -> Copy | str:
        """Room for one block of a put that was not refused, or why its bytes are not wanted."""
        pool = self._outbox.pool
        assert pool is not None
        block = BlockId(put.namespace, header.key)
        # A caller with a newer map may know better than we do whose block it is.
        if not pool.is_home(block) and put.epoch <= pool.epoch:
            self._metrics.bulk_requests_refused_total += 1
            return bulk.NOT_HOME
        held = self._store.get(block)
        if held is not None:
            if held.digest == header.digest:
                self._store.counters.duplicates += 1
            else:
                self._store.counters.conflicts += 1
            held.home = True
            self.came(block, put.epoch)
            return bulk.HELD
        if put.spare and not self._store.has_spare_room(block.namespace, header.size_bytes):
            return bulk.NO_ROOM
        try:
            return self._store.reserve(
                block, header.size_bytes, parent=header.parent, depth=header.depth
            )
        except StoreError:
            self._metrics.bulk_requests_refused_total += 1
            return bulk.NO_ROOM

    def end_put(self, put: BulkPut, header: PutHeader, copy: Copy, digest: int) -> str:
        """The bytes are there, and have this digest: commit them if they are what the header
        promised."""
        self._metrics.payload_bytes_received_bulk_put_total += header.size_bytes
        if digest != header.digest:
            self._store.abort(copy)
            self._metrics.bulk_wrong_digest_total += 1
            return bulk.WRONG_DIGEST
        try:
            in_force = self._store.commit(copy, header.digest, home=True)
        except StaleReservationError:
            return bulk.FORBIDDEN
        self.stored(copy.block, copy.size_bytes)
        self.came(copy.block, put.epoch)
        return bulk.DONE if in_force is copy else bulk.HELD

    def pushed(self, block: BlockId, size_bytes: int) -> None:
        """Another node has pushed a block here, which has been committed."""
        self._metrics.bulk_requests_served_total += 1
        self._metrics.payload_bytes_received_bulk_put_total += size_bytes
        self.was_pushed(block.namespace, size_bytes)
        self.came(block, OLDEST_MAP)

    def abort_put(self, copy: Copy) -> None:
        """The bytes did not come."""
        self._store.abort(copy)

    def refuse_get(self, caller: str, get: BulkGet) -> str | None:
        """Why the caller may not read there; None if it may."""
        return None if self._may_use(caller, get.namespace) else bulk.FORBIDDEN

    def _index_of(self, caller: str) -> int | None:
        pool = self._outbox.pool
        node = pool.nodes_by_id.get(caller) if pool is not None else None
        return None if node is None else node.index

    def asks(self, now: float, caller: str, get: BulkGet) -> None:
        """A get that was not refused waits for its turn."""
        index = self._index_of(caller)
        if self._meetings is not None and index is not None:
            for wanted in get.blocks:
                self._meetings.asks(now, BlockId(get.namespace, wanted.key), index)

    def is_met(self, now: float, namespace: int, wanted: WantedBlock) -> bool:
        """Whether others want a block, too. Of what is not here no READ would tell more."""
        block = BlockId(namespace, wanted.key)
        is_met = self._meetings is not None and self._meetings.is_met(now, block)
        return is_met and self._store.peek(block) is not None

    def told(self, now: float, caller: str, namespace: int, wanted: WantedBlock) -> None:
        """The caller is told to READ a block."""
        index = self._index_of(caller)
        if self._meetings is not None and index is not None:
            self._meetings.told(now, BlockId(namespace, wanted.key), index)

    def leaves(self, now: float, caller: str, namespace: int, wanted: WantedBlock) -> None:
        """The caller waits for a block no more: it is its turn, or the caller is gone."""
        index = self._index_of(caller)
        if self._meetings is not None and index is not None:
            self._meetings.leaves(now, BlockId(namespace, wanted.key), index)

    def bring(self, now: float, get: BulkGet, then: Callable[[float], None]) -> bool:
        """Bring blocks of a get that was not refused from the tier below, the first of them; `then`
        is called once, when they are here or are not to be waited for. False: nothing is to be
        waited for."""
        left = 1

        def one() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then(max(now, self._store.now))

        begun = 0
        for wanted in get.blocks:
            left += 1
            if self._recall(now, BlockId(get.namespace, wanted.key), one):
                begun += 1
                if begun == MAX_BROUGHT:
                    break
            else:
                left -= 1
        left -= 1
        return left > 0

    def is_below(self, namespace: int, wanted: WantedBlock) -> bool:
        """Whether a block is not here, but in the tier below."""
        block = BlockId(namespace, wanted.key)
        return self._store.peek(block) is None and self._store.lies_below(block)

    def get(self, caller: str, namespace: int, wanted: WantedBlock) -> Copy | str:
        """A pinned copy to send (see `end_get`), or why there is none."""
        block = BlockId(namespace, wanted.key)
        copy = self._store.get(block)
        if copy is None and self._store.lies_below(block):
            return bulk.BELOW
        if copy is None:
            why = explained(self._store.why_gone(block))
            self._metrics.by_namespace.of(namespace).home_misses[why] += 1
        if copy is None or (wanted.digest and wanted.digest != copy.digest):
            return bulk.NOT_FOUND
        index = self._index_of(caller)
        if index is not None:
            segments = CELLS.segments_of(max(1, copy.size_bytes - wanted.start_bytes))
            self._note_heat(index, copy.block, copy.size_bytes, copy.digest, segments)
        self._store.pin(copy)
        return copy

    def end_get(self, copy: Copy) -> None:
        """The copy was sent, or its caller went away."""
        self._store.unpin(copy)

    def convey(self, caller: str, convey: BulkConvey) -> str:
        """Whether the caller may have blocks by a conveyor: without TLS, where blocks are given in
        compiled code."""
        pool = self._outbox.pool
        known = pool is not None and caller in pool.nodes_by_id
        able = self.takes_pushes if convey.pushes else self.conveys
        # What a former agent has left is in the index, and only Python knows what of it is right.
        able = able and self._store.recovery is None
        tight = self.is_tight(convey.pushes)
        if able and known and convey.version == CONVEYOR_VERSION and not tight:
            return bulk.DONE
        self._metrics.bulk_requests_refused_total += 1
        return bulk.FORBIDDEN

    def given(self, copy: Copy, node: int, start_bytes: int) -> None:
        """A copy goes to a node by a conveyor, without its first bytes."""
        self._metrics.bulk_requests_served_total += 1
        self._store.get(copy.block)
        segments = CELLS.segments_of(max(1, copy.size_bytes - start_bytes))
        self._note_heat(node, copy.block, copy.size_bytes, copy.digest, segments)

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
        held = self._store.holds(exists.namespace, exists.keys)
        return BulkHeld(held.to_bytes(-(-count_of(exists.keys) // 8), "little"))
