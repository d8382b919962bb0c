"""What leaves a node over its links to other nodes, or comes by them: whose blocks' bytes are next.

Owns: the pace of the bytes of gets' answers and of puts, on all connections together, while several
namespaces have some to move the same way; and whose turn it is, by weight (`fair_queue.Shares`).
Must not know: sockets, requests, or what a block is.

What waits in the kernel or in the network has no weight any more: there the link is shared by
connection, and a tenant that loads a model from many nodes has many. So while several namespaces
have something to send, bytes leave a little slower than the link carries them, and wait here. A
namespace that has taken less than its share sends what it has saved at once, and the others wait
until the link has carried it. One namespace alone is not held back, and nothing is where the link's
rate is not known. Blocks that go by READs are not held back here either. What they take of the link
is not given to others, except that a quarter of the link is left to these in any case.

Of those who wait, the next is woken by a timer, when the link will have carried enough. The others
ask again now and then. A connection that does not ask, since it takes nothing, is not waited for.

What comes is shared by the same rules, with *send* read as *receive*. What is not read here waits
for the most part in the node that sends it, since TCP lets it send no more than there is room for.
But each connection that was read lately has such room, and its sender fills it on the link. So the
connections of one namespace are read one after the other, and none of the others' while something
that a namespace has saved is on its way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from math import inf
from typing import Final, NamedTuple

from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.fair_queue import Shares

PACE: Final = 0.9
"""Of the link's rate: headers take some of it, and nothing is to wait in the network."""
LEFT: Final = 0.25
"""Of the pace, that READs leave to others."""
LEAST_TURN_BYTES: Final = 4 << 10
TURN_S: Final = 0.001
"""A connection's turn is what the link carries in so long, or `LEAST_TURN_BYTES`. What goes out in
a turn stands before whatever a namespace sends that has saved its share."""
TURNS_AT_ONCE: Final = 3
"""After a pause so many turns may go out: timers come late, and what a link does not carry
meanwhile is lost."""
LEAST_WAIT_S: Final = 0.001
MOST_WAIT_S: Final = 0.05
"""Who waits asks again no sooner, and no later."""
CREDIT_S: Final = 0.5
"""A namespace that has taken less than its share goes first for as much as the link carries in so
long."""
LATELY_S: Final = 5.0
"""A namespace of which nothing was sent, and nothing asked for, for so long is not there."""
ABSENT_S: Final = 0.1
"""Who has not asked again for so long is not waited for."""
TIGHT_TURNS: Final = 8
"""Turns that have gone out before the link can have carried them, from which on it is `tight`."""
PATIENCE: Final = 1.5
"""What was taken ahead is waited for so many times as long as the link needs for it."""
SPELL_BYTES: Final = 1 << 20
"""Of one namespace's connections that bring blocks, one goes on for so much before others do."""
_READS_PERIOD_S: Final = 0.05
"""What READs take of the link is measured over so long."""
MAX_NAMESPACES: Final = 1024
"""That are remembered as being there."""


class _Waiting(NamedTuple):
    namespace: int
    asked_at: float
    begun_at: float
    wake: Callable[[], None]


def _nobody() -> None:
    pass


class Turn:
    """One connection's side of it. `woken` is called when it may go on, or had better ask."""

    __slots__ = (
        *("_begun_at", "_departures", "_spell_bytes", "_taken_bytes", "_woken"),
        *("ahead_bytes", "until"),
    )

    def __init__(self, departures: Departures, woken: Callable[[], None]) -> None:
        self._departures = departures
        self._woken = woken
        self.until: float | None = None
        """Until when it waits; None: it does not."""
        self.ahead_bytes = sys.maxsize
        """How much had better be on its way: a turn, where it has to wait for that."""
        self._taken_bytes = 0
        """Of what is to come, so much was taken ahead."""
        self._begun_at = inf
        """When its spell began, if there are spells,"""
        self._spell_bytes = 0
        """of which so much has gone."""

    def begin(self, now: float, namespace: int, size_bytes: int) -> None:
        """So many bytes are about to come. What the namespace has saved of its share, it takes
        now: the others are to wait while they are on their way, and not when they are here. Of one
        namespace's connections, the one goes first whose spell began first: the others stand still,
        so that not much is on the link when another namespace needs it."""
        self._begun_at, self._spell_bytes = now, 0
        self._taken_bytes += self._departures.take_ahead(now, namespace, size_bytes)

    def allowed(self, now: float, namespace: int) -> int:
        """How many bytes may go now; where none may, it waits."""
        if self._taken_bytes:
            self.ahead_bytes = sys.maxsize
            return self._taken_bytes
        allowed = self._departures.may_send(now, namespace, self, self._wake, self._begun_at)
        self.until = None if allowed else self._departures.ready_at(now, self)
        turn_bytes = self._departures.turn_bytes
        self.ahead_bytes = sys.maxsize if allowed > turn_bytes else turn_bytes
        return allowed

    def _wake(self) -> None:
        self.until = None
        self._woken()

    def moved(self, now: float, namespace: int, size_bytes: int) -> None:
        """So many bytes have gone."""
        self._spell_bytes += size_bytes
        if self._spell_bytes >= SPELL_BYTES and self._begun_at < inf:
            self._begun_at, self._spell_bytes = now, 0
        taken_bytes = min(self._taken_bytes, size_bytes)
        if taken_bytes:
            self._taken_bytes -= taken_bytes
            self._departures.came(taken_bytes)
        if size_bytes > taken_bytes:
            self._departures.sent(now, namespace, size_bytes - taken_bytes)

    def due(self, now: float) -> None:
        """Time has passed."""
        if self.until is not None and now >= self.until:
            self.until = None

    def leave(self) -> bool:
        """The connection is over; whether it waited, or was waited for. Then `pass_on` is to
        follow, when nothing is left half done: who is woken by that goes on at once."""
        taken_bytes, self._taken_bytes = self._taken_bytes, 0
        self._woken = _nobody  # else the connection and this would know each other for ever
        return self._departures.leave(self, taken_bytes)

    def pass_on(self) -> None:
        """Let others have the turn."""
        self._departures.pass_on()


