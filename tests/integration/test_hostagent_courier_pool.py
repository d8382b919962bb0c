"""The courier in real agents: the wait in which it runs, its sockets, and both clients.

Oracle: the bytes that were put, and the agents' counters. Cannot see: two agents in one loop with a
courier each (the first has it), and times. Tests are of couriers that wait for longer than a busy
machine takes, but where they are about silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hostagent_harness import MIB, Pool, key_of, running_pool, until
from kvcast.hostagent import membarrier
from kvcast.hostagent.client import AgentGoneError, AsyncClient, Client
from kvcast.hostagent.core import courier as courier_core
from kvcast.hostagent.core.ssd import SsdRules
from kvcast.hostagent.network import local_server
from kvcast.hostagent.network.courier import VAIN_WAITS, CourierLoop
from kvcast.hostagent.network.datagrams import Transport
from kvcast.hostagent.options import Options, SsdOptions
from kvcast.protocol.messages.questions import ANSWER, GET, GIVEN, QUESTION
from kvcast.protocol.messages.wire import BlockId
from kvcast.protocol.requester import RequesterConfig
from kvcast.protocol.responder.responder import BlockHeat, Responder

pytestmark = pytest.mark.skipif(
    not membarrier.available(), reason="no membarrier(2), or not x86-64"
)

SIZE = 24_000
SILENT = "courier_handed_over_silence_total"


def noise(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def on_a_courier(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """Run a test on an event loop in whose waits a courier can run."""

    def run(tmp_path: Path) -> None:
        with asyncio.Runner(loop_factory=CourierLoop) as runner:
            runner.run(asyncio.wait_for(test(tmp_path), 150.0))

    run.__name__ = test.__name__
    return run


@contextlib.asynccontextmanager
async def pool_of_two(
    folder: Path,
    patience_s: float = 60.0,
    change: Callable[[Options], Options] = lambda options: options,
) -> AsyncIterator[Pool]:
    """Node 1 asks, and everything is at home at node 2; blocks 0 to 19 are there. Couriers wait so
    long for an answer."""
    with mock.patch.object(courier_core, "PATIENCE_S", patience_s):
        async with running_pool(folder, 2, change) as pool:
            pool.controller.homes_of = lambda _bucket: ["node-2"]
            pool.controller.publish()
            await pool.settled()
            await pool.clients[2].put(1, {key_of(n): noise(n) for n in range(20)})
            (first,) = await pool.clients[1].get(1, [key_of(0)], 60.0)
            assert first is not None
            assert bytes(first.data) == noise(0)
            first.release()
            yield pool


def courier_of(pool: Pool) -> dict[str, float]:
    courier = pool.agents[1].core.reads.courier
    assert courier is not None
    return {name: value for name, value in courier.values().items() if value}


@on_a_courier
async def test_both_clients_get_blocks_by_the_courier_and_give_them_back(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as pool:
        store = pool.agents[1].core.store

        def read() -> list[str]:
            tiers = []
            with Client(str(tmp_path / "1.sock")) as client:
                for number in range(1, 8):
                    (block,) = client.get(1, [key_of(number)], 60.0)
                    assert block is not None
                    assert bytes(block.data) == noise(number)
                    assert block.verify()
                    tiers.append(block.tier)
                    block.release()
            return tiers

        assert await asyncio.to_thread(read) == ["home"] * 7
        for number in range(8, 12):
            (block,) = await pool.clients[1].get(1, [key_of(number)], 60.0)
            assert block is not None
            assert bytes(block.data) == noise(number)
            block.release()
        stats = await pool.clients[1].stats()
        handed_over = sum(v for name, v in stats.items() if name.startswith("courier_handed_over"))
        assert 0 < stats["courier_given_total"] <= 11 <= stats["courier_given_total"] + handed_over
        assert stats["gets_total"] == 12
        assert stats["hits_home_total"] == 12
        await until(lambda: not any(store.peek(b).pins for b in store.blocks()))  # type: ignore[union-attr]
        received = stats["frames_received_total"]
        assert received == stats["frames_answers_total"] + stats["responder_reads_total"]


def with_a_disk(options: Options) -> Options:
    """What is not used goes to disk at once."""
    assert options.arena.path is not None
    path = options.arena.path.replace(".arena", ".ssd")
    rules = SsdRules(high_share=0.0, low_share=0.0)
    return replace(options, ssd=SsdOptions((path,), 32 * MIB, slab_bytes=MIB, rules=rules))


@on_a_courier
async def test_what_an_agents_own_disk_has_is_not_asked_of_others(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path, change=with_a_disk) as pool:
        client, core = pool.clients[1], pool.agents[1].core
        tiers = []
        for turn in range(2):
            for number in range(1, 20):
                (block,) = await client.get(1, [key_of(number)], 60.0)
                assert block is not None
                with block:
                    assert bytes(block.data) == noise(number)
                    tiers.append(block.tier)
            if turn == 0:
                await until(lambda: len(core.ssd.shelf) == 20)  # type: ignore[union-attr]
                await until(lambda: len(core.store) == 0)
        assert tiers == ["home"] * 19 + ["ssd"] * 19
        told = courier_of(pool)
        assert told["courier_given_total"] > 0
        assert told["courier_handed_over_below_total"] > 0
        assert pool.agents[2].core.values()["responder_reads_total"] <= 25, "for the first turn"


@on_a_courier
async def test_many_at_once_share_what_is_on_its_way(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as pool:
        clients = [await AsyncClient.connect(str(tmp_path / "1.sock")) for _ in range(5)]
        rounds = [
            client.get(1, [key_of(1 + (number + turn) % 19)], 60.0)
            for number, client in enumerate(clients)
            for turn in range(6)
        ]
        for blocks in await asyncio.gather(*rounds):
            (block,) = blocks
            assert block is not None
            assert block.verify()
            block.release()
        for client in clients:
            await client.close()
        assert courier_of(pool)["courier_given_total"] > 0


@on_a_courier
async def test_a_miss_and_a_lost_answer_end_as_without_a_courier(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as pool:
        client = pool.clients[1]
        (outcome,) = await client.get_outcomes(1, [key_of(99)], 60.0)
        assert outcome.block is None
        assert (outcome.status, outcome.reason) == ("miss", "not_found")
        lost = 0

        def lose(port: int, frame: bytes) -> bool:
            nonlocal lost
            lost += port == 2 and len(frame) > 1000 and lost < 3
            return port == 2 and len(frame) > 1000 and lost < 3

        pool.switch.lose = lose
        (block,) = await client.get(1, [key_of(2)], 60.0)
        assert block is not None
        assert bytes(block.data) == noise(2)
        block.release()
        assert courier_of(pool)["courier_handed_over_missed_total"] == 1
        late = "courier_handed_over_silence_total" in courier_of(pool)
        assert late or pool.agents[1].core.requester.counters.reads_partial


@on_a_courier
async def test_a_namespace_that_is_not_for_the_courier_is_hardly_asked_of_it(
    tmp_path: Path,
) -> None:
    async with pool_of_two(tmp_path) as pool:
        client = pool.clients[1]
        for _ in range(40):
            (outcome,) = await client.get_outcomes(1, [key_of(99)], 60.0)
            assert outcome.reason == "not_found"
        handed_over = sum(courier_of(pool).values())
        assert 3 <= handed_over <= 10
        for number in range(1, 20):
            (block,) = await client.get(1, [key_of(number)], 60.0)
            assert block is not None
            block.release()


@on_a_courier
async def test_clients_that_vanish_or_offend_give_back_what_they_hold(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as pool:
        core = pool.agents[1].core
        client = await AsyncClient.connect(str(tmp_path / "1.sock"))
        (block,) = await client.get(1, [key_of(3)], 60.0)
        assert block is not None
        assert block.tier == "home"
        copy = core.store.peek(BlockId(1, key_of(3)))
        assert copy is not None
        await until(lambda: copy.pins == 1)
        await client.close()
        await until(lambda: copy.pins == 0)

        other = await AsyncClient.connect(str(tmp_path / "1.sock"))
        courier = other._courier
        assert courier is not None
        asyncio.get_running_loop().remove_reader(courier.fileno())
        courier.setblocking(True)

        def say() -> bytes:
            assert courier is not None
            courier.send(QUESTION.pack(GET, 1, 1000, 7, key_of(4), 0))
            answer = courier.recv(100)
            courier.send(b"no question")
            return answer

        status, *_ = ANSWER.unpack(await asyncio.to_thread(say))
        assert status == GIVEN
        await until(lambda: core.reads.courier.counters.offences == 1)  # type: ignore[union-attr]
        taken = core.store.peek(BlockId(1, key_of(4)))
        assert taken is not None
        await until(lambda: taken.pins == 0)
        await until(lambda: not other.connected)
        with contextlib.suppress(Exception):
            await other.close()


@on_a_courier
async def test_a_client_that_offends_before_its_handshake_is_over_is_cut_off(
    tmp_path: Path,
) -> None:
    """It has its courier's socket by then, and what it says there is heard at once."""
    connection_made = local_server._Client.connection_made

    def late(client: local_server._Client, transport: asyncio.BaseTransport) -> None:
        client._server._offended(client.session)
        connection_made(client, transport)

    async with pool_of_two(tmp_path) as pool:
        before = pool.agents[1].core.metrics.local_protocol_errors_total
        with mock.patch.object(local_server._Client, "connection_made", late):
            other = await AsyncClient.connect(str(tmp_path / "1.sock"))
            await until(lambda: not other.connected)
        assert pool.agents[1].core.metrics.local_protocol_errors_total == before + 1
        with contextlib.suppress(Exception):
            await other.close()


