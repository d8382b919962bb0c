"""What lies in a file of the SSD tier: a head, a table of entries, and the blocks.

Owns: the format, how a file is made, and which files may be used. Must not know: what is done with
an entry (`kvcast.hostagent.core.ssd`), or how bytes reach the disk in a running agent (`files`).

| at | what |
|---|---|
| 0 | the head, a page: whose file this is, how it is cut; written once, when the file is made |
| a page | the table: an entry for each unit of blocks' space, a page for each 32 units |
| then | blocks; each begins at a unit's beginning, and its entry is that unit's |

Why a table, and neither headers in front of the blocks nor a log: an agent that starts reads the
table from one end to the other, which is 1/128 of the file, and no block; a log would have to be
cleaned, and headers looked for all over the disk. An entry proves itself by a digest that is made
with the file's random identity, so a page that was torn at any byte, is of an older file at the
same place, or was written to the wrong place says nothing. What keeps an entry and its block
together is the order of writes (`kvcast.hostagent.core.ssd`), and if a disk does not keep it, the
block's own digest.

| what is found at the path | what becomes of it |
|---|---|
| nothing, an empty file, or one that was being made | made anew |
| another agent's, that is alive (it locks the file) | SsdInUseError |
| no file of ours, or of another node, cluster, format or size | SsdError: an operator decides |
| a head of ours that is damaged | made anew, with an error in the log |
| a file that has become shorter | made whole again; what lay beyond is gone, and counted |
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import xxhash
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES, BlockId

log = logging.getLogger(__name__)

PAGE_BYTES: Final = 4096
"""What is written at once of the table; and what blocks' space is aligned to."""
ENTRY_BYTES: Final = 128
ENTRIES_PER_PAGE: Final = PAGE_BYTES // ENTRY_BYTES
UNIT_BYTES: Final = 16384
"""Blocks' extents are multiples of it."""
SLAB_BYTES: Final = 16 << 20
FORMAT: Final = 1
MAX_OWNER_BYTES: Final = 1024
"""Of what says whose a file is; the rest is left out."""
MAX_ORDER: Final = 1 << 62
"""Of commits: no agent comes so far, and those after an entry that says so must be written, too."""
_MAGIC: Final = b"kvcssd\r\n"
_HEAD: Final = struct.Struct("<8sIIQQQQQI")
"""Magic, format, unit, slab, slabs, table's place, blocks' place, identity, length of the owner."""
_CHECK: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct("<QHHI16sQQQQd16s")
"""Check, namespace, zero, depth, key, size, digest, meaning of the namespace, order of the commits,
when it was committed (seconds since 1970), key of the block before it in its prefix."""
_READ_BYTES: Final = 128 << 10
"""Of the table at once: some milliseconds of work for whoever is told of it."""
NO_ENTRY: Final = bytes(ENTRY_BYTES)
_EMPTY_PAGE: Final = bytes(PAGE_BYTES)


class SsdError(Exception):
    """A file cannot be used; the message says which and why."""


class SsdInUseError(SsdError):
    """The file belongs to an agent that is alive."""


class Medium(Protocol):
    """A file, as far as this module reads and writes it: when it is made, and when it is read from
    end to end."""

    path: str

    def size_bytes(self) -> int: ...

    def extend(self, size_bytes: int) -> None:
        """Make it so long, and have the room on the disk; OSError where there is none."""

    def pread(self, size_bytes: int, offset: int) -> bytes:
        """Fewer bytes at the end of the file only."""

    def pwrite(self, data: bytes, offset: int) -> None: ...

    def flush(self) -> None: ...


class Entry(NamedTuple):
    """What the table says of one block. `unit`: where in the file it begins."""

    unit: int
    block: BlockId
    size_bytes: int
    digest: int
    meaning: int
    order: int
    committed_at: float
    parent: bytes
    depth: int


