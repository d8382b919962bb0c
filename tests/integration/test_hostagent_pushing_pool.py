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

import pytest
from kvcast.hostagent import membarrier
from kvcast.hostagent.client import AsyncClient, Client, KvcastError
from kvcast.protocol.messages.questions import ACK_HOME, PUT, PUT_QUESTION
from kvcast.topologies.pool import Pool
from test_hostagent_conveyor_pool import HOME, READER, content_of, on_a_pool

pytestmark = pytest.mark.skipif(
    not membarrier.available(), reason="no membarrier(2), or not x86-64"
)

PATIENCE_S = 20.0
_PUT = "courier_put_total"


def held_bytes(client: Client) -> float:
    """What cannot be evicted, but for what is kept ready for blocks to come."""
    stats = client.stats()
    return stats["arena_held_bytes"] - stats["arena_ready_bytes"]


def ask_until_cut_off(client: Client) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        client.stats()


class Engines:
    """A client beside the home of every block, and one that puts."""

    def __init__(self, pool: Pool) -> None:
        self.home, self.putter = (Client(str(pool.sockets[node])) for node in (HOME, READER))
        self.namespace = self.home.namespace("t", "m", "1", "bytes")
        assert self.putter.namespace("t", "m", "1", "bytes") == self.namespace

    def close(self) -> None:
        self.home.close()
        self.putter.close()

    def put(self, key: bytes, size_bytes: int) -> None:
        self.putter.put(self.namespace, {key: content_of(key, size_bytes)})

    def put_in_place(self, key: bytes, size_bytes: int) -> None:
        with self.putter.reserve(self.namespace, {key: size_bytes}) as room:
            room.views[key][:] = content_of(key, size_bytes)
            self.putter.commit(room)

    def look(self, key: bytes, size_bytes: int) -> None:
        """The home has it, and so has the node that has put it."""
        for client in (self.home, self.putter):
            (block,) = client.get(self.namespace, [key], PATIENCE_S)
            assert block is not None
            assert bytes(block.data) == content_of(key, size_bytes)
            assert block.tier == "local"
            block.release()

    def pushed(self) -> float:
        """Puts that went by compiled code."""
        return self.putter.stats()[_PUT]


@on_a_pool
async def test_puts_of_any_size_are_at_home_when_they_return(pool: Pool, keys: list[bytes]) -> None:
    def put() -> None:
        with contextlib.closing(Engines(pool)) as engines:
            sizes = [30_000] * 14 + [300_000] * 14 + [5_000_000] * 10
            for number, (key, size_bytes) in enumerate(zip(keys, sizes, strict=False)):
                if number % 7 < 4:
                    engines.put(key, size_bytes)
                else:
                    engines.put_in_place(key, size_bytes)
                engines.look(key, size_bytes)
            assert engines.pushed() > 0
            ours, theirs = engines.putter.stats(), engines.home.stats()
            assert ours["puts_total"] == len(sizes)
            assert ours["puts_failed_total"] == 0
            assert theirs["courier_put_taken_total"] >= ours[_PUT]
            assert theirs["courier_put_wrong_digest_total"] == 0

    await asyncio.to_thread(put)


@on_a_pool
async def test_clients_that_put_at_once_do_not_mix_their_blocks(
    pool: Pool, keys: list[bytes]
) -> None:
    size_bytes = 700_000

    def put(mine: list[bytes]) -> None:
        with contextlib.closing(Engines(pool)) as engines:
            for key in mine:
                engines.put(key, size_bytes)
                engines.look(key, size_bytes)

    await asyncio.gather(*(asyncio.to_thread(put, keys[n::4]) for n in range(4)))


@on_a_pool
async def test_the_asynchronous_client_puts_in_the_same_way(pool: Pool, keys: list[bytes]) -> None:
    size_bytes = 200_000
    engines = await asyncio.to_thread(Engines, pool)
    client = await AsyncClient.connect(str(pool.sockets[READER]))
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

    def warm() -> Engines:
        engines = Engines(pool)
        for key in keys[:8]:
            engines.put(key, size_bytes)
            engines.look(key, size_bytes)
        return engines

    engines = await asyncio.to_thread(warm)
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
                again.put(key, size_bytes)
                again.look(key, size_bytes)

    await asyncio.to_thread(put_again)


@on_a_pool
async def test_a_client_that_dies_in_the_middle_leaves_nothing_held(
    pool: Pool, keys: list[bytes]
) -> None:
    size_bytes = 8_000_000

    def put_and_go() -> None:
        with contextlib.closing(Engines(pool)) as engines:
            for key in keys[:4]:
                engines.put_in_place(key, size_bytes)
            gone = Client(str(pool.sockets[READER]))
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
                engines.put(key, size_bytes)
                engines.look(key, size_bytes)
            until = time.monotonic() + PATIENCE_S
            while held_bytes(engines.putter) and time.monotonic() < until:
                time.sleep(0.05)
            assert held_bytes(engines.putter) == 0

    await asyncio.to_thread(put_and_go)


@on_a_pool
async def test_what_is_no_put_ends_a_connection_and_nobody_elses(
    pool: Pool, keys: list[bytes]
) -> None:
    def offend() -> None:
        with contextlib.closing(Engines(pool)) as engines:
            engines.put(keys[0], 30_000)
            hostile = Client(str(pool.sockets[READER]))
            courier = hostile._courier
            assert courier is not None
            courier.send(PUT_QUESTION.pack(PUT, 1, 9, 1, keys[0], 0, 1))
            with pytest.raises(KvcastError):
                ask_until_cut_off(hostile)
            hostile.close()
            engines.put(keys[1], 30_000)
            engines.look(keys[1], 30_000)

    await asyncio.to_thread(offend)
