"""Simulated TCP: streams of bytes between processes, and what drives a link's core over one.

Owns: when bytes arrive and in what pieces, connects that hang or are refused, windows, cuts and
resets. Must not know: what is said; the cores of `kvcast.protocol.links`, which are the product's
own, do.

Bytes arrive whole and in order, cut at any place and read together or apart, late while the stream
is blocked; what one end does not read stops the other. A stream that is blocked for
`STREAM_GIVES_UP_S` is broken, and both ends learn of it. When a process dies its kernel says so;
when a machine dies nobody does, and the other end learns of it when it next says something.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvcast.protocol.links.stream import LinkStream
from kvcast.simulation.world import Alarm, World

STREAM_DELAY_S: Final = 150e-6
RATES_BYTES_PER_S: Final = (800e6, 20e6, 2e6)
"""How fast bytes travel in a run, one of these: at the last a block takes long enough for things to
happen meanwhile."""
STREAM_GIVES_UP_S: Final = 2.0
"""A stream that was blocked for so long is broken, like a TCP connection whose keep-alives go
unanswered."""
WINDOW_BYTES: Final = 32 * 1024
"""What may be in flight or unread in one direction; beyond, the sender waits."""
PIECE_BYTES: Final = 16 * 1024
CUT_CHANCE: Final = 0.1
"""How often what was written at once arrives in two pieces."""
LATE_CHANCE: Final = 0.1
LATE_S: Final = 1e-3
"""How often, and how long, what has arrived waits until it is read, with what comes meanwhile."""

Listen = Callable[["StreamEnd"], bool]
"""Take a connection that has come; False if nobody listens."""


class StreamEnd:
    """One end of a stream. `driver` takes its events."""

    driver: StreamDriver | None = None

    def __init__(self, stream: Stream, side: int) -> None:
        self.inbox = bytearray()
        """What has arrived and was not read."""
        self.stream = stream
        self._side = side
        self._under_way_bytes = 0

    @property
    def takes_more(self) -> bool:
        return self._under_way_bytes < WINDOW_BYTES

    def write(self, data: bytes, *, of_block: bool) -> None:
        """Send bytes; on a broken stream they are lost."""
        stream = self.stream
        self._under_way_bytes += len(data)
        if of_block and stream.spoil is not None:
            data = stream.spoil(data)
        cut = stream.rng.randrange(len(data)) if stream.rng.random() < CUT_CHANCE else 0
        for piece in (data[:cut], data[cut:]) if cut else (data,):
            stream.carry(1 - self._side, piece)

    def read(self, at_most: int) -> bytes:
        """Take what has arrived; the other end may send as much again."""
        data = bytes(self.inbox[:at_most])
        del self.inbox[:at_most]
        self.stream.later(1 - self._side, lambda other: other.acknowledged(len(data)))
        return data

    def acknowledged(self, size_bytes: int) -> None:
        was_full = not self.takes_more
        self._under_way_bytes -= size_bytes
        if was_full and self.takes_more and self.driver is not None:
            self.driver.moved()

    def close(self) -> None:
        """The other end learns of it after what was sent."""
        self.stream.later(1 - self._side, lambda _other: self.stream.end(1 - self._side))

    def gone(self, why: str) -> None:
        if self.driver is not None:
            self.driver.gone(why)


class Stream:
    """A connection between two processes, from the moment at which the first wants it."""

    def __init__(self, world: World, name: str) -> None:
        self.ends = (StreamEnd(self, 0), StreamEnd(self, 1))
        self.open = True
        self.rng: random.Random = world.stream(name)
        self.spoil: Callable[[bytes], bytes] | None = None
        """What a fault makes of a block's bytes on their way."""
        self._world = world
        self._blocked_since: float | None = None
        self._queues: tuple[deque[Callable[[StreamEnd], None]], ...] = (deque(), deque())
        """By end: what is to happen there, in order."""
        self._overdue = [0, 0]
        """By end: how much of it should have happened while the stream was blocked."""
        self._busy_until = [0.0, 0.0]
        self._bytes_per_s: float = world.stream("streams").choice(RATES_BYTES_PER_S)
        self._vanished: int | None = None
        """The end whose machine is gone."""

    def connect(self, listen: Listen) -> StreamEnd:
        """Begin to connect; the end of whoever does."""

        def arrives(end: StreamEnd) -> None:
            if listen(end):
                self.later(0, _connected)
            else:
                self.later(0, lambda _end: self.end(0, "connection refused"))

        self.later(1, arrives)
        return self.ends[0]

    def carry(self, to: int, data: bytes) -> None:
        self.later(to, lambda end: self._arrived(end, data), len(data) / self._bytes_per_s)

    def _arrived(self, end: StreamEnd, data: bytes) -> None:
        end.inbox += data
        if end.driver is not None:
            late = self.rng.random() < LATE_CHANCE
            self._world.after(LATE_S if late else 0.0, end.driver.moved)

    def later(self, to: int, action: Callable[[StreamEnd], None], takes_s: float = 0.0) -> None:
        """Let it happen at that end, after what is on its way there."""
        if not self.open or to == self._vanished:
            if self._vanished is not None:
                self._world.after(STREAM_DELAY_S, lambda: self.end(1 - to, "connection reset"))
            return
        world = self._world
        self._busy_until[to] = max(world.now, self._busy_until[to]) + takes_s
        self._queues[to].append(action)
        world.at(self._busy_until[to] + STREAM_DELAY_S, lambda: self._due(to))

    def _due(self, to: int) -> None:
        if not self.open:
            return
        if self._blocked_since is not None:
            self._overdue[to] += 1
        else:
            self._queues[to].popleft()(self.ends[to])

    def end(self, told: int, why: str = "") -> None:
        """Nothing more will come to that end, and the other does not listen any more."""
        if self.open:
            self.open = False
            self.ends[told].gone(why)

    def reset(self, by: int, *, machine: bool = False) -> None:
        """The process at that end is gone, or the whole machine."""
        if machine:
            self._vanished = by
        else:
            self.later(1 - by, lambda _end: self.end(1 - by, "connection reset"))

    def break_off(self) -> None:
        """Both ends learn that it is over; what was on its way is lost."""
        if self.open:
            self.open = False
            for end in self.ends:
                self._world.after(STREAM_DELAY_S, lambda end=end: end.gone("connection reset"))  # type: ignore[misc]

    def block(self) -> None:
        """Nothing arrives until `unblock`; after `STREAM_GIVES_UP_S` the stream is broken."""
        if self._blocked_since is None:
            since = self._blocked_since = self._world.now
            self._world.after(STREAM_GIVES_UP_S, lambda: self._give_up(since))

    def unblock(self) -> None:
        self._blocked_since = None
        for to in (0, 1):
            for _ in range(self._overdue[to]):
                self._world.after(STREAM_DELAY_S, lambda to=to: self._due(to))  # type: ignore[misc]
            self._overdue[to] = 0

    def _give_up(self, since: float) -> None:
        if self.open and self._blocked_since == since:
            self.open = False
            for end in self.ends:
                end.gone("no answer")


