"""`kvcast agent status`, `evict`, `pin`: what one agent holds and does, and a say in it.

Owns: how an agent's numbers are shown to people, and the three commands' options. Must not know:
how the numbers come about (`kvcast.hostagent.core.metrics` names them).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from kvcast.cli.blocks import (
    block_parser,
    connected,
    key_from,
    run_block_command,
    socket_parser,
    standard_input,
)
from kvcast.service.commands import EXIT_MISS, EXIT_OK, CommandError
from kvcast.service.values import TextError, format_amount, number

_STATUS = """\
examples:
  kvcast agent status --socket /run/kvcast/agent.sock
  kvcast agent status --socket /run/kvcast/agent.sock --json | jq .blocks"""
_EVICT = """\
examples:
  kvcast agent evict --socket /run/kvcast/agent.sock 6fa1…
  kvcast agent evict --socket /run/kvcast/agent.sock --tenant acme --model m - < keys"""
_PIN = """\
examples:
  kvcast agent pin --socket /run/kvcast/agent.sock 6fa1…             until Ctrl-C
  kvcast agent pin --socket /run/kvcast/agent.sock --for 3600 - < keys"""


# --- status -----------------------------------------------------------------------------------


def status(argv: Sequence[str] | None = None) -> int:
    """Show what an agent holds and has done since it started."""
    parser = socket_parser(
        "kvcast agent status",
        "Shows what one agent holds and has done since it started; zeros are left out. "
        "`kvcast status` shows the whole pool.",
        _STATUS,
    )
    parser.add_argument("--json", action="store_true", help="all numbers by name, zeros too")
    return run_block_command(parser, argv, _status)


async def _status(options: argparse.Namespace) -> int:
    from kvcast.hostagent.client import AsyncClient

    async with await AsyncClient.connect(str(options.socket)) as client:
        counters = await client.stats()
    if options.json:
        print(json.dumps(counters, sort_keys=True))
    else:
        print("\n".join(described(counters)))
    return EXIT_OK


_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gets", ("gets_", "hits_", "misses_", "fetches_", "prefetches_", "retries_")),
    ("puts and copies for others", ("puts_", "replications_", "keeps_", "credits_")),
    (
        "blocks that came and went",
        (
            *("store_", "index_", "demot", "promot", "ssd_", "cold_", "hot_"),
            *(f"arena{number}_" for number in range(1, 10)),
        ),
    ),
    ("bytes of blocks", ("payload_",)),
    ("as a reader", ("requester_", "wrong_digest_")),
    ("as a home", ("responder_",)),
    ("network and clients", ("",)),
)
"""Titles, and how the names of the counters begin that stand under them; the first fits."""


def described(counters: Mapping[str, float]) -> Iterator[str]:
    """An agent's numbers as lines of text, by part; of totals, those that are not zero."""
    used = format_amount(counters.get("arena_used_bytes", 0))
    size = format_amount(counters.get("arena_bytes", 0))
    yield f"{counters.get('blocks', 0):.0f} blocks in DRAM, {used} of {size}"
    present = {
        name: value
        for name, value in counters.items()
        if not name.endswith(("_total", "_sum", "_count", "}"))
        and name not in ("blocks", "arena_used_bytes", "arena_bytes")
    }
    for name, value in present.items():
        yield f"  {_words(name):44} {_value(name, value)}"
    yield from _cards(counters)
    left = {name: value for name, value in counters.items() if name.endswith("_total") and value}
    for title, starts in _PARTS:
        mine = {name: value for name, value in left.items() if name.startswith(starts)}
        if mine:
            yield f"{title}:"
        for name, value in mine.items():
            del left[name]
            yield f"  {_words(name.removesuffix('_total')):44} {_value(name, value)}"


_CARD = re.compile(r'rdma_card_(\w+)\{card="(.*)"\}')


