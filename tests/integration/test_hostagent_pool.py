"""Agents, a plain switch and a controller: blocks travel, and bad days are survived.

Oracle: the bytes that were put. Cannot see: anything that needs the P4 program (coalescing,
residency), which the plain switch of these tests has not.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import os
import random
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hostagent_harness import MIB, key_of, mac_of, running_pool, until
from kvcast.hostagent import digests
from kvcast.hostagent.client import (
    AgentGoneError,
    Block,
    Client,
    InvalidRequestError,
    PutError,
    ReleasedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvcast.hostagent.core.store import StaleReservationError
from kvcast.hostagent.core.writes import WriteOptions
from kvcast.hostagent.options import Options
from kvcast.protocol.messages.control import BlockRef as Ref
from kvcast.protocol.messages.control import Credit, Describe, Keep
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.service.authority import Authority, Part
from kvcast.service.identity import CONTROLLER, NODE, Identity
from kvcast.service.tls import Credentials


def noise(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def the(blocks: list[Block | None]) -> Block:
    (block,) = blocks
    assert block is not None
    return block


def by_reads(options: Options) -> Options:
    """Nothing is read by TCP that can be read otherwise."""
    return replace(options, agent=replace(options.agent, lone_reads_by_tcp=False))


async def test_a_lone_reader_reads_by_tcp_what_its_first_probe_did_not_bring(
    tmp_path: Path,
) -> None:
    sizes = [200_000, 1, 1023, 65536, 65537, 1_000_000]
    async with running_pool(tmp_path, 3) as pool:
        blocks = {key_of(i): noise(i, size) for i, size in enumerate(sizes)}
        await pool.clients[1].put(1, blocks)
        for block, data in zip(
            await pool.clients[3].get(1, list(blocks), deadline_s=5), blocks.values(), strict=True
        ):
            assert block is not None
            assert bytes(block.data) == data
            assert block.tier == "bulk"
            assert block.verify()
            block.release()
        home, reader = await pool.clients[1].stats(), await pool.clients[3].stats()
        for sent, of in (("sent", home), ("received", reader)):
            assert of[f"payload_bytes_{sent}_udp_total"] == 65536
            assert of[f"payload_bytes_{sent}_bulk_get_total"] == sum(sizes) - 65536
        assert reader["hits_bulk_total"] == len(sizes)
        assert home["bulk_requests_served_total"] == 1
        # A connection that the home has closed meanwhile is replaced, and nobody notices.
        await pool.clients[1].put(1, {key_of(77): blocks[key_of(5)]})
        await pool.agents[1].bulk_server.hang_up()
        again = the(await pool.clients[3].get(1, [key_of(77)], deadline_s=5))
        assert (bytes(again.data), again.tier) == (blocks[key_of(5)], "bulk")
        assert (await pool.clients[3].stats())["bulk_failures_total"] == 0


async def test_a_block_put_on_one_node_is_read_whole_on_another(tmp_path: Path) -> None:
    sizes = [1, 1023, 1024, 1025, 65536, 65537, 200_000]
    async with running_pool(tmp_path, 3, by_reads) as pool:
        blocks = {key_of(i): noise(i, size) for i, size in enumerate(sizes)}
        await pool.clients[1].put(1, blocks)
        got = await pool.clients[3].get(1, list(blocks), deadline_s=5)
        for block, (key, data) in zip(got, blocks.items(), strict=True):
            assert block is not None
            assert block.key == key
            assert bytes(block.data) == data
            assert block.tier == "home"
            assert block.verify()
            block.release()
        again = the(await pool.clients[3].get(1, [key_of(3)], 60.0))
        assert again.tier == "local"
        stats = await pool.clients[1].stats()
        assert stats["payload_bytes_sent_udp_total"] == sum(sizes)
        assert stats["hits_home_total"] == 0
        assert (await pool.clients[3].stats())["hits_home_total"] == len(sizes)


async def test_a_put_reaches_home_and_replica_before_or_soon_after_it_is_acknowledged(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, 3) as pool:
        await pool.clients[3].put(1, {key_of(1): b"x" * 5000})
        held = (await pool.clients[1].describe(1, [key_of(1)])).held
        assert [(h.size_bytes, h.digest, h.home) for h in held] == [
            (5000, digest_of(b"x" * 5000), True)
        ]
        await pool.holds(2, key_of(1))
        own = (await pool.clients[3].describe(1, [key_of(1)])).held
        assert [h.home for h in own] == [False]


async def test_digests_of_large_puts_are_made_beside_the_agents_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by: list[threading.Thread] = []

    def told(data: memoryview) -> int:
        by.append(threading.current_thread())
        return digest_of(data)

    def roomy(options: Options) -> Options:
        return replace(options, arena=replace(options.arena, size_bytes=16 * MIB))

    monkeypatch.setattr(digests, "digest_of", told)
    async with running_pool(tmp_path, 2, roomy) as pool:
        blocks = {key_of(number): noise(number, 900_000) for number in range(1, 4)}
        client = pool.clients[1]
        with await client.reserve(1, {key: len(data) for key, data in blocks.items()}) as room:
            for key, data in blocks.items():
                room.views[key][:] = data
            await client.commit(room, ack="local")
        held = (await client.describe(1, list(blocks))).held
        assert [block.digest for block in held] == list(map(digest_of, blocks.values()))
    assert len(by) == len(blocks)
    assert threading.main_thread() not in by


async def test_who_connects_in_the_moment_in_which_an_agent_is_closed_leaves_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would accept in the same round of the loop, behind what closes."""
    async with running_pool(tmp_path, 1) as pool:
        server = pool.agents[1]._local_server
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(server._options.socket_path)
            await asyncio.sleep(0)  # what comes next runs before what the selector finds then
            await server.close()
        await asyncio.sleep(0)
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio"] == []


