"""Blocks that leave DRAM for an agent's disk, and come back, over real sockets and files.

The oracle is what was put. Which block lies where, the agents' counters tell; a disk that fails is
made by wrapping what its threads call.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hostagent_harness import MIB, Pool, key_of, running_pool, until
from huge_pages import huge_pages
from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.core.ssd import SsdRules, SsdTier
from kvcast.hostagent.network.metrics_server import metrics_of
from kvcast.hostagent.options import Options, SsdOptions
from kvcast.hostagent.tiers.ssd import files
from kvcast.hostagent.tiers.ssd.layout import SsdError
from kvcast.hostagent.tiers.ssd.orders import Kind, Order
from kvcast.protocol.messages.control import NamespaceSettings
from kvcast.protocol.messages.wire import BlockId

BLOCK = 48 * 1024 + 100
"""Bytes: no multiple of any sector."""


def with_ssd(*nodes: int, size_bytes: int = 32 * MIB) -> Callable[[Options], Options]:
    """These nodes have a disk, of slabs of 1 MiB; all have an arena of 1 MiB."""

    def change(options: Options) -> Options:
        options = replace(options, arena=replace(options.arena, size_bytes=MIB))
        if options.network.switch_port not in nodes:
            return options
        assert options.arena.path is not None
        path = options.arena.path.replace(".arena", ".ssd")
        return replace(options, ssd=SsdOptions((path,), size_bytes, slab_bytes=MIB, threads=4))

    return change


def block_of(number: int, size: int = BLOCK) -> bytes:
    return random.Random(number).randbytes(size)


async def put(
    pool: Pool, node: int, numbers: range, namespace: int = 1, *, paced: bool = True
) -> None:
    """Put blocks on a node; `paced`: no faster than its disk takes what leaves its DRAM."""
    for number in numbers:
        await pool.clients[node].put(namespace, {key_of(number): block_of(number)}, ack="local")
        ssd = pool.agents[node].ssd
        if paced and ssd is not None and ssd.tier is not None:
            await until(lambda tier=ssd.tier: not tier.is_behind)  # type: ignore[misc]


async def tier_of(client: AsyncClient, number: int, namespace: int = 1, bucket: int = 0) -> str:
    """Where a block came from, "" if it did not; its bytes are those that were put."""
    (block,) = await client.get(namespace, [key_of(number, bucket)], deadline_s=30.0)
    if block is None:
        return ""
    with block:
        assert bytes(block.data) == block_of(number)
        return block.tier


def homes(pool: Pool, *names: str) -> None:
    """These nodes are the homes of all blocks."""
    pool.controller.homes_of = lambda _bucket: list(names)
    pool.controller.publish()


def tier_at(pool: Pool, node: int) -> SsdTier:
    ssd = pool.agents[node].ssd
    assert ssd is not None
    assert ssd.tier is not None
    return ssd.tier


async def idle(pool: Pool, node: int) -> None:
    """Everything that is to be moved has been, and nothing contradicts itself."""
    tier = tier_at(pool, node)
    await until(lambda: tier.get_timer(0.0) is None and not tier.values()["ssd_writes_waiting"])
    tier.check()
    pool.agents[node].core.store.check()


async def test_what_leaves_dram_is_served_from_disk_to_clients_here(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 1, with_ssd(1)) as pool:
        client = pool.clients[1]
        await put(pool, 1, range(80))  # four times the arena
        await idle(pool, 1)
        tiers = [await tier_of(client, number) for number in range(80)]
        assert set(tiers) == {"local", "ssd"}
        counters = tier_at(pool, 1).counters
        assert counters.demotions_room >= 50
        assert counters.promotions == tiers.count("ssd")
        assert counters.left_unwritten == counters.damaged == counters.read_errors == 0
        assert pool.agents[1].core.values()["hits_ssd_total"] == tiers.count("ssd")
        assert await client.exists(1, [key_of(number) for number in range(80)]) == 80
        await idle(pool, 1)


async def test_blocks_lie_in_further_arenas_before_they_lie_on_disk(tmp_path: Path) -> None:
    await through_further_arenas(tmp_path, tmp_path)


async def test_further_arenas_may_lie_in_huge_pages(tmp_path: Path) -> None:
    with huge_pages(tmp_path / "huge", 5) as folder:
        await through_further_arenas(tmp_path, folder)
        assert os.statvfs(folder).f_bfree == 0, "they lay there"


async def through_further_arenas(tmp_path: Path, folder: Path) -> None:
    def change(options: Options) -> Options:
        options = with_ssd(1)(options)
        if not options.ssd.paths:
            return options
        arenas = ((f"{folder}/near", 3 * MIB), (f"{folder}/far", 5 * MIB))
        # A quarter of each is free, which holds all that comes down while a disk flushes.
        rules = SsdRules(high_share=0.75, low_share=0.65)
        return replace(options, ssd=replace(options.ssd, arenas=arenas, rules=rules))

    async with running_pool(tmp_path, 2, change) as pool:
        homes(pool, "node-1")
        await pool.settled()
        client = pool.clients[1]
        ssd = pool.agents[1].ssd
        assert ssd is not None
        assert [tier.name for tier in ssd.tiers] == ["arena1", "arena2", "ssd"]

        async def keep_up() -> None:
            """What comes sends others down: wait until they are there, or some are evicted."""
            await until(lambda: not any(tier.is_behind for tier in ssd.tiers))

        async def tiers_of(client: AsyncClient, numbers: Iterable[int]) -> list[str]:
            found = []
            for number in numbers:
                found.append(await tier_of(client, number))
                await keep_up()
            return found

        for number in range(160):  # 8 MiB, through 1, 2 and 4
            await put(pool, 1, range(number, number + 1), paced=False)
            await keep_up()
        for tier in ssd.tiers:
            tier.check()
        values = pool.agents[1].core.values()
        for name in ("arena1", "arena2", "ssd"):
            assert values[f"{name}_demotions_room_total"] > 0
            assert values[f"{name}_left_unwritten_total"] == 0
        lies = {m.name: m.samples[0].value for m in metrics_of(pool.agents[1].core) if m.samples}
        near, far, disk = (tier.shelf.namespace_bytes(1) for tier in ssd.tiers)
        assert lies["kvcast_namespace_arena_bytes"] == near + far != disk
        assert lies["kvcast_namespace_ssd_bytes"] == disk
        assert await client.exists(1, [key_of(number) for number in range(160)]) == 160
        tiers = await tiers_of(client, reversed(range(160)))
        assert set(tiers) == {"local", "arena", "ssd"}
        assert pool.agents[1].core.values()["hits_arena_total"] == tiers.count("arena")
        assert "" not in await tiers_of(pool.clients[2], range(0, 160, 9))
        await pool.kill(1)
        await pool.start_agent(1, change)
        await pool.settled()
        client = await pool.client(1)
        core = pool.agents[1].core
        await until(lambda: core.values()["ssd_entries_left"] == 0)
        found = [await tier_of(client, number) for number in range(160)]
        assert {"arena", "ssd"} <= set(found)
        assert found.count("") <= 40, "no more than lay in DRAM"


async def test_two_tiers_do_not_share_a_file(tmp_path: Path) -> None:
    def change(options: Options) -> Options:
        options = with_ssd(1)(options)
        arenas = ((options.ssd.paths[0], 3 * MIB),)
        return replace(options, ssd=replace(options.ssd, arenas=arenas))

    with pytest.raises(SsdError, match="belongs to a running agent"):
        async with running_pool(tmp_path, 1, change):
            pass


async def test_blocks_on_disk_are_served_to_other_nodes(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3, with_ssd(1)) as pool:
        homes(pool, "node-1")
        await pool.settled()
        await put(pool, 1, range(60))
        await idle(pool, 1)
        alone = [await tier_of(pool.clients[2], number) for number in range(10)]
        assert "" not in alone
        keys = [key_of(number) for number in range(10, 16)]
        assert await pool.clients[2].exists(1, keys) == 6
        many = await pool.clients[2].get(1, keys, deadline_s=5.0)
        for number, block in zip(range(10, 16), many, strict=True):
            assert block is not None
            with block:
                assert bytes(block.data) == block_of(number)
        both = await asyncio.gather(*(tier_of(pool.clients[node], 30, bucket=0) for node in (2, 3)))
        assert "" not in both
        assert tier_at(pool, 1).counters.promotions > 12
        assert pool.agents[1].core.values()["responder_misses_not_found_total"] == 0


async def test_the_next_agent_finds_what_lies_on_disk_and_not_what_was_dropped(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, 2, with_ssd(1)) as pool:
        homes(pool, "node-1")
        await pool.settled()
        await put(pool, 1, range(60))
        await pool.clients[1].drop(1, [key_of(number) for number in range(10)])
        await put(pool, 1, range(60, 64), namespace=2)
        await idle(pool, 1)
        held = {block.key for block in tier_at(pool, 1).shelf.blocks()}
        assert len(held) > 20
        await pool.kill(1)
        await pool.start_agent(1, with_ssd(1))
        await pool.settled()
        tier = tier_at(pool, 1)
        await until(lambda: tier.is_ready)
        assert {block.key for block in tier.shelf.blocks()} == held
        client = await pool.client(1)
        for number in range(60):
            tier_name = await tier_of(client, number)
            assert (tier_name != "") == (key_of(number) in held)
        await idle(pool, 1)


async def test_a_dropped_namespace_is_gone_from_disk_at_once(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 1, with_ssd(1)) as pool:
        client = pool.clients[1]
        await put(pool, 1, range(40))
        await put(pool, 1, range(40, 80), namespace=2)
        await idle(pool, 1)
        tier = tier_at(pool, 1)
        assert tier.shelf.namespace_bytes(1) > 0
        pool.agents[1].core.store.drop_namespace(1)
        assert tier.shelf.namespace_bytes(1) == 0
        assert await tier_of(client, 3) == ""
        await idle(pool, 1)
        assert await tier_of(client, 45, namespace=2) in ("local", "ssd")


async def test_namespaces_say_whether_and_how_much_they_use_the_disk(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 1, with_ssd(1)) as pool:
        quota = 10 * 65536
        for number, settings in (
            (1, NamespaceSettings(media=["dram"])),
            (2, NamespaceSettings(quota_bytes={"ssd": quota})),
        ):
            info = pool.controller.namespaces[number - 1]
            pool.controller.namespaces[number - 1] = msgspec.structs.replace(
                info, settings=settings
            )
        pool.controller.publish()
        await pool.settled()
        client, tier = pool.clients[1], tier_at(pool, 1)
        for step in range(8):
            await put(pool, 1, range(10 * step, 10 * step + 10), namespace=1)
            await put(pool, 1, range(1000 + 10 * step, 1010 + 10 * step), namespace=2)
            assert tier.shelf.namespace_bytes(1) == 0
            assert tier.shelf.namespace_bytes(2) <= quota
        await idle(pool, 1)
        assert tier.shelf.namespace_bytes(2) > quota - 65536
        assert await tier_of(client, 1000, namespace=2) == ""
        misses = pool.agents[1].core.namespace_metrics()[2].misses
        assert misses["evicted_ssd"] == 1


async def on_disk_here_and_in_dram_there(pool: Pool, numbers: range) -> None:
    """Node 1 has 60 blocks and more, most of them on its disk; node 2, the other home, some."""
    homes(pool, "node-1")
    await pool.settled()
    await put(pool, 1, range(60))
    for number in numbers:
        assert await tier_of(pool.clients[2], number)
    await put(pool, 1, range(60, 80))
    await idle(pool, 1)
    homes(pool, "node-1", "node-2")
    await pool.settled()
    for number in numbers:
        assert pool.agents[1].core.store.peek(BlockId(1, key_of(number))) is None


async def test_a_disk_that_stands_still_holds_up_nobody_who_reads_dram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, 2, with_ssd(1)) as pool:
        await on_disk_here_and_in_dram_there(pool, range(5))
        gate = threading.Event()
        do = files._Own.do

        def slow(own: files._Own, order: Order, file: files.SsdFile) -> int:
            gate.wait(150)
            return do(own, order, file)

        monkeypatch.setattr(files._Own, "do", slow)
        try:
            waiting = asyncio.create_task(tier_of(pool.clients[1], 0))
            newest = await tier_of(pool.clients[1], 79)
            assert newest == "local"
            assert await waiting in ("home", "bulk", "shared")
            await put(pool, 1, range(100, 140), paced=False)  # evicted without the disk
            assert await tier_of(pool.clients[1], 139) == "local"
        finally:
            gate.set()
        await idle(pool, 1)


async def test_blocks_that_the_disk_does_not_give_are_had_elsewhere_or_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, 2, with_ssd(1)) as pool:
        await on_disk_here_and_in_dram_there(pool, range(1))
        do = files._Own.do

        def broken(own: files._Own, order: Order, file: files.SsdFile) -> int:
            if order.kind is Kind.READ:
                raise OSError(errno.EIO, "Input/output error")
            return do(own, order, file)

        monkeypatch.setattr(files._Own, "do", broken)
        assert await tier_of(pool.clients[1], 0) in ("home", "bulk", "shared")
        assert await tier_of(pool.clients[1], 10) == ""
        tier = tier_at(pool, 1)
        assert tier.counters.read_errors == 2
        for number in range(11, 20):
            assert await tier_of(pool.clients[1], number) == ""
        assert tier.counters.files_failed == 1
        assert tier.values()["ssd_files"] == 0
        assert not len(tier.shelf)
        await put(pool, 1, range(200, 230))
        assert await tier_of(pool.clients[1], 229) == "local"
        tier.check()


async def test_a_clock_that_is_set_while_an_agent_runs_is_believed_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, 2, with_ssd(1)) as pool:
        tier = tier_at(pool, 1)
        before = tier.epoch_s
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 1e6)
        await put(pool, 1, range(60))
        await idle(pool, 1)
        assert 1e6 - 60 < tier.epoch_s - before < 1e6 + 60
        assert tier.counters.demotions_room > 0


def flip(path: Path, at: int) -> None:
    """A bit of a file is another."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))


