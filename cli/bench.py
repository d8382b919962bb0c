"""`kvcast bench`: help and tables for the benches.

The benches are in kvcast.bench and kvcast.simulation. Their options, which make the flags, are
stated there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvcast.cli.tables import table_of
from kvcast.service import reports
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, add_log_level, run_command
from kvcast.service.options import HelpFormatter, add_options, made_of

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
  kvcast bench incast --resident --readers 8
  kvcast bench incast --resident --resident-part 0.34 --readers 4 --blocks 96 \\
    --link-rate 100e6 --queue 512"""

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
sink, or come back wrong? Parts are killed and stopped, nodes are drained and taken back, or go and
join anew, agents are replaced by others over the arena that they keep, clients die with pins,
frames are lost, hostile frames and bytes go into every entry point, an operator makes namespaces
and pins. Below DRAM are further arenas, disks and an object store; namespaces have policies of
their own, and one lives by age. The seed says what is where, and what strikes when. The load is the
demo's mix, without end, as fast as this machine allows; every byte is checked, and while blocks
move from node to node, no get of some that must be there may fail.

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
about 20 minutes for the switch and half of the agents, and 40 for the controller. In less than 10
minutes the tiers are still filling, and the hit rate sinks for that alone."""


_SOAK_OUT = Path("kvcast-soak")


class _Bench(NamedTuple):
    """What the help says of a bench."""

    text: str
    description: str
    examples: str = ""


_BENCHES = {
    "incast": _Bench("N nodes read the same blocks at once", _INCAST, _INCAST_EXAMPLES),
    "incast-simulation": _Bench(
        "the same on fast links, in virtual time (a simulation)", _SIMULATION
    ),
    "hostile": _Bench("mutated frames and bytes into every entry point of a pool", _HOSTILE),
    "soak": _Bench(
        "a pool under load and faults, or a switch under a flood, for long: is it flat?",
        _SOAK,
        _SOAK_EXAMPLES,
    ),
}


def _parser_for(chosen: str) -> argparse.ArgumentParser:
    """The parser of `kvcast bench`. Only the chosen bench gets its flags: to know them, its module
    must be imported."""
    parser = argparse.ArgumentParser(
        prog="kvcast bench", description="Measure one thing.", formatter_class=HelpFormatter
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, (text, description, examples) in _BENCHES.items():
        bench = benches.add_parser(
            name, help=text, description=description, epilog=examples, formatter_class=HelpFormatter
        )
        if name == chosen == "soak":
            _soak_flags(bench)
        elif name == chosen:
            add_options(bench, _options_of(name))
        reports.add_json(bench)
        add_log_level(bench)
    return parser


def _options_of(name: str) -> type:
    if name == "incast":
        from kvcast.bench.incast import IncastOptions

        return IncastOptions
    if name == "incast-simulation":
        from kvcast.simulation.incast import SimulationOptions

        return SimulationOptions
    from kvcast.bench.hostile import HostileOptions

    return HostileOptions


def _soak_flags(parser: argparse.ArgumentParser) -> None:
    from kvcast.bench.soak.options import SeededOptions, SoakOptions, SwitchSoakOptions

    parser.add_argument("--what", choices=("pool", "switch"), default="pool", help="see above")
    add_options(parser, SeededOptions)
    pool = parser.add_argument_group("of a pool")
    of_pool = add_options(pool, SoakOptions)
    pool.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=argparse.SUPPRESS,
        help=f"picture and logs (default: {_SOAK_OUT})",
    )
    of_switch = add_options(parser.add_argument_group("of a switch"), SwitchSoakOptions)
    parser.set_defaults(flags_of={"pool": [*of_pool, "out"], "switch": of_switch})


def main(argv: Sequence[str] | None = None) -> int:
    """Run a bench; 1 if it failed or delivered a wrong byte."""
    words = sys.argv[1:] if argv is None else argv
    parser = _parser_for(words[0] if words else "")
    options = parser.parse_args(words)
    if options.bench == "soak":
        for what, names in options.flags_of.items():
            for name in names:
                if what != options.what and name in options:
                    parser.error(f"--{name.replace('_', '-')} goes with --what {what}")
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
        asked = made_of(incast.IncastOptions, vars(options))
        report = await incast.run(replace(asked, log_level=options.log_level), so_far)
    reports.report_to(options.json, report, _print_incast)
    return EXIT_FAILED if report["wrong_bytes"] else EXIT_OK


async def _run_simulation(options: argparse.Namespace) -> int:
    from kvcast.simulation import incast as incast_simulation

    report = incast_simulation.run(made_of(incast_simulation.SimulationOptions, vars(options)))
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
        report = await hostile.run(made_of(hostile.HostileOptions, vars(options)), so_far)
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
    from kvcast.bench.soak.options import SoakOptions

    out = getattr(options, "out", _SOAK_OUT)
    asked = replace(made_of(SoakOptions, vars(options)), run_dir=out / "logs")
    report = await pool.run(asked, tell, so_far)
    reports.report_to(options.json, report, _print_soak)
    picture = soak_picture.draw(report, out)
    if options.json != "-":
        print(f"picture: {picture}")
    return EXIT_OK if report["passed"] else EXIT_FAILED


async def _soak_switch(
    options: argparse.Namespace, so_far: dict[str, Any], tell: Callable[[str], None]
) -> int:
    from kvcast.bench.soak import switch
    from kvcast.bench.soak.options import SwitchSoakOptions

    report = await switch.run(made_of(SwitchSoakOptions, vars(options)), tell, so_far)
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
    print("from: " + ", ".join(f"{tier} {n:,}" for tier, n in report["hits"].items()))
    parameters = report["parameters"]
    for node, tiers in parameters["tiers"].items():
        keeps = ["keeps its arena"] if node in parameters["arenas_kept"] else []
        print(f"{node}: {', '.join(['DRAM', *tiers, *keeps])}")
    for settings in parameters["namespaces"]:
        print("namespace: " + ", ".join(f"{name} {value}" for name, value in settings.items()))
    for kind, took in report["moves"].items():
        if took["count"]:
            print(f"{kind}: median {took['median_s']:g} s, longest {took['longest_s']:g} s")
    print("witness: " + ", ".join(f"{what} {n:,}" for what, n in report["witness"].items()))
    print(f"objects deleted from the object store: {report['objects_deleted']:,}")
    faults = [(kind, f"{count:,}") for kind, count in report["faults"].items()]
    console.print(table_of(("kind", "times"), faults, title="faults", left=("kind",)))
    criteria = [
        (each["name"], each["demand"], each["found"], "holds" if each["holds"] else "FAILS")
        for each in report["criteria"]
    ]
    columns = ("", "must hold", "found", "")
    console.print(table_of(columns, criteria, title="criteria", left=columns))
    print("passed" if report["passed"] else "failed")
