"""What `kvcast get` and `kvcast put` share: the agent's socket, namespaces and keys.

Owns: how a block is named on the command line. Must not know: how it travels.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvcast.service.commands import add_log_level
from kvcast.service.values import TextError, whole_number

if TYPE_CHECKING:
    from kvcast.hostagent.client import AsyncClient


def add_block_options(parser: argparse.ArgumentParser) -> None:
    """--socket, the namespace's options and --log-level."""
    parser.add_argument(
        "--socket",
        type=Path,
        default=os.environ.get("KVCAST_SOCKET") or None,
        metavar="PATH",
        help="the Unix socket of an agent (or the environment's KVCAST_SOCKET)",
    )
    group = parser.add_argument_group(
        "namespace", "a block is named by its key within (tenant, model, version, layout)"
    )
    group.add_argument("--tenant", default="cli", help="whose blocks")
    group.add_argument("--model", default="files", help="which model's blocks")
    group.add_argument("--model-version", default="1", help="which version of it")
    group.add_argument("--layout", default="bytes", help="how the bytes are laid out")
    group.add_argument(
        "--namespace",
        type=whole_number(0, 0xFFFF),
        metavar="N",
        help="its number (0 to 65535) instead, if you know it",
    )
    add_log_level(parser)


def check_block_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message if an option that argparse cannot check is wrong."""
    if options.socket is None:
        parser.error("--socket (or KVCAST_SOCKET) must name an agent's Unix socket")


def key_from(text: str) -> bytes:
    """A key of 32 hexadecimal digits; TextError otherwise."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 16:
        raise TextError(f"{text!r} is not a key of 32 hexadecimal digits")
    return key


async def namespace_of(client: AsyncClient, options: argparse.Namespace) -> int:
    """The number of the namespace that the options name."""
    if options.namespace is not None:
        return int(options.namespace)
    return await client.namespace(
        options.tenant, options.model, options.model_version, options.layout
    )
