"""`kvcast agent fsck`: is everything whole that a stopped agent has left on disk and in its arena?

Owns: the command line, and how the outcome is told. Must not know: what is looked at
(`kvcast.hostagent.tiers.ssd.fsck`).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvcast.hostagent.standing import index_beside
from kvcast.hostagent.tiers.arena import ArenaError
from kvcast.hostagent.tiers.index import Index
from kvcast.hostagent.tiers.kept import open_stopped
from kvcast.hostagent.tiers.ssd.fsck import Report, check_arena, check_ssd
from kvcast.hostagent.tiers.ssd.layout import SsdError, head_of
from kvcast.hostagent.tiers.ssd.mapped import open_arena
from kvcast.protocol.messages import shared
from kvcast.service.commands import EXIT_FAILED, EXIT_OK, EXIT_USAGE, command_parser
from kvcast.service.reports import write_json

_DESCRIPTION = """\
Reads every block that a stopped agent has left in the files of --ssd, or in an arena that it has
kept, and compares it with its digest. An agent does not need this: it looks at a block before it
gives it to anybody. With --repair, entries of blocks that are not whole are taken out; no block's
bytes are changed. Exit status: 0 everything is whole, or was mended; 1 something is not."""

_EXAMPLES = """\
examples:
  kvcast agent fsck --ssd /nvme0/kvcast.ssd --ssd /nvme1/kvcast.ssd
  kvcast agent fsck --ssd /nvme0/kvcast.ssd --repair --json report.json
  kvcast agent fsck --arena-path /dev/shm/kvcast.arena"""

MAX_NAMED = 20
"""Damaged blocks that are named; the JSON report has all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `kvcast agent fsck`."""
    parser = command_parser("kvcast agent fsck", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--ssd", action="append", default=[], metavar="FILE", help="repeatable")
    parser.add_argument("--arena-path", metavar="FILE", help="a kept arena")
    parser.add_argument("--index-path", metavar="FILE", help="its index, if not beside it")
    parser.add_argument("--repair", action="store_true", help="take out what is not whole")
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    if not options.ssd and options.arena_path is None:
        print(
            "kvcast agent fsck: name files by --ssd, or an arena by --arena-path", file=sys.stderr
        )
        return EXIT_USAGE
    reports: list[Report] = []
    failed = False
    for look in _looks(options):
        try:
            reports.append(look())
        except (SsdError, ArenaError, OSError) as error:
            print(f"kvcast agent fsck: {error}", file=sys.stderr)
            failed = True
    for report in reports:
        print("\n".join(described(report)))
    if options.json:
        try:
            write_json(options.json, [_plain(r) for r in reports])
        except OSError as error:
            print(f"kvcast agent fsck: {error}", file=sys.stderr)
            failed = True
    whole = all(report.is_clean or options.repair for report in reports)
    return EXIT_OK if whole and not failed else EXIT_FAILED


def _looks(options: argparse.Namespace) -> list[Callable[[], Report]]:
    looks: list[Callable[[], Report]] = [
        lambda path=path: _look_at_ssd(path, options.repair)  # type: ignore[misc]
        for path in options.ssd
    ]
    if options.arena_path is not None:
        index_path = options.index_path or index_beside(options.arena_path)
        looks.append(lambda: _look_at_arena(options.arena_path, index_path, options.repair))
    return looks


def _look_at_ssd(path: str, repair: bool) -> Report:
    file = open_arena(path, makes=False)
    try:
        formatted = head_of(file)
        file.use_direct()
        return check_ssd(file, formatted, repair=repair, seen=_progress(path))
    finally:
        file.close()


def _look_at_arena(path: str, index_path: str, repair: bool) -> Report:
    stopped = open_stopped(path, index_path, write=repair)
    try:
        head = bytes(stopped.index[: shared.HEADER.size])
        index = Index(stopped.index, len(stopped.arena), 1)
        stopped.index[: shared.HEADER.size] = head  # whose it was, it stays
        return check_arena(
            *(path, stopped.arena, index, stopped.slab_bytes),
            owner=stopped.owner,
            repair=repair,
            seen=_progress(path),
        )
    finally:
        stopped.close()


def _progress(path: str) -> Callable[[int, int], None]:
    """Say how far it is, on a terminal."""
    if not sys.stderr.isatty():
        return lambda _done, _all: None

    def seen(done: int, all_of_them: int) -> None:
        if done % 256 == 0 or done + 1 == all_of_them:
            end = "\n" if done + 1 == all_of_them else ""
            print(f"\r{path}: {done + 1} of {all_of_them}", end=end, file=sys.stderr, flush=True)

    return seen


def described(report: Report) -> list[str]:
    """A report as lines of text."""
    lines = [
        f"{report.path} (of {report.owner}): {report.blocks} blocks whole, "
        f"{report.block_bytes} bytes"
    ]
    for count, what in (
        (len(report.damaged), "damaged"),
        (report.overlapping, "where another lies"),
        (report.truncated, "beyond the end of the file"),
        (report.refused, "entries that do not prove themselves"),
        (report.unreadable_pages, "pages of the table that cannot be read"),
    ):
        if count:
            lines.append(f"  {count} {what}")
    for block in report.damaged[:MAX_NAMED]:
        lines.append(f"    {block.key.hex()} in namespace {block.namespace}")
    if len(report.damaged) > MAX_NAMED:
        lines.append(f"    and {len(report.damaged) - MAX_NAMED} more")
    if report.repaired:
        lines.append(f"  mended: {report.repaired} entries are taken out")
    return lines


def _plain(report: Report) -> dict[str, Any]:
    plain = dataclasses.asdict(report)
    plain["damaged"] = [
        {"namespace": block.namespace, "key": block.key.hex()} for block in report.damaged
    ]
    return plain | {"clean": report.is_clean}


if __name__ == "__main__":
    sys.exit(main())
