"""What a daemon says when it is ready, and the signals by which it is told to stop or to reload.

Owns: the ready line, and which signal means what. Must not know: what is started or stopped.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from typing import Any


def announce_ready(**facts: Any) -> None:
    """Print the ready line: one JSON object on standard output, flushed."""
    print(json.dumps({"event": "ready", **facts}), flush=True)


def stop_event(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, on the running loop."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def reload_on_hangup(loop: asyncio.AbstractEventLoop, *refresh: Callable[[], object]) -> None:
    """Have SIGHUP look at files again at once, instead of ending the process."""

    def hangup() -> None:
        for each in refresh:
            each()

    loop.add_signal_handler(signal.SIGHUP, hangup)
