"""A small subset of Python, compiled to machine code.

Owns: the subset's types and statements, what they become in IR (`native.writer` spells it), and
the library of compiled functions that ctypes can call (machine code and its cache are
`native.jit`'s). Must not know: packets, sockets, P4. The packet loop is written in this subset, so
that it reads, type-checks (mypy sees ordinary Python) and lints like the rest.

The subset:

- Functions under `@native`, with every parameter annotated. They call each other, C functions
  (declared under `@external`), functions whose address is a value (`@indirect`), and the
  intrinsics at the end of this module. No recursion deeper than the stack, no exceptions.
- `in` and `not in` ask about a tuple of numbers.
- Statements: assignment, `if`, `while`, `for ... in range(...)`, `break`, `continue`, `return`.
- All arithmetic is in 64 bits and wraps, unsigned unless a value was declared signed; a mixture is
  an error. Fields and parameters may be narrower; what is stored there is cut. Division is
  unsigned. A shift by 64 or more is undefined.
- `Struct` subclasses lay their annotated fields out as C does. A value of such a type is a
  reference. `Ptr[T]` is a pointer: `p[i]` is the i-th number, or a reference to the i-th struct.
  `Annotated[Ptr[T], Inline(n)]` is a field that holds n of them in place.
- Names in capitals and other names of the module are constants, taken when compiled.

Nothing checks bounds: what a native function indexes with, it must have compared before.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import textwrap
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Generic, NoReturn, ParamSpec, Self, TypeVar

from kvcast.native import jit
from kvcast.native.sources import sources_of
from kvcast.native.writer import (
    FALSE,
    NULL,
    TRUE,
    Block,
    Function,
    Module,
    Value,
    integer,
)

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class NativeError(Exception):
    """A function is not within the subset; the message says where."""


# --- types ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int:
    """A number of 8, 16, 32 or 64 bits."""

    bits: int
    signed: bool


U8 = Annotated[int, Int(8, False)]
U16 = Annotated[int, Int(16, False)]
U32 = Annotated[int, Int(32, False)]
U64 = Annotated[int, Int(64, False)]
I32 = Annotated[int, Int(32, True)]
I64 = Annotated[int, Int(64, True)]


@dataclass(frozen=True)
class Inline:
    """Marks a field that holds `count` elements of its Ptr type in place."""

    count: int


class Ptr(Generic[T]):
    """A pointer to T. The methods are for the type checker; only compiled code runs them."""

    def __getitem__(self, index: int) -> T:
        raise NotImplementedError

    def __setitem__(self, index: int, value: T) -> None:
        raise NotImplementedError


class Struct:
    """A C structure; subclasses annotate its fields."""

    @classmethod
    def at(cls, address: int) -> Self:
        """(Compiled code) The structure at that address."""
        raise NotImplementedError

    @classmethod
    def array(cls, address: int) -> Ptr[Self]:
        """(Compiled code) The structures from that address on."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Pointer:
    to: Any  # Int or _Reference


@dataclass(frozen=True)
class _Reference:
    struct: type[Struct]


@dataclass(frozen=True)
class _Field:
    offset: int
    kind: Any  # Int, _Pointer or _Reference
    inline: bool


_BOOL = Int(1, False)
_UNSIGNED = Int(64, False)
_SIGNED = Int(64, True)
_CTYPES: dict[Int, Any] = {
    Int(8, False): ctypes.c_uint8,
    Int(16, False): ctypes.c_uint16,
    Int(32, False): ctypes.c_uint32,
    Int(64, False): ctypes.c_uint64,
    Int(32, True): ctypes.c_int32,
    Int(64, True): ctypes.c_int64,
}


def _kind_of(annotation: Any) -> tuple[Any, int | None]:
    """The type that an annotation means, and how many are held in place."""
    if typing.get_origin(annotation) is Annotated:
        inner, *marks = typing.get_args(annotation)
        for mark in marks:
            if isinstance(mark, Int):
                return mark, None
            if isinstance(mark, Inline):
                return _kind_of(inner)[0], mark.count
    if typing.get_origin(annotation) is Ptr:
        kind, _ = _kind_of(typing.get_args(annotation)[0])
        return _Pointer(kind), None
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return _Reference(annotation), None
    raise NativeError(f"{annotation!r} is no type of compiled code")


