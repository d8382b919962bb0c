"""`kvcast switch`: a software switch as a process.

Owns: the command line, the gRPC server's address and credentials, the order of start and stop,
and the statistics file. Must not know: P4Runtime messages, packets. It puts together the ports,
the packet loop and the P4Runtime service, and runs them on one event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from finsy.proto import p4i, p4r_grpc
from google.protobuf import text_format
from kvcast.service.options import (
    HelpFormatter,
    add_common_options,
    announce_ready,
    is_loopback,
    parse_host_port,
    parse_with_config,
    setup_logging,
    stop_event,
)
from kvcast.service.tls import TlsError, TlsFiles
from kvcast.switchsim import bmv2_flags
from kvcast.switchsim.engine import Engine, EngineName
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.loop.compiled import NativePacketLoop
from kvcast.switchsim.loop.interpreted import PacketLoop
from kvcast.switchsim.p4runtime.errors import P4RuntimeError
from kvcast.switchsim.p4runtime.service import MAX_REQUEST_BYTES, P4RuntimeService
from kvcast.switchsim.p4runtime.tls import CertificateFiles
from kvcast.switchsim.ports.drops import DropLog
from kvcast.switchsim.ports.in_process import InProcessPort
from kvcast.switchsim.ports.port import (
    DEFAULT_QUANTUM_S,
    DEFAULT_QUEUE_DEPTH,
    Port,
    PortError,
    PortOptions,
)
from kvcast.switchsim.ports.spec import PortSpec, parse_port
from kvcast.switchsim.reference.switch import Switch

log = logging.getLogger("kvcast.switchsim.daemon")

DEFAULT_ENGINE: EngineName = "llvm"

STATS_INTERVAL_S = 1.0
# How long RPCs in progress may take once the process is told to stop.
GRACE_S = 1.0
MAX_PORT = 511  # bit<9>
# RPCs in progress, streams included; gRPC refuses more with RESOURCE_EXHAUSTED.
MAX_RPCS = 128
# How often a silent controller is asked whether it lives, and how long it has to answer.
KEEPALIVE_MS = 5000

DESCRIPTION = """\
Run a software switch: frames come and go through its ports, a P4Runtime controller
(kvcast controller, finsy, p4runtime-shell) gives it a program and fills its tables.

The program is p4c's output for BMv2's simple_switch (--arch v1model): JSON and P4Info.

Ports (--port, once for each):
  N=udp:LOCALIP:LPORT:PEERIP:PPORT  one UDP datagram is one Ethernet frame; no privilege needed
  N=udp:LOCALIP:LPORT               the same; the peer is whoever on this machine sends first
  N=if:NAME                         a network interface, e.g. one end of a veth pair; needs root
"""

EPILOG = """\
examples:
  A switch with two tunnels, waiting for a controller on 127.0.0.1:9559:
    kvcast switch --port 1=udp:127.0.0.1:7001:127.0.0.1:8001 \\
                  --port 2=udp:127.0.0.1:7002:127.0.0.1:8002
  Two veth ends (root), a program loaded at the start, BMv2's limits:
    kvcast switch --port 1=if:veth1 --port 2=if:veth2 --strict \\
                  --program kvcast.json --p4info kvcast.p4info.txtpb
  In the place of BMv2, with simple_switch_grpc's own flags (also kvcast-simple-switch-grpc):
    kvcast switch -i 1@s1-eth1 -i 2@s1-eth2 --no-p4 -- --grpc-server-addr 127.0.0.1:50051
  A bad network: one frame in a hundred lost at each port and direction, 100 Mb/s a port:
    kvcast switch --loss 0.01 --seed 7 --port-rate 100e6 --port 1=udp:127.0.0.1:7001

