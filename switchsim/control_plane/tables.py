"""Match-action tables and action profiles as a controller sees them.

This module owns the entries and the control-plane rules of tables (sizes, duplicate keys, const
tables), as behavioral-model's match_tables.cpp and match_units.cpp have them. It must not know how
a packet finds an entry or what an action does: that is the engines' to add (`Index`, and the
abstract methods of `Table`).

Priorities are those of BMv2: of the entries of a ternary or range table that match, the one with
the LOWEST number wins, and among equals the oldest. P4Runtime has it the other way round; the
server turns them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvcast.switchsim.control_plane.externs import Meter, Rate
from kvcast.switchsim.ir import Action as ActionSpec
from kvcast.switchsim.ir import (
    Exact,
    KeyField,
    Lpm,
    MatchValue,
    Program,
    ProgramError,
    Range,
    Ternary,
)
from kvcast.switchsim.ir import Table as TableSpec


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


@dataclass(frozen=True, slots=True)
class BoundAction:
    """An action with its arguments."""

    name: str
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an action profile, for an entry to refer to."""

    number: int


@dataclass(frozen=True, slots=True)
class Group:
    """A group of an action profile, for an entry to refer to."""

    number: int


@dataclass(slots=True)
class Entry:
    """One entry. Read freely; change it through the table.

    `action` is None in an entry of an indirect table, which has `member` or `group` instead.
    """

    handle: int
    key: tuple[MatchValue, ...]
    priority: int
    action: BoundAction | None = None
    member: int | None = None
    group: int | None = None
    packets: int = 0
    bytes: int = 0
    last_hit_us: int = 0
    meter: Meter = field(default_factory=Meter)


class Index(Protocol):
    """Where an engine keeps entries so that packets find them. A key is one integer, its fields
    side by side, with a mask of the bits that count."""

    def add(self, entry: Entry, value: int, mask: int) -> None: ...
    def remove(self, entry: Entry, value: int, mask: int) -> None: ...


class ActionTable:
    """The actions that a table or an action profile offers, by name."""

    def __init__(self, specs: Iterable[ActionSpec], where: str) -> None:
        self.where = where
        self.by_name = {s.name: s for s in specs}

    def bind(self, name: str, arguments: Sequence[int]) -> BoundAction:
        try:
            spec = self.by_name[name]
        except KeyError:
            raise BadAction(f"{self.where} has no action {name!r}") from None
        if len(arguments) != len(spec.parameters):
            raise BadAction(f"{name} takes {len(spec.parameters)} arguments, not {len(arguments)}")
        for value, parameter in zip(arguments, spec.parameters, strict=True):
            if not 0 <= value < 1 << parameter.width:
                raise BadAction(f"{name}: {parameter.name}={value} exceeds {parameter.width} bits")
        return BoundAction(name, tuple(arguments))


# --- action profiles ------------------------------------------------------------------------


class Profile:
    """An action profile: members (actions) and, with a selector, groups of members.

    Numbers of members and groups are the caller's choice.
    """

    def __init__(self, number: int, program: Program) -> None:
        spec = program.action_profiles[number]
        self.name = spec.name
        self.size = spec.size
        self.has_selector = spec.selector is not None
        self.members: dict[int, BoundAction] = {}
        self.groups: dict[int, tuple[int, ...]] = {}
        users = [t for t in program.tables() if t.action_profile == number]
        self.action_numbers = sorted({n for t in users for n in t.actions})
        """The actions of all tables that share the profile."""
        self._choices = ActionTable([program.actions[n] for n in self.action_numbers], spec.name)
        self._uses_of_member: dict[int, int] = {}
        self._uses_of_group: dict[int, int] = {}

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


# --- tables ---------------------------------------------------------------------------------