def _cards(counters: Mapping[str, float]) -> Iterator[str]:
    """A line for each RDMA card."""
    cards: dict[str, dict[str, float]] = {}
    for name, value in counters.items():
        if found := _CARD.fullmatch(name):
            cards.setdefault(found[2], {})[found[1].removesuffix("_total")] = value
    for card, numbers in sorted(cards.items()):
        state = "works" if numbers.pop("works", 0) else "LEFT OUT"
        words = [f"{_words(name)} {_value(name, value)}" for name, value in numbers.items()]
        yield f"RDMA card {card}: {state}, {', '.join(words)}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(name: str, value: float) -> str:
    return format_amount(value) if "bytes" in name else f"{value:,.0f}"


# --- evict and pin ----------------------------------------------------------------------------


def evict(argv: Sequence[str] | None = None) -> int:
    """Forget blocks; 3 if not every home of all of them has."""
    parser = _keys_parser(
        "kvcast agent evict",
        "Has blocks forgotten, here and at their homes, so that they are read no more. Copies "
        "that other nodes or the switch have cached stay until they make room: a key is never to "
        "be used again for other bytes. A key that nobody has a block of counts as forgotten; it "
        "is said beside it how many blocks lay in this node's DRAM. Exit status 3: not all of a "
        "block's homes have forgotten it, since one could not be asked or somebody held it just "
        "then.",
        _EVICT,
    )
    return run_block_command(parser, argv, _evict)


async def _evict(options: argparse.Namespace) -> int:
    keys = _keys(options.keys)  # first: while it waits, a signal from before it is not heard
    from kvcast.protocol.messages.local import MAX_KEYS

    async with connected(options) as (client, namespace):
        held = 0
        for at in range(0, len(keys), MAX_KEYS):
            told = await client.describe(namespace, keys[at : at + MAX_KEYS])
            held += len(told.held)
        count = await client.drop(namespace, keys)
    print(
        f"{count} of {len(keys)} blocks forgotten by all of their homes;"
        f" {held} lay in this node's DRAM"
    )
    return EXIT_OK if count == len(keys) else EXIT_MISS


def pin(argv: Sequence[str] | None = None) -> int:
    """Keep blocks in an agent's DRAM while the command runs; 3 if not all of them are there."""
    parser = _keys_parser(
        "kvcast agent pin",
        "Keeps blocks that lie in this node's DRAM there for as long as the command runs: a pin "
        "is a client's, and ends with it. (`POST /v1/pin` at the controller keeps a block in the "
        "switch.) Exit status 3: not all of them were there.",
        _PIN,
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=number(0.001, 30 * 86400),
        metavar="SECONDS",
        help="for so long, 0.001 s to 30 days (default: until it is interrupted)",
    )
    parser.add_argument(
        "--fetch",
        action="store_true",
        help="have blocks that are not there fetched first",
    )
    return run_block_command(parser, argv, _pin)


async def _pin(options: argparse.Namespace) -> int:
    keys = _keys(options.keys)
    async with connected(options) as (client, namespace):
        if options.fetch:
            for block in await client.get(namespace, keys, deadline_s=60.0):
                if block is not None:
                    block.release()
        count = await client.pin(namespace, keys)
        print(f"{count} of {len(keys)} blocks pinned", flush=True)
        if not count:
            return EXIT_MISS
        try:
            await asyncio.sleep(options.seconds if options.seconds is not None else 1e9)
        except asyncio.CancelledError:
            pass  # Ctrl-C is how it ends
    return EXIT_OK if count == len(keys) else EXIT_MISS


def _keys_parser(program: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser = block_parser(program, description, examples)
    parser.add_argument(
        "keys",
        nargs="+",
        metavar="KEY",
        help="32 hexadecimal digits each; - reads them from standard input, one a line",
    )
    return parser


def _keys(words: Sequence[str]) -> list[bytes]:
    """The keys that the words name, each once; CommandError."""
    named: dict[bytes, None] = {}
    for word in words:
        lines = standard_input().decode(errors="replace").split() if word == "-" else [word]
        for line in lines:
            try:
                named[key_from(line)] = None
            except TextError as error:
                raise CommandError(str(error)) from error
    if not named:
        raise CommandError("no keys were given")
    return list(named)
