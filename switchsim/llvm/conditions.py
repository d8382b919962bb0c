"""Boolean expressions to IR: comparisons, validity, equality of headers and unions.

The counterpart of the second half of `reference.expressions`. Nothing here has an effect, so both
sides of `and` and `or` are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvcast.native.writer import FALSE, TRUE, Function, Value, integer
from kvcast.switchsim import ir
from kvcast.switchsim.llvm.layout import PhvLayout
from kvcast.switchsim.llvm.scope import Number, Scope, bits_of, round_bits

Numbered = tuple[int | Value, tuple[int, ...]]
"""The number of a header or union (an i32 if it is known only later; -1: none), and what it may
be."""


class Operands(Protocol):
    """The expressions that booleans are about; `expressions.Expressions` compiles them."""

    scope: Scope
    f: Function
    layout: PhvLayout
    program: ir.Program

    def exact(self, e: ir.DataExpr) -> Number: ...
    def extend(self, number: Number, bits: int) -> Value: ...
    def one_of(self, value: Value, cases: Sequence[tuple[int, int]], field: int) -> Number: ...
    def header(self, e: ir.HeaderExpr) -> Numbered: ...
    def union(self, e: ir.UnionExpr) -> Numbered: ...


class Conditions:
    """Compiles booleans in the scope of `expressions`."""

    def __init__(self, expressions: Operands) -> None:
        self.expressions = expressions
        self.scope = expressions.scope
        self.f = expressions.f
        self.layout = expressions.layout
        self.program = expressions.program

    def boolean(self, e: ir.BoolExpr) -> Value:
        f = self.f
        match e:
            case ir.BoolConst(value):
                return TRUE if value else FALSE
            case ir.Compare(op, left, right):
                return self.compare(op, self.expressions.exact(left), self.expressions.exact(right))
            case ir.Logic(op, left_b, right_b):
                x, y = self.boolean(left_b), self.boolean(right_b)
                if op == "and":
                    return f.and_(x, y)
                if op == "or":
                    return f.or_(x, y)
                return f.compare("eq" if op == "==" else "ne", x, y)
            case ir.Not(operand):
                return f.not_(self.boolean(operand))
            case ir.DataToBool(operand_d):
                number = self.expressions.exact(operand_d)
                return f.compare("ne", number.value, integer(number.value.bits, 0))
            case ir.HeaderValid(header):
                return self._header_valid(header)
            case ir.UnionValid(union):
                return self._union_valid(union)
            case ir.HeadersEqual(left_h, right_h):
                headers = self.expressions.header(left_h), self.expressions.header(right_h)
                return self._numbers_equal(self._equal, *headers)
            case ir.UnionsEqual(left_u, right_u):
                unions = self.expressions.union(left_u), self.expressions.union(right_u)
                return self._numbers_equal(self._union_equal, *unions)
            case ir.ChooseBool(condition, if_true, if_false):
                return f.select(
                    self.boolean(condition), self.boolean(if_true), self.boolean(if_false)
                )

    def compare(self, op: str, x: Number, y: Number) -> Value:
        low, high = min(x.low, y.low), max(x.high, y.high)
        bits = round_bits(bits_of(low, high))
        name = _SIGNED[op] if low < 0 else _UNSIGNED[op]
        return self.f.compare(
            name, self.expressions.extend(x, bits), self.expressions.extend(y, bits)
        )

    def _header_valid(self, header: ir.HeaderExpr) -> Value:
        number, candidates = self.expressions.header(header)
        if isinstance(number, int):
            return self.scope.is_valid(number) if number >= 0 else FALSE
        valid = self.expressions.one_of(number, [(h, h) for h in candidates], ir.VALID)
        return self.f.compare("ne", valid.value, integer(valid.value.bits, 0))

    def _any_valid(self, union: int) -> Value:
        result = FALSE
        for header in self.program.unions[union].headers:
            result = self.f.or_(self.scope.is_valid(header), result)
        return result

    def _union_valid(self, union: ir.UnionExpr) -> Value:
        number, candidates = self.expressions.union(union)
        if isinstance(number, int):
            return self._any_valid(number) if number >= 0 else FALSE
        return self._dispatch(number, [(u, partial(self._any_valid, u)) for u in candidates])

    def _dispatch(self, value: Value, cases: Sequence[tuple[int, Callable[[], Value]]]) -> Value:
        """The boolean of the case that the value names; false if none."""
        f = self.f
        result = f.variable(1)
        f.store(FALSE, result)
        for make in f.cases(value, cases):
            f.store(make(), result)
        return f.load(1, result)

    def _equal(self, h: int, g: int) -> Value:
        """Two known headers: both valid, of one type, all fields equal."""
        f, scope = self.f, self.scope
        headers = self.program.headers
        if headers[h].type_name != headers[g].type_name:
            return FALSE
        result = f.variable(1)
        f.store(FALSE, result)
        with f.when(f.and_(scope.is_valid(h), scope.is_valid(g))):
            f.store(self._fields_equal(h, g), result)
        return f.load(1, result)

    def _fields_equal(self, h: int, g: int) -> Value:
        f, scope = self.f, self.scope
        equal = TRUE
        length_h, length_g = self.layout.varbit_length[h], self.layout.varbit_length[g]
        if length_h is not None and length_g is not None:
            equal = f.compare(
                "eq", f.load(32, scope.slot(length_h)), f.load(32, scope.slot(length_g))
            )
        for a, b in zip(self.layout.places[h], self.layout.places[g], strict=True):
            if a.varbit:
                slots = [scope.slot(a.offset), scope.slot(b.offset)]
                order = f.intrinsic("memcmp", "i32", [*slots, scope.varbit_bytes(a)])
                # The lengths may differ, but never exceed the space.
                equal = f.and_(equal, f.compare("eq", order, integer(32, 0)))
                continue
            equal = f.and_(equal, self.compare("==", scope.load_field(a), scope.load_field(b)))
        return equal

    def _union_equal(self, u: int, v: int) -> Value:
        result = FALSE
        unions = self.program.unions
        for h, g in zip(unions[u].headers, unions[v].headers, strict=False):
            result = self.f.or_(result, self._equal(h, g))
        return result

    def _numbers_equal(
        self, equal: Callable[[int, int], Value], left: Numbered, right: Numbered
    ) -> Value:
        """`equal` of two whose numbers may be known only when the code runs; one that is not
        there (-1) equals none."""
        if isinstance(left[0], int) and isinstance(right[0], Value):
            left, right = right, left
        (number, candidates), (other, others) = left, right

        def against(n: int) -> Value:
            if isinstance(other, int):
                return equal(n, other) if other >= 0 else FALSE
            return self._dispatch(other, [(m, partial(equal, n, m)) for m in others])

        if isinstance(number, int):
            return against(number) if number >= 0 else FALSE
        return self._dispatch(number, [(n, partial(against, n)) for n in candidates])


_UNSIGNED = {"==": "eq", "!=": "ne", "<": "ult", ">": "ugt", "<=": "ule", ">=": "uge"}
_SIGNED = {"==": "eq", "!=": "ne", "<": "slt", ">": "sgt", "<=": "sle", ">=": "sge"}
