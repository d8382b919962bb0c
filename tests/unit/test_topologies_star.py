"""The star as data. Oracle: the written conventions. Cannot see: whether a star runs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcast.protocol.messages.wire import UDP_PORT
from kvcast.topologies.star import Host, Star, TopologyError


def test_node_names_addresses_and_ports_follow_the_convention() -> None:
    star = Star.of(11)
    assert star.hosts[0] == Host("node-1", "10.77.0.1", "02:6b:76:00:00:01", 1)
    assert star.hosts[10] == Host("node-11", "10.77.0.11", "02:6b:76:00:00:0b", 11)


def test_the_udp_port_is_the_protocols() -> None:
    assert Star.of(1).hosts[0].udp_port == UDP_PORT


@given(st.integers(1, 32))
def test_a_star_survives_being_written_and_read(nodes: int) -> None:
    star = Star.of(nodes)
    assert Star.from_dict(json.loads(msgspec.json.encode(star))) == star


@pytest.mark.parametrize("nodes", [0, 33, -1])
def test_a_star_has_one_to_32_hosts(nodes: int) -> None:
    with pytest.raises(TopologyError, match="1 to 32"):
        Star.of(nodes)


def test_hosts_have_names_ports_and_addresses_by_their_number() -> None:
    hosts = Star.of(5).hosts
    assert sorted(host.node_id for host in hosts) == [f"node-{i}" for i in range(1, 6)]
    third = Star.of(5).host("node-3")
    assert (third.switch_port, third.ip) == (3, "10.77.0.3")


def test_a_toml_file_may_name_its_hosts(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(
        """
        name = "rack"
        [[hosts]]
        node_id = "left"
        ip = "192.168.0.7"
        mac = "02:00:00:00:00:AA"
        switch_port = 4
        """
    )
    star = Star.from_file(path)
    assert star.name == "rack"
    assert star.host("left") == Host("left", "192.168.0.7", "02:00:00:00:00:aa", 4)


_GOOD = {"node_id": "a", "ip": "10.0.0.1", "mac": "02:00:00:00:00:01", "switch_port": 1}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({}, 'either "nodes"'),
        ({"nodes": 3, "hosts": []}, 'either "nodes"'),
        ({"nodes": True}, "Expected `int"),
        ({"nodes": 3, "colour": 1}, "unknown field `colour`"),
        ({"hosts": {}}, "Expected `array"),
        ({"hosts": ["x"]}, r"Expected `object`.*hosts\[0\]"),
        ({"hosts": [{}]}, r"missing required field `node_id`.*hosts\[0\]"),
        ({"hosts": [_GOOD | {"ip": 3}]}, r"Expected `str`.*hosts\[0\].ip"),
        ({"hosts": [_GOOD | {"ip": "10.0.0.300"}]}, "ip '10.0.0.300'"),
        ({"hosts": [_GOOD | {"mac": "02-00"}]}, "02-00"),
        ({"hosts": [_GOOD | {"switch_port": 33}]}, "switch port 33"),
        ({"hosts": [_GOOD | {"node_id": "a b"}]}, "node id 'a b'"),
        ({"hosts": [_GOOD | {"rack": 1}]}, "unknown field `rack`"),
        ({"hosts": [_GOOD, _GOOD | {"node_id": "b"}]}, "ip used twice: 10.0.0.1"),
    ],
)
def test_a_bad_description_is_refused_with_its_reason(data: object, complaint: str) -> None:
    with pytest.raises(TopologyError, match=complaint):
        Star.from_dict(data)  # type: ignore[arg-type]


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    path.write_text("{")
    with pytest.raises(TopologyError, match=r"pool\.json"):
        Star.from_file(path)
    with pytest.raises(TopologyError, match="No such file"):
        Star.from_file(tmp_path / "none.json")
