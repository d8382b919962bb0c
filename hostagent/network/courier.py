"""The courier's system calls: the loop that waits for everything, in compiled code.

Owns: the sockets of the courier's clients, and the wait in which it runs. Must not know: what a
question means, or what follows from an answer (`kvcast.protocol.courier`, `core.courier`).

Each client that may use the courier has a socket pair of its own (SOCK_SEQPACKET): a question is
one message, which the kernel copies into memory of ours before anybody looks at it. The event loop
waits by `CourierSelector`: while nothing is ready but the courier's own sockets, and, while
questions are in flight, the one for frames, compiled code serves them and waits on. Whatever else
is ready ends the wait; then Python first books what the courier has done, and goes on with frames
where the courier has stopped. So the courier never runs beside Python, and needs no lock; and what
it did is known before any other event is.

What is booked late costs nobody anything, so a wait ends for it only after `BOOKS_AFTER_MS`, or
when many records are there.

An agent that polls never sleeps in its waits: it looks again and again, and lets others have the
processor in between. To be woken is half of what a small block takes.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import select
import selectors
import socket
import time
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Final

from kvcast.hostagent.core.courier import MAX_CLIENTS, Courier, Holder
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.pushing import Pushes
from kvcast.hostagent.network.conveyor import (
    Conveyors,
    ConveyorSockets,
    give_blocks,
    give_more,
    send_requests,
    take_blocks,
)
from kvcast.hostagent.network.lander import hashing
from kvcast.hostagent.network.mover import Mover, Moves, receive, send
from kvcast.hostagent.network.pushing import (
    PushEnds,
    PushSockets,
    push_all,
    serve_pusher,
    take_pushes,
)
from kvcast.native.linux import (
    CLOCK_MONOTONIC,
    EPOLLIN,
    MSG_DONTWAIT,
    EpollEvent,
    TimeSpec,
    clock_gettime,
    epoll_wait,
    recv,
    sched_yield,
    write,
)
from kvcast.native.subset import (
    I32,
    I64,
    U32,
    U64,
    Inline,
    Library,
    Ptr,
    Struct,
    address_of,
    copy,
    ctypes_of,
    native,
    signed,
    size_of,
    u16_at,
    unsigned,
)
from kvcast.protocol import courier as couriers
from kvcast.protocol.conveyor import GIVEN_ROOM, NODES, Given
from kvcast.protocol.courier import (
    BATCHES,
    CLIENT_GONE,
    CLIENT_HERE,
    CLIENT_OFFENDS,
    NOBODY,
    OFFENCE,
    RECORDS_ENOUGH,
    SEND_READ,
    Answer,
    Batch,
    came,
    close_batch,
    expire,
    frame_came,
    hear,
    may_hear,
    next_read,
)
from kvcast.protocol.lane import JOBS, Lane, NativeLane, answer
from kvcast.protocol.lookups import expire_lookups, hear_lookup
from kvcast.protocol.meetings import Meetings
from kvcast.protocol.messages.questions import (
    EXISTS,
    KEY,
    MAX_CHAIN,
    MAX_MANY,
    PUT,
    PUT_QUESTION,
    QUESTION,
    ROOM,
)
from kvcast.protocol.messages.shared import WORD_BYTES
from kvcast.protocol.placement import (
    ALL_PLACED,
    FRAME_FOR_PYTHON,
    GO_ON,
    Placement,
    address_of_buffer,
    place,
)
from kvcast.protocol.pushing import ENDED, LANDED, expire_pushes, hear_put

BOOKS_AFTER_MS: Final = 2
WATCH_NS: Final = 50_000
"""How long a wait looks again and again for what answers a question, or for what a client says
next, before it sleeps: to be woken takes about as long as what is waited for."""
VAIN_WAITS: Final = 16
"""So many waits sleep at once after one that has watched in vain: a home is slow, or far, or others
need the processor. So many of clients' messages likewise."""
LANE_ENOUGH: Final = JOBS // 2
"""READs that the lane has answered, after which Python is to hear of them. Of those that a switch
has marked it hears at once, since it may have to hold the next ones back."""
LANE_FRAMES: Final = 256
"""As many as the home sends in one round."""
_GIVEN_ENOUGH: Final = GIVEN_ROOM // 2
_TAKERS: Final = MAX_CLIENTS + 1
_GIVERS: Final = _TAKERS + NODES
_PUSHERS: Final = _GIVERS + NODES
_RECEIVERS: Final = _PUSHERS + NODES
_LANDED_ENOUGH: Final = LANDED // 32
"""Blocks that were pushed here, after which Python is to hear of them: at once where there are
landing places for a few more,"""
_LANDED_MANY: Final = LANDED // 2
"""and in any case after so many."""
_ENDED_MANY: Final = ENDED // 2
"""Of blocks that are put together Python hears when all have ended, or so many."""
_LOOK_MS: Final = 100
"""How often it is looked, while blocks are pushed, whether their connections stand still."""
_EVENTS: Final = 128
_ROUNDS: Final = 4
"""Of frames, before others have their turn."""
_MAX_DESCRIPTORS: Final = 65_536
"""A client with a higher one asks the agent for everything."""
_QUESTION_BYTES: Final = max(
    PUT_QUESTION.size + (MAX_MANY - 1) * ROOM.size, QUESTION.size + (MAX_CHAIN - 1) * KEY.size
)
"""The longest."""
_SPARE: Final = 8
"""Room for more than a question, so that what is too long shows."""
_LOOK_S: Final = 1.0
_NS_A_MS: Final = 1_000_000
_NS_A_S: Final = 1_000_000_000


