"""What may be said about a pipeline: P4Info, checked against the program it describes.

Owns: the index from P4Info ids to the program's tables, actions and externs, and the check that
both files describe the same pipeline. Must not know: entries, streams, the switch's state.
Everything is looked up once, at push; a write only follows references.

Specification: P4Runtime 1.4, "The P4Info Message", "Translation" under "Portability
Considerations".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import TypeVar

from finsy.proto import p4d, p4i, p4t
from kvcast.switchsim import ir
from kvcast.switchsim.p4runtime.errors import P4RuntimeError, invalid_argument, unimplemented
from kvcast.switchsim.p4runtime.packetio import PACKET_IN, PACKET_OUT, ControllerHeader
from kvcast.switchsim.p4runtime.values import PRIORITY_KINDS, MatchKind, encode_bytes

_Array = TypeVar("_Array", ir.CounterArray, ir.MeterArray, ir.RegisterArray)

_MATCH_KINDS: dict[int, MatchKind] = {
    p4i.MatchField.MatchType.Value(kind.name): kind for kind in MatchKind
}

# What p4c makes of a match kind. A table with one ternary field turns the rest into ternary or
# leaves them exact or lpm; `optional` is a ternary whose mask is all or nothing.
_JSON_KINDS = {kind: {kind.value} for kind in MatchKind} | {
    MatchKind.OPTIONAL: {"optional", "ternary"}
}


class ParamSchema(ir.Record):
    """`width` is the controller's, `target_width` the data plane's, in bits; they differ only under
    @p4runtime_translation."""

    id: int
    name: str
    width: int
    target_width: int


class FieldSchema(ParamSchema):
    """One match field."""

    kind: MatchKind


class ActionSchema(ir.Record):
    """An action as one table (or action profile) may use it.

    `index` is its number in the program: p4c may emit one P4 action several times.
    """

    id: int
    name: str
    index: int
    params: tuple[ParamSchema, ...]
    in_entries: bool
    as_default: bool


class CounterUnits(ir.Record):
    packets: bool
    bytes: bool


class TableSchema(ir.Record):
    id: int
    name: str
    fields: tuple[FieldSchema, ...]
    actions: dict[int, ActionSchema]
    size: int
    needs_priority: bool
    is_const: bool
    const_default: bool
    profile_id: int | None
    counter: CounterUnits | None
    has_meter: bool
    idle_timeout: bool


class ProfileSchema(ir.Record):
    """An action profile, or an action selector."""

    id: int
    name: str
    with_selector: bool
    size: int
    max_group_size: int
    actions: dict[int, ActionSchema]


class ArraySchema(ir.Record):
    """An indirect counter, an indirect meter, or a register."""

    id: int
    name: str
    size: int
    width: int = 0
    """Bits of a register's cell."""
    units: CounterUnits = CounterUnits(True, True)
    """What a counter counts."""


class DigestSchema(ir.Record):
    id: int
    name: str
    data_type: DataType


class Schema(ir.Record):
    """Everything of a pipeline that P4Runtime can name."""

    tables: dict[int, TableSchema] = field(default_factory=dict)
    profiles: dict[int, ProfileSchema] = field(default_factory=dict)
    counters: dict[int, ArraySchema] = field(default_factory=dict)
    direct_counters: dict[int, int] = field(default_factory=dict)  # id -> table id
    meters: dict[int, ArraySchema] = field(default_factory=dict)
    direct_meters: dict[int, int] = field(default_factory=dict)  # id -> table id
    registers: dict[int, ArraySchema] = field(default_factory=dict)
    digests: dict[int, DigestSchema] = field(default_factory=dict)
    value_sets: frozenset[int] = frozenset()
    packet_in: ControllerHeader = field(default_factory=lambda: ControllerHeader([]))
    packet_out: ControllerHeader = field(default_factory=lambda: ControllerHeader([]))


