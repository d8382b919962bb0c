"""The compilers' warnings that stay, each with its reason; any other fails the build.

Owns: finding the warnings in what a compiler says, and the list of those that were looked at and
left. Must not know: how a compiler is run. A warning is known by its words alone: places and
numbers of lines change with every edit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SOFTWARE = ("v1model", "bmv2")
TOFINOS = ("tofino1", "tofino2")

_WARNING = re.compile(
    r"^(?:(?:\S.*?:? )?(?:\[--Wwarn=[\w-]+\] )?warning:|\[libprotobuf WARNING \S+\]) (.+)$",
    re.MULTILINE,
)
"""p4c: `file(line): [--Wwarn=kind] warning: text`, or `[libprotobuf WARNING file:line] text`; bfas:
`file:line: warning: text`."""


@dataclass(frozen=True)
class Known:
    """Warnings whose text `pattern` matches from its beginning, of the programs of `targets`; why
    they are harmless."""

    targets: tuple[str, ...]
    pattern: str
    reason: str


_OTHERS_HASH_TABLE = (
    "bfas: the hash table of another user of that table's hash function (docs/tofino.md)"
)
KNOWN = (
    Known(
        (*SOFTWARE, *TOFINOS),
        r"'(MISS_\w+|CHUNKS_PER_SEGMENT|FILL_NONE)' is unused",
        "the generated headers state all that the protocol knows, and types.p4 every code",
    ),
    Known(
        SOFTWARE,
        r"'digest' shadows 'digest'",
        "a parameter of resident_at, whose name is the controller's, and an extern of v1model",
    ),
    Known(
        TOFINOS,
        r"'(DECISION_NONE|ETHERNET_BYTES)' is unused",
        "used by the v1model program alone",
    ),
    Known(
        TOFINOS,
        r"out parameter 'local_metadata' may be uninitialized when 'Kvcast",
        "@pa_auto_init_metadata has the compiler set every field that nobody writes first to 0",
    ),
    Known(
        TOFINOS,
        r"No size defined for table '_\w+', setting default size to 512",
        "shared controls' tables of constant entries, for which p4c-bm2-ss takes no size",
    ),
    Known(
        TOFINOS,
        r"Shrinking table \.(chunk_bit|fills|decisions): with 8 match bits",
        "of the default size of 512",
    ),
    Known(
        TOFINOS,
        r"No known conversion to standard P4Info for 'DynHash' extern type",
        "hashes are not the controller's to change",
    ),
    Known(
        TOFINOS,
        r"type\.googleapis\.com/barefoot\.PortMetadata: failed to parse contents",
        "P4Info of the parser's port metadata, which no program of ours reads",
    ),
    Known(
        ("tofino1",),
        r"Parser state min_parse_depth_accept_loop will be unrolled",
        "the compiler's own state, which reads a short frame to the hardware's least depth",
    ),
    Known(
        TOFINOS,
        r"duplicate hash group \d+, will merge with|previous definition here",
        "bfas: one table uses a hash function for two things; p4c gives them different bits of it",
    ),
    Known(
        TOFINOS,
        r"Input xbar hash group \d+ mergeable conflict|conflicting hash group definition here",
        "bfas: two tables use different bits of one hash function; the same bits would be an error",
    ),
    Known(
        ("tofino1",),
        r"exact hashtable \d+ does not exist in table "
        r"(_rdma_target|_egress_host|_landing_zone|_decisions|cells_word21_whole)",
        _OTHERS_HASH_TABLE,
    ),
    Known(
        ("tofino2",),
        r"exact hashtable \d+ does not exist in table _reader_group",
        _OTHERS_HASH_TABLE,
    ),
    Known(
        TOFINOS,
        r"Action bus byte \d+ set in table heat_heat_verdict_odd\$tind and table heat_",
        "bfas: no packet takes both tables, which are the two sides of an if",
    ),
)


def found_in(output: str) -> list[str]:
    """The texts of all warnings in a compiler's output, in order."""
    return _WARNING.findall(output)


@dataclass(frozen=True)
class Verdict:
    """`new`: warnings that are not known; `gone`: patterns that no warning matched."""

    new: list[str]
    gone: list[str]


def judge(target: str, warnings: Iterable[str], known: Iterable[Known] = KNOWN) -> Verdict:
    """Compare a target's warnings with those that are known for it."""
    patterns = {item.pattern for item in known if target in item.targets}
    new = []
    matched = set()
    for warning in warnings:
        fitting = {pattern for pattern in patterns if re.match(pattern, warning)}
        matched |= fitting
        if not fitting:
            new.append(warning)
    return Verdict(new, sorted(patterns - matched))
