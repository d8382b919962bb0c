"""`kvcast get`: fetch one block through an agent on this machine, to a file or standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcast.cli.blocks import block_parser, connected, key_from, run_block_command
from kvcast.service.commands import EXIT_MISS, EXIT_OK, CommandError
from kvcast.service.values import number

_EXAMPLES = """\
examples:
  kvcast get --socket /tmp/node-2.sock 6fa1…  -o copy.md
  kvcast get --socket /tmp/node-2.sock 6fa1…  --tenant me --model folders | tar t"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast get`."""
    description = "Fetch a block. Exit status 3: it is not in the pool."
    parser = block_parser("kvcast get", description, _EXAMPLES)
    parser.add_argument("key", type=key_from, metavar="KEY", help="32 hexadecimal digits")
    parser.add_argument("-o", "--output", metavar="FILE", help="(default: standard output)")
    parser.add_argument(
        "--deadline",
        type=number(0.001, 3600),
        default=10.0,
        metavar="SECONDS",
        help="how long until it is a miss, 0.001 to 3600 s (default: %(default)g s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print size, digest and tier instead of the bytes"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch a block; 3 if it is not in the pool."""
    return run_block_command(build_parser(), argv, _get)


async def _get(options: argparse.Namespace) -> int:
    async with connected(options) as (client, namespace):
        (block,) = await client.get(namespace, [options.key], deadline_s=options.deadline)
        if block is None:
            print(f"kvcast: {options.key.hex()} is not in the pool", file=sys.stderr)
            return EXIT_MISS
        with block:
            if options.output is not None:
                try:
                    _write(Path(options.output), block.data)
                except OSError as error:
                    raise CommandError(f"{options.output}: {error.strerror or error}") from error
            if options.json:
                facts = {
                    "key": options.key.hex(),
                    "namespace": namespace,
                    "size_bytes": len(block.data),
                    "digest": f"{block.digest:016x}",
                    "tier": block.tier,
                }
                print(json.dumps(facts))
            elif options.output is None:
                sys.stdout.buffer.write(block.data)
                sys.stdout.buffer.flush()
    return EXIT_OK


def _write(output: Path, data: memoryview) -> None:
    with output.open("wb") as file:
        try:
            file.write(data)
            file.flush()
        except OSError:
            if output.is_file():  # a part of a block is nothing
                output.unlink()
            raise
