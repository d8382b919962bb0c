"""`kvcast status`: a live view of a pool, from the controller's HTTP API.

Owns: how /v1/status is shown to people. Must not know: how its numbers come about.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcast.cli.controller_api import (
    Access,
    access_of,
    add_api_options,
    ask_controller,
    check_api_options,
)
from kvcast.cli.tables import table_of
from kvcast.hostagent.core.metrics import added, quantile
from kvcast.protocol.messages.local import TIERS
from kvcast.service.commands import (
    EXIT_OK,
    CommandError,
    command_parser,
    run_command,
)
from kvcast.service.values import number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_RESIDENTS_SHOWN = 12
_SOME_HAVE = ("arena", "ssd", "cold")
"""Tiers that are shown where blocks came from there."""
_MEMORIES = {"dram": "DRAM", "arena": "arenas", "ssd": "SSD", "cold": "cold"}
"""Tiers of a node that hold blocks, as they are headed; those that no node has are not shown."""
_STYLES = {"dead": "red", "silent": "yellow", "draining": "yellow", "joining": "yellow"}
"""Of states (`controller/core/node_report.py`)."""
_WIDE = 200
"""Columns of a view that no terminal shows."""
_OUTCOMES = ("whole", "part", "computed")
_WAYS = ("load", "compute")
"""As in the names of agents' numbers (`hostagent/core/engines.py`)."""

_EXAMPLES = """\
examples:
  kvcast status                     a live view, every second; Ctrl-C ends it
  kvcast status --once              one table
  kvcast status --once --json -     the controller's answer as it is
  kvcast status --tls certs/operator --http https://10.0.0.1:9601"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast status`."""
    parser = command_parser(
        "kvcast status",
        "Shows a running pool: its nodes and their tiers, links, the switch's "
        "decisions and what lives in its memory.",
        _EXAMPLES,
    )
    add_api_options(parser, "a token of the HTTP API")
    parser.add_argument("--once", action="store_true", help="show it once, not over and over")
    parser.add_argument(
        "--interval",
        type=number(0.1, 3600),
        default=1.0,
        metavar="SECONDS",
        help="between two views, 0.1 to 3600 s (default: %(default)g s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the status there (- = stdout)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Show a pool; 1 if the controller does not answer."""
    parser = build_parser()
    options = parser.parse_args(argv)
    check_api_options(parser, options)
    return run_command(lambda: _status(options), log_level=options.log_level)


async def _status(options: argparse.Namespace) -> int:
    from kvcast.service import reports
    from rich.console import Console

    access = access_of(options.tls, options.token_file)
    status = await asyncio.to_thread(fetch_status, options.http, access)
    if options.json:
        reports.write_json(options.json, status)
        if options.json == "-":
            return EXIT_OK
    shown_at_once = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if shown_at_once else _WIDE)
    if options.once or not console.is_terminal:
        console.print(render(status, None))
        return EXIT_OK
    try:
        await _live(console, options, access, status)
    except asyncio.CancelledError:
        pass  # Ctrl-C is how a live view ends
    return EXIT_OK


