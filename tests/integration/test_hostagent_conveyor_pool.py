"""Conveyors between real agents, each a process with its own event loop.

Oracle: the bytes that were put, and the agents' counters. Cannot see: times, and what is in the
kernel when a process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time

import pytest
from kvcast.bench.incast import home_keys
from kvcast.bench.processor_time import processor_time_s
from kvcast.hostagent import membarrier
from kvcast.hostagent.client import AsyncClient, KvcastError
from kvcast.hostagent.time_slice import LONGER
from kvcast.topologies.pool import Pool
from scheduling import scheduling_of
from two_agents import HOME, OTHER, PATIENCE_S, TwoClients, content_of, on_a_pool, on_clients

pytestmark = pytest.mark.skipif(
    not membarrier.available(), reason="no membarrier(2), or not x86-64"
)


class Engines(TwoClients):
    """A client on each side; blocks are put at home, and read from there."""

    def put(self, key: bytes, size_bytes: int) -> None:
        self.home.put(self.namespace, {key: content_of(key, size_bytes)})

    def get(self, key: bytes, size_bytes: int) -> None:
        (block,) = self.other.get(self.namespace, [key], PATIENCE_S)
        assert block is not None
        assert bytes(block.data) == content_of(key, size_bytes)
        assert block.tier in ("home", "bulk")
        block.release()

    def look(self, key: bytes, size_bytes: int) -> None:
        self.get(key, size_bytes)

    def conveyed_bytes(self) -> float:
        """What came by conveyors, and of the courier by anything."""
        return self.other.stats()["courier_conveyed_bytes_total"]


@on_clients(Engines)
def test_large_blocks_come_by_the_conveyor_once_there_is_one(
    engines: Engines, keys: list[bytes]
) -> None:
    sizes = [300_000] * 12 + [1_000_000] * 12 + [5_000_000] * 6
    for key, size_bytes in zip(keys, sizes, strict=False):
        engines.put_and_look(key, size_bytes)
    # A machine that is busy may take longer than the courier waits, so some come otherwise.
    assert engines.conveyed_bytes() > 0
    sent = engines.home.stats()
    received = engines.other.stats()
    by_tcp = received["payload_bytes_received_bulk_get_total"]
    assert sent["payload_bytes_sent_bulk_get_total"] == by_tcp
    assert by_tcp + received["payload_bytes_received_udp_total"] == sum(sizes)


@on_clients(Engines)
def test_a_conveyor_that_was_idle_for_some_seconds_goes_on(
    engines: Engines, keys: list[bytes]
) -> None:
    left = iter(keys)
    conveyed = 0.0
    for pause_s in (0.0, 6.0):
        time.sleep(pause_s)
        while engines.conveyed_bytes() <= conveyed:  # others may keep the processors busy
            engines.put_and_look(next(left), 1_000_000)
        conveyed = engines.conveyed_bytes()
    assert engines.other.stats()["bulk_failures_total"] == 0


@on_clients(Engines)
def test_many_blocks_come_by_one_question(engines: Engines, keys: list[bytes]) -> None:
    size_bytes = 40_000
    for key in keys[:30]:
        engines.put(key, size_bytes)
    engines.get(keys[0], size_bytes)
    for part in (keys[1:12], keys[12:24], keys[24:36]):
        outcomes = engines.other.get_outcomes(engines.namespace, part, PATIENCE_S)
        for key, outcome in zip(part, outcomes, strict=True):
            if key in keys[:30]:
                assert outcome.block is not None
                with outcome.block as block:
                    assert bytes(block.data) == content_of(key, size_bytes)
            else:
                assert (outcome.status, outcome.reason) == ("miss", "not_found")
    stats = engines.other.stats()
    assert stats["gets_total"] == 36
    assert stats["misses_total"] == 6


@on_clients(Engines)
def test_what_is_here_of_many_blocks_whose_first_and_last_are_not_is_taken_from_here(
    engines: Engines, keys: list[bytes]
) -> None:
    size_bytes = 40_000
    for key in keys[:30]:
        engines.put(key, size_bytes)
    for key in (*keys[:2], *keys[10:13]):  # the first two: there is a conveyor from then on
        engines.get(key, size_bytes)
    hits = engines.other.stats()["hits_local_total"]
    blocks = engines.other.get(engines.namespace, keys[2:30], PATIENCE_S)
    for key, block in zip(keys[2:30], blocks, strict=True):
        assert block is not None
        with block:
            assert bytes(block.data) == content_of(key, size_bytes)
    assert engines.other.stats()["hits_local_total"] == hits + 3


@on_clients(Engines)
def test_how_long_a_prefix_is_there_is_counted_by_the_courier(
    engines: Engines, keys: list[bytes]
) -> None:
    held, absent = keys[:20], keys[20:]
    for key in held:
        engines.put(key, 2_000)
    engines.get(held[3], 2_000)

    async def count(chain: list[bytes]) -> int:
        async with await AsyncClient.connect(str(engines.pool.sockets["node-1"])) as client:
            return await client.exists(engines.namespace, chain, PATIENCE_S)

    lookups = 0.0
    until = time.monotonic() + PATIENCE_S
    while lookups < 10:  # the first finds no conveyor
        assert time.monotonic() < until
        assert engines.other.exists(engines.namespace, held, PATIENCE_S) == 20
        assert engines.other.exists(engines.namespace, keys, PATIENCE_S) == 20
        assert engines.other.exists(engines.namespace, held * 60, PATIENCE_S) == 1200
        assert engines.other.exists(engines.namespace, [*held[:7], absent[0]], PATIENCE_S) == 7
        assert engines.other.exists(engines.namespace, absent, PATIENCE_S) == 0
        assert asyncio.run(count([*held[1:], *absent])) == 19
        lookups = engines.other.stats()["courier_lookups_total"]


@on_clients(Engines, arena_of_disks="64m")
def test_what_lies_on_the_homes_disk_comes_as_well_and_what_lies_on_ones_own_is_read_there(
    engines: Engines, keys: list[bytes]
) -> None:
    size_bytes = 500_000

    def put_and_read(keys: list[bytes]) -> None:
        for key in keys:
            engines.put(key, size_bytes)
            engines.wait_for_the_disk()
        for turn in range(2):
            tiers = []
            for first in range(0, len(keys), 4):
                engines.wait_for_the_disk()
                alone, *together = keys[first : first + 4]
                blocks = engines.other.get(engines.namespace, [alone], PATIENCE_S)
                blocks += engines.other.get(engines.namespace, together, PATIENCE_S)
                for key, block in zip(keys[first : first + 4], blocks, strict=True):
                    assert block is not None
                    with block:
                        assert bytes(block.data) == content_of(key, size_bytes)
                        tiers.append(block.tier)
            assert ("ssd" in tiers) == (turn == 1)

    until = time.monotonic() + 2 * PATIENCE_S
    # On a machine that is busy the courier may give all up before it is told that they lie below.
    for attempt in itertools.count():
        put_and_read(home_keys(engines.pool, HOME, 160, f"more than has room, {attempt}"))
        if engines.other.stats()["courier_handed_over_below_total"]:
            break
        assert time.monotonic() < until
    assert engines.conveyed_bytes() > 0
    assert engines.home.stats()["ssd_promotions_total"] > 0


@on_a_pool
async def test_a_home_that_dies_is_done_without_and_comes_back(
    pool: Pool, keys: list[bytes]
) -> None:
    size_bytes = 2_000_000
    engines = await asyncio.to_thread(Engines.warm, pool, keys[:8], size_bytes)
    assert engines.conveyed_bytes() > 0
    await pool.kill(HOME)

    def miss() -> None:
        (outcome,) = engines.other.get_outcomes(engines.namespace, [keys[9]], 0.5)
        assert outcome.block is None

    await asyncio.to_thread(miss)
    await pool.restart(HOME)

    def read_again() -> None:
        before = engines.conveyed_bytes()
        with contextlib.closing(Engines(pool)) as again:
            deadline = time.monotonic() + 2 * PATIENCE_S
            for key in itertools.cycle(keys[10:40]):
                # Both agents hear of the new map when they do, and what is asked before may fail.
                with contextlib.suppress(KvcastError):
                    for client in (again.home, again.other):
                        client.drop(again.namespace, [key])
                    again.put(key, size_bytes)
                    (block,) = again.other.get(again.namespace, [key], 2.0)
                    if block is not None:
                        assert bytes(block.data) == content_of(key, size_bytes)
                        block.release()
                if again.conveyed_bytes() > before:
                    return
                assert time.monotonic() < deadline, "there is no conveyor again"
                time.sleep(0.02)

    await asyncio.to_thread(read_again)
    engines.close()


@on_clients(Engines)
def test_a_home_that_stands_still_is_not_waited_for(engines: Engines, keys: list[bytes]) -> None:
    size_bytes = 2_000_000
    for key in keys[:8]:
        engines.put_and_look(key, size_bytes)
    for key in keys[8:12]:
        engines.put(key, size_bytes)
    engines.pool.pause(HOME)
    try:
        (outcome,) = engines.other.get_outcomes(engines.namespace, [keys[8]], 0.3)
        assert outcome.block is None
    finally:
        engines.pool.resume(HOME)
    for key in keys[9:12]:
        engines.get(key, size_bytes)


@on_clients(Engines, polls=True)
def test_agents_that_poll_take_a_processor_while_nothing_happens_and_serve_all_the_same(
    engines: Engines, keys: list[bytes]
) -> None:
    pid = engines.pool.pids[HOME]
    assert pid is not None
    enough_s, until = processor_time_s(pid) + 0.5, time.monotonic() + PATIENCE_S
    while processor_time_s(pid) < enough_s:  # asleep, it would take minutes
        assert time.monotonic() < until, "it sleeps"
        time.sleep(0.05)
    for key, size_bytes in zip(keys, [30_000, 300_000] * 6, strict=False):
        engines.put_and_look(key, size_bytes)


@on_clients(Engines)
def test_agents_give_way_to_whoever_wakes(engines: Engines, keys: list[bytes]) -> None:
    for node in (HOME, OTHER):
        pid = engines.pool.pids[node]
        assert pid is not None
        assert scheduling_of(pid).slice_ns == round(scheduling_of(0).slice_ns * LONGER)
