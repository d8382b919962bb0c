"""The loader: what it reads, and what it refuses by name.

Oracle: the programs under tests/stf/programs, which p4c made, and small changes to them. Every
malformed file must end in a ProgramError, whatever is wrong with it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.switchsim import ir, loader
from kvcast.switchsim.ir import ProgramError, UnsupportedConstruct
from kvcast.switchsim.reference.switch import Switch

PROGRAMS = Path(__file__).resolve().parents[1] / "stf" / "programs"


def source(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((PROGRAMS / f"{name}.json").read_text())
    return loaded


def load(root: object) -> ir.Program:
    return loader.load(json.dumps(root), "test.json")


def test_names_are_resolved() -> None:
    program = load(source("forwarding"))
    tables = {t.name: t for t in program.tables()}
    (key,) = tables["I.route"].key
    header = program.headers[key.field.header]
    assert (key.name, key.match, key.width) == ("h.ipv4.dst", "lpm", 32)
    assert (header.name, header.fields[key.field.field].name) == ("ipv4", "dst")
    assert [program.actions[n].name for n in tables["I.route"].actions] == [
        "I.to_nexthop",
        "I.drop",
    ]
    assert [e.key for e in tables["I.by_ttl"].entries] == [(ir.Exact(0),), (ir.Exact(1),)]
    assert tables["I.by_ttl"].const_entries
    assert tables["I.l2"].with_counters
    spec = program.intrinsic_field("standard_metadata.egress_spec")
    assert spec is not None
    assert program.headers[spec.header].fields[spec.field] == ir.Field("egress_spec", 9)
    assert program.version == (2, 23)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", "null", '{"__meta__": {"version": [2]}}'])
def test_what_is_not_a_bmv2_file_is_a_program_error(text: str) -> None:
    with pytest.raises(ProgramError):
        loader.load(text)


def test_missing_file_is_a_program_error(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="cannot read"):
        loader.load_file(tmp_path / "none.json")


def _primitive(root: dict[str, Any], op: str) -> dict[str, Any]:
    for action in root["actions"]:
        for primitive in action["primitives"]:
            if primitive["op"] == op:
                found: dict[str, Any] = primitive
                return found
    raise AssertionError(op)


def _table(root: dict[str, Any], name: str) -> dict[str, Any]:
    tables = [t for p in root["pipelines"] for t in p["tables"] if t["name"] == name]
    found: dict[str, Any] = tables[0]
    return found


Change = Callable[[dict[str, Any]], None]

REFUSALS: list[tuple[str, str, Change]] = [
    ("version", "forwarding", lambda r: r["__meta__"].update(version=[3, 0])),
    (
        "extern instance of type counter_x",
        "forwarding",
        lambda r: r.update(extern_instances=[{"name": "x", "id": 0, "type": "counter_x"}]),
    ),
    (
        "parser value set",
        "forwarding",
        lambda r: r.update(parse_vsets=[{"name": "v", "id": 0, "compressed_bitwidth": 8}]),
    ),
    (
        "primitive 'fly'",
        "forwarding",
        lambda r: _primitive(r, "mark_to_drop").update(op="fly"),
    ),
    (
        "hash algorithm 'random'",
        "externs",
        lambda r: r["calculations"][0].update(algo="random"),
    ),
    ("match type 'fuzzy'", "forwarding", lambda r: _table(r, "I.acl").update(match_type="fuzzy")),
    (
        "match type 'fuzzy'",
        "forwarding",
        lambda r: _table(r, "I.acl")["key"][0].update(match_type="fuzzy"),
    ),
    ("table of type 'odd'", "forwarding", lambda r: _table(r, "I.acl").update(type="odd")),
    (
        "checksum of type 'ipv4'",
        "forwarding",
        lambda r: r["checksums"][0].update(type="ipv4"),
    ),
    (
        "operator 'sqrt'",
        "forwarding",
        lambda r: r["pipelines"][0]["conditionals"][0]["expression"]["value"].update(op="sqrt"),
    ),
    (
        "parser operation 'guess'",
        "headers",
        lambda r: r["parsers"][0]["parse_states"][0]["parser_ops"][0].update(op="guess"),
    ),
    (
        "length expression",
        "headers",
        lambda r: r["header_types"][0].update(length_exp={"type": "hexstr", "value": "0x1"}),
    ),
    ("meter of type 'volume'", "externs", lambda r: r["meter_arrays"][0].update(type="volume")),
    (
        "calculation over 'weather'",
        "externs",
        lambda r: r["calculations"][0]["input"].append({"type": "weather", "value": 0}),
    ),
    (
        "hash over the payload",
        "externs",
        lambda r: r["calculations"][0]["input"].append({"type": "payload"}),
    ),
]


@pytest.mark.parametrize(
    ("construct", "name", "change"), REFUSALS, ids=[f"{r[0]} in {r[1]}" for r in REFUSALS]
)
def test_unsupported_construct_is_refused_by_name(
    construct: str, name: str, change: Change
) -> None:
    root = source(name)
    change(root)
    with pytest.raises(UnsupportedConstruct) as refusal:
        load(root)
    assert construct in refusal.value.construct
    assert refusal.value.where


ERRORS: list[tuple[str, str, Change]] = [
    ("no header type", "forwarding", lambda r: r["headers"][0].update(header_type="gone")),
    ("no action has the id", "forwarding", lambda r: _table(r, "I.acl").update(action_ids=[99])),
    (
        "no control node",
        "forwarding",
        lambda r: r["pipelines"][0].update(init_table="nowhere"),
    ),
    ("declared twice", "forwarding", lambda r: r["headers"].append(dict(r["headers"][-1], id=99))),
    ("no 'parser'", "forwarding", lambda r: r["parsers"][0].update(name="reader")),
    (
        "parameters are expected",
        "forwarding",
        lambda r: _primitive(r, "mark_to_drop").update(parameters=[]),
    ),
    ("is part of a cycle", "forwarding", lambda r: _make_cycle(r["pipelines"][0])),
    ("two lpm fields", "forwarding", lambda r: _two_lpm(_table(r, "I.route"))),
    (
        "is not an integer",
        "externs",
        lambda r: r["register_arrays"][0].update(size=-1),
    ),
    (
        "not a hexadecimal",
        "forwarding",
        lambda r: _table(r, "I.by_ttl")["entries"][0]["match_key"][0].update(key="zz"),
    ),
    (
        "whole bytes",
        "forwarding",
        lambda r: next(t for t in r["header_types"] if t["name"] == "l4_h")["fields"].append(
            ["odd", 3, False]
        ),
    ),
]


def _make_cycle(pipeline: dict[str, Any]) -> None:
    for conditional in pipeline["conditionals"]:
        conditional["false_next"] = pipeline["init_table"]


def _two_lpm(table: dict[str, Any]) -> None:
    table["key"].append(copy.deepcopy(table["key"][0]))


@pytest.mark.parametrize(
    ("message", "name", "change"), ERRORS, ids=[f"{e[0]} in {e[1]}" for e in ERRORS]
)
def test_inconsistent_file_is_a_program_error(message: str, name: str, change: Change) -> None:
    root = source(name)
    change(root)
    with pytest.raises(ProgramError, match=message):
        load(root)


def test_expression_that_is_nested_too_deep_is_refused() -> None:
    root = source("forwarding")
    conditional = root["pipelines"][0]["conditionals"][0]
    for _ in range(loader.MAX_DEPTH + 1):
        conditional["expression"] = {
            "type": "expression",
            "value": {"op": "not", "left": None, "right": conditional["expression"]},
        }
    with pytest.raises(UnsupportedConstruct, match="nested deeper than"):
        load(root)


def _places(value: object) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        for key, child in value.items():
            if key not in ("source_info",):
                found.append((value, key))
                found += _places(child)
    elif isinstance(value, list):
        for n, child in enumerate(value):
            found.append((value, n))
            found += _places(child)
    return found


@settings(max_examples=300)
@given(
    name=st.sampled_from(["forwarding", "headers", "externs", "selector", "replication"]),
    where=st.integers(0, 1 << 30),
    junk=st.sampled_from([None, 0, -1, 1 << 70, "", "0x", "junk", [], {}, [[]], True, 3.5]),
    drop=st.booleans(),
)
@pytest.mark.slow
def test_damaged_file_loads_or_is_a_program_error(
    name: str, where: int, junk: object, drop: bool
) -> None:
    root = source(name)
    places = _places(root)
    container, key = places[where % len(places)]
    if drop:
        del container[key]
    else:
        container[key] = junk
    try:
        program = load(root)
    except ProgramError:
        return
    # What loads must also run: any frame, without an exception.
    switch = Switch()
    try:
        switch.load(program)
    except ProgramError:
        return
    for frame in (b"", b"\x01", bytes(64), bytes(range(80))):
        switch.process(1, frame, 1000)
