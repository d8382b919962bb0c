"""Meters at work: what a packet does to their buckets.

The arithmetic is that of behavioral-model's meters.cpp. It knows nothing about packets beyond their
length, and reads no clock: the present time comes with the call.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcast.switchsim.control_plane import externs
from kvcast.switchsim.control_plane.externs import Rate


class Meter(externs.Meter):
    """A multi-rate marker; with two rates the trTCM of RFC 2698, colour-blind.

    Colours: 0 green, 1 yellow, 2 red. A meter without rates says green.
    """

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        super().__init__()
        self._buckets: list[list[int]] = []

    def configure(self, rates: Sequence[Rate]) -> None:
        super().configure(rates)
        # [tokens, tokens since time 0 when last seen (or -1)] for the highest rate first
        self._buckets = [[rate.burst, -1] for rate in reversed(self.rates)]

    def clear(self) -> None:
        super().clear()
        self._buckets = []

    def execute(self, amount: int, now_us: int) -> int:
        rates = self.rates
        colour = len(rates)
        for rate, bucket in zip(reversed(rates), self._buckets, strict=True):
            since_start = int(now_us * rate.per_us)
            tokens, seen = bucket
            if seen >= 0 and since_start > seen:
                tokens = min(tokens + since_start - seen, rate.burst)
            bucket[1] = max(since_start, seen)
            if tokens < amount:
                bucket[0] = tokens
                return colour
            bucket[0] = tokens - amount
            colour -= 1
        return 0


class MeterArray(externs.MeterArray):
    """An indirect meter whose packets are metered here."""

    def _new_meter(self, index: int) -> Meter:
        return Meter()

    def execute(self, index: int, length_bytes: int, now_us: int) -> int:
        meter = self._meters.get(index)
        if meter is None:
            return 0
        assert isinstance(meter, Meter)
        return meter.execute(1 if self.unit == "packets" else length_bytes, now_us)
