"""A small subset of Python, compiled to machine code with llvmlite.

Owns: the subset's types and statements, how they become LLVM IR, and the library of compiled
functions that ctypes can call (machine code and its cache are `llvm.jit`'s). Must not know:
packets, sockets, P4. The packet loop is written in
this subset, so that it reads, type-checks (mypy sees ordinary Python) and lints like the rest.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NoReturn, Self, TypeVar

from kvcast.switchsim.llvm import jit

T = TypeVar("T")
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


_mirrors: dict[type[Struct], type[ctypes.Structure]] = {}
_layouts: dict[type[Struct], dict[str, _Field]] = {}
_signatures: dict[Callable[..., Any], _Signature] = {}


def ctypes_of(struct: type[Struct]) -> type[ctypes.Structure]:
    """The ctypes mirror of a structure; pointers and references are addresses (c_uint64)."""
    mirror = _mirrors.get(struct)
    if mirror is None:
        mirror = _mirrors[struct] = _mirror(struct)
    return mirror


def _mirror(struct: type[Struct]) -> type[ctypes.Structure]:
    fields: list[tuple[str, Any]] = []
    for name, annotation in typing.get_type_hints(struct, include_extras=True).items():
        kind, count = _kind_of(annotation)
        if count is None:
            fields.append((name, _CTYPES[kind] if isinstance(kind, Int) else ctypes.c_uint64))
        else:
            assert isinstance(kind, _Pointer)
            element = (
                _CTYPES[kind.to]
                if isinstance(kind.to, Int)
                else ctypes_of(kind.to.struct)
                if isinstance(kind.to, _Reference)
                else ctypes.c_uint64
            )
            fields.append((name, element * count))
    return type(struct.__name__, (ctypes.Structure,), {"_fields_": fields})


def _fields(struct: type[Struct]) -> dict[str, _Field]:
    found = _layouts.get(struct)
    if found is not None:
        return found
    mirror = ctypes_of(struct)
    found = _layouts[struct] = {}
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


def _signature(function: Callable[..., Any]) -> _Signature:
    signature = _signatures.get(function)
    if signature is None:
        signature = _signatures[function] = _read_signature(function)
    return signature


def _read_signature(function: Callable[..., Any]) -> _Signature:
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
    text: str
    literal: int | None = None


@dataclass(frozen=True)
class _Place:
    """Somewhere a value can be stored."""

    kind: Any
    address: str


_ARITHMETIC = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and", ast.BitOr: "or",
    ast.BitXor: "xor", ast.LShift: "shl",
}  # fmt: skip
_COMPARISONS = {
    ast.Eq: ("eq", "eq"), ast.NotEq: ("ne", "ne"), ast.Lt: ("ult", "slt"), ast.LtE: ("ule", "sle"),
    ast.Gt: ("ugt", "sgt"), ast.GtE: ("uge", "sge"),
}  # fmt: skip


class _FunctionCompiler:
    """One function's IR. `needed` collects the functions that it calls."""

    def __init__(self, function: Callable[..., Any], needed: list[Callable[..., Any]]) -> None:
        self._function = function
        self._needed = needed
        self._signature = _signature(function)
        self._globals = function.__globals__
        self._slots: dict[str, _Place] = {}
        self._entry: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        self._done = False  # the current block has its terminator
        self._loops: list[tuple[str, str]] = []  # labels of continue and break
        source = textwrap.dedent(inspect.getsource(function))
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.FunctionDef)
        self._body = definition.body

    def compile(self) -> str:
        signature = self._signature
        parameters = []
        for number, (name, kind) in enumerate(zip(signature.names, signature.kinds, strict=True)):
            parameters.append(f"{_llvm_type(kind)} %p{number}")
            value = self._widened(kind, f"%p{number}")
            self._emit(
                f"store {_llvm_type(value.kind)} {value.text}, ptr {self._slot(name, value.kind)}"
            )
        self._block(self._body)
        if not self._done:
            if signature.result is not None:
                self._fail(self._body[-1], "the function can end without a result")
            self._emit("ret void")
        head = f"define {_llvm_type(signature.result)} @{self._function.__name__}"
        text = [f"{head}({', '.join(parameters)}) nounwind {{", "entry:"]
        return "\n".join([*text, *self._entry, *self._lines, "}"])

    # --- pieces of text

    def _name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def _label(self) -> str:
        self._count += 1
        return f"b{self._count}"

    def _emit(self, line: str) -> None:
        if self._done:  # unreachable code still needs a block
            self._start(self._label())
        self._lines.append("  " + line)

    def _set(self, line: str) -> str:
        name = self._name()
        self._emit(f"{name} = {line}")
        return name

    def _start(self, label: str) -> None:
        if not self._done:
            self._lines.append(f"  br label %{label}")
        self._lines.append(f"{label}:")
        self._done = False

    def _jump(self, label: str) -> None:
        if not self._done:
            self._emit(f"br label %{label}")
            self._done = True

    def _branch(self, condition: _Value, yes: str, no: str) -> None:
        self._emit(f"br i1 {condition.text}, label %{yes}, label %{no}")
        self._done = True

    def _fail(self, node: ast.AST, why: str) -> NoReturn:
        first = self._function.__code__.co_firstlineno
        line = first + getattr(node, "lineno", 1) - 1
        raise NativeError(f"{self._function.__module__}:{line}: {self._function.__name__}: {why}")

    def _slot(self, name: str, kind: Any) -> str:
        place = self._slots.get(name)
        if place is None:
            address = f"%{name}.slot"
            self._entry.append(f"  {address} = alloca {_llvm_type(kind)}")
            place = self._slots[name] = _Place(kind, address)
        return place.address

    def _widened(self, kind: Any, text: str) -> _Value:
        """A parameter, field or result as compiled code calculates with it."""
        if not isinstance(kind, Int) or kind == _BOOL:
            return _Value(kind, text)
        wide = Int(64, kind.signed)
        if kind.bits < 64:
            text = self._set(f"{'sext' if kind.signed else 'zext'} i{kind.bits} {text} to i64")
        return _Value(wide, text)

    def _narrowed(self, node: ast.AST, value: _Value, kind: Any) -> str:
        """The value as text of exactly that type."""
        if isinstance(kind, Int) and kind.bits > 1:
            value = self._number(node, value)
            if kind.bits < 64:
                if value.literal is not None:
                    return str(value.literal & ((1 << kind.bits) - 1))
                return self._set(f"trunc i64 {value.text} to i{kind.bits}")
            return value.text
        if value.kind != kind:
            self._fail(node, f"{value.kind} where {kind} is needed")
        return value.text

    # --- statements

    def _block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            handler = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
            if handler is None:
                self._fail(statement, f"no {type(statement).__name__} in compiled code")
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
        value = self._value(node.value)
        text = self._narrowed(node, value, kind)
        address = self._slot(node.target.id, kind)
        self._emit(f"store {_llvm_type(kind)} {text}, ptr {address}")

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
            self._emit("ret void")
        else:
            text = self._narrowed(node, self._value(node.value), kind)
            self._emit(f"ret {_llvm_type(kind)} {text}")
        self._done = True

    def _do_if(self, node: ast.If) -> None:
        yes, no, after = self._label(), self._label(), self._label()
        self._branch(self._condition(node.test), yes, no if node.orelse else after)
        self._start(yes)
        self._block(node.body)
        self._jump(after)
        if node.orelse:
            self._start(no)
            self._block(node.orelse)
            self._jump(after)
        self._go_on(after)

    def _do_while(self, node: ast.While) -> None:
        if node.orelse:
            self._fail(node, "no else of a loop")
        test, body, after = self._label(), self._label(), self._label()
        self._jump(test)
        self._start(test)
        endless = isinstance(node.test, ast.Constant) and node.test.value is True
        if not endless:
            self._branch(self._condition(node.test), body, after)
            self._start(body)
        self._loops.append((test, after))
        self._block(node.body)
        self._loops.pop()
        self._jump(test)
        self._go_on(after)

    def _go_on(self, after: str) -> None:
        """Behind a statement with ways that may all have returned: then nothing comes here."""
        self._start(after)
        if not any(f"label %{after}" in line for line in self._lines):
            self._emit("unreachable")
            self._done = True

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
        start = self._value(call.args[0]) if len(call.args) == 2 else _Value(_UNSIGNED, "0", 0)
        stop = self._number(node, self._value(call.args[-1]))
        self._assign(node.target, _Value(stop.kind, start.text))
        place = self._slots[node.target.id]
        test, body, step, after = (self._label() for _ in range(4))
        self._jump(test)
        self._start(test)
        now = self._load(place)
        below = "slt" if stop.kind.signed else "ult"
        self._branch(
            _Value(_BOOL, self._set(f"icmp {below} i64 {now.text}, {stop.text}")), body, after
        )
        self._start(body)
        self._loops.append((step, after))
        self._block(node.body)
        self._loops.pop()
        self._jump(step)
        self._start(step)
        now = self._load(place)
        self._store(node, place, _Value(stop.kind, self._set(f"add i64 {now.text}, 1")))
        self._jump(test)
        self._start(after)

    def _do_break(self, node: ast.Break) -> None:
        self._jump(self._loops[-1][1])

    def _do_continue(self, node: ast.Continue) -> None:
        self._jump(self._loops[-1][0])

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
            address = self._set(f"getelementptr inbounds i8, ptr {base.text}, i64 {field.offset}")
            # An inline field is not loaded: its address is its value.
            return _Place(("inline", field.kind) if field.inline else field.kind, address)
        if isinstance(node, ast.Subscript):
            return self._element(node, self._value(node.value), self._value(node.slice))
        return self._fail(node, "this cannot be assigned to")

    def _element(self, node: ast.AST, pointer: _Value, index: _Value) -> _Place:
        if not isinstance(pointer.kind, _Pointer):
            self._fail(node, "only pointers have elements")
        to = pointer.kind.to
        if isinstance(to, _Reference):
            mirror_size = size_of(to.struct)
            scaled = self._set(f"mul i64 {self._number(node, index).text}, {mirror_size}")
            address = self._set(f"getelementptr inbounds i8, ptr {pointer.text}, i64 {scaled}")
            return _Place(("inline", to), address)
        assert isinstance(to, Int)
        address = self._set(
            f"getelementptr inbounds i{to.bits}, ptr {pointer.text}, "
            f"i64 {self._number(node, index).text}"
        )
        return _Place(to, address)

    def _load(self, place: _Place) -> _Value:
        if isinstance(place.kind, tuple):
            return _Value(place.kind[1], place.address)
        text = self._set(f"load {_llvm_type(place.kind)}, ptr {place.address}")
        return self._widened(place.kind, text)

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
        text = self._narrowed(node, value, place.kind)
        self._emit(f"store {_llvm_type(place.kind)} {text}, ptr {place.address}")

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
            return _Value(_BOOL, "true" if number else "false")
        if not isinstance(number, int):
            self._fail(node, f"{number!r} is no number")
        kind = _SIGNED if number < 0 else _UNSIGNED
        return _Value(kind, str(number), number)

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
            return _Value(_UNSIGNED, self._set(f"zext i1 {value.text} to i64"))
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
            name = "udiv" if isinstance(op, ast.FloorDiv) else "urem"
        elif isinstance(op, ast.RShift):
            name = "ashr" if kind.signed else "lshr"
        elif type(op) in _ARITHMETIC:
            name = _ARITHMETIC[type(op)]
        else:
            self._fail(node, f"no {type(op).__name__}")
        return _Value(kind, self._set(f"{name} i64 {left.text}, {right.text}"))

    def _of_unaryop(self, node: ast.UnaryOp) -> _Value:
        if isinstance(node.op, ast.Not):
            value = self._condition(node.operand)
            return _Value(_BOOL, self._set(f"xor i1 {value.text}, true"))
        value = self._number(node, self._value(node.operand))
        if isinstance(node.op, ast.USub):
            if value.literal is not None:
                return self._literal(node, -value.literal)
            return _Value(value.kind, self._set(f"sub i64 0, {value.text}"))
        if isinstance(node.op, ast.Invert):
            return _Value(value.kind, self._set(f"xor i64 {value.text}, -1"))
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
        return _Value(_BOOL, self._set(f"icmp {name} i64 {left.text}, {right.text}"))

    def _membership(self, node: ast.Compare) -> _Value:
        """`x in (a, b, c)`, where all are numbers."""
        among = node.comparators[0]
        if not isinstance(among, ast.Tuple) or not among.elts:
            self._fail(node, "membership is of a tuple")
        left = self._number(node, self._value(node.left))
        found = "false"
        for element in among.elts:
            right = self._number(node, self._value(element))
            self._agree(node, left, right)
            same = self._set(f"icmp eq i64 {left.text}, {right.text}")
            found = self._set(f"or i1 {found}, {same}")
        if isinstance(node.ops[0], ast.NotIn):
            found = self._set(f"xor i1 {found}, true")
        return _Value(_BOOL, found)

    def _condition(self, node: ast.expr) -> _Value:
        value = self._value(node)
        if value.kind == _BOOL:
            return value
        number = self._number(node, value)
        return _Value(_BOOL, self._set(f"icmp ne i64 {number.text}, 0"))

    def _of_boolop(self, node: ast.BoolOp) -> _Value:
        slot = f"%c{self._label()}.slot"
        self._entry.append(f"  {slot} = alloca i1")
        after = self._label()
        for number, operand in enumerate(node.values):
            value = self._condition(operand)
            self._emit(f"store i1 {value.text}, ptr {slot}")
            if number < len(node.values) - 1:
                more = self._label()
                first, second = (more, after) if isinstance(node.op, ast.And) else (after, more)
                self._branch(value, first, second)
                self._start(more)
        self._jump(after)
        self._start(after)
        return _Value(_BOOL, self._set(f"load i1, ptr {slot}"))

    def _of_ifexp(self, node: ast.IfExp) -> _Value:
        yes, no, after = self._label(), self._label(), self._label()
        self._branch(self._condition(node.test), yes, no)
        self._start(yes)
        one = self._value(node.body)
        slot = f"%c{self._label()}.slot"
        self._entry.append(f"  {slot} = alloca {_llvm_type(one.kind)}")
        self._emit(f"store {_llvm_type(one.kind)} {one.text}, ptr {slot}")
        self._jump(after)
        self._start(no)
        other = self._value(node.orelse)
        kind = self._agree(node, one, other) if isinstance(one.kind, Int) else one.kind
        self._emit(f"store {_llvm_type(kind)} {other.text}, ptr {slot}")
        self._jump(after)
        self._start(after)
        return _Value(kind, self._set(f"load {_llvm_type(kind)}, ptr {slot}"))

    def _of_call(self, node: ast.Call) -> _Value:
        if node.keywords:
            self._fail(node, "no keyword arguments")
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("at", "array"):
            struct = eval(ast.unparse(node.func.value), self._globals)
            if not (isinstance(struct, type) and issubclass(struct, Struct)):
                self._fail(node, "at and array belong to structures")
            address = self._number(node, self._value(node.args[0]))
            text = self._set(f"inttoptr i64 {address.text} to ptr")
            reference = _Reference(struct)
            return _Value(reference if node.func.attr == "at" else _Pointer(reference), text)
        if not isinstance(node.func, ast.Name):
            self._fail(node, "only names can be called")
        found = self._globals.get(node.func.id)
        if found is size_of:
            (argument,) = node.args
            return self._literal(node, size_of(eval(ast.unparse(argument), self._globals)))
        intrinsic = _INTRINSICS.get(found) if callable(found) else None
        if intrinsic is not None:
            return intrinsic(self, node)
        how = getattr(found, "__native__", None)
        if how is None:
            self._fail(node, f"{node.func.id} is not a compiled function")
        assert callable(found)
        signature = _signature(found)
        if len(node.args) != len(signature.kinds):
            self._fail(node, f"{node.func.id} takes {len(signature.kinds)} arguments")
        arguments = []
        for argument, kind in zip(node.args, signature.kinds, strict=True):
            value = self._value(argument)
            arguments.append((_llvm_type(kind), self._narrowed(argument, value, kind)))
        if how == "indirect":
            (_, target), *arguments = arguments
            callee = self._set(f"inttoptr i64 {target} to ptr")
        else:
            callee = f"@{found.__name__}"
            if found not in self._needed:
                self._needed.append(found)
        given = ", ".join(f"{kind} {text}" for kind, text in arguments)
        line = f"call {_llvm_type(signature.result)} {callee}({given})"
        if signature.result is None:
            self._emit(line)
            return _Value(None, "")
        return self._widened(signature.result, self._set(line))


