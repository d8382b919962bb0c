"""A card's queue pairs for what this node orders: READs and WRITEs, and no windows.

Owns: their registration of the arena (which is open to nobody), their completion queue, and a
thread that gives the card orders where that takes long. Must not know: what is said on a
connection, or what a block is.

A card moves bytes by itself, so that to order something takes a microsecond. A card in software
(Soft-RoCE) moves them in the call that orders: then nothing else would be done meanwhile, such as
having the next windows opened. So once a call has taken `SLOW_S`, a thread makes all later ones, in
their order, in compiled code, without the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

from kvcast.hostagent.network import libverbs
from kvcast.hostagent.network.libverbs import (
    COMPLETION_WORDS,
    NUMBER,
    SIGNALED,
    STATUS,
    Attributes,
    OpenCard,
    Orders,
    QueuePairOptions,
    call_post,
)
from kvcast.native.linux import EINTR, error_number, recv, write
from kvcast.native.subset import I32, I64, U64, Library, Struct, address_of, ctypes_of, native
from kvcast.protocol.links.rdma import Completed, Read, VerbsError, Work, Write
from kvcast.protocol.messages.rdma import Endpoint

SLOW_S: Final = 0.001
"""A call that orders, and takes so long, moves bytes itself."""
PORT_DOWN: Final = "its port is down"
TIMEOUT: Final = 14
"""The card sends again after 4.096 us << 14 = 67 ms."""
RETRIES: Final = 7
_MIN_TIMER: Final = 12
POLLED: Final = 64
"""Completions taken at once."""
POLLS: Final = 16
"""Times that is done before others have their turn."""
_PAUSE_S: Final = 0.0005
_NUMBERS: Final = 1 << 16
"""Of pairs; what orders are called by has 32 bits."""
_STATES: Final = libverbs.STATE | libverbs.PKEY | libverbs.PORT | libverbs.ACCESS


class Posting(Struct):
    """What the thread works on."""

    descriptor: I32
    padding: I32
    post: U64
    """The driver's function."""
    done: U64
    """Orders so far."""
    refused: U64
    pair: U64
    """Of the order that it was given last, where that lies; 0: to end."""
    first: U64
    """The first of its chain."""
    number: U64
    """What whoever gave the order calls the pair."""
    code: I64
    """What the driver said, where it failed."""


@native
def post_orders(p: Posting) -> None:
    """Order what comes through a socket, until told to end, and send back what fails."""
    while True:
        got = recv(p.descriptor, address_of(p) + _PAIR_AT, _ORDER_BYTES, 0)
        if got < 0 and error_number() == EINTR:
            continue
        if got != _ORDER_BYTES or p.pair == 0:
            return
        code = call_post(p.post, p.pair, p.first, address_of(p) + _REFUSED_AT)
        if code != 0:
            p.code = code
            write(p.descriptor, address_of(p) + _NUMBER_AT, _FAILURE_BYTES)
        p.done += 1


@native
def post_order(post: U64, pair: U64, first: U64, refused: U64) -> I32:
    """One order, at once: an error's number, or 0."""
    return call_post(post, pair, first, refused)


_ORDER: Final = struct.Struct("=QQQ")
_FAILURE: Final = struct.Struct("=Qq")
_ORDER_BYTES: Final = _ORDER.size
_FAILURE_BYTES: Final = _FAILURE.size
_NATIVE_POSTING: Final = ctypes_of(Posting)
_PAIR_AT: Final = _NATIVE_POSTING.pair.offset
_NUMBER_AT: Final = _NATIVE_POSTING.number.offset
_REFUSED_AT: Final = _NATIVE_POSTING.refused.offset
assert _NATIVE_POSTING.number.offset - _PAIR_AT == _ORDER_BYTES - 8
assert _NATIVE_POSTING.code.offset - _NUMBER_AT == _FAILURE_BYTES - 8


class _Compiled(NamedTuple):
    post_orders: Callable[[int], None]
    post_order: Callable[[int, int, int, int], int]


@cache
def compiled() -> _Compiled:
    """The compiled functions; made, or read from the cache on disk, when first asked for."""
    library = Library(post_orders, post_order)
    return _Compiled(library.call(post_orders), library.call(post_order))


