"""One controller drives every target: what it uses of a program's P4Info is the same on all.

Oracle: v1model's P4Info, the one that the rest of the suite runs. Compared by name, since finsy
resolves names; ids differ between compilers. Blind to what the programs do with their tables
(tests/p4).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finsy import P4Schema
from finsy.proto import p4i
from google.protobuf import text_format
from kvcast.controller.core import program
from kvcast.controller.core.reconcile import SETTINGS
from kvcast.p4 import artefact, build, figures, profiles
from kvcast.p4.targets import MAX_PORTS
from kvcast.protocol.messages import wire

ACTIONS = {
    "settings": ["set_settings"],
    "l2_forward": ["to_port", "to_router", "flood"],
    "ipv4_route": ["to_nexthop"],
    "port_guard": ["admit"],
    "namespace_guard": ["allow"],
    "bucket_home": ["home"],
    "reader_group": ["set_reader_group"],
    "resident": ["resident_at"],
    "port_set": ["set_group"],
    "egress_host": ["rewrite"],
    "rdma_target": ["to_pool", "to_zone"],
    "landing_zone": ["readdress"],
}
"""What the controller writes: by table, the actions."""
COUNTED = ("decisions", "fills", "resident")
"""Tables whose direct counters the controller reads."""


def load(target: str) -> p4i.P4Info:
    return text_format.Parse(artefact(target).p4info.read_text(), p4i.P4Info())


def surface(info: p4i.P4Info) -> dict[str, Any]:
    """All that the controller uses, as plain values."""
    schema = P4Schema(info)
    found: dict[str, Any] = {}
    for name in (*ACTIONS, *COUNTED):
        table = schema.tables[name]
        found[f"table {name}"] = {
            "keys": [(f.name, f.id, f.bitwidth, f.match_type.name) for f in table.match_fields],
            "default can be set": table.const_default_action is None,
            "size": table.size if table.match_fields and name not in ("decisions", "fills") else 0,
        }
    for table_name, names in ACTIONS.items():
        of_table = {action.alias: action for action in schema.tables[table_name].actions}
        for name in names:
            params = of_table[name].params
            found[f"action {table_name}.{name}"] = [(p.name, p.bitwidth, p.id) for p in params]
    for name in COUNTED:
        counter = schema.tables[name].direct_counter
        found[f"counter of {name}"] = counter is not None and counter.unit.name
    hits = schema.counters["resident_hits"]
    found["resident_hits"] = hits.unit.name
    digest = next(d for d in info.digests if d.preamble.alias == program.HEAT_DIGEST)
    struct = info.type_info.structs[digest.type_spec.struct.name]
    found["heat digest"] = [
        (member.name, member.type_spec.bitstring.bit.bitwidth) for member in struct.members
    ]
    return found


@pytest.mark.parametrize("target", sorted(set(profiles) - {"v1model"}))
def test_all_targets_have_one_control_plane(target: str) -> None:
    assert surface(load(target)) == surface(load("v1model"))


def test_the_controllers_tables_are_the_ones_compared() -> None:
    assert set(ACTIONS) == {SETTINGS, *program.OWNED_TABLES}


def _table(info: p4i.P4Info, name: str) -> p4i.Table:
    return next(t for t in info.tables if t.preamble.alias == name)


def _wider_key(info: p4i.P4Info) -> None:
    _table(info, "resident").match_fields[1].bitwidth = 64


def _other_match(info: p4i.P4Info) -> None:
    _table(info, "l2_forward").match_fields[0].match_type = p4i.MatchField.TERNARY


def _other_key_name(info: p4i.P4Info) -> None:
    _table(info, "port_guard").match_fields[0].name = "port"


def _fewer_hosts(info: p4i.P4Info) -> None:
    _table(info, "l2_forward").size = 1024


def _narrower_parameter(info: p4i.P4Info) -> None:
    action = next(a for a in info.actions if a.preamble.alias == "resident_at")
    action.params[0].bitwidth = 16


def _renamed_parameter(info: p4i.P4Info) -> None:
    action = next(a for a in info.actions if a.preamble.alias == "admit")
    action.params[1].name = "group"


def _counter_of_bytes(info: p4i.P4Info) -> None:
    counter = next(c for c in info.direct_counters if c.preamble.alias == "decision_counts")
    counter.spec.unit = p4i.CounterSpec.BYTES


def _shorter_digest(info: p4i.P4Info) -> None:
    del info.type_info.structs["heat_t"].members[-1]


def _swapped_digest(info: p4i.P4Info) -> None:
    members = info.type_info.structs["heat_t"].members
    members[0].name, members[1].name = members[1].name, members[0].name


@pytest.mark.parametrize("target", ["tofino1", "tofino2"])
@pytest.mark.parametrize(
    "plant",
    [
        _wider_key,
        _other_match,
        _other_key_name,
        _fewer_hosts,
        _narrower_parameter,
        _renamed_parameter,
        _counter_of_bytes,
        _shorter_digest,
        _swapped_digest,
    ],
)
def test_a_planted_disagreement_is_found(plant: Callable[[p4i.P4Info], None], target: str) -> None:
    info = load(target)
    plant(info)
    assert surface(info) != surface(load("v1model"))


@pytest.fixture(params=["tofino1", "tofino2"])
def tofino(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def resources(target: str) -> dict[str, Any]:
    path = artefact(target).resources
    assert path is not None
    loaded: dict[str, Any] = json.loads(path.read_bytes())
    return loaded


@pytest.mark.parametrize(
    ("target", "stages", "value_bytes"),
    [("tofino1", 12, 4 << 20), ("tofino2", 20, 7 << 20)],
)
def test_the_program_fits(target: str, stages: int, value_bytes: int) -> None:
    report = resources(target)
    assert report["stages"] <= stages
    assert report["value_bytes_per_pipe"] >= value_bytes
    assert report["pending_entries"] >= 65536
    assert report["forwarded_hosts"] == report["tables"]["l2_forward (match)"]["size"] >= 16384
    info = P4Schema(artefact(target).p4info)
    assert report["forwarded_hosts"] == info.tables["l2_forward"].size
    assert report["ipv4_routes"] == info.tables["ipv4_route"].size
    for stage, taken in report["by_stage"].items():
        for kind, budget in report["budget_by_stage"].items():
            assert taken.get(kind, 0) <= budget, (stage, kind)


def test_profile_is_what_was_compiled(tofino: str) -> None:
    profile, report = profiles[tofino], resources(tofino)
    assert report["slots"] == profile.slots
    assert report["passes_per_chunk"] == profile.passes_per_chunk
    assert report["value_bytes_per_pipe"] == profile.slots * wire.CHUNKS_PER_SEGMENT * (
        wire.CHUNK_BYTES
    )
    schema = P4Schema(artefact(tofino).p4info)
    assert schema.counters["resident_hits"].size == profile.slots
    assert schema.tables["egress_host"].size == MAX_PORTS
    ports = (build.FOLDER / "tna" / "ports.p4").read_text()
    assert f"RECIRCULATION_PORT = {profile.loop_groups[64] % 128};" in ports


def test_documents_figures_are_those_of_the_reports() -> None:
    document = figures.DOCUMENT.read_text(encoding="utf-8")
    assert figures.filled(document) == document, "run python -m kvcast.p4.figures --write"
    assert document.count("<!-- figures: ") == len(figures.FIGURES)
    wrong = document.replace(
        "| passes for a chunk of 1 KiB | 11 |", "| passes for a chunk of 1 KiB | 8 |"
    )
    assert wrong != document
    assert figures.filled(wrong) == document


def test_rows_of_a_chunk_are_the_chunk(tofino: str) -> None:
    target = figures.Target.load(tofino)
    assert sum(target.rows) == wire.CHUNK_BYTES
    assert len(target.rows) == profiles[tofino].passes_per_chunk


def test_digest_fits_the_hardware(tofino: str) -> None:
    bits = sum(width for _, width in surface(load(tofino))["heat digest"])
    assert bits <= 8 * profiles[tofino].digest_bytes


@pytest.mark.slow
@pytest.mark.timeout(1800)  # ten minutes for a Tofino 2 on a busy machine
def test_reports_are_what_the_sources_compile_to(tofino: str) -> None:
    lacking = build.Compilers.find().missing_for(tofino)
    if lacking:
        pytest.skip(f"hash checked; {lacking}")
    assert build.check([tofino]) == {tofino: ""}


def test_committed_reports_are_of_these_sources(tofino: str) -> None:
    recorded = build.generated(tofino) / build.SOURCES_HASH
    assert recorded.read_text().strip() == build.sources_hash(tofino), "run make p4"


def test_artefacts_name_no_machine(tofino: str) -> None:
    found = artefact(tofino)
    for path in (found.p4info, found.resources):
        assert isinstance(path, Path)
        text = path.read_text()
        assert "/opt/" not in text
        assert "/home/" not in text
        assert str(build.FOLDER) not in text