async def _live(
    console: Console, options: argparse.Namespace, access: Access, status: dict[str, Any]
) -> None:
    """Redraw until interrupted; a controller that does not answer is said, and asked again."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    at, before = time.monotonic(), None
    with Live(render(status, None), console=console, screen=False, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(options.interval)
            try:
                fresh = await asyncio.to_thread(fetch_status, options.http, access)
                now = time.monotonic()
            except CommandError as error:
                live.update(Group(render(status, before), Text(str(error), "red")), refresh=True)
                continue
            before, status, at = (status, now - at), fresh, now
            live.update(render(status, before), refresh=True)


def fetch_status(url: str, access: Access | None = None) -> dict[str, Any]:
    """/v1/status of the controller at that address; CommandError if it does not answer so."""
    status = ask_controller(url, access or Access(), "GET", "/v1/status")
    if "nodes" not in status:
        raise CommandError(f"{url}: this is no kvcast controller")
    return status


def render(status: dict[str, Any], before: tuple[dict[str, Any], float] | None) -> RenderableType:
    """The view; `before` is an earlier status and its age in seconds, for rates."""
    from rich.console import Group

    parts: list[RenderableType] = [_summary(status), _nodes(status, before)]
    parts += [_memory(status), _hits(status)]
    if (prefixes := _prefixes(status)) is not None:
        parts.append(prefixes)
    counts = (("switch decisions", "decisions"), ("fills", "fills"))
    lines = (_counts(title, status.get(name)) for title, name in counts)
    parts += [line for line in lines if line is not None]
    if status.get("residents"):
        parts.append(_residents(status))
    return Group(*parts)


def _summary(status: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    switch, slots = status.get("switch", {}), status.get("slots", {})
    alive = sum(1 for node in status["nodes"] if node["alive"])
    text = Text()
    text.append(f"epoch {status['epoch']}", "bold")
    text.append(f"   {alive} of {len(status['nodes'])} nodes alive")
    text.append(f"   {len(status.get('namespaces', []))} namespaces")
    text.append(f"   {len(status.get('groups', []))} reader groups")
    text.append("   plain switch" if status.get("plain") else f"   admission {status['admit']}")
    text.append(
        f"   slots {slots.get('total', 0) - slots.get('free', 0)} of {slots.get('total', 0)}"
    )
    if not switch.get("connected", True):
        text.append(f"\nswitch {switch.get('address')}: not connected", "red")
        if switch.get("last_error"):
            text.append(f" ({switch['last_error']})", "red")
    elif not switch.get("programmed", True):
        text.append(f"\nswitch {switch.get('address')}: being programmed", "yellow")
    return text


def _nodes(status: dict[str, Any], before: tuple[dict[str, Any], float] | None) -> RenderableType:
    """A row a node: state, and what its link carried to readers, and carries of what it could."""
    counted = status.get("agents", {})
    rows = [
        (
            node["node_id"],
            node["switch_port"],
            _state(node),
            node["buckets"],
            node["blocks"],
            _load(node),
            f"{_sent(counted.get(node['node_id'], {})) / 2**20:.1f}",
            _rate(node["node_id"], counted.get(node["node_id"], {}), before),
        )
        for node in _by_port(status)
    ]
    columns = ("node", "port", "state", "buckets", "blocks", "link", "sent MiB", "MiB/s")
    return table_of(columns, rows, title="nodes", left=("node", "state"))


def _counted(status: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """What each node's agent has counted, and the sums of all."""
    agents = status.get("agents", {})
    counted = {node["node_id"]: agents.get(node["node_id"], {}) for node in _by_port(status)}
    return [*counted.items(), ("all", added(counted.values()))]


def _hits(status: dict[str, Any]) -> RenderableType:
    """A row a node, and one for all: where engines' blocks came from, and how long those waited
    that were fetched."""
    counted = _counted(status)
    tiers = [
        tier
        for tier in TIERS
        if tier not in _SOME_HAVE or any(c.get(f"hits_{tier}_total") for _, c in counted)
    ]
    rows = [
        (
            name,
            *(f"{counters.get(f'hits_{tier}_total', 0):.0f}" for tier in tiers),
            f"{counters.get('misses_total', 0):.0f}",
            *(_fetch_ms(counters, q) for q in (0.5, 0.99)),
        )
        for name, counters in counted
    ]
    columns = ("node", *tiers, "misses", "p50 ms", "p99 ms")
    return table_of(columns, rows, title="blocks got, by where they came from", left=("node",))


def _prefixes(status: dict[str, Any]) -> RenderableType | None:
    """A row for each node whose engines have told of prefixes, and one for all; none, where none
    has."""
    rows = [
        (
            name,
            *(f"{counters.get(f'prefixes_{what}_total', 0):.0f}" for what in _OUTCOMES),
            *(_pace(counters.get(f"prefixes_{way}_tokens_per_s", 0)) for way in _WAYS),
        )
        for name, counters in _counted(status)
        if any(counters.get(f"prefixes_{what}_total") for what in _OUTCOMES)
    ]
    if not rows:
        return None
    columns = ("node", *_OUTCOMES, "loading, tokens/s", "computing, tokens/s")
    return table_of(columns, rows, title="prefixes that the pool held", left=("node",))


