"""`kvcast get`: fetch one block through an agent on this machine, to a file or standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcast.cli.blocks import add_block_options, check_block_options, key_from, namespace_of
from kvcast.service.commands import EXIT_MISS, EXIT_OK, CommandError, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.values import number

_EXAMPLES = """\
examples:
  kvcast get --socket /tmp/node-2.sock 6fa1…  -o copy.md
  kvcast get --socket /tmp/node-2.sock 6fa1…  --tenant me --model folders | tar t"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast get`."""
    parser = argparse.ArgumentParser(
        prog="kvcast get",
        description="Fetch a block. Exit status 3: it is not in the pool.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
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
    add_block_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch a block; 3 if it is not in the pool."""
    parser = build_parser()
    options = parser.parse_args(argv)
    check_block_options(parser, options)
    return run_command(lambda: _get(options), log_level=options.log_level)


async def _get(options: argparse.Namespace) -> int:
    from kvcast.hostagent.client import AsyncClient

    async with await AsyncClient.connect(str(options.socket)) as client:
        namespace = await namespace_of(client, options)
        (block,) = await client.get(namespace, [options.key], deadline_s=options.deadline)
        if block is None:
            print(f"kvcast: {options.key.hex()} is not in the pool", file=sys.stderr)
            return EXIT_MISS
        with block:
            if options.output is not None:
                try:
                    Path(options.output).write_bytes(block.data)
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
