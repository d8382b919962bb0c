"""A plain model of the table in which readers of a block meet (`kvcast.protocol.meetings`), from
the rules in that module's text.

Cannot see: which blocks share a place in the table; it asks the product for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcast.protocol.meetings import READ_NS, WAITS_NS, WISHES_BITS, Meetings
from kvcast.protocol.messages.wire import BlockId


def place_of(block: BlockId) -> int:
    """Where a block stands in the table."""
    halves = (int.from_bytes(half, "little") for half in (block.key[:8], block.key[8:]))
    return Meetings()._code.name_of(block.namespace, *halves) >> (64 - WISHES_BITS)


@dataclass
class _Wish:
    block: BlockId
    first: int
    """The node that asked first."""
    until: float
    met: bool = False
    told: bool = False


class Table:
    """What `Meetings` has to say; times in seconds."""

    def __init__(self) -> None:
        self._wishes: dict[int, _Wish] = {}
        self._places: dict[BlockId, int] = {}
        self.told_in_all = 0

    def _place(self, block: BlockId) -> int:
        if block not in self._places:
            self._places[block] = place_of(block)
        return self._places[block]

    def _of(self, now: float, block: BlockId) -> _Wish | None:
        wish = self._wishes.get(self._place(block))
        return wish if wish is not None and wish.block == block and wish.until > now else None

    def asks(self, now: float, block: BlockId, node: int) -> None:
        wish = self._of(now, block)
        if wish is None:  # it is forgotten that another block stood there
            wish = self._wishes[self._place(block)] = _Wish(block, node, 0)
        wish.met |= wish.first != node
        wish.until = now + WAITS_NS / 1e9

    def is_met(self, now: float, block: BlockId) -> bool:
        wish = self._of(now, block)
        return wish is not None and wish.met

    def told(self, now: float, block: BlockId, node: int) -> None:
        self.told_in_all += 1
        wish = self._of(now, block)
        if wish is not None and wish.first == node:
            wish.met = wish.told = True

    def reads(self, now: float, block: BlockId, node: int) -> bool:
        wish = self._of(now, block)
        if wish is None:
            return False
        if wish.told:  # all know: who comes much later meets nobody
            wish.until = min(wish.until, now + READ_NS / 1e9)
            return False
        wish.met |= wish.first != node
        return wish.first != node

    def leaves(self, now: float, block: BlockId, node: int) -> None:
        wish = self._of(now, block)
        if wish is None or wish.first != node:
            return
        if wish.met:
            wish.told = True
        else:
            del self._wishes[self._place(block)]
