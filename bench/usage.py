"""What a process takes at one moment (memory of its own, descriptors, threads), and its children.

Owns: how /proc is read. Must not know: what is too much.

Memory is what the process holds for itself (RssAnon); pages of files, and of shared memory such as
an agent's arena, are not in it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvcast.hostagent.agent_process import STANDBY_NAME

_FIELD = re.compile(rb"^(RssAnon|Threads):\s+(\d+)", re.MULTILINE)
_ENDED = re.compile(rb"^State:\s+[ZX]", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """What one process takes at one moment."""

    memory_mib: float
    descriptors: int
    threads: int


def usage(pid: int | str) -> Usage | None:
    """What that process ("self": this one) takes now; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_bytes()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    found = dict(_FIELD.findall(text))
    if b"RssAnon" not in found:  # it has ended, and nobody has waited for it yet
        return None
    return Usage(int(found[b"RssAnon"]) / 1024, descriptors, int(found[b"Threads"]))


def has_ended(pid: int) -> bool:
    """Whether nothing of that process runs any more, so that what it had open is closed. It gives
    its memory back before that, and one thread may end before the others."""
    try:
        text = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return True
    threads = dict(_FIELD.findall(text)).get(b"Threads", b"0")
    return _ENDED.search(text) is not None and int(threads) <= 1


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that run; none where it is gone."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def agents_of(supervisor: int) -> list[int]:
    """The agents of a node that keeps its arena, the oldest first: one, but for a moment after its
    death; the one that stands by is not among them."""
    return [pid for pid in children_of(supervisor) if _name(pid) != STANDBY_NAME]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip()
    except OSError:
        return ""


def anonymous_mib(pid: int | str) -> float:
    """The memory of a process that runs; ProcessLookupError if it does not."""
    taken = usage(pid)
    if taken is None:
        raise ProcessLookupError(f"process {pid} does not run")
    return taken.memory_mib
