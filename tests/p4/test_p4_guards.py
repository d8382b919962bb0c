"""Who may speak kvcast on a port, and which frames are none at all."""

from __future__ import annotations

import zlib

import pytest
from kvcast.protocol.messages import ethernet, wire
from kvcast.switchsim.ir import Exact
from p4_frames import checksum, wrap
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import KEY, NAMESPACE, PoolSwitch, content_of, endpoint, ports, ports_of

CONTENT = content_of(3 * wire.CHUNK_BYTES)
DATAGRAM_AT = 42
FLAGS_AT = DATAGRAM_AT + 2


@pytest.fixture
def pool() -> PoolSwitch:
    return PoolSwitch()


def read_frame(reader: int = 2, **fields: int) -> bytearray:
    fields.setdefault("wanted", wire.FULL_SEGMENT)
    frame = wire.Frame(wire.OP_READ, NAMESPACE, KEY, **fields)
    return bytearray(wrap(reader, 1, frame))


def data_frame(**fields: int) -> bytearray:
    frame = wire.Frame(
        wire.OP_DATA,
        NAMESPACE,
        KEY,
        digest=wire.digest_of(CONTENT),
        size=len(CONTENT),
        payload=CONTENT[: wire.CHUNK_BYTES],
        **fields,
    )
    return bytearray(wrap(1, 2, frame))


def raw(pool: PoolSwitch, port: int, frame: bytes) -> list[int]:
    return ports_of(pool.switch.process(port, bytes(frame), pool.now_us))


def test_a_source_address_belongs_to_its_port(pool: PoolSwitch) -> None:
    assert raw(pool, 3, read_frame(reader=2)) == []
    assert pool.decided("guarded") == 1
    assert ports(pool.read(3)) == [1]
    assert pool.decided("new") == 1, "the forged READ opened no entry"


def test_a_namespace_must_be_allowed_on_the_port(pool: PoolSwitch) -> None:
    frame = wire.Frame(wire.OP_READ, NAMESPACE + 1, KEY, wanted=wire.FULL_SEGMENT)
    assert pool.send(2, 1, frame) == []
    assert pool.decided("guarded") == 1


@pytest.mark.parametrize("op", [wire.OP_DATA, wire.OP_MISS, wire.OP_OFFER])
def test_only_a_home_of_the_bucket_answers(pool: PoolSwitch, op: int) -> None:
    pool.make_resident(KEY, CONTENT)
    pool.read(2)
    pool.read(3)
    if op == wire.OP_DATA:
        assert pool.data(2, CONTENT, 0, home=4, flags=wire.FLAG_LAST) == []
    elif op == wire.OP_MISS:
        assert pool.send(4, 2, wire.Frame(op, NAMESPACE, KEY, chunk=1)) == []
    else:
        offer = wire.encode_offer(wire.Offer(wire.OFFER_TCP, 9000, 1, 2, 0))
        frame = wire.Frame(op, NAMESPACE, KEY, digest=1, size=9, payload=offer)
        assert pool.send(4, 2, frame) == []
    assert pool.decided("guarded") == 1
    assert pool.fills("filled") == 0
    assert ports(pool.data(2, CONTENT, 0)) == [2, 3], "both still wait"


def test_tenants_never_share_an_entry(pool: PoolSwitch) -> None:
    """A key of another namespace with the same 32-bit hash: CRC is linear, so it can be made."""
    pool.read(2)
    for foreign in (NAMESPACE + 1, NAMESPACE + 2):
        for host in (1, 3):
            pool.add("namespace_guard", (host, foreign), "allow")
        key = same_hash(foreign)
        spy = wire.Frame(wire.OP_READ, foreign, key, wanted=wire.FULL_SEGMENT)
        assert ports(pool.send(3, 1, spy)) == [1]
    assert (pool.decided("new"), pool.decided("collide")) == (2, 1)
    assert ports(pool.data(2, CONTENT, 0)) == [2]


