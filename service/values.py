"""Values as people write them in flags and files: numbers within bounds, and sizes in bytes.

Owns: what such a text means, and what is said about one that means nothing. Must not know: flags.
Each parser takes a text and raises TextError, so that it serves argparse, `options` and files.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final, TypeVar

from kvcast.protocol.namespace_names import NAME_RULE, is_name
from kvcast.protocol.node_ids import NODE_ID_RULE, is_node_id

N = TypeVar("N", int, float)

_UNITS: Final = ("", "K", "M", "G", "T")
_SIZE: Final = re.compile(
    r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE | re.ASCII
)
MAX_SIZE: Final = (1 << 63) - 1


class TextError(argparse.ArgumentTypeError, ValueError):
    """A text that is not what it should be; the message says what that would look like.

    Of two kinds, since argparse shows the message of the first only.
    """


def parse_size(text: str) -> int:
    """ "4096", "64KiB", "1M" or "1.5GiB" as bytes: units are powers of 1024, with or without
    "iB"."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise TextError(f"{text[:80]!r} is no size like 4096, 64KiB or 1.5GiB")
    size = int(Decimal(match[1]) * 1024 ** _UNITS.index((match[2] or "").upper()))
    if size > MAX_SIZE:
        raise TextError(f"{text!r} is more than {MAX_SIZE} bytes")
    return size


def format_size(size_bytes: int) -> str:
    """Bytes in the largest unit that leaves a whole number: 65536 as "64 KiB"."""
    power = 0
    while size_bytes and size_bytes % 1024 == 0 and power + 1 < len(_UNITS):
        size_bytes //= 1024
        power += 1
    return f"{size_bytes} {_UNITS[power]}iB" if power else f"{size_bytes} bytes"


def format_amount(size_bytes: float) -> str:
    """Bytes, about, in the largest unit that they fill: 3500000 as "3.3 MiB"."""
    power = 0
    while size_bytes >= 1024 and power + 1 < len(_UNITS):
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:,.1f} {_UNITS[power]}iB" if power else f"{size_bytes:.0f} B"


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers within [low, high]."""
    return _bounded(float, "a number", low, high)


def whole_number(low: int, high: float = math.inf) -> Callable[[str], int]:
    """A parser of whole numbers within [low, high]."""
    return _bounded(int, "an integer", low, high)


def bit_rate(low: int, high: int) -> Callable[[str], int]:
    """A parser of rates in whole bits a second within [low, high], as 10000000 or as 10e6."""
    return _bounded(_whole, "a rate like 10000000 or 10e6", low, high)


def _whole(text: str) -> int:
    value = float(text)
    if not value.is_integer():  # an infinite one is none, either
        raise ValueError(text)
    return int(value)


def _bounded(read: Callable[[str], N], what: str, low: float, high: float) -> Callable[[str], N]:
    def parse(text: str) -> N:
        try:
            value = read(text)
        except ValueError:
            raise TextError(f"{text[:80]!r} is not {what}") from None
        if low <= value <= high and value != math.inf:
            return value
        if high == math.inf:
            raise TextError(f"{text[:80]} must be a number, {low:g} or more")
        raise TextError(f"{text[:80]} is outside {low:g} to {high:g}")

    return parse


def parse_node_id(text: str) -> str:
    """A node's name in the pool."""
    if not is_node_id(text):
        raise TextError(f"{text[:80]!r} is no node's name: {NODE_ID_RULE}")
    return text


def parse_name(text: str) -> str:
    """A tenant, a model, its version, or a layout."""
    if not is_name(text):
        raise TextError(f"{text[:80]!r} is no name: {NAME_RULE}")
    return text
