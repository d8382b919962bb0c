"""An interpreted engine as the packet loop calls programs: by an address (llvm.abi).

Owns: the way of a frame from compiled code to Python and back. Must not know: which engine it is;
how frames are moved.

An exception from the engine is a bug, not a reason to stop forwarding: the frame is counted
(`process_errors`) and dropped.
"""

from __future__ import annotations

import ctypes
import logging

from kvcast.native.subset import ctypes_of, size_of
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.llvm.abi import PROCESS, Desc, NativeEntry, Outbox

log = logging.getLogger("kvcast.switchsim.loop.interpreted")

# A program that fails on every frame must not fill the disk with tracebacks.
LOGGED_ERRORS = 10


def interpreted_entry(engine: Engine) -> NativeEntry:
    """What a loop without a thread may call for this engine's present program."""
    digests = ctypes.c_uint64()
    failures = 0

    def process(_context: int, frame: int, length: int, port: int, now_us: int, outbox: int) -> int:
        nonlocal failures
        try:
            sent = engine.process(port, ctypes.string_at(frame, length), now_us)
        except Exception:
            failures += 1
            if failures <= LOGGED_ERRORS:
                log.exception("program failed", extra={"port": port, "bytes": length})
            return -1
        digests.value = engine.stats.digests
        out = ctypes_of(Outbox).from_address(outbox)
        for number, data in sent:
            _append(out, number, data)
        return len(sent)

    callback = PROCESS(process)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    return NativeEntry(address, 0, 0, ctypes.addressof(digests), home=(callback, digests))


def _append(out: ctypes.Structure, port: int, frame: bytes) -> None:
    if out.count >= out.max_descs or out.used + len(frame) > out.capacity:
        out.overflows += 1
        return
    ctypes.memmove(out.data + out.used, frame, len(frame))
    desc = ctypes_of(Desc).from_address(out.descs + out.count * size_of(Desc))
    desc.offset, desc.length, desc.port, desc.priority = out.used, len(frame), port, 0
    out.used += (len(frame) + 7) & ~7
    out.count += 1
