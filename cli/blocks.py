"""What the commands that speak to an agent share: its socket, namespaces and keys.

Owns: how a block is named on the command line. Must not know: how it travels.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcast.service.commands import (
    EXIT_MISS,
    CommandError,
    add_log_level,
    command_parser,
    run_command,
)
from kvcast.service.values import TextError, parse_name, whole_number

if TYPE_CHECKING:
    from kvcast.hostagent.client import AsyncClient

_PIECE_BYTES = 1 << 20
_MAP_WITHIN_S = 2.0
"""An agent hears of a namespace that was made elsewhere with the next map, within a second."""
_ASK_AGAIN_S = 0.1


class NotThereError(CommandError):
    """The pool has no such namespace."""


def socket_parser(program: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with --socket and --log-level."""
    parser = command_parser(program, description, examples)
    parser.add_argument(
        "--socket",
        type=Path,
        default=os.environ.get("KVCAST_SOCKET") or None,
        metavar="PATH",
        help="the Unix socket of an agent (or the environment's KVCAST_SOCKET)",
    )
    add_log_level(parser)
    return parser


def block_parser(program: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with --socket, the namespace's options and --log-level."""
    parser = socket_parser(program, description, examples)
    group = parser.add_argument_group(
        "namespace", "a block is named by its key within (tenant, model, version, layout)"
    )
    group.add_argument("--tenant", type=parse_name, default="cli", help="whose blocks")
    group.add_argument("--model", type=parse_name, default="files", help="which model's blocks")
    group.add_argument("--model-version", type=parse_name, default="1", help="which version of it")
    group.add_argument(
        "--layout", type=parse_name, default="bytes", help="how the bytes are laid out"
    )
    group.add_argument(
        "--namespace",
        type=whole_number(0, 0xFFFF),
        metavar="N",
        help="its number (0 to 65535) instead, if you know it",
    )
    return parser


def run_block_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    command: Callable[[argparse.Namespace], Coroutine[Any, Any, int]],
) -> int:
    """Run a command with these words; its exit status."""
    options = parser.parse_args(argv)
    if options.socket is None:
        parser.error("--socket (or KVCAST_SOCKET) must name an agent's Unix socket")

    async def run() -> int:
        try:
            return await command(options)
        except NotThereError as error:
            print(f"kvcast: {error}", file=sys.stderr)
            return EXIT_MISS

    return run_command(run, log_level=options.log_level)


def key_from(text: str) -> bytes:
    """A key of 32 hexadecimal digits; TextError otherwise."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 16:
        raise TextError(f"{text!r} is not a key of 32 hexadecimal digits")
    return key


def standard_input() -> bytes:
    """All of standard input, within `run_command`, whose event loop stands still until it ends, and
    hears of no signal: so it ends at one."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    # A signal is heard however shortly before the wait for more it comes, since it writes here.
    heard, tells = os.pipe()
    os.set_blocking(tells, False)
    told = signal.set_wakeup_fd(tells)

    def piece() -> bytes:
        select.select((sys.stdin, heard), (), ())
        return os.read(sys.stdin.fileno(), _PIECE_BYTES)

    try:
        return b"".join(iter(piece, b""))
    except KeyboardInterrupt:
        raise asyncio.CancelledError from None
    finally:
        signal.set_wakeup_fd(told)
        os.close(heard)
        os.close(tells)
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextlib.asynccontextmanager
async def connected(
    options: argparse.Namespace, *, makes: bool = False
) -> AsyncIterator[tuple[AsyncClient, int]]:
    """A client of the agent, and the number of the namespace that the options name. One that the
    pool does not have is made where the command `makes` such; else NotThereError."""
    from kvcast.hostagent.client import AsyncClient

    async with await AsyncClient.connect(str(options.socket)) as client:
        number = options.namespace
        if number is None:
            parts = options.tenant, options.model, options.model_version, options.layout
            number = await client.namespace(*parts) if makes else await _found(client, parts)
        yield client, number


async def _found(client: AsyncClient, parts: tuple[str, str, str, str]) -> int:
    """The number of a namespace that somebody else has made; NotThereError."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _MAP_WITHIN_S
    while True:
        pool = await client.describe()
        for info in pool.namespaces:
            if (info.tenant, info.model, info.version, info.layout) == parts:
                return info.namespace
        if not pool.epoch:
            return await client.namespace(*parts)  # which says why there is no pool
        if loop.time() > until:
            tenant, model, version, layout = map(repr, parts)
            raise NotThereError(
                f"the pool has nothing of tenant {tenant}, model {model}, version {version},"
                f" layout {layout}"
            )
        await asyncio.sleep(_ASK_AGAIN_S)
