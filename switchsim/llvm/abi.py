"""The native way into a compiled program: what a packet loop in machine code calls.

Owns the C structures of the boundary and their rules. Must not know how a program is compiled.

    int32_t process(void *context, const uint8_t *frame, uint32_t length, uint32_t port,
                    uint64_t now_us, struct Outbox *out);

`process` runs one frame to completion and appends what leaves to `out`: the frames lie one after
another in `data`, each at an offset that is a multiple of 8, and `descs` says where. A frame that
does not fit is dropped and counted in `overflows`. It returns how many frames were appended, or -1
where it failed. It allocates nothing, never calls Python (but for the interpreter's, which
`loop.interpreted` makes), and reads no byte behind `frame + length`.

Rules for the caller:

- One thread at a time runs `process` of a context.
- Between two batches add 1 to the uint64 at `epoch_address`, and store EPOCH_IDLE there while
  asleep or stopped; after a sleep store a value that was not used before. Both must be sequentially
  consistent (an atomic exchange or add), because the control plane frees memory by it: what a batch
  may still read is freed only after the epoch has moved on, or at once while it is EPOCH_IDLE.
- Keep the `NativeEntry` for as long as its addresses are used: it owns the code and the memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from kvcast.native.subset import U32, U64, Ptr, Struct

EPOCH_IDLE = (1 << 64) - 1
"""In the epoch word: nobody runs `process`, so memory may be freed at once."""

MAX_FRAME_BYTES = 16384
"""Longest frame that `process` takes; a longer one is dropped (`dropped_abandoned` counts it)."""


class Desc(Struct):
    """One frame in an outbox; 24 bytes."""

    offset: U64
    length: U32
    port: U32
    priority: U32
    reserved: U32


class Outbox(Struct):
    """Where `process` appends frames; 48 bytes. `used` counts bytes, `count` descriptors."""

    data: U64
    capacity: U64
    used: U64
    descs: Ptr[Desc]
    max_descs: U32
    count: U32
    overflows: U64


PROCESS = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_void_p,
)
"""The type of `process`; a call through it releases the interpreter lock."""


@dataclass(frozen=True, slots=True)
class NativeEntry:
    """Addresses of one loaded program; good until another program is loaded, and while held."""

    process: int
    context: int
    epoch_address: int
    """uint64: see the rules above."""
    digest_pending_address: int
    """uint64: digests produced since the program was loaded, for a loop to see that one came."""
    home: object = field(repr=False)
    """Keeps the code and the memory alive."""