def same_hash(namespace: int) -> bytes:
    """A key which in `namespace` has the CRC-32 that KEY has in NAMESPACE (zlib's CRC-32)."""
    tail = KEY[4:] + bytes(2)
    wanted = zlib.crc32(NAMESPACE.to_bytes(2, "big") + KEY + bytes(2))
    base = zlib.crc32(namespace.to_bytes(2, "big") + bytes(4) + tail)
    start = namespace.to_bytes(2, "big")
    heads = [1 << bit for bit in range(32)]
    rows = [(base ^ zlib.crc32(start + head.to_bytes(4, "big") + tail), head) for head in heads]
    difference, head = wanted ^ base, 0
    for bit in range(32):  # Gaussian elimination over GF(2)
        pivot = next(i for i, (row, _) in enumerate(rows) if row >> bit & 1)
        pivot_row, pivot_head = rows.pop(pivot)
        rows = [
            (row ^ pivot_row, mask ^ pivot_head) if row >> bit & 1 else (row, mask)
            for row, mask in rows
        ]
        if difference >> bit & 1:
            difference, head = difference ^ pivot_row, head ^ pivot_head
    key = head.to_bytes(4, "big") + KEY[4:]
    assert zlib.crc32(namespace.to_bytes(2, "big") + key + bytes(2)) == wanted
    return key


def with_field(frame: bytearray, at: int, value: bytes) -> bytearray:
    frame[at : at + len(value)] = value
    checksum(frame)
    return frame


MALFORMED = {
    "version 2": lambda: with_field(read_frame(), DATAGRAM_AT, b"\x02"),
    "no such op": lambda: with_field(read_frame(), DATAGRAM_AT + 1, b"\x05"),
    "READ that wants nothing": lambda: read_frame(wanted=0, flags=wire.FLAG_PARTIAL),
    "READ of a part without PARTIAL": lambda: read_frame(wanted=5),
    "PARTIAL READ of the whole": lambda: read_frame(flags=wire.FLAG_PARTIAL),
    "READ with LAST": lambda: read_frame(flags=wire.FLAG_LAST),
    "READ with both RETRY and PARTIAL": lambda: read_frame(
        flags=wire.FLAG_RETRY | wire.FLAG_PARTIAL, wanted=5
    ),
    "READ with a chunk": lambda: read_frame(chunk=1),
    "READ of DATA's length": lambda: with_field(data_frame(), DATAGRAM_AT + 1, b"\x01"),
    "DATA of a READ's length": lambda: with_field(read_frame(), DATAGRAM_AT + 1, b"\x02"),
    "DATA with RETRY": lambda: data_frame(flags=wire.FLAG_RETRY),
    "DATA that wants": lambda: data_frame(wanted=1),
    "DATA of chunk 64": lambda: data_frame(chunk=64),
    "padding that is not there": lambda: with_field(read_frame(), FLAGS_AT, b"\x00\x10"),
    "padding that is not announced": lambda: with_field(
        read_frame(flags=wire.FLAG_PADDED), FLAGS_AT, b"\x00\x00"
    ),
    "cut in the header": lambda: read_frame()[:80],
    "cut in the chunk": lambda: data_frame()[:1000],
    "bytes behind the datagram": lambda: read_frame() + b"\0",
    "UDP shorter than IPv4": lambda: with_field(read_frame(), 38, b"\x00\x3b"),
    "IPv4 longer than the frame": lambda: with_field(read_frame(), 16, b"\x00\x51"),
    "wrong IPv4 checksum": lambda: read_frame()[:24] + b"\0\0" + read_frame()[26:],
    "IP version 6 in IPv4's place": lambda: with_field(read_frame(), 14, b"\x65"),
    "first fragment": lambda: with_field(read_frame(), 20, b"\x20\x00"),
}


