"""The typed program: what a BMv2 JSON file says, with every name resolved.

This module owns the vocabulary shared by the loader and the engines. It knows nothing about
JSON, about packets or about how an engine stores a field; it holds no behaviour at all. Objects
refer to each other by index into the tuples of `Program`. The constructs are those of
behavioral-model's docs/JSON_format.md, version 2.x, as p4c's v1model back end emits them.

Arithmetic in expressions is exact (BMv2: infinite precision); a value is truncated to the
width of a field only when it is stored there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

VALID = -1
"""Field number of `$valid$`, the hidden one-bit field that says whether a header is valid."""


class ProgramError(ValueError):
    """The file is not a well-formed BMv2 program."""


class UnsupportedConstruct(ProgramError):  # noqa: N818 - the name says what it is
    """The program is well-formed but uses something that this switch does not run."""

    def __init__(self, construct: str, where: str) -> None:
        super().__init__(f"unsupported construct: {construct} (in {where})")
        self.construct = construct
        self.where = where


# --- header space ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `width` is in bits; for a varbit it is the maximum."""

    name: str
    width: int
    signed: bool = False
    varbit: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """A header (or metadata) instance. `union` is the index of the union it belongs to."""

    name: str
    type_name: str
    fields: tuple[Field, ...]
    metadata: bool
    union: int | None = None
    varbit: int | None = None

    @property
    def fixed_bits(self) -> int:
        """Bits in the packet without the varbit field."""
        return sum(f.width for f in self.fields if not f.varbit)


@dataclass(frozen=True, slots=True)
class HeaderStack:
    name: str
    headers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeaderUnion:
    name: str
    members: tuple[str, ...]
    headers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeaderUnionStack:
    name: str
    unions: tuple[int, ...]


# --- expressions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Const:
    value: int


@dataclass(frozen=True, slots=True)
class FieldRef:
    """A field of a header known at load time; `field` may be VALID."""

    header: int
    field: int


@dataclass(frozen=True, slots=True)
class Local:
    """Runtime data (an action parameter)."""

    index: int


@dataclass(frozen=True, slots=True)
class LastField:
    """A field of the last element of a header stack (`stack.last.f`)."""

    stack: int
    field: int


@dataclass(frozen=True, slots=True)
class LastUnionField:
    """A field of one member of the last element of a stack of unions."""

    union_stack: int
    member: int
    field: int


@dataclass(frozen=True, slots=True)
class ElementField:
    """A field of a header that is only known at run time."""

    header: HeaderExpr
    field: int


@dataclass(frozen=True, slots=True)
class RegisterLoad:
    array: int
    index: DataExpr


@dataclass(frozen=True, slots=True)
class Binary:
    """op: + - * / % << >> & | ^ two_comp_mod sat_cast usat_cast."""

    op: str
    left: DataExpr
    right: DataExpr


@dataclass(frozen=True, slots=True)
class Invert:
    """Bitwise not, of an infinitely long number: ~x == -x - 1."""

    operand: DataExpr


@dataclass(frozen=True, slots=True)
class BoolToData:
    operand: BoolExpr


@dataclass(frozen=True, slots=True)
class LastIndex:
    stack: StackExpr


@dataclass(frozen=True, slots=True)
class StackSize:
    stack: StackExpr


@dataclass(frozen=True, slots=True)
class ChooseData:
    condition: BoolExpr
    if_true: DataExpr
    if_false: DataExpr


@dataclass(frozen=True, slots=True)
class BoolConst:
    value: bool


@dataclass(frozen=True, slots=True)
class Compare:
    """op: == != < > <= >=."""

    op: str
    left: DataExpr
    right: DataExpr


@dataclass(frozen=True, slots=True)
class Logic:
    """op: and or == != on booleans. Both sides are free of effects, so order is no matter."""

    op: str
    left: BoolExpr
    right: BoolExpr


@dataclass(frozen=True, slots=True)
class Not:
    operand: BoolExpr


@dataclass(frozen=True, slots=True)
class DataToBool:
    operand: DataExpr


@dataclass(frozen=True, slots=True)
class HeaderValid:
    header: HeaderExpr


@dataclass(frozen=True, slots=True)
class UnionValid:
    union: UnionExpr


@dataclass(frozen=True, slots=True)
class HeadersEqual:
    """True if both are valid and of one type and all fields are equal."""

    left: HeaderExpr
    right: HeaderExpr


