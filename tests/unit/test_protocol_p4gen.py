"""The generated P4 headers are those of wire.py, and the compiled program uses them.

Oracle: the generator, and the header types that p4c wrote into its JSON. Cannot see: what the
program does with a header.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvcast.protocol import p4gen
from kvcast.protocol.messages import wire

ROOT = Path(__file__).resolve().parents[2]
COMPILED = ROOT / "p4" / "generated" / "v1model" / "kvcast.json"


def test_committed_headers_are_current() -> None:
    committed = (ROOT / p4gen.DEFAULT_OUT).read_text(encoding="utf-8")
    assert committed == p4gen.generate(), f"run `{p4gen.COMMAND}`"


def test_first_line_names_the_command() -> None:
    first = p4gen.generate().splitlines()[0]
    assert "Generated" in first
    assert p4gen.COMMAND in first


def test_check_tells_a_stale_file_from_a_current_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deeper" / "headers.p4"
    assert p4gen.main(["--out", str(out), "--check"]) == 1
    assert p4gen.main(["--out", str(out)]) == 0
    assert p4gen.main(["--out", str(out), "--check"]) == 0
    out.write_text(out.read_text(encoding="utf-8").replace("19286", "1").replace("4b56", "1"))
    assert p4gen.main(["--out", str(out), "--check"]) == 1
    assert p4gen.COMMAND in capsys.readouterr().err


@pytest.mark.skipif(not COMPILED.is_file(), reason="the program has not been compiled here")
def test_compiled_program_has_our_header_types() -> None:
    compiled = json.loads(COMPILED.read_text(encoding="utf-8"))
    types = {entry["name"]: entry["fields"] for entry in compiled["header_types"]}
    used = [header for header in wire.HEADERS if header.name in types]
    assert {"ethernet_h", "ipv4_h", "udp_h", "kvcast_h", "cell_h"} <= {h.name for h in used}
    for header in used:
        fields = [(name, bits) for name, bits, *_ in types[header.name]]
        assert fields == [(field.name, field.bits) for field in header.fields], header.name
