"""Rings of frames between the packet loop and Python: one thread pushes, the other pops.

Owns: the order of reads and writes that makes that safe without a lock. Must not know: what the
frames are for. A ring is bounded in bytes and in frames; `push` says whether there was room.
"""

from __future__ import annotations

from kvcast.native.subset import (
    U32,
    U64,
    atomic_load,
    atomic_store,
    copy,
    full_fence,
    native,
    size_of,
)
from kvcast.switchsim.loop.state import Loop, Record, Ring

_SKIP = 0xFFFF_FFFF
"""The length that says: nothing more before the end of the memory."""


@native
def ring_push(ring: Ring, port: U32, time_ns: U64, frame: U64, length: U32) -> bool:
    """Append a frame; False where there is no room."""
    head = atomic_load(ring.head)
    tail = ring.tail
    if ring.pushed - atomic_load(ring.popped) >= ring.max_frames:
        return False
    size = size_of(Record) + ((length + 7) & ~7)
    at = tail & (ring.capacity - 1)
    rest = ring.capacity - at
    if rest < size:
        if tail + rest + size - head > ring.capacity:
            return False
        Record.at(ring.data + at).length = _SKIP
        tail += rest
        at = 0
    elif tail + size - head > ring.capacity:
        return False
    record = Record.at(ring.data + at)
    record.length = length
    record.port = port
    record.time_ns = time_ns
    copy(ring.data + at + size_of(Record), frame, length)
    ring.pushed += 1
    atomic_store(ring.tail, tail + size)
    return True


@native
def ring_peek(ring: Ring) -> U64:
    """The address of the oldest frame's Record; 0 where there is none."""
    head = ring.head
    if head == atomic_load(ring.tail):
        return 0
    at = head & (ring.capacity - 1)
    if Record.at(ring.data + at).length == _SKIP:
        head += ring.capacity - at
        atomic_store(ring.head, head)
        at = 0
    return ring.data + at


@native
def ring_pop(ring: Ring) -> None:
    """Take off what `ring_peek` found."""
    at = ring.head & (ring.capacity - 1)
    size = size_of(Record) + ((Record.at(ring.data + at).length + 7) & ~7)
    atomic_store(ring.popped, ring.popped + 1)
    atomic_store(ring.head, ring.head + size)


@native
def take_notice(loop: Loop) -> None:
    """Python is about to look; what comes from now on is to be announced again."""
    atomic_store(loop.notified, 0)
    full_fence()