@dataclass(frozen=True, slots=True)
class UnionsEqual:
    left: UnionExpr
    right: UnionExpr


@dataclass(frozen=True, slots=True)
class ChooseBool:
    condition: BoolExpr
    if_true: BoolExpr
    if_false: BoolExpr


@dataclass(frozen=True, slots=True)
class HeaderOf:
    header: int


@dataclass(frozen=True, slots=True)
class StackElement:
    """`stack[index]`; out of range it reads as an invalid header of zeros, writes are lost."""

    stack: int
    index: DataExpr


@dataclass(frozen=True, slots=True)
class UnionMember:
    union: UnionExpr
    member: int


@dataclass(frozen=True, slots=True)
class UnionOf:
    union: int


@dataclass(frozen=True, slots=True)
class UnionStackElement:
    union_stack: int
    index: DataExpr


@dataclass(frozen=True, slots=True)
class StackOf:
    stack: int


@dataclass(frozen=True, slots=True)
class UnionStackOf:
    union_stack: int


DataExpr: TypeAlias = (
    Const
    | FieldRef
    | Local
    | LastField
    | LastUnionField
    | ElementField
    | RegisterLoad
    | Binary
    | Invert
    | BoolToData
    | LastIndex
    | StackSize
    | ChooseData
)
BoolExpr: TypeAlias = (
    BoolConst
    | Compare
    | Logic
    | Not
    | DataToBool
    | HeaderValid
    | UnionValid
    | HeadersEqual
    | UnionsEqual
    | ChooseBool
)
HeaderExpr: TypeAlias = HeaderOf | StackElement | UnionMember
UnionExpr: TypeAlias = UnionOf | UnionStackElement
StackExpr: TypeAlias = StackOf | UnionStackOf
Expr: TypeAlias = DataExpr | BoolExpr | HeaderExpr | UnionExpr | StackExpr
LValue: TypeAlias = FieldRef | LastField | ElementField


# --- statements -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    target: LValue
    value: DataExpr


@dataclass(frozen=True, slots=True)
class AssignVarbit:
    target: FieldRef
    source: FieldRef


@dataclass(frozen=True, slots=True)
class AssignHeader:
    target: HeaderExpr
    source: HeaderExpr


@dataclass(frozen=True, slots=True)
class AssignUnion:
    target: UnionExpr
    source: UnionExpr


@dataclass(frozen=True, slots=True)
class AssignStack:
    target: StackExpr
    source: StackExpr


@dataclass(frozen=True, slots=True)
class Push:
    stack: StackExpr
    count: DataExpr


@dataclass(frozen=True, slots=True)
class Pop:
    stack: StackExpr
    count: DataExpr


@dataclass(frozen=True, slots=True)
class AddHeader:
    """setValid(): an invalid header becomes valid with all fields 0."""

    header: HeaderExpr


@dataclass(frozen=True, slots=True)
class RemoveHeader:
    header: HeaderExpr


@dataclass(frozen=True, slots=True)
class Jump:
    target: int


@dataclass(frozen=True, slots=True)
class JumpIfZero:
    condition: DataExpr
    target: int


@dataclass(frozen=True, slots=True)
class Exit:
    pass


@dataclass(frozen=True, slots=True)
class Check:
    """assert() or assume(): a packet that fails it is dropped and counted."""

    kind: str
    condition: DataExpr


@dataclass(frozen=True, slots=True)
class LogMessage:
    format: str
    arguments: tuple[DataExpr, ...]


@dataclass(frozen=True, slots=True)
class MarkToDrop:
    """Sets egress_spec to the drop port and, where there is one, mcast_grp to 0."""

    egress_spec: FieldRef
    mcast_grp: FieldRef | None


@dataclass(frozen=True, slots=True)
class Clone:
    """Ingress or egress clone; the last one of a pipeline pass counts."""

    session: DataExpr
    field_list: DataExpr


@dataclass(frozen=True, slots=True)
class Resubmit:
    field_list: DataExpr


@dataclass(frozen=True, slots=True)
class Recirculate:
    field_list: DataExpr


@dataclass(frozen=True, slots=True)
class GenerateDigest:
    learn_list: DataExpr


@dataclass(frozen=True, slots=True)
class Hash:
    """target = hash % max(size, 1) + base."""

    target: LValue
    base: DataExpr
    calculation: int
    size: DataExpr


