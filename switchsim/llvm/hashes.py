"""Hashes and checksums in IR: BMv2's algorithms, and the bytes that they run over.

The algorithms are those of `hashing`, each a function of the module that is made when it is asked
for. They take (pointer, length) and rely on 8 zero bytes behind the data. Packing puts fields side
by side without padding, leaves out those of invalid headers, and fills up the last byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcast.native.subset import U32, U64, Ptr, compile_into, native
from kvcast.native.writer import TRUE, Function, Module, Value, i64, integer
from kvcast.switchsim import hashing, ir
from kvcast.switchsim.ir import UnsupportedConstruct
from kvcast.switchsim.llvm.layout import NATIVE_BITS, Place
from kvcast.switchsim.llvm.scope import Scope

SPARE_BYTES = 24
"""Behind the data: zero bytes for the algorithms, and room for writing in large units."""

_PRIME_1 = 0x9E3779B185EBCA87
_PRIME_2 = 0xC2B2AE3D27D4EB4F
_PRIME_3 = 0x165667B19E3779F9
_PRIME_4 = 0x85EBCA77C2B2AE63
_PRIME_5 = 0x27D4EB2F165667C5


class Hashes:
    """The algorithms of one module."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._made: dict[str, Function] = {}
        reflected = {
            "crc16": (16, 0x8005, 0, 0),
            "crc16_custom": (16, 0x8005, 0, 0),
            "crc32": (32, 0x04C11DB7, 0xFFFFFFFF, 0xFFFFFFFF),
            "crc32_custom": (32, 0x04C11DB7, 0xFFFFFFFF, 0xFFFFFFFF),
            "crc64_custom": (64, 0x1B, 0, 0),
        }
        self._writers: dict[str, Callable[[Function], None]] = {
            "hash_ex": _hash_ex,
            "crcCCITT": lambda f: _plain_crc(f, 16, 0x1021, 0xFFFF),
            "crc8_custom": lambda f: _plain_crc(f, 8, 0x07, 0),
            "identity": _identity,
            "xor16": lambda f: _xor(f, 2),
            "xor32": lambda f: _xor(f, 4),
        }
        for name, (width, polynomial, init, final) in reflected.items():
            self._writers[name] = _reflected_crc(width, polynomial, init, final)

    def algorithm(self, name: str, where: str) -> Function:
        known = {"xxh64": xxh64, "bmv2_hash": xxh64, "cksum16": csum16, "csum16": csum16}.get(name)
        if known is not None:
            if known.__name__ not in self._made:
                (function,) = compile_into(self._module, [known], exported=False)
                self._made[known.__name__] = function
            return self._made[known.__name__]
        if name not in self._made:
            write = self._writers.get(name)
            if write is None:
                raise UnsupportedConstruct(f"hash algorithm {name!r} in compiled code", where)
            f = self._module.function(
                f"hash.{name}", "i64", [("ptr readonly", "data"), ("i64", "length")]
            )
            write(f)
            self._made[name] = f
        return self._made[name]

    def run(self, scope: Scope, name: str, state: str, data: Value, length: Value) -> Value:
        """The hash as 64 bits. `state` is the word of the context in which a round robin counts."""
        f = scope.f
        if name == "round_robin":
            count = f.load(64, scope.word(state), 8)
            f.store(f.add(count, i64(1)), scope.word(state), 8)
            return count
        return f.call(self.algorithm(name, state), [data, length])


# --- packing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of bits of one header, or a constant."""

    header: int | None
    place: Place | None
    width: int
    constant: int = 0

    @property
    def varbit(self) -> bool:
        return self.place is not None and self.place.varbit


