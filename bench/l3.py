"""The router that switches are compared on, and how it is compiled: `python -m kvcast.bench.l3`.

Owns: the folder l3/ with source, artefacts and the hash that ties them. Must not know: what is
measured. Compiling needs p4c's `p4c-bm2-ss` (PATH or $KVCAST_P4C); using the artefacts does not.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from kvcast.p4.build import BuildError, Compilers, without_positions

FOLDER = Path(__file__).resolve().parent / "l3"
SOURCE = FOLDER / "l3_forward.p4"
PROGRAM = FOLDER / "l3_forward.json"
P4INFO = FOLDER / "l3_forward.p4info.txtpb"
RECORDED_HASH = FOLDER / "source.sha256"


def source_hash() -> str:
    """SHA-256 of the source, as 64 hex digits."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def compile_into(folder: Path) -> None:
    """Write the program and its P4Info; BuildError with the compiler's words."""
    compiler = Compilers.find().bmv2
    if compiler is None:
        raise BuildError("p4c-bm2-ss is not on PATH and KVCAST_P4C is not set")
    program = folder / PROGRAM.name
    command = [compiler, "--p4runtime-files", str(folder / P4INFO.name), "-o", str(program)]
    ran = subprocess.run(
        [*command, "--Wdisable=unused", "--Werror", SOURCE.name],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        raise BuildError(f"exit {ran.returncode}\n{ran.stderr}")
    tree = without_positions(json.loads(program.read_text(encoding="utf-8")))
    program.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    try:
        compile_into(FOLDER)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    RECORDED_HASH.write_text(source_hash() + "\n", encoding="ascii")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
