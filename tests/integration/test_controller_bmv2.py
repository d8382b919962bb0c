"""The controller against BMv2's own P4Runtime server (simple_switch_grpc), where it is at hand.

Oracle: the tables read back from BMv2. What it adds to the tests on our switch: that nothing the
controller writes, reads or relies on is ours alone. Cannot see: packets.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from controller_harness import http, lab_in, tables_of, until
from kvcast.protocol.messages.control import (
    GroupReply,
    GroupRequest,
    NamespaceReply,
    NamespaceRequest,
    PoolMap,
)
from kvcast.protocol.messages.wire import SEGMENT_BYTES, BlockId

BINARY = shutil.which(os.environ.get("KVCAST_SIMPLE_SWITCH_GRPC", "simple_switch_grpc"))


@pytest.mark.bmv2
@pytest.mark.skipif(BINARY is None, reason="simple_switch_grpc is not on PATH")
async def test_bmv2_is_programmed_and_a_restart_writes_nothing(tmp_path: Path) -> None:
    assert BINARY is not None
    async with lab_in(tmp_path) as lab:
        switch = await lab.bmv2(BINARY)
        first = await lab.controller(switch.facts["grpc"], "--target=bmv2")
        agents = [await lab.agent(first, n) for n in (1, 2)]
        await agents[0].send(NamespaceRequest(1, tenant="t", model="m", version="1", layout="l"))
        namespace = (await agents[0].wait_for(NamespaceReply)).info.namespace
        await agents[0].send(GroupRequest(2, namespace, ["node-1", "node-2"]))
        await agents[0].wait_for(GroupReply)
        block = BlockId(namespace, (7).to_bytes(16, "big"))
        for agent in agents:
            agent.held[block] = (2 * SEGMENT_BYTES, 0xD16E57)
        pin = {"namespace": namespace, "key": block.key.hex()}
        code, body = await http(first, "POST", "/v1/pin", pin)
        assert code == 200, body
        seen = await until(first, lambda s: all(n["programmed"] for n in s["nodes"]))
        await until(first, lambda s: s["decisions"].get("hit") == 0)
        tables = await tables_of(switch.facts["grpc"])
        assert len(tables["resident"]) == 2
        assert len(tables["bucket_home"]) == 2048
        assert (1024,) in tables["groups"]
        assert tables["settings"][()][1] == 1

        await first.kill()
        second = await lab.controller(switch.facts["grpc"], "--target=bmv2")
        await agents[0].close()
        await agents[0].connect(second.facts["agents_addr"])
        assert await agents[0].wait_for(PoolMap, lambda m: m.epoch == seen["epoch"])
        after = await until(second, lambda s: s["switch"]["programmed"])
        assert after["switch"]["counts"].get("writes", 0) == 0, after["switch"]["counts"]
        assert await tables_of(switch.facts["grpc"]) == tables

        code, body = await http(second, "DELETE", "/v1/pin", pin)
        assert code == 200, body
