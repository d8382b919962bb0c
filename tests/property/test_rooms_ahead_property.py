"""Clients that put in room that was given them ahead, and some that lie about it, in any order.

What runs is the agent's core with its store. Oracle: a plain record of what each client wrote
where; whatever the agent holds must be those bytes, under the name that they were put by. Cannot
see: shared memory and sockets (tests of whole pools have them).
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.sessions import AHEAD_OF_ARENA, Session
from kvcast.hostagent.core.store import Store, StoreRules
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.messages import local
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    NamespaceInfo,
    NodeInfo,
    PoolMap,
    Registered,
)
from kvcast.protocol.messages.wire import BUCKETS, BlockId, digest_of

SLAB = 8192
SLABS = 64
CLIENTS = 5
NAMESPACES = (1, 2)


class Scene:
    """One agent, and clients that put by turns."""

    def __init__(self, seed: int, quota_bytes: int) -> None:
        self.rng = random.Random(seed)
        self.memory = memoryview(bytearray(SLAB * SLABS))
        self.core = AgentCore(
            AgentOptions(node_id="node-1"),
            Store(Allocator(SLAB * SLABS, SLAB)),
            self.memory,
            random.Random(seed),
        )
        self.core.registered(Registered(CONTROL_PROTOCOL_VERSION, 1, 3.0, 0))
        node = NodeInfo(1, "node-1", "10.0.0.1", "02:00:00:00:00:01", 1, 1, "10.0.0.1", 1)
        infos = [NamespaceInfo(number, "t", str(number), "1", "l") for number in NAMESPACES]
        self.core.control_message(0.0, PoolMap(1, [node], [[1]] * BUCKETS, infos, []))
        self.core.store.configure({1: StoreRules(quota_bytes=quota_bytes)})
        self.replies: list[local.AgentReply] = []
        self.sessions = [self._client() for _ in range(CLIENTS)]
        self.rooms: list[tuple[int, int, local.Extent] | None] = [None] * CLIENTS
        """By client: namespace, size and place of what it was given ahead."""
        self.written: dict[BlockId, bytes] = {}
        """The first bytes that were put by each name."""
        self.puts = 0

    def _client(self) -> Session:
        return Session(self.core, self.replies.append)

    def ask(self, client: int, request: local.Request) -> local.AgentReply:
        self.sessions[client].handle(0.0, request)
        return self.replies.pop()

    def step(self) -> None:
        rng = self.rng
        client = rng.randrange(CLIENTS)
        room = self.rooms[client]
        what = rng.random()
        if what < 0.05:
            self.sessions[client].close()
            self.sessions[client], self.rooms[client] = self._client(), None
        elif what < 0.1:
            self.core.store.drop_namespace(rng.choice(NAMESPACES))
        elif what < 0.2:
            self._lie(client)
        elif room is not None and what < 0.25:
            assert self.ask(client, local.Abort(1, [room[2].ticket])) == local.Ack(1, 1)
            self.rooms[client] = None
        elif room is not None and what < 0.8:
            self._put_in(client, *room)
        else:
            self._put(client, rng.choice(NAMESPACES), rng.choice((100, SLAB, 2 * SLAB)))

    def _put_in(self, client: int, namespace: int, size: int, room: local.Extent) -> None:
        key, data = self._content(size)
        self.memory[room.offset : room.offset + size] = data
        block = BlockId(namespace, key)
        # Of a block that is there the bytes stay what they are.
        before = self.core.store.peek(block)
        self.rooms[client] = None
        reply = self.ask(client, local.Put(1, namespace, [key], room.ticket, "local"))
        assert isinstance(reply, local.Committed), reply
        self._ended(client, block, data, before is not None, reply, size)
        self.puts += 1

    def _put(self, client: int, namespace: int, size: int) -> None:
        key, data = self._content(size)
        block = BlockId(namespace, key)
        reply = self.ask(client, local.Alloc(1, namespace, [key], [size]))
        assert isinstance(reply, local.Allocated)
        (extent,) = reply.extents
        if extent.status != local.OK:
            return
        self.memory[extent.offset : extent.offset + size] = data
        before = self.core.store.peek(block)
        reply = self.ask(client, local.Commit(2, [extent.ticket], "local", self.rng.random() < 0.7))
        assert isinstance(reply, local.Committed)
        self._ended(client, block, data, before is not None, reply, size)

    def _ended(
        self,
        client: int,
        block: BlockId,
        data: bytes,
        was_there: bool,
        reply: local.Committed,
        size: int,
    ) -> None:
        (result,) = reply.blocks
        if result.status == local.OK and not was_there:
            self.written[block] = data
        if reply.room is not None:
            assert self.rooms[client] is None
            self.rooms[client] = block.namespace, size, reply.room

    def _lie(self, client: int) -> None:
        """Say of rooms what is not so; nothing may come of it."""
        tickets = [room[2].ticket for room in self.rooms if room is not None]
        own = self.rooms[client]
        ticket = self.rng.choice([*tickets, 0, 77])
        request: local.Request = local.Put(1, self.rng.choice((1, 2)), [bytes(16)], ticket, "local")
        if self.rng.random() < 0.5:
            request = local.Commit(1, [ticket], "local", True)
        own_one = own is not None and (own[0], own[2].ticket) == (
            getattr(request, "namespace", None),
            ticket,
        )
        if own_one:
            return  # that is no lie
        reply = self.ask(client, request)
        assert isinstance(reply, local.Failed), (request, reply)
        assert reply.status == local.INVALID

    def _content(self, size: int) -> tuple[bytes, bytes]:
        return self.rng.randrange(12).to_bytes(16, "big"), self.rng.randbytes(size)

    def check(self) -> None:
        store = self.core.store
        store.check()
        given = [room for room in self.rooms if room is not None]
        reserved = [store.allocator.extent_bytes(size) for _, size, _ in given]
        assert self.core.ahead_bytes == sum(reserved) <= SLAB * SLABS // AHEAD_OF_ARENA
        for block in store.blocks():
            copy = store.peek(block)
            assert copy is not None
            there = bytes(self.memory[copy.offset : copy.offset + copy.size_bytes])
            assert there == self.written[block]
            assert copy.digest == digest_of(there)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from((0, 3 * SLAB, 40 * SLAB)))
def test_whatever_is_put_in_which_room_is_held_under_its_own_name(seed: int, quota: int) -> None:
    scene = Scene(seed, quota)
    for _ in range(60):
        scene.step()
        scene.check()
    for session in scene.sessions:
        session.close()
    assert scene.core.ahead_bytes == 0
    assert scene.core.store.used_bytes == sum(
        scene.core.store.allocator.extent_bytes(len(scene.written[block]))
        for block in scene.core.store.blocks()
    )


def test_the_scenes_are_not_idle() -> None:
    scene = Scene(7, 0)
    for _ in range(400):
        scene.step()
    assert scene.puts > 30
