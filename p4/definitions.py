"""What the P4 program and its readers both name: codes, multicast groups, the round header.

Owns: the numbers that the program writes into its metadata, its tables of counters and its round
header. `kvcast.p4.generate` writes them as P4 constants; the controller, the tests and the model of
a Tofino read them here. Must not know: who reads them, or when the program writes which (the
switch program's section of docs/architecture.md, and the controls themselves).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Self

from kvcast.protocol.messages.wire import Field, Header


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
    LAST_DATA = 6, "ends the wait; WRITTEN is one"
    MISS = 7, "ends the wait"
    PLAIN_DATA = 8, "answers a PARTIAL READ: touches nobody else's wait"
    PLAIN_ANSWER = 9, "OFFER, and a MISS that answers a PARTIAL READ"
    WRITE = 10, "RDMA WRITE for whoever waits; treated like DATA"
    TO_ZONE = 11, "RoCE that a host sent to a reader's landing zone itself"


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
    SHARED = 8, "DATA, WRITTEN, MISS or an RDMA WRITE multicast to who waits"
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


class Delivery(Code):
    """Where a frame goes (each target's control Delivery or Departure, and egress)."""

    NOWHERE = 0, "the default: a frame that nobody decided on is dropped"
    UNICAST = 1, "to out_port"
    FLOOD = 2, "to all ports but the one it came from"
    SERVE = 3, "a chunk to the reader, and the READ round again"
    SERVE_GROUP = 4, "a chunk to every port of the reader's group, likewise"
    SHARED = 5, "to port_bits, by multicast, filter and rewrite"
    WRITE_SHARED = 6, "the same with an RDMA WRITE"


class Task(Code):
    """What a frame is that comes in by a Tofino's recirculation port, where no host can send."""

    NONE = 0, "leaves the switch, or came from outside"
    NEXT = 1, "a READ on its way to its next chunk"
    GATHER = 2, "a READ that collects one chunk, row by row, the last row first"
    STORE = 3, "DATA that leaves one chunk, row by row, the first row first"


class Match(Code):
    """What a Tofino's stateful ALU says of a pending entry by its two comparisons."""

    OTHER_FRESH = 1, "another segment's, or free; within its lease"
    MINE_FRESH = 2, "this segment's, within its lease"
    OTHER_STALE = 4, "another segment's, or free; past its lease"
    MINE_STALE = 8, "this segment's, past its lease"


ALL_PORTS_GROUP: Final = 1
"""Multicast group of all host ports: always right, since egress filters by port_bits."""
RECIRCULATE_RID: Final = 255
"""Replication id of the copy that goes round again instead of out."""
LOOP_GROUP: Final = 64
"""On a Tofino: multicast groups 64 to 67, one a pipe, hold its recirculation port alone."""
HEAT_DIGEST: Final = 1
"""On a Tofino: the digest type of a heat message."""

ROUND: Final = Header(
    "round_h",
    "In front of every frame between ingress and egress; stays there when the frame goes round.",
    (
        Field("task", 8, "of this frame; egress gives `again` to the copy of RECIRCULATE_RID"),
        Field("again", 8, ""),
        Field("delivery", 8, "DELIVER_*"),
        Field("row", 8, "of the cell, to be read or written next"),
        Field("index", 16, "of that row in the cells' registers"),
        Field("bank", 8, "of the cells"),
        Field("rewritten", 8, "1: the IPv4 checksum must be made anew"),
        Field("last", 8, "1: no chunk comes after this one"),
        Field("serve_group", 16, ""),
        Field("unused", 7, "padding"),
        Field("ingress_port", 9, "flooding leaves it out"),
        Field("port_bits", 32, ""),
        Field("generation", 32, ""),
    ),
)
