"""Match-action tables and action profiles at work: lookup, and what follows from it.

This module owns the way from a packet's key to an action and to the number of the next node. The
entries and the control plane's rules are `control_plane.tables`. Actions are only functions here.

A key is looked up as one integer, its fields side by side. The entries of an exact table are a
dictionary; those of the others are tried one after the other, the best first: the one with the
longest prefix, or else with the lowest priority.
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


class _Ordered:
    """Lpm, ternary and range: the entries are tried, the best first."""

    def __init__(self, key: Sequence[KeyField], *, longest_first: bool) -> None:
        self._fields = _field_positions(key)
        self._longest_first = longest_first
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
        insort(self._order, (entry, value, mask, ranges), key=self._rank)

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        self._order = [item for item in self._order if item[0] is not entry]

    def _rank(self, item: tuple[Entry, int, int, object]) -> tuple[int, int]:
        """Masks of an lpm table are prefixes of one field, so the greatest is the longest."""
        entry, _, mask, _ = item
        return (-mask if self._longest_first else entry.priority), entry.handle


_Index: TypeAlias = _Exact | _Ordered


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
        super().__init__(spec, actions, profile)
        self._runs = {actions[n].name: runs[n] for n in spec.actions}
        self._program_default_run = None if spec.default is None else runs[spec.default.action]
        self._chooser = profile
        self._key_of = _key_function(layout, spec.key)
        self._next_by_action = dict(zip(self._names, spec.next_by_action, strict=True))
        self._meter = meter

    # --- the data plane ---------------------------------------------------------------------

    def apply(self, phv: Phv) -> int | None:
        """Look up, run the action, and give the number of the next node."""
        spec, action, runs = self.spec, self._default, self._runs
        entry = self._index.find(self._key_of(phv)) if self.entries else None
        if entry is not None:
            self._count(entry, phv)
            action = entry.action
            if self._chooser is not None:
                action, runs = self._chooser.chosen(phv, entry), self._chooser.runs
        if action is None:  # no default entry; or an empty group, which is a miss for `by_action`
            return spec.next_hit if entry is not None and spec.by_hit else spec.next_miss
        run = self._program_default_run if action is self._program_default else runs[action.name]
        assert run is not None
        run(phv, action.arguments)
        if spec.by_hit:
            return spec.next_hit if entry is not None else spec.next_miss
        return self._next_by_action.get(action.name, spec.next_miss)

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
        return _Ordered(self.spec.key, longest_first=self.spec.match == "lpm")

    def _new_entry(self, handle: int, key: tuple[MatchValue, ...], priority: int) -> Entry:
        return Entry(handle, key, priority, meter=Meter())


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

    def key_of(p: Phv) -> int:
        return sum((p[slot] & mask) << shift for slot, valid, shift, mask in parts if p[valid])

    return key_of
