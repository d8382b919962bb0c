"""What the supervisor makes of what tells of an agent, whose process does nothing but end.

Oracle: the words, and the order in which they are to be believed. Cannot see: forks, deaths and
takeovers as they are (tests/integration/test_restart.py), and whether the table of states is right
(tests/unit/test_hostagent_agent_process.py has what must hold of it).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from kvcast.hostagent import supervisor as module
from kvcast.hostagent.agent_process import CAN_GIVE_WAY, AgentProcess, AgentState
from kvcast.hostagent.network.survivors import Survivor
from kvcast.hostagent.supervisor import (
    Place,
    Supervisor,
    TakeoverError,
    _Asked,
    _Call,
    _Ending,
    _GivenClient,
    _Ready,
    _receive_clients,
    _send_clients,
)


class _Watch:
    """A death watch that only says what was done to it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")

    def close(self) -> None:
        self.done.append("close")
        os.close(self.fd)


class _Standing:
    keeper: Any = None


class Scene:
    """A supervisor whose agent's process has already ended, with status 0, unseen as yet."""

    def __init__(self, theirs: socket.socket, ours: socket.socket) -> None:
        nothing: Any = None
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self.watch: Any = _Watch()
        self.agent = AgentProcess(
            pid, os.pidfd_open(pid), ours, self.watch, 0.0, AgentState.STARTING
        )
        self.supervisor = Supervisor(nothing, nothing, nothing, announced=True, _agent=self.agent)
        self.selector = self.supervisor._selector = selectors.DefaultSelector()
        for end, heard in (
            (ours, self.supervisor._heard_from),
            (self.agent.pidfd, self.supervisor._gone),
            (self.watch.fd, self.supervisor._stopped),
        ):
            self.selector.register(end, selectors.EVENT_READ, lambda heard=heard: heard(self.agent))
        standing: Any = _Standing()
        self.theirs = Place(standing, theirs, nice=0)

    def close(self) -> None:
        if self.agent.state is not AgentState.GONE:
            self.supervisor._gone(self.agent)
        self.selector.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        with contextlib.closing(Scene(theirs, ours)) as made:
            yield made


def test_an_agent_whose_death_is_seen_before_its_last_words_is_heard_first(scene: Scene) -> None:
    """A watch that is begun after it is closed would write to whoever has its descriptor then."""
    scene.theirs._say(_Ready({}, card=False))
    scene.theirs._say(_Ending())
    scene.supervisor._gone(scene.agent)
    assert scene.theirs.pipe.recv(16) == b"go"
    assert scene.watch.done == ["start", "close"]
    assert (scene.agent.state, scene.agent.code) == (AgentState.GONE, 0)
    assert not scene.selector.get_map()


def test_an_agent_that_may_not_serve_and_is_gone_already_is_not_killed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as nobody has taken its status its number is its own, and nobody else is killed."""

    def refuse() -> None:
        raise BrokenPipeError

    reaped: list[int] = []
    waitpid = os.waitpid

    def wait(pid: int, options: int) -> tuple[int, int]:
        reaped.append(pid)
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", wait)
    monkeypatch.setattr(os, "kill", lambda pid, _number: killed.append((pid, pid in reaped)))
    killed: list[tuple[int, bool]] = []
    scene.supervisor.announced = False
    scene.supervisor._told = refuse
    scene.theirs._say(_Ready({}, card=False))
    scene.supervisor._gone(scene.agent)
    assert killed == [(scene.agent.pid, False)]
    assert not scene.supervisor.announced


def test_who_says_that_it_ends_is_waited_for(scene: Scene) -> None:
    scene.theirs._say(_Ready({}, card=False))
    scene.supervisor._heard_from(scene.agent)
    scene.theirs._say(_Ending())
    scene.supervisor._stopped(scene.agent)
    assert (scene.agent.state, scene.agent.code) == (AgentState.GONE, 0)


def test_who_is_killed_is_not_waited_for(scene: Scene) -> None:
    scene.theirs._say(_Ready({}, card=False))
    scene.supervisor._heard_from(scene.agent)
    scene.supervisor._stopped(scene.agent)
    assert (scene.agent.state, scene.agent.code) == (AgentState.KILLED, -9)
    scene.supervisor._gone(scene.agent)
    assert scene.watch.done == ["start", "close"]
    assert scene.agent.code == 0


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said to be impossible, in order."""
    found = [str(r.exc_info[1]) for r in caplog.records if r.exc_info]
    caplog.clear()
    return [text.split(": ")[1] for text in found]


