"""Table entries as P4Runtime sees them, on top of the engine's tables.

Owns: every rule about TableEntry, DirectCounterEntry and DirectMeterEntry, and what a read must
give back that the engine has no use for (metadata, meter configurations, ageing). Must not know:
streams, batches, other entities; indirect actions are asked of the action profiles' store.

A write is checked completely before the engine is touched.

Specification: P4Runtime 1.4, "TableEntry" and its subsections, "DirectCounterEntry",
"DirectMeterEntry".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from finsy.proto import p4r
from kvcast.switchsim import ir
from kvcast.switchsim.control_plane.externs import Rate
from kvcast.switchsim.control_plane.tables import Entry, Group, Member, Table
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.p4runtime.errors import (
    already_exists,
    invalid_argument,
    not_found,
    permission_denied,
    unimplemented,
)
from kvcast.switchsim.p4runtime.profiles import Pointer, ProfileStore
from kvcast.switchsim.p4runtime.schema import ActionSchema, CounterUnits, Schema, TableSchema
from kvcast.switchsim.p4runtime.state import (
    check_counter_data,
    copied,
    counter_data,
    decode_arguments,
    engine_errors,
    inserting,
    modifying,
    rates_of,
)
from kvcast.switchsim.p4runtime.values import (
    MatchKind,
    decode_match,
    encode_bytes,
    encode_match,
    wildcard,
)

# In the engine (as in BMv2) the lowest number wins, in P4Runtime the highest.
_MAX_PRIORITY = (1 << 31) - 1

_EVERYTHING = p4r.TableEntry(counter_data=p4r.CounterData(), meter_config=p4r.MeterConfig())
"""Asks for all of an entry that can be written."""

Key = tuple[ir.MatchValue, ...]


@dataclass(slots=True)
class _Record:
    """What is kept of an entry beside the engine's own copy."""

    handle: int
    key: Key
    priority: int
    """As P4Runtime counts: the highest wins; 0 where the table needs none."""
    pointer: Pointer | None
    """The member, group or one-shot of an indirect entry."""
    is_const: bool = False
    metadata: bytes = b""
    controller_metadata: int = 0
    idle_timeout_ns: int = 0
    idle_since_us: int = 0
    """When the entry was made, or last reported as idle."""
    meter: p4r.MeterConfig | None = None


@dataclass(slots=True)
class _Default:
    metadata: bytes = b""
    controller_metadata: int = 0


