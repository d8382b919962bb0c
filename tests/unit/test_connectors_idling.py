"""How long an engine without work waits between its steps.

Oracle: by hand. Cannot see: what a step of an engine costs (`docs/measurements.md`).
"""

from __future__ import annotations

from kvcast.hostagent.connectors.idling import LEAST_S, MOST_S, SHARE, Idling


def test_a_step_that_computes_something_waits_for_nothing() -> None:
    idling = Idling()
    assert idling.pause_s(5.0, idle=False) == 0.0


def test_the_longer_nothing_happens_the_longer_a_step_waits_up_to_a_bound() -> None:
    idling = Idling()
    now, steps = 10.0, 0
    pauses = []
    while now < 11.0:
        pauses.append(idling.pause_s(now, idle=True))
        assert pauses[-1] <= max(LEAST_S, SHARE * (now - 10.0))
        now += pauses[-1]
        steps += 1
    assert pauses[0] == LEAST_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == MOST_S
    assert steps < 1.0 / LEAST_S / 4


def test_news_make_it_look_often_again() -> None:
    for news in (lambda one: one.woken(), lambda one: one.pause_s(11.5, idle=False)):
        idling = Idling()
        idling.pause_s(10.0, idle=True)
        assert idling.pause_s(11.0, idle=True) > LEAST_S
        news(idling)
        assert idling.pause_s(12.0, idle=True) == LEAST_S
