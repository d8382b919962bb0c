"""`kvcast shell`: p4runtime-shell on a running switch.

Owns: where p4runtime-shell is looked for. Must not know: P4Runtime. The shell needs an old
protobuf and therefore lives in an environment of its own (`make setup-shell`), whose Python is
started here.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from kvcast.service.addresses import P4RUNTIME_PORT, format_host_port, parse_host_port
from kvcast.service.commands import command_parser, failed
from kvcast.service.tls import TlsError, TlsFiles

_DESCRIPTION = """\
Opens p4runtime-shell on a running switch. It joins with a low election id, so that a running
controller stays the one that writes, and the shell reads.

The shell is found through KVCAST_P4RT_SHELL (the python of its environment) or in
.venv-p4rt-shell beside the sources, which `make setup-shell` makes."""

_EXAMPLES = """\
examples:
  kvcast shell --switch 127.0.0.1:9559
  kvcast shell --switch 10.0.0.2:9559 --tls certs/operator
  then, in the shell:  tables   table_entry["l2_forward"].read()   counter_entry   exit"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast shell`."""
    parser = command_parser("kvcast shell", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--switch",
        type=parse_host_port,
        default=("127.0.0.1", P4RUNTIME_PORT),
        metavar="HOST:PORT",
        help="the switch's P4Runtime address",
    )
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="folder with an operator's certificate, for a switch that runs with --tls",
    )
    parser.add_argument("--device-id", type=int, default=1, help="the switch's device id")
    parser.add_argument("--election-id", default="0,1", help="high,low; the highest may write")
    return parser


def find_shell_python() -> Path | None:
    """The Python of the environment that holds p4runtime-shell, or None."""
    named = os.environ.get("KVCAST_P4RT_SHELL")
    candidates = [Path(named)] if named else []
    checkout = Path(__file__).resolve().parent.parent
    candidates += [
        folder / ".venv-p4rt-shell" / "bin" / "python" for folder in (checkout, Path.cwd())
    ]
    for python in candidates:
        if not python.is_file():
            continue
        if any(python.parent.parent.glob("lib/python3*/site-packages/p4runtime_sh")):
            return python
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by p4runtime-shell; 1 if it is not installed."""
    options = build_parser().parse_args(argv)
    python = find_shell_python()
    if python is None:
        return failed(
            "p4runtime-shell is not installed; `make setup-shell` makes an environment for it, or "
            "set KVCAST_P4RT_SHELL to the python of one"
        )
    command = [
        str(python),
        # Not the working directory: in this repository its p4/ would hide the shell's p4 package.
        "-P",
        "-m",
        "p4runtime_sh",
        f"--grpc-addr={format_host_port(options.switch)}",
        f"--device-id={options.device_id}",
        f"--election-id={options.election_id}",
    ]
    if options.tls is not None:
        try:
            files = TlsFiles.of_folder(options.tls)
        except TlsError as error:
            return failed(error)
        command += ["--ssl", f"--cacert={files.ca}", f"--cert={files.cert}"]
        command += [f"--private-key={files.key}"]
    try:
        os.execv(command[0], command)
    except OSError as error:
        return failed(f"{python}: {error.strerror or error}")
