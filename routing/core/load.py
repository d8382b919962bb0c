"""How busy each engine is, as far as a router can know: what it sent there, and what came back.

Owns: requests in flight, and how long a new one would wait. Must not know: who holds what, or which
engine is better.

An engine prefills prompts in turn and decodes many at once. A router sees neither; it sees when a
request was sent, when its first token came, and when its answer ended. The prompts without a first
token are the engine's queue. How long they take is estimated when they are sent, and corrected by
the engine's *pace*: what first tokens took ÷ what the cost model said, a moving average, within
bounds. So an engine that is slower than the cost model says, or that others send requests to as
well, is soon taken for what it is. An engine of which little was seen is taken for what all of them
are together: else the first one that is seen to be quicker than the model says would get
everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

_PACE_BOUNDS: Final = (0.25, 8.0)
_PACE_STEP: Final = 0.05
"""Weight of one observation, in the logarithm; of the first ones, their mean counts."""
_TRUSTED_OBSERVATIONS: Final = 5
"""An engine's own observations count as much as the fleet's when there are so many."""
_SHORTEST_TELLING_S: Final = 0.02
"""Estimates below this say nothing about an engine's pace."""
_DECODE_STEP: Final = 0.05


@dataclass(slots=True)
class Average:
    """A moving average, whose first values are plain means."""

    value: float = 0.0
    seen: int = 0

    def add(self, sample: float, step: float) -> None:
        self.seen = min(self.seen + 1, math.ceil(1 / step))
        self.value += (sample - self.value) / self.seen


@dataclass(slots=True)
class Sent:
    """A request in flight. `work_s`: what its prefill keeps the engine busy for, by the cost model;
    `ttft_s`: its time to first token as it was estimated, with the engine's pace."""

    sent_at: float
    work_s: float
    ttft_s: float
    pace: float
    """The engine's, at that time."""
    first_token_at: float | None = None


@dataclass(slots=True)
class EngineLoad:
    """One engine. `slots`: requests that it runs at once; more wait."""

    slots: int
    fleet: Average = field(default_factory=Average)
    """The logarithm of all engines' pace, which they share."""
    own: Average = field(default_factory=Average)
    decode_s: float = 5.0
    """How long an answer takes behind its first token: a moving average."""
    link_free_at: float = 0.0
    """When its link will have brought what requests in flight want from the pool."""
    in_flight: dict[str, Sent] = field(default_factory=dict)
    _queued_s: float = 0.0
    """Work of the requests without a first token."""
    _queued: int = 0
    _busy_since: float = 0.0
    """Since when the head of the queue is computed."""

    @property
    def pace(self) -> float:
        """How many times longer than the cost model says this engine takes."""
        known = self.own.seen
        both = known * self.own.value + _TRUSTED_OBSERVATIONS * self.fleet.value
        return math.exp(both / (known + _TRUSTED_OBSERVATIONS))

    @property
    def queued(self) -> int:
        """Requests without a first token."""
        return self._queued

    @property
    def decoding(self) -> int:
        """Requests whose answer has begun."""
        return len(self.in_flight) - self._queued

    def wait_s(self, now: float) -> float:
        """How long a request sent now waits until its prefill begins."""
        return max(self._prefill_wait_s(now), self._slot_wait_s())

    def _prefill_wait_s(self, now: float) -> float:
        if not self._queued:
            return 0.0
        # The head is under way; how far nobody knows, but not further than to its end.
        done = min(max(0.0, now - self._busy_since), self._queued_s / self._queued * self.pace)
        return max(0.0, self._queued_s * self.pace - done)

    def _slot_wait_s(self) -> float:
        beyond = len(self.in_flight) - self.slots + 1
        return 0.0 if beyond <= 0 else beyond / self.slots * self.decode_s

    def sent(self, request: str, work_s: float, load_s: float, ttft_s: float, now: float) -> None:
        """A request was sent here; `load_s`: what it takes of the link."""
        if load_s:
            self.link_free_at = max(now, self.link_free_at) + load_s
        if not self._queued:
            self._busy_since = now
        self.in_flight[request] = Sent(now, work_s, ttft_s, self.pace)
        self._queued += 1
        self._queued_s += work_s

    def first_token(self, request: str, now: float, *, seen: bool = True) -> None:
        """Its answer has begun (not `seen`: is taken to have); unknown requests are ignored."""
        sent = self.in_flight.get(request)
        if sent is None or sent.first_token_at is not None:
            return
        sent.first_token_at = now
        self._left_queue(sent, now)
        if seen and sent.ttft_s >= _SHORTEST_TELLING_S:
            pace = sent.pace * max(1e-3, now - sent.sent_at) / sent.ttft_s
            sample = math.log(min(max(pace, _PACE_BOUNDS[0]), _PACE_BOUNDS[1]))
            self.own.add(sample, _PACE_STEP)
            self.fleet.add(sample, _PACE_STEP)

    def ended(self, request: str, now: float) -> None:
        """Its answer has ended, or never came; unknown requests are ignored."""
        sent = self.in_flight.pop(request, None)
        if sent is None:
            return
        if sent.first_token_at is None:
            self._left_queue(sent, now)
        else:
            self.decode_s += _DECODE_STEP * (now - sent.first_token_at - self.decode_s)

    def _left_queue(self, sent: Sent, now: float) -> None:
        self._queued -= 1
        self._queued_s = max(0.0, self._queued_s - sent.work_s) if self._queued else 0.0
        self._busy_since = now
