"""Processor time of other processes. Oracle: what a process says of itself."""

from __future__ import annotations

import subprocess
import sys

from kvcast.bench.processor_time import machine_time, processor_time_s

WORK = """
import threading, time
def work():
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
before = threading.Thread(target=work)
before.start()
before.join()
print(time.process_time(), flush=True)
input()
"""


def test_a_process_has_used_what_it_says_its_ended_threads_included() -> None:
    machine_before = machine_time()
    with subprocess.Popen(
        [sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = float(process.stdout.readline())
        used = processor_time_s(process.pid)
        assert said >= 0.2
        assert said <= used < said + 1.0
        process.communicate("\n")
    assert processor_time_s(process.pid) == 0.0, "it has gone"
    machine = machine_time()
    assert machine.busy_s - machine_before.busy_s >= 0.1, "in ticks"
    assert machine.busy_s >= machine.softirq_s >= machine_before.softirq_s
