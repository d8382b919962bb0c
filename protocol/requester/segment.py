"""One segment of a fetch: the state that it is in, and when something must be done about it.

Owns: what can happen to a segment in which state (`TRANSITIONS`), and which times run in it. Must
not know: windows, frames, or whom to ask (`asking`), or where the bytes go (`assembly`).

Two rules, as in h11. A segment's state changes in `Segment.happen` and nowhere else. What the
table does not name cannot happen: it raises, and the mistake is ours, since whoever calls has
looked at the state before. Read one row of the table as: in this state, these events are
possible, and this is where each leads.

A segment in flight always has one timer in the queue, which comes up at `due_at`:

    ASKED                           when its answer is overdue, or at `repeat_at` if that is sooner
    DEFERRED, RECEIVING, REPAIRING  when the home's pause, or our patience, is over
    POSTPONED, GAPPED               at `ask_at`, and not before
"""

from __future__ import annotations

from enum import IntEnum
from math import inf
from typing import Final

from kvcast.protocol.impossible import ImpossibleEventError
from kvcast.protocol.messages.roce import Place
from kvcast.protocol.requester.story import Story
from kvcast.protocol.timers import Timer


class SegmentState(IntEnum):
    """Where a segment stands."""

    IDLE = 0
    """The present home has not been asked for it, and nothing comes unasked."""
    ASKED = 1
    """A READ of the full segment is out, and nothing has come since."""
    POSTPONED = 2
    """The READ is lost: the wait at a switch that it joined has ended. One more goes out soon."""
    DEFERRED = 3
    """The home is overloaded and has sent us away for a while; no READ is out."""
    RECEIVING = 4
    """Something has come, and the end of the answer has not."""
    GAPPED = 5
    """The answer has ended, and what it lacks is asked for soon, unless it is only late."""
    REPAIRING = 6
    """A READ of the missing chunks is out, and nothing has come since."""
    DONE = 7
    """All of it is there."""
    DROPPED = 8
    """It was in flight, and the fetch does not want it any more."""


class SegmentEvent(IntEnum):
    """What can happen to a segment."""

    ASK = 0
    """A READ of all of it is sent, the first one or a repetition."""
    REPAIR = 1
    """A READ of the chunks that are missing is sent."""
    BEGIN = 2
    """The first DATA of it, or the first since the last READ, has come."""
    GAP = 3
    """An answer has ended, and chunks are missing."""
    COMPLETE = 4
    """The last missing chunk has come, or all at once."""
    SWALLOWED = 5
    """Something that is no answer to us has ended the wait that our READ may have joined."""
    OVERLOADED = 6
    """The home asks for patience."""
    SILENCE = 7
    """Nothing has come for as long as we wait."""
    LEAVE = 8
    """The home is left for another. This and `DROP` concern only what is in flight."""
    DROP = 9
    """All that has come is thrown away, or the segment turns out not to exist."""


_S, _E = SegmentState, SegmentEvent

_ANY_IN_FLIGHT: Final = {_E.OVERLOADED: _S.DEFERRED, _E.LEAVE: _S.IDLE, _E.DROP: _S.DROPPED}
"""What can happen to every segment in flight."""

TRANSITIONS: Final[dict[SegmentState, dict[SegmentEvent, SegmentState]]] = {
    _S.IDLE: {
        _E.ASK: _S.ASKED,
        _E.REPAIR: _S.REPAIRING,
        _E.BEGIN: _S.RECEIVING,
    },
    _S.ASKED: {
        _E.ASK: _S.ASKED,
        _E.BEGIN: _S.RECEIVING,
        _E.COMPLETE: _S.DONE,
        _E.SWALLOWED: _S.POSTPONED,
        _E.SILENCE: _S.ASKED,
        **_ANY_IN_FLIGHT,
    },
    _S.POSTPONED: {
        _E.ASK: _S.ASKED,
        _E.BEGIN: _S.RECEIVING,
        **_ANY_IN_FLIGHT,
    },
    _S.DEFERRED: {
        _E.ASK: _S.ASKED,
        _E.REPAIR: _S.REPAIRING,
        _E.BEGIN: _S.RECEIVING,
        **_ANY_IN_FLIGHT,
    },
    _S.RECEIVING: {
        _E.REPAIR: _S.REPAIRING,
        _E.GAP: _S.GAPPED,
        _E.COMPLETE: _S.DONE,
        _E.SILENCE: _S.RECEIVING,
        **_ANY_IN_FLIGHT,
    },
    _S.GAPPED: {
        _E.REPAIR: _S.REPAIRING,
        _E.GAP: _S.GAPPED,
        _E.COMPLETE: _S.DONE,
        **_ANY_IN_FLIGHT,
    },
    _S.REPAIRING: {
        _E.REPAIR: _S.REPAIRING,
        _E.BEGIN: _S.RECEIVING,
        _E.SILENCE: _S.REPAIRING,
        **_ANY_IN_FLIGHT,
    },
    _S.DONE: {},
    _S.DROPPED: {},
}

