"""`kvcast put`: store a file as one block, through an agent on this machine."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from kvcast.cli.blocks import (
    block_parser,
    connected,
    key_from,
    run_block_command,
    standard_input,
)
from kvcast.service.commands import EXIT_OK, CommandError

_EXAMPLES = """\
examples:
  kvcast put --socket /tmp/node-1.sock README.md
  tar c folder | kvcast put --socket /tmp/node-1.sock - --tenant me --model folders"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast put`."""
    description = "Store a file as one block, and print its key."
    parser = block_parser("kvcast put", description, _EXAMPLES)
    parser.add_argument("file", metavar="FILE", help="what to store (- = standard input)")
    parser.add_argument(
        "--key", type=key_from, metavar="HEX", help="its key (default: a hash of the bytes)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Store a file; 1 if it cannot be read or no home took it."""
    return run_block_command(build_parser(), argv, _put)


async def _put(options: argparse.Namespace) -> int:
    if options.file == "-":
        data = standard_input()
    else:
        try:
            data = Path(options.file).read_bytes()
        except OSError as error:
            raise CommandError(f"{options.file}: {error.strerror or error}") from error
    if not data:
        raise CommandError(f"{options.file} is empty, and a block has at least one byte")
    key = options.key or hashlib.blake2b(data, digest_size=16).digest()
    async with connected(options, makes=True) as (client, namespace):
        await client.put(namespace, {key: data})
    if options.json:
        facts = {"key": key.hex(), "namespace": namespace, "size_bytes": len(data)}
        print(json.dumps(facts))
    else:
        print(key.hex())
    return EXIT_OK