def _connected(end: StreamEnd) -> None:
    if end.driver is not None:
        end.driver.connected()


class Process:
    """What a process lends to those that drive its connections: here one that always runs, and has
    the world's clock."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def now(self) -> float:
        """The present time by its clock."""
        return self._world.now

    def world_time(self, when: float) -> float:
        """When its clock will show `when`."""
        return when

    def when_running(self, action: Callable[[], None]) -> None:
        """Do it while the process lives and does not stand still; never, if it is dead."""
        action()


def _nothing() -> None:
    pass


class StreamDriver:
    """Drives one connection's core over one end of a stream, as the daemons' `LinkDriver` does over
    a socket. `opened`: the connection stands; `changed` is called after every event of the core,
    `over` once, when the connection is."""

    def __init__(
        self,
        world: World,
        process: Process,
        end: StreamEnd,
        link: LinkStream[Any],
        *,
        changed: Callable[[], None] = _nothing,
        opened: Callable[[], None] = _nothing,
        over: Callable[[], None] = _nothing,
    ) -> None:
        self.end = end
        self.link = link
        self._world = world
        self._process = process
        self._opened = opened
        self._changed = changed
        self._over = over
        self._connected = False
        self._hung_up = False
        self._detached = False
        self._alarm = Alarm(world, lambda: process.when_running(self._wake))
        end.driver = self
        link.wake = lambda: process.when_running(self.flush)

    # --- the stream's events ------------------------------------------------------------------

    def connected(self) -> None:
        def stands() -> None:
            self._connected = True
            self._opened()
            self.flush()

        self._process.when_running(stands)

    def moved(self) -> None:
        """Bytes have come, or there is room for more."""
        self._process.when_running(self.flush)

    def gone(self, why: str) -> None:
        def lost() -> None:
            self._read()
            self.link.lost(self._process.now, why)
            self.flush()

        self._process.when_running(lost)

    # --- what else happens --------------------------------------------------------------------

    def accept(self) -> None:
        """The connection was made to us."""
        self._connected = True
        self.flush()

    def detach(self) -> StreamEnd:
        """The connection is somebody else's from now on; its core is to be closed."""
        self._hung_up = self._detached = True
        return self.end

    def flush(self) -> None:
        """Do what the core wants: to be called after whatever else it was told."""
        if self._detached:
            return
        self._read()
        self._write()
        self.link.check()
        if not self.link.closed:
            self._set_timer()
        elif not self._hung_up:
            self._hung_up = True
            self.end.close()
            self._world.after(0.0, lambda: self._process.when_running(self._over))
        self._changed()

    def _read(self) -> None:
        link, inbox = self.link, self.end.inbox
        while inbox and link.wants_bytes:
            rooms = link.destinations()
            if not rooms:
                link.received(self._process.now, self.end.read(PIECE_BYTES))
            else:
                allowed = link.receivable_bytes(self._process.now)
                if not allowed:
                    break
                data = left = self.end.read(min(sum(map(len, rooms)), allowed))
                for room in rooms:
                    part = min(len(room), len(left))
                    room[:part] = left[:part]
                    left = left[part:]
                link.filled(self._process.now, len(data))
            self._write()

    def _write(self) -> None:
        link = self.link
        while self._connected and self.end.takes_more:
            of_block = link.sending_block
            data = link.bytes_to_send(self._process.now, PIECE_BYTES)
            if not data:
                break
            self.end.write(data, of_block=of_block)

    def _set_timer(self) -> None:
        when = self.link.get_timer()
        if when is not None:
            self._alarm.set(max(self._process.world_time(when), self._world.now) + 1e-7)

    def _wake(self) -> None:
        self.link.handle_timer(self._process.now)
        self.flush()
