"""Writes LLVM IR as text: values, blocks, functions, modules.

Owns the spelling of LLVM instructions and folds constants on the way. Must not know P4 or Python's
subset, which are both compiled with it. Values are
typed (`iN`, `ptr`, `double`); an integer constant keeps its number, so that a caller can ask for
it. LLVM's language reference is the specification. Loads and stores claim no alignment unless told.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

_T = TypeVar("_T")
_Fold = Callable[[int, int], int]

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
"""By LLVM's name without the sign (u or s)."""


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


@dataclass(slots=True, eq=False)
class Value:
    """An SSA value or a constant; `bits` is 0 for what is not an integer."""

    type: str
    text: str
    bits: int = 0
    const: int | None = None
    """The number, 0 .. 2**bits - 1, of an integer constant."""

    def __str__(self) -> str:
        return f"{self.type} {self.text}"


def integer(bits: int, value: int) -> Value:
    value &= (1 << bits) - 1
    return Value(f"i{bits}", str(value), bits, value)


def i64(value: int) -> Value:
    return integer(64, value)


NULL = Value("ptr", "null")
TRUE = Value("i1", "true", 1, 1)
FALSE = Value("i1", "false", 1, 0)


@dataclass(slots=True, eq=False)
class Block:
    label: str
    lines: list[str] = field(default_factory=list)
    reached: bool = False
    """Something branches here."""
    terminated: bool = False

    def target(self) -> str:
        """As an operand of a branch."""
        self.reached = True
        return f"label %{self.label}"


class Module:
    def __init__(self) -> None:
        self._constants: dict[tuple[bytes, int], Value] = {}
        self._globals: list[str] = []
        self._declared: dict[str, str] = {}
        self.functions: list[Function] = []

    def declare(self, name: str, signature: str) -> None:
        """`signature` holds a `{}` where the name goes."""
        self._declared[name] = signature.format(f"@{name}")

    def constant(self, data: bytes, align: int = 8) -> Value:
        """A pointer to read-only bytes."""
        known = self._constants.get((data, align))
        if known is None:
            known = Value("ptr", f"@c{len(self._constants)}")
            self._constants[data, align] = known
            text = "".join(f"\\{b:02X}" for b in data)
            self._globals.append(
                f"{known.text} = private unnamed_addr constant [{len(data)} x i8] "
                f'c"{text}", align {align}'
            )
        return known

    def words(self, values: Sequence[int], bits: int) -> Value:
        """A pointer to a read-only array of integers of `bits` bits."""
        size = bits // 8
        return self.constant(b"".join(v.to_bytes(size, "little") for v in values), 16)

    def function(
        self,
        name: str,
        result: str,
        parameters: Sequence[tuple[str, str]],
        *,
        exported: bool = False,
    ) -> Function:
        """Parameters are (type with attributes, name)."""
        function = Function(self, name, result, parameters, exported)
        self.functions.append(function)
        return function

    def text(self, triple: str, layout: str) -> str:
        parts = [f'target datalayout = "{layout}"', f'target triple = "{triple}"']
        parts += self._globals
        parts += [f"declare {s}" for s in self._declared.values()]
        parts += [f.text() for f in self.functions]
        return "\n".join(parts) + "\n"