@on_a_courier
async def test_a_client_that_does_not_read_its_answers_loses_its_courier_alone(
    tmp_path: Path,
) -> None:
    async with pool_of_two(tmp_path, courier_core.PATIENCE_S) as pool:
        client = pool.clients[1]
        courier = client._courier
        assert courier is not None
        asyncio.get_running_loop().remove_reader(courier.fileno())
        courier.setblocking(True)
        courier.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bytes(8) + bytes([1]) + bytes(7))

        def flood() -> None:
            with contextlib.suppress(OSError):
                for number in range(20_000):
                    assert courier is not None
                    courier.send(QUESTION.pack(GET, 2, 1, number, key_of(1), 0))

        await asyncio.to_thread(flood)
        client._leave_courier()
        (block,) = await client.get(1, [key_of(5)], 60.0)
        assert block is not None
        assert bytes(block.data) == noise(5)
        block.release()


@on_a_courier
async def test_a_get_that_is_cancelled_ends_at_its_courier(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path) as pool:
        pool.switch.lose = lambda _port, _frame: True
        client = pool.clients[1]
        courier = pool.agents[1].core.reads.courier
        assert courier is not None
        getting = asyncio.create_task(client.get(1, [key_of(6)], 100.0))
        await until(lambda: courier.in_flight == 1)
        getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)
        await until(lambda: not courier.in_flight)
        assert courier.values()["courier_handed_over_given_up_total"] == 1
        pool.switch.lose = lambda _port, _frame: False
        (block,) = await client.get(1, [key_of(6)], 60.0)
        assert block is not None
        assert bytes(block.data) == noise(6)
        block.release()


