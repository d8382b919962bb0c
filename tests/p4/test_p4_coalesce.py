"""What the pending interest table does with READs of one segment, and DATA with those who wait."""

from __future__ import annotations

import functools
import itertools
import zlib

import p4_frames
import pytest
from kvcast.protocol.messages import wire
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import KEY, LEASE_US, NAMESPACE, PoolSwitch, content_of, endpoint, ports

CONTENT = content_of(3 * wire.CHUNK_BYTES)


@pytest.fixture
def pool() -> PoolSwitch:
    return PoolSwitch()


def test_the_first_read_is_forwarded_and_the_others_wait(pool: PoolSwitch) -> None:
    assert ports(pool.read(2)) == [1]
    assert pool.read(3) == []
    assert pool.read(4) == []
    assert (pool.decided("new"), pool.decided("join")) == (1, 2)


def test_data_reaches_everybody_who_waits_addressed_to_them(pool: PoolSwitch) -> None:
    for reader in (2, 3, 4):
        pool.read(reader)
    out = pool.data(2, CONTENT, 0)
    assert ports(out) == [2, 3, 4]
    for received in out:
        assert received.destination == endpoint(received.port)
        assert received.source == endpoint(1)
        assert received.frame.flags == wire.FLAG_SHARED
        assert bytes(received.frame.payload) == CONTENT[: wire.CHUNK_BYTES]


def test_the_last_chunk_ends_the_wait(pool: PoolSwitch) -> None:
    pool.read(2)
    pool.read(3)
    assert ports(pool.data(2, CONTENT, 2, flags=wire.FLAG_LAST)) == [2, 3]
    assert ports(pool.data(2, CONTENT, 1)) == [2]
    assert ports(pool.read(3)) == [1]
    assert pool.decided("new") == 2


def test_data_for_one_reader_is_left_as_it_is(pool: PoolSwitch) -> None:
    pool.read(2)
    (received,) = pool.data(2, CONTENT, 0)
    assert received.port == 2
    assert received.frame.flags == 0
    assert pool.decided("unicast") == 1


def test_data_nobody_waits_for_goes_to_its_addressee(pool: PoolSwitch) -> None:
    assert ports(pool.data(4, CONTENT, 0)) == [4]


def test_a_repeat_is_forwarded_although_others_wait(pool: PoolSwitch) -> None:
    pool.read(2)
    pool.read(3)
    assert ports(pool.read(3, flags=wire.FLAG_RETRY)) == [1]
    assert pool.decided("retry") == 1
    assert ports(pool.data(3, CONTENT, 0)) == [2, 3]


def test_the_same_read_sent_twice_is_no_repeat(pool: PoolSwitch) -> None:
    pool.read(2)
    assert pool.read(2) == []
    assert pool.decided("join") == 1
    assert ports(pool.data(2, CONTENT, 0)) == [2]


def test_a_repeat_refreshes_the_lease(pool: PoolSwitch) -> None:
    pool.read(2)
    pool.now_us += LEASE_US * 3 // 4
    pool.read(2, flags=wire.FLAG_RETRY)
    pool.now_us += LEASE_US * 3 // 4
    assert pool.read(3) == []


def test_a_lease_that_ran_out_lets_the_next_read_ask_again_for_all(pool: PoolSwitch) -> None:
    pool.read(2)
    pool.now_us += LEASE_US + 1000
    assert ports(pool.read(3)) == [1]
    assert pool.decided("expired") == 1
    assert ports(pool.data(3, CONTENT, 0)) == [2, 3]


def test_a_lease_that_ran_out_gives_the_entry_to_another_segment(pool: PoolSwitch) -> None:
    other, _ = colliding_keys()
    pool.read(2)
    pool.now_us += LEASE_US + 1000
    assert ports(pool.read(3, key=other)) == [1]
    assert pool.decided("expired") == 1
    assert pool.read(4, key=other) == []
    assert ports(pool.data(3, CONTENT, 0, key=other)) == [3, 4]
    assert ports(pool.data(2, CONTENT, 0)) == [2], "whose entry is gone"


def test_a_read_that_goes_on_while_its_entry_holds_it_is_marked(pool: PoolSwitch) -> None:
    """So that the home may answer it together with others that are marked."""
    (first,) = pool.read(2)
    (repeat,) = pool.read(3, flags=wire.FLAG_RETRY)
    second, third = colliding_keys()
    pool.read(2, key=second)
    (other,) = pool.read(3, key=third)
    (part,) = pool.read(4, wanted=1, flags=wire.FLAG_PARTIAL)
    marks = [r.frame.flags & wire.FLAG_SHARED for r in (first, repeat, other, part)]
    assert marks == [wire.FLAG_SHARED, wire.FLAG_SHARED, 0, 0]


