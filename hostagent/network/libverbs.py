"""libibverbs itself, for what pyverbs has no words for, or does without letting others run: cards
that are opened, and what is made with them.

Owns: the public layout of `infiniband/verbs.h`, as far as it is used, and that everything made is
ended in the reverse order. Must not know: what queue pairs are for.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
from collections.abc import Callable
from typing import Annotated, Any, Final

from kvcast.native.subset import (
    I32,
    U32,
    U64,
    Inline,
    Ptr,
    Struct,
    ctypes_of,
    indirect,
    size_of,
)
from kvcast.protocol.links.rdma import VerbsError

RC, UC = 2, 3
WRITE, WRITE_WITH_IMMEDIATE, READ = 0, 1, 4
SIGNALED: Final = 2
SOLICITED: Final = 4
"""It wakes who waits for the last chunk of an answer."""
LOCAL_WRITE, REMOTE_WRITE = 1, 2
MTU_4096: Final = 5
INIT, RTR, RTS = 1, 2, 3
STATE, ACCESS, PKEY, PORT, PATH = 0x1, 0x8, 0x10, 0x20, 0x80
MTU, RECEIVE_PSN, SEND_PSN, PEER = 0x100, 0x1000, 0x10000, 0x100000
TIMES, READS, MIN_TIMER, READS_ANSWERED = 0x200 | 0x400 | 0x800, 0x2000, 0x8000, 0x20000

_POLL_AT, _NOTIFY_AT, _SEND_AT, _RECEIVE_AT = 96, 104, 208, 216
"""Where an ibv_context has its functions."""
_EVENTS_AT: Final = 268
"""Where it has the descriptor of what happens to the card."""
DEVICE_FATAL, PORT_ACTIVE, PORT_ERROR = 8, 9, 10
"""Of what may happen to it."""
COMPLETION_WORDS: Final = 12
"""Of 32 bits, in an ibv_wc; of them"""
NUMBER, STATUS, IMMEDIATE = 0, 2, 6
"""(the number's lower half; the immediate in network order)"""


class QueuePairOptions(ctypes.Structure):
    """ibv_qp_init_attr"""

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


class Attributes(ctypes.Structure):
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
        ("timeout", ctypes.c_uint8),
        ("retries", ctypes.c_uint8),
        ("not_ready_retries", ctypes.c_uint8),
        ("rest", ctypes.c_uint8 * 11),
    ]


class _Event(ctypes.Structure):
    """ibv_async_event"""

    _fields_ = [("port", ctypes.c_int), ("rest", ctypes.c_int), ("kind", ctypes.c_int)]


assert ctypes.sizeof(QueuePairOptions) == 64
assert ctypes.sizeof(Attributes) == 144
assert (Attributes.gid.offset, Attributes.partition_index.offset) == (56, 120)
assert (Attributes.gid_index.offset, Attributes.port.offset) == (76, 129)


class Part(Struct):
    """struct ibv_sge"""

    address: U64
    size: U32
    key: U32


class Send(Struct):
    """struct ibv_send_wr, of an RDMA READ or WRITE"""

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


PART_BYTES: Final = size_of(Part)
SEND_BYTES: Final = size_of(Send)
assert (PART_BYTES, SEND_BYTES) == (16, 128)
_NATIVE_SEND: Final = ctypes_of(Send)
assert (_NATIVE_SEND.immediate.offset, _NATIVE_SEND.address.offset) == (36, 40)


@indirect
def call_poll(address: U64, queue: U64, most: U64, completions: U64) -> I32:
    raise NotImplementedError


@indirect
def call_post(address: U64, pair: U64, first: U64, refused: U64) -> I32:
    raise NotImplementedError


class Orders:
    """Room for so many READs or WRITEs, with a part each, as a chain."""

    def __init__(self, count: int, local_key: int) -> None:
        self.sends: Any = (_NATIVE_SEND * count)()
        self.parts: Any = (ctypes_of(Part) * count)()
        self.address = ctypes.addressof(self.sends)
        self.parts_address = ctypes.addressof(self.parts)
        for number, order in enumerate(self.sends):
            order.next = self.address + SEND_BYTES * (number + 1)
            order.parts, order.part_count = self.parts_address + PART_BYTES * number, 1
            self.parts[number].key = local_key


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as error:
        raise VerbsError(f"libibverbs is not there ({error})") from error
    pointers = ("get_device_list", "get_device_name", "open_device", "alloc_pd", "reg_mr_iova")
    for name in (*pointers, "reg_mr", "create_comp_channel", "create_cq", "create_qp"):
        getattr(library, f"ibv_{name}").restype = ctypes.c_void_p
    library.ibv_wc_status_str.restype = ctypes.c_char_p
    return library


