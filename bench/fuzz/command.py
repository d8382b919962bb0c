"""The question: is there an input that an entry point does not take well, if one looks for longer?

Owns: the command line, and files of finds and inputs. Must not know: how inputs are made.

    python -m kvcast.bench.fuzz --target codec --seconds 600 --seed 7
    python -m kvcast.bench.fuzz --target p4runtime --replay FOLDER/p4runtime-0123456789abcdef

Exit status: 0 nothing found, 1 something was. A find is written to --finds, made small, with the
command that repeats it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvcast.bench.fuzz import (  # noqa: F401 - they register their targets
    arena,
    courier,
    departures,
    entry_points,
    kept,
    pushing,
    rdma_link,
    routing,
    shared_memory,
    ssd,
)
from kvcast.bench.fuzz.engine import Options, Report, Target, fuzz, tell
from kvcast.bench.fuzz.targets import TARGETS
from kvcast.service import reports

_EXAMPLES = """\
A find is an exception other than the entry point's named errors, a traceback in its log, an input
that takes longer than --limit, or memory that grows by more than --growth while inputs go by.

targets:
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's parser."""
    listed = "\n".join(f"  {name:20}{target.what}" for name, target in sorted(TARGETS.items()))
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.fuzz",
        description="Tells entry points hostile things, guided by the lines that they run.",
        epilog=_EXAMPLES + listed,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target",
        action="append",
        choices=[*sorted(TARGETS), "all"],
        default=[],
        help="which entry point (repeatable); all by default",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--inputs", type=int, help="for each target, where that is less")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds that an input may take")
    parser.add_argument("--growth", type=float, default=48.0, help="MiB that memory may grow by")
    parser.add_argument("--corpus", type=Path, help="folder of further inputs to begin with")
    parser.add_argument(
        "--finds",
        type=Path,
        default=Path(tempfile.gettempdir(), "kvcast-finds"),
        metavar="FOLDER",
        help="where finds go (default: %(default)s)",
    )
    reports.add_json(parser)
    parser.add_argument(
        "--replay", type=Path, help="tell one input to one target, and say how it went"
    )
    parser.add_argument(
        "--unguided",
        action="store_true",
        help="do not trace lines: several times as many inputs, each a blinder one",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz; 1 if something was found."""
    parser = build_parser()
    options = parser.parse_args(argv)
    chosen = sorted(TARGETS) if not options.target or "all" in options.target else options.target
    targets = [TARGETS[name] for name in dict.fromkeys(chosen)]
    if options.seconds <= 0 or options.limit <= 0:
        parser.error("--seconds and --limit must be positive")
    if options.replay is not None:
        if len(targets) != 1:
            parser.error("--replay needs one --target")
        return _replay(targets[0], options.replay, options.limit)
    found = []
    for target in targets:
        report = fuzz(
            target,
            Options(
                seed=options.seed,
                inputs=options.inputs,
                seconds=options.seconds,
                limit_s=options.limit,
                growth_mib=options.growth,
                guided=not options.unguided,
            ),
            _inputs_in(options.corpus),
        )
        found.append(report)
        _tell_of(report, options.finds)
        if options.json is not None:
            reports.write_json(options.json, [report.as_dict() for report in found])
    return int(any(report.finds for report in found))


def _inputs_in(folder: Path | None) -> list[bytes]:
    if folder is None:
        return []
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()]


def _tell_of(report: Report, folder: Path) -> None:
    rate = report.inputs / report.seconds if report.seconds else 0.0
    print(
        f"{report.target:20}{report.inputs:9} inputs  {rate:8.0f}/s  corpus {report.corpus:5}  "
        f"coverage {report.coverage:6}  growth {report.growth_mib:5.1f} MiB  "
        f"{len(report.finds)} finds",
        flush=True,
    )
    for find in report.finds:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / find.name
        path.write_bytes(find.data)
        print(f"  {find.kind}: {find.text}")
        print(f"  python -m kvcast.bench.fuzz --target {report.target} --replay {path}", flush=True)


def _replay(target: Target, path: Path, limit_s: float) -> int:
    import traceback

    harness = target.harness()
    try:
        error = tell(harness, path.read_bytes(), limit_s)
    finally:
        harness.close()
    if error is None:
        print("taken well")
        return 0
    traceback.print_exception(error)
    return 1
