"""What stands on a link before a quiet tenant's put while another puts all it can, in virtual time.

Oracle: a link that carries so many bytes a second in the order in which they come, and senders that
send at once whatever they may. The home's cores and the windows of its connections are the
product's. Cannot see: kernels (a socket may take more than its window), losses, and processors that
are busy; `python -m kvcast.bench.tenants` does.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest
from kvcast.hostagent.core.metrics import Metrics
from kvcast.protocol.links.bulk import BulkOptions
from kvcast.protocol.links.bulk_callee import BulkCallee
from kvcast.protocol.links.departures import PACE, Departures
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    MAX_BULK_MESSAGE_BYTES,
    BulkHello,
    BulkPut,
    CallerMessage,
    PutHeader,
)
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.service.link_driver import MOST_WINDOW_BYTES, WIDE_WINDOW_BYTES, window_in_turns
from kvcast.simulation.world import World

RATE = 6.25e6
"""What the link carries, in bytes a second."""
BLOCK_BYTES = 256 << 10
SEGMENT_BYTES, HEADERS_BYTES = 1448, 66
ONE_WAY_S = 1e-4
LATE_S = 3e-4
"""Timers are late by up to so much."""
PAUSE_S = 0.15
"""Of the quiet tenant, between a put and the next; of the loud one, a hundredth of it."""
FIRST_WINDOW_BYTES = 64 << 10
"""What the other end of a new connection may send."""
LOUD, QUIET = 1, 2


class Service:
    """Takes every block."""

    def refuse_put(self, _caller: str, _put: BulkPut) -> None:
        return None

    def begin_put(self, _put: BulkPut, block: PutHeader) -> bytearray:
        return bytearray(block.size_bytes)

    def view(self, room: bytearray) -> memoryview:
        return memoryview(room)

    def end_put(self, _put: BulkPut, _block: PutHeader, _room: bytearray, _digest: int) -> str:
        return bulk.DONE


class Link(World):
    """The home's link, and what comes by it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.rng = random.Random(1)
        self.arrivals = Departures(RATE)
        self.keys = count(1)
        self.entered: Counter[int] = Counter()
        self.carried: Counter[int] = Counter()
        """Bytes by namespace."""
        self._free_at = 0.0

    def carry(self, namespace: int, size_bytes: int, came: Callable[[], None]) -> None:
        self._free_at = max(self.now, self._free_at) + (size_bytes + HEADERS_BYTES) / RATE
        self.entered[namespace] += size_bytes

        def comes() -> None:
            self.carried[namespace] += size_bytes
            came()

        self.at(self._free_at + ONE_WAY_S, comes)


