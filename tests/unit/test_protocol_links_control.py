"""The control link's two ends: registering, renewing, bounds, and coming back after a loss.

Oracle: messages and times written out here. Cannot see: TLS, sockets, and what the messages mean
to the agent's core and to the controller's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from kvcast.hostagent.core.metrics import Metrics
from kvcast.protocol.links import control_callee, control_caller
from kvcast.protocol.links.backoff import Backoff, Pauses, pause_after
from kvcast.protocol.links.control_callee import ControlCallee
from kvcast.protocol.links.control_caller import (
    Attempt,
    ControlCaller,
    ControlConnection,
    ControlOptions,
)
from kvcast.protocol.links.stream import LINGER_S, LinkError, LinkStream
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    AgentMessage,
    ControllerMessage,
    Describe,
    GroupRequest,
    Leave,
    Refused,
    Register,
    Registered,
    Renew,
)
from kvcast.protocol.messages.framing import MessageCodec

OPTIONS = ControlOptions("controller", 9000, retry_min_s=0.1, retry_max_s=3.0)
REGISTER = Register(
    CONTROL_PROTOCOL_VERSION, "node-1", 7, "10.0.0.1", "02:00:00:00:00:01", 1, 20000, "host", 1,
    1 << 20,
)  # fmt: skip
REGISTERED = Registered(CONTROL_PROTOCOL_VERSION, 1, 3.0, 0)
RENEW = Renew({}, [], 0, 0, 0)


def said(*messages: msgspec.Struct) -> bytes:
    codec = MessageCodec[AgentMessage](AgentMessage)
    return b"".join(codec.encode(message) for message in messages)


def heard(link: LinkStream[ControllerMessage], now: float = 0.0) -> list[AgentMessage]:
    codec = MessageCodec[AgentMessage](AgentMessage)
    messages: list[AgentMessage] = []
    while data := link.bytes_to_send(now, 1000):
        messages += codec.feed(data)
    link.check()
    return messages


class Agent:
    """What the link registers."""

    def __init__(self) -> None:
        self.lease_s = 1.0
        self.told: list[ControllerMessage] = []
        self.tell: Callable[[AgentMessage], None] | None = None
        self.losses = 0
        self.unusable = False

    def registered(self, message: Registered) -> None:
        self.lease_s = message.lease_s

    def control_connected(self, tell: Callable[[AgentMessage], None]) -> None:
        self.tell = tell

    def control_message(self, now: float, message: ControllerMessage) -> None:
        if self.unusable:
            raise LinkError("a map that contradicts itself")
        self.told.append(message)

    def control_lost(self) -> None:
        self.tell = None
        self.losses += 1

    def renewal(self) -> Renew:
        return RENEW


class Link:
    """The agent's end."""

    def __init__(self) -> None:
        self.agent = Agent()
        self.metrics = Metrics()
        self.woken = 0
        self.core = ControlCaller(
            self.agent, OPTIONS, REGISTER, random.Random(1), self.metrics, self._wake
        )
        self.core.start(0.0)

    def _wake(self) -> None:
        self.woken += 1

    def attempt(self) -> Attempt:
        (attempt,) = self.core.attempts()
        return attempt

    def connected(self) -> tuple[ControlConnection, float]:
        """The next connection, made when it is its time."""
        attempt = self.attempt()
        attempt.connection.connecting(attempt.when)
        attempt.connection.connected(attempt.when)
        return attempt.connection, attempt.when

    def registered(self) -> tuple[ControlConnection, float]:
        connection, now = self.connected()
        connection.received(now, said(REGISTERED))
        return connection, now


# --- the agent's end --------------------------------------------------------------------------


def test_an_agent_registers_and_renews_every_third_of_its_lease() -> None:
    link = Link()
    connection, now = link.connected()
    assert heard(connection) == [REGISTER]
    connection.received(now, said(REGISTERED, Describe(1, [])))
    assert heard(connection) == [RENEW]
    assert link.agent.told == [Describe(1, [])]
    for turn in (1.0, 2.0, 3.0):
        assert connection.get_timer() == pytest.approx(now + turn)
        connection.handle_timer(now + turn)
        assert heard(connection) == [RENEW]


def test_what_the_agent_says_by_itself_is_sent_and_whoever_drives_is_woken() -> None:
    link = Link()
    connection, _ = link.registered()
    heard(connection)
    woken = link.woken
    assert link.agent.tell is not None
    link.agent.tell(GroupRequest(4, 1, ["node-1"]))
    assert link.woken == woken + 1
    assert heard(connection) == [GroupRequest(4, 1, ["node-1"])]


