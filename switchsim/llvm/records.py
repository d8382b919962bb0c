"""Entries, and the native memory that each table's entries live in.

Owns records and states as memory (`llvm.layout` says what is in them), and what an entry's counts
are before, during and after its time in a table. Must not know how entries are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcast.switchsim.control_plane.externs import Meter
from kvcast.switchsim.control_plane.tables import Entry
from kvcast.switchsim.ir import MatchValue
from kvcast.switchsim.llvm.control import ProgramPlan, TablePlan
from kvcast.switchsim.llvm.layout import STATE_BYTES, ContextLayout
from kvcast.switchsim.llvm.memory import Heap, Reclaimer, Region, Slots
from kvcast.switchsim.llvm.state import NativeMeter

SPARE_RECORDS = 1024
"""Records and states beyond a table's size, for those that wait for their time of grace."""

_NO_STATE = bytes(STATE_BYTES)


@dataclass(slots=True)
class Native:
    """What tables need of the loaded program."""

    context: Region
    layout: ContextLayout
    plan: ProgramPlan
    reclaimer: Reclaimer
    heap: Heap
    insert: Callable[[int, int, int, int, int], int]
    """table_insert(block, records, stride, words, index)"""
    replace: Callable[[int, int, int, int, int, int], None]
    rehash: Callable[[int, int, int, int, int], None]

    def publish(self, name: str, value: int) -> None:
        """Store a word of the context."""
        self.context.set_u64(self.layout[name], value)


class NativeEntry(Entry):
    """An entry whose counts are in native memory. After its removal they are what they were."""

    __slots__ = ("_heap", "_kept", "_meter", "_states", "record", "state")

    def __init__(self, handle: int, key: tuple[MatchValue, ...], priority: int, heap: Heap) -> None:
        self.handle = handle
        self.key = key
        self.priority = priority
        self.action = None
        self.member = None
        self.group = None
        self.record = 0
        self.state = 0
        self._states: Region | None = None
        self._kept = (0, 0, 0)
        self._heap = heap
        self._meter: NativeMeter | None = None  # most entries never have one

    def attach(self, states: Region, state: int) -> None:
        self._states = states
        self.state = state
        states.write(STATE_BYTES * state, _NO_STATE)
        if self._meter is not None:
            self._meter.move(states, STATE_BYTES * state + 24)

    def detach(self) -> None:
        self._kept = self._count(0), self._count(1), self._count(2)
        self._states = None
        if self._meter is not None:
            self._meter.move(None, 0)

    def _count(self, number: int) -> int:
        if self._states is None:
            return self._kept[number]
        return self._states.u64(STATE_BYTES * self.state + 8 * number)

    def _set_count(self, number: int, value: int) -> None:
        if self._states is None:
            kept = list(self._kept)
            kept[number] = value
            self._kept = kept[0], kept[1], kept[2]
        else:
            self._states.set_u64(STATE_BYTES * self.state + 8 * number, value)

    packets = property(lambda self: self._count(0), lambda self, value: self._set_count(0, value))
    bytes = property(lambda self: self._count(1), lambda self, value: self._set_count(1, value))
    last_hit_us = property(
        lambda self: self._count(2), lambda self, value: self._set_count(2, value)
    )

    @property
    def meter(self) -> Meter:
        if self._meter is None:
            place = STATE_BYTES * self.state + 24
            self._meter = NativeMeter(self._heap, self._states, place)
        return self._meter

    @meter.setter
    def meter(self, meter: Meter) -> None:
        assert isinstance(meter, NativeMeter)
        self._meter = meter
        if self._states is not None:
            meter.move(self._states, STATE_BYTES * self.state + 24)


class Records:
    """The records and states of one table, and its version."""

    def __init__(self, native: Native, plan: TablePlan) -> None:
        self.native = native
        self.plan = plan
        self.stride = plan.record.bytes
        spec = plan.spec
        capacity = max(spec.size, len(spec.entries)) + SPARE_RECORDS
        self.records = Region((capacity + 1) * self.stride)
        self.states = Region((capacity + 1) * STATE_BYTES)
        self.slots = Slots(capacity, native.reclaimer)
        self.state_slots = Slots(capacity, native.reclaimer)
        name = f"table.{plan.number}"
        native.publish(f"{name}.records", self.records.address)
        native.publish(f"{name}.states", self.states.address)
        self._default = 0
        self._copy = 0

    def write(self, data: bytes) -> int:
        """A new record."""
        record = self.slots.take()
        self.records.write(record * self.stride, data)
        return record

    def publish_version(self, address: int) -> None:
        self.native.publish(f"table.{self.plan.number}.version", address)

    def publish_copy(self, data: bytes) -> int:
        """Make a copy of this the version, in place of the copy before; its address."""
        old, self._copy = self._copy, self.native.heap.new(data)
        self.publish_version(self._copy)
        self.native.heap.retire(old)
        return self._copy

    def set_default(self, data: bytes | None) -> None:
        record = 0 if data is None else self.write(data)
        self.native.reclaimer.fence()
        self.native.publish(f"table.{self.plan.number}.default", record)
        old, self._default = self._default, record
        if old:
            self.slots.retire(old)
