"""The time slice that agents take.

Oracle: what sched_getattr(2) says. Cannot see: whom the kernel interrupts for whom.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from kvcast.hostagent import time_slice
from kvcast.hostagent.time_slice import LONGER, take_long_slices
from scheduling import Scheduling, scheduling_of


def in_a_child(work: Callable[[], Any]) -> str:
    """What work in a process of its own comes to, in words: no test is to change how this one is
    scheduled."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = repr(work())
        except BaseException as error:  # pytest's own, too
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_a_thread_and_those_that_it_starts_take_longer_slices_and_keep_their_nice() -> None:
    default = scheduling_of(0).slice_ns

    def work() -> tuple[bool, list[Scheduling]]:
        nice = os.nice(3)
        assert nice == scheduling_of(0).nice
        done = take_long_slices()
        found = [scheduling_of(0)]
        thread = threading.Thread(target=lambda: found.append(scheduling_of(0)))
        thread.start()
        thread.join()
        return done, found

    nice = os.nice(0) + 3
    wanted = Scheduling(os.SCHED_OTHER, nice, round(default * LONGER))
    assert wanted.slice_ns > default
    assert in_a_child(work) == repr((True, [wanted, wanted]))
    assert scheduling_of(0).slice_ns == default


def test_whoever_has_a_policy_of_its_own_keeps_it() -> None:
    def work() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return take_long_slices(), scheduling_of(0).policy

    assert in_a_child(work) == repr((False, os.SCHED_BATCH))


def test_a_machine_whose_calls_are_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slice, "_NUMBERS", {})
    assert in_a_child(take_long_slices) == "False"


def test_where_linux_tells_of_no_slices_none_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class OldLinux:
        """Before 6.12."""

        def __init__(self, _name: None) -> None:
            pass

        def syscall(self, number: int, *_: object) -> int:
            calls.append(number)
            return 0  # and all attributes are 0

    monkeypatch.setattr(time_slice.ctypes, "CDLL", OldLinux)
    assert not take_long_slices()
    assert len(calls) == 1, "it has set something"
