"""`kvcast load`: put a folder of files, a model's weights mostly, into the pool."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvcast.cli.blocks import run_block_command
from kvcast.cli.controller_api import (
    ControllerApi,
    add_controller_options,
    check_api_options,
    controller_api,
)
from kvcast.cli.folders import bar, connected_to_folder, folder_parser, named
from kvcast.hostagent.models.loading import Loader, most_room, sources
from kvcast.hostagent.models.manifest import DEFAULT_BLOCK_BYTES, MIN_BLOCK_BYTES
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES
from kvcast.service.commands import EXIT_OK, CommandError
from kvcast.service.values import TextError, format_size, parse_size

_NAMESPACES = "/v1/namespaces"
_EXAMPLES = """\
examples:
  kvcast load --socket /run/kvcast/agent.sock --model /models/llama-8b
  kvcast load --socket /run/kvcast/agent.sock --model /models/llama-8b --model-version 2
  kvcast load --socket /run/kvcast/agent.sock --model /models/llama-8b --assure
  kvcast fetch --socket /run/kvcast/agent.sock --model llama-8b --to /local/llama-8b   (any node)"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast load`."""
    parser = folder_parser(
        "kvcast load",
        "Put a folder of files into the pool, block by block, and print its identity. What the pool"
        " holds already is not put again. The pool is a cache: what is not asked for gives way to"
        " what is, so fetch it while it is there, or have its room assured.",
        _EXAMPLES,
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="the folder, with all in it"
    )
    parser.add_argument("--name", help="its name in the pool (default: the folder's)")
    parser.add_argument(
        "--block-size",
        type=_block_size,
        default=format_size(DEFAULT_BLOCK_BYTES),
        metavar="SIZE",
        help="of the blocks that files are cut into",
    )
    assuring = parser.add_argument_group(
        "assuring", "what --assure asks of the controller, which lets operators alone"
    )
    assuring.add_argument(
        "--assure",
        action="store_true",
        help="let no other namespace's blocks take the folder's room in DRAM, on any node, until"
        " kvcast namespace set NUMBER --assured dram=0, or delete NUMBER; if the load fails, all is"
        " as it was",
    )
    add_controller_options(assuring)
    return parser


def _block_size(text: str) -> int:
    size = parse_size(text)
    if not MIN_BLOCK_BYTES <= size <= MAX_BLOCK_BYTES:
        low, high = format_size(MIN_BLOCK_BYTES), format_size(MAX_BLOCK_BYTES)
        raise TextError(f"{text[:80]} is not from {low} to {high}")
    return size


def main(argv: Sequence[str] | None = None) -> int:
    """Load a folder; 1 if it cannot be read, or the pool has no room for it."""
    parser = build_parser()
    return run_block_command(parser, argv, lambda options: _load(parser, options))


async def _load(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.assure:
        check_api_options(parser, options)
    name = options.name or options.model.resolve().name
    named(name)
    found = sources(options.model)
    total = sum(source.size_bytes for source in found)
    async with connected_to_folder(options, name, makes=True) as (client, namespace):
        assuring: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if options.assure:
            room_bytes = most_room(found, options.block_size)
            assuring = _assured(controller_api(options), namespace, room_bytes)
        async with assuring:  # first: else what others put meanwhile may displace what is there
            with bar(f"loading {name}", total, quiet=options.json) as advance:
                loader = Loader(client, namespace, options.block_size)
                loaded = await loader.load(found, name, options.model_version, advance)
    if options.json:
        print(json.dumps(vars(loaded) | {"name": name, "namespace": namespace}))
    else:
        print(
            f"{name}: {loaded.files} files, {loaded.size_bytes:,} bytes in {loaded.blocks} blocks,"
            f" of which {loaded.put_blocks} are new"
            f"{f', assured as namespace {namespace}' if options.assure else ''}\n{loaded.identity}"
        )
    return EXIT_OK


@contextlib.asynccontextmanager
async def _assured(api: ControllerApi, namespace: int, room_bytes: int) -> AsyncIterator[None]:
    """Have a namespace assured of so much DRAM, if it is not of that or more; where what is done
    within fails or is interrupted, of what it was before."""

    async def assure(shares: dict[str, int]) -> None:
        settings = {"assured_bytes": shares}
        await api("PATCH", _NAMESPACES, {"namespace": namespace, "settings": settings})

    known = (await api("GET", _NAMESPACES))["namespaces"]
    shares = (i["settings"]["assured_bytes"] for i in known if i["namespace"] == namespace)
    before: dict[str, int] = next(shares, {})
    if before.get("dram", 0) >= room_bytes:
        yield
        return
    is_assured = False
    try:
        await assure({**before, "dram": room_bytes})
        is_assured = True
        yield
    except BaseException:  # an interrupt, too, even of the question itself
        try:
            await assure(before)
        except CommandError as error:
            if is_assured:
                sys.stderr.write(f"namespace {namespace} stays assured of the room: {error}\n")
        raise