class Packer:
    """Writes fields side by side into memory."""

    def __init__(self, scope: Scope, items: Sequence[ir.PackedItem]) -> None:
        self._scope = scope
        self._f = scope.f
        program, layout = scope.program, scope.layout
        pieces: list[_Piece] = []
        for item in items:
            if isinstance(item, ir.PackedConst):
                value = item.value & ((1 << item.width) - 1)
                pieces.append(_Piece(None, None, item.width, value))
                continue
            h = program.headers[item.header]
            refs = [item] if isinstance(item, ir.FieldRef) else [
                ir.FieldRef(item.header, n) for n in range(len(h.fields))
            ]  # fmt: skip
            header = None if h.metadata else item.header
            for ref in refs:
                place = layout.place(ref)
                if place.width:
                    pieces.append(_Piece(header, place, place.width))
        self._runs: list[list[_Piece]] = []
        for piece in pieces:
            if not self._runs or self._runs[-1][0].header != piece.header:
                self._runs.append([piece])
                continue
            last = self._runs[-1][-1]
            if _adjoin(last, piece):
                assert last.place is not None
                width = last.width + piece.width
                place = Place(last.place.offset, last.place.bit, width, False, False)
                self._runs[-1][-1] = _Piece(last.header, place, width)
            else:
                self._runs[-1].append(piece)
        self.max_bytes = (sum(p.width for p in pieces) + 7) // 8
        fixed = [sum(p.width for p in run if not p.varbit) for run in self._runs]
        self._aligned = all(bits % 8 == 0 for bits in fixed[:-1]) and not any(
            p.varbit and sum(q.width for q in run[:n] if not q.varbit) % 8
            for run in self._runs
            for n, p in enumerate(run)
        )

    def pack(self, buffer: Value) -> Value:
        """Write to the buffer (max_bytes + SPARE_BYTES long); gives the length in bytes."""
        return self._pack_bytes(buffer) if self._aligned else self._pack_bits(buffer)

    def _finish(self, buffer: Value, length: Value) -> Value:
        self._f.store(i64(0), self._f.at(buffer, length))
        return length

    def _pack_bytes(self, buffer: Value) -> Value:
        """Runs begin on whole bytes."""
        f, scope = self._f, self._scope
        at: Value = i64(0)
        for run in self._runs:
            header = run[0].header
            if header is None:
                at = self._write_run(buffer, at, run)
                continue
            variable = f.variable(64)
            f.store(at, variable, 8)
            with f.when(scope.is_valid(header)):
                f.store(self._write_run(buffer, at, run), variable, 8)
            at = f.load(64, variable, 8)
        return self._finish(buffer, at)

    def _write_run(self, buffer: Value, at: Value, run: Sequence[_Piece]) -> Value:
        f, scope = self._f, self._scope
        held: Value | None = None  # bits that do not fill a byte yet
        bits = 0
        for piece in run:
            if piece.varbit:
                assert piece.place is not None
                length = scope.varbit_bytes(piece.place)
                f.copy(f.at(buffer, at), scope.slot(piece.place.offset), length)
                at = f.add(at, length)
                continue
            width, place = piece.width, piece.place
            if held is None and place is not None and not place.native and not place.signed:
                whole = width // 8 if place.bit == 0 else 0
                if whole and width % 8 == 0:
                    f.copy(f.at(buffer, at), scope.slot(place.offset), whole)
                    at = f.add(at, i64(whole))
                    continue
            value = self._piece_value(piece)
            if held is None:
                held, bits = f.resize(value, max(8, width)), width
            else:
                both = max(8, bits + width)
                held = f.or_(
                    f.shl(f.resize(held, both), width), f.resize(self._cut(value, width), both)
                )
                bits += width
            if bits % 8 == 0:
                f.store_network(f.resize(held, bits), f.at(buffer, at), bits // 8)
                at = f.add(at, i64(bits // 8))
                held, bits = None, 0
        if held is not None:
            padded = bits + -bits % 8
            value = f.shl(f.resize(held, padded), padded - bits)
            f.store_network(value, f.at(buffer, at), padded // 8)
            at = f.add(at, i64(padded // 8))
        return at

    def _cut(self, value: Value, width: int) -> Value:
        if value.bits <= width:
            return value
        return self._f.and_(value, integer(value.bits, (1 << width) - 1))

    def _piece_value(self, piece: _Piece) -> Value:
        """Exactly the piece's bits, zeros above."""
        if piece.place is None:
            return integer(max(8, piece.width), piece.constant)
        value = self._scope.load_field(piece.place).value
        return self._cut(value, piece.width)

    def _pack_bits(self, buffer: Value) -> Value:
        """Bit by bit: validity of headers decides on where a byte begins."""
        f, scope = self._f, self._scope
        f.fill(buffer, 0, self.max_bytes + SPARE_BYTES)
        cursor = f.variable(64)
        f.store(i64(0), cursor, 8)

        def append(value: Value, width: int) -> None:
            """Up to 64 bits."""
            at = f.load(64, cursor, 8)
            address = f.at(buffer, f.lshr(at, 3))
            within = f.zext(f.and_(at, i64(7)), 128)
            wide = f.shl(f.zext(value, 128), 128 - width)
            old = f.load_network(address, 16)
            f.store_network(f.or_(old, f.lshr(wide, within)), address, 16)
            f.store(f.add(at, i64(width)), cursor, 8)

        for run in self._runs:
            with f.when(TRUE if run[0].header is None else scope.is_valid(run[0].header)):
                for piece in run:
                    if piece.varbit:
                        assert piece.place is not None
                        start = scope.slot(piece.place.offset)
                        with f.times(scope.varbit_bytes(piece.place)) as n:
                            append(f.zext(f.load(8, f.at(start, n)), 64), 8)
                        continue
                    value = self._piece_value(piece)
                    left = piece.width
                    while left > 0:
                        part = min(64, left)
                        left -= part
                        chunk = f.resize(f.lshr(f.resize(value, max(value.bits, 64)), left), 64)
                        append(self._cut(chunk, part), part)
        return f.lshr(f.add(f.load(64, cursor, 8), i64(7)), 3)


def _adjoin(a: _Piece, b: _Piece) -> bool:
    """Does b follow a in the bytes of one packet header?"""
    if a.place is None or b.place is None or a.header is None or a.varbit or b.varbit:
        return False
    if a.place.native or b.place.native or a.place.signed or b.place.signed:
        return False
    if a.width + b.width > NATIVE_BITS and (a.place.bit or a.width % 8):
        return False  # better two pieces than a wide number
    return 8 * a.place.offset + a.place.bit + a.width == 8 * b.place.offset + b.place.bit


# --- algorithms ---------------------------------------------------------------------------------


@native
def csum16(data: Ptr[U32], length: U64) -> U64:
    """RFC 1071, which does not mind the order of bytes: the machine's words, swapped at the end.

    It runs twice a frame, so it is short enough for LLVM to inline, and folds without a loop: the
    upper half of a number and its halves swapped is their sum with the end-around carry."""
    total = 0
    for n in range((length + 3) // 4):
        total += data[n]
    total = (total + (total << 32 | total >> 32)) >> 32
    total = (total & 0xFFFF) + (total >> 16)
    total = ~(total + (total >> 16))
    return (total & 0xFF) << 8 | (total >> 8) & 0xFF


def _identity(f: Function) -> None:
    data, length = f.arguments
    short = f.compare("ult", length, i64(8))
    bytes_ = f.select(short, length, i64(8))
    value = f.load_network(data, 8)
    empty = f.compare("eq", bytes_, i64(0))
    unused = f.and_(f.sub(i64(64), f.shl(bytes_, 3)), i64(63))
    f.ret(f.select(empty, i64(0), f.lshr(value, unused)))


def _xor(f: Function, size: int) -> None:
    data, length = f.arguments
    result = f.variable(64)
    f.store(i64(0), result, 8)
    shift = size.bit_length() - 1
    with f.times(f.lshr(f.add(length, i64(size - 1)), shift)) as n:
        word = f.zext(f.load_network(f.at(data, f.shl(n, shift)), size), 64)
        f.store(f.xor(f.load(64, result, 8), word), result, 8)
    f.ret(f.load(64, result, 8))


def _hash_ex(f: Function) -> None:
    data, length = f.arguments
    h = f.variable(32)
    f.store(integer(32, 2166136261), h, 4)
    with f.times(length) as n:
        byte = f.sext(f.load(8, f.at(data, n)), 32)
        f.store(f.mul(f.xor(f.load(32, h, 4), byte), integer(32, 16777619)), h, 4)
    value = f.load(32, h, 4)
    value = f.add(value, f.shl(value, 13))
    value = f.xor(value, f.lshr(value, 7))
    value = f.add(value, f.shl(value, 3))
    value = f.xor(value, f.lshr(value, 17))
    f.ret(f.zext(f.add(value, f.shl(value, 5)), 64))


def _reflected_crc(
    width: int, polynomial: int, init: int, final: int
) -> Callable[[Function], None]:
    values = hashing.crc_table(width, polynomial, reflected=True)
    start = hashing.reflect(init, width)

    def write(f: Function) -> None:
        crc = _table_crc(f, values, start, 0, lambda r: f.lshr(r, 8))
        f.ret(f.xor(crc, i64(final)))

    return write


def _plain_crc(f: Function, width: int, polynomial: int, init: int) -> None:
    """The highest bit first."""
    values, ones = hashing.crc_table(width, polynomial, reflected=False), (1 << width) - 1
    f.ret(_table_crc(f, values, init, width - 8, lambda r: f.and_(f.shl(r, 8), i64(ones))))


def _table_crc(
    f: Function, values: Sequence[int], start: int, low: int, shift: Callable[[Value], Value]
) -> Value:
    """The register after all bytes. The eight bits from `low` on leave it with each byte, by
    `shift`, and what `values` has for them comes in."""
    data, length = f.arguments
    table = f.module.words(values, 64)
    crc = f.variable(64)
    f.store(i64(start), crc, 8)
    with f.times(length) as n:
        r = f.load(64, crc, 8)
        byte = f.zext(f.load(8, f.at(data, n)), 64)
        index = f.and_(f.xor(f.lshr(r, low), byte), i64(255))
        entry = f.load(64, f.at(table, f.shl(index, 3)), 8)
        f.store(f.xor(entry, shift(r)), crc, 8)
    return f.load(64, crc, 8)


@native
def rotate(value: U64, by: U64) -> U64:
    return (value << by) | (value >> (64 - by))


@native
def xxh_round(acc: U64, lane: U64) -> U64:
    return rotate(acc + lane * _PRIME_2, 31) * _PRIME_1


@native
def xxh_merge(h: U64, acc: U64) -> U64:
    return (h ^ xxh_round(0, acc)) * _PRIME_1 + _PRIME_4


@native
def xxh64(data: Ptr[U64], length: U64) -> U64:
    """XXH64 with seed 0."""
    words = length // 8
    at = 0
    h = _PRIME_5
    if length >= 32:
        a = _PRIME_1 + _PRIME_2
        b = _PRIME_2
        c = 0
        d = 0 - _PRIME_1
        while at + 4 <= words:
            a = xxh_round(a, data[at])
            b = xxh_round(b, data[at + 1])
            c = xxh_round(c, data[at + 2])
            d = xxh_round(d, data[at + 3])
            at += 4
        h = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18)
        h = xxh_merge(xxh_merge(xxh_merge(xxh_merge(h, a), b), c), d)
    h += length
    while at < words:
        h = rotate(h ^ xxh_round(0, data[at]), 27) * _PRIME_1 + _PRIME_4
        at += 1
    rest = data[words]  # with the zero bytes behind the data
    if length & 4:
        h = rotate(h ^ (rest & 0xFFFFFFFF) * _PRIME_1, 23) * _PRIME_2 + _PRIME_3
        rest >>= 32
    for _ in range(length & 3):
        h = rotate(h ^ (rest & 0xFF) * _PRIME_5, 11) * _PRIME_1
        rest >>= 8
    h = (h ^ (h >> 33)) * _PRIME_2
    h = (h ^ (h >> 29)) * _PRIME_3
    return h ^ (h >> 32)
