"""Everything that Write and Read can name, dispatched to the stores that keep it.

Owns: the dispatch, and the entities without structure of their own: indirect counters and meters,
registers, multicast groups, clone sessions, digest configurations. Must not know: streams,
batches, gRPC. Table entries and action profiles have modules of their own.

What puts an update back is a few more updates, found before it is applied, so a batch can be rolled
back. What cannot be read begins anew then, where an entity was deleted and comes back: an entry's
age, the buckets of its meter, the samples of a digest that wait. In strict mode, what
BMv2's P4Runtime server (p4lang/PI) does not implement is refused with UNIMPLEMENTED:

| refused in strict mode only | refused always |
|---|---|
| registers; batches other than CONTINUE_ON_ERROR | value sets, extern entries, roles |
| writes to all cells of a counter or meter at once | class of service on clone sessions |
| direct counters or meters of all tables in one read | counters of meter colours |
| reads filtered by action, metadata or priority alone | watch ports, backup replicas |
| digest configurations read by wildcard | direct resources of default entries |
| metadata of multicast groups; empty one-shots | selection modes of one-shots |
| clone sessions that truncate | |

Specification: P4Runtime 1.4, "P4 Entity Messages".
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from finsy.proto import p4r
from google.protobuf.message import Message
from kvcast.switchsim.engine import MAX_PORT, Engine
from kvcast.switchsim.p4runtime.digest import DigestBuffer, DigestConfig
from kvcast.switchsim.p4runtime.errors import (
    P4RuntimeError,
    invalid_argument,
    not_found,
    out_of_range,
    unimplemented,
)
from kvcast.switchsim.p4runtime.profiles import ProfileStore
from kvcast.switchsim.p4runtime.schema import ArraySchema, Schema, TableSchema
from kvcast.switchsim.p4runtime.state import (
    check_counter_data,
    check_index,
    copied,
    counter_data,
    engine_errors,
    entity_of,
    inserting,
    modifying,
    present,
    rates_of,
)
from kvcast.switchsim.p4runtime.tables import TableStore, make_table_stores
from kvcast.switchsim.p4runtime.values import decode_bytes, decode_port, encode_bytes

MAX_GROUP_ID = 32767  # PI reserves the ids above for its clone sessions
MAX_INSTANCE = 0xFFFF
MAX_CLONE_BYTES = 0xFFFF  # PI keeps the length in 16 bits


class EntityStore:
    """The control-plane state of one pipeline."""

    def __init__(
        self, schema: Schema, switch: Engine, *, strict: bool, now_us: Callable[[], int]
    ) -> None:
        self._schema = schema
        self._switch = switch
        self._strict = strict
        self._now_us = now_us
        self.profiles = ProfileStore(schema, switch, strict=strict)
        self.tables = make_table_stores(schema, switch, self.profiles, now_us)
        self.digests: dict[int, DigestBuffer] = {}
        """By digest id, those that a controller has enabled."""
        self.digest_ids = {digest.name: digest.id for digest in schema.digests.values()}
        self._meters: dict[tuple[int, int], p4r.MeterConfig] = {}
        self._groups: dict[int, p4r.MulticastGroupEntry] = {}
        self._sessions: dict[int, p4r.CloneSessionEntry] = {}
        self._arrays: Mapping[str, tuple[Mapping[int, ArraySchema], Container[int]]] = {
            "counter": (schema.counters, schema.direct_counters),
            "meter": (schema.meters, schema.direct_meters),
            "register": (schema.registers, ()),
        }
        self._writers: Mapping[str, Callable[[int, Any], None]] = {
            "table_entry": self._write_table,
            "action_profile_member": self.profiles.write_member,
            "action_profile_group": self.profiles.write_group,
            "counter_entry": self._write_counter,
            "direct_counter_entry": self._write_direct_counter,
            "meter_entry": self._write_meter,
            "direct_meter_entry": self._write_direct_meter,
            "packet_replication_engine_entry": self._write_replication,
            "register_entry": self._write_register,
            "digest_entry": self._write_digest,
        }
        self._readers: Mapping[str, Callable[[Any], Iterator[Message]]] = {
            "table_entry": self._read_tables,
            "action_profile_member": self.profiles.read_members,
            "action_profile_group": self.profiles.read_groups,
            "counter_entry": self._read_counters,
            "direct_counter_entry": self._read_direct_counters,
            "meter_entry": self._read_meters,
            "direct_meter_entry": self._read_direct_meters,
            "packet_replication_engine_entry": self._read_replication,
            "register_entry": self._read_registers,
            "digest_entry": self._read_digests,
        }

    # --- the two entrances --------------------------------------------------------------------

    def write(self, update: p4r.Update) -> None:
        """Apply one update, or raise P4RuntimeError and change nothing."""
        which = update.entity.WhichOneof("entity")
        if which is None:
            raise invalid_argument("the update has no entity")
        writer = self._writers.get(which)
        if writer is None:
            raise unimplemented(f"writing {which}")
        if update.type not in (p4r.Update.INSERT, p4r.Update.MODIFY, p4r.Update.DELETE):
            raise invalid_argument(f"update type {update.type}")
        writer(update.type, getattr(update.entity, which))

    def inverse(self, update: p4r.Update) -> list[p4r.Update]:
        """What undoes an update that is about to be written; nothing if it will be refused."""
        entity, which = update.entity, update.entity.WhichOneof("entity")
        if update.type == p4r.Update.INSERT:
            return [p4r.Update(type=p4r.Update.DELETE, entity=entity)]
        again = p4r.Update.INSERT if update.type == p4r.Update.DELETE else p4r.Update.MODIFY
        try:
            if which in ("table_entry", "direct_counter_entry", "direct_meter_entry"):
                message = getattr(entity, which)
                wanted = message if which == "table_entry" else message.table_entry
                entry = self._table(wanted.table_id).kept(wanted)
                old = [] if entry is None else [p4r.Entity(table_entry=entry)]
            else:
                old = list(self.read([entity]))
        except P4RuntimeError:
            return []  # the write will say why
        return [p4r.Update(type=again, entity=one) for one in old]

    def read(self, entities: Iterable[p4r.Entity]) -> Iterator[p4r.Entity]:
        """What a ReadRequest selects, one entity after the other."""
        for entity in entities:
            which = entity.WhichOneof("entity")
            if which is None:
                raise invalid_argument("an entity of the request is empty")
            reader = self._readers.get(which)
            if reader is None:
                raise unimplemented(f"reading {which}")
            for message in reader(getattr(entity, which)):
                yield entity_of(which, message)

    # --- tables -------------------------------------------------------------------------------

    def _table(self, table_id: int) -> TableStore:
        table = self.tables.get(table_id)
        if table is None:
            raise invalid_argument(f"no table {table_id}")
        return table

    def _write_table(self, kind: int, message: p4r.TableEntry) -> None:
        self._table(message.table_id).write(kind, message)

    def _read_tables(self, wanted: p4r.TableEntry) -> Iterator[p4r.TableEntry]:
        if self._strict and (
            wanted.HasField("action")
            or wanted.metadata
            or wanted.controller_metadata
            or (wanted.priority and not wanted.match)
        ):
            raise unimplemented("filters other than match are not implemented (strict)")
        if wanted.table_id == 0 and wanted.match:
            raise invalid_argument("a match needs a table id")
        chosen = [self._table(wanted.table_id)] if wanted.table_id else self.tables.values()
        for table in chosen:
            yield from table.read(wanted)

    def _direct_table(self, message: p4r.DirectCounterEntry | p4r.DirectMeterEntry) -> int:
        if not message.HasField("table_entry"):
            raise invalid_argument("table_entry is missing")
        return message.table_entry.table_id

    def _write_direct_counter(self, kind: int, message: p4r.DirectCounterEntry) -> None:
        self._table(self._direct_table(message)).write_counter(kind, message)

    def _write_direct_meter(self, kind: int, message: p4r.DirectMeterEntry) -> None:
        self._table(self._direct_table(message)).write_meter(kind, message)

    def _read_direct_counters(self, wanted: p4r.DirectCounterEntry) -> Iterator[Message]:
        for table in self._direct_tables(wanted, "counters", lambda t: t.counter is not None):
            yield from table.read_counters(wanted.table_entry)

    def _read_direct_meters(self, wanted: p4r.DirectMeterEntry) -> Iterator[Message]:
        for table in self._direct_tables(wanted, "meters", lambda t: t.has_meter):
            yield from table.read_meters(wanted.table_entry)

    def _direct_tables(
        self,
        wanted: p4r.DirectCounterEntry | p4r.DirectMeterEntry,
        what: str,
        has: Callable[[TableSchema], bool],
    ) -> list[TableStore]:
        """The tables whose direct resources a read means: 0 is all that have them."""
        table_id = self._direct_table(wanted)
        if table_id:
            return [self._table(table_id)]
        if self._strict:
            raise unimplemented(f"direct {what} of all tables are not implemented (strict)")
        return [table for table in self.tables.values() if has(table.schema)]

    # --- counters, meters and registers -------------------------------------------------------

    def _selected(self, what: str, number: int) -> list[ArraySchema]:
        """The arrays that an id means to a read: 0 is all of them."""
        known, direct = self._arrays[what]
        if what == "register" and self._strict:
            raise unimplemented("registers are not implemented (strict)")
        if number == 0:
            return list(known.values())
        if number in known:
            return [known[number]]
        raise invalid_argument(
            f"{number} is a direct {what}" if number in direct else f"no {what} {number}"
        )

    def _array(self, what: str, kind: int, number: int) -> ArraySchema:
        """The array that a write means."""
        if number == 0:
            raise invalid_argument(f"no {what} 0")
        (array,) = self._selected(what, number)
        if kind != p4r.Update.MODIFY:
            raise invalid_argument(f"{what}s can only be modified")
        return array

    def _write_counter(self, kind: int, message: p4r.CounterEntry) -> None:
        counter = self._array("counter", kind, message.counter_id)
        indices = self._indices(counter.name, message, counter.size)
        array = self._switch.counters[counter.name]
        if message.HasField("data"):
            packets, bytes_ = check_counter_data(message.data)
            for index in indices:
                array.write(index, packets, bytes_)

    def _read_counters(self, wanted: p4r.CounterEntry) -> Iterator[p4r.CounterEntry]:
        for counter in self._selected("counter", wanted.counter_id):
            array = self._switch.counters[counter.name]
            for index in self._read_indices(counter.name, wanted, counter.size):
                yield p4r.CounterEntry(
                    counter_id=counter.id,
                    index=p4r.Index(index=index),
                    data=counter_data(counter.units, *array.read(index)),
                )

    def _indices(self, name: str, message: p4r.CounterEntry | p4r.MeterEntry, size: int) -> range:
        """The cells that a write means."""
        if self._strict and not message.HasField("index"):
            raise unimplemented(f"{name}: writing all cells is not implemented (strict)")
        return self._read_indices(name, message, size)

    @staticmethod
    def _read_indices(
        name: str, message: p4r.CounterEntry | p4r.MeterEntry | p4r.RegisterEntry, size: int
    ) -> range:
        if not message.HasField("index"):
            return range(size)
        index = check_index(name, message.index.index, size)
        return range(index, index + 1)

    def _write_meter(self, kind: int, message: p4r.MeterEntry) -> None:
        meter = self._array("meter", kind, message.meter_id)
        if message.HasField("counter_data"):
            raise unimplemented("meter counter_data")
        indices = self._indices(meter.name, message, meter.size)
        config = copied(message.config) if message.HasField("config") else None
        if config is not None:
            rates_of(config)
        array = self._switch.meters[meter.name]
        with engine_errors():
            for index in indices:
                if config is None:
                    array.clear(index)
                    self._meters.pop((meter.id, index), None)
                else:
                    array.configure(index, rates_of(config))
                    self._meters[meter.id, index] = config

    def _read_meters(self, wanted: p4r.MeterEntry) -> Iterator[p4r.MeterEntry]:
        for meter in self._selected("meter", wanted.meter_id):
            for index in self._read_indices(meter.name, wanted, meter.size):
                entry = p4r.MeterEntry(meter_id=meter.id, index=p4r.Index(index=index))
                config = self._meters.get((meter.id, index))
                if config is not None:
                    entry.config.CopyFrom(config)
                yield entry

    def _write_register(self, kind: int, message: p4r.RegisterEntry) -> None:
        register = self._array("register", kind, message.register_id)
        which = message.data.WhichOneof("data")
        if which != "bitstring":
            raise invalid_argument(f"{register.name} holds bitstrings, not {which or 'nothing'}")
        value = decode_bytes(message.data.bitstring, register.width, register.name)
        indices = self._read_indices(register.name, message, register.size)
        array = self._switch.registers[register.name]
        for index in indices:
            array.write(index, value)

    def _read_registers(self, wanted: p4r.RegisterEntry) -> Iterator[p4r.RegisterEntry]:
        for register in self._selected("register", wanted.register_id):
            array = self._switch.registers[register.name]
            for index in self._read_indices(register.name, wanted, register.size):
                entry = p4r.RegisterEntry(register_id=register.id, index=p4r.Index(index=index))
                entry.data.bitstring = encode_bytes(array.read(index))
                yield entry

    # --- packet replication -------------------------------------------------------------------

    def _write_replication(self, kind: int, message: p4r.PacketReplicationEngineEntry) -> None:
        which = message.WhichOneof("type")
        if which == "multicast_group_entry":
            self._write_group(kind, message.multicast_group_entry)
        elif which == "clone_session_entry":
            self._write_session(kind, message.clone_session_entry)
        else:
            raise invalid_argument("packet_replication_engine_entry has no type")

    def _write_group(self, kind: int, message: p4r.MulticastGroupEntry) -> None:
        number = message.multicast_group_id
        if number == 0:
            raise invalid_argument("0 is not a multicast group")
        if number > MAX_GROUP_ID:
            raise out_of_range(f"multicast group {number} is above {MAX_GROUP_ID}")
        what = f"multicast group {number}"
        present(kind, self._groups.get(number), f"{what} exists", f"no {what}")
        with engine_errors():
            if kind == p4r.Update.DELETE:
                self._switch.delete_multicast_group(number)
                del self._groups[number]
                return
            if message.metadata and self._strict:
                raise unimplemented("metadata of multicast groups is not implemented (strict)")
            self._switch.set_multicast_group(number, _replicas(message.replicas))
            self._groups[number] = copied(message)

    def _write_session(self, kind: int, message: p4r.CloneSessionEntry) -> None:
        number = message.session_id
        if not 1 <= number <= MAX_GROUP_ID:
            raise invalid_argument(f"clone sessions are 1 to {MAX_GROUP_ID}, not {number}")
        what = f"clone session {number}"
        present(kind, self._sessions.get(number), f"{what} exists", f"no {what}")
        with engine_errors():
            if kind == p4r.Update.DELETE:
                self._switch.delete_clone_session(number)
                del self._sessions[number]
                return
            length = message.packet_length_bytes
            if message.class_of_service:
                raise unimplemented("class of service on clone sessions")
            if length and self._strict:
                raise unimplemented("truncated clones are not implemented (strict)")
            if not 0 <= length <= MAX_CLONE_BYTES:
                raise invalid_argument(
                    f"packet_length_bytes must be 0 to {MAX_CLONE_BYTES}, not {length}"
                )
            self._switch.set_clone_session(number, _replicas(message.replicas), length)
            self._sessions[number] = copied(message)

    def _read_replication(
        self, wanted: p4r.PacketReplicationEngineEntry
    ) -> Iterator[p4r.PacketReplicationEngineEntry]:
        which = wanted.WhichOneof("type")
        if which == "multicast_group_entry":
            number = wanted.multicast_group_entry.multicast_group_id
            for group in _wanted(self._groups, number, "multicast group"):
                yield p4r.PacketReplicationEngineEntry(multicast_group_entry=group)
        elif which == "clone_session_entry":
            number = wanted.clone_session_entry.session_id
            for session in _wanted(self._sessions, number, "clone session"):
                yield p4r.PacketReplicationEngineEntry(clone_session_entry=session)
        else:
            raise invalid_argument("packet_replication_engine_entry has no type")

    # --- digests ------------------------------------------------------------------------------

    def _write_digest(self, kind: int, message: p4r.DigestEntry) -> None:
        number = message.digest_id
        if number not in self._schema.digests:
            raise not_found(f"no digest {number}")
        config = message.config
        if config.max_timeout_ns < 0 or config.max_list_size < 0 or config.ack_timeout_ns < 0:
            raise invalid_argument("a digest's timeouts and sizes cannot be negative")
        new = DigestConfig(config.max_timeout_ns, config.max_list_size, config.ack_timeout_ns)
        what = f"digest {number}"
        known = present(
            kind, self.digests.get(number), f"{what} is configured", f"{what} is not configured"
        )
        if known is None:
            self.digests[number] = DigestBuffer(new)
        elif kind == p4r.Update.MODIFY:
            known.config = new
        else:
            del self.digests[number]

    def _read_digests(self, wanted: p4r.DigestEntry) -> Iterator[p4r.DigestEntry]:
        if wanted.digest_id == 0 and self._strict:
            raise unimplemented("reading all digests is not implemented (strict)")
        if wanted.digest_id and wanted.digest_id not in self._schema.digests:
            raise not_found(f"no digest {wanted.digest_id}")
        pairs = {number: (number, buffer) for number, buffer in self.digests.items()}
        for number, buffer in _wanted(pairs, wanted.digest_id, "configuration of digest"):
            yield _digest_entry(number, buffer)

    # --- ageing -------------------------------------------------------------------------------

    def expired_entries(self, now_us: int) -> list[p4r.TableEntry]:
        """Entries to report as idle now."""
        return [entry for table in self.tables.values() for entry in table.expired(now_us)]

    def next_expiry_us(self) -> int | None:
        """When there may be entries to report, if nothing is hit until then."""
        times = (table.next_expiry_us() for table in self.tables.values())
        return min((time for time in times if time is not None), default=None)

    # --- carrying state over to another pipeline ----------------------------------------------

    def replay(self) -> Iterator[p4r.Update]:
        """Updates that make an empty pipeline hold what this one holds (registers excepted)."""
        yield from self.profiles.replay()
        for table in self.tables.values():
            yield from table.replay()
        arrays: list[tuple[str, Message]] = []
        for counter in self._read_counters(p4r.CounterEntry()):
            if counter.data.packet_count or counter.data.byte_count:
                arrays.append(("counter_entry", counter))
        for meter in self._read_meters(p4r.MeterEntry()):
            if meter.HasField("config"):
                arrays.append(("meter_entry", meter))
        for which, message in arrays:
            yield modifying(which, message)
        for wanted in ("multicast_group_entry", "clone_session_entry"):
            request = p4r.PacketReplicationEngineEntry()
            getattr(request, wanted).SetInParent()
            for entry in self._read_replication(request):
                yield inserting("packet_replication_engine_entry", entry)
        for number, buffer in self.digests.items():
            yield inserting("digest_entry", _digest_entry(number, buffer))

    def adopt_registers(self, old: EntityStore) -> None:
        """Copy the cells of every register of `old`, or say which one does not fit."""
        for name, source in old._switch.registers.items():
            if not any(source.read(index) for index in range(len(source))):
                continue
            target = self._switch.registers.get(name)
            if target is None or len(target) != len(source) or target.width != source.width:
                raise invalid_argument(f"state cannot be preserved: register {name}")
            for index in range(len(source)):
                target.write(index, source.read(index))


def _digest_entry(number: int, buffer: DigestBuffer) -> p4r.DigestEntry:
    config = p4r.DigestEntry.Config(**asdict(buffer.config))
    return p4r.DigestEntry(digest_id=number, config=config)


def _wanted(known: Mapping[int, Any], number: int, what: str) -> list[Any]:
    """All of them for 0, else the one with this number."""
    if number == 0:
        return list(known.values())
    if number not in known:
        raise not_found(f"no {what} {number}")
    return [known[number]]


def _replicas(messages: Iterable[p4r.Replica]) -> list[tuple[int, int]]:
    """(port, instance) of each replica, checked."""
    replicas: list[tuple[int, int]] = []
    seen: set[tuple[int, int]] = set()
    for message in messages:
        which = message.WhichOneof("port_kind")
        if which == "port":
            port = decode_port(message.port, "replica", max_port=MAX_PORT)
        elif which == "egress_port":
            port = message.egress_port
            if port > MAX_PORT:
                raise invalid_argument(f"replica: port {port} is above {MAX_PORT}")
        else:
            raise invalid_argument("replica without a port")
        if message.instance > MAX_INSTANCE:
            raise invalid_argument(f"replica: instance {message.instance} is above {MAX_INSTANCE}")
        if message.backup_replicas:
            raise unimplemented("backup replicas")
        if (port, message.instance) in seen:
            raise invalid_argument(f"replica (port {port}, instance {message.instance}) twice")
        seen.add((port, message.instance))
        replicas.append((port, message.instance))
    return replicas