class Table(ABC):
    """A match-action table as a controller sees it; engines say how packets find its entries."""

    def __init__(
        self, spec: TableSpec, actions: Sequence[ActionSpec], profile: Profile | None
    ) -> None:
        """The entries that the program brings come with `fill`."""
        self.spec = spec
        self.name = spec.name
        self.size = spec.size
        self.is_const = spec.const_entries
        self.has_counters = spec.with_counters
        self.has_meters = spec.meter is not None
        self.profile = profile
        self.entries: dict[int, Entry] = {}
        """By handle, oldest first."""
        self._actions = ActionTable([actions[n] for n in spec.actions], spec.name)
        self._default_spec = spec.default
        self._default: BoundAction | None = None
        self._program_default: BoundAction | None = None
        if spec.default is not None:
            # p4c lets the default be an action that the table does not list.
            chosen = actions[spec.default.action]
            self._program_default = BoundAction(chosen.name, spec.default.arguments)
        self._names = [actions[n].name for n in spec.actions]
        self._handles: dict[tuple[tuple[MatchValue, ...], int], int] = {}
        self._next_handle = 0
        self._index = self._new_index()

    # --- what the engine adds ---------------------------------------------------------------

    @abstractmethod
    def _new_index(self) -> Index:
        """Where packets look entries up."""

    @abstractmethod
    def _new_entry(self, handle: int, key: tuple[MatchValue, ...], priority: int) -> Entry:
        """An entry that does nothing yet."""

    def _pointed(self, entry: Entry) -> None:  # noqa: B027
        """What the entry does has been set, before or after it came into the index."""

    def _default_changed(self) -> None:  # noqa: B027
        """There is another default entry, or the first."""

    def fill(self) -> None:
        """The second half of construction: the entries that the program brings."""
        self.reset_default()
        try:
            for entry in self.spec.entries:
                action = self._action_of(entry.action)
                self._insert(entry.key, entry.priority, action, entry.arguments)
        except TableError as error:
            raise ProgramError(f"const entries of {self.name}: {error}") from error

    def _action_of(self, number: int) -> str:
        if number not in self.spec.actions:
            raise BadAction(f"{self.name} does not have the action of an entry")
        return self._names[self.spec.actions.index(number)]

    # --- the control plane ------------------------------------------------------------------

    def add(
        self,
        key: Sequence[MatchValue],
        priority: int,
        action: str | Member | Group,
        arguments: Sequence[int] = (),
    ) -> int:
        """Add an entry and give its handle. The lowest priority wins (ternary and range only).
        `arguments` are those of an action that is named; indirect tables take the others."""
        self._check_writable()
        return self._insert(key, priority, action, arguments)

    def _insert(
        self,
        key: Sequence[MatchValue],
        priority: int,
        action: str | Member | Group,
        arguments: Sequence[int],
    ) -> int:
        canonical, value, mask = self._canonical(key)
        rank = priority if self.spec.match in ("ternary", "range") else 0
        if (canonical, rank) in self._handles:
            raise DuplicateEntry(f"{self.name} has this key already")
        if len(self.entries) >= self.size:
            raise TableFull(f"{self.name} is full ({self.size} entries)")
        entry = self._new_entry(self._next_handle, canonical, rank)
        self._point(entry, action, arguments)
        self._next_handle += 1
        self.entries[entry.handle] = entry
        self._handles[canonical, rank] = entry.handle
        self._index.add(entry, value, mask)
        return entry.handle

    def _point(self, entry: Entry, action: str | Member | Group, arguments: Sequence[int]) -> None:
        """Make the entry run an action, or refer to a member or a group."""
        if isinstance(action, str):
            if self.profile is not None:
                raise BadAction(f"{self.name} takes members or groups, not actions")
            entry.action = self._actions.bind(action, arguments)
        elif self.profile is None:
            raise BadAction(f"{self.name} has no action profile")
        else:
            member = action.number if isinstance(action, Member) else None
            group = action.number if isinstance(action, Group) else None
            self.profile.use(member, group, +1)
            self.profile.use(entry.member, entry.group, -1)
            entry.member, entry.group = member, group
        self._pointed(entry)

    def modify(
        self, handle: int, action: str | Member | Group, arguments: Sequence[int] = ()
    ) -> None:
        """Change what an entry does; its counter and meter stay."""
        self._check_writable()
        self._point(self.get(handle), action, arguments)

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
        return self._default

    def set_default(self, action: str, arguments: Sequence[int] = ()) -> None:
        spec, program_default = self._default_spec, self._program_default
        if spec is not None and program_default is not None:
            if spec.const_entry:
                raise ConstTable(f"the default entry of {self.name} is const")
            if spec.const_action and action != program_default.name:
                raise ConstTable(f"the default action of {self.name} is const")
        if self.profile is not None:
            raise BadAction(f"{self.name} is indirect: its default entry cannot be changed")
        self._default = self._actions.bind(action, arguments)
        self._default_changed()

    def reset_default(self) -> None:
        """Back to what the program says."""
        self._default = self._program_default
        self._default_changed()

    # --- direct counters and meters -----------------------------------------------------------

    def read_counter(self, handle: int) -> tuple[int, int]:
        """(packets, bytes)"""
        entry = self._counted(handle)
        return entry.packets, entry.bytes

    def write_counter(self, handle: int, packets: int, bytes_: int) -> None:
        entry = self._counted(handle)
        entry.packets, entry.bytes = packets, bytes_

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

    def _canonical(self, key: Sequence[MatchValue]) -> tuple[tuple[MatchValue, ...], int, int]:
        return canonical(key, self.spec)


def canonical(
    key: Sequence[MatchValue], table: TableSpec
) -> tuple[tuple[MatchValue, ...], int, int]:
    """The key with don't-care bits cleared, and its (value, mask) as one integer each: the fields
    side by side, the first one highest. BadKey if it does not suit the table."""
    if len(key) != len(table.key):
        raise BadKey(f"{table.name} has {len(table.key)} key fields, not {len(key)}")
    values: list[MatchValue] = []
    value = mask = 0
    for v, spec in zip(key, table.key, strict=True):
        clean, field_value, field_mask = _clean(v, spec, (1 << spec.width) - 1, table.name)
        values.append(clean)
        value = value << spec.width | field_value
        mask = mask << spec.width | field_mask
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
