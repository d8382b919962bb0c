"""One fetch: the state that it is in, and what it has.

Owns: what can happen to a fetch in which state (`TRANSITIONS`), and the list of its segments. Must
not know: when to ask for which of them (`asking`), which home comes next (`failover`), or what a
frame means (`requester`).

A fetch's state changes in `Fetch.happen` and nowhere else; what the table does not name raises.
Whether a copy has been chosen is no state of its own: it has, when there is an `assembly`.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from math import inf
from typing import Final

from kvcast.protocol.impossible import ImpossibleEventError
from kvcast.protocol.messages.wire import CELLS, BlockId, Offer
from kvcast.protocol.requester.assembly import Assembly
from kvcast.protocol.requester.events import FetchReport, Reservation
from kvcast.protocol.requester.failover import Candidates
from kvcast.protocol.requester.segment import Segment, SegmentState
from kvcast.protocol.requester.story import Story
from kvcast.protocol.timers import Timer


class FetchState(IntEnum):
    """Where a fetch stands."""

    NEW = 0
    """Made, and nothing done yet."""
    EXPECTING = 1
    """The reader group's DATA is awaited; only what is lost of it is asked for."""
    PROBING = 2
    """The first segment is being read, and an offer of another way may come."""
    READING = 3
    """All segments are being read."""
    OFFERED = 4
    """An offer has been taken; the block comes that way, or else by READs."""
    LAST_RESORT = 5
    """No home has answered READs with the block; it comes the bulk way, or not at all."""
    ENDED = 6


class FetchEvent(IntEnum):
    """What can happen to a fetch."""

    EXPECT = 0
    """It begins, and waits for DATA that others ask for."""
    READ_FIRST = 1
    """Read the first segment."""
    READ_ALL = 2
    """Read everything."""
    CHOOSE_COPY = 3
    """The first DATA has decided which copy it is of."""
    MOVE = 4
    """Go on at another home, with what has come."""
    RESTART = 5
    """Begin anew, with nothing."""
    TAKE_OFFER = 6
    GIVE_UP_READS = 7
    """Try the bulk way."""
    END = 8
    """It is fetched, or missed."""


_S, _E = FetchState, FetchEvent

TRANSITIONS: Final[dict[FetchState, dict[FetchEvent, FetchState]]] = {
    _S.NEW: {
        _E.EXPECT: _S.EXPECTING,
        _E.READ_FIRST: _S.PROBING,
        _E.READ_ALL: _S.READING,
    },
    _S.EXPECTING: {
        _E.READ_ALL: _S.READING,
        _E.CHOOSE_COPY: _S.EXPECTING,
        _E.MOVE: _S.EXPECTING,
        _E.RESTART: _S.EXPECTING,
        _E.GIVE_UP_READS: _S.LAST_RESORT,
        _E.END: _S.ENDED,
    },
    _S.PROBING: {
        _E.READ_ALL: _S.READING,
        _E.CHOOSE_COPY: _S.PROBING,
        _E.MOVE: _S.PROBING,
        _E.RESTART: _S.PROBING,
        _E.TAKE_OFFER: _S.OFFERED,
        _E.GIVE_UP_READS: _S.LAST_RESORT,
        _E.END: _S.ENDED,
    },
    _S.READING: {
        _E.CHOOSE_COPY: _S.READING,
        _E.MOVE: _S.READING,
        _E.RESTART: _S.READING,
        _E.GIVE_UP_READS: _S.LAST_RESORT,
        _E.END: _S.ENDED,
    },
    _S.OFFERED: {
        _E.READ_ALL: _S.READING,
        _E.GIVE_UP_READS: _S.LAST_RESORT,
        _E.END: _S.ENDED,
    },
    _S.LAST_RESORT: {_E.END: _S.ENDED},
    _S.ENDED: {},
}

IN_BULK: Final = frozenset({_S.OFFERED, _S.LAST_RESORT})
"""The block comes another way than by READs."""


class Deadline(Timer):
    """When a fetch ends, whatever its state."""

    __slots__ = ("fetch_id",)

    def __init__(self, fetch_id: int) -> None:
        super().__init__()
        self.fetch_id = fetch_id


class Expectation(Timer):
    """When a fetch that expects DATA has waited for long enough; in EXPECTING only."""

    __slots__ = ("fetch_id",)

    def __init__(self, fetch_id: int) -> None:
        super().__init__()
        self.fetch_id = fetch_id


