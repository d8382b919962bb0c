"""The committed data plane: current, free of the machine that compiled it, and named as agreed.

Oracle: the sources' hash everywhere, p4c where it is installed; for names, the list below, which
the controller relies on.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from finsy import P4Schema
from kvcast.p4 import artefact, build, profiles
from kvcast.p4.targets import MAX_PORTS
from kvcast.protocol.messages import roce, wire

ROOT = Path(__file__).resolve().parents[2]

TABLES = {
    "settings": [],
    "l2_forward": ["hdr.ethernet.dst"],
    "ipv4_route": ["hdr.ipv4.dst"],
    "port_guard": ["ingress_port", "hdr.ipv4.src"],
    "namespace_guard": ["ingress_port", "namespace"],
    "bucket_home": ["bucket", "ingress_port"],
    "reader_group": ["namespace", "group"],
    "resident": ["namespace", "key", "segment"],
    "port_set": ["port_bits"],
    "egress_host": ["egress_port"],
    "rdma_target": ["hdr.ipv4.dst", "queue_pair"],
    "landing_zone": ["home_port", "reader_port"],
    "decisions": ["decision"],
    "fills": ["fill"],
}
ACTIONS = {
    "set_settings": {"enabled": 8, "lease_ticks": 32, "heat_threshold": 32},
    "to_port": {"port": 9, "port_bit": 32},
    "to_router": {},
    "flood": {},
    "to_nexthop": {"port": 9, "port_bit": 32, "dst_mac": 48, "src_mac": 48},
    "admit": {"port_bit": 32, "serve_group": 16},
    "allow": {},
    "home": {},
    "set_reader_group": {"port_bits": 32, "serve_group": 16},
    "resident_at": {
        "slot": 32,
        "generation": 32,
        "chunk_mask": 64,
        "digest": 64,
        "size": 32,
    },
    "set_group": {"group": 16},
    "rewrite": {"mac": 48, "ip": 32, "udp_port": 16, "port_bit": 32},
    "to_pool": {},
    "to_zone": {},
    "readdress": {
        "mac": 48,
        "src": 32,
        "dst": 32,
        "queue_pair": 24,
        "write_key": 32,
        "identification": 16,
        "src_port": 16,
        "port_bit": 32,
    },
}


SOFTWARE = sorted(name for name, profile in profiles.items() if profile.brings_device_config)
"""Targets whose program the package holds (the Tofinos' reports: test_p4_targets.py)."""


@pytest.fixture(params=SOFTWARE)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def program(target: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(artefact(target).json.read_bytes())
    return loaded


@pytest.mark.slow
@pytest.mark.timeout(600)  # p4c takes half a minute a target on a busy machine
def test_artefacts_are_what_the_sources_compile_to() -> None:
    by_hash = build.check(SOFTWARE)
    if any(by_hash.values()):
        pytest.skip(f"compared by hash only: {by_hash}")


def test_check_says_what_it_compiled_and_what_it_compared_by_hash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a p4c that makes what is committed, and no compiler for a Tofino."""

    def compile_as_committed(_self: build.Compilers, target: str, out: Path) -> list[str]:
        for name in build.kept(target):
            (out / name).write_bytes((build.generated(target) / name).read_bytes())
        return ["a pattern"] if target == "bmv2" else []

    def find() -> build.Compilers:
        return build.Compilers("p4c", None, None)

    monkeypatch.setattr(build.Compilers, "compile", compile_as_committed)
    monkeypatch.setattr(build.Compilers, "find", find)
    assert build.main(["--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "current: v1model, compiled again" in lines
    assert "bmv2: a known warning did not come, and may leave the list: a pattern" in lines
    assert any(line.startswith("current: tofino1, compared by hash only (say") for line in lines)
    assert build.main(["--check", "--target", "tofino2"]) == 0
    assert "tofino2, compared by hash only (p4c-barefoot is not" in capsys.readouterr().out


def test_controls_hold_what_both_programs_include() -> None:
    controls = {path.name for path in (build.FOLDER / "controls").glob("*.p4")}
    for folder in ("v1model", "tna"):
        source = (build.FOLDER / folder / "kvcast.p4").read_text(encoding="utf-8")
        assert set(re.findall(r'#include "\.\./controls/(\w+\.p4)"', source)) == controls


def test_a_changed_source_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in build.sources("bmv2"):
        copy = tmp_path / path.relative_to(build.FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    before = build.sources_hash("bmv2")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    assert build.sources_hash("bmv2") == before
    with (tmp_path / "v1model" / "pending.p4").open("a") as source:
        source.write("// changed\n")
    assert build.sources_hash("bmv2") != before


def test_make_p4_says_what_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A p4c that refuses everything is there; the Tofinos' compilers are not."""
    p4c = tmp_path / "p4c-bm2-ss"
    p4c.write_text("#!/bin/sh\necho refused >&2\nexit 3\n")
    p4c.chmod(0o755)
    monkeypatch.setenv("KVCAST_P4C", str(p4c))
    monkeypatch.setenv("KVCAST_P4C_BAREFOOT", str(tmp_path / "none"))
    monkeypatch.setenv("KVCAST_BFAS", str(tmp_path / "none"))
    before = {path: path.read_bytes() for path in build.generated("v1model").iterdir()}
    assert build.main(["--target", "tofino1", "--target", "v1model"]) == 1
    said = capsys.readouterr()
    assert "not compiled: tofino1 (p4c-barefoot is not on PATH" in said.out
    assert "KVCAST_P4C_BAREFOOT" in said.out
    assert "KVCAST_BFAS" in said.out
    assert "exit 3\nrefused" in said.err
    assert {path: path.read_bytes() for path in build.generated("v1model").iterdir()} == before
    assert build.main(["--target", "tofino2"]) == 1
    assert "nothing compiled" in capsys.readouterr().err


def test_artefacts_name_no_machine(target: str) -> None:
    for path in (artefact(target).json, artefact(target).p4info):
        text = path.read_text()
        assert "/opt/" not in text
        assert "/home/" not in text
        assert "source_info" not in text
        assert str(ROOT) not in text


def test_header_types_are_those_of_the_protocol(target: str) -> None:
    compiled = {
        header["name"]: [(name, bits) for name, bits, *_ in header["fields"]]
        for header in program(target)["header_types"]
    }
    for header in (*wire.HEADERS, *roce.HEADERS):
        if header.name != wire.OFFER.name:  # an OFFER's payload is not parsed
            assert compiled[header.name] == [(field.name, field.bits) for field in header.fields]


def test_control_plane_names_are_as_agreed(target: str) -> None:
    info = P4Schema(artefact(target).p4info)
    for name, keys in TABLES.items():
        assert [field.name for field in info.tables[name].match_fields] == keys, name
    for name, params in ACTIONS.items():
        found = {param.name: param.bitwidth for param in info.actions[name].params}
        assert found == params, name
    assert "heat_t" in {digest.alias for digest in info.digests}
    assert info.counters["resident_hits"].size == profiles[target].slots


def test_both_targets_have_one_control_plane() -> None:
    assert artefact("v1model").p4info.read_bytes() == artefact("bmv2").p4info.read_bytes()


def test_sizes_are_those_of_the_profile(target: str) -> None:
    arrays = {array["name"]: array["size"] for array in program(target)["register_arrays"]}
    sizes = {name.split(".")[-1]: size for name, size in arrays.items()}
    profile = profiles[target]
    assert sizes["cell_w0"] == profile.slots * wire.CHUNKS_PER_SEGMENT
    assert sizes["valid_low"] == profile.slots
    assert P4Schema(artefact(target).p4info).tables["egress_host"].size == MAX_PORTS
