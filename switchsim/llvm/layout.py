"""Where everything lies in memory: a packet, a table's records, the context.

Owns the offsets that compiled code and the control plane agree on, as a function of the program
alone (so that compiled code can be kept on disk). Must not know IR, nor what anything means.

A packet (its PHV) is one block of bytes:

1. packet registers (REG_*), then per stack its next index, per packet header with a varbit field
   the length of that in bits, and per header its validity byte;
2. metadata: a field of up to 128 bits as a native integer, a wider one as bytes in network order
   (the length of a varbit field is in front);
3. each packet header as its bytes on the wire (a varbit field at its maximal length), so that
   extracting and emitting copy bytes, and a wide field is memory moved once.

Parts 1 and 2 are the *head*, which is what makes copies of a packet differ most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcast.switchsim import ir
from kvcast.switchsim.ir import UnsupportedConstruct

NATIVE_BITS = 128
"""Widest field that is kept as an integer."""

MAX_PHV_BYTES = 1 << 20

# Packet registers: offset in the PHV. The first four have 64 bits, the others 32.
REG_NOW = 0
REG_PACKET_LENGTH = 8
REG_INGRESS_LENGTH = 16
REG_TRUNCATE = 24
REG_CLONE_SESSION = 32
REG_CLONE_LIST = 36
REG_LEARN_LIST = 40
REG_RESUBMIT_LIST = 44
REG_RECIRCULATE_LIST = 48
REG_EXIT = 52
REG_CHECKSUM_ERROR = 56
REG_PARSER_ERROR = 60
_AFTER_REGISTERS = 64


def align(value: int, to: int) -> int:
    return -(-value // to) * to


def container_bits(width: int) -> int:
    """Bits of the native integer that holds a field of `width` <= 128 bits."""
    for bits in (8, 16, 32, 64):
        if width <= bits:
            return bits
    return 128


def stored_bytes(width: int) -> int:
    """Bytes of a value in a record or a register: native up to 128 bits, else network order."""
    return container_bits(width) // 8 if width <= NATIVE_BITS else (width + 7) // 8


def pack_value(value: int, width: int) -> bytes:
    size = stored_bytes(width)
    return value.to_bytes(size, "little" if width <= NATIVE_BITS else "big")


def unpack_value(data: bytes, width: int) -> int:
    return int.from_bytes(data, "little" if width <= NATIVE_BITS else "big")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a field lies. In metadata `native` fields are integers of `container` bits; all others
    are `width` bits in network order, of which the first is bit `bit` (0 highest) of the byte."""

    offset: int
    bit: int
    width: int
    signed: bool
    native: bool
    length: int | None = None
    """Where the length in bits of a variable-length field is (uint32)."""

    @property
    def varbit(self) -> bool:
        return self.length is not None

    @property
    def container(self) -> int:
        return container_bits(self.width)

    @property
    def end(self) -> int:
        if self.native:
            return self.offset + self.container // 8
        return self.offset + (self.bit + self.width + 7) // 8

    @property
    def whole_bytes(self) -> bool:
        """A run of bytes in network order."""
        return not self.native and self.bit == 0 and self.width % 8 == 0


