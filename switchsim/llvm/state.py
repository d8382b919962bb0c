"""Registers, counters, meters and statistics that live in native memory.

Each looks to the control plane like its namesake in `control_plane`; compiled code reads and
writes the same bytes. A register or counter is changed in place (64 bits at once; a wider cell may
be seen half written); the rates of a meter are published with one store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import fields
from typing import Literal, overload

from kvcast.switchsim import ir
from kvcast.switchsim.control_plane.externs import (
    CounterArray,
    Meter,
    MeterArray,
    Rate,
    RegisterArray,
)
from kvcast.switchsim.engine import SwitchStats
from kvcast.switchsim.llvm.layout import pack_value, stored_bytes, unpack_value
from kvcast.switchsim.llvm.memory import Heap, Region

_U64 = (1 << 64) - 1
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""Of memoryview, by the bytes of a number."""


class _Cells(MutableSequence[int]):
    """Numbers in a region, for the classes that keep a list."""

    def __init__(self, region: Region, count: int, stride: int, offset: int, width: int) -> None:
        self._region = region
        self._count = count
        self._stride = stride
        self._offset = offset
        self._width = width

    def __len__(self) -> int:
        return self._count

    def _at(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return index * self._stride + self._offset

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(self._count))]
        size = stored_bytes(self._width)
        return unpack_value(self._region.read(self._at(index), size), self._width)

    def __setitem__(self, index: int | slice, value: object) -> None:
        if isinstance(index, slice):
            assert isinstance(value, Sequence)
            for n, v in zip(range(*index.indices(self._count)), value, strict=True):
                self[n] = v
            return
        assert isinstance(value, int)
        if self._width == 64:
            self._region.set_u64(self._at(index), value & _U64)
        else:
            self._region.write(self._at(index), pack_value(value, self._width))

    def __delitem__(self, index: int | slice) -> None:
        raise TypeError("cells cannot be removed")

    def insert(self, index: int, value: int) -> None:
        raise TypeError("cells cannot be added")

    def __iter__(self) -> Iterator[int]:
        """All cells as they are now, read in one piece."""
        data = self._region.read(0, self._count * self._stride)
        size = stored_bytes(self._width)
        if self._width <= 64:
            step = self._stride // size
            first = self._offset // size
            return iter(memoryview(data).cast(_FORMATS[size])[first::step].tolist())
        cells = (data[at : at + size] for at in range(self._offset, len(data), self._stride))
        return (unpack_value(cell, self._width) for cell in cells)


class NativeRegisters(RegisterArray):
    def __init__(self, spec: ir.RegisterArray) -> None:
        size = stored_bytes(spec.width)
        self.region = Region(spec.size * size)
        super().__init__(spec, _Cells(self.region, spec.size, size, 0, spec.width))

    def reset(self) -> None:
        self.region.zero()


class NativeCounters(CounterArray):
    """packets and bytes side by side."""

    def __init__(self, spec: ir.CounterArray) -> None:
        self.region = Region(16 * spec.size)
        packets, bytes_ = (_Cells(self.region, spec.size, 16, at, 64) for at in (0, 8))
        super().__init__(spec, packets, bytes_)


class NativeMeter(Meter):
    """A meter whose address is kept at (region, offset)."""

    __slots__ = ("_address", "_heap", "_offset", "_region")

    def __init__(self, heap: Heap, region: Region | None, offset: int) -> None:
        super().__init__()
        self._heap = heap
        self._region = region
        self._offset = offset
        self._address = 0

    def configure(self, rates: Sequence[Rate]) -> None:
        super().configure(rates)
        parts = [struct.pack("<Q", len(rates))]
        parts += [struct.pack("<dqqq", r.per_us, r.burst, r.burst, -1) for r in reversed(rates)]
        self._publish(self._heap.new(b"".join(parts)))

    def clear(self) -> None:
        super().clear()
        self._publish(0)

    def _publish(self, address: int) -> None:
        if self._region is not None:
            self._region.set_u64(self._offset, address)
        old, self._address = self._address, address
        self._heap.retire(old)

    def move(self, region: Region | None, offset: int) -> None:
        """Belong to another entry, or (None) to none."""
        self._region = region
        self._offset = offset
        if region is not None:
            region.set_u64(offset, self._address)

    def dispose(self) -> None:
        self._region = None
        self._publish(0)


class NativeMeters(MeterArray):
    def __init__(self, spec: ir.MeterArray, heap: Heap) -> None:
        super().__init__(spec)
        self.region = Region(8 * spec.size)
        self._heap = heap

    def _new_meter(self, index: int) -> NativeMeter:
        return NativeMeter(self._heap, self.region, 8 * index)


class NativeStats(SwitchStats):
    """Statistics in the context: a uint64 for each, in the order of their declaration."""

    _region: Region

    def __init__(self, region: Region, offset: int) -> None:
        self._region = region
        self._offset = offset


STATS = tuple(f.name for f in fields(SwitchStats))


def _stat(number: int) -> property:
    def read(self: NativeStats) -> int:
        return self._region.u64(self._offset + 8 * number)

    def write(self: NativeStats, value: int) -> None:
        self._region.set_u64(self._offset + 8 * number, value)

    return property(read, write)


for _number, _name in enumerate(STATS):
    setattr(NativeStats, _name, _stat(_number))
