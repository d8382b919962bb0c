"""This node's ends of the TCP connections on which compiled code moves blocks (conveyors and
pushes), by their numbers in that code's tables.

Owns: that there is one at most to each node where nodes begin them, that none outlives the node
at its other end, and that each ends once. Must not know: sockets, what goes on connections
(`conveyor`, `pushing`), or how two nodes agree on one (`bulk_link`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

End = TypeVar("End")


class Table(NamedTuple):
    """Compiled code's table of ends of one kind."""

    stands: Callable[[int], int | None]
    """There is a connection to that node; its number, None where there is no room for it."""
    gone: Callable[[int], None]
    """A connection is over."""
    row: Callable[[int], Any]
    """What stands there of one: its `node` above all."""


class Ends(Generic[End]):
    """Ends of one kind, whatever moves their bytes. `begin` has one served from now on, by its
    number, and says False where that cannot be; `end` undoes that, and closes it. `begun_here`: we
    have made these connections, each to a node by its number; else the other node has, and may have
    one."""

    def __init__(
        self,
        table: Table,
        *,
        begin: Callable[[int, End], bool],
        end: Callable[[int, End], None],
        begun_here: bool,
    ) -> None:
        self._table = table
        self._begin = begin
        self._end = end
        self._begun_here = begun_here
        self._ends: dict[int, tuple[End, str]] = {}

    def add(self, end: End, node: int, node_id: str) -> bool:
        """There is a connection to that node; False where there can be no more: then it is the
        caller's to close."""
        if not self._begun_here:
            for earlier, (_, other) in list(self._ends.items()):
                if other == node_id:
                    self.close(earlier)
        number = self._table.stands(node)
        if number is None:
            return False
        if not self._begin(number, end):
            self._table.gone(number)
            return False
        self._ends[number] = end, node_id
        return True

    def follow(self, index_of: Mapping[str, int]) -> None:
        """The nodes have these numbers from now on."""
        for number, (_, node_id) in list(self._ends.items()):
            node, row = index_of.get(node_id), self._table.row(number)
            if node is None or (self._begun_here and node != row.node):
                self.close(number)
            else:
                row.node = node

    def close(self, number: int) -> None:
        """One connection ends, if it has not yet."""
        if number in self._ends:
            end, _ = self._ends.pop(number)
            self._end(number, end)
            self._table.gone(number)

    def close_all(self) -> None:
        """All of them do."""
        for number in list(self._ends):
            self.close(number)

    def items(self) -> list[tuple[int, End]]:
        """Those that there are, by number."""
        return [(number, end) for number, (end, _) in self._ends.items()]
