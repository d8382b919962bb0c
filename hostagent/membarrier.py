"""The asymmetric barrier of membarrier(2), by which an agent need not trust its clients' fences.

Owns: the system call. Must not know: what is ordered by it. Who has registered is given a full
memory barrier on each of its running threads when somebody else calls `barrier`; so the registered
side, which is quick, pays nothing.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_NUMBERS: Final = {"x86_64": 324, "aarch64": 283}
_QUERY: Final = 0
_GLOBAL_EXPEDITED: Final = 2
_REGISTER_GLOBAL_EXPEDITED: Final = 4


def available() -> bool:
    """Whether this machine has what an index that is shared needs: the barrier, and loads that
    other processors see in the order of the program (x86-64; elsewhere readers would need
    fences)."""
    if platform.machine() != "x86_64":
        return False
    wanted = _GLOBAL_EXPEDITED | _REGISTER_GLOBAL_EXPEDITED
    commands = _call(_QUERY)
    return commands >= 0 and commands & wanted == wanted


def register() -> bool:
    """Let others' barriers reach this process; whether they do."""
    return available() and _call(_REGISTER_GLOBAL_EXPEDITED) == 0


def barrier() -> None:
    """A full barrier on every running thread of every registered process, and here. OSError where
    the kernel cannot."""
    if _call(_GLOBAL_EXPEDITED) != 0:
        raise OSError(ctypes.get_errno(), f"membarrier: {os.strerror(ctypes.get_errno())}")


def _call(command: int) -> int:
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return -1
    return int(_LIBC.syscall(number, command, 0, 0))


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
