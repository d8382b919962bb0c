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

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcast.protocol.messages.roce import SLOT_BYTES, ZONE_BYTES, Place, name_of


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
    __slots__ = ("came", "owner", "place", "untaken")

    def __init__(self, place: Place, owner: object) -> None:
        self.place = place
        self.owner = owner
        self.came = 0
        self.untaken = 0


class Landing:
    """See the module's description. `memory`: the zone, `roce.ZONE_BYTES`; `look`: asks the card
    what has come since, and calls `landed` with it."""

    def __init__(
        self,
        memory: memoryview,
        look: Callable[[], object] = lambda: None,
        counters: LandingCounters | None = None,
    ) -> None:
        if memory.nbytes != ZONE_BYTES:
            raise ValueError(f"a zone of {memory.nbytes} bytes, not {ZONE_BYTES}")
        self.look = look
        self.usable = True
        """Whether WRITEs can come; without, nothing is claimed."""
        self.counters = LandingCounters() if counters is None else counters
        self._memory = memory
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
        return self.usable and place.slot not in self._by_slot and place.name not in self._by_name

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

    def landed(self, immediates: Iterable[int]) -> list[object]:
        """The card reports WRITEs; the owners of those segments of which something is new."""
        counters = self.counters
        owners: dict[int, object] = {}
        for immediate in immediates:
            counters.chunks += 1
            name = name_of(immediate)
            claim = self._by_name.get(name)
            if claim is not None:
                bit = 1 << claim.place.chunk_of(immediate)
                if not claim.came & bit:
                    claim.came |= bit
                    claim.untaken |= bit
                    owners[name] = claim.owner
            else:
                self._late(name, immediate)
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
