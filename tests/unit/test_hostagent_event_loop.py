"""The agent's event loop.

Oracle: the system's monotonic clock. Cannot see: how fast it is (bench).
"""

from __future__ import annotations

import asyncio
import sys
import time
from unittest import mock

import pytest
from kvcast.hostagent.network.event_loop import new_loop


@pytest.mark.parametrize("installed", [True, False])
def test_the_loops_clock_is_the_monotonic_one_and_fine(installed: bool) -> None:
    absent = {} if installed else {"uvloop": None}
    with mock.patch.dict(sys.modules, absent), asyncio.Runner(loop_factory=new_loop) as runner:
        loop = runner.get_loop()
        assert type(loop).__module__.startswith("kvcast") == installed

        async def due() -> tuple[float, float]:
            when = loop.time() + 0.02
            reached: asyncio.Future[float] = loop.create_future()
            loop.call_at(when, lambda: reached.set_result(loop.time()))
            return when, await reached

        before = time.monotonic()
        times = {loop.time() for _ in range(1000)}
        assert before <= min(times) <= max(times) <= time.monotonic()
        assert len(times) > 10, "whole milliseconds"
        when, reached = runner.run(due())
        assert when - 0.002 <= reached
