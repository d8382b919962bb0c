"""Tables and action profiles whose entries live in native memory.

The rules of the control plane are those of `tables.Table` and `Profile`, which these classes
extend: what is added, changed or removed there is mirrored here in records and in the structures
that lookups read (`llvm_tables` describes them). A change writes a new record and publishes it with
one store; what it replaces is used again after a time of grace.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcast.switchsim import program as ir
from kvcast.switchsim.actions import Actions, Step
from kvcast.switchsim.externs import Meter
from kvcast.switchsim.llvm_control import ProgramPlan, TablePlan
from kvcast.switchsim.llvm_layout import (
    MEMBER_ARGUMENTS,
    STATE_BYTES,
    TO_ACTION,
    TO_GROUP,
    TO_MEMBER,
    ContextLayout,
    align,
    pack_value,
)
from kvcast.switchsim.llvm_memory import Heap, Reclaimer, Region, Slots
from kvcast.switchsim.llvm_state import NativeMeter
from kvcast.switchsim.llvm_tables import DELETED, group_bytes
from kvcast.switchsim.phv import Layout
from kvcast.switchsim.program import MatchValue, Range
from kvcast.switchsim.tables import (
    ActionTable,
    BoundAction,
    Entry,
    Profile,
    Table,
    TableError,
)

SPARE_RECORDS = 1024
"""Records and states beyond a table's size, for those that wait for their time of grace."""

_FIRST_SLOTS = 8
_NO_STATE = bytes(STATE_BYTES)
_HEAD = struct.Struct("<IIIIqQ")


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
        self.next = None
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


# --- the structures of lookups ------------------------------------------------------------------


class _HashBlock:
    """A hash block: it grows, and says where it is by `moved`."""

    def __init__(self, table: _Records, moved: Callable[[int], None]) -> None:
        self._table = table
        self._native = table.native
        self._moved = moved
        self._slots = _FIRST_SLOTS
        self._used = 0
        """Slots that were ever used."""
        self._live = 0
        self.address = self._new(_FIRST_SLOTS)
        moved(self.address)

    def _new(self, slots: int) -> int:
        address = self._native.heap.zeros(8 + 4 * slots)
        _poke(address, slots - 1)
        return address

    def _place(self) -> tuple[int, int, int]:
        table = self._table
        return table.records.address, table.stride, table.plan.record.words

    def insert(self, record: int) -> None:
        if 4 * (self._used + 1) > 3 * self._slots:
            self._grow()
        self._used += self._native.insert(self.address, *self._place(), record)
        self._live += 1

    def _grow(self) -> None:
        slots = _FIRST_SLOTS
        while slots < 2 * (self._live + 1):
            slots *= 2
        new = self._new(slots)
        self._native.rehash(self.address, *self._place(), new)
        old, self.address = self.address, new
        self._slots, self._used = slots, self._live
        self._moved(new)
        self._native.heap.retire(old)

    def replace(self, old: int, new: int) -> None:
        self._native.replace(self.address, *self._place(), old, new)

    def remove(self, record: int) -> None:
        self.replace(record, DELETED)
        self._live -= 1

    def dispose(self) -> None:
        self._native.heap.retire(self.address)


