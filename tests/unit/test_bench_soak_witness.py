"""The soak's witness: what it finds where a move loses blocks, or a get fails while one goes on.

Oracle: a pool of dictionaries that does what a pool should, or loses something on purpose. Cannot
see: a real pool (tests/integration/test_pool_soak.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvcast.bench.replay import NodeLink
from kvcast.bench.soak.witness import Watched, Witness
from kvcast.controller.core.placement import place
from kvcast.hostagent.client import PutError
from kvcast.protocol.messages.wire import bucket_of
from kvcast.topologies.pool import Pool
from kvcast.topologies.star import Star

NODES = ("node-1", "node-2", "node-3")
HOSTS = Star.of(len(NODES)).hosts


class FakeBlock:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.released = False

    def release(self) -> None:
        self.released = True

    def __enter__(self) -> FakeBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass
class FakePool:
    """Every node's DRAM, and who holds buckets."""

    held: dict[str, dict[bytes, bytes]] = field(default_factory=lambda: {n: {} for n in NODES})
    placed: set[str] = field(default_factory=lambda: {*NODES})
    settings: list[Any] = field(default_factory=list)
    refused: int = 0
    """So many blocks are not acknowledged."""
    blocks: list[FakeBlock] = field(default_factory=list)
    options = SimpleNamespace(replicas=1)

    async def status(self) -> dict[str, Any]:
        nodes = [{"node_id": node, "placed": node in self.placed} for node in NODES]
        return {"settled": True, "nodes": nodes}

    async def http(self, _method: str, _path: str, body: Any) -> None:
        self.settings.append(body)

    def hand_over(self) -> None:
        """Every home gets what anybody holds."""
        everything = {key: data for held in self.held.values() for key, data in held.items()}
        homes = place(self.placed, self.options.replicas + 1)
        for key, data in everything.items():
            for node in homes[bucket_of(key)]:
                self.held[node][key] = data


@dataclass
class FakeLink:
    """A link to a node, and the client behind it."""

    pool: FakePool
    node: str

    async def client(self) -> FakeLink:
        return self

    async def namespace(self, *_names: str) -> int:
        return 7

    async def put(self, _namespace: int, blocks: dict[bytes, bytes], *, ack: str) -> None:
        assert ack == "replicas"
        failed = {}
        for key, data in blocks.items():
            if self.pool.refused:
                self.pool.refused -= 1
                failed[key] = "timeout"
                continue
            for node in place(self.pool.placed, 2)[bucket_of(key)]:
                self.pool.held[node][key] = data
        if failed:
            raise PutError(failed)

    async def get(self, _namespace: int, keys: Sequence[bytes], **_: Any) -> list[FakeBlock | None]:
        await asyncio.sleep(0)
        found: list[FakeBlock | None] = []
        for key in keys:
            data = [held[key] for held in self.pool.held.values() if key in held]
            found.append(FakeBlock(data[0]) if data else None)
        self.pool.blocks += [block for block in found if block is not None]
        return found

    async def get_outcomes(self, namespace: int, keys: Sequence[bytes], **_: Any) -> list[Any]:
        blocks = await self.get(namespace, keys)
        return [SimpleNamespace(block=b, status="miss", reason="not_found") for b in blocks]

    async def describe(self, _namespace: int, keys: Sequence[bytes]) -> Any:
        held = self.pool.held[self.node]
        return SimpleNamespace(held=[SimpleNamespace(key=key) for key in keys if key in held])

    async def drop(self, _namespace: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.pool.held[self.node].pop(key, None)


def witness_of(
    pool: FakePool,
    undisturbed: Callable[[str, float], bool] = lambda _node, _since: True,
    lapsed: Callable[[float], bool] = lambda _since: False,
) -> Witness:
    links = [cast(NodeLink, FakeLink(pool, host.node_id)) for host in HOSTS]
    return Witness(cast(Pool, pool), links, HOSTS, 1, undisturbed, lapsed)


async def drained(witness: Witness, pool: FakePool, *, lost: bool = False) -> None:
    """node-1 is drained, looked after, and taken back; `lost`: others get nothing of it."""
    async with witness.while_moving("a drain") as watched:
        pool.placed.discard("node-1")
        if lost:
            pool.held["node-1"].clear()
        else:
            pool.hand_over()
        await asyncio.sleep(0.1)
        await watched.look()
        pool.placed.add("node-1")
        pool.hand_over()
        await watched.look()


async def test_a_drain_that_hands_all_over_is_no_find_and_leaves_nothing() -> None:
    pool = FakePool()
    witness = witness_of(pool)
    await witness.prepare()
    assert pool.settings[0]["settings"]["assured_bytes"]["dram"] > 0
    await drained(witness, pool)
    assert (witness.failed_gets, witness.lost, witness.wrong_bytes) == ([], [], 0)
    assert witness.counts["gets"] > 10
    assert witness.counts["looks"] == 2
    assert pool.held == {node: {} for node in NODES}
    assert all(block.released for block in pool.blocks)


async def test_a_drained_node_that_drops_its_blocks_is_found_by_the_homes_that_lack_them() -> None:
    pool = FakePool()
    witness = witness_of(pool)
    await drained(witness, pool, lost=True)
    assert witness.failed_gets == []  # each block has another home still
    assert witness.lost
    assert all(find.startswith("a drain: node-") for find in witness.lost)


async def test_where_an_agent_may_have_counted_as_dead_it_is_not_judged_who_holds_what() -> None:
    pool = FakePool()
    witness = witness_of(pool, lapsed=lambda _since: True)
    await drained(witness, pool, lost=True)
    assert witness.lost == []
    assert witness.counts["looks not judged"] == witness.counts["looks"] == 2


@pytest.mark.parametrize("away", [False, True])
async def test_a_get_that_fails_is_a_find_unless_its_node_was_away(away: bool) -> None:
    pool = FakePool()
    began: list[float] = []

    def undisturbed(node: str, since: float) -> bool:
        began.append(since)
        return not away or began.count(since) == 1  # it is stopped after the get has begun

    witness = witness_of(pool, undisturbed)
    async with witness.while_moving("a join"):
        for held in pool.held.values():
            held.clear()
        await asyncio.sleep(0.1)
    assert bool(witness.failed_gets) == (not away)
    assert len(witness.failed_gets) <= 20


async def test_wrong_bytes_are_counted() -> None:
    pool = FakePool()
    witness = witness_of(pool)
    async with witness.while_moving("a join") as watched:
        for held in pool.held.values():
            for key in held:
                held[key] = bytes(len(held[key]))
        await watched.look()
    assert witness.wrong_bytes > 10_000


async def test_what_a_home_has_not_acknowledged_need_not_be_there() -> None:
    pool = FakePool(refused=7)
    witness = witness_of(pool)
    await drained(witness, pool)
    assert (witness.failed_gets, witness.lost) == ([], [])


@pytest.mark.parametrize("empty", [False, True])
async def test_an_agent_that_takes_over_has_what_the_one_before_had(empty: bool) -> None:
    pool = FakePool()
    witness = witness_of(pool)
    async with witness.while_moving("a takeover") as watched, watched.kept_by("node-2"):
        assert isinstance(watched, Watched)
        if empty:
            pool.held["node-2"].clear()
    assert bool(witness.lost) == empty
    assert witness.counts["blocks held over a takeover"] > 0
    assert all(block.released for block in pool.blocks)
