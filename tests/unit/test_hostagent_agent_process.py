"""The table of what can happen to an agent's process.

Oracle: the table itself (what it does not name must raise), and what must be true of any such
table. Cannot see: what the supervisor does about it (tests/unit/test_hostagent_supervisor.py).
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import pytest
from kvcast.hostagent.agent_process import (
    CAN_GIVE_WAY,
    ENDED,
    TRANSITIONS,
    AgentEvent,
    AgentProcess,
    AgentState,
)
from kvcast.protocol.impossible import ImpossibleEventError


def make(state: AgentState) -> AgentProcess:
    nothing: Any = None
    return AgentProcess(7, -1, nothing, nothing, 0.0, state)


def test_every_pair_leads_where_the_table_says_or_raises() -> None:
    refused = 0
    for state, event in itertools.product(AgentState, AgentEvent):
        agent = make(state)
        if event in TRANSITIONS[state]:
            agent.happen(event)
            assert agent.state is TRANSITIONS[state][event]
        else:
            refused += 1
            with pytest.raises(ImpossibleEventError, match=f"7 is {state.name}: no {event.name}"):
                agent.happen(event)
            assert agent.state is state
    assert refused > len(AgentState)


def test_every_state_can_be_reached_and_every_event_can_happen() -> None:
    assert set(TRANSITIONS) == set(AgentState)
    reached = fresh = {AgentState.STANDBY}
    while fresh:
        fresh = {to for state in fresh for to in TRANSITIONS[state].values()} - reached
        reached |= fresh
    assert reached == set(AgentState)
    assert {event for row in TRANSITIONS.values() for event in row} == set(AgentEvent)


def test_it_can_be_gone_whatever_was_before_and_then_nothing_comes() -> None:
    for state, row in TRANSITIONS.items():
        assert (row.get(AgentEvent.GONE) is AgentState.GONE) == (state is not AgentState.GONE)
    assert TRANSITIONS[AgentState.GONE] == {}


def test_it_says_nothing_once_it_runs_no_more() -> None:
    for state, (event, to) in ((s, pair) for s, row in TRANSITIONS.items() for pair in row.items()):
        assert (to in ENDED) == (event in (AgentEvent.STOPPED, AgentEvent.GONE))
        assert event is AgentEvent.GONE or state not in ENDED


@pytest.mark.parametrize(
    ("events", "waited_for"),
    [
        ([AgentEvent.READY, AgentEvent.STOPPED], AgentState.KILLED),
        ([AgentEvent.READY, AgentEvent.LAST_WORD, AgentEvent.STOPPED], AgentState.EXITING),
    ],
)
def test_only_who_was_ready_is_seen_to_stop_and_its_last_word_counts(
    events: list[AgentEvent], waited_for: AgentState
) -> None:
    agent = make(AgentState.STARTING)
    for event in events:
        agent.happen(event)
    assert agent.state is waited_for
    for state, row in TRANSITIONS.items():
        assert (AgentEvent.STOPPED in row) == (state in CAN_GIVE_WAY)


def test_nobody_is_killed_by_the_number_of_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _number: killed.append(pid))
    for state in AgentState:
        killed.clear()
        make(state).signal(signal.SIGKILL)
        assert killed == ([] if state is AgentState.GONE else [7])
