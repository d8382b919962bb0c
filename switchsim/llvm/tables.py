"""Table lookup in IR, and the native functions that change what lookups see.

A lookup packs the key into 64-bit words and finds a record (`llvm.layout.RecordLayout`). What a
packet reads is published with one atomic store, so it sees an entry whole or not at all:

- a *hash block* is a power of two, less one, as uint64, then so many slots and one: uint32 numbers
  of records, 0 for a slot that was never used, DELETED for one that is free again; linear probing;
- an exact table's version is a hash block;
- an lpm or ternary table's version is a uint64 count and so many groups, one for each mask: key
  words of the mask, the best (priority, handle) in it, the address of its hash block. The groups
  stand in the order in which they are tried: the longest prefix, or the best rank, first;
- a range table's version is a uint64 count and so many uint32 records, the best rank first.

A table with few const entries has no version: its entries are compared with constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcast.native.subset import (
    I32,
    U32,
    U64,
    Ptr,
    atomic_store,
    compile_into,
    full_fence,
    native,
    u32_at,
    u64_at,
)
from kvcast.native.writer import NULL, TRUE, Block, Function, Module, Value, i64, integer
from kvcast.switchsim import ir
from kvcast.switchsim.control_plane.tables import canonical
from kvcast.switchsim.llvm.layout import NATIVE_BITS, RecordLayout, container_bits, stored_bytes
from kvcast.switchsim.llvm.scope import Scope

DELETED = 0xFFFFFFFF
INLINE_ENTRIES = 256
"""Const tables of up to this many entries are compared with constants."""

_MIX = 0x9E3779B97F4A7C15


def group_bytes(layout: RecordLayout) -> int:
    return 8 * layout.words + 24


def is_inline(table: ir.Table) -> bool:
    return table.const_entries and bool(table.key) and len(table.entries) <= INLINE_ENTRIES


# --- keys ---------------------------------------------------------------------------------------


def key_words(scope: Scope, table: ir.Table, words: int) -> list[Value]:
    """The key fields side by side, lowest word first. A field of an invalid header counts as 0."""
    f = scope.f
    result: list[Value] = [i64(0) for _ in range(words)]
    shift = sum(k.width for k in table.key)
    for k in table.key:
        shift -= k.width
        if k.width == 0:
            continue
        if k.field.field == ir.VALID:
            value = f.zext(scope.is_valid(k.field.header), 8)
        else:
            number = scope.load_field(scope.layout.place(k.field))
            value = number.value
            if number.low < 0:
                value = f.and_(value, integer(value.bits, (1 << k.width) - 1))
            if not scope.program.headers[k.field.header].metadata:
                zero = integer(value.bits, 0)
                value = f.select(scope.is_valid(k.field.header), value, zero)
        if k.mask is not None:
            value = f.and_(value, integer(value.bits, k.mask & ((1 << k.width) - 1)))
        if value.bits < 64:
            value = f.zext(value, 64)
        first, last = shift // 64, (shift + k.width - 1) // 64
        for word in range(first, last + 1):
            offset = shift - 64 * word
            if offset >= 0:
                part = f.shl(f.resize(value, 64), offset)
            else:
                part = f.resize(f.lshr(value, -offset), 64)
            result[word] = f.or_(part, result[word])
    return result


def split_words(value: int, words: int) -> list[int]:
    return [value >> (64 * n) & 0xFFFFFFFFFFFFFFFF for n in range(words)]


def _hash(f: Function, words: Sequence[Value]) -> Value:
    """Of a key; `record_hash` does the same to a record."""
    h = i64(_MIX)
    for word in words:
        h = f.mul(f.xor(h, word), i64(_MIX))
        h = f.xor(h, f.lshr(h, 29))
    h = f.mul(h, i64(_MIX))
    return f.xor(h, f.lshr(h, 32))


def _same(f: Function, words: Sequence[Value], record: Value) -> Value:
    difference: Value = i64(0)
    for n, word in enumerate(words):
        difference = f.or_(f.xor(f.load(64, f.at(record, 8 * n), 8), word), difference)
    return f.compare("eq", difference, i64(0))


# --- lookup -------------------------------------------------------------------------------------


class Lookup:
    """Compiles the lookup of one table. The block that is current goes on at a hit."""

    def __init__(self, scope: Scope, number: int, table: ir.Table, layout: RecordLayout) -> None:
        self.scope = scope
        self.f = scope.f
        self.number = number
        self.table = table
        self.layout = layout

    def record(self, index: Value) -> Value:
        """Address of record `index` (32 bits)."""
        f = self.f
        base = f.load_pointer(self.scope.word(f"table.{self.number}.records"))
        return f.at(base, f.mul(f.zext(index, 64), i64(self.layout.bytes)))

    def find(self, miss: Block) -> Value:
        """The record that matches."""
        words = key_words(self.scope, self.table, self.layout.words)
        version = self.f.acquire_pointer(self.scope.word(f"table.{self.number}.version"))
        match self.table.match:
            case "exact":
                return self._probe(version, words, miss)
            case "lpm":
                return self._groups(version, words, miss, ranked=False)
            case "ternary":
                return self._groups(version, words, miss, ranked=True)
            case _:
                return self._ranges(version, words, miss)

    def _probe(self, block: Value, words: Sequence[Value], miss: Block) -> Value:
        f = self.f
        mask, slots = f.load(64, block, 8), f.at(block, 8)
        place = f.variable(64)
        f.store(f.and_(_hash(f, words), mask), place, 8)
        probe, next_, found = f.new_block("probe"), f.new_block("next"), f.new_block("hit")
        f.branch(probe)
        f.start(probe)
        at = f.load(64, place, 8)
        index = f.acquire(32, f.at(slots, f.shl(at, 2)))
        f.leave_if(f.compare("eq", index, integer(32, 0)), miss)
        deleted = f.compare("eq", index, integer(32, DELETED))
        # A deleted slot is compared with record 0, which no key equals that is asked for here.
        record = self.record(f.select(deleted, integer(32, 0), index))
        same = f.and_(_same(f, words, record), f.not_(deleted))
        f.branch_if(same, found, next_)
        f.start(next_)
        # Slots never run out: a quarter of them has never been used.
        f.store(f.and_(f.add(at, i64(1)), mask), place, 8)
        f.branch(probe)
        f.start(found)
        return record

    def _groups(
        self, version: Value, words: Sequence[Value], miss: Block, *, ranked: bool
    ) -> Value:
        f, layout = self.f, self.layout
        size = group_bytes(layout)
        first = f.at(version, 8)
        end = f.at(first, f.mul(f.load(64, version, 8), i64(size)))
        place, best = f.variable("ptr"), f.variable("ptr")
        f.store(first, place, 8)
        f.store(NULL, best, 8)
        head, next_, done = f.new_block("group"), f.new_block("next"), f.new_block("done")
        f.branch(head)
        f.start(head)
        group, known = f.load_pointer(place), f.load_pointer(best)
        f.leave_if(f.compare("eq", group, end), done)
        some = f.compare("ne", known, NULL)
        if ranked:
            # The best of this group and all behind it is not better than what was found.
            with f.when(some):
                rank = f.at(group, 8 * layout.words)
                f.leave_if(self._better(known, layout.priority, rank, 0), done)
        masked = [f.and_(w, f.load(64, f.at(group, 8 * n), 8)) for n, w in enumerate(words)]
        block = f.acquire_pointer(f.at(group, 8 * layout.words + 16))
        record = self._probe(block, masked, next_)
        if ranked:
            with f.when(some):
                worse = self._better(known, layout.priority, record, layout.priority)
                f.leave_if(worse, next_)
        f.store(record, best, 8)
        f.branch(next_ if ranked else done)
        f.start(next_)
        f.store(f.at(group, size), place, 8)
        f.branch(head)
        f.start(done)
        found = f.load_pointer(best)
        f.leave_if(f.compare("eq", found, NULL), miss)
        return found

    def _better(self, a: Value, at: int, b: Value, bt: int) -> Value:
        """Is the rank (priority, handle) at a + at lower than that at b + bt?"""
        f = self.f
        pa, pb = f.load(64, f.at(a, at), 8), f.load(64, f.at(b, bt), 8)
        ha, hb = f.load(64, f.at(a, at + 8), 8), f.load(64, f.at(b, bt + 8), 8)
        less = f.compare("slt", pa, pb)
        tie = f.and_(f.compare("eq", pa, pb), f.compare("ult", ha, hb))
        return f.or_(less, tie)

    def _ranges(self, version: Value, words: Sequence[Value], miss: Block) -> Value:
        f, layout = self.f, self.layout
        found = f.new_block("hit")
        fields = [self.key_field(words, number) for number, _, _, _ in layout.ranges]
        with f.times(f.load(64, version, 8)) as n:
            record = self.record(f.load(32, f.at(f.at(version, 8), f.shl(n, 2)), 4))
            kept = [
                f.and_(word, f.load(64, f.at(record, layout.mask + 8 * at), 8))
                for at, word in enumerate(words)
            ]
            good = _same(f, kept, record)
            for value, (_, width, low, high) in zip(fields, layout.ranges, strict=True):
                ends = [self._end(record, offset, width) for offset in (low, high)]
                bits = max(value.bits, ends[0].bits)
                value = f.resize(value, bits)
                above = f.compare("uge", value, f.resize(ends[0], bits))
                below = f.compare("ule", value, f.resize(ends[1], bits))
                good = f.and_(good, f.and_(above, below))
            f.leave_if(good, found)
        f.branch(miss)
        f.start(found)
        return record

    def key_field(self, words: Sequence[Value], number: int) -> Value:
        """A key field out of the key."""
        f, key = self.f, self.table.key
        shift = sum(k.width for k in key[number + 1 :])
        width = key[number].width
        bits = 64 * len(words)
        whole: Value = integer(bits, 0)
        for n, word in enumerate(words):
            whole = f.or_(f.shl(f.zext(word, bits), 64 * n), whole)
        value = f.and_(f.lshr(whole, shift), integer(bits, (1 << width) - 1))
        return f.resize(value, max(64, -(-width // 64) * 64))

    def _end(self, record: Value, offset: int, width: int) -> Value:
        if width <= NATIVE_BITS:
            return self.f.load(container_bits(width), self.f.at(record, offset))
        return self.f.load_network(self.f.at(record, offset), stored_bytes(width))


@dataclass(frozen=True, slots=True)
class InlineEntries:
    """Compiles a const table: one comparison after the other, or a switch."""

    scope: Scope
    table: ir.Table
    layout: RecordLayout

    def dispatch(self, targets: Sequence[Block], miss: Block) -> None:
        """Branch to targets[n] if entry n (as the program numbers them) matches best."""
        table = self.table
        words = key_words(self.scope, table, self.layout.words)
        if table.match == "exact" and self.layout.key_bits <= 64:
            cases: dict[int, Block] = {}
            for n, target in enumerate(targets):
                # The table itself refuses two entries with one key.
                cases.setdefault(canonical(table.entries[n].key, table)[1], target)
            self.scope.f.switch(words[0], miss, list(cases.items()))
            return
        for n in self._order():
            next_ = self.scope.f.new_block("next")
            self.scope.f.branch_if(self._matches(n, words), targets[n], next_)
            self.scope.f.start(next_)
        self.scope.f.branch(miss)

    def _order(self) -> list[int]:
        entries = self.table.entries
        if self.table.match == "lpm":
            lengths = [
                next((v.prefix_len for v in e.key if isinstance(v, ir.Lpm)), 0) for e in entries
            ]
            return sorted(range(len(entries)), key=lambda n: (-lengths[n], n))
        if self.table.match in ("ternary", "range"):
            return sorted(range(len(entries)), key=lambda n: (entries[n].priority, n))
        return list(range(len(entries)))

    def _matches(self, number: int, words: Sequence[Value]) -> Value:
        f = self.scope.f
        _, value, mask = canonical(self.table.entries[number].key, self.table)
        difference: Value = i64(0)
        for word, v, m in zip(
            words,
            split_words(value, len(words)),
            split_words(mask, len(words)),
            strict=True,
        ):
            if m:
                difference = f.or_(f.xor(f.and_(word, i64(m)), i64(v)), difference)
        good = TRUE if difference.const == 0 else f.compare("eq", difference, i64(0))
        lookup = Lookup(self.scope, 0, self.table, self.layout)
        for n, end in enumerate(self.table.entries[number].key):
            if isinstance(end, ir.Range):
                field = lookup.key_field(words, n)
                above = f.compare("uge", field, integer(field.bits, end.low))
                below = f.compare("ule", field, integer(field.bits, end.high))
                good = f.and_(f.and_(above, below), good)
        return good


# --- what the control plane calls -----------------------------------------------------------------


def write_table_functions(module: Module) -> None:
    """What `llvm.switch` finds in the library by these names."""
    compile_into(module, [table_insert, table_replace, table_rehash, native_fence], exported=True)


@native
def record_hash(record: Ptr[U64], words: U64) -> U64:
    """Of a record's key, as `_hash` writes it for a packet's."""
    h = _MIX
    for n in range(words):
        h = (h ^ record[n]) * _MIX
        h ^= h >> 29
    h *= _MIX
    return h ^ (h >> 32)


@native
def table_insert(block: U64, records: U64, stride: U64, words: U64, index: U32) -> I32:
    """Put a record's number into a slot for its key; 1 if the slot was never used before, else 0.

    The caller sees to it that the key is not there and that a slot is free."""
    mask = u64_at(block)[0]
    slots = u32_at(block + 8)
    at = record_hash(u64_at(records + index * stride), words) & mask
    while slots[at] not in (0, DELETED):
        at = (at + 1) & mask
    fresh = slots[at] == 0
    atomic_store(slots[at], index)
    full_fence()
    return 1 if fresh else 0


@native
def table_replace(block: U64, records: U64, stride: U64, words: U64, old: U32, new: U32) -> None:
    """Put `new` (a record of the same key, or DELETED) into the slot of record `old`."""
    mask = u64_at(block)[0]
    slots = u32_at(block + 8)
    at = record_hash(u64_at(records + old * stride), words) & mask
    while slots[at] != old:
        at = (at + 1) & mask
    atomic_store(slots[at], new)
    full_fence()


@native
def table_rehash(block: U64, records: U64, stride: U64, words: U64, to: U64) -> None:
    """Fill an empty block with the records of another."""
    slots = u32_at(block + 8)
    for n in range(u64_at(block)[0] + 1):
        if slots[n] not in (0, DELETED):
            table_insert(to, records, stride, words, slots[n])


@native
def native_fence() -> None:
    full_fence()
