"""The compiled subset of Python.

Oracle: Python's own integers, cut to 64 bits, and ctypes' layout of C structures. Cannot see: that
the machine code is fast.
"""

from __future__ import annotations

import ctypes
import random
from typing import Annotated, Any

import pytest
from kvcast.native.linux import EpollEvent, MsgHdr, SockAddrIn, TpacketHeader
from kvcast.native.subset import (
    I32,
    I64,
    U8,
    U16,
    U64,
    Inline,
    Library,
    NativeError,
    Ptr,
    Struct,
    address_of,
    bytes_at,
    copy,
    ctypes_of,
    fill,
    indirect,
    module_of,
    move,
    native,
    signed,
    size_of,
    unsigned,
)
from kvcast.switchsim.llvm.abi import Desc, Outbox

MASK = (1 << 64) - 1
LIMIT = 10


class Pair(Struct):
    small: U8
    wide: U64
    middle: U16
    negative: I32
    places: Annotated[Ptr[U16], Inline(4)]
    other: Pair
    inner: Annotated[Ptr[Desc], Inline(2)]


@native
def mix(a: U64, b: U64) -> U64:
    return (a + b * 3 - (a ^ b)) // ((b & 0xFF) + 1) + (a % 7) * (b >> 5) + (a << 3) | ~b & 1


@native
def compare(a: I64, b: I64) -> I32:
    if a < b and not (b == 3):  # noqa: SIM201
        return -1
    if b in (90, LIMIT) and a not in (1, 2):
        return 5
    if a == b or (a > 100 and b <= 50):
        return 0
    return 1 if a != 7 else -7


@native
def loops(n: U64) -> U64:
    """The sum of some numbers below n, in three kinds of loops."""
    total = 0
    for i in range(2, n):
        if i == 5:
            continue
        if i > LIMIT:
            break
        for j in range(i):
            total += j
    count = 0 + n
    while count:
        count -= 1
        total += 1
    while True:
        if total > 1000:
            return total
        total += 333


def loops_in_python(n: int) -> int:
    total = 0
    for i in range(2, n):
        if i == 5:
            continue
        if i > LIMIT:
            break
        total += sum(range(i))
    total += n
    while total <= 1000:
        total += 333
    return total


@native
def fields(pair: Pair, value: U64) -> U64:
    pair.small = value
    pair.wide = value
    pair.middle += value
    pair.negative = -5
    pair.places[value % 4] = value
    pair.inner[1].port = 77
    pair.other.wide = address_of(pair)
    again = Pair.at(pair.other.wide)
    return again.small + again.inner[1].port + unsigned(signed(0) + pair.negative) + size_of(Pair)


@indirect
def call_mix(address: U64, a: U64, b: U64) -> U64:
    raise NotImplementedError


@native
def through(address: U64, a: U64, b: U64) -> U64:
    return call_mix(address, a, b) + 1


@native
def memory(to: U64, source: U64, size: U64) -> U64:
    copy(to, source, size)
    move(to + 1, to, size)
    fill(to, 0x41, 1)
    return bytes_at(to)[1]


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(mix, compare, loops, fields, through, memory)


def test_arithmetic_is_that_of_64_bits(library: Library) -> None:
    rng = random.Random(1)
    call = library.call(mix)
    for _ in range(200):
        a, b = rng.getrandbits(rng.choice((3, 32, 64))), rng.getrandbits(rng.choice((3, 64)))
        expected = ((a + b * 3 - (a ^ b)) & MASK) // ((b & 0xFF) + 1)
        expected = (expected + (a % 7) * (b >> 5) + (a << 3)) & MASK | ~b & 1
        assert call(a, b) == expected, (a, b)


def test_comparisons_are_signed_where_the_numbers_are(library: Library) -> None:
    call = library.call(compare)
    cases = [(-1, 1), (2, 3), (5, 5), (101, 50), (7, 3), (8, 3), (-9, -9)]
    assert [call(a, b) for a, b in cases] == [-1, 1, 0, 0, -7, 1, 0]
    assert [call(a, b) for a, b in ((95, 90), (11, 10), (91, 89))] == [5, 5, 1]


