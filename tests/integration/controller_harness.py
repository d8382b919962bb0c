"""A switch and controllers as processes, and agents that speak only the control link.

The agents here move no data; what they hold is what a test says they hold. The switch is read by
a P4Runtime client of its own, which shares no code with the controller's adapter but finsy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import finsy as fy
import msgspec
from kvcast.p4 import artefact
from kvcast.protocol.messages.control import (
    AgentMessage,
    ControllerMessage,
    Describe,
    Described,
    Keep,
    Kept,
    PoolMap,
    Register,
    Registered,
    Renew,
)
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.wire import BlockId
from own_address import own_endpoint
from registering import register

M = TypeVar("M", bound=msgspec.Struct)
TIMEOUT_S = 90.0


class Process:
    """A daemon of ours; `facts` is its ready line."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, Any]) -> None:
        self.process = process
        self.facts = facts

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), TIMEOUT_S)


class Lab:
    """Starts processes, and ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[Process] = []
        self.agents: list[FakeAgent] = []

    async def start(self, module: str, *flags: str) -> Process:
        log = (self.folder / f"{module}-{len(self._processes)}.log").open("wb")
        with log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"kvcast.{module}.daemon",
                *flags,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)
        assert line, f"{module} did not start: {Path(log.name).read_text()}"
        started = Process(process, json.loads(line))
        self._processes.append(started)
        return started

    async def switch(self, grpc: str = "127.0.0.1:0", *ports: str) -> Process:
        flags = [f"--port={port}" for port in ports]
        return await self.start("switchsim", f"--grpc-addr={grpc}", "--strict", *flags)

    async def controller(
        self,
        switch: str,
        *flags: str,
        state: str = "state.sqlite",
        agents: str = "127.0.0.1:0",
        lease_s: float = 4.0,
    ) -> Process:
        """Agents renew ten times in a lease, so that a busy machine loses none of them."""
        return await self.start(
            "controller",
            f"--switch={switch}",
            f"--agents-addr={agents}",
            "--http-addr=127.0.0.1:0",
            f"--state={self.folder / state}",
            f"--lease={lease_s}",
            "--tick=0.1",
            "--rebalance-after=0.5",
            *flags,
        )

    async def agent(self, controller: Process, number: int, **changes: object) -> FakeAgent:
        """An agent that has registered and got a map."""
        agent = FakeAgent(number)
        self.agents.append(agent)
        await agent.connect(controller.facts["agents_addr"], **changes)
        await agent.wait_for(PoolMap)
        return agent

    async def bmv2(self, binary: str) -> Process:
        """BMv2's switch without ports and without a program."""
        grpc = own_endpoint()
        log = (self.folder / "bmv2.log").open("wb")
        with log:
            process = await asyncio.create_subprocess_exec(
                binary, "--no-p4", "--device-id", "1", "--thrift-port", "0", "--",
                "--grpc-server-addr", grpc, "--cpu-port", "255",
                stdout=log, stderr=log,
            )  # fmt: skip
        started = Process(process, {"grpc": grpc})
        self._processes.append(started)
        return started

    async def close(self) -> None:
        for agent in self.agents:
            await agent.close()
        for process in self._processes:
            await process.kill()


@contextlib.asynccontextmanager
async def lab_in(folder: Path) -> AsyncIterator[Lab]:
    lab = Lab(folder)
    try:
        yield lab
    finally:
        await lab.close()


class FakeAgent:
    """Registers, renews, answers Describe and Keep from `held` {block: (size, digest)}."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: dict[BlockId, tuple[int, int]] = {}
        self.heard: list[msgspec.Struct] = []
        self.closed = asyncio.Event()
        self._news = asyncio.Condition()
        self._codec: MessageCodec[Any] = MessageCodec(ControllerMessage)
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.renewing = True
        self.epoch = 0

    def register(self, **changes: object) -> Register:
        return register(self.number, **changes)

    async def connect(self, address: str, **changes: object) -> None:
        host, port = address.rsplit(":", 1)
        reader, self._writer = await asyncio.open_connection(host, int(port))
        self.closed.clear()
        self._codec = MessageCodec(ControllerMessage)
        await self.send(self.register(**changes))
        self._tasks = [
            asyncio.create_task(self._read(reader)),
            asyncio.create_task(self._renew()),
        ]

    async def send(self, message: AgentMessage) -> None:
        assert self._writer is not None
        self._writer.write(self._codec.encode(message))
        await self._writer.drain()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()

    async def wait_for(self, kind: type[M], check: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of this kind that passes; it is taken out of what was heard."""

        def found() -> M | None:
            for message in self.heard:
                if isinstance(message, kind) and check(message):
                    return message
            return None

        async with asyncio.timeout(TIMEOUT_S), self._news:
            await self._news.wait_for(lambda: found() is not None)
            message = found()
            assert message is not None
            self.heard.remove(message)
            return message

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for message in self._codec.feed(data):
                    await self._hear(message)
        self.closed.set()

    async def _hear(self, message: msgspec.Struct) -> None:
        match message:
            case PoolMap():
                self.epoch = message.epoch
            case Describe():
                asked = [BlockId(ref.namespace, ref.key) for ref in message.blocks]
                blocks = [(b.namespace, b.key, *self.held[b]) for b in asked if b in self.held]
                await self.send(Described(message.request, blocks))
            case Keep():
                await self.send(Kept(message.request, message.namespace, message.key, True))
            case Registered():
                pass
        async with self._news:
            self.heard.append(message)
            self._news.notify_all()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(0.4)
            if self.renewing:
                with contextlib.suppress(ConnectionError):
                    await self.send(Renew({"reads": 1.0}, [], 0, 0, self.epoch))


async def http(controller: Process, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Status and decoded JSON of one request."""
    url = f"http://{controller.facts['http_addr']}{path}"
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body) as reply:
        return reply.status, await reply.json()


async def status(controller: Process) -> dict[str, Any]:
    code, body = await http(controller, "GET", "/v1/status")
    assert code == 200
    return dict(body)


async def metrics_of(controller: Process) -> dict[str, float]:
    """What /metrics says: name with labels -> value."""
    url = f"http://{controller.facts['http_addr']}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        assert reply.status == 200
        lines = (await reply.text()).splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


async def until(controller: Process, check: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Wait until the controller's status passes."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            seen = await status(controller)
            if check(seen):
                return seen
            await asyncio.sleep(0.05)


async def tables_of(grpc: str) -> dict[str, dict[tuple[Any, ...], tuple[Any, ...]]]:
    """Every entry in the switch: table -> key values -> (action, parameters).

    A backup client: reading needs no primary.
    """
    kvcast = artefact("v1model")
    options = fy.SwitchOptions(p4info=kvcast.p4info, initial_election_id=1)
    tables: dict[str, dict[tuple[Any, ...], tuple[Any, ...]]] = {}
    async with fy.Switch("reader", grpc, options) as switch:
        reading: Any = switch.read
        async for entry in reading(fy.P4TableEntry()):
            if switch.p4info.tables[entry.table_id].is_const:
                continue
            key = tuple((entry.match or {}).values())
            tables.setdefault(entry.table_id, {})[key] = (
                entry.action.name,
                *entry.action.args.values(),
            )
        async for default in reading(fy.P4TableEntry("settings", is_default_action=True)):
            tables["settings"] = {(): (default.action.name, *default.action.args.values())}
        groups: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        async for group in reading(fy.P4MulticastGroupEntry()):
            groups[group.multicast_group_id,] = tuple(
                sorted(str(fy.p4entity.format_replica(r)) for r in group.replicas)
            )
        tables["groups"] = groups
    return tables
