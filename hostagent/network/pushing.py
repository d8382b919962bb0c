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
from typing import Annotated, Any, Final, NamedTuple, Protocol

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
    NODES,
    PUSH,
    ROOMS,
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

TURN_BYTES: Final = 4 << 20
"""How much one connection may bring before others have their turn."""
_DIGEST_BYTES: Final = 8


class PushEnds(Struct):
    """Both ends of all connections of a node."""

    pushing: Ptr[Pushing]
    sockets: Ptr[I32]
    """By pusher."""
    landings: Ptr[Landing]
    """By receiver: its socket, and what comes next."""
    message: Annotated[Ptr[MsgHdr], Inline(1)]
    vectors: Annotated[Ptr[IoVec], Inline(2)]


# --- pushing ----------------------------------------------------------------------------------


@native
def push_more(c: PushEnds, number: U64, now_ns: U64) -> None:
    """Send what is to be pushed, as much as the socket takes."""
    p = c.pushing[0]
    pusher = p.pushers[number]
    message = c.message[0]
    while True:
        place = leaves_next(p, pusher)
        if place == ROOMS:
            return
        room = p.rooms[place]
        if room.push_left + room.left != 0:
            c.vectors[0].base = address_of(room.push) + size_of(Push) - room.push_left
            c.vectors[0].length = room.push_left
            c.vectors[1].base = room.address + room.size - room.left
            c.vectors[1].length = room.left
            message.iov_length = 2
        else:
            c.vectors[0].base = address_of(room.digest) + _DIGEST_BYTES - room.digest_left
            c.vectors[0].length = room.digest_left
            message.iov_length = 1
        message.iov = address_of(c.vectors)
        if sendmmsg(c.sockets[number], c.message, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1:
            has_left(p, pusher, place, 0 + message.length, now_ns)
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
        s.rooms[1].size = 0 + _DIGEST_BYTES
        s.rooms[1].there = 0


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
            size = r.verdict_count * size_of(Verdict)
            r.verdict_count = 0
            # A few always fit, or the other end does not read.
            if write(s.fd, address_of(r.verdicts), size) != signed(size):
                r.broken = 1
                p.cut = 1
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


class _End(NamedTuple):
    """One connection, and the node at its other end."""

    sock: socket.socket
    node_id: str


class PushSockets:
    """The connections of a node on which blocks are pushed."""

    def __init__(self, pushes: Pushes, hashing: Hashing, roles: Roles) -> None:
        self._pushes = pushes
        self._roles = roles
        self._pushers: dict[int, _End] = {}
        self._receivers: dict[int, _End] = {}
        ends: Any = ctypes_of(PushEnds)()
        self._ends = ends
        self.address = ctypes.addressof(ends)
        ends.pushing = pushes.address
        self._sockets = (ctypes.c_int32 * NODES)(*[-1] * NODES)
        ends.sockets = ctypes.addressof(self._sockets)
        self._landings = Landings(NODES, hashing)
        ends.landings = self._landings.address

    # --- connections ------------------------------------------------------------------------------

    def push_to(self, sock: socket.socket, node: int, node_id: str) -> None:
        """There is a connection to that node, which takes what is pushed."""
        number = self._pushes.pusher_stands(node)
        if number is not None:
            self._sockets[number] = sock.fileno()
            self._pushers[number] = _End(sock, node_id)
            if not self._roles.push_to(sock.fileno(), number):
                self._close_pusher(number, served=False)
        else:
            sock.close()

    def failed(self, now: float, node: int) -> None:
        """No connection was to be had to that node."""
        self._pushes.pusher_failed(now, node)

    def take_from(self, sock: socket.socket, node: int, node_id: str) -> None:
        """There is a connection on which that node pushes, instead of any before."""
        for number, end in list(self._receivers.items()):
            if end.node_id == node_id:
                self._close_receiver(number)
        free = self._pushes.receiver_stands(node)
        if free is None:
            sock.close()
            return
        receiver = self._pushes.receiver(free)
        header = ctypes.addressof(receiver) + type(receiver).push.offset
        self._landings.begin(free, sock.fileno(), header, PUSH.size)
        self._receivers[free] = _End(sock, node_id)
        if not self._roles.take_pushes(sock.fileno(), free):
            self._close_receiver(free, served=False)

    def follow(self, index_of: Mapping[str, int]) -> None:
        """The nodes have these numbers from now on."""
        for number, end in list(self._receivers.items()):
            node = index_of.get(end.node_id)
            if node is None:
                self._close_receiver(number)
            else:
                self._pushes.receiver(number).node = node
        for number, end in list(self._pushers.items()):
            if index_of.get(end.node_id) != self._pushes.pusher(number).node:
                self._close_pusher(number)

    def _close_pusher(self, number: int, *, served: bool = True) -> None:
        end = self._pushers.pop(number)
        if served:
            self._roles.forget(end.sock.fileno())
        self._sockets[number] = -1
        self._pushes.pusher_gone(time.monotonic(), number)
        end.sock.close()

    def _close_receiver(self, number: int, *, served: bool = True) -> None:
        end = self._receivers.pop(number)
        if served:
            self._roles.forget(end.sock.fileno())
        self._landings.end(number)
        self._pushes.receiver_gone(number)
        end.sock.close()

    def close(self) -> None:
        """All connections end."""
        for number in list(self._receivers):
            self._close_receiver(number)
        for number in list(self._pushers):
            self._close_pusher(number)

    # --- after a wait -----------------------------------------------------------------------------

    def book(self) -> None:
        """Close what is over."""
        if self._pushes.cut_off:
            pushers, receivers = self._pushes.take_cut_off()
            for number in pushers:
                self._close_pusher(number)
            for number in receivers:
                self._close_receiver(number)

    def look(self, now: float) -> None:
        """Close what has stood still for too long."""
        for number in self._pushes.still(now):
            self._close_receiver(number)
