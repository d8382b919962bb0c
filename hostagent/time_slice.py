"""The time slice of an agent's threads, by which whoever wakes beside an agent runs at once.

Owns: the system calls. Must not know: what an agent does with its time. Where a client has been
answered on the agent's own processor, the agent's Python would go on with its books, and the client
wait for the end of a slice. Linux (from 6.12 on) interrupts a thread for one that wakes, has a
shorter slice than it, and has had less than its share. So an agent takes a slice that is a little
longer than that of those who ask for none. Its share of the processor stays the same.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Final

LONGER: Final = 1.1
"""How much longer the slice is."""
_NUMBERS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Of sched_setattr(2) and sched_getattr(2)."""
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""struct sched_attr, as it was first: size, policy, flags, nice, priority, and three times in ns,
of which the first, the runtime, is the slice; 0 where Linux does not tell of slices."""


def take_long_slices() -> bool:
    """Have this thread, and those that it starts, be interrupted for whoever wakes on its
    processor. False where that cannot be, or where it has a policy that is not shared fairly."""
    set_number, get_number = _NUMBERS.get(platform.machine(), (-1, -1))
    call = ctypes.CDLL(None).syscall
    room = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(get_number, 0, room, _ATTRIBUTES.size, 0) != 0:
        return False
    _, policy, flags, nice, priority, slice_ns, *rest = _ATTRIBUTES.unpack(room.raw)
    if policy != os.SCHED_OTHER or not slice_ns:
        return False
    longer = _ATTRIBUTES.pack(
        *(_ATTRIBUTES.size, policy, flags, nice, priority, round(slice_ns * LONGER), *rest)
    )
    return int(call(set_number, 0, longer, 0)) == 0
