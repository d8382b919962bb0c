"""`kvcast switch` on the compiled engine and loop, with kvcast's program pushed over P4Runtime.

Oracle: the reference engine, given the same program, entries and frames in the same order. Cannot
see: speed; interfaces (test_switchsim_loop_interfaces); what the clock does to leases (the
entries' lease is longer than any test).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import finsy as fy
import grpc
import pytest
from finsy.proto import p4r, p4r_grpc
from google.protobuf import text_format
from kvcast.bench import switch_programs as programs
from kvcast.switchsim.reference.switch import Switch
from own_address import own_address, own_port

START_TIMEOUT_S = 90.0
NOW_US = 10_000_000


@dataclass
class Rack:
    """A switch process and a socket for each host behind its tunnels."""

    process: subprocess.Popen[str]
    address: str
    stats_file: Path
    sockets: dict[int, socket.socket]
    ports: dict[int, int]

    def send(self, arrivals: Sequence[programs.Arrival]) -> None:
        for number, frame in arrivals:
            self.sockets[number].sendto(frame, (own_address(), self.ports[number]))

    def receive(self, number: int, count: int) -> list[bytes]:
        """That many frames at a host, or fewer if no more come."""
        frames = []
        with contextlib.suppress(TimeoutError):
            while len(frames) < count:
                frames.append(self.sockets[number].recv(20_000))
        return frames

    def exchange(self, reference: Switch, arrivals: Sequence[programs.Arrival]) -> None:
        """Send frames one by one; every host must hear what the reference engine says."""
        for arrival in arrivals:
            expected: dict[int, list[bytes]] = {}
            for number, frame in reference.process(*arrival, NOW_US):
                expected.setdefault(number, []).append(frame)
            self.send([arrival])
            for number, frames in expected.items():
                assert self.receive(number, len(frames)) == frames, f"at host {number}"

    def silent(self) -> bool:
        """Whether no host has anything more to hear."""
        for endpoint in self.sockets.values():
            endpoint.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                return not endpoint.recv(20_000)
            endpoint.settimeout(60)
        return True

    async def told(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Statistics of which that holds, as soon as they are written."""
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError, ValueError):
                stats: dict[str, Any] = json.loads(self.stats_file.read_text())
                if holds(stats):
                    return stats
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)

    def stop(self) -> dict[str, Any]:
        """End the switch; its statistics."""
        self.process.terminate()
        assert self.process.wait(20) == 0
        found = json.loads(self.stats_file.read_text())
        assert isinstance(found, dict)
        return found


