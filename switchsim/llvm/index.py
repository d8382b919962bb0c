"""The structures in which compiled code finds entries, as the control plane changes them.

`llvm.tables` describes what lies in memory and reads it; here it is written. A change is one store
into a slot where that will do, or a new version (of the list of masks, or of ranges) and one store.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import TypeAlias

from kvcast.switchsim.llvm.records import NativeEntry, Records
from kvcast.switchsim.llvm.tables import DELETED, group_bytes

_FIRST_SLOTS = 8


class HashBlock:
    """A hash block: it grows, and says where it is by `moved`."""

    def __init__(self, table: Records, moved: Callable[[int], None]) -> None:
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
        poke(address, slots - 1)
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


def poke(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


class ExactIndex:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._block = HashBlock(records, records.publish_version)

    def add(self, entry: NativeEntry, value: int, mask: int) -> None:
        self._block.insert(entry.record)

    def change(self, entry: NativeEntry, new: int, value: int, mask: int) -> None:
        self._block.replace(entry.record, new)

    def remove(self, entry: NativeEntry, value: int, mask: int) -> None:
        self._block.remove(entry.record)


class _Group:
    """All entries of one mask: of those with one value only the best is seen."""

    def __init__(self, records: Records) -> None:
        self.entries: dict[int, list[NativeEntry]] = {}
        self.ranks: list[tuple[int, int]] = []
        """Of the best entry of each value, sorted."""
        self.pointer = 0
        """Address of the word that says where the block is; 0 before there is one."""
        self.block = HashBlock(records, self._moved)

    def _moved(self, address: int) -> None:
        if self.pointer:
            poke(self.pointer, address)


class GroupIndex:
    """Tuple space: lpm and ternary tables."""

    def __init__(self, records: Records, *, ranked: bool) -> None:
        self._records = records
        self._ranked = ranked
        self._groups: dict[int, _Group] = {}
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
        address = self._records.publish_copy(b"".join(parts))
        size = group_bytes(self._records.plan.record)
        for number, (_, group) in enumerate(order):
            group.pointer = address + 8 + number * size + 8 * words + 16


class RangeIndex:
    """All entries, the best first."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._order: list[NativeEntry] = []
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
        self._records.publish_copy(struct.pack("<Q", len(numbers)) + numbers.tobytes())


class NoIndex:
    """Entries that are part of the code."""

    def add(self, entry: NativeEntry, value: int, mask: int) -> None:
        pass

    def change(self, entry: NativeEntry, new: int, value: int, mask: int) -> None:
        pass

    def remove(self, entry: NativeEntry, value: int, mask: int) -> None:
        pass


Index: TypeAlias = ExactIndex | GroupIndex | RangeIndex | NoIndex


def _rank(entry: NativeEntry) -> tuple[int, int]:
    return entry.priority, entry.handle


def _drop(ranks: list[tuple[int, int]], rank: tuple[int, int]) -> None:
    del ranks[bisect_left(ranks, rank)]