def test_a_mark_that_a_host_makes_itself_is_taken_off(pool: PoolSwitch) -> None:
    second, third = colliding_keys()
    pool.read(2)
    pool.read(2, key=second)
    (collided,) = pool.read(3, key=third, flags=wire.FLAG_SHARED)
    assert pool.decided("collide") == 1
    assert collided.frame.flags == 0


def test_an_answer_under_way_keeps_its_entry_alive(pool: PoolSwitch) -> None:
    pool.read(2)
    for chunk in (0, 1):
        pool.now_us += LEASE_US * 3 // 4
        pool.data(2, CONTENT, chunk)
    pool.now_us += LEASE_US * 3 // 4
    assert pool.read(3) == []


def test_a_changed_read_has_no_udp_checksum_left(pool: PoolSwitch) -> None:
    """A kernel's socket computes one, and a mark would make it wrong."""
    raw = bytearray(
        p4_frames.wrap(2, 1, wire.Frame(wire.OP_READ, NAMESPACE, KEY, wanted=wire.FULL_SEGMENT))
    )
    raw[40:42] = b"\x12\x34"
    ((_, out),) = pool.switch.process(2, bytes(raw), pool.now_us)
    assert out[40:42] == b"\0\0"


def test_joining_does_not_refresh_the_lease(pool: PoolSwitch) -> None:
    pool.read(2)
    pool.now_us += LEASE_US * 3 // 4
    assert pool.read(3) == []
    pool.now_us += LEASE_US * 3 // 4
    assert ports(pool.read(4)) == [1]


def test_a_read_for_part_of_a_segment_never_coalesces(pool: PoolSwitch) -> None:
    pool.read(2)
    assert ports(pool.read(3, wanted=6, flags=wire.FLAG_PARTIAL)) == [1]
    assert ports(pool.data(3, CONTENT, 1, flags=wire.FLAG_PARTIAL)) == [3]
    partial_last = wire.FLAG_PARTIAL | wire.FLAG_LAST
    assert ports(pool.data(3, CONTENT, 2, flags=partial_last)) == [3]
    assert pool.read(4) == [], "the answer to a part does not end the wait for the whole"


def test_a_miss_reaches_everybody_and_ends_the_wait(pool: PoolSwitch) -> None:
    pool.read(2)
    pool.read(3)
    miss = wire.Frame(wire.OP_MISS, NAMESPACE, KEY, chunk=wire.MISS_NOT_FOUND)
    out = pool.send(1, 2, miss)
    assert ports(out) == [2, 3]
    assert [r.destination for r in out] == [endpoint(r.port) for r in out]
    assert ports(pool.read(3)) == [1]


def test_an_offer_goes_to_its_addressee_alone(pool: PoolSwitch) -> None:
    pool.read(2)
    pool.read(3)
    offer = wire.encode_offer(wire.Offer(wire.OFFER_TCP, 9000, 1, 2, 0))
    frame = wire.Frame(wire.OP_OFFER, NAMESPACE, KEY, digest=1, size=len(CONTENT), payload=offer)
    assert ports(pool.send(1, 2, frame)) == [2]
    assert pool.read(4) == []


def test_segments_and_keys_do_not_wait_for_each_other(pool: PoolSwitch) -> None:
    assert ports(pool.read(2)) == [1]
    assert ports(pool.read(3, segment=1)) == [1]
    assert ports(pool.read(4, key=b"another key, yes")) == [1]


def hash_of(key: bytes) -> int:
    """CRC-32 over (namespace, key, segment 0): the low 15 bits find the set of the pending interest
    table, the others are in the fingerprint."""
    return zlib.crc32(NAMESPACE.to_bytes(2, "big") + key + bytes(2))


@functools.cache
def colliding_keys() -> tuple[bytes, bytes]:
    """Two keys whose segment 0 shares KEY's set of pending entries, with other fingerprints."""
    wanted = hash_of(KEY) & 0x7FFF
    numbers = (number.to_bytes(16, "big") for number in range(1 << 21))
    first, second = itertools.islice((k for k in numbers if hash_of(k) & 0x7FFF == wanted), 2)
    return first, second


def test_two_segments_that_meet_in_a_set_coalesce_each_for_itself(pool: PoolSwitch) -> None:
    other, _ = colliding_keys()
    for key in (KEY, other):
        assert ports(pool.read(2, key=key)) == [1]
        assert pool.read(3, key=key) == []
        assert pool.read(4, key=key) == []
    assert (pool.decided("new"), pool.decided("join"), pool.decided("collide")) == (2, 4, 0)
    for key in (other, KEY):
        assert ports(pool.data(2, CONTENT, 0, key=key)) == [2, 3, 4]
        assert ports(pool.data(2, CONTENT, 1, key=key, flags=wire.FLAG_LAST)) == [2, 3, 4]
        assert ports(pool.data(2, CONTENT, 2, key=key)) == [2], "the wait has ended"


