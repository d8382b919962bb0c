"""The question: how many frames a second does the switch move, and how near is that to the limit?

    python -m kvcast.bench.switch --json FILE

Owns: the scenarios, who is compared with whom, the report. Must not know: how any of them works.
The programs and their traffic are in `switch_programs`, compiled senders in `traffic`, the driver
in memory in `memory`.

- In memory, on one core: kvcast's program (forwarding, DATA of 1 KiB that eight readers wait for,
  READs that join, READs served from the switch) and a router, as processor time per frame of the
  compiled engine; and of the reference engine, for scale.
- Through UDP tunnels: the whole switch process; frames come one by one, and joined by the
  sender's kernel (UDP_SEGMENT), as agents send them. The far end counts bytes.
- veth to veth (root): the whole switch process beside a bare forwarder by recvmmsg and sendmmsg,
  and beside simple_switch_grpc where that is found (PATH or KVCAST_SIMPLE_SWITCH_GRPC). All of them
  stand ready in one network namespace, each on links of its own, and are measured in turns.

The sender is the same for all, compiled, on a processor of its own where there are two; it offers
more than any of them can forward. What counts is what the far interface received, read while the
sender runs; no socket listens there. The bare forwarder and the switch are held to one processor;
BMv2, which has a thread for each stage, may use all, and is also offered less than the maximum,
since it forwards less when it is flooded: its best counts. Before anything is measured, frames go
through one by one and must come out as the reference engine says.

Rates are frames out a second. Of repeated measurements the median is given, and beside it the
least and the greatest. What cannot be measured here, or a peer that does not start, is named under
`skipped` with the reason. Where a part fails, the others are measured all the same; `incomplete`
then says why, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import finsy as fy
import grpc
from kvcast.bench import switch_programs as programs
from kvcast.bench import traffic
from kvcast.bench.memory import Driver
from kvcast.bench.processor_time import processor_time_s
from kvcast.bench.switch_programs import Arrival, Setup
from kvcast.controller.core.reconcile import Verb
from kvcast.service import provenance, reports
from kvcast.service.commands import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from kvcast.service.statistics import ratio
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.reference.switch import Switch
from kvcast.topologies.namespaces import CLONE_NEWNET
from kvcast.topologies.pool import find_simple_switch

NOW_US = 10_000_000
REPEATS = 5
MEMORY_SECONDS = 0.2
WINDOW_S = 0.3
"""How long received frames are counted in one measurement."""

_WARM_UP_S = 0.15
_SETTLE_S = 0.05
_STORM_S = 1.5
_STORM_BATCH = 1000
_CHECKED_FRAMES = 32
JOINED = 56
"""Frames that a host's kernel hands over in one piece (UDP_SEGMENT), as kvcast's agents do."""
_START_TIMEOUT_S = 30.0
_BMV2_OFFERS = (60_000.0, 100_000.0, 0.0)
"""Frames a second offered to BMv2; 0 = as many as go."""

_TAIL_BYTES, _TAIL_LINES = 4096, 4
"""How much of what a process said before it failed is told."""

_IGNORE_OUTGOING: Final = 23


class BenchError(Exception):
    """Something that is measured does not work; the message says what."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest, to a whole frame."""
    return {
        "median": round(statistics.median(values)),
        "min": round(min(values)),
        "max": round(max(values)),
    }


# --- in memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """Frames in turn, after some that prepare the switch for them."""

    name: str
    setup: Setup
    inputs: list[Arrival]
    prepare: list[Arrival]
    counts_in: bool = False
    """Whether frames in are what counts; else, frames out."""


def scenarios() -> list[Scenario]:
    """What is asked of the programs in memory; all frames about 1 KiB but for the READs."""
    kvcast, key, resident = programs.kvcast(), programs.KEY, programs.RESIDENT_KEY
    readers = programs.READERS
    reads = programs.reads(key, readers)
    filled = programs.reads(resident, readers[:1]) + programs.data(resident, range(64), last=True)
    return [
        Scenario("forward", kvcast, programs.ordinary(), []),
        Scenario("forward_64_bytes", kvcast, programs.ordinary(size=64), []),
        Scenario("data_1k", kvcast, programs.data(key, range(63), last=False), reads),
        Scenario("read_join", kvcast, reads + programs.misses(key), [], counts_in=True),
        Scenario("resident", kvcast, programs.reads(resident, readers), filled),
        Scenario("l3_forward", programs.router(), programs.routed(), []),
    ]


