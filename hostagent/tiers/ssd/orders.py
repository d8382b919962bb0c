"""What the SSD tier's core asks of its disk.

Owns: the words of it. Must not know: who asks and why (`kvcast.hostagent.core.ssd`), or who does it
(`files`; in the simulation a simulated disk).

A disk does orders in any order, and tells of each once, by `ended`, in the thread of the core.
What was written before a flush began is on the disk when that flush has ended; of what was not,
anything may be there after a crash: all, nothing, or a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

NOTHING: Final = memoryview(b"")
DONE: Final = ""
"""No error."""


class Kind(Enum):
    """What is to be done."""

    READ = "read"
    """Fill `view` from the file, and make its digest."""
    WRITE = "write"
    """Write `view`, whatever lies after it up to the next page."""
    FLUSH = "flush"


@dataclass(slots=True, eq=False)
class Order:
    """One thing to do to file number `file`, from `offset` on, in bytes. `view` stays as it is
    until `ended(now, error, digest)`: `error` is DONE, or what went wrong; `digest` is of what was
    read. `hurried`: much waits for it."""

    kind: Kind
    file: int
    ended: Callable[[float, str, int], None]
    offset: int = 0
    view: memoryview = NOTHING
    hurried: bool = False
