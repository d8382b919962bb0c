"""The card's part in shared answers: memory into which the switch has others write, and a queue
pair by which this node writes for whoever waits.

Owns: the zone's memory, its registration and queue pair (UC), and the arena's registration for what
is sent. Must not know: what a block is, who waits, or which slot is whose.

One queue pair does both: its peer is the pool's own address and queue pair, which no card has. It
speaks to libibverbs directly, since pyverbs registers no memory under an address of our choice, and
since a Python object for each chunk would cost more than the chunk. What is relied on is the public
layout of `infiniband/verbs.h`.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import logging
import mmap
import os
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.network.verbs import Card
from kvcast.protocol.links.backoff import Backoff
from kvcast.protocol.links.rdma import VerbsError
from kvcast.protocol.messages.roce import (
    POOL_KEY,
    POOL_QUEUE_PAIR,
    SHARED_CHUNKING,
    ZONE_ADDRESS,
    ZONE_BYTES,
    Place,
)
from kvcast.protocol.messages.wire import CHUNKS_PER_SEGMENT
from kvcast.protocol.requester.landing import Landing, LandingCounters

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


class _Part(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("size", ctypes.c_uint32), ("key", ctypes.c_uint32)]


class _Send(ctypes.Structure):
    """ibv_send_wr."""

    _fields_ = [
        ("number", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("part_count", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("immediate", ctypes.c_uint8 * 4),
        ("address", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 76),
    ]


class _Receive(ctypes.Structure):
    _fields_ = [
        ("number", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("part_count", ctypes.c_int),
    ]


assert ctypes.sizeof(_Send) == 128
assert ctypes.sizeof(_Receive) == 32


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
    pool's IPv4 address; `arena`: what is sent from; `landed`: told of the immediates of WRITEs that
    have come; `changed`: something was sent or has come; `failed`: the queue pair is broken, why.

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
        landed: Callable[[Sequence[int]], None],
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
        self._number = 0
        self._in_card = 0
        self.closed = False
        self.broken = ""
        self.landing = Landing(
            memoryview(self._memory), self.look, self._await_more, counters, AWAITED
        )
        self._loop = asyncio.get_running_loop()
        self._library = _library()
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
        self._post_send = function(_SEND_AT, pointer, pointer, pointer)
        self._post_receive = function(_RECEIVE_AT, pointer, pointer, pointer)
        self._polled = (ctypes.c_uint32 * (_POLLED * _COMPLETION_WORDS))()
        self._refused = ctypes.c_void_p()
        self._receives = (_Receive * RECEIVES)()
        at = ctypes.addressof(self._receives)
        for number, receive in enumerate(self._receives):
            receive.next = at + 32 * (number + 1)
        self._sends = (_Send * _SENDS)()
        self._parts = (_Part * _SENDS)()
        send_at, part_at = ctypes.addressof(self._sends), ctypes.addressof(self._parts)
        for number, send in enumerate(self._sends):
            send.next = send_at + 128 * (number + 1)
            send.parts, send.part_count = part_at + 16 * number, 1
            send.opcode, send.key = _WRITE_WITH_IMMEDIATE, POOL_KEY
            self._parts[number].key = self._local_key

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
        self._pair = pair
        attributes = _Attributes(state=_INIT, access=_REMOTE_WRITE, port=port)
        self._modify(attributes, _STATE | _PKEY | _PORT | _ACCESS)
        self._receive(RECEIVES)
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
            count = self._prepare(place, segment, chunks)
            self._sends[count - 1].next = None
            self._sends[count - 1].flags = _SIGNALED
            code = self._post_send(
                self._pair, ctypes.addressof(self._sends), ctypes.byref(self._refused)
            )
            self._sends[count - 1].next = ctypes.addressof(self._sends) + 128 * count
            self._sends[count - 1].flags = 0
            if code:
                self._loop.call_soon(done, False)
                self._break(f"posting WRITEs: {os.strerror(abs(code))}")
                return
            self._in_card += count
            self._sending.append((self._number, count, done))

    def _prepare(self, place: Place, segment: memoryview, chunks: int) -> int:
        """Describe the WRITEs of one segment; how many there are."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(segment))
        size, count = len(segment), 0
        while chunks:
            chunk = (chunks & -chunks).bit_length() - 1
            chunks &= chunks - 1
            at = chunk * _CHUNK_BYTES
            part, send = self._parts[count], self._sends[count]
            part.address, part.size = address + at, min(_CHUNK_BYTES, size - at)
            self._number += 1
            send.number = self._number
            send.immediate[:] = place.immediate(chunk).to_bytes(4, "big")
            send.address = ZONE_ADDRESS | place.address_low(chunk)
            count += 1
        return count

    # --- completions ------------------------------------------------------------------------

    def _await_more(self) -> None:
        """Wake for the next WRITE that comes. Else none wakes anybody: the processor has better
        things to do for each chunk, and WRITTEN comes behind the last."""
        if not self.closed:
            self._notify(self._received, 0)
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
        self._look_again()

    def _look_again(self) -> None:
        if self.look():
            self._changed()

    def look(self) -> bool:
        """Ask the card what has come, and been sent, since; whether there was anything."""
        anything = False
        while (polled := self._poll_some(self._received)) is not None:
            anything = True
            came = array("I", polled[_IMMEDIATE::_COMPLETION_WORDS].tolist())
            came.byteswap()
            if not self.broken:
                self._receive(len(came))
                self._landed(came)
        while self._sending and (polled := self._poll_some(self._sent)) is not None:
            anything = True
            for number in polled[_NUMBER::_COMPLETION_WORDS]:
                if not self.broken:
                    self._ended(number)
        if anything:
            self._send_waiting()
        return anything

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

    def _receive(self, count: int) -> None:
        """Let the card take so many WRITEs more."""
        last = self._receives[count - 1]
        following, last.next = last.next, None
        code = self._post_receive(
            self._pair, ctypes.addressof(self._receives), ctypes.byref(self._refused)
        )
        last.next = following
        if code:
            self._break(f"room for WRITEs: {os.strerror(abs(code))}")

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

        def landed(immediates: Sequence[int]) -> None:
            if self._zone is not None:
                segments = self._zone.landing.landed(immediates)
                if segments:
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
