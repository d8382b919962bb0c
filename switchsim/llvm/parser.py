"""Parser, checksums and deparser to IR: bytes to a packet, and back.

The counterpart of `reference.parser`, which says where BMv2 is departed from. The parser becomes
one function whose states are blocks; extracting a header is one copy of bytes.

    i64 parse(context, phv, frame, length)      position behind the headers, or -1: abandon
    i1 deparse.prepare(context, phv, frame, length, at)      true: abandon
    i64 deparse.size(phv), i64 deparse.emit(context, phv, to, end)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcast.native.writer import TRUE, Block, Function, Module, Value, i64, integer
from kvcast.switchsim import ir
from kvcast.switchsim.ir import UnsupportedConstruct
from kvcast.switchsim.llvm.actions import Actions, Toolbox
from kvcast.switchsim.llvm.layout import REG_CHECKSUM_ERROR, REG_PARSER_ERROR, REG_TRUNCATE
from kvcast.switchsim.llvm.scope import Number, Scope, Shared, round_bits
from kvcast.switchsim.semantics import MAX_STATES, Errors

POINTERS = [("ptr noalias", "context"), ("ptr noalias", "phv")]
FRAME = [("ptr noalias readonly", "frame"), ("i64", "length")]


class ParserWriter:
    def __init__(self, module: Module, shared: Shared, tools: Toolbox) -> None:
        self.program = shared.program
        self.shared = shared
        self.layout = shared.layout
        self.errors = Errors(self.program)
        f = module.function("parse", "i64", [*POINTERS, *FRAME])
        self.f = f
        context, phv, self.frame, self.length = f.arguments
        self.scope = Scope(shared, f, context, phv)
        self.abandon = f.new_block("abandon")
        self.actions = Actions(self.scope, tools, self.abandon)
        self.expressions = self.actions.expressions
        self.at = f.variable(64)
        self.error = f.variable(32)
        self.done = f.new_block("done")
        self.failed = f.new_block("failed")
        self._failures: dict[int, Block] = {}

    def write(self) -> Function:
        f, spec = self.f, self.program.parser
        f.store(i64(0), self.at, 8)
        self.scope.set_register(REG_PARSER_ERROR, integer(32, self.errors.no_error))
        self.scope.set_register(REG_CHECKSUM_ERROR, integer(32, 0))
        blocks = [f.new_block("state") for _ in spec.states]
        cyclic = _has_cycle(spec)
        passed = f.variable(32)
        f.store(integer(32, 0), passed, 4)

        def target(number: int | None) -> Block:
            return self.done if number is None else blocks[number]

        f.branch(target(spec.start))
        for number, state in enumerate(spec.states):
            f.start(blocks[number])
            for op in state.ops:
                self._op(op)
            if cyclic:
                self._count_state(passed)
            self._transition(state, [target(t.next_state) for t in state.transitions], target)
        for code, block in self._failures.items():
            f.start(block)
            f.store(integer(32, code), self.error, 4)
            f.branch(self.failed)
        f.start(self.failed)
        self.scope.set_register(REG_PARSER_ERROR, f.load(32, self.error, 4))
        f.branch(self.done)
        f.start(self.done)
        at = f.load(64, self.at, 8)
        for checksum in self.program.checksums:
            if checksum.verify:
                self._verify_checksum(checksum, at)
        f.ret(at)
        f.start(self.abandon)
        f.ret(i64(-1))
        return f

    def _count_state(self, passed: Value) -> None:
        """The engine looks at the count behind the transition; that none comes is no matter."""
        f = self.f
        count = f.add(f.load(32, passed, 4), integer(32, 1))
        f.store(count, passed, 4)
        f.leave_if(f.compare("ugt", count, integer(32, MAX_STATES)), self.abandon)

    def _fail(self, code: int) -> Block:
        """Where to go to stop the parser with this error."""
        if code not in self._failures:
            self._failures[code] = self.f.new_block("error")
        return self._failures[code]

    def _require(self, good: Value, code: int) -> None:
        self.f.leave_if(self.f.not_(good), self._fail(code))

    # --- transitions ------------------------------------------------------------------------

    def _transition(
        self, state: ir.ParserState, targets: Sequence[Block], target: Callable[[int | None], Block]
    ) -> None:
        f = self.f
        default = target(state.default)
        if not state.key or not state.transitions:
            f.branch(default)
            return
        sizes = [8 * ((w + 7) // 8) for w in state.key_widths]
        bits = round_bits(sum(sizes), f"parser state {state.name}")
        full = (1 << sum(sizes)) - 1
        key: Value = integer(bits, 0)
        for part, width, size in zip(state.key, state.key_widths, sizes, strict=True):
            value = self._key_part(part, width)
            shifted = f.shl(key, size) if key.const is None else key
            key = f.or_(f.resize(value, bits), shifted)
        if bits <= 64 and all(t.mask == full for t in state.transitions):
            cases: dict[int, Block] = {}
            for t, block in zip(state.transitions, targets, strict=True):
                cases.setdefault(t.value, block)
            f.switch(key, default, list(cases.items()))
            return
        for t, block in zip(state.transitions, targets, strict=True):
            next_ = f.new_block("next")
            same = f.compare("eq", f.and_(key, integer(bits, t.mask)), integer(bits, t.value))
            f.branch_if(same, block, next_)
            f.start(next_)
        f.branch(default)

    def _key_part(self, part: ir.KeyPart, width: int) -> Value:
        """Exactly `width` bits, zeros above."""
        f = self.f
        if isinstance(part, ir.Lookahead):
            return self._lookahead(part).value
        if isinstance(part, ir.FieldRef):
            number = self.expressions.exact(part)
        else:
            following = self.expressions.next_index(part.stack)
            self._require(
                f.compare("ne", following, integer(32, 0)), self.errors.stack_out_of_bounds
            )
            number = self.expressions.exact(part)
        value = number.value
        if value.bits > width:
            value = f.and_(value, integer(value.bits, (1 << width) - 1))
        return value

    def _lookahead(self, ahead: ir.Lookahead) -> Number:
        f = self.f
        first, end_bit = ahead.offset // 8, ahead.offset + ahead.width
        end = (end_bit + 7) // 8
        at = f.load(64, self.at, 8)
        good = f.compare("ule", f.add(at, i64(end)), self.length)
        self._require(good, self.errors.packet_too_short)
        bytes_ = end - first
        round_bits(8 * bytes_, "lookahead")
        pointer = self._frame_at(f.add(at, i64(first)), i64(bytes_))
        value = f.lshr(f.load_network(pointer, bytes_), 8 * end - end_bit)
        value = f.resize(value, round_bits(ahead.width))
        value = f.and_(value, integer(value.bits, (1 << ahead.width) - 1))
        return Number(value, 0, (1 << ahead.width) - 1)

    def _frame_at(self, offset: Value, bytes_: Value) -> Value:
        pointer = self.f.at(self.frame, offset)
        return self.scope.guard(pointer, bytes_, self.frame, self.f.at(self.frame, self.length))

    # --- operations -------------------------------------------------------------------------

    def _op(self, op: ir.ParserOp) -> None:
        f = self.f
        match op:
            case ir.Extract(header, varbit_bits, max_bytes):
                self._extract(header, varbit_bits, max_bytes)
            case ir.ExtractNext(stack, headers, varbit_bits, max_bytes):
                offset = self.layout.stack_next[stack]
                self._extract_next(headers, offset, varbit_bits, max_bytes)
            case ir.Set(target, value):
                if isinstance(value, ir.Lookahead):
                    self.actions.store(target, self._lookahead(value))
                else:
                    self.actions.assign(target, value)
            case ir.SetVarbit(target, source):
                self.actions.assign_varbit(target, source)
            case ir.Verify(condition, error):
                holds, on, bad = (
                    self.expressions.boolean(condition),
                    f.new_block("verified"),
                    f.new_block("unverified"),
                )
                f.branch_if(holds, on, bad)
                if not holds.const:
                    f.start(bad)
                    f.store(self.expressions.modulo(error, 32), self.error, 4)
                    f.branch(self.failed)
                if holds.const == 0:
                    # What follows in this state is never reached, but must be somewhere.
                    f.start(f.new_block("unreached"))
                else:
                    f.start(on)
            case ir.Advance(bits):
                self._advance(bits)
            case ir.Run(statement):
                if isinstance(statement, ir.Exit):
                    raise UnsupportedConstruct("exit in a parser", self.program.parser.name)
                self.actions.statement(statement)

    def _bytes_of(self, bits: ir.DataExpr) -> Value:
        """A number of bits as bytes (64 bits); an invalid argument if it is not whole bytes.

        A number beyond 32 bits is one that no packet is long enough for."""
        f = self.f
        number = self.expressions.exact(bits)
        wide = max(number.value.bits, 64)
        value = self.expressions.extend(number, wide)
        bad = f.compare("ne", f.and_(value, integer(wide, 7)), integer(wide, 0))
        if number.low < 0:
            bad = f.or_(f.compare("slt", value, integer(wide, 0)), bad)
        self._require(f.not_(bad), self.errors.invalid_argument)
        most = integer(wide, 1 << 32)
        value = f.select(f.compare("ugt", value, most), most, value)
        return f.trunc(f.lshr(value, 3), 64)

    def _advance(self, bits: ir.DataExpr) -> None:
        f = self.f
        count = self._bytes_of(bits)
        after = f.add(f.load(64, self.at, 8), count)
        self._require(f.compare("ule", after, self.length), self.errors.packet_too_short)
        f.store(after, self.at, 8)

    def _extract_next(
        self, headers: Sequence[int], offset: int, bits: ir.DataExpr | None, max_bytes: int
    ) -> None:
        f = self.f
        pointer = self.scope.slot(offset)
        n = f.load(32, pointer, 4)
        after = f.new_block("extracted")
        blocks = [(number, f.new_block("element")) for number in range(len(headers))]
        f.switch(n, self._fail(self.errors.stack_out_of_bounds), blocks)
        for (number, block), header in zip(blocks, headers, strict=True):
            f.start(block)
            self._extract(header, bits, max_bytes)
            f.store(integer(32, number + 1), pointer, 4)
            f.branch(after)
        f.start(after)

    def _extract(self, header: int, bits: ir.DataExpr | None, max_bytes: int) -> None:
        f, layout, scope = self.f, self.layout, self.scope
        fixed = layout.wire_bytes(header)
        start, size = layout.block[header]
        at = f.load(64, self.at, 8)
        if bits is None:
            after = f.add(at, i64(fixed))
            self._require(f.compare("ule", after, self.length), self.errors.packet_too_short)
            f.copy(scope.slot(start), self._frame_at(at, i64(fixed)), fixed)
        else:
            place = layout.varbit(header)
            assert place is not None
            assert place.length is not None
            extra = self._bytes_of(bits)
            length = f.add(extra, i64(fixed))
            after = f.add(at, length)
            self._require(f.compare("ule", after, self.length), self.errors.packet_too_short)
            self._require(f.compare("ule", length, i64(max_bytes)), self.errors.header_too_short)
            before = place.offset - start
            behind = size - before - place.width // 8
            f.copy(scope.slot(start), self._frame_at(at, i64(before)), before)
            at = f.add(at, i64(before))
            f.copy(scope.slot(place.offset), self._frame_at(at, extra), extra)
            at = f.add(at, extra)
            if behind:
                suffix = scope.slot(place.offset + place.width // 8)
                f.copy(suffix, self._frame_at(at, i64(behind)), behind)
            f.store(f.trunc(f.shl(extra, 3), 32), scope.slot(place.length), 4)
        self.actions.set_valid(header)
        f.store(after, self.at, 8)

    # --- checksums --------------------------------------------------------------------------

    def _verify_checksum(self, checksum: ir.Checksum, at: Value) -> None:
        f, scope = self.f, self.scope
        condition = scope.is_valid(checksum.target.header)
        if checksum.condition is not None:
            condition = f.and_(condition, self.expressions.boolean(checksum.condition))
        with f.when(condition):
            payload = payload_of(scope, checksum, self.frame, self.length, at)
            value = self.actions.digest(checksum.calculation, payload)
            field = self.expressions.exact(checksum.target)
            bits = max(64, field.value.bits)
            same = f.compare("eq", f.zext(value, bits), self.expressions.extend(field, bits))
            with f.when(f.not_(same)):
                scope.set_register(REG_CHECKSUM_ERROR, integer(32, 1))


def payload_of(
    scope: Scope, checksum: ir.Checksum, frame: Value, length: Value, at: Value
) -> tuple[Value, Value] | None:
    """What is behind the headers, cut as it will be sent; None if the checksum ignores it."""
    if not scope.program.calculations[checksum.calculation].with_payload:
        return None
    f = scope.f
    size = f.sub(length, at)
    limit = scope.register(REG_TRUNCATE)
    size = f.select(f.compare("ult", size, limit), size, limit)
    return f.at(frame, at), size


def _has_cycle(parser: ir.Parser) -> bool:
    following = [{t.next_state for t in s.transitions} | {s.default} for s in parser.states]
    known = [[n for n in states if n is not None] for states in following]
    return ir.node_in_cycle(len(known), known.__getitem__) is not None


class DeparserWriter:
    def __init__(self, module: Module, shared: Shared, tools: Toolbox) -> None:
        self.module = module
        self.shared = shared
        self.tools = tools
        self.layout = shared.layout
        self.program = shared.program

    def prepare(self) -> Function:
        """Update checksums, then run the deparser's statements."""
        parameters = [*POINTERS, *FRAME, ("i64", "at")]
        f = self.module.function("deparse.prepare", "i1", parameters)
        context, phv, frame, length, at = f.arguments
        scope = Scope(self.shared, f, context, phv)
        abandon = f.new_block("abandon")
        actions = Actions(scope, self.tools, abandon)
        for checksum in self.program.checksums:
            if not checksum.update:
                continue
            condition = TRUE
            if checksum.condition is not None:
                condition = actions.expressions.boolean(checksum.condition)
            with f.when(condition):
                payload = payload_of(scope, checksum, frame, length, at)
                value = actions.digest(checksum.calculation, payload)
                actions.store(checksum.target, Number(value, 0, (1 << 64) - 1))
        for statement in self.program.deparser.statements:
            actions.statement(statement)
        f.ret(integer(1, 0))
        f.start(abandon)
        f.ret(integer(1, 1))
        return f

    def size(self) -> Function:
        """Bytes of all headers that will be sent."""
        f = self.module.function("deparse.size", "i64", POINTERS)
        scope = Scope(self.shared, f, f.arguments[0], f.arguments[1])
        total: Value = i64(0)
        for header in self.program.deparser.order:
            bytes_ = scope.header_bytes(header)
            total = f.add(total, f.select(scope.is_valid(header), bytes_, i64(0)))
        f.ret(total)
        return f

    def emit(self) -> Function:
        """Write all valid headers to `to`, where there is room for them up to `end`; gives the
        position behind them."""
        f = self.module.function("deparse.emit", "ptr", [*POINTERS, ("ptr", "to"), ("ptr", "end")])
        context, phv, to, end = f.arguments
        scope = Scope(self.shared, f, context, phv)
        at = f.raw("ptr", "alloca ptr")
        f.store(to, at, 8)
        for header in self.program.deparser.order:
            with f.when(scope.is_valid(header)):
                pointer = f.load_pointer(at)
                pointer = scope.guard(pointer, scope.header_bytes(header), to, end)
                f.store(self._emit_header(scope, header, pointer), at, 8)
        f.ret(f.load_pointer(at))
        return f

    def _emit_header(self, scope: Scope, header: int, to: Value) -> Value:
        f, layout = scope.f, self.layout
        if self.program.headers[header].metadata:
            raise UnsupportedConstruct("metadata in the deparser", "deparser")
        start, size = layout.block[header]
        place = layout.varbit(header)
        if place is None:
            f.copy(to, scope.slot(start), size)
            return f.at(to, size)
        before = place.offset - start
        f.copy(to, scope.slot(start), before)
        extra = scope.varbit_bytes(place)
        to = f.at(to, before)
        f.copy(to, scope.slot(place.offset), extra)
        to = f.at(to, extra)
        behind = size - before - place.width // 8
        f.copy(to, scope.slot(place.offset + place.width // 8), behind)
        return f.at(to, behind)