When it serves, it prints one line of JSON on standard output: {"event": "ready", "grpc":
"127.0.0.1:9559", ...}. SIGTERM or SIGINT stops it.
"""


class DaemonError(Exception):
    """The switch cannot start; the message says why."""


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Everything that `kvcast switch` can be told."""

    grpc_host: str = "127.0.0.1"
    grpc_port: int = 9559
    """0 = any free port; the ready line says which."""
    device_id: int = 1
    ports: tuple[PortSpec, ...] = ()
    cpu_port: int | None = 255
    """Port of packet-in and packet-out; None = neither."""
    drop_port: int = 511
    strict: bool = False
    """Refuse what BMv2's P4Runtime server does not implement."""
    program: Path | None = None
    p4info: Path | None = None
    engine: EngineName = DEFAULT_ENGINE
    """llvm: the program and the packet loop in machine code; reference: in Python."""
    loss: float = 0.0
    seed: int = 0
    port_rate_bits_per_s: float | None = None
    port_quantum_s: float = DEFAULT_QUANTUM_S
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    stats_json: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    insecure: bool = False
    """Allow an address other than loopback without mutual TLS."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcast switch",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--engine",
        choices=("llvm", "reference"),
        default=DEFAULT_ENGINE,
        help="llvm runs the program as machine code, reference interprets it, plainly and slowly",
    )
    ports = parser.add_argument_group("ports")
    ports.add_argument(
        "--port", action="append", metavar="N=SPEC", help="a port; may be repeated (see above)"
    )
    ports.add_argument(
        "--cpu-port",
        type=int,
        default=255,
        metavar="N",
        help="port number of the controller (packet-in, packet-out); 0 = none",
    )
    ports.add_argument(
        "--drop-port", type=int, default=511, metavar="N", help="egress_spec that means drop"
    )
    ports.add_argument(
        "--queue-depth",
        type=int,
        default=DEFAULT_QUEUE_DEPTH,
        metavar="FRAMES",
        help="frames that wait at a port before new ones are dropped",
    )
    ports.add_argument(
        "--port-rate",
        type=float,
        metavar="BITS/S",
        help="most that each port sends; unlimited if left out",
    )
    ports.add_argument(
        "--port-quantum",
        type=float,
        default=DEFAULT_QUANTUM_S,
        metavar="SECONDS",
        help="how late frames may leave at --port-rate, to leave several at once (llvm engine)",
    )
    ports.add_argument(
        "--loss",
        type=float,
        default=0.0,
        metavar="P",
        help="probability with which each port drops a frame, each way",
    )
    ports.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of losses and of P4's random()"
    )
    control = parser.add_argument_group("control plane")
    control.add_argument(
        "--grpc-addr", default="127.0.0.1:9559", metavar="HOST:PORT", help="where P4Runtime listens"
    )
    control.add_argument(
        "--device-id", type=int, default=1, metavar="N", help="P4Runtime device id"
    )
    control.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="refuse what BMv2's P4Runtime does not implement (registers, atomic batches, ...)",
    )
    control.add_argument("--program", metavar="FILE", help="BMv2 JSON to start with")
    control.add_argument(
        "--p4info",
        metavar="FILE",
        help="P4Info (text) of --program; without it frames are switched, and P4Runtime waits for "
        "a controller to push a pipeline",
    )
    control.add_argument(
        "--tls",
        metavar="DIR",
        help="folder with the server's cert.pem, key.pem and ca.pem, as `kvcast certs init` makes "
        "it; new files are taken into use without a restart",
    )
    control.add_argument(
        "--tls-cert", metavar="PEM", help="the server's certificate chain, where not in --tls DIR"
    )
    control.add_argument("--tls-key", metavar="PEM", help="the server's private key")
    control.add_argument(
        "--tls-ca", metavar="PEM", help="controllers must show a certificate of this authority"
    )
    control.add_argument(
        "--insecure",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="allow an address other than loopback without mutual TLS",
    )
    control.add_argument(
        "--stats-json", metavar="FILE", help="file rewritten every second with all counters"
    )
    add_common_options(parser)
    return parser


def options_from(arguments: argparse.Namespace) -> DaemonOptions:
    """Checked options; DaemonError says which one is wrong."""
    try:
        host, port = parse_host_port(arguments.grpc_addr)
        ports = tuple(parse_port(text, max_port=MAX_PORT) for text in arguments.port or ())
    except (PortError, argparse.ArgumentTypeError) as error:
        raise DaemonError(str(error)) from error
    cpu_port = arguments.cpu_port or None
    numbers = [spec.number for spec in ports]
    repeated = sorted({number for number in numbers if numbers.count(number) > 1})
    if repeated:
        raise DaemonError(f"port {repeated[0]} is given twice")
    for what, number in (("CPU", cpu_port), ("drop", arguments.drop_port)):
        if number is not None and not 0 < number <= MAX_PORT:
            raise DaemonError(f"the {what} port must be 1 to {MAX_PORT}, not {number}")
        if number in numbers:
            raise DaemonError(f"port {number} is the {what} port")
    if cpu_port == arguments.drop_port:
        raise DaemonError("the CPU port and the drop port are the same")
    if arguments.device_id < 0 or arguments.device_id >= 1 << 64:
        raise DaemonError("the device id must fit 64 bits")
    if arguments.p4info is not None and arguments.program is None:
        raise DaemonError("--p4info needs --program")
    if arguments.tls is not None:
        if arguments.tls_cert or arguments.tls_key or arguments.tls_ca:
            raise DaemonError(
                "--tls names a folder of all three files that --tls-... name one by one"
            )
        try:
            files = TlsFiles.of_folder(arguments.tls)
        except TlsError as error:
            raise DaemonError(f"--tls {error}") from error
        arguments.tls_cert, arguments.tls_key = str(files.cert), str(files.key)
        arguments.tls_ca = str(files.ca)
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise DaemonError("--tls-cert and --tls-key go together")
    if arguments.tls_ca is not None and arguments.tls_cert is None:
        raise DaemonError("--tls-ca needs --tls-cert and --tls-key")
    if arguments.tls_ca is None and not arguments.insecure and not is_loopback(host):
        raise DaemonError(
            f"P4Runtime on {host} would be open to everybody: give --tls DIR (kvcast certs init "
            "makes it), or --tls-cert, --tls-key and --tls-ca, or --insecure"
        )
    options = DaemonOptions(
        grpc_host=host,
        grpc_port=port,
        device_id=arguments.device_id,
        ports=ports,
        cpu_port=cpu_port,
        drop_port=arguments.drop_port,
        strict=arguments.strict,
        program=_path(arguments.program),
        p4info=_path(arguments.p4info),
        engine=arguments.engine,
        loss=arguments.loss,
        seed=arguments.seed,
        port_rate_bits_per_s=arguments.port_rate,
        port_quantum_s=arguments.port_quantum,
        queue_depth=arguments.queue_depth,
        stats_json=_path(arguments.stats_json),
        tls_cert=_path(arguments.tls_cert),
        tls_key=_path(arguments.tls_key),
        tls_ca=_path(arguments.tls_ca),
        insecure=arguments.insecure,
    )
    try:
        port_options(options)
    except PortError as error:
        raise DaemonError(str(error)) from error
    return options


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def port_options(options: DaemonOptions) -> PortOptions:
    """What all ports have in common; PortError for values out of range."""
    return PortOptions(
        queue_depth=options.queue_depth,
        loss=options.loss,
        seed=options.seed,
        rate_bits_per_s=options.port_rate_bits_per_s,
        quantum_s=options.port_quantum_s,
    )


def _compiled(*, cpu_port: int | None, drop_port: int, seed: int) -> CompiledSwitch:
    """An engine whose memory does not grow as packets touch it."""
    return CompiledSwitch(cpu_port=cpu_port, drop_port=drop_port, seed=seed, populate=True)


class Daemon:
    """One running switch: ports, loop, service and server, started and stopped together."""

    def __init__(self, options: DaemonOptions) -> None:
        self.options = options
        self.ports: list[Port] = []
        self.grpc_port = 0
        self._start_ns = time.monotonic_ns()
        self.loop: PacketLoop | NativePacketLoop | None = None
        self._cpu: InProcessPort | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._started_s = time.time()
        self._drops = DropLog()

    async def start(self) -> None:
        """Open everything; DaemonError says what failed, with nothing left open."""
        options = self.options
        self.service = P4RuntimeService(
            device_id=options.device_id,
            cpu_port=options.cpu_port,
            drop_port=options.drop_port,
            packet_out=self._packet_out,
            strict=options.strict,
            seed=options.seed,
            now_us=self._now_us,
            new_switch=_compiled if options.engine == "llvm" else Switch,
            adopt=self._adopt,
            pause=self._pause,
        )
        if options.program is not None:
            self._preload()
        self.server = grpc.aio.server(
            maximum_concurrent_rpcs=MAX_RPCS,
            options=[
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                # Without this, a second switch could bind the same port and share its calls.
                ("grpc.so_reuseport", 0),
                # A primary whose machine died must not stay primary until TCP gives up.
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
            ],
        )
        p4r_grpc.add_P4RuntimeServicer_to_server(self.service, self.server)
        try:
            for spec in options.ports:
                self.ports.append(spec.open(port_options(options)))
            if options.cpu_port is not None:
                self._cpu = InProcessPort(
                    options.cpu_port,
                    PortOptions(queue_depth=options.queue_depth),
                    on_transmit=self.service.packet_in,
                )
                self.ports.append(self._cpu)
            self.grpc_port = self._listen()
            self.loop = self._make_loop()
            self._adopt(self.service.switch)
            if options.stats_json is not None:
                self._store_stats(options.stats_json)
            await self.server.start()
        except (DaemonError, PortError, OSError, RuntimeError) as error:
            if self.loop is not None:
                self.loop.close()
            for port in self.ports:
                port.close()
            await self.server.stop(None)
            raise DaemonError(str(error)) from error
        self._tasks = [
            asyncio.create_task(self.loop.run(), name="packets"),
            asyncio.create_task(self.service.run_timers(), name="timers"),
            asyncio.create_task(self._watch_drops(), name="drops"),
        ]
        if options.stats_json is not None:
            self._tasks.append(asyncio.create_task(self._write_stats(options.stats_json)))

    def _make_loop(self) -> PacketLoop | NativePacketLoop:
        if self.options.engine == "reference":
            return PacketLoop(
                self.ports, self.service.process, self.service.after_frame, self._now_us
            )
        return NativePacketLoop(
            self.ports,
            cpu_port=self.options.cpu_port,
            packet_in=self.service.packet_in,
            after_frames=self.service.after_frame,
            clock_base_ns=self._start_ns,
            queue_depth=self.options.queue_depth,
        )

    def _adopt(self, switch: Engine) -> None:
        """The service has a new switch: the compiled loop must run it from now on."""
        if isinstance(self.loop, NativePacketLoop):
            assert isinstance(switch, CompiledSwitch)
            self.loop.use(None if switch.program is None else switch.native_entry)

    def _pause(self) -> AbstractContextManager[None]:
        """While this is entered, no frame is processed."""
        if isinstance(self.loop, NativePacketLoop):
            return self.loop.paused()
        return contextlib.nullcontext()  # one thread runs everything

    async def wait(self) -> None:
        """Until a part of the switch ends, which it should not: its exception is raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """End the RPCs, the loop and the ports, in that order."""
        await self.server.stop(GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.options.stats_json is not None:
            with contextlib.suppress(OSError):
                self._store_stats(self.options.stats_json)
        assert self.loop is not None
        for port in self.ports:
            self._drops.total(self._name(port), self.loop.read_counters(port))
        self.loop.close()
        for port in self.ports:
            port.close()

    def _name(self, port: Port) -> str:
        return f"{port.number} ({'cpu' if port is self._cpu else port.describe()})"

    async def _watch_drops(self) -> None:
        while self.loop is not None:
            for port in self.ports:
                self._drops.note(self._name(port), self.loop.read_counters(port))
            await asyncio.sleep(STATS_INTERVAL_S)

    @property
    def grpc_address(self) -> str:
        host = self.options.grpc_host
        return f"[{host}]:{self.grpc_port}" if ":" in host else f"{host}:{self.grpc_port}"

    def facts(self) -> dict[str, Any]:
        """What the ready line says."""
        return {
            "grpc": self.grpc_address,
            "device_id": self.options.device_id,
            "engine": self.options.engine,
            "strict": self.options.strict,
            "ports": {
                str(port.number): port.describe() for port in self.ports if port is not self._cpu
            },
            "cpu_port": self.options.cpu_port,
            "pipeline": self.service.has_pipeline,
        }

    def stats(self) -> dict[str, Any]:
        """Every counter of the switch, as the statistics file has it."""
        loop = self.loop
        assert loop is not None
        switch = self.service.switch_stats()
        switch["dropped_unknown_port"] = loop.counters.no_such_port
        if isinstance(loop, NativePacketLoop):
            # Without a program, the compiled loop has nothing to call that would count.
            switch["frames_in"] += loop.no_program
            switch["dropped_no_program"] += loop.no_program
        return {
            "time_s": time.time(),
            "uptime_s": time.time() - self._started_s,
            "device_id": self.options.device_id,
            "pipeline": self.service.has_pipeline,
            "controllers": self.service.controllers,
            "engine": self.options.engine,
            "loop": {**asdict(loop.counters), "backlog": loop.backlog()},
            "ports": {
                str(port.number): {
                    "kind": "cpu" if port is self._cpu else port.kind,
                    **loop.read_counters(port),
                    "ingress_backlog": loop.ingress_backlog(port),
                    "egress_backlog": loop.egress_backlog(port),
                }
                for port in self.ports
            },
            "p4runtime": self.service.counters.as_dict(),
            "switch": switch,
        }

    def _now_us(self) -> int:
        """The switch's clock: microseconds since it was made."""
        return (time.monotonic_ns() - self._start_ns) // 1000

    def _packet_out(self, frame: bytes) -> bool:
        if self._cpu is None or self.loop is None:
            return False
        return self.loop.packet_out(self._cpu, frame)

    def _preload(self) -> None:
        program, p4info_path = self.options.program, self.options.p4info
        assert program is not None
        p4info = p4i.P4Info()
        try:
            if p4info_path is not None:
                text_format.Parse(p4info_path.read_text(encoding="utf-8"), p4info)
            self.service.load(p4info, program.read_bytes())
        except OSError as error:
            raise DaemonError(f"{error.filename}: {error.strerror}") from error
        except (text_format.ParseError, UnicodeDecodeError) as error:
            raise DaemonError(f"{p4info_path}: not a P4Info in text form: {error}") from error
        except P4RuntimeError as error:
            raise DaemonError(f"{program}: {error}") from error

    def _listen(self) -> int:
        options = self.options
        host = f"[{options.grpc_host}]" if ":" in options.grpc_host else options.grpc_host
        address = f"{host}:{options.grpc_port}"
        if options.tls_cert is None:
            port = self.server.add_insecure_port(address)
        else:
            assert options.tls_key is not None
            files = CertificateFiles(options.tls_cert, options.tls_key, options.tls_ca)
            port = self.server.add_secure_port(address, files.credentials())
        if port == 0:
            raise DaemonError(f"cannot listen on {address}")
        return int(port)

    async def _write_stats(self, path: Path) -> None:
        while True:
            await asyncio.sleep(STATS_INTERVAL_S)
            try:
                self._store_stats(path)
            except OSError as error:
                log.warning("statistics not written", extra={"file": str(path), "error": error})

    def _store_stats(self, path: Path) -> None:
        """Readers see the old file or the new one, never a part."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.stats()) + "\n", encoding="utf-8")
        os.replace(temporary, path)


async def run(options: DaemonOptions) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    stop = stop_event(asyncio.get_running_loop())
    daemon = Daemon(options)
    try:
        await daemon.start()
    except DaemonError as error:
        log.error("cannot start: %s", error)
        return 1
    announce_ready(**daemon.facts())
    log.info("serving", extra={"grpc": daemon.grpc_address, "ports": len(options.ports)})
    stopped = asyncio.create_task(stop.wait())
    failed = asyncio.create_task(daemon.wait())
    try:
        await asyncio.wait([stopped, failed], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        stopped.cancel()
        failed.cancel()
        await daemon.stop()
    log.info("stopped")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `kvcast switch`; returns the exit status. simple_switch_grpc's command line
    is understood too."""
    words = list(sys.argv[1:] if argv is None else argv)
    if bmv2_flags.looks_like_bmv2(words):
        return bmv2_main(words)
    return _main(words, None)


def bmv2_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `kvcast-simple-switch-grpc`, which stands in for simple_switch_grpc."""
    try:
        translation = bmv2_flags.translate(sys.argv[1:] if argv is None else argv)
    except bmv2_flags.Bmv2FlagsError as error:
        bmv2_flags.build_parser().print_usage(sys.stderr)
        print(f"kvcast-simple-switch-grpc: error: {error}", file=sys.stderr)
        return 2
    return _main(translation.argv, translation)


def _main(words: list[str], translation: bmv2_flags.Translation | None) -> int:
    parser = build_parser()
    arguments = parse_with_config(parser, words)
    try:
        options = options_from(arguments)
    except DaemonError as error:
        parser.error(str(error))
    setup_logging(arguments.log_level, arguments.log_format)
    if translation is not None:
        if translation.log_file is not None:
            try:
                handler = logging.FileHandler(translation.log_file)
            except OSError as error:
                parser.error(f"--log-file {translation.log_file}: {error.strerror}")
            handler.setFormatter(logging.getLogger().handlers[0].formatter)
            logging.getLogger().addHandler(handler)
        if translation.ignored:
            log.info("without effect here: %s", " ".join(translation.ignored))
        if not is_loopback(options.grpc_host) and options.tls_ca is None:
            log.warning(
                "P4Runtime on %s is open to everybody who reaches it, as BMv2's is",
                options.grpc_host,
            )
    return asyncio.run(run(options))


if __name__ == "__main__":
    raise SystemExit(main())
