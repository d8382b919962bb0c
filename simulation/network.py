"""The simulated network: links that carry frames badly (`streams` has TCP).

Owns: when, and in what state, what was sent arrives. Must not know: what is in a frame, or whose
it is; whoever is told of losses (`lost`) may look.

A link is one direction of one cable. Frames keep their order on it unless a fault says otherwise,
and cross it in its delay and the time that they take at its rate; a queue stands before it, and
what comes beyond is lost, as in a switch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvcast.protocol.messages.wire import ETHERNET
from kvcast.simulation.world import World

LATE_S: Final = 0.02
"""A frame that is delayed by more than this may be taken for lost."""


@dataclass(frozen=True)
class LinkOptions:
    """A cable and the queue before it."""

    delay_s: float = 40e-6
    rate_bits_per_s: float = 10e9
    """math.inf: a frame takes no time."""
    queue_frames: int = 512
    mtu_bytes: int = 65_535
    """Longest IPv4 packet that it takes; a longer one is lost."""


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
        if len(frame) - ETHERNET.size_bytes > self.options.mtu_bytes:
            world.counts["link.too_long"] += 1
            self._lost(self, frame, "too_long")
            return
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
