"""Look at everything that a stopped agent has left on disk, or in a kept arena, and mend it.

Owns: which blocks are whole, and what becomes of those that are not. Must not know: command lines
(`kvcast.cli.fsck`), or what an agent will do with what is left: it believes nothing
because of this.

| found | said of it | with `repair` |
|---|---|---|
| an entry that does not prove itself | `refused` | its place in the table is empty |
| one whose block lies where another, younger one lies | `overlapping` | the same |
| one whose block lies beyond the end of the file | `truncated` | the same |
| one whose block's bytes do not have its digest, or cannot be read | `damaged` | the same |
| a page of the table that cannot be read | `unreadable_pages` | it is written anew, empty |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import xxhash
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index
from kvcast.hostagent.tiers.ssd.layout import (
    ENTRIES_PER_PAGE,
    ENTRY_BYTES,
    NO_ENTRY,
    PAGE_BYTES,
    Entry,
    Formatted,
    Medium,
    scan,
)
from kvcast.protocol.messages.wire import BlockId, digest_of

_PIECE_BYTES = 4 << 20


@dataclass
class Report:
    """What was found in one file. `damaged` names blocks; `repaired`: how many entries are not
    there any more."""

    path: str
    owner: str = ""
    blocks: int = 0
    """Whole ones."""
    block_bytes: int = 0
    damaged: list[BlockId] = field(default_factory=list)
    overlapping: int = 0
    truncated: int = 0
    refused: int = 0
    unreadable_pages: int = 0
    repaired: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was wrong."""
        return not (
            self.damaged
            or self.overlapping
            or self.truncated
            or self.refused
            or self.unreadable_pages
        )


def check_ssd(
    medium: Medium,
    formatted: Formatted,
    *,
    repair: bool = False,
    seen: Callable[[int, int], None] = lambda _done, _all: None,
) -> Report:
    """Read every block of a file. `seen(done, all)` hears how far it is, in blocks. OSError where
    what is to be mended cannot be written."""
    cut = formatted.cut
    report = Report(medium.path, cut.owner)
    entries: list[Entry] = []
    wrong: set[int] = set()
    for piece in scan(medium, formatted):
        entries += piece.entries
        report.refused += len(piece.refused)
        wrong.update(piece.refused)
        report.unreadable_pages += piece.unreadable_pages
    entries.sort(key=lambda entry: -entry.order)
    space = Allocator(cut.slabs * cut.slab_bytes, cut.slab_bytes, cut.unit_bytes)
    held: set[BlockId] = set()
    for number, entry in enumerate(entries):
        seen(number, len(entries))
        at = cut.blocks_offset + entry.unit * cut.unit_bytes
        if at + entry.size_bytes > formatted.whole_bytes:
            report.truncated += 1
        elif entry.block in held or not space.claim(entry.unit * cut.unit_bytes, entry.size_bytes):
            report.overlapping += 1
        elif not _is_whole(medium, at, entry):
            report.damaged.append(entry.block)
        else:
            held.add(entry.block)
            report.blocks += 1
            report.block_bytes += entry.size_bytes
            continue
        wrong.add(entry.unit)
    if repair and (wrong or report.unreadable_pages):
        report.repaired = len(wrong)
        for page, data in _mended(medium, formatted, wrong):
            medium.pwrite(data, page)
        medium.flush()
    return report


def _is_whole(medium: Medium, at: int, entry: Entry) -> bool:
    digest = xxhash.xxh3_64()
    left = entry.size_bytes
    while left:
        wanted = min(left, _PIECE_BYTES)
        try:
            # In whole pages, since the file may be read without the page cache.
            data = medium.pread(-(-wanted // PAGE_BYTES) * PAGE_BYTES, at)[:wanted]
        except OSError:
            return False
        if len(data) < wanted:
            return False
        digest.update(data)
        left, at = left - wanted, at + wanted
    return (digest.intdigest() or 1) == entry.digest


def _mended(medium: Medium, formatted: Formatted, wrong: set[int]) -> Iterator[tuple[int, bytes]]:
    """Pages of the table that are to be other than they are, and where."""
    by_page: dict[int, list[int]] = {}
    for unit in wrong:
        by_page.setdefault(unit // ENTRIES_PER_PAGE, []).append(unit % ENTRIES_PER_PAGE)
    for page in range(formatted.cut.table_bytes // PAGE_BYTES):
        at = PAGE_BYTES + page * PAGE_BYTES
        places = by_page.get(page, [])
        try:
            data = bytearray(medium.pread(PAGE_BYTES, at)) if places else None
            if data is None and formatted.whole_bytes >= at + PAGE_BYTES:
                medium.pread(PAGE_BYTES, at)
                continue
        except OSError:
            data = bytearray(PAGE_BYTES)
        if data is None:
            continue
        for place in places:
            data[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES] = NO_ENTRY
        yield at, bytes(data)


def check_arena(
    path: str,
    memory: memoryview,
    index: Index,
    slab_bytes: int,
    *,
    owner: str = "",
    repair: bool = False,
    seen: Callable[[int, int], None] = lambda _done, _all: None,
) -> Report:
    """Look at every block of a kept arena. `seen` as for `check_ssd`."""
    report = Report(path, owner)
    space = Allocator(len(memory) // slab_bytes * slab_bytes, slab_bytes)
    found = []
    for slot in index.slots_in_use(0, index.slots):
        entry = index.entry(slot)
        if entry is None:
            report.refused += 1
            if repair:
                index.clear(slot)
                report.repaired += 1
        else:
            found.append(entry)
    found.sort(key=lambda entry: -entry.order)
    for number, entry in enumerate(found):
        seen(number, len(found))
        size = entry.size_bytes
        room_bytes = entry.reserved_bytes  # of a larger block, perhaps, for which room was made
        is_room = room_bytes == space.extent_bytes(room_bytes)
        if not is_room or not space.claim(entry.offset, room_bytes):
            report.overlapping += 1
        elif digest_of(memory[entry.offset : entry.offset + size]) != entry.digest:
            report.damaged.append(entry.block)
        else:
            report.blocks += 1
            report.block_bytes += size
            continue
        if repair:
            index.clear(entry.slot)
            report.repaired += 1
    return report
