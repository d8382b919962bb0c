"""The RDMA link's adapters, over real sockets and without a card.

Oracle: what connections share, said here. Cannot see: pairs and windows (`tests/rdma`).
"""

from __future__ import annotations

import asyncio
import random

from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.network.cards import Cards
from kvcast.hostagent.network.rdma_link import RdmaCalls, RdmaServer
from kvcast.hostagent.tiers.arena import SLAB_BYTES, Allocator
from kvcast.protocol.digests import Digested, digests_at_once
from kvcast.protocol.links.bulk import BulkOptions, GetCall
from kvcast.protocol.links.grants import Grant
from kvcast.protocol.links.rdma import RdmaOptions
from kvcast.protocol.links.rdma_callee import RdmaCallee
from kvcast.protocol.messages.bulk import DONE
from kvcast.protocol.messages.wire import BlockId, digest_of


def core_asked(asked: list[int]) -> AgentCore:
    """An agent's cores; `asked` gets the namespaces whose weights somebody wants to know."""
    store = Store(Allocator(SLAB_BYTES, SLAB_BYTES))
    core = AgentCore(
        AgentOptions("node-1"), store, memoryview(bytearray(SLAB_BYTES)), random.Random(1)
    )

    def weight_of(namespace: int) -> float:
        asked.append(namespace)
        return 1.0

    core.weight_of = weight_of  # type: ignore[method-assign]
    return core


def test_what_a_caller_asks_of_a_home_is_shared_by_the_agents_weights() -> None:
    asked: list[int] = []
    calls = RdmaCalls(core_asked(asked), RdmaOptions(), Cards([]), lambda: None)
    assert calls._link.weight_of(5) == 1.0
    assert asked == [5]


async def test_a_get_ends_when_whoever_makes_the_agents_digests_has_made_its() -> None:
    core = core_asked([])
    waiting: list[tuple[list[memoryview], Digested]] = []
    core.make_digests = lambda _now, *asked: waiting.append(asked)
    told: list[None] = []
    calls = RdmaCalls(core, RdmaOptions(), Cards([]), lambda: told.append(None))
    outcomes: list[str] = []
    call = GetCall(
        *(2, BlockId(1, bytes(16)), 0, 9.0, lambda *_: None, lambda _, how: outcomes.append(how))
    )
    calls._link.read(0.0, call, memoryview(b"abc"), digest_of(b"abc"))
    await asyncio.sleep(0)
    ((blocks, then),) = waiting
    assert outcomes == []
    digests_at_once(0.0, blocks, then)
    await asyncio.sleep(0)
    assert outcomes == [DONE]
    assert told


async def test_all_callers_of_a_home_share_one_bound_by_its_weights() -> None:
    asked: list[int] = []
    core = core_asked(asked)
    server = RdmaServer(core, RdmaOptions(grant_bytes=100), BulkOptions(), Cards([]))
    port = await server.start("127.0.0.1")
    writers = []
    try:
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
        async with asyncio.timeout(10.0):
            while len([driver for driver in server._drivers if driver.link is not None]) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        first, second = (driver.link for driver in server._drivers)
        assert isinstance(first, RdmaCallee)
        assert isinstance(second, RdmaCallee)
        for namespace, size_bytes in ((1, 100), (2, 1), (1, 1)):
            first._grants.ask(0.0, Grant(namespace, lambda _, size=size_bytes: size, lambda: None))  # type: ignore[misc]
        assert len(second._grants) == 1, "what waits on one connection is not seen from another"
        assert second._grants.open_bytes == 101
        assert set(asked) == {1, 2}
    finally:
        for writer in writers:
            writer.close()
        await server.close()
