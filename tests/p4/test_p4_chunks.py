"""Chunks larger than a cell: they coalesce as others do, apart from others, and switch memory has
nothing to do with them."""

from __future__ import annotations

import pytest
from kvcast.protocol.messages import ethernet, wire
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import KEY, NAMESPACE, PoolSwitch, content_of, endpoint, ports

LARGE = wire.CHUNKINGS[1:]
CONTENT = content_of(3 * 8192)


@pytest.fixture
def pool() -> PoolSwitch:
    return PoolSwitch()


@pytest.mark.parametrize("chunking", LARGE)
def test_reads_for_large_chunks_share_an_answer(pool: PoolSwitch, chunking: wire.Chunking) -> None:
    segment = chunking.number(0)
    assert ports(pool.read(2, segment=segment)) == [1]
    assert pool.read(3, segment=segment) == []
    out = pool.data(2, CONTENT, 1, chunking=chunking)
    assert ports(out) == [2, 3]
    for received in out:
        assert received.frame.flags == wire.FLAG_SHARED
        at = chunking.chunk_bytes
        assert bytes(received.frame.payload) == CONTENT[at : 2 * at]
    assert ports(pool.data(2, CONTENT, 2, chunking=chunking, flags=wire.FLAG_LAST)) == [2, 3]
    assert ports(pool.data(2, CONTENT, 0, chunking=chunking)) == [2]


def test_reads_for_chunks_of_different_sizes_do_not_wait_for_each_other(pool: PoolSwitch) -> None:
    for reader, chunking in enumerate(wire.CHUNKINGS, 2):
        assert ports(pool.read(min(reader, 4), segment=chunking.number(0))) == [1]
    assert pool.decided("new") == len(wire.CHUNKINGS)
    assert ports(pool.data(2, CONTENT, 0)) == [2]


@pytest.mark.parametrize("chunking", LARGE)
def test_a_resident_block_is_not_served_in_large_chunks(
    pool: PoolSwitch, chunking: wire.Chunking
) -> None:
    content = CONTENT[:3072]
    pool.make_resident(KEY, content)
    pool.answer(2, content)
    assert pool.fills("filled") == 3
    assert ports(pool.read(3, segment=chunking.number(0))) == [1]
    assert pool.decided("hit") == 0
    assert len(pool.read(3)) == 3


@pytest.mark.parametrize("chunking", LARGE)
def test_large_chunks_fill_no_cell(pool: PoolSwitch, chunking: wire.Chunking) -> None:
    pool.make_resident(KEY, CONTENT)
    for chunk in range(chunking.chunks_of(len(CONTENT), 0)):
        assert ports(pool.data(2, CONTENT, chunk, chunking=chunking)) == [2]
    assert [pool.fills(name) for name in ("filled", "wrong_digest", "no_chunk")] == [0, 0, 0]
    assert ports(pool.read(3)) == [1]


@pytest.mark.parametrize("says", wire.CHUNKINGS)
@pytest.mark.parametrize("has", wire.CHUNKINGS)
def test_data_that_is_not_of_the_size_that_it_says_is_malformed(
    pool: PoolSwitch, says: wire.Chunking, has: wire.Chunking
) -> None:
    frame = wire.Frame(
        wire.OP_DATA,
        NAMESPACE,
        KEY,
        has.number(0),
        digest=7,
        size=len(CONTENT),
        payload=CONTENT[: has.chunk_bytes],
    )
    datagram = bytearray(wire.encode(frame))
    datagram[36:38] = says.number(0).to_bytes(2, "big")
    wrap = ethernet.Encapsulation(endpoint(1), endpoint(2)).wrap
    out = pool.send_raw(1, wrap(bytes(datagram)))
    assert ports(out) == ([2] if says is has else [])
    assert pool.decided("dropped") == (says is not has)
