"""The parser and the deparser: bytes to a packet header vector, and back.

Follows behavioral-model's parser.cpp and deparser.cpp. A parser error stops the parse where it
is and is reported in the PARSER_ERROR register; it does not drop the packet. The payload is
never copied: it is the frame from the position at which the parser stopped.

Two departures, both where BMv2 reads behind the end of the packet: a lookahead beyond the end
is error.PacketTooShort, and so is an advance beyond it; and a field of `stack.last` of an empty
stack in a transition is error.StackOutOfBounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


class ParserFailure(Exception):  # noqa: N818 - an error in P4's sense, not in Python's
    """The parser met error number `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class _State:
    ops: tuple[Op, ...]
    key: KeyOf
    default: int | None
    transitions: tuple[ir.Transition, ...]


class Parser:
    """Runs the program's parser: `parse(phv, frame)` gives the length of the headers."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self.expressions: Expressions = actions.expressions
        self.layout: Layout = actions.layout
        self.program = self.layout.program
        self.errors = Errors(self.program)
        self._states = [
            _State(
                tuple(map(self._op, s.ops)), self._key(s), s.default, s.transitions if s.key else ()
            )
            for s in self.program.parser.states
        ]
        self._verify = [Checksum(actions, c) for c in self.program.checksums if c.verify]

    def parse(self, phv: Phv, frame: bytes) -> int:
        number, at = self.program.parser.start, 0
        phv[PARSER_ERROR] = self.errors.no_error
        phv[CHECKSUM_ERROR] = 0
        passed = 0
        try:
            while number is not None:
                state = self._states[number]
                for op in state.ops:
                    at = op(phv, frame, at)
                number = state.default
                if state.transitions:
                    key = state.key(phv, frame, at)
                    for transition in state.transitions:
                        if key & transition.mask == transition.value:
                            number = transition.next_state
                            break
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

    def _key(self, state: ir.ParserState) -> KeyOf:
        parts = [
            (self._key_part(part, width), 8 * ((width + 7) // 8))
            for part, width in zip(state.key, state.key_widths, strict=True)
        ]

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
            return lambda p, frame, at: p[slot] & mask
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
                return self._extract(header, varbit_bits, max_bytes)
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
        extract = [self._extract(h, bits, max_bytes) for h in headers]

        def extract_next(p: Phv, frame: bytes, at: int) -> int:
            n = p[next_slot]
            if n >= size:
                raise ParserFailure(full)
            at = extract[n](p, frame, at)
            p[next_slot] = n + 1
            return at

        return extract_next

    def _extract(self, header: int, varbit: ir.DataExpr | None, max_bytes: int) -> Op:
        """`varbit`: bits of the variable-length field, if the header has one; `max_bytes`: of the
        header then."""
        h, layout, errors = self.program.headers[header], self.layout, self.errors
        bits = None if varbit is None else self.expressions.data(varbit)
        valid, siblings = layout.valid[header], layout.siblings[header]
        length_slot = layout.length_slot[header]
        fields = list(enumerate(h.fields, layout.first_field[header]))

        def extract(p: Phv, frame: bytes, at: int) -> int:
            extra = 0 if bits is None else bits(p, ())
            if extra < 0 or extra % 8:
                raise ParserFailure(errors.invalid_argument)
            length = (h.fixed_bits + extra) // 8
            if at + length > len(frame):
                raise ParserFailure(errors.packet_too_short)
            if bits is not None and length > max_bytes:
                raise ParserFailure(errors.header_too_short)
            value, left = int.from_bytes(frame[at : at + length]), 8 * length
            for slot, f in fields:
                width = extra if f.varbit else f.width
                left -= width
                part = (value >> left) & ((1 << width) - 1)
                p[slot] = to_signed(part, width) if f.signed else part
            if length_slot is not None:
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
        self._emitters = [(layout.valid[h], _emitter(layout, h)) for h in spec.order]

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


def _emitter(layout: Layout, header: int) -> Emitter:
    """A function that gives the bytes of a header."""
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
