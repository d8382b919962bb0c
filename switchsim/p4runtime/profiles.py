"""Action profiles and selectors as P4Runtime sees them: members, groups, one-shots.

Owns: every rule about ActionProfileMember, ActionProfileGroup and ActionProfileActionSet, and the
engine's members and groups that a one-shot needs behind the scenes. Must not know: table entries;
a table store asks for a `Pointer` and hangs it into its entry.

Watch ports are refused: this switch has no link state to watch.

Specification: P4Runtime 1.4, "ActionProfileMember & ActionProfileGroup" and "One Shot Action
Selector Programming". A profile is programmed one way or the other, never both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from finsy.proto import p4r
from kvcast.switchsim.control_plane.tables import Group, Member, Profile
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.p4runtime.errors import (
    invalid_argument,
    not_found,
    permission_denied,
    resource_exhausted,
    unimplemented,
)
from kvcast.switchsim.p4runtime.schema import ProfileSchema, Schema, TableSchema
from kvcast.switchsim.p4runtime.state import (
    copied,
    decode_arguments,
    engine_errors,
    inserting,
    present,
)
from kvcast.switchsim.p4runtime.values import encode_bytes

# Controllers' ids have 32 bits; the engine's ids of what a one-shot needs lie above.
_FIRST_HIDDEN_ID = 1 << 32
# Sum of weights where the program sets no maximum.
MAX_GROUP_WEIGHT = 4096

_Known = TypeVar("_Known")


@dataclass(frozen=True, slots=True)
class Pointer:
    """What an indirect entry refers to."""

    target: Member | Group
    spec: p4r.TableAction
    """What the controller wrote."""
    release: Callable[[], None] = lambda: None
    """To be called when no entry refers here any more."""


@dataclass(slots=True)
class _State:
    """One profile."""

    schema: ProfileSchema
    profile: Profile
    members: dict[int, p4r.ActionProfileMember] = field(default_factory=dict)
    groups: dict[int, p4r.ActionProfileGroup] = field(default_factory=dict)
    oneshots: int = 0
    _next_hidden_id: int = _FIRST_HIDDEN_ID

    def hidden_id(self) -> int:
        self._next_hidden_id += 1
        return self._next_hidden_id

    def decode_action(self, message: p4r.Action) -> tuple[str, tuple[int, ...]]:
        action = self.schema.actions.get(message.action_id)
        if action is None:
            raise invalid_argument(f"{self.schema.name}: no action {message.action_id}")
        if not action.in_entries:
            raise permission_denied(f"{action.name} can only be a default action")
        return action.name, decode_arguments(action, message)

    def one_shot(self, spec: p4r.TableAction) -> Pointer:
        """A hidden group with one hidden member for each action."""
        group, members, weighted = self.hidden_id(), list[int](), list[int]()

        def release() -> None:
            if group in self.profile.groups:
                self.profile.delete_group(group)
            for member in members:
                self.profile.delete_member(member)
            self.oneshots -= 1

        self.oneshots += 1
        try:
            for one in spec.action_profile_action_set.action_profile_actions:
                action, arguments = self.decode_action(one.action)
                member = self.hidden_id()
                with engine_errors():
                    self.profile.add_member(member, action, arguments)
                members.append(member)
                weighted += [member] * one.weight
            with engine_errors():
                self.profile.set_group(group, weighted)
        except BaseException:
            release()
            raise
        return Pointer(Group(group), copied(spec), release)

    def present(self, kind: int, known: _Known | None, what: str) -> _Known | None:
        name = self.schema.name
        return present(kind, known, f"{name}: {what} exists", f"{name}: no {what}")

    def use_members(self) -> None:
        if self.oneshots:
            raise invalid_argument(f"{self.schema.name} is programmed by one-shots")

    def use_oneshots(self) -> None:
        if self.members or self.groups:
            raise invalid_argument(f"{self.schema.name} is programmed by members and groups")


class ProfileStore:
    """All action profiles of a pipeline."""

    def __init__(self, schema: Schema, switch: Engine, *, strict: bool) -> None:
        self._strict = strict
        self._states = {
            profile.id: _State(profile, switch.action_profiles[profile.name])
            for profile in schema.profiles.values()
        }

    # --- for table entries --------------------------------------------------------------------

    def point(self, table: TableSchema, action: p4r.TableAction) -> Pointer:
        """The pointer that the action of an indirect entry asks for."""
        assert table.profile_id is not None
        state = self._states[table.profile_id]
        which = action.WhichOneof("type")
        if which == "action_profile_member_id":
            state.use_members()
            member = action.action_profile_member_id
            if member not in state.members:
                raise not_found(f"{state.schema.name}: no member {member}")
            return Pointer(Member(member), copied(action))
        if which == "action_profile_group_id":
            state.use_members()
            group = action.action_profile_group_id
            if group not in state.groups:
                raise not_found(f"{state.schema.name}: no group {group}")
            return Pointer(Group(group), copied(action))
        if which == "action_profile_action_set":
            state.use_oneshots()
            self._check_oneshot(state, action.action_profile_action_set)
            return state.one_shot(action)
        raise invalid_argument(f"table {table.name} takes members, groups or one-shots")

    def _check_oneshot(self, state: _State, message: p4r.ActionProfileActionSet) -> None:
        name = state.schema.name
        if not state.schema.with_selector:
            raise invalid_argument(f"{name} has no selector, so no one-shots")
        if message.action_selection_mode or message.size_semantics:
            raise unimplemented(f"{name}: action_selection_mode and size_semantics")
        if not message.action_profile_actions and self._strict:
            raise unimplemented(f"{name}: empty one-shots are not implemented (strict)")
        for one in message.action_profile_actions:
            _check_weight(one.weight)
            _refuse_watch(one)
        _check_total(
            [one.weight for one in message.action_profile_actions],
            state.schema.max_group_size or MAX_GROUP_WEIGHT,
        )

    # --- members ------------------------------------------------------------------------------

    def write_member(self, kind: int, message: p4r.ActionProfileMember) -> None:
        state = self._state(message.action_profile_id)
        state.use_members()
        number = message.member_id
        known = state.present(kind, state.members.get(number), f"member {number}")
        if known is None:
            if number == 0:
                raise invalid_argument("0 is not a member id")
            self._put_member(state, message, state.profile.add_member)
        elif kind == p4r.Update.MODIFY:
            self._put_member(state, message, state.profile.modify_member)
        else:
            with engine_errors():
                state.profile.delete_member(number)
            del state.members[number]

    def _put_member(
        self,
        state: _State,
        message: p4r.ActionProfileMember,
        put: Callable[[int, str, Sequence[int]], None],
    ) -> None:
        action, arguments = state.decode_action(message.action)
        with engine_errors():
            put(message.member_id, action, arguments)
        kept = p4r.ActionProfileMember(
            action_profile_id=message.action_profile_id, member_id=message.member_id
        )
        kept.action.action_id = message.action.action_id
        schema = state.schema.actions[message.action.action_id]
        for param, value in zip(schema.params, arguments, strict=True):
            kept.action.params.add(param_id=param.id, value=encode_bytes(value))
        state.members[message.member_id] = kept

    def read_members(self, wanted: p4r.ActionProfileMember) -> Iterator[p4r.ActionProfileMember]:
        for state in self._selected(wanted.action_profile_id):
            yield from _chosen(state.members, wanted.member_id)

    # --- groups -------------------------------------------------------------------------------

    def write_group(self, kind: int, message: p4r.ActionProfileGroup) -> None:
        state = self._state(message.action_profile_id)
        state.use_members()
        number = message.group_id
        known = state.present(kind, state.groups.get(number), f"group {number}")
        if known is None:
            if number == 0:
                raise invalid_argument("0 is not a group id")
            self._put_group(state, message, message.max_size)
        elif kind == p4r.Update.MODIFY:
            if message.max_size and message.max_size != known.max_size:
                raise invalid_argument("max_size cannot be changed")
            self._put_group(state, message, known.max_size)
        else:
            with engine_errors():
                state.profile.delete_group(number)
            del state.groups[number]

    def _put_group(self, state: _State, message: p4r.ActionProfileGroup, max_size: int) -> None:
        schema = state.schema
        if max_size < 0 or (schema.max_group_size and max_size > schema.max_group_size):
            raise invalid_argument(f"{schema.name}: max_size {max_size}")
        seen: set[int] = set()
        for member in message.members:
            if member.member_id in seen:
                raise invalid_argument(f"member {member.member_id} is given twice; use weights")
            seen.add(member.member_id)
            _check_weight(member.weight)
            _refuse_watch(member)
            if member.member_id not in state.members:
                raise not_found(f"{schema.name}: no member {member.member_id}")
        weights = [member.weight for member in message.members]
        _check_total(weights, max_size or schema.max_group_size or MAX_GROUP_WEIGHT)
        weighted = [m.member_id for m in message.members for _ in range(m.weight)]
        with engine_errors():
            state.profile.set_group(message.group_id, weighted)
        kept = copied(message)
        kept.max_size = max_size
        state.groups[message.group_id] = kept

    def read_groups(self, wanted: p4r.ActionProfileGroup) -> Iterator[p4r.ActionProfileGroup]:
        for state in self._selected(wanted.action_profile_id):
            yield from _chosen(state.groups, wanted.group_id)

    def replay(self) -> Iterator[p4r.Update]:
        for state in self._states.values():
            for member in state.members.values():
                yield inserting("action_profile_member", member)
            for group in state.groups.values():
                yield inserting("action_profile_group", group)

    def _state(self, profile_id: int) -> _State:
        state = self._states.get(profile_id)
        if state is None:
            raise invalid_argument(f"no action profile {profile_id}")
        return state

    def _selected(self, profile_id: int) -> list[_State]:
        return [self._state(profile_id)] if profile_id else list(self._states.values())


def _chosen(known: Mapping[int, _Known], number: int) -> list[_Known]:
    """The one with this number, if there is one; 0 is all of them."""
    return [one for n, one in known.items() if number in (0, n)]


def _check_weight(weight: int) -> None:
    if weight <= 0:
        raise invalid_argument(f"weight {weight}")


def _check_total(weights: Sequence[int], limit: int) -> None:
    if sum(weights) > limit:
        raise resource_exhausted(f"weights sum to {sum(weights)}, more than {limit}")


def _refuse_watch(message: p4r.ActionProfileAction | p4r.ActionProfileGroup.Member) -> None:
    if message.WhichOneof("watch_kind") is not None and (message.watch or message.watch_port):
        raise unimplemented("watch ports")
