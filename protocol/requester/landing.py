"""The landing zone of a reader, as far as no card is concerned: which segment has which slot, and
what has come.

Owns: that a slot is one segment's at a time, and two segments that cannot be told apart do not
come at once; and which chunks are in their places, noted in compiled code (`land`), since a card
reports each. Must not know: verbs, or what a fetch is. (`kvcast.protocol.messages.roce` says where
a chunk lies, and what its immediate says.)

Whoever asked never hears of single chunks. It hears of a segment when the end of its answer is
known, and either all that it lacks has come or the last chunk has.

A slot that was given back may still be written to, by a late copy of a packet. It is remembered
which segment had the slot before, until it changes hands again. So a late chunk of that segment is
recognised, and the chunk in whose place it was written counts as not there. If that chunk was taken
already, only the digest tells.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, NamedTuple

from kvcast.native.linux import swap16
from kvcast.native.subset import (
    U32,
    U64,
    Inline,
    Library,
    Ptr,
    Struct,
    ctypes_of,
    native,
    u32_at,
)
from kvcast.protocol.messages.roce import (
    CHUNK_MASK,
    CHUNK_SHIFT,
    SLOT_BYTES,
    ZONE_BYTES,
    ZONE_SLOTS,
    Place,
)

_NO_SLOT: Final = ZONE_SLOTS


class Slot(Struct):
    """What is known of one slot. The immediates of a segment's chunks differ in the chunk's bits
    alone, so that of its first chunk says which segment it is."""

    came: U64
    """Chunks that are there,"""
    untaken: U64
    """and of them, those that Python has not taken."""
    wanted: U64
    """Python hears when all of these have come,"""
    ends: U64
    """or this one, the last; not before that is known."""
    first: U32
    """The immediate of the first chunk of the segment that has it,"""
    claimed: U32
    """if one has."""
    former: U32
    """The same of the segment that had it last,"""
    had: U32
    """if it is known."""
    told: U32
    """Whether Python is about to hear of it."""
    padding: U32


class Zone(Struct):
    """All slots."""

    told_count: U64
    chunks: U64
    late: U64
    spoiled: U64
    stray: U64
    claimed_count: U64
    found: U64
    """The slot of the last chunk."""
    told: Annotated[Ptr[U32], Inline(ZONE_SLOTS)]
    """The slots of which Python is about to hear."""
    claimed: Annotated[Ptr[U32], Inline(ZONE_SLOTS)]
    """Those that a segment has."""
    slots: Annotated[Ptr[Slot], Inline(ZONE_SLOTS)]


@native
def _is_of(immediate: U64, first: U64) -> bool:
    return ((immediate ^ first) & ~CHUNK_MASK & 0xFFFF_FFFF) == 0


@native
def _slot_of(z: Zone, immediate: U64) -> U64:
    """The slot of the segment that a chunk is of; _NO_SLOT: of none that is awaited."""
    slot = z.slots[z.found]
    # A home sends a segment's chunks in their order, so most come in runs.
    if slot.claimed != 0 and _is_of(immediate, slot.first):
        return 0 + z.found
    for i in range(z.claimed_count):
        number = 0 + z.claimed[i]
        if _is_of(immediate, z.slots[number].first):
            z.found = number
            return number
    return _NO_SLOT


@native
def _late(z: Zone, immediate: U64) -> None:
    """A chunk of no segment that is awaited: it may have come where another's was."""
    for number in range(ZONE_SLOTS):
        slot = z.slots[number]
        if slot.had != 0 and _is_of(immediate, slot.former):
            z.late += 1
            bit = 1 << ((immediate ^ slot.former) >> CHUNK_SHIFT)
            if slot.claimed != 0 and (slot.untaken & bit) != 0:
                z.spoiled += 1
                slot.untaken ^= bit
                slot.came ^= bit
            return
    z.stray += 1


@native
def claim(z: Zone, number: U64, first: U64) -> None:
    """A slot, which no segment has, is that segment's from now on; its name is no other's."""
    for i in range(ZONE_SLOTS):
        if z.slots[i].had != 0 and _is_of(first, z.slots[i].former):
            z.slots[i].had = 0
    slot = z.slots[number]
    slot.came = 0
    slot.untaken = 0
    slot.ends = 0
    slot.first = first
    slot.claimed = 1
    z.claimed[z.claimed_count] = number
    z.claimed_count += 1


