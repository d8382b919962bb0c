"""`kvcast bench`: flags and tables for the benches. The benches themselves are in kvcast.bench."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvcast.cli.tables import table_of
from kvcast.service import reports
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, add_log_level, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.values import parse_size

T = TypeVar("T")

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


class _Flag(NamedTuple):
    """A flag, named as the field of the bench's options that it sets."""

    field: str
    default: Any
    text: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    flag: str = ""
    """Its name, where that is not the field's."""


_BLOCK_SIZE = _Flag("block_bytes", "64KiB", "size of each block", "SIZE", flag="block-size")
_LOST = "probability of losing a frame each time it crosses a link"
_INCAST_FLAGS = (
    _Flag("readers", 8, "nodes that read", "N"),
    _Flag("blocks", 8, "distinct blocks", "K"),
    _BLOCK_SIZE,
    _Flag("rounds", 1, "repetitions on one pool, each with fresh blocks"),
    _Flag("loss", 0.0, f"{_LOST} (switchsim)", "P"),
    _Flag("seed", 1, "seeds the loss and the keys"),
    _Flag(
        "home_rate",
        0.0,
        "most that the home sends, as its link would let it; unlimited if left out",
        "FRAMES/S",
    ),
    _Flag(
        "link_rate",
        0.0,
        "emulate links of this speed (100e6 = 100 Mb/s), slow enough that this machine is not "
        "the limit, and say how much longer the last reader took than one reader alone",
        "BITS/S",
    ),
    _Flag(
        "runner",
        "processes",
        "UDP tunnels (no root), network namespaces or Mininet (root)",
        choices=("processes", "namespaces", "mininet"),
    ),
    _Flag(
        "switch",
        "switchsim",
        "kvcast's software switch, or simple_switch_grpc from the PATH or "
        "KVCAST_SIMPLE_SWITCH_GRPC",
        choices=("switchsim", "bmv2"),
    ),
)
_SIMULATION_FLAGS = (
    _Flag("readers", 8, "nodes that read", "N"),
    _Flag("blocks", 1, "distinct blocks", "K"),
    _BLOCK_SIZE._replace(default="2MiB"),
    _Flag("link_rate_bits_per_s", 100e9, "speed of every link", "BITS/S", flag="link-rate"),
    _Flag("loss", 0.0, "of a frame at each port it crosses", "P"),
    _Flag(
        "spread_ns",
        2000,
        "the readers start within so much of each other; 2000 is about one round trip",
        "NS",
    ),
    _Flag("gather_ms", 0, "what READs let the home gather", "MS"),
    _Flag(
        "stall_ms",
        0.0,
        "readers share processors, and wait for one for up to so long; 0: each has its own",
        "MS",
    ),
    _Flag("seed", 1, "seeds starts, losses and keys"),
)
_HOSTILE_FLAGS = (
    _Flag(
        "frames",
        100_000,
        "frames into each of the data-plane entry points; the streams get as many bytes",
        "N",
    ),
    _Flag("nodes", 3, "nodes of the pool"),
    _Flag("seed", 1, "seeds the mutations"),
)
_SOAK_FLAGS = {
    "pool": (
        _Flag("minutes", 10.0, "how long faults and load go on"),
        _Flag("nodes", 6, "nodes with an agent; one more is the attacker's"),
        _Flag("loss", 0.002, _LOST, "P"),
        _Flag(
            "arena_bytes",
            "32MiB",
            "memory of each agent for blocks; small, so that it evicts all the time",
            "SIZE",
        ),
        _Flag("out", Path("kvcast-soak"), "picture and logs", "DIR"),
    ),
    "switch": (_Flag("frames", 2_000_000, "frames to process", "N"),),
}
"""What goes with one --what only."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast bench`."""
    parser = argparse.ArgumentParser(
        prog="kvcast bench", description="Measure one thing.", formatter_class=HelpFormatter
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")

    def bench(name: str, text: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
        return benches.add_parser(
            name, help=text, description=description, epilog=epilog, formatter_class=HelpFormatter
        )

    incast = bench("incast", "N nodes read the same blocks at once", _INCAST, _INCAST_EXAMPLES)
    _add(incast, _INCAST_FLAGS)
    incast.add_argument(
        "--gather-ms",
        type=int,
        metavar="MS",
        help="how long the readers, who know of the storm, let the home wait for joiners; by "
        "default 100 ms, and 12 ms a reader beyond eight, since they share this machine",
    )
    incast.add_argument("--resident", action="store_true", help="ask the resident question")
    _report_options(incast)
    simulation = bench(
        "incast-simulation", "the same on fast links, in virtual time (a simulation)", _SIMULATION
    )
    _add(simulation, _SIMULATION_FLAGS)
    _report_options(simulation, run_dir=False)
    hostile = bench(
        "hostile", "mutated frames and bytes into every entry point of a pool", _HOSTILE
    )
    _add(hostile, _HOSTILE_FLAGS)
    _report_options(hostile)
    soak = bench(
        "soak",
        "a pool under load and faults, or a switch under a flood, for long: is it flat?",
        _SOAK,
        _SOAK_EXAMPLES,
    )
    soak.add_argument("--what", choices=list(_SOAK_FLAGS), default="pool", help="see above")
    _add(soak, (_Flag("seed", 1, "seeds the plan of faults and the load"),))
    for what, flags in _SOAK_FLAGS.items():
        _add(soak.add_argument_group(f"of a {what}"), flags)
    _report_options(soak, run_dir=False)
    return parser


def _add(parser: argparse._ActionsContainer, flags: Iterable[_Flag]) -> None:
    for field, default, text, metavar, choices, flag in flags:
        is_size = metavar == "SIZE"
        parser.add_argument(
            f"--{(flag or field).replace('_', '-')}",
            dest=field,
            type=parse_size if is_size else type(default),
            default=default,
            help=text,
            metavar=metavar,
            choices=choices,
        )


def _report_options(parser: argparse.ArgumentParser, *, run_dir: bool = True) -> None:
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the report there (- = stdout); one that ended early says why (incomplete)",
    )
    if run_dir:
        parser.add_argument("--run-dir", metavar="DIR", type=Path, help="keep all logs there")
    add_log_level(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a bench; 1 if it failed or delivered a wrong byte."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.bench == "soak":
        defaults = vars(parser.parse_args(["soak"]))
        for what, flags in _SOAK_FLAGS.items():
            for flag in flags:
                if what != options.what and getattr(options, flag.field) != defaults[flag.field]:
                    parser.error(f"--{flag.field.replace('_', '-')} goes with --what {what}")
    command = {
        "incast": _run_incast,
        "incast-simulation": _run_simulation,
        "hostile": _run_hostile,
        "soak": _run_soak,
    }[options.bench]
    return run_command(lambda: command(options), log_level=options.log_level)


def _made(kind: type[T], options: argparse.Namespace) -> T:
    """The bench's options, from the flags that set its fields."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(options).items() if name in names})


async def _run_incast(options: argparse.Namespace) -> int:
    from kvcast.bench import incast

    with reports.in_the_making(options.json) as so_far:
        report = await incast.run(_made(incast.IncastOptions, options), so_far)
    reports.report_to(options.json, report, _print_incast)
    return EXIT_FAILED if report["wrong_bytes"] else EXIT_OK


async def _run_simulation(options: argparse.Namespace) -> int:
    from kvcast.simulation import incast as incast_simulation

    report = incast_simulation.run(_made(incast_simulation.SimulationOptions, options))
    reports.report_to(options.json, report, _print_simulation)
    return EXIT_FAILED if report["wrong_bytes"] else EXIT_OK


def _print_simulation(report: dict[str, Any]) -> None:
    from rich.console import Console

    parameters = report["parameters"]
    names = ("one_reader", "plain", "kvcast")
    times = {share: [report["fetch_us"][name][share] for name in names] for share in ("p50", "max")}
    rows = [
        ("home egress ratio", "", report["plain_home_egress_ratio"], report["home_egress_ratio"]),
        *(
            (f"fetch time {share}, µs", *("–" if us is None else f"{us:,.1f}" for us in of_all))
            for share, of_all in times.items()
        ),
        ("slowest over one reader", *(report["over_one_reader"].get(name, 1) for name in names)),
        (
            "frames that found a full queue",
            *(f"{report['queue_drops'][name]:,}" for name in names),
        ),
    ]
    console = Console()
    console.print(
        f"simulation: {parameters['readers']} readers, {parameters['blocks']} blocks of "
        f"{parameters['block_bytes']:,} bytes, links of "
        f"{parameters['link_rate_bits_per_s'] / 1e9:g} Gb/s, loss {parameters['loss']:g}; "
        f"misses {report['misses']}, wrong bytes {report['wrong_bytes']}",
        highlight=False,
    )
    console.print(table_of(("", "one reader", "plain switch", "kvcast"), rows))


def _print_incast(report: dict[str, Any]) -> None:
    from rich.console import Console

    parameters, runs = report["parameters"], report["runs"]
    titles = {"one_reader": "one reader", "plain": "plain switch", "kvcast": "kvcast"}
    columns = [name for name in titles if name in runs]
    rows: list[tuple[Any, ...]] = []

    def row(label: str, value: Any) -> None:
        rows.append((label, *(value(runs[name]) for name in columns)))

    row("home egress ratio", lambda run: run["home_egress_ratio"])
    row("bytes that left the home", lambda run: f"{run['home_egress_bytes']:,}")
    for share in ("p50", "p99", "max"):
        row(f"fetch time {share}, ms", lambda run, share=share: run["fetch_ms"][share])
    if over_one := report["over_one_reader"]:
        rows.append(("slowest over one reader", *(over_one.get(name, 1) for name in columns)))
    for tier in next(iter(runs.values()))["hits"]:
        if any(run["hits"][tier] for run in runs.values()):
            row(f"blocks: {tier}", lambda run, tier=tier: run["hits"][tier])
    for name in ("gets", "misses", "wrong_bytes"):
        row(name.replace("_", " "), lambda run, name=name: run[name])
    console = Console()
    console.print(
        f"{report['bench']}: {parameters['readers']} readers, {parameters['blocks']} blocks "
        f"of {parameters['block_bytes']:,} bytes, loss {parameters['loss']:g}, "
        f"{parameters['switch']} over {parameters['runner']}",
        highlight=False,
    )
    console.print(table_of(("", *(titles[name] for name in columns)), rows))


async def _run_hostile(options: argparse.Namespace) -> int:
    from kvcast.bench import hostile

    with reports.in_the_making(options.json) as so_far:
        report = await hostile.run(_made(hostile.HostileOptions, options), so_far)
    reports.report_to(options.json, report, _print_hostile)
    return EXIT_OK if report["passed"] else EXIT_FAILED


def _print_hostile(report: dict[str, Any]) -> None:
    from kvcast.bench.balance import side_of
    from rich.console import Console

    columns = ("entry_point", "sent", "bytes", "lost count of", "MiB before", "after", "growth")
    rows = [
        (
            each["entry_point"],
            f"{each['sent']:,}",
            f"{each['sent_bytes']:,}",
            f"{sum(abs(balance['unaccounted']) for balance in each['balances']):,}",
            f"{each['rss_before_mib']:.1f}",
            f"{each['rss_after_mib']:.1f}",
            f"{each['rss_growth_mib']:+.1f}",
        )
        for each in report["entry_points"]
    ]
    Console().print(table_of(columns, rows, title="hostile input", left=("entry_point",)))
    for entry_point in report["entry_points"]:
        print(f"{entry_point['entry_point']}:")
        for balance in entry_point["balances"]:
            print(f"  {balance['of']}: {side_of(balance['given'])} = {side_of(balance['found'])}")
    for problem in report["problems"]:
        print(f"kvcast: {problem}")
    print("passed" if report["passed"] else "failed")


async def _run_soak(options: argparse.Namespace) -> int:
    run = _soak_switch if options.what == "switch" else _soak_pool
    with reports.in_the_making(options.json) as so_far:
        return await run(options, so_far, lambda line: print(line, file=sys.stderr, flush=True))


async def _soak_pool(
    options: argparse.Namespace, so_far: dict[str, Any], tell: Callable[[str], None]
) -> int:
    from kvcast.bench.soak import picture as soak_picture
    from kvcast.bench.soak import pool

    options.run_dir = options.out / "logs"
    report = await pool.run(_made(pool.SoakOptions, options), tell, so_far)
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
    faults = [(kind, f"{count:,}") for kind, count in report["faults"].items()]
    console.print(table_of(("kind", "times"), faults, title="faults", left=("kind",)))
    criteria = [
        (each["name"], each["demand"], each["found"], "holds" if each["holds"] else "FAILS")
        for each in report["criteria"]
    ]
    columns = ("", "must hold", "found", "")
    console.print(table_of(columns, criteria, title="criteria", left=columns))
    print("passed" if report["passed"] else "failed")