def _once(function: F) -> F:
    """functools.cache, where mypy does not know that the argument is hashable (a type)."""
    return cache(function)  # type: ignore[return-value]


def _c_type(kind: Any) -> Any:
    """Pointers and references are addresses."""
    if kind is None or kind == _BOOL:
        return None if kind is None else ctypes.c_bool
    return _CTYPES[kind] if isinstance(kind, Int) else ctypes.c_uint64


@_once
def ctypes_of(struct: type[Struct]) -> type[ctypes.Structure]:
    """The ctypes mirror of a structure; pointers and references are addresses (c_uint64)."""
    fields: list[tuple[str, Any]] = []
    for name, annotation in typing.get_type_hints(struct, include_extras=True).items():
        kind, count = _kind_of(annotation)
        if count is None:
            fields.append((name, _c_type(kind)))
            continue
        assert isinstance(kind, _Pointer)
        to = kind.to
        element = ctypes_of(to.struct) if isinstance(to, _Reference) else _c_type(to)
        fields.append((name, element * count))
    return type(struct.__name__, (ctypes.Structure,), {"_fields_": fields})


@_once
def _fields(struct: type[Struct]) -> dict[str, _Field]:
    mirror = ctypes_of(struct)
    found: dict[str, _Field] = {}
    for name, annotation in typing.get_type_hints(struct, include_extras=True).items():
        kind, count = _kind_of(annotation)
        found[name] = _Field(getattr(mirror, name).offset, kind, count is not None)
    return found


def size_of(struct: type[Struct]) -> int:
    """Bytes of a structure (in compiled code: a constant)."""
    return ctypes.sizeof(ctypes_of(struct))


# --- declarations -----------------------------------------------------------------------------


def native(function: F) -> F:
    """Marks a function of the subset."""
    function.__native__ = "native"  # type: ignore[attr-defined]
    return function


def external(function: F) -> F:
    """Declares a C function of that name; the body is not used."""
    function.__native__ = "external"  # type: ignore[attr-defined]
    return function


def indirect(function: F) -> F:
    """Declares how to call a function whose address is the first argument."""
    function.__native__ = "indirect"  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class _Signature:
    names: tuple[str, ...]
    kinds: tuple[Any, ...]
    result: Any  # None for none


@_once
def _signature(function: Callable[..., Any]) -> _Signature:
    hints = typing.get_type_hints(function, include_extras=True)
    if "return" not in hints:
        raise NativeError(f"{function.__name__}: the result has no annotation")
    result = hints.pop("return")
    names = tuple(inspect.signature(function).parameters)
    for name in names:
        if name not in hints:
            raise NativeError(f"{function.__name__}: {name} has no annotation")
    return _Signature(
        names,
        tuple(_kind_of(hints[name])[0] for name in names),
        None if result is type(None) else _BOOL if result is bool else _kind_of(result)[0],
    )


def _llvm_type(kind: Any) -> str:
    if kind is None:
        return "void"
    return f"i{kind.bits}" if isinstance(kind, Int) else "ptr"


# --- the compiler -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Value:
    kind: Any  # _BOOL, _UNSIGNED, _SIGNED, _Pointer, _Reference or None
    value: Value
    literal: int | None = None


@dataclass(frozen=True)
class _Place:
    """Somewhere a value can be stored."""

    kind: Any
    address: Value
    aligned: bool = True


_NOTHING = _Value(None, NULL)
_ARITHMETIC = {
    ast.Add: Function.add, ast.Sub: Function.sub, ast.Mult: Function.mul,
    ast.BitAnd: Function.and_, ast.BitOr: Function.or_, ast.BitXor: Function.xor,
    ast.LShift: Function.shl,
}  # fmt: skip
_COMPARISONS = {
    ast.Eq: ("eq", "eq"), ast.NotEq: ("ne", "ne"), ast.Lt: ("ult", "slt"), ast.LtE: ("ule", "sle"),
    ast.Gt: ("ugt", "sgt"), ast.GtE: ("uge", "sge"),
}  # fmt: skip