def _poke(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


class _Records:
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

    def write(self, data: bytes) -> int:
        """A new record."""
        record = self.slots.take()
        self.records.write(record * self.stride, data)
        return record

    def publish_version(self, address: int) -> None:
        self.native.publish(f"table.{self.plan.number}.version", address)

    def set_default(self, data: bytes | None) -> None:
        record = 0 if data is None else self.write(data)
        self.native.publish(f"table.{self.plan.number}.default", record)
        old, self._default = self._default, record
        if old:
            self.slots.retire(old)


class _ExactIndex:
    def __init__(self, records: _Records) -> None:
        self._records = records
        self._block = _HashBlock(records, records.publish_version)

    def add(self, entry: NativeEntry, value: int, mask: int) -> None:
        self._block.insert(entry.record)

    def change(self, entry: NativeEntry, new: int, value: int, mask: int) -> None:
        self._block.replace(entry.record, new)

    def remove(self, entry: NativeEntry, value: int, mask: int) -> None:
        self._block.remove(entry.record)


class _Group:
    """All entries of one mask: of those with one value only the best is seen."""

    def __init__(self, records: _Records) -> None:
        self.entries: dict[int, list[NativeEntry]] = {}
        self.ranks: list[tuple[int, int]] = []
        """Of the best entry of each value, sorted."""
        self.pointer = 0
        """Address of the word that says where the block is; 0 before there is one."""
        self.block = _HashBlock(records, self._moved)

    def _moved(self, address: int) -> None:
        if self.pointer:
            _poke(self.pointer, address)


class _GroupIndex:
    """Tuple space: lpm and ternary tables."""

    def __init__(self, records: _Records, *, ranked: bool) -> None:
        self._records = records
        self._ranked = ranked
        self._groups: dict[int, _Group] = {}
        self._address = 0
        self._arrange()

    def add(self, entry: NativeEntry, value: int, mask: int) -> None:
        group = self._groups.get(mask)
        if group is None:
            group = self._groups[mask] = _Group(self._records)
        best = group.ranks[0] if group.ranks else None
        entries = group.entries.setdefault(value, [])
        insort(entries, entry, key=_rank)
        if len(entries) == 1:
            group.block.insert(entry.record)
            insort(group.ranks, _rank(entry))
        elif entries[0] is entry:
            group.block.replace(entries[1].record, entry.record)
            _drop(group.ranks, _rank(entries[1]))
            insort(group.ranks, _rank(entry))
        if best is None or (self._ranked and group.ranks[0] != best):
            self._arrange()

    def change(self, entry: NativeEntry, new: int, value: int, mask: int) -> None:
        group = self._groups[mask]
        if group.entries[value][0] is entry:
            group.block.replace(entry.record, new)

    def remove(self, entry: NativeEntry, value: int, mask: int) -> None:
        group = self._groups[mask]
        entries = group.entries[value]
        best = group.ranks[0]
        if entries[0] is not entry:
            entries.remove(entry)
            return
        _drop(group.ranks, _rank(entry))
        del entries[0]
        if entries:
            group.block.replace(entry.record, entries[0].record)
            insort(group.ranks, _rank(entries[0]))
        else:
            group.block.remove(entry.record)
            del group.entries[value]
        if not group.entries:
            del self._groups[mask]
            self._arrange()
            group.block.dispose()
        elif self._ranked and group.ranks[0] != best:
            self._arrange()

    def _arrange(self) -> None:
        """Publish the groups anew, in their order."""
        words = self._records.plan.record.words
        if self._ranked:
            order = sorted(self._groups.items(), key=lambda item: item[1].ranks[0])
        else:
            order = sorted(self._groups.items(), key=lambda item: -item[0])
        parts = [struct.pack("<Q", len(order))]
        for mask, group in order:
            parts.append(mask.to_bytes(8 * words, "little"))
            parts.append(struct.pack("<qQQ", *group.ranks[0], group.block.address))
        heap = self._records.native.heap
        address = heap.new(b"".join(parts))
        size = group_bytes(self._records.plan.record)
        for number, (_, group) in enumerate(order):
            group.pointer = address + 8 + number * size + 8 * words + 16
        self._records.publish_version(address)
        heap.retire(self._address)
        self._address = address


class _RangeIndex:
    """All entries, the best first."""

    def __init__(self, records: _Records) -> None:
        self._records = records
        self._order: list[NativeEntry] = []
        self._address = 0
        self._arrange()

    def add(self, entry: NativeEntry, value: int, mask: int) -> None:
        insort(self._order, entry, key=_rank)
        self._arrange()

    def change(self, entry: NativeEntry, new: int, value: int, mask: int) -> None:
        old, entry.record = entry.record, new
        self._arrange()
        entry.record = old

    def remove(self, entry: NativeEntry, value: int, mask: int) -> None:
        del self._order[bisect_left(self._order, _rank(entry), key=_rank)]
        self._arrange()

    def _arrange(self) -> None:
        numbers = array("I", [e.record for e in self._order])
        heap = self._records.native.heap
        address = heap.new(struct.pack("<Q", len(numbers)) + numbers.tobytes())
        self._records.publish_version(address)
        heap.retire(self._address)
        self._address = address


class _NoIndex:
    """Entries that are part of the code."""

    def add(self, entry: NativeEntry, value: int, mask: int) -> None:
        pass

    def change(self, entry: NativeEntry, new: int, value: int, mask: int) -> None:
        pass

    def remove(self, entry: NativeEntry, value: int, mask: int) -> None:
        pass


_NativeIndex = _ExactIndex | _GroupIndex | _RangeIndex | _NoIndex


def _rank(entry: NativeEntry) -> tuple[int, int]:
    return entry.priority, entry.handle


def _drop(ranks: list[tuple[int, int]], rank: tuple[int, int]) -> None:
    del ranks[bisect_left(ranks, rank)]


class _Mirror:
    """What `Table` calls its index: it keeps records and index in step with the entries."""

    def __init__(self, table: NativeTable, index: _NativeIndex) -> None:
        self._table = table
        self.index = index

    def add(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, NativeEntry)
        records = self._table.records
        entry.attach(records.states, records.state_slots.take())
        entry.record = records.write(self._table.record_of(entry, value, mask))
        self.index.add(entry, value, mask)

    def change(self, entry: NativeEntry, value: int, mask: int) -> None:
        records = self._table.records
        new = records.write(self._table.record_of(entry, value, mask))
        self.index.change(entry, new, value, mask)
        old, entry.record = entry.record, new
        records.slots.retire(old)

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, NativeEntry)
        self.index.remove(entry, value, mask)
        records = self._table.records
        records.slots.retire(entry.record)
        records.state_slots.retire(entry.state)
        entry.detach()
        entry.record = 0

    def find(self, key: int) -> Entry | None:
        raise NotImplementedError("compiled code looks entries up")


