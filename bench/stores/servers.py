"""The stores that are compared: what each needs, how its servers are started and ended, and how
its clients are told where they are.

Owns: the list of stores, their server processes, what is missing and how to install it. Must not
know: how a store is asked (its client module), or what is measured.

Servers listen on the holder's side of the link alone (Mooncake's clients choose ports on all
addresses, and cannot be told otherwise), and never outlive this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvcast.bench.stores.client import StoreError
from kvcast.bench.stores.links import HOLDER_SIDE, READER_SIDE, STAR, Link
from kvcast.bench.stores.process import WorkerProcess
from kvcast.protocol.requester import RequesterConfig
from kvcast.topologies.part import Part
from kvcast.topologies.pool import Pool, PoolOptions

PEERS_EXTRA = "pip install 'kvcast[peers]'"
ARENA_BYTES = 512 << 20
"""What each side of kvcast has, and what the holders of the others have."""
MEMORY_BYTES = 64 << 20
"""Registered memory of a client: the largest turn's blocks fit."""
_SEGMENT_BYTES = 128 << 20
_LEASE_S = 120.0
"""Of kvcast's agents: eight busy clients on few processors must not make one look dead, nor must
the turns of others, during which those that poll are stopped."""
_START_S = 20.0
_POLL_S = 0.1


class Store(ABC):
    """A store while it is measured: its servers, one holder and some readers."""

    NAME: ClassVar[str]
    CLIENT: ClassVar[str]
    """module:class of its client."""
    PACKAGES: ClassVar[tuple[str, ...]] = ()
    """What it consists of, for their versions."""
    HAS_LOCAL: ClassVar[bool] = False
    """Whether a reader may have blocks in memory of its own side."""
    HAS_EXISTS: ClassVar[bool] = True
    HAS_PLACE: ClassVar[bool] = False
    """Whether it has a way to put what lies in its own memory already, beside `put`."""

    def __init__(self, link: Link, folder: Path) -> None:
        self._link = link
        self._folder = folder
        self._servers: list[Part] = []
        self.readers: list[WorkerProcess] = []
        self._holder: WorkerProcess | None = None

    @classmethod
    def missing(cls) -> str | None:
        """What is not installed and how to install it; None if nothing is missing."""
        return None

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Of what it consists of."""
        return {name: importlib.metadata.version(name) for name in cls.PACKAGES}

    @property
    def holder(self) -> WorkerProcess:
        assert self._holder is not None
        return self._holder

    def pause(self) -> None:  # noqa: B027 - most have nothing to do
        """Others are measured: nothing of it may take processor time until `resume`."""

    def resume(self) -> None:  # noqa: B027
        """Its turn comes."""

    def commands(self) -> dict[str, list[str]]:
        """The servers' commands, by name."""
        return {}

    def options(self, side: int) -> dict[str, Any]:
        """What a client on that side is told."""
        return {}

    async def start(self, readers: int) -> None:
        """Start servers, holder and readers; StoreError if one does not."""
        for name, command in self.commands().items():
            server = Part(
                name,
                [*self._link.prefix(STAR.hosts[HOLDER_SIDE].node_id), *command],
                log_path=self._folder / f"{name}.log",
                announces=False,
            )
            self._servers.append(server)
            await server.start()
        self._holder = self._worker(HOLDER_SIDE, f"{self.NAME} holder")
        await self._holder.start()
        introduction = await self._introduction(self._holder)
        self.readers += [self._worker(READER_SIDE, f"{self.NAME} {i}") for i in range(readers)]
        for reader in self.readers:
            await reader.start()
        options = self.options(READER_SIDE) | {"holder": introduction}
        await asyncio.gather(
            *(r.ask("open", client=self.CLIENT, options=options) for r in self.readers)
        )

    async def stop(self) -> None:
        """End all of its processes."""
        workers = [*self.readers, *([self._holder] if self._holder is not None else [])]
        await asyncio.gather(*(worker.stop() for worker in workers))
        await asyncio.gather(*(server.stop() for server in self._servers))

    def _worker(self, side: int, name: str) -> WorkerProcess:
        prefix = self._link.prefix(STAR.hosts[side].node_id)
        log_path = self._folder / f"{name.replace(' ', '-')}.log"
        return WorkerProcess(name, prefix, self.environment(), log_path)

    def environment(self) -> dict[str, str]:
        """What its clients find in theirs."""
        return {}

    async def _introduction(self, holder: WorkerProcess) -> dict[str, Any]:
        """Open the holder as soon as the servers answer."""
        deadline_s = asyncio.get_running_loop().time() + _START_S
        while True:
            try:
                told = await holder.ask(
                    "open", client=self.CLIENT, options=self.options(HOLDER_SIDE)
                )
                introduction = told["introduction"]
                assert isinstance(introduction, dict)
                return introduction
            except StoreError as error:
                for server in self._servers:
                    if not server.running:
                        raise StoreError(str(server.failure("ended"))) from None
                if asyncio.get_running_loop().time() > deadline_s:
                    raise error
                await asyncio.sleep(_POLL_S)

    def _ip(self, side: int) -> str:
        return self._link.ip(STAR.hosts[side])


