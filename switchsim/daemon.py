"""`kvcast switch`: a software switch as a process.

Owns: the gRPC server's address and credentials, the order of start and stop, and the statistics
file. Must not know: flags (`flags`), P4Runtime messages, packets. It puts together the ports, the
packet loop and the P4Runtime service, and runs them on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from finsy.proto import p4i, p4r_grpc
from google.protobuf import text_format
from kvcast.service.addresses import format_host_port, is_loopback
from kvcast.service.logs import setup_logging
from kvcast.service.readiness import announce_ready, stop_event
from kvcast.service.reports import write_json
from kvcast.switchsim import bmv2_flags
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.flags import DaemonOptions, parse, port_options
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.loop.interpreted import interpreted_entry
from kvcast.switchsim.loop.packet_loop import PacketLoop
from kvcast.switchsim.p4runtime.errors import P4RuntimeError
from kvcast.switchsim.p4runtime.service import MAX_REQUEST_BYTES, P4RuntimeService
from kvcast.switchsim.p4runtime.tls import CertificateFiles
from kvcast.switchsim.ports.drops import DropLog
from kvcast.switchsim.ports.port import Port, PortError
from kvcast.switchsim.reference.switch import Switch

log = logging.getLogger("kvcast.switchsim.daemon")

STATS_INTERVAL_S = 1.0
# How long RPCs in progress may take once the process is told to stop.
GRACE_S = 1.0
# RPCs in progress, streams included; gRPC refuses more with RESOURCE_EXHAUSTED.
MAX_RPCS = 128
# How often a silent controller is asked whether it lives, and how long it has to answer.
KEEPALIVE_MS = 5000


_COMPILED = partial(CompiledSwitch, populate=True)
"""An engine whose memory does not grow as packets touch it."""


class DaemonError(Exception):
    """The switch cannot start; the message says why."""


class Daemon:
    """One running switch: ports, loop, service and server, started and stopped together."""

    def __init__(self, options: DaemonOptions) -> None:
        self.options = options
        self.ports: list[Port] = []
        self.grpc_port = 0
        self._start_ns = time.monotonic_ns()
        self.loop: PacketLoop | None = None
        self._cpu: Port | None = None
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
            new_switch=_COMPILED if options.engine == "llvm" else Switch,
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
                self._cpu = Port(options.cpu_port)
                self.ports.append(self._cpu)
            self.grpc_port = self._listen()
            self.loop = PacketLoop(
                self.ports,
                cpu_port=options.cpu_port,
                packet_in=self.service.packet_in,
                after_frames=self.service.after_frame,
                clock_base_ns=self._start_ns,
                queue_depth=options.queue_depth,
                threaded=options.engine == "llvm",
            )
            self._adopt(self.service.switch)
            if options.stats_json is not None:
                self._store_stats(options.stats_json)
            await self.server.start()
        except (DaemonError, PortError, OSError, RuntimeError) as error:
            if self.loop is not None:
                self.loop.native.close()
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

    def _adopt(self, switch: Engine) -> None:
        """The service has a new switch: the loop must run it from now on."""
        if self.loop is None:
            return
        if switch.program is None:
            self.loop.native.use(None)
        elif isinstance(switch, CompiledSwitch):
            self.loop.native.use(switch.native_entry)
        else:
            self.loop.native.use(interpreted_entry(switch))

    def _pause(self) -> AbstractContextManager[None]:
        """While this is entered, no frame is processed."""
        return contextlib.nullcontext() if self.loop is None else self.loop.paused()

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
        self.loop.native.close()
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
        return format_host_port((self.options.grpc_host, self.grpc_port))

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
        moved = loop.native.counters
        switch = self.service.switch_stats()
        switch["dropped_unknown_port"] = moved["no_such_port"]
        # Without a program, the loop has nothing to call that would count.
        no_program = moved.pop("no_program")
        switch["frames_in"] += no_program
        switch["dropped_no_program"] += no_program
        return {
            "time_s": time.time(),
            "uptime_s": time.time() - self._started_s,
            "device_id": self.options.device_id,
            "pipeline": self.service.has_pipeline,
            "controllers": self.service.controllers,
            "engine": self.options.engine,
            "loop": {**moved, "backlog": loop.native.injected},
            "ports": {
                str(port.number): {
                    "kind": "cpu" if port is self._cpu else port.kind,
                    **loop.read_counters(port),
                    "ingress_backlog": loop.native.injected if port is self._cpu else 0,
                    "egress_backlog": loop.native.egress_backlog(port.number),
                }
                for port in self.ports
            },
            "p4runtime": asdict(self.service.counters),
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
        address = format_host_port(options.grpc_addr)
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
        write_json(path, self.stats())


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
    options = parse(words)
    setup_logging(options.log_level, options.log_format)
    if translation is not None:
        if translation.log_file is not None:
            try:
                handler = logging.FileHandler(translation.log_file)
            except OSError as error:
                reason = f"--log-file {translation.log_file}: {error.strerror}"
                print(f"kvcast-simple-switch-grpc: error: {reason}", file=sys.stderr)
                return 2
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
