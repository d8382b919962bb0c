"""Targets for the P4Runtime tests: our switch, our switch in strict mode, and BMv2.

The same tests run on all of them where they apply: what passes in strict mode must pass on BMv2,
which is found by KVCAST_SIMPLE_SWITCH_GRPC or on PATH, and skipped where there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import finsy
import grpc
import pytest
import pytest_asyncio
from finsy.proto import U128, p4i, p4r, p4r_grpc
from google.protobuf import text_format
from own_address import own_address, own_port

PROGRAMS = Path(__file__).parent / "programs"
P4INFO_PATH = PROGRAMS / "everything.p4info.txtpb"
BLOB_PATH = PROGRAMS / "everything.json"
CPU_PORT = 255
DEVICE_ID = 1
START_TIMEOUT_S = 90
SWITCH_COMMAND = [sys.executable, "-m", "kvcast.switchsim.daemon"]


@dataclass(frozen=True, slots=True)
class Target:
    """A running P4Runtime server."""

    kind: str
    address: str
    stats_path: Path | None = None

    @property
    def is_bmv2(self) -> bool:
        return self.kind == "bmv2"

    @property
    def is_strict(self) -> bool:
        """Whether it refuses what BMv2 does not implement."""
        return self.kind != "switchsim"

    def stats(self) -> dict[str, Any]:
        """switchsim's counters, at most a second old."""
        assert self.stats_path is not None
        result: dict[str, Any] = json.loads(self.stats_path.read_text())
        return result