class KvcastStore(Store):
    """A pool of two agents; its processes are the pool's own."""

    NAME = "kvcast"
    CLIENT = "kvcast.bench.stores.kvcast_pool:KvcastClient"
    HAS_LOCAL = HAS_PLACE = True

    def __init__(self, link: Link, pool: Pool, *, polls: bool = False) -> None:
        super().__init__(link, pool.folder)
        self.pool = pool
        self._polls = polls

    def pause(self) -> None:
        if self._polls:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._polls:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for host in STAR.hosts:
            pid = self.pool.pids[host.node_id]
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    async def stop(self) -> None:
        self.resume()
        await super().stop()

    def options(self, side: int) -> dict[str, Any]:
        return {"socket": str(self.pool.sockets[STAR.hosts[side].node_id])}


def make_pool(link: Link, arena_bytes: int = ARENA_BYTES, *, polls: bool = False) -> Pool:
    """The pool that is measured, not started yet. Agents wait as long as they do by default, since
    no switch in software is on the way. Each has all of its arena in memory before it serves;
    those of a pool that `polls` never sleep."""
    defaults = RequesterConfig()
    options = PoolOptions(
        admit="off",
        replicas=0,
        arena_bytes=arena_bytes,
        lease_s=_LEASE_S,
        agent_flags=(
            "--arena-reserve",
            *(["--busy-poll"] if polls else []),
            f"--rto-initial={defaults.rto_initial_s}",
            f"--rto-min={defaults.rto_min_s}",
            f"--quiet={defaults.quiet_s}",
        ),
    )
    pool = Pool(STAR, options)
    pool.network = link
    return pool


class RedisStore(Store):
    """redis-server without persistence, and redis-py with hiredis."""

    NAME = "redis"
    CLIENT = "kvcast.bench.stores.redis_server:RedisClient"
    PACKAGES = ("redis", "hiredis")
    _PORT = 6379

    @classmethod
    def missing(cls) -> str | None:
        if shutil.which("redis-server") is None:
            return "redis-server is not on the PATH: apt install redis-server"
        return _missing_modules("redis", "hiredis")

    @classmethod
    def versions(cls) -> dict[str, str]:
        said = subprocess.run(
            ["redis-server", "--version"], capture_output=True, text=True, check=False, timeout=10
        ).stdout
        found = re.search(r"v=(\S+)", said)
        return super().versions() | {"redis-server": found[1] if found else "unknown"}

    def commands(self) -> dict[str, list[str]]:
        flags = {
            "--bind": self._ip(HOLDER_SIDE),
            "--port": str(self._PORT),
            "--dir": str(self._folder),
            "--save": "",
            "--appendonly": "no",
            "--protected-mode": "no",
        }
        return {
            "redis-server": ["redis-server", *(word for pair in flags.items() for word in pair)]
        }

    def options(self, side: int) -> dict[str, Any]:
        return {"host": self._ip(HOLDER_SIDE), "port": self._PORT}


class MooncakeStore(Store):
    """mooncake_master, and clients with segments of their own, over TCP."""

    NAME = "mooncake"
    CLIENT = "kvcast.bench.stores.mooncake_store:MooncakeClient"
    PACKAGES = ("mooncake-transfer-engine-non-cuda",)
    HAS_LOCAL = True
    _PORT, _METRICS_PORT = 50051, 9003

    @classmethod
    def missing(cls) -> str | None:
        reason = _missing_modules("mooncake")
        if reason is not None:
            return reason
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError:
            return "libibverbs.so.1 is not there: apt install libibverbs1"
        return None

    def environment(self) -> dict[str, str]:
        return {"MC_LOG_LEVEL": "WARNING"}

    def commands(self) -> dict[str, list[str]]:
        beside = Path(sys.executable).parent / "mooncake_master"
        address = self._ip(HOLDER_SIDE)
        return {
            "mooncake_master": [
                str(beside) if beside.exists() else "mooncake_master",
                f"--rpc_address={address}",
                f"--rpc_port={self._PORT}",
                f"--metrics_host={address}",
                f"--metrics_port={self._METRICS_PORT}",
            ]
        }

    def options(self, side: int) -> dict[str, Any]:
        return {
            "host": self._ip(side),
            "master": f"{self._ip(HOLDER_SIDE)}:{self._PORT}",
            "segment_bytes": ARENA_BYTES if side == HOLDER_SIDE else _SEGMENT_BYTES,
            "memory_bytes": MEMORY_BYTES,
        }


class NixlStore(Store):
    """NIXL agents with UCX over TCP; it has no server, and moves bytes without names."""

    NAME = "nixl"
    CLIENT = "kvcast.bench.stores.nixl_agents:NixlClient"
    PACKAGES = ("nixl-cu12",)
    HAS_EXISTS = False

    @classmethod
    def missing(cls) -> str | None:
        return _missing_modules("nixl_cu12")

    def environment(self) -> dict[str, str]:
        return {
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": self._link.device,
            # Without them a transfer of 2 MiB takes several times as long.
            "UCX_TCP_RX_SEG_SIZE": "64k",
            "UCX_TCP_TX_SEG_SIZE": "64k",
            "NIXL_LOG_LEVEL": "WARN",
        }

    def pause(self) -> None:
        self.holder.pause()

    def resume(self) -> None:
        self.holder.resume()

    def options(self, side: int) -> dict[str, Any]:
        return {"memory_bytes": ARENA_BYTES if side == HOLDER_SIDE else MEMORY_BYTES}


PEERS: tuple[type[Store], ...] = (RedisStore, MooncakeStore, NixlStore)


def _missing_modules(*names: str) -> str | None:
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{', '.join(lacking)} cannot be imported: {PEERS_EXTRA}" if lacking else None


def named(names: Sequence[str]) -> list[type[Store]]:
    """The peers of these names."""
    return [peer for peer in PEERS if peer.NAME in names]
