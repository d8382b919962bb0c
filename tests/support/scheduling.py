"""What the kernel says of how a thread is scheduled, as sched_getattr(2) has it."""

from __future__ import annotations

import ctypes
import platform
import struct
from typing import NamedTuple

import pytest

_NUMBERS = {"x86_64": 315, "aarch64": 275}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


class Scheduling(NamedTuple):
    policy: int
    nice: int
    slice_ns: int


def scheduling_of(tid: int) -> Scheduling:
    """Of that thread; skips where Linux does not tell of slices (before 6.12)."""
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 12):
        pytest.skip("needs Linux 6.12")
    room = ctypes.create_string_buffer(_ATTRIBUTES.size)
    number = _NUMBERS[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, tid, room, _ATTRIBUTES.size, 0) == 0
    _, policy, _, nice, _, slice_ns, _, _ = _ATTRIBUTES.unpack(room.raw)
    return Scheduling(policy, nice, slice_ns)
