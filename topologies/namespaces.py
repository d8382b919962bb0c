"""The namespace runner: network namespaces joined by veth pairs; needs root. The switch reads them
through AF_PACKET ports.

Owns: the namespaces, links, addresses and neighbours of one run, and their removal. Must not
know: which processes run in them.

The switch has a namespace with one veth end a node (p1 … pN); each node has one with the other
end (eth0) and static neighbour entries, so the star carries no ARP. Beside it every node has a
second link (mgmt0) to a bridge in the switch's namespace: the management network, which carries
control and bulk connections and no frame of the data plane. Names carry the process id and a
random word, so that parallel runs do not meet; a later run removes what a killed one left.

Offloads are switched off on the data links: veth otherwise hands over frames with unfinished
checksums and 64 KB super-packets, which no switch could forward.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from kvcast.service.addresses import AGENTS_PORT, HTTP_PORT, P4RUNTIME_PORT
from kvcast.switchsim.ports.interface import switch_offloads_off
from kvcast.topologies.network import NetworkError
from kvcast.topologies.star import Host, Star

CLONE_NEWNET = 0x40000000

MANAGEMENT = "10.78.0"
_SWITCH_MANAGEMENT = f"{MANAGEMENT}.254"
_NAME = re.compile(r"kvc(\d+)x[0-9a-f]{4}-\w+")
NETNS_FOLDER = Path("/run/netns")


def why_not() -> str | None:
    """Why network namespaces cannot be made here, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        made = subprocess.run(["ip", "-V"], capture_output=True, check=False)
    except OSError:
        return "the ip command (iproute2) is not installed"
    if made.returncode != 0:
        return "the ip command does not work"
    return None


def ip_batch(
    lines: list[str],
    namespace: str | None = None,
    *,
    prefix: Sequence[str] = (),
    force: bool = False,
) -> None:
    """Run `ip` commands, one a line, in one process; NetworkError with what ip said.

    They run in `namespace` if one is named, or behind the words of `prefix`.
    """
    inside = [] if namespace is None else ["-n", namespace]
    ran = subprocess.run(
        [*prefix, "ip", *inside, *(["-force"] if force else []), "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if ran.returncode != 0 and not force:
        raise NetworkError(f"ip -batch: {ran.stderr.strip() or ran.stdout.strip()}")


def socket_in(namespace: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """An IPv4 socket that lives in the network namespace behind that path.

    A thread of its own enters the namespace and ends there; a socket stays where it was made.
    """
    made: list[socket.socket | OSError] = []
    setns = ctypes.CDLL(None, use_errno=True).setns

    def make() -> None:
        try:
            descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if setns(descriptor, CLONE_NEWNET) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), str(namespace))
            finally:
                os.close(descriptor)
            made.append(socket.socket(socket.AF_INET, kind))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


class NamespaceNetwork:
    """A star of network namespaces and veth pairs, unique to this run."""

    def __init__(self, star: Star) -> None:
        self.star = star
        self.tag = f"kvc{os.getpid()}x{secrets.token_hex(2)}"
        self.grpc_address = ("127.0.0.1", P4RUNTIME_PORT)
        self.agents_address = (_SWITCH_MANAGEMENT, AGENTS_PORT)
        self.http_address = (_SWITCH_MANAGEMENT, HTTP_PORT)
        self._made = False

    def namespace(self, part: str) -> str:
        """The namespace of "switch", "controller" or a node."""
        if part in ("switch", "controller"):
            return f"{self.tag}-sw"
        return f"{self.tag}-h{self.star.host(part).switch_port}"

    def up(self) -> None:
        reason = why_not()
        if reason is not None:
            raise NetworkError(reason)
        remove_stale_namespaces()
        self._made = True
        switch, hosts = self.namespace("switch"), self.star.hosts
        spaces = {host.switch_port: self.namespace(host.node_id) for host in hosts}
        ip_batch([f"netns add {name}" for name in (switch, *spaces.values())])
        links = []
        for port, space in spaces.items():
            links += [
                f"link add p{port} type veth peer name eth0 netns {space}",
                f"link add m{port} type veth peer name mgmt0 netns {space}",
            ]
        ip_batch(links, switch)
        self._configure()

    def _configure(self) -> None:
        """Addresses, neighbours, the management bridge: what every node needs, once linked."""
        ports = [host.switch_port for host in self.star.hosts]
        self._quiet("switch")
        ip_batch(
            [
                "link set lo up",
                "link add mgmt type bridge",
                f"address add {_SWITCH_MANAGEMENT}/24 dev mgmt",
                "link set mgmt up",
                *(f"link set m{port} master mgmt up" for port in ports),
            ],
            prefix=self.prefix("switch"),
        )
        for host in self.star.hosts:
            self._quiet(host.node_id)
            for place, interface in ((host.node_id, "eth0"), ("switch", f"p{host.switch_port}")):
                with socket_in(self._space(place), socket.SOCK_DGRAM) as control:
                    switch_offloads_off(control, interface)
            lines = [
                "link set lo up",
                f"link set eth0 address {host.mac} up",
                f"address replace {host.ip}/24 dev eth0",
                f"address replace {MANAGEMENT}.{host.switch_port}/24 dev mgmt0",
                "link set mgmt0 up",
            ]
            for peer in self.star.hosts:
                if peer is not host:
                    lines.append(f"neighbor replace {peer.ip} lladdr {peer.mac} dev eth0")
            ip_batch(lines, prefix=self.prefix(host.node_id))
        ip_batch(
            [f"link set p{port} up promisc on" for port in ports], prefix=self.prefix("switch")
        )

    def down(self) -> None:
        if not self._made:
            return
        self._made = False
        names = [self.namespace("switch")] + [self.namespace(h.node_id) for h in self.star.hosts]
        _delete_namespaces(names)

    def prefix(self, part: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(part)]

    def switch_port(self, host: Host) -> str:
        return f"if:p{host.switch_port}"

    def agent_flags(self, host: Host) -> list[str]:
        return ["--transport=udp", f"--bulk-addr={MANAGEMENT}.{host.switch_port}:9700"]

    def open_socket(self) -> socket.socket:
        return socket_in(self._space("controller"))

    def _space(self, part: str) -> Path:
        """Where the kernel names the part's network namespace."""
        return NETNS_FOLDER / self.namespace(part)

    def _quiet(self, part: str) -> None:
        """No IPv6 in the namespace: its router solicitations would only be noise."""
        subprocess.run([*self.prefix(part), "sh", "-c", _NO_IPV6], capture_output=True, check=False)


_NO_IPV6 = (
    "for what in all default; do "
    "echo 1 > /proc/sys/net/ipv6/conf/$what/disable_ipv6; done 2>/dev/null || true"
)


def _delete_namespaces(names: list[str]) -> None:
    existing = [name for name in names if (NETNS_FOLDER / name).exists()]
    if existing:
        ip_batch([f"netns delete {name}" for name in existing], force=True)


def remove_stale_namespaces() -> None:
    """Remove the namespaces of runs whose process is gone (it was killed, or lost its power)."""
    if not NETNS_FOLDER.is_dir():
        return
    stale = []
    for path in NETNS_FOLDER.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and not Path("/proc", match.group(1)).exists():
            stale.append(path.name)
    _delete_namespaces(stale)