def test_what_cannot_be_is_logged_and_left_out(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    os.eventfd_write(scene.watch.fd, 1)  # and nobody has begun that watch
    scene.supervisor._stopped(scene.agent)
    assert said(caplog) == ["no STOPPED"]
    assert scene.agent.state is AgentState.STARTING
    assert scene.watch.fd not in scene.selector.get_map(), "it would be told for ever"
    for _ in range(2):
        scene.theirs._say(_Ready({}, card=False))
    scene.supervisor._heard_from(scene.agent)
    assert said(caplog) == ["no READY"]
    assert scene.watch.done == ["start"]
    for _ in range(2):
        scene.theirs._say(_Ending())
    scene.supervisor._heard_from(scene.agent)
    assert said(caplog) == ["no LAST_WORD"]
    scene.supervisor._gone(scene.agent)
    assert said(caplog) == []
    scene.supervisor._gone(scene.agent)
    scene.supervisor._stopped(scene.agent)
    assert said(caplog) == ["no GONE", "no STOPPED"]
    assert (scene.agent.state, scene.agent.code) == (AgentState.GONE, 0)
    assert scene.watch.done == ["start", "close"]
    assert not scene.selector.get_map()


def test_what_was_closed_a_moment_ago_is_not_taken_for_what_has_its_number_now() -> None:
    nothing: Any = None
    supervisor = Supervisor(nothing, nothing, nothing)
    done: list[str] = []
    with selectors.DefaultSelector() as selector:
        supervisor._selector = selector
        ends = [os.eventfd(1), os.eventfd(1)]

        def replace(closed: int) -> None:
            done.append("replaced")
            selector.unregister(closed)
            os.close(closed)
            assert os.eventfd(0) == closed
            selector.register(closed, selectors.EVENT_READ, lambda: done.append("new"))

        for mine, other in (ends, ends[::-1]):
            selector.register(mine, selectors.EVENT_READ, lambda other=other: replace(other))
        supervisor._wait(1.0)
        assert done == ["replaced"]
        for end in ends:
            os.close(end)


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
        agent = AgentProcess(0, -1, ours, watch, 0.0, AgentState.STARTING)
        supervisor = Supervisor(options, run, standing, announced=True)
        Place(standing, theirs, nice=0)._say(_Ready({}, card))
        supervisor._heard_from(agent)
        assert agent.state is AgentState.SERVING
        assert theirs.recv(16) == b"go"
        assert watch.done == ([] if card else ["start"])
        watch.close()


def test_the_place_is_given_to_one_of_two_that_ask_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    asked = _Asked("node-1", "/arena", 1 << 20, 1 << 16, (1, 1))
    monkeypatch.setattr(module, "_question_of", lambda _options: asked)
    agent = AgentProcess(pid=0, pidfd=-1, pipe=nothing, watch=nothing, started_at=0.0)
    supervisor = Supervisor(nothing, nothing, nothing, announced=True, _agent=agent)
    for state in AgentState:
        agent.state = state
        assert (supervisor._why_not(asked) == "") == (state in CAN_GIVE_WAY)
    agent.state = AgentState.SERVING
    supervisor._post = module._Post.LEAVING  # its agent ends what it has begun, for another one
    assert "try again" in supervisor._why_not(asked)


class _Kept:
    found = False


class _Stands:
    """What stands, as far as a supervisor that starts an agent looks at it."""

    def __init__(self, *survivors: Survivor) -> None:
        self.kept = _Kept()
        self.survivors = {client.number: client for client in survivors}


def _waiting(
    pipe: socket.socket, pid: int = 0, state: AgentState = AgentState.STANDBY
) -> AgentProcess:
    watch: Any = _Watch()
    return AgentProcess(pid, -1, pipe, watch, 0.0, state)


def test_who_stands_by_but_is_ending_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    stands: Any = _Stands()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        supervisor = Supervisor(nothing, nothing, stands)
        supervisor._standby = _waiting(nothing, state=AgentState.FAILING)
        other = _waiting(ours)
        monkeypatch.setattr(supervisor, "_fork", lambda: other)
        supervisor._start()
        assert supervisor._agent is other
        assert supervisor._standby is None
        assert _Call.decode(theirs.recv(100)).clients == 0
        assert not ours.getblocking()


def test_who_does_not_take_its_call_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    stands: Any = _Stands()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    with ours:
        supervisor = Supervisor(nothing, nothing, stands)
        supervisor._standby = _waiting(ours, pid=77)
        supervisor._start()
        assert killed == [(77, signal.SIGKILL)]
        assert not ours.getblocking(), "what it still says is read without waiting"


def test_where_no_process_can_be_made_nobody_stands_by_and_nothing_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    nothing: Any = None
    stands: Any = _Stands()
    supervisor = Supervisor(nothing, nothing, stands)
    supervisor._agent = _waiting(nothing, state=AgentState.SERVING)
    monkeypatch.setattr(os, "fork", fail)
    before = os.listdir("/proc/self/fd")
    supervisor._stand_by()
    assert os.listdir("/proc/self/fd") == before
    assert supervisor._standby is None
    assert supervisor._standby_at is not None, "it is tried again"


@pytest.mark.parametrize("region", [False, True])
def test_clients_are_handed_over_as_they_are(region: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection, client = socket.socketpair()
    region_fd = os.memfd_create("region") if region else None
    with ours, theirs, connection, client:
        _send_clients(ours, [Survivor(5, b"token", connection, region_fd, read_only=True)])
        found = _receive_clients(theirs, 1)[5]
        assert (found.number, found.token, found.read_only) == (5, b"token", True)
        with found.connection:
            assert os.path.sameopenfile(found.connection.fileno(), connection.fileno())
        assert (found.region_fd is not None) == region
        if region_fd is not None and found.region_fd is not None:
            assert os.path.sameopenfile(found.region_fd, region_fd)
            os.close(found.region_fd)
            os.close(region_fd)
        ours.send(msgspec.msgpack.encode(_GivenClient(5, b"token", read_only=True)))
        with pytest.raises(TakeoverError, match="not understood"):
            _receive_clients(theirs, 1)  # it has no connection
