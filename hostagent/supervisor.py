"""The process beside a kept arena: it has everything open, and starts an agent whenever one dies.

Owns: that one agent at a time runs on what stands (`standing`), what is done when it ends, and the
words with which one supervisor gives way to another. Must not know: what an agent does.

The supervisor has imported and compiled what an agent needs, and opened the arena and all sockets;
then it forks. Soon after that agent serves it forks the next one, which stands by: it copies the
memory that it shares with the supervisor (`private_pages`), and then waits. So an agent that dies
is followed by one that only has to be called, and whoever connects meanwhile waits in a backlog.
The supervisor holds a duplicate of every client's connection, and of the memory in which the client
pins: so clients that outlive an agent are known to the next, which gets them with the call, and a
client's end is seen whoever it was connected to. It runs no agent code itself.

To upgrade: `kvcast agent --takeover`, of the new release. It asks the supervisor that runs; that
one has its agent end what it has begun (`Agent.rest`), and hands over all descriptors
(SCM_RIGHTS); the new one forks its agent, says that it serves, and the old one ends. Whatever fails
before that word, the old supervisor starts its agent again: nothing is lost by trying.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec
from kvcast.hostagent.agent_process import (
    CAN_GIVE_WAY,
    STANDBY_NAME,
    AgentEvent,
    AgentProcess,
    AgentState,
)
from kvcast.hostagent.death_watch import DeathWatch
from kvcast.hostagent.network import lander
from kvcast.hostagent.network.compiled import have_ready
from kvcast.hostagent.network.courier import CourierLoop
from kvcast.hostagent.network.local_server import SocketInUseError
from kvcast.hostagent.network.mover import Mover
from kvcast.hostagent.network.survivors import Survivor
from kvcast.hostagent.options import RDMA_OFF, Options
from kvcast.hostagent.private_pages import have_free_memory, make_private_pages_own
from kvcast.hostagent.standing import Standing, kept_options, stand_up
from kvcast.hostagent.tiers.arena import ArenaError
from kvcast.hostagent.tiers.kept import from_descriptors
from kvcast.protocol.impossible import ImpossibleEventError
from kvcast.protocol.links.backoff import pause_after
from kvcast.protocol.messages import control, local
from kvcast.protocol.messages.shared import INDEX_LAYOUT
from kvcast.protocol.placement import Placement
from kvcast.service.readiness import announce_ready

log = logging.getLogger("kvcast.hostagent.supervisor")

QUICK_DEATH_S: Final = 1.0
"""An agent that dies so soon may die of what it finds: after `AT_ONCE` of these in a row there is a
pause before each, which doubles."""
AT_ONCE: Final = 2
PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 5.0
GIVE_UP_AFTER: Final = 8
"""Agents that died quickly, one after the other; then the supervisor ends, too."""
HAND_OVER_S: Final = 10.0
"""How long either supervisor waits for the other."""
READY_S: Final = HAND_OVER_S / 2
"""How soon an agent that takes over must be ready; well before the other side gives up."""
STANDBY_AFTER_S: Final = 0.5
"""After an agent serves; until then it verifies blocks, and clients that waited are answered."""
_STARTING_NICE: Final = -10
"""While it starts, clients wait for it, whatever else keeps the processors busy."""
_AGENT_HEAP_BYTES: Final = 6 << 20
"""About what an agent allocates until it serves, most of it tables for compiled code."""
_MAX_WORD_BYTES: Final = 65_536
_MAX_FDS: Final = 64
_COMM: Final = Path("/proc/self/comm")
_CREDENTIALS: Final = struct.Struct("3i")


class TakeoverError(Exception):
    """The agent that runs does not give way; the message says why."""


class _Joined(msgspec.Struct, tag="joined"):
    number: int
    token: bytes
    read_only: bool


class _Left(msgspec.Struct, tag="left"):
    number: int


class _Ready(msgspec.Struct, tag="ready"):
    """`card`: whether a card reaches into the agent's memory, which it may do until the kernel has
    taken the process apart."""

    facts: dict[str, Any]
    card: bool


class _Ending(msgspec.Struct, tag="ending"):
    """The last word of an agent that is not killed."""


_Word = msgspec.msgpack.Decoder(_Joined | _Left | _Ready | _Ending)


class _Asked(msgspec.Struct, tag="asked"):
    """By a new supervisor: what it would take over, and how it understands that."""

    owner: str
    arena_path: str
    arena_bytes: int
    slab_bytes: int
    formats: tuple[int, int]


class _Given(msgspec.Struct, tag="given"):
    """By the old one, with as many descriptors: arena, index, ledger, frames, clients' listener,
    and `bulk` listeners."""

    buffer_bytes: int
    bulk: int
    clients: int


class _GivenClient(msgspec.Struct, tag="client"):
    """With its connection, and its region if it has one."""

    number: int
    token: bytes
    read_only: bool


class _Refused(msgspec.Struct, tag="refused"):
    reason: str


class _Serving(msgspec.Struct, tag="serving"):
    """By the new one: its agent runs; the old one may go."""


class _Called(msgspec.Struct, tag="called"):
    """To an agent that stands by: it is wanted, and so many clients follow."""

    clients: int


_Answer = msgspec.msgpack.Decoder(_Given | _GivenClient | _Refused)
_Question = msgspec.msgpack.Decoder(_Asked | _Serving)
_Call = msgspec.msgpack.Decoder(_Called)
_FORMATS: Final = (INDEX_LAYOUT, local.LOCAL_PROTOCOL_VERSION)

Run = Callable[["Place"], Coroutine[Any, Any, int]]


@dataclass
class Place:
    """Where an agent's process finds what stands, and whoever watches over it."""

    standing: Standing
    pipe: socket.socket
    nice: int
    """The process's priority once it serves."""
    served: bool = False
    """Whether the agent has come so far."""

    def __post_init__(self) -> None:
        self.standing.keeper = self

    def joined(self, client: Survivor) -> None:
        """As `Keeper.joined`."""
        fds = [client.connection.fileno()]
        if client.region_fd is not None:
            fds.append(client.region_fd)
        self._say(_Joined(client.number, client.token, client.read_only), fds)

    def left(self, number: int) -> None:
        """As `Keeper.left`."""
        with contextlib.suppress(OSError):  # whoever watches is gone, and we are about to be
            self._say(_Left(number))

    async def ready(
        self,
        facts: dict[str, Any],
        let_clients_in: Callable[[], None],
        rest: Callable[[], Awaitable[None]],
        stop: Callable[[], None],
        *,
        card: bool,
    ) -> None:
        """The agent can serve, and does once it is known that no other will: clients go to one
        agent only. It rests when it is told to, and then its process ends as it is; and it stops
        when nobody watches over it any more. `card`: whether blocks go by RDMA; then no other
        agent is started before this one is gone whole."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        self._say(_Ready(facts, card))
        loop = asyncio.get_running_loop()
        self.pipe.setblocking(False)
        if not await loop.sock_recv(self.pipe, _MAX_WORD_BYTES):
            stop()
            return
        self.served = True
        let_clients_in()

        async def give_way() -> None:
            await rest()
            self._say(_Ending())
            os._exit(0)

        def readable() -> None:
            try:
                word = self.pipe.recv(16)
            except BlockingIOError:
                return
            loop.remove_reader(self.pipe.fileno())
            if word:
                self._resting = loop.create_task(give_way())
            else:
                log.error("the supervisor is gone, and so this agent ends")
                stop()

        loop.add_reader(self.pipe.fileno(), readable)

    def _say(self, word: msgspec.Struct, fds: list[int] | None = None) -> None:
        data = msgspec.msgpack.encode(word)
        while True:
            try:
                if fds:
                    socket.send_fds(self.pipe, [data], fds)
                else:
                    self.pipe.send(data)
                return
            except BlockingIOError:  # it reads all the time: a moment
                selector = selectors.DefaultSelector()
                selector.register(self.pipe, selectors.EVENT_WRITE)
                selector.select(1.0)
                selector.close()


class _Post(Enum):
    """Whose it is to have an agent here."""

    KEPT = "kept"
    LEAVING = "leaving"
    """Another supervisor has asked for it: the agent rests, and nothing is handed over yet. If
    that fails, it is kept."""
    LEFT = "left"


@dataclass
class Supervisor:
    """See the module's text.

    What cannot happen to an agent (`agent_process`) is logged as an error, and left out: the agent
    stays in the state that it is in, nothing is done, and who told of it is not asked again. That
    is safe, since the pidfd of an agent that ends comes in every state but the last: whatever was
    left out before, another agent is started then.
    """

    options: Options
    run: Run
    standing: Standing
    deadline: float | None = None
    """Until when the first agent must be ready, since another supervisor waits for that."""
    announced: bool = False
    stopping: bool = False
    quick_deaths: int = 0
    _post: _Post = _Post.KEPT
    _agent: AgentProcess | None = None
    _standby: AgentProcess | None = None
    """The agent that comes after `_agent`."""
    _standby_at: float | None = None
    """When it is to be forked."""
    _end_of_heap: bytes = b""
    """In an agent that stood by."""

    def main(self, told: Callable[[], None] = lambda: None) -> int:
        """Watch until the agent ends for good; the exit status. `told` is called when the first
        agent serves."""
        self._told = told
        self._selector = selectors.DefaultSelector()
        wakeup, self._signals = socket.socketpair()
        for sock in (wakeup, self._signals):
            sock.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _heard)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self._listener = _listen_at(takeover_path(self.options))
        self._selector.register(self._signals, selectors.EVENT_READ, self._signalled)
        self._selector.register(self._listener, selectors.EVENT_READ, self._asked)
        try:
            while True:
                self._start()
                agent = self._agent
                assert agent is not None
                while not agent.ended:
                    until = self._standby_at if self.announced else self.deadline
                    self._wait(None if until is None else max(0.0, until - time.monotonic()))
                    if until is None or time.monotonic() < until:
                        continue
                    if self.announced:
                        self._stand_by()
                    else:
                        log.error("the new agent is not ready in time")
                        agent.signal(signal.SIGKILL)
                        self.deadline = None
                status = self._over(agent)
                if status is not None:
                    return status
        finally:
            with contextlib.suppress(FileNotFoundError):
                # Who never served may have found the paths of one that goes on.
                if self.announced and self._post is not _Post.LEFT:
                    os.unlink(takeover_path(self.options))
                    os.unlink(self.options.local.socket_path)
            if self._standby is not None:
                self._standby.signal(signal.SIGKILL)
                self._gone(self._standby)
            signal.set_wakeup_fd(-1)
            for sock in (self._listener, wakeup, self._signals):
                sock.close()
            self._selector.close()
            for client in list(self.standing.survivors):
                self._forget(client)
            self.standing.close()

    def _wait(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            # What was done about the one before may have closed this one, and its number may be
            # another's already.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    # --- agents ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Have an agent serve: the one that stands by, if there is one."""
        agent, self._standby, self._standby_at = self._standby, None, None
        if agent is None or agent.state is not AgentState.STANDBY:
            agent = self._fork()
        self._agent = agent
        self._happens(agent, AgentEvent.CALLED)
        agent.started_at = time.monotonic()
        clients = list(self.standing.survivors.values())
        try:
            agent.pipe.settimeout(HAND_OVER_S)
            agent.pipe.send(msgspec.msgpack.encode(_Called(len(clients))))
            _send_clients(agent.pipe, clients)
        except OSError as error:
            log.error("agent %d does not come: %s", agent.pid, error)
            agent.signal(signal.SIGKILL)
        finally:
            agent.pipe.setblocking(False)

    def _stand_by(self) -> None:
        """Have an agent that comes after the one that serves."""
        self._standby_at = None
        agent = self._agent
        if self.stopping or agent is None or agent.state is not AgentState.SERVING:
            return
        try:
            self._standby = self._fork()
        except OSError as error:
            log.warning("no agent stands by: %s", error)
            self._standby_at = time.monotonic() + MAX_PAUSE_S

    def _fork(self) -> AgentProcess:
        """An agent that waits for a call. OSError where there is no room for another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        watch = DeathWatch()
        sys.stdout.flush()
        sys.stderr.flush()
        # What is here is not looked through again by the child's collector: that would copy it all.
        gc.collect()
        gc.freeze()
        try:
            pid = os.fork()
        except OSError:
            for end in (ours, theirs, watch):
                end.close()
            raise
        if pid == 0:
            ours.close()
            self._be_an_agent(theirs, watch)
        theirs.close()
        self.standing.kept.found = True
        agent = AgentProcess(pid, os.pidfd_open(pid), ours, watch, time.monotonic())
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._heard_from(agent))
        self._selector.register(agent.pidfd, selectors.EVENT_READ, lambda: self._gone(agent))
        self._selector.register(watch.fd, selectors.EVENT_READ, lambda: self._stopped(agent))
        return agent

    def _be_an_agent(self, pipe: socket.socket, watch: DeathWatch) -> None:
        """In the child: never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            self._let_go_of_all()
            watch.hold()
            self._await_call(pipe)
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            with contextlib.suppress(OSError):  # who may not is no quicker than others
                os.setpriority(os.PRIO_PROCESS, 0, min(nice, _STARTING_NICE))
            with asyncio.Runner(loop_factory=CourierLoop) as runner:
                status = runner.run(self.run(Place(self.standing, pipe, nice)))
        except BaseException:
            log.exception("the agent failed")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            with contextlib.suppress(OSError):
                pipe.send(msgspec.msgpack.encode(_Ending()))
            os._exit(status)

    def _let_go_of_all(self) -> None:
        """In the child: close what is the supervisor's alone. Other agents' pipes would not end
        with it, and clients' connections not when they should."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        for client in list(self.standing.survivors):
            self._forget(client)

    def _await_call(self, pipe: socket.socket) -> None:
        """In the child: stand by. Whoever is not called any more, since the supervisor has ended,
        ends."""
        name = _renamed(STANDBY_NAME)
        if make_private_pages_own(pipe.fileno()):
            self._end_of_heap = have_free_memory(_AGENT_HEAP_BYTES)
        data = pipe.recv(_MAX_WORD_BYTES)
        if not data:
            os._exit(0)
        self.standing.survivors = _receive_clients(pipe, _Call.decode(data).clients)
        _renamed(name)

    def _happens(self, agent: AgentProcess, event: AgentEvent) -> bool:
        """Whether that can happen to the agent; then it has."""
        try:
            agent.happen(event)
        except ImpossibleEventError:
            log.exception("this cannot be, and is left out")
            return False
        return True

    def _heard_from(self, agent: AgentProcess) -> None:
        """Take what an agent says of its clients."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(agent.pipe, _MAX_WORD_BYTES, 2)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(agent.pipe)
                return
            word = _Word.decode(data)
            if isinstance(word, _Ending):
                self._happens(agent, AgentEvent.LAST_WORD)
                continue
            if isinstance(word, _Ready):
                if self._happens(agent, AgentEvent.READY):
                    self._is_ready(agent, word.facts)
                    if not word.card:
                        agent.watch.start()
                continue
            self._forget(word.number)
            if isinstance(word, _Joined) and fds:  # none where we are out of descriptors
                connection = socket.socket(fileno=fds[0])
                region_fd = fds[1] if len(fds) > 1 else None
                self.standing.survivors[word.number] = Survivor(
                    word.number, word.token, connection, region_fd, word.read_only
                )

    def _is_ready(self, agent: AgentProcess, facts: dict[str, Any]) -> None:
        """Let the agent serve, if nobody else does."""
        if not self.announced:
            try:
                self._told()
            except OSError as error:
                log.error("the supervisor before has not waited for this one: %s", error)
                agent.signal(signal.SIGKILL)
                return
            self.announced = True
            announce_ready(**{**facts, "pid": os.getpid(), "agent_pid": agent.pid})
        with contextlib.suppress(OSError):  # it has just died
            agent.pipe.send(b"go")
        self._standby_at = time.monotonic() + STANDBY_AFTER_S

    def _forget(self, number: int) -> None:
        client = self.standing.survivors.pop(number, None)
        if client is not None:
            client.connection.close()
            if client.region_fd is not None:
                os.close(client.region_fd)

    def _stopped(self, agent: AgentProcess) -> None:
        """It runs no more."""
        if not agent.ended:
            self._heard_from(agent)  # what it still said
        if not self._happens(agent, AgentEvent.STOPPED):
            if not agent.ended:
                self._selector.unregister(agent.watch.fd)  # or it would tell for ever
            return
        self._let_go(agent)
        while agent.state is AgentState.EXITING:  # it is about to say how it ended
            self._wait(None)

    def _gone(self, agent: AgentProcess) -> None:
        """Nothing is left of it."""
        is_open = not agent.ended
        if is_open:
            # Before its status is taken and the death watch is closed: what it says may have that
            # watch started, and it killed, by a number which is still its own.
            self._heard_from(agent)
        if not self._happens(agent, AgentEvent.GONE):
            return
        _, status = os.waitpid(agent.pid, 0)
        agent.code = os.waitstatus_to_exitcode(status)
        if agent is self._standby:
            if not self.stopping and self._post is _Post.KEPT:
                log.warning("the agent that stood by ended (%s)", _said(agent.code))
            self._standby = None
            self._standby_at = time.monotonic() + MAX_PAUSE_S
        self._selector.unregister(agent.pidfd)
        os.close(agent.pidfd)
        if is_open:
            self._let_go(agent)

    def _let_go(self, agent: AgentProcess) -> None:
        """It has said all that it will."""
        for end in (agent.pipe, agent.watch.fd):
            with contextlib.suppress(KeyError):  # it was not to be heard again
                self._selector.unregister(end)
        agent.pipe.close()
        agent.watch.close()

    def _over(self, agent: AgentProcess) -> int | None:
        """The agent has ended: our exit status, or None to start another."""
        code = agent.code
        if self._post is _Post.LEFT:
            return 0
        if self.stopping or (code == 0 and self._post is _Post.KEPT):
            return max(code, 0)
        if not self.announced:
            return max(code, 1)  # it cannot start, and has said why
        if self._post is _Post.LEAVING:
            self._post = _Post.KEPT
            return None
        log.error("the agent ended (%s): another takes over", _said(code))
        if time.monotonic() - agent.started_at > QUICK_DEATH_S:
            self.quick_deaths = 0
            return None
        self.quick_deaths += 1
        if self.quick_deaths >= GIVE_UP_AFTER:
            log.error("%d agents ended within %g s each", self.quick_deaths, QUICK_DEATH_S)
            return 1
        if self.quick_deaths <= AT_ONCE:
            return None
        end = time.monotonic() + pause_after(self.quick_deaths - AT_ONCE, PAUSE_S, MAX_PAUSE_S)
        while not self.stopping and (left := end - time.monotonic()) > 0:
            self._wait(left)
        return 0 if self.stopping else None

    def _signalled(self) -> None:
        for number in self._signals.recv(64):
            if number in (signal.SIGTERM, signal.SIGINT):
                self.stopping = True
            elif number != signal.SIGHUP:
                continue
            agent = self._agent
            if agent is not None and not agent.ended:
                agent.signal(signal.SIGHUP if number == signal.SIGHUP else signal.SIGTERM)

    # --- giving way -------------------------------------------------------------------------------

    def _asked(self) -> None:
        """Another supervisor asks for its place."""
        peer, _ = self._listener.accept()
        with peer:
            peer.settimeout(HAND_OVER_S)
            try:
                self._give_way(peer)
            except (OSError, msgspec.MsgspecError, TakeoverError) as error:
                log.error("a takeover failed: %s", error)

    def _give_way(self, peer: socket.socket) -> None:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid not in (os.geteuid(), 0):
            raise TakeoverError(f"user {uid} may not take over")
        asked = _Question.decode(peer.recv(_MAX_WORD_BYTES))
        if not isinstance(asked, _Asked):
            raise TakeoverError("whoever has connected does not ask")
        reason = self._why_not(asked)
        if reason:
            peer.send(msgspec.msgpack.encode(_Refused(reason)))
            return
        agent = self._agent
        assert agent is not None
        self._post = _Post.LEAVING
        try:
            agent.pipe.send(b"rest")
            deadline = time.monotonic() + HAND_OVER_S
            while not agent.ended:
                self._wait(max(0.0, deadline - time.monotonic()))
                if time.monotonic() > deadline:
                    agent.signal(signal.SIGKILL)
                    deadline += HAND_OVER_S
            self._hand_over(peer)
            if not isinstance(_Question.decode(peer.recv(_MAX_WORD_BYTES)), _Serving):
                raise TakeoverError("the new supervisor does not serve")
        except BaseException:
            log.error("the takeover was given up: this supervisor goes on")
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = _listen_at(takeover_path(self.options))
            self._selector.register(self._listener, selectors.EVENT_READ, self._asked)
            raise
        self._post = _Post.LEFT
        log.info("another supervisor has taken over")

    def _why_not(self, asked: _Asked) -> str:
        mine = _question_of(self.options)
        if asked.formats != mine.formats:
            return (
                f"formats {asked.formats} are not {mine.formats}: stop this agent, remove its "
                "arena and start the new one"
            )
        if asked != mine:
            return f"{asked.owner}, {asked.arena_path}: this is {mine.owner}, {mine.arena_path}"
        agent = self._agent
        if self._post is not _Post.KEPT or agent is None or agent.state not in CAN_GIVE_WAY:
            return "no agent serves just now; try again"
        return ""

    def _hand_over(self, peer: socket.socket) -> None:
        standing = self.standing
        kept = standing.kept
        clients = list(standing.survivors.values())
        fds = [kept.arena.fd, kept.index.fd, kept.ledger_fd]
        fds += [sock.fileno() for sock in (standing.frames, standing.local, *standing.bulk)]
        given = _Given(standing.buffer_bytes, len(standing.bulk), len(clients))
        socket.send_fds(peer, [msgspec.msgpack.encode(given)], fds)
        _send_clients(peer, clients)


