"""Hints to an agent over HTTP, before real agents in this process.

Oracle: what the agents hold, and the answers. Cannot see: a router (test_route_proxy.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hostagent_harness import Pool, key_of, running_pool, until
from kvcast.hostagent.flags import parse
from kvcast.hostagent.network.hints_server import MAX_KEYS, hints_server


@contextlib.asynccontextmanager
async def hinted(pool: Pool, number: int) -> AsyncIterator[Any]:
    """Sends hints to an agent: status and answer."""
    agent = pool.agents[number]
    server = hints_server(agent.core, agent.transport.pump, None)
    host, port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:

        async def hint(keys: list[bytes], namespace: int = 1) -> tuple[int, dict[str, Any]]:
            body = {"namespace": namespace, "keys": [key.hex() for key in keys]}
            url = f"http://{host}:{port}/v1/prefetch"
            async with session.post(url, json=body) as answer:
                return answer.status, await answer.json()

        try:
            yield hint
        finally:
            await server.stop()


async def test_what_the_pool_holds_of_a_hint_is_fetched_and_counted(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        keys = [key_of(number) for number in range(6)]
        blocks = {key: bytes(key) * 99 for number, key in enumerate(keys) if number != 4}
        await pool.clients[1].put(1, blocks)
        await until(lambda: pool.agents[1].core.writes.replications == 0)
        async with hinted(pool, 3) as hint:
            assert await hint(keys) == (200, {"held": 4})
            await pool.holds(3, *keys[:4])
            assert await hint(keys[4:]) == (200, {"held": 0})
            assert await hint(keys[:2]) == (200, {"held": 2}), "they are here by now"


async def test_a_hint_for_a_namespace_of_others_is_refused(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        pool.controller.add_namespace(2, ["node-1"])
        pool.controller.publish()
        await pool.settled()
        await pool.clients[1].put(2, {key_of(1): b"theirs" * 100}, ack="local")
        async with hinted(pool, 2) as hint:
            assert (await hint([key_of(1)], 2))[0] == 403
            assert (await hint([key_of(1)], 9))[0] == 404
            assert (await hint([key_of(1)] * (MAX_KEYS + 1)))[0] == 400
            assert (await hint([]))[0] == 400
        async with hinted(pool, 1) as hint:
            assert await hint([key_of(1)], 2) == (200, {"held": 1})


def test_hints_are_not_taken_beyond_loopback_without_tls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--node-id=n", "--ip=10.0.0.1", "--mac=02:00:00:00:00:01", "--switch-port=1"]
    words += ["--socket=/tmp/x", "--transport=udp", "--hints-addr=10.0.0.1:1"]
    with pytest.raises(SystemExit) as end:
        parse(words)
    assert end.value.code == 2
    assert "--hints-addr" in capsys.readouterr().err
