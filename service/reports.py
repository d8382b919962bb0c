"""Reports: where --json says, whole or marked as incomplete.

Owns: how a report gets into its file, and that a measurement which ends early leaves what it had.
Must not know: what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcast.service.commands import explain


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json, as all measurements have it."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the report there (- = stdout); one that ended early says why (incomplete)",
    )


def print_json(report: Mapping[str, Any]) -> None:
    """Show a report to people as it is."""
    write_json("-", report)


def report_to(
    path: str | Path | None,
    report: dict[str, Any],
    show: Callable[[dict[str, Any]], None] = print_json,
) -> None:
    """Write a report where --json says, if it does, and show it to people unless standard output
    has it already."""
    if path:
        write_json(path, report)
    if str(path) != "-":
        show(report)


@contextlib.contextmanager
def in_the_making(path: str | Path | None) -> Iterator[dict[str, Any]]:
    """A report to be filled while the measurements go on. Where they fail or are interrupted, what
    it holds by then is written where --json says, and `incomplete` in it says why."""
    so_far: dict[str, Any] = {}
    try:
        yield so_far
    except BaseException as error:
        if path and so_far:
            write_json(path, so_far | {"incomplete": why(error)})
            print(f"kvcast: what was measured before is in {path}", file=sys.stderr)
        raise


def say(text: str) -> None:
    """Tell whoever waits for a report what comes next."""
    print(f"kvcast: {text}", file=sys.stderr, flush=True)


def why(error: BaseException) -> str:
    """Why a measurement ended early."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "interrupted"
    return explain(error)


def write_json(path: str | Path, report: Mapping[str, Any] | list[Any]) -> None:
    """Write a report where --json says, whole or not at all; "-" is standard output."""
    text = json.dumps(report, indent=2, default=str) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # /dev/stderr, a pipe: nothing to put in its place
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
