"""The compiled packet loop as Python sees it: set up, start, stop, swap programs, pass frames.

Owns: the memory and descriptors of `state.Loop`, the thread that runs `main_loop`, and
the tables of ports. Must not know: P4Runtime; what is done per frame.

The thread stays in compiled code from start to stop and never takes the interpreter lock. It and
Python meet in two rings of frames, an eventfd each way, and counters that one side only reads. A
program that is Python itself has no thread: whoever owns it calls `turn`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import mmap
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from kvcast.native.linux import (
    VNET_HEADER_BYTES,
    AuxMessage,
    EpollEvent,
    IoVec,
    MsgHdr,
    SegmentMessage,
    SockAddrIn,
    TimerSpec,
)
from kvcast.native.subset import Library, ctypes_of, size_of
from kvcast.switchsim.llvm.abi import Desc, NativeEntry, Outbox
from kvcast.switchsim.loop import state
from kvcast.switchsim.loop.egress import prepare_send
from kvcast.switchsim.loop.main_loop import (
    TIMER,
    WAKE,
    adopt_program,
    close_loop,
    offer_program,
    run_loop,
    run_virtual,
    turn,
)
from kvcast.switchsim.loop.rings import ring_peek, ring_pop, ring_push, take_notice
from kvcast.switchsim.ports.interface import InterfacePort
from kvcast.switchsim.ports.port import MAX_FRAME_BYTES, Port, PortOptions
from kvcast.switchsim.ports.udp_tunnel import UdpTunnelPort

_COUNTER_NAMES: Final = tuple(state.PortCounters.__annotations__)
_SLOT_BYTES: Final = 65_664
"""What one message may bring, with headroom; no multiple of the page, which would waste the
cache. Only what is used takes up memory."""
_DATAGRAM_BYTES: Final = 65_535
assert _SLOT_BYTES >= state.HEADROOM_BYTES + _DATAGRAM_BYTES > MAX_FRAME_BYTES

RING_BYTES = 4 << 20
"""Room of each ring between Python and the loop."""

# How long the thread may take to see that a program was offered, or that it shall stop.
_HANDSHAKE_S = 30.0


_EXPORTS = (
    *(run_loop, turn, run_virtual, close_loop, adopt_program, offer_program),
    *(take_notice, ring_push, ring_peek, ring_pop, prepare_send),
)


@cache
def library() -> Library:
    """The loop, compiled once a process."""
    return Library(*_EXPORTS)


@dataclass(frozen=True, slots=True)
class Emitted:
    """A frame that left at a port without a socket."""

    time_ns: int
    """Of the loop's clock: when its last bit had left."""
    port: int
    frame: bytes


