"""Reader groups: one member's READ speaks for all."""

from __future__ import annotations

import pytest
from kvcast.p4.definitions import RECIRCULATE_RID
from kvcast.protocol.messages import wire
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import KEY, NAMESPACE, PoolSwitch, content_of, endpoint, ports

CONTENT = content_of(3 * wire.CHUNK_BYTES)
GROUP = 9


@pytest.fixture
def pool() -> PoolSwitch:
    """Hosts 2, 3 and 4 are group 9; host 5 is not."""
    pool = PoolSwitch(5)
    pool.switch.set_multicast_group(1024, [(2, 0), (3, 0), (4, 0), (4, RECIRCULATE_RID)])
    pool.add("reader_group", (NAMESPACE, GROUP), "set_reader_group", 0b01110, 1024)
    return pool


def test_the_answer_to_one_member_reaches_all(pool: PoolSwitch) -> None:
    assert ports(pool.read(2, group=GROUP)) == [1]
    out = pool.answer(2, CONTENT)
    assert ports(out) == sorted([2, 3, 4] * 3)
    assert {r.destination for r in out} == {endpoint(host) for host in (2, 3, 4)}
    assert {r.frame.flags & wire.FLAG_SHARED for r in out} == {wire.FLAG_SHARED}


def test_a_members_own_read_waits_for_the_groups_answer(pool: PoolSwitch) -> None:
    pool.read(2, group=GROUP)
    assert pool.read(3, group=GROUP) == []
    assert pool.read(2, group=GROUP) == [], "its bit may stem from another member's READ"
    assert pool.decided("join") == 2


def test_a_members_repeat_is_sent_on(pool: PoolSwitch) -> None:
    pool.read(2, group=GROUP)
    assert ports(pool.read(3, group=GROUP, flags=wire.FLAG_RETRY)) == [1]
    assert pool.decided("retry") == 1


def test_a_stranger_cannot_speak_for_a_group(pool: PoolSwitch) -> None:
    pool.read(5, group=GROUP)
    assert ports(pool.data(5, CONTENT, 0)) == [5]
    assert pool.read(2, group=GROUP) == [], "the member joins, and brings the others"
    assert ports(pool.data(5, CONTENT, 1)) == [2, 3, 4, 5]


def test_a_group_that_nobody_made_is_no_group(pool: PoolSwitch) -> None:
    pool.read(2, group=77)
    assert ports(pool.data(2, CONTENT, 0)) == [2]
    assert ports(pool.data(2, CONTENT, 1)) == [2], "nobody else joined by it"


def test_a_part_is_for_its_reader_alone(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, CONTENT)
    pool.answer(5, CONTENT)
    out = pool.read(3, group=GROUP, wanted=0b101, flags=wire.FLAG_PARTIAL)
    assert [(r.port, r.frame.chunk) for r in out] == [(3, 0), (3, 2)]


def test_a_resident_segment_is_served_to_the_whole_group(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, CONTENT)
    pool.answer(5, CONTENT)
    out = pool.read(3, group=GROUP)
    assert ports(out) == sorted([2, 3, 4] * 3)
    for received in out:
        assert received.source == endpoint(1)
        assert received.destination == endpoint(received.port)
        assert received.frame.group == GROUP
        assert received.frame.flags & ~wire.FLAG_LAST == wire.FLAG_RESIDENT
    assert pool.decided("hit") == 1
    assert pool.decided("serving") == 2
