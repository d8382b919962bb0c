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

_WARNING = re.compile(r"^(?:\S.*?:? )?(?:\[--Wwarn=[\w-]+\] )?warning: (.+)$", re.MULTILINE)
"""p4c: `file(line): [--Wwarn=kind] warning: text`; bfas: `file:line: warning: text`."""


@dataclass(frozen=True)
class Known:
    """Warnings whose text `pattern` matches from its beginning, of the programs of `targets`; why
    they are harmless."""

    targets: tuple[str, ...]
    pattern: str
    reason: str


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
        r"out parameter 'state' may be uninitialized when 'Kvcast",
        "@pa_auto_init_metadata has the compiler set every field that nobody writes first to 0",
    ),
    Known(
        ("tofino1",),
        r"exact hashtable \d+ does not exist in table cells_word\d+_whole",
        "hash tables of a stage's other tables that share a hash function (docs/tofino.md)",
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
