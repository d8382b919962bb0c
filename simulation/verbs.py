"""Simulated RDMA cards: queue pairs and memory windows between simulated hosts.

Owns: what moves when, and what a card's faults are. Must not know: what is said over the links, or
what the memory is for. It is a simulation of `kvcast.protocol.links.rdma.Verbs`, with what the
agent relies on in real cards: work of one pair ends in order; a window is for one pair, one range
and one kind of access; what the other half does not allow breaks the pair; an other half that is
gone answers nothing. It moves bytes in pieces, at different times, straight between the hosts'
memories, whatever the processes do meanwhile, so that memory which is used too early shows wrong
bytes.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvcast.protocol.links.rdma import (
    CloseWindow,
    Completed,
    OpenWindow,
    RdmaOptions,
    Read,
    VerbsError,
    Work,
    Write,
)
from kvcast.protocol.messages.rdma import Endpoint
from kvcast.simulation.world import World

DELAY_S: Final = 20e-6
RATES_BYTES_PER_S: Final = (2e9, 20e6, 1e6)
"""How fast bytes move in a run, one of these."""
PIECES: Final = 4
"""In so many pieces, one after the other."""
MAX_TRANSFER_BYTES: Final = 8192
LATE_S: Final = 0.4


@dataclass
class CardFaults:
    """What is wrong with one card just now; chances are of each piece of work."""

    gone: bool = False
    """It makes no pairs, and all that it had do nothing more."""
    no_windows: float = 0.0
    """Windows cannot be opened."""
    lost_windows: float = 0.0
    """A window is forgotten while the other side uses it."""
    errors: float = 0.0
    """A pair breaks."""
    late: float = 0.0
    """Something takes `LATE_S` more."""
    flips: float = 0.0
    """A bit of a piece flips on its way, unseen."""
    strays: float = 0.0
    """A WRITE for whoever waits (`zones`) comes late, or once more later."""


class Fabric:
    """All pairs of a run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.stream("rdma")
        self.rate_bytes_per_s = self.rng.choice(RATES_BYTES_PER_S)
        self.pairs: dict[int, SimulatedPair] = {}
        self._next = 1

    def number(self) -> int:
        """Of a new pair, or the key of a new window."""
        self._next += 1
        return self._next


class SimulatedCard:
    """One host's card, as a process of it has it. `deliver` runs what concerns the process when
    that runs, if it still lives."""

    def __init__(
        self,
        fabric: Fabric,
        memory: memoryview,
        options: RdmaOptions,
        deliver: Callable[[Callable[[], None]], None],
    ) -> None:
        self.fabric = fabric
        self.memory = memory
        self.faults = CardFaults()
        self.deliver = deliver
        self.pairs: list[SimulatedPair] = []
        self._base = _address_of(memory)
        self._options = options

    @property
    def max_transfer_bytes(self) -> int:
        return MAX_TRANSFER_BYTES

    def make_pair(self, completed: Callable[[list[Completed]], None]) -> SimulatedPair:
        if self.faults.gone or len(self.pairs) >= self._options.max_pairs:
            raise VerbsError("no queue pair is left")
        pair = SimulatedPair(self, completed)
        self.pairs.append(pair)
        return pair

    def offset_of(self, view: memoryview) -> int:
        """Where in the memory that lies."""
        return _address_of(view) - self._base

    def go(self) -> None:
        """The card is pulled out: every pair is silent from now on."""
        self.faults.gone = True
        for pair in list(self.pairs):
            self.fabric.pairs.pop(pair.number, None)

    def die(self) -> None:
        """The process is gone, and its pairs with it."""
        for pair in list(self.pairs):
            pair.close()


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@dataclass
class _Window:
    start: int
    end: int
    writable: bool


