"""When a wait ends for segments that came by RDMA: with several at once, while most of what was
asked for still comes, and at once where Python has something to do.

Oracle: the segments that each wait tells of. The card is a stand-in (`landing_card`), the socket a
real one. Cannot see: how long anything takes; no wait here ends by the clock but those that must.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kvcast.bench.fuzz.courier import Stand
from kvcast.hostagent import membarrier
from kvcast.hostagent.core.pushing import Pushes
from kvcast.hostagent.network.courier import CourierDriver, CourierSelector
from kvcast.hostagent.network.mover import Mover
from kvcast.protocol.meetings import Meetings
from kvcast.protocol.messages import roce, wire
from kvcast.protocol.messages.roce import Place
from kvcast.protocol.messages.shared import REGION_BYTES
from kvcast.protocol.placement import HELD, Arrived, address_of_buffer
from landing_card import BLOCK, DIGEST, HOME, SIZE, Card, Reader

pytestmark = pytest.mark.skipif(
    not membarrier.available(), reason="no membarrier(2), or not x86-64"
)
LONG_S = 3600.0


class Bed:
    """A wait, a reader, and who sends to it."""

    def __init__(self, tell_within_s: float, *, polls: bool = False) -> None:
        self.card = Card()
        self.stand = Stand()
        self.placement = self.stand.core.requester.placement
        self.reader = Reader(self.card, 1, self.placement)
        self.told: list[int] = []
        self.frames = 0
        self.home, mine = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        for each in (self.home, mine):
            each.bind(("127.0.0.1", 0))
        mine.setblocking(False)
        self.mine = mine
        self.selector = CourierSelector()
        self.selector.register(mine, 1)
        mover = Mover(mine, connected=False, joins=False)

        def placed(arrivals: list[Arrived]) -> None:
            self.told.extend(arrived.segment for arrived in arrivals)

        def frame(_node: int, _data: bytes) -> None:
            self.frames += 1

        self.meetings = Meetings()
        core = self.stand.core
        pushes = Pushes(
            *(self.stand.courier, core.store, core.writes, core.serving, core.outbox, core.metrics),
            arena_address=address_of_buffer(self.stand.memory),
            lane=0,
        )
        self.driver = CourierDriver(
            *(self.stand.courier, pushes, self.selector, self.placement),
            frames=mine,
            mover=mover,
            go_on=lambda why, pieces: self.placement.go_on(
                why, mover.pieces, pieces, placed, frame
            ),
            pump=lambda: None,
            count=lambda: None,
            lane=None,
            meetings=self.meetings,
            pins=memoryview(bytearray(REGION_BYTES)),
            given=lambda _given, _node: None,
            open_lane=lambda _now: None,
            close_lane=lambda _now: False,
            tell_within_s=tell_within_s,
            polls=polls,
        )
        # Frames are Python's unless a lane is open; this one answers nothing.
        lane: Any = self.driver._no_lane
        lane.opened = 1
        lane.meetings = self.meetings.address
        for index in range(4):
            assert self.card.landing.claim(self.reader.place(index), index)

    def come(self, *indices: int) -> None:
        """Segments come whole, and the ends of their answers."""
        for index in indices:
            self.reader.land(index, self.reader.missing[index])
            self.home.sendto(self.reader.end_of(index), self.mine.getsockname())

    def close(self) -> None:
        self.driver.close()
        self.selector.close()
        self.mine.close()
        self.home.close()


@contextlib.contextmanager
def bed(tell_within_s: float = LONG_S, *, polls: bool = False) -> Iterator[Bed]:
    made = Bed(tell_within_s, polls=polls)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def later(made: Bed, *indices: int) -> Iterator[None]:
    """These segments come when the wait has begun, on any machine that is not very slow."""

    def come() -> None:
        time.sleep(0.2)
        made.come(*indices)

    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_half_of_what_is_awaited_is_told_of_together() -> None:
    with bed() as made:
        made.come(1)
        with later(made, 2):
            assert made.driver.wait(None) == []
        assert made.told == [1, 2]


def test_who_asks_for_nothing_more_hears_when_the_block_is_there() -> None:
    with bed() as made:
        made.placement.ask_more(more=False)
        made.come(1, 2)
        with later(made, 3, 0):
            made.driver.wait(None)
        assert made.told == [1, 2, 3, 0]
        assert made.reader.buffer == made.reader.data


def test_the_end_of_a_block_is_told_of_at_once() -> None:
    with bed() as made:
        made.come(0, 1, 2)
        made.driver.wait(None)
        assert sorted(made.told) == [0, 1, 2]
        made.told.clear()
        for index in range(3):
            made.card.landing.release(made.reader.place(index))
        for slot in range(104, 112):
            assert made.card.landing.claim(Place.of(0, slot, slot), slot)
        made.come(3)
        made.driver.wait(None)
        assert made.told == [3]
        assert made.reader.buffer == made.reader.data


def test_a_segment_is_told_of_when_nothing_follows_it() -> None:
    with bed(tell_within_s=0.05) as made:
        made.come(1)
        made.driver.wait(None)
        assert made.told == [1]


def test_a_wait_that_ends_for_another_reason_tells_of_it_first() -> None:
    with bed() as made:
        made.come(1)
        made.driver.wait(0.3)
        assert made.told == [1]


def test_what_python_must_decide_is_told_of_at_once_with_what_came_before() -> None:
    with bed() as made:
        made.come(1)
        made.reader.land(2, made.reader.missing[2] & ~2)
        made.home.sendto(made.reader.end_of(2), made.mine.getsockname())
        made.driver.wait(None)
        assert made.told == [1]
        assert made.frames == 1


# --- no copy is chosen yet ----------------------------------------------------------------------


class Choosing:
    """Whoever chooses copies; nothing of the block is known before."""

    def __init__(self, made: Bed, refuses: bool = False, size: int = SIZE) -> None:
        self.made, self.refuses, self.size = made, refuses, size
        self.heard: list[int] = []
        made.placement.leave(made.reader.number)
        made.placement.choose = self.choose

    def choose(self, node: int, datagram: bytes) -> bool:
        assert node == HOME
        self.heard.append(wire.segment_index(wire.decode(datagram).segment))
        if not self.refuses:
            reader = self.made.reader
            reader.number, reader.serial, _ = self.made.placement.enter(
                *(BLOCK, self.size, DIGEST, memoryview(reader.buffer)),
                *(roce.SHARED_CHUNKING, [HOME]),
            )
        return self.refuses


def test_of_a_block_without_a_copy_python_hears_with_half_of_what_is_awaited() -> None:
    """And chooses it once: what was held behind the first is then put in its place."""
    with bed() as made:
        choosing = Choosing(made)
        made.come(1)
        with later(made, 2):
            assert made.driver.wait(None) == []
        assert choosing.heard == [1]
        assert made.told == [1, 2]
        assert made.frames == 0
        for index in (1, 2):
            start = roce.SHARED_CHUNKING.start_of(index)
            size = roce.SHARED_CHUNKING.bytes_of(SIZE, index)
            assert made.reader.segment(index) == made.reader.data[start : start + size]


def test_of_such_a_block_python_hears_when_nothing_follows() -> None:
    with bed(tell_within_s=0.05) as made:
        choosing = Choosing(made)
        made.come(2)
        made.driver.wait(None)
        assert (choosing.heard, made.told, made.frames) == ([2], [2], 0)


def test_what_is_held_comes_before_what_python_must_decide() -> None:
    with bed() as made:
        choosing = Choosing(made)
        made.come(1)
        made.home.sendto(made.reader.end_of(2, tag=1), made.mine.getsockname())
        made.driver.wait(None)
        assert choosing.heard == [1]
        assert made.told == [1]
        assert made.frames == 1, "the end of an answer that nobody awaits"


def test_of_what_is_refused_nothing_more_is_heard() -> None:
    with bed() as made:
        choosing = Choosing(made, refuses=True)
        made.come(1, 2)
        made.driver.wait(None)
        assert (choosing.heard, made.told, made.frames) == ([1, 2], [], 0)
        assert not any(made.reader.buffer)


def test_what_is_held_and_lacks_something_is_for_python() -> None:
    with bed() as made:
        choosing = Choosing(made)
        made.reader.land(1, made.reader.missing[1] & ~4)
        made.home.sendto(made.reader.end_of(1), made.mine.getsockname())
        made.come(2)
        made.driver.wait(None)
        assert choosing.heard == [1]
        assert made.told == [2]
        assert made.frames == 1


def test_of_another_copy_than_the_one_chosen_python_decides() -> None:
    with bed() as made:
        choosing = Choosing(made)
        made.come(1)
        made.reader.land(2, made.reader.missing[2])
        made.home.sendto(made.reader.end_of(2, digest=DIGEST + 1), made.mine.getsockname())
        made.driver.wait(None)
        assert choosing.heard == [1, 2]
        assert made.told == [1]
        assert made.frames == 1


def test_a_small_block_without_a_copy_is_told_of_at_once() -> None:
    with bed() as made:
        choosing = Choosing(made, size=100)
        made.home.sendto(made.reader.end_of(0, size=100), made.mine.getsockname())
        made.reader.land(0, 1)
        made.driver.wait(None)
        assert choosing.heard == [0]
        assert made.told == [0]


def test_so_many_ends_are_held_and_no_more() -> None:
    """Whoever sends the same again and again has Python look at it at once."""
    with bed() as made:
        choosing = Choosing(made, refuses=True)
        for slot in range(roce.ZONE_SLOTS):
            made.card.landing.claim(Place.of(9, slot, slot), slot)
        made.reader.land(1, made.reader.missing[1])
        for _ in range(HELD + 1):
            made.home.sendto(made.reader.end_of(1), made.mine.getsockname())
        made.driver.wait(None)
        assert choosing.heard == [1] * HELD
        assert made.frames == 1


def test_who_comes_when_there_are_no_descriptors_asks_the_agent_for_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_descriptors(*_: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with bed() as made:
        (session, *_) = made.stand.sessions
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", out_of_descriptors)
            assert made.driver.add(session) is None
        theirs = made.driver.add(session)
        assert theirs is not None
        theirs.close()


def _sleeps() -> int:
    """How often this thread has given its processor up to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@pytest.mark.parametrize("polls", [False, True])
def test_a_wait_that_polls_ends_as_another_but_does_not_sleep(polls: bool) -> None:
    with bed(polls=polls) as made:
        before = _sleeps()
        for _ in range(20):
            assert made.driver.wait(0.002) == []
        slept = _sleeps() - before
        assert slept < 20 if polls else slept >= 20
        made.come(1)
        with later(made, 2):
            assert made.driver.wait(None) == [], "what it waits for comes without a time, too"
        assert made.told == [1, 2]
