"""What clients find and pin without a message, as the agent sees it.

Owns: which copies are in the index, what the regions of clients say that they pin, and when that is
believed. Must not know: files, sockets or system calls (it is given memory, and a barrier), and
what the index looks like inside (`tiers.index`).

A client finds a copy in the index, writes its cell into its own region, and looks at the index
again: if the copy is still there, it is pinned. The agent, before it uses the bytes of a copy for
something else, takes it out of the index, issues the barrier, and then reads the regions. Each
writes first and reads afterwards; so whatever the order, the client sees that the copy is gone, or
the agent sees the pin. The barrier stands in for the one that the client would need between its
write and its look.

A copy that is found pinned so is pinned in the store as well, in the client's name, and until a
later look finds the pin gone. Looks are cheap (a comparison of bytes, where nothing has changed)
and come before victims are chosen, with each report, and whenever counters are asked for.

A region is its client's to write, so nothing in it is believed but what it says of that client. A
cell that names a copy which is gone counts for nothing: the client may have been overtaken, and is
about to find out. What no client of ours writes is an offence, and so is to pin more bytes than a
client may: the client is cut off, and its pins are void.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kvcast.hostagent.core.store import Copy, Store
from kvcast.hostagent.tiers.index import Index
from kvcast.hostagent.tiers.ledger import BY_ITSELF, MOMENT_ROWS, NO_ROW, Ledger, Row
from kvcast.protocol.chains import Probe
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.shared import WORD_BYTES

MOST_HITS_AT_ONCE: Final = 1 << 26
"""Hits that a client may claim between two looks."""


@dataclass(slots=True)
class SharedCounters:
    """Totals since the start."""

    published: int = 0
    full: int = 0
    """Copies that are not in the index, since their places there were taken."""
    hits: int = 0
    """Blocks that clients got by themselves."""
    hits_untold: int = 0
    """Blocks that clients got by themselves, and that a ring had no room for: eviction knows
    nothing of them."""
    pins_stale: int = 0
    """Cells found that named a copy which was gone."""
    offences: int = 0
    """Clients whose regions said what no client of ours writes."""


class Region:
    """One client's region. `max_bytes`: what it is cut off for pinning more than; `offended` is
    told why, once; `session`: the client's number in the ledger."""

    def __init__(
        self,
        memory: memoryview,
        max_bytes: int,
        offended: Callable[[str], None],
        session: int = 0,
    ) -> None:
        assert len(memory) == shared.REGION_BYTES
        self.session = session
        self.rows: dict[int, int] = {}
        """Of `held`, those that are out of the index: where in the ledger they stand."""
        self.words = memory.cast("Q")
        self.max_bytes = max_bytes
        self.offended = offended
        self.held: dict[int, Copy] = {}
        """Copies pinned here, by their cells."""
        self.held_bytes = 0
        """What they take of the arena."""
        self.seen = b""
        """The cells at the last look, unless something was pinned besides."""
        self.hits = self.words[shared.HITS_WORD]

    def cells(self) -> bytes:
        """The cells in use, now."""
        used = min(self.words[shared.CELLS_USED_WORD], shared.PIN_CELLS)
        return bytes(self.words[shared.CELLS_WORD : shared.CELLS_WORD + used])


