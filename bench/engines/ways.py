"""The ways in which engines on several nodes share prefixes: kvcast, and its peers.

Owns: what each way consists of on each node, what it says to vLLM, how much it has stored, and what
is missing. Must not know: what engines are asked for, or when.

All ways have the same nodes, in namespaces of their own behind one software switch, and everything
that they send to each other passes its ports. The first node, where prefixes are computed, keeps
them; the other nodes read. So each way reads from one node's link.

| way | on the first node | on each node |
|---|---|---|
| kvcast | the home of all blocks | an agent |
| MooncakeStoreConnector | mooncake_master; mooncake_client with all memory | the engine |
| LMCacheMPConnector | a Redis, the second level of all | an LMCache server |
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Final

from kvcast.bench.engines.engine import Engine, EngineError, transfer
from kvcast.topologies.namespaces import NETNS_FOLDER, NamespaceNetwork, socket_in
from kvcast.topologies.part import Part
from kvcast.topologies.pool import Pool
from kvcast.topologies.star import Host

STORE_BYTES: Final = 1 << 30
"""What the first node keeps, each way."""
_READER_BYTES: Final = 256 << 20
"""Memory of a reader's client or server beside the engine."""
_START_S: Final = 60.0
_ANSWER_S: Final = 5.0
_POLL_S: Final = 0.2
_LEASE_MS: Final = 600_000
"""Of what Mooncake is asked for. Reads that slow links take longer for than its default, 10 s, end
with LEASE_EXPIRED (-707)."""
MODEL: Final = "bench"
"""What the model is called in the pool."""


class OneNetwork(NamespaceNetwork):
    """Namespaces in which agents read by TCP over the switch's ports, too: nothing passes by."""

    def agent_flags(self, host: Host) -> list[str]:
        return ["--transport=udp", f"--bulk-addr={host.ip}:9700"]

    def link_bytes(self) -> list[int]:
        """What has passed each link so far, each way: to the switch and from it, in bytes."""
        shown = subprocess.run(
            ["ip", "-n", self.namespace("switch"), "-s", "-j", "link"],
            capture_output=True,
            check=True,
            timeout=_ANSWER_S,
        ).stdout
        counts = {one["ifname"]: one["stats64"] for one in json.loads(shown)}
        ports = [counts[f"p{host.switch_port}"] for host in self.star.hosts]
        return [int(port[way]["bytes"]) for port in ports for way in ("rx", "tx")]


class Way(ABC):
    """One way, on the nodes of a pool. Its servers never outlive this process."""

    NAME: ClassVar[str]
    GRAIN_TOKENS: ClassVar[int]
    """So many tokens of a prefix are one of the objects that `stored` counts."""

    def __init__(self, pool: Pool, python: Path, folder: Path) -> None:
        network = pool.network
        assert isinstance(network, NamespaceNetwork)
        self._pool = pool
        self._network = network
        self._python = python
        self._folder = folder
        self._servers: list[Part] = []
        self.connector: dict[str, Any] = {}
        """Further options of the connector's, where it takes any here."""
        self._hosts = pool.star.hosts
        self.holder = self._hosts[0]

    @classmethod
    def missing(cls, python: Path) -> str | None:
        """What is not installed and how to install it; None if nothing is missing."""
        return None

    async def start(self) -> None:  # noqa: B027 - the pool runs already
        """Start its servers; EngineError if one does not."""

    async def stop(self) -> None:
        """End its servers."""
        await asyncio.gather(*(server.stop() for server in self._servers))

    @abstractmethod
    def transfer(self, host: Host) -> dict[str, Any]:
        """What an engine on that node says to `--kv-transfer-config`."""

    def environment(self, host: Host) -> dict[str, str]:
        """What an engine on that node finds in its environment."""
        return {}

    @abstractmethod
    async def stored(self, writer: Engine) -> float:
        """How many objects the way has stored by now."""

    async def _serve(
        self, name: str, host: Host, command: list[str], port: int, **environment: str
    ) -> None:
        """Start a server, and wait until it listens on that port of its node."""
        server = Part(
            name,
            [*self._network.prefix(host.node_id), *command],
            log_path=self._folder / f"{name}.log",
            environment={**os.environ, **environment},
            announces=False,
        )
        self._servers.append(server)
        await server.start()
        end = time.monotonic() + _START_S
        while True:
            try:
                await asyncio.to_thread(lambda: self._connected(host, port).close())
                return
            except OSError:
                pass
            if not server.running or time.monotonic() > end:
                raise EngineError(str(server.failure("does not answer")))
            await asyncio.sleep(_POLL_S)

    def _connected(self, host: Host, port: int) -> socket.socket:
        """A connection to a server on a node, from that node itself."""
        made = socket_in(NETNS_FOLDER / self._network.namespace(host.node_id))
        try:
            made.settimeout(_ANSWER_S)
            made.connect((host.ip, port))
        except OSError:
            made.close()
            raise
        return made

    def _role(self, host: Host) -> str:
        """Readers do not save, so that nothing is on the links but what is measured."""
        return "kv_both" if host is self.holder else "kv_consumer"