@native
def release(z: Zone, number: U64) -> None:
    """It is no segment's any more, but known as that one's."""
    slot = z.slots[number]
    slot.former = slot.first
    slot.had = 1
    slot.claimed = 0
    z.claimed_count -= 1
    last = 0 + z.claimed[z.claimed_count]
    for i in range(z.claimed_count):
        if z.claimed[i] == number:
            z.claimed[i] = last


@native
def land(z: Zone, at: U64, stride: U64, count: U64) -> None:
    """A card reports so many WRITEs: their immediates, in network order, lie from `at` on, so many
    bytes apart."""
    z.chunks += count
    for i in range(count):
        reported = u32_at(at + i * stride)[0]
        immediate = (swap16(reported & 0xFFFF) << 16) | swap16(reported >> 16)
        number = _slot_of(z, immediate)
        if number == _NO_SLOT:
            _late(z, immediate)
            continue
        slot = z.slots[number]
        bit = 1 << ((immediate ^ slot.first) >> CHUNK_SHIFT)
        if (slot.came & bit) == 0:
            slot.came |= bit
            slot.untaken |= bit
            whole = slot.ends != 0 and (slot.came & slot.wanted) == slot.wanted
            if slot.told == 0 and (whole or (bit & slot.ends) != 0):
                slot.told = 1
                z.told[z.told_count] = number
                z.told_count += 1


_HEAD: Final = struct.Struct("=5Q")
_SLOT: Final = struct.Struct("=4Q6I")
_NATIVE_SLOT: Final = ctypes_of(Slot)
_NATIVE_ZONE: Final = ctypes_of(Zone)
assert _SLOT.size == ctypes.sizeof(_NATIVE_SLOT)


class _Compiled(NamedTuple):
    claim: Callable[[int, int, int], None]
    release: Callable[[int, int], None]
    land: Callable[[int, int, int, int], None]


@cache
def compiled() -> _Compiled:
    """The compiled functions; made, or read from the cache on disk, when first asked for."""
    functions = (claim, release, land)
    library = Library(*functions)
    return _Compiled(*(library.call(function) for function in functions))


@dataclass(slots=True)
class LandingCounters:
    """Totals since the zone was made."""

    chunks: int = 0
    """WRITEs that the card reported."""
    late: int = 0
    """WRITEs of a segment that had given its slot back."""
    spoiled: int = 0
    """Chunks that a late one has overwritten."""
    stray: int = 0
    """WRITEs of no segment that is known."""


# A slot, as words of 64 bits.
_CAME, _UNTAKEN, _WANTED, _ENDS, _, _, _TOLD = range(7)
_WORDS: Final = ctypes.sizeof(_NATIVE_SLOT) // 8
assert _WORDS == _TOLD + 1
assert _NATIVE_SLOT.ends.offset == 8 * _ENDS
assert _NATIVE_SLOT.told.offset == 8 * _TOLD


