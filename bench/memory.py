"""Frames a second in memory, on one core: the compiled program and nothing else.

Owns: the compiled loop that gives frames to a program and counts what it puts out. Must not know:
which program, what the frames mean. What leaves is complete in the outbox, as it would be sent;
the clock does not move, so what a program remembers does not expire.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcast.native.subset import (
    U32,
    U64,
    Library,
    Ptr,
    Struct,
    atomic_store,
    ctypes_of,
    full_fence,
    native,
    u64_at,
)
from kvcast.switchsim.llvm.abi import Desc, NativeEntry, Outbox
from kvcast.switchsim.loop.ingress import call_program
from kvcast.switchsim.loop.state import (
    FLUSH_BYTES,
    FLUSH_FRAMES,
    NEVER,
    OUTBOX_BYTES,
    OUTBOX_FRAMES,
)


class Input(Struct):
    """A frame to give, and the port it comes from."""

    address: U64
    length: U32
    port: U32


class Drive(Struct):
    """One run."""

    process: U64
    context: U64
    epoch_address: U64
    inputs: Ptr[Input]
    count: U64
    outbox: Outbox
    now_us: U64
    frames_out: U64
    bytes_out: U64


@native
def drive(run: Drive, rounds: U64) -> None:
    """Give all inputs in turn, `rounds` times."""
    outbox = run.outbox
    for round_number in range(rounds):
        atomic_store(u64_at(run.epoch_address)[0], round_number + 1)
        full_fence()
        for i in range(run.count):
            frame = run.inputs[i]
            call_program(
                run.process,
                run.context,
                frame.address,
                frame.length,
                frame.port,
                run.now_us,
                outbox,
            )
            if outbox.used > FLUSH_BYTES or outbox.count > FLUSH_FRAMES:
                run.frames_out += outbox.count
                run.bytes_out += outbox.used
                outbox.used = 0
                outbox.count = 0
    run.frames_out += outbox.count
    run.bytes_out += outbox.used
    outbox.used = 0
    outbox.count = 0
    atomic_store(u64_at(run.epoch_address)[0], NEVER)


_library: Library | None = None


@dataclass(frozen=True)
class Rate:
    """What one run in memory gave."""

    frames_in_per_s: float
    frames_out_per_s: float


class Driver:
    """Inputs and an outbox for one program."""

    def __init__(
        self, entry: NativeEntry, inputs: Sequence[tuple[int, bytes]], now_us: int
    ) -> None:
        global _library
        if _library is None:
            _library = Library(drive)
        self._call = _library.call(drive)
        self._entry = entry
        self._buffers = [ctypes.create_string_buffer(frame, len(frame)) for _, frame in inputs]
        self._inputs = (ctypes_of(Input) * len(inputs))()
        for one, buffer, (port, frame) in zip(self._inputs, self._buffers, inputs, strict=True):
            one.address, one.length, one.port = ctypes.addressof(buffer), len(frame), port
        self._data = ctypes.create_string_buffer(OUTBOX_BYTES)
        self._descs = (ctypes_of(Desc) * OUTBOX_FRAMES)()
        self._outbox: Any = ctypes_of(Outbox)()
        self._outbox.data, self._outbox.capacity = ctypes.addressof(self._data), OUTBOX_BYTES
        self._outbox.descs = ctypes.addressof(self._descs)
        self._outbox.max_descs = OUTBOX_FRAMES
        self.run: Any = ctypes_of(Drive)()
        self.run.process, self.run.context = entry.process, entry.context
        self.run.epoch_address = entry.epoch_address
        self.run.inputs, self.run.count = ctypes.addressof(self._inputs), len(inputs)
        self.run.outbox = ctypes.addressof(self._outbox)
        self.run.now_us = now_us

    def once(self) -> int:
        """All inputs once; how many frames came out."""
        before = self.run.frames_out
        self._call(ctypes.addressof(self.run), 1)
        return int(self.run.frames_out - before)

    def rate(self, seconds: float) -> Rate:
        """Repeat all inputs for about that long (of this thread's processor time)."""
        rounds = 1
        while True:
            before, start_s = self.run.frames_out, time.thread_time()
            self._call(ctypes.addressof(self.run), rounds)
            took_s = time.thread_time() - start_s
            if took_s >= seconds / 2:
                break
            rounds = max(rounds + 1, int(rounds * min(20.0, seconds / max(took_s, 1e-6))))
        frames_in = rounds * self.run.count
        return Rate(frames_in / took_s, (self.run.frames_out - before) / took_s)