def measure_memory(report: dict[str, Any], seconds: float, repeats: int) -> None:
    """Every scenario on the compiled engine, and once on the reference engine."""
    for scenario in scenarios():
        reference, compiled = Switch(), CompiledSwitch()
        engines: tuple[Engine, ...] = (reference, compiled)
        for switch in engines:
            programs.load(switch, scenario.setup)
            for port, frame in scenario.prepare:
                switch.process(port, frame, NOW_US)
        expected = [reference.process(*arrival, NOW_US) for arrival in scenario.inputs]
        if expected != [compiled.process(*arrival, NOW_US) for arrival in scenario.inputs]:
            raise BenchError(f"{scenario.name}: the engines disagree")
        driver = Driver(compiled.native_entry, scenario.inputs, NOW_US)
        if driver.once() != sum(map(len, expected)):
            raise BenchError(f"{scenario.name}: the compiled loop puts out something else")
        rates = [driver.rate(seconds) for _ in range(repeats)]
        picked = [r.frames_in_per_s if scenario.counts_in else r.frames_out_per_s for r in rates]
        report[f"{scenario.name}_in_memory_pps"] = round(statistics.median(picked))
        report[f"{scenario.name}_in_memory"] = {
            **spread(picked),
            "unit": f"frames {'in' if scenario.counts_in else 'out'} a second, one core",
            "frames_in": len(scenario.inputs),
            "frames_out": sum(map(len, expected)),
        }
        rate = _reference_rate(reference, scenario, seconds)
        report[f"{scenario.name}_reference_pps"] = round(rate)


def _reference_rate(switch: Engine, scenario: Scenario, seconds: float) -> float:
    count, start_s = 0, time.thread_time()
    while time.thread_time() - start_s < seconds:
        for port, frame in scenario.inputs:
            sent = switch.process(port, frame, NOW_US)
            count += 1 if scenario.counts_in else len(sent)
            if time.thread_time() - start_s >= seconds:
                break
    return count / (time.thread_time() - start_s)


# --- processes ------------------------------------------------------------------------------------


@dataclass
class Processors:
    """Who runs where."""

    sender: set[int]
    switch: set[int]
    all: set[int]

    @staticmethod
    def of_this_machine() -> Processors:
        everything = os.sched_getaffinity(0)
        first, last = min(everything), max(everything)
        return Processors({first}, {last}, everything)


class Started:
    """A process that is being measured, or that sends. Its output is kept, for when it fails."""

    def __init__(self, command: Sequence[str], where: set[int], *, tells_on_stdout: bool) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE if tells_on_stdout else self._output,
            stderr=self._output,
            text=True,
            bufsize=1,
        )
        os.sched_setaffinity(self.process.pid, where)

    def ready(self) -> dict[str, Any]:
        """Wait for the line that says it is; BenchError where the process ends instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise BenchError(self.failure())
        made = json.loads(line)
        assert isinstance(made, dict)
        return made

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """BenchError where the process ends before, or that takes too long."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise BenchError(self.failure())
            time.sleep(0.05)

    def failure(self) -> str:
        """What became of it, and the last that it said."""
        command, code = self.process.args, self.process.poll()
        assert isinstance(command, list)
        size = os.fstat(self._output.fileno()).st_size
        last = os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = last.decode(errors="replace").split("\n")
        said = " | ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:])
        became = f"is not ready after {_START_TIMEOUT_S:g} s"
        if code is not None:
            became = f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"
        return f"{command[0]} {became}; its last words: {said or 'none'}"

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._output.close()

    def processor_time_s(self) -> float:
        """What all threads of the process have used so far."""
        return processor_time_s(self.process.pid)


@contextlib.contextmanager
def started(
    command: Sequence[str], where: set[int], *, tells_on_stdout: bool = True
) -> Iterator[Started]:
    made = Started(command, where, tells_on_stdout=tells_on_stdout)
    try:
        yield made
    finally:
        made.stop()


