"""The simulated world itself: order, wake-ups, rest, and what a link does to frames in time.

Oracle: arithmetic. Cannot see: what the set-ups make of it.
"""

from __future__ import annotations

import functools

import pytest
from kvcast.simulation.network import Link, LinkFault, LinkOptions
from kvcast.simulation.world import Alarm, RestlessError, World


def test_a_run_without_an_end_stops_at_the_last_thing_that_happens() -> None:
    world, happened = World(1), []
    for when in (0.5, 0.2, 0.2):
        world.at(when, functools.partial(happened.append, when))
    world.run(until=0.3)
    assert (world.now, happened) == (0.3, [0.2, 0.2])
    world.run()
    assert (world.now, happened) == (0.5, [0.2, 0.2, 0.5])


def test_what_never_comes_to_rest_is_an_error() -> None:
    world = World(1)

    def again() -> None:
        world.after(1.0, again)

    again()
    with pytest.raises(RestlessError, match="not at rest after 1000 events"):
        world.run(max_steps=1000)
    assert world.now == pytest.approx(1000, abs=1)


def test_an_alarm_rings_once_at_the_earliest_time_that_was_asked_for() -> None:
    world = World(1)
    rung: list[float] = []
    alarm = Alarm(world, lambda: rung.append(world.now))
    for when in (3.0, 1.0, None, 2.0):
        alarm.set(when)
    world.run()
    assert rung == [1.0]
    alarm.set(0.0)  # long past: now
    world.run()
    assert rung == [1.0, 3.0]


def test_a_link_takes_its_time_and_loses_what_its_queue_has_no_room_for() -> None:
    world = World(1)
    arrived: list[tuple[float, bytes]] = []
    lost: list[str] = []
    link = Link(
        world,
        "link",
        lambda frame: arrived.append((round(world.now, 9), frame)),
        lambda _link, _frame, kind: lost.append(kind),
        LinkOptions(delay_s=0.001, rate_bits_per_s=8000.0, queue_frames=2),
    )
    for frame in (b"first", b"second one", b"third"):
        link.send(frame)
    assert link.free_at == pytest.approx(0.015)
    world.run()
    assert arrived == [(0.006, b"first"), (0.016, b"second one")]
    assert lost == ["queue_overflow"]
    link.faults = [LinkFault("loss", world.stream("loss"))]
    link.send(b"fourth")
    world.run()
    assert (len(arrived), lost) == (2, ["queue_overflow", "loss"])
