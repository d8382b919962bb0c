"""What the commands that measure engines have in common.

Owns: how such a measurement runs, reports and fails, also half-way. Must not know: what is
measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Any

from kvcast.bench.engines.engine import EngineError
from kvcast.service import reports
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, CommandError
from kvcast.topologies.part import PartError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where engines come from, and where what they say is kept."""
    reports.add_json(parser)
    parser.add_argument("--python", default=".venv-engines/bin/python", help="the engines' Python")
    parser.add_argument("--logs", metavar="FOLDER", help="keep all logs here")


async def measured(
    arguments: argparse.Namespace,
    run: Callable[[argparse.Namespace, dict[str, Any]], Awaitable[dict[str, Any]]],
    show: Callable[[dict[str, Any]], None],
    is_wrong: Callable[[dict[str, Any]], bool],
) -> int:
    """Measure, and report where --json says; the exit status. `run` is given the report in the
    making; `is_wrong`: whether what the report says is a failure."""
    with reports.in_the_making(arguments.json) as so_far:
        try:
            report = await run(arguments, so_far)
        except (EngineError, PartError) as error:
            raise CommandError(str(error)) from error
        so_far |= report
    reports.report_to(arguments.json, report, show)
    return EXIT_FAILED if is_wrong(report) else EXIT_OK
