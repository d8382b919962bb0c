"""The Mininet runner: the same star, for BMv2 (or switchsim) and the pool's own processes.

Owns: the translation of a Star into Mininet's API. Must not know: which processes run. Mininet
makes the namespaces and veth pairs and takes them away; the pool starts simple_switch_grpc, the
controller and the agents in them, exactly as in namespaces.py, whose addresses it shares.

Mininet is Debian's package (`mininet`), found on the path or in Debian's folder; its API is used
from Python only, since `mn -c` ends other people's processes by name.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from kvcast.topologies.namespaces import NamespaceNetwork
from kvcast.topologies.network import NetworkError
from kvcast.topologies.star import Star

DEBIAN_PACKAGES = Path("/usr/lib/python3/dist-packages")


def why_not() -> str | None:
    """Why Mininet cannot be used here, or None if it can."""
    if os.geteuid() != 0:
        return "Mininet needs root"
    if shutil.which("mnexec") is None:
        return "mnexec is not installed (Debian: apt install mininet)"
    try:
        _mininet("mininet.net")
    except ImportError as error:
        return f"the Mininet Python API cannot be imported ({error}); Debian: apt install mininet"
    return None


def _mininet(module: str) -> Any:
    """A module of Mininet's; Debian keeps it outside of a virtual environment's path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Mininet 2.3 imports distutils and old escapes
        try:
            return importlib.import_module(module)
        except ImportError:
            if not (DEBIAN_PACKAGES / "mininet").is_dir():
                raise
        sys.path.append(str(DEBIAN_PACKAGES))
        try:
            return importlib.import_module(module)
        finally:
            sys.path.remove(str(DEBIAN_PACKAGES))


class MininetNetwork(NamespaceNetwork):
    """The star as a Mininet network; `switch` is a Mininet node that holds all ports."""

    def __init__(self, star: Star) -> None:
        super().__init__(star)
        self._net: Any = None
        self._nodes: dict[str, Any] = {}

    def up(self) -> None:
        reason = why_not()
        if reason is not None:
            raise NetworkError(reason)
        _mininet("mininet.log").setLogLevel("error")
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Mininet leaves sockets and pipes to the collector
            self._build(_mininet("mininet.net"))

    def _build(self, module: Any) -> None:
        net = module.Mininet(topo=None, controller=None, build=False)
        self._net = net
        switch = net.addHost("s1", ip=None)
        self._nodes = {"switch": switch, "controller": switch}
        for host in self.star.hosts:
            port = host.switch_port
            node = net.addHost(f"h{port}", ip=f"{host.ip}/24", mac=host.mac)
            self._nodes[host.node_id] = node
            net.addLink(switch, node, intfName1=f"p{port}", intfName2="eth0", addr2=host.mac)
            net.addLink(switch, node, intfName1=f"m{port}", intfName2="mgmt0")
        net.build()
        self._configure()

    def down(self) -> None:
        net, self._net = self._net, None
        if net is None:
            return
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                net.stop()
            except Exception as error:  # Mininet raises whatever its shells do
                print(f"mininet: {error}", file=sys.stderr)

    def prefix(self, part: str) -> list[str]:
        return ["mnexec", "-a", str(self._nodes[part].pid)]

    def _space(self, part: str) -> Path:
        return Path("/proc", str(self._nodes[part].pid), "ns", "net")
