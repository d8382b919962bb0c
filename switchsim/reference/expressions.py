"""Expressions to Python functions.

Every expression of a program becomes a function of (phv, arguments), where the arguments are
the runtime data of the action that it stands in. Names were resolved by the loader and become
slot numbers here, once; running an expression looks nothing up. The common shapes (field
against constant, field against field) get functions of their own, which is most of the speed.

Arithmetic is exact, as in BMv2. Where BMv2 would stop the process (division by zero, a stack
index out of range), the value is 0, as the P4 specification allows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from kvcast.switchsim import ir
from kvcast.switchsim.control_plane.externs import RegisterArray
from kvcast.switchsim.reference.phv import Layout, Phv, to_signed
from kvcast.switchsim.semantics import MAX_SHIFT

Arguments: TypeAlias = Sequence[int]
Data: TypeAlias = Callable[[Phv, Arguments], int]
Bool: TypeAlias = Callable[[Phv, Arguments], bool]
HeaderAt: TypeAlias = Callable[[Phv, Arguments], int]
"""Number of a header, or -1 where a stack has no such element."""
_DataOf: TypeAlias = dict[str, Callable[..., Data]]
_BoolOf: TypeAlias = dict[str, Callable[..., Bool]]


def _divide(left: int, right: int) -> int:
    return left // right if right > 0 else 0


def _modulo(left: int, right: int) -> int:
    return left % right if right > 0 else 0


def _shift_left(left: int, right: int) -> int:
    return left << right if 0 <= right <= MAX_SHIFT else 0


def _shift_right(left: int, right: int) -> int:
    return left >> right if right >= 0 else 0


def _saturate_signed(value: int, width: int) -> int:
    half = 1 << (width - 1)
    return max(-half, min(value, half - 1))


def _saturate_unsigned(value: int, width: int) -> int:
    return max(0, min(value, (1 << width) - 1))


_BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _modulo,
    "<<": _shift_left,
    ">>": _shift_right,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "two_comp_mod": to_signed,
    "sat_cast": _saturate_signed,
    "usat_cast": _saturate_unsigned,
}

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


def _written_out(operators: Iterable[str], source: str) -> dict[str, Any]:
    """By operator, the function whose source this is with @ for the operator: written out it saves
    a call for each packet."""
    return {op: eval(source.replace("@", op)) for op in operators}


_FIELD_CONST: _DataOf = _written_out("+-&|^", "lambda i, c: lambda p, a: p[i] @ c")
_FIELD_FIELD: _DataOf = _written_out("+-&|^", "lambda i, j: lambda p, a: p[i] @ p[j]")
_GENERAL: _DataOf = _written_out("+-&|^", "lambda x, y: lambda p, a: x(p, a) @ y(p, a)")
_MASKED: _DataOf = _written_out("+-&|", "lambda x, c: lambda p, a: x(p, a) @ c")
_COMPARE_CONST: _BoolOf = _written_out(_COMPARE, "lambda i, c: lambda p, a: p[i] @ c")
_COMPARE_FIELD: _BoolOf = _written_out(_COMPARE, "lambda i, j: lambda p, a: p[i] @ p[j]")
_COMPARE_GENERAL: _BoolOf = _written_out(_COMPARE, "lambda x, y: lambda p, a: x(p, a) @ y(p, a)")


class Expressions:
    """Builds functions for the expressions of one program over one layout."""

    def __init__(self, layout: Layout, registers: Sequence[RegisterArray]) -> None:
        self.layout = layout
        self.program = layout.program
        self.registers = registers

    # --- data -------------------------------------------------------------------------------

    def data(self, e: ir.DataExpr) -> Data:
        layout = self.layout
        match e:
            case ir.Const(value):
                return lambda p, a: value
            case ir.FieldRef():
                slot = layout.slot(e)
                return lambda p, a: p[slot]
            case ir.Local(index):
                return lambda p, a: a[index]
            case ir.LastField():
                return self._last_field(e)
            case ir.ElementField(header, field):
                return self._element_field(header, field)
            case ir.RegisterLoad(array, index_expr):
                return self._register_load(array, index_expr)
            case ir.Binary(op, left, right):
                return self._binary(op, left, right)
            case ir.Invert(operand):
                x = self.data(operand)
                return lambda p, a: ~x(p, a)
            case ir.BoolToData(condition):
                b = self.boolean(condition)
                return lambda p, a: 1 if b(p, a) else 0
            case ir.LastIndex(stack_expr):
                slot = layout.stack_next[stack_expr]
                return lambda p, a: p[slot] - 1
            case ir.StackSize(stack_expr):
                slot = layout.stack_next[stack_expr]
                return lambda p, a: p[slot]
            case ir.ChooseData(condition, if_true, if_false):
                b, x, y = self.boolean(condition), self.data(if_true), self.data(if_false)
                return lambda p, a: x(p, a) if b(p, a) else y(p, a)

    def _binary(self, op: str, left: ir.DataExpr, right: ir.DataExpr) -> Data:
        slot = self.layout.slot
        apply = _BINARY[op]
        if isinstance(left, ir.Const) and isinstance(right, ir.Const):
            folded = apply(left.value, right.value)
            return lambda p, a: folded
        if isinstance(left, ir.FieldRef):
            if isinstance(right, ir.Const) and op in _FIELD_CONST:
                return _FIELD_CONST[op](slot(left), right.value)
            if isinstance(right, ir.FieldRef) and op in _FIELD_FIELD:
                return _FIELD_FIELD[op](slot(left), slot(right))
        x = self.data(left)
        if isinstance(right, ir.Const):
            c = right.value
            if op in _MASKED:
                return _MASKED[op](x, c)
            if op == ">>" and c >= 0:
                return lambda p, a: x(p, a) >> c
            if op == "<<" and 0 <= c <= MAX_SHIFT:
                return lambda p, a: x(p, a) << c
            return lambda p, a: apply(x(p, a), c)
        y = self.data(right)
        if op in _GENERAL:
            return _GENERAL[op](x, y)
        return lambda p, a: apply(x(p, a), y(p, a))

    def _register_load(self, array: int, index_expr: ir.DataExpr) -> Data:
        cells = self.registers[array].cells
        index = self.data(index_expr)

        def load(p: Phv, a: Arguments) -> int:
            i = index(p, a)
            return cells[i] if 0 <= i < len(cells) else 0

        return load

    def _last_field(self, e: ir.LastField) -> Data:
        next_slot = self.layout.stack_next[e.stack]
        slots = [self.layout.slot(ir.FieldRef(h, e.field)) for h in e.headers]

        def last(p: Phv, a: Arguments) -> int:
            n = p[next_slot]
            return p[slots[n - 1]] if n else 0

        return last

    def _element_field(self, header: ir.HeaderExpr, field: int) -> Data:
        at = self.header(header)
        slots = self.field_slots(field)

        def load(p: Phv, a: Arguments) -> int:
            h = at(p, a)
            return p[slots[h]] if h >= 0 else 0

        return load

    def field_slots(self, field: int) -> list[int]:
        """The slot of field number `field` in every header (meaningful where there is one)."""
        layout = self.layout
        return layout.valid if field == ir.VALID else [n + field for n in layout.first_field]

    # --- booleans ---------------------------------------------------------------------------

    def boolean(self, e: ir.BoolExpr) -> Bool:
        match e:
            case ir.BoolConst(value):
                return lambda p, a: value
            case ir.Compare(op, left, right):
                return self._compare(op, left, right)
            case ir.Logic(op, left_b, right_b):
                x, y = self.boolean(left_b), self.boolean(right_b)
                if op == "and":
                    return lambda p, a: x(p, a) and y(p, a)
                if op == "or":
                    return lambda p, a: x(p, a) or y(p, a)
                wanted = op == "=="
                return lambda p, a: (x(p, a) == y(p, a)) is wanted
            case ir.Not(operand):
                b = self.boolean(operand)
                return lambda p, a: not b(p, a)
            case ir.DataToBool(operand_d):
                if isinstance(operand_d, ir.FieldRef):
                    slot = self.layout.slot(operand_d)
                    return lambda p, a: p[slot] != 0
                d = self.data(operand_d)
                return lambda p, a: d(p, a) != 0
            case ir.HeaderValid(header):
                return self._header_valid(header)
            case ir.UnionValid(union):
                return self._union_valid(union)
            case ir.HeadersEqual(left_h, right_h):
                return self._headers_equal(left_h, right_h)
            case ir.UnionsEqual(left_u, right_u):
                return self._unions_equal(left_u, right_u)
            case ir.ChooseBool(condition, if_true, if_false):
                b, x, y = self.boolean(condition), self.boolean(if_true), self.boolean(if_false)
                return lambda p, a: x(p, a) if b(p, a) else y(p, a)

    def _compare(self, op: str, left: ir.DataExpr, right: ir.DataExpr) -> Bool:
        slot = self.layout.slot
        if isinstance(left, ir.Const) and isinstance(right, ir.Const):
            folded = _COMPARE[op](left.value, right.value)
            return lambda p, a: folded
        if isinstance(left, ir.FieldRef):
            if isinstance(right, ir.Const):
                return _COMPARE_CONST[op](slot(left), right.value)
            if isinstance(right, ir.FieldRef):
                return _COMPARE_FIELD[op](slot(left), slot(right))
        return _COMPARE_GENERAL[op](self.data(left), self.data(right))

    def _header_valid(self, header: ir.HeaderExpr) -> Bool:
        valid = self.layout.valid
        if isinstance(header, ir.HeaderOf):
            slot = valid[header.header]
            return lambda p, a: p[slot] != 0
        at = self.header(header)

        def is_valid(p: Phv, a: Arguments) -> bool:
            h = at(p, a)
            return h >= 0 and p[valid[h]] != 0

        return is_valid

    def _union_valid(self, union: ir.UnionExpr) -> Bool:
        at = self.union(union)
        slots = [[self.layout.valid[h] for h in u.headers] for u in self.program.unions]

        def is_valid(p: Phv, a: Arguments) -> bool:
            u = at(p, a)
            return u >= 0 and any(p[s] for s in slots[u])

        return is_valid

    def _equal_at(self, p: Phv, h: int, g: int) -> bool:
        layout = self.layout
        return (
            p[layout.valid[h]] != 0
            and p[layout.valid[g]] != 0
            and self.program.headers[h].type_name == self.program.headers[g].type_name
            and p[layout.first_field[h] : layout.end[h]] == p[layout.first_field[g] : layout.end[g]]
        )

    def _headers_equal(self, left: ir.HeaderExpr, right: ir.HeaderExpr) -> Bool:
        x, y = self.header(left), self.header(right)

        def equal(p: Phv, a: Arguments) -> bool:
            h, g = x(p, a), y(p, a)
            return h >= 0 and g >= 0 and self._equal_at(p, h, g)

        return equal

    def _unions_equal(self, left: ir.UnionExpr, right: ir.UnionExpr) -> Bool:
        x, y = self.union(left), self.union(right)
        members = [u.headers for u in self.program.unions]

        def equal(p: Phv, a: Arguments) -> bool:
            u, v = x(p, a), y(p, a)
            return (
                u >= 0
                and v >= 0
                and any(
                    self._equal_at(p, h, g) for h, g in zip(members[u], members[v], strict=False)
                )
            )

        return equal

    # --- headers ----------------------------------------------------------------------------

    def header(self, e: ir.HeaderExpr) -> HeaderAt:
        match e:
            case ir.HeaderOf(number):
                return lambda p, a: number
            case ir.StackElement(stack, index_expr):
                return self._indexed(self.program.stacks[stack].headers, index_expr)
            case ir.UnionMember(union, member):
                members = [
                    u.headers[member] if member < len(u.headers) else -1
                    for u in self.program.unions
                ]
                at = self.union(union)

                def union_member(p: Phv, a: Arguments) -> int:
                    u = at(p, a)
                    return members[u] if u >= 0 else -1

                return union_member

    def union(self, e: ir.UnionExpr) -> HeaderAt:
        """Number of a union, or -1 where the stack has no such element."""
        match e:
            case ir.UnionOf(number):
                return lambda p, a: number
            case ir.UnionStackElement(stack, index_expr):
                return self._indexed(self.program.union_stacks[stack].unions, index_expr)

    def _indexed(self, elements: Sequence[int], index_expr: ir.DataExpr) -> HeaderAt:
        index = self.data(index_expr)

        def element(p: Phv, a: Arguments) -> int:
            i = index(p, a)
            return elements[i] if 0 <= i < len(elements) else -1

        return element

    # --- what a value can be ----------------------------------------------------------------

    def bits(self, e: ir.DataExpr) -> int | None:
        """If e is surely not negative: how many bits it can have. Else None."""
        match e:
            case ir.Const(value):
                return value.bit_length() if value >= 0 else None
            case ir.FieldRef():
                return None if self.layout.signed(e) else self.layout.width(e)
            case ir.BoolToData():
                return 1
            case ir.Binary("&", left, right):
                known = [b for b in (self.bits(left), self.bits(right)) if b is not None]
                return min(known) if known else None
            case ir.Binary("|" | "^", left, right) | ir.ChooseData(_, left, right):
                x, y = self.bits(left), self.bits(right)
                return None if x is None or y is None else max(x, y)
            case ir.Binary(">>", left, _):
                return self.bits(left)
            case _:
                return None
