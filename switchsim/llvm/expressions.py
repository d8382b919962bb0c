"""Expressions to IR.

P4's arithmetic in a BMv2 file is exact and cut when it is stored. Two ways to compute the same
thing meet here: `low` gives only the low bits that will be stored (addition, multiplication, logic
need no more of their operands), and `exact` gives the number itself with the range that it can
have, in an integer as wide as that range needs. What BMv2 leaves undefined is what the reference
engine says (`expressions`): division by zero is 0, an element outside of a stack reads as 0.

Nothing here has an effect, so both sides of a choice may be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvcast.native.writer import FALSE, TRUE, Block, Function, Value, i64, integer
from kvcast.switchsim import ir
from kvcast.switchsim.ir import UnsupportedConstruct
from kvcast.switchsim.llvm.layout import (
    NATIVE_BITS,
    Place,
    container_bits,
    pack_value,
    stored_bytes,
)
from kvcast.switchsim.llvm.scope import Bytes, ConstantArguments, Number, Scope, bits_of, round_bits
from kvcast.switchsim.semantics import MAX_SHIFT

Numbered = tuple[int | Value, tuple[int, ...]]
"""The number of a header or union (an i32 if it is known only later; -1: none), and what it may
be."""


class Expressions:
    """Compiles expressions in a scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.f = scope.f
        self.layout = scope.layout
        self.program = scope.program

    # --- data -------------------------------------------------------------------------------

    def exact(self, e: ir.DataExpr) -> Number:
        f = self.f
        match e:
            case ir.Const(value):
                return self.constant(value)
            case ir.FieldRef():
                return self._field(e)
            case ir.Local(index):
                return self._local(index)
            case ir.LastField(stack, headers, field):
                cases = [(number + 1, header) for number, header in enumerate(headers)]
                return self.one_of(self.next_index(stack), cases, field)
            case ir.ElementField(header, field):
                return self._element(header, field)
            case ir.RegisterLoad(array, index_expr):
                return self._register_load(array, index_expr)
            case ir.Binary():
                return self._binary(e)
            case ir.Invert(operand):
                x = self.exact(operand)
                return self._fit(f.not_(self._as(x, -x.high - 1, -x.low - 1)), -x.high - 1, ~x.low)
            case ir.BoolToData(condition):
                return Number(f.zext(self.boolean(condition), 8), 0, 1)
            case ir.LastIndex(stack_expr):
                last = f.sub(self.next_index(stack_expr), integer(32, 1))
                return Number(last, -1, len(self.program.stack_elements(stack_expr)) - 1)
            case ir.StackSize(stack_expr):
                size = len(self.program.stack_elements(stack_expr))
                return Number(self.next_index(stack_expr), 0, size)
            case ir.ChooseData(condition, if_true, if_false):
                return self._choose(
                    self.boolean(condition), self.exact(if_true), self.exact(if_false)
                )

    def low(self, e: ir.DataExpr, width: int) -> Value:
        """The low `width` bits, in an integer of round_bits(width) bits; what is above is noise."""
        f, bits = self.f, round_bits(width)
        match e:
            case ir.Binary("+" | "-" | "*" | "|" | "^" as op, left, right):
                x, y = self.low(left, width), self.low(right, width)
                return _RING[op](f, x, y)
            case ir.Binary("&", left, right):
                for side, other in ((left, right), (right, left)):
                    if isinstance(other, ir.Const) and 0 <= other.value < 1 << (width - 1):
                        small = max(1, other.value.bit_length())
                        part = self.low(side, small)
                        return f.zext(f.and_(part, integer(part.bits, other.value)), bits)
                return f.and_(self.low(left, width), self.low(right, width))
            case ir.Invert(operand):
                return f.not_(self.low(operand, width))
            case ir.Binary("<<", left, ir.Const(amount)):
                if not 0 <= amount < width:
                    return integer(bits, 0)
                return f.shl(f.resize(self.low(left, width - amount), bits), amount)
            case ir.Binary("<<", left, right):
                value, by = self.low(left, width), self.exact(right)
                good = self._within(by, 0, width - 1)
                amount_value = f.select(good, self.extend(by, bits), integer(bits, 0))
                return f.select(good, f.shl(value, amount_value), integer(bits, 0))
            case ir.Binary("two_comp_mod", left, ir.Const(size)) if size >= width:
                return self.low(left, width)
            case ir.ChooseData(condition, if_true, if_false):
                return f.select(
                    self.boolean(condition), self.low(if_true, width), self.low(if_false, width)
                )
            case _:
                return self.extend(self.exact(e), bits)

    def constant(self, value: int) -> Number:
        return Number(integer(round_bits(bits_of(value, value)), value), value, value)

    def extend(self, number: Number, bits: int) -> Value:
        """The number in `bits` bits, cut if it is longer."""
        if bits > number.value.bits and number.low < 0:
            return self.f.sext(number.value, bits)
        return self.f.resize(number.value, bits)

    def modulo(self, e: ir.DataExpr, bits: int) -> Value:
        """The number modulo 2**bits, in exactly so many bits (8, 16, 32, 64 ...)."""
        return self.f.resize(self.low(e, bits), bits)

    def _as(self, number: Number, *also: int) -> Value:
        """The number in an integer that can hold it and all of `also`, signed if one is."""
        low, high = min(number.low, *also), max(number.high, *also)
        return self.extend(number, max(round_bits(bits_of(low, high)), number.value.bits))

    def _fit(self, value: Value, low: int, high: int) -> Number:
        """A result of this range, in no more bits than it needs."""
        bits = round_bits(bits_of(low, high))
        return Number(self.f.trunc(value, bits) if bits < value.bits else value, low, high)

    def _field(self, ref: ir.FieldRef) -> Number:
        if ref.field == ir.VALID:
            return Number(self.f.zext(self.scope.is_valid(ref.header), 8), 0, 1)
        place = self.layout.place(ref)
        if place.varbit:
            return self._varbit(place)
        return self.scope.load_field(place)

    def _varbit(self, place: Place) -> Number:
        """A variable-length field as the number that its present bits are."""
        f, width = self.f, place.width
        if width == 0:
            return self.constant(0)
        assert place.length is not None
        bits = round_bits(width + 1)
        loaded = f.load_network(self.scope.slot(place.offset), width // 8)
        present = f.load(32, self.scope.slot(place.length), 4)
        unused = f.sub(integer(32, width), present)
        value = f.lshr(f.zext(loaded, bits), f.resize(unused, bits))
        return Number(value, 0, (1 << width) - 1)

    def _local(self, index: int) -> Number:
        arguments = self.scope.arguments
        assert arguments is not None
        width = arguments.layout.widths[index]
        if isinstance(arguments, ConstantArguments):
            value = arguments.values[index]
            return Number(integer(round_bits(max(1, width)), value), value, value)
        pointer = self.f.at(arguments.pointer, arguments.layout.offsets[index])
        return self._load_stored(pointer, width)

    def _load_stored(self, pointer: Value, width: int) -> Number:
        """A value of a record or a register (`layout.pack_value`)."""
        if width <= NATIVE_BITS:
            return Number(self.f.load(container_bits(width), pointer), 0, (1 << width) - 1)
        loaded = self.f.load_network(pointer, stored_bytes(width))
        return Number(self.f.resize(loaded, round_bits(width)), 0, (1 << width) - 1)

    def _binary(self, e: ir.Binary) -> Number:
        f, op = self.f, e.op
        if op == "&":
            return self._and(e.left, e.right)
        if op in ("two_comp_mod", "sat_cast", "usat_cast"):
            return self._cast(op, e.left, e.right)
        x, y = self.exact(e.left), self.exact(e.right)
        match op:
            case "+":
                low, high = x.low + y.low, x.high + y.high
            case "-":
                low, high = x.low - y.high, x.high - y.low
            case "*":
                corners = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
                low, high = min(corners), max(corners)
            case "|" | "^":
                bits = max(x.high.bit_length(), y.high.bit_length())
                low, high = 0, (1 << bits) - 1
                if x.low < 0 or y.low < 0:
                    bits = max(bits_of(x.low, x.high), bits_of(y.low, y.high))
                    low, high = -(1 << bits), (1 << bits) - 1
            case "<<":
                return self._shift_left(x, y)
            case ">>":
                return self._shift_right(x, y)
            case _:
                return self._divide(op, x, y)
        bits = round_bits(max(bits_of(low, high), bits_of(x.low, x.high), bits_of(y.low, y.high)))
        result = _RING[op](f, self.extend(x, bits), self.extend(y, bits))
        return self._fit(result, low, high)

    def _and(self, left: ir.DataExpr, right: ir.DataExpr) -> Number:
        f = self.f
        for side, other in ((left, right), (right, left)):
            if isinstance(other, ir.Const) and other.value >= 0:
                bits = max(1, other.value.bit_length())
                part = self.low(side, bits)
                return Number(f.and_(part, integer(part.bits, other.value)), 0, other.value)
        x, y = self.exact(left), self.exact(right)
        bits = round_bits(max(bits_of(x.low, x.high), bits_of(y.low, y.high)))
        result = f.and_(self.extend(x, bits), self.extend(y, bits))
        if x.low >= 0 or y.low >= 0:
            tops = [n.high for n in (x, y) if n.low >= 0]
            return self._fit(result, 0, (1 << min(t.bit_length() for t in tops)) - 1)
        return Number(result, -(1 << (bits - 1)), (1 << (bits - 1)) - 1)

    def _cast(self, op: str, left: ir.DataExpr, right: ir.DataExpr) -> Number:
        f = self.f
        if not isinstance(right, ir.Const):
            raise UnsupportedConstruct(f"{op} to a width found at run time", "an expression")
        width = right.value
        if width <= 0:
            return self.constant(0)
        if op == "two_comp_mod":
            value = self.low(left, width)
            unused = value.bits - width
            half = 1 << (width - 1)
            return Number(f.ashr(f.shl(value, unused), unused), -half, half - 1)
        low, high = (0, (1 << width) - 1)
        if op == "sat_cast":
            low, high = -(1 << (width - 1)), (1 << (width - 1)) - 1
        x = self.exact(left)
        value = self._as(x, low, high)
        signed = min(x.low, low) < 0
        least, greatest = integer(value.bits, low), integer(value.bits, high)
        if x.low < low:
            below = f.compare("slt" if signed else "ult", value, least)
            value = f.select(below, least, value)
        if x.high > high:
            above = f.compare("sgt" if signed else "ugt", value, greatest)
            value = f.select(above, greatest, value)
        return self._fit(value, max(low, min(x.low, high)), min(high, max(x.high, low)))

    def _shift_left(self, x: Number, by: Number) -> Number:
        f = self.f
        if by.low == by.high:
            amount = by.low
            if not 0 <= amount <= MAX_SHIFT:
                return self.constant(0)
            low, high = x.low << amount, x.high << amount
            bits = round_bits(bits_of(low, high))
            return Number(f.shl(self.extend(x, bits), amount), low, high)
        longest = min(by.high, MAX_SHIFT)
        if longest < 0:
            return self.constant(0)
        low, high = min(0, x.low << longest), max(0, x.high << longest)
        bits = max(round_bits(bits_of(low, high)), round_bits(longest + 1))
        good = self._within(by, 0, longest)
        amount_value = f.select(good, self.extend(by, bits), integer(bits, 0))
        shifted = f.shl(self.extend(x, bits), amount_value)
        return Number(f.select(good, shifted, integer(bits, 0)), low, high)

    def _shift_right(self, x: Number, by: Number) -> Number:
        f = self.f
        value, bits = x.value, x.value.bits
        if x.low < 0:
            shift, last = f.ashr, bits - 1  # beyond all bits only the sign is left
        else:
            shift, last = f.lshr, bits
        if by.low == by.high:
            if by.low < 0 or (x.low >= 0 and by.low >= bits):
                return self.constant(0)
            shifted = shift(value, min(by.low, bits - 1))
            return self._fit(shifted, x.low >> by.low, x.high >> by.low)
        low, high = min(0, x.low), max(0, x.high)
        wide = max(by.value.bits, bits, 8)
        amount = self.extend(by, wide)
        far = f.compare("sgt" if by.low < 0 else "ugt", amount, integer(wide, bits - 1))
        near = f.select(far, integer(wide, bits - 1), amount)
        if by.low < 0:
            backwards = f.compare("slt", amount, integer(wide, 0))
            near = f.select(backwards, integer(wide, 0), near)
        result = shift(value, f.resize(near, bits))
        if last == bits:
            result = f.select(far, integer(bits, 0), result)
        if by.low < 0:
            result = f.select(backwards, integer(bits, 0), result)
        return Number(result, low, high)

    def _divide(self, op: str, x: Number, y: Number) -> Number:
        """Rounded towards minus infinity; 0 if the divisor is not positive."""
        f = self.f
        bits = round_bits(max(bits_of(x.low, x.high), bits_of(0, max(0, y.high))) + (x.low < 0))
        zero, one = integer(bits, 0), integer(bits, 1)
        divisor = self.extend(y, bits) if y.high > 0 else zero
        if y.low < 0:
            # Cut or not, it is only used where it is positive.
            positive = f.compare("sgt", y.value, integer(y.value.bits, 0))
        else:
            positive = f.compare("ne", y.value, integer(y.value.bits, 0))
        divisor = f.select(positive, divisor, one)
        value = self.extend(x, bits)
        negative = FALSE
        if x.low < 0:
            negative = f.compare("slt", value, zero)
            # floor(x / y) == ~(~x / y) and x mod y == y - 1 - (~x mod y) for x < 0
            value = f.select(negative, f.not_(value), value)
        if bits <= 64:
            quotient, remainder = f.udiv(value, divisor), f.urem(value, divisor)
        else:
            quotient, remainder = self._long_division(value, divisor)
        if op == "/":
            result = quotient
            if x.low < 0:
                result = f.select(negative, f.not_(quotient), quotient)
            low, high = min(0, x.low), max(0, x.high)
        else:
            result = remainder
            if x.low < 0:
                other = f.sub(f.sub(divisor, one), remainder)
                result = f.select(negative, other, remainder)
            low, high = 0, max(0, y.high - 1)
        return self._fit(f.select(positive, result, zero), low, high)

    def _long_division(self, value: Value, divisor: Value) -> tuple[Value, Value]:
        """Bit by bit, for integers that the machine cannot divide. One more bit than the divisor
        needs is never carried: the remainder stays below it, and it below 2**(bits - 1) or the
        comparison is made before the shift loses a bit."""
        f, bits = self.f, value.bits
        kept, result = f.variable(bits), f.variable(bits)
        for variable in (kept, result):
            f.store(integer(bits, 0), variable, 8)
        with f.times(i64(bits)) as done:
            bit = f.lshr(value, f.sub(integer(bits, bits - 1), f.zext(done, bits)))
            remainder = f.load(bits, kept, 8)
            carried = f.compare("slt", remainder, integer(bits, 0))
            shifted = f.or_(f.shl(remainder, 1), f.and_(bit, integer(bits, 1)))
            fits = f.or_(carried, f.compare("uge", shifted, divisor))
            f.store(f.select(fits, f.sub(shifted, divisor), shifted), kept, 8)
            f.store(f.or_(f.shl(f.load(bits, result, 8), 1), f.zext(fits, bits)), result, 8)
        return f.load(bits, result, 8), f.load(bits, kept, 8)

    def _choose(self, condition: Value, x: Number, y: Number) -> Number:
        low, high = min(x.low, y.low), max(x.high, y.high)
        bits = round_bits(bits_of(low, high))
        value = self.f.select(condition, self.extend(x, bits), self.extend(y, bits))
        return Number(value, low, high)

    def _within(self, number: Number, low: int, high: int) -> Value:
        """Is it in low .. high (low >= 0)?"""
        f, bits = self.f, number.value.bits
        result = TRUE
        if number.low < low:
            op = "sge" if number.low < 0 else "uge"
            result = f.compare(op, number.value, integer(bits, low))
        if number.high > high:
            op = "sle" if number.low < 0 else "ule"
            result = f.and_(result, f.compare(op, number.value, integer(bits, high)))
        return result

    # --- fields found at run time -------------------------------------------------------------

    def next_index(self, stack: ir.StackExpr) -> Value:
        """uint32"""
        return self.f.load(32, self.scope.slot(self.layout.stack_next[stack]), 4)

    def _element(self, header: ir.HeaderExpr, field: int) -> Number:
        number, candidates = self.header(header)
        if isinstance(number, int):
            return self._field(ir.FieldRef(number, field)) if number >= 0 else self.constant(0)
        return self.one_of(number, [(h, h) for h in candidates], field)

    def one_of(self, value: Value, cases: Sequence[tuple[int, int]], field: int) -> Number:
        """The field of the header that belongs to the value; 0 if there is none."""
        f = self.f
        after, none = f.new_block("found"), f.new_block("none")
        blocks = [(n, f.new_block("case")) for n, _ in cases]
        f.switch(value, none, blocks)
        arms: list[tuple[Number, Block]] = []
        for (_, block), (_, header) in zip(blocks, cases, strict=True):
            f.start(block)
            number = self._field(ir.FieldRef(header, field))
            arms.append((number, f.block))
            f.branch(after)
        f.start(none)
        arms.append((self.constant(0), none))
        low, high = min(n.low for n, _ in arms), max(n.high for n, _ in arms)
        bits = round_bits(bits_of(low, high))
        if any(n.value.bits != bits and n.value.const is None for n, _ in arms):
            raise UnsupportedConstruct("elements of different types in a stack", "an expression")
        f.branch(after)
        f.start(after)
        values = [
            (n.value if n.value.const is None else integer(bits, n.value.const), b) for n, b in arms
        ]
        return Number(f.phi(integer(bits, 0), values), low, high)

    # --- registers ----------------------------------------------------------------------------

    def cell(self, array: int, index: Value) -> Value:
        """Address of a register's cell; the index (64 bits) is in range."""
        f = self.f
        base = f.load_pointer(self.scope.word(f"register.{array}"))
        size = stored_bytes(self.program.registers[array].width)
        return f.at(base, f.mul(index, integer(64, size)))

    def load_cell(self, array: int, index: Value) -> Number:
        return self._load_stored(self.cell(array, index), self.program.registers[array].width)

    def _register_load(self, array: int, index_expr: ir.DataExpr) -> Number:
        f, spec = self.f, self.program.registers[array]
        if spec.size == 0:
            return self.constant(0)
        index = self.exact(index_expr)
        good = self._within(index, 0, spec.size - 1)
        safe = f.select(good, self.extend(index, 64), integer(64, 0))
        loaded = self.load_cell(array, safe)
        value = f.select(good, loaded.value, integer(loaded.value.bits, 0))
        return Number(value, 0, loaded.high)

    # --- booleans ---------------------------------------------------------------------------

    def boolean(self, e: ir.BoolExpr) -> Value:
        """An i1. Both sides of `and` and `or` are computed."""
        f = self.f
        match e:
            case ir.BoolConst(value):
                return TRUE if value else FALSE
            case ir.Compare(op, left, right):
                return self.compare(op, self.exact(left), self.exact(right))
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
                number = self.exact(operand_d)
                return f.compare("ne", number.value, integer(number.value.bits, 0))
            case ir.HeaderValid(header):
                return self._header_valid(header)
            case ir.UnionValid(union):
                return self._union_valid(union)
            case ir.HeadersEqual(left_h, right_h):
                headers = self.header(left_h), self.header(right_h)
                return self._numbers_equal(self._equal, *headers)
            case ir.UnionsEqual(left_u, right_u):
                unions = self.union(left_u), self.union(right_u)
                return self._numbers_equal(self._union_equal, *unions)
            case ir.ChooseBool(condition, if_true, if_false):
                return f.select(
                    self.boolean(condition), self.boolean(if_true), self.boolean(if_false)
                )

    def compare(self, op: str, x: Number, y: Number) -> Value:
        low, high = min(x.low, y.low), max(x.high, y.high)
        bits = round_bits(bits_of(low, high))
        name = _SIGNED[op] if low < 0 else _UNSIGNED[op]
        return self.f.compare(name, self.extend(x, bits), self.extend(y, bits))

    def _header_valid(self, header: ir.HeaderExpr) -> Value:
        number, candidates = self.header(header)
        if isinstance(number, int):
            return self.scope.is_valid(number) if number >= 0 else FALSE
        valid = self.one_of(number, [(h, h) for h in candidates], ir.VALID)
        return self.f.compare("ne", valid.value, integer(valid.value.bits, 0))

    def _any_valid(self, union: int) -> Value:
        result = FALSE
        for header in self.program.unions[union].headers:
            result = self.f.or_(self.scope.is_valid(header), result)
        return result

    def _union_valid(self, union: ir.UnionExpr) -> Value:
        number, candidates = self.union(union)
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

    # --- bytes ------------------------------------------------------------------------------

    def bytes(self, e: ir.DataExpr) -> Bytes | None:
        """Where the number lies in network order, if it does."""
        match e:
            case ir.FieldRef() if e.field != ir.VALID:
                place = self.layout.place(e)
                metadata = self.program.headers[e.header].metadata
                whole = place.whole_bytes or metadata
                if place.signed or place.native or place.varbit or not whole:
                    return None
                size = (place.bit + place.width) // 8
                return Bytes(self.scope.slot(place.offset), size, place.width)
            case ir.Const(value) if value >= 0:
                size = (value.bit_length() + 7) // 8
                data = value.to_bytes(size)
                return Bytes(self.f.module.constant(data), size, value.bit_length())
            case ir.Local(index):
                arguments = self.scope.arguments
                assert arguments is not None
                width = arguments.layout.widths[index]
                if width <= NATIVE_BITS:
                    return None
                if isinstance(arguments, ConstantArguments):
                    pointer = self.f.module.constant(pack_value(arguments.values[index], width))
                else:
                    pointer = self.f.at(arguments.pointer, arguments.layout.offsets[index])
                return Bytes(pointer, stored_bytes(width), width)
            case _:
                return None

    # --- headers ----------------------------------------------------------------------------

    def header(self, e: ir.HeaderExpr) -> Numbered:
        match e:
            case ir.HeaderOf(number):
                return number, (number,)
            case ir.StackElement(stack, index):
                headers = self.program.stacks[stack].headers
                return self._indexed(headers, index), headers
            case ir.UnionMember(union, member):
                at, candidates = self.union(union)
                members = [
                    u.headers[member] if member < len(u.headers) else -1
                    for u in self.program.unions
                ]
                known = tuple(members[u] for u in candidates if members[u] >= 0)
                if isinstance(at, int):
                    return members[at] if at >= 0 else -1, known
                there = self.f.compare("sge", at, integer(32, 0))
                return self._lookup(members, there, at), known

    def union(self, e: ir.UnionExpr) -> Numbered:
        match e:
            case ir.UnionOf(number):
                return number, (number,)
            case ir.UnionStackElement(stack, index):
                unions = self.program.union_stacks[stack].unions
                return self._indexed(unions, index), unions

    def _indexed(self, elements: Sequence[int], index: ir.DataExpr) -> int | Value:
        number = self.exact(index)
        if number.low == number.high:
            return elements[number.low] if 0 <= number.low < len(elements) else -1
        good = self._within(number, 0, len(elements) - 1)
        return self._lookup(elements, good, self.extend(number, 32))

    def _lookup(self, values: Sequence[int], good: Value, index: Value) -> Value:
        f = self.f
        table = f.module.words([v & 0xFFFFFFFF for v in values], 32)
        safe = f.zext(f.select(good, index, integer(32, 0)), 64)
        found = f.load(32, f.at(table, f.shl(safe, 2)), 4)
        return f.select(good, found, integer(32, -1))


_RING: dict[str, Callable[[Function, Value, Value], Value]] = {
    "+": Function.add,
    "-": Function.sub,
    "*": Function.mul,
    "|": Function.or_,
    "^": Function.xor,
}

_UNSIGNED = {"==": "eq", "!=": "ne", "<": "ult", ">": "ugt", "<=": "ule", ">=": "uge"}
_SIGNED = {"==": "eq", "!=": "ne", "<": "slt", ">": "sgt", "<=": "sle", ">=": "sge"}