class Fetch:
    """One block on its way here."""

    __slots__ = (
        "assembly",
        "block",
        "chunking",
        "deadline",
        "deadline_timer",
        "expect_digest",
        "expect_size",
        "expect_waits",
        "expectation_timer",
        "gather_ms",
        "gathers",
        "group",
        "homes",
        "id",
        "idle",
        "may_probe",
        "offer",
        "progress_at",
        "queued_at",
        "report",
        "reservation",
        "resident",
        "saw_shared",
        "segments",
        "started_at",
        "state",
        "story",
    )

    def __init__(self, story: Story, homes: Candidates, deadline: float) -> None:
        self.id = story.fetch_id
        self.block: BlockId = story.block
        self.story = story
        self.state = FetchState.NEW
        self.homes = homes
        self.started_at = story.started_at
        self.progress_at = story.started_at
        self.deadline = deadline
        self.deadline_timer = Deadline(self.id)
        self.expectation_timer = Expectation(self.id)
        self.expect_size: int | None = None
        self.expect_waits = 1
        self.expect_digest = 0
        self.chunking = CELLS
        """How the READs of this fetch cut the block."""
        self.group = 0
        self.gather_ms = 0
        self.gathers = True
        self.resident = False
        """Whether a switch holds the block, or is to: what it holds comes at once, and so a READ
        that lets a home gather is not sent twice."""
        self.may_probe = False
        """Whether an offer is still of use, so that only the first segment is read as yet."""
        self.offer: Offer | None = None
        self.assembly: Assembly | None = None
        self.reservation: Reservation | None = None
        """The room that the assembly is made in."""
        self.segments: list[Segment] = []
        self.idle: deque[int] = deque()
        """Segments to ask for that may be IDLE, in order."""
        self.queued_at = -1
        """The home in whose queue this fetch stands."""
        self.saw_shared = False
        self.report = FetchReport()

    def happen(self, now: float, event: FetchEvent) -> None:
        """Go to where the table leads."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise ImpossibleEventError(
                f"fetch {self.id} is {self.state.name}: no {event.name}\n{self.story}"
            )
        self.state = state
        self.story.tell((now, "fetch", self.id, event, state))

    def start_reading(self, now: float) -> None:
        """Nothing is expected, or not any more."""
        self.happen(now, FetchEvent.READ_FIRST if self.may_probe else FetchEvent.READ_ALL)

    @property
    def chosen_digest(self) -> int:
        """The digest of the copy that is being put together, or expected; 0 = any will do."""
        return self.expect_digest if self.assembly is None else self.assembly.digest

    def listen(self) -> None:
        """Take chunks from those who are listened to now."""
        if self.assembly is not None:
            self.assembly.listen(self.homes.sources)

    def plan(self, count: int) -> None:
        """Begin with so many segments, none of them asked for."""
        assert self.assembly is None
        self.segments = [Segment(index, self.story) for index in range(count)]
        self.idle = deque(range(count))
        self.offer = None

    def plan_idle(self) -> None:
        """What is IDLE now is to be asked for."""
        wanted = self.segments[:1] if self.may_probe else self.segments
        self.idle = deque(s.index for s in wanted if s.state is SegmentState.IDLE)

    def check(self) -> None:
        """That the fetch agrees with itself; its place among others is for `Asker.check`."""
        state, assembly = self.state, self.assembly
        assert state not in (FetchState.NEW, FetchState.ENDED), f"{self} is in flight"
        assert self.deadline_timer.queued_at <= self.deadline, f"deadline of {self}"
        expecting = self.expectation_timer.queued_at < inf
        assert (state is FetchState.EXPECTING) == expecting, f"expectation of {self}"
        assert state is not FetchState.PROBING or self.may_probe, f"{self} and offers"
        assert state is not FetchState.READING or not self.may_probe, f"{self} and offers"
        assert (assembly is None) == (self.reservation is None), f"reservation of {self}"
        in_bulk = state in IN_BULK
        assert not in_bulk or (not self.segments and not assembly), f"{self} reads as well"
        assert in_bulk or self.segments, f"{self} reads nothing"
        asking = [s.home for s in self.segments if s.in_flight]
        self.homes.check(None if in_bulk else asking)
        if assembly is not None:
            assert len(assembly.missing) == len(self.segments), f"segments of {self}"
            listened = frozenset(self.homes.sources)
            assert assembly.sources == listened, f"sources of {self}"
        for index, segment in enumerate(self.segments):
            assert segment.index == index
            missing = None if assembly is None else assembly.missing[index]
            segment.check(missing, 0 if assembly is None else assembly.all_chunks(index))
            idle = state is FetchState.READING and segment.state is SegmentState.IDLE
            assert not idle or index in self.idle, f"nobody will ask for {segment}"
        if assembly is not None:
            left = sum(missing != 0 for missing in assembly.missing)
            assert assembly.segments_left == left, f"{left} segments of {self} are left"

    def __repr__(self) -> str:
        return f"<fetch {self.id} of {self.block}: {self.state.name}>"
