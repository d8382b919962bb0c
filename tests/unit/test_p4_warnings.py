"""Compilers' warnings: known ones stay, a new one fails the build, one that is gone is told.

Oracle: lines as p4c and bfas write them. Cannot see: whether a reason in the list is true.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kvcast.p4 import build
from kvcast.p4.compiler_warnings import KNOWN, Known, Verdict, found_in, judge

P4C = """\
v1model/../generated/kvcast_headers.p4(27): [--Wwarn=unused] warning: 'MISS_NOT_FOUND' is unused
const bit<8> MISS_NOT_FOUND = 0x01;
             ^^^^^^^^^^^^^^
[--Wwarn=mismatch] warning: no place
warning: no place, no kind
"""
BFAS = """\
out/pipe/kvcast.bfa:1234: warning: exact hashtable 2 does not exist in table a$b
<unknown location>: warning: bits out of range
"""
A = Known(("v1model",), r"'\w+' is unused", "")
B = Known(("v1model", "tofino1"), "exact hashtable", "")


def test_warnings_are_found_in_what_the_compilers_say() -> None:
    assert found_in(P4C) == ["'MISS_NOT_FOUND' is unused", "no place", "no place, no kind"]
    assert found_in(BFAS) == [
        "exact hashtable 2 does not exist in table a$b",
        "bits out of range",
    ]
    assert found_in("no warning here\n") == []


def test_a_warning_is_new_unless_its_target_knows_it() -> None:
    unused, table = "'X' is unused", "exact hashtable 2"
    assert judge("v1model", [unused, table], (A, B)) == Verdict([], [])
    assert judge("tofino1", [unused, table], (A, B)) == Verdict([unused], [])


def test_a_known_warning_that_does_not_come_is_told() -> None:
    assert judge("v1model", ["other"], (A, B)) == Verdict(["other"], [A.pattern, B.pattern])


def test_every_known_warning_has_a_reason_and_targets_that_exist() -> None:
    for known in KNOWN:
        assert known.reason
        assert set(known.targets) <= set(build.TARGETS)


def fake_p4c(folder: Path, warning: str) -> build.Compilers:
    """A p4c that writes an empty program and says `warning`."""
    compiler = folder / "p4c-bm2-ss"
    said = f"a.p4(1): [--Wwarn=x] warning: {warning}"
    compiler.write_text(f"#!/bin/sh\necho '{{}}' > $4\ntouch $2\necho \"{said}\" >&2\n")
    compiler.chmod(0o755)
    return build.Compilers(str(compiler), None, None)


def test_a_new_warning_fails_the_build_though_the_compiler_exits_with_0(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="new warnings:\nthe sky falls"):
        fake_p4c(tmp_path, "the sky falls").compile("v1model", tmp_path)


def test_known_warnings_do_not_fail_the_build(tmp_path: Path) -> None:
    gone = fake_p4c(tmp_path, "'MISS_OVERLOADED' is unused").compile("v1model", tmp_path)
    assert gone == ["'digest' shadows 'digest'"]
