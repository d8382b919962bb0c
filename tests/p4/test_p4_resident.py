"""How a segment enters the switch's cells in passing, and how a READ is served from them."""

from __future__ import annotations

import pytest
from kvcast.protocol.messages import wire
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import KEY, NAMESPACE, PoolSwitch, content_of, endpoint, ports

SHORT = content_of(3 * wire.CHUNK_BYTES - 100)
WHOLE = content_of(wire.SEGMENT_BYTES)


@pytest.fixture
def pool() -> PoolSwitch:
    return PoolSwitch()


def reassembled(received: list, size: int) -> bytes:
    chunks = sorted((r.frame.chunk, bytes(r.frame.payload)) for r in received)
    return b"".join(payload for _, payload in chunks)[:size]


@pytest.mark.parametrize("content", [SHORT, WHOLE], ids=["short", "whole"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_a_read_is_served_once_data_has_filled_the_slot(
    pool: PoolSwitch, content: bytes, padded: bool
) -> None:
    pool.make_resident(KEY, content)
    pool.read(2)
    pool.answer(2, content)
    assert pool.fills("filled") == wire.CELLS.chunks_of(len(content), 0)

    out = pool.read(3, flags=wire.FLAG_PADDED if padded else 0, tag=99)

    assert {r.port for r in out} == {3}
    assert reassembled(out, len(content)) == content
    for received in out:
        assert received.source == endpoint(1)
        assert received.destination == endpoint(3)
        frame = received.frame
        last = frame.chunk == wire.CELLS.chunks_of(len(content), 0) - 1
        assert frame.flags == wire.FLAG_RESIDENT | (wire.FLAG_LAST if last else 0)
        assert (frame.size, frame.digest) == (len(content), wire.digest_of(content))
        assert frame.tag == 99
    assert pool.decided("hit") == 1
    hits = next(c for name, c in pool.switch.counters.items() if name.endswith("resident_hits"))
    assert hits.read(3)[0] == 1


def test_an_empty_slot_serves_nothing(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, SHORT)
    assert ports(pool.read(2)) == [1]
    assert pool.decided("hit") == 0


def test_only_what_is_there_is_served(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, SHORT)
    pool.data(2, SHORT, 1)
    assert ports(pool.read(3)) == [1], "not the whole segment"
    out = pool.read(4, wanted=0b010, flags=wire.FLAG_PARTIAL)
    assert [(r.port, r.frame.chunk) for r in out] == [(4, 1)]
    assert ports(pool.read(4, wanted=0b011, flags=wire.FLAG_PARTIAL)) == [1]


def test_another_copys_bytes_stay_out(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, SHORT)
    other = content_of(len(SHORT), seed=5)
    pool.answer(2, other)
    assert pool.fills("wrong_digest") == 3
    assert ports(pool.read(3)) == [1]


def test_a_reader_of_another_copy_is_not_served(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, SHORT)
    pool.answer(2, SHORT)
    assert ports(pool.read(3, digest=1234)) == [1]
    assert len(pool.read(3, digest=wire.digest_of(SHORT))) == 3


def test_a_new_generation_starts_empty(pool: PoolSwitch) -> None:
    handle = pool.make_resident(KEY, SHORT)
    pool.answer(2, SHORT)
    pool.table("resident").delete(handle)
    pool.make_resident(KEY, SHORT, generation=2)
    assert ports(pool.read(3)) == [1]
    pool.data(3, SHORT, 0)
    assert ports(pool.read(4, wanted=2, flags=wire.FLAG_PARTIAL)) == [1], "chunk 1 is the old one"


def test_two_slots_keep_apart(pool: PoolSwitch) -> None:
    other_key, other = b"k" * 16, content_of(2 * wire.CHUNK_BYTES, seed=9)
    pool.make_resident(KEY, SHORT, slot=0)
    pool.make_resident(other_key, other, slot=255)
    pool.answer(2, SHORT)
    pool.answer(2, other, key=other_key)
    assert reassembled(pool.read(3), len(SHORT)) == SHORT
    assert reassembled(pool.read(3, key=other_key), len(other)) == other


def test_a_chunk_beyond_the_segment_is_not_filled(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, SHORT)
    frame = wire.encode(
        wire.Frame(
            wire.OP_DATA, NAMESPACE, KEY, digest=wire.digest_of(SHORT), size=len(SHORT), chunk=0,
            payload=bytes(wire.CHUNK_BYTES),
        )
    )  # fmt: skip
    chunk_at = 38
    from kvcast.protocol.messages import ethernet

    for chunk in (3, 63, 64, 255):
        bad = frame[:chunk_at] + bytes([chunk]) + frame[chunk_at + 1 :]
        pool.switch.process(
            1, ethernet.Encapsulation(endpoint(1), endpoint(2)).wrap(bad), pool.now_us
        )
    assert pool.fills("no_chunk") == 2
    assert pool.decided("dropped") == 2, "no segment has a chunk 64 or 255: malformed"
    assert pool.fills("filled") == 0


def test_who_waits_gets_the_data_that_fills(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, SHORT)
    pool.read(2)
    pool.read(3)
    out = pool.answer(2, SHORT)
    assert ports(out) == [2, 2, 2, 3, 3, 3]
    assert pool.fills("filled") == 3
