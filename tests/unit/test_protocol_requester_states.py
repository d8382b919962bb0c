"""The requester's state tables, its look at itself, and the stories of its fetches.

Oracle: the tables themselves (what they do not name must raise), and states that were spoilt by
hand. Cannot see: whether a table is right; that is what the other tests of the requester are for.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
from collections.abc import Callable
from enum import IntEnum
from math import inf
from typing import Any

import pytest
from data_frames import data_frame
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.wire import BlockId, Frame, digest_of
from kvcast.protocol.requester import (
    Fetched,
    ImpossibleEventError,
    Missed,
    MissReason,
    OfferReceived,
    Requester,
    RequesterConfig,
    Story,
    failover,
    fetch,
    segment,
    story,
)
from kvcast.protocol.requester.failover import Candidates, HomeEvent, Standing
from kvcast.protocol.requester.fetch import Fetch, FetchEvent, FetchState
from kvcast.protocol.requester.segment import Segment, SegmentEvent, SegmentState

BLOCK = BlockId(3, bytes(range(16)))
HOME, REPLICA = 1, 2
SEGMENT = wire.SEGMENT_BYTES
BYTES = random.Random(1).randbytes(6 * SEGMENT)


# --- the tables -------------------------------------------------------------------------------


def make_segment(state: SegmentState) -> tuple[Any, Callable[[Any], None], Callable[[], Any]]:
    thing = Segment(0, Story(1, BLOCK, 0.0))
    thing.state = state
    thing.ask_at = thing.repeat_at = 5.0
    return thing, lambda event: thing.happen(1.0, event), lambda: thing.state


def make_fetch(state: FetchState) -> tuple[Any, Callable[[Any], None], Callable[[], Any]]:
    told = Story(1, BLOCK, 0.0)
    thing = Fetch(told, Candidates([HOME], HOME, 0.0, told), 1.0)
    thing.state = state
    return thing, lambda event: thing.happen(1.0, event), lambda: thing.state


def make_home(standing: Standing) -> tuple[Any, Callable[[Any], None], Callable[[], Any]]:
    thing = Candidates([HOME], HOME, 0.0, Story(1, BLOCK, 0.0))
    thing.standing[HOME] = standing
    return thing, lambda event: thing.happen(1.0, HOME, event), lambda: thing.standing[HOME]


MACHINES: dict[str, tuple[Any, Any, Any, Any, IntEnum]] = {
    "segment": (
        SegmentState,
        SegmentEvent,
        segment.TRANSITIONS,
        make_segment,
        SegmentState.IDLE,
    ),
    "fetch": (FetchState, FetchEvent, fetch.TRANSITIONS, make_fetch, FetchState.NEW),
    "home": (Standing, HomeEvent, failover.TRANSITIONS, make_home, Standing.UNTRIED),
}


@pytest.mark.parametrize("name", MACHINES)
def test_every_pair_leads_where_its_table_says_or_raises(name: str) -> None:
    states, events, table, make, _ = MACHINES[name]
    refused = 0
    for state, event in itertools.product(states, events):
        thing, happen, now_in = make(state)
        told = len(thing.story)
        if event in table[state]:
            happen(event)
            assert now_in() is table[state][event]
        else:
            refused += 1
            with pytest.raises(ImpossibleEventError, match=f"is {state.name}: no {event.name}"):
                happen(event)
            assert now_in() is state
            assert len(thing.story) == told
    assert refused > len(states)


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_can_be_reached_and_every_event_can_happen(name: str) -> None:
    states, events, table, _, first = MACHINES[name]
    assert set(table) == set(states)
    reached, fresh = {first}, {first}
    while fresh:
        fresh = {to for state in fresh for to in table[state].values()} - reached
        reached |= fresh
    assert reached == set(states)
    assert {event for row in table.values() for event in row} == set(events)


def test_the_times_of_a_state_end_with_it() -> None:
    for state in SegmentState:
        for event in segment.TRANSITIONS[state]:
            thing, happen, _ = make_segment(state)
            happen(event)
            assert (thing.ask_at, thing.repeat_at) == (inf, inf)


def test_what_is_in_flight_can_always_be_taken_out_of_flight() -> None:
    for state in SegmentState:
        row = segment.TRANSITIONS[state]
        in_flight = state in segment.IN_FLIGHT
        assert in_flight == (SegmentEvent.LEAVE in row) == (SegmentEvent.DROP in row)
    assert segment.AWAITING < segment.IN_FLIGHT
    assert segment.ASKS_SOON < segment.IN_FLIGHT


# --- a look at oneself ------------------------------------------------------------------------


class Room:
    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))

    def abort(self) -> None:
        pass


def receive(core: Requester, index: int, chunks: range) -> None:
    """Let chunks of a segment of BYTES arrive."""
    for chunk in chunks:
        flags = wire.FLAG_LAST if chunk == 63 else 0
        frame = data_frame(BLOCK, BYTES, index, chunk, flags=flags, tag=0xFFFF0000)
        core.receive(0.001, HOME, frame)


class Scene:
    """A fetch whose segments are in most of the states, and one that waits for the home's window:

    0     1          2       3          4      5
    DONE  RECEIVING  GAPPED  RECEIVING  ASKED  ASKED
    """

    def __init__(self) -> None:
        config = RequesterConfig(window_initial=4, window_max=4)
        self.core = Requester(
            config, allocate=lambda _block, size: Room(size), rng=random.Random(1)
        )
        self.core.fetch(0.0, BLOCK, (HOME, REPLICA), deadline=9.0, expect_size=len(BYTES))
        self.core.fetch(0.0, BlockId(3, bytes(16)), (HOME,), deadline=9.0)
        self.data(0, range(64))
        self.data(1, range(10))
        self.data(2, range(1, 64))
        self.data(3, range(1))
        self.asker = self.core._asker
        self.fetch, self.waiting = self.core._fetches.values()
        self.segments = self.fetch.segments
        self.home = self.asker.homes[HOME]

    def data(self, index: int, chunks: range) -> None:
        receive(self.core, index, chunks)


# Each of these spoils one thing; its text is a part of what the check says of it.


def test_the_scene_is_in_order() -> None:
    scene = Scene()
    scene.core.check()
    states = [each.state.name for each in scene.segments]
    assert states == ["DONE", "RECEIVING", "GAPPED", "RECEIVING", "ASKED", "ASKED"]
    assert scene.waiting.queued_at == HOME
    assert scene.waiting.segments[0].state is SegmentState.IDLE


def spoil_in_window(scene: Scene) -> None:
    """for [<segment"""
    scene.asker.in_window += 1


def spoil_home_in_window(scene: Scene) -> None:
    """of home 1: ["""
    scene.home.in_window -= 1


def spoil_beside(scene: Scene) -> None:
    """beside, of"""
    scene.asker.beside += 1


def spoil_landing_only(scene: Scene) -> None:
    """1 for []"""
    scene.asker.landing_only += 1


def spoil_awaited_lacks(scene: Scene) -> None:
    """awaited of home 1"""
    del scene.home.awaited[scene.segments[4]]


def spoil_awaited_has(scene: Scene) -> None:
    """awaited of home 1"""
    scene.home.awaited[scene.segments[1]] = None


def spoil_overtaken(scene: Scene) -> None:
    """overtaken: <segment 1"""
    scene.segments[1].overtaken = True


def spoil_landed_in_window(scene: Scene) -> None:
    """place of <segment 0"""
    scene.segments[0].in_window = True


def spoil_timer_lost(scene: Scene) -> None:
    """timer of <segment 1"""
    scene.core._timers.cancel(scene.segments[1])


def spoil_timer_left(scene: Scene) -> None:
    """timer of <segment 0"""
    scene.core._timers.arm(scene.segments[0], 5.0)


def spoil_ask_at_lost(scene: Scene) -> None:
    """ask_at of <segment 2"""
    scene.segments[2].ask_at = inf


def spoil_ask_at_left(scene: Scene) -> None:
    """ask_at of <segment 4"""
    scene.segments[4].ask_at = 1.0


def spoil_repeat_at_left(scene: Scene) -> None:
    """repeat_at of <segment 1"""
    scene.segments[1].repeat_at = 1.0


def spoil_deadline_lost(scene: Scene) -> None:
    """deadline of <fetch 1"""
    scene.core._timers.cancel(scene.fetch.deadline_timer)


def spoil_expectation_left(scene: Scene) -> None:
    """expectation of <fetch 1"""
    scene.core._timers.arm(scene.fetch.expectation_timer, 5.0)


def spoil_timer_of_nobody(scene: Scene) -> None:
    """timers run, not"""
    scene.core._timers.arm(fetch.Deadline(77), 5.0)


def spoil_segment_state(scene: Scene) -> None:
    """part of <segment 1"""
    scene.segments[1].state = SegmentState.ASKED


def spoil_done_too_soon(scene: Scene) -> None:
    """1 missing of <segment 0"""
    assert scene.fetch.assembly is not None
    scene.fetch.assembly.missing[0] = 1


def spoil_number_of_segments(scene: Scene) -> None:
    """segments of <fetch 1"""
    assert scene.fetch.assembly is not None
    scene.fetch.assembly.missing.append(1)


def spoil_reservation_lost(scene: Scene) -> None:
    """reservation of <fetch 1"""
    scene.fetch.reservation = None


def spoil_fetch_state(scene: Scene) -> None:
    """reads as well"""
    scene.fetch.state = FetchState.LAST_RESORT


def spoil_probing(scene: Scene) -> None:
    """<fetch 1"""
    scene.fetch.may_probe = True


def spoil_nobody_asks(scene: Scene) -> None:
    """nobody will ask for <segment 0 of fetch 2"""
    scene.waiting.idle.clear()


def spoil_queue(scene: Scene) -> None:
    """is not in the queue of home 1"""
    scene.home.queues.clear()


def spoil_queued_nowhere(scene: Scene) -> None:
    """waits for home -1"""
    scene.waiting.queued_at = -1


def spoil_turn(scene: Scene) -> None:
    """turn of home 1"""
    scene.asker.waiting.clear()


def spoil_by_block(scene: Scene) -> None:
    """fetches by block"""
    del scene.core._by_block[BLOCK]


def spoil_current(scene: Scene) -> None:
    """asks 2, and [1] are asked"""
    scene.fetch.homes.current = REPLICA


def spoil_two_asked(scene: Scene) -> None:
    """asks 1, and [1, 2] are asked"""
    scene.fetch.homes.standing[REPLICA] = Standing.ASKED


def spoil_verdict(scene: Scene) -> None:
    """LEFT and the verdict of 2"""
    scene.fetch.homes.standing[REPLICA] = Standing.LEFT


def spoil_sources(scene: Scene) -> None:
    """listens to"""
    scene.fetch.homes.sources |= {9}


def spoil_home_of_segment(scene: Scene) -> None:
    """READs are out to"""
    scene.segments[4].home = REPLICA


SPOILERS = [value for name, value in sorted(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: str(spoil.__name__)[6:])
def test_what_contradicts_itself_is_found(spoil: Callable[[Scene], None]) -> None:
    scene = Scene()
    spoil(scene)
    assert spoil.__doc__ is not None
    with pytest.raises(AssertionError, match=re.escape(spoil.__doc__)):
        scene.core.check()


# --- stories ----------------------------------------------------------------------------------


def test_a_story_keeps_the_last_things_that_happened() -> None:
    told = Story(7, BLOCK, 100.0)
    for step in range(5 * story.STORY_ENTRIES):
        told.tell((100.0 + step, "segment", step, SegmentEvent.ASK, SegmentState.ASKED))
    assert len(told) == story.STORY_ENTRIES
    lines = str(told).splitlines()
    assert lines[0] == f"fetch 7 of 3/{BLOCK.key.hex()}: in flight"
    assert len(lines) == 1 + story.STORY_ENTRIES
    last = 5 * story.STORY_ENTRIES - 1
    assert lines[-1].split() == f"+{last}000.000 ms segment {last}: ASK -> ASKED".split()


def test_a_fetch_that_ends_badly_tells_its_story(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    with caplog.at_level(logging.DEBUG, logger="kvcast.protocol.requester"):
        scene.core.cancel(0.01, scene.fetch.id)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"fetch 1 of 3/{BLOCK.key.hex()}: missed, cancelled")
    for line in ("segment 2: GAP -> GAPPED", "segment 4: DROP -> DROPPED", "fetch 1: END -> ENDED"):
        assert line in text
    assert isinstance(scene.core.next_event(), Missed)


def test_a_fetch_that_ends_well_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    with caplog.at_level(logging.DEBUG, logger="kvcast.protocol.requester"):
        for index in range(6):
            scene.data(index, range(64))
    assert isinstance(scene.core.next_event(), Fetched)
    assert caplog.records == []
    assert [told.outcome for told in scene.core.stories()] == ["fetched", "in flight"]


def test_the_stories_of_only_so_many_ended_fetches_are_kept() -> None:
    scene = Scene()
    for number in range(300):
        other = BlockId(5, number.to_bytes(16, "big"))
        scene.core.cancel(0.01, scene.core.fetch(0.01, other, (REPLICA,), deadline=9.0))
    stories = scene.core.stories()
    assert len(stories) == 64 + 2
    assert {told.fetch_id for told in stories[:-2]} == set(range(239, 303))


def test_what_cannot_be_comes_with_its_story() -> None:
    scene = Scene()
    with pytest.raises(ImpossibleEventError, match="segment 2: GAP -> GAPPED"):
        scene.segments[0].happen(0.01, SegmentEvent.COMPLETE)
    scene.segments[0].state = SegmentState.IDLE
    with pytest.raises(AssertionError, match="segment 2: GAP -> GAPPED"):
        scene.core.check()


# --- which home next --------------------------------------------------------------------------


def candidates(*order: int) -> Candidates:
    return Candidates(order, order[0], 0.0, Story(1, BLOCK, 0.0))


def step_of(homes: Candidates, *, may_restart: bool = True, bulk: bool = True) -> failover.Step:
    return homes.next_step(1.0, may_restart=may_restart, bulk=bulk)


def test_homes_are_left_in_order_and_then_there_is_the_bulk_way_or_a_miss() -> None:
    homes = candidates(1, 2, 3)
    homes.judge(1.0, 2, MissReason.NOT_FOUND)
    homes.judge(1.0, 1, MissReason.UNREACHABLE)
    assert step_of(homes) == failover.Move(3)
    homes.ask(1.0, 3)
    homes.judge(1.0, 3, MissReason.NOT_HOME)
    assert step_of(homes) == failover.LastResort(1)
    assert step_of(homes, bulk=False) == failover.GiveUp(MissReason.UNREACHABLE)


def test_homes_of_another_copy_are_worth_a_new_start_as_long_as_there_may_be_one() -> None:
    homes = candidates(1, 2)
    homes.lacks_copy(1.0, 2)
    homes.judge(1.0, 1, MissReason.NOT_FOUND)
    assert step_of(homes) == failover.Restart(2)
    assert step_of(homes, may_restart=False, bulk=False) == failover.GiveUp(MissReason.DIVERGED)


def test_wrong_bytes_are_forgiven_last_and_only_their_sender_is_heard_then() -> None:
    homes = candidates(1, 2)
    homes.judge(1.0, 2, MissReason.NOT_FOUND)
    homes.contributors.add(1)
    homes.wrong_bytes(1.0)
    assert homes.verdicts[1] is MissReason.CORRUPT
    assert step_of(homes) == failover.LastResort(1)
    assert step_of(homes, bulk=False) == failover.Restart(1)
    homes.restart(1.0)
    homes.ask(1.0, 1)
    assert homes.sources == {1}
    homes.check([1])


def test_with_several_contributors_nobody_is_blamed_and_the_first_is_asked_alone() -> None:
    homes = candidates(1, 2)
    homes.contributors |= {1, 2}
    homes.wrong_bytes(1.0)
    assert homes.verdicts == {}
    step = homes.step_after_wrong_bytes(1.0, may_restart=True, bulk=True)
    assert step == failover.Restart(1)


def test_after_an_offer_nobody_is_asked_who_is_not_worth_it() -> None:
    config = RequesterConfig(usable_offer_kinds=frozenset({wire.OFFER_TCP}))
    core = Requester(config, allocate=lambda _block, size: Room(size), rng=random.Random(1))
    core.fetch(0.0, BLOCK, (HOME, REPLICA), deadline=9.0)
    core.receive(0.0, REPLICA, Frame(wire.OP_MISS, *BLOCK, chunk=wire.MISS_NOT_FOUND))
    offer = wire.encode_offer(wire.Offer(wire.OFFER_TCP, 1, 2, 3, 4))
    size, digest = len(BYTES), digest_of(BYTES)
    core.receive(0.0, HOME, Frame(wire.OP_OFFER, *BLOCK, digest=digest, size=size, payload=offer))
    receive(core, 0, range(64))
    offered = core.next_event()
    assert isinstance(offered, OfferReceived)
    core.forget(0.01, {HOME})
    core.frames_to_send()
    assert not core.bulk_done(0.02, offered.fetch_id, None)
    core.check()
    assert core.frames_to_send() == []
    missed = core.next_event()
    assert isinstance(missed, Missed)
    assert missed.reason is MissReason.UNREACHABLE
