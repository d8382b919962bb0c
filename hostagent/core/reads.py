"""Gets: from a client's keys to pinned copies in the arena.

Owns: single flight (one fetch a block, however many wait for it), which homes are asked, the
deadline of every get, and what a get ends with. Must not know: sockets, clients, or how a fetch
goes about its READs (`kvcast.protocol.requester`).

How a block can get from one way to another: `TRANSITIONS` in `fetches`.

**One block.** A get takes the first of these ways that there is:

1. The block lies in the arena: the get ends at once.
2. It lies on this node's disk: the get waits for that. If the disk takes too long or fails, the
   block is asked for elsewhere, too. If nobody else has it, the get goes on waiting for the disk.
3. The block is being fetched: the get joins that fetch.
4. The block has other homes: they are asked, in the map's order. A store that all nodes share is
   read by the block's homes. Other nodes read it there only if no home has given them the block.
5. This node is the only home: only the switch may still hold the block. A switch answers a READ
   whomever it is addressed to, so any other node is asked, for no longer than `recall_probe_s`.
   That node is no home of the block. It might answer by itself where no switch keeps it from that.
   So only one copy is taken: the one that this node has had, or that the controller names.

**Several blocks of one home.** Of those that one get wants, only the first segment of the first
block is asked for: the *probe*. If nobody shares the answer, all others come over the bulk link, by
one request. So they do if the homes lack that block, and many others wait. If somebody shares the
answer, if the probe leads nowhere else, or if the bulk link fails, each of them is read as a single
block is. Which of them a home lacks, it says in its answer to that request; those are asked for at
the next home in the same way, and are a miss after the last. So blocks that nobody has cost a few
requests and not a READ each.

**The end.** Every batch of gets ends by its own deadline, whatever the fetches do. A fetch that
nobody waits for any more goes on until its own deadline, and its block is cached. But if a batch is
given up, the fetches that are for it alone end with it, since slow links are for what is wanted.
Fetches that others may count on go on: those of a reader group, prefetches, and blocks that are to
be kept or that another node waits for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.courier import Courier
from kvcast.hostagent.core.fetches import (
    BY_REQUESTER,
    ONLY_FROM_TIER,
    Fetch,
    GetBatch,
    GetItem,
    Patience,
    Probes,
    Source,
    Way,
    WayEvent,
)
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.namespace_metrics import explained_by
from kvcast.hostagent.core.pool import NO_NODE
from kvcast.hostagent.core.reservations import ArenaReservation, Reservations
from kvcast.hostagent.core.spread import Spread
from kvcast.hostagent.core.store import Copy, StaleReservationError, Store
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.links.bulk import GetCall
from kvcast.protocol.messages import bulk, local
from kvcast.protocol.messages.control import MAX_WRONG_RESIDENTS
from kvcast.protocol.messages.wire import CELLS, BlockId, bucket_of
from kvcast.protocol.requester import (
    BulkCopy,
    Fetched,
    Missed,
    MissReason,
    OfferReceived,
    ProbeEnded,
    Requester,
    TryBulk,
    WrongResident,
)
from kvcast.protocol.timers import TimerQueue

MAX_RECALLERS: Final = 256
"""How many other nodes may wait for one block from this node's disk. One more is told at once that
the block is not there."""

_STATUS_OF_MISS: Final = {
    MissReason.QUEUE_FULL: local.BUSY,
    MissReason.NO_MEMORY: local.NO_ROOM,
}
"""Any other reason is local.MISS, with the reason's value."""
_WITHOUT_HOMES: Final = frozenset(
    {MissReason.DEADLINE, MissReason.CANCELLED, MissReason.NO_MEMORY, MissReason.QUEUE_FULL}
)
"""Reasons that do not say that the homes lack the block."""
_FOR_GOOD: Final = frozenset({MissReason.DEADLINE, MissReason.CANCELLED})
"""Reasons for which a fetch ends, whoever else may have the block."""


MOST_EXPECT_WAITS: Final = 8

FEW_FOLLOWERS: Final = 16
"""So many blocks are READ, in two round trips, where the homes lack the block that probed for them:
a connection may have to be made for anything else."""


@dataclass(frozen=True)
class ReadOptions:
    """How gets behave beyond the requester's own tunables."""

    recall_probe_s: float = 0.05
    """How long the switch is asked for a block whose only home is this node."""
    most_overheard: int = 64
    """How many blocks may be on their way here only because others of a reader group asked."""
    overheard_s: float = 5.0
    """How long such a block may take if nobody here asks for it."""
    keep_timeout_s: float = 3.0
    """How long the controller's `Keep` may take."""


