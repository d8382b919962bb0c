"""The courier's compiled functions, for Python.

Owns: which there are, and how Python reads a record. Must not know: what Python does with them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from kvcast.native.subset import Library, ctypes_of
from kvcast.protocol.courier.arrivals import came, frame_came
from kvcast.protocol.courier.conveyed import block_came, cut_off, progressed, reply_came
from kvcast.protocol.courier.endings import close_batch, proves_itself
from kvcast.protocol.courier.hearing import hear
from kvcast.protocol.courier.in_flight import asked_for
from kvcast.protocol.courier.requests import next_read
from kvcast.protocol.courier.structures import LEAST_PART, Answer, Courier, Question, Record
from kvcast.protocol.courier.waiting import expire, leave, unask, yield_all, yield_block
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.questions import ANSWER, QUESTION

assert QUESTION.size == ctypes.sizeof(ctypes_of(Question))
assert ANSWER.size == ctypes.sizeof(ctypes_of(Answer)) - shared.WORD_BYTES
RECORD: Final = struct.Struct("=IIQ16sIIII9Q")
assert RECORD.size == ctypes.sizeof(ctypes_of(Record))


class Told(NamedTuple):
    """A `Record`, for Python."""

    kind: int
    client: int
    handle: int
    key: bytes
    namespace: int
    landing: int
    home: int
    flags: int
    size_bytes: int
    digest: int
    elapsed_ns: int
    rtt_ns: int
    read_ns: int
    offset: int
    room_bytes: int
    session: int
    check: int


class Compiled(NamedTuple):
    """Entry points for Python; `Courier`s are given by their addresses, times are nanoseconds."""

    hear: Callable[[int, int, int, int, int], int]
    frame_came: Callable[[int, int, int, int, int], bool]
    came: Callable[[int, int], None]
    expire: Callable[[int, int], int]
    yield_block: Callable[[int, int, int, int, int], bool]
    yield_all: Callable[[int], None]
    leave: Callable[[int, int], None]
    unask: Callable[[int, int, int], None]
    reply_came: Callable[[int, int], None]
    block_came: Callable[[int, int, int, int], None]
    progressed: Callable[[int, int, int], None]
    cut_off: Callable[[int, int], None]
    next_read: Callable[[int], bool]
    close_batch: Callable[[int, int], None]
    proves_itself: Callable[[int], bool]
    asked_for: Callable[[int, int, int, int], int]


@cache
def compiled() -> Compiled:
    """The compiled functions; made, or read from the cache on disk, when first asked for."""
    functions = (
        *(hear, frame_came, came, expire, yield_block, yield_all, leave, unask),
        *(reply_came, block_came, progressed, cut_off, next_read),
        *(close_batch, proves_itself, asked_for),
    )
    library = Library(*functions)
    return Compiled(*(library.call(function) for function in functions))


def fits(size_bytes: int, room_bytes: int) -> bool:
    """Whether a block of that size may land in such a place."""
    return room_bytes // LEAST_PART < size_bytes <= room_bytes


def blank() -> Any:
    """A courier without memory of its own: whoever makes one gives it its tables."""
    return ctypes_of(Courier)()
