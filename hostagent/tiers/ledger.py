"""What clients hold that they did not pin by themselves, written down where it outlives the agent.

Owns: the rows, and that one at which its writer died is none. Must not know: sessions, or what is
done with a row by a later agent (`core.sessions` restores clients from them).

A client that outlives its agent reads the blocks that it was given, and writes what it reserved,
as if nothing had happened. So the next agent must know these extents before it uses a byte of the
arena for something else; that it can also go on serving the client under the same numbers is a
gift. A row is written before the client is told of what it names. What compiled code gives stands
in the *moment* first, memory behind the rows in which the courier writes its records
(`kvcast.protocol.courier`), and in rows as soon as Python runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import xxhash
from kvcast.protocol.messages.wire import BlockId

HANDLE: Final = 1
"""A block that a get returned."""
TICKET: Final = 2
"""Room that is being written."""
PIN: Final = 3
"""A block that was pinned."""
BY_ITSELF: Final = 4
"""A copy that the client has pinned by itself, and that is not in the index any more."""
PUT: Final = 5
"""What room that was written has become, while the client waits to hear that it is put: its own
copy, or an older one of the block, which has the room free for others."""

_ROW: Final = struct.Struct("=3Q16s2QI2H")
ROW_BYTES: Final = _ROW.size
ROWS: Final = 65_536
MOMENT_BYTES: Final = 256 * 1024
LEDGER_BYTES: Final = ROW_BYTES * ROWS + MOMENT_BYTES
NO_ROW: Final = -1
MOMENT_ROWS: Final = 1024
"""Rows that whatever else is written leaves for what stands in the moment."""
_NO_CHECK: Final = bytes(8)


class Row(NamedTuple):
    """`number`: the client's handle or ticket, or the cell; `size_bytes`: of the block for which
    room was made there."""

    session: int
    number: int
    block: BlockId
    offset: int
    size_bytes: int
    digest: int
    kind: int


class Ledger:
    """Rows in `memory`, of LEDGER_BYTES: zeros, or as a former agent has left them."""

    def __init__(self, memory: memoryview) -> None:
        assert len(memory) == LEDGER_BYTES
        self._memory = memory
        self.moment = memory[ROW_BYTES * ROWS :]
        """Records of the courier, as a former agent has left them, or this one writes them."""
        self._words = memory.cast("Q")
        self._fresh = min(max(self._words[0], 1), ROWS)
        """Rows from here on were never used; the first word of the memory says so, and there is no
        row where that lies."""
        self._free: list[int] = []
        self._found = self._fresh

    def found(self) -> Iterator[tuple[int, Row]]:
        """The rows that a former agent has left, each with its place; rows that do not prove
        themselves are free again."""
        found, self._found = self._found, 0
        for at in range(1, found):
            start = at * ROW_BYTES
            data = bytes(self._memory[start : start + ROW_BYTES])
            check, session, number, key, offset, digest, size_bytes, namespace, kind = _ROW.unpack(
                data
            )
            if check and check == _check_of(data[8:]):
                block = BlockId(namespace, key)
                yield at, Row(session, number, block, offset, size_bytes, digest, kind)
            else:
                self.strike(at)

    def write(self, row: Row, *, leave: int = 0) -> int:
        """Write a row down; its place, or NO_ROW where no more than `leave` are left."""
        if self.free_rows <= leave:
            return NO_ROW
        if self._free:
            at = self._free.pop()
        else:
            at = self._fresh
            self._fresh = self._words[0] = at + 1
        self.rewrite(at, row)
        return at

    def rewrite(self, at: int, row: Row) -> None:
        """Let another row stand in this place."""
        start = at * ROW_BYTES
        block = row.block
        data = _ROW.pack(
            *(0, row.session, row.number, block.key, row.offset, row.digest),
            *(row.size_bytes, block.namespace, row.kind),
        )
        self._memory[start : start + 8] = _NO_CHECK
        self._memory[start + 8 : start + ROW_BYTES] = data[8:]
        self._memory[start : start + 8] = _check_of(data[8:]).to_bytes(8, "little")

    @property
    def free_rows(self) -> int:
        """How many more rows can be written."""
        return len(self._free) + ROWS - self._fresh

    def strike(self, at: int) -> None:
        """A row does not hold any more."""
        if at != NO_ROW:
            start = at * ROW_BYTES
            self._memory[start : start + 8] = _NO_CHECK
            self._free.append(at)


def _check_of(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) or 1
