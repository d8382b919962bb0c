"""Statements and actions to IR: the primitives of v1model.

The counterpart of `reference.actions`: what each statement does to a packet and to the externs.
What the switch does about a clone, a digest or a drop comes after the pipeline (`llvm.traffic`);
here such a statement only leaves its request in a packet register. A target that is only known at
run time (an element of a stack) becomes a switch over all that it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvcast.native.writer import NULL, Block, Value, integer
from kvcast.switchsim import ir
from kvcast.switchsim.ir import UnsupportedConstruct
from kvcast.switchsim.llvm.expressions import Expressions, Numbered
from kvcast.switchsim.llvm.externs import Runtime
from kvcast.switchsim.llvm.hashes import SPARE_BYTES, Hashes, Packer
from kvcast.switchsim.llvm.layout import (
    NATIVE_BITS,
    REG_CLONE_LIST,
    REG_CLONE_SESSION,
    REG_EXIT,
    REG_INGRESS_LENGTH,
    REG_LEARN_LIST,
    REG_PACKET_LENGTH,
    REG_RECIRCULATE_LIST,
    REG_RESUBMIT_LIST,
    REG_TRUNCATE,
    Place,
    stored_bytes,
)
from kvcast.switchsim.llvm.log import write_message
from kvcast.switchsim.llvm.scope import Number, Scope, round_bits
from kvcast.switchsim.semantics import CLONE_REQUESTED, MAX_STEPS, SESSION_MASK


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What is made once for a module: hash algorithms and helpers."""

    hashes: Hashes
    runtime: Runtime