def switch_command(ports: Sequence[str], *more: str) -> list[str]:
    flags = [flag for port in ports for flag in ("--port", port)]
    module = [sys.executable, "-m", "kvcast.switchsim.daemon"]
    return [*module, "--engine", "llvm", "--grpc-addr", "127.0.0.1:0", *flags, *more]


async def program_switch(address: str, setup: Setup) -> None:
    """Push the program and write the entries, as a controller would."""
    async with _connected(address, fy.SwitchOptions(setup.p4info, setup.program)) as client:
        await programs.write(client, setup)


@contextlib.asynccontextmanager
async def _connected(address: str, options: fy.SwitchOptions) -> AsyncIterator[fy.Switch]:
    ready = asyncio.Event()

    async def is_ready(_: fy.Switch) -> None:
        ready.set()

    async with fy.Switch("bench", address, options(ready_handler=is_ready)) as client:
        async with asyncio.timeout(_START_TIMEOUT_S):
            await ready.wait()
        yield client


class Run(NamedTuple):
    """One measurement."""

    pps: float
    """Frames that arrived, a second."""
    processor_s: float
    """Processor time of the measured process, a frame, its system calls included."""
    offered_pps: float
    """Frames that the sender got rid of, a second: no more than these can arrive."""

    @staticmethod
    def summary(runs: Sequence[Run]) -> dict[str, Any]:
        """Of repeated measurements."""
        return {
            **spread([run.pps for run in runs]),
            "unit": f"frames of {programs.FRAME_BYTES} bytes out a second",
            "offered_pps": round(statistics.median(run.offered_pps for run in runs)),
            "processor_ns_a_frame": round(statistics.median(r.processor_s for r in runs) * 1e9),
        }


def offered(
    sink: socket.socket,
    frames: Sequence[bytes],
    count: Callable[[], int],
    processors: Processors,
    watched: Started,
    pps: float = 0.0,
    joined: int = 1,
) -> Run:
    """Send into `sink`, and count meanwhile what arrives."""
    with traffic.Sender(sink, frames, pps, processors.sender, joined) as sender:
        time.sleep(_WARM_UP_S)
        busy_s, sent = watched.processor_time_s(), sender.sent
        before, start_s = count(), time.monotonic()
        time.sleep(WINDOW_S)
        after, end_s = count(), time.monotonic()
        busy_s, sent = watched.processor_time_s() - busy_s, sender.sent - sent
    # What is still queued must not be counted with the next.
    time.sleep(_SETTLE_S)
    took_s, arrived = end_s - start_s, after - before
    return Run(arrived / took_s, busy_s / max(1, arrived), sent * joined / took_s)


# --- UDP tunnels ----------------------------------------------------------------------------------


def free_udp_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(count)]
        for endpoint in made:
            endpoint.bind(("127.0.0.1", 0))
        return [int(endpoint.getsockname()[1]) for endpoint in made]


def measure_tunnels(report: dict[str, Any], repeats: int) -> None:
    """Frames from tunnel to tunnel through the switch process, on the loopback."""
    processors = Processors.of_this_machine()
    ours, theirs, sink_port = free_udp_ports(2), free_udp_ports(1)[0], 0
    setup = programs.kvcast()
    frames = [frame for _, frame in programs.ordinary(4 * JOINED)]
    with socket.socket(type=socket.SOCK_DGRAM) as sink:
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        sink.bind(("127.0.0.1", 0))
        sink_port = sink.getsockname()[1]
        ports = [
            f"1=udp:127.0.0.1:{ours[0]}:127.0.0.1:{theirs}",
            f"2=udp:127.0.0.1:{ours[1]}:127.0.0.1:{sink_port}",
        ]
        with started(switch_command(ports), processors.switch) as switch:
            address = switch.ready()["grpc"]
            asyncio.run(program_switch(address, setup))
            with socket.socket(type=socket.SOCK_DGRAM) as source:
                source.bind(("127.0.0.1", theirs))
                source.connect(("127.0.0.1", ours[0]))
                sink.settimeout(5)
                for frame in frames[:_CHECKED_FRAMES]:
                    source.send(frame)
                    if sink.recv(20_000) != frame:
                        raise BenchError("udp: a frame came out changed")
                with traffic.Counter(sink, processors.sender) as counter:

                    def arrived() -> int:
                        return counter.received // programs.FRAME_BYTES

                    for name, joined in (("udp_tunnel", 1), ("udp_tunnel_joined", JOINED)):
                        runs = [
                            offered(source, frames, arrived, processors, switch, joined=joined)
                            for _ in range(repeats)
                        ]
                        report[name] = Run.summary(runs)
                        report[f"{name}_pps"] = report[name]["median"]
                    half = report["udp_tunnel_pps"] / 2
                    source.setsockopt(traffic.SOL_UDP, traffic.UDP_SEGMENT, 0)
                    report["table_writes"] = _writes_under_load(
                        address, source, frames, half, counter, processors
                    )