class Waiting(Struct):
    """The state of the wait."""

    epoll: I32
    frames: U32
    """The socket that frames come from."""
    courier: Ptr[couriers.Courier]
    moves: Ptr[Moves]
    lane: Ptr[NativeLane]
    lane_frames: U64
    """By so many frames it may answer before it sends them."""
    events: Ptr[EpollEvent]
    conveyors: Ptr[Conveyors]
    pushes: Ptr[PushEnds]
    roles: Ptr[U32]
    """By descriptor, what it is of: the number of a client, plus 1; from _TAKERS on of a taker,
    from _GIVERS on of a giver, from _PUSHERS on of a pusher, and from _RECEIVERS on of a receiver.
    """
    descriptors: Ptr[I32]
    """By number of a client, its descriptor."""
    question: U64
    read: U64
    """Where a READ lies, with what is in front of it."""
    read_length: U64
    leads: U64
    """By node, `lead` bytes that go in front of a READ."""
    lead: U64
    pieces: U64
    """Pieces of frames that Python is to go on with,"""
    why: U64
    """and what `place` has said of them."""
    stopped: U64
    """Whether there are such."""
    attention: U64
    """Whether something is Python's: a client has hung up, or a READ waits for the socket."""
    tell_within_ns: U64
    """Python hears of arrivals after that, even if nothing hurries it."""
    vain: U64
    """So many more waits sleep at once, since to watch was in vain."""
    soon_ns: U64
    """Until then a client that has said something is watched for: who gives a block back often asks
    for the next."""
    soon_vain: U64
    """After so many more messages none is, since that was in vain."""
    polls: U64
    """Whether it does not sleep."""
    time: Annotated[Ptr[TimeSpec], Inline(1)]


@native
def now_of(w: Waiting) -> U64:
    time = w.time[0]
    clock_gettime(CLOCK_MONOTONIC, time)
    return time.seconds * _NS_A_S + time.nanoseconds


@native
def send_answers(w: Waiting) -> None:
    """Send what clients are told; who does not take it is given up."""
    courier = w.courier[0]
    for i in range(courier.answer_count):
        answer = courier.answers[i]
        if answer.client == NOBODY:
            continue
        who = courier.clients[answer.client]
        if who.state == CLIENT_HERE:
            size = size_of(Answer) - WORD_BYTES
            if write(w.descriptors[answer.client], address_of(answer) + WORD_BYTES, size) < 0:
                who.state = CLIENT_GONE
                w.attention = 1
    courier.answer_count = 0
    if courier.batches_full != 0:
        courier.batches_full = 0
        for i in range(BATCHES):
            batch = courier.batches[i]
            if batch.open != 0 and batch.left == 0:
                send_batch(w, batch)
                close_batch(courier, i)


@native
def send_batch(w: Waiting, batch: Batch) -> None:
    """Send the answers to a question for many blocks."""
    if batch.client == NOBODY:
        return
    who = w.courier[0].clients[batch.client]
    if who.state == CLIENT_HERE:
        size = batch.count * (size_of(Answer) - WORD_BYTES)
        if write(w.descriptors[batch.client], batch.answers, size) < 0:
            who.state = CLIENT_GONE
            w.attention = 1


