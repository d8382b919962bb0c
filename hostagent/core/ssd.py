"""The SSD tier: which blocks go down to it, which come back, and what is believed after a crash.

Owns: what lies where in the tier's files, when a copy leaves DRAM for it, the order in which bytes,
entries and flushes are written, what is read for whom, and what is done about a disk that fails.
Must not know: files, threads or clocks (a disk does the orders, `kvcast.hostagent.tiers.ssd`), or
what a get does with a block (`reads`).

A further arena (persistent memory, or memory of another kind, by the path of a file) is such a tier
as well, its file a disk that is fast; then this tier's DRAM is the arena above it (`lower_tiers`).

Blocks on disk are copies of a store of their own, the *shelf*: it has quotas, policies, times to
live and pins as the store of DRAM has. A block may lie in both: then DRAM's copy is *clean*, and
goes without being written.

**Down.** When DRAM is fuller than a high mark, the copies that its policies would give up next are
written, until it is below a low one; a copy that nobody has used meanwhile then goes from DRAM. The
same for a namespace that nears its quota. Where the marks are follows from what comes, and from how
long it takes to make room for it (`headroom`). Copies are written some at a time, in rounds, each
of which ends with a flush:

| what is done with some copies | in round |
|---|---|
| they are chosen; the table's pages of what has made room for them are written | n |
| their bytes are written, where by the table on the disk nothing lies | n + 1 |
| the table's pages with their entries are written; then they are on the shelf | the next |

So whenever a disk stops, the table names whole blocks only, if the disk keeps to flushes; if it
does not, the blocks' digests tell. A round does all three at once, for others each: while it
writes the bytes of some, the table of those before is written, and those that come next are
chosen. Their bytes are given to the disk *ahead* of their round, wherever nothing has to go from
the table first, so that it has always something to do, while a flush is waited for, too. They are
of the next round nevertheless: this one's flush says nothing of them, but if it fails, they count
as lost with the others, since the next would say nothing of what this one has lost. What DRAM needs
sooner than the disk can take it is evicted as without a disk, and counted
(`ssd_left_unwritten_total`): nobody waits for a disk but who reads from it.

**Up.** A block that is read is brought to DRAM, in the room of a fetch, and its digest looked at.
It goes again before all others if it was not read before, and is not used again (it is *passing*):
to have been read once is no heat. One that comes again within `HEAT_S` stays as others
do.

**After a crash** entries are believed that prove themselves, if their namespace means what it did,
and no other block lies there; bytes are checked when they are read. Nothing goes down before all
entries are claimed, since nobody knows what is free.

**A disk that fails.** A block that cannot be read, or is damaged, is forgotten. After `MAX_ERRORS`
in a row a file is given up until the agent starts again. A read that takes longer than `patience_s`
is not waited for by gets that can ask elsewhere.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Final

from kvcast.hostagent.core.headroom import Headroom
from kvcast.hostagent.core.store import (
    COMMITTED,
    EVICTED,
    NO_ROOM,
    Copy,
    StaleReservationError,
    Store,
    StoreError,
    StoreRules,
)
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.counting_filter import CountingFilter
from kvcast.hostagent.tiers.ssd.layout import (
    ENTRIES_PER_PAGE,
    NO_ENTRY,
    PAGE_BYTES,
    Entry,
    Formatted,
    Scanned,
    block_of,
    pack_entry,
)
from kvcast.hostagent.tiers.ssd.orders import DONE, NOTHING, Kind, Order
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.messages.wire import BlockId

HEAT_S: Final = 600.0
MAX_ERRORS: Final = 8
RETRY_S: Final = 1.0
"""After an error in writing, before the next try."""
CLAIMS_PER_STEP: Final = 256
_PAGES_BETWEEN: Final = 8
"""Pages of the table that may lie, unchanged, between two that are written at once."""
_PAGES_AT_ONCE: Final = 256
_PASSING_KNOWN: Final = 65536
_REFUSED_A_ROUND: Final = 64
"""Copies that find no room on the shelf, before a round of choosing ends."""

SSD: Final = "ssd"
ARENA: Final = "arena"
GONE: Final = "not on disk any more"
DAMAGED: Final = "damaged on disk"


@dataclass(frozen=True)
class SsdRules:
    """When blocks move, and how much at once."""

    high_share: float | None = None
    """Of the arena, or of a namespace's quota, in use: more, and copies go down. None: as much as
    leaves the `headroom`."""
    low_share: float = 0.0
    """Until no more is in use; where `high_share` is None, what leaves half as much again."""
    batch_bytes: int = 128 << 20
    """Written in a round, at most; but one block at least."""
    batch_share: float = 1 / 16
    """Of the arena, the same; copies of three rounds are held at once."""
    batch_blocks: int = 512
    max_reads: int = 32
    """Blocks that are being read at once."""
    max_reads_waiting: int = 4096
    """Blocks that wait for their turn; one more counts as not there."""
    patience_s: float = 1.0
    """How long a read may take before the block is asked for elsewhere."""


@dataclass(slots=True)
class SsdCounters:
    """Totals since the start."""

    demotions_room: int = 0
    """Blocks written since DRAM was nearly full."""
    demotions_quota: int = 0
    """Blocks written since their namespace's quota of DRAM was nearly full."""
    demoted_bytes: int = 0
    demotions_clean: int = 0
    """Blocks that left DRAM without being written, since they lay on disk already."""
    demotions_refused: int = 0
    """Blocks for which there was no room on disk: the namespace's quota there, or all is in use."""
    demotions_cancelled: int = 0
    """Blocks that were dropped or had expired when they were written."""
    promotions: int = 0
    promoted_bytes: int = 0
    promotions_hot: int = 0
    """Blocks that came for the second time, and stay in DRAM as others do."""
    passed: int = 0
    """Blocks that came once, were not used again, and went first."""
    left_unwritten: int = 0
    """Blocks that DRAM evicted before they could be written."""
    superseded: int = 0
    """Blocks on disk that were put again with other bytes."""
    reads_refused: int = 0
    """Reads of blocks that are there, for which the queue was full."""
    read_errors: int = 0
    write_errors: int = 0
    damaged: int = 0
    """Blocks whose bytes did not have their digest; nobody got them."""
    entries_claimed: int = 0
    entries_refused: int = 0
    """Entries found at the start that did not prove themselves, overlapped others, or whose
    namespace is another."""
    entries_truncated: int = 0
    """Entries found at the start whose blocks lay beyond the end of a file that had become
    shorter."""
    pages_unreadable: int = 0
    files_failed: int = 0
    """Files that were given up."""