class _Memory:
    """Structures and buffers that compiled code writes; alive until `close`."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def struct(self, kind: type[Any], count: int = 1) -> tuple[Any, int]:
        """Zeroed structures (a ctypes array) and their address."""
        array = (ctypes_of(kind) * count)()
        self._kept.append(array)
        return array, ctypes.addressof(array)

    def pages(self, size: int) -> int:
        """Zeroed memory that takes up room only where it is used."""
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = (ctypes.c_uint8 * size).from_buffer(pages)
        self._kept.append((view, pages))
        return ctypes.addressof(view)


class NativeLoop:
    """Ports served by compiled code. Not thread-safe: one Python thread calls it."""

    def __init__(
        self,
        ports: Sequence[Port],
        *,
        clock_base_ns: int | None = None,
        ring_bytes: int = RING_BYTES,
        punt_frames: int = 1 << 20,
        inject_frames: int = 1 << 20,
        batch_frames: int = state.RECEIVE_BATCH,
    ) -> None:
        """`ports` are open; the loop uses their sockets and options and keeps their counts.
        `clock_base_ns` is time.monotonic_ns() at which the clock was 0 (now). Of each port, a turn
        takes about `batch_frames`."""
        if len({port.number for port in ports}) != len(ports):
            raise ValueError("two ports have the same number")
        self.ports = list(ports)
        compiled = library()
        self._call = {function.__name__: compiled.call(function) for function in _EXPORTS}
        self._memory = _Memory()
        (self._state,), self._address = self._one(state.Loop)
        loop = self._state
        loop.clock_base_ns = time.monotonic_ns() if clock_base_ns is None else clock_base_ns
        loop.timer_ns = loop.handover_ns = state.NEVER
        loop.batch = batch_frames
        loop.scratch = self._memory.pages(64)
        _, loop.timer = self._one(TimerSpec)
        (outbox,), loop.outbox = self._one(Outbox)
        outbox.data, outbox.capacity = self._memory.pages(state.OUTBOX_BYTES), state.OUTBOX_BYTES
        outbox.max_descs = state.OUTBOX_FRAMES
        outbox.descs = self._memory.struct(Desc, state.OUTBOX_FRAMES)[1]
        loop.inject, self._inject = self._ring(ring_bytes, inject_frames)
        loop.punt, self._punt = self._ring(ring_bytes, punt_frames)
        self._entry: NativeEntry | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._set_up_ports()
        self._set_up_descriptors()

    def _one(self, kind: type[Any]) -> tuple[Any, int]:
        return self._memory.struct(kind)

    def _ring(self, size: int, frames: int) -> tuple[int, Any]:
        (ring,), address = self._one(state.Ring)
        ring.data, ring.capacity, ring.max_frames = self._memory.pages(size), size, frames
        assert size & (size - 1) == 0
        return address, ring

    def _set_up_descriptors(self) -> None:
        loop = self._state
        self._epoll = select.epoll()
        loop.epoll_fd = self._epoll.fileno()
        loop.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.notify_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.timer_fd = _timer_descriptor()
        loop.max_events = len(self.ports) + 2
        loop.events = self._memory.struct(EpollEvent, loop.max_events)[1]
        marks = [(loop.wake_fd, WAKE), (loop.timer_fd, TIMER)]
        marks += [
            (port.receive_fd, index)
            for index, port in enumerate(self._port_states)
            if port.kind != state.KIND_RING
        ]
        add = ctypes.CDLL(None, use_errno=True).epoll_ctl
        for descriptor, mark in marks:
            # Python's epoll.register reports the descriptor; the loop wants the port's index.
            event = ctypes_of(EpollEvent)(events=select.EPOLLIN, data=mark)
            if add(loop.epoll_fd, 1, descriptor, ctypes.byref(event)) != 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))

    # --- ports

    def _set_up_ports(self) -> None:
        loop = self._state
        self._port_states, loop.ports = self._memory.struct(state.Port, max(1, len(self.ports)))
        self._port_states = list(self._port_states)[: len(self.ports)]
        loop.port_count = len(self.ports)
        # Frames are processed before the next batch comes, so all ports share the buffers.
        self._buffers = self._memory.pages(state.RECEIVE_BATCH * _SLOT_BYTES)
        for index, (port, native) in enumerate(zip(self.ports, self._port_states, strict=True)):
            loop.by_number[port.number] = index + 1
            native.number = port.number
            self._set_up_options(native, port.number, port.options)
            if isinstance(port, UdpTunnelPort):
                self._set_up_tunnel(native, port)
            elif isinstance(port, InterfacePort):
                self._set_up_interface(native, port)
            else:
                native.kind = state.KIND_RING
            self._set_up_messages(native)

    def _set_up_options(self, native: Any, number: int, options: PortOptions) -> None:
        native.depth = options.queue_depth
        native.loss_threshold = int(options.loss * (1 << 53))
        native.rx_random = _seed(f"{options.seed}/{number}/rx")
        native.tx_random = _seed(f"{options.seed}/{number}/tx")
        if options.rate_bits_per_s is not None:
            native.ps_per_byte = max(1, round(8e12 / options.rate_bits_per_s))
        if options.uplink_bits_per_s is not None:
            native.uplink_ps_per_byte = max(1, round(8e12 / options.uplink_bits_per_s))
        if native.ps_per_byte or native.uplink_ps_per_byte:
            native.quantum_ns = int(options.quantum_s * 1e9)

    def _set_up_tunnel(self, native: Any, port: UdpTunnelPort) -> None:
        native.kind = state.KIND_UDP if port.fixed_peer else state.KIND_UDP_LEARNING
        native.receive_fd = native.send_fd = port.fileno()
        # A message of many frames is more than a turn of one.
        native.segments = int(self._state.batch > 1 and port.segment_frames())
        native.local_address = _network_address(port.local[0])
        if port.peer is not None:
            peer = native.peer[0]
            peer.family, peer.port = socket.AF_INET, socket.htons(port.peer[1])
            peer.address = _network_address(port.peer[0])

    def _set_up_interface(self, native: Any, port: InterfacePort) -> None:
        native.kind = state.KIND_PACKET
        native.receive_fd = port.fileno()
        native.send_fd = port.open_sender()
        ring = port.map_ring()
        if ring is not None:
            native.packet_ring = ring.address
            native.packet_ring_frames, native.packet_ring_stride = ring.frames, ring.stride

    def _set_up_messages(self, native: Any) -> None:
        memory, count = self._memory, state.RECEIVE_BATCH
        native.send_messages = memory.struct(MsgHdr, state.SEND_BATCH)[1]
        native.send_vectors = memory.struct(IoVec, state.SEND_BATCH)[1]
        native.send_controls = memory.struct(SegmentMessage, state.SEND_BATCH)[1]
        self._call["prepare_send"](ctypes.addressof(native))
        if native.kind == state.KIND_RING:
            return
        messages, native.receive_messages = memory.struct(MsgHdr, count)
        vectors, vectors_at = memory.struct(IoVec, 2 * count)
        headers = memory.pages(16 * count)
        native.receive_at_once = self._state.batch if native.kind == state.KIND_PACKET else 1
        auxiliary = memory.struct(AuxMessage, count)[1]
        segments = memory.struct(SegmentMessage, count)[1]
        names = memory.struct(SockAddrIn, count)[1]
        for slot in range(count):
            message, (header, frame) = messages[slot], vectors[2 * slot : 2 * slot + 2]
            header.base, header.length = headers + 16 * slot, VNET_HEADER_BYTES
            frame.base = self._buffers + slot * _SLOT_BYTES + state.HEADROOM_BYTES
            frame.length = MAX_FRAME_BYTES + 1
            message.iov, message.iov_length = vectors_at + 2 * slot * size_of(IoVec), 2
            if native.kind == state.KIND_PACKET:
                message.control = auxiliary + slot * size_of(AuxMessage)
                message.control_length = size_of(AuxMessage)
                continue
            message.iov, message.iov_length = message.iov + size_of(IoVec), 1
            frame.length = _DATAGRAM_BYTES
            message.control = segments + slot * size_of(SegmentMessage)
            message.control_length = size_of(SegmentMessage)
            if native.kind == state.KIND_UDP_LEARNING:
                message.name = names + slot * size_of(SockAddrIn)
                message.name_length = size_of(SockAddrIn)

    def read_counters(self, number: int) -> dict[str, int]:
        """A port's counters by name, the kernel's included."""
        index = self._state.by_number[number] - 1
        native, port = self._port_states[index], self.ports[index]
        counts = {name: int(getattr(native, name)) for name in _COUNTER_NAMES}
        counts["rx_kernel_drops"] += port.kernel_drops()
        return counts

    def egress_backlog(self, number: int) -> int:
        """Frames that wait for a port's rate."""
        return int(self._port_states[self._state.by_number[number] - 1].waiting)

    def peer(self, number: int) -> tuple[str, int] | None:
        """The tunnel peer of a port, as far as it is known."""
        native = self._port_states[self._state.by_number[number] - 1]
        address, port = int(native.peer[0].address), socket.ntohs(int(native.peer[0].port))
        return (socket.inet_ntoa(struct.pack("=I", address)), port) if address else None

    # --- programs

    def use(self, entry: NativeEntry | None) -> None:
        """Run this program from the next turn on; when this returns, the one before is not in
        use any more."""
        now = entry or _NO_PROGRAM
        wanted = self._state.swap_wanted + 1
        self._call["offer_program"](
            self._address,
            now.process,
            now.context,
            now.epoch_address,
            now.digest_pending_address,
        )
        if self._thread is None:
            self._call["adopt_program"](self._address)
        else:
            self.wake()
            self._await(lambda: self._state.swap_done == wanted)
        self._entry = entry  # keeps the code and its memory alive

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _HANDSHAKE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError("the packet loop does not answer")
            time.sleep(0.0001)

    # --- frames to and from Python

    def inject(self, number: int, frame: bytes, time_ns: int = 0) -> bool:
        """A frame comes in at a port, whatever its kind; False where the ring is full. In virtual
        time, `time_ns` says when; frames are given in that order."""
        return bool(
            self._call["ring_push"](
                self._state.inject,
                number,
                time_ns,
                ctypes.cast(ctypes.c_char_p(frame), ctypes.c_void_p).value or 0,
                len(frame),
            )
        )

    def wake(self) -> None:
        """Make a sleeping loop look for what was set or injected."""
        os.eventfd_write(self._state.wake_fd, 1)

    def take(self, most: int = 1 << 30) -> list[Emitted]:
        """What left at ports without a socket since the last call, in order."""
        peek, pop = self._call["ring_peek"], self._call["ring_pop"]
        taken: list[Emitted] = []
        while len(taken) < most and (address := peek(self._state.punt)):
            record = ctypes_of(state.Record).from_address(address)
            frame = ctypes.string_at(address + size_of(state.Record), record.length)
            taken.append(Emitted(record.time_ns, record.port, frame))
            pop(self._state.punt)
        return taken

    @property
    def injected(self) -> int:
        """Frames from Python that wait for the loop."""
        return int(self._inject.pushed - self._inject.popped)

    # --- virtual time

    @property
    def now_ns(self) -> int:
        """The virtual clock."""
        return int(self._state.now_ns)

    def run_until(self, until_ns: int, *, first_output: bool = False) -> list[Emitted]:
        """Process what arrives and leaves up to that time of the virtual clock, and give what
        left. With `first_output`, stop at the first moment at which something leaves at a port
        without a socket, so that whoever hears it can answer; `now_ns` says when that was. The
        thread must not run."""
        assert self._thread is None
        for native in self._port_states:
            native.quantum_ns = 0  # virtual time has no wake-ups to save
        emitted: list[Emitted] = []
        done = False
        while not done:
            done = self._call["run_virtual"](self._address, until_ns, int(first_output))
            emitted += self.take()
        return emitted

    # --- real time

    @property
    def notify_descriptor(self) -> int:
        """Becomes readable when there is something to `take`, or digests."""
        return int(self._state.notify_fd)

    def heed(self) -> None:
        """The notice was seen; call it before looking."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._state.notify_fd)
        self._call["take_notice"](self._address)

    @property
    def epoll_descriptor(self) -> int:
        """Becomes readable when `turn` has something to do."""
        return int(self._state.epoll_fd)

    def turn(self) -> None:
        """Serve the ports for a moment, without waiting; the thread must not run."""
        assert self._thread is None
        if self._call["turn"](self._address, 0) == 0:
            self.wake()

    def start(self) -> None:
        """Serve the ports in a thread of its own."""
        assert self._thread is None
        assert not self._closed
        self._state.stop = 0
        self._thread = threading.Thread(target=self._run, name="packets", daemon=True)
        self._thread.start()
        # A process that ends without `stop` must not free the memory of a running loop.
        atexit.register(self.stop)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._call["run_loop"](self._address)

    def stop(self) -> None:
        """End the thread; frames that wait for their rate stay."""
        thread = self._thread
        if thread is None:
            return
        self._state.stop = 1
        self.wake()
        thread.join(_HANDSHAKE_S)
        if thread.is_alive():
            raise RuntimeError("the packet loop does not stop")
        self._thread = None
        atexit.unregister(self.stop)

    def close(self) -> None:
        """Stop, free everything. The ports are the caller's to close."""
        if self._closed:
            return
        self.stop()
        self._closed = True
        self._call["close_loop"](self._address)
        self._epoll.close()
        for descriptor in (self._state.wake_fd, self._state.timer_fd, self._state.notify_fd):
            os.close(descriptor)

    @property
    def counters(self) -> dict[str, int]:
        """What the loop did since it was made."""
        names = ("processed", "emitted", "no_such_port", "no_program", "process_errors", "slices")
        counts = {name: int(getattr(self._state, name)) for name in names}
        return {**counts, "busy_us": int(self._state.busy_ns) // 1000}


_NO_PROGRAM = NativeEntry(0, 0, 0, 0, None)


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _network_address(dotted: str) -> int:
    """An IPv4 address as the four bytes lie in memory."""
    return int(struct.unpack("=I", socket.inet_aton(dotted))[0])


def _timer_descriptor() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    nonblocking, close_on_exec = 0o4000, 0o2000000  # bits/timerfd.h
    descriptor = int(libc.timerfd_create(time.CLOCK_MONOTONIC, nonblocking | close_on_exec))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    return descriptor
