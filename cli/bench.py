"""`kvcast bench`: flags and tables for the benches. The benches themselves are in kvcast.bench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvcast.service import reports
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.values import parse_size

_INCAST = """\
N nodes read the same blocks, which one home holds, at the same moment: first through a plain
switch, then through kvcast. How often does each byte leave its home?

home_egress_ratio = payload bytes that the home sent / bytes of the distinct blocks.

With --resident: the blocks are pinned into the switch and filled by one node's read; then the
home is stopped, and N other nodes read. The home must send nothing."""

_INCAST_EXAMPLES = """\
examples:
  kvcast bench incast --readers 8 --json incast.json
  kvcast bench incast --readers 8 --loss 0.01 --rounds 3
  kvcast bench incast --readers 8 --home-rate 1000    a link that is the bottleneck
  kvcast bench incast --readers 4 --runner namespaces --switch bmv2     (root, BMv2 installed)
  kvcast bench incast --resident --readers 8"""

_SIMULATION = """\
The incast in virtual time: the real cores, frames, P4 program, tables and port queues, but links
with any rate, a clock that waits for everybody, and hosts whose processors cost nothing. So it
says what protocol and network cost, not what a machine can do.

One home; N readers start within --spread-ns of each other. Three runs: one reader alone, N through
a plain switch, N through kvcast. over_one_reader = the slowest of N / one reader alone."""

_HOSTILE = """\
Mutated frames into the switch's ports and into an agent's UDP port, mutated bytes into the Unix
socket and into the HTTP API of a running pool: nothing may crash or hang, memory stays flat, and
the pool still works afterwards. And everything is accounted for: what the attacker sent is, to the
last frame, connection and answer, what the kernel and the attacked part count; the sums are
printed, and one that does not come out fails the bench."""


_SOAK = """\
--what pool: a whole pool under load and faults for as long as you like: does anything grow, hang,
sink, or come back wrong? Parts are killed and stopped, clients die with pins, frames are lost,
hostile frames and bytes go into every entry point, an operator makes namespaces and pins; a seeded
plan says when. The load is the demo's mix, without end, as fast as this machine allows; every byte
is checked.

Of every process: memory of its own (MiB), descriptors, threads. Of the load: hit rate = blocks that
came / blocks that a pool which loses and evicts nothing would have held, wrong bytes, blocks a
second, fetch times. It ends with a table of criteria, and with status 1 where one does not hold.

--what switch: one switch process under a flood of frames, damaged ones among them: does its memory
stay flat? Status 1 where it grows."""

_SOAK_EXAMPLES = """\
examples:
  kvcast bench soak --minutes 60 --json soak.json --out soak-out      the hour
  kvcast bench soak --minutes 10 --seed 7
  kvcast bench soak --what switch --frames 100000000