class Poster:
    """Gives a card its orders: at once, or by the thread. `post`: the driver's function. `failed`:
    told, on the running loop, of each order that the thread could not give: the number that came
    with the order, and the error's number."""

    def __init__(self, post: int, failed: Callable[[int, int], None]) -> None:
        self._code = compiled()
        self._post = post
        self._failed = failed
        self._refused = ctypes.c_uint64()
        self._posting: Any = None
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._ordered = 0

    @property
    def is_slow(self) -> bool:
        """Whether the thread is at work."""
        return self._socket is not None

    def order(self, pair: int, first: int, number: int) -> int:
        """Give the queue pair at `pair` the chain at `first`: an error's number where that is known
        at once, or 0. `number`: of the pair, and of no other for long."""
        if self._socket is not None:
            try:
                self._socket.send(_ORDER.pack(pair, first, number))
            except OSError as error:
                return error.errno or 1
            self._ordered += 1
            return 0
        began = time.perf_counter()
        code = self._code.post_order(self._post, pair, first, ctypes.addressof(self._refused))
        if time.perf_counter() - began >= SLOW_S:
            self._begin()
        return abs(code)

    def _begin(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        posting = self._posting = _NATIVE_POSTING(descriptor=theirs.fileno(), post=self._post)

        def work() -> None:
            with theirs:
                self._code.post_orders(ctypes.addressof(posting))

        self._socket = mine
        asyncio.get_running_loop().add_reader(mine.fileno(), self._readable)
        self._thread = threading.Thread(target=work, name="kvcast-posting", daemon=True)
        self._thread.start()

    def _readable(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while failure := self._socket.recv(_FAILURE_BYTES):
                number, code = _FAILURE.unpack(failure)
                self._failed(number, abs(code))
            asyncio.get_running_loop().remove_reader(self._socket.fileno())

    def settle(self) -> None:
        """Wait until the thread has given the card all that it was told; so long as a call takes
        that has begun."""
        while self._posting is not None and self._posting.done < self._ordered:
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End the thread."""
        if self._socket is None or self._thread is None:
            return
        self.settle()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.send(_ORDER.pack(0, 0, 0))
        self._thread.join()
        self._socket.close()
        self._socket = None


class Port(Protocol):
    """What is known of the card's port, and who counts the queue pairs of both kinds."""

    port: int
    gid: bytes
    gid_index: int
    mtu_bytes: int
    max_reads: int
    max_transfer_bytes: int

    @property
    def name(self) -> str:
        """The card's."""

    def admit(self, pair: _CallingPair) -> None:
        """One more; VerbsError where there are as many as may be."""

    def forget(self, pair: _CallingPair) -> None:
        """One less."""

    def happened(self, problem: str) -> None:
        """The card says that it is of no use, and why; or "", that it is."""


class _CallingPair:
    """One half of a queue pair (`kvcast.protocol.links.rdma.Pair`)."""

    def __init__(self, card: CallingCard, completed: Callable[[list[Completed]], None]) -> None:
        self._card = card
        self.completed = completed
        self._psn = secrets.randbits(24)
        self.address = card.new_pair()
        self.number = -1
        """By which the card knows it, once it is admitted."""
        self._orders = Orders(card.depth, card.local_key)
        self._free = list(range(card.depth))
        self.working: dict[int, int] = {}
        """By place among the orders, the token of what the card has."""
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        port = self._card.port
        number = libverbs.number_of(self.address)
        return Endpoint(port.gid, number, self._psn, port.mtu_bytes, port.max_reads)

    def join(self, remote: Endpoint) -> None:
        self._card.join(self.address, self._psn, remote)

    def post(self, work: Sequence[Work]) -> None:
        if len(work) > len(self._free):
            raise VerbsError(f"{len(work)} orders for {len(self._free)} places")
        sends, previous, first = self._orders.sends, None, 0
        for item in work:
            if not isinstance(item, Read | Write):
                raise VerbsError("this queue pair has no windows")
            place = self._free.pop()
            self.working[place] = item.token
            reads = isinstance(item, Read)
            local = item.room if isinstance(item, Read) else item.data
            part, order = self._orders.parts[place], sends[place]
            part.address, part.size = libverbs.address_of_memory(local), len(local)
            order.number = self.number * self._card.depth + place
            order.opcode = libverbs.READ if reads else libverbs.WRITE
            order.flags, order.next = SIGNALED, 0
            order.address, order.key = item.address, item.key
            if previous is None:
                first = ctypes.addressof(order)
            else:
                previous.next = ctypes.addressof(order)
            previous = order
        code = self._card.poster.order(self.address, first, self.number)
        if code:
            raise VerbsError(f"posting work: {os.strerror(code)}")

    def ended(self, place: int) -> int | None:
        """The card has done what had that place: its token."""
        token = self.working.pop(place, None)
        if token is not None:
            self._free.append(place)
        return token

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._card.end_pair(self)


class CallingCard:
    """See the module's description; `kvcast.protocol.links.rdma.Verbs` without windows. `memory`:
    the arena; `depth`: READs and WRITEs that a pair has at once; `entries`: of the completion
    queue."""

    def __init__(self, port: Port, memory: memoryview, depth: int, entries: int) -> None:
        self.port = port
        self.depth = depth
        self.max_transfer_bytes = port.max_transfer_bytes
        self._pairs: dict[int, _CallingPair] = {}
        """By number."""
        self._next = 0
        self._lost = False
        self._loop = asyncio.get_running_loop()
        self._card = card = OpenCard(port.name)
        try:
            # What is read from others lands there. `verbs` has registered the arena as well, with
            # the right to bind windows, but in pyverbs' protection domain, which pyverbs gives
            # nobody else; a key of the one is worth nothing to a queue pair of the other.
            self.local_key, _ = card.register(memory, libverbs.LOCAL_WRITE)
            self._completions = card.make_completions(entries)
            self._polled = (ctypes.c_uint32 * (POLLED * COMPLETION_WORDS))()
            card.notify(self._completions, 0)
        except BaseException:
            card.close()
            raise
        self.poster = Poster(card.send_address, self._not_posted)
        self._loop.add_reader(card.descriptor, self._readable)
        self._loop.add_reader(card.events, self._happened)

    # --- pairs --------------------------------------------------------------------------------

    def make_pair(self, completed: Callable[[list[Completed]], None]) -> _CallingPair:
        """One more half; VerbsError where there are no more."""
        pair = _CallingPair(self, completed)
        try:
            self.port.admit(pair)
        except VerbsError:
            self._card.end_pair(pair.address)
            raise
        # A number is used again as late as can be: the card may still have completions of a pair
        # that is gone, and a driver in software keeps them.
        while self._next in self._pairs:
            self._next = (self._next + 1) % _NUMBERS
        pair.number = self._next
        self._pairs[pair.number] = pair
        self._next = (self._next + 1) % _NUMBERS
        return pair

    def new_pair(self) -> int:
        """A queue pair that is connected to nothing; VerbsError."""
        pair = self._card.make_pair(
            QueuePairOptions(
                send_queue=self._completions,
                receive_queue=self._completions,
                sends=self.depth,
                receives=1,
                send_parts=1,
                receive_parts=1,
                kind=libverbs.RC,
            )
        )
        try:
            self._card.modify(pair, Attributes(state=libverbs.INIT, port=self.port.port), _STATES)
        except VerbsError:
            self._card.end_pair(pair)
            raise
        return pair

    def join(self, pair: int, psn: int, remote: Endpoint) -> None:
        """Connect a half to its other half; VerbsError."""
        port = self.port
        attributes = Attributes(
            state=libverbs.RTR,
            path_mtu=min(port.mtu_bytes, remote.mtu_bytes).bit_length() - 8,
            peer=remote.queue_pair,
            receive_psn=remote.psn,
            reads_answered=port.max_reads,
            min_timer=_MIN_TIMER,
            gid=(ctypes.c_uint8 * 16)(*remote.gid),
            gid_index=port.gid_index,
            hops=64,
            is_global=1,
            path_port=port.port,
        )
        mask = libverbs.STATE | libverbs.PATH | libverbs.MTU | libverbs.PEER | libverbs.RECEIVE_PSN
        mask |= libverbs.READS_ANSWERED | libverbs.MIN_TIMER
        self._card.modify(pair, attributes, mask)
        attributes = Attributes(
            state=libverbs.RTS,
            send_psn=psn,
            reads=min(port.max_reads, remote.reads),
            timeout=TIMEOUT,
            retries=RETRIES,
            not_ready_retries=RETRIES,
        )
        mask = libverbs.STATE | libverbs.SEND_PSN | libverbs.TIMES | libverbs.READS
        self._card.modify(pair, attributes, mask)

    def end_pair(self, pair: _CallingPair) -> None:
        """It does nothing more; what the card still says of it concerns nobody."""
        del self._pairs[pair.number]
        self.poster.settle()
        self._card.end_pair(pair.address)
        self.port.forget(pair)

    # --- completions --------------------------------------------------------------------------

    def _readable(self) -> None:
        if self._card.take_events():
            self._card.notify(self._completions, 0)
            self._poll()

    def _poll(self) -> None:
        words = memoryview(self._polled).cast("B").cast("I")
        for _ in range(POLLS):
            if not self._card.ends:
                return  # closed by whoever was told
            count = self._card.poll(self._completions, POLLED, ctypes.addressof(self._polled))
            if count <= 0:
                return
            by_pair: dict[_CallingPair, list[Completed]] = {}
            polled = words[: count * COMPLETION_WORDS]
            numbers, statuses = polled[NUMBER::COMPLETION_WORDS], polled[STATUS::COMPLETION_WORDS]
            for number, status in zip(numbers, statuses, strict=True):
                pair = self._pairs.get(number // self.depth)
                token = None if pair is None else pair.ended(number % self.depth)
                if pair is not None and token is not None:
                    result = Completed(token, self._card.problem(status))
                    by_pair.setdefault(pair, []).append(result)
            for pair, results in by_pair.items():
                pair.completed(results)
        self._loop.call_soon(self._poll)

    def _happened(self) -> None:
        for kind, port in self._card.take_happened():
            if kind == libverbs.DEVICE_FATAL:
                self._lost = True
                self.port.happened("the card is lost until the agent starts again")
            elif port == self.port.port and not self._lost:
                if kind == libverbs.PORT_ERROR:
                    self.port.happened(PORT_DOWN)
                elif kind == libverbs.PORT_ACTIVE:
                    self.port.happened("")

    def _not_posted(self, number: int, code: int) -> None:
        """An order could not be given: the pair does nothing more."""
        pair = self._pairs.get(number)
        if pair is not None:
            problem = f"posting work: {os.strerror(code)}"
            pair.completed([Completed(token, problem) for token in pair.working.values()])

    def close(self) -> None:
        """Give everything back."""
        if not self._card.ends:
            return
        self._loop.remove_reader(self._card.descriptor)
        self._loop.remove_reader(self._card.events)
        for pair in list(self._pairs.values()):
            pair.close()
        self.poster.close()
        self._card.close()
