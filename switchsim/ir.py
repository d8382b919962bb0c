"""The typed program: what a BMv2 JSON file says, with every name resolved.

This module owns the vocabulary shared by the loader and the engines. It knows nothing about
JSON, about packets or about how an engine stores a field; it holds no behaviour at all. Objects
refer to each other by index into the tuples of `Program`. The constructs are those of
behavioral-model's docs/JSON_format.md, version 2.x, as p4c's v1model back end emits them.

Arithmetic in expressions is exact (BMv2: infinite precision); a value is truncated to the
width of a field only when it is stored there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, dataclass_transform

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


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """Makes each class below a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


# --- header space ---------------------------------------------------------------------------


class Field(Record):
    """One field. `width` is in bits; for a varbit it is the maximum."""

    name: str
    width: int
    signed: bool = False
    varbit: bool = False


class Header(Record):
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


class HeaderStack(Record):
    name: str
    headers: tuple[int, ...]


class HeaderUnion(Record):
    name: str
    members: tuple[str, ...]
    headers: tuple[int, ...]


class HeaderUnionStack(Record):
    name: str
    unions: tuple[int, ...]


# --- expressions ----------------------------------------------------------------------------


class Const(Record):
    value: int


class FieldRef(Record):
    """A field of a header known at load time; `field` may be VALID."""

    header: int
    field: int


class Local(Record):
    """Runtime data (an action parameter)."""

    index: int


class LastField(Record):
    """A field of the last element of a stack (`stack.last.f`), which is one of `headers`; in a
    stack of unions these are its elements' headers of one kind."""

    stack: StackExpr
    headers: tuple[int, ...]
    field: int


class ElementField(Record):
    """A field of a header that is only known at run time."""

    header: HeaderExpr
    field: int


class RegisterLoad(Record):
    array: int
    index: DataExpr


class Binary(Record):
    """op: + - * / % << >> & | ^ two_comp_mod sat_cast usat_cast."""

    op: str
    left: DataExpr
    right: DataExpr


class Invert(Record):
    """Bitwise not, of an infinitely long number: ~x == -x - 1."""

    operand: DataExpr


class BoolToData(Record):
    operand: BoolExpr


class LastIndex(Record):
    stack: StackExpr


class StackSize(Record):
    stack: StackExpr


class ChooseData(Record):
    condition: BoolExpr
    if_true: DataExpr
    if_false: DataExpr


class BoolConst(Record):
    value: bool


class Compare(Record):
    """op: == != < > <= >=."""

    op: str
    left: DataExpr
    right: DataExpr


class Logic(Record):
    """op: and or == != on booleans. Both sides are free of effects, so order is no matter."""

    op: str
    left: BoolExpr
    right: BoolExpr


class Not(Record):
    operand: BoolExpr


class DataToBool(Record):
    operand: DataExpr


class HeaderValid(Record):
    header: HeaderExpr


class UnionValid(Record):
    union: UnionExpr


class HeadersEqual(Record):
    """True if both are valid and of one type and all fields are equal."""

    left: HeaderExpr
    right: HeaderExpr


class UnionsEqual(Record):
    left: UnionExpr
    right: UnionExpr


class ChooseBool(Record):
    condition: BoolExpr
    if_true: BoolExpr
    if_false: BoolExpr


class HeaderOf(Record):
    header: int


class StackElement(Record):
    """`stack[index]`; out of range it reads as an invalid header of zeros, writes are lost."""

    stack: int
    index: DataExpr


class UnionMember(Record):
    union: UnionExpr
    member: int


class UnionOf(Record):
    union: int


class UnionStackElement(Record):
    union_stack: int
    index: DataExpr


class StackOf(Record):
    stack: int


class UnionStackOf(Record):
    union_stack: int