class TableStore:
    """One table: its entries and its default entry."""

    def __init__(
        self,
        schema: TableSchema,
        table: Table,
        profiles: ProfileStore,
        now_us: Callable[[], int],
    ) -> None:
        self.schema = schema
        self.table = table
        self._profiles = profiles
        self._now_us = now_us
        self._records: dict[tuple[Key, int], _Record] = {}
        self._ageing: dict[tuple[Key, int], _Record] = {}
        self._default = _Default()
        for entry in table:
            priority = _MAX_PRIORITY - entry.priority if schema.needs_priority else 0
            self._records[entry.key, priority] = _Record(
                entry.handle, entry.key, priority, None, is_const=schema.is_const
            )

    # --- writes -------------------------------------------------------------------------------

    def write(self, kind: int, message: p4r.TableEntry) -> None:
        if message.HasField("time_since_last_hit"):
            raise invalid_argument("time_since_last_hit cannot be written")
        if message.HasField("meter_counter_data"):
            raise unimplemented("meter_counter_data")
        if message.is_default_action:
            self._write_default(kind, message)
        elif kind == p4r.Update.INSERT:
            self._insert(message)
        elif kind == p4r.Update.MODIFY:
            self._modify(message)
        else:
            self._delete(message)

    def _insert(self, message: p4r.TableEntry) -> None:
        schema = self.schema
        if schema.is_const:
            raise permission_denied(f"table {schema.name} is const")
        key, priority = self._key(message)
        if (key, priority) in self._records:
            raise already_exists(f"{schema.name}: the entry exists")
        self._check_timeout(message)
        counter = self._counter_of(message)
        rates = self._rates_in(message)
        if not message.HasField("action"):
            raise invalid_argument(f"{schema.name}: action is missing")
        rank = _MAX_PRIORITY - priority if schema.needs_priority else 0
        with self._bound(message.action) as (action, arguments, pointer):
            handle = self.table.add(key, rank, action, arguments)
        record = _Record(handle, key, priority, pointer)
        self._describe(record, message)
        self._records[key, priority] = record
        if counter is not None:
            self.table.write_counter(handle, *counter)
        if rates:
            self.table.configure_meter(handle, rates)
            record.meter = copied(message.meter_config)

    def _modify(self, message: p4r.TableEntry) -> None:
        schema = self.schema
        key, priority = self._key(message)
        record = self._record(key, priority)
        if schema.is_const and message.HasField("action"):
            raise permission_denied(f"table {schema.name} is const")
        self._check_timeout(message)
        counter = self._counter_of(message)
        rates = self._rates_in(message)
        if not message.HasField("action") and not schema.is_const:
            raise invalid_argument(f"{schema.name}: action is missing")
        if message.HasField("action"):
            with self._bound(message.action) as (action, arguments, pointer):
                self.table.modify(record.handle, action, arguments)
            if record.pointer is not None:
                record.pointer.release()
            record.pointer = pointer
            self._describe(record, message)
        if counter is not None:
            self.table.write_counter(record.handle, *counter)
        if schema.has_meter:
            self.table.configure_meter(record.handle, rates)
            record.meter = copied(message.meter_config) if rates else None

    def _delete(self, message: p4r.TableEntry) -> None:
        if self.schema.is_const:
            raise permission_denied(f"table {self.schema.name} is const")
        key, priority = self._key(message)
        record = self._record(key, priority)
        self.table.delete(record.handle)
        del self._records[key, priority]
        self._ageing.pop((key, priority), None)
        if record.pointer is not None:
            record.pointer.release()

    def _write_default(self, kind: int, message: p4r.TableEntry) -> None:
        schema = self.schema
        if kind != p4r.Update.MODIFY:
            raise invalid_argument(f"{schema.name}: a default entry can only be modified")
        if message.match or message.priority:
            raise invalid_argument(f"{schema.name}: a default entry has no match and no priority")
        if message.idle_timeout_ns:
            raise invalid_argument(f"{schema.name}: a default entry does not age")
        if schema.profile_id is not None:
            raise invalid_argument(f"{schema.name}: an indirect table's default is fixed")
        if schema.const_default:
            raise permission_denied(f"{schema.name}: the default action is const")
        if message.HasField("counter_data") or message.HasField("meter_config"):
            raise unimplemented(f"{schema.name}: direct resources of the default entry")
        if message.HasField("action"):
            action, arguments = self._direct_action(message.action, default=True)
            with engine_errors():
                self.table.set_default(action.name, arguments)
            self._default = _Default(message.metadata, message.controller_metadata)
        else:
            self.table.reset_default()
            self._default = _Default()

    @contextmanager
    def _bound(
        self, message: p4r.TableAction
    ) -> Iterator[tuple[str | Member | Group, tuple[int, ...], Pointer | None]]:
        """What an entry shall do, as the engine takes it. What the engine refuses in here is a
        P4RuntimeError, and nobody refers to the pointer then."""
        if self.schema.profile_id is None:
            action, arguments = self._direct_action(message)
            with engine_errors():
                yield action.name, arguments, None
            return
        pointer = self._profiles.point(self.schema, message)
        try:
            with engine_errors():
                yield pointer.target, (), pointer
        except BaseException:
            pointer.release()
            raise

    def _describe(self, record: _Record, message: p4r.TableEntry) -> None:
        record.metadata = message.metadata
        record.controller_metadata = message.controller_metadata
        self._set_timeout(record, message.idle_timeout_ns)

    def _set_timeout(self, record: _Record, timeout_ns: int) -> None:
        record.idle_timeout_ns = timeout_ns
        record.idle_since_us = self._now_us()
        if timeout_ns:
            self._ageing[record.key, record.priority] = record
        else:
            self._ageing.pop((record.key, record.priority), None)

    # --- direct resources ---------------------------------------------------------------------

    def write_counter(self, kind: int, message: p4r.DirectCounterEntry) -> None:
        if kind != p4r.Update.MODIFY:
            raise invalid_argument("direct counters can only be modified")
        self._counter_units()
        record = self._addressed(message.table_entry)
        if message.HasField("data"):
            self.table.write_counter(record.handle, *check_counter_data(message.data))

    def write_meter(self, kind: int, message: p4r.DirectMeterEntry) -> None:
        if kind != p4r.Update.MODIFY:
            raise invalid_argument("direct meters can only be modified")
        self._need_meter()
        if message.HasField("counter_data"):
            raise unimplemented("meter counter_data")
        record = self._addressed(message.table_entry)
        new = rates_of(message.config) if message.HasField("config") else ()
        self.table.configure_meter(record.handle, new)
        record.meter = copied(message.config) if new else None

    def read_counters(self, entry: p4r.TableEntry) -> Iterator[p4r.DirectCounterEntry]:
        units = self._counter_units()
        for record in self._addressed_or_all(entry):
            packets, bytes_ = self.table.read_counter(record.handle)
            yield p4r.DirectCounterEntry(
                table_entry=self._key_message(record), data=counter_data(units, packets, bytes_)
            )

    def read_meters(self, entry: p4r.TableEntry) -> Iterator[p4r.DirectMeterEntry]:
        self._need_meter()
        for record in self._addressed_or_all(entry):
            message = p4r.DirectMeterEntry(table_entry=self._key_message(record))
            if record.meter is not None:
                message.config.CopyFrom(record.meter)
            yield message

    def _addressed(self, message: p4r.TableEntry) -> _Record:
        """The record that a direct resource belongs to."""
        if message.is_default_action:
            raise unimplemented(f"{self.schema.name}: direct resources of the default entry")
        return self._record(*self._key(message))

    def _addressed_or_all(self, message: p4r.TableEntry) -> Iterator[_Record]:
        if message.match or message.is_default_action:
            yield self._addressed(message)
            return
        yield from self._still_there(list(self._records.values()))

    def _still_there(self, records: list[_Record]) -> Iterator[_Record]:
        """Deleted ones are left out even if the reader is slow."""
        return (one for one in records if self._records.get((one.key, one.priority)) is one)

    # --- reads --------------------------------------------------------------------------------

    def read(self, wanted: p4r.TableEntry) -> Iterator[p4r.TableEntry]:
        """The entries that a TableEntry of a ReadRequest selects."""
        if wanted.HasField("time_since_last_hit") and not self.schema.idle_timeout:
            raise invalid_argument(f"table {self.schema.name} does not support idle timeout")
        if wanted.is_default_action:
            if wanted.HasField("time_since_last_hit"):
                raise invalid_argument("a default entry does not age")
            yield self._default_message()
            return
        if wanted.match:
            record = self._records.get(self._key(wanted))
            records = [] if record is None else [record]
        else:
            records = list(self._records.values())
        for record in self._still_there(records):
            if self._selected(record, wanted):
                yield self._message(record, wanted)

    def _selected(self, record: _Record, wanted: p4r.TableEntry) -> bool:
        if wanted.priority and record.priority != wanted.priority:
            return False
        if wanted.metadata and record.metadata != wanted.metadata:
            return False
        if wanted.controller_metadata and record.controller_metadata != wanted.controller_metadata:
            return False
        if wanted.HasField("action"):
            if wanted.action.WhichOneof("type") != "action":
                raise invalid_argument("entries can only be filtered by direct action")
            action = self._action(wanted.action.action.action_id)
            bound = self.table.get(record.handle).action
            return bound is not None and bound.name == action.name
        return True

    def _message(self, record: _Record, wanted: p4r.TableEntry) -> p4r.TableEntry:
        entry = self.table.get(record.handle)
        message = self._described(record)
        if record.pointer is not None:
            message.action.CopyFrom(record.pointer.spec)
        elif entry.action is not None:
            self._put_action(message.action.action, entry.action.name, entry.action.arguments)
        message.is_const = record.is_const
        if wanted.HasField("counter_data") and self.schema.counter is not None:
            message.counter_data.CopyFrom(
                counter_data(self.schema.counter, entry.packets, entry.bytes)
            )
        if wanted.HasField("meter_config") and record.meter is not None:
            message.meter_config.CopyFrom(record.meter)
        if wanted.HasField("time_since_last_hit"):
            idle_us = max(0, self._now_us() - self._last_used_us(record, entry))
            message.time_since_last_hit.elapsed_ns = idle_us * 1000
        return message

    def _described(self, record: _Record) -> p4r.TableEntry:
        """The key of an entry, and what the controller said of it."""
        message = self._key_message(record)
        message.metadata = record.metadata
        message.controller_metadata = record.controller_metadata
        message.idle_timeout_ns = record.idle_timeout_ns
        return message

    def _key_message(self, record: _Record) -> p4r.TableEntry:
        """table_id, match and priority of an entry."""
        message = p4r.TableEntry(table_id=self.schema.id, priority=record.priority)
        for field, value in zip(self.schema.fields, record.key, strict=True):
            match = encode_match(field.id, field.kind, field.target_width, value)
            if match is not None:
                message.match.append(match)
        return message

    def _default_message(self) -> p4r.TableEntry:
        message = p4r.TableEntry(
            table_id=self.schema.id,
            is_default_action=True,
            is_const=self.schema.const_default,
            metadata=self._default.metadata,
            controller_metadata=self._default.controller_metadata,
        )
        default = self.table.default_entry
        if default is not None and self.schema.profile_id is None:
            self._put_action(message.action.action, default.name, default.arguments)
        return message

    def _put_action(self, message: p4r.Action, name: str, arguments: tuple[int, ...]) -> None:
        action = next((a for a in self.schema.actions.values() if a.name == name), None)
        if action is None:
            return  # an action that the compiler made up; P4Info has no name for it
        message.action_id = action.id
        for param, value in zip(action.params, arguments, strict=True):
            message.params.add(param_id=param.id, value=encode_bytes(value))

    # --- ageing -------------------------------------------------------------------------------

    def expired(self, now_us: int) -> Iterator[p4r.TableEntry]:
        """Entries that have been idle for their timeout; their time starts again."""
        for record in self._ageing.values():
            entry = self.table.get(record.handle)
            idle_ns = (now_us - self._last_used_us(record, entry)) * 1000
            if idle_ns >= record.idle_timeout_ns:
                record.idle_since_us = now_us
                yield self._described(record)

    def next_expiry_us(self) -> int | None:
        """When the first entry will have been idle for its timeout, if nothing hits it."""
        return min(
            (
                self._last_used_us(record, self.table.get(record.handle))
                + -(-record.idle_timeout_ns // 1000)
                for record in self._ageing.values()
            ),
            default=None,
        )

    @staticmethod
    def _last_used_us(record: _Record, entry: Entry) -> int:
        return max(record.idle_since_us, entry.last_hit_us)

    # --- what carries over to another pipeline ------------------------------------------------

    def kept(self, wanted: p4r.TableEntry) -> p4r.TableEntry | None:
        """The entry with this key, with all that a write may say of it; None if there is none."""
        if wanted.is_default_action:
            message = self._default_message()
        else:
            record = self._records.get(self._key(wanted))
            if record is None:
                return None
            message = self._message(record, _EVERYTHING)
            if record.is_const:
                message.ClearField("action")
        message.is_const = False
        return message

    def replay(self) -> Iterator[p4r.Update]:
        if self.schema.is_const:
            return
        for record in self._records.values():
            yield inserting("table_entry", self._message(record, _EVERYTHING))
        if self.schema.profile_id is None and not self.schema.const_default:
            default = self.kept(p4r.TableEntry(is_default_action=True))
            if default is not None and default.HasField("action"):
                yield modifying("table_entry", default)

    # --- parts of messages --------------------------------------------------------------------

    def _record(self, key: Key, priority: int) -> _Record:
        record = self._records.get((key, priority))
        if record is None:
            raise not_found(f"{self.schema.name}: no such entry")
        return record

    def _key(self, message: p4r.TableEntry) -> tuple[Key, int]:
        schema = self.schema
        given: dict[int, p4r.FieldMatch] = {}
        known = {field.id for field in schema.fields}
        for match in message.match:
            if match.field_id in given:
                raise invalid_argument(f"{schema.name}: match field {match.field_id} twice")
            if match.field_id not in known:
                raise invalid_argument(f"{schema.name}: no match field {match.field_id}")
            given[match.field_id] = match
        key: list[ir.MatchValue] = []
        for field in schema.fields:
            what = f"{schema.name}.{field.name}"
            if field.id in given:
                width = min(field.width, field.target_width)
                plain = field.kind in (MatchKind.EXACT, MatchKind.OPTIONAL)
                if field.width != field.target_width and not plain:
                    raise unimplemented(f"{what}: {field.kind.value} match on a translated type")
                value = decode_match(given[field.id], field.kind, width, what)
                if isinstance(value, ir.Ternary) and width != field.target_width:
                    value = ir.Ternary(value.value, (1 << field.target_width) - 1)
                key.append(value)
            else:
                default = wildcard(field.kind, field.target_width)
                if default is None:
                    raise invalid_argument(f"{what} is missing")
                key.append(default)
        if schema.needs_priority and message.priority <= 0:
            raise invalid_argument(f"{schema.name}: priority must be above 0")
        if not schema.needs_priority and message.priority:
            raise invalid_argument(f"{schema.name}: priority must not be given")
        return tuple(key), message.priority

    def _direct_action(
        self, message: p4r.TableAction, *, default: bool = False
    ) -> tuple[ActionSchema, tuple[int, ...]]:
        schema = self.schema
        if message.WhichOneof("type") != "action":
            raise invalid_argument(f"{schema.name} takes a direct action")
        action = self._action(message.action.action_id)
        if default and not action.as_default:
            raise permission_denied(f"{action.name} cannot be the default of {schema.name}")
        if not default and not action.in_entries:
            raise permission_denied(f"{action.name} can only be the default of {schema.name}")
        return action, decode_arguments(action, message.action)

    def _action(self, action_id: int) -> ActionSchema:
        action = self.schema.actions.get(action_id)
        if action is None:
            raise invalid_argument(f"{self.schema.name}: no action {action_id}")
        return action

    def _counter_of(self, message: p4r.TableEntry) -> tuple[int, int] | None:
        if not message.HasField("counter_data"):
            return None
        self._counter_units()
        return check_counter_data(message.counter_data)

    def _counter_units(self) -> CounterUnits:
        if self.schema.counter is None:
            raise invalid_argument(f"table {self.schema.name} has no direct counter")
        return self.schema.counter

    def _rates_in(self, message: p4r.TableEntry) -> Sequence[Rate]:
        """The rates that the entry's meter gets; none makes it say green."""
        if not message.HasField("meter_config"):
            return ()
        self._need_meter()
        return rates_of(message.meter_config)

    def _need_meter(self) -> None:
        if not self.schema.has_meter:
            raise invalid_argument(f"table {self.schema.name} has no direct meter")

    def _check_timeout(self, message: p4r.TableEntry) -> None:
        if message.idle_timeout_ns < 0:
            raise invalid_argument("idle_timeout_ns is negative")
        if message.idle_timeout_ns and not self.schema.idle_timeout:
            raise invalid_argument(f"table {self.schema.name} does not support idle timeout")


def make_table_stores(
    schema: Schema, switch: Engine, profiles: ProfileStore, now_us: Callable[[], int]
) -> dict[int, TableStore]:
    """One store for each table that P4Info names."""
    return {
        table.id: TableStore(table, switch.tables[table.name], profiles, now_us)
        for table in schema.tables.values()
    }
