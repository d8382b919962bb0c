"""Ghosts: which of several rules would answer the most reads from the switch's memory.

Owns: the rules by which blocks can be ranked, a memory of names alone for each, as large as the
switch's, and which rule has done best of late. Must not know: slots, tables, agents; what was read
is told, with its counts (`admission.HeatMap`).

No one rule is best everywhere. `value` (reads counted, and fading) keeps what is read again and
again; `recent` (the block not read for longest leaves first) is right where what is wanted moves
on faster than counts fade, and where nearly all of it fits. So each rule's ghost hears what homes
report and the switch counts, and answers what it would have: a block is let in after its first
report, its next read fills, and the ones after that are answered. (Rules tried on names alone and
chosen by regret: Vietri et al., "Driving Cache Replacement with ML-based LeCaR", HotStorage 2018.)

To change the rule costs reads: what the other one would hold must be filled first, and what is
given up for that must be filled again on the way back. So the *lead*, what the other rule would
have answered more since it last had none, less the share of reads that is not worth a change (the
sum of Page, "Continuous Inspection Schemes", Biometrika 1954), must pay for the way there and back
over the blocks in which both ghosts differ, as between two states of a metrical task system
(Borodin, Linial, Saks, JACM 1992). Where both hold nearly the same, little is enough; where they do
not, a burst that one of them happens to answer changes nothing.
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass
from math import inf

from kvcast.protocol.messages.wire import BlockId


class Rule(enum.Enum):
    """By what blocks are ranked; see the module's text."""

    VALUE = "value"
    RECENT = "recent"


@dataclass(frozen=True)
class Standing:
    """What one rule makes of a block that was just read: `rank` as of any time, so that two can be
    compared later; it displaces those of a rank of at most `displaces`."""

    rank: float
    displaces: float


WORTH_IT = 0.02
"""Of all reads, by how many the other rule must answer more to gain a lead."""
THERE_AND_BACK = 0.6
"""Reads of lead for each block that one ghost holds, filled, and the other does not."""
AT_LEAST_READS = 16.0
"""Of lead, before which the rule never changes,"""
AT_MOST_READS = 48.0
"""and at which it does, whatever the ghosts hold: much of that is wanted by nobody any more."""
HEARD_A_SECOND = 500
"""Blocks that ghosts hear of in a second; of the rest none hears, which is the same for all."""


@dataclass
class _Kept:
    rank: float
    slots: int
    filled: bool = False


class _Ghost:
    """A memory of names under one rule."""

    def __init__(self, slots: int) -> None:
        self.free = slots
        self.kept: dict[BlockId, _Kept] = {}
        self._worst: list[tuple[float, BlockId]] = []
        """A heap; an entry is stale unless its rank is what `kept` says. One that was stale is not
        any more where a block stands again as it did before: then there are two."""

    def read(self, block: BlockId, standing: Standing, slots: int, reads: float) -> float:
        """How many of these reads it would have answered."""
        kept = self.kept.get(block)
        if kept is None:
            if self._makes_room(slots, standing.displaces):
                self.kept[block] = _Kept(standing.rank, slots)
                self.free -= slots
                heapq.heappush(self._worst, (standing.rank, block))
            return 0.0
        answered = reads if kept.filled else max(0.0, reads - 1)
        kept.filled = True
        if standing.rank != kept.rank:
            kept.rank = standing.rank
            heapq.heappush(self._worst, (standing.rank, block))
            if len(self._worst) > 2 * len(self.kept) + 64:
                self._worst = [(each.rank, name) for name, each in self.kept.items()]
                heapq.heapify(self._worst)
        return answered

    def _makes_room(self, slots: int, displaces: float) -> bool:
        """Drop the worst until so many slots are free, if all of them may be displaced."""
        victims: dict[BlockId, float] = {}
        free = self.free
        while free < slots and self._worst:
            rank, name = self._worst[0]
            kept = self.kept.get(name)
            if kept is None or kept.rank != rank or name in victims:
                heapq.heappop(self._worst)
                continue
            if rank > displaces:
                break
            heapq.heappop(self._worst)
            victims[name] = rank
            free += kept.slots
        if free < slots:
            for name, rank in victims.items():
                heapq.heappush(self._worst, (rank, name))
            return False
        for name in victims:
            self.free += self.kept.pop(name).slots
        return True

    def filled_beyond(self, other: _Ghost) -> int:
        """Blocks that this one would answer and the other does not hold."""
        return sum(each.filled and name not in other.kept for name, each in self.kept.items())

    def forget(self, namespaces: frozenset[int]) -> None:
        for name in [name for name in self.kept if name.namespace in namespaces]:
            self.free += self.kept.pop(name).slots


class Ghosts:
    """See the module's text. `slots`: of the switch's memory."""

    def __init__(self, slots: int) -> None:
        self.rule = Rule.VALUE
        self.lead = 0.0
        """Reads that the other rule would have answered more since it last had no lead."""
        self.changes = 0
        self._ghosts = {rule: _Ghost(slots) for rule in Rule}
        self._weighed = 0.0
        """The lead at which the change was weighed last; it is again where there is one more."""
        self._second = -inf
        self._heard = 0

    def is_deaf(self, now: float) -> bool:
        """Whether they have heard all that they want to now."""
        return self._heard >= HEARD_A_SECOND and now - self._second < 1.0

    def listens(self, now: float) -> bool:
        """Whether they want to hear of one more block now; a yes counts as heard."""
        if now - self._second >= 1.0:
            self._second, self._heard = now, 0
        self._heard += 1
        return self._heard <= HEARD_A_SECOND

    def read(
        self, block: BlockId, slots: int, reads: float, standings: dict[Rule, Standing]
    ) -> None:
        """A block of so many slots was read so many times, and then stood so."""
        other = Rule.RECENT if self.rule is Rule.VALUE else Rule.VALUE
        ours = self._ghosts[self.rule].read(block, standings[self.rule], slots, reads)
        theirs = self._ghosts[other].read(block, standings[other], slots, reads)
        self.lead += theirs - ours - WORTH_IT * reads
        if self.lead <= 0.0:
            self.lead = self._weighed = 0.0
        elif self.lead >= AT_LEAST_READS and self.lead >= self._weighed + 1:
            self._weighed = self.lead
            if self.lead >= self._cost():
                self.rule = other
                self.changes += 1
                self.lead = self._weighed = 0.0

    def _cost(self) -> float:
        """Reads of lead that pay for a change of the rule."""
        ours, theirs = self._ghosts.values()
        apart = ours.filled_beyond(theirs) + theirs.filled_beyond(ours)
        return min(AT_MOST_READS, THERE_AND_BACK * apart)

    def forget(self, namespaces: frozenset[int]) -> None:
        """Know nothing of these namespaces' blocks."""
        for ghost in self._ghosts.values():
            ghost.forget(namespaces)
