"""What `kvcast switch` can be told.

Owns: the flags, what must go together, and the files that flags name. Must not know: what runs.
simple_switch_grpc's flags are translated into these by `bmv2_flags`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, get_args

from kvcast.service.addresses import P4RUNTIME_PORT, is_loopback
from kvcast.service.options import (
    CommonOptions,
    OptionsError,
    address,
    choice,
    either,
    file,
    many,
    option,
    read_options,
)
from kvcast.service.tls import TlsError, TlsFiles
from kvcast.switchsim.engine import MAX_PORT, EngineName
from kvcast.switchsim.ports.port import PortError, PortOptions
from kvcast.switchsim.ports.spec import PortSpec, parse_port

DEFAULT_ENGINE: EngineName = "llvm"
_PORT: Final = PortOptions()
CPU_PORT: Final[int | None] = 255


def _cpu_port(text: str) -> int | None:
    return int(text) or None


def _port(text: str) -> PortSpec:
    return parse_port(text, max_port=MAX_PORT)


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """engine"""

    engine: EngineName = choice(
        "llvm runs the program as machine code, reference interprets it, plainly and slowly",
        default=DEFAULT_ENGINE,
        choices=get_args(EngineName),
    )


@dataclass(frozen=True, kw_only=True)
class PortFlags:
    """ports"""

    ports: tuple[PortSpec, ...] = many(
        "a port; see above", parse=_port, metavar="N=SPEC", flag="port"
    )
    cpu_port: int | None = option(
        "port number of the controller (packet-in, packet-out); 0 = none",
        default=CPU_PORT,
        parse=_cpu_port,
        metavar="N",
    )
    drop_port: int = option("egress_spec that means drop", default=511, parse=int, metavar="N")
    queue_depth: int = option(
        "frames that wait at a port before new ones are dropped",
        default=_PORT.queue_depth,
        parse=int,
        unit="frames",
    )
    port_rate_bits_per_s: float | None = option(
        "most that each port sends; unlimited if left out",
        default=_PORT.rate_bits_per_s,
        parse=float,
        unit="bits/s",
        flag="port-rate",
    )
    uplink_rate_bits_per_s: float | None = option(
        "most that each port takes in, as its host's link would; unlimited if left out",
        default=_PORT.uplink_bits_per_s,
        parse=float,
        unit="bits/s",
        flag="uplink-rate",
    )
    port_quantum_s: float = option(
        "how late frames may go on at these rates, so that several go at once",
        default=_PORT.quantum_s,
        parse=float,
        unit="s",
        flag="port-quantum",
    )
    loss: float = option(
        "probability, 0 to 1, with which each port drops a frame, each way",
        default=_PORT.loss,
        parse=float,
        metavar="P",
    )
    seed: int = option(
        "seed of losses and of P4's random()", default=_PORT.seed, parse=int, metavar="S"
    )


@dataclass(frozen=True, kw_only=True)
class ControlFlags:
    """control plane"""

    grpc_addr: tuple[str, int] = address(
        "where P4Runtime listens; port 0 = pick one, the ready line says which",
        default=("127.0.0.1", P4RUNTIME_PORT),
    )
    device_id: int = option("P4Runtime device id", default=1, parse=int, metavar="N")
    strict: bool = either(
        "refuse what BMv2's P4Runtime does not implement (registers, atomic batches, ...)",
        default=False,
    )
    program: Path | None = file("BMv2 JSON to start with")
    p4info: Path | None = file(
        "P4Info (text) of --program; without it frames are switched, and P4Runtime waits for a "
        "controller to push a pipeline"
    )
    tls: Path | None = file(
        "folder with the server's cert.pem, key.pem and ca.pem, as `kvcast certs init` makes it; "
        "new files are taken into use without a restart",
        metavar="DIR",
    )
    tls_cert: Path | None = file(
        "the server's certificate chain, where not in --tls DIR", metavar="PEM"
    )
    tls_key: Path | None = file("the server's private key", metavar="PEM")
    tls_ca: Path | None = file(
        "controllers must show a certificate of this authority", metavar="PEM"
    )
    insecure: bool = either(
        "allow an address other than loopback without mutual TLS", default=False
    )
    stats_json: Path | None = file("file rewritten every second with all counters")


@dataclass(frozen=True, kw_only=True)
class DaemonOptions(EngineFlags, PortFlags, ControlFlags, CommonOptions):
    """Everything that `kvcast switch` can be told."""

    PROGRAM: ClassVar[str] = "kvcast switch"
    DESCRIPTION: ClassVar[str] = """\
