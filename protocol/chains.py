"""Chains: many keys in a row, as bytes, and a bit for each of them, by compiled code.

Owns: which keys of a chain an index has, how the others are parted among the nodes that are to be
asked, and how answers are put together again. Must not know: who asks, stores, sockets.

Bits are a number, of which bit i (from below) is key i's; on the wire its bytes, the lowest first.
No Python runs for a key, so that a thousand of them cost little more than one.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, NamedTuple

from kvcast.native.subset import U64, Library, bytes_at, ctypes_of, native, u16_at, u64_at
from kvcast.protocol.lane import NativeLane, entry_of
from kvcast.protocol.messages.shared import buckets_of, entries_offset
from kvcast.protocol.messages.wire import BUCKETS, KEY_BYTES
from kvcast.protocol.placement import address_of_buffer

NOBODY: Final = 0xFFFF
"""In a table of homes: a bucket that has no such home."""
assert sys.byteorder == "little"
assert BUCKETS <= 1 << 16


class Part(NamedTuple):
    """Keys of a chain that are asked of one node, and which they are in it; None: all of it."""

    keys: bytes
    positions: array[int] | None


@native
def find_held(lane: NativeLane, namespace: U64, keys: U64, count: U64, held: U64) -> None:
    """Set the bits of those that the lane's index has."""
    bits = bytes_at(held)
    for number in range(count):
        key = u64_at(keys + number * KEY_BYTES)
        if entry_of(lane, namespace, 0 + key[0], 0 + key[1]) != 0:
            bits[number >> 3] = bits[number >> 3] | (1 << (number & 7))


@native
def choose_nodes(keys: U64, count: U64, held: U64, homes: U64, nodes: U64) -> U64:
    """Write down for each key that is not held whom `homes` has for its bucket, else NOBODY; up to
    the first that is not held and has nobody. How many are written."""
    bits = bytes_at(held)
    table = u16_at(homes)
    chosen = u16_at(nodes)
    for number in range(count):
        chosen[number] = NOBODY
        if (bits[number >> 3] >> (number & 7)) & 1 == 0:
            key = bytes_at(keys + number * KEY_BYTES)
            node = table[((key[KEY_BYTES - 2] << 8) | key[KEY_BYTES - 1]) & (BUCKETS - 1)]
            if node == NOBODY:
                return number
            chosen[number] = node
    return count


@native
def gather_keys(keys: U64, nodes: U64, count: U64, gathered: U64, positions: U64, node: U64) -> U64:
    """Of the node that was chosen first, and is written down at `node`: copy the keys for which it
    was chosen, and which they are, and have it chosen for none. How many that is."""
    chosen = u16_at(nodes)
    places = u16_at(positions)
    words = u64_at(gathered)
    found = 0 + 0
    its = NOBODY + 0
    for number in range(count):
        if chosen[number] != NOBODY and (found == 0 or chosen[number] == its):
            its = 0 + chosen[number]
            key = u64_at(keys + number * KEY_BYTES)
            words[2 * found] = key[0]
            words[2 * found + 1] = key[1]
            places[found] = number
            chosen[number] = NOBODY
            found += 1
    u16_at(node)[0] = its
    return found


@native
def scatter_bits(answer: U64, positions: U64, count: U64, held: U64) -> None:
    """Set those bits that an answer about gathered keys has."""
    told = bytes_at(answer)
    places = u16_at(positions)
    bits = bytes_at(held)
    for number in range(count):
        if (told[number >> 3] >> (number & 7)) & 1 != 0:
            place = 0 + places[number]
            bits[place >> 3] = bits[place >> 3] | (1 << (place & 7))


@cache
def _compiled() -> tuple[Callable[..., Any], ...]:
    functions = (find_held, choose_nodes, gather_keys, scatter_bits)
    library = Library(*functions)
    return tuple(library.call(function) for function in functions)


class Probe:
    """Looks chains up in an index that this process writes."""

    def __init__(self, index: memoryview) -> None:
        """`index` stays where it is as long as it is asked."""
        self._find_held = _compiled()[0]
        self._lane: Any = ctypes_of(NativeLane)()
        buckets = buckets_of(len(index))
        self._lane.index = address_of_buffer(index)
        self._lane.bucket_bits = buckets.bit_length() - 1
        self._lane.entries = entries_offset(buckets)
        self._address = ctypes.addressof(self._lane)

    def held(self, namespace: int, chain: bytes) -> int:
        """The bits of those that the index has."""
        if not chain:
            return 0
        count = count_of(chain)
        keys, bits = bytearray(chain), bytearray(-(-count // 8))
        at = address_of_buffer
        self._find_held(self._address, namespace, at(keys), count, at(bits))
        return int.from_bytes(bits, "little")


def parted(chain: bytes, held: int, homes: array[int]) -> dict[int, Part]:
    """By node, those keys without their bit of which it is a home, as `homes` says for each bucket.
    What lies behind a key without its bit that has no home there is nobody's."""
    count = count_of(chain)
    if not count:
        return {}
    _, choose, gather, _ = _compiled()
    at = address_of_buffer
    keys, nodes = bytearray(chain), bytearray(2 * count)
    bits = bytearray(held.to_bytes(-(-count // 8), "little"))
    table = memoryview(homes).cast("B")
    node, gathered, positions = bytearray(2), bytearray(len(chain)), bytearray(2 * count)
    reached = choose(at(keys), count, at(bits), at(table), at(nodes))
    parts = {}
    while found := gather(at(keys), at(nodes), reached, at(gathered), at(positions), at(node)):
        part = Part(bytes(gathered[: found * KEY_BYTES]), array("H", bytes(positions[: 2 * found])))
        if found == count:
            part = Part(chain, None)
        parts[int.from_bytes(node, "little")] = part
    return parts


def merged(held: int, count: int, part: Part, answer: int) -> int:
    """The bits of `count` keys, with those that an answer about a part of them has."""
    if part.positions is None:
        return held | answer & mask_of(count)
    asked = len(part.positions)
    told = bytearray((answer & mask_of(asked)).to_bytes(-(-asked // 8), "little"))
    bits = bytearray(held.to_bytes(-(-count // 8), "little"))
    at = address_of_buffer
    places = memoryview(part.positions).cast("B")
    _compiled()[3](at(told), at(places), asked, at(bits))
    return int.from_bytes(bits, "little")


def count_of(chain: bytes) -> int:
    """How many keys a chain has."""
    return len(chain) // KEY_BYTES


def mask_of(count: int) -> int:
    """So many bits."""
    return (1 << count) - 1


def keys_of(chain: bytes) -> list[bytes]:
    """A chain's keys, one by one."""
    return [chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES)]


def prefix_of(held: int) -> int:
    """How many bits are set, counted from the lowest without a gap."""
    return (~held & (held + 1)).bit_length() - 1


def bits_of(flags: Iterable[bool]) -> int:
    """One bit a flag, the first lowest."""
    digits = bytes(flags)[::-1].translate(_DIGITS)
    return int(digits or b"0", 2)


_DIGITS: Final = bytes.maketrans(b"\0\1", b"01")