@dataclass
class _File:
    """One file, and where it lies among all files' space."""

    number: int
    formatted: Formatted
    first_slab: int
    errors: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    """In a row, each: there are disks that only cannot be written any more."""
    failed: bool = False
    cleared: int = 0
    """What has gone from the table up to this number has gone from the disk, too."""


@dataclass(slots=True, eq=False)
class _Move:
    """A copy on its way down: pinned in DRAM, reserved on the shelf."""

    copy: Copy
    room: Copy
    used_at: float
    meaning: int
    for_quota: bool
    cleared: int
    """What must have gone from the disk's table before its bytes may be written, as `_File`."""
    taken_bytes: int
    """What room had been taken of DRAM in all when there was more in use than the high mark."""
    error: str = DONE


@dataclass(slots=True, eq=False)
class _Round:
    """What is written between two flushes."""

    moves: list[_Move] = field(default_factory=list)
    """Copies whose bytes are."""
    touched: set[int] = field(default_factory=set)
    """Files that are to be flushed at its end."""
    left: int = 0
    """Its orders that are not done, or flushes at its end."""


class _Phase(Enum):
    IDLE = 0
    WRITING = 1
    FLUSHING = 2


@dataclass(slots=True, eq=False)
class _Read:
    """A block that somebody wants in DRAM. `begin(size)` gives the room, or None;
    `ended(now, error, digest, committed_at)` is called once."""

    block: BlockId
    begin: Callable[[int], memoryview | None]
    ended: Callable[[float, str, int, float], None]