class Kvcast(Way):
    """The pool itself."""

    NAME = "kvcast"
    GRAIN_TOKENS = 128

    def transfer(self, host: Host) -> dict[str, Any]:
        socket_path = self._pool.sockets[host.node_id]
        patience = {"deadline_s": 600.0, "lookup_s": 5.0, "save_s": 600.0}
        config = transfer(socket_path, **({"model": MODEL} | patience | self.connector))
        return config | {"kv_role": self._role(host)}

    async def stored(self, writer: Engine) -> float:
        return (await writer.stats()).get("save_blocks", 0.0)


class Mooncake(Way):
    """Mooncake Store by vLLM's own connector, over TCP: the engines have no segment (the mode
    "standalone-store"), one process on the first node has all memory."""

    NAME = "MooncakeStoreConnector"
    GRAIN_TOKENS = 128
    _MASTER, _METRICS, _STORE, _LOOKUP = 50051, 9003, 50052, 50060

    @classmethod
    def missing(cls, python: Path) -> str | None:
        if not (python.parent / "mooncake_master").exists():
            return "mooncake_master is not in the engines' environment: make setup-engine-peers"
        return _not_imported(python, "mooncake.store")

    async def start(self) -> None:
        programs, address = self._python.parent, self.holder.ip
        await self._serve(
            "mooncake-master",
            self.holder,
            [
                str(programs / "mooncake_master"),
                f"--rpc_address={address}",
                f"--rpc_port={self._MASTER}",
                f"--metrics_host={address}",
                f"--metrics_port={self._METRICS}",
                f"--default_kv_lease_ttl={_LEASE_MS}",
            ],
            self._MASTER,
        )
        await self._serve(
            "mooncake-store",
            self.holder,
            [
                str(programs / "mooncake_client"),
                f"--host={address}",
                f"--port={self._STORE}",
                f"--global_segment_size={STORE_BYTES >> 20}MB",
                f"--mmap_arena_pool_size={STORE_BYTES}",
                f"--master_server_address={address}:{self._MASTER}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
            ],
            self._STORE,
        )
        self._config.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"{address}:{self._MASTER}",
                    "protocol": "tcp",
                    "device_name": "",
                    "mode": "standalone-store",
                    "global_segment_size": 0,
                    "local_buffer_size": _READER_BYTES,
                }
            )
        )

    @property
    def _config(self) -> Path:
        return self._folder / "mooncake.json"

    def transfer(self, host: Host) -> dict[str, Any]:
        return {
            "kv_connector": self.NAME,
            "kv_role": self._role(host),
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lookup_rpc_port": self._LOOKUP + host.switch_port},
        }

    def environment(self, host: Host) -> dict[str, str]:
        return {
            "MOONCAKE_CONFIG_PATH": str(self._config),
            "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": host.ip,
            "MC_LOG_LEVEL": "WARNING",
        }

    async def stored(self, writer: Engine) -> float:
        # The master's number of keys counts those that are still being written.
        text = await asyncio.to_thread(self._metrics)
        ended = {
            name: float(amount)
            for name, amount in re.findall(r"^master_(\w*put_end\w*) (\S+)$", text, re.MULTILINE)
        }
        try:
            return (
                ended["put_end_requests_total"]
                - ended["put_end_failures_total"]
                + ended["batch_put_end_items_total"]
                - ended["batch_put_end_failed_items_total"]
            )
        except KeyError as error:
            raise EngineError(f"mooncake_master does not tell {error}") from None

    def _metrics(self) -> str:
        connection = http.client.HTTPConnection(self.holder.ip, self._METRICS, timeout=_ANSWER_S)
        connection.sock = self._connected(self.holder, self._METRICS)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode(errors="replace")
        finally:
            connection.close()