def _send_clients(peer: socket.socket, clients: list[Survivor]) -> None:
    """Hand these over, each with its descriptors; OSError where nobody takes them."""
    for client in clients:
        fds = [client.connection.fileno()]
        if client.region_fd is not None:
            fds.append(client.region_fd)
        word = _GivenClient(client.number, client.token, client.read_only)
        socket.send_fds(peer, [msgspec.msgpack.encode(word)], fds)


def _receive_clients(peer: socket.socket, count: int) -> dict[int, Survivor]:
    """What `_send_clients` sends; TakeoverError where it is something else."""
    survivors: dict[int, Survivor] = {}
    for _ in range(count):
        data, fds, _, _ = socket.recv_fds(peer, _MAX_WORD_BYTES, 2)
        client = _Answer.decode(data)
        if not isinstance(client, _GivenClient) or not fds:
            raise TakeoverError("the clients that are handed over are not understood")
        survivors[client.number] = Survivor(
            *(client.number, client.token, socket.socket(fileno=fds[0])),
            *(fds[1] if len(fds) > 1 else None, client.read_only),
        )
    return survivors


def supervise(options: Options, run: Run, takeover: bool) -> int:
    """Be a supervisor until the agent ends for good; the exit status."""
    warm_up(cards=options.network.rdma != RDMA_OFF)
    peer: socket.socket | None = None
    try:
        if takeover:
            peer = _connect(takeover_path(options))
        standing = stand_up(options) if peer is None else _take_over(options, peer)
    except (ArenaError, SocketInUseError, TakeoverError, OSError) as error:
        log.error("cannot start: %s", error)
        return 1

    def told() -> None:
        if peer is not None:
            peer.send(msgspec.msgpack.encode(_Serving()))
            peer.close()

    deadline = None if peer is None else time.monotonic() + READY_S
    return Supervisor(options, run, standing, deadline).main(told)


