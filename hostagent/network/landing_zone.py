"""The card's part in shared answers: memory into which the switch has others write, and a queue
pair by which this node writes for whoever waits.

Owns: the zone's memory, its registration and queue pair (UC), and the arena's registration for what
is sent. Must not know: what a block is, who waits, or which slot is whose.

One queue pair does both: its peer is the pool's own address and queue pair, which no card has. It
speaks to libibverbs directly, since pyverbs registers no memory under an address of our choice, and
in compiled code wherever something is done for each chunk.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.network import libverbs
from kvcast.hostagent.network.libverbs import (
    COMPLETION_WORDS,
    IMMEDIATE,
    NUMBER,
    PART_BYTES,
    SEND_BYTES,
    SIGNALED,
    SOLICITED,
    STATUS,
    Attributes,
    OpenCard,
    Orders,
    Part,
    QueuePairOptions,
    Send,
    address_of_memory,
    call_poll,
    call_post,
)
from kvcast.hostagent.network.verbs import Card
from kvcast.native.linux import swap16
from kvcast.native.subset import (
    I32,
    I64,
    U64,
    Library,
    Struct,
    address_of,
    copy,
    ctypes_of,
    native,
    signed,
    size_of,
    u32_at,
    unsigned,
)
from kvcast.protocol.links.backoff import Backoff
from kvcast.protocol.links.rdma import VerbsError
from kvcast.protocol.messages.roce import (
    CHUNK_SHIFT,
    POOL_KEY,
    POOL_QUEUE_PAIR,
    SHARED_CHUNKING,
    SLOT_BYTES,
    SLOT_SHIFT,
    ZONE_ADDRESS,
    ZONE_BYTES,
    ZONE_SLOTS,
    Place,
)
from kvcast.protocol.messages.wire import CHUNKS_PER_SEGMENT
from kvcast.protocol.requester.landing import Landing, LandingCounters, Zone, land

log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = SHARED_CHUNKING.chunk_bytes
RECEIVES: Final = 2048 + 512
"""WRITEs that the card can take before it is looked at again; one more is lost. Those of the
segments that are awaited at most, and some that come late or twice."""
AWAITED: Final = 2048 // CHUNKS_PER_SEGMENT
"""Segments that may be on their way at once."""
_SENDS: Final = 512
_POLLED: Final = 256

_RETRY_S: Final = 1.0
"""After a queue pair broke, or could not be made; doubled each time, up to"""
_RETRY_MAX_S: Final = 60.0


class Receive(Struct):
    """struct ibv_recv_wr"""

    number: U64
    next: U64
    parts: U64
    part_count: U64


class Queue(Struct):
    """What compiled code has of the queue pair."""

    zone: U64
    """The `kvcast.protocol.requester.landing.Zone`."""
    poll: U64
    """The driver's functions,"""
    post_send: U64
    post_receive: U64
    pair: U64
    """and what they are about."""
    received: U64
    polled: U64
    """Room for completions,"""
    sends: U64
    """for orders to send, with a part each, as a chain,"""
    parts: U64
    receives: U64
    """and for orders to receive."""
    refused: U64
    number: U64
    """Of the last WRITE."""
    memory: U64
    """Where the zone lies."""
    failure: I64
    """What `take` has returned of a pair that is broken; 0 = it is not."""


@native
def allow(q: Queue, count: U64) -> I32:
    """Let the card take so many WRITEs more; an error's number, or 0."""
    last = Receive.at(q.receives + (count - 1) * _RECEIVE_BYTES)
    following = last.next
    last.next = 0
    code = call_post(q.post_receive, q.pair, q.receives, address_of(q) + _REFUSED_AT)
    last.next = following
    return code


