"""Compiled senders and the bare forwarder: what a switch is measured with, and against.

Owns: the fastest plain way to send and to forward by recvmmsg and sendmmsg, in batches as large as
the switch's own. Must not know: what is being measured. Python is not involved per frame.

`python -m kvcast.bench.traffic IN OUT` is the bare forwarder: everything that arrives at one
interface leaves at the other, until SIGTERM.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Final, Self

from kvcast.native.linux import (
    CLOCK_MONOTONIC,
    MSG_TRUNC,
    MSG_WAITFORONE,
    IoVec,
    MsgHdr,
    TimeSpec,
    clock_gettime,
    recvmmsg,
    sendmmsg,
)
from kvcast.native.subset import (
    I32,
    U32,
    U64,
    Library,
    Ptr,
    Struct,
    address_of,
    atomic_load,
    ctypes_of,
    native,
    size_of,
    unsigned,
)

BATCH: Final = 64
_SLOT_BYTES: Final = 10_432
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104  # linux/udp.h


class Traffic(Struct):
    """One sender or forwarder, and its counts."""

    stop: U64
    sent: U64
    received: U64
    refused: U64
    """Frames that the kernel did not take."""
    messages: Ptr[MsgHdr]
    vectors: Ptr[IoVec]
    count: U64
    """Messages."""
    time: TimeSpec


@native
def clock_ns(traffic: Traffic) -> U64:
    clock_gettime(CLOCK_MONOTONIC, traffic.time)
    return traffic.time.seconds * 1_000_000_000 + traffic.time.nanoseconds


@native
def forward_bare(traffic: Traffic, source: I32, sink: I32) -> None:
    """Forward until `stop`; the receiving socket has a timeout."""
    while atomic_load(traffic.stop) == 0:
        arrived = recvmmsg(source, traffic.messages, BATCH, MSG_WAITFORONE, 0)
        if arrived <= 0:
            continue
        count = unsigned(arrived)
        traffic.received += count
        for i in range(count):
            traffic.vectors[i].length = traffic.messages[i].length
        send_all(traffic, sink, 0, count)
        for i in range(count):
            traffic.vectors[i].length = _SLOT_BYTES


@native
def count_bytes(traffic: Traffic, source: I32) -> None:
    """Count what arrives until `stop`, without looking at it; the socket has a timeout."""
    while atomic_load(traffic.stop) == 0:
        arrived = recvmmsg(source, traffic.messages, BATCH, MSG_WAITFORONE | MSG_TRUNC, 0)
        if arrived > 0:
            for i in range(unsigned(arrived)):
                traffic.received += traffic.messages[i].length


@native
def send_all(traffic: Traffic, sink: I32, first: U64, count: U64) -> None:
    at = 0 + first
    end = first + count
    while at < end:
        messages = MsgHdr.array(address_of(traffic.messages) + at * size_of(MsgHdr))
        sent = sendmmsg(sink, messages, end - at, 0)
        if sent <= 0:
            traffic.refused += 1
            at += 1
        else:
            traffic.sent += unsigned(sent)
            at += unsigned(sent)


@native
def send_paced(traffic: Traffic, sink: I32, batch: U32, gap_ns: U64, until_ns: U64) -> None:
    """Send all messages in turn, `batch` at a time, a batch every `gap_ns`, until `until_ns`."""
    now_ns = clock_ns(traffic)
    next_ns = now_ns
    at = 0
    while now_ns < until_ns and atomic_load(traffic.stop) == 0:
        if now_ns >= next_ns:
            count = traffic.count - at
            if count > batch:
                count = 0 + batch
            send_all(traffic, sink, at, count)
            at += count
            if at == traffic.count:
                at = 0
            next_ns += gap_ns
        now_ns = clock_ns(traffic)


_library: Library | None = None


def library() -> Library:
    global _library
    if _library is None:
        _library = Library(forward_bare, send_paced, count_bytes)
    return _library


class Native:
    """The memory of one Traffic, for `count` messages over the buffers given."""

    def __init__(self, count: int, frames: Sequence[bytes] | None) -> None:
        self.state: Any = ctypes_of(Traffic)()
        self._messages = (ctypes_of(MsgHdr) * count)()
        self._vectors = (ctypes_of(IoVec) * count)()
        self._time = ctypes_of(TimeSpec)()
        self._buffers = (
            [ctypes.create_string_buffer(_SLOT_BYTES) for _ in range(count)]
            if frames is None
            else [ctypes.create_string_buffer(f, len(f)) for f in frames]
        )
        for message, vector, buffer in zip(
            self._messages, self._vectors, self._buffers, strict=True
        ):
            vector.base, vector.length = ctypes.addressof(buffer), len(buffer)
            message.iov, message.iov_length = ctypes.addressof(vector), 1
        self.state.count = count
        self.state.messages = ctypes.addressof(self._messages)
        self.state.vectors = ctypes.addressof(self._vectors)
        self.state.time = ctypes.addressof(self._time)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.state)


def interface_socket(interface: str, *, receive: bool) -> socket.socket:
    """A raw socket of an interface; one that sends goes past the queueing discipline."""
    sol_packet, qdisc_bypass, ignore_outgoing = 263, 20, 23  # linux/if_packet.h
    endpoint = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    if receive:
        endpoint.setsockopt(sol_packet, ignore_outgoing, 1)
        endpoint.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE
        _set_timeout(endpoint)
        endpoint.bind((interface, 3))  # ETH_P_ALL
    else:
        endpoint.setsockopt(sol_packet, qdisc_bypass, 1)
        endpoint.bind((interface, 0))
    return endpoint


def _set_timeout(endpoint: socket.socket) -> None:
    """Let a blocking receive end after 0.2 s, so that its thread sees `stop`."""
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("=qq", 0, 200_000))


def forward(source: str, sink: str) -> dict[str, int]:
    """Forward from one interface to another until SIGTERM."""
    native_state = Native(BATCH, None)
    with interface_socket(source, receive=True) as a, interface_socket(sink, receive=False) as b:
        call = library().call(forward_bare)
        thread = threading.Thread(
            target=call, args=(native_state.address, a.fileno(), b.fileno()), daemon=True
        )
        thread.start()
        print(json.dumps({"event": "ready"}), flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        native_state.state.stop = 1
        thread.join()
    return {"received": native_state.state.received, "sent": native_state.state.sent}


class _Worker:
    """A thread of compiled code that runs while the `with` does."""

    def __init__(self, traffic: Native, processors: set[int]) -> None:
        """`processors` are where the thread may run."""
        self._traffic = traffic
        self._processors = processors
        self._thread = threading.Thread(target=self._run_there, daemon=True)

    def _run_there(self) -> None:
        os.sched_setaffinity(0, self._processors)  # of this thread
        self._run()

    def _run(self) -> None:
        """Run the compiled code, which ends when `stop` of its traffic is set."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._traffic.state.stop = 1
        self._thread.join()


