"""Registers, counters and meters as a controller sees them.

Owns: their values where Python holds them, and what the control plane is refused (bad index, bad
rates). Must not know: what a packet does to them, which is the engines' to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvcast.switchsim import ir


class ExternError(ValueError):
    """A control-plane access that the extern refuses (bad index, bad rates)."""


class RegisterArray:
    """Cells of `width` bits, all zero at first."""

    def __init__(self, spec: ir.RegisterArray, cells: MutableSequence[int] | None = None) -> None:
        """`cells` are zero, one for each index (here a list)."""
        self.name = spec.name
        self.width = spec.width
        self.mask = (1 << spec.width) - 1
        self.cells = [0] * spec.size if cells is None else cells

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

    def __init__(
        self,
        spec: ir.CounterArray,
        packets: MutableSequence[int] | None = None,
        bytes_: MutableSequence[int] | None = None,
    ) -> None:
        self.name = spec.name
        self.packets = [0] * spec.size if packets is None else packets
        self.bytes = [0] * spec.size if bytes_ is None else bytes_

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


@dataclass(frozen=True, slots=True)
class Rate:
    """One token bucket. `per_us` is tokens (bytes or packets) a microsecond, `burst` its depth."""

    per_us: float
    burst: int


class Meter:
    """A multi-rate marker's rates. Without rates it says green."""

    __slots__ = ("rates",)

    def __init__(self) -> None:
        self.rates: tuple[Rate, ...] = ()

    def configure(self, rates: Sequence[Rate]) -> None:
        """Rates from the lowest to the highest (CIR, PIR); the buckets start full."""
        for rate in rates:
            if not 0 <= rate.per_us < 1e9 or not 0 <= rate.burst < 1 << 62:
                raise ExternError(f"a meter cannot have the rate {rate}")
        if any(a.per_us > b.per_us for a, b in pairwise(rates)):
            raise ExternError("meter rates must be given from the lowest to the highest")
        self.rates = tuple(rates)

    def clear(self) -> None:
        self.rates = ()


class MeterArray(ABC):
    """An indirect meter. Only the meters that have rates take memory."""

    def __init__(self, spec: ir.MeterArray) -> None:
        self.name = spec.name
        self.size = spec.size
        self.unit = spec.unit
        self.rate_count = spec.rates
        self._meters: dict[int, Meter] = {}

    @abstractmethod
    def _new_meter(self, index: int) -> Meter:
        """The engine's kind of meter."""

    def __len__(self) -> int:
        return self.size

    def rates(self, index: int) -> tuple[Rate, ...]:
        """Empty if the meter has no rates."""
        _check_index(self.name, index, self.size)
        meter = self._meters.get(index)
        return meter.rates if meter is not None else ()

    def configure(self, index: int, rates: Sequence[Rate]) -> None:
        _check_index(self.name, index, self.size)
        if len(rates) != self.rate_count:
            raise ExternError(f"{self.name} takes {self.rate_count} rates")
        meter = self._meters.get(index) or self._new_meter(index)
        meter.configure(rates)
        self._meters[index] = meter

    def clear(self, index: int) -> None:
        _check_index(self.name, index, self.size)
        meter = self._meters.pop(index, None)
        if meter is not None:
            meter.clear()


def _check_index(name: str, index: int, size: int) -> None:
    if not 0 <= index < size:
        raise ExternError(f"{name} has no index {index} (its size is {size})")
