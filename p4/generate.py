"""Writes what the P4 program shares with Python: `python -m kvcast.p4.generate`.

Owns: the text of the files in p4/generated/ that are P4: headers and constants of the protocol
(from `wire.py`), and the program's own codes (from `definitions.py`). Must not know: what the
program does with them. Run it after any change of those two modules; ``--check`` only says whether
the files are current, and a test runs the same comparison.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from kvcast.p4 import definitions
from kvcast.p4.definitions import Code
from kvcast.protocol.messages import roce, wire

COMMAND: Final = "python -m kvcast.p4.generate"
FOLDER: Final = Path(__file__).resolve().parent / "generated"

_Constant: TypeAlias = tuple[str, int, int]
"""Name, bits and value."""


def _of(prefix: str, bits: int) -> list[_Constant]:
    """The protocol's numbers whose names begin so, in their order there; a set of flags is none."""
    return [
        (name, bits, value)
        for name, value in vars(wire).items()
        if name.startswith(prefix) and not name.endswith("_FLAGS")
    ]


_CONSTANTS: Final[dict[str, list[_Constant]]] = {
    "datagrams": [
        ("ETHERTYPE_IPV4", 16, wire.ETHERTYPE_IPV4),
        ("IP_PROTOCOL_UDP", 8, wire.IP_PROTOCOL_UDP),
        ("KVCAST_UDP_PORT", 16, wire.UDP_PORT),
        ("KVCAST_VERSION", 8, wire.VERSION),
    ],
    "op": _of("OP_", 8),
    "flags": _of("FLAG_", 16),
    "reasons of a MISS, in its chunk field": _of("MISS_", 8),
    "sizes, in bytes unless the name says otherwise": [
        ("FULL_SEGMENT", 64, wire.FULL_SEGMENT),
        ("CHUNKS_PER_SEGMENT", 8, wire.CHUNKS_PER_SEGMENT),
        ("CHUNK_BYTES", 16, wire.CHUNK_BYTES),
        ("ETHERNET_BYTES", 16, wire.ETHERNET.size_bytes),
        ("IPV4_BYTES", 16, wire.IPV4.size_bytes),
        ("UDP_BYTES", 16, wire.UDP.size_bytes),
        ("KVCAST_BYTES", 16, wire.KVCAST.size_bytes),
        ("READ_PADDING_BYTES", 16, wire.READ_PADDING_BYTES),
        ("OFFER_BYTES", 16, wire.OFFER_BYTES),
    ],
}

_CODES: Final[tuple[tuple[str, type[Code]], ...]] = (
    ("KIND_", definitions.Kind),
    ("DECISION_", definitions.Decision),
    ("FILL_", definitions.Fill),
    ("DELIVER_", definitions.Delivery),
)
"""By prefix of the constants' names: codes of every target."""
_TNA_CODES: Final[tuple[tuple[str, type[Code]], ...]] = (
    ("TASK_", definitions.Task),
    ("", definitions.Match),
)


def _constant(name: str, bits: int, value: int, meaning: str = "") -> str:
    text = f"const bit<{bits}> {name} = {value:#0{2 + bits // 4}x};"
    return f"{text:<42}// {meaning}" if meaning else text


def _codes(groups: Sequence[tuple[str, type[Code]]]) -> Iterator[str]:
    for prefix, codes in groups:
        yield f"\n// {' '.join((codes.__doc__ or '').split())}"
        for code in codes:
            yield _constant(prefix + code.name, 8, code, code.meaning)


def _header(header: wire.Header) -> Iterator[str]:
    yield f"\n// {header.doc}"
    yield f"header {header.name} {{"
    for field in header.fields:
        declaration = f"    bit<{field.bits}> {field.name};"
        if field.doc == "padding":
            yield "    @padding"
            yield declaration
        else:
            yield f"{declaration:<28}// {field.doc}" if field.doc else declaration
    yield "}"


def _protocol() -> Iterator[str]:
    for title, constants in _CONSTANTS.items():
        yield f"\n// {title}"
        for name, bits, value in constants:
            yield _constant(name, bits, value)
    yield "\n// a key's bucket is its low BUCKET_BITS bits: key[BUCKET_BITS-1:0]"
    yield f"#define BUCKET_BITS {wire.BUCKET_BITS}"
    for header in wire.HEADERS:
        yield from _header(header)


def _roce() -> Iterator[str]:
    yield ""
    yield _constant("ROCE_UDP_PORT", 16, roce.ROCE_UDP_PORT)
    yield _constant("UC_WRITE_ONLY_WITH_IMMEDIATE", 8, roce.UC_WRITE_ONLY_WITH_IMMEDIATE)
    yield _constant("POOL_KEY", 32, roce.POOL_KEY, "of a packet that is for whoever waits")
    address = "A chunk's address in a landing zone"
    yield f"// {address}: the upper half, and bits of the lower that are 0."
    yield _constant("ZONE_ADDRESS_HIGH", 32, roce.ZONE_ADDRESS_HIGH)
    yield _constant("ADDRESS_MID_ZEROS", 16, roce.ADDRESS_MID_ZEROS)
    yield _constant("ADDRESS_LOW_ZEROS", 16, roce.ADDRESS_LOW_ZEROS)
    yield _constant("WRITE_CHUNK_CODE", 2, wire.WRITE_CODE)
    for header in roce.HEADERS:
        yield from _header(header)


def _program() -> Iterator[str]:
    yield from _codes(_CODES)
    yield "\n// Multicast group of all host ports: always right, since egress filters by port_bits."
    yield _constant("ALL_PORTS_GROUP", 16, definitions.ALL_PORTS_GROUP)
    yield "// Replication id of the copy that goes round again instead of out."
    yield _constant("RECIRCULATE_RID", 16, definitions.RECIRCULATE_RID)


def _tna() -> Iterator[str]:
    yield from _codes(_TNA_CODES)
    yield "\n// Groups 64 to 67, one a pipe: {its recirculation port, RECIRCULATE_RID}."
    yield _constant("LOOP_GROUP", 16, definitions.LOOP_GROUP)
    yield "// The digest type of a heat message."
    yield f"const bit<3> HEAT_DIGEST = {definitions.HEAT_DIGEST};"
    yield from _header(definitions.ROUND)


FILES: Final[dict[str, tuple[str, Callable[[], Iterator[str]]]]] = {
    "kvcast_headers.p4": ("protocol/messages/wire.py", _protocol),
    "roce.p4": ("protocol/messages/roce.py", _roce),
    "codes.p4": ("p4/definitions.py", _program),
    "tna.p4": ("p4/definitions.py", _tna),
}
"""By name of the file: where its facts are stated, and what makes its text. A file with the name of
a target's folder is that target's alone."""


def generate(name: str) -> str:
    """The whole text of one of FILES."""
    source, lines = FILES[name]
    guard = f"KVCAST_GENERATED_{name.removesuffix('.p4').upper()}_P4_"
    first = f"// Generated from {source} by `{COMMAND}`; do not edit."
    head = (first, "", f"#ifndef {guard}", f"#define {guard}")
    return "\n".join((*head, *lines(), "", "#endif")) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, or with --check return 1 if one there differs."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder; default: p4/generated")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    options = parser.parse_args(argv)
    stale = False
    for name in FILES:
        text = generate(name)
        out: Path = options.out / name
        if options.check:
            if not out.is_file() or out.read_text(encoding="utf-8") != text:
                print(f"{out} is not what `{COMMAND}` writes", file=sys.stderr)
                stale = True
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
