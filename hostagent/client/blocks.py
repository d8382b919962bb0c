"""Blocks as an engine holds them, and the agent's arena that they lie in, mapped into this process.

Owns: views of the arena, and when they may be used. Must not know: sockets; a block is told how it
is released.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import add
from typing import Final, NamedTuple, TypeAlias

import msgspec
from kvcast.hostagent.client.errors import AgentGoneError, ReleasedError
from kvcast.hostagent.mapping import SharedMapping
from kvcast.protocol.messages.wire import digest_of

GRANULE_BYTES: Final = 64 * 1024
"""Rooms from here on have their pages mapped before they are written."""

Buffer: TypeAlias = bytes | bytearray | memoryview


class Block(msgspec.Struct, eq=False):
    """A block in the arena of this node, pinned until `release`.

    Use it as a context manager, or call `release`. A block that is dropped without is a
    ResourceWarning. It is released with its client's next call, if nobody has asked for its `data`;
    else it stays pinned until its client closes, since views of the bytes may be in use, and other
    bytes would appear under them.

    `tier` says where it came from: "local" (this node's arena), "arena" (a further one of it),
    "ssd" (its disk), "cold" (an object store), "switch" (at least partly from the switch's memory),
    "shared" (an answer that several readers got), "home" (one that only this node got), or "bulk"
    (TCP).
    """

    # msgspec makes a hundred of them in a third of the time that an __init__ takes.
    key: bytes
    size_bytes: int
    digest: int
    tier: str
    _data: memoryview | None
    _release: Callable[..., None]
    """Called with `_held_by`, once."""
    _dropped: Callable[..., bool]
    """In its place, where the block is dropped, in any thread: with whether it may be let go of,
    and `_held_by`. It says whether the block was held until then."""
    _held_by: tuple[int, ...]
    _is_shown: bool = False

    @property
    def data(self) -> memoryview:
        """The bytes, shape (size_bytes,), format "B", read-only; ReleasedError once released.
        Views taken from it must not be used after `release`."""
        if self._data is None:
            raise _released(self.key)
        self._is_shown = True
        return self._data

    def __len__(self) -> int:
        return self.size_bytes

    def verify(self) -> bool:
        """Whether the bytes still have their digest (xxh3_64). The agent has checked a block
        that it fetched; this checks once more, after everybody who can write the arena."""
        if self._data is None:
            raise _released(self.key)
        return digest_of(self._data) == self.digest

    def release(self) -> None:
        """Let the agent evict the block; harmless when repeated. Of small blocks that one get has
        brought, the agent may hear with the last of them, or with the client's next call."""
        if self._data is not None:
            self._data = None
            self._release(*self._held_by)

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        # In any thread, in the middle of anything, at the interpreter's end, or half made.
        if getattr(self, "_data", None) is None:
            return
        self._data = None
        if self._dropped(not self._is_shown, *self._held_by):
            rest = "; it stays pinned until its client closes" if self._is_shown else ""
            _warn(f"{self!r} was not released{rest}", ResourceWarning, source=self)

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Block {self.key.hex()} {self.size_bytes} B from {self.tier}>"


def _released(key: bytes) -> ReleasedError:
    return ReleasedError(f"block {key.hex()} was released")


class Outcome(NamedTuple):
    """One key of `get_outcomes`: the block, or why there is none. `status` and `reason` are as
    in `kvcast.protocol.messages.local.GotBlock`."""

    block: Block | None
    status: str
    reason: str


class Reservation:
    """Room in the arena for blocks that are being written (see `Client.reserve`). `views`: key to
    a writable memoryview of its size, format "B"; `failed`: key to the status of those for which
    there was no room."""

    def __init__(self, abort: Callable[[list[int]], None], namespace: int) -> None:
        self.views: dict[bytes, memoryview] = {}
        self.failed: dict[bytes, str] = {}
        self.tickets: dict[int, bytes] = {}
        self.namespace = namespace
        self._abort = abort

    def take(self) -> dict[int, bytes]:
        """The tickets with their keys; from now on nothing is reserved here."""
        tickets, self.tickets = self.tickets, {}
        self.views.clear()
        return tickets

    def abort(self) -> None:
        """Give the room back; harmless when repeated, or after a commit."""
        self._abort(list(self.take()))

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class Arena:
    """The agent's arena, mapped into this process."""

    def __init__(self, fd: int, size_bytes: int, *, read_only: bool = False) -> None:
        try:
            if os.fstat(fd).st_size < size_bytes:
                raise AgentGoneError("the arena is smaller than the agent says")
            self._map = SharedMapping(fd, size_bytes, writable=not read_only)
        finally:
            os.close(fd)
        self.size_bytes = size_bytes
        self._memory = self._map.memory
        self._mapped = bytearray(size_bytes // GRANULE_BYTES)
        """By whole granule, whether its pages are in this process's page table, as far as we know.
        """
        self._maps_ahead = not read_only
        self._readable = self._memory.toreadonly()

    @property
    def memory(self) -> memoryview:
        """All of it, read-only; the same view each time, until `close`."""
        return self._readable

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """A read-only view; AgentGoneError if it is not inside the arena."""
        view = self._readable[offset : offset + size_bytes]
        if len(view) != size_bytes:
            raise _outside()
        return view

    def read_each(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[memoryview]:
        """`read` of each, quicker."""
        ends = list(map(add, offsets, sizes))
        if max(ends, default=0) > self.size_bytes:
            raise _outside()
        return map(self._readable.__getitem__, map(slice, offsets, ends))

    def room(self, offset: int, size_bytes: int) -> memoryview:
        """A view to write; AgentGoneError as for `read`."""
        view = self._memory[offset : offset + size_bytes]
        if len(view) != size_bytes:
            raise _outside()
        if self._maps_ahead and size_bytes >= GRANULE_BYTES:
            self._map_pages(offset, size_bytes)
        return view

    def _map_pages(self, offset: int, size_bytes: int) -> None:
        """Have the pages of a room that is about to be written mapped at once: one after the other,
        as they are written to, takes longer than all the rest of a put."""
        whole = slice(-(-offset // GRANULE_BYTES), (offset + size_bytes) // GRANULE_BYTES)
        if self._mapped.find(0, whole.start, whole.stop) < 0:
            return
        try:
            self._map.populate(offset, size_bytes)
        except OSError:  # Linux before 5.14, or no memory: then they come one by one
            self._maps_ahead = False
        else:
            self._mapped[whole] = b"\1" * (whole.stop - whole.start)

    def close(self) -> None:
        """Unmap it, or leave that to the last view that is still used."""
        self._readable.release()
        self._map.close()  # the caller may still have views


def _outside() -> AgentGoneError:
    return AgentGoneError("the agent named bytes outside the arena")
