"""Compiles the P4 program: `python -m kvcast.p4.build`, or `make p4`.

Owns: which sources make which artefact, and the hash that ties them. Must not know: what the
program does. Runs in the checkout; needs p4c's BMv2 back end, `p4c-bm2-ss`, on PATH or in
$KVCAST_P4C. With ``--check`` it writes nothing and says whether the committed artefacts are
current: by the sources' hash everywhere, and by compiling again where the compiler is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvcast.protocol import p4gen

FOLDER = Path(__file__).resolve().parent
PROGRAMS = {"v1model": ("v1model",), "bmv2": ("bmv2", "v1model")}
"""By name of a program: the folders of its own files, that of its kvcast.p4 first."""
TARGETS = tuple(PROGRAMS)
HEADERS = FOLDER / "generated" / "kvcast_headers.p4"


class BuildError(Exception):
    """The program could not be compiled, or an artefact is not current."""


def sources(target: str) -> list[Path]:
    """Every file that goes into a target's program, in a fixed order."""
    shared = [HEADERS, *FOLDER.glob("*.p4"), *(FOLDER / "controls").glob("*.p4")]
    own = (path for folder in PROGRAMS[target] for path in (FOLDER / folder).glob("*.p4"))
    return sorted([*shared, *own])


def sources_hash(target: str) -> str:
    """SHA-256 over the names and bytes of the target's sources, as 64 hex digits."""
    digest = hashlib.sha256()
    for path in sources(target):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(FOLDER).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def find_compiler() -> str | None:
    """p4c's BMv2 back end, or None."""
    return shutil.which(os.environ.get("KVCAST_P4C", "p4c-bm2-ss"))


def compile_target(compiler: str, target: str, out: Path) -> None:
    """Write kvcast.json and kvcast.p4info.txtpb into `out`; BuildError with the compiler's words.

    Compiled from the p4 folder by a relative path, and without source positions, so that the
    result depends on nothing but the sources.
    """
    command = [
        compiler,
        "--p4runtime-files",
        str(out / "kvcast.p4info.txtpb"),
        "-o",
        str(out / "kvcast.json"),
        "--Wdisable=unused",  # the generated headers name all that the protocol knows
        "--Wdisable=shadow",  # an action's parameter may be called like one of the core's externs
        "--Werror",
        f"{target}/kvcast.p4",
    ]
    result = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}: exit {result.returncode}\n{result.stderr}")
    program = json.loads((out / "kvcast.json").read_text(encoding="utf-8"))
    text = json.dumps(without_positions(program), indent=1, sort_keys=False)
    (out / "kvcast.json").write_text(text + "\n", encoding="utf-8")


def without_positions(node: object) -> object:
    """The JSON tree without `source_info`, which serves debuggers and makes half of its size."""
    if isinstance(node, dict):
        return {key: without_positions(v) for key, v in node.items() if key != "source_info"}
    if isinstance(node, list):
        return [without_positions(item) for item in node]
    return node


def generated(target: str) -> Path:
    """The folder of a target's committed artefacts."""
    return FOLDER / "generated" / target


def build() -> None:
    """Regenerate the header file and compile every target in place."""
    p4gen.main(["--out", str(HEADERS)])
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("p4c-bm2-ss is not on PATH and KVCAST_P4C is not set: nothing compiled")
    for target in TARGETS:
        out = generated(target)
        out.mkdir(parents=True, exist_ok=True)
        compile_target(compiler, target, out)
        (out / "sources.sha256").write_text(sources_hash(target) + "\n", encoding="ascii")
        print(f"compiled {target}: {out}")


def check() -> bool:
    """Whether the artefacts are current; True if they were also compiled again. BuildError if not.

    Without a compiler only the hash is compared.
    """
    compiler = find_compiler()
    for target in TARGETS:
        recorded = (generated(target) / "sources.sha256").read_text(encoding="ascii").strip()
        if recorded != sources_hash(target):
            raise BuildError(f"{target}: the sources changed since it was compiled; run make p4")
        if compiler is None:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            compile_target(compiler, target, Path(scratch))
            for name in ("kvcast.json", "kvcast.p4info.txtpb"):
                if (Path(scratch) / name).read_bytes() != (generated(target) / name).read_bytes():
                    raise BuildError(f"{target}: {name} is not what {compiler} makes; run make p4")
    return compiler is not None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcast.p4.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    options = parser.parse_args(argv)
    try:
        if options.check:
            compiled = check()
            print("current" + ("" if compiled else " by hash (no p4c here to compile again)"))
        else:
            build()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
