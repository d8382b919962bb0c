"""Match-action tables and action profiles at work: lookup, and what follows from it.

This module owns the way from a packet's key to an action and to the next node. The entries and
the control plane's rules are `control_plane.tables`. It knows actions only as functions, and
successors only as objects that the switch gives it.

A key is looked up as one integer, its fields side by side. An exact table is one dictionary; lpm
has one per prefix length, the longest first; ternary has one per mask, the one with the lowest
priority first; range is a list in order of priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from kvcast.switchsim import hashing
from kvcast.switchsim.control_plane import tables
from kvcast.switchsim.control_plane.tables import BoundAction, Entry, field_positions
from kvcast.switchsim.ir import VALID, KeyField, MatchValue, Range
from kvcast.switchsim.ir import Action as ActionSpec
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


class _Lpm:
    """Masks are prefixes of one field, so the greatest mask is the longest prefix."""

    def __init__(self) -> None:
        self._by_mask: dict[int, dict[int, _Entry]] = {}
        self._order: list[tuple[int, dict[int, _Entry]]] = []

    def find(self, key: int) -> _Entry | None:
        for mask, entries in self._order:
            entry = entries.get(key & mask)
            if entry is not None:
                return entry
        return None

    def add(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, _Entry)
        self._by_mask.setdefault(mask, {})[value] = entry
        self._arrange()

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, _Entry)
        del self._by_mask[mask][value]
        if not self._by_mask[mask]:
            del self._by_mask[mask]
        self._arrange()

    def _arrange(self) -> None:
        if len(self._order) != len(self._by_mask):
            self._order = sorted(self._by_mask.items(), key=lambda item: -item[0])


class _Ternary:
    """One dictionary per mask; each holds, per masked value, its entries best first."""

    def __init__(self) -> None:
        self._by_mask: dict[int, dict[int, list[_Entry]]] = {}
        self._best: dict[int, tuple[int, int]] = {}
        self._order: list[tuple[tuple[int, int], int, dict[int, list[_Entry]]]] = []

    def find(self, key: int) -> _Entry | None:
        found: _Entry | None = None
        rank = (1 << 62, 0)
        for best, mask, values in self._order:
            if best > rank:
                break
            entries = values.get(key & mask)
            if entries is not None:
                entry = entries[0]
                if (entry.priority, entry.handle) < rank:
                    found, rank = entry, (entry.priority, entry.handle)
        return found

    def add(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, _Entry)
        entries = self._by_mask.setdefault(mask, {}).setdefault(value, [])
        insort(entries, entry, key=_rank)
        if mask not in self._best or _rank(entry) < self._best[mask]:
            self._best[mask] = _rank(entry)
            self._arrange()

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, _Entry)
        values = self._by_mask[mask]
        values[value].remove(entry)
        if not values[value]:
            del values[value]
        if not values:
            del self._by_mask[mask]
            del self._best[mask]
            self._arrange()
        elif self._best[mask] == _rank(entry):
            self._best[mask] = min(_rank(entries[0]) for entries in values.values())
            self._arrange()

    def _arrange(self) -> None:
        self._order = sorted(
            ((self._best[mask], mask, values) for mask, values in self._by_mask.items()),
            key=lambda item: item[0],
        )


class _Range:
    """Ranges cannot be hashed: the entries are tried in order of priority."""

    def __init__(self, fields: Sequence[tuple[int, int]]) -> None:
        self._fields = fields
        self._order: list[tuple[_Entry, int, int, tuple[tuple[int, int, int, int], ...]]] = []

    def find(self, key: int) -> _Entry | None:
        for entry, value, mask, ranges in self._order:
            if key & mask == value:
                for shift, full, low, high in ranges:
                    if not low <= (key >> shift) & full <= high:
                        break
                else:
                    return entry
        return None

    def add(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, _Entry)
        ranges = tuple(
            (shift, full, v.low, v.high)
            for v, (shift, full) in zip(entry.key, self._fields, strict=True)
            if isinstance(v, Range)
        )
        insort(self._order, (entry, value, mask, ranges), key=lambda item: _rank(item[0]))

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        assert isinstance(entry, _Entry)
        self._order = [item for item in self._order if item[0] is not entry]


def _rank(entry: _Entry) -> tuple[int, int]:
    return entry.priority, entry.handle


_Index: TypeAlias = _Exact | _Lpm | _Ternary | _Range


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
        self.apply: Callable[[Phv], Node | None] = self._apply_general
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

    def _apply_general(self, phv: Phv) -> Node | None:
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
        match self.spec.match:
            case "exact":
                return _Exact()
            case "lpm":
                return _Lpm()
            case "ternary":
                return _Ternary()
            case _:
                return _Range(self._fields)

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
        if not self.spec.key and self.profile is None:
            # Most of p4c's tables have no key and stand for a block of statements.
            arguments = default.arguments

            def apply_default(phv: Phv) -> Node | None:
                run(phv, arguments)
                return following

            self.apply = apply_default


def _static_mask(key: Sequence[KeyField], positions: Sequence[tuple[int, int]], full: int) -> int:
    mask = full
    for k, (shift, ones) in zip(key, positions, strict=True):
        if k.mask is not None:
            mask &= ~((ones & ~k.mask) << shift)
    return mask


def _key_function(layout: Layout, key: Sequence[KeyField]) -> Callable[[Phv], int]:
    """Key fields side by side as one integer. A field of an invalid header counts as 0."""
    positions = field_positions(key)
    full = (1 << sum(k.width for k in key)) - 1
    mask = _static_mask(key, positions, full)
    parts: list[tuple[int, int, int, int]] = []
    for k, (shift, ones) in zip(key, positions, strict=True):
        always = k.field.field == VALID or layout.program.headers[k.field.header].metadata
        valid = -1 if always else layout.valid[k.field.header]
        parts.append((layout.slot(k.field), valid, shift, ones))
    plain = mask == full and not any(k.signed for k in key)

    if len(parts) == 1 and plain:
        slot, valid, _, _ = parts[0]
        if valid < 0:
            return lambda p: p[slot]
        return lambda p: p[slot] if p[valid] else 0

    def key_of(p: Phv) -> int:
        value = 0
        for slot, valid, shift, ones in parts:
            if valid < 0 or p[valid]:
                value |= (p[slot] & ones) << shift
        return value & mask

    return key_of
