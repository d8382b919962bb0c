"""Agents with two cards each: reads are spread and cut, and go on when a card is taken away.

Oracle: the bytes that were put, what the agents count, and what they log. The second card is
Soft-RoCE on a veth pair; all agents of this process share it, as they do the first. Cannot see: how
fast several cards are, NUMA nodes (the machine has one), or that a card's registration is lost.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hostagent_harness import MIB, Options, Pool, key_of, running_pool, until
from kvcast.protocol.links.cards import LinkCard
from kvcast.protocol.links.rdma import RdmaOptions

PATIENCE_S = 60.0
CARD, INTERFACE = "rxe1", "kv1"

MakePool = Callable[[RdmaOptions], AbstractAsyncContextManager[Pool]]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture(scope="module", autouse=True)
def second_card() -> Iterator[None]:
    ip("link", "add", INTERFACE, "mtu", "9000", "type", "veth", "peer", "name", "kv2")
    for name in (INTERFACE, "kv2"):
        ip("link", "set", name, "up")
    ip("address", "add", "10.81.0.1/24", "dev", INTERFACE)
    words = ("rdma", "link", "add", CARD, "type", "rxe", "netdev", INTERFACE)
    subprocess.run(words, check=True)
    yield
    subprocess.run(["rdma", "link", "delete", CARD], check=True)
    ip("link", "delete", INTERFACE)


@pytest.fixture
def with_cards(tmp_path: Path) -> MakePool:
    """Makes a pool of three agents with two cards each."""

    def change(options: Options) -> Options:
        number = options.network.switch_port
        network = replace(
            options.network, ip=f"10.78.0.{number}", rdma="required", rdma_devices=("all",)
        )
        arena = replace(options.arena, size_bytes=32 * MIB, slab_bytes=MIB)
        return replace(options, network=network, arena=arena)

    def make(rdma: RdmaOptions) -> AbstractAsyncContextManager[Pool]:
        return running_pool(tmp_path, 3, lambda options: replace(change(options), rdma=rdma))

    return make


@pytest.fixture
async def pool(with_cards: MakePool) -> AsyncIterator[Pool]:
    async with with_cards(RdmaOptions()) as pool:
        await put(pool, {key_of(1): b"x" * 100_000})
        await read(pool, {key_of(1): b"x" * 100_000})
        # Both cards stand in connection with the home.
        await until(lambda: [card.counters.pairs_made for card in links(pool)] == [1, 1])
        yield pool


def links(pool: Pool) -> list[LinkCard]:
    """The cards of node 3, which reads."""
    cards = pool.agents[3].cards
    assert cards is not None
    return sorted(cards.links, key=lambda card: card.name)


async def put(pool: Pool, blocks: dict[bytes, bytes]) -> None:
    await pool.clients[1].put(1, blocks, ack="local")


async def read(pool: Pool, blocks: dict[bytes, bytes]) -> None:
    """Node 3 gets all of them, right."""
    outcomes = await pool.clients[3].get_outcomes(1, list(blocks), deadline_s=PATIENCE_S)
    for outcome, data in zip(outcomes, blocks.values(), strict=True):
        assert outcome.block is not None, (outcome.status, outcome.reason)
        assert bytes(outcome.block.data) == data
        outcome.block.release()


def some_blocks(first: int, count: int, size: int) -> dict[bytes, bytes]:
    return {key_of(n): Random(n).randbytes(size) for n in range(first, first + count)}


@pytest.mark.parametrize(("count", "size"), [(8, MIB - 5), (1, 9 * MIB - 5)])
async def test_both_cards_read_and_each_byte_is_read_once(
    pool: Pool, count: int, size: int
) -> None:
    blocks = some_blocks(100, count, size)
    await put(pool, blocks)
    metrics, cards = pool.agents[3].core.metrics, links(pool)
    before = metrics.rdma_bytes_read_total
    await read(pool, blocks)
    assert min(card.counters.bytes_read for card in cards) >= count * size // 5
    assert count * size - 65_536 <= metrics.rdma_bytes_read_total - before <= count * size
    assert sum(card.counters.bytes_read for card in cards) == metrics.rdma_bytes_read_total
    assert metrics.rdma_fallbacks_total == metrics.rdma_calls_moved_total == 0
    # At the home, each of the two pairs is on the card in its caller's network.
    met = pool.agents[1].rdma_server._across.values()
    assert sorted(across.card.name for across in met if across.card is not None) == ["rxe0", CARD]
    await until(lambda: pool.agents[1].core.store.held_bytes == 0)


@pytest.mark.parametrize(("count", "size"), [(12, MIB - 5), (1, 12 * MIB - 5)])
async def test_a_card_that_is_taken_away_in_the_middle_is_left_out_and_comes_back(
    pool: Pool, count: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = some_blocks(200, count, size)
    await put(pool, blocks)
    own, other = links(pool)
    metrics = pool.agents[3].core.metrics
    reading = asyncio.create_task(read(pool, blocks))
    await until(lambda: other.blocks > 0)
    ip("link", "set", INTERFACE, "down")
    try:
        await until(lambda: other.problem != "")
        assert not reading.done()
        await reading
        assert other.counters.bytes_read < count * size // 2
        assert metrics.rdma_calls_moved_total >= 1
        assert metrics.rdma_fallbacks_total == 0, "TCP had to help"
        assert other.counters.failures >= 1
        assert other.blocks == 0
        left_out = f"RDMA card {CARD} is left out: its port is down"
        said = [record.getMessage() for record in caplog.records]
        assert said.count(left_out) == len(pool.agents), "each agent says it once"
        assert not [text for text in said if "TCP takes over" in text]
    finally:
        ip("link", "set", INTERFACE, "up")
    await until(lambda: other.problem == "")
    await asyncio.sleep(1.1)  # the pause
    before = other.counters.bytes_read
    for first in range(300, 340, 4):  # its connection is made with the first, and is on trial then
        later = some_blocks(first, 4, MIB // 4)
        await put(pool, later)
        await read(pool, later)
    assert other.counters.bytes_read >= before + MIB
    assert own.counters.failures == 0


async def test_a_way_that_falls_silent_is_left_out(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """As if a cable were cut behind the next switch: no port is down."""
    other = links(pool)[1]
    server = pool.agents[1].rdma_server
    for driver, across in server._across.items():
        holder = server._drivers[driver]
        if across.card is not None and across.card.name == CARD and holder is not None:
            holder.close()
    blocks = some_blocks(400, 6, MIB - 5)
    await put(pool, blocks)
    await read(pool, blocks)
    metrics = pool.agents[3].core.metrics
    assert metrics.rdma_calls_moved_total >= 1
    assert metrics.rdma_fallbacks_total == 0
    assert (other.problem, other.counters.failures) == ("", 1)
    said = [text for text in caplog.messages if "other cards go on" in text]
    assert len(said) == 1
    assert f"by {CARD} failed" in said[0]


async def test_a_home_whose_card_is_of_no_use_tells_those_who_read_by_it(pool: Pool) -> None:
    """By the end of their connections, and not by their cards' time-outs: nothing else is wrong."""
    other = links(pool)[1]
    cards = pool.agents[1].cards
    assert cards is not None
    blocks = some_blocks(500, 12, MIB - 5)
    await put(pool, blocks)
    reading = asyncio.create_task(read(pool, blocks))
    await until(lambda: other.blocks > 0)
    next(card for link, card in cards._of.items() if link.name == CARD).happened("its port is down")
    await reading
    metrics = pool.agents[3].core.metrics
    assert metrics.rdma_calls_moved_total >= 1
    assert metrics.rdma_fallbacks_total == 0
    assert other.counters.failures >= 1
    met = pool.agents[1].rdma_server._across.values()
    assert CARD not in [across.card.name for across in met if across.card is not None]
