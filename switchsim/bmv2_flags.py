"""simple_switch_grpc's command line, for scripts and Mininet classes that were written for BMv2.

Owns: telling such a command line from ours, and its translation. Must not know: what the switch
does with its options. Follows behavioral-model's src/bm_sim/options_parse.cpp and
targets/simple_switch_grpc/main.cpp (1.15): options of all targets, an optional JSON file, and
behind `--` those of simple_switch_grpc.

    simple_switch_grpc -i 1@s1-eth1 --device-id 1 --no-p4 -- --grpc-server-addr 0.0.0.0:50051

Three kinds of options: those that mean something here; those that only BMv2's own tools would
notice (Thrift, nanomsg), which are accepted and reported; and those whose absence would change
what comes out (reading packets from files), which are refused by name.

As BMv2 does, and unlike `kvcast switch` with flags of its own, a switch started so serves
P4Runtime to everybody who reaches its address; it warns about that off loopback.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from kvcast.service.addresses import P4RUNTIME_PORT
from kvcast.service.options import HelpFormatter

_MARKS = frozenset({"-i", "--interface", "--no-p4", "--log-console", "--thrift-port", "--"})
_IGNORED_WITH_VALUE = (
    "thrift-port",
    "nanolog",
    "notifications-addr",
    "debugger-addr",
    "log-file-max-size",
    "log-file-max-files",
    "max-port-count",
    "dump-packet-data",
    "max-mc-groups",
    "max-l1-entries",
    "max-l2-entries",
)
_IGNORED_FLAGS = ("log-flush", "debugger", "disable-swap")
_REFUSED_WITH_VALUE = (
    "use-files",
    "packet-in",
    "restore-state",
    "dp-grpc-server-addr",
    "priority-queues",
)
_LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "error": "error",
    "off": "error",
}


class Bmv2FlagsError(ValueError):
    """A command line of simple_switch_grpc's kind that cannot be honoured; the text says why."""


@dataclass(frozen=True)
class Translation:
    """The same in flags of `kvcast switch`, and what has none."""

    argv: list[str]
    ignored: list[str] = field(default_factory=list)
    """Options that were accepted and have no effect here."""
    log_file: str | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Bmv2FlagsError(message)


def looks_like_bmv2(argv: Sequence[str]) -> bool:
    """Whether these words are simple_switch_grpc's rather than ours."""
    words = {word.partition("=")[0] for word in argv}
    return bool(
        words & _MARKS
        or any(word.startswith("--grpc-server-") for word in words)
        or (argv and argv[-1].endswith(".json") and not _is_value(argv))
    )


def _is_value(argv: Sequence[str]) -> bool:
    """Whether the last word belongs to the flag before it."""
    return len(argv) > 1 and argv[-2].startswith("--") and "=" not in argv[-2]


def build_parser() -> argparse.ArgumentParser:
    """The options of simple_switch_grpc 1.15 that are understood."""
    parser = _Parser(
        prog="kvcast-simple-switch-grpc",
        usage="%(prog)s [options] [PROGRAM.json] [-- options of simple_switch_grpc]",
        description="A software switch that takes simple_switch_grpc's command line, so that "
        "scripts and Mininet classes written for BMv2 can start it in BMv2's place. "
        "`kvcast switch --help` shows what else it can do.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("program", nargs="?", metavar="PROGRAM.json", help="p4c's BMv2 JSON to start with")
    add("-i", "--interface", action="append", default=[], metavar="N@IF", help="interface as port")
    add("--no-p4", action="store_true", help="start without a program")
    add("--device-id", default="0", metavar="N", help="P4Runtime device id")
    anywhere = f"0.0.0.0:{P4RUNTIME_PORT}"
    add("--grpc-server-addr", default=anywhere, metavar="HOST:PORT", help="P4Runtime server")
    add("--grpc-server-ssl", action="store_true", help="serve with TLS")
    add("--grpc-server-cacert", metavar="PEM", help="authority of the clients' certificates")
    add("--grpc-server-cert", metavar="PEM", help="the server's certificate")
    add("--grpc-server-key", metavar="PEM", help="the server's private key")
    add("--grpc-server-with-client-auth", action="store_true", help="clients must have one too")
    add("--cpu-port", default="0", metavar="N", help="port of packet-in and packet-out")
    add("--drop-port", default="511", metavar="N", help="egress_spec that means drop")
    add("--log-console", action="store_true", help="log to the console (this is always so)")
    add("--log-file", metavar="FILE", help="log to this file too")
    add("-L", "--log-level", default="info", choices=sorted(_LEVELS), help="least level to log")
    add("--pcap", nargs="?", const=".", metavar="DIR", help="ignored: use tcpdump -i IF -w FILE")
    add("--stats-json", metavar="FILE", help="(not BMv2's) rewritten every second: all counters")
    ignored = parser.add_argument_group("accepted without effect")
    for name in _IGNORED_WITH_VALUE:
        ignored.add_argument(f"--{name}", metavar="X")
    for name in _IGNORED_FLAGS:
        ignored.add_argument(f"--{name}", action="store_true")
    refused = parser.add_argument_group("refused")
    for name in _REFUSED_WITH_VALUE:
        refused.add_argument(f"--{name}", metavar="X")
    return parser


def translate(argv: Sequence[str]) -> Translation:
    """simple_switch_grpc's command line in ours; Bmv2FlagsError says what is wrong with it."""
    words = [word for word in argv if word != "--"]
    options = build_parser().parse_intermixed_args(words)
    for name in _REFUSED_WITH_VALUE:
        if getattr(options, name.replace("-", "_")) is not None:
            raise Bmv2FlagsError(f"--{name} of simple_switch_grpc has no counterpart here")
    if options.program is None and not options.no_p4:
        raise Bmv2FlagsError("give a BMv2 JSON file, or --no-p4")
    ours = [f"--device-id={options.device_id}", f"--drop-port={options.drop_port}"]
    ours += [f"--cpu-port={options.cpu_port}", f"--grpc-addr={options.grpc_server_addr}"]
    ours += [f"--log-level={_LEVELS[options.log_level]}", "--insecure"]
    for interface in options.interface:
        number, at, name = interface.partition("@")
        if not at or not number.isdigit() or not name:
            raise Bmv2FlagsError(f"-i {interface} is not PORT@INTERFACE")
        ours += ["--port", f"{number}=if:{name}"]
    if options.stats_json is not None:
        ours += ["--stats-json", options.stats_json]
    if options.program is not None and not options.no_p4:
        ours += ["--program", options.program]
    if options.grpc_server_ssl:
        if options.grpc_server_cert is None or options.grpc_server_key is None:
            raise Bmv2FlagsError("--grpc-server-ssl needs --grpc-server-cert and -key")
        ours += ["--tls-cert", options.grpc_server_cert, "--tls-key", options.grpc_server_key]
        if options.grpc_server_with_client_auth:
            if options.grpc_server_cacert is None:
                raise Bmv2FlagsError("--grpc-server-with-client-auth needs --grpc-server-cacert")
            ours += ["--tls-ca", options.grpc_server_cacert]
    given = [f"--{n}" for n in _IGNORED_WITH_VALUE if getattr(options, n.replace("-", "_"))]
    given += [f"--{n}" for n in _IGNORED_FLAGS if getattr(options, n.replace("-", "_"))]
    if options.pcap is not None:
        given.append("--pcap")
    return Translation(ours, given, options.log_file)
