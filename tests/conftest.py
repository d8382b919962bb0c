"""For all tests: the garbage collector leaves alone what was imported (with all tests collected a
million objects, which it would go through again and again: half of the processor time of tests
that make much). On a busy machine no property fails for the time that it takes. And what tests
start does not die of gRPC's handlers of forks (`kvcast.bench`).
"""

from __future__ import annotations

import gc

import kvcast.bench  # noqa: F401 (before anything imports gRPC)
from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
