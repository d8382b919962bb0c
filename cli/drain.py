"""`kvcast agent drain`: have a node's blocks handed over before it goes, by the controller.

Owns: the command line, and what is shown meanwhile. Must not know: how blocks are handed over.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcast.cli.controller_api import (
    ControllerApi,
    add_api_options,
    controller_api,
    run_for_operator,
)
from kvcast.service.commands import (
    EXIT_FAILED,
    EXIT_OK,
    CommandError,
    command_parser,
)
from kvcast.service.values import number, parse_node_id

_POLL_S = 0.5
_REPORTS_S = 5.0
"""How long it is waited for what the other nodes have counted; they report every second, unless the
controller was given another --lease."""
_DRAIN = "/v1/drain"
_STATUS = "/v1/status"
_EVICTED = ("store_evictions_total", "store_evicted_bytes_total")
_MIB = 1 << 20

_DESCRIPTION = """\
Have all that a node holds handed over to the others, and wait until it is; then no other node needs
it. The others make room for that as for a put: where there is none, they evict by their namespaces'
policies, of what was handed over, too. It is said beforehand if the node holds more than the others
have room for, and at the end what they evicted meanwhile. Where blocks could not be handed over
(larger than the node's DRAM, or than their namespace's quota of it), it says how many, and fails.
The node goes on serving its own engines, and answers for its blocks until others have them.
Interrupting the wait stops nothing; --undo does.
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
    body = {"node_id": options.node}
    if options.undo:
        await ask("DELETE", _DRAIN, body)
        return EXIT_OK
    status = await ask("GET", _STATUS)
    evictions = _Evictions(options.node)
    evictions.heard(status)
    warning = crowding(status, options.node)
    await ask("POST", _DRAIN, body)
    if warning:
        _say(warning)
    if options.no_wait:
        return EXIT_OK
    loop = asyncio.get_running_loop()
    until = loop.time() + options.timeout
    shown = ""
    while True:
        status = await ask("GET", _STATUS)
        evictions.heard(status)
        line, done = progress(status, options.node)
        if line != shown:
            shown = line
            _say(line)
        if done:
            await _hear_all(ask, evictions)
            return EXIT_FAILED if _failed(status, options.node) else EXIT_OK
        if options.timeout and loop.time() >= until:
            sys.stderr.write(f"{options.node} is not drained after {options.timeout:g} s\n")
            return EXIT_FAILED
        await asyncio.sleep(_POLL_S)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@dataclass
class _Evictions:
    """What the other nodes have evicted from DRAM, for whatever reason, since each of them was
    first heard of (so in the second before a drain, too): blocks, and bytes of arena."""

    node_id: str
    first: dict[str, tuple[float, float]] = field(default_factory=dict)
    last: dict[str, tuple[float, float]] = field(default_factory=dict)

    def heard(self, status: dict[str, Any]) -> None:
        """The controller has said what its agents count."""
        for node_id, counters in status["agents"].items():
            if node_id != self.node_id and counters:
                blocks, size_bytes = (counters.get(name, 0.0) for name in _EVICTED)
                said = blocks, size_bytes
                self.first.setdefault(node_id, said)
                self.last[node_id] = said

    def line(self, *, all_heard: bool) -> str:
        """In words; where not all were heard of after the last block, it is a lower bound."""
        # Of one that began anew, what it counted before is not known any more.
        grown = [
            [max(0.0, now - before) for now, before in zip(self.last[n], first, strict=True)]
            for n, first in self.first.items()
        ]
        blocks, size_bytes = (
            (sum(column) for column in zip(*grown, strict=True)) if grown else (0, 0)
        )
        least = "" if all_heard else "at least "
        if not blocks:
            some = "nothing" if all_heard else "nothing, as far as they have told,"
            return f"the other nodes evicted {some} from DRAM meanwhile"
        return (
            f"the other nodes evicted {least}{blocks:,.0f} blocks ({size_bytes / _MIB:,.1f} MiB)"
            " from DRAM meanwhile, for what was handed over or put"
        )


async def _hear_all(ask: ControllerApi, evictions: _Evictions) -> None:
    """Say what the other nodes evicted, once they have reported by a map in which nothing moves."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _REPORTS_S
    epoch = None
    all_heard = False
    while not all_heard and loop.time() < until:
        await asyncio.sleep(_POLL_S)
        status = await ask("GET", _STATUS)
        evictions.heard(status)
        epoch = status["epoch"] if epoch is None else epoch
        others = [n for n in status["nodes"] if n["alive"] and n["node_id"] != evictions.node_id]
        all_heard = all(node["epoch"] >= epoch for node in others)
    _say(evictions.line(all_heard=all_heard))


def crowding(status: dict[str, Any], node_id: str) -> str:
    """A warning where a node holds more in DRAM than those that take it over have room for; else
    an empty text."""
    nodes = {node["node_id"]: node for node in status["nodes"]}
    node = nodes.get(node_id)
    if node is None or not node["placed"] or node["draining"]:
        return ""
    heirs = [n for n in nodes.values() if n["placed"] and not n["draining"] and n is not node]
    free_bytes = sum(n["arena_bytes"] - n["arena_used_bytes"] for n in heirs)
    used_bytes = node["arena_used_bytes"]
    if used_bytes <= free_bytes:
        return ""
    return (
        f"{node_id} holds {used_bytes / _MIB:,.1f} MiB in DRAM, the others have"
        f" {free_bytes / _MIB:,.1f} MiB free: they evict for what they lack"
    )


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