def _pace(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s else "–"


def _fetch_ms(counters: dict[str, float], q: float) -> str:
    """A quantile of the fetch times, which the histogram's buckets bound."""
    seconds = quantile(counters, "fetch_seconds", q)
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"


def _by_port(status: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(status["nodes"], key=lambda node: (node["switch_port"], node["node_id"]))


def _state(node: dict[str, Any]) -> str:
    state = node["state"]
    return f"[{_STYLES[state]}]{state}[/]" if state in _STYLES else str(state)


def _load(node: dict[str, Any]) -> str:
    """What the node sends of what its link carries, where that is known."""
    return f"{node['load']:.0%}" if node.get("link_bits_per_s") else "–"


def _memory(status: dict[str, Any]) -> RenderableType:
    """A row a node, and one for all: what lies in each of its tiers, and how large that is."""
    nodes = [(node["node_id"], node["tiers"]) for node in _by_port(status)]
    shown = [tier for tier in _MEMORIES if any(tier in tiers for _, tiers in nodes)]
    everything = {
        tier: {
            what: sum(tiers[tier][what] for _, tiers in nodes if what in tiers.get(tier, {}))
            for what in ("used_bytes", "size_bytes")
        }
        for tier in shown
    }
    rows = [
        (name, *(_fill(tiers.get(tier)) for tier in shown))
        for name, tiers in [*nodes, ("all", everything)]
    ]
    columns = ("node", *(_MEMORIES[tier] for tier in shown))
    return table_of(columns, rows, title="memory in use, MiB", left=("node",))


def _fill(tier: dict[str, int] | None) -> str:
    """MiB in use, of how many, if anybody knows the size."""
    if tier is None:
        return "–"
    used = f"{tier['used_bytes'] / 2**20:,.1f}"
    size_bytes = tier.get("size_bytes")
    return f"{used} of {size_bytes / 2**20:,.0f}" if size_bytes else used


def _sent(counters: dict[str, float]) -> float:
    """Payload bytes that the node's link carried to readers."""
    return counters.get("payload_bytes_sent_udp_total", 0) + counters.get(
        "payload_bytes_sent_bulk_get_total", 0
    )


def _rate(
    node_id: str, counters: dict[str, float], before: tuple[dict[str, Any], float] | None
) -> str:
    if before is None or before[1] <= 0:
        return "–"
    earlier = before[0].get("agents", {}).get(node_id, {})
    return f"{max(0.0, _sent(counters) - _sent(earlier)) / before[1] / 2**20:.2f}"


def _counts(title: str, counts: dict[str, float] | None) -> RenderableType | None:
    """All counters of one kind in a line, zeros dimmed."""
    from rich.text import Text

    if not counts:
        return None
    line = Text(f"{title}: ", "italic")
    for name, value in counts.items():
        line.append(f" {str(name).lower()} ", "")
        line.append(f"{value:,.0f} ", "bold" if value else "dim")
    return line


def _residents(status: dict[str, Any]) -> RenderableType:
    residents = sorted(status["residents"], key=lambda resident: -resident["hits"])
    rows = [
        (
            resident["namespace"],
            resident["key"],
            f"{resident['size_bytes'] / 1024:.0f}",
            resident["hits"],
            f"{resident['value']:,.0f}",
            f"{resident['age_s']:.0f}",
            " ".join(word for word in ("pinned", "leaving") if resident.get(word)),
        )
        for resident in residents[:_RESIDENTS_SHOWN]
    ]
    columns = ("namespace", "key", "KiB", "hits", "value", "age s", "")
    table = table_of(columns, rows, title="in the switch's memory", left=("key", ""))
    if len(residents) > len(rows):
        table.caption = f"and {len(residents) - len(rows)} more"
    return table
