"""The link to the switch when gRPC ends a call by cancelling it.

Oracle: what asyncio says of the task. Cannot see: gRPC itself (tests/integration/
test_pool_kills.py kills the switch under the controller).
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from kvcast.controller.switch.connection import SwitchLink
from kvcast.controller.switch.control_loop import SwitchError


class UpSwitch:
    is_up = True


def link() -> SwitchLink:
    made = SwitchLink.__new__(SwitchLink)
    made._switch = cast(Any, UpSwitch())
    made.counts = cast(Any, {"rpc_errors": 0})
    return made


async def test_a_call_that_its_channel_cancels_is_a_lost_connection() -> None:
    async def ends_with_the_channel(_switch: Any) -> None:
        raise asyncio.CancelledError

    tested = link()
    with pytest.raises(SwitchError, match="connection lost"):
        await tested._guarded(ends_with_the_channel)
    assert tested.counts["rpc_errors"] == 1


async def test_a_task_that_is_cancelled_ends() -> None:
    async def waits(_switch: Any) -> None:
        await asyncio.Event().wait()

    tested = link()
    task = asyncio.create_task(tested._guarded(waits))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tested.counts["rpc_errors"] == 0