@native
def take(q: Queue) -> I64:
    """Note all that the card reports as received: how many WRITEs, or less than 0 where the pair is
    broken: the status of a completion, or an error's number beyond _POSTING."""
    if q.failure != 0:
        return 0 + q.failure
    taken = 0
    while True:
        polled = call_poll(q.poll, q.received, _POLLED, q.polled)
        if polled <= 0:
            return signed(taken)
        count = unsigned(polled)
        words = u32_at(q.polled)
        for i in range(count):
            if words[i * COMPLETION_WORDS + STATUS] != 0:
                q.failure = -signed(words[i * COMPLETION_WORDS + STATUS])
                return 0 + q.failure
        land(Zone.at(q.zone), q.polled + 4 * IMMEDIATE, 4 * COMPLETION_WORDS, count)
        taken += count
        code = allow(q, count)
        if code != 0:
            if code < 0:
                code = 0 - code
            q.failure = -_POSTING - code
            return 0 + q.failure


@native
def put_in_place(q: Queue, first: U64, tag: U64, missing: U64, to: U64, size: U64) -> U64:
    """As `kvcast.protocol.placement.call_landing` says."""
    if take(q) < 0:
        return 0
    number = (tag >> SLOT_SHIFT) & (ZONE_SLOTS - 1)
    zone = Zone.at(q.zone)
    slot = zone.slots[number]
    if slot.claimed == 0 or slot.first != first or (missing & ~slot.untaken) != 0:
        return 0
    source = q.memory + number * SLOT_BYTES
    start = 0
    while missing != 0:
        while (missing & 1) == 0:
            missing = missing >> 1
            start += _CHUNK_BYTES
        end = 0 + start
        while (missing & 1) == 1:
            missing = missing >> 1
            end += _CHUNK_BYTES
        length = end - start
        if size - start < length:
            length = size - start
        copy(to + start, source + start, length)
        start = end
    return 0 + zone.claimed_count


@native
def send(q: Queue, at: U64, size: U64, chunks: U64, first: U64, low: U64) -> I32:
    """Order the WRITEs of some chunks of a segment, which lies at an address; `first` and `low`:
    immediate, and the address's low half, of its first chunk. An error's number, or 0."""
    count = 0
    chunk = 0
    last = Send.at(q.sends)
    while chunks != 0:
        while (chunks & 1) == 0:
            chunks = chunks >> 1
            chunk += 1
        chunks = chunks >> 1
        start = chunk * _CHUNK_BYTES
        part = Part.at(q.parts + count * PART_BYTES)
        part.address = at + start
        part.size = _CHUNK_BYTES
        if size - start < _CHUNK_BYTES:
            part.size = size - start
        last = Send.at(q.sends + count * SEND_BYTES)
        q.number += 1
        last.number = q.number
        immediate = first ^ (chunk << CHUNK_SHIFT)
        last.immediate = (swap16(immediate & 0xFFFF) << 16) | swap16(immediate >> 16)
        last.address = ZONE_ADDRESS | low | (chunk << CHUNK_SHIFT)
        chunk += 1
        count += 1
    following = last.next
    last.next = 0
    last.flags = SIGNALED
    if chunk * _CHUNK_BYTES >= size:
        last.flags = SIGNALED | SOLICITED
    code = call_post(q.post_send, q.pair, q.sends, address_of(q) + _REFUSED_AT)
    last.next = following
    last.flags = 0
    return code


_POSTING: Final = 1000
_RECEIVE_BYTES: Final = size_of(Receive)
_NATIVE_QUEUE: Final = ctypes_of(Queue)
_REFUSED_AT: Final = _NATIVE_QUEUE.refused.offset
assert _RECEIVE_BYTES == 32


class _Compiled(NamedTuple):
    take: Callable[[int], int]
    send: Callable[[int, int, int, int, int, int], int]
    allow: Callable[[int, int], int]
    put_in_place: int
    """Its address."""


@cache
def compiled() -> _Compiled:
    """The compiled functions; made, or read from the cache on disk, when first asked for."""
    library = Library(take, send, allow, put_in_place)
    call = library.call
    return _Compiled(call(take), call(send), call(allow), library.address(put_in_place))


