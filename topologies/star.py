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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcast.protocol.messages.ethernet import format_mac, parse_mac
from kvcast.protocol.messages.wire import UDP_PORT
from kvcast.protocol.node_ids import NODE_ID_RULE, is_node_id

MAX_HOSTS = 32
"""The switch program keeps one bit a port in a 32-bit word (p4/sizes.p4)."""


class TopologyError(ValueError):
    """A description that is no star of one switch and 1 to 32 nodes."""


@dataclass(frozen=True)
class Host:
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
        if not _is_mac(self.mac):
            raise TopologyError(f"{self.node_id}: mac {self.mac!r} is not like 02:6b:76:00:00:01")
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
        if not isinstance(data, Mapping):
            raise TopologyError("a topology is a table of names and values")
        unknown = sorted(set(data) - {"name", "device_id", "nodes", "hosts"})
        if unknown:
            raise TopologyError(f"unknown keys: {', '.join(unknown)}")
        if ("nodes" in data) == ("hosts" in data):
            raise TopologyError('give either "nodes" (a number) or "hosts" (a list)')
        if "nodes" in data:
            if not isinstance(data["nodes"], int) or isinstance(data["nodes"], bool):
                raise TopologyError('"nodes" must be a whole number')
            hosts = cls.of(data["nodes"]).hosts
        else:
            if not isinstance(data["hosts"], list):
                raise TopologyError('"hosts" must be a list of tables')
            hosts = tuple(_host(number, item) for number, item in enumerate(data["hosts"], 1))
        return cls(
            hosts,
            name=str(data.get("name", f"star-{len(hosts)}")),
            device_id=int(data.get("device_id", 1)),
        )

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

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` turns back into an equal star."""
        return {
            "name": self.name,
            "device_id": self.device_id,
            "hosts": [asdict(host) for host in self.hosts],
        }

    def host(self, node_id: str) -> Host:
        """The host of that name; TopologyError if there is none."""
        for host in self.hosts:
            if host.node_id == node_id:
                return host
        raise TopologyError(f"no node {node_id!r} in {self.name}")


def _is_mac(text: str) -> bool:
    try:
        return format_mac(parse_mac(text)) == text
    except ValueError:
        return False


def _host(number: int, item: Any) -> Host:
    if not isinstance(item, Mapping):
        raise TopologyError(f"host {number} is not a table")
    fields = {"node_id": str, "ip": str, "mac": str, "switch_port": int, "udp_port": int}
    unknown = sorted(set(item) - set(fields))
    if unknown:
        raise TopologyError(f"host {number}: unknown keys: {', '.join(unknown)}")
    for name, kind in fields.items():
        if name not in item:
            if name == "udp_port":
                continue
            raise TopologyError(f"host {number}: {name} is missing")
        if not isinstance(item[name], kind) or isinstance(item[name], bool):
            raise TopologyError(f"host {number}: {name} must be a {kind.__name__}")
    return Host(
        node_id=item["node_id"],
        ip=item["ip"],
        mac=item["mac"].lower(),
        switch_port=item["switch_port"],
        udp_port=item.get("udp_port", UDP_PORT),
    )
