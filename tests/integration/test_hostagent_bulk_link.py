"""The bulk link's adapter towards a node that takes connections and says nothing.

Oracle: which calls end, and how. Cannot see: when to the millisecond.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.network.bulk_link import BulkCaller
from kvcast.protocol.links.bulk import UNREACHABLE, BulkOptions, DropCall
from kvcast.protocol.messages.control import NodeInfo

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