@dataclass(frozen=True)
class Cut:
    """How a file is divided. `owner`: node and cluster, as an operator would name them."""

    owner: str
    slabs: int
    unit_bytes: int = UNIT_BYTES
    slab_bytes: int = SLAB_BYTES

    @property
    def units(self) -> int:
        return self.slabs * self.slab_bytes // self.unit_bytes

    @property
    def table_bytes(self) -> int:
        return -(-self.units // ENTRIES_PER_PAGE) * PAGE_BYTES

    @property
    def blocks_offset(self) -> int:
        return PAGE_BYTES + self.table_bytes

    @property
    def file_bytes(self) -> int:
        return self.blocks_offset + self.slabs * self.slab_bytes


def cut_of(
    owner: str, size_bytes: int, unit_bytes: int = UNIT_BYTES, slab_bytes: int = SLAB_BYTES
) -> Cut:
    """The largest that fits into so many bytes; SsdError where not even one slab does."""
    if unit_bytes % PAGE_BYTES or slab_bytes % unit_bytes:
        raise SsdError(f"slabs of {slab_bytes} bytes cannot be cut into units of {unit_bytes}")
    slabs = size_bytes // slab_bytes
    while slabs and Cut(owner, slabs, unit_bytes, slab_bytes).file_bytes > size_bytes:
        slabs -= 1
    if not slabs:
        raise SsdError(f"{size_bytes} bytes are too few for an SSD file: {slab_bytes * 2} at least")
    return Cut(owner, slabs, unit_bytes, slab_bytes)


@dataclass(frozen=True)
class Formatted:
    """A file that can be used; `found`: whether it may hold blocks; `whole_bytes`: so much of it
    was there, which is less than it should be where it was truncated."""

    cut: Cut
    identity: int
    found: bool
    whole_bytes: int


def open_formatted(medium: Medium, cut: Cut, new_identity: int) -> Formatted:
    """Find out what a file is, or make it, as the table above says. SsdError, OSError."""
    length = medium.size_bytes()
    head = medium.pread(PAGE_BYTES, 0) if length else b""
    identity = _identity_of(medium.path, head, cut) if any(head) else None
    if identity is None and any(head) and not head.startswith(_MAGIC):
        raise SsdError(f"{medium.path} is no SSD file of kvcast; name another file, or remove it")
    if length < cut.file_bytes:
        if identity is not None:
            log.error("%s has become shorter: what lay beyond its end is gone", medium.path)
        medium.extend(cut.file_bytes)
    if identity is not None:
        # What a dead process has written is seen, and need not be safe: a table that was seen
        # empty, and comes back after the next power cut, would name what was written over.
        medium.flush()
        return Formatted(cut, identity, True, min(length, cut.file_bytes))
    if length > PAGE_BYTES:  # nobody would believe its entries, but they would be counted
        for begin in range(0, cut.table_bytes, _READ_BYTES):
            medium.pwrite(bytes(min(_READ_BYTES, cut.table_bytes - begin)), PAGE_BYTES + begin)
    medium.pwrite(_head_of(cut, new_identity), 0)
    medium.flush()
    return Formatted(cut, new_identity, False, cut.file_bytes)


def head_of(medium: Medium) -> Formatted:
    """What a file says of itself, for whoever only looks at it; SsdError where it says nothing."""
    head = medium.pread(PAGE_BYTES, 0)
    said = _said_by(head)
    if said is None:
        raise SsdError(f"{medium.path} is no SSD file of kvcast, or its head is damaged")
    cut, identity = said
    return Formatted(cut, identity, True, min(medium.size_bytes(), cut.file_bytes))


def _head_of(cut: Cut, identity: int) -> bytes:
    owner = cut.owner.encode()[:MAX_OWNER_BYTES]
    head = _HEAD.pack(
        *(_MAGIC, FORMAT, cut.unit_bytes, cut.slab_bytes, cut.slabs, PAGE_BYTES),
        *(cut.blocks_offset, identity, len(owner)),
    )
    head += owner
    return (head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))).ljust(PAGE_BYTES, b"\0")


def _said_by(head: bytes) -> tuple[Cut, int] | None:
    """What a head says; None where it is damaged, or no head at all."""
    if len(head) < PAGE_BYTES or not head.startswith(_MAGIC):
        return None
    _, _, unit, slab, slabs, _, blocks, identity, length = _HEAD.unpack_from(head)
    end = _HEAD.size + min(length, MAX_OWNER_BYTES)
    if _CHECK.unpack_from(head, end)[0] != xxhash.xxh3_64_intdigest(head[:end]):
        return None
    owner = head[_HEAD.size : end].decode(errors="replace")
    cut = Cut(owner, slabs, unit, slab)
    return (cut, identity) if cut.blocks_offset == blocks else None