IN_FLIGHT: Final = frozenset(_S) - {_S.IDLE, _S.DONE, _S.DROPPED}
"""Asked for, or arriving; a timer runs."""
AWAITING: Final = frozenset({_S.ASKED, _S.POSTPONED, _S.DEFERRED, _S.REPAIRING})
"""Of them, those of which nothing has come since the last READ."""
ASKS_SOON: Final = frozenset({_S.POSTPONED, _S.GAPPED})
"""Of them, those with an `ask_at`."""


class Segment(Timer):
    """What is being done about one segment of a fetch."""

    __slots__ = (
        "ask_at",
        "base_at",
        "fetch_id",
        "gather_s",
        "home",
        "in_window",
        "index",
        "overtaken",
        "patience_s",
        "place",
        "repeat_at",
        "sent_at",
        "silences",
        "state",
        "story",
        "tag",
        "tries",
        "wait_s",
        "waits_at_switch",
        "written",
    )

    def __init__(self, index: int, story: Story) -> None:
        self.queued_at = inf  # as `Timer` does
        self.fetch_id = story.fetch_id
        self.index = index
        self.story = story
        self.state = SegmentState.IDLE
        self.home = -1
        """Where it was asked for last; in flight, the fetch's present home."""
        self.in_window = False
        """Whether it counts in the home's window; in flight and not there, it counts beside."""
        self.overtaken = False
        """Whether answers that others share have left it behind since the last READ."""
        self.waits_at_switch = False
        """Whether a switch may hold a wait of ours for it, so that the next READ is a RETRY."""
        self.tag = -1
        """Of the READ that a round trip is being measured for."""
        self.place: Place | None = None
        """In flight: its place in the landing zone, where its answer comes by RDMA."""
        self.written = False
        """Whether the end of an answer by RDMA has come, so that what lands is put in its place at
        once."""
        self.sent_at = 0.0
        self.gather_s = 0.0
        self.tries = 0
        """Setbacks in a row,"""
        self.silences = 0
        """and how many of them were time-outs."""
        self.base_at = 0.0
        """The last READ or progress; an answer is overdue `wait_s` later,"""
        self.wait_s = 0.0
        self.patience_s = 0.0
        """or so much later still, while the home sends other segments."""
        self.ask_at = inf
        """When to ask, in POSTPONED and GAPPED."""
        self.repeat_at = inf
        """When to send the READ a second time, in ASKED, if its home gathers for so long."""

    @property
    def is_new(self) -> bool:
        """Whether it was never in flight, and has no wait at a switch."""
        return self.home < 0 and not self.waits_at_switch

    @property
    def in_flight(self) -> bool:
        """Whether it is asked for, or arriving."""
        return self.state in IN_FLIGHT

    def happen(self, now: float, event: SegmentEvent) -> None:
        """Go to where the table leads. The times of the state before do not run any more; the
        caller sets those of the new one."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise ImpossibleEventError(
                f"segment {self.index} is {self.state.name}: no {event.name}\n{self.story}"
            )
        self.state = state
        self.ask_at = inf
        self.repeat_at = inf
        self.story.tell((now, "segment", self.index, event, state))

    def due_at(self, heard_at: float) -> float:
        """When to ask again for what the segment lacks; `heard_at`: when its home was last heard.

        A home answers in order, so while it sends other segments this one's turn may only not
        have come; the time-out of a full READ starts again with everything that the home sends,
        up to a bound, since the READ may be lost all the same. Where it is known when to ask again,
        nothing else is waited for.
        """
        if self.ask_at != inf:
            return self.ask_at
        base_at = max(self.base_at, min(heard_at, self.base_at + self.patience_s))
        return min(self.repeat_at, base_at + self.wait_s)

    def check(self, missing: int | None, all_chunks: int) -> None:
        """That the segment agrees with itself, and with the chunks that the assembly lacks of it
        (None: no copy is chosen)."""
        state = self.state
        assert (state in IN_FLIGHT) == (self.queued_at != inf), f"timer of {self}"
        assert (state in ASKS_SOON) == (self.ask_at != inf), f"ask_at of {self}"
        assert state is SegmentState.ASKED or self.repeat_at == inf, f"repeat_at of {self}"
        assert state in IN_FLIGHT or not self.in_window, f"place of {self}"
        assert self.silences <= self.tries, f"setbacks of {self}"
        assert state in AWAITING or not self.overtaken, f"overtaken: {self}"
        assert state is not SegmentState.DROPPED, f"{self} is still there"
        if missing is None or missing == all_chunks:
            untouched = (SegmentState.IDLE, SegmentState.ASKED, SegmentState.POSTPONED)
            assert state in (*untouched, SegmentState.DEFERRED), f"nothing has come of {self}"
        else:
            assert (state is SegmentState.DONE) == (missing == 0), f"{missing:x} missing of {self}"
            assert state not in (SegmentState.ASKED, SegmentState.POSTPONED), f"part of {self}"

    def __repr__(self) -> str:
        return f"<segment {self.index} of fetch {self.fetch_id}: {self.state.name}>"