@pytest.fixture
def rack(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rack]:
    more = list(getattr(request, "param", ()))
    hosts = range(1, programs.HOSTS + 1)
    ports = {host: own_port() for host in hosts}
    stats = tmp_path / "stats.json"
    with contextlib.ExitStack() as stack:
        sockets = {}
        flags = []
        for host in hosts:
            endpoint = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            endpoint.bind(("127.0.0.1", 0))
            endpoint.settimeout(60)
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            sockets[host] = endpoint
            peer = endpoint.getsockname()[1]
            flags += ["--port", f"{host}=udp:{own_address()}:{ports[host]}:127.0.0.1:{peer}"]
        errors = stack.enter_context((tmp_path / "switch.log").open("w"))
        command = [sys.executable, "-m", "kvcast.switchsim.daemon", "--engine", "llvm"]
        process = subprocess.Popen(
            [*command, "--grpc-addr", "127.0.0.1:0", "--stats-json", str(stats), *flags, *more],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, (tmp_path / "switch.log").read_text()
            ready = json.loads(line)
            assert ready["engine"] == "llvm"
            yield Rack(process, ready["grpc"], stats, sockets, ports)
            assert "Traceback" not in (tmp_path / "switch.log").read_text()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextlib.asynccontextmanager
async def controller(rack: Rack) -> AsyncIterator[fy.Switch]:
    """A primary controller that has pushed kvcast's program and written its entries."""
    setup = programs.kvcast()
    ready = asyncio.Event()

    async def is_ready(_: fy.Switch) -> None:
        ready.set()

    options = fy.SwitchOptions(p4info=setup.p4info, p4blob=setup.program, ready_handler=is_ready)
    async with fy.Switch("test", rack.address, options) as client:
        await asyncio.wait_for(ready.wait(), START_TIMEOUT_S)
        await programs.write(client, setup)
        yield client


def reference() -> Switch:
    switch = Switch()
    programs.load(switch, programs.kvcast())
    return switch


async def test_a_segment_is_read_by_eight_shared_and_then_served_from_the_switch(
    rack: Rack,
) -> None:
    key, resident = programs.KEY, programs.RESIDENT_KEY
    readers = programs.READERS
    expected = reference()
    async with controller(rack):
        rack.exchange(expected, programs.ordinary(8))
        rack.exchange(expected, programs.reads(key, readers))
        rack.exchange(expected, programs.data(key, range(64), last=True))
        rack.exchange(expected, programs.reads(resident, readers[:1]))
        rack.exchange(expected, programs.data(resident, range(64), last=True))
        rack.exchange(expected, programs.reads(resident, readers))
        assert rack.silent()
    stats = rack.stop()
    counted = expected.stats.as_dict()
    assert {name: stats["switch"][name] for name in counted} == counted
    assert stats["loop"]["emitted"] == counted["frames_out"]


async def test_bursts_come_through_complete(rack: Rack) -> None:
    arrivals = programs.ordinary(200)
    async with controller(rack):
        for _ in range(20):
            rack.send(arrivals)
            assert rack.receive(2, len(arrivals)) == [frame for _, frame in arrivals]
    stats = rack.stop()
    assert stats["ports"]["1"]["rx_frames"] == stats["ports"]["2"]["tx_frames"] == 4000
    assert stats["ports"]["1"]["rx_kernel_drops"] == 0


async def test_hostile_frames_change_nothing_for_the_others(rack: Rack) -> None:
    rng = random.Random(4)
    meant = programs.reads(programs.KEY, programs.READERS) + programs.data(
        programs.KEY, range(8), last=False
    )
    async with controller(rack):
        for _ in range(4000):
            number, frame = rng.choice(meant)
            kind = rng.randrange(4)
            if kind == 0:
                frame = frame[: rng.randrange(len(frame))]
            elif kind == 1:
                frame = rng.randbytes(rng.choice((0, 1, 13, 14, 64, 1500, 9216)))
            elif kind == 2:
                damaged = bytearray(frame)
                for _ in range(rng.randint(1, 4)):
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                frame = bytes(damaged)
            rack.send([(number, frame)])
        marker = programs.ordinary(1, 777)
        rack.send(marker)
        deadline_s = time.monotonic() + 60
        while marker[0][1] not in rack.receive(2, 1):
            assert time.monotonic() < deadline_s
    stats = rack.stop()
    assert stats["ports"]["1"]["rx_runts"] > 0
    assert stats["switch"]["parser_errors"] > 0


async def test_programs_are_pushed_again_and_again_while_frames_pass(rack: Rack) -> None:
    arrivals = programs.ordinary(100)
    async with controller(rack) as client:
        for _ in range(10):
            rack.send(arrivals)
            await push(rack, client, programs.kvcast())
            await programs.write(client, programs.kvcast())
        marker = programs.ordinary(1, 777)
        rack.send(marker)
        while rack.receive(2, 1) != [marker[0][1]]:  # whatever came before it has come
            pass
        rack.exchange(reference(), arrivals)
    stats = rack.stop()
    # The counts are the device's, whatever runs: nothing is forgotten at a push.
    assert stats["switch"]["frames_in"] == stats["loop"]["processed"] == 1101
    assert stats["p4runtime"]["pushes"] == 11


async def push(rack: Rack, client: fy.Switch, setup: programs.Setup) -> None:
    """Push a program beside the controller's own stream, with its election id."""
    request = p4r.SetForwardingPipelineConfigRequest(
        device_id=client.device_id,
        election_id=p4r.Uint128(low=client.election_id),
        action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
    )
    text_format.Parse(setup.p4info.read_text(), request.config.p4info)
    request.config.p4_device_config = setup.program.read_bytes()
    async with grpc.aio.insecure_channel(rack.address) as channel:
        stub = p4r_grpc.P4RuntimeStub(channel)
        await stub.SetForwardingPipelineConfig(request)


async def test_table_writes_lose_no_frame(rack: Rack) -> None:
    """Thousands of entries come and go while frames pass at a rate that loses none without."""
    arrivals = programs.ordinary(250)
    frames = [frame for _, frame in arrivals]

    async def pass_frames() -> None:
        for _ in range(20):
            rack.send(arrivals)
            got = await asyncio.to_thread(rack.receive, 2, len(frames))
            assert got == frames

    async with controller(rack) as client:

        def entry(number: int) -> fy.P4TableEntry:
            return fy.P4TableEntry(
                "l2_forward",
                match=fy.P4TableMatch({"hdr.ethernet.dst": 0x0A_0000_0000 + number}),
                action=fy.P4TableAction("to_port", port=3, port_bit=4),
            )

        async def write() -> None:
            for start in range(0, 5000, 500):
                await client.write([+entry(n) for n in range(start, start + 500)])
            for start in range(0, 5000, 500):
                await client.write([-entry(n) for n in range(start, start + 500)])

        await asyncio.gather(pass_frames(), write())
    stats = rack.stop()
    assert stats["ports"]["2"]["tx_frames"] == 5000
    assert stats["p4runtime"]["updates"] > 10_000
    assert stats["p4runtime"]["update_errors"] == 0


async def test_atomic_batches_pause_the_loop_and_lose_nothing(rack: Rack) -> None:
    """The loop pauses for each of many batches: every frame comes out, here or there."""
    macs = [0x0A_0000_0001, 0x0A_0000_0002]
    frames = []
    for number in range(400):
        frame = programs.ordinary(1, 200)[0][1]
        frames.append(macs[number % 2].to_bytes(6, "big") + frame[6:46] + bytes([number % 256]))
    async with controller(rack) as client:

        async def send_both_to(port: int, kind: str) -> None:
            request = p4r.WriteRequest(
                device_id=client.device_id,
                election_id=p4r.Uint128(low=client.election_id),
                atomicity=p4r.WriteRequest.DATAPLANE_ATOMIC,
            )
            for mac in macs:
                entry = fy.P4TableEntry(
                    "l2_forward",
                    match=fy.P4TableMatch({"hdr.ethernet.dst": mac}),
                    action=fy.P4TableAction("to_port", port=port, port_bit=1 << (port - 1)),
                )
                change = +entry if kind == "insert" else ~entry
                request.updates.append(change.encode_update(client.p4info))
            async with grpc.aio.insecure_channel(rack.address) as channel:
                await p4r_grpc.P4RuntimeStub(channel).Write(request)

        await send_both_to(3, "insert")

        async def change() -> None:
            for turn in range(40):
                await send_both_to(4 if turn % 2 == 0 else 3, "modify")

        def flood() -> None:
            for start in range(0, 400, 2):
                rack.send([(1, frames[start]), (1, frames[start + 1])])
                time.sleep(0.001)

        await asyncio.gather(change(), asyncio.to_thread(flood))
        await rack.told(lambda stats: bool(stats["loop"]["processed"] == 400))
    stats = rack.stop()
    sent = [stats["ports"][str(port)]["tx_frames"] for port in (3, 4)]
    assert sum(sent) == 400
    for port, count in zip((3, 4), sent, strict=True):
        assert len(rack.receive(port, count)) == count
    assert rack.silent()
    assert stats["loop"]["processed"] == 400
    assert stats["p4runtime"]["update_errors"] == 0


@pytest.mark.parametrize("rack", [("--loss", "1")], indirect=True)
async def test_certain_loss_loses_everything(rack: Rack) -> None:
    async with controller(rack):
        rack.send(programs.ordinary(50))
        await rack.told(lambda stats: bool(stats["ports"]["1"]["rx_loss"] == 50))
        assert rack.silent()


@pytest.mark.parametrize("rack", [("--port-rate", "10e6", "--queue-depth", "20")], indirect=True)
async def test_a_slow_link_holds_its_queue_and_drops_the_rest(rack: Rack) -> None:
    arrivals = programs.ordinary(100)
    async with controller(rack):
        start_s = time.monotonic()
        rack.send(arrivals)
        # One on the wire and twenty behind it, at least; more if the frames take a while to come.
        frames = rack.receive(2, 21)
        took_s = time.monotonic() - start_s
        counts = ("tx_frames", "tx_queue_drops")
        await rack.told(lambda stats: sum(stats["ports"]["2"][name] for name in counts) == 100)
    stats = rack.stop()
    frames += rack.receive(2, stats["ports"]["2"]["tx_frames"] - 21)
    assert 21 <= len(frames) == stats["ports"]["2"]["tx_frames"]
    assert frames == [f for _, f in arrivals if f in set(frames)]
    # A frame of 1066 bytes takes 0.85 ms at 10 Mb/s; the 21st has left after all before it.
    assert took_s >= (21 - 2) * 1066 * 8 / 10e6


async def test_frames_before_any_program_are_counted(rack: Rack) -> None:
    rack.send(programs.ordinary(10))
    stats = await rack.told(lambda stats: bool(stats["switch"]["dropped_no_program"] == 10))
    assert stats["switch"]["frames_in"] == 10
