"""Heat: what the controller hears of segments that are read often."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from kvcast.protocol.messages import wire
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import KEY, NAMESPACE, PoolSwitch, content_of

THRESHOLD = 5
WINDOW_US = 64 << 14
CONTENT = content_of(2 * wire.CHUNK_BYTES)


@dataclass(frozen=True)
class HeatMessage:
    namespace: int
    segment: int
    key: bytes
    port_bits: int
    reader_bit: int
    count: int


@pytest.fixture
def pool() -> PoolSwitch:
    pool = PoolSwitch(heat_threshold=THRESHOLD)
    pool.now_us = 20 * WINDOW_US
    return pool


def heard(pool: PoolSwitch) -> list[HeatMessage]:
    out = []
    for message in pool.switch.take_digests():
        namespace, segment, key, port_bits, reader_bit, count = message.fields
        out.append(
            HeatMessage(namespace, segment, key.to_bytes(16, "big"), port_bits, reader_bit, count)
        )
    return out


def demand(pool: PoolSwitch, reads: int, reader: int = 2, key: bytes = KEY) -> None:
    """READs that are each answered, so that each is a new one."""
    for _ in range(reads):
        pool.read(reader, key=key)
        pool.answer(reader, CONTENT, key=key)


def test_the_read_that_reaches_the_threshold_is_reported_once_a_window(pool: PoolSwitch) -> None:
    demand(pool, THRESHOLD - 1)
    assert heard(pool) == []
    pool.read(3)
    assert heard(pool) == [HeatMessage(NAMESPACE, 0, KEY, 0b100, 0b100, THRESHOLD)]
    demand(pool, 20)
    assert heard(pool) == []


def test_the_message_names_the_ports_that_wait(pool: PoolSwitch) -> None:
    demand(pool, THRESHOLD - 2)
    pool.read(2)
    pool.read(4)
    (message,) = heard(pool)
    assert (message.port_bits, message.reader_bit) == (0b1010, 0b1000)


def test_counts_start_anew_with_each_window(pool: PoolSwitch) -> None:
    demand(pool, THRESHOLD - 1)
    pool.now_us += WINDOW_US
    demand(pool, THRESHOLD - 1)
    assert heard(pool) == []
    demand(pool, 1)
    assert [message.count for message in heard(pool)] == [THRESHOLD]
    pool.now_us += WINDOW_US
    demand(pool, THRESHOLD)
    assert len(heard(pool)) == 1, "and so does the right to report"


def test_segments_and_keys_are_counted_apart(pool: PoolSwitch) -> None:
    demand(pool, THRESHOLD - 1)
    demand(pool, THRESHOLD - 1, key=b"k" * 16)
    for _ in range(THRESHOLD - 1):
        pool.read(2, segment=1, flags=0)
        pool.now_us += 2_000
    assert heard(pool) == []


def test_repeats_and_parts_show_no_demand(pool: PoolSwitch) -> None:
    pool.read(2)
    for _ in range(3 * THRESHOLD):
        pool.read(2, flags=wire.FLAG_RETRY)
        pool.read(2, wanted=1, flags=wire.FLAG_PARTIAL)
    assert heard(pool) == []


def test_reads_that_switch_memory_answers_are_no_heat(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, CONTENT)
    demand(pool, 1)
    for _ in range(3 * THRESHOLD):
        assert len(pool.read(3)) == 2
    assert heard(pool) == []


def test_threshold_zero_reports_nothing() -> None:
    pool = PoolSwitch(heat_threshold=0)
    demand(pool, 50)
    assert heard(pool) == []


def test_many_cold_segments_are_not_taken_for_a_hot_one(pool: PoolSwitch) -> None:
    for number in range(3000):
        pool.read(2, key=number.to_bytes(16, "little"))
    reported = heard(pool)
    assert len(reported) < 10, "3000 reads in 16,384 cells: hardly ever five in one, in all rows"
