"""Expressions to IR.

P4's arithmetic in a BMv2 file is exact and cut when it is stored. Two ways to compute the same
thing meet here: `low` gives only the low bits that will be stored (addition, multiplication, logic
need no more of their operands), and `exact` gives the number itself with the range that it can have,
in an integer as wide as that range needs. What BMv2 leaves undefined is what the reference engine
says (`expressions`): division by zero is 0, an element outside of a stack reads as 0.

Nothing here has an effect, so both sides of a choice may be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcast.switchsim import program as ir
from kvcast.switchsim.expressions import MAX_SHIFT
from kvcast.switchsim.llvm_ir import FALSE, TRUE, Block, Function, Value, integer
from kvcast.switchsim.llvm_layout import (
    NATIVE_BITS,
    ArgumentsLayout,
    ContextLayout,
    PhvLayout,
    Place,
    container_bits,
    pack_value,
    stored_bytes,
)
from kvcast.switchsim.program import UnsupportedConstruct

MAX_BITS = 8192
"""Widest integer that is computed with; moving wider fields is no computation."""


class Number(NamedTuple):
    """An exact number: its IR value, and the least and greatest number that it can be.

    A value that can be negative is in two's complement; one that cannot uses all its bits."""

    value: Value
    low: int
    high: int


class Bytes(NamedTuple):
    """A number in memory, in network order."""

    pointer: Value
    bytes: int
    width: int


