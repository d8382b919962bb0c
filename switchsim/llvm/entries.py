"""Tables and action profiles whose entries live in native memory.

The rules are those of `control_plane.tables`, whose classes these extend: what is added, changed or
removed there is mirrored in records (`llvm.records`) and in the structures that lookups read
(`llvm.index`). A change writes a new record and publishes it with one store; what it replaces is
used again after a time of grace.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcast.switchsim import ir
from kvcast.switchsim.control_plane.tables import BoundAction, Entry, Profile, Table, TableError
from kvcast.switchsim.ir import MatchValue, Range
from kvcast.switchsim.llvm.control import TablePlan
from kvcast.switchsim.llvm.index import ExactIndex, GroupIndex, Index, NoIndex, RangeIndex
from kvcast.switchsim.llvm.layout import (
    MEMBER_ARGUMENTS,
    TO_ACTION,
    TO_GROUP,
    TO_MEMBER,
    align,
    pack_value,
)
from kvcast.switchsim.llvm.memory import Region, Slots
from kvcast.switchsim.llvm.records import SPARE_RECORDS, Native, NativeEntry, Records

_HEAD = struct.Struct("<IIIIqQ")


class _Mirror:
    """What `Table` calls its index: it keeps records and index in step with the entries."""

    def __init__(self, table: NativeTable, index: Index) -> None:
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


# --- tables and profiles ------------------------------------------------------------------------


class NativeTable(Table):
    """A table that compiled code looks things up in."""

    _index: _Mirror

    def __init__(
        self,
        plan: TablePlan,
        native: Native,
        actions: Sequence[ir.Action],
        profile: NativeProfile | None,
    ) -> None:
        self.plan = plan
        self.native = native
        self.records = Records(native, plan)
        self._numbers = {actions[n].name: n for n in reversed(plan.actions)}
        self._native_profile = profile
        super().__init__(plan.spec, actions, profile)

    def _new_index(self) -> _Mirror:
        index: Index
        if self.plan.inline or (not self.spec.key and self.spec.action_profile is None):
            index = NoIndex()
        else:
            match self.spec.match:
                case "exact":
                    index = ExactIndex(self.records)
                case "lpm":
                    index = GroupIndex(self.records, ranked=False)
                case "ternary":
                    index = GroupIndex(self.records, ranked=True)
                case _:
                    index = RangeIndex(self.records)
        return _Mirror(self, index)

    def _new_entry(self, handle: int, key: tuple[MatchValue, ...], priority: int) -> Entry:
        if not -(1 << 63) <= priority < 1 << 63:
            raise TableError(f"{self.name}: {priority} is not a priority")
        return NativeEntry(handle, key, priority, self.native.heap)

    def _pointed(self, entry: Entry) -> None:
        assert isinstance(entry, NativeEntry)
        if entry.record:
            _, value, mask = self._canonical(entry.key)
            self._index.change(entry, value, mask)

    def _default_changed(self) -> None:
        default = self._default
        if default is None:
            self.records.set_default(None)
        else:
            words = bytes(8 * self.plan.record.words)
            self.records.set_default(self._record(words, default, 0, 0, 0, 0, 0, b""))

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


@dataclass(slots=True)
class _GroupState:
    slot: int
    address: int
    members: tuple[int, ...] = field(default=())


class NativeProfile(Profile):
    """An action profile: members have slots that name their records, groups have member lists."""

    def __init__(self, number: int, program: ir.Program, native: Native) -> None:
        super().__init__(number, program)
        spec = program.action_profiles[number]
        self._native = native
        self._action_numbers = {program.actions[n].name: n for n in self.action_numbers}
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
        self._native.reclaimer.fence()
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
