"""Compiled expressions, for random trees over fields of many widths.

Oracle: the reference engine's `Expressions`, whose arithmetic is Python's exact integers.
"""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kvcast.native import jit
from kvcast.native.writer import Module, integer
from kvcast.switchsim import ir, loader
from kvcast.switchsim.difftest import programs
from kvcast.switchsim.ir import UnsupportedConstruct
from kvcast.switchsim.llvm.expressions import Expressions
from kvcast.switchsim.llvm.layout import ContextLayout, PhvLayout
from kvcast.switchsim.llvm.scope import Scope, Shared
from kvcast.switchsim.reference.expressions import Expressions as Reference
from kvcast.switchsim.reference.phv import Layout

WIDTHS = (1, 3, 8, 13, 16, 31, 32, 33, 48, 63, 64, 65, 100, 128, 130, 256)
WIDEST = 4096
"""Bits in which results are compared; trees whose values could be wider are left out."""


def _program() -> ir.Program:
    """One metadata header with two fields of each width, the second signed."""
    fields = [ir.Field("flag", 1)]
    for width in WIDTHS:
        fields += [ir.Field(f"u{width}", width), ir.Field(f"s{width}", width, signed=width > 1)]
    import json
    import random

    base = loader.load(json.dumps(programs.generate(random.Random(1))))
    header = ir.Header("m", "m_t", tuple(fields), True)
    return ir.Program(
        **{
            **vars(base),
            "headers": (header,),
            "stacks": (),
            "unions": (),
            "union_stacks": (),
            "registers": (),
        }
    )


PROGRAM = _program()
FIELDS = PROGRAM.headers[0].fields

leaves: st.SearchStrategy[ir.DataExpr] = st.one_of(
    st.builds(ir.FieldRef, st.just(0), st.integers(0, len(FIELDS) - 1)),
    st.builds(ir.Const, st.integers(-5, 300)),
    st.builds(ir.Const, st.integers(0, 1 << 130)),
)


def _deeper(inner: st.SearchStrategy[ir.DataExpr]) -> st.SearchStrategy[ir.DataExpr]:
    comparison = st.builds(
        ir.Compare, st.sampled_from(["==", "!=", "<", ">", "<=", ">="]), inner, inner
    )
    mask = st.sampled_from([(1 << w) - 1 for w in WIDTHS]).map(ir.Const)
    cast = st.sampled_from(["two_comp_mod", "sat_cast", "usat_cast"])
    amount = st.one_of(
        st.integers(-1, 140).map(ir.Const),
        st.builds(ir.Binary, st.just("&"), inner, st.sampled_from([7, 63, 127]).map(ir.Const)),
    )
    return st.one_of(
        st.builds(ir.Binary, st.sampled_from("+-*&|^/%"), inner, inner),
        st.builds(ir.Binary, st.just("&"), inner, mask),
        st.builds(ir.Binary, cast, inner, st.integers(1, 140).map(ir.Const)),
        st.builds(ir.Binary, st.sampled_from(["<<", ">>"]), inner, amount),
        st.builds(ir.Invert, inner),
        st.builds(ir.BoolToData, comparison),
        st.builds(ir.ChooseData, comparison, inner, inner),
    )


trees = st.recursive(leaves, _deeper, max_leaves=8)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees, st.sampled_from(WIDTHS), st.data())
def test_compiled_expression_gives_the_number_that_the_reference_gives(
    tree: ir.DataExpr, width: int, data: st.DataObject
) -> None:
    phv_layout = PhvLayout(PROGRAM)
    context = ContextLayout((), phv_layout)
    module = Module()
    f = module.function("run", "void", [("ptr", "phv"), ("ptr", "out")], exported=True)
    phv, out = f.arguments
    scope = Scope(Shared(PROGRAM, phv_layout, context, False, 511), f, phv, phv)
    expressions = Expressions(scope)
    try:
        number = expressions.exact(tree)
        low = expressions.modulo(tree, 64) if width <= 64 else expressions.low(tree, width)
    except UnsupportedConstruct:
        assume(False)
        return
    assume(number.value.bits <= WIDEST)
    f.store(integer(64, int(number.low < 0)), out)
    wide = expressions.extend(number, WIDEST)
    f.store(wide, f.at(out, 8))
    f.store(f.resize(low, 256), f.at(out, 8 + WIDEST // 8))
    f.ret()
    library = jit.load("", module.text, ["run"], None)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(library.addresses["run"])

    layout = Layout(PROGRAM)
    expected = Reference(layout, []).data(tree)
    for _ in range(6):
        slots = layout.empty[:]
        memory = bytearray(phv_layout.bytes)
        for n, field in enumerate(FIELDS):
            bits = data.draw(
                st.one_of(
                    st.integers(0, (1 << field.width) - 1),
                    st.sampled_from([0, 1, (1 << field.width) - 1, 1 << (field.width - 1)]),
                )
            )
            place = phv_layout.place(ir.FieldRef(0, n))
            size = place.end - place.offset
            order = "little" if place.native else "big"
            memory[place.offset : place.end] = bits.to_bytes(size, order)  # type: ignore[arg-type]
            half = 1 << (field.width - 1)
            signed = field.signed and bits & half
            slots[layout.slot(ir.FieldRef(0, n))] = bits - 2 * half if signed else bits
        packet = ctypes.create_string_buffer(bytes(memory), len(memory))
        result = ctypes.create_string_buffer(8 + WIDEST // 8 + 32)
        run(ctypes.addressof(packet), ctypes.addressof(result))
        want = expected(slots, ())
        assert number.low <= want <= number.high
        got = int.from_bytes(result.raw[8 : 8 + WIDEST // 8], "little", signed=number.low < 0)
        assert got == want
        cut = int.from_bytes(result.raw[8 + WIDEST // 8 :], "little")
        assert cut % (1 << width) == want % (1 << width)