class SharedIndex:
    """The store's `PinnedElsewhere`. `barrier` is that of `kvcast.hostagent.membarrier`."""

    def __init__(
        self,
        index: Index,
        store: Store,
        barrier: Callable[[], None],
        ledger: Ledger | None = None,
    ) -> None:
        self._ledger = ledger
        self.counters = SharedCounters()
        self._index = index
        self._store = store
        self._barrier = barrier
        self._probe: Probe | None = None
        self._copies: dict[int, Copy] = {}
        self._closed = False
        self._regions: dict[Region, None] = {}
        self._hits: Counter[int] = Counter()
        """Told hits by namespace, until they are taken."""
        store.elsewhere = self

    # --- the store's side -------------------------------------------------------------------------

    def publish(self, copy: Copy) -> None:
        """A copy was committed: clients may find it."""
        if self._closed:
            return
        cell = self._index.publish(
            copy.block, copy.offset, copy.size_bytes, copy.reserved_bytes, copy.digest
        )
        if cell == 0:
            self.counters.full += 1
            return
        self.counters.published += 1
        copy.cell = cell
        self._copies[cell] = copy

    def adopt(self, copy: Copy, cell: int) -> None:
        """A copy that is in the index already is the store's now."""
        copy.cell = cell
        self._copies[cell] = copy

    @property
    def memory(self) -> memoryview:
        """The index, as clients map it."""
        return self._index.memory

    def copy_of(self, cell: int) -> Copy | None:
        """The copy that a cell names, if it is in the index."""
        return self._copies.get(cell)

    def withdraw(self, copies: Iterable[Copy]) -> None:
        """Nobody finds these any more; those that clients have pinned are pinned in the store
        now."""
        gone: dict[int, Copy] = {}
        for copy in copies:
            if copy.cell:
                gone[copy.cell] = copy
                self._index.withdraw(copy.cell)
                del self._copies[copy.cell]
                copy.cell = 0
        if not gone or not self._regions:
            return
        self._barrier()
        for region in self._regions:
            cells = region.cells()
            for cell, copy in gone.items():
                if cell not in region.held and _names(cells, cell):
                    self._take(region, cell, copy)
                    region.seen = b""
                if cell in region.held:
                    self._note(region, cell, copy)

    def held(self, namespace: int, chain: bytes) -> tuple[int, int]:
        """As the store's `PinnedElsewhere` says."""
        if self._closed:
            return 0, 0
        if self._probe is None:
            self._probe = Probe(self._index.memory)
        return self._probe.held(namespace, chain), len(self._copies)

    def refresh(self) -> None:
        """Bring the store's pins and its order of use up to what the regions say now."""
        for region in list(self._regions):
            self.look(region)

    # --- clients --------------------------------------------------------------------------------

    def look(self, region: Region) -> None:
        """As `refresh`, for one region."""
        try:
            self._look(region)
        except _OffenceError as offence:
            self.counters.offences += 1
            self.leave(region)
            region.offended(str(offence))

    def join(self, region: Region) -> None:
        """A client has a region from now on."""
        self._regions[region] = None

    def leave(self, region: Region) -> None:
        """A client is gone, or cut off: its pins are void. Harmless when repeated."""
        if region not in self._regions:
            return
        del self._regions[region]
        # If it lives, it must know before any of its pins fails to hold.
        region.words[shared.CLOSED_WORD] = 1
        self._barrier()
        for cell in list(region.held):
            self._let_go(region, cell)

    def close(self) -> None:
        """The agent ends: no region is taken notice of, and the index not written any more."""
        for region in list(self._regions):
            self.leave(region)
        self._closed = True
        for copy in self._copies.values():
            copy.cell = 0
        self._copies.clear()

    def state_namespace(self, namespace: int, meaning: int, *, readable: bool) -> None:
        """As `Index.state_namespace`."""
        self._index.state_namespace(namespace, meaning, readable=readable)

    def take_hits(self) -> Counter[int]:
        """By namespace, what clients got by themselves since the last call, as far as they told."""
        taken, self._hits = self._hits, Counter()
        return taken

    # --- inside -----------------------------------------------------------------------------------

    def _take(self, region: Region, cell: int, copy: Copy) -> None:
        self._store.pin(copy)
        self.restore(region, cell, copy)

    def restore(self, region: Region, cell: int, copy: Copy) -> None:
        """This client has that copy pinned by itself, and the store knows of it."""
        region.held[cell] = copy
        region.held_bytes += copy.reserved_bytes
        if copy.cell != cell:
            self._note(region, cell, copy)

    def _let_go(self, region: Region, cell: int) -> None:
        copy = region.held.pop(cell)
        region.held_bytes -= copy.reserved_bytes
        if self._ledger is not None:
            self._ledger.strike(region.rows.pop(cell, NO_ROW))
        self._store.unpin(copy)

    def _note(self, region: Region, cell: int, copy: Copy) -> None:
        """From now on the cell alone does not say which copy this is."""
        if self._ledger is not None and cell not in region.rows:
            region.rows[cell] = self._ledger.write(
                Row(
                    *(region.session, cell, copy.block, copy.offset),
                    *(copy.reserved_bytes, copy.digest, BY_ITSELF),
                ),
                leave=MOMENT_ROWS,
            )

    def _look(self, region: Region) -> None:
        self._count_hits(region)
        cells = region.cells()
        if cells == region.seen:
            return
        named = set(struct.unpack(f"={len(cells) // WORD_BYTES}Q", cells))
        named.discard(0)
        for cell in region.held.keys() - named:
            self._let_go(region, cell)
        for cell in named - region.held.keys():
            found = self._copies.get(cell)
            if found is not None:
                self._take(region, cell, found)
            else:
                self._check_stale(cell)
        if region.held_bytes > region.max_bytes:
            raise _OffenceError(f"it pins more than {region.max_bytes} bytes")
        region.seen = cells

    def _check_stale(self, cell: int) -> None:
        """A cell that names no copy must at least have named one."""
        slot, generation = shared.slot_of(cell)
        try:
            present = self._index.generation(slot)
        except LookupError:
            raise _OffenceError(f"it pins slot {slot}, which does not exist") from None
        # What a former agent left may be pinned in the moment before its client sees that there is
        # another, and takes the pin back.
        last = present if self._store.recovery is not None else present - 1
        if generation % 2 or not 0 < generation <= last:
            raise _OffenceError(f"it pins generation {generation} of a slot that is at {present}")
        self.counters.pins_stale += 1

    def _count_hits(self, region: Region) -> None:
        words = region.words
        hits = words[shared.HITS_WORD]
        if words[shared.CELLS_USED_WORD] > shared.PIN_CELLS:
            raise _OffenceError(f"it has {words[shared.CELLS_USED_WORD]} cells in use")
        new = hits - region.hits
        if new == 0:
            return
        if not 0 < new <= MOST_HITS_AT_ONCE:
            raise _OffenceError(f"it had {new} hits at once")
        told = min(new, shared.RING_CELLS)
        region.hits = hits
        self.counters.hits += new
        self.counters.hits_untold += new - told
        for number in range(hits - told, hits):
            copy = self._copies.get(words[shared.RING_WORD + number % shared.RING_CELLS])
            if copy is not None:
                self._store.get(copy.block)
                self._hits[copy.block.namespace] += 1


class _OffenceError(Exception):
    """What a region says is nothing that a client of ours writes."""


def _names(cells: bytes, cell: int) -> bool:
    """Whether a cell is among these."""
    wanted = cell.to_bytes(WORD_BYTES, "little")
    at = cells.find(wanted)
    while at > 0 and at % WORD_BYTES:
        at = cells.find(wanted, at + 1)
    return at >= 0
