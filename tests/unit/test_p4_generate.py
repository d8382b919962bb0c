"""The generated P4 is that of wire.py and definitions.py, and the compiled program uses it.

Oracle: the generator, and the header types that p4c wrote into its JSON (the codes:
test_p4_definitions.py). Cannot see: what the program does with a header.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvcast.p4 import artefact, build, generate
from kvcast.protocol.messages import wire


@pytest.mark.parametrize("name", generate.FILES)
def test_committed_files_are_current(name: str) -> None:
    committed = (generate.FOLDER / name).read_text(encoding="utf-8")
    assert committed == generate.generate(name), f"run `{generate.COMMAND}`"


@pytest.mark.parametrize("name", generate.FILES)
def test_first_line_names_the_command_and_a_source_that_exists(name: str) -> None:
    first = generate.generate(name).splitlines()[0]
    assert first.startswith("// Generated from ")
    assert generate.COMMAND in first
    assert (build.FOLDER.parent / first.split()[3]).is_file()


@pytest.mark.parametrize("name", generate.FILES)
def test_check_tells_a_stale_file_from_a_current_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deeper"
    assert generate.main(["--out", str(out), "--check"]) == 1
    assert generate.main(["--out", str(out)]) == 0
    assert generate.main(["--out", str(out), "--check"]) == 0
    capsys.readouterr()
    text = (out / name).read_text(encoding="utf-8")
    (out / name).write_text(text.replace("const bit<", "const bit<1", 1), encoding="utf-8")
    assert generate.main(["--out", str(out), "--check"]) == 1
    said = capsys.readouterr().err
    assert str(out / name) in said
    assert generate.COMMAND in said


def test_compiled_program_has_our_header_types() -> None:
    program = json.loads(artefact("v1model").json.read_bytes())
    types = {entry["name"]: entry["fields"] for entry in program["header_types"]}
    used = [header for header in wire.HEADERS if header.name in types]
    assert {"ethernet_h", "ipv4_h", "udp_h", "kvcast_h", "cell_h"} <= {h.name for h in used}
    for header in used:
        fields = [(name, bits) for name, bits, *_ in types[header.name]]
        assert fields == [(field.name, field.bits) for field in header.fields], header.name
