"""A program for the packet loop that needs no P4: it forwards by the last byte of the destination.

It keeps the contract of `switchsim.llvm.abi` as the engine does, and its behaviour can be stated in
one sentence, which makes it the double of the tests: a frame leaves at the port whose number is the
last byte of its destination, with the low three bits of the byte behind the Ethernet header as
priority; a broadcast (last byte 255) leaves at ports 1 to `flood_ports`. One digest is counted for
each frame whose source address ends in 0xDD.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from kvcast.native.subset import (
    I32,
    U32,
    U64,
    Library,
    Struct,
    bytes_at,
    copy,
    ctypes_of,
    native,
)
from kvcast.switchsim.llvm.abi import NativeEntry, Outbox


class Context(Struct):
    epoch: U64
    digests: U64
    frames: U64
    flood_ports: U64
    last_now_us: U64


@native
def append(out: Outbox, frame: U64, length: U64, port: U64, priority: U64) -> None:
    if out.count >= out.max_descs or out.used + length > out.capacity:
        out.overflows += 1
        return
    copy(out.data + out.used, frame, length)
    desc = out.descs[out.count]
    desc.offset = out.used
    desc.length = length
    desc.port = port
    desc.priority = priority
    out.used += (length + 7) & ~7
    out.count += 1


@native
def forward(context: Context, frame: U64, length: U32, port: U32, now_us: U64, out: Outbox) -> I32:
    before = 0 + out.count
    data = bytes_at(frame)
    context.frames += 1
    context.last_now_us = now_us
    priority = 0
    if length > 14:
        priority = data[14] & 7
    if data[11] == 0xDD:
        context.digests += 1
    if data[5] == 0xFF:
        for i in range(context.flood_ports):
            append(out, frame, length, i + 1, priority)
    else:
        append(out, frame, length, data[5], priority)
    return out.count - before


@cache
def _library() -> Library:
    return Library(forward)


class Double:
    """One double, with the `entry` that a loop wants."""

    def __init__(self, flood_ports: int = 0) -> None:
        self.context: Any = ctypes_of(Context)()
        self.context.flood_ports = flood_ports
        at = ctypes.addressof(self.context)
        fields = ctypes_of(Context)
        self.entry = NativeEntry(
            process=_library().address(forward),
            context=at,
            epoch_address=at + fields.epoch.offset,
            digest_pending_address=at + fields.digests.offset,
            home=self,
        )


def frame_to(port: int, size: int = 64, *, priority: int = 0, label: int = 0) -> bytes:
    """A frame that the double sends to `port`, `size` bytes long, recognisable by its label."""
    head = bytes([2, 0, 0, 0, 0, port, 2, 0, 0, 0, 0, 1, 0x88, 0xB5, priority])
    return (head + label.to_bytes(8, "big") + bytes(size))[:size]