@dataclass(frozen=True, slots=True)
class ExecuteMeter:
    array: int
    index: DataExpr
    target: LValue


@dataclass(frozen=True, slots=True)
class Count:
    array: int
    index: DataExpr


@dataclass(frozen=True, slots=True)
class RegisterRead:
    target: LValue
    array: int
    index: DataExpr


@dataclass(frozen=True, slots=True)
class RegisterWrite:
    array: int
    index: DataExpr
    value: DataExpr


@dataclass(frozen=True, slots=True)
class Random:
    """Uniform in [low, high]; low > high writes nothing."""

    target: LValue
    low: DataExpr
    high: DataExpr


@dataclass(frozen=True, slots=True)
class Truncate:
    length_bytes: DataExpr


@dataclass(frozen=True, slots=True)
class NoOp:
    pass


Statement: TypeAlias = (
    Assign
    | AssignVarbit
    | AssignHeader
    | AssignUnion
    | AssignStack
    | Push
    | Pop
    | AddHeader
    | RemoveHeader
    | Jump
    | JumpIfZero
    | Exit
    | Check
    | LogMessage
    | MarkToDrop
    | Clone
    | Resubmit
    | Recirculate
    | GenerateDigest
    | Hash
    | ExecuteMeter
    | Count
    | RegisterRead
    | RegisterWrite
    | Random
    | Truncate
    | NoOp
)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    width: int


@dataclass(frozen=True, slots=True)
class Action:
    name: str
    id: int
    parameters: tuple[Parameter, ...]
    body: tuple[Statement, ...]


