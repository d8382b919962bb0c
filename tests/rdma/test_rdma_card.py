"""One card, its pairs and its windows: what another node can reach, and what not any more.

Oracle: the bytes in the two halves of one piece of memory. What Soft-RoCE does not enforce (bounds
of windows) is not looked at.
"""

from __future__ import annotations

import asyncio
import mmap
import random
from collections.abc import AsyncIterator, Sequence

import pytest
from kvcast.hostagent.network.verbs import Card
from kvcast.protocol.links.rdma import (
    CloseWindow,
    Completed,
    OpenWindow,
    Pair,
    RdmaOptions,
    Read,
    Verbs,
    VerbsError,
    Work,
    Write,
)

SIZE = 100_000


class Half:
    """One half of a pair, and what was said of its work."""

    def __init__(self, card: Verbs) -> None:
        self.done: asyncio.Queue[Completed] = asyncio.Queue()
        self.pair: Pair = card.make_pair(self._completed)

    def _completed(self, done: list[Completed]) -> None:
        for item in done:
            self.done.put_nowait(item)

    async def do(self, *work: Work) -> list[Completed]:
        self.pair.post(work)
        return [await asyncio.wait_for(self.done.get(), 10) for _ in work]


@pytest.fixture
async def card() -> AsyncIterator[Card]:
    memory = mmap.mmap(-1, 1 << 20)
    view = memoryview(memory)
    card = Card("10.78.0.1", view, RdmaOptions(max_pairs=6))
    card.memory = view  # type: ignore[attr-defined]
    yield card
    card.close()


def joined(card: Card) -> tuple[Half, Half]:
    """A pair that is connected: who asks, and who opens windows."""
    here, there = Half(card.calling), Half(card)
    here.pair.join(there.pair.endpoint)
    there.pair.join(here.pair.endpoint)
    return here, there


def halves(card: Card) -> tuple[memoryview, memoryview]:
    view: memoryview = card.memory  # type: ignore[attr-defined]
    return view[: 1 << 19], view[1 << 19 :]


def close(*some: Half | Sequence[Half]) -> None:
    for half in some:
        if isinstance(half, Half):
            half.pair.close()


async def test_a_window_lets_bytes_be_read_until_it_is_closed(card: Card) -> None:
    here, there = joined(card)
    mine, theirs = halves(card)
    theirs[:SIZE] = b"x" * SIZE
    for _ in range(3):  # windows are used again, each time by another key
        (window,) = await there.do(OpenWindow(1, theirs[:SIZE], writable=False))
        assert window.problem == ""
        mine[:SIZE] = bytes(SIZE)
        (read,) = await here.do(Read(7, mine[:SIZE], window.address, window.key))
        assert read == Completed(7)
        assert mine[:SIZE] == theirs[:SIZE]
        assert await there.do(CloseWindow(2, 1)) == [Completed(2)]
    (stale,) = await here.do(Read(8, mine[:SIZE], window.address, window.key))
    assert "access" in stale.problem.lower()
    close(here, there)


async def test_a_window_is_for_one_pair_and_one_kind_of_access(card: Card) -> None:
    for attempt in ("another pair", "another access"):
        here, there = joined(card)
        other, its_peer = joined(card)
        mine, theirs = halves(card)
        theirs[:4] = b"kept"
        (window,) = await there.do(OpenWindow(1, theirs[:4096], writable=False))
        if attempt == "another pair":
            (done,) = await other.do(Read(1, mine[:4096], window.address, window.key))
        else:
            (done,) = await here.do(Write(1, mine[:4096], window.address, window.key))
        assert done.problem, attempt
        assert bytes(theirs[:4]) == b"kept"
        close(here, there, other, its_peer)


async def test_what_is_in_no_window_cannot_be_reached(card: Card) -> None:
    here, there = joined(card)
    mine, theirs = halves(card)
    (window,) = await there.do(OpenWindow(1, theirs[:4096], writable=True))
    (done,) = await here.do(Write(1, mine[:4096], window.address, window.key ^ 0x100))
    assert done.problem
    close(here, there)


async def test_pairs_are_bounded_and_come_back(card: Card) -> None:
    some = [Half(kind) for kind in (card, card.calling) for _ in range(3)]
    for kind in (card, card.calling):
        with pytest.raises(VerbsError, match="all 6"):
            Half(kind)
    close(*some)
    close(*joined(card))
    assert card.pairs == 0


async def test_reads_that_take_long_to_order_are_ordered_by_a_thread(card: Card) -> None:
    here, there = joined(card)
    mine, theirs = halves(card)
    theirs[:] = random.Random(1).randbytes(len(theirs))
    (window,) = await there.do(OpenWindow(1, theirs, writable=False))
    part = len(theirs) // 8
    for first in range(0, 64, 8):
        mine[:] = bytes(len(mine))
        reads = [
            Read(first + n, mine[n * part : (n + 1) * part], window.address + n * part, window.key)
            for n in range(8)
        ]
        assert await here.do(*reads) == [Completed(read.token) for read in reads]
        assert mine == theirs
    # Soft-RoCE moves half a megabyte in the call, which takes an emulated processor long.
    assert card.calling.poster.is_slow
    reads = [Read(n, mine[n * part :][:part], window.address, window.key) for n in range(8)]
    here.pair.post(reads)
    here.pair.close()  # in the middle: what was ordered is over, or never happens
    close(there)
    assert card.pairs == 0


async def test_no_card_has_that_address() -> None:
    with pytest.raises(VerbsError, match="address"):
        Card("10.79.0.1", memoryview(mmap.mmap(-1, 4096)), RdmaOptions())
