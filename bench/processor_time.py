"""Processor time of other processes and of the whole machine, from the kernel.

Owns: how it is read. Must not know: whose it is.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

_CPUCLOCK_SCHED = 2
"""Of a process's clocks that of its processor time, as clock_getcpuclockid(3) numbers it."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_time_s(pid: int) -> float:
    """What all threads of the process have used so far, those that have ended included; 0 if it has
    gone."""
    with contextlib.suppress(OSError):
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    return 0.0


class MachineTime(NamedTuple):
    """Processor time of everything since the machine started."""

    busy_s: float
    softirq_s: float
    """Of it, the kernel's for what came from the network, mostly."""


def machine_time() -> MachineTime:
    """What the machine's processors have done so far, in ticks of 10 ms (proc(5))."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, file.readline().split()[1:8])
    return MachineTime((user + nice + system + irq + softirq) * _TICK_S, softirq * _TICK_S)