DataExpr: TypeAlias = (
    Const
    | FieldRef
    | Local
    | LastField
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


class Assign(Record):
    target: LValue
    value: DataExpr


class AssignVarbit(Record):
    target: FieldRef
    source: FieldRef


class AssignHeader(Record):
    target: HeaderExpr
    source: HeaderExpr


class AssignUnion(Record):
    target: UnionExpr
    source: UnionExpr


class AssignStack(Record):
    target: StackExpr
    source: StackExpr


class Push(Record):
    stack: StackExpr
    count: DataExpr


class Pop(Record):
    stack: StackExpr
    count: DataExpr


class AddHeader(Record):
    """setValid(): an invalid header becomes valid with all fields 0."""

    header: HeaderExpr


class RemoveHeader(Record):
    header: HeaderExpr


class Jump(Record):
    target: int


class JumpIfZero(Record):
    condition: DataExpr
    target: int


class Exit(Record):
    pass


class Check(Record):
    """assert() or assume(): a packet that fails it is dropped and counted."""

    kind: str
    condition: DataExpr


class LogMessage(Record):
    format: str
    arguments: tuple[DataExpr, ...]


class MarkToDrop(Record):
    """Sets egress_spec to the drop port and, where there is one, mcast_grp to 0."""

    egress_spec: FieldRef
    mcast_grp: FieldRef | None


class Clone(Record):
    """Ingress or egress clone; the last one of a pipeline pass counts."""

    session: DataExpr
    field_list: DataExpr


class Resubmit(Record):
    field_list: DataExpr


class Recirculate(Record):
    field_list: DataExpr


class GenerateDigest(Record):
    learn_list: DataExpr


class Hash(Record):
    """target = hash % max(size, 1) + base."""

    target: LValue
    base: DataExpr
    calculation: int
    size: DataExpr


class ExecuteMeter(Record):
    array: int
    index: DataExpr
    target: LValue


class Count(Record):
    array: int
    index: DataExpr


class RegisterRead(Record):
    target: LValue
    array: int
    index: DataExpr


class RegisterWrite(Record):
    array: int
    index: DataExpr
    value: DataExpr


class Random(Record):
    """Uniform in [low, high]; low > high writes nothing."""

    target: LValue
    low: DataExpr
    high: DataExpr


class Truncate(Record):
    length_bytes: DataExpr


class NoOp(Record):
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


class Parameter(Record):
    name: str
    width: int


class Action(Record):
    name: str
    id: int
    parameters: tuple[Parameter, ...]
    body: tuple[Statement, ...]


# --- parser and deparser --------------------------------------------------------------------


class Extract(Record):
    """Extract a header; for a varbit header `varbit_bits` gives the length of that field."""

    header: int
    varbit_bits: DataExpr | None = None
    max_bytes: int = 0


class ExtractNext(Record):
    """Extract to the next element of a stack, which is one of `headers` (as in `LastField`)."""

    stack: StackExpr
    headers: tuple[int, ...]
    varbit_bits: DataExpr | None = None
    max_bytes: int = 0


class Lookahead(Record):
    """Bits of the packet that are ahead: `offset` bits from here, `width` bits."""

    offset: int
    width: int


class Set(Record):
    target: FieldRef
    value: DataExpr | Lookahead


class SetVarbit(Record):
    target: FieldRef
    source: FieldRef


class Verify(Record):
    condition: BoolExpr
    error: DataExpr


class Advance(Record):
    bits: DataExpr


class Run(Record):
    """A statement in the parser."""

    statement: Statement


ParserOp: TypeAlias = Extract | ExtractNext | Set | SetVarbit | Verify | Advance | Run
KeyPart: TypeAlias = FieldRef | LastField | Lookahead


class Transition(Record):
    """Taken when key & mask == value. Key parts are each padded to whole bytes."""

    value: int
    mask: int
    next_state: int | None


class ParserState(Record):
    name: str
    ops: tuple[ParserOp, ...]
    key: tuple[KeyPart, ...]
    key_widths: tuple[int, ...]
    transitions: tuple[Transition, ...]
    default: int | None


class Parser(Record):
    name: str
    states: tuple[ParserState, ...]
    start: int | None


class Deparser(Record):
    name: str
    statements: tuple[Statement, ...]
    order: tuple[int, ...]


# --- match-action ---------------------------------------------------------------------------


class KeyField(Record):
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


def anything(match: str, width: int) -> MatchValue | None:
    """What any value matches; None where the kind of match has no such thing."""
    wildcards: dict[str, MatchValue] = {"lpm": Lpm(0, 0), "ternary": Ternary(0, 0)}
    return Range(0, (1 << width) - 1) if match == "range" else wildcards.get(match)


class ConstEntry(Record):
    """An entry that comes with the program. Of several that match, the LOWEST priority wins."""

    key: tuple[MatchValue, ...]
    priority: int
    action: int
    arguments: tuple[int, ...]


class DefaultEntry(Record):
    action: int
    arguments: tuple[int, ...]
    const_action: bool
    const_entry: bool


class Table(Record):
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


class Conditional(Record):
    name: str
    condition: BoolExpr
    if_true: int | None
    if_false: int | None


class ActionCall(Record):
    name: str
    action: int
    next: int | None


Node: TypeAlias = Table | Conditional | ActionCall


def successors(node: Node) -> list[int]:
    """All nodes that may be next."""
    match node:
        case Conditional():
            following = [node.if_true, node.if_false]
        case ActionCall():
            following = [node.next]
        case Table():
            following = [*node.next_by_action, node.next_hit, node.next_miss]
    return [n for n in following if n is not None]


def node_in_cycle(count: int, following: Callable[[int], Iterable[int]]) -> int | None:
    """A node of a graph of `count` nodes from which a way leads back to it."""
    finished: set[int] = set()
    for start in range(count):
        todo: list[tuple[int, bool]] = [(start, False)]
        on_path: set[int] = set()
        while todo:
            number, leaving = todo.pop()
            if leaving:
                on_path.discard(number)
                finished.add(number)
            elif number in on_path:
                return number
            elif number not in finished:
                on_path.add(number)
                todo.append((number, True))
                todo += [(n, False) for n in following(number)]
    return None


class Pipeline(Record):
    name: str
    start: int | None


# --- externs --------------------------------------------------------------------------------


class PackedConst(Record):
    value: int
    width: int


class PackedHeader(Record):
    header: int


PackedItem: TypeAlias = FieldRef | PackedConst | PackedHeader


class Calculation(Record):
    """A hash over fields packed without padding; items of invalid headers are skipped."""

    name: str
    algorithm: str
    items: tuple[PackedItem, ...]
    with_payload: bool


class Checksum(Record):
    name: str
    target: FieldRef
    calculation: int
    condition: BoolExpr | None
    verify: bool
    update: bool


class CounterArray(Record):
    name: str
    size: int
    direct: str | None


class MeterArray(Record):
    """unit: "bytes" or "packets". `direct` names the table of a direct meter."""

    name: str
    size: int
    unit: str
    rates: int
    direct: str | None
    target: FieldRef | None


class RegisterArray(Record):
    name: str
    size: int
    width: int


class Selector(Record):
    algorithm: str
    fields: tuple[FieldRef, ...]


class ActionProfile(Record):
    name: str
    size: int
    selector: Selector | None


class FieldList(Record):
    id: int
    name: str
    fields: tuple[FieldRef, ...]


class Program(Record):
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
    learn_lists: tuple[FieldList, ...]
    intrinsic: tuple[tuple[str, FieldRef], ...]
    """BMv2's name of a metadata field ("standard_metadata.egress_spec") and where it is."""

    def intrinsic_field(self, name: str) -> FieldRef | None:
        return dict(self.intrinsic).get(name)

    def width(self, ref: FieldRef) -> int:
        return 1 if ref.field == VALID else self.headers[ref.header].fields[ref.field].width

    def siblings(self, header: int) -> tuple[int, ...]:
        """The other headers of its union."""
        union = self.headers[header].union
        return () if union is None else tuple(h for h in self.unions[union].headers if h != header)

    def all_stacks(self) -> list[StackExpr]:
        unions = [UnionStackOf(n) for n in range(len(self.union_stacks))]
        return [*(StackOf(n) for n in range(len(self.stacks))), *unions]

    def stack_elements(self, stack: StackExpr) -> list[tuple[int, ...]]:
        """The elements of a stack, each as the tuple of its headers (one, or a union's)."""
        if isinstance(stack, StackOf):
            return [(h,) for h in self.stacks[stack.stack].headers]
        return [self.unions[u].headers for u in self.union_stacks[stack.union_stack].unions]

    def tables(self) -> tuple[Table, ...]:
        return tuple(n for n in self.nodes if isinstance(n, Table))