# --- parser and deparser --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extract:
    """Extract a header; for a varbit header `varbit_bits` gives the length of that field."""

    header: int
    varbit_bits: DataExpr | None = None
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExtractNext:
    """Extract to the next element of a header stack."""

    stack: int
    varbit_bits: DataExpr | None = None
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExtractNextUnion:
    """Extract to one member of the next element of a stack of unions."""

    union_stack: int
    member: int
    varbit_bits: DataExpr | None = None
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Bits of the packet that are ahead: `offset` bits from here, `width` bits."""

    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class Set:
    target: FieldRef
    value: DataExpr | Lookahead


@dataclass(frozen=True, slots=True)
class SetVarbit:
    target: FieldRef
    source: FieldRef


@dataclass(frozen=True, slots=True)
class Verify:
    condition: BoolExpr
    error: DataExpr


@dataclass(frozen=True, slots=True)
class Advance:
    bits: DataExpr


@dataclass(frozen=True, slots=True)
class Run:
    """A statement in the parser."""

    statement: Statement


ParserOp: TypeAlias = (
    Extract | ExtractNext | ExtractNextUnion | Set | SetVarbit | Verify | Advance | Run
)
KeyPart: TypeAlias = FieldRef | LastField | LastUnionField | Lookahead


@dataclass(frozen=True, slots=True)
class Transition:
    """Taken when key & mask == value. Key parts are each padded to whole bytes."""

    value: int
    mask: int
    next_state: int | None


@dataclass(frozen=True, slots=True)
class ParserState:
    name: str
    ops: tuple[ParserOp, ...]
    key: tuple[KeyPart, ...]
    key_widths: tuple[int, ...]
    transitions: tuple[Transition, ...]
    default: int | None


@dataclass(frozen=True, slots=True)
class Parser:
    name: str
    states: tuple[ParserState, ...]
    start: int | None


@dataclass(frozen=True, slots=True)
class Deparser:
    name: str
    statements: tuple[Statement, ...]
    order: tuple[int, ...]


# --- match-action ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyField:
    """match: exact, lpm, ternary or range. `mask` (or None) is applied before the lookup."""

    name: str
    match: str
    field: FieldRef
    width: int
    signed: bool
    mask: int | None


@dataclass(frozen=True, slots=True)
class Exact:
    value: int


@dataclass(frozen=True, slots=True)
class Lpm:
    value: int
    prefix_len: int


@dataclass(frozen=True, slots=True)
class Ternary:
    value: int
    mask: int


@dataclass(frozen=True, slots=True)
class Range:
    """Both ends belong to it."""

    low: int
    high: int


MatchValue: TypeAlias = Exact | Lpm | Ternary | Range


@dataclass(frozen=True, slots=True)
class ConstEntry:
    """An entry that comes with the program. Of several that match, the LOWEST priority wins."""

    key: tuple[MatchValue, ...]
    priority: int
    action: int
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DefaultEntry:
    action: int
    arguments: tuple[int, ...]
    const_action: bool
    const_entry: bool


@dataclass(frozen=True, slots=True)
class Table:
    """match: exact, lpm, ternary, range. Successors are node numbers, None ends the pipeline.

    `next_hit` and `next_miss` are used if `by_hit`, else `next_by_action` (parallel to
    `actions`, which are numbers in `Program.actions`).
    """

    name: str
    match: str
    key: tuple[KeyField, ...]
    size: int
    actions: tuple[int, ...]
    by_hit: bool
    next_by_action: tuple[int | None, ...]
    next_hit: int | None
    next_miss: int | None
    default: DefaultEntry | None
    entries: tuple[ConstEntry, ...]
    const_entries: bool
    with_counters: bool
    meter: int | None
    action_profile: int | None
    support_timeout: bool


@dataclass(frozen=True, slots=True)
class Conditional:
    name: str
    condition: BoolExpr
    if_true: int | None
    if_false: int | None


@dataclass(frozen=True, slots=True)
class ActionCall:
    name: str
    action: int
    next: int | None


Node: TypeAlias = Table | Conditional | ActionCall


@dataclass(frozen=True, slots=True)
class Pipeline:
    name: str
    start: int | None


# --- externs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedConst:
    value: int
    width: int


@dataclass(frozen=True, slots=True)
class PackedHeader:
    header: int


PackedItem: TypeAlias = FieldRef | PackedConst | PackedHeader


@dataclass(frozen=True, slots=True)
class Calculation:
    """A hash over fields packed without padding; items of invalid headers are skipped."""

    name: str
    algorithm: str
    items: tuple[PackedItem, ...]
    with_payload: bool


@dataclass(frozen=True, slots=True)
class Checksum:
    name: str
    target: FieldRef
    calculation: int
    condition: BoolExpr | None
    verify: bool
    update: bool


@dataclass(frozen=True, slots=True)
class CounterArray:
    name: str
    size: int
    direct: str | None


@dataclass(frozen=True, slots=True)
class MeterArray:
    """unit: "bytes" or "packets". `direct` names the table of a direct meter."""

    name: str
    size: int
    unit: str
    rates: int
    direct: str | None
    target: FieldRef | None


@dataclass(frozen=True, slots=True)
class RegisterArray:
    name: str
    size: int
    width: int


@dataclass(frozen=True, slots=True)
class Selector:
    algorithm: str
    fields: tuple[FieldRef, ...]


@dataclass(frozen=True, slots=True)
class ActionProfile:
    name: str
    size: int
    selector: Selector | None


@dataclass(frozen=True, slots=True)
class FieldList:
    id: int
    name: str
    fields: tuple[FieldRef, ...]


@dataclass(frozen=True, slots=True)
class LearnList:
    id: int
    name: str
    fields: tuple[FieldRef, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A v1model program, ready to be run."""

    name: str
    version: tuple[int, int]
    headers: tuple[Header, ...]
    stacks: tuple[HeaderStack, ...]
    unions: tuple[HeaderUnion, ...]
    union_stacks: tuple[HeaderUnionStack, ...]
    errors: tuple[tuple[str, int], ...]
    parser: Parser
    deparser: Deparser
    actions: tuple[Action, ...]
    nodes: tuple[Node, ...]
    ingress: Pipeline
    egress: Pipeline
    calculations: tuple[Calculation, ...]
    checksums: tuple[Checksum, ...]
    counters: tuple[CounterArray, ...]
    meters: tuple[MeterArray, ...]
    registers: tuple[RegisterArray, ...]
    action_profiles: tuple[ActionProfile, ...]
    field_lists: tuple[FieldList, ...]
    learn_lists: tuple[LearnList, ...]
    intrinsic: tuple[tuple[str, FieldRef], ...]
    """BMv2's name of a metadata field ("standard_metadata.egress_spec") and where it is."""

    def intrinsic_field(self, name: str) -> FieldRef | None:
        for known, ref in self.intrinsic:
            if known == name:
                return ref
        return None

    def tables(self) -> tuple[Table, ...]:
        return tuple(n for n in self.nodes if isinstance(n, Table))
