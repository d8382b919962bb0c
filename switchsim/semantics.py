"""What both engines must do alike and no specification says: bounds, numbers, encodings.

Owns: the bounds on what one frame may cause, simple_switch's numbers for kinds of packets and clone
requests, the numbers of P4's core errors in a program, the form of log messages. Must not know: how
either engine works. The numbers follow behavioral-model's simple_switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

from kvcast.switchsim.ir import Program, ProgramError

MAX_PASSES = 4096
"""Passes of ingress, and egress clones, that one frame may cause; the rest are dropped."""

MAX_STATES = 65536
"""States that one packet may pass, so that a loop that extracts nothing ends."""

MAX_STEPS = 1_000_000
"""Statements that one call of an action with jumps may execute, so that no program hangs."""

MAX_SHIFT = 1 << 16
"""A left shift beyond the widest field leaves nothing in any field; so it gives 0 at once."""

UNLIMITED = 1 << 62
"""Bytes that a frame is cut to which nobody cuts."""

# PktInstanceType of simple_switch.
NORMAL, INGRESS_CLONE, EGRESS_CLONE = 0, 1, 2
RECIRCULATED, REPLICATION, RESUBMITTED = 4, 5, 6

TIMESTAMP_MASK = (1 << 48) - 1

# A clone request in the packet register: the session and this bit.
CLONE_REQUESTED = 0x8000
SESSION_MASK = 0x7FFF

_CORE_ERRORS = (
    "NoError",
    "PacketTooShort",
    "NoMatch",
    "StackOutOfBounds",
    "HeaderTooShort",
    "ParserTimeout",
    "ParserInvalidArgument",
)


class Errors:
    """Numbers of P4's core errors in this program."""

    def __init__(self, program: Program) -> None:
        numbers = dict(program.errors)
        unused = max([n for _, n in program.errors], default=-1) + 1
        for name in _CORE_ERRORS:
            if name not in numbers:
                numbers[name] = unused
                unused += 1
        self.no_error = numbers["NoError"]
        self.packet_too_short = numbers["PacketTooShort"]
        self.stack_out_of_bounds = numbers["StackOutOfBounds"]
        self.header_too_short = numbers["HeaderTooShort"]
        self.invalid_argument = numbers["ParserInvalidArgument"]


def check_ports(program: Program) -> None:
    """ProgramError unless the fields that hold ports are as wide as simple_switch has them."""
    for name in ("ingress_port", "egress_spec", "egress_port"):
        ref = program.intrinsic_field(f"standard_metadata.{name}")
        if ref is None or program.width(ref) != 9:
            raise ProgramError(f"standard_metadata.{name} is not 9 bits wide")


def format_pieces(text: str) -> list[str]:
    r"""The text around each {}; \{ and \} are braces."""
    pieces, at, current = [], 0, ""
    while at < len(text):
        if text[at] == "\\" and text[at + 1 : at + 2] in ("{", "}"):
            current += text[at + 1]
            at += 2
        elif text[at] == "{" and "}" in text[at:]:
            pieces.append(current)
            current = ""
            at = text.index("}", at) + 1
        else:
            current += text[at]
            at += 1
    return [*pieces, current]


def filled(pieces: Sequence[str], values: Sequence[str]) -> str:
    """The pieces with the values between them, {} where one is missing."""
    between = chain(values, repeat("{}"))
    return pieces[0] + "".join(f"{next(between)}{piece}" for piece in pieces[1:])
