"""Traces in Mooncake's form, read and made into the requests that generators.py makes.

Owns: the format (JSONL, a request a line) and what is refused in it. Must not know: pools, clients,
clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from kvcast.workloads.generators import (
    Dispatcher,
    Request,
    WorkloadError,
    WorkloadOptions,
    chain,
)

MAX_TRACE_LINE_BYTES = 4 * 1024 * 1024

_Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceLine(msgspec.Struct, frozen=True):
    """One line of a trace in Mooncake's form; other fields are ignored.

    `timestamp`: ms from the trace's start; lengths in tokens; `hash_ids`: one id for each block
    of the prompt, equal ids mean an equal prefix up to and including that block.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count]


def read_trace(path: str | Path) -> list[TraceLine]:
    """All lines of a trace, in order of time; WorkloadError names the first bad line and field."""
    path = Path(path)
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(MAX_TRACE_LINE_BYTES + 1):
                number += 1
                if len(text) > MAX_TRACE_LINE_BYTES:
                    raise WorkloadError(f"{path}, line {number}: longer than 4 MiB")
                if not text.strip():
                    continue
                try:
                    lines.append(decoder.decode(text))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise WorkloadError(f"{path}, line {number}: {_explain(error)}") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error
    if not any(line.hash_ids for line in lines):
        raise WorkloadError(f"{path}: no request in it that has a block (hash_ids)")
    return sorted(lines, key=lambda line: line.timestamp)


def _explain(error: Exception) -> str:
    """msgspec's message with the field's name in words: `$.hash_ids[3]` is hash_ids[3]."""
    text, _, place = str(error).partition(" - at `$.")
    return f"{place.removesuffix('`')}: {text}" if place else text


def trace_requests(
    lines: Iterable[TraceLine], options: WorkloadOptions, time_scale: float = 1.0
) -> Iterator[Request]:
    """A trace as requests: `time_scale` seconds of trace in one second of replay."""
    if not time_scale > 0:
        raise WorkloadError(f"a time scale of {time_scale} is not positive")
    dispatcher = Dispatcher(options.dispatch, options.nodes)
    start: float | None = None
    number = 0
    for line in lines:
        if not line.hash_ids:
            continue
        start = line.timestamp if start is None else start
        keys = tuple(chain(b"trace", one) for one in dict.fromkeys(line.hash_ids))
        at = (line.timestamp - start) / 1000 / time_scale
        yield Request(number, at, dispatcher.node(keys), keys, "trace", namespace="trace")
        number += 1
