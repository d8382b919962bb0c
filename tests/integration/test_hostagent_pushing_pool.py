"""Puts that go home in compiled code, between real agents, each a process with its own event loop.

Oracle: the bytes that were put, read at their home, and the agents' counters. Cannot see: times,
and what is in the kernel when a process dies. On a machine that is busy some puts may take longer
than a connection may stand still, and go otherwise; none may be lost or wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Literal

import pytest
from kvcast.bench.incast import home_keys
from kvcast.hostagent import membarrier
from kvcast.hostagent.client import AsyncClient, Client, KvcastError
from kvcast.protocol.messages.questions import ACK_HOME, PUT, PUT_QUESTION
from kvcast.topologies.pool import Pool
from two_agents import HOME, OTHER, PATIENCE_S, TwoClients, content_of, on_a_pool, on_clients

pytestmark = pytest.mark.skipif(
    not membarrier.available(), reason="no membarrier(2), or not x86-64"
)

_PUT = "courier_put_total"


def wait_until_nothing_is_held(client: Client) -> None:
    """All can be evicted, but for what is kept ready for blocks to come."""
    until = time.monotonic() + PATIENCE_S
    while (stats := client.stats())["arena_held_bytes"] != stats["arena_ready_bytes"]:
        assert time.monotonic() < until
        time.sleep(0.05)


def ask_until_cut_off(client: Client) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        client.stats()


class Engines(TwoClients):
    """Blocks are put beside the other agent."""

    def put(self, key: bytes, size_bytes: int) -> None:
        self.other.put(self.namespace, {key: content_of(key, size_bytes)})

    def put_in_place(self, key: bytes, size_bytes: int) -> None:
        with self.other.reserve(self.namespace, {key: size_bytes}) as room:
            room.views[key][:] = content_of(key, size_bytes)
            self.other.commit(room)

    def look(self, key: bytes, size_bytes: int) -> None:
        """The home has it, and so has the node that has put it."""
        for client in (self.home, self.other):
            assert self.tier_of(client, key, size_bytes) == "local"

    def tier_of(self, client: Client, key: bytes, size_bytes: int) -> str:
        """From where a client gets a block, whose bytes are right."""
        (block,) = client.get(self.namespace, [key], PATIENCE_S)
        assert block is not None
        with block:
            assert bytes(block.data) == content_of(key, size_bytes)
            return block.tier

    def pushed(self) -> float:
        """Puts that went by compiled code."""
        return self.other.stats()[_PUT]


@on_clients(Engines)
def test_puts_of_any_size_are_at_home_when_they_return(engines: Engines, keys: list[bytes]) -> None:
    sizes = [30_000] * 14 + [300_000] * 14 + [5_000_000] * 10
    for number, (key, size_bytes) in enumerate(zip(keys, sizes, strict=False)):
        if number % 7 < 4:
            engines.put(key, size_bytes)
        else:
            engines.put_in_place(key, size_bytes)
        engines.look(key, size_bytes)
    assert engines.pushed() > 0
    ours, theirs = engines.other.stats(), engines.home.stats()
    assert ours["puts_total"] == len(sizes)
    assert ours["puts_failed_total"] == 0
    assert theirs["courier_put_taken_total"] >= ours[_PUT]
    assert theirs["courier_put_wrong_digest_total"] == 0


@on_clients(Engines, arena_of_disks="64m")
def test_puts_between_nodes_with_disks_go_so_too(engines: Engines, keys: list[bytes]) -> None:
    size_bytes = 500_000
    keys = home_keys(engines.pool, HOME, 160, "more than the arena has room for")
    for key in keys:
        engines.put(key, size_bytes)
        engines.wait_for_the_disk()
    tiers = []
    for key in keys:
        tiers.append(engines.tier_of(engines.home, key, size_bytes))
        engines.wait_for_the_disk()
    assert "ssd" in tiers
    assert engines.pushed() > 0
    assert engines.home.stats()["courier_put_taken_total"] > 0


@on_clients(Engines)
def test_many_blocks_are_put_by_one_question_each_where_it_belongs(
    engines: Engines, keys: list[bytes]
) -> None:
    size_bytes = 50_000
    mine = home_keys(engines.pool, OTHER, 40, "mine")
    for first in range(0, 40, 10):
        # Blocks of both nodes' homes, so that one question is answered from all sides.
        some = [*keys[first : first + 10], *mine[first : first + 10]]
        blocks = {key: content_of(key, size_bytes) for key in some}
        engines.other.put(engines.namespace, blocks)
        for key in some:
            assert engines.tier_of(engines.other, key, size_bytes) == "local"
            engines.tier_of(engines.home, key, size_bytes)
    stats = engines.other.stats()
    assert stats[_PUT] > 0, "those that are at home here, at least"
    assert stats["puts_total"] == 80
    assert stats["puts_failed_total"] == 0


@on_clients(Engines)
def test_what_is_waited_for_is_as_the_caller_says(engines: Engines, keys: list[bytes]) -> None:
    size_bytes = 60_000
    acks: list[Literal["local", "home", "replicas"]] = ["local", "home", "replicas"]
    for number, ack in enumerate(acks):
        mine = keys[12 * number : 12 * number + 12]
        for key in mine[:4]:
            engines.other.put(engines.namespace, {key: content_of(key, size_bytes)}, ack=ack)
        blocks = {key: content_of(key, size_bytes) for key in mine[4:]}
        engines.other.put(engines.namespace, blocks, ack=ack)
        assert engines.pushed() > 0
        end = time.monotonic() + PATIENCE_S
        while ack == "local" and engines.home.exists(engines.namespace, mine) < len(mine):
            assert time.monotonic() < end, "the home was not given what was put"
            time.sleep(0.01)
        for key in mine:
            assert engines.tier_of(engines.other, key, size_bytes) == "local"
            engines.tier_of(engines.home, key, size_bytes)


@on_clients(Engines)
def test_blocks_that_came_together_are_given_back_together(
    engines: Engines, keys: list[bytes]
) -> None:
    size_bytes = 40_000
    for key in keys[:20]:
        engines.home.put(engines.namespace, {key: content_of(key, size_bytes)})
    blocks = engines.other.get(engines.namespace, keys[:20], PATIENCE_S)
    assert None not in blocks
    said = engines.other.stats()["local_requests_total"]
    for block in blocks:
        assert block is not None
        block.release()
    stats = engines.other.stats()
    assert stats["local_requests_total"] <= said + 2, "one for all, and the next question"
    wait_until_nothing_is_held(engines.other)


@on_a_pool
async def test_clients_that_put_at_once_do_not_mix_their_blocks(
    pool: Pool, keys: list[bytes]
) -> None:
    size_bytes = 700_000

    def put(mine: list[bytes]) -> None:
        with contextlib.closing(Engines(pool)) as engines:
            for key in mine:
                engines.put_and_look(key, size_bytes)

    await asyncio.gather(*(asyncio.to_thread(put, keys[n::4]) for n in range(4)))


@on_a_pool
async def test_the_asynchronous_client_puts_in_the_same_way(pool: Pool, keys: list[bytes]) -> None:
    size_bytes = 200_000
    engines = await asyncio.to_thread(Engines, pool)
    client = await AsyncClient.connect(str(pool.sockets[OTHER]))
    try:
        namespace = await client.namespace("t", "m", "1", "bytes")
        for key in keys[:12]:
            await client.put(namespace, {key: content_of(key, size_bytes)})
            await asyncio.to_thread(engines.look, key, size_bytes)
        assert await asyncio.to_thread(engines.pushed) > 0
    finally:
        await client.close()
        engines.close()


@on_a_pool
async def test_a_home_that_dies_is_done_without_and_comes_back(
    pool: Pool, keys: list[bytes]
) -> None:
    size_bytes = 2_000_000

    engines = await asyncio.to_thread(Engines.warm, pool, keys[:8], size_bytes)
    assert engines.pushed() > 0
    await pool.kill(HOME)

    def refused() -> None:
        with pytest.raises(KvcastError):
            engines.put(keys[9], size_bytes)

    await asyncio.to_thread(refused)
    await pool.restart(HOME)
    await asyncio.to_thread(engines.close)

    def put_again() -> None:
        with contextlib.closing(Engines(pool)) as again:
            deadline = time.monotonic() + PATIENCE_S
            while True:  # both agents hear of the new map when they do
                try:
                    again.put(keys[10], size_bytes)
                    break
                except KvcastError:
                    if time.monotonic() > deadline:
                        raise
            for key in keys[11:30]:
                again.put_and_look(key, size_bytes)

    await asyncio.to_thread(put_again)


@on_clients(Engines)
def test_a_client_that_dies_in_the_middle_leaves_nothing_held(
    engines: Engines, keys: list[bytes]
) -> None:
    size_bytes = 8_000_000
    for key in keys[:4]:
        engines.put_in_place(key, size_bytes)
    gone = Client(str(engines.pool.sockets[OTHER]))
    namespace = gone.namespace("t", "m", "1", "bytes")
    room = gone.reserve(namespace, {keys[5]: size_bytes})
    room.views[keys[5]][:] = content_of(keys[5], size_bytes)
    (ticket,) = room.tickets
    courier = gone._courier
    assert courier is not None
    question = PUT_QUESTION.pack(PUT, namespace, ACK_HOME, 77, keys[5], 0, ticket)
    courier.send(question, socket.MSG_DONTWAIT)
    gone._socket.shutdown(socket.SHUT_RDWR)
    gone.close()
    # It had said that it is a block: if that was heard, it is one, and whole.
    (block,) = engines.home.get(engines.namespace, [keys[5]], 0.5)
    if block is not None:
        assert bytes(block.data) == content_of(keys[5], size_bytes)
        block.release()
    for key in keys[6:12]:
        engines.put_and_look(key, size_bytes)
    wait_until_nothing_is_held(engines.other)


@on_clients(Engines)
def test_what_is_no_put_ends_a_connection_and_nobody_elses(
    engines: Engines, keys: list[bytes]
) -> None:
    engines.put(keys[0], 30_000)
    hostile = Client(str(engines.pool.sockets[OTHER]))
    courier = hostile._courier
    assert courier is not None
    courier.send(PUT_QUESTION.pack(PUT, 1, 9, 1, keys[0], 0, 1))
    with pytest.raises(KvcastError):
        ask_until_cut_off(hostile)
    hostile.close()
    engines.put(keys[1], 30_000)
    engines.look(keys[1], 30_000)
