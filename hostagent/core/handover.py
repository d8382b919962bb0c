"""Handing blocks over: to nodes that the map has put in charge of them, before they have them.

Owns: which of this node's blocks another is to be sent because the map has changed, in which order,
how fast, and how much is left. Must not know: sockets, or why the map has changed.

Three kinds of tasks:

- *moves*: a node joins, or one is drained. The map lists, behind the nodes that hold a bucket's
  blocks (`PoolMap.settled` of them), those that are to take it over. Each of the former sends the
  latter what it holds of the bucket, and says how much is left (`HandedOver`); the controller takes
  the next step when nothing is left anywhere. Where nobody is listed behind, whoever leaves
  (`PoolMap.leaving`) sends it to the homes that stay, for a replica may lack a block. What is put
  meanwhile is not waited for: whoever puts it sees to it that those who take over have it
  (`writes`), or tells a holder to hand it on, as do puts by a map that knows of no move.
- *repairs*: a node is gone, and another is listed in its place; or another was given a bucket of
  ours at once, since the controller knew of no blocks yet. Whoever held the bucket before sends it
  what it has, if there is room to spare.
- *late replicas*: the copy of a put has left DRAM before it was its turn to go to a further home.

A map changes what becomes of all blocks that are here, and there may be millions: they are looked
at `PART_BLOCKS` at a time, with turns for others between. Until all are, each counts as left.

Whoever is offered a block that it has says so, and no bytes are sent; so several may offer the
same. Bounds: `max_in_flight` calls; `rate_bytes_per_s`; `MAX_WAITING` blocks beside those that were
here when a map came. A call that fails is made again after a pause: of a move as long as the map
wants it (whoever is being drained must not go with the only copy), of others `TRIES` times in all,
unless the other refuses the caller. What leaves DRAM for a lower tier before its turn comes is
brought back from there; where there is no room for it now, that is tried again like a call, and
said (`HandedOver.no_room`), since what is pinned there may stay so for long. What is larger than
the arena or the namespace's quota is not waited for: it has failed. A home holds what is in its
buckets, whether or not its own engines may use the namespace.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.store import COMMITTED, Copy, Store
from kvcast.protocol.links.backoff import pause_after
from kvcast.protocol.links.bulk import EVICTED, PutCall
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.control import HandedOver
from kvcast.protocol.messages.wire import BlockId, bucket_of

TRIES: Final = 3
RETRY_S: Final = 0.5
"""After the first failure; twice as long after each further one, up to `RETRY_MAX_S`."""
RETRY_MAX_S: Final = 5.0
CALL_TIMEOUT_S: Final = 10.0
REPORT_S: Final = 0.5
"""How often it is said how much is left, while that changes."""
MAX_WAITING: Final = 1 << 20
"""Blocks that came or failed since the map, and wait to be sent; more are left out, and counted as
failed."""
PART_BLOCKS: Final = 2048
"""Of those that were here when a map came, so many are looked at in one turn: 1 to 3 ms."""
PAUSE_S: Final = 0.005
"""Between two turns."""
_AHEAD: Final = 64
"""Tasks that are made of what was found before their turn comes."""
_BURST_S: Final = 0.05
_HOPELESS: Final = frozenset({bulk.FORBIDDEN, bulk.WRONG_DIGEST})


@dataclass(frozen=True)
class HandoverOptions:
    """How fast blocks are handed over."""

    rate_bytes_per_s: float = 256e6
    """Of blocks, to all nodes together."""
    max_in_flight: int = 8


@dataclass(slots=True, eq=False)
class _Task:
    """One block for one node."""

    block: BlockId
    node_id: str
    move: bool = False
    """Whether the map waits for it."""
    spare: bool = False
    """Only if there is room to spare."""
    tries: int = 0
    no_room: bool = False
    """There was none for it when it was last tried."""
    recalled: bool = False
    """It has been asked for in the lower tier, once."""
    held: Copy | None = None
    """What came from there, pinned: else it might go down again before it is sent."""


@dataclass(slots=True, eq=False)
class _Scan:
    """What was here when a map came, as far as it was not looked at."""

    blocks: Iterator[BlockId]
    left: int
    moves: dict[int, list[str]]
    """By bucket, who is to have what there is of it;"""
    repairs: dict[int, list[str]]
    """and who is to have it if there is room to spare."""
    seen: set[BlockId] | None
    """What was found already, where blocks may be named more than once."""


def _no_recall(_now: float, _block: BlockId, _then: Callable[[], None]) -> bool:
    return False


@dataclass
class HandoverCounters:
    """Totals since the agent began."""

    blocks: int = 0
    """Blocks that were offered, and that another node has now or had already."""
    bytes: int = 0
    failed: int = 0
    too_large: int = 0
    """Blocks of a lower tier, among those that failed, that DRAM, or the namespace's quota of it,
    cannot hold."""


class Handover:
    """See the module's text. Nodes are known by their ids, since indices change hands."""

    def __init__(self, options: HandoverOptions, store: Store, outbox: BulkOutbox) -> None:
        self.options = options
        self.counters = HandoverCounters()
        self.progressed: Callable[[float], None] = lambda _now: None
        """Told when a call has ended, or more is known of what there is to do."""
        self.too_large: Callable[[BlockId, int], None] = lambda _block, _size_bytes: None
        """Told of the first block of a map that cannot come to DRAM for its size."""
        self._told_too_large = False
        self.lower: Callable[[], Iterable[BlockId]] = tuple
        """The blocks that lie in a lower tier."""
        self.recall: Callable[[float, BlockId, Callable[[], None]], bool] = _no_recall
        """Brings a block from there, and then calls what it is given; False if it is not there."""
        self._store = store
        self._outbox = outbox
        self._tasks: deque[_Task] = deque()
        self._later: list[tuple[float, int, _Task]] = []
        """A heap of tasks that failed, and when they are tried again."""
        self._serial = itertools.count()
        self._scans: deque[_Scan] = deque()
        self._look_at = 0.0
        """When more of the first is looked at."""
        self._found: dict[tuple[str, bool], deque[BlockId]] = {}
        """By node, and whether it is a move: what no task was made of yet."""
        self._in_flight = 0
        self._moving = 0
        """Tasks of moves that have not ended, and what was found for such."""
        self._total = 0
        """Tasks of moves since the first map of this row of changes."""
        self._failed = 0
        self._no_room = 0
        """Tasks of moves for which there was no room when they were last tried."""
        self._done: set[tuple[int, str]] = set()
        """Buckets, and nodes that have been offered all of them."""
        self._may_send_at = 0.0
        self._reported: HandedOver | None = None
        self._report_at = 0.0

    @property
    def left(self) -> int:
        """Blocks that are still to be handed over, or to be looked at for that."""
        found = sum(map(len, self._found.values())) + sum(scan.left for scan in self._scans)
        return self._waiting + found

    # --- events -------------------------------------------------------------------------------

    def new_map(self, old: Pool | None, pool: Pool, *, all_known: bool = True) -> None:
        """The map in force has changed. `all_known`: whether it is known what is here: nothing is
        moved until this is called with that, without an `old` map where it has not changed."""
        wanted: dict[int, tuple[str, ...]] = {}
        if pool.is_settled:
            self._total = self._failed = 0
        elif all_known:
            wanted = self._moves(pool)
        self._done &= {(bucket, n) for bucket, nodes in wanted.items() for n in nodes}
        moves = {
            bucket: missing
            for bucket, nodes in wanted.items()
            if (missing := [n for n in nodes if (bucket, n) not in self._done])
        }
        repairs = self._repairs(old, pool) if old is not None else {}
        self._reported = None
        self._told_too_large = False
        self._drop_scans(pool)
        if not moves and not repairs:
            return
        if not self._scans:
            self._look_at = 0.0
        blocks, lower = self._store.blocks(), [*self.lower()]
        seen: set[BlockId] | None = set() if lower else None
        blocks += lower
        self._scans.append(_Scan(iter(blocks), len(blocks), moves, repairs, seen))
        self._done.update((bucket, n) for bucket, nodes in moves.items() for n in nodes)

    def came(self, block: BlockId, epoch: int) -> None:
        """Somebody has put a block here, by the map of this epoch."""
        pool = self._outbox.pool
        if pool is not None and epoch < pool.epoch:
            self.hand_on(block)

    def hand_on(self, block: BlockId) -> bool:
        """Somebody who takes a block over may lack it; False where it is not for this node to see
        to that."""
        pool = self._outbox.pool
        if pool is None or pool.is_settled:
            return pool is not None and pool.is_home(block)
        bucket = bucket_of(block.key)
        if pool.node_id not in pool.holders_of(bucket):
            return False
        for node_id in pool.heirs_of(bucket):
            self._add(_Task(block, node_id, move=True))
        return True

    def replicate(self, block: BlockId, node_id: str) -> bool:
        """A put's copy has left DRAM before it was sent to one of the block's homes; False where it
        cannot be had any more."""
        if self._store.peek(block) is None and not self._store.below.size_of(block):
            return False
        self._add(_Task(block, node_id))
        return True

    def report(self, now: float) -> HandedOver | None:
        """How much is left, if that is news: at once where nothing is left, or something is again,
        and else now and then."""
        pool = self._outbox.pool
        if pool is None or pool.is_settled:
            return None
        unseen = sum(scan.left for scan in self._scans if scan.moves)
        told = HandedOver(
            *(pool.epoch, self._moving + unseen, self._total + unseen),
            *(self._failed, self._no_room),
        )
        former = self._reported
        goes_on = told.left and not (former is not None and former.left == 0)
        if told == former or (goes_on and now < self._report_at):
            return None
        self._reported, self._report_at = told, now + REPORT_S
        return told

    def get_timer(self) -> float | None:
        """When `advance` must be called next; None = nothing is pending."""
        times = []
        if self._tasks and self._in_flight < self.options.max_in_flight:
            times.append(self._may_send_at)
        if self._scans:
            times.append(self._look_at)
        if self._later:
            times.append(self._later[0][0])
        return min(times, default=None)

    def advance(self, now: float) -> None:
        """Offer the blocks whose turn it is, and look for more."""
        looked = bool(self._scans) and self._look_at <= now
        if looked:
            self._look_at = now + PAUSE_S
            self._look()
        while self._later and self._later[0][0] <= now:
            self._tasks.append(heapq.heappop(self._later)[2])
        self._may_send_at = max(self._may_send_at, now - _BURST_S)
        for _ in range(PART_BLOCKS):  # a map may have left nobody to take any of them
            self._make_tasks()
            full = self._in_flight >= self.options.max_in_flight
            if full or self._may_send_at > now or not self._tasks:
                break
            self._offer(now, self._tasks.popleft())
        if looked:
            self.progressed(now)

    # --- what there is to do ------------------------------------------------------------------

    def _moves(self, pool: Pool) -> dict[int, tuple[str, ...]]:
        """By bucket that this node holds: who is to have what it holds."""
        return {bucket: heirs for bucket in pool.held_buckets() if (heirs := pool.heirs_of(bucket))}

    def _repairs(self, old: Pool, pool: Pool) -> dict[int, list[str]]:
        """By bucket that this node held: who is new among its holders, in the place of a node that
        is gone, or in ours."""
        repairs: dict[int, list[str]] = {}
        held = set(pool.held_buckets())
        for bucket in old.held_buckets():
            before = old.all_of(bucket)
            lost = any(node_id not in pool.nodes_by_id for node_id in before)
            if lost or bucket not in held:
                new = [n for n in pool.holders_of(bucket) if n not in before]
                if new:
                    repairs[bucket] = new
        return repairs

    def _drop_scans(self, pool: Pool) -> None:
        """What the map does not want any more is not looked for."""
        for scan in self._scans:
            scan.moves = {
                bucket: wanted
                for bucket, nodes in scan.moves.items()
                if (wanted := [n for n in nodes if (bucket, n) in self._done])
            }
            scan.repairs = {
                bucket: wanted
                for bucket, nodes in scan.repairs.items()
                if (wanted := [n for n in nodes if n in pool.holders_of(bucket)])
            }
        self._scans = deque(scan for scan in self._scans if scan.moves or scan.repairs)

    def _look(self) -> None:
        """At some of what was here when a map came: whom is it for?"""
        scan = self._scans[0]
        for block in itertools.islice(scan.blocks, PART_BLOCKS):
            bucket = bucket_of(block.key)
            moves, repairs = scan.moves.get(bucket), scan.repairs.get(bucket)
            if not moves and not repairs:
                continue
            if scan.seen is not None:
                if block in scan.seen:
                    continue
                scan.seen.add(block)
            for node_id in moves or ():
                self._found.setdefault((node_id, True), deque()).append(block)
                self._moving += 1
                self._total += 1
            for node_id in repairs or ():
                self._found.setdefault((node_id, False), deque()).append(block)
        scan.left = max(0, scan.left - PART_BLOCKS)
        if not scan.left:
            self._scans.popleft()

    def _make_tasks(self) -> None:
        """Have some ready, made of what was found for each node in turn."""
        while self._found and len(self._tasks) < _AHEAD:
            (node_id, move), blocks = next(iter(self._found.items()))
            del self._found[node_id, move]
            self._tasks.append(_Task(blocks.popleft(), node_id, move=move, spare=not move))
            if blocks:
                self._found[node_id, move] = blocks

    @property
    def _waiting(self) -> int:
        return len(self._tasks) + len(self._later) + self._in_flight

    def _add(self, task: _Task) -> None:
        if self._waiting >= MAX_WAITING:
            self.counters.failed += 1
            self._failed += task.move
            return
        self._tasks.append(task)
        if task.move:
            self._moving += 1
            self._total += 1

    def _offer(self, now: float, task: _Task) -> None:
        pool = self._outbox.pool
        node = pool.nodes_by_id.get(task.node_id) if pool is not None else None
        meaning = pool.meaning_of(task.block.namespace) if pool is not None else None
        is_due = (
            pool is not None
            and node is not None
            and meaning is not None
            and node.index in pool.homes_of(task.block)
        )
        copy = self._store.peek(task.block)
        if copy is None and is_due and not task.recalled:
            if self._brings(now, task):
                return
            copy = self._store.peek(task.block)
        pinned, task.held = task.held, None
        if pinned is not None and pinned is not copy:  # it was dropped meanwhile
            self._store.unpin(pinned)
            pinned = None
        if not is_due:
            if pinned is not None:
                self._store.unpin(pinned)
            self._over(task)  # nobody is there to take it
            return
        assert pool is not None
        assert node is not None
        assert meaning is not None
        if copy is None:
            size_bytes = self._store.below.size_of(task.block)
            if not size_bytes:
                self._over(task)  # there is nothing to hand over any more
            elif self._store.could_hold(task.block.namespace, size_bytes):
                # DRAM has no room for it, perhaps because of others that are being sent.
                self._not_landed(now, task, no_room=True)
            else:
                self.counters.too_large += 1
                if not self._told_too_large:
                    self._told_too_large = True
                    self.too_large(task.block, size_bytes)
                self._not_landed(now, task, again=False)
            return
        self._in_flight += 1
        self._may_send_at += copy.size_bytes / self.options.rate_bytes_per_s

        def begin() -> bool:
            nonlocal pinned
            if pinned is None and copy.state == COMMITTED:
                self._store.pin(copy)
                pinned = copy
            return pinned is not None

        def ended(now: float, outcome: str) -> None:
            if pinned is not None:
                self._store.unpin(pinned)
            self._ended(now, task, copy.size_bytes, outcome)

        deadline = now + CALL_TIMEOUT_S
        # Who is given something else than a move may be about to hand its bucket over itself.
        epoch = pool.epoch if task.move or pool.is_settled else bulk.OLDEST_MAP
        self._outbox.calls.append(
            PutCall(
                *(node.index, copy, epoch, meaning, deadline, begin, ended),
                spare=task.spare,
            )
        )

    def _brings(self, now: float, task: _Task) -> bool:
        """Whether the block comes from a lower tier, to be offered then."""
        begun = ended = False

        def brought() -> None:
            nonlocal ended
            ended = True
            if not begun:
                return  # it has ended at once: the task goes on without it
            self._in_flight -= 1
            copy = self._store.peek(task.block)
            if copy is not None:
                self._store.pin(copy)
                task.held = copy
            self._tasks.appendleft(task)
            self.advance(max(now, self._store.now))
            self.progressed(max(now, self._store.now))

        task.recalled = True
        self._in_flight += 1
        begun = self.recall(now, task.block, brought)
        if begun and not ended:
            return True
        self._in_flight -= 1
        return False

    def _ended(self, now: float, task: _Task, size_bytes: int, outcome: str) -> None:
        self._in_flight -= 1
        if outcome in bulk.LANDED:
            self.counters.blocks += 1
            if outcome == bulk.DONE:
                self.counters.bytes += size_bytes
            else:  # it has cost next to nothing
                self._may_send_at -= size_bytes / self.options.rate_bytes_per_s
            self._over(task)
        elif outcome == EVICTED:  # to the lower tier, perhaps
            task.recalled = False
            self._tasks.append(task)
        else:
            no_room = outcome == bulk.NO_ROOM
            again = outcome not in _HOPELESS and not (no_room and not task.move)
            self._not_landed(now, task, again=again, no_room=no_room)
        self.advance(now)
        self.progressed(now)

    def _not_landed(
        self, now: float, task: _Task, *, again: bool = True, no_room: bool = False
    ) -> None:
        """Try a task once more after a pause, if that may help and it was not tried too often."""
        self._note_room(task, no_room)
        task.tries += 1
        if again and (task.tries < TRIES or task.move):
            again_at = now + pause_after(task.tries, RETRY_S, RETRY_MAX_S)
            task.recalled = False
            heapq.heappush(self._later, (again_at, next(self._serial), task))
            return
        self.counters.failed += 1
        self._failed += task.move
        self._over(task)

    def _note_room(self, task: _Task, no_room: bool) -> None:
        if task.move:
            self._no_room += no_room - task.no_room
        task.no_room = no_room

    def _over(self, task: _Task) -> None:
        self._note_room(task, no_room=False)
        self._moving -= task.move
