"""Reconcile: what must be written so that a switch holds what it should.

Owns: the comparison of two `SwitchState`s and the order of the writes. Must not know: what the
entries are for (`program.py` does), or how they travel (`switch/connection.py` does).

Entries are plain values: a table's name, match values in the order of the table's keys, an
action's name, and its parameters in order; so a state read back over P4Runtime compares equal to
the state that was written, in whatever order and encoding the switch answers.

Order: whatever is pointed at comes first and goes last (groups before the entries that name them,
deletions after insertions), and the switch program is enabled last and disabled first. Entries
of a table whose default is always right, only slower, are deleted first of all, so that what they
pointed at may be given to another.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

MatchValue: TypeAlias = int | tuple[int, int]
"""An exact key's value, or an LPM key's (value, prefix length)."""
EntryKey: TypeAlias = tuple[str, tuple[MatchValue, ...]]
"""(table, match); an empty match is the table's default action."""
Replica: TypeAlias = tuple[int, int]
"""(egress port, replication id)."""

SETTINGS = "settings"
PORT_SET = "port_set"
SAFE_WITHOUT = frozenset({PORT_SET})
"""Tables whose default action serves every packet rightly."""


@dataclass(frozen=True)
class ActionCall:
    """An action and its parameters, in the order in which the program declares them."""

    name: str
    params: tuple[int, ...] = ()


@dataclass(frozen=True)
class DigestConfig:
    """How a switch batches one digest; times in nanoseconds."""

    max_list_size: int
    max_timeout_ns: int
    ack_timeout_ns: int


@dataclass
class SwitchState:
    """What a switch holds, or should hold, of the things that the controller owns. `parts`: the
    stable and the changing one, if it was joined of these."""

    entries: dict[EntryKey, ActionCall] = field(default_factory=dict)
    groups: dict[int, frozenset[Replica]] = field(default_factory=dict)
    digests: dict[str, DigestConfig] = field(default_factory=dict)
    parts: tuple[SwitchState, SwitchState] | None = field(default=None, compare=False)

    def copy(self) -> SwitchState:
        return SwitchState(dict(self.entries), dict(self.groups), dict(self.digests))


class Verb(enum.Enum):
    INSERT = "insert"
    MODIFY = "modify"
    DELETE = "delete"


@dataclass(frozen=True)
class EntryChange:
    """Insert, modify (also a default action) or delete a table entry."""

    verb: Verb
    key: EntryKey
    action: ActionCall

    @property
    def kind(self) -> str:
        return self.key[0]


@dataclass(frozen=True)
class GroupChange:
    """Insert, modify or delete a multicast group."""

    verb: Verb
    group: int
    replicas: frozenset[Replica]
    kind: ClassVar[str] = "multicast_group"


@dataclass(frozen=True)
class DigestChange:
    """Insert or modify the configuration of a digest; it is never deleted."""

    verb: Verb
    digest: str
    config: DigestConfig
    kind: ClassVar[str] = "digest"


Change: TypeAlias = EntryChange | GroupChange | DigestChange


@dataclass(frozen=True)
class Changes:
    """The writes that turn one state into another: all of `upserts` before any of `deletes`.

    `upserts` may begin with deletions of entries that nothing depends on (`SAFE_WITHOUT`).
    """

    upserts: tuple[Change, ...]
    deletes: tuple[Change, ...]

    def __len__(self) -> int:
        return len(self.upserts) + len(self.deletes)


def joined(stable: SwitchState, changing: SwitchState) -> SwitchState:
    """Both, which have nothing in common; neither may change any more."""
    return SwitchState(
        stable.entries | changing.entries,
        stable.groups | changing.groups,
        stable.digests | changing.digests,
        (stable, changing),
    )


def changes_since(before: SwitchState, desired: SwitchState) -> Changes:
    """As `diff`, of a switch that holds just what was desired before. The stable part is by far the
    larger one, and is not looked through where it is the same object."""
    if before.parts and desired.parts and before.parts[0] is desired.parts[0]:
        return diff(before.parts[1], desired.parts[1])
    return diff(before, desired)


def diff(actual: SwitchState, desired: SwitchState) -> Changes:
    """The writes that make `actual` equal `desired`; empty if it already is."""
    groups: list[Change] = [
        GroupChange(Verb.MODIFY if group in actual.groups else Verb.INSERT, group, replicas)
        for group, replicas in sorted(desired.groups.items())
        if actual.groups.get(group) != replicas
    ]
    digests: list[Change] = [
        DigestChange(Verb.MODIFY if name in actual.digests else Verb.INSERT, name, config)
        for name, config in sorted(desired.digests.items())
        if actual.digests.get(name) != config
    ]
    settings: list[Change] = []
    entries: list[Change] = []
    held = actual.entries.get
    for key, action in desired.entries.items():
        found = held(key)
        if found is action or found == action:  # mostly one object: comparing fields is dear
            continue
        is_default = not key[1]
        verb = Verb.MODIFY if is_default or key in actual.entries else Verb.INSERT
        (settings if key[0] == SETTINGS else entries).append(EntryChange(verb, key, action))
    disabling = any(
        isinstance(change, EntryChange) and change.action.params[:1] == (0,) for change in settings
    )
    obsolete: list[Change] = []
    deletes: list[Change] = []
    for key, action in actual.entries.items():
        if key not in desired.entries and key[1]:
            first = key[0] in SAFE_WITHOUT
            (obsolete if first else deletes).append(EntryChange(Verb.DELETE, key, action))
    upserts = [*obsolete, *groups, *entries, *digests]
    upserts = [*settings, *upserts] if disabling else [*upserts, *settings]
    deletes += [
        GroupChange(Verb.DELETE, group, replicas)
        for group, replicas in sorted(actual.groups.items())
        if group not in desired.groups
    ]
    return Changes(tuple(upserts), tuple(deletes))


def apply(state: SwitchState, change: Change) -> None:
    """What the change does to a switch, done to `state`."""
    match change:
        case EntryChange(Verb.DELETE, key):
            state.entries.pop(key, None)
        case EntryChange(_, key, action):
            state.entries[key] = action
        case GroupChange(Verb.DELETE, group):
            state.groups.pop(group, None)
        case GroupChange(_, group, replicas):
            state.groups[group] = replicas
        case DigestChange(_, name, config):
            state.digests[name] = config