class Landing:
    """See the module's description. `memory`: the zone, `roce.ZONE_BYTES`; `look`: asks the card
    what has come since, and has `take_told` asked; `await_more`: has it done when the last chunk of
    an answer comes next, or at once if one has; `most`: segments that may be awaited at once, all
    of whose chunks the card can take without being looked at; `doubt`: told that answers have ended
    and nothing of them has landed, nor of anybody's meanwhile, so that the card may have lost the
    zone's registration: it says nothing of WRITEs that it refuses."""

    def __init__(
        self,
        memory: memoryview,
        look: Callable[[], object] = lambda: None,
        await_more: Callable[[], object] = lambda: None,
        counters: LandingCounters | None = None,
        most: int = ZONE_SLOTS,
        doubt: Callable[[], object] = lambda: None,
    ) -> None:
        if memory.nbytes != ZONE_BYTES:
            raise ValueError(f"a zone of {memory.nbytes} bytes, not {ZONE_BYTES}")
        self.look = look
        self.await_more = await_more
        self.doubt = doubt
        self.usable = True
        """Whether WRITEs can come; without, nothing is claimed."""
        self.in_place = 0, 0
        """Compiled code that puts whole segments in their places, as
        `kvcast.protocol.placement.call_landing` says, and its first argument; 0 = there is none."""
        self.counters = LandingCounters() if counters is None else counters
        self._memory = memory
        self._most = most
        self._code = compiled()
        self._zone: Any = _NATIVE_ZONE()
        self.address = ctypes.addressof(self._zone)
        """Where compiled code finds it (`Zone`)."""
        view = memoryview(self._zone).cast("B")
        self._head = view[: _HEAD.size]
        self._told = view[_NATIVE_ZONE.told.offset : _NATIVE_ZONE.claimed.offset].cast("I")
        self._slots = view[_NATIVE_ZONE.slots.offset :].cast("Q")
        self._owners: dict[int, tuple[Place, object]] = {}
        """By slot."""
        self._names: set[int] = set()
        """Of their places."""
        self._ending: set[int] = set()

    def claim(self, place: Place, owner: object) -> bool:
        """Let chunks of a segment come; False where it must wait for another's end."""
        slot, name = place.slot, place.name
        owners, names = self._owners, self._names
        if slot in owners or name in names or not self.usable or len(owners) >= self._most:
            return False
        self._code.claim(self.address, slot, place.first)
        owners[slot] = place, owner
        names.add(name)
        return True

    @property
    def room(self) -> int:
        """How many more segments may be awaited."""
        return self._most - len(self._owners)

    def release(self, place: Place) -> None:
        """A segment that has claimed its slot wants nothing more."""
        slot = place.slot
        mine, _ = self._owners.pop(slot)
        assert mine == place
        self._names.remove(place.name)
        self._ending.discard(slot)
        self._code.release(self.address, slot)

    def await_end(self, place: Place, wanted: int, last: int) -> None:
        """The end of its answer is known: chunks of `wanted` still come, and `last`, a bit, is the
        last of them."""
        words, at = self._slots, place.slot * _WORDS
        words[at + _WANTED] = words[at + _CAME] | wanted
        words[at + _ENDS] = last
        self._ending.add(place.slot)
        self.await_more()

    @property
    def awaits_ends(self) -> bool:
        """Whether the last chunk of an answer is awaited whose end is known."""
        return bool(self._ending)

    def landed(self, immediates: Sequence[int]) -> list[object]:
        """The card reports WRITEs: the owners of segments of which Python is to hear."""
        came = array("I", immediates)
        came.byteswap()
        if came:
            self._code.land(self.address, came.buffer_info()[0], came.itemsize, len(came))
        return self.take_told()

    def take_told(self) -> list[object]:
        """The owners of segments whose answers have ended since, by what the card has reported."""
        count = self.count()
        if not count:
            return []
        self._zone.told_count = 0
        owners = []
        for slot in self._told[:count].tolist():
            self._slots[slot * _WORDS + _TOLD] = 0
            if slot in self._owners:
                self._ending.discard(slot)
                owners.append(self._owners[slot][1])
        return owners

    def count(self) -> int:
        """Count what the card has reported since; how many segments wait for `take_told`."""
        told, chunks, late, spoiled, stray = _HEAD.unpack(self._head)
        if chunks:
            self._head[8:] = bytes(_HEAD.size - 8)
            counters = self.counters
            counters.chunks += chunks
            counters.late += late
            counters.spoiled += spoiled
            counters.stray += stray
        return int(told)

    def take(self, place: Place) -> int:
        """The chunks of a segment that came since it was last asked, as a bitmap; they lie in
        `view`, until the claim ends or a late packet comes."""
        untaken = self.peek(place)
        self._slots[place.slot * _WORDS + _UNTAKEN] = 0
        return untaken

    def peek(self, place: Place) -> int:
        """The same, without taking them."""
        mine, _ = self._owners[place.slot]
        assert mine == place
        return self._slots[place.slot * _WORDS + _UNTAKEN]

    def view(self, place: Place) -> memoryview:
        """The slot's bytes."""
        start = place.slot * SLOT_BYTES
        return self._memory[start : start + SLOT_BYTES]

    @property
    def claims(self) -> int:
        """Slots that are a segment's."""
        return len(self._owners)

    def lost(self) -> None:
        """The card has failed: nothing more comes until it says otherwise. What has come is
        there."""
        self.usable = False