@on_a_courier
async def test_an_agent_that_ends_with_a_question_in_flight_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    async with pool_of_two(tmp_path) as pool:
        pool.switch.lose = lambda _port, _frame: True
        client = pool.clients[1]
        waiting = asyncio.create_task(client.get_outcomes(1, [key_of(6)], 100.0))
        agent = pool.agents.pop(1)
        courier = agent.core.reads.courier
        assert courier is not None
        await until(lambda: courier.in_flight == 1)
        await agent.close()
        with pytest.raises(AgentGoneError):
            await waiting
        assert not courier.in_flight
        store = agent.core.store
        assert not any(store.peek(block).pins for block in store.blocks())  # type: ignore[union-attr]
        store.check()


@on_a_courier
async def test_what_nobody_answers_is_handed_over_and_ends_in_time(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path, courier_core.PATIENCE_S) as pool:
        courier = pool.agents[1].core.reads.courier
        assert courier is not None
        before = courier.values()[SILENT]
        pool.switch.lose = lambda _port, _frame: True
        (outcome,) = await pool.clients[1].get_outcomes(1, [key_of(6)], 0.3)
        assert outcome.block is None
        assert outcome.status == "miss"
        assert courier.values()[SILENT] == before + 1


@on_a_courier
async def test_what_is_waited_for_in_vain_is_not_watched_for(tmp_path: Path) -> None:
    async with pool_of_two(tmp_path, courier_core.PATIENCE_S) as pool:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CourierLoop)
        driver = loop.selector.runs
        assert driver is not None
        pool.switch.lose = lambda _port, _frame: True
        for number in range(6, 12):  # by then it may watch again
            await pool.clients[1].get_outcomes(1, [key_of(number)], 0.1)
            if driver.sleeps:
                break
            await asyncio.sleep(pool.agents[1].core.requester.config.suspect_s)
        assert 0 < driver.sleeps <= VAIN_WAITS