class Function:
    """One function and the place in it where instructions are put."""

    def __init__(
        self,
        module: Module,
        name: str,
        result: str,
        parameters: Sequence[tuple[str, str]],
        exported: bool,
    ) -> None:
        self.module = module
        self.name = name
        self.result = result
        self.exported = exported
        self._parameters = parameters
        self._count = 0
        self.arguments = [Value(t.split()[0], f"%{n}", _bits(t.split()[0])) for t, n in parameters]
        self.blocks: list[Block] = []
        self._allocas: list[str] = []
        self.block = self.new_block("entry")
        self.blocks.append(self.block)

    def text(self) -> str:
        linkage = "" if self.exported else "internal "
        parameters = ", ".join(f"{t} %{n}" for t, n in self._parameters)
        lines = [f"define {linkage}{self.result} @{self.name}({parameters}) nounwind {{"]
        for number, block in enumerate(self.blocks):
            lines.append(f"{block.label}:")
            if number == 0:
                lines += self._allocas
            lines += block.lines
            if not block.terminated:
                raise AssertionError(f"{self.name}: block {block.label} does not end")
        lines.append("}")
        return "\n".join(lines)

    # --- blocks -----------------------------------------------------------------------------

    def new_block(self, hint: str = "b") -> Block:
        self._count += 1
        return Block(f"{hint}.{self._count}")

    def start(self, block: Block) -> None:
        """Go on in this block, which must not have been started before."""
        self.blocks.append(block)
        self.block = block

    def _end(self, line: str) -> None:
        if self.block.terminated:
            raise AssertionError(f"{self.name}: {self.block.label} ends twice")
        self.block.lines.append(f"  {line}")
        self.block.terminated = True

    def branch(self, target: Block) -> None:
        self._end(f"br {target.target()}")

    def branch_if(self, condition: Value, then: Block, otherwise: Block) -> None:
        if condition.const is not None:
            self.branch(then if condition.const else otherwise)
            return
        self._end(f"br {condition}, {then.target()}, {otherwise.target()}")

    def switch(self, value: Value, default: Block, cases: Sequence[tuple[int, Block]]) -> None:
        if value.const is not None:
            self.branch(dict(cases).get(value.const, default))
            return
        text = " ".join(f"{value.type} {n}, {b.target()}" for n, b in cases)
        self._end(f"switch {value}, {default.target()} [ {text} ]")

    def ret(self, value: Value | None = None) -> None:
        self._end("ret void" if value is None else f"ret {value}")

    def unreachable(self) -> None:
        self._end("unreachable")

    def leave_if(self, condition: Value, to: Block) -> None:
        """Go to another block if the condition holds, and on with what is written next if not."""
        on = self.new_block("on")
        self.branch_if(condition, to, on)
        self.start(on)

    def cases(self, value: Value, choices: Iterable[tuple[int, _T]]) -> Iterator[_T]:
        """What the loop's body writes for a choice runs where the value is the choice's number."""
        known, after = list(choices), self.new_block("after")
        blocks = [(number, self.new_block("case")) for number, _ in known]
        self.switch(value, after, blocks)
        for (_, block), (_, choice) in zip(blocks, known, strict=True):
            self.start(block)
            yield choice
            self.branch(after)
        self.start(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """What stands in the `with` runs if the condition holds."""
        then, after = self.new_block("then"), self.new_block("after")
        self.branch_if(condition, then, after)
        self.start(then)
        yield
        if not self.block.terminated:
            self.branch(after)
        self.start(after)

    @contextmanager
    def times(self, count: Value) -> Iterator[Value]:
        """A loop; gives the index, 0 .. count - 1 (64 bits)."""
        variable = self.variable(64)
        head, body, after = self.new_block("head"), self.new_block("body"), self.new_block("done")
        self.store(integer(64, 0), variable, 8)
        self.branch(head)
        self.start(head)
        index = self.load(64, variable, 8)
        self.branch_if(self.compare("ult", index, count), body, after)
        self.start(body)
        yield index
        if not self.block.terminated:
            self.store(self.add(index, integer(64, 1)), variable, 8)
            self.branch(head)
        self.start(after)

    def phi(self, type_of: Value, incoming: Sequence[tuple[Value, Block]]) -> Value:
        if len(incoming) == 1:
            return incoming[0][0]
        arms = ", ".join(f"[ {v.text}, %{b.label} ]" for v, b in incoming)
        return self._emit(type_of.type, type_of.bits, f"phi {type_of.type} {arms}")

    # --- instructions -----------------------------------------------------------------------

    def _name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def _emit(self, type_: str, bits: int, text: str) -> Value:
        name = self._name()
        self.block.lines.append(f"  {name} = {text}")
        return Value(type_, name, bits)

    def effect(self, text: str) -> None:
        self.block.lines.append(f"  {text}")

    def _binary(self, op: str, a: Value, b: Value, fold: _Fold | None = None) -> Value:
        if a.type != b.type:
            raise AssertionError(f"{self.name}: {op} of {a} and {b}")
        if fold is not None and a.const is not None and b.const is not None:
            return integer(a.bits, fold(a.const, b.const))
        return self._emit(a.type, a.bits, f"{op} {a}, {b.text}")

    def add(self, a: Value, b: Value) -> Value:
        if a.const == 0:
            return b
        return a if b.const == 0 else self._binary("add", a, b, operator.add)

    def sub(self, a: Value, b: Value) -> Value:
        return a if b.const == 0 else self._binary("sub", a, b, operator.sub)

    def mul(self, a: Value, b: Value) -> Value:
        return a if b.const == 1 else self._binary("mul", a, b, operator.mul)

    def udiv(self, a: Value, b: Value) -> Value:
        return self._binary("udiv", a, b)

    def urem(self, a: Value, b: Value) -> Value:
        return self._binary("urem", a, b, operator.mod if b.const else None)

    def and_(self, a: Value, b: Value) -> Value:
        if a.const is not None:
            a, b = b, a
        if b.const == 0:
            return b
        return a if b.const == (1 << a.bits) - 1 else self._binary("and", a, b, operator.and_)

    def or_(self, a: Value, b: Value) -> Value:
        if a.const == 0:
            return b
        return a if b.const == 0 else self._binary("or", a, b, operator.or_)

    def xor(self, a: Value, b: Value) -> Value:
        return a if b.const == 0 else self._binary("xor", a, b, operator.xor)

    def not_(self, a: Value) -> Value:
        return self.xor(a, integer(a.bits, -1))

    def shl(self, a: Value, b: Value | int) -> Value:
        """Of a number of bits that is less than the width."""
        return self._shift("shl", a, b, operator.lshift)

    def lshr(self, a: Value, b: Value | int) -> Value:
        return self._shift("lshr", a, b, operator.rshift)

    def ashr(self, a: Value, b: Value | int) -> Value:
        return self._shift("ashr", a, b, lambda x, by: _signed(x, a.bits) >> by)

    def _shift(self, op: str, a: Value, b: Value | int, fold: _Fold) -> Value:
        if isinstance(b, int):
            b = integer(a.bits, b)
        return a if b.const == 0 else self._binary(op, a, b, fold)

    def trunc(self, a: Value, bits: int) -> Value:
        return self._convert("trunc", a, bits, a.const)

    def zext(self, a: Value, bits: int) -> Value:
        return self._convert("zext", a, bits, a.const)

    def sext(self, a: Value, bits: int) -> Value:
        return self._convert("sext", a, bits, a.const and _signed(a.const, a.bits))

    def _convert(self, op: str, a: Value, bits: int, const: int | None) -> Value:
        """`a` with other bits, of which `const` is the number if it is known."""
        if a.bits == bits:
            return a
        if const is not None:
            return integer(bits, const)
        return self._emit(f"i{bits}", bits, f"{op} {a} to i{bits}")

    def resize(self, a: Value, bits: int) -> Value:
        """The low `bits` bits, or zero bits in front."""
        return self.trunc(a, bits) if bits <= a.bits else self.zext(a, bits)

    def compare(self, op: str, a: Value, b: Value) -> Value:
        if a.type != b.type:
            raise AssertionError(f"{self.name}: {op} of {a} and {b}")
        if a.const is not None and b.const is not None:
            x, y = a.const, b.const
            if op[0] == "s":
                x, y = _signed(x, a.bits), _signed(y, a.bits)
            return TRUE if _COMPARE[op[-2:]](x, y) else FALSE
        return self._emit("i1", 1, f"icmp {op} {a}, {b.text}")

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        if condition.const is not None:
            return a if condition.const else b
        return self._emit(a.type, a.bits, f"select {condition}, {a}, {b}")

    def bswap(self, a: Value) -> Value:
        if a.bits == 8:
            return a
        if a.const is not None:
            return integer(a.bits, int.from_bytes(a.const.to_bytes(a.bits // 8), "little"))
        name = f"llvm.bswap.i{a.bits}"
        self.module.declare(name, f"i{a.bits} {{}}(i{a.bits})")
        return self._emit(a.type, a.bits, f"call {a.type} @{name}({a})")

    def call(
        self, target: Function | Value | str, arguments: Sequence[Value], result: str = ""
    ) -> Value:
        """Call a function of this module, one at an address (a pointer), or one by name."""
        if isinstance(target, Function):
            name, result = f"@{target.name}", target.result
        else:
            name = target.text if isinstance(target, Value) else f"@{target}"
        text = f"call {result} {name}({', '.join(str(a) for a in arguments)})"
        if result == "void":
            self.effect(text)
            return NULL
        return self._emit(result, _bits(result), text)

    def intrinsic(self, name: str, result: str, arguments: Sequence[Value]) -> Value:
        types = ", ".join(a.type for a in arguments)
        self.module.declare(name, f"{result} {{}}({types})")
        return self.call(name, arguments, result)

    def raw(self, type_: str, text: str) -> Value:
        """An instruction that has no method of its own."""
        return self._emit(type_, _bits(type_), text)

    # --- memory -----------------------------------------------------------------------------

    def alloca(self, bytes_: int, align: int = 16) -> Value:
        name = self._name()
        self._allocas.append(f"  {name} = alloca [{bytes_} x i8], align {align}")
        return Value("ptr", name)

    def variable(self, kind: int | str) -> Value:
        """A local variable of iN, or of another type (a pointer to it)."""
        name = self._name()
        self._allocas.append(f"  {name} = alloca {f'i{kind}' if isinstance(kind, int) else kind}")
        return Value("ptr", name)

    def pointer(self, address: Value) -> Value:
        """The pointer that an i64 holds."""
        return self._emit("ptr", 0, f"inttoptr {address} to ptr")

    def address(self, pointer: Value) -> Value:
        """The i64 that a pointer holds."""
        return self._emit("i64", 64, f"ptrtoint {pointer} to i64")

    def at(self, base: Value, offset: Value | int) -> Value:
        """The address `offset` bytes behind base."""
        if isinstance(offset, int):
            offset = integer(64, offset)
        if offset.const == 0:
            return base
        return self._emit("ptr", 0, f"getelementptr i8, {base}, {offset}")

    def load(self, bits: int, pointer: Value, align: int = 1) -> Value:
        return self._emit(f"i{bits}", bits, f"load i{bits}, {pointer}, align {align}")

    def load_pointer(self, pointer: Value) -> Value:
        return self._emit("ptr", 0, f"load ptr, {pointer}, align 8")

    def acquire_pointer(self, pointer: Value) -> Value:
        return self._emit("ptr", 0, f"load atomic ptr, {pointer} acquire, align 8")

    def acquire(self, bits: int, pointer: Value) -> Value:
        return self._emit(
            f"i{bits}", bits, f"load atomic i{bits}, {pointer} acquire, align {bits // 8}"
        )

    def store(self, value: Value, pointer: Value, align: int = 1) -> None:
        self.effect(f"store {value}, {pointer}, align {align}")

    def release(self, value: Value, pointer: Value) -> None:
        self.effect(f"store atomic {value}, {pointer} release, align {value.bits // 8 or 8}")

    def copy(self, to: Value, from_: Value, bytes_: Value | int) -> None:
        self._memory("llvm.memcpy.p0.p0.i64", to, from_, bytes_)

    def move(self, to: Value, from_: Value, bytes_: Value | int) -> None:
        """As copy, where the places may overlap."""
        self._memory("llvm.memmove.p0.p0.i64", to, from_, bytes_)

    def fill(self, to: Value, byte: Value | int, bytes_: Value | int) -> None:
        byte = integer(8, byte) if isinstance(byte, int) else byte
        self._memory("llvm.memset.p0.i64", to, byte, bytes_)

    def _memory(self, name: str, to: Value, what: Value, bytes_: Value | int) -> None:
        if isinstance(bytes_, int):
            bytes_ = integer(64, bytes_)
        if bytes_.const != 0:
            self.intrinsic(name, "void", [to, what, bytes_, FALSE])

    def increment(self, pointer: Value, by: Value | int = 1) -> None:
        """Add to a uint64 in memory."""
        if isinstance(by, int):
            by = integer(64, by)
        self.store(self.add(self.load(64, pointer, 8), by), pointer, 8)

    # --- numbers of the network -------------------------------------------------------------

    def load_network(self, pointer: Value, bytes_: int) -> Value:
        """Bytes in network order as an integer of 8 * bytes bits (of exactly these bytes)."""
        value = self.load(8 * bytes_, pointer)
        if bytes_ == 1:
            return value
        if bytes_ % 2 == 0:
            return self.bswap(value)
        wider = self.bswap(self.zext(value, 8 * (bytes_ + 1)))
        return self.trunc(self.lshr(wider, 8), 8 * bytes_)

    def store_network(self, value: Value, pointer: Value, bytes_: int) -> None:
        """The other way; the value has 8 * bytes bits."""
        if bytes_ == 1:
            self.store(value, pointer)
        elif bytes_ % 2 == 0:
            self.store(self.bswap(value), pointer)
        else:
            wide = 8 * (bytes_ + 1)
            swapped = self.bswap(self.shl(self.zext(value, wide), 8))
            self.store(self.trunc(swapped, 8 * bytes_), pointer)


def _bits(type_: str) -> int:
    return int(type_[1:]) if type_[0] == "i" and type_[1:].isdigit() else 0
