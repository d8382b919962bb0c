"""Shared answers by RDMA WRITE: who gets a copy, whether their cards would take it, and what RoCE
does not pass.

The oracle of what a card takes is `roce_frames.is_right`: the ICRC by the book, over the frame as
it comes out. (tests/rdma asks Soft-RoCE.)
"""

from __future__ import annotations

import random

import pytest
from kvcast.protocol.messages import roce, wire
from p4_frames import checksum, wrap
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import (
    KEY,
    LEASE_US,
    NAMESPACE,
    Entry,
    PoolSwitch,
    content_of,
    endpoint,
    ports,
    ports_of,
)
from roce_frames import (
    ADDRESS,
    DESTINATION,
    IDENTIFICATION,
    IMMEDIATE,
    PAYLOAD,
    POOL_IP,
    PSN,
    QUEUE_PAIR,
    SOURCE,
    SOURCE_PORT,
    is_right,
    packet,
    stored,
    target_of,
    to_pool,
    write,
    zone_entries,
    zone_of,
)
from roce_frames import KEY as WRITE_KEY

SEGMENT = roce.SHARED_CHUNKING.number(1)
PLACE = roce.place_of(NAMESPACE, KEY, SEGMENT)
CHUNK = content_of(roce.SHARED_CHUNKING.chunk_bytes)
SIZE = 2 << 20


@pytest.fixture
def pool() -> PoolSwitch:
    pool = PoolSwitch()
    add(pool, *zone_entries((1, 2), (1, 2, 3)))
    return pool


def add(pool: PoolSwitch, *entries: Entry) -> None:
    for entry in entries:
        pool.add(entry.table, entry.key, entry.action, *entry.params)


def another(**fields: int) -> roce.Place:
    """The segment's place, but for these."""
    same = {"namespace": NAMESPACE, "entry_index": PLACE.entry_index, "slot": PLACE.slot}
    return roce.Place.of(**same | fields)


def read(reader: int, *, place: roce.Place = PLACE, flags: int = 0, **fields: int) -> wire.Frame:
    fields.setdefault("wanted", wire.FULL_SEGMENT)
    return wire.Frame(
        wire.OP_READ,
        place.namespace,
        KEY,
        SEGMENT,
        flags | wire.FLAG_WRITE,
        tag=place.tag,
        **fields,
    )


def written(**fields: int) -> wire.Frame:
    return wire.Frame(
        wire.OP_WRITTEN,
        NAMESPACE,
        KEY,
        SEGMENT,
        wire.FLAG_WRITE,
        digest=4711,
        size=SIZE,
        tag=PLACE.tag,
        **fields,
    )


def wait(pool: PoolSwitch, *readers: int) -> None:
    for reader in readers:
        pool.send(reader, 1, read(reader))


def sent(pool: PoolSwitch, port: int, frame: bytes) -> dict[int, bytes]:
    out = pool.switch.process(port, frame, pool.now_us)
    frames = dict(out)
    assert len(frames) == len(out), "more than one copy at a port"
    return frames


def test_the_first_read_goes_on_and_the_others_join(pool: PoolSwitch) -> None:
    (forwarded,) = pool.send(2, 1, read(2))
    assert forwarded.port == 1
    assert forwarded.frame.flags == wire.FLAG_WRITE | wire.FLAG_SHARED
    assert forwarded.frame.tag == PLACE.tag
    assert pool.send(3, 1, read(3)) == []
    assert pool.decided("new") == 1
    assert pool.decided("join") == 1


def test_each_who_waits_gets_a_packet_that_its_card_takes(pool: PoolSwitch) -> None:
    wait(pool, 2, 3)
    for chunk in (0, 1, 63):
        before = write(1, PLACE, chunk, CHUNK, psn=chunk)
        assert is_right(before)
        out = sent(pool, 1, before)
        assert sorted(out) == [2, 3]
        for reader, frame in out.items():
            wanted = bytearray(write(1, PLACE, chunk, CHUNK, psn=chunk, target=target_of(reader)))
            wanted[0:6] = endpoint(reader).mac
            for at, size in ((IDENTIFICATION, 2), (24, 2), (SOURCE_PORT, 2), (len(frame) - 4, 4)):
                wanted[at : at + size] = frame[at : at + size]
            assert frame == wanted
            assert stored(frame) == stored(before)
            assert is_right(frame)
    assert pool.decided("shared") == 3


