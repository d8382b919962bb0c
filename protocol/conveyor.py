"""The conveyor: blocks from a home to a reader over one TCP connection, in compiled code.

Owns: what is said on such a connection once both ends have agreed on it (`bulk.BulkConvey`): the
reader's requests, the home's replies, and the order of both; and at the home, which requests are
granted, and what is sent next. Must not know: sockets, clocks, or what becomes of a block at the
reader (`kvcast.protocol.courier`).

A request is of a fixed length, and so is the header of a reply, which the bytes of the block follow
from the request's `start` on. Replies come in the order of the requests. Numbers are in the order
of x86-64, which both ends are. A request may ask instead how many blocks of a chain the home has,
counted from the first without a gap: then the chain's keys follow it, and its reply is a header
alone.

What may be given Python says beforehand, as it does for READs (`kvcast.protocol.lane`: who may use
which namespace), and it hears afterwards of what was given (`Given`). A block that is leaving is
pinned as clients pin blocks by themselves: its cell stands in a region of shared memory
(`kvcast.protocol.messages.shared`), which the agent looks at before it uses the block's bytes for
another. What the index has not is for Python to look for: the reader is told `NOT_HERE`, and asks
in the other way.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Final, NamedTuple

from kvcast.native.subset import (
    I32,
    U16,
    U32,
    U64,
    Inline,
    Library,
    Ptr,
    Struct,
    address_of,
    copy,
    ctypes_of,
    move,
    native,
    size_of,
    u64_at,
)
from kvcast.protocol.lane import NativeLane, entry_of, may_lie_below, may_use
from kvcast.protocol.meetings import (
    Meetings,
    NativeMeetings,
    asks,
    is_met,
    leaves,
    name_of,
    told,
)
from kvcast.protocol.messages.questions import MAX_CHAIN
from kvcast.protocol.messages.shared import (
    CELLS_USED_WORD,
    CELLS_WORD,
    ENTRY_BYTES,
    KIND_WORD,
    REGION_BYTES,
    SLOT_BITS,
    WORD_BYTES,
)
from kvcast.protocol.messages.wire import KEY_BYTES
from kvcast.protocol.placement import address_of_buffer

REQUESTS: Final = 256
"""Requests of one connection that a home has room for, and that a reader sends ahead."""
GIVEN_ROOM: Final = 1024
"""Replies that Python has not heard of; at the bound nothing is given until it has."""
ROOM_BYTES: Final = REQUESTS * 40 + MAX_CHAIN * KEY_BYTES
"""Room for that many, and the keys of a chain."""
NODES: Final = 64
"""Nodes that one takes blocks from so, and that it gives blocks to so; others go by calls."""
LEAVING: Final = 8
"""Replies of one connection that leave by one system call, at most."""
GATHER_BYTES: Final = 512 * 1024
"""None is added to so many bytes that are leaving."""

PADDING_WORDS: Final = 5
"""Behind a reply's header, so that it takes a cache line. Linux copies what follows into its packet
right behind it, and an AMD EPYC does so at less than half of its speed where the bytes come to lie
up to some 30 bytes further in a page than they come from; blocks begin where pages do."""

UNWANTED: Final = 2
"""Why a conveyor is closed at the reader's end: nobody waits any more for what it was to bring."""

# What a reply says.
GIVEN_HERE: Final = 1
"""The block's bytes follow."""
NOT_HERE: Final = 2
COUNTED: Final = 3
"""Of the chain so many are held as `size` says. `digest`: 1 where the one behind them is certainly
not, 0 where it may lie where compiled code does not look."""
READ_IT: Final = 4
"""Another node wants it, too (`kvcast.protocol.meetings`)."""

# What a request is for.
_BLOCK: Final = 0
_CHAIN: Final = 1

_OFFSET: Final = 3
_DIGEST: Final = 4


class Request(Struct):
    """What a reader asks for."""

    number: U64
    """The reader's own."""
    key: U64
    rest_of_key: U64
    """The key in two halves, as they lie in memory."""
    digest: U64
    """Of the copy that is wanted; 0 = any."""
    start: U32
    """Its first bytes are there already, so many. Of a chain: how many keys follow."""
    namespace: U16
    kind: U16


class Reply(Struct):
    """What a home says before the bytes."""

    number: U64
    digest: U64
    size: U32
    """Of the whole block."""
    status: U32
    padding: Annotated[Ptr[U64], Inline(PADDING_WORDS)]