def _writes_under_load(
    address: str,
    source: socket.socket,
    frames: Sequence[bytes],
    pps: float,
    counter: traffic.Counter,
    processors: Processors,
) -> dict[str, Any]:
    """Frames at half of what the switch can forward, first alone, then while a controller inserts
    and deletes entries as fast as the switch takes them: what is lost, and how many it takes."""
    report: dict[str, Any] = {"offered_pps": round(pps), "unit": "updates a second"}
    time.sleep(0.5)  # what the measurements before have left behind
    for name in ("without", "with"):
        before = counter.received
        with traffic.Sender(source, frames, pps, processors.sender) as sender:
            if name == "with":
                report["updates_per_s"] = round(asyncio.run(_write_storm(address)))
            else:
                time.sleep(_STORM_S)
        time.sleep(0.3)
        arrived = (counter.received - before) // programs.FRAME_BYTES
        report[f"sent_{name}_writes"] = sender.sent
        report[f"lost_{name}_writes"] = sender.sent - arrived
    return report


async def _write_storm(address: str) -> float:
    """Insert and delete entries of l2_forward in batches for a while; updates a second."""
    async with _connected(address, fy.SwitchOptions(programs.kvcast().p4info)) as client:
        # Written out beforehand: it is not the client's speed that is asked for.
        requests = [
            programs.write_request(client, verb, _STORM_BATCH).SerializeToString()
            for verb in (Verb.INSERT, Verb.DELETE)
        ]
        async with grpc.aio.insecure_channel(address) as channel:
            write: Any = channel.unary_unary("/p4.v1.P4Runtime/Write")
            updates, start_s = 0, time.monotonic()
            while time.monotonic() - start_s < _STORM_S:
                for request in requests:
                    await write(request)
                    updates += _STORM_BATCH
            return updates / (time.monotonic() - start_s)


# --- veth -----------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """Somebody between two links of his own: frames go into g1 and come out of g2."""

    name: str
    process: Started
    source: str
    sink: str
    inputs: list[Arrival]
    setup: Setup | None
    offers: Sequence[float] = (0.0,)
    may_fail: bool = False
    """Without it the others are compared all the same."""

    def expected(self) -> list[bytes]:
        """What the checked frames must become."""
        frames = self.inputs[:_CHECKED_FRAMES]
        if self.setup is None:
            return [frame for _, frame in frames]
        reference = Switch()
        programs.load(reference, self.setup)
        return [out for port, f in frames for _, out in reference.process(port, f, NOW_US)]


def received(interface: str) -> int:
    """Frames that an interface has received, in this process's namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == interface:
            return int(counts.split()[1])
    raise BenchError(f"there is no interface {interface}")


def _ip(*arguments: str) -> None:
    ran = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise BenchError(f"ip {' '.join(arguments)}: {ran.stderr.strip()}")


def _link(name: str) -> None:
    """A pair gNAME - sNAME, both up, without offloads and without IPv6's own frames."""
    _ip("link", "add", f"g{name}", "type", "veth", "peer", "name", f"s{name}")
    for interface in (f"g{name}", f"s{name}"):
        _ip("link", "set", interface, "up")


