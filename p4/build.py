"""Compiles the P4 program: `python -m kvcast.p4.build`, or `make p4`.

Owns: which sources make which artefact, and the hash that ties them. Must not know: what the
program does. Runs in the checkout; compiles what it has a compiler for, and says for what it has
none:

- v1model, bmv2: p4c's BMv2 back end, `p4c-bm2-ss` on PATH or in $KVCAST_P4C;
- tofino1, tofino2: p4c's Tofino back end and its assembler, `p4c-barefoot` and `bfas` on PATH or in
  $KVCAST_P4C_BAREFOOT and $KVCAST_BFAS.

For a Tofino the program that a switch loads is not kept: what is kept is its P4Info, the report of
what it takes, and what its stateful ALUs and tables of constants do (for the tests' model). ``--out
FOLDER`` keeps the compilers' output. A compiler's warning that `compiler_warnings` does not list
with a reason fails the build. With ``--check`` it writes nothing and says whether the committed
artefacts are current: by the sources' hash everywhere, and by compiling again where a compiler is
installed (a Tofino program only if it is named: it takes minutes); it names which it did for each.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcast.p4 import compiler_warnings, profiles, tofino_behaviour, tofino_report
from kvcast.protocol import p4gen

FOLDER = Path(__file__).resolve().parent
PROGRAMS = {
    "v1model": ("v1model",),
    "bmv2": ("bmv2", "v1model"),
    "tofino1": ("tna",),
    "tofino2": ("tna",),
}
"""By name of a program: the folders of its own files, that of its kvcast.p4 first."""
TARGETS = tuple(PROGRAMS)
HEADERS = FOLDER / "generated" / "kvcast_headers.p4"
P4INFO = "kvcast.p4info.txtpb"
SOURCES_HASH = "sources.sha256"
RESOURCES = "resources.json"
BEHAVIOUR = "behaviour.json"


class BuildError(Exception):
    """The program could not be compiled, or an artefact is not current."""


@dataclass(frozen=True)
class Tofino:
    """How p4c's Tofino back end calls a device, its architecture and its number."""

    device: str
    architecture: str
    number: int


TOFINOS = {"tofino1": Tofino("tofino", "tna", 1), "tofino2": Tofino("tofino2", "t2na", 2)}


@dataclass(frozen=True)
class Compilers:
    """What is installed; None for what is not."""

    bmv2: str | None
    tofino: str | None
    assembler: str | None

    @classmethod
    def find(cls) -> Compilers:
        def look(variable: str, name: str) -> str | None:
            return shutil.which(os.environ.get(variable, name))

        return cls(
            look("KVCAST_P4C", "p4c-bm2-ss"),
            look("KVCAST_P4C_BAREFOOT", "p4c-barefoot"),
            look("KVCAST_BFAS", "bfas"),
        )

    def missing_for(self, target: str) -> str:
        """What compiling a target lacks, in words; empty if nothing."""
        if target not in TOFINOS:
            return "" if self.bmv2 else "p4c-bm2-ss is not on PATH and KVCAST_P4C is not set"
        lacking = []
        if self.tofino is None:
            lacking.append("p4c-barefoot is not on PATH and KVCAST_P4C_BAREFOOT is not set")
        if self.assembler is None:
            lacking.append("bfas is not on PATH and KVCAST_BFAS is not set")
        return "; ".join(lacking)

    def compile(self, target: str, out: Path) -> list[str]:
        """Write the artefacts of a target into `out`; the known warnings that did not come.

        BuildError with the compiler's words, also for a warning that is not known.
        """
        lacking = self.missing_for(target)
        if lacking:
            raise BuildError(f"{target}: {lacking}")
        if target in TOFINOS:
            assert self.tofino is not None
            assert self.assembler is not None
            said = compile_tofino(self.tofino, self.assembler, target, out)
        else:
            assert self.bmv2 is not None
            said = compile_bmv2(self.bmv2, target, out)
        verdict = compiler_warnings.judge(target, compiler_warnings.found_in(said))
        if verdict.new:
            raise BuildError("\n".join((f"{target}: new warnings:", *verdict.new)))
        return verdict.gone


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


def _run(command: list[str]) -> str:
    """All that the command says; BuildError if it fails."""
    result = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}: exit {result.returncode}\n{result.stderr}")
    return result.stdout + result.stderr


def compile_bmv2(compiler: str, target: str, out: Path) -> str:
    """kvcast.json and the P4Info; what the compiler says.

    Compiled from the p4 folder by a relative path, and without source positions, so that the
    result depends on nothing but the sources.
    """
    said = _run(
        [
            compiler,
            "--p4runtime-files",
            str(out / P4INFO),
            "-o",
            str(out / "kvcast.json"),
            f"{target}/kvcast.p4",
        ]
    )
    program = json.loads((out / "kvcast.json").read_text(encoding="utf-8"))
    text = json.dumps(without_positions(program), indent=1, sort_keys=False)
    (out / "kvcast.json").write_text(text + "\n", encoding="utf-8")
    return said


