"""An agent's process, as its supervisor sees it: the state that it is in, and what is open for it.

Owns: what can happen to an agent in which state (`TRANSITIONS`), and that no signal goes to a
number that may be another process's by now. Must not know: what is done about it (`supervisor`).

An agent is forked before it is wanted, and CALLED when it is. Three things tell of it, and each is
told once: its words on the pipe, the death watch (`death_watch`), and its pidfd. They come in this
order, since the pipe is emptied before either of the other two is believed:

    READY, then LAST_WORD  its words; either may be lacking, and both of one that is killed
    STOPPED                the death watch; not of one that has never been ready, nor of one into
                           whose memory a card reaches, since nobody watches these
    GONE                   the pidfd, always; where it is seen before STOPPED, that does not come

Two rules. A state changes in `AgentProcess.happen` and nowhere else. What the table does not name
cannot happen: it raises. Whether a death watch runs is no part of the state: the table allows
STOPPED where one may run.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvcast.hostagent.death_watch import DeathWatch
from kvcast.protocol.impossible import after


class AgentState(Enum):
    """Where an agent stands."""

    STANDBY = "standby"
    """It is forked, and waits for its call."""
    STARTING = "starting"
    """It is called, and cannot serve yet."""
    SERVING = "serving"
    """It has said that it can serve, and is let."""
    FAILING = "failing"
    """It has said that it ends, and has never been ready."""
    ENDING = "ending"
    """It was ready, and has said that it ends: by itself, or because it was told to rest."""
    KILLED = "killed"
    """It runs no more, and has said nothing. Its memory is still being taken apart, and nobody
    waits for that."""
    EXITING = "exiting"
    """It runs no more, as it has said. How it ended is about to be known."""
    GONE = "gone"
    """Nothing is left of it, and its exit status is known."""


class AgentEvent(Enum):
    """What can happen to an agent."""

    CALLED = "called"
    """By the supervisor: it is wanted."""
    READY = "ready"
    """It says that it can serve."""
    LAST_WORD = "last word"
    """It says that it ends."""
    STOPPED = "stopped"
    """By the death watch: it runs no more."""
    GONE = "gone"
    """By its pidfd: the kernel has taken it apart."""


_S, _E = AgentState, AgentEvent

TRANSITIONS: Final[dict[AgentState, dict[AgentEvent, AgentState]]] = {
    _S.STANDBY: {_E.CALLED: _S.STARTING, _E.LAST_WORD: _S.FAILING, _E.GONE: _S.GONE},
    _S.STARTING: {_E.READY: _S.SERVING, _E.LAST_WORD: _S.FAILING, _E.GONE: _S.GONE},
    _S.SERVING: {_E.LAST_WORD: _S.ENDING, _E.STOPPED: _S.KILLED, _E.GONE: _S.GONE},
    _S.FAILING: {_E.GONE: _S.GONE},
    _S.ENDING: {_E.STOPPED: _S.EXITING, _E.GONE: _S.GONE},
    _S.KILLED: {_E.GONE: _S.GONE},
    _S.EXITING: {_E.GONE: _S.GONE},
    _S.GONE: {},
}

ENDED: Final = frozenset({_S.KILLED, _S.EXITING, _S.GONE})
"""It runs no more: its pipe and its death watch are closed, and another agent may be started."""
CAN_GIVE_WAY: Final = frozenset({_S.SERVING, _S.ENDING})
"""It runs, and has been ready: what it leaves is worth taking over."""


STANDBY_NAME: Final = "kvcast-standby"
"""What a process is called in `ps` and /proc/PID/comm while it waits for its call."""


@dataclass
class AgentProcess:
    """The process, and our ends of what tells of it."""

    pid: int
    pidfd: int
    pipe: socket.socket
    watch: DeathWatch
    started_at: float
    """When it was called; seconds of `time.monotonic`."""
    state: AgentState = AgentState.STANDBY
    code: int = -signal.SIGKILL
    """Its exit status, or the signal that ended it, below 0. Known when it is gone: until then, as
    if it had been killed."""

    @property
    def ended(self) -> bool:
        """Whether it runs no more."""
        return self.state in ENDED

    def happen(self, event: AgentEvent) -> None:
        """Go to where the table leads; ImpossibleEventError if it leads nowhere."""
        self.state = after(TRANSITIONS, self.state, event, f"agent {self.pid}")

    def signal(self, number: int) -> None:
        """Send it a signal, unless it is gone: its number is anybody's then."""
        if self.state is not AgentState.GONE:
            os.kill(self.pid, number)
