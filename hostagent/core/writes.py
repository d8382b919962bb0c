"""Puts: from bytes written in the arena to copies at the block's homes.

Owns: when a put is acknowledged and how many replications may be in flight. Must not know:
sockets, clients' tickets (`sessions`), or how bytes travel (`protocol.links`).

A put is committed here first; from then on this node serves it. If this node is one of the
homes, it counts as one that acknowledged. The copy then goes to every other home; with
`put_ack` "home" (the default) the put is acknowledged when the first home in order has it, or,
where that one cannot be reached, when all others were tried and one has it; with "local" at
once. A put of which no home has a copy ends as "unavailable": the bytes stay here as a cached
copy, and the caller may try again.

While blocks are handed over (`handover`), a put is acknowledged only when one of those that take
its block over has it, too; or, where none of them can be reached, when a node that has it was told
to hand it on. So nobody waits for puts before the map says that all has been handed over.

A copy is pinned while somebody waits for its acknowledgement, and while it is being sent. One
that merely waits for its turn towards a further replica may be evicted: a put is never refused
because replication is slow. If it lies in a lower tier then, `handover` sends it from there; else
that replica is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.store import (
    COMMITTED,
    DOOMED,
    RESERVED,
    Copy,
    StaleReservationError,
    Store,
)
from kvcast.protocol.digests import MakeDigests
from kvcast.protocol.links.bulk import EVICTED, PutCall
from kvcast.protocol.messages import bulk, local
from kvcast.protocol.messages.wire import BlockId, bucket_of

ACK_HOME: Final = "home"
ACK_LOCAL: Final = "local"
ACK_REPLICAS: Final = "replicas"
ACKS: Final = (ACK_HOME, ACK_LOCAL, ACK_REPLICAS)
"""What must have happened before a put is acknowledged."""

COMMITTED_AT_ONCE: Final = 64
"""Blocks of a batch: others wait no longer than these take."""


@dataclass(frozen=True)
class WriteOptions:
    """How puts behave."""

    put_ack: str = ACK_HOME
    """One of `ACKS`, for puts that do not choose one."""
    replicate_timeout_s: float = 10.0
    """How long one home may take to receive one copy."""
    max_replications: int = 4096
    """Copies on their way or waiting for it. Beyond this, a copy for a replica is left out (and
    counted), and a put that needs the first home ends as "busy"."""


@dataclass(slots=True, eq=False)
class _Put:
    """One block of a batch, until it is acknowledged."""

    position: int
    copy: Copy
    ack: str
    homes: tuple[int, ...] = ()
    """The nodes that are to have it, in order, this one included."""
    heirs: frozenset[int] = frozenset()
    """Those of them that take its bucket over."""
    waiting: set[int] = field(default_factory=set)
    have: set[int] = field(default_factory=set)
    """The homes that have it."""
    asked: bool = False
    """Whether a home was asked to see to it that the heirs get it."""
    handed_on: bool = False
    """Whether this node or another home sees to that."""
    acknowledged: bool = False
    refused: str = local.UNAVAILABLE

    @property
    def outlasts_moves(self) -> bool:
        """Whether it outlives what is being handed over."""
        return not self.heirs or self.handed_on or not self.heirs.isdisjoint(self.have)

    @property
    def has_arrived(self) -> bool:
        """Whether that is so, and its first home has it."""
        return bool(self.homes) and self.homes[0] in self.have and self.outlasts_moves


@dataclass(slots=True, eq=False)
class PutBatch:
    """A commit of several tickets; `answered` is called once, when no result is None any more.
    `began`: when the client asked for it."""

    results: list[local.PutBlock | None]
    answered: Callable[[PutBatch], None]
    left: int
    began: float


class Writes:
    """Commits puts and replicates them."""

    def __init__(
        self,
        options: WriteOptions,
        store: Store,
        memory: memoryview,
        outbox: BulkOutbox,
        metrics: Metrics,
        make_digests: MakeDigests,
    ) -> None:
        self._options = options
        self._store = store
        self._memory = memory
        self._outbox = outbox
        self._metrics = metrics
        self._make_digests = make_digests
        self.replications = 0
        """Copies on their way or waiting for it."""
        self.replicate_late: Callable[[BlockId, str], bool] = lambda _block, _node_id: False
        """Sends a block that has left DRAM to a node, later; False where it cannot be had."""
        self.was_pushed: Callable[[int, int], None] = lambda _namespace, _size_bytes: None
        """Told of every block, by namespace and size in bytes, that compiled code has sent home."""
        self.hand_on: Callable[[BlockId], bool] = lambda _block: False
        """Told of every block that some of those that take it over did not get; False where it is
        not for this node to see to that."""

    def commit(
        self,
        now: float,
        copies: list[Copy],
        answered: Callable[[PutBatch], None],
        ack: str = "",
        committed: Callable[[PutBatch, range], None] = lambda _batch, _positions: None,
    ) -> None:
        """Make reserved copies blocks and send them home; those that are committed were made so by
        an agent that died before it could answer. `ack`: one of `ACKS`, "" = the agent's
        choice. `committed` is called when the copies at these positions are blocks, or were
        refused; until then they are nobody's but this batch's. It and `answered` may be called
        before this returns."""
        batch = PutBatch([None] * len(copies), answered, len(copies), now)
        ack = ack or self._options.put_ack

        def commit_some(now: float, positions: range, digests: list[int]) -> None:
            for position, digest in zip(positions, digests, strict=True):
                self._commit_one(now, batch, position, copies[position], digest, ack)
            committed(batch, positions)
            go_on(now, positions.stop)

        def go_on(now: float, start: int) -> None:
            positions = range(start, min(start + COMMITTED_AT_ONCE, len(copies)))
            if positions:
                blocks = [self._bytes_of(copies[position]) for position in positions]
                self._make_digests(now, blocks, lambda now, made: commit_some(now, positions, made))

        if copies:
            go_on(now, 0)
        else:
            answered(batch)

    def _bytes_of(self, copy: Copy) -> memoryview:
        return self._memory[copy.offset : copy.offset + copy.size_bytes]

    def _commit_one(
        self, now: float, batch: PutBatch, position: int, copy: Copy, digest: int, ack: str
    ) -> None:
        self._count(copy)
        done = copy.state != RESERVED
        pool = self._outbox.pool
        if pool is not None and copy.block.namespace in pool.deleted and not done:
            # The room is of a former agent, which knew the namespace.
            self._store.abort(copy)
            put = _Put(position, copy, ack)
            self._answer(now, batch, put, local.UNKNOWN_NAMESPACE)
            return
        put = self._put_of(position, copy, ack, pool)
        if copy.state == DOOMED:  # it was a block, and has been dropped since: nobody is sent it
            if ack == ACK_LOCAL:
                self._answer(now, batch, put, local.OK)
            put.heirs = frozenset()
            self._settle(now, batch, put)
            return
        try:
            if not done:
                put.copy = copy = self._store.commit(copy, digest, home=bool(put.have))
        except StaleReservationError:
            self._answer(now, batch, put, local.UNKNOWN_NAMESPACE)
            return
        meaning = pool.meaning_of(copy.block.namespace) if pool is not None else None
        if pool is None or meaning is None or not put.homes:
            self._answer(now, batch, put, local.UNAVAILABLE)
            return
        if ack == ACK_LOCAL or (ack == ACK_HOME and put.has_arrived):
            self._answer(now, batch, put, local.OK)
        self._replicate(now, batch, put, pool, meaning)
        self._settle(now, batch, put)

    @staticmethod
    def _put_of(
        position: int, copy: Copy, ack: str, pool: Pool | None, have_it: Collection[int] = ()
    ) -> _Put:
        if pool is None:
            return _Put(position, copy, ack)
        homes = pool.homes_of(copy.block)
        have = {pool.index, *have_it} & {*homes}
        return _Put(
            position, copy, ack, homes, frozenset(pool.heirs(bucket_of(copy.block.key))), have=have
        )

    @property
    def default_ack(self) -> str:
        """What puts wait for that do not say it; one of `ACKS`."""
        return self._options.put_ack

    def put(
        self, now: float, copy: Copy, digest: int, nodes: Collection[int], took_s: float
    ) -> None:
        """The put of a reserved copy, which was pushed to these nodes, has been acknowledged after
        so many seconds: it is a block here, too, and goes to the other homes."""
        self._count(copy)
        self._metrics.replications_total += len(nodes)
        self._metrics.bulk_requests_sent_total += len(nodes)
        self._metrics.payload_bytes_sent_bulk_put_total += len(nodes) * copy.size_bytes
        if nodes:
            self.was_pushed(copy.block.namespace, len(nodes) * copy.size_bytes)
        pool = self._outbox.pool
        home = pool is not None and pool.is_home(copy.block)
        try:
            copy = self._store.commit(copy, digest, home=home)
        except StaleReservationError:
            return
        meaning = pool.meaning_of(copy.block.namespace) if pool is not None else None
        if pool is None or meaning is None:
            return
        put = self._put_of(0, copy, ACK_LOCAL, pool, nodes)
        batch = PutBatch([None], _heard, 1, now - took_s)
        self._answer(now, batch, put, local.OK)
        self._replicate(now, batch, put, pool, meaning)

    def _count(self, copy: Copy) -> None:
        self._metrics.puts_total += 1
        mine = self._metrics.by_namespace.of(copy.block.namespace)
        mine.puts += 1
        mine.put_bytes += copy.size_bytes

    def _replicate(
        self,
        now: float,
        batch: PutBatch,
        put: _Put,
        pool: Pool,
        meaning: int,
    ) -> None:
        """Send a put's copy to those of the block's homes that do not have it."""
        for node in put.homes:
            if node not in put.have:
                self._send(now, batch, put, node, pool.epoch, meaning)

    def _send(
        self, now: float, batch: PutBatch, put: _Put, node: int, epoch: int, meaning: int
    ) -> None:
        if self.replications >= self._options.max_replications:
            self._metrics.replications_dropped_total += 1
            put.refused = local.BUSY
            return
        self.replications += 1
        self._metrics.replications_total += 1
        put.waiting.add(node)
        copy = put.copy
        pool = self._outbox.pool
        assert pool is not None
        node_id = pool.nodes[node].node_id
        pinned = False

        def begin() -> bool:
            nonlocal pinned
            if not pinned and copy.state == COMMITTED:
                self._store.pin(copy)
                pinned = True
            return pinned

        if not put.acknowledged:
            begin()

        def ended(now: float, outcome: str) -> None:
            self.replications -= 1
            if pinned:
                self._store.unpin(copy)
            put.waiting.discard(node)
            if outcome in bulk.LANDED:
                put.have.add(node)
                put.handed_on |= epoch == bulk.OLDEST_MAP
                if put.ack == ACK_HOME and put.has_arrived:
                    self._answer(now, batch, put, local.OK)
            elif outcome == EVICTED:
                late = self.replicate_late(copy.block, node_id)
                self._metrics.replications_late_total += late
                self._metrics.replications_dropped_total += not late
            else:
                self._metrics.replications_failed_total += 1
                if outcome == bulk.NO_ROOM:
                    put.refused = local.NO_ROOM
                elif outcome == bulk.FORBIDDEN:
                    put.refused = local.FORBIDDEN
            self._settle(now, batch, put)

        deadline = now + self._options.replicate_timeout_s
        # Who may not read the namespace is not sent its bytes before it has refused them.
        at_once = bool(pool.may_use(copy.block.namespace, node_id))
        self._outbox.calls.append(
            PutCall(node, copy, epoch, meaning, deadline, begin, ended, at_once)
        )

    def _settle(self, now: float, batch: PutBatch, put: _Put) -> None:
        """All homes were tried: whoever has it acknowledges, if that is enough."""
        if put.waiting:
            return
        if not put.heirs <= put.have:
            put.handed_on |= self.hand_on(put.copy.block)
        if not put.outlasts_moves and put.have and not put.asked:
            put.asked = True
            self._ask_to_hand_on(now, batch, put)
            if put.waiting:
                return
        enough = len(put.homes) if put.ack == ACK_REPLICAS else 1
        done = len(put.have) >= enough and put.outlasts_moves
        self._answer(now, batch, put, local.OK if done else put.refused)

    def _ask_to_hand_on(self, now: float, batch: PutBatch, put: _Put) -> None:
        """Offer a put once more to a home that has it, as if by a map that knows of no move."""
        pool = self._outbox.pool
        meaning = pool.meaning_of(put.copy.block.namespace) if pool is not None else None
        if pool is None or meaning is None:
            return
        others = [n for n in put.homes if n in put.have and n in pool.nodes and n != pool.index]
        if others:
            self._send(now, batch, put, others[0], bulk.OLDEST_MAP, meaning)

    def _answer(self, now: float, batch: PutBatch, put: _Put, status: str) -> None:
        if put.acknowledged:
            return
        put.acknowledged = True
        if status == local.OK:
            mine = self._metrics.by_namespace.of(put.copy.block.namespace)
            mine.put_time.add(now - batch.began)
        else:
            self._metrics.puts_failed_total += 1
        batch.results[put.position] = local.PutBlock(status, len(put.have), put.copy.digest)
        batch.left -= 1
        if batch.left == 0:
            batch.answered(batch)


def _heard(_batch: PutBatch) -> None:
    """Of a put whose client has been answered."""
