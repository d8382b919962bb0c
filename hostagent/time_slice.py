"""The time slice of an agent's threads, by which whoever wakes beside an agent runs at once.

Owns: the system call. Must not know: what an agent does with its time. Where a client has been
answered on the agent's own processor, the agent's Python would go on with its books, and the client
wait for the end of a slice. Linux (from 6.12 on) interrupts a thread for one that wakes, has a
shorter slice than it, and has had less than its share. So an agent takes a slice longer than those
who ask for none. Its share of the processor stays the same.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Final

SLICE_NS: Final = 4_000_000
"""Linux gives at most 3 ms to those who ask for none."""
_NUMBERS: Final = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""struct sched_attr, as it was first: size, policy, flags, nice, priority, and three times in ns,
of which the first, the runtime, is the slice."""


def take_long_slices() -> bool:
    """Have this thread, and those that it starts, be interrupted for whoever wakes on its
    processor. False where that cannot be, or where it has a policy that is not shared fairly; a
    Linux before 6.12 says True, too, and does nothing."""
    number = _NUMBERS.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(
        *(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0), *(SLICE_NS, 0, 0)
    )
    return int(ctypes.CDLL(None).syscall(number, 0, attributes, 0)) == 0
