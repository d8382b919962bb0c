"""`kvcast put`: store a file as one block, through an agent on this machine."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcast.cli.blocks import add_block_options, check_block_options, key_from, namespace_of
from kvcast.service.commands import EXIT_OK, CommandError, run_command
from kvcast.service.options import HelpFormatter

_EXAMPLES = """\
examples:
  kvcast put --socket /tmp/node-1.sock README.md
  tar c folder | kvcast put --socket /tmp/node-1.sock - --tenant me --model folders"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast put`."""
    parser = argparse.ArgumentParser(
        prog="kvcast put",
        description="Store a file as one block, and print its key.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="what to store (- = standard input)")
    parser.add_argument(
        "--key", type=key_from, metavar="HEX", help="its key (default: a hash of the bytes)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_block_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Store a file; 1 if it cannot be read or no home took it."""
    parser = build_parser()
    options = parser.parse_args(argv)
    check_block_options(parser, options)
    return run_command(lambda: _put(options), log_level=options.log_level)


async def _put(options: argparse.Namespace) -> int:
    from kvcast.hostagent.client import AsyncClient

    if options.file == "-":
        data = sys.stdin.buffer.read()
    else:
        try:
            data = Path(options.file).read_bytes()
        except OSError as error:
            raise CommandError(f"{options.file}: {error.strerror or error}") from error
    if not data:
        raise CommandError(f"{options.file} is empty, and a block has at least one byte")
    key = options.key or hashlib.blake2b(data, digest_size=16).digest()
    async with await AsyncClient.connect(str(options.socket)) as client:
        namespace = await namespace_of(client, options)
        await client.put(namespace, {key: data})
    if options.json:
        facts = {"key": key.hex(), "namespace": namespace, "size_bytes": len(data)}
        print(json.dumps(facts))
    else:
        print(key.hex())
    return EXIT_OK
