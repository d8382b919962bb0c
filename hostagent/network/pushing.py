"""The system calls of puts that go home in compiled code: TCP connections on which blocks are
pushed.

Owns: the sockets of such connections, once both ends have agreed on one, and how their bytes are
moved. Must not know: what is pushed, taken or given up (`kvcast.protocol.pushing`), or how two
nodes agree (`bulk_link`).

All of it runs in the event loop's wait (`network.courier`), between two events of the cores; what
Python is to do about a connection it does after the wait.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from kvcast.hostagent.core.connection_ends import Ends, Table
from kvcast.hostagent.core.pushing import Pushes
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
    I32,
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
from kvcast.protocol.pushing import (
    DIGEST_BYTES,
    NODES,
    PUSH,
    PUSHES,
    VERDICTS_AT_ONCE,
    Push,
    Pushing,
    Receiver,
    Verdict,
    end_pusher,
    has_left,
    lands_at,
    leaves_next,
    push_came,
    push_landed,
    verdict_came,
)
from kvcast.service.link_driver import TURN_BYTES


class PushEnds(Struct):
    """Both ends of all connections of a node."""

    pushing: Ptr[Pushing]
    sockets: Ptr[I32]
    """By pusher."""
    landings: Ptr[Landing]
    """By receiver: its socket, and what comes next."""
    message: Annotated[Ptr[MsgHdr], Inline(1)]
    vectors: Annotated[Ptr[IoVec], Inline(3)]


# --- pushing ----------------------------------------------------------------------------------


@native
def push_more(c: PushEnds, number: U64, now_ns: U64) -> None:
    """Send what is to be pushed, as much as the socket takes."""
    p = c.pushing[0]
    pusher = p.pushers[number]
    message = c.message[0]
    while True:
        place = leaves_next(pusher, 0)
        if place == PUSHES:
            return
        sending = pusher.sendings[place]
        room = p.rooms[sending.room]
        pieces = 0
        if sending.push_left + sending.left == 0:
            c.vectors[0].base = address_of(room.digest) + DIGEST_BYTES - sending.digest_left
            c.vectors[0].length = sending.digest_left
            pieces += 1
            place = leaves_next(pusher, 1)
        if place != PUSHES:
            sending = pusher.sendings[place]
            room = p.rooms[sending.room]
            c.vectors[pieces].base = address_of(room.push) + size_of(Push) - sending.push_left
            c.vectors[pieces].length = sending.push_left
            c.vectors[pieces + 1].base = room.address + room.size - sending.left
            c.vectors[pieces + 1].length = sending.left
            pieces += 2
        message.iov = address_of(c.vectors)
        message.iov_length = pieces
        if sendmmsg(c.sockets[number], c.message, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1:
            has_left(p, pusher, 0 + message.length, now_ns)
        else:
            error = error_number()
            if error == EAGAIN:
                return
            if error != EINTR:
                end_pusher(p, pusher, now_ns)
                return


@native
def push_all(c: PushEnds, now_ns: U64) -> None:
    """Send what clients have said since the last time."""
    p = c.pushing[0]
    if p.unsent != 0:
        p.unsent = 0
        for i in range(NODES):
            if p.pushers[i].count != 0:
                push_more(c, i, now_ns)


@native
def hear_verdicts(c: PushEnds, number: U64, now_ns: U64) -> None:
    """Read what a home says."""
    p = c.pushing[0]
    pusher = p.pushers[number]
    while pusher.broken == 0:
        to = address_of(pusher.verdict) + pusher.heard
        got = recv(c.sockets[number], to, size_of(Verdict) - pusher.heard, MSG_DONTWAIT)
        if got > 0:
            pusher.heard += unsigned(got)
            if pusher.heard == size_of(Verdict):
                pusher.heard = 0
                verdict_came(p, pusher, now_ns)
        elif got == 0:
            end_pusher(p, pusher, now_ns)
        else:
            error = error_number()
            if error == EAGAIN:
                return
            if error != EINTR:
                end_pusher(p, pusher, now_ns)


@native
def serve_pusher(c: PushEnds, number: U64, now_ns: U64) -> None:
    """Its socket says that something has come, or may go."""
    hear_verdicts(c, number, now_ns)
    push_more(c, number, now_ns)


# --- a home's end -----------------------------------------------------------------------------


@native
def expect_push(s: Landing, p: Pushing, r: Receiver) -> None:
    """Where what comes next goes: a header; or a block, and behind it its digest."""
    s.first = 0
    s.begun = 0
    s.count = 1
    s.rooms[0].there = 0
    if r.taking == 0:
        s.rooms[0].block = address_of(r.push)
        s.rooms[0].size = size_of(Push)
    else:
        s.count = 2
        s.rooms[0].block = lands_at(p, r)
        s.rooms[0].size = r.push[0].size
        s.rooms[1].block = address_of(r.digest)
        s.rooms[1].size = 0 + DIGEST_BYTES
        s.rooms[1].there = 0


@native
def say_verdicts(s: Landing, p: Pushing, r: Receiver) -> None:
    """Say what became of the blocks that have come."""
    size = r.verdict_count * size_of(Verdict)
    r.verdict_count = 0
    # So few always fit, or the other end does not read.
    if size != 0 and r.broken == 0 and write(s.fd, address_of(r.verdicts), size) != signed(size):
        r.broken = 1
        p.cut = 1


@native
def take_pushes(c: PushEnds, number: U64, now_ns: U64) -> None:
    """Take what a connection brings, and say what became of it."""
    p = c.pushing[0]
    s = c.landings[number]
    r = p.receivers[number]
    left = 0 + TURN_BYTES
    while r.broken == 0 and left != 0:
        if r.taking != 0:
            s.rooms[0].block = lands_at(p, r)
        why = land(s, left)
        left -= s.taken if s.taken < left else left
        if s.taken != 0:
            r.since_ns = now_ns
        if s.first < s.count:
            if why >= 2:
                r.broken = 1
                p.cut = 1
            if why != 0:
                break
        elif r.taking == 0:
            push_came(p, r)
            expect_push(s, p, r)
        else:
            push_landed(p, r, s.rooms[0].digest)
            expect_push(s, p, r)
            if r.push[0].behind == 0 or r.verdict_count == VERDICTS_AT_ONCE:
                say_verdicts(s, p, r)
    say_verdicts(s, p, r)
    if left == 0:
        wait_for_any(s)


# --- Python's side ----------------------------------------------------------------------------


class Roles(Protocol):
    """Who waits for sockets, and has compiled code serve them."""

    def push_to(self, descriptor: int, number: int) -> bool:
        """Have the pusher of that number served; False where that cannot be."""

    def take_pushes(self, descriptor: int, number: int) -> bool:
        """The same for a receiver."""

    def forget(self, descriptor: int) -> None:
        """Undo either, before the descriptor is closed."""


class PushSockets:
    """The connections of a node on which blocks are pushed."""

    def __init__(self, pushes: Pushes, hashing: Hashing, roles: Roles) -> None:
        self._pushes = pushes
        self._roles = roles
        ends: Any = ctypes_of(PushEnds)()
        self._ends = ends
        self.address = ctypes.addressof(ends)
        ends.pushing = pushes.address
        self._sockets = (ctypes.c_int32 * NODES)(*[-1] * NODES)
        ends.sockets = ctypes.addressof(self._sockets)
        self._landings = Landings(NODES, hashing)
        ends.landings = self._landings.address
        pushers = Table(
            pushes.pusher_stands,
            lambda number: pushes.pusher_gone(time.monotonic(), number),
            pushes.pusher,
        )
        receivers = Table(pushes.receiver_stands, pushes.receiver_gone, pushes.receiver)
        self._pushers = Ends(
            pushers, begin=self._begin_to_push, end=self._end_pushing, begun_here=True
        )
        self._receivers = Ends(
            receivers, begin=self._begin_to_take, end=self._end_taking, begun_here=False
        )

    # --- connections ------------------------------------------------------------------------------

    def push_to(self, sock: socket.socket, node: int, node_id: str) -> None:
        """There is a connection to that node, which takes what is pushed."""
        if not self._pushers.add(sock, node, node_id):
            sock.close()

    def _begin_to_push(self, number: int, sock: socket.socket) -> bool:
        self._sockets[number] = sock.fileno()
        return self._roles.push_to(sock.fileno(), number)

    def failed(self, now: float, node: int) -> None:
        """No connection was to be had to that node."""
        self._pushes.pusher_failed(now, node)

    def take_from(self, sock: socket.socket, node: int, node_id: str) -> None:
        """There is a connection on which that node pushes, instead of any before."""
        if not self._receivers.add(sock, node, node_id):
            sock.close()

    def _begin_to_take(self, number: int, sock: socket.socket) -> bool:
        receiver = self._pushes.receiver(number)
        header = ctypes.addressof(receiver) + type(receiver).push.offset
        self._landings.begin(number, sock.fileno(), header, PUSH.size)
        return self._roles.take_pushes(sock.fileno(), number)

    def _end_pushing(self, number: int, sock: socket.socket) -> None:
        self._sockets[number] = -1
        self._end(sock)

    def _end_taking(self, number: int, sock: socket.socket) -> None:
        self._landings.end(number)
        self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        self._roles.forget(sock.fileno())
        sock.close()

    def follow(self, index_of: Mapping[str, int]) -> None:
        """The nodes have these numbers from now on."""
        self._receivers.follow(index_of)
        self._pushers.follow(index_of)

    def stop_pushing(self) -> None:
        """All connections end on which blocks are pushed to others,"""
        self._pushers.close_all()

    def stop_taking(self) -> None:
        """and all on which others push."""
        self._receivers.close_all()

    def close(self) -> None:
        """All connections end."""
        self.stop_taking()
        self.stop_pushing()

    # --- after a wait -----------------------------------------------------------------------------

    def book(self) -> None:
        """Close what is over."""
        if self._pushes.cut_off:
            pushers, receivers = self._pushes.take_cut_off()
            for number in pushers:
                self._pushers.close(number)
            for number in receivers:
                self._receivers.close(number)

    def look(self, now: float) -> None:
        """Close what has stood still for too long."""
        for number in self._pushes.still(now):
            self._receivers.close(number)