@native
def send_all(w: Waiting) -> None:
    """What follows from frames that came outside of a wait."""
    send_requests(w.conveyors[0])
    send_answers(w)


@native
def send_reads(w: Waiting) -> None:
    """Send the READ that lies at `read`, and those that follow."""
    courier = w.courier[0]
    more = True
    while more:
        m = w.moves[0]
        if w.lead != 0:
            copy(w.read, w.leads + courier.read_node * w.lead, w.lead)
        job = m.jobs[0]
        job.node = courier.read_node
        job.address = w.read
        job.length = w.read_length
        job.chunks = 0
        job.chunk_code = 0
        send(m, 1)
        if m.waiting_count != 0:
            w.attention = 1
        more = next_read(courier)


@native
def serve(w: Waiting, client: U64, now_ns: U64) -> None:
    """One message of a client."""
    courier = w.courier[0]
    who = courier.clients[client]
    got = recv(w.descriptors[client], w.question, _QUESTION_BYTES + _SPARE, MSG_DONTWAIT)
    if got < 0:
        return
    if got == 0:
        who.state = CLIENT_GONE
        w.attention = 1
        return
    if got > 1 and u16_at(w.question)[0] == PUT:
        if not hear_put(w.pushes[0].pushing[0], client, w.question, unsigned(got), now_ns):
            who.state = CLIENT_OFFENDS
            w.attention = 1
        push_all(w.pushes[0], now_ns)
        send_answers(w)
        return
    if got > 1 and u16_at(w.question)[0] == EXISTS:
        lookups = w.conveyors[0].lookups[0]
        if not hear_lookup(lookups, client, w.question, unsigned(got), now_ns):
            who.state = CLIENT_OFFENDS
            w.attention = 1
        send_all(w)
        return
    told = hear(courier, client, w.question, unsigned(got), now_ns)
    if told == OFFENCE:
        who.state = CLIENT_OFFENDS
        w.attention = 1
    if told == SEND_READ:
        send_reads(w)
    send_all(w)


@native
def send_lane(w: Waiting) -> None:
    """Send what the lane has answered."""
    lane = w.lane[0]
    if lane.job_count != 0:
        m = w.moves[0]
        jobs = m.jobs
        m.jobs = lane.jobs
        send(m, lane.job_count)
        m.jobs = jobs
        lane.job_count = 0
        lane.frames_left = w.lane_frames
        if m.waiting_count != 0:  # the home is asked for nothing more until it is gone
            lane.opened = 0
            w.attention = 1


@native
def receive_frames(w: Waiting, now_ns: U64) -> None:
    """Take frames, up to what is Python's."""
    courier = w.courier[0]
    m = w.moves[0]
    t = courier.table[0]
    if w.lane[0].opened != 0:
        w.lane[0].meetings[0].now_ns = now_ns
    for _ in range(_ROUNDS):
        count = receive(m)
        if count == 0:
            return
        t.piece = 0
        t.offset = 0
        while True:
            why = place(t, m.pieces, count)
            came(courier, now_ns)
            t.frame_taken = 0
            theirs = False
            if why == FRAME_FOR_PYTHON:
                theirs = not frame_came(courier, t.frame, t.frame_length, t.frame_source, now_ns)
                if theirs:
                    theirs = not answer(w.lane[0], t.frame, t.frame_source)
                t.frame_taken = 0 if theirs else 1
            send_all(w)
            told = t.hurry != 0 or (t.arrival_count != 0 and why == GO_ON)
            told = told and t.arrival_count + t.held_count != 0
            if theirs or told:
                send_lane(w)
                w.pieces = count
                w.why = why
                w.stopped = 1
                return
            if why == ALL_PLACED:
                break
        send_lane(w)


@native
def wait_for_events(w: Waiting, pause_ms: I64, now_ns: U64) -> I64:
    """As `epoll_wait`, without sleep where the agent polls."""
    if w.polls != 0 and pause_ms != 0:
        until_ns = now_ns
        if pause_ms > 0:
            until_ns += unsigned(pause_ms) * _NS_A_MS
        while True:
            count = signed(0 + epoll_wait(w.epoll, w.events, _EVENTS, 0))
            if count != 0 or (pause_ms > 0 and now_of(w) >= until_ns):
                return count
            sched_yield()
    return signed(0 + epoll_wait(w.epoll, w.events, _EVENTS, pause_ms))