def compile_tofino(compiler: str, assembler: str, target: str, out: Path) -> str:
    """The P4Info, the compiler's and the assembler's output, and the report on it; what both say.

    The report names a compiler's version, so that one can tell whose placement it is.
    """
    tofino = TOFINOS[target]
    include = Path(compiler).resolve().parent.parent / "share" / "p4c" / "p4include"
    p4info = out / "kvcast.p4info.txt"  # the suffix by which this compiler knows text
    said = _run(
        [
            compiler,
            f"--target={tofino.device}",
            f"--arch={tofino.architecture}",
            f"-D__TARGET_TOFINO__={tofino.number}",
            f"-DKVCAST_TOFINO{tofino.number}",
            *(["-I", str(include)] if include.is_dir() else []),
            "--p4runtime-force-std-externs",
            "--p4runtime-files",
            str(p4info),
            "-o",
            str(out),
            "tna/kvcast.p4",
        ]
    )
    p4info.rename(out / P4INFO)
    pipe = out / "pipe"
    said += _run([assembler, "--target", tofino.device, "-o", str(pipe), str(pipe / "kvcast.bfa")])
    context = tofino_report.load(pipe / "context.json")
    report = tofino_report.report(
        context, target, profiles[target].slots, str(context["compiler_version"])
    )
    (out / RESOURCES).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    assembly = (pipe / "kvcast.bfa").read_text(encoding="utf-8")
    behaviour = tofino_behaviour.behaviour(context, assembly)
    if not any(state["match"] for state in behaviour["parsers"]["ingress"]["states"].values()):
        raise BuildError(f"{compiler}: its parsers select nothing (p4lang/p4c#5753 mends that)")
    (out / BEHAVIOUR).write_text(one_a_line(behaviour), encoding="utf-8")
    return said


def one_a_line(behaviour: dict[str, Any]) -> str:
    """JSON with one line for each step, table or register, so that a difference can be read."""
    parts = []
    for name, items in behaviour.items():
        if isinstance(items, list):
            lines = [json.dumps(item) for item in items]
            parts.append(f"{json.dumps(name)}: [\n" + ",\n".join(lines) + "\n]")
        else:
            lines = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in items.items()]
            parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def without_positions(node: object) -> object:
    """The JSON tree without `source_info`, which serves debuggers and makes half of its size."""
    if isinstance(node, dict):
        return {key: without_positions(v) for key, v in node.items() if key != "source_info"}
    if isinstance(node, list):
        return [without_positions(item) for item in node]
    return node


def kept(target: str) -> tuple[str, ...]:
    """The files of a target that are committed, besides the hash."""
    return (P4INFO, RESOURCES, BEHAVIOUR) if target in TOFINOS else (P4INFO, "kvcast.json")


def generated(target: str) -> Path:
    """The folder of a target's committed artefacts."""
    return FOLDER / "generated" / target


def build(targets: Sequence[str] = TARGETS, keep: Path | None = None) -> None:
    """Regenerate the header file and compile in place every target that can be.

    `keep`: a folder that gets all that the compilers wrote.
    """
    p4gen.main(["--out", str(HEADERS)])
    compilers = Compilers.find()
    done = 0
    for target in targets:
        lacking = compilers.missing_for(target)
        if lacking:
            print(f"not compiled: {target} ({lacking})")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            work = Path(scratch) if keep is None else keep / target
            work.mkdir(parents=True, exist_ok=True)
            before = sources_hash(target)  # an edit while the compiler runs shows as not current
            _tell_gone(target, compilers.compile(target, work))
            out = generated(target)
            out.mkdir(parents=True, exist_ok=True)
            for name in kept(target):
                shutil.copyfile(work / name, out / name)
        (out / SOURCES_HASH).write_text(before + "\n", encoding="ascii")
        print(f"compiled {target}: {out}")
        done += 1
    if not done:
        raise BuildError("no compiler is installed: nothing compiled")


def _tell_gone(target: str, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        print(f"{target}: a known warning did not come, and may leave the list: {pattern}")


def check(targets: Sequence[str] | None = None) -> dict[str, str]:
    """Whether the artefacts are current; by target, why it was compared by hash only, empty for one
    that was compiled again. BuildError if one is not current.

    A Tofino's program is compiled again only if `targets` names it.
    """
    compilers = Compilers.find()
    by_hash = {}
    for target in TARGETS if targets is None else targets:
        recorded = (generated(target) / SOURCES_HASH).read_text(encoding="ascii").strip()
        if recorded != sources_hash(target):
            raise BuildError(f"{target}: the sources changed since it was compiled; run make p4")
        by_hash[target] = compilers.missing_for(target)
        if target in TOFINOS and targets is None:
            by_hash[target] = f"say --target {target}: it takes minutes"
        if by_hash[target]:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            _tell_gone(target, compilers.compile(target, Path(scratch)))
            for name in kept(target):
                if (Path(scratch) / name).read_bytes() != (generated(target) / name).read_bytes():
                    raise BuildError(f"{target}: {name} is not what compiling makes; run make p4")
    return by_hash


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.p4.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    parser.add_argument("--out", type=Path, help="folder that gets all that the compilers write")
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="only this one (may be repeated)"
    )
    options = parser.parse_args(argv)
    try:
        if options.check:
            for target, why in check(options.target).items():
                how = f"compared by hash only ({why})" if why else "compiled again"
                print(f"current: {target}, {how}")
        else:
            build(options.target or TARGETS, options.out)
    except (BuildError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
