"""Sums that must come out: what went in on one side, and by name what became of it on the other.

Owns: the arithmetic and how it is written down. Must not know: who counts what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Balance:
    """`given` and `found` are counts by name; both sides have the same sum, or something is lost.

    What is zero on either side is left out when it is written down.
    """

    of: str
    given: dict[str, int]
    found: dict[str, int]

    @property
    def unaccounted(self) -> int:
        """How much of what was given was not found; negative if more was found than given."""
        return sum(self.given.values()) - sum(self.found.values())

    @property
    def problem(self) -> str | None:
        """What is wrong with it, if anything."""
        if not self.unaccounted:
            return None
        return f"{self.of} do not add up by {self.unaccounted}: {self}"

    def __str__(self) -> str:
        return f"{side_of(self.given)} = {side_of(self.found)}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "of": self.of,
            "given": _present(self.given),
            "found": _present(self.found),
            "unaccounted": self.unaccounted,
        }


def _present(side: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in side.items() if count}


def side_of(side: dict[str, int]) -> str:
    """One side in words."""
    return " + ".join(f"{count:,} {name}" for name, count in _present(side).items()) or "0"
