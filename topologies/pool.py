"""A whole pool as separate processes: one switch, one controller, an agent for every node.

Owns: which processes run, with which flags, in which order, until when they count as ready, and
that none is left behind. Must not know: what connects them (network.py and its runners), nor what
a block is.

    async with Pool(Star.of(8), PoolOptions()) as pool:
        client = AsyncClient(pool.sockets["node-1"])

The switch starts first, then the controller, then all agents; the pool is ready when the
controller reports every node as registered and programmed. A part that dies meanwhile ends the
wait with the tail of its log. All logs are in `run_dir`, which is kept if the caller named it.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, TextIO

from kvcast.hostagent.client import AsyncClient, KvcastError
from kvcast.protocol.messages.ethernet import FRAME_OVERHEAD_BYTES
from kvcast.protocol.messages.wire import CHUNK_BYTES, CHUNKS_PER_SEGMENT, HEADER_BYTES
from kvcast.service.addresses import format_host_port
from kvcast.topologies.network import Network, NetworkError
from kvcast.topologies.part import Part, PartError
from kvcast.topologies.processes import TunnelNetwork
from kvcast.topologies.star import Star

Runner = Literal["processes", "namespaces", "mininet", "machines"]
Switch = Literal["switchsim", "bmv2"]

DATA_FRAME_BYTES = FRAME_OVERHEAD_BYTES + HEADER_BYTES + CHUNK_BYTES
"""A frame with a chunk of a block, on links of an MTU of 1500, as all runners have them."""
HTTP_TIMEOUT_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
_LEFTOVER = re.compile(r"kvcast-(?:run|s)-(\d+)-(\d+)-\w+(?:-.+\.arena(?:\.index(?:\.map)?)?)?")
_POLL_S = 0.1


class PoolError(RuntimeError):
    """The pool cannot start, or one of its parts died; the message says which and why."""


@dataclass(frozen=True)
class PoolOptions:
    """How a pool is run; the defaults suit a laptop."""

    runner: Runner = "processes"
    """What connects the parts: UDP tunnels (no root), namespaces, or Mininet."""
    switch: Switch = "switchsim"
    """The switch: kvcast's own, or BMv2's simple_switch_grpc."""
    plain: bool = False
    """Whether the switch only forwards (settings.enabled = 0)."""
    admit: Literal["auto", "off", "pin"] = "auto"
    """Which blocks the controller puts into the switch."""
    replicas: int = 1
    """Further nodes that keep each block, beside its home."""
    homes: tuple[str, ...] = ()
    """The nodes that keep blocks for others; all, if none is named."""
    lease_s: float = 3.0
    """A node that has not renewed for so long is dead."""
    tick_s: float = 0.5
    """The controller's period."""
    arena_bytes: int = 64 * 1024 * 1024
    """DRAM tier of each agent."""
    loss: float = 0.0
    """Probability with which switchsim loses a frame, each time it crosses a link."""
    seed: int = 1
    """Seed of that loss."""
    link_rate_bits_per_s: float = 0.0
    """Rate of every node's link, each way, in Ethernet frames without preamble; 0: links without
    a rate. See `link_flags`."""
    start_timeout_s: float = 60.0
    """How long the whole pool may take to be ready."""
    log_level: str = "info"
    """Log level of every part."""
    switch_flags: tuple[str, ...] = ()
    """Further flags of `kvcast switch`."""
    controller_flags: tuple[str, ...] = ()
    """Further flags of `kvcast controller`."""
    agent_flags: tuple[str, ...] = ()
    """Further flags of every `kvcast agent`."""
    node_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further flags of single agents, by node id."""


def find_simple_switch() -> str | None:
    """The path of BMv2's simple_switch_grpc: KVCAST_SIMPLE_SWITCH_GRPC, else the PATH's."""
    named = os.environ.get("KVCAST_SIMPLE_SWITCH_GRPC")
    return shutil.which(named) if named else shutil.which("simple_switch_grpc")


def patience_flags(nodes: int, link_rate_bits_per_s: float = 0.0) -> list[str]:
    """An agent's flags that say when silence is a loss, where one machine plays a whole rack.

    A software switch needs some 0.1 ms for every copy of a frame, so a window of segments to all
    nodes takes it tens of milliseconds a node; and all processes share a few cores. Silence of
    that length is a queue, and a repeated READ would only make it longer. On emulated links, so
    does what waits before it there: a segment to each of the other nodes, say.
    """
    queue_s = 0.0
    if link_rate_bits_per_s:
        queue_s = nodes * CHUNKS_PER_SEGMENT * DATA_FRAME_BYTES * 8 / link_rate_bits_per_s
    return [
        f"--rto-initial={max(0.5, 0.06 * nodes) + queue_s:.3g}",
        f"--rto-min={max(0.25, 0.03 * nodes) + queue_s:.3g}",
        f"--quiet={max(0.15, 0.015 * nodes) + queue_s:.3g}",
        f"--expect-wait={max(0.15, 0.015 * nodes) + queue_s:.3g}",
    ]


def link_flags(rate_bits_per_s: float) -> list[str]:
    """An agent's flags behind a link of that rate: it sends answers no faster, as a host whose
    card is busy keeps them waiting; the switch's port is the link itself, which carries all frames
    that way no faster. Nothing is read by TCP, which would pass the link by."""
    rate_frames_per_s = rate_bits_per_s / (8 * DATA_FRAME_BYTES)
    return [
        f"--responder-rate={rate_frames_per_s:g}",
        "--lone-reads=reads",
        f"--link-rate={rate_bits_per_s:.0f}",
    ]


def _behind_the_hosts(part: str, options: PoolOptions) -> list[str]:
    """What makes the switch yield to the hosts where all share a few processors.

    Real hosts have processors of their own. Here a switch that ran ahead of the slowest of them
    would answer a segment before that host has had the time to ask for it. Behind links of a rate
    it cannot run ahead; but it is their clock, and who waits for it would wait for the link.
    """
    return ["nice", "-n", "10"] if part == "switch" and not options.link_rate_bits_per_s else []


def make_network(runner: Runner, star: Star) -> Network:
    """The network of that runner, not up yet."""
    if runner == "processes":
        return TunnelNetwork(star)
    if runner == "namespaces":
        from kvcast.topologies.namespaces import NamespaceNetwork

        return NamespaceNetwork(star)
    if runner == "machines":
        from kvcast.topologies.machines import MachineNetwork

        return MachineNetwork(star)
    from kvcast.topologies.mininet_bmv2 import MininetNetwork

    return MininetNetwork(star)


@dataclass
class Pool:
    """An asynchronous context manager that is a running pool. See the module's text."""

    star: Star
    options: PoolOptions = field(default_factory=PoolOptions)
    run_dir: Path | None = None
    """Where logs, sockets and state are kept; None: a temporary folder, removed at the end."""

    def __post_init__(self) -> None:
        self.network = make_network(self.options.runner, self.star)
        self.parts: dict[str, Part] = {}
        self.sockets: dict[str, Path] = {}
        self._folder = Path()
        self._lock: TextIO | None = None
        """Held while this pool's files are in a folder that the caller named."""
        self._arena_folder = SHARED_MEMORY
        self._sockets_folder: Path | None = None
        self._arenas: list[Path] = []

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Pool:
        try:
            await self._start()
        except (PartError, NetworkError) as error:
            await self._close()
            raise PoolError(str(error)) from error
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _start(self) -> None:
        self._check_options()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.options.start_timeout_s
        self._make_folders()
        atexit.register(self._close_now)
        self.network.up()
        self._describe_parts()
        await self._start_part("switch", deadline)
        await self._start_part("controller", deadline)
        agents = [self.parts[host.node_id] for host in self.star.hosts]
        for agent in agents:
            await agent.start()
        for agent in agents:
            await agent.wait_ready(max(0.1, deadline - loop.time()))
        await self.wait_programmed(max(0.1, deadline - loop.time()))

    def _check_options(self) -> None:
        options = self.options
        if options.switch == "bmv2":
            if options.runner in ("processes", "machines"):
                raise PoolError(
                    "BMv2 needs network interfaces: use the namespaces or mininet runner"
                )
            if options.loss or options.switch_flags:
                raise PoolError("BMv2 takes neither loss nor flags of kvcast switch")
            if options.link_rate_bits_per_s:
                raise PoolError("BMv2's ports have no rate: choose links without one")
            if find_simple_switch() is None:
                raise PoolError(
                    "simple_switch_grpc is not on the PATH and KVCAST_SIMPLE_SWITCH_GRPC does "
                    "not name it; docs/ says how to build BMv2"
                )
        if not 0 <= options.loss < 1:
            raise PoolError(f"loss {options.loss} is no probability below 1")
        if not 0 <= options.link_rate_bits_per_s < inf:
            raise PoolError(f"a link of {options.link_rate_bits_per_s} bits/s: no such rate")

    def _make_folders(self) -> None:
        remove_leftovers(SHARED_MEMORY, Path("/tmp"), Path(tempfile.gettempdir()))
        if self.run_dir is not None:
            self._folder = self.run_dir.resolve()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / "lock").open("w")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise PoolError(f"{self._folder}: another pool runs there") from error
        else:
            self._folder = Path(tempfile.mkdtemp(prefix=f"kvcast-run-{_process_name()}-"))
        for state in self._folder.glob("controller.sqlite*"):
            state.unlink()  # a new pool begins with a new controller
        # A Unix socket's path holds at most 107 bytes, so the sockets get a short one.
        self._sockets_folder = Path(
            tempfile.mkdtemp(prefix=f"kvcast-s-{_process_name()}-", dir="/tmp")
        )
        self._arena_folder = arena_folder(
            len(self.star.hosts) * self.options.arena_bytes, SHARED_MEMORY, self._folder
        )

    def _describe_parts(self) -> None:
        """Every part with the command that starts it, now and after it was killed."""
        environment = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment.setdefault(name, "1")  # dozens of processes share a few cores
        commands = {"switch": self._switch_command(), "controller": self._controller_command()}
        assert self._sockets_folder is not None
        for host in self.star.hosts:
            self.sockets[host.node_id] = self._sockets_folder / f"{host.node_id}.sock"
            commands[host.node_id] = self._agent_command(host.node_id)
        for name, command in commands.items():
            (self._folder / f"{name}.log").unlink(missing_ok=True)  # an earlier pool's
            self.parts[name] = Part(
                name,
                [*self.network.prefix(name), *_behind_the_hosts(name, self.options), *command],
                log_path=self._folder / f"{name}.log",
                environment=environment,
                announces=not (name == "switch" and self.options.switch == "bmv2"),
            )

    def _switch_command(self) -> list[str]:
        options, device = self.options, self.star.device_id
        grpc, rate = format_host_port(self.network.grpc_address), options.link_rate_bits_per_s
        ports = [(h.switch_port, self.network.switch_port(h)) for h in self.star.hosts]
        if options.switch == "bmv2":
            binary = find_simple_switch()
            assert binary is not None
            interfaces = [f"{port}@{name.removeprefix('if:')}" for port, name in ports]
            return [
                binary,
                "--no-p4",
                f"--device-id={device}",
                *(word for each in interfaces for word in ("-i", each)),
                "--",
                f"--grpc-server-addr={grpc}",
                "--cpu-port=255",
            ]
        return [
            *_daemon("switchsim", options),
            f"--grpc-addr={grpc}",
            f"--device-id={device}",
            *(f"--port={port}={name}" for port, name in ports),
            f"--stats-json={self.switch_stats_path}",
            f"--seed={options.seed}",
            *([f"--loss={options.loss}"] if options.loss else []),
            *([f"--port-rate={rate:g}", f"--uplink-rate={rate:g}"] if rate else []),
            *options.switch_flags,
        ]

    def _controller_command(self) -> list[str]:
        options, network = self.options, self.network
        return [
            *_daemon("controller", options),
            f"--switch={format_host_port(network.grpc_address)}",
            f"--device-id={self.star.device_id}",
            f"--target={'bmv2' if options.switch == 'bmv2' else 'v1model'}",
            f"--agents-addr={format_host_port(network.agents_address)}",
            f"--http-addr={format_host_port(network.http_address)}",
            "--insecure",  # the management network of namespaces is no loopback
            f"--state={self._folder / 'controller.sqlite'}",
            f"--lease={options.lease_s:g}",
            f"--tick={options.tick_s:g}",
            f"--admit={options.admit}",
            f"--replicas={options.replicas}",
            *(f"--home={node}" for node in options.homes),
            *(["--plain"] if options.plain else []),
            *options.controller_flags,
        ]

    def _agent_command(self, node_id: str) -> list[str]:
        options, host = self.options, self.star.host(node_id)
        assert self._sockets_folder is not None
        arena = self._arena_folder / f"{self._sockets_folder.name}-{node_id}.arena"
        self._arenas += [arena, Path(f"{arena}.index"), Path(f"{arena}.index.map")]
        return [
            *_daemon("hostagent", options),
            f"--node-id={node_id}",
            f"--controller={format_host_port(self.network.agents_address)}",
            "--insecure",  # as for the controller
            f"--ip={host.ip}",
            f"--mac={host.mac}",
            f"--switch-port={host.switch_port}",
            f"--udp-port={host.udp_port}",
            f"--socket={self.sockets[node_id]}",
            f"--arena-bytes={options.arena_bytes}",
            f"--arena-path={arena}",
            "--no-arena-reserve",  # dozens of agents share this machine's memory
            *patience_flags(len(self.star.hosts), options.link_rate_bits_per_s),
            *(link_flags(options.link_rate_bits_per_s) if options.link_rate_bits_per_s else []),
            *self.network.agent_flags(host),
            *options.agent_flags,
            *options.node_flags.get(node_id, ()),
        ]

    async def _start_part(self, name: str, deadline: float) -> None:
        part = self.parts[name]
        await part.start()
        await part.wait_ready(max(0.1, deadline - asyncio.get_running_loop().time()))

    async def _close(self) -> None:
        """End every part and take the network away, whatever else happens meanwhile."""
        closing = asyncio.create_task(self._close_parts())
        interrupted: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                interrupted = error
        self._close_now()
        closing.result()
        if interrupted is not None:
            raise interrupted

    async def _close_parts(self) -> None:
        agents = [part for name, part in self.parts.items() if name not in ("switch", "controller")]
        await asyncio.gather(*(part.stop() for part in agents))
        for name in ("controller", "switch"):
            if name in self.parts:
                await self.parts[name].stop()

    def _close_now(self) -> None:
        """The part of closing that needs no loop; also runs when the interpreter ends."""
        for part in self.parts.values():
            part.kill_now()
        self.network.down()
        for arena in self._arenas:
            arena.unlink(missing_ok=True)
        if self._sockets_folder is not None:
            shutil.rmtree(self._sockets_folder, ignore_errors=True)
        if self.run_dir is None and self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        atexit.unregister(self._close_now)

    # --- use ----------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The run directory with every part's log."""
        return self._folder

    @property
    def arenas(self) -> list[Path]:
        """The files of the agents' DRAM tiers and of their indexes."""
        return list(self._arenas)

    @property
    def process_name(self) -> str:
        """What the names of this pool's arenas and sockets in shared folders contain."""
        return _process_name()

    @property
    def switch_stats_path(self) -> Path:
        """Where switchsim writes all of its counters, every second."""
        return self._folder / "switch-stats.json"

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids by part; None for one that does not run."""
        return {name: part.pid for name, part in self.parts.items()}

    async def kill(self, name: str) -> None:
        """SIGKILL a part."""
        await self.parts[name].kill()

    def pause(self, name: str) -> None:
        """SIGSTOP a part: it neither answers nor dies."""
        self.parts[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT a paused part."""
        self.parts[name].send_signal(signal.SIGCONT)

    async def restart(self, name: str, timeout_s: float = 30.0) -> None:
        """Start a part that was killed again, with the command it had; waits for its ready line."""
        try:
            await self._start_part(name, asyncio.get_running_loop().time() + timeout_s)
        except PartError as error:
            raise PoolError(str(error)) from error

    async def take_over(self, name: str, timeout_s: float = 30.0) -> None:
        """Start an agent that takes over from the one that runs, which has to keep its arena; waits
        until the new one is ready and the old one is gone. PoolError, and the old one stays."""
        old = self.parts[name]
        command = [word for word in old.command if word != "--takeover"]
        new = Part(
            name,
            [*command, "--takeover"],
            log_path=old.log_path,
            environment=old.environment,
        )
        try:
            await new.start()
            await new.wait_ready(timeout_s)
            self.parts[name] = new
            async with asyncio.timeout(timeout_s):
                await old.wait()
        except (PartError, TimeoutError) as error:
            raise PoolError(
                f"{name} was not taken over: {error or 'the old agent stays'}"
            ) from error
        finally:
            if self.parts[name] is old:
                await new.kill()
            elif old.running:
                await old.kill()

    def check_alive(self, *, except_for: frozenset[str] = frozenset()) -> None:
        """PoolError with the log's tail if a part that should run does not."""
        for name, part in self.parts.items():
            if part.starts and not part.running and name not in except_for:
                raise PoolError(str(part.failure("died")))

    async def http(self, method: str, path: str, body: Any = None) -> Any:
        """One request to the controller's HTTP API; the decoded JSON (or text) it answers.

        OSError if nobody answers, PoolError for a status of 400 or more.
        """
        return await asyncio.to_thread(self._http, method, path, body)

    def _http(self, method: str, path: str, body: Any) -> Any:
        host, port = self.network.http_address
        connection = http.client.HTTPConnection(host, port, timeout=HTTP_TIMEOUT_S)
        connection.sock = self.network.open_socket()
        try:
            connection.sock.settimeout(HTTP_TIMEOUT_S)
            connection.sock.connect((host, port))
            payload = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"} if payload is not None else {}
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            if response.status >= 400:
                raise PoolError(f"{method} {path}: {response.status}: {text.strip()}")
            is_json = (response.headers.get_content_type()) == "application/json"
            return json.loads(text) if is_json else text
        except http.client.HTTPException as error:
            raise OSError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()

    async def status(self) -> dict[str, Any]:
        """The controller's /v1/status."""
        status = await self.http("GET", "/v1/status")
        if not isinstance(status, dict):
            raise PoolError("/v1/status did not answer with a JSON object")
        return status

    async def wait_programmed(
        self, timeout_s: float, *, without: frozenset[str] = frozenset()
    ) -> dict[str, Any]:
        """Wait until the controller reports every node but `without` as alive and programmed.

        PoolError, with what was missing, after `timeout_s` or when a part dies.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        wanted = {host.node_id for host in self.star.hosts} - without
        while True:
            self.check_alive(except_for=without)
            try:
                status = await self.status()
                homes = wanted & set(self.options.homes) if self.options.homes else wanted
                missing = what_is_missing(status, wanted, homes)
                if not missing and self.options.runner != "machines":  # sockets inside
                    missing = await self._late_maps(status["epoch"], wanted)
            except (OSError, PoolError) as error:
                missing = f"the controller's status ({error})"
                status = {}
            if not missing:
                return status
            if loop.time() >= deadline:
                raise PoolError(
                    f"the pool is not ready after {timeout_s:.0f} s: waiting for {missing}; "
                    f"logs are in {self.folder}; the controller's ends:\n"
                    f"{self.parts['controller'].log_tail()}"
                )
            await asyncio.sleep(_POLL_S)

    async def _late_maps(self, epoch: int, wanted: set[str]) -> str:
        """Which agents do not have the map of that epoch yet; "" if all have it.

        The agents are asked, since the controller hears of it only with their next renewal.
        """
        late = []
        for node_id in sorted(wanted):
            try:
                async with await AsyncClient.connect(str(self.sockets[node_id])) as client:
                    if (await client.describe()).epoch != epoch:
                        late.append(node_id)
            except KvcastError as error:
                return f"the agent {node_id} ({error})"
        return f"the map of epoch {epoch} at {', '.join(late)}" if late else ""


def what_is_missing(status: dict[str, Any], wanted: set[str], homes: set[str] | None = None) -> str:
    """What /v1/status lacks for these nodes to be usable; "" if nothing. `homes`: those of them
    that keep blocks for others (None: all)."""
    nodes = {node["node_id"]: node for node in status.get("nodes", [])}
    absent = sorted(wanted - nodes.keys())
    if absent:
        return f"the registration of {', '.join(absent)}"
    for what in ("alive", "connected", "placed", "programmed"):
        of_them = wanted if what != "placed" or homes is None else homes
        lacking = sorted(name for name in of_them if not nodes[name].get(what))
        if lacking:
            return f"{', '.join(lacking)} to be {what}"
    return ""


def arena_folder(needed_bytes: int, *folders: Path) -> Path:
    """The first of these folders that exists, may be written, and has that much room.

    The arenas of a pool on one machine are not reserved, since most pools never fill them. But
    where a file system is full, whoever writes to a mapped file of it is killed (SIGBUS), so all
    of them must fit; containers often have but 64 MiB of shared memory.
    """
    tried = []
    for folder in folders:
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            tried.append(f"{folder} cannot be written")
            continue
        status = os.statvfs(folder)
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes >= needed_bytes:
            return folder
        tried.append(f"{folder} has {free_bytes >> 20} MiB")
    raise PoolError(
        f"no room for the nodes' DRAM tiers, {needed_bytes >> 20} MiB together: {', '.join(tried)}"
    )


def _process_name() -> str:
    """This process, told from those of other containers that share the folder: its namespace of
    process ids, and its id there."""
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}"


def remove_leftovers(*folders: Path) -> None:
    """Remove what pools left whose process was killed: arenas, sockets, logs without a name.

    Their names carry the process; those of living ones stay, and those of other containers.
    """
    ours = _process_name().partition("-")[0]
    for folder in folders:
        for path in folder.glob("kvcast-*") if folder.is_dir() else ():
            match = _LEFTOVER.fullmatch(path.name)
            if match is None or match.group(1) != ours or Path("/proc", match.group(2)).exists():
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _daemon(package: str, options: PoolOptions) -> list[str]:
    """The words that start a daemon with this interpreter."""
    return [
        sys.executable,
        "-m",
        f"kvcast.{package}.daemon",
        f"--log-level={options.log_level}",
    ]