class Actions:
    """Compiles statements in a scope; `abandon` is where a packet goes that fails an assert."""

    def __init__(self, scope: Scope, tools: Toolbox, abandon: Block) -> None:
        self.scope = scope
        self.f = scope.f
        self.layout = scope.layout
        self.program = scope.program
        self.tools = tools
        self.abandon = abandon
        self.expressions = Expressions(scope)

    # --- whole actions ----------------------------------------------------------------------

    def body(self, statements: Sequence[ir.Statement]) -> None:
        jumps = [
            (n, s.target)
            for n, s in enumerate(statements)
            if isinstance(s, (ir.Jump, ir.JumpIfZero))
        ]
        if not jumps:
            for s in statements:
                self.statement(s)
            return
        f = self.f
        blocks = [f.new_block("step") for _ in range(len(statements) + 1)]
        fuel: Value | None = None
        if any(target <= n for n, target in jumps):
            fuel = f.variable(32)
            f.store(integer(32, MAX_STEPS), fuel, 4)
        f.branch(blocks[0])
        for n, s in enumerate(statements):
            f.start(blocks[n])
            self._burn(fuel, 1)
            if isinstance(s, ir.Jump):
                f.branch(blocks[s.target])
            elif isinstance(s, ir.JumpIfZero):
                number = self.expressions.exact(s.condition)
                zero = f.compare("eq", number.value, integer(number.value.bits, 0))
                f.branch_if(zero, blocks[s.target], blocks[n + 1])
            else:
                self.statement(s)
                f.branch(blocks[n + 1])
        f.start(blocks[-1])
        self._burn(fuel, 0)

    def _burn(self, fuel: Value | None, amount: int) -> None:
        """Abandon the packet when the steps are used up."""
        if fuel is None:
            return
        f = self.f
        left = f.load(32, fuel, 4)
        f.leave_if(f.compare("eq", left, integer(32, 0)), self.abandon)
        if amount:
            f.store(f.sub(left, integer(32, amount)), fuel, 4)

    # --- statements -------------------------------------------------------------------------

    def statement(self, s: ir.Statement) -> None:
        f, low = self.f, self.expressions.modulo
        match s:
            case ir.Assign(target, value):
                self.assign(target, value)
            case ir.AssignVarbit(target, source):
                self.assign_varbit(target, source)
            case ir.AssignHeader(target_h, source_h):
                self._assign_header(target_h, source_h)
            case ir.AssignUnion(target_u, source_u):
                self._assign_union(target_u, source_u)
            case ir.AssignStack(target_s, source_s):
                self._assign_stack(target_s, source_s)
            case ir.Push(stack, count):
                self._shift(stack, count, push=True)
            case ir.Pop(stack, count):
                self._shift(stack, count, push=False)
            case ir.AddHeader(header):
                self._each_header(header, self._add_header)
            case ir.RemoveHeader(header):
                self._each_header(header, self._remove_header)
            case ir.Exit():
                self.scope.set_register(REG_EXIT, integer(32, 1))
            case ir.Check(_, condition):
                number = self.expressions.exact(condition)
                failed = f.compare("eq", number.value, integer(number.value.bits, 0))
                f.leave_if(failed, self.abandon)
            case ir.LogMessage():
                write_message(self.expressions, s)
            case ir.MarkToDrop(egress_spec, mcast_grp):
                place = self.layout.place(egress_spec)
                port = integer(place.container, self.scope.shared.drop_port)
                self.scope.store_field(place, port)
                if mcast_grp is not None:
                    self.scope.store_field(self.layout.place(mcast_grp), integer(16, 0))
            case ir.Clone(session, field_list):
                number16 = f.and_(low(session, 32), integer(32, SESSION_MASK))
                request = f.or_(number16, integer(32, CLONE_REQUESTED))
                self.scope.set_register(REG_CLONE_SESSION, request)
                self._request(REG_CLONE_LIST, field_list)
            case ir.Resubmit(field_list):
                self._request(REG_RESUBMIT_LIST, field_list)
            case ir.Recirculate(field_list):
                self._request(REG_RECIRCULATE_LIST, field_list)
            case ir.GenerateDigest(learn_list):
                self._request(REG_LEARN_LIST, learn_list)
            case ir.Hash():
                self._hash(s)
            case ir.ExecuteMeter(array, index, target):
                self._execute_meter(array, index, target)
            case ir.Count(array, index):
                self._count(array, index)
            case ir.RegisterRead(target, array, index):
                self._register_read(target, array, index)
            case ir.RegisterWrite(array, index, value):
                self._register_write(array, index, value)
            case ir.Random(target, low_end, high_end):
                self._random(target, low(low_end, 64), low(high_end, 64))
            case ir.Truncate(length):
                limit = self.scope.register(REG_TRUNCATE)
                wanted = low(length, 64)
                shorter = f.compare("ult", wanted, limit)
                self.scope.set_register(REG_TRUNCATE, f.select(shorter, wanted, limit))
            case ir.NoOp():
                pass
            case ir.Jump() | ir.JumpIfZero():
                raise AssertionError("jumps belong to whole actions")

    def _request(self, register: int, value: ir.DataExpr) -> None:
        number = self.f.zext(self.expressions.modulo(value, 16), 32)
        self.scope.set_register(register, number)

    # --- assignment -------------------------------------------------------------------------

    def assign(self, target: ir.LValue, value: ir.DataExpr) -> None:
        places = self._places(target)
        if isinstance(places, Place):
            self._assign_place(places, value)
            return
        selector, cases = places
        width = cases[0][1].width if cases else 1
        if any(place.width != width for _, place in cases):
            raise UnsupportedConstruct("elements of different types in a stack", "an assignment")
        number = self.expressions.low(value, max(1, width))
        self._store_one_of(selector, cases, number)

    def _assign_place(self, place: Place, value: ir.DataExpr) -> None:
        if place.varbit:
            raise UnsupportedConstruct("assignment to a variable-length field", "an assignment")
        if place.width > NATIVE_BITS:
            source = self.expressions.bytes(value)
            size = (place.bit + place.width) // 8
            if source is not None and source.width <= place.width and not place.signed:
                whole = place.whole_bytes or place.offset < self.layout.metadata_end
                if whole:
                    to = self.scope.slot(place.offset)
                    self.f.fill(to, 0, size - source.bytes)
                    self.f.copy(self.f.at(to, size - source.bytes), source.pointer, source.bytes)
                    return
        if place.width:
            self.scope.store_field(place, self.expressions.low(value, place.width))

    def _places(self, target: ir.LValue) -> Place | tuple[Value, list[tuple[int, Place]]]:
        """Where the target is, or a value and the place for each number that it can be."""
        match target:
            case ir.FieldRef():
                return self.layout.place(target)
            case ir.LastField(stack, headers, field):
                return self.expressions.next_index(stack), [
                    (number + 1, self.layout.places[h][field]) for number, h in enumerate(headers)
                ]
            case ir.ElementField(header, field):
                number, candidates = self.expressions.header(header)
                if isinstance(number, int):
                    if number < 0:
                        return integer(32, -1), []
                    return self.layout.places[number][field]
                return number, [(h, self.layout.places[h][field]) for h in candidates]

    def _store_one_of(
        self, selector: Value, cases: Sequence[tuple[int, Place]], value: Value
    ) -> None:
        for place in self.f.cases(selector, cases):
            self.scope.store_field(place, value)

    def store(self, target: ir.LValue, number: Number) -> None:
        """Store a number, cut to the width of the field."""
        places = self._places(target)
        if isinstance(places, Place):
            if places.width:
                bits = max(number.value.bits, round_bits(places.width))
                self.scope.store_field(places, self.expressions.extend(number, bits))
            return
        selector, cases = places
        width = max([place.width for _, place in cases], default=1)
        bits = max(number.value.bits, round_bits(max(1, width)))
        self._store_one_of(selector, cases, self.expressions.extend(number, bits))

    def assign_varbit(self, target: ir.FieldRef, source: ir.FieldRef) -> None:
        f, scope, layout = self.f, self.scope, self.layout
        to, from_ = layout.place(target), layout.place(source)
        if to.width < from_.width:
            raise UnsupportedConstruct("variable-length fields of different maxima", "assign_VL")
        assert to.length is not None
        assert from_.length is not None
        f.copy(scope.slot(to.length), scope.slot(from_.length), 4)
        f.copy(scope.slot(to.offset), scope.slot(from_.offset), scope.varbit_bytes(from_))

    # --- headers ----------------------------------------------------------------------------

    def set_valid(self, header: int) -> None:
        for sibling in self.layout.siblings[header]:
            self.f.store(integer(8, 0), self.scope.slot(sibling))
        self.scope.set_valid(header, True)

    def _each_header(self, header: ir.HeaderExpr, run: Callable[[int], None]) -> None:
        self._each(self.expressions.header(header), run)

    def _each(self, which: Numbered, run: Callable[[int], None]) -> None:
        """Run for what the number says, if it is known only later for each candidate."""
        number, candidates = which
        if isinstance(number, int):
            if number >= 0:
                run(number)
            return
        for candidate in self.f.cases(number, zip(candidates, candidates, strict=True)):
            run(candidate)

    def _move(self, to: int, from_: int) -> None:
        """Copy all of a header: validity, fields, length."""
        f, scope, layout = self.f, self.scope, self.layout
        self._check_types(to, from_)
        start, size = layout.block[to]
        f.copy(scope.slot(start), scope.slot(layout.block[from_][0]), size)
        to_length, from_length = layout.varbit_length[to], layout.varbit_length[from_]
        if to_length is not None and from_length is not None:
            f.copy(scope.slot(to_length), scope.slot(from_length), 4)
        f.copy(scope.slot(layout.valid[to]), scope.slot(layout.valid[from_]), 1)

    def _check_types(self, to: int, from_: int) -> None:
        a, b = self.program.headers[to], self.program.headers[from_]
        if [(f.width, f.varbit) for f in a.fields] != [(f.width, f.varbit) for f in b.fields]:
            raise UnsupportedConstruct(
                f"copy of a header of type {b.type_name} to one of type {a.type_name}", "an action"
            )
        if a.metadata != b.metadata:
            raise UnsupportedConstruct("copy between metadata and a header", "an action")

    def _copy_header(self, to: int, from_: int) -> None:
        f, scope = self.f, self.scope
        self._check_types(to, from_)
        if to == from_:
            return
        if self.program.headers[from_].metadata:
            start, size = self.layout.block[to]
            f.copy(scope.slot(start), scope.slot(self.layout.block[from_][0]), size)
            return
        valid, invalid, after = f.new_block("valid"), f.new_block("invalid"), f.new_block("copied")
        f.branch_if(scope.is_valid(from_), valid, invalid)
        f.start(valid)
        for sibling in self.layout.siblings[to]:
            f.store(integer(8, 0), scope.slot(sibling))
        # A sibling may be the source: what is copied then is its cleared validity, as elsewhere.
        self._move(to, from_)
        f.branch(after)
        f.start(invalid)
        scope.set_valid(to, False)
        f.branch(after)
        f.start(after)

    def _assign_header(self, target: ir.HeaderExpr, source: ir.HeaderExpr) -> None:
        def to(h: int) -> None:
            number, candidates = self.expressions.header(source)
            if isinstance(number, int):
                if number >= 0:
                    self._copy_header(h, number)
                elif not self.program.headers[h].metadata:
                    self.scope.set_valid(h, False)
                return
            for g in self.f.cases(number, [(g, g) for g in (*candidates, -1)]):
                if g >= 0:
                    self._copy_header(h, g)
                else:
                    self.scope.set_valid(h, False)

        self._each_header(target, to)

    def _assign_union(self, target: ir.UnionExpr, source: ir.UnionExpr) -> None:
        unions = self.program.unions

        def copy(u: int, v: int) -> None:
            for h, g in zip(unions[u].headers, unions[v].headers, strict=False):
                self._copy_header(h, g)

        to, from_ = self.expressions.union(target), self.expressions.union(source)
        self._each(to, lambda u: self._each(from_, partial(copy, u)))

    def _assign_stack(self, target: ir.StackExpr, source: ir.StackExpr) -> None:
        f = self.f
        to, from_ = self.program.stack_elements(target), self.program.stack_elements(source)
        following = self.expressions.next_index(source)
        limit = integer(32, len(to))
        following = f.select(f.compare("ult", following, limit), following, limit)
        f.store(following, self.scope.slot(self.layout.stack_next[target]), 4)
        for element, other in zip(to, from_, strict=False):
            for h, g in zip(element, other, strict=False):
                self._copy_header(h, g)

    def _shift(self, stack: ir.StackExpr, count: ir.DataExpr, *, push: bool) -> None:
        """push_front or pop_front of P4_16: elements move, those that come in are invalid."""
        f, scope = self.f, self.scope
        blocks = self.program.stack_elements(stack)
        size = len(blocks)
        next_pointer = scope.slot(self.layout.stack_next[stack])

        def move(to: int, from_: int) -> None:
            for h, g in zip(blocks[to], blocks[from_], strict=True):
                if h != g:
                    self._move(h, g)

        def clear(element: int) -> None:
            for h in blocks[element]:
                scope.set_valid(h, False)

        def shift(n: int) -> None:
            now = f.load(32, next_pointer, 4)
            if push:
                moved = f.add(now, integer(32, n))
                good = f.compare("ult", moved, integer(32, size))
                f.store(f.select(good, moved, integer(32, size)), next_pointer, 4)
                for element in range(size - 1, n - 1, -1):
                    move(element, element - n)
                for element in range(n):
                    clear(element)
            else:
                good = f.compare("ugt", now, integer(32, n))
                moved = f.select(good, f.sub(now, integer(32, n)), integer(32, 0))
                f.store(moved, next_pointer, 4)
                for element in range(size - n):
                    move(element, element + n)
                for element in range(size - n, size):
                    clear(element)

        number = self.expressions.exact(count)
        if number.low == number.high:
            shift(max(0, min(number.low, size)))
            return
        # Beyond the size it is the size, below 0 it is 0.
        bits = max(number.value.bits, 16)
        value = self.expressions.extend(number, bits)
        large = f.compare(
            "sgt" if number.low < 0 else "ugt", value, integer(bits, min(size, 32767))
        )
        value = f.select(large, integer(bits, size), value)
        if number.low < 0:
            value = f.select(f.compare("slt", value, integer(bits, 0)), integer(bits, 0), value)
        for n in f.cases(value, [(n, n) for n in range(size + 1)]):
            shift(n)

    def _add_header(self, header: int) -> None:
        if self.program.headers[header].metadata:
            return
        f, scope, layout = self.f, self.scope, self.layout
        with f.when(f.not_(scope.is_valid(header))):
            start, size = layout.block[header]
            f.fill(scope.slot(start), 0, size)
            length = layout.varbit_length[header]
            if length is not None:
                f.store(integer(32, 0), scope.slot(length), 4)
            self.set_valid(header)
            f.increment(scope.slot(REG_PACKET_LENGTH), layout.wire_bytes(header))

    def _remove_header(self, header: int) -> None:
        if self.program.headers[header].metadata:
            raise UnsupportedConstruct("setInvalid of metadata", self.program.headers[header].name)
        f, scope = self.f, self.scope
        with f.when(scope.is_valid(header)):
            pointer = scope.slot(REG_PACKET_LENGTH)
            f.store(f.sub(f.load(64, pointer, 8), scope.header_bytes(header)), pointer, 8)
            scope.set_valid(header, False)

    # --- externs ----------------------------------------------------------------------------

    def digest(self, calculation: int, payload: tuple[Value, Value] | None = None) -> Value:
        """A calculation's hash (64 bits), over (pointer, length) of the payload too."""
        f, spec = self.f, self.program.calculations[calculation]
        packer = Packer(self.scope, spec.items)
        if payload is None:
            buffer = f.alloca(packer.max_bytes + SPARE_BYTES)
            length = packer.pack(buffer)
        else:
            # The arena has room for a frame; what is taken is given back behind the hash.
            size = f.add(payload[1], integer(64, packer.max_bytes + SPARE_BYTES))
            mark = f.load(64, self.scope.word("arena_at"), 8)
            buffer = self.tools.runtime.allocate(self.scope, size)
            f.leave_if(f.compare("eq", buffer, NULL), self.abandon)
            f.store(mark, self.scope.word("arena_at"), 8)
            length = packer.pack(buffer)
            f.copy(f.at(buffer, length), payload[0], payload[1])
            length = f.add(length, payload[1])
            f.store(integer(64, 0), f.at(buffer, length))
        state = f"calculation.{calculation}"
        return self.tools.hashes.run(self.scope, spec.algorithm, state, buffer, length)

    def _hash(self, s: ir.Hash) -> None:
        f, low = self.f, self.expressions.modulo
        size = low(s.size, 64)
        if size.const is None:
            size = f.select(f.compare("eq", size, integer(64, 0)), integer(64, 1), size)
        size = integer(64, 1) if size.const == 0 else size
        value = f.add(f.urem(self.digest(s.calculation), size), low(s.base, 64))
        self.store(s.target, Number(value, 0, (1 << 64) - 1))

    def _in_range(self, index: ir.DataExpr, size: int, run: Callable[[Value], None]) -> None:
        """Run with the index (64 bits) if it is one, else count the fault."""
        f = self.f
        if size >= 1 << 32:
            raise AssertionError("the loader bounds arrays")
        i = f.zext(self.expressions.modulo(index, 32), 64)
        good, bad, after = f.new_block("index"), f.new_block("bad"), f.new_block("indexed")
        f.branch_if(f.compare("ult", i, integer(64, size)), good, bad)
        if i.const is None or i.const >= size:
            f.start(bad)
            self.scope.count("index_out_of_range")
            f.branch(after)
        if i.const is None or i.const < size:
            f.start(good)
            run(i)
            f.branch(after)
        f.start(after)

    def _execute_meter(self, array: int, index: ir.DataExpr, target: ir.LValue) -> None:
        f, scope, spec = self.f, self.scope, self.program.meters[array]

        def execute(i: Value) -> None:
            base = f.load_pointer(scope.word(f"meter.{array}"))
            meter = f.acquire_pointer(f.at(base, f.shl(i, 3)))
            colour = self.tools.runtime.meter(scope, meter, self.metered(spec.unit))
            self.store(target, Number(colour, 0, 255))

        self._in_range(index, spec.size, execute)

    def metered(self, unit: str) -> Value:
        """What a meter counts of this packet."""
        if unit == "packets":
            return integer(64, 1)
        return self.scope.register(REG_INGRESS_LENGTH)

    def _count(self, array: int, index: ir.DataExpr) -> None:
        f, scope = self.f, self.scope

        def count(i: Value) -> None:
            base = f.load_pointer(scope.word(f"counter.{array}"))
            cell = f.at(base, f.shl(i, 4))
            f.increment(cell)
            f.increment(f.at(cell, 8), scope.register(REG_INGRESS_LENGTH))

        self._in_range(index, self.program.counters[array].size, count)

    def _register_read(self, target: ir.LValue, array: int, index: ir.DataExpr) -> None:
        spec = self.program.registers[array]

        def read(i: Value) -> None:
            place = self._places(target) if isinstance(target, ir.FieldRef) else None
            if isinstance(place, Place) and self._whole(place) and spec.width > NATIVE_BITS:
                size, have = (place.bit + place.width) // 8, stored_bytes(spec.width)
                if have <= size and spec.width <= place.width:
                    to = self.scope.slot(place.offset)
                    self.f.fill(to, 0, size - have)
                    self.f.copy(self.f.at(to, size - have), self.expressions.cell(array, i), have)
                    return
            self.store(target, self.expressions.load_cell(array, i))

        self._in_range(index, spec.size, read)

    def _whole(self, place: Place) -> bool:
        """Wide, unsigned, and alone in its bytes."""
        metadata = place.offset < self.layout.metadata_end
        return not place.native and not place.signed and (place.whole_bytes or metadata)

    def _register_write(self, array: int, index: ir.DataExpr, value: ir.DataExpr) -> None:
        f, spec = self.f, self.program.registers[array]
        width, size = spec.width, stored_bytes(spec.width)

        def write(i: Value) -> None:
            cell = self.expressions.cell(array, i)
            if width > NATIVE_BITS:
                source = self.expressions.bytes(value)
                if source is not None and source.width <= width:
                    f.fill(cell, 0, size - source.bytes)
                    f.copy(f.at(cell, size - source.bytes), source.pointer, source.bytes)
                    return
            self.scope.store_stored(self.expressions.low(value, width), cell, width)

        self._in_range(index, spec.size, write)

    def _random(self, target: ir.LValue, low: Value, high: Value) -> None:
        with self.f.when(self.f.compare("ule", low, high)):
            drawn = self.tools.runtime.random(self.scope, low, high)
            self.store(target, Number(drawn, 0, (1 << 64) - 1))