@pytest.mark.parametrize("n", [0, 1, 3, 8, 100])
def test_loops_do_what_pythons_do(library: Library, n: int) -> None:
    assert library.call(loops)(n) == loops_in_python(n)


def test_fields_are_cut_to_their_size_and_structures_nest(library: Library) -> None:
    pair: Any = ctypes_of(Pair)()
    other: Any = ctypes_of(Pair)()
    pair.other = ctypes.addressof(other)
    pair.middle = 0xFFFF
    other.other = ctypes.addressof(pair)
    result = library.call(fields)(ctypes.addressof(pair), 0x1_0002)
    assert (pair.small, pair.wide, pair.middle, pair.negative) == (2, 0x1_0002, 1, -5)
    assert list(pair.places) == [0, 0, 2, 0]
    assert pair.inner[1].port == 77
    assert other.wide == ctypes.addressof(pair)
    assert result == 2 + 77 - 5 + ctypes.sizeof(ctypes_of(Pair))


def test_addresses_of_functions_can_be_called(library: Library) -> None:
    a, b = 0xFFFF_FFFF_FFFF_FFF1, 0x1234_5678_9ABC_DEF0
    expected = (library.call(mix)(a, b) + 1) & MASK
    assert library.call(through)(library.address(mix), a, b) == expected


def test_memory_is_moved(library: Library) -> None:
    source = ctypes.create_string_buffer(b"kvcast", 6)
    to = ctypes.create_string_buffer(8)
    assert library.call(memory)(ctypes.addressof(to), ctypes.addressof(source), 6) == ord("k")
    assert to.raw == b"Akvcast\0"


def test_the_boundary_to_the_engine_has_the_layout_that_compiled_programs_write() -> None:
    for struct, size, expected in (
        (Desc, 24, [0, 8, 12, 16, 20]),
        (Outbox, 48, [0, 8, 16, 24, 32, 36, 40]),
    ):
        mirror: Any = ctypes_of(struct)
        assert ctypes.sizeof(mirror) == size
        assert [getattr(mirror, name).offset for name, _ in mirror._fields_] == expected


def test_kernel_structures_have_the_kernels_sizes() -> None:
    # struct mmsghdr, sockaddr_in, tpacket2_hdr on 64-bit Linux
    assert [size_of(s) for s in (MsgHdr, SockAddrIn, TpacketHeader)] == [64, 16, 32]
    assert size_of(EpollEvent) in (12, 16)


# --- what is refused ----------------------------------------------------------------------------


@native
def mixed_signs(a: U64, b: I64) -> U64:
    return a + b


@native
def mixed_store(a: U64, b: I64) -> U64:
    total = 0 + a
    total = b
    return total  # noqa: RET504


@native
def unknown_name(a: U64) -> U64:
    return a + nothing  # type: ignore[name-defined, no-any-return] # noqa: F821


@native
def unknown_statement(a: U64) -> U64:
    with a:  # type: ignore[attr-defined]
        pass
    return a


@native  # noqa: RET503
def no_result(a: U64) -> U64:  # type: ignore[return]
    if a:
        return 1


@native
def float_number(a: U64) -> U64:
    return a + 1.5  # type: ignore[return-value]


@native
def missing_field(pair: Pair) -> U64:
    return pair.nowhere  # type: ignore[attr-defined, no-any-return]


@native
def python_call(a: U64) -> U64:
    return len([a])


@native
def without_annotation(a, b: U64) -> U64:  # type: ignore[no-untyped-def]
    return b


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (mixed_signs, "signed and unsigned"),
        (mixed_store, "signed and unsigned"),
        (unknown_name, "nothing has no value"),
        (unknown_statement, "no With"),
        (no_result, "without a result"),
        (float_number, "no number"),
        (missing_field, "no field nowhere"),
        (python_call, "len is not a compiled function"),
        (without_annotation, "a has no annotation"),
    ],
)
def test_what_is_not_in_the_subset_is_refused_by_name(function: Any, reason: str) -> None:
    with pytest.raises(NativeError, match=reason):
        module_of([function])