@native
def wait(w: Waiting, timeout_ms: I64) -> U32:
    """Wait until something is Python's, or it is time (-1: never); how many of `events` are
    Python's."""
    count = wait_for_more(w, timeout_ms)
    table = w.courier[0].table[0]
    if w.stopped == 0 and table.arrival_count + table.held_count != 0:
        # There was no hurry with them; but now that Python is awake, it hears of them first.
        w.pieces = 0
        w.why = ALL_PLACED
        w.stopped = 1
    return count


@native
def wait_for_more(w: Waiting, timeout_ms: I64) -> U32:
    courier = w.courier[0]
    table = courier.table[0]
    lane = w.lane[0]
    conveyors = w.conveyors[0]
    giving = conveyors.giving[0]
    pushes = w.pushes[0]
    pushing = pushes.pushing[0]
    lookups = conveyors.lookups[0]
    now_ns = now_of(w)
    end_ns = now_ns + unsigned(timeout_ms) * _NS_A_MS
    watch_until_ns = now_ns + WATCH_NS
    tell_by_ns = 0
    w.stopped = 0
    w.attention = 0
    while True:
        pause_ms = timeout_ms
        if timeout_ms > 0:
            pause_ms = signed((end_ns - now_ns + _NS_A_MS - 1) // _NS_A_MS)
        if table.arrival_count + table.held_count != 0:
            if tell_by_ns == 0:
                tell_by_ns = now_ns + w.tell_within_ns
            if now_ns >= tell_by_ns:
                return 0
            until_ms = signed((tell_by_ns - now_ns + _NS_A_MS - 1) // _NS_A_MS)
            if pause_ms < 0 or until_ms < pause_ms:
                pause_ms = until_ms
        looked_until_ns = expire_lookups(lookups, now_ns)
        next_ns = expire(courier, now_ns)
        if next_ns == 0 or (looked_until_ns != 0 and looked_until_ns < next_ns):
            next_ns = looked_until_ns
        if next_read(courier):
            send_reads(w)
        send_answers(w)
        expire_pushes(pushing, now_ns)
        send_answers(w)
        if next_ns != 0:
            until_ms = signed((next_ns - now_ns + _NS_A_MS - 1) // _NS_A_MS)
            if pause_ms < 0 or until_ms < pause_ms:
                pause_ms = until_ms
        untold = courier.record_count != 0 or lane.answered_count != 0 or giving.given_count != 0
        untold = untold or pushing.landed_count >= _LANDED_ENOUGH
        if untold and (pause_ms < 0 or pause_ms > BOOKS_AFTER_MS):
            pause_ms = signed(0 + BOOKS_AFTER_MS)
        untold = untold or pushing.landed_count != 0
        if pushing.in_flight != 0 and (pause_ms < 0 or pause_ms > _LOOK_MS):
            pause_ms = signed(0 + _LOOK_MS)
        in_flight = courier.in_flight + pushing.in_flight + lookups.in_flight
        watching = in_flight != 0 and w.vain == 0 and now_ns < watch_until_ns
        soon = now_ns < w.soon_ns and w.attention == 0
        if give_more(conveyors, now_ns) or watching or soon or w.attention != 0:
            pause_ms = signed(0)
        count = wait_for_events(w, pause_ms, now_ns)
        if count < 0:
            return 0
        now_ns = now_of(w)
        if count == 0 and (watching or soon):
            if watching and now_ns >= watch_until_ns:
                w.vain = 0 + VAIN_WAITS
            if soon and now_ns >= w.soon_ns:
                w.soon_vain = 0 + VAIN_WAITS
            if timeout_ms < 0 or now_ns < end_ns:
                sched_yield()  # whom we watch for may wait for this processor
                continue
        if w.vain != 0 and in_flight != 0:
            w.vain -= 1
        watch_until_ns = now_ns + WATCH_NS
        if count != 0:
            w.soon_ns = 0
        kept = 0
        for i in range(unsigned(count)):
            event = w.events[i]
            role = 0
            if event.data < _MAX_DESCRIPTORS:
                role = 0 + w.roles[event.data]
            frames = event.data == w.frames and event.events == EPOLLIN
            if courier.in_flight == 0 and lane.opened == 0:
                frames = False
            if role >= _RECEIVERS:
                take_pushes(pushes, role - _RECEIVERS, now_ns)
            elif role >= _PUSHERS:
                serve_pusher(pushes, role - _PUSHERS, now_ns)
                send_answers(w)
            elif role >= _GIVERS:
                giver = giving.givers[role - _GIVERS]
                if giver.gone == 0:
                    give_blocks(conveyors, giver, now_ns)
                    giving.ready |= giver.ready
            elif role >= _TAKERS:
                take_blocks(conveyors, role - _TAKERS, now_ns)
                send_all(w)
            elif role != 0:
                # Else it is heard after the records were taken.
                if courier.clients[role - 1].state == CLIENT_HERE and may_hear(courier):
                    serve(w, role - 1, now_ns)
                    if w.soon_vain != 0:
                        w.soon_vain -= 1
                    else:
                        w.soon_ns = now_ns + WATCH_NS
            elif frames and w.stopped == 0:
                receive_frames(w, now_ns)
            else:
                w.events[kept].events = event.events
                w.events[kept].data = event.data
                kept += 1
        if kept != 0 or w.stopped != 0 or w.attention != 0 or conveyors.attention != 0:
            return kept
        if courier.wished != 0 or courier.cut != 0 or giving.given_count >= _GIVEN_ENOUGH:
            return 0
        if courier.record_count >= RECORDS_ENOUGH:
            return 0
        if pushing.ended_count != 0 and pushing.batched == 0:
            return 0
        if pushing.ended_count >= _ENDED_MANY or pushing.landed_count >= _LANDED_MANY:
            return 0
        if pushing.landed_count >= _LANDED_ENOUGH and pushing.scarce != 0:
            return 0
        if pushing.wished != 0 or pushing.cut != 0:
            return 0
        if courier.landed >= courier.enough_landed and courier.batches_open == 0:
            return 0
        if lane.marked_count != 0 or lane.answered_count >= LANE_ENOUGH:
            return 0
        if count == 0 and untold and giving.ready == 0:
            return 0
        if timeout_ms >= 0 and now_ns >= end_ns:
            return 0


# --- Python's side ----------------------------------------------------------------------------


@cache
def _compiled() -> tuple[Callable[[int, int], int], Callable[[int], None]]:
    library = Library(wait, send_all)
    return library.call(wait), library.call(send_all)


class CourierSelector(selectors.EpollSelector):
    """A selector for an event loop, in whose waits a courier can run."""

    runs: CourierDriver | None = None

    def watch(self, descriptor: int, events: int = select.EPOLLIN) -> None:
        """Let a wait end, too, when this can be read; it is nobody's else."""
        self._epoll().register(descriptor, events)

    def watch_no_more(self, descriptor: int) -> None:
        """Undo `watch`."""
        self._epoll().unregister(descriptor)

    def _epoll(self) -> select.epoll:
        epoll = self._selector  # type: ignore[attr-defined] # the one that `fileno` is of
        assert isinstance(epoll, select.epoll)
        return epoll

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        runs = self.runs
        if runs is None or not runs.is_of_use:
            return super().select(timeout)
        ready = []
        keys = self.get_map()
        for descriptor, happened in runs.wait(timeout):
            key = keys.get(descriptor)
            if key is not None:
                # As the selector has it: what is neither is an error, which both want to know.
                events = selectors.EVENT_WRITE if happened & ~select.EPOLLIN else 0
                events |= selectors.EVENT_READ if happened & ~select.EPOLLOUT else 0
                ready.append((key, events & key.events))
        return ready


class CourierLoop(asyncio.SelectorEventLoop):
    """An event loop in whose waits a courier can run."""

    def __init__(self) -> None:
        self.selector = CourierSelector()
        super().__init__(self.selector)


class CourierDriver:
    """Runs a courier in the waits of a selector. `frames` is the socket for frames, and `mover` the
    one that moves them. `go_on` is told where Python is to go on with them (why, pieces), `pump`
    that some may wait for the socket, `count` that some were received; and `offended` of clients
    that are to be cut off. What has come whole by RDMA it hears of within `tell_within_s`. One
    that `polls` does not sleep in its waits."""

    def __init__(
        self,
        courier: Courier,
        pushes: Pushes,
        selector: CourierSelector,
        placement: Placement,
        *,
        frames: socket.socket,
        mover: Mover,
        go_on: Callable[[int, int], None],
        pump: Callable[[], None],
        count: Callable[[], None],
        lane: Lane | None,
        pins: memoryview,
        meetings: Meetings,
        given: Callable[[list[Given], int], None],
        open_lane: Callable[[float], None],
        close_lane: Callable[[float], bool],
        tell_within_s: float,
        polls: bool = False,
    ) -> None:
        self.courier = courier
        self.pushes = pushes
        self._lane = lane
        self._open_lane = open_lane
        self._close_lane = close_lane
        self._no_lane = ctypes_of(NativeLane)()
        self._pool: Pool | None = None
        self._looked = 0.0
        """When it was last looked for conveyors that stand still."""
        self.offended: Callable[[Holder], None] = lambda _holder: None
        self._selector = selector
        self._mover = mover
        self._go_on = go_on
        self._pump = pump
        self._count = count
        self._wait, self._send_all = _compiled()
        self._sockets: dict[Holder, tuple[socket.socket, int]] = {}
        waiting: Any = ctypes_of(Waiting)()
        self._waiting = waiting
        self._address = ctypes.addressof(waiting)
        self._events = (ctypes_of(EpollEvent) * _EVENTS)()
        self._roles = (ctypes.c_uint32 * _MAX_DESCRIPTORS)()
        self._descriptors = (ctypes.c_int32 * MAX_CLIENTS)()
        hashed = hashing()
        assert hashed is not None
        self.conveyors = ConveyorSockets(
            *(courier, hashed, self),
            lane=0 if lane is None else lane.address,
            pins=pins,
            meetings=meetings,
            given=given,
        )
        self.connect: Callable[[int], None] = lambda _node: None
        """Told of a node that there had better be a conveyor from."""
        waiting.conveyors = self.conveyors.address
        self.push_sockets = PushSockets(pushes, hashed, self)
        self.connect_to_push: Callable[[int], None] = lambda _node: None
        """The same of one that blocks could be pushed to."""
        waiting.pushes = self.push_sockets.address
        self._question = bytearray(_QUESTION_BYTES + 2 * _SPARE)
        waiting.epoll = selector.fileno()
        waiting.frames = frames.fileno()
        waiting.courier = courier.address
        waiting.moves = mover.address
        waiting.lane = ctypes.addressof(self._no_lane) if lane is None else lane.address
        waiting.polls = polls
        waiting.lane_frames = LANE_FRAMES
        waiting.tell_within_ns = round(tell_within_s * _NS_A_S)
        waiting.events = ctypes.addressof(self._events)
        waiting.roles = ctypes.addressof(self._roles)
        waiting.descriptors = ctypes.addressof(self._descriptors)
        waiting.question = address_of_buffer(self._question)
        self._leads: tuple[int, int, bytearray] = (-1, -1, bytearray(1))
        self._placement = placement
        placement.before_python = self._before_python
        selector.runs = self

    def close(self) -> None:
        """The courier runs no more."""
        self._selector.runs = None
        for holder in list(self._sockets):
            self.remove(holder)
        self.conveyors.close()
        self.push_sockets.close()
        self.pushes.book(time.monotonic())
        self._placement.before_python = lambda _why: False
        self.courier.give_room_back()

    # --- clients ----------------------------------------------------------------------------------

    @property
    def is_of_use(self) -> bool:
        """Whether anybody may ask, or be answered."""
        return bool(self._sockets) or self._lane is not None

    @property
    def sleeps(self) -> int:
        """How many more waits sleep at once, though questions are in flight."""
        count: int = self._waiting.vain
        return count

    @property
    def leaves_alone(self) -> int:
        """After how many more messages no client is watched for."""
        count: int = self._waiting.soon_vain
        return count

    def add(self, holder: Holder) -> socket.socket | None:
        """Let a client ask by the courier; its end of a socket pair, None where it cannot be."""
        try:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # out of descriptors
            return None
        mine.setblocking(False)
        number = None if mine.fileno() >= _MAX_DESCRIPTORS else self.courier.join(holder)
        if number is None:
            mine.close()
            theirs.close()
            return None
        self._sockets[holder] = mine, number
        self._descriptors[number] = mine.fileno()
        self._take_role(mine.fileno(), number + 1, select.EPOLLIN)
        return theirs

    def remove(self, holder: Holder) -> None:
        """A client asks no more by the courier."""
        if holder not in self._sockets:
            return
        mine, number = self._sockets.pop(holder)
        self.courier.leave(number)
        self.forget(mine.fileno())
        mine.close()

    # --- conveyors --------------------------------------------------------------------------------

    def take_from(self, descriptor: int, number: int) -> bool:
        """Have the taker of that number served."""
        return self._take_role(descriptor, _TAKERS + number, select.EPOLLIN)

    def give_to(self, descriptor: int, number: int) -> bool:
        """Have the giver of that number served: told by edges, since it is only sometimes waited
        for that the socket takes more."""
        events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
        return self._take_role(descriptor, _GIVERS + number, events)

    def push_to(self, descriptor: int, number: int) -> bool:
        """Have the pusher of that number served: told by edges, as a giver is."""
        events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
        return self._take_role(descriptor, _PUSHERS + number, events)

    def take_pushes(self, descriptor: int, number: int) -> bool:
        """Have the receiver of that number served."""
        return self._take_role(descriptor, _RECEIVERS + number, select.EPOLLIN)

    def _take_role(self, descriptor: int, role: int, events: int) -> bool:
        if descriptor >= _MAX_DESCRIPTORS:
            return False
        self._roles[descriptor] = role
        self._selector.watch(descriptor, events)
        return True

    def forget(self, descriptor: int) -> None:
        """Nothing is to be done about this descriptor any more, which is about to be closed."""
        self._roles[descriptor] = 0
        self._selector.watch_no_more(descriptor)

    # --- the wait ---------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Run the courier until something else is ready, or it is time: (descriptor, what epoll
        says of it)."""
        courier, waiting = self.courier, self._waiting
        now = time.monotonic()
        courier.prepare(now)
        self.pushes.prepare()
        self._follow()
        if courier.pool is not self._pool and courier.pool is not None:
            self._pool = courier.pool
            nodes = self._pool.nodes_by_id
            numbers = {node_id: node.index for node_id, node in nodes.items()}
            self.conveyors.follow(numbers)
            self.push_sockets.follow(numbers)
        if now - self._looked > _LOOK_S:
            self._looked = now
            self.conveyors.look(now)
            self.push_sockets.look(now)
        if timeout_s != 0:
            self._open_lane(now)
        timeout_ms = -1
        if timeout_s is not None:
            timeout_ms = math.ceil(timeout_s * 1e3) if timeout_s > 0 else 0
        count = self._wait(self._address, timeout_ms)
        ready = [(event.data, event.events) for event in self._events[:count]]
        now = time.monotonic()
        answered = self._close_lane(now)
        if courier.unbooked:
            courier.book(now)
            answered = True
        if self.pushes.untold:
            self.pushes.book(now)
            answered = True
        if self.conveyors.untold:
            self.conveyors.book(now)
        self.push_sockets.book()
        if answered or courier.uncounted:
            self._count()
        wished = courier.take_wish(now)
        if wished is not None:
            self.connect(wished)
        wished = self.pushes.take_wish(now)
        if wished is not None:
            self.connect_to_push(wished)
        if waiting.stopped:
            self._go_on(waiting.why, waiting.pieces)
        if waiting.attention:
            for holder, (_, number) in list(self._sockets.items()):
                state = courier.state_of(number)
                if state != CLIENT_HERE:
                    self.remove(holder)
                    if state == CLIENT_OFFENDS:
                        courier.counters.offences += 1
                        self.offended(holder)
            self._pump()
        return ready

    def _follow(self) -> None:
        """Have what goes in front of READs as the map and the READs are now."""
        length = self.courier.read_bytes
        if self._leads[:2] != (self._mover.maps, length):
            leads, each = self._mover.leads_of(length)
            self._leads = self._mover.maps, length, leads
            waiting = self._waiting
            waiting.leads = address_of_buffer(leads)
            waiting.lead = each
            waiting.read = self.courier.read_address - each
            waiting.read_length = length + each

    def _before_python(self, why: int) -> bool:
        """Frames are being taken outside of a wait."""
        courier = self.courier
        if not courier.in_flight:
            return False
        now = time.monotonic()
        mine = courier.frames_came(why, now)
        self._send_all(self._address)
        courier.book(now)
        return mine