# --- intrinsics -------------------------------------------------------------------------------

_INTRINSICS: dict[Any, Callable[[_FunctionCompiler, ast.Call], _Value]] = {}


def _intrinsic(function: F) -> Callable[[Callable[[_FunctionCompiler, ast.Call], _Value]], F]:
    def register(emit: Callable[[_FunctionCompiler, ast.Call], _Value]) -> F:
        _INTRINSICS[function] = emit
        return function

    return register


def signed(value: int) -> int:
    """The same bits as a signed number."""
    raise NotImplementedError


def unsigned(value: int) -> int:
    """The same bits as an unsigned number."""
    raise NotImplementedError


def address_of(place: Any) -> int:
    """The address that a pointer or reference holds."""
    raise NotImplementedError


def bytes_at(address: int) -> Ptr[U8]:
    raise NotImplementedError


def u16_at(address: int) -> Ptr[U16]:
    raise NotImplementedError


def u32_at(address: int) -> Ptr[U32]:
    raise NotImplementedError


def u64_at(address: int) -> Ptr[U64]:
    raise NotImplementedError


def copy(to: int, source: int, size: int) -> None:
    """memcpy between addresses."""
    raise NotImplementedError


def move(to: int, source: int, size: int) -> None:
    """memmove between addresses."""
    raise NotImplementedError


