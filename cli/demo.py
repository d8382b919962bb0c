"""`kvcast demo`: flags, progress and the final table of the demo (kvcast.bench.demo)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcast.bench import outage
from kvcast.bench.demo import DemoOptions, Reporter, run
from kvcast.service import reports
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, add_log_level, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.values import bit_rate, parse_size
from kvcast.topologies.star import Star
from kvcast.workloads import generators

if TYPE_CHECKING:
    from rich.console import Console

_EVERY_S = 5.0
"""How often progress is told where there is no terminal."""
_KILL_BUDGET_S = 40.0
"""Less leaves no requests behind the restart."""

_DESCRIPTION = """\
Starts a whole pool (one software switch, one controller, an agent for every node; --runner says in
what), replays a workload through a plain switch, then again through kvcast, checks every byte, and
ends with a table and a picture: how long a get takes, and how many bytes leave the homes. All links
are emulated and have one rate, so slow that they are the limit and not this machine, which is
measured. Rate, block size and count are scaled to the machine, and said.

workloads (--workload):
"""

_EPILOG = """\
home egress ratio = payload bytes that homes sent to readers / bytes of the distinct blocks that
at least one node fetched from elsewhere. 1: each byte left its home once.
time of a get = from an engine's call until all of its blocks are there; only gets that needed
blocks from elsewhere count. Links carry frames of READs and their answers; blocks that are put go
beside them, by TCP.

