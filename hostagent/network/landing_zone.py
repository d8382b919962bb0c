"""The card's part in shared answers: memory into which the switch has others write, and a queue
pair by which this node writes for whoever waits.

Owns: the zone's memory, its registration and queue pair (UC), and the arena's registration for what
is sent. Must not know: what a block is, who waits, or which slot is whose.

One queue pair does both: its peer is the pool's own address and queue pair, which no card has. It
speaks to libibverbs directly, since pyverbs registers no memory under an address of our choice, and
in compiled code wherever something is done for each chunk. What is relied on is the public layout
of `infiniband/verbs.h`.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import logging
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Final, NamedTuple

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.network.verbs import Card
from kvcast.native.linux import swap16
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
    copy,
    ctypes_of,
    indirect,
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

_UC: Final = 3
_WRITE_WITH_IMMEDIATE: Final = 1
_SIGNALED: Final = 2
_SOLICITED: Final = 4
"""It wakes who waits for the last chunk of an answer."""
_LOCAL_WRITE, _REMOTE_WRITE = 1, 2
_MTU_4096: Final = 5
_INIT, _RTR, _RTS, _ERROR = 1, 2, 3, 6
_STATE, _ACCESS, _PKEY, _PORT, _PATH = 0x1, 0x8, 0x10, 0x20, 0x80
_MTU, _RECEIVE_PSN, _SEND_PSN, _PEER = 0x100, 0x1000, 0x10000, 0x100000

_POLL_AT, _NOTIFY_AT, _SEND_AT, _RECEIVE_AT = 96, 104, 208, 216
"""Where an ibv_context has its functions."""
_COMPLETION_WORDS: Final = 12
"""Of 32 bits, in an ibv_wc; of them"""
_NUMBER, _STATUS, _IMMEDIATE = 0, 2, 6
"""(the number's lower half; the immediate in network order)"""


class _QueuePairOptions(ctypes.Structure):
    _fields_ = [
        ("context", ctypes.c_void_p),
        ("send_queue", ctypes.c_void_p),
        ("receive_queue", ctypes.c_void_p),
        ("shared_receives", ctypes.c_void_p),
        ("sends", ctypes.c_uint32),
        ("receives", ctypes.c_uint32),
        ("send_parts", ctypes.c_uint32),
        ("receive_parts", ctypes.c_uint32),
        ("inline_bytes", ctypes.c_uint32),
        ("kind", ctypes.c_int),
        ("all_signaled", ctypes.c_int),
    ]


class _Attributes(ctypes.Structure):
    """ibv_qp_attr, with the ibv_ah_attr in it."""

    _fields_ = [
        ("state", ctypes.c_int),
        ("current_state", ctypes.c_int),
        ("path_mtu", ctypes.c_int),
        ("migration", ctypes.c_int),
        ("qkey", ctypes.c_uint32),
        ("receive_psn", ctypes.c_uint32),
        ("send_psn", ctypes.c_uint32),
        ("peer", ctypes.c_uint32),
        ("access", ctypes.c_uint),
        ("capacity", ctypes.c_uint32 * 5),
        ("gid", ctypes.c_uint8 * 16),
        ("flow", ctypes.c_uint32),
        ("gid_index", ctypes.c_uint8),
        ("hops", ctypes.c_uint8),
        ("class_", ctypes.c_uint8),
        ("lid", ctypes.c_uint16),
        ("level", ctypes.c_uint8),
        ("path_bits", ctypes.c_uint8),
        ("rate", ctypes.c_uint8),
        ("is_global", ctypes.c_uint8),
        ("path_port", ctypes.c_uint8),
        ("other_path", ctypes.c_uint8 * 32),
        ("partition_index", ctypes.c_uint16),
        ("other_partition_index", ctypes.c_uint16),
        ("draining", ctypes.c_uint8),
        ("notify_draining", ctypes.c_uint8),
        ("reads", ctypes.c_uint8),
        ("reads_answered", ctypes.c_uint8),
        ("min_timer", ctypes.c_uint8),
        ("port", ctypes.c_uint8),
        ("rest", ctypes.c_uint8 * 14),
    ]


assert ctypes.sizeof(_QueuePairOptions) == 64
assert ctypes.sizeof(_Attributes) == 144
assert (_Attributes.gid.offset, _Attributes.partition_index.offset) == (56, 120)
assert (_Attributes.gid_index.offset, _Attributes.port.offset) == (76, 129)


class Part(Struct):
    """struct ibv_sge"""

    address: U64
    size: U32
    key: U32


class Send(Struct):
    """struct ibv_send_wr, of an RDMA WRITE"""

    number: U64
    next: U64
    parts: U64
    part_count: I32
    opcode: I32
    flags: U32
    immediate: U32
    """In network order."""
    address: U64
    key: U32
    rest: Annotated[Ptr[U32], Inline(19)]


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


@indirect
def call_poll(address: U64, queue: U64, most: U64, completions: U64) -> I32:
    raise NotImplementedError


@indirect
def call_post(address: U64, pair: U64, first: U64, refused: U64) -> I32:
    raise NotImplementedError


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
            if words[i * _COMPLETION_WORDS + _STATUS] != 0:
                q.failure = -signed(words[i * _COMPLETION_WORDS + _STATUS])
                return 0 + q.failure
        land(Zone.at(q.zone), q.polled + 4 * _IMMEDIATE, 4 * _COMPLETION_WORDS, count)
        taken += count
        code = allow(q, count)
        if code != 0:
            if code < 0:
                code = 0 - code
            q.failure = -_POSTING - code
            return 0 + q.failure


@native
def put_in_place(q: Queue, first: U64, tag: U64, missing: U64, to: U64, size: U64) -> bool:
    """As `kvcast.protocol.placement.call_landing` says."""
    if take(q) < 0:
        return False
    number = (tag >> SLOT_SHIFT) & (ZONE_SLOTS - 1)
    slot = Zone.at(q.zone).slots[number]
    if slot.claimed == 0 or slot.first != first or (missing & ~slot.untaken) != 0:
        return False
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
    return True


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
        part = Part.at(q.parts + count * _PART_BYTES)
        part.address = at + start
        part.size = _CHUNK_BYTES
        if size - start < _CHUNK_BYTES:
            part.size = size - start
        last = Send.at(q.sends + count * _SEND_BYTES)
        q.number += 1
        last.number = q.number
        immediate = first ^ (chunk << CHUNK_SHIFT)
        last.immediate = (swap16(immediate & 0xFFFF) << 16) | swap16(immediate >> 16)
        last.address = ZONE_ADDRESS | low | (chunk << CHUNK_SHIFT)
        chunk += 1
        count += 1
    following = last.next
    last.next = 0
    last.flags = _SIGNALED
    if chunk * _CHUNK_BYTES >= size:
        last.flags = _SIGNALED | _SOLICITED
    code = call_post(q.post_send, q.pair, q.sends, address_of(q) + _REFUSED_AT)
    last.next = following
    last.flags = 0
    return code


_POSTING: Final = 1000
_PART_BYTES: Final = size_of(Part)
_SEND_BYTES: Final = size_of(Send)
_RECEIVE_BYTES: Final = size_of(Receive)
_NATIVE_QUEUE: Final = ctypes_of(Queue)
_REFUSED_AT: Final = _NATIVE_QUEUE.refused.offset
assert (_PART_BYTES, _SEND_BYTES, _RECEIVE_BYTES) == (16, 128, 32)
_NATIVE_SEND: Final = ctypes_of(Send)
assert (_NATIVE_SEND.immediate.offset, _NATIVE_SEND.address.offset) == (36, 40)


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


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as error:
        raise VerbsError(f"libibverbs is not there ({error})") from error
    pointers = ("get_device_list", "get_device_name", "open_device", "alloc_pd", "reg_mr_iova")
    for name in (*pointers, "reg_mr", "create_comp_channel", "create_cq", "create_qp"):
        getattr(library, f"ibv_{name}").restype = ctypes.c_void_p
    return library


class LandingZone:
    """See the module's description. `device`, `port` and `gid_index`: of the card; `peer`: the
    pool's IPv4 address; `arena`: what is sent from; `landed`: told whose segments have come
    (`Landing.take_told`); `changed`: something was sent or has come; `failed`: the queue pair is
    broken, why.

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
    ) -> None:
        self._landed = landed
        self._changed = changed
        self._failed = failed
        self._memory = mmap.mmap(-1, ZONE_BYTES)
        self._ends: list[Callable[[], object]] = []
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
        self._library = _library()
        self._code = compiled()
        try:
            self._open(device, port, gid_index, peer, arena)
        except BaseException:
            self.close()
            raise

    # --- making -----------------------------------------------------------------------------

    def _made(self, name: str, *arguments: Any) -> int:
        """Call a function that makes something; VerbsError where it does not."""
        made = getattr(self._library, f"ibv_{name}")(*arguments)
        if not made:
            code = ctypes.get_errno()
            raise VerbsError(f"{name}: {os.strerror(code)}")
        return int(made)

    def _ended_by(self, name: str, what: int) -> None:
        function = getattr(self._library, f"ibv_{name}")
        self._ends.append(lambda: function(ctypes.c_void_p(what)))

    def _open(self, device: str, port: int, gid_index: int, peer: str, arena: memoryview) -> None:
        self._context = self._open_device(device)
        domain = self._made("alloc_pd", ctypes.c_void_p(self._context))
        self._ended_by("dealloc_pd", domain)
        zone = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        region = self._made(
            "reg_mr_iova",
            *(ctypes.c_void_p(domain), ctypes.c_void_p(zone), ctypes.c_size_t(ZONE_BYTES)),
            *(ctypes.c_uint64(ZONE_ADDRESS), _LOCAL_WRITE | _REMOTE_WRITE),
        )
        self._ended_by("dereg_mr", region)
        self.key = ctypes.c_uint32.from_address(region + 40).value
        source = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        sent_from = self._made(
            "reg_mr",
            *(ctypes.c_void_p(domain), ctypes.c_void_p(source), ctypes.c_size_t(len(arena))),
            0,
        )
        self._ended_by("dereg_mr", sent_from)
        self._local_key = ctypes.c_uint32.from_address(sent_from + 36).value
        self._channel = self._made("create_comp_channel", ctypes.c_void_p(self._context))
        self._ended_by("destroy_comp_channel", self._channel)
        self._descriptor = ctypes.c_int.from_address(self._channel + 8).value
        os.set_blocking(self._descriptor, False)
        self._received = self._make_completions(RECEIVES)
        self._sent = self._make_completions(_SENDS)
        self._functions()
        self._pair = self._make_pair(domain, port, gid_index, peer)
        self.queue_pair = ctypes.c_uint32.from_address(self._pair + 52).value
        self._notify(self._sent, 0)
        self._loop.add_reader(self._descriptor, self._readable)
        self._ends.append(lambda: self._loop.remove_reader(self._descriptor))

    def _make_completions(self, entries: int) -> int:
        """A completion queue."""
        queue = self._made(
            "create_cq",
            *(ctypes.c_void_p(self._context), entries, None),
            *(ctypes.c_void_p(self._channel), 0),
        )
        self._ended_by("destroy_cq", queue)
        return queue

    def _open_device(self, name: str) -> int:
        count = ctypes.c_int()
        devices = self._made("get_device_list", ctypes.byref(count))
        listed = (ctypes.c_void_p * count.value).from_address(devices)
        try:
            for device in listed:
                found = self._made("get_device_name", ctypes.c_void_p(device))
                if ctypes.string_at(found).decode() == name:
                    context = self._made("open_device", ctypes.c_void_p(device))
                    self._ended_by("close_device", context)
                    return context
        finally:
            self._library.ibv_free_device_list(ctypes.c_void_p(devices))
        raise VerbsError(f"the card {name} is gone")

    def _functions(self) -> None:
        """Those that a context has, and the library does not."""

        def function(at: int, *arguments: Any) -> Any:
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *arguments, use_errno=True)
            return kind(ctypes.c_size_t.from_address(self._context + at).value)

        pointer = ctypes.c_void_p
        self._poll = function(_POLL_AT, pointer, ctypes.c_int, pointer)
        self._notify = function(_NOTIFY_AT, pointer, ctypes.c_int)
        self._polled = (ctypes.c_uint32 * (_POLLED * _COMPLETION_WORDS))()
        self._receives = (ctypes_of(Receive) * RECEIVES)()
        at = ctypes.addressof(self._receives)
        for number, receive in enumerate(self._receives):
            receive.next = at + _RECEIVE_BYTES * (number + 1)
        self._sends = (_NATIVE_SEND * _SENDS)()
        self._parts = (ctypes_of(Part) * _SENDS)()
        send_at, part_at = ctypes.addressof(self._sends), ctypes.addressof(self._parts)
        for number, order in enumerate(self._sends):
            order.next = send_at + _SEND_BYTES * (number + 1)
            order.parts, order.part_count = part_at + _PART_BYTES * number, 1
            order.opcode, order.key = _WRITE_WITH_IMMEDIATE, POOL_KEY
            self._parts[number].key = self._local_key

        def address(at: int) -> int:
            return ctypes.c_size_t.from_address(self._context + at).value

        self._queue: Any = _NATIVE_QUEUE(
            zone=self.landing.address,
            poll=address(_POLL_AT),
            post_send=address(_SEND_AT),
            post_receive=address(_RECEIVE_AT),
            received=self._received,
            polled=ctypes.addressof(self._polled),
            sends=send_at,
            parts=part_at,
            receives=at,
            memory=ctypes.addressof(ctypes.c_char.from_buffer(self._memory)),
        )
        self._queue_at = ctypes.addressof(self._queue)
        self.landing.in_place = self._code.put_in_place, self._queue_at

    def _make_pair(self, domain: int, port: int, gid_index: int, peer: str) -> int:
        options = _QueuePairOptions(
            send_queue=self._sent,
            receive_queue=self._received,
            sends=_SENDS,
            receives=RECEIVES,
            send_parts=1,
            kind=_UC,
        )
        pair = self._made("create_qp", ctypes.c_void_p(domain), ctypes.byref(options))
        self._ended_by("destroy_qp", pair)
        self._pair = self._queue.pair = pair
        attributes = _Attributes(state=_INIT, access=_REMOTE_WRITE, port=port)
        self._modify(attributes, _STATE | _PKEY | _PORT | _ACCESS)
        code = self._code.allow(self._queue_at, RECEIVES)
        if code:
            raise VerbsError(f"room for WRITEs: {os.strerror(abs(code))}")
        gid = bytes(10) + b"\xff\xff" + ipaddress.IPv4Address(peer).packed
        attributes = _Attributes(
            state=_RTR,
            path_mtu=_MTU_4096,
            peer=POOL_QUEUE_PAIR,
            gid=(ctypes.c_uint8 * 16)(*gid),
            gid_index=gid_index,
            hops=64,
            is_global=1,
            path_port=port,
        )
        self._modify(attributes, _STATE | _PATH | _MTU | _PEER | _RECEIVE_PSN)
        attributes = _Attributes(state=_RTS, send_psn=secrets.randbits(24))
        self._modify(attributes, _STATE | _SEND_PSN)
        return pair

    def _modify(self, attributes: _Attributes, mask: int) -> None:
        code = self._library.ibv_modify_qp(
            ctypes.c_void_p(self._pair), ctypes.byref(attributes), mask
        )
        if code:
            what = f"the queue pair does not go to state {attributes.state}"
            raise VerbsError(f"{what}: {os.strerror(code)} (is the pool's address a neighbour?)")

    # --- sending ----------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether it has as much to send as it should have."""
        return bool(self._waiting)

    def write(
        self, place: Place, segment: memoryview, chunks: int, done: Callable[[bool], None]
    ) -> None:
        """As `kvcast.hostagent.core.writing.WriteCard` says."""
        self._waiting.append((place, segment, chunks, done))
        self._send_waiting()

    def _send_waiting(self) -> None:
        waiting = self._waiting
        while waiting and self._in_card + waiting[0][2].bit_count() <= _SENDS:
            place, segment, chunks, done = waiting.popleft()
            if self.broken or self.closed:
                self._loop.call_soon(done, False)
                continue
            at = ctypes.addressof(ctypes.c_char.from_buffer(segment))
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
            self._notify(self._received, 1)
            self._loop.call_soon(self._look_again)  # at what came before that

    def _readable(self) -> None:
        queue, context = ctypes.c_void_p(), ctypes.c_void_p()
        events = 0
        while not self._library.ibv_get_cq_event(
            ctypes.c_void_p(self._channel), ctypes.byref(queue), ctypes.byref(context)
        ):
            self._library.ibv_ack_cq_events(queue, 1)
            events += 1
        if not events:
            return
        self._notify(self._sent, 0)
        if self.landing.awaits_ends:
            self._notify(self._received, 1)
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
            for number in polled[_NUMBER::_COMPLETION_WORDS]:
                if not self.broken:
                    self._ended(number)
        if sent:
            self._send_waiting()
        return sent or came > 0 or bool(told)

    def _poll_some(self, queue: int) -> memoryview | None:
        """Completions that are there, as words; None if there are none, or the pair is broken."""
        if self.closed or self.broken:
            return None
        count = self._poll(queue, _POLLED, ctypes.addressof(self._polled))
        if count <= 0:
            return None
        polled = memoryview(self._polled).cast("B").cast("I")[: count * _COMPLETION_WORDS]
        bad = next(filter(None, polled[_STATUS::_COMPLETION_WORDS]), 0)
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
        while self._ends:
            self._ends.pop()()
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
