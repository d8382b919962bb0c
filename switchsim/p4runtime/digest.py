"""Digest lists: collect, thin out duplicates, hand over, await the acknowledgement. Free of I/O.

Owns: the buffer and the cache of one digest, and every bound on them. Must not know: streams,
clocks (each call takes the present time), how a sample is written as P4Data.

Theory. A sample that equals one in the buffer, or one in a list that was sent and not yet
acknowledged, is dropped. The buffer becomes a list when it holds `max_list_size` samples or its
oldest sample is `max_timeout_ns` old. An acknowledgement, or `ack_timeout_ns`, forgets a list.
`ack_timeout_ns` 0 keeps no cache; `max_timeout_ns` 0 sends at once.

Bounds: `MAX_LIST_SAMPLES` samples a list whatever the configuration says; `MAX_CACHED_SAMPLES`
samples awaiting acknowledgement, beyond which the oldest lists are forgotten (their samples may
then be reported again) and counted.

Specification: P4Runtime 1.4, "DigestEntry".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_LIST_SAMPLES = 1024
MAX_CACHED_SAMPLES = 65_536

Sample = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DigestConfig:
    """How one digest is reported (DigestEntry.Config)."""

    max_timeout_ns: int
    """Longest time that a sample waits in the buffer; 0 = not at all."""
    max_list_size: int
    """Samples a list; 0 = as many as fit."""
    ack_timeout_ns: int
    """How long an unacknowledged list suppresses its samples; 0 = not at all."""


@dataclass(frozen=True, slots=True)
class SampleList:
    """One DigestList to send."""

    list_id: int
    samples: tuple[Sample, ...]


class DigestBuffer:
    """The reporting state of one digest that a controller has enabled."""

    def __init__(self, config: DigestConfig) -> None:
        self.config = config
        self.duplicates = 0
        self.forgotten_lists = 0
        self._next_list_id = 1
        self._buffer: dict[Sample, None] = {}
        self._oldest_ns = 0
        self._sent: deque[tuple[int, SampleList]] = deque()
        """(when it was sent, list)"""
        self._cached: set[Sample] = set()

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def offer(self, sample: Sample, now_ns: int) -> SampleList | None:
        """The data plane emitted `sample`; returns the list that it completes, if any."""
        self._expire(now_ns)
        if sample in self._buffer or sample in self._cached:
            self.duplicates += 1
            return None
        if not self._buffer:
            self._oldest_ns = now_ns
        self._buffer[sample] = None
        limit = min(self.config.max_list_size or MAX_LIST_SAMPLES, MAX_LIST_SAMPLES)
        if len(self._buffer) >= limit or self.config.max_timeout_ns == 0:
            return self._send(now_ns)
        return None

    def poll(self, now_ns: int) -> SampleList | None:
        """Time has passed; returns the list whose oldest sample has waited long enough."""
        self._expire(now_ns)
        if self._buffer and now_ns - self._oldest_ns >= self.config.max_timeout_ns:
            return self._send(now_ns)
        return None

    def next_deadline_ns(self) -> int | None:
        """When `poll` will next have a list to send; None while the buffer is empty."""
        return self._oldest_ns + self.config.max_timeout_ns if self._buffer else None

    def acknowledge(self, list_id: int) -> bool:
        """The controller has seen a list; False where that list is not (or no longer) known."""
        for index, (_, waiting) in enumerate(self._sent):
            if waiting.list_id == list_id:
                del self._sent[index]
                self._cached.difference_update(waiting.samples)
                return True
        return False

    def forget_unacknowledged(self) -> None:
        """Another controller took over: it must hear what the last one may not have acted on."""
        self._sent.clear()
        self._cached.clear()

    def _send(self, now_ns: int) -> SampleList:
        samples = tuple(self._buffer)
        self._buffer.clear()
        ready = SampleList(self._next_list_id, samples)
        self._next_list_id += 1
        if self.config.ack_timeout_ns > 0:
            self._sent.append((now_ns, ready))
            self._cached.update(samples)
            while len(self._cached) > MAX_CACHED_SAMPLES:
                self._cached.difference_update(self._sent.popleft()[1].samples)
                self.forgotten_lists += 1
        return ready

    def _expire(self, now_ns: int) -> None:
        timeout_ns = self.config.ack_timeout_ns
        while self._sent and now_ns - self._sent[0][0] >= timeout_ns:
            self._cached.difference_update(self._sent.popleft()[1].samples)