examples:
  kvcast demo
  kvcast demo --workload chat              where kvcast gains nothing, the table shows it
  kvcast demo --trace requests.jsonl --json report.json
  kvcast demo --nodes 16 --seconds-budget 180
  kvcast demo --kill switch                reads go on, or end as misses, and recover"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast demo`."""
    listed = "".join(f"  {name:14}  {text}\n" for name, text in generators.DESCRIPTIONS.items())
    parser = argparse.ArgumentParser(
        prog="kvcast demo",
        description=_DESCRIPTION + listed,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--workload", choices=generators.NAMES, default="mix", help="see above")
    what.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a trace in Mooncake's JSONL form: timestamp (ms), input_length, output_length, "
        "hash_ids; as much of it as fits is replayed",
    )
    network = parser.add_mutually_exclusive_group()
    network.add_argument("--nodes", type=int, default=8, help="inference nodes, 1 to 32")
    network.add_argument(
        "--topology",
        metavar="FILE",
        help="a star as TOML or JSON: nodes = 8, or hosts with node_id, ip, mac, switch_port",
    )
    parser.add_argument(
        "--seconds-budget",
        type=float,
        default=150.0,
        metavar="S",
        help="about how long it may take",
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        metavar="X",
        help="seconds of the trace in one second of replay (default: what makes it fit)",
    )
    parser.add_argument(
        "--dispatch",
        choices=generators.DISPATCHES,
        default="round-robin",
        help="how chats and traces are spread over the nodes: by a stateless router, or to the "
        "node that last served the prefix",
    )
    parser.add_argument(
        "--block-size", type=parse_size, metavar="SIZE", help="(default: scaled to the machine)"
    )
    parser.add_argument(
        "--link-rate",
        type=bit_rate(0, 10**12),
        metavar="BITS/S",
        help="rate of every node's link, each way, emulated at the switch's ports; 0 = none "
        "(default: so low that the links are the limit, and not this machine)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seeds the workload")
    parser.add_argument(
        "--runner",
        choices=["processes", "namespaces", "mininet"],
        default="processes",
        help="UDP tunnels (no root), network namespaces or Mininet (root)",
    )
    parser.add_argument("--switch", choices=["switchsim", "bmv2"], default="switchsim")
    parser.add_argument(
        "--kill",
        choices=outage.PARTS,
        help="kill that part with SIGKILL in the middle of the second replay, start it again two "
        "seconds later, and show the hit rate before, during and after; agent: one node's",
    )
    reports.add_json(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("kvcast-out"), metavar="DIR", help="picture, page, logs"
    )
    add_log_level(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 1 if it failed, delivered a wrong byte, or did not recover from --kill."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.time_scale is not None and not options.time_scale > 0:
        parser.error("--time-scale must be positive")
    if options.time_scale is not None and options.trace is None:
        parser.error("--time-scale goes with --trace")
    if not 20 <= options.seconds_budget <= 3600:
        parser.error("--seconds-budget must be between 20 and 3600")
    if options.kill and options.seconds_budget < _KILL_BUDGET_S:
        parser.error(f"--kill needs a --seconds-budget of at least {_KILL_BUDGET_S:.0f}")
    if not 1 <= options.nodes <= 32:
        parser.error("--nodes must be between 1 and 32")
    if options.block_size is not None and not 1024 <= options.block_size <= 1 << 20:
        parser.error("--block-size must be between 1 KiB and 1 MiB")
    return run_command(lambda: _demo(options), log_level=options.log_level)


async def _demo(options: argparse.Namespace) -> int:
    from rich.console import Console

    # With the report on standard output, everything for people goes to standard error.
    console = Console(stderr=options.json == "-")
    with reports.in_the_making(options.json) as so_far:
        report = await run(
            DemoOptions(
                workload=options.workload,
                trace=options.trace,
                star=Star.from_file(options.topology)
                if options.topology
                else Star.of(options.nodes),
                seconds_budget=options.seconds_budget,
                seed=options.seed,
                dispatch=options.dispatch,
                time_scale=options.time_scale,
                block_bytes=options.block_size,
                link_rate_bits_per_s=options.link_rate,
                runner=options.runner,
                switch=options.switch,
                run_dir=options.out / "logs",
                kill=options.kill,
            ),
            _TerminalReporter(console) if console.is_terminal else _LineReporter(console),
            so_far,
        )
    from kvcast.bench import picture

    png, page = picture.draw(report, options.out)
    if options.json:
        reports.write_json(options.json, report)
    _print_table(console, report)
    console.print(f"picture: {png}\npage:    {page}", highlight=False, soft_wrap=True)
    recovered = report.get("outage", {"recovered": True})["recovered"]
    return EXIT_OK if recovered and not report["wrong_bytes"] else EXIT_FAILED


def _print_table(console: Console, report: dict[str, Any]) -> None:
    from kvcast.bench import picture
    from rich.table import Table

    table = Table(
        title=f"{report['workload']['name']}, {report['parameters']['nodes']} nodes",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("plain switch", justify="right")
    table.add_column("kvcast", justify="right", style="bold green")
    for name, plain, kvcast in picture.table_rows(report):
        table.add_row(name, plain, kvcast)
    console.print(table)
    console.print(verdict(report), highlight=False)
    if "outage" not in report:  # or times are those of waiting for a part that is gone
        console.print(what_times_mean(report), highlight=False)
    else:
        console.print(what_it_cost(report["outage"], report["wrong_bytes"]), highlight=False)


def what_it_cost(cut: dict[str, Any], wrong_bytes: int) -> str:
    """What the killed part cost, in a few lines."""

    def rate(phase: str) -> str:
        value = cut[phase]["hit_rate"]
        return "nothing read" if value is None else f"{100 * value:.1f} %"

    during = cut["during"]
    return (
        f"{cut['killed']} was killed at {cut['killed_s']:.1f} s, ran again at "
        f"{cut['restarted_s']:.1f} s, and the pool was whole at {cut['restored_s']:.1f} s.\n"
        f"Hit rate: {rate('before')} before, {rate('during')} until then, {rate('after')} after. "
        f"Of {during['requests']} requests meanwhile {during['failed_requests']} failed at their "
        f"own agent; {during['misses']} blocks were missed; {wrong_bytes} bytes were wrong.\n"
        + ("The hit rate recovered." if cut["recovered"] else "The hit rate has NOT recovered.")
    )


def verdict(report: dict[str, Any]) -> str:
    """One sentence that says what the two ratios mean for this workload."""
    plain, kvcast = report["plain_home_egress_ratio"], report["home_egress_ratio"]
    if plain is None or kvcast is None:
        return "No block was fetched from another node: there was nothing for a switch to do."
    both = (
        f"Homes sent each fetched byte {plain:.2f} times through the plain switch and "
        f"{kvcast:.2f} times through kvcast: "
    )
    if kvcast > 0.9 * plain:
        return both + "reads hardly coincided, and kvcast gained nothing here."
    return both + f"{100 * (1 - kvcast / plain):.0f} % less on their links."


def what_times_mean(report: dict[str, Any]) -> str:
    """What the times of gets came to, and whose they are: the links' or this machine's."""
    rate, lone = report["link_rate_bps"], report["lone_get"]
    if not rate:
        return "Links had no rate here: the times are those of this machine, and say nothing else."
    before, now = report["plain_fetch_p99_ms"], report["fetch_p99_ms"]
    if before is None or now is None:
        return "No get had to wait for a link."
    told = f"99 of 100 gets took at most {before:.0f} ms plainly and {now:.0f} ms through kvcast. "
    busy = max(run["load"]["processors_busy_p95"] or 0.0 for run in report["runs"].values())
    how = (
        f"in 95 of 100 half seconds the processors were no more than {100 * busy:.0f} % busy with "
        "the pool"
    )
    if lone is not None:
        over = lone["ms"] / lone["link_ms"]
        how = f"a lone get took {over:.2f} times what its link needs, and {how}"
    if report["links_were_the_limit"]:
        return f"{told}These are times of links of {rate / 1e6:g} Mb/s, not of this machine: {how}."
    return f"{told}THIS MACHINE WAS TOO SLOW, or too busy, for links of {rate / 1e6:g} Mb/s: {how}."


class _LineReporter(Reporter):
    """Progress as a line every few seconds, for pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def phase(self, name: str, total: int) -> Callable[[int, int], None]:
        last = time.monotonic()
        self.say(f"{name}: {total} requests")

        def progress(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _EVERY_S:
                last = time.monotonic()
                self.say(f"{name}: {done} of {total} requests done")
                sys.stdout.flush()

        return progress


class _TerminalReporter(Reporter):
    """Progress as a bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def phase(self, name: str, total: int) -> Callable[[int, int], None]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        bar = Progress(
            TextColumn("{task.description:>13}"),
            BarColumn(),
            MofNCompleteColumn(),
            Elapsed(),
            console=self._console,
        )
        bar.start()
        task = bar.add_task(name, total=total)
        self._bar = bar
        return lambda done, _total: bar.update(task, completed=done)

    def end_phase(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
