"""What `kvcast load` and `kvcast fetch` share: how a folder in the pool is named, and a bar.

Owns: the namespace of a folder, and how progress is shown. Must not know: blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from kvcast.cli.blocks import connected, socket_parser
from kvcast.service.commands import CommandError
from kvcast.service.values import parse_name

if TYPE_CHECKING:
    from kvcast.hostagent.client import AsyncClient

LAYOUT = "folder"
_LONGEST_NAME = 200


def folder_parser(program: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with --socket, what names a folder beside --model, --json and --log-level."""
    parser = socket_parser(program, description, examples)
    parser.add_argument(
        "--tenant", type=parse_name, default="models", help="whose (default: %(default)s)"
    )
    parser.add_argument(
        "--model-version",
        type=parse_name,
        default="1",
        metavar="V",
        help="which version of it; another version is another namespace (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object, and no bar")
    return parser


def named(name: str) -> None:
    """CommandError for a name that a folder in the pool cannot have."""
    if not name or len(name) > _LONGEST_NAME or not name.isprintable():
        raise CommandError(f"{name[:40]!r} cannot be the name of a folder in the pool: give --name")


@contextlib.asynccontextmanager
async def connected_to_folder(
    options: argparse.Namespace, name: str, *, makes: bool = False
) -> AsyncIterator[tuple[AsyncClient, int]]:
    """A client of the agent, and the number of the folder's namespace, as `connected`."""
    options.namespace, options.model, options.layout = None, name, LAYOUT
    async with connected(options, makes=makes) as both:
        yield both


@contextlib.contextmanager
def bar(what: str, total_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Bytes, rate and time left, on a terminal's standard error; what is yielded counts bytes."""
    if quiet or not sys.stderr.isatty():
        yield lambda _size_bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)
