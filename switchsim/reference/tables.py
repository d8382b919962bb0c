"""Match-action tables and action profiles.

This module owns the entries, the lookup and the control-plane rules of tables (sizes, duplicate
keys, const tables), as behavioral-model's match_tables.cpp and match_units.cpp have them. It
knows actions only as functions, and successors only as objects that the switch gives it.

Priorities are those of BMv2: of the entries of a ternary or range table that match, the one with
the LOWEST number wins, and among equals the oldest. P4Runtime has it the other way round; the
server turns them.

A key is looked up as one integer, its fields side by side. An exact table is one dictionary; lpm
has one per prefix length, the longest first; ternary has one per mask, the one with the lowest
priority first; range is a list in order of priority.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvcast.switchsim.ir import (
    VALID,
    ActionProfile,
    Exact,
    KeyField,
    Lpm,
    MatchValue,
    ProgramError,
    Range,
    Ternary,
)
from kvcast.switchsim.ir import Action as ActionSpec
from kvcast.switchsim.ir import Table as TableSpec
from kvcast.switchsim.reference import hashing
from kvcast.switchsim.reference.actions import Actions, Step
from kvcast.switchsim.reference.externs import Meter, Rate
from kvcast.switchsim.reference.phv import INGRESS_LENGTH, NOW_US, Layout, Phv

__all__ = [
    "BadAction",
    "BadKey",
    "ConstTable",
    "DuplicateEntry",
    "Entry",
    "Exact",
    "Lpm",
    "MatchValue",
    "NoSuchEntry",
    "NoSuchMember",
    "Profile",
    "Range",
    "StillUsed",
    "Table",
    "TableError",
    "TableFull",
    "Ternary",
]


class Node(Protocol):
    """A control node: `apply` runs it on a packet and gives the next one."""

    @property
    def apply(self) -> Callable[[Phv], Node | None]: ...


class TableError(ValueError):
    """The control plane asked for something that the table refuses."""


class TableFull(TableError):  # noqa: N818
    pass


class DuplicateEntry(TableError):  # noqa: N818
    pass


class NoSuchEntry(TableError):  # noqa: N818
    pass


class ConstTable(TableError):  # noqa: N818
    """The entries, or the default entry, are const."""


class BadKey(TableError):  # noqa: N818
    """The key does not suit the table: number, kinds or widths of its fields."""


class BadAction(TableError):  # noqa: N818
    """The table does not have this action, or the arguments do not suit it."""


class NoSuchMember(TableError):  # noqa: N818
    """The action profile has no such member or group."""


class StillUsed(TableError):  # noqa: N818
    """A member or group that entries or groups refer to cannot be deleted."""


@dataclass(slots=True)
class BoundAction:
    """An action with its arguments, ready to run."""

    name: str
    arguments: tuple[int, ...]
    run: Step


@dataclass(slots=True)
class Entry:
    """One entry. Read freely; change it through the table.

    `action` is None in an entry of an indirect table, which has `member` or `group` instead.
    """

    handle: int
    key: tuple[MatchValue, ...]
    priority: int
    action: BoundAction | None
    next: Node | None
    member: int | None = None
    group: int | None = None
    packets: int = 0
    bytes: int = 0
    last_hit_us: int = 0
    meter: Meter = field(default_factory=Meter)


@dataclass(slots=True)
class DefaultAction:
    action: BoundAction
    next: Node | None


class ActionTable:
    """The actions that a table or an action profile offers, by name."""

    def __init__(self, specs: Sequence[ActionSpec], runs: Sequence[Step], where: str) -> None:
        self.where = where
        self.by_name = {s.name: (s, run) for s, run in zip(specs, runs, strict=True)}

    def bind(self, name: str, arguments: Sequence[int]) -> BoundAction:
        try:
            spec, run = self.by_name[name]
        except KeyError:
            raise BadAction(f"{self.where} has no action {name!r}") from None
        if len(arguments) != len(spec.parameters):
            raise BadAction(f"{name} takes {len(spec.parameters)} arguments, not {len(arguments)}")
        for value, parameter in zip(arguments, spec.parameters, strict=True):
            if not 0 <= value < 1 << parameter.width:
                raise BadAction(f"{name}: {parameter.name}={value} exceeds {parameter.width} bits")
        return BoundAction(name, tuple(arguments), run)


# --- action profiles ------------------------------------------------------------------------


class Profile:
    """An action profile: members (actions) and, with a selector, groups of members.

    Numbers of members and groups are the caller's choice.
    """

    def __init__(self, spec: ActionProfile, actions: Actions, choices: ActionTable) -> None:
        self.name = spec.name
        self.size = spec.size
        self.has_selector = spec.selector is not None
        self.members: dict[int, BoundAction] = {}
        self.groups: dict[int, tuple[int, ...]] = {}
        self._choices = choices
        self._uses_of_member: dict[int, int] = {}
        self._uses_of_group: dict[int, int] = {}
        if spec.selector is not None:
            self._pack = actions.packer(spec.selector.fields)
            self._hash = hashing.make(spec.selector.algorithm)

    def add_member(self, member: int, action: str, arguments: Sequence[int] = ()) -> None:
        if member in self.members:
            raise DuplicateEntry(f"{self.name} has a member {member} already")
        if len(self.members) >= self.size:
            raise TableFull(f"{self.name} is full ({self.size} members)")
        self.members[member] = self._choices.bind(action, arguments)

    def modify_member(self, member: int, action: str, arguments: Sequence[int] = ()) -> None:
        self._check_member(member)
        self.members[member] = self._choices.bind(action, arguments)

    def delete_member(self, member: int) -> None:
        self._check_member(member)
        if self._uses_of_member.get(member) or any(member in g for g in self.groups.values()):
            raise StillUsed(f"member {member} of {self.name} is in use")
        del self.members[member]

    def set_group(self, group: int, members: Sequence[int]) -> None:
        """Create or replace a group. A member that is named twice is chosen twice as often."""
        if not self.has_selector:
            raise BadAction(f"{self.name} has no selector, so no groups")
        for member in members:
            self._check_member(member)
        self.groups[group] = tuple(sorted(members))

    def delete_group(self, group: int) -> None:
        self._check_group(group)
        if self._uses_of_group.get(group):
            raise StillUsed(f"group {group} of {self.name} is in use")
        del self.groups[group]

    def reset(self) -> None:
        self.members.clear()
        self.groups.clear()
        self._uses_of_member.clear()
        self._uses_of_group.clear()

    def choose(self, phv: Phv, group: int) -> BoundAction | None:
        """The member of the group for this packet; None if the group is empty."""
        members = self.groups[group]
        if not members:
            return None
        return self.members[members[self._hash(self._pack(phv, b"")) % len(members)]]

    def use(self, member: int | None, group: int | None, change: int) -> None:
        """A table entry starts (+1) or ceases (-1) to refer to a member or a group."""
        if member is not None:
            if change > 0:
                self._check_member(member)
            self._uses_of_member[member] = self._uses_of_member.get(member, 0) + change
        if group is not None:
            if change > 0:
                self._check_group(group)
            self._uses_of_group[group] = self._uses_of_group.get(group, 0) + change

    def _check_member(self, member: int) -> None:
        if member not in self.members:
            raise NoSuchMember(f"{self.name} has no member {member}")

    def _check_group(self, group: int) -> None:
        if group not in self.groups:
            raise NoSuchMember(f"{self.name} has no group {group}")


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


class _Lpm:
    """Masks are prefixes of one field, so the greatest mask is the longest prefix."""

    def __init__(self) -> None:
        self._by_mask: dict[int, dict[int, Entry]] = {}
        self._order: list[tuple[int, dict[int, Entry]]] = []

    def find(self, key: int) -> Entry | None:
        for mask, entries in self._order:
            entry = entries.get(key & mask)
            if entry is not None:
                return entry
        return None

    def add(self, entry: Entry, value: int, mask: int) -> None:
        self._by_mask.setdefault(mask, {})[value] = entry
        self._arrange()

    def remove(self, entry: Entry, value: int, mask: int) -> None:
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
        self._by_mask: dict[int, dict[int, list[Entry]]] = {}
        self._best: dict[int, tuple[int, int]] = {}
        self._order: list[tuple[tuple[int, int], int, dict[int, list[Entry]]]] = []

    def find(self, key: int) -> Entry | None:
        found: Entry | None = None
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
        entries = self._by_mask.setdefault(mask, {}).setdefault(value, [])
        insort(entries, entry, key=_rank)
        if mask not in self._best or _rank(entry) < self._best[mask]:
            self._best[mask] = _rank(entry)
            self._arrange()

    def remove(self, entry: Entry, value: int, mask: int) -> None:
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
        self._order: list[tuple[Entry, int, int, tuple[tuple[int, int, int, int], ...]]] = []

    def find(self, key: int) -> Entry | None:
        for entry, value, mask, ranges in self._order:
            if key & mask == value:
                for shift, full, low, high in ranges:
                    if not low <= (key >> shift) & full <= high:
                        break
                else:
                    return entry
        return None

    def add(self, entry: Entry, value: int, mask: int) -> None:
        ranges = tuple(
            (shift, full, v.low, v.high)
            for v, (shift, full) in zip(entry.key, self._fields, strict=True)
            if isinstance(v, Range)
        )
        insort(self._order, (entry, value, mask, ranges), key=lambda item: _rank(item[0]))

    def remove(self, entry: Entry, value: int, mask: int) -> None:
        self._order = [item for item in self._order if item[0] is not entry]


def _rank(entry: Entry) -> tuple[int, int]:
    return entry.priority, entry.handle


_Index: TypeAlias = _Exact | _Lpm | _Ternary | _Range


class Table:
    """A match-action table, and the control node that applies it."""

    def __init__(
        self,
        spec: TableSpec,
        layout: Layout,
        actions: Sequence[ActionSpec],
        runs: Sequence[Step],
        profile: Profile | None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.size = spec.size
        self.is_const = spec.const_entries
        self.has_counters = spec.with_counters
        self.has_meters = spec.meter is not None
        self.profile = profile
        self.entries: dict[int, Entry] = {}
        """By handle, oldest first."""
        self._actions = ActionTable(
            [actions[n] for n in spec.actions], [runs[n] for n in spec.actions], spec.name
        )
        self._default_spec = spec.default
        self._default_action_name: str | None = None
        if spec.default is not None:
            # p4c lets the default be an action that the table does not list.
            chosen = actions[spec.default.action]
            self._default_action_name = chosen.name
            self._default_bound = BoundAction(
                chosen.name, spec.default.arguments, runs[spec.default.action]
            )
        self._names = [actions[n].name for n in spec.actions]
        self._key_of = _key_function(layout, spec.key)
        self._fields = _field_positions(spec.key)
        self._handles: dict[tuple[tuple[MatchValue, ...], int], int] = {}
        self._next_handle = 0
        self._index = self._new_index()
        self._default: DefaultAction | None = None
        self._next_miss: Node | None = None
        self._next_hit: Node | None = None
        self._next_by_action: dict[str, Node | None] = {}
        self._meter_store: Callable[[Phv, Sequence[int], int], None] | None = None
        self._meter_unit_packets = False
        self.apply: Callable[[Phv], Node | None] = self._apply_general

    def link(
        self,
        next_by_action: Sequence[Node | None],
        next_hit: Node | None,
        next_miss: Node | None,
        meter_store: Callable[[Phv, Sequence[int], int], None] | None,
        meter_unit: str,
    ) -> None:
        """The second half of construction: successors, and where the direct meter reports."""
        self._next_by_action = dict(zip(self._names, next_by_action, strict=True))
        self._next_hit = next_hit
        self._next_miss = next_miss
        self._meter_store = meter_store
        self._meter_unit_packets = meter_unit == "packets"
        self.reset_default()
        try:
            for entry in self.spec.entries:
                action = self._action_of(entry.action)
                self._insert(entry.key, entry.priority, action, None, None, entry.arguments)
        except TableError as error:
            raise ProgramError(f"const entries of {self.name}: {error}") from error

    @property
    def action_names(self) -> tuple[str, ...]:
        """The actions that an entry may name."""
        return tuple(self._names)

    def _action_of(self, number: int) -> str:
        if number not in self.spec.actions:
            raise BadAction(f"{self.name} does not have the action of an entry")
        return self._names[self.spec.actions.index(number)]

    # --- the data plane ---------------------------------------------------------------------

    def _apply_general(self, phv: Phv) -> Node | None:
        """Look up, run the action, and give the next node."""
        entry = self._index.find(self._key_of(phv)) if self.entries else None
        if entry is None:
            default = self._default
            if default is None:
                return self._next_miss
            default.action.run(phv, default.action.arguments)
            return default.next
        if self.has_counters:
            entry.packets += 1
            entry.bytes += phv[INGRESS_LENGTH]
        if self._meter_store is not None:
            amount = 1 if self._meter_unit_packets else phv[INGRESS_LENGTH]
            self._meter_store(phv, (), entry.meter.execute(amount, phv[NOW_US]))
        if self.spec.support_timeout:
            entry.last_hit_us = phv[NOW_US]
        action, following = entry.action, entry.next
        if action is None:
            action, following = self._resolve(phv, entry)
            if action is None:
                return following
        action.run(phv, action.arguments)
        return following

    def _resolve(self, phv: Phv, entry: Entry) -> tuple[BoundAction | None, Node | None]:
        """The action of an indirect entry. An empty group does nothing and ends as a miss."""
        assert self.profile is not None
        if entry.member is not None:
            action: BoundAction | None = self.profile.members[entry.member]
        else:
            assert entry.group is not None
            action = self.profile.choose(phv, entry.group)
        if action is None:
            return None, self._next_hit if self.spec.by_hit else self._next_miss
        return action, self._successor(action.name)

    def _successor(self, action: str) -> Node | None:
        return self._next_hit if self.spec.by_hit else self._next_by_action[action]

    # --- the control plane ------------------------------------------------------------------

    def add(
        self,
        key: Sequence[MatchValue],
        priority: int,
        action: str,
        arguments: Sequence[int] = (),
    ) -> int:
        """Add an entry and give its handle. The lowest priority wins (ternary and range only)."""
        self._check_writable()
        if self.profile is not None:
            raise BadAction(f"{self.name} takes members or groups, not actions")
        return self._insert(key, priority, action, None, None, arguments)

    def add_member(self, key: Sequence[MatchValue], priority: int, member: int) -> int:
        self._check_writable()
        return self._insert(key, priority, None, member, None)

    def add_group(self, key: Sequence[MatchValue], priority: int, group: int) -> int:
        self._check_writable()
        return self._insert(key, priority, None, None, group)

    def _insert(
        self,
        key: Sequence[MatchValue],
        priority: int,
        action: str | None,
        member: int | None,
        group: int | None,
        arguments: Sequence[int] = (),
    ) -> int:
        canonical, value, mask = self._canonical(key)
        rank = priority if self.spec.match in ("ternary", "range") else 0
        if (canonical, rank) in self._handles:
            raise DuplicateEntry(f"{self.name} has this key already")
        if len(self.entries) >= self.size:
            raise TableFull(f"{self.name} is full ({self.size} entries)")
        entry = self._new_entry(self._next_handle, canonical, rank)
        self._point(entry, action, arguments, member, group)
        self._next_handle += 1
        self.entries[entry.handle] = entry
        self._handles[canonical, rank] = entry.handle
        self._index.add(entry, value, mask)
        return entry.handle

    def _new_entry(self, handle: int, key: tuple[MatchValue, ...], priority: int) -> Entry:
        return Entry(handle, key, priority, None, None)

    def _point(
        self,
        entry: Entry,
        action: str | None,
        arguments: Sequence[int],
        member: int | None,
        group: int | None,
    ) -> None:
        """Make the entry run an action, or refer to a member or a group."""
        if action is not None:
            entry.action = self._actions.bind(action, arguments)
            entry.next = self._successor(action)
            return
        if self.profile is None:
            raise BadAction(f"{self.name} has no action profile")
        self.profile.use(member, group, +1)
        self.profile.use(entry.member, entry.group, -1)
        entry.member, entry.group = member, group

    def modify(self, handle: int, action: str, arguments: Sequence[int] = ()) -> None:
        """Change the action of an entry; its counter and meter stay."""
        self._check_writable()
        if self.profile is not None:
            raise BadAction(f"{self.name} takes members or groups, not actions")
        self._point(self.get(handle), action, arguments, None, None)

    def modify_member(self, handle: int, member: int) -> None:
        self._check_writable()
        self._point(self.get(handle), None, (), member, None)

    def modify_group(self, handle: int, group: int) -> None:
        self._check_writable()
        self._point(self.get(handle), None, (), None, group)

    def delete(self, handle: int) -> None:
        self._check_writable()
        self._remove(self.get(handle))

    def _remove(self, entry: Entry) -> None:
        _, value, mask = self._canonical(entry.key)
        self._index.remove(entry, value, mask)
        del self.entries[entry.handle]
        del self._handles[entry.key, entry.priority]
        if self.profile is not None:
            self.profile.use(entry.member, entry.group, -1)

    def clear(self) -> None:
        """Delete all entries; the default entry stays."""
        self._check_writable()
        for entry in list(self.entries.values()):
            self._remove(entry)

    def get(self, handle: int) -> Entry:
        try:
            return self.entries[handle]
        except KeyError:
            raise NoSuchEntry(f"{self.name} has no entry {handle}") from None

    def find(self, key: Sequence[MatchValue], priority: int = 0) -> Entry:
        """The entry with exactly this key (and, in a ternary or range table, priority)."""
        canonical, _, _ = self._canonical(key)
        rank = priority if self.spec.match in ("ternary", "range") else 0
        try:
            return self.entries[self._handles[canonical, rank]]
        except KeyError:
            raise NoSuchEntry(f"{self.name} has no entry with this key") from None

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self.entries.values()))

    def __len__(self) -> int:
        return len(self.entries)

    # --- the default entry ------------------------------------------------------------------

    @property
    def default_entry(self) -> BoundAction | None:
        return None if self._default is None else self._default.action

    def set_default(self, action: str, arguments: Sequence[int] = ()) -> None:
        spec = self._default_spec
        if spec is not None:
            if spec.const_entry:
                raise ConstTable(f"the default entry of {self.name} is const")
            if spec.const_action and action != self._default_action_name:
                raise ConstTable(f"the default action of {self.name} is const")
        if self.profile is not None:
            raise BadAction(f"{self.name} is indirect: its default entry cannot be changed")
        self._make_default(self._actions.bind(action, arguments))

    def reset_default(self) -> None:
        """Back to what the program says."""
        if self._default_spec is None:
            self._default = None
        else:
            self._make_default(self._default_bound)

    def _make_default(self, action: BoundAction) -> None:
        if self.spec.by_hit:
            following = self._next_miss
        else:
            following = self._next_by_action.get(action.name, self._next_miss)
        self._default = DefaultAction(action, following)
        if not self.spec.key and self.profile is None:
            # Most of p4c's tables have no key and stand for a block of statements.
            run, arguments = action.run, action.arguments

            def apply_default(phv: Phv) -> Node | None:
                run(phv, arguments)
                return following

            self.apply = apply_default

    # --- direct counters and meters -----------------------------------------------------------

    def read_counter(self, handle: int) -> tuple[int, int]:
        """(packets, bytes)"""
        entry = self._counted(handle)
        return entry.packets, entry.bytes

    def write_counter(self, handle: int, packets: int, bytes_: int) -> None:
        entry = self._counted(handle)
        entry.packets, entry.bytes = packets, bytes_

    def reset_counters(self) -> None:
        for entry in self.entries.values():
            entry.packets = entry.bytes = 0

    def _counted(self, handle: int) -> Entry:
        if not self.has_counters:
            raise TableError(f"{self.name} has no direct counters")
        return self.get(handle)

    def configure_meter(self, handle: int, rates: Sequence[Rate]) -> None:
        """Set the rates of an entry's direct meter; no rates at all make it say green."""
        if not self.has_meters:
            raise TableError(f"{self.name} has no direct meters")
        entry = self.get(handle)
        if rates:
            entry.meter.configure(rates)
        else:
            entry.meter.clear()

    # --- keys -------------------------------------------------------------------------------

    def _check_writable(self) -> None:
        if self.is_const:
            raise ConstTable(f"the entries of {self.name} are const")

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

    def _canonical(self, key: Sequence[MatchValue]) -> tuple[tuple[MatchValue, ...], int, int]:
        """The key with don't-care bits cleared, and its (value, mask) as one integer each."""
        if len(key) != len(self.spec.key):
            raise BadKey(f"{self.name} has {len(self.spec.key)} key fields, not {len(key)}")
        values: list[MatchValue] = []
        value = mask = 0
        for v, spec, (shift, full) in zip(key, self.spec.key, self._fields, strict=True):
            clean, field_value, field_mask = _clean(v, spec, full, self.name)
            values.append(clean)
            value |= field_value << shift
            mask |= field_mask << shift
        return tuple(values), value, mask


