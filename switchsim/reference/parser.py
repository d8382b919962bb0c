"""The parser and the deparser: bytes to a packet header vector, and back.

Follows behavioral-model's parser.cpp and deparser.cpp. A parser error stops the parse where it
is and is reported in the PARSER_ERROR register; it does not drop the packet. The payload is
never copied: it is the frame from the position at which the parser stopped.

Two departures, both where BMv2 reads behind the end of the packet: a lookahead beyond the end
is error.PacketTooShort, and so is an advance beyond it; and a field of `stack.last` of an empty
stack in a transition is error.StackOutOfBounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvcast.switchsim import ir
from kvcast.switchsim.reference.actions import Actions, PacketAbandoned, Step
from kvcast.switchsim.reference.expressions import Data, Expressions
from kvcast.switchsim.reference.phv import (
    CHECKSUM_ERROR,
    PARSER_ERROR,
    TRUNCATE_TO,
    Layout,
    Phv,
    to_signed,
)
from kvcast.switchsim.semantics import MAX_STATES, Errors

# An operation takes the PHV, the frame and the position, and gives the new position.
Op: TypeAlias = Callable[[Phv, bytes, int], int]
KeyOf: TypeAlias = Callable[[Phv, bytes, int], int]
Emitter: TypeAlias = Callable[[Phv], bytes]

WIDE_BYTES = 64
"""Runs of fields up to this long are converted as one integer; longer ones are split."""


class ParserFailure(Exception):  # noqa: N818 - an error in P4's sense, not in Python's
    """The parser met error number `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _State:
    __slots__ = ("default", "key", "masked", "ops", "table")

    def __init__(self, ops: tuple[Op, ...], key: KeyOf | None) -> None:
        self.ops = ops
        self.key = key
        self.table: dict[int, _State | None] | None = None
        self.masked: list[tuple[int, int, _State | None]] = []
        self.default: _State | None = None


class Parser:
    """Runs the program's parser: `parse(phv, frame)` gives the length of the headers."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self.expressions: Expressions = actions.expressions
        self.layout: Layout = actions.layout
        self.program = self.layout.program
        self.errors = Errors(self.program)
        self._states: list[_State] = []
        spec = self.program.parser
        for state in spec.states:
            key = self._key(state) if state.key and state.transitions else None
            self._states.append(_State(tuple(self._op(o) for o in state.ops), key))
        for state, built in zip(spec.states, self._states, strict=True):
            self._link(state, built)
        self._start = self._at(spec.start)
        self._verify = [Checksum(actions, c) for c in self.program.checksums if c.verify]

    def _at(self, number: int | None) -> _State | None:
        return None if number is None else self._states[number]

    def parse(self, phv: Phv, frame: bytes) -> int:
        state, at = self._start, 0
        phv[PARSER_ERROR] = self.errors.no_error
        phv[CHECKSUM_ERROR] = 0
        passed = 0
        try:
            while state is not None:
                for op in state.ops:
                    at = op(phv, frame, at)
                if state.key is None:
                    state = state.default
                else:
                    key = state.key(phv, frame, at)
                    if state.table is not None:
                        state = state.table.get(key, state.default)
                    else:
                        for value, mask, target in state.masked:
                            if key & mask == value:
                                state = target
                                break
                        else:
                            state = state.default
                passed += 1
                if passed > MAX_STATES:
                    raise PacketAbandoned("the parser ran for ever")
        except ParserFailure as failure:
            phv[PARSER_ERROR] = failure.code
        for checksum in self._verify:
            if not checksum.verify(phv, frame, at):
                phv[CHECKSUM_ERROR] = 1
        return at

    # --- transitions ------------------------------------------------------------------------

    def _link(self, state: ir.ParserState, built: _State) -> None:
        built.default = self._at(state.default)
        full = (1 << sum(8 * ((w + 7) // 8) for w in state.key_widths)) - 1
        if all(t.mask == full for t in state.transitions):
            built.table = {}
            for t in state.transitions:
                built.table.setdefault(t.value, self._at(t.next_state))
        else:
            built.masked = [(t.value, t.mask, self._at(t.next_state)) for t in state.transitions]

    def _key(self, state: ir.ParserState) -> KeyOf:
        parts = [
            (self._key_part(part, width), 8 * ((width + 7) // 8))
            for part, width in zip(state.key, state.key_widths, strict=True)
        ]
        if len(parts) == 1:
            return parts[0][0]

        def key(p: Phv, frame: bytes, at: int) -> int:
            value = 0
            for part, width in parts:
                value = (value << width) | part(p, frame, at)
            return value

        return key

    def _key_part(self, part: ir.KeyPart, width: int) -> KeyOf:
        mask = (1 << width) - 1
        if isinstance(part, ir.Lookahead):
            return self._lookahead(part)
        if isinstance(part, ir.FieldRef):
            slot = self.layout.slot(part)
            if self.layout.signed(part):
                return lambda p, frame, at: p[slot] & mask
            return lambda p, frame, at: p[slot]
        next_slot = self.layout.stack_next[part.stack]
        last, empty = self.expressions.data(part), self.errors.stack_out_of_bounds

        def last_field(p: Phv, frame: bytes, at: int) -> int:
            if p[next_slot] == 0:
                raise ParserFailure(empty)
            return last(p, ()) & mask

        return last_field

    def _lookahead(self, ahead: ir.Lookahead) -> KeyOf:
        first, end_bit = ahead.offset // 8, ahead.offset + ahead.width
        end = (end_bit + 7) // 8
        shift, mask, too_short = (
            8 * end - end_bit,
            (1 << ahead.width) - 1,
            (self.errors.packet_too_short),
        )

        def look(p: Phv, frame: bytes, at: int) -> int:
            if at + end > len(frame):
                raise ParserFailure(too_short)
            return (int.from_bytes(frame[at + first : at + end]) >> shift) & mask

        return look

    # --- operations -------------------------------------------------------------------------

    def _op(self, op: ir.ParserOp) -> Op:
        match op:
            case ir.Extract(header, varbit_bits, max_bytes):
                if varbit_bits is None:
                    return self._extract(header)
                return self._extract_varbit(header, self.expressions.data(varbit_bits), max_bytes)
            case ir.ExtractNext(stack, headers, varbit_bits, max_bytes):
                next_slot = self.layout.stack_next[stack]
                return self._extract_next(headers, next_slot, varbit_bits, max_bytes)
            case ir.Set(target, value):
                return self._set(target, value)
            case ir.SetVarbit(target, source):
                return _as_op(self.actions.assign_varbit(target, source))
            case ir.Verify(condition, error):
                holds, code = self.expressions.boolean(condition), self.expressions.data(error)

                def verify(p: Phv, frame: bytes, at: int) -> int:
                    if not holds(p, ()):
                        raise ParserFailure(code(p, ()))
                    return at

                return verify
            case ir.Advance(bits):
                return self._advance(self.expressions.data(bits))
            case ir.Run(statement):
                return _as_op(self.actions.statement(statement))

    def _set(self, target: ir.FieldRef, value: ir.DataExpr | ir.Lookahead) -> Op:
        if not isinstance(value, ir.Lookahead):
            return _as_op(self.actions.assign(target, value))
        look, store = self._lookahead(value), self.actions.setter(target)

        def set_ahead(p: Phv, frame: bytes, at: int) -> int:
            store(p, (), look(p, frame, at))
            return at

        return set_ahead

    def _advance(self, bits: Data) -> Op:
        too_short, invalid = self.errors.packet_too_short, self.errors.invalid_argument

        def advance(p: Phv, frame: bytes, at: int) -> int:
            count = bits(p, ())
            if count < 0 or count % 8:
                raise ParserFailure(invalid)
            if at + count // 8 > len(frame):
                raise ParserFailure(too_short)
            return at + count // 8

        return advance

    def _extract_next(
        self, headers: tuple[int, ...], next_slot: int, bits: ir.DataExpr | None, max_bytes: int
    ) -> Op:
        size, full = len(headers), self.errors.stack_out_of_bounds
        if bits is None:
            extract = [self._extract(h) for h in headers]
        else:
            length = self.expressions.data(bits)
            extract = [self._extract_varbit(h, length, max_bytes) for h in headers]

        def extract_next(p: Phv, frame: bytes, at: int) -> int:
            n = p[next_slot]
            if n >= size:
                raise ParserFailure(full)
            at = extract[n](p, frame, at)
            p[next_slot] = n + 1
            return at

        return extract_next

    def _extract(self, header: int) -> Op:
        h = self.program.headers[header]
        length, too_short = h.fixed_bits // 8, self.errors.packet_too_short
        groups = field_groups([f.width for f in h.fields])
        start, end = self.layout.first_field[header], self.layout.end[header]
        valid, siblings = self.layout.valid[header], self.layout.siblings[header]
        signed = [(start + n, f.width) for n, f in enumerate(h.fields) if f.signed]
        if len(groups) == 1 and not signed and not siblings:
            fields = groups[0].fields

            def extract_small(p: Phv, frame: bytes, at: int) -> int:
                to = at + length
                if to > len(frame):
                    raise ParserFailure(too_short)
                value = int.from_bytes(frame[at:to])
                p[valid] = 1
                p[start:end] = [(value >> shift) & mask for shift, mask in fields]
                return to

            return extract_small

        spans = [(g.start, g.end, g.fields) for g in groups]

        def extract(p: Phv, frame: bytes, at: int) -> int:
            to = at + length
            if to > len(frame):
                raise ParserFailure(too_short)
            values: list[int] = []
            for first, last, fields in spans:
                value = int.from_bytes(frame[at + first : at + last])
                if len(fields) == 1:
                    values.append(value)
                else:
                    values += [(value >> shift) & mask for shift, mask in fields]
            for sibling in siblings:
                p[sibling] = 0
            p[valid] = 1
            p[start:end] = values
            for slot, width in signed:
                p[slot] = to_signed(p[slot], width)
            return to

        return extract

    def _extract_varbit(self, header: int, bits: Data, max_bytes: int) -> Op:
        h, errors = self.program.headers[header], self.errors
        fixed_bits, varbit = h.fixed_bits, h.varbit
        assert varbit is not None
        start, valid = self.layout.first_field[header], self.layout.valid[header]
        siblings, length_slot = self.layout.siblings[header], self.layout.length_slot[header]
        assert length_slot is not None
        fields = list(enumerate(h.fields, start))

        def extract(p: Phv, frame: bytes, at: int) -> int:
            extra = bits(p, ())
            if extra < 0 or extra % 8:
                raise ParserFailure(errors.invalid_argument)
            length = (fixed_bits + extra) // 8
            if at + length > len(frame):
                raise ParserFailure(errors.packet_too_short)
            if length > max_bytes:
                raise ParserFailure(errors.header_too_short)
            value, left = int.from_bytes(frame[at : at + length]), 8 * length
            for slot, f in fields:
                width = extra if f.varbit else f.width
                left -= width
                part = (value >> left) & ((1 << width) - 1)
                p[slot] = to_signed(part, width) if f.signed else part
            p[length_slot] = extra
            for sibling in siblings:
                p[sibling] = 0
            p[valid] = 1
            return at + length

        return extract


class Deparser:
    """`deparse(phv, frame, at)` gives the frame to send: headers, then the payload."""

    def __init__(self, actions: Actions) -> None:
        layout = self.layout = actions.layout
        spec = actions.program.deparser
        self._updates = [Checksum(actions, c) for c in actions.program.checksums if c.update]
        self._steps: list[Step] = [actions.statement(s) for s in spec.statements]
        self._emitters = [(layout.valid[h], emitter(layout, h)) for h in spec.order]

    def deparse(self, phv: Phv, frame: bytes, at: int) -> bytes:
        for checksum in self._updates:
            checksum.update(phv, frame, at)
        for step in self._steps:
            step(phv, ())
        pieces = [emit(phv) for valid, emit in self._emitters if phv[valid]]
        pieces.append(frame[at:] if at else frame)
        return b"".join(pieces)


class Checksum:
    """One checksum of the program, verified after parsing or updated before deparsing."""

    def __init__(self, actions: Actions, spec: ir.Checksum) -> None:
        calculation = actions.program.calculations[spec.calculation]
        self._pack = actions.packers[spec.calculation]
        self._algorithm = actions.algorithms[spec.calculation]
        self._with_payload = calculation.with_payload
        boolean = actions.expressions.boolean
        self._condition = None if spec.condition is None else boolean(spec.condition)
        self._slot = actions.layout.slot(spec.target)
        self._valid = actions.layout.valid[spec.target.header]
        self._store = actions.setter(spec.target)

    def _compute(self, phv: Phv, frame: bytes, at: int) -> int:
        if not self._with_payload:
            return self._algorithm(self._pack(phv, b""))
        # BMv2 counts a truncated payload as already truncated.
        return self._algorithm(self._pack(phv, frame[at:][: phv[TRUNCATE_TO]]))

    def verify(self, phv: Phv, frame: bytes, at: int) -> bool:
        if not phv[self._valid] or (self._condition and not self._condition(phv, ())):
            return True
        return self._compute(phv, frame, at) == phv[self._slot]

    def update(self, phv: Phv, frame: bytes, at: int) -> None:
        if self._condition is None or self._condition(phv, ()):
            self._store(phv, (), self._compute(phv, frame, at))


class FieldGroup:
    """Neighbouring fields that start and end on a byte: one integer in, one integer out."""

    __slots__ = ("end", "fields", "start", "widths")

    def __init__(self, start: int, widths: Sequence[int]) -> None:
        bits = sum(widths)
        self.start = start
        self.end = start + bits // 8
        self.widths = tuple(widths)
        self.fields: list[tuple[int, int]] = []
        """(shift, mask) of each field in the group's integer."""
        for width in widths:
            bits -= width
            self.fields.append((bits, (1 << width) - 1))


def field_groups(widths: Sequence[int]) -> list[FieldGroup]:
    """Split a header where it can be split, so that wide fields are not shifted about."""
    groups: list[FieldGroup] = []
    current: list[int] = []
    start = bits = 0
    for width in widths:
        # Close the group before a field that would make it long, if it ends on a byte.
        if current and bits % 8 == 0 and (bits + width) // 8 > WIDE_BYTES:
            groups.append(FieldGroup(start, current))
            start += bits // 8
            current, bits = [], 0
        current.append(width)
        bits += width
    if current:
        groups.append(FieldGroup(start, current))
    return groups


def emitter(layout: Layout, header: int) -> Emitter:
    """A function that gives the bytes of a header."""
    h = layout.program.headers[header]
    start = layout.first_field[header]
    if h.varbit is not None or any(f.signed for f in h.fields):
        return _general_emitter(layout, header)
    groups = field_groups([f.width for f in h.fields])
    spans: list[tuple[int, int, int, tuple[int, ...]]] = []
    slot = start
    for g in groups:
        spans.append((slot, slot + len(g.widths), g.end - g.start, g.widths))
        slot += len(g.widths)
    if len(spans) == 1:
        first, last, length, widths = spans[0]

        def emit_small(p: Phv) -> bytes:
            value = 0
            for width, v in zip(widths, p[first:last], strict=True):
                value = (value << width) | v
            return value.to_bytes(length)

        return emit_small

    def emit(p: Phv) -> bytes:
        pieces: list[bytes] = []
        for first, last, length, widths in spans:
            if last - first == 1:
                pieces.append(p[first].to_bytes(length))
                continue
            value = 0
            for width, v in zip(widths, p[first:last], strict=True):
                value = (value << width) | v
            pieces.append(value.to_bytes(length))
        return b"".join(pieces)

    return emit


def _general_emitter(layout: Layout, header: int) -> Emitter:
    h = layout.program.headers[header]
    fields = list(enumerate(h.fields, layout.first_field[header]))
    length_slot = layout.length_slot[header]

    def emit(p: Phv) -> bytes:
        value = bits = 0
        for slot, f in fields:
            width = p[length_slot] if f.varbit and length_slot is not None else f.width
            value = (value << width) | (p[slot] & ((1 << width) - 1))
            bits += width
        return value.to_bytes(bits // 8)

    return emit


def _as_op(step: Step) -> Op:
    def op(p: Phv, frame: bytes, at: int) -> int:
        step(p, ())
        return at

    return op