class DataType:
    """A P4DataTypeSpec made of fixed-width numbers: a bitstring, a bool, a serializable enum, or
    structs and tuples of them. The data plane has them as a flat sequence of integers."""

    def __init__(self, shape: str, width: int = 0, members: Sequence[DataType] = ()) -> None:
        self._shape = shape
        self._width = width
        self._members = tuple(members)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths in bits of the numbers, in order."""
        if self._members or self._shape in ("struct", "tuple"):
            return tuple(width for member in self._members for width in member.widths)
        return (self._width,)

    def encode(self, numbers: Sequence[int]) -> p4d.P4Data:
        return self._encode(iter(numbers))

    def _encode(self, numbers: Iterator[int]) -> p4d.P4Data:
        data = p4d.P4Data()
        if self._shape == "bool":
            data.bool = bool(next(numbers))
        elif self._shape in ("bitstring", "enum_value"):
            setattr(data, self._shape, encode_bytes(next(numbers)))
        else:
            members = [member._encode(numbers) for member in self._members]
            getattr(data, self._shape).members.extend(members)
        return data


def _misfit(what: str) -> P4RuntimeError:
    return invalid_argument(f"P4Info does not fit the device config: {what}")


def build_schema(p4info: p4i.P4Info, program: ir.Program) -> Schema:
    """Index `p4info` and check it against `program`.

    P4RuntimeError: INVALID_ARGUMENT where they contradict each other or P4Info is malformed,
    UNIMPLEMENTED (with the construct's name) for what this target does not offer.
    """
    return _Builder(p4info, program).build()


class _Builder:
    def __init__(self, p4info: p4i.P4Info, program: ir.Program) -> None:
        self._p4info = p4info
        self._program = program
        self._tables = {table.name: table for table in program.tables()}
        self._types = p4info.type_info
        self._actions = {action.preamble.id: action for action in p4info.actions}
        self._direct_counters = {c.preamble.id: c for c in p4info.direct_counters}
        self._direct_meters = {m.preamble.id: m for m in p4info.direct_meters}
        self._profiles = {p.preamble.id: p for p in p4info.action_profiles}

    def build(self) -> Schema:
        self._check_ids()
        for kind in self._p4info.externs:
            raise unimplemented(f"extern type {kind.extern_type_name}")
        tables = {t.preamble.id: self._table(t) for t in self._p4info.tables}
        return Schema(
            tables=tables,
            profiles={p.preamble.id: self._profile(p, tables) for p in self._profiles.values()},
            counters={c.preamble.id: self._counter(c) for c in self._p4info.counters},
            direct_counters={i: c.direct_table_id for i, c in self._direct_counters.items()},
            meters={m.preamble.id: self._meter(m) for m in self._p4info.meters},
            direct_meters={i: m.direct_table_id for i, m in self._direct_meters.items()},
            registers={r.preamble.id: self._register(r) for r in self._p4info.registers},
            digests={d.preamble.id: self._digest(d) for d in self._p4info.digests},
            value_sets=frozenset(v.preamble.id for v in self._p4info.value_sets),
            packet_in=self._controller_header(PACKET_IN),
            packet_out=self._controller_header(PACKET_OUT),
        )

    def _check_ids(self) -> None:
        info = self._p4info
        seen: set[int] = set()
        for group in (
            info.tables,
            info.actions,
            info.action_profiles,
            info.counters,
            info.direct_counters,
            info.meters,
            info.direct_meters,
            info.registers,
            info.digests,
            info.value_sets,
            info.controller_packet_metadata,
        ):
            for item in group:
                preamble = item.preamble
                if preamble.id == 0 or preamble.id in seen:
                    raise invalid_argument(f"P4Info: id {preamble.id} of {preamble.name}")
                seen.add(preamble.id)

    def _widths(
        self, what: str, bitwidth: int, type_name: str, target_width: int
    ) -> tuple[int, int]:
        """(controller's width, data plane's width) of a field, or why there is none."""
        if type_name:
            new_type = self._types.new_types.get(type_name)
            if new_type is not None and new_type.HasField("translated_type"):
                translated = new_type.translated_type
                if translated.WhichOneof("sdn_type") == "sdn_string":
                    raise unimplemented(
                        f"{what}: type {type_name} with @p4runtime_translation"
                        f"({translated.uri!r}, string)"
                    )
                return translated.sdn_bitwidth, target_width
        if bitwidth != target_width:
            raise _misfit(f"{what} is {bitwidth} bits wide, the program says {target_width}")
        return bitwidth, target_width

    def _table(self, info: p4i.Table) -> TableSchema:
        name = info.preamble.name
        table = self._tables.get(name)
        if table is None:
            raise _misfit(f"no table {name}")
        if info.HasField("other_properties"):
            raise unimplemented(f"table {name}: other_properties")
        if len(info.match_fields) != len(table.key):
            raise _misfit(
                f"table {name} has "
                f"{len(info.match_fields)} match fields, the program says {len(table.key)}"
            )
        fields = tuple(
            self._match_field(name, match, key)
            for match, key in zip(info.match_fields, table.key, strict=True)
        )
        if len({f.id for f in fields}) != len(fields):
            raise invalid_argument(f"P4Info: table {name} repeats a match field id")
        refs = {ref.id: ref for ref in info.action_refs}
        actions = {
            action_id: self._action(name, action_id, table.actions, ref.scope)
            for action_id, ref in refs.items()
        }
        counter: CounterUnits | None = None
        has_meter = False
        for resource in info.direct_resource_ids:
            if resource in self._direct_counters:
                counter = _units(self._direct_counters[resource].spec)
                if not table.with_counters:
                    raise _misfit(f"{name} has no direct counter")
            elif resource in self._direct_meters:
                has_meter = True
                if table.meter is None:
                    raise _misfit(f"{name} has no direct meter")
            else:
                raise invalid_argument(f"P4Info: table {name}: direct resource {resource}")
        profile_id = info.implementation_id or None
        if profile_id is not None and profile_id not in self._profiles:
            raise invalid_argument(f"P4Info: table {name}: implementation {profile_id}")
        if (profile_id is None) != (table.action_profile is None):
            raise _misfit(f"implementation of table {name}")
        return TableSchema(
            id=info.preamble.id,
            name=name,
            fields=fields,
            actions=actions,
            size=table.size,
            needs_priority=any(f.kind in PRIORITY_KINDS for f in fields),
            is_const=info.is_const_table,
            const_default=info.const_default_action_id != 0,
            profile_id=profile_id,
            counter=counter,
            has_meter=has_meter,
            idle_timeout=info.idle_timeout_behavior == p4i.Table.NOTIFY_CONTROL,
        )

    def _match_field(self, table: str, match: p4i.MatchField, key: ir.KeyField) -> FieldSchema:
        what = f"{table} match field {match.name}"
        kind = _MATCH_KINDS.get(match.match_type)
        if kind is None:
            raise unimplemented(f"{what}: match type {match.other_match_type or match.match_type}")
        if key.match not in _JSON_KINDS[kind]:
            raise _misfit(f"{what} is {kind.value}, the program says {key.match}")
        width, target_width = self._widths(what, match.bitwidth, match.type_name.name, key.width)
        return FieldSchema(match.id, match.name, width, target_width, kind)

    def _action(
        self, where: str, action_id: int, indices: Sequence[int], scope: int
    ) -> ActionSchema:
        info = self._actions.get(action_id)
        if info is None:
            raise invalid_argument(f"P4Info: {where} refers to action {action_id}")
        name = info.preamble.name
        index = next((i for i in indices if self._program.actions[i].name == name), None)
        if index is None:
            raise _misfit(f"{where} has no action {name}")
        parameters = self._program.actions[index].parameters
        if len(parameters) != len(info.params):
            raise _misfit(f"parameters of action {name}")
        params = []
        for param, parameter in zip(info.params, parameters, strict=True):
            width, target_width = self._widths(
                f"{name} parameter {param.name}",
                param.bitwidth,
                param.type_name.name,
                parameter.width,
            )
            params.append(ParamSchema(param.id, param.name, width, target_width))
        if len({p.id for p in params}) != len(params):
            raise invalid_argument(f"P4Info: action {name} repeats a parameter id")
        return ActionSchema(
            id=action_id,
            name=name,
            index=index,
            params=tuple(params),
            in_entries=scope != p4i.ActionRef.DEFAULT_ONLY,
            as_default=scope != p4i.ActionRef.TABLE_ONLY,
        )

    def _profile(self, info: p4i.ActionProfile, tables: dict[int, TableSchema]) -> ProfileSchema:
        name = info.preamble.name
        profile = next((p for p in self._program.action_profiles if p.name == name), None)
        if profile is None or info.with_selector != (profile.selector is not None):
            raise _misfit(f"action profile {name}")
        actions: dict[int, ActionSchema] = {}
        for table_id in info.table_ids:
            if table_id not in tables:
                raise invalid_argument(f"P4Info: action profile {name}: table {table_id}")
            actions.update(tables[table_id].actions)
        return ProfileSchema(
            id=info.preamble.id,
            name=name,
            with_selector=info.with_selector,
            size=profile.size,
            max_group_size=info.max_group_size,
            actions=actions,
        )

    def _counter(self, info: p4i.Counter) -> ArraySchema:
        array = self._array("counter", info, self._program.counters)
        return ArraySchema(info.preamble.id, array.name, array.size, units=_units(info.spec))

    def _meter(self, info: p4i.Meter) -> ArraySchema:
        array = self._array("meter", info, self._program.meters)
        return ArraySchema(info.preamble.id, array.name, array.size)

    def _register(self, info: p4i.Register) -> ArraySchema:
        array = self._array("register", info, self._program.registers)
        return ArraySchema(info.preamble.id, array.name, array.size, array.width)

    def _array(
        self, kind: str, info: p4i.Counter | p4i.Meter | p4i.Register, arrays: Sequence[_Array]
    ) -> _Array:
        """The program's array that P4Info means; a direct one is none."""
        name = info.preamble.name
        array = next((a for a in arrays if a.name == name), None)
        if array is None or getattr(array, "direct", None) is not None:
            raise _misfit(f"{kind} {name}")
        index = info.index_type_name.name
        new_type = self._types.new_types.get(index) if index else None
        if new_type is not None and new_type.HasField("translated_type"):
            raise unimplemented(f"{name}: index of translated type {index}")
        return array

    def _digest(self, info: p4i.Digest) -> DigestSchema:
        name = info.preamble.name
        learn = next((one for one in self._program.learn_lists if one.name == name), None)
        if learn is None:
            raise _misfit(f"digest {name}")
        data_type = self._data_type(f"digest {name}", info.type_spec, depth=0)
        target = tuple(self._program.width(ref) for ref in learn.fields)
        if data_type.widths != target:
            raise _misfit(
                f"digest {name} has fields of {data_type.widths} bits, the program says {target}"
            )
        return DigestSchema(info.preamble.id, name, data_type)

    def _data_type(self, what: str, spec: p4t.P4DataTypeSpec, depth: int) -> DataType:
        if depth > 8:
            raise unimplemented(f"{what}: type nested more than 8 deep")
        which = spec.WhichOneof("type_spec")
        if which == "bitstring":
            bits = spec.bitstring
            kind = bits.WhichOneof("type_spec")
            if kind == "bit":
                return DataType("bitstring", bits.bit.bitwidth)
            if kind == "int":
                return DataType("bitstring", bits.int.bitwidth)
        elif which == "bool":
            return DataType("bool", 1)
        elif which == "tuple":
            members = [self._data_type(what, m, depth + 1) for m in spec.tuple.members]
            return DataType("tuple", members=members)
        elif which == "struct":
            struct = self._types.structs.get(spec.struct.name)
            if struct is not None:
                members = [self._data_type(what, m.type_spec, depth + 1) for m in struct.members]
                return DataType("struct", members=members)
        elif which == "new_type":
            new_type = self._types.new_types.get(spec.new_type.name)
            if new_type is not None and new_type.HasField("original_type"):
                return self._data_type(what, new_type.original_type, depth + 1)
        elif which == "serializable_enum":
            enum = self._types.serializable_enums.get(spec.serializable_enum.name)
            if enum is not None:
                return DataType("enum_value", enum.underlying_type.bitwidth)
        raise unimplemented(f"{what}: type {which or 'unset'} in P4Data")

    def _controller_header(self, name: str) -> ControllerHeader:
        info = next(
            (h for h in self._p4info.controller_packet_metadata if h.preamble.name == name), None
        )
        if info is None:
            return ControllerHeader([])
        names = tuple(m.name for m in info.metadata)
        layouts = [
            tuple(f.width for f in header.fields)
            for header in self._program.headers
            if not header.metadata and tuple(f.name for f in header.fields) == names
        ]
        widths = tuple(m.bitwidth for m in info.metadata)
        layout = widths if widths in layouts or not layouts else layouts[0]
        fields = []
        for metadata, target_width in zip(info.metadata, layout, strict=True):
            what = f"{name} metadata {metadata.name}"
            _, width = self._widths(what, metadata.bitwidth, metadata.type_name.name, target_width)
            fields.append((metadata.id, metadata.name, width))
        try:
            return ControllerHeader(fields)
        except ValueError as error:
            raise invalid_argument(f"P4Info: {name}: {error}") from error


def _units(spec: p4i.CounterSpec) -> CounterUnits:
    packets = spec.unit != p4i.CounterSpec.BYTES
    return CounterUnits(packets=packets, bytes=spec.unit != p4i.CounterSpec.PACKETS)