class LandingZone:
    """See the module's description. `device`, `port` and `gid_index`: of the card; `peer`: the
    pool's IPv4 address, and `to` its queue pair and key; `arena`: what is sent from; `landed`: told
    whose segments have come (`Landing.take_told`); `changed`: something was sent or has come;
    `failed`: the queue pair is broken, why.

    VerbsError where the card does not do it.
    """

    def __init__(
        self,
        device: str,
        port: int,
        gid_index: int,
        peer: str,
        arena: memoryview,
        *,
        landed: Callable[[list[object]], None],
        changed: Callable[[], None],
        failed: Callable[[str], None],
        counters: LandingCounters,
        to: tuple[int, int] = (POOL_QUEUE_PAIR, POOL_KEY),
    ) -> None:
        self._to_pair, self._to_key = to
        self._landed = landed
        self._changed = changed
        self._failed = failed
        self._memory = mmap.mmap(-1, ZONE_BYTES)
        self._waiting: deque[tuple[Place, memoryview, int, Callable[[bool], None]]] = deque()
        self._sending: deque[tuple[int, int, Callable[[bool], None]]] = deque()
        """Number of the last WRITE, how many, and whom to tell."""
        self._in_card = 0
        self.closed = False
        self.broken = ""
        self.landing = Landing(
            *(memoryview(self._memory), self.look, self._await_more, counters, AWAITED),
            doubt=lambda: self._break("answers end, and nothing of them lands"),
        )
        self._loop = asyncio.get_running_loop()
        self._code = compiled()
        self._card = OpenCard(device)
        try:
            self._open(port, gid_index, peer, arena)
        except BaseException:
            self.close()
            raise

    # --- making -----------------------------------------------------------------------------

    def _open(self, port: int, gid_index: int, peer: str, arena: memoryview) -> None:
        card, zone = self._card, memoryview(self._memory)
        access = libverbs.LOCAL_WRITE | libverbs.REMOTE_WRITE
        _, self.key = card.register(zone, access, ZONE_ADDRESS)
        # Not `CallingCard`'s registration, nor the windows' (`verbs`), though the rights of either
        # would do: a registration is of one protection domain, as its queue pairs are, and the zone
        # has its own, of a card that it opens itself, so that all of a broken pair goes with it.
        # Nobody but this pair reads by this one: it gives no right to write, nor to others.
        local_key, _ = card.register(arena, 0)
        self._received = card.make_completions(RECEIVES)
        self._sent = card.make_completions(_SENDS)
        self._make_queue(address_of_memory(zone), local_key)
        self._make_pair(port, gid_index, peer)
        self.queue_pair = libverbs.number_of(self._queue.pair)
        card.notify(self._sent, 0)
        self._loop.add_reader(card.descriptor, self._readable)
        card.ends.append(lambda: self._loop.remove_reader(card.descriptor))

    def _make_queue(self, memory: int, local_key: int) -> None:
        """What compiled code works on."""
        card = self._card
        self._polled = (ctypes.c_uint32 * (_POLLED * COMPLETION_WORDS))()
        self._receives = (ctypes_of(Receive) * RECEIVES)()
        at = ctypes.addressof(self._receives)
        for number, receive in enumerate(self._receives):
            receive.next = at + _RECEIVE_BYTES * (number + 1)
        self._orders = Orders(_SENDS, local_key)
        for order in self._orders.sends:
            order.opcode, order.key = libverbs.WRITE_WITH_IMMEDIATE, self._to_key
        self._queue: Any = _NATIVE_QUEUE(
            zone=self.landing.address,
            poll=card.poll_address,
            post_send=card.send_address,
            post_receive=card.receive_address,
            received=self._received,
            polled=ctypes.addressof(self._polled),
            sends=self._orders.address,
            parts=self._orders.parts_address,
            receives=at,
            memory=memory,
        )
        self._queue_at = ctypes.addressof(self._queue)
        self.landing.in_place = self._code.put_in_place, self._queue_at

    def _make_pair(self, port: int, gid_index: int, peer: str) -> None:
        card = self._card
        pair = self._queue.pair = card.make_pair(
            QueuePairOptions(
                send_queue=self._sent,
                receive_queue=self._received,
                sends=_SENDS,
                receives=RECEIVES,
                send_parts=1,
                kind=libverbs.UC,
            )
        )
        card.ends.append(lambda: card.end_pair(pair))
        attributes = Attributes(state=libverbs.INIT, access=libverbs.REMOTE_WRITE, port=port)
        mask = libverbs.STATE | libverbs.PKEY | libverbs.PORT | libverbs.ACCESS
        card.modify(pair, attributes, mask)
        code = self._code.allow(self._queue_at, RECEIVES)
        if code:
            raise VerbsError(f"room for WRITEs: {os.strerror(abs(code))}")
        attributes = Attributes(
            state=libverbs.RTR,
            path_mtu=libverbs.MTU_4096,
            peer=self._to_pair,
            gid=(ctypes.c_uint8 * 16)(*libverbs.gid_of(peer)),
            gid_index=gid_index,
            hops=64,
            is_global=1,
            path_port=port,
        )
        mask = libverbs.STATE | libverbs.PATH | libverbs.MTU | libverbs.PEER | libverbs.RECEIVE_PSN
        card.modify(pair, attributes, mask, " (is the pool's address a neighbour?)")
        attributes = Attributes(state=libverbs.RTS, send_psn=secrets.randbits(24))
        card.modify(pair, attributes, libverbs.STATE | libverbs.SEND_PSN)

    # --- sending ----------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether it has as much to send as it should have."""
        return bool(self._waiting)

    def write(
        self, place: Place, segment: memoryview, chunks: int, done: Callable[[bool], None]
    ) -> None:
        """As `kvcast.hostagent.core.rdma_answers.WriteCard` says."""
        self._waiting.append((place, segment, chunks, done))
        self._send_waiting()

    def _send_waiting(self) -> None:
        waiting = self._waiting
        while waiting and self._in_card + waiting[0][2].bit_count() <= _SENDS:
            place, segment, chunks, done = waiting.popleft()
            if self.broken or self.closed:
                self._loop.call_soon(done, False)
                continue
            at = address_of_memory(segment)
            code = self._code.send(
                *(self._queue_at, at, len(segment), chunks),
                *(place.immediate(0), place.address_low(0)),
            )
            if code:
                self._loop.call_soon(done, False)
                self._break(f"posting WRITEs: {os.strerror(abs(code))}")
                return
            count = chunks.bit_count()
            self._in_card += count
            self._sending.append((self._queue.number, count, done))

    # --- completions ------------------------------------------------------------------------

    def _await_more(self) -> None:
        """Wake for the last chunk of an answer. Else no WRITE wakes anybody: the processor has
        better things to do, and WRITTEN comes behind the last."""
        if not self.closed:
            self._card.notify(self._received, 1)
            self._loop.call_soon(self._look_again)  # at what came before that

    def _readable(self) -> None:
        if not self._card.take_events():
            return
        self._card.notify(self._sent, 0)
        if self.landing.awaits_ends:
            self._card.notify(self._received, 1)
        self._look_again()

    def _look_again(self) -> None:
        if self.look():
            self._changed()

    def look(self) -> bool:
        """Ask the card what has come, and been sent, since; whether there was anything."""
        if self.closed or self.broken:
            return False
        came = self._code.take(self._queue_at)
        told = self.landing.take_told()
        if told:
            self._landed(told)
        if came <= -_POSTING:
            self._break(f"room for WRITEs: {os.strerror(-came - _POSTING)}")
        elif came < 0:
            self._break(f"a completion with status {-came}")
        sent = False
        while self._sending and (polled := self._poll_some(self._sent)) is not None:
            sent = True
            for number in polled[NUMBER::COMPLETION_WORDS]:
                if not self.broken:
                    self._ended(number)
        if sent:
            self._send_waiting()
        return sent or came > 0 or bool(told)

    def _poll_some(self, queue: int) -> memoryview | None:
        """Completions that are there, as words; None if there are none, or the pair is broken."""
        if self.closed or self.broken:
            return None
        count = self._card.poll(queue, _POLLED, ctypes.addressof(self._polled))
        if count <= 0:
            return None
        polled = memoryview(self._polled).cast("B").cast("I")[: count * COMPLETION_WORDS]
        bad = next(filter(None, polled[STATUS::COMPLETION_WORDS]), 0)
        if bad:
            self._break(f"a completion with status {bad}")
            return None
        return polled

    def _ended(self, number: int) -> None:
        last, count, done = self._sending.popleft()
        assert last & 0xFFFFFFFF == number
        self._in_card -= count
        done(True)

    def _break(self, why: str) -> None:
        if self.broken or self.closed:
            return
        self.broken = why
        self.landing.lost()
        self._loop.call_soon(self._failed, why)

    def close(self) -> None:
        """End everything; what was not sent never is."""
        if self.closed:
            return
        self.closed = True
        self._card.close()
        self._in_card = 0
        told = [item[2] for item in self._sending] + [item[3] for item in self._waiting]
        for done in told:
            done(False)
        self._sending.clear()
        self._waiting.clear()