def start_switch_process(directory: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A switch process that is ready, and its P4Runtime address."""
    with (directory / "switch.log").open("w") as errors:
        process = subprocess.Popen(
            [*SWITCH_COMMAND, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait()
        pytest.fail(f"the switch did not start: {(directory / 'switch.log').read_text()}")
    address: str = json.loads(line)["grpc"]
    return process, address


def start_switchsim(directory: Path, *arguments: str) -> tuple[subprocess.Popen[str], Target]:
    """A `kvcast switch` process that is ready."""
    stats = directory / "stats.json"
    flags = ["--grpc-addr", "127.0.0.1:0", "--stats-json", str(stats)]
    process, address = start_switch_process(directory, *flags, *arguments)
    kind = "switchsim-strict" if "--strict" in arguments else "switchsim"
    return process, Target(kind, address, stats)


def stop_process(process: subprocess.Popen[str]) -> int:
    process.terminate()
    try:
        code = process.wait(20)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    return code


def find_bmv2() -> str:
    path = os.environ.get("KVCAST_SIMPLE_SWITCH_GRPC") or shutil.which("simple_switch_grpc")
    if path is None:
        pytest.skip("no simple_switch_grpc (KVCAST_SIMPLE_SWITCH_GRPC or PATH)")
    return path


def start_bmv2(directory: Path) -> tuple[subprocess.Popen[str], Target]:
    """A simple_switch_grpc process that accepts connections; it has no ports but the CPU's."""
    port = own_port()
    with (directory / "bmv2.log").open("w") as output:
        process = subprocess.Popen(
            [
                find_bmv2(),
                "--no-p4",
                "--device-id",
                str(DEVICE_ID),
                "--thrift-port",
                "0",
                "--",
                "--grpc-server-addr",
                f"{own_address()}:{port}",
                "--cpu-port",
                str(CPU_PORT),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection((own_address(), port), 1):
            return process, Target("bmv2", f"{own_address()}:{port}")
        if process.poll() is not None:
            break
        time.sleep(0.05)
    stop_process(process)
    pytest.fail(f"BMv2 did not start: {(directory / 'bmv2.log').read_text()[-2000:]}")


@pytest.fixture(
    scope="session",
    params=["switchsim", "switchsim-strict", pytest.param("bmv2", marks=pytest.mark.bmv2)],
)
def target(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Target]:
    """Each of the three targets in turn; tests push their pipeline, which clears all state."""
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "bmv2":
        process, running = start_bmv2(directory)
    elif request.param == "switchsim":
        process, running = start_switchsim(directory)
    else:
        process, running = start_switchsim(directory, "--strict")
    yield running
    code = stop_process(process)
    if not running.is_bmv2:
        log = (directory / "switch.log").read_text()
        assert code == 0, log
        stats = running.stats()
        assert stats["p4runtime"]["internal_errors"] == 0, log
        assert stats["loop"]["process_errors"] == 0, log


@pytest.fixture
def switchsim(tmp_path: Path) -> Iterator[Target]:
    """A switch of this test's own, for what would disturb others."""
    process, running = start_switchsim(tmp_path)
    yield running
    assert stop_process(process) == 0, (tmp_path / "switch.log").read_text()
    assert running.stats()["p4runtime"]["internal_errors"] == 0, (
        tmp_path / "switch.log"
    ).read_text()


def load_p4info() -> p4i.P4Info:
    p4info = p4i.P4Info()
    text_format.Parse(P4INFO_PATH.read_text(), p4info)
    return p4info


class Controller:
    """finsy's switch object, with the pipeline pushed and the election won."""

    def __init__(self, switch: finsy.Switch, target: Target) -> None:
        self.switch = switch
        self.target = target
        self._tasks: list[asyncio.Task[None]] = []
        self._packets = self.queue(switch.read_packets())

    def queue(self, messages: AsyncIterator[Any]) -> asyncio.Queue[Any]:
        """What finsy iterates over, from now on (its iterators only open when they are read)."""
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def pump() -> None:
            async for message in messages:
                queue.put_nowait(message)

        self._tasks.append(asyncio.create_task(pump()))
        return queue

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def read(self, *entities: Any) -> list[Any]:
        return [entity async for entity in self.switch.read(entities)]

    async def packets_in(self, count: int) -> list[finsy.P4PacketIn]:
        """The next packets-in; fails where they do not come."""
        packets: list[finsy.P4PacketIn] = []
        while len(packets) < count:
            try:
                packets.append(await asyncio.wait_for(self._packets.get(), 60))
            except TimeoutError:
                pytest.fail(f"{len(packets)} packets of {count} came in")
        return packets

    async def send(self, frame: bytes, *, bypass: int = 0, egress_port: int = 0) -> None:
        """A packet-out: by default one that runs the pipeline as if it had come in."""
        out = finsy.P4PacketOut(frame, egress_port=egress_port, bypass=bypass, pad=0)
        await self.switch.write([out])


@contextlib.asynccontextmanager
async def controller_of(target: Target, *, election_id: int = 10) -> AsyncIterator[Controller]:
    ready = asyncio.Event()

    async def on_ready(_: finsy.Switch) -> None:
        ready.set()

    options = finsy.SwitchOptions(
        p4info=P4INFO_PATH,
        p4blob=BLOB_PATH,
        p4force=True,
        device_id=DEVICE_ID,
        initial_election_id=election_id,
        ready_handler=on_ready,
    )
    async with finsy.Switch("under-test", target.address, options) as switch:
        await asyncio.wait_for(ready.wait(), START_TIMEOUT_S)
        controller = Controller(switch, target)
        try:
            yield controller
        finally:
            await controller.close()


# One event loop for all tests: grpc.aio has a thread of its own that must not outlive its loop.
@pytest_asyncio.fixture(loop_scope="session")
async def controller(target: Target) -> AsyncIterator[Controller]:
    async with controller_of(target) as one:
        yield one


class RawStream:
    """A StreamChannel without a client library: for what a good client would not do."""

    def __init__(self, stub: p4r_grpc.P4RuntimeStub) -> None:
        self._call = stub.StreamChannel()

    async def send(self, message: p4r.StreamMessageRequest) -> None:
        await self._call.write(message)

    async def say(self, election_id: int | None, device_id: int = DEVICE_ID) -> None:
        """Send a MasterArbitrationUpdate."""
        message = p4r.StreamMessageRequest()
        message.arbitration.device_id = device_id
        if election_id is not None:
            message.arbitration.election_id.CopyFrom(U128.encode(election_id))
        await self.send(message)

    async def receive(self) -> p4r.StreamMessageResponse:
        message = await asyncio.wait_for(self._call.read(), 60)
        assert isinstance(message, p4r.StreamMessageResponse), message
        return message

    async def status(self) -> tuple[int, int]:
        """(code, election id) of the next message, which must be about arbitration."""
        message = await self.receive()
        assert message.WhichOneof("update") == "arbitration", message
        update = message.arbitration
        return update.status.code, U128.decode(update.election_id)

    async def ended(self) -> grpc.StatusCode:
        """The code with which the server ends the stream."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            await asyncio.wait_for(self._call.read(), 60)
        code: grpc.StatusCode = await self._call.code()
        return code

    async def close(self) -> None:
        self._call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self._call.read()


@pytest_asyncio.fixture(loop_scope="session")
async def stub(target: Target) -> AsyncIterator[p4r_grpc.P4RuntimeStub]:
    async with grpc.aio.insecure_channel(target.address) as channel:
        yield p4r_grpc.P4RuntimeStub(channel)
