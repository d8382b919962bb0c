"""Match-action tables and action profiles at work: lookup, and what follows from it.

This module owns the way from a packet's key to an action and to the next node. The entries and
the control plane's rules are `control_plane.tables`. It knows actions only as functions, and
successors only as objects that the switch gives it.

A key is looked up as one integer, its fields side by side. The entries of an exact table are a
dictionary; those of the others are tried one after the other, the best first: the one with the
longest prefix, or else with the lowest priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from kvcast.switchsim import hashing
from kvcast.switchsim.control_plane import tables
from kvcast.switchsim.control_plane.tables import BoundAction, Entry
from kvcast.switchsim.ir import Action as ActionSpec
from kvcast.switchsim.ir import KeyField, MatchValue, Range
from kvcast.switchsim.ir import Table as TableSpec
from kvcast.switchsim.reference.actions import Actions, Step
from kvcast.switchsim.reference.externs import Meter
from kvcast.switchsim.reference.phv import INGRESS_LENGTH, NOW_US, Layout, Phv


class Node(Protocol):
    """A control node: `apply` runs it on a packet and gives the next one."""

    @property
    def apply(self) -> Callable[[Phv], Node | None]: ...


class _Entry(tables.Entry):
    """An entry with what a packet that hits it does."""

    __slots__ = ("next", "run")
    meter: Meter

    def __init__(self, handle: int, key: tuple[MatchValue, ...], priority: int) -> None:
        super().__init__(handle, key, priority, meter=Meter())
        self.run: Step | None = None
        self.next: Node | None = None


class Profile(tables.Profile):
    """An action profile that chooses members for packets."""

    def __init__(self, number: int, actions: Actions, runs: Sequence[Step]) -> None:
        super().__init__(number, actions.program)
        spec = actions.program.action_profiles[number]
        self.runs = {actions.program.actions[n].name: runs[n] for n in self.action_numbers}
        if spec.selector is not None:
            self._pack = actions.packer(spec.selector.fields)
            self._hash = hashing.make(spec.selector.algorithm)

    def choose(self, phv: Phv, group: int) -> BoundAction | None:
        """The member of the group for this packet; None if the group is empty."""
        members = self.groups[group]
        if not members:
            return None
        return self.members[members[self._hash(self._pack(phv, b"")) % len(members)]]


# --- lookup ---------------------------------------------------------------------------------


class _Exact:
    """Every bit of the key counts."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self.find: Callable[[int], _Entry | None] = self._entries.get

    def add(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, _Entry)
        self._entries[value] = entry

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, _Entry)
        del self._entries[value]


class _Ordered:
    """Lpm, ternary and range: the entries are tried, the best first."""

    def __init__(self, key: Sequence[KeyField], *, longest_first: bool) -> None:
        self._fields = _field_positions(key)
        self._longest_first = longest_first
        self._order: list[tuple[_Entry, int, int, tuple[tuple[int, int, int, int], ...]]] = []

    def find(self, key: int) -> _Entry | None:
        for entry, value, mask, ranges in self._order:
            if key & mask == value and all(
                low <= (key >> shift) & full <= high for shift, full, low, high in ranges
            ):
                return entry
        return None

    def add(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, _Entry)
        ranges = tuple(
            (shift, full, v.low, v.high)
            for v, (shift, full) in zip(entry.key, self._fields, strict=True)
            if isinstance(v, Range)
        )
        insort(self._order, (entry, value, mask, ranges), key=self._rank)

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        self._order = [item for item in self._order if item[0] is not entry]

    def _rank(self, item: tuple[_Entry, int, int, object]) -> tuple[int, int]:
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
    ) -> None:
        self._runs = {actions[n].name: runs[n] for n in spec.actions}
        self._program_default_run = None if spec.default is None else runs[spec.default.action]
        self._chooser = profile
        self._key_of = _key_function(layout, spec.key)
        self._default_run: Step | None = None
        self._default_next: Node | None = None
        super().__init__(spec, actions, profile)

    def link(
        self,
        next_by_action: Sequence[Node | None],
        next_hit: Node | None,
        next_miss: Node | None,
        meter_store: Callable[[Phv, Sequence[int], int], None] | None,
        meter_unit: str,
    ) -> None:
        """The second half of construction: successors, where the direct meter reports, and the
        entries that the program brings."""
        self._next_by_action = dict(zip(self._names, next_by_action, strict=True))
        self._next_hit = next_hit
        self._next_miss = next_miss
        self._meter_store = meter_store
        self._meter_unit_packets = meter_unit == "packets"
        self.fill()

    # --- the data plane ---------------------------------------------------------------------

    def apply(self, phv: Phv) -> Node | None:
        """Look up, run the action, and give the next node."""
        entry = self._index.find(self._key_of(phv)) if self.entries else None
        if entry is None:
            default, run = self._default, self._default_run
            if default is None or run is None:
                return self._next_miss
            run(phv, default.arguments)
            return self._default_next
        if self.has_counters:
            entry.packets += 1
            entry.bytes += phv[INGRESS_LENGTH]
        if self._meter_store is not None:
            amount = 1 if self._meter_unit_packets else phv[INGRESS_LENGTH]
            self._meter_store(phv, (), entry.meter.execute(amount, phv[NOW_US]))
        if self.spec.support_timeout:
            entry.last_hit_us = phv[NOW_US]
        action, run = entry.action, entry.run
        if action is None or run is None:
            return self._apply_indirect(phv, entry)
        run(phv, action.arguments)
        return entry.next

    def _apply_indirect(self, phv: Phv, entry: Entry) -> Node | None:
        """Run the member's action. An empty group does nothing and ends as a miss."""
        profile = self._chooser
        assert profile is not None
        if entry.member is not None:
            action: BoundAction | None = profile.members[entry.member]
        else:
            assert entry.group is not None
            action = profile.choose(phv, entry.group)
        if action is None:
            return self._next_hit if self.spec.by_hit else self._next_miss
        profile.runs[action.name](phv, action.arguments)
        return self._successor(action.name)

    def _successor(self, action: str) -> Node | None:
        return self._next_hit if self.spec.by_hit else self._next_by_action[action]

    # --- what the control plane has changed -------------------------------------------------

    def _new_index(self) -> _Index:
        if self.spec.match == "exact":
            return _Exact()
        return _Ordered(self.spec.key, longest_first=self.spec.match == "lpm")

    def _new_entry(self, handle: int, key: tuple[MatchValue, ...], priority: int) -> _Entry:
        return _Entry(handle, key, priority)

    def _pointed(self, entry: Entry) -> None:
        assert isinstance(entry, _Entry)
        if entry.action is not None:
            entry.run = self._runs[entry.action.name]
            entry.next = self._successor(entry.action.name)

    def _default_changed(self) -> None:
        default = self._default
        if default is None:
            self._default_run = None
            return
        if self.spec.by_hit:
            following = self._next_miss
        else:
            following = self._next_by_action.get(default.name, self._next_miss)
        programmed = default is self._program_default and self._program_default_run is not None
        run = self._program_default_run if programmed else self._runs[default.name]
        assert run is not None
        self._default_run, self._default_next = run, following


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