def fill(to: int, byte: int, size: int) -> None:
    """memset."""
    raise NotImplementedError


def atomic_load(place: int) -> int:
    """A field or element of 32 or 64 bits, with acquire order."""
    raise NotImplementedError


def atomic_store(place: int, value: int) -> None:
    """To a field or element of 32 or 64 bits, with release order."""
    raise NotImplementedError


def full_fence() -> None:
    """Everything before it is visible before everything behind it."""
    raise NotImplementedError


def high_product(left: int, right: int) -> int:
    """The upper 64 bits of the 128-bit product."""
    raise NotImplementedError


@_intrinsic(signed)
def _(c: _FunctionCompiler, node: ast.Call) -> _Value:
    value = c._number(node, c._value(node.args[0]))
    return _Value(_SIGNED, value.text)


@_intrinsic(unsigned)
def _(c: _FunctionCompiler, node: ast.Call) -> _Value:
    value = c._number(node, c._value(node.args[0]))
    return _Value(_UNSIGNED, value.text)


@_intrinsic(address_of)
def _(c: _FunctionCompiler, node: ast.Call) -> _Value:
    value = c._value(node.args[0])
    if not isinstance(value.kind, _Pointer | _Reference):
        c._fail(node, "a number has no address")
    return _Value(_UNSIGNED, c._set(f"ptrtoint ptr {value.text} to i64"))