@dataclass
class _Table:
    """What the table says, or is to say, of each unit, and which of its pages are not written. The
    shelf's `PinnedElsewhere`: what goes from the shelf, goes from the table."""

    unit_bytes: int
    entries: dict[int, bytes] = field(default_factory=dict)
    dirty: dict[int, None] = field(default_factory=dict)
    """Pages, by the number of the unit that begins each."""
    clears: bool = False
    """Whether something goes with them."""
    cleared: int = 0
    """How often something has gone."""
    filter: CountingFilter = field(default_factory=CountingFilter)
    """Of the blocks that have entries, among others."""

    def keep(self, unit: int, data: bytes) -> None:
        assert unit not in self.entries
        self.entries[unit] = data
        self.filter.add(block_of(data))

    def enter(self, unit: int, data: bytes) -> None:
        self.keep(unit, data)
        self.dirty[unit - unit % ENTRIES_PER_PAGE] = None

    def clear(self, unit: int) -> None:
        data = self.entries.pop(unit, None)
        if data is not None:
            self.filter.remove(block_of(data))
            self.overwrite(unit)

    def overwrite(self, unit: int) -> None:
        """What lies there on the disk is not to be believed."""
        self.dirty[unit - unit % ENTRIES_PER_PAGE] = None
        self.clears = True
        self.cleared += 1

    def take_dirty(self, end_of: Callable[[int], int]) -> list[range]:
        """Pages that are to be written, as runs of units; no longer dirty. `end_of`: up to where
        those of the same file go. Pages in between, that are as they were, are written with them:
        one longer order is cheaper."""
        runs: list[range] = []
        far = _PAGES_BETWEEN * ENTRIES_PER_PAGE
        most = _PAGES_AT_ONCE * ENTRIES_PER_PAGE
        for first in sorted(self.dirty):
            end = first + ENTRIES_PER_PAGE
            last = runs[-1] if runs else range(0)
            if (
                last
                and first - last.stop <= far
                and end - last.start <= most
                and end <= end_of(last.start)
            ):
                runs[-1] = range(last.start, end)
            else:
                runs.append(range(first, end))
        self.dirty.clear()
        self.clears = False
        return runs

    def write_again(self, run: range) -> None:
        """These pages are not on the disk as they should be."""
        self.dirty.update(dict.fromkeys(run[::ENTRIES_PER_PAGE]))
        self.clears = True

    def pages(self, run: range) -> bytes:
        return b"".join(map(self.entries.get, run, itertools.repeat(NO_ENTRY)))

    def publish(self, copy: Copy) -> None:
        pass

    def withdraw(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self.clear(copy.offset // self.unit_bytes)

    def refresh(self) -> None:
        pass

    def held(self, namespace: int, chain: bytes) -> tuple[int, int]:
        return 0, 0


class SsdTier:
    """See the module's description. It is the store's `Below`. `take_orders` is to be called after
    `wake`, and when `get_timer` says so."""

    is_shared: Final = False
    is_counted: Final = False
    """As `store.Below`: the filter is of all tiers together."""

    def __init__(
        self,
        rules: SsdRules,
        store: Store,
        memory: memoryview,
        files: Sequence[Formatted],
        epoch_s: float,
        tier: str = SSD,
        name: str = SSD,
    ) -> None:
        """`store`, `memory`: whose copies go down, and their bytes; `files`: all cut into the same
        units and slabs; `epoch_s`: what is to be added to the caller's clock to have seconds since
        1970, stated anew where that may have changed, as clocks are set; `tier`: what readers are
        told; `name`: with which its numbers begin."""
        self.tier = tier
        self.name = name
        self.above: SsdTier | None = None
        """The tier to which its blocks do not return when they are read: DRAM is above that."""
        self.rules = rules
        self.counters = SsdCounters()
        self.orders: list[Order] = []
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to do: `take_orders`, soon, but not at once."""
        self._woken = False
        self.became_ready: Callable[[], None] = lambda: None
        """Called when something was found at the start, and all of it is known (`is_ready`)."""
        self.meaning_of: Callable[[int], int | None] = lambda _namespace: None
        """What a namespace means to the pool now."""
        self._store = store
        self._memory = memory
        self.epoch_s = epoch_s
        cut = files[0].cut
        self._unit_bytes, self._slab_bytes = cut.unit_bytes, cut.slab_bytes
        self._files: list[_File] = []
        self._begins: list[int] = []
        """Where each file's blocks begin on the shelf."""
        first = 0
        for number, formatted in enumerate(files):
            assert (formatted.cut.unit_bytes, formatted.cut.slab_bytes) == (
                *(self._unit_bytes, self._slab_bytes),
            )
            self._files.append(_File(number, formatted, first))
            self._begins.append(first * self._slab_bytes)
            first += formatted.cut.slabs + 1
        self._units_per_slab = self._slab_bytes // self._unit_bytes
        # Units are numbered through all files; each begins with a page of the table.
        assert self._units_per_slab % ENTRIES_PER_PAGE == 0
        allocator = Allocator((first - 1) * self._slab_bytes, self._slab_bytes, self._unit_bytes)
        for file in self._files[1:]:
            allocator.retire(file.first_slab - 1)  # no block lies in two files
        self.shelf = Store(allocator)
        self._table = _Table(self._unit_bytes)
        self.shelf.elsewhere = self._table
        self._allowed: Callable[[int], bool] = lambda _namespace: True
        self._forbidden: set[int] = set()
        self._due = False
        self._draining = False
        self._retry_at: float | None = None
        self._phase = _Phase.IDLE
        self._round = _Round()
        self._ahead = _Round()
        """The next one, as far as its orders are given already."""
        self._half = False
        """Whether the other half of the round's orders is still to be given."""
        self._chosen: list[_Move] = []
        self._written: list[_Move] = []
        """Their bytes are on the disk."""
        self._entering: list[_Move] = []
        self._entered: list[_Move] = []
        """They are through, in one way or the other."""
        self._runs: list[range] = []
        """The table's pages of this round."""
        self._clearing: int | None = None
        """What has gone from the table up to this number goes from the disk in this round; None:
        the table is not written."""
        self._failed: set[int] = set()
        """Files of which the table was not written in this round, or that were not flushed."""
        self._unscanned = sum(formatted.found for formatted in files)
        self._found: dict[BlockId, tuple[int, Entry]] = {}
        self._was_ready = self.is_ready
        self._order_of_claims: list[BlockId] | None = None
        self._commits = 0
        self._begun = False
        self._reads: deque[_Read] = deque()
        self._reading = 0
        self._headroom = Headroom(store.allocator.capacity_bytes)
        self._taken_bytes = 0
        """As `_Move`, of those that are being chosen."""
        self._passing: BoundedMap[BlockId, float] = BoundedMap(_PASSING_KNOWN)
        self._read_at: BoundedMap[BlockId, float] = BoundedMap(_PASSING_KNOWN)
        self._now = 0.0

    # --- the store's side ---------------------------------------------------------------------

    def holds(self, block: BlockId) -> bool:
        """As `store.Below`."""
        return self._look(block) is not None

    def size_of(self, block: BlockId) -> int:
        """As `store.Below`."""
        held = self._look(block)
        return 0 if held is None else held.size_bytes

    def place_of(self, block: BlockId) -> tuple[bytes, int]:
        """As `store.Below`."""
        held = self._look(block)
        return (b"", 0) if held is None else (held.parent, held.depth)

    def _look(self, block: BlockId) -> Copy | None:
        if block in self._found and self._begun:
            self._claim(block)
        return self.shelf.peek(block)

    def committed(self, copy: Copy) -> None:
        """As `store.Below`."""
        held = self._look(copy.block)
        if held is not None and held.digest != copy.digest:
            self.counters.superseded += 1
            self.shelf.drop(copy.block)
        self._headroom.came(self._now, copy.reserved_bytes)
        if self._is_over() or self._table.dirty or self._is_near_quota(copy.block.namespace):
            self._ask_for_step()

    def evicting(self, copy: Copy) -> None:
        """As `store.Below`."""
        if not self.holds(copy.block):
            self.counters.left_unwritten += 1
            if self._store.used_bytes > self._marks()[0] and not any(True for _ in self._moves()):
                self._headroom.ran_out(self._now)

    def drop(self, block: BlockId) -> bool:
        """As `store.Below`."""
        found = self._drop_found(block)
        self._ask_for_step()
        return self.shelf.drop(block) or found

    def drop_namespace(self, namespace: int, *, at_once: bool = True) -> None:
        """As `store.Below`."""
        for block in [b for b in self._found if b.namespace == namespace]:
            self._drop_found(block)
        self.shelf.drop_namespace(namespace, at_once=at_once)
        self._ask_for_step()

    def why_gone(self, block: BlockId) -> str:
        """As `store.Below`."""
        why = self.shelf.why_gone(block)
        return f"{EVICTED}_{self.tier}" if why == EVICTED else why

    # --- rules and time -----------------------------------------------------------------------

    def configure(self, rules: dict[int, StoreRules], forbidden: set[int]) -> None:
        """State the rules of all namespaces here, and which may have nothing here."""
        for namespace in forbidden - self._forbidden:
            self.drop_namespace(namespace)
        self._forbidden = set(forbidden)
        self.shelf.configure(rules)
        self._ask_for_step()

    def advance(self, now: float) -> None:
        """It is `now`; what has outlived its time is gone."""
        self._now = max(self._now, now)
        self.shelf.advance(now)

    def get_timer(self, now: float) -> float | None:
        """When `take_orders` is to be called; None = when something happens."""
        times = [at for at in (self.shelf.next_expiry(),) if at is not None]
        if self._phase is _Phase.IDLE and self._retry_at is not None:
            times.append(self._retry_at)
        elif self._is_busy():
            times.append(now)
        return min(times, default=None)

    def _is_busy(self) -> bool:
        if self._claims_left:
            return True
        return self._due and self._phase is _Phase.IDLE

    @property
    def _claims_left(self) -> bool:
        return self._begun and not self._unscanned and bool(self._found)

    @property
    def is_ready(self) -> bool:
        """Whether everything that was found at the start is known."""
        return not self._unscanned and not self._found

    def look(self) -> None:
        """Find out anew whether something is to go down."""
        self._ask_for_step()

    @property
    def is_behind(self) -> bool:
        """Whether DRAM holds more than it should, of what can go down."""
        return self._due or any(True for _ in self._moves())

    @property
    def capacity_bytes(self) -> int:
        """For blocks, of the files in service."""
        return sum(f.formatted.cut.slabs * self._slab_bytes for f in self._files if not f.failed)

    @property
    def most_blocks(self) -> int:
        """More cannot lie here."""
        units = self._units_per_slab
        return sum(file.formatted.cut.slabs * units for file in self._files)

    def use_filter(self, of_blocks: CountingFilter) -> None:
        """Have all blocks that lie here be in this filter, as long as they do."""
        table = self._table
        for block in itertools.chain(self._found, map(block_of, table.entries.values())):
            of_blocks.add(block)
        table.filter = of_blocks

    def values(self) -> dict[str, float]:
        """Values by name, the counters' among them."""
        return {
            f"{self.name}_{name}": float(value)
            for name, value in (
                ("bytes", self.capacity_bytes),
                ("used_bytes", self.shelf.used_bytes),
                ("blocks", len(self.shelf)),
                ("reads_waiting", len(self._reads) + self._reading),
                ("writes_waiting", sum(1 for _ in self._moves())),
                ("files", sum(not file.failed for file in self._files)),
                ("entries_left", len(self._found)),
                ("headroom_bytes", self._store.allocator.capacity_bytes - self._marks()[0]),
                ("evictions_total", self.shelf.counters.evictions),
                ("expired_total", self.shelf.counters.expired),
            )
        } | {
            f"{self.name}_{item.name}_total": float(getattr(self.counters, item.name))
            for item in fields(self.counters)
        }

    def take_orders(self, now: float) -> list[Order]:
        """What the disk is to do now."""
        self._woken = False
        self._step(now)
        orders, self.orders = self.orders, []
        return orders

    def _step(self, now: float) -> None:
        """Claim some of what was found; begin to write what is to go down, and what has gone from
        the table."""
        self.advance(now)
        if self._claims_left:
            self._claim_some()
        if self.is_ready and not self._was_ready:
            self._was_ready = True
            self.became_ready()
        if self._phase is _Phase.IDLE:
            if self._retry_at is not None:
                if now < self._retry_at:
                    return
                self._retry_at = None
            self._due = False
            if not self.is_ready or not self._begun:
                return
            if not self._write_blocks():
                self._write_table()
                if self._phase is _Phase.IDLE:
                    self._write_blocks()
        elif self._half:
            self._half = False
            if self._retry_at is None:
                self._write_table()
            elif not self._round.left:
                self._orders_done()

    # --- down: what ---------------------------------------------------------------------------

    def _marks(self, quota_bytes: int = 0) -> tuple[float, float]:
        """(how much of DRAM, or of a quota, is in use before copies go down; until no more is)."""
        of_bytes = quota_bytes or self._store.allocator.capacity_bytes
        high, low = self.rules.high_share, self.rules.low_share
        if high is not None:
            return high * of_bytes, low * of_bytes
        free_bytes = self._headroom.wanted_bytes(self._now, of_bytes)
        return of_bytes - free_bytes, of_bytes - 1.5 * free_bytes

    def _is_over(self) -> bool:
        if self._store.is_leaving:  # that makes room
            return False
        return self._draining or self._store.used_bytes > self._marks()[0]

    def _is_near_quota(self, namespace: int) -> bool:
        store = self._store
        quota = store.quota_of(namespace)
        return bool(quota) and store.namespace_bytes(namespace) > self._marks(quota)[0]

    def _moves(self) -> Iterator[_Move]:
        return itertools.chain(
            *(self._chosen, self._round.moves, self._ahead.moves),
            *(self._written, self._entering, self._entered),
        )

    def _choose(self) -> None:
        """Find copies that are to go down: pinned here and reserved on the shelf. Those that lie
        there already go from DRAM at once."""
        assert not self._chosen
        store = self._store
        over_bytes = max(0, int(store.used_bytes - self._marks()[0]))
        self._taken_bytes = store.counters.taken_bytes - over_bytes
        if self._is_over():
            store.elsewhere.refresh()
            _, low = self._marks()
            self._draining = self._choose_some(None, lambda: store.used_bytes, low)
        for namespace in store.namespaces():
            quota = store.quota_of(namespace)
            if self._is_near_quota(namespace):
                used = self._used_of(namespace)
                self._choose_some(namespace, used, self._marks(quota)[1])

    def _used_of(self, namespace: int) -> Callable[[], int]:
        return lambda: self._store.namespace_bytes(namespace)

    def _choose_some(self, namespace: int | None, used: Callable[[], int], low: float) -> bool:
        """Choose until so little will be in use; whether there is more to do after this batch."""
        store, rules = self._store, self.rules
        refused: set[BlockId] = set()
        moving = sum(
            m.copy.reserved_bytes
            for m in self._moves()
            if namespace is None or m.copy.block.namespace == namespace
        )
        batch_bytes = min(
            rules.batch_bytes, int(rules.batch_share * store.allocator.capacity_bytes)
        )
        chosen = self._chosen
        taken = sum(move.copy.reserved_bytes for move in chosen)

        def may(copy: Copy) -> bool:
            block = copy.block
            return block not in refused and block.namespace not in self._forbidden

        while used() - moving > low:
            if chosen and (taken >= batch_bytes or len(chosen) >= rules.batch_blocks):
                return True
            copy = self._take_passing(namespace)
            passing = copy is not None
            if copy is None:
                copy = store.next_to_leave(may, namespace)
            if copy is None:
                store.when_freed = self._ask_for_step  # all the rest may be pinned
                return False
            if passing or self._lies_there(copy):
                self.counters.demotions_clean += 1
                store.evict(copy, namespace)
                if copy.state == COMMITTED:  # others of its prefix stay
                    refused.add(copy.block)
                continue
            move = self._make_room(copy, namespace is not None)
            if move is None:
                refused.add(copy.block)
                self.counters.demotions_refused += 1
                if len(refused) >= _REFUSED_A_ROUND:
                    return False
                continue
            moving += copy.reserved_bytes
            taken += copy.reserved_bytes
            chosen.append(move)
        return False

    def _take_passing(self, namespace: int | None) -> Copy | None:
        """A copy that came from disk, was not used since, and still lies there."""
        for block, used_at in list(itertools.islice(self._passing.items(), _REFUSED_A_ROUND)):
            if namespace is not None and block.namespace != namespace:
                continue
            del self._passing[block]
            copy = self._store.known(block)
            if copy is None or copy.pins or copy.used_at != used_at:
                continue
            if not self._lies_there(copy) and not self.shelf.below.holds(block):
                continue
            self.counters.passed += 1
            return copy
        return None

    def _lies_there(self, copy: Copy) -> bool:
        """Whether a copy is clean. One with other bytes, which was found after this one came, is
        not kept."""
        held = self._look(copy.block)
        if held is not None and held.digest != copy.digest:
            self.counters.superseded += 1
            self.shelf.drop(copy.block)
            return False
        return held is not None

    def _make_room(self, copy: Copy, for_quota: bool) -> _Move | None:
        meaning = self.meaning_of(copy.block.namespace)
        if meaning is None:
            return None
        try:
            room = self.shelf.reserve(
                copy.block, copy.size_bytes, parent=copy.parent, depth=copy.depth
            )
        except StoreError:
            return None
        used_at = copy.used_at
        self._store.pin(copy)
        return _Move(
            *(copy, room, used_at, meaning, for_quota, self._table.cleared, self._taken_bytes)
        )

    # --- down: how ----------------------------------------------------------------------------

    def _file_of(self, offset: int) -> _File:
        return self._files[bisect_right(self._begins, offset) - 1]

    def _order(self, kind: Kind, file: _File, offset: int, view: memoryview) -> Order:
        """An order of the present round, for the table or a flush."""

        def ended(now: float, error: str, _digest: int) -> None:
            self._note_end(file, kind, error)
            if error:
                self._failed.add(file.number)
            self._one_done(self._round, now)

        return Order(kind, file.number, ended, offset, view, hurried=True)

    def _write_blocks(self) -> bool:
        """The first half of a round: the bytes of what was chosen before; whether there are any.
        The other half comes when the disk is busy with this one."""
        orders = self._bytes_of_chosen(self._round)
        self._begin(orders)
        self._half = bool(orders)
        if orders:
            self._wake()
        return bool(orders)

    def _bytes_of_chosen(self, of: _Round) -> list[Order]:
        """Orders of a round for what was chosen, where by the disk's table nothing lies."""
        chosen, self._chosen = self._chosen, []
        orders = []
        for move in chosen:
            file = self._file_of(move.room.offset)
            if not file.failed and move.cleared > file.cleared:
                self._chosen.append(move)  # what lay there is still in the disk's table
                continue
            if file.failed:
                move.error = "the file was given up"
                self._entered.append(move)
                continue
            of.moves.append(move)
            of.touched.add(file.number)
            copy = move.copy
            view = self._memory[copy.offset : copy.offset + copy.size_bytes]
            orders.append(self._write_of(move, of, file, view))
        of.left += len(orders)
        return orders

    def _write_table(self) -> None:
        """The second half: the table, where it has changed, with the entries of what was written
        in the round before; and what is to be written in the next is chosen."""
        self._finish()
        if not self._chosen and not self._ahead.moves:
            self._choose()
        assert not self._entering
        self._entering, self._written = self._written, []
        for move in self._entering:
            if not move.error and move.copy.state == COMMITTED:
                self._enter(move)
        table = self._table
        clears = table.clears
        self._clearing = table.cleared
        orders = []
        for run in table.take_dirty(self._end_of_file):
            file = self._file_of_unit(run.start)
            if file.failed:
                continue
            self._runs.append(run)
            if clears:
                self._round.touched.add(file.number)
            local = run.start - file.first_slab * self._units_per_slab
            offset = PAGE_BYTES + local // ENTRIES_PER_PAGE * PAGE_BYTES
            orders.append(self._order(Kind.WRITE, file, offset, memoryview(table.pages(run))))
        self._round.left += len(orders)
        self._begin([*orders, *self._bytes_of_chosen(self._ahead)])
        if not self._round.left:
            self._orders_done()

    def _end_of_file(self, unit: int) -> int:
        file = self._file_of_unit(unit)
        return (file.first_slab + file.formatted.cut.slabs) * self._units_per_slab

    def _file_of_unit(self, unit: int) -> _File:
        return self._file_of(unit * self._unit_bytes)

    def _write_of(self, move: _Move, of: _Round, file: _File, view: memoryview) -> Order:
        def ended(now: float, error: str, _digest: int) -> None:
            view.release()
            move.error = move.error or error
            self._note_end(file, Kind.WRITE, error)
            self._one_done(of, now)

        return Order(Kind.WRITE, file.number, ended, self._offset_in(file, move.room), view)

    def _offset_in(self, file: _File, copy: Copy) -> int:
        first = file.first_slab * self._slab_bytes
        return file.formatted.cut.blocks_offset + copy.offset - first

    def _begin(self, orders: list[Order]) -> None:
        """Give orders of the present round, or of one that begins with them."""
        if orders:
            self._phase = _Phase.WRITING
            self._give(orders)

    def _give(self, orders: list[Order]) -> None:
        self.orders += orders
        self._wake()

    def _ask_for_step(self) -> None:
        self._due = True
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.wake()

    def _one_done(self, of: _Round, now: float) -> None:
        of.left -= 1
        self._now = max(self._now, now)
        if of is not self._round or of.left:
            return
        if self._phase is _Phase.FLUSHING:
            self._round_done()
        elif not self._half:
            self._orders_done()

    def _orders_done(self) -> None:
        """All orders of this round were given, and are done."""
        touched = self._round.touched
        if not touched:
            self._round_done()
            return
        self._phase = _Phase.FLUSHING
        files = [self._files[number] for number in sorted(touched)]
        self._round.left = len(files)
        self._give([self._order(Kind.FLUSH, file, 0, NOTHING) for file in files])

    def _round_done(self) -> None:
        failed, self._failed = self._failed, set()
        for run in self._runs:
            if self._file_of_unit(run.start).number in failed:
                self._table.write_again(run)
        for file in self._files:
            if self._clearing is not None and file.number not in failed:
                file.cleared = self._clearing
        moves = self._round.moves
        for move in itertools.chain(moves, self._entering, self._ahead.moves):
            if self._file_of(move.room.offset).number in failed:
                move.error = move.error or "the file was not written, or not flushed"
        if failed:
            self._retry_at = self._now + RETRY_S
        self._runs, self._clearing = [], None
        for move in moves:
            (self._entered if move.error else self._written).append(move)
        self._entered += self._entering
        self._entering = []
        self._round, self._ahead = self._ahead, _Round()
        self._half = bool(self._round.moves)
        self._phase = _Phase.WRITING if self._half else _Phase.IDLE
        if any(move.error for move in self._entered):
            self._finish()  # and not after the pause that follows
        if self._half:
            self._wake()
        elif self._due or self._table.dirty or self._draining or any(True for _ in self._moves()):
            self._ask_for_step()

    def _enter(self, move: _Move) -> None:
        copy, room = move.copy, move.room
        file = self._file_of(room.offset)
        unit = room.offset // self._unit_bytes
        self._commits += 1
        entry = Entry(
            unit - file.first_slab * self._units_per_slab,
            copy.block,
            copy.size_bytes,
            copy.digest,
            move.meaning,
            self._commits,
            copy.committed_at + self.epoch_s,
            copy.parent,
            copy.depth,
        )
        self._table.enter(unit, pack_entry(entry, file.formatted.identity))

    def _finish(self) -> None:
        """What was written and entered is on the shelf, and goes from DRAM."""
        moves, self._entered = self._entered, []
        self._store.when_freed = None  # copies that are unpinned here are looked at anyway
        chosen_at = [move.taken_bytes for move in moves if not move.error]
        if chosen_at:
            taken_bytes = self._store.counters.taken_bytes - min(chosen_at)
            self._headroom.measured(self._now, taken_bytes)
        _, low = self._marks()
        for move in moves:
            copy, room = move.copy, move.room
            file = self._file_of(room.offset)
            wrong = bool(move.error) or file.failed
            if wrong:
                self._retry_at = self._now + RETRY_S
            unused = copy.used_at == move.used_at
            landed = False
            if wrong or copy.state != COMMITTED:
                self.counters.demotions_cancelled += not wrong
                self._table.clear(room.offset // self._unit_bytes)
                self.shelf.abort(room)
            else:
                landed = self._land(move)
            self._store.unpin(copy)
            if not landed or copy.state != COMMITTED or copy.pins:
                continue
            self.counters.demoted_bytes += copy.size_bytes
            if move.for_quota:
                self.counters.demotions_quota += 1
            else:
                self.counters.demotions_room += 1
            if unused and (move.for_quota or self._store.used_bytes > low):
                self._store.evict(copy, copy.block.namespace if move.for_quota else None)
        for file in self._files:
            if file.failed:
                self._retire(file)

    def _land(self, move: _Move) -> bool:
        copy, room = move.copy, move.room
        unit = room.offset // self._unit_bytes
        try:
            held = self.shelf.commit(room, copy.digest, home=copy.home, since=copy.committed_at)
        except StaleReservationError:
            self._table.clear(unit)
            return False
        if held is not room:
            self._table.clear(unit)
        return True

    @property
    def patience_s(self) -> float:
        """As `SsdRules`."""
        return self.rules.patience_s

    # --- up -----------------------------------------------------------------------------------

    def read(
        self,
        block: BlockId,
        begin: Callable[[int], memoryview | None],
        ended: Callable[[float, str, int, float], None],
    ) -> bool:
        """Bring a block that is held into the room that `begin(size_bytes)` gives; `ended(now,
        error, digest, committed_at)` is called once, with DONE if it is whole. False if it cannot
        be read: it is not here, or too many others wait."""
        if self._look(block) is None:
            return False
        if len(self._reads) >= self.rules.max_reads_waiting:
            self.counters.reads_refused += 1
            return False
        self._reads.append(_Read(block, begin, ended))
        self._begin_reads()
        return True

    def _begin_reads(self) -> None:
        while self._reads and self._reading < self.rules.max_reads:
            self._begin_read(self._reads.popleft())

    def _begin_read(self, read: _Read) -> None:
        copy = self.shelf.get(read.block)
        view = read.begin(copy.size_bytes) if copy is not None else None
        # To make room may have sent the block away, or others.
        copy = self.shelf.peek(read.block)
        if copy is None or view is None:
            read.ended(self._now, GONE if copy is None else NO_ROOM, 0, 0.0)
            return
        self.shelf.pin(copy)
        self._reading += 1
        file = self._file_of(copy.offset)
        held = copy

        def ended(now: float, error: str, digest: int) -> None:
            self._reading -= 1
            self._note_end(file, Kind.READ, error)
            if not error and digest != held.digest:
                self.counters.damaged += 1
                error = DAMAGED
            if held.state != COMMITTED:
                error = error or GONE
            elif error:
                self.shelf.give_up(held)
                self._ask_for_step()
            self.shelf.unpin(held)
            if not error:
                self.counters.promotions += 1
                self.counters.promoted_bytes += held.size_bytes
            read.ended(now, error, held.digest, held.committed_at)
            if file.failed:
                self._retire(file)
            self._begin_reads()

        self._give([Order(Kind.READ, file.number, ended, self._offset_in(file, copy), view)])

    def promoted(self, copy: Copy) -> None:
        """A block that was read is in DRAM now: it is passing, unless it was read before."""
        if self.above is not None:
            self.above.promoted(copy)  # from there it would go down again
            return
        block = copy.block
        before = self._read_at.get(block)
        self._read_at[block] = self._now
        if before is not None and self._now - before <= HEAT_S:
            self.counters.promotions_hot += 1
        else:
            self._passing[block] = copy.used_at

    # --- what was found -----------------------------------------------------------------------

    def found(self, number: int, scanned: Scanned) -> None:
        """A piece of a file's table."""
        file = self._files[number]
        cut, first = file.formatted.cut, file.first_slab * self._units_per_slab
        self.counters.pages_unreadable += scanned.unreadable_pages
        for local in scanned.refused:
            self._refuse(first + local)
        for entry in scanned.entries:
            unit = first + entry.unit
            end = cut.blocks_offset + entry.unit * self._unit_bytes + entry.size_bytes
            self._commits = max(self._commits, entry.order)
            other = self._found.get(entry.block)
            if end > file.formatted.whole_bytes:
                self.counters.entries_truncated += 1
                self._refuse(unit)
            elif other is not None and other[1].order >= entry.order:
                self._refuse(unit)
            else:
                if other is not None:
                    self._refuse(other[0])
                else:
                    self._table.filter.add(entry.block)
                self._found[entry.block] = unit, entry

    def _take_found(self, block: BlockId) -> tuple[int, Entry] | None:
        found = self._found.pop(block, None)
        if found is not None:
            self._table.filter.remove(block)
        return found

    def _drop_found(self, block: BlockId) -> bool:
        """A block that was found is to be claimed neither here nor by the next process; whether it
        was."""
        found = self._take_found(block)
        if found is not None:
            self._table.overwrite(found[0])
        return found is not None

    def scanned(self) -> None:
        """All pieces of one file's table were handed over."""
        self._unscanned -= 1
        self._ask_for_step()

    def begin(self) -> None:
        """It is known what namespaces mean: what was found can be claimed."""
        self._begun = True
        self._ask_for_step()

    def _refuse(self, unit: int) -> None:
        """What the table says there is to be overwritten."""
        self.counters.entries_refused += 1
        self._table.overwrite(unit)

    def _claim_some(self) -> None:
        if self._order_of_claims is None:
            # Those that were committed last come last: policies hear of them in this order.
            self._order_of_claims = sorted(
                self._found, key=lambda block: -self._found[block][1].order
            )
        for _ in range(min(CLAIMS_PER_STEP, len(self._order_of_claims))):
            self._claim(self._order_of_claims.pop())
        if not self._order_of_claims:
            assert not self._found, "what was found is not claimed"
            self._ask_for_step()

    def _claim(self, block: BlockId) -> None:
        found = self._take_found(block)
        if found is None:
            return
        unit, entry = found
        meaning = self.meaning_of(block.namespace)
        file = self._file_of_unit(unit)
        copy = None
        if (
            meaning is not None
            and meaning == entry.meaning
            and block.namespace not in self._forbidden
            and not file.failed
        ):
            since = entry.committed_at - self.epoch_s
            if not since <= self._now:  # nor is it a number at all
                since = self._now
            copy = self.shelf.adopt(
                *(block, entry.size_bytes, unit * self._unit_bytes, COMMITTED, entry.digest),
                since=since,
                parent=entry.parent,
                depth=entry.depth,
            )
        if copy is None:
            self._refuse(unit)
            return
        self.counters.entries_claimed += 1
        self._table.keep(unit, pack_entry(entry, file.formatted.identity))

    # --- disks that fail ----------------------------------------------------------------------

    def _note_end(self, file: _File, kind: Kind, error: str) -> None:
        """An order has ended. A file that only fails is given up."""
        if not error:
            file.errors[kind] = 0
            return
        file.errors[kind] += 1
        self.counters.read_errors += kind is Kind.READ
        self.counters.write_errors += kind is not Kind.READ
        if file.errors[kind] >= MAX_ERRORS and not file.failed:
            file.failed = True
            self.counters.files_failed += 1
            for block in self.shelf.blocks():
                copy = self.shelf.peek(block)
                if copy is not None and self._file_of(copy.offset) is file:
                    self.shelf.give_up(copy)
            for block in [b for b, (unit, _) in self._found.items() if self._is_in(unit, file)]:
                self._take_found(block)
            self._retire(file)

    def _is_in(self, unit: int, file: _File) -> bool:
        return self._file_of_unit(unit) is file

    def _retire(self, file: _File) -> None:
        """Nothing new goes there; what is still being written or read there goes first."""
        for index in range(file.first_slab, file.first_slab + file.formatted.cut.slabs):
            self.shelf.allocator.retire(index)

    def check(self) -> None:
        """Assert what must be true between two events; for tests."""
        self.shelf.check()
        units = {}
        for block in self.shelf.blocks():
            copy = self.shelf.peek(block)
            assert copy is not None
            units[copy.offset // self._unit_bytes] = copy
        moving = {move.room.offset // self._unit_bytes for move in self._moves()}
        assert units.keys() <= self._table.entries.keys(), (
            "a block is on the shelf without an entry"
        )
        assert self._table.entries.keys() <= units.keys() | moving
        assert all(map(self._table.filter.may_hold, [*self.shelf.blocks(), *self._found]))
        assert len(self._ahead.moves) >= self._ahead.left
        if self._phase is _Phase.IDLE:
            assert not self._round.left
            assert not self._round.moves
            assert not self._ahead.moves
            assert not self._entering
            assert not self._half
        else:
            assert self._round.left or self._half