async def test_damaged_bytes_are_never_served(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 1, with_ssd(1)) as pool:
        await put(pool, 1, range(60))
        await idle(pool, 1)
        path = tmp_path / "1.ssd"
        tier = tier_at(pool, 1)
        copy = tier.shelf.peek(BlockId(1, key_of(4)))
        assert copy is not None
        flip(path, tier._files[0].formatted.cut.blocks_offset + copy.offset + 1000)
        assert await tier_of(pool.clients[1], 4) == ""
        assert tier.counters.damaged == 1
        assert await tier_of(pool.clients[1], 5) == "ssd"


async def test_an_agent_does_not_start_over_files_of_others(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2, with_ssd(1)) as pool:
        path = tmp_path / "1.ssd"

        def theirs(options: Options) -> Options:
            options = with_ssd(2)(options)
            return replace(options, ssd=replace(options.ssd, paths=(str(path),)))

        await pool.kill(2)
        with pytest.raises(SsdError, match="belongs to a running agent"):
            await pool.start_agent(2, theirs)
        await pool.kill(1)
        with pytest.raises(SsdError, match=r"is of node node-1 .* and this is node node-2"):
            await pool.start_agent(2, theirs)
        path.write_bytes(b"somebody's letters" * 1000)
        with pytest.raises(SsdError, match="no SSD file of kvcast"):
            await pool.start_agent(2, theirs)
        assert path.read_bytes().startswith(b"somebody's letters")
        await pool.start_agent(1, with_ssd())
        await pool.start_agent(2, with_ssd())


