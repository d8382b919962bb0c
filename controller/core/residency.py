"""Residency: which blocks hold which of the switch's slots.

Owns: the slots (64 cells, one segment, each), the generation numbers, and the rule that a slot is
reused only when its entry has been deleted for a recirculation's time: until then a serving loop
of the former block may still be in flight and would read the new block's cells. Must not know:
which blocks deserve a slot (`admission.py` decides), or how entries are written.

A resident is *held* (entries are to be in the switch), or *leaving* (its home is being asked to
keep it; entries still there). A slot is free, held, or *draining* (entry to be deleted, or deleted
a moment ago). Until it is free again it is its last holder's namespace's: the entries of who leaves
and of who comes may be in the switch at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvcast.protocol.messages.wire import CELLS, BlockId

MAX_GENERATION = 0xFFFFFFFF


class NoSlotsError(Exception):
    """Fewer slots are free than the block has segments."""


@dataclass
class SavedResident:
    """What outlives the controller of a resident: `slots[s]` holds segment s; `size_bytes` and
    `digest` of the copy."""

    block: BlockId
    slots: tuple[int, ...]
    generation: int
    digest: int
    size_bytes: int
    pinned: bool


@dataclass
class Resident(SavedResident):
    """A block in the switch."""

    admitted_at: float
    leaving: bool = False
    hits: int = 0
    """READs served (segments), as far as counted by this controller."""

    def chunk_mask(self, segment: int) -> int:
        """Which chunks of the segment exist; bit i = chunk i."""
        return CELLS.bitmap(self.size_bytes, segment)


class Residency:
    """The residents by block, and the slots that nobody holds."""

    def __init__(self, slots: int, *, first_generation: int, drain_s: float) -> None:
        self.capacity = slots
        self.generation = first_generation
        """The next to be given. By it the switch knows that what lies in a slot is not the last
        holder's, so no slot may be given one that it had before."""
        self._drain_s = drain_s
        self.residents: dict[BlockId, Resident] = {}
        self._free: list[int] = list(range(slots - 1, -1, -1))
        self._draining: dict[int, float | None] = {}
        """Slot to the time from which it may be reused; None while its entry may still exist."""
        self._last_held: dict[int, int] = {}
        """Draining slot to the namespace whose entry it had."""

    def restore(self, saved: Iterable[SavedResident], now: float) -> int:
        """Take the slots as a former controller left them; returns how many could not be taken.

        Whether the switch still holds the entries does not matter: what it lacks is written again
        under the same generation, since it lost the cells' validity with them. Which generation
        the former controller gave last is not known, since whoever had it may have been evicted;
        so new ones go on from `first_generation`, and not from the highest that is left.
        """
        lost = 0
        for s in saved:
            if (
                len(s.slots) != CELLS.segments_of(s.size_bytes)
                or not set(s.slots) <= set(self._free)
                or s.block in self.residents
            ):
                lost += 1
                continue
            self._free = [slot for slot in self._free if slot not in s.slots]
            self.residents[s.block] = Resident(**vars(s), admitted_at=now)
        return lost

    def saved(self) -> list[SavedResident]:
        """What `restore` needs, by generation."""
        return sorted(
            (
                SavedResident(r.block, r.slots, r.generation, r.digest, r.size_bytes, r.pinned)
                for r in self.residents.values()
            ),
            key=lambda s: s.generation,
        )

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def coming_free(self) -> int:
        """Slots that will be free without another decision: draining, or held by a leaver."""
        return len(self._draining) + sum(len(r.slots) for r in self.residents.values() if r.leaving)

    def staying(self) -> Counter[int]:
        """By namespace: slots of residents that do not leave."""
        staying: Counter[int] = Counter()
        for resident in self.residents.values():
            if not resident.leaving:
                staying[resident.block.namespace] += len(resident.slots)
        return staying

    def taken(self) -> Counter[int]:
        """By namespace: slots that are not free again yet, whoever stays or leaves."""
        taken = Counter(self._last_held.values())
        for resident in self.residents.values():
            taken[resident.block.namespace] += len(resident.slots)
        return taken

    def admit(
        self, block: BlockId, *, digest: int, size_bytes: int, pinned: bool, now: float
    ) -> Resident:
        """Give the block free slots under a new generation; NoSlotsError if they do not suffice."""
        if block in self.residents:
            raise ValueError(f"{block} is already resident")
        wanted = CELLS.segments_of(size_bytes)
        if wanted > len(self._free):
            raise NoSlotsError(f"{wanted} slots wanted, {len(self._free)} free")
        slots = tuple(self._free.pop() for _ in range(wanted))
        resident = Resident(
            block, slots, self.generation, digest, size_bytes, pinned, admitted_at=now
        )
        self.generation = self.generation % MAX_GENERATION + 1
        self.residents[block] = resident
        return resident

    def evict(self, block: BlockId) -> Resident:
        """Take the block's entries out of what the switch should hold."""
        resident = self.residents.pop(block)
        self._draining.update(dict.fromkeys(resident.slots))
        self._last_held.update(dict.fromkeys(resident.slots, block.namespace))
        return resident

    def waiting_for_deletion(self) -> frozenset[int]:
        """Draining slots whose entry has not been seen deleted yet."""
        return frozenset(slot for slot, until in self._draining.items() if until is None)

    def deleted(self, slots: Iterable[int], now: float) -> None:
        """The switch has no entry for these slots any more."""
        for slot in slots:
            if slot in self._draining and self._draining[slot] is None:
                self._draining[slot] = now + self._drain_s

    def foreign(self, slots: Mapping[int, int]) -> None:
        """The switch was found to hold entries for these slots, of these namespaces, that are not
        ours."""
        found = slots.keys() & {*self._free, *self._draining}
        self._free = [slot for slot in self._free if slot not in found]
        self._draining.update(dict.fromkeys(found))
        self._last_held.update((slot, slots[slot]) for slot in found)

    def advance(self, now: float) -> None:
        """Free the slots whose time is over."""
        for slot, until in list(self._draining.items()):
            if until is not None and now >= until:
                del self._draining[slot], self._last_held[slot]
                self._free.append(slot)

    def next_deadline(self) -> float | None:
        """When `advance` will next free a slot."""
        return min((t for t in self._draining.values() if t is not None), default=None)

    def holder(self, slot: int) -> Resident | None:
        """Who holds the slot."""
        return next((r for r in self.residents.values() if slot in r.slots), None)

    def check(self) -> None:
        """Every slot is in exactly one place."""
        held = [slot for r in self.residents.values() for slot in r.slots]
        everything = sorted([*held, *self._free, *self._draining])
        assert everything == list(range(self.capacity)), "a slot is lost or held twice"
        assert self._last_held.keys() == self._draining.keys()
