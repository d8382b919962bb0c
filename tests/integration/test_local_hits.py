"""Blocks that a client finds and pins by itself, before real agents in this process.

Oracle: the bytes that were put, and the agent's count of requests, which a local hit leaves as it
is. Cannot see: other processes at full speed (test_local_hits_stress.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hostagent_harness import MIB, Pool, key_of, running_pool, until
from kvcast.hostagent import membarrier
from kvcast.hostagent.client import (
    AgentGoneError,
    AgentRejectedError,
    AsyncClient,
    Client,
    ForbiddenError,
    UnknownNamespaceError,
)
from kvcast.hostagent.client import conversation as client_conversation
from kvcast.hostagent.network import local_server
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.control import (
    NamespaceInfo,
    NamespaceSecret,
    NamespaceSecrets,
    NamespaceSettings,
)
from kvcast.protocol.messages.wire import BlockId

SECRET = bytes(range(32))

pytestmark = pytest.mark.skipif(
    not membarrier.available(), reason="no membarrier(2), or not x86-64"
)


def noise(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@contextlib.asynccontextmanager
async def pool_of_two(folder: Path) -> AsyncIterator[tuple[Pool, AsyncClient]]:
    """Two agents, and 20 blocks of 8 to 27 KB that the first one holds."""
    async with running_pool(folder, 2) as pool:
        client = pool.clients[1]
        await client.put(1, {key_of(n): noise(n, 8000 + 1000 * n) for n in range(20)})
        await until(lambda: pool.agents[1].core.writes.replications == 0)
        yield pool, client


def requests(pool: Pool, number: int = 1) -> int:
    return pool.agents[number].core.metrics.local_requests_total


async def test_a_local_hit_and_its_release_take_no_message(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        before = requests(pool)
        blocks = await client.get(1, [key_of(n) for n in range(20)])
        for number, block in enumerate(blocks):
            assert block is not None
            assert block.tier == "local"
            assert bytes(block.data) == noise(number, 8000 + 1000 * number)
            assert block.verify()
            assert block.data.readonly
        store = pool.agents[1].core.store
        store.elsewhere.refresh()
        assert [store.peek(BlockId(1, key_of(n))).pins for n in range(20)] == [1] * 20  # type: ignore[union-attr]
        for block in blocks:
            assert block is not None
            block.release()
            block.release()
        assert await client.exists(1, [key_of(n) for n in range(20)]) == 20
        await asyncio.sleep(0.01)
        assert requests(pool) == before
        stats = await client.stats()
        assert stats["hits_local_total"] == 20
        assert stats["gets_total"] == 20
        assert stats["index_hits_total"] == 20
        assert not any(store.peek(b).pins for b in store.blocks())  # type: ignore[union-attr]


async def test_a_local_hit_that_is_dropped_is_let_go_of_unless_its_bytes_were_asked_for(
    tmp_path: Path,
) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        store = pool.agents[1].core.store

        def pins() -> list[int]:
            store.elsewhere.refresh()
            copies = [store.peek(BlockId(1, key_of(number))) for number in (1, 2)]
            return [copy.pins for copy in copies if copy is not None]

        blocks = await client.get(1, [key_of(1), key_of(2)])
        view = blocks[1].data[:100] if blocks[1] is not None else b""
        assert pins() == [1, 1]
        with pytest.warns(ResourceWarning) as warned:
            blocks.clear()
        assert len(warned) == 2
        assert pins() == [0, 1]
        assert view == noise(2, 10_000)[:100]


async def test_what_is_not_here_is_asked_for_in_one_request_and_comes_in_order(
    tmp_path: Path,
) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        for number in (3, 11):
            pool.drop_here(1, key_of(number))
        before = requests(pool)
        keys = [key_of(n) for n in range(21)]
        outcomes = await client.get_outcomes(1, keys, 0.5)
        assert requests(pool) == before + 1
        tiers = [outcome.block.tier if outcome.block else None for outcome in outcomes]
        assert tiers[:3] == ["local"] * 3
        assert tiers[3] in ("home", "bulk", "shared")
        assert tiers[20] is None
        assert outcomes[20].status == "miss"
        for number, outcome in enumerate(outcomes[:20]):
            assert outcome.block is not None
            assert bytes(outcome.block.data) == noise(number, 8000 + 1000 * number)
            outcome.block.release()
        pool.drop_here(1, key_of(5))
        assert await client.exists(1, keys) == 20


async def test_both_clients_find_blocks_by_themselves(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (pool, _):
        before = requests(pool)

        def read() -> bytes:
            with Client(str(tmp_path / "1.sock")) as client:
                (block,) = client.get(1, [key_of(4)])
                assert block is not None
                with block:
                    return bytes(block.data)

        assert await asyncio.to_thread(read) == noise(4, 12_000)
        assert requests(pool) == before


async def test_a_client_let_in_for_some_tenants_gets_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of_two(tmp_path) as (pool, _):
        monkeypatch.setattr(
            "kvcast.hostagent.network.local_server.tenants_of",
            lambda _rules, _peer: frozenset({"t"}),
        )
        restricted = await AsyncClient.connect(str(tmp_path / "1.sock"))
        assert restricted._conversation._local is None
        before = requests(pool)
        (block,) = await restricted.get(1, [key_of(2)])
        assert block is not None
        assert bytes(block.data) == noise(2, 10_000)
        assert requests(pool) == before + 1
        await restricted.close()


async def test_a_namespace_with_a_secret_is_asked_for_and_never_looked_up(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        pool.controller.namespaces[0] = NamespaceInfo(1, "t", "m", "1", "l", [], True)
        for node in ("node-1", "node-2"):
            pool.controller.send(node, NamespaceSecrets([NamespaceSecret(1, SECRET)]))
        pool.controller.publish()
        await pool.settled()
        await client.put(1, {key_of(50): b"secret"})
        before = requests(pool)
        (block,) = await client.get(1, [key_of(50)])
        assert block is not None
        assert bytes(block.data) == b"secret"
        assert requests(pool) == before + 1
        # Nor is anything found by the pool's own key, which stands in the index.
        (held,) = [b for b in pool.agents[1].core.store.blocks() if b.namespace == 1]
        local_blocks = client._conversation._local
        assert local_blocks is not None
        assert local_blocks._find(1, held.key) is not None
        assert local_blocks.take(1, [held.key]) == [None]
        assert local_blocks.prefix(1, held.key) == 0


async def test_a_namespace_with_a_rate_is_asked_for_and_never_looked_up(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        before = requests(pool)
        (block,) = await client.get(1, [key_of(2)])
        assert block is not None
        block.release()
        assert requests(pool) == before
        settings = NamespaceSettings(operations_per_s=1000.0)
        pool.controller.namespaces[0] = NamespaceInfo(1, "t", "m", "1", "l", settings=settings)
        pool.controller.publish()
        await pool.settled()
        (block,) = await client.get(1, [key_of(2)])
        assert block is not None
        assert requests(pool) == before + 1
        block.release()


async def test_a_client_does_not_find_another_namespace_under_the_number_that_it_was_told(
    tmp_path: Path,
) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        assert await client.namespace("t", "m", "1", "l") == 1
        assert await client.exists(1, [key_of(1)]) == 1
        pool.controller.namespaces[0] = NamespaceInfo(1, "other", "m", "1", "l")
        pool.controller.publish()
        await pool.settled()
        await pool.clients[2].put(1, {key_of(1): b"another's"})
        await until(lambda: pool.agents[1].core.store.peek(BlockId(1, key_of(1))) is not None)
        with pytest.raises(UnknownNamespaceError):
            await client.get(1, [key_of(1)])
        with pytest.raises(UnknownNamespaceError):
            await client.exists(1, [key_of(1)])


async def test_a_namespace_that_is_taken_from_the_node_is_not_looked_up(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        pool.controller.namespaces[0] = NamespaceInfo(1, "t", "m", "1", "l", ["node-2"])
        pool.controller.publish()
        await pool.settled()
        with pytest.raises(ForbiddenError):
            await client.get(1, [key_of(1)])
        with pytest.raises(ForbiddenError):
            await client.exists(1, [key_of(1)])


async def test_the_index_cannot_be_written_by_clients_and_the_region_not_be_cut(
    tmp_path: Path,
) -> None:
    passed: list[tuple[int, int]] = []
    kept = client_conversation.map_shared

    def keep(index_fd: int, region_fd: int, **sizes: int) -> object:
        passed.append((os.dup(index_fd), os.dup(region_fd)))
        return kept(index_fd, region_fd, **sizes)

    async with pool_of_two(tmp_path) as (_pool, _client):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client_conversation, "map_shared", keep)
            client = await AsyncClient.connect(str(tmp_path / "1.sock"))
        ((index_fd, region_fd),) = passed
        with pytest.raises(PermissionError):
            mmap.mmap(index_fd, 4096)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(index_fd, b"x")
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(index_fd, 0)
        for length in (shared.REGION_BYTES + 1, 0):
            with pytest.raises(PermissionError):
                os.ftruncate(region_fd, length)
        os.close(index_fd)
        os.close(region_fd)
        await client.close()


async def test_a_client_that_writes_nonsense_is_cut_off_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        hostile = await AsyncClient.connect(str(tmp_path / "1.sock"))
        blocks = hostile._conversation._local
        assert blocks is not None
        (held,) = await client.get(1, [key_of(1)])
        blocks._region[shared.CELLS_USED_WORD] = 1 << 60
        await client.stats()
        for _ in range(500):
            if not hostile.connected:
                break
            await asyncio.sleep(0.01)
        assert not hostile.connected
        assert pool.agents[1].core.metrics.local_protocol_errors_total == 1
        with pytest.raises(AgentGoneError):
            await hostile.get(1, [key_of(1)])
        assert held is not None
        assert held.verify()
        assert client.connected
        held.release()
        await hostile.close()


async def test_a_read_only_client_reads_and_cannot_put_or_write(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (_pool, _client):
        reader = await AsyncClient.connect(str(tmp_path / "1.sock"), read_only=True)
        (block,) = await reader.get(1, [key_of(7)])
        assert block is not None
        assert bytes(block.data) == noise(7, 15_000)
        with pytest.raises(TypeError):
            reader._conversation._memory._map.memory[0:1] = b"x"
        with pytest.raises(ForbiddenError, match="reads only"):
            await reader.put(1, {key_of(60): b"x"})
        await reader.close()


async def test_a_read_only_descriptor_of_the_arena_maps_for_reading_only(
    tmp_path: Path,
) -> None:
    async with pool_of_two(tmp_path) as (pool, _client):
        fd = pool.agents[1].arena.open_for_client(read_only=True)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, MIB)
        os.close(fd)


async def test_a_client_does_not_outlast_a_fork(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (pool, _):

        def in_a_child(client: Client) -> str:
            block, *dropped = client.get(1, [key_of(1), key_of(3)])
            assert block is not None
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    block.release()  # the parent's pin stays
                    dropped.clear()  # and so does this; nobody need be warned
                    client.get(1, [key_of(2)])
                    os.write(writing, b"it went on")
                except AgentGoneError as error:
                    os.write(writing, str(error).encode())
                finally:
                    os._exit(0)
            os.close(writing)
            os.waitpid(child, 0)
            said = os.read(reading, 1000).decode()
            os.close(reading)
            pool.agents[1].core.store.elsewhere.refresh()
            copy = pool.agents[1].core.store.peek(BlockId(1, key_of(1)))
            assert copy is not None
            assert copy.pins == 1
            also = pool.agents[1].core.store.peek(BlockId(1, key_of(3)))
            assert also is not None
            assert also.pins == 1
            assert block.verify()
            for mine in (block, *dropped):
                assert mine is not None
                mine.release()
            return said

        client = await asyncio.to_thread(Client, str(tmp_path / "1.sock"))
        assert "before a fork" in in_a_child(client)
        client.close()


async def test_an_older_client_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of_two(tmp_path) as (_pool, _):
        monkeypatch.setattr(client_conversation, "LOCAL_PROTOCOL_VERSION", 1)
        with pytest.raises(AgentRejectedError, match="must be of one kvcast release"):
            await AsyncClient.connect(str(tmp_path / "1.sock"))


async def test_where_there_is_no_barrier_every_block_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membarrier, "available", lambda: False)
    async with pool_of_two(tmp_path) as (pool, client):
        assert pool.agents[1].index_file is None
        assert client._conversation._local is None
        before = requests(pool)
        (block,) = await client.get(1, [key_of(3)])
        assert block is not None
        assert bytes(block.data) == noise(3, 11_000)
        assert requests(pool) == before + 1


async def test_a_closed_client_and_a_closed_agent_find_nothing_more(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        (block,) = await client.get(1, [key_of(3)])
        assert block is not None
        other = await AsyncClient.connect(str(tmp_path / "1.sock"))
        await other.close()
        with pytest.raises(AgentGoneError):
            await other.get(1, [key_of(3)])
        await pool.agents[1].close()
        assert not (tmp_path / "1.arena.index").exists()
        with pytest.raises(AgentGoneError):
            await client.get(1, [key_of(3)])
        block.release()
        del pool.agents[1]


@pytest.mark.parametrize("blocking", [True, False])
async def test_exists_is_not_answered_from_the_index_of_an_agent_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    async with pool_of_two(tmp_path) as (pool, _):
        path = str(tmp_path / "1.sock")
        client: Any
        if blocking:
            client = await asyncio.to_thread(Client, path)
        else:
            client = await AsyncClient.connect(path)

        async def exists() -> int:
            if blocking:
                return int(await asyncio.to_thread(client.exists, 1, [key_of(3)]))
            return int(await client.exists(1, [key_of(3)]))

        before = requests(pool)
        assert await exists() == 1
        assert requests(pool) == before
        # As where it is killed: the connection ends, and the region says nothing of it.
        monkeypatch.setattr(local_server._Client, "end_session", lambda _self: False)
        connections = pool.agents[1]._local_server._clients
        max(connections, key=lambda each: each.session.number).cut_off()
        await until(client._conversation.is_cut)
        assert client._conversation._local.prefix(1, key_of(3)) == 1
        with pytest.raises(AgentGoneError):
            await exists()
        if blocking:
            client.close()
        else:
            await client.close()


async def test_results_come_one_by_one_and_what_is_here_comes_first(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        for number in range(0, 20, 2):
            pool.drop_here(1, key_of(number))
        keys = [key_of(n) for n in range(21)]
        order = []
        async for place, outcome in client.get_each(1, keys, 1.0):
            order.append(place)
            if place == 20:
                assert outcome.block is None
                continue
            assert outcome.block is not None
            assert bytes(outcome.block.data) == noise(place, 8000 + 1000 * place)
            outcome.block.release()
        assert order[:10] == list(range(1, 20, 2))
        assert sorted(order) == list(range(21))


async def test_a_block_is_written_straight_into_the_arena(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as (pool, client):
        with await client.reserve(1, {key_of(70): 5000, key_of(71): 100}) as reservation:
            reservation.views[key_of(70)][:] = noise(70, 5000)
            reservation.views[key_of(71)][:] = noise(71, 100)
            assert await client.exists(1, [key_of(70)]) == 0
            await client.commit(reservation)
        for number, size_bytes in ((70, 5000), (71, 100)):
            (block,) = await pool.clients[2].get(1, [key_of(number)])
            assert block is not None
            assert bytes(block.data) == noise(number, size_bytes)
            block.release()
        with await client.reserve(1, {key_of(72): 5000}):
            assert pool.agents[1].core.store.held_bytes > 0
        await client.stats()
        assert pool.agents[1].core.store.held_bytes == 0


async def test_an_arena_on_huge_pages_has_its_index_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # hugetlbfs's blocks are huge pages; here every file system's are taken for such.
    monkeypatch.setattr("kvcast.hostagent.standing._HUGE_PAGE_BYTES", 1)
    async with pool_of_two(tmp_path) as (pool, client):
        index = pool.agents[1].index_file
        assert index is not None
        assert not Path(index.path).is_relative_to(tmp_path)
        before = requests(pool)
        (block,) = await client.get(1, [key_of(3)])
        assert block is not None
        assert bytes(block.data) == noise(3, 11000)
        block.release()
        assert requests(pool) == before
    assert not Path(index.path).exists()