class ZoneKeeper:
    """Keeps a landing zone while the pool's map names an address for it, makes it again where its
    queue pair broke, and has the controller told. `register`: tells it this node's queue pair and
    key, 0 and 0 for none; `core_told`: do what the cores want done."""

    def __init__(
        self,
        core: AgentCore,
        card: Card,
        arena: memoryview,
        register: Callable[[int, int], None],
        core_told: Callable[[], None],
    ) -> None:
        self._core = core
        self._card = card
        self._arena = arena
        self._register = register
        self._core_told = core_told
        self._zone: LandingZone | None = None
        self._address = ""
        self._backoff = Backoff(_RETRY_S, _RETRY_MAX_S)
        self._retry: asyncio.TimerHandle | None = None

    def follow(self) -> None:
        """The map may have changed."""
        address = self._core.rdma_address
        if address != self._address:
            self._address = address
            self._backoff.worked()
            self._end()
            if address:
                self._make()

    def _make(self) -> None:
        self._retry = None
        card, loop = self._card, asyncio.get_running_loop()

        def landed(segments: list[object]) -> None:
            if segments and self._zone is not None:
                self._core.landed(loop.time(), segments)

        try:
            zone = self._zone = LandingZone(
                card.name,
                card.port,
                card.gid_index,
                self._address,
                self._arena,
                landed=landed,
                changed=self._changed,
                failed=self._failed,
                counters=self._core.landing_counters,
            )
        except VerbsError as error:
            self._failed(str(error))
            return
        self._core.use_zone(zone.landing, zone)
        self._register(zone.queue_pair, zone.key)
        log.info("shared answers come and go by RDMA")

    def _changed(self) -> None:
        self._core.after_receiving(asyncio.get_running_loop().time())
        self._core_told()

    def _failed(self, why: str) -> None:
        pause_s = self._backoff.next_pause_s()
        log.warning("no shared answers by RDMA: %s; again in %.3g s", why, pause_s)
        self._end()
        self._retry = asyncio.get_running_loop().call_later(pause_s, self._make)

    def _end(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        zone, self._zone = self._zone, None
        if zone is not None:
            self._core.use_zone(None, None)
            zone.close()
            self._register(0, 0)

    def close(self) -> None:
        """End the zone."""
        self._register = lambda _pair, _key: None
        self._end()