async def test_an_agent_that_cannot_poll_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio's own loop has no waits in which compiled code could look for work."""

    def polling(options: Options) -> Options:
        return replace(options, network=replace(options.network, polls=True))

    async with running_pool(tmp_path, 1):
        assert "--busy-poll" not in caplog.text
    async with running_pool(tmp_path, 1, polling):
        assert "--busy-poll" in caplog.text


async def test_concurrent_gets_of_one_block_make_one_fetch(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3, by_reads) as pool:
        data = noise(1, 150_000)
        await pool.clients[1].put(1, {key_of(1): data})
        gets = [pool.clients[3].get(1, [key_of(1)], deadline_s=5) for _ in range(20)]
        for blocks in await asyncio.gather(*gets):
            with the(blocks) as block:
                assert bytes(block.data) == data
        stats = await pool.clients[3].stats()
        assert stats["fetches_total"] == 1
        assert stats["gets_joined_total"] == 19
        assert (await pool.clients[1].stats())["payload_bytes_sent_udp_total"] == len(data)


async def test_a_lossy_network_costs_time_and_never_a_byte(tmp_path: Path) -> None:
    rng = random.Random(5)
    async with running_pool(tmp_path, 3, by_reads) as pool:
        pool.switch.lose = lambda _port, _frame: rng.random() < 0.05
        blocks = {key_of(i): noise(i, 100_000) for i in range(10)}
        await pool.clients[1].put(1, blocks)
        got = await pool.clients[3].get(1, list(blocks), deadline_s=30)
        for block, data in zip(got, blocks.values(), strict=True):
            assert block is not None
            assert bytes(block.data) == data
        assert (await pool.clients[3].stats())["retries_total"] > 0


