"""The loader: p4c's BMv2 JSON (version 2.x) to a typed `Program`.

This module owns the file format (behavioral-model docs/JSON_format.md) and resolves every name
in it. It must not know how a program is run. It is where strictness lives: a file that is not
well-formed is a `ProgramError`, and one that uses anything that the engines do not run is an
`UnsupportedConstruct` that names the construct and where it stands, so that a program either
runs as simple_switch runs it or does not load at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

from kvcast.switchsim import hashing, ir
from kvcast.switchsim.ir import ProgramError, UnsupportedConstruct

Json: TypeAlias = Any
_Reader: TypeAlias = Callable[[Json, str], Any]

MAX_FIELD_BITS = 1 << 16
MAX_DEPTH = 100
"""Operators in one another; each costs the interpreter a few Python frames of its thousand."""
MAX_ARRAY_SIZE = 1 << 26
"""Cells of one register, counter or meter array; more is a malformed or hostile file."""

_ARITHMETIC = {
    "+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^", "two_comp_mod", "sat_cast", "usat_cast"
}  # fmt: skip
_ORDER = {"<", ">", "<=", ">="}

INTRINSIC = (
    "standard_metadata.ingress_port",
    "standard_metadata.egress_spec",
    "standard_metadata.egress_port",
    "standard_metadata.instance_type",
    "standard_metadata.packet_length",
    "standard_metadata.parser_error",
    "standard_metadata.checksum_error",
    "intrinsic_metadata.ingress_global_timestamp",
    "intrinsic_metadata.egress_global_timestamp",
    "intrinsic_metadata.mcast_grp",
    "intrinsic_metadata.egress_rid",
    "intrinsic_metadata.priority",
    "queueing_metadata.enq_timestamp",
    "queueing_metadata.enq_qdepth",
    "queueing_metadata.deq_timedelta",
    "queueing_metadata.deq_qdepth",
    "queueing_metadata.qid",
)
_REQUIRED = INTRINSIC[:5]


def load(source: bytes | str, name: str = "program") -> ir.Program:
    """Read a program from the text of a BMv2 JSON file."""
    try:
        root = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{name}: not JSON: {error}") from error
    if not isinstance(root, dict):
        raise ProgramError(f"{name}: the top level is not a JSON object")
    try:
        return _Loader(root, name).program()
    except ProgramError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        AssertionError,
        RecursionError,
    ) as error:
        # What slipped past the named checks is still a malformed file, and said to be one.
        raise ProgramError(f"{name}: malformed: {type(error).__name__}: {error}") from error


def load_file(path: Path) -> ir.Program:
    try:
        return load(path.read_bytes(), path.name)
    except OSError as error:
        raise ProgramError(f"cannot read {path}: {error}") from error


def _number(text: Json, where: str) -> int:
    """A BMv2 hexadecimal string: optional minus, optional 0x."""
    if not isinstance(text, str):
        raise ProgramError(f"{where}: {text!r} is not a hexadecimal string")
    try:
        return int(text, 16)
    except ValueError:
        raise ProgramError(f"{where}: {text!r} is not a hexadecimal string") from None


def _name(item: Json) -> str:
    name = item["name"]
    if not isinstance(name, str):
        raise ProgramError(f"{name!r} is not a name")
    return name


def _integer(value: Json, where: str, low: int = 0, high: int = 1 << 62) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ProgramError(f"{where}: {value!r} is not an integer in {low}..{high}")
    return value


def _items(value: Json, where: str) -> Sequence[Json]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ProgramError(f"{where}: a JSON array is expected")
    return value


def _elements(item: Json, key: str, numbers: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(numbers[i] for i in _items(item[key], _name(item)))


def _index(names: Sequence[str], what: str) -> dict[str, int]:
    result: dict[str, int] = {}
    for number, name in enumerate(names):
        if name in result:
            raise ProgramError(f"{what} {name!r} is declared twice")
        result[name] = number
    return result


def _find(table: Mapping[str, int], name: Json, what: str, where: str) -> int:
    try:
        return table[name]
    except (KeyError, TypeError):
        raise ProgramError(f"{where}: no {what} is called {name!r}") from None


class _Loader:
    """One load. The methods run in the order in which `program` calls them."""

    def __init__(self, root: dict[str, Json], name: str) -> None:
        self.root = root
        self.name = name
        self.depth = 0
        self.parameter_count = 0
        """Parameters of the action that is being read."""

    def section(self, key: str) -> Sequence[Json]:
        return _items(self.root.get(key), key)

    def program(self) -> ir.Program:
        version = self.version()
        if self.section("extern_instances"):
            kind = self.section("extern_instances")[0].get("type")
            raise UnsupportedConstruct(f"extern instance of type {kind}", "extern_instances")
        if self.section("parse_vsets"):
            name = self.section("parse_vsets")[0].get("name")
            raise UnsupportedConstruct("parser value set", str(name))
        self.headers_and_stacks()
        self.aliases()
        self.errors = tuple(
            (str(e[0]), _integer(e[1], "errors", 0, (1 << 31) - 1)) for e in self.section("errors")
        )
        self.externs()
        self.actions_section()
        parser = self.parser(self.named("parsers", "parser"))
        deparser = self.deparser(self.named("deparsers", "deparser"))
        ingress, egress = self.pipelines()
        return ir.Program(
            name=str(self.root.get("program", self.name)),
            version=version,
            headers=self.headers,
            stacks=self.stacks,
            unions=self.unions,
            union_stacks=self.union_stacks,
            errors=self.errors,
            parser=parser,
            deparser=deparser,
            actions=self.actions,
            nodes=self.nodes,
            ingress=ingress,
            egress=egress,
            calculations=self.calculations,
            checksums=self.checksums(),
            counters=self.counters,
            meters=self.meters,
            registers=self.registers,
            action_profiles=self.action_profiles,
            field_lists=self.reference_lists("field_lists"),
            learn_lists=self.reference_lists("learn_lists"),
            intrinsic=self.intrinsic,
        )

    def version(self) -> tuple[int, int]:
        meta = self.root.get("__meta__")
        version = meta.get("version") if isinstance(meta, dict) else None
        if not isinstance(version, list) or len(version) != 2:
            raise ProgramError(f"{self.name}: no __meta__.version: not a BMv2 JSON file")
        major, minor = (_integer(v, "__meta__.version") for v in version)
        if major != 2:
            raise UnsupportedConstruct(f"BMv2 JSON version {major}.{minor}", "__meta__")
        return major, minor

    def named(self, section: str, name: str) -> dict[str, Json]:
        for item in self.section(section):
            if item.get("name") == name:
                assert isinstance(item, dict)
                return item
        raise ProgramError(f"{self.name}: no {name!r} in {section}: not a v1model program")

    # --- header space -----------------------------------------------------------------------

    def headers_and_stacks(self) -> None:
        types: dict[str, tuple[tuple[ir.Field, ...], int | None]] = {}
        for item in self.section("header_types"):
            types[_name(item)] = self.header_type(item)

        id_to_header: dict[int, int] = {}
        names: list[str] = []
        draft: list[tuple[str, str, bool]] = []
        for item in self.section("headers"):
            type_name = item["header_type"]
            if type_name not in types:
                raise ProgramError(f"header {item['name']}: no header type {type_name!r}")
            id_to_header[item["id"]] = len(draft)
            names.append(_name(item))
            draft.append((_name(item), type_name, bool(item.get("metadata", False))))
        self.header_index = _index(names, "header")

        union_types = {
            _name(item): tuple(str(m[0]) for m in _items(item["headers"], _name(item)))
            for item in self.section("header_union_types")
        }
        union_of: dict[int, int] = {}
        unions: list[ir.HeaderUnion] = []
        id_to_union: dict[int, int] = {}
        for item in self.section("header_unions"):
            members = _elements(item, "header_ids", id_to_header)
            id_to_union[item["id"]] = len(unions)
            union_of |= dict.fromkeys(members, len(unions))
            unions.append(ir.HeaderUnion(_name(item), union_types[item["union_type"]], members))
        self.unions = tuple(unions)
        self.union_index = _index([u.name for u in unions], "header union")

        headers: list[ir.Header] = []
        for number, (name, type_name, metadata) in enumerate(draft):
            fields, varbit = types[type_name]
            bits = sum(f.width for f in fields if not f.varbit)
            if not metadata and bits % 8:
                raise ProgramError(f"header {name}: {bits} bits are not whole bytes")
            headers.append(
                ir.Header(name, type_name, fields, metadata, union_of.get(number), varbit)
            )
        self.headers = tuple(headers)
        self.field_index = [_index([f.name for f in h.fields], "field") for h in headers]

        self.stacks = tuple(
            ir.HeaderStack(_name(item), _elements(item, "header_ids", id_to_header))
            for item in self.section("header_stacks")
        )
        self.stack_index = _index([s.name for s in self.stacks], "header stack")
        self.union_stacks = tuple(
            ir.HeaderUnionStack(_name(item), _elements(item, "header_union_ids", id_to_union))
            for item in self.section("header_union_stacks")
        )
        self.union_stack_index = _index([s.name for s in self.union_stacks], "union stack")
        for stack in self.stacks:
            if not stack.headers:
                raise ProgramError(f"header stack {stack.name} is empty")
        for union_stack in self.union_stacks:
            if not union_stack.unions:
                raise ProgramError(f"union stack {union_stack.name} is empty")

    def header_type(self, item: dict[str, Json]) -> tuple[tuple[ir.Field, ...], int | None]:
        where = f"header type {item['name']}"
        if item.get("length_exp") is not None:
            raise UnsupportedConstruct("length expression of a header (P4_14)", where)
        fixed = 0
        varbit: int | None = None
        fields: list[ir.Field] = []
        raw = _items(item["fields"], where)
        for number, entry in enumerate(raw):
            name, width = str(entry[0]), entry[1]
            signed = bool(entry[2]) if len(entry) > 2 else False
            if len(entry) > 3 and entry[3]:
                raise UnsupportedConstruct("saturating field", f"{where}, field {name}")
            if width == "*":
                if varbit is not None:
                    raise ProgramError(f"{where}: two variable-length fields")
                varbit = number
                fields.append(ir.Field(name, 0, signed, varbit=True))
            else:
                fixed += _integer(width, f"{where}, field {name}", 0, MAX_FIELD_BITS)
                fields.append(ir.Field(name, width, signed))
        if varbit is not None:
            max_bytes = _integer(item.get("max_length"), where, 0, MAX_FIELD_BITS)
            if max_bytes * 8 < fixed:
                raise ProgramError(f"{where}: max_length is shorter than the fixed fields")
            if fields[varbit].signed:
                raise ProgramError(f"{where}: a signed variable-length field")
            name = fields[varbit].name
            fields[varbit] = ir.Field(name, max_bytes * 8 - fixed, varbit=True)
        return tuple(fields), varbit

    def field(self, value: Json, where: str) -> ir.FieldRef:
        if not isinstance(value, list) or len(value) != 2:
            raise ProgramError(f"{where}: {value!r} is not a field reference")
        header = _find(self.header_index, value[0], "header", where)
        if value[1] == "$valid$":
            return ir.FieldRef(header, ir.VALID)
        return ir.FieldRef(header, _find(self.field_index[header], value[1], "field", where))

    def is_varbit(self, ref: ir.FieldRef) -> bool:
        return ref.field != ir.VALID and self.headers[ref.header].fields[ref.field].varbit

    def width(self, ref: ir.FieldRef) -> int:
        return 1 if ref.field == ir.VALID else self.headers[ref.header].fields[ref.field].width

    def aliases(self) -> None:
        found: dict[str, ir.FieldRef] = {}
        for name in INTRINSIC:
            header, field = name.split(".")
            number = self.header_index.get(header)
            if number is not None and field in self.field_index[number]:
                found[name] = ir.FieldRef(number, self.field_index[number][field])
        for alias in self.section("field_aliases"):
            if alias[0] in INTRINSIC:
                found[alias[0]] = self.field(alias[1], "field_aliases")
        for name in _REQUIRED:
            if name not in found:
                raise ProgramError(f"{self.name}: no field {name}: not a v1model program")
        self.intrinsic = tuple(found.items())

    # --- expressions ------------------------------------------------------------------------

    def expr(self, j: Json, where: str) -> ir.Expr:
        if not isinstance(j, dict) or ("type" not in j and "op" not in j):
            raise ProgramError(f"{where}: {j!r} is not an expression")
        if "op" in j:
            return self.operation(j, where)
        kind, value = j["type"], j.get("value")
        match kind:
            case "expression":
                return self.expr(value, where)
            case "hexstr":
                return ir.Const(_number(value, where))
            case "bool":
                return ir.BoolConst(bool(value))
            case "field":
                return self.field(value, where)
            case "local" | "runtime_data":
                if self.parameter_count == 0:
                    raise ProgramError(f"{where}: an action parameter where there is none")
                return ir.Local(_integer(value, where, 0, self.parameter_count - 1))
            case "header":
                return ir.HeaderOf(_find(self.header_index, value, "header", where))
            case "header_stack":
                return ir.StackOf(_find(self.stack_index, value, "header stack", where))
            case "header_union":
                return ir.UnionOf(_find(self.union_index, value, "header union", where))
            case "header_union_stack":
                return ir.UnionStackOf(_find(self.union_stack_index, value, "union stack", where))
            case "stack_field":
                return self.last_field(value, where)
            case "register":
                assert isinstance(value, list)
                array = _find(self.register_index, value[0], "register array", where)
                return ir.RegisterLoad(array, self.data(value[1], where))
            case _:
                raise UnsupportedConstruct(f"value of type {kind!r}", where)

    def last_field(self, value: Json, where: str) -> ir.LastField:
        assert isinstance(value, list)
        stack = _find(self.stack_index, value[0], "header stack", where)
        headers = self.stacks[stack].headers
        field = ir.VALID
        if value[1] != "$valid$":
            field = _find(self.field_index[headers[0]], value[1], "field", where)
        return ir.LastField(ir.StackOf(stack), headers, field)

    def operation(self, j: dict[str, Json], where: str) -> ir.Expr:
        if self.depth >= MAX_DEPTH:
            raise UnsupportedConstruct(f"expression nested deeper than {MAX_DEPTH}", where)
        self.depth += 1
        try:
            return self.operator(j, where)
        finally:
            self.depth -= 1

    def operator(self, j: dict[str, Json], where: str) -> ir.Expr:
        op, left, right = j["op"], j.get("left"), j.get("right")
        if op in _ARITHMETIC:
            return ir.Binary(op, self.data(left, where), self.data(right, where))
        if op in _ORDER:
            return ir.Compare(op, self.data(left, where), self.data(right, where))
        if op in self.unary:
            make, read = self.unary[op]
            return make(read(right if right is not None else left, where))
        match op:
            case "==" | "!=":
                return self.equality(op, self.expr(left, where), self.expr(right, where), where)
            case "and" | "or":
                return ir.Logic(op, self.boolean(left, where), self.boolean(right, where))
            case "?":
                condition = self.boolean(j.get("cond"), where)
                yes, no = self.expr(left, where), self.expr(right, where)
                if isinstance(yes, ir.DataExpr) and isinstance(no, ir.DataExpr):
                    return ir.ChooseData(condition, yes, no)
                if isinstance(yes, ir.BoolExpr) and isinstance(no, ir.BoolExpr):
                    return ir.ChooseBool(condition, yes, no)
                raise UnsupportedConstruct("conditional expression of headers", where)
            case "dereference_header_stack":
                stack = self.stack(left, where)
                if not isinstance(stack, ir.StackOf):
                    raise ProgramError(f"{where}: {op} of something else than a header stack")
                return ir.StackElement(stack.stack, self.data(right, where))
            case "dereference_union_stack":
                stack = self.stack(left, where)
                if not isinstance(stack, ir.UnionStackOf):
                    raise ProgramError(f"{where}: {op} of something else than a union stack")
                return ir.UnionStackElement(stack.union_stack, self.data(right, where))
            case "access_field":
                header = self.header(left, where)
                fields = self.headers[self.representative(header)].fields
                number = _integer(right, where, 0, len(fields))
                # BMv2 keeps the hidden $valid$ behind the last field.
                field = ir.VALID if number == len(fields) else number
                if isinstance(header, ir.HeaderOf):
                    return ir.FieldRef(header.header, field)
                return ir.ElementField(header, field)
            case "access_union_header":
                union = self.union(left, where)
                members = self.unions[self.union_representative(union)].headers
                return ir.UnionMember(union, _integer(right, where, 0, len(members) - 1))
            case _:
                raise UnsupportedConstruct(f"operator {op!r}", where)

    @cached_property
    def unary(self) -> Mapping[str, tuple[Callable[..., ir.Expr], _Reader]]:
        """By operator: what it becomes, and how its operand is read."""
        return {
            "not": (ir.Not, self.boolean),
            "~": (ir.Invert, self.data),
            "d2b": (ir.DataToBool, self.data),
            "b2d": (ir.BoolToData, self.boolean),
            "valid": (ir.HeaderValid, self.header),
            "valid_union": (ir.UnionValid, self.union),
            "last_stack_index": (ir.LastIndex, self.stack),
            "size_stack": (ir.StackSize, self.stack),
        }

    def equality(self, op: str, left: ir.Expr, right: ir.Expr, where: str) -> ir.BoolExpr:
        result: ir.BoolExpr
        if isinstance(left, ir.DataExpr) and isinstance(right, ir.DataExpr):
            return ir.Compare(op, left, right)
        if isinstance(left, ir.BoolExpr) and isinstance(right, ir.BoolExpr):
            return ir.Logic(op, left, right)
        if isinstance(left, ir.HeaderExpr) and isinstance(right, ir.HeaderExpr):
            result = ir.HeadersEqual(left, right)
        elif isinstance(left, ir.UnionExpr) and isinstance(right, ir.UnionExpr):
            result = ir.UnionsEqual(left, right)
        elif isinstance(left, ir.StackExpr) and isinstance(right, ir.StackExpr):
            raise UnsupportedConstruct("comparison of header stacks", where)
        else:
            raise ProgramError(f"{where}: the sides of {op} are of different kinds")
        return ir.Not(result) if op == "!=" else result

    def representative(self, header: ir.HeaderExpr) -> int:
        """A header of the same type as the one that the expression will name."""
        match header:
            case ir.HeaderOf(number):
                return number
            case ir.StackElement(stack, _):
                return self.stacks[stack].headers[0]
            case ir.UnionMember(union, member):
                return self.unions[self.union_representative(union)].headers[member]

    def union_representative(self, union: ir.UnionExpr) -> int:
        match union:
            case ir.UnionOf(number):
                return number
            case ir.UnionStackElement(stack, _):
                return self.union_stacks[stack].unions[0]

    def data(self, j: Json, where: str) -> ir.DataExpr:
        e = self.expr(j, where)
        if not isinstance(e, ir.DataExpr):
            raise ProgramError(f"{where}: a number is expected")
        return e

    def boolean(self, j: Json, where: str) -> ir.BoolExpr:
        e = self.expr(j, where)
        if not isinstance(e, ir.BoolExpr):
            raise ProgramError(f"{where}: a boolean is expected")
        return e

    def header(self, j: Json, where: str) -> ir.HeaderExpr:
        e = self.expr(j, where)
        if not isinstance(e, ir.HeaderExpr):
            raise ProgramError(f"{where}: a header is expected")
        return e

    def union(self, j: Json, where: str) -> ir.UnionExpr:
        e = self.expr(j, where)
        if not isinstance(e, ir.UnionExpr):
            raise ProgramError(f"{where}: a header union is expected")
        return e

    def stack(self, j: Json, where: str) -> ir.StackExpr:
        e = self.expr(j, where)
        if not isinstance(e, ir.StackExpr):
            raise ProgramError(f"{where}: a stack is expected")
        return e

    # --- statements -------------------------------------------------------------------------

    def statement(self, j: dict[str, Json], where: str) -> ir.Statement:
        op = j.get("op")
        where = f"{where}, {op}"
        args = _items(j.get("parameters"), where)
        known = self.primitives.get(str(op))
        if known is None:
            raise UnsupportedConstruct(f"primitive {op!r}", where)
        make, *readers = known
        if len(args) != len(readers):
            raise ProgramError(f"{where}: {len(readers)} parameters are expected, not {len(args)}")
        values = [read(j, where) for read, j in zip(readers, args, strict=True)]
        statement: ir.Statement = make(*values)
        self.check_statement(statement, where)
        return statement

    @cached_property
    def primitives(self) -> Mapping[str, tuple[Callable[..., ir.Statement], *tuple[_Reader, ...]]]:
        """By name: what it becomes, and how each of its parameters is read."""
        data, header, stack, lvalue = self.data, self.header, self.stack, self.lvalue

        def receiver(j: Json, where: str) -> None:
            """Of a digest: always the controller."""

        meter = partial(self.array, "meter_array", self.meter_index)
        counter = partial(self.array, "counter_array", self.counter_index)
        register = partial(self.array, "register_array", self.register_index)
        calculation = partial(self.array, "calculation", self.calculation_index)
        return {
            "assign": (ir.Assign, lvalue, data),
            "assign_VL": (ir.AssignVarbit, self.varbit, self.varbit),
            "assign_header": (ir.AssignHeader, header, header),
            "assign_union": (ir.AssignUnion, self.union, self.union),
            "assign_header_stack": (ir.AssignStack, stack, stack),
            "assign_union_stack": (ir.AssignStack, stack, stack),
            "push": (ir.Push, stack, data),
            "pop": (ir.Pop, stack, data),
            "add_header": (ir.AddHeader, header),
            "remove_header": (ir.RemoveHeader, header),
            "_jump": (ir.Jump, self.jump_target),
            "_jump_if_zero": (ir.JumpIfZero, data, self.jump_target),
            "exit": (ir.Exit,),
            "assert": (partial(ir.Check, "assert"), self.condition),
            "assume": (partial(ir.Check, "assume"), self.condition),
            "log_msg": (ir.LogMessage, self.log_text, self.log_arguments),
            "mark_to_drop": (lambda fields: ir.MarkToDrop(*fields), self.drop_fields),
            "clone_ingress_pkt_to_egress": (ir.Clone, data, data),
            "clone_egress_pkt_to_egress": (ir.Clone, data, data),
            "resubmit": (ir.Resubmit, data),
            "recirculate": (ir.Recirculate, data),
            "generate_digest": (lambda _, number: ir.GenerateDigest(number), receiver, data),
            "modify_field_with_hash_based_offset": (ir.Hash, lvalue, data, calculation, data),
            "modify_field_rng_uniform": (ir.Random, lvalue, data, data),
            "execute_meter": (ir.ExecuteMeter, meter, data, lvalue),
            "count": (ir.Count, counter, data),
            "register_read": (ir.RegisterRead, lvalue, register, data),
            "register_write": (ir.RegisterWrite, register, data, data),
            "truncate": (ir.Truncate, data),
            "no_op": (ir.NoOp,),
        }

    def check_statement(self, statement: ir.Statement, where: str) -> None:
        """What the parameters must have in common."""
        match statement:
            case ir.AssignStack(target, source) if type(target) is not type(source):
                raise ProgramError(f"{where}: stacks of different kinds")
            case ir.Hash() if self.calculations[statement.calculation].with_payload:
                raise UnsupportedConstruct("hash over the payload in an action", where)
            case _:
                pass

    def lvalue(self, j: Json, where: str) -> ir.LValue:
        e = self.expr(j, where)
        if isinstance(e, ir.LValue):
            if e.field == ir.VALID:
                raise ProgramError(f"{where}: $valid$ is read-only")
            if isinstance(e, ir.FieldRef) and self.is_varbit(e):
                raise ProgramError(f"{where}: a variable-length field needs assign_VL")
            return e
        if isinstance(e, ir.RegisterLoad):
            raise UnsupportedConstruct("register as the target of an assignment", where)
        raise ProgramError(f"{where}: not something to assign to")

    def varbit(self, j: Json, where: str) -> ir.FieldRef:
        e = self.expr(j, where)
        if not isinstance(e, ir.FieldRef):
            raise UnsupportedConstruct("variable-length field found at run time", where)
        if not self.is_varbit(e):
            raise ProgramError(f"{where}: not variable-length fields")
        return e

    def condition(self, j: Json, where: str) -> ir.DataExpr:
        e = self.expr(j, where)
        if isinstance(e, ir.BoolExpr):
            return ir.BoolToData(e)
        if isinstance(e, ir.DataExpr):
            return e
        raise ProgramError(f"{where}: a condition is expected")

    def jump_target(self, j: Json, where: str) -> int:
        target = self.data(j, where)
        if not isinstance(target, ir.Const):
            raise UnsupportedConstruct("computed jump", where)
        return target.value

    def log_text(self, j: Json, where: str) -> str:
        return str(self.log_parameter("string", j, where))

    def log_arguments(self, j: Json, where: str) -> tuple[ir.DataExpr, ...]:
        vector = self.log_parameter("parameters_vector", j, where)
        return tuple(self.data(argument, where) for argument in _items(vector, where))

    def log_parameter(self, kind: str, j: Json, where: str) -> Json:
        if j.get("type") != kind:
            raise ProgramError(f"{where}: a string and a vector of parameters are expected")
        return j["value"]

    def drop_fields(self, j: Json, where: str) -> tuple[ir.FieldRef, ir.FieldRef | None]:
        """egress_spec and, where there is one, mcast_grp."""
        header = self.header(j, where)
        if not isinstance(header, ir.HeaderOf):
            raise ProgramError(f"{where}: standard metadata is expected")
        fields = self.field_index[header.header]
        if "egress_spec" not in fields:
            raise ProgramError(f"{where}: {self.headers[header.header].name} has no egress_spec")
        group = fields.get("mcast_grp")
        return (
            ir.FieldRef(header.header, fields["egress_spec"]),
            None if group is None else ir.FieldRef(header.header, group),
        )

    def array(self, kind: str, index: Mapping[str, int], j: Json, where: str) -> int:
        if j.get("type") != kind:
            raise ProgramError(f"{where}: a {kind} is expected")
        return _find(index, j.get("value"), kind, where)

    # --- externs ----------------------------------------------------------------------------

    def externs(self) -> None:
        self.registers = tuple(
            ir.RegisterArray(
                _name(r),
                _integer(r["size"], _name(r), 0, MAX_ARRAY_SIZE),
                _integer(r["bitwidth"], _name(r), 1, MAX_FIELD_BITS),
            )
            for r in self.section("register_arrays")
        )
        self.register_index = _index([r.name for r in self.registers], "register array")
        self.counters = tuple(
            ir.CounterArray(
                _name(c),
                0 if c.get("is_direct") else _integer(c["size"], _name(c), 0, MAX_ARRAY_SIZE),
                c["binding"] if c.get("is_direct") else None,
            )
            for c in self.section("counter_arrays")
        )
        self.counter_index = _index([c.name for c in self.counters], "counter array")
        meters: list[ir.MeterArray] = []
        for m in self.section("meter_arrays"):
            direct = bool(m.get("is_direct"))
            if m["type"] not in ("bytes", "packets"):
                raise UnsupportedConstruct(f"meter of type {m['type']!r}", _name(m))
            size = 0 if direct else _integer(m["size"], _name(m), 0, MAX_ARRAY_SIZE)
            rates = _integer(m["rate_count"], _name(m), 1, 16)
            target = self.field(m["result_target"], _name(m)) if direct else None
            binding = m["binding"] if direct else None
            meters.append(ir.MeterArray(_name(m), size, m["type"], rates, binding, target))
        self.meters = tuple(meters)
        self.meter_index = _index([m.name for m in self.meters], "meter array")
        self.calculations = tuple(self.calculation(c) for c in self.section("calculations"))
        self.calculation_index = _index([c.name for c in self.calculations], "calculation")

    def calculation(self, j: dict[str, Json]) -> ir.Calculation:
        where = f"calculation {j['name']}"
        self.check_algorithm(j["algo"], where)
        items: list[ir.PackedItem] = []
        payload = False
        for item in _items(j["input"], where):
            match item["type"]:
                case "field":
                    items.append(self.field(item["value"], where))
                case "hexstr":
                    width = _integer(item["bitwidth"], where, 1, MAX_FIELD_BITS)
                    items.append(ir.PackedConst(_number(item["value"], where), width))
                case "header":
                    items.append(
                        ir.PackedHeader(_find(self.header_index, item["value"], "header", where))
                    )
                case "payload":
                    payload = True
                case other:
                    raise UnsupportedConstruct(f"calculation over {other!r}", where)
        return ir.Calculation(_name(j), j["algo"], tuple(items), payload)

    def check_algorithm(self, name: Json, where: str) -> None:
        if name not in hashing.ALGORITHMS:
            raise UnsupportedConstruct(f"hash algorithm {name!r}", where)

    def checksums(self) -> tuple[ir.Checksum, ...]:
        result: list[ir.Checksum] = []
        for j in self.section("checksums"):
            where = f"checksum {j['name']}"
            if j["type"] != "generic":
                raise UnsupportedConstruct(f"checksum of type {j['type']!r}", where)
            condition = j.get("if_cond")
            result.append(
                ir.Checksum(
                    name=_name(j),
                    target=self.field(j["target"], where),
                    calculation=_find(
                        self.calculation_index, j["calculation"], "calculation", where
                    ),
                    condition=None if condition is None else self.boolean(condition, where),
                    verify=bool(j.get("verify", True)),
                    update=bool(j.get("update", True)),
                )
            )
        return tuple(result)

    def reference_lists(self, section: str) -> tuple[ir.FieldList, ...]:
        result: list[ir.FieldList] = []
        for j in self.section(section):
            where = f"{section} {j.get('name')}"
            fields: list[ir.FieldRef] = []
            for element in _items(j["elements"], where):
                if element["type"] == "hexstr" and section == "field_lists":
                    continue  # BMv2 copies no constants either
                if element["type"] != "field":
                    raise UnsupportedConstruct(f"element of type {element['type']!r}", where)
                ref = self.field(element["value"], where)
                if self.is_varbit(ref):
                    raise UnsupportedConstruct("variable-length field in a field list", where)
                fields.append(ref)
            number = _integer(j["id"], where, 1, 0xFFFF)
            result.append(ir.FieldList(number, str(j.get("name", "")), tuple(fields)))
        return tuple(result)

    # --- actions ----------------------------------------------------------------------------

    def actions_section(self) -> None:
        actions: list[ir.Action] = []
        self.action_by_id: dict[int, int] = {}
        for j in self.section("actions"):
            where = f"action {j['name']}"
            parameters = tuple(
                ir.Parameter(_name(d), _integer(d["bitwidth"], where, 0, MAX_FIELD_BITS))
                for d in _items(j["runtime_data"], where)
            )
            self.parameter_count = len(parameters)
            body = self.body(j["primitives"], where)
            self.parameter_count = 0
            for statement in body:
                if isinstance(statement, (ir.Jump, ir.JumpIfZero)) and not (
                    0 <= statement.target <= len(body)
                ):
                    raise ProgramError(f"{where}: jump to {statement.target}")
            if j["id"] in self.action_by_id:
                raise ProgramError(f"{where}: id {j['id']} is used twice")
            self.action_by_id[j["id"]] = len(actions)
            actions.append(ir.Action(_name(j), j["id"], parameters, body))
        self.actions = tuple(actions)

    def body(self, primitives: Json, where: str) -> tuple[ir.Statement, ...]:
        return tuple(
            self.statement(s, f"{where}, primitive {n}")
            for n, s in enumerate(_items(primitives, where))
        )

    def action(self, number: Json, where: str) -> int:
        try:
            return self.action_by_id[number]
        except (KeyError, TypeError):
            raise ProgramError(f"{where}: no action has the id {number!r}") from None

    def arguments(self, action: int, values: Json, where: str) -> tuple[int, ...]:
        parameters = self.actions[action].parameters
        numbers = [_number(v, where) for v in _items(values, where)]
        if len(numbers) != len(parameters):
            raise ProgramError(f"{where}: {len(parameters)} arguments are expected")
        return tuple(n & ((1 << q.width) - 1) for n, q in zip(numbers, parameters, strict=True))

    # --- parser and deparser ----------------------------------------------------------------

    def parser(self, j: dict[str, Json]) -> ir.Parser:
        states = _items(j["parse_states"], "parser")
        index = _index([_name(s) for s in states], "parser state")
        start = j.get("init_state")
        return ir.Parser(
            _name(j),
            tuple(self.parser_state(s, index) for s in states),
            None if start is None else _find(index, start, "parser state", "parser"),
        )

    def parser_state(self, j: dict[str, Json], index: Mapping[str, int]) -> ir.ParserState:
        where = f"parser state {j['name']}"
        ops = tuple(self.parser_op(o, where) for o in _items(j["parser_ops"], where))
        key: list[ir.KeyPart] = []
        widths: list[int] = []
        for part in _items(j["transition_key"], where):
            key_part, width = self.key_part(part, where)
            key.append(key_part)
            widths.append(width)
        key_bytes = sum((w + 7) // 8 for w in widths)
        transitions: list[ir.Transition] = []
        default: int | None = None
        for t in _items(j["transitions"], where):
            target = t.get("next_state")
            state = None if target is None else _find(index, target, "parser state", where)
            kind = t.get("type")
            if kind is None:  # files older than 2.0 had the word in `value`
                kind = "default" if t.get("value") == "default" else "hexstr"
            if kind == "default":
                default = state
                continue
            if kind != "hexstr":
                raise UnsupportedConstruct(f"transition of type {kind!r}", where)
            full = (1 << (8 * key_bytes)) - 1
            mask = full if t.get("mask") is None else _number(t["mask"], where)
            value = _number(t["value"], where)
            if value > full or mask > full:
                raise ProgramError(f"{where}: a transition value is wider than the key")
            transitions.append(ir.Transition(value & mask, mask, state))
        return ir.ParserState(_name(j), ops, tuple(key), tuple(widths), tuple(transitions), default)

    def key_part(self, j: dict[str, Json], where: str) -> tuple[ir.KeyPart, int]:
        kind, value = j.get("type"), j.get("value")
        match kind:
            case "field":
                ref = self.field(value, where)
                if self.is_varbit(ref):
                    raise UnsupportedConstruct("variable-length field in a transition", where)
                return ref, self.width(ref)
            case "stack_field":
                last = self.last_field(value, where)
                return last, self.width(ir.FieldRef(last.headers[0], last.field))
            case "union_stack_field":
                assert isinstance(value, list)
                stack, headers = self.union_stack_headers(value, where)
                field = _find(self.field_index[headers[0]], value[2], "field", where)
                last = ir.LastField(stack, headers, field)
                return last, self.width(ir.FieldRef(headers[0], field))
            case "lookahead":
                ahead = self.lookahead(value, where)
                return ahead, ahead.width
            case _:
                raise UnsupportedConstruct(f"transition key of type {kind!r}", where)

    def union_stack_headers(
        self, value: Json, where: str
    ) -> tuple[ir.UnionStackOf, tuple[int, ...]]:
        """A stack of unions, and its elements' headers of one kind: value is [stack, kind, ...]."""
        assert isinstance(value, list)
        stack = _find(self.union_stack_index, value[0], "union stack", where)
        unions = [self.unions[u] for u in self.union_stacks[stack].unions]
        if value[1] not in unions[0].members:
            raise ProgramError(f"{where}: union {unions[0].name} has no member {value[1]!r}")
        member = unions[0].members.index(value[1])
        return ir.UnionStackOf(stack), tuple(u.headers[member] for u in unions)

    def lookahead(self, value: Json, where: str) -> ir.Lookahead:
        offset, width = value
        return ir.Lookahead(
            _integer(offset, where, 0, MAX_FIELD_BITS), _integer(width, where, 1, MAX_FIELD_BITS)
        )

    def parser_op(self, j: dict[str, Json], where: str) -> ir.ParserOp:
        op = j.get("op")
        where = f"{where}, {op}"
        args = _items(j.get("parameters"), where)
        match op:
            case "extract":
                return self.extract(args[0], None, where)
            case "extract_VL":
                return self.extract(args[0], self.data(args[1], where), where)
            case "set":
                target = self.field(args[0]["value"], where)
                if target.field == ir.VALID:
                    raise ProgramError(f"{where}: $valid$ is read-only")
                if args[1].get("type") == "lookahead":
                    return ir.Set(target, self.lookahead(args[1]["value"], where))
                value = self.data(args[1], where)
                if self.is_varbit(target):
                    if not isinstance(value, ir.FieldRef) or not self.is_varbit(value):
                        raise ProgramError(f"{where}: not variable-length fields")
                    return ir.SetVarbit(target, value)
                return ir.Set(target, value)
            case "verify":
                return ir.Verify(self.boolean(args[0], where), self.data(args[1], where))
            case "advance":
                return ir.Advance(self.data(args[0], where))
            case "shift":
                return ir.Advance(ir.Const(8 * _integer(args[0], where, 0, 1 << 20)))
            case "primitive":
                statement = self.statement(args[0], where)
                if isinstance(statement, (ir.Jump, ir.JumpIfZero)):
                    raise ProgramError(f"{where}: a jump in a parser")
                return ir.Run(statement)
            case _:
                raise UnsupportedConstruct(f"parser operation {op!r}", where)

    def extract(self, j: dict[str, Json], bits: ir.DataExpr | None, where: str) -> ir.ParserOp:
        kind, value = j.get("type"), j.get("value")
        match kind:
            case "regular":
                header = _find(self.header_index, value, "header", where)
                bits, limit = self.varbit_limit(header, bits, where)
                return ir.Extract(header, bits, limit)
            case "stack":
                stack = _find(self.stack_index, value, "header stack", where)
                headers = self.stacks[stack].headers
                bits, limit = self.varbit_limit(headers[0], bits, where)
                return ir.ExtractNext(ir.StackOf(stack), headers, bits, limit)
            case "union_stack":
                unions, headers = self.union_stack_headers(value, where)
                bits, limit = self.varbit_limit(headers[0], bits, where)
                return ir.ExtractNext(unions, headers, bits, limit)
            case _:
                raise UnsupportedConstruct(f"extraction to {kind!r}", where)

    def varbit_limit(
        self, header: int, bits: ir.DataExpr | None, where: str
    ) -> tuple[ir.DataExpr | None, int]:
        """The length of the varbit field and the longest that the header may be, in bytes."""
        h = self.headers[header]
        if h.varbit is None:
            if bits is not None:
                raise ProgramError(f"{where}: {h.name} has no variable-length field")
            return None, 0
        return bits or ir.Const(0), (h.fixed_bits + h.fields[h.varbit].width) // 8

    def deparser(self, j: dict[str, Json]) -> ir.Deparser:
        order = tuple(
            _find(self.header_index, name, "header", "deparser")
            for name in _items(j["order"], "deparser")
        )
        statements = self.body(j.get("primitives"), "deparser")
        if any(isinstance(s, (ir.Jump, ir.JumpIfZero)) for s in statements):
            raise ProgramError("deparser: a jump")
        return ir.Deparser(_name(j), statements, order)

    # --- pipelines --------------------------------------------------------------------------

    def pipelines(self) -> tuple[ir.Pipeline, ir.Pipeline]:
        sections = [self.named("pipelines", "ingress"), self.named("pipelines", "egress")]
        names: list[str] = []
        for s in sections:
            for kind in ("tables", "conditionals", "action_calls"):
                names += [_name(n) for n in _items(s.get(kind), kind)]
        self.node_index = _index(names, "control node")

        profiles: list[ir.ActionProfile] = []
        for s in sections:
            profiles += [
                self.action_profile(a) for a in _items(s.get("action_profiles"), "profiles")
            ]
        self.action_profiles = tuple(profiles)
        self.profile_index = _index([a.name for a in profiles], "action profile")

        nodes: list[ir.Node] = []
        for s in sections:
            nodes += [self.table(t) for t in _items(s.get("tables"), "tables")]
            for c in _items(s.get("conditionals"), "conditionals"):
                where = f"condition {c['name']}"
                nodes.append(
                    ir.Conditional(
                        _name(c),
                        self.boolean(c["expression"], where),
                        self.node(c.get("true_next"), where),
                        self.node(c.get("false_next"), where),
                    )
                )
            for c in _items(s.get("action_calls"), "action_calls"):
                where = f"action call {c['name']}"
                action = self.action(c["action_id"], where)
                if self.actions[action].parameters:
                    raise ProgramError(f"{where}: the action has parameters")
                nodes.append(ir.ActionCall(_name(c), action, self.node(c.get("next_node"), where)))
        self.nodes = tuple(nodes)
        self.check_acyclic()
        ingress, egress = (
            ir.Pipeline(_name(s), self.node(s.get("init_table"), _name(s))) for s in sections
        )
        return ingress, egress

    def check_acyclic(self) -> None:
        """P4 has no loops in a control; a file with one would keep a packet for ever."""
        number = ir.node_in_cycle(len(self.nodes), lambda n: ir.successors(self.nodes[n]))
        if number is not None:
            raise ProgramError(f"node {self.nodes[number].name} is part of a cycle")

    def node(self, name: Json, where: str) -> int | None:
        return None if name is None else _find(self.node_index, name, "control node", where)

    def action_profile(self, j: dict[str, Json]) -> ir.ActionProfile:
        where = f"action profile {j['name']}"
        selector: ir.Selector | None = None
        if j.get("selector") is not None:
            self.check_algorithm(j["selector"]["algo"], where)
            fields: list[ir.FieldRef] = []
            for item in _items(j["selector"]["input"], where):
                if item["type"] != "field":
                    raise UnsupportedConstruct(f"selector over {item['type']!r}", where)
                fields.append(self.field(item["value"], where))
            selector = ir.Selector(j["selector"]["algo"], tuple(fields))
        return ir.ActionProfile(
            _name(j), _integer(j["max_size"], where, 0, MAX_ARRAY_SIZE), selector
        )

    def table(self, j: dict[str, Json]) -> ir.Table:
        where = f"table {j['name']}"
        match = j["match_type"]
        if match not in ("exact", "lpm", "ternary", "range"):
            raise UnsupportedConstruct(f"match type {match!r}", where)
        key = tuple(self.key_field(k, where) for k in _items(j["key"], where))
        self.check_match(match, key, where)
        actions = tuple(self.action(i, where) for i in _items(j["action_ids"], where))
        names = [str(n) for n in _items(j["actions"], where)]
        if len(names) != len(actions):
            raise ProgramError(f"{where}: action_ids and actions do not agree")
        by_hit, next_by_action, next_hit, next_miss = self.successors(j, names, where)

        profile: int | None = None
        if j["type"] in ("indirect", "indirect_ws"):
            profile = _find(self.profile_index, j.get("action_profile"), "action profile", where)
            if (j["type"] == "indirect_ws") != (self.action_profiles[profile].selector is not None):
                raise ProgramError(f"{where}: type {j['type']} does not suit its action profile")
        elif j["type"] != "simple":
            raise UnsupportedConstruct(f"table of type {j['type']!r}", where)

        meter_name = j.get("direct_meters")
        meter = None if meter_name is None else _find(self.meter_index, meter_name, "meter", where)
        if meter is not None and self.meters[meter].direct is None:
            raise ProgramError(f"{where}: {meter_name} is not a direct meter")
        entries = tuple(self.const_entry(e, key, where) for e in _items(j.get("entries"), where))
        if entries and profile is not None:
            raise UnsupportedConstruct("const entries in an indirect table", where)
        return ir.Table(
            name=_name(j),
            match=match,
            key=key,
            size=_integer(j.get("max_size", 1024), where, 0, MAX_ARRAY_SIZE),
            actions=actions,
            by_hit=by_hit,
            next_by_action=next_by_action,
            next_hit=next_hit,
            next_miss=next_miss,
            default=self.default_entry(j.get("default_entry"), where),
            entries=entries,
            const_entries="entries" in j,
            with_counters=bool(j.get("with_counters", False)),
            meter=meter,
            action_profile=profile,
            support_timeout=bool(j.get("support_timeout", False)),
        )

    def key_field(self, j: dict[str, Json], where: str) -> ir.KeyField:
        match, target = j["match_type"], j["target"]
        if match == "valid":
            name = target if isinstance(target, str) else target[0]
            ref = ir.FieldRef(_find(self.header_index, name, "header", where), ir.VALID)
            return ir.KeyField(str(j.get("name", name)), "exact", ref, 1, False, None)
        if match not in ("exact", "lpm", "ternary", "range"):
            raise UnsupportedConstruct(f"match type {match!r}", where)
        ref = self.field(target, where)
        if self.is_varbit(ref):
            raise UnsupportedConstruct("variable-length field in a table key", where)
        signed = ref.field != ir.VALID and self.headers[ref.header].fields[ref.field].signed
        mask = None if j.get("mask") is None else _number(j["mask"], where)
        name = j.get("name", ".".join(str(t) for t in target))
        return ir.KeyField(str(name), match, ref, self.width(ref), signed, mask)

    def check_match(self, match: str, key: tuple[ir.KeyField, ...], where: str) -> None:
        kinds = [k.match for k in key]
        allowed = {
            "exact": {"exact"},
            "lpm": {"exact", "lpm"},
            "ternary": {"exact", "lpm", "ternary"},
            "range": {"exact", "lpm", "ternary", "range"},
        }[match]
        for kind in kinds:
            if kind not in allowed:
                raise ProgramError(f"{where}: a {kind} field in a table of type {match}")
        if kinds.count("lpm") > 1:
            raise ProgramError(f"{where}: two lpm fields")

    def successors(
        self, j: dict[str, Json], actions: list[str], where: str
    ) -> tuple[bool, tuple[int | None, ...], int | None, int | None]:
        following = j["next_tables"]
        base = self.node(j.get("base_default_next"), where)
        if "__HIT__" in following or "__MISS__" in following:
            if set(following) != {"__HIT__", "__MISS__"}:
                raise ProgramError(f"{where}: next_tables needs both __HIT__ and __MISS__")
            hit = self.node(following["__HIT__"], where)
            miss = self.node(following["__MISS__"], where)
            return True, (None,) * len(actions), hit, miss
        if not set(actions) <= set(following):
            raise ProgramError(f"{where}: next_tables does not name every action")
        return False, tuple(self.node(following[a], where) for a in actions), None, base

    def default_entry(self, j: dict[str, Json] | None, where: str) -> ir.DefaultEntry | None:
        if j is None:
            return None
        action = self.action(j["action_id"], where)
        if "action_data" not in j and self.actions[action].parameters:
            return None
        return ir.DefaultEntry(
            action,
            self.arguments(action, j.get("action_data"), where),
            bool(j.get("action_const", False)),
            bool(j.get("action_entry_const", False)),
        )

    def const_entry(
        self, j: dict[str, Json], key: tuple[ir.KeyField, ...], where: str
    ) -> ir.ConstEntry:
        values = _items(j["match_key"], where)
        if len(values) != len(key):
            raise ProgramError(f"{where}: a const entry has {len(values)} key fields")
        action = self.action(j["action_entry"]["action_id"], where)
        return ir.ConstEntry(
            tuple(self.match_value(v, k, where) for v, k in zip(values, key, strict=True)),
            _integer(j["priority"], where, 0, (1 << 31) - 1),
            action,
            self.arguments(action, j["action_entry"].get("action_data"), where),
        )

    def match_value(self, j: dict[str, Json], key: ir.KeyField, where: str) -> ir.MatchValue:
        kind = j["match_type"]
        full = (1 << key.width) - 1
        if kind == "valid":
            return ir.Exact(int(bool(j["key"])))
        if kind != key.match:
            raise ProgramError(f"{where}: a const entry has {kind} where {key.match} is due")
        match kind:
            case "exact":
                return ir.Exact(_number(j["key"], where) & full)
            case "lpm":
                length = _integer(j["prefix_length"], where, 0, key.width)
                keep = full & ~((1 << (key.width - length)) - 1)
                return ir.Lpm(_number(j["key"], where) & keep, length)
            case "ternary":
                mask = _number(j["mask"], where) & full
                return ir.Ternary(_number(j["key"], where) & mask, mask)
            case _:
                low, high = (_number(j[end], where) & full for end in ("start", "end"))
                if low > high:
                    raise ProgramError(f"{where}: the range {low}..{high} is empty")
                return ir.Range(low, high)
