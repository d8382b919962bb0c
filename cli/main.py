"""The `kvcast` command: a table of subcommands, each imported only when it is called.

Owns: the names of the subcommands, which module serves each, and which of the package's extras
each needs. Must not know: their options.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvcast.service.commands import EXIT_FAILED, EXIT_OK, EXIT_USAGE, failed, interrupted


@dataclass(frozen=True)
class Command:
    """A subcommand: the module whose `function(argv)` serves it, a line of help, and the extra of
    the package that it cannot do without ("" = none)."""

    module: str
    help: str
    extra: str = ""
    function: str = "main"


EXTRAS = {
    "agent": ("aiohttp", "llvmlite", "prometheus_client"),
    "controller": ("aiohttp", "cryptography", "finsy", "numpy", "prometheus_client", "rich"),
    "models": ("rich",),
    "route": ("aiohttp", "prometheus_client", "zmq"),
    "switch": ("finsy", "google.protobuf", "grpc", "llvmlite"),
}
"""What is imported from each extra of pyproject.toml."""
EXTRAS["bench"] = tuple(sorted({"matplotlib"}.union(*EXTRAS.values())))


_AGENT = "kvcast.cli.agent_blocks"
COMMANDS = {
    "demo": Command("kvcast.cli.demo", "replay a workload, plainly and through kvcast", "bench"),
    "bench": Command(
        "kvcast.cli.bench", "measure one thing: incast, incast-simulation, hostile, soak", "bench"
    ),
    "plan": Command(
        "kvcast.cli.plan", "what kvcast would bring to a pool, and what to switch on", "bench"
    ),
    "switch": Command(
        "kvcast.switchsim.daemon", "run a software switch (P4Runtime server)", "switch"
    ),
    "controller": Command(
        "kvcast.controller.daemon", "run the controller of one switch", "controller"
    ),
    "agent": Command("kvcast.hostagent.daemon", "run the agent of one inference node", "agent"),
    "agent drain": Command(
        "kvcast.cli.drain", "have a node's blocks handed over, so that it may go"
    ),
    "agent evict": Command(_AGENT, "have blocks forgotten", function="evict"),
    "agent fsck": Command(
        "kvcast.cli.fsck", "look at all blocks on a stopped agent's disks, and mend what is wrong"
    ),
    "agent pin": Command(_AGENT, "keep blocks in a node's DRAM", function="pin"),
    "agent status": Command(_AGENT, "show what one agent holds and does", function="status"),
    "route": Command(
        "kvcast.routing.daemon", "run a router: requests go where their prefix is held", "route"
    ),
    "status": Command(
        "kvcast.cli.status", "show a running pool: nodes, tiers, hits, links", "controller"
    ),
    "namespace": Command(
        "kvcast.cli.namespaces", "say what tenants may take: policy, quota, rates, weight"
    ),
    "put": Command("kvcast.cli.put", "store a file as a block"),
    "get": Command("kvcast.cli.get", "fetch a block"),
    "load": Command("kvcast.cli.load", "put a folder (a model's files) into the pool", "models"),
    "fetch": Command("kvcast.cli.fetch", "take a folder out of the pool", "models"),
    "certs": Command("kvcast.cli.certs", "make the certificates of a cluster", "controller"),
    "tokens": Command("kvcast.cli.tokens", "make tokens for the controller's HTTP API"),
    "shell": Command("kvcast.cli.shell", "open a P4Runtime console on a running switch"),
}

_EXAMPLES = """\
examples:
  kvcast demo                          eight nodes, a mix of workloads, a table and a picture
  kvcast demo --trace requests.jsonl   the same for a trace of yours
  kvcast bench incast --readers 8      how often does a byte leave its home?

a pool by hand (each in a terminal of its own):
  kvcast switch --grpc-addr 127.0.0.1:9559 \\
      --port 1=udp:127.0.0.1:20001:127.0.0.1:21001 --port 2=udp:127.0.0.1:20002:127.0.0.1:21002
  kvcast controller --switch 127.0.0.1:9559 --http-addr 127.0.0.1:9601
  kvcast agent --node-id node-1 --ip 10.77.0.1 --mac 02:6b:76:00:00:01 --switch-port 1 \\
      --transport tunnel --tunnel 127.0.0.1:21001:127.0.0.1:20001 --socket /tmp/node-1.sock
  kvcast agent --node-id node-2 --ip 10.77.0.2 --mac 02:6b:76:00:00:02 --switch-port 2 \\
      --transport tunnel --tunnel 127.0.0.1:21002:127.0.0.1:20002 --socket /tmp/node-2.sock
  kvcast status
  kvcast put --socket /tmp/node-1.sock README.md
  kvcast get --socket /tmp/node-2.sock KEY

kvcast COMMAND --help says more. Exit status: 0 done, 1 failed, 2 wrong usage, 3 block not in the
pool, 130 interrupted."""


def usage() -> str:
    """The text of `kvcast --help`."""
    width = max(len(name) for name in COMMANDS)
    listed = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        "usage: kvcast [--version] COMMAND ...\n\n"
        "An in-network memory pool for the KV caches of LLM inference: a P4 switch answers,\n"
        "joins and multicasts reads of KV blocks, so that a byte that many nodes want at once\n"
        f"leaves its home once.\n\ncommands:\n{listed}\n\n{_EXAMPLES}\n"
    )


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("kvcast")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status."""
    status = _run(list(sys.argv[1:] if argv is None else argv))
    try:
        if not sys.stdout.closed:
            sys.stdout.flush()
    except OSError as error:
        # The interpreter would try it again at its end, and tell of it in its own words.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return EXIT_FAILED
        return failed(f"standard output: {error.strerror}")
    return status


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return EXIT_OK if words else EXIT_USAGE
    if words[0] in ("-V", "--version", "version"):
        print(f"kvcast {version()}")
        return EXIT_OK
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    command = COMMANDS.get(name)
    if command is None:
        print(
            f"kvcast: no command {words[0]!r}; there are {', '.join(COMMANDS)} "
            "(kvcast --help says what they do)",
            file=sys.stderr,
        )
        return EXIT_USAGE
    # argparse names the program by argv[0]; every subcommand's help then says "kvcast NAME".
    sys.argv[0] = f"kvcast {name}"
    if _lacks(sys.argv[0], command.extra):
        return EXIT_FAILED
    module = importlib.import_module(command.module)
    try:
        return int(getattr(module, command.function)(words[len(name.split()) :]))
    except KeyboardInterrupt:  # of a command without an event loop, which takes signals over
        return interrupted()


def simple_switch_grpc() -> int:
    """Entry point of `kvcast-simple-switch-grpc`."""
    if _lacks("kvcast-simple-switch-grpc", "switch"):
        return EXIT_FAILED
    from kvcast.switchsim.daemon import bmv2_main

    return bmv2_main()


def _lacks(program: str, extra: str) -> bool:
    """Whether the extra that a program needs is not installed; then says how to get it."""
    missing = [module for module in EXTRAS.get(extra, ()) if not _is_there(module)]
    if missing:
        needs = f"{program} needs pip install 'kvcast[{extra}]'"
        print(f"{needs} (missing: {', '.join(missing)})", file=sys.stderr)
    return bool(missing)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what contains it is not there
        return False


if __name__ == "__main__":
    sys.exit(main())