async def test_a_block_nobody_has_is_a_miss_with_a_reason(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        (outcome,) = await pool.clients[3].get_outcomes(1, [key_of(99)], deadline_s=5)
        assert (outcome.block, outcome.status, outcome.reason) == (None, "miss", "not_found")
        assert (await pool.clients[3].stats())["misses_not_found_total"] == 1


async def test_the_only_home_of_a_block_misses_it_within_the_probe(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        pool.controller.homes_of = lambda _bucket: ["node-1"]
        pool.controller.publish()
        await pool.settled()
        (outcome,) = await pool.clients[1].get_outcomes(1, [key_of(5)], deadline_s=30)
        assert outcome.status == "miss"


async def test_a_dead_homes_blocks_come_from_the_replica(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3, by_reads) as pool:
        data = noise(1, 80_000)
        await pool.clients[3].put(1, {key_of(1): data})
        await pool.holds(2, key_of(1))
        assert await pool.clients[3].drop(2, [key_of(1)]) == 1  # another namespace's: no effect
        await pool.kill(1)
        pool.drop_here(3, key_of(1))
        before = the(await pool.clients[3].get(1, [key_of(1)], deadline_s=10))
        assert bytes(before.data) == data
        assert (await pool.clients[2].stats())["payload_bytes_sent_udp_total"] == len(data)
        before.release()
        pool.controller.forget("node-1")
        await pool.settled()
        pool.drop_here(3, key_of(1))
        after = the(await pool.clients[3].get(1, [key_of(1)], deadline_s=10))
        assert bytes(after.data) == data


async def test_a_blocked_udp_path_is_replaced_by_tcp(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        data = noise(1, 300_000)
        await pool.clients[1].put(1, {key_of(1): data})
        pool.switch.lose = lambda _port, _frame: True
        block = the(await pool.clients[3].get(1, [key_of(1)], deadline_s=20))
        assert block.tier == "bulk"
        assert bytes(block.data) == data
        stats = [await pool.clients[n].stats() for n in (1, 2)]
        assert sum(s["payload_bytes_sent_bulk_get_total"] for s in stats) == len(data)
        assert (await pool.clients[3].stats())["hits_bulk_total"] == 1


async def test_nobody_reachable_is_a_miss_by_the_deadline(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        await pool.clients[1].put(1, {key_of(1): b"x" * 3000})
        pool.switch.lose = lambda _port, _frame: True
        (outcome,) = await pool.clients[3].get_outcomes(1, [key_of(1)], deadline_s=0.05)
        assert (outcome.status, outcome.reason) == ("miss", "deadline")
        await pool.kill(1)
        await pool.kill(2)
        (outcome,) = await pool.clients[3].get_outcomes(1, [key_of(1)], deadline_s=20)
        assert (outcome.status, outcome.reason) == ("miss", "unreachable")


async def test_a_short_get_that_joins_a_long_one_ends_by_its_own_deadline(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        pool.switch.lose = lambda _port, _frame: True
        await pool.kill(1)
        long = asyncio.create_task(pool.clients[3].get_outcomes(1, [key_of(1)], deadline_s=60))
        await asyncio.sleep(0.02)
        (short,) = await pool.clients[3].get_outcomes(1, [key_of(1)], deadline_s=0.01)
        assert short.reason == "deadline"
        assert not long.done()
        long.cancel()


async def test_a_home_that_sends_wrong_bytes_is_found_out_and_another_asked(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, 3) as pool:
        data = noise(1, 70_000)
        await pool.clients[3].put(1, {key_of(1): data})
        await pool.holds(2, key_of(1))
        pool.drop_here(3, key_of(1))
        # The home's memory lies: its bytes are no longer those of its digest.
        home = pool.agents[1].core
        copy = home.store.peek(home.store.blocks()[0])
        assert copy is not None
        home.memory[copy.offset + 1000] ^= 1
        block = the(await pool.clients[3].get(1, [key_of(1)], deadline_s=20))
        assert bytes(block.data) == data
        assert (await pool.clients[3].stats())["wrong_digest_total"] >= 1


async def test_bulk_checks_digests_too(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        pool.controller.homes_of = lambda _bucket: ["node-1"]
        pool.controller.publish()
        await pool.settled()
        await pool.clients[1].put(1, {key_of(1): noise(1, 70_000)})
        home = pool.agents[1].core
        copy = home.store.peek(home.store.blocks()[0])
        assert copy is not None
        home.memory[copy.offset] ^= 1
        pool.switch.lose = lambda _port, _frame: True
        (outcome,) = await pool.clients[3].get_outcomes(1, [key_of(1)], deadline_s=20)
        assert outcome.status == "miss"
        stats = await pool.clients[3].stats()
        assert stats["wrong_digest_total"] == 1
        assert stats["arena_used_bytes"] == 0


async def test_the_first_copy_of_a_key_stays(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        await pool.clients[2].put(1, {key_of(1): b"a" * 2000})
        await pool.clients[3].put(1, {key_of(1): b"b" * 2000})
        block = the(await pool.clients[1].get(1, [key_of(1)], 60.0))
        assert bytes(block.data) == b"a" * 2000
        assert (await pool.clients[1].stats())["store_conflicts_total"] == 1


async def test_exists_counts_the_prefix_over_all_homes(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 4) as pool:
        pool.controller.homes_of = lambda bucket: [f"node-{1 + bucket % 3}"]
        pool.controller.publish()
        await pool.settled()
        keys = [key_of(i, bucket=i) for i in range(12)]
        await pool.clients[4].put(1, {key: b"z" * 100 for i, key in enumerate(keys) if i != 9})
        for block in pool.agents[4].core.store.blocks():
            pool.agents[4].core.store.drop(block)
        assert await pool.clients[4].exists(1, keys) == 9
        assert await pool.clients[1].exists(1, keys) == 9
        assert await pool.clients[4].exists(1, keys[10:]) == 2
        assert await pool.clients[4].exists(2, keys) == 0
        assert await pool.clients[4].exists(1, []) == 0


async def test_a_dropped_block_is_gone_from_its_homes(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        keys = [key_of(i, bucket=i % 2) for i in range(4)]
        await pool.clients[3].put(1, dict.fromkeys(keys, b"z" * 100))
        await pool.holds(2, *keys)
        assert await pool.clients[3].drop(1, keys[:2]) == 2
        assert await pool.clients[3].exists(1, keys) == 0
        assert await pool.clients[1].exists(1, keys[2:]) == 2
        assert len((await pool.clients[2].describe(1, keys)).held) == 2


async def test_prefetched_blocks_are_local_afterwards(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        blocks = {key_of(i): noise(i, 5000) for i in range(4)}
        await pool.clients[1].put(1, blocks)
        assert await pool.clients[3].prefetch(1, list(blocks)) == 4
        await pool.holds(3, *blocks)
        for block in await pool.clients[3].get(1, list(blocks), 60.0):
            assert block is not None
            assert block.tier == "local"
            block.release()


async def test_a_client_that_disconnects_leaves_nothing_pinned(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        blocks = {key_of(i): noise(i, 60_000) for i in range(10)}
        await pool.clients[1].put(1, blocks)
        await until(lambda: pool.agents[1].core.writes.replications == 0)
        loop = asyncio.get_running_loop()
        other = await loop.run_in_executor(None, Client, str(tmp_path / "1.sock"))
        held = await loop.run_in_executor(None, other.get, 1, list(blocks))
        assert all(block is not None for block in held)
        assert await loop.run_in_executor(None, other.pin, 1, list(blocks)) == 10
        store = pool.agents[1].core.store
        store.elsewhere.refresh()
        pins = [store.peek(block).pins for block in store.blocks()]  # type: ignore[union-attr]
        assert pins == [2] * 10
        other.close()
        await until(lambda: not any(store.peek(b).pins for b in store.blocks()))  # type: ignore[union-attr]
        store.check()


async def test_a_clients_share_of_the_arena_bounds_what_it_pins(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        blocks = {key_of(i): noise(i, 60_000) for i in range(40)}
        await pool.clients[1].put(1, blocks)
        outcomes = await pool.clients[1].get_outcomes(1, list(blocks), 60.0)
        held = [o.block for o in outcomes if o.block is not None]
        assert len(held) == (2 * MIB) // 65536
        assert {o.status for o in outcomes if o.block is None} == {"busy"}
        for block in held:
            block.release()
        assert await pool.clients[1].pin(1, list(blocks)) == (2 * MIB) // 65536
        assert await pool.clients[1].unpin(1, list(blocks)) == (2 * MIB) // 65536


async def test_a_pool_larger_than_an_arena_evicts_and_stays_within_bounds(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        for start in range(0, 200, 20):
            blocks = {key_of(i): noise(i, 60_000) for i in range(start, start + 20)}
            await pool.clients[1].put(1, blocks)
            for agent in pool.agents.values():
                assert agent.core.store.used_bytes <= 4 * MIB
        newest = the(await pool.clients[2].get(1, [key_of(199)], 60.0))
        assert bytes(newest.data) == noise(199, 60_000)
        assert (await pool.clients[1].stats())["store_evictions_total"] > 0


async def test_namespaces_and_groups_come_from_the_controller(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        number = await pool.clients[1].namespace("acme", "m", "1", "bf16")
        await pool.clients[1].put(number, {key_of(1): b"hello"})
        await pool.settled()
        assert await pool.clients[2].namespace("acme", "m", "1", "bf16") == number
        with the(await pool.clients[2].get(number, [key_of(1)])) as block:
            assert bytes(block.data) == b"hello"
        group = await pool.clients[1].group(number, ["node-1", "node-2"])
        await pool.settled()
        described = await pool.clients[2].describe()
        assert [(g.group, g.nodes) for g in described.groups] == [(group, ["node-1", "node-2"])]
        with pytest.raises(UnknownNamespaceError):
            await pool.clients[1].get(7777, [key_of(1)])
        with pytest.raises(InvalidRequestError, match="no such tenant"):
            await pool.clients[1].namespace("nobody", "m", "1", "bf16")


async def test_a_namespace_of_other_nodes_is_closed_to_this_one(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        pool.controller.add_namespace(9, ["node-1"])
        pool.controller.publish()
        await pool.settled()
        await pool.clients[1].put(9, {key_of(1): b"secret"})
        (held,) = (await pool.clients[2].describe(9, [key_of(1)])).held or [None]
        assert held is None, "the replica may not use the namespace, so it holds nothing of it"


async def test_with_the_controller_away_the_pool_goes_on_and_joins_it_again(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, 3) as pool:
        data = noise(1, 9000)
        await pool.clients[1].put(1, {key_of(1): data})
        await pool.controller.stop()
        with the(await pool.clients[3].get(1, [key_of(1)], 60.0)) as block:
            assert bytes(block.data) == data
        await pool.clients[3].put(1, {key_of(2): data})
        with pytest.raises(UnavailableError):
            await pool.clients[3].namespace("late", "m", "1", "l")
        assert not (await pool.clients[3].describe()).connected
        await pool.controller.start()
        await until(lambda: pool.agents[3].core.connected)
        await pool.clients[3].namespace("late", "m", "1", "l")


async def test_agents_renew_and_report_their_heat(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        await pool.clients[1].put(1, {key_of(1): noise(1, 70_000)})
        the(await pool.clients[3].get(1, [key_of(1)], 60.0)).release()
        renewals = pool.controller.renewals
        await until(lambda: "node-1" in renewals and len(renewals["node-1"].hot) > 0)
        seen = renewals["node-1"].hot
        assert (seen[0].key, seen[0].readers, seen[0].size_bytes) == (key_of(1), 1, 70_000)


async def test_describe_credit_and_keep_from_the_controller(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        data = noise(1, 70_000)
        await pool.clients[1].put(1, {key_of(1): data})
        await pool.holds(2, key_of(1))
        controller = pool.controller
        refs = [Ref(1, key_of(1)), Ref(1, key_of(2))]
        controller.send("node-2", Describe(5, refs))
        controller.send("node-2", Credit([(1, key_of(1), 3)]))
        await until(lambda: len(controller.answers) == 1)
        described = controller.answers.pop()
        assert described.request == 5
        assert described.blocks == [(1, key_of(1), 70_000, digest_of(data))]  # type: ignore[union-attr]
        store = pool.agents[2].core.store
        store.drop(store.blocks()[0])
        controller.send("node-2", Keep(6, 1, key_of(1), 70_000, digest_of(data)))
        controller.send("node-2", Keep(7, 1, key_of(2), 70_000, 1))
        await until(lambda: len(controller.answers) == 2)
        assert {(a.request, a.held) for a in controller.answers} == {(6, True), (7, False)}  # type: ignore[union-attr]
        assert store.peek(store.blocks()[0]).home  # type: ignore[union-attr]


async def test_a_namespace_that_comes_back_under_another_number_is_emptied(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, 2) as pool:
        await pool.clients[1].put(1, {key_of(1): b"old"})
        await pool.clients[1].put(2, {key_of(1): b"other"})
        pool.controller.namespaces = [n for n in pool.controller.namespaces if n.namespace == 2]
        pool.controller.publish()
        # The agents ask for what is missing; this controller gives it the number 101.
        store = pool.agents[1].core.store
        await until(lambda: {b.namespace for b in store.blocks()} == {2})


async def test_put_ack_local_does_not_wait_and_unreachable_homes_are_told(
    tmp_path: Path,
) -> None:
    def local_ack(options: Options) -> Options:
        writes = WriteOptions(put_ack="local", replicate_timeout_s=0.5)
        return replace(options, agent=replace(options.agent, writes=writes))

    async with running_pool(tmp_path, 3, local_ack) as pool:
        await pool.kill(1)
        await pool.kill(2)
        await pool.clients[3].put(1, {key_of(1): b"x" * 100})
        await until(lambda: pool.agents[3].core.writes.replications == 0)
        assert (await pool.clients[3].stats())["replications_failed_total"] == 2


async def test_a_put_whose_homes_are_all_dead_fails_and_says_so(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        await pool.kill(1)
        await pool.clients[3].put(1, {key_of(1): b"x" * 100})  # the replica took it
        await pool.kill(2)
        with pytest.raises(PutError) as error:
            await pool.clients[3].put(1, {key_of(2): b"x" * 100})
        assert error.value.failed == {key_of(2): "unavailable"}


async def test_a_block_larger_than_the_arena_is_refused(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        with pytest.raises(PutError) as error:
            await pool.clients[1].put(1, {key_of(1): bytes(5 * MIB), key_of(2): b"small"})
        assert error.value.failed == {key_of(1): "no_room"}
        with the(await pool.clients[2].get(1, [key_of(2)], 60.0)) as block:
            assert block.size_bytes == 5


async def test_a_restarted_agent_is_empty_and_serves(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        data = noise(1, 50_000)
        await pool.clients[2].put(1, {key_of(1): data})
        await pool.kill(1)
        assert not os.path.exists(tmp_path / "1.arena")
        await pool.start_agent(1)
        await pool.settled()
        client = await pool.client(1)
        with the(await client.get(1, [key_of(1)], deadline_s=10)) as block:
            assert bytes(block.data) == data


async def test_an_agent_that_stops_says_so_to_controller_and_clients(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        agent = pool.agents.pop(2)
        await agent.close()
        await until(lambda: pool.controller.left == ["node-2"])
        with pytest.raises(AgentGoneError):
            await pool.clients[2].stats()
        assert not os.path.exists(tmp_path / "2.arena")
        assert not os.path.exists(tmp_path / "2.sock")


async def test_frames_of_unknown_nodes_and_for_others_are_counted(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        before = (await pool.clients[1].stats())["frames_misaddressed_total"]
        pool.switch._port_by_mac[bytes.fromhex(mac_of(2).replace(":", ""))] = 1  # misdelivers
        await pool.clients[1].get(1, [key_of(1)], deadline_s=0.1)
        stats = await pool.clients[1].stats()
        assert stats["frames_misaddressed_total"] > before


async def test_kernel_udp_serves_as_well_as_the_tunnel(tmp_path: Path) -> None:
    def kernel_udp(options: Options) -> Options:
        number = options.network.switch_port
        network = replace(options.network, ip=f"127.77.0.{number}", tunnel=None, udp_port=0)
        return replace(options, network=network)

    async with running_pool(tmp_path, 3, kernel_udp) as pool:
        blocks = {key_of(i): noise(i, 150_000) for i in range(5)}
        await pool.clients[1].put(1, blocks)
        for block, data in zip(
            await pool.clients[3].get(1, list(blocks), deadline_s=10), blocks.values(), strict=True
        ):
            assert block is not None
            assert block.tier == "bulk"
            with block:
                assert bytes(block.data) == data
        assert pool.switch.frames == 0


async def test_a_put_that_meets_the_end_of_its_namespace_is_refused(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        store = pool.agents[1].core.store
        copy = store.reserve(BlockId(1, key_of(1)), 1000)
        pool.controller.namespaces = []
        pool.controller.publish()
        await pool.settled()
        with pytest.raises(StaleReservationError):
            store.commit(copy, 5, home=True)
        assert store.used_bytes == 0


async def test_the_refusal_of_a_controller_is_heard_and_tried_again(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 1) as pool:
        pool.controller.refuse = "the switch has no port 2"
        starting = asyncio.create_task(pool.start_agent(2))
        await until(lambda: pool.controller.refused > 1)
        assert not starting.done()
        client = await pool.client(2)
        with pytest.raises(UnavailableError):
            await client.get(1, [key_of(1)])
        pool.controller.refuse = ""
        await starting
        assert await client.get(1, [key_of(1)], deadline_s=0.1) == [None]


async def test_a_home_that_dies_in_the_middle_of_an_answer_is_replaced(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3, by_reads) as pool:
        data = noise(1, 2_000_000)
        await pool.clients[1].put(1, {key_of(1): data})
        await pool.holds(2, key_of(1))
        from_home = 0

        def lose(port: int, _frame: bytes) -> bool:
            nonlocal from_home
            from_home += port == 1
            return port == 1 and from_home > 200  # the last thing that the network hears of it

        pool.switch.lose = lose
        getting = asyncio.create_task(pool.clients[3].get(1, [key_of(1)], deadline_s=30))
        await until(lambda: from_home > 200)
        await pool.kill(1)
        block = the(await getting)
        assert bytes(block.data) == data
        assert (await pool.clients[2].stats())["payload_bytes_sent_udp_total"] < len(data)


async def test_a_cancelled_get_leaves_nothing_pinned(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        core = pool.agents[3].core
        cancelled = 0
        for number in itertools.count():  # a get may be over before it is cancelled, or not begun
            await pool.clients[1].put(1, {key_of(number): noise(number, 500_000)})
            getting = asyncio.create_task(pool.clients[3].get(1, [key_of(number)], deadline_s=30))
            await asyncio.sleep(0.001 * (number % 3))
            getting.cancel()
            [got] = await asyncio.gather(getting, return_exceptions=True)
            if isinstance(got, asyncio.CancelledError):
                cancelled += 1
            else:
                assert not isinstance(got, BaseException), got
                the(got).release()
            if cancelled >= 3 and core.store.blocks():
                break
        await until(lambda: not core.reads.waiting)
        await until(lambda: core.reads.courier is None or not core.reads.courier.in_flight)
        held = core.store.blocks()
        await until(lambda: all(core.store.peek(block).pins == 0 for block in held))  # type: ignore[union-attr]


async def test_the_blocking_client_serves_several_threads(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        blocks = {key_of(i): noise(i, 20_000) for i in range(16)}
        await pool.clients[1].put(1, blocks)

        def read(client: Client, key: bytes) -> bool:
            with the(client.get(1, [key], deadline_s=10)) as block:
                same = bytes(block.data) == blocks[key]
            try:
                _ = block.data
            except ReleasedError:
                return same
            return False

        def work() -> list[bool]:
            with (
                Client(str(tmp_path / "3.sock")) as client,
                ThreadPoolExecutor(8) as threads,
            ):
                return list(threads.map(lambda key: read(client, key), list(blocks) * 4))

        assert all(await asyncio.get_running_loop().run_in_executor(None, work))
        store = pool.agents[3].core.store
        await until(lambda: not any(store.peek(b).pins for b in store.blocks()))  # type: ignore[union-attr]


async def test_a_get_that_expects_its_groups_answer_asks_when_none_comes(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        data = noise(1, 70_000)
        await pool.clients[1].put(1, {key_of(1): data})
        group = await pool.clients[3].group(1, ["node-2", "node-3"])
        got = await pool.clients[3].get(1, [key_of(1)], 10, group=group, expect=True)
        assert bytes(the(got).data) == data


async def test_with_udp_blocked_and_the_home_dead_the_replica_answers_by_tcp(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, 3) as pool:
        data = noise(1, 100_000)
        await pool.clients[1].put(1, {key_of(1): data})
        await pool.holds(2, key_of(1))
        await pool.kill(1)
        pool.switch.lose = lambda _port, _frame: True
        block = the(await pool.clients[3].get(1, [key_of(1)], deadline_s=30))
        assert block.tier == "bulk"
        assert bytes(block.data) == data


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_the_kernel_ends_a_control_link_whose_controller_acknowledges_nothing(
    tmp_path: Path, encrypted: bool
) -> None:
    """As after a power cut: nothing is said, and what is sent waits to be acknowledged."""
    now = datetime.datetime.now(datetime.UTC)
    authority = Authority.create(tmp_path / "certs", now=now)
    controller, node = (
        Credentials.of_folder(authority.issue(Part(identity), days=1, now=now).folder)
        for identity in (Identity(CONTROLLER, "controller"), Identity(NODE, "node-1"))
    )

    def change(options: Options) -> Options:
        credentials = node if encrypted else None
        return replace(
            options, control=replace(options.control, silence_s=7.5), credentials=credentials
        )

    tls = controller.server() if encrypted else None
    async with running_pool(tmp_path, 1, change, controller_tls=tls) as pool:
        given_up_after = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as sock:
                        if sock.getpeername() == pool.controller.address:
                            given_up_after.append(
                                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                            )
        assert given_up_after
        assert set(given_up_after) == {7500}
