"""A map with a bound: beyond it, the entry that was not set for longest gives way.

Owns: the order, and the bound. Must not know: what is kept. For whatever a peer can make grow:
counts a client, guesses a namespace, blocks seen.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(OrderedDict[K, V]):
    """Holds the `limit` entries that were set last; setting an entry again makes it the youngest,
    reading it does not."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a map of at most {limit} entries holds nothing")
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.limit:
            self.popitem(last=False)
