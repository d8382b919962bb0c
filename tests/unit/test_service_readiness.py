"""The ready line and the signals. Oracle: the kernel's signals. Cannot see: what a daemon stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from kvcast.service.readiness import announce_ready, reload_on_hangup, stop_event


def test_the_ready_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    announce_ready(port=7)
    assert json.loads(capsys.readouterr().out) == {"event": "ready", "port": 7}


async def test_signals_set_the_stop_event() -> None:
    loop = asyncio.get_running_loop()
    event = stop_event(loop)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(event.wait(), 60)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def test_a_hangup_looks_at_files_again_and_ends_nothing() -> None:
    loop = asyncio.get_running_loop()
    looked = asyncio.Event()
    reload_on_hangup(loop, looked.set)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(looked.wait(), 60)
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
