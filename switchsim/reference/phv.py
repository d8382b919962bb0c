"""Where everything about a packet lives: one flat list of integers.

A packet being processed (its *packet header vector*) is a `list[int]`, so that a copy for
multicast is one list copy. This module owns the layout of that list and nothing else. In order:

1. packet registers: what simple_switch keeps beside the headers (clone request, exit flag, ...);
2. the metadata headers, side by side, so that resetting metadata is one slice assignment;
3. the packet headers: a validity slot, the fields in order, and for a header with a varbit
   field one slot more: that field's present length in bits;
4. for each header stack its `nextIndex`.

A field slot holds the exact value: unsigned fields 0 .. 2^w - 1, signed ones -2^(w-1) .. .
"""

from __future__ import annotations

from typing import TypeAlias

from kvcast.switchsim.ir import VALID, FieldRef, Program
from kvcast.switchsim.semantics import UNLIMITED

Phv: TypeAlias = list[int]

# Packet registers. NOW_US to CHECKSUM_ERROR are slots of every layout.
NOW_US = 0
PACKET_LENGTH = 1
"""simple_switch's packet length register: follows setValid and setInvalid, nothing else."""
INGRESS_LENGTH = 2
"""Length at the ingress, which is what counters and meters count."""
TRUNCATE_TO = 3
CLONE_SESSION = 4
"""Session id with CLONE_REQUESTED set, or 0."""
CLONE_FIELD_LIST = 5
LEARN_LIST = 6
RESUBMIT_LIST = 7
RECIRCULATE_LIST = 8
EXIT = 9
PARSER_ERROR = 10
CHECKSUM_ERROR = 11
REGISTERS = 12


class Layout:
    """Slot numbers of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        count = len(program.headers)
        self.valid = [0] * count
        self.first_field = [0] * count
        self.end = [0] * count
        self.length_slot: list[int | None] = [None] * count
        """Slot of the varbit field's length in bits, if the header has such a field."""
        at = REGISTERS
        self.metadata_start = at
        for metadata in (True, False):
            for number, header in enumerate(program.headers):
                if header.metadata != metadata:
                    continue
                self.valid[number] = at
                self.first_field[number] = at + 1
                at += 1 + len(header.fields)
                if header.varbit is not None:
                    self.length_slot[number] = at
                    at += 1
                self.end[number] = at
            if metadata:
                self.metadata_end = at
        self.stack_next = {stack: at + n for n, stack in enumerate(program.all_stacks())}
        at += len(self.stack_next)
        self.size = at
        self.siblings = [
            tuple(self.valid[other] for other in program.siblings(n)) for n in range(count)
        ]
        """Validity slots that setValid() of a union's member must clear."""
        self.empty: Phv = [0] * self.size
        """A new packet: nothing valid, all zero. Metadata is always valid."""
        self.empty[TRUNCATE_TO] = UNLIMITED
        for number, header in enumerate(program.headers):
            if header.metadata:
                self.empty[self.valid[number]] = 1
        self.no_metadata: Phv = self.empty[self.metadata_start : self.metadata_end]

    def slot(self, ref: FieldRef) -> int:
        if ref.field == VALID:
            return self.valid[ref.header]
        return self.first_field[ref.header] + ref.field

    def width(self, ref: FieldRef) -> int:
        return self.program.width(ref)

    def signed(self, ref: FieldRef) -> bool:
        return ref.field != VALID and self.program.headers[ref.header].fields[ref.field].signed

    def reset_metadata(self, phv: Phv) -> None:
        phv[self.metadata_start : self.metadata_end] = self.no_metadata


def to_signed(value: int, width: int) -> int:
    """The two's complement reading of the low `width` bits."""
    half = 1 << (width - 1)
    return ((value + half) & ((1 << width) - 1)) - half if width else 0