class SimulatedPair:
    """One half (`kvcast.protocol.links.rdma.Pair`)."""

    def __init__(self, card: SimulatedCard, completed: Callable[[list[Completed]], None]) -> None:
        self.card = card
        self.number = card.fabric.number()
        self.windows: dict[int, _Window] = {}
        self.remote = 0
        self._completed = completed
        self._keys: dict[int, int] = {}
        """Of windows, by the token of their order."""
        self._queue: deque[Work] = deque()
        self._busy = False
        self.closed = False
        self.broken = False
        card.fabric.pairs[self.number] = self

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(bytes(16), self.number, self.number & 0xFFFF, 4096, 16)

    def join(self, remote: Endpoint) -> None:
        self.remote = remote.queue_pair

    def post(self, work: Sequence[Work]) -> None:
        if self.card.faults.gone:
            raise VerbsError("the card is gone")
        self._queue.extend(work)
        self._next()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.windows.clear()
            self._queue.clear()
            self.card.pairs.remove(self)
            self.card.fabric.pairs.pop(self.number, None)

    # --- work, one piece after the other --------------------------------------------------------

    def _next(self) -> None:
        if self._busy or not self._queue or self.closed:
            return
        self._busy = True
        fabric, faults = self.card.fabric, self.card.faults
        delay_s = DELAY_S
        if fabric.rng.random() < faults.late:
            fabric.world.counts["fault.rdma_late"] += 1
            delay_s += LATE_S
        fabric.world.after(delay_s, self._begin)

    def _begin(self) -> None:
        if self.closed or self.card.faults.gone:
            return
        work = self._queue.popleft()
        fabric, faults = self.card.fabric, self.card.faults
        if self.broken:
            self._done(Completed(work.token, "flushed"))
        elif fabric.rng.random() < faults.errors:
            fabric.world.counts["fault.rdma_errors"] += 1
            self._break(work.token, "the queue pair is in error")
        elif isinstance(work, OpenWindow):
            self._open(work)
        elif isinstance(work, CloseWindow):
            self.windows.pop(self._keys.pop(work.window), None)
            self._done(Completed(work.token))
        else:
            self._move(work, 0)

    def _open(self, work: OpenWindow) -> None:
        fabric = self.card.fabric
        if fabric.rng.random() < self.card.faults.no_windows:
            fabric.world.counts["fault.rdma_no_windows"] += 1
            self._break(work.token, "no memory window is left")
            return
        key = self._keys[work.token] = fabric.number()
        start = self.card.offset_of(work.memory)
        self.windows[key] = _Window(start, start + len(work.memory), work.writable)
        self._done(Completed(work.token, "", start, key))

    def _move(self, work: Read | Write, piece: int) -> None:
        """One piece of a READ or a WRITE, and then the next."""
        if self.closed or self.card.faults.gone:
            return
        fabric = self.card.fabric
        other = fabric.pairs.get(self.remote)
        if other is None or other.remote != self.number or other.card.faults.gone:
            return  # nobody answers
        room = work.room if isinstance(work, Read) else work.data
        rng, faults = fabric.rng, other.card.faults
        if rng.random() < faults.lost_windows:
            fabric.world.counts["fault.rdma_windows_lost"] += 1
            other.windows.pop(work.key, None)
        if not other.allows(work, len(room)):
            other.broken = True
            self._break(work.token, "remote access error")
            return
        start, end = len(room) * piece // PIECES, len(room) * (piece + 1) // PIECES
        theirs = other.card.memory[work.address + start : work.address + end]
        source, target = (
            (theirs, room[start:end])
            if isinstance(work, Read)
            else (
                room[start:end],
                theirs,
            )
        )
        target[:] = source
        if end > start and rng.random() < faults.flips:
            fabric.world.counts["fault.rdma_flips"] += 1
            target[rng.randrange(end - start)] ^= 1 << rng.randrange(8)
        if piece + 1 < PIECES:
            fabric.world.after(
                (end - start) / fabric.rate_bytes_per_s, lambda: self._move(work, piece + 1)
            )
        else:
            self._done(Completed(work.token))

    def allows(self, work: Read | Write, size_bytes: int) -> bool:
        """Whether the other half may do that here."""
        window = self.windows.get(work.key)
        return (
            window is not None
            and not self.broken
            and window.start <= work.address
            and work.address + size_bytes <= window.end
            and window.writable == isinstance(work, Write)
        )

    def _break(self, token: int, problem: str) -> None:
        self.broken = True
        self._done(Completed(token, problem))

    def _done(self, done: Completed) -> None:
        self._busy = False
        self.card.deliver(lambda: None if self.closed else self._completed([done]))
        self._next()
