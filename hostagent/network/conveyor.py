"""The conveyor's system calls: TCP connections on which blocks come and go in compiled code.

Owns: the sockets of conveyors, once both ends have agreed on one, and how their bytes are moved.
Must not know: what is asked for, granted or given up (`kvcast.protocol.conveyor`, `courier`), or
how two nodes agree (`bulk_link`).

All of it runs in the event loop's wait (`network.courier`), between two events of the cores. What
Python is to do about a connection (it is over, or has stood still for too long) it does after the
wait; what was given it hears of then, too.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Protocol

from kvcast.hostagent.core.connection_ends import Ends, Table
from kvcast.hostagent.core.courier import Courier as CourierCore
from kvcast.hostagent.network.lander import Hashing, Landing, Landings, land, wait_for_any
from kvcast.native.linux import (
    EAGAIN,
    EINTR,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    IoVec,
    MsgHdr,
    error_number,
    recv,
    sendmmsg,
    write,
)
from kvcast.native.subset import (
    U64,
    Inline,
    Ptr,
    Struct,
    address_of,
    ctypes_of,
    native,
    signed,
    size_of,
    unsigned,
)
from kvcast.protocol.conveyor import (
    LEAVING,
    NODES,
    REPLY,
    Given,
    Giver,
    Givers,
    Giving,
    Reply,
    Taker,
    gave,
    give_next,
    has_work,
    room_for_requests,
)
from kvcast.protocol.courier import Courier, block_came, cut_off, progressed, reply_came
from kvcast.protocol.lookups import Lookups, counted_came
from kvcast.protocol.meetings import Meetings
from kvcast.service.link_driver import TURN_BYTES

STILL_S: Final = 30.0
"""How long a reader may take nothing of what it has asked for."""


class Conveyors(Struct):
    """Both ends of all connections of a node."""

    courier: Ptr[Courier]
    """Whose takers the connections that bring blocks belong to."""
    lookups: Ptr[Lookups]
    landings: Ptr[Landing]
    """By taker: its socket, and what comes next."""
    giving: Ptr[Giving]
    message: Annotated[Ptr[MsgHdr], Inline(1)]
    vectors: Annotated[Ptr[IoVec], Inline(2 * LEAVING)]
    attention: U64
    """A reader has gone: Python is to close its connection."""


# --- taking -----------------------------------------------------------------------------------


@native
def send_requests(c: Conveyors) -> None:
    """Send what is to be asked for. A few requests always fit, or the other end does not read."""
    courier = c.courier[0]
    if courier.unsent == 0:
        return
    courier.unsent = 0
    for i in range(NODES):
        t = courier.takers[i]
        if t.request_bytes != 0:
            size = 0 + t.request_bytes
            t.request_bytes = 0
            if write(c.landings[i].fd, t.requests, size) != signed(size):
                cut_off(courier, t)


@native
def expect(s: Landing, t: Taker, header_bytes: U64) -> None:
    """Where what comes next goes: a block and, if more is expected, the next header; or that, of
    which so much is there."""
    s.first = 0
    s.count = 0
    s.begun = 0
    if t.taking != 0:
        expect_room(s, t.block, t.size, t.there)
    if t.taking == 0 or t.count > 1:
        expect_room(s, address_of(t.reply), size_of(Reply), header_bytes)


@native
def expect_room(s: Landing, block: U64, size: U64, there: U64) -> None:
    room = s.rooms[s.count]
    room.block = block
    room.size = size
    room.there = there
    s.count += 1


@native
def take_blocks(c: Conveyors, number: U64, now_ns: U64) -> None:
    """Take what a connection brings."""
    courier = c.courier[0]
    s = c.landings[number]
    t = courier.takers[number]
    left = 0 + TURN_BYTES
    while t.broken == 0 and t.count != 0 and left != 0:
        room = s.rooms[0]
        if t.taking != 0:
            room.block = t.block
        why = land(s, left)
        left -= s.taken if s.taken < left else left
        if s.taken != 0:
            progressed(courier, t, now_ns)
        if s.first == 0:
            if why >= 2:
                cut_off(courier, t)
            break
        header_bytes = 0
        if t.taking != 0:
            if s.count > 1:
                header_bytes += s.rooms[1].there
            block_came(courier, t, room.digest, now_ns)
        else:
            header_bytes += size_of(Reply)
        if header_bytes == size_of(Reply):
            header_bytes = 0
            if not counted_came(c.lookups[0], t, number, now_ns):
                reply_came(courier, t)
        expect(s, t, header_bytes)
    if t.count == 0 and t.broken == 0:
        # Whatever comes now was not asked for, or is the end.
        if recv(s.fd, s.sink, 1, MSG_DONTWAIT) >= 0 or error_number() != EAGAIN:
            cut_off(courier, t)
        wait_for_any(s)
    if left == 0:
        wait_for_any(s)


# --- giving -----------------------------------------------------------------------------------


@native
def hear_requests(g: Giver) -> bool:
    """Read requests, as many as there is room for; whether there may be more."""
    room = room_for_requests(g)
    if room == 0:
        return False
    got = recv(g.fd, g.buffer + g.heard, room, MSG_DONTWAIT)
    if got > 0:
        g.heard += unsigned(got)
        return True
    if got < 0:
        error = error_number()
        if error == EAGAIN:
            return False
        if error == EINTR:
            return True
    g.gone = 1
    return False


@native
def give_blocks(c: Conveyors, g: Giver, now_ns: U64) -> None:
    """Read what is asked for, and send as much as the socket takes."""
    giving = c.giving[0]
    giving.meetings[0].now_ns = now_ns
    g.ready = 0
    message = c.message[0]
    sent = 0
    unheard = True
    while g.gone == 0:
        if unheard:  # once more after bytes have left, which readers wait for
            unheard = hear_requests(g)
        more = True
        while more:
            more = give_next(giving, g)
        if g.pending == 0:
            if unheard:
                continue
            break
        if sent >= TURN_BYTES:
            g.ready = 1
            break
        pieces = 0
        for i in range(g.first, g.count):
            reply = g.leaving[i]
            c.vectors[pieces].base = address_of(reply) + size_of(Reply) - reply.reply_left
            c.vectors[pieces].length = reply.reply_left
            c.vectors[pieces + 1].base = reply.address
            c.vectors[pieces + 1].length = reply.left
            pieces += 2
        message.iov = address_of(c.vectors)
        message.iov_length = pieces
        if sendmmsg(g.fd, c.message, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1:
            gave(giving, g, message.length)
            sent += message.length
            g.since_ns = now_ns
        else:
            error = error_number()
            if error == EAGAIN:
                break
            if error != EINTR:
                g.gone = 1
    if g.pending == 0 and has_work(g):
        g.ready = 1  # Python must hear of what was given, first
    if g.gone != 0:
        c.attention = 1


@native
def give_more(c: Conveyors, now_ns: U64) -> bool:
    """Go on with those that had more to give; whether some still have."""
    more = False
    if c.giving[0].ready != 0:
        c.giving[0].ready = 0
        for i in range(NODES):
            g = c.giving[0].givers[i]
            if g.fd >= 0 and g.ready != 0 and g.gone == 0:
                give_blocks(c, g, now_ns)
            if g.ready != 0:
                c.giving[0].ready = 1
                more = True
    return more


# --- Python's side ----------------------------------------------------------------------------


class Roles(Protocol):
    """Who waits for sockets, and has compiled code serve them."""

    def take_from(self, descriptor: int, number: int) -> bool:
        """Have the taker of that number served; False where that cannot be."""

    def give_to(self, descriptor: int, number: int) -> bool:
        """The same for a giver."""

    def forget(self, descriptor: int) -> None:
        """Undo either, before the descriptor is closed."""


class ConveyorSockets:
    """The conveyors of a node. `given` hears of what was given (blocks, and their bytes that have
    left); `pinned` is memory of a region's size in which the copies that are leaving stand."""

    def __init__(
        self,
        courier: CourierCore,
        hashing: Hashing,
        roles: Roles,
        *,
        lane: int,
        pins: memoryview,
        meetings: Meetings,
        given: Callable[[list[Given], int], None],
    ) -> None:
        """`lane`: the address of the native lane that says who may have what; 0: nothing is
        given."""
        self._courier = courier
        self._roles = roles
        self._given_to = given
        self.gives = lane != 0
        conveyors: Any = ctypes_of(Conveyors)()
        self._conveyors = conveyors
        self._gives = Givers(lane, pins, meetings, courier.lookups.knows_all_at)
        self.address = ctypes.addressof(conveyors)
        conveyors.courier = courier.address
        conveyors.lookups = courier.lookups.address
        conveyors.giving = self._gives.address
        self._landings = Landings(NODES, hashing)
        conveyors.landings = self._landings.address
        takers = Table(
            courier.conveyor_stands,
            lambda number: courier.conveyor_gone(time.monotonic(), number),
            courier.taker,
        )
        givers = Table(
            self._gives.begin, self._gives.end, lambda number: self._gives.givers[number]
        )
        self._takers = Ends(
            takers, begin=self._begin_to_take, end=self._end_taking, begun_here=True
        )
        self._givers = Ends(givers, begin=self._begin_to_give, end=self._end, begun_here=False)

    # --- connections ------------------------------------------------------------------------------

    def take_from(self, sock: socket.socket, node: int, node_id: str) -> bool:
        """There is a connection on which that node gives blocks; False, and it is closed, where
        there can be no more."""
        stands = self._takers.add(sock, node, node_id)
        if not stands:
            sock.close()
        return stands

    def _begin_to_take(self, number: int, sock: socket.socket) -> bool:
        taker = self._courier.taker(number)
        header = ctypes.addressof(taker) + type(taker).reply.offset
        self._landings.begin(number, sock.fileno(), header, REPLY.size)
        return self._roles.take_from(sock.fileno(), number)

    def failed(self, now: float, node: int) -> None:
        """No connection was to be had to that node."""
        self._courier.conveyor_failed(now, node)

    def give_to(self, sock: socket.socket, node: int, node_id: str) -> None:
        """There is a connection on which that node asks for blocks, instead of any before."""
        if not self._givers.add(sock, node, node_id):
            sock.close()

    def _begin_to_give(self, number: int, sock: socket.socket) -> bool:
        giver = self._gives.givers[number]
        giver.fd = sock.fileno()
        self._gives.native.ready = giver.ready = 1  # what it has said may be there already
        return self._roles.give_to(sock.fileno(), number)

    def _end_taking(self, number: int, sock: socket.socket) -> None:
        self._landings.end(number)
        self._end(number, sock)

    def _end(self, _number: int, sock: socket.socket) -> None:
        self._roles.forget(sock.fileno())
        sock.close()

    def follow(self, index_of: Mapping[str, int]) -> None:
        """The nodes have these numbers from now on."""
        self._givers.follow(index_of)
        self._takers.follow(index_of)

    def stop_giving(self) -> None:
        """All connections end on which blocks leave."""
        self._givers.close_all()

    def close(self) -> None:
        """All connections end."""
        self.stop_giving()
        self._takers.close_all()

    # --- after a wait -----------------------------------------------------------------------------

    @property
    def untold(self) -> bool:
        """Whether there is anything for `book`."""
        giving = self._gives.native
        over = self._conveyors.attention or self._courier.cut_off
        return bool(giving.given_count or giving.sent_bytes or over)

    def book(self, now: float) -> None:
        """Hear of what was given, and close what is over."""
        if self._gives.native.given_count or self._gives.native.sent_bytes:
            self._given_to(*self._gives.take_given())
        if self._conveyors.attention:
            self._conveyors.attention = 0
            for number, _ in self._givers.items():
                if self._gives.givers[number].gone:
                    self._givers.close(number)
        if self._courier.cut_off:
            for number in self._courier.take_cut_off():
                self._takers.close(number)

    def look(self, now: float) -> None:
        """Close what has stood still for too long."""
        for number, _ in self._givers.items():
            giver = self._gives.givers[number]
            if giver.pending and now - giver.since_ns / 1e9 > STILL_S:
                self._givers.close(number)

    @property
    def sending(self) -> int:
        """Connections on which blocks are leaving."""
        return sum(bool(giver.pending) for giver in self._gives.givers)