def _identity_of(path: str, head: bytes, cut: Cut) -> int | None:
    """The identity of a file that is ours; None where it has no head, or a damaged one."""
    if head.startswith(_MAGIC) and len(head) >= _HEAD.size:
        found_format = _HEAD.unpack_from(head)[1]
        if found_format != FORMAT and _checks(head):
            raise SsdError(
                f"{path} has format {found_format}, and this release {FORMAT}: "
                "remove it to begin with an empty file"
            )
    said = _said_by(head)
    if said is None:
        if head.startswith(_MAGIC):
            log.error("%s has a damaged head: begun anew", path)
        return None
    found, identity = said
    if found.owner.encode() != cut.owner.encode()[:MAX_OWNER_BYTES]:
        raise SsdError(
            f"{path} is of {found.owner}, and this is {cut.owner}: name another file, or remove it"
        )
    if (found.slabs, found.unit_bytes, found.slab_bytes) != (
        *(cut.slabs, cut.unit_bytes, cut.slab_bytes),
    ):
        raise SsdError(
            f"{path} is of {found.file_bytes} bytes, and not of {cut.file_bytes}: "
            "state its size, or remove it to begin anew"
        )
    return identity


def _checks(head: bytes) -> bool:
    end = _HEAD.size + min(_HEAD.unpack_from(head)[8], MAX_OWNER_BYTES)
    if len(head) < end + _CHECK.size:
        return False
    return bool(_CHECK.unpack_from(head, end)[0] == xxhash.xxh3_64_intdigest(head[:end]))


# --- entries --------------------------------------------------------------------------------------


def pack_entry(entry: Entry, identity: int) -> bytes:
    """An entry's bytes in the table."""
    namespace, key = entry.block
    data = _ENTRY.pack(
        *(0, namespace, 0, entry.depth, key, entry.size_bytes, entry.digest, entry.meaning),
        *(entry.order, entry.committed_at, entry.parent.ljust(16, b"\0")),
    )[_CHECK.size :].ljust(ENTRY_BYTES - _CHECK.size, b"\0")
    return _CHECK.pack(_check(data, identity, entry.unit)) + data


def unpack_entry(data: bytes, identity: int, unit: int) -> Entry | None:
    """What an entry says; None where it does not prove itself."""
    check = _CHECK.unpack_from(data)[0]
    if check != _check(data[_CHECK.size :], identity, unit):
        return None
    _, namespace, _, depth, key, size, digest, meaning, order, at, parent = _ENTRY.unpack_from(data)
    if not 0 < size <= MAX_BLOCK_BYTES or order > MAX_ORDER:
        return None
    above = parent if any(parent) else b""
    return Entry(unit, BlockId(namespace, key), size, digest, meaning, order, at, above, depth)


def block_of(data: bytes) -> BlockId:
    """The block that an entry is of, as `pack_entry` has made it."""
    _, namespace, _, _, key, *_ = _ENTRY.unpack_from(data)
    return BlockId(namespace, key)


def _check(data: bytes, identity: int, unit: int) -> int:
    seed = (identity ^ unit * 0x9E3779B97F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF
    return int(xxhash.xxh3_64_intdigest(data, seed=seed))


class Scanned(NamedTuple):
    """A piece of the table. `refused`: units whose entries are there, and do not prove
    themselves; `unreadable_pages`: the disk did not give them."""

    entries: list[Entry]
    refused: list[int]
    unreadable_pages: int


def scan(medium: Medium, formatted: Formatted) -> Iterator[Scanned]:
    """Read the table from one end to the other, a piece at a time."""
    cut = formatted.cut
    for begin in range(0, cut.table_bytes, _READ_BYTES):
        length = min(_READ_BYTES, cut.table_bytes - begin)
        try:
            yield _scan_piece(medium.pread(length, PAGE_BYTES + begin), formatted, begin)
        except OSError:
            for page in range(begin, begin + length, PAGE_BYTES):
                try:
                    data = medium.pread(PAGE_BYTES, PAGE_BYTES + page)
                except OSError:
                    yield Scanned([], [], 1)
                else:
                    yield _scan_piece(data, formatted, page)


def _scan_piece(data: bytes, formatted: Formatted, begin: int) -> Scanned:
    entries: list[Entry] = []
    refused: list[int] = []
    first = begin // ENTRY_BYTES
    units = formatted.cut.units
    for page in range(0, len(data), PAGE_BYTES):
        if data[page : page + PAGE_BYTES] == _EMPTY_PAGE:
            continue  # as most are
        # A file that was cut may end in the middle of one.
        end = min(page + PAGE_BYTES, len(data) - ENTRY_BYTES + 1)
        for at in range(page, end, ENTRY_BYTES):
            piece = data[at : at + ENTRY_BYTES]
            if piece == NO_ENTRY:
                continue
            unit = first + at // ENTRY_BYTES
            entry = unpack_entry(piece, formatted.identity, unit) if unit < units else None
            if entry is None:
                refused.append(unit)
            else:
                entries.append(entry)
    return Scanned(entries, refused, 0)
