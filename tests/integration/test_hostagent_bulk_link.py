"""The bulk link's adapter: towards a node that takes connections and says nothing, and what is left
of connections that are over.

Oracle: which calls end, and how; what objects there are. Cannot see: when to the millisecond.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from hostagent_harness import key_of, running_pool, until
from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.network.bulk_link import BulkCaller
from kvcast.hostagent.network.lander import Lander
from kvcast.protocol.links.bulk import UNREACHABLE, BulkOptions, DropCall
from kvcast.protocol.links.stream import LinkStream
from kvcast.protocol.messages.control import NodeInfo
from kvcast.service.link_driver import LinkDriver

PATIENCE_S = 60.0
KEY = bytes(16)


def test_a_call_that_waits_behind_one_without_an_answer_ends_at_its_own_deadline() -> None:
    asyncio.run(_wait_behind_one_without_an_answer())


async def _wait_behind_one_without_an_answer() -> None:
    said = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            said.set()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    node = NodeInfo(2, "node-2", "10.0.0.2", "02:00:00:00:00:02", 2, 20000, "127.0.0.1", port)
    pool = cast(Pool, SimpleNamespace(nodes={2: node}))
    outbox = BulkOutbox(pool)
    core = SimpleNamespace(
        pool=pool,
        options=SimpleNamespace(node_id="node-1"),
        metrics=Metrics(),
        serving=SimpleNamespace(view=None),
        weight_of=lambda _namespace: 1.0,
        departures=None,
        outbox=outbox,
    )
    options = BulkOptions(connections_per_peer=1)
    caller = BulkCaller(cast(AgentCore, core), options, core_told=lambda: None)
    ends: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def call(name: str, patience_s: float) -> DropCall:
        deadline = asyncio.get_running_loop().time() + patience_s
        return DropCall(2, 1, [KEY], deadline, lambda _now, end: ends.put_nowait((name, end)))

    outbox.calls.append(call("first", 10 * PATIENCE_S))
    caller.dispatch()
    await asyncio.wait_for(said.wait(), PATIENCE_S)
    outbox.calls += [call("last", 10 * PATIENCE_S), call("third", 0.3), call("second", 0.1)]
    caller.dispatch()
    ended = [await asyncio.wait_for(ends.get(), PATIENCE_S) for _ in range(2)]
    assert sorted(ended) == [("second", UNREACHABLE), ("third", UNREACHABLE)]
    await caller.close()
    ended = [await asyncio.wait_for(ends.get(), PATIENCE_S) for _ in range(2)]
    assert sorted(ended) == [("first", UNREACHABLE), ("last", UNREACHABLE)]
    server.close()


def connections() -> Counter[str]:
    """What there is of connections in this process, by kind."""
    kinds = (LinkDriver, LinkStream, Lander)
    return Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds))


async def test_connections_that_are_over_are_gone_without_the_garbage_collector(
    tmp_path: Path,
) -> None:
    """It looks at what is old hardly ever (`kvcast.service.garbage`), and a connection has
    buffers."""
    async with running_pool(tmp_path, 2) as pool:

        async def use_and_cut(number: int) -> None:
            keys = [key_of(10 * number + n) for n in range(4)]
            async with await AsyncClient.connect(str(pool.folder / "1.sock")) as client:
                await client.put(1, dict.fromkeys(keys, bytes(200_000)))
            for block in await pool.clients[2].get(1, keys, deadline_s=20):
                assert block is not None
                block.release()
            for agent in pool.agents.values():
                await agent.bulk_server.hang_up()
            await asyncio.sleep(0.05)

        await use_and_cut(0)
        gc.collect()
        gc.disable()
        try:
            before = connections()
            for number in range(1, 6):
                await use_and_cut(number)
            await until(lambda: connections() <= before)
        finally:
            gc.enable()


async def test_transfers_go_on_over_connections_that_were_idle_for_some_seconds(
    tmp_path: Path,
) -> None:
    """Puts, gets of many blocks and large blocks, and questions."""
    async with running_pool(tmp_path, 2) as pool:

        async def transfer(number: int) -> None:
            blocks = {key_of(100 * number + n): bytes([n]) * 200_000 for n in range(8)}
            await pool.clients[1].put(1, blocks)
            assert await pool.clients[2].exists(1, list(blocks)) == len(blocks)
            for block, data in zip(
                await pool.clients[2].get(1, list(blocks), deadline_s=20),
                blocks.values(),
                strict=True,
            ):
                assert block is not None
                assert block.data == data
                block.release()

        def there() -> set[object]:
            return {one for agent in pool.agents.values() for one in agent.bulk_server._drivers}

        await transfer(0)
        await transfer(1)
        before = there()
        await asyncio.sleep(6.0)
        await transfer(2)
        assert there() == before, "the same connections"
        assert not any(agent.core.metrics.bulk_failures_total for agent in pool.agents.values())