def _pointer_intrinsic(function: Callable[..., Any], bits: int) -> None:
    def emit(c: _FunctionCompiler, node: ast.Call) -> _Value:
        value = c._number(node, c._value(node.args[0]))
        text = c._set(f"inttoptr i64 {value.text} to ptr")
        return _Value(_Pointer(Int(bits, False)), text)

    _INTRINSICS[function] = emit


_pointer_intrinsic(bytes_at, 8)
_pointer_intrinsic(u16_at, 16)
_pointer_intrinsic(u32_at, 32)
_pointer_intrinsic(u64_at, 64)


def _memory_intrinsic(function: Callable[..., Any], name: str) -> None:
    def emit(c: _FunctionCompiler, node: ast.Call) -> _Value:
        to, source, size = (c._number(node, c._value(a)) for a in node.args)
        destination = c._set(f"inttoptr i64 {to.text} to ptr")
        if name == "memset":
            second = "i8 " + c._narrowed(node, source, Int(8, False))
            c._emit(
                f"call void @llvm.memset.p0.i64(ptr {destination}, {second}, i64 {size.text}, "
                "i1 false)"
            )
        else:
            origin = c._set(f"inttoptr i64 {source.text} to ptr")
            c._emit(
                f"call void @llvm.{name}.p0.p0.i64(ptr {destination}, ptr {origin}, "
                f"i64 {size.text}, i1 false)"
            )
        return _Value(None, "")

    _INTRINSICS[function] = emit