@on_a_courier
async def test_a_client_that_says_nothing_more_is_watched_for_once_in_a_while(
    tmp_path: Path,
) -> None:
    async with pool_of_two(tmp_path) as pool:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CourierLoop)
        driver = loop.selector.runs
        assert driver is not None
        seen = set()
        for number in range(200):
            (block,) = await pool.clients[1].get(1, [key_of(1 + number % 19)])
            assert block is not None
            block.release()
            await asyncio.sleep(0.02)  # other events may end a wait before it was in vain
            seen.add(driver.leaves_alone)
            if len(seen) > 3:
                break
        assert len(seen) > 3, "counted down from VAIN_WAITS, by messages"
        assert max(seen) <= VAIN_WAITS


@on_a_courier
async def test_a_home_answers_while_it_waits_and_hears_of_it_afterwards(tmp_path: Path) -> None:
    told: list[int] = []
    close_lane = Transport.close_lane

    def closed(transport: Transport, now: float) -> bool:
        before = transport._core.responder.counters.reads_by_lane
        answered = close_lane(transport, now)
        told.append(transport._core.responder.counters.reads_by_lane - before)
        return answered

    heats: list[BlockHeat] = []
    take_heat = Responder.take_heat

    def taken(responder: Responder, most: int) -> list[BlockHeat]:
        heat = take_heat(responder, most)
        heats.extend(heat)  # as the agent does with each report, however long this takes
        return heat

    with (
        mock.patch.object(Transport, "close_lane", closed),
        mock.patch.object(Responder, "take_heat", taken),
    ):
        # A reader that repeats its READ, since the loop stands still for a moment, asks more often.
        patient = RequesterConfig(rto_initial_s=60.0, rto_min_s=60.0, rto_max_s=60.0)

        def change(options: Options) -> Options:
            return replace(options, agent=replace(options.agent, requester=patient))

        async with running_pool(tmp_path, 2, change) as pool:
            # The first agent has the loop's waits for itself: let it be the home.
            pool.controller.homes_of = lambda _bucket: ["node-1"]
            pool.controller.publish()
            await pool.settled()
            await pool.clients[1].put(1, {key_of(n): noise(n) for n in range(20)})
            for number in range(20):
                (block,) = await pool.clients[2].get(1, [key_of(number)], 60.0)
                assert block is not None
                assert bytes(block.data) == noise(number)
                block.release()
            home = pool.agents[1].core
            counters = home.responder.counters
            await until(lambda: counters.reads == 20)
            assert counters.reads_by_lane == counters.reads_answered == 20
            assert counters.payload_bytes == 20 * SIZE
            assert 0 < sum(told) <= 20, "none was answered in a wait"
            home.responder.take_heat(30)
            assert {heat.block.key for heat in heats} == {key_of(number) for number in range(20)}
            stats = await pool.clients[1].stats()
            received = stats["frames_received_total"]
            assert received == stats["frames_answers_total"] + stats["responder_reads_total"]