# --- tables and profiles ------------------------------------------------------------------------


class NativeTable(Table):
    """A table that compiled code looks things up in."""

    def __init__(
        self,
        plan: TablePlan,
        native: Native,
        layout: Layout,
        actions: Sequence[ir.Action],
        profile: NativeProfile | None,
    ) -> None:
        self.plan = plan
        self.native = native
        self.records = _Records(native, plan)
        self._numbers = {actions[n].name: n for n in reversed(plan.actions)}
        self._native_profile = profile
        runs: list[Step] = [_never] * len(actions)
        super().__init__(plan.spec, layout, actions, runs, profile)

    def _new_index(self) -> _Mirror:  # type: ignore[override]
        index: _NativeIndex
        if self.plan.inline or (not self.spec.key and self.spec.action_profile is None):
            index = _NoIndex()
        else:
            match self.spec.match:
                case "exact":
                    index = _ExactIndex(self.records)
                case "lpm":
                    index = _GroupIndex(self.records, ranked=False)
                case "ternary":
                    index = _GroupIndex(self.records, ranked=True)
                case _:
                    index = _RangeIndex(self.records)
        return _Mirror(self, index)

    def _new_entry(self, handle: int, key: tuple[MatchValue, ...], priority: int) -> Entry:
        if not -(1 << 63) <= priority < 1 << 63:
            raise TableError(f"{self.name}: {priority} is not a priority")
        return NativeEntry(handle, key, priority, self.native.heap)

    def _point(
        self,
        entry: Entry,
        action: str | None,
        arguments: Sequence[int],
        member: int | None,
        group: int | None,
    ) -> None:
        super()._point(entry, action, arguments, member, group)
        assert isinstance(entry, NativeEntry)
        if entry.record:
            _, value, mask = self._canonical(entry.key)
            mirror = self._index
            assert isinstance(mirror, _Mirror)
            mirror.change(entry, value, mask)

    def _make_default(self, action: BoundAction) -> None:
        super()._make_default(action)
        self._mirror_default()

    def reset_default(self) -> None:
        super().reset_default()
        self._mirror_default()

    def _mirror_default(self) -> None:
        default = self._default
        if default is None:
            self.records.set_default(None)
        else:
            words = bytes(8 * self.plan.record.words)
            self.records.set_default(self._record(words, default.action, 0, 0, 0, 0, 0, b""))

    def record_of(self, entry: NativeEntry, value: int, mask: int) -> bytes:
        layout = self.plan.record
        kind, target = TO_ACTION, 0
        if entry.action is None:
            assert self._native_profile is not None
            if entry.member is not None:
                kind, target = TO_MEMBER, self._native_profile.member_slot(entry.member)
            else:
                assert entry.group is not None
                kind, target = TO_GROUP, self._native_profile.group_slot(entry.group)
        extra = b""
        if layout.ranges:
            data = bytearray(layout.arguments - layout.mask)
            data[: 8 * layout.words] = mask.to_bytes(8 * layout.words, "little")
            for number, width, low, high in layout.ranges:
                v = entry.key[number]
                assert isinstance(v, Range)
                for offset, end in ((low, v.low), (high, v.high)):
                    packed = pack_value(end, width)
                    data[offset - layout.mask : offset - layout.mask + len(packed)] = packed
            extra = bytes(data)
        elif self.spec.match == "range":
            extra = mask.to_bytes(8 * layout.words, "little")
        words = value.to_bytes(8 * layout.words, "little")
        return self._record(
            words, entry.action, entry.state, kind, target, entry.priority, entry.handle, extra
        )

    def _record(
        self,
        words: bytes,
        action: BoundAction | None,
        state: int,
        kind: int,
        target: int,
        priority: int,
        handle: int,
        extra: bytes,
    ) -> bytes:
        layout = self.plan.record
        number, arguments = 0, b""
        if action is not None:
            number = self._numbers[action.name]
            arguments = self.native.plan.arguments[number].pack(action.arguments)
        head = words + _HEAD.pack(number, state, kind, target, priority, handle) + extra
        data = head.ljust(layout.arguments, b"\0") + arguments
        return data.ljust(layout.bytes, b"\0")