_memory_intrinsic(copy, "memcpy")
_memory_intrinsic(move, "memmove")
_memory_intrinsic(fill, "memset")


@_intrinsic(atomic_load)
def _(c: _FunctionCompiler, node: ast.Call) -> _Value:
    place = c._place(node.args[0])
    assert isinstance(place.kind, Int)
    size = place.kind.bits // 8
    text = c._set(f"load atomic i{place.kind.bits}, ptr {place.address} acquire, align {size}")
    return c._widened(place.kind, text)


@_intrinsic(atomic_store)
def _(c: _FunctionCompiler, node: ast.Call) -> _Value:
    place = c._place(node.args[0])
    assert isinstance(place.kind, Int)
    text = c._narrowed(node, c._value(node.args[1]), place.kind)
    bits = place.kind.bits
    c._emit(f"store atomic i{bits} {text}, ptr {place.address} release, align {bits // 8}")
    return _Value(None, "")


@_intrinsic(full_fence)
def _(c: _FunctionCompiler, node: ast.Call) -> _Value:
    c._emit("fence seq_cst")
    return _Value(None, "")


@_intrinsic(high_product)
def _(c: _FunctionCompiler, node: ast.Call) -> _Value:
    left, right = (c._number(node, c._value(a)).text for a in node.args)
    wide = [c._set(f"zext i64 {text} to i128") for text in (left, right)]
    product = c._set(f"mul i128 {wide[0]}, {wide[1]}")
    high = c._set(f"lshr i128 {product}, 64")
    return _Value(_UNSIGNED, c._set(f"trunc i128 {high} to i64"))


