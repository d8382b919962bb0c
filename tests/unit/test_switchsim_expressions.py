"""Expressions, assignments, and the way of fields into and out of packets.

Oracle: a naive evaluator of the expression tree over a dictionary of field values (the engine
has special functions for the common shapes, which must not change any value), and bit strings
for extraction and emission.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.switchsim import ir, loader
from kvcast.switchsim.engine import SwitchStats
from kvcast.switchsim.reference.actions import Actions
from kvcast.switchsim.reference.expressions import Expressions
from kvcast.switchsim.reference.parser import Deparser, Parser
from kvcast.switchsim.reference.phv import PARSER_ERROR, Layout, Phv, to_signed

PROGRAMS = Path(__file__).resolve().parents[1] / "stf" / "programs"
BASE = loader.load_file(PROGRAMS / "selector.json")

# Fields of one metadata header: (width, signed)
FIELDS = ((8, False), (1, False), (16, True), (48, False), (7, True), (300, False))
LOCALS = (5, 0, (1 << 40) + 3)


def header_space(*headers: ir.Header) -> ir.Program:
    """A program with these headers and nothing else of interest."""
    return dataclasses.replace(
        BASE,
        headers=headers,
        stacks=(),
        unions=(),
        union_stacks=(),
        parser=ir.Parser("parser", (), None),
        deparser=ir.Deparser("deparser", (), ()),
        calculations=(),
        checksums=(),
    )


METADATA = ir.Header(
    "m", "m_t", tuple(ir.Field(f"f{n}", w, s) for n, (w, s) in enumerate(FIELDS)), True
)
PROGRAM = header_space(METADATA)
LAYOUT = Layout(PROGRAM)


def actions_for(program: ir.Program, layout: Layout) -> Actions:
    return Actions(Expressions(layout, ()), (), (), (), 511, random.Random(0), SwitchStats())


ACTIONS = actions_for(PROGRAM, LAYOUT)


def packet(values: list[int]) -> Phv:
    phv = LAYOUT.empty[:]
    for n, (value, (width, signed)) in enumerate(zip(values, FIELDS, strict=True)):
        value &= (1 << width) - 1
        if signed:
            value = to_signed(value, width)
        phv[LAYOUT.slot(ir.FieldRef(0, n))] = value
    return phv


# --- the naive evaluator ------------------------------------------------------------------------


def power_of_2(exponent: int) -> int:
    return int("1" + "0" * exponent, 2)


def binary(op: str, x: int, y: int) -> int:
    match op:
        case "+":
            return x + y
        case "-":
            return x - y
        case "*":
            return x * y
        case "&":
            return x & y
        case "|":
            return x | y
        case "^":
            return x ^ y
        case "<<":
            return x * power_of_2(y) if 0 <= y < 65536 else 0
        case ">>":
            return x // power_of_2(y) if 0 <= y < 65536 else (0 if x >= 0 or y < 0 else -1)
        case "/":
            return x // y if y > 0 else 0
        case "%":
            return x % y if y > 0 else 0
        case "two_comp_mod":
            low = x % power_of_2(y)
            return low - power_of_2(y) if low >= power_of_2(y - 1) else low
        case "sat_cast":
            return sorted((-(power_of_2(y - 1)), x, power_of_2(y - 1) - 1))[1]
        case "usat_cast":
            return sorted((0, x, power_of_2(y) - 1))[1]
    raise AssertionError(op)


def data(e: ir.DataExpr, phv: Phv) -> int:
    match e:
        case ir.Const(value):
            return value
        case ir.FieldRef(_, field):
            return phv[LAYOUT.slot(ir.FieldRef(0, field))]
        case ir.Local(index):
            return LOCALS[index]
        case ir.Invert(x):
            return -data(x, phv) - 1
        case ir.BoolToData(b):
            return int(boolean(b, phv))
        case ir.ChooseData(c, x, y):
            return data(x, phv) if boolean(c, phv) else data(y, phv)
        case ir.Binary(op, left, right):
            return binary(op, data(left, phv), data(right, phv))
    raise AssertionError(e)


def compare(op: str, x: int, y: int) -> bool:
    return {
        "==": x == y,
        "!=": x != y,
        "<": x < y,
        ">": x > y,
        "<=": x <= y,
        ">=": x >= y,
    }[op]


def boolean(e: ir.BoolExpr, phv: Phv) -> bool:
    match e:
        case ir.BoolConst(value):
            return value
        case ir.Not(b):
            return not boolean(b, phv)
        case ir.DataToBool(x):
            return data(x, phv) != 0
        case ir.Compare(op, left, right):
            return compare(op, data(left, phv), data(right, phv))
        case ir.Logic(op, left_b, right_b):
            p, q = boolean(left_b, phv), boolean(right_b, phv)
            return {"and": p and q, "or": p or q, "==": p == q, "!=": p != q}[op]
        case ir.ChooseBool(c, p_, q_):
            return boolean(p_, phv) if boolean(c, phv) else boolean(q_, phv)
    raise AssertionError(e)


LEAVES: st.SearchStrategy[ir.DataExpr] = st.one_of(
    st.integers(-300, 300).map(ir.Const),
    st.integers(0, 1 << 50).map(ir.Const),
    st.integers(0, len(FIELDS) - 1).map(lambda n: ir.FieldRef(0, n)),
    st.integers(0, len(LOCALS) - 1).map(ir.Local),
)


def _grow(children: st.SearchStrategy[ir.DataExpr]) -> st.SearchStrategy[ir.DataExpr]:
    compare = st.builds(
        ir.Compare, st.sampled_from(["==", "!=", "<", ">", "<=", ">="]), children, children
    )
    condition = st.one_of(
        compare,
        st.builds(ir.Not, compare),
        st.builds(ir.DataToBool, children),
        st.builds(ir.Logic, st.sampled_from(["and", "or", "==", "!="]), compare, compare),
    )
    small = st.one_of(st.integers(-2, 70).map(ir.Const), st.just(ir.FieldRef(0, 1)))
    return st.one_of(
        st.builds(ir.Binary, st.sampled_from(["+", "-", "&", "|", "^"]), children, children),
        st.builds(ir.Binary, st.sampled_from(["*", "/", "%"]), children, LEAVES),
        st.builds(ir.Binary, st.sampled_from(["<<", ">>"]), children, small),
        st.builds(
            ir.Binary,
            st.sampled_from(["two_comp_mod", "sat_cast", "usat_cast"]),
            children,
            st.integers(1, 64).map(ir.Const),
        ),
        st.builds(ir.Invert, children),
        st.builds(ir.BoolToData, condition),
        st.builds(ir.ChooseData, condition, children, children),
    )


TREES = st.recursive(LEAVES, _grow, max_leaves=12)
VALUES = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, (1 << 300) - 1)),
    min_size=len(FIELDS),
    max_size=len(FIELDS),
)


@settings(max_examples=400, deadline=None)
@given(tree=TREES, values=VALUES)
def test_value_of_an_expression_is_exact(tree: ir.DataExpr, values: list[int]) -> None:
    phv = packet(values)
    assert ACTIONS.expressions.data(tree)(phv, LOCALS) == data(tree, phv)


@settings(max_examples=400, deadline=None)
@given(tree=TREES, values=VALUES, target=st.integers(0, len(FIELDS) - 1))
def test_assignment_cuts_to_the_field(tree: ir.DataExpr, values: list[int], target: int) -> None:
    phv = packet(values)
    width, signed = FIELDS[target]
    expected = data(tree, phv) % 2**width
    if signed and expected >= 2 ** (width - 1):
        expected -= 2**width
    others = phv[:]
    ACTIONS.assign(ir.FieldRef(0, target), tree)(phv, LOCALS)
    slot = LAYOUT.slot(ir.FieldRef(0, target))
    assert phv[slot] == expected
    others[slot] = expected
    assert phv == others


@settings(max_examples=300, deadline=None)
@given(tree=TREES, values=VALUES)
def test_known_width_of_an_expression_is_true(tree: ir.DataExpr, values: list[int]) -> None:
    bits = ACTIONS.expressions.bits(tree)
    if bits is not None:
        assert 0 <= data(tree, packet(values)) < 2**bits


def test_shift_by_a_huge_amount_takes_no_memory() -> None:
    tree = ir.Binary("<<", ir.Const(1), ir.Local(2))
    assert ACTIONS.expressions.data(tree)(packet([0] * len(FIELDS)), LOCALS) == 0


def test_push_and_pop_move_the_size_of_a_stack() -> None:
    program = loader.load_file(PROGRAMS / "headers.json")
    layout = Layout(program)
    actions = actions_for(program, layout)
    labels = ir.StackOf([s.name for s in program.stacks].index("labels"))
    size = actions.expressions.data(ir.StackSize(labels))
    last = actions.expressions.data(ir.LastIndex(labels))
    phv = layout.empty[:]
    sizes: list[tuple[int, int]] = []
    for statement in (
        ir.Push(labels, ir.Const(2)),
        ir.Push(labels, ir.Const(2)),
        ir.Pop(labels, ir.Const(1)),
        ir.Pop(labels, ir.Const(5)),
    ):
        actions.statement(statement)(phv, ())
        sizes.append((size(phv, ()), last(phv, ())))
    assert sizes == [(2, 1), (3, 2), (2, 1), (0, -1)]


# --- packets ----------------------------------------------------------------------------------


@st.composite
def headers(draw: st.DrawFn) -> ir.Header:
    """A header of random fields that fill whole bytes."""
    widths = draw(
        st.lists(
            st.one_of(st.integers(1, 40), st.sampled_from([8, 16, 64, 512, 2048])),
            min_size=1,
            max_size=8,
        )
    )
    widths.append(8 - sum(widths) % 8 if sum(widths) % 8 else 8)
    fields = tuple(
        ir.Field(f"f{n}", w, signed=w > 1 and draw(st.booleans())) for n, w in enumerate(widths)
    )
    return ir.Header("h", "h_t", fields, False)


@settings(max_examples=150, deadline=None)
@given(header=headers(), data_=st.data())
def test_fields_come_out_of_a_packet_and_go_back(header: ir.Header, data_: st.DataObject) -> None:
    state = ir.ParserState("start", (ir.Extract(0),), (), (), (), None)
    program = dataclasses.replace(
        header_space(header),
        parser=ir.Parser("parser", (state,), 0),
        deparser=ir.Deparser("deparser", (), (0,)),
    )
    layout = Layout(program)
    actions = actions_for(program, layout)
    length = header.fixed_bits // 8
    frame = data_.draw(st.binary(min_size=length, max_size=length + 5))
    phv = layout.empty[:]
    at = Parser(actions).parse(phv, frame)
    assert at == length
    bits = f"{int.from_bytes(frame[:length]):0{8 * length}b}"
    for n, f in enumerate(header.fields):
        value = int(bits[: f.width], 2)
        bits = bits[f.width :]
        assert phv[layout.slot(ir.FieldRef(0, n))] == (
            to_signed(value, f.width) if f.signed else value
        )
    assert Deparser(actions).deparse(phv, frame, at) == frame

    short = layout.empty[:]
    parser = Parser(actions)
    assert parser.parse(short, frame[: length - 1]) == 0
    assert short[PARSER_ERROR] == parser.errors.packet_too_short
    assert short[layout.valid[0]] == 0


def test_first_transition_that_matches_is_taken() -> None:
    header = ir.Header("h", "h_t", (ir.Field("a", 8),), False)
    key: tuple[ir.KeyPart, ...] = (ir.Lookahead(0, 8),)
    skip = tuple(
        ir.ParserState(f"skip{n}", (ir.Advance(ir.Const(8 * n)),), (), (), (), None)
        for n in range(4)
    )
    for mask in (0xFF, 0x0F):
        transitions = (
            ir.Transition(5, mask, 2),
            ir.Transition(5, mask, 3),
            ir.Transition(7, mask, 4),
        )
        start = ir.ParserState("start", (), key, (8,), transitions, 1)
        program = dataclasses.replace(
            header_space(header), parser=ir.Parser("parser", (start, *skip), 0)
        )
        layout = Layout(program)
        parser = Parser(actions_for(program, layout))
        positions = [
            parser.parse(layout.empty[:], bytes([first, 0, 0, 0])) for first in (5, 7, 6, 0x15)
        ]
        assert positions == [1, 3, 0, 0 if mask == 0xFF else 1]


@pytest.mark.parametrize(
    ("value", "width", "signed"),
    [(0, 8, 0), (127, 8, 127), (128, 8, -128), (255, 8, -1), (256, 8, 0), (-129, 8, 127)],
)
def test_to_signed(value: int, width: int, signed: int) -> None:
    assert to_signed(value, width) == signed