def _exchange(candidate: Candidate) -> None:
    """Frames one by one: each must come out as expected."""
    with contextlib.ExitStack() as stack:
        source, sink = (
            stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
            for _ in range(2)
        )
        source.bind((candidate.source, 0))
        sink.setsockopt(263, _IGNORE_OUTGOING, 1)
        sink.bind((candidate.sink, 3))  # ETH_P_ALL
        sink.settimeout(5)
        for (_, frame), wanted in zip(candidate.inputs, candidate.expected(), strict=False):
            source.send(frame)
            try:
                got = sink.recv(20_000)
            except TimeoutError:
                raise BenchError(f"{candidate.name}: a frame did not come out") from None
            if got != wanted:
                raise BenchError(f"{candidate.name}: a frame came out wrong")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Field:
    """The candidates, standing ready in this process's own network namespace."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self.processors = Processors.of_this_machine()
        self.candidates: list[Candidate] = []
        self.found: dict[str, list[Run]] = {}
        self.skipped: dict[str, str] = {}

    def _links(self, name: str) -> tuple[str, str]:
        for end in ("1", "2"):
            _link(name + end)
        return f"s{name}1", f"s{name}2"

    def _enter(
        self,
        name: str,
        command: Sequence[str],
        links: tuple[str, str],
        inputs: list[Arrival],
        setup: Setup | None,
        *,
        peer: bool = False,
        offers: Sequence[float] = (0.0,),
    ) -> Candidate:
        where = self.processors.all if peer else self.processors.switch
        made = self._stack.enter_context(started(command, where, tells_on_stdout=not peer))
        source, sink = (f"g{link[1:]}" for link in links)
        candidate = Candidate(name, made, source, sink, inputs, setup, offers)
        self.candidates.append(candidate)
        return candidate

    def bare(self) -> None:
        links = self._links("a")
        command = [sys.executable, "-m", "kvcast.bench.traffic", *links]
        self._enter("bare", command, links, programs.ordinary(), None).process.ready()

    def switchsim(self, setup: Setup, inputs: list[Arrival], letter: str) -> None:
        links = self._links(letter)
        ports = [f"{number}=if:{link}" for number, link in enumerate(links, start=1)]
        candidate = self._enter(setup.name, switch_command(ports), links, inputs, setup)
        asyncio.run(program_switch(candidate.process.ready()["grpc"], setup))

    def bmv2(self, program: str, setup: Setup, inputs: list[Arrival], letter: str) -> None:
        links = self._links(letter)
        ports = [f for n, link in enumerate(links, start=1) for f in ("-i", f"{n}@{link}")]
        # The namespace is this bench's own, and so are all of its ports.
        grpc_port = 50051 + len(self.candidates)
        # Each instance opens a Thrift server and a notification socket as well, if it can.
        aside = {
            "--thrift-port": str(9090 + len(self.candidates)),
            "--notifications-addr": f"ipc://{self._folder / f'notes-{letter}'}",
        }
        known = bmv2_help(program)
        command = [
            *(program, "--no-p4", "--device-id", "1", *ports),
            *(word for pair in aside.items() if pair[0] in known for word in pair),
            *("--", "--grpc-server-addr", f"127.0.0.1:{grpc_port}", "--cpu-port", "255"),
        ]
        name = f"bmv2_{setup.name}"
        candidate = self._enter(name, command, links, inputs, setup, peer=True, offers=_BMV2_OFFERS)
        candidate.process.wait_until(lambda: _listens(grpc_port))
        asyncio.run(program_switch(f"127.0.0.1:{grpc_port}", setup))

    def attempt(self, name: str, enter: Callable[[], None]) -> None:
        """Have somebody enter who may be missing: whoever cannot is skipped, with the reason."""
        before = len(self.candidates)
        try:
            enter()
        except Exception as error:  # of a peer, it may be anything
            self.skipped[name] = _reason(error, self.candidates[before:])
            del self.candidates[before:]
        for candidate in self.candidates[before:]:
            candidate.may_fail = True

    def measure(self, repeats: int) -> None:
        """All candidates in turns; who may fail and does is skipped."""
        for step in (_exchange, *[self._measure] * repeats):
            for candidate in list(self.candidates):
                try:
                    step(candidate)
                except BenchError as error:
                    if not candidate.may_fail:
                        raise
                    self.skipped[candidate.name] = _reason(error, [candidate])
                    self.candidates.remove(candidate)
                    self.found.pop(candidate.name, None)

    def _measure(self, candidate: Candidate) -> None:
        """Of several offers, the best."""
        best = max(self._runs(candidate))
        if candidate.process.process.poll() is not None:
            raise BenchError(f"{candidate.name} ended while it was measured")
        self.found.setdefault(candidate.name, []).append(best)

    def _runs(self, candidate: Candidate) -> Iterator[Run]:
        frames = [frame for _, frame in candidate.inputs]
        with traffic.interface_socket(candidate.source, receive=False) as sink:
            for pps in candidate.offers:
                yield offered(
                    sink,
                    frames,
                    lambda: received(candidate.sink),
                    self.processors,
                    candidate.process,
                    pps,
                )


def _reason(error: Exception, whose: Sequence[Candidate]) -> str:
    """Why somebody is skipped: the error, and if the process has ended, what it said at last."""
    text = reports.why(error)
    ended = [c.process.failure() for c in whose if c.process.process.poll() is not None]
    return "; ".join([text, *(said for said in ended if said != text)])


def measure_veth(report: dict[str, Any], repeats: int) -> None:
    """The comparison on veth; this process must be in a network namespace of its own."""
    _ip("link", "set", "lo", "up")
    for which in ("all", "default"):
        Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")
    bmv2 = find_simple_switch()
    kvcast, router = programs.kvcast(), programs.router()
    ordinary, routed = programs.ordinary(), programs.routed()
    with tempfile.TemporaryDirectory(prefix="kvcast-bench-") as folder, contextlib.ExitStack() as s:
        field = Field(s, Path(folder))
        report["skipped"] = field.skipped
        field.bare()
        field.switchsim(kvcast, ordinary, "b")
        field.switchsim(router, routed, "c")
        if bmv2 is not None:
            on_bmv2 = programs.kvcast("bmv2")
            field.attempt("bmv2_kvcast", lambda: field.bmv2(bmv2, on_bmv2, ordinary, "d"))
            field.attempt("bmv2_l3", lambda: field.bmv2(bmv2, router, routed, "e"))
        try:
            field.measure(repeats)
        finally:
            whole = min(len(field.found.get(c.name, [])) for c in field.candidates)
            if whole:
                report |= _veth_report({name: runs[:whole] for name, runs in field.found.items()})


def _veth_report(found: dict[str, list[Run]]) -> dict[str, Any]:
    rates = {name: [run.pps for run in runs] for name, runs in found.items()}
    median = {name: statistics.median(values) for name, values in rates.items()}

    def over(name: str, other: str) -> float | None:
        """The median of the ratios of neighbouring measurements."""
        if other not in rates:
            return None
        pairs = zip(rates[name], rates[other], strict=True)
        return round(statistics.median(a / b if b else 0.0 for a, b in pairs), 3)

    report: dict[str, Any] = {
        "veth_pps": round(median["kvcast"]),
        "veth_over_bare_forwarder": over("kvcast", "bare"),
        "veth_over_bmv2": over("kvcast", "bmv2_kvcast"),
        "veth_l3_pps": round(median["l3"]),
        "veth_l3_over_bare_forwarder": over("l3", "bare"),
        "veth_l3_over_bmv2": over("l3", "bmv2_l3"),
        "veth_bare_forwarder_pps": round(median["bare"]),
    }
    for name in ("bmv2_kvcast", "bmv2_l3"):
        if name in median:
            report[f"veth_{name}_pps"] = round(median[name])
    report["veth"] = {name: Run.summary(runs) for name, runs in found.items()}
    # Where one processor both sends and takes over what the kernel does on delivery, the sender
    # may be the limit; the processor time that a frame costs the forwarder itself is not.
    costs = {name: one["processor_ns_a_frame"] for name, one in report["veth"].items()}
    report["veth_processor_time_bare_over_kvcast"] = ratio(costs["bare"], costs["kvcast"])
    return report


def bmv2_help(program: str) -> str:
    """The flags that this BMv2 was built with, as it explains them."""
    try:
        ran = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"{program} --help: {error}") from error
    return ran.stdout + ran.stderr


def _veth_in_a_namespace(report: dict[str, Any], repeats: int) -> None:
    """Run the veth part in a child with a network namespace that ends with it."""
    command = [sys.executable, "-m", "kvcast.bench.switch", "--inside", "--repeats", str(repeats)]
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            said, _ = child.communicate()
        except KeyboardInterrupt:
            child.terminate()  # it ends whom it has started, and tells what it has
            said, _ = child.communicate()
            raise
        finally:
            part = json.loads(said) if said else {"incomplete": f"ended with {child.returncode}"}
            report["skipped"] |= part.pop("skipped", {})
            failed = part.pop("incomplete", None)
            report |= part
    if failed:
        raise BenchError(failed)


def _inside(repeats: int) -> int:
    """What the child does: its part of the report on standard output, whole or not."""
    report: dict[str, Any] = {}
    try:
        _enter_namespace()
        measure_veth(report, repeats)
    except (Exception, KeyboardInterrupt) as error:
        report["incomplete"] = reports.why(error)
    print(json.dumps(report))
    return 1 if "incomplete" in report else 0


def _enter_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise BenchError(f"no network namespace: {os.strerror(ctypes.get_errno())}")


# --- the whole ------------------------------------------------------------------------------------


def run(
    *,
    repeats: int = REPEATS,
    memory_seconds: float = MEMORY_SECONDS,
    quiet: bool = True,
    report: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All parts, into `report`; what cannot be measured here is named under "skipped", and where
    a part fails, "incomplete" says why."""
    start_s = time.monotonic()
    report = {} if report is None else report
    skipped: dict[str, str] = {}
    report |= {
        "bench": "switch",
        "provenance": provenance.provenance(),
        "load_before": os.getloadavg(),
        "engine": "llvm",
        "skipped": skipped,
    }
    parts: dict[str, Callable[[dict[str, Any]], None]] = {
        "in memory": lambda report: measure_memory(report, memory_seconds, repeats),
        "UDP tunnels": lambda report: measure_tunnels(report, repeats),
    }
    if os.geteuid() != 0:
        skipped["veth"] = "needs root (network namespaces, AF_PACKET)"
    elif shutil.which("ip") is None:
        skipped["veth"] = "needs the ip command (iproute2)"
    else:
        parts["veth"] = lambda report: _veth_in_a_namespace(report, repeats)
        if find_simple_switch() is None:
            skipped["bmv2"] = "no simple_switch_grpc (PATH or KVCAST_SIMPLE_SWITCH_GRPC)"
    failed = []
    for name, measure in parts.items():
        if not quiet:
            print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            measure(report)
        except Exception as error:  # whatever it is, the other parts can be measured
            failed.append(f"{name}: {reports.why(error)}")
    if failed:
        report["incomplete"] = "; ".join(failed)
    report["load_after"] = os.getloadavg()
    report["seconds"] = round(time.monotonic() - start_s, 1)
    return report