# --- the library ------------------------------------------------------------------------------

_DECLARATIONS = """\
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
"""


def assembly_of(roots: Iterable[Callable[..., Any]]) -> str:
    """The LLVM IR of these functions and of all that they call."""
    exported = list(roots)
    needed = list(exported)
    parts = []
    at = 0
    while at < len(needed):
        function = needed[at]
        at += 1
        how = getattr(function, "__native__", None)
        if how == "external":
            signature = _signature(function)
            kinds = ", ".join(_llvm_type(kind) for kind in signature.kinds)
            parts.append(f"declare {_llvm_type(signature.result)} @{function.__name__}({kinds})")
        elif how == "native":
            text = _FunctionCompiler(function, needed).compile()
            if function not in exported:
                text = text.replace("define ", "define internal ", 1)
            parts.append(text)
        else:
            raise NativeError(f"{function.__name__} is not a compiled function")
    return "\n".join([_DECLARATIONS, *parts])


def _c_type(kind: Any) -> Any:
    if kind is None:
        return None
    if kind == _BOOL:
        return ctypes.c_bool
    return _CTYPES[kind] if isinstance(kind, Int) else ctypes.c_uint64


class Library:
    """Compiled functions. `call` is a ctypes function (the interpreter lock is released while it
    runs); `address` is for compiled code. Valid as long as the library is alive."""

    def __init__(self, *roots: Callable[..., Any]) -> None:
        self.assembly = assembly_of(roots)
        names = [function.__name__ for function in roots]
        self._loaded = jit.load(self.assembly, self._text, names, jit.default_cache())

    def _text(self, triple: str, layout: str) -> str:
        return f'target triple = "{triple}"\ntarget datalayout = "{layout}"\n{self.assembly}'

    def address(self, function: Callable[..., Any]) -> int:
        return self._loaded.addresses[function.__name__]

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = _signature(function)
        kinds = [_c_type(kind) for kind in signature.kinds]
        prototype = ctypes.CFUNCTYPE(_c_type(signature.result), *kinds)
        callable_ = prototype(self.address(function))
        callable_.library = self  # type: ignore[attr-defined] # keeps the code alive
        return callable_
