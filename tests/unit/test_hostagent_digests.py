"""Puts whose digests are made beside all else: in parts, by threads, and with whatever happens
meanwhile.

The oracle is what was written, and xxHash itself.
"""

from __future__ import annotations

import asyncio
import random
import threading

import msgspec
import pytest
from kvcast.hostagent import digests
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.core.writes import COMMITTED_AT_ONCE
from kvcast.hostagent.digests import INLINE_BYTES, DigestThreads
from kvcast.protocol.digests import Digested, digests_at_once
from kvcast.protocol.messages import local
from kvcast.protocol.messages.wire import BlockId, digest_of
from test_hostagent_core import SLAB, Node, key, pool_map


class Put:
    """A client's put of blocks of a slab on a node that is their home; the digests wait."""

    def __init__(self, count: int) -> None:
        self.node = node = Node(1, slabs=3 * count)
        node.take_map(pool_map([1]))
        self.waiting: list[tuple[list[memoryview], Digested]] = []
        node.core.make_digests = lambda _now, blocks, then: self.waiting.append((blocks, then))
        self.replies: list[local.AgentReply] = []
        self.session = Session(node.core, self.replies.append)
        self.data = [random.Random(n).randbytes(SLAB) for n in range(count)]
        keys = [key(n) for n in range(count)]
        self.session.handle(node.now, local.Alloc(1, 1, keys, [SLAB] * count))
        allocated = self.replies.pop()
        assert isinstance(allocated, local.Allocated)
        for extent, data in zip(allocated.extents, self.data, strict=True):
            node.memory[extent.offset : extent.offset + SLAB] = data
        tickets = [extent.ticket for extent in allocated.extents]
        self.session.handle(node.now, local.Commit(2, tickets, "home"))

    @property
    def store(self) -> Store:
        return self.node.core.store

    def make(self) -> int:
        """Have those be made that wait; how many."""
        ((blocks, then),) = self.waiting
        self.waiting.clear()
        digests_at_once(self.node.now, blocks, then)
        return len(blocks)

    def is_whole(self) -> bool:
        """Whether the node holds just these blocks, and nobody holds any room."""
        self.store.check()
        for number, data in enumerate(self.data):
            copy = self.store.peek(BlockId(1, key(number)))
            assert copy is not None
            assert copy.digest == digest_of(data)
            assert self.node.memory[copy.offset : copy.offset + SLAB] == data
        return self.store.held_bytes == 0 and len(self.store) == len(self.data)


def test_blocks_put_together_are_there_as_their_digests_come_and_answered_at_the_end() -> None:
    put = Put(COMMITTED_AT_ONCE + 3)
    assert len(put.store) == 0
    assert put.make() == COMMITTED_AT_ONCE
    assert len(put.store) == COMMITTED_AT_ONCE
    assert not put.replies
    assert put.make() == 3
    (committed,) = put.replies
    assert isinstance(committed, local.Committed)
    assert [(b.status, b.digest) for b in committed.blocks] == [
        (local.OK, digest_of(data)) for data in put.data
    ]
    assert put.is_whole()
    assert not put.waiting


def test_what_a_client_has_put_is_there_though_it_left_while_digests_were_made() -> None:
    put = Put(COMMITTED_AT_ONCE + 1)
    put.make()
    put.session.close()
    put.make()
    assert not put.replies
    assert put.is_whole()


def test_blocks_of_a_namespace_that_is_deleted_while_digests_are_made_are_refused() -> None:
    put = Put(COMMITTED_AT_ONCE + 1)
    put.make()
    gone = msgspec.structs.replace(pool_map([1], epoch=2, namespaces=()), deleted=[1])
    put.node.take_map(gone)
    put.make()
    (committed,) = put.replies
    assert isinstance(committed, local.Committed)
    assert committed.blocks[-1].status == local.UNKNOWN_NAMESPACE
    assert put.store.used_bytes == 0
    put.store.check()


@pytest.mark.parametrize(
    ("sizes", "by_thread"),
    [
        ([1000, INLINE_BYTES - 1000], False),
        ([1000, INLINE_BYTES - 999], True),
        ([1] * (COMMITTED_AT_ONCE - 1), False),
        ([1] * COMMITTED_AT_ONCE, True),
    ],
)
def test_digests_of_much_and_of_many_are_made_by_a_thread(
    sizes: list[int], by_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(1)
    by: list[threading.Thread] = []

    def told(data: memoryview) -> int:
        by.append(threading.current_thread())
        return digest_of(data)

    monkeypatch.setattr(digests, "digest_of", told)
    datas = [random.Random(n).randbytes(size) for n, size in enumerate(sizes)]

    async def make() -> tuple[list[int], int]:
        pumped: list[None] = []
        threads = DigestThreads(node.core, lambda: pumped.append(None))
        made: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        blocks = list(map(memoryview, datas))
        node.core.make_digests(0.0, blocks, lambda _now, found: made.set_result(found))
        assert made.done() != by_thread
        found = await made
        await asyncio.sleep(0)
        threads.close()
        return found, len(pumped)

    found, pumped = asyncio.run(make())
    assert found == list(map(digest_of, datas))
    assert pumped == by_thread
    assert (by != []) == by_thread
    assert threading.main_thread() not in by


def test_nobody_looks_at_the_arena_or_hears_of_it_once_the_threads_were_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node(1)
    begun, may_end, heard = threading.Event(), threading.Event(), []
    ended: list[bool] = []

    def slowly(data: memoryview) -> int:
        begun.set()
        may_end.wait(10)
        ended.append(True)
        return digest_of(data)

    monkeypatch.setattr(digests, "digest_of", slowly)

    async def close() -> None:
        threads = DigestThreads(node.core, lambda: None)
        view = memoryview(bytes(INLINE_BYTES + 1))
        node.core.make_digests(0.0, [view], lambda *told: heard.append(told))
        assert await asyncio.to_thread(begun.wait, 10)
        threading.Timer(0.05, may_end.set).start()
        threads.close()
        assert ended
        await asyncio.sleep(0.01)

    asyncio.run(close())
    assert not heard