class LMCache(Way):
    """LMCache's server on each node, and a Redis as their common second level. Lookups begin when a
    request arrives, which is the fastest that it offers."""

    NAME = "LMCacheMPConnector"
    GRAIN_TOKENS = 256
    _REDIS, _SERVER = 6379, 5555

    @classmethod
    def missing(cls, python: Path) -> str | None:
        if shutil.which("redis-server") is None:
            return "redis-server is not on the PATH: apt install redis-server"
        return _not_imported(python, "lmcache.v1.multiprocess.server")

    async def start(self) -> None:
        flags = {
            "--bind": self.holder.ip,
            "--port": str(self._REDIS),
            "--dir": str(self._folder),
            "--save": "",
            "--appendonly": "no",
            "--protected-mode": "no",
        }
        await self._serve(
            "redis",
            self.holder,
            ["redis-server", *(word for pair in flags.items() for word in pair)],
            self._REDIS,
        )
        second = {"type": "resp", "host": self.holder.ip, "port": self._REDIS}
        await asyncio.gather(
            *(
                self._serve(
                    f"lmcache-{host.node_id}",
                    host,
                    [
                        *(str(self._python), "-m", "lmcache.v1.multiprocess.server"),
                        *("--host", host.ip, "--port", str(self._SERVER)),
                        *("--l1-size-gb", "1", "--l1-init-size-gb", "1"),
                        *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
                        *("--shm-name", f"{self._network.tag}-{host.switch_port}"),
                        *("--chunk-size", str(self.GRAIN_TOKENS), "--disable-observability"),
                        *("--l2-adapter", json.dumps(second)),
                    ],
                    self._SERVER,
                    **self.environment(host),
                )
                for host in self._hosts
            )
        )

    def transfer(self, host: Host) -> dict[str, Any]:
        return {
            "kv_connector": self.NAME,
            "kv_role": self._role(host),
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{host.ip}",
                "lmcache.mp.port": self._SERVER,
                "lmcache.mp.eager_prefetch": True,
            },
        }

    def environment(self, host: Host) -> dict[str, str]:
        return {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}

    async def stored(self, writer: Engine) -> float:
        return float(await asyncio.to_thread(self._keys))

    def _keys(self) -> int:
        with self._connected(self.holder, self._REDIS) as asked:
            asked.sendall(b"DBSIZE\r\n")
            return int(asked.makefile("rb").readline().lstrip(b":"))


WAYS: Final[tuple[type[Way], ...]] = (Kvcast, Mooncake, LMCache)


def _not_imported(python: Path, module: str) -> str | None:
    tried = subprocess.run(
        [str(python), "-c", f"import {module}"], capture_output=True, timeout=120, check=False
    )
    if tried.returncode == 0:
        return None
    why = tried.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"{module} cannot be imported ({' '.join(why)}): make setup-engine-peers"
