"""What the supervisor makes of an agent's words, without processes.

Oracle: the words. Cannot see: forks, deaths and takeovers (tests/integration/test_restart.py).
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
from kvcast.hostagent import supervisor as module
from kvcast.hostagent.supervisor import Place, Supervisor, _Agent, _Asked, _Ready


class _Watch:
    """A death watch that only says whether it was begun."""

    started = False

    def start(self) -> None:
        self.started = True


class _Standing:
    keeper: Any = None


@pytest.mark.parametrize("card", [False, True])
def test_nobody_follows_an_agent_whose_memory_a_card_may_still_write(card: bool) -> None:
    """Without a card the next agent starts at the first sign of a death, with one when the process
    is gone whole: until then another node's card writes into what the next one would give away."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        standing: Any = _Standing()
        watch: Any = _Watch()
        options: Any = None
        run: Any = None
        agent = _Agent(pid=0, pidfd=-1, pipe=ours, watch=watch, started_at=0.0)
        supervisor = Supervisor(options, run, standing, announced=True)
        Place(standing, theirs, nice=0)._say(_Ready({}, card))
        supervisor._heard_from(agent)
        assert agent.ready
        assert theirs.recv(16) == b"go"
        assert watch.started is not card


def test_the_place_is_given_to_one_of_two_that_ask_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    asked = _Asked("node-1", "/arena", 1 << 20, 1 << 16, (1, 1))
    monkeypatch.setattr(module, "_question_of", lambda _options: asked)
    agent = _Agent(pid=0, pidfd=-1, pipe=nothing, watch=nothing, started_at=0.0, ready=True)
    supervisor = Supervisor(nothing, nothing, nothing, announced=True, _agent=agent)
    assert supervisor._why_not(asked) == ""
    supervisor._post = module._Post.LEAVING  # its agent ends what it has begun, for another one
    assert "try again" in supervisor._why_not(asked)
