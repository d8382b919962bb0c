"""What an agent takes over from the one before it: the copies in the arena, without moving them.

Owns: which entries of the old index are believed, and when and in which order the bytes of copies
are checked. Must not know: files or processes, what the index looks like inside (`tiers.index`), or
who still holds what (`sessions` restores that).

An entry is taken over under three conditions: it proves itself by its check; its namespace means to
the pool what it meant to the former agent; and its extent is one of the allocator's, which no other
entry has. All other entries are cleared away, or withdrawn if they prove themselves, and counted.

The bytes of a copy that was taken over are *doubtful* until their digest has been made and
compared. That happens in the background, or before the copy is given to anybody. A copy that fails
is forgotten. Clients read copies without asking the agent. So no namespace is shown to them until
nothing is doubtful.

The agent serves from the start. A copy that is asked for is found by its name and checked alone.
The others follow in the background, a few at each `step`:

1. the entries of the index are scanned;
2. the copies are claimed in the order of their commits, so that the least recently used one is
   known;
3. their digests are checked.

Only when all copies are claimed is it known where there is room. Whoever needs room before that
makes the remaining claims at once (about 10 us a copy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.store import COMMITTED, DOOMED, RESERVED, Copy, Store
from kvcast.hostagent.tiers.index import Entry, Index
from kvcast.protocol.messages.wire import BlockId, digest_of

STEP_SLOTS: Final = 4096
STEP_COPIES: Final = 128
STEP_BYTES: Final = 8 << 20
"""How much one step scans, claims or checks. Each is a millisecond or two of work."""


class Unwritten(NamedTuple):
    """A block that was acknowledged and lies in the arena, but is not in the index, because the
    former agent died before it wrote that."""

    block: BlockId
    offset: int
    room_bytes: int
    size_bytes: int
    digest: int


@dataclass(slots=True)
class RecoveryCounters:
    """Totals since the start. `left` is 1 until everything is checked, then 0."""

    copies: int = 0
    """Copies taken over."""
    entries_refused: int = 0
    """Entries that did not prove themselves, overlapped others, or had another namespace."""
    copies_damaged: int = 0
    """Copies whose bytes did not match their digest; nobody got them."""
    left: int = 1


class Recovery:
    """What the store asks (as its `recovery`) until nothing is doubtful any more."""

    def __init__(
        self,
        index: Index,
        store: Store,
        shared: SharedIndex,
        memory: memoryview,
        unwritten: Callable[[], Iterable[Unwritten]] = lambda: (),
    ) -> None:
        self._unwritten = unwritten
        self.counters = RecoveryCounters()
        self._index = index
        self._store = store
        self._shared = shared
        self._memory = memory
        self._pool: Pool | None = None
        self._meant: dict[int, int] = {}
        self._known = bytearray(index.slots)
        """Slots that are taken over or cleared; 1 each."""
        self._scanned = 0
        self._entries: list[Entry] = []
        self._sorted = False
        self._greatest = 0
        self._early: list[Copy] = []
        self._doubtful: dict[Copy, None] = {}

    @property
    def begun(self) -> bool:
        """Whether a map has said what the namespaces mean."""
        return self._pool is not None

    def begin(self, pool: Pool) -> None:
        """Take over the copies of the namespaces in this map. From now on a copy that is asked for
        is found."""
        assert self._pool is None
        self._pool = pool
        # Before anybody writes there what they mean now.
        self._meant = {number: self._index.meaning(number) for number in pool.namespaces}
        for put in self._unwritten():
            if self._store.known(put.block) is None and self._find(put.block) is None:
                self._write(put)
        self._store.recovery = self

    def _write(self, put: Unwritten) -> None:
        """Take over a block that is not in the index, and write it there."""
        assert self._pool is not None
        meaning = self._pool.meaning_of(put.block.namespace)
        if meaning is None or meaning != self._meant.get(put.block.namespace):
            return
        copy = self._store.adopt(
            *(put.block, put.size_bytes, put.offset, COMMITTED, put.digest),
            room_bytes=put.room_bytes,
        )
        if copy is None:
            self.counters.entries_refused += 1
            return
        copy.home = self._pool.is_home(put.block)
        self._shared.publish(copy)
        if copy.cell:
            self._known[Entry.slot_of(copy.cell)] = 1
        self._early.append(copy)  # nothing is newer
        self._doubtful[copy] = None
        self.counters.copies += 1

    def takes_over(self, namespace: int, meaning: int) -> bool:
        """Whether copies of a namespace with this meaning are taken over.

        If they are not, their entries are cleared away. The index must not state the new meaning
        before that. Otherwise an agent that starts after a crash would believe those entries.
        """
        return self._meant.get(namespace) == meaning

    # --- the store's side -------------------------------------------------------------------------

    def look(self, block: BlockId, copy: Copy | None) -> Copy | None:
        """As `store.Recovery` says."""
        if copy is None:
            copy = self._find(block)
            if copy is not None:
                self._early.append(copy)
        if copy is not None and copy in self._doubtful and not self._is_right(copy):
            return None
        return copy

    def finish(self) -> None:
        """As `store.Recovery` says."""
        while not self._claimed:
            self._scan_or_claim()

    # --- in the background -----------------------------------------------------------------------

    def step(self) -> bool:
        """Do a little work; returns whether there is more to do."""
        if not self._claimed:
            self._scan_or_claim()
            return True
        checked_bytes = 0
        while self._doubtful and checked_bytes < STEP_BYTES:
            copy = next(iter(self._doubtful))
            checked_bytes += copy.size_bytes
            self._is_right(copy)
        if self._doubtful:
            return True
        self.counters.left = 0
        self._store.recovery = None
        return False

    @property
    def _claimed(self) -> bool:
        return self._sorted and not self._entries

    def _scan_or_claim(self) -> None:
        if self._scanned < self._index.slots:
            for slot in self._index.slots_in_use(self._scanned, STEP_SLOTS):
                if not self._known[slot]:
                    entry = self._believed(slot)
                    if entry is not None:
                        self._entries.append(entry)
            self._scanned += STEP_SLOTS
            return
        if not self._sorted:
            self._sorted = True
            self._entries.sort(key=lambda entry: -entry.order)
        for _ in range(min(STEP_COPIES, len(self._entries))):
            entry = self._entries.pop()
            if not self._known[entry.slot]:
                self._claim(entry)
        if not self._entries:
            self._index.commits = max(self._index.commits, self._greatest)
            # What was asked for meanwhile was used last.
            for copy in self._early:
                if copy.state == COMMITTED:
                    self._store.get(copy.block)
            self._early.clear()

    # --- one copy --------------------------------------------------------------------------------

    def is_free(self, block: BlockId, offset: int) -> bool:
        """Whether no copy lies at this offset; the block's own copy is looked up first."""
        if self._store.known(block) is None:
            self._find(block)
        return self._store.lying_at(offset) is None

    def hold(self, block: BlockId, offset: int, room_bytes: int, digest: int) -> Copy | None:
        """Pin the copy at this offset, for a client that has outlived its agent. If the copy is not
        in the index any more, it is adopted until the client lets go of it. None if
        something else lies there."""
        if self._store.known(block) is None:
            self._find(block)
        copy = self._store.lying_at(offset)
        if copy is None:
            return self._store.adopt(block, room_bytes, offset, DOOMED, digest)
        if copy.block != block or copy.state == RESERVED:
            return None
        self._store.pin(copy)
        return copy

    def hold_cell(self, cell: int) -> Copy | None:
        """As `hold`, for the copy that a client has pinned by this cell of its region. None if
        nothing says any more which copy that was."""
        slot = Entry.slot_of(cell)
        if not 0 <= slot < self._index.slots:
            return None
        copy = self._shared.copy_of(cell)
        if copy is None:
            entry = self._index.entry(slot)
            if entry is None or entry.cell != cell:
                entry = self._index.tombstone(cell)
            if entry is None:
                return None
            return self.hold(entry.block, entry.offset, entry.reserved_bytes, entry.digest)
        self._store.pin(copy)
        return copy

    def _find(self, block: BlockId) -> Copy | None:
        for slot in self._index.find(block):
            if not self._known[slot]:
                entry = self._believed(slot)
                if entry is not None and entry.block == block:
                    return self._claim(entry)
        return None

    def _believed(self, slot: int) -> Entry | None:
        """The entry of a slot that is in use. If it does not prove itself, the slot is cleared."""
        entry = self._index.entry(slot)
        if entry is None:
            self._refuse(slot)
        return entry

    def _refuse(self, slot: int) -> None:
        self._known[slot] = 1
        self.counters.entries_refused += 1
        self._index.clear(slot)

    def _claim(self, entry: Entry) -> Copy | None:
        assert self._pool is not None
        block, store = entry.block, self._store
        meaning = self._pool.meaning_of(block.namespace)
        copy = None
        if (
            meaning is not None
            and meaning == self._meant.get(block.namespace)
            and entry.reserved_bytes == store.allocator.extent_bytes(entry.reserved_bytes)
        ):
            copy = store.adopt(
                *(block, entry.size_bytes, entry.offset, COMMITTED, entry.digest),
                room_bytes=entry.reserved_bytes,
            )
        self._known[entry.slot] = 1
        if copy is None:
            self.counters.entries_refused += 1
            # Not cleared: clients may hold it, and their pins say only where it stood.
            self._index.withdraw(entry.cell)
            return None
        copy.home = self._pool.is_home(block)
        self._shared.adopt(copy, entry.cell)
        self._greatest = max(self._greatest, entry.order)
        self._doubtful[copy] = None
        self.counters.copies += 1
        return copy

    def _is_right(self, copy: Copy) -> bool:
        """Check a doubtful copy's digest; if it is wrong, the copy is forgotten."""
        del self._doubtful[copy]
        if copy.state != COMMITTED:
            return False
        if digest_of(self._memory[copy.offset : copy.offset + copy.size_bytes]) == copy.digest:
            return True
        self.counters.copies_damaged += 1
        self._store.give_up(copy)
        return False
