"""Where code is written to: a function, with the packet and the context at hand.

Owns reading and writing fields, validity and packet registers in IR, and the numbers that
expressions are made of. Must not know expressions or statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcast.native.writer import TRUE, Function, Value, i64, integer
from kvcast.switchsim import ir
from kvcast.switchsim.ir import UnsupportedConstruct
from kvcast.switchsim.llvm.layout import (
    NATIVE_BITS,
    ArgumentsLayout,
    ContextLayout,
    PhvLayout,
    Place,
    container_bits,
    stored_bytes,
)

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


def bits_of(low: int, high: int) -> int:
    """Bits of an integer that can hold every number in low .. high."""
    if low >= 0:
        return max(1, high.bit_length())
    return max(high.bit_length(), (~low).bit_length()) + 1


class ConstantArguments(NamedTuple):
    """Action arguments that are known when the program is compiled."""

    layout: ArgumentsLayout
    values: Sequence[int]


class RecordArguments(NamedTuple):
    """Action arguments in a record, from `pointer` on."""

    layout: ArgumentsLayout
    pointer: Value


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

    def varbit_bytes(self, place: Place) -> Value:
        """Bytes (64 bits) that a variable-length field has."""
        assert place.length is not None
        return self.f.lshr(self.f.zext(self.f.load(32, self.slot(place.length), 4), 64), 3)

    def header_bytes(self, header: int) -> Value:
        """Bytes (64 bits) that a packet header has on the wire."""
        fixed, varbit = i64(self.layout.wire_bytes(header)), self.layout.varbit(header)
        return fixed if varbit is None else self.f.add(fixed, self.varbit_bytes(varbit))

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
        first, low, high = f.address(pointer), f.address(start), f.address(end)
        good = f.and_(f.compare("uge", first, low), f.compare("ule", first, high))
        good = f.and_(good, f.compare("ule", bytes_, f.sub(high, first)))
        f.increment(self.word("traps"), f.zext(f.not_(good), 64))
        return f.select(good, pointer, start)

    def store_stored(self, value: Value, pointer: Value, width: int) -> None:
        """The low bits of a value into a record or a register (`layout.pack_value`)."""
        f, bits = self.f, 8 * stored_bytes(width)
        value = f.resize(value, bits)
        if bits > width:
            value = f.and_(value, integer(bits, (1 << width) - 1))
        if width > NATIVE_BITS:
            f.store_network(value, pointer, bits // 8)
        else:
            f.store(value, pointer)

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