Run a software switch: frames come and go through its ports, a P4Runtime controller
(kvcast controller, finsy, p4runtime-shell) gives it a program and fills its tables.

The program is p4c's output for BMv2's simple_switch (--arch v1model): JSON and P4Info.

Ports (--port, once for each):
  N=udp:LOCALIP:LPORT:PEERIP:PPORT  one UDP datagram is one Ethernet frame; no privilege needed
  N=udp:LOCALIP:LPORT               the same; the peer is whoever on this machine sends first
  N=if:NAME                         a network interface, e.g. one end of a veth pair; needs root
"""
    EXAMPLES: ClassVar[str] = """\
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

    @property
    def grpc_host(self) -> str:
        return self.grpc_addr[0]


def parse(argv: Sequence[str] | None) -> DaemonOptions:
    """Flags and file, checked; exits with status 2 and a message on an error."""
    return read_options(DaemonOptions, argv, settled)


def settled(options: DaemonOptions) -> DaemonOptions:
    """The options, checked, with the files that --tls stands for; OptionsError says which one is
    wrong."""
    numbers = [spec.number for spec in options.ports]
    repeated = sorted({number for number in numbers if numbers.count(number) > 1})
    if repeated:
        raise OptionsError(f"port {repeated[0]} is given twice")
    for what, number in (("CPU", options.cpu_port), ("drop", options.drop_port)):
        if number is not None and not 0 < number <= MAX_PORT:
            raise OptionsError(f"the {what} port must be 1 to {MAX_PORT}, not {number}")
        if number in numbers:
            raise OptionsError(f"port {number} is the {what} port")
    if options.cpu_port == options.drop_port:
        raise OptionsError("the CPU port and the drop port are the same")
    if options.device_id < 0 or options.device_id >= 1 << 64:
        raise OptionsError("the device id must fit 64 bits")
    if options.p4info is not None and options.program is None:
        raise OptionsError("--p4info needs --program")
    try:
        port_options(options)
    except PortError as error:
        raise OptionsError(str(error)) from error
    return _with_tls_files(options)


def _with_tls_files(options: DaemonOptions) -> DaemonOptions:
    if options.tls is not None:
        if options.tls_cert or options.tls_key or options.tls_ca:
            raise OptionsError(
                "--tls names a folder of all three files that --tls-... name one by one"
            )
        try:
            files = TlsFiles.of_folder(options.tls)
        except TlsError as error:
            raise OptionsError(f"--tls {error}") from error
        options = replace(options, tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)
    if (options.tls_cert is None) != (options.tls_key is None):
        raise OptionsError("--tls-cert and --tls-key go together")
    if options.tls_ca is not None and options.tls_cert is None:
        raise OptionsError("--tls-ca needs --tls-cert and --tls-key")
    host = options.grpc_host
    if options.tls_ca is None and not options.insecure and not is_loopback(host):
        raise OptionsError(
            f"P4Runtime on {host} would be open to everybody: give --tls DIR (kvcast certs init "
            "makes it), or --tls-cert, --tls-key and --tls-ca, or --insecure"
        )
    return options


def port_options(options: DaemonOptions) -> PortOptions:
    """What all ports have in common; PortError for values out of range."""
    return PortOptions(
        queue_depth=options.queue_depth,
        loss=options.loss,
        seed=options.seed,
        rate_bits_per_s=options.port_rate_bits_per_s,
        uplink_bits_per_s=options.uplink_rate_bits_per_s,
        quantum_s=options.port_quantum_s,
    )