def address_of_memory(memory: memoryview) -> int:
    """Where a writable buffer of at least one byte lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class OpenCard:
    """The card of that name, open, and what is made with it until `close`. VerbsError where
    something cannot be made."""

    def __init__(self, name: str) -> None:
        self.ends: list[Callable[[], object]] = []
        """What `close` does, the last first."""
        self._library = _library()
        try:
            self._context = self._open(name)
            self._domain = self._made("alloc_pd", ctypes.c_void_p(self._context))
            self._ended_by("dealloc_pd", self._domain)
            self._channel = self._made("create_comp_channel", ctypes.c_void_p(self._context))
            self._ended_by("destroy_comp_channel", self._channel)
        except BaseException:
            self.close()
            raise
        self.descriptor = ctypes.c_int.from_address(self._channel + 8).value
        """Can be read when a completion queue has something that was to be told of."""
        self.events = ctypes.c_int.from_address(self._context + _EVENTS_AT).value
        """Can be read when something has happened to the card."""
        for descriptor in (self.descriptor, self.events):
            os.set_blocking(descriptor, False)
        pointer = ctypes.c_void_p
        self.poll = self._function(_POLL_AT, pointer, ctypes.c_int, pointer)
        """(completion queue, at most so many, where to): how many."""
        self.notify = self._function(_NOTIFY_AT, pointer, ctypes.c_int)
        """(completion queue, whether of solicited events only): be told of the next."""
        self.poll_address, self.send_address, self.receive_address = map(
            self._address, (_POLL_AT, _SEND_AT, _RECEIVE_AT)
        )
        """Of the driver's functions, for compiled code."""

    def _made(self, name: str, *arguments: Any) -> int:
        """Call a function that makes something."""
        made = getattr(self._library, f"ibv_{name}")(*arguments)
        if not made:
            code = ctypes.get_errno()
            raise VerbsError(f"{name}: {os.strerror(code)}")
        return int(made)

    def _ended_by(self, name: str, what: int) -> None:
        function = getattr(self._library, f"ibv_{name}")
        self.ends.append(lambda: function(ctypes.c_void_p(what)))

    def _open(self, name: str) -> int:
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

    def _address(self, at: int) -> int:
        return ctypes.c_size_t.from_address(self._context + at).value

    def _function(self, at: int, *arguments: Any) -> Any:
        """One that a context has, and the library does not."""
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *arguments, use_errno=True)
        return kind(self._address(at))

    # --- memory -----------------------------------------------------------------------------

    def register(self, memory: memoryview, access: int, at: int | None = None) -> tuple[int, int]:
        """Register memory, `at` an address of our choice: the local and the remote key."""
        words = [
            ctypes.c_void_p(self._domain),
            ctypes.c_void_p(address_of_memory(memory)),
            ctypes.c_size_t(len(memory)),
        ]
        if at is None:
            region = self._made("reg_mr", *words, access)
        else:
            region = self._made("reg_mr_iova", *words, ctypes.c_uint64(at), access)
        self._ended_by("dereg_mr", region)
        local, remote = (ctypes.c_uint32.from_address(region + n).value for n in (36, 40))
        return local, remote

    # --- queues -----------------------------------------------------------------------------

    def make_completions(self, entries: int) -> int:
        """A completion queue."""
        queue = self._made(
            "create_cq",
            *(ctypes.c_void_p(self._context), entries, None),
            *(ctypes.c_void_p(self._channel), 0),
        )
        self._ended_by("destroy_cq", queue)
        return queue

    def take_events(self) -> int:
        """Take what `descriptor` has to tell: how often something."""
        queue, context = ctypes.c_void_p(), ctypes.c_void_p()
        events = 0
        while not self._library.ibv_get_cq_event(
            ctypes.c_void_p(self._channel), ctypes.byref(queue), ctypes.byref(context)
        ):
            self._library.ibv_ack_cq_events(queue, 1)
            events += 1
        return events

    def take_happened(self) -> list[tuple[int, int]]:
        """Take what `events` has to tell: what happened, and to which port, where it is about
        one."""
        happened = []
        event = _Event()
        while not self._library.ibv_get_async_event(
            ctypes.c_void_p(self._context), ctypes.byref(event)
        ):
            happened.append((event.kind, event.port))
            self._library.ibv_ack_async_event(ctypes.byref(event))
        return happened

    def problem(self, status: int) -> str:
        """What a completion's status means; "" where all went well."""
        return str(self._library.ibv_wc_status_str(status).decode()) if status else ""

    def make_pair(self, options: QueuePairOptions) -> int:
        """A queue pair; whoever makes it ends it by `end_pair`."""
        return self._made("create_qp", ctypes.c_void_p(self._domain), ctypes.byref(options))

    def end_pair(self, pair: int) -> int:
        """An error's number, or 0."""
        return int(self._library.ibv_destroy_qp(ctypes.c_void_p(pair)))

    def modify(self, pair: int, attributes: Attributes, mask: int, hint: str = "") -> None:
        """Change a queue pair; VerbsError, with the hint."""
        code = self._library.ibv_modify_qp(ctypes.c_void_p(pair), ctypes.byref(attributes), mask)
        if code:
            what = f"the queue pair does not go to state {attributes.state}"
            raise VerbsError(f"{what}: {os.strerror(code)}{hint}")

    def close(self) -> None:
        """End everything."""
        while self.ends:
            self.ends.pop()()


def number_of(pair: int) -> int:
    """A queue pair's number."""
    return ctypes.c_uint32.from_address(pair + 52).value


def gid_of(ip: str) -> bytes:
    """The GID of RoCE version 2 that an IPv4 address has."""
    return bytes(10) + b"\xff\xff" + ipaddress.IPv4Address(ip).packed
