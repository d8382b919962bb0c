"""Parts of a pool are killed with SIGKILL while engines read.

Oracle: every get ends, with the right bytes or as a miss; the hit rate (blocks that came, of those
that a pool which loses nothing would have held) before, during and after; after the restart, reads
succeed and are coalesced again. Cannot see: machines that fail as a whole; the simulation tests do.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kvcast.bench.incast import home_keys
from kvcast.bench.outage import Outage, Phase, Phases, play_with_outage
from kvcast.bench.replay import NodeLink, Tally
from kvcast.topologies.pool import Pool
from pool_harness import (
    BLOCK_BYTES,
    check,
    eventually,
    get,
    keys_for,
    make_replay,
    namespace_of,
    put,
    replay,
    requests_of,
    running_pool,
)

pytestmark = pytest.mark.in_step  # it measures what processes do at once

NODES = 4
DEADLINE_S = 8.0


async def _replay_and_kill(
    pool: Pool, links: list[NodeLink], part: str
) -> tuple[Tally, Outage, Phases]:
    """Play a mix; kill a part in the middle of it, and start it again while it goes on."""
    requests = requests_of("mix", NODES, remote_reads=300, span_s=6.0)
    playing = make_replay(pool, links, requests, tag="killed", deadline_s=DEADLINE_S)
    tally, outage = await play_with_outage(pool, playing, part, after=len(requests) // 4)
    assert tally.wrong_bytes == 0
    assert tally.gets == sum(tally.hits.values())
    assert len(tally.turns) == tally.requests == len(requests)
    assert len(tally.done) == tally.requests - tally.failed_requests
    # Whatever did not come was given up when its time was over, and not long after.
    assert max(tally.fetch_ms) < 2000 * DEADLINE_S
    phases = Phases.of(tally, outage)
    assert phases.before.wanted > 0, "the kill was too early to show anything"
    assert rate(phases.before) > 0.9
    # Where the machine is so slow that no request was left, what is played next has the word. So it
    # has after an agent's death: what was lost with it, or was never written because its requests
    # failed, is missed once more by whoever wants it first.
    if part != "agent":
        assert phases.recovered or not phases.after.wanted, phases
    requests = requests_of("mix", NODES, remote_reads=300, span_s=3.0)  # the same, and faster
    again = make_replay(pool, links, requests, tag="killed", deadline_s=DEADLINE_S)
    after = Phase.of((await again.run()).turns)
    assert rate(after) > 0.9 * rate(phases.before)
    assert (after.missed, after.failed_requests) == (0, 0)
    return tally, outage, phases


def rate(phase: Phase) -> float:
    assert phase.hit_rate is not None
    return phase.hit_rate


async def _works_as_before(pool: Pool, links: list[NodeLink]) -> None:
    """The pool is whole again: nothing is missed, and simultaneous reads share one answer."""
    tally = await replay(
        pool, links, requests_of("tp-mla", NODES, remote_reads=120, span_s=3.0), tag="after"
    )
    assert tally.wrong_bytes == 0
    assert tally.misses == 0
    assert tally.failed_requests == 0
    assert tally.put_failures == 0
    assert tally.hits["shared"] > tally.hits["home"]


@pytest.mark.long
async def test_reads_go_on_without_a_controller_and_it_resumes(tmp_path: Path) -> None:
    async with running_pool(tmp_path, NODES) as (pool, links):
        tally, _, phases = await _replay_and_kill(pool, links, "controller")
        assert rate(phases.during) > 0.9 * rate(phases.before)
        assert tally.misses == 0
        assert tally.failed_requests == 0
        assert tally.hits["shared"] > 0
        await _works_as_before(pool, links)


@pytest.mark.long
async def test_a_switch_that_is_killed_is_programmed_again_and_reads_recover(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, NODES) as (pool, links):
        tally, _, phases = await _replay_and_kill(pool, links, "switch")
        assert phases.before.missed == 0
        assert phases.after.missed == 0
        assert tally.failed_requests == 0
        await _works_as_before(pool, links)


@pytest.mark.long
async def test_an_agent_that_is_killed_costs_its_node_only_and_comes_back_empty(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, NODES) as (pool, links):
        tally, outage, phases = await _replay_and_kill(pool, links, "agent")
        place = [host.node_id for host in pool.star.hosts].index(outage.part)
        failed = [turn for turn in tally.turns if turn.failed]
        assert all(place in turn.nodes for turn in failed)
        assert len(failed) == phases.during.failed_requests
        # The blocks that were lost with it have copies: the others hardly notice.
        others = [
            turn
            for turn in tally.turns
            if place not in turn.nodes and turn.ended_s > outage.killed_s
        ]
        assert rate(Phase.of(others)) > 0.9 * rate(phases.before)
        await _works_as_before(pool, links)


@pytest.mark.parametrize("replicas", [0, 1])
async def test_a_home_killed_in_mid_transfer_ends_as_its_replicas_copy_or_a_miss(
    tmp_path: Path, replicas: int
) -> None:
    size_bytes = 1 << 20
    slow = ("--port-rate=2e7",)  # 20 Mb/s: a megabyte takes almost half a second
    async with running_pool(tmp_path, NODES, replicas=replicas, switch_flags=slow, lease_s=2.0) as (
        pool,
        links,
    ):
        namespace = await namespace_of(links[0])
        keys = home_keys(pool, "node-1", 3, "mid-transfer")
        await put(links[0], namespace, keys, size_bytes)
        if replicas:
            await _is_replicated(links, namespace, keys)
        holders = await _holders(links, namespace, keys)
        readers = [i for i in range(1, NODES) if all(i not in holders[key] for key in keys)]
        assert readers
        started = [
            asyncio.create_task(
                get(links[i], namespace, keys, size_bytes, deadline_s=15.0 if replicas else 5.0)
            )
            for i in readers
        ]
        await _has_begun(links, readers)
        await pool.kill("node-1")
        for came, wrong, _ in await asyncio.gather(*started):
            assert wrong == 0
            assert came == len(keys) if replicas else came < len(keys)


async def _holders(
    links: list[NodeLink], namespace: int, keys: list[bytes]
) -> dict[bytes, list[int]]:
    held: dict[bytes, list[int]] = {key: [] for key in keys}
    for index, link in enumerate(links):
        for block in (await (await link.client()).describe(namespace, keys)).held:
            held[block.key].append(index)
    return held


async def _is_replicated(links: list[NodeLink], namespace: int, keys: list[bytes]) -> None:
    """Wait until every block lies at two of its homes."""

    async def probe() -> bool:
        homes = dict.fromkeys(keys, 0)
        for link in links:
            for block in (await (await link.client()).describe(namespace, keys)).held:
                homes[block.key] += block.home
        return min(homes.values()) >= 2

    await eventually("every block lies at two homes", probe)


async def _has_begun(links: list[NodeLink], readers: list[int]) -> None:
    async def probe() -> bool:
        counters = [await (await links[i].client()).stats() for i in readers]
        return all(c["frames_answers_total"] > 32 for c in counters)  # bytes count at a block's end

    await eventually("every reader has got some chunks", probe, pause_s=0.02)


async def test_a_home_that_stops_answering_is_left_within_the_deadline(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3, replicas=0, lease_s=60.0) as (pool, links):
        namespace = await namespace_of(links[0])
        keys = home_keys(pool, "node-1", 2, "stopped")
        await put(links[0], namespace, keys)
        pool.pause("node-1")
        try:
            client = await links[1].client()
            outcomes = await client.get_outcomes(namespace, keys, deadline_s=2.0)
            assert [outcome.block for outcome in outcomes] == [None, None]
            assert {outcome.reason for outcome in outcomes} <= {"deadline", "unreachable"}
        finally:
            pool.resume("node-1")
        came, wrong, _ = await get(links[2], namespace, keys)
        assert (came, wrong) == (2, 0)


async def test_blocks_put_before_a_replica_died_are_read_from_the_home(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3, lease_s=2.0) as (pool, links):
        namespace = await namespace_of(links[0])
        keys = keys_for("replica", 8)
        await put(links[0], namespace, keys)
        await _is_replicated(links, namespace, keys)
        await pool.kill("node-3")
        await pool.wait_programmed(20, without=frozenset({"node-3"}))
        client = await links[1].client()
        blocks = await client.get(namespace, keys, deadline_s=10.0)
        came, wrong, _ = check(zip(keys, blocks, strict=True), BLOCK_BYTES)
        assert wrong == 0
        assert came == len(keys)
