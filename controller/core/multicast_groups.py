"""Multicast groups: which sets of ports recur often enough to have one of their own.

Owns: the choice. Any set is served by the all-ports group and the egress filter; a set that keeps
coming back is given a tight group, which saves the copies that the filter would drop. Must not
know: group ids (a place 0..capacity-1 stands for one), or how they are written.
"""

from __future__ import annotations

from collections import OrderedDict

from kvcast.protocol.bounded_map import BoundedMap

RECURS = 2
"""Sightings that make a set worth a group."""


class MulticastGroups:
    """The sets that have a group. Least-recently-seen sets give way; both the chosen and the
    watched sets are bounded."""

    def __init__(self, capacity: int = 64, watched: int = 512) -> None:
        self._capacity = capacity
        self._places: OrderedDict[int, int] = OrderedDict()
        self._watched: BoundedMap[int, int] = BoundedMap(watched)

    @property
    def places(self) -> dict[int, int]:
        """Port bitmap to place, of the sets that have a group."""
        return dict(self._places)

    def adopt(self, bits: int, place: int) -> None:
        """A set that the switch already has a group for."""
        if 0 <= place < self._capacity and place not in self._places.values():
            self._places.setdefault(bits, place)

    def seen(self, bits: int) -> None:
        """This set of ports waited for one segment; sets of fewer than two need no group."""
        if bits & (bits - 1) == 0:
            return
        if bits in self._places:
            self._places.move_to_end(bits)
            return
        count = self._watched.pop(bits, 0) + 1
        if count >= RECURS:
            self._place(bits)
            return
        self._watched[bits] = count

    def _place(self, bits: int) -> None:
        if len(self._places) >= self._capacity:
            _, place = self._places.popitem(last=False)
        else:
            used = set(self._places.values())
            place = next(i for i in range(self._capacity) if i not in used)
        self._places[bits] = place