class _FunctionCompiler:
    """Compiles one function into a module. `needed` collects the functions that it calls."""

    def __init__(
        self,
        module: Module,
        function: Callable[..., Any],
        needed: list[Callable[..., Any]],
        exported: bool,
    ) -> None:
        self._function = function
        self._needed = needed
        self._signature = _signature(function)
        self._globals = function.__globals__
        self._slots: dict[str, _Place] = {}
        self._loops: list[tuple[Block, Block]] = []  # where continue and break go
        parameters = [(_llvm_type(kind), f"p{n}") for n, kind in enumerate(self._signature.kinds)]
        result = _llvm_type(self._signature.result)
        self.f = module.function(function.__name__, result, parameters, exported=exported)
        source = textwrap.dedent(inspect.getsource(function))
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.FunctionDef)
        self._body = definition.body

    def compile(self) -> None:
        signature = self._signature
        for name, kind, argument in zip(
            signature.names, signature.kinds, self.f.arguments, strict=True
        ):
            value = self._widened(kind, argument)
            self._put(value.value, self._slot(name, value.kind))
        self._block(self._body)
        if not self.f.block.terminated:
            if signature.result is not None:
                self._fail(self._body[-1], "the function can end without a result")
            self.f.ret()

    def _fail(self, node: ast.AST, why: str) -> NoReturn:
        first = self._function.__code__.co_firstlineno
        line = first + getattr(node, "lineno", 1) - 1
        raise NativeError(f"{self._function.__module__}:{line}: {self._function.__name__}: {why}")

    # --- control

    def _start(self, block: Block) -> None:
        """Go on in this block, also from the one before it."""
        self._jump(block)
        self.f.start(block)

    def _jump(self, block: Block) -> None:
        if not self.f.block.terminated:
            self.f.branch(block)

    def _go_on(self, after: Block) -> None:
        """Behind a statement with ways that may all have returned: then nothing comes here."""
        self._start(after)
        if not after.reached:
            self.f.unreachable()

    # --- memory

    def _slot(self, name: str, kind: Any) -> _Place:
        place = self._slots.get(name)
        if place is None:
            place = self._slots[name] = _Place(kind, self.f.variable(_llvm_type(kind)))
        return place

    def _put(self, value: Value, place: _Place) -> None:
        align = max(1, value.bits // 8) if value.bits else 8
        self.f.store(value, place.address, align if place.aligned else 1)

    def _load(self, place: _Place) -> _Value:
        if isinstance(place.kind, tuple):
            return _Value(place.kind[1], place.address)
        if not isinstance(place.kind, Int):
            return _Value(place.kind, self.f.load_pointer(place.address))
        bits = place.kind.bits
        align = max(1, bits // 8) if place.aligned else 1
        return self._widened(place.kind, self.f.load(bits, place.address, align))

    def _widened(self, kind: Any, value: Value) -> _Value:
        """A parameter, field or result as compiled code calculates with it."""
        if not isinstance(kind, Int) or kind == _BOOL:
            return _Value(kind, value)
        wide = self.f.sext(value, 64) if kind.signed else self.f.zext(value, 64)
        return _Value(Int(64, kind.signed), wide)

    def _narrowed(self, node: ast.AST, value: _Value, kind: Any) -> Value:
        """The value as one of exactly that type."""
        if isinstance(kind, Int) and kind.bits > 1:
            return self.f.trunc(self._number(node, value).value, kind.bits)
        if value.kind != kind:
            self._fail(node, f"{value.kind} where {kind} is needed")
        return value.value

    # --- statements

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            handler = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
            if handler is None:
                self._fail(statement, f"no {type(statement).__name__} in compiled code")
            if self.f.block.terminated:  # unreachable code still needs a block
                self.f.start(self.f.new_block("dead"))
            handler(statement)

    def _do_pass(self, node: ast.Pass) -> None:
        pass

    def _do_expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return  # a docstring
        self._value(node.value)

    def _do_assert(self, node: ast.Assert) -> None:
        """For the type checker only."""

    def _do_assign(self, node: ast.Assign) -> None:
        if len(node.targets) != 1:
            self._fail(node, "one target only")
        self._assign(node.targets[0], self._value(node.value))

    def _do_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is None or not isinstance(node.target, ast.Name):
            self._fail(node, "a declaration needs a name and a value")
        kind, _ = _kind_of(eval(ast.unparse(node.annotation), self._globals))
        if isinstance(kind, Int):
            kind = Int(64, kind.signed)
        value = self._narrowed(node, self._value(node.value), kind)
        self._put(value, self._slot(node.target.id, kind))

    def _do_augassign(self, node: ast.AugAssign) -> None:
        place = self._place(node.target)
        old = self._load(place)
        value = self._arithmetic(node, node.op, old, self._value(node.value))
        self._store(node, place, value)

    def _assign(self, target: ast.expr, value: _Value) -> None:
        if isinstance(target, ast.Name) and target.id not in self._slots:
            if value.kind is None:
                self._fail(target, "the value is nothing")
            self._slot(target.id, value.kind)
        self._store(target, self._place(target), value)

    def _do_return(self, node: ast.Return) -> None:
        kind = self._signature.result
        if (node.value is None) != (kind is None):
            self._fail(node, "the result does not fit the declaration")
        if node.value is None:
            self.f.ret()
        else:
            self.f.ret(self._narrowed(node, self._value(node.value), kind))

    def _do_if(self, node: ast.If) -> None:
        f = self.f
        yes, no, after = f.new_block("then"), f.new_block("else"), f.new_block("after")
        f.branch_if(self._condition(node.test), yes, no if node.orelse else after)
        f.start(yes)
        self._block(node.body)
        self._jump(after)
        if node.orelse:
            f.start(no)
            self._block(node.orelse)
            self._jump(after)
        self._go_on(after)

    def _do_while(self, node: ast.While) -> None:
        if node.orelse:
            self._fail(node, "no else of a loop")
        f = self.f
        test, body, after = f.new_block("test"), f.new_block("body"), f.new_block("after")
        self._start(test)
        f.branch_if(self._condition(node.test), body, after)
        f.start(body)
        self._loops.append((test, after))
        self._block(node.body)
        self._loops.pop()
        self._jump(test)
        self._go_on(after)

    def _do_for(self, node: ast.For) -> None:
        call = node.iter
        if (
            node.orelse
            or not isinstance(node.target, ast.Name)
            or not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or call.func.id != "range"
            or len(call.args) > 2
        ):
            self._fail(node, "only `for name in range(...)`")
        f = self.f
        start = self._value(call.args[0]).value if len(call.args) == 2 else integer(64, 0)
        stop = self._number(node, self._value(call.args[-1]))
        self._assign(node.target, _Value(stop.kind, start))
        place = self._slots[node.target.id]
        test, body, step, after = (f.new_block(hint) for hint in ("test", "body", "step", "after"))
        self._start(test)
        below = "slt" if stop.kind.signed else "ult"
        f.branch_if(f.compare(below, self._load(place).value, stop.value), body, after)
        f.start(body)
        self._loops.append((step, after))
        self._block(node.body)
        self._loops.pop()
        self._start(step)
        following = f.add(self._load(place).value, integer(64, 1))
        self._store(node, place, _Value(stop.kind, following))
        f.branch(test)
        f.start(after)

    def _do_break(self, node: ast.Break) -> None:
        self.f.branch(self._loops[-1][1])

    def _do_continue(self, node: ast.Continue) -> None:
        self.f.branch(self._loops[-1][0])

    # --- places

    def _place(self, node: ast.expr) -> _Place:
        if isinstance(node, ast.Name):
            place = self._slots.get(node.id)
            if place is None:
                self._fail(node, f"{node.id} has no value")
            return place
        if isinstance(node, ast.Attribute):
            base = self._value(node.value)
            if not isinstance(base.kind, _Reference):
                self._fail(node, f"{ast.unparse(node.value)} has no fields")
            field = _fields(base.kind.struct).get(node.attr)
            if field is None:
                self._fail(node, f"{base.kind.struct.__name__} has no field {node.attr}")
            address = self.f.at(base.value, field.offset)
            # An inline field is not loaded: its address is its value.
            return _Place(("inline", field.kind) if field.inline else field.kind, address)
        if isinstance(node, ast.Subscript):
            return self._element(node, self._value(node.value), self._value(node.slice))
        return self._fail(node, "this cannot be assigned to")

    def _element(self, node: ast.AST, pointer: _Value, index: _Value) -> _Place:
        if not isinstance(pointer.kind, _Pointer):
            self._fail(node, "only pointers have elements")
        to = pointer.kind.to
        size = size_of(to.struct) if isinstance(to, _Reference) else to.bits // 8
        scaled = self.f.mul(self._number(node, index).value, integer(64, size))
        address = self.f.at(pointer.value, scaled)
        if isinstance(to, _Reference):
            return _Place(("inline", to), address)
        # Numbers may lie anywhere in a frame.
        return _Place(to, address, aligned=False)

    def _store(self, node: ast.AST, place: _Place, value: _Value) -> None:
        if isinstance(place.kind, tuple):
            self._fail(node, "a structure cannot be assigned as a whole")
        if (
            isinstance(place.kind, Int)
            and isinstance(value.kind, Int)
            and place.kind.bits == 64
            and value.literal is None
            and value.kind.bits == 64
            and value.kind.signed != place.kind.signed
        ):
            self._fail(node, "signed and unsigned are mixed")
        self._put(self._narrowed(node, value, place.kind), place)

    # --- expressions

    def _constant(self, node: ast.expr) -> int | bool | None:
        """The value of a name or attribute outside of the function."""
        try:
            found = eval(ast.unparse(node), self._globals)
        except (NameError, AttributeError):
            return None
        return found if isinstance(found, int) else None

    def _value(self, node: ast.expr) -> _Value:
        handler = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if handler is None:
            self._fail(node, f"no {type(node).__name__} in compiled code")
        value = handler(node)
        assert isinstance(value, _Value)
        return value

    def _of_constant(self, node: ast.Constant) -> _Value:
        return self._literal(node, node.value)

    def _literal(self, node: ast.AST, number: Any) -> _Value:
        if isinstance(number, bool):
            return _Value(_BOOL, TRUE if number else FALSE)
        if not isinstance(number, int):
            self._fail(node, f"{number!r} is no number")
        return _Value(_SIGNED if number < 0 else _UNSIGNED, integer(64, number), number)

    def _of_name(self, node: ast.Name) -> _Value:
        if node.id in self._slots:
            return self._load(self._slots[node.id])
        constant = self._constant(node)
        if constant is None:
            self._fail(node, f"{node.id} has no value")
        return self._literal(node, constant)

    def _of_attribute(self, node: ast.Attribute) -> _Value:
        root = node.value
        if isinstance(root, ast.Name) and root.id not in self._slots:
            constant = self._constant(node)
            if constant is None:
                self._fail(node, f"{ast.unparse(node)} has no value")
            return self._literal(node, constant)
        return self._load(self._place(node))

    def _of_subscript(self, node: ast.Subscript) -> _Value:
        return self._load(self._place(node))

    def _of_binop(self, node: ast.BinOp) -> _Value:
        return self._arithmetic(node, node.op, self._value(node.left), self._value(node.right))

    def _number(self, node: ast.AST, value: _Value) -> _Value:
        if value.kind == _BOOL:
            return _Value(_UNSIGNED, self.f.zext(value.value, 64))
        if not isinstance(value.kind, Int):
            self._fail(node, f"{value.kind} where a number is needed")
        return value

    def _agree(self, node: ast.AST, left: _Value, right: _Value) -> Int:
        if left.literal is not None and right.literal is None:
            kind = right.kind
        elif right.literal is not None or left.kind == right.kind:
            kind = left.kind
        else:
            self._fail(node, "signed and unsigned are mixed")
        assert isinstance(kind, Int)
        return kind

    def _arithmetic(self, node: ast.AST, op: ast.operator, left: _Value, right: _Value) -> _Value:
        left, right = self._number(node, left), self._number(node, right)
        kind = self._agree(node, left, right)
        if isinstance(op, ast.FloorDiv | ast.Mod):
            if kind.signed:
                self._fail(node, "no signed division")
            emit = Function.udiv if isinstance(op, ast.FloorDiv) else Function.urem
        elif isinstance(op, ast.RShift):
            emit = Function.ashr if kind.signed else Function.lshr
        elif type(op) in _ARITHMETIC:
            emit = _ARITHMETIC[type(op)]
        else:
            self._fail(node, f"no {type(op).__name__}")
        return _Value(kind, emit(self.f, left.value, right.value))

    def _of_unaryop(self, node: ast.UnaryOp) -> _Value:
        if isinstance(node.op, ast.Not):
            return _Value(_BOOL, self.f.not_(self._condition(node.operand)))
        value = self._number(node, self._value(node.operand))
        if isinstance(node.op, ast.USub):
            if value.literal is not None:
                return self._literal(node, -value.literal)
            return _Value(value.kind, self.f.sub(integer(64, 0), value.value))
        if isinstance(node.op, ast.Invert):
            return _Value(value.kind, self.f.not_(value.value))
        return self._fail(node, "unknown sign")

    def _of_compare(self, node: ast.Compare) -> _Value:
        if len(node.ops) != 1:
            self._fail(node, "one comparison at a time")
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            return self._membership(node)
        left = self._number(node, self._value(node.left))
        right = self._number(node, self._value(node.comparators[0]))
        names = _COMPARISONS.get(type(node.ops[0]))
        if names is None:
            self._fail(node, f"no {type(node.ops[0]).__name__}")
        kind = self._agree(node, left, right)
        name = names[1] if kind.signed else names[0]
        return _Value(_BOOL, self.f.compare(name, left.value, right.value))

    def _membership(self, node: ast.Compare) -> _Value:
        """`x in (a, b, c)`, where all are numbers."""
        among = node.comparators[0]
        if not isinstance(among, ast.Tuple) or not among.elts:
            self._fail(node, "membership is of a tuple")
        left = self._number(node, self._value(node.left))
        found = FALSE
        for element in among.elts:
            right = self._number(node, self._value(element))
            self._agree(node, left, right)
            found = self.f.or_(found, self.f.compare("eq", left.value, right.value))
        if isinstance(node.ops[0], ast.NotIn):
            found = self.f.not_(found)
        return _Value(_BOOL, found)

    def _condition(self, node: ast.expr) -> Value:
        value = self._value(node)
        if value.kind == _BOOL:
            return value.value
        return self.f.compare("ne", self._number(node, value).value, integer(64, 0))

    def _of_boolop(self, node: ast.BoolOp) -> _Value:
        f = self.f
        result, after = _Place(_BOOL, f.variable(1)), f.new_block("after")
        for number, operand in enumerate(node.values):
            value = self._condition(operand)
            self._put(value, result)
            if number < len(node.values) - 1:
                more = f.new_block("more")
                first, second = (more, after) if isinstance(node.op, ast.And) else (after, more)
                f.branch_if(value, first, second)
                f.start(more)
        self._start(after)
        return self._load(result)

    def _of_ifexp(self, node: ast.IfExp) -> _Value:
        f = self.f
        yes, no, after = f.new_block("then"), f.new_block("else"), f.new_block("after")
        f.branch_if(self._condition(node.test), yes, no)
        f.start(yes)
        one = self._value(node.body)
        address = f.variable(_llvm_type(one.kind))
        self._put(one.value, _Place(one.kind, address))
        f.branch(after)
        f.start(no)
        other = self._value(node.orelse)
        kind = self._agree(node, one, other) if isinstance(one.kind, Int) else one.kind
        self._put(other.value, _Place(kind, address))
        self._start(after)
        return self._load(_Place(kind, address))

    def _of_call(self, node: ast.Call) -> _Value:
        if node.keywords:
            self._fail(node, "no keyword arguments")
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("at", "array"):
            struct = eval(ast.unparse(node.func.value), self._globals)
            if not (isinstance(struct, type) and issubclass(struct, Struct)):
                self._fail(node, "at and array belong to structures")
            pointer = self._pointer(node.args[0])
            reference = _Reference(struct)
            return _Value(reference if node.func.attr == "at" else _Pointer(reference), pointer)
        if not isinstance(node.func, ast.Name):
            self._fail(node, "only names can be called")
        found = self._globals.get(node.func.id)
        if found is size_of:
            (argument,) = node.args
            return self._literal(node, size_of(eval(ast.unparse(argument), self._globals)))
        if isinstance(found, _Intrinsic):
            return found.emit(self, node)
        how = getattr(found, "__native__", None)
        if how is None:
            self._fail(node, f"{node.func.id} is not a compiled function")
        assert callable(found)
        signature = _signature(found)
        if len(node.args) != len(signature.kinds):
            self._fail(node, f"{node.func.id} takes {len(signature.kinds)} arguments")
        arguments = [
            self._narrowed(argument, self._value(argument), kind)
            for argument, kind in zip(node.args, signature.kinds, strict=True)
        ]
        callee: Value | str = found.__name__
        if how == "indirect":
            address, *arguments = arguments
            callee = self.f.pointer(address)
        elif found not in self._needed:
            self._needed.append(found)
        result = self.f.call(callee, arguments, _llvm_type(signature.result))
        return _NOTHING if signature.result is None else self._widened(signature.result, result)

    # --- for intrinsics

    def _pointer(self, node: ast.expr) -> Value:
        """An expression whose value is an address."""
        return self.f.pointer(self._number(node, self._value(node)).value)

    def _numbers(self, node: ast.Call) -> list[Value]:
        return [self._number(node, self._value(argument)).value for argument in node.args]


# --- intrinsics -------------------------------------------------------------------------------

_Emit = Callable[[_FunctionCompiler, ast.Call], _Value]


class _Intrinsic(Generic[P, T]):
    """What compiled code may call and `emit` writes; the type checker sees a function."""

    def __init__(self, emit: _Emit) -> None:
        self.emit = emit

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        raise NotImplementedError("for compiled code")


def _of_number(kind: Any) -> _Emit:
    return lambda c, node: _Value(kind, c._numbers(node)[0])


def _of_address(bits: int) -> _Emit:
    return lambda c, node: _Value(_Pointer(Int(bits, False)), c._pointer(node.args[0]))


def _address_of(c: _FunctionCompiler, node: ast.Call) -> _Value:
    value = c._value(node.args[0])
    if not isinstance(value.kind, _Pointer | _Reference):
        c._fail(node, "a number has no address")
    return _Value(_UNSIGNED, c.f.address(value.value))


def _copy(emit: Callable[[Function, Value, Value, Value], None]) -> _Emit:
    def write(c: _FunctionCompiler, node: ast.Call) -> _Value:
        to, source, size = c._numbers(node)
        emit(c.f, c.f.pointer(to), c.f.pointer(source), size)
        return _NOTHING

    return write


def _fill(c: _FunctionCompiler, node: ast.Call) -> _Value:
    to, byte, size = c._numbers(node)
    c.f.fill(c.f.pointer(to), c.f.trunc(byte, 8), size)
    return _NOTHING


def _atomic_load(c: _FunctionCompiler, node: ast.Call) -> _Value:
    place = c._place(node.args[0])
    assert isinstance(place.kind, Int)
    return c._widened(place.kind, c.f.acquire(place.kind.bits, place.address))


def _atomic_store(c: _FunctionCompiler, node: ast.Call) -> _Value:
    place = c._place(node.args[0])
    assert isinstance(place.kind, Int)
    c.f.release(c._narrowed(node, c._value(node.args[1]), place.kind), place.address)
    return _NOTHING


def _full_fence(c: _FunctionCompiler, node: ast.Call) -> _Value:
    c.f.effect("fence seq_cst")
    return _NOTHING


signed: _Intrinsic[[int], int] = _Intrinsic(_of_number(_SIGNED))
"""The same bits as a signed number."""
unsigned: _Intrinsic[[int], int] = _Intrinsic(_of_number(_UNSIGNED))
"""The same bits as an unsigned number."""
address_of: _Intrinsic[[Any], int] = _Intrinsic(_address_of)
"""The address that a pointer or reference holds."""
bytes_at: _Intrinsic[[int], Ptr[U8]] = _Intrinsic(_of_address(8))
u16_at: _Intrinsic[[int], Ptr[U16]] = _Intrinsic(_of_address(16))
u32_at: _Intrinsic[[int], Ptr[U32]] = _Intrinsic(_of_address(32))
u64_at: _Intrinsic[[int], Ptr[U64]] = _Intrinsic(_of_address(64))
copy: _Intrinsic[[int, int, int], None] = _Intrinsic(_copy(Function.copy))
"""memcpy between addresses: to, source, size."""
move: _Intrinsic[[int, int, int], None] = _Intrinsic(_copy(Function.move))
"""memmove between addresses: to, source, size."""
fill: _Intrinsic[[int, int, int], None] = _Intrinsic(_fill)
"""memset: to, byte, size."""
atomic_load: _Intrinsic[[int], int] = _Intrinsic(_atomic_load)
"""A field or element of 32 or 64 bits, with acquire order."""
atomic_store: _Intrinsic[[int, int], None] = _Intrinsic(_atomic_store)
"""A value to a field or element of 32 or 64 bits, with release order."""
full_fence: _Intrinsic[[], None] = _Intrinsic(_full_fence)
"""Everything before it is visible before everything behind it."""


# --- the library ------------------------------------------------------------------------------


def compile_into(
    module: Module, roots: Sequence[Callable[..., Any]], *, exported: bool
) -> list[Function]:
    """Add these functions to a module, and all that they call, each by its own name."""
    needed = list(roots)
    made: list[Function] = []
    for function in needed:  # which grows
        how = getattr(function, "__native__", None)
        if how == "external":
            signature = _signature(function)
            kinds = ", ".join(_llvm_type(kind) for kind in signature.kinds)
            module.declare(function.__name__, f"{_llvm_type(signature.result)} {{}}({kinds})")
        elif how == "native":
            compiler = _FunctionCompiler(module, function, needed, exported and function in roots)
            compiler.compile()
            made.append(compiler.f)
        else:
            raise NativeError(f"{function.__name__} is not a compiled function")
    return made[: len(roots)]


def module_of(roots: Sequence[Callable[..., Any]]) -> Module:
    """The IR of these functions and of all that they call."""
    module = Module()
    compile_into(module, roots, exported=True)
    return module


class Library:
    """Compiled functions. `call` is a ctypes function (the interpreter lock is released while it
    runs); `address` is for compiled code. Valid as long as the library is alive."""

    def __init__(self, *roots: Callable[..., Any]) -> None:
        names = [function.__name__ for function in roots]
        self._loaded = jit.load_made(
            sources_of(roots), lambda: module_of(roots).text, names, jit.default_cache()
        )

    def address(self, function: Callable[..., Any]) -> int:
        return self._loaded.addresses[function.__name__]

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = _signature(function)
        kinds = [_c_type(kind) for kind in signature.kinds]
        prototype = ctypes.CFUNCTYPE(_c_type(signature.result), *kinds)
        callable_ = prototype(self.address(function))
        callable_.library = self  # type: ignore[attr-defined] # keeps the code alive
        return callable_
