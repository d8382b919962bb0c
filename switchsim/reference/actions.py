"""Actions to Python functions: the primitives of v1model, as simple_switch has them.

This module owns what each statement does to a packet (its PHV) and to the externs. What the
switch does about a clone, a digest or a drop comes after the pipeline, in `switch`; here such a
statement only leaves its request in a packet register.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvcast.switchsim import hashing, ir
from kvcast.switchsim.control_plane.externs import CounterArray, RegisterArray
from kvcast.switchsim.engine import SwitchStats
from kvcast.switchsim.reference.expressions import Arguments, Data, Expressions
from kvcast.switchsim.reference.externs import MeterArray
from kvcast.switchsim.reference.phv import (
    CLONE_FIELD_LIST,
    CLONE_SESSION,
    EXIT,
    INGRESS_LENGTH,
    LEARN_LIST,
    NOW_US,
    PACKET_LENGTH,
    RECIRCULATE_LIST,
    RESUBMIT_LIST,
    TRUNCATE_TO,
    Layout,
    Phv,
    to_signed,
)
from kvcast.switchsim.semantics import (
    CLONE_REQUESTED,
    MAX_STEPS,
    SESSION_MASK,
    filled,
    format_pieces,
)

log = logging.getLogger("kvcast.switchsim.ir")

Step: TypeAlias = Callable[[Phv, Arguments], None]
Setter: TypeAlias = Callable[[Phv, Arguments, int], None]
Digester: TypeAlias = Callable[[Phv, bytes], bytes]

_U16 = 0xFFFF
_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF


class PacketAbandoned(Exception):  # noqa: N818 - not an error of ours, but the end of a packet
    """The program failed an assert or assume, or ran for ever; the packet is dropped."""


class Actions:
    """Builds functions for the actions of one program."""

    def __init__(
        self,
        expressions: Expressions,
        registers: Sequence[RegisterArray],
        counters: Sequence[CounterArray | None],
        meters: Sequence[MeterArray | None],
        drop_port: int,
        rng: random.Random,
        stats: SwitchStats,
    ) -> None:
        self.expressions = expressions
        self.layout: Layout = expressions.layout
        self.program = self.layout.program
        self.registers = registers
        self.counters = counters
        self.meters = meters
        self.drop_port = drop_port
        self.rng = rng
        self.stats = stats
        self.packers = [self.packer(c.items) for c in self.program.calculations]
        self.algorithms = [hashing.make(c.algorithm) for c in self.program.calculations]

    # --- whole actions ----------------------------------------------------------------------

    def action(self, action: ir.Action) -> Step:
        if any(isinstance(s, (ir.Jump, ir.JumpIfZero)) for s in action.body):
            return self._with_jumps(action.body)
        return sequence([self.statement(s) for s in action.body if not isinstance(s, ir.NoOp)])

    def _with_jumps(self, body: tuple[ir.Statement, ...]) -> Step:
        # Each step gives the number of the next statement, or -1 for the one that follows.
        steps: list[Callable[[Phv, Arguments], int]] = []
        for s in body:
            if isinstance(s, ir.Jump):
                steps.append(_jump(s.target))
            elif isinstance(s, ir.JumpIfZero):
                steps.append(_jump_if_zero(self.expressions.data(s.condition), s.target))
            else:
                steps.append(_plain(self.statement(s)))
        count = len(steps)

        def run(p: Phv, a: Arguments) -> None:
            at = 0
            for _ in range(MAX_STEPS):
                if at >= count:
                    return
                target = steps[at](p, a)
                at = at + 1 if target < 0 else target
            raise PacketAbandoned("an action ran for ever")

        return run

    # --- statements -------------------------------------------------------------------------

    def statement(self, s: ir.Statement) -> Step:
        data = self.expressions.data
        match s:
            case ir.Assign(target, value):
                return self.assign(target, value)
            case ir.AssignVarbit(target, source):
                return self.assign_varbit(target, source)
            case ir.AssignHeader(target_h, source_h):
                return self._assign_header(target_h, source_h)
            case ir.AssignUnion(target_u, source_u):
                return self._assign_union(target_u, source_u)
            case ir.AssignStack(target_s, source_s):
                return self._assign_stack(target_s, source_s)
            case ir.Push(stack, count):
                return self._shift(stack, data(count), push=True)
            case ir.Pop(stack, count):
                return self._shift(stack, data(count), push=False)
            case ir.AddHeader(header):
                return self._add_header(header)
            case ir.RemoveHeader(header):
                return self._remove_header(header)
            case ir.Exit():
                return _store(EXIT, 1)
            case ir.Check(kind, condition):
                return _check(kind, data(condition))
            case ir.LogMessage(text, arguments):
                return _log_message(text, [data(x) for x in arguments])
            case ir.MarkToDrop(egress_spec, mcast_grp):
                return self._mark_to_drop(egress_spec, mcast_grp)
            case ir.Clone(session, field_list):
                return _clone(data(session), data(field_list))
            case ir.Resubmit(field_list):
                return _request(RESUBMIT_LIST, data(field_list))
            case ir.Recirculate(field_list):
                return _request(RECIRCULATE_LIST, data(field_list))
            case ir.GenerateDigest(learn_list):
                return _request(LEARN_LIST, data(learn_list))
            case ir.Hash():
                return self._hash(s)
            case ir.ExecuteMeter(array, index, target):
                return self._execute_meter(array, data(index), self.setter(target))
            case ir.Count(array, index):
                return self._count(array, data(index))
            case ir.RegisterRead(target, array, index):
                return self._register_read(array, data(index), self.setter(target))
            case ir.RegisterWrite(array, index, value):
                return self._register_write(array, data(index), data(value))
            case ir.Random(target, low, high):
                return self._random(self.setter(target), data(low), data(high))
            case ir.Truncate(length):
                return _truncate(data(length))
            case ir.NoOp():
                return lambda p, a: None
            case ir.Jump() | ir.JumpIfZero():
                raise AssertionError("jumps belong to whole actions")

    # --- assignment -------------------------------------------------------------------------

    def setter(self, target: ir.LValue) -> Setter:
        """A function that stores a number in a field, cut to the field's width."""
        layout = self.layout
        if isinstance(target, ir.FieldRef):
            slot, wrap = layout.slot(target), self.wrap(target)

            def store(p: Phv, a: Arguments, value: int) -> None:
                p[slot] = wrap(value)

            return store
        if isinstance(target, ir.LastField):
            wrap = self.wrap(ir.FieldRef(target.headers[0], target.field))
            slots = [layout.slot(ir.FieldRef(h, target.field)) for h in target.headers]
            next_slot = self.layout.stack_next[target.stack]

            def store_last(p: Phv, a: Arguments, value: int) -> None:
                n = p[next_slot]
                if n:
                    p[slots[n - 1]] = wrap(value)

            return store_last
        header_at = self.expressions.header(target.header)
        wraps = [
            self.wrap(ir.FieldRef(n, target.field)) if target.field < len(h.fields) else None
            for n, h in enumerate(self.program.headers)
        ]
        slots = self.expressions.field_slots(target.field)

        def store_element(p: Phv, a: Arguments, value: int) -> None:
            h = header_at(p, a)
            if h >= 0:
                wrap = wraps[h]
                assert wrap is not None
                p[slots[h]] = wrap(value)

        return store_element

    def wrap(self, ref: ir.FieldRef) -> Callable[[int], int]:
        width = self.layout.width(ref)
        if self.layout.signed(ref):
            return lambda value: to_signed(value, width)
        mask = (1 << width) - 1
        return lambda value: value & mask

    def assign(self, target: ir.LValue, value: ir.DataExpr) -> Step:
        if not isinstance(target, ir.FieldRef):
            store, x = self.setter(target), self.expressions.data(value)
            return lambda p, a: store(p, a, x(p, a))
        layout = self.layout
        slot, width, signed = layout.slot(target), layout.width(target), layout.signed(target)
        if isinstance(value, ir.Const):
            return _store(slot, self.wrap(target)(value.value))
        bits = self.expressions.bits(value)
        fits = bits is not None and bits <= (width - 1 if signed else width)
        if isinstance(value, ir.FieldRef):
            source = layout.slot(value)
            same = signed and layout.signed(value) and layout.width(value) <= width
            if fits or same:

                def copy(p: Phv, a: Arguments) -> None:
                    p[slot] = p[source]

                return copy
        x = self.expressions.data(value)
        if signed and not fits:

            def assign_signed(p: Phv, a: Arguments) -> None:
                p[slot] = to_signed(x(p, a), width)

            return assign_signed
        if fits:

            def assign_as_it_is(p: Phv, a: Arguments) -> None:
                p[slot] = x(p, a)

            return assign_as_it_is
        mask = (1 << width) - 1

        def assign(p: Phv, a: Arguments) -> None:
            p[slot] = x(p, a) & mask

        return assign

    def assign_varbit(self, target: ir.FieldRef, source: ir.FieldRef) -> Step:
        layout = self.layout
        to, from_ = layout.slot(target), layout.slot(source)
        to_length = layout.length_slot[target.header]
        from_length = layout.length_slot[source.header]
        assert to_length is not None
        assert from_length is not None
        limit = layout.width(target)

        def assign(p: Phv, a: Arguments) -> None:
            # P4 types make the widths agree; the limit guards against a hand-made file.
            length = min(p[from_length], limit)
            p[to_length] = length
            p[to] = p[from_] & ((1 << length) - 1)

        return assign

    # --- headers ----------------------------------------------------------------------------

    def set_valid(self, header: int) -> Callable[[Phv], None]:
        slot, siblings = self.layout.valid[header], self.layout.siblings[header]
        if not siblings:

            def set_valid(p: Phv) -> None:
                p[slot] = 1

            return set_valid

        def set_valid_in_union(p: Phv) -> None:
            for sibling in siblings:
                p[sibling] = 0
            p[slot] = 1

        return set_valid_in_union

    def _copy_header(self, p: Phv, to: int, from_: int) -> None:
        layout = self.layout
        if p[layout.valid[from_]]:
            for sibling in layout.siblings[to]:
                p[sibling] = 0
            p[layout.valid[to] : layout.end[to]] = p[layout.valid[from_] : layout.end[from_]]
        elif not self.program.headers[to].metadata:
            p[layout.valid[to]] = 0

    def _assign_header(self, target: ir.HeaderExpr, source: ir.HeaderExpr) -> Step:
        to, from_ = self.expressions.header(target), self.expressions.header(source)

        def assign(p: Phv, a: Arguments) -> None:
            h, g = to(p, a), from_(p, a)
            if h >= 0:
                if g >= 0:
                    self._copy_header(p, h, g)
                else:
                    p[self.layout.valid[h]] = 0

        return assign

    def _assign_union(self, target: ir.UnionExpr, source: ir.UnionExpr) -> Step:
        to, from_ = self.expressions.union(target), self.expressions.union(source)
        members = [u.headers for u in self.program.unions]

        def assign(p: Phv, a: Arguments) -> None:
            u, v = to(p, a), from_(p, a)
            if u >= 0 and v >= 0:
                for h, g in zip(members[u], members[v], strict=False):
                    self._copy_header(p, h, g)

        return assign

    def _assign_stack(self, target: ir.StackExpr, source: ir.StackExpr) -> Step:
        to, from_ = self.program.stack_elements(target), self.program.stack_elements(source)
        to_next = self.layout.stack_next[target]
        from_next = self.layout.stack_next[source]

        def assign(p: Phv, a: Arguments) -> None:
            p[to_next] = min(p[from_next], len(to))
            for element, other in zip(to, from_, strict=False):
                for h, g in zip(element, other, strict=False):
                    self._copy_header(p, h, g)

        return assign

    def _shift(self, stack: ir.StackExpr, count: Data, *, push: bool) -> Step:
        """push_front or pop_front of P4_16: elements move, those that come in are invalid."""
        blocks = [
            [(self.layout.valid[h], self.layout.end[h]) for h in element]
            for element in self.program.stack_elements(stack)
        ]
        size = len(blocks)
        next_slot = self.layout.stack_next[stack]

        def move(p: Phv, to: int, from_: int) -> None:
            for (start, end), (other, other_end) in zip(blocks[to], blocks[from_], strict=True):
                p[start:end] = p[other:other_end]

        def clear(p: Phv, element: int) -> None:
            for start, _ in blocks[element]:
                p[start] = 0

        def push_front(p: Phv, a: Arguments) -> None:
            n = max(0, min(count(p, a), size))
            p[next_slot] = min(size, p[next_slot] + n)
            for element in range(size - 1, n - 1, -1):
                move(p, element, element - n)
            for element in range(n):
                clear(p, element)

        def pop_front(p: Phv, a: Arguments) -> None:
            n = max(0, min(count(p, a), size))
            p[next_slot] = max(0, p[next_slot] - n)
            for element in range(size - n):
                move(p, element, element + n)
            for element in range(size - n, size):
                clear(p, element)

        return push_front if push else pop_front

    def _header_bytes(self, p: Phv, header: int) -> int:
        length = self.layout.length_slot[header]
        bits = self.program.headers[header].fixed_bits
        return (bits if length is None else bits + p[length]) // 8

    def _add_header(self, header: ir.HeaderExpr) -> Step:
        at, layout = self.expressions.header(header), self.layout

        def add(p: Phv, a: Arguments) -> None:
            h = at(p, a)
            if h < 0 or p[layout.valid[h]]:
                return
            start, end = layout.first_field[h], layout.end[h]
            p[start:end] = [0] * (end - start)
            for sibling in layout.siblings[h]:
                p[sibling] = 0
            p[layout.valid[h]] = 1
            p[PACKET_LENGTH] += self._header_bytes(p, h)

        if isinstance(header, ir.HeaderOf) and not layout.siblings[header.header]:
            number = header.header
            valid, start, end = layout.valid[number], layout.valid[number], layout.end[number]
            fresh = [1] + [0] * (end - start - 1)
            length = self.program.headers[number].fixed_bits // 8

            def add_known(p: Phv, a: Arguments) -> None:
                if not p[valid]:
                    p[start:end] = fresh
                    p[PACKET_LENGTH] += length

            return add_known
        return add

    def _remove_header(self, header: ir.HeaderExpr) -> Step:
        at, layout = self.expressions.header(header), self.layout

        def remove(p: Phv, a: Arguments) -> None:
            h = at(p, a)
            if h >= 0 and p[layout.valid[h]]:
                p[PACKET_LENGTH] -= self._header_bytes(p, h)
                p[layout.valid[h]] = 0

        return remove

    # --- externs ----------------------------------------------------------------------------

    def packer(self, items: Sequence[ir.PackedItem]) -> Digester:
        """Fields side by side without padding, then zero bits to a whole byte, then payload.

        Fields of invalid headers are skipped, as BMv2 does.
        """
        layout = self.layout
        # (validity slot, value slot, width, mask). A constant has no slots, and its value in place
        # of the mask; a varbit has no width, and the slot of its length in place of the mask.
        parts: list[tuple[int, int, int, int]] = []
        for item in items:
            if isinstance(item, ir.PackedConst):
                parts.append((-1, -1, item.width, item.value & ((1 << item.width) - 1)))
                continue
            number = item.header
            if isinstance(item, ir.PackedHeader):
                fields = [ir.FieldRef(number, n) for n in range(len(self._fields(number)))]
            else:
                fields = [item]
            for ref in fields:
                width = layout.width(ref)
                mask = (1 << width) - 1
                if ref.field != ir.VALID and self._fields(number)[ref.field].varbit:
                    length = layout.length_slot[number]
                    assert length is not None
                    width, mask = -1, length
                parts.append((layout.valid[number], layout.slot(ref), width, mask))

        def pack(p: Phv, payload: bytes) -> bytes:
            value = bits = 0
            for valid, slot, width, mask in parts:
                if slot < 0:
                    value = value << width | mask
                elif not p[valid]:
                    continue
                elif width < 0:
                    width = p[mask]
                    value = value << width | p[slot] & ((1 << width) - 1)
                else:
                    value = value << width | p[slot] & mask
                bits += width
            padding = -bits % 8
            return (value << padding).to_bytes((bits + padding) // 8) + payload

        return pack

    def _fields(self, header: int) -> tuple[ir.Field, ...]:
        return self.program.headers[header].fields

    def _hash(self, s: ir.Hash) -> Step:
        store, base = self.setter(s.target), self.expressions.data(s.base)
        size = self.expressions.data(s.size)
        pack, algorithm = self.packers[s.calculation], self.algorithms[s.calculation]

        def hash_(p: Phv, a: Arguments) -> None:
            modulus = (size(p, a) & _U64) or 1
            value = algorithm(pack(p, b"")) % modulus + (base(p, a) & _U64)
            store(p, a, value & _U64)

        return hash_

    def _in_range(self, index: Data, size: int, run: Setter) -> Step:
        """Run with the index if it is one, else count the fault."""
        stats = self.stats

        def step(p: Phv, a: Arguments) -> None:
            i = index(p, a) & _U32
            if i < size:
                run(p, a, i)
            else:
                stats.index_out_of_range += 1

        return step

    def _execute_meter(self, array: int, index: Data, store: Setter) -> Step:
        meter = self.meters[array]
        assert meter is not None, "the loader lets no direct meter be executed by index"

        def execute(p: Phv, a: Arguments, i: int) -> None:
            store(p, a, meter.execute(i, p[INGRESS_LENGTH], p[NOW_US]))

        return self._in_range(index, len(meter), execute)

    def _count(self, array: int, index: Data) -> Step:
        counter = self.counters[array]
        assert counter is not None, "the loader lets no direct counter be counted by index"
        packets, bytes_ = counter.packets, counter.bytes

        def count(p: Phv, a: Arguments, i: int) -> None:
            packets[i] += 1
            bytes_[i] += p[INGRESS_LENGTH]

        return self._in_range(index, len(counter), count)

    def _register_read(self, array: int, index: Data, store: Setter) -> Step:
        cells = self.registers[array].cells

        def read(p: Phv, a: Arguments, i: int) -> None:
            store(p, a, cells[i])

        return self._in_range(index, len(cells), read)

    def _register_write(self, array: int, index: Data, value: Data) -> Step:
        cells, mask = self.registers[array].cells, self.registers[array].mask

        def write(p: Phv, a: Arguments, i: int) -> None:
            cells[i] = value(p, a) & mask

        return self._in_range(index, len(cells), write)

    def _random(self, store: Setter, low: Data, high: Data) -> Step:
        rng = self.rng

        def draw(p: Phv, a: Arguments) -> None:
            lo, hi = low(p, a) & _U64, high(p, a) & _U64
            if lo <= hi:
                store(p, a, rng.randint(lo, hi))

        return draw

    def _mark_to_drop(self, egress_spec: ir.FieldRef, mcast_grp: ir.FieldRef | None) -> Step:
        slot, port = self.layout.slot(egress_spec), self.wrap(egress_spec)(self.drop_port)
        if mcast_grp is None:
            return _store(slot, port)
        group = self.layout.slot(mcast_grp)

        def mark_to_drop(p: Phv, a: Arguments) -> None:
            p[slot] = port
            p[group] = 0

        return mark_to_drop


def sequence(steps: Sequence[Step]) -> Step:
    """One step that runs all of them in order."""
    match steps:
        case []:
            return lambda p, a: None
        case [only]:
            return only
        case [first, second]:

            def run_two(p: Phv, a: Arguments) -> None:
                first(p, a)
                second(p, a)

            return run_two
        case _:
            frozen = tuple(steps)

            def run(p: Phv, a: Arguments) -> None:
                for step in frozen:
                    step(p, a)

            return run


def _store(slot: int, value: int) -> Step:
    def store(p: Phv, a: Arguments) -> None:
        p[slot] = value

    return store


def _request(register: int, value: Data) -> Step:
    def request(p: Phv, a: Arguments) -> None:
        p[register] = value(p, a) & _U16

    return request


def _clone(session: Data, field_list: Data) -> Step:
    def clone(p: Phv, a: Arguments) -> None:
        p[CLONE_SESSION] = (session(p, a) & SESSION_MASK) | CLONE_REQUESTED
        p[CLONE_FIELD_LIST] = field_list(p, a) & _U16

    return clone


def _truncate(length: Data) -> Step:
    def truncate(p: Phv, a: Arguments) -> None:
        p[TRUNCATE_TO] = min(p[TRUNCATE_TO], length(p, a) & _U64)

    return truncate


def _check(kind: str, condition: Data) -> Step:
    def check(p: Phv, a: Arguments) -> None:
        if condition(p, a) == 0:
            raise PacketAbandoned(f"{kind} failed")

    return check


def _log_message(text: str, arguments: Sequence[Data]) -> Step:
    pieces = format_pieces(text)

    def log_message(p: Phv, a: Arguments) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        log.info("%s", filled(pieces, [str(x(p, a)) for x in arguments]))

    return log_message


def _jump(target: int) -> Callable[[Phv, Arguments], int]:
    return lambda p, a: target


def _jump_if_zero(condition: Data, target: int) -> Callable[[Phv, Arguments], int]:
    return lambda p, a: -1 if condition(p, a) else target


def _plain(step: Step) -> Callable[[Phv, Arguments], int]:
    def run(p: Phv, a: Arguments) -> int:
        step(p, a)
        return -1

    return run
