"""The landing zone of a reader, as far as no card is concerned: which segment has which slot, and
what has come.

Owns: that a slot is one segment's at a time, and two segments that cannot be told apart do not
come at once; and which chunks are in their places. Must not know: verbs, or what a fetch is.
(`kvcast.protocol.messages.roce` says where a chunk lies, and what its immediate says.)

A slot that was given back may still be written to: by a copy of a packet that was late. What the
slot held last is known until it holds something else again after that, so such a chunk spoils the
one in whose place it came: that counts as not there. What spoils a chunk that was taken already
only the digest tells.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcast.protocol.messages.roce import (
    CHUNK_BITS,
    SLOT_BYTES,
    ZONE_BYTES,
    ZONE_SLOTS,
    Place,
    name_of,
)


@dataclass(slots=True)
class LandingCounters:
    """Totals since the zone was made."""

    chunks: int = 0
    """WRITEs that the card reported."""
    late: int = 0
    """Of them, those of a segment that had given its slot back."""
    spoiled: int = 0
    """Chunks that a late one has overwritten."""
    stray: int = 0
    """Of no segment that is known."""


class _Claim:
    __slots__ = ("came", "immediates", "owner", "place", "untaken")

    def __init__(self, place: Place, owner: object) -> None:
        self.place = place
        self.owner = owner
        self.came = 0
        self.untaken = 0
        self.immediates = array("I", map(place.immediate(0).__xor__, CHUNK_BITS))
        """Of its chunks, in order."""


class Landing:
    """See the module's description. `memory`: the zone, `roce.ZONE_BYTES`; `look`: asks the card
    what has come since, and calls `landed` with it; `await_more`: has it done when the next WRITE
    comes, or at once if some have come; `most`: segments that may be awaited at once,
    all of whose chunks the card can take without being looked at."""

    def __init__(
        self,
        memory: memoryview,
        look: Callable[[], object] = lambda: None,
        await_more: Callable[[], object] = lambda: None,
        counters: LandingCounters | None = None,
        most: int = ZONE_SLOTS,
    ) -> None:
        if memory.nbytes != ZONE_BYTES:
            raise ValueError(f"a zone of {memory.nbytes} bytes, not {ZONE_BYTES}")
        self.look = look
        self.await_more = await_more
        self.usable = True
        """Whether WRITEs can come; without, nothing is claimed."""
        self.counters = LandingCounters() if counters is None else counters
        self._memory = memory
        self._most = most
        self._by_slot: dict[int, _Claim] = {}
        self._by_name: dict[int, _Claim] = {}
        self._former: dict[int, Place] = {}  # by slot
        self._former_names: dict[int, int] = {}  # slot by name

    def claim(self, place: Place, owner: object) -> bool:
        """Let chunks of a segment come; False where it must wait for another's end."""
        if not self.can_claim(place):
            return False
        claim = _Claim(place, owner)
        self._by_slot[place.slot] = claim
        self._by_name[place.name] = claim
        if self._former_names.get(place.name) is not None:
            self._forget(self._former_names[place.name])
        return True

    def can_claim(self, place: Place) -> bool:
        """Whether `claim` would succeed."""
        taken = place.slot in self._by_slot or place.name in self._by_name
        return self.usable and not taken and len(self._by_slot) < self._most

    def release(self, place: Place) -> None:
        """A segment that has claimed its slot wants nothing more."""
        claim = self._by_slot.pop(place.slot)
        assert claim.place == place
        del self._by_name[place.name]
        self._forget(place.slot)
        self._former[place.slot] = place
        self._former_names[place.name] = place.slot

    def _forget(self, slot: int) -> None:
        former = self._former.pop(slot, None)
        if former is not None:
            del self._former_names[former.name]

    def landed(self, immediates: Sequence[int]) -> list[object]:
        """The card reports WRITEs; the owners of those segments of which something is new."""
        counters = self.counters
        counters.chunks += len(immediates)
        came = array("I", immediates)
        owners: dict[int, object] = {}
        at = 0
        while at < len(came):
            name = name_of(came[at])
            claim = self._by_name.get(name)
            if claim is None:
                self._late(name, came[at])
                at += 1
                continue
            first = claim.place.chunk_of(came[at])
            # A home sends a segment's chunks in their order, so most come in runs.
            run = claim.immediates[first : first + len(came) - at]
            if came[at : at + len(run)] != run:
                run = run[:1]
            new = ((1 << len(run)) - 1) << first & ~claim.came
            if new:
                claim.came |= new
                claim.untaken |= new
                owners[name] = claim.owner
            at += len(run)
        return list(owners.values())

    def _late(self, name: int, immediate: int) -> None:
        counters = self.counters
        slot = self._former_names.get(name)
        if slot is None:
            counters.stray += 1
            return
        counters.late += 1
        claim = self._by_slot.get(slot)
        if claim is None:
            return
        bit = 1 << self._former[slot].chunk_of(immediate)
        if claim.untaken & bit:
            counters.spoiled += 1
            claim.untaken ^= bit
            claim.came ^= bit

    def take(self, place: Place) -> int:
        """The chunks of a segment that came since it was last asked, as a bitmap; they lie in
        `view`, until the claim ends or a late packet comes."""
        claim = self._by_slot[place.slot]
        assert claim.place == place
        untaken, claim.untaken = claim.untaken, 0
        return untaken

    def peek(self, place: Place) -> int:
        """The same, without taking them."""
        return self._by_slot[place.slot].untaken

    def view(self, place: Place) -> memoryview:
        """The slot's bytes."""
        start = place.slot * SLOT_BYTES
        return self._memory[start : start + SLOT_BYTES]

    @property
    def claims(self) -> int:
        """Slots that are a segment's."""
        return len(self._by_slot)

    def lost(self) -> None:
        """The card has failed: nothing more comes until it says otherwise. What has come is
        there."""
        self.usable = False
