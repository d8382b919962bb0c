"""Stateful externs: registers, counters and meters.

This module owns the state and the arithmetic of the externs, as behavioral-model's stateful.h,
counters.h and meters.cpp have them. It knows nothing about packets beyond their length, and
reads no clock: the present time comes with the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvcast.switchsim import ir


class ExternError(ValueError):
    """A control-plane access that the extern refuses (bad index, bad rates)."""


class RegisterArray:
    """Cells of `width` bits, all zero at first."""

    def __init__(self, spec: ir.RegisterArray) -> None:
        self.name = spec.name
        self.width = spec.width
        self.mask = (1 << spec.width) - 1
        self.cells = [0] * spec.size

    def __len__(self) -> int:
        return len(self.cells)

    def read(self, index: int) -> int:
        _check_index(self.name, index, len(self.cells))
        return self.cells[index]

    def write(self, index: int, value: int) -> None:
        _check_index(self.name, index, len(self.cells))
        self.cells[index] = value & self.mask

    def reset(self) -> None:
        self.cells[:] = [0] * len(self.cells)


class CounterArray:
    """Counts packets and bytes, always both."""

    def __init__(self, spec: ir.CounterArray) -> None:
        self.name = spec.name
        self.packets = [0] * spec.size
        self.bytes = [0] * spec.size

    def __len__(self) -> int:
        return len(self.packets)

    def read(self, index: int) -> tuple[int, int]:
        """(packets, bytes)"""
        _check_index(self.name, index, len(self.packets))
        return self.packets[index], self.bytes[index]

    def write(self, index: int, packets: int, bytes_: int) -> None:
        _check_index(self.name, index, len(self.packets))
        self.packets[index] = packets
        self.bytes[index] = bytes_

    def reset(self) -> None:
        self.packets[:] = [0] * len(self.packets)
        self.bytes[:] = [0] * len(self.bytes)


@dataclass(frozen=True, slots=True)
class Rate:
    """One token bucket. `per_us` is tokens (bytes or packets) a microsecond, `burst` its depth."""

    per_us: float
    burst: int


class Meter:
    """A multi-rate marker; with two rates the trTCM of RFC 2698, colour-blind.

    Colours: 0 green, 1 yellow, 2 red. A meter without rates says green.
    """

    __slots__ = ("_buckets", "rates")

    def __init__(self) -> None:
        self.rates: tuple[Rate, ...] = ()
        self._buckets: list[list[int]] = []

    def configure(self, rates: Sequence[Rate]) -> None:
        """Rates from the lowest to the highest (CIR, PIR); the buckets start full."""
        for rate in rates:
            if not 0 <= rate.per_us < 1e9 or not 0 <= rate.burst < 1 << 62:
                raise ExternError(f"a meter cannot have the rate {rate}")
        if any(a.per_us > b.per_us for a, b in pairwise(rates)):
            raise ExternError("meter rates must be given from the lowest to the highest")
        self.rates = tuple(rates)
        # [tokens, tokens since time 0 when last seen (or -1)] for the highest rate first
        self._buckets = [[rate.burst, -1] for rate in reversed(self.rates)]

    def clear(self) -> None:
        self.rates = ()
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


class MeterArray:
    """An indirect meter. Only the meters that have rates take memory."""

    def __init__(self, spec: ir.MeterArray) -> None:
        self.name = spec.name
        self.size = spec.size
        self.unit = spec.unit
        self.rate_count = spec.rates
        self._meters: dict[int, Meter] = {}

    def __len__(self) -> int:
        return self.size

    def execute(self, index: int, length_bytes: int, now_us: int) -> int:
        meter = self._meters.get(index)
        if meter is None:
            return 0
        return meter.execute(1 if self.unit == "packets" else length_bytes, now_us)

    def rates(self, index: int) -> tuple[Rate, ...]:
        """Empty if the meter has no rates."""
        _check_index(self.name, index, self.size)
        meter = self._meters.get(index)
        return meter.rates if meter is not None else ()

    def configure(self, index: int, rates: Sequence[Rate]) -> None:
        _check_index(self.name, index, self.size)
        if len(rates) != self.rate_count:
            raise ExternError(f"{self.name} takes {self.rate_count} rates")
        meter = Meter()
        meter.configure(rates)
        self._meters[index] = meter

    def clear(self, index: int) -> None:
        _check_index(self.name, index, self.size)
        self._meters.pop(index, None)

    def reset(self) -> None:
        self._meters.clear()


def _check_index(name: str, index: int, size: int) -> None:
    if not 0 <= index < size:
        raise ExternError(f"{name} has no index {index} (its size is {size})")