soak.png in --out shows memory, descriptors and threads by part, hit rate, and the faults as marks;
--out keeps the logs, too. A process is judged for growth if it lived for 15 minutes; so that takes
about 20 minutes for the switch and half of the agents, and 40 for the controller."""


_SOAK_FLAGS = {"pool": ("minutes", "nodes", "loss", "arena_bytes", "out"), "switch": ("frames",)}
"""What goes with one --what only."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast bench`."""
    parser = argparse.ArgumentParser(
        prog="kvcast bench", description="Measure one thing.", formatter_class=HelpFormatter
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    incast = benches.add_parser(
        "incast",
        help="N nodes read the same blocks at once",
        description=_INCAST,
        epilog=_INCAST_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    incast.add_argument("--readers", type=int, default=8, metavar="N", help="nodes that read")
    incast.add_argument("--blocks", type=int, default=8, metavar="K", help="distinct blocks")
    incast.add_argument(
        "--block-size", type=parse_size, default="64KiB", metavar="SIZE", help="size of each block"
    )
    incast.add_argument(
        "--rounds", type=int, default=1, help="repetitions on one pool, each with fresh blocks"
    )
    incast.add_argument(
        "--loss",
        type=float,
        default=0.0,
        metavar="P",
        help="probability of losing a frame each time it crosses a link (switchsim)",
    )
    incast.add_argument("--seed", type=int, default=1, help="seeds the loss and the keys")
    incast.add_argument(
        "--gather-ms",
        type=int,
        metavar="MS",
        help="how long the readers, who know of the storm, let the home wait for joiners; by "
        "default 100 ms, and 12 ms a reader beyond eight, since they share this machine",
    )
    incast.add_argument(
        "--home-rate",
        type=float,
        default=0.0,
        metavar="FRAMES/S",
        help="most that the home sends, as its link would let it; unlimited if left out",
    )
    incast.add_argument(
        "--link-rate",
        type=float,
        default=0.0,
        metavar="BITS/S",
        help="emulate links of this speed (100e6 = 100 Mb/s), slow enough that this machine is not "
        "the limit, and say how much longer the last reader took than one reader alone",
    )
    incast.add_argument("--resident", action="store_true", help="ask the resident question")
    incast.add_argument(
        "--runner",
        choices=["processes", "namespaces", "mininet"],
        default="processes",
        help="UDP tunnels (no root), network namespaces or Mininet (root)",
    )
    incast.add_argument(
        "--switch",
        choices=["switchsim", "bmv2"],
        default="switchsim",
        help="kvcast's software switch, or simple_switch_grpc from the PATH or "
        "KVCAST_SIMPLE_SWITCH_GRPC",
    )
    _report_options(incast)
    simulation = benches.add_parser(
        "incast-simulation",
        help="the same on fast links, in virtual time (a simulation)",
        description=_SIMULATION,
        formatter_class=HelpFormatter,
    )
    simulation.add_argument("--readers", type=int, default=8, metavar="N", help="nodes that read")
    simulation.add_argument("--blocks", type=int, default=1, metavar="K", help="distinct blocks")
    simulation.add_argument(
        "--block-size", type=parse_size, default="2MiB", metavar="SIZE", help="size of each block"
    )
    simulation.add_argument(
        "--link-rate", type=float, default=100e9, metavar="BITS/S", help="speed of every link"
    )
    simulation.add_argument(
        "--loss", type=float, default=0.0, metavar="P", help="of a frame at each port it crosses"
    )
    simulation.add_argument(
        "--spread-ns",
        type=int,
        default=2000,
        metavar="NS",
        help="the readers start within so much of each other; 2000 is about one round trip",
    )
    simulation.add_argument(
        "--gather-ms", type=int, default=0, metavar="MS", help="what READs let the home gather"
    )
    simulation.add_argument("--seed", type=int, default=1, help="seeds starts, losses and keys")
    _report_options(simulation, run_dir=False)
    hostile = benches.add_parser(
        "hostile",
        help="mutated frames and bytes into every entry point of a pool",
        description=_HOSTILE,
        formatter_class=HelpFormatter,
    )
    hostile.add_argument(
        "--frames",
        type=int,
        default=100_000,
        metavar="N",
        help="frames into each of the data-plane entry points; the streams get as many bytes",
    )
    hostile.add_argument("--nodes", type=int, default=3, help="nodes of the pool")
    hostile.add_argument("--seed", type=int, default=1, help="seeds the mutations")
    _report_options(hostile)
    soak = benches.add_parser(
        "soak",
        help="a pool under load and faults, or a switch under a flood, for long: is it flat?",
        description=_SOAK,
        epilog=_SOAK_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    soak.add_argument("--what", choices=["pool", "switch"], default="pool", help="see above")
    soak.add_argument("--seed", type=int, default=1, help="seeds the plan of faults and the load")
    of_pool = soak.add_argument_group("of a pool")
    of_pool.add_argument(
        "--minutes", type=float, default=10.0, help="how long faults and load go on"
    )
    of_pool.add_argument(
        "--nodes", type=int, default=6, help="nodes with an agent; one more is the attacker's"
    )
    of_pool.add_argument(
        "--loss",
        type=float,
        default=0.002,
        metavar="P",
        help="probability of losing a frame each time it crosses a link",
    )
    of_pool.add_argument(
        "--arena-bytes",
        type=parse_size,
        default="32MiB",
        metavar="SIZE",
        help="memory of each agent for blocks; small, so that it evicts all the time",
    )
    of_pool.add_argument(
        "--out", type=Path, default=Path("kvcast-soak"), metavar="DIR", help="picture and logs"
    )
    of_switch = soak.add_argument_group("of a switch")
    of_switch.add_argument(
        "--frames", type=int, default=2_000_000, metavar="N", help="frames to process"
    )
    _report_options(soak, run_dir=False)
    return parser


def _report_options(parser: argparse.ArgumentParser, *, run_dir: bool = True) -> None:
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the report there (- = stdout); one that ended early says why (incomplete)",
    )
    if run_dir:
        parser.add_argument("--run-dir", metavar="DIR", type=Path, help="keep all logs there")
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="warning",
        help="debug shows tracebacks",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a bench; 1 if it failed or delivered a wrong byte."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.bench == "soak":
        defaults = vars(parser.parse_args(["soak"]))
        for what, flags in _SOAK_FLAGS.items():
            for flag in flags:
                if what != options.what and getattr(options, flag) != defaults[flag]:
                    parser.error(f"--{flag.replace('_', '-')} goes with --what {what}")
    command = {
        "incast": _run_incast,
        "incast-simulation": _run_simulation,
        "hostile": _run_hostile,
        "soak": _run_soak,
    }[options.bench]
    return run_command(lambda: command(options), log_level=options.log_level)


async def _run_incast(options: argparse.Namespace) -> int:
    from kvcast.bench import incast

    with reports.in_the_making(options.json) as so_far:
        report = await incast.run(
            incast.IncastOptions(
                readers=options.readers,
                blocks=options.blocks,
                block_bytes=options.block_size,
                rounds=options.rounds,
                loss=options.loss,
                seed=options.seed,
                gather_ms=options.gather_ms,
                home_rate=options.home_rate,
                link_rate=options.link_rate,
                resident=options.resident,
                runner=options.runner,
                switch=options.switch,
                run_dir=options.run_dir,
            ),
            so_far,
        )
    reports.report_to(options.json, report, _print_incast)
    return EXIT_FAILED if report["wrong_bytes"] else EXIT_OK


async def _run_simulation(options: argparse.Namespace) -> int:
    from kvcast.simulation import incast as incast_simulation

    report = incast_simulation.run(
        incast_simulation.SimulationOptions(
            readers=options.readers,
            blocks=options.blocks,
            block_bytes=options.block_size,
            link_rate_bits_per_s=options.link_rate,
            loss=options.loss,
            spread_ns=options.spread_ns,
            gather_ms=options.gather_ms,
            seed=options.seed,
        )
    )
    reports.report_to(options.json, report, _print_simulation)
    return EXIT_FAILED if report["wrong_bytes"] else EXIT_OK


def _print_simulation(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    parameters = report["parameters"]
    table = Table()
    for title in ("", "one reader", "plain switch", "kvcast"):
        table.add_column(title, justify="right" if title else "left")
    names = ("one_reader", "plain", "kvcast")
    ratios = ("", report["plain_home_egress_ratio"], report["home_egress_ratio"])
    table.add_row("home egress ratio", *(str(ratio) for ratio in ratios))
    for share in ("p50", "max"):
        times = (report["fetch_us"][name][share] for name in names)
        shown = ("–" if time_us is None else f"{time_us:,.1f}" for time_us in times)
        table.add_row(f"fetch time {share}, µs", *shown)
    slower = (report["over_one_reader"].get(name, 1) for name in names)
    table.add_row("slowest over one reader", *(str(times) for times in slower))
    drops = (report["queue_drops"][name] for name in names)
    table.add_row("frames that found a full queue", *(f"{count:,}" for count in drops))
    console = Console()
    console.print(
        f"simulation: {parameters['readers']} readers, {parameters['blocks']} blocks of "
        f"{parameters['block_bytes']:,} bytes, links of "
        f"{parameters['link_rate_bits_per_s'] / 1e9:g} Gb/s, loss {parameters['loss']:g}; "
        f"misses {report['misses']}, wrong bytes {report['wrong_bytes']}",
        highlight=False,
    )
    console.print(table)


def _print_incast(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    parameters, runs = report["parameters"], report["runs"]
    titles = {"one_reader": "one reader", "plain": "plain switch", "kvcast": "kvcast"}
    columns = [name for name in titles if name in runs]
    table = Table()
    table.add_column("")
    for name in columns:
        table.add_column(titles[name], justify="right")

    def row(label: str, value: Any) -> None:
        table.add_row(label, *(str(value(runs[name])) for name in columns))

    row("home egress ratio", lambda run: run["home_egress_ratio"])
    row("bytes that left the home", lambda run: f"{run['home_egress_bytes']:,}")
    for share in ("p50", "p99", "max"):
        row(f"fetch time {share}, ms", lambda run, share=share: run["fetch_ms"][share])
    if over_one := report["over_one_reader"]:
        table.add_row("slowest over one reader", *(str(over_one.get(name, 1)) for name in columns))
    for tier in next(iter(runs.values()))["hits"]:
        if any(run["hits"][tier] for run in runs.values()):
            row(f"blocks: {tier}", lambda run, tier=tier: run["hits"][tier])
    row("gets", lambda run: run["gets"])
    row("misses", lambda run: run["misses"])
    row("wrong bytes", lambda run: run["wrong_bytes"])
    console = Console()
    console.print(
        f"{report['bench']}: {parameters['readers']} readers, {parameters['blocks']} blocks "
        f"of {parameters['block_bytes']:,} bytes, loss {parameters['loss']:g}, "
        f"{parameters['switch']} over {parameters['runner']}",
        highlight=False,
    )
    console.print(table)


async def _run_hostile(options: argparse.Namespace) -> int:
    from kvcast.bench import hostile

    with reports.in_the_making(options.json) as so_far:
        report = await hostile.run(
            hostile.HostileOptions(
                frames=options.frames,
                nodes=options.nodes,
                seed=options.seed,
                run_dir=options.run_dir,
            ),
            so_far,
        )
    reports.report_to(options.json, report, _print_hostile)
    return EXIT_OK if report["passed"] else EXIT_FAILED


def _print_hostile(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="hostile input", title_justify="left")
    columns = ("entry_point", "sent", "bytes", "lost count of", "MiB before", "after", "growth")
    for name in columns:
        table.add_column(name, justify="left" if name == "entry_point" else "right")
    for entry_point in report["entry_points"]:
        table.add_row(
            entry_point["entry_point"],
            f"{entry_point['sent']:,}",
            f"{entry_point['sent_bytes']:,}",
            f"{sum(abs(balance['unaccounted']) for balance in entry_point['balances']):,}",
            f"{entry_point['rss_before_mib']:.1f}",
            f"{entry_point['rss_after_mib']:.1f}",
            f"{entry_point['rss_growth_mib']:+.1f}",
        )
    Console().print(table)
    for entry_point in report["entry_points"]:
        print(f"{entry_point['entry_point']}:")
        for balance in entry_point["balances"]:
            print(f"  {balance['of']}: {_side(balance['given'])} = {_side(balance['found'])}")
    for problem in report["problems"]:
        print(f"kvcast: {problem}")
    print("passed" if report["passed"] else "failed")


def _side(counts: dict[str, int]) -> str:
    return " + ".join(f"{count:,} {name}" for name, count in counts.items()) or "0"


async def _run_soak(options: argparse.Namespace) -> int:
    run = _soak_switch if options.what == "switch" else _soak_pool
    with reports.in_the_making(options.json) as so_far:
        return await run(options, so_far, lambda line: print(line, file=sys.stderr, flush=True))


async def _soak_pool(
    options: argparse.Namespace, so_far: dict[str, Any], tell: Callable[[str], None]
) -> int:
    from kvcast.bench.soak import picture as soak_picture
    from kvcast.bench.soak import pool

    report = await pool.run(
        pool.SoakOptions(
            minutes=options.minutes,
            nodes=options.nodes,
            seed=options.seed,
            loss=options.loss,
            arena_bytes=options.arena_bytes,
            run_dir=options.out / "logs",
        ),
        tell,
        so_far,
    )
    reports.report_to(options.json, report, _print_soak)
    picture = soak_picture.draw(report, options.out)
    if options.json != "-":
        print(f"picture: {picture}")
    return EXIT_OK if report["passed"] else EXIT_FAILED


async def _soak_switch(
    options: argparse.Namespace, so_far: dict[str, Any], tell: Callable[[str], None]
) -> int:
    from kvcast.bench.soak import switch

    report = await switch.run(options.frames, tell, seed=options.seed, so_far=so_far)
    reports.report_to(options.json, report, _print_switch_soak)
    return EXIT_OK if report["growth_mib"] <= switch.GROWTH_LIMIT_MIB else EXIT_FAILED


def _print_switch_soak(report: dict[str, Any]) -> None:
    print(
        f"{report['frames']:,} frames in {report['seconds']} s; resident memory "
        f"{report['resident_mib_early']} MiB early, {report['resident_mib_last']} MiB at last"
    )


def _print_soak(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    windows = report["windows"]
    p50 = sorted(w["fetch_p50_ms"] for w in windows if w["fetch_p50_ms"] is not None)
    p99 = sorted(w["fetch_p99_ms"] for w in windows if w["fetch_p99_ms"] is not None)
    fetches = "none"
    if p50:
        fetches = f"p50 {p50[len(p50) // 2]:.0f} ms, p99 {p99[len(p99) // 2]:.0f} ms"
    console.print(
        f"soak: {report['seconds'] / 60:.1f} min, {report['parameters']['nodes']} nodes; "
        f"{report['blocks_delivered']:,} blocks delivered and {report['blocks_put']:,} put, "
        f"{report['blocks_per_s']:g} blocks/s, {report['mib_per_s']:g} MiB/s; "
        f"{report['misses']:,} misses, {report['wrong_bytes']} wrong bytes; "
        f"fetches (median of windows): {fetches}",
        highlight=False,
    )
    faults = Table(title="faults", title_justify="left")
    faults.add_column("kind")
    faults.add_column("times", justify="right")
    for kind, count in report["faults"].items():
        faults.add_row(kind, f"{count:,}")
    console.print(faults)
    criteria = Table(title="criteria", title_justify="left")
    for name in ("", "must hold", "found", ""):
        criteria.add_column(name)
    for each in report["criteria"]:
        criteria.add_row(
            each["name"], each["demand"], each["found"], "holds" if each["holds"] else "FAILS"
        )
    console.print(criteria)
    print("passed" if report["passed"] else "failed")