class Connection:
    """Both ends of one: who puts sends what the window lets it, and the home reads as a driver
    does."""

    def __init__(self, link: Link, namespace: int) -> None:
        self._link = link
        self._namespace = namespace
        metrics, options = Metrics(), BulkOptions()
        arrivals = link.arrivals
        self._home: BulkCallee[Any] = BulkCallee(
            *(0.0, cast(Any, Service()), options, metrics), arrivals=arrivals
        )
        self._home.wake = self._flush
        self._codec = MessageCodec[CallerMessage](
            CallerMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES
        )
        self._out: deque[memoryview] = deque()
        self._sent = 0
        self._may_send = FIRST_WINDOW_BYTES
        """So many bytes since the beginning: what was promised is not taken back."""
        self._unread = bytearray()
        self._read = 0
        self._window_bytes = MOST_WINDOW_BYTES
        self._reads_again = False
        self._timer: float | None = None
        self._then: Callable[[], None] = lambda: None
        self._send(self._codec.encode(BulkHello(BULK_PROTOCOL_VERSION, "node-2")))

    def put(self, then: Callable[[], None]) -> None:
        """Put one block, and go on when it was taken."""
        self._then = then
        header = PutHeader(next(self._link.keys).to_bytes(16, "big"), BLOCK_BYTES, 1)
        self._send(self._codec.encode(BulkPut(self._namespace, 3, 9, [header], True)))
        self._send(bytes(BLOCK_BYTES))

    def _send(self, data: bytes) -> None:
        self._out.append(memoryview(data))
        self._go_on_sending()

    def _go_on_sending(self) -> None:
        while self._out and self._sent < self._may_send:
            piece = self._out[0][:SEGMENT_BYTES]
            if self._sent + len(piece) > self._may_send:
                return  # as kernels do, against silly windows
            rest = self._out.popleft()[len(piece) :]
            if rest:
                self._out.appendleft(rest)
            self._sent += len(piece)
            self._link.carry(self._namespace, len(piece), lambda piece=piece: self._come(piece))  # type: ignore[misc]

    def _come(self, piece: memoryview) -> None:
        self._unread += piece
        self._flush()

    def _take(self, size_bytes: int) -> bytes:
        data = bytes(self._unread[:size_bytes])
        del self._unread[:size_bytes]
        self._read += len(data)
        return data

    def _flush(self) -> None:
        home, link = self._home, self._link
        limited = False
        while self._unread and home.wants_bytes and not limited:
            if not home.rooms:
                home.received(link.now, self._take(4096))
                continue
            allowed = home.receivable_bytes(link.now)
            self._window_bytes = home.window_bytes
            if not allowed:
                break
            limited = allowed < sys.maxsize
            size = min(allowed, len(self._unread), home.least_bytes)
            self._take(size)
            home.filled(link.now, size, [1])
        if limited and self._unread and home.wants_bytes and not self._reads_again:
            self._reads_again = True
            link.at(link.now + 5e-5, self._read_again)
        narrow = window_in_turns(self._window_bytes, SEGMENT_BYTES)
        window = narrow if self._window_bytes < MOST_WINDOW_BYTES else FIRST_WINDOW_BYTES
        if self._namespace == QUIET and window == FIRST_WINDOW_BYTES:
            window = WIDE_WINDOW_BYTES
        if self._read + window > self._may_send:
            self._may_send = self._read + window
            link.at(link.now + ONE_WAY_S, self._go_on_sending)
        if home.bytes_to_send(link.now, 1 << 20):
            link.at(link.now + ONE_WAY_S, self._then)
        when = home.get_timer()
        if when is not None and (self._timer is None or when < self._timer):
            self._timer = when
            late_s = LATE_S * link.rng.random()
            link.at(max(when, link.now) + late_s, lambda: self._due(when))

    def _read_again(self) -> None:
        self._reads_again = False
        self._flush()

    def _due(self, when: float) -> None:
        if self._timer == when:
            self._timer = None
        self._home.handle_timer(self._link.now)
        self._flush()


class Quiet:
    """Puts a block now and then."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._connection = Connection(link, QUIET)
        self.took_s: list[float] = []
        self.before_bytes: list[int] = []
        """By put, what the link carried of others' from when it began until it was taken."""
        self._put()

    def _put(self) -> None:
        link = self._link
        begun_at, carried_bytes = link.now, link.carried[LOUD]

        def done() -> None:
            self.took_s.append(link.now - begun_at)
            self.before_bytes.append(link.carried[LOUD] - carried_bytes)
            link.at(link.now + PAUSE_S * link.rng.uniform(0.8, 1.2), self._put)

        self._connection.put(done)


def loud(link: Link) -> None:
    """Puts one block after the other on a connection."""
    connection = Connection(link, LOUD)

    def put() -> None:
        connection.put(lambda: link.at(link.now + PAUSE_S / 100 * link.rng.random(), put))

    put()


@pytest.mark.parametrize("connections", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_before_a_quiet_tenants_put_stands_what_the_link_carries_in_three_milliseconds(
    connections: int,
) -> None:
    link = Link()
    quiet = Quiet(link)
    link.run(3.0)
    alone_s = max(quiet.took_s[1:])
    for _ in range(connections):
        loud(link)
    link.run(5.0)  # what new connections may send before anybody has read it, has come
    quiet.took_s.clear()
    quiet.before_bytes.clear()
    before_bytes = link.carried[LOUD]
    seconds = 8.0
    link.run(5.0 + seconds)
    assert len(quiet.took_s) > 35
    assert max(quiet.before_bytes) <= 0.003 * RATE
    assert max(quiet.took_s) < 1.08 * alone_s
    left = PACE * RATE * seconds - len(quiet.took_s) * BLOCK_BYTES
    assert link.carried[LOUD] - before_bytes > 0.9 * left, "what it leaves is the loud one's"