@pytest.mark.parametrize("size", [0, 4, 100, 1024, 4092, 4096])
def test_packets_of_every_length_stay_right(pool: PoolSwitch, size: int) -> None:
    rng = random.Random(size)
    wait(pool, 2, 3)
    for home in (1, 2):
        frame = write(
            home,
            PLACE,
            7,
            rng.randbytes(size),
            psn=rng.getrandbits(24),
            identification=rng.getrandbits(16),
            source_port=rng.getrandbits(16),
        )
        out = sent(pool, home, frame)
        assert sorted(out) == [2, 3]
        assert all(is_right(copy) for copy in out.values())


@pytest.mark.parametrize(
    ("at", "size"),
    [
        (IDENTIFICATION, 2),
        (SOURCE, 4),
        (DESTINATION, 4),
        (SOURCE_PORT, 2),
        (QUEUE_PAIR, 3),
        (WRITE_KEY, 4),
    ],
)
def test_one_wrong_bit_in_a_rewritten_field_is_noticed(
    pool: PoolSwitch, at: int, size: int
) -> None:
    """Each bit of what the switch writes matters to the check."""
    wait(pool, 3)
    (frame,) = sent(pool, 1, write(1, PLACE, 0, CHUNK)).values()
    for bit in range(8 * size):
        changed = bytearray(frame)
        changed[at + bit // 8] ^= 1 << bit % 8
        checksum(changed)
        assert not is_right(bytes(changed)), f"bit {bit}"


@pytest.mark.parametrize("at", [IDENTIFICATION, PSN, SOURCE_PORT, PAYLOAD, PAYLOAD + 4095])
def test_what_was_damaged_on_the_way_to_the_switch_stays_damaged(pool: PoolSwitch, at: int) -> None:
    wait(pool, 2)
    frame = bytearray(write(1, PLACE, 0, CHUNK))
    frame[at] ^= 0x10
    checksum(frame)
    (copy,) = sent(pool, 1, bytes(frame)).values()
    assert not is_right(copy)


def test_written_ends_the_wait_of_all(pool: PoolSwitch) -> None:
    wait(pool, 2, 3)
    out = pool.send(1, 2, written())
    assert ports(out) == [2, 3]
    assert {r.frame.tag for r in out} == {PLACE.tag}
    assert all(r.frame.flags == wire.FLAG_WRITE | wire.FLAG_SHARED for r in out)
    assert sent(pool, 1, write(1, PLACE, 0, CHUNK)) == {}, "nobody waits any more"
    assert pool.decided("dropped") == 1
    assert ports(pool.send(3, 1, read(3))) == [1]
    assert pool.decided("new") == 2


def test_a_miss_ends_the_wait_of_all(pool: PoolSwitch) -> None:
    wait(pool, 2, 3)
    miss = wire.Frame(
        wire.OP_MISS,
        NAMESPACE,
        KEY,
        SEGMENT,
        wire.FLAG_WRITE,
        chunk=wire.MISS_NO_WRITE,
        tag=PLACE.tag,
    )
    assert ports(pool.send(1, 2, miss)) == [2, 3]
    assert sent(pool, 1, write(1, PLACE, 0, CHUNK)) == {}


def test_only_a_bucket_s_home_ends_a_wait(pool: PoolSwitch) -> None:
    wait(pool, 2, 3)
    assert pool.send(2, 3, written()) == []
    assert pool.decided("guarded") == 1
    assert sorted(sent(pool, 1, write(1, PLACE, 0, CHUNK))) == [2, 3]


def test_reads_by_udp_and_by_rdma_wait_apart(pool: PoolSwitch) -> None:
    """So no answer goes to a reader that cannot take it."""
    wait(pool, 2)
    plain = wire.Frame(wire.OP_READ, NAMESPACE, KEY, SEGMENT, wanted=wire.FULL_SEGMENT)
    assert ports(pool.send(3, 1, plain)) == [1]
    assert pool.decided("new") == 2
    assert sorted(sent(pool, 1, write(1, PLACE, 0, CHUNK))) == [2]
    data = pool.data(3, bytes(SIZE), 0, segment=1, chunking=roce.SHARED_CHUNKING)
    assert ports(data) == [3]


def test_a_reader_without_a_zone_gets_nothing_of_it(pool: PoolSwitch) -> None:
    wait(pool, 2, 4)
    assert sorted(sent(pool, 1, write(1, PLACE, 0, CHUNK))) == [2]


@pytest.mark.parametrize("what", ["another namespace", "another index", "another slot"])
def test_a_write_reaches_only_those_who_wait_for_its_place(pool: PoolSwitch, what: str) -> None:
    wait(pool, 2)
    other = {
        "another namespace": another(namespace=NAMESPACE ^ 1),
        "another index": another(entry_index=PLACE.entry_index ^ 0x8000),
        "another slot": another(slot=PLACE.slot ^ 1),
    }[what]
    assert sent(pool, 1, write(1, other, 0, CHUNK)) == {}
    assert sorted(sent(pool, 1, write(1, PLACE, 0, CHUNK))) == [2]


def test_a_tenant_cannot_take_another_s_place(pool: PoolSwitch) -> None:
    """Not even by its tag: the namespace, which the port guard knows, is part of the entry."""
    for tenant in (NAMESPACE + 1, NAMESPACE + 2):
        add(pool, Entry("namespace_guard", (3, tenant), "allow"))
        theirs = another(namespace=tenant)
        assert ports(pool.send(3, 1, read(3, place=theirs))) == [1]
    flags = [out.frame.flags for out in pool.send(2, 1, read(2))]
    assert flags == [wire.FLAG_WRITE], "not SHARED, so not answered by RDMA"
    assert pool.decided("collide") == 1
    assert sent(pool, 1, write(1, PLACE, 0, CHUNK)) == {}


def test_two_places_of_one_set_are_written_each_to_its_readers(pool: PoolSwitch) -> None:
    """Places that differ in their slot, and in the bit of the index that does not find the set."""
    for other in (
        another(slot=PLACE.slot ^ 1),
        another(entry_index=PLACE.entry_index ^ 0x8000),
    ):
        wait(pool, 2)
        flags = [out.frame.flags for out in pool.send(3, 1, read(3, place=other))]
        assert flags == [wire.FLAG_WRITE | wire.FLAG_SHARED]
        assert sorted(sent(pool, 1, write(1, PLACE, 0, CHUNK))) == [2]
        assert sorted(sent(pool, 1, write(1, other, 0, CHUNK))) == [3]
        pool.now_us += 2 * LEASE_US


@pytest.mark.parametrize(
    "change",
    [
        "address above the zone",
        "address below the zone",
        "beside a chunk",
        "the reader's key",
        "another opcode",
        "the first of several packets",
        "more fragments",
        "a damaged IPv4 header",
    ],
)
def test_what_is_no_home_s_write_does_not_pass(pool: PoolSwitch, change: str) -> None:
    wait(pool, 2, 3)
    at = roce.ZONE_ADDRESS | PLACE.address_low(0)
    if change == "address above the zone":
        low = (at + roce.ZONE_BYTES) & 0xFFFFFFFF
        entry = PLACE.immediate(0) ^ PLACE.address_low(0)
        frame = write(1, PLACE, 0, CHUNK, address=roce.ZONE_ADDRESS | low, immediate=entry ^ low)
    elif change == "address below the zone":
        frame = write(1, PLACE, 0, CHUNK, address=at & 0xFFFFFFFF)
    elif change == "beside a chunk":
        low = PLACE.address_low(0) + 64
        entry = PLACE.immediate(0) ^ PLACE.address_low(0)
        frame = write(1, PLACE, 0, CHUNK, address=at + 64, immediate=entry ^ low)
    elif change == "the reader's key":
        frame = write(1, PLACE, 0, CHUNK, target=to_pool(1)._replace(key=zone_of(2).key))
    elif change == "another opcode":
        frame = write(1, PLACE, 0, CHUNK, opcode=0x0B)  # RC
    elif change == "the first of several packets":
        frame = write(1, PLACE, 0, CHUNK, opcode=0x26)
    else:
        changed = bytearray(write(1, PLACE, 0, CHUNK))
        changed[20] |= 0x20  # more fragments follow
        if change == "more fragments":
            checksum(changed)
        frame = bytes(changed)
    assert sent(pool, 1, frame) == {}
    assert pool.decided("guarded") == 1
    assert sorted(sent(pool, 1, write(1, PLACE, 0, CHUNK))) == [2, 3]


def test_a_write_from_a_strange_source_does_not_pass(pool: PoolSwitch) -> None:
    wait(pool, 2, 3)
    frame = write(1, PLACE, 0, CHUNK, target=to_pool(1)._replace(source=endpoint(2).ip))
    assert sent(pool, 1, frame) == {}
    assert pool.decided("guarded") == 1


def test_a_host_that_is_no_home_for_rdma_reaches_nobody(pool: PoolSwitch) -> None:
    wait(pool, 1, 2)
    assert sent(pool, 3, write(3, PLACE, 0, CHUNK)) == {}


@pytest.mark.parametrize("sender", [1, 3])
@pytest.mark.parametrize("opcode", [0x2B, 0x2A, 0x24, 0x0A, 0x64])
def test_a_zone_is_not_reached_directly(pool: PoolSwitch, sender: int, opcode: int) -> None:
    """Whoever knows a reader's queue pair and key, and says that it is the pool."""
    wait(pool, 2)
    for source in (POOL_IP, endpoint(sender).ip):
        target = target_of(2)._replace(source=source)
        mac = endpoint(2).mac
        frame = write(sender, PLACE, 0, CHUNK, target=target, mac=mac, opcode=opcode)
        assert is_right(frame)
        assert sent(pool, sender, frame) == {}
    assert pool.decided("guarded") == 2


def test_other_rdma_is_ordinary_traffic(pool: PoolSwitch) -> None:
    wait(pool, 3)
    for opcode in (0x06, 0x0A, 0x2B, 0x81):
        target = roce.Target(endpoint(1).ip, endpoint(3).ip, 0x77, 0x99)
        frame = write(1, PLACE, 0, CHUNK, target=target, mac=endpoint(3).mac, opcode=opcode)
        assert sent(pool, 1, frame) == {3: frame}
    short = packet(1, endpoint(1).ip, endpoint(3).ip, 0x77, mac=endpoint(3).mac, opcode=0x11)
    assert sent(pool, 1, short) == {3: short}
    assert pool.decided("forwarded") == 5


def test_a_plain_switch_sends_nobody_s_write_nowhere() -> None:
    pool = PoolSwitch(enabled=False)
    add(pool, *zone_entries((1,), (2, 3)))
    wait(pool, 2)
    assert sent(pool, 1, write(1, PLACE, 0, CHUNK)) == {}


def test_a_write_is_never_sent_on_as_it_came(pool: PoolSwitch) -> None:
    """Addressed to a host that waits, to one that does not, and when nobody waits."""
    for readers in ((), (2,), (2, 3)):
        wait(pool, *readers)
        for host in (2, 3, 4):
            mac = endpoint(host).mac
            out = sent(pool, 1, write(1, PLACE, 0, CHUNK, mac=mac))
            assert sorted(out) == list(readers)
            assert all(is_right(frame) for frame in out.values())
        pool.send(1, 2, written())


def test_the_answer_keeps_the_entry_alive(pool: PoolSwitch) -> None:
    wait(pool, 2)
    for _ in range(4):
        pool.now_us += 900_000
        assert sorted(sent(pool, 1, write(1, PLACE, 0, CHUNK))) == [2]
    assert pool.send(3, 1, read(3)) == []
    assert sorted(sent(pool, 1, write(1, PLACE, 1, CHUNK))) == [2, 3]


def test_a_late_write_reaches_who_waits_for_that_place_now(pool: PoolSwitch) -> None:
    """Past the lease the entry is another's, of another tenant too: nothing reaches them."""
    add(pool, Entry("namespace_guard", (3, NAMESPACE + 1), "allow"))
    wait(pool, 2)
    pool.now_us += 2_000_000
    theirs = another(namespace=NAMESPACE + 1)
    pool.send(3, 1, read(3, place=theirs))
    assert pool.decided("expired") == 1
    assert sent(pool, 1, write(1, PLACE, 0, CHUNK)) == {}
    assert sorted(sent(pool, 1, write(1, theirs, 0, CHUNK))) == [3]


@pytest.mark.parametrize("flag", ["RETRY", "none"])
def test_a_repeat_goes_on_with_the_same_place(pool: PoolSwitch, flag: str) -> None:
    wait(pool, 2)
    flags = wire.FLAG_RETRY if flag == "RETRY" else 0
    out = pool.send(2, 1, read(2, flags=flags))
    assert ports(out) == ([1] if flags else [])


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_read_of_other_chunks_cannot_ask_for_rdma(pool: PoolSwitch, code: int) -> None:
    frame = bytearray(wrap(2, 1, read(2)))
    frame[42 + 36 : 42 + 38] = (code << 14 | 1).to_bytes(2, "big")
    assert ports_of(pool.switch.process(2, bytes(frame), pool.now_us)) == []
    assert pool.decided("dropped") == 1


def test_immediates_name_place_and_chunk() -> None:
    rng = random.Random(5)
    for _ in range(500):
        place = roce.place_of(rng.getrandbits(16), rng.randbytes(16), rng.getrandbits(16))
        chunk = rng.randrange(64)
        immediate = place.immediate(chunk)
        assert roce.name_of(immediate) == place.name
        assert (immediate ^ place.immediate(0)) >> roce.CHUNK_SHIFT == chunk
        assert place.address_low(chunk) < roce.ZONE_BYTES
        entry = immediate ^ place.address_low(chunk)
        assert entry == place.namespace << 16 | place.entry_index
        assert place.tag & 0xFFFF == place.entry_index
    assert (ADDRESS, IMMEDIATE) == (54, 70)