class NativeGiven(Struct):
    """See `Given`."""

    cell: U64
    node: U32
    start: U32


class Leaving(Struct):
    """A reply that is leaving: first what a `Reply` is,"""

    number: U64
    digest: U64
    size: U32
    status: U32
    padding: Annotated[Ptr[U64], Inline(PADDING_WORDS)]
    reply_left: U64
    """of which so many bytes have not left,"""
    address: U64
    left: U64
    """and so many of the block, from `address` on."""


class Giver(Struct):
    """The home's end of a connection."""

    fd: I32
    """-1: it is free."""
    node: U32
    """Who asks."""
    gone: U32
    """It is over: Python is to close it."""
    ready: U32
    """There is something to do, whatever the socket says."""
    since_ns: U64
    """When bytes left last, or the first were to."""
    buffer: U64
    """Room for REQUESTS and a chain."""
    heard: U64
    """Bytes in it,"""
    used: U64
    """of which so many are done with,"""
    noted: U64
    """and of so many others may know."""
    to_read: U64
    """So many of the next requests are answered by that."""
    leaving: Annotated[Ptr[Leaving], Inline(LEAVING)]
    first: U64
    """The first of them that has not left,"""
    count: U64
    """of so many;"""
    pending: U64
    """and their bytes that have not."""
    pin: Ptr[U64]
    """Where the cells of the copies that are leaving stand; 0 = none."""


class Giving(Struct):
    """All givers of a node."""

    lane: Ptr[NativeLane]
    meetings: Ptr[NativeMeetings]
    givers: Ptr[Giver]
    given: Ptr[NativeGiven]
    given_count: U64
    ready: U64
    """Whether any giver is."""
    sent_bytes: U64
    """Of blocks, since Python has looked."""
    refused: U64
    """Requests that were not granted."""
    knows_all: U64
    """Where it stands whether what neither the index nor the lane's filter has is certainly not
    here; 0: it is not."""


class Expected(Struct):
    """A reply that is to come."""

    number: U64
    start: U64
    likely: U64
    """The size of its block, as far as that was known."""


class Taker(Struct):
    """The reader's end of a connection."""

    node: U32
    """`courier.NOBODY`: it is free, or closed."""
    broken: U32
    """Python is to close it; UNWANTED, or 1: it does not do what it should."""
    draft: Annotated[Ptr[Request], Inline(1)]
    requests: U64
    """Room for REQUESTS and a chain,"""
    request_bytes: U64
    """so much of which is to leave."""
    expected: Ptr[Expected]
    first: U64
    count: U64
    namespace: U64
    """Of all that is expected: what several namespaces want at once goes by calls, which take
    turns."""
    until_ns: U64
    """By then bytes must come, if any are expected."""
    reply: Annotated[Ptr[Reply], Inline(1)]
    taking: U64
    """Whether a block's bytes come next, and no header."""
    block: U64
    """Where its first byte goes; 0 = nobody wants it."""
    size: U64
    there: U64


# --- the home's end ---------------------------------------------------------------------------


@native
def may_ask_for(g: Giving, giver: Giver, namespace: U64) -> bool:
    """Whether whoever asks may use the namespace."""
    return may_use(g.lane[0], namespace, giver.node)


@native
def has_work(giver: Giver) -> bool:
    """Whether something is leaving, or is to."""
    return giver.pending != 0 or whole_request(giver)


@native
def whole_request(giver: Giver) -> bool:
    """Whether all of the next request is there, or enough of it to see that it is none."""
    return is_whole(giver, giver.used)


@native
def is_whole(giver: Giver, at: U64) -> bool:
    """As `whole_request`, of the request that begins `at` some byte of those heard."""
    there = giver.heard - at
    if there < size_of(Request):
        return False
    asked = Request.at(giver.buffer + at)
    if asked.kind != _CHAIN or asked.start > MAX_CHAIN:
        return True
    return there >= size_of(Request) + asked.start * KEY_BYTES


@native
def bytes_of(asked: Request) -> U64:
    """The bytes of a request, with the chain behind it."""
    return size_of(Request) + (asked.start * KEY_BYTES if asked.kind == _CHAIN else 0)


@native
def room_for_requests(giver: Giver) -> U64:
    """How many bytes of requests may be read, to `buffer` + `heard`."""
    if giver.used != 0:
        giver.heard -= giver.used
        giver.noted -= giver.used
        move(giver.buffer, giver.buffer + giver.used, giver.heard)
        giver.used = 0
    return ROOM_BYTES - giver.heard