@pytest.mark.parametrize("make", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_frame_is_dropped_and_counted(pool: PoolSwitch, make: object) -> None:
    assert callable(make)
    frame = make()
    assert raw(pool, 1 if frame[DATAGRAM_AT + 1] == wire.OP_DATA else 2, frame) == []
    assert pool.decided("dropped") == 1
    pool.read(3)
    assert pool.decided("new") == 1, "it left no entry"


def test_what_the_codec_refuses_the_switch_refuses(pool: PoolSwitch) -> None:
    """Every flag, op and a few lengths: whatever passes here, `decode` takes (but for fields that
    no table can compare, like a size that does not hold the chunk)."""
    for base, port in ((read_frame(), 2), (data_frame(), 1)):
        for op in range(6):
            for flags in range(256):
                frame = bytearray(base)
                frame[DATAGRAM_AT + 1] = op
                frame[FLAGS_AT + 1] = flags
                if raw(pool, port, frame):
                    wire.decode(ethernet.unwrap(bytes(frame)).payload)


DISGUISES = {
    "priority tag": lambda: read_frame()[:12] + b"\x81\x00\x00\x00" + read_frame()[12:],
    "service tag": lambda: read_frame()[:12] + b"\x88\xa8\x00\x01" + read_frame()[12:],
    "IPv4 options": lambda: with_options(read_frame(reader=3)),
}


def with_options(frame: bytearray) -> bytearray:
    """Four no-operation options behind the IPv4 header."""
    frame[14] = 0x46
    frame[16:18] = (int.from_bytes(frame[16:18], "big") + 4).to_bytes(2, "big")
    frame[24:26] = b"\0\0"
    frame[34:34] = b"\x01\x01\x01\x01"
    total = int.from_bytes(frame[14:38], "big") % 0xFFFF or 0xFFFF
    frame[24:26] = (0xFFFF - total).to_bytes(2, "big")
    return frame


@pytest.mark.parametrize("make", DISGUISES.values(), ids=DISGUISES.keys())
def test_no_disguise_carries_a_datagram_past_the_guard(pool: PoolSwitch, make: object) -> None:
    assert callable(make)
    assert raw(pool, 2, make()) == []
    assert pool.decided("dropped") == 1


@pytest.mark.parametrize(
    "make", [*DISGUISES.values(), *MALFORMED.values()], ids=[*DISGUISES, *MALFORMED]
)
def test_a_plain_switch_passes_anything_on(make: object) -> None:
    plain = PoolSwitch(enabled=False)
    assert callable(make)
    frame = bytes(make())
    (out,) = plain.switch.process(2, frame, plain.now_us)
    assert out[1] == frame
    assert plain.decided("forwarded") == 1


def test_a_read_without_a_route_opens_no_entry(pool: PoolSwitch) -> None:
    nobody = endpoint(9)
    frame = wire.Frame(wire.OP_READ, NAMESPACE, KEY, wanted=wire.FULL_SEGMENT)
    lost = ethernet.Encapsulation(endpoint(2), nobody).wrap(wire.encode(frame))
    assert raw(pool, 2, lost) == []
    to_all = b"\xff" * 6 + lost[6:]
    assert raw(pool, 2, to_all) == []
    assert pool.decided("dropped") == 2
    assert ports(pool.read(3)) == [1]
    assert pool.decided("new") == 1


def test_data_for_a_host_that_is_gone_still_reaches_those_who_joined(pool: PoolSwitch) -> None:
    for reader in (2, 3, 4):
        pool.read(reader)
    table = pool.table("l2_forward")
    table.delete(table.find([Exact(int.from_bytes(endpoint(2).mac, "big"))]).handle)
    out = pool.data(2, CONTENT, 0)
    assert set(ports(out)) == {2, 3, 4}, "its port may lead to it still"
    table = pool.table("egress_host")
    table.delete(table.find([Exact(2)]).handle)
    assert ports(pool.data(2, CONTENT, 1)) == [3, 4]
    assert pool.decided("shared") == 2
