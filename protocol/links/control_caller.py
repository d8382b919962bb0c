"""The control link's caller: an agent's connection to the controller.

Owns: connecting, registering, renewing, and coming back after a loss. Must not know: what the
controller's messages mean (the agent's core does), or who the controller has proved to be.

One connection at a time. It is renewed every third of the lease; a controller that has been silent
is noticed by the connection's end (the adapter ends it after `silence_s`), or by what it does not
read. After a loss the agent tries again
after a pause that doubles from `retry_min_s` to `retry_max_s`, with jitter, so that a controller
that restarts is not met by all its agents at once. Meanwhile the agent goes on serving by the last
map.

After each event take `attempts` (connections to be made) and flush the present connection; `wake`
is called when that is wanted without an event of the link's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvcast.protocol.links.backoff import Backoff
from kvcast.protocol.links.stream import LinkError, LinkStream
from kvcast.protocol.messages.control import (
    AgentMessage,
    ControllerMessage,
    Leave,
    Refused,
    Register,
    Registered,
    Renew,
)
from kvcast.protocol.messages.framing import MAX_MESSAGE_BYTES

MAX_UNSENT_BYTES: Final = 4 * 1024 * 1024
"""What may wait to be sent to a controller that does not read; beyond, the link is made anew."""


@dataclass(frozen=True)
class ControlOptions:
    """Where the controller is, and how patient the agent is with it."""

    host: str
    port: int
    retry_min_s: float = 0.1
    retry_max_s: float = 3.0
    connect_timeout_s: float = 3.0
    register_timeout_s: float = 5.0
    silence_s: float = 10.0
    """A controller whose machine acknowledges nothing for so long is gone."""


class Agent(Protocol):
    """Whoever is registered. `registered` and `control_message` raise LinkError at what they
    cannot use."""

    lease_s: float

    def registered(self, message: Registered) -> None: ...

    def control_connected(self, tell: Callable[[AgentMessage], None]) -> None: ...

    def control_message(self, now: float, message: ControllerMessage) -> None: ...

    def control_lost(self) -> None: ...

    def renewal(self) -> Renew: ...


class ControlCounters(Protocol):
    """What the link counts, by the names of the agent's metrics."""

    control_connects_total: int
    control_errors_total: int
    control_wrong_peers_total: int


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """Begin to make `connection` at `when`. `after`: why the one before ended; `grave`: that will
    not go away by itself."""

    connection: ControlConnection
    when: float
    after: str = ""
    grave: bool = False


class ControlCaller:
    """See the module's text."""

    def __init__(
        self,
        agent: Agent,
        options: ControlOptions,
        register: Register,
        rng: random.Random,
        counters: ControlCounters,
        wake: Callable[[], None],
    ) -> None:
        self.agent = agent
        self.options = options
        self.register = register
        self.counters = counters
        self.wake = wake
        self.connection: ControlConnection | None = None
        """The one that stands or is being made."""
        self._backoff = Backoff(options.retry_min_s, options.retry_max_s, rng)
        self._attempts: list[Attempt] = []
        self._left = False

    def start(self, now: float) -> None:
        """Connect, and connect again after every loss."""
        self._attempt(now)

    def attempts(self) -> list[Attempt]:
        """The connections to be made; each is given once."""
        taken, self._attempts = self._attempts, []
        return taken

    def register_anew(self, register: Register) -> None:
        """Be known by this from now on."""
        self.register = register
        if self.connection is not None:
            self.connection.register_anew()

    def leave(self, now: float) -> None:
        """Say goodbye, so that the controller need not wait for the lease, and do not come back."""
        self._left = True
        if self.connection is not None:
            self.connection.leave(now)

    def _attempt(self, when: float, after: str = "", *, grave: bool = False) -> None:
        self.connection = ControlConnection(self)
        self._attempts.append(Attempt(self.connection, when, after, grave))

    def over(self, now: float, connection: ControlConnection) -> None:
        """The connection is closed."""
        self.connection = None
        self.agent.control_lost()
        if self._left:
            return
        self.counters.control_errors_total += 1
        if connection.hopeless:
            self._backoff.hopeless()
        elif connection.is_registered:
            self._backoff.worked()
        pause_s = self._backoff.next_pause_s()
        self._attempt(now + pause_s, connection.problem, grave=connection.hopeless)


class ControlConnection(LinkStream[ControllerMessage]):
    """One connection: waiting for its attempt, being made, registering, or registered."""

    def __init__(self, link: ControlCaller) -> None:
        super().__init__(
            ControllerMessage,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_unsent_bytes=MAX_UNSENT_BYTES,
        )
        self.is_registered = False
        self.hopeless = False
        """The controller does not take this agent, or is none."""
        self._link = link

    def connecting(self, now: float) -> None:
        """The attempt begins."""
        self._deadline = now + self._link.options.connect_timeout_s

    def connected(self, now: float) -> None:
        """The connection stands, and at its other end is a controller."""
        if self.closed:
            return
        self._link.counters.control_connects_total += 1
        self._deadline = now + self._link.options.register_timeout_s
        self._send(self._link.register)

    def register_anew(self) -> None:
        """Say again who this is, if that was said."""
        if self.is_registered:
            self._tell(self._link.register)

    def wrong_peer(self, now: float, problem: str) -> None:
        """Who answers is no controller of ours."""
        self._link.counters.control_wrong_peers_total += 1
        self.hopeless = True
        self.lost(now, problem)

    def leave(self, now: float) -> None:
        """Say goodbye and close."""
        if self.is_registered:
            self._send(Leave())
        self._end(now)

    def lost(self, now: float, why: str = "") -> None:
        self.problem = self.problem or why or "the controller closed the connection"
        self._close(now)

    def _message(self, now: float, message: ControllerMessage) -> None:
        agent = self._link.agent
        if self.is_registered:
            agent.control_message(now, message)
        elif isinstance(message, Registered):
            agent.registered(message)
            self.is_registered = True
            agent.control_connected(self._tell)
            self._renew(now)
        elif isinstance(message, Refused):
            self.hopeless = True
            raise LinkError(f"the controller refuses this agent: {message.reason}")
        else:
            raise LinkError(f"{type(message).__name__} before Registered")

    def _tell(self, message: AgentMessage) -> None:
        if self.closed:
            return
        if not self._send(message):
            self.problem = "the controller does not read"
            self._deadline = float("-inf")  # the timer closes it: this may be anywhere in the core
        self._link.wake()

    def _renew(self, now: float) -> None:
        self._tell(self._link.agent.renewal())
        if self._deadline != float("-inf"):
            self._deadline = now + self._link.agent.lease_s / 3

    def _late(self, now: float) -> None:
        if self.is_registered and not self.problem:
            self._renew(now)
        else:
            self.lost(now, "no answer in time")

    def _over(self, now: float) -> None:
        self._link.over(now, self)
