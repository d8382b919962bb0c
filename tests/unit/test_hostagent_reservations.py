"""Room for blocks on their way: what becomes of it, and why there is none.

Oracle: the store's own counts. Cannot see: who asks for room, and when.
"""

from __future__ import annotations

import pytest
from kvcast.hostagent.core.reservations import ArenaReservation, Reservations
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.messages import local
from kvcast.protocol.messages.wire import BlockId, digest_of

SLAB = 64 * 1024
BLOCK, OTHER = BlockId(1, bytes(16)), BlockId(1, bytes(range(16)))


def make(quota_slabs: int = 0) -> tuple[Store, Reservations]:
    store = Store(Allocator(2 * SLAB, SLAB), default_quota_bytes=quota_slabs * SLAB)
    return store, Reservations(store, memoryview(bytearray(2 * SLAB)))


def room(reservations: Reservations, block: BlockId, size_bytes: int) -> ArenaReservation:
    reservation = reservations.reserve(block, size_bytes)
    assert reservation is not None
    assert reservation.view.nbytes == size_bytes
    return reservation


def test_what_is_written_into_a_committed_reservation_is_the_block() -> None:
    store, reservations = make()
    reservation = room(reservations, BLOCK, 5)
    view = reservation.view
    view[:] = b"bytes"
    copy = reservation.commit(digest_of(b"bytes"), home=True)
    assert store.get(BLOCK) is copy
    assert (copy.size_bytes, copy.home) == (5, True)
    with pytest.raises(ValueError, match="released"):
        view[0] = 1


def test_an_aborted_reservation_leaves_nothing() -> None:
    store, reservations = make()
    reservation = room(reservations, BLOCK, 2 * SLAB)
    assert reservations.reserve(OTHER, 1) is None
    reservation.abort()
    room(reservations, OTHER, 2 * SLAB)
    assert store.get(BLOCK) is None


@pytest.mark.parametrize(("quota_slabs", "status"), [(0, local.NO_ROOM), (1, local.QUOTA)])
def test_a_refusal_is_told_once_by_the_block_that_it_concerns(
    quota_slabs: int, status: str
) -> None:
    _, reservations = make(quota_slabs)
    assert reservations.reserve(BLOCK, 3 * SLAB) is None
    assert reservations.end(OTHER) == local.NO_ROOM
    assert reservations.end(BLOCK) == status
    assert reservations.end(BLOCK) == local.NO_ROOM
