"""`kvcast agent drain`: have a node's blocks handed over before it goes, by the controller.

Owns: the command line, and what is shown meanwhile. Must not know: how blocks are handed over.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from kvcast.cli.controller_api import add_api_options, controller_api, run_for_operator
from kvcast.service.commands import (
    EXIT_FAILED,
    EXIT_OK,
    CommandError,
    command_parser,
)
from kvcast.service.values import number, parse_node_id

_POLL_S = 0.5
_DRAIN = "/v1/drain"

_DESCRIPTION = """\
Have all that a node holds handed over to the others, and wait until it is; then the node may be
stopped without the loss of a block. Where some could not be handed over (larger than the node's
DRAM, or than their namespace's quota of it), it says how many, and fails. The node goes on serving
its own engines, and answers for its blocks until others have them. Interrupting the wait stops
nothing; --undo does.
"""

_EXAMPLES = """\
examples:
  kvcast agent drain node-3
  kvcast agent drain node-3 --no-wait
  kvcast agent drain node-3 --undo        it holds blocks again, or on"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast agent drain`."""
    parser = command_parser("kvcast agent drain", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("node", type=parse_node_id, metavar="NODE", help="its --node-id")
    parser.add_argument("--undo", action="store_true", help="have the node hold blocks after all")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is done")
    parser.add_argument(
        "--timeout",
        type=number(0),
        default=0.0,
        metavar="SECONDS",
        help="wait no longer than this, and fail; 0 = as long as it takes",
    )
    add_api_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do it; 1 with a line of why if it cannot be done."""
    return run_for_operator(build_parser(), argv, _run)


async def _run(options: argparse.Namespace) -> int:
    ask = controller_api(options)
    await ask("DELETE" if options.undo else "POST", _DRAIN, {"node_id": options.node})
    if options.undo or options.no_wait:
        return EXIT_OK
    loop = asyncio.get_running_loop()
    until = loop.time() + options.timeout
    shown = ""
    while True:
        status = await ask("GET", "/v1/status")
        line, done = progress(status, options.node)
        if line != shown:
            shown = line
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        if done:
            return EXIT_FAILED if _failed(status, options.node) else EXIT_OK
        if options.timeout and loop.time() >= until:
            sys.stderr.write(f"{options.node} is not drained after {options.timeout:g} s\n")
            return EXIT_FAILED
        await asyncio.sleep(_POLL_S)


def progress(status: dict[str, Any], node_id: str) -> tuple[str, bool]:
    """How far it is, in words, and whether it is done; CommandError where it is not going on."""
    nodes = {node["node_id"]: node for node in status["nodes"]}
    node = nodes.get(node_id)
    if node is None or not node["draining"]:
        raise CommandError(f"{node_id} is not to be drained any more")
    if not node["alive"]:
        raise CommandError(f"{node_id} is gone, before all of its blocks were handed over")
    if not node["placed"]:
        if failed := _failed(status, node_id):
            return f"{node_id} is drained, but {failed} blocks could not be handed over", True
        return f"{node_id} is drained: it may be stopped", True
    left = sum(other["handover"]["left"] for other in nodes.values())
    total = sum(other["handover"]["total"] for other in nodes.values())
    failed = sum(other["handover"]["failed"] for other in nodes.values())
    no_room = sum(other["handover"].get("no_room", 0) for other in nodes.values())
    lost = f", {failed} could not be" if failed else ""
    waits = f", {no_room} wait for room" if no_room else ""
    return f"{node_id}: {total - left} of {total} blocks are handed over{lost}{waits}", False


def _failed(status: dict[str, Any], node_id: str) -> int:
    """How many blocks a node could not hand over."""
    nodes = {node["node_id"]: node for node in status["nodes"]}
    return int(nodes[node_id]["handover"]["failed"])
