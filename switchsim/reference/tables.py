"""Match-action tables and action profiles at work: lookup, and what follows from it.

This module owns the way from a packet's key to an action and to the number of the next node. The
entries and the control plane's rules are `control_plane.tables`. Actions are only functions here.

A key is looked up as one integer, its fields side by side. An exact table is one dictionary; lpm
and ternary have one for each mask, those with the best entry (the longest prefix, the lowest
priority) first; the entries of a range table are tried one after the other.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvcast.switchsim import hashing
from kvcast.switchsim.control_plane import tables
from kvcast.switchsim.control_plane.tables import BoundAction, Entry
from kvcast.switchsim.ir import Action as ActionSpec
from kvcast.switchsim.ir import KeyField, MatchValue, Range
from kvcast.switchsim.ir import Table as TableSpec
from kvcast.switchsim.reference.actions import Actions, Setter, Step
from kvcast.switchsim.reference.externs import Meter
from kvcast.switchsim.reference.phv import INGRESS_LENGTH, NOW_US, Layout, Phv


class Profile(tables.Profile):
    """An action profile that chooses members for packets."""

    def __init__(self, number: int, actions: Actions, runs: Sequence[Step]) -> None:
        super().__init__(number, actions.program)
        spec = actions.program.action_profiles[number]
        self.runs = {actions.program.actions[n].name: runs[n] for n in self.action_numbers}
        if spec.selector is not None:
            self._pack = actions.packer(spec.selector.fields)
            self._hash = hashing.make(spec.selector.algorithm)

    def chosen(self, phv: Phv, entry: Entry) -> BoundAction | None:
        """The member that an entry leads this packet to; None if its group is empty."""
        if entry.member is not None:
            return self.members[entry.member]
        assert entry.group is not None
        members = self.groups[entry.group]
        if not members:
            return None
        return self.members[members[self._hash(self._pack(phv, b"")) % len(members)]]


# --- lookup ---------------------------------------------------------------------------------


class _Exact:
    """Every bit of the key counts."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self.find: Callable[[int], Entry | None] = self._entries.get

    def add(self, entry: Entry, value: int, mask: int) -> None:
        self._entries[value] = entry

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        del self._entries[value]


class _Masked:
    """Lpm and ternary: for each mask, the entries by their value, the best first."""

    def __init__(self, *, longest_first: bool) -> None:
        self._longest_first = longest_first
        self._by_mask: dict[int, dict[int, list[_Ranked]]] = {}
        self._order: list[tuple[_Rank, int, dict[int, list[_Ranked]]]] | None = None
        """(rank of its best entry, mask, entries), the best first; None: to be made anew."""

    def find(self, key: int) -> Entry | None:
        if self._order is None:
            self._order = sorted(
                (min(ranked[0][0] for ranked in values.values()), mask, values)
                for mask, values in self._by_mask.items()
            )
        found: Entry | None = None
        rank = _LAST
        for best, mask, values in self._order:
            if best > rank:
                break
            ranked = values.get(key & mask)
            if ranked is not None and ranked[0][0] < rank:
                rank, found = ranked[0]
        return found

    def add(self, entry: Entry, value: int, mask: int) -> None:
        ranked = self._by_mask.setdefault(mask, {}).setdefault(value, [])
        insort(ranked, (self._rank(entry, mask), entry))
        self._order = None

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        values = self._by_mask[mask]
        values[value].remove((self._rank(entry, mask), entry))
        if not values[value]:
            del values[value]
        if not values:
            del self._by_mask[mask]
        self._order = None

    def _rank(self, entry: Entry, mask: int) -> _Rank:
        """Masks of an lpm table are prefixes of one field, so the greatest is the longest."""
        return (-mask if self._longest_first else entry.priority), entry.handle


class _Ranges:
    """The entries are tried, that with the lowest priority first."""

    def __init__(self, key: Sequence[KeyField]) -> None:
        self._fields = _field_positions(key)
        self._order: list[tuple[Entry, int, int, tuple[tuple[int, int, int, int], ...]]] = []

    def find(self, key: int) -> Entry | None:
        for entry, value, mask, ranges in self._order:
            if key & mask == value and all(
                low <= (key >> shift) & full <= high for shift, full, low, high in ranges
            ):
                return entry
        return None

    def add(self, entry: Entry, value: int, mask: int) -> None:
        ranges = tuple(
            (shift, full, v.low, v.high)
            for v, (shift, full) in zip(entry.key, self._fields, strict=True)
            if isinstance(v, Range)
        )
        item = (entry, value, mask, ranges)
        insort(self._order, item, key=lambda item: (item[0].priority, item[0].handle))

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        self._order = [item for item in self._order if item[0] is not entry]


_Rank: TypeAlias = tuple[int, int]
_Ranked: TypeAlias = tuple[_Rank, Entry]
_LAST: _Rank = (1 << 62, 0)
_Index: TypeAlias = _Exact | _Masked | _Ranges


