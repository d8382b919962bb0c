"""The star: one switch and N inference nodes, as data.

Owns: the conventions that tie a node's name, addresses and switch port together, and the file form
of a star. Must not know: how a star is run; processes.py, namespaces.py and mininet_bmv2.py each
run the same description.

Conventions: node i (from 1) is "node-i", 10.77.0.i, 02:6b:76:00:00:ii, on switch port i. A file
may name its nodes as it likes, as long as every address and port is unique.
"""

from __future__ import annotations

import ipaddress
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from kvcast.p4.targets import MAX_PORTS
from kvcast.protocol.messages.ethernet import format_mac, parse_mac
from kvcast.protocol.messages.wire import UDP_PORT
from kvcast.protocol.node_ids import NODE_ID_RULE, is_node_id

MAX_HOSTS = MAX_PORTS
"""A host a port."""


class TopologyError(ValueError):
    """A description that is no star of one switch and 1 to 32 nodes."""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One inference node: its name, its addresses behind the switch, and its switch port."""

    node_id: str
    ip: str
    mac: str
    switch_port: int
    udp_port: int = UDP_PORT

    def __post_init__(self) -> None:
        if not is_node_id(self.node_id):
            raise TopologyError(f"node id {self.node_id!r}: {NODE_ID_RULE}")
        try:
            ipaddress.IPv4Address(self.ip)
        except ValueError as error:
            raise TopologyError(f"{self.node_id}: ip {self.ip!r}: {error}") from error
        try:
            msgspec.structs.force_setattr(self, "mac", format_mac(parse_mac(self.mac)))
        except ValueError as error:
            raise TopologyError(f"{self.node_id}: {error}") from error
        if not 1 <= self.switch_port <= MAX_HOSTS:
            raise TopologyError(
                f"{self.node_id}: switch port {self.switch_port} is outside 1..{MAX_HOSTS}"
            )
        if not 1 <= self.udp_port <= 65535:
            raise TopologyError(f"{self.node_id}: UDP port {self.udp_port} is outside 1..65535")


@dataclass(frozen=True)
class Star:
    """One switch and its hosts, in the order of their switch ports."""

    hosts: tuple[Host, ...]
    name: str = "star"
    device_id: int = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise TopologyError(f"a star has 1 to {MAX_HOSTS} hosts, not {len(self.hosts)}")
        for what in ("node_id", "ip", "mac", "switch_port"):
            values = [getattr(host, what) for host in self.hosts]
            twice = sorted({str(value) for value in values if values.count(value) > 1})
            if twice:
                raise TopologyError(f"{what} used twice: {', '.join(twice)}")

    @classmethod
    def of(cls, nodes: int) -> Star:
        """The conventional star of `nodes` hosts (1 to 32)."""
        if not 1 <= nodes <= MAX_HOSTS:
            raise TopologyError(f"a star has 1 to {MAX_HOSTS} hosts, not {nodes}")
        return cls(
            tuple(
                Host(f"node-{i}", f"10.77.0.{i}", f"02:6b:76:00:00:{i:02x}", i)
                for i in range(1, nodes + 1)
            ),
            name=f"star-{nodes}",
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Star:
        """A star from plain data: {"nodes": 8} or {"name": …, "hosts": [{"node_id": …}, …]}."""
        try:
            told = msgspec.convert(data, _Told)
        except msgspec.ValidationError as error:
            raise TopologyError(str(error)) from error
        if (told.nodes is None) == (told.hosts is None):
            raise TopologyError('give either "nodes" (a number) or "hosts" (a list)')
        hosts = told.hosts if told.nodes is None else cls.of(told.nodes).hosts
        assert hosts is not None
        return cls(hosts, told.name or f"star-{len(hosts)}", told.device_id)

    @classmethod
    def from_file(cls, path: str | Path) -> Star:
        """A star from a .toml or .json file; TopologyError names what is wrong with it."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except OSError as error:
            raise TopologyError(f"{path}: {error.strerror or error}") from error
        except ValueError as error:
            raise TopologyError(f"{path}: {error}") from error
        try:
            return cls.from_dict(data)
        except TopologyError as error:
            raise TopologyError(f"{path}: {error}") from error

    def host(self, node_id: str) -> Host:
        """The host of that name; TopologyError if there is none."""
        for host in self.hosts:
            if host.node_id == node_id:
                return host
        raise TopologyError(f"no node {node_id!r} in {self.name}")


class _Told(msgspec.Struct, forbid_unknown_fields=True):
    """What a description may say."""

    name: str = ""
    device_id: int = 1
    nodes: int | None = None
    hosts: tuple[Host, ...] | None = None
