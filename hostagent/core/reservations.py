"""Room in the arena for blocks that are on their way here.

Owns: the way from the store, which hands out copies, to whoever fills them (a fetch, the bulk
link), who is given a view of memory to write into. Must not know: fetches, clients, or where bytes
come from.
"""

from __future__ import annotations

from kvcast.hostagent.core.store import Copy, QuotaError, Store, StoreError
from kvcast.protocol.messages import local
from kvcast.protocol.messages.wire import BlockId


class ArenaReservation:
    """Room for one block; ends with `commit` or `abort` (the requester's `Reservation`)."""

    __slots__ = ("_copy", "_store", "view")

    def __init__(self, store: Store, copy: Copy, view: memoryview) -> None:
        self._store = store
        self._copy = copy
        self.view = view

    def commit(self, digest: int, *, home: bool, since: float | None = None) -> Copy:
        """The block is there; its copy is pinned. As `Store.commit`, which may raise
        StaleReservationError."""
        self.view.release()
        return self._store.commit(self._copy, digest, home=home, pinned=True, since=since)

    def abort(self) -> None:
        """The block does not come."""
        self.view.release()
        self._store.abort(self._copy)


class Reservations:
    """Makes room."""

    def __init__(self, store: Store, memory: memoryview) -> None:
        self._store = store
        self._memory = memory
        self._refusals: dict[BlockId, str] = {}

    def reserve(self, block: BlockId, size_bytes: int) -> ArenaReservation | None:
        """Room for a block of so many bytes, if there is (the requester's `Allocate`); if there is
        not, `end` tells why."""
        try:
            copy = self._store.reserve(block, size_bytes)
        except StoreError as error:
            self._refusals[block] = local.QUOTA if isinstance(error, QuotaError) else local.NO_ROOM
            return None
        view = self._memory[copy.offset : copy.offset + copy.size_bytes]
        return ArenaReservation(self._store, copy, view)

    def end(self, block: BlockId) -> str:
        """To be called when a fetch of `block` has ended: the status of the last refusal of room
        for it, which is then forgotten."""
        return self._refusals.pop(block, local.NO_ROOM)
