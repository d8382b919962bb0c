"""The lander: bytes of blocks from a TCP socket to where they belong, in compiled code.

Owns: the system calls of that, the digest of what comes, made piece by piece while the processor's
cache has it, and how long to wait for more. Must not know: what a message is, whose block it is,
or what becomes of it (`kvcast.protocol.links.stream` does).

Compiled code must be able to call xxHash's functions. The module `xxhash` from PyPI exports them.
If an installed one does not, there is no lander, and its callers read for themselves.

The bytes of blocks that nobody wants are read and thrown away, and have no digest.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple

from kvcast.native.linux import (
    CLOCK_MONOTONIC,
    EAGAIN,
    EINTR,
    MSG_DONTWAIT,
    POLLIN,
    SO_RCVLOWAT,
    SOL_SOCKET,
    IoVec,
    MsgHdr,
    PollFd,
    TimeSpec,
    clock_gettime,
    error_number,
    ppoll,
    recv,
    recvmmsg,
    setsockopt,
)
from kvcast.native.subset import (
    I32,
    I64,
    U32,
    U64,
    Inline,
    Library,
    Ptr,
    Struct,
    address_of,
    ctypes_of,
    native,
    signed,
    unsigned,
)
from kvcast.protocol.courier import call_digest, call_reset, call_update
from kvcast.protocol.links.stream import Landed, Room
from kvcast.protocol.messages.wire import DIGEST_STATE_BYTES
from kvcast.protocol.placement import address_of_buffer
from kvcast.service.link_driver import LOW_WATER_BYTES, MOMENT_S

ROOMS: Final = 64
"""Rooms that are told at once."""
PIECE_BYTES: Final = 256 * 1024
"""So much is read at once: the cache still has it when its digest is made."""
MOMENT_NS: Final = round(MOMENT_S * 1e9)
"""How long one call waits, all in all."""
SINK_BYTES: Final = 64 * 1024
_SINK: Final = bytearray(SINK_BYTES)
"""Where all connections' bytes go that nobody wants."""
_MOST_NS: Final = 1_000_000_000

# What `land` returns.
_LANDED: Final = 0
_WAITS: Final = 1
_ENDED: Final = 2
_FAILED: Final = 3


class NativeRoom(Struct):
    """Where the bytes of a block go."""

    block: U64
    """The first byte's address; 0: nobody wants them."""
    size: U64
    there: U64
    """So many of them have come."""
    digest: U64
    """Of all of them, once they have."""


class Landing(Struct):
    """The state of one connection."""

    fd: I32
    failure: I32
    """errno, of a call that failed."""
    low_water: U64
    """The socket says that it can be read when so much is there."""
    rooms: Ptr[NativeRoom]
    count: U64
    first: U64
    """The room that the next byte belongs to."""
    begun: U64
    """Whether the hash is of that room's bytes."""
    taken: U64
    """Bytes, by the last call."""
    moment_ns: U64
    """How long a call waits, all in all."""
    sink: U64
    state: U64
    reset: U64
    update: U64
    digest: U64
    poll: Annotated[Ptr[PollFd], Inline(1)]
    time: Annotated[Ptr[TimeSpec], Inline(1)]
    message: Annotated[Ptr[MsgHdr], Inline(1)]
    vectors: Annotated[Ptr[IoVec], Inline(2)]


@native
def now_ns(s: Landing) -> U64:
    time = s.time[0]
    clock_gettime(CLOCK_MONOTONIC, time)
    return time.seconds * _MOST_NS + time.nanoseconds


@native
def wait_for_bytes(s: Landing, size: U64, until_ns: U64) -> bool:
    """Wait until so much is there, which certainly comes, or the other end has closed; False once
    it is too late."""
    if size > LOW_WATER_BYTES:
        size = 0 + LOW_WATER_BYTES
    if size != s.low_water:
        s.low_water = size
        # The field's lower half is the int that is asked for.
        setsockopt(s.fd, SOL_SOCKET, SO_RCVLOWAT, address_of(s) + 8, 4)
    now = now_ns(s)
    if now >= until_ns:
        return False
    time = s.time[0]
    time.seconds = 0
    time.nanoseconds = until_ns - now
    poll = s.poll[0]
    poll.fd = s.fd
    poll.events = POLLIN
    return ppoll(poll, 1, time, 0) > 0


