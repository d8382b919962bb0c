"""The simulated network: links that carry frames badly, and streams that carry messages.

Owns: when, and in what state, what was sent arrives. Must not know: what is in a frame, or whose
it is; whoever is told of losses (`lost`) may look.

A link is one direction of one cable. Frames keep their order on it unless a fault says otherwise,
and cross it in its delay and the time that they take at its rate; a queue stands before it, and
what comes beyond is lost, as in a switch.

A stream is what TCP makes of a network: messages arrive whole and in order, late while it is
blocked, and both ends learn in the end that it is broken.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvcast.simulation.world import World

STREAM_DELAY_S: Final = 150e-6
STREAM_GIVES_UP_S: Final = 2.0
"""A stream that was blocked for so long is broken, like a TCP connection whose keep-alives go
unanswered."""

LATE_S: Final = 0.02
"""A frame that is delayed by more than this may be taken for lost."""


@dataclass(frozen=True)
class LinkOptions:
    """A cable and the queue before it."""

    delay_s: float = 40e-6
    rate_bits_per_s: float = 10e9
    """math.inf: a frame takes no time."""
    queue_frames: int = 512


@dataclass(eq=False)
class LinkFault:
    """What is wrong with a link; probabilities by frame, each fault with a source of its own."""

    kind: str
    rng: random.Random
    chance: float = 1.0
    extra_s: float = 0.0
    rate_bits_per_s: float = 0.0


Lost = Callable[["Link", bytes, str], None]
"""(link, frame, kind of the fault): a frame will not arrive once, whole, in order and in time."""


class Link:
    """One direction between a host and its port of the switch."""

    def __init__(
        self,
        world: World,
        name: str,
        arrive: Callable[[bytes], None],
        lost: Lost,
        options: LinkOptions = LinkOptions(),
    ) -> None:
        self.name = name
        self.options = options
        self.free_at = 0.0
        """When the last frame that was put on the link will have left."""
        self.faults: list[LinkFault] = []
        self._world = world
        self._arrive = arrive
        self._lost = lost
        self._last_arrival = 0.0
        self._queued = 0

    def send(self, frame: bytes) -> None:
        """Put a frame on the link."""
        if self.faults:
            self._send_badly(frame)
        else:
            self._carry(frame, self.options.rate_bits_per_s, 0.0, in_order=True)

    def _carry(self, frame: bytes, rate: float, extra_s: float, *, in_order: bool) -> None:
        world = self._world
        if self._queued >= self.options.queue_frames:
            world.counts["fault.queue_overflow"] += 1
            self._lost(self, frame, "queue_overflow")
            return
        self.free_at = max(world.now, self.free_at) + len(frame) * 8 / rate
        arrival = self.free_at + self.options.delay_s + extra_s
        if in_order:
            arrival = self._last_arrival = max(arrival, self._last_arrival)
        if arrival - world.now > LATE_S:
            self._lost(self, frame, "late")
        self._queued += 1
        world.at(arrival, lambda: self._deliver(frame))

    def _deliver(self, frame: bytes) -> None:
        self._queued -= 1
        self._arrive(frame)

    def _send_badly(self, frame: bytes) -> None:
        rate, extra_s, in_order, copies = self.options.rate_bits_per_s, 0.0, True, 1
        counts = self._world.counts
        for fault in self.faults:
            if fault.chance < 1.0 and fault.rng.random() >= fault.chance:
                continue
            kind = fault.kind
            counts[f"fault.{kind}"] += 1
            if kind in ("loss", "partition", "one_way_partition"):
                self._lost(self, frame, kind)
                return
            if kind == "duplication":
                copies = 2
                self._lost(self, frame, kind)
            elif kind == "corruption":
                self._lost(self, frame, kind)
                damaged = bytearray(frame)
                for _ in range(fault.rng.choice((1, 1, 1, 2, 8))):
                    damaged[fault.rng.randrange(len(damaged))] ^= 1 << fault.rng.randrange(8)
                frame = bytes(damaged)
            elif kind == "reordering":
                in_order = False
                extra_s += fault.extra_s * fault.rng.random()
                self._lost(self, frame, kind)
            elif kind == "delay":
                extra_s += fault.extra_s
            else:
                assert kind == "slow_link", kind
                rate = fault.rate_bits_per_s
        for _ in range(copies):
            self._carry(frame, rate, extra_s, in_order=in_order)


class StreamEnd:
    """One end of a stream. Set `received` and `closed` before anything can arrive."""

    def __init__(self, stream: Stream, side: int) -> None:
        self.received: Callable[[Any], None] = _ignore
        self.closed: Callable[[], None] = _ignore_end
        self._stream = stream
        self._side = side

    def send(self, message: Any) -> None:
        """Send a message; one sent on a broken stream is lost."""
        self._stream.carry(1 - self._side, message)

    def close(self) -> None:
        """Close the stream; the other end learns of it after what was sent."""
        self._stream.close(1 - self._side)


class Stream:
    """A connection between two processes: message by message, in order."""

    def __init__(self, world: World) -> None:
        self.ends = (StreamEnd(self, 0), StreamEnd(self, 1))
        self.open = True
        self.spoil: Callable[[Any], Any] | None = None
        """What a fault makes of a message on its way."""
        self._world = world
        self._blocked_since: float | None = None
        self._held: deque[Callable[[], None]] = deque()

    def carry(self, to: int, message: Any) -> None:
        if self.open:
            if self.spoil is not None:
                message = self.spoil(message)
            self._later(lambda: self.ends[to].received(message) if self.open else None)

    def close(self, told: int) -> None:
        if self.open:
            self._later(lambda: self._end(told))

    def _end(self, told: int) -> None:
        if self.open:
            self.open = False
            self.ends[told].closed()

    def broken(self) -> None:
        """Both ends learn now that nothing more will come."""
        if self.open:
            self.open = False
            for end in self.ends:
                end.closed()

    def block(self) -> None:
        """Nothing arrives until `unblock`; after `STREAM_GIVES_UP_S` the stream is broken."""
        if self._blocked_since is None:
            since = self._blocked_since = self._world.now
            self._world.after(STREAM_GIVES_UP_S, lambda: self._give_up(since))

    def unblock(self) -> None:
        self._blocked_since = None
        held, self._held = self._held, deque()
        for action in held:
            self._later(action)

    def _give_up(self, since: float) -> None:
        if self._blocked_since == since:
            self.broken()

    def _later(self, action: Callable[[], None]) -> None:
        if self._blocked_since is not None:
            self._held.append(action)
        else:
            self._world.after(STREAM_DELAY_S, lambda: self._now(action))

    def _now(self, action: Callable[[], None]) -> None:
        if self._blocked_since is not None:
            self._held.append(action)
        else:
            action()


def _ignore(_message: Any) -> None:
    pass


def _ignore_end() -> None:
    pass
