"""The codes that Python reads are those that the compiled program writes.

Oracle: the constant entries that p4c wrote into the program's JSON. Cannot see: when the program
writes which (tests/p4).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvcast.p4 import artefact
from kvcast.p4.definitions import Code, Decision, Fill, Kind


def entries_of(table: str) -> list[dict[str, Any]]:
    program = json.loads(artefact("v1model").json.read_bytes())
    (found,) = (
        t["entries"]
        for pipeline in program["pipelines"]
        for t in pipeline["tables"]
        if t["name"].split(".")[-1] == table
    )
    return list(found)


@pytest.mark.parametrize(("table", "codes"), [("decisions", Decision), ("fills", Fill)])
def test_compiled_program_counts_our_codes(table: str, codes: type[Code]) -> None:
    counted = [int(entry["match_key"][0]["key"], 16) for entry in entries_of(table)]
    assert sorted(counted) == sorted(codes.counted())


def test_compiled_program_classifies_frames_by_our_kinds() -> None:
    """Every kind of a kvcast frame that an entry of frame_class gives; gate and the default give
    the other two. (RoCE is write_class's.)"""
    given = {
        int(entry["action_entry"]["action_data"][0], 16)
        for entry in entries_of("frame_class")
        if entry["action_entry"]["action_data"]
    }
    assert given == set(Kind) - {Kind.ORDINARY, Kind.MALFORMED, Kind.WRITE, Kind.TO_ZONE}
