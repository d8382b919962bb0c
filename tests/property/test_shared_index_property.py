"""Clients that pin what they find, and an agent that evicts, step by step in every order.

What runs is the product: the store, the index, the agent's and the clients' sides of it. Between
any two accesses to shared memory another goes on, and stores are seen late. Oracle: a plain record
of which block's bytes lie where; while a client holds a block, these must be that block's. The
last tests take a part of the protocol out, and must see the oracle object. Cannot see: what a
compiler or a processor other than x86-64 does (the stress test runs real processes), and numpy's
way of asking.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.client.local_blocks import LocalBlocks
from kvcast.hostagent.core.shared_index import Region, SharedIndex
from kvcast.hostagent.core.store import Copy, NoRoomError, Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.wire import BlockId
from shared_memory import Actor, Bytes, Machine, Words

ARENA_BYTES = 16_384
SLAB_BYTES = 8192
NAMESPACE = 7
BLOCKS = 20
"""More than the arena holds, so that most puts evict."""
CLIENTS = 2


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Scene:
    """One agent and some clients, each a loop of random actions."""

    def __init__(self, seed: int, barrier: Callable[[], None] | None = None) -> None:
        self.machine = Machine(seed)
        self.rng = self.machine.rng
        self.got = 0
        self.lying: dict[int, BlockId] = {}
        """Whose bytes lie at an offset; the arena."""
        self.arena_bytes = ARENA_BYTES
        agent = self.machine.actor("agent")
        agent.what = self._agent
        words = array("Q", bytes(shared.index_bytes(buckets_for(ARENA_BYTES))))
        self.store = Store(Allocator(ARENA_BYTES, SLAB_BYTES))
        index = Index(cast(memoryview, Bytes(words, agent)), ARENA_BYTES, 1)
        index.state_namespace(NAMESPACE, 1, readable=True)
        self.shared = SharedIndex(index, self.store, barrier or self.machine.barrier)
        for number in range(BLOCKS):
            self._put(BlockId(NAMESPACE, key_of(number)), 1024)
        self.machine.barrier()
        self.regions: dict[Actor, Region] = {}
        for number in range(CLIENTS):
            client = self.machine.actor(f"client {number}")
            pins = array("Q", bytes(shared.REGION_BYTES))
            region = Region(cast(memoryview, Bytes(pins, agent)), ARENA_BYTES, self._offended)
            self.regions[client] = region
            self.shared.join(region)
            client.what = lambda client=client, pins=pins: self._client(client, words, pins)

    def _offended(self, reason: str) -> None:
        raise AssertionError(f"an honest client is cut off: {reason}")

    def _agent(self) -> None:
        rng = self.rng
        for _ in range(80):
            action = rng.random()
            block = BlockId(NAMESPACE, key_of(rng.randrange(BLOCKS)))
            if action < 0.75:
                self._put(block, rng.choice((1024, 1024, 2048)))
            elif action < 0.85:
                self.store.drop(block)
            elif action < 0.86:
                self.store.drop_namespace(NAMESPACE)
            elif action < 0.87:
                victim = rng.choice(list(self.regions))
                if rng.random() < 0.5:
                    victim.killed = True  # or it is cut off, and does not know
                self.shared.leave(self.regions[victim])
            else:
                self.shared.refresh()
            self.store.check()

    def _put(self, block: BlockId, size_bytes: int) -> None:
        try:
            copy: Copy = self.store.reserve(block, size_bytes)
        except NoRoomError:
            return
        for place in range(copy.offset, copy.offset + copy.reserved_bytes, 1024):
            self.lying[place] = block
        self.store.commit(copy, digest=int.from_bytes(block.key, "big") + 1, home=False)

    def _client(self, client: Actor, index: array[int], pins: array[int]) -> None:
        rng, region = self.rng, self.regions[client]
        blocks = LocalBlocks(
            cast(Any, Bytes(index, client)),
            Words(index, client),
            Words(pins, client),
            arena_bytes=ARENA_BYTES,
            max_bytes=ARENA_BYTES // 2,
        )
        for _ in range(60):
            known = pins[shared.CLOSED_WORD] == 0
            keys = [key_of(rng.randrange(BLOCKS)) for _ in range(rng.randint(1, 3))]
            found = blocks.take(NAMESPACE, keys)
            assert known or found == [None] * len(keys), (
                "a client that was cut off has found blocks"
            )
            for _ in range(rng.randrange(9)):
                for key, one in zip(keys, found, strict=True):
                    client.step()
                    if one is not None and region in self.shared._regions:
                        self.got += 1
                        name = BlockId(NAMESPACE, key)
                        assert self.lying[one.offset] == name, "the bytes are another block's"
                        assert one.digest == int.from_bytes(key, "big") + 1
            for one in found:
                if one is not None:
                    blocks.release(one.pin, one.reserved_bytes)

    def play(self) -> None:
        self.machine.run()
        self.machine.barrier()
        for region in self.regions.values():
            self.shared.leave(region)
        self.store.check()
        assert not any(copy.pins for copy in self.store._by_offset.values()), "pinned by nobody"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_order_of_steps_gives_a_client_bytes_of_another_block(seed: int) -> None:
    Scene(seed).play()


@pytest.mark.slow
def test_the_scenes_are_not_idle() -> None:
    scenes = [Scene(seed) for seed in range(5)]
    for scene in scenes:
        scene.play()
    assert sum(scene.got for scene in scenes) > 100
    assert sum(scene.store.counters.evictions for scene in scenes) > 50
    assert sum(scene.shared.counters.hits for scene in scenes) > 50


def _fails(make: Callable[[int], Scene], seeds: int) -> bool:
    for seed in range(seeds):
        try:
            make(seed).play()
        except AssertionError:
            return True
    return False


def test_without_a_barrier_the_oracle_objects() -> None:
    assert _fails(lambda seed: Scene(seed, barrier=lambda: None), 20)


@pytest.mark.slow
def test_without_the_clients_half_of_the_barrier_the_oracle_objects() -> None:
    def agents_alone(seed: int) -> Scene:
        scene = Scene(seed)
        scene.shared._barrier = scene.machine._actors[0].flush
        return scene

    assert _fails(agents_alone, 200)


def test_without_a_look_at_the_regions_the_oracle_objects() -> None:
    with mock.patch.object(SharedIndex, "withdraw", _withdraw_unseen):
        assert _fails(Scene, 200)


def _withdraw_unseen(self: SharedIndex, copies: Any) -> None:
    regions, self._regions = self._regions, {}
    try:
        _WITHDRAW(self, copies)
    finally:
        self._regions = regions


_WITHDRAW = SharedIndex.withdraw


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.slow
def test_a_scene_repeats_itself(seed: int) -> None:
    first, second = Scene(seed), Scene(seed)
    first.play()
    second.play()
    assert first.machine.steps == second.machine.steps
    assert first.got == second.got