class Sender(_Worker):
    """Sends frames in turn to an interface, or by a tunnel's socket, in a thread of its own."""

    def __init__(
        self,
        sink: socket.socket,
        frames: Sequence[bytes],
        pps: float,
        processors: set[int],
        joined: int = 1,
    ) -> None:
        """`pps` 0 is as fast as it goes; `joined` frames, of one length, go to a tunnel in one
        message."""
        messages = [b"".join(frames[i : i + joined]) for i in range(0, len(frames), joined)]
        if joined > 1:
            sink.setsockopt(SOL_UDP, UDP_SEGMENT, len(frames[0]))
        super().__init__(Native(len(messages), messages), processors)
        self._sink = sink
        # A slow sender sends small batches, so that it is no burst generator.
        self._batch = BATCH if pps == 0 else max(1, min(BATCH, int(pps / 5000)))
        self._gap_ns = 0 if pps == 0 else int(self._batch * 1e9 / pps)

    def _run(self) -> None:
        call = library().call(send_paced)
        call(self._traffic.address, self._sink.fileno(), self._batch, self._gap_ns, 1 << 63)

    @property
    def sent(self) -> int:
        """Messages that the kernel took."""
        return int(self._traffic.state.sent)


class Counter(_Worker):
    """Counts the bytes that come to a tunnel's far end, in a thread of its own."""

    def __init__(self, source: socket.socket, processors: set[int]) -> None:
        super().__init__(Native(BATCH, None), processors)
        self._source = source
        source.setsockopt(SOL_UDP, UDP_GRO, 1)
        source.settimeout(None)
        _set_timeout(source)

    def _run(self) -> None:
        library().call(count_bytes)(self._traffic.address, self._source.fileno())

    @property
    def received(self) -> int:
        """Bytes so far."""
        return int(self._traffic.state.received)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcast.bench.traffic", description=__doc__)
    parser.add_argument("source")
    parser.add_argument("sink")
    arguments = parser.parse_args(argv)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    print(json.dumps(forward(arguments.source, arguments.sink)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