class Table(tables.Table):
    """A match-action table, and the control node that applies it."""

    _index: _Index

    def __init__(
        self,
        spec: TableSpec,
        layout: Layout,
        actions: Sequence[ActionSpec],
        runs: Sequence[Step],
        profile: Profile | None,
        meter: tuple[str, Setter] | None = None,
    ) -> None:
        """`runs`: what each of the program's `actions` does; `meter`: what a direct meter counts,
        and where it says its colour."""
        self._plans = {
            actions[n].name: (runs[n], spec.next_hit if spec.by_hit else following)
            for n, following in zip(spec.actions, spec.next_by_action, strict=True)
        }
        """By action of an entry that was hit: what it does, and the number of the next node."""
        self._program_default_run = None if spec.default is None else runs[spec.default.action]
        self._chooser = profile
        self._key_of = _key_function(layout, spec.key)
        self._meter = meter
        self._missed: tuple[Step, Sequence[int], int | None] = (_nothing, (), spec.next_miss)
        """What a miss does: step, its arguments, the number of the next node."""
        super().__init__(spec, actions, profile)
        self._counts = self.has_counters or meter is not None or spec.support_timeout

    # --- the data plane ---------------------------------------------------------------------

    def apply(self, phv: Phv) -> int | None:
        """Look up, run the action, and give the number of the next node."""
        entry = self._index.find(self._key_of(phv)) if self.entries else None
        if entry is None:
            run, arguments, following = self._missed
            run(phv, arguments)
            return following
        if self._counts:
            self._count(entry, phv)
        if self._chooser is not None:
            return self._indirect(entry, phv, self._chooser)
        action = entry.action
        assert action is not None
        run, following = self._plans[action.name]
        run(phv, action.arguments)
        return following

    def _indirect(self, entry: Entry, phv: Phv, profile: Profile) -> int | None:
        action = profile.chosen(phv, entry)
        if action is None:  # an empty group, which is a miss for `by_action`
            return self.spec.next_hit if self.spec.by_hit else self.spec.next_miss
        profile.runs[action.name](phv, action.arguments)
        return self._plans[action.name][1]

    def _count(self, entry: Entry, phv: Phv) -> None:
        if self.has_counters:
            entry.packets += 1
            entry.bytes += phv[INGRESS_LENGTH]
        if self._meter is not None:
            unit, store = self._meter
            assert isinstance(entry.meter, Meter)
            amount = 1 if unit == "packets" else phv[INGRESS_LENGTH]
            store(phv, (), entry.meter.execute(amount, phv[NOW_US]))
        if self.spec.support_timeout:
            entry.last_hit_us = phv[NOW_US]

    # --- what the control plane asks for ----------------------------------------------------

    def _new_index(self) -> _Index:
        if self.spec.match == "exact":
            return _Exact()
        if self.spec.match == "range":
            return _Ranges(self.spec.key)
        return _Masked(longest_first=self.spec.match == "lpm")

    def _new_entry(self, handle: int, key: tuple[MatchValue, ...], priority: int) -> Entry:
        return Entry(handle, key, priority, meter=Meter())

    def _default_changed(self) -> None:
        default, following = self._default, self.spec.next_miss
        if default is None:
            self._missed = _nothing, (), following
            return
        run = self._program_default_run
        if default is not self._program_default or run is None:
            run, _ = self._plans[default.name]
        if not self.spec.by_hit and default.name in self._plans:
            _, following = self._plans[default.name]
        self._missed = run, default.arguments, following


def _nothing(phv: Phv, arguments: Sequence[int]) -> None:
    """A miss in a table without a default entry."""


def _field_positions(key: Sequence[KeyField]) -> list[tuple[int, int]]:
    """(shift, all ones) of each key field in the integer that is looked up."""
    left = sum(k.width for k in key)
    positions: list[tuple[int, int]] = []
    for k in key:
        left -= k.width
        positions.append((left, (1 << k.width) - 1))
    return positions


def _key_function(layout: Layout, key: Sequence[KeyField]) -> Callable[[Phv], int]:
    """Key fields side by side as one integer. A field of an invalid header counts as 0."""
    parts: list[tuple[int, int, int, int]] = []
    for k, (shift, ones) in zip(key, _field_positions(key), strict=True):
        mask = ones if k.mask is None else ones & k.mask
        parts.append((layout.slot(k.field), layout.valid[k.field.header], shift, mask))
    if len(parts) == 1:
        slot, valid, _, mask = parts[0]
        return lambda p: p[slot] & mask if p[valid] else 0

    def key_of(p: Phv) -> int:
        value = 0
        for slot, valid, shift, mask in parts:
            if p[valid]:
                value |= (p[slot] & mask) << shift
        return value

    return key_of
