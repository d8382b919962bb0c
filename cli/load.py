"""`kvcast load`: put a folder of files, a model's weights mostly, into the pool."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kvcast.cli.blocks import run_block_command
from kvcast.cli.folders import bar, connected_to_folder, folder_parser, named
from kvcast.hostagent.models.loading import Loader, sources
from kvcast.hostagent.models.manifest import DEFAULT_BLOCK_BYTES, MIN_BLOCK_BYTES
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES
from kvcast.service.commands import EXIT_OK
from kvcast.service.values import TextError, format_size, parse_size

_EXAMPLES = """\
examples:
  kvcast load --socket /run/kvcast/agent.sock --model /models/llama-8b
  kvcast load --socket /run/kvcast/agent.sock --model /models/llama-8b --model-version 2
  kvcast fetch --socket /run/kvcast/agent.sock --model llama-8b --to /local/llama-8b   (any node)"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast load`."""
    parser = folder_parser(
        "kvcast load",
        "Put a folder of files into the pool, block by block, and print its identity. What the pool"
        " holds already is not put again. The pool is a cache: what is not asked for gives way to"
        " what is, so fetch it while it is there.",
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
    return parser


def _block_size(text: str) -> int:
    size = parse_size(text)
    if not MIN_BLOCK_BYTES <= size <= MAX_BLOCK_BYTES:
        low, high = format_size(MIN_BLOCK_BYTES), format_size(MAX_BLOCK_BYTES)
        raise TextError(f"{text[:80]} is not from {low} to {high}")
    return size


def main(argv: Sequence[str] | None = None) -> int:
    """Load a folder; 1 if it cannot be read, or the pool has no room for it."""
    return run_block_command(build_parser(), argv, _load)


async def _load(options: argparse.Namespace) -> int:
    name = options.name or options.model.resolve().name
    named(name)
    found = sources(options.model)
    total = sum(source.size_bytes for source in found)
    async with connected_to_folder(options, name) as (client, namespace):
        with bar(f"loading {name}", total, quiet=options.json) as advance:
            loader = Loader(client, namespace, options.block_size)
            loaded = await loader.load(found, name, options.model_version, advance)
    if options.json:
        print(json.dumps(vars(loaded) | {"name": name, "namespace": namespace}))
    else:
        print(
            f"{name}: {loaded.files} files, {loaded.size_bytes:,} bytes in {loaded.blocks} blocks,"
            f" of which {loaded.put_blocks} are new\n{loaded.identity}"
        )
    return EXIT_OK