def _never(*_: object) -> None:
    raise NotImplementedError("compiled code runs actions")


@dataclass(slots=True)
class _GroupState:
    slot: int
    address: int
    members: tuple[int, ...] = field(default=())


class NativeProfile(Profile):
    """An action profile: members have slots that name their records, groups have member lists."""

    def __init__(
        self,
        number: int,
        spec: ir.ActionProfile,
        native: Native,
        actions: Actions,
        choices: ActionTable,
    ) -> None:
        super().__init__(spec, actions, choices)
        self._native = native
        self._program = actions.program
        self._action_numbers = {
            s.name: n for n, s in enumerate(actions.program.actions) if s.name in choices.by_name
        }
        users = [t for t in actions.program.tables() if t.action_profile == number]
        for table in users:
            for n in table.actions:
                self._action_numbers[actions.program.actions[n].name] = n
        self._stride = align(native.plan.member_bytes[number], 16)
        capacity = spec.size + SPARE_RECORDS
        self._records = Region((capacity + 1) * self._stride)
        self._record_slots = Slots(capacity, native.reclaimer)
        self._slots = Region(4 * (capacity + 1))
        self._slot_numbers = Slots(capacity, native.reclaimer)
        # Nothing bounds the number of groups but their uses; BMv2 does not either.
        self._max_groups = 1 << 20
        self._groups = Region(8 * (self._max_groups + 1))
        self._group_numbers = Slots(self._max_groups, native.reclaimer)
        self._slot_of: dict[int, int] = {}
        self._group_of: dict[int, _GroupState] = {}
        native.publish(f"profile.{number}.records", self._records.address)
        native.publish(f"profile.{number}.slots", self._slots.address)
        native.publish(f"profile.{number}.groups", self._groups.address)

    def member_slot(self, member: int) -> int:
        return self._slot_of[member]

    def group_slot(self, group: int) -> int:
        return self._group_of[group].slot

    def _write_member(self, member: int) -> int:
        bound = self.members[member]
        number = self._action_numbers[bound.name]
        arguments = self._native.plan.arguments[number].pack(bound.arguments)
        data = struct.pack("<I", number).ljust(MEMBER_ARGUMENTS, b"\0") + arguments
        record = self._record_slots.take()
        self._records.write(record * self._stride, data.ljust(self._stride, b"\0"))
        return record

    def add_member(self, member: int, action: str, arguments: Sequence[int] = ()) -> None:
        super().add_member(member, action, arguments)
        slot = self._slot_numbers.take()
        self._slots.set_u32(4 * slot, self._write_member(member))
        self._slot_of[member] = slot

    def modify_member(self, member: int, action: str, arguments: Sequence[int] = ()) -> None:
        super().modify_member(member, action, arguments)
        slot = self._slot_of[member]
        old = self._slots.u32(4 * slot)
        self._slots.set_u32(4 * slot, self._write_member(member))
        self._record_slots.retire(old)

    def delete_member(self, member: int) -> None:
        super().delete_member(member)
        slot = self._slot_of.pop(member)
        self._record_slots.retire(self._slots.u32(4 * slot))
        self._slot_numbers.retire(slot)

    def set_group(self, group: int, members: Sequence[int]) -> None:
        super().set_group(group, members)
        slots = array("I", [self._slot_of[m] for m in self.groups[group]])
        address = self._native.heap.new(struct.pack("<Q", len(slots)) + slots.tobytes())
        known = self._group_of.get(group)
        if known is None:
            known = self._group_of[group] = _GroupState(self._group_numbers.take(), 0)
        self._groups.set_u64(8 * known.slot, address)
        old, known.address = known.address, address
        self._native.heap.retire(old)

    def delete_group(self, group: int) -> None:
        super().delete_group(group)
        known = self._group_of.pop(group)
        self._native.heap.retire(known.address)
        self._group_numbers.retire(known.slot)

    def reset(self) -> None:
        for group in list(self.groups):
            self._uses_of_group.pop(group, None)
            self.delete_group(group)
        self._uses_of_member.clear()
        for member in list(self.members):
            self.delete_member(member)
        super().reset()
