"""`kvcast fetch`: take a folder of files out of the pool."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvcast.cli.blocks import run_block_command
from kvcast.cli.folders import bar, connected_to_folder, folder_parser, named
from kvcast.hostagent.models.fetching import Fetcher, NotInPoolError, find
from kvcast.protocol.node_ids import is_node_id
from kvcast.service.commands import EXIT_MISS, EXIT_OK
from kvcast.service.values import number, whole_number

_EXAMPLES = """\
examples:
  kvcast fetch --socket /run/kvcast/agent.sock --model llama-8b --to /local/llama-8b
  kvcast fetch --socket /run/kvcast/agent.sock --model llama-8b --to /local/llama-8b \\
      --id 6fa1…        only if it is exactly what `kvcast load` printed"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast fetch`."""
    parser = folder_parser(
        "kvcast fetch",
        "Take a folder of files out of the pool. Every block is checked against a hash; what is"
        " there and right is not fetched again, so a fetch that was interrupted goes on where it"
        " was. Hosts that fetch the same at the same time share what the network carries. Exit"
        " status 3: some of it is not in the pool.",
        _EXAMPLES,
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="its name in the pool")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="where to; made if it is not there"
    )
    parser.add_argument(
        "--id", metavar="HEX", help="refuse any other than the one of this identity"
    )
    parser.add_argument(
        "--patience",
        type=number(0, 86400),
        default=30.0,
        metavar="SECONDS",
        help="how long to go on while none of what is missing comes (default: %(default)g s)",
    )
    parser.add_argument(
        "--hosts",
        type=nodes_of,
        default=[],
        metavar="NODE,NODE,…",
        help="the nodes that fetch it at the same time, this one among them, and 31 at most: each"
        " block then leaves its home once for all of them, although some are held up meanwhile",
    )
    parser.add_argument(
        "--gather-ms",
        type=whole_number(0, 255),
        default=0,
        metavar="MS",
        help="how long a home may hold an answer so that other hosts can join, 0 to 255 ms; worth"
        " it where many are known to begin at once (default: as it shows that they do)",
    )
    return parser


def nodes_of(text: str) -> list[str]:
    """Node ids, parted by commas."""
    nodes = [node.strip() for node in text.split(",")]
    if not all(map(is_node_id, nodes)):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of node ids")
    return nodes


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch a folder; 3 if it, or some of it, is not in the pool."""
    return run_block_command(build_parser(), argv, _fetch)


async def _fetch(options: argparse.Namespace) -> int:
    name = options.model
    named(name)
    begun = time.monotonic()
    async with connected_to_folder(options, name) as (client, namespace):
        try:
            manifest, identity = await find(
                client, namespace, name, options.model_version, options.id
            )
            group = await client.group(namespace, options.hosts) if options.hosts else 0
            fetcher = Fetcher(
                client,
                namespace,
                manifest,
                options.to,
                patience_s=options.patience,
                gather_ms=options.gather_ms,
                group=group,
            )
            with bar(f"fetching {name}", manifest.size_bytes, quiet=options.json) as advance:
                await fetcher.fetch(lambda size_bytes, _: advance(size_bytes))
        except NotInPoolError as error:
            print(f"kvcast: {error}", file=sys.stderr)
            return EXIT_MISS
    took_s = time.monotonic() - begun
    facts = {
        "name": name,
        "namespace": namespace,
        "identity": identity,
        "files": len(manifest.files),
        "size_bytes": manifest.size_bytes,
        "fetched_bytes": fetcher.fetched_bytes,
        "seconds": took_s,
        "blocks_by_tier": dict(fetcher.tiers),
    }
    if options.json:
        print(json.dumps(facts))
    else:
        print(
            f"{name}: {facts['files']} files, {manifest.size_bytes:,} bytes, all right;"
            f" {fetcher.fetched_bytes:,} bytes fetched in {took_s:.1f} s"
        )
    return EXIT_OK