def test_a_repeat_refreshes_the_second_entry(pool: PoolSwitch) -> None:
    other, _ = colliding_keys()
    pool.read(2)
    pool.read(3, key=other)
    pool.now_us += LEASE_US * 3 // 4
    pool.data(2, CONTENT, 0)
    assert ports(pool.read(3, key=other, flags=wire.FLAG_RETRY)) == [1]
    pool.now_us += LEASE_US * 3 // 4
    assert pool.read(4, key=other) == []
    assert pool.decided("retry") == 1
    assert ports(pool.data(3, CONTENT, 0, key=other)) == [3, 4]


def test_a_second_entry_past_its_lease_is_taken_over(pool: PoolSwitch) -> None:
    other, third = colliding_keys()
    pool.read(2)
    pool.read(3, key=other)
    pool.now_us += LEASE_US * 3 // 4
    pool.data(2, CONTENT, 0)
    pool.now_us += LEASE_US * 3 // 4
    assert ports(pool.read(4, key=third)) == [1]
    assert pool.decided("expired") == 1
    assert ports(pool.data(2, CONTENT, 0, key=other)) == [2], "who waited there waits no more"
    assert ports(pool.data(2, CONTENT, 0, key=third)) == [2, 4]


def test_a_third_segment_in_the_set_is_forwarded_plain_and_changes_nothing(
    pool: PoolSwitch,
) -> None:
    other, third = colliding_keys()
    pool.read(2)
    pool.read(2, key=other)
    assert ports(pool.read(3, key=third)) == [1]
    assert pool.decided("collide") == 1
    assert ports(pool.data(3, CONTENT, 0, key=third, flags=wire.FLAG_LAST)) == [3]
    for key in (KEY, other):
        assert pool.read(4, key=key) == []
        assert ports(pool.data(2, CONTENT, 0, key=key)) == [2, 4]


@pytest.mark.parametrize("end", ["the last chunk", "a miss"])
def test_an_answer_goes_to_who_waits_in_either_entry_and_frees_both(
    pool: PoolSwitch, end: str
) -> None:
    """The first entry was another's when the one reader asked, and free when the other did."""
    other, third = colliding_keys()
    pool.read(4)
    assert ports(pool.read(2, key=other)) == [1]
    pool.answer(4, CONTENT)
    assert ports(pool.read(3, key=other)) == [1]
    assert ports(pool.data(2, CONTENT, 0, key=other)) == [2, 3]
    if end == "a miss":
        last = wire.Frame(wire.OP_MISS, NAMESPACE, other, chunk=wire.MISS_NOT_FOUND)
        out = pool.send(1, 3, last)
    else:
        out = pool.data(3, CONTENT, 2, key=other, flags=wire.FLAG_LAST)
    assert ports(out) == [2, 3]
    assert ports(pool.data(2, CONTENT, 1, key=other)) == [2]
    for key in (KEY, third):
        assert ports(pool.read(4, key=key)) == [1]
    assert pool.decided("collide") == 0, "both entries are free"


def test_an_answer_of_no_home_ends_no_wait_in_the_second_entry(pool: PoolSwitch) -> None:
    other, _ = colliding_keys()
    pool.read(2)
    pool.read(3, key=other)
    data = wire.Frame(
        wire.OP_DATA,
        NAMESPACE,
        other,
        flags=wire.FLAG_LAST,
        digest=wire.digest_of(CONTENT),
        size=len(CONTENT),
        chunk=2,
        payload=CONTENT[2 * wire.CHUNK_BYTES :],
    )
    assert pool.send(4, 3, data) == []
    assert pool.decided("guarded") == 1
    assert pool.read(2, key=other) == []
    assert ports(pool.data(3, CONTENT, 0, key=other)) == [2, 3]


def test_a_port_set_of_its_own_carries_the_copies(pool: PoolSwitch) -> None:
    pool.switch.set_multicast_group(2048, [(2, 0), (3, 0)])
    pool.add("port_set", (0b110,), "set_group", 2048)
    pool.read(2)
    pool.read(3)
    out = pool.data(2, CONTENT, 0)
    assert ports(out) == [2, 3]
    assert pool.switch.stats.dropped_egress == 0, "the group has no port to filter out"


def test_with_the_program_off_frames_are_ordinary_traffic() -> None:
    pool = PoolSwitch(enabled=False)
    for reader in (2, 3, 4):
        assert ports(pool.read(reader)) == [1]
        assert ports(pool.data(reader, CONTENT, 0)) == [reader]
    assert pool.decided("forwarded") == 6