def earliest(*times: float | None) -> float | None:
    """Of the times that there are."""
    return min((when for when in times if when is not None), default=None)


class Departures:
    """See the module's text. Times are seconds on one monotonic clock of the caller's. `rate`:
    what the link carries, in bytes a second; 0 = not known."""

    def __init__(
        self,
        rate_bytes_per_s: float,
        weight_of: Callable[[int], float] = lambda _namespace: 1.0,
    ) -> None:
        self._pace = PACE * rate_bytes_per_s
        self.turn_bytes = max(LEAST_TURN_BYTES, int(TURN_S * self._pace))
        self._rate = self._pace  # less what READs take
        self._ready_bytes = 0.0  # may go out at `_counted_at`; below 0: the link has yet to carry
        self._counted_at = -inf
        self._tight_at = -inf
        self._shares = Shares(CREDIT_S * self._pace, weight_of)
        self._there: BoundedMap[int, float] = BoundedMap(MAX_NAMESPACES)
        """By namespace, when it was sent or wanted something last; the longest ago is first."""
        self._waiting: dict[Hashable, _Waiting] = {}
        """Who waits; within a namespace, in turn."""
        self._coming_bytes = 0
        """Of what was taken ahead, so much is still on its way,"""
        self._coming_until = -inf
        """and is waited for so long."""
        self._told: Hashable = None
        """Who asked last when its turn was next, and knows when that will be."""
        self._passing = False
        self._sends = 0
        self._read_bytes = 0.0  # in this period
        self._period_ends = -inf
        self.was_sent: Callable[[int], None] = lambda _size_bytes: None
        """Told how many bytes have gone out."""
        self.waits_total = 0
        """Times that somebody was told to wait."""

    def may_send(
        self,
        now: float,
        namespace: int,
        who: Hashable,
        wake: Callable[[], None] = lambda: None,
        begun_at: float = inf,
    ) -> int:
        """How many bytes of blocks of a namespace may go out now on the connection `who`. Where
        none may, it waits, and is to ask again at `ready_at`, or when it is woken. Within a
        namespace, who has `begun_at` the earliest time is next, or who waits longest."""
        if self._pace <= 0:
            return sys.maxsize
        self._there[namespace] = now
        if not self._others_are_there(now, namespace):
            self._waiting.pop(who, None)
            return sys.maxsize
        self._adapt(now)
        asked_before = self._waiting.get(who)
        if asked_before is None or asked_before.namespace != namespace:
            self._waiting.pop(who, None)
        self._waiting[who] = _Waiting(namespace, now, begun_at, wake)
        for other, waiting in list(self._waiting.items()):
            if waiting.asked_at < now - ABSENT_S:
                del self._waiting[other]
        saved_bytes = int(self._shares.saved(namespace))
        if saved_bytes > self.turn_bytes and self._ready_bytes > -CREDIT_S * self._pace:
            del self._waiting[who]
            return saved_bytes
        is_next = self._next() == who
        if self._ready_bytes >= self.turn_bytes and is_next and not self._is_coming(now):
            del self._waiting[who]
            return self.turn_bytes
        if is_next:
            self._told = who
        self.waits_total += 1
        return 0

    def take_ahead(self, now: float, namespace: int, size_bytes: int) -> int:
        """Of so many bytes that are about to go, how many count as gone already: what the namespace
        has saved, where that is more than a turn."""
        if self._pace <= 0:
            return 0
        self._there[namespace] = now
        if not self._others_are_there(now, namespace):
            return 0
        self._adapt(now)
        saved_bytes = int(self._shares.saved(namespace))
        if saved_bytes <= self.turn_bytes or self._ready_bytes <= -CREDIT_S * self._pace:
            return 0
        taken_bytes = min(saved_bytes, size_bytes)
        since = max(self._coming_until, now) if self._coming_bytes else now
        self._coming_until = since + PATIENCE * taken_bytes / self._rate
        self._coming_bytes += taken_bytes
        self.sent(now, namespace, taken_bytes)
        return taken_bytes

    def came(self, size_bytes: int) -> None:
        """So much of what was taken ahead has come, or will not."""
        self._coming_bytes -= size_bytes
        if self._coming_bytes < self.turn_bytes <= self._coming_bytes + size_bytes:
            self._told = None  # it was told to wait for that
            self.pass_on()

    def _is_coming(self, now: float) -> bool:
        """Whether the link is full of what was taken ahead: what others let come now would be on it
        together with that, and make a queue."""
        return self._coming_bytes >= self.turn_bytes and now < self._coming_until

    def ready_at(self, now: float, who: Hashable) -> float:
        """When who waits is to ask again, unless it is woken."""
        if who != self._told:
            return now + MOST_WAIT_S
        wait_s = (self.turn_bytes - self._ready_bytes) / self._rate
        if self._is_coming(now):
            wait_s = max(wait_s, self._coming_until - now)
        return now + min(max(LEAST_WAIT_S, wait_s), MOST_WAIT_S)

    def sent(self, now: float, namespace: int, size_bytes: int) -> None:
        """So many bytes have gone out."""
        self.was_sent(size_bytes)
        if self._pace > 0:
            self._there[namespace] = now
            self._count(now)
            if self._others_are_there(now, namespace):
                most_bytes = 2 * CREDIT_S * self._pace
                self._ready_bytes = max(self._ready_bytes - size_bytes, -most_bytes)
                if self._ready_bytes < -TIGHT_TURNS * self.turn_bytes:
                    self._tight_at = now
            self._shares.took(namespace, size_bytes)
            self._sends += 1
            self.pass_on()

    def sent_by_reads(self, now: float, namespace: int, size_bytes: int) -> None:
        """So many bytes have gone out another way."""
        if self._pace > 0:
            self._there[namespace] = now
            self._read_bytes += size_bytes

    def is_tight(self, now: float) -> bool:
        """Whether namespaces compete for the link, or did lately: whatever asks nobody before it
        sends had better not."""
        return now - self._tight_at < LATELY_S

    def leave(self, who: Hashable, coming_bytes: int = 0) -> bool:
        """This connection waits no more, and what it has taken ahead does not come; whether there
        was either. Then `pass_on` is to follow."""
        self._coming_bytes -= coming_bytes
        if coming_bytes:
            self._told = None
        return self._waiting.pop(who, None) is not None or coming_bytes > 0

    def _others_are_there(self, now: float, namespace: int) -> bool:
        there = self._there
        while (first := next(iter(there))) != namespace and there[first] < now - LATELY_S:
            del there[first]
        return len(there) > 1

    def _next(self) -> Hashable:
        """Whose turn it is, of all that wait."""
        namespaces = {waiting.namespace for waiting in self._waiting.values()}
        namespace = self._shares.next_of(namespaces)
        mine = [who for who, one in self._waiting.items() if one.namespace == namespace]
        return min(mine, key=lambda who: self._waiting[who].begun_at)

    def pass_on(self) -> None:
        """Wake whose turn is next, be it there or not: who is woken asks. Who may send then comes
        by here again."""
        if self._passing:
            return
        self._passing = True
        try:
            while self._waiting:
                who, sends = self._next(), self._sends
                if self._ready_bytes < self.turn_bytes and who == self._told:
                    break
                self._waiting[who].wake()
                if self._sends == sends:
                    break
        finally:
            self._passing = False

    def _count(self, now: float) -> None:
        """What the link has carried since it was counted last may go out anew."""
        if now > self._counted_at:
            carried = self._rate * min(now - self._counted_at, 1.0)
            self._ready_bytes = min(self._ready_bytes + carried, TURNS_AT_ONCE * self.turn_bytes)
            self._counted_at = now

    def _adapt(self, now: float) -> None:
        """Leave to READs what they have taken of late."""
        self._count(now)
        if now < self._period_ends:
            return
        took_s = min(now - self._period_ends + _READS_PERIOD_S, 1.0)
        self._rate = max(LEFT * self._pace, self._pace - self._read_bytes / took_s)
        self._read_bytes = 0.0
        self._period_ends = now + _READS_PERIOD_S
