"""The garbage collector of daemons.

Oracle: the interpreter's own counts, in a process of its own. Cannot see: how long a collection
takes (`python -m kvcast.bench.controller` has that in its rounds).
"""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
from kvcast.service.garbage import spare_what_stays

class Ring:
    def __init__(self):
        self.me = self

spare_what_stays()
assert gc.get_freeze_count() > 0
full = gc.get_stats()[2]["collections"]
kept = [[number] for number in range(400_000)]
assert gc.get_stats()[2]["collections"] == full, "what stays was looked at"
young = gc.get_stats()[0]["collected"] + gc.get_stats()[1]["collected"]
for _ in range(20_000):
    Ring()
now = gc.get_stats()[0]["collected"] + gc.get_stats()[1]["collected"]
assert now - young >= 15_000, "rings that nobody has any more are still there"
"""

_GROWS = """
import gc, weakref
from kvcast.service.garbage import spare_what_stays

class Ring:
    def __init__(self):
        self.me = self

spare_what_stays()
spare_what_stays()
before, full = gc.get_freeze_count(), gc.get_stats()[2]["collections"]
lost = weakref.ref(Ring())
kept = [[number] for number in range(900_000)]
assert gc.get_stats()[2]["collections"] == full + 1
assert gc.get_freeze_count() - before >= 600_000, "the next one would look at these again"
assert lost() is None
assert gc.callbacks.count(gc.callbacks[-1]) == 1
"""


def test_what_a_full_collection_has_left_is_not_looked_at_by_the_next() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _GROWS], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr


def test_what_stays_is_not_looked_at_and_what_goes_is_collected() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