@native
def wait_for_any(s: Landing) -> None:
    """Have the socket say that it can be read when anything is there: what comes next may be less
    than what was waited for last."""
    if s.low_water != 1:
        s.low_water = 1
        setsockopt(s.fd, SOL_SOCKET, SO_RCVLOWAT, address_of(s) + 8, 4)


@native
def begin(s: Landing, room: NativeRoom) -> None:
    """Make the hash one of what has come of this room's bytes."""
    s.begun = 1
    if room.block != 0:
        call_reset(s.reset, s.state)
        if room.there != 0:
            call_update(s.update, s.state, room.block, room.there)


@native
def take(s: Landing, room: NativeRoom, size: U64) -> None:
    """So many more bytes are in this room."""
    if room.block != 0:
        call_update(s.update, s.state, room.block + room.there, size)
    room.there += size
    s.taken += size
    if room.there == room.size:
        if room.block != 0:
            room.digest = call_digest(s.digest, s.state)
        s.first += 1
        s.begun = 0


@native
def fill_rooms(s: Landing, room: NativeRoom, left: U64) -> I64:
    """Read into a room, of which so much is left, and into the one after it if there is one: as
    much as `recv` says, of both."""
    length = left
    if length > PIECE_BYTES:
        length = 0 + PIECE_BYTES
    if room.block == 0:
        if length > SINK_BYTES:
            length = 0 + SINK_BYTES
        return recv(s.fd, s.sink, length, MSG_DONTWAIT)
    to = room.block + room.there
    if left >= PIECE_BYTES or s.first + 1 >= s.count or s.rooms[s.first + 1].block == 0:
        return recv(s.fd, to, length, MSG_DONTWAIT)
    following = s.rooms[s.first + 1]
    more = following.size - following.there
    if more > PIECE_BYTES - left:
        more = PIECE_BYTES - left
    s.vectors[0].base = to
    s.vectors[0].length = left
    s.vectors[1].base = following.block + following.there
    s.vectors[1].length = more
    message = s.message[0]
    message.iov = address_of(s.vectors)
    message.iov_length = 2
    count = signed(0 + recvmmsg(s.fd, s.message, 1, MSG_DONTWAIT, 0))
    if count < 1:
        return count
    return signed(0 + message.length)


@native
def land(s: Landing, most: U64) -> U32:
    """Read into the rooms until they are full, `most` bytes are there, or none come for a while."""
    s.taken = 0
    until_ns = 0
    while s.first < s.count and s.taken < most:
        room = s.rooms[s.first]
        if s.begun == 0:
            begin(s, room)
        left = room.size - room.there
        got = fill_rooms(s, room, left)
        if got > 0:
            size = unsigned(got)
            if size <= left:
                take(s, room, size)
            else:
                take(s, room, left)
                begin(s, s.rooms[s.first])
                take(s, s.rooms[s.first], size - left)
        elif got == 0:
            return _ENDED
        else:
            error = error_number()
            if error == EAGAIN:
                if until_ns == 0:
                    until_ns = now_ns(s) + s.moment_ns
                if s.first + 1 < s.count:
                    left += s.rooms[s.first + 1].size - s.rooms[s.first + 1].there
                if not wait_for_bytes(s, left, until_ns):
                    return _WAITS
            elif error != EINTR:
                s.failure = error
                return _FAILED
    return _LANDED


# --- Python's side ----------------------------------------------------------------------------

_ROOM: Final = struct.Struct("=4Q")
assert _ROOM.size == ctypes.sizeof(ctypes_of(NativeRoom))
_NATIVE_LANDING: Final = ctypes_of(Landing)
assert _NATIVE_LANDING.low_water.offset == 8


class Hashing(NamedTuple):
    """Addresses of xxHash's functions."""

    reset: int
    update: int
    digest: int


@cache
def hashing() -> Hashing | None:
    """Where xxHash's functions lie; None where they cannot be called."""
    path = importlib.import_module("xxhash._xxhash").__file__
    library = ctypes.CDLL(path)
    addresses = []
    for names in (
        ("XXH3_64bits_reset",),
        ("XXH3_64bits_update_dispatch", "XXH3_64bits_update"),
        ("XXH3_64bits_digest",),
    ):
        found = next((name for name in names if hasattr(library, name)), None)
        if found is None:
            return None
        addresses.append(ctypes.cast(getattr(library, found), ctypes.c_void_p).value)
    return Hashing(*(address or 0 for address in addresses))