async def test_namespaces_say_how_much_they_use_of_each_further_arena(tmp_path: Path) -> None:
    def change(options: Options) -> Options:
        options = with_ssd(1)(options)
        arenas = ((f"{tmp_path}/near", 3 * MIB), (f"{tmp_path}/far", 3 * MIB))
        return replace(options, ssd=replace(options.ssd, paths=(), arenas=arenas))

    async with running_pool(tmp_path, 1, change) as pool:
        quota = 10 * 65536
        info = pool.controller.namespaces[1]
        pool.controller.namespaces[1] = msgspec.structs.replace(
            info, settings=NamespaceSettings(quota_bytes={"arena": quota})
        )
        pool.controller.publish()
        await pool.settled()
        ssd = pool.agents[1].ssd
        assert ssd is not None
        for number in range(60):
            for namespace in (1, 2):
                await put(pool, 1, range(number, number + 1), namespace=namespace, paced=False)
            await until(lambda: not any(tier.is_behind for tier in ssd.tiers))
            for tier in ssd.tiers:
                assert tier.shelf.namespace_bytes(2) <= quota
        for tier in ssd.tiers:
            assert tier.shelf.namespace_bytes(2) > 0
            assert tier.shelf.namespace_bytes(1) > quota, "who has no quota there"
            tier.check()
