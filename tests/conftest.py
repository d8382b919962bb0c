"""For all tests: the garbage collector leaves alone what was imported.

With all tests collected that is a million objects, which it would go through again and again: half
of the processor time of tests that make much.
"""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
