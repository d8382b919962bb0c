"""What the P4 program and its readers both name: codes and multicast groups.

Owns: the numbers of p4/types.p4 that the controller, the tests and the models read; a test compares
them with the compiled program. Must not know: who reads them, or when the program writes which (the
switch program's section of docs/architecture.md, and the controls themselves).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Self


class Code(IntEnum):
    """A code of 8 bits, and what it says."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    @property
    def label(self) -> str:
        """Its name in reports and metrics."""
        return self.name.lower()

    @classmethod
    def counted(cls) -> dict[int, str]:
        """The labels of the codes that a table counts: all but 0."""
        return {code.value: code.label for code in cls if code}


class Kind(Code):
    """What a frame is (control FrameClass)."""

    ORDINARY = 0, "not kvcast, or the switch is told to be a plain one"
    MALFORMED = 1, ""
    READ = 2, "of a full segment: the only one that coalesces"
    PARTIAL_READ = 3, ""
    DATA = 5, ""
    LAST_DATA = 6, "ends the wait"
    MISS = 7, "ends the wait"
    PLAIN_DATA = 8, "answers a PARTIAL READ: touches nobody else's wait"
    PLAIN_ANSWER = 9, "OFFER, and a MISS that answers a PARTIAL READ"


class Decision(Code):
    """What became of a frame (table decisions, one counter each)."""

    NONE = 0, "not decided yet; never counted"
    HIT = 1, "READ answered from switch memory (counted once a READ)"
    JOIN = 2, "READ dropped: its answer is already on the way"
    NEW = 3, "READ opened a pending entry, and went to the home"
    COLLIDE = 4, "READ met another segment's live entry, and was forwarded plainly"
    EXPIRED = 5, "READ took over an entry past its lease, and went to the home"
    RETRY = 6, "READ repeated by its reader: refreshed the entry, and went to the home"
    PARTIAL = 7, "READ of a part of a segment: forwarded plainly"
    SHARED = 8, "DATA or MISS multicast to several ports"
    UNICAST = 9, "DATA, MISS or OFFER sent to its destination alone"
    GUARDED = 10, "kvcast frame of a source, namespace or bucket not allowed"
    DROPPED = 11, "no route, malformed, parser error, TTL"
    FORWARDED = 12, "ordinary traffic"
    SERVING = 13, "one more chunk served to a READ already counted as HIT"


class Fill(Code):
    """What became of a chunk of a resident segment that passed (table fills)."""

    NONE = 0, "not such a chunk; never counted"
    FILLED = 1, "stored"
    WRONG_DIGEST = 2, "of another copy of the block than the admitted one"
    NO_CHUNK = 3, "a chunk that the admitted segment does not have"


ALL_PORTS_GROUP: Final = 1
"""Multicast group of all host ports: always right, since egress filters by port_bits."""
RECIRCULATE_RID: Final = 255
"""Replication id of the copy that goes round again instead of out."""