class Reads:
    """Turns gets into fetches and fetches into answers."""

    def __init__(
        self,
        options: ReadOptions,
        node_id: str,
        store: Store,
        reservations: Reservations,
        requester: Requester,
        outbox: BulkOutbox,
        metrics: Metrics,
        spread: Spread,
    ) -> None:
        self._options = options
        self._spread = spread
        self._node_id = node_id
        self._store = store
        self._reservations = reservations
        self.requester = requester
        """It takes rooms for blocks from the same `reservations`."""
        self._outbox = outbox
        self._metrics = metrics
        self._fetches: dict[BlockId, Fetch] = {}
        self._overheard: list[Fetch] = []
        """Fetches that `overhear` has begun; some may have ended."""
        self._not_overheard = BoundedMap[BlockId, float](options.most_overheard)
        """Blocks that were taken unasked and did not come, and until when they are left to
        others."""
        self._wrong_residents = BoundedMap[BlockId, int](MAX_WRONG_RESIDENTS)
        self._timers = TimerQueue()
        self._now = 0.0
        """The time of the last event."""
        self.sources: list[Source] = []
        """The tiers below DRAM, the nearest first."""
        self.courier: Courier | None = None
        """It fetches in compiled code, and is told which blocks it must leave to this class."""
        self.residents: frozenset[BlockId] = frozenset()
        """Blocks that a switch holds: it answers READs of them, for chunks of 1 KiB."""
        self.watch: Callable[[float, GetBatch], None] | None = None
        """Called with each batch that has ended, before `answered` is."""

    @property
    def now(self) -> float:
        """The time of the last event."""
        return self._now

    @property
    def waiting(self) -> int:
        """How many blocks are on their way here."""
        return len(self._fetches)

    def reside(self, blocks: frozenset[BlockId]) -> None:
        """Note which blocks a switch holds from now on; it holds no others."""
        self.residents = blocks
        if self.courier is not None:
            self.courier.residents = blocks

    def take_wrong_residents(self) -> list[tuple[int, bytes, int]]:
        """The blocks (namespace, key, digest) of which the switch has sent wrong bytes since the
        last call."""
        wrong = [(*block, digest) for block, digest in self._wrong_residents.items()]
        self._wrong_residents.clear()
        return wrong

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself. For tests and simulations, after
        any event; it looks at everything."""
        fetches = self._fetches.values()
        for block, fetch in self._fetches.items():
            assert fetch.block == block, f"{fetch} is kept as {block}"
            fetch.check()
            asked = block if fetch.way in BY_REQUESTER else None
            assert self.requester.block_of(fetch.fetch_id) == asked, f"the requester's of {fetch}"
        read = sum(fetch.way in BY_REQUESTER for fetch in fetches)
        assert self.requester.fetches_in_flight == read, f"the requester reads more than {read}"
        following = Counter(fetch for fetch in fetches if fetch.way is Way.FOLLOWING)
        followers = Counter(each for probe in fetches for each in probe.followers if each.is_on)
        assert following == followers, f"{following} do not follow one probe each: {followers}"
        if self.courier is not None:
            for bucket, count in Counter(bucket_of(block.key) for block in self._fetches).items():
                assert self.courier.fetching[bucket] == count, f"fetches in bucket {bucket}"

    # --- requests -----------------------------------------------------------------------------

    def refusal(self, namespace: int) -> str | None:
        """Why this node may not use a namespace: a status, or None if it may."""
        pool = self._outbox.pool
        if pool is None:
            return local.UNAVAILABLE
        allowed = pool.may_use(namespace, self._node_id)
        if allowed is None:
            return local.UNKNOWN_NAMESPACE
        return None if allowed else local.FORBIDDEN

    def get(
        self,
        now: float,
        namespace: int,
        keys: list[bytes],
        deadline: float,
        answered: Callable[[GetBatch], None],
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
    ) -> GetBatch:
        """Get blocks of a namespace that `refusal` allows; `answered` may be called before this
        returns. What is returned is for `give_up`."""
        self._now = now
        batch = GetBatch([BlockId(namespace, key) for key in keys], now, deadline, answered)
        self._metrics.gets_total += len(keys)
        self._metrics.by_namespace.of(namespace).gets += len(keys)
        if not keys:
            answered(batch)
            return batch
        gathers = gather_ms and not self._alone(namespace)
        probes = self._probes(now, looks_for_company=bool(gathers or group or expect))
        on_disk: list[tuple[Fetch, int]] = []
        for position, block in enumerate(batch.blocks):
            copy = self._store.get(block)
            if copy is not None:
                self._metrics.hits_local_total += 1
                self._finish(batch, position, self._hit(copy, local.LOCAL_TIER))
                continue
            fetch = self._from_disk(now, block, deadline)
            if fetch is None and probes is not None:
                fetch = self._follow(now, block, deadline, probes)
            if fetch is None:
                fetch = self._join(now, block, deadline, gather_ms or None, group, expect)
            if fetch.way is Way.ON_DISK:
                on_disk.append((fetch, position))
            else:
                fetch.waiters.append((batch, position))
        for fetch, position in on_disk:
            fetch.waiters.append((batch, position))
        for fetch, _ in on_disk:
            self._read_disk(now, fetch)
        if batch.left:
            self._timers.arm(batch, deadline)
        self.drain(now)
        return batch

    def give_up(self, now: float, batch: GetBatch) -> None:
        """End a batch that nobody waits for any more: what has not come is a miss, and fetches that
        are for nothing else end."""
        self._now = now
        left = [at for at, item in enumerate(batch.items) if item is None]
        for position in left:
            self._missed(batch, position, local.MISS, MissReason.GIVEN_UP)
        # The last first: those that follow a probe come after it, and it is for them, too.
        for position in reversed(left):
            fetch = self._fetches.get(batch.blocks[position])
            if fetch is not None and not self._is_wanted(fetch):
                self._end(now, fetch)
                self._outbox.unwanted = True
        self.drain(now)

    def _is_wanted(self, fetch: Fetch) -> bool:
        return (
            fetch.for_later
            or bool(fetch.keeps or fetch.recallers)
            or any(batch.items[position] is None for batch, position in fetch.waiters)
            or any(follower.is_on for follower in fetch.followers)
        )

    def prefetch(
        self,
        now: float,
        namespace: int,
        keys: list[bytes],
        deadline: float,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
    ) -> int:
        """Fetch blocks into the arena; returns how many of them were not there."""
        started = 0
        gathers = gather_ms and not self._alone(namespace)
        probes = self._probes(now, looks_for_company=bool(gathers or group or expect))
        for key in keys:
            block = BlockId(namespace, key)
            if self._store.get(block) is None:
                self._metrics.prefetches_total += 1
                fetch = self._from_disk(now, block, deadline)
                if fetch is not None:
                    self._read_disk(now, fetch)
                elif probes is None or self._follow(now, block, deadline, probes) is None:
                    self._join(now, block, deadline, gather_ms or None, group, expect)
                if (fetch := self._fetches.get(block)) is not None:
                    fetch.for_later = True
                started += 1
        self.drain(now)
        return started

    def keep(
        self,
        now: float,
        block: BlockId,
        size_bytes: int,
        digest: int,
        kept: Callable[[bool], None],
    ) -> None:
        """Get a block into this node's arena; `kept` is called with whether it is there."""
        copy = self._store.get(block)
        if copy is not None:
            kept(True)
            return
        deadline = now + self._options.keep_timeout_s
        on_disk = self._from_disk(now, block, deadline)
        if on_disk is not None:
            on_disk.keeps.append(kept)
            self._read_disk(now, on_disk)
            return
        fetch = self._join(now, block, deadline, None, 0, False, size_bytes or None, digest)
        fetch.keeps.append(kept)
        self.drain(now)

    def _alone(self, namespace: int) -> bool:
        """Whether the controller says that reads of this namespace never gather."""
        pool = self._outbox.pool
        return pool is not None and namespace in pool.alone

    def overhear(self, now: float, source: int, block: BlockId, group: int) -> None:
        """Take DATA that another node of a reader group asked for, although nobody here has asked
        for the block yet. This node's engine will ask, however late it is."""
        pool = self._outbox.pool
        if pool is None or block in self._fetches:
            return
        info = pool.groups.get((block.namespace, group))
        if (
            info is None
            or self._node_id not in info.nodes
            or self.refusal(block.namespace) is not None
            or source not in pool.homes_of(block)
            or self._store.peek(block) is not None
            or self._store.below.holds(block)  # it would go there again, and be overheard again
            or self._not_overheard.get(block, now) > now
        ):
            return
        if len(self._overheard) >= self._options.most_overheard:
            self._overheard = [fetch for fetch in self._overheard if fetch.is_on]
            if len(self._overheard) >= self._options.most_overheard:
                self._metrics.overheard_refused_total += 1
                return
        self._metrics.overheard_total += 1
        deadline = now + self._options.overheard_s
        self._overheard.append(self._join(now, block, deadline, None, group, True))

    # --- this node's disk ---------------------------------------------------------------------

    def recall(self, now: float, block: BlockId, then: Callable[[], None]) -> bool:
        """Bring a block from this node's disk to DRAM, for another node. `then` is called once,
        when the block is there or waiting has become useless. False if the disk cannot be asked."""
        self._now = now
        deadline = now + self._options.keep_timeout_s
        fetch = self._from_disk(now, block, deadline, for_another=True)
        if fetch is None or len(fetch.recallers) >= MAX_RECALLERS:
            return False
        fetch.recallers.append(then)
        self._read_disk(now, fetch)
        return True

    def _from_disk(
        self, now: float, block: BlockId, deadline: float, *, for_another: bool = False
    ) -> Fetch | None:
        """The fetch of a block that lies on the disk; call `_read_disk` next.

        None if the block does not lie there, if its fetch already goes elsewhere, or if its homes
        are to be asked first. (If it is `for_another` node, that node has asked one of them.)
        """
        source = self._source_of(block)
        if source is None or (source.is_shared and not for_another and self._others_read(block)):
            return None
        fetch = self._fetches.get(block)
        if fetch is None:
            if len(self._fetches) >= self.requester.config.max_fetches:
                return None
            self._metrics.fetches_total += 1
            return self._begin(block, deadline, now, WayEvent.ASK_TIER)
        if fetch.way not in ONLY_FROM_TIER:
            return None
        self._metrics.gets_joined_total += 1
        fetch.deadline = max(fetch.deadline, deadline)
        return fetch

    def _read_disk(self, now: float, fetch: Fetch) -> None:
        """Begin to read a fetch's block from its tier, unless that has begun."""
        if fetch.way is not Way.ON_DISK or fetch.source is not None:
            return
        source = self._source_of(fetch.block)
        if source is not None:
            self._read_source(now, fetch, source)
        else:  # to make room for another of its batch has sent it away
            self._ask_elsewhere(now, fetch, WayEvent.ASK_HOMES)
            self._tell_recallers(fetch)
            self.drain(now)

    def _source_of(self, block: BlockId) -> Source | None:
        """The nearest tier below DRAM that holds the block."""
        return next((source for source in self.sources if source.holds(block)), None)

    def _others_read(self, block: BlockId) -> bool:
        """Whether others are to read the block from a store that all share: its homes, if this node
        is none of them."""
        pool = self._outbox.pool
        return pool is not None and not pool.is_home(block) and bool(pool.other_homes_of(block))

    def _read_shared(self, now: float, fetch: Fetch, reason: MissReason) -> bool:
        """After a fetch whose block no home has given: read the block from a store that all share,
        if one holds it and somebody waits. Returns whether it is read there."""
        source = self._source_after(fetch)
        if source is None or reason in _WITHOUT_HOMES:
            return False
        if not self._is_wanted(fetch):
            return False
        self._reservations.end(fetch.block)
        again = self._begin(fetch.block, fetch.deadline, fetch.started_at, WayEvent.ASK_LAST_TIER)
        again.waiters, again.keeps, again.recallers = fetch.waiters, fetch.keeps, fetch.recallers
        again.for_later = fetch.for_later
        self._read_source(now, again, source)
        return True

    def _read_source(self, now: float, fetch: Fetch, source: Source) -> None:
        fetch.source = source
        room: ArenaReservation | None = None

        def begin(size_bytes: int) -> memoryview | None:
            nonlocal room
            room = self.room(fetch, size_bytes)
            return None if room is None else room.view

        def ended(now: float, error: str, digest: int, committed_at: float) -> None:
            self._disk_ended(now, fetch, room, error, digest, committed_at)

        if not source.read(fetch.block, begin, ended):
            self._disk_ended(now, fetch, None, "not read", 0, 0.0)
        elif fetch.way is Way.ON_DISK:
            self._timers.arm(Patience(fetch), now + source.patience_s)

    def _source_after(self, fetch: Fetch) -> Source | None:
        """The next tier that holds the block, after the one that did not give it."""
        begin = 0 if fetch.source is None else self.sources.index(fetch.source) + 1
        rest = self.sources[begin:]
        return next((source for source in rest if source.holds(fetch.block)), None)

    def _disk_ended(
        self,
        now: float,
        fetch: Fetch,
        room: ArenaReservation | None,
        error: str,
        digest: int,
        committed_at: float,
    ) -> None:
        self._now = now
        source = fetch.source
        assert source is not None
        if error or not fetch.is_on:
            if room is not None:
                room.abort()
            if fetch.way is Way.RACING:
                fetch.happen(WayEvent.TIER_FAILED)
            elif fetch.is_on:
                after = self._source_after(fetch)
                asks_homes = fetch.is_for_us and not fetch.recallers
                homes_first = asks_homes and self._others_read(fetch.block)
                if after is not None and not (after.is_shared and homes_first):
                    self._read_source(now, fetch, after)
                    return
                self._ask_elsewhere(now, fetch, WayEvent.ASK_HOMES)
        else:
            assert room is not None
            races = fetch.way is Way.RACING
            if not races:
                self._over(fetch)
            self._deliver(fetch, room, digest, source.tier, now - fetch.started_at, committed_at)
            if races:
                fetch.keeps.clear()
                self._end(now, fetch)
        self._tell_recallers(fetch)
        self.drain(now)

    def _ask_elsewhere(self, now: float, fetch: Fetch, event: WayEvent) -> None:
        """The disk did not give a block, or not in time (`event`): ask another home, if there is
        one."""
        last = fetch.way is Way.LAST
        if fetch.is_for_us and not last:
            self._read(now, fetch, event)
        else:
            self._over(fetch)
            late = self._take_late(fetch) if last else []
            self._end_without(fetch, MissReason.NOT_FOUND)
            self._fetch_anew(now, fetch.block, late)

    def _tell_recallers(self, fetch: Fetch) -> None:
        recallers, fetch.recallers = fetch.recallers, []
        for then in recallers:
            then()

    # --- fetches ------------------------------------------------------------------------------

    def _probes(self, now: float, *, looks_for_company: bool) -> Probes | None:
        """An empty set of probes for a batch; None = its blocks are read one by one."""
        if looks_for_company or not self.requester.may_probe(now):
            return None
        return Probes()

    def _follow(self, now: float, block: BlockId, deadline: float, probes: Probes) -> Fetch | None:
        """Let a block wait for the probe of its home, or be that probe if the home has none in this
        batch (`probes`). None = it can do neither."""
        full = len(self._fetches) >= self.requester.config.max_fetches
        if full or block in self._fetches:
            return None
        if block in self.residents:  # the switch has it, or will have what READs bring past it
            return None
        if self.requester.has_met(now, block):
            return None
        pool = self._outbox.pool
        if pool is None:
            return None
        others = tuple(self._spread.order(block, pool.other_homes_of(block), company=False))
        probe = probes.by_homes.get(others)
        if probe is None:
            if not others:
                return None
            home = self.requester.first_home(now, others)
            probe = probes.by_home.get(home)
            if probe is not None:
                probes.by_homes[others] = probe
        if probe is None:
            probe = self._join(now, block, deadline, None, 0, False, order=others)
            probe.home = home
            probes.by_home[home] = probes.by_homes[others] = probe
            return probe
        if not probe.is_on:  # another of its batch, which the disk did not give, has ended it
            return None
        self._metrics.fetches_total += 1
        fetch = self._begin(block, deadline, now, WayEvent.FOLLOW)
        probe.followers.append(fetch)
        return fetch

    def _begin(self, block: BlockId, deadline: float, now: float, event: WayEvent) -> Fetch:
        """A block is on its way here from now on."""
        if self.courier is not None:
            self.courier.yield_to(now, block)
            self.courier.fetching[bucket_of(block.key)] += 1
        fetch = self._fetches[block] = Fetch(block, deadline, now)
        fetch.happen(event)
        return fetch

    def _over(self, fetch: Fetch) -> None:
        """It is not any more."""
        fetch.happen(WayEvent.END)
        if self.courier is not None:
            self.courier.fetching[bucket_of(fetch.block.key)] -= 1
        del self._fetches[fetch.block]

    def _join(
        self,
        now: float,
        block: BlockId,
        deadline: float,
        gather_ms: int | None,
        group: int,
        expect: bool,
        expect_size: int | None = None,
        recall_digest: int = 0,
        order: Sequence[int] | None = None,
    ) -> Fetch:
        fetch = self._fetches.get(block)
        if fetch is not None:
            self._metrics.gets_joined_total += 1
            fetch.for_later |= bool(group)
            if deadline > fetch.deadline and fetch.way is not Way.RECALLED:
                fetch.deadline = deadline
                self.requester.extend(fetch.fetch_id, deadline)
            return fetch
        self._metrics.fetches_total += 1
        pool = self._outbox.pool
        homes: Sequence[int] = pool.other_homes_of(block) if pool is not None else ()
        if order is None:
            company = bool(gather_ms or group or expect) or self.requester.shares(now)
            order = self._spread.order(block, homes, company=company)
        homes = order
        digest, event = 0, WayEvent.ASK_HOMES
        chunking = CELLS if pool is None or block in self.residents else pool.chunking
        if pool is not None and not homes:
            chunking = CELLS  # only a switch can have it
            digest = recall_digest or self._store.evicted_digest(block)
            other = pool.another_node()
            if other != NO_NODE and digest:
                homes, event = [other], WayEvent.ASK_SWITCH
                deadline = min(deadline, now + self._options.recall_probe_s)
        waits = self._expect_waits(block.namespace, group) if expect else 1
        # Who was to ask, and comes late, finds that another asks in its place.
        expect = expect or bool(group and self.requester.hears(now, group))
        fetch = self._begin(block, deadline, now, event)
        fetch.for_later = bool(group)  # other members may wait for what this one asks for
        fetch.fetch_id = self.requester.fetch(
            now,
            block,
            homes,
            deadline=deadline,
            expect_size=expect_size,
            expect_digest=digest,
            chunking=chunking,
            resident=block in self.residents,
            gather_ms=gather_ms,
            gathers=not self._alone(block.namespace),
            group=group,
            expect=expect,
            expect_waits=waits,
            repeat=self._is_repeat(now, block),
        )
        return fetch

    def _is_repeat(self, now: float, block: BlockId) -> bool:
        """Whether the courier has asked for this block before, and got no answer."""
        return self.courier is not None and self.courier.was_unanswered(now, block)

    def _expect_waits(self, namespace: int, group: int) -> int:
        """By what factor this node waits longer than the node that was to ask, before it asks
        itself. The factor differs by node, so that a reader group does not ask all at once."""
        pool = self._outbox.pool
        info = pool.groups.get((namespace, group)) if pool is not None else None
        if info is None or self._node_id not in info.nodes:
            return 2
        return min(2 + info.nodes.index(self._node_id), MOST_EXPECT_WAITS)

    def forget_namespaces(self, now: float, namespaces: Collection[int]) -> None:
        """End the fetches of these namespaces, since their keys may name something else now."""
        for fetch in [f for f in self._fetches.values() if f.block.namespace in namespaces]:
            self._end(now, fetch)
        self.drain(now)

    def _end(self, now: float, fetch: Fetch) -> None:
        """End a fetch without its block, unless it has ended; call `drain` next."""
        if fetch.way in BY_REQUESTER:
            self.requester.cancel(now, fetch.fetch_id)
        elif fetch.is_on:
            self._over(fetch)
            self._end_without(fetch, MissReason.CANCELLED)

    # --- time and events ----------------------------------------------------------------------

    def get_timer(self) -> float | None:
        """When `handle_timer` must be called next; None = no timer runs."""
        mine = self._timers.next_at()
        theirs = self.requester.get_timer()
        if mine is None or theirs is None:
            return theirs if mine is None else mine
        return min(mine, theirs)

    def handle_timer(self, now: float) -> None:
        """Do what is due."""
        self._now = now
        self.requester.handle_timer(now)
        self.drain(now)
        while (batch := self._timers.pop_due(now)) is not None:
            if isinstance(batch, Patience):
                self._out_of_patience(now, batch.fetch)
                continue
            assert isinstance(batch, GetBatch)
            for position, item in enumerate(batch.items):
                if item is None:
                    self._missed(batch, position, local.MISS, MissReason.DEADLINE)

    def _out_of_patience(self, now: float, fetch: Fetch) -> None:
        """The disk takes long: ask another home as well. Whoever brings the block first, gives
        it."""
        if fetch.way is not Way.ON_DISK:
            return  # it may be asked for elsewhere since the tier before this one took long
        pool = self._outbox.pool
        if pool is not None and pool.other_homes_of(fetch.block):
            self._ask_elsewhere(now, fetch, WayEvent.ASK_HOMES_TOO)
        self._tell_recallers(fetch)
        self.drain(now)

    def drain(self, now: float) -> None:
        """Act on the requester's events. Call it after anything that may cause one."""
        self._now = now
        while (event := self.requester.next_event()) is not None:
            if isinstance(event, Fetched):
                self._fetched(now, event)
            elif isinstance(event, Missed):
                self._not_fetched(now, self._fetches[event.block], event.reason)
            elif isinstance(event, TryBulk):
                # What waits for this probe would only find out the same.
                self._bulk_followers(self._fetches[event.block], event.home)
                self._try_bulk(now, event.fetch_id, event.block, event.home)
            elif isinstance(event, ProbeEnded):
                probe = self._fetches.get(event.block)
                if probe is not None and probe.fetch_id == event.fetch_id:
                    if event.lacked:
                        self._home_lacks(now, probe)
                    else:
                        self._read_followers(now, probe)
            elif isinstance(event, WrongResident):
                self._wrong_residents[event.block] = event.digest
            else:
                assert isinstance(event, OfferReceived)
                self._take_offer(now, event)

    def _fetched(self, now: float, event: Fetched) -> None:
        fetch = self._fetches[event.block]
        self._over(fetch)
        reservation, report = event.reservation, event.report
        assert isinstance(reservation, ArenaReservation)
        if report.bulk:
            self._metrics.payload_bytes_received_bulk_get_total += event.size - report.payload_bytes
        self._metrics.payload_bytes_received_udp_total += report.payload_bytes
        self._deliver(fetch, reservation, event.digest, report.tier, report.elapsed_s)
        if fetch.followers and fetch.home is not None and report.tier == "home":
            self._bulk_followers(fetch, fetch.home)
        else:
            self._read_followers(now, fetch)

    def _not_fetched(self, now: float, fetch: Fetch, reason: MissReason) -> None:
        """No home has given the block of a fetch: it is over, unless the disk may still give it."""
        if fetch.way is Way.RACING and reason not in _FOR_GOOD:
            fetch.happen(WayEvent.HOMES_LACK)
            fetch.fetch_id = -1
            return
        way = fetch.way
        self._over(fetch)
        late: list[tuple[GetBatch, int]] = []
        if way is Way.RACING or not self._read_shared(now, fetch, reason):
            if reason is MissReason.NOT_FOUND:
                late = self._take_late(fetch)
            over = way is Way.RECALLED and reason is MissReason.DEADLINE
            self._end_without(fetch, MissReason.NOT_FOUND if over else reason)
        if reason is MissReason.NOT_FOUND:
            self._home_lacks(now, fetch)
        else:
            self._read_followers(now, fetch)
        self._fetch_anew(now, fetch.block, late)

    def _deliver(
        self,
        fetch: Fetch,
        reservation: ArenaReservation,
        digest: int,
        tier: str,
        elapsed_s: float,
        since: float | None = None,
    ) -> None:
        """A block is there, and its bytes have this digest; `since`: when it was committed here."""
        pool = self._outbox.pool
        self._reservations.end(fetch.block)
        home = pool is not None and pool.is_home(fetch.block)
        try:
            copy = reservation.commit(digest, home=home, since=since)
        except StaleReservationError:
            self._end_without(fetch, MissReason.CANCELLED)
            return
        self._metrics.fetch_time.add(elapsed_s)
        if fetch.source is not None and tier == fetch.source.tier:
            fetch.source.promoted(copy)
        if self.courier is not None:
            self.courier.learn(self._now, fetch.block, copy.size_bytes)
        # It is held while its waiters are told: one of them may put or drop.
        for batch, position in fetch.waiters:
            if batch.items[position] is None:
                self._metrics.count_hit(tier)
                self._finish(batch, position, self._hit(copy, tier))
        for kept in fetch.keeps:
            kept(True)
        self._store.unpin(copy)

    def _end_without(self, fetch: Fetch, reason: MissReason) -> None:
        status = _STATUS_OF_MISS.get(reason, local.MISS)
        refusal = self._reservations.end(fetch.block)
        if status == local.NO_ROOM:
            status = refusal
        for batch, position in fetch.waiters:
            if batch.items[position] is None:
                self._missed(batch, position, status, reason)
        for kept in fetch.keeps:
            kept(False)
        self._tell_recallers(fetch)
        if any(unasked is fetch for unasked in self._overheard):
            # Its own READ was overheard, too: two members must not keep each other asking for ever.
            self._not_overheard[fetch.block] = self._now + self._options.overheard_s

    def _take_late(self, fetch: Fetch) -> list[tuple[GetBatch, int]]:
        """Remove and return those waiters that joined after the fetch had begun. A put may lie
        between: the homes were asked before it, these gets came after it."""
        early: list[tuple[GetBatch, int]] = []
        late: list[tuple[GetBatch, int]] = []
        for waiter in fetch.waiters:
            (late if waiter[0].started_at > fetch.started_at else early).append(waiter)
        fetch.waiters = early
        return late

    def _fetch_anew(self, now: float, block: BlockId, waiters: list[tuple[GetBatch, int]]) -> None:
        """Ask the homes once more, for waiters that joined a fetch which found nothing."""
        waiting = [waiter for waiter in waiters if waiter[0].items[waiter[1]] is None]
        if waiting:
            deadline = max(batch.deadline for batch, _ in waiting)
            self._join(now, block, deadline, None, 0, False).waiters += waiting

    # --- what a probe has shown ---------------------------------------------------------------

    def _read_followers(self, now: float, probe: Fetch) -> None:
        """Read the blocks that waited for this probe, one by one."""
        followers, probe.followers = probe.followers, []
        for fetch in followers:
            self._read(now, fetch)

    def _home_lacks(self, now: float, probe: Fetch) -> None:
        """The home that was probed has not got the probe's block, and may have the others."""
        if probe.home is not None and len(probe.followers) > FEW_FOLLOWERS:
            self._bulk_followers(probe, probe.home)
        else:
            self._read_followers(now, probe)

    def _bulk_followers(self, probe: Fetch, home: int) -> None:
        """Fetch the blocks that waited for this probe from its home, over the bulk link."""
        followers, probe.followers = probe.followers, []
        for fetch in followers:
            if fetch.is_on:
                fetch.happen(WayEvent.CONVEY)
                self._outbox.calls.append(_Rest(self, fetch).call(home))

    def _read(
        self,
        now: float,
        fetch: Fetch,
        event: WayEvent = WayEvent.ASK_HOMES,
        *,
        probe: bool = True,
    ) -> None:
        """Read a block that was to come another way, instead or (`event`) as well. `probe`: whether
        an offer may be taken."""
        if not fetch.is_on:
            return  # it has ended
        pool = self._outbox.pool
        homes = pool.other_homes_of(fetch.block) if pool is not None else []
        fetch.happen(event)
        fetch.fetch_id = self.requester.fetch(
            now,
            fetch.block,
            homes,
            deadline=fetch.deadline,
            probe=probe,
            gathers=not self._alone(fetch.block.namespace),
            repeat=self._is_repeat(now, fetch.block),
        )

    # --- the bulk way -------------------------------------------------------------------------

    def room(self, fetch: Fetch, size_bytes: int) -> ArenaReservation | None:
        """Room for a block that is to come over the bulk link, if it is still wanted."""
        if not fetch.is_on or size_bytes > self.requester.config.max_block_bytes:
            return None
        return self._reservations.reserve(fetch.block, size_bytes)

    def bulk_ended(
        self,
        now: float,
        fetch: Fetch,
        home: int,
        came: ArenaReservation | None,
        digest: int,
        outcome: str,
    ) -> None:
        """The bulk call to a home for a block that followed a probe has ended; `came`: its bytes,
        if any."""
        self._now = now
        if outcome == bulk.WRONG_DIGEST:
            self._metrics.bulk_wrong_digest_total += 1
        if not fetch.is_on:
            if came is not None:
                came.abort()
        elif outcome == bulk.NOT_FOUND:
            self._lacked(now, fetch, home)
        elif came is None or outcome != bulk.DONE:
            if came is not None:
                came.abort()
            if outcome == bulk.COMPANY:
                self.requester.meet(now, fetch.block)
            self._read(now, fetch, probe=False)
        else:
            self._over(fetch)
            self._metrics.payload_bytes_received_bulk_get_total += came.view.nbytes
            self._deliver(fetch, came, digest, "bulk", now - fetch.started_at)
        self.drain(now)

    def _lacked(self, now: float, fetch: Fetch, home: int) -> None:
        """A home lacks a block: ask the next one over the bulk link, too, if there is one."""
        fetch.lacked_by += (home,)
        pool = self._outbox.pool
        if pool is None or fetch.block in self.residents:
            self._read(now, fetch, probe=False)
            return
        left = [node for node in pool.other_homes_of(fetch.block) if node not in fetch.lacked_by]
        if left:
            fetch.happen(WayEvent.CONVEY)
            call = _Rest(self, fetch).call(self.requester.first_home(now, left))
            self._outbox.calls.append(call)
        else:
            self._not_fetched(now, fetch, MissReason.NOT_FOUND)

    def _take_offer(self, now: float, event: OfferReceived) -> None:
        """Fetch the rest of a block, and the blocks that waited for its probe, from the home that
        offers it. The address of that home is the controller's map's. The offer names none, since
        anybody on the way could have written it."""
        fetch = self._fetches[event.block]
        reservation = event.reservation
        assert isinstance(reservation, ArenaReservation)

        def begin(size_bytes: int, digest: int) -> memoryview | None:
            return reservation.view if (size_bytes, digest) == (event.size, event.digest) else None

        def ended(now: float, outcome: str) -> None:
            if outcome == bulk.WRONG_DIGEST:
                self._metrics.bulk_wrong_digest_total += 1
            elif outcome == bulk.COMPANY:
                self.requester.meet(now, event.block)
            copy = BulkCopy(reservation, event.digest) if outcome == bulk.DONE else None
            if not self.requester.bulk_done(now, event.fetch_id, copy):
                reservation.abort()
            self.drain(now)

        self._outbox.calls.append(
            GetCall(
                event.home,
                event.block,
                event.digest,
                fetch.deadline,
                begin,
                ended,
                event.start_bytes,
                lambda: fetch.is_on,
                may_read=True,
            )
        )
        self._bulk_followers(fetch, event.home)

    def _try_bulk(self, now: float, fetch_id: int, block: BlockId, first: int) -> None:
        """Ask one home after the other by TCP, beginning with `first`, until one has the block."""
        pool = self._outbox.pool
        if pool is None:
            self.requester.bulk_done(now, fetch_id, None)
            return
        others = self._spread.order(block, pool.other_homes_of(block), company=True)
        homes = [first, *(home for home in others if home != first)]
        named = deque((home, pool.nodes[home].node_id) for home in homes if home in pool.nodes)
        self._bulk_get(now, fetch_id, block, named)

    def _bulk_get(
        self,
        now: float,
        fetch_id: int,
        block: BlockId,
        homes: deque[tuple[int, str]],
        *,
        no_room: bool = False,
    ) -> None:
        """Ask these homes in turn. `no_room`: a home before them had the block, but there was no
        room for it here."""
        pool = self._outbox.pool
        assert pool is not None
        # By now an index may stand for another node, which is no home of the block.
        while homes and not pool.is_node(*homes[0]):
            homes.popleft()
        if not homes:
            self.requester.bulk_done(now, fetch_id, None, no_room=no_room)
            return
        reservation: ArenaReservation | None = None
        promised = 0

        def begin(size_bytes: int, with_digest: int) -> memoryview | None:
            nonlocal reservation, promised, no_room
            promised = with_digest
            fetch = self._fetches.get(block)
            reservation = None if fetch is None else self.room(fetch, size_bytes)
            if reservation is None and size_bytes <= self.requester.config.max_block_bytes:
                no_room = True
            return None if reservation is None else reservation.view

        def ended(now: float, outcome: str) -> None:
            if outcome == bulk.WRONG_DIGEST:
                self._metrics.bulk_wrong_digest_total += 1
            copy = None
            if reservation is not None and outcome == bulk.DONE:
                copy = BulkCopy(reservation, promised)
            fetch = self._fetches.get(block)
            ours = fetch is not None and fetch.fetch_id == fetch_id
            if copy is None and ours and homes:
                if reservation is not None:
                    reservation.abort()
                self._bulk_get(now, fetch_id, block, homes, no_room=no_room)
                self.drain(now)
                return
            taken = self.requester.bulk_done(now, fetch_id, copy, no_room=no_room)
            if reservation is not None and not taken:
                reservation.abort()
            self.drain(now)

        present = self._fetches[block]
        index, _ = homes.popleft()
        self._outbox.calls.append(
            GetCall(
                *(index, block, 0, present.deadline, begin, ended),
                wanted=lambda: present.is_on,
            )
        )

    # --- answers ------------------------------------------------------------------------------

    def _hit(self, copy: Copy, tier: str) -> GetItem:
        self._store.pin(copy)
        return GetItem(local.OK, "", tier, copy)

    def _missed(self, batch: GetBatch, position: int, status: str, reason: MissReason) -> None:
        self._metrics.count_miss(reason.value)
        block = batch.blocks[position]
        why = explained_by(reason, self._store.why_gone(block))
        self._metrics.by_namespace.of(block.namespace).misses[why] += 1
        text = reason.value if status == local.MISS else ""
        self._finish(batch, position, GetItem(status, text))

    def _finish(self, batch: GetBatch, position: int, item: GetItem) -> None:
        assert batch.items[position] is None
        batch.items[position] = item
        if item.copy is not None:
            mine = self._metrics.by_namespace.of(item.copy.block.namespace)
            mine.hits[item.tier] += 1
            mine.got_bytes += item.copy.size_bytes
            mine.get_time.add(self._now - batch.started_at)
        batch.left -= 1
        if batch.left == 0:
            self._timers.cancel(batch)
            if self.watch is not None:
                self.watch(self._now, batch)
            batch.answered(batch)


class _Rest:
    """The bulk call for a block that followed a probe."""

    __slots__ = ("_digest", "_fetch", "_home", "_reads", "_room")

    def __init__(self, reads: Reads, fetch: Fetch) -> None:
        self._reads = reads
        self._fetch = fetch
        self._home = NO_NODE
        self._room: ArenaReservation | None = None
        self._digest = 0

    def call(self, home: int) -> GetCall:
        """What is asked of that home."""
        fetch, self._home = self._fetch, home
        return GetCall(
            *(home, fetch.block, 0, fetch.deadline, self._begin, self._ended),
            wanted=lambda: fetch.is_on,
            may_read=True,
        )

    def _begin(self, size_bytes: int, digest: int) -> memoryview | None:
        self._digest = digest
        self._room = self._reads.room(self._fetch, size_bytes)
        return None if self._room is None else self._room.view

    def _ended(self, now: float, outcome: str) -> None:
        self._reads.bulk_ended(now, self._fetch, self._home, self._room, self._digest, outcome)
