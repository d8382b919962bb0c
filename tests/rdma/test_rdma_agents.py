"""Whole agents with RDMA: what clients get and put goes by READ and WRITE, and comes right whatever
breaks.

Oracle: the bytes that were put, and what the agents count. All agents are in this process and on
one emulated card, so nothing here sees packets lost between machines. Soft-RoCE keeps a window to
its queue pair and its kind of access, but not to its bounds, as real cards do: no test can see that
here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hostagent_harness import MIB, Options, Pool, key_of, running_pool, until
from kvcast.hostagent.core.metrics import Metrics
from kvcast.protocol.links.rdma import RdmaOptions, VerbsError
from kvcast.protocol.messages.wire import BlockId

SIZE = MIB - 4099
PATIENCE_S = 60.0

MakePool = Callable[[RdmaOptions], AbstractAsyncContextManager[Pool]]


@pytest.fixture
def with_rdma(tmp_path: Path) -> MakePool:
    """Makes a pool of three agents with RDMA. Nodes 1 and 2 are the homes of all blocks, in this
    order but for bucket 1."""

    def change(options: Options) -> Options:
        number = options.network.switch_port
        return replace(
            options,
            network=replace(options.network, ip=f"10.78.0.{number}", rdma="required"),
            arena=replace(options.arena, size_bytes=12 * MIB, slab_bytes=MIB),
        )

    def make(rdma: RdmaOptions) -> AbstractAsyncContextManager[Pool]:
        return running_pool(tmp_path, 3, lambda options: replace(change(options), rdma=rdma))

    return make


@pytest.fixture
async def pool(with_rdma: MakePool) -> AsyncIterator[Pool]:
    async with with_rdma(RdmaOptions()) as pool:
        yield pool


def some_blocks(count: int, bucket: int = 0) -> dict[bytes, bytes]:
    return {key_of(100 + n, bucket): Random(n).randbytes(SIZE + n) for n in range(count)}


def counted(pool: Pool, node: int) -> Metrics:
    return pool.agents[node].core.metrics


async def read_all(pool: Pool, blocks: dict[bytes, bytes]) -> None:
    """Node 3 gets all of them, right."""
    outcomes = await pool.clients[3].get_outcomes(1, list(blocks), deadline_s=PATIENCE_S)
    for outcome, data in zip(outcomes, blocks.values(), strict=True):
        assert outcome.block is not None, (outcome.status, outcome.reason)
        assert bytes(outcome.block.data) == data
        outcome.block.release()


async def test_lone_reads_are_rdma_reads_and_nothing_stays_open(pool: Pool) -> None:
    blocks = some_blocks(3)
    await pool.clients[1].put(1, blocks, ack="replicas")
    await read_all(pool, blocks)
    reader, home = counted(pool, 3), counted(pool, 1)
    assert reader.rdma_blocks_read_total == 3
    assert reader.hits_bulk_total == 3
    assert reader.rdma_fallbacks_total == 0
    assert home.payload_bytes_sent_bulk_get_total == 0
    # The home lets go of the copies when the reader says that it has read.
    await until(lambda: pool.agents[1].core.store.held_bytes == 0)


async def test_puts_are_rdma_writes_to_both_homes(pool: Pool) -> None:
    blocks = some_blocks(3)
    await pool.clients[3].put(1, blocks, ack="replicas")
    writer = counted(pool, 3)
    assert writer.rdma_blocks_written_total == 6
    assert writer.payload_bytes_sent_bulk_put_total == 0
    for node in (1, 2):
        core = pool.agents[node].core
        for key, data in blocks.items():
            copy = core.store.get(BlockId(1, key))
            assert copy is not None
            assert bytes(core.serving.view(copy)) == data


async def test_a_byte_that_rots_at_the_home_is_never_delivered(pool: Pool) -> None:
    blocks = some_blocks(1)
    await pool.clients[1].put(1, blocks, ack="replicas")
    core = pool.agents[1].core
    copy = core.store.get(BlockId(1, next(iter(blocks))))
    assert copy is not None
    core.serving.view(copy)[SIZE - 7] ^= 1
    await read_all(pool, blocks)  # from the other home
    assert counted(pool, 3).bulk_wrong_digest_total >= 1


async def test_a_home_that_dies_in_the_middle_costs_no_get(pool: Pool) -> None:
    blocks = some_blocks(4)
    await pool.clients[1].put(1, blocks, ack="replicas")
    reading = asyncio.create_task(read_all(pool, blocks))
    await until(lambda: counted(pool, 1).rdma_requests_served_total > 0)
    await pool.kill(1)
    await reading


async def test_a_card_that_falls_silent_is_noticed_and_tcp_takes_over(
    with_rdma: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    async with with_rdma(RdmaOptions(silence_s=0.5, retry_s=0.2)) as pool:
        first, second, third = (dict([item]) for item in some_blocks(3).items())
        await pool.clients[1].put(1, {**first, **second, **third}, ack="replicas")
        await read_all(pool, first)
        # The home's halves of its pairs are gone, and its TCP does not know.
        for holder in pool.agents[1].rdma_server._drivers.values():
            assert holder is not None
            holder.close()
        await read_all(pool, second)
        reader = counted(pool, 3)
        assert reader.rdma_fallbacks_total >= 1
        assert [r.message for r in caplog.records if "TCP takes over" in r.message]
        await asyncio.sleep(0.3)
        await read_all(pool, third)  # with a new pair
        assert reader.rdma_blocks_read_total == 2
        assert reader.rdma_pairs_made_total == 2


async def test_windows_that_the_home_closes_early_send_the_reader_to_tcp(
    with_rdma: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_rdma(RdmaOptions(lease_s=0.0)) as pool:
        blocks = some_blocks(2)
        await pool.clients[1].put(1, blocks, ack="local")
        await read_all(pool, blocks)
        assert counted(pool, 3).rdma_fallbacks_total >= 1
        await until(lambda: pool.agents[1].core.store.held_bytes == 0)


async def test_without_queue_pairs_left_blocks_come_by_tcp(with_rdma: MakePool) -> None:
    async with with_rdma(RdmaOptions(max_pairs=1)) as pool:
        ours, theirs = some_blocks(1), some_blocks(1, bucket=1)
        await pool.clients[1].put(1, ours, ack="local")
        await pool.clients[2].put(1, theirs, ack="local")
        await read_all(pool, ours)
        await read_all(pool, theirs)
        assert sum(counted(pool, node).rdma_refused_total for node in (1, 2, 3)) >= 1
        assert counted(pool, 3).rdma_fallbacks_total >= 1


async def test_without_memory_windows_left_blocks_come_by_tcp(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = pool.agents[1].card
    assert card is not None

    def none_left() -> None:
        raise VerbsError("no memory window is left")

    monkeypatch.setattr(card, "new_window", none_left)
    blocks = some_blocks(2)
    await pool.clients[1].put(1, blocks, ack="local")
    await read_all(pool, blocks)
    assert counted(pool, 3).rdma_fallbacks_total >= 1
    assert counted(pool, 3).rdma_blocks_read_total == 0


async def test_an_idle_pair_is_closed_and_made_again(with_rdma: MakePool) -> None:
    async with with_rdma(RdmaOptions(idle_s=0.4)) as pool:
        first, second = (dict([item]) for item in some_blocks(2).items())
        await pool.clients[1].put(1, {**first, **second}, ack="local")
        await read_all(pool, first)
        card = pool.agents[3].card
        assert card is not None
        await until(lambda: card.pairs == 0)
        await read_all(pool, second)
        reader = counted(pool, 3)
        assert reader.rdma_blocks_read_total == 2
        assert reader.rdma_fallbacks_total == 0
