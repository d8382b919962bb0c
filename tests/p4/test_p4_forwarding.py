"""What a top-of-rack switch does with ordinary traffic, with the switch program on and off."""

from __future__ import annotations

import pytest
from kvcast.protocol.messages import ethernet, wire
from kvcast.switchsim.ir import Lpm
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import KEY, NAMESPACE, PoolSwitch, content_of, endpoint, ports, ports_of

ROUTER_MAC = 0x026B76FF0001
FAR = endpoint(4)._replace(ip=ethernet.parse_ip("10.99.1.4"))
CONTENT = content_of(2 * wire.CHUNK_BYTES)


@pytest.fixture(params=[True, False], ids=["enabled", "plain"])
def pool(request: pytest.FixtureRequest) -> PoolSwitch:
    pool = PoolSwitch(enabled=request.param)
    pool.add("l2_forward", (ROUTER_MAC,), "to_router")
    route(pool, "10.99.0.0", 16, 3)
    route(pool, "10.99.1.0", 24, 4)
    return pool


def route(pool: PoolSwitch, prefix: str, length: int, host: int) -> None:
    table = pool.table("ipv4_route")
    mac = int.from_bytes(endpoint(host).mac, "big")
    table.add(
        [Lpm(ethernet.parse_ip(prefix), length)],
        0,
        pool.action("ipv4_route", "to_nexthop"),
        (host, 1 << (host - 1), mac, ROUTER_MAC),
    )


def udp(source: int, destination: ethernet.Endpoint, *, port: int = 53) -> bytes:
    to = destination._replace(udp_port=port)
    return ethernet.Encapsulation(endpoint(source), to).wrap(b"x" * 60)


def routed(destination: str, *, ttl: int = 64) -> bytes:
    to = endpoint(1)._replace(
        mac=ROUTER_MAC.to_bytes(6, "big"), ip=ethernet.parse_ip(destination), udp_port=53
    )
    frame = bytearray(ethernet.Encapsulation(endpoint(2), to).wrap(b"x" * 60))
    frame[22] = ttl
    frame[24:26] = b"\0\0"
    total = int.from_bytes(frame[14:34], "big") % 0xFFFF
    frame[24:26] = (0xFFFF - total).to_bytes(2, "big")
    return bytes(frame)


def process(pool: PoolSwitch, port: int, frame: bytes) -> list[tuple[int, bytes]]:
    return pool.switch.process(port, frame, pool.now_us)


def test_a_frame_goes_unchanged_to_the_port_of_its_mac(pool: PoolSwitch) -> None:
    frame = udp(2, endpoint(3))
    assert process(pool, 2, frame) == [(3, frame)]
    assert pool.decided("forwarded") == 1


def test_a_broadcast_goes_everywhere_but_back(pool: PoolSwitch) -> None:
    arp = b"\xff" * 6 + endpoint(2).mac + b"\x08\x06" + bytes(46)
    assert process(pool, 2, arp) == [(1, arp), (3, arp), (4, arp)]


def test_an_unknown_mac_is_dropped_and_counted(pool: PoolSwitch) -> None:
    assert process(pool, 2, udp(2, endpoint(9))) == []
    assert pool.decided("dropped") == 1


def test_the_longest_prefix_wins(pool: PoolSwitch) -> None:
    assert ports_of(process(pool, 2, routed("10.99.1.4"))) == [4]
    assert ports_of(process(pool, 2, routed("10.99.2.4"))) == [3]
    assert process(pool, 2, routed("10.98.1.4")) == []
    assert pool.decided("dropped") == 1


def test_a_routed_packet_has_new_macs_less_ttl_and_a_checksum_that_fits(pool: PoolSwitch) -> None:
    ((port, frame),) = process(pool, 2, routed("10.99.1.4", ttl=17))
    assert port == 4
    assert frame[0:6] == endpoint(4).mac
    assert frame[6:12] == ROUTER_MAC.to_bytes(6, "big")
    assert frame[22] == 16
    assert ethernet.unwrap(frame).payload == b"x" * 60, "unwrap verifies the checksum"


@pytest.mark.parametrize("ttl", [0, 1])
def test_a_ttl_that_ends_here_is_dropped(pool: PoolSwitch, ttl: int) -> None:
    assert process(pool, 2, routed("10.99.1.4", ttl=ttl)) == []
    assert pool.decided("dropped") == 1


def test_a_damaged_header_is_not_routed(pool: PoolSwitch) -> None:
    frame = bytearray(routed("10.99.1.4"))
    frame[24] ^= 0xFF
    assert process(pool, 2, bytes(frame)) == []
    assert pool.decided("dropped") == 1


def test_what_is_not_ip_is_not_routed(pool: PoolSwitch) -> None:
    frame = ROUTER_MAC.to_bytes(6, "big") + endpoint(2).mac + b"\x08\x06" + bytes(46)
    assert process(pool, 2, frame) == []
    assert pool.decided("dropped") == 1


def test_a_read_is_routed_and_joined_like_any_other(pool: PoolSwitch) -> None:
    to = FAR._replace(mac=ROUTER_MAC.to_bytes(6, "big"))
    read = wire.encode(wire.Frame(wire.OP_READ, NAMESPACE, KEY, wanted=wire.FULL_SEGMENT))
    ((port, frame),) = process(pool, 2, ethernet.Encapsulation(endpoint(2), to).wrap(read))
    assert port == 4
    assert ethernet.unwrap(frame).dst == FAR._replace(mac=endpoint(4).mac)
    again = process(pool, 3, ethernet.Encapsulation(endpoint(3), to).wrap(read))
    if pool.decided("forwarded"):
        assert ports_of(again) == [4]
    else:
        assert again == []
        assert (pool.decided("new"), pool.decided("join")) == (1, 1)


def test_a_switch_that_was_just_loaded_has_its_program_off(pool: PoolSwitch) -> None:
    pool.table("settings").reset_default()
    assert ports(pool.read(2)) == [1]
    assert ports(pool.read(3)) == [1]
    assert pool.decided("forwarded") == 2