class PhvLayout:
    """Offsets in a PHV of one program."""

    def __init__(self, program: ir.Program) -> None:
        self.program = program
        headers = program.headers
        at = _AFTER_REGISTERS
        self.stack_next = {stack: at + 4 * n for n, stack in enumerate(program.all_stacks())}
        at += 4 * len(self.stack_next)
        self.varbit_length: list[int | None] = []
        for h in headers:
            here = h.varbit is not None and not h.metadata
            self.varbit_length.append(at if here else None)
            at += 4 if here else 0
        self.valid = [at + n for n in range(len(headers))]
        """Validity bytes; metadata has one too, but nobody reads it: metadata is always valid."""
        at = align(at + len(headers), 16)
        self.metadata_start = at
        self.places: list[tuple[Place, ...]] = [()] * len(headers)
        self.block: list[tuple[int, int]] = [(0, 0)] * len(headers)
        """(offset, bytes) of the fields of each header."""
        for number, h in enumerate(headers):
            if h.metadata:
                start = at
                places: list[Place] = []
                if h.varbit is not None:
                    self.varbit_length[number] = at
                    at += 4
                for f in h.fields:
                    if f.varbit:
                        if f.width % 8:
                            raise UnsupportedConstruct("variable-length field of odd bits", h.name)
                        length = self.varbit_length[number]
                        places.append(Place(at, 0, f.width, False, False, length))
                        at += f.width // 8
                    elif f.width <= NATIVE_BITS:
                        at = align(at, container_bits(f.width) // 8)
                        places.append(Place(at, 0, f.width, f.signed, True))
                        at += container_bits(f.width) // 8
                    else:
                        # Right-aligned in whole bytes.
                        size = (f.width + 7) // 8
                        places.append(Place(at, -f.width % 8, f.width, f.signed, False))
                        at += size
                at = align(at, 16)
                self.places[number] = tuple(places)
                self.block[number] = (start, at - start)
        self.metadata_end = at
        self.head_bytes = align(at, 64)
        at = self.head_bytes
        for number, h in enumerate(headers):
            if h.metadata:
                continue
            self.places[number], size = _wire_places(h, at, self.varbit_length[number])
            self.block[number] = (at, size)
            at = align(at + size + 8, 16)  # fields are read in wholes of up to 16 bytes
        self.bytes = align(at + 32, 64)
        if self.bytes > MAX_PHV_BYTES:
            raise UnsupportedConstruct(f"headers of {self.bytes} bytes", "headers")
        self.siblings = [
            tuple(self.valid[other] for other in program.siblings(n)) for n in range(len(headers))
        ]

    def place(self, ref: ir.FieldRef) -> Place:
        if ref.field == ir.VALID:
            return Place(self.valid[ref.header], 0, 1, False, True)
        return self.places[ref.header][ref.field]

    def varbit(self, header: int) -> Place | None:
        """The variable-length field of a header, if it has one."""
        field = self.program.headers[header].varbit
        return None if field is None else self.places[header][field]

    def wire_bytes(self, header: int) -> int:
        """Bytes on the wire without the varbit field."""
        return self.program.headers[header].fixed_bits // 8


def _wire_places(h: ir.Header, at: int, varbit_length: int | None) -> tuple[tuple[Place, ...], int]:
    bits = 0
    places: list[Place] = []
    for f in h.fields:
        if f.varbit and (bits % 8 or f.width % 8):
            raise UnsupportedConstruct("variable-length field that starts within a byte", h.name)
        length = varbit_length if f.varbit else None
        places.append(Place(at + bits // 8, bits % 8, f.width, f.signed, False, length))
        bits += f.width
    return tuple(places), (bits + 7) // 8


# --- action arguments and records -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArgumentsLayout:
    """How the arguments of an action lie behind one another."""

    widths: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int

    @staticmethod
    def of(action: ir.Action) -> ArgumentsLayout:
        offsets: list[int] = []
        at = 0
        for parameter in action.parameters:
            size = stored_bytes(parameter.width)
            at = align(at, min(size, 16) if parameter.width <= NATIVE_BITS else 1)
            offsets.append(at)
            at += size
        widths = tuple(p.width for p in action.parameters)
        return ArgumentsLayout(widths, tuple(offsets), align(at, 16))

    def pack(self, values: Sequence[int]) -> bytes:
        data = bytearray(self.size)
        for value, width, offset in zip(values, self.widths, self.offsets, strict=True):
            data[offset : offset + stored_bytes(width)] = pack_value(value, width)
        return bytes(data)


# What a record of an indirect table refers to.
TO_ACTION, TO_MEMBER, TO_GROUP = 0, 1, 2

STATE_BYTES = 32
"""Of an entry's state, which outlives versions of its record: packets, bytes, time of the last hit,
address of its meter; 64 bits each."""

METER_HEAD_BYTES = 8
METER_RATE_BYTES = 32
"""A meter: the number of rates, then for each rate, the highest first: tokens a microsecond
(double), burst, tokens, tokens since time 0 when last seen (or -1)."""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """A table's record: key words, what it does, its rank, and arguments.

    The key is the fields side by side, the first one highest, in words of 64 bits, the lowest
    word first. Numbers that follow are offsets in the record.
    """

    key_bits: int
    words: int
    action: int
    """uint32 number of the action in the table's list."""
    state: int
    """uint32 number of the entry's state block."""
    kind: int
    """uint32 TO_*."""
    target: int
    """uint32 slot of a member or group."""
    priority: int
    """int64."""
    handle: int
    mask: int
    """Key words of don't-care bits, in a range table."""
    ranges: tuple[tuple[int, int, int, int], ...]
    """(key field, width, offset of the low end, offset of the high end)"""
    arguments: int
    bytes: int

    @staticmethod
    def of(table: ir.Table, argument_bytes: int) -> RecordLayout:
        bits = sum(k.width for k in table.key)
        words = max(1, (bits + 63) // 64)
        at = 8 * words
        action, state, kind, target = at, at + 4, at + 8, at + 12
        priority, handle = at + 16, at + 24
        at += 32
        mask = at
        ranges: list[tuple[int, int, int, int]] = []
        if table.match == "range":
            at += 8 * words
            for number, k in enumerate(table.key):
                if k.match == "range":
                    size = align(stored_bytes(k.width), 8)
                    ranges.append((number, k.width, at, at + size))
                    at += 2 * size
        arguments = align(at, 16)
        return RecordLayout(
            bits,
            words,
            action,
            state,
            kind,
            target,
            priority,
            handle,
            mask,
            tuple(ranges),
            arguments,
            align(arguments + argument_bytes, 16),
        )


MEMBER_ARGUMENTS = 16
"""A record of an action profile's member: uint32 number of the action, arguments at 16."""


# --- the context ------------------------------------------------------------------------------


class ContextLayout:
    """Named words of the context; what a name holds is said where it is used."""

    def __init__(self, stats: Sequence[str], phv: PhvLayout) -> None:
        self._offsets: dict[str, int] = {}
        self._at = 0
        for name in stats:
            self.add(f"stats.{name}")
        for name in (
            "epoch",
            "digests",  # produced since the load
            "digest_tail",  # taken
            "digest_ring",
            "traps",
            "now",
            "port",
            "out",
            "passes",
            "clones",
            "arena",
            "arena_at",
            "arena_end",
            "ingress_first",
            "ingress_last",
            "egress_first",
            "egress_last",
            "groups",
            "sessions",
            "random",
            "random_at",
            "log_on",
            "log_ring",
            "log_head",
            "log_tail",
        ):
            self.add(name)
        self._phv_bytes = phv.bytes

    def add(self, name: str) -> int:
        """A 64-bit word of this name."""
        assert name not in self._offsets
        self._offsets[name] = self._at
        self._at += 8
        return self._offsets[name]

    def __getitem__(self, name: str) -> int:
        return self._offsets[name]

    @property
    def phv(self) -> int:
        """Offset of the PHV of the packet that is being processed; after all words."""
        return align(self._at, 128)

    @property
    def bytes(self) -> int:
        return align(self.phv + self._phv_bytes, 4096)