def warm_up(*, cards: bool) -> None:
    """Have what an agent compiles, imports or finds out of types ready before it is needed.
    `cards`: also what it needs for RDMA."""
    for messages in (local.ClientMessage, control.ControllerMessage):
        msgspec.msgpack.Decoder(messages)
    have_ready(cards=cards)
    Placement(seed=1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        Mover(sock, connected=False, joins=False)
        if lander.available():
            lander.Lander(sock.fileno())


def takeover_path(options: Options) -> str:
    """Where a supervisor is asked to give way."""
    return f"{options.local.socket_path}.takeover"


def _question_of(options: Options) -> _Asked:
    kept = kept_options(options)
    return _Asked(kept.owner, kept.arena_path, kept.arena_bytes, kept.slab_bytes, _FORMATS)


def _listen_at(path: str) -> socket.socket:
    """Listen there; whoever listened there before has given way, or is dead."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(mask)
    listener.listen(1)
    return listener


def _connect(path: str) -> socket.socket | None:
    """A connection to the supervisor that runs; None where none does."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    peer.settimeout(2 * HAND_OVER_S)
    try:
        peer.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        peer.close()
        return None
    return peer


def _take_over(options: Options, peer: socket.socket) -> Standing:
    """Ask the supervisor that runs for what stands."""
    peer.send(msgspec.msgpack.encode(_question_of(options)))
    data, fds, _, _ = socket.recv_fds(peer, _MAX_WORD_BYTES, _MAX_FDS)
    if not data:
        raise TakeoverError("the agent that runs does not give way")
    given = _Answer.decode(data)
    if isinstance(given, _Refused):
        raise TakeoverError(given.reason)
    if not isinstance(given, _Given) or len(fds) != 5 + given.bulk:
        raise TakeoverError("what the agent that runs hands over is not understood")
    survivors = _receive_clients(peer, given.clients)
    arena_fd, index_fd, ledger_fd, frames, local, *bulk = fds
    kept = from_descriptors(kept_options(options), arena_fd, index_fd, ledger_fd)
    sockets = [socket.socket(fileno=fd) for fd in (frames, local, *bulk)]
    return Standing(kept, sockets[0], given.buffer_bytes, sockets[2:], sockets[1], survivors)


def _renamed(name: str) -> str:
    """Be called so in `ps` from now on; the name before. Where /proc is read-only nothing is."""
    before = ""
    with contextlib.suppress(OSError):
        before = _COMM.read_text()
        _COMM.write_text(name)
    return before


def _heard(_number: int, _frame: object) -> None:
    """The wake-up descriptor has it."""


def _said(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"