@native
def held_of(lane: NativeLane, namespace: U64, request: U64, count: U64) -> U64:
    """How many of the keys behind a request the index has, counted from the first."""
    for number in range(count):
        key = u64_at(request + size_of(Request) + number * KEY_BYTES)
        if entry_of(lane, namespace, 0 + key[0], 0 + key[1]) == 0:
            return number
    return count


@native
def note_requests(g: Giving, giver: Giver) -> None:
    """Let others know of what is asked for and still to be given; and find out whether the rest had
    better be READ: if most of it is wanted by others, too, all of it, since what left here would
    take the link from those READs."""
    while is_whole(giver, giver.noted):
        asked = Request.at(giver.buffer + giver.noted)
        if asked.kind > _CHAIN or (asked.kind == _CHAIN and asked.start > MAX_CHAIN):
            break  # it ends the connection when its turn comes
        giver.noted += bytes_of(asked)
        if asked.kind == _BLOCK and may_ask_for(g, giver, asked.namespace):
            asks(g.meetings[0], name_of(asked.namespace, asked.key, asked.rest_of_key), giver.node)
    if giver.to_read != 0:
        return
    met = 0
    count = 0
    at = giver.used
    while at < giver.noted:
        other = Request.at(giver.buffer + at)
        at += bytes_of(other)
        if other.kind == _BLOCK:
            count += 1
            block = name_of(other.namespace, other.key, other.rest_of_key)
            if may_ask_for(g, giver, other.namespace) and is_met(g.meetings[0], block):
                met += 1
    if met != 0 and 2 * met >= count:
        giver.to_read = count


@native
def forget_requests(g: Giving, giver: Giver) -> None:
    """Nobody waits for what was asked for and is still to be given."""
    while giver.noted > giver.used:
        asked = Request.at(giver.buffer + giver.used)
        giver.used += bytes_of(asked)
        if asked.kind == _BLOCK:
            block = name_of(asked.namespace, asked.key, asked.rest_of_key)
            leaves(g.meetings[0], block, giver.node)


@native
def is_to_be_read(g: Giving, giver: Giver, asked: Request, here: U64) -> bool:
    """The turn of a request has come, for a block that lies `here` (0: it does not): whether who
    asks had better READ it."""
    block = name_of(asked.namespace, asked.key, asked.rest_of_key)
    read = is_met(g.meetings[0], block)
    if giver.to_read != 0:
        giver.to_read -= 1
        read = True
    if read and here != 0:
        told(g.meetings[0], block, giver.node)
        return True
    leaves(g.meetings[0], block, giver.node)
    return False


