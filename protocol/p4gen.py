"""Writes the P4 program's headers and constants from the tables in `wire.py`.

Owns: the text of ``p4/generated/kvcast_headers.p4``. Must not know: what the program does with
the headers. Run ``python -m kvcast.protocol.p4gen`` after any change of `wire.py`; ``--check``
only says whether the file is current, and a test runs the same comparison.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvcast.protocol.messages import wire

COMMAND: Final = "python -m kvcast.protocol.p4gen"
DEFAULT_OUT: Final = Path("p4/generated/kvcast_headers.p4")

_CONSTANTS: Final[tuple[tuple[str, tuple[tuple[str, int, int], ...]], ...]] = (
    (
        "datagrams",
        (
            ("ETHERTYPE_IPV4", 16, wire.ETHERTYPE_IPV4),
            ("IP_PROTOCOL_UDP", 8, wire.IP_PROTOCOL_UDP),
            ("KVCAST_UDP_PORT", 16, wire.UDP_PORT),
            ("KVCAST_VERSION", 8, wire.VERSION),
        ),
    ),
    (
        "op",
        (
            ("OP_READ", 8, wire.OP_READ),
            ("OP_DATA", 8, wire.OP_DATA),
            ("OP_MISS", 8, wire.OP_MISS),
            ("OP_OFFER", 8, wire.OP_OFFER),
        ),
    ),
    (
        "flags",
        (
            ("FLAG_RETRY", 16, wire.FLAG_RETRY),
            ("FLAG_PARTIAL", 16, wire.FLAG_PARTIAL),
            ("FLAG_LAST", 16, wire.FLAG_LAST),
            ("FLAG_SHARED", 16, wire.FLAG_SHARED),
            ("FLAG_PADDED", 16, wire.FLAG_PADDED),
            ("FLAG_RESIDENT", 16, wire.FLAG_RESIDENT),
        ),
    ),
    (
        "reasons of a MISS, in its chunk field",
        (
            ("MISS_NOT_FOUND", 8, wire.MISS_NOT_FOUND),
            ("MISS_DIGEST_GONE", 8, wire.MISS_DIGEST_GONE),
            ("MISS_OVERLOADED", 8, wire.MISS_OVERLOADED),
            ("MISS_NOT_HOME", 8, wire.MISS_NOT_HOME),
        ),
    ),
    (
        "sizes, in bytes unless the name says otherwise",
        (
            ("FULL_SEGMENT", 64, wire.FULL_SEGMENT),
            ("CHUNKS_PER_SEGMENT", 8, wire.CHUNKS_PER_SEGMENT),
            ("CHUNK_BYTES", 16, wire.CHUNK_BYTES),
            ("ETHERNET_BYTES", 16, wire.ETHERNET.size_bytes),
            ("IPV4_BYTES", 16, wire.IPV4.size_bytes),
            ("UDP_BYTES", 16, wire.UDP.size_bytes),
            ("KVCAST_BYTES", 16, wire.KVCAST.size_bytes),
            ("READ_PADDING_BYTES", 16, wire.READ_PADDING_BYTES),
            ("OFFER_BYTES", 16, wire.OFFER_BYTES),
        ),
    ),
)


def _lines() -> Iterator[str]:
    yield f"// Generated from protocol/wire.py by `{COMMAND}`; do not edit."
    yield ""
    yield "#ifndef KVCAST_HEADERS_P4_"
    yield "#define KVCAST_HEADERS_P4_"
    for title, constants in _CONSTANTS:
        yield ""
        yield f"// {title}"
        for name, bits, value in constants:
            yield f"const bit<{bits}> {name} = {value:#0{2 + bits // 4}x};"
    yield ""
    yield "// a key's bucket is its low BUCKET_BITS bits: key[BUCKET_BITS-1:0]"
    yield f"#define BUCKET_BITS {wire.BUCKET_BITS}"
    for header in wire.HEADERS:
        yield ""
        yield f"// {header.doc}"
        yield f"header {header.name} {{"
        for field in header.fields:
            declaration = f"    bit<{field.bits}> {field.name};"
            yield f"{declaration:<28}// {field.doc}" if field.doc else declaration
        yield "}"
    yield ""
    yield "#endif"


def generate() -> str:
    """The whole text of kvcast_headers.p4."""
    return "\n".join(_lines()) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, or with --check return 1 if the file there differs."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    options = parser.parse_args(argv)
    text = generate()
    out: Path = options.out
    if options.check:
        if out.is_file() and out.read_text(encoding="utf-8") == text:
            return 0
        print(f"{out} is not what `{COMMAND}` writes", file=sys.stderr)
        return 1
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
