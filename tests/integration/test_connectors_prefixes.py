"""What engines say of the order of blocks in a prefix, as far as a namespace's policy looks at it.

The oracle is the chain of hashes that an engine had; what agents know is read from their stores.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hostagent_harness import Pool, running_pool, until
from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.connectors.block_link import BlockLink, Named
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.naming import keys_of
from kvcast.hostagent.connectors.options import StoreOptions
from kvcast.protocol.messages.control import NamespaceInfo, NamespaceSettings
from kvcast.protocol.messages.wire import BlockId
from test_connectors_link import NAME, PARTS, PROBE, Memory, Node, hashes
from test_connectors_link import nodes as nodes

NUMBER = 9
CHAIN = hashes("a", 12)
KEYS = [keys_of(one, len(PARTS)) for one in CHAIN]
PLACES = {
    key: (KEYS[depth - 1][part] if depth else b"", depth)
    for depth, keys in enumerate(KEYS)
    for part, key in enumerate(keys)
}
"""By key, the key before it, of the same layers, and how many blocks are before it."""
IDS = (tuple(range(1, 13)), tuple(range(20, 32)))


@contextlib.asynccontextmanager
async def pool_with(tmp_path: Path, count: int, policy: str) -> AsyncIterator[Pool]:
    """The namespace has this policy, and node-1 is the home of all blocks."""
    async with running_pool(tmp_path, count) as pool:
        parts = (NAME.tenant, NAME.model, NAME.version, NAME.layout)
        settings = NamespaceSettings(policy=policy)
        pool.controller.namespaces.append(NamespaceInfo(NUMBER, *parts, settings=settings))
        pool.controller.homes_of = lambda _bucket: ["node-1"]
        pool.controller.publish()
        await pool.settled()
        yield pool


def known(pool: Pool, node: int) -> dict[bytes, tuple[bytes, int]]:
    """By key, what a node's agent knows of the place of each block that it holds."""
    store = pool.agents[node].core.store
    copies = map(store.peek, store.blocks())
    return {c.block.key: (c.parent, c.depth) for c in copies if c is not None}


def ids_from(first: int, end: int) -> tuple[tuple[int, ...], ...]:
    return tuple(ids[first:end] for ids in IDS)


async def test_each_node_knows_what_is_before_each_block_of_a_prefix(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with pool_with(tmp_path, 3, "value") as pool:
        # Windows of two blocks or so: what comes before the first of each is said all the same.
        one, two, three = (
            nodes(tmp_path / f"{number}.sock", window_bytes=400_000) for number in (1, 2, 3)
        )

        def play() -> None:
            memory = Memory(1)
            assert one.save(CHAIN[:5], memory, ids_from(0, 5)) == 5
            assert two.save(CHAIN[5:], memory, ids_from(5, 12), first=5, before=CHAIN[4]) == 7
            ended = three.load(CHAIN[3:], Memory(None), ids_from(3, 12), first=3, before=CHAIN[2])
            assert ended.came == 9

        await asyncio.to_thread(play)
        assert known(pool, 1) == PLACES, "the home, of what others have saved, too"
        read = {key: place for key, place in PLACES.items() if place[1] >= 3}
        assert known(pool, 3) == read
        three.link.use(NAME, prefetch=True)
        assert await asyncio.to_thread(three.held, CHAIN[:3]) == 3
        await until(lambda: known(pool, 3) == PLACES)  # what is looked up is fetched ahead
        policy = pool.agents[3].core.store._namespaces[NUMBER].policy
        behind = policy.descendants(BlockId(NUMBER, KEYS[0][PROBE]))
        assert behind == [BlockId(NUMBER, keys[PROBE]) for keys in KEYS[1:]]


async def test_where_no_policy_looks_at_prefixes_nothing_is_said_of_them(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with pool_with(tmp_path, 2, "lru") as pool:
        node = nodes(tmp_path / "2.sock")
        await asyncio.to_thread(node.save, CHAIN, Memory(1), IDS)
        assert known(pool, 1) == dict.fromkeys(PLACES, (b"", 0))


async def test_a_clients_gets_may_say_of_which_prefix_blocks_are(tmp_path: Path) -> None:
    keys = [number.to_bytes(16, "big") for number in range(1, 9)]
    said = {key: (keys[at - 1] if at else b"", at) for at, key in enumerate(keys)}
    async with pool_with(tmp_path, 2, "value") as pool:
        writer, reader = pool.clients[1], pool.clients[2]
        for client in (writer, reader):
            assert await client.namespace(*(NAME.tenant, NAME.model), NAME.version, NAME.layout)
            assert client.of_prefixes(NUMBER)
        await writer.put(NUMBER, {key: key * 9 for key in keys}, prefix=keys)
        assert known(pool, 1) == said

        async def read(client: AsyncClient, some: list[bytes]) -> None:
            for block in await client.get(NUMBER, some, 30.0, prefix=keys):
                assert block is not None
                block.release()

        await read(reader, keys[4:6])
        await read(reader, keys[7:])
        assert known(pool, 2) == {key: said[key] for key in (*keys[4:6], keys[7])}
        async for _, outcome in reader.get_each(NUMBER, keys[3:4], 30.0, prefix=said):
            assert outcome.block is not None
            outcome.block.release()
        assert known(pool, 2)[keys[3]] == said[keys[3]]
        assert await reader.prefetch(NUMBER, keys[1:3], prefix=said) == 2
        await until(lambda: known(pool, 2).get(keys[2]) == said[keys[2]])
        for wrong in ([b"short"], {keys[0]: (b"short", 1)}, {keys[0]: (b"", -1)}):
            with pytest.raises(ValueError, match=r"key"):
                await reader.get(NUMBER, keys[:1], 1.0, prefix=wrong)


@pytest.mark.parametrize("policy", ["value", "lru"])
async def test_engines_that_name_each_block_may_say_what_is_before_them(
    tmp_path: Path, policy: str
) -> None:
    """In saves, loads and questions, of which windows of three blocks know the whole."""
    keys = [number.to_bytes(16, "big") for number in range(1, 10)]
    names = [Named(NAME, key) for key in keys]
    said = {key: (keys[at - 1] if at else b"", at) for at, key in enumerate(keys)}
    nothing = dict.fromkeys(said, (b"", 0))
    async with pool_with(tmp_path, 2, policy) as pool:
        one, two = (
            BlockLink(
                StoreOptions(socket=str(tmp_path / f"{number}.sock"), window_bytes=300_000),
                *(f"link {number}", Counters()),
            )
            for number in (1, 2)
        )
        room = memoryview(bytearray(100_000))

        def play() -> None:
            saved = one.save(names, [room] * 9, lambda _: None, said)
            assert saved.wait(30)
            loaded = two.load(names[4:], [room] * 5, lambda _: None, said)
            assert loaded.wait(30)
            assert all((*saved.came, *loaded.came))

        try:
            await asyncio.to_thread(play)
            expected = said if policy == "value" else nothing
            assert known(pool, 1) == expected
            assert known(pool, 2) == {key: expected[key] for key in keys[4:]}
            found = two.find(names[:4], lambda _: None, said)
            await until(lambda: known(pool, 2) == expected)  # fetched ahead
            assert all(found.came)
        finally:
            one.close()
            two.close()