def test_pauses_double_until_a_connection_has_worked() -> None:
    link = Link()
    now, pauses = 0.0, []
    for _ in range(8):
        attempt = link.attempt()
        pauses.append(attempt.when - now)
        now = attempt.when
        attempt.connection.connecting(now)
        attempt.connection.lost(now, "connection refused")
    assert pauses[0] == 0.0
    for pause, expected in zip(pauses[1:], (0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0), strict=True):
        assert 0.5 * expected <= pause <= 1.5 * expected
    connection, now = link.registered()
    connection.lost(now)
    attempt = link.attempt()
    assert 0.05 <= attempt.when - now <= 0.15
    assert attempt.after == "the controller closed the connection"
    assert link.metrics.control_errors_total == 9
    assert link.agent.losses == 9
    assert link.agent.tell is None


def test_after_a_refusal_the_longest_pause_comes_and_the_reason_is_said() -> None:
    link = Link()
    connection, now = link.connected()
    connection.received(now, said(Refused("another node has this address")))
    attempt = link.attempt()
    assert connection.closed
    assert attempt.grave
    assert "another node has this address" in attempt.after
    assert 1.5 <= attempt.when - now <= 4.5


def test_nothing_is_said_to_what_is_no_controller() -> None:
    link = Link()
    attempt = link.attempt()
    attempt.connection.connecting(0.0)
    attempt.connection.wrong_peer(0.0, "node-2 answers where controller should")
    assert heard(attempt.connection) == []
    assert link.metrics.control_wrong_peers_total == 1
    again = link.attempt()
    assert again.grave
    assert again.when >= 1.5


@pytest.mark.parametrize("answer", [said(Describe(1, [])), said(Leave()), b"\0\0\0\0"])
def test_what_is_no_answer_to_a_registration_ends_the_connection(answer: bytes) -> None:
    link = Link()
    connection, now = link.connected()
    connection.received(now, answer)
    assert connection.closed
    assert link.attempt().after
    assert link.agent.told == []


def test_a_connect_that_hangs_and_a_controller_that_does_not_answer_are_left() -> None:
    link = Link()
    attempt = link.attempt()
    assert attempt.connection.get_timer() is None
    attempt.connection.connecting(5.0)
    assert attempt.connection.get_timer() == 5.0 + OPTIONS.connect_timeout_s
    attempt.connection.handle_timer(8.0)
    assert attempt.connection.closed
    connection, now = link.connected()
    assert connection.get_timer() == now + OPTIONS.register_timeout_s
    connection.handle_timer(now + OPTIONS.register_timeout_s)
    assert connection.closed


def test_a_message_that_the_agent_cannot_use_ends_the_connection() -> None:
    link = Link()
    connection, now = link.registered()
    link.agent.unusable = True
    connection.received(now, said(Describe(1, []), Describe(2, [])))
    assert connection.closed
    attempt = link.attempt()
    assert attempt.after == "a map that contradicts itself"
    assert attempt.when > now


def test_a_controller_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_caller, "MAX_UNSENT_BYTES", 1000)
    link = Link()
    connection, now = link.registered()
    assert link.agent.tell is not None
    for _ in range(100):
        link.agent.tell(GroupRequest(4, 1, ["node-1"]))
    connection.handle_timer(now)
    assert connection.closed
    assert link.attempt().after == "the controller does not read"


def test_an_agent_that_leaves_says_so_and_does_not_come_back() -> None:
    link = Link()
    connection, now = link.registered()
    heard(connection)
    link.core.leave(now)
    assert not connection.closed
    assert heard(connection) == [Leave()]
    assert connection.closed
    assert link.core.attempts() == []
    waiting = Link()
    waiting.attempt()
    waiting.core.leave(0.0)
    assert waiting.core.attempts() == []


# --- the controller's end ---------------------------------------------------------------------


