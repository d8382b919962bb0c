"""What engines say of the order of blocks in a prefix, as far as a namespace's policy looks at it.

The oracle is the chain of hashes that an engine had, in each agent's store.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hostagent_harness import Pool, running_pool, until
from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.link import Link, LinkOptions
from kvcast.hostagent.connectors.loads import LoadTable
from kvcast.hostagent.connectors.naming import NamespaceName, keys_of, places_of
from kvcast.hostagent.connectors.planner import Load, Lookup, Save
from kvcast.protocol.messages.control import NamespaceInfo, NamespaceSettings
from kvcast.protocol.messages.wire import BlockId

NAME = NamespaceName("tests", "model", "1", "layout")
NUMBER = 9
PARTS = (3000, 5000)
PROBE = 1
PATIENCE_S = 60.0


class Memory:
    """An engine's memory: bytes of each block's parts."""

    part_bytes = PARTS
    cache_group = (0, 0)
    null_block = 0

    def __init__(self, blocks: int) -> None:
        system = random.Random(blocks)
        self.parts = [[bytearray(system.randbytes(size)) for size in PARTS] for _ in range(blocks)]

    def write(self, part: int, block_id: int, data: memoryview) -> None:
        self.parts[block_id][part][:] = data

    def read(self, part: int, block_id: int, room: memoryview) -> None:
        room[:] = self.parts[block_id][part]

    def settle(self) -> None:
        pass

    def use_arena(self, arena: memoryview) -> None:
        pass


class Engine:
    """A link of one node."""

    def __init__(self, pool: Pool, number: int) -> None:
        socket = str(pool.folder / f"{number}.sock")
        self.link = Link(LinkOptions(socket, "test", window_bytes=40_000), Counters())
        self.link.use(NAME, prefetch=True)

    async def save(self, save: Save) -> None:
        ended = threading.Event()
        opened = self.link.save(save, Memory(40), PROBE, lambda _: ended.set())
        opened.computed(range(len(PARTS)), lambda: None)
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)
        assert opened.saved == len(save.hashes)

    async def load(self, load: Load) -> None:
        table = LoadTable()
        self.link.load(load, table, Memory(40))
        await until(lambda: bool(table.take(time.monotonic())))


def chain(count: int) -> tuple[bytes, ...]:
    system = random.Random("chain")
    return tuple(system.randbytes(32) for _ in range(count))


def known(pool: Pool, node: int) -> dict[bytes, tuple[bytes, int]]:
    """By key, what the node's agent knows of a block's place in its prefix."""
    store = pool.agents[node].core.store
    copies = map(store.peek, store.blocks())
    return {c.block.key: (c.parent, c.depth) for c in copies if c is not None}


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Callable[[Pool], None]:
    """The namespace is known, and has this policy."""

    def tell(pool: Pool) -> None:
        parts = (NAME.tenant, NAME.model, NAME.version, NAME.layout)
        settings = NamespaceSettings(policy=request.param)
        pool.controller.namespaces.append(NamespaceInfo(NUMBER, *parts, settings=settings))
        pool.controller.homes_of = lambda _bucket: ["node-1"]
        pool.controller.publish()

    return tell


HASHES = chain(12)
IDS = (tuple(range(1, 13)),)
WHOLE = places_of(b"", HASHES, 0, len(PARTS))


@pytest.mark.parametrize("told", ["value"], indirect=True)
async def test_each_node_knows_what_is_before_each_block_of_a_prefix(
    tmp_path: Path, told: Callable[[Pool], None]
) -> None:
    async with running_pool(tmp_path, 3) as pool:
        told(pool)
        await pool.settled()
        one, two, three = (Engine(pool, number) for number in (1, 2, 3))
        try:
            await one.save(Save(1, "r", 0, HASHES[:5], (IDS[0][:5],), PATIENCE_S))
            await two.save(Save(1, "r", 5, HASHES[5:], (IDS[0][5:],), PATIENCE_S, HASHES[4]))
            assert known(pool, 1) == WHOLE, "the home, of what others have saved, too"
            rest = (HASHES[3:], (IDS[0][3:],), PATIENCE_S)
            await three.load(Load("r", 1, 3, *rest, before=HASHES[2]))
            assert known(pool, 3) == {
                key: place for key, place in WHOLE.items() if place[1] >= 3
            }, "what it has read"
            # What is looked up is fetched ahead.
            heard = threading.Event()
            lookup = Lookup("r", 1, HASHES[:3], 0, PATIENCE_S)
            three.link.look_up(lookup, len(PARTS), PROBE, lambda _: heard.set())
            assert await asyncio.to_thread(heard.wait, PATIENCE_S)
            await until(lambda: known(pool, 3) == WHOLE)
            policy = pool.agents[3].core.store._namespaces[NUMBER].policy
            first = BlockId(NUMBER, keys_of(HASHES[0], len(PARTS))[PROBE])
            assert len(policy.descendants(first)) == len(HASHES) - 1
        finally:
            for engine in (one, two, three):
                await asyncio.to_thread(engine.link.close)


@pytest.mark.parametrize("told", ["lru"], indirect=True)
async def test_where_no_policy_looks_at_prefixes_nothing_is_said_of_them(
    tmp_path: Path, told: Callable[[Pool], None]
) -> None:
    async with running_pool(tmp_path, 2) as pool:
        told(pool)
        await pool.settled()
        engine = Engine(pool, 2)
        try:
            await engine.save(Save(1, "r", 0, HASHES, IDS, PATIENCE_S))
            assert set(known(pool, 1)) == set(WHOLE)
            assert set(known(pool, 1).values()) == {(b"", 0)}
        finally:
            await asyncio.to_thread(engine.link.close)


@pytest.mark.parametrize("told", ["value"], indirect=True)
async def test_a_clients_gets_may_say_of_which_prefix_blocks_are(
    tmp_path: Path, told: Callable[[Pool], None]
) -> None:
    keys = [number.to_bytes(16, "big") for number in range(1, 9)]
    async with running_pool(tmp_path, 2) as pool:
        told(pool)
        await pool.settled()
        writer, reader = pool.clients[1], pool.clients[2]
        for client in (writer, reader):
            assert await client.namespace("tests", "model", "1", "layout") == NUMBER
            assert client.of_prefixes(NUMBER)
        await writer.put(NUMBER, {key: key * 9 for key in keys}, prefix=keys)

        async def read(client: AsyncClient, some: list[bytes]) -> None:
            for block in await client.get(NUMBER, some, 30.0, prefix=keys):
                assert block is not None
                block.release()

        await read(reader, keys[4:6])
        await read(reader, keys[7:])
        said = {key: (keys[at - 1] if at else b"", at) for at, key in enumerate(keys)}
        assert known(pool, 1) == said
        assert known(pool, 2) == {key: said[key] for key in (*keys[4:6], keys[7])}
        (arrived,) = [one async for one in reader.get_each(NUMBER, keys[:1], 30.0, prefix=said)]
        assert arrived[1].block is not None
        arrived[1].block.release()
        assert known(pool, 2)[keys[0]] == (b"", 0)
        assert await reader.prefetch(NUMBER, keys[1:3], prefix=said) == 2
        await until(lambda: known(pool, 2).get(keys[2]) == said[keys[2]])
        for wrong in ([b"short"], {keys[0]: (b"short", 1)}, {keys[0]: (b"", -1)}):
            with pytest.raises(ValueError, match=r"key"):
                await reader.get(NUMBER, keys[3:4], 1.0, prefix=wrong)