@cache
def _compiled() -> Callable[[int, int], int]:
    return Library(land).call(land)


def available() -> bool:
    """Whether there can be a `Lander`."""
    return hashing() is not None


class Landings:
    """`count` landings of two rooms each, for compiled code that reads many connections: at first
    each reads a header, and then it is that code's."""

    def __init__(self, count: int, functions: Hashing) -> None:
        self._landings = (_NATIVE_LANDING * count)()
        self.address = ctypes.addressof(self._landings)
        """Where compiled code finds them, one after the other."""
        self._rooms = (ctypes_of(NativeRoom) * (2 * count))()
        self._states = bytearray((count + 1) * DIGEST_STATE_BYTES)
        state = address_of_buffer(self._states) + 63 & ~63
        for number, landing in enumerate(self._landings):
            landing.fd = -1
            landing.rooms = ctypes.addressof(self._rooms[2 * number])
            landing.sink = address_of_buffer(_SINK)
            landing.state = state + number * DIGEST_STATE_BYTES
            landing.reset, landing.update, landing.digest = functions

    def begin(self, number: int, fd: int, header: int, header_bytes: int) -> None:
        """One reads from `fd` now: first a header, which goes to that address."""
        landing, room = self._landings[number], self._rooms[2 * number]
        landing.fd, landing.low_water = fd, 1
        landing.first = landing.begun = 0
        landing.count = 1
        room.block, room.size, room.there = header, header_bytes, 0

    def end(self, number: int) -> None:
        """One reads no more."""
        self._landings[number].fd = -1


class Lander:
    """Reads one connection's blocks from `fd`, which stays open as long as this is used."""

    def __init__(self, fd: int) -> None:
        functions = hashing()
        assert functions is not None
        self._code = _compiled()
        self._landing: Any = _NATIVE_LANDING()
        self._address = ctypes.addressof(self._landing)
        self._rooms = bytearray(ROOMS * _ROOM.size)
        self._loaded: list[Room] = []
        self._state = bytearray(DIGEST_STATE_BYTES)
        landing = self._landing
        landing.fd = fd
        landing.low_water = 1
        landing.rooms = address_of_buffer(self._rooms)
        landing.sink = address_of_buffer(_SINK)
        landing.state = address_of_buffer(self._state) + 63 & ~63
        landing.reset, landing.update, landing.digest = functions

    @property
    def low_water_bytes(self) -> int:
        """What the socket's SO_RCVLOWAT was set to last."""
        size_bytes: int = self._landing.low_water
        return size_bytes

    @low_water_bytes.setter
    def low_water_bytes(self, size_bytes: int) -> None:
        self._landing.low_water = size_bytes

    def land(self, rooms: Sequence[Room], at_most: int, *, patient: bool = True) -> Landed:
        """Read into these rooms, one after the other, until about `at_most` bytes have come, or no
        more come for a moment, if `patient`, or just now; they are to be told to each `Room` by the
        caller before the next call."""
        landing = self._landing
        landing.moment_ns = MOMENT_NS if patient else 0
        first = self._load(rooms)
        why = self._code(self._address, at_most)
        after = landing.first
        digests = []
        for number in range(first, after):
            digests.append(_ROOM.unpack_from(self._rooms, number * _ROOM.size)[3] or 1)
        lost = None
        if why == _ENDED:
            lost = ""
        elif why == _FAILED:
            lost = os.strerror(landing.failure)
        return Landed(landing.taken, digests, why == _WAITS, lost)

    def _load(self, rooms: Sequence[Room]) -> int:
        """Have the compiled code know the rooms; the number of the first of them."""
        landing = self._landing
        first: int = landing.first
        loaded = self._loaded
        if first < len(loaded) and loaded[first] is rooms[0]:
            there = _ROOM.unpack_from(self._rooms, first * _ROOM.size)[2]
            if there == rooms[0].there:
                return first
        loaded = self._loaded = list(islice(rooms, ROOMS))
        for number, room in enumerate(loaded):
            at = 0 if room.block is None else address_of_buffer(room.block)
            _ROOM.pack_into(self._rooms, number * _ROOM.size, at, room.size, room.there, 0)
        landing.count = len(loaded)
        landing.first = 0
        landing.begun = 0
        return 0