class Callee:
    """The controller's end of one connection, and what came through it."""

    def __init__(self, certified: str | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.taken: list[AgentMessage] = []
        self.link = ControlCallee(0.0, 9.0, self.taken.append, self.counts, certified)

    def answers(self, now: float = 0.0) -> list[ControllerMessage]:
        codec = MessageCodec[ControllerMessage](ControllerMessage)
        messages: list[ControllerMessage] = []
        while data := self.link.bytes_to_send(now, 1000):
            messages += codec.feed(data)
        self.link.check()
        return messages


def test_an_agent_that_says_nothing_is_closed_and_half_a_message_is_nothing() -> None:
    callee = Callee()
    data = said(REGISTER)
    callee.link.received(2.0, data[:-1])
    assert callee.link.get_timer() == control_callee.REGISTER_TIMEOUT_S
    callee.link.received(3.0, data[-1:])
    assert callee.taken == [REGISTER]
    assert callee.link.get_timer() == 12.0
    callee.link.received(11.0, data[:-1])
    callee.link.handle_timer(12.0)
    assert callee.link.closed
    assert callee.counts["closed_silent"] == 1


@pytest.mark.parametrize("nonsense", [b"\0\0\0\0", b"\xff" * 64, b"\0\0\0\1\x80", said(REGISTERED)])
def test_nonsense_closes_the_connection_and_is_counted(nonsense: bytes) -> None:
    callee = Callee()
    callee.link.received(0.0, said(REGISTER) + nonsense + said(RENEW))
    assert callee.taken == [REGISTER]
    assert callee.link.closed
    assert callee.counts["closed_malformed"] == 1


def test_a_connection_registers_only_as_the_node_of_its_certificate() -> None:
    callee = Callee("node-2")
    callee.link.received(0.0, said(REGISTER, RENEW))
    assert callee.taken == []
    (answer,) = callee.answers()
    assert isinstance(answer, Refused)
    assert "node node-2's" in answer.reason
    assert callee.link.closed
    assert callee.counts["refused_peers"] == 1
    same = Callee("node-1")
    same.link.received(0.0, said(REGISTER))
    assert same.taken == [REGISTER]


def test_an_end_waits_for_what_was_said_but_not_for_ever() -> None:
    callee = Callee()
    callee.link.send(0.0, Refused("no"))
    callee.link.end(0.0)
    assert not callee.link.closed
    callee.link.received(0.0, said(REGISTER))
    assert callee.taken == [], "whoever is being closed is not listened to"
    assert callee.answers() == [Refused("no")]
    assert callee.link.closed
    stuck = Callee()
    stuck.link.send(0.0, Refused("no"))
    stuck.link.end(0.0)
    assert stuck.link.get_timer() == LINGER_S
    stuck.link.handle_timer(LINGER_S)
    assert stuck.link.closed
    stuck.link.send(0.0, Refused("no"))
    assert stuck.counts["sends_to_closed"] == 1


def test_an_agent_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_callee, "MAX_UNSENT_BYTES", 1000)
    callee = Callee()
    sent = 0
    while not callee.link.closed:
        callee.link.send(0.0, Refused("x" * 100))
        sent += 1
    assert 5 < sent < 15
    assert callee.counts["closed_not_reading"] == 1
    assert callee.answers() == []


# --- pauses -----------------------------------------------------------------------------------


def test_a_pause_doubles_to_its_bound_and_begins_anew() -> None:
    backoff = Backoff(0.2, 1.0)
    assert (backoff.pause_s, backoff.pause_s) == (0.2, 0.2)
    assert [backoff.next_pause_s() for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.worked()
    assert backoff.next_pause_s() == 0.2
    backoff.hopeless()
    assert backoff.next_pause_s() == 1.0
    jittered = Backoff(1.0, 1.0, random.Random(3))
    pauses = [jittered.next_pause_s() for _ in range(200)]
    assert 0.5 <= min(pauses) < 0.6
    assert 1.4 < max(pauses) <= 1.5


def test_a_pause_lasts_until_its_time_or_until_something_worked() -> None:
    pauses = Pauses(1.0, 4.0)
    assert pauses.may_try(-5.0)
    pauses.failed(10.0)
    assert [pauses.may_try(now) for now in (10.9, 11.0)] == [False, True]
    pauses.failed(11.0)
    assert [pauses.may_try(now) for now in (12.9, 13.0)] == [False, True]
    pauses.failed(13.0)
    pauses.worked()
    assert pauses.may_try(13.0)
    pauses.failed(14.0)
    assert [pauses.may_try(now) for now in (14.9, 15.0)] == [False, True]


def test_a_pause_is_known_from_the_number_of_failures_however_many() -> None:
    assert [pause_after(count, 0.2, 1.0) for count in range(1, 6)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert pause_after(1_000_000, 1e-9, 60.0) == 60.0