def round_bits(bits: int, where: str = "an expression") -> int:
    """Bits of a machine-friendly integer that holds `bits` bits."""
    if bits > MAX_BITS:
        raise UnsupportedConstruct(f"arithmetic on {bits} bits", where)
    for size in (8, 16, 32, 64, 128):
        if bits <= size:
            return size
    return -(-bits // 64) * 64


def _needed(low: int, high: int) -> int:
    if low >= 0:
        return max(1, high.bit_length())
    return max(high.bit_length(), (~low).bit_length()) + 1


class ConstantArguments:
    """Action arguments that are known when the program is compiled."""

    def __init__(self, layout: ArgumentsLayout, values: Sequence[int]) -> None:
        self.widths = layout.widths
        self.values = tuple(values)


class RecordArguments:
    """Action arguments in a record, from `pointer` on."""

    def __init__(self, layout: ArgumentsLayout, pointer: Value) -> None:
        self.widths = layout.widths
        self.offsets = layout.offsets
        self.pointer = pointer


Arguments = ConstantArguments | RecordArguments


@dataclass(slots=True)
class Shared:
    """What all functions of one program have in common."""

    program: ir.Program
    layout: PhvLayout
    context: ContextLayout
    checked: bool
    """Check every access to memory whose place is only known at run time."""
    drop_port: int


class Scope:
    """A function that is being written, with the packet and the context at hand."""

    def __init__(
        self,
        shared: Shared,
        function: Function,
        context: Value,
        phv: Value,
        arguments: Arguments | None = None,
    ) -> None:
        self.shared = shared
        self.f = function
        self.context = context
        self.phv = phv
        self.arguments = arguments
        self.layout = shared.layout
        self.program = shared.program

    def with_arguments(self, arguments: Arguments) -> Scope:
        return Scope(self.shared, self.f, self.context, self.phv, arguments)

    # --- memory -----------------------------------------------------------------------------

    def word(self, name: str) -> Value:
        """Address of a word of the context."""
        return self.f.at(self.context, self.shared.context[name])

    def slot(self, offset: int) -> Value:
        """An address in the PHV."""
        assert 0 <= offset < self.layout.bytes
        return self.f.at(self.phv, offset)

    def register(self, offset: int) -> Value:
        return self.f.load(64 if offset < 32 else 32, self.slot(offset), 4)

    def set_register(self, offset: int, value: Value) -> None:
        self.f.store(value, self.slot(offset), 4)

    def is_valid(self, header: int) -> Value:
        if self.program.headers[header].metadata:
            return TRUE
        byte = self.f.load(8, self.slot(self.layout.valid[header]))
        return self.f.compare("ne", byte, integer(8, 0))

    def set_valid(self, header: int, valid: bool) -> None:
        self.f.store(integer(8, int(valid)), self.slot(self.layout.valid[header]))

    def count(self, name: str) -> None:
        """One more in the statistics."""
        self.f.increment(self.word(f"stats.{name}"))

    def guard(self, pointer: Value, bytes_: Value, start: Value, end: Value) -> Value:
        """In the checked flavour: the pointer if `bytes_` bytes there lie within start..end,
        else (and counted as a trap) the start of the range. `bytes_` is cut by the caller."""
        if not self.shared.checked:
            return pointer
        f = self.f
        first = f.raw("i64", f"ptrtoint {pointer} to i64")
        low = f.raw("i64", f"ptrtoint {start} to i64")
        high = f.raw("i64", f"ptrtoint {end} to i64")
        good = f.and_(
            f.compare("uge", first, low),
            f.and_(
                f.compare("ule", first, high),
                f.compare("ule", bytes_, f.sub(high, first)),
            ),
        )
        f.increment(self.word("traps"), f.zext(f.not_(good), 64))
        return f.select(good, pointer, start)

    # --- fields -----------------------------------------------------------------------------

    def load_field(self, place: Place) -> Number:
        f, width = self.f, place.width
        if width == 0:
            return Number(integer(8, 0), 0, 0)
        if place.native:
            value = f.load(place.container, self.slot(place.offset))
        else:
            bytes_ = (place.bit + width + 7) // 8
            if bytes_ <= 16:  # the PHV goes on behind the field: read a power of two
                bytes_ = container_bits(8 * bytes_) // 8
            else:
                round_bits(width)
            value = f.load_network(self.slot(place.offset), bytes_)
            value = f.lshr(value, 8 * bytes_ - place.bit - width)
            value = f.resize(value, round_bits(width))
            if place.bit:
                value = f.and_(value, integer(value.bits, (1 << width) - 1))
        if place.signed:
            half = 1 << (width - 1)
            unused = value.bits - width
            return Number(f.ashr(f.shl(value, unused), unused), -half, half - 1)
        return Number(value, 0, (1 << width) - 1)

    def store_field(self, place: Place, value: Value) -> None:
        """Store the low bits of the value."""
        f, width = self.f, place.width
        if width == 0:
            return
        if place.native:
            value = f.resize(value, place.container)
            if width < place.container:
                value = f.and_(value, integer(value.bits, (1 << width) - 1))
            f.store(value, self.slot(place.offset))
            return
        bytes_ = (place.bit + width + 7) // 8
        value = f.resize(value, 8 * bytes_)
        pointer = self.slot(place.offset)
        if not place.whole_bytes:
            shift = 8 * bytes_ - place.bit - width
            ones = ((1 << width) - 1) << shift
            old = f.load_network(pointer, bytes_)
            kept = f.and_(old, integer(old.bits, ~ones))
            value = f.or_(kept, f.and_(f.shl(value, shift), integer(old.bits, ones)))
        f.store_network(value, pointer, bytes_)


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
            case ir.LastField(stack, field):
                headers = self.program.stacks[stack].headers
                return self._last(self.layout.stack_next[stack], headers, field)
            case ir.LastUnionField(union_stack, member, field):
                unions = self.program.union_stacks[union_stack].unions
                headers = tuple(self.program.unions[u].headers[member] for u in unions)
                return self._last(self.layout.union_stack_next[union_stack], headers, field)
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
                value = f.sub(self.next_index(stack_expr), integer(32, 1))
                return Number(value, -1, self.stack_size(stack_expr) - 1)
            case ir.StackSize(stack_expr):
                return Number(self.next_index(stack_expr), 0, self.stack_size(stack_expr))
            case ir.ChooseData(condition, if_true, if_false):
                return self._choose(self.boolean(condition), self.exact(if_true), self.exact(if_false))

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
        return Number(integer(round_bits(_needed(value, value)), value), value, value)

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
        return self.extend(number, max(round_bits(_needed(low, high)), number.value.bits))

    def _fit(self, value: Value, low: int, high: int) -> Number:
        """A result of this range, in no more bits than it needs."""
        bits = round_bits(_needed(low, high))
        return Number(self.f.trunc(value, bits) if bits < value.bits else value, low, high)

    def _field(self, ref: ir.FieldRef) -> Number:
        if ref.field == ir.VALID:
            return Number(self.f.zext(self.scope.is_valid(ref.header), 8), 0, 1)
        return self.scope.load_field(self._readable(self.layout.place(ref)))

    @staticmethod
    def _readable(place: Place) -> Place:
        if place.varbit:
            raise UnsupportedConstruct("variable-length field in an expression", "an expression")
        return place

    def _local(self, index: int) -> Number:
        arguments = self.scope.arguments
        assert arguments is not None
        width = arguments.widths[index]
        if isinstance(arguments, ConstantArguments):
            value = arguments.values[index]
            return Number(integer(round_bits(max(1, width)), value), value, value)
        pointer = self.f.at(arguments.pointer, arguments.offsets[index])
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
                    bits = max(_needed(x.low, x.high), _needed(y.low, y.high))
                    low, high = -(1 << bits), (1 << bits) - 1
            case "<<":
                return self._shift_left(x, y)
            case ">>":
                return self._shift_right(x, y)
            case _:
                return self._divide(op, x, y)
        bits = round_bits(max(_needed(low, high), _needed(x.low, x.high), _needed(y.low, y.high)))
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
        bits = round_bits(max(_needed(x.low, x.high), _needed(y.low, y.high)))
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
            bits = round_bits(_needed(low, high))
            return Number(f.shl(self.extend(x, bits), amount), low, high)
        longest = min(by.high, MAX_SHIFT)
        if longest < 0:
            return self.constant(0)
        low, high = min(0, x.low << longest), max(0, x.high << longest)
        bits = max(round_bits(_needed(low, high)), round_bits(longest + 1))
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
        bits = round_bits(max(_needed(x.low, x.high), _needed(0, max(0, y.high))) + (x.low < 0))
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
        before, body, after = f.block, f.new_block("divide"), f.new_block("divided")
        one = integer(bits, 1)
        f.branch(body)
        f.start(body)
        count, count_arms = f.phi_later(f"i{bits}")
        remainder, remainder_arms = f.phi_later(f"i{bits}")
        quotient, quotient_arms = f.phi_later(f"i{bits}")
        bit = f.and_(f.lshr(value, count), one)
        carried = f.compare("slt", remainder, integer(bits, 0))
        shifted = f.or_(f.shl(remainder, 1), bit)
        fits = f.or_(carried, f.compare("uge", shifted, divisor))
        next_remainder = f.select(fits, f.sub(shifted, divisor), shifted)
        next_quotient = f.or_(f.shl(quotient, 1), f.zext(fits, bits))
        next_count = f.sub(count, one)
        f.branch_if(f.compare("eq", count, integer(bits, 0)), after, body)
        count_arms += [(integer(bits, bits - 1), before), (next_count, body)]
        remainder_arms += [(integer(bits, 0), before), (next_remainder, body)]
        quotient_arms += [(integer(bits, 0), before), (next_quotient, body)]
        for phi in (count, remainder, quotient):
            f.finish_phi(phi)
        f.start(after)
        return next_quotient, next_remainder

    def _choose(self, condition: Value, x: Number, y: Number) -> Number:
        low, high = min(x.low, y.low), max(x.high, y.high)
        bits = round_bits(_needed(low, high))
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
        return self.f.load(32, self.scope.slot(self.next_offset(stack)), 4)

    def next_offset(self, stack: ir.StackExpr) -> int:
        if isinstance(stack, ir.StackOf):
            return self.layout.stack_next[stack.stack]
        return self.layout.union_stack_next[stack.union_stack]

    def stack_size(self, stack: ir.StackExpr) -> int:
        if isinstance(stack, ir.StackOf):
            return len(self.program.stacks[stack.stack].headers)
        return len(self.program.union_stacks[stack.union_stack].unions)

    def _last(self, offset: int, headers: Sequence[int], field: int) -> Number:
        n = self.f.load(32, self.scope.slot(offset), 4)
        cases = [(number + 1, header) for number, header in enumerate(headers)]
        return self._one_of(n, cases, field)

    def _element(self, header: ir.HeaderExpr, field: int) -> Number:
        number = self.header(header)
        if isinstance(number, int):
            return self._field(ir.FieldRef(number, field)) if number >= 0 else self.constant(0)
        return self._one_of(number, [(h, h) for h in self.candidates(header)], field)

    def _one_of(self, value: Value, cases: Sequence[tuple[int, int]], field: int) -> Number:
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
        bits = round_bits(_needed(low, high))
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
        width, pointer = self.program.registers[array].width, self.cell(array, index)
        if width <= NATIVE_BITS:
            return Number(self.f.load(container_bits(width), pointer), 0, (1 << width) - 1)
        loaded = self.f.load_network(pointer, stored_bytes(width))
        return Number(self.f.resize(loaded, round_bits(width)), 0, (1 << width) - 1)

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

    # --- bytes ------------------------------------------------------------------------------

    def bytes(self, e: ir.DataExpr) -> Bytes | None:
        """Where the number lies in network order, if it does."""
        match e:
            case ir.FieldRef() if e.field != ir.VALID:
                place = self._readable(self.layout.place(e))
                metadata = self.program.headers[e.header].metadata
                if place.signed or place.native or not (place.whole_bytes or metadata):
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
                width = arguments.widths[index]
                if width <= NATIVE_BITS:
                    return None
                if isinstance(arguments, ConstantArguments):
                    pointer = self.f.module.constant(pack_value(arguments.values[index], width))
                else:
                    pointer = self.f.at(arguments.pointer, arguments.offsets[index])
                return Bytes(pointer, stored_bytes(width), width)
            case _:
                return None

    # --- booleans ---------------------------------------------------------------------------

    def boolean(self, e: ir.BoolExpr) -> Value:
        f = self.f
        match e:
            case ir.BoolConst(value):
                return TRUE if value else FALSE
            case ir.Compare(op, left, right):
                return self._compare(op, self.exact(left), self.exact(right))
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
                return self._headers_equal(left_h, right_h)
            case ir.UnionsEqual(left_u, right_u):
                return self._unions_equal(left_u, right_u)
            case ir.ChooseBool(condition, if_true, if_false):
                return f.select(
                    self.boolean(condition), self.boolean(if_true), self.boolean(if_false)
                )

    def _compare(self, op: str, x: Number, y: Number) -> Value:
        low, high = min(x.low, y.low), max(x.high, y.high)
        bits = round_bits(_needed(low, high))
        name = _SIGNED[op] if low < 0 else _UNSIGNED[op]
        return self.f.compare(name, self.extend(x, bits), self.extend(y, bits))

    def _header_valid(self, header: ir.HeaderExpr) -> Value:
        number = self.header(header)
        if isinstance(number, int):
            return self.scope.is_valid(number) if number >= 0 else FALSE
        valid = self._one_of(number, [(h, h) for h in self.candidates(header)], ir.VALID)
        return self.f.compare("ne", valid.value, integer(valid.value.bits, 0))

    def _any_valid(self, union: int) -> Value:
        result = FALSE
        for header in self.program.unions[union].headers:
            result = self.f.or_(self.scope.is_valid(header), result)
        return result

    def _union_valid(self, union: ir.UnionExpr) -> Value:
        number = self.union(union)
        if isinstance(number, int):
            return self._any_valid(number) if number >= 0 else FALSE
        cases = [(u, lambda u=u: self._any_valid(u)) for u in self.union_candidates(union)]
        return self._dispatch(number, cases)

    def _dispatch(self, value: Value, cases: Sequence[tuple[int, Callable[[], Value]]]) -> Value:
        """The boolean of the case that the value names; false if none."""
        f = self.f
        after, none = f.new_block("decided"), f.new_block("none")
        blocks = [(n, f.new_block("case")) for n, _ in cases]
        f.switch(value, none, blocks)
        arms: list[tuple[Value, Block]] = []
        for (_, block), (_, make) in zip(blocks, cases, strict=True):
            f.start(block)
            arms.append((make(), f.block))
            f.branch(after)
        f.start(none)
        arms.append((FALSE, none))
        f.branch(after)
        f.start(after)
        return f.phi(FALSE, arms)

    def _equal(self, h: int, g: int) -> Value:
        """Two known headers: both valid, of one type, all fields equal."""
        f, scope = self.f, self.scope
        headers = self.program.headers
        if headers[h].type_name != headers[g].type_name:
            return FALSE
        both = f.and_(scope.is_valid(h), scope.is_valid(g))
        result, after = f.block, f.new_block("compared")
        compare = f.new_block("compare")
        f.branch_if(both, compare, after)
        if both.const is not None and not both.const:
            f.start(after)
            return FALSE
        f.start(compare)
        equal = TRUE
        length_h, length_g = self.layout.varbit_length[h], self.layout.varbit_length[g]
        if length_h is not None and length_g is not None:
            equal = f.compare(
                "eq", f.load(32, scope.slot(length_h)), f.load(32, scope.slot(length_g))
            )
        for a, b in zip(self.layout.places[h], self.layout.places[g], strict=True):
            if a.varbit:
                assert length_h is not None
                bytes_ = f.lshr(f.zext(f.load(32, scope.slot(length_h)), 64), 3)
                f.module.declare("memcmp", "i32 {}(ptr, ptr, i64)")
                order = f.call("memcmp", [scope.slot(a.offset), scope.slot(b.offset), bytes_], "i32")
                # The lengths may differ, but never exceed the space.
                equal = f.and_(equal, f.compare("eq", order, integer(32, 0)))
                continue
            equal = f.and_(equal, self._compare("==", scope.load_field(a), scope.load_field(b)))
        last = f.block
        f.branch(after)
        f.start(after)
        if both.const is not None:
            return equal
        return f.phi(FALSE, [(FALSE, result), (equal, last)])

    def _headers_equal(self, left: ir.HeaderExpr, right: ir.HeaderExpr) -> Value:
        h, g = self.header(left), self.header(right)
        if isinstance(h, int) and isinstance(g, int):
            return self._equal(h, g) if h >= 0 and g >= 0 else FALSE
        if isinstance(h, int):
            left, right, h, g = right, left, g, h

        def against(n: int) -> Value:
            if isinstance(g, int):
                return self._equal(n, g) if g >= 0 else FALSE
            inner = [(m, lambda m=m: self._equal(n, m)) for m in self.candidates(right)]
            return self._dispatch(g, inner)

        assert isinstance(h, Value)
        return self._dispatch(h, [(n, lambda n=n: against(n)) for n in self.candidates(left)])

    def _union_equal(self, u: int, v: int) -> Value:
        result = FALSE
        unions = self.program.unions
        for h, g in zip(unions[u].headers, unions[v].headers, strict=False):
            result = self.f.or_(result, self._equal(h, g))
        return result

    def _unions_equal(self, left: ir.UnionExpr, right: ir.UnionExpr) -> Value:
        u, v = self.union(left), self.union(right)
        if isinstance(u, int) and isinstance(v, int):
            return self._union_equal(u, v) if u >= 0 and v >= 0 else FALSE
        if isinstance(u, int):
            left, right, u, v = right, left, v, u

        def against(n: int) -> Value:
            if isinstance(v, int):
                return self._union_equal(n, v) if v >= 0 else FALSE
            inner = [(m, lambda m=m: self._union_equal(n, m)) for m in self.union_candidates(right)]
            return self._dispatch(v, inner)

        assert isinstance(u, Value)
        return self._dispatch(u, [(n, lambda n=n: against(n)) for n in self.union_candidates(left)])

    # --- headers ----------------------------------------------------------------------------

    def header(self, e: ir.HeaderExpr) -> int | Value:
        """Number of the header if it is known now (-1: none), else an i32 (-1: none)."""
        match e:
            case ir.HeaderOf(number):
                return number
            case ir.StackElement(stack, index):
                return self._indexed(self.program.stacks[stack].headers, index)
            case ir.UnionMember(union, member):
                number = self.union(union)
                members = [
                    u.headers[member] if member < len(u.headers) else -1
                    for u in self.program.unions
                ]
                if isinstance(number, int):
                    return members[number] if number >= 0 else -1
                return self._lookup(members, self.f.compare("sge", number, integer(32, 0)), number)

    def union(self, e: ir.UnionExpr) -> int | Value:
        match e:
            case ir.UnionOf(number):
                return number
            case ir.UnionStackElement(stack, index):
                return self._indexed(self.program.union_stacks[stack].unions, index)

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

    def candidates(self, e: ir.HeaderExpr) -> tuple[int, ...]:
        match e:
            case ir.HeaderOf(number):
                return (number,)
            case ir.StackElement(stack, _):
                return self.program.stacks[stack].headers
            case ir.UnionMember(union, member):
                unions = [self.program.unions[u] for u in self.union_candidates(union)]
                return tuple(u.headers[member] for u in unions if member < len(u.headers))

    def union_candidates(self, e: ir.UnionExpr) -> tuple[int, ...]:
        match e:
            case ir.UnionOf(number):
                return (number,)
            case ir.UnionStackElement(stack, _):
                return self.program.union_stacks[stack].unions


_RING: dict[str, Callable[[Function, Value, Value], Value]] = {
    "+": Function.add,
    "-": Function.sub,
    "*": Function.mul,
    "|": Function.or_,
    "^": Function.xor,
}
_UNSIGNED = {"==": "eq", "!=": "ne", "<": "ult", ">": "ugt", "<=": "ule", ">=": "uge"}
_SIGNED = {"==": "eq", "!=": "ne", "<": "slt", ">": "sgt", "<=": "sle", ">=": "sge"}
