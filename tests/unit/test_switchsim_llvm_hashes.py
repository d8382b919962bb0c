"""Hash algorithms in compiled code.

Oracle: `hashing`, which is tested against published check values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.native import jit
from kvcast.native.writer import Module
from kvcast.switchsim import hashing
from kvcast.switchsim.ir import UnsupportedConstruct
from kvcast.switchsim.llvm.hashes import Hashes

COUNTING = {"round_robin", "round_robin_consistent"}
ALGORITHMS = sorted(hashing.ALGORITHMS - COUNTING)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Callable[[bytes], int]]:
    module = Module()
    hashes = Hashes(module)
    for name in ALGORITHMS:
        f = module.function(
            f"export.{name}", "i64", [("ptr", "data"), ("i64", "length")], exported=True
        )
        f.ret(f.call(hashes.algorithm(name, "a test"), f.arguments))
    exports = [f"export.{name}" for name in ALGORITHMS]
    library = jit.load("hashes", module.text, exports, None)
    call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64)

    def function(name: str) -> Callable[[bytes], int]:
        native = call(library.addresses[f"export.{name}"])
        # The library must live as long as its functions.
        return lambda data, keep=library: native(data + bytes(8), len(data))  # type: ignore[misc]

    return {name: function(name) for name in ALGORITHMS}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_compiled_algorithm_gives_what_the_reference_gives(
    name: str, compiled: dict[str, Callable[[bytes], int]]
) -> None:
    reference, native = hashing.make(name), compiled[name]

    @settings(max_examples=60, deadline=None)
    @given(st.one_of(st.binary(max_size=40), st.binary(min_size=60, max_size=140)))
    def check(data: bytes) -> None:
        assert native(data) == reference(data)

    check()
    for length in range(70):
        assert native(bytes(length)) == reference(bytes(length)), length
        assert native(b"\xff" * length) == reference(b"\xff" * length), length


def test_algorithm_that_is_not_compiled_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedConstruct, match="round_robin_consistent"):
        Hashes(Module()).algorithm("round_robin_consistent", "a test")
