"""The event loop that an agent runs on.

Owns: which one that is. uvloop, where it is installed (the extra `agent`), answers a client in a
third of the time; without it asyncio's own does as well. Must not know: what runs on it.
"""

from __future__ import annotations

import asyncio
import time


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop whose `time` is the system's monotonic clock: uvloop's own counts whole milliseconds,
    and round-trip times are microseconds."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()

    class Loop(uvloop.Loop):
        """uvloop's, with a finer clock of the same origin."""

        def time(self) -> float:
            return time.monotonic()

    return Loop()
