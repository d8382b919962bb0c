"""`kvcast plan`: what kvcast would bring to a pool, simulated, and what to switch on.

Owns: the command line and the text. Must not know: how it is simulated
(`kvcast.simulation.flows.plan`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcast.controller.core.worth import judge
from kvcast.hostagent.core.metrics import added
from kvcast.service import reports
from kvcast.service.commands import EXIT_OK, failed
from kvcast.service.options import HelpFormatter
from kvcast.simulation.flows.engine import SpanError
from kvcast.simulation.flows.networks import TOPOLOGIES, NetworkError
from kvcast.simulation.flows.plan import SLOTS, plan
from kvcast.simulation.flows.scenarios import (
    DEFAULT_MODEL,
    MODELS,
    WORKLOADS,
    Scenario,
    ScenarioError,
)
from kvcast.workloads.generators import WorkloadError
from kvcast.workloads.traces import read_trace

_DESCRIPTION = """\
Say what hosts, links, switch, model and workload you have; get what kvcast would bring, as ranges
over several simulated runs, and what to switch on: off, coalescing only, residency, reader groups,
or replicas instead. docs/evaluation.md says how far the simulation can be trusted.

With --status, a running pool's own counters are judged instead (what /v1/status answers, as a
file); a controller says the same at /v1/worth."""

_EXAMPLES = """\
examples:
  kvcast plan --hosts 32 --link-gbps 100 --workload tp-mla
  kvcast plan --hosts 256 --topology leaf-spine --link-gbps 400 --workload storm --json plan.json
  kvcast plan --hosts 16 --trace requests.jsonl --block-tokens 512
  kvcast status --json > status.json; kvcast plan --status status.json"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast plan`."""
    parser = argparse.ArgumentParser(
        prog="kvcast plan",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--workload", choices=WORKLOADS, default="tp-mla", help="what engines do")
    what.add_argument("--trace", type=Path, metavar="FILE", help="or a trace in Mooncake's form")
    what.add_argument("--status", type=Path, metavar="FILE", help="or a running pool's status")
    parser.add_argument("--hosts", type=int, default=32, help="inference nodes")
    parser.add_argument("--link-gbps", type=float, default=100.0, help="rate of each host's link")
    parser.add_argument("--topology", choices=tuple(TOPOLOGIES), default="star")
    parser.add_argument("--switch", choices=tuple(SLOTS), default="tofino2", help="its memory")
    parser.add_argument("--model", choices=tuple(MODELS), default=DEFAULT_MODEL)
    parser.add_argument("--block-tokens", type=int, default=64, help="tokens of a block")
    parser.add_argument(
        "--prefix-blocks", type=int, default=8, help="blocks of a typical shared prefix"
    )
    parser.add_argument(
        "--load", type=float, default=0.3, help="share of all links that plain gets would fill"
    )
    parser.add_argument(
        "--gather-ms", type=int, default=1, help="most that homes may wait for joiners"
    )
    parser.add_argument("--reads", type=int, default=500, help="reads to simulate in each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="the plan; - is standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`kvcast plan`; its exit status."""
    args = build_parser().parse_args(argv)
    try:
        report = _of_status(args.status) if args.status else _of_simulation(args)
        reports.report_to(args.json, report, _show)
    except (ScenarioError, NetworkError, SpanError, WorkloadError, OSError, ValueError) as error:
        return failed(str(error))
    return EXIT_OK


def _of_simulation(args: argparse.Namespace) -> dict[str, Any]:
    if args.prefix_blocks < 1 or args.reads < 1 or not 0 <= args.gather_ms <= 255:
        raise ScenarioError("blocks and reads are at least 1, and the gather time 0 to 255 ms")
    scenario = Scenario(
        workload=args.workload,
        hosts=args.hosts,
        link_gbps=args.link_gbps,
        topology=args.topology,
        model=args.model,
        block_tokens=args.block_tokens,
        prefix_blocks=args.prefix_blocks,
        load=args.load,
        gather_ms=args.gather_ms,
        reads=args.reads,
        seed=args.seed,
    )
    lines = read_trace(args.trace) if args.trace else None
    return plan(scenario, switch=args.switch, lines=lines)


def _of_status(path: Path) -> dict[str, Any]:
    status = json.loads(path.read_bytes())
    agents = status.get("agents") if isinstance(status, dict) else None
    if not isinstance(agents, dict):
        raise ScenarioError(f"{path}: no status of a pool: it names no agents")
    totals = added(
        {name: float(value) for name, value in counters.items()} for counters in agents.values()
    )
    return judge(totals, groups=len(status.get("groups", [])))


def _show(report: dict[str, Any]) -> None:
    if "advice" in report:
        print(f"advice: {report['advice']}\n  {report['why']}\n  {report['to_do']}")
        return
    print(f"recommendation: {', '.join(report['recommendation'])}")
    for reason in report["why"]:
        print(f"  {reason}")
    if "assumed" in report:
        _show_figures(report)


def _show_figures(report: dict[str, Any]) -> None:
    what = report["assumed"]
    load = f"plain gets fill {what['load']:.0%} of all links (half and one and a half times that)"
    low, high = report["time_compression"]
    if high > 1:
        load += f"; the trace's time is compressed {low:,.0f} to {high:,.0f} times for that"
    print(
        f"\nassumed: {what['hosts']} hosts ({what['topology']}) with links of "
        f"{what['link_gbps']:g} Gb/s; {what['workload']}; {what['model']}, blocks of "
        f"{what['block_tokens']} tokens ({what['block_bytes'] / (1 << 20):.1f} MiB); {load}"
        f"\nleast and most of {report['runs']} simulated runs:"
    )
    for name, key, unit in (
        ("mean time of a get, plain switch", "get_ms_plain", " ms"),
        ("mean time of a get, kvcast", "get_ms_kvcast", " ms"),
        ("kvcast, times as fast: mean", "times_as_fast", ""),
        ("kvcast, times as fast: 99th percentile", "times_as_fast_p99", ""),
        ("plain switch and three homes a block, times as fast", "times_as_fast_with_replicas", ""),
        ("bytes that homes send, of the plain switch's", "home_egress", ""),
    ):
        least, most = report[key]
        print(f"  {name:<52} {least:.2f} to {most:.2f}{unit}")
    print(
        f"  {'reads that switch memory answers':<52} {report['reads_from_switch_memory']:.1%} "
        f"(a block takes {what['slots_a_block']} of the {what['slots']} slots of {what['switch']})"
    )
    if report["gathers"]:
        print("  (homes hold first answers for late readers, since that makes gets faster)")
    if report["unsettled"] >= 0.01:
        print(f"  {report['unsettled']:.0%} of the times had not settled: believe none of this")