def _clean(v: MatchValue, spec: KeyField, full: int, table: str) -> tuple[MatchValue, int, int]:
    """(canonical form, value, mask) of one key field; BadKey if it does not suit."""
    where = f"{table}, key {spec.name}"
    match v:
        case Exact(value) if spec.match == "exact":
            _fits(value, full, where)
            return v, value, full
        case Lpm(value, length) if spec.match == "lpm":
            _fits(value, full, where)
            if not 0 <= length <= spec.width:
                raise BadKey(f"{where}: prefix length {length} of {spec.width} bits")
            mask = full & ~((1 << (spec.width - length)) - 1)
            return Lpm(value & mask, length), value & mask, mask
        case Ternary(value, mask) if spec.match == "ternary":
            _fits(value, full, where)
            _fits(mask, full, where)
            return Ternary(value & mask, mask), value & mask, mask
        case Range(low, high) if spec.match == "range":
            _fits(low, full, where)
            _fits(high, full, where)
            if low > high:
                raise BadKey(f"{where}: the range {low}..{high} is empty")
            return v, 0, 0
        case _:
            raise BadKey(f"{where}: {type(v).__name__} given, {spec.match} is due")


def _fits(value: int, full: int, where: str) -> None:
    if not 0 <= value <= full:
        raise BadKey(f"{where}: {value} exceeds {full.bit_length()} bits")


def _field_positions(key: Sequence[KeyField]) -> list[tuple[int, int]]:
    """(shift, all ones) of each key field in the integer that is looked up."""
    left = sum(k.width for k in key)
    positions: list[tuple[int, int]] = []
    for k in key:
        left -= k.width
        positions.append((left, (1 << k.width) - 1))
    return positions


def _static_mask(key: Sequence[KeyField], positions: Sequence[tuple[int, int]], full: int) -> int:
    mask = full
    for k, (shift, ones) in zip(key, positions, strict=True):
        if k.mask is not None:
            mask &= ~((ones & ~k.mask) << shift)
    return mask


def _key_function(layout: Layout, key: Sequence[KeyField]) -> Callable[[Phv], int]:
    """Key fields side by side as one integer. A field of an invalid header counts as 0."""
    positions = _field_positions(key)
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