@native
def give_next(g: Giving, giver: Giver) -> bool:
    """Have the reply to the next request leave behind the others; False if there is none, or no
    room for one, or Python must hear of what was given before."""
    if not whole_request(giver) or g.given_count == GIVEN_ROOM:
        return False
    if giver.count == LEAVING or giver.pending >= GATHER_BYTES:
        return False
    note_requests(g, giver)
    asked = Request.at(giver.buffer + giver.used)
    if asked.kind > _CHAIN or (asked.kind == _CHAIN and asked.start > MAX_CHAIN):
        giver.gone = 1
        return False
    giver.used += size_of(Request)
    reply = giver.leaving[giver.count]
    reply.number = asked.number
    reply.digest = 0
    reply.size = 0
    reply.status = NOT_HERE
    reply.reply_left = size_of(Reply)
    reply.left = 0
    giver.count += 1
    giver.pending += size_of(Reply)
    lane = g.lane[0]
    at = 0
    if asked.kind == _CHAIN:
        giver.used += asked.start * KEY_BYTES
        if may_ask_for(g, giver, asked.namespace):
            reply.status = COUNTED
            reply.size = held_of(lane, asked.namespace, address_of(asked), asked.start)
            after = address_of(asked) + size_of(Request) + reply.size * KEY_BYTES
            whole = reply.size == asked.start
            if g.knows_all != 0 and (whole or not may_lie_below(lane, asked.namespace, after)):
                reply.digest = u64_at(g.knows_all)[0]
            return True
    elif may_ask_for(g, giver, asked.namespace):
        at = entry_of(lane, asked.namespace, 0 + asked.key, 0 + asked.rest_of_key)
    if asked.kind == _BLOCK and is_to_be_read(g, giver, asked, at):
        reply.status = READ_IT
        return True
    if at != 0:
        entry = u64_at(at)
        size = entry[KIND_WORD] & 0xFFFF_FFFF
        offset = 0 + entry[_OFFSET]
        inside = offset <= lane.arena_bytes and size <= lane.arena_bytes - offset
        same = asked.digest == 0 or asked.digest == entry[_DIGEST]
        if inside and same and asked.start < size:
            reply.digest = entry[_DIGEST]
            reply.size = size
            reply.status = GIVEN_HERE
            reply.address = lane.arena + offset + asked.start
            reply.left = size - asked.start
            giver.pending += reply.left
            cell = (entry[0] << SLOT_BITS) | ((at - lane.index - lane.entries) // ENTRY_BYTES)
            giver.pin[giver.count - 1] = cell
            told = g.given[g.given_count]
            g.given_count += 1
            told.cell = cell
            told.node = giver.node
            told.start = asked.start
            return True
    g.refused += 1
    return True


@native
def gave(g: Giving, giver: Giver, size: U64) -> None:
    """So many bytes of the replies, and of the blocks behind them, have been taken."""
    giver.pending -= size
    while giver.first < giver.count:
        reply = giver.leaving[giver.first]
        if reply.reply_left > size:
            reply.reply_left -= size
            return
        size -= reply.reply_left
        reply.reply_left = 0
        some = size if size < reply.left else 0 + reply.left
        reply.address += some
        reply.left -= some
        g.sent_bytes += some
        size -= some
        if reply.left != 0:
            return
        giver.pin[giver.first] = 0
        giver.first += 1
    giver.first = 0
    giver.count = 0


# --- the reader's end -------------------------------------------------------------------------


@native
def ask_for(t: Taker) -> bool:
    """Have what `draft` says asked for; False if that cannot be now."""
    draft = t.draft[0]
    more = size_of(Request)
    if draft.kind == _CHAIN:
        more += draft.start * KEY_BYTES
    if t.count == REQUESTS or t.request_bytes + more > ROOM_BYTES or t.broken != 0:
        return False
    if t.count != 0 and t.namespace != draft.namespace:
        return False
    t.namespace = draft.namespace
    copy(t.requests + t.request_bytes, address_of(draft), size_of(Request))
    t.request_bytes += more
    expected = t.expected[(t.first + t.count) % REQUESTS]
    t.count += 1
    expected.number = draft.number
    expected.start = draft.start
    return True


@native
def ask_for_count(t: Taker, number: U64, namespace: U64, count: U64) -> U64:
    """Have it asked how many of so many keys are held, in a row from the first. Where the keys
    are to be written; 0 if that cannot be now."""
    draft = t.draft[0]
    draft.number = number
    draft.key = 0
    draft.rest_of_key = 0
    draft.digest = 0
    draft.start = count
    draft.namespace = namespace
    draft.kind = _CHAIN
    asked = ask_for(t)
    draft.kind = _BLOCK
    if not asked:
        return 0
    t.expected[(t.first + t.count - 1) % REQUESTS].likely = count
    return t.requests + t.request_bytes - count * KEY_BYTES


@native
def next_expected(t: Taker) -> None:
    """The first of what is expected is over."""
    t.first = (t.first + 1) % REQUESTS
    t.count -= 1
    t.taking = 0


# --- Python's side ----------------------------------------------------------------------------

assert REQUESTS * ctypes.sizeof(ctypes_of(Request)) + MAX_CHAIN * KEY_BYTES == ROOM_BYTES
GIVEN: Final = struct.Struct("=QII")
assert GIVEN.size == ctypes.sizeof(ctypes_of(NativeGiven))
REQUEST: Final = struct.Struct("<Q16sQIHH")
"""A `Request`, as it is on the wire;"""
REPLY: Final = struct.Struct(f"<QQII{8 * PADDING_WORDS}x")
"""and a `Reply`."""
assert REQUEST.size == ctypes.sizeof(ctypes_of(Request))
assert REPLY.size == ctypes.sizeof(ctypes_of(Reply)) == ctypes_of(Leaving).reply_left.offset


class Given(NamedTuple):
    """A block that was granted."""

    cell: int
    """Of the copy (`shared.cell_of`)."""
    node: int
    start_bytes: int


class _Compiled(NamedTuple):
    give_next: Callable[[int, int], bool]
    gave: Callable[[int, int, int], None]
    room_for_requests: Callable[[int], int]
    forget_requests: Callable[[int, int], None]


@cache
def compiled() -> _Compiled:
    """The compiled functions of a home's end, for those who have no sockets."""
    functions = (give_next, gave, room_for_requests, forget_requests)
    library = Library(*functions)
    return _Compiled(*(library.call(function) for function in functions))


class Givers:
    """The connections on which a home gives blocks. In `pins`, memory of a region's size, stand the
    copies that are leaving. `lane`: the address of the native lane that says who may have what;
    `meetings`: of those who want one block; None = of those who ask here."""

    def __init__(
        self, lane: int, pins: memoryview, meetings: Meetings | None = None, knows_all: int = 0
    ) -> None:
        """`knows_all`: the address of a word that says whether what the lane's index has not is
        certainly not held."""
        assert len(pins) == REGION_BYTES
        giving: Any = ctypes_of(Giving)()
        self.native = giving
        self.address = ctypes.addressof(giving)
        self.givers: Any = (ctypes_of(Giver) * NODES)()
        giving.lane = lane
        giving.knows_all = knows_all
        self._meetings = meetings or Meetings()
        giving.meetings = self._meetings.address
        giving.givers = ctypes.addressof(self.givers)
        self._given = (ctypes_of(NativeGiven) * GIVEN_ROOM)()
        self._given_view = memoryview(self._given).cast("B")
        giving.given = ctypes.addressof(self._given)
        self._requests = bytearray(NODES * ROOM_BYTES)
        self._pins = pins.cast("Q")
        for number, giver in enumerate(self.givers):
            giver.fd = -1
            giver.buffer = address_of_buffer(self._requests) + number * ROOM_BYTES
            giver.pin = address_of_buffer(pins) + (CELLS_WORD + number * LEAVING) * WORD_BYTES
        self._free = list(range(NODES - 1, -1, -1))

    def begin(self, node: int) -> int | None:
        """A node may ask on a connection; its number, None where there are too many."""
        if not self._free:
            return None
        number = self._free.pop()
        # Whoever looks at the pins goes through as many as there may be.
        self._pins[CELLS_USED_WORD] = max(self._pins[CELLS_USED_WORD], (number + 1) * LEAVING)
        giver = self.givers[number]
        giver.node = node
        giver.noted = giver.to_read = 0
        giver.gone = giver.heard = giver.used = giver.first = giver.count = giver.pending = 0
        return number

    def end(self, number: int) -> None:
        """A connection is closed."""
        compiled().forget_requests(self.address, ctypes.addressof(self.givers[number]))
        self.givers[number].fd = -1
        self.givers[number].ready = 0
        for place in range(LEAVING):
            self._pins[CELLS_WORD + number * LEAVING + place] = 0
        self._free.append(number)

    def take_given(self) -> tuple[list[Given], int]:
        """What was given since the last time, and how many bytes of blocks have left."""
        giving = self.native
        view = bytes(self._given_view[: giving.given_count * GIVEN.size])
        sent_bytes: int = giving.sent_bytes
        giving.given_count = giving.sent_bytes = 0
        return [Given._make(each) for each in GIVEN.iter_unpack(view)], sent_bytes

    # --- without sockets: the simulation, fuzzers and tests

    def room_bytes(self, number: int) -> int:
        """How much may be told of it now."""
        return compiled().room_for_requests(ctypes.addressof(self.givers[number]))

    def hear(self, number: int, data: bytes) -> None:
        """Requests, or parts of them: no more than there is room for."""
        giver = self.givers[number]
        ctypes.memmove(giver.buffer + giver.heard, data, len(data))
        giver.heard += len(data)

    def bytes_to_send(self, number: int, at_most: int) -> bytes:
        """What is sent next; none if nothing is asked for, or `take_given` comes first."""
        giver, code = self.givers[number], compiled()
        at = ctypes.addressof(giver)
        while giver.pending < at_most and code.give_next(self.address, at):
            pass
        data = b""
        for reply in giver.leaving[giver.first : giver.count]:
            header = ctypes.string_at(ctypes.addressof(reply), REPLY.size)
            data += header[REPLY.size - reply.reply_left :]
            data += ctypes.string_at(reply.address, min(reply.left, at_most)) if reply.left else b""
        data = data[:at_most]
        code.gave(self.address, at, len(data))
        return data