def table(report: dict[str, Any]) -> str:
    """The rates as text, one a line."""
    lines = []
    for name, value in report.items():
        if name.endswith("_pps"):
            lines.append(f"{name:36}{value:>14,} frames/s")
        elif "_over_" in name and value is not None:
            lines.append(f"{name:36}{value:>14.2f} x")
    if "table_writes" in report:
        writes = report["table_writes"]
        lines.append(
            f"table writes while forwarding {writes['offered_pps']:,} frames/s: "
            f"{writes['updates_per_s']:,} updates/s; of {writes['sent_with_writes']:,} frames lost "
            f"{writes['lost_with_writes']:,} (without writes {writes['lost_without_writes']:,})"
        )
    lines += [f"skipped: {name}: {reason}" for name, reason in report["skipped"].items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.switch",
        description="Frames a second: in memory, through UDP tunnels, veth to veth.",
    )
    reports.add_json(parser)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="measurements of each")
    parser.add_argument(
        "--memory-seconds", type=float, default=MEMORY_SECONDS, help="length of each in memory"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1:
        parser.error("measure at least once")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.inside:
        return _inside(arguments.repeats)
    try:
        with reports.in_the_making(arguments.json) as so_far:
            report = run(
                repeats=arguments.repeats,
                memory_seconds=arguments.memory_seconds,
                quiet=False,
                report=so_far,
            )
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    reports.report_to(arguments.json, report, lambda measured: print(table(measured)))
    if "incomplete" in report:
        print(f"error: {report['incomplete']}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
